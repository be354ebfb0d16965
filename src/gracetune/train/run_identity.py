"""Check that a run and the checkpoint it resumes from have the same settings and data.

The identity of a run is every setting that affects the trained weights, with digests of the base
weights and of the training data. A checkpoint stores it. Resuming with another identity would
silently mix two runs, so it is an error, which names each difference. Paths are not compared, only
the digests of the files' contents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blake3 import blake3

from gracetune.errors import CheckpointError
from gracetune.optim.schedule import SCHEDULE_DEPENDS_ON_LENGTH

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Sample

SECTIONS = ("seed", "model", "adapter", "datasets", "train", "optimizer", "gh200_optimizations")
CHANGEABLE_SETTINGS = {
    "model.path",
    "model.revision",
    "model.transformer_file",
    "model.transformer_2_file",
    "train.max_train_steps",
    "train.checkpoint_every",
    "train.checkpoint_minutes",
    "train.keep_checkpoints",
    "train.gradient_checkpointing",
    "train.mixed_precision",
    "optimizer.state",
    "gh200_optimizations.enable_uvm_hints",
}
"""Settings that may change when a run is resumed: they do not affect the trained weights, or
another value is compared instead (digests for paths, the resolved precision for
`mixed_precision`)."""
CHANGEABLE_DATASET_SETTINGS = {
    "type",
    "instance_data_dir",
    "conditioning_data_dir",
    "mask_data_dir",
    "in_memory",
    "shapes",
    "cache_latents_to_disk",
    "max_corruption_rate",
    "timeout_s",
}
"""Settings of a dataset that may change when a run is resumed."""
MASK_SETTINGS = {"mask_invert", "mask_background", "mask_normalize"}
"""Dataset settings that may change when a run is resumed, unless the dataset has masks."""


def run_identity(
    run: RunFile, samples: Iterable[Sample], weights: str, precision: str
) -> dict[str, object]:
    """Return the identity of a run: its settings, and digests of base weights and samples.

    The keys are stored in checkpoints; do not reword them.
    """
    return {
        **identity_settings(run, precision),
        "the model's weights at the start": weights,
        "the training samples and captions": samples_digest(samples),
    }


def identity_settings(run: RunFile, precision: str) -> dict[str, object]:
    """Return every setting that affects the trained weights, by its dotted run-file name."""
    settings = run.model_dump(mode="json", include=set(SECTIONS))
    for dataset in settings["datasets"]:
        has_masks = dataset["mask_data_dir"] is not None
        for key in CHANGEABLE_DATASET_SETTINGS | (set() if has_masks else MASK_SETTINGS):
            dataset.pop(key)
    settings["gh200_optimizations"].pop("placement")  # where tensors live does not change them
    flat = {key: value for key, value in _flatten(settings) if key not in CHANGEABLE_SETTINGS}
    if SCHEDULE_DEPENDS_ON_LENGTH[run.optimizer.schedule]:
        flat["train.max_train_steps"] = run.train.max_train_steps
    flat["train.mixed_precision"] = precision
    return flat


def samples_digest(samples: Iterable[Sample]) -> str:
    """Hash the contents and captions of all samples; their paths do not matter."""
    hasher = blake3()
    for sample in samples:
        hasher.update(f"{sample.dataset}\0{sample.digest}\0{sample.caption}\n".encode())
        for companion in sample.companions:
            hasher.update(f"{companion.role}\0{companion.digest}\n".encode())
    return hasher.hexdigest(length=16)


def check_same_run(
    saved: Mapping[str, object], current: Mapping[str, object], *, contents: bool = True
) -> None:
    """Raise if a checkpoint was saved with other settings or data than the run has.

    `saved` and `current` come from `run_identity`. With `contents=False`, only settings are
    compared, not the digests of weights and samples.
    """
    names = {**saved, **current} if contents else current
    changes = [
        f"{name} was {saved.get(name)!r} and is now {current.get(name)!r}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    if changes:
        raise CheckpointError(
            f"the checkpoint belongs to another run: {'; '.join(changes)}. Restore the old value "
            "to continue that run, or choose another output_dir to start a new one."
        )


def _flatten(value: Any, name: str = "") -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{name}[{index}]")
    else:
        yield name, value
