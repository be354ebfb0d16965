"""What makes a run the same run: compared on resume, and refused by the name of the setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blake3 import blake3

from gracetune.errors import CheckpointError
from gracetune.optim.schedule import DEPENDS_ON_LENGTH

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
"""Settings that may change between two parts of a run: contents are compared instead of paths, and
the precision as it was resolved."""
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
MASK_SETTINGS = {"mask_invert", "mask_background", "mask_normalize"}
"""Without masks these mean nothing."""


def run_identity(
    run: RunFile, samples: Iterable[Sample], weights: str, precision: str
) -> dict[str, object]:
    """The settings, and the contents that they lead to."""
    return {
        **identity_settings(run, precision),
        "the model's weights at the start": weights,
        "the training samples and captions": samples_digest(samples),
    }


def identity_settings(run: RunFile, precision: str) -> dict[str, object]:
    """Every setting that shapes the weights, by its name in the run file."""
    settings = run.model_dump(mode="json", include=set(SECTIONS))
    for dataset in settings["datasets"]:
        masked = dataset["mask_data_dir"] is not None
        for key in CHANGEABLE_DATASET_SETTINGS if masked else CHANGEABLE_DATASET_SETTINGS | MASK_SETTINGS:
            dataset.pop(key)
    settings["gh200_optimizations"].pop("placement")  # where tensors live shapes no weight
    flat = {key: value for key, value in _flatten(settings) if key not in CHANGEABLE_SETTINGS}
    if DEPENDS_ON_LENGTH[run.optimizer.schedule]:
        flat["train.max_train_steps"] = run.train.max_train_steps
    flat["train.mixed_precision"] = precision
    return flat


def samples_digest(samples: Iterable[Sample]) -> str:
    """Of every picture's content and caption, whatever its folder is called."""
    hasher = blake3()
    for sample in samples:
        hasher.update(f"{sample.dataset}\0{sample.digest}\0{sample.caption}\n".encode())
        for companion in sample.companions:
            hasher.update(f"{companion.role}\0{companion.digest}\n".encode())
    return hasher.hexdigest(length=16)


def check_same_run(
    saved: Mapping[str, object], now: Mapping[str, object], *, contents: bool = True
) -> None:
    """Refuse to go on with another run's checkpoint; without `contents`, by settings alone."""
    names = {**saved, **now} if contents else now
    differing = [key for key in names if saved.get(key) != now.get(key)]
    if differing:
        lines = [f"{key} was {saved.get(key)!r}, is {now.get(key)!r}" for key in differing]
        raise CheckpointError(
            "this run is not the one the checkpoint belongs to: "
            + "; ".join(lines)
            + ". Put the old value back, or start anew with --resume none and another output_dir."
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
