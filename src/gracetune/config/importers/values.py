"""Read the values of other trainers' configs, which may be missing, empty or written as text.

The functions that take a `KeyReader` report each key that they look at.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gracetune.config.importers.report import MISSING
from gracetune.optim.registry import optimizer_info

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.config.importers.report import KeyReader

Value = TypeVar("Value")

NUMBER = re.compile(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?\s*", re.IGNORECASE)
WORDS = {"true": True, "false": False, "yes": True, "on": True, "off": False}
OFF_TEXTS = ("", "0", "0.0", "false", "no", "off", "none", "null", "[]", "{}")
EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of keys that are not set."""
NO_EFFECT = "it has the value that changes nothing"
PLANNED_CHECKPOINTING = "on a GPU it has no effect, because the plan decides for each block"


class Unsupported(NamedTuple):
    """A key that gracetune has no counterpart for."""

    fix: str
    """What to do instead, if the key is used."""
    off: tuple[object, ...] = (False,)
    """Values with which the key has no effect. An empty value never has one."""


# Values


def parse_scalar(value: object) -> object:
    """Return the number or boolean that a text stands for; any other value is unchanged.

    A whole number that is written as 1e4 or 3.0 is an integer.
    """
    if isinstance(value, str) and value.strip().lower() in WORDS:
        return WORDS[value.strip().lower()]
    found = as_number(value)
    if isinstance(found, float) and found.is_integer():
        return int(found)
    return value if found is None else found


def as_number(value: object) -> float | int | None:
    """Return a finite number, also if it is written as text; None for other values."""
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value) if re.search("[.eE]", value) else int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def as_float(value: object) -> float | None:
    """Return a finite number as a float, also if it is written as text; None for other values."""
    number = as_number(value)
    return None if number is None else float(number)


def as_int(value: object) -> int | None:
    """Return a whole number, also if it is written as text; None for other values."""
    number = as_number(value)
    return int(number) if number is not None and number == int(number) else None


def as_bool(value: object) -> bool | None:
    """Return true or false, also if it is written as text, 0 or 1; None for other values."""
    found = parse_scalar(value)
    return bool(found) if found in (0, 1) else None


def as_text(value: object) -> str | None:
    """Return a text or number as text; None for other values."""
    return str(value) if isinstance(value, str | int | float) else None


EXPECTED: Mapping[Callable[[object], object], str] = {
    as_int: "a whole number",
    as_float: "a number",
    as_bool: "true or false",
    as_text: "text",
}


def is_off(value: object) -> bool:
    """Return True if a value is missing, empty, zero, false, or a text that means one of these."""
    if isinstance(value, str):
        return value.strip().lower() in OFF_TEXTS
    return value is MISSING or value is None or value in (False, 0, [], {})


def texts(value: object) -> list[str]:
    """Return a list of texts from a list, a JSON list, or a text with commas between them."""
    value = parse_if_json(value)
    if isinstance(value, str):
        value = value.split(",")
    elif isinstance(value, int | float):
        value = [value]
    found = [str(each).strip() for each in value] if isinstance(value, list) else []
    return [text for text in found if text]


def parse_if_json(value: object) -> object:
    """Return the list or section that a text such as `["to_q"]` stands for, or the value itself."""
    if isinstance(value, str) and value.strip().startswith(("[", "{")):
        try:
            found: object = json.loads(value)
        except ValueError:
            return value
        return found
    return value


def own_output_dir(theirs: str) -> str:
    """Return a folder below `runs` with the name of the other trainer's output folder.

    It is never that folder, so that nothing is written among the other trainer's files.
    """
    name = PurePath(theirs).name
    ours = PurePath("runs", name if name not in ("", "..") else "imported")
    is_theirs = Path(theirs).expanduser().resolve() == Path(ours).resolve()
    return f"{ours}-gracetune" if is_theirs else str(ours)


def package_remark(optimizer: str) -> str:
    """Return the command that installs the package of an optimizer; empty if it needs none."""
    needs_package = optimizer_info(optimizer).package_state_nbytes > 0
    return "training needs pip install 'gracetune[optimizers]'" if needs_package else ""


def clip_length(frames: float) -> int:
    """Return the largest number of the form 4n+1 that is at most `frames`, and at least 1."""
    return (max(int(frames), 1) - 1) // 4 * 4 + 1


# Keys


def read_value(
    reader: KeyReader | None, key: str, kind: Callable[[object], Value | None]
) -> Value | None:
    """Return the value of a key; None if it is missing, empty or of the wrong kind."""
    value = MISSING if reader is None else reader.peek(key)
    return None if value is MISSING or value in EMPTY else kind(value)


def is_usable(reader: KeyReader, key: str, kind: Callable[[object], object]) -> bool:
    """Return True if a key has a usable value; report it if it is empty or of the wrong kind."""
    value = reader.peek(key)
    if value is MISSING:
        return False
    if value in EMPTY:
        reader.not_needed(key, "it is empty")
        return False
    if kind(value) is None:
        reader.not_supported(key, f"it must be {EXPECTED[kind]}, so it is ignored")
        return False
    return True


def put_value(reader: KeyReader, key: str, setting: str, value: object, why: str = "") -> None:
    """Use a value for a setting; the report says whether it differs from the one in the file."""
    given = reader.peek(key)
    is_number = isinstance(given, int) and not isinstance(given, bool) and isinstance(value, float)
    if not why and given == value and (is_number or isinstance(given, type(value))):
        reader.take(key, setting)
    else:
        reader.translate(key, setting, value, why)


def copy_value(
    reader: KeyReader,
    key: str,
    setting: str,
    kind: Callable[[object], object],
    default: object = None,
) -> None:
    """Use the value of a key for a setting, or the other trainer's default if there is none."""
    if is_usable(reader, key, kind):
        put_value(reader, key, setting, kind(reader.peek(key)))
    elif default is not None:
        set_default(reader, key, setting, default)


def copy_flag(reader: KeyReader, key: str, setting: str, value: object = True) -> None:
    """Use `value` for a setting if a key is true; otherwise report that it has no effect."""
    if read_value(reader, key, as_bool):
        put_value(reader, key, setting, value)
    else:
        reader.not_needed(key, NO_EFFECT)


def take_unless_off(reader: KeyReader, key: str, setting: str, why: str) -> None:
    """Take the value of a key; if it is off, report it as not needed, for the reason `why`."""
    if is_off(reader.peek(key)):
        reader.not_needed(key, why)
    reader.take(key, setting)


def set_default(reader: KeyReader, key: str, setting: str, value: object) -> None:
    """Set the other trainer's default of a key that the file does not have, and report it."""
    reader.imported.default(setting, value, f"{key} is not set")


def not_supported_unless_off(
    reader: KeyReader, key: str, fix: str, off: tuple[object, ...] | None = None
) -> None:
    """Report a key as not supported, or as not needed if its value turns the feature off.

    `off` has the values that do so; without it, all values of `is_off` do.
    """
    value = reader.peek(key)
    if is_off(value) if off is None else (value in EMPTY or _is_among(value, off)):
        reader.not_needed(key, NO_EFFECT)
    else:
        reader.not_supported(key, fix)


def _is_among(value: object, off: tuple[object, ...]) -> bool:
    """Return True for a value in `off`, also if it is written as text."""
    if isinstance(value, str):
        return any(
            each in off for each in (value, as_bool(value), as_float(value)) if each is not None
        )
    return value in off


# Sections


def open_section(reader: KeyReader, key: str) -> KeyReader | None:
    """Return a section; report the key if it is empty or something else."""
    if reader.peek(key) in EMPTY:
        reader.not_needed(key, "it is empty")
        return None
    found = reader.section(key)
    if found is None:
        reader.not_supported(key, "it must be a section with keys, so it is ignored")
    return found


def finish_section(
    reader: KeyReader, not_needed: Mapping[str, str], unsupported: Mapping[str, Unsupported]
) -> None:
    """Report the keys of the tables, and all keys that are left as not known."""
    for key, why in not_needed.items():
        reader.not_needed(key, why)
    for key, rule in unsupported.items():
        not_supported_unless_off(reader, key, rule.fix, rule.off)
    reader.finish()
