"""What the memory layer asks of a GPU driver, whichever stands behind it.

`cuda_driver` calls the real one, `simulated` keeps pages, residency and a clock of its own.
Pointers are plain integers; a place is a device ordinal or `HOST`. Calls return the driver's code,
0 being success: who called decides what a code means.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

HOST = -1
"""The place that is not a device."""


class Code(IntEnum):
    """The driver's codes that this package makes or tells apart, by their CUDA numbers."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_DEVICE = 101
    NOT_SUPPORTED = 801


class PointerKind(Enum):
    """What the driver knows about an address."""

    UNKNOWN = "unknown"
    """Plain host memory, or nothing at all."""
    HOST = "host"
    """Page-locked host memory."""
    DEVICE = "device"
    MANAGED = "managed"


class Advice(Enum):
    """The driver's advice verbs, by their CUDA numbers."""

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


@dataclass(frozen=True, slots=True)
class RangeState:
    """What was asked of a managed range: the proof that a hint took."""

    preferred: int | None
    """A place, or none."""
    last_prefetch: int | None
    read_mostly: bool
    accessed_by: tuple[int, ...]


class Driver(Protocol):
    """The verbs. A test builds a simulated one by hand; nothing below asks which it is."""

    def attribute(self, name: str, device: int) -> int | None:
        """A device attribute by its CUDA name in snake case; none where the driver has no such."""
        ...

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of the device."""
        ...

    def allocate_managed(self, nbytes: int) -> tuple[int, int]:
        """A managed range: (code, pointer)."""
        ...

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """A page-locked host range: (code, pointer)."""
        ...

    def free(self, pointer: int) -> int:
        """Give back what one of the two above handed out."""
        ...

    def pointer_kind(self, pointer: int) -> PointerKind:
        """What sort of memory this address is in."""
        ...

    def advise(self, pointer: int, nbytes: int, advice: Advice, place: int) -> int:
        """Tell where a managed range likes to live."""
        ...

    def prefetch(self, pointer: int, nbytes: int, place: int, stream: int) -> int:
        """Move a managed range, in stream order."""
        ...

    def discard(self, pointer: int, nbytes: int, stream: int) -> int:
        """Drop the contents of a managed range without writing them back."""
        ...

    def range_state(self, pointer: int, nbytes: int) -> RangeState:
        """What was last asked of a managed range."""
        ...
