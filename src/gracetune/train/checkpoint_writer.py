"""Save checkpoints, in the background if that pays.

A background save copies weights, optimizer state and averages to host memory. Only the optimizer's
update changes them, so the copies run during the next forward and backward passes, and the update
waits for them. A thread then writes the files:

    main thread:    step 100 | start copies | forward, backward | wait for copies | update | ...
    copy stream:               copies to host memory
    writer thread:                            wait for copies | write and hash files, rename

Otherwise the main thread writes the files from the live tensors, and steps wait.

Ranks: without sharding, the main rank writes everything. With FSDP2 or HSDP, each rank of the first
copy of the model writes its part to a common staging folder; when all have, the main rank completes
the checkpoint. Threads use no collective operations: at the boundaries of steps, the main threads
agree whether all ranks have finished (`poll`), so all ranks see a failure at the same step.
"""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from gracetune.errors import CheckpointError, GracetuneError
from gracetune.events.types import CheckpointSaved, Notice
from gracetune.memory.platform import read_this_host
from gracetune.offload.copy_engine import CopyStream, OffloadError, aligned
from gracetune.offload.offloaded_activations import HOST_RESERVE
from gracetune.train import checkpoint
from gracetune.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.config.schema import TrainSection
    from gracetune.distributed.layout import Layout
    from gracetune.events.dispatcher import Emit
    from gracetune.offload.copy_engine import CopyEngine, PendingCopy
    from gracetune.optim.offloaded_state import OptimizerStepper
    from gracetune.train.checkpoint import Snapshot
    from gracetune.train.export import CollectedAdapter

    Tensors = Mapping[str, Mapping[str, Tensor]]
    """Tensors by kind (`weights`, `optimizer`, `ema`) and name."""

SLAB_NBYTES = 256 * MIB
"""Size of one allocation of host memory for copies. The driver may block launches while it pins
memory, so a few smaller allocations disturb steps less than one large."""
SMALL_NBYTES = 1 << 14
"""Tensors in host memory up to this size, such as step counters, are copied at once."""


# Copies of the state


class HostBuffers:
    """Pinned host memory for copies of tensors, which is kept from one checkpoint to the next."""

    def __init__(self, engine: CopyEngine, slab_nbytes: int = SLAB_NBYTES) -> None:
        self._engine = engine
        self._slab_nbytes = slab_nbytes
        self._slabs: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations."""
        return sum(len(slab) for slab in self._slabs)

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return a place of bytes for each size; allocate memory if it is missing.

        Places of an earlier call are used again.
        """
        places = []
        index = offset = 0
        remaining = sum(map(aligned, sizes))
        for size in sizes:
            while index < len(self._slabs) and offset + size > len(self._slabs[index]):
                index, offset = index + 1, 0
            if index == len(self._slabs):
                nbytes = max(size, min(self._slab_nbytes, remaining))
                self._slabs.append(self._engine.allocate_pinned(nbytes))
            places.append(self._slabs[index][offset : offset + size])
            offset += aligned(size)
            remaining -= aligned(size)
        return places

    def free(self) -> None:
        """Free all memory."""
        for slab in self._slabs:
            self._engine.free_host(slab)
        self._slabs.clear()


class StateCopy:
    """A copy of tensors in host memory, which becomes complete while training continues.

    The tensors must not change before `wait` has returned. `finish`, in another thread, makes the
    copies of tensors in host memory and waits for those from the device.
    """

    def __init__(self, tensors: Tensors, buffers: HostBuffers, engine: CopyEngine) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in tensors}
        """The copies, which are complete when `finish` has returned."""
        self.stalled_s = 0.0
        """Seconds that the thread which called `wait` was blocked."""
        self._host_copies: list[tuple[Tensor, Tensor]] = []
        self._sources: list[Tensor] = []
        """Keeps the memory that is copied from in use until the copies are complete."""
        self._device_copy: PendingCopy | None = None
        self._host_done = threading.Event()
        large = copied_tensors(tensors)
        places = iter(buffers.reserve([tensor.nbytes for tensor in large]))
        for kind, named in tensors.items():
            for name, tensor in named.items():
                self.tensors[kind][name] = (
                    self._start(tensor.detach(), next(places), engine)
                    if _is_large(tensor)
                    else tensor.detach().clone()
                )

    def _start(self, tensor: Tensor, place: Tensor, engine: CopyEngine) -> Tensor:
        source = tensor.contiguous().view(-1).view(torch.uint8)
        self._sources.append(source)
        if tensor.device.type == "cpu":
            self._host_copies.append((place, source))
        else:  # the copies of a stream run in order, so the last one completes them all
            self._device_copy = engine.copy(
                place, source, poison=False, stream=CopyStream.CHECKPOINT
            )
        return place.view(tensor.dtype).view(tensor.shape)

    def finish(self) -> None:
        """Complete all copies; call this in the thread that writes them."""
        try:
            for place, source in self._host_copies:
                place.copy_(source)
        finally:
            self._host_copies.clear()
            self._host_done.set()
        if self._device_copy is not None:
            self._device_copy.synchronize()
        self._sources.clear()

    def wait(self, prefetched: bool) -> None:
        """Let changes of the tensors come after the copies; the device waits for its own."""
        began = time.monotonic()
        self._host_done.wait()
        self.stalled_s += time.monotonic() - began
        if self._device_copy is not None:
            self._device_copy.wait(prefetched)

    def synchronize(self) -> None:
        """Block until all copies are complete."""
        self._host_done.wait()
        if self._device_copy is not None:
            self._device_copy.synchronize()


def copied_tensors(tensors: Tensors) -> list[Tensor]:
    """Return the tensors that need a place in `HostBuffers`."""
    return [tensor for named in tensors.values() for tensor in named.values() if _is_large(tensor)]


def _is_large(tensor: Tensor) -> bool:
    if tensor.device.type == "cpu":
        return tensor.nbytes > SMALL_NBYTES
    return tensor.numel() > 0


# The writer


@dataclass(slots=True)
class _Job:
    """A checkpoint that is being written; every rank has one, also if it writes nothing."""

    snapshot: Snapshot
    reason: str
    nbytes: int
    started_at: float
    staging: Path | None
    """Staging folder that several ranks write to. None: the main rank writes everything."""
    copy: StateCopy | None = None
    """The copy that is written. None: steps wait until the live tensors are written."""
    future: Future[object] = field(default_factory=Future)
    is_completing: bool = False
    """True if all ranks have written their parts, and the main rank completes the checkpoint."""
    stalled_s: float = 0.0
    """Seconds that the main thread has spent on this checkpoint."""
    device_stalled_s: float = 0.0
    """Seconds that the device has waited for the copies of all checkpoints before this one."""


class CheckpointWriter:
    """Writes the checkpoints of a run. All methods are called on all ranks, at the same steps."""

    def __init__(
        self,
        folder: Path,
        settings: TrainSection,
        layout: Layout,
        engine: CopyEngine,
        stepper: OptimizerStepper,
        emit: Emit,
        *,
        in_background: bool,
    ) -> None:
        """Prepare to write checkpoints to `folder`; `in_background` allows background saves."""
        self._folder = folder
        self._settings = settings
        self._layout = layout
        self._ranks = layout.ranks
        self._engine = engine
        self._stepper = stepper
        self._emit = emit
        self._in_background = in_background
        self._buffers = HostBuffers(engine)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._reserved: Future[object] | None = None
        self._job: _Job | None = None

    @property
    def _writes(self) -> bool:
        """True if this rank writes files."""
        if self._layout.is_sharded:
            return self._ranks.rank < self._layout.shard_size  # the first copy of the model
        return self._ranks.is_main

    def reserve(self, tensors: Tensors) -> None:
        """Allocate host memory for copies of these tensors in the background, if it is needed.

        Pinning memory takes a second for a few GB. The first background save needs not wait for it
        if this is called some steps earlier.
        """
        sizes = self._sizes(tensors)
        if self._in_background and self._reserved is None and self._has_room(sizes):
            self._reserved = self._executor.submit(self._buffers.reserve, sizes)

    def save(
        self,
        snapshot: Snapshot,
        adapter: CollectedAdapter | None,
        reason: str,
        *,
        in_background: bool,
    ) -> None:
        """Save a checkpoint; return when it is written, or with `in_background` when it is copied.

        `adapter` is the adapter to export with it. A background save that is still running is
        finished first.
        """
        started_at = time.monotonic()
        self._finish_earlier(snapshot.progress.step)
        job = self._begin(snapshot, reason, adapter is not None, started_at)
        sizes = self._sizes(snapshot.tensors)
        if in_background and self._in_background and self._can_copy(sizes):
            if self._writes:
                job.device_stalled_s = self._engine.stalls(CopyStream.CHECKPOINT).stalled_s
                job.copy = StateCopy(snapshot.tensors, self._buffers, self._engine)
                self._stepper.hold_for(job.copy)
                job.future = self._executor.submit(self._write, job, adapter)
            else:
                job.future.set_result(None)
            self._job = job
            job.stalled_s = time.monotonic() - started_at
            return
        if self._writes:
            _run(job.future, self._write, job, adapter)
        else:
            job.future.set_result(None)
        self._job = job
        self.finish()

    def poll(self) -> None:
        """Complete a background save that all ranks have finished; call this after each step."""
        if self._job is not None:
            (is_busy,) = self._ranks.any(not self._job.future.done())
            if not is_busy:
                self._advance(self._job)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete."""
        while self._job is not None:
            wait([self._job.future])
            self._advance(self._job)

    def close(self) -> None:
        """Free all memory; after an error, complete the checkpoint that is being written.

        Then ranks cannot agree any more, so a checkpoint of several ranks is dropped unless all
        parts are written.
        """
        job, self._job = self._job, None
        if job is not None:
            wait([job.future])
            error = job.future.exception()
            if error is not None:
                self._emit(Notice(str(self._error(job, error)), level="warning"))
            elif job.staging is not None and not job.is_completing:
                if self._ranks.is_main:
                    shutil.rmtree(job.staging, ignore_errors=True)
            else:
                self._report(job)
        self._executor.shutdown()
        self._buffers.free()

    def _finish_earlier(self, step: int) -> None:
        if self._job is None:
            return
        earlier = self._job.snapshot.progress.step
        (is_busy,) = self._ranks.any(not self._job.future.done())
        if is_busy:
            text = f"the checkpoint of step {step} waits until that of step {earlier} is written"
            self._emit(Notice(f"{text}. Raise train.checkpoint_every, or use a faster disk"))
        self.finish()

    def _begin(self, snapshot: Snapshot, reason: str, is_exported: bool, started_at: float) -> _Job:
        """Create the staging folder, if several ranks write to it."""
        nbytes = checkpoint.snapshot_nbytes(snapshot, is_exported)
        staging = None
        if self._layout.is_sharded:
            nbytes = sum(self._ranks.gather(nbytes if self._writes else 0))
            path = checkpoint.checkpoint_path(self._folder, snapshot)
            created, error = "", ""
            if self._ranks.is_main:
                try:
                    created = str(checkpoint.begin_shards(self._folder, path, nbytes))
                except (OSError, GracetuneError) as found:
                    error = str(found)
            created, error = self._ranks.broadcast((created, error))
            if error:
                raise checkpoint.write_error(self._folder, path, error)
            staging = Path(created)
        return _Job(snapshot, reason, nbytes, started_at, staging)

    def _write(self, job: _Job, adapter: CollectedAdapter | None) -> object:
        """Write this rank's files; without sharding, also complete the checkpoint."""
        snapshot = job.snapshot
        if job.copy is not None:
            job.copy.finish()
            snapshot = replace(snapshot, tensors=job.copy.tensors)
        if job.staging is not None:
            shard, count = self._layout.shard, self._layout.shard_size
            return checkpoint.write_shard(job.staging, snapshot, shard, count)
        return checkpoint.save_snapshot(
            self._folder,
            snapshot,
            self._settings.keep_checkpoints,
            None if adapter is None else adapter.write,
            self._settings.keep_adapters,
        )

    def _complete(self, job: _Job, written: Sequence[Mapping[str, str]]) -> object:
        assert job.staging is not None
        keep = self._settings.keep_checkpoints
        return checkpoint.complete_shards(self._folder, job.staging, job.snapshot, written, keep)

    def _advance(self, job: _Job) -> None:
        """Go to the next stage of a job, when no rank is busy with the current one."""
        error = job.future.exception()
        text = "" if error is None else str(self._error(job, error))
        result = job.future.result() if error is None else None
        results = self._ranks.gather((text, result if isinstance(result, dict) else {}))
        problems = [problem for problem, _ in results if problem]
        if problems:
            self._job = None
            if job.staging is not None and self._ranks.is_main:
                shutil.rmtree(job.staging, ignore_errors=True)
            if error is not None and not isinstance(self._error(job, error), GracetuneError):
                raise error  # a bug
            raise CheckpointError(problems[0]) from error
        if job.staging is not None and not job.is_completing:
            job.is_completing, job.future = True, Future()
            written = [files for _, files in results[: self._layout.shard_size]]
            if not self._ranks.is_main:
                job.future.set_result(None)
            elif job.copy is not None:
                job.future = self._executor.submit(self._complete, job, written)
            else:
                _run(job.future, self._complete, job, written)
            return
        self._job = None
        self._report(job)

    def _report(self, job: _Job) -> None:
        if not self._ranks.is_main:
            return
        seconds = time.monotonic() - job.started_at
        stalled_s = seconds
        if job.copy is not None:
            device_s = self._engine.stalls(CopyStream.CHECKPOINT).stalled_s - job.device_stalled_s
            stalled_s = job.stalled_s + job.copy.stalled_s + device_s
        path = checkpoint.checkpoint_path(self._folder, job.snapshot)
        self._emit(
            CheckpointSaved(
                job.snapshot.progress.step, str(path), job.nbytes, seconds, job.reason, stalled_s
            )
        )

    def _error(self, job: _Job, error: BaseException) -> BaseException:
        """Return an error with a text for the user, if it is about the disk."""
        if isinstance(error, OSError | SafetensorError | ValueError):
            path = checkpoint.checkpoint_path(self._folder, job.snapshot)
            return checkpoint.write_error(self._folder, path, error)
        return error

    # Host memory

    def _sizes(self, tensors: Tensors) -> list[int]:
        return [tensor.nbytes for tensor in copied_tensors(tensors)] if self._writes else []

    def _can_copy(self, sizes: Sequence[int]) -> bool:
        """Return True if every rank has host memory for its copies."""
        if not self._has_room(sizes):
            return False
        problem = ""
        try:
            if self._reserved is not None:
                self._reserved.result()
            self._buffers.reserve(sizes)
        except OffloadError as error:
            problem = str(error)
        problems = [text for text in self._ranks.gather(problem) if text]
        if problems:
            self._save_in_foreground(problems[0])
        return not problems

    def _has_room(self, sizes: Sequence[int]) -> bool:
        if self._reserved is not None:
            with suppress(OffloadError):
                self._reserved.result()
        missing = max(0, sum(map(aligned, sizes)) - self._buffers.nbytes)
        needed = sum(self._ranks.gather_local(missing))
        free = max(0, read_this_host().usable_bytes() - HOST_RESERVE) if needed else 0
        (is_short,) = self._ranks.any(needed > free)
        if is_short:
            self._save_in_foreground(
                f"copies of weights and optimizer state need {format_bytes(needed)} of host "
                f"memory, but {format_bytes(free)} are free"
            )
        return not is_short

    def _save_in_foreground(self, reason: str) -> None:
        self._in_background = False
        self._buffers.free()
        text = f"steps wait while checkpoints are written: {reason}"
        self._emit(Notice(text, level="warning", fallback=True))


def _run(future: Future[object], function: Callable[..., object], *arguments: object) -> None:
    """Call a function in this thread and store its result, or its exception, in a future."""
    try:
        future.set_result(function(*arguments))
    except (OSError, SafetensorError, ValueError, GracetuneError) as error:
        future.set_exception(error)
