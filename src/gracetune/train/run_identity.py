"""Check that a run and the checkpoint it resumes from have the same settings and data.

The identity of a run is every setting that affects the trained weights, with digests of the base
weights and of the training data. A checkpoint stores it. Resuming with another identity would
silently mix two runs, so it is an error, which names each difference.

Every setting of the schema is in one of two tables: `IDENTITY_SETTINGS` are compared,
`CHANGEABLE_SETTINGS` are not. Where a digest contains all of a setting's effect, such as that of a
path, only the digest is compared.

Older checkpoints: a setting that a checkpoint does not have was added later, and counts as the
value that computes what was computed before. A setting that no longer exists is ignored with a
warning.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from gracetune.config.dataset_schema import MASK_SETTINGS, AugmentationSection, DatasetSection
from gracetune.config.schema import AdapterSection, OverrideSection, RunFile
from gracetune.errors import CheckpointError
from gracetune.optim.registry import SCHEDULE_DEPENDS_ON_LENGTH

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from gracetune.data.sample import Sample

IDENTITY_VERSION = 6
"""Version of the identity in a checkpoint. Raise it when a setting is added to `IDENTITY_SETTINGS`,
so that an earlier gracetune, which does not know the setting, refuses the checkpoint. Version 1
stored no version."""
VERSION_KEY = "identity version"
WEIGHTS_KEY = "the model's weights at the start"
SAMPLES_KEY = "the training samples and captions"
NAMES_KEY = "the file names in datasets with caption_dropout"
LENGTH_KEY = "train.max_train_steps"
DIGEST_KEYS = {WEIGHTS_KEY, SAMPLES_KEY, NAMES_KEY}


def _names(settings: Mapping[str, str]) -> frozenset[str]:
    return frozenset(
        f"{section}.{name}" if section else name
        for section, names in settings.items()
        for name in names.split()
    )


IDENTITY_SETTINGS = _names(
    {
        "": "seed",
        "model": "family dtype quantize frozen_compute task init_seed",
        "adapter": "kind rank alpha dropout factor full_matrix targets",
        "adapter.overrides": "rank alpha dropout factor",
        "cache_config": "vae_tiling",
        "gh200_optimizations": "enable_batch_size_rampup initial_effective_batch_size "
        "target_effective_batch_size batch_rampup_steps rampup_shape",
        "train": "batch_size gradient_accumulation_steps effective_batch_size similar_batches "
        "mixed_precision max_grad_norm timestep_sampling timestep_mean timestep_std timestep_shift "
        "timestep_window min_snr_gamma min_snr_in_flow experts expert_turns switch_every ema_decay "
        "skip_bad_batches",
        "optimizer": "name lr betas eps weight_decay schedule warmup_steps final_lr_share lr_bump "
        "min_lr max_lr high_noise_lr_bump high_noise_min_lr high_noise_max_lr low_noise_lr_bump "
        "low_noise_min_lr low_noise_max_lr",
        "datasets.*": "id dataset_type mask_invert mask_background mask_normalize resolution "
        "resolution_type crop decode bucket_step bucket_aspects max_aspect min_edge min_resolution "
        "frames fps sample_rate channels seconds clip instance_prompt caption_dropout "
        "caption_shuffle caption_keep_tokens caption_variants repeats weight "
        "augmentations_cache_mode variants augmentation_cache_epoch",
        "datasets.*.augmentations.*": "name probability amount",
    }
)
"""Settings that affect the trained weights. `*` is the index in a list; the settings of
`adapter.overrides` are those of each pattern. `train.mixed_precision` is compared as it is resolved
on this machine."""
CHANGEABLE_SETTINGS = _names(
    {
        # A gh200_optimizations section that is turned off counts as an absent one.
        "": "output_dir use_gh200_trainer",
        # The digest of the weights is compared. Attention backends compute the same function with
        # other rounding; the checkpoint records which one was used.
        "model": "path revision transformer_file transformer_2_file attention_mechanism",
        "cache_config": "vae_cache_type text_cache_type cache_dir persistent_cache host_budget_gb "
        "device_budget_gb prefetch_depth prefetch_budget_gb",
        "gh200_optimizations": "enable_uvm_hints use_uvm managed managed_access managed_memory "
        "placement",
        # The length matters for some schedules, and is compared then.
        "train": "max_train_steps gradient_checkpointing checkpoint_every checkpoint_minutes "
        "keep_checkpoints keep_adapters async_checkpoints check_gradients",
        "optimizer": "state",
        # The digest of all samples and captions is compared.
        "datasets.*": "type instance_data_dir conditioning_data_dir mask_data_dir caption_strategy "
        "caption_extension trigger_word caption_prefix caption_suffix "
        "max_corruption_rate timeout_s cache_latents_to_disk",
        "datasets.*.columns": "image caption",
        "datasets.*.shapes": "copies size seed concept",
        "datasets.*.in_memory": "compression num_workers chunk_size memory_limit_gb",
        "datasets.*.remote": "timeout_s retries options",
        # The digest leaves held-out samples out, and validation has generators of its own.
        "validation": "every at_start negative_prompt num_prompts seed sample_steps guidance width "
        "height frames seconds images holdout enable_manual_validation",
        "validation.prompts.*": "prompt negative_prompt seed width height steps guidance images "
        "frames seconds",
        "logging": "every tensorboard trackers tracker_project tracker_run_name tracker_offline "
        "tracker_samples prometheus_port prometheus_host webhooks",
        "health": "enabled ignore degrade stop wait_share slow_down stall_s disk_min_gb",
        # Layouts compute the same steps with other rounding; the checkpoint records the layout.
        "distributed": "backend timeout_s heartbeat_s stall_timeout_s strategy shard_size "
        "context_parallel context_parallel_kind reshard_after_forward prefetch_blocks cpu_offload "
        "reduce_dtype",
        "plan": "device_memory host_memory batch compile stream offload",
    }
)
"""Settings that may change when a run is resumed: they do not affect the trained weights, or their
effect is compared in another way."""
FORMER_BEHAVIOUR: dict[str, object] = {}
"""Setting -> the value that computes what was computed before the setting existed, where that is
not its default."""
STEP_SIZE_SETTINGS = {"train.gradient_accumulation_steps", "train.effective_batch_size"}
"""Settings that may change together with the number of ranks, if the samples per optimizer step
stay the same."""
ADDED_IN_VERSION = {"cache_config.vae_tiling": 2, NAMES_KEY: 6}
"""Version of the identity that first contained an entry whose effect is older: unknown for
checkpoints of earlier versions, and not compared with them."""


def run_identity(
    run: RunFile, samples: Sequence[Sample], weights: str, precision: str
) -> dict[str, object]:
    """Return the identity of a run: its settings, and digests of base weights and samples.

    The keys are stored in checkpoints; do not rename them.
    """
    return {
        VERSION_KEY: IDENTITY_VERSION,
        **identity_settings(run, precision),
        WEIGHTS_KEY: weights,
        SAMPLES_KEY: samples_digest(samples),
        NAMES_KEY: _names_digest(samples, {d.id for d in run.datasets if d.caption_dropout}),
    }


def identity_settings(run: RunFile, precision: str) -> dict[str, object]:
    """Return every setting that affects the trained weights, by its dotted run-file name."""
    settings = run.model_dump(mode="json")
    for dataset in settings["datasets"]:
        if dataset["mask_data_dir"] is None:
            for key in MASK_SETTINGS:
                dataset.pop(key)
    flat = {key: value for key, value in _flatten(settings) if setting_of(key) in IDENTITY_SETTINGS}
    if SCHEDULE_DEPENDS_ON_LENGTH[run.optimizer.schedule]:
        flat[LENGTH_KEY] = run.train.max_train_steps
    flat["train.mixed_precision"] = precision
    return flat


def setting_of(key: str) -> str:
    """Return the setting, as in the tables, that a dotted key with indices belongs to.

    Returns an empty string if there is no such setting.
    """
    name = _without_indices(key)
    if name.startswith("adapter.overrides."):  # the pattern between may contain dots
        name = f"adapter.overrides.{name.rpartition('.')[2]}"
    while name and name not in IDENTITY_SETTINGS | CHANGEABLE_SETTINGS:
        name = name.rpartition(".")[0]  # a key inside a setting such as remote.options
    return name


def samples_digest(samples: Iterable[Sample]) -> str:
    """Hash the contents and captions of all samples."""
    hasher = blake3()
    for sample in samples:
        hasher.update(f"{sample.dataset}\0{sample.digest}\0{sample.caption}\n".encode())
        for companion in sample.companions:
            hasher.update(f"{companion.role}\0{companion.digest}\n".encode())
    return hasher.hexdigest(length=16)


def _names_digest(samples: Iterable[Sample], datasets: Container[str]) -> str:
    """Hash the names of the samples of these datasets; their caption dropout depends on them."""
    hasher = blake3()
    for sample in samples:
        if sample.dataset in datasets:
            hasher.update(f"{sample.dataset}\0{sample.key}\n".encode(errors="surrogateescape"))
    return hasher.hexdigest(length=16)


def check_same_run(
    saved: Mapping[str, object],
    current: Mapping[str, object],
    saved_ranks: int = 1,
    current_ranks: int = 1,
) -> None:
    """Raise if a checkpoint was saved with other settings or data than the run has.

    `saved` is the identity in the checkpoint, perhaps of an earlier version. `current` is the run's
    identity from `run_identity`, or only its settings from `identity_settings`. The other arguments
    are the numbers of ranks that saved the checkpoint and resume from it.
    """
    version = saved.get(VERSION_KEY, 1)
    if not isinstance(version, int) or version > IDENTITY_VERSION:
        raise CheckpointError(
            f"the checkpoint was saved by a later version of gracetune, with settings that this "
            f"version does not have (identity version {version}, known up to {IDENTITY_VERSION}). "
            "Update gracetune to resume it."
        )
    if samples_per_step(saved, saved_ranks) == samples_per_step(current, current_ranks):
        saved = {**saved, **{name: current[name] for name in STEP_SIZE_SETTINGS if name in current}}
    changes = list(_changes(saved, current, version))
    if changes:
        raise CheckpointError(
            f"the checkpoint belongs to another run: {'; '.join(changes)}. Restore the old value "
            "to continue that run, or choose another output_dir to start a new one."
        )


def changed_settings(saved: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Return the dotted names of settings that differ between two run files with all settings.

    A setting that only one of them has is named by the list entry that was added or removed; one
    that a later version of gracetune added is left out.
    """
    before, now = dict(_flatten(saved)), dict(_flatten(current))
    changed = [name for name, value in now.items() if name in before and before[name] != value]
    return [*changed, *sorted(_optional_parts(before) ^ _optional_parts(now))]


def samples_per_step(identity: Mapping[str, object], ranks: int) -> int:
    """Return the samples in an optimizer step without a batch-size ramp, over all ranks."""

    def number(name: str) -> int:
        found = identity.get(f"train.{name}")
        return found if isinstance(found, int) else 0

    accumulated = number("batch_size") * number("gradient_accumulation_steps") * ranks
    return number("effective_batch_size") or accumulated


def removed_settings(saved: Mapping[str, object]) -> list[str]:
    """Return the settings of a checkpoint that this version of gracetune does not have."""
    sections = {name.rpartition(".")[0] for name in IDENTITY_SETTINGS | CHANGEABLE_SETTINGS}
    known = {VERSION_KEY, *DIGEST_KEYS}
    for section in sections:  # a section or list that is empty is stored under its own name
        known |= {section, section.removesuffix(".*")}
    return [key for key in saved if not setting_of(key) and _without_indices(key) not in known]


def _changes(
    saved: Mapping[str, object], current: Mapping[str, object], version: int
) -> Iterator[str]:
    """Yield a text for each difference. Settings inside an added or removed part are left out."""
    saved_parts, parts = _optional_parts(saved), _optional_parts(current)
    for part in sorted(saved_parts ^ parts):
        if not any(part.startswith((f"{outer}.", f"{outer}[")) for outer in saved_parts ^ parts):
            yield f"{part} was {'set' if part in saved_parts else 'absent'} and is now " + (
                "set" if part in parts else "absent"
            )
    for name, value in current.items():
        if name == VERSION_KEY or _optional_parts([name]) - saved_parts:
            continue
        if name == LENGTH_KEY and name not in saved:
            continue  # it has been compared since version 1, and the schedule differs
        setting = setting_of(name)
        if name in saved:
            before, note = saved[name], ""
        elif version < ADDED_IN_VERSION.get(setting or name, 0):
            continue
        else:  # the checkpoint is older than the setting
            before = FORMER_BEHAVIOUR.get(setting, _defaults().get(setting))
            note = " (the checkpoint is older than this setting)"
        if before != value and name in DIGEST_KEYS:
            yield f"{name}{' or validation.holdout' * (name == SAMPLES_KEY)} have changed"
        elif before != value:
            yield f"{name} was {before!r}{note} and is now {value!r}"


def _without_indices(key: str) -> str:
    return re.sub(r"\[\d+\]", ".*", key)


def _optional_parts(keys: Iterable[str]) -> set[str]:
    """Return the parts of a run file that need not exist: list entries, adapter and overrides."""
    found = set()
    for key in keys:
        found |= {key[: match.end()] for match in re.finditer(r"\[\d+\]", key)}
        if key.startswith("adapter."):
            found.add("adapter")
        if key.startswith("adapter.overrides."):
            found.add(key.rpartition(".")[0])
    return found


@cache
def _defaults() -> dict[str, object]:
    """Return the default of each setting in `IDENTITY_SETTINGS`."""
    augmented = DatasetSection(augmentations=(AugmentationSection(name="flip"),))
    adapter = AdapterSection(overrides={"*": OverrideSection()})
    everything = RunFile(adapter=adapter, datasets=(augmented,))
    return {setting_of(key): value for key, value in _flatten(everything.model_dump(mode="json"))}


def _flatten(value: Any, name: str = "") -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{name}[{index}]")
    else:
        yield name, value
