"""Add gracetune's options to SimpleTuner's WebUI, and its hooks to the WebUI's jobs.

`gracetune host simpletuner run -- server` runs this module, which registers fields for gracetune's
options and then starts SimpleTuner's own command. Training jobs are started through accelerate with
`-m gracetune.hosts.simpletuner`, which receives the values of these fields.

The WebUI stores fields only and drops every other key, including blocks such as `cache_config`. So
gracetune's blocks become fields when it reads a configuration, and become blocks again when it
saves one or starts a job. Keys without a field stay in their block.
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
from gracetune.hosts.simpletuner.__main__ import (
    CONFIG_FLAG,
    EXTRA_ARGS,
    add_entry_point,
    check,
)
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


FIELD_PREFIX = "gracetune_"
UNSET = "unset"
"""Menu choice that leaves an option unset, because the WebUI does not store an empty value."""
CACHE, GH200, SWITCH = "cache_config", "gh200_optimizations", "use_gh200_trainer"
_BOOLS = {"true": True, "false": False}


# The options as fields


@dataclass(frozen=True, slots=True)
class WebUIOption:
    """One gracetune setting in SimpleTuner's config.json, shown as a field of the WebUI."""

    block: str
    """The block of config.json that has the key, such as `cache_config`; empty for none."""
    key: str
    label: str
    help: str
    choices: tuple[tuple[str, str], ...] = ()
    """Values and their labels in a menu; empty for a number."""

    @property
    def name(self) -> str:
        """The name of the field in the WebUI: the key with a prefix."""
        return FIELD_PREFIX + self.key


_ON_OFF = (("true", "On"), ("false", "Off"))
_CACHE_TYPES = (("unified_memory", "Host memory"), ("disk", "Disk alone"))
WEBUI_OPTIONS = (
    WebUIOption("", SWITCH, "gracetune", "Off disables all options below.", _ON_OFF),
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
        "The most memory for cached tensors. Empty: half of the free host memory.",
    ),
    WebUIOption(
        GH200,
        "enable_uvm_hints",
        "Unified-memory hints",
        "Place the tensors of each batch. Not set: SIMPLETUNER_GH200_ENABLE_UVM_HINTS decides.",
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
        "Samples in an optimizer step after the ramp. Empty: the batch without a ramp.",
    ),
    WebUIOption(
        GH200,
        "batch_rampup_steps",
        "Ramp: length",
        "Micro-batches over which the effective batch grows. Empty: 1000.",
    ),
    WebUIOption(
        GH200,
        "rampup_shape",
        "Ramp: shape",
        "The growth of the effective batch over time.",
        (("quadratic", "Quadratic"), ("linear", "Linear")),
    ),
)


def blocks_to_fields(config: Config) -> dict[str, object]:
    """Replace gracetune's blocks, such as `cache_config`, by flat fields, as the WebUI needs.

    Keys without a field stay in their block.
    """
    fields: dict[str, object] = {}
    for written, value in config.items():
        name = written.lstrip("-")
        prefix = written[: len(written) - len(name)] + FIELD_PREFIX
        if name in (CACHE, GH200) and isinstance(value, dict):
            keys = {option.key for option in WEBUI_OPTIONS if option.block == name}
            rest = {key: each for key, each in value.items() if key not in keys}
            # An empty block is kept: an empty cache_config enables the caches.
            if rest or not value:
                fields[written] = rest
            settings = {key: each for key, each in value.items() if key in keys}
        elif name in (*FLAT_KEYS, SWITCH):
            settings = {name: value}
        else:
            fields[written] = value
            continue
        fields |= {
            prefix + key: _field_text(each) for key, each in settings.items() if each is not None
        }
    return fields


def fields_to_blocks(config: Config, stored: Config | None = None) -> dict[str, object]:
    """Replace gracetune's flat fields in the WebUI by blocks, such as `cache_config`.

    Block keys that have no field are taken from `stored`, the saved configuration.
    """
    rest: dict[str, object] = {}
    blocks: dict[str, dict[str, object]] = {}
    for written, value in (stored or {}).items():
        if written.lstrip("-") in (CACHE, GH200) and isinstance(value, dict):
            blocks[written.lstrip("-")] = dict(value)
    options = {option.name: option for option in WEBUI_OPTIONS}
    for written, value in config.items():
        name = written.lstrip("-")
        option = options.get(name)
        if name in (CACHE, GH200) and isinstance(value, dict):
            blocks.setdefault(name, {}).update(value)
        elif option is None:
            rest[written] = value
        elif value not in (None, "", UNSET):
            target = blocks.setdefault(option.block, {}) if option.block else rest
            target[option.key] = _option_value(option, value)
    return rest | blocks


def split_our_keys(config: Config) -> tuple[dict[str, object], dict[str, object]]:
    """Split a form of the WebUI into SimpleTuner's keys and gracetune's blocks and keys."""
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


def _field_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _option_value(option: WebUIOption, text: object) -> object:
    """Convert a field's text. An invalid number stays text, for the validation to refuse."""
    if not isinstance(text, str):
        return text
    if option.choices:
        return _BOOLS.get(text, text)
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


# The hooks


def install_webui(environment: Mapping[str, str], find: Callable[[str], ModuleType]) -> None:
    """Add fields for gracetune's options to SimpleTuner's WebUI and wrap its functions.

    `find` imports a module of SimpleTuner.
    """
    types, registry = find(FIELD_TYPES), find(FIELD_REGISTRY).field_registry
    for order, option in enumerate(WEBUI_OPTIONS):
        registry._add_field(_config_field(types, option, order))
    store = find(CONFIG_STORE).ConfigStore
    stock_load = store.load_config
    wrap(store, "load_config", _hook_load_config)
    wrap(store, "save_config", _hook_save_config)
    wrap(store, "save_trainer_config", partial(_hook_save_trainer_config, stock_load))
    wrap(store, "validate_config", partial(_hook_validate_config, environment))
    wrap(find(PROCESS_KEEPER), "submit_job", _hook_submit_job)


def _config_field(types: ModuleType, option: WebUIOption, order: int) -> object:
    """Build a ConfigField of SimpleTuner. Numbers are text fields, which can be left empty."""
    choices = [{"value": UNSET, "label": "Not set"}]
    choices += [{"value": value, "label": label} for value, label in option.choices]
    field_type = types.FieldType.SELECT if option.choices else types.FieldType.TEXT
    return types.ConfigField(
        name=option.name,
        arg_name=f"--{option.name}",
        ui_label=option.label,
        field_type=field_type,
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
        self: object, name: str, config: object, *args: object, **options: object
    ) -> object:
        written = fields_to_blocks(config) if isinstance(config, dict) else config
        return original(self, name, written, *args, **options)

    return save_config


def _hook_save_trainer_config(
    load: Callable[..., tuple[object, object]], original: Callable[..., None]
) -> Callable[..., None]:
    """Wrap saving: keep the gracetune settings of the file that the form has no field for."""

    @functools.wraps(original)
    def save_trainer_config(
        self: object, name: str, config: dict[str, object], *args: object, **options: object
    ) -> None:
        try:
            stored, _ = load(self, name)
        except FileNotFoundError:
            stored = {}
        without_fields = blocks_to_fields(stored) if isinstance(stored, dict) else {}
        original(self, name, fields_to_blocks(config, without_fields), *args, **options)

    return save_trainer_config


def _hook_validate_config(
    environment: Mapping[str, str], original: Callable[..., SimpleNamespace]
) -> Callable[..., SimpleNamespace]:
    """Wrap validation: the form also reports invalid gracetune settings, before a job starts."""

    @functools.wraps(original)
    def validate_config(self: object, config: Config) -> SimpleNamespace:
        result = original(self, config)
        try:
            split_config(_split_job_config(config)[1], environment)
        except ConfigError as error:
            result.errors.append(str(error))
            result.is_valid = False
        return result

    return validate_config


def _hook_submit_job(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def submit_job(job_id: str, func: Callable[..., object], config: Config) -> object:
        is_training = func.__name__ == "run_trainer_job"
        return original(job_id, func, with_entry_point(config) if is_training else config)

    return submit_job


def with_entry_point(config: Config) -> dict[str, object]:
    """Change a job's configuration so that accelerate starts training through gracetune's module.

    gracetune's settings are removed and passed to that module as JSON.
    """
    rest, ours = _split_job_config(config)
    given = next((rest.pop(key) for key in (EXTRA_ARGS, f"--{EXTRA_ARGS}") if rest.get(key)), "")
    words = add_entry_point(str(given), EXTRA_ARGS)
    settings = [CONFIG_FLAG + json.dumps(ours)] if ours else []
    rest.pop(f"--{EXTRA_ARGS}", None)
    return rest | {EXTRA_ARGS: shlex.join([*words, *settings])}


def _split_job_config(config: Config) -> tuple[dict[str, object], dict[str, object]]:
    """Split a job's configuration into SimpleTuner's keys and gracetune's.

    gracetune's keys also get the batch size, which the ramp of the batch size needs.
    """
    rest, ours = split_our_keys(config)
    batch_size = config.get("train_batch_size", config.get("--train_batch_size"))
    if ours and isinstance(batch_size, int):
        ours["train_batch_size"] = batch_size
    return rest, ours


def enter(argv: Sequence[str]) -> None:
    """Check SimpleTuner's WebUI and set gracetune's hooks, then run the command as `__main__`."""
    if not argv:
        raise HostError(
            "there is no script to run. Start the WebUI with "
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
