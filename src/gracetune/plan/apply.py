"""A plan applied to a model: what streams, what is kept, what waits in host memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.adapters.compute.fused_lora import fuse_lora
from gracetune.models.attention_processors import use_fused_processors
from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks
from gracetune.offload.ring import DEFAULT_SLOTS, stream_weights
from gracetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from gracetune.events.types import Notice
    from gracetune.offload.activations import ActivationOffload
    from gracetune.offload.checkpointing import CheckpointMode
    from gracetune.offload.copies import CopyEngine
    from gracetune.offload.ring import WeightRing
    from gracetune.plan.result import BlockPlan

    Emit = Callable[[Notice], None]


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """How every transformer of a model runs; two experts run alike."""

    blocks: Sequence[BlockPlan]
    compiled: bool
    slots: int = DEFAULT_SLOTS
    offload: OffloadSettings | None = None
    min_offload_nbytes: int = MIB
    """Activations smaller than this stay on the device."""
    spare_nbytes: int = 0
    """Device memory that is left: where backward waits, more activations come back ahead in it."""


class AppliedPlan:
    """A model that runs as planned; `close` leaves what was streamed in host memory."""

    def __init__(
        self,
        ring: WeightRing | None,
        offload: ActivationOffload | None,
        compiler: BlockCompiler | None,
        undo: ExitStack,
    ) -> None:
        self.ring = ring
        self.offload = offload
        self.compiler = compiler
        self._undo = undo

    def allow_ring_growth(self, nbytes: int) -> None:
        """Let the ring add slots in so much device memory, where steps wait for weights."""
        if self.ring is not None:  # the other half is for activations, where any are sent
            self.ring.enable_autosize(nbytes if self.offload is None else nbytes // 2)

    def shrink_ring(self) -> bool:
        """Take back what was added to the ring; false where nothing was."""
        return self.ring is not None and self.ring.release_extra_slots()

    def stall_seconds(self) -> float:
        """How long computing has stood still for copies so far; waits for the device."""
        ring = 0.0 if self.ring is None else self.ring.counters().stalled_s
        return ring + (0.0 if self.offload is None else self.offload.counters().stalled_s)

    def close(self) -> None:
        """The last that was put on goes first; nothing that was put on is left to be asked."""
        self._undo.close()
        self.ring = self.offload = self.compiler = None


def fuse_operations(transformer: nn.Module, undo: ExitStack | None = None) -> None:
    """The same numbers by fewer passes; what would leave it as it was is put on `undo`."""
    fuse_lora(transformer, undo)
    use_fused_processors(transformer, undo)


def apply_plan(
    model: nn.Module,
    transformers: Mapping[nn.Module, Sequence[nn.Module]],
    layout: PlanLayout,
    mover: CopyEngine,
    emit: Emit,
    backend: str = "inductor",
) -> AppliedPlan:
    """Bring a model to the device as a plan says; each of its transformers comes with its blocks.

    Call it when it is settled what is trained: frozen weights stream, others never do.
    """
    blocks = [block for part in transformers.values() for block in part]
    plans = [plan for _ in transformers for plan in layout.blocks]
    with ExitStack() as undo:  # what does not fit after all leaves nothing behind
        ring = _stream(model, transformers, layout, mover, emit)
        if ring is None:
            model.to(mover.device)
        else:
            undo.callback(ring.close, to_device=False)
        offload = _offload(blocks, plans, layout, ring, mover, emit)
        if offload is not None:
            undo.callback(offload.close)
        compiler = BlockCompiler(emit, backend) if layout.compiled else None
        if compiler is not None:
            undo.callback(compiler.close)
        keeping = [_keeping(plan, layout.compiled) for plan in plans]
        running = wrap_blocks(blocks, keeping, compiler, ring)
        undo.callback(running.close)
        return AppliedPlan(ring, offload, compiler, undo.pop_all())


def _keeping(plan: BlockPlan, compiled: bool) -> CheckpointMode:
    """What a block does not compute again. An offloaded one keeps it elsewhere: compiled, the lean
    set; eager, all that autograd saves, since a policy's own savings cannot be sent.
    """
    if plan.activations == "offload":
        return "lean" if compiled else "keep"
    return plan.activations


def _stream(
    model: nn.Module,
    transformers: Mapping[nn.Module, Sequence[nn.Module]],
    layout: PlanLayout,
    mover: CopyEngine,
    emit: Emit,
) -> WeightRing | None:
    chosen = [i for i, plan in enumerate(layout.blocks) if plan.weights == "streamed"]
    if not chosen:
        return None
    streamed = [part[index] for part in transformers.values() for index in chosen]
    return stream_weights(model, streamed, mover, emit, layout.slots, submodels=list(transformers))


def _offload(
    blocks: Sequence[nn.Module],
    plans: Sequence[BlockPlan],
    layout: PlanLayout,
    ring: WeightRing | None,
    mover: CopyEngine,
    emit: Emit,
) -> ActivationOffload | None:
    sends = [p.activations == "offload" or p.offload_input for p in plans]
    if not any(sends):
        return None
    spare = layout.spare_nbytes if ring is None else layout.spare_nbytes // 2
    return offload_activations(
        [block for block, sent in zip(blocks, sends, strict=True) if sent],
        mover,
        ring,
        emit,
        layout.min_offload_nbytes,
        other_blocks=[block for block, sent in zip(blocks, sends, strict=True) if not sent],
        settings=layout.offload or OffloadSettings(prefetch_nbytes=spare),
    )
