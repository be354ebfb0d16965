"""What autograd saved of one block, on its way to host memory and back.

A parcel is one storage: views of it that autograd saved one by one travel together and are cut out
of it again. Autograd owns parcels, through what it saved; when it lets go of the last view, what is
left of the parcel, its host memory above all, is put on a list for whoever offloads to clear up.
Nothing here asks the device for anything when a parcel ends: that may be at any moment.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.memory.platform import read_this_host
from gracetune.offload.autosize import StallWindows
from gracetune.offload.copies import POISON, CopyStream
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from gracetune.offload.copies import PendingCopy, CopyEngine
    from gracetune.offload.stall_timer import StallWindow, StallTotals


MIN_SAVED_SHARE = 7 / 8
"""Of a storage: what autograd must have saved of it before it is worth sending."""
WINDOW = 3
"""Passes that are looked at before the distance changes."""
GAIN = 0.9
"""A longer distance must bring waiting below this part of what it was."""


class SavedView(NamedTuple):
    """What autograd keeps instead of a tensor: a view of a parcel."""

    storage: OffloadedStorage
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        """The tensor, in any memory that holds the parcel."""
        start = torch.empty(0, dtype=self.dtype, device=memory.device)
        return start.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class ReleasedStorage(NamedTuple):
    """Of a parcel that autograd has let go of."""

    host: Tensor
    device: Tensor | None
    """Memory that a copy may still be writing to."""
    pending_copy: PendingCopy | None
    """That copy, where nobody has waited for it."""


class OffloadedStorage:
    """One storage, on the device, in host memory, or both."""

    def __init__(self, call: BlockCall, tensor: Tensor, left: list[ReleasedStorage]) -> None:
        self.call = call
        self.nbytes = tensor.untyped_storage().nbytes()
        self.version = tensor._version
        self.original: Tensor | None = tensor.detach()
        """As autograd saved it; none once it has left. Shares the count of changes in place."""
        self.host: Tensor | None = None
        """None: not sent."""
        self.device: Tensor | None = None
        """Brought back, or on its way."""
        self.pending_copy: PendingCopy | None = None
        """None: waited for."""
        self.prefetched = False
        """Whether it was brought before it was asked for."""
        self.modified = False
        self._views: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
        self._covered = 0
        self._saved = 0
        self._unread = 0
        self._left = left

    def __del__(self) -> None:
        """Leave what others must not use yet to who clears up."""
        if self.host is not None:
            device = None if self.pending_copy is None else self.device
            self._left.append(ReleasedStorage(self.host, device, self.pending_copy))

    def add_view(self, tensor: Tensor) -> SavedView:
        """One more view."""
        saved = SavedView(
            self, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        )
        view = (saved.offset * tensor.element_size(), saved.size, saved.stride)
        if view not in self._views:
            self._views.add(view)
            self._covered += tensor.numel() * tensor.element_size()
        self._saved += 1
        return saved

    def is_worth_sending(self) -> bool:
        """Whether nearly all of the storage was saved; not again if it is sent."""
        return self.host is None and self._covered >= MIN_SAVED_SHARE * self.nbytes

    def was_modified(self) -> bool:
        """Whether someone wrote to it in place, so that host memory may hold either state."""
        if self.original is not None and self.original._version != self.version:
            self.modified = True
        return self.modified

    def begin_fetch(self, device: Tensor, arrival: PendingCopy, foreseen: bool) -> None:
        """It is on its way back."""
        self.device, self.pending_copy, self.prefetched = device, arrival, foreseen
        self._unread = self._saved

    def read(self) -> Tensor:
        """The memory that holds it; forgotten here with the last view, for a graph that is kept."""
        if self.original is not None:
            return self.original
        assert self.device is not None, "a parcel was read that nobody brought"
        if self.pending_copy is not None:
            self.pending_copy.wait(self.prefetched)
            self.pending_copy = None
        device = self.device
        self._unread -= 1
        if self._unread == 0:
            self.device = None
        return device


@dataclass(slots=True, eq=False)
class BlockCall:
    """One call of one block: what it saved, and which call came before."""

    previous: BlockCall | None
    """Of the same pass: backward comes to it next."""
    kept_storages: frozenset[int]
    """Storages that are not sent: weights, and inputs that other blocks have too."""
    only_storages: frozenset[int] | None
    """The only storages that are; none: all others."""
    sent: list[weakref.ref[OffloadedStorage]] = field(default_factory=list)
    """Those sent, in order."""
    outgoing: list[tuple[weakref.ref[OffloadedStorage], Tensor]] = field(default_factory=list)
    """Device memory that copies may still read."""
    last_copy: PendingCopy | None = None
    """The last of these copies."""
    nbytes: int = 0
    by_storage: dict[tuple[int, int], OffloadedStorage] = field(default_factory=dict)
    """While the block runs: by storage and state."""

    def sent(self, parcel: OffloadedStorage, arrival: PendingCopy) -> None:
        """A parcel is on its way out."""
        assert parcel.original is not None, "a parcel was sent that is away"
        reference = weakref.ref(parcel)
        self.sent.append(reference)
        self.outgoing.append((reference, parcel.original))
        self.last_copy = arrival
        self.nbytes += parcel.nbytes

    def offloaded(self) -> Iterator[OffloadedStorage]:
        """Parcels that are in host memory alone, the first that backward reads first."""
        for reference in reversed(self.sent):
            parcel = reference()
            if parcel is not None and parcel.original is None and parcel.device is None:
                yield parcel

    def release_outgoing(self) -> list[Tensor]:
        """Let go of what has left: device memory that nobody copies from any more."""
        if self.last_copy is not None:
            self.last_copy.wait(prefetched=True)
            self.last_copy = None
        gone, self.outgoing = self.outgoing, []
        for reference, _ in gone:
            parcel = reference()
            if parcel is not None:
                parcel.was_modified()
                parcel.original = None
        return [original for _, original in gone]


class PrefetchDistance:
    """How many blocks are brought ahead: one more while backward waits and that helps."""

    def __init__(self, ahead: int, limit_nbytes: int | None, begin: Callable[[], StallWindow]) -> None:
        self.blocks = ahead
        self._limit_nbytes = limit_nbytes
        """Device memory for blocks brought ahead; none: the distance stays as it is."""
        self._laps = StallWindows(begin, WINDOW)
        self._waited_before: float | None = None
        """What a window waited before the distance was last changed; none: it was not."""
        self._settled = limit_nbytes is None

    def training_pass(self, block_nbytes: int) -> str:
        """At the start of a pass: how the distance changed."""
        lap = None if self._settled else self._laps.start_pass()
        if lap is None:
            return ""
        assert self._limit_nbytes is not None
        if self._waited_before is not None and lap.stalled_s > GAIN * self._waited_before:
            self._settled = True
            self.blocks -= 1
            return f"{self.blocks} again: more did not help, the link is busy all the time"
        self._waited_before = None
        if lap.late == 0 or (self.blocks + 1) * block_nbytes > self._limit_nbytes:
            return ""
        self._waited_before = lap.stalled_s
        self.blocks += 1
        return f"{self.blocks}: backward waited {lap.stalled_s / WINDOW * 1e3:.1f} ms a pass"


# ------------------------------------------------------------------------------------------
# The way of parcels: host memory to put them in, copies out and back, and when memory is let go.
#
# All order comes from the computing stream; the host waits for nothing. Device memory that leaves
# is
# held until computing has waited for its copy, so that the allocator may then give it out again.
# Memory that comes back is taken on the computing stream, which its copy waits for. Host memory is
# given out again when computing has waited for its last reader; all who write to it are on one
# lane.
# Which parcels go, and when, is for others to decide.


ALIGNMENT = 256
"""Of each buffer, in bytes."""
HOST_RESERVE = 2 * GIB
"""Of host memory, left to others where no limit is given."""


def available_host_nbytes(limit_nbytes: int | None, taken_nbytes: int) -> int:
    """What is left of a limit; without one, of what the host and our container have."""
    if limit_nbytes is not None:
        return limit_nbytes - taken_nbytes
    return read_this_host().usable_bytes() - HOST_RESERVE


class OffloadCopies:
    """Parcels on their way; `poison` fills memory with NaN when it is given up."""

    def __init__(self, mover: CopyEngine, pool: HostPool, poison: bool) -> None:
        self.sent = self.sent_nbytes = 0
        self.fetched_nbytes = self.on_demand = 0
        self.released: list[ReleasedStorage] = []
        """Where parcels leave what is to be cleared up."""
        self._mover = mover
        self._pool = pool
        self._poison = poison
        self._flights: list[BlockCall] = []
        """Calls whose memory is leaving, oldest first."""

    def send(self, parcel: OffloadedStorage) -> bool:
        """On its way out; false: the host has no memory left."""
        assert parcel.original is not None, "a parcel was sent that is away"
        host = self._pool.take(parcel.nbytes)
        if host is None:
            return False
        parcel.host = host
        arrival = self._mover.copy(host, bytes_of(parcel.original), False, CopyStream.ACTIVATIONS_OUT)
        parcel.call.sent(parcel, arrival)
        self.sent += 1
        self.sent_nbytes += parcel.nbytes
        return True

    def fetch(self, parcel: OffloadedStorage, prefetched: bool) -> None:
        """On its way back; `foreseen`: before anyone asked for it."""
        assert parcel.host is not None, "a parcel is away that was never sent"
        device = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._mover.device)
        arrival = self._mover.copy(device, parcel.host, self._poison, CopyStream.ACTIVATIONS_IN)
        parcel.begin_fetch(device, arrival, prefetched)
        self.on_demand += not prefetched
        self.fetched_nbytes += parcel.nbytes

    def track_outgoing(self, call: BlockCall) -> None:
        """A call is over; its memory is leaving."""
        if call.outgoing:
            self._flights.append(call)

    def release_outgoing(self, keep: Collection[BlockCall] = ()) -> None:
        """Let device memory go, but for that of some calls."""
        for call in [call for call in self._flights if call not in keep]:
            self._flights.remove(call)
            gone = call.release_outgoing()
            while gone:
                self._spoil(gone.pop())

    def reclaim_host_buffers(self) -> None:
        """Take host memory back from parcels that autograd is through with."""
        while self.released:
            host, device, arrival = self.released.pop()
            if arrival is not None:
                arrival.wait(prefetched=True)
            if device is not None:
                self._spoil(device)
            if self._poison:
                nans = torch.full(
                    (len(host),), POISON, dtype=torch.uint8, device=self._mover.device
                )
                self._mover.copy(host, nans, False, CopyStream.ACTIVATIONS_OUT).wait(prefetched=True)
            self._pool.put_back(host)

    def waits(self) -> tuple[StallTotals, StallTotals]:
        """Out and back; waits for the device itself."""
        return self._mover.stalls(CopyStream.ACTIVATIONS_OUT), self._mover.stalls(CopyStream.ACTIVATIONS_IN)

    def lap(self) -> StallWindow:
        """Of the way back, from here on."""
        return self._mover.begin_stall_window(CopyStream.ACTIVATIONS_IN)

    def close(self) -> None:
        """Wait for what is under way and give host memory up."""
        self.release_outgoing()
        self.reclaim_host_buffers()
        self._pool.close()

    def _spoil(self, memory: Tensor) -> None:
        """Device memory is given up; what others still hold is theirs."""
        if self._poison and has_one_owner(memory):
            bytes_of(memory).fill_(POISON)


class HostPool:
    """Buffers cut from slabs of host memory, which is taken as needed and kept.

    `room` tells what the host can still give, from what was taken. Buffers that came back are given
    out again for the same size; when all are back, slabs are cut anew, so that other shapes need no
    more memory.
    """

    def __init__(self, mover: CopyEngine, slab_nbytes: int, room: Callable[[int], int]) -> None:
        self.nbytes = 0
        """In all slabs."""
        self._mover = mover
        self._slab_nbytes = slab_nbytes
        self._room = room
        self._slabs: list[Tensor] = []
        self._cut: list[int] = []
        """How much of each slab was given out."""
        self._free: dict[int, list[Tensor]] = {}
        self._lent = 0

    def take(self, nbytes: int) -> Tensor | None:
        """A buffer; none where the host has no memory left."""
        whole = -(-nbytes // ALIGNMENT) * ALIGNMENT
        free = self._free.get(whole)
        buffer = free.pop() if free else self._cut_one(whole)
        if buffer is None:
            return None
        self._lent += 1
        return buffer[:nbytes]

    def put_back(self, buffer: Tensor) -> None:
        """Whoever read it has been waited for; whoever writes to it does so before the next."""
        whole = -(-len(buffer) // ALIGNMENT) * ALIGNMENT
        self._lent -= 1
        self._free.setdefault(whole, []).append(buffer.as_strided((whole,), (1,)))
        if self._lent == 0:
            self._free.clear()
            self._cut = [0] * len(self._slabs)

    def close(self) -> None:
        """Give all memory up."""
        for slab in self._slabs:
            self._mover.free_host(slab)
        self._slabs, self._cut = [], []
        self._free.clear()
        self.nbytes = 0

    def room(self) -> int:
        """What more slabs may take."""
        return self._room(self.nbytes)

    def _cut_one(self, nbytes: int) -> Tensor | None:
        for index, slab in enumerate(self._slabs):
            start = self._cut[index]
            if start + nbytes <= len(slab):
                self._cut[index] += nbytes
                return slab[start : start + nbytes]
        room = self.room()
        if nbytes > room:
            return None
        slab = self._mover.allocate_pinned(max(nbytes, min(self._slab_nbytes, room)))
        self._slabs.append(slab)
        self._cut.append(nbytes)
        self.nbytes += len(slab)
        return slab[:nbytes]


# ------------------------------------------------------------------------------------------
# Storages under tensors: what they are worth, whose they are, and which ones blocks share.


def is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether its values are bytes of one storage on the device, and nothing more."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return False
    if tensor.layout is not torch.strided or tensor.device != device:
        return False
    return not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def has_one_owner(tensor: Tensor) -> bool:
    """Whether no other tensor is made of the same storage."""
    storage = tensor.untyped_storage()
    tensor_and_storage = 2
    return int(torch._C._storage_Use_Count(storage._cdata)) == tensor_and_storage


def weights_of(block: nn.Module, min_nbytes: int) -> frozenset[int]:
    """Storages of parameters and buffers, as far as these are large."""
    return frozenset(
        tensor.untyped_storage()._cdata
        for module in block.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.layout is torch.strided and tensor.nbytes >= min_nbytes
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


def storages_in(value: Any) -> list[StorageWeakRef]:
    """The storage of each of these tensors. While it is referred to, no other has its number."""
    return [
        StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        for tensor in tensors_in(value)
        if tensor.layout is torch.strided
    ]


class SharedInputs:
    """Inputs that a block has in common with the block before: rotary tables, text, time.

    The first block of a pass has none before it. Which of its inputs the second had too is known
    from the pass before, by their places.
    """

    def __init__(self) -> None:
        self._before: tuple[nn.Module, list[StorageWeakRef]] | None = None
        self._places: dict[nn.Module, frozenset[int]] = {}

    def begin(self) -> None:
        """A pass begins."""
        self._before = None

    def of(self, block: nn.Module, inputs: list[StorageWeakRef]) -> frozenset[int]:
        """The storages, by number."""
        if self._before is None:
            places = self._places.get(block, frozenset())
        else:
            other, theirs = self._before
            places = _places(inputs, theirs)
            self._places[other] = _places(theirs, inputs)
        self._before = block, inputs
        return frozenset(ref.cdata for place, ref in enumerate(inputs) if place in places)


def _places(mine: list[StorageWeakRef], theirs: list[StorageWeakRef]) -> frozenset[int]:
    known = set(theirs)
    return frozenset(place for place, storage in enumerate(mine) if storage in known)
