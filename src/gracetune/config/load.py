"""Load a run file: parse it, translate keys, apply overrides and the environment, and validate it.

`load_run_file` performs all steps; they are in `parse_text.py`, `aliases.py`, `environment.py`,
`schema.py` and `checks.py`. Decisions that the user should know about are returned as notices. An
error message has one line per mistake, with the file and line, the key, its value and the rule.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from gracetune.config.aliases import (
    ALIASES,
    OVERRIDE,
    REMOVED_KEYS,
    Draft,
    Origin,
    apply_fsdp_settings,
    apply_implied_settings,
    apply_override,
    fill_trigger_word,
    find_origin,
    pattern_of,
    translate,
)
from gracetune.config.checks import find_remarks, find_violations
from gracetune.config.environment import (
    PRECISION_VARIABLE,
    environment_settings,
    process_environment,
)
from gracetune.config.fsdp import STRATEGY, check_classes
from gracetune.config.importers.detect import (
    check_importable,
    find_tool,
    import_files,
    is_environment_file,
)
from gracetune.config.importers.report import summarize
from gracetune.config.parse_text import (
    FORMATS_BY_SUFFIX,
    MAX_DEPTH,
    ParsedText,
    dotted,
    find_fault,
    format_value,
    may_be_credential,
    parse_text,
    read_text,
    walk,
)
from gracetune.config.schema import RunFile
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails

    from gracetune.config.environment import EnvironmentSettings
    from gracetune.config.importers.report import ImportedRun
    from gracetune.config.parse_text import KeyPath


_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A validated run file, with notices for the user."""

    run: RunFile
    notices: tuple[str, ...]
    """Messages about translated keys, replaced values, environment variables and settings without
    effect."""
    path: Path
    import_summary: str = ""
    """Notice about the translation of another trainer's config; empty for a run file."""


def load_run_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedRun:
    """Load and validate a run file.

    The config of another trainer, such as SimpleTuner, is translated first, and a notice has a
    summary of its report.

    `overrides` are texts such as `train.batch_size=4`, which replace values of the file.
    `environment` has the environment variables; by default those of this process.
    """
    file = Path(path)
    text_format = FORMATS_BY_SUFFIX.get(file.suffix.lower())
    if text_format is None and not is_environment_file(file):
        raise ConfigError(f"{file} must end in one of {', '.join(FORMATS_BY_SUFFIX)}.")
    text = read_text(file)
    parsed = parse_text(text, text_format, str(file)) if text_format is not None else None
    if parsed is not None and find_tool(parsed.tree) is None:
        loaded = _load_parsed(parsed, str(file), overrides, environment)
        return LoadedRun(loaded.run, loaded.notices, file)
    imported = import_files([file])
    check_importable(imported)
    loaded = load_imported(imported, str(file), overrides, environment)
    summary = summarize(imported, str(file), loaded.run.output_dir)
    return LoadedRun(loaded.run, (summary, *loaded.notices), file, summary)


def load_run_text(
    text: str,
    format: str,
    name: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedRun:
    """Load and validate the text of a run file; see `load_run_file`.

    `format` is `json`, `yaml` or `toml`. `name` stands for the file in messages.
    """
    return _load_parsed(parse_text(text, format, name), name, overrides, environment)


def load_imported(
    imported: ImportedRun,
    name: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedRun:
    """Load and validate the run file made from another trainer's config; see `load_run_file`.

    Errors name the keys of that config, and what to do. `name` is its file.
    """
    origins = {_path(e.setting): Origin(e.file, e.key) for e in imported.keys if e.setting}
    try:
        return _load_parsed(
            ParsedText(imported.run, {}), name, overrides, environment, imported_from=origins
        )
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nThis is about a config of {imported.tool}: change the key there. "
            f"`gracetune import {name}` explains every key."
        ) from None


def _load_parsed(
    parsed: ParsedText,
    name: str,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None,
    imported_from: Mapping[KeyPath, Origin] | None = None,
) -> LoadedRun:
    draft = translate(parsed, name)
    draft.origins |= imported_from or {}
    for each in overrides:
        _override(draft, each)
    fsdp = apply_fsdp_settings(draft)
    apply_implied_settings(draft)
    fill_trigger_word(draft)
    env = process_environment() if environment is None else environment
    settings = environment_settings(env)
    environment_notices = _apply_environment(draft, settings)
    run = _validate(draft, name)
    requested = [fsdp.classes]
    if run.distributed.strategy == settings.sharding.get(STRATEGY):
        requested.append(settings.fsdp.classes)
    for classes in requested:
        if classes is not None:
            check_classes(classes, run.model.family)
    return LoadedRun(
        run,
        (*_spelling_notice(draft), *draft.notices, *environment_notices, *find_remarks(run)),
        Path(name),
    )


def parse_override(text: str) -> tuple[KeyPath, object]:
    """Split an override such as `train.batch_size=4` into the path of the key and its value.

    The index in a list is a step of its own or in brackets: `datasets.0.repeats` or
    `datasets[0].repeats`.
    """
    key, equals, value = text.partition("=")
    steps = re.sub(r"\[(\d+)\]", r".\1", key).strip().replace("-", "_").split(".")
    if not equals or not all(steps):
        raise ConfigError(f"{text!r} is not an override; write a.b=c, such as train.batch_size=4.")
    return _path(".".join(steps)), parse_value(value)


def parse_value(text: str) -> object:
    """Parse the value of an override: JSON, Python's True, False or None, or else plain text."""
    if text in _PYTHON_CONSTANTS:
        return _PYTHON_CONSTANTS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _override(draft: Draft, text: str) -> None:
    path, value = parse_override(text)
    if may_be_credential(path):
        text = dotted(path)
    for where, each in walk(value):
        if find_fault(each) is not None or len(where) > MAX_DEPTH:
            fault = find_fault(each) or f"nested more than {MAX_DEPTH} levels deep"
            raise ConfigError(f"{OVERRIDE} {text[:60]!a}: the value is {fault}.")
    apply_override(draft, path, value, f"{OVERRIDE} {text}")


def _apply_environment(draft: Draft, settings: EnvironmentSettings) -> list[str]:
    """Apply environment variables to settings that the run file does not set; return notices."""
    notices = list(settings.notices)
    hints = "gh200_optimizations.enable_uvm_hints"
    if settings.uvm_hints is not None and draft.get(hints) is None:
        word = "true" if settings.uvm_hints else "false"
        apply_override(draft, tuple(hints.split(".")), settings.uvm_hints, "the environment")
        notices.append(f"{hints} is {word}, set by the environment.")
    elif settings.uvm_hints is not None and draft.get(hints) is not settings.uvm_hints:
        notices.append(
            f"{hints}: the environment sets another value, but the run file takes precedence."
        )
    precision = "train.mixed_precision"
    if settings.mixed_precision is not None and draft.get(precision) in (None, "auto"):
        apply_override(
            draft, ("train", "mixed_precision"), settings.mixed_precision, "the environment"
        )
        notices.append(f"{precision} is {draft.get(precision)}, set by {PRECISION_VARIABLE}.")
    notices += _apply_sharding(draft, settings)
    return notices


def _apply_sharding(draft: Draft, settings: EnvironmentSettings) -> list[str]:
    """Apply the FSDP settings of `accelerate launch` where the run file has none."""
    theirs = settings.sharding
    if not theirs:
        return []
    ours = draft.get(STRATEGY)
    if ours not in (None, "auto", theirs.get(STRATEGY, ours)):
        return [
            f"{STRATEGY} is {ours}: the run file takes precedence over the configuration of "
            f"accelerate, which asks for {theirs[STRATEGY]}."
        ]
    applied, kept = [], []
    for key, value in theirs.items():
        before = draft.get(key)
        if before is None or (key == STRATEGY and before == "auto"):
            apply_override(draft, tuple(key.split(".")), value, "the environment")
            applied.append(f"{key} is {format_value(value)}")
        elif before != value:
            kept.append(f"{key} ({format_value(before)})")
    notices = [f"Set by the configuration of accelerate: {', '.join(applied)}."] if applied else []
    if kept:
        notices.append(
            "The run file takes precedence over the configuration of accelerate for "
            f"{', '.join(kept)}."
        )
    if settings.fsdp.remarks():
        notices.append(settings.fsdp.remarks())
    return notices


def _validate(draft: Draft, name: str) -> RunFile:
    try:
        run = RunFile.model_validate(_with_tuples(draft.tree), strict=True)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, draft.origins, name)) from None
    found = [
        f"{locate_key(_path(breach.key), draft.origins, name)} {breach.message}"
        for breach in find_violations(run)
    ]
    if found:
        raise ConfigError("\n".join(found))
    return run


def _path(key: str) -> KeyPath:
    return tuple(
        int(step) if step.isdecimal() and len(step) < 10 else step for step in key.split(".")
    )


def _with_tuples(value: object) -> object:
    """Convert all lists to tuples, which pydantic's strict mode requires."""
    if isinstance(value, dict):
        return {key: _with_tuples(child) for key, child in value.items()}
    if isinstance(value, list):
        return tuple(_with_tuples(child) for child in value)
    return value


def _spelling_notice(draft: Draft) -> list[str]:
    if not draft.respelled:
        return []
    respelled = ", ".join(f"{theirs} -> {ours}" for theirs, ours in draft.respelled.items())
    return [f"Keys of other tools were translated: {respelled}."]


# Error messages

_TYPE_RULES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text, in quotes",
    "string_too_short": "text that is not empty",
    "tuple_type": "a list",
    "dict_type": "an object with keys",
    "model_type": "an object with keys",
    "model_attributes_type": "an object with keys",
}
_BOUND_RULES = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
    "multiple_of": ("multiple_of", "a multiple of"),
    "too_long": ("max_length", "a list of"),
    "too_short": ("min_length", "a list of"),
}


def explain_errors(error: ValidationError, origins: Mapping[KeyPath, Origin], name: str) -> str:
    """Format pydantic's errors as a message with one line per mistake.

    `origins` has the place of each value in the file `name`.
    """
    found: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors():
        found.setdefault(_key_path(detail["loc"]), []).append(detail)
    return "\n".join(
        _explain_one(path, details, origins, name)
        for path, details in found.items()
        if not any(_is_inside(other, path) for other in found)
    )


def locate_key(path: KeyPath, origins: Mapping[KeyPath, Origin], name: str) -> str:
    """Return the location and name of a key for messages, such as `run.json:3: optimizer.lr`.

    If the user wrote another tool's key, both names are given: `run.json:3: lr (optimizer.lr)`.
    """
    ours = dotted(path)
    if path in origins and origins[path].spelling != ours:
        return f"{origins[path].location}: {origins[path].spelling} ({ours})"
    nearest = find_origin(path, origins)
    return f"{name if nearest is None else nearest.location}: {ours}"


def suggest_fix(path: KeyPath) -> str:
    """Return advice for an unknown key, such as the most similar key of the schema."""
    wrong = str(path[-1])
    if pattern_of(path) in REMOVED_KEYS:
        return f"{REMOVED_KEYS[pattern_of(path)]}."
    if "." in wrong:
        return f"write it nested: {wrong.replace('.', ': {')}: ...{'}' * wrong.count('.')}."
    keys = known_keys()
    section = pattern_of(path[:-1])
    siblings = _names_in(section, keys) or _names_in(section, ALIASES)
    near = difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.7)
    if near:
        return f"did you mean {dotted((*path[:-1], near[0]))}?"
    by_name: dict[str, list[str]] = {}
    for key in (*keys, *(alias for alias in ALIASES if not alias.endswith("."))):
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    # Stricter than above: a key of another section is rarely meant unless it has the same name.
    close = difflib.get_close_matches(wrong, by_name, n=1, cutoff=0.8)
    if close:
        found = [key.replace("*", "0") for key in by_name[close[0]]]
        ours = [key for key in found if key.replace(".0.", ".*.") in keys] or found
        return f"did you mean {' or '.join(ours[:3])}?"
    return f"known here: {', '.join(siblings)}." if siblings else "it is not in the schema."


def _names_in(section: str, keys: Iterable[str]) -> list[str]:
    """Return the names of the keys that lie directly in a section."""
    return sorted(key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section)


def known_keys() -> list[str]:
    """Return all dotted keys of the schema, including sections; `*` is the index in a list."""
    return _section_keys(RunFile, "")


def _section_keys(model: type[BaseModel], prefix: str) -> list[str]:
    found = []
    for name, info in model.model_fields.items():
        found.append(prefix + name)
        inner, mark = _section_of(info.annotation)
        if inner is not None:
            found += _section_keys(inner, f"{prefix}{name}{mark}.")
    return found


def _section_of(annotation: object) -> tuple[type[BaseModel] | None, str]:
    """Return the section class (pydantic model) that a field's type contains; None if it has none.

    The second value follows the field's name in dotted keys: `.*` for a list of sections, otherwise
    empty.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    mark = ".*" if get_origin(annotation) is tuple else ""
    for argument in get_args(annotation):
        inner, deeper = _section_of(argument)
        if inner is not None:
            return inner, mark or deeper
    return None, ""


def _key_path(place: Sequence[str | int]) -> KeyPath:
    """Convert a pydantic error location to the path of a key in the run file.

    Where a field is a union, pydantic inserts the name of the type that it tried; that name is
    removed.
    """
    path: list[str | int] = []
    kind: object = RunFile
    for step in place:
        choices = _alternatives(kind)
        if len(choices) > 1:  # the next step names the member of the union that was tried
            kind = next((each for each in choices if str(step).startswith(_type_name(each))), None)
        else:
            path.append(step)
            kind = _child_type(choices[0], step)
    return tuple(path)


def _alternatives(annotation: object) -> list[object]:
    """Return the members of a union type except None; for another type, the type alone."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin not in (Union, UnionType):
        return [annotation]
    kinds = (kind for kind in get_args(annotation) if kind is not NoneType)
    return [choice for kind in kinds for choice in _alternatives(kind)]


def _type_name(kind: object) -> str:
    named = get_origin(kind) or kind
    return named.__name__ if isinstance(named, type) else str(named)


def _child_type(kind: object, step: str | int) -> object:
    """Return the type of a model's field `step`, of a tuple's items, or of a dict's values.

    Returns None if it is unknown.
    """
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        info = kind.model_fields.get(str(step))
        return None if info is None else info.annotation
    origin = get_origin(kind)
    if origin in (tuple, dict):
        return get_args(kind)[0 if origin is tuple else 1]
    return None


def _is_inside(path: KeyPath, outer: KeyPath) -> bool:
    """Return True if the key `path` lies in the section `outer`, at any depth.

    If pydantic reports errors for both, only the one of the key is shown, as it is more precise.
    """
    return len(path) > len(outer) and path[: len(outer)] == outer


def _explain_one(
    path: KeyPath, details: Sequence[ErrorDetails], origins: Mapping[KeyPath, Origin], name: str
) -> str:
    place = locate_key(path, origins, name)
    kind = details[0]["type"]
    if kind == "extra_forbidden":
        return "\n".join(
            f"{locate_key(each, origins, name)} is not a known key; {suggest_fix(each)}"
            for each in _unknown_keys(path, details[0]["input"])
        )
    if kind == "missing":
        return f"{place} is missing."
    return f"{place} is {format_value(details[0]['input'], path)}; it must be {_rules(details)}."


def _unknown_keys(path: KeyPath, value: object) -> list[KeyPath]:
    """Return the unknown keys at `path`, which is not in the schema.

    If it is a section of another tool, such as ai-toolkit's `network`, its known keys have been
    translated, and the unknown ones are what is left in it.
    """
    is_section = any(alias.startswith(f"{pattern_of(path)}.") for alias in ALIASES)
    if is_section and isinstance(value, dict) and value:
        return [(*path, key) for key in value]
    return [path]


def _rules(details: Sequence[ErrorDetails]) -> str:
    """Return the allowed values of a setting in words, such as "a number or 'auto'".

    `details` has pydantic's errors for the setting: one for each member of a union type.
    """
    rules = list(dict.fromkeys(map(_rule, details)))
    if len(rules) == 1:
        return rules[0]
    words = [rule.removeprefix("one of ").replace(" or ", ", ") for rule in rules]
    return " or ".join(", ".join(words).rsplit(", ", 1))


def _rule(detail: ErrorDetails) -> str:
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind in _TYPE_RULES:
        return _TYPE_RULES[kind]
    if kind in _BOUND_RULES:
        bound, words = _BOUND_RULES[kind]
        return f"{words} {context[bound]:g}"
    if kind == "literal_error":
        expected = str(context["expected"])
        return f"one of {expected}" if " or " in expected else expected
    if kind == "value_error":  # raised by our own validators, with the rule as text
        return str(context["error"])
    return detail["msg"].removeprefix("Input should be ").removeprefix("Input should ")


# Writing


def resolved_json(run: RunFile) -> str:
    """Return all settings of a run as JSON text, which can be loaded again as a run file.

    Credentials are replaced by `***` and must be set again.
    """
    return json.dumps(run.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def json_schema() -> str:
    """Return the JSON Schema of run files as text, with the description of every setting."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunFile.model_json_schema(),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
