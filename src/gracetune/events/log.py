"""Write and read the log of a run, `events.jsonl`: one JSON object per line and event.

A line is `{"event": kind, "time": unix seconds, ...}` with the event's own fields. Floats read back
bit for bit. JSON has no nan and no infinity: they are written as the strings "nan", "inf" and
"-inf", which `float()` accepts.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING

from gracetune.errors import DataError, RunFailedError
from gracetune.events.types import KINDS, CheckpointSaved, RunEnded, StageProgress, StepDone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gracetune.events.types import Event

TORN = "torn_line"
"""Event kind of a line that marks the line before it as incomplete, cut off by a kill."""


class JsonlLog:
    """An event sink that appends each event to a JSON Lines file.

    `handle` flushes each line, so a killed process loses at most the line that it was writing.
    Lines about checkpoints and the end of a run are also synced to disk, in a new file with the
    same lines if the file was deleted.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, stage_every_s: float = 1.0
    ) -> None:
        self._path = path
        self._clock = clock
        self._stage_every_s = stage_every_s
        self._stage_times: dict[str, float] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise RunFailedError(
                f"the log {path} cannot be opened: {error.strerror}. "
                "Choose an output_dir that you may write to."
            ) from error
        self._close_off_torn_line()

    def handle(self, event: Event) -> None:
        """Write an event as one line; progress of a stage only once a second and at its end.

        After a failed write, which ends the run, further events are ignored.
        """
        if self._file.closed:
            return
        now = self._clock()
        if isinstance(event, StageProgress) and not self._stage_is_due(event, now):
            return
        line = {"event": KINDS[type(event)], "time": now}
        line |= {field.name: _to_json(getattr(event, field.name)) for field in fields(event)}
        self._write(line, durable=isinstance(event, CheckpointSaved | RunEnded))

    def close(self) -> None:
        """Close the file; every line is already written."""
        self._file.close()

    def _stage_is_due(self, event: StageProgress, now: float) -> bool:
        last = self._stage_times.get(event.stage, -math.inf)
        if event.done < event.total and now - last < self._stage_every_s:
            return False
        self._stage_times[event.stage] = now
        return True

    def _close_off_torn_line(self) -> None:
        """End the last line if a killed process left it incomplete, and mark it as torn."""
        size = self._file.seek(0, os.SEEK_END)
        if size == 0:
            return
        self._file.seek(-1, os.SEEK_END)
        if self._file.read(1) != b"\n":
            self._write({"event": TORN, "time": self._clock()}, prefix="\n")

    def _write(self, line: Mapping[str, object], prefix: str = "", durable: bool = False) -> None:
        text = prefix + json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            if durable and os.fstat(self._file.fileno()).st_nlink == 0:
                self._write_deleted_lines()
            # A caption may contain half a surrogate pair, which UTF-8 cannot encode.
            self._file.write(text.encode("utf-8", errors="backslashreplace"))
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # closing flushes, and fails, again; the first error counts
                self._file.close()
            raise RunFailedError(
                f"the log {self._path} cannot be written: {error.strerror}. "
                "Free some disk space, then run the same command again to continue."
            ) from error

    def _write_deleted_lines(self) -> None:
        """Write the lines of the deleted file to a new one, unless another process has made one."""
        with suppress(FileNotFoundError, FileExistsError):  # the folder may be deleted as well
            file = self._path.open("x+b")
            self._file.seek(0)
            file.write(self._file.read())
            self._file.close()
            self._file = file


def read_events(path: Path) -> Iterator[dict[str, object]]:
    """Yield the events of a log in order; skip torn lines, raise at any other damage."""
    broken = 0
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"the log {path} cannot be read: {error.strerror}. Name the events.jsonl of a run."
        ) from error
    with file:
        for number, raw in enumerate(file, start=1):
            record = _parse(raw)
            if record is None:
                broken = broken or number
                continue
            if broken and record["event"] != TORN:
                raise DataError(
                    f"line {broken} of {path} is not an event: something else wrote to this log. "
                    "Remove the line to read the rest."
                )
            broken = 0
            yield record


def events_of_kind(path: Path, *kinds: str) -> Iterator[dict[str, object]]:
    """Yield the events of some kinds in a log, in order; skip lines that are not events.

    Reads only the lines that contain a kind, so that a long log takes little time.
    """
    markers = [f'"event": "{kind}"'.encode() for kind in kinds]
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for raw in file:
            record = _parse(raw) if any(marker in raw for marker in markers) else None
            if record is not None and record["event"] in kinds:
                yield record


def event_from_record(record: Mapping[str, object]) -> Event | None:
    """Return the event that a line of a log was written from; None if fields are missing.

    An earlier version may have logged fewer fields, and a later one more.
    """
    kind = next((kind for kind, name in KINDS.items() if name == record["event"]), None)
    if kind is None:
        return None
    known = {one.name for one in fields(kind)}
    values = {name: _from_json(value) for name, value in record.items() if name in known}
    try:
        return kind(**values)  # type: ignore[arg-type]
    except TypeError:
        return None


def loss_by_step(path: Path) -> dict[int, float]:
    """Return the loss of each step from a log; for a step that was repeated, the later value."""
    losses: dict[int, float] = {}
    for record in read_events(path):
        if record["event"] == KINDS[StepDone]:
            step, loss = record["step"], record["loss"]
            assert isinstance(step, int), f"{path}: step {step!r} is not a number"
            assert isinstance(loss, float | str), f"{path}: loss {loss!r} is not a number"
            losses[step] = float(loss)
    return losses


def _parse(raw: bytes) -> dict[str, object] | None:
    try:
        record = json.loads(raw)
    except ValueError:  # also for bytes that are not UTF-8
        return None
    return record if isinstance(record, dict) and "event" in record else None


def _to_json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: object) -> object:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    return value
