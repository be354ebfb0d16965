"""Write and read the benchmarks' result files: date, commit, machine and measured figures."""

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
    """Return the figures of a result file; empty if there is no file."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else {}


def flatten(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every figure with its dotted name."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def this_commit() -> str:
    """Return the commit of this repository, marked `-dirty` if it has uncommitted changes."""
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def this_machine() -> str:
    """Describe the kind of machine, without its host name."""
    gpu = f"{torch.cuda.get_device_name(0)}, " if torch.cuda.is_available() else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{gpu}{platform.machine()} CPU, {versions}"
