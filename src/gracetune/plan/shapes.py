"""What one step of a model does and holds, as numbers: the planner's whole view of a model.

Made by `trace` from fake tensors, read by `cost` and `memory`. Nothing here loads torch.
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
    """One kernel: what it computes, and what it reads and writes of device memory."""

    kind: Kind
    flops: float
    nbytes: float
    weights_nbytes: float = 0.0
    """Of these, what is read of weights: it does not grow with the batch."""
    out_nbytes: float = 0.0
    """Of these, what is written."""
    frozen: bool = False
    """Whether it is a product with a frozen weight, which may be done in fp8."""
    backward: bool = False
    dims: tuple[int, ...] = ()
    """Of a product with a weight: rows, inner and outer width. Of attention: samples, heads,
    queries, keys, width of a head. The first grows with the batch; empty: nobody can time it."""
    starts_custom_op: bool = False
    """Whether it is the first kernel of one of our operators."""
    reads_frozen_weight: bool = False
    """Whether the weight is frozen itself, and not of the adapter inside one of our operators."""
    replay: ReplayCall | None = None
    """Of an elementwise kernel that is not compiled: the call that makes it run on a device."""


@dataclass(frozen=True, slots=True)
class HostCalls:
    """What queueing one pass gives the host to do."""

    dispatched: float = 0.0
    """Operators that are called, whatever is inside of them."""
    kernels: float = 0.0
    """Kernels that are launched, those inside of our operators too."""
    views: float = 0.0
    """Operators that only look at memory, or only take it."""
    custom_ops: float = 0.0
    """Operators of ours, which are Python inside."""
    saved_tensors: float = 0.0
    """Tensors that autograd saves in forward and reads in backward."""
    policy_calls: float = 0.0
    """Of the operators, those that a policy is asked about."""
    policy_saves: float = 0.0
    """Of those, the ones whose results it keeps."""
    entry_cost: float = 0.0
    """What comes before the first kernel, in operators that the host could call meanwhile."""

    def scaled(self, factor: float) -> HostCalls:
        """Each kind so many times as often."""
        return HostCalls(*(count * factor for count in astuple(self)))


@dataclass(frozen=True, slots=True)
class Trace:
    """Forward and backward of one piece of a model, run one way."""

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    saved_nbytes: int
    """Kept from forward to backward, without weights and without the block's own input."""
    saves_input: bool
    """Whether backward needs the input as well."""
    forward_peak_nbytes: int
    """Most that forward has allocated at once, its output and what it saves included."""
    backward_peak_nbytes: int
    """Most that backward has at once, of what is still saved and work; weights' gradients apart."""

    transposed_nbytes: int = 0
    """Of a weight that lies another way round beside that: it does not grow with the batch."""
    num_needed: int | None = None
    """Kernels of forward up to the last that backward reads from; none: all of them."""
    forward_calls: HostCalls = HostCalls()
    recompute_calls: HostCalls = HostCalls()
    """Of forward, made once more on the way back."""
    backward_calls: HostCalls = HostCalls()

    @property
    def flops(self) -> float:
        """Of both passes."""
        return sum(op.flops for op in (*self.forward, *self.backward))


@dataclass(frozen=True, slots=True)
class TracesByMode:
    """A block by what it keeps; backward has what is done again."""

    keep: Trace
    lean: Trace
    recompute: Trace


def recomputed_trace(
    keep: Trace, kept: Sequence[Op], input_nbytes: int, policed: bool = True
) -> Trace:
    """A block that keeps its input and what some kernels gave, and does the others twice.

    Checkpointing stops where backward has all it reads; a policy is asked about every operator.
    What it has kept launches no kernel, but the host runs the Python around it again.
    """
    stays = {id(op) for op in kept}
    again = tuple(op for op in keep.forward[: keep.num_needed] if id(op) not in stays)
    there = keep.forward_calls
    twice = there.scaled(1.0 if keep.num_needed is None else keep.num_needed / len(keep.forward))
    twice = replace(twice, kernels=float(len(again)))
    if policed:
        num_kept = sum(op.out_nbytes > 0 for op in kept)  # of one of ours, the last kernel's
        there = replace(there, policy_calls=there.dispatched, policy_saves=float(num_kept))
        twice = replace(twice, policy_calls=twice.dispatched)
    saved_nbytes = int(sum(op.out_nbytes for op in kept))
    return Trace(
        forward=keep.forward,
        backward=(*again, *keep.backward),
        saved_nbytes=saved_nbytes,
        saves_input=True,
        forward_peak_nbytes=keep.forward_peak_nbytes - keep.saved_nbytes + saved_nbytes,
        # Backward begins with all of forward there again, beside the output's gradient.
        backward_peak_nbytes=max(
            keep.forward_peak_nbytes + input_nbytes, keep.backward_peak_nbytes
        ),
        forward_calls=there,
        recompute_calls=twice,
        backward_calls=keep.backward_calls,
    )


def plain_checkpointing_trace(keep: Trace, input_nbytes: int) -> Trace:
    """As torch's own checkpointing does it: the input alone is kept, and all is done again."""
    return recomputed_trace(keep, (), input_nbytes, policed=False)


@dataclass(frozen=True, slots=True)
class BlockShapes:
    """A kind of block; most models have one or two kinds."""

    frozen_nbytes: int
    trained_nbytes: int
    input_nbytes: int
    """Of what flows from block to block: what `recompute` must remember."""
    eager: TracesByMode
    compiled: TracesByMode
    cast_copies_nbytes: int = 0
    """Of what is trained, once a pass, in the type of the products; 0: it is used as it is."""
    num_trained: int = 0
    """Tensors that are trained."""

    @property
    def gradients_nbytes(self) -> int:
        """What backward leaves: gradients of the copies, where there are any."""
        return self.cast_copies_nbytes or self.trained_nbytes


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A model at one batch size."""

    name: str
    batch: int
    kinds: tuple[BlockShapes, ...]
    order: tuple[int, ...]
    """The kind of each block, in the order of forward."""
    outside: Trace
    """Everything that is not in a block: embeddings, head and loss."""
    outside_frozen_nbytes: int
    outside_trained_nbytes: int
    batch_nbytes: int
    """What the data loader hands over: latents, text, noise levels."""

    @property
    def blocks(self) -> tuple[BlockShapes, ...]:
        """Each block's kind, in order."""
        return tuple(self.kinds[kind] for kind in self.order)

    @property
    def frozen_nbytes(self) -> int:
        """All weights that are not trained."""
        return self.outside_frozen_nbytes + sum(block.frozen_nbytes for block in self.blocks)

    @property
    def trained_nbytes(self) -> int:
        """All weights that are."""
        return self.outside_trained_nbytes + sum(block.trained_nbytes for block in self.blocks)

    @property
    def cast_copies_nbytes(self) -> int:
        """Of those, copies in the type of the products."""
        return sum(block.cast_copies_nbytes for block in self.blocks)


# ------------------------------------------------------------------------------------------
# Calls that a trace saw, to be made again on a device, where they can be timed.
#
# How fast an elementwise kernel is cannot be told from its bytes: one that mixes types, or reads
# across the grain, takes two or three times as long as one that copies.


aten = torch.ops.aten
STATISTICS = {aten.native_layer_norm_backward.default: (3, 4)}
"""Arguments that CUDA wants in fp32, and the CPU in the type of the input."""


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """A call of an operator; equal ones take equally long."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        return str(self.func)


@dataclass(frozen=True, slots=True)
class _Looks:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    conjugate: bool

    def made(self, device: torch.device) -> Tensor:
        """Of zeros, which are good indices too."""
        spans = ((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        numel = 0 if 0 in self.shape else 1 + sum(spans)
        plain = torch.zeros(numel, dtype=self.dtype, device=device)
        laid = plain.as_strided(self.shape, self.strides)
        return laid.conj() if self.conjugate else laid


@dataclass(frozen=True, slots=True)
class _Number:
    """With its type: 2 and 2.0 are equal, and may not give the same."""

    kind: type
    value: complex


@dataclass(frozen=True, slots=True)
class _Several:
    """A list among the arguments, which could not be looked up as it is."""

    members: tuple[object, ...]


def record_call(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplayCall:
    """What to write down of a call."""
    named = tuple((name, _described(value)) for name, value in sorted(kwargs.items()))
    placed = [_described(value) for value in args]
    for place in STATISTICS.get(func, ()):
        looks = placed[place]
        assert isinstance(looks, _Looks), f"{func} has {looks} there"
        placed[place] = replace(looks, dtype=torch.float32)
    return ReplayCall(func, tuple(placed), named)


def replay_on(recipe: ReplayCall, device: torch.device) -> Callable[[], object]:
    """The same call, with tensors of its own, on this device."""
    args = [_remade(value, device) for value in recipe.args]
    kwargs = {name: _remade(value, device) for name, value in recipe.kwargs}
    return lambda: recipe.func(*args, **kwargs)


def _described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _Looks(tuple(value.shape), tuple(value.stride()), value.dtype, value.is_conj())
    if isinstance(value, list | tuple):
        return _Several(tuple(_described(member) for member in value))
    return _Number(type(value), value) if isinstance(value, int | float | complex) else value


def _remade(value: object, device: torch.device) -> object:
    if isinstance(value, _Looks):
        return value.made(device)
    if isinstance(value, _Several):
        return [_remade(member, device) for member in value.members]
    if isinstance(value, _Number):
        return value.value
    return device if isinstance(value, torch.device) else value
