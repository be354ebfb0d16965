"""The device memory of a ring: slots, what is in them, and who still holds it.

A slot is given out as an alias with a storage of its own, a lease, and not as itself: that storage
ends with the last tensor made from it, wherever that went, and only then may the slot be filled
again. By then every kernel that reads it is queued, and copies wait for those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gracetune.stream.movers import Arrival, CopyEngine

PRUNE_FROM = 32


@dataclass(slots=True, eq=False)
class Slot:
    """Room for the weights of any one block."""

    memory: Tensor
    block: int | None = None
    """What is in it, or on its way there."""
    arrival: Arrival | None = None
    _leases: list[StorageWeakRef] = field(default_factory=list)

    def lend(self) -> Tensor:
        """The bytes under a storage of their own, whose end can be seen."""
        if len(self._leases) >= PRUNE_FROM:
            self.held()
        alias = dlpack.from_dlpack(dlpack.to_dlpack(self.memory))  # type: ignore[attr-defined]
        self._leases.append(StorageWeakRef(alias.untyped_storage()))  # type: ignore[no-untyped-call]
        return alias

    def held(self) -> bool:
        """Whether any tensor made of a lease is alive."""
        self._leases = [
            lease
            for lease in self._leases
            if not lease.expired()  # type: ignore[no-untyped-call]
        ]
        return bool(self._leases)


class Lease(dict["torch.dtype", "Tensor"]):
    """A slot's bytes as numbers of any type, made when first asked for; held while this lives.

    What a sampler has asked for first may be what backward asks for next, and must do for it too.
    """

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        with torch.inference_mode(False):
            self._bytes = slot.lend()

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            numbers = self[dtype] = self._bytes.view(dtype)
        return numbers


class Slots:
    """As many slots as were asked for, and more only while all of those are held."""

    def __init__(self, mover: CopyEngine, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        """Of each."""
        self.count = count
        """As many as were asked for; there may be more for a while."""
        self._mover = mover
        self._slots: list[Slot] = []
        self._by_address: dict[int, Slot] = {}
        self._by_block: dict[int, Slot] = {}
        for _ in range(count):
            self.grow()

    def __len__(self) -> int:
        return len(self._slots)

    def holding(self, block: int) -> Slot | None:
        """The slot that a block is in, or on its way to."""
        return self._by_block.get(block)

    def at(self, address: int) -> Slot | None:
        """The slot whose memory, and so every lease of it, begins here."""
        return self._by_address.get(address)

    def blocks(self) -> list[int]:
        """What is in the slots."""
        return sorted(self._by_block)

    def vacate(self, slot: Slot) -> None:
        """Forget what is in a slot: it will be overwritten."""
        assert not slot.held(), f"block {slot.block} is still in use and would be overwritten"
        if slot.block is not None:
            del self._by_block[slot.block]
            slot.block = None

    def put(self, slot: Slot, block: int, arrival: Arrival) -> None:
        """A block is on its way into a slot."""
        slot.block = block
        slot.arrival = arrival
        self._by_block[block] = slot

    def least_needed(
        self, ranks: Mapping[int, int], in_use: int | None, sooner_than: int
    ) -> Slot | None:
        """Of the slots that nobody holds, the one whose block comes last, after `sooner_than`.

        `ranks` tells how soon blocks come. The block in use may be between two of its kernels,
        with no lease alive: its slot is never taken.
        """
        best, best_rank = None, sooner_than
        for slot in self._slots:
            if slot.block is None:
                return slot
            rank = ranks.get(slot.block, len(ranks))
            if rank > best_rank and slot.block != in_use and not slot.held():
                best, best_rank = slot, rank
        return best

    def grow(self) -> Slot:
        """One slot more, empty."""
        with torch.inference_mode(False):  # it outlives the pass that made it necessary
            slot = Slot(self._mover.device_memory(self.nbytes))
        self._slots.append(slot)
        self._by_address[slot.memory.data_ptr()] = slot
        return slot

    def resize(self, count: int) -> None:
        """Ask for another number, between passes: more are there at once, fewer when nobody holds
        them.
        """
        while len(self._slots) < count:
            self.grow()
        self.count = count
        self.trim()

    def trim(self) -> None:
        """Give slots beyond the number asked for back, as far as nobody holds them."""
        for slot in self._slots[self.count :]:
            if not slot.held():
                self.vacate(slot)
                del self._by_address[slot.memory.data_ptr()]
                self._slots.remove(slot)

    def clear(self) -> None:
        """Let all memory go; what is lent lives on until its holder is done."""
        self._slots.clear()
        self._by_address.clear()
        self._by_block.clear()
