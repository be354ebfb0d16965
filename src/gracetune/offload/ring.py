"""The ring: frozen weights live in host memory and pass through a few slots on the device.

Before a block runs, its weights are put where its modules look them up, as views of a slot; after
it they are taken away again. Meanwhile the blocks that come next are fetched. A weight that
autograd saves for backward is remembered as a reference to its block and fetched again then.

Nobody reads a slot that is being overwritten: a slot is not filled again while any tensor made of
it lives (`slots`), a copy waits for the kernels queued before it, and what reads the new contents
waits for the copy (`movers`). If all slots are held the ring grows rather than take one.

The hooks are on modules; no model code is changed. One thread at a time may run the model, and a
block's kernels must be on the stream that is current when it is called. Which blocks are streamed
is for others to decide.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

from gracetune.events.types import Notice
from gracetune.offload.autosize import RingAutosizer
from gracetune.offload.copies import StreamError
from gracetune.offload.host_weights import fill, lay_out, load_resident_weights, put_back, seen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from gracetune.offload.copies import Arrival, CopyEngine


LEAST_SLOTS = 2
DEFAULT_SLOTS = 3
"""The block in use, the one after it, and one being filled."""


@dataclass(frozen=True, slots=True)
class RingCounters:
    """What the ring has done since it was opened."""

    fetches: int
    fetched_nbytes: int
    on_time: int
    """Uses whose weights were there, or arrived before the device got to them."""
    late: int
    """Uses whose weights were asked for ahead, and still waited for."""
    on_demand: int
    """Uses whose weights nobody had asked for."""
    surprises: int
    """Uses in another order than in the passes before."""
    waited_s: float
    """How long computing stood still for weights."""
    slots: int
    extra_slots: int
    """How often a slot was added because all others were held."""
    slot_nbytes: int
    host_nbytes: int


class Reference(NamedTuple):
    """A weight that autograd saved: where its values are found again."""

    block: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


def stream_weights(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mover: CopyEngine,
    emit: Callable[[Notice], None],
    slots: int = DEFAULT_SLOTS,
    poison: bool = False,
    parts: Sequence[nn.Module] | None = None,
) -> Ring:
    """Stream the frozen weights of some blocks of a model, given in the order forward uses them.

    All else of the model is brought to the device. `poison` fills a slot with NaN before it is
    filled with weights: for finding who reads too late. `parts` are the modules of which each
    call is a pass, in the order of their blocks: two experts, say; none: the model itself.
    """
    if slots < LEAST_SLOTS:
        raise StreamError(
            f"a ring of {slots} slot(s) was asked for; one holds the block in use and another what "
            f"comes next, so at least {LEAST_SLOTS} are needed. Ask for {DEFAULT_SLOTS}."
        )
    schedule = FetchSchedule(len(blocks), (0,) if parts is None else _starts(parts, blocks))
    return Ring(model, parts or [model], blocks, mover, emit, schedule, slots, poison)


def _starts(parts: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> list[int]:
    """The number of each part's first block."""
    inside = [set(part.modules()) for part in parts]
    owners = [[block in modules for modules in inside] for block in blocks]
    starts = []
    for number in range(len(parts)):
        own = [index for index, owner in enumerate(owners) if owner[number]]
        if not own or own != list(range(own[0], own[0] + len(own))):
            raise StreamError(
                f"part {number} ({type(parts[number]).__name__}) has no blocks to stream, or they "
                "do not stand side by side in the list. Give the blocks part by part."
            )
        starts.append(own[0])
    return starts


class Ring:
    """Frozen weights on their way; made by `stream_weights`, ended by `close`."""

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module],
        blocks: Sequence[nn.Module],
        mover: CopyEngine,
        emit: Callable[[Notice], None],
        schedule: FetchSchedule,
        slots: int,
        poison: bool,
    ) -> None:
        self._regions = lay_out(model, blocks)
        self._mover = mover
        self._emit = emit
        self._poison = poison
        self._host = fill(self._regions, mover.host_memory)
        self._seen = {
            place.parameter: seen(place.parameter)
            for region in self._regions
            for place in region.places
        }
        """As parameters must still be: whoever changes them means something that we do not do."""
        load_resident_weights(model, self._regions, mover.device)
        self._slots = Slots(mover, max(region.nbytes for region in self._regions), slots)
        self._growth: RingAutosizer | None = None
        self._schedule = schedule
        self._in_use: int | None = None
        """The block whose weights were asked for last."""
        self._lease: Lease | None = None
        """Its slot, while it is in use: what is made of weights one by one has this one lease."""
        self._calls = [0] * len(blocks)
        """How deep in each block we are: one may call itself."""
        self._passes: list[ExitStack] = []
        self._fetches = self._fetched_nbytes = 0
        self._foreseen = self._on_demand = self._extra_slots = 0
        self._told_surprise = False
        self._closed = False
        self._indices = {block: index for index, block in enumerate(blocks)}
        self._hooks = self._hook(parts, blocks)

    def __deepcopy__(self, memo: object) -> Ring:
        """Refused: a copied model would have hooks that feed the first one's modules."""
        raise StreamError(
            "a model cannot be copied while its weights are streamed. Copy it before "
            "stream_weights(), or close() the ring first."
        )

    def counters(self) -> RingCounters:
        """What was done so far. Waits until the device has got to the last use."""
        waits = self._mover.waits()
        return RingCounters(
            fetches=self._fetches,
            fetched_nbytes=self._fetched_nbytes,
            on_time=self._foreseen - waits.late,
            late=waits.late,
            on_demand=self._on_demand,
            surprises=self._schedule.surprises,
            waited_s=waits.seconds,
            slots=len(self._slots),
            extra_slots=self._extra_slots,
            slot_nbytes=self._slots.nbytes,
            host_nbytes=sum(len(piece) for piece in self._host),
        )

    def grow_within(self, nbytes: int) -> None:
        """Add slots while steps wait for weights, in so much more device memory."""
        useful = sum(bool(region.places) for region in self._regions)
        self._growth = RingAutosizer(self._slots, self._mover, useful, nbytes, self._emit)

    def give_back(self) -> bool:
        """Go on with the slots that were asked for; false where none was added to them."""
        self._rest()
        return self._growth is not None and self._growth.give_back()

    def pack(self, tensor: Tensor) -> Tensor | Reference:
        """For saved-tensor hooks: a streamed weight as a reference, all else as it is."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor
        slot = self._slots.at(tensor.untyped_storage().data_ptr())
        if slot is None:
            return tensor
        assert slot.block is not None, "a lease of an empty slot"
        offset = int(tensor.storage_offset())
        return Reference(slot.block, tensor.dtype, offset, tensor.shape, tensor.stride())

    def unpack(self, saved: Tensor | Reference) -> Tensor:
        """The other half: the weight, on the device again."""
        if not isinstance(saved, Reference):
            return saved
        if self._closed:
            raise StreamError(
                "backward reached a weight whose ring is closed. Run backward before close(), or "
                "compute the loss again."
            )
        numbers = self._use(saved.block)[saved.dtype]
        return numbers.as_strided(saved.size, saved.stride, saved.offset)

    def streams(self, block: nn.Module) -> bool:
        """Whether a block's weights pass through this ring."""
        return block in self._indices and not self._closed

    @contextmanager
    def weights_of(self, block: nn.Module) -> Iterator[None]:
        """For whoever calls a block's forward and not the block: its weights are in place."""
        index = self._indices[block]
        self._block_begins(index)
        try:
            yield
        finally:
            self._block_ends(index)

    def close(self, bring: bool = True) -> None:
        """Take the hooks away and put all weights onto the device, where they must fit.

        Not to `bring` them leaves them in host memory, and a model that cannot run as it is.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        while self._passes:
            self._passes.pop().close()
        self._rest()
        self._slots.clear()
        if bring:
            put_back(self._regions, self._mover.device)
        self._host.clear()
        self._mover.release()

    def _hook(
        self, parts: Sequence[nn.Module], blocks: Sequence[nn.Module]
    ) -> list[RemovableHandle]:
        hooks = []
        for number, part in enumerate(parts):
            begins = partial(self._pass_begins, number)
            hooks.append(part.register_forward_pre_hook(begins, prepend=True))
            hooks.append(part.register_forward_hook(self._pass_ends, always_call=True))
        for index, block in enumerate(blocks):
            if self._regions[index].places:
                hooks.append(
                    block.register_forward_pre_hook(
                        partial(self._block_begins, index), prepend=True
                    )
                )
                hooks.append(
                    block.register_forward_hook(partial(self._block_ends, index), always_call=True)
                )
        return hooks

    def _pass_begins(self, part: int, *_: object) -> None:
        training = torch.is_grad_enabled()
        self._schedule.begin(Pass.TRAIN if training else Pass.SAMPLE, part)
        self._rest()
        self._slots.trim()
        if self._growth is not None:
            begins = self._growth.observe if training else self._growth.sampling
            begins()
        self._fetch_ahead()
        saving = ExitStack()
        if training:  # checkpoints inside the model put hooks of their own above these
            saving.enter_context(saved_tensors_hooks(self.pack, self.unpack))
        self._passes.append(saving)

    def _pass_ends(self, *_: object) -> None:
        if self._passes:  # none where beginning failed
            self._passes.pop().close()

    def _block_begins(self, index: int, *_: object) -> None:
        if self._calls[index] == 0:
            self._check_untouched(index)
            lease = self._use(index)
            for place in self._regions[index].places:
                weight = place.view(lease[place.dtype])
                for lookup, name in place.homes:
                    lookup[name] = weight
        self._calls[index] += 1

    def _block_ends(self, index: int, *_: object) -> None:
        if self._calls[index] == 0:  # beginning failed
            return
        self._calls[index] -= 1
        if self._calls[index] == 0:
            for place in self._regions[index].places:
                for lookup, name in place.homes:
                    lookup[name] = place.parameter

    def _check_untouched(self, index: int) -> None:
        for place in self._regions[index].places:
            parameter = place.parameter
            if parameter.requires_grad:
                raise StreamError(
                    f"weight {place.name!r} is to be trained, but it is streamed and would not "
                    "change. Choose what is trained before stream_weights(), or close() the ring."
                )
            in_place = seen(parameter) == self._seen[parameter]
            for lookup, name in place.homes:
                in_place &= lookup[name] is parameter
            if not in_place:
                raise StreamError(
                    f"weight {place.name!r} was moved, replaced or written to while it is "
                    "streamed. close() the ring before model.to(), or before loading, merging or "
                    "exchanging weights."
                )

    def _rest(self) -> None:
        """No block is in use: a pass is over, or begins."""
        self._in_use = self._lease = None

    def _use(self, index: int) -> Lease:
        """The weights of a block, for whatever is queued next."""
        if index == self._in_use:
            assert self._lease is not None, f"block {index} is in use, and nothing holds it"
            return self._lease
        self._take_note(index)
        self._in_use, self._lease = index, None
        slot = self._slots.holding(index)
        foreseen = slot is not None
        if slot is None:
            slot = slot_to_refill(self._slots, self._ranks(), index) or self._one_more_slot()
            self._fetch(index, slot)
        self._foreseen += foreseen
        self._on_demand += not foreseen
        assert slot.arrival is not None, f"block {index} has a slot but was never fetched"
        slot.arrival.wait(foreseen)
        self._lease = Lease(slot)
        self._fetch_ahead()
        return self._lease

    def _fetch_ahead(self) -> None:
        for block, slot in prefetches(self._slots, self._ranks(), self._in_use):
            self._fetch(block, slot)

    def _fetch(self, index: int, slot: Slot) -> None:
        source = self._host[index]
        self._slots.vacate(slot)
        self._slots.put(slot, index, self._mover.copy(slot.memory, source, self._poison))
        self._fetches += 1
        self._fetched_nbytes += len(source)

    def _ranks(self) -> dict[int, int]:
        """Return the streamed blocks still to come, each with its rank: 0 is needed next."""
        upcoming = (block for block in self._schedule.ahead() if self._regions[block].places)
        return {block: rank for rank, block in enumerate(upcoming)}

    def _take_note(self, index: int) -> None:
        expected = self._schedule.expected()
        if self._schedule.used(index) or self._told_surprise:
            return
        self._told_surprise = True
        self._warn(
            f"the model uses its blocks in another order than before: block {index} where "
            f"{'none' if expected is None else expected} was expected. Weights that were not "
            "foreseen are fetched on demand, and the step waits for them."
        )

    def _one_more_slot(self) -> Slot:
        if self._extra_slots == 0:
            self._warn(
                f"all {len(self._slots)} slots of the ring hold weights that are in use (blocks "
                f"{', '.join(map(str, self._slots.blocks()))}), so one was added. Someone keeps "
                "weights beyond their block: a graph that was not made by calling the model, or "
                "one checkpoint around several blocks. Ask for more slots, or checkpoint each "
                "block."
            )
        self._extra_slots += 1
        return self._slots.grow()

    def _warn(self, text: str) -> None:
        self._emit(Notice(text, level="warning", fallback=True))


# ------------------------------------------------------------------------------------------
# The device memory of a ring: slots, what is in them, and who still holds it.
#
# A slot is given out as an alias with a storage of its own, a lease, and not as itself: that
# storage
# ends with the last tensor made from it, wherever that went, and only then may the slot be filled
# again. By then every kernel that reads it is queued, and copies wait for those.


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

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

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


# Fetch policy: which block goes into which slot, decided over block numbers alone. The planner's
# simulator (plan/simulate.py) calls the same two functions, so its fetches are the ring's.
#
# `ranks` maps each upcoming block to its position in the order of use (0 is needed next), soonest
# first. A block without a rank is not needed any more.


class SlotState(Protocol):
    """The part of a slot that the fetch policy reads."""

    block: int | None
    """The block that the slot holds; None: it is empty."""

    def held(self) -> bool:
        """Return True while a live tensor aliases the slot, which forbids overwriting it."""
        ...


SlotT = TypeVar("SlotT", bound=SlotState)


def slot_to_refill(
    slots: Iterable[SlotT], ranks: Mapping[int, int], in_use: int | None, rank: int = -1
) -> SlotT | None:
    """Return the slot that a block of this rank may overwrite, or None.

    An empty slot comes first, then the free slot whose block is needed last. A block that is needed
    sooner than `rank` is never evicted, nor is the block in use: it may be between two of its
    kernels, with no live tensor that aliases its slot.
    """
    best, best_rank = None, rank
    for slot in slots:
        if slot.block is None:
            return slot
        slot_rank = ranks.get(slot.block, len(ranks))
        if slot_rank > best_rank and slot.block != in_use and not slot.held():
            best, best_rank = slot, slot_rank
    return best


def prefetches(
    slots: Collection[SlotT], ranks: Mapping[int, int], in_use: int | None
) -> Iterator[tuple[int, SlotT]]:
    """Yield (block, slot) for each block to fetch now, soonest needed first.

    The caller assigns each block to its slot before it asks for the next pair.
    """
    present = {slot.block for slot in slots}
    for block, rank in ranks.items():
        if block in present:
            continue
        slot = slot_to_refill(slots, ranks, in_use, rank)
        if slot is None:
            return
        present.discard(slot.block)
        present.add(block)
        yield block, slot


# ------------------------------------------------------------------------------------------
# Which block is needed next, from the order in which earlier passes used them.
#
# Pure bookkeeping over block numbers: no tensors, no clocks. A pass is one call of the model with
# the backward that follows it. Its order is guessed for the first pass of a kind, learnt from that,
# and held against every later one. Uses of the same block in a row count as one. Of several models
# that share the blocks' memory, such as two experts, a pass runs one.


LONGEST_PASS = 64
"""Uses a block that are remembered: what is longer was never announced as several passes."""


class Pass(Enum):
    """What a call of the model leads to."""

    TRAIN = "train"
    """Forward, then backward; with recomputation each block still comes once on the way back."""
    SAMPLE = "sample"
    """Forward alone."""


class FetchSchedule:
    """The expected order of each kind of pass, and where in it we are."""

    def __init__(self, num_blocks: int, starts: Sequence[int] = (0,)) -> None:
        """`starts` has the first block of each model."""
        self.surprises = 0
        """Uses that a learnt order did not have next."""
        self._orders: dict[tuple[Pass, int], list[int]] = {}
        for model, (start, end) in enumerate(pairwise([*starts, num_blocks])):
            there = list(range(start, end))
            self._orders[Pass.TRAIN, model] = there + there[-2::-1]
            self._orders[Pass.SAMPLE, model] = there
        self._learnt: set[tuple[Pass, int]] = set()
        self._kind = (Pass.TRAIN, 0)
        self._seen: list[int] = []
        self._longest = LONGEST_PASS * num_blocks
        self._next = 0

    def begin(self, kind: Pass, model: int = 0) -> None:
        """A model is called: learn from the pass that is over, expect the first block."""
        self._learn()
        self._kind = (kind, model)
        self._seen = []
        self._next = 0

    def expected(self) -> int | None:
        """The next block, if the pass goes as the ones before; none: it should be over."""
        order = self._orders[self._kind]
        return order[self._next] if self._next < len(order) else None

    def used(self, block: int) -> bool:
        """Take note of a use; false where another was expected from a learnt order."""
        if len(self._seen) < self._longest:
            self._seen.append(block)
        as_expected = block == self.expected()
        if as_expected:
            self._next += 1
        else:
            self._find(block)
        if as_expected or self._kind not in self._learnt:
            return True
        self.surprises += 1
        return False

    def ahead(self) -> list[int]:
        """Every block still to come, this pass and the next of its kind, soonest first."""
        order = self._orders[self._kind]
        return list(dict.fromkeys(order[self._next :] + order))

    def _find(self, block: int) -> None:
        """Go on from the nearest place that has this block: one was skipped, or repeated."""
        order = self._orders[self._kind]
        places = [place for place, other in enumerate(order) if other == block]
        if places:  # of two as near, the later: more passes skip a block than repeat one
            self._next = 1 + min(places, key=lambda place: (abs(place - self._next), -place))

    def _learn(self) -> None:
        if not self._seen or len(self._seen) == self._longest:
            return
        order = self._orders[self._kind]
        if self._seen != order[: len(self._seen)]:  # a pass without its backward teaches nothing
            self._orders[self._kind] = self._seen
        self._learnt.add(self._kind)
