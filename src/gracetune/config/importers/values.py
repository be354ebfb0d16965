"""Read the values of other trainers' configs, which may be texts where numbers are meant."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING

from gracetune.config.importers.report import MISSING

if TYPE_CHECKING:
    from gracetune.config.importers.report import KeyReader

NUMBER = re.compile(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?\s*", re.IGNORECASE)
WORDS = {"true": True, "false": False, "yes": True, "on": True, "off": False}
OFF_TEXTS = ("", "0", "0.0", "false", "no", "off", "none", "null", "[]", "{}")


def parse_scalar(value: object) -> object:
    """Return the number or boolean that a text stands for; any other value is unchanged.

    A whole number that is written as 1e4 or 3.0 is an integer.
    """
    if isinstance(value, str) and value.strip().lower() in WORDS:
        return WORDS[value.strip().lower()]
    found = number(value)
    if isinstance(found, float) and found.is_integer():
        return int(found)
    return value if found is None else found


def number(value: object) -> float | int | None:
    """Return a value as a number; None if it is none, or true or false."""
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value) if re.search("[.eE]", value) else int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def flag(value: object) -> bool:
    """Return True if a value turns something on: true, `"true"`, 1 and the like."""
    return parse_scalar(value) in (True, 1)


def is_off(value: object) -> bool:
    """Return True if a value is missing, empty, zero, false, or a text that means one of these."""
    if isinstance(value, str):
        return value.strip().lower() in OFF_TEXTS
    return value is MISSING or value is None or value in (False, 0, [], {})


def texts(value: object) -> list[str]:
    """Return a list of texts from a list, a JSON list, or a text with commas between them."""
    value = parse_json(value)
    if isinstance(value, str):
        value = value.split(",")
    elif isinstance(value, int | float):
        value = [value]
    found = [str(each).strip() for each in value] if isinstance(value, list) else []
    return [text for text in found if text]


def parse_json(value: object) -> object:
    """Return the list or section that a text such as `["to_q"]` stands for, or the value itself."""
    if isinstance(value, str) and value.strip().startswith(("[", "{")):
        try:
            found: object = json.loads(value)
        except ValueError:
            return value
        return found
    return value


def take_unless_off(reader: KeyReader, key: str, setting: str, why: str) -> None:
    """Take the value of a key; if it is off, report it as not needed, for the reason `why`."""
    if is_off(reader.peek(key)):
        reader.not_needed(key, why)
    reader.take(key, setting)


def set_flag(reader: KeyReader, key: str, setting: str, value: object, why: str = "") -> None:
    """Set a setting to `value` if a key is on; report the key in either case."""
    if flag(reader.peek(key)):
        reader.translate(key, setting, value, why)
    reader.not_needed(key, "it is off")


def not_supported_unless_off(reader: KeyReader, key: str, fix: str) -> None:
    """Report a key as not supported, or as not needed if its value turns the feature off."""
    if is_off(reader.peek(key)):
        reader.not_needed(key, "it is off")
    reader.not_supported(key, fix)
