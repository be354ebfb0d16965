"""What autograd saved of one block, on its way to host memory and back.

A parcel is one storage: views of it that autograd saved one by one travel together and are cut out
of it again. Autograd owns parcels, through what it saved; when it lets go of the last view, what is
left of the parcel, its host memory above all, is put on a list for whoever offloads to clear up.
Nothing here asks the device for anything when a parcel ends: that may be at any moment.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.stream.laps import PassWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gracetune.stream.movers import Arrival
    from gracetune.stream.waits import Lap

MOSTLY = 7 / 8
"""Of a storage: what autograd must have saved of it before it is worth sending."""
WINDOW = 3
"""Passes that are looked at before the distance changes."""
GAIN = 0.9
"""A longer distance must bring waiting below this part of what it was."""


class SavedTensor(NamedTuple):
    """What autograd keeps instead of a tensor: a view of a parcel."""

    parcel: OffloadedTensor
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """The tensor, in any memory that holds the parcel."""
        start = torch.empty(0, dtype=self.dtype, device=memory.device)
        return start.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class Remains(NamedTuple):
    """Of a parcel that autograd has let go of."""

    host: Tensor
    device: Tensor | None
    """Memory that a copy may still be writing to."""
    arrival: Arrival | None
    """That copy, where nobody has waited for it."""


class OffloadedTensor:
    """One storage, on the device, in host memory, or both."""

    def __init__(self, call: OffloadedCall, tensor: Tensor, left: list[Remains]) -> None:
        self.call = call
        self.nbytes = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.original: Tensor | None = tensor.detach()
        """As autograd saved it; none once it has left. Shares the count of changes in place."""
        self.host: Tensor | None = None
        """None: not sent."""
        self.device: Tensor | None = None
        """Brought back, or on its way."""
        self.arrival: Arrival | None = None
        """None: waited for."""
        self.foreseen = False
        """Whether it was brought before it was asked for."""
        self.changed = False
        self._views: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
        self._covered = 0
        self._saved = 0
        self._unread = 0
        self._left = left

    def __del__(self) -> None:
        """Leave what others must not use yet to who clears up."""
        if self.host is not None:
            device = None if self.arrival is None else self.device
            self._left.append(Remains(self.host, device, self.arrival))

    def save(self, tensor: Tensor) -> SavedTensor:
        """One more view."""
        saved = SavedTensor(
            self, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        )
        view = (saved.offset * tensor.element_size(), saved.size, saved.stride)
        if view not in self._views:
            self._views.add(view)
            self._covered += tensor.numel() * tensor.element_size()
        self._saved += 1
        return saved

    def worth_sending(self) -> bool:
        """Whether nearly all of the storage was saved; not again if it is sent."""
        return self.host is None and self._covered >= MOSTLY * self.nbytes

    def was_changed(self) -> bool:
        """Whether someone wrote to it in place, so that host memory may hold either state."""
        if self.original is not None and self.original._version != self.version:
            self.changed = True
        return self.changed

    def brought(self, device: Tensor, arrival: Arrival, foreseen: bool) -> None:
        """It is on its way back."""
        self.device, self.arrival, self.foreseen = device, arrival, foreseen
        self._unread = self._saved

    def read(self) -> Tensor:
        """The memory that holds it; forgotten here with the last view, for a graph that is kept."""
        if self.original is not None:
            return self.original
        assert self.device is not None, "a parcel was read that nobody brought"
        if self.arrival is not None:
            self.arrival.wait(self.foreseen)
            self.arrival = None
        device = self.device
        self._unread -= 1
        if self._unread == 0:
            self.device = None
        return device


@dataclass(slots=True, eq=False)
class OffloadedCall:
    """One call of one block: what it saved, and which call came before."""

    before: OffloadedCall | None
    """Of the same pass: backward comes to it next."""
    stays: frozenset[int]
    """Storages that are not sent: weights, and inputs that other blocks have too."""
    only: frozenset[int] | None
    """The only storages that are; none: all others."""
    parcels: list[weakref.ref[OffloadedTensor]] = field(default_factory=list)
    """Those sent, in order."""
    leaving: list[tuple[weakref.ref[OffloadedTensor], Tensor]] = field(default_factory=list)
    """Device memory that copies may still read."""
    left: Arrival | None = None
    """The last of these copies."""
    nbytes: int = 0
    gathered: dict[tuple[int, int], OffloadedTensor] = field(default_factory=dict)
    """While the block runs: by storage and state."""

    def sent(self, parcel: OffloadedTensor, arrival: Arrival) -> None:
        """A parcel is on its way out."""
        assert parcel.original is not None, "a parcel was sent that is away"
        reference = weakref.ref(parcel)
        self.parcels.append(reference)
        self.leaving.append((reference, parcel.original))
        self.left = arrival
        self.nbytes += parcel.nbytes

    def away(self) -> Iterator[OffloadedTensor]:
        """Parcels that are in host memory alone, the first that backward reads first."""
        for reference in reversed(self.parcels):
            parcel = reference()
            if parcel is not None and parcel.original is None and parcel.device is None:
                yield parcel

    def land(self) -> list[Tensor]:
        """Let go of what has left: device memory that nobody copies from any more."""
        if self.left is not None:
            self.left.wait(ahead=True)
            self.left = None
        gone, self.leaving = self.leaving, []
        for reference, _ in gone:
            parcel = reference()
            if parcel is not None:
                parcel.was_changed()
                parcel.original = None
        return [original for _, original in gone]


class Distance:
    """How many blocks are brought ahead: one more while backward waits and that helps."""

    def __init__(self, ahead: int, limit_nbytes: int | None, begin: Callable[[], Lap]) -> None:
        self.ahead = ahead
        self._limit_nbytes = limit_nbytes
        """Device memory for blocks brought ahead; none: the distance stays as it is."""
        self._laps = PassWindow(begin, WINDOW)
        self._waited_before: float | None = None
        """What a window waited before the distance was last changed; none: it was not."""
        self._settled = limit_nbytes is None

    def observe(self, block_nbytes: int) -> str:
        """At the start of a pass: how the distance changed."""
        lap = None if self._settled else self._laps.last()
        if lap is None:
            return ""
        assert self._limit_nbytes is not None
        if self._waited_before is not None and lap.seconds > GAIN * self._waited_before:
            self._settled = True
            self.ahead -= 1
            return f"{self.ahead} again: more did not help, the link is busy all the time"
        self._waited_before = None
        if lap.late == 0 or (self.ahead + 1) * block_nbytes > self._limit_nbytes:
            return ""
        self._waited_before = lap.seconds
        self.ahead += 1
        return f"{self.ahead}: backward waited {lap.seconds / WINDOW * 1e3:.1f} ms a pass"
