"""Call the compiled helper bulk_copy.c, which copies many files or many buffers in a single call.

The build of the package compiles bulk_copy.c to a library next to this file. Without a C compiler
the package still installs: Python then reads files one by one, and torch concatenates buffers.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.data.source import FileRange
    from gracetune.memory.shared_memory import SegmentWriter

ABI = 2
"""Version of the functions in bulk_copy.c; a compiled library with another version is not used."""
LIBRARY = "_bulk_copy.so"
SOURCE = Path(__file__).with_name("bulk_copy.c")
_WHOLE = -1
FAILED = -1
"""Length that `BulkCopier` returns for a file that it did not copy: the file cannot be read, or its
size is not the expected one."""


@dataclass(frozen=True, slots=True)
class MissingBulkCopier:
    """Result of `find_bulk_copier` if the compiled library of bulk_copy.c cannot be used."""

    reason: str
    """Why the compiled library cannot be used, for a notice to the user."""


class BulkCopier:
    """Python interface of the compiled bulk_copy.c: copies many files or buffers in one call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        int64_array = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
        self._gather = library.gracetune_bulk_copy
        self._gather.argtypes = (
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int64,
            int64_array,
            int64_array,
            int64_array,
        )
        self._gather.restype = ctypes.c_int64

        self._sizes = library.gracetune_sizes
        self._sizes.argtypes = (ctypes.c_char_p, ctypes.c_int64, int64_array)
        self._sizes.restype = None

        self._join = library.gracetune_join
        self._join.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
        self._join.restype = None

    def sizes(self, paths: Sequence[str]) -> list[int]:
        """Return the length of each file in bytes; 0 if its `stat` fails."""
        found = np.zeros(len(paths), np.int64)
        self._sizes(_encode_paths(paths), len(paths), found)
        sizes: list[int] = found.tolist()
        return sizes

    def join(self, target: int, pieces: Sequence[int], nbytes: int) -> None:
        """Concatenate buffers of `nbytes` bytes each into the buffer `target`.

        All buffers are given by their addresses, and the caller must keep them alive. The GIL is
        released once for the whole call.
        """
        self._join(target, array("Q", pieces).tobytes(), len(pieces), nbytes)

    def __call__(
        self, segment: SegmentWriter, places: Sequence[FileRange], sizes: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Copy files of known sizes into shared memory, to the end of `segment`.

        Returns two lists: the address of each copy, and its length in bytes or FAILED. Raises
        ArenaFullError if there is no memory left.
        """
        paths = _encode_paths([place.path for place in places])
        offsets = np.array(
            [_WHOLE if nbytes is None else offset for _, offset, nbytes in places], np.int64
        )
        nbytes = np.array(sizes, np.int64)
        starts = np.zeros(len(places), np.int64)

        def write(descriptor: int) -> int:
            done: int = self._gather(descriptor, paths, len(places), offsets, nbytes, starts)
            if done < 0:
                raise OSError(-done, os.strerror(-done))
            return done

        first = segment.write_with(write)
        return [first + start for start in starts.tolist()], nbytes.tolist()


def _encode_paths(paths: Sequence[str]) -> bytes:
    """Join the paths into one byte string, in which each ends with a NUL byte."""
    joined = os.fsencode("\0".join(paths)) + b"\0"
    assert joined.count(b"\0") == max(1, len(paths)), "a path with a NUL in it"
    return joined


def find_bulk_copier(folder: Path = SOURCE.parent) -> BulkCopier | MissingBulkCopier:
    """Load the compiled library of bulk_copy.c, or return the reason why that is not possible."""
    path = folder / LIBRARY
    if not path.exists():
        return MissingBulkCopier(
            "it was not built, because no C compiler was found when gracetune was installed"
        )
    try:
        library = ctypes.CDLL(str(path))
        found = str(library.gracetune_bulk_copy_abi())
    except (OSError, AttributeError) as error:
        return MissingBulkCopier(f"it cannot be loaded: {error}")
    if found != str(ABI):
        return MissingBulkCopier(f"it has version {found}, but this gracetune needs {ABI}")
    return BulkCopier(library)
