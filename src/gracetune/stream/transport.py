"""The way of parcels: host memory to put them in, copies out and back, and when memory is let go.

All order comes from the computing stream; the host waits for nothing. Device memory that leaves is
held until computing has waited for its copy, so that the allocator may then give it out again.
Memory that comes back is taken on the computing stream, which its copy waits for. Host memory is
given out again when computing has waited for its last reader; all who write to it are on one lane.
Which parcels go, and when, is for others to decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gracetune.memory.machine import read_this_host
from gracetune.stream.movers import POISON, CopyStream
from gracetune.stream.storages import bytes_of, has_one_owner
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from gracetune.stream.movers import CopyEngine
    from gracetune.stream.parcels import OffloadedCall, OffloadedTensor, Remains
    from gracetune.stream.waits import Lap, Waits

ALIGNMENT = 256
"""Of each buffer, in bytes."""
HOST_RESERVE = 2 * GIB
"""Of host memory, left to others where no limit is given."""


def room_for(limit_nbytes: int | None, taken_nbytes: int) -> int:
    """What is left of a limit; without one, of what the host and our container have."""
    if limit_nbytes is not None:
        return limit_nbytes - taken_nbytes
    return read_this_host().room_bytes() - HOST_RESERVE


class OffloadCopies:
    """Parcels on their way; `poison` fills memory with NaN when it is given up."""

    def __init__(self, mover: CopyEngine, pool: HostPool, poison: bool) -> None:
        self.sent = self.sent_nbytes = 0
        self.brought_nbytes = self.on_demand = 0
        self.left: list[Remains] = []
        """Where parcels leave what is to be cleared up."""
        self._mover = mover
        self._pool = pool
        self._poison = poison
        self._flights: list[OffloadedCall] = []
        """Calls whose memory is leaving, oldest first."""

    def send(self, parcel: OffloadedTensor) -> bool:
        """On its way out; false: the host has no memory left."""
        assert parcel.original is not None, "a parcel was sent that is away"
        host = self._pool.take(parcel.nbytes)
        if host is None:
            return False
        parcel.host = host
        arrival = self._mover.copy(host, bytes_of(parcel.original), False, CopyStream.OUT)
        parcel.call.sent(parcel, arrival)
        self.sent += 1
        self.sent_nbytes += parcel.nbytes
        return True

    def bring(self, parcel: OffloadedTensor, foreseen: bool) -> None:
        """On its way back; `foreseen`: before anyone asked for it."""
        assert parcel.host is not None, "a parcel is away that was never sent"
        device = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._mover.device)
        arrival = self._mover.copy(device, parcel.host, self._poison, CopyStream.BACK)
        parcel.brought(device, arrival, foreseen)
        self.on_demand += not foreseen
        self.brought_nbytes += parcel.nbytes

    def depart(self, call: OffloadedCall) -> None:
        """A call is over; its memory is leaving."""
        if call.leaving:
            self._flights.append(call)

    def land(self, but: Collection[OffloadedCall] = ()) -> None:
        """Let device memory go, but for that of some calls."""
        for call in [call for call in self._flights if call not in but]:
            self._flights.remove(call)
            gone = call.land()
            while gone:
                self._spoil(gone.pop())

    def clear_up(self) -> None:
        """Take host memory back from parcels that autograd is through with."""
        while self.left:
            host, device, arrival = self.left.pop()
            if arrival is not None:
                arrival.wait(ahead=True)
            if device is not None:
                self._spoil(device)
            if self._poison:
                nans = torch.full(
                    (len(host),), POISON, dtype=torch.uint8, device=self._mover.device
                )
                self._mover.copy(host, nans, False, CopyStream.OUT).wait(ahead=True)
            self._pool.put_back(host)

    def waits(self) -> tuple[Waits, Waits]:
        """Out and back; waits for the device itself."""
        return self._mover.waits(CopyStream.OUT), self._mover.waits(CopyStream.BACK)

    def lap(self) -> Lap:
        """Of the way back, from here on."""
        return self._mover.lap(CopyStream.BACK)

    def close(self) -> None:
        """Wait for what is under way and give host memory up."""
        self.land()
        self.clear_up()
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
            self._mover.let_go(slab)
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
        slab = self._mover.landing_memory(max(nbytes, min(self._slab_nbytes, room)))
        self._slabs.append(slab)
        self._cut.append(nbytes)
        self.nbytes += len(slab)
        return slab[:nbytes]
