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
    from collections.abc import Iterable, Mapping


def load(kind: str, name: str, known: Mapping[str, str]) -> object:
    """Import and return the object with this name; for an unknown name, list the valid ones."""
    if name in known:
        module, _, attribute = known[name].partition(":")
        return getattr(import_module(module), attribute)
    check_name(kind, name, known)
    return next(p for p in entry_points(group=f"gracetune.{kind}") if p.name == name).load()


def check_name(kind: str, name: str, known: Iterable[str], setting: str = "") -> None:
    """Raise an error that lists the valid names if a name is unknown; import nothing.

    `setting` is the run-file setting that has the name, for the message.
    """
    all_names = names(kind, known)
    if name in all_names:
        return
    near = difflib.get_close_matches(name, all_names, n=1)
    suggestion = f"; did you mean {near[0]!r}?" if near else "."
    where = f"{setting}: " if setting else ""
    raise ConfigError(
        f"{where}{kind} {name!r} is not known{suggestion} Known: {', '.join(all_names)}. "
        f"Other packages can add names with entry points of the group 'gracetune.{kind}'."
    )


def names(kind: str, known: Iterable[str]) -> list[str]:
    """Return all valid names of a kind, such as `family`: first built-in ones, then others."""
    external = {point.name for point in entry_points(group=f"gracetune.{kind}")}
    return [*sorted(known), *sorted(external - set(known))]
