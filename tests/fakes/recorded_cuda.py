"""A CUDA runtime without a GPU that records what runs on which stream, and in which order.

While `record_cuda` is open, `torch.cuda` streams and events are fakes, and `RecordedCopyEngine` is
the real `CudaCopyEngine` on CPU tensors. Every aten operation is computed at once, so values are
those of the issue order. The operation is also recorded as a kernel of the current stream, with the
bytes that it reads and writes. Events, waits and synchronizations become vector clocks: the clock
of an operation has, for each stream, how many of its operations are known to be over before this
one starts. `interleavings.explore` runs a recording in every order that the clocks allow.

Rules of the recorded machine:

- A stream executes its operations in order. Nothing else is ordered, except through events, waits
  and the host.
- The host runs ahead of the device as far as it likes. It reads and writes host memory immediately,
  after the events that it has synchronized with, and before every operation that it issues later.
- `Event.query` returns what the test chooses. True means that the event was reached, so the host is
  behind it; False means nothing.
- Device memory whose last tensor has died can be reused at once by the stream that allocated it.
  After `record_stream`, it can be reused only after the work queued so far on that stream, too.
- Host memory can be reused as soon as the host frees it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from gracetune.offload.copy_engine import CudaCopyEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Clock = Counter
"""Number of finished operations by stream number. The union (`|`) is the later of two clocks."""
HOST = 0
"""Number of the stream of operations that the host executes itself."""
NO_KERNEL = {"set_", "resize_", "_unsafe_view", "record_stream"}
OVERWRITING = {"copy_", "fill_", "zero_"}


class Span(NamedTuple):
    """Bytes of a memory region."""

    region: int
    start: int
    end: int


@dataclass(eq=False)
class Region:
    """Memory of one storage, from its allocation until its last tensor dies."""

    number: int
    allocated_by: FakeStream
    is_host: bool = False
    used_by: list[FakeStream] = field(default_factory=list)
    """Streams that `record_stream` was called with."""
    free_clock: Clock | None = None
    """The memory may be reused once these operations are over; None: it was not freed."""
    references: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Weak references to the storages over this memory (DLPack adds storages), by `cdata`."""

    def __str__(self) -> str:
        return f"{'host' if self.is_host else 'device'} memory {self.number}"


@dataclass(eq=False)
class Operation:
    """A kernel or a copy of one stream, or a direct access of the host."""

    stream: int
    name: str
    is_copy: bool
    reads: list[Span]
    writes: list[Span]
    clock: Clock
    """Operations that are over before this one starts."""


@dataclass(eq=False)
class Recording:
    """Everything that ran while `record_cuda` was open, in issue order."""

    streams: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)


class FakeStream:
    """A queue of operations with the interface of `torch.cuda.Stream`."""

    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self.cuda = cuda
        self.number = len(cuda.recording.streams)
        cuda.recording.streams.append(name)
        self.copies = False
        """True for the streams of a copy engine: their `copy_` is a copy that takes time."""
        self.clock = Clock()

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.find_freed()
        self.clock |= event.clock

    def wait_stream(self, stream: FakeStream) -> None:
        self.cuda.find_freed()
        self.clock |= stream.clock

    def synchronize(self) -> None:
        self.cuda.host_waits(self.clock)


class FakeEvent:
    """A point in a queue with the interface of `torch.cuda.Event`."""

    def __init__(self, cuda: RecordedCuda) -> None:
        self.cuda = cuda
        self.clock = Clock()

    def record(self, stream: FakeStream | None = None) -> None:
        self.cuda.find_freed()
        self.clock = (stream or self.cuda.current).clock | self.cuda.host.clock

    def synchronize(self) -> None:
        self.cuda.host_waits(self.clock)

    def query(self) -> bool:
        reached = self.cuda.is_ready()
        if reached:
            self.cuda.host_waits(self.clock)
        return reached

    def elapsed_time(self, _: FakeEvent) -> float:
        return self.cuda.elapsed_ms()


class RecordedCuda(TorchDispatchMode):
    """The fake runtime. Created by `record_cuda`."""

    def __init__(self, is_ready: Callable[[], bool], elapsed_ms: Callable[[], float]) -> None:
        super().__init__()
        self.recording = Recording()
        self.is_ready, self.elapsed_ms = is_ready, elapsed_ms
        self.host = FakeStream(self, "host")
        self.current = FakeStream(self, "compute")
        self.scope = ""
        """Description of the code that runs, which is part of the names of operations."""
        self.engines: list[RecordedCopyEngine] = []
        self.num_calls = 0
        """Number of operations and allocations so far."""
        self.fail_at: int | None = None
        """The call with this number raises an error instead of running."""
        self.new_error: Callable[[], BaseException] = partial(torch.OutOfMemoryError, "injected")
        self._by_address: dict[int, Region] = {}
        self._storages: dict[int, tuple[Region, int]] = {}
        """The region and the address of each live storage, by its number (`cdata`)."""

    def name_blocks(self, blocks) -> None:
        """Name the operations of these modules, in forward and in backward."""
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._enter(f"block {index}"), prepend=True)
            block.register_forward_hook(self._leave(f"backward of block {index}"))

    def _enter(self, scope):
        def begin(*_):
            self.scope = scope

        return begin

    def _leave(self, scope):
        def end(module, args, output):
            self.scope = ""
            if output.requires_grad:
                output.register_hook(self._enter(scope))

        return end

    def new_stream(self, name: str) -> FakeStream:
        return FakeStream(self, name)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def host_waits(self, clock: Clock) -> None:
        self.find_freed()
        self.host.clock |= clock

    def find_freed(self) -> None:
        """Find memory that has died since the last call. Its stream may reuse it from now on.

        Every call of the runtime does this first, so a free is recorded between the same two calls
        between which it happened.
        """
        is_expired = torch.UntypedStorage._expired
        expired = [number for number in self._storages if is_expired(number)]
        for number in expired:
            region, address = self._storages.pop(number)
            del region.references[number]
            if not region.references:
                region.free_clock = Clock(self.host.clock)
                if not region.is_host:
                    region.free_clock |= region.allocated_by.clock
                    for stream in region.used_by:
                        region.free_clock |= stream.clock
                del self._by_address[address]

    def region_of(self, tensor: Tensor) -> Region:
        """Return the memory of a tensor's storage. Its number stays unique: addresses do not."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._storages:
            return self._storages[number][0]
        address = storage.data_ptr()
        region = self._by_address.get(address)
        if region is None:
            region = Region(len(self.recording.regions), self.current)
            self.recording.regions.append(region)
            self._by_address[address] = region
        region.references[number] = StorageWeakRef(storage)
        self._storages[number] = region, address
        return region

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = function_kind(func)
        if kind.is_view:
            return func(*args, **kwargs)
        self.num_calls += 1
        if self.num_calls - 1 == self.fail_at:
            raise self.new_error()
        self.find_freed()
        reads, writes = self.argument_spans(kind, args, kwargs)
        inputs = {span.region for span in reads + writes}
        result = func(*args, **kwargs)
        if kind.is_kernel:
            outputs = [self.span_of(tensor)[0] for tensor in tensors_in(result)]
            writes += [span for span in outputs if span.region not in inputs]
            self.add(kind.name, reads if kind.reads else [], writes)
        else:
            for tensor in tensors_in(result):
                self.region_of(tensor)
        return result

    def argument_spans(self, kind: FunctionKind, args, kwargs) -> tuple[list[Span], list[Span]]:
        """Return the bytes that a function reads and writes, without those of new tensors."""
        reads, writes = [], []
        for name, argument in [*zip(kind.arguments, args, strict=False), *kwargs.items()]:
            for tensor in tensors_in(argument):
                span, is_dense = self.span_of(tensor)
                if name in kind.written:
                    writes.append(span)
                if name not in kind.written or not (kind.overwrites and is_dense):
                    reads.append(span)
        return reads, writes

    def span_of(self, tensor: Tensor) -> tuple[Span, bool]:
        """Return the bytes from a tensor's first to its last element, and True if it has them all.

        A tensor with gaps counts as reading and writing its gaps.
        """
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        nbytes = (sum((length - 1) * stride for length, stride in steps) + 1) * size
        span = Span(self.region_of(tensor).number, start, start + nbytes)
        return span, nbytes == tensor.numel() * size

    def add(self, name: str, reads: list[Span], writes: list[Span]) -> None:
        """Record an operation on the current stream.

        An operation on host memory that no copy stream executes is the host's own.
        """
        stream, regions = self.current, self.recording.regions
        if not stream.copies and any(regions[span.region].is_host for span in reads + writes):
            stream = self.host
        clock = stream.clock | self.host.clock
        is_copy = stream.copies and name == "copy_"
        name = f"{self.scope}: {name}" if self.scope else name
        self.recording.operations.append(
            Operation(stream.number, name, is_copy, reads, writes, Clock(clock))
        )
        clock[stream.number] += 1
        stream.clock = clock


class FunctionKind(NamedTuple):
    """The properties of an aten function that recording needs."""

    name: str
    arguments: list[str]
    written: frozenset[str]
    is_view: bool
    is_kernel: bool
    reads: bool
    overwrites: bool
    """True if written arguments are not read."""


def tensors_in(value) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel()]


@cache
def function_kind(func) -> FunctionKind:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    written = frozenset(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = bool(schema.returns) and all(value.alias_info is not None for value in schema.returns)
    is_out = any(argument.is_out for argument in schema.arguments)
    allocates = name.startswith(("empty", "new_empty"))
    return FunctionKind(
        name=name,
        arguments=[argument.name for argument in schema.arguments],
        written=written,
        is_view=(aliases and not written) or name in NO_KERNEL,
        is_kernel=not allocates,
        reads=not name.endswith("_like") and not name.startswith("new_"),
        overwrites=name in OVERWRITING or is_out,
    )


@contextmanager
def record_cuda(
    is_ready: Callable[[], bool] = lambda: False, elapsed_ms: Callable[[], float] = lambda: 0.0
) -> Iterator[RecordedCuda]:
    """Replace CUDA by a fake and record all operations of torch on it.

    Args:
        is_ready: Returns the result of an `Event.query`.
        elapsed_ms: Returns the result of an `Event.elapsed_time`.
    """
    cuda = RecordedCuda(is_ready, elapsed_ms)
    functions = {
        "Stream": lambda _: cuda.new_stream("stream"),
        "Event": lambda enable_timing: FakeEvent(cuda),
        "current_stream": lambda _: cuda.current,
        "stream": cuda.stream,
        "device": lambda _: nullcontext(),
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
        ),
    }

    def record_stream(tensor, stream):
        cuda.region_of(tensor).used_by.append(stream)

    with (
        patch.multiple(torch.cuda, **functions),
        patch.object(torch.Tensor, "record_stream", record_stream),
        cuda,
    ):
        try:
            yield cuda
        finally:  # while the fakes are in place
            for engine in cuda.engines:
                engine.close()
            cuda.find_freed()


class RecordedCopyEngine(CudaCopyEngine):
    """The product's CUDA copy engine on a recorded runtime."""

    def __init__(self, cuda: RecordedCuda, pin: bool = True) -> None:
        super().__init__(torch.device("cuda", 0), pin)
        self.device = torch.device("cpu")
        self._cuda = cuda
        cuda.engines.append(self)
        for kind, stream in self._streams.items():
            stream.copies = True
            cuda.recording.streams[stream.number] = kind.value

    def _allocate_host(self, nbytes: int, pin: bool) -> Tensor:
        with _disable_current_modes():  # the host clears it, not a kernel
            memory = super()._allocate_host(nbytes, pin)
        self._cuda.region_of(memory).is_host = True
        return memory
