"""Records of a traced model: kernels, saved bytes and memory peaks of each kind of block.

`trace.trace_model` creates these records by running a model on fake tensors; `cost.CostModel` reads
them. The second half of the file records elementwise operator calls, so that they can be repeated
and timed on a device.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch._ops import OpOverload


Kind = Literal["gemm", "attention", "elementwise"]


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel: its flops and its memory traffic, at the traced batch size."""

    kind: Kind
    flops: float
    nbytes: float
    """Bytes that the kernel reads and writes."""
    weights_nbytes: float = 0.0
    """The part of `nbytes` that is weights, which do not grow with the batch. For a kernel that
    dequantizes a weight, it is all of them."""
    out_nbytes: float = 0.0
    """The part of `nbytes` that the kernel writes."""
    frozen: bool = False
    """True for a matmul with a frozen weight, and for other kernels of the same custom operator.
    Mode `lean` keeps their results."""
    backward: bool = False
    dims: tuple[int, ...] = ()
    """Sizes of a kernel that can be timed. Matmul with a weight: rows, in features, out features.
    Attention: batch, heads, queries, keys, head width. The first size grows with the batch. Empty
    for other kernels."""
    reads_frozen_weight: bool = False
    """True for a matmul whose own weight is frozen, unlike an adapter's in the same operator."""
    fp8: bool = False
    """True for a matmul of two fp8 matrices."""
    replay: ReplayCall | None = None
    """For an eager elementwise kernel: the operator call that can be repeated and timed."""

    @property
    def prepares_weight(self) -> bool:
        """True for a kernel that reads frozen weights alone: it dequantizes or transposes one."""
        return self.kind == "elementwise" and 0 < self.weights_nbytes == self.nbytes


@dataclass(frozen=True, slots=True)
class HostCalls:
    """Counts of the operator calls with which the CPU launches one forward or backward pass.

    A part of a pass has a share of the counts, so they may be fractional.
    """

    dispatched: float = 0.0
    """Number of operator calls; a custom operator counts as one."""
    kernels: float = 0.0
    """Number of launched kernels, including those inside custom operators."""
    views: float = 0.0
    """Number of operator calls that launch no kernel: views and allocations."""
    custom_ops: float = 0.0
    """Number of calls of gracetune's custom operators, which run Python code."""
    saved_tensors: float = 0.0
    """Number of tensors that autograd saves in forward, or reads in backward."""
    checkpointed: float = 0.0
    """Number of operator calls in a block that keeps attention's outputs and recomputes the rest,
    which adds Python code to each call."""
    entry_cost: float = 0.0
    """CPU time to enter a compiled block, in units of one operator call."""

    def scaled(self, factor: float) -> HostCalls:
        """Return a copy with every count multiplied by a factor."""
        return HostCalls(*(count * factor for count in astuple(self)))


@dataclass(frozen=True, slots=True)
class Trace:
    """Predicted kernels, memory and CPU calls of one block's forward and backward.

    A block has one trace for each activation mode (what it keeps or recomputes). The model outside
    of blocks has a trace too.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    saved_nbytes: int
    """Bytes kept from forward to backward, without weights and the block's own input."""
    saves_input: bool
    """True if the block's input is kept for backward as well."""
    forward_peak_nbytes: int
    """Peak of the memory that forward allocates, including its output and saved tensors."""
    backward_peak_nbytes: int
    """Peak of memory in backward, in bytes: saved tensors still needed, and workspace. Gradients of
    weights are not included."""

    transposed_nbytes: int = 0
    """Bytes of the largest weight that backward transposes. They are part of its peak, and do not
    grow with the batch."""
    num_needed: int | None = None
    """Number of forward kernels up to the last one that saves a tensor. Checkpointing recomputes no
    further; None: all kernels."""
    forward_calls: HostCalls = HostCalls()
    recompute_calls: HostCalls = HostCalls()
    """Counts of CPU calls in the forward work that backward recomputes."""
    backward_calls: HostCalls = HostCalls()

    @property
    def flops(self) -> float:
        """Number of floating-point operations of forward and backward."""
        return sum(op.flops for op in (*self.forward, *self.backward))


@dataclass(frozen=True, slots=True)
class TracesByMode:
    """Traces (kernels and memory of forward and backward) of a block by activation mode.

    `backward` of a trace includes recomputed kernels.
    """

    keep: Trace
    lean: Trace
    recompute: Trace


def transposed_nbytes(backward: Sequence[Op]) -> int:
    """Return the bytes of the largest weight that one of the kernels transposes; 0 if none does."""
    return int(max((op.out_nbytes for op in backward if op.prepares_weight), default=0.0))


def recomputed_trace(
    keep: Trace, saved: Sequence[Op], input_nbytes: int, observes_calls: bool = True
) -> Trace:
    """Return the trace of an eager block that keeps its input and the outputs of `saved` kernels.

    A trace lists kernels and memory. `keep` is the trace of the same block without recomputation.
    Backward first recomputes forward up to the last kernel that it needs, without the `saved`
    kernels. With `observes_calls`, checkpointing also runs Python code at every call, to find those
    whose outputs are saved.
    """
    saved_ids = {id(op) for op in saved}
    repeated = tuple(op for op in keep.forward[: keep.num_needed] if id(op) not in saved_ids)
    forward_calls = keep.forward_calls
    share = 1.0 if keep.num_needed is None else keep.num_needed / len(keep.forward)
    recompute_calls = replace(forward_calls.scaled(share), kernels=float(len(repeated)))
    if observes_calls:
        forward_calls = replace(forward_calls, checkpointed=forward_calls.dispatched)
        recompute_calls = replace(recompute_calls, checkpointed=recompute_calls.dispatched)
    saved_nbytes = int(sum(op.out_nbytes for op in saved))
    return Trace(
        forward=keep.forward,
        backward=(*repeated, *keep.backward),
        saved_nbytes=saved_nbytes,
        saves_input=True,
        forward_peak_nbytes=keep.forward_peak_nbytes - keep.saved_nbytes + saved_nbytes,
        # After recomputing, all of forward is in memory again, beside the output's gradient.
        backward_peak_nbytes=max(
            keep.forward_peak_nbytes + input_nbytes, keep.backward_peak_nbytes
        ),
        transposed_nbytes=keep.transposed_nbytes,
        forward_calls=forward_calls,
        recompute_calls=recompute_calls,
        backward_calls=keep.backward_calls,
    )


def plain_checkpointing_trace(keep: Trace, input_nbytes: int) -> Trace:
    """Return the trace of a block that keeps only its input, as torch's own checkpointing does."""
    return recomputed_trace(keep, (), input_nbytes, observes_calls=False)


@dataclass(frozen=True, slots=True)
class BlockTraces:
    """Sizes, kernels and memory of one kind of block; most models have one or two kinds."""

    frozen_nbytes: int
    trained_nbytes: int
    input_nbytes: int
    """Bytes of the hidden states that enter the block, which mode `recompute` keeps."""
    eager: TracesByMode
    compiled: TracesByMode | None
    """None if the run does not compile."""
    cast_copies_nbytes: int = 0
    """Bytes of the copies of trained weights in the compute dtype, which are made once per pass; 0
    if the weights are used without a cast."""
    num_trained: int = 0
    """Number of trained parameters (tensors)."""
    dequantized_nbytes: int = 0
    """Bytes of the largest weight that is dequantized while its matmul runs, at any batch size; 0
    if the block has no quantized weights."""

    @property
    def gradients_nbytes(self) -> int:
        """Bytes of weight gradients after backward, in the dtype in which weights are used."""
        return self.cast_copies_nbytes or self.trained_nbytes


@dataclass(frozen=True, slots=True)
class ModelTraces:
    """Sizes, kernels and memory of a whole model at one batch size."""

    name: str
    batch: int
    kinds: tuple[BlockTraces, ...]
    order: tuple[int, ...]
    """The kind of each block (an index into `kinds`), in forward order."""
    outside: Trace
    """Trace of everything outside of blocks: embeddings, head and loss."""
    outside_frozen_nbytes: int
    outside_trained_nbytes: int
    batch_nbytes: int
    """Bytes of a batch: latents, text, timesteps."""
    graphs: tuple[int, ...] = ()
    """For each block, the number of the graph that it is compiled to in a run with one shape; empty
    if each kind has its own."""
    dynamic_graphs: tuple[int, ...] = ()
    """The same in a run with several shapes, in which blocks of other lengths share a graph."""

    @property
    def blocks(self) -> tuple[BlockTraces, ...]:
        """The sizes and traces of every block, in forward order."""
        return tuple(self.kinds[kind] for kind in self.order)

    @property
    def frozen_nbytes(self) -> int:
        """Bytes of all frozen weights."""
        return self.outside_frozen_nbytes + sum(block.frozen_nbytes for block in self.blocks)

    @property
    def trained_nbytes(self) -> int:
        """Bytes of all trained weights."""
        return self.outside_trained_nbytes + sum(block.trained_nbytes for block in self.blocks)

    @property
    def cast_copies_nbytes(self) -> int:
        """Bytes of all copies of trained weights in the compute dtype."""
        return sum(block.cast_copies_nbytes for block in self.blocks)


# Recorded calls, to be repeated on a device and timed
#
# The speed of an elementwise kernel does not follow from its bytes alone: one that mixes dtypes or
# reads across strides takes two or three times as long as a copy. So each call is timed.


aten = torch.ops.aten
FP32_ARGUMENTS = {aten.native_layer_norm_backward.default: (3, 4)}
"""Operator -> positions of arguments that CUDA expects in fp32, but the CPU in the input's
dtype."""


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """An operator call with shapes and dtypes instead of data. Equal calls take equally long."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        return str(self.func)


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """Shape, strides and dtype of a tensor argument."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    conjugate: bool

    def build(self, device: torch.device) -> Tensor:
        """Return a tensor of zeros with this layout. Zeros are valid indices, too."""
        spans = ((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        numel = 0 if 0 in self.shape else 1 + sum(spans)
        flat = torch.zeros(numel, dtype=self.dtype, device=device)
        tensor = flat.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conjugate else tensor


@dataclass(frozen=True, slots=True)
class _TypedNumber:
    """A number with its type, because 2 == 2.0 in Python but operators treat them differently."""

    kind: type
    value: complex


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A list or tuple among an operator's arguments, in hashable form."""

    members: tuple[object, ...]


def record_call(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplayCall:
    """Return a description of an operator call with which it can be repeated and timed."""
    named = tuple((name, _describe(value)) for name, value in sorted(kwargs.items()))
    placed = [_describe(value) for value in args]
    for place in FP32_ARGUMENTS.get(func, ()):
        spec = placed[place]
        assert isinstance(spec, _TensorSpec), f"argument {place} of {func} is {spec}"
        placed[place] = replace(spec, dtype=torch.float32)
    return ReplayCall(func, tuple(placed), named)


def replay_on(call: ReplayCall, device: torch.device) -> Callable[[], object]:
    """Return a function that repeats a recorded call on a device, with new tensors of zeros."""
    args = [_rebuild(value, device) for value in call.args]
    kwargs = {name: _rebuild(value, device) for name, value in call.kwargs}
    return lambda: call.func(*args, **kwargs)


def _describe(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, value.is_conj())
    if isinstance(value, list | tuple):
        return _Sequence(tuple(_describe(member) for member in value))
    return _TypedNumber(type(value), value) if isinstance(value, int | float | complex) else value


def _rebuild(value: object, device: torch.device) -> object:
    if isinstance(value, _TensorSpec):
        return value.build(device)
    if isinstance(value, _Sequence):
        return [_rebuild(member, device) for member in value.members]
    if isinstance(value, _TypedNumber):
        return value.value
    return device if isinstance(value, torch.device) else value
