"""Let backward continue after a compiled block has failed, so that the step can be repeated.

Ranks that divide the weights gather those of each block in backward, and then reduce its gradients.
A rank that raised an error in between would leave the others waiting. Here, a block whose backward
fails gives gradients of zero, the passes of the step end as they would on any rank, and the ranks
agree afterwards to repeat the step.

The block computes in an autograd graph of its own, whose backward runs inside that of the model:

    forward    inputs -> [ detached inputs -> block -> outputs ] -> detached outputs
    backward   gradients of the inputs <- [ backward of the block, or zeros ] <- gradients

The inputs are kept for backward. Compiled blocks keep their hidden states in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def contain_backward(
    forward: Callable[..., Any], on_failure: Callable[[Exception], bool]
) -> Callable[..., Any]:
    """Return a function that calls `forward`, that of a block, and contains errors of backward.

    `on_failure` is called with the error. If it returns False, the error is raised.
    """
    needs_gradient = torch.empty(0, requires_grad=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        values, spec = tree_flatten((args, kwargs))
        call = _Call(forward, on_failure, spec)
        # The last one lets weights have gradients if no input needs any.
        outputs = _ContainedBackward.apply(call, *values, needs_gradient)  # type: ignore[no-untyped-call]
        assert call.outputs_spec is not None, "the block was not called"
        return tree_unflatten(outputs, call.outputs_spec)

    return run


class _Call:
    """One call of a block, from its forward to its backward."""

    def __init__(
        self,
        forward: Callable[..., Any],
        on_failure: Callable[[Exception], bool],
        spec: TreeSpec,
    ) -> None:
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.outputs_spec: TreeSpec | None = None
        self._forward, self._on_failure, self._spec = forward, on_failure, spec

    def run(self, values: list[Any]) -> list[Any]:
        """Run forward in a graph of its own; return its outputs without that graph."""
        self.inputs = [_detached(value) for value in values]
        args, kwargs = tree_unflatten(self.inputs, self._spec)
        with torch.enable_grad():
            outputs = self._forward(*args, **kwargs)
        self.outputs, self.outputs_spec = tree_flatten(outputs)
        return [one.detach() if isinstance(one, Tensor) else one for one in self.outputs]

    def backward(self, gradients: tuple[Any, ...]) -> list[Any]:
        """Run backward of the graph; return the gradients of the inputs."""
        inputs, self.inputs = self.inputs, []
        outputs, self.outputs = self.outputs, []
        numbers = [
            number
            for number, output in enumerate(outputs)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        roots = [outputs[number] for number in numbers]
        try:
            torch.autograd.backward(roots, [gradients[number] for number in numbers])
        # Compiled code raises errors of any kind.
        except Exception as error:
            if not self._on_failure(error):
                raise
            # All ranks must reduce the same gradients, although these are not used.
            for leaf in _leaves(roots):
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
        return [one.grad if isinstance(one, Tensor) else None for one in inputs]


def _leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the inputs and weights from which autograd computes these tensors."""
    nodes = [output.grad_fn for output in outputs]
    found, seen = [], set(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
            found.append(node.variable)
        elif node is not None:
            following = {other for other, _ in node.next_functions} - seen
            seen |= following
            nodes += following
    return found


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


class _ContainedBackward(torch.autograd.Function):
    """The graph of a block as one operation of the model's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *values: Any) -> tuple[Any, ...]:
        """Run a block; the last value requires a gradient, and is not passed on."""
        ctx.call = call
        return tuple(call.run(list(values[:-1])))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of the values."""
        call, ctx.call = ctx.call, None
        return None, *call.backward(gradients), None
