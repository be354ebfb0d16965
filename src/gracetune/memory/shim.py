"""The compiled shim: where it is, how it is built, and its functions as Python sees them.

`shim.c` says what it does. The package's build compiles it beside this file; a machine without a C
compiler installs all the same, and pools there say why they are not to be had.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gracetune.errors import GracetuneError, RunFailedError

ABI = 1
"""Raised together with the one in shim.c whenever the two must change together."""
LIBRARY = "_shim.so"
SOURCE = Path(__file__).with_name("shim.c")
COMPILE_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
LINK_FLAGS = ("-ldl", "-lpthread")
DRIVER_LIBRARY = "libcuda.so.1"
_ERROR_BYTES = 512
_BUSY = -6


class AccessPattern(Enum):
    """Where a pool's segments like to live; the forks' names, the shim's numbers."""

    GPU_FIRST = "gpu_first"
    """On the device, and brought there at once."""
    BALANCED = "balanced"
    """Where they are touched first; the device may read them anywhere."""
    CPU_FIRST = "cpu_first"
    """With the host; the device reads them in place."""

    @property
    def number(self) -> int:
        """The shim's number for it."""
        return list(AccessPattern).index(self)


class ShimError(GracetuneError):
    """The shim cannot be built, loaded or opened."""


@dataclass(frozen=True, slots=True)
class ShimCounters:
    """What a pool's slot did; the order is the C struct's."""

    live_bytes: int
    live_segments: int
    peak_bytes: int
    cap_bytes: int
    allocations: int
    frees: int
    denied: int
    """Segments refused by the cap."""
    denied_bytes: int
    failed: int
    """Segments refused by the driver."""
    hints: int
    """Advice given and prefetches made for new segments."""
    failed_hints: int
    failed_frees: int
    leaked_bytes: int
    """Bytes the driver did not take back; they stay counted as live."""
    foreign_frees: int
    last_code: int
    """The driver's latest code that was not success; 0: there was none."""


@dataclass(frozen=True, slots=True)
class MissingShim:
    """There is no shim here, and why."""

    reason: str


class Shim:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise ShimError(
                f"the memory shim {path} cannot be loaded: {error}. Build it again on this "
                "machine: pip install --force-reinstall --no-deps gracetune."
            ) from error
        try:
            found = str(library.gracetune_shim_abi())
        except AttributeError:
            found = "none"
        if found != str(ABI):
            raise ShimError(
                f"the memory shim {path} has version {found}, this gracetune needs {ABI}. "
                "Build it again: pip install --force-reinstall --no-deps gracetune."
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
        """Take a slot for one pool; its number names the two functions torch is given."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        slot: int = self._library.gracetune_shim_open(
            driver_library.encode(), pattern.number, cap_bytes, error, _ERROR_BYTES
        )
        if slot < 0:
            raise ShimError(
                f"no managed pool with {driver_library}: {error.value.decode(errors='replace')} "
                f"(code {slot}). `gracetune diagnose` shows what the driver can do."
            )
        return slot

    def close(self, slot: int) -> bool:
        """Give a slot back; false while torch still holds segments of it."""
        code: int = self._library.gracetune_shim_close(slot)
        assert code in (0, _BUSY), f"slot {slot} is not open"
        return code == 0

    def set_cap(self, slot: int, cap_bytes: int) -> None:
        """Move the cap; what is held above a lower one stays until torch gives it back."""
        code = self._library.gracetune_shim_set_cap(slot, cap_bytes)
        assert code == 0, f"slot {slot} is not open"

    def counters(self, slot: int) -> ShimCounters:
        """One consistent reading."""
        count = len(ShimCounters.__slots__)
        values = (ctypes.c_uint64 * count)()
        known = self._library.gracetune_shim_counters(slot, values, count)
        assert known == count, f"slot {slot}: {known} counters, not {count}"
        return ShimCounters(*values)


def find_shim(folder: Path = SOURCE.parent) -> Shim | MissingShim:
    """The shim beside this file, or why there is none."""
    path = folder / LIBRARY
    if not path.exists():
        return MissingShim(
            "the memory shim was not built: there was no C compiler when gracetune was installed. "
            "Install one (gcc or clang), then pip install --force-reinstall --no-deps gracetune"
        )
    return Shim(path)


def build_shim(target: Path, compiler: str = "cc", source: Path = SOURCE) -> Path:
    """Compile the shim by hand, for a source tree that was never installed."""
    command = [compiler, *COMPILE_FLAGS, str(source), "-o", str(target), *LINK_FLAGS]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ShimError(
            f"the memory shim needs a C compiler and {compiler!r} is not on the PATH. "
            "Install gcc or clang."
        ) from error
    except subprocess.CalledProcessError as error:
        raise RunFailedError(f"{' '.join(command)} failed:\n{error.stderr}") from error
    return target
