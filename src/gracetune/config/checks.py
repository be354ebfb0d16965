"""Check the settings of a run file against each other, across its sections.

A violation is a contradiction between settings, and stops the run. A remark is about a setting that
is allowed but has no effect, or probably not the intended one. `CHECKS` and `REMARKS` list the
functions that find them. Rules that depend on hardware, on files or on the number of ranks are
checked elsewhere, when those are known.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.dataset_schema import STAGED_TYPES, TRIGGER, InMemorySection
from gracetune.errors import REDACTED, ConfigError
from gracetune.models.registry import FAMILIES
from gracetune.optim.registry import OPTIMIZERS, optimizer_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.config.schema import RunFile
    from gracetune.config.schema_base import Section


class Violation(NamedTuple):
    """An error in a run file: a setting that contradicts other settings."""

    key: str
    """Dotted key of the setting, the subject of the error message."""
    message: str
    """Rest of the error message after `key`, such as "is 1; it must be below 1"."""


def find_violations(run: RunFile) -> list[Violation]:
    """Return all settings of a run file that contradict other settings, each with a message."""
    return [violation for check in CHECKS for violation in check(run)]


def check_run(run: RunFile) -> None:
    """Raise an error if settings contradict each other, or a dataset or its location is missing."""
    violations = [*find_violations(run), *_check_has_data(run)]
    if violations:
        raise ConfigError("\n".join(f"{key} {message}" for key, message in violations))


def find_remarks(run: RunFile) -> list[str]:
    """Return a sentence for each setting that has no effect, or an unexpected one."""
    return [remark for rule in REMARKS for remark in rule(run)]


def trains_in_bf16(run: RunFile) -> bool:
    """Return True if the run trains bf16 weights (without an adapter) with fp32 master copies."""
    return (
        run.adapter is None
        and run.model.dtype == "bfloat16"
        and optimizer_info(run.optimizer.name).state_can_be_split
        and not run.train.ema_decay  # a bf16 average is too coarse to move
    )


# Violations


def _check_ramp(run: RunFile) -> Iterator[Violation]:
    ramp = run.gh200_optimizations
    if not ramp.enable_batch_size_rampup:
        return
    section = "gh200_optimizations"
    initial, target = ramp.initial_effective_batch_size, ramp.target_effective_batch_size
    if initial is None:
        yield Violation(
            f"{section}.enable_batch_size_rampup",
            f"is true, but {section}.initial_effective_batch_size is missing. "
            "Set it to the number of samples in the first steps.",
        )
    batch = run.train.batch_size
    if target is not None and target < batch:
        yield Violation(
            f"{section}.target_effective_batch_size",
            f"is {target}; it must be at least train.batch_size ({batch}). "
            "Raise the target or lower the batch size.",
        )
    if initial is not None and target is not None and initial > target:
        yield Violation(
            f"{section}.initial_effective_batch_size",
            f"is {initial}; it must be at most target_effective_batch_size ({target}). "
            "Lower the initial size or raise the target.",
        )


def _check_credentials(run: RunFile) -> Iterator[Violation]:
    if any(REDACTED in address for address in run.logging.webhooks):
        yield Violation(
            "logging.webhooks",
            f"contains {REDACTED}, which replaces paths in a run.json that a run has written. Set "
            "the addresses again.",
        )
    for index, dataset in enumerate(run.datasets):
        options = dataset.remote.options
        values = [
            v for o in options.values() for v in (o.values() if isinstance(o, dict) else (o,))
        ]
        for key, texts in (
            ("remote.options", values),
            ("instance_data_dir", [dataset.instance_data_dir]),
        ):
            if any(isinstance(text, str) and REDACTED in text for text in texts):
                yield Violation(
                    f"datasets.{index}.{key}",
                    f"contains {REDACTED}, which replaces credentials in a run.json that a run has "
                    "written. Set the credentials again.",
                )


def _check_warmup(run: RunFile) -> Iterator[Violation]:
    optimizer, steps = run.optimizer, run.train.max_train_steps
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= steps:
        yield Violation(
            "optimizer.warmup_steps",
            f"is {optimizer.warmup_steps}; with schedule {optimizer.schedule} it must be below "
            f"train.max_train_steps ({steps}), or the learning rate never decays. "
            "Shorten the warm-up, or set optimizer.schedule: constant.",
        )


def _check_effective_batch_size(run: RunFile) -> Iterator[Violation]:
    train = run.train
    if train.effective_batch_size is None:
        return
    if train.gradient_accumulation_steps > 1:
        yield Violation(
            "train.effective_batch_size",
            f"is {train.effective_batch_size} and train.gradient_accumulation_steps is "
            f"{train.gradient_accumulation_steps}, but each sets the samples per optimizer step. "
            "Remove one of them.",
        )
    elif train.effective_batch_size % train.batch_size:
        yield Violation(
            "train.effective_batch_size",
            f"is {train.effective_batch_size}, but must be a multiple of train.batch_size "
            f"({train.batch_size}). Change one of them.",
        )


def _check_timestep_window(run: RunFile) -> Iterator[Violation]:
    low, high = run.train.timestep_window
    if low >= high:
        yield Violation(
            "train.timestep_window",
            f"is [{low:g}, {high:g}]; the first number must be below the second.",
        )


def _check_optimizer_settings(run: RunFile) -> Iterator[Violation]:
    settings = run.optimizer.model_dump()
    for owner, info in OPTIMIZERS.items():
        for key in info.settings if run.optimizer.name != owner else ():
            if settings[key] is not None:
                yield Violation(
                    f"optimizer.{key}",
                    f"is {settings[key]:g}; only {owner} has this setting, and optimizer.name is "
                    f"{run.optimizer.name}. Remove it, or set optimizer.name: {owner}.",
                )
    for expert in ("", "high_noise_", "low_noise_"):
        # An expert's own bound replaces the common one.
        low_key = f"{expert}min_lr" if settings[f"{expert}min_lr"] is not None else "min_lr"
        high_key = f"{expert}max_lr" if settings[f"{expert}max_lr"] is not None else "max_lr"
        low, high = settings[low_key], settings[high_key]
        is_own = expert == "" or expert in low_key or expert in high_key
        if is_own and low is not None and high is not None and low > high:
            yield Violation(
                f"optimizer.{low_key}",
                f"is {low:g}; it must be at most optimizer.{high_key} ({high:g}). "
                f"Lower {low_key} or raise {high_key}.",
            )


def _check_optimizer_state(run: RunFile) -> Iterator[Violation]:
    name = run.optimizer.name
    reason = optimizer_info(name).whole_state_reason
    if run.optimizer.state == "host" and reason:
        able = ", ".join(each for each, info in OPTIMIZERS.items() if info.state_can_be_split)
        yield Violation(
            "optimizer.state",
            f"is host, which copies the state to the device piece by piece, but {name} {reason}. "
            f"Set optimizer.state: device, or use one of {able}.",
        )


def _check_betas(run: RunFile) -> Iterator[Violation]:
    for index, beta in enumerate(run.optimizer.betas):
        if beta == 1:
            yield Violation(
                f"optimizer.betas.{index}",
                "is 1; it must be below 1, or gradients never enter the moments.",
            )


def _check_adapter(run: RunFile) -> Iterator[Violation]:
    if run.adapter is not None and run.adapter.targets == ():
        yield Violation(
            "adapter.targets",
            "is an empty list, so nothing would be trained. Name modules, or remove it to use the "
            "family's default.",
        )


def _check_frozen_compute(run: RunFile) -> Iterator[Violation]:
    if run.model.frozen_compute != "fp8":
        return
    reason = ""
    if run.adapter is None:
        reason = "without an adapter every weight is trained and none is frozen"
    elif run.adapter.kind == "dora":
        reason = "adapter.kind dora needs the norm of the frozen weights in every step"
    elif run.model.quantize != "none":
        reason = f"model.quantize {run.model.quantize} already stores them in its own format"
    if reason:
        yield Violation("model.frozen_compute", f"is fp8, but {reason}. Set it to bf16.")


def _check_datasets(run: RunFile) -> Iterator[Violation]:
    counts = Counter(dataset.id for dataset in run.datasets)
    for index, dataset in enumerate(run.datasets):
        key = f"datasets.{index}"
        if counts[dataset.id] > 1:
            yield Violation(
                f"{key}.id",
                f"is {dataset.id!r}, like that of another dataset. Give each its own id.",
            )
        if dataset.caption_strategy == "instanceprompt" and dataset.instance_prompt is None:
            yield Violation(
                f"{key}.caption_strategy",
                f"is instanceprompt, but {key}.instance_prompt is missing. "
                "Set it to the caption that every sample gets.",
            )
        if not dataset.resolutions:
            yield Violation(f"{key}.resolution", "is an empty list. Set at least one size.")
        elif dataset.bucket_step is not None and dataset.bucket_step > dataset.resolutions[0]:
            yield Violation(
                f"{key}.bucket_step",
                f"is {dataset.bucket_step}; it must be at most {key}.resolution "
                f"({dataset.resolutions[0]}).",
            )
        yield from _check_bucket_aspects(dataset, key)


def _check_bucket_aspects(dataset: DatasetSection, key: str) -> Iterator[Violation]:
    if dataset.bucket_aspects == ():
        yield Violation(
            f"{key}.bucket_aspects",
            "is an empty list. Name aspect ratios, or remove it to allow all.",
        )
    for aspect in dataset.bucket_aspects or ():
        if max(aspect, 1 / aspect) > dataset.max_aspect:
            yield Violation(
                f"{key}.bucket_aspects",
                f"has {aspect:g}; it must be from {1 / dataset.max_aspect:.3g} to "
                f"{dataset.max_aspect:g}. Remove it, or raise {key}.max_aspect.",
            )


def _check_persistent_cache(run: RunFile) -> Iterator[Violation]:
    values = [dataset.cache_latents_to_disk for dataset in run.datasets]
    persistent = run.cache_config.persistent_cache
    if any(value is not None for value in values) and any(values) != persistent:
        index = next(index for index, value in enumerate(values) if value is not None)
        yield Violation(
            f"datasets.{index}.cache_latents_to_disk",
            f"is {str(values[index]).lower()}, but cache_config.persistent_cache is "
            f"{str(persistent).lower()}. Both decide whether the cache is kept; remove one of "
            "them.",
        )


def _check_validation(run: RunFile) -> Iterator[Violation]:
    if run.validation.prompts == ():
        yield Violation(
            "validation.prompts",
            "is an empty list. Name prompts, remove it to use captions of the dataset, or set "
            "validation.every: 0 to turn validation off.",
        )
    if run.validation.holdout == 1:
        yield Violation(
            "validation.holdout", "is 1, which leaves no sample to train on. Lower it below 1."
        )


def _check_trigger(run: RunFile) -> Iterator[Violation]:
    """Find prompts in which `[trigger]` is left, because there is not exactly one trigger word."""
    words = list(dict.fromkeys(d.trigger_word for d in run.datasets if d.trigger_word))
    reason = f"the datasets have several trigger words ({', '.join(words)})"
    fix = "Write the word itself in the prompt."
    if not words:
        reason, fix = "no dataset has a trigger_word", "Set datasets.0.trigger_word to the word."
    for index, prompt in enumerate(run.validation.prompts or ()):
        if TRIGGER in str(prompt):
            yield Violation(
                f"validation.prompts.{index}", f"contains {TRIGGER}, but {reason}. {fix}"
            )


def _check_has_data(run: RunFile) -> Iterator[Violation]:
    if not run.datasets:
        yield Violation(
            "datasets", "is empty. Add a dataset with the path of its folder as instance_data_dir."
        )
    for index, dataset in enumerate(run.datasets):
        if dataset.instance_data_dir is None:
            yield Violation(
                f"datasets.{index}.instance_data_dir",
                f"is missing. Set it to the folder of the dataset {dataset.id!r}.",
            )


def _check_context_parallel(run: RunFile) -> Iterator[Violation]:
    degree, family = run.distributed.context_parallel, run.model.family
    able = [name for name, info in FAMILIES.items() if info.divides_tokens]
    if degree > 1 and family not in able:
        yield Violation(
            "distributed.context_parallel",
            f"is {degree}, but the tokens of {family} cannot be divided among ranks. Set it to 1, "
            f"or train one of {', '.join(sorted(able))}.",
        )


def _check_heartbeats(run: RunFile) -> Iterator[Violation]:
    ranks = run.distributed
    if ranks.stall_timeout_s < 3 * ranks.heartbeat_s:
        yield Violation(
            "distributed.stall_timeout_s",
            f"is {ranks.stall_timeout_s:g}, but one late heartbeat must not end a run. Set it to "
            f"at least three times distributed.heartbeat_s ({ranks.heartbeat_s:g}).",
        )


SHARDED_STRATEGIES = ("fsdp2", "hsdp")
SHARDING_SETTINGS = ("reshard_after_forward", "prefetch_blocks", "cpu_offload", "reduce_dtype")
"""Settings of `distributed` that only these strategies have."""


def check_sharding(run: RunFile) -> Iterator[Violation]:
    """Yield what keeps a run from dividing its weights among ranks (FSDP2, HSDP)."""
    section, name = run.distributed, run.optimizer.name
    if section.strategy not in SHARDED_STRATEGIES:
        return
    if run.adapter is not None:
        yield Violation(
            "distributed.strategy",
            f"is {section.strategy}, which divides the training of all weights among ranks, but "
            "the run trains an adapter. Gathering the frozen weights in every pass would take "
            "longer than streaming them. Set distributed.strategy: replicate, with which each rank "
            "streams frozen weights that do not fit.",
        )
    if run.model.quantize != "none":
        yield Violation(
            "model.quantize",
            f"is {run.model.quantize}, but distributed.strategy {section.strategy} cannot divide "
            "quantized weights among ranks. Set model.quantize: none, or distributed.strategy: "
            "replicate.",
        )
    info = optimizer_info(name)
    if info.whole_tensor_reason:
        able = ", ".join(
            each for each, other in OPTIMIZERS.items() if not other.whole_tensor_reason
        )
        yield Violation(
            "optimizer.name",
            f"is {name}, which {info.whole_tensor_reason}, but with distributed.strategy "
            f"{section.strategy} each rank has only some rows of a tensor. Use one of {able}, or "
            "set distributed.strategy: replicate.",
        )


CHECKS: tuple[Callable[[RunFile], Iterator[Violation]], ...] = (
    _check_credentials,
    _check_ramp,
    _check_warmup,
    _check_effective_batch_size,
    _check_timestep_window,
    _check_optimizer_settings,
    _check_optimizer_state,
    _check_betas,
    _check_adapter,
    _check_frozen_compute,
    _check_datasets,
    _check_persistent_cache,
    _check_validation,
    _check_trigger,
    _check_context_parallel,
    _check_heartbeats,
    check_sharding,
)


# Remarks

RAMP_KEYS = (
    "initial_effective_batch_size",
    "target_effective_batch_size",
    "batch_rampup_steps",
    "rampup_shape",
)
MEDIA_SETTINGS = {
    "frames": ("video",),
    "fps": ("video",),
    "sample_rate": ("audio",),
    "channels": ("audio",),
    "seconds": ("audio",),
    "clip": ("video", "audio"),
}
"""Settings of a dataset that only some media use, with the values of `dataset_type` that do."""


def _unused_ramp_settings(run: RunFile) -> Iterator[str]:
    ramp = run.gh200_optimizations
    section = "gh200_optimizations"
    if not ramp.enable_batch_size_rampup:
        for key in RAMP_KEYS:
            if _is_changed(ramp, key):
                yield (
                    f"{section}.{key} is {getattr(ramp, key)} but has no effect, because "
                    f"{section}.enable_batch_size_rampup is false."
                )


def _unused_staging(run: RunFile) -> Iterator[str]:
    for index, dataset in enumerate(run.datasets):
        if dataset.in_memory != InMemorySection() and dataset.type not in STAGED_TYPES:
            yield (
                f"datasets.{index}.in_memory has no effect, because datasets.{index}.type is "
                f"{dataset.type}, which is not staged. Set it to in_memory."
            )


def _unused_cache_settings(run: RunFile) -> Iterator[str]:
    kept = [index for index, data in enumerate(run.datasets) if data.cache_latents_to_disk]
    for index, dataset in enumerate(run.datasets):
        mode, is_random = dataset.augmentations_cache_mode, bool(dataset.augmentations)
        is_random = is_random or "random" in (dataset.crop, dataset.clip)
        if mode is not None and not is_random:
            yield (
                f"datasets.{index}.augmentations_cache_mode has no effect, because the dataset "
                "has no augmentations and no random crops or clips."
            )
        if mode == "disable_cache" and is_random and run.cache_config.persistent_cache:
            yield (
                f"datasets.{index}.augmentations_cache_mode is disable_cache, so the persistent "
                "cache keeps only the captions of this dataset."
            )
        if dataset.cache_latents_to_disk is False and kept:
            yield (
                f"datasets.{index}.cache_latents_to_disk is false but has no effect: a run has one "
                f"cache, and datasets.{kept[0]}.cache_latents_to_disk keeps it on disk."
            )


def _unused_holdout(run: RunFile) -> Iterator[str]:
    if run.validation.holdout > 0 and run.validation.every == 0:
        yield (
            f"validation.holdout is {run.validation.holdout:g}, which keeps samples out of "
            "training, but their loss is never measured, because validation.every is 0."
        )


def _unused_family_settings(run: RunFile) -> Iterator[str]:
    info = FAMILIES.get(run.model.family)
    if info is None:  # a family of another package may use any setting
        return
    optional = frozenset[str]().union(*(each.settings for each in FAMILIES.values()))
    for setting in sorted(optional - info.settings):
        name, key = setting.split(".")
        if _is_changed(run.model if name == "model" else run.train, key):
            yield f"{setting} has no effect: model.family {run.model.family} does not use it."


def _unused_adapter_settings(run: RunFile) -> Iterator[str]:
    if run.adapter is None and _is_changed(run.train, "keep_adapters"):
        yield "train.keep_adapters has no effect: the run trains the whole model, not an adapter."
    if run.adapter is None or run.adapter.kind == "lokr":
        return
    for key in ("factor", "full_matrix"):
        if _is_changed(run.adapter, key):
            yield f"adapter.{key} has no effect: adapter.kind is {run.adapter.kind}, not lokr."


def _unused_media_settings(run: RunFile) -> Iterator[str]:
    for index, dataset in enumerate(run.datasets):
        kind = dataset.dataset_type
        for key, kinds in MEDIA_SETTINGS.items():
            if kind not in kinds and _is_changed(dataset, key):
                yield f"datasets.{index}.{key} has no effect: its dataset_type is {kind}."
    if run.datasets:
        kind = run.datasets[0].dataset_type
        for key in ("width", "height", "frames") if kind == "audio" else ("seconds",):
            if _is_changed(run.validation, key):
                yield (
                    f"validation.{key} has no effect: the first dataset's dataset_type is {kind}, "
                    f"so validation generates {kind} samples."
                )


def _unused_caption_settings(run: RunFile) -> Iterator[str]:
    for index, dataset in enumerate(run.datasets):
        here = f"datasets.{index}"
        for key in ("caption_keep_tokens", "caption_variants"):
            if not dataset.caption_shuffle and _is_changed(dataset, key):
                yield f"{here}.{key} has no effect, because {here}.caption_shuffle is false."
        strategy = dataset.caption_strategy
        if strategy not in ("auto", "textfile") and _is_changed(dataset, "caption_extension"):
            yield (
                f"{here}.caption_extension has no effect, because {here}.caption_strategy is "
                f"{strategy}."
            )
        if strategy != "instanceprompt" and dataset.instance_prompt is not None:
            yield (
                f"{here}.instance_prompt has no effect, because {here}.caption_strategy is "
                f"{strategy}, not instanceprompt."
            )


def _unused_train_settings(run: RunFile) -> Iterator[str]:
    if run.train.timestep_sampling != "logit_normal":
        for key in ("timestep_mean", "timestep_std"):
            if _is_changed(run.train, key):
                yield (
                    f"train.{key} has no effect: train.timestep_sampling is "
                    f"{run.train.timestep_sampling}, not logit_normal."
                )
    if run.validation.prompts and _is_changed(run.validation, "num_prompts"):
        yield "validation.num_prompts has no effect, because validation.prompts is set."


def _unused_schedule_settings(run: RunFile) -> Iterator[str]:
    section, steps = run.optimizer, run.train.max_train_steps
    if section.schedule == "constant" and _is_changed(section, "final_lr_share"):
        yield "optimizer.final_lr_share has no effect: optimizer.schedule is constant."
    if section.schedule == "constant" and section.warmup_steps >= steps:
        yield (
            f"optimizer.warmup_steps is {section.warmup_steps}, so the learning rate does not "
            f"reach optimizer.lr in the run's {steps} steps (train.max_train_steps)."
        )


def _unused_optimizer_settings(run: RunFile) -> Iterator[str]:
    for key, note in optimizer_info(run.optimizer.name).setting_notes.items():
        if key in run.optimizer.model_fields_set:
            yield f"optimizer.{key} {note}"


def _unused_sharding_settings(run: RunFile) -> Iterator[str]:
    section = run.distributed
    if section.strategy not in SHARDED_STRATEGIES:
        for key in SHARDING_SETTINGS:
            if _is_changed(section, key):
                yield (
                    f"distributed.{key} has no effect: distributed.strategy is "
                    f"{section.strategy}, not fsdp2 or hsdp."
                )
    elif section.cpu_offload and run.optimizer.state == "host":
        yield (
            "optimizer.state has no effect: distributed.cpu_offload keeps the state in host memory "
            "and updates it there."
        )
    if section.strategy != "hsdp" and section.shard_size is not None:
        yield (
            f"distributed.shard_size has no effect: distributed.strategy is {section.strategy}, "
            "not hsdp."
        )


def _is_changed(section: Section, key: str) -> bool:
    """Return True if a setting differs from its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


REMARKS: tuple[Callable[[RunFile], Iterator[str]], ...] = (
    _unused_ramp_settings,
    _unused_staging,
    _unused_cache_settings,
    _unused_holdout,
    _unused_family_settings,
    _unused_adapter_settings,
    _unused_media_settings,
    _unused_caption_settings,
    _unused_train_settings,
    _unused_schedule_settings,
    _unused_optimizer_settings,
    _unused_sharding_settings,
)
