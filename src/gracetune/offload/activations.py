"""Offload the activations of some blocks to host memory between forward and backward.

While an offloaded block runs in forward, saved-tensor hooks send what autograd saves to the host.
When backward approaches the block, its activations are copied back, one or more blocks ahead.
Weights, small tensors and inputs that several blocks share stay on the device. Gradients are bit
for bit those of a step that keeps everything on the device. The copies and their ordering are in
`offload/offloaded_activations.py`.

With activation checkpointing only a block's input is saved, and so only the input is sent. A block
that contains its own checkpoint is passed in `checkpointed_blocks`; if the checkpoint is outside
the block, call the block through `ActivationOffload.checkpoint`. A block that runs during backward
is being recomputed by a checkpoint; the tensors it saves then stay on the device.

All hooks are on modules; model code does not change. Only one thread may run the model, and a
block's kernels must be on the stream that is current when the block is called.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gracetune.events.types import Notice
from gracetune.offload.buffer_autosize import PrefetchDistance
from gracetune.offload.copy_engine import OffloadError
from gracetune.offload.offloaded_activations import (
    BlockCall,
    HostBufferPool,
    OffloadCopies,
    OffloadedStorage,
    SavedView,
    SharedInputs,
    available_host_nbytes,
    is_plain_tensor,
    large_weight_storages,
    storages_in,
    tensors_in,
)
from gracetune.offload.recompute import checkpoint_block
from gracetune.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.hooks import RemovableHandle

    from gracetune.offload.copy_engine import CopyEngine
    from gracetune.offload.ring import WeightReference, WeightRing


MAX_OUTGOING_CALLS = 2
"""Maximum number of block calls, including the running one, whose activations may be on their way
to the host. Before the next block starts, compute waits for the copies of older calls and frees
their device memory."""
SLAB_NBYTES = 256 * MIB
"""Bytes of host memory to allocate at once for activations. Buffers are cut from these slabs."""
NO_BACKWARD = -1
"""Value of `torch._C._current_graph_task_id()` while no backward is running."""


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """Prefetch distance and memory limits of the activation offload."""

    prefetch_blocks: int = 1
    """Prefetch distance: backward fetches the activations of this many blocks in advance."""
    prefetch_nbytes: int | None = None
    """Device memory for prefetched activations, in bytes. While backward waits for copies, the
    prefetch distance is raised until this memory is full; None: the distance is fixed."""
    host_nbytes: int | None = None
    """Limit of host memory for activations, in bytes; None: all that the host has available."""
    poison: bool = False
    """For debugging: overwrite memory with NaN when it is released, so that a later read shows."""


@dataclass(frozen=True, slots=True)
class OffloadCounters:
    """Counts, bytes and stall time of an activation offload since it was created."""

    sent: int
    """Number of tensor storages copied to the host."""
    sent_nbytes: int
    fetched_nbytes: int
    """Bytes copied back to the device."""
    on_demand: int
    """Number of storages whose copy back started only when backward read them (not prefetched)."""
    late: int
    """Number of copies, to the host or back, that compute had to wait for though they started
    early."""
    stalled_s: float
    """Seconds that compute waited for copies."""
    too_small: int
    """Number of saved tensors kept on the device because they are smaller than `min_nbytes`."""
    shared: int
    """Number of saved tensors kept on the device because they are weights, or inputs that several
    blocks share."""
    unsupported: int
    """Number of saved tensors left where they are because they cannot be offloaded: sparse tensors,
    tensor subclasses, tensors that are not on the device, small parts of a larger storage, and
    tensors of a checkpointed block that are not its inputs."""
    prefetch_blocks: int
    """Current prefetch distance: the number of blocks whose activations are fetched in advance."""
    host_nbytes: int
    """Host memory allocated for activations, in bytes."""


def offload_activations(
    blocks: Sequence[nn.Module],
    copy_engine: CopyEngine,
    ring: WeightRing | None,
    emit: Callable[[Notice], None],
    min_nbytes: int = MIB,
    checkpointed_blocks: Sequence[nn.Module] = (),
    other_blocks: Sequence[nn.Module] = (),
    settings: OffloadSettings | None = None,
) -> ActivationOffload:
    """Keep the activations of some blocks in host memory until backward needs them.

    Args:
        blocks: Blocks whose saved tensors are offloaded.
        copy_engine: Makes the copies.
        ring: The ring that streams the model's weights, if any. Close the offload before the ring.
        emit: Receives notices.
        min_nbytes: Smaller tensors stay on the device.
        checkpointed_blocks: Blocks that recompute themselves. Only their inputs are offloaded.
        other_blocks: The remaining blocks of the model. Nothing of them is offloaded, but their
            calls show how far a pass has come, so that memory is released and fetched in time.
        settings: Prefetch distance and memory limits.
    """
    settings = settings or OffloadSettings()
    all_blocks = [*blocks, *checkpointed_blocks, *other_blocks]
    if not all_blocks:
        raise OffloadError(
            "offload_activations() was called without blocks. Pass at least one, or do not call it."
        )
    if len(set(all_blocks)) < len(all_blocks):
        raise OffloadError(
            "a block was passed twice to offload_activations(). Pass each one either in blocks, in "
            "checkpointed_blocks or in other_blocks."
        )
    compiled = [block for block in all_blocks if block._compiled_call_impl is not None]
    if compiled:
        raise OffloadError(
            f"a {type(compiled[0]).__name__} was compiled together with its hooks, by compile(). "
            "Compile its forward instead: block.forward = torch.compile(block.forward)."
        )
    if min_nbytes < 1 or settings.prefetch_blocks < 1:
        raise OffloadError(
            f"min_nbytes is {min_nbytes} and prefetch_blocks is {settings.prefetch_blocks}; both "
            f"must be at least 1. The defaults are {MIB} and 1."
        )
    return ActivationOffload(
        blocks, copy_engine, ring, emit, min_nbytes, checkpointed_blocks, other_blocks, settings
    )


class ActivationOffload:
    """The hooks that offload activations. Created by `offload_activations`, removed by `close`."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        copy_engine: CopyEngine,
        ring: WeightRing | None,
        emit: Callable[[Notice], None],
        min_nbytes: int,
        checkpointed_blocks: Sequence[nn.Module],
        other_blocks: Sequence[nn.Module],
        settings: OffloadSettings,
    ) -> None:
        self._ring = ring
        self._emit = emit
        self._min_nbytes = min_nbytes
        self._blocks = frozenset(blocks)
        self._checkpointed_blocks = frozenset(checkpointed_blocks)
        self._pool = HostBufferPool(
            copy_engine, SLAB_NBYTES, partial(available_host_nbytes, settings.host_nbytes)
        )
        self._copies = OffloadCopies(copy_engine, self._pool, settings.poison)
        num_blocks = len(blocks) + len(checkpointed_blocks)
        self._policy = OffloadPolicy(
            copy_engine.device, ring, self._copies, self._pool, min_nbytes, num_blocks
        )
        self._reported_nbytes = 0
        self._distance = PrefetchDistance(
            settings.prefetch_blocks, settings.prefetch_nbytes, self._copies.begin_stall_window
        )
        self._running: list[tuple[nn.Module, ExitStack]] = []
        """Blocks whose forward has started and not ended, outermost first."""
        self._seen: set[nn.Module] = set()
        """Blocks already called in this forward pass; a second call of one starts a new pass."""
        self._last_call: BlockCall | None = None
        """The most recent block call of this forward pass."""
        self._backward_at: BlockCall | None = None
        """The block call that backward has reached; None: backward has not started."""
        self._shared_inputs = SharedInputs()
        self._weights: dict[nn.Module, frozenset[int]] = {}
        """Block -> numbers (`cdata`) of the storages of its weights. Finding them takes as long as
        launching ten kernels, so it is done once."""
        self._closed = False
        self._hooks: list[RemovableHandle] = []
        for block in (*blocks, *checkpointed_blocks, *other_blocks):
            self._hooks += [
                block.register_forward_pre_hook(self._begin_block, prepend=True, with_kwargs=True),
                block.register_forward_hook(self._end_block, always_call=True),
            ]

    def __deepcopy__(self, memo: object) -> ActivationOffload:
        """Raise an error: the hooks of a copied model would still use this object."""
        raise OffloadError(
            "a model cannot be copied while its activations are offloaded. Copy it before "
            "offload_activations(), or close() the offload first."
        )

    def counters(self) -> OffloadCounters:
        """Return counts, bytes and stall time since the offload was created.

        Blocks until the device has passed the last wait for a copy.
        """
        out, back = self._copies.stalls()
        return OffloadCounters(
            sent=self._copies.sent,
            sent_nbytes=self._copies.sent_nbytes,
            fetched_nbytes=self._copies.fetched_nbytes,
            on_demand=self._copies.on_demand,
            late=out.late + back.late,
            stalled_s=out.stalled_s + back.stalled_s,
            too_small=self._policy.too_small,
            shared=self._policy.shared,
            unsupported=self._policy.unsupported,
            prefetch_blocks=self._distance.blocks,
            host_nbytes=self._pool.nbytes,
        )

    def trim(self) -> int:
        """Prefetch fewer blocks in advance, until `restore`; return the bytes of their tensors."""
        return self._distance.trim(self._policy.block_nbytes)

    def restore(self) -> None:
        """Let the prefetch distance grow again."""
        self._distance.restore()

    def checkpoint(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a block with activation checkpointing, and keep its inputs in host memory."""
        if block in self._blocks or block in self._checkpointed_blocks:
            raise OffloadError(
                f"a {type(block).__name__} is already offloaded and cannot be recomputed as well. "
                "Leave it out of offload_activations(), or call it without checkpoint()."
            )
        self._begin_block(block, args, kwargs, recompute=True)
        result = None
        try:
            result = checkpoint_block(block, args, kwargs)
        finally:
            self._end_block(block, args, result)
        return result

    def close(self) -> None:
        """Remove the hooks and free the host memory. Existing graphs can no longer run backward."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        while self._running:
            self._running.pop()[1].close()
        self._copies.close()

    def _begin_block(
        self, block: nn.Module, args: Any, kwargs: dict[str, Any], recompute: bool = False
    ) -> None:
        """Handle the start of a block's forward: install saved-tensor hooks if it is offloaded."""
        while self._running and not any(
            block is module for module in self._running[-1][0].modules()
        ):
            self._running.pop()[1].close()  # an interrupt ended that block without its end hook
            self._policy.begin_call(None)
        nested = bool(self._running)
        saving = ExitStack()
        self._running.append((block, saving))
        if nested:
            return
        offloads = block in self._blocks or block in self._checkpointed_blocks or recompute
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            if offloads:
                # The block is recomputed by a checkpoint around it. That checkpoint did not see the
                # block's saved tensors in forward, so it must not see them now.
                saving.enter_context(saved_tensors_hooks(_identity, _identity))
            return
        self._copies.reclaim_host_buffers()
        self._copies.release_outgoing(keep=_last_calls(self._last_call, MAX_OUTGOING_CALLS - 1))
        if not torch.is_grad_enabled():
            return
        if block in self._seen or self._backward_at is not None:
            self._begin_pass()
        self._seen.add(block)
        inputs = storages_in((args, kwargs))
        shared = self._shared_inputs.find(block, inputs)
        weights = self._weights_of(block) if offloads else frozenset()
        self._last_call = BlockCall(
            previous=self._last_call,
            kept_storages=weights | shared,
            only_storages=None if block in self._blocks else frozenset(ref.cdata for ref in inputs),
        )
        self._policy.begin_call(self._last_call)
        if offloads:
            saving.enter_context(saved_tensors_hooks(self._policy.pack, self._unpack))

    def _weights_of(self, block: nn.Module) -> frozenset[int]:
        if block not in self._weights:
            self._weights[block] = large_weight_storages(block, self._min_nbytes)
        return self._weights[block]

    def _end_block(self, block: nn.Module, _: Any, result: Any) -> None:
        """Handle the end of a block's forward: register a gradient hook on the block's output.

        The hook runs when backward reaches the block.
        """
        if not self._running or self._running[-1][0] is not block:  # its start hook failed
            return
        self._running.pop()[1].close()
        call = None if self._running else self._policy.end_call()
        if call is None:
            return
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._backward_reaches, call))  # type: ignore[no-untyped-call]
                return

    def _begin_pass(self) -> None:
        if self._backward_at is not None:  # the previous pass needs nothing more on the device
            self._copies.release_outgoing()
        self._seen.clear()
        self._last_call = self._backward_at = None
        self._shared_inputs.begin_pass()
        change = self._distance.training_pass(self._policy.block_nbytes)
        if change:
            self._emit(Notice(f"activation prefetch distance {change}."))

    def _unpack(self, packed: Tensor | WeightReference | SavedView) -> Tensor:
        """Return the tensor that backward asks for, fetching it if it was not prefetched."""
        if isinstance(packed, Tensor):
            return packed
        if not isinstance(packed, SavedView):
            assert self._ring is not None, "a weight reference without a ring"
            return self._ring.unpack(packed)
        if self._closed:
            raise OffloadError(
                "backward needs activations whose host memory was freed by close(). Run backward "
                "before close(), or compute the loss again."
            )
        storage = packed.storage
        self._backward_reaches(storage.call)
        if storage.was_modified():
            raise OffloadError(
                f"a tensor of shape {tuple(packed.size)} that backward needs was changed in place "
                "after it was saved, so gradients would be wrong. Write to a copy of it instead."
            )
        if storage.original is None and storage.device is None:
            self._copies.fetch(storage, prefetched=False)
        return packed.view(storage.read())

    def _backward_reaches(self, call: BlockCall, *_: object) -> None:
        """Fetch the activations of the block that backward has reached.

        Those of the blocks that backward reaches next are prefetched.
        """
        if call is self._backward_at or self._closed:
            return
        self._backward_at = call
        near_calls = _last_calls(call, 1 + self._distance.blocks)
        self._copies.release_outgoing(keep=near_calls)
        self._copies.reclaim_host_buffers()
        for near_call in near_calls:
            for storage in near_call.offloaded():
                self._copies.fetch(storage, prefetched=near_call is not call)
        if self._pool.nbytes > self._reported_nbytes:
            before = (
                ""
                if self._reported_nbytes == 0
                else f" (was {format_bytes(self._reported_nbytes)})"
            )
            self._reported_nbytes = self._pool.nbytes
            size = format_bytes(self._pool.nbytes)
            self._emit(Notice(f"offloaded activations use {size} of host memory{before}."))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _last_calls(call: BlockCall | None, count: int) -> list[BlockCall]:
    """Return this block call and the calls before it in the pass: at most `count`, latest first."""
    calls: list[BlockCall] = []
    while call is not None and len(calls) < count:
        calls.append(call)
        call = call.previous
    return calls


class OffloadPolicy:
    """Decide for each tensor that autograd saves whether it is offloaded, and count those kept."""

    def __init__(
        self,
        device: torch.device,
        ring: WeightRing | None,
        copies: OffloadCopies,
        pool: HostBufferPool,
        min_nbytes: int,
        num_blocks: int,
    ) -> None:
        self.too_small = self.shared = self.unsupported = 0
        """Number of tensors kept on the device, by reason; see `OffloadCounters`."""
        self.block_nbytes = 0
        """Bytes sent to the host by one call of a block, the largest so far."""
        self._device = device
        self._ring = ring
        self._copies = copies
        self._pool = pool
        self._min_nbytes = min_nbytes
        self._num_blocks = num_blocks
        self._call: BlockCall | None = None

    def begin_call(self, call: BlockCall | None) -> None:
        """Attribute tensors that autograd saves from now on to this block call; None: to none."""
        self._call = call

    def end_call(self) -> BlockCall | None:
        """End the current block call and return it, or None if no block is running."""
        call, self._call = self._call, None
        if call is not None:
            self.unsupported += sum(storage.host is None for storage in call.by_storage.values())
            call.by_storage.clear()
            self.block_nbytes = max(self.block_nbytes, call.nbytes)
            self._copies.track_outgoing(call)
        return call

    def pack(self, tensor: Tensor) -> Tensor | WeightReference | SavedView:
        """Return what autograd keeps for backward: a weight reference, a view of an offloaded
        storage, or the tensor itself.

        This is the pack function of the saved-tensor hooks.
        """
        packed = tensor if self._ring is None else self._ring.pack(tensor)
        if not isinstance(packed, Tensor):
            return packed
        call = self._call
        assert call is not None, "a tensor was saved by a block that has not started"
        storage = tensor.untyped_storage() if is_plain_tensor(tensor, self._device) else None
        if storage is None:
            self.unsupported += 1
        elif storage.nbytes() < self._min_nbytes:
            self.too_small += 1
        elif storage._cdata in call.kept_storages or (tensor.is_leaf and tensor.requires_grad):
            self.shared += 1
        elif call.only_storages is not None and storage._cdata not in call.only_storages:
            self.unsupported += 1
        else:
            return self._offload(call, tensor, (storage._cdata, tensor._version))
        return tensor

    def _offload(self, call: BlockCall, tensor: Tensor, key: tuple[int, int]) -> SavedView:
        storage = call.by_storage.get(key)
        if storage is None:
            storage = call.by_storage[key] = OffloadedStorage(call, tensor, self._copies.released)
        saved = storage.add_view(tensor)
        if storage.is_worth_sending() and not self._copies.send(storage):
            raise self._host_is_full(max(self.block_nbytes, call.nbytes + storage.nbytes))
        return saved

    def _host_is_full(self, block_nbytes: int) -> OffloadError:
        return OffloadError(
            f"offloaded activations need about {format_bytes(block_nbytes * self._num_blocks)} of "
            f"host memory ({self._num_blocks} blocks of {format_bytes(block_nbytes)}), but only "
            f"{format_bytes(max(0, self._pool.available_nbytes()))} are available besides the "
            f"{format_bytes(self._pool.nbytes)} in use. Offload fewer blocks, recompute them, or "
            "use a smaller batch."
        )
