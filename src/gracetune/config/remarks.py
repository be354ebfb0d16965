"""What a run file may say without any effect, or without what was probably meant by it.

Each remark is a small pure function from a run to the sentences it has to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.config.data_schema import STAGED, InMemorySection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.config.schema import RunFile, Section

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


FAMILIES = frozenset(("flux", "qwen_image", "stable_audio", "tiny", "wan22"))
FOLDERS = FAMILIES - {"tiny"}
FAMILY_SETTINGS = {
    "model.init_seed": frozenset(("tiny",)),
    "model.revision": FOLDERS,
    "model.task": frozenset(("wan22",)),
    "model.transformer_file": FOLDERS,
    "model.transformer_2_file": frozenset(("wan22",)),
    "train.expert_turns": frozenset(("wan22",)),
    "train.switch_every": frozenset(("wan22",)),
}
"""Which of our families have a setting that not all have; a package's may have any."""


def _idle_family(run: RunFile) -> Iterator[str]:
    family = run.model.family
    for setting, having in FAMILY_SETTINGS.items():
        name, key = setting.split(".")
        if family in FAMILIES - having and _differs(getattr(run, name), key):
            yield f"{setting} has no effect: {family} has no such setting."


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


IDLE_SETTINGS = {
    "adafactor": ("betas", "eps"),
    "automagic": ("eps",),
    "lion": ("eps",),
}
"""Settings that some optimizers do not have."""


def _idle_optimizer(run: RunFile) -> Iterator[str]:
    section = run.optimizer
    for key in IDLE_SETTINGS.get(section.name, ()):
        if key in section.model_fields_set:
            yield f"optimizer.{key} has no effect: {section.name} has no such setting."
    if section.name == "muon":
        for key in sorted({"betas", "eps"} & section.model_fields_set):
            yield (
                f"optimizer.{key} is AdamW's, to which muon leaves what is no matrix: of matrices, "
                "and so of most adapters, it changes nothing."
            )


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
