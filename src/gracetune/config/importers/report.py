"""Record what an importer does with every key of another trainer's config file.

An importer reads a config through `KeyReader`. Each key is taken, translated, not needed or not
supported; a key that the importer never mentions is reported as not supported. So the report has
one line for each key, and nothing is dropped without one.

`format_report` and `summarize` show the result; `cli/import_config.py` writes the run file.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from gracetune.config.aliases import leaves
from gracetune.config.dataset_schema import DatasetSection
from gracetune.config.parse_text import dotted, format_value
from gracetune.config.schema import AdapterSection, RunFile
from gracetune.errors import REDACTED, redact_urls

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gracetune.config.parse_text import KeyPath

Verdict = Literal["taken", "translated", "not needed", "not supported"]
VERDICTS: tuple[Verdict, ...] = ("not supported", "translated", "taken", "not needed")
"""All verdicts, in the order of the report: first those that the user should read."""
MISSING = object()
"""Returned by `KeyReader.peek` for a key that the config does not have."""
SECRET_KEY = re.compile(r"secret|password|credential|token$|access_key|api_key", re.IGNORECASE)
"""Matches the names of keys whose values the report does not show."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """The verdict on one key of the imported file."""

    file: str
    key: str
    """Dotted name of the key in that file."""
    value: object
    verdict: Verdict
    text: str
    """gracetune's setting and its value for a key that is used; otherwise the reason, or what to do
    instead."""
    setting: str = ""
    """gracetune's setting, as a dotted name, for a key that sets one."""


@dataclass(frozen=True, slots=True)
class DefaultReport:
    """A setting of the run file that follows from a default of the other trainer."""

    setting: str
    value: object
    why: str


@dataclass(slots=True)
class ImportedRun:
    """A run file made from another trainer's config, and the report of its keys."""

    tool: str
    """Name of the other trainer, such as `SimpleTuner`."""
    run: dict[str, object] = field(default_factory=dict)
    """Settings of the run file as nested dictionaries, with gracetune's keys."""
    keys: list[KeyReport] = field(default_factory=list)
    defaults: list[DefaultReport] = field(default_factory=list)
    """Settings that the config does not mention, but whose default in the other trainer differs
    from gracetune's."""
    refusals: list[str] = field(default_factory=list)
    """Reasons why gracetune cannot train what the config asks for, each with what to do. A run with
    such a reason is not started."""

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

    def get(self, key: str) -> object:
        """Return the value of a setting by its dotted name, or `MISSING`."""
        node: object = self.run
        for step in key.split("."):
            if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
                node = node[int(step)]
            elif isinstance(node, dict) and step in node:
                node = node[step]
            else:
                return MISSING
        return node

    def default(self, setting: str, value: object, why: str) -> None:
        """Set a setting that the config left to the other trainer's default, and report it.

        It is left out if gracetune's default is the same.
        """
        if self.get(setting) is MISSING and value != own_default(setting):
            self.set(setting, value)
            self.defaults.append(DefaultReport(setting, value, why))

    def refuse(self, reason: str) -> None:
        """Report that gracetune cannot train what the config asks for, and what to do."""
        if reason not in self.refusals:
            self.refusals.append(reason)


@cache
def _own_defaults() -> dict[str, object]:
    run = RunFile(adapter=AdapterSection(), datasets=(DatasetSection(),))
    return {dotted(path): value for path, value in leaves(run.model_dump(mode="json"))}


def own_default(setting: str) -> object:
    """Return gracetune's default of a setting, or `MISSING` if there is no such setting."""
    return _own_defaults().get(re.sub(r"\.\d+\.", ".0.", setting), MISSING)


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

    def unreported(self) -> list[str]:
        """Return the keys that have no line in the report yet."""
        return [key for key in self._tree if key not in self._reported]

    def take(self, key: str, setting: str) -> None:
        """Use the value of a key as it is, if the config has it and it is not reported yet."""
        if key in self._tree and key not in self._reported:
            self.imported.set(setting, self._tree[key])
            self.report(key, "taken", setting, setting)

    def translate(self, key: str, setting: str, value: object, why: str = "") -> None:
        """Use another value for a key that the config has; `why` says what the difference means."""
        self.imported.set(setting, value)
        shown = format_value(value)
        text = f"{setting} is {shown}" + (f": {why}" if why else "")
        self.report(key, "translated", text, setting)

    def not_needed(self, key: str, why: str) -> None:
        """Report a key that has no effect on the result here, unless it is absent or reported."""
        if key in self._tree and key not in self._reported:
            self.report(key, "not needed", why)

    def not_supported(self, key: str, fix: str) -> None:
        """Report a key that would change the result but cannot be used, if it is not reported."""
        if key in self._tree and key not in self._reported:
            self.report(key, "not supported", fix)

    def report(self, key: str, verdict: Verdict, text: str, setting: str = "") -> None:
        """Add a line for a key, or one line for each key inside it if it is a section."""
        self._reported.add(key)
        for path, value in leaves(self._tree[key], (*self._path, key)):
            report = KeyReport(self.file, dotted(path), value, verdict, text, setting)
            self.imported.keys.append(report)

    def section(self, key: str) -> KeyReader | None:
        """Return a reader for a key whose value is a section; None if the config has none."""
        value = self._tree.get(key)
        if not isinstance(value, dict):
            return None
        self._reported.add(key)
        if not value:
            self.report(key, "not needed", "it is empty")
        return KeyReader(self.imported, self.file, value, (*self._path, key))

    def sections(self, key: str) -> list[KeyReader]:
        """Return a reader for each section in a list of sections."""
        values = self._tree.get(key)
        if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
            return []
        self._reported.add(key)
        if not values:
            self.report(key, "not needed", "it is empty")
        return [
            KeyReader(self.imported, self.file, each, (*self._path, key, index))
            for index, each in enumerate(values)
        ]

    def finish(self, known: Collection[str] = ()) -> None:
        """Report every key that was not mentioned as not supported.

        `known` has the other trainer's keys, of which the most similar one is suggested.
        """
        for key in self.unreported():
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ". Check its spelling, or remove it"
            self.report(key, "not supported", f"this key is not known, so it is ignored{hint}")


# Showing the report


def count_verdicts(imported: ImportedRun) -> str:
    """Return the number of keys with each verdict in words, such as "3 taken, 1 not needed"."""
    counts = Counter(each.verdict for each in imported.keys)
    found = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
    return ", ".join(found) or "no keys"


def summarize(imported: ImportedRun, name: str, output_dir: str) -> str:
    """Return one sentence about an imported config for the log of a run; `name` is its file."""
    missing = [each.key for each in imported.keys if each.verdict == "not supported"]
    text = f"{name} is a config of {imported.tool}: {count_verdicts(imported)}"
    if missing:
        text += f". Not supported: {', '.join(missing)}"
    return (
        f"{text}. Results go to {output_dir}; --set output_dir=DIR changes that. "
        f"`gracetune import {name}` explains every key."
    )


def format_report(imported: ImportedRun) -> str:
    """Return the report as text: a line for each key, grouped by verdict."""
    files = list(dict.fromkeys(each.file for each in imported.keys))
    short = {file: PurePath(file).name for file in files}
    if len(set(short.values())) < len(files):
        short = {file: file for file in files}
    lines = [f"{imported.tool}: {', '.join(files)}"]
    lines.append(f"{len(imported.keys)} keys: {count_verdicts(imported)}.")
    for verdict in VERDICTS:
        found = [each for each in imported.keys if each.verdict == verdict]
        if found:
            lines += ["", f"{verdict} ({len(found)})"]
            for file in files:
                inside = [each for each in found if each.file == file]
                lines += [f"  in {short[file]}:"] if inside and len(files) > 1 else []
                lines += [f"    {_describe(each)}" for each in inside]
    if imported.defaults:
        lines += ["", f"defaults of {imported.tool} that differ from gracetune's"]
        for each in imported.defaults:
            value = format_value(each.value)
            lines.append(f"    {each.setting} is {value}: {each.why}")
    return "\n".join(lines)


def _describe(each: KeyReport) -> str:
    is_secret = SECRET_KEY.search(each.key) is not None and each.value is not None
    value = REDACTED if is_secret else redact_urls(format_value(each.value))
    return f"{each.key} = {value} -> {each.text}"
