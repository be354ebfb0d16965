"""Collect the events of one run: tables of numbers by step, and lists of other events.

`apply` takes events in the order of the log. `take_delta` returns what is new for pages that are
already open, and `snapshot` everything for a page that opens now.
"""

from __future__ import annotations

import math
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING

from gracetune.dashboard.series import Table, flatten_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_COLUMNS: dict[str, tuple[str, ...]] = {
    "step_done": ("loss", "grad_norm", "seconds"),
    "memory_used": ("host", "device"),
    "batches_fed": (),
    "weights_streamed": (),
    "step_times": ("total",),
    "loss_parts": (),
    "weights_moved": (),
    "device_sensors": ("gpus/0/temperature_c",),
    "memory_roles": (),
    "unified_memory": ("headroom",),
    "held_out_loss": (),
}
"""Kinds of events that are tables -> columns whose extremes are kept when rows are selected."""

KEPT_RECORDS = {
    "run_started": 200,
    "run_described": 8,
    "notice": 1000,
    "validated": 5000,
    "checkpoint_saved": 5000,
    "health": 2000,
    "rates_spread": 400,
    "ramp_changed": 500,
    "request_taken": 500,
    "batch_skipped": 500,
    "stage_changed": 500,
    "memory_reclaimed": 500,
    "managed_overflow": 100,
    "run_ended": 200,
}
"""Kinds of events that are kept as they are -> how many of the newest are kept."""

MEANS = ("loss",)
"""Columns whose mean over the rows between selected rows is sent too, for smoothing."""
MAX_STAGES = 100
MAX_STEP = 2**53
MAX_TIME = 253402300800
"""Start of the year 10000, in seconds since 1970; calendars end there."""
_HEADER = ("event", "time", "step")
_STEP_DONE = ("loss", "lr", "grad_norm", "samples", "accumulation", "epoch", "seconds")
_BY_EXPERT = ("loss", "lr", "grad_norm")


class RunState:
    """The events of a run so far. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.version = 0
        self.last_time = 0.0
        """Time of the newest event."""
        self.damaged = 0
        self.num_events = 0
        self._clear()

    def _clear(self) -> None:
        self.tables: dict[str, Table] = {}
        self.records: dict[str, deque[Mapping[str, object]]] = {
            kind: deque(maxlen=limit) for kind, limit in KEPT_RECORDS.items()
        }
        self.stages: dict[str, Mapping[str, object]] = {}
        self.latest: dict[str, Mapping[str, object]] = {}
        """Kind of a table -> its newest event, with the texts that a table leaves out."""
        self._new_rows: dict[str, int] = {}
        self._new_records: dict[str, list[Mapping[str, object]]] = {}
        self._must_reload = False

    def restart(self) -> None:
        """Forget everything, because the log was replaced."""
        self._clear()
        self.damaged = self.num_events = 0
        self.last_time = 0.0
        self._must_reload = True

    def apply(self, record: Mapping[str, object]) -> None:
        """Add one event of the log."""
        kind, time = record["event"], record.get("time")
        if not isinstance(time, float | int) or not 0 <= time < MAX_TIME:
            self.damaged += 1
            return
        self.num_events += 1
        self.last_time = float(time)
        if kind in KEY_COLUMNS:
            self._apply_row(str(kind), record, float(time))
        elif kind in KEPT_RECORDS:
            self.records[str(kind)].append(record)
            self._new_records.setdefault(str(kind), []).append(record)
            if kind == "validated" and "held_out_loss" not in self.latest:
                self._apply_validated(record, float(time))
        elif kind == "stage_progress":
            stage = str(record.get("stage"))
            if stage in self.stages or len(self.stages) < MAX_STAGES:
                self.stages[stage] = record

    def _apply_row(self, kind: str, record: Mapping[str, object], time: float) -> None:
        step = record.get("step")
        if not isinstance(step, int) or abs(step) > MAX_STEP:
            self.damaged += 1
            return
        table = self.tables.get(kind)
        if table is None:
            table = self.tables[kind] = Table()
        if kind == "step_done":
            values = _step_values(record)
        else:
            values = flatten_numbers(record, skip=_HEADER)
            self.latest[kind] = record
        count = len(table)
        if table.put(step, time, values):
            self._new_rows.setdefault(kind, count)
        else:
            self._must_reload = True

    def _apply_validated(self, record: Mapping[str, object], time: float) -> None:
        """Take held-out losses from a log of a version that had no event of their own for them."""
        losses, step = record.get("losses"), record.get("step")
        if not isinstance(losses, dict) or not losses or not isinstance(step, int):
            return
        if abs(step) > MAX_STEP:
            return
        table = self.tables.setdefault("held_out_loss", Table())
        count = len(table)
        if table.put(step, time, flatten_numbers({"losses": losses})):
            self._new_rows.setdefault("held_out_loss", count)
        else:
            self._must_reload = True

    def take_delta(self) -> dict[str, object] | None:
        """Return what is new since the last call, or None; each one has the next version."""
        if not (self._must_reload or self._new_rows or self._new_records):
            return None
        self.version += 1
        delta: dict[str, object] = {"version": self.version}
        total = sum(len(self.tables[kind]) - start for kind, start in self._new_rows.items())
        if self._must_reload or total > 2000:
            delta["reload"] = True
        else:
            delta["tables"] = {
                kind: self.tables[kind].rows_json(range(start, len(self.tables[kind])))
                for kind, start in self._new_rows.items()
            }
            delta["latest"] = {kind: self.latest.get(kind) for kind in self._new_rows}
            delta["records"] = self._new_records
        self._new_rows, self._new_records, self._must_reload = {}, {}, False
        return delta

    def snapshot(
        self, points: int, low: int | None = None, high: int | None = None
    ) -> dict[str, object]:
        """Return all events for a page; tables have about `points` rows between two steps."""
        tables = {}
        for kind, table in self.tables.items():
            wanted = points if KEY_COLUMNS[kind] else min(points, 400)
            rows = table.select(wanted, KEY_COLUMNS[kind], low, high)
            tables[kind] = table.rows_json(rows, MEANS) | {"total": len(table)}
        steps = self.tables.get("step_done")
        return {
            "version": self.version,
            "tables": tables,
            "latest": self.latest,
            "records": {kind: list(kept) for kind, kept in self.records.items() if kept},
            "stages": list(self.stages.values()),
            "non_finite": steps.non_finite_steps("loss") if steps else [],
            "damaged": self.damaged,
            "events": self.num_events,
        }

    def last_value(self, kind: str, column: str) -> float | None:
        """Return the newest number of a column, or None if there is none."""
        table = self.tables.get(kind)
        if table is None or column not in table.columns:
            return None
        value = table.columns[column][-1]
        return None if math.isnan(value) else value


def _step_values(record: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a step; with two transformers, also under the name of the trained one.

    Steps are by far the most frequent events, so that this does without `flatten_numbers`.
    """
    try:
        numbers = _STEP_NUMBERS(record)
    except KeyError:  # an earlier version did not log all of them
        numbers = (None,)
    if _NUMBER_TYPES.issuperset(map(type, numbers)):
        values = dict(zip(_STEP_DONE, numbers, strict=True))
    else:
        values = flatten_numbers({name: record[name] for name in _STEP_DONE if name in record})
    expert = record.get("expert")
    if isinstance(expert, str) and expert:
        values |= {f"{name}/{expert}": values[name] for name in _BY_EXPERT if name in values}
    return values


_STEP_NUMBERS = itemgetter(*_STEP_DONE)
_NUMBER_TYPES = frozenset((float, int))
