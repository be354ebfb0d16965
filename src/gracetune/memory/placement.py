"""Which tensors of a batch live where: one table of roles, and a walk that applies it.

The table is data: a run file changes it by `placement_table`, a library by handing in its own. The
walk finds tensors in nested mappings, lists, tuples and dataclasses; a tensor's role is that of the
nearest named thing around it.
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
    """Where tensors of a role live."""

    HOST = "host"
    """In host memory, read in place by the device."""
    STAGED = "staged"
    """In host memory, moved to the device ahead of use."""
    DEVICE = "device"
    """In device memory, moved there at once."""
    LEAVE = "leave"
    """Wherever they are."""


@dataclass(frozen=True, slots=True)
class PlacementTable:
    """The policy: the role of each name, and the home of each role."""

    roles: Mapping[str, str]
    placements: Mapping[str, Placement]

    def __post_init__(self) -> None:
        homeless = sorted(set(self.roles.values()) - set(self.placements))
        if homeless:
            raise ConfigError(
                f"The placement table gives no home to {', '.join(homeless)}; every role needs one."
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
"""The forks' policy: what is large and read once stays with the host, what is read often moves."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor of a batch and the hints it was given."""

    path: str
    """Where it was found: `audio_latents.left[0]`."""
    role: str
    placement: Placement
    hints: tuple[Hint, ...]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What became of a batch; truthy when something was placed and every hint was applied."""

    placed: tuple[PlacedTensor, ...]
    unknown: tuple[str, ...]
    """Tensors whose name the table does not know; nothing was done to them."""

    @property
    def hints(self) -> tuple[Hint, ...]:
        """Every hint, in the order given."""
        return tuple(hint for placed in self.placed for hint in placed.hints)

    def __bool__(self) -> bool:
        return bool(self.hints) and all(self.hints)


def placement_table(
    changes: Mapping[str, str], table: PlacementTable = DEFAULT_TABLE
) -> PlacementTable:
    """The table with other homes for some roles, or for single names: `{"latents": "staged"}`."""
    roles, homes = dict(table.roles), dict(table.placements)
    for name, value in changes.items():
        if value not in list(Placement):
            raise ConfigError(
                f"gh200_optimizations.placement.{name} is {value!r}; "
                f"a home is one of {', '.join(Placement)}."
            )
        if name in table.placements:
            homes[name] = Placement(value)
        elif name in roles:
            roles[name] = name
            homes[name] = Placement(value)
        else:
            raise ConfigError(
                f"gh200_optimizations.placement.{name} is no role and no name of a batch's tensor."
                f"{_did_you_mean(name, table)} Roles: {', '.join(table.placements)}. "
                f"Names: {', '.join(table.roles)}."
            )
    return PlacementTable(MappingProxyType(roles), MappingProxyType(homes))


def place_batch(batch: object, hints: Hints, table: PlacementTable = DEFAULT_TABLE) -> BatchReport:
    """Give each tensor of a batch the home of its role."""
    placed, unnamed = [], []
    for path, name, tensor in _tensors(batch, table.roles):
        if name is None:
            unnamed.append(path)
            continue
        role = table.roles[name]
        home = table.placements[role]
        placed.append(PlacedTensor(path, role, home, _send_home(tensor, home, hints)))
    return BatchReport(tuple(placed), tuple(unnamed))


def _send_home(tensor: Tensor, home: Placement, hints: Hints) -> tuple[Hint, ...]:
    if home is Placement.HOST:
        return (hints.prefer_cpu_residency(tensor),)
    if home is Placement.STAGED:
        return hints.prefer_cpu_residency(tensor), hints.prefetch_to_device(tensor)
    if home is Placement.DEVICE:
        return hints.prefer_gpu_residency(tensor), hints.prefetch_to_device(tensor)
    return ()


def _tensors(root: object, roles: Mapping[str, str]) -> Iterator[tuple[str, str | None, Tensor]]:
    """Every tensor once, with its path and the nearest name that the table knows.

    A stack instead of recursion: a batch that contains itself, or nests deeply, is walked too.
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
        inside = list(_inside(value))
        if not inside or id(value) in seen:
            continue
        seen.add(id(value))
        for key, item in reversed(inside):
            if isinstance(key, str):
                inner = key if key in roles else name
                stack.append((f"{path}.{key}" if path else key, inner, item))
            else:
                stack.append((f"{path}[{key}]", name, item))


def _inside(value: object) -> Iterator[tuple[str | int, object]]:
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
