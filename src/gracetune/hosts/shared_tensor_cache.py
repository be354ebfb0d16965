"""Keep one copy of the tensors of a host's cache files for all processes of a machine.

The process that loads a file first writes its tensors into a segment of anonymous memory (memfd)
and appends a record to its own log. The other processes read that log and map the segment through
/proc/PID/fd:

    rank 0: load a.pt -> segment 0 -> log "Entry a.pt"
    rank 1: needs a.pt -> reads rank 0's log -> maps segment 0, loads nothing

Mappings are private (copy on write): a process that modifies a tensor changes its own pages only.
A segment is freed when its owner has closed it and no process has a tensor in it. Everything but
the logs vanishes with the last process, however it ends; the next process removes old logs.

Tensors are not pinned, because pinning a private page copies it. SimpleTuner pins its batches.

memory/shared_memory.py also shares memory between processes, but is filled once, sealed, and read
only. Here entries come and go, and every process may add some.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from gracetune.data.staging import staging_room
from gracetune.events.types import Notice
from gracetune.hosts.tensor_cache import (
    CachedValue,
    LocalTensorMemory,
    copy_containers,
    file_identity,
    outside_inference_mode,
    tensor_versions,
)
from gracetune.memory.shared_memory import (
    exclusive_lock,
    open_private_file,
    open_private_folder,
    open_process_file,
    pid_namespace_id,
)
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.events.dispatcher import Emit
    from gracetune.hosts.tensor_cache import FileIdentity, FilePath, TensorCache

    Layout = dict[str, object]


_SEGMENT_NBYTES = 256 * 1024**2
_PAGE = mmap.ALLOCATIONGRANULARITY
"""The tensors of each file start on a new page: a page that a process writes to becomes private to
it."""
_MEMORY_SHARE = 0.5
"""The share of the free host memory that cache files may take if no budget is set."""


def open_tensor_cache(
    limit_gib: float | None,
    num_ranks: int,
    folder: Path | None,
    pin: Callable[[torch.Tensor], torch.Tensor],
    emit: Emit,
    free_host_memory: Callable[[], int] = staging_room,
) -> TensorCache:
    """Open a memory that holds cache files: shared if there are several ranks and a `folder`.

    The budget of each rank is `limit_gib`, or an equal part of half of the free host memory.
    """
    if limit_gib is not None:
        budget = int(limit_gib * GIB)
    else:
        budget = max(0, int(free_host_memory() * _MEMORY_SHARE / num_ranks))
    emit(Notice(f"cache files are kept in host memory, up to {format_bytes(budget)}"))
    if num_ranks == 1 or folder is None:
        return LocalTensorMemory(budget, pin)
    emit(Notice(f"the {num_ranks} ranks of this machine share the cache files in their memory"))
    return SharedTensorCache(budget, folder, emit)


@dataclass(slots=True)
class _Segment:
    """A piece of shared memory (memfd) that this process fills with tensors from start to end."""

    number: int
    fd: int
    nbytes: int
    end: int = 0


class SharedTensorCache:
    """Shares the tensors of cache files between all processes of a machine with the same `folder`.

    Each process stores tensors up to its budget, and frees its oldest piece of memory first. Stored
    tensors are used only if the file on disk is still the one that was read and this process has
    not written to a tensor.
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
        open_private_folder(folder)
        self._owner = open_private_folder(self._folder)
        self._pid = os.getpid()
        self._log = RecordLog(self._folder / f"{self._pid}-{time.time_ns()}.log", self._owner)
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._num_segments = 0
        # What is known from all logs. A segment is identified by its owner's log and its number.
        self._offsets: dict[Path, int] = {}
        self._entries: dict[str, tuple[Path, ValueStored]] = {}
        self._opened: dict[tuple[Path, int], SegmentOpened] = {}
        self._maps: dict[tuple[Path, int], mmap.mmap] = {}
        # Values that this process has built, and files whose tensors it has modified.
        self._cached: dict[str, CachedValue] = {}
        self._modified: dict[str, FileIdentity] = {}
        weakref.finalize(self, _remove_log, self._log.path, self._pid)
        self._remove_dead_logs()

    def get(self, where: FilePath, load: Callable[[str], object]) -> object:
        """Return the contents of a file from shared memory, or load them with `load(path)`."""
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
        """Drop a file's contents from memory, because the file is about to change.

        Other processes see the change in its inode, modification time or size.
        """
        with self._lock:
            self._cached.pop(os.fspath(path), None)

    def _lookup(self, path: str, file: FileIdentity) -> CachedValue | None:
        cached = self._cached.get(path)
        if cached is not None and cached.file == file:
            if tensor_versions(cached.value) == cached.versions:
                return cached
            # The modified pages are private to this process. Only the disk has the original.
            self._modified[path] = file
            del self._cached[path]
        if self._modified.get(path) == file:
            return None
        if not self._has_entry(path, file):
            self._read_logs()
        return self._build(path, file) if self._has_entry(path, file) else None

    def _has_entry(self, path: str, file: FileIdentity) -> bool:
        known = self._entries.get(path)
        return known is not None and known[1].file == file

    def _build(self, path: str, file: FileIdentity) -> CachedValue | None:
        """Build the contents of a file, with tensors that are views of shared memory.

        Returns None if the process that stored them has ended.
        """
        log, entry = self._entries[path]
        memory = self._map((log, entry.segment))
        if memory is None:
            del self._entries[path]
            return None
        with outside_inference_mode():
            value = deserialize(entry.layout, memory, entry.offset)
        cached = CachedValue(value, file, tensor_versions(value), entry.nbytes)
        self._cached[path] = cached
        return cached

    def _store(self, path: str, file: FileIdentity, value: object) -> object:
        if os.getpid() != self._pid:
            return value  # a forked worker only reads: its memory would vanish with it
        try:
            layout, parts, nbytes = serialize(value)
        except UnsupportedValueError as error:
            self._warn_once(f"cache files with {error} are not kept: ranks cannot share them")
            return value
        size = -(-nbytes // _PAGE) * _PAGE
        if size > self.budget_nbytes:
            return value
        with self._lock, self._locked():
            found = self._lookup(path, file)  # another process may have been faster
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
            self.nbytes += size
            self._entries[path] = (self._log.path, entry)
            stored = self._build(path, file)
        return value if stored is None else copy_containers(stored.value)

    def _segment_for(self, size: int) -> _Segment:
        """Return a piece of shared memory of this process with room for `size` bytes.

        Its oldest pieces are closed first if the budget would be exceeded.
        """
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
        # The record comes first: if it cannot be written, the segment must stay open.
        self._log.add(SegmentClosed(segment.number))
        del self._segments[0]
        self.nbytes -= segment.end
        self._forget_segment((self._log.path, segment.number))
        os.close(segment.fd)

    def _forget_segment(self, segment: tuple[Path, int]) -> None:
        self._opened.pop(segment, None)
        self._maps.pop(segment, None)
        for path, (log, entry) in list(self._entries.items()):
            if (log, entry.segment) == segment:
                del self._entries[path]
                self._cached.pop(path, None)

    def _map(self, segment: tuple[Path, int]) -> mmap.mmap | None:
        if segment in self._maps:
            return self._maps[segment]
        opened = self._opened.get(segment)
        if opened is None:
            return None
        try:
            descriptor = opened.open(self._proc)
        except PermissionError as error:
            self._warn_once(
                f"the memory of another rank cannot be mapped ({error}): each rank keeps its own "
                "copy of the cache files"
            )
            return None
        except OSError:
            return None  # the owner has ended
        try:
            self._maps[segment] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        return self._maps[segment]

    def _read_logs(self) -> None:
        """Read from the logs of other processes what they have stored or closed.

        Each call continues where the last one stopped.
        """
        for log in self._folder.glob("*.log"):
            if log == self._log.path:
                continue
            records, self._offsets[log] = read_log(log, self._offsets.get(log, 0), self._owner)
            for record in records:
                if isinstance(record, ValueStored):
                    if not self._has_entry(record.path, record.file):
                        self._entries[record.path] = (log, record)
                elif isinstance(record, SegmentOpened):
                    self._opened[log, record.segment] = record
                else:
                    self._forget_segment((log, record.segment))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Take the lock that allows one process at a time to store tensors.

        Then read the logs in which other processes list the tensors that they have stored.
        """
        with exclusive_lock(self._folder / "lock", self._owner):
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
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _remove_log(log: Path, pid: int) -> None:
    """Delete the log of process `pid`. In a fork, do nothing: the parent still uses the log."""
    if os.getpid() == pid:
        log.unlink(missing_ok=True)


# The log: one JSON line per record


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """Log record: a process has created a segment, a piece of memory that others can map.

    They open it as /proc/PID/fd/FD while that process lives.
    """

    segment: int
    pid: int
    fd: int
    device: int
    inode: int

    def open(self, proc: Path) -> int:
        """Open the segment for reading. Raises OSError if it is gone or access is denied."""
        return open_process_file(self.pid, self.fd, (self.device, self.inode), proc)


@dataclass(frozen=True, slots=True)
class ValueStored:
    """Log record: a process has stored the contents of a cache file in one of its segments."""

    path: str
    file: FileIdentity
    segment: int
    offset: int
    nbytes: int
    layout: dict[str, object]
    """Nesting of dicts, lists and tensors in the contents, as `serialize` returns it."""


@dataclass(frozen=True, slots=True)
class SegmentClosed:
    """Log record: a process has closed one of its segments, so others must not map it any more."""

    segment: int


LogRecord = SegmentOpened | ValueStored | SegmentClosed
_RECORD_TYPES: dict[str, type[LogRecord]] = {
    "Opened": SegmentOpened,
    "Entry": ValueStored,
    "Gone": SegmentClosed,
}
"""Name of a record in log files -> its class."""
_RECORD_NAMES = {record_type: name for name, record_type in _RECORD_TYPES.items()}


class RecordLog:
    """The file in which one process tells others what it has stored in shared memory."""

    def __init__(self, path: Path, owner: int) -> None:
        """Create the file; `owner` is what `open_private_folder` returned for its folder."""
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._fd = open_private_file(path, flags, owner)

    def add(self, record: LogRecord) -> None:
        """Append a record as one line, in one write, so that readers see all or nothing of it.

        Raises OSError if there is no space; then the log is as before.
        """
        line = (json.dumps([_RECORD_NAMES[type(record)], asdict(record)]) + "\n").encode()
        old_size = os.fstat(self._fd).st_size
        if os.write(self._fd, line) < len(line):
            os.ftruncate(self._fd, old_size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def read_log(path: Path, offset: int, owner: int) -> tuple[list[LogRecord], int]:
    """Return the records from an offset on, and the offset after the last complete line."""
    try:
        with os.fdopen(open_private_file(path, os.O_RDONLY, owner), "rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    complete = text[: text.rfind(b"\n") + 1]
    records: list[LogRecord] = []
    for line in complete.splitlines():
        name, fields = json.loads(line)
        if name == _RECORD_NAMES[ValueStored]:
            fields["file"] = tuple(fields["file"])
        records.append(_RECORD_TYPES[name](**fields))
    return records, offset + len(complete)


# Serialization of values with tensors
#
# Supported are strided CPU tensors and plain data in dicts, lists and tuples. Pickle would support
# more, but executes code when it reads.


_ALIGNMENT = 64
"""Tensors start at multiples of this many bytes."""
_DTYPES = {
    str(each): each
    for each in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class UnsupportedValueError(Exception):
    """Raised for contents that cannot be shared; the text names the part that is not supported."""


class TensorPart(NamedTuple):
    """The bytes of one tensor, and their offset from the first tensor of the same file."""

    offset: int
    data: memoryview


def serialize(value: object) -> tuple[Layout, list[TensorPart], int]:
    """Return the JSON-compatible structure of a value, its tensors' bytes, and their total size."""
    parts: list[TensorPart] = []
    layout = _serialize(value, parts)
    end = parts[-1].offset + len(parts[-1].data) if parts else 0
    return layout, parts, end


def _serialize(value: object, parts: list[TensorPart]) -> Layout:
    kind = type(value)
    if kind is torch.Tensor:
        return _serialize_tensor(cast("torch.Tensor", value), parts)
    if kind is dict:
        items = cast("dict[object, object]", value)
        if not all(type(key) is str for key in items):
            raise UnsupportedValueError("a dict whose keys are not strings")
        return {"dict": {key: _serialize(each, parts) for key, each in items.items()}}
    if kind in (list, tuple):
        elements = cast("list[object]", value)
        return {kind.__name__: [_serialize(each, parts) for each in elements]}
    if value is None or kind in (bool, int, float, str):
        return {"plain": value}
    raise UnsupportedValueError(f"a value of type {kind.__name__}")


def _serialize_tensor(tensor: torch.Tensor, parts: list[TensorPart]) -> Layout:
    dtype = str(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise UnsupportedValueError(f"a {tensor.layout} tensor on {tensor.device}")
    if dtype not in _DTYPES or tensor.requires_grad:
        raise UnsupportedValueError(f"a {dtype} tensor" + " with a gradient" * tensor.requires_grad)
    last = parts[-1] if parts else TensorPart(0, memoryview(b""))
    offset = -(-(last.offset + len(last.data)) // _ALIGNMENT) * _ALIGNMENT
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    parts.append(TensorPart(offset, flat.numpy().data))
    return {"tensor": [dtype, list(tensor.shape), offset]}


def deserialize(layout: Layout, memory: mmap.mmap, base: int) -> object:
    """Undo `serialize`: build a value whose tensors are views of `memory` after byte `base`."""
    [(kind, content)] = layout.items()
    if kind == "tensor":
        dtype_name, shape, offset = cast("tuple[str, list[int], int]", content)
        dtype = _DTYPES[dtype_name]
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=base + offset).view(shape)
    if kind == "dict":
        items = cast("dict[str, Layout]", content)
        return {key: deserialize(each, memory, base) for key, each in items.items()}
    if kind == "plain":
        return content
    elements = [deserialize(each, memory, base) for each in cast("list[Layout]", content)]
    return elements if kind == "list" else tuple(elements)
