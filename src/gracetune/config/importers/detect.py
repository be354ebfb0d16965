"""Find out which trainer wrote a config, read its files, and translate them into a run file.

A config is recognized by its structure, never by a single key: many keys of other trainers are also
valid in gracetune's own run files (see `config/aliases.py`).
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gracetune.config.importers.simpletuner import import_config
from gracetune.config.importers.simpletuner_adapter import SimpleTunerFiles
from gracetune.config.importers.simpletuner_keys import ENVIRONMENT_NAMES, KNOWN_KEYS
from gracetune.config.importers.values import is_off, parse_if_json, parse_scalar
from gracetune.config.parse_text import FORMATS_BY_SUFFIX, parse_json, parse_text, read_text
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.config.importers.report import ImportedRun

OWN_SECTIONS = ("model", "adapter", "datasets", "data_backend", "train", "validation")
"""Sections of gracetune's run files; a file with one of them is not SimpleTuner's."""
REQUIRED_KEYS = ("model_family", "model_type", "optimizer", "output_dir")
"""Options that SimpleTuner requires in addition to `data_backend_config`."""
MIN_KNOWN_SHARE = 0.8
"""Share of keys that are SimpleTuner's in a part of a config that is named as such."""
TEXT_KEY = re.compile(r"prompt|name|flavour|path|dir$|revision|note|comment|(^|_)id$")
"""Matches the names of options whose values stay texts, even if they look like numbers."""
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
"""Matches a variable in the value of another one, such as `${BASE_DIR}`."""
PARENTS = 5
"""Number of folders above a config in which the files that it names are searched."""


class ConfigFile(NamedTuple):
    """A parsed config file: an object with keys, or a list of datasets."""

    path: Path
    tree: dict[str, object] | list[object]


def find_tool(tree: Mapping[str, object]) -> str | None:
    """Return the trainer whose config this is, or None if it is gracetune's own run file."""
    config = tree.get("config")
    if isinstance(config, dict) and isinstance(config.get("process"), list):
        return "ai-toolkit"
    if _is_simpletuner(tree):
        return "SimpleTuner"
    return None


def _is_simpletuner(tree: Mapping[str, object]) -> bool:
    """Return True for a table of SimpleTuner's command-line options."""
    keys = {_option_name(key) for key in tree}
    if any(isinstance(tree.get(name), dict | list) for name in OWN_SECTIONS):
        return False
    if len(tree) > 1 and all(key.startswith("--") for key in tree):
        return True
    return "data_backend_config" in keys and any(key in keys for key in REQUIRED_KEYS)


def is_environment_file(path: Path) -> bool:
    """Return True for a file of environment variables, such as SimpleTuner's `config.env`."""
    return path.suffix.lower() == ".env" or path.name == ".env"


def import_files(paths: Sequence[Path]) -> ImportedRun:
    """Translate the config of another trainer into a run file.

    `paths` are its files. The files that a config names need not be among them if they are found
    relative to the working directory, to the config or to a folder above it.
    """
    files = [read_config(path) for path in paths]
    for file in files:
        if isinstance(file.tree, dict) and find_tool(file.tree) == "ai-toolkit":
            from gracetune.config.importers.ai_toolkit import import_job

            return import_job(file.path, file.tree)
    return import_config(_sort_files(files))


def check_importable(imported: ImportedRun) -> None:
    """Raise an error if gracetune cannot train what the other trainer's config asks for."""
    if imported.refusals:
        raise ConfigError("\n".join(imported.refusals))


def read_config(path: Path) -> ConfigFile:
    """Read a config file of another trainer: JSON, YAML, TOML, or environment variables."""
    text = read_text(path)
    if is_environment_file(path):
        return ConfigFile(path, parse_environment(text))
    text_format = FORMATS_BY_SUFFIX.get(path.suffix.lower())
    if text_format is None:
        known = ", ".join((*FORMATS_BY_SUFFIX, ".env"))
        raise ConfigError(f"{path} must end in one of {known}.")
    if text_format == "json" and text.lstrip().startswith("["):
        value, _ = parse_json(text, str(path))
        assert isinstance(value, list)
        return ConfigFile(path, value)
    return ConfigFile(path, parse_text(text, text_format, str(path)).tree)


def parse_environment(text: str) -> dict[str, object]:
    """Return SimpleTuner's options in a file of environment variables, such as `config.env`.

    `NAME+=value` appends to a variable; `TRAINER_EXTRA_ARGS` has further options.
    """
    variables: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or name.startswith("#"):
            continue
        words = VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), _unquote(value))
        if name.endswith("+"):
            words = f"{variables.get(name[:-1], '')} {words}".strip()
        variables[name.rstrip("+").strip()] = words
    options: dict[str, object] = {}
    for name, words in variables.items():
        if name == "TRAINER_EXTRA_ARGS":
            for word in shlex.split(words):
                option, equals, value = word.partition("=")
                options[_option_name(option)] = value if equals else True
        else:
            options[ENVIRONMENT_NAMES.get(name, name.lower())] = words
    return options


def _unquote(value: str) -> str:
    """Return the value of a shell variable without quotes and comments."""
    try:
        return " ".join(shlex.split(value, comments=True))
    except ValueError:  # a quote that is not closed, such as an apostrophe
        return value.strip().strip("\"'")


# The files of SimpleTuner


def _option_name(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _normalize(file: ConfigFile) -> dict[str, object]:
    """Return options by their names without `--`, with numbers and booleans instead of texts."""
    assert isinstance(file.tree, dict)
    options: dict[str, object] = {}
    for key, value in file.tree.items():
        name = _option_name(key)
        if name in options:
            raise ConfigError(f"{file.path} has the option {name} twice. Remove one of them.")
        options[name] = _normalize_value(name, value)
    return options


def _normalize_value(name: str, value: object) -> object:
    if isinstance(value, dict):
        return {key: _normalize_value(key, each) for key, each in value.items()}
    return value if TEXT_KEY.search(name) else parse_if_json(parse_scalar(value))


def _sort_files(files: Sequence[ConfigFile]) -> SimpleTunerFiles:
    """Find out the role of each file, and read the files that the config names."""
    config: dict[str, object] = {}
    names: list[str] = []
    folders = [file.path.parent for file in files]
    parts: dict[str, ConfigFile] = {}
    for file in files:
        role = _role(file)
        if role == "config":
            config.update(_normalize(file))
            names.append(str(file.path))
        elif role in parts:
            raise ConfigError(f"{file.path} and {parts[role].path} are both {role}. Pass one.")
        else:
            parts[role] = file
    if not config:
        raise ConfigError(
            f"{files[0].path} is {_ROLES[_role(files[0])]}. Pass the config too, such as "
            "config.json; it names the model and the training settings."
        )
    for role, key in _NAMED_FILES:
        found = None if role in parts else _read_named(key, config.get(key), folders)
        if found is not None:
            parts[role] = found
    if "datasets" not in parts:
        raise ConfigError(
            f"{names[0]} is a config of SimpleTuner, but its datasets are missing: "
            f"data_backend_config is {config.get('data_backend_config')!r}, and there is no such "
            f"file. Pass it too: gracetune import {names[0]} DATASETS.json"
        )
    name, entries = parts["datasets"]
    datasets = [
        {str(key): _normalize_value(str(key), value) for key, value in entry.items()}
        for entry in entries
        if isinstance(entry, dict)
    ]
    if len(datasets) < len(entries):
        raise ConfigError(f"{name}: every dataset must be an object with keys.")
    return SimpleTunerFiles(
        " + ".join(names),
        config,
        str(name),
        datasets,
        *_named_tree(parts.get("lycoris")),
        *_named_tree(parts.get("prompts")),
    )


_NAMED_FILES = (
    ("datasets", "data_backend_config"),
    ("lycoris", "lycoris_config"),
    ("prompts", "user_prompt_library"),
    ("prompts", "validation_prompt_library"),
)
"""Roles of files, with the option that names a file of this role."""
_ROLES = {
    "config": "a config of SimpleTuner",
    "datasets": "a list of SimpleTuner's datasets",
    "lycoris": "a LyCORIS config",
    "prompts": "a list of prompts",
    "unknown": "neither a run file nor a config of SimpleTuner or ai-toolkit",
}


def _role(file: ConfigFile) -> str:
    """Return the role of a file of SimpleTuner: one of `_ROLES`."""
    if isinstance(file.tree, list):
        return "datasets"
    names = [_option_name(key) for key in file.tree]
    if is_environment_file(file.path) or _is_simpletuner(file.tree):
        return "config"
    if "algo" in names:
        return "lycoris"
    known = sum(name in KNOWN_KEYS for name in names)
    if names and known / len(names) >= MIN_KNOWN_SHARE:
        return "config"
    values = list(file.tree.values())
    are_prompts = all(isinstance(v, str) or (isinstance(v, dict) and "prompt" in v) for v in values)
    return "prompts" if values and are_prompts else "unknown"


def _read_named(key: str, value: object, folders: Sequence[Path]) -> ConfigFile | None:
    """Read a file that the config names; the option may also have the content itself."""
    if isinstance(value, dict | list):
        return ConfigFile(Path(key), value)
    path = None if is_off(value) or value is True else find_named_file(str(value), folders)
    return None if path is None else read_config(path)


def find_named_file(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file that a config names, or None if there is none.

    SimpleTuner reads it relative to its own folder. It is searched relative to the working
    directory, then to the folders of the config files and those above them; leading folders of its
    name may be missing there, so that a path of another computer is found, too.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    parts = path.parts[1:] if path.is_absolute() else path.parts
    for folder in folders:
        for outer in (folder, *folder.resolve().parents[:PARENTS]):
            for start in range(len(parts)):
                found = outer.joinpath(*parts[start:])
                if found.is_file():
                    shorter = Path(os.path.relpath(found))
                    return found if ".." in shorter.parts else shorter
    return None


def _named_tree(file: ConfigFile | None) -> tuple[str, dict[str, object] | None]:
    if file is None or not isinstance(file.tree, dict):
        return "", None
    return str(file.path), file.tree
