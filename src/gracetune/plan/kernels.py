"""The kernels behind one call of an operator: what they compute, and what they read and write.

Fake tensors stand on the CPU, whatever the plan is for, so attention is the CPU's operator here.
Products with a LoRA inside are operators of our own. Each is taken apart by running it on fakes,
since its thin halves are bound by memory and the frozen product is not.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gracetune.plan.shapes import HostCalls, Op, record_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
CUSTOM_OP_NAMESPACE = "gracetune"
"""The namespace of our operators."""
_ALLOCATES_ONLY = {aten.empty, aten.empty_like, aten.new_empty, aten.new_empty_strided}
BACKWARD_PRODUCTS = 2.5
"""Attention's backward has five products where forward has two."""


def tensors_of(tree: object) -> list[Tensor]:
    """Every tensor in nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def touched_nbytes(tensor: Tensor) -> int:
    """Bytes that a kernel touches of it; what is expanded is read once."""
    whole = int(tensor.untyped_storage().nbytes())
    return min(int(tensor.numel()) * tensor.element_size(), whole)


def attention_workspace(query: Tensor) -> int:
    """CUDA's attention adds up the queries' gradient in fp32 beside its outputs."""
    return int(query.numel()) * 4


def is_custom_op(func: object) -> bool:
    """Whether a call is one of our operators: products with something beside them."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace == CUSTOM_OP_NAMESPACE


def is_matmul_or_attention(func: object) -> bool:
    """Whether a call is matrix products or attention: kernels that no compiler folds."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    attends = func in ATTENTION or func in ATTENTION_BACKWARD
    return attends or is_custom_op(func) or func.overloadpacket in GEMMS


def storage_id(tensor: Tensor) -> int:
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
    known = {storage_id(tensor) for tensor in inputs}
    makes_none = all(storage_id(tensor) in known for tensor in outputs)
    if inputs and not func._schema.is_mutable and makes_none:
        return []  # a view
    written = float(sum(touched_nbytes(tensor) for tensor in outputs))
    nbytes = written + float(sum(touched_nbytes(tensor) for tensor in inputs))
    if not is_matmul_or_attention(func):
        recipe = record_call(func, args, kwargs)
        return [Op("elementwise", 0.0, nbytes, backward=backward, replay=recipe)]
    return matmul_ops(func, args, out, nbytes, weights, backward)


def matmul_ops(
    func: OpOverload, args: Any, out: Any, nbytes: float, weights: WeightStorages, backward: bool
) -> list[Op]:
    """Of products and attention; `nbytes` is what they read and write."""
    if is_custom_op(func):
        return _taken_apart(func, args, weights, backward)
    written = float(sum(touched_nbytes(tensor) for tensor in tensors_of(out)))
    if func in ATTENTION or func in ATTENTION_BACKWARD:
        return [_attention_op(func, args, nbytes, written)]
    inputs = tensors_of(args)
    read = weights.frozen | weights.trained
    of_weights = float(sum(touched_nbytes(t) for t in inputs if storage_id(t) in read))
    frozen = any(storage_id(tensor) in weights.frozen for tensor in inputs)
    packet = aten.addmm if func.overloadpacket is aten.addmm_ else func.overloadpacket
    flops = float(flop_registry[packet](*args, out_val=out))
    extent: tuple[int, ...] = ()
    if of_weights and packet in (aten.mm, aten.addmm):
        extent = int(out.shape[0]), int(inputs[-2].shape[1]), int(out.shape[1])
    made = Op("gemm", flops, nbytes, of_weights, written, frozen, backward, extent)
    return [
        replace(made, reads_frozen_weight=storage_id(inputs[-1]) in weights.frozen)
    ]  # not the bias


def _taken_apart(func: OpOverload, args: Any, weights: WeightStorages, backward: bool) -> list[Op]:
    """What one of our operators does inside; it is kept or done again as one."""
    inside = _Inside(weights, backward)
    with inside:
        out = OPDEFS[func._schema.name]._init_fn(*args)
    written = float(sum(touched_nbytes(tensor) for tensor in tensors_of(out)))
    ops = [replace(op, frozen=True, out_nbytes=0.0) for op in inside.ops]
    ops[0] = replace(ops[0], starts_custom_op=True)
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
    return Op("attention", flops, nbytes, out_nbytes=written, backward=backward, dims=extent)


# ------------------------------------------------------------------------------------------
# What operations do when they run one by one: counted on fake tensors, nothing is computed.
#
# Fake tensors stand on the CPU, whatever the plan is for: a CPU build of torch has no other device
# for them. Where CUDA's kernels save or allocate something else than the CPU's, `cuda_kernels` and
# this file say so.


class KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every kernel, and every byte from its allocation to its end."""

    def __init__(self, weights: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        kinds: dict[bool, set[int]] = {False: set(), True: set()}
        for weight in weights:
            kinds[weight.requires_grad].add(storage_id(weight))
        self._weights = WeightStorages(frozenset(kinds[False]), frozenset(kinds[True]))
        self._known = kinds[False] | kinds[True] | {storage_id(tensor) for tensor in inputs}
        """Storages that were there before."""
        self._alive: dict[int, tuple[int, int]] = {}
        """Memory by its storage: a number that no other memory has, and bytes."""
        self._births = 0
        self._begun_nbytes = 0
        """What was alive when `take` was last called."""
        self._changes: list[tuple[int, int]] = []
        """Since then: whose bytes came or went."""
        self._ops: list[Op] = []
        self._dispatched = self._own = self._views = 0
        self.backward = False

    def take(self, apart: Iterable[Tensor] = ()) -> tuple[tuple[Op, ...], int]:
        """The kernels since the last time, and the most bytes alive meanwhile, some set apart."""
        left_out = {self._alive[s][0] for s in map(storage_id, apart) if s in self._alive}
        live = peak = self._begun_nbytes
        for number, change in self._changes:
            if number not in left_out:
                live += change
                peak = max(peak, live)
        taken = tuple(self._ops), peak
        self._ops, self._changes, self._begun_nbytes = [], [], self.live_nbytes
        return taken

    def take_calls(self, saved: int) -> HostCalls:
        """What the host had to do since the last time; `saved` tensors went through autograd."""
        taken = HostCalls(
            dispatched=self._dispatched,
            kernels=self.num_ops,
            views=self._views,
            custom_ops=self._own,
            saved_tensors=saved,
        )
        self._dispatched = self._own = self._views = 0
        return taken

    @property
    def live_nbytes(self) -> int:
        """Allocated under this watch and still alive."""
        return sum(nbytes for _, nbytes in self._alive.values())

    @property
    def num_ops(self) -> int:
        """Kernels since `take` was last called."""
        return len(self._ops)

    @property
    def num_dispatched(self) -> int:
        """Operators since `take_calls` was last called."""
        return self._dispatched

    def has(self, storage: int) -> bool:
        """Whether memory was allocated under this watch and is still alive."""
        return storage in self._alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let it run on fake tensors, then look at what came out."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        ops = ops_of(func, args, kwargs, out, self._weights, self.backward)
        self._ops += ops
        if func.namespace != "prim":  # what only fake tensors are asked for
            self._dispatched += 1
            self._own += is_custom_op(func)
            self._views += not ops
        for tensor in tensors_of(out):
            self._admit(tensor)
        if func in ATTENTION_BACKWARD:
            besides = attention_workspace(tensors_of(args)[1])
            self._changes += [(-1, besides), (-1, -besides)]
        return out

    def _admit(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = int(storage._cdata)
        if address in self._known or address in self._alive:
            return
        self._births += 1
        self._alive[address] = self._births, int(storage.nbytes())
        self._changes.append(self._alive[address])
        weakref.finalize(storage, self._bury, address).atexit = False

    def _bury(self, address: int) -> None:
        number, nbytes = self._alive.pop(address)
        self._changes.append((number, -nbytes))


# ------------------------------------------------------------------------------------------
# What CUDA has one kernel for and the CPU does in steps, put into a trace on the CPU.


class CudaKernels(TorchFunctionMode):
    """While it is entered, RMSNorm is one operator, and saves its input as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """All else is as it was."""
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rms_norm(
    input: Tensor,
    normalized_shape: object,  # noqa: ARG001
    weight: Tensor | None = None,
    eps: float | None = None,  # noqa: ARG001
) -> Tensor:
    apply: Callable[..., Tensor] = _RmsNorm.apply
    return apply(input, weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor | None) -> Tensor:
        out: Tensor
        out, scale = _there(source, weight)
        ctx.save_for_backward(source, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        source, scale, weight = ctx.saved_tensors
        trains_weight = ctx.needs_input_grad[1]
        of_source, of_weight = _back(gradients[0], source, scale, weight, trains_weight)
        return of_source, of_weight if trains_weight else None


# On CUDA these are what they stand for, and can be timed. Elsewhere they only allocate as much.
@torch.library.custom_op("planned::rms_norm", mutates_args=(), device_types="cuda")
def _there(source: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    out, scale = aten._fused_rms_norm(source, source.shape[-1:], weight, None)
    return out, scale


@_there.register_kernel("cpu")
@_there.register_fake
def _(source: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    scale = source.new_empty((*source.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(source), scale


@torch.library.custom_op("planned::rms_norm_backward", mutates_args=(), device_types="cuda")
def _back(
    gradient: Tensor, source: Tensor, scale: Tensor, weight: Tensor | None, trains_weight: bool
) -> tuple[Tensor, Tensor]:
    of_source, of_weight = aten._fused_rms_norm_backward(
        gradient, source, source.shape[-1:], scale, weight, [True, trains_weight]
    )
    return of_source, of_weight if trains_weight else source.new_empty(0)


@_back.register_kernel("cpu")
@_back.register_fake
def _(
    gradient: Tensor,  # noqa: ARG001
    source: Tensor,
    scale: Tensor,  # noqa: ARG001
    weight: Tensor | None,
    trains_weight: bool,
) -> tuple[Tensor, Tensor]:
    if weight is None or not trains_weight:
        return torch.empty_like(source), source.new_empty(0)
    return torch.empty_like(source), torch.empty_like(weight)
