"""The form of a diagnosis: findings with a verdict and what to do, and the report they make.

The checks themselves are `diagnose_host` (what can be read) and `diagnose_device` (what must be
tried and timed). Nothing here or in `diagnose_host` needs torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Figure = int | float | str | bool | None


class Status(StrEnum):
    """How a check came out."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """Not tried, for the reason given."""


MARKS = MappingProxyType({"OK": "✅", "WARN": "⚠️", "FAIL": "❌", "SKIP": "⏭️"})
"""The forks' checklist looks for these in the report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    status: Status
    text: str
    advice: str = ""
    """What to do about it; every finding that is not OK has one, or its text is the reason."""
    figures: Mapping[str, Figure] = field(default_factory=dict)


def ok(name: str, text: str, **figures: Figure) -> Finding:
    """All is well."""
    return Finding(name, Status.OK, text, "", figures)


def warn(name: str, text: str, advice: str, **figures: Figure) -> Finding:
    """It works, but less well than it could."""
    return Finding(name, Status.WARN, text, advice, figures)


def fail(name: str, text: str, advice: str, **figures: Figure) -> Finding:
    """It does not work."""
    return Finding(name, Status.FAIL, text, advice, figures)


def skip(name: str, text: str, advice: str = "", **figures: Figure) -> Finding:
    """It was not tried."""
    return Finding(name, Status.SKIP, text, advice, figures)


def gb_per_s(rate: float) -> float:
    """A rate as people quote it: 10^9 bytes a second, to a tenth."""
    return round(rate / 1e9, 1)


def exit_code(findings: Sequence[Finding], *, has_gpu: bool, allow_cpu: bool) -> int:
    """1 if anything failed, or if there is no GPU and nobody said that this is fine."""
    failed = any(finding.status is Status.FAIL for finding in findings)
    return int(failed or not (has_gpu or allow_cpu))


def report(findings: Sequence[Finding], code: int, date: str, version: str) -> dict[str, object]:
    """The whole diagnosis as plain data; it names no host, user or path."""
    counts = Counter(finding.status for finding in findings)
    return {
        "tool": "gracetune diagnose",
        "version": version,
        "date": date,
        "exit_code": code,
        "summary": {status.lower(): counts[status] for status in Status},
        "checks": [
            {
                "number": number,
                "name": finding.name,
                "status": str(finding.status),
                "mark": MARKS[finding.status],
                "text": finding.text,
                "advice": finding.advice,
                "figures": dict(finding.figures),
            }
            for number, finding in enumerate(findings, start=1)
        ],
    }


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """The diagnosis as a person reads it."""
    width = max((len(finding.name) for finding in findings), default=0)
    for number, finding in enumerate(findings, start=1):
        yield f"{number:>2} {finding.status:<4} {finding.name:<{width}}  {finding.text}"
        if finding.advice:
            yield f"{'':>{width + 10}}-> {finding.advice}"
