"""How a block computes: as it is or compiled, and what of it is kept for backward.

A block's forward is wrapped on the instance; no model code is changed. Three ways to keep:

`keep`      everything that backward reads, as autograd would (compiled: as the compiler would).
`lean`      what products and attention gave; cheap elementwise work is done again.
`recompute` the block's input and what attention gave; products are done again too.

Compiled, the second forward is part of the backward graph, where what nobody reads is not computed
again. All equal blocks share one compilation. Without gradients a block runs as it is: a sampler
is not worth a compilation of its own.
"""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gracetune.errors import GracetuneError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from gracetune.offload.ring import Ring


Keeping = Literal["keep", "lean", "recompute"]

PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution",
    "aten::_scaled_mm",
    "gracetune::kron_linear",
    "gracetune::lora_linear",
    "gracetune::lora_linears",
    "gracetune::lora_linear_fp8",
}
REASON_LINES = 2
"""Of what a compiler says: the first may only tell that something was raised."""
DEFAULT_GRAPHS = 64
"""Compilations of one kind of block at most: for each bucket, way to keep, and home of weights."""


class Running:
    """Blocks that compute as they were told to; `close` gives them their own forward back."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = list(blocks)

    def close(self) -> None:
        """Each block as its class has it."""
        for block in self._blocks:
            block.__dict__.pop("forward", None)


class Compiler:
    """How blocks are compiled; one for a run, closed at its end."""

    def __init__(
        self,
        emit: Callable[[Notice], None],
        backend: str = "inductor",
        max_graphs: int = DEFAULT_GRAPHS,
    ) -> None:
        self.graphs = 0
        self.seconds = 0.0
        """What compiling has taken so far."""
        self._emit = emit
        self._backend = backend
        self._gave_up = False
        self._began = 0.0
        self._breaks: set[str] = set(counters["graph_break"])
        """Why a function was compiled in parts, before us or told already."""
        self._settings = ExitStack()
        self._settings.enter_context(
            torch._dynamo.config.patch(recompile_limit=max_graphs, fail_on_recompile_limit_hit=True)
        )
        callback_handler.register_start_callback(self._starts)
        callback_handler.register_end_callback(self._ends)

    def close(self) -> None:
        """Put torch's settings back as they were."""
        with suppress(ValueError):  # a reset of the compiler has forgotten us already
            callback_handler.remove_start_callback(self._starts)
            callback_handler.remove_end_callback(self._ends)
        self._settings.close()

    def compiled(
        self, way: Callable[..., Any], eager: Callable[..., Any], whole: bool
    ) -> Callable[..., Any]:
        """A function that is compiled at its first call; where that fails, `eager`, and told.

        `whole`: it fails too where it can be compiled in parts only.
        """
        fast = torch.compile(way, dynamic=False, fullgraph=whole, backend=self._backend)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._gave_up:
                return eager(*args, **kwargs)
            try:
                return fast(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as why:
                self._give_up(why)
                return eager(*args, **kwargs)

        return run

    def _give_up(self, why: Exception) -> None:
        self._gave_up = True
        text = (
            f"blocks are not compiled from here on, which costs speed: {type(why).__name__}: "
            f"{_said(str(why))}. Compilations so far: {self.graphs}. "
            "Fewer buckets need fewer of them; plan.compile: never says that none is wanted."
        )
        self._emit(Notice(text, level="warning", fallback=True))

    def _starts(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _ends(self, *_: object) -> None:
        self.graphs += 1
        self.seconds += time.perf_counter() - self._began
        for why in set(counters["graph_break"]) - self._breaks:
            self._breaks.add(why)
            text = f"blocks are compiled in parts, which costs speed: {_said(why)}."
            self._emit(Notice(text, level="warning", fallback=True))


def _said(why: str) -> str:
    """A compiler's reason, in short."""
    lines = [line.strip() for line in why.strip().splitlines()[:REASON_LINES]]
    return " ".join(lines).rstrip(".") or "no reason given"


def run_blocks(
    blocks: Sequence[nn.Module],
    keeping: Sequence[Keeping],
    compiler: Compiler | None,
    ring: Ring | None = None,
) -> Running:
    """Make each block keep what it is told to; no compiler: eager."""
    for block, how in zip(blocks, keeping, strict=True):
        if "forward" in block.__dict__:
            raise GracetuneError(
                f"a {type(block).__name__} already has a forward of its own: something else wraps "
                "it. Let go of that first (gradient checkpointing, offloading, compilation)."
            )
        eager = _eager(block, how, ring)
        block.forward = eager if compiler is None else _compiled(block, how, compiler, eager)
    return Running(blocks)


def _eager(block: nn.Module, how: Keeping, ring: Ring | None) -> Callable[..., Any]:
    forward = block.forward
    if how == "keep":
        return forward

    def keeps() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Backward calls the forward without the block's hooks: the ring is asked here."""
        first, again = _keeps(how)()
        if ring is None or not ring.streams(block):
            return first, again
        return first, _both(ring.weights_of(block), again)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint_block(forward, args, kwargs, context_fn=keeps)

    return run


def _compiled(
    block: nn.Module, how: Keeping, compiler: Compiler, eager: Callable[..., Any]
) -> Callable[..., Any]:
    forward = block.forward
    if how == "keep":
        fast = compiler.compiled(forward, eager, whole=False)
    else:  # in parts, what is done again would not find the weights that stream
        fast = compiler.compiled(_checkpointed(forward, _keeps(how)), eager, whole=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return fast(*args, **kwargs)

    return run


def _checkpointed(forward: Callable[..., Any], keeps: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=keeps, **kwargs)

    return run


@contextmanager
def _both(
    outer: AbstractContextManager[None], inner: AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


@functools.cache
def _keeps(how: Keeping) -> Callable[[], Any]:
    """One object a way, so that equal blocks are seen to be equal."""
    policy = _keep_products if how == "lean" else _keep_attention
    return functools.partial(create_selective_checkpoint_contexts, policy)


def _keep_products(_: object, op: Any, *__: object, **___: object) -> CheckpointPolicy:
    return _verdict(op, products=True)


def _keep_attention(_: object, op: Any, *__: object, **___: object) -> CheckpointPolicy:
    return _verdict(op, products=False)


@functools.cache
def _verdict(op: Any, products: bool) -> CheckpointPolicy:
    """Found once for each operator: it is asked for at every call."""
    name = op.name().split(".")[0]
    # torch's own kernels for attention and those of packages all say what they are
    kept = "attention" in name or "attn" in name or (products and name in PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# ------------------------------------------------------------------------------------------
# A block that is done again on the way back, and of which nothing but its inputs is held.


def checkpoint_block(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any
) -> Any:
    """Call now and once more in backward; hooks on saved tensors may send the inputs away.

    A checkpoint holds on to what is given by name, and to the function itself with all that it
    knows: so inputs go by place, and the function knows their names alone.
    """
    num_placed, names = len(args), tuple(kwargs)

    def by_place(*values: Any) -> Any:
        named = dict(zip(names, values[num_placed:], strict=True))
        return call(*values[:num_placed], **named)

    return checkpoint(by_place, *args, *kwargs.values(), use_reentrant=False, **how)
