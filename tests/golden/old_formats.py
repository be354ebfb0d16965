"""The fixtures of file formats in `tests/data`: their layout, and what is read of a run.

`formats` was written by the first version of each format, `formats-0.1.0` by the first release.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

from golden_runs import digest, events

DATA = Path(__file__).parents[1] / "data"
FIRST = "formats"
FIXTURES = (FIRST, "formats-0.1.0")
INPUTS = ("model", "data", "run.json")
"""Files that all fixtures have in common; only the first one contains them."""
EXPECTED = "expected.json"
CACHE_ARCHIVE = "cache.tar.gz"
"""The cache is kept packed: each shard reserves 1 MiB of zeros for its header."""
STOPPED_AT, TOTAL_STEPS = 4, 8


def unpack(folder: Path, name: str = FIRST) -> Path:
    """Copy a fixture to a new folder, with its inputs and its cache unpacked."""
    shutil.copytree(DATA / name, folder)
    for path in (DATA / FIRST / one for one in INPUTS if name != FIRST):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, folder / path.name)
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
