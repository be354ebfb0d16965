"""From a file in any known spelling to one draft in ours, remembering where each value stood."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from gracetune.config.parse import dotted, format_value, locate_line
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gracetune.config.parse import KeyPath, ParsedText


EVERY_DATASET = ("datasets", "*")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written, and by which name."""

    location: str
    spelling: str


@dataclass(slots=True)
class Draft:
    """A run file in our spelling, not yet checked, with where each value came from."""

    tree: dict[str, object] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    respelled: dict[str, str] = field(default_factory=dict)
    """Foreign spellings met, and what they were read as."""
    notices: list[str] = field(default_factory=list)
    """What the user should know: values that mean something else here, settings that follow."""

    def get(self, key: str) -> object:
        """The value at a dotted key; none where it is not given."""
        found = _get_at(self.tree, tuple(key.split(".")))
        return None if found is _ABSENT else found


def translate(parsed: ParsedText, name: str) -> Draft:
    """Bring a file's keys into our spelling; what is said twice must be said alike."""
    draft = Draft()
    later: list[tuple[KeyPath, KeyPath, object]] = []
    for path, value in leaves(parsed.tree) if parsed.tree else ():
        target = canonical_path(path, value)
        if target[:2] == EVERY_DATASET:
            later.append((path, target, value))
        else:
            origin = Origin(locate_line(name, parsed.lines, path), dotted(path))
            _add_consistent(draft, target, _canonical_value(draft, target, value), origin)
    for path, target, value in later:
        origin = Origin(locate_line(name, parsed.lines, path), dotted(path))
        for each in _expand_datasets(target, draft):
            _add_consistent(draft, each, _canonical_value(draft, each, value), origin)
    for path in parsed.lines:
        draft.origins.setdefault(path, Origin(locate_line(name, parsed.lines, path), dotted(path)))
    return draft


def override(draft: Draft, path: KeyPath, value: object, where: str) -> None:
    """Set one value whatever the file says; the path may be spelled as in any file.

    An object adds to the one that is there, a list takes the place of the other.
    """
    if isinstance(value, list):
        for target in _expand_datasets(canonical_path((*path, 0), {})[:-1], draft):
            _set_value(draft, target, [], Origin(where, dotted(path)))
    for ending, leaf in leaves(value):
        spelled = (*path, *ending)
        for target in _expand_datasets(canonical_path(spelled, leaf), draft):
            ours = _canonical_value(draft, target, leaf)
            if ours != {} or not isinstance(_get_at(draft.tree, target), dict):
                _set_value(draft, target, ours, Origin(where, dotted(spelled)))


def nearest_origin(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin | None:
    """Who wrote a key, or else something in it, or else what it is in."""
    inner = (other for other in origins if other[: len(path)] == path)
    outer = (path[:length] for length in range(len(path) - 1, 0, -1) if path[:length] in origins)
    nearest = path if path in origins else next(chain(inner, outer), None)
    return None if nearest is None else origins[nearest]


def leaves(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Every value that is not itself an object or a list of objects, with its path."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def canonical_path(path: KeyPath, value: object = "") -> KeyPath:
    """Our path for a path in any spelling; `*` stands where every data set is meant."""
    while True:
        one = len(path) > 1 and path[0] == "datasets" and isinstance(path[1], str)
        if one and path[1] != "*":
            path = ("datasets", 0, *path[1:])
        better = _apply_alias(path, value)
        if better is None:
            return path
        path = better


def apply_implied_settings(draft: Draft) -> None:
    """Settings that follow from others, as the forks and hosts had it; each is noted."""
    if RAMP_SWITCH_KEY in draft.respelled:
        _set_implied(
            draft,
            "gh200_optimizations.enable_batch_size_rampup",
            True,
            f"{RAMP_SWITCH_KEY} is given",
        )
    for cache in ("cache_config.vae_cache_type", "cache_config.text_cache_type"):
        if draft.get(cache) == "unified_memory":
            why = f"{cache} is unified_memory"
            _set_implied(draft, "gh200_optimizations.enable_uvm_hints", True, why)
    datasets = draft.tree.get("datasets")
    for index, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        here: KeyPath = ("datasets", index)
        if _get_at(draft.tree, (*here, "cache_latents_to_disk")) is True:
            why = f"{dotted(here)}.cache_latents_to_disk is true"
            _set_implied(draft, "cache_config.persistent_cache", True, why)
        if isinstance(dataset, dict) and isinstance(dataset.get("in_memory"), dict):
            why = f"{dotted(here)}.in_memory is given"
            _set_implied(draft, f"{dotted(here)}.type", "in_memory", why)
        staged = isinstance(dataset, dict) and dataset.get("type") == "in_memory"
        if staged and isinstance(dataset.get("in_memory", {}), dict):
            key = f"{dotted(here)}.in_memory.compression"
            _set_implied(draft, key, "none", 'it is not given; "auto" would try codecs')


def _set_implied(draft: Draft, key: str, value: object, why: str) -> None:
    """Set what nobody set, and say why."""
    path: KeyPath = tuple(int(step) if step.isdecimal() else step for step in key.split("."))
    if _get_at(draft.tree, path) in (_ABSENT, None):
        _set_value(draft, path, value, Origin(why, key))
        draft.notices.append(f"{key} is {'true' if value is True else value}: {why}.")


def _expand_datasets(target: KeyPath, draft: Draft) -> list[KeyPath]:
    """The path itself, or one for every data set where all are meant."""
    if target[:2] != EVERY_DATASET:
        return [target]
    datasets = draft.tree.get("datasets")
    count = len(datasets) if isinstance(datasets, list) and datasets else 1
    return [("datasets", index, *target[2:]) for index in range(count)]


def _canonical_value(draft: Draft, path: KeyPath, value: object) -> object:
    """The value in our spelling; a change of meaning is noted."""
    pattern = pattern_of(path)
    if pattern == "validation.prompts" and isinstance(value, str):
        return [value]
    if not isinstance(value, str | bool | None) or value not in VALUE_ALIASES.get(pattern, {}):
        return value
    ours = VALUE_ALIASES[pattern][value]
    if (pattern, value) in VALUE_REMARKS:
        why = VALUE_REMARKS[pattern, value]
        draft.notices.append(f"{dotted(path)} is {value}: taken as {ours}, because {why}.")
    return ours


def _apply_alias(path: KeyPath, value: object) -> KeyPath | None:
    """One step towards our spelling by the longest alias that fits, or none."""
    exact = ALIASES.get(pattern_of(path))
    if exact is not None and not isinstance(value, dict):
        return _fill_indices(exact, path, ())
    for length in range(len(path), 0, -1):
        section = ALIASES.get(pattern_of(path[:length]) + ".")
        if section is not None and (length < len(path) or isinstance(value, dict)):
            return _fill_indices(section.removesuffix("."), path[:length], path[length:])
    return None


def _fill_indices(target: str, matched: KeyPath, rest: KeyPath) -> KeyPath:
    indices = [step for step in matched if isinstance(step, int)]
    filled: list[str | int] = []
    for step in target.split("."):
        if step == "*" and indices:
            filled.append(indices.pop(0))
        else:
            filled.append(int(step) if step.isdecimal() else step)
    return (*filled, *rest)


def pattern_of(path: KeyPath) -> str:
    """A path with `*` for the number of every item."""
    return ".".join("*" if isinstance(step, int) else step for step in path)


def _add_consistent(draft: Draft, path: KeyPath, value: object, origin: Origin) -> None:
    """Put a value that may not disagree with one already there."""
    for length in range(1, len(path)):
        outer = _get_at(draft.tree, path[:length])
        if outer not in (_ABSENT, {}, []) and not isinstance(outer, dict | list):
            raise _contradiction(draft, path[:length], outer, origin, value)
    before = _get_at(draft.tree, path)
    if before is not _ABSENT and before not in ({}, []):
        if value in ({}, []) and isinstance(before, dict | list):
            return
        if before != value or isinstance(before, bool) != isinstance(value, bool):
            raise _contradiction(draft, path, before, origin, value)
    _set_value(draft, path, value, origin)


def _contradiction(
    draft: Draft, path: KeyPath, before: object, origin: Origin, value: object
) -> ConfigError:
    first = nearest_origin(path, draft.origins)
    assert first is not None, f"{dotted(path)} has a value that nobody put there"
    return ConfigError(
        f"{origin.location}: {origin.spelling} is {format_value(value)}, but {first.spelling} is "
        f"{format_value(before)} ({first.location}); both set {dotted(path)}. Keep one of them."
    )


def _set_value(draft: Draft, path: KeyPath, value: object, origin: Origin) -> None:
    node: object = draft.tree
    for step, following in pairwise(path):
        child = _get_at(node, (step,))
        if not isinstance(child, dict | list):
            child = [] if isinstance(following, int) else {}
            _set_item(node, step, child, origin)
        node = child
    _set_item(node, path[-1], value, origin)
    draft.origins[path] = origin
    if origin.spelling != dotted(path) and origin.spelling not in draft.respelled:
        draft.respelled[origin.spelling] = dotted(path)


def _set_item(node: object, step: str | int, value: object, origin: Origin) -> None:
    if isinstance(node, dict):
        node[str(step)] = value
    elif isinstance(node, list) and isinstance(step, int) and 0 <= step < len(node):
        node[step] = value
    elif isinstance(node, list) and step == len(node):
        node.append(value)
    else:
        there = len(node) if isinstance(node, list) else 0
        raise ConfigError(
            f"{origin.location}: {origin.spelling} asks for item {step} of a list that has {there}; "
            "items count from 0, and a new one comes right after the last."
        )


_ABSENT = object()


def _get_at(node: object, path: KeyPath) -> object:
    for step in path:
        if isinstance(node, list) and isinstance(step, int) and 0 <= step < len(node):
            node = node[step]
        else:
            node = node.get(step, _ABSENT) if isinstance(node, dict) else _ABSENT
    return node


# ------------------------------------------------------------------------------------------
# The forks' and hosts' spellings of our keys and values, as tables; `translate` applies them.
#
# `ALIASES` is the one place where a foreign key is known. A name with a dot at its end stands for a
# whole section; `*` is any data set, and where only the right side has it, every data set is meant.


ALIASES: Mapping[str, str] = {
    # Data sets: one instead of a list, or its keys at the top level.
    "data_backend": "datasets",
    "data_backend.": "datasets.0.",
    "data_backend.*.": "datasets.*.",
    "dataset": "datasets",
    "dataset.": "datasets.0.",
    "dataset.*.": "datasets.*.",
    "id": "datasets.0.id",
    "type": "datasets.0.type",
    "dataset_type": "datasets.0.dataset_type",
    "instance_data_dir": "datasets.0.instance_data_dir",
    "instance_prompt": "datasets.0.instance_prompt",
    "caption_strategy": "datasets.0.caption_strategy",
    "in_memory.": "datasets.0.in_memory.",
    "shapes.": "datasets.0.shapes.",
    "resolution": "datasets.*.resolution",
    "caption_dropout_probability": "datasets.*.caption_dropout",
    "max_corruption_rate": "datasets.*.max_corruption_rate",
    "datasets.*.folder_path": "datasets.*.instance_data_dir",
    "datasets.*.dataset_path": "datasets.*.instance_data_dir",
    "datasets.*.num_repeats": "datasets.*.repeats",
    "datasets.*.caption_dropout_rate": "datasets.*.caption_dropout",
    "datasets.*.default_caption": "datasets.*.instance_prompt",
    "datasets.*.minimum_image_size": "datasets.*.min_edge",
    "datasets.*.mask_path": "datasets.*.mask_data_dir",
    "datasets.*.invert_mask": "datasets.*.mask_invert",
    "datasets.*.mask_min_value": "datasets.*.mask_background",
    "datasets.*.aspect_bucket_alignment": "datasets.*.bucket_step",
    "datasets.*.config.in_memory_limit_gb": "datasets.*.in_memory.memory_limit_gb",
    "datasets.*.config.in_memory_compression_lib": "datasets.*.in_memory.compression",
    "datasets.*.config.max_corruption_rate": "datasets.*.max_corruption_rate",
    "aspect_bucket_alignment": "datasets.*.bucket_step",
    "cache_dir": "cache_config.cache_dir",
    # The ramp.
    "initial_effective_batch_size": "gh200_optimizations.initial_effective_batch_size",
    "target_effective_batch_size": "gh200_optimizations.target_effective_batch_size",
    "batch_rampup_steps": "gh200_optimizations.batch_rampup_steps",
    "enable_batch_size_rampup": "gh200_optimizations.enable_batch_size_rampup",
    "enable_uvm_hints": "gh200_optimizations.enable_uvm_hints",
    # The model and its adapter.
    "model_family": "model.family",
    "pretrained_model_name_or_path": "model.path",
    "model.name_or_path": "model.path",
    "model.arch": "model.family",
    "attention_mechanism": "model.attention_mechanism",
    "model_type": "adapter",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "network.type": "adapter.kind",
    "network.linear": "adapter.rank",
    "network.linear_alpha": "adapter.alpha",
    "network.dropout": "adapter.dropout",
    # The loop.
    "training_folder": "output_dir",
    "train_batch_size": "train.batch_size",
    "batch_size": "train.batch_size",
    "train.train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "train.gradient_accumulation": "train.gradient_accumulation_steps",
    "max_train_steps": "train.max_train_steps",
    "train.steps": "train.max_train_steps",
    "mixed_precision": "train.mixed_precision",
    "train.dtype": "train.mixed_precision",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "max_grad_norm": "train.max_grad_norm",
    "flow_schedule_shift": "train.timestep_shift",
    "train.timestep_type": "train.timestep_sampling",
    "snr_gamma": "train.min_snr_gamma",
    "ema_decay": "train.ema_decay",
    "train.ema_config.ema_decay": "train.ema_decay",
    "train.seed": "seed",
    "checkpointing_steps": "train.checkpoint_every",
    "checkpoint_step_interval": "train.checkpoint_every",
    "checkpoints_total_limit": "train.keep_checkpoints",
    "save.save_every": "train.checkpoint_every",
    "save.max_step_saves_to_keep": "train.keep_checkpoints",
    # The optimizer.
    "optimizer": "optimizer.name",
    "optimizer.type": "optimizer.name",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.lr_scheduler": "optimizer.schedule",
    "optimizer.lr_warmup_steps": "optimizer.warmup_steps",
    "train.optimizer": "optimizer.name",
    "train.optimizer_params.": "optimizer.",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "train.lr": "optimizer.lr",
    "train.learning_rate": "optimizer.lr",
    "lr_scheduler": "optimizer.schedule",
    "train.lr_scheduler": "optimizer.schedule",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "train.lr_warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "adam_weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    # Validation and logging.
    "enable_manual_validation": "validation.enable_manual_validation",
    "validation_steps": "validation.every",
    "validation_step_interval": "validation.every",
    "validation_prompt": "validation.prompts",
    "validation_seed": "validation.seed",
    "validation_guidance": "validation.guidance",
    "validation_num_inference_steps": "validation.sample_steps",
    "sample.sample_every": "validation.every",
    "sample.prompts": "validation.prompts",
    "sample.seed": "validation.seed",
    "sample.guidance_scale": "validation.guidance",
    "sample.sample_steps": "validation.sample_steps",
    "sample.width": "validation.width",
    "sample.height": "validation.height",
    "logging_steps": "logging.every",
}

REMOVED_KEYS: Mapping[str, str] = {
    "resume_from_checkpoint": "say it at the command line: --resume latest, or a checkpoint",
    "data_backend_config": "put the data sets into `datasets` of this file",
    "config": "put the keys of the process at the top level of this file",
    "train.snr_gamma": "set train.min_snr_gamma: gamma/SNR without a limit is not offered",
    "job": "put the keys of the process at the top level of this file",
    "datasets.*.augmentation_cache_epoch": "leave it out: a run counts its epochs itself",
}
"""Keys that the hosts have and a run file does not, with the way out."""

VALUE_ALIASES: Mapping[str, Mapping[str | bool | None, object]] = {
    "adapter": {"lora": {}, "full": None},
    "train.mixed_precision": {
        "fp16": "bf16",
        "float16": "bf16",
        "bfloat16": "bf16",
        "fp32": "no",
        "float32": "no",
        False: "no",
        None: "auto",
    },
    "train.timestep_sampling": {"sigmoid": "logit_normal", "linear": "uniform"},
    "optimizer.name": {
        "AdamW": "adamw",
        "adamw8bit": "adamw_8bit",
        "bnb-adamw8bit": "adamw_8bit",
        "adamw_schedulefree": "schedule_free",
        "Adafactor": "adafactor",
        "Automagic": "automagic",
        "Lion": "lion",
        "Muon": "muon",
        "Prodigy": "prodigy",
    },
    "optimizer.schedule": {"constant_with_warmup": "constant"},
    "datasets.*.in_memory.compression": {None: "none"},
}
"""Values with another spelling; what also changes the meaning has its words in `REMARKS`."""

VALUE_REMARKS: Mapping[tuple[str, str | bool | None], str] = {
    ("train.mixed_precision", "fp16"): "diffusion transformers overflow in it and train in bf16",
    ("train.mixed_precision", "float16"): "diffusion transformers overflow in it and train in bf16",
}

RAMP_SWITCH_KEY = "initial_effective_batch_size"
"""At the top level this also switches the ramp on, as the forks' guide promises."""
