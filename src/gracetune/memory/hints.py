"""Give the CUDA driver hints about where managed tensors should live, and report each outcome.

A hint is applied, unsupported (with the reason) or failed (with the driver's code), never silently
dropped. The driver is only given whole pages that belong to the tensor alone, and only if they are
managed memory. `placement.py` decides which hints a batch gets; `managed_pool.py` and
`managed_roles.py` allocate managed memory.

Ordering (stream S is the current torch stream unless one is given):

    prefer_cpu_residency   cuMemAdvise: takes effect at once and moves nothing. It sets the
                           preferred location to the host and maps the pages into the device
                           (accessed-by), so that kernels read them over the link
    prefetch_to_device     cuMemPrefetchAsync on S: starts after the work queued on S so far,
                           and kernels queued on S afterwards find the pages moved
    kernel on S            touches the pages without faults

So advise first, then prefetch, then launch: advice given after a kernel was launched comes too
late for it, and a prefetch on another stream needs an event between the two streams.
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
"""A device ordinal, `HOST`, a torch device or its name; None means the tensor's device."""

HINTS_OFF = (
    "hints are off: set gh200_optimizations.enable_uvm_hints, "
    "SIMPLETUNER_GH200_ENABLE_UVM_HINTS=1 or set_uvm_hint_override(True)"
)
"""Reason reported for each memory hint (advice or prefetch) that is skipped as hints are off."""
_NOT_MANAGED = {
    PointerKind.UNKNOWN: "pageable host memory; allocate it in ManagedPool.allocating() instead",
    PointerKind.HOST: "pinned host memory, which never moves",
    PointerKind.DEVICE: (
        "ordinary device memory, which never moves; allocate it in ManagedPool.allocating() instead"
    ),
}
_NO_HINTS_HERE = {
    Link.NONE: "no GPU",
    Link.COPY: "managed memory is unsafe on this machine",
    Link.INTEGRATED: "host and device share one memory, so there is nothing to move",
}


class HintOutcome(StrEnum):
    """Outcome of a memory hint (advice or prefetch): applied, unsupported or failed."""

    APPLIED = "applied"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Hint:
    """A memory hint (advice or prefetch) and its outcome; truthy if it was applied."""

    verb: str
    """Name of the `Hints` method that gave the hint, such as `prefetch_to_device`."""
    verdict: HintOutcome
    reason: str = ""
    """Why the hint was not applied; in a `Residency`, what is known about the tensor's memory."""
    nbytes: int = 0
    """Number of bytes that the hint covers."""
    code: int = 0
    """The CUDA driver's error code; 0 if there was none."""

    def __bool__(self) -> bool:
        return self.verdict is HintOutcome.APPLIED


@dataclass(frozen=True, slots=True)
class Residency(Hint):
    """Location of a tensor's memory; for managed memory, the last requested location."""

    location: int | None = None
    """A device ordinal or `HOST`; None for managed memory without a requested location."""
    kind: PointerKind = PointerKind.UNKNOWN
    state: RangeState | None = None
    """Advice and last prefetch of managed memory; None for other memory."""

    def __bool__(self) -> bool:
        return self.verdict is HintOutcome.APPLIED


class Span(NamedTuple):
    """A memory range of whole pages that only one tensor uses."""

    pointer: int
    nbytes: int


@dataclass(slots=True)
class HintCounts:
    """Counts of the memory hints (advice and prefetches) given so far, and of their bytes."""

    verdicts: Counter[tuple[str, HintOutcome]] = field(default_factory=Counter)
    """Number of hints by method name and outcome."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes of applied hints by effect, such as `prefetched_to_device` or `discarded`."""

    def copy(self) -> HintCounts:
        """Return an independent copy."""
        return HintCounts(self.verdicts.copy(), self.nbytes.copy())


def legacy_stream(device: int) -> int:  # noqa: ARG001  it has the same number on every device
    """Return the handle of CUDA's legacy default stream; used if torch has no CUDA."""
    return 0


def torch_stream(device: int) -> int:
    """Return the handle of torch's current CUDA stream, without creating a stream object."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def ignore_notice(notice: Notice) -> None:
    """Ignore a notice; for callers that check the returned hints themselves."""


class Hints:
    """Gives the CUDA driver hints about where tensors should be, and counts their outcomes."""

    def __init__(
        self,
        driver: Driver | None,
        platform: Platform,
        *,
        enabled: bool = True,
        current_stream: Callable[[int], int] = legacy_stream,
        emit: Callable[[Notice], None] = ignore_notice,
    ) -> None:
        """`driver` is None without a GPU; `emit` gets a notice for each new kind of failure."""
        assert (driver is None) == (platform.link is Link.NONE), platform.link
        self.platform = platform
        self.enabled = enabled
        self._driver = driver
        self._platform_refusal = _platform_refusal(platform)
        self._current_stream = current_stream
        self._emit = emit
        self._lock = threading.Lock()
        self._counts = HintCounts()
        self._applied: dict[tuple[str, int], Hint] = {}
        """Applied hints by method name and bytes, reused to avoid an allocation per hint."""
        self._reported: set[tuple[str, str]] = set()

    def prefer_cpu_residency(self, tensor: Tensor) -> Hint:
        """Ask the driver to keep a tensor in host memory, where kernels read it without a copy."""
        return self._advise("prefer_cpu_residency", tensor, HOST)

    def prefer_gpu_residency(self, tensor: Tensor) -> Hint:
        """Ask the driver to keep a tensor in device memory."""
        return self._advise("prefer_gpu_residency", tensor, self._device_of(tensor))

    def prefetch_to_device(
        self, tensor: Tensor, device: Location = None, stream: torch.cuda.Stream | int | None = None
    ) -> Hint:
        """Move a managed tensor to a device in stream order, before kernels would fault on it.

        The device "cpu" moves it back to host memory.
        """
        verb = "prefetch_to_device"
        location = self._resolve_location(tensor, device)
        if location is None:
            return self._unsupported(verb, f"{device} is neither the CPU nor a CUDA device")
        target = self._target(verb, tensor)
        if isinstance(target, Hint):
            return target
        driver, span = target
        queue = self._stream(tensor, stream)
        code = driver.prefetch(span.pointer, span.nbytes, location, queue)
        counted = "prefetched_to_host" if location == HOST else "prefetched_to_device"
        return self._finish(verb, span, code, counted)

    def discard(self, tensor: Tensor, stream: torch.cuda.Stream | int | None = None) -> Hint:
        """Discard a tensor's contents, so that evicting its pages needs no write-back."""
        verb = "discard"
        target = self._target(verb, tensor)
        if isinstance(target, Hint):
            return target
        driver, span = target
        code = driver.discard(span.pointer, span.nbytes, self._stream(tensor, stream))
        return self._finish(verb, span, code, "discarded")

    def residency(self, tensor: Tensor) -> Residency:
        """Return the location of a tensor's memory, also while hints are off."""
        found = self._residency(tensor)
        self._count(found, "")
        return found

    def counts(self) -> HintCounts:
        """Return the counts of applied, unsupported and failed hints so far."""
        with self._lock:
            return self._counts.copy()

    def _residency(self, tensor: Tensor) -> Residency:
        span = page_span(tensor, page_bytes=1)
        if isinstance(span, str):
            return Residency("residency", HintOutcome.UNSUPPORTED, span)
        if self._driver is None:
            why = f"{_NO_HINTS_HERE[Link.NONE]}: all memory is host memory"
            return Residency("residency", HintOutcome.APPLIED, why, span.nbytes, location=HOST)
        kind = self._driver.pointer_kind(span.pointer)
        if kind is not PointerKind.MANAGED:
            location = self._device_of(tensor) if kind is PointerKind.DEVICE else HOST
            why = _NOT_MANAGED[kind]
            return Residency("residency", HintOutcome.APPLIED, why, span.nbytes, 0, location, kind)
        pages = page_span(tensor, self.platform.page_bytes)
        asked = span if isinstance(pages, str) else pages  # less than a page: use its own bytes
        state = self._driver.range_state(asked.pointer, asked.nbytes)
        requested = state.preferred if state.last_prefetch is None else state.last_prefetch
        why = (
            "managed; no location was requested"
            if requested is None
            else "managed; the last requested location, since CUDA does not report where pages are"
        )
        return Residency(
            "residency", HintOutcome.APPLIED, why, span.nbytes, 0, requested, kind, state
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
        return self._finish(
            verb, span, code, "preferred_host" if home == HOST else "preferred_device"
        )

    def _target(self, verb: str, tensor: Tensor) -> tuple[Driver, Span] | Hint:
        """Return the driver and the pages of a tensor to give a hint for.

        If no hint is possible, returns a `Hint` with the outcome `UNSUPPORTED` and the reason.
        """
        if not self.enabled:
            return self._unsupported(verb, HINTS_OFF)
        if self._driver is None or self._platform_refusal:
            return self._unsupported(verb, self._platform_refusal)
        span = page_span(tensor, self.platform.page_bytes)
        if isinstance(span, str):
            return self._unsupported(verb, span)
        kind = self._driver.pointer_kind(span.pointer)
        if kind is not PointerKind.MANAGED:
            return self._unsupported(verb, _NOT_MANAGED[kind])
        return self._driver, span

    def _device_of(self, tensor: Tensor) -> int:
        """Return the ordinal of a tensor's device; for a CPU tensor, `self.platform.device`."""
        index = tensor.get_device()
        return self.platform.device if index < 0 else index

    def _resolve_location(self, tensor: Tensor, device: Location) -> int | None:
        if device is None:
            return self._device_of(tensor)
        if isinstance(device, int):
            return device
        try:
            asked = torch.device(device)
        except RuntimeError:  # not the name of a device
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

    def _finish(self, verb: str, span: Span, code: int, counted: str) -> Hint:
        if code == CudaCode.SUCCESS:
            key = (verb, span.nbytes)
            if key not in self._applied:
                self._applied[key] = Hint(verb, HintOutcome.APPLIED, nbytes=span.nbytes)
            hint = self._applied[key]
        elif code == CudaCode.NOT_SUPPORTED:
            why = "the driver or cuda-bindings is too old"
            hint = Hint(verb, HintOutcome.UNSUPPORTED, why, span.nbytes, code)
        else:
            hint = Hint(verb, HintOutcome.FAILED, "the driver refused it", span.nbytes, code)
        self._count(hint, counted)
        return hint

    def _unsupported(self, verb: str, reason: str) -> Hint:
        hint = Hint(verb, HintOutcome.UNSUPPORTED, reason)
        self._count(hint, "")
        return hint

    def _count(self, hint: Hint, counted: str) -> None:
        with self._lock:
            self._counts.verdicts[hint.verb, hint.verdict] += 1
            if hint.verdict is HintOutcome.APPLIED:
                if counted:
                    self._counts.nbytes[counted] += hint.nbytes
                return
            reason = f"{hint.reason} (code {hint.code})" if hint.code else hint.reason
            if not self.enabled or (hint.verb, reason) in self._reported:
                return
            self._reported.add((hint.verb, reason))
        text = f"{hint.verb} is {hint.verdict}: {reason}"
        self._emit(Notice(text, level="warning", fallback=True))


def _platform_refusal(platform: Platform) -> str:
    """Return why memory hints are impossible on this platform; empty if they are possible."""
    if platform.link not in _NO_HINTS_HERE:
        return ""
    return f"{_NO_HINTS_HERE[platform.link]}: {platform.reasons['link']}"


def page_span(tensor: Tensor, page_bytes: int) -> Span | str:
    """Return the range of whole pages within a tensor's bytes, or the reason why there is none."""
    if tensor.layout is not torch.strided:
        return "a sparse tensor is not one range of bytes; give hints for its indices and values"
    if tensor.is_meta:
        return "a meta tensor has no memory"
    nbytes = dense_nbytes(tensor)
    if nbytes is None:
        return "there are gaps between its elements; use a contiguous tensor"
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
        return f"it contains no whole page of {page_bytes} bytes"
    return Span(first, end - first)


def dense_nbytes(tensor: Tensor) -> int | None:
    """Return the bytes from a tensor's first to its last element; None if there are gaps.

    Permuted and expanded (stride 0) dimensions are no gaps.
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
