"""Activations of some blocks wait for backward in host memory.

While such a block runs, what autograd saves is sent to the host, and when backward comes near it is
brought back, a block ahead. Weights, what is small, and inputs that blocks share stay where they
are. The hooks are on modules; no model code is changed, and gradients are those of the kept step.
What keeps copies and computing from each other's memory is in `transport`.

A block that recomputes itself (a checkpoint inside of its forward) saves its input alone, so that
is what is sent. Where a checkpoint calls the block, use `Offload.checkpoint`. Blocks called inside
of backward are being recomputed: of those nothing is sent. One thread at a time may run the model,
and a block's kernels must be on the stream that is current when it is called.
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
from gracetune.offload.checkpointing import checkpoint_block
from gracetune.offload.copies import StreamError
from gracetune.offload.offloaded_tensors import (
    Distance,
    HostPool,
    OffloadCopies,
    OffloadedCall,
    OffloadedTensor,
    SavedTensor,
    SharedInputs,
    is_plain,
    room_for,
    storages_in,
    tensors_in,
    weights_of,
)
from gracetune.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.hooks import RemovableHandle

    from gracetune.offload.copies import CopyEngine
    from gracetune.offload.ring import Reference, Ring


IN_FLIGHT = 2
"""Blocks whose memory may be on its way out at once, the running one among them."""
SLAB_NBYTES = 256 * MIB
NO_BACKWARD = -1


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """How far ahead, in how much memory."""

    ahead: int = 1
    """Blocks that are brought back before backward reaches them."""
    ahead_nbytes: int | None = None
    """Device memory within which more are, where backward waits; none: as many as above."""
    host_nbytes: int | None = None
    """The most host memory; none: as much as the host has."""
    poison: bool = False
    """Fill memory with NaN when it is given up: for finding who reads too late."""


@dataclass(frozen=True, slots=True)
class OffloadCounters:
    """What was moved since offloading began, and what was not."""

    sent: int
    """Storages."""
    sent_nbytes: int
    brought_nbytes: int
    on_demand: int
    """Storages that were brought when they were asked for."""
    late: int
    """Copies, either way, that were begun ahead and still waited for."""
    waited_s: float
    """How long computing stood still for copies."""
    too_small: int
    """Tensors that stayed on the device for this and the following reasons."""
    shared: int
    """Weights, and inputs that other blocks have too."""
    unfit: int
    """Not dense, of a special class, not on the device, or not an input where only those go."""
    ahead: int
    host_nbytes: int


def offload_activations(
    blocks: Sequence[nn.Module],
    mover: CopyEngine,
    ring: Ring | None,
    emit: Callable[[Notice], None],
    min_nbytes: int = MIB,
    inputs_of: Sequence[nn.Module] = (),
    others: Sequence[nn.Module] = (),
    settings: OffloadSettings | None = None,
) -> Offload:
    """Keep what some blocks of a model save for backward in host memory.

    Of the blocks in `inputs_of`, which recompute themselves, only inputs are sent. `others` are the
    rest of the model's blocks: nothing of them is sent, but they tell how far a pass has come, so
    that memory is given up and brought back in time. The `ring` is the one that streams the model's
    weights. Close this before the ring.
    """
    settings = settings or OffloadSettings()
    named = [*blocks, *inputs_of, *others]
    if not named:
        raise StreamError("there are no blocks to offload; name at least one, or do without.")
    if len(set(named)) < len(named):
        raise StreamError(
            "a block is given twice to offload_activations(). Each is offloaded, or sends its "
            "inputs, or is one of the others."
        )
    compiled = [block for block in named if block._compiled_call_impl is not None]
    if compiled:
        raise StreamError(
            f"a {type(compiled[0]).__name__} was compiled with its hooks, by compile(). Compile "
            "its forward instead: block.forward = torch.compile(block.forward)."
        )
    if min_nbytes < 1 or settings.ahead < 1:
        raise StreamError(
            f"min_nbytes is {min_nbytes} and ahead is {settings.ahead}; both must be at least 1. "
            f"{MIB} and 1 are good for most."
        )
    return Offload(blocks, mover, ring, emit, min_nbytes, inputs_of, others, settings)


class Offload:
    """Activations on their way; made by `offload_activations`, ended by `close`."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        mover: CopyEngine,
        ring: Ring | None,
        emit: Callable[[Notice], None],
        min_nbytes: int,
        inputs_of: Sequence[nn.Module],
        others: Sequence[nn.Module],
        settings: OffloadSettings,
    ) -> None:
        self._ring = ring
        self._emit = emit
        self._min_nbytes = min_nbytes
        self._whole = frozenset(blocks)
        self._inputs_of = frozenset(inputs_of)
        self._pool = HostPool(mover, SLAB_NBYTES, partial(room_for, settings.host_nbytes))
        self._transport = OffloadCopies(mover, self._pool, settings.poison)
        num_blocks = len(blocks) + len(inputs_of)
        self._packer = OffloadPolicy(
            mover.device, ring, self._transport, self._pool, min_nbytes, num_blocks
        )
        self._told_nbytes = 0
        self._distance = Distance(settings.ahead, settings.ahead_nbytes, self._transport.lap)
        self._running: list[tuple[nn.Module, ExitStack]] = []
        """Blocks that have begun and not ended."""
        self._seen: set[nn.Module] = set()
        """Blocks of this pass."""
        self._last: OffloadedCall | None = None
        """The call before, in this pass."""
        self._reached: OffloadedCall | None = None
        """Where backward is."""
        self._shared_inputs = SharedInputs()
        self._closed = False
        self._hooks: list[RemovableHandle] = []
        for block in (*blocks, *inputs_of, *others):
            self._hooks += [
                block.register_forward_pre_hook(self._begins, prepend=True, with_kwargs=True),
                block.register_forward_hook(self._ends, always_call=True),
            ]

    def __deepcopy__(self, memo: object) -> Offload:
        """Refused: a copied model would send through the first one's hooks."""
        raise StreamError(
            "a model cannot be copied while its activations are offloaded. Copy it before "
            "offload_activations(), or close() that first."
        )

    def counters(self) -> OffloadCounters:
        """What was done so far. Waits until the device has got to the last copy."""
        out, back = self._transport.waits()
        return OffloadCounters(
            sent=self._transport.sent,
            sent_nbytes=self._transport.sent_nbytes,
            brought_nbytes=self._transport.brought_nbytes,
            on_demand=self._transport.on_demand,
            late=out.late + back.late,
            waited_s=out.seconds + back.seconds,
            too_small=self._packer.too_small,
            shared=self._packer.shared,
            unfit=self._packer.unfit,
            ahead=self._distance.ahead,
            host_nbytes=self._pool.nbytes,
        )

    def checkpoint(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a block and recompute it in backward; its input waits in host memory."""
        if block in self._whole or block in self._inputs_of:
            raise StreamError(
                f"a {type(block).__name__} is offloaded already and cannot be recomputed as well. "
                "Leave it out of offload_activations(), or call it without checkpoint()."
            )
        self._begins(block, args, kwargs, recompute=True)
        result = None
        try:
            result = checkpoint_block(block, args, kwargs)
        finally:
            self._ends(block, args, result)
        return result

    def close(self) -> None:
        """Take the hooks away and give host memory up; graphs that need it cannot be used."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        while self._running:
            self._running.pop()[1].close()
        self._transport.close()

    def _begins(
        self, block: nn.Module, args: Any, kwargs: dict[str, Any], recompute: bool = False
    ) -> None:
        while self._running and not any(block is one for one in self._running[-1][0].modules()):
            self._running.pop()[1].close()  # an interrupt ended it without our hooks
            self._packer.open(None)
        nested = bool(self._running)
        saving = ExitStack()
        self._running.append((block, saving))
        if nested:
            return
        sends = block in self._whole or block in self._inputs_of or recompute
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            if sends:  # a checkpoint around it saw nothing of it before, and must not now
                saving.enter_context(saved_tensors_hooks(_as_it_is, _as_it_is))
            return
        self._transport.clear_up()
        self._transport.land(but=_chain(self._last, IN_FLIGHT - 1))
        if not torch.is_grad_enabled():
            return
        if block in self._seen or self._reached is not None:
            self._pass_begins()
        self._seen.add(block)
        inputs = storages_in((args, kwargs))
        shared = self._shared_inputs.of(block, inputs)
        weights = weights_of(block, self._min_nbytes) if sends else frozenset()
        self._last = OffloadedCall(
            before=self._last,
            stays=weights | shared,
            only=None if block in self._whole else frozenset(ref.cdata for ref in inputs),
        )
        self._packer.open(self._last)
        if sends:
            saving.enter_context(saved_tensors_hooks(self._packer.pack, self._unpack))

    def _ends(self, block: nn.Module, _: Any, result: Any) -> None:
        if not self._running or self._running[-1][0] is not block:  # beginning failed
            return
        self._running.pop()[1].close()
        call = None if self._running else self._packer.close()
        if call is None:
            return
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._comes_back, call))  # type: ignore[no-untyped-call]
                return

    def _pass_begins(self) -> None:
        if self._reached is not None:  # nothing more of the pass before is needed on the device
            self._transport.land()
        self._seen.clear()
        self._last = self._reached = None
        self._shared_inputs.begin()
        change = self._distance.observe(self._packer.block_nbytes)
        if change:
            self._emit(Notice(f"blocks whose activations are brought back ahead: {change}."))

    def _unpack(self, packed: Tensor | Reference | SavedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not isinstance(packed, SavedTensor):
            assert self._ring is not None, "a reference into a ring that is not there"
            return self._ring.unpack(packed)
        if self._closed:
            raise StreamError(
                "backward reached activations whose host memory was given up. Run backward before "
                "close(), or compute the loss again."
            )
        parcel = packed.parcel
        self._comes_back(parcel.call)
        if parcel.was_changed():
            raise StreamError(
                f"a tensor of {tuple(packed.size)} that backward needs was changed in place after "
                "it was saved, and gradients would be wrong. Write to a copy of it instead."
            )
        if parcel.original is None and parcel.device is None:
            self._transport.bring(parcel, foreseen=False)
        return packed.view(parcel.read())

    def _comes_back(self, call: OffloadedCall, *_: object) -> None:
        """Backward has come to a block: have the ones before it on the device soon."""
        if call is self._reached or self._closed:
            return
        self._reached = call
        near = _chain(call, 1 + self._distance.ahead)
        self._transport.land(but=near)
        self._transport.clear_up()
        for one in near:
            for parcel in one.away():
                self._transport.bring(parcel, foreseen=one is not call)
        if self._pool.nbytes > self._told_nbytes:
            grew = "" if self._told_nbytes == 0 else f" (before: {format_bytes(self._told_nbytes)})"
            self._told_nbytes = self._pool.nbytes
            size = format_bytes(self._pool.nbytes)
            self._emit(Notice(f"offloaded activations take {size} of host memory{grew}."))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _chain(call: OffloadedCall | None, count: int) -> list[OffloadedCall]:
    """A call and those before it."""
    calls: list[OffloadedCall] = []
    while call is not None and len(calls) < count:
        calls.append(call)
        call = call.before
    return calls


# ------------------------------------------------------------------------------------------
# What of a block is sent: which tensors are worth it, and what is said when the host is full.


class OffloadPolicy:
    """Takes what autograd saves of the call that is open, and keeps count of what stays."""

    def __init__(
        self,
        device: torch.device,
        ring: Ring | None,
        transport: OffloadCopies,
        pool: HostPool,
        min_nbytes: int,
        num_blocks: int,
    ) -> None:
        self.too_small = self.shared = self.unfit = 0
        self.block_nbytes = 0
        """The most that a call sent."""
        self._device = device
        self._ring = ring
        self._transport = transport
        self._pool = pool
        self._min_nbytes = min_nbytes
        self._num_blocks = num_blocks
        self._call: OffloadedCall | None = None

    def open(self, call: OffloadedCall | None) -> None:
        """From here on a block saves; none: what one was saving when it was interrupted is over."""
        self._call = call

    def close(self) -> OffloadedCall | None:
        """The block is over; its call, where it had one."""
        call, self._call = self._call, None
        if call is not None:
            self.unfit += sum(parcel.host is None for parcel in call.gathered.values())
            call.gathered.clear()
            self.block_nbytes = max(self.block_nbytes, call.nbytes)
            self._transport.depart(call)
        return call

    def pack(self, tensor: Tensor) -> Tensor | Reference | SavedTensor:
        """For saved-tensor hooks: a streamed weight, part of a parcel, or the tensor as it is."""
        packed = tensor if self._ring is None else self._ring.pack(tensor)
        if not isinstance(packed, Tensor):
            return packed
        call = self._call
        assert call is not None, "a block saves that has not begun"
        storage = tensor.untyped_storage() if is_plain(tensor, self._device) else None
        if storage is None:
            self.unfit += 1
        elif storage.nbytes() < self._min_nbytes:
            self.too_small += 1
        elif storage._cdata in call.stays or (tensor.is_leaf and tensor.requires_grad):
            self.shared += 1
        elif call.only is not None and storage._cdata not in call.only:
            self.unfit += 1
        else:
            return self._gather(call, tensor, (storage._cdata, tensor._version))
        return tensor

    def _gather(self, call: OffloadedCall, tensor: Tensor, state: tuple[int, int]) -> SavedTensor:
        parcel = call.gathered.get(state)
        if parcel is None:
            parcel = call.gathered[state] = OffloadedTensor(call, tensor, self._transport.left)
        saved = parcel.save(tensor)
        if parcel.worth_sending() and not self._transport.send(parcel):
            raise self._no_room(max(self.block_nbytes, call.nbytes + parcel.nbytes))
        return saved

    def _no_room(self, block_nbytes: int) -> StreamError:
        return StreamError(
            f"offloaded activations need about {format_bytes(block_nbytes * self._num_blocks)} of "
            f"host memory ({format_bytes(block_nbytes)} a block, {self._num_blocks} blocks); "
            f"{format_bytes(self._pool.nbytes)} are taken and there is room for "
            f"{format_bytes(max(0, self._pool.room()))} more. Offload fewer blocks, recompute "
            "them, or use a smaller batch."
        )
