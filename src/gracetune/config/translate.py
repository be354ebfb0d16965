"""From a file in any known spelling to one draft in ours, remembering where each value stood."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from gracetune.config.spellings import ALIASES, RAMP_SWITCH, REMARKS, VALUES
from gracetune.config.text import dotted, place, shown
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gracetune.config.json_text import KeyPath
    from gracetune.config.text import ParsedText

EVERY_DATASET = ("datasets", "*")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written, and by which name."""

    where: str
    spelled: str


@dataclass(slots=True)
class Draft:
    """A run file in our spelling, not yet checked, with where each value came from."""

    tree: dict[str, object] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    """Foreign spellings met, and what they were read as."""
    notices: list[str] = field(default_factory=list)
    """What the user should know: values that mean something else here, settings that follow."""

    def get(self, key: str) -> object:
        """The value at a dotted key; none where it is not given."""
        found = _at(self.tree, tuple(key.split(".")))
        return None if found is _ABSENT else found


def translate(parsed: ParsedText, name: str) -> Draft:
    """Bring a file's keys into our spelling; what is said twice must be said alike."""
    draft = Draft()
    later: list[tuple[KeyPath, KeyPath, object]] = []
    for path, value in leaves(parsed.tree) if parsed.tree else ():
        target = canonical(path, value)
        if target[:2] == EVERY_DATASET:
            later.append((path, target, value))
        else:
            origin = Origin(place(name, parsed.lines, path), dotted(path))
            _add(draft, target, _our_value(draft, target, value), origin)
    for path, target, value in later:
        origin = Origin(place(name, parsed.lines, path), dotted(path))
        for each in _spread(target, draft):
            _add(draft, each, _our_value(draft, each, value), origin)
    for path in parsed.lines:
        draft.origins.setdefault(path, Origin(place(name, parsed.lines, path), dotted(path)))
    return draft


def override(draft: Draft, path: KeyPath, value: object, where: str) -> None:
    """Set one value whatever the file says; the path may be spelled as in any file.

    An object adds to the one that is there, a list takes the place of the other.
    """
    if isinstance(value, list):
        for target in _spread(canonical((*path, 0), {})[:-1], draft):
            _put(draft, target, [], Origin(where, dotted(path)))
    for ending, leaf in leaves(value):
        spelled = (*path, *ending)
        for target in _spread(canonical(spelled, leaf), draft):
            ours = _our_value(draft, target, leaf)
            if ours != {} or not isinstance(_at(draft.tree, target), dict):
                _put(draft, target, ours, Origin(where, dotted(spelled)))


def nearest_origin(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin | None:
    """Who wrote a key, or else something in it, or else what it is in."""
    inner = (other for other in origins if other[: len(path)] == path)
    outer = (path[:length] for length in range(len(path) - 1, 0, -1) if path[:length] in origins)
    nearest = path if path in origins else next(chain(inner, outer), None)
    return None if nearest is None else origins[nearest]


def leaves(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Every value that is not itself an object or a list of objects, with its path."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def canonical(path: KeyPath, value: object = "") -> KeyPath:
    """Our path for a path in any spelling; `*` stands where every data set is meant."""
    while True:
        one = len(path) > 1 and path[0] == "datasets" and isinstance(path[1], str)
        if one and path[1] != "*":
            path = ("datasets", 0, *path[1:])
        better = _respell(path, value)
        if better is None:
            return path
        path = better


def imply(draft: Draft) -> None:
    """Settings that follow from others, as the forks and hosts had it; each is noted."""
    if RAMP_SWITCH in draft.spelled:
        _follow(
            draft, "gh200_optimizations.enable_batch_size_rampup", True, f"{RAMP_SWITCH} is given"
        )
    for cache in ("cache_config.vae_cache_type", "cache_config.text_cache_type"):
        if draft.get(cache) == "unified_memory":
            why = f"{cache} is unified_memory"
            _follow(draft, "gh200_optimizations.enable_uvm_hints", True, why)
    datasets = draft.tree.get("datasets")
    for index, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        here: KeyPath = ("datasets", index)
        if _at(draft.tree, (*here, "cache_latents_to_disk")) is True:
            why = f"{dotted(here)}.cache_latents_to_disk is true"
            _follow(draft, "cache_config.persistent_cache", True, why)
        if isinstance(dataset, dict) and isinstance(dataset.get("in_memory"), dict):
            why = f"{dotted(here)}.in_memory is given"
            _follow(draft, f"{dotted(here)}.type", "in_memory", why)
        staged = isinstance(dataset, dict) and dataset.get("type") == "in_memory"
        if staged and isinstance(dataset.get("in_memory", {}), dict):
            key = f"{dotted(here)}.in_memory.compression"
            _follow(draft, key, "none", 'it is not given; "auto" would try codecs')


def _follow(draft: Draft, key: str, value: object, why: str) -> None:
    """Set what nobody set, and say why."""
    path: KeyPath = tuple(int(step) if step.isdecimal() else step for step in key.split("."))
    if _at(draft.tree, path) in (_ABSENT, None):
        _put(draft, path, value, Origin(why, key))
        draft.notices.append(f"{key} is {'true' if value is True else value}: {why}.")


def _spread(target: KeyPath, draft: Draft) -> list[KeyPath]:
    """The path itself, or one for every data set where all are meant."""
    if target[:2] != EVERY_DATASET:
        return [target]
    datasets = draft.tree.get("datasets")
    count = len(datasets) if isinstance(datasets, list) and datasets else 1
    return [("datasets", index, *target[2:]) for index in range(count)]


def _our_value(draft: Draft, path: KeyPath, value: object) -> object:
    """The value in our spelling; a change of meaning is noted."""
    pattern = pattern_of(path)
    if pattern == "validation.prompts" and isinstance(value, str):
        return [value]
    if not isinstance(value, str | bool | None) or value not in VALUES.get(pattern, {}):
        return value
    ours = VALUES[pattern][value]
    if (pattern, value) in REMARKS:
        why = REMARKS[pattern, value]
        draft.notices.append(f"{dotted(path)} is {value}: taken as {ours}, because {why}.")
    return ours


def _respell(path: KeyPath, value: object) -> KeyPath | None:
    """One step towards our spelling by the longest alias that fits, or none."""
    exact = ALIASES.get(pattern_of(path))
    if exact is not None and not isinstance(value, dict):
        return _fill(exact, path, ())
    for length in range(len(path), 0, -1):
        section = ALIASES.get(pattern_of(path[:length]) + ".")
        if section is not None and (length < len(path) or isinstance(value, dict)):
            return _fill(section.removesuffix("."), path[:length], path[length:])
    return None


def _fill(target: str, matched: KeyPath, rest: KeyPath) -> KeyPath:
    indices = [step for step in matched if isinstance(step, int)]
    filled: list[str | int] = []
    for step in target.split("."):
        if step == "*" and indices:
            filled.append(indices.pop(0))
        else:
            filled.append(int(step) if step.isdecimal() else step)
    return (*filled, *rest)


def pattern_of(path: KeyPath) -> str:
    """A path with `*` for the number of every item."""
    return ".".join("*" if isinstance(step, int) else step for step in path)


def _add(draft: Draft, path: KeyPath, value: object, origin: Origin) -> None:
    """Put a value that may not disagree with one already there."""
    for length in range(1, len(path)):
        outer = _at(draft.tree, path[:length])
        if outer not in (_ABSENT, {}, []) and not isinstance(outer, dict | list):
            raise _twice(draft, path[:length], outer, origin, value)
    before = _at(draft.tree, path)
    if before is not _ABSENT and before not in ({}, []):
        if value in ({}, []) and isinstance(before, dict | list):
            return
        if before != value or isinstance(before, bool) != isinstance(value, bool):
            raise _twice(draft, path, before, origin, value)
    _put(draft, path, value, origin)


def _twice(
    draft: Draft, path: KeyPath, before: object, origin: Origin, value: object
) -> ConfigError:
    first = nearest_origin(path, draft.origins)
    assert first is not None, f"{dotted(path)} has a value that nobody put there"
    return ConfigError(
        f"{origin.where}: {origin.spelled} is {shown(value)}, but {first.spelled} is "
        f"{shown(before)} ({first.where}); both set {dotted(path)}. Keep one of them."
    )


def _put(draft: Draft, path: KeyPath, value: object, origin: Origin) -> None:
    node: object = draft.tree
    for step, following in pairwise(path):
        child = _at(node, (step,))
        if not isinstance(child, dict | list):
            child = [] if isinstance(following, int) else {}
            _place(node, step, child, origin)
        node = child
    _place(node, path[-1], value, origin)
    draft.origins[path] = origin
    if origin.spelled != dotted(path) and origin.spelled not in draft.spelled:
        draft.spelled[origin.spelled] = dotted(path)


def _place(node: object, step: str | int, value: object, origin: Origin) -> None:
    if isinstance(node, dict):
        node[str(step)] = value
    elif isinstance(node, list) and isinstance(step, int) and 0 <= step < len(node):
        node[step] = value
    elif isinstance(node, list) and step == len(node):
        node.append(value)
    else:
        there = len(node) if isinstance(node, list) else 0
        raise ConfigError(
            f"{origin.where}: {origin.spelled} asks for item {step} of a list that has {there}; "
            "items count from 0, and a new one comes right after the last."
        )


_ABSENT = object()


def _at(node: object, path: KeyPath) -> object:
    for step in path:
        if isinstance(node, list) and isinstance(step, int) and 0 <= step < len(node):
            node = node[step]
        else:
            node = node.get(step, _ABSENT) if isinstance(node, dict) else _ABSENT
    return node
