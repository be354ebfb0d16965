"""From a name in a run file to the code behind it.

Our own names are literal dicts of `module:attribute` beside the code that uses them; outsiders
publish theirs as entry points of the group `gracetune.<kind>`. Nothing is imported until a run file
names it.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def load(kind: str, name: str, known: Mapping[str, str]) -> object:
    """Import what `name` stands for; the error lists every name that would have worked."""
    if name in known:
        module, _, attribute = known[name].partition(":")
        return getattr(import_module(module), attribute)
    group = f"gracetune.{kind}"
    for point in entry_points(group=group):
        if point.name == name:
            return point.load()
    every = names(kind, known)
    near = difflib.get_close_matches(name, every, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(
        f"{kind} {name!r} is not known{meant} Known: {', '.join(every)}. "
        f"A package of yours can add one with an entry point of the group {group!r}."
    )


def names(kind: str, known: Mapping[str, str]) -> list[str]:
    """Every name of this kind, ours first."""
    outside = {point.name for point in entry_points(group=f"gracetune.{kind}")}
    return [*sorted(known), *sorted(outside - set(known))]
