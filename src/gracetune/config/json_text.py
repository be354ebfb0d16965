"""JSON as people write run files: `//` comments, and a line number for every key.

The standard reader keeps no positions and lets the last of two equal keys win; both matter here.
A text that begins with a quoted key is read as the inside of an object, as guides print it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from typing import NoReturn

from gracetune.errors import ConfigError

KeyPath = tuple[str | int, ...]

MAX_DEPTH = 64
_BLANK = re.compile(r"(?:[ \t\r\n]+|//[^\n]*)*")


def parse_json(text: str, name: str) -> tuple[object, dict[KeyPath, int]]:
    """The value, and the line of every key and list item in it."""
    reader = _Reader(text, name)
    return reader.document(), reader.lines


class _Reader:
    """One text on its way through; the position moves, the line numbers pile up."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._scalars = json.JSONDecoder(parse_constant=self._refuse_constant)

    def document(self) -> object:
        self._skip_blank()
        if self._here() == '"':
            value: object = self._members((), end="")
        else:
            value = self._value(())
        self._skip_blank()
        if self.at < len(self.text):
            self._fail("expected the end of the file", self.at)
        return value

    def _value(self, path: KeyPath) -> object:
        if len(path) > MAX_DEPTH:
            self._fail(f"nested more than {MAX_DEPTH} levels deep", self.at)
        if self._here() == "{":
            self.at += 1
            return self._members(path, end="}")
        if self._here() == "[":
            self.at += 1
            return self._items(path)
        return self._scalar()

    def _members(self, path: KeyPath, end: str) -> dict[str, object]:
        members: dict[str, object] = {}
        self._skip_blank()
        while self._here() != end:
            start = self.at
            if self._here() != '"':
                self._fail("expected a key in double quotes", start)
            key = str(self._scalar())
            here = (*path, key)
            if key in members:
                self._fail(f"the key {key!r} is already given in line {self.lines[here]}", start)
            self.lines[here] = self._position(start)[0]
            self._skip_blank()
            self._take(":")
            self._skip_blank()
            members[key] = self._value(here)
            self._separator(end)
        self.at += len(end)
        return members

    def _items(self, path: KeyPath) -> list[object]:
        items: list[object] = []
        self._skip_blank()
        while self._here() != "]":
            here = (*path, len(items))
            self.lines[here] = self._position(self.at)[0]
            items.append(self._value(here))
            self._separator("]")
        self.at += 1
        return items

    def _separator(self, end: str) -> None:
        """A comma with something after it, or the end of the object or list."""
        self._skip_blank()
        if self._here() == end:
            return
        comma = self.at
        self._take(",")
        self._skip_blank()
        if self._here() == end:
            self._fail("remove the comma, nothing follows it", comma)

    def _scalar(self) -> object:
        start = self.at
        try:
            value, self.at = self._scalars.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            at_start = error.msg == "Expecting value"
            self._fail(
                "expected a value" if at_start else error.msg.lower().removesuffix(" at"), error.pos
            )
        except ValueError as error:
            self._fail(str(error).partition(";")[0], start)
        return value

    def _refuse_constant(self, word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number that a setting can have")

    def _take(self, character: str) -> None:
        if self._here() != character:
            self._fail(f"expected {character!r}", self.at)
        self.at += 1

    def _here(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        assert match is not None, "the pattern matches the empty string"
        self.at = match.end()

    def _position(self, at: int) -> tuple[int, int]:
        line = bisect_right(self._line_starts, at)
        return line, at - self._line_starts[line - 1] + 1

    def _fail(self, what: str, at: int) -> NoReturn:
        line, column = self._position(at)
        found = repr(self.text[at]) if at < len(self.text) else "the end of the file"
        raise ConfigError(f"{self.name}:{line}:{column}: {what} (at {found}).")
