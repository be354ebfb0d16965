"""What is wrong with a run file, in one line a mistake: place, key, value, rule, way out."""

from __future__ import annotations

import difflib
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from gracetune.config.schema import RunFile
from gracetune.config.spellings import ALIASES, ELSEWHERE
from gracetune.config.text import dotted, shown
from gracetune.config.translate import nearest_origin, pattern_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails

    from gracetune.config.json_text import KeyPath
    from gracetune.config.translate import Origin

_KINDS = {
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
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
    "multiple_of": ("multiple_of", "a multiple of"),
    "too_long": ("max_length", "a list of"),
    "too_short": ("min_length", "a list of"),
}


def explain(error: ValidationError, origins: Mapping[KeyPath, Origin], name: str) -> str:
    """Every mistake that validation found, a line each."""
    found: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors():
        found.setdefault(_keys_of(detail["loc"]), []).append(detail)
    return "\n".join(
        _explain_one(path, details, origins, name)
        for path, details in found.items()
        if not any(_is_inside(other, path) for other in found)
    )


def locate(path: KeyPath, origins: Mapping[KeyPath, Origin], name: str) -> str:
    """Where a key stands and what it is called: `run.json:3: lr (optimizer.lr)`."""
    ours = dotted(path)
    if path in origins and origins[path].spelled != ours:
        return f"{origins[path].where}: {origins[path].spelled} ({ours})"
    nearest = nearest_origin(path, origins)
    return f"{name if nearest is None else nearest.where}: {ours}"


def suggest(path: KeyPath) -> str:
    """The way out for a key that nobody knows: the nearest one, wherever it belongs."""
    wrong = str(path[-1])
    if pattern_of(path) in ELSEWHERE:
        return f"{ELSEWHERE[pattern_of(path)]}."
    if "." in wrong:
        return f"write it nested: {wrong.replace('.', ': {')}: ...{'}' * wrong.count('.')}."
    keys = known_keys()
    section = pattern_of(path[:-1])
    siblings = sorted(key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section)
    near = difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.75)
    if near:
        return f"did you mean {dotted((*path[:-1], near[0]))}?"
    by_name: dict[str, list[str]] = {}
    for key in (*keys, *(alias for alias in ALIASES if not alias.endswith("."))):
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    close = difflib.get_close_matches(wrong, by_name, n=1, cutoff=0.6)
    if close:
        found = [key.replace("*", "0") for key in by_name[close[0]]]
        ours = [key for key in found if key.replace(".0.", ".*.") in keys] or found
        return f"did you mean {' or '.join(ours[:3])}?"
    return f"known here: {', '.join(siblings)}." if siblings else "it is not in the schema."


def known_keys() -> list[str]:
    """Every dotted key of the schema, sections too; `*` is any data set."""
    return _keys(RunFile, "")


def _keys(model: type[BaseModel], prefix: str) -> list[str]:
    found = []
    for name, info in model.model_fields.items():
        found.append(prefix + name)
        inner, mark = _section_of(info.annotation)
        if inner is not None:
            found += _keys(inner, f"{prefix}{name}{mark}.")
    return found


def _section_of(annotation: object) -> tuple[type[BaseModel] | None, str]:
    """The section behind a field's type, be it optional or a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    mark = ".*" if get_origin(annotation) is tuple else ""
    for argument in get_args(annotation):
        inner, _ = _section_of(argument)
        if inner is not None:
            return inner, mark
    return None, ""


def _keys_of(place: Sequence[str | int]) -> KeyPath:
    """The keys of a place that validation names: beside them it has the kinds it tried."""
    path: list[str | int] = []
    kind: object = RunFile
    for step in place:
        choices = _choices(kind)
        if len(choices) > 1:  # where a value may be of several kinds, the next step is one of them
            kind = next((each for each in choices if str(step).startswith(_name_of(each))), None)
        else:
            path.append(step)
            kind = _within(choices[0], step)
    return tuple(path)


def _choices(annotation: object) -> list[object]:
    """The kinds that a value may be of, without none."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _choices(get_args(annotation)[0])
    if origin not in (Union, UnionType):
        return [annotation]
    kinds = (kind for kind in get_args(annotation) if kind is not NoneType)
    return [choice for kind in kinds for choice in _choices(kind)]


def _name_of(kind: object) -> str:
    named = get_origin(kind) or kind
    return named.__name__ if isinstance(named, type) else str(named)


def _within(kind: object, step: str | int) -> object:
    """What a value of this kind has at a key or place; none where that is not known."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        info = kind.model_fields.get(str(step))
        return None if info is None else info.annotation
    origin = get_origin(kind)
    if origin in (tuple, dict):
        return get_args(kind)[0 if origin is tuple else 1]
    return None


def _is_inside(path: KeyPath, outer: KeyPath) -> bool:
    """Of a value that may be of several kinds, what is wrong within one says more."""
    return len(path) > len(outer) and path[: len(outer)] == outer


def _explain_one(
    path: KeyPath, details: Sequence[ErrorDetails], origins: Mapping[KeyPath, Origin], name: str
) -> str:
    place = locate(path, origins, name)
    kind = details[0]["type"]
    if kind == "extra_forbidden":
        return f"{place} is not a known key; {suggest(path)}"
    if kind == "missing":
        return f"{place} is missing."
    return f"{place} is {shown(details[0]['input'])}; it must be {_rules(details)}."


def _rules(details: Sequence[ErrorDetails]) -> str:
    """Whatever the value may be; of several kinds, all of them in one row."""
    rules = list(dict.fromkeys(map(_rule, details)))
    if len(rules) == 1:
        return rules[0]
    words = [rule.removeprefix("one of ").replace(" or ", ", ") for rule in rules]
    return " or ".join(", ".join(words).rsplit(", ", 1))


def _rule(detail: ErrorDetails) -> str:
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{words} {context[bound]:g}"
    if kind == "literal_error":
        expected = str(context["expected"])
        return f"one of {expected}" if " or " in expected else expected
    if kind == "value_error":  # of a validator of ours, which says the rule
        return str(context["error"])
    return detail["msg"].removeprefix("Input should be ").removeprefix("Input should ")
