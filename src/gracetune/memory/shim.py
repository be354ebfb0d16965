"""Python bindings of shim.c, the C library that gives torch's allocator managed memory.

Wheels contain the compiled library next to this file. An installation from source compiles it; if
there is no C compiler, `find_shim` returns the reason why managed pools are unavailable.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gracetune.errors import GracetuneError, RunFailedError

ABI = 1
"""Version of the interface to shim.c, which defines the same number. Raise both together."""
LIBRARY = "_shim.so"
SOURCE = Path(__file__).with_name("shim.c")
COMPILE_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
LINK_FLAGS = ("-ldl", "-lpthread")
DRIVER_LIBRARY = "libcuda.so.1"
_ERROR_BYTES = 512
_BUSY = -6


class AccessPattern(Enum):
    """Preferred location of a pool's managed memory; the values of `uvm_access_pattern`."""

    GPU_FIRST = "gpu_first"
    """Prefer device memory, and prefetch newly allocated memory to it."""
    BALANCED = "balanced"
    """No preferred location: pages appear where they are first touched."""
    CPU_FIRST = "cpu_first"
    """Prefer host memory; the device reads it in place."""

    @property
    def number(self) -> int:
        """The number that shim.c uses for the pattern."""
        return list(AccessPattern).index(self)


class ShimError(GracetuneError):
    """Raised if the C library for managed memory (shim.c) cannot be built, loaded or opened."""


@dataclass(frozen=True, slots=True)
class ShimCounters:
    """Allocation counters of one pool of managed memory, in the order of the C struct."""

    live_bytes: int
    live_segments: int
    peak_bytes: int
    cap_bytes: int
    allocations: int
    frees: int
    denied: int
    """Number of allocations refused because the pool would have exceeded its maximum size."""
    denied_bytes: int
    failed: int
    """Number of allocations that the CUDA driver refused."""
    hints: int
    """Number of cuMemAdvise calls and prefetches for newly allocated memory."""
    failed_hints: int
    failed_frees: int
    leaked_bytes: int
    """Bytes that the CUDA driver failed to free; `live_bytes` still includes them."""
    foreign_frees: int
    """Number of calls to free a pointer that the pool had not allocated."""
    last_code: int
    """The CUDA driver's last error code; 0 if there was none."""


@dataclass(frozen=True, slots=True)
class MissingShim:
    """The reason why the C library for managed memory (shim.c) is not available."""

    reason: str


class Shim:
    """The C library (shim.c) through which torch's allocator gets managed memory."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise ShimError(
                f"The memory shim {path} cannot be loaded: {error}. Install the wheel "
                "for this machine again: pip install --force-reinstall --no-deps WHEEL."
            ) from error
        try:
            found = str(library.gracetune_shim_abi())
        except AttributeError:
            found = "none"
        if found != str(ABI):
            raise ShimError(
                f"The memory shim {path} has version {found}, but gracetune needs {ABI}. "
                "Install the wheel again: pip install --force-reinstall --no-deps WHEEL."
            )
        library.gracetune_shim_open.argtypes = (
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        library.gracetune_shim_set_cap.argtypes = (ctypes.c_int, ctypes.c_uint64)
        library.gracetune_shim_counters.argtypes = (
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_int,
        )
        self.path = path
        self._library = library

    def open(
        self, pattern: AccessPattern, cap_bytes: int, driver_library: str = DRIVER_LIBRARY
    ) -> int:
        """Reserve one of the library's numbered slots for a pool and return its number.

        torch calls the C functions `gracetune_alloc_N` and `gracetune_free_N` of slot N.
        """
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        slot: int = self._library.gracetune_shim_open(
            driver_library.encode(), pattern.number, cap_bytes, error, _ERROR_BYTES
        )
        if slot < 0:
            raise ShimError(
                f"A managed pool cannot be opened with {driver_library}: "
                f"{error.value.decode(errors='replace')} (code {slot}). "
                "`gracetune diagnose` shows what the driver can do."
            )
        return slot

    def close(self, slot: int) -> bool:
        """Release a pool's slot, whose number must not be used any more.

        Return False if torch still holds memory of the pool. The slot is then released with that.
        """
        code: int = self._library.gracetune_shim_close(slot)
        assert code in (0, _BUSY), f"slot {slot} is not open"
        return code == 0

    def set_cap(self, slot: int, cap_bytes: int) -> None:
        """Change the maximum size of a pool. Lowering it frees no allocated memory."""
        code = self._library.gracetune_shim_set_cap(slot, cap_bytes)
        assert code == 0, f"slot {slot} is not open"

    def counters(self, slot: int) -> ShimCounters:
        """Return a consistent snapshot of the counters of a pool's slot."""
        count = len(ShimCounters.__slots__)
        values = (ctypes.c_uint64 * count)()
        known = self._library.gracetune_shim_counters(slot, values, count)
        assert known == count, f"slot {slot}: {known} counters, not {count}"
        return ShimCounters(*values)


def find_shim(folder: Path = SOURCE.parent) -> Shim | MissingShim:
    """Load the compiled C library (shim.c) from `folder`, or return why there is none."""
    path = folder / LIBRARY
    if not path.exists():
        return MissingShim(
            "the memory shim was not built, because there was no C compiler when gracetune was "
            "installed from source; install a wheel, or install gcc or clang and then run "
            "pip install --force-reinstall --no-deps with the same source"
        )
    return Shim(path)


def build_shim(target: Path, compiler: str = "cc", source: Path = SOURCE) -> Path:
    """Compile shim.c to `target`, for a source tree that was not installed."""
    command = [compiler, *COMPILE_FLAGS, str(source), "-o", str(target), *LINK_FLAGS]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ShimError(
            f"The memory shim needs a C compiler, but {compiler!r} is not on the PATH. "
            "Install gcc or clang."
        ) from error
    except subprocess.CalledProcessError as error:
        raise RunFailedError(f"{' '.join(command)} failed:\n{error.stderr}") from error
    return target
