"""Columns of numbers by step, and the selection of rows that a plot needs.

A table has one row per logged step and one column per number. If a resumed run repeats a step, the
later row counts. A plot is about a thousand pixels wide, so a table of 100,000 rows is reduced to
the rows with the smallest and largest value in each of a few hundred ranges of steps. Each selected
row also has the number of rows that it stands for and their mean, from which the page computes
smoothed curves.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MAX_COLUMNS = 2000
MAX_DEPTH = 6
MAX_LEVELS = 50
NAN = math.nan


class Table:
    """Numbers of one kind of event, by step."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        self.columns: dict[str, array[float]] = {}
        self._names: list[str] = []
        """Names of the row that was added last, whose columns are the first of `_appends`."""
        self._appends: list[Callable[[float], None]] = []

    def __len__(self) -> int:
        return len(self.steps)

    def put(self, step: int, time: float, values: Mapping[str, float]) -> bool:
        """Add or replace the row of a step; return True if the row was added at the end."""
        if not self.steps or step > self.steps[-1]:
            self._append(step, time, values)
            return True
        row = bisect_left(self.steps, step)
        if self.steps[row] != step:
            self.steps.insert(row, step)
            self.times.insert(row, time)
            for column in self.columns.values():
                column.insert(row, NAN)
        self.times[row] = time
        for name, column in self.columns.items():
            column[row] = values.get(name, NAN)
        for name in values.keys() - self.columns.keys():
            new = self._new_column(name)
            if new is not None:
                new[row] = values[name]
        return False

    def _append(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.times.append(time)
        # Rows of one kind mostly have the same names, so that they need no search.
        if len(self._names) == len(self.columns) and [*values] == self._names:
            for append, number in zip(self._appends, values.values(), strict=True):
                append(number)
            return
        self._append_unlike(values)
        self._names = [*values]
        self._appends = [self.columns[name].append for name in values if name in self.columns]

    def _append_unlike(self, values: Mapping[str, float]) -> None:
        """Add the numbers of a row that has other names than the one before."""
        for name, value in values.items():
            if name in self.columns:
                self.columns[name].append(value)
                continue
            new = self._new_column(name)
            if new is not None:
                new[-1] = value
        if len(values) != len(self.columns):
            count = len(self.steps)
            for column in self.columns.values():
                if len(column) < count:
                    column.append(NAN)

    def _new_column(self, name: str) -> array[float] | None:
        if len(self.columns) >= MAX_COLUMNS:
            return None
        column = self.columns[name] = array("d", [NAN]) * len(self.steps)
        return column

    def select(
        self, points: int, keys: Sequence[str] = (), low: int | None = None, high: int | None = None
    ) -> list[int]:
        """Return the numbers of about `points` rows with steps from `low` to `high`.

        In each range of rows, those with the smallest and the largest value of each key column are
        selected, or the last one if there are no such columns.
        """
        first = 0 if low is None else max(bisect_left(self.steps, low) - 1, 0)
        stop = len(self) if high is None else min(bisect_right(self.steps, high) + 1, len(self))
        count = stop - first
        if count <= points:
            return list(range(first, stop))
        present = [self.columns[key] for key in keys if key in self.columns]
        buckets = max(points // max(2 * len(present), 1), 1)
        found = {first, stop - 1}
        for bucket in range(buckets):
            start = first + count * bucket // buckets
            end = first + count * (bucket + 1) // buckets
            if start == end:
                continue
            if not present:
                found.add(end - 1)
            for column in present:
                part = column[start:end]
                found.add(start + part.index(min(part)) if part[0] == part[0] else start)
                found.add(start + part.index(max(part)) if part[0] == part[0] else start)
        return sorted(found)

    def rows_json(self, rows: Sequence[int], means: Sequence[str] = ()) -> dict[str, object]:
        """Return rows as columns for JSON; missing and non-finite numbers are None.

        `weights` counts the rows since the selected row before; `means` are averages over these.
        """
        columns: dict[str, list[float | None]] = {
            name: [_rounded(column[row]) for row in rows] for name, column in self.columns.items()
        }
        starts = [rows[0] if rows else 0, *(row + 1 for row in rows[:-1])]
        result: dict[str, object] = {
            "steps": [self.steps[row] for row in rows],
            "times": [round(self.times[row], 3) for row in rows],
            "columns": columns,
        }
        if any(stop - start for start, stop in zip(starts, rows, strict=True)):
            result["weights"] = [row + 1 - start for start, row in zip(starts, rows, strict=True)]
            result["means"] = {
                name: [
                    _mean(self.columns[name][start : row + 1])
                    for start, row in zip(starts, rows, strict=True)
                ]
                for name in means
                if name in self.columns
            }
        return result

    def non_finite_steps(self, name: str, limit: int = 100) -> list[int]:
        """Return the first steps at which a column is NaN or infinite."""
        column = self.columns.get(name, array("d"))
        bad = (step for step, value in zip(self.steps, column, strict=False) if value - value != 0)
        return [step for step, _ in zip(bad, range(limit), strict=False)]


def flatten_numbers(record: Mapping[str, object], skip: Iterable[str] = ()) -> dict[str, float]:
    """Return all numbers in a record, by path: `{"seconds": {"data": 1}}` -> `seconds/data`.

    Lists of strings count as their length, and lists of mappings get numbers in the path.
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if name not in skip:
            _flatten(name, value, found, 0)
    return found


def _flatten(path: str, value: object, found: dict[str, float], depth: int) -> None:
    if isinstance(value, float | int):
        found[path] = value
    elif isinstance(value, str):
        if value in ("nan", "inf", "-inf"):
            found[path] = float(value)
    elif depth >= MAX_DEPTH or len(found) >= MAX_COLUMNS:
        return
    elif isinstance(value, dict):
        _flatten_items(path, value.items(), found, depth + 1)
    elif isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            found[path] = float(len(value))
        else:
            _flatten_items(path, enumerate(value), found, depth + 1)


def _flatten_items(
    path: str, items: Iterable[tuple[object, object]], found: dict[str, float], depth: int
) -> None:
    for name, item in items:
        if type(item) is float:  # by far the most frequent case
            found[f"{path}/{name}"] = item
        else:
            _flatten(f"{path}/{name}", item, found, depth)


def dump_json(content: object) -> str:
    """Return JSON in ASCII, in which lone surrogates are escaped.

    Numbers that are not finite, and values that are nested too deeply, become null.
    """
    try:
        return json.dumps(content, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(_without_infinity(content), separators=(",", ":"), allow_nan=False)


def _without_infinity(value: object, levels: int = MAX_LEVELS) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, dict | list | tuple):
        return value
    if not levels:
        return None
    if isinstance(value, dict):
        return {key: _without_infinity(item, levels - 1) for key, item in value.items()}
    return [_without_infinity(item, levels - 1) for item in value]


def _rounded(value: float) -> float | None:
    if value - value != 0:
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")


def _mean(values: array[float]) -> float | None:
    return _rounded(sum(values) / len(values)) if values else None
