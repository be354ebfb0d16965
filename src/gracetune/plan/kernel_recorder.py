"""Record the kernels and the memory of a model that runs on fake tensors; nothing is computed.

- `ops_of` turns one operator call into the kernels that it launches, with their flops and bytes.
- `KernelRecorder` is a dispatch mode that records kernels, allocations, and operator calls.
- `CudaKernels` replaces operators that the CPU decomposes, so that they are recorded as on CUDA.

Fake tensors are on the CPU, because a CPU build of torch has no other device for them. Attention is
therefore the CPU's operator here. Our custom operators (a frozen matmul with its LoRA) are expanded
into their kernels: the thin LoRA matmuls are bound by memory, the frozen one is not.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gracetune.adapters.compute.lora_matmul import scaled_matmul, scaled_matmul_kernel
from gracetune.adapters.compute.operators import NAMESPACE, OPERATORS
from gracetune.plan.trace_records import HostCalls, Op, record_call

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
SPLIT_OUTLIERS = "gracetune::split_outliers"
"""Custom operator whose matmuls prepare an input for fp8. Checkpointing does not keep them."""
_ALLOCATES_ONLY = {aten.empty, aten.empty_like, aten.new_empty, aten.new_empty_strided}
ATTENTION_BACKWARD_FACTOR = 2.5
"""Ratio of the flops of attention's backward to those of its forward: five matmuls to two."""


def tensors_of(tree: object) -> list[Tensor]:
    """Return every tensor in nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def touched_nbytes(tensor: Tensor) -> int:
    """Return the bytes of memory behind a tensor; expanded dimensions count once."""
    whole = int(tensor.untyped_storage().nbytes())
    return min(int(tensor.numel()) * tensor.element_size(), whole)


def attention_workspace(query: Tensor) -> int:
    """Return the bytes of the fp32 buffer in which CUDA's attention sums query gradients."""
    return int(query.numel()) * 4


def is_custom_op(func: object) -> bool:
    """Return True for gracetune's own operators, which compute a matmul and its LoRA."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace == NAMESPACE


def is_matmul_or_attention(func: object) -> bool:
    """Return True for matmuls and attention, which a compiler does not fuse into other kernels."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    is_attention = func in ATTENTION or func in ATTENTION_BACKWARD
    return is_attention or is_custom_op(func) or func.overloadpacket in GEMMS


def is_kept_when_lean(func: object) -> bool:
    """Return True for operators whose results mode `lean` keeps: matmuls and attention."""
    return is_matmul_or_attention(func) and not _splits_outliers(func)


def _splits_outliers(func: object) -> bool:
    return is_custom_op(func) and cast("OpOverload", func)._schema.name == SPLIT_OUTLIERS


def storage_id(tensor: Tensor) -> int:
    """Return an identifier that is equal for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class WeightStorages:
    """Storage identifiers of the frozen and the trained weights."""

    frozen: frozenset[int]
    trained: frozenset[int]

    def with_frozen(self, tensors: Iterable[Tensor]) -> WeightStorages:
        """Return a copy in which these tensors are frozen weights too."""
        return replace(self, frozen=self.frozen | {storage_id(tensor) for tensor in tensors})


def ops_of(
    func: OpOverload,
    args: Any,
    kwargs: dict[str, Any],
    out: Any,
    weights: WeightStorages,
    backward: bool,
) -> list[Op]:
    """Return the kernels of one operator call; an empty list for views and allocations."""
    inputs, outputs = tensors_of(args), tensors_of(out)
    if func.overloadpacket in _ALLOCATES_ONLY or not outputs:
        return []
    input_storages = {storage_id(tensor) for tensor in inputs}
    is_alias = all(storage_id(tensor) in input_storages for tensor in outputs)
    if inputs and not func._schema.is_mutable and is_alias:
        return []  # a view
    written = float(sum(touched_nbytes(tensor) for tensor in outputs))
    nbytes = written + float(sum(touched_nbytes(tensor) for tensor in inputs))
    if not is_matmul_or_attention(func):
        replay = record_call(func, args, kwargs)
        op = Op("elementwise", 0.0, nbytes, backward=backward, replay=replay)
        if inputs and all(storage_id(tensor) in weights.frozen for tensor in inputs):
            return [replace(op, weights_nbytes=nbytes, out_nbytes=written)]
        return [op]
    return matmul_ops(func, args, out, nbytes, weights, backward)


def matmul_ops(
    func: OpOverload, args: Any, out: Any, nbytes: float, weights: WeightStorages, backward: bool
) -> list[Op]:
    """Return the kernels of a matmul, attention or custom operator.

    `nbytes` is the number of bytes that the operator reads and writes.
    """
    if is_custom_op(func):
        return _custom_op_kernels(func, args, weights, backward)
    written = float(sum(touched_nbytes(tensor) for tensor in tensors_of(out)))
    if func in ATTENTION or func in ATTENTION_BACKWARD:
        return [_attention_op(func, args, nbytes, written)]
    if func.overloadpacket is aten._scaled_mm:
        return [_fp8_op(func, args, out, nbytes, backward)]
    inputs = tensors_of(args)
    all_weights = weights.frozen | weights.trained
    weight_inputs = [tensor for tensor in inputs if storage_id(tensor) in all_weights]
    weights_nbytes = float(sum(touched_nbytes(tensor) for tensor in weight_inputs))
    frozen = any(storage_id(tensor) in weights.frozen for tensor in inputs)
    packet = aten.addmm if func.overloadpacket is aten.addmm_ else func.overloadpacket
    flops = float(flop_registry[packet](*args, out_val=out))
    dims: tuple[int, ...] = ()
    if weights_nbytes and packet in (aten.mm, aten.addmm):
        dims = int(out.shape[0]), int(inputs[-2].shape[1]), int(out.shape[1])
    op = Op("gemm", flops, nbytes, weights_nbytes, written, frozen, backward, dims)
    # The weight is the last argument; a frozen bias comes before it.
    return [replace(op, reads_frozen_weight=storage_id(inputs[-1]) in weights.frozen)]


def _fp8_op(func: OpOverload, args: Any, out: Tensor, nbytes: float, backward: bool) -> Op:
    """Return the kernel of an fp8 matmul, whose second matrix is a frozen weight."""
    left, weight, *_ = args
    return Op(
        "gemm",
        float(flop_registry[func.overloadpacket](*args, out_val=out)),
        nbytes,
        weights_nbytes=float(touched_nbytes(weight)),
        out_nbytes=float(touched_nbytes(out)),
        frozen=True,
        backward=backward,
        dims=(int(out.shape[0]), int(left.shape[1]), int(out.shape[1])),
        reads_frozen_weight=True,
        fp8=True,
    )


def _custom_op_kernels(
    func: OpOverload, args: Any, weights: WeightStorages, backward: bool
) -> list[Op]:
    """Run one of gracetune's custom operators on fake tensors and return its kernels.

    Only the last kernel gets the output's bytes, because activation checkpointing saves or
    recomputes the operator as a whole.
    """
    recorder = _CustomOpRecorder(weights, backward)
    with recorder, Fp8Kernels():
        out = OPERATORS[func._schema.name].function(*args)
    written = float(sum(touched_nbytes(tensor) for tensor in tensors_of(out)))
    is_frozen = not _splits_outliers(func)
    ops = [replace(op, frozen=is_frozen, out_nbytes=0.0) for op in recorder.ops]
    ops[-1] = replace(ops[-1], out_nbytes=written)
    return ops


class _CustomOpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernels inside one custom operator."""

    def __init__(self, weights: WeightStorages, backward: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self._weights, self._backward = weights, backward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator on fake tensors and record its kernels.

        Composite operators of torch are decomposed first.
        """
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        ops = ops_of(func, args, kwargs, out, self._weights, self._backward)
        if any(op.prepares_weight for op in ops):
            self._weights = self._weights.with_frozen(tensors_of(out))  # its result is a weight too
        self.ops += ops
        return out


def _attention_op(func: OpOverload, args: Sequence[Any], nbytes: float, written: float) -> Op:
    backward = func in ATTENTION_BACKWARD
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    samples, heads, queries, width = map(int, query.shape)
    dims = samples, heads, queries, int(key.shape[-2]), width
    flops = 4.0 * prod(map(float, dims))
    if backward:
        flops *= ATTENTION_BACKWARD_FACTOR
    return Op("attention", flops, nbytes, out_nbytes=written, backward=backward, dims=dims)


class KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records every kernel, and when each tensor is allocated and freed."""

    def __init__(self, weights: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        kinds: dict[bool, set[int]] = {False: set(), True: set()}
        for weight in weights:
            kinds[weight.requires_grad].add(storage_id(weight))
        self._weights = WeightStorages(frozenset(kinds[False]), frozenset(kinds[True]))
        self._known = kinds[False] | kinds[True] | {storage_id(tensor) for tensor in inputs}
        """Identifiers of the storages of weights and inputs, which do not count as allocations."""
        self._alive: dict[int, tuple[int, int]] = {}
        """Live allocations: storage address -> (serial number, bytes). Addresses may be reused,
        serial numbers are not."""
        self._num_allocations = 0
        self._nbytes_at_take = 0
        """Bytes that were allocated when `take` was last called."""
        self._changes: list[tuple[int, int]] = []
        """Allocations since the last `take`: (serial number, bytes), with negative bytes for
        frees."""
        self._ops: list[Op] = []
        self._dispatched = self._custom_ops = self._views = 0
        self.backward = False

    def take(self, excluded: Iterable[Tensor] = ()) -> tuple[tuple[Op, ...], int]:
        """Return the kernels since the last `take`, and the peak of allocated bytes since then.

        Tensors in `excluded` do not count towards the peak.
        """
        left_out = {self._alive[s][0] for s in map(storage_id, excluded) if s in self._alive}
        live = peak = self._nbytes_at_take
        for number, change in self._changes:
            if number not in left_out:
                live += change
                peak = max(peak, live)
        taken = tuple(self._ops), peak
        self._ops, self._changes, self._nbytes_at_take = [], [], self.live_nbytes
        return taken

    def take_calls(self, saved: int) -> HostCalls:
        """Return the counts of operator calls and launches since the last `take_calls`.

        `saved` is the number of tensors that autograd saved or read meanwhile.
        """
        taken = HostCalls(
            dispatched=self._dispatched,
            kernels=self.num_ops,
            views=self._views,
            custom_ops=self._custom_ops,
            saved_tensors=saved,
        )
        self._dispatched = self._custom_ops = self._views = 0
        return taken

    @property
    def live_nbytes(self) -> int:
        """Bytes allocated under this recorder and still alive."""
        return sum(nbytes for _, nbytes in self._alive.values())

    @property
    def num_ops(self) -> int:
        """Number of kernels recorded since the last `take`."""
        return len(self._ops)

    @property
    def num_dispatched(self) -> int:
        """Number of operator calls recorded since the last `take_calls`."""
        return self._dispatched

    def is_alive(self, storage: int) -> bool:
        """Return True if a storage was allocated under this recorder and is still alive."""
        return storage in self._alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator on fake tensors, then record its kernels and allocations."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        ops = ops_of(func, args, kwargs, out, self._weights, self.backward)
        self._ops += ops
        if func.namespace != "prim":  # queries that only fake tensors make
            self._dispatched += 1
            self._custom_ops += is_custom_op(func)
            self._views += not ops
        for tensor in tensors_of(out):
            self._track(tensor)
        if func in ATTENTION_BACKWARD:
            workspace = attention_workspace(tensors_of(args)[1])
            self._changes += [(-1, workspace), (-1, -workspace)]
        return out

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = int(storage._cdata)
        if address in self._known or address in self._alive:
            return
        self._num_allocations += 1
        self._alive[address] = self._num_allocations, int(storage.nbytes())
        self._changes.append(self._alive[address])
        weakref.finalize(storage, self._free, address).atexit = False

    def _free(self, address: int) -> None:
        number, nbytes = self._alive.pop(address)
        self._changes.append((number, -nbytes))


# Operators that CUDA has as one kernel and the CPU decomposes


class Fp8Kernels(TorchFunctionMode):
    """While entered, fp8 matmuls are the GPU's kernel, although fake tensors are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace fp8 matmuls; call everything else unchanged."""
        chosen = scaled_matmul_kernel if func is scaled_matmul else func
        return chosen(*args, **(kwargs or {}))


class CudaKernels(TorchFunctionMode):
    """While entered, calls of RMSNorm become one operator that saves its input, as on CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace RMSNorm; call everything else unchanged."""
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
        out, scale = _rms_norm_forward(source, weight)
        ctx.save_for_backward(source, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        source, scale, weight = ctx.saved_tensors
        trains_weight = ctx.needs_input_grad[1]
        source_gradient, weight_gradient = _rms_norm_backward(
            gradients[0], source, scale, weight, trains_weight
        )
        return source_gradient, weight_gradient if trains_weight else None


# On CUDA these run the fused kernels, so that they can be timed. Elsewhere they only allocate.
@torch.library.custom_op("planned::rms_norm", mutates_args=(), device_types="cuda")
def _rms_norm_forward(source: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    out, scale = aten._fused_rms_norm(source, source.shape[-1:], weight, None)
    return out, scale


@_rms_norm_forward.register_kernel("cpu")
@_rms_norm_forward.register_fake
def _(source: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    scale = source.new_empty((*source.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(source), scale


@torch.library.custom_op("planned::rms_norm_backward", mutates_args=(), device_types="cuda")
def _rms_norm_backward(
    gradient: Tensor, source: Tensor, scale: Tensor, weight: Tensor | None, trains_weight: bool
) -> tuple[Tensor, Tensor]:
    source_gradient, weight_gradient = aten._fused_rms_norm_backward(
        gradient, source, source.shape[-1:], scale, weight, [True, trains_weight]
    )
    return source_gradient, weight_gradient if trains_weight else source.new_empty(0)


@_rms_norm_backward.register_kernel("cpu")
@_rms_norm_backward.register_fake
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
