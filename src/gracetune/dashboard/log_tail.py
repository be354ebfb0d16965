"""Read a growing `events.jsonl` piece by piece.

A run may be writing the log while it is read, may have been killed in the middle of a line, and may
be replaced by a new run in the same folder. A reader remembers its offset and never waits.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from gracetune.events.log import TORN

if TYPE_CHECKING:
    from pathlib import Path

CHUNK_NBYTES = 512 * 1024
"""Bytes that are parsed at once, so that other threads get their turn."""
MAX_LINE_NBYTES = 8 * 1024 * 1024
"""Longer lines are skipped and counted as damaged."""
HEAD_NBYTES = 256
"""Bytes at the start of the log that tell it from a log that replaced it."""


@dataclass(slots=True)
class LogChunk:
    """The events of a part of the log."""

    records: list[dict[str, object]] = field(default_factory=list)
    restarted: bool = False
    """True if the log was replaced or cut: everything that was read before is void."""
    damaged: int = 0
    """Number of lines that are neither events nor torn by a kill."""
    at_end: bool = True
    """False if there is more to read at once."""
    share: float = 1.0
    """Share of the file that has been read."""


class LogTail:
    """Reads new events of one log at each call of `read`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._head = b""
        self._identity: tuple[int, int] | None = None
        self._has_broken_line = False
        self._skips_line = False

    def read(self) -> LogChunk:
        """Return the complete lines since the last call; an incomplete last line is left for later.

        A missing log gives no events.
        """
        try:
            # Opening a pipe would block without O_NONBLOCK, and a link may lead anywhere.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self._path, flags)
        except OSError:
            return self._lost()
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return self._lost()
            identity = (status.st_dev, status.st_ino)
            if self._is_the_same(identity, status.st_size) and status.st_size == self._offset:
                return LogChunk()
            head = file.read(HEAD_NBYTES)
            restarted = self._offset > 0 and not (
                self._is_the_same(identity, status.st_size) and head.startswith(self._head)
            )
            if restarted:
                self._forget()
            self._identity = identity
            self._head = head
            start = file.seek(self._offset)
            data = file.read(CHUNK_NBYTES)
            if len(data) == CHUNK_NBYTES and b"\n" not in data:
                data += file.read(MAX_LINE_NBYTES)
        chunk = self._parse(data)
        chunk.restarted = restarted
        # At the end even if the last line is incomplete, which leaves `_offset` before it.
        chunk.at_end = start + len(data) >= status.st_size or len(data) < CHUNK_NBYTES
        if not chunk.at_end:
            chunk.share = self._offset / status.st_size
        return chunk

    def _is_the_same(self, identity: tuple[int, int], size: int) -> bool:
        return identity == self._identity and size >= self._offset

    def _lost(self) -> LogChunk:
        restarted = self._offset > 0
        self._forget()
        return LogChunk(restarted=restarted)

    def _forget(self) -> None:
        self._offset, self._head, self._identity = 0, b"", None
        self._has_broken_line = self._skips_line = False

    def _parse(self, data: bytes) -> LogChunk:
        chunk = LogChunk()
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) > MAX_LINE_NBYTES:
                self._offset += len(data)
                chunk.damaged += not self._skips_line
                self._skips_line = True
            return chunk
        self._offset += end
        lines = data[:end].split(b"\n")[:-1]
        if self._skips_line:
            self._skips_line = False
            lines = lines[1:]
        for line in lines:
            record = _parse_line(line)
            if record is None:
                chunk.damaged += self._has_broken_line
                self._has_broken_line = True
                continue
            if self._has_broken_line:
                chunk.damaged += record["event"] != TORN
                self._has_broken_line = False
            chunk.records.append(record)
        return chunk


def _parse_line(line: bytes) -> dict[str, object] | None:
    """Return the event of a line; None if it is damaged.

    orjson takes a fifth of the standard library's time. It refuses lone surrogates, which
    stand for bytes of file names that are not UTF-8, so a line that it refuses is tried again.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            record = _DECODER.decode(line.decode())
        except (ValueError, RecursionError):  # also for bytes that are not UTF-8
            return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None


def _integer(text: str) -> int | float:
    """Return a whole number; one that is too long for 64 bits becomes a float, as with orjson."""
    return int(text) if len(text) < 19 else float(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON; a log has strings for such numbers")


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer)
