"""Our options as SimpleTuner's WebUI shows them: a field each, kept in the blocks of config.json.

The WebUI saves fields and drops every key that is not one, blocks too. So blocks are unfolded into
fields when it reads a configuration, and folded again when it saves or starts one; keys without a
field stay in their block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.hosts.simpletuner.blocks import FLAT, OURS

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "gracetune_"
UNSET = "unset"
"""A choice for saying nothing: an empty one does not reach the configuration."""
CACHE, GH200, SWITCH = "cache_config", "gh200_optimizations", "use_gh200_trainer"
_BOOLS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One key of a block, and what people are told of it."""

    block: str
    """Empty: it stands at the top."""
    key: str
    label: str
    help: str
    choices: tuple[tuple[str, str], ...] = ()
    """Values and their labels; none: a number."""

    @property
    def name(self) -> str:
        """Of the field."""
        return PREFIX + self.key


_ON_OFF = (("true", "On"), ("false", "Off"))
_HOMES = (("unified_memory", "Host memory"), ("disk", "Disk alone"))
OPTIONS = (
    Option("", SWITCH, "gracetune", "Off: nothing of what follows is done.", _ON_OFF),
    Option(CACHE, "vae_cache_type", "Latent cache", "Where latents are read from.", _HOMES),
    Option(CACHE, "text_cache_type", "Text cache", "Where embeddings are read from.", _HOMES),
    Option(
        CACHE,
        "host_budget_gb",
        "Host memory for caches (GiB)",
        "The most that cached tensors take; empty: half of what the host can spare.",
    ),
    Option(
        GH200,
        "enable_uvm_hints",
        "Unified-memory hints",
        "Place the tensors of each batch; not set: SIMPLETUNER_GH200_ENABLE_UVM_HINTS decides.",
        _ON_OFF,
    ),
    Option(
        GH200,
        "enable_batch_size_rampup",
        "Batch ramp",
        "Let the effective batch grow while training.",
        _ON_OFF,
    ),
    Option(
        GH200,
        "initial_effective_batch_size",
        "Ramp: first effective batch",
        "Samples in the first optimizer steps, over all GPUs.",
    ),
    Option(
        GH200,
        "target_effective_batch_size",
        "Ramp: last effective batch",
        "Samples in an optimizer step once the ramp is done; empty: the batch without a ramp.",
    ),
    Option(
        GH200,
        "batch_rampup_steps",
        "Ramp: length",
        "Micro-batches over which the effective batch grows; empty: 1000.",
    ),
    Option(
        GH200,
        "rampup_shape",
        "Ramp: shape",
        "How the effective batch grows.",
        (("quadratic", "Quadratic"), ("linear", "Linear")),
    ),
)


def unfold(config: Mapping[str, object]) -> dict[str, object]:
    """Blocks as fields; a block that has nothing else is gone."""
    shown: dict[str, object] = {}
    for written, value in config.items():
        name = written.lstrip("-")
        prefix = written[: len(written) - len(name)] + PREFIX
        if name in (CACHE, GH200) and isinstance(value, dict):
            keys = {option.key for option in OPTIONS if option.block == name}
            rest = {key: each for key, each in value.items() if key not in keys}
            if rest or not value:
                shown[written] = rest
            said = {key: each for key, each in value.items() if key in keys}
        elif name in (*FLAT, SWITCH):
            said = {name: value}
        else:
            shown[written] = value
            continue
        shown |= {prefix + key: _text(each) for key, each in said.items() if each is not None}
    return shown


def fold(
    config: Mapping[str, object], kept: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Fields as blocks, beside what blocks have without a field, here or in what was `kept`."""
    rest: dict[str, object] = {}
    blocks: dict[str, dict[str, object]] = {}
    for written, value in (kept or {}).items():
        if written.lstrip("-") in (CACHE, GH200) and isinstance(value, dict):
            blocks[written.lstrip("-")] = dict(value)
    by_name = {option.name: option for option in OPTIONS}
    for written, value in config.items():
        name = written.lstrip("-")
        option = by_name.get(name)
        if name in (CACHE, GH200) and isinstance(value, dict):
            blocks.setdefault(name, {}).update(value)
        elif option is None:
            rest[written] = value
        elif value not in (None, "", UNSET):
            place = blocks.setdefault(option.block, {}) if option.block else rest
            place[option.key] = _value(option, value)
    return rest | blocks


def take_ours(config: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """What is left for SimpleTuner, and what the trainer's process is to be told."""
    folded = fold(config)
    ours = {
        name: value
        for written, value in folded.items()
        if (name := written.lstrip("-")) in (*OURS, *FLAT) and value is not None
    }
    rest = {key: value for key, value in folded.items() if key.lstrip("-") not in (*OURS, *FLAT)}
    return rest, ours


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(option: Option, shown: object) -> object:
    """As the block has it; what is no number is left for the reader of the block to refuse."""
    if not isinstance(shown, str):
        return shown
    if option.choices:
        return _BOOLS.get(shown, shown)
    for number in (int, float):
        try:
            return number(shown)
        except ValueError:
            continue
    return shown
