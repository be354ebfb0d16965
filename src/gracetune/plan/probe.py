"""How fast this host queues operators: a model of no size, run as real ones are.

Loops over one operator would tell too little: they run from the processor's caches, where a block's
thousand lines of Python do not. So it is a real transformer with hardly any numbers, three times:
as it is, with operators of ours in place of its products, and those under a policy that is asked
about each call. What a pass takes is shared out among the calls that the tracer counts.
"""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gracetune.config.schema import ModelSection
from gracetune.plan.eager import CudaKernels, Watch
from gracetune.plan.host import Host, operators
from gracetune.plan.known_models import Picture
from gracetune.plan.outlines import outline

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from gracetune.plan.outlines import Outline
    from gracetune.plan.shapes import Calls

NARROW = {
    "num_layers": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 32,
    "text_dim": 16,
    "freq_dim": 16,
}
TOKENS = 8
"""Of text."""
WARM_UP, REPEATS = 3, 12
RANK = 2


def probe_host(
    device: torch.device, synchronize: Callable[[], None], clock: Callable[[], float]
) -> Host:
    """Measure for about a second; takes no memory to speak of."""
    plain, ours = (_Pass(_shape(has_ours), device) for has_ours in (False, True))
    policed = _Pass(ours.shape, device, policed=True)
    passes = plain, ours, policed
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in range(len(passes))}
    for _ in range(WARM_UP + REPEATS):  # in turns: a host is not equally fast all the time
        for number, one in enumerate(passes):
            synchronize()  # the device is done with the one before
            found[number].append(one.time(clock))
    seconds = [
        tuple(median(way) for way in zip(*times[WARM_UP:], strict=True)) for times in found.values()
    ]
    (there_s, back_s), (ours_there_s, ours_back_s), (asked_there_s, asked_back_s) = seconds
    there, back = plain.count()
    forward_s, backward_s = there_s / operators(there), back_s / operators(back)
    there, back = ours.count()
    known_s = operators(there) * forward_s + operators(back) * backward_s
    own_s = (ours_there_s + ours_back_s - known_s) / (there.own + back.own)
    return Host(
        forward_s=forward_s,
        backward_s=backward_s,
        own_s=max(0.0, own_s),
        policed_s=max(0.0, asked_there_s - ours_there_s) / there.dispatched,
        again_s=max(0.0, asked_back_s - ours_back_s - ours_there_s) / there.dispatched,
    )


def _shape(has_ours: bool) -> Outline:
    shape = outline(ModelSection(family="wan22"), Picture(64, 64), NARROW)
    if has_ours:
        _put_ours(shape.model)
    text = TOKENS, shape.encoded.text_shape[1]
    return replace(shape, encoded=replace(shape.encoded, text_shape=text))


class _Pass:
    """There and back through the model."""

    def __init__(self, shape: Outline, device: torch.device, policed: bool = False) -> None:
        self.shape = shape
        self._device = device
        self._policed = policed
        self._model = copy.deepcopy(shape.model).to_empty(device=device)
        for parameter in (*self._model.parameters(), *self._model.buffers()):
            parameter.data.fill_(0.02)
        self._batch = {
            name: torch.full_like(tensor, 0.02, device=device)
            for name, tensor in shape.subject().inputs(1).items()
        }
        self._batch["hidden_states"].requires_grad_(True)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._leaves = [self._batch["hidden_states"], *trained]
        self._predict = shape.subject().predict

    def time(self, clock: Callable[[], float]) -> tuple[float, float]:
        """The host's seconds for each way."""
        began = clock()
        out = self._asked() if self._policed else self._there()
        turned = clock()
        self._back(out)
        return turned - began, clock() - turned

    def count(self) -> tuple[Calls, Calls]:
        """What the host does on each way, as the tracer counts it: on the CPU."""
        if self._device.type != "cpu":
            return _Pass(self.shape, torch.device("cpu")).count_as(CudaKernels())
        return self.count_as(nullcontext())

    def count_as(self, kernels: AbstractContextManager[object]) -> tuple[Calls, Calls]:
        """With the kernels that another device would have."""
        watch = Watch(self._model.parameters(), self._batch.values())
        with watch, kernels:
            out = self._there()
            there = watch.take_calls(0)
            watch.take()
            self._back(out)
            return there, watch.take_calls(0)

    def _there(self) -> Tensor:
        return self._predict(self._model, self._batch)

    def _asked(self) -> Tensor:
        keeps = functools.partial(create_selective_checkpoint_contexts, _keep_nothing)
        out: Tensor = checkpoint(self._there, use_reentrant=False, context_fn=keeps)
        return out

    def _back(self, out: Tensor) -> None:
        torch.autograd.grad(out, self._leaves, torch.ones_like(out))


def _keep_nothing(_: object, op: Any, *__: object, **___: object) -> CheckpointPolicy:
    kept = op.name().split(".")[0] == "none"  # as much as a real policy looks at
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _put_ours(model: nn.Module) -> None:
    """Let every linear layer of the blocks compute by an operator of ours, with halves to train."""
    for module in list(model.get_submodule("blocks").modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                module.add_module(name, _Ours(child))


class _Ours(nn.Module):
    """A linear layer with a thin one beside it, by the operators below."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        wide, narrow = linear.weight.shape
        self.down = nn.Parameter(linear.weight.new_empty(RANK, narrow))
        self.up = nn.Parameter(linear.weight.new_empty(wide, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """By rows, as the real ones do it."""
        y: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), self.weight, self.bias, self.down, self.up, 1.0
        )
        return y.view(*x.shape[:-1], -1)


@torch.library.custom_op("gracetune::probe_there", mutates_args=())
def _there(
    x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    narrow = x @ down.t()
    return torch.addmm(bias, narrow, up.t(), alpha=scale).addmm_(x, weight.t()), narrow


@torch.library.custom_op("gracetune::probe_halves", mutates_args=())
def _halves(grad: Tensor, x: Tensor, narrow: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    between = grad @ up
    return between.t() @ x, grad.t() @ narrow, between


@torch.library.custom_op("gracetune::probe_back", mutates_args=())
def _back(grad: Tensor, between: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    return (between @ down).addmm_(grad, weight)


class _Product(torch.autograd.Function):
    """As the products with a LoRA are, which this package does not know."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        y: Tensor
        y, narrow = _there(x, weight, bias, down, up, scale)
        ctx.save_for_backward(x, narrow, weight, down, up)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, weight, down, up = ctx.saved_tensors
        grad_down, grad_up, between = _halves(grads[0], x, narrow, up)
        return _back(grads[0], between, weight, down), None, None, grad_down, grad_up, None
