"""The fixture of old file formats in `tests/data/formats`: its layout and what is read of a run."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

from golden_runs import digest, events

FIXTURE = Path(__file__).parents[1] / "data" / "formats"
EXPECTED = "expected.json"
CACHE_ARCHIVE = "cache.tar.gz"
"""The cache is kept packed: each shard reserves 1 MiB of zeros for its header."""
STOPPED_AT, TOTAL_STEPS = 4, 8


def unpack(folder: Path) -> Path:
    """Copy the fixture to a new folder, with its cache unpacked."""
    shutil.copytree(FIXTURE, folder)
    with tarfile.open(folder / CACHE_ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def outcome(run: Path) -> dict[str, Any]:
    """Read the losses and the final state of a run that was trained to the end."""
    last = run / "checkpoints" / f"step-{TOTAL_STEPS:06d}"
    files = [*run.glob("adapter/*.safetensors"), *last.glob("*.safetensors")]
    return {
        "losses": {
            str(line["step"]): line["loss"] for line in events(run) if line["event"] == "step_done"
        },
        "digests": {str(file.relative_to(run)): digest([file]) for file in sorted(files)},
    }
