"""How fast this host queues operators: a model of no size, run as real ones are.

Loops over one operator would tell too little: they run from the processor's caches, where a dozen
blocks' Python objects do not; and models differ in how much Python there is to an operator. So it
is the very model that is planned for, with hardly any numbers, three times: as it is, prepared as a
run prepares it, and that under a policy that is asked about each call. What a pass takes is shared
out among the calls that the tracer counts, in a model that is smaller still.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.models.family import PLANNABLE, SampleShape, planner_shapes
from gracetune.plan.apply import fuse_operations
from gracetune.plan.kernels import CudaKernels, KernelRecorder
from gracetune.plan.meta_models import MetaModel, build_meta_model
from gracetune.units import GIB

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from gracetune.plan.shapes import HostCalls, Trace


ProbeModelFactory = Callable[[bool, bool], MetaModel]
"""Makes a model of no size, as it is or with what a run adds to it; and with tensors of no size, or
as large as they must be for a device to treat them as it treats real ones."""

WARM_UP, REPEATS = 1, 6
SLOWEST = 0.2
"""Share of those that is not counted: something else came between. The others are, slow or not."""


class HostSeconds(NamedTuple):
    """Seconds of the host's thread."""

    forward: float
    backward: float
    update: float


def measure_launch_costs(
    device: torch.device,
    synchronize: Callable[[], None],
    clock: Callable[[], float],
    make_model: ProbeModelFactory,
) -> LaunchCosts:
    """Measure for a few seconds, in as much memory as the models take."""
    return LaunchProbe(device, synchronize, clock, make_model).measure()


class LaunchProbe:
    """The models by which a host is measured, as often as somebody asks."""

    def __init__(
        self,
        device: torch.device,
        synchronize: Callable[[], None],
        clock: Callable[[], float],
        make_model: ProbeModelFactory,
    ) -> None:
        self._synchronize, self._clock = synchronize, clock
        _introduce(device)
        plain, prepared = (functools.partial(make_model, has_more) for has_more in (False, True))
        self._bare, self._ours = _ProbePass(plain, device), _ProbePass(prepared, device)
        self._asked = _ProbePass(prepared, device, policed=True)
        self._bare_calls, self._our_calls = self._bare.count(), self._ours.count()

    def measure(self, repeats: int = REPEATS) -> LaunchCosts:
        """What the host takes now."""
        passes = self._bare, self._ours, self._asked
        found: list[list[HostSeconds]] = [[] for _ in passes]
        for _ in range(WARM_UP + repeats):  # in turns: a host is not equally fast all the time
            for one, times in zip(passes, found, strict=True):
                self._synchronize()  # the device is done with the one before
                times.append(one.time(self._clock))
        bare, ours, asked = (_usual(times[WARM_UP:]) for times in found)
        there, back = self._bare_calls
        forward_s, backward_s = (
            bare.forward / equivalent_ops(there),
            bare.backward / equivalent_ops(back),
        )
        there, back = self._our_calls
        own_s = (ours.forward - equivalent_ops(there) * forward_s) / there.custom_ops
        own_back_s = (ours.backward - equivalent_ops(back) * backward_s) / back.custom_ops
        return LaunchCosts(
            forward_s=forward_s,
            backward_s=backward_s,
            custom_op_s=max(0.0, own_s),
            custom_op_backward_s=max(0.0, own_back_s),
            policy_s=max(0.0, asked.forward - ours.forward) / there.policy_calls,
            policy_recompute_s=max(0.0, asked.backward - ours.backward - ours.forward)
            / there.policy_calls,
            optimizer_s=ours.update / self._ours.num_trained,
        )


def _introduce(device: torch.device) -> None:
    """Let autograd's thread meet the device: were the first it does there a product, torch would
    warn that it finds no context.
    """
    torch.autograd.backward(torch.ones(1, device=device, requires_grad=True).neg())


def _usual(times: list[HostSeconds]) -> HostSeconds:
    """The mean: a step adds up what its calls take, quick and slow."""
    counted = len(times) - int(SLOWEST * len(times))
    return HostSeconds(*(fmean(sorted(way)[:counted]) for way in zip(*times, strict=True)))


class _ProbePass:
    """There and back through the model, and an update of what is trained."""

    def __init__(
        self, make: Callable[[bool], MetaModel], device: torch.device, policed: bool = False
    ) -> None:
        self._make = make
        self._device = device
        shape = make(device.type == "cuda")
        self._model = shape.model.to(device)
        subject = shape.subject()
        self._blocks = subject.blocks
        for block in self._blocks if policed else ():
            block.forward = _asking(block.forward)
        self._predict = subject.predict
        self._batch = {
            name: torch.full_like(tensor, 0.02, device=device)
            for name, tensor in subject.inputs(1).items()
        }
        self._batch["hidden_states"].requires_grad_(True)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self.num_trained = len(trained)
        self._optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True) if trained else None

    def time(self, clock: Callable[[], float]) -> HostSeconds:
        """The host's seconds for each part of a step."""
        began = clock()
        out = self._there()
        turned = clock()
        self._back(out)
        arrived = clock()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return HostSeconds(turned - began, arrived - turned, clock() - arrived)

    def count(self) -> tuple[HostCalls, HostCalls]:
        """What the host does on each way, as the tracer counts it: on the CPU, in a model of its
        own. Of the first, what a policy is asked about, which is what blocks call.
        """
        kernels = nullcontext() if self._device.type == "cpu" else CudaKernels()
        return _ProbePass(self._make, torch.device("cpu")).count_as(kernels)

    def count_as(self, kernels: AbstractContextManager[object]) -> tuple[HostCalls, HostCalls]:
        """With the kernels that another device would have."""
        watch = KernelRecorder(self._model.parameters(), self._batch.values())
        inside = 0

        def begin(*_: object) -> None:
            nonlocal inside
            inside -= watch.num_dispatched

        def end(*_: object) -> None:
            nonlocal inside
            inside += watch.num_dispatched

        self._there()  # what a model keeps from its first call is not counted
        for block in self._blocks:
            block.register_forward_pre_hook(begin)
            block.register_forward_hook(end)
        with watch, kernels:
            out = self._there()
            there = replace(watch.take_calls(0), policy_calls=inside)
            watch.take()
            self._back(out)
            return there, watch.take_calls(0)

    def _there(self) -> Tensor:
        return self._predict(self._model, self._batch)

    def _back(self, out: Tensor) -> None:
        torch.autograd.backward(out, torch.ones_like(out))
        self._batch["hidden_states"].grad = None


def _asking(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward, done again in full under a policy on the way back."""
    keeps = functools.partial(create_selective_checkpoint_contexts, _keep_nothing)

    def run(*args: Any, **kwargs: Any) -> Any:
        with set_checkpoint_early_stop(False):
            return checkpoint(forward, *args, use_reentrant=False, context_fn=keeps, **kwargs)

    return run


def _keep_nothing(_: object, op: Any, *__: object, **___: object) -> CheckpointPolicy:
    return _verdict(op)


@functools.cache
def _verdict(op: Any) -> CheckpointPolicy:
    """Looked up as a real policy looks it up."""
    kept = op.name() == "none"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# ------------------------------------------------------------------------------------------
# What queueing a step costs the host: its seconds for each kind of call.
#
# Kernels of a small batch are short, and a step that is not compiled then takes as long as the host
# needs to call its operators. `probe` measures that on the machine at hand. What the ring and the
# offload do in Python are multiples of what a policy does in Python, since all of it is bound by
# the
# interpreter.


VIEW = 0.7
"""Of an operator with a kernel, what one without takes: on a CPU, with tensors of no size."""

KEPT = 2.2
"""What a policy adds where it keeps what a call gave: in calls that it does not keep. Measured on a
CPU, Flux and Qwen-Image of no size."""
PACKED = (0.1, 0.07)
"""What the ring does with each tensor that autograd saves, there and back: in calls of a policy.
Measured on a CPU, with three models of no size."""
USED = (11.0, 10.0)
"""What it does for a block that it streams: by a clock around it on an H200, half and all of Flux's
blocks streamed. Without events and streams, on a CPU, it is 7 and 5."""
SENT = (1.2, 0.65)
"""What the offload does with each tensor that is sent to host memory and comes back: on a CPU."""


@dataclass(frozen=True, slots=True)
class LaunchCosts:
    """Seconds of the host's thread."""

    forward_s: float = 0.0
    """Of an operator that a model's code calls, with its share of that code."""
    backward_s: float = 0.0
    """Of one that autograd calls."""
    custom_op_s: float = 0.0
    """Of one of ours that a model calls, on top of the kernels inside."""
    custom_op_backward_s: float = 0.0
    """Of one that autograd calls."""
    policy_s: float = 0.0
    """What a policy adds to each call: it is asked about all of them, in Python."""
    policy_recompute_s: float = 0.0
    """What it adds to each when forward is done again."""
    optimizer_s: float = 0.0
    """What the optimizer takes for one trained tensor, however small."""

    def forward_seconds(self, trace: Trace) -> float:
        """To queue a pass forward."""
        calls = trace.forward_calls
        asked = calls.policy_calls + KEPT * calls.policy_saves
        return self._called_by_model(calls) + asked * self.policy_s

    def backward_seconds(self, trace: Trace) -> float:
        """To queue the way back, and what is done again on it."""
        again, back = trace.recompute_calls, trace.backward_calls
        twice = self._called_by_model(again) + again.policy_calls * self.policy_recompute_s
        return (
            twice
            + equivalent_ops(back) * self.backward_s
            + back.custom_ops * self.custom_op_backward_s
        )

    def hook_seconds(
        self, num_saved: float, *, streamed: bool, packed: bool, sent: bool
    ) -> tuple[float, float]:
        """What the ring and the offload do for one block, there and back.

        `packed`: some block of the model is streamed, so that the ring looks at what is saved.
        """
        each = SENT if sent else PACKED if packed else (0.0, 0.0)
        there, back = (
            (num_saved * one + (use if streamed else 0.0)) * self.policy_s
            for one, use in zip(each, USED, strict=True)
        )
        return there, back

    def _called_by_model(self, calls: HostCalls) -> float:
        return equivalent_ops(calls) * self.forward_s + calls.custom_ops * self.custom_op_s


def equivalent_ops(calls: HostCalls) -> float:
    """Calls of torch's own operators, each as dear as one with a kernel."""
    return calls.kernels + VIEW * calls.views + calls.entry_cost


# ------------------------------------------------------------------------------------------
# Models without weights as a run prepares them; and of no size, to measure a host by.


PROXY_FAMILY = "wan22"
"""For a family whose shape nobody has published."""
EDGE, TOKENS, RANK = 64, 8, 2
"""Of a model of no size: pixels of its picture, tokens of text, its LoRA."""
ROOMY = {"attention_head_dim": 128, "axes_dims_rope": (16, 56, 56), "ffn_dim": 1024}
ROOMY_EDGE, ROOMY_TOKENS = 1024, 3072
"""Of one whose tensors have a MiB or more, and heads as models have them: torch's allocator and its
kernels treat smaller ones differently, and a host is quicker with those."""
REALISTIC_NBYTES = 2 * GIB
"""What must be free to measure by such models: the largest, Qwen-Image's, take 1.3 GiB for weights
and for what they save."""


def prepare_for_training(shape: MetaModel, section: AdapterSection) -> None:
    """Give a model an adapter, and make both run as in a run."""
    with next(shape.model.parameters()).device:
        add_adapter({"": shape.model}, section, shape.shapes.targets, seed=0)
    fuse_operations(shape.model)


def build_probe_model(family: str, has_adapter: bool, is_roomy: bool = False) -> MetaModel:
    """The family's model with hardly any numbers, as it is or as a run has it.

    A roomy one is for a GPU that has the room; a CPU would compute for seconds.
    """
    name = family if family in PLANNABLE else PROXY_FAMILY
    changes = planner_shapes(name).probe_config
    edge, tokens = EDGE, TOKENS
    if is_roomy and changes:  # what is small as it is stays so
        changes = {key: ROOMY.get(key, value) for key, value in changes.items()}
        edge, tokens = ROOMY_EDGE, ROOMY_TOKENS
    with torch.random.fork_rng(devices=[]):  # a run that is about to start draws as if it were not
        shape = build_meta_model(ModelSection(family=name), SampleShape(edge, edge), changes, "cpu")
        if has_adapter:
            prepare_for_training(shape, AdapterSection(rank=RANK))
    text = tokens, shape.encoded.text_shape[1]
    return replace(shape, encoded=replace(shape.encoded, text_shape=text))
