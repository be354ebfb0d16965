"""Extend ai-toolkit's trainers by overriding the methods that it calls as hooks."""

from __future__ import annotations

import functools
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gracetune.errors import AdapterError, ConfigError
from gracetune.optim.build import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from gracetune.adapters.files.keys import Stage
    from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin

    Notify = Callable[[str], None]


STAGE_OF_TRANSFORMER: dict[str, Stage] = {
    "transformer_1": "high",
    "transformer_2": "low",
    "transformer1": "high",
    "transformer2": "low",
}
"""Part of a module's name -> the transformer of Wan 2.2 that has it, `high` or `low` noise. The
names without an underscore are those of the GH200 fork."""
FILE_SUFFIXES: dict[Stage, str] = {"high": "_high_noise", "low": "_low_noise"}
"""ai-toolkit's file name suffix for the adapter of one of the two transformers of Wan 2.2."""
UNCHECKABLE = ("unknown-key", "ambiguous", "mixed-stages")
"""Kinds of AdapterError that do not prove a file bad: gracetune may not know its key names."""
TYPES_WITHOUT_STAGES = ("one_step", "two_step", "four_step", "eight_step", "next_sample")
"""Values of timestep_type that draw from all timesteps, whichever transformer is trained."""
NUM_TIMESTEPS = 1000


def process_class(plugin: AIToolkitPlugin, original: type) -> type:
    """Return a subclass of an ai-toolkit trainer that applies gracetune's settings.

    Without such settings in its configuration, it behaves like the original.
    """

    class GracetuneProcess(original):  # type: ignore[misc]
        """An ai-toolkit trainer with gracetune's data in memory, optimizer and adapter checks."""

        def __init__(
            self, process_id: int, job: object, config: Mapping[str, object], **options: object
        ) -> None:
            rest, self.gracetune_blocks = plugin.split_config(config)
            if self.gracetune_blocks.check_saves and "network" in rest:
                check_peft()
            super().__init__(process_id, job, rest, **options)
            plugin.attach_datasets(self.gracetune_blocks, self.dataset_configs)
            if self.gracetune_blocks.optimizer is not None:
                self.train_config.optimizer_params = {"section": self.gracetune_blocks.optimizer}

        def before_dataset_load(self) -> None:
            super().before_dataset_load()
            plugin.stage_datasets(self.gracetune_blocks.datasets)

        def hook_add_extra_train_params(self, params: list[Any]) -> list[Any]:
            return group_by_stage(self, super().hook_add_extra_train_params(params))

        def hook_before_train_loop(self) -> None:
            super().hook_before_train_loop()
            restrict_timesteps(self)
            if saves_one_file_per_stage(self):
                # Module names that a save could not check are refused now, not after the training.
                modules_by_stage(self.network, trained_stage(self.sd))

        def process_general_training_batch(self, batch: Any) -> Any:
            processed = super().process_general_training_batch(batch)
            plugin.place_batch(self.gracetune_blocks, batch_tensors(batch, processed))
            return processed

        def save(self, step: int | None = None) -> None:
            super().save(step)
            check_saved(self, step, plugin.notify)

    functools.update_wrapper(GracetuneProcess, original, updated=())
    return GracetuneProcess


# Parameters and their stages: Wan 2.2 has one expert for high and one for low noise


def group_by_stage(process: Any, params: list[Any]) -> list[Any]:
    """Group parameters by transformer (Wan 2.2 has two), for gracetune's optimizer.

    For an optimizer of ai-toolkit they are returned unchanged.
    """
    section = process.gracetune_blocks.optimizer
    if section is None:
        return params
    named = names_by_stage(params, process.network, trained_stage(process.sd))
    groups = parameter_groups(named, section)
    return [{**each, "params": [p for _, p in each["params"]]} for each in groups]


def trained_stage(model: Any) -> Stage | None:
    """Return `high` or `low` if only that transformer of Wan 2.2 is trained, else None.

    In that case the names of parameters do not show the transformer.
    """
    if not model.is_multistage:
        return None
    trained: list[int] = model.trainable_multistage_boundaries
    order: list[Stage] = list(STAGE_OF_TRANSFORMER.values())
    return order[trained[0]] if len(trained) == 1 else None


def names_by_stage(
    params: Iterable[Any], network: Any, only_stage: Stage | None
) -> dict[str, Parameter]:
    """Return the parameters by name; names begin with `high` or `low` for Wan 2.2.

    The prefix is the transformer: `only_stage`, or the one that the name of the parameter shows.
    """
    names = {id(p): name for name, p in network.named_parameters()} if network is not None else {}
    found: dict[str, Parameter] = {}
    for group in params:
        for p in group["params"] if isinstance(group, dict) else [group]:
            name = names.get(id(p), f"extra.{len(found)}")
            stage = only_stage or next(
                (STAGE_OF_TRANSFORMER[each] for each in STAGE_OF_TRANSFORMER if each in name), None
            )
            found[name if stage is None else f"{stage}.{name}"] = p
    return found


def batch_tensors(batch: Any, processed: Sequence[object]) -> dict[str, object]:
    """Return the tensors of a batch by name, for `AIToolkitPlugin.place_batch`."""
    found = {name: value for name, value in vars(batch).items() if name != "file_items"}
    embeds = found.get("prompt_embeds")
    if embeds is not None:
        found["prompt_embeds"] = vars(embeds)
    return {**found, "latent_batch": processed[0]}


# Saved adapters


def check_peft() -> None:
    """Raise if peft refuses ai-toolkit's torchao, without which no saved adapter can be checked."""
    from peft.import_utils import is_torchao_available

    try:
        is_torchao_available()
    except ImportError as error:
        raise ConfigError(
            f"gracetune.check_saves is true, but peft does not work with torchao here: {error}. "
            "Run `pip install torchao==0.17.0`, or set gracetune.check_saves: false."
        ) from error


def saves_adapters(process: Any) -> bool:
    """Return True if a save writes an adapter that is to be checked."""
    enabled: bool = process.gracetune_blocks.check_saves
    merged: bool = process.train_config.merge_network_on_save
    return enabled and process.network is not None and not merged


def saves_one_file_per_stage(process: Any) -> bool:
    """Return True if a save writes a file for each transformer of Wan 2.2, to be checked."""
    split = process.sd.is_multistage and process.network_config.split_multistage_loras
    return saves_adapters(process) and bool(split)


def check_saved(process: Any, step: int | None, notify: Notify) -> None:
    """Read a saved adapter back and count its modules, so no run ends with an empty file."""
    if not saves_adapters(process) or not process.accelerator.is_main_process:
        return
    name = process.job.name + ("_LoRA" if process.named_lora else "")
    number = "" if step is None else f"_{step:09d}"
    stem = os.path.join(process.save_root, f"{name}{number}")
    if not saves_one_file_per_stage(process):
        check_saved_file(Path(f"{stem}.safetensors"), None, None, notify)
        return
    for stage, modules in modules_by_stage(process.network, trained_stage(process.sd)).items():
        path = Path(f"{stem}{FILE_SUFFIXES[stage]}.safetensors")
        check_saved_file(path, stage, modules, notify)


def check_saved_file(
    path: Path, stage: Stage | None, modules: list[str] | None, notify: Notify
) -> None:
    """Check one adapter file and report the result; raise if it is bad.

    `stage` is `high` or `low` for the file of one transformer of Wan 2.2. Other files whose key
    names gracetune does not know, or that mix both transformers, are reported as unchecked.
    """
    from gracetune.adapters.files.check_loading import check_file
    from gracetune.models.family import key_tables

    try:
        found = check_file(path, key_tables(), stage=stage, modules=modules)
    except AdapterError as error:
        if stage is not None or error.kind not in UNCHECKABLE:
            raise
        notify(f"warning: {path} was not checked: {error}")
        return
    found.raise_if_failed()
    notify(f"{path} holds {found.expected} modules. {' '.join(found.lines())}")


def modules_by_stage(network: Any, only_stage: Stage | None) -> dict[Stage, list[str]]:
    """Return diffusers' names of the trained modules, for each transformer: `high`, `low`."""
    found: dict[Stage, list[str]] = {}
    for module in network.get_all_modules():
        parts = str(module.lora_name).split("$$")
        stage = next(
            (STAGE_OF_TRANSFORMER[each] for each in parts if each in STAGE_OF_TRANSFORMER),
            only_stage,
        )
        if len(parts) == 1 or stage is None:
            raise ConfigError(
                f"the adapter has a module {module.lora_name!r}, whose name does not tell the "
                "expert. Set network.old_lokr_format: false and network.type: lora or lokr, or "
                "gracetune.check_saves: false."
            )
        skipped = ("transformer", *STAGE_OF_TRANSFORMER)
        found.setdefault(stage, []).append(".".join(p for p in parts if p not in skipped))
    return found


# Timesteps of one expert
#
# For the stage below a boundary, ai-toolkit's window of timesteps begins at the last timestep
# *above* the boundary. So one draw in some hundreds goes to the other expert, which gets a gradient
# of the wrong stage, or has none if only one expert is trained. ai-toolkit computes the window from
# `multistage_boundaries`, so it is given a boundary that results in the right window.


def restrict_timesteps(process: Any) -> None:
    """Make ai-toolkit draw only timesteps of the transformer being trained, for Wan 2.2.

    Its high-noise and low-noise transformers (stages) split the timesteps at a boundary. The
    boundary is corrected whenever the scheduler makes timesteps.
    """
    model = process.sd
    if not (process.gracetune_blocks.stage_timesteps and model.is_multistage):
        return
    check_timestep_type(process.train_config.timestep_type)
    scheduler, boundaries = model.noise_scheduler, list(model.multistage_boundaries)

    def set_train_timesteps(original: Any, *args: object, **options: object) -> object:
        result = original(*args, **options)
        stage = process.current_boundary_index
        model.multistage_boundaries = stage_boundaries(scheduler.timesteps, boundaries, stage)
        return result

    scheduler.set_train_timesteps = partial(set_train_timesteps, scheduler.set_train_timesteps)


def stage_boundaries(timesteps: Tensor, boundaries: Sequence[float], stage: int) -> list[float]:
    """Return boundaries with which ai-toolkit draws timesteps of one transformer only.

    `stage` is the index of the transformer: 0 is high noise, with the timesteps above the first
    boundary. `timesteps` fall from 1000.
    """
    limits = [1.0, *boundaries]
    first = int((timesteps > limits[stage] * NUM_TIMESTEPS).sum()) if stage else 0
    end = int((timesteps > limits[stage + 1] * NUM_TIMESTEPS).sum())
    if end <= first:
        raise ConfigError(
            f"train.timestep_type made no timestep between {limits[stage] * NUM_TIMESTEPS:g} and "
            f"{limits[stage + 1] * NUM_TIMESTEPS:g}, which stage {stage} of the model trains on. "
            "Set timestep_type: linear, or shift."
        )
    if stage == 0:
        return list(boundaries)
    # ai-toolkit's window begins at the last timestep that is not below the boundary.
    corrected = list(boundaries)
    corrected[stage - 1] = float(timesteps[first]) / NUM_TIMESTEPS
    return corrected


def check_timestep_type(timestep_type: str) -> None:
    """Raise for a timestep_type that ignores which transformer of Wan 2.2 is being trained."""
    if timestep_type in TYPES_WITHOUT_STAGES:
        raise ConfigError(
            f"train.timestep_type is {timestep_type}, which draws timesteps of both experts, "
            "whichever is being trained. Set timestep_type: shift, sigmoid or linear, or "
            "gracetune.stage_timesteps: false."
        )
