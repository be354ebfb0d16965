"""Find what `gracetune sample` samples from: runs, steps of runs, and adapter files.

    runs/x                                  the newest step of a run
    runs/x/checkpoints/step-000500          a step of a run, also runs/x/adapters/step-000500
    mine.json                               the run of a run file
    lora.safetensors:0.8                    an adapter file of any tool, times a strength
    folder                                  a folder with an adapter file

A run has the model and the settings of samples. For adapter files elsewhere, `--model` names the
model.

Modules that import torch are imported by the functions that need them, so that a wrong path is
reported at once.
"""

from __future__ import annotations

import difflib
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune import entry_points
from gracetune.config.load import load_run_file
from gracetune.config.schema import ModelSection, RunFile
from gracetune.errors import ConfigError
from gracetune.models.registry import FAMILIES
from gracetune.train.preflight import MANIFEST, read_identity
from gracetune.train.run_identity import WEIGHTS_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RUN_RECORDS = ("run.resolved.json", "run.json")
"""Files in a run's folder with its settings; the first that exists."""
RUN_FILE_SUFFIXES = (".json", ".yaml", ".yml", ".toml")
FIXED_NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""Names of the files that diffusers and peft look for in a folder; see adapters/files/io.py."""
STEP_FOLDERS = ("checkpoints", "adapters")
"""Folders of a run with a folder for each step; see train/checkpoint.py."""
SAMPLES_FOLDER = "samples"
BASE_STEP = 0
"""The step that stands for the model before training."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of one adapter, one for each transformer, and a factor for all of them."""

    paths: tuple[Path, ...]
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One set of weights to sample with: a checkpoint, adapters, or the model as it is."""

    label: str
    """Text for the user, such as `step 500`."""
    name: str
    """Start of the names of output files, such as `step-000500`."""
    checkpoint: Path | None = None
    adapters: tuple[AdapterFiles, ...] = ()
    is_run: bool = False
    """True for a step of a run, which has the precision and the adapter layers of training. The
    step before training has no checkpoint."""


@dataclass(frozen=True, slots=True)
class SampleTargets:
    """Everything that is sampled, and the settings of the model."""

    run: RunFile
    variants: tuple[Variant, ...]
    folder: Path
    """Default folder of the output files."""
    base_weights: str = ""
    """Digest of the weights that the run's adapter was trained on; empty if it is unknown, or if
    another model was asked for."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A parsed argument: a run, with a step or without, or an adapter."""

    text: str
    run: RunFile | None
    """The run that the target is or belongs to."""
    folder: Path | None
    """The run's folder, if the target is a run or a step of one."""
    step: int | None
    files: tuple[Path, ...]
    strength: float | None
    home: Path | None
    """The folder of the run that the target is, or is in."""


def load_settings(path: Path) -> RunFile:
    """Return the settings of a run file."""
    return load_run_file(path).run


def find_targets(
    texts: Sequence[str],
    model: str | None,
    steps: str | None,
    *,
    compare: bool,
    read_run: Callable[[Path], RunFile] = load_settings,
) -> SampleTargets:
    """Return what to sample with.

    `model` is `FAMILY` or `FAMILY=PATH`, and replaces a run's model. `steps` is `all` or a list of
    numbers separated by commas. `compare` samples with every step of a run, or with each of several
    targets on its own, instead of all of them together. `read_run` reads a run file that is named.
    """
    targets = [_parse(text, read_run) for text in texts]
    run = next((target.run for target in targets if target.run is not None), None)
    if model is not None:
        section = _parse_model(model)
        run = RunFile(model=section) if run is None else run.model_copy(update={"model": section})
    elif run is None:
        given = f"{targets[0].text} belongs to no run" if targets else "nothing is given"
        raise ConfigError(
            f"--model is missing: {given}, so the model to sample with is unknown. Give "
            "--model FAMILY=PATH, for example --model flux=black-forest-labs/FLUX.1-dev, or the "
            "folder of a run."
        )
    homes = [target.home for target in targets if target.home is not None]
    folder = homes[0] / SAMPLES_FOLDER if homes else Path(SAMPLES_FOLDER)
    is_one_run = len(targets) == 1 and targets[0].folder is not None and targets[0].strength is None
    if is_one_run and not (compare and targets[0].step is not None):
        run, variants = _run_variants(
            run, targets[0], "all" if compare and steps is None else steps
        )
        base_weights = _base_weights(variants) if model is None and run.adapter else ""
        return SampleTargets(run, tuple(variants), folder, base_weights)
    if steps is not None:
        raise ConfigError(
            f"--at is {steps}, but steps can be chosen for a single run only. Name its folder "
            "alone, for example: gracetune sample runs/x --at 500,1000"
        )
    if not targets:
        return SampleTargets(run, (Variant("base model", "base"),), folder)
    adapters = [_adapter_of(target) for target in targets]
    labels = _labels(targets)
    if compare:
        variants = [
            Variant(label, _file_name(label), adapters=(files,))
            for label, files in zip(labels, adapters, strict=True)
        ]
    else:
        joined = " + ".join(labels)
        variants = [Variant(joined, _file_name(joined), adapters=tuple(adapters))]
    return SampleTargets(run, tuple(variants), folder)


# Runs and their steps


def _run_variants(
    run: RunFile, target: _Target, steps: str | None
) -> tuple[RunFile, list[Variant]]:
    folder = target.folder
    assert folder is not None
    available = _steps_of(folder, run)
    if target.step is not None:
        steps = steps or str(target.step)
    if steps is None and not available:
        return _result_variant(run, folder)
    if steps is None:
        chosen = [max(available)]
    elif steps == "all":
        chosen = sorted(available)
        if not chosen:
            raise _no_steps(folder, run)
    else:
        chosen = _parse_steps(steps)
    base = Variant("before training", f"step-{BASE_STEP:06d}", is_run=True)
    missing = [step for step in chosen if step not in available and step != BASE_STEP]
    if missing:
        known = ", ".join(map(str, sorted(available))) or "none"
        raise ConfigError(
            f"--at is {steps}, but {folder} has no step {missing[0]}. It has: {known}; 0 is the "
            "model before training."
        )
    # The model before training comes first: checkpoints of a whole model replace its weights.
    return run, [base if step == BASE_STEP else available[step] for step in sorted(set(chosen))]


def _steps_of(folder: Path, run: RunFile) -> dict[int, Variant]:
    """Return the steps of a run that can be sampled: checkpoints, or else their adapters."""
    from gracetune.train.checkpoint import CHECKPOINT_FOLDER, complete_checkpoints, saved_adapters

    found = {}
    if run.adapter is not None:
        for step, path in saved_adapters(folder).items():
            files = AdapterFiles(_files_in(path))
            found[step] = Variant(f"step {step}", f"step-{step:06d}", adapters=(files,))
    for path in complete_checkpoints(folder / CHECKPOINT_FOLDER):
        step = int(path.name.removeprefix("step-"))
        found[step] = Variant(f"step {step}", path.name, checkpoint=path, is_run=True)
    return found


def _base_weights(variants: Sequence[Variant]) -> str:
    """Return the digest of the weights before training that the checkpoints of a run name."""
    checkpoints = [variant.checkpoint for variant in variants if variant.checkpoint is not None]
    identities = (read_identity(checkpoint / MANIFEST) for checkpoint in checkpoints)
    return next((str(found.get(WEIGHTS_KEY, "")) for found in identities), "")


def _result_variant(run: RunFile, folder: Path) -> tuple[RunFile, list[Variant]]:
    """Return the exported result of a run whose checkpoints are gone."""
    from gracetune.train.export import result_folder

    result = folder / result_folder(run).name
    if not result.is_dir():
        raise _no_steps(folder, run)
    if run.adapter is not None:
        files = AdapterFiles(_files_in(result))
        return run, [Variant("result", "result", adapters=(files,))]
    section = ModelSection(family=run.model.family, path=str(result), dtype=run.model.dtype)
    return run.model_copy(update={"model": section}), [Variant("result", "result")]


def _no_steps(folder: Path, run: RunFile) -> ConfigError:
    every = run.train.checkpoint_every
    when = f"every {every} steps and at the end" if every else "at the end"
    return ConfigError(
        f"{folder} has no checkpoint yet. The run saves one {when} "
        f"(train.checkpoint_every is {every}); `gracetune now save {folder}` asks a running one to "
        "save at once."
    )


def _parse_steps(text: str) -> list[int]:
    try:
        return [int(word.strip().removeprefix("step-")) for word in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--at is {text!r}; it must be `all`, or numbers of steps such as 500,1000."
        ) from None


# Arguments


def _parse(text: str, read_run: Callable[[Path], RunFile]) -> _Target:
    path, strength = _split_strength(text)
    if path.suffix in RUN_FILE_SUFFIXES and path.is_file():
        loaded = read_run(path)
        folder = Path(loaded.output_dir)
        return _Target(text, loaded, folder, None, (), strength, folder)
    if path.is_file():
        run, home = _run_around(path)
        return _Target(text, run, None, None, (path,), strength, home)
    if not path.is_dir():
        raise ConfigError(
            f"{text} does not exist. Give the folder of a run, a run file, or an adapter file, "
            "which may be followed by a strength as in lora.safetensors:0.8."
        )
    run = _read_record(path)
    if run is not None:
        return _Target(text, run, path, None, (), strength, path)
    number = path.name.removeprefix("step-")
    owner = path.resolve().parent
    if number.isdecimal() and owner.name in STEP_FOLDERS:
        run = _read_record(owner.parent)
        if run is not None:
            folder = path.parent.parent
            return _Target(text, run, folder, int(number), (), strength, folder)
    if any((path / name).exists() for name in ("model_index.json", "transformer", "unet")):
        raise ConfigError(
            f"{text} is the folder of a model. Name it as --model FAMILY={path}, for example "
            f"--model flux={path}."
        )
    run, home = _run_around(path)
    return _Target(text, run, None, None, _files_in(path), strength, home)


def _split_strength(text: str) -> tuple[Path, float | None]:
    """Split `lora.safetensors:0.8` into the path and the strength, which is None if not given."""
    before, colon, after = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), None
    with suppress(ValueError):
        if math.isfinite(strength := float(after)):
            return Path(before), strength
    raise ConfigError(
        f"{text}: the strength after the colon is {after!r}, which is not a finite number. Write "
        "it as in lora.safetensors:0.8."
    )


def _parse_model(text: str) -> ModelSection:
    family, _, path = text.partition("=")
    known = entry_points.names("family", {name: info.module for name, info in FAMILIES.items()})
    if family not in known:
        close = difflib.get_close_matches(family, known, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"--model is {text}, but {family!r} is not a family. {hint}Write FAMILY=PATH, with one "
            f"of: {', '.join(known)}."
        )
    return ModelSection(family=family, path=path or None)


def _read_record(folder: Path) -> RunFile | None:
    """Return the settings that a run has written to its folder, or None."""
    for name in RUN_RECORDS:
        if (folder / name).is_file():
            return load_settings(folder / name)
    return None


def _run_around(path: Path) -> tuple[RunFile | None, Path | None]:
    """Return the run in whose folder a file is, and that folder; None if there is none."""
    for parent in (*list(path.parents)[:4], *list(path.resolve().parents)[:4]):
        if (parent / STEP_FOLDERS[0]).is_dir():
            run = _read_record(parent)
            return run, None if run is None else parent
    return None, None


def _files_in(folder: Path) -> tuple[Path, ...]:
    """Return the adapter files in a folder: one, or one for each expert."""
    from gracetune.adapters.files.checkpoint_weights import CHECKPOINT_ADAPTER, is_checkpoint
    from gracetune.adapters.files.io import STAGE_IN_NAME

    if is_checkpoint(folder):
        folder = folder / CHECKPOINT_ADAPTER
    for name in FIXED_NAMES:
        if (folder / name).is_file():
            return (folder / name,)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} has neither the settings of a run (run.json) nor an adapter file "
            "(.safetensors). Give the folder of a run, or an adapter file."
        )
    if len(files) > 1 and not all(STAGE_IN_NAME.search(file.stem) for file in files):
        names = ", ".join(file.name for file in files[:8])
        raise ConfigError(
            f"{folder} has {len(files)} adapter files ({names}). Name those that you want; several "
            "are added, each times its strength."
        )
    return tuple(files)


def _adapter_of(target: _Target) -> AdapterFiles:
    """Return the adapter of a target that is combined or compared with others."""
    strength = 1.0 if target.strength is None else target.strength
    if target.folder is None:
        return AdapterFiles(target.files, strength)
    assert target.run is not None
    if target.run.adapter is None:
        raise ConfigError(
            f"{target.text} is a run that trains the whole model, so it has no adapter to combine "
            "with others or to scale. Sample it alone."
        )
    from gracetune.train.checkpoint import saved_adapters

    adapters = saved_adapters(target.folder)
    step = target.step if target.step is not None else max(adapters, default=None)
    if step is None or step not in adapters:
        raise _no_steps(target.folder, target.run)
    return AdapterFiles(_files_in(adapters[step]), strength)


def _labels(targets: Sequence[_Target]) -> list[str]:
    """Return a short name of each target: as few last parts of its path as make all differ."""
    paths = [_label_path(target) for target in targets]
    strengths = ["" if t.strength is None else f":{t.strength:g}" for t in targets]
    labels: list[str] = []
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        parts = [Path(*path.parts[-count:]) for path in paths]
        labels = [f"{path}{strength}" for path, strength in zip(parts, strengths, strict=True)]
        if len(set(labels)) == len(labels):
            break
    return labels


def _label_path(target: _Target) -> Path:
    """Return the path that labels a target, without names that the files of all runs have."""
    path = _split_strength(target.text)[0].absolute()
    if path.name in FIXED_NAMES:
        path = path.parent
    if path.name == "adapter":
        path = path.parent
    return path.with_suffix("") if path.suffix == ".safetensors" else path


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in label).strip("-.")[:80]
