"""ai-toolkit's own trainers, extended where they invite it: each method calls theirs."""

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

    from torch.nn import Parameter

    from gracetune.adapters.files.keys import Stage
    from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin

    Say = Callable[[str], None]
    from torch import Tensor


STAGE_OF_TRANSFORMER: dict[str, Stage] = {"transformer_1": "high", "transformer_2": "low"}
"""How names tell the expert, of two."""
FILE_SUFFIXES: dict[Stage, str] = {"high": "_high_noise", "low": "_low_noise"}
"""What ai-toolkit adds to the name of a file for one expert."""
UNCHECKABLE = ("unknown-key", "ambiguous", "mixed-stages")


def process_class(plugin: AIToolkitPlugin, original: type) -> type:
    """A trainer of ai-toolkit's with our parts; without keys of ours it is as it was."""

    class GracetuneProcess(original):  # type: ignore[misc]
        """See `process_class`."""

        def __init__(
            self, process_id: int, job: object, config: Mapping[str, object], **options: object
        ) -> None:
            rest, self.gracetune_blocks = plugin.split_config(config)
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
                # What could not be checked after a day of training is refused before it.
                modules_by_stage(self.network, trained_stage(self.sd))

        def process_general_training_batch(self, batch: Any) -> Any:
            made = super().process_general_training_batch(batch)
            plugin.place_batch(self.gracetune_blocks, batch_tensors(batch, made))
            return made

        def save(self, step: int | None = None) -> None:
            super().save(step)
            check_saved(self, step, plugin.notify)

    functools.update_wrapper(GracetuneProcess, original, updated=())
    return GracetuneProcess


def group_by_stage(process: Any, params: list[Any]) -> list[Any]:
    """Parameters by stage, for our optimizer; for ai-toolkit's as they were."""
    section = process.gracetune_blocks.optimizer
    if section is None:
        return params
    named = names_by_stage(params, process.network, trained_stage(process.sd))
    groups = parameter_groups(named, section)
    return [{**each, "params": [p for _, p in each["params"]]} for each in groups]


def trained_stage(model: Any) -> Stage | None:
    """The one expert that is trained, of two: names do not tell it then."""
    if not model.is_multistage:
        return None
    trained: list[int] = model.trainable_multistage_boundaries
    order: list[Stage] = list(STAGE_OF_TRANSFORMER.values())
    return order[trained[0]] if len(trained) == 1 else None


def names_by_stage(params: Iterable[Any], network: Any, only: Stage | None) -> dict[str, Parameter]:
    """Every parameter by a name that begins with its stage."""
    names = {id(p): name for name, p in network.named_parameters()} if network is not None else {}
    found: dict[str, Parameter] = {}
    for group in params:
        for p in group["params"] if isinstance(group, dict) else [group]:
            name = names.get(id(p), f"extra.{len(found)}")
            stage = only or next(
                (STAGE_OF_TRANSFORMER[each] for each in STAGE_OF_TRANSFORMER if each in name), None
            )
            found[name if stage is None else f"{stage}.{name}"] = p
    return found


def restrict_timesteps(process: Any) -> None:
    """Whenever timesteps are made, say which of them the stage at work may draw."""
    model = process.sd
    if not (process.gracetune_blocks.stage_timesteps and model.is_multistage):
        return
    check_timestep_type(process.train_config.timestep_type)
    scheduler, boundaries = model.noise_scheduler, list(model.multistage_boundaries)

    def set_train_timesteps(original: Any, *args: object, **options: object) -> object:
        made = original(*args, **options)
        stage = process.current_boundary_index
        model.multistage_boundaries = stage_boundaries(scheduler.timesteps, boundaries, stage)
        return made

    scheduler.set_train_timesteps = partial(set_train_timesteps, scheduler.set_train_timesteps)


def batch_tensors(batch: Any, made: Sequence[object]) -> dict[str, object]:
    """The tensors of a batch by names that the placement table knows."""
    found = {name: value for name, value in vars(batch).items() if name != "file_items"}
    embeds = found.get("prompt_embeds")
    if embeds is not None:
        found["prompt_embeds"] = vars(embeds)
    return {**found, "latent_batch": made[0]}


def saves_adapters(process: Any) -> bool:
    """Whether a save writes an adapter that is to be checked."""
    wanted: bool = process.gracetune_blocks.check_saves
    merged: bool = process.train_config.merge_network_on_save
    return wanted and process.network is not None and not merged


def saves_one_file_per_stage(process: Any) -> bool:
    """Whether it writes one for each expert."""
    split = process.sd.is_multistage and process.network_config.split_multistage_loras
    return saves_adapters(process) and bool(split)


def check_saved(process: Any, step: int | None, say: Say) -> None:
    """Read back what was just written, and count: a run must not end with a file of nothing."""
    if not saves_adapters(process) or not process.accelerator.is_main_process:
        return
    name = process.job.name + ("_LoRA" if process.named_lora else "")
    number = "" if step is None else f"_{step:09d}"
    stem = os.path.join(process.save_root, f"{name}{number}")
    if not saves_one_file_per_stage(process):
        check_saved_file(Path(f"{stem}.safetensors"), None, None, say)
        return
    for stage, modules in modules_by_stage(process.network, trained_stage(process.sd)).items():
        check_saved_file(Path(f"{stem}{FILE_SUFFIXES[stage]}.safetensors"), stage, modules, say)


def check_saved_file(path: Path, stage: Stage | None, modules: list[str] | None, say: Say) -> None:
    """One file; what we cannot read is not judged where only we may be to blame, and that is said.

    A file with both experts is no fault of the run's: it was asked for, and no tool loads it.
    """
    from gracetune.adapters.files.check import check_file
    from gracetune.models.family import key_tables

    try:
        found = check_file(path, key_tables(), stage=stage, modules=modules)
    except AdapterError as error:
        if stage is not None or error.kind not in UNCHECKABLE:
            raise
        say(f"warning: {path} was not checked: {error}")
        return
    found.raise_if_failed()
    say(f"{path} holds {found.expected} modules. {' '.join(found.lines())}")


def modules_by_stage(network: Any, only: Stage | None) -> dict[Stage, list[str]]:
    """What is trained of two experts, by the names of diffusers."""
    found: dict[Stage, list[str]] = {}
    for module in network.get_all_modules():
        parts = str(module.lora_name).split("$$")
        stage = next(
            (STAGE_OF_TRANSFORMER[each] for each in parts if each in STAGE_OF_TRANSFORMER), only
        )
        if len(parts) == 1 or stage is None:
            raise ConfigError(
                f"the adapter has a module {module.lora_name!r}, in a spelling that cannot be "
                "split into two experts. Set network.old_lokr_format: false and network.type: lora "
                "or lokr, or gracetune.check_saves: false."
            )
        skipped = ("transformer", *STAGE_OF_TRANSFORMER)
        found.setdefault(stage, []).append(".".join(p for p in parts if p not in skipped))
    return found


# ------------------------------------------------------------------------------------------
# Windows of timesteps that keep to one expert.
#
# For the stage below a boundary, ai-toolkit's window begins at the last timestep *above* it: one
# draw
# in some hundreds goes to the other expert, which gets a gradient in the wrong stage, or has none
# to
# give where only one is trained. Its window follows from its boundaries, so a boundary is handed to
# it from which the right window follows.


TYPES_WITHOUT_STAGES = ("one_step", "two_step", "four_step", "eight_step", "next_sample")
"""Ways of drawing that take no window at all."""
NUM_TIMESTEPS = 1000


def stage_boundaries(timesteps: Tensor, boundaries: Sequence[float], stage: int) -> list[float]:
    """Boundaries to be handed to ai-toolkit while it draws for one stage.

    `timesteps` fall from 1000; stage 0 ends above the first boundary, as the model itself decides.
    """
    found = [1.0, *boundaries]
    above = int((timesteps > found[stage] * NUM_TIMESTEPS).sum()) if stage else 0
    below = int((timesteps > found[stage + 1] * NUM_TIMESTEPS).sum())
    if below <= above:
        raise ConfigError(
            f"train.timestep_type made no timestep between {found[stage] * NUM_TIMESTEPS:g} and "
            f"{found[stage + 1] * NUM_TIMESTEPS:g}, which stage {stage} of the model trains on. Set "
            "timestep_type: linear, or shift."
        )
    if stage == 0:
        return list(boundaries)
    # The window begins at the last timestep that is not below what it is handed.
    changed = list(boundaries)
    changed[stage - 1] = float(timesteps[above]) / NUM_TIMESTEPS
    return changed


def check_timestep_type(timestep_type: str) -> None:
    """Some ways of drawing know no stages: with two experts they train the wrong one."""
    if timestep_type in TYPES_WITHOUT_STAGES:
        raise ConfigError(
            f"train.timestep_type is {timestep_type}, which draws for both experts at once and "
            "trains the one whose turn it is. Set timestep_type: shift, sigmoid or linear, or "
            "gracetune.stage_timesteps: false."
        )
