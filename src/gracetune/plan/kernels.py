"""The kernels behind one call of an operator: what they compute, and what they read and write.

Fake tensors stand on the CPU, whatever the plan is for, so attention is the CPU's operator here.
Products with a LoRA inside are operators of our own. Each is taken apart by running it on fakes,
since its thin halves are bound by memory and the frozen product is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gracetune.plan.replay import recipe_of
from gracetune.plan.shapes import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch._ops import OpOverload

aten = torch.ops.aten
ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu.default}
ATTENTION_BACKWARD = {aten._scaled_dot_product_flash_attention_for_cpu_backward.default}
GEMMS = {
    aten.mm,
    aten.addmm,
    aten.addmm_,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten.convolution_backward,
    aten._scaled_mm,
}
OWN = "gracetune"
"""The namespace of our operators."""
_ALLOCATES_ONLY = {aten.empty, aten.empty_like, aten.new_empty, aten.new_empty_strided}
BACKWARD_PRODUCTS = 2.5
"""Attention's backward has five products where forward has two."""


def tensors_of(tree: object) -> list[Tensor]:
    """Every tensor in nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def size_of(tensor: Tensor) -> int:
    """Bytes that a kernel touches of it; what is expanded is read once."""
    whole = int(tensor.untyped_storage().nbytes())
    return min(int(tensor.numel()) * tensor.element_size(), whole)


def attention_workspace(query: Tensor) -> int:
    """CUDA's attention adds up the queries' gradient in fp32 beside its outputs."""
    return int(query.numel()) * 4


def is_own(func: object) -> bool:
    """Whether a call is one of our operators: products with something beside them."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace == OWN


def is_product(func: object) -> bool:
    """Whether a call is matrix products or attention: kernels that no compiler folds."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    attends = func in ATTENTION or func in ATTENTION_BACKWARD
    return attends or is_own(func) or func.overloadpacket in GEMMS


def storage_of(tensor: Tensor) -> int:
    """What tells whether two tensors share memory."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class WeightStorages:
    """Which memory is weights."""

    frozen: frozenset[int]
    trained: frozenset[int]


def ops_of(
    func: OpOverload,
    args: Any,
    kwargs: dict[str, Any],
    out: Any,
    weights: WeightStorages,
    backward: bool,
) -> list[Op]:
    """The kernels that one call stands for; none where nothing is read or written."""
    inputs, outputs = tensors_of(args), tensors_of(out)
    if func.overloadpacket in _ALLOCATES_ONLY or not outputs:
        return []
    known = {storage_of(tensor) for tensor in inputs}
    makes_none = all(storage_of(tensor) in known for tensor in outputs)
    if inputs and not func._schema.is_mutable and makes_none:
        return []  # a view
    written = float(sum(size_of(tensor) for tensor in outputs))
    nbytes = written + float(sum(size_of(tensor) for tensor in inputs))
    if not is_product(func):
        recipe = recipe_of(func, args, kwargs)
        return [Op("elementwise", 0.0, nbytes, backward=backward, recipe=recipe)]
    return product_ops(func, args, out, nbytes, weights, backward)


def product_ops(
    func: OpOverload, args: Any, out: Any, nbytes: float, weights: WeightStorages, backward: bool
) -> list[Op]:
    """Of products and attention; `nbytes` is what they read and write."""
    if is_own(func):
        return _taken_apart(func, args, weights, backward)
    written = float(sum(size_of(tensor) for tensor in tensors_of(out)))
    if func in ATTENTION or func in ATTENTION_BACKWARD:
        return [_attention_op(func, args, nbytes, written)]
    inputs = tensors_of(args)
    read = weights.frozen | weights.trained
    of_weights = float(sum(size_of(t) for t in inputs if storage_of(t) in read))
    frozen = any(storage_of(tensor) in weights.frozen for tensor in inputs)
    packet = aten.addmm if func.overloadpacket is aten.addmm_ else func.overloadpacket
    flops = float(flop_registry[packet](*args, out_val=out))
    extent: tuple[int, ...] = ()
    if of_weights and packet in (aten.mm, aten.addmm):
        extent = int(out.shape[0]), int(inputs[-2].shape[1]), int(out.shape[1])
    made = Op("gemm", flops, nbytes, of_weights, written, frozen, backward, extent)
    return [replace(made, holds_frozen=storage_of(inputs[-1]) in weights.frozen)]  # not the bias


def _taken_apart(func: OpOverload, args: Any, weights: WeightStorages, backward: bool) -> list[Op]:
    """What one of our operators does inside; it is kept or done again as one."""
    inside = _Inside(weights, backward)
    with inside:
        out = OPDEFS[func._schema.name]._init_fn(*args)
    written = float(sum(size_of(tensor) for tensor in tensors_of(out)))
    ops = [replace(op, frozen=True, out_nbytes=0.0) for op in inside.ops]
    ops[0] = replace(ops[0], own=True)
    ops[-1] = replace(ops[-1], out_nbytes=written)
    return ops


class _Inside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the kernels of one operator."""

    def __init__(self, weights: WeightStorages, backward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._weights, self._backward = weights, backward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let it run on fake tensors, then look at what came out; products of torch are taken apart
        too, where they are only names for others.
        """
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self.ops += ops_of(func, args, kwargs, out, self._weights, self._backward)
        return out


def _attention_op(func: OpOverload, args: Sequence[Any], nbytes: float, written: float) -> Op:
    backward = func in ATTENTION_BACKWARD
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    samples, heads, queries, width = map(int, query.shape)
    extent = samples, heads, queries, int(key.shape[-2]), width
    flops = 4.0 * prod(map(float, extent))
    if backward:
        flops *= BACKWARD_PRODUCTS
    return Op("attention", flops, nbytes, out_nbytes=written, backward=backward, extent=extent)
