"""The attention backend, by the names that run files use.

What is not installed is refused by name. A backend that the model's attention would ignore is
refused too: diffusers accepts it without a word.
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
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    Stopwatch = Callable[[Callable[[], object], int], float]
    """Seconds of one of so many repetitions."""


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
TORCH_DEFAULT = ("auto", "sdpa")
"""What torch does on its own; `auto` is measured later, on a GPU, by what the model asks for."""


def set_attention_backend(transformer: nn.Module, name: str) -> None:
    """Switch the transformer to this backend, or say why it cannot be."""
    if name in TORCH_DEFAULT:
        return
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"model.attention_mechanism {name!r} is not known. Known: {known}.")
    try:
        backend = find_backend(name)
    except (RuntimeError, ImportError) as error:
        raise ConfigError(
            f"model.attention_mechanism {name!r} cannot be used here: {error} "
            "Set it to auto or sdpa."
        ) from error
    if not switch_backend(transformer, backend):
        raise ConfigError(
            f"model.attention_mechanism is {name!r}, but {type(transformer).__name__} does not use "
            "diffusers' attention dispatcher; set it to auto or sdpa."
        )


def find_backend(name: str) -> AttentionBackendName:
    """diffusers' own name; an error where what it needs is not installed."""
    backend = AttentionBackendName(BACKENDS[name])
    _check_attention_backend_requirements(backend)
    return backend


def switch_backend(transformer: nn.Module, backend: AttentionBackendName) -> int:
    """Give this backend to all attention that takes one; gives how many did.

    diffusers' own `set_attention_backend` would make it the default of the whole process too, for
    encoders and for runs to come.
    """
    processors = dispatched_processors(transformer)
    for processor in processors:
        processor._attention_backend = backend
    return len(processors)


def dispatched_processors(transformer: nn.Module) -> list[Any]:
    """The attention processors that go through diffusers' dispatcher."""
    if not isinstance(transformer, ModelMixin):
        return []
    return [p for p in transformer.attn_processors.values() if "_attention_backend" in dir(p)]


# ------------------------------------------------------------------------------------------
# The fastest attention backend for what a model really asks for, forward and backward.
#
# The calls are seen in a pass of the model itself. Each backend of diffusers' dispatcher that is
# installed does them; what fails, has no backward, or gives other numbers than torch's own choice
# is
# left out. So is what cannot do a call that was not timed, such as those of other buckets. `math`
# and
# `flex` are not tried: one keeps every score, the other is only fast after a compilation that takes
# longer than all of this.


BASELINE = "sdpa"
"""torch's own choice: what the others are compared with, and what stays where none is faster."""
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
"""For all backends together: what is slow is repeated less."""
MAX_QUERY_NUMEL = 1 << 26
"""Of queries: a longer sequence is timed with fewer heads, which are all alike."""
MAX_TIMED_CALLS = 3
"""Kinds of calls that are timed: those with most work."""
TOLERANCE = 0.02
"""Relative, of outputs and gradients: bf16 differs by a fifth of it from kernel to kernel."""
MAX_RELATIVE_TIME = 0.97
"""Of the time of torch's own choice: what another must stay below."""
KERNEL_ERRORS = (RuntimeError, ValueError, ImportError, NotImplementedError, TypeError)
"""What kernels raise that do not fit a shape, a type or a device."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One kind of call, as the dispatcher takes it: samples, tokens, heads, width."""

    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: torch.dtype
    mask: Tensor | None
    scale: float | None
    causal: bool

    @property
    def work(self) -> int:
        """In products of numbers."""
        batch, queries, heads, width = self.query
        return batch * heads * queries * self.key[1] * width

    def __str__(self) -> str:
        _, queries, heads, width = self.query
        masked = ", masked" if self.mask is not None else ""
        return f"{queries} queries on {self.key[1]} keys in {heads} heads of {width}{masked}"


@dataclass(frozen=True, slots=True)
class BackendTiming:
    """What one backend took for all the calls of a pass, there and back; or why it is left out."""

    name: str
    seconds: float
    reason: str = ""


class AttentionRecorder(TorchFunctionMode):
    """Notes what attention a model asks torch for while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()
        self.asked: dict[object, AttentionCall] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """All calls go on as they are."""
        given = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            self._note(*args, **given)
        return func(*args, **given)

    def heaviest_calls(self) -> list[tuple[AttentionCall, int]]:
        """The kinds of calls that matter, and how often each is made."""
        every = [(asked, self.counts[kind]) for kind, asked in self.asked.items()]
        return sorted(every, key=lambda one: -one[0].work * one[1])[:MAX_TIMED_CALLS]

    def other_calls(self, calls: Sequence[tuple[AttentionCall, int]]) -> list[AttentionCall]:
        """Every other kind, however little work it is."""
        known = [asked for asked, _ in calls]
        return [asked for asked in self.asked.values() if asked not in known]

    def _note(
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
        if kind not in self.asked:
            self.asked[kind] = AttentionCall(
                _by_tokens(query), _by_tokens(key), dtype, attn_mask, scale, is_causal
            )


def time_attention(
    calls: Sequence[tuple[AttentionCall, int]], device: torch.device, stopwatch: Stopwatch
) -> list[BackendTiming]:
    """Every backend that is worth a try, fastest first, torch's own among them."""
    usable: dict[str, AttentionBackendName] = {}
    timings = []
    for name in CANDIDATES:
        try:
            usable[name] = find_backend(name)
        except (RuntimeError, ImportError):
            timings.append(BackendTiming(name, inf, "not installed"))
    seconds = dict.fromkeys(usable, 0.0)
    reasons: dict[str, str] = {}
    for asked, count in calls:
        trial = BackendTrial(asked, device, stopwatch, TIMING_SECONDS / len(calls) / len(usable))
        for name, backend in usable.items():
            if name not in reasons:
                taken, reason = trial.time_backend(backend)
                seconds[name] += count * taken
                reasons |= {name: reason} if reason else {}
    timings += [
        BackendTiming(n, inf if n in reasons else s, reasons.get(n, "")) for n, s in seconds.items()
    ]
    return sorted(timings, key=lambda timing: timing.seconds)


def fastest(timings: Sequence[BackendTiming]) -> str:
    """torch's own choice, unless another is clearly faster.

    Where that one could not be timed, no other was compared with it either.
    """
    own = next(timing for timing in timings if timing.name == BASELINE)
    best = min(timings, key=lambda timing: timing.seconds)
    faster = isfinite(own.seconds) and best.seconds < MAX_RELATIVE_TIME * own.seconds
    return best.name if faster else BASELINE


def drop_incapable_backends(
    timings: Sequence[BackendTiming],
    others: Callable[[], Sequence[AttentionCall]],
    device: torch.device,
    stopwatch: Stopwatch,
) -> list[BackendTiming]:
    """Leave out the fastest as long as it cannot do all calls that were not timed.

    Where torch's own choice is the fastest nobody asks for `others`, which take passes to find.
    """
    kept = list(timings)
    while (name := fastest(kept)) != BASELINE:
        reason = next(
            filter(None, (why_unusable(name, a, device, stopwatch) for a in others())), ""
        )
        if not reason:
            break
        kept = [replace(t, seconds=inf, reason=reason) if t.name == name else t for t in kept]
    return kept


def why_unusable(
    name: str, asked: AttentionCall, device: torch.device, stopwatch: Stopwatch
) -> str:
    """Why a backend cannot stand in for torch's own choice here; empty: it can."""
    trial = BackendTrial(asked, device, stopwatch, seconds=0.0)
    reason = (
        trial.time_backend(find_backend(BASELINE))[1] or trial.time_backend(find_backend(name))[1]
    )
    return f"{reason}, for {asked}" if reason else ""


class BackendTrial:
    """One kind of call, done by one backend after the other; torch's own comes first."""

    def __init__(
        self, asked: AttentionCall, device: torch.device, stopwatch: Stopwatch, seconds: float
    ) -> None:
        self._asked = asked
        self._stopwatch = stopwatch
        self._seconds = seconds
        batch, queries, heads, width = asked.query
        fewer = max(1, min(heads, MAX_QUERY_NUMEL // (batch * queries * width)))
        if asked.mask is not None or asked.key[2] != heads:
            fewer = heads  # a mask, or keys that heads share, would have to be cut as well
        self._part = heads / fewer
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(batch, tokens, fewer, width) for tokens in (queries, asked.key[1], asked.key[1])]

        def numbers(shape: tuple[int, ...]) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=device)
            return drawn.to(asked.dtype)

        if asked.key[2] != heads:
            shapes[1:] = [asked.key, asked.key]
        self._leaves = [numbers(shape).requires_grad_() for shape in shapes]
        self._grad = numbers(shapes[0])
        self._expected: list[Tensor] | None = None

    def time_backend(self, backend: AttentionBackendName) -> tuple[float, str]:
        """Seconds of one call there and back, or why it does not count."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch explains at length why a kernel is not it
                found = self._call(backend)
                if self._expected is None:
                    self._expected = found
                elif not _agree(found, self._expected):
                    return 0.0, "other numbers"
                once = self._stopwatch(lambda: self._call(backend), 1)
                repeats = min(MAX_REPEATS, int(self._seconds / max(once, 1e-9)))
                taken = self._stopwatch(lambda: self._call(backend), repeats) if repeats else once
        except torch.OutOfMemoryError:
            if self._expected is None:  # torch's own call: nobody was measured
                raise
            return 0.0, "it takes more memory than there is"
        except KERNEL_ERRORS as error:
            return 0.0, (str(error).strip().splitlines() or [type(error).__name__])[0]
        return taken * self._part, ""

    def _call(self, backend: AttentionBackendName) -> list[Tensor]:
        out: Tensor = dispatch_attention_fn(
            *self._leaves,
            attn_mask=self._asked.mask,
            is_causal=self._asked.causal,
            scale=self._asked.scale,
            enable_gqa=self._asked.key[2] != self._asked.query[2],
            backend=backend,
        )
        return [out.detach(), *torch.autograd.grad(out, self._leaves, self._grad)]


def stopwatch_for(device: torch.device) -> Stopwatch:
    """By the device's own events, or by the clock where work is done when a call returns."""

    def by_events(work: Callable[[], object], repeats: int) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        for _ in range(repeats):
            work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3 / repeats

    def by_clock(work: Callable[[], object], repeats: int) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats

    return by_events if device.type == "cuda" else by_clock


def _by_tokens(tensor: Tensor) -> tuple[int, int, int, int]:
    batch, heads, tokens, width = tensor.shape
    return batch, tokens, heads, width


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        bool((one.float() - other.float()).norm() <= TOLERANCE * other.float().norm())
        for one, other in zip(found, expected, strict=True)
    )
