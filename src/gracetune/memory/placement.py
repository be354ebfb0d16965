"""Give placement hints for the tensors of a batch, according to a table.

The table maps tensor names to roles (`prompt_embeds` is `text`) and roles to placements (`text` is
`device`). `gh200_optimizations.placement` in a run file changes it; library users may pass their
own. `place_batch` finds tensors in nested mappings, lists, tuples and dataclasses. A tensor's role
is that of the nearest enclosing key or field name that is in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from gracetune.memory.hints import Hint, Hints


class Placement(StrEnum):
    """The memory in which the tensors with a role, such as `latents` or `text`, should be kept."""

    HOST = "host"
    """In host memory, where kernels on the device read them without a copy."""
    STAGED = "staged"
    """In host memory, prefetched to the device before use."""
    DEVICE = "device"
    """In device memory, to which they are prefetched at once."""
    LEAVE = "leave"
    """No hints are given; the tensors stay where they are."""


@dataclass(frozen=True, slots=True)
class PlacementTable:
    """Maps tensor names to roles (such as `text`), and roles to placements (such as `device`)."""

    roles: Mapping[str, str]
    """Roles by tensor name, such as `text` for `prompt_embeds`."""
    placements: Mapping[str, Placement]
    """Placements by role, such as `device` for `text`."""

    def __post_init__(self) -> None:
        unplaced = sorted(set(self.roles.values()) - set(self.placements))
        if unplaced:
            raise ConfigError(
                f"The placement table has no placement for the roles {', '.join(unplaced)}. "
                "Add one for each."
            )


DEFAULT_TABLE = PlacementTable(
    roles=MappingProxyType(
        {
            "latents": "latents",
            "latent_batch": "latents",
            "unconditional_latents": "latents",
            "conditioning_latents": "latents",
            "control_latents": "latents",
            "audio_latents": "audio",
            "audio_samples": "audio",
            "waveform": "audio",
            "text": "text",
            "prompt_embeds": "text",
            "negative_prompt_embeds": "text",
            "encoder_hidden_states": "text",
            "text_embeddings": "text",
            "text_embeds": "text",
            "pooled": "pooled",
            "pooled_embeds": "pooled",
            "pooled_prompt_embeds": "pooled",
            "negative_pooled_prompt_embeds": "pooled",
            "add_text_embeds": "pooled",
            "mask": "masks",
            "masks": "masks",
            "attention_mask": "masks",
            "attention_masks": "masks",
            "prompt_attention_mask": "masks",
            "encoder_attention_mask": "masks",
        }
    ),
    placements=MappingProxyType(
        {
            "latents": Placement.HOST,
            "audio": Placement.HOST,
            "text": Placement.DEVICE,
            "pooled": Placement.DEVICE,
            "masks": Placement.DEVICE,
        }
    ),
)
"""Default roles and placements: latents and audio stay in host memory, as they are read once."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of a batch, and the hints that were given for it."""

    path: str
    """Path of the tensor in the batch, such as `audio_latents.left[0]`."""
    role: str
    placement: Placement
    hints: tuple[Hint, ...]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Outcomes of the hints for a batch; truthy if there were hints and all were applied."""

    placed: tuple[PlacedTensor, ...]
    unknown: tuple[str, ...]
    """Paths of tensors whose name is not in the table; they got no hints."""

    @property
    def hints(self) -> tuple[Hint, ...]:
        """All hints for the batch, in the order in which they were given."""
        return tuple(hint for placed in self.placed for hint in placed.hints)

    def __bool__(self) -> bool:
        return bool(self.hints) and all(self.hints)


def placement_table(changes: Mapping[str, str]) -> PlacementTable:
    """Return the default table with changed placements.

    `changes` maps roles or tensor names to placements, such as `{"latents": "staged"}`.
    """
    table = DEFAULT_TABLE
    roles, placements = dict(table.roles), dict(table.placements)
    for name, value in changes.items():
        if value not in list(Placement):
            raise ConfigError(
                f"gh200_optimizations.placement.{name} is {value!r}, but a placement is one of "
                f"{', '.join(Placement)}."
            )
        if name in table.placements:
            placements[name] = Placement(value)
        elif name in roles:
            roles[name] = name
            placements[name] = Placement(value)
        else:
            raise ConfigError(
                f"gh200_optimizations.placement.{name} is neither a role nor a tensor's name."
                f"{_did_you_mean(name, table)} Roles: {', '.join(table.placements)}. "
                f"Names: {', '.join(table.roles)}."
            )
    return PlacementTable(MappingProxyType(roles), MappingProxyType(placements))


def place_batch(batch: object, hints: Hints, table: PlacementTable = DEFAULT_TABLE) -> BatchReport:
    """Give the CUDA driver the table's hints for each tensor in a nested batch; report outcomes."""
    placed, unknown = [], []
    for path, name, tensor in _tensors(batch, table.roles):
        if name is None:
            unknown.append(path)
            continue
        role = table.roles[name]
        placement = table.placements[role]
        given = _give_hints(tensor, placement, hints)
        placed.append(PlacedTensor(path, role, placement, given))
    return BatchReport(tuple(placed), tuple(unknown))


def _give_hints(tensor: Tensor, placement: Placement, hints: Hints) -> tuple[Hint, ...]:
    if placement is Placement.HOST:
        return (hints.prefer_cpu_residency(tensor),)
    if placement is Placement.STAGED:
        return hints.prefer_cpu_residency(tensor), hints.prefetch_to_device(tensor)
    if placement is Placement.DEVICE:
        return hints.prefer_gpu_residency(tensor), hints.prefetch_to_device(tensor)
    return ()


def _tensors(root: object, roles: Mapping[str, str]) -> Iterator[tuple[str, str | None, Tensor]]:
    """Yield each tensor in `root` once, with its path and the nearest name that has a role.

    Uses a stack instead of recursion, so deeply nested and self-referencing batches work.
    """
    seen: set[int] = set()
    stack: list[tuple[str, str | None, object]] = [("", None, root)]
    while stack:
        path, name, value = stack.pop()
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                yield path or "batch", name, value
            continue
        children = list(_children(value))
        if not children or id(value) in seen:
            continue
        seen.add(id(value))
        for key, item in reversed(children):
            if isinstance(key, str):
                nearest = key if key in roles else name
                stack.append((f"{path}.{key}" if path else key, nearest, item))
            else:
                stack.append((f"{path}[{key}]", name, item))


def _children(value: object) -> Iterator[tuple[str | int, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield each.name, getattr(value, each.name)


def _did_you_mean(name: str, table: PlacementTable) -> str:
    close = get_close_matches(name, [*table.placements, *table.roles], n=1)
    return f" Did you mean {close[0]}?" if close else ""
