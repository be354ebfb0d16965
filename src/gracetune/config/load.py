"""From a run file on disk to a checked `RunFile`, with all that was decided on the way."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from gracetune.config.environment import PRECISION, environment_settings, process_environment
from gracetune.config.explain import explain, locate
from gracetune.config.remarks import remarks
from gracetune.config.rules import breaches
from gracetune.config.schema import RunFile
from gracetune.config.text import parse_text, walk
from gracetune.config.translate import Draft, imply, override, translate
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.config.environment import EnvironmentSettings
    from gracetune.config.json_text import KeyPath

FORMAT_OF_SUFFIX = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
MAX_FILE_BYTES = 16 * 1024**2
_WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run file that was read, and what its reader should know."""

    run: RunFile
    notices: tuple[str, ...]
    """Spellings translated, values taken with a warning, what the environment decided."""
    path: Path


def load_run_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedRun:
    """Read and check a run file; without an environment, that of the process counts."""
    file = Path(path)
    text_format = FORMAT_OF_SUFFIX.get(file.suffix.lower())
    if text_format is None:
        raise ConfigError(f"{file}: a run file ends in {', '.join(FORMAT_OF_SUFFIX)}.")
    loaded = load_run_text(_read(file), text_format, str(file), overrides, environment)
    return LoadedRun(loaded.run, loaded.notices, file)


def load_run_text(
    text: str,
    format: str,
    name: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedRun:
    """Read and check the text of a run file; `name` stands for it in messages."""
    draft = translate(parse_text(text, format, name), name)
    for each in overrides:
        _override(draft, each)
    imply(draft)
    env = process_environment() if environment is None else environment
    decided = _apply_environment(draft, environment_settings(env))
    run = _validate(draft, name)
    return LoadedRun(
        run, (*_spelling_notice(draft), *draft.notices, *decided, *remarks(run)), Path(name)
    )


def parse_override(text: str) -> tuple[KeyPath, object]:
    """`a.b=c` as a path and a value: JSON where it is JSON, else the text itself."""
    key, equals, value = text.partition("=")
    steps = key.strip().replace("-", "_").split(".")
    if not equals or not all(steps):
        raise ConfigError(f"{text!r} is not an override; write a.b=c, such as train.batch_size=4.")
    return tuple(int(step) if step.isdecimal() else step for step in steps), parse_value(value)


def parse_value(text: str) -> object:
    """JSON where it is JSON, Python's True, False and None, else the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _override(draft: Draft, text: str) -> None:
    path, value = parse_override(text)
    if any(isinstance(each, float) and not math.isfinite(each) for _, each in walk(value)):
        raise ConfigError(f"override {text}: the value must be a finite number.")
    override(draft, path, value, f"override {text}")


def _read(file: Path) -> str:
    try:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name the run file in it.")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file} is larger than {MAX_FILE_BYTES} bytes: not a run file.")
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; check the path of the run file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 (byte {error.start}); save it with that encoding."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}.") from None


def _apply_environment(draft: Draft, settings: EnvironmentSettings) -> list[str]:
    """Fill in what the run file leaves open; each decision comes back as a notice."""
    notices = list(settings.notices)
    hints = "gh200_optimizations.enable_uvm_hints"
    if settings.uvm_hints is not None and draft.get(hints) is None:
        word = "true" if settings.uvm_hints else "false"
        override(draft, tuple(hints.split(".")), settings.uvm_hints, "the environment")
        notices.append(f"{hints} is {word}: the environment says so.")
    elif settings.uvm_hints is not None and draft.get(hints) is not settings.uvm_hints:
        notices.append(f"{hints}: the run file counts; the environment, which differs, does not.")
    precision = "train.mixed_precision"
    if settings.mixed_precision is not None and draft.get(precision) in (None, "auto"):
        override(draft, ("train", "mixed_precision"), settings.mixed_precision, "the environment")
        notices.append(f"{precision} is {draft.get(precision)}: {PRECISION} says so.")
    return notices


def _validate(draft: Draft, name: str) -> RunFile:
    try:
        run = RunFile.model_validate(_with_tuples(draft.tree), strict=True)
    except ValidationError as error:
        raise ConfigError(explain(error, draft.origins, name)) from None
    found = [
        f"{locate(_path(breach.key), draft.origins, name)} {breach.message}"
        for breach in breaches(run)
    ]
    if found:
        raise ConfigError("\n".join(found))
    return run


def _path(key: str) -> KeyPath:
    return tuple(int(step) if step.isdecimal() else step for step in key.split("."))


def _with_tuples(value: object) -> object:
    """Strict validation takes no list for a tuple; a file has no other way to write one."""
    if isinstance(value, dict):
        return {key: _with_tuples(child) for key, child in value.items()}
    if isinstance(value, list):
        return tuple(_with_tuples(child) for child in value)
    return value


def _spelling_notice(draft: Draft) -> list[str]:
    if not draft.spelled:
        return []
    read = ", ".join(f"{spelled} as {ours}" for spelled, ours in draft.spelled.items())
    return [f"Other spellings were read: {read}."]
