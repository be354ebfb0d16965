"""Set what each block saves for backward, and whether it is compiled.

A block's `forward` is replaced on the instance; model code does not change. There are three modes:

`keep`       save everything that backward reads, as autograd does (compiled: as the compiler does).
`lean`       save the outputs of matmuls and attention; recompute the cheap elementwise work.
`recompute`  save the block's inputs and the output of attention; recompute everything else.

In a compiled block the recomputation is part of the backward graph, where the compiler removes what
backward does not read. Equal blocks share one compilation, for images of all sizes and captions of
all lengths (`_mark_dynamic`). Without gradients a block runs eagerly, because sampling is not worth
a compilation of its own.
"""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gracetune.errors import GracetuneError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from gracetune.offload.ring import WeightRing


CheckpointMode = Literal["keep", "lean", "recompute"]

MATMUL_OPS = {
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
    "gracetune::quantized_linear",
    "gracetune::quantized_lora_linear",
}
"""Operators, besides attention, whose outputs the `lean` mode saves."""
REASON_LINES = 2
"""Number of lines of a compiler error to show. The first alone may only say that an exception was
raised."""
DEFAULT_MAX_GRAPHS = 64
"""Maximum number of compilations per kind of block. Each checkpoint mode, weight placement
(resident or streamed) and number of samples (one, or more) needs its own."""
COMPILER_SETTINGS = {
    # The backward graph is compiled with the forward graph, where a failure can be handled: the
    # block then runs eagerly. In backward it would be too late.
    "force_non_lazy_backward_lowering": True,
    # Compiled blocks have LoRA layers, which are custom autograd functions; without this, a second
    # start would compile them again.
    "autograd_cache_allow_custom_autograd_functions": True,
}
"""Settings of `torch._functorch.config` for compiled blocks."""


def wrap_blocks(
    blocks: Sequence[nn.Module],
    modes: Sequence[CheckpointMode],
    compiler: BlockCompiler | None,
    ring: WeightRing | None = None,
    eager_modes: Sequence[CheckpointMode] | None = None,
) -> WrappedBlocks:
    """Replace each block's forward by one that saves for backward what the block's mode says.

    Modes: `keep` (everything), `lean` or `recompute`. Without a compiler the blocks run eagerly.
    `eager_modes` are the modes of blocks that cannot be compiled after all; default: `modes`.
    """
    for block, mode, eager_mode in zip(blocks, modes, eager_modes or modes, strict=True):
        if "forward" in block.__dict__:
            raise GracetuneError(
                f"the forward of a {type(block).__name__} is already wrapped by something else "
                "(gradient checkpointing, offloading or compilation). Remove that wrapper first."
            )
        eager = _eager_forward(block, mode if compiler is None else eager_mode, ring)
        block.forward = (
            eager if compiler is None else _compiled_forward(block, mode, compiler, eager)
        )
    return WrappedBlocks(blocks)


class WrappedBlocks:
    """Blocks whose `forward` was replaced on the instance. `close` removes the replacement."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = list(blocks)

    def close(self) -> None:
        """Restore the original forward of every block."""
        for block in self._blocks:
            block.__dict__.pop("forward", None)


def checkpoint_block(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any
) -> Any:
    """Call a function with activation checkpointing, keeping only its inputs.

    `torch.utils.checkpoint` keeps keyword arguments, and tensors in the function's closure, where
    saved-tensor hooks cannot reach them. So all inputs are passed by position, where hooks may
    offload them, and the closure holds only the names of the keyword arguments.
    """
    num_positional, names = len(args), tuple(kwargs)

    def call_by_position(*values: Any) -> Any:
        named = dict(zip(names, values[num_positional:], strict=True))
        return call(*values[:num_positional], **named)

    return checkpoint(call_by_position, *args, *kwargs.values(), use_reentrant=False, **settings)


class BlockCompiler:
    """Compile the blocks of a run and count the compilations. Close it when the run ends."""

    def __init__(
        self,
        emit: Callable[[Notice], None],
        backend: str = "inductor",
        max_graphs: int = DEFAULT_MAX_GRAPHS,
        *,
        dynamic: bool = True,
    ) -> None:
        """Prepare torch's compiler; with `dynamic`, one graph serves sequences of all lengths.

        A graph for one length is slightly faster, but each length needs its own.
        """
        self.graphs = 0
        """Number of compilations so far."""
        self.seconds = 0.0
        """Seconds spent compiling so far."""
        self._emit = emit
        self._backend = backend
        self._dynamic = dynamic
        self.gave_up = False
        """True if a compilation failed, so that blocks run eagerly."""
        self._began = 0.0
        self._known_graph_breaks: set[str] = set(counters["graph_break"])
        """Reasons for graph breaks that predate this compiler or were already reported."""
        self._settings = ExitStack()
        self._settings.enter_context(
            torch._dynamo.config.patch(
                recompile_limit=max_graphs,
                fail_on_recompile_limit_hit=True,
                # Otherwise graphs would depend on the order of shapes, and differ after a resume.
                automatic_dynamic_shapes=False,
            )
        )
        known = functorch.get_config_copy().keys() & COMPILER_SETTINGS  # differs by torch version
        self._settings.enter_context(
            functorch.patch({name: COMPILER_SETTINGS[name] for name in known})
        )
        # Two lengths that are equal in the first batch may differ in the next one.
        self._settings.enter_context(
            symbolic_shapes_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        )
        callback_handler.register_start_callback(self._compilation_starts)
        callback_handler.register_end_callback(self._compilation_ends)

    def close(self) -> None:
        """Restore torch's compiler settings and stop counting compilations."""
        with suppress(ValueError):  # torch._dynamo.reset() has removed the callbacks already
            callback_handler.remove_start_callback(self._compilation_starts)
            callback_handler.remove_end_callback(self._compilation_ends)
        self._settings.close()

    def compile(
        self, function: Callable[..., Any], eager: Callable[..., Any], fullgraph: bool
    ) -> Callable[..., Any]:
        """Return a function that is compiled at its first call.

        If compilation fails, all functions of this compiler run as their `eager` version from then
        on, with one warning. With `fullgraph`, a graph break is a failure too.
        """
        compiled = torch.compile(function, fullgraph=fullgraph, backend=self._backend)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.gave_up:
                return eager(*args, **kwargs)
            if self._dynamic:
                _mark_dynamic(args)
                _mark_dynamic(kwargs.values())
            try:
                return compiled(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                self._give_up(error)
                return eager(*args, **kwargs)

        return run

    def _give_up(self, error: Exception) -> None:
        self.gave_up = True
        text = (
            f"compilation failed, so blocks run eagerly from now on, which is slower: "
            f"{type(error).__name__}: {_short_reason(str(error))}. Compilations so far: "
            f"{self.graphs}. Use fewer buckets, or set plan.compile: never."
        )
        self._emit(Notice(text, level="warning", fallback=True))

    def _compilation_starts(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _compilation_ends(self, *_: object) -> None:
        self.graphs += 1
        self.seconds += time.perf_counter() - self._began
        for reason in set(counters["graph_break"]) - self._known_graph_breaks:
            self._known_graph_breaks.add(reason)
            text = (
                "blocks are compiled in several parts (graph breaks), which is slower: "
                f"{_short_reason(reason)}."
            )
            self._emit(Notice(text, level="warning", fallback=True))


IMAGE_DIMS = 4
"""Dimensions of a tensor whose last one is the width of an image, not its features."""
MIN_DYNAMIC_SIZE = 8
"""Dimensions of at least this size are dynamic in a compiled graph. Smaller ones are batch sizes
and the parameters of a modulation, which do not vary between samples."""


def _mark_dynamic(values: Iterable[Any]) -> None:
    """Let one graph serve inputs of any length: images of any bucket, captions of any length.

    The last dimension of vectors per token, the features, is left out. torch still fixes a marked
    dimension that the model's weights determine.
    """
    for value in values:
        if isinstance(value, Tensor):
            num_dims = value.dim() - (value.is_floating_point() and value.dim() < IMAGE_DIMS)
            for dim in range(num_dims):
                if value.shape[dim] >= MIN_DYNAMIC_SIZE:
                    torch._dynamo.maybe_mark_dynamic(value, dim)
        elif isinstance(value, (tuple, list)):
            _mark_dynamic(value)
        elif isinstance(value, dict):
            _mark_dynamic(value.values())


def _short_reason(reason: str) -> str:
    lines = [line.strip() for line in reason.strip().splitlines()[:REASON_LINES]]
    return " ".join(lines).rstrip(".") or "no reason given"


def _eager_forward(
    block: nn.Module, mode: CheckpointMode, ring: WeightRing | None
) -> Callable[..., Any]:
    forward = block.forward
    if mode == "keep":
        return forward

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the context managers of forward and of its recomputation, for torch's checkpoint.

        The recomputation calls `forward` without the block's hooks, so its context also binds the
        weights of a streamed block.
        """
        first, recompute = _checkpoint_contexts(mode)()
        if ring is None or not ring.streams(block):
            return first, recompute
        return first, _nested(ring.bind_weights(block), recompute)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint_block(forward, args, kwargs, context_fn=contexts)

    return run


def _compiled_forward(
    block: nn.Module, mode: CheckpointMode, compiler: BlockCompiler, eager: Callable[..., Any]
) -> Callable[..., Any]:
    forward = block.forward
    if mode == "keep":
        compiled = compiler.compile(forward, eager, fullgraph=False)
    else:  # with a graph break, the recomputation would run without the streamed weights
        checkpointed = _checkpointed(forward, _checkpoint_contexts(mode))
        compiled = compiler.compile(checkpointed, eager, fullgraph=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return compiled(*args, **kwargs)

    return run


def _checkpointed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


@contextmanager
def _nested(
    outer: AbstractContextManager[None], inner: AbstractContextManager[None]
) -> Iterator[None]:
    with outer, inner:
        yield


@functools.cache
def _checkpoint_contexts(mode: CheckpointMode) -> Callable[[], Any]:
    """Return the `context_fn` argument of `torch.utils.checkpoint` for `lean` or `recompute`.

    It is one shared object per mode, so that equal blocks share one compilation.
    """
    policy = _save_matmuls if mode == "lean" else _save_attention
    return functools.partial(create_selective_checkpoint_contexts, policy)


def _save_matmuls(_: object, op: Any, *__: object, **___: object) -> CheckpointPolicy:
    return _op_policy(op, save_matmuls=True)


def _save_attention(_: object, op: Any, *__: object, **___: object) -> CheckpointPolicy:
    return _op_policy(op, save_matmuls=False)


@functools.cache
def _op_policy(op: Any, save_matmuls: bool) -> CheckpointPolicy:
    """Return whether checkpointing saves or recomputes an operator's output.

    Cached, because torch asks at every operator call.
    """
    name = op.name().split(".")[0]
    # Attention operators, of torch and of other packages, all have "attention" or "attn" in their
    # name.
    save = "attention" in name or "attn" in name or (save_matmuls and name in MATMUL_OPS)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
