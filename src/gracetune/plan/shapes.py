"""The planner's view of a model: the kernels, the saved bytes and the peaks of each kind of block.

`trace.trace_model` makes these records from fake tensors; `cost.CostModel` reads them. The second
half records elementwise calls such that they can be repeated on a device and timed there.
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
    """One kernel: its arithmetic and its memory traffic, at the traced batch size."""

    kind: Kind
    flops: float
    nbytes: float
    """Bytes read and written."""
    weights_nbytes: float = 0.0
    """Of these, bytes of weights, which do not grow with the batch."""
    out_nbytes: float = 0.0
    """Of these, bytes written."""
    frozen: bool = False
    """True for a matmul with a frozen weight, or a kernel inside the same operator; may be fp8."""
    backward: bool = False
    dims: tuple[int, ...] = ()
    """Sizes from which the kernel can be timed. Matmul with a weight: rows, in features, out
    features. Attention: batch, heads, queries, keys, head width. The first grows with the batch.
    Empty: the kernel cannot be timed."""
    starts_custom_op: bool = False
    """True for the first kernel of one of our custom operators."""
    reads_frozen_weight: bool = False
    """True if the weight itself is frozen, unlike an adapter's inside the same operator."""
    replay: ReplayCall | None = None
    """For an eager elementwise kernel: the call that runs it on a device."""


@dataclass(frozen=True, slots=True)
class HostCalls:
    """Counts of what the CPU does to launch one pass. Averages may make them fractional."""

    dispatched: float = 0.0
    """Operators that are called, whatever they do inside."""
    kernels: float = 0.0
    """Kernels that are launched, including those inside our operators."""
    views: float = 0.0
    """Operators that launch no kernel: views and allocations."""
    custom_ops: float = 0.0
    """Calls of our custom operators, which run Python."""
    saved_tensors: float = 0.0
    """Tensors that autograd saves in forward and reads in backward."""
    policy_calls: float = 0.0
    """Operators about which a selective-checkpoint policy is asked."""
    policy_saves: float = 0.0
    """Of these, operators whose results the policy saves."""
    entry_cost: float = 0.0
    """Cost to enter a compiled block, in operator calls that would take as long."""

    def scaled(self, factor: float) -> HostCalls:
        """Return every count multiplied by a factor."""
        return HostCalls(*(count * factor for count in astuple(self)))


@dataclass(frozen=True, slots=True)
class Trace:
    """Forward and backward of one block, or of the model outside of blocks, in one mode."""

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    saved_nbytes: int
    """Bytes kept from forward to backward, without weights and the block's own input."""
    saves_input: bool
    """Whether backward needs the block's input as well."""
    forward_peak_nbytes: int
    """Peak of forward's allocations, including its output and what it saves."""
    backward_peak_nbytes: int
    """Peak of backward: saved tensors still needed plus workspace, without gradients of weights."""

    transposed_nbytes: int = 0
    """Extra peak of backward that does not grow with the batch: a transposed weight."""
    num_needed: int | None = None
    """Kernels of forward up to the last one that saves a tensor; None: all. Checkpointing stops
    recomputing there."""
    forward_calls: HostCalls = HostCalls()
    recompute_calls: HostCalls = HostCalls()
    """Calls of forward that backward repeats."""
    backward_calls: HostCalls = HostCalls()

    @property
    def flops(self) -> float:
        """Floating-point operations of both passes."""
        return sum(op.flops for op in (*self.forward, *self.backward))


@dataclass(frozen=True, slots=True)
class TracesByMode:
    """The traces of a block by activation mode; `backward` includes recomputed kernels."""

    keep: Trace
    lean: Trace
    recompute: Trace


def recomputed_trace(
    keep: Trace, saved: Sequence[Op], input_nbytes: int, has_policy: bool = True
) -> Trace:
    """Return the trace of an eager block that keeps its input and the outputs of some kernels.

    Backward first repeats forward up to the last kernel that it needs, without the `saved` kernels.
    With a selective-checkpoint policy (`has_policy`), Python is run for every operator; saved ones
    launch no kernel but still cost the host time.
    """
    saved_ids = {id(op) for op in saved}
    repeated = tuple(op for op in keep.forward[: keep.num_needed] if id(op) not in saved_ids)
    forward_calls = keep.forward_calls
    share = 1.0 if keep.num_needed is None else keep.num_needed / len(keep.forward)
    recompute_calls = replace(forward_calls.scaled(share), kernels=float(len(repeated)))
    if has_policy:
        # In a custom operator, only the last kernel has an output: it is saved as one operator.
        num_saved = sum(op.out_nbytes > 0 for op in saved)
        forward_calls = replace(
            forward_calls, policy_calls=forward_calls.dispatched, policy_saves=float(num_saved)
        )
        recompute_calls = replace(recompute_calls, policy_calls=recompute_calls.dispatched)
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
        forward_calls=forward_calls,
        recompute_calls=recompute_calls,
        backward_calls=keep.backward_calls,
    )


def plain_checkpointing_trace(keep: Trace, input_nbytes: int) -> Trace:
    """Return the trace under torch's own checkpointing: keep the input, recompute everything."""
    return recomputed_trace(keep, (), input_nbytes, has_policy=False)


@dataclass(frozen=True, slots=True)
class BlockShapes:
    """One kind of block; most models have one or two kinds."""

    frozen_nbytes: int
    trained_nbytes: int
    input_nbytes: int
    """Bytes of the hidden states that enter the block: what `recompute` keeps."""
    eager: TracesByMode
    compiled: TracesByMode
    cast_copies_nbytes: int = 0
    """Copies of trained weights in the compute dtype, made once per pass; 0: used as they are."""
    num_trained: int = 0
    """Number of trained tensors."""

    @property
    def gradients_nbytes(self) -> int:
        """Gradients that backward leaves: of the copies if there are any, else of the weights."""
        return self.cast_copies_nbytes or self.trained_nbytes


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A traced model at one batch size."""

    name: str
    batch: int
    kinds: tuple[BlockShapes, ...]
    order: tuple[int, ...]
    """The kind of each block, in forward order."""
    outside: Trace
    """Everything outside of blocks: embeddings, head and loss."""
    outside_frozen_nbytes: int
    outside_trained_nbytes: int
    batch_nbytes: int
    """Bytes of a batch: latents, text, timesteps."""

    @property
    def blocks(self) -> tuple[BlockShapes, ...]:
        """The shapes of every block, in forward order."""
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
        """Bytes of their copies in the compute dtype."""
        return sum(block.cast_copies_nbytes for block in self.blocks)


# Recorded calls, to be repeated on a device and timed
#
# The speed of an elementwise kernel does not follow from its bytes alone: one that mixes dtypes or
# reads across strides takes two or three times as long as a copy. So each call is timed.


aten = torch.ops.aten
FP32_ARGUMENTS = {aten.native_layer_norm_backward.default: (3, 4)}
"""Positions of arguments that CUDA expects in fp32 and the CPU in the input's dtype."""


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """An operator call without data; equal calls take equally long."""

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
        """Return a tensor of zeros, which are valid indices too."""
        spans = ((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        numel = 0 if 0 in self.shape else 1 + sum(spans)
        flat = torch.zeros(numel, dtype=self.dtype, device=device)
        tensor = flat.as_strided(self.shape, self.strides)
        return tensor.conj() if self.conjugate else tensor


@dataclass(frozen=True, slots=True)
class _TypedNumber:
    """A number with its type: 2 == 2.0 in Python, but not for an operator."""

    kind: type
    value: complex


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A list among the arguments, in hashable form."""

    members: tuple[object, ...]


def record_call(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplayCall:
    """Return a hashable description of a call."""
    named = tuple((name, _describe(value)) for name, value in sorted(kwargs.items()))
    placed = [_describe(value) for value in args]
    for place in FP32_ARGUMENTS.get(func, ()):
        spec = placed[place]
        assert isinstance(spec, _TensorSpec), f"argument {place} of {func} is {spec}"
        placed[place] = replace(spec, dtype=torch.float32)
    return ReplayCall(func, tuple(placed), named)


def replay_on(call: ReplayCall, device: torch.device) -> Callable[[], object]:
    """Return a function that repeats the call on a device, with tensors of its own."""
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
