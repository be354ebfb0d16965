"""Set the attention backend of a transformer, and find the fastest one by measuring.

`model.attention_mechanism` names a backend of diffusers' attention dispatcher. If the backend is
not installed, or if the model would silently ignore it, torch's default is used, and a warning says
so.

To find the fastest, `AttentionRecorder` records the attention calls of a real pass of the model,
and `time_attention` runs the heaviest of them forward and backward with every installed backend. A
backend that fails, has no backward, or gives other results than torch's default is left out; so is
one that fails on a call that was not timed, such as those of other buckets. `math` and `flex` are
not tried: the first keeps every attention score, the second is fast only after a compilation that
takes longer than all other measurements together.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _check_attention_backend_requirements,
    dispatch_attention_fn,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from gracetune.errors import ConfigError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from gracetune.events.types import Event

    Emit = Callable[[Event], None]
    Stopwatch = Callable[[Callable[[], object], int], float]
    """A function of (work, repeats) that returns the seconds of one repeat."""


BACKENDS = {
    "sdpa": "native",
    "math": "_native_math",
    "cudnn": "_native_cudnn",
    "efficient": "_native_efficient",
    "flash": "_native_flash",
    "flash_attn_2": "flash",
    "flash_attn_3": "_flash_3",
    "flex": "flex",
    "sage": "sage",
    "xformers": "xformers",
}
"""Dict from the name of an attention backend in a run file to its name in diffusers' attention
dispatcher."""
TORCH_DEFAULT = ("auto", "sdpa")
"""Values of `model.attention_mechanism` for which torch chooses the attention kernel. With `auto`,
backends are timed later, on a GPU."""


def set_attention_backend(transformers: Iterable[nn.Module], name: str, emit: Emit) -> None:
    """Switch transformers to an attention backend by its name in a run file.

    If the backend is not installed, or if a transformer would ignore it, torch's default is used
    instead, and a warning names both. Raises ConfigError if the backend is unknown.
    """
    if name in TORCH_DEFAULT:
        return
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"model.attention_mechanism is {name!r}; it must be one of {known}.")
    transformers = list(transformers)
    ignoring = [type(one).__name__ for one in transformers if not dispatched_processors(one)]
    try:
        backend = find_backend(name)
    except (RuntimeError, ImportError) as error:
        reason = f"it cannot be used here: {str(error).rstrip('.')}"
    else:
        for transformer in transformers:
            switch_backend(transformer, backend)
        reason = f"{ignoring[0]} does not use diffusers' attention dispatcher" if ignoring else ""
    if reason:
        text = f"model.attention_mechanism is {name!r}, but {reason}. {BASELINE} is used instead"
        emit(Notice(text, level="warning", fallback=True))


def find_backend(name: str) -> AttentionBackendName:
    """Return diffusers' name of an attention backend; raise if a package it needs is missing."""
    backend = AttentionBackendName(BACKENDS[name])
    _check_attention_backend_requirements(backend)
    return backend


def switch_backend(transformer: nn.Module, backend: AttentionBackendName) -> int:
    """Set the attention backend of all processors that can change it, and return their number.

    diffusers' own `set_attention_backend` would also change the default of the whole process, and
    with it the encoders and later runs.
    """
    processors = dispatched_processors(transformer)
    for processor in processors:
        processor._attention_backend = backend
    return len(processors)


def current_backend(transformer: nn.Module) -> str:
    """Return the run-file name of a transformer's attention backend; `sdpa` is torch's default."""
    names = {backend: name for name, backend in BACKENDS.items()}
    for processor in dispatched_processors(transformer):
        if processor._attention_backend is not None:
            return names[AttentionBackendName(processor._attention_backend).value]
    return TORCH_DEFAULT[1]


def dispatched_processors(transformer: nn.Module) -> list[Any]:
    """Return the attention processors of a model that use diffusers' attention dispatcher."""
    processors = (vars(module).get("processor") for module in transformer.modules())
    return [p for p in processors if p is not None and "_attention_backend" in dir(p)]


# Finding the fastest backend

BASELINE = "sdpa"
"""Torch's default attention backend. It is used unless another one is clearly faster."""
CANDIDATES = (
    BASELINE,
    "cudnn",
    "flash",
    "efficient",
    "flash_attn_2",
    "flash_attn_3",
    "xformers",
    "sage",
)
MAX_REPEATS = 4
TIMING_SECONDS = 2.0
"""Seconds for timing all attention backends together. A slow backend is repeated less often."""
MAX_QUERY_NUMEL = 1 << 26
"""Largest number of elements of the query when attention is timed. Larger queries are timed with
fewer heads."""
MAX_TIMED_CALLS = 3
"""Number of different attention calls that are timed, those with the most work first."""
TOLERANCE = 0.02
"""Largest relative difference that an attention backend's outputs and gradients may have from those
of torch's default. Correct bf16 kernels differ by about a fifth of it."""
MAX_RELATIVE_TIME = 0.97
"""Share of the time of torch's default attention backend that another backend must stay below to
replace it."""
KERNEL_ERRORS = (RuntimeError, ValueError, ImportError, NotImplementedError, TypeError)
"""Errors that attention kernels raise for a shape, dtype or device that they do not support."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Shapes and options of an attention call. Shapes are (batch, tokens, heads, head width)."""

    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: torch.dtype
    mask: Tensor | None
    scale: float | None
    causal: bool

    @property
    def work(self) -> int:
        """Number of multiplications in the matmul of query and key."""
        batch, queries, heads, width = self.query
        return batch * heads * queries * self.key[1] * width

    def __str__(self) -> str:
        _, queries, heads, width = self.query
        masked = ", masked" if self.mask is not None else ""
        return f"{queries} queries on {self.key[1]} keys in {heads} heads of {width}{masked}"


@dataclass(frozen=True, slots=True)
class BackendTiming:
    """The time that one attention backend takes for the calls of one pass of the model."""

    name: str
    seconds: float
    """Seconds for forward and backward of all calls; infinite if the attention backend cannot be
    used."""
    reason: str = ""
    """Why the attention backend cannot be used; empty if it can."""


class AttentionRecorder(TorchFunctionMode):
    """Context manager that records the attention calls of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()
        self.calls: dict[object, AttentionCall] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record the call if it is attention, then run it unchanged."""
        options = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            self._record(*args, **options)
        return func(*args, **options)

    def heaviest_calls(self) -> list[tuple[AttentionCall, int]]:
        """Return the attention calls with the most work in total, and how often each was made."""
        counted = [(call, self.counts[kind]) for kind, call in self.calls.items()]
        return sorted(counted, key=lambda item: -item[0].work * item[1])[:MAX_TIMED_CALLS]

    def other_calls(self, calls: Sequence[tuple[AttentionCall, int]]) -> list[AttentionCall]:
        """Return all recorded attention calls that are not among `calls`."""
        known = [call for call, _ in calls]
        return [call for call in self.calls.values() if call not in known]

    def _record(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,  # noqa: ARG002
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002
    ) -> None:
        dtype = query.dtype
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
        mask_shape = None if attn_mask is None else attn_mask.shape
        kind = (query.shape, key.shape, dtype, mask_shape, scale, is_causal)
        self.counts[kind] += 1
        if kind not in self.calls:
            self.calls[kind] = AttentionCall(
                _dispatcher_shape(query), _dispatcher_shape(key), dtype, attn_mask, scale, is_causal
            )


def time_attention(
    calls: Sequence[tuple[AttentionCall, int]], device: torch.device, stopwatch: Stopwatch
) -> list[BackendTiming]:
    """Time every candidate attention backend on the given calls; return the fastest first.

    Each call comes with the number of times that the model makes it.
    """
    usable: dict[str, AttentionBackendName] = {}
    timings = []
    for name in CANDIDATES:
        try:
            usable[name] = find_backend(name)
        except (RuntimeError, ImportError):
            timings.append(BackendTiming(name, inf, "not installed"))
    seconds = dict.fromkeys(usable, 0.0)
    reasons: dict[str, str] = {}
    for call, count in calls:
        trial = BackendTrial(call, device, stopwatch, TIMING_SECONDS / len(calls) / len(usable))
        for name, backend in usable.items():
            if name not in reasons:
                call_seconds, reason = trial.time_backend(backend)
                seconds[name] += count * call_seconds
                reasons |= {name: reason} if reason else {}
    timings += [
        BackendTiming(n, inf if n in reasons else s, reasons.get(n, "")) for n, s in seconds.items()
    ]
    return sorted(timings, key=lambda timing: timing.seconds)


def choose_backend(timings: Sequence[BackendTiming]) -> str:
    """Return the name of the attention backend to use: torch's default, or a clearly faster one.

    If the default could not be timed, the others could not be compared with it, so it stays.
    """
    baseline = next(timing for timing in timings if timing.name == BASELINE)
    best = min(timings, key=lambda timing: timing.seconds)
    faster = isfinite(baseline.seconds) and best.seconds < MAX_RELATIVE_TIME * baseline.seconds
    return best.name if faster else BASELINE


def drop_incapable_backends(
    timings: Sequence[BackendTiming],
    other_calls: Callable[[], Sequence[AttentionCall]],
    device: torch.device,
    stopwatch: Stopwatch,
) -> list[BackendTiming]:
    """Exclude attention backends that would be chosen but fail on calls that were not timed.

    The fastest backend is tried on these calls, then the next, until one passes or only torch's
    default is left. `other_calls` runs the model to find the calls, so it is not called if the
    default is fastest.
    """
    kept = list(timings)
    while (name := choose_backend(kept)) != BASELINE:
        reasons = (why_unusable(name, call, device, stopwatch) for call in other_calls())
        reason = next(filter(None, reasons), "")
        if not reason:
            break
        kept = [replace(t, seconds=inf, reason=reason) if t.name == name else t for t in kept]
    return kept


def why_unusable(name: str, call: AttentionCall, device: torch.device, stopwatch: Stopwatch) -> str:
    """Return why an attention backend cannot replace torch's default for a call; else empty."""
    trial = BackendTrial(call, device, stopwatch, seconds=0.0)
    _, reason = trial.time_backend(find_backend(BASELINE))
    if not reason:
        _, reason = trial.time_backend(find_backend(name))
    return f"{reason}, for {call}" if reason else ""


class BackendTrial:
    """Times attention backends on random inputs of one call, and compares their results.

    The first backend that is timed must be torch's default: its results are the reference.
    """

    def __init__(
        self, call: AttentionCall, device: torch.device, stopwatch: Stopwatch, seconds: float
    ) -> None:
        self._attention = call
        self._stopwatch = stopwatch
        self._seconds = seconds
        batch, queries, heads, width = call.query
        timed_heads = max(1, min(heads, MAX_QUERY_NUMEL // (batch * queries * width)))
        if call.mask is not None or call.key[2] != heads:
            timed_heads = heads  # a mask, or keys shared by heads, would have to be cut as well
        self._scale = heads / timed_heads
        generator = torch.Generator(device).manual_seed(0)
        shapes = [
            (batch, tokens, timed_heads, width) for tokens in (queries, call.key[1], call.key[1])
        ]

        def random(shape: tuple[int, ...]) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=device)
            return drawn.to(call.dtype)

        if call.key[2] != heads:
            shapes[1:] = [call.key, call.key]
        self._qkv = [random(shape).requires_grad_() for shape in shapes]
        self._grad = random(shapes[0])
        self._reference: list[Tensor] | None = None

    def time_backend(self, backend: AttentionBackendName) -> tuple[float, str]:
        """Return the seconds of forward and backward, and why the backend cannot be used, if so."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch explains at length why it skips a kernel
                results = self._run(backend)
                if self._reference is None:
                    self._reference = results
                elif not _agree(results, self._reference):
                    return 0.0, "results differ from sdpa"
                seconds = self._stopwatch(lambda: self._run(backend), 1)
                repeats = min(MAX_REPEATS, int(self._seconds / max(seconds, 1e-9)))
                if repeats:
                    seconds = self._stopwatch(lambda: self._run(backend), repeats)
        except torch.OutOfMemoryError:
            if self._reference is None:  # even the baseline does not fit: nothing was measured
                raise
            return 0.0, "out of memory"
        except KERNEL_ERRORS as error:
            return 0.0, (str(error).strip().splitlines() or [type(error).__name__])[0]
        return seconds * self._scale, ""

    def _run(self, backend: AttentionBackendName) -> list[Tensor]:
        """Run attention forward and backward; return the output and the gradients of q, k and v."""
        out: Tensor = dispatch_attention_fn(
            *self._qkv,
            attn_mask=self._attention.mask,
            is_causal=self._attention.causal,
            scale=self._attention.scale,
            enable_gqa=self._attention.key[2] != self._attention.query[2],
            backend=backend,
        )
        return [out.detach(), *torch.autograd.grad(out, self._qkv, self._grad)]


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Return a function that times a callable: with CUDA events on a GPU, else with the clock."""

    def by_events(work: Callable[[], object], repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats

    def by_clock(work: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / repeats

    return by_events if device.type == "cuda" else by_clock


def _dispatcher_shape(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return an attention tensor's shape in diffusers' order: (batch, tokens, heads, width).

    Torch's order has heads before tokens.
    """
    batch, heads, tokens, width = tensor.shape
    return batch, tokens, heads, width


def _agree(results: Sequence[Tensor], reference: Sequence[Tensor]) -> bool:
    return all(
        bool((a.float() - b.float()).norm() <= TOLERANCE * b.float().norm())
        for a, b in zip(results, reference, strict=True)
    )
