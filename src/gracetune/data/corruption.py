"""Which samples could not be read, and when that is too many to go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gracetune.data.source import printable
from gracetune.durable import write_text
from gracetune.errors import DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from pathlib import Path

    from gracetune.data.progress import Tell

NAMED = 5
"""How many files an error names; the report has them all."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """One sample that is left out."""

    dataset: str
    key: str
    reason: str


class CorruptionLog:
    """Keeps every unreadable sample of a run, once each, and tells it by name."""

    def __init__(self, tell: Tell, report: Path | None = None) -> None:
        """`report` is written before a run stops for its broken files, which must be mended."""
        self._tell = tell
        self._report = report
        self._entries: dict[tuple[str, str], Corruption] = {}

    @property
    def entries(self) -> tuple[Corruption, ...]:
        """In the order in which they were found."""
        return tuple(self._entries.values())

    def record(self, dataset: str, key: str, reason: str) -> None:
        """Leave a sample out; the second time the same one is recorded says nothing new."""
        if (dataset, key) in self._entries:
            return
        self._entries[dataset, key] = Corruption(dataset, key, reason)
        text = f"data set {dataset!r}: {printable(key)} is left out: {printable(reason)}"
        self._tell(Notice(text, level="warning"))

    def check(self, dataset: str, total: int, rate: float) -> None:
        """Stop once more than `rate` of the `total` samples are unreadable."""
        broken = [entry for entry in self.entries if entry.dataset == dataset]
        if len(broken) / total <= rate:
            return
        named = "; ".join(f"{printable(e.key)} ({printable(e.reason)})" for e in broken[:NAMED])
        more = f"; and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
        if self._report is not None:
            self.write(self._report)
            more += f" (all of them in {self._report})"
        raise DataError(
            f"data set {dataset!r}: {len(broken)} of {total} samples cannot be read, more than "
            f"max_corruption_rate {rate:g} allows: {named}{more}. Mend or remove these files, or "
            "raise max_corruption_rate."
        )

    def write(self, path: Path) -> None:
        """Leave a report for whoever mends the files."""
        report = {
            "unreadable": len(self._entries),
            "samples": [asdict(entry) for entry in self.entries],
        }
        write_text(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
