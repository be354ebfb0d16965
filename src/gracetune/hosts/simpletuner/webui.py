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
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from gracetune.config.environment import process_environment
from gracetune.errors import ConfigError, GracetuneError, HostError
from gracetune.hosts.simpletuner.__main__ import SAID, check
from gracetune.hosts.simpletuner.blocks import take_blocks
from gracetune.hosts.simpletuner.fields import OPTIONS, UNSET, fold, take_ours, unfold
from gracetune.hosts.simpletuner.hooks import wrap
from gracetune.hosts.simpletuner.needs import (
    CONFIG_STORE,
    FIELD_REGISTRY,
    FIELD_TYPES,
    KEEPER,
    WEBUI_NEEDS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType, SimpleNamespace

    from gracetune.hosts.simpletuner.fields import Option

    Config = Mapping[str, object]

ENTRY = "gracetune.hosts.simpletuner"
EXTRA = "accelerate_extra_args"


def install_webui(environment: Mapping[str, str], find: Callable[[str], ModuleType]) -> None:
    """Set every hook; `find` imports a module of SimpleTuner's."""
    types, registry = find(FIELD_TYPES), find(FIELD_REGISTRY).field_registry
    for order, option in enumerate(OPTIONS):
        registry._add_field(_field(types, option, order))
    store = find(CONFIG_STORE).ConfigStore
    stock_load = store.load_config
    wrap(store, "load_config", _unfolding)
    wrap(store, "save_config", _folding)
    wrap(store, "save_trainer_config", partial(_folding_beside, stock_load))
    wrap(store, "validate_config", partial(_validating, environment))
    wrap(find(KEEPER), "submit_job", _entering)


def _field(types: ModuleType, option: Option, order: int) -> object:
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


def _unfolding(original: Callable[..., tuple[object, object]]) -> Callable[..., object]:
    @functools.wraps(original)
    def load_config(self: object, name: str) -> tuple[object, object]:
        config, metadata = original(self, name)
        return (unfold(config) if isinstance(config, dict) else config), metadata

    return load_config


def _folding(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def save_config(
        self: object, name: str, config: object, *args: object, **how: object
    ) -> object:
        return original(
            self, name, fold(config) if isinstance(config, dict) else config, *args, **how
        )

    return save_config


def _folding_beside(
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
        kept = unfold(before) if isinstance(before, dict) else {}
        original(self, name, fold(config, kept), *args, **how)

    return save_trainer_config


def _validating(
    environment: Mapping[str, str], original: Callable[..., SimpleNamespace]
) -> Callable[..., SimpleNamespace]:
    """What the trainer would refuse is refused by the form."""

    @functools.wraps(original)
    def validate_config(self: object, config: Config) -> SimpleNamespace:
        found = original(self, config)
        try:
            take_blocks(_told(config)[1], environment)
        except ConfigError as error:
            found.errors.append(str(error))
            found.is_valid = False
        return found

    return validate_config


def _entering(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def submit_job(job_id: str, func: Callable[..., object], config: Config) -> object:
        trains = func.__name__ == "run_trainer_job"
        return original(job_id, func, entered(config) if trains else config)

    return submit_job


def entered(config: Config) -> dict[str, object]:
    """A job that starts through our entry, and tells it what is ours."""
    rest, ours = _told(config)
    given = next((rest.pop(key) for key in (EXTRA, f"--{EXTRA}") if rest.get(key)), "")
    words = shlex.split(str(given))
    if ENTRY in words:
        place = words.index(ENTRY)
        words = words[: place - 1] + words[place + 1 :]
    said = [SAID + json.dumps(ours)] if ours else []
    rest.pop(f"--{EXTRA}", None)
    return rest | {EXTRA: shlex.join([*words, "-m", ENTRY, *said])}


def _told(config: Config) -> tuple[dict[str, object], dict[str, object]]:
    """Ours, with the batch that rules between it and the ramp need."""
    rest, ours = take_ours(config)
    batch = config.get("train_batch_size", config.get("--train_batch_size"))
    return rest, ours | ({"train_batch_size": batch} if ours and isinstance(batch, int) else {})


def enter(argv: Sequence[str]) -> None:
    """Check, hook, and run SimpleTuner's command as if it had been started itself."""
    if not argv:
        raise HostError(
            "there is no script to run. Start the WebUI by "
            "`gracetune host simpletuner run -- server`."
        )
    check(WEBUI_NEEDS)
    install_webui(process_environment(), import_module)
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    try:
        enter(sys.argv[1:])
    except GracetuneError as error:
        sys.stderr.write(f"gracetune: {error}\n")
        sys.exit(error.exit_code)
