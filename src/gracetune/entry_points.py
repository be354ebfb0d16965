"""Find the code for a name in a run file, such as a model family or an optimizer.

Built-in names are in dicts from name to `module:attribute`, next to the code that uses them. Other
packages add names through entry points of the group `gracetune.<kind>`. Nothing is imported before
it is used.
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
    """Import and return the object with this name; for an unknown name, list the valid ones."""
    if name in known:
        module, _, attribute = known[name].partition(":")
        return getattr(import_module(module), attribute)
    group = f"gracetune.{kind}"
    for point in entry_points(group=group):
        if point.name == name:
            return point.load()
    all_names = names(kind, known)
    near = difflib.get_close_matches(name, all_names, n=1)
    suggestion = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(
        f"{kind} {name!r} is not known{suggestion} Known: {', '.join(all_names)}. "
        f"Other packages can add names with entry points of the group {group!r}."
    )


def names(kind: str, known: Mapping[str, str]) -> list[str]:
    """Return all valid names of a kind, such as `family`: first built-in ones, then others."""
    external = {point.name for point in entry_points(group=f"gracetune.{kind}")}
    return [*sorted(known), *sorted(external - set(known))]
