"""A model seen from outside: what it is called with, what reaches each block, and stand-ins.

Everything here runs on fake tensors, under a mode that whoever calls has entered.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gracetune.errors import ModelError
from gracetune.plan.kernels import storage_of, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True)
class Subject:
    """A model to be planned for, with its adapter in place."""

    name: str
    model: nn.Module
    blocks: Sequence[nn.Module]
    """In the order of forward."""
    inputs: Callable[[int], dict[str, Tensor]]
    """A batch of so many samples, as the loader would hand it over; called on fake tensors."""
    predict: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    """One call of the model with such a batch."""
    products: torch.dtype | None = None
    """What trained weights are copied to once a pass; none: they are used as they are."""


@dataclass(frozen=True)
class BlockCall:
    """What a block was called with, and what it gave."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    flowing: tuple[int, ...]
    """The leaves that came from the block before, or from the embeddings where it is the first."""
    outputs: tuple[Any, ...]
    """Its leaves; a last block may give none for what nobody reads."""
    out_spec: TreeSpec

    @property
    def flowing_leaves(self) -> list[Tensor]:
        """The leaves themselves."""
        return [self.leaves[place] for place in self.flowing]


class Whole(nn.Module):
    """The model and how it is called, as one module whose weights can be exchanged."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = subject.model
        self._predict = subject.predict

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self._predict(self.model, batch)


def check_blocks(subject: Subject) -> None:
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


def weights_of(module: nn.Module, fakes: dict[int, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The fakes of a module's parameters and buffers, by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {prefix + name: fakes[id(tensor)] for name, tensor in named}


def watch_calls(subject: Subject, fakes: dict[int, Tensor], batch: int) -> list[BlockCall]:
    """Run the whole model once; what each block was called with."""
    seen: dict[nn.Module, BlockCall] = {}
    flowing: set[int] = set()
    known: dict[object, tuple[list[Any], TreeSpec]] = {}
    """What blocks of a kind give: equal ones are run once."""

    def noting(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            kind = likeness(block, leaves)
            if kind not in known:
                known[kind] = tree_flatten(forward(*args, **kwargs))
            outputs, out_spec = _fresh_outputs(known[kind][0]), known[kind][1]
            places = [
                place
                for place, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor)
                and (storage_of(leaf) in flowing or (not seen and _like_any(leaf, outputs)))
            ]
            flowing.update(storage_of(tensor) for tensor in tensors_of(outputs))
            seen[block] = BlockCall(tuple(leaves), spec, tuple(places), tuple(outputs), out_spec)
            return tree_unflatten(outputs, out_spec)

        return run

    with ExitStack() as stack, torch.no_grad():
        for block in subject.blocks:
            stack.enter_context(_replaced(block, noting(block, block.forward)))
        weights = weights_of(subject.model, fakes, "model.")
        functional_call(Whole(subject), weights, (subject.inputs(batch),))
    missing = [i for i, block in enumerate(subject.blocks) if block not in seen]
    if missing:
        raise ModelError(
            f"block {missing[0]} of {subject.name!r} is never called by a forward pass, so it "
            "cannot be planned. Let the family's blocks() return the modules that forward calls."
        )
    return [seen[block] for block in subject.blocks]


def likeness(block: nn.Module, leaves: Sequence[Any]) -> object:
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
        base = bases.setdefault(storage_of(leaf), torch.empty(count, dtype=leaf.dtype))
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
def stand_ins(blocks: Sequence[nn.Module], calls: Sequence[BlockCall]) -> Iterator[None]:
    """Blocks that do nothing, for as long as the rest of the model is looked at."""
    anchor = torch.empty(1, requires_grad=True)  # frozen embeddings alone would end the graph

    def stand_in(call: BlockCall) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_flatten((args, kwargs))[0]
            inputs = [leaves[place] for place in call.flowing]
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
