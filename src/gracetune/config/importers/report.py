"""Record what an importer does with every key of another trainer's config file.

An importer reads a config through `KeyReader`. Each key is taken, translated, not needed or not
supported; a key that the importer never mentions is reported as not supported. So the report has
one line for each key, and nothing is dropped without one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gracetune.config.aliases import leaves
from gracetune.config.parse_text import dotted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.parse_text import KeyPath

Verdict = Literal["taken", "translated", "not needed", "not supported"]
MISSING = object()
"""Returned by `KeyReader.peek` for a key that the config does not have."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What became of one key of the imported file."""

    file: str
    key: str
    """Dotted name of the key in that file."""
    value: object
    verdict: Verdict
    text: str
    """gracetune's setting and its value for a key that is used; otherwise the reason, or what to do
    instead."""


@dataclass(slots=True)
class ImportedRun:
    """A run file made from another trainer's config, and the report of its keys."""

    tool: str
    """Name of the other trainer, such as `SimpleTuner`."""
    run: dict[str, object] = field(default_factory=dict)
    """Settings of the run file as nested dictionaries, with gracetune's keys."""
    keys: list[KeyReport] = field(default_factory=list)

    def set(self, key: str, value: object) -> None:
        """Set a setting by its dotted name. A number in the name is the index of a dataset."""
        *parents, last = key.split(".")
        node: dict[str, object] = self.run
        for index, step in enumerate(parents):
            if step.isdecimal():
                continue
            after = parents[index + 1] if index + 1 < len(parents) else ""
            if after.isdecimal():
                entries = node.setdefault(step, [])
                assert isinstance(entries, list), f"{step} in {key} is not a list"
                entries += [{} for _ in range(int(after) + 1 - len(entries))]
                node = entries[int(after)]
            else:
                child = node.setdefault(step, {})
                assert isinstance(child, dict), f"{step} in {key} is not a section"
                node = child
        node[last] = value


class KeyReader:
    """Reads the keys of one config file, or of one section of it, and reports each of them."""

    def __init__(
        self, imported: ImportedRun, file: str, tree: Mapping[str, object], path: KeyPath = ()
    ) -> None:
        self.imported = imported
        self.file = file
        self._tree = tree
        self._path = path
        self._reported: set[str] = set()

    def peek(self, key: str) -> object:
        """Return the value of a key without reporting it, or `MISSING`."""
        return self._tree.get(key, MISSING)

    def take(self, key: str, setting: str) -> None:
        """Use the value of a key, if the config has it, as it is."""
        if key in self._tree:
            self.imported.set(setting, self._tree[key])
            self.report(key, "taken", setting)

    def translate(self, key: str, setting: str, value: object, why: str = "") -> None:
        """Use another value for a key that the config has; `why` says what the difference means."""
        self.imported.set(setting, value)
        self.report(key, "translated", f"{setting} is {value}" + (f": {why}" if why else ""))

    def not_needed(self, key: str, why: str) -> None:
        """Report a key, if the config has it, that has no effect on the result here."""
        if key in self._tree:
            self.report(key, "not needed", why)

    def not_supported(self, key: str, fix: str) -> None:
        """Report a key, if the config has it, that would change the result but cannot be used."""
        if key in self._tree:
            self.report(key, "not supported", fix)

    def report(self, key: str, verdict: Verdict, text: str) -> None:
        """Add a line for a key, or one line for each key inside it if it is a section."""
        self._reported.add(key)
        for path, value in leaves(self._tree[key], (*self._path, key)):
            self.imported.keys.append(KeyReport(self.file, dotted(path), value, verdict, text))

    def section(self, key: str) -> KeyReader | None:
        """Return a reader for a key whose value is a section; None if the config has none."""
        value = self._tree.get(key)
        if not isinstance(value, dict):
            return None
        self._reported.add(key)
        return KeyReader(self.imported, self.file, value, (*self._path, key))

    def sections(self, key: str) -> list[KeyReader]:
        """Return a reader for each section in a list of sections."""
        values = self._tree.get(key)
        if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
            return []
        self._reported.add(key)
        return [
            KeyReader(self.imported, self.file, each, (*self._path, key, index))
            for index, each in enumerate(values)
        ]

    def finish(self) -> None:
        """Report every key that was not mentioned as not supported."""
        for key in self._tree:
            if key not in self._reported:
                self.report(key, "not supported", "this key is not known, so it is ignored")
