"""SimpleTuner's WebUI with our fields, and its jobs with our hooks.

`gracetune host simpletuner run -- server` starts it: as itself, after its registry was given our
fields. A job is started through accelerate with `-m gracetune.hosts.simpletuner`, which is told
what the fields say.
"""

from __future__ import annotations

import functools
import json
import runpy
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from gracetune.config.environment import process_environment
from gracetune.errors import ConfigError, GracetuneError, HostError
from gracetune.hosts.simpletuner.__main__ import CONFIG_FLAG, check
from gracetune.hosts.simpletuner.config_blocks import FLAT_KEYS, OUR_KEYS, split_config
from gracetune.hosts.simpletuner.hooks import (
    CONFIG_STORE,
    FIELD_REGISTRY,
    FIELD_TYPES,
    PROCESS_KEEPER,
    WEBUI_REQUIRED_SYMBOLS,
    wrap,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType, SimpleNamespace

    Config = Mapping[str, object]


ENTRY = "gracetune.hosts.simpletuner"
EXTRA_ARGS = "accelerate_extra_args"


def install_webui(environment: Mapping[str, str], find: Callable[[str], ModuleType]) -> None:
    """Set every hook; `find` imports a module of SimpleTuner's."""
    types, registry = find(FIELD_TYPES), find(FIELD_REGISTRY).field_registry
    for order, option in enumerate(WEBUI_OPTIONS):
        registry._add_field(_field(types, option, order))
    store = find(CONFIG_STORE).ConfigStore
    stock_load = store.load_config
    wrap(store, "load_config", _hook_load_config)
    wrap(store, "save_config", _hook_save_config)
    wrap(store, "save_trainer_config", partial(_hook_save_trainer_config, stock_load))
    wrap(store, "validate_config", partial(_hook_validate_config, environment))
    wrap(find(PROCESS_KEEPER), "submit_job", _hook_submit_job)


def _field(types: ModuleType, option: WebUIOption, order: int) -> object:
    """A text for a number: it is the one kind that can be emptied again."""
    choices = [{"value": UNSET, "label": "Not set"}]
    choices += [{"value": value, "label": label} for value, label in option.choices]
    kind = types.FieldType.SELECT if option.choices else types.FieldType.TEXT
    return types.ConfigField(
        name=option.name,
        arg_name=f"--{option.name}",
        ui_label=option.label,
        field_type=kind,
        tab="hardware",
        section="gracetune",
        default_value=UNSET if option.choices else None,
        choices=choices if option.choices else None,
        help_text=option.help,
        tooltip=option.help,
        importance=types.ImportanceLevel.IMPORTANT,
        order=order,
    )


def _hook_load_config(original: Callable[..., tuple[object, object]]) -> Callable[..., object]:
    @functools.wraps(original)
    def load_config(self: object, name: str) -> tuple[object, object]:
        config, metadata = original(self, name)
        return (blocks_to_fields(config) if isinstance(config, dict) else config), metadata

    return load_config


def _hook_save_config(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def save_config(
        self: object, name: str, config: object, *args: object, **how: object
    ) -> object:
        return original(
            self,
            name,
            fields_to_blocks(config) if isinstance(config, dict) else config,
            *args,
            **how,
        )

    return save_config


def _hook_save_trainer_config(
    load: Callable[..., tuple[object, object]], original: Callable[..., None]
) -> Callable[..., None]:
    """The form has fields alone: what blocks have without one is still in the file."""

    @functools.wraps(original)
    def save_trainer_config(
        self: object, name: str, config: dict[str, object], *args: object, **how: object
    ) -> None:
        try:
            before, _ = load(self, name)
        except FileNotFoundError:
            before = {}
        kept = blocks_to_fields(before) if isinstance(before, dict) else {}
        original(self, name, fields_to_blocks(config, kept), *args, **how)

    return save_trainer_config


def _hook_validate_config(
    environment: Mapping[str, str], original: Callable[..., SimpleNamespace]
) -> Callable[..., SimpleNamespace]:
    """What the trainer would refuse is refused by the form."""

    @functools.wraps(original)
    def validate_config(self: object, config: Config) -> SimpleNamespace:
        found = original(self, config)
        try:
            split_config(_split_job_config(config)[1], environment)
        except ConfigError as error:
            found.errors.append(str(error))
            found.is_valid = False
        return found

    return validate_config


def _hook_submit_job(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def submit_job(job_id: str, func: Callable[..., object], config: Config) -> object:
        trains = func.__name__ == "run_trainer_job"
        return original(job_id, func, with_entry_point(config) if trains else config)

    return submit_job


def with_entry_point(config: Config) -> dict[str, object]:
    """A job that starts through our entry, and tells it what is ours."""
    rest, ours = _split_job_config(config)
    given = next((rest.pop(key) for key in (EXTRA_ARGS, f"--{EXTRA_ARGS}") if rest.get(key)), "")
    words = shlex.split(str(given))
    if ENTRY in words:
        place = words.index(ENTRY)
        words = words[: place - 1] + words[place + 1 :]
    said = [CONFIG_FLAG + json.dumps(ours)] if ours else []
    rest.pop(f"--{EXTRA_ARGS}", None)
    return rest | {EXTRA_ARGS: shlex.join([*words, "-m", ENTRY, *said])}


def _split_job_config(config: Config) -> tuple[dict[str, object], dict[str, object]]:
    """Ours, with the batch that rules between it and the ramp need."""
    rest, ours = split_our_keys(config)
    batch = config.get("train_batch_size", config.get("--train_batch_size"))
    return rest, ours | ({"train_batch_size": batch} if ours and isinstance(batch, int) else {})


def enter(argv: Sequence[str]) -> None:
    """Check, hook, and run SimpleTuner's command as if it had been started itself."""
    if not argv:
        raise HostError(
            "there is no script to run. Start the WebUI by "
            "`gracetune host simpletuner run -- server`."
        )
    check(WEBUI_REQUIRED_SYMBOLS)
    install_webui(process_environment(), import_module)
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    try:
        enter(sys.argv[1:])
    except GracetuneError as error:
        sys.stderr.write(f"gracetune: {error}\n")
        sys.exit(error.exit_code)


# ------------------------------------------------------------------------------------------
# Our options as SimpleTuner's WebUI shows them: a field each, kept in the blocks of config.json.
#
# The WebUI saves fields and drops every key that is not one, blocks too. So blocks are unfolded
# into
# fields when it reads a configuration, and folded again when it saves or starts one; keys without a
# field stay in their block.


PREFIX = "gracetune_"
UNSET = "unset"
"""A choice for saying nothing: an empty one does not reach the configuration."""
CACHE, GH200, SWITCH = "cache_config", "gh200_optimizations", "use_gh200_trainer"
_BOOLS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class WebUIOption:
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
_CACHE_TYPES = (("unified_memory", "Host memory"), ("disk", "Disk alone"))
WEBUI_OPTIONS = (
    WebUIOption("", SWITCH, "gracetune", "Off: nothing of what follows is done.", _ON_OFF),
    WebUIOption(
        CACHE, "vae_cache_type", "Latent cache", "Where latents are read from.", _CACHE_TYPES
    ),
    WebUIOption(
        CACHE, "text_cache_type", "Text cache", "Where embeddings are read from.", _CACHE_TYPES
    ),
    WebUIOption(
        CACHE,
        "host_budget_gb",
        "Host memory for caches (GiB)",
        "The most that cached tensors take; empty: half of what the host can spare.",
    ),
    WebUIOption(
        GH200,
        "enable_uvm_hints",
        "Unified-memory hints",
        "Place the tensors of each batch; not set: SIMPLETUNER_GH200_ENABLE_UVM_HINTS decides.",
        _ON_OFF,
    ),
    WebUIOption(
        GH200,
        "enable_batch_size_rampup",
        "Batch ramp",
        "Let the effective batch grow while training.",
        _ON_OFF,
    ),
    WebUIOption(
        GH200,
        "initial_effective_batch_size",
        "Ramp: first effective batch",
        "Samples in the first optimizer steps, over all GPUs.",
    ),
    WebUIOption(
        GH200,
        "target_effective_batch_size",
        "Ramp: last effective batch",
        "Samples in an optimizer step once the ramp is done; empty: the batch without a ramp.",
    ),
    WebUIOption(
        GH200,
        "batch_rampup_steps",
        "Ramp: length",
        "Micro-batches over which the effective batch grows; empty: 1000.",
    ),
    WebUIOption(
        GH200,
        "rampup_shape",
        "Ramp: shape",
        "How the effective batch grows.",
        (("quadratic", "Quadratic"), ("linear", "Linear")),
    ),
)


def blocks_to_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Blocks as fields; a block that has nothing else is gone."""
    shown: dict[str, object] = {}
    for written, value in config.items():
        name = written.lstrip("-")
        prefix = written[: len(written) - len(name)] + PREFIX
        if name in (CACHE, GH200) and isinstance(value, dict):
            keys = {option.key for option in WEBUI_OPTIONS if option.block == name}
            rest = {key: each for key, each in value.items() if key not in keys}
            if rest or not value:
                shown[written] = rest
            said = {key: each for key, each in value.items() if key in keys}
        elif name in (*FLAT_KEYS, SWITCH):
            said = {name: value}
        else:
            shown[written] = value
            continue
        shown |= {prefix + key: _text(each) for key, each in said.items() if each is not None}
    return shown


def fields_to_blocks(
    config: Mapping[str, object], kept: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Fields as blocks, beside what blocks have without a field, here or in what was `kept`."""
    rest: dict[str, object] = {}
    blocks: dict[str, dict[str, object]] = {}
    for written, value in (kept or {}).items():
        if written.lstrip("-") in (CACHE, GH200) and isinstance(value, dict):
            blocks[written.lstrip("-")] = dict(value)
    by_name = {option.name: option for option in WEBUI_OPTIONS}
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


def split_our_keys(config: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """What is left for SimpleTuner, and what the trainer's process is to be told."""
    folded = fields_to_blocks(config)
    ours = {
        name: value
        for written, value in folded.items()
        if (name := written.lstrip("-")) in (*OUR_KEYS, *FLAT_KEYS) and value is not None
    }
    rest = {
        key: value
        for key, value in folded.items()
        if key.lstrip("-") not in (*OUR_KEYS, *FLAT_KEYS)
    }
    return rest, ours


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(option: WebUIOption, shown: object) -> object:
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
