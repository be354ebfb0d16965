"""Apply a plan to a model: stream weights, offload or recompute activations, compile blocks.

`apply_plan` stacks four parts, each of which is optional:

    weight ring (offload/ring.py)          hooks that bind streamed weights
    activation offload                     saved-tensor hooks that move activations to the host
    block compiler                         torch.compile for each block
    checkpoint wrappers                    what each block keeps or recomputes

`AppliedPlan.close` removes them in reverse order.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.adapters.compute.fused_lora import fuse_lora
from gracetune.distributed.ranks import SINGLE
from gracetune.models.attention_processors import use_fused_processors
from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks
from gracetune.offload.ring import DEFAULT_SLOTS, stream_weights
from gracetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.types import Notice
    from gracetune.offload.activations import ActivationOffload
    from gracetune.offload.checkpointing import CheckpointMode
    from gracetune.offload.copy_engine import CopyEngine
    from gracetune.offload.ring import WeightRing
    from gracetune.plan.result import BlockPlan

    Emit = Callable[[Notice], None]


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """A plan's decisions in the form that `apply_plan` takes.

    A model with two transformers (Wan 2.2: high noise and low noise) uses the layout for both.
    """

    blocks: Sequence[BlockPlan]
    compiled: bool
    slots: int = DEFAULT_SLOTS
    """Number of slots of the weight ring (device buffers for one streamed block each)."""
    offload: OffloadSettings | None = None
    """Settings of the activation offload; None: defaults, and activations may be prefetched into
    `spare_nbytes` of device memory."""
    min_offload_nbytes: int = MIB
    """Activations of fewer bytes stay on the device."""
    spare_nbytes: int = 0
    """Bytes of device memory that the plan leaves free. Prefetched activations may use them."""
    dynamic: bool = True
    """True if compiled blocks must accept sequences of several lengths."""
    dynamic_batch: bool = False
    """True if compiled blocks must accept batches of several sizes."""
    num_graphs: int = 0
    """Number of graphs that will be compiled, to report the progress; 0: unknown."""
    eager_modes: Sequence[CheckpointMode] = ()
    """For each block of a compiled plan, its mode if it cannot be compiled after all
    (`CostModel.eager_modes`). Empty: the mode of the plan, in which it may keep more."""


class AppliedPlan:
    """The hooks and wrappers of a plan that is applied to a model.

    `close` removes them and leaves streamed weights in host memory.
    """

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
        """Let the weight ring add slots while steps wait for weights, within `nbytes` in all.

        With activation offload, half of `nbytes` is left to the offload.
        """
        if self.ring is not None:  # the activation offload may use the other half
            self.ring.enable_autosize(nbytes if self.offload is None else nbytes // 2)

    def shrink_ring(self) -> bool:
        """Free the slots that the weight ring has added; return False if there were none."""
        return self.ring is not None and self.ring.release_extra_slots()

    def trim(self) -> int:
        """Free device memory that only makes copies earlier; return the bytes."""
        ring = 0 if self.ring is None else self.ring.trim()
        return ring + (0 if self.offload is None else self.offload.trim())

    def restore(self) -> None:
        """Let the ring and the prefetched activations grow again."""
        if self.ring is not None:
            self.ring.restore()
        if self.offload is not None:
            self.offload.restore()

    def stall_seconds(self) -> float:
        """Return how many seconds compute has waited for copies of weights and activations.

        Synchronizes with the device.
        """
        ring = 0.0 if self.ring is None else self.ring.counters().stalled_s
        return ring + (0.0 if self.offload is None else self.offload.counters().stalled_s)

    def close(self) -> None:
        """Remove all hooks and wrappers, in the reverse order of their installation."""
        self._undo.close()
        self.ring = self.offload = self.compiler = None


def fuse_operations(transformer: nn.Module, undo: ExitStack | None = None) -> None:
    """Fuse each LoRA with its base matmul, and rotary embedding with attention.

    The callbacks that restore the transformer are pushed to `undo`.
    """
    fuse_lora(transformer, undo)
    use_fused_processors(transformer, undo)


def apply_plan(
    model: nn.Module,
    transformers: Mapping[nn.Module, Sequence[nn.Module]],
    layout: PlanLayout,
    copy_engine: CopyEngine,
    emit: Emit,
    backend: str = "inductor",
    ranks: RankGroup = SINGLE,
) -> AppliedPlan:
    """Move a model to the device, and install the hooks and wrappers of its plan.

    `transformers` maps each transformer of the model to its blocks. Set `requires_grad` before this
    call: only frozen weights can be streamed. If anything does not fit, an exception is raised and
    all hooks are removed. All `ranks` must call this at the same time, with the same layout; those
    of one machine share the streamed weights.
    """
    blocks = [block for blocks in transformers.values() for block in blocks]
    plans = [plan for _ in transformers for plan in layout.blocks]
    with ExitStack() as undo:
        ring = _stream(model, transformers, layout, copy_engine, emit, ranks)
        if ring is None:
            model.to(copy_engine.device)
        else:
            undo.callback(ring.close, to_device=False)
        offload = _offload(blocks, plans, layout, ring, copy_engine, emit)
        if offload is not None:
            undo.callback(offload.close)
        compiler = _wrap(blocks, plans, layout, ring, emit, backend, undo)
        return AppliedPlan(ring, offload, compiler, undo.pop_all())


def apply_checkpointing(
    blocks: Sequence[nn.Module], layout: PlanLayout, emit: Emit, backend: str = "inductor"
) -> AppliedPlan:
    """Set what blocks keep for backward, and compile them; their weights stay where they are.

    For blocks that `fully_shard` divides among ranks, which moves weights itself. `blocks` are
    those of all transformers, which use the same layout.
    """
    plans = [*layout.blocks] * (len(blocks) // len(layout.blocks))
    assert all(p.weights == "resident" and p.activations != "offload" for p in plans), plans
    with ExitStack() as undo:
        compiler = _wrap(blocks, plans, layout, None, emit, backend, undo)
        return AppliedPlan(None, None, compiler, undo.pop_all())


def _wrap(
    blocks: Sequence[nn.Module],
    plans: Sequence[BlockPlan],
    layout: PlanLayout,
    ring: WeightRing | None,
    emit: Emit,
    backend: str,
    undo: ExitStack,
) -> BlockCompiler | None:
    """Wrap the blocks of all transformers, and return the compiler if they are compiled."""
    compiler = None
    if layout.compiled:
        compiler = BlockCompiler(
            emit,
            backend,
            dynamic=layout.dynamic,
            dynamic_batch=layout.dynamic_batch,
            expected=layout.num_graphs,
        )
        undo.callback(compiler.close)
    modes = [_checkpoint_mode(plan, layout.compiled) for plan in plans]
    eager_modes = [*layout.eager_modes] * (len(blocks) // len(layout.blocks))
    eager_modes = eager_modes or [_checkpoint_mode(plan, compiled=False) for plan in plans]
    undo.callback(wrap_blocks(blocks, modes, compiler, ring, eager_modes).close)
    return compiler


def _checkpoint_mode(plan: BlockPlan, compiled: bool) -> CheckpointMode:
    """Return the checkpoint mode for a block's plan: `keep`, `lean` or `recompute`.

    A compiled block that is offloaded uses `lean`. An eager offloaded block uses `keep`, because
    saved-tensor hooks do not see the tensors that selective checkpointing stores.
    """
    if plan.activations == "offload":
        return "lean" if compiled else "keep"
    return plan.activations


def _stream(
    model: nn.Module,
    transformers: Mapping[nn.Module, Sequence[nn.Module]],
    layout: PlanLayout,
    copy_engine: CopyEngine,
    emit: Emit,
    ranks: RankGroup,
) -> WeightRing | None:
    numbers = [i for i, plan in enumerate(layout.blocks) if plan.weights == "streamed"]
    if not numbers:
        return None
    streamed = [blocks[number] for blocks in transformers.values() for number in numbers]
    return stream_weights(
        model,
        streamed,
        copy_engine,
        emit,
        layout.slots,
        submodels=list(transformers),
        ranks=ranks,
    )


def _offload(
    blocks: Sequence[nn.Module],
    plans: Sequence[BlockPlan],
    layout: PlanLayout,
    ring: WeightRing | None,
    copy_engine: CopyEngine,
    emit: Emit,
) -> ActivationOffload | None:
    is_sent = [p.activations == "offload" or p.offload_input for p in plans]
    if not any(is_sent):
        return None
    spare = layout.spare_nbytes if ring is None else layout.spare_nbytes // 2
    return offload_activations(
        [block for block, sent in zip(blocks, is_sent, strict=True) if sent],
        copy_engine,
        ring,
        emit,
        layout.min_offload_nbytes,
        other_blocks=[block for block, sent in zip(blocks, is_sent, strict=True) if not sent],
        settings=layout.offload or OffloadSettings(prefetch_nbytes=spare),
    )
