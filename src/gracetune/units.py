"""Parse and format byte counts and durations."""

from __future__ import annotations

import re

from gracetune.errors import ConfigError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": KIB,
    "m": 10**6,
    "mb": 10**6,
    "mib": MIB,
    "g": 10**9,
    "gb": 10**9,
    "gib": GIB,
    "t": 10**12,
    "tb": 10**12,
    "tib": 1024**4,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | float) -> int:
    """Parse `96GB`, `1.5 GiB` or a plain number of bytes."""
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _FACTORS:
        raise ConfigError(f"{text!r} is not a size; write a number and a unit, such as 96GB.")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(nbytes: float) -> str:
    """Format bytes in the largest binary unit in which the number is at least 1."""
    for unit, size in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{int(nbytes)} B"


def format_seconds(seconds: float) -> str:
    """Format a duration as `1h02m`, `3m20s`, `4.2s` or `12ms`."""
    if seconds >= 3600:
        return f"{int(seconds) // 3600}h{int(seconds) % 3600 // 60:02d}m"
    if seconds >= 60:
        return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"
    if seconds >= 1:
        return f"{seconds:.1f}s"
    return f"{seconds * 1000:.0f}ms"
