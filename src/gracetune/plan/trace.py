"""From a model to `ModelShapes`: a step on fake tensors, each kind of block looked at once.

The model may be on the meta device or loaded; its weights are not touched and nothing is computed.
A pass over the whole model finds what reaches each block; equal blocks with equal inputs are one
kind. What is outside of blocks is traced with stand-ins for them.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from inspect import isfunction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gracetune.errors import ModelError
from gracetune.plan.compiled_trace import joint_graph, partition
from gracetune.plan.kernels import (
    CudaKernels,
    KernelRecorder,
    storage_id,
    tensors_of,
    touched_nbytes,
)
from gracetune.plan.shapes import BlockShapes, ModelShapes, Trace, TracesByMode, recomputed_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gracetune.plan.compiled_trace import SavedSet


def trace_model(subject: TraceTarget, batch: int) -> ModelShapes:
    """All that the planner wants to know of a step with this batch."""
    check_blocks(subject)
    # Tables of positions may be plain attributes, which nothing has made fake.
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = fake_weights(subject.model, subject.compute_dtype)
        calls = record_block_calls(subject, fakes, batch)
        groups: dict[object, int] = {}
        kinds: list[BlockShapes] = []
        order = []
        for block, call in zip(subject.blocks, calls, strict=True):
            key = block_signature(block, call.leaves), call.hidden
            if key not in groups:
                groups[key] = len(kinds)
                kinds.append(_trace_block(block, fakes, call))
            order.append(groups[key])
        outside, batch_nbytes = _trace_outside(subject, fakes, calls, batch)
    _forget_fakes(subject.model)
    inside = {id(p) for block in subject.blocks for p in block.parameters()}
    rest = [p for p in subject.model.parameters() if id(p) not in inside]
    buffers = list(subject.model.buffers())
    return ModelShapes(
        name=subject.name,
        batch=batch,
        kinds=tuple(kinds),
        order=tuple(order),
        outside=outside,
        outside_frozen_nbytes=_nbytes(buffers) + _nbytes(t for t in rest if not t.requires_grad),
        outside_trained_nbytes=_nbytes(t for t in rest if t.requires_grad),
        batch_nbytes=batch_nbytes,
    )


def _forget_fakes(model: nn.Module) -> None:
    """Tables that a model's classes remember by their arguments were made of fakes just now."""
    for kind in {type(module) for module in model.modules()}:
        for method in vars(kind).values():
            inside = method.__closure__ or () if isfunction(method) else ()
            for found in (method, *(cell.cell_contents for cell in inside)):
                if isinstance(found, _lru_cache_wrapper):
                    found.cache_clear()


def _fresh(call: BlockCall) -> list[Any]:
    """The same arguments with memory of their own, those that flow ready for gradients."""
    leaves = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in call.leaves]
    for place in call.hidden:
        leaves[place].requires_grad_(True)
    return leaves


def _trace_block(block: nn.Module, fakes: dict[int, Tensor], call: BlockCall) -> BlockShapes:
    parameters = list(block.parameters())
    trained = [p for p in parameters if p.requires_grad]
    copies_nbytes = sum(fakes[id(p)].nbytes for p in trained if fakes[id(p)].dtype != p.dtype)
    input_nbytes = sum(touched_nbytes(leaf) for leaf in call.hidden_states)
    cut_to = _compiled(block, fakes, call)
    return BlockShapes(
        frozen_nbytes=_nbytes(p for p in parameters if not p.requires_grad),
        trained_nbytes=_nbytes(trained),
        input_nbytes=input_nbytes,
        eager=_eager_ways(_trace_eager(block, fakes, call), input_nbytes),
        compiled=TracesByMode(cut_to("all"), cut_to("products"), cut_to("attention")),
        cast_copies_nbytes=copies_nbytes,
        num_trained=len(trained),
    )


def _eager_ways(keep: Trace, input_nbytes: int) -> TracesByMode:
    """What selective checkpointing keeps, it does not do again; a LoRA's sum is one product."""
    attention = [op for op in keep.forward if op.kind == "attention"]
    has_frozen = any(op.frozen for op in keep.forward)
    products = [op for op in keep.forward if op.kind == "gemm" and op.frozen == has_frozen]
    lean = recomputed_trace(keep, [*products, *attention], input_nbytes)
    return TracesByMode(keep, lean, recomputed_trace(keep, attention, input_nbytes))


def _trace_eager(block: nn.Module, fakes: dict[int, Tensor], call: BlockCall) -> Trace:
    weights = named_fakes(block, fakes)
    leaves = _fresh(call)
    inputs = [leaves[place] for place in call.hidden]
    trained = [w for w in weights.values() if w.requires_grad]
    watch = KernelRecorder(weights.values(), tensors_of(leaves))
    saved: dict[int, int] = {}
    num_read = num_saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal num_read, num_saved
        num_saved += 1
        saved[storage_id(tensor)] = int(tensor.untyped_storage().nbytes())
        num_read = watch.num_ops
        return tensor

    args, kwargs = tree_unflatten(leaves, call.spec)
    with watch, CudaKernels():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = functional_call(block, weights, args, kwargs)
        outputs = [t for t in tensors_of(output) if t.requires_grad]
        results = {storage_id(t) for t in outputs}
        forward_calls = watch.take_calls(num_saved)
        forward, forward_peak = watch.take()
        before = watch.live_nbytes
        kept = sum(n for s, n in saved.items() if watch.has(s) and s not in results)
        watch.backward = True
        gradients = [torch.empty_like(t) for t in outputs]
        wanted = [*trained, *inputs]
        made = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        backward_calls = watch.take_calls(num_saved)
        backward, backward_peak = watch.take(apart=tensors_of(made[: len(trained)]))
    return Trace(
        forward=forward,
        backward=backward,
        saved_nbytes=kept,
        saves_input=any(storage_id(t) in saved for t in inputs),
        forward_peak_nbytes=forward_peak,
        # The block's output belongs to the next block, which is done with it by now.
        backward_peak_nbytes=backward_peak - (before - kept),
        num_needed=num_read,
        forward_calls=forward_calls,
        backward_calls=backward_calls,
    )


def _compiled(
    block: nn.Module, fakes: dict[int, Tensor], call: BlockCall
) -> Callable[[SavedSet], Trace]:
    """One joint graph, to be cut in any way."""
    weights = named_fakes(block, fakes)
    names = list(weights)
    leaves = _fresh(call)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        mine = list(leaves)
        for place, tensor in zip(places, arguments[len(names) :], strict=True):
            mine[place] = tensor
        args, kwargs = tree_unflatten(mine, call.spec)
        output = functional_call(block, dict(zip(names, arguments, strict=False)), args, kwargs)
        # Two outputs may be slices of one tensor, which is what a compiled block gives then.
        bases = {id(base): base for base in map(_base, tensors_of(output))}
        return tuple(bases.values())

    arguments = [*weights.values(), *tensors_of(leaves)]
    joint = joint_graph(run, arguments)
    return lambda kept: partition(
        joint,
        num_outputs=len({storage_id(tensor) for tensor in tensors_of(call.outputs)}),
        kept=kept,
        trained=[weight.requires_grad for weight in weights.values()],
        flowing=[len(names) + places.index(place) for place in call.hidden],
    )


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _trace_outside(
    subject: TraceTarget, fakes: dict[int, Tensor], calls: Sequence[BlockCall], batch: int
) -> tuple[Trace, int]:
    """Embeddings, head and loss; and the bytes of the batch itself."""
    weights = named_fakes(subject.model, fakes, "model.")
    inputs = subject.inputs(batch)
    watch = KernelRecorder(weights.values(), inputs.values())
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_id(tensor)] = int(tensor.untyped_storage().nbytes())
        return tensor

    with stub_blocks(subject.blocks, calls), watch, CudaKernels():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            prediction = functional_call(CalledModel(subject), weights, (inputs,))
            loss = prediction.float().square().mean()
        forward_calls = watch.take_calls(len(saved))
        forward, forward_peak = watch.take()
        kept = sum(n for s, n in saved.items() if watch.has(s))
        del prediction
        watch.backward = True
        loss.backward()
        backward_calls = watch.take_calls(len(saved))
        backward, backward_peak = watch.take(apart=tensors_of([w.grad for w in weights.values()]))
    shared = {storage_id(t): int(t.untyped_storage().nbytes()) for t in _context(calls)}
    trace = Trace(
        forward=forward,
        backward=backward,
        saved_nbytes=kept + sum(shared.values()),
        saves_input=False,
        forward_peak_nbytes=forward_peak,
        backward_peak_nbytes=backward_peak,
        forward_calls=forward_calls,
        backward_calls=backward_calls,
    )
    return trace, sum(tensor.nbytes for tensor in inputs.values())


def _context(calls: Sequence[BlockCall]) -> list[Tensor]:
    """What every block is given besides what flows: text, noise level, positions."""
    return [
        leaf
        for call in calls
        for place, leaf in enumerate(call.leaves)
        if isinstance(leaf, Tensor) and place not in call.hidden
    ]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# ------------------------------------------------------------------------------------------
# A model seen from outside: what it is called with, what reaches each block, and stand-ins.
#
# Everything here runs on fake tensors, under a mode that whoever calls has entered.


@dataclass(frozen=True)
class TraceTarget:
    """A model to be planned for, with its adapter in place."""

    name: str
    model: nn.Module
    blocks: Sequence[nn.Module]
    """In the order of forward."""
    inputs: Callable[[int], dict[str, Tensor]]
    """A batch of so many samples, as the loader would hand it over; called on fake tensors."""
    predict: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    """One call of the model with such a batch."""
    compute_dtype: torch.dtype | None = None
    """What trained weights are copied to once a pass; none: they are used as they are."""


@dataclass(frozen=True)
class BlockCall:
    """What a block was called with, and what it gave."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    hidden: tuple[int, ...]
    """The leaves that came from the block before, or from the embeddings where it is the first."""
    outputs: tuple[Any, ...]
    """Its leaves; a last block may give none for what nobody reads."""
    out_spec: TreeSpec

    @property
    def hidden_states(self) -> list[Tensor]:
        """The leaves themselves."""
        return [self.leaves[place] for place in self.hidden]


class CalledModel(nn.Module):
    """The model and how it is called, as one module whose weights can be exchanged."""

    def __init__(self, subject: TraceTarget) -> None:
        super().__init__()
        self.model = subject.model
        self._predict = subject.predict

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self._predict(self.model, batch)


def check_blocks(subject: TraceTarget) -> None:
    """Refuse a model whose blocks nobody named, and say how to."""
    if not subject.blocks:
        children = ", ".join(name for name, _ in subject.model.named_children())
        raise ModelError(
            f"model {subject.name!r} names no blocks, so nothing can be streamed or recomputed by "
            "block. Let the family's blocks() return the repeated modules in the order of forward; "
            f"{type(subject.model).__name__} consists of: {children}."
        )


def fake_weights(model: nn.Module, products: torch.dtype | None) -> dict[int, Tensor]:
    """A fake on the CPU for each parameter and buffer, by the identity of the real one."""
    fakes = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        dtype = products if products is not None and tensor.requires_grad else tensor.dtype
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    return fakes


def named_fakes(module: nn.Module, fakes: dict[int, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The fakes of a module's parameters and buffers, by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {prefix + name: fakes[id(tensor)] for name, tensor in named}


def record_block_calls(
    subject: TraceTarget, fakes: dict[int, Tensor], batch: int
) -> list[BlockCall]:
    """Run the whole model once; what each block was called with."""
    seen: dict[nn.Module, BlockCall] = {}
    flowing: set[int] = set()
    known: dict[object, tuple[list[Any], TreeSpec]] = {}
    """What blocks of a kind give: equal ones are run once."""

    def noting(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            kind = block_signature(block, leaves)
            if kind not in known:
                known[kind] = tree_flatten(forward(*args, **kwargs))
            outputs, out_spec = _fresh_outputs(known[kind][0]), known[kind][1]
            places = [
                place
                for place, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor)
                and (storage_id(leaf) in flowing or (not seen and _like_any(leaf, outputs)))
            ]
            flowing.update(storage_id(tensor) for tensor in tensors_of(outputs))
            seen[block] = BlockCall(tuple(leaves), spec, tuple(places), tuple(outputs), out_spec)
            return tree_unflatten(outputs, out_spec)

        return run

    with ExitStack() as stack, torch.no_grad():
        for block in subject.blocks:
            stack.enter_context(_replaced(block, noting(block, block.forward)))
        weights = named_fakes(subject.model, fakes, "model.")
        functional_call(CalledModel(subject), weights, (subject.inputs(batch),))
    missing = [i for i, block in enumerate(subject.blocks) if block not in seen]
    if missing:
        raise ModelError(
            f"block {missing[0]} of {subject.name!r} is never called by a forward pass, so it "
            "cannot be planned. Let the family's blocks() return the modules that forward calls."
        )
    return [seen[block] for block in subject.blocks]


def block_signature(block: nn.Module, leaves: Sequence[Any]) -> object:
    """Equal for blocks that do the same to inputs of the same shapes."""
    weights = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()
    )
    given = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return type(block), repr(block), weights, given


def _fresh_outputs(outputs: Sequence[Any]) -> list[Any]:
    """The same in memory of their own; slices of one tensor stay slices of one."""
    bases: dict[int, Tensor] = {}
    fresh: list[Any] = []
    for leaf in outputs:
        if not isinstance(leaf, Tensor):
            fresh.append(leaf)
            continue
        count = int(leaf.untyped_storage().nbytes()) // leaf.element_size()
        base = bases.setdefault(storage_id(leaf), torch.empty(count, dtype=leaf.dtype))
        fresh.append(base.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset()))
    return fresh


def _like_any(leaf: Tensor, outputs: Sequence[Any]) -> bool:
    return any(leaf.shape == out.shape and leaf.dtype == out.dtype for out in tensors_of(outputs))


class _StandIn(torch.autograd.Function):
    """A block of no weight: outputs and gradients of the right size, nothing saved."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, like: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.inputs = [(t.shape, t.dtype) for t in (anchor, *inputs)]
        return tuple(torch.empty_like(tensor) for tensor in like)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        anchor, *rest = (torch.empty(shape, dtype=dtype) for shape, dtype in ctx.inputs)
        return anchor, None, *rest


@contextmanager
def stub_blocks(blocks: Sequence[nn.Module], calls: Sequence[BlockCall]) -> Iterator[None]:
    """Blocks that do nothing, for as long as the rest of the model is looked at."""
    anchor = torch.empty(1, requires_grad=True)  # frozen embeddings alone would end the graph

    def stand_in(call: BlockCall) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_flatten((args, kwargs))[0]
            inputs = [leaves[place] for place in call.hidden]
            apply: Callable[..., tuple[Tensor, ...]] = _StandIn.apply
            made = iter(apply(anchor, tensors_of(call.outputs), *inputs))
            outputs = [next(made) if isinstance(x, Tensor) else x for x in call.outputs]
            return tree_unflatten(outputs, call.out_spec)

        return forward

    with ExitStack() as stack:
        for block, call in zip(blocks, calls, strict=True):
            stack.enter_context(_replaced(block, stand_in(call)))
        yield


@contextmanager
def _replaced(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = block.__dict__.get("forward")
    block.__dict__["forward"] = forward
    try:
        yield
    finally:
        del block.__dict__["forward"]
        if own is not None:
            block.__dict__["forward"] = own
