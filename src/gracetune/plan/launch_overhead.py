"""Measure how long the CPU takes to launch a training step (CPU launch overhead).

Kernels of a small batch are short. An eager step then takes as long as the CPU needs to call its
operators, so the planner needs the cost of a call on the machine at hand. Timing one operator in a
loop would be too optimistic: it runs from the CPU's caches, and models differ in how much Python
surrounds an operator. Instead a tiny version of the planned model is run (`build_probe_model`):
all its blocks and operators, hardly any numbers. Six variants are timed:

    bare          the model as it is                                -> cost per operator
    fused         the model with a LoRA, fused as in a run          -> cost per custom operator
    checkpointed  fused, and all blocks are recomputed              -> cost per recomputed operator
    streamed      checkpointed, with all weights in the ring        -> cost of the ring per block
    sent          streamed, with inputs of blocks in host memory    -> cost of the offload per block
    casts         only the casts of all LoRA weights to bf16, which the other variants do not need,
                  because their LoRA weights are in bf16            -> cost per trained tensor

The time of a variant, divided by the calls that the tracer counts in it, is the cost of one call:

    forward_s    = t(bare forward) / ops(bare forward)
    custom_op_s  = (t(fused forward) - ops(fused forward) * forward_s) / custom ops
    checkpoint_s = (t(checkpointed forward) - t(fused forward)) / ops in blocks
    stream_s     = (t(streamed forward) - t(checkpointed forward)) / blocks
    send_s       = (t(sent forward) - t(streamed forward)) / blocks
    cast_s       = t(casts forward) / trained tensors

The CPU's speed varies over time, by more than some of these differences. Variants are therefore
timed in turns, times are subtracted within a round, and each cost is the median over all rounds.

The hooks of the ring and the offload that run for each saved tensor are not timed. Their cost is
estimated as a multiple of `forward_s`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gracetune.adapters.compute.fused_lora import MultiTensorCast
from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.memory.platform import Link
from gracetune.models.family import PLANNABLE, SampleShape, planner_shapes
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.plan.apply import PlanLayout, apply_plan, fuse_operations
from gracetune.plan.kernel_recorder import CudaKernels, KernelRecorder
from gracetune.plan.meta_models import MetaModel, build_meta_model
from gracetune.plan.result import BlockPlan
from gracetune.plan.trace import convert_for_tracing
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.result import FrozenCompute
    from gracetune.plan.trace_records import HostCalls, Trace


ProbeModelFactory = Callable[[bool, bool], MetaModel]
"""Function that builds a probe model. Its arguments tell whether the model has an adapter, and
whether its tensors have realistic sizes."""

WARM_UP, REPEATS = 1, 9
"""Number of untimed and of timed rounds, each with one pass of every variant. A round takes a GPU
machine about 0.4 s."""

VIEW_COST = 0.7
"""CPU time of an operator that launches no kernel, relative to one that does. Measured on a CPU
with tiny tensors."""
PACK_COSTS = (0.17, 0.12)
"""CPU time of the weight ring's saved-tensor hooks per saved tensor, in forward and in backward, in
units of `LaunchCosts.forward_s`. Measured on a CPU with three tiny models."""
OFFLOAD_COSTS = (2.0, 1.1)
"""CPU time of the activation offload per saved tensor, in forward and in backward, in units of
`LaunchCosts.forward_s`. Measured on a CPU."""

PROXY_FAMILY = "wan22"
"""Model family that stands in for a family without published shapes in the launch probe."""
TINY_EDGE, TINY_TOKENS, TINY_RANK = 64, 8, 2
"""Image edge in pixels, text tokens and LoRA rank of a tiny probe model."""
REALISTIC_CONFIG = {"attention_head_dim": 128, "axes_dims_rope": (16, 56, 56), "ffn_dim": 1024}
REALISTIC_EDGE, REALISTIC_TOKENS = 1024, 3072
"""Image edge in pixels and text tokens of a realistic probe model, whose tensors have a MiB or
more. torch's allocator and kernels treat smaller tensors differently, and launch them faster."""
REALISTIC_NBYTES = 2 * GIB
"""Bytes of free device memory that realistic probe models require. The largest, Qwen-Image's, takes
1.3 GiB for weights and saved activations."""


@dataclass(frozen=True, slots=True)
class LaunchCosts:
    """CPU seconds per operator call, by kind of call, while the CPU launches kernels."""

    forward_s: float = 0.0
    """CPU time of an operator called by the model, including the model's own Python code around
    it."""
    backward_s: float = 0.0
    """CPU time of an operator called by autograd."""
    custom_op_s: float = 0.0
    """CPU time of a custom operator called by the model, without launching its kernels."""
    custom_op_backward_s: float = 0.0
    """CPU time of a custom operator called by autograd, without launching its kernels."""
    checkpoint_s: float = 0.0
    """CPU time that checkpointing adds to an operator in forward."""
    checkpoint_recompute_s: float = 0.0
    """CPU time that checkpointing adds to an operator that backward recomputes."""
    optimizer_s: float = 0.0
    """CPU time of gradient clipping and an optimizer step, per trained tensor."""
    cast_s: float = 0.0
    """CPU time of casting the trained weights to the compute dtype, per tensor."""
    cast_backward_s: float = 0.0
    """CPU time of casting their gradients back, per tensor."""
    stream_s: float = 0.0
    """CPU time of the weight ring in forward, per streamed block."""
    stream_backward_s: float = 0.0
    """CPU time of the weight ring in backward, per streamed block."""
    send_s: float = 0.0
    """CPU time of the activation offload in forward, per block that sends something."""
    send_backward_s: float = 0.0
    """CPU time of the activation offload in backward, per block that has sent something."""

    def forward_seconds(self, trace: Trace) -> float:
        """Return the CPU seconds to launch a traced block's forward pass."""
        calls = trace.forward_calls
        return self._model_seconds(calls) + calls.checkpointed * self.checkpoint_s

    def backward_seconds(self, trace: Trace) -> float:
        """Return the CPU seconds to launch a traced block's backward pass.

        The launches of recomputed forward work are included.
        """
        recompute, backward = trace.recompute_calls, trace.backward_calls
        seconds = self._model_seconds(recompute)
        seconds += recompute.checkpointed * self.checkpoint_recompute_s
        seconds += equivalent_ops(backward) * self.backward_s
        return seconds + backward.custom_ops * self.custom_op_backward_s

    def hook_seconds(
        self, num_saved: float, *, streamed: bool, packed: bool, sent: bool
    ) -> tuple[float, float]:
        """Return the CPU time of hooks in a block's forward and backward.

        `num_saved` is the number of tensors that the block saves. `streamed`: its weights are
        streamed. `packed`: the model has a weight ring, whose hooks see every saved tensor.
        `sent`: the block's activations are offloaded.
        """
        per_tensor = OFFLOAD_COSTS if sent else PACK_COSTS if packed else (0.0, 0.0)
        forward, backward = (num_saved * each * self.forward_s for each in per_tensor)
        if streamed:
            forward, backward = forward + self.stream_s, backward + self.stream_backward_s
        if sent:
            forward, backward = forward + self.send_s, backward + self.send_backward_s
        return forward, backward

    def _model_seconds(self, calls: HostCalls) -> float:
        return equivalent_ops(calls) * self.forward_s + calls.custom_ops * self.custom_op_s


def equivalent_ops(calls: HostCalls) -> float:
    """Return how many operators with one kernel each would take as much CPU time as these calls.

    Custom operators are not included.
    """
    return calls.kernels + VIEW_COST * calls.views + calls.entry_cost


# The probe


class HostSeconds(NamedTuple):
    """CPU seconds of one step: forward, backward and the optimizer's update."""

    forward: float
    backward: float
    update: float = 0.0


class ProbeRound(NamedTuple):
    """CPU time of each variant of the probe model, timed one right after the other."""

    bare: HostSeconds
    fused: HostSeconds
    checkpointed: HostSeconds
    streamed: HostSeconds
    sent: HostSeconds
    casts: HostSeconds


def measure_launch_costs(
    device: torch.device,
    synchronize: Callable[[], None],
    clock: Callable[[], float],
    make_model: ProbeModelFactory,
) -> LaunchCosts:
    """Build small probe models, time them for a few seconds, and return the CPU's launch costs."""
    with closing(LaunchProbe(device, synchronize, clock, make_model)) as probe:
        return probe.measure(REPEATS)


class LaunchProbe:
    """Small models on a device, whose steps are timed to measure launch overhead.

    They can be measured several times.
    """

    def __init__(
        self,
        device: torch.device,
        synchronize: Callable[[], None],
        clock: Callable[[], float],
        make_model: ProbeModelFactory,
    ) -> None:
        self._synchronize, self._clock = synchronize, clock
        _start_autograd_thread(device)
        bare, fused = (functools.partial(make_model, has_adapter) for has_adapter in (False, True))
        self._bare, self._fused = _ProbeStep(bare, device), _ProbeStep(fused, device)
        self._checkpointed = _ProbeStep(fused, device, plan=BlockPlan("resident", "recompute"))
        self._streamed = _ProbeStep(fused, device, plan=BlockPlan("streamed", "recompute"))
        self._sent = _ProbeStep(
            fused, device, plan=BlockPlan("streamed", "recompute", offload_input=True)
        )
        self._casts = _CastStep(self._fused.trained)
        self._calls = ProbeCalls(
            self._bare.count(),
            self._fused.count(),
            num_blocks=self._fused.num_blocks,
            num_trained=len(self._fused.trained),
        )

    def measure(self, repeats: int = REPEATS) -> LaunchCosts:
        """Time all variants of the probe model in turns, and return the CPU time of each call."""
        steps = (
            *(self._bare, self._fused, self._checkpointed, self._streamed, self._sent),
            self._casts,
        )
        rounds = []
        for _ in range(WARM_UP + repeats):
            times = []
            for step in steps:
                self._synchronize()  # the device must not be busy with the previous variant
                times.append(step.time(self._clock))
            rounds.append(ProbeRound(*times))
        return costs_per_call(rounds[WARM_UP:], self._calls)

    def close(self) -> None:
        """Free the host memory of streamed weights and offloaded activations."""
        for variant in (self._sent, self._streamed, self._checkpointed):
            variant.close()


def _start_autograd_thread(device: torch.device) -> None:
    """Run one operator in autograd's thread, so that the thread creates its CUDA context.

    If a matmul were the first operator in that thread, torch would warn about a missing context.
    """
    torch.autograd.backward(torch.ones(1, device=device, requires_grad=True).neg())


@dataclass(frozen=True, slots=True)
class ProbeCalls:
    """Counts of a probe model: its operator calls, blocks and trained tensors."""

    bare: tuple[HostCalls, HostCalls]
    """Calls in forward and in backward of the model as it is."""
    fused: tuple[HostCalls, HostCalls]
    """Calls in forward and in backward of the model with a LoRA, without casts of its weights."""
    num_blocks: int
    num_trained: int


def costs_per_call(rounds: Sequence[ProbeRound], calls: ProbeCalls) -> LaunchCosts:
    """Return the CPU time of each kind of call, from the times of all variants."""

    def typical(difference: Callable[[ProbeRound], float]) -> float:
        return max(0.0, median(map(difference, rounds)))

    (forward, backward), (fused_forward, fused_backward) = calls.bare, calls.fused
    # A model with a LoRA has other operators besides the custom ones.
    ratio = equivalent_ops(fused_forward) / equivalent_ops(forward)
    ratio_backward = equivalent_ops(fused_backward) / equivalent_ops(backward)
    custom = typical(lambda r: r.fused.forward - ratio * r.bare.forward)
    custom_backward = typical(lambda r: r.fused.backward - ratio_backward * r.bare.backward)
    checkpoint = typical(lambda r: r.checkpointed.forward - r.fused.forward)
    in_blocks = fused_forward.checkpointed / fused_forward.dispatched
    recompute = typical(
        lambda r: r.checkpointed.backward - r.fused.backward - in_blocks * r.fused.forward
    )
    blocks, trained = calls.num_blocks, calls.num_trained
    return LaunchCosts(
        forward_s=typical(lambda r: r.bare.forward) / equivalent_ops(forward),
        backward_s=typical(lambda r: r.bare.backward) / equivalent_ops(backward),
        custom_op_s=custom / fused_forward.custom_ops,
        custom_op_backward_s=custom_backward / fused_backward.custom_ops,
        checkpoint_s=checkpoint / fused_forward.checkpointed,
        checkpoint_recompute_s=recompute / fused_forward.checkpointed,
        optimizer_s=typical(lambda r: r.fused.update) / trained,
        cast_s=typical(lambda r: r.casts.forward) / trained,
        cast_backward_s=typical(lambda r: r.casts.backward) / trained,
        stream_s=typical(lambda r: r.streamed.forward - r.checkpointed.forward) / blocks,
        stream_backward_s=typical(lambda r: r.streamed.backward - r.checkpointed.backward) / blocks,
        send_s=typical(lambda r: r.sent.forward - r.streamed.forward) / blocks,
        send_backward_s=typical(lambda r: r.sent.backward - r.streamed.backward) / blocks,
    )


class _ProbeStep:
    """Runs training steps of a probe model, a small model that measures launch overhead."""

    def __init__(
        self,
        make: Callable[[bool], MetaModel],
        device: torch.device,
        plan: BlockPlan | None = None,
    ) -> None:
        """`plan`: apply it to all blocks, as a run does; None: they run as they are."""
        self._make = make
        self._device = device
        meta_model = make(device.type == "cuda")
        self._model = meta_model.model.to(device)
        target = meta_model.trace_target()
        self._blocks = target.blocks
        self._applied = None if plan is None else self._apply(plan)
        self._predict = target.predict
        self._batch = {
            name: torch.full_like(tensor, 0.02, device=device)
            for name, tensor in target.inputs(1).items()
        }
        self._latents = next(iter(self._batch.values())).requires_grad_(True)
        self.trained = [p for p in self._model.parameters() if p.requires_grad]
        for weight in self.trained:  # casts are timed and counted separately
            weight.data = weight.data.to(meta_model.dtype)
        self._optimizer = None
        if self.trained:
            self._optimizer = torch.optim.AdamW(self.trained, lr=0.0, fused=True)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model."""
        return len(self._blocks)

    def _apply(self, plan: BlockPlan) -> AppliedPlan:
        layout = PlanLayout([plan] * len(self._blocks), compiled=False, min_offload_nbytes=1)
        # Streamed weights are pinned on this link, as in most runs that stream.
        copy_engine = open_copy_engine(self._device, Link.MANAGED)
        transformers = {self._model: self._blocks}
        return apply_plan(self._model, transformers, layout, copy_engine, lambda _: None)

    def close(self) -> None:
        """Remove the hooks of the applied plan, if there is one."""
        if self._applied is not None:
            self._applied.close()

    def time(self, clock: Callable[[], float]) -> HostSeconds:
        """Run a step and return the CPU time of each part, without waiting for the device."""
        start = clock()
        out = self._forward()
        after_forward = clock()
        self._backward(out)
        after_backward = clock()
        if self._optimizer is not None:
            self._clip_gradients()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return HostSeconds(
            after_forward - start, after_backward - after_forward, clock() - after_backward
        )

    def _clip_gradients(self) -> None:
        """Multiply all gradients by a number on the device, as a training step does."""
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, torch.nn.utils.get_total_norm(gradients).clamp(max=1.0))

    def count(self) -> tuple[HostCalls, HostCalls]:
        """Count the operator calls of forward and backward in a tiny copy of the model on the CPU.

        `checkpointed` of forward is the number of operators inside blocks.
        """
        kernels = nullcontext() if self._device.type == "cpu" else CudaKernels()
        return _ProbeStep(self._make, torch.device("cpu"))._count_under(kernels)

    def _count_under(self, kernels: AbstractContextManager[object]) -> tuple[HostCalls, HostCalls]:
        recorder = KernelRecorder(self._model.parameters(), self._batch.values())
        in_blocks = 0

        def block_begins(*_: object) -> None:
            nonlocal in_blocks
            in_blocks -= recorder.num_dispatched

        def block_ends(*_: object) -> None:
            nonlocal in_blocks
            in_blocks += recorder.num_dispatched

        self._forward()  # a model may cache tables in its first call, which must not be counted
        for block in self._blocks:
            block.register_forward_pre_hook(block_begins)
            block.register_forward_hook(block_ends)
        with recorder, kernels:
            out = self._forward()
            forward = replace(recorder.take_calls(0), checkpointed=in_blocks)
            recorder.take()
            self._backward(out)
            return forward, recorder.take_calls(0)

    def _forward(self) -> Tensor:
        return self._predict(self._model, self._batch)

    def _backward(self, out: Tensor) -> None:
        torch.autograd.backward(out, torch.ones_like(out))
        self._latents.grad = None


class _CastStep:
    """Casts trained weights to the compute dtype, and their gradients back, as each step does."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """`weights`: the trained weights in the compute dtype."""
        self._dtype = weights[0].dtype
        self._stored = [torch.zeros_like(w, dtype=torch.float32).requires_grad_() for w in weights]
        self._gradients = [torch.zeros_like(w, requires_grad=False) for w in weights]

    def time(self, clock: Callable[[], float]) -> HostSeconds:
        """Cast in both directions and return the CPU time, without waiting for the device."""
        start = clock()
        copies = MultiTensorCast.apply(self._dtype, *self._stored)  # type: ignore[no-untyped-call]
        after_forward = clock()
        torch.autograd.grad(copies, self._stored, self._gradients)
        return HostSeconds(after_forward - start, clock() - after_forward)


# Probe models


def build_probe_model(family: str, has_adapter: bool, is_realistic: bool = False) -> MetaModel:
    """Build a tiny version of a family's model: as it is, or with a LoRA as in a run.

    With `is_realistic`, its tensors are as large as a GPU needs for realistic timing. A CPU would
    compute for seconds.
    """
    name = family if family in PLANNABLE else PROXY_FAMILY
    changes = planner_shapes(name).probe_config
    edge, tokens = TINY_EDGE, TINY_TOKENS
    if is_realistic and changes:  # a family without a probe_config is tiny as it is
        changes = {key: REALISTIC_CONFIG.get(key, value) for key, value in changes.items()}
        edge, tokens = REALISTIC_EDGE, REALISTIC_TOKENS
    with torch.random.fork_rng(devices=[]):  # the run that is about to start must not notice
        section = ModelSection(family=name)
        model = build_meta_model(section, SampleShape(edge, edge), changes, "cpu")
        if has_adapter:
            prepare_for_training(model, AdapterSection(rank=TINY_RANK))
    text_shape = tokens, model.encoded.text_shape[1]
    return replace(model, encoded=replace(model.encoded, text_shape=text_shape))


def prepare_for_training(
    model: MetaModel, section: AdapterSection, frozen_compute: FrozenCompute = "bf16"
) -> None:
    """Add an adapter to a model and fuse its operations, as a training run does.

    A model whose frozen layers compute in fp8 must be on the meta device.
    """
    with next(model.model.parameters()).device:
        add_adapter({"": model.model}, section, model.shapes.targets, seed=0)
    if frozen_compute == "fp8":
        convert_for_tracing(model.trace_target())
    fuse_operations(model.model)
