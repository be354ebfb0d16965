"""Set what each block saves for backward, and whether it is compiled.

A block's `forward` is replaced on the instance; model code does not change. There are three modes:

`keep`       save everything that backward reads, as autograd does (compiled: as the compiler does).
`lean`       save the outputs of matmuls and attention; recompute the cheap elementwise work.
`recompute`  save the block's inputs and the output of attention; recompute everything else.

In a compiled block the recomputation is part of the backward graph, where the compiler removes what
backward does not read. Equal blocks share one compilation (`_UniformInputs`), for images of all
sizes and captions of all lengths (`_mark_dynamic`). Without gradients a block runs eagerly, because
sampling is not worth a compilation of its own.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.experimental import _config as symbolic_shapes_config
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gracetune import __version__
from gracetune.errors import GracetuneError
from gracetune.events.types import Notice
from gracetune.offload.recompute import checkpoint_block
from gracetune.units import format_seconds

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
    "gracetune::lokr_linear",
    "gracetune::lora_linear",
    "gracetune::lora_linears",
    "gracetune::lora_linear_fp8",
    "gracetune::quantized_linear",
    "gracetune::quantized_lora_linear",
}
"""Operators, besides attention, whose outputs the `lean` mode saves."""
POLICY_VERSION = 1
"""Version of `_op_policy`, which decides what each mode saves. Graphs of another one are not
used."""
REASON_LINES = 2
"""Number of lines of a compiler error to show. The first alone may only say that an exception was
raised."""
DEFAULT_MAX_GRAPHS = 64
"""Maximum number of compilations. Each kind of block, checkpoint mode, weight placement (resident
or streamed) and number of samples (one, or more) needs its own."""
RUNS_GRAPHS = ("torch._functorch._aot_autograd", "torch._inductor")
"""Modules of torch that run compiled graphs, forward and backward."""
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


class BlockCompiler:
    """Compile the blocks of a run and count the compilations. Close it when the run ends."""

    def __init__(
        self,
        emit: Callable[[Notice], None],
        backend: str = "inductor",
        max_graphs: int = DEFAULT_MAX_GRAPHS,
        *,
        dynamic: bool = True,
        dynamic_batch: bool = False,
        expected: int = 0,
    ) -> None:
        """Prepare torch's compiler; with `dynamic`, one graph serves sequences of all lengths.

        A graph for one length is slightly faster, but each length needs its own. With
        `dynamic_batch`, one graph serves all batches of two or more samples. `expected` is the
        number of compilations that progress is reported for; 0: unknown.
        """
        self.graphs = 0
        """Number of compilations so far, including those found in the cache on disk."""
        self.cached = 0
        """Number of compilations that were found in the cache on disk."""
        self.seconds = 0.0
        """Seconds spent compiling so far."""
        self._emit = emit
        self._backend = backend
        self._dynamic = dynamic
        self._min_samples = MIN_DYNAMIC_BATCH if dynamic_batch else MIN_DYNAMIC_SIZE
        self._expected = expected
        self._block = ""
        """Description of the block that is called."""
        self._cache_counts = (0, 0)
        self._collects_garbage = gc.isenabled()
        self.reason = ""
        """Reason for `failure`, in a few words."""
        self.failure = ""
        """The warning that blocks run eagerly, because one could not be compiled or has failed;
        empty as long as none has."""
        self.uniform_inputs = _UniformInputs()
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
        # Graphs call operators by name, so torch's keys lack the code that gives their shapes.
        tag = f"{torch.compiler.config.cache_key_tag} gracetune {__version__}".strip()
        self._settings.enter_context(
            torch.compiler.config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
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
        self,
        function: Callable[..., Any],
        block: nn.Module,
        eager: Callable[..., Any],
        mode: CheckpointMode,
    ) -> Callable[..., Any]:
        """Return a function that is compiled at its first call: a block's forward in this mode.

        If compilation fails, all functions of this compiler run as their `eager` version from then
        on, with one warning. In a mode that recomputes, a graph break is a failure too: the
        recomputation would run without the streamed weights.
        """
        compiled = torch.compile(function, fullgraph=mode != "keep", backend=self._backend)
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.failure:
                return eager(*args, **kwargs)
            inputs, named = self.uniform_inputs(block, forward, args, kwargs)
            if self._dynamic:
                _mark_dynamic(inputs, self._min_samples)
                for name, value in named.items():
                    _mark_dynamic([value], self._min_samples, is_mask=MASK in name)
            self._block = f"{type(block).__name__} ({mode})"
            try:
                return compiled(*inputs, **named)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                self._give_up(error)
                return eager(*args, **kwargs)

        return run

    def handle_failed_step(self, error: Exception) -> bool:
        """Let blocks run eagerly from now on, if compiled code raised the error of a step.

        Returns False if something else raised it, or if the step cannot be repeated.
        """
        if isinstance(error, (GracetuneError, torch.AcceleratorError)):
            return False  # after an error of the accelerator, nothing can run on the device
        modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
        if not any(module.startswith(RUNS_GRAPHS) for module in modules):
            return False
        if not self.failure:  # else another block of the step could not be compiled
            self._give_up(error, "a compiled block failed")
        return True

    def _give_up(self, error: Exception, problem: str = "compilation failed") -> None:
        self.reason = f"{type(error).__name__}: {_short_reason(str(error))}"
        self.failure = (
            f"{problem}, so blocks run eagerly from now on, which is slower: {self.reason}. "
            f"Compilations so far: {self.graphs}. Use fewer buckets, or set plan.compile: never."
        )
        self._emit(Notice(self.failure, level="warning", fallback=True))

    def _compilation_starts(self, *_: object) -> None:
        self._began, self._cache_counts = time.perf_counter(), _cache_counts()
        number = f"graph {self.graphs + 1}"
        if self.graphs < self._expected:
            number += f" of {self._expected}"
        so_far = f", {format_seconds(self.seconds)} so far" if self.graphs else ""
        self._emit(Notice(f"compile: {number}, {self._block or 'a function'}{so_far}"))
        # The compiler allocates millions of objects, and each full collection would visit all
        # objects of the process.
        self._collects_garbage = gc.isenabled()
        gc.disable()

    def _compilation_ends(self, *_: object) -> None:
        if self._collects_garbage:
            gc.enable()
        self.graphs += 1
        hits, misses = _cache_counts()
        self.cached += hits > self._cache_counts[0] and misses == self._cache_counts[1]
        self.seconds += time.perf_counter() - self._began
        if self.graphs >= self._expected:
            cached = f", {self.cached} of them from the cache" if self.cached else ""
            seconds = format_seconds(self.seconds)
            self._emit(Notice(f"compile: {self.graphs} graphs in {seconds}{cached}"))
        for reason in set(counters["graph_break"]) - self._known_graph_breaks:
            self._known_graph_breaks.add(reason)
            text = (
                "blocks are compiled in several parts (graph breaks), which is slower: "
                f"{_short_reason(reason)}."
            )
            self._emit(Notice(text, level="warning", fallback=True))


def start_compiler() -> None:
    """Import torch's compiler and start its worker processes, without waiting for them.

    It takes them seconds to start, in which the model can be loaded. Nothing is compiled in a
    thread meanwhile: compilation saves and restores process-wide settings, such as the default
    dtype, which loading a model changes.
    """
    from torch._inductor import compile_fx  # noqa: F401
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def _cache_counts() -> tuple[int, int]:
    """Return how many graphs were found in the cache on disk, and how many were not."""
    found = counters["inductor"]
    missed = found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"]
    return int(found["fxgraph_cache_hit"]), int(missed)


IMAGE_DIMS = 4
"""Dimensions of a tensor whose last two are the rows and columns of an image, not features."""
MASK = "mask"
"""Part of the names of arguments whose last dimension is tokens, although they may be floats."""
MIN_DYNAMIC_SIZE = 16
"""Dimensions of at least this size are dynamic in a compiled graph. Smaller ones are batch sizes
and the parameters of a modulation (12 in Chroma), which do not vary between samples."""
MIN_DYNAMIC_EDGE = 2
"""Rows and columns of an image are dynamic from this size on: those of a U-Net's inner blocks are
few. torch compiles a graph of its own for a dimension of one."""
MIN_DYNAMIC_BATCH = 2
"""Smallest dynamic batch size: torch compiles a graph of its own for a batch of one."""


def _mark_dynamic(
    values: Iterable[Any], min_samples: int = MIN_DYNAMIC_SIZE, *, is_mask: bool = False
) -> None:
    """Let one graph serve inputs of any length: images of any bucket, captions of any length."""
    for value in values:
        if isinstance(value, Tensor):
            for dim in dynamic_dims(value, min_samples, is_mask=is_mask):
                torch._dynamo.maybe_mark_dynamic(value, dim)
        elif isinstance(value, (tuple, list)):
            _mark_dynamic(value, min_samples)
        elif isinstance(value, dict):
            _mark_dynamic(value.values(), min_samples)


def dynamic_dims(
    value: Tensor, min_samples: int = MIN_DYNAMIC_SIZE, *, is_mask: bool = False
) -> list[int]:
    """Return the dimensions of an input that differ between calls of a compiled graph.

    The last dimension of vectors per token, the features, is left out; that of a mask is tokens.
    torch still fixes a dimension that the model's weights determine. The first dimension is dynamic
    from `min_samples` on.
    """
    is_image = value.is_floating_point() and value.dim() >= IMAGE_DIMS
    has_features = value.is_floating_point() and not is_image and not is_mask
    least = [min_samples] + [MIN_DYNAMIC_SIZE] * (value.dim() - 1)
    if is_image:
        least[-2:] = [MIN_DYNAMIC_EDGE] * 2
    return [dim for dim in range(value.dim() - has_features) if value.shape[dim] >= least[dim]]


class _UniformInputs:
    """Gives the inputs of equal blocks the same properties, so that they share one graph.

    The hidden states that enter the first block need no gradient, those that enter the next block
    do. In a block with trained weights, they always get one; computing it once more than needed
    takes less than compiling a graph for one block. Of a batch of one, torch also compares the
    stride of the first dimension, which has no meaning.
    """

    def __init__(self) -> None:
        self._carried: dict[type[nn.Module], frozenset[int | str]] = {}
        self._needs_gradient = torch.empty(0, requires_grad=True)

    def __call__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a call of the block; `forward` is its own, eager one."""
        args = tuple(map(_with_usual_stride, args))
        kwargs = {name: _with_usual_stride(value) for name, value in kwargs.items()}
        lacking = [*filter(_lacks_gradient, args), *filter(_lacks_gradient, kwargs.values())]
        if not lacking or not any(p.requires_grad for p in block.parameters()):
            return args, kwargs
        if type(block) not in self._carried:
            self._carried[type(block)] = _carried_inputs(forward, args, kwargs)
        carried = self._carried[type(block)]

        def with_gradient(place: int | str, value: Any) -> Any:
            if place not in carried or not _lacks_gradient(value):
                return value
            return _RequireGradient.apply(value, self._needs_gradient)  # type: ignore[no-untyped-call]

        return (
            tuple(with_gradient(place, value) for place, value in enumerate(args)),
            {name: with_gradient(name, value) for name, value in kwargs.items()},
        )


TOKEN_DIMS = 3
"""Dimensions of hidden states: samples, tokens, features."""


def _lacks_gradient(value: Any) -> bool:
    """Return True for hidden states, or a tensor of the same kind, that need no gradient."""
    is_hidden = isinstance(value, Tensor) and value.is_floating_point()
    return is_hidden and value.dim() == TOKEN_DIMS and not value.requires_grad


def _with_usual_stride(value: Any) -> Any:
    """Return hidden states of one sample as a view whose first stride is the usual one."""
    if not isinstance(value, Tensor) or value.dim() != TOKEN_DIMS or len(value) != 1:
        return value
    if value.stride(0) == value.shape[1] * value.stride(1):
        return value
    return value.squeeze(0).unsqueeze(0)


def _carried_inputs(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> frozenset[int | str]:
    """Return the inputs that a block passes on to the next one, by position or name.

    They have the shapes of its outputs. Text that each block only reads is not among them.
    """
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    devices = {value.device for value in inputs if value.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices):
        outputs = forward(*args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    shapes = [output.shape for output in outputs if isinstance(output, Tensor)]
    carried: set[int | str] = set()
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, Tensor) and value.shape in shapes:
            shapes.remove(value.shape)
            carried.add(place)
    return frozenset(carried)


class _RequireGradient(torch.autograd.Function):
    """Passes on a tensor as one that requires a gradient; backward drops it."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor, _: Tensor) -> Tensor:
        """Return a view of the tensor; the second argument requires a gradient."""
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> tuple[None, None]:
        """Return no gradients."""
        return None, None


def _short_reason(reason: str) -> str:
    lines = [line.strip() for line in reason.strip().splitlines()[:REASON_LINES]]
    return " ".join(lines).rstrip(".") or "no reason given"


def _eager_forward(
    block: nn.Module, mode: CheckpointMode, ring: WeightRing | None
) -> Callable[..., Any]:
    forward = block.forward
    if mode == "keep":
        return forward
    attention_layers = [module for module in block.modules() if "processor" in vars(module)]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the context managers of forward and of its recomputation.

        The recomputation calls `forward` without the block's hooks, so its context also binds the
        weights of a streamed block.
        """
        if mode == "lean":
            first, recompute = _checkpoint_contexts(mode)()
            # torch 2.15 asks for a choice; the hooks in scope are those of `checkpoint_block`.
            first.respect_saved_tensors_hooks = False
        else:
            processors = [layer.processor for layer in attention_layers]
            first, recompute = attention_contexts(processors)
        if ring is None or not ring.streams(block):
            return first, recompute
        return first, _nested(ring.bind_weights(block), recompute)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint_block(forward, args, kwargs, contexts)

    return run


def _compiled_forward(
    block: nn.Module, mode: CheckpointMode, compiler: BlockCompiler, eager: Callable[..., Any]
) -> Callable[..., Any]:
    forward = block.forward
    function = (
        _separated(forward)
        if mode == "keep"
        else _checkpointed(forward, _checkpoint_contexts(mode))
    )
    compiled = compiler.compile(function, block, eager, mode)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return compiled(*args, **kwargs)

    return run


def _separated(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _separate_outputs(forward(*args, **kwargs))

    return run


def _checkpointed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _separate_outputs(
            checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        )

    return run


def _separate_outputs(outputs: Any) -> Any:
    """Give each of several outputs memory of its own, as part of the graph, where that is free.

    A block may return slices of one tensor, text and image. They would have other strides and
    offsets than the tensors that enter the first block, and need a graph of their own.
    """
    if not isinstance(outputs, tuple):
        return outputs
    return tuple(
        output.clone(memory_format=torch.contiguous_format)
        if isinstance(output, Tensor)
        else output
        for output in outputs
    )


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
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    # Without a hash of the policy, torch does not keep the traced graphs on disk.
    saved = sorted(MATMUL_OPS) if mode == "lean" else []
    contexts.cache_hash = (  # type: ignore[attr-defined]
        f"gracetune {POLICY_VERSION} {mode} {saved}"
    )
    return contexts


@runtime_checkable
class ObservableAttention(Protocol):
    """An attention processor that enters a mode during attention."""

    attention_mode: AbstractContextManager[Any] | None
    """The mode to enter; None: no mode."""


def attention_contexts(
    processors: Sequence[Any],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for an eager forward and its recomputation; attention runs only in the first.

    torch's selective checkpointing does the same for any operator, but runs Python code at every
    call, which takes longer than many kernels. Here only attention is observed. `processors` are
    the block's attention processors. If one of them is not observable, a function mode looks for
    attention among all calls of torch's functions.
    """
    outputs: deque[Any] = deque()
    modes = _FindAttention(_SaveOutputs(outputs)), _FindAttention(_ReuseOutputs(outputs))
    if processors and all(isinstance(one, ObservableAttention) for one in processors):
        return _ModeOfProcessors(processors, modes[0]), _ModeOfProcessors(processors, modes[1])
    return modes


class _ModeOfProcessors:
    """Lets attention processors enter a mode during attention, while it is entered."""

    def __init__(self, processors: Sequence[ObservableAttention], mode: _FindAttention) -> None:
        self._processors = processors
        self._mode = mode

    def __enter__(self) -> None:
        for processor in self._processors:
            processor.attention_mode = self._mode

    def __exit__(self, *_: object) -> None:
        for processor in self._processors:
            processor.attention_mode = None


class _FindAttention(TorchFunctionMode):
    """Enters a dispatch mode during each call of attention."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, in the dispatch mode if it is attention."""
        if not _calls_attention(func):
            return func(*args, **(kwargs or {}))
        with self._mode:
            return func(*args, **(kwargs or {}))


class _SaveOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Saves the outputs of attention operators for their recomputation."""

    def __init__(self, outputs: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; save a detached alias of its output, which has no reference cycle."""
        out = func(*args, **(kwargs or {}))
        if _op_policy(func, save_matmuls=False) is CheckpointPolicy.MUST_SAVE:
            self._outputs.append(tree_map(_detached, out))
        return out


class _ReuseOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the saved outputs of attention operators instead of running them."""

    def __init__(self, outputs: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the next saved output of attention; run every other operator."""
        if _op_policy(func, save_matmuls=False) is not CheckpointPolicy.MUST_SAVE:
            return func(*args, **(kwargs or {}))
        if not self._outputs:
            raise RuntimeError(
                "backward recomputes more attention than forward has saved. A second backward over "
                "the same block is not possible."
            )
        return self._outputs.popleft()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@functools.cache
def _calls_attention(func: Any) -> bool:
    """Return True for torch's attention function, and for attention operators of any package."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return _names_attention(str(func))
    return func is scaled_dot_product_attention


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
    save = _names_attention(name) or (save_matmuls and name in MATMUL_OPS)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _names_attention(name: str) -> bool:
    """Return True for names of attention operators: all packages use one of these words."""
    return "attention" in name or "attn" in name
