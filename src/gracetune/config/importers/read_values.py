"""Read the values of another trainer's config, which may be missing, empty or written as text.

The functions report each key that they look at, through its `KeyReader`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gracetune.config.importers.report import MISSING, KeyReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.config.importers.report import KeyReader

Value = TypeVar("Value")

EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of keys that are not set."""
NO_EFFECT = "it has the value that changes nothing"


class Unsupported(NamedTuple):
    """A key that gracetune has no counterpart for."""

    fix: str
    """What to do instead, if the key is used."""
    off: tuple[object, ...] = (False,)
    """Values with which the key has no effect. An empty value never has one."""


def as_int(value: object) -> int | None:
    """Return a whole number, also if it is written as text; None for other values."""
    number = as_float(value)
    return int(number) if number is not None and number == int(number) else None


def as_float(value: object) -> float | None:
    """Return a finite number, also if it is written as text; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def as_bool(value: object) -> bool | None:
    """Return true or false, also if it is written as text, 0 or 1; None for other values."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


def as_text(value: object) -> str | None:
    """Return a text or number as text; None for other values."""
    return str(value) if isinstance(value, str | int | float) else None


EXPECTED: Mapping[Callable[[object], object], str] = {
    as_int: "a whole number",
    as_float: "a number",
    as_bool: "true or false",
    as_text: "text",
}


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
    """Use the value of a key for a setting, or ai-toolkit's default if the file has no value."""
    if is_usable(reader, key, kind):
        put_value(reader, key, setting, kind(reader.peek(key)))
    elif default is not None:
        set_default(reader, key, setting, default)


def copy_flag(
    reader: KeyReader, key: str, setting: str, value: object = True, why: str = ""
) -> None:
    """Use `value` for a setting if a key is true; otherwise report that it has no effect."""
    if read_value(reader, key, as_bool):
        put_value(reader, key, setting, value, why)
    else:
        reader.not_needed(key, NO_EFFECT)


def set_default(reader: KeyReader, key: str, setting: str, value: object, why: str = "") -> None:
    """Set the other trainer's default of a key that the file does not have, and report it."""
    reader.imported.set(setting, value)
    text = f"{setting} is {value}: {why or f'the default of {reader.imported.tool}'}"
    report = KeyReport(reader.file, f"{key} (not set)", None, "translated", text)
    reader.imported.keys.append(report)


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
        value = reader.peek(key)
        if value in EMPTY or _is_off(value, rule.off):
            reader.not_needed(key, NO_EFFECT)
        else:
            reader.not_supported(key, rule.fix)
    reader.finish()


def _is_off(value: object, off: tuple[object, ...]) -> bool:
    """Return True for a value with which a key has no effect, also if it is written as text."""
    if isinstance(value, str):
        return any(
            each in off for each in (value, as_bool(value), as_float(value)) if each is not None
        )
    return value in off
