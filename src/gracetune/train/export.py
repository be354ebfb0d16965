"""The result of a run, in the form that others load."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from blake3 import blake3

from gracetune.atomic_files import atomic_folder
from gracetune.errors import CheckpointError, ConfigError
from gracetune.events.types import Notice
from gracetune.models.family import key_tables, transformers_of
from gracetune.optim.schedule import averaged_weights
from gracetune.train.identity import identity_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from gracetune.adapters.inject import ModuleSettings
    from gracetune.config.schema import RunFile
    from gracetune.events.types import Event
    from gracetune.train.step import TrainState

    Emit = Callable[[Event], None]
    AdaptedModules = Mapping[str, Mapping[str, ModuleSettings]]

STAGE_FILES = {"high": "high_noise.safetensors", "low": "low_noise.safetensors"}


def result_folder(run: RunFile) -> Path:
    """The folder that a run ends with."""
    return Path(run.output_dir) / ("model" if run.adapter is None else "adapter")


def check_exportable(transformers: Mapping[str, nn.Module], modules: AdaptedModules, family: str) -> None:
    """Refuse an adapter that no file could hold: now, not when it is trained."""
    # peft takes seconds to import
    from gracetune.adapters.files.convert import find_unsupported
    from gracetune.adapters.files.io import default_format
    from gracetune.adapters.files.keys import get_table
    from gracetune.adapters.inject import adapter_from_model

    whole = adapter_from_model(transformers, modules, get_table(family, key_tables()))
    form = default_format(whole)
    lost = find_unsupported(whole, form)
    if lost is not None:
        kind = "" if lost.is_nameless else ", or choose another adapter.kind"
        raise ConfigError(
            f"adapter.targets means {lost.module} of {family}, and what is trained there cannot be "
            f"written in the form {form.name}: {lost.reason}. Leave it out of adapter.targets{kind}."
        )


def export_result(t: TrainState, modules: AdaptedModules, base_weights: str, emit: Emit) -> Path:
    """Write the model or the adapter, with the averaged weights where there are any."""
    adapter, path = t.run.adapter, result_folder(t.run)
    try:
        with (
            t.ema.swapped_in() if t.ema is not None else averaged_weights(t.optimizer),
            atomic_folder(path) as staging,
        ):
            if adapter is None:
                t.family.export(staging)
            else:
                _export_adapter(t, modules, base_weights, staging, emit)
    except OSError as error:
        raise CheckpointError(
            f"the result {path} cannot be written: {error}. The last checkpoint holds the same "
            "weights; make room and start again to export them."
        ) from error
    return path


def _export_adapter(
    t: TrainState, modules: AdaptedModules, base_weights: str, folder: Path, emit: Emit
) -> None:
    """One file an expert, or one in all; each is loaded where others would load it, and counted."""
    # peft takes seconds to import
    from gracetune.adapters.files.check import check_file
    from gracetune.adapters.files.io import (
        FILE_NAME,
        AdapterMetadata,
        default_format,
        write_adapter,
    )
    from gracetune.adapters.files.keys import get_table
    from gracetune.adapters.files.layers import with_stage
    from gracetune.adapters.inject import adapter_from_model

    tables = key_tables()
    table = get_table(t.family.name, tables)
    whole = adapter_from_model(transformers_of(t.family.transformer), modules, table)
    form = default_format(whole)
    for stage in whole.stages:
        about = AdapterMetadata(
            base_model=f"{_model_name(t)} {base_weights}",
            stage=stage,
            boundary=t.family.boundary,
            trigger=t.run.datasets[0].instance_prompt or "",
            run_digest=run_digest(t),
        )
        part = with_stage(whole.select_stage(stage), None)
        name = FILE_NAME if stage is None else STAGE_FILES[stage]
        path = write_adapter(folder / name, part, form, about)
        expected = modules[stage or ""]
        check = check_file(path, tables, table=table, stage=stage, modules=expected)
        text = f"{name} is of the form {form.name}. " + " ".join(check.lines())
        emit(Notice(text, level="info" if check.ok else "warning"))


def _model_name(t: TrainState) -> str:
    """What the model is called where it came from, without the machine's folders."""
    path = t.run.model.path
    return t.family.name if path is None else PurePath(path).name


def run_digest(t: TrainState) -> str:
    """A name for what shapes the weights: the same wherever the run's folder is."""
    settings = identity_settings(t.run, t.accelerator.mixed_precision)
    text = json.dumps(settings, sort_keys=True, default=str)
    return blake3(text.encode()).hexdigest(length=16)
