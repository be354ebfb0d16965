"""The one form of every result file: when, which commit, on what, and numbers by name."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FOLDER = Path(__file__).parent / "results"


def write(
    name: str, figures: Mapping[str, object], folder: Path = FOLDER, commit: str = ""
) -> Path:
    """Write `results/NAME.json`; nested figures become dotted names."""
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or this_commit(),
        "machine": this_machine(),
        "figures": dict(flatten(figures)),
    }
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def read(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The figures that were written; none where there is no file."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else {}


def flatten(figures: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Every number with the names that lead to it."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def this_commit() -> str:
    """The commit that is measured, marked where the tree differs from it."""
    asked = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else "unknown"


def this_machine() -> str:
    """What it is, not which one."""
    gpu = f"{torch.cuda.get_device_name(0)}, " if torch.cuda.is_available() else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{gpu}{platform.machine()} CPU, {versions}"
