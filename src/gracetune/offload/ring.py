"""Stream frozen weights from host memory through a ring of device slots.

A slot is device memory for the weights of one block. Forward hooks bind a block's parameters to
views of its slot just before the block runs, and restore them afterwards. While the block computes,
the blocks that come next are fetched into free slots. Where autograd saves a streamed weight for
backward, saved-tensor hooks keep a `WeightReference` instead, and backward fetches the block again,
in reverse order.

Example with three slots: block 3 is fetched into the slot of block 0 while block 1 computes. C is
the compute stream, H the weight copy stream, `ready` and `done` are CUDA events, and time runs to
the right:

    C:  block 0 | record ready | block 1 ---------- | block 2 ---------- | wait done | block 3
    H:                           wait ready | copy block 3 | record done

Two rules keep a slot from being overwritten while it is read:

1. A slot is refilled only when no live tensor aliases it (`Slot.is_in_use`). By then every kernel
   that reads the old weights (block 0) is queued on C, before `ready`.
2. The copy waits for `ready`, and the kernels that read the new weights (block 3) wait for `done`
   (`offload/copy_engine.py`).

If live tensors hold every slot, the ring adds a slot instead of waiting, and counts it in
`RingCounters.extra_slots`.

The hooks are on modules; model code does not change. Only one thread may run the model, and a
block's kernels must be on the stream that is current when the block is called. The planner decides
which blocks stream (`plan/search.py`).
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

from gracetune.distributed.ranks import SINGLE
from gracetune.events.types import Notice
from gracetune.offload.buffer_autosize import RingAutosizer
from gracetune.offload.copy_engine import OffloadError
from gracetune.offload.host_weights import (
    load_resident_weights,
    move_to_device,
    move_to_host,
    move_to_shared,
    parameter_state,
    select_streamed_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from gracetune.distributed.ranks import RankGroup
    from gracetune.offload.copy_engine import CopyEngine, PendingCopy


MIN_SLOTS = 2
DEFAULT_SLOTS = 3
"""Number of device buffers (slots) for streamed blocks: one for the block in use, one for the block
after it, and one for a block being fetched."""


@dataclass(frozen=True, slots=True)
class RingCounters:
    """Counts, bytes and stall time of a weight ring since it was created."""

    fetches: int
    """Number of times that a block's weights were copied to the device."""
    fetched_nbytes: int
    on_time: int
    """Number of block uses (in forward or backward) whose weights were on the device in time."""
    late: int
    """Number of block uses that had to wait for a prefetch that was still running."""
    on_demand: int
    """Number of block uses whose weights were not prefetched, so that the copy started only
    then."""
    order_mismatches: int
    """Number of times that a pass used a different block than earlier passes at the same
    position."""
    stalled_s: float
    """Seconds that compute waited for weights."""
    slots: int
    """Number of slots (device buffers for one block's weights) that exist now."""
    extra_slots: int
    """Number of times that a slot was added because live tensors still used all others."""
    slot_nbytes: int
    """Size of one slot (device buffer for one block's weights), in bytes."""
    host_nbytes: int
    """Host memory of all streamed weights, in bytes."""


def stream_weights(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    copy_engine: CopyEngine,
    emit: Callable[[Notice], None],
    slots: int = DEFAULT_SLOTS,
    poison: bool = False,
    submodels: Sequence[nn.Module] | None = None,
    ranks: RankGroup = SINGLE,
) -> WeightRing:
    """Stream the frozen weights of some blocks, and move the rest of the model to the device.

    Args:
        model: The model that contains the blocks.
        blocks: Blocks to stream, in the order forward uses them.
        copy_engine: Makes the copies. Closing the ring closes it too.
        emit: Receives notices.
        slots: Number of slots: device buffers that hold the weights of one block each.
        poison: For debugging: fill a slot with NaN before each fetch, so that a kernel that still
            reads the old weights computes NaN.
        submodels: Modules whose forward is one pass over their own blocks, such as the high-noise
            and low-noise transformers of Wan 2.2, in the order of `blocks`. None: the model itself.
        ranks: Ranks that stream the same weights. All of them must call this function, and those of
            one machine keep one copy of the weights in host memory. Default: one process.
    """
    if slots < MIN_SLOTS:
        raise OffloadError(
            f"slots is {slots}, but a ring needs at least {MIN_SLOTS}: one for the block in use "
            f"and one for the block that comes next. Use {DEFAULT_SLOTS}."
        )
    return WeightRing(model, blocks, copy_engine, emit, slots, poison, submodels, ranks)


def _first_blocks(submodels: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> list[int]:
    """Return the index, in `blocks`, of each submodel's first block."""
    first_blocks = []
    for number, submodel in enumerate(submodels):
        modules = set(submodel.modules())
        indices = [index for index, block in enumerate(blocks) if block in modules]
        if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
            raise OffloadError(
                f"submodel {number} ({type(submodel).__name__}) has no blocks to stream, or they "
                "are not consecutive in `blocks`. Pass the blocks submodel by submodel."
            )
        first_blocks.append(indices[0])
    return first_blocks


class WeightReference(NamedTuple):
    """Stand-in that autograd saves for a streamed weight: its block, and its place in the slot."""

    block: int
    dtype: torch.dtype
    offset: int
    """Offset of the weight in the slot (the device buffer of its block), in elements."""
    size: torch.Size
    stride: tuple[int, ...]


class WeightRing:
    """The hooks and slots that stream weights. Created by `stream_weights`, removed by `close`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        copy_engine: CopyEngine,
        emit: Callable[[Notice], None],
        slots: int,
        poison: bool,
        submodels: Sequence[nn.Module] | None,
        ranks: RankGroup,
    ) -> None:
        first_blocks = (0,) if submodels is None else _first_blocks(submodels, blocks)
        self._schedule = FetchSchedule(len(blocks), first_blocks)
        self._block_weights = select_streamed_weights(model, blocks)
        self._engine = copy_engine
        self._emit = emit
        self._poison = poison
        self._host_memory = (
            move_to_shared(self._block_weights, copy_engine, ranks, emit)
            if ranks.num_machines < ranks.world_size
            else move_to_host(self._block_weights, copy_engine.allocate_host)
        )
        self._parameter_states = {
            weight.parameter: parameter_state(weight.parameter)
            for block in self._block_weights
            for weight in block.weights
        }
        """Address and version counter of each streamed parameter when the ring was created. If one
        changes later, an error is raised, because the ring may still use the old values."""
        load_resident_weights(model, self._block_weights, copy_engine.device)
        slot_nbytes = max(block.nbytes for block in self._block_weights)
        self._slots = SlotPool(copy_engine, slot_nbytes, slots)
        self._autosizer: RingAutosizer | None = None
        self._in_use: int | None = None
        """Index of the block that was used last; None between passes."""
        self._views: SlotViews | None = None
        """Views of the slot that holds the block in use. Keeping them prevents the slot from being
        refilled."""
        self._call_depths = [0] * len(blocks)
        """Nesting depth of each block's forward: a block may call itself."""
        self._passes: list[ExitStack] = []
        """Saved-tensor hooks of the model's running forward calls, innermost last."""
        self._fetches = self._fetched_nbytes = 0
        self._prefetched_uses = self._on_demand = self._extra_slots = 0
        self._reported_mismatch = False
        self._closed = False
        self._indices = {block: index for index, block in enumerate(blocks)}
        self._hooks = self._register_hooks(submodels or [model], blocks)

    def __deepcopy__(self, memo: object) -> WeightRing:
        """Raise an error: the hooks of a copied model would set weights in the original."""
        raise OffloadError(
            "a model cannot be copied while its weights are streamed. Copy it before "
            "stream_weights(), or close() the ring first."
        )

    def counters(self) -> RingCounters:
        """Return counts, bytes and stall time since the ring was created.

        Blocks until the device has passed the last wait for weights.
        """
        stalls = self._engine.stalls()
        return RingCounters(
            fetches=self._fetches,
            fetched_nbytes=self._fetched_nbytes,
            on_time=self._prefetched_uses - stalls.late,
            late=stalls.late,
            on_demand=self._on_demand,
            order_mismatches=self._schedule.mismatches,
            stalled_s=stalls.stalled_s,
            slots=len(self._slots),
            extra_slots=self._extra_slots,
            slot_nbytes=self._slots.nbytes,
            host_nbytes=sum(len(memory) for memory in self._host_memory),
        )

    def enable_autosize(self, nbytes: int) -> None:
        """Let the ring add slots, at most `nbytes` in all, while steps wait for weights."""
        num_streamed = sum(bool(block.weights) for block in self._block_weights)
        self._autosizer = RingAutosizer(self._slots, self._engine, num_streamed, nbytes, self._emit)

    def release_extra_slots(self) -> bool:
        """Free the slots that autosizing has added. Return False if there are none."""
        self._release_block()
        return self._autosizer is not None and self._autosizer.release_extra_slots()

    def trim(self) -> int:
        """Free the slots that were added for speed, until `restore`; return their bytes."""
        return 0 if self._autosizer is None else self._autosizer.trim()

    def restore(self) -> None:
        """Let the ring add slots again."""
        if self._autosizer is not None:
            self._autosizer.restore()

    def pack(self, tensor: Tensor) -> Tensor | WeightReference:
        """Return a `WeightReference` for a streamed weight, and any other tensor unchanged.

        This is the pack function of the saved-tensor hooks.
        """
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor
        slot = self._slots.find_address(tensor.untyped_storage().data_ptr())
        if slot is None:
            return tensor
        assert slot.block is not None, "a tensor aliases an empty slot"
        offset = int(tensor.storage_offset())
        return WeightReference(slot.block, tensor.dtype, offset, tensor.shape, tensor.stride())

    def unpack(self, saved: Tensor | WeightReference) -> Tensor:
        """Return the weight that a `WeightReference` stands for, fetching its block if needed.

        This is the unpack function of the saved-tensor hooks.
        """
        if not isinstance(saved, WeightReference):
            return saved
        if self._closed:
            raise OffloadError(
                "backward needs a streamed weight, but its ring is closed. Run backward before "
                "close(), or compute the loss again."
            )
        memory = self._acquire(saved.block)[saved.dtype]
        return memory.as_strided(saved.size, saved.stride, saved.offset)

    def streams(self, block: nn.Module) -> bool:
        """Return True if the block's weights are streamed by this ring."""
        return block in self._indices and not self._closed

    @contextmanager
    def bind_weights(self, block: nn.Module) -> Iterator[None]:
        """Put a block's weights on the device while the context is open.

        For code that calls the block's `forward` directly and so does not run its hooks.
        """
        index = self._indices[block]
        self._begin_block(index)
        try:
            yield
        finally:
            self._end_block(index)

    def close(self, to_device: bool = True) -> None:
        """Remove the hooks and move all weights to the device, where they must fit.

        With `to_device=False` the weights stay in host memory, and the model cannot run as it is.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        while self._passes:
            self._passes.pop().close()
        self._release_block()
        self._slots.clear()
        if to_device:
            move_to_device(self._block_weights, self._engine.device)
        self._host_memory.clear()
        self._engine.close()

    def _register_hooks(
        self, submodels: Sequence[nn.Module], blocks: Sequence[nn.Module]
    ) -> list[RemovableHandle]:
        hooks = []
        for number, submodel in enumerate(submodels):
            begin = partial(self._begin_pass, number)
            hooks.append(submodel.register_forward_pre_hook(begin, prepend=True))
            hooks.append(submodel.register_forward_hook(self._end_pass, always_call=True))
        for index, block in enumerate(blocks):
            if self._block_weights[index].weights:
                hooks.append(
                    block.register_forward_pre_hook(partial(self._begin_block, index), prepend=True)
                )
                hooks.append(
                    block.register_forward_hook(partial(self._end_block, index), always_call=True)
                )
        return hooks

    def _begin_pass(self, submodel: int, *_: object) -> None:
        training = torch.is_grad_enabled()
        self._schedule.begin_pass(PassKind.TRAIN if training else PassKind.SAMPLE, submodel)
        self._release_block()
        self._slots.trim()
        if self._autosizer is not None:
            if training:
                self._autosizer.training_pass()
            else:
                self._autosizer.sampling_pass()
        self._prefetch()
        saving = ExitStack()
        if training:  # checkpoints inside the model put their own hooks above these
            saving.enter_context(saved_tensors_hooks(self.pack, self.unpack))
        self._passes.append(saving)

    def _end_pass(self, *_: object) -> None:
        if self._passes:  # empty if _begin_pass failed
            self._passes.pop().close()

    def _begin_block(self, index: int, *_: object) -> None:
        if self._call_depths[index] == 0:
            self._check_unchanged(index)
            views = self._acquire(index)
            for weight in self._block_weights[index].weights:
                view = weight.view(views[weight.dtype])
                for parameters, name in weight.bindings:
                    parameters[name] = view
        self._call_depths[index] += 1

    def _end_block(self, index: int, *_: object) -> None:
        if self._call_depths[index] == 0:  # _begin_block failed
            return
        self._call_depths[index] -= 1
        if self._call_depths[index] == 0:
            for weight in self._block_weights[index].weights:
                for parameters, name in weight.bindings:
                    parameters[name] = weight.parameter

    def _check_unchanged(self, index: int) -> None:
        for weight in self._block_weights[index].weights:
            parameter = weight.parameter
            if parameter.requires_grad:
                raise OffloadError(
                    f"weight {weight.name!r} requires a gradient, but it is streamed and would not "
                    "change. Choose the trained parameters before stream_weights(), or close() "
                    "the ring."
                )
            unchanged = parameter_state(parameter) == self._parameter_states[parameter]
            for parameters, name in weight.bindings:
                unchanged &= parameters[name] is parameter
            if not unchanged:
                raise OffloadError(
                    f"weight {weight.name!r} was moved, replaced or written to while it is "
                    "streamed. close() the ring before model.to(), or before loading, merging or "
                    "exchanging weights."
                )

    def _release_block(self) -> None:
        """Drop the views of the block in use, so that its slot can hold another block."""
        self._in_use = self._views = None

    def _acquire(self, index: int) -> SlotViews:
        """Return views of a block's weights on the device, fetching them if needed.

        Also starts the next prefetches. Kernels that are queued after this call may read the
        weights.
        """
        if index == self._in_use:
            assert self._views is not None, f"block {index} is in use without views of its slot"
            return self._views
        self._record_use(index)
        self._in_use, self._views = index, None
        slot = self._slots.find(index)
        prefetched = slot is not None
        if slot is None:
            slot = slot_to_refill(self._slots, self._ranks(), index) or self._add_slot()
            self._fetch(index, slot)
        self._prefetched_uses += prefetched
        self._on_demand += not prefetched
        assert slot.pending_copy is not None, f"block {index} has a slot but was never fetched"
        slot.pending_copy.wait(prefetched)
        self._views = SlotViews(slot)
        self._prefetch()
        return self._views

    def _prefetch(self) -> None:
        for block, slot in prefetches(self._slots, self._ranks(), self._in_use):
            self._fetch(block, slot)

    def _fetch(self, index: int, slot: Slot) -> None:
        source = self._host_memory[index]
        self._slots.evict(slot)
        self._slots.assign(slot, index, self._engine.copy(slot.memory, source, self._poison))
        self._fetches += 1
        self._fetched_nbytes += len(source)

    def _ranks(self) -> dict[int, int]:
        """Return each streamed block's position in the order of next use; 0 is used next."""
        upcoming = (
            block for block in self._schedule.upcoming() if self._block_weights[block].weights
        )
        return {block: rank for rank, block in enumerate(upcoming)}

    def _record_use(self, index: int) -> None:
        expected = self._schedule.expected()
        if self._schedule.record_use(index) or self._reported_mismatch:
            return
        self._reported_mismatch = True
        self._warn(
            f"the model used block {index} where earlier passes used "
            f"{'none' if expected is None else f'block {expected}'}. Blocks that cannot be "
            "predicted are fetched on demand, and the step waits for them."
        )

    def _add_slot(self) -> Slot:
        if self._extra_slots == 0:
            self._warn(
                f"all {len(self._slots)} slots of the weight ring are held (by blocks "
                f"{', '.join(map(str, self._slots.blocks()))}), so a slot was added. Something "
                "keeps weights after their block has run: a graph that was not created by calling "
                "the model, or one checkpoint around several blocks. Use more slots, or checkpoint "
                "each block."
            )
        self._extra_slots += 1
        return self._slots.add()

    def _warn(self, text: str) -> None:
        self._emit(Notice(text, level="warning", fallback=True))


# Slots: the device memory of a ring
#
# The ring never hands out a slot's own tensor. It hands out aliases, each with a storage of its own
# (through DLPack). That storage dies with the last tensor made from it, wherever that tensor went,
# so a weak reference to it tells whether the slot may be refilled.


MAX_ALIASES = 32
"""Number of weak references in a slot's list at which expired ones are removed from it."""


@dataclass(slots=True, eq=False)
class Slot:
    """Device buffer that holds the weights of one block at a time."""

    memory: Tensor
    block: int | None = None
    """Index of the block that is in the slot or being copied to it; None: the slot is empty."""
    pending_copy: PendingCopy | None = None
    """The last copy that filled the slot; it may still be running."""
    _aliases: list[StorageWeakRef] = field(default_factory=list)

    def new_alias(self) -> Tensor:
        """Return a tensor that shares the slot's memory but has a storage object of its own.

        The slot keeps a weak reference to that storage; `is_in_use` is True while it lives.
        """
        if len(self._aliases) >= MAX_ALIASES:
            self.is_in_use()
        alias = dlpack.from_dlpack(dlpack.to_dlpack(self.memory))  # type: ignore[attr-defined]
        self._aliases.append(StorageWeakRef(alias.untyped_storage()))  # type: ignore[no-untyped-call]
        return alias

    def is_in_use(self) -> bool:
        """Return True while a live tensor uses the slot's memory, which forbids refilling it."""
        self._aliases = [
            alias
            for alias in self._aliases
            if not alias.expired()  # type: ignore[no-untyped-call]
        ]
        return bool(self._aliases)


class SlotViews(dict["torch.dtype", "Tensor"]):
    """Views of a slot's memory by dtype, created on first access.

    While they live, the slot is not refilled. The views are ordinary tensors even if sampling
    creates them in inference mode, because backward may use them next.
    """

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        with torch.inference_mode(False):
            self._memory = slot.new_alias()

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            view = self[dtype] = self._memory.view(dtype)
        return view


class SlotPool:
    """The slots (device buffers) of a weight ring.

    There are `count` of them, and temporarily more if live tensors use them all.
    """

    def __init__(self, copy_engine: CopyEngine, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        """Size of one slot, in bytes."""
        self.count = count
        """Requested number of slots; there may be more while live tensors use them."""
        self._engine = copy_engine
        self._slots: list[Slot] = []
        self._by_address: dict[int, Slot] = {}
        self._by_block: dict[int, Slot] = {}
        for _ in range(count):
            self.add()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def find(self, block: int) -> Slot | None:
        """Return the slot that holds a block or is being filled with it, or None."""
        return self._by_block.get(block)

    def find_address(self, address: int) -> Slot | None:
        """Return the slot whose memory starts at this address, or None."""
        return self._by_address.get(address)

    def blocks(self) -> list[int]:
        """Return the indices of the blocks that are in the slots, sorted."""
        return sorted(self._by_block)

    def evict(self, slot: Slot) -> None:
        """Mark a slot as empty, because it is about to be overwritten."""
        assert not slot.is_in_use(), f"block {slot.block} is still in use and would be overwritten"
        if slot.block is not None:
            del self._by_block[slot.block]
            slot.block = None

    def assign(self, slot: Slot, block: int, pending_copy: PendingCopy) -> None:
        """Record that a copy is filling the slot with this block's weights."""
        slot.block = block
        slot.pending_copy = pending_copy
        self._by_block[block] = slot

    def add(self) -> Slot:
        """Allocate one more slot."""
        with torch.inference_mode(False):  # it outlives the pass that needed it
            slot = Slot(self._engine.allocate_device(self.nbytes))
        self._slots.append(slot)
        self._by_address[slot.memory.data_ptr()] = slot
        return slot

    def resize(self, count: int) -> None:
        """Change the number of slots. Call this between passes.

        Surplus slots that live tensors still use are freed by a later `trim`.
        """
        while len(self._slots) < count:
            self.add()
        self.count = count
        self.trim()

    def trim(self) -> None:
        """Free the slots beyond the requested number, except those that live tensors still use."""
        for slot in self._slots[self.count :]:
            if not slot.is_in_use():
                self.evict(slot)
                del self._by_address[slot.memory.data_ptr()]
                self._slots.remove(slot)

    def clear(self) -> None:
        """Drop all slots. A slot's memory is freed with the last tensor that uses it."""
        self._slots.clear()
        self._by_address.clear()
        self._by_block.clear()


# Fetch policy: which block goes into which slot. It needs block numbers only, no tensors, so the
# planner's simulator (plan/simulate.py) calls the same functions and predicts the same fetches.
#
# `ranks` maps each upcoming block to its position in the order of next use: 0 is used next. A block
# without a rank is not needed any more. Blocks are fetched in the order of their ranks, and the
# block with the highest rank is evicted first. For example, if block 4 of 0..9 runs in forward:
#
#     slots: 3, 4, 5      ranks: 5 -> 0, 6 -> 1, ..., 9 -> 4, 4 -> 5, 3 -> 6, ...
#     action: fetch block 6 into the slot of block 3


class SlotState(Protocol):
    """The attributes of a slot that the choice of fetches reads; also met by simulated slots."""

    block: int | None
    """Index of the block that the slot holds; None: the slot is empty."""

    def is_in_use(self) -> bool:
        """Return True while a live tensor uses the slot's memory, which forbids overwriting it."""
        ...


SlotT = TypeVar("SlotT", bound=SlotState)


def slot_to_refill(
    slots: Iterable[SlotT], ranks: Mapping[int, int], in_use: int | None, rank: int = -1
) -> SlotT | None:
    """Return the slot that a block to be fetched may overwrite, or None.

    `ranks` maps each block to its position in the order of next use (0 is used next); `rank` is
    that of the block to fetch. An empty slot comes first, then the slot whose block is used last,
    unless a live tensor uses it. A block that is used sooner than `rank` is never evicted. Nor is
    the block in use, because its slot may have no live tensor for a moment, between two kernels.
    """
    best, best_rank = None, rank
    for slot in slots:
        if slot.block is None:
            return slot
        slot_rank = ranks.get(slot.block, len(ranks))
        if slot_rank > best_rank and slot.block != in_use and not slot.is_in_use():
            best, best_rank = slot, slot_rank
    return best


def prefetches(
    slots: Iterable[SlotT], ranks: Mapping[int, int], in_use: int | None
) -> Iterator[tuple[int, SlotT]]:
    """Yield (block, slot) for each block to fetch now, soonest used first.

    `ranks` maps each block to its position in the order of next use. The caller assigns each block
    to its slot before it asks for the next pair. `slots` is iterated several times.
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


# Fetch schedule: the order in which blocks are expected to be used


LONGEST_PASS = 64
"""Longest sequence of block uses from which the order of blocks is learnt, in uses per block on
average. A longer one must be several passes whose start the ring did not see."""


class PassKind(Enum):
    """Kind of a model pass: with backward (training) or without (sampling)."""

    TRAIN = "train"
    """Forward and backward. A block that backward recomputes counts as used once in backward."""
    SAMPLE = "sample"
    """Forward only, without gradients."""


class FetchSchedule:
    """Predict which block is used next, from the order of earlier passes.

    A pass is one call of a submodel with the backward that follows. For each submodel and kind of
    pass the order is assumed at first (all blocks forward, then in reverse), learnt from the first
    pass, and compared with every later one. Consecutive uses of one block count as one. This class
    handles block numbers only: no tensors and no clocks.
    """

    def __init__(self, num_blocks: int, first_blocks: Sequence[int] = (0,)) -> None:
        """`first_blocks` has the index of the first block of each submodel (transformer)."""
        self.mismatches = 0
        """Number of times that a block was used where the learnt order has another block."""
        self._orders: dict[tuple[PassKind, int], list[int]] = {}
        for submodel, (start, end) in enumerate(pairwise([*first_blocks, num_blocks])):
            forward = list(range(start, end))
            self._orders[PassKind.TRAIN, submodel] = forward + forward[-2::-1]
            self._orders[PassKind.SAMPLE, submodel] = forward
        self._learnt: set[tuple[PassKind, int]] = set()
        self._current = (PassKind.TRAIN, 0)
        self._used: list[int] = []
        self._max_uses = LONGEST_PASS * num_blocks
        self._position = 0

    def begin_pass(self, kind: PassKind, submodel: int = 0) -> None:
        """Learn the order of the pass that has ended, and start a pass of this submodel."""
        self._learn()
        self._current = (kind, submodel)
        self._used = []
        self._position = 0

    def expected(self) -> int | None:
        """Return the block that should be used next, or None if the pass should be over."""
        order = self._orders[self._current]
        return order[self._position] if self._position < len(order) else None

    def record_use(self, block: int) -> bool:
        """Record the use of a block. Return False if the learnt order expected another block."""
        if len(self._used) < self._max_uses:
            self._used.append(block)
        as_expected = block == self.expected()
        if as_expected:
            self._position += 1
        else:
            self._resynchronize(block)
        if as_expected or self._current not in self._learnt:
            return True
        self.mismatches += 1
        return False

    def upcoming(self) -> list[int]:
        """Return all blocks in the order of next use, in this pass or the next of the same kind."""
        order = self._orders[self._current]
        return list(dict.fromkeys(order[self._position :] + order))

    def _resynchronize(self, block: int) -> None:
        """Continue from this block's nearest position in the learnt order.

        Called if the pass has skipped or repeated blocks.
        """
        order = self._orders[self._current]
        positions = [position for position, other in enumerate(order) if other == block]
        if positions:  # of two equally near, the later: skipping is more common than repeating
            self._position = 1 + min(
                positions, key=lambda position: (abs(position - self._position), -position)
            )

    def _learn(self) -> None:
        if not self._used or len(self._used) == self._max_uses:
            return
        order = self._orders[self._current]
        if self._used != order[: len(self._used)]:  # a pass that ended early keeps the known order
            self._orders[self._current] = self._used
        self._learnt.add(self._current)
