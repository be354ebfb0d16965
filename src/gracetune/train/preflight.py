"""Check a run before torch is imported: names, folders, and the checkpoint it would resume from.

Importing torch and loading a model take seconds to minutes. The mistakes that users make most often
can be found without them: `check_before_torch` reads the run file, a few directory entries and one
JSON file, and creates nothing. `run.py` and `build.py` make all other checks.
"""

from __future__ import annotations

import json
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune import entry_points
from gracetune.config.environment import check_engine, process_environment
from gracetune.config.schema import Gh200Section
from gracetune.data.dataset import SOURCES
from gracetune.data.source import check_exists
from gracetune.errors import CheckpointError, ConfigError
from gracetune.events.trackers.tracker import check_installed
from gracetune.models.registry import FAMILIES
from gracetune.optim.registry import OPTIMIZERS
from gracetune.train.run_identity import check_same_run, identity_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.config.schema import ModelSection, RunFile

CHECKPOINT_FOLDER = "checkpoints"
"""Name of the folder with all checkpoints, inside the output folder."""
MANIFEST = "manifest.json"
"""Name of the file that a complete checkpoint has; it records the run's settings."""
RESUME_WORDS = {"latest": "auto"}
"""Other tools' words for `--resume`, with ours."""
GENERATED_TYPES = {"shapes"}
"""Values of `datasets[].type` that create their folder."""


def check_before_torch(run: RunFile, resume_from: str) -> None:
    """Raise an error for a mistake that can be found without torch; create no file."""
    check_engine(process_environment())
    check_family_exists(run.model)
    entry_points.check_name("optimizer", run.optimizer.name, OPTIMIZERS, setting="optimizer.name")
    for index, dataset in enumerate(run.datasets):
        setting = f"datasets[{index}]"
        entry_points.check_name("source", dataset.type, SOURCES, setting=f"{setting}.type")
        for name, address in _local_folders(dataset):
            check_exists(address, f"{setting}.{name}")
    check_output_outside_datasets(run)
    check_installed(run.logging.trackers)
    check_same_settings(run, resume_from)


def check_family_exists(model: ModelSection) -> None:
    """Raise if neither gracetune nor an installed package has the family of a run."""
    entry_points.check_name("family", model.family, FAMILIES, setting="model.family")


def check_output_outside_datasets(run: RunFile) -> None:
    """Raise if the output folder is inside a dataset: the run would train on its own samples."""
    folder = Path(run.output_dir).resolve()
    for index, dataset in enumerate(run.datasets):
        if dataset.instance_data_dir is None:
            continue
        if folder.is_relative_to(Path(dataset.instance_data_dir).resolve()):
            raise ConfigError(
                f"output_dir is {run.output_dir!r}, inside datasets.{index}.instance_data_dir "
                f"({dataset.instance_data_dir!r}): the run would train on its own validation "
                "images. Choose an output_dir outside the dataset."
            )


def check_same_settings(run: RunFile, resume_from: str) -> None:
    """Raise if the checkpoint to resume from was saved with other settings than the run has.

    Only its manifest is read. If that is damaged, `checkpoint.py` reports it.
    """
    checkpoint = _checkpoint_to_resume(Path(run.output_dir) / CHECKPOINT_FOLDER, resume_from)
    saved = {} if checkpoint is None else read_identity(checkpoint / MANIFEST)
    if saved:
        # Whether `auto` means bf16 depends on the device, so run.py compares the precision.
        precision = str(saved.get("train.mixed_precision", ""))
        check_same_run(saved, identity_settings(effective_run(run), precision))


def require_checkpoint(path: Path) -> None:
    """Raise if a folder is no checkpoint, for example because `--resume` has a typo."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST}. Name a folder such as "
            f"<output_dir>/{CHECKPOINT_FOLDER}/step-000100."
        )


def effective_run(run: RunFile) -> RunFile:
    """Return the run file without `gh200_optimizations` if `use_gh200_trainer` turns it off."""
    if run.use_gh200_trainer:
        return run
    return run.model_copy(update={"gh200_optimizations": Gh200Section(enable_uvm_hints=False)})


def _local_folders(dataset: DatasetSection) -> Iterator[tuple[str, str]]:
    """Yield the setting and path of each local file or folder that a dataset names.

    Remote addresses and patterns such as `data/*.tar` are checked when they are listed.
    """
    if dataset.type in GENERATED_TYPES or dataset.type not in SOURCES:
        return
    named: list[tuple[str, str | None]] = [("instance_data_dir", dataset.instance_data_dir)]
    named += [("conditioning_data_dir", folder) for folder in dataset.control_folders]
    named.append(("mask_data_dir", dataset.mask_data_dir))
    for name, address in named:
        if address is not None and "://" not in address and not has_magic(address):
            yield name, address


def _checkpoint_to_resume(folder: Path, resume_from: str) -> Path | None:
    """Return the checkpoint that `--resume` selects, or None for a new run."""
    resume = RESUME_WORDS.get(resume_from, resume_from)
    if resume == "none":
        return None
    if resume != "auto":
        named = folder / resume if (folder / resume).is_dir() else Path(resume)
        require_checkpoint(named)
        return named
    steps = {
        int(path.name.removeprefix("step-")): path
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdecimal() and (path / MANIFEST).is_file()
    }
    return steps[max(steps)] if steps else None


def read_identity(manifest: Path) -> Mapping[str, object]:
    """Return the identity of the run in a manifest; nothing if it cannot be read."""
    try:
        identity = json.loads(manifest.read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return identity if isinstance(identity, dict) else {}
