"""Compare what a block computes in a training step with a plain copy of the block.

In a step, a block's weights may be streamed, its activations offloaded or recomputed, its forward
compiled and its LoRA fused. `CapturedCall` records one call of the block: its inputs, its outputs
and all gradients. `BlockReference` computes the same call without any of this, with the block as
diffusers and peft define it, all weights on the device and torch's default attention:

    exact   in fp32, or in fp64 if the block computes in fp32
    eager   in the types of the run

The run's error and eager's own error are both measured against `exact`, so rounding alone is no
error. The run passes if its error is at most `MAX_ERROR_RATIO` times that of eager. Each block gets
the inputs and output gradients of the step itself, so an error is found in the block that makes it.
"""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from gracetune.adapters.compute.dropout import PositionalDropout
from gracetune.adapters.compute.quantized_linear import QuantizedLinear
from gracetune.models.attention_backends import dispatched_processors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.utils._pytree import TreeSpec
    from torch.utils.hooks import RemovableHandle

    Tensors = Mapping[str, Tensor | None]

Kind = Literal["output", "input gradient", "weight gradient"]
KINDS: tuple[Kind, ...] = ("output", "input gradient", "weight gradient")

MAX_ERROR_RATIO = 2.0
"""Largest error of a run, relative to the error of the plain block in the same types."""
MIN_LIMIT = 1e-6
"""Error that is always allowed. An error is the norm of a difference, relative to the norm of the
exact value."""
MAX_TENSOR_RATIO = 10.0
"""Largest error ratio of a single tensor. It is larger than `MAX_ERROR_RATIO`, because rounding
errors of a small tensor do not average out."""
MIN_TENSOR_SHARE = 0.01
"""A tensor with a smaller norm, as a share of all tensors of its kind, is compared as if it had
this norm: some gradients, such as that of a key's bias, are nothing but rounding errors."""
MIN_FP8_COSINE = 0.98
"""Smallest cosine between the gradients of a block in fp8 and in bf16 (docs/precision.md)."""
NO_BACKWARD = -1
"""Value of `torch._C._current_graph_task_id()` while no backward is running."""


@dataclass(frozen=True, slots=True)
class KindResult:
    """The comparison of one kind of tensor of a block: outputs or gradients."""

    kind: Kind
    error: float
    """Error of the run: the norm of its difference from the exact values, relative to theirs."""
    eager_error: float
    """Error of the plain block in the types of the run."""
    worst_tensor: str
    """Name of the tensor with the largest error ratio."""
    worst_ratio: float
    """Error of that tensor, relative to the plain block's error of the same tensor."""
    fp8_cosine: float | None = None
    """Cosine with the values in bf16; None if the block does not compute in fp8."""

    @property
    def limit(self) -> float:
        """Largest error that passes."""
        return max(MAX_ERROR_RATIO * self.eager_error, MIN_LIMIT)

    @property
    def ratio(self) -> float:
        """Error of the run, relative to the plain block's; 1 or less if it is always allowed."""
        return self.error / max(self.eager_error, MIN_LIMIT / MAX_ERROR_RATIO)

    @property
    def passed(self) -> bool:
        """True if the run is as exact as the plain block, up to the allowed factor."""
        is_similar = self.fp8_cosine is None or self.fp8_cosine >= MIN_FP8_COSINE
        # NaN fails each comparison.
        return self.error <= self.limit and self.worst_ratio <= MAX_TENSOR_RATIO and is_similar

    def describe(self) -> str:
        """Return the numbers and the rule in one phrase."""
        text = (
            f"{self.kind}: error {self.error:.2g}, plain block {self.eager_error:.2g} "
            f"({self.ratio:.2f} times, limit {MAX_ERROR_RATIO:g})"
        )
        if self.worst_ratio > MAX_TENSOR_RATIO:
            text += (
                f"; {self.worst_tensor}: {self.worst_ratio:.3g} times (limit {MAX_TENSOR_RATIO:g})"
            )
        if self.fp8_cosine is not None:
            text += (
                f"; cosine with bf16 {self.fp8_cosine:.4f} (fp8's rule: at least {MIN_FP8_COSINE})"
            )
        return text


class BlockReference:
    """A plain copy of a block, to repeat calls that the block made in a training step.

    Create it when the block has its adapter, before a plan changes the block. The copy has no
    weights of its own: it uses the current values of the block's parameters.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name = name
        self.block = block
        self._plain = _PlainBlock(block)
        self._fp8: _PlainBlock | None = None

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters of the block, by their names in it."""
        return self._plain.trained

    @property
    def draws_random_numbers(self) -> bool:
        """True if the block has dropout that draws from torch's global generator."""
        return any(type(module) is nn.Dropout and module.p > 0 for module in self.block.modules())

    def add_fp8(self) -> None:
        """Copy the block once more, after its frozen layers were converted to fp8."""
        self._fp8 = _PlainBlock(self.block)

    def compare(self, call: CapturedCall) -> list[KindResult]:
        """Repeat a captured call, and compare its outputs and gradients with the run's."""
        exact_dtype = torch.float32 if call.is_half_precision else torch.float64
        exact = self._plain.repeat(call, exact_dtype)
        run = call.results(self.trained)
        in_run_types = self._plain.repeat(call, None)
        if self._fp8 is None:
            return [_compare(kind, run[kind], in_run_types[kind], exact[kind]) for kind in KINDS]
        in_fp8 = self._fp8.repeat(call, None)
        return [
            _compare(kind, run[kind], in_fp8[kind], exact[kind], in_run_types[kind])
            for kind in KINDS
        ]


class CapturedCall:
    """Hooks that record the first call of a block in a training step, until `close`.

    All tensors are copied on the device, in the order of the compute stream. The host never waits,
    because that could hide an error in the order of copies.
    """

    def __init__(self, reference: BlockReference) -> None:
        self.outputs: list[Tensor] = []
        self.autocast_dtype: torch.dtype | None = None
        """Data type of autocast during the call; None if autocast was off."""
        self.dropout_seeds: dict[str, Tensor] = {}
        """Seeds of the block's dropout layers during the call, by the layers' names."""
        self._dtype = _matmul_dtype(reference.block)
        self._leaves: list[Any] = []
        self._spec: TreeSpec | None = None
        self._output_gradients: dict[int, Tensor] = {}
        self._input_gradients: dict[int, Tensor] = {}
        self._weight_gradients: dict[nn.Parameter, Tensor] = {}
        self._input_edges: dict[tuple[Any, int], int] = {}
        """Index of each input that requires a gradient, by its edge in autograd's graph."""
        self._differentiable: list[int] = []
        """Indices of the inputs that require a gradient."""
        self._repeated: dict[int, int] = {}
        """Index of an input -> index of the same tensor among the inputs before it."""
        self._has_trained = bool(reference.trained)
        block = reference.block
        self._handles: list[RemovableHandle] = [
            block.register_forward_pre_hook(self._begin, with_kwargs=True),
            block.register_forward_hook(self._end),
            *(
                parameter.register_hook(  # type: ignore[no-untyped-call]
                    _Recorder(self._weight_gradients, parameter)
                )
                for parameter in reference.trained.values()
            ),
        ]

    @property
    def is_complete(self) -> bool:
        """True if the block was called, and its backward has run if it has gradients to compute.

        It has none in front of all trained weights, as the first blocks of a U-Net with an adapter.
        """
        has_gradients = self._has_trained or bool(self._differentiable)
        return bool(self._output_gradients if has_gradients else self.outputs)

    @property
    def is_half_precision(self) -> bool:
        """True if matmuls of the block are in bf16, fp16 or fp8."""
        return (self.autocast_dtype or self._dtype).itemsize < torch.float32.itemsize

    @property
    def device(self) -> torch.device:
        """Device of the block's outputs."""
        return self.outputs[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the recorded tensors take."""
        kept = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        gradients = (self._output_gradients, self._input_gradients, self._weight_gradients)
        kept += [tensor for found in gradients for tensor in found.values()]
        return sum(tensor.nbytes for tensor in [*kept, *self.outputs])

    def inputs(self, dtype: torch.dtype | None) -> tuple[Any, Any, dict[str, Tensor]]:
        """Return copies of `args` and `kwargs`, and those of their tensors that need a gradient.

        With a dtype, floating-point tensors are cast to it.
        """
        leaves = [
            leaf.detach().to(_cast_type(leaf, dtype), copy=True)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in self._leaves
        ]
        for index in self._differentiable:
            leaves[index].requires_grad_()
        for index, first in self._repeated.items():
            leaves[index] = leaves[first]
        assert self._spec is not None, "the block was not called"
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs, {f"input {index}": leaves[index] for index in self._differentiable}

    def output_gradients(self) -> list[Tensor | None]:
        """Return the gradient of each output tensor; None for one that the loss does not use."""
        return [self._output_gradients.get(index) for index in range(len(self.outputs))]

    def results(self, trained: Mapping[str, nn.Parameter]) -> dict[Kind, Tensors]:
        """Return the recorded outputs and gradients by kind and name."""
        return {
            "output": {f"output {index}": tensor for index, tensor in enumerate(self.outputs)},
            "input gradient": {
                f"input {index}": self._input_gradients.get(index) for index in self._differentiable
            },
            "weight gradient": {
                name: self._weight_gradients.get(parameter) for name, parameter in trained.items()
            },
        }

    def weight_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a trained parameter, on this rank and for this call alone."""
        return self._weight_gradients.get(parameter)

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Copy the inputs, and remember where their gradients flow to."""
        in_backward = torch._C._current_graph_task_id() != NO_BACKWARD
        if self._spec is not None or in_backward or not torch.is_grad_enabled():
            return
        leaves, self._spec = tree_flatten((args, kwargs))
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._leaves = list(leaves)
        for index, tensor in tensors:
            self._leaves[index] = tensor.detach().clone()
            if not tensor.requires_grad:
                continue
            edge = get_gradient_edge(tensor)
            first = self._input_edges.setdefault((edge.node, edge.output_nr), index)
            if first == index:
                self._differentiable.append(index)
            else:
                self._repeated[index] = first
        for name, module in block.named_modules():
            if isinstance(module, PositionalDropout):
                self.dropout_seeds[name] = module.seed.clone()
        device_type = next((tensor.device.type for _, tensor in tensors), "cpu")
        if torch.is_autocast_enabled(device_type):
            self.autocast_dtype = torch.get_autocast_dtype(device_type)

    def _end(self, _: nn.Module, __: Any, result: Any) -> None:
        if self._spec is None or self.outputs or not torch.is_grad_enabled():
            return
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        self.outputs = [output.detach().clone() for output in outputs]
        for index, output in enumerate(outputs):
            if output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    _Recorder(self._output_gradients, index)
                )
        self._hook_input_edges([output.grad_fn for output in outputs])

    def _hook_input_edges(self, nodes: list[Any]) -> None:
        """Add up the gradients that the nodes of this call pass on to the block's inputs.

        Other blocks may have the same inputs, so a hook on a tensor would see their gradients too.
        An alias of the tensor would change the order in which autograd adds gradients.
        """
        inputs = {node for node, _ in self._input_edges}
        seen: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or node in inputs:
                continue
            seen.add(node)
            edges = [self._input_edges.get(edge) for edge in node.next_functions]
            if any(index is not None for index in edges):
                self._handles.append(node.register_hook(partial(self._add_gradients, edges)))
            nodes += [following for following, _ in node.next_functions]

    def _add_gradients(self, edges: list[int | None], gradients: Any, _: Any) -> None:
        for index, gradient in zip(edges, gradients, strict=True):
            if index is None or gradient is None:
                continue
            known = self._input_gradients.get(index)
            copied = gradient.detach()
            self._input_gradients[index] = copied.clone() if known is None else known + copied


@dataclass(slots=True)
class _Recorder:
    """A gradient hook that copies the first gradient it gets.

    A compiled block gives None to a tensor that the loss does not depend on.
    """

    gradients: dict[Any, Tensor]
    key: object

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None and self.key not in self.gradients:
            self.gradients[self.key] = gradient.detach().clone()


class _PlainBlock:
    """The modules of a block on the meta device, and the parameters whose values they use."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._parameters = dict(block.named_parameters(remove_duplicate=False))
        self.trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        replaced: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in self._parameters.values()
        }
        self._modules = copy.deepcopy(block, replaced)
        # Hooks that split the tokens: a recorded call has only those of this rank already.
        self._modules._forward_pre_hooks.clear()
        self._modules._forward_pre_hooks_with_kwargs.clear()
        for processor in dispatched_processors(self._modules):
            processor._attention_backend = None

    def repeat(self, call: CapturedCall, dtype: torch.dtype | None) -> dict[Kind, Tensors]:
        """Run a captured call again, forward and backward, and return its results by kind.

        With a dtype, everything is computed in it. Otherwise the types are those of the run:
        autocast, or trained weights in the type of the frozen ones.
        """
        self._modules.train(self.block.training)
        for name, seed in call.dropout_seeds.items():
            dropout = self._modules.get_submodule(name)
            assert isinstance(dropout, PositionalDropout), name
            dropout.seed.copy_(seed)
        weights = self._weights(call, dtype)
        args, kwargs, inputs = call.inputs(dtype)
        types = _as_in_run(call) if dtype is None else _full_precision(call.device)
        with types, warnings.catch_warnings():
            # Some models cast the input of a norm, but not its weight.
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
            result = functional_call(self._modules, weights, args, kwargs)
            outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
            trained = {name: weights[name] for name in self.trained}
            gradients = _gradients(
                outputs, call.output_gradients(), [*inputs.values(), *trained.values()]
            )
        return {
            "output": {f"output {i}": output.detach() for i, output in enumerate(outputs)},
            "input gradient": dict(zip(inputs, gradients, strict=False)),
            "weight gradient": dict(zip(trained, gradients[len(inputs) :], strict=True)),
        }

    def _weights(self, call: CapturedCall, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers on the device of the call, by name."""
        has_frozen = len(self.trained) < len(self._parameters)
        trained_dtype = dtype
        if dtype is None and call.autocast_dtype is None and has_frozen:
            trained_dtype = _matmul_dtype(self._modules)
        copies: dict[nn.Parameter, Tensor] = {}
        for parameter in self._parameters.values():
            cast = trained_dtype if parameter.requires_grad else dtype
            value = parameter.detach().to(call.device, _cast_type(parameter, cast), copy=True)
            copies[parameter] = value.requires_grad_(parameter.requires_grad)
        weights = {name: copies[parameter] for name, parameter in self._parameters.items()}
        for name, buffer in self._modules.named_buffers():
            weights[name] = buffer.to(call.device, _cast_type(buffer, dtype))
        return weights


def _gradients(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None], of: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    used = [
        (output, gradient.to(output.dtype))
        for output, gradient in zip(outputs, output_gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if not used:
        return (None,) * len(of)
    return torch.autograd.grad(
        [output for output, _ in used],
        of,
        [gradient for _, gradient in used],
        allow_unused=True,
    )


@contextmanager
def _as_in_run(call: CapturedCall) -> Iterator[None]:
    with ExitStack() as stack:
        if call.autocast_dtype is not None:
            stack.enter_context(torch.autocast(call.device.type, call.autocast_dtype))
        yield


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Turn autocast and TF32 off."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _cast_type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _matmul_dtype(block: nn.Module) -> torch.dtype:
    """Return the type in which a block's largest weights are multiplied: frozen ones, if any."""
    for module in block.modules():
        if isinstance(module, QuantizedLinear):
            return module.dtype
    parameters = list(block.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    dtype = max(frozen or parameters, key=torch.numel, default=torch.empty(0)).dtype
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


# Errors


def _compare(
    kind: Kind, run: Tensors, eager: Tensors, exact: Tensors, bf16: Tensors | None = None
) -> KindResult:
    """Compare the tensors of one kind; `bf16` has their values without fp8, if the run has fp8."""
    names = [name for name in exact if exact[name] is not None or run[name] is not None]
    norms = {name: _norm(exact[name]) for name in names}
    errors = {name: _distance(run[name], exact[name]) for name in names}
    eager_errors = {name: _distance(eager[name], exact[name]) for name in names}
    total = math.hypot(*norms.values())
    worst, worst_ratio = "", 0.0
    for name in names:
        floor = MIN_LIMIT / MAX_ERROR_RATIO * max(norms[name], MIN_TENSOR_SHARE * total)
        ratio = _relative(errors[name], max(eager_errors[name], floor))
        if not ratio <= worst_ratio:  # also for NaN
            worst, worst_ratio = name, ratio
    cosine = None
    if bf16 is not None and kind != "output":
        cosine = _cosine([run[name] for name in names], [bf16[name] for name in names])
    return KindResult(
        kind,
        _relative(math.hypot(*errors.values()), total),
        _relative(math.hypot(*eager_errors.values()), total),
        worst,
        worst_ratio,
        cosine,
    )


def _relative(distance: float, norm: float) -> float:
    if norm == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / norm


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _distance(tensor: Tensor | None, exact: Tensor | None) -> float:
    if tensor is None or exact is None:
        return _norm(exact if tensor is None else tensor)
    return _norm(tensor.to(exact.dtype) - exact)


def _cosine(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> float:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    dot = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
    norms = [math.hypot(*(_norm(t) for t in side)) for side in (left, right)]
    return dot / (norms[0] * norms[1]) if norms[0] * norms[1] else 1.0
