"""Translate the FSDP settings of other tools into settings of the section `distributed`.

Four spellings mean the same: `fsdp_config` of accelerate and of the GH200 guide, `fsdp_*` of
SimpleTuner, and the variables `FSDP_*` that `accelerate launch` sets. `translate_fsdp` reads all of
them. gracetune shards with FSDP2 (`fully_shard`), by the family's blocks. For settings that FSDP2
does not have, the result says what takes their place.

`translate_parallelism` does the same for accelerate's sizes of groups of ranks.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.parse_text import format_value
from gracetune.errors import ConfigError
from gracetune.models.registry import family_info

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

STRATEGY = "distributed.strategy"
RESHARD = "distributed.reshard_after_forward"

STRATEGIES: Mapping[str, tuple[str, bool | None]] = {
    "FULL_SHARD": ("fsdp2", True),
    "SHARD_GRAD_OP": ("fsdp2", False),
    "NO_SHARD": ("replicate", None),
    "HYBRID_SHARD": ("hsdp", True),
    "HYBRID_SHARD_ZERO2": ("hsdp", False),
}
"""FSDP1's sharding strategies in the order of their numbers, which start at 1, with gracetune's
`strategy` and `reshard_after_forward`."""

OTHER_NAMES: Mapping[str, str] = {
    "enable": "enabled",
    "use": "enabled",
    "cpu_offload": "offload_params",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_layer_cls": "transformer_layer_cls_to_wrap",
    "mixed_precision": "compute_dtype",
    "mixed_precision_policy": "compute_dtype",
    "param_dtype": "compute_dtype",
}
"""Other spellings of FSDP settings -> the one that this module uses. All are without `fsdp_`."""

SUCCESSORS: Mapping[str, str] = {
    "use_orig_params": "FSDP2 always trains the model's own parameters",
    "sync_module_states": "every rank reads the same files, and the run compares their digests",
    "cpu_ram_efficient_loading": "every rank reads the weights, and keeps its part",
    "backward_prefetch": "FSDP2 gathers the next block before it is needed; "
    "distributed.prefetch_blocks sets how many",
    "limit_all_gathers": "distributed.prefetch_blocks limits the gathered blocks",
    "state_dict_type": "checkpoints are sharded and resume with any number of ranks; exported "
    "models are whole",
    "min_num_params": "the model's blocks are sharded, whatever their size",
    "ignored_modules": "all of the model's blocks are sharded",
    "buffer_dtype": "buffers keep their type",
    "activation_checkpointing_offload": "plan.offload allows the plan to offload activations",
    "gradient_checkpointing_policy": "the plan decides what blocks recompute; without one, "
    "train.gradient_checkpointing recomputes all of a block",
    "cpu_offload_ratio": "distributed.cpu_offload moves all shards to host memory, not a part",
    "pin_memory": "shards in host memory are always pinned",
    "use_uvm_tensors": "gh200_optimizations.enable_uvm_hints places tensors in unified memory",
}
"""FSDP settings without a counterpart -> what takes their place."""

GUIDE_KEYS = (
    "activation_checkpointing",
    "gradient_checkpointing_policy",
    "cpu_offload_ratio",
    "pin_memory",
    "use_uvm_tensors",
)
"""Settings that the GH200 guide has beside `fsdp_config`, not inside it."""

_COMPUTE_TYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "bf16",
    "float16": "bf16",
    "fp32": "no",
    "float32": "no",
    "no": "no",
}
_REDUCE_TYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
SHARDED_ONE_BY_ONE = "the model's blocks are sharded one by one"
_CLASS_NAME = re.compile(r"[A-Za-z_]\w*")


class FsdpEntry(NamedTuple):
    """An FSDP setting as the user wrote it."""

    key: str
    """Name without its section, such as `fsdp_offload_params` or `FSDP_OFFLOAD_PARAMS`."""
    value: object
    label: str
    """Name in messages, such as `run.json:3: fsdp_config.fsdp_offload_params`."""


@dataclass(frozen=True, slots=True)
class TranslatedKey:
    """The translation of one FSDP setting."""

    entry: FsdpEntry
    settings: Mapping[str, object] = field(default_factory=dict)
    """gracetune's settings that it sets, by their dotted names."""
    remark: str = ""
    """What takes the place of a setting that FSDP2 does not have."""


@dataclass(frozen=True, slots=True)
class FsdpSettings:
    """The FSDP settings of a run file, an imported config or the environment."""

    keys: tuple[TranslatedKey, ...] = ()
    is_on: bool = False
    implied: Mapping[str, object] = field(default_factory=dict)
    """Settings that follow from the presence of FSDP settings, not from a single one."""
    classes: FsdpEntry | None = None
    """The entry that names classes to wrap, if there is one."""

    def settings(self) -> dict[str, object]:
        """Return all of gracetune's settings that are set."""
        found = dict(self.implied)
        for key in self.keys:
            found |= key.settings
        return found

    def remarks(self) -> str:
        """Return one sentence that names every setting without a counterpart, with its successor.

        It is empty if there is none.
        """
        found = [f"{key.entry.key} ({key.remark})" for key in self.keys if key.remark]
        if not found:
            return ""
        return (
            f"gracetune shards with FSDP2, where some settings have no effect: {', '.join(found)}."
        )


def fsdp_name(key: str) -> str:
    """Return the name of an FSDP setting that this module uses; the key may be unknown."""
    name = key.lower().removeprefix("fsdp_")
    return OTHER_NAMES.get(name, name)


def is_fsdp_key(key: str) -> bool:
    """Return True for the name of a known FSDP setting."""
    return fsdp_name(key) in KEYS


def suggest_fsdp_key(key: str) -> str:
    """Return advice for an unknown FSDP setting."""
    prefix = "fsdp_" if key.lower().startswith("fsdp_") else ""
    near = difflib.get_close_matches(fsdp_name(key), sorted(KEYS), n=1, cutoff=0.6)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known here: {', '.join(prefix + name for name in sorted(KEYS))}."


def translate_fsdp(entries: Sequence[FsdpEntry], *, is_on: bool) -> FsdpSettings:
    """Translate known FSDP settings; raise for a value that FSDP does not have.

    `is_on` says whether FSDP is turned on if no entry says so.
    """
    by_name = {fsdp_name(entry.key): entry for entry in entries}
    if "enabled" in by_name:
        is_on = _parse_bool(by_name["enabled"])
    if not is_on:
        return FsdpSettings(tuple(TranslatedKey(entry) for entry in entries))
    _check_version(by_name.get("version"))
    keys = tuple(_translate(entry, by_name) for entry in entries)
    has_strategy = any(STRATEGY in key.settings for key in keys)
    return FsdpSettings(
        keys,
        is_on=True,
        implied={} if has_strategy else {STRATEGY: "fsdp2"},
        classes=by_name.get("transformer_layer_cls_to_wrap"),
    )


def _translate(entry: FsdpEntry, by_name: Mapping[str, FsdpEntry]) -> TranslatedKey:
    name = fsdp_name(entry.key)
    if name in SUCCESSORS:
        return TranslatedKey(entry, remark=SUCCESSORS[name])
    if name in RULES:
        return TranslatedKey(entry, RULES[name](entry))
    return RULES_OF_SEVERAL[name](entry, by_name)


def _enabled(entry: FsdpEntry, by_name: Mapping[str, FsdpEntry]) -> TranslatedKey:
    return TranslatedKey(entry, {} if _names_strategy(by_name) else {STRATEGY: "fsdp2"})


def _version(entry: FsdpEntry, _by_name: Mapping[str, FsdpEntry]) -> TranslatedKey:
    is_first = _number(entry.value) == 1
    return TranslatedKey(entry, remark="FSDP2 takes the place of FSDP1" if is_first else "")


def _wrap_policy(entry: FsdpEntry, _by_name: Mapping[str, FsdpEntry]) -> TranslatedKey:
    policy = _one_of(entry, ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"))
    is_same = policy == "TRANSFORMER_BASED_WRAP"
    return TranslatedKey(entry, remark="" if is_same else SHARDED_ONE_BY_ONE)


def _classes(entry: FsdpEntry, _by_name: Mapping[str, FsdpEntry]) -> TranslatedKey:
    return TranslatedKey(entry)  # `check_classes` checks it when the family is known


def _sharding_strategy(entry: FsdpEntry, by_name: Mapping[str, FsdpEntry]) -> TranslatedKey:
    number = _number(entry.value)
    names = tuple(STRATEGIES)
    if number is not None and 1 <= number <= len(names):
        name = names[number - 1]
    else:
        name = _one_of(entry, names)
    strategy, reshards = STRATEGIES[name]
    settings: dict[str, object] = {STRATEGY: strategy}
    if reshards is not None and not _reshard_decides(by_name):
        settings[RESHARD] = reshards
    return TranslatedKey(entry, settings)


def _reshard(entry: FsdpEntry, by_name: Mapping[str, FsdpEntry]) -> TranslatedKey:
    """Translate `reshard_after_forward`: true or false, or in FSDP1 a sharding strategy."""
    if str(entry.value).upper() in STRATEGIES and "sharding_strategy" not in by_name:
        return _sharding_strategy(entry, {})
    if "sharding_strategy" in by_name and not _reshard_decides(by_name):
        return TranslatedKey(entry)  # as in accelerate, which always sets both
    return TranslatedKey(entry, {RESHARD: _parse_bool(entry)})


def _names_strategy(by_name: Mapping[str, FsdpEntry]) -> bool:
    reshard = by_name.get("reshard_after_forward")
    in_reshard = reshard is not None and str(reshard.value).upper() in STRATEGIES
    return "sharding_strategy" in by_name or in_reshard


def _reshard_decides(by_name: Mapping[str, FsdpEntry]) -> bool:
    """Return True if `reshard_after_forward` counts, and not the sharding strategy (FSDP2)."""
    version = by_name.get("version")
    is_second = version is not None and _number(version.value) == 2
    return is_second and "reshard_after_forward" in by_name


def _check_version(entry: FsdpEntry | None) -> None:
    if entry is not None and _number(entry.value) not in (1, 2):
        raise ConfigError(f"{entry.label} is {format_value(entry.value)}; it must be 1 or 2.")


def class_names(value: object) -> list[str]:
    """Return the class names in a list or text; `accelerate launch` writes lists as in Python."""
    parts = value if isinstance(value, list | tuple) else [value]
    return [name for part in parts if part is not None for name in _CLASS_NAME.findall(str(part))]


def check_classes(entry: FsdpEntry, family: str) -> None:
    """Raise if a class to wrap is not one of the blocks of the run's model.

    The blocks of a family from another package are not known here, so its classes are not checked.
    """
    blocks = family_info(family).block_classes
    wrong = [name for name in class_names(entry.value) if name not in blocks]
    if wrong and blocks:
        raise ConfigError(
            f"{entry.label} names {' and '.join(wrong)}, but the blocks of {family} are "
            f"{' and '.join(blocks)}. Remove the other names, or the setting: all blocks are "
            "sharded in any case."
        )


# Groups of ranks in accelerate's parallelism_config

PARALLELISM_PREFIX = "PARALLELISM_CONFIG_"


def translate_parallelism(variables: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    """Return the settings for the variables PARALLELISM_CONFIG_*, and remarks.

    Raises for tensor parallelism, which gracetune does not have.
    """
    sizes = {
        name: _group_size(variables, f"{PARALLELISM_PREFIX}{name}_SIZE")
        for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
    }
    if sizes["TP"] > 1:
        raise ConfigError(
            f"{PARALLELISM_PREFIX}TP_SIZE is {sizes['TP']}, but gracetune has no tensor "
            "parallelism. Set it to 1; distributed.strategy: fsdp2 divides the weights, and "
            "distributed.context_parallel the tokens of a sample."
        )
    context = sizes["CP"] * sizes["SP"]
    settings: dict[str, object] = {}
    remarks = []
    if sizes["DP_SHARD"] > 1 and sizes["DP_REPLICATE"] > 1:
        # accelerate shards over the ranks of a sample, too.
        settings |= {STRATEGY: "hsdp", "distributed.shard_size": sizes["DP_SHARD"] * context}
    elif sizes["DP_SHARD"] > 1:
        settings[STRATEGY] = "fsdp2"
    elif sizes["DP_REPLICATE"] > 1:
        settings[STRATEGY] = "replicate"
    if context > 1:
        settings["distributed.context_parallel"] = context
    if sizes["CP"] > 1:
        remarks.append(
            f"{PARALLELISM_PREFIX}CP_SIZE is a ring of ranks in accelerate; gracetune exchanges "
            "heads for tokens instead (Ulysses). distributed.context_parallel_kind: ring selects "
            "a ring, which has not been tested."
        )
    return settings, remarks


def _group_size(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name) or "1"
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    return int(value)


# Values, which are texts in environment variables


def _number(value: object) -> int | None:
    text = str(value).strip()
    return int(text) if text.isdecimal() and not isinstance(value, bool) else None


def _parse_bool(entry: FsdpEntry) -> bool:
    text = str(entry.value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", "none", ""):
        return False
    raise ConfigError(f"{entry.label} is {format_value(entry.value)}; it must be true or false.")


def _one_of(entry: FsdpEntry, known: Collection[str]) -> str:
    """Return the known name that a value is, whatever the case of its letters."""
    text = str(entry.value).strip().rpartition(".")[2].lower()  # such as torch.bfloat16
    for name in known:
        if name.lower() == text:
            return name
    raise ConfigError(
        f"{entry.label} is {format_value(entry.value)}; it must be one of {', '.join(known)}."
    )


# Rules

RULES: Mapping[str, Callable[[FsdpEntry], dict[str, object]]] = {
    "offload_params": lambda entry: {"distributed.cpu_offload": _parse_bool(entry)},
    "forward_prefetch": lambda entry: (
        {"distributed.prefetch_blocks": 1} if _parse_bool(entry) else {}
    ),
    "activation_checkpointing": lambda entry: (
        {"train.gradient_checkpointing": True} if _parse_bool(entry) else {}
    ),
    "compute_dtype": lambda entry: {
        "train.mixed_precision": _COMPUTE_TYPES[_one_of(entry, _COMPUTE_TYPES)]
    },
    "reduce_dtype": lambda entry: {
        "distributed.reduce_dtype": _REDUCE_TYPES[_one_of(entry, _REDUCE_TYPES)]
    },
}
"""Functions that return gracetune's settings for an FSDP setting, by its name."""
RULES_OF_SEVERAL: Mapping[str, Callable[[FsdpEntry, Mapping[str, FsdpEntry]], TranslatedKey]] = {
    "enabled": _enabled,
    "version": _version,
    "sharding_strategy": _sharding_strategy,
    "reshard_after_forward": _reshard,
    "auto_wrap_policy": _wrap_policy,
    "transformer_layer_cls_to_wrap": _classes,
}
"""Functions that translate FSDP settings whose meaning depends on others, or that have a remark."""
KEYS = frozenset((*SUCCESSORS, *RULES, *RULES_OF_SEVERAL))
"""All settings that this module knows."""
