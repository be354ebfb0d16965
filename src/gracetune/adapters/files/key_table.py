"""What a table of names is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
class NameTable:
    """The names of one family. `{}` stands for a block's number; modules go by diffusers' names."""

    family: str
    rows: tuple[tuple[str, str], ...]
    """The original's name beside diffusers', one row a module."""
    parts: tuple[str, ...] = ()
    """What diffusers alone has: the parts of fused projections."""
    mixed: tuple[tuple[str, str], ...] = ()
    """Names that ai-toolkit's old LoKr made by replacing words in underscored text."""
    fused: tuple[FusedProjection, ...] = ()
    swapped: frozenset[str] = frozenset()
    """Modules whose two halves of rows (scale, shift) stand in the other order in the original."""
    bare: frozenset[str] = frozenset()
    """Rows that are a parameter themselves, with no `.weight` below."""
    surface: tuple[str, ...] = ()
    """The linear modules of a block, which adapters usually sit on."""
    num_blocks: tuple[tuple[str, int], ...] = ()
    """Most blocks of each kind in any published model: a file with more is another family's."""
    staged: bool = False
    """Whether the family has models of two experts."""
    interchange: tuple[tuple[str, str], ...] = (
        ("lora", "diffusers"),
        ("lokr", "diffusers"),
        ("other", "lycoris"),
    )
    """The form that most tools load, by algorithm."""
    open: bool = False
    """Whether any dotted name is a module: a family without a table."""


DOTTED = (
    ("lora", "diffusers"),
    ("lokr", "diffusers"),
    ("loha", "diffusers"),
    ("other", "simpletuner-comfyui"),
)
"""Forms that are written and read without a table: diffusers' names, with their dots."""


def open_table(family: str) -> NameTable:
    """For a family that we have no names of: dotted names stand as they are."""
    return NameTable(family, rows=(), open=True, interchange=DOTTED)


def table_of_modules(family: str, modules: tuple[str, ...]) -> NameTable:
    """For a family that we have no names of, but whose model is at hand."""
    rows = tuple((name, name) for name in modules)
    return NameTable(family, rows=rows, interchange=DOTTED)
