"""From any tool's key to (stage, module, role) and back, by table.

Modules go by diffusers' names, roles by those of `tables/forms`. No tensors here: what a key's
tensor means to its module is for `layers` and `delta`.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from gracetune.adapters.files.formats import (
    FORMAT_ALIASES,
    FORMATS,
    READ_ONLY_SUFFIXES,
    SUFFIXES,
    KeyFormat,
    SuffixStyle,
)
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Naming = Literal["original", "diffusers", "mixed"]
"""Whose words a module's name is in: the authors', diffusers', or ai-toolkit's old mix."""
Stage = Literal["high", "low"]
"""An expert of a two-stage model: `high` is diffusers' `transformer`, `low` its `transformer_2`."""


@dataclass(frozen=True)
class FusedProjection:
    """A projection that the original keeps whole and diffusers keeps in parts, row after row."""

    whole: str
    parts: tuple[tuple[str, int], ...]
    """Each part with its share of the rows."""


@dataclass(frozen=True)
class KeyTable:
    """The names of one family. `{}` stands for a block's number; modules go by diffusers' names."""

    family: str
    """The name that adapter files carry in `gracetune.family`."""
    rows: tuple[tuple[str, str], ...]
    """The original's name beside diffusers', one row a module."""
    unfused: tuple[str, ...] = ()
    """What diffusers alone has: the parts of fused projections."""
    mixed_rows: tuple[tuple[str, str], ...] = ()
    """Names that ai-toolkit's old LoKr made by replacing words in underscored text."""
    fused: tuple[FusedProjection, ...] = ()
    swapped_halves: frozenset[str] = frozenset()
    """Modules whose two halves of rows (scale, shift) stand in the other order in the original."""
    bare_parameters: frozenset[str] = frozenset()
    """Rows that are a parameter themselves, with no `.weight` below."""
    block_linears: tuple[str, ...] = ()
    """The linear modules of a block, which adapters usually sit on."""
    max_blocks: tuple[tuple[str, int], ...] = ()
    """Most blocks of each kind in any published model: a file with more is another family's."""
    has_stages: bool = False
    """Whether the family has models of two experts."""
    default_formats: tuple[tuple[str, str], ...] = (
        ("lora", "diffusers"),
        ("lokr", "diffusers"),
        ("other", "lycoris"),
    )
    """The form that most tools load, by algorithm."""
    aliases: tuple[str, ...] = ()
    """Other names that users give the family."""
    accepts_any_name: bool = False
    """Whether any dotted name is a module: a family without a table."""


ANY_NAME_FORMATS = (
    ("lora", "diffusers"),
    ("lokr", "diffusers"),
    ("loha", "diffusers"),
    ("other", "simpletuner-comfyui"),
)
"""Forms that are written and read without a table: diffusers' names, with their dots."""


def any_name_table(family: str) -> KeyTable:
    """For a family that we have no names of: dotted names stand as they are."""
    return KeyTable(family, rows=(), accepts_any_name=True, default_formats=ANY_NAME_FORMATS)


def table_of_modules(family: str, modules: tuple[str, ...]) -> KeyTable:
    """For a family that we have no names of, but whose model is at hand."""
    rows = tuple((name, name) for name in modules)
    return KeyTable(family, rows=rows, default_formats=ANY_NAME_FORMATS)


BLOCK = re.compile(r"^(.*?blocks(?:\.|_|\$\$))(\d+)((?:\.|_|\$\$).+)$")
"""A module inside a numbered block; the number is the first one after `blocks`."""
BOTH_STAGES_FORMAT = "diffusers-both"
_UNPARTED = re.compile(r"(?<![A-Za-z0-9])transformer([12])(?=[._$])")
"""An expert, as one fork of ai-toolkit spelled it."""
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


class LayerPath(NamedTuple):
    """Where a layer sits: the expert, if the key tells, and the module in diffusers' words."""

    stage: Stage | None
    module: str


@dataclass(frozen=True)
class ParsedKey:
    """One key, understood."""

    text: str
    path: LayerPath
    role: str
    naming: Naming
    formats: frozenset[str]
    """The forms that spell it so; none where a prefix and an ending never met before."""


class KeyIndex:
    """A table, turned so that names in any spelling are found at once."""

    def __init__(self, table: KeyTable) -> None:
        self.table = table
        identity = [(ours, ours) for _, ours in table.rows]
        whole = {one.whole for one in table.fused}
        parts = [(part, part) for part in table.unfused]
        rows: dict[Naming, list[tuple[str, str]]] = {
            "original": list(table.rows),
            "diffusers": [row for row in identity if row[0] not in whole] + parts,
            "mixed": list(table.mixed_rows),
        }
        self._canonical = {
            (naming, joint): {name.replace(".", joint): ours for name, ours in pairs}
            for naming, pairs in rows.items()
            for joint in (".", "_", "$$")
        }
        self._spelled = {
            naming: {ours: name for name, ours in pairs} for naming, pairs in rows.items()
        }

    def to_diffusers(self, name: str, naming: Naming, joint: str) -> str | None:
        """The module that `name` is; None where the table has no such row."""
        if self.table.accepts_any_name:
            plain = joint == "." and naming == "diffusers" and DOTTED_NAME.fullmatch(name)
            return name if plain else None
        known = self._canonical[naming, joint]
        if name in known:
            return known[name]
        inside = BLOCK.match(name)
        if inside is None:
            return None
        found = known.get(f"{inside[1]}{{}}{inside[3]}")
        return None if found is None else found.format(inside[2])

    def from_diffusers(self, module: str, naming: Naming, joint: str) -> str | None:
        """The module's name in other words; None where none would be found again."""
        if self.table.accepts_any_name:
            return self.to_diffusers(module, naming, joint)
        template, number = template_of(module)
        name = self._spelled[naming].get(template) or self._spelled[naming].get(module)
        return None if name is None else name.format(number).replace(".", joint)

    def templates(self, naming: Naming) -> Iterable[str]:
        """Every name of that naming, with `{}` for a block's number."""
        return self._spelled[naming].values()


def template_of(module: str) -> tuple[str, str]:
    """A module's name with `{}` for its block's number, and that number."""
    inside = BLOCK.match(module)
    return (f"{inside[1]}{{}}{inside[3]}", inside[2]) if inside else (module, "")


def is_bare_parameter(module: str, table: KeyTable) -> bool:
    """Whether it is a parameter itself, which no LoRA can sit on."""
    return template_of(module)[0] in table.bare_parameters


def get_format(name: str) -> KeyFormat:
    """The form that a user asks for, by its name or by a tool's."""
    wanted = FORMAT_ALIASES.get(name, name)
    for form in FORMATS:
        if form.name == wanted:
            return form
    known = [form.name for form in FORMATS] + list(FORMAT_ALIASES)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise AdapterError(f"--to is {name!r}, which is no form. {hint}Known: {', '.join(known)}.")


def get_table(family: str, tables: Mapping[str, KeyTable]) -> KeyTable:
    """The table of a family; one that takes dotted names as they are where we have none."""
    for table in tables.values():
        if family == table.family or family in table.aliases:
            return table
    return any_name_table(family)


def split_suffix(text: str) -> tuple[str, str, frozenset[SuffixStyle]] | None:
    """A key without its tensor's ending, the role it names, and the styles that spell it so."""
    for ending, (role, styles) in _ENDINGS.items():
        if text.endswith(ending):
            return text[: -len(ending)], role, styles
    return None


def parse_key(text: str, index: KeyIndex) -> ParsedKey | None:
    """What one key means in one family; None where nothing in the tables spells it."""
    parts = split_suffix(text)
    if parts is None:
        return None
    body, role, styles = parts
    body = _UNPARTED.sub(r"transformer_\1", body)
    first: tuple[LayerPath, Naming] | None = None
    forms = set()
    for form in FORMATS:
        place = _place_in(body, form, index)
        if place is None or (first is not None and place != first[0]):
            continue
        first = first or (place, form.naming)
        if form.style in styles:
            forms.add(form.name)
    return None if first is None else ParsedKey(text, first[0], role, first[1], frozenset(forms))


def build_key(
    form: KeyFormat, index: KeyIndex, place: LayerPath, role: str, style: SuffixStyle | None = None
) -> str:
    """Spell a key; the caller has made sure that the form can hold it."""
    name = index.from_diffusers(place.module, form.naming, form.separator)
    ending = SUFFIXES[style or form.style].get(role)
    assert name is not None, f"{form.name} has no name for {place.module}"
    assert ending is not None, f"{form.name} has no ending for {role}"
    return f"{_prefix(form, place.stage)}{name}{ending}"


def detect_table(
    keys: Sequence[str], tables: Mapping[str, KeyTable], family: str | None
) -> KeyTable:
    """The family whose names the keys are; `family` is what the user or the file itself says."""
    if family is not None:
        return get_table(family, tables)
    counts = {name: _count(keys, table) for name, table in tables.items()}
    best = max(counts.values())
    leaders = [name for name, count in counts.items() if count == best]
    if best == 0:
        raise unknown_key_error(keys[0], list(tables.values()))
    if len(leaders) > 1:
        raise AdapterError(
            f"{keys[0]!r} is a name in {' and '.join(leaders)}: the keys do not tell them apart. "
            f"Say which with --family {leaders[0]}.",
            kind="ambiguous",
            key=keys[0],
        )
    return tables[leaders[0]]


def resolve_stages(keys: Sequence[ParsedKey]) -> list[ParsedKey]:
    """Beside `transformer_2.`, `transformer.` means the high stage; alone it says none."""
    if not any(key.formats == {BOTH_STAGES_FORMAT} for key in keys):
        return list(keys)
    return [
        replace(
            key, path=LayerPath("high", key.path.module), formats=frozenset({BOTH_STAGES_FORMAT})
        )
        if key.text.startswith("transformer.")
        else key
        for key in keys
    ]


def detect_format(keys: Sequence[ParsedKey]) -> KeyFormat | None:
    """The one form that spells every key; None for a file that mixes them."""
    common = frozenset.intersection(*(key.formats for key in keys)) if keys else frozenset()
    told = {key.path.stage for key in keys} != {None}
    fitting = [form for form in FORMATS if form.name in common]
    # Without a stage in its keys a file is of the plain form, where there is one spelled so.
    fitting.sort(key=lambda form: bool(form.stages) != told)
    return fitting[0] if fitting else None


def count_formats(keys: Sequence[ParsedKey]) -> Mapping[str, int]:
    """For a file that mixes forms: how many keys each of them spells, most first."""
    counts = Counter(name for key in keys for name in key.formats)
    return dict(counts.most_common())


def unknown_key_error(text: str, tables: Sequence[KeyTable]) -> AdapterError:
    """The verdict on a key that no table has, with the nearest one that a table does have."""
    whose = " or ".join(table.family for table in tables)
    if text.startswith(("lora_te", "text_encoder", "te1", "te2")):
        why = "it belongs to a text encoder, and adapters of text encoders are not handled"
    else:
        why = f"no known form of {whose} spells a key so"
    near = nearest_key(text, tables)
    hint = f" The nearest known key is {near!r}." if near else ""
    return AdapterError(f"{text!r} is not understood: {why}.{hint}", kind="unknown-key", key=text)


def nearest_key(text: str, tables: Sequence[KeyTable]) -> str | None:
    """The known key that is most like a given one: the module first, then the ending."""
    parts = split_suffix(text)
    if parts is not None:
        body, ending = parts[0], text[len(parts[0]) :]
    else:
        body, dot, tail = text.removesuffix(".weight").rpartition(".")
        close = difflib.get_close_matches(f"{dot}{tail}.weight", _ENDINGS, n=1, cutoff=0.4)
        body, ending = (body, close[0]) if dot and close else (text, ".lora_A.weight")
    number = BLOCK.match(body)
    bodies = {
        f"{prefix}{name.format(number[2] if number else 0).replace('.', form.separator)}"
        for table in tables
        if not table.accepts_any_name
        for form in FORMATS
        for _, prefix in _prefixes(form, table)
        for name in KeyIndex(table).templates(form.naming)
    }
    close = difflib.get_close_matches(body, sorted(bodies), n=1, cutoff=0.5)
    return f"{close[0]}{ending}" if close else None


def _place_in(body: str, form: KeyFormat, index: KeyIndex) -> LayerPath | None:
    """Where `body` sits if it is of that form."""
    for stage, prefix in _prefixes(form, index.table):
        if body.startswith(prefix):
            module = index.to_diffusers(body[len(prefix) :], form.naming, form.separator)
            # Without a table and a prefix, an underscored key would pass for a module's name.
            if module is not None and (prefix or "." in module or not index.table.accepts_any_name):
                return LayerPath(stage, module)
    return None


def _prefixes(form: KeyFormat, table: KeyTable) -> list[tuple[Stage | None, str]]:
    staged: list[tuple[Stage | None, str]] = [(s, _prefix(form, s)) for s, _ in form.stages]
    # The same tools train models of one stage, and leave the stage out then.
    plain = not form.stages or (form.prefix and not table.has_stages)
    return [*staged, (None, form.prefix)] if plain else staged


def _prefix(form: KeyFormat, stage: Stage | None) -> str:
    token = dict(form.stages).get(stage) if stage is not None else None
    if token is None:
        return form.prefix
    return (
        f"{form.prefix}{token}" if token.endswith(".") else f"{form.prefix}{token}{form.separator}"
    )


def _count(keys: Sequence[str], table: KeyTable) -> int:
    """How many keys a table reads; none if the file has more blocks than any such model."""
    index = KeyIndex(table)
    most = dict(table.max_blocks)
    count = 0
    for text in keys:
        key = parse_key(text, index)
        if key is None:
            continue
        inside = BLOCK.match(key.path.module)
        if inside and int(inside[2]) >= most.get(inside[1].rstrip("."), 10**9):
            return 0
        count += 1
    return count


def _endings() -> dict[str, tuple[str, frozenset[SuffixStyle]]]:
    """Every ending, longest first, so that `.lora_B.default.weight` is not taken for less."""
    styles: dict[str, tuple[str, set[SuffixStyle]]] = {}
    for style, spelled in SUFFIXES.items():
        for role, ending in spelled.items():
            styles.setdefault(ending, (role, set()))[1].add(style)
    for ending, role in READ_ONLY_SUFFIXES.items():
        styles.setdefault(ending, (role, set()))
    ordered = sorted(styles.items(), key=lambda item: -len(item[0]))
    return {ending: (role, frozenset(names)) for ending, (role, names) in ordered}


_ENDINGS = _endings()
