"""Many files into the arena, or many pieces of memory side by side, by one call of a helper in C.

`gather.c` says how. The package's build compiles it beside this file; a machine without a C
compiler installs all the same: files come one by one there, by Python, and memory by torch.
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
    from gracetune.memory.shared_arena import SegmentWriter

ABI = 2
"""Raised together with the one in gather.c whenever the two must change together."""
LIBRARY = "_gather.so"
SOURCE = Path(__file__).with_name("gather.c")
_WHOLE = -1
ODD = -1
"""The length of a file that is not as it was, or cannot be copied so."""


@dataclass(frozen=True, slots=True)
class MissingGather:
    """There is no helper here, and why."""

    reason: str


class Gather:
    """The loaded helper."""

    def __init__(self, library: ctypes.CDLL) -> None:
        wide = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
        self._gather = library.gracetune_gather
        self._gather.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, wide, wide, wide)
        self._gather.restype = ctypes.c_int64

        self._sizes = library.gracetune_sizes
        self._sizes.argtypes = (ctypes.c_char_p, ctypes.c_int64, wide)
        self._sizes.restype = None

        self._join = library.gracetune_join
        self._join.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
        self._join.restype = None

    def sizes(self, paths: Sequence[str]) -> list[int]:
        """The length of each file; 0 for one that cannot be asked."""
        found = np.zeros(len(paths), np.int64)
        self._sizes(_joined(paths), len(paths), found)
        sizes: list[int] = found.tolist()
        return sizes

    def join(self, target: int, pieces: Sequence[int], nbytes: int) -> None:
        """Copy pieces of memory of one length behind each other; all are given by their addresses,
        and whoever calls keeps them alive. Python's lock is let go once, not for each."""
        self._join(target, array("Q", pieces).tobytes(), len(pieces), nbytes)

    def __call__(
        self, hand: SegmentWriter, places: Sequence[FileRange], sizes: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Copy files of known lengths into the arena: where each lies, and how long it is or ODD.

        ArenaFullError: there is no memory left.
        """
        paths = _joined([place.path for place in places])
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

        first = hand.write_with(write)
        return [first + start for start in starts.tolist()], nbytes.tolist()


def _joined(paths: Sequence[str]) -> bytes:
    """Each with a NUL at its end."""
    joined = os.fsencode("\0".join(paths)) + b"\0"
    assert joined.count(b"\0") == max(1, len(paths)), "a path with a NUL in it"
    return joined


def find_gather(folder: Path = SOURCE.parent) -> Gather | MissingGather:
    """The helper beside this file, or why there is none."""
    path = folder / LIBRARY
    if not path.exists():
        return MissingGather(
            "it was not built: there was no C compiler when gracetune was installed"
        )
    try:
        library = ctypes.CDLL(str(path))
        found = str(library.gracetune_gather_abi())
    except (OSError, AttributeError) as error:
        return MissingGather(f"it cannot be loaded: {error}")
    if found != str(ABI):
        return MissingGather(f"it has version {found}, and this gracetune needs {ABI}")
    return Gather(library)
