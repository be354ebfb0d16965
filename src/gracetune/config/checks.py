"""What must hold between the settings of a run file, where no one section can see it.

Each rule is a small pure function from a run to the breaches it finds. What only hardware, files or
the number of ranks can tell is checked by those who know them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.schema import STAGED, InMemorySection
from gracetune.errors import ConfigError
from gracetune.models.registry import FAMILIES
from gracetune.optim.registry import OPTIMIZERS, optimizer_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.config.schema import RunFile, Section


class Breach(NamedTuple):
    """A setting that does not go with the others."""

    key: str
    message: str
    """Follows the key: its value, the rule and the way out."""


def breaches(run: RunFile) -> list[Breach]:
    """Everything that any run must keep to and this one does not."""
    return [breach for rule in RULES for breach in rule(run)]


def check_trainable(run: RunFile) -> None:
    """Also ask for what training needs and a fragment of a run file may lack."""
    found = [*breaches(run), *(breach for rule in TRAINING_RULES for breach in rule(run))]
    if found:
        raise ConfigError("\n".join(f"{breach.key} {breach.message}" for breach in found))


def _ramp(run: RunFile) -> Iterator[Breach]:
    ramp = run.gh200_optimizations
    if not ramp.enable_batch_size_rampup:
        return
    section = "gh200_optimizations"
    initial, target = ramp.initial_effective_batch_size, ramp.target_effective_batch_size
    if initial is None:
        yield Breach(
            f"{section}.enable_batch_size_rampup",
            f"is true, but {section}.initial_effective_batch_size is missing; "
            "say how many samples the first steps take.",
        )
    batch = run.train.batch_size
    if target is not None and target < batch:
        yield Breach(
            f"{section}.target_effective_batch_size",
            f"is {target}; it must be at least train.batch_size ({batch}). "
            "Raise the target or lower the batch size.",
        )
    if initial is not None and target is not None and initial > target:
        yield Breach(
            f"{section}.initial_effective_batch_size",
            f"is {initial}; it must be at most target_effective_batch_size ({target}). "
            "Lower the one or raise the other.",
        )


def _warmup(run: RunFile) -> Iterator[Breach]:
    optimizer, steps = run.optimizer, run.train.max_train_steps
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= steps:
        yield Breach(
            "optimizer.warmup_steps",
            f"is {optimizer.warmup_steps}; with schedule {optimizer.schedule} it must be below "
            f"train.max_train_steps ({steps}), or the rate never falls. "
            "Shorten the warm-up, or set optimizer.schedule: constant.",
        )


def _timesteps(run: RunFile) -> Iterator[Breach]:
    low, high = run.train.timestep_window
    if low >= high:
        yield Breach(
            "train.timestep_window",
            f"is [{low:g}, {high:g}]; the first must be below the second.",
        )


def _automagic(run: RunFile) -> Iterator[Breach]:
    settings = run.optimizer.model_dump()
    for owner, info in OPTIMIZERS.items():
        for key in info.settings if run.optimizer.name != owner else ():
            if settings[key] is not None:
                yield Breach(
                    f"optimizer.{key}",
                    f"is {settings[key]:g}; only {owner} has this setting, and optimizer.name is "
                    f"{run.optimizer.name}. Remove it, or set optimizer.name: {owner}.",
                )
    for stage in ("", "high_noise_", "low_noise_"):
        low_key = f"{stage}min_lr" if settings[f"{stage}min_lr"] is not None else "min_lr"
        high_key = f"{stage}max_lr" if settings[f"{stage}max_lr"] is not None else "max_lr"
        low, high = settings[low_key], settings[high_key]
        own = stage == "" or stage in low_key or stage in high_key
        if own and low is not None and high is not None and low > high:
            yield Breach(
                f"optimizer.{low_key}",
                f"is {low:g}; it must be at most optimizer.{high_key} ({high:g}). "
                "Lower the one or raise the other.",
            )


def trains_in_bf16(run: RunFile) -> bool:
    """Whether full training leaves weights in bf16, with fp32 of each in the optimizer's state."""
    return (
        run.adapter is None
        and run.model.dtype == "bfloat16"
        and optimizer_info(run.optimizer.name).state_can_be_split
        and not run.train.ema_decay  # a bf16 average is too coarse to move
    )


def _state(run: RunFile) -> Iterator[Breach]:
    name = run.optimizer.name
    reason = optimizer_info(name).whole_state_reason
    if run.optimizer.state == "host" and reason:
        able = ", ".join(each for each, info in OPTIMIZERS.items() if info.state_can_be_split)
        yield Breach(
            "optimizer.state",
            f"is host, which copies the state to the device piece by piece, but {name} {reason}. "
            f"Set optimizer.state: device, or use one of {able}.",
        )


def _betas(run: RunFile) -> Iterator[Breach]:
    for index, beta in enumerate(run.optimizer.betas):
        if beta == 1:
            yield Breach(
                f"optimizer.betas.{index}", "is 1; it must be below 1, or nothing is ever learnt."
            )


def _adapter(run: RunFile) -> Iterator[Breach]:
    if run.adapter is not None and run.adapter.targets == ():
        yield Breach(
            "adapter.targets",
            "is an empty list, so nothing would be trained; name modules, or leave it out for "
            "the family's own choice.",
        )


def _fp8(run: RunFile) -> Iterator[Breach]:
    if run.model.frozen_compute != "fp8":
        return
    reason = ""
    if run.adapter is None:
        reason = "without an adapter every weight is trained, and none is frozen"
    elif run.adapter.kind == "dora":
        reason = "adapter.kind dora measures the frozen weights in every step"
    elif run.model.quantize != "none":
        reason = f"model.quantize {run.model.quantize} has stored them in its own way"
    if reason:
        yield Breach("model.frozen_compute", f"is fp8, but {reason}; set it to bf16.")


def _datasets(run: RunFile) -> Iterator[Breach]:
    counts = Counter(dataset.id for dataset in run.datasets)
    for index, dataset in enumerate(run.datasets):
        key = f"datasets.{index}"
        if counts[dataset.id] > 1:
            yield Breach(
                f"{key}.id",
                f"is {dataset.id!r}, as is another's; each data set needs an id of its own.",
            )
        if dataset.caption_strategy == "instanceprompt" and dataset.instance_prompt is None:
            yield Breach(
                f"{key}.caption_strategy",
                f"is instanceprompt, but {key}.instance_prompt is missing; "
                "write the caption that every sample gets.",
            )
        if dataset.bucket_step is not None and dataset.bucket_step > dataset.resolution:
            yield Breach(
                f"{key}.bucket_step",
                f"is {dataset.bucket_step}; it must be at most {key}.resolution "
                f"({dataset.resolution}).",
            )


def _persistence(run: RunFile) -> Iterator[Breach]:
    said = [dataset.cache_latents_to_disk for dataset in run.datasets]
    persistent = run.cache_config.persistent_cache
    if any(value is not None for value in said) and any(said) != persistent:
        index = next(index for index, value in enumerate(said) if value is not None)
        yield Breach(
            f"datasets.{index}.cache_latents_to_disk",
            f"is {str(said[index]).lower()}, but cache_config.persistent_cache is "
            f"{str(persistent).lower()}; both say whether the cache stays. Keep one of them.",
        )


def _validation(run: RunFile) -> Iterator[Breach]:
    if run.validation.prompts == ():
        yield Breach(
            "validation.prompts",
            "is an empty list; name prompts, leave it out for captions of the data set, or set "
            "validation.every: 0 for no pictures.",
        )
    if run.validation.holdout == 1:
        yield Breach(
            "validation.holdout", "is 1, which leaves no sample to train on; lower it below 1."
        )


def _some_data(run: RunFile) -> Iterator[Breach]:
    if not run.datasets:
        yield Breach(
            "datasets", "is empty; training needs one, with its folder as instance_data_dir."
        )
    for index, dataset in enumerate(run.datasets):
        if dataset.instance_data_dir is None:
            yield Breach(
                f"datasets.{index}.instance_data_dir",
                f"is missing; say which folder the data set {dataset.id!r} is in.",
            )


RULES: tuple[Callable[[RunFile], Iterator[Breach]], ...] = (
    _ramp,
    _warmup,
    _timesteps,
    _automagic,
    _state,
    _betas,
    _adapter,
    _fp8,
    _datasets,
    _persistence,
    _validation,
)
TRAINING_RULES: tuple[Callable[[RunFile], Iterator[Breach]], ...] = (_some_data,)


# ------------------------------------------------------------------------------------------
# What a run file may say without any effect, or without what was probably meant by it.
#
# Each remark is a small pure function from a run to the sentences it has to say.


RAMP_KEYS = (
    "initial_effective_batch_size",
    "target_effective_batch_size",
    "batch_rampup_steps",
    "rampup_shape",
)


def remarks(run: RunFile) -> list[str]:
    """What is allowed, and probably not meant."""
    return [remark for rule in REMARKS for remark in rule(run)]


def _idle_ramp(run: RunFile) -> Iterator[str]:
    ramp = run.gh200_optimizations
    initial = ramp.initial_effective_batch_size
    section = "gh200_optimizations"
    if not ramp.enable_batch_size_rampup:
        for key in RAMP_KEYS:
            if _differs(ramp, key):
                yield (
                    f"{section}.{key} is {getattr(ramp, key)} but has no effect: "
                    f"{section}.enable_batch_size_rampup is false."
                )
    if ramp.enable_batch_size_rampup and initial is not None and initial < run.train.batch_size:
        yield (
            f"{section}.initial_effective_batch_size is {initial}, but one micro-batch already "
            f"has {run.train.batch_size} samples (train.batch_size): the ramp begins there."
        )


def _idle_staging(run: RunFile) -> Iterator[str]:
    for index, dataset in enumerate(run.datasets):
        if dataset.in_memory != InMemorySection() and dataset.type not in STAGED:
            yield (
                f"datasets.{index}.in_memory has no effect: datasets.{index}.type is "
                f"{dataset.type}, which is read where it is. Set it to in_memory."
            )


def _idle_caching(run: RunFile) -> Iterator[str]:
    kept = [index for index, data in enumerate(run.datasets) if data.cache_latents_to_disk]
    for index, dataset in enumerate(run.datasets):
        mode, changes = dataset.augmentations_cache_mode, bool(dataset.augmentations)
        changes = changes or "random" in (dataset.crop, dataset.clip)
        if mode is not None and not changes:
            yield (
                f"datasets.{index}.augmentations_cache_mode has no effect: nothing of its samples "
                "is drawn at random."
            )
        if mode == "disable_cache" and changes and run.cache_config.persistent_cache:
            yield (
                f"datasets.{index}.augmentations_cache_mode is disable_cache: of its samples only "
                "captions are kept in the persistent cache."
            )
        if dataset.cache_latents_to_disk is False and kept:
            yield (
                f"datasets.{index}.cache_latents_to_disk is false but has no effect: a run has one "
                f"cache, which datasets.{kept[0]} keeps."
            )


def _idle_holdout(run: RunFile) -> Iterator[str]:
    if run.validation.holdout > 0 and run.validation.every == 0:
        yield (
            f"validation.holdout {run.validation.holdout:g} keeps samples out of training, but "
            "validation.every is 0: nothing measures them."
        )


def _idle_family(run: RunFile) -> Iterator[str]:
    info = FAMILIES.get(run.model.family)
    if info is None:  # a family of another package may use any setting
        return
    optional = frozenset[str]().union(*(each.settings for each in FAMILIES.values()))
    for setting in sorted(optional - info.settings):
        name, key = setting.split(".")
        if _differs(run.model if name == "model" else run.train, key):
            yield f"{setting} has no effect: model.family {run.model.family} does not use it."


def _idle_adapter(run: RunFile) -> Iterator[str]:
    if run.adapter is None or run.adapter.kind == "lokr":
        return
    for key in ("factor", "full_matrix"):
        if _differs(run.adapter, key):
            yield f"adapter.{key} has no effect: adapter.kind is {run.adapter.kind}, not lokr."


KIND_SETTINGS = {
    "frames": ("video",),
    "fps": ("video",),
    "sample_rate": ("audio",),
    "channels": ("audio",),
    "seconds": ("audio",),
    "clip": ("video", "audio"),
}
"""Of data sets: which kinds of sample have a setting that not all have."""


def _idle_kind(run: RunFile) -> Iterator[str]:
    for index, dataset in enumerate(run.datasets):
        kind = dataset.dataset_type
        for key, kinds in KIND_SETTINGS.items():
            if kind not in kinds and _differs(dataset, key):
                yield f"datasets.{index}.{key} has no effect: its dataset_type is {kind}."
    if run.datasets:
        is_sound = run.datasets[0].dataset_type == "audio"
        for key in ("width", "height", "frames") if is_sound else ("seconds",):
            if _differs(run.validation, key):
                yield (
                    f"validation.{key} has no effect: samples are {'' if is_sound else 'no '}"
                    "sounds, as those of the first data set."
                )


def _differs(section: Section, key: str) -> bool:
    """From what holds where nothing is said."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _idle_optimizer(run: RunFile) -> Iterator[str]:
    for key, note in optimizer_info(run.optimizer.name).setting_notes.items():
        if key in run.optimizer.model_fields_set:
            yield f"optimizer.{key} {note}"


REMARKS: tuple[Callable[[RunFile], Iterator[str]], ...] = (
    _idle_ramp,
    _idle_staging,
    _idle_caching,
    _idle_holdout,
    _idle_family,
    _idle_adapter,
    _idle_kind,
    _idle_optimizer,
)
