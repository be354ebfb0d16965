"""Translate the keys and values of other tools in a run file into gracetune's own.

Run files may use keys of SimpleTuner, ai-toolkit and the forks of both that gracetune replaces. The
tables `ALIASES`, `VALUE_ALIASES` and `REMOVED_KEYS` at the end list all of them. The result is a
`Draft`, which also records the file and line of each value for error messages; `load.py` validates
it. "Ours" below means gracetune's own keys and values, as in `schema.py`.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from gracetune.config.dataset_schema import TRIGGER
from gracetune.config.fsdp import (
    GUIDE_KEYS,
    FsdpEntry,
    FsdpSettings,
    is_fsdp_key,
    suggest_fsdp_key,
    translate_fsdp,
)
from gracetune.config.parse_text import dotted, format_value, locate_line
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gracetune.config.parse_text import KeyPath, ParsedText


EVERY_DATASET = ("datasets", "*")
LISTS = frozenset(("datasets", "datasets.*.augmentations", "validation.prompts"))
"""Lists of sections, in which an override with `*` for the index sets every item."""
FSDP_SECTION = "fsdp_config"
OVERRIDE = "override"
"""First word of the location of a value that the command line has set."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where the user set a value, such as a line of the run file, for error messages."""

    location: str
    """File and line such as `run.json:3`, or another description such as `override a.b=c`."""
    spelling: str
    """Dotted key as the user wrote it, which may be another tool's."""


@dataclass(slots=True)
class Draft:
    """A run file whose keys are translated to those of the schema, but not yet validated."""

    tree: dict[str, object] = field(default_factory=dict)
    """The values as nested dictionaries and lists, with the keys of the schema."""
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    """Where each value was set, by its path in `tree`."""
    respelled: dict[str, str] = field(default_factory=dict)
    """Keys of other tools that the user wrote, with gracetune's key for each; both are dotted."""
    notices: list[str] = field(default_factory=list)
    """Messages for the user about replaced values and about settings implied by other settings."""

    def get(self, key: str) -> object:
        """Return the value at a dotted key, or None if it is not set."""
        found = _get_at(self.tree, tuple(key.split(".")))
        return None if found is _ABSENT else found


def translate(parsed: ParsedText, name: str) -> Draft:
    """Translate all keys and values of a parsed run file.

    Raises an error if the file sets the same setting to different values under two keys. `name` is
    the file's name for messages.
    """
    draft = Draft()
    # Values for every dataset are set last, when the number of datasets is known.
    for_every_dataset: list[tuple[KeyPath, KeyPath, object]] = []
    for path, value in leaves(parsed.tree) if parsed.tree else ():
        target = canonical_path(path, value)
        if target[:2] == EVERY_DATASET:
            for_every_dataset.append((path, target, value))
        else:
            origin = Origin(locate_line(name, parsed.lines, path), dotted(path))
            _add_consistent(draft, target, _canonical_value(draft, target, value), origin)
    for path, target, value in for_every_dataset:
        origin = Origin(locate_line(name, parsed.lines, path), dotted(path))
        for each in _expand_lists(target, draft):
            _add_consistent(draft, each, _canonical_value(draft, each, value), origin)
    for path in parsed.lines:
        draft.origins.setdefault(path, Origin(locate_line(name, parsed.lines, path), dotted(path)))
    return draft


def apply_override(draft: Draft, path: KeyPath, value: object, where: str) -> None:
    """Set a value in a draft (a translated run file), replacing the value from the file.

    `path` may be another tool's key. A dictionary is merged into the existing one; a list replaces
    the existing one. `where` says in messages where the new value comes from.
    """
    if isinstance(value, list):
        for target in _expand_lists(canonical_path((*path, 0), {})[:-1], draft):
            _set_value(draft, target, [], Origin(where, dotted(path)))
    for ending, leaf in leaves(value):
        spelled = (*path, *ending)
        for target in _expand_lists(canonical_path(spelled, leaf), draft):
            ours = _canonical_value(draft, target, leaf)
            if ours != {} or not isinstance(_get_at(draft.tree, target), dict):
                _set_value(draft, target, ours, Origin(where, dotted(spelled)))


def find_origin(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin | None:
    """Return the place where the user set a key, or a place near it; None if there is none.

    If `origins` lacks the key, it is the place of a key inside it (if the key is a section), or
    else of the nearest section that contains it.
    """
    inner = (other for other in origins if other[: len(path)] == path)
    outer = (path[:length] for length in range(len(path) - 1, 0, -1) if path[:length] in origins)
    nearest = path if path in origins else next(chain(inner, outer), None)
    return None if nearest is None else origins[nearest]


def leaves(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield the path and value of each leaf of nested dictionaries and lists.

    Only non-empty dictionaries and lists of dictionaries are descended into. All other values,
    such as a list of numbers, are leaves.
    """
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def canonical_path(path: KeyPath, value: object = "") -> KeyPath:
    """Return the path of a setting in the schema, given a path that may be another tool's.

    A `*` in the result means every dataset. The value matters because some keys are a section in
    one tool and a plain value in another.
    """
    while True:
        without_index = len(path) > 1 and path[0] == "datasets" and isinstance(path[1], str)
        if without_index and path[1] != "*":
            path = ("datasets", 0, *path[1:])
        replaced = _apply_alias(path, value)
        if replaced is None:
            return path
        path = replaced


def fill_trigger_word(draft: Draft) -> None:
    """Replace `[trigger]` in the validation prompts by the trigger word of the datasets.

    A prompt is a text or an object with texts. If the datasets have no word or several, prompts
    stay as they are, and `checks.py` reports those with the placeholder.
    """
    datasets = draft.tree.get("datasets")
    sections = datasets if isinstance(datasets, list) else []
    words = {
        word.strip()
        for section in sections
        if isinstance(section, dict) and isinstance(word := section.get("trigger_word"), str)
    }
    prompts = draft.get("validation.prompts")
    if len(words) != 1 or not isinstance(prompts, list):
        return
    (word,) = words
    prompts[:] = [replace_trigger(prompt, word) for prompt in prompts]


def replace_trigger(prompt: object, word: str) -> object:
    """Return a prompt, which is a text or an object with texts, with `word` for `[trigger]`."""
    if isinstance(prompt, dict):
        return {key: replace_trigger(text, word) for key, text in prompt.items()}
    return prompt.replace(TRIGGER, word) if isinstance(prompt, str) else prompt


def apply_fsdp_settings(draft: Draft) -> FsdpSettings:
    """Replace the FSDP settings of other tools in a draft by those of the section `distributed`.

    They are `fsdp_config` and, at the top level, keys such as `fsdp_enable`. A value that an
    override has set for gracetune's own setting stays.
    """
    entries = _take_fsdp_entries(draft)
    found = translate_fsdp(
        [entry for _, entry in entries],
        is_on=any(path[0] == FSDP_SECTION for path, _ in entries),
    )
    if entries and not found.is_on:
        draft.notices.append("FSDP is turned off, so the other FSDP settings have no effect.")
    first = draft.origins[entries[0][0]] if entries else None
    for setting, value in found.implied.items():
        assert first is not None, "no FSDP setting implies anything"
        _add_unless_overridden(draft, setting, value, Origin(first.location, FSDP_SECTION))
    for (path, _), key in zip(entries, found.keys, strict=True):
        for setting, value in key.settings.items():
            _add_unless_overridden(draft, setting, value, draft.origins[path])
    if found.remarks():
        draft.notices.append(found.remarks())
    return found


def _take_fsdp_entries(draft: Draft) -> list[tuple[KeyPath, FsdpEntry]]:
    """Remove all FSDP settings of other tools from a draft, and return them with their paths."""
    section = draft.tree.get(FSDP_SECTION)
    if section is not None and not isinstance(section, dict):
        place = _label(draft, (FSDP_SECTION,))
        raise ConfigError(
            f"{place} is {format_value(section)}; it must be an object with keys, such as "
            "fsdp_sharding_strategy. If it names a file, move the keys of that file here."
        )
    paths: list[KeyPath] = [(FSDP_SECTION, key) for key in section or {}]
    paths += [(key,) for key in draft.tree if key.startswith("fsdp_") and key != FSDP_SECTION]
    if section is not None:
        paths += [(key,) for key in GUIDE_KEYS if key in draft.tree]
    unknown = [path for path in paths if not is_fsdp_key(str(path[-1]))]
    if unknown:
        raise ConfigError(
            "\n".join(
                f"{_label(draft, path)} is not a known key; {suggest_fsdp_key(str(path[-1]))}"
                for path in unknown
            )
        )
    entries = [
        (path, FsdpEntry(str(path[-1]), _get_at(draft.tree, path), _label(draft, path)))
        for path in paths
    ]
    for name in {path[0] for path in paths} | {FSDP_SECTION}:
        draft.tree.pop(str(name), None)
    return entries


def _label(draft: Draft, path: KeyPath) -> str:
    """Return the location and name of a key for messages."""
    origin = find_origin(path, draft.origins)
    return dotted(path) if origin is None else f"{origin.location}: {dotted(path)}"


def _add_unless_overridden(draft: Draft, setting: str, value: object, origin: Origin) -> None:
    """Set a value; raise if the file sets it differently, but keep the value of an override."""
    path: KeyPath = tuple(setting.split("."))
    before = draft.origins.get(path)
    is_override = before is not None and before.location.startswith(OVERRIDE)
    if not is_override or origin.location.startswith(OVERRIDE):
        _add_consistent(draft, path, value, origin)
    elif _get_at(draft.tree, path) != value:
        kept = format_value(_get_at(draft.tree, path), path)
        draft.notices.append(f"{setting} is {kept}: {OVERRIDE}s replace {origin.spelling}.")


def apply_implied_settings(draft: Draft) -> None:
    """Set values that follow from other settings, and add a notice about each.

    For example, an `in_memory` section implies `type: in_memory`. The user's own values stay.
    """
    if RAMP_SWITCH_KEY in draft.respelled:
        _set_implied(
            draft,
            "gh200_optimizations.enable_batch_size_rampup",
            True,
            f"{RAMP_SWITCH_KEY} is set",
        )
    for cache in ("cache_config.vae_cache_type", "cache_config.text_cache_type"):
        if draft.get(cache) == "unified_memory":
            reason = f"{cache} is unified_memory"
            _set_implied(draft, "gh200_optimizations.enable_uvm_hints", True, reason)
    datasets = draft.tree.get("datasets")
    for index, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        here: KeyPath = ("datasets", index)
        if _get_at(draft.tree, (*here, "cache_latents_to_disk")) is True:
            reason = f"{dotted(here)}.cache_latents_to_disk is true"
            _set_implied(draft, "cache_config.persistent_cache", True, reason)
        if isinstance(dataset, dict) and isinstance(dataset.get("in_memory"), dict):
            reason = f"{dotted(here)}.in_memory is set"
            _set_implied(draft, f"{dotted(here)}.type", "in_memory", reason)
        staged = isinstance(dataset, dict) and dataset.get("type") == "in_memory"
        if staged and isinstance(dataset.get("in_memory", {}), dict):
            # Trying codecs on every file takes time, so staging compresses only on request.
            key = f"{dotted(here)}.in_memory.compression"
            _set_implied(draft, key, "none")


def _set_implied(draft: Draft, key: str, value: object, reason: str = "") -> None:
    """Set a value unless the user has set it; a `reason` is reported in a notice."""
    path: KeyPath = tuple(int(step) if step.isdecimal() else step for step in key.split("."))
    if _get_at(draft.tree, path) in (_ABSENT, None):
        _set_value(draft, path, value, Origin(reason or "default", key))
        if reason:
            word = "true" if value is True else value
            draft.notices.append(f"{key} is {word}, because {reason}.")


def _expand_lists(target: KeyPath, draft: Draft) -> list[KeyPath]:
    """Replace each `*` of a path such as `datasets.*.repeats` by the indices of all items.

    A missing list of datasets has one item; another missing list has none. Items that are no
    sections, such as a prompt that is a text, are left out.
    """
    for place, step in enumerate(target):
        if step == "*" and pattern_of(target[:place]) in LISTS:
            head, rest = target[:place], target[place + 1 :]
            found = _get_at(draft.tree, head)
            items = found if isinstance(found, list) else []
            indices = [i for i, item in enumerate(items) if isinstance(item, dict) or not rest]
            if head == ("datasets",):
                indices = list(range(len(items) or 1))
            return [p for i in indices for p in _expand_lists((*head, i, *rest), draft)]
    return [target]


def _canonical_value(draft: Draft, path: KeyPath, value: object) -> object:
    """Translate another tool's value of a setting; add a notice if the meaning changes."""
    pattern = pattern_of(path)
    if pattern == "validation.prompts" and isinstance(value, str):
        return [value]
    if not isinstance(value, str | bool | None) or value not in VALUE_ALIASES.get(pattern, {}):
        return value
    ours = copy(VALUE_ALIASES[pattern][value])  # later keys are set in the copy
    if (pattern, value) in VALUE_REMARKS:
        reason = VALUE_REMARKS[pattern, value]
        draft.notices.append(f"{dotted(path)} is {value}, but {ours} is used, because {reason}.")
    return ours


def _apply_alias(path: KeyPath, value: object) -> KeyPath | None:
    """Translate another tool's key to gracetune's by the table `ALIASES`.

    Uses the longest alias that the path starts with; returns None if there is none.
    """
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
    """Return a dotted path with `*` in place of list indices."""
    return ".".join("*" if isinstance(step, int) else step for step in path)


def _add_consistent(draft: Draft, path: KeyPath, value: object, origin: Origin) -> None:
    """Set a value; raise an error if another key has already set the same setting differently."""
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
    first = find_origin(path, draft.origins)
    assert first is not None, f"{dotted(path)} has a value without an origin"
    new, old = format_value(value, path), format_value(before, path)
    return ConfigError(
        f"{origin.location}: {origin.spelling} is {new}, but {first.spelling} is {old} "
        f"({first.location}); both set {dotted(path)}. Remove one of them."
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
    own = (dotted(path), pattern_of(path))  # `datasets.*.resolution` is no other tool's key
    if origin.spelling not in own and origin.spelling not in draft.respelled:
        draft.respelled[origin.spelling] = dotted(path)


def _set_item(node: object, step: str | int, value: object, origin: Origin) -> None:
    if isinstance(node, dict):
        node[str(step)] = value
    elif isinstance(node, list) and isinstance(step, int) and 0 <= step < len(node):
        node[step] = value
    elif isinstance(node, list) and step == len(node):
        node.append(value)
    else:
        length = len(node) if isinstance(node, list) else 0
        raise ConfigError(
            f"{origin.location}: {origin.spelling} sets item {step} of a list with {length} items. "
            f"Items count from 0; a new item has the number {length}."
        )


_ABSENT = object()


def _get_at(node: object, path: KeyPath) -> object:
    for step in path:
        if isinstance(node, list) and isinstance(step, int) and 0 <= step < len(node):
            node = node[step]
        else:
            node = node.get(step, _ABSENT) if isinstance(node, dict) else _ABSENT
    return node


# Tables of other tools' spellings

ALIASES: Mapping[str, str] = {
    # Datasets: one instead of a list, or its keys at the top level.
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
    # The batch-size ramp.
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
    # The training loop.
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
"""Keys of other tools, with gracetune's key for each.

A key that ends in a dot stands for a section with all its keys. `*` is the index of a dataset; if
only gracetune's key has a `*`, the value applies to every dataset.
"""

REMOVED_KEYS: Mapping[str, str] = {
    "resume_from_checkpoint": "use the command line: --resume latest, or --resume and a checkpoint",
    "data_backend_config": "move the datasets into `datasets` of this file",
    "config": "move the keys of the process to the top level of this file",
    "train.snr_gamma": "set train.min_snr_gamma; gamma/SNR without a limit is not supported",
    "deepspeed_config": "gracetune has no DeepSpeed. Set distributed.strategy to fsdp2, which "
    "divides weights as ZeRO-3 does (as ZeRO-2 with distributed.reshard_after_forward: false), and "
    "distributed.cpu_offload to true for its offload",
    "job": "move the keys of the process to the top level of this file",
}
"""Keys of other tools that gracetune refuses, with advice on what to do instead."""

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
"""Values of other tools, with gracetune's value for each, by gracetune's key."""

VALUE_REMARKS: Mapping[tuple[str, str | bool | None], str] = {
    ("train.mixed_precision", "fp16"): "diffusion transformers overflow in fp16",
    ("train.mixed_precision", "float16"): "diffusion transformers overflow in fp16",
}
"""Reasons why some values of other tools are replaced by values with another meaning, for a notice
to the user; by (gracetune's key, other tool's value)."""

RAMP_SWITCH_KEY = "initial_effective_batch_size"
"""Key that, at the top level of a run file, also turns on the batch-size ramp (the effective batch
size grows during training), as the forks that gracetune replaces document it."""
