"""Hints about where a managed tensor should live, each of which says what became of it.

A hint is applied, unsupported (why) or failed (the driver's code); none is dropped in silence. Only
the tensor's own bytes are named to the driver, rounded inwards to pages, and only if they are
managed memory. What a batch's tensors deserve is `placement`; making managed memory is `pool`.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.events.types import Notice
from gracetune.memory.driver import HOST, Advice, CudaCode, PointerKind, RangeState
from gracetune.memory.platform import Link, Platform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gracetune.memory.driver import Driver

Location = int | str | torch.device | None
"""A device ordinal, `HOST`, what torch calls a device, or none: the platform's own device."""

HINTS_OFF = (
    "hints are off: set gh200_optimizations.enable_uvm_hints, "
    "SIMPLETUNER_GH200_ENABLE_UVM_HINTS=1 or set_uvm_hint_override(True)"
)
_NOT_MANAGED = {
    PointerKind.UNKNOWN: "plain host memory; managed memory comes from UnifiedPool.allocating()",
    PointerKind.HOST: "pinned host memory, which never moves",
    PointerKind.DEVICE: (
        "ordinary device memory, which never moves; managed memory comes from "
        "UnifiedPool.allocating()"
    ),
}
_NO_HINTS_HERE = {
    Link.NONE: "no GPU",
    Link.COPY: "managed memory is unsafe here",
    Link.INTEGRATED: "host and device are one memory, so there is nothing to move",
}


class Verdict(StrEnum):
    """What became of a hint."""

    APPLIED = "applied"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Hint:
    """One hint and its fate; truthy only when it was applied."""

    verb: str
    verdict: Verdict
    reason: str = ""
    """Why it was not applied; for a question, what the answer rests on."""
    nbytes: int = 0
    """Bytes that the driver was told about."""
    code: int = 0
    """The driver's code, where it failed."""

    def __bool__(self) -> bool:
        return self.verdict is Verdict.APPLIED


@dataclass(frozen=True, slots=True)
class Residency(Hint):
    """Where a tensor lives, as far as anyone was asked to put it somewhere."""

    place: int | None = None
    """A device ordinal or `HOST`; none: managed, and nobody has asked yet."""
    kind: PointerKind = PointerKind.UNKNOWN
    state: RangeState | None = None
    """What was asked of a managed range."""

    def __bool__(self) -> bool:
        return self.verdict is Verdict.APPLIED


class Span(NamedTuple):
    """Whole pages that belong to one tensor alone."""

    pointer: int
    nbytes: int


@dataclass(slots=True)
class HintCounts:
    """What hints have come to since the start; a copy, safe to keep."""

    verdicts: Counter[tuple[str, Verdict]] = field(default_factory=Counter)
    """Calls by verb and verdict."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes of applied hints by what was done: `prefetched_to_device`, `discarded`, ..."""

    def copy(self) -> HintCounts:
        """The same counts, detached."""
        return HintCounts(self.verdicts.copy(), self.nbytes.copy())


def legacy_stream(device: int) -> int:  # noqa: ARG001  every device has it under this number
    """The stream that waits for all others: right where there is no torch stream to ask."""
    return 0


def torch_stream(device: int) -> int:
    """The stream that torch is issuing to, without making a stream object for each question."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def ignore_notice(notice: Notice) -> None:
    """For callers who read verdicts themselves."""


class Hints:
    """The verbs, over one driver and one platform; counts what they did."""

    def __init__(
        self,
        driver: Driver | None,
        platform: Platform,
        *,
        enabled: bool = True,
        current_stream: Callable[[int], int] = legacy_stream,
        emit: Callable[[Notice], None] = ignore_notice,
    ) -> None:
        """`driver` is none exactly where there is no GPU; `tell` hears each refusal once."""
        assert (driver is None) == (platform.link is Link.NONE), platform.link
        self.platform = platform
        self.enabled = enabled
        self._driver = driver
        self._refusal = _refusal(platform)
        self._current_stream = current_stream
        self._emit = emit
        self._lock = threading.Lock()
        self._counts = HintCounts()
        self._applied: dict[tuple[str, int], Hint] = {}  # equal hints are one object: made once
        self._told: set[tuple[str, str]] = set()

    def prefer_cpu_residency(self, tensor: Tensor) -> Hint:
        """Make host memory the home; the device reads it in place instead of pulling it over."""
        return self._advise("prefer_cpu_residency", tensor, HOST)

    def prefer_gpu_residency(self, tensor: Tensor) -> Hint:
        """Make the device's memory the home."""
        return self._advise("prefer_gpu_residency", tensor, self._device_of(tensor))

    def prefetch_to_device(
        self, tensor: Tensor, device: Location = None, stream: torch.cuda.Stream | int | None = None
    ) -> Hint:
        """Move it now, in stream order, so that no kernel faults for it; `"cpu"` moves it back."""
        verb = "prefetch_to_device"
        place = self._place(tensor, device)
        if place is None:
            return self._unsupported(verb, f"{device} is neither the host nor a CUDA device")
        target = self._target(verb, tensor)
        if isinstance(target, Hint):
            return target
        driver, span = target
        queue = self._stream(tensor, stream)
        code = driver.prefetch(span.pointer, span.nbytes, place, queue)
        counted = "prefetched_to_host" if place == HOST else "prefetched_to_device"
        return self._done(verb, span, code, counted)

    def discard(self, tensor: Tensor, stream: torch.cuda.Stream | int | None = None) -> Hint:
        """Drop the contents: dead bytes are not written back when their pages are evicted."""
        verb = "discard"
        target = self._target(verb, tensor)
        if isinstance(target, Hint):
            return target
        driver, span = target
        code = driver.discard(span.pointer, span.nbytes, self._stream(tensor, stream))
        return self._done(verb, span, code, "discarded")

    def residency(self, tensor: Tensor) -> Residency:
        """Where the tensor lives; a question, so it is answered even where hints are off."""
        found = self._residency(tensor)
        self._count(found, "")
        return found

    def counts(self) -> HintCounts:
        """What was applied, refused and failed so far."""
        with self._lock:
            return self._counts.copy()

    def _residency(self, tensor: Tensor) -> Residency:
        span = page_span(tensor, page_bytes=1)
        if isinstance(span, str):
            return Residency("residency", Verdict.UNSUPPORTED, span)
        if self._driver is None:
            why = f"{_NO_HINTS_HERE[Link.NONE]}: all memory is the host's"
            return Residency("residency", Verdict.APPLIED, why, span.nbytes, place=HOST)
        kind = self._driver.pointer_kind(span.pointer)
        if kind is not PointerKind.MANAGED:
            place = self._device_of(tensor) if kind is PointerKind.DEVICE else HOST
            why = _NOT_MANAGED[kind]
            return Residency("residency", Verdict.APPLIED, why, span.nbytes, 0, place, kind)
        pages = page_span(tensor, self.platform.page_bytes)
        asked = span if isinstance(pages, str) else pages  # of less than a page, what there is
        state = self._driver.range_state(asked.pointer, asked.nbytes)
        place_asked = state.preferred if state.last_prefetch is None else state.last_prefetch
        why = (
            "managed; nobody has asked for a place"
            if place_asked is None
            else "managed; the place last asked for, since CUDA does not tell where pages are"
        )
        return Residency(
            "residency", Verdict.APPLIED, why, span.nbytes, 0, place_asked, kind, state
        )

    def _advise(self, verb: str, tensor: Tensor, home: int) -> Hint:
        target = self._target(verb, tensor)
        if isinstance(target, Hint):
            return target
        driver, span = target
        code = driver.advise(span.pointer, span.nbytes, Advice.SET_PREFERRED_LOCATION, home)
        if code == CudaCode.SUCCESS:
            device = self._device_of(tensor)
            code = driver.advise(span.pointer, span.nbytes, Advice.SET_ACCESSED_BY, device)
        return self._done(
            verb, span, code, "preferred_host" if home == HOST else "preferred_device"
        )

    def _target(self, verb: str, tensor: Tensor) -> tuple[Driver, Span] | Hint:
        """The driver and the pages to name to it, or the reason why not."""
        if not self.enabled:
            return self._unsupported(verb, HINTS_OFF)
        if self._driver is None or self._refusal:
            return self._unsupported(verb, self._refusal)
        span = page_span(tensor, self.platform.page_bytes)
        if isinstance(span, str):
            return self._unsupported(verb, span)
        kind = self._driver.pointer_kind(span.pointer)
        if kind is not PointerKind.MANAGED:
            return self._unsupported(verb, _NOT_MANAGED[kind])
        return self._driver, span

    def _device_of(self, tensor: Tensor) -> int:
        """A managed tensor may be a CPU tensor too; then the platform's device is meant."""
        index = tensor.get_device()
        return self.platform.device if index < 0 else index

    def _place(self, tensor: Tensor, device: Location) -> int | None:
        if device is None:
            return self._device_of(tensor)
        if isinstance(device, int):
            return device
        try:
            asked = torch.device(device)
        except RuntimeError:  # a word that torch does not know
            return None
        if asked.type == "cpu":
            return HOST
        if asked.type != "cuda":
            return None
        return self.platform.device if asked.index is None else asked.index

    def _stream(self, tensor: Tensor, stream: torch.cuda.Stream | int | None) -> int:
        if stream is None:
            return self._current_stream(self._device_of(tensor))
        if isinstance(stream, int):
            return stream
        return stream.cuda_stream

    def _done(self, verb: str, span: Span, code: int, counted: str) -> Hint:
        if code == CudaCode.SUCCESS:
            key = (verb, span.nbytes)
            if key not in self._applied:
                self._applied[key] = Hint(verb, Verdict.APPLIED, nbytes=span.nbytes)
            hint = self._applied[key]
        elif code == CudaCode.NOT_SUPPORTED:
            why = "the driver or its bindings are too old for it"
            hint = Hint(verb, Verdict.UNSUPPORTED, why, span.nbytes, code)
        else:
            hint = Hint(verb, Verdict.FAILED, "the driver refused", span.nbytes, code)
        self._count(hint, counted)
        return hint

    def _unsupported(self, verb: str, reason: str) -> Hint:
        hint = Hint(verb, Verdict.UNSUPPORTED, reason)
        self._count(hint, "")
        return hint

    def _count(self, hint: Hint, counted: str) -> None:
        with self._lock:
            self._counts.verdicts[hint.verb, hint.verdict] += 1
            if hint.verdict is Verdict.APPLIED:
                if counted:
                    self._counts.nbytes[counted] += hint.nbytes
                return
            reason = f"{hint.reason} (code {hint.code})" if hint.code else hint.reason
            if not self.enabled or (hint.verb, reason) in self._told:
                return
            self._told.add((hint.verb, reason))
        text = f"{hint.verb} is {hint.verdict}: {reason}"
        self._emit(Notice(text, level="warning", fallback=True))


def _refusal(platform: Platform) -> str:
    """Why no hint makes sense on this platform, or nothing."""
    if platform.link not in _NO_HINTS_HERE:
        return ""
    return f"{_NO_HINTS_HERE[platform.link]}: {platform.reasons['link']}"


def page_span(tensor: Tensor, page_bytes: int) -> Span | str:
    """The whole pages inside a tensor's own bytes, or why there are none."""
    if tensor.layout is not torch.strided:
        return "a sparse tensor has no one range of bytes; hint its indices and values"
    if tensor.is_meta:
        return "a meta tensor has no memory"
    nbytes = dense_nbytes(tensor)
    if nbytes is None:
        return "other tensors' bytes lie between its own; hint a contiguous one"
    if nbytes == 0:
        return "the tensor is empty"
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:
        return "it has no memory of its own (a fake or wrapped tensor)"
    if pointer == 0:
        return "it has no memory of its own (a fake or wrapped tensor)"
    first = -(-pointer // page_bytes) * page_bytes
    end = (pointer + nbytes) // page_bytes * page_bytes
    if end <= first:
        return f"it holds no whole page of {page_bytes} bytes"
    return Span(first, end - first)


def dense_nbytes(tensor: Tensor) -> int | None:
    """Bytes from the first element to the last, or none if others' bytes lie between them.

    Any order of dimensions will do, and so will a dimension that repeats the same bytes.
    """
    if tensor.is_contiguous():
        return tensor.nbytes
    run = 1
    strides_and_sizes = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1 and stride != 0
    )
    for stride, size in strides_and_sizes:
        if stride != run:
            return None
        run *= size
    return run * tensor.element_size()
