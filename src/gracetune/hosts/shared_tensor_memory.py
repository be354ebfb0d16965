"""Tensors of cache files, one copy a machine: whoever loads a file first holds it for all ranks.

A process writes what it has loaded into segments of anonymous memory (memfd), and notes each in a
log of its own; the others read that log and map the segment through /proc. Mappings are private:
who writes to a tensor writes to pages of its own, and nobody else sees it. A segment leaves when
its holder closes it; whoever still has a tensor in it keeps it until then. Nothing is left when
the last process ends, however that ends, but for logs, which the next one takes away.

They are not pinned: pinning a private page copies it. SimpleTuner pins what it puts into a batch.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from gracetune.events.types import Notice
from gracetune.hosts.tensor_memory import (
    CachedValue,
    copy_containers,
    count_writes,
    file_identity,
    tensor_versions,
)
from gracetune.memory.shared_arena import exclusive_lock, open_process_file, pid_namespace_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.events.dispatcher import Emit
    from gracetune.hosts.tensor_memory import FilePath, Identity

    Layout = dict[str, object]


_SEGMENT_NBYTES = 256 * 1024**2
_PAGE = mmap.ALLOCATIONGRANULARITY
"""An entry has pages of its own: one that is written to must not hide what comes after it."""


@dataclass(slots=True)
class _Segment:
    """Memory that this process fills from its start."""

    number: int
    fd: int
    nbytes: int
    end: int = 0
    paths: list[str] = field(default_factory=list)


class SharedTensorMemory:
    """What `torch_load` gave in any process of this machine that meets in `folder`.

    Each holds up to its budget; the oldest segment leaves first. A hit is checked as in
    `TensorMemory`: by the file on disk, and by whether anyone here has written to a tensor.
    """

    def __init__(
        self, budget_nbytes: int, folder: Path, emit: Emit, proc: Path = Path("/proc")
    ) -> None:
        self.budget_nbytes = budget_nbytes
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._emit = emit
        self._reported: set[str] = set()
        self._proc = proc
        self._folder = folder / f"tensors-{pid_namespace_id(proc)}"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._pid = os.getpid()
        self._log = RecordLog(self._folder / f"{self._pid}-{time.time_ns()}.log")
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._num_segments = 0
        self._read: dict[Path, int] = {}
        self._entries: dict[str, tuple[Path, ValueStored]] = {}
        self._opened: dict[tuple[Path, int], SegmentOpened] = {}
        self._maps: dict[tuple[Path, int], mmap.mmap] = {}
        self._cached: dict[str, CachedValue] = {}
        self._modified: dict[str, Identity] = {}
        weakref.finalize(self, _remove_log, self._log.path, self._pid)
        self._remove_dead_logs()

    def get(self, where: FilePath, load: Callable[[str], object]) -> object:
        """The value of a file, from the machine's memory where it is there."""
        path = os.fspath(where)
        file = file_identity(path)
        with self._lock:
            found = None if file is None else self._lookup(path, file)
            if found is not None:
                self.hits += 1
                return copy_containers(found.value)
            self.misses += 1
        value = load(path)
        if file is None or file_identity(path) != file or self._modified.get(path) == file:
            return value
        return self._store(path, file, value)

    def forget(self, path: FilePath) -> None:
        """The file is about to change; other processes see that by the file."""
        with self._lock:
            self._cached.pop(os.fspath(path), None)

    def _lookup(self, path: str, file: Identity) -> CachedValue | None:
        held = self._cached.get(path)
        if held is not None and held.file == file:
            if tensor_versions(held.value) == held.versions:
                return held
            # What was written to is this process's own page now; the disk has what is right.
            self._modified[path] = file
            del self._cached[path]
        if self._modified.get(path) == file:
            return None
        if not self._has_entry(path, file):
            self._read_logs()
        return self._view(path, file) if self._has_entry(path, file) else None

    def _has_entry(self, path: str, file: Identity) -> bool:
        known = self._entries.get(path)
        return known is not None and known[1].file == file

    def _view(self, path: str, file: Identity) -> CachedValue | None:
        log, entry = self._entries[path]
        memory = self._map((log, entry.segment))
        if memory is None:
            del self._entries[path]
            return None
        with count_writes():
            value = deserialize(entry.layout, memory, entry.offset)
        held = self._cached[path] = CachedValue(value, file, tensor_versions(value), entry.nbytes)
        return held

    def _store(self, path: str, file: Identity, value: object) -> object:
        if os.getpid() != self._pid:
            return value  # a fork may read; what it held would end with it
        try:
            layout, parts, nbytes = serialize(value)
        except UnsupportedValueError as error:
            self._warn_once(f"cache files with {error} in them are not kept: ranks cannot share it")
            return value
        size = -(-nbytes // _PAGE) * _PAGE
        if size > self.budget_nbytes:
            return value
        with self._lock, self._locked():
            found = self._lookup(path, file)  # another may have been faster
            if found is not None:
                return copy_containers(found.value)
            try:
                segment = self._segment_for(size)
                for part in parts:
                    _write(segment.fd, part.data, segment.end + part.offset)
                entry = ValueStored(path, file, segment.number, segment.end, nbytes, layout)
                self._log.add(entry)
            except OSError as error:
                self._warn_once(f"the machine has no memory for more cache files ({error})")
                return value
            segment.end += size
            segment.paths.append(path)
            self.nbytes += size
            self._entries[path] = (self._log.path, entry)
            kept = self._view(path, file)
        return value if kept is None else copy_containers(kept.value)

    def _segment_for(self, size: int) -> _Segment:
        while self._segments and self.nbytes + size > self.budget_nbytes:
            self._close_oldest()
        if self._segments and self._segments[-1].end + size <= self._segments[-1].nbytes:
            return self._segments[-1]
        nbytes = max(size, min(_SEGMENT_NBYTES, self.budget_nbytes // 4 // _PAGE * _PAGE))
        fd = os.memfd_create("gracetune-tensors", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            status = os.fstat(fd)
            opened = SegmentOpened(self._num_segments, self._pid, fd, status.st_dev, status.st_ino)
            self._log.add(opened)
        except OSError:
            os.close(fd)
            raise
        segment = _Segment(self._num_segments, fd, nbytes)
        self._num_segments += 1
        self._segments.append(segment)
        self._opened[self._log.path, segment.number] = opened
        return segment

    def _close_oldest(self) -> None:
        segment = self._segments[0]
        self._log.add(SegmentClosed(segment.number))  # first: who cannot be told must not lose it
        del self._segments[0]
        self.nbytes -= segment.end
        self._forget_segment((self._log.path, segment.number))
        os.close(segment.fd)

    def _forget_segment(self, place: tuple[Path, int]) -> None:
        self._opened.pop(place, None)
        self._maps.pop(place, None)
        for path, (log, entry) in list(self._entries.items()):
            if (log, entry.segment) == place:
                del self._entries[path]
                self._cached.pop(path, None)

    def _map(self, place: tuple[Path, int]) -> mmap.mmap | None:
        if place in self._maps:
            return self._maps[place]
        opened = self._opened.get(place)
        if opened is None:
            return None
        try:
            descriptor = opened.open(self._proc)
        except PermissionError as error:
            self._warn_once(f"another rank's memory cannot be mapped ({error}): each has its own")
            return None
        except OSError:
            return None  # its holder has ended
        try:
            self._maps[place] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        return self._maps[place]

    def _read_logs(self) -> None:
        """Read what other processes have noted since."""
        for log in self._folder.glob("*.log"):
            if log == self._log.path:
                continue
            notes, self._read[log] = read_records(log, self._read.get(log, 0))
            for note in notes:
                if isinstance(note, ValueStored):
                    if not self._has_entry(note.path, note.file):
                        self._entries[note.path] = (log, note)
                elif isinstance(note, SegmentOpened):
                    self._opened[log, note.segment] = note
                else:
                    self._forget_segment((log, note.segment))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with exclusive_lock(self._folder / "lock"):
            self._read_logs()
            yield

    def _remove_dead_logs(self) -> None:
        for log in self._folder.glob("*.log"):
            pid = log.name.partition("-")[0]
            if not (self._proc / pid).exists():
                log.unlink(missing_ok=True)

    def _warn_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._emit(Notice(text, level="warning", fallback=True))


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _remove_log(log: Path, pid: int) -> None:
    """Not in a fork: the log is its parent's."""
    if os.getpid() == pid:
        log.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------
# What a process tells the others of its machine about the tensors it holds: a line a note.


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """A segment, and where others find it as long as its holder lives."""

    segment: int
    pid: int
    fd: int
    device: int
    inode: int

    def open(self, proc: Path) -> int:
        """A descriptor of it; OSError where it is gone or not ours to see."""
        return open_process_file(self.pid, self.fd, (self.device, self.inode), proc)


@dataclass(frozen=True, slots=True)
class ValueStored:
    """The value of one file, in a segment."""

    path: str
    file: Identity
    segment: int
    offset: int
    nbytes: int
    layout: dict[str, object]


@dataclass(frozen=True, slots=True)
class SegmentClosed:
    """A segment that its holder has closed."""

    segment: int


LogRecord = SegmentOpened | ValueStored | SegmentClosed
_KINDS: dict[str, type[LogRecord]] = {
    kind.__name__: kind for kind in (SegmentOpened, ValueStored, SegmentClosed)
}


class RecordLog:
    """The notes of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, note: LogRecord) -> None:
        """One line, in one write: who reads meanwhile sees all of it, or waits for its end.

        OSError where there is no room for it; then nothing of it is left.
        """
        line = (json.dumps([type(note).__name__, asdict(note)]) + "\n").encode()
        before = os.fstat(self._fd).st_size
        if os.write(self._fd, line) < len(line):
            os.ftruncate(self._fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def read_records(path: Path, offset: int) -> tuple[list[LogRecord], int]:
    """What was noted since an offset, and the next one; a line without its end is for later."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    notes: list[LogRecord] = []
    for line in whole.splitlines():
        kind, said = json.loads(line)
        if kind == ValueStored.__name__:
            said["file"] = tuple(said["file"])
        notes.append(_KINDS[kind](**said))
    return notes, offset + len(whole)


# ------------------------------------------------------------------------------------------
# A value with tensors in it as plain text and bytes, and back, without a copy on the way back.
#
# What is not made of strided tensors on the CPU and of plain data has no layout; pickle, which
# could
# give it one, executes what it reads.


_ALIGNMENT = 64
_DTYPES = {
    str(each): each
    for each in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class UnsupportedValueError(Exception):
    """A value that cannot be handed to another process in this way; the text says what of it."""


class TensorPart(NamedTuple):
    """The bytes of one tensor, and where they go."""

    offset: int
    data: memoryview


def serialize(value: object) -> tuple[Layout, list[TensorPart], int]:
    """How to build the value again, its bytes, and how many bytes they span."""
    parts: list[TensorPart] = []
    layout = _lay_out(value, parts)
    end = parts[-1].offset + len(parts[-1].data) if parts else 0
    return layout, parts, end


def _lay_out(value: object, parts: list[TensorPart]) -> Layout:
    kind = type(value)
    if kind is torch.Tensor:
        return _lay_out_tensor(cast("torch.Tensor", value), parts)
    if kind is dict:
        items = cast("dict[object, object]", value)
        if not all(type(key) is str for key in items):
            raise UnsupportedValueError("a mapping whose keys are not text")
        return {"dict": {key: _lay_out(each, parts) for key, each in items.items()}}
    if kind in (list, tuple):
        each_one = cast("list[object]", value)
        return {kind.__name__: [_lay_out(each, parts) for each in each_one]}
    if value is None or kind in (bool, int, float, str):
        return {"plain": value}
    raise UnsupportedValueError(f"a {kind.__name__}")


def _lay_out_tensor(tensor: torch.Tensor, parts: list[TensorPart]) -> Layout:
    name = str(tensor.dtype)
    if tensor.layout is not torch.strided or not tensor.device.type == "cpu":
        raise UnsupportedValueError(f"a tensor that is {tensor.layout} on {tensor.device}")
    if name not in _DTYPES or tensor.requires_grad:
        raise UnsupportedValueError(
            f"a tensor of {name}" + " with a gradient" * tensor.requires_grad
        )
    last = parts[-1] if parts else TensorPart(0, memoryview(b""))
    offset = -(-(last.offset + len(last.data)) // _ALIGNMENT) * _ALIGNMENT
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    parts.append(TensorPart(offset, flat.numpy().data))
    return {"tensor": [name, list(tensor.shape), offset]}


def deserialize(layout: Layout, memory: mmap.mmap, base: int) -> object:
    """The value, whose tensors are the memory itself."""
    [(kind, said)] = layout.items()
    if kind == "tensor":
        name, shape, offset = cast("tuple[str, list[int], int]", said)
        dtype = _DTYPES[name]
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=base + offset).view(shape)
    if kind == "dict":
        items = cast("dict[str, Layout]", said)
        return {key: deserialize(each, memory, base) for key, each in items.items()}
    if kind == "plain":
        return said
    built = [deserialize(each, memory, base) for each in cast("list[Layout]", said)]
    return built if kind == "list" else tuple(built)
