"""What a process tells the others of its machine about the tensors it holds: a line a note."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from gracetune.hosts.tensor_memory import Identity


@dataclass(frozen=True, slots=True)
class Opened:
    """A segment, and where others find it as long as its holder lives."""

    segment: int
    pid: int
    fd: int
    device: int
    inode: int

    def open(self, proc: Path) -> int:
        """A descriptor of it; OSError where it is gone or not ours to see."""
        path = proc / str(self.pid) / "fd" / str(self.fd)
        # Looked at before it is opened: what a number leads to by now may be a pipe or a device.
        if self._is(os.stat(path)):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if self._is(os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)
        raise FileNotFoundError(f"{path} is no longer the segment it was")

    def _is(self, status: os.stat_result) -> bool:
        return (status.st_dev, status.st_ino) == (self.device, self.inode)


@dataclass(frozen=True, slots=True)
class SharedEntry:
    """The value of one file, in a segment."""

    path: str
    file: Identity
    segment: int
    offset: int
    nbytes: int
    layout: dict[str, object]


@dataclass(frozen=True, slots=True)
class Gone:
    """A segment that its holder has closed."""

    segment: int


Note = Opened | SharedEntry | Gone
_KINDS: dict[str, type[Note]] = {kind.__name__: kind for kind in (Opened, SharedEntry, Gone)}


class Log:
    """The notes of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, note: Note) -> None:
        """One line, in one write: who reads meanwhile sees all of it, or waits for its end.

        OSError where there is no room for it; then nothing of it is left.
        """
        line = (json.dumps([type(note).__name__, asdict(note)]) + "\n").encode()
        before = os.fstat(self._fd).st_size
        if os.write(self._fd, line) < len(line):
            os.ftruncate(self._fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def follow(path: Path, offset: int) -> tuple[list[Note], int]:
    """What was noted since an offset, and the next one; a line without its end is for later."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    notes: list[Note] = []
    for line in whole.splitlines():
        kind, said = json.loads(line)
        if kind == SharedEntry.__name__:
            said["file"] = tuple(said["file"])
        notes.append(_KINDS[kind](**said))
    return notes, offset + len(whole)
