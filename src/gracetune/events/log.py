"""The log of a run: one JSON object a line, written as things happen, read back by anyone.

A line is `{"event": kind, "time": unix seconds, ...}` with the event's own fields. Floats are
written so that they read back bit for bit. JSON has no number for what is not finite: those are
the strings "nan", "inf" and "-inf", which `float()` reads.
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
"""The kind of line that vouches for the broken one before it."""


class JsonlLog:
    """A sink that appends each event to a file.

    Every line is handed to the kernel before `handle` returns, so a killed process loses at most
    the line it was writing. Checkpoints and the end of a run also reach the disk.
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
                f"The log {path} cannot be opened: {error.strerror}. "
                "Choose an output_dir that can be written to."
            ) from error
        self._close_off_torn_line()

    def handle(self, event: Event) -> None:
        """Write one line; a stage's progress at most once in a while, and its end always.

        Where a line could not be written, which ends the run, nothing comes after it.
        """
        if self._file.closed:
            return
        now = self._clock()
        if isinstance(event, StageProgress) and not self._stage_is_due(event, now):
            return
        line = {"event": KINDS[type(event)], "time": now}
        line |= {field.name: _plain(getattr(event, field.name)) for field in fields(event)}
        self._write(line, durable=isinstance(event, CheckpointSaved | RunEnded))

    def close(self) -> None:
        """Give the file back; every line is already written."""
        self._file.close()

    def _stage_is_due(self, event: StageProgress, now: float) -> bool:
        last = self._stage_times.get(event.stage, -math.inf)
        if event.done < event.total and now - last < self._stage_every_s:
            return False
        self._stage_times[event.stage] = now
        return True

    def _close_off_torn_line(self) -> None:
        """End the line that a killed process left behind, and say so in the log itself."""
        size = self._file.seek(0, os.SEEK_END)
        if size == 0:
            return
        self._file.seek(-1, os.SEEK_END)
        if self._file.read(1) != b"\n":
            self._write({"event": TORN, "time": self._clock()}, prefix="\n")

    def _write(self, line: Mapping[str, object], prefix: str = "", durable: bool = False) -> None:
        text = prefix + json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            # A caption read from a broken file may hold half a surrogate pair; keep it readable.
            self._file.write(text.encode("utf-8", errors="backslashreplace"))
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # closing tries the same bytes again; the first error is told
                self._file.close()
            raise RunFailedError(
                f"The log {self._path} cannot be written: {error.strerror}. "
                "Make room or mend the disk, then start the run again to resume it."
            ) from error


def read_events(path: Path) -> Iterator[dict[str, object]]:
    """Every line of a log in order; a line torn by a kill is left out, any other damage raises."""
    broken = 0
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"The log {path} cannot be read: {error.strerror}. Name the log of a run."
        ) from error
    with file:
        for number, raw in enumerate(file, start=1):
            record = _parse(raw)
            if record is None:
                broken = broken or number
                continue
            if broken and record["event"] != TORN:
                raise DataError(
                    f"{path}, line {broken} is not an event. "
                    "Something else wrote to this log; remove the line to read the rest."
                )
            broken = 0
            yield record


def loss_by_step(path: Path) -> dict[int, float]:
    """The loss of each logged step; where a resumed run repeats a step, the later line counts."""
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
    except ValueError:  # covers bytes that are not UTF-8
        return None
    return record if isinstance(record, dict) and "event" in record else None


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
