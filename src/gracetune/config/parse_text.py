"""Parse the text of a run file into dictionaries and lists, and record the line of every key.

The lines are for error messages. Three formats are supported:

- JSON, with `//` comments. The outermost braces may be missing.
- YAML without tags that create Python objects, and with YAML 1.2's rules for scalars: `no` is text
  and `1e-6` is a number.
- TOML.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import yaml

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


KeyPath = tuple[str | int, ...]

MAX_DEPTH = 64
MAX_INTEGER_BITS = 64
_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*)*")
FORMATS = ("json", "yaml", "toml")
FORMATS_BY_SUFFIX = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
MAX_FILE_BYTES = 16 * 1024**2
MAX_YAML_NODES = 100_000
_MAX_SHOWN = 60
_FEWER_LEVELS = "No setting is: remove the inner levels, or check the path of the run file."

_TOML_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_TOML_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_TOML_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*[A-Za-z0-9_-]+)*)\s*="""
)


@dataclass(frozen=True, slots=True)
class ParsedText:
    """The content of a run file before translation and validation."""

    tree: dict[str, object]
    """The values as nested dictionaries and lists."""
    lines: Mapping[KeyPath, int]
    """Line number of each key and list item, by its path, counted from 1."""


def read_text(file: Path) -> str:
    """Return the text of a config file; raise an error with advice if it cannot be read."""
    try:
        if file.is_dir():
            raise ConfigError(f"{file} is a folder. Name the run file in it.")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{file} is larger than {MAX_FILE_BYTES} bytes, so it is not a run file. Check its "
                "path."
            )
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist. Check the path of the run file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 (byte {error.start}). Save it with that encoding."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}.") from None


def parse_text(text: str, text_format: str, name: str) -> ParsedText:
    """Parse text in one of `FORMATS`. Error messages have the file's `name`, line and column."""
    if text_format not in _PARSERS:
        raise ConfigError(f"{name}: format {text_format!r} is not one of {', '.join(FORMATS)}.")
    if not text.strip():
        raise ConfigError(f"{name} is empty. A run file is an object with keys.")
    try:
        tree, lines = _PARSERS[text_format](text, name)
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply. {_FEWER_LEVELS}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: the top level is {describe_type(tree)}; it must be an object.")
    _check_values(tree, lines, name)
    return ParsedText(tree, lines)


def _check_values(tree: dict[str, object], lines: Mapping[KeyPath, int], name: str) -> None:
    """Raise an error for a number, text or key that no setting can have, and for deep nesting."""
    for path, value in walk(tree):
        where = locate_line(name, lines, path)
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{where}: nested more than {MAX_DEPTH} levels deep. {_FEWER_LEVELS}")
        fault = find_fault(value)
        if fault is not None:
            raise ConfigError(f"{where}: {dotted(path)} is {fault}.")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            holder = dotted(path) or "the top level"
            raise ConfigError(f"{where}: {holder} has a key that is not text; put it in quotes.")
        for key in value if isinstance(value, dict) else ():
            if find_fault(key) is not None:
                raise ConfigError(f"{where}: the key {key!a} is {find_fault(key)}.")


def find_fault(value: object) -> str | None:
    """Return why no setting can have a number or text, with the rule; None if it is valid."""
    match value:
        case float() if not math.isfinite(value):
            return f"{value}; it must be a finite number"
        case int() if value.bit_length() > MAX_INTEGER_BITS:
            return f"an integer of {value.bit_length()} bits; at most {MAX_INTEGER_BITS} are valid"
        case str() if any("\ud800" <= character <= "\udfff" for character in value):
            return "text with a lone surrogate, which is not a Unicode character; remove it"
    return None


def walk(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield the path and value of every node of a tree of dictionaries and lists, parents first."""
    yield path, value
    if isinstance(value, dict):
        for key, child in value.items():
            yield from walk(child, (*path, key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from walk(child, (*path, index))


def check_value(value: object, name: str) -> None:
    """Raise an error if a value from outside of a run file has a number or text that is invalid."""
    for path, each in walk(value):
        fault = find_fault(each)
        if fault is not None:
            raise ConfigError(f"{dotted((name, *path))} is {fault}.")


def dotted(path: KeyPath) -> str:
    """Join a path with dots, as in messages and overrides: `datasets.0.id`."""
    return ".".join(str(step) or '""' for step in path)


def locate_line(name: str, lines: Mapping[KeyPath, int], path: KeyPath) -> str:
    """Return `file:line` of a key, else of the nearest section around it, else only the file."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return f"{name}:{lines[path[:length]]}"
    return name


def format_value(value: object, path: KeyPath = ()) -> str:
    """Return a value as JSON for messages, cut off after 60 characters.

    Options of remote storage may be credentials, so only their type is shown. `path` is the place
    of the value in the run file.
    """
    if any(may_be_credential((*path, *inner)) for inner, _ in walk(value)):
        return describe_type(value)
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def may_be_credential(path: KeyPath) -> bool:
    """Return True if a setting is, or contains, options of remote storage."""
    return "options" in path or path[-1:] == ("remote",)


def describe_type(value: object) -> str:
    """Return the type of a parsed value in words for messages, such as "a list"."""
    for kind, words in _TYPE_NAMES:
        if isinstance(value, kind):
            return words
    return f"a {type(value).__name__}"


_TYPE_NAMES = (
    (dict, "an object"),
    ((list, tuple), "a list"),
    (str, "text"),
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (type(None), "null"),
)


# JSON


def parse_json(text: str, name: str) -> tuple[object, dict[KeyPath, int]]:
    """Parse JSON with `//` comments; return the value, and the line of every key and list item."""
    reader = _JsonReader(text, name)
    return reader.document(), reader.lines


class _JsonReader:
    """A recursive-descent JSON parser that records line numbers. `json.JSONDecoder` parses the
    strings, numbers and constants.
    """

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.position = 0
        self.lines: dict[KeyPath, int] = {}
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._scalars = json.JSONDecoder(parse_constant=self._refuse_constant)

    def document(self) -> object:
        self._skip_space()
        if self._peek() == '"':
            value: object = self._object_members((), end="")
        else:
            value = self._value(())
        self._skip_space()
        if self.position < len(self.text):
            self._fail("expected the end of the file", self.position)
        return value

    def _value(self, path: KeyPath) -> object:
        if len(path) > MAX_DEPTH:
            self._fail(f"nested more than {MAX_DEPTH} levels deep", self.position)
        if self._peek() == "{":
            self.position += 1
            return self._object_members(path, end="}")
        if self._peek() == "[":
            self.position += 1
            return self._list_items(path)
        return self._scalar()

    def _object_members(self, path: KeyPath, end: str) -> dict[str, object]:
        members: dict[str, object] = {}
        self._skip_space()
        while self._peek() != end:
            start = self.position
            if self._peek() != '"':
                self._fail("expected a key in double quotes", start)
            key = str(self._scalar())
            here = (*path, key)
            if key in members:
                self._fail(f"the key {key!r} is already set in line {self.lines[here]}", start)
            self.lines[here] = self._line_and_column(start)[0]
            self._skip_space()
            self._expect(":")
            self._skip_space()
            members[key] = self._value(here)
            self._separator(end)
        self.position += len(end)
        return members

    def _list_items(self, path: KeyPath) -> list[object]:
        items: list[object] = []
        self._skip_space()
        while self._peek() != "]":
            here = (*path, len(items))
            self.lines[here] = self._line_and_column(self.position)[0]
            items.append(self._value(here))
            self._separator("]")
        self.position += 1
        return items

    def _separator(self, end: str) -> None:
        """Skip the comma after an item; after the last item, stop before the character `end`."""
        self._skip_space()
        if self._peek() == end:
            return
        comma = self.position
        self._expect(",")
        self._skip_space()
        if self._peek() == end:
            self._fail("remove this comma: nothing follows it", comma)

    def _scalar(self) -> object:
        start = self.position
        try:
            value, self.position = self._scalars.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            at_start = error.msg == "Expecting value"
            self._fail(
                "expected a value" if at_start else error.msg.lower().removesuffix(" at"), error.pos
            )
        except ValueError as error:
            self._fail(str(error).partition(";")[0], start)
        return value

    def _refuse_constant(self, word: str) -> NoReturn:
        raise ValueError(f"{word} is not a valid number for a setting")

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            self._fail(f"expected {character!r}", self.position)
        self.position += 1

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _skip_space(self) -> None:
        match = _SPACE.match(self.text, self.position)
        assert match is not None, "the pattern matches the empty string"
        self.position = match.end()

    def _line_and_column(self, position: int) -> tuple[int, int]:
        line = bisect_right(self._line_starts, position)
        return line, position - self._line_starts[line - 1] + 1

    def _fail(self, what: str, position: int) -> NoReturn:
        line, column = self._line_and_column(position)
        found = repr(self.text[position]) if position < len(self.text) else "the end of the file"
        raise ConfigError(f"{self.name}:{line}:{column}: {what} (at {found}).")


# YAML


def _parse_yaml(text: str, name: str) -> tuple[object, dict[KeyPath, int]]:
    lines: dict[KeyPath, int] = {}
    try:
        loader = _YamlCoreLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _record_yaml_lines(node, name, lines)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: {error.problem or error.context}.") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: {error.reason}.") from None
    except ValueError as error:
        raise ConfigError(f"{name}: {str(error).partition(';')[0]}.") from None


def _record_yaml_lines(root: yaml.Node, name: str, lines: dict[KeyPath, int]) -> None:
    """Record the line of each key of a YAML document in `lines`.

    Rejects duplicate keys, and aliases that contain themselves or expand to too many values.
    """
    waiting: list[tuple[KeyPath, yaml.Node]] = [((), root)]
    visited = 0
    while waiting:
        path, node = waiting.pop()
        visited += 1
        if len(path) > MAX_DEPTH:
            raise ConfigError(
                f"{name} is nested more than {MAX_DEPTH} levels deep. {_FEWER_LEVELS}"
            )
        if visited > MAX_YAML_NODES:
            raise ConfigError(
                f"{name} has more than {MAX_YAML_NODES} values after expanding its aliases. Remove "
                "aliases (*name) that contain others."
            )
        children: list[tuple[str | int, yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            children = [(str(key.value), key, value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            children = [(index, item, item) for index, item in enumerate(node.value)]
        seen: dict[str | int, int] = {}
        for step, marked, child in children:
            line = marked.start_mark.line + 1
            if step in seen:
                where = f"{name}:{line}:{marked.start_mark.column + 1}"
                raise ConfigError(f"{where}: the key {step!r} is already set in line {seen[step]}.")
            seen[step] = line
            lines[(*path, step)] = line
            waiting.append(((*path, step), child))


_YAML_CORE_SCALARS = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
)


def _yaml_core_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return the table by which pyyaml finds the type of a scalar, with the rules of YAML 1.2.

    Its keys are the first characters of scalars.
    """
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _YAML_CORE_SCALARS:
        entry = (f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"))
        for character in first_characters:
            table.setdefault(character, []).append(entry)
    return table


class _YamlCoreLoader(yaml.SafeLoader):
    """A `yaml.SafeLoader` with YAML 1.2's rules for scalars: `no`, `1:30` and dates stay text."""

    yaml_implicit_resolvers = _yaml_core_resolvers()


# TOML


def _parse_toml(text: str, name: str) -> tuple[object, dict[KeyPath, int]]:
    try:
        return tomllib.loads(text), dict(_toml_lines(text))
    except ValueError as error:
        match = _TOML_POSITION.search(str(error))
        message = _TOML_POSITION.sub("", str(error))
        message = message[:1].lower() + message[1:]
        if match is None:
            raise ConfigError(f"{name}: {message}.") from None
        last = text.count("\n") + 1, len(text) - text.rfind("\n")
        line, column = (match[1], match[2]) if match[1] else last
        raise ConfigError(f"{name}:{line}:{column}: {message}.") from None


def _toml_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path and line number of each table header and key, which tomllib does not report.

    A line of a multi-line string that looks like a key is taken for one. At worst, an error message
    then has the wrong line number.
    """
    table: KeyPath = ()
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        header = _TOML_HEADER.match(line)
        if header is not None:
            table = _toml_path(header[2])
            if header[1] == "[[":
                index = counts.get(header[2], 0)
                counts[header[2]] = index + 1
                table = (*table, index)
            elif table and str(table[0]) in counts:
                table = (table[0], counts[str(table[0])] - 1, *table[1:])
            yield table, number
            continue
        key = _TOML_KEY.match(line)
        if key is not None:
            yield (*table, *_toml_path(key[1])), number


def _toml_path(text: str) -> KeyPath:
    return tuple(step.strip().strip("\"'") for step in text.split("."))


_PARSERS: Mapping[str, Callable[[str, str], tuple[object, dict[KeyPath, int]]]] = {
    "json": parse_json,
    "yaml": _parse_yaml,
    "toml": _parse_toml,
}
