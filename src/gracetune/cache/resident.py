"""How much of a file the kernel's page cache holds, without having it read anything."""

from __future__ import annotations

import ctypes
import errno
import os

from gracetune.errors import CacheError

_CACHESTAT = 451
"""The number of this system call on every architecture; Linux has it from 6.5 on."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """In pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class PageCacheResidency:
    """Asks the kernel; one that has no answer is not asked again."""

    def __init__(self) -> None:
        self._ask = ctypes.CDLL(None, use_errno=True).syscall
        self.is_known = True

    def holds(self, descriptor: int, offset: int, nbytes: int) -> bool:
        """Whether all of these bytes are in memory; no where the kernel cannot tell."""
        if not nbytes:
            return True
        if not self.is_known:
            return False
        counts = _Counts()
        asked = _Range(offset, nbytes)
        if self._ask(_CACHESTAT, descriptor, ctypes.byref(asked), ctypes.byref(counts), 0):
            code = ctypes.get_errno()
            if code not in _UNKNOWN:
                raise CacheError(f"The page cache cannot be asked: {os.strerror(code)}.")
            self.is_known = False
            return False
        first, last = offset // _PAGE, (offset + nbytes - 1) // _PAGE
        return int(counts.cached) > last - first
