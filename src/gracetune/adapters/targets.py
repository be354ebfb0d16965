"""Which modules an adapter sits on, and what each is told: by name, ending, pattern or expression.

Nothing that a run file says may go unused: a target or an override that matches nothing, or less
than it seems to, stops the run with the list of what there is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gracetune.config.schema import AdapterSection

LINEAR: tuple[type[nn.Module], ...] = (nn.Linear,)
CONVOLVED: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
ADAPTABLE = {"lora": LINEAR, "dora": LINEAR}
"""What each kind can sit on; all others take convolutions too."""
EXPRESSION = "re:"
WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Setting:
    """What one module's adapter is made with."""

    rank: int
    alpha: float
    dropout: float
    factor: int


def choose(
    transformers: Mapping[str, nn.Module], section: AdapterSection, defaults: Sequence[str]
) -> dict[str, dict[str, Setting]]:
    """By transformer (an expert's name, or the empty one), each module with its settings."""
    targets = section.targets or tuple(defaults)
    kinds = ADAPTABLE.get(section.kind, CONVOLVED)
    names = {
        expert: {name: module for name, module in model.named_modules() if name}
        for expert, model in transformers.items()
    }
    fitting = {
        expert: [name for name, module in modules.items() if isinstance(module, kinds)]
        for expert, modules in names.items()
    }
    for target in targets:
        _demand_matches(target, "adapter.targets", fitting, names)
    chosen = {
        expert: [name for name in found if any(matches(name, t, expert) for t in targets)]
        for expert, found in fitting.items()
    }
    for pattern in section.overrides:
        _demand_matches(pattern, "adapter.overrides", chosen, names)
    return {
        expert: {name: setting_of(section, name, expert) for name in found}
        for expert, found in chosen.items()
    }


def setting_of(section: AdapterSection, name: str, expert: str = "") -> Setting:
    """The section's own settings, with what overrides say of this module."""
    rank, alpha = section.rank, section.alpha
    dropout, factor = section.dropout, section.factor
    for pattern, other in section.overrides.items():
        if matches(name, pattern, expert):
            if other.rank is not None:
                rank, alpha = other.rank, None
            alpha = alpha if other.alpha is None else other.alpha
            dropout = dropout if other.dropout is None else other.dropout
            factor = factor if other.factor is None else other.factor
    return Setting(rank, float(rank if alpha is None else alpha), dropout, factor)


def matches(name: str, target: str, expert: str = "") -> bool:
    """Whether a target means this module; `high.` or `low.` before a name means one expert's."""
    full = f"{expert}.{name}" if expert else name
    if target.startswith(EXPRESSION):
        return re.fullmatch(target.removeprefix(EXPRESSION), full) is not None
    if WILD & set(target):
        return fnmatchcase(full, target) or fnmatchcase(full, f"*.{target}")
    return full == target or full.endswith(f".{target}")


def _demand_matches(
    target: str,
    setting: str,
    fitting: Mapping[str, Sequence[str]],
    names: Mapping[str, Mapping[str, nn.Module]],
) -> None:
    """In every transformer, unless the target names one of them."""
    _demand_expression(target, setting)
    found = {e: [n for n in known if matches(n, target, e)] for e, known in fitting.items()}
    empty = [expert for expert, matched in found.items() if not matched]
    if not empty or (len(empty) < len(found) and _names_one(target, found)):
        return
    others = [
        f"{name} ({type(module).__name__})"
        for name, module in names[empty[0]].items()
        if matches(name, target, empty[0])
    ]
    here = f" of the {empty[0]}-noise expert" if empty[0] else ""
    what = f" It matches {others[0]}, which cannot be adapted so." if others else ""
    endings = sorted({ending(name) for name in fitting[empty[0]]})
    raise ConfigError(
        f"{setting}: {target!r} matches no module{here} that takes part.{what} "
        f"There are: {', '.join(endings)}."
    )


def _names_one(target: str, experts: Iterable[str]) -> bool:
    return any(expert in re.split(r"[.\\(|)]", target) for expert in experts if expert)


def _demand_expression(target: str, setting: str) -> None:
    if target.startswith(EXPRESSION):
        try:
            re.compile(target.removeprefix(EXPRESSION))
        except re.error as error:
            raise ConfigError(
                f"{setting}: {target!r} is no regular expression: {error}. Mend it, or write a "
                "name, an ending or a pattern with *."
            ) from error


def ending(name: str) -> str:
    """A name without its block number, as a target would be written."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    first = numbers[0] + 1 if numbers and numbers[0] + 1 < len(parts) else 0
    return ".".join(parts[first:])
