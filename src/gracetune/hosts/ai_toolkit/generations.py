"""Cached latents of augmented pictures: named by what was done to them, and drawn anew by epoch.

A draw is a generation. Workers hear of a new one by a number in shared memory, once all of it is
encoded; the one before stays until then, because workers read ahead.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEY = "gracetune"
"""Under which a data set's settings carry ours; copies of the settings carry it along."""


class Settings(Protocol):
    """ai-toolkit's settings of a data set."""

    augments: list[object]
    augmentations: list[object] | None


class Item(Protocol):
    """ai-toolkit's file of a data set."""

    path: str
    dataset_config: Settings
    is_latent_cached: bool
    _encoded_latent: torch.Tensor | None

    def get_latent_path(self, recalculate: bool = False) -> str: ...


class Dataset(Protocol):
    """ai-toolkit's data set."""

    dataset_config: Settings
    file_list: list[Item]

    def cache_latents_all_latents(self) -> None: ...


class LatentGenerations:
    """How a data set's augmentations and cache go together; one for all copies of its settings."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._drawn = torch.zeros((), dtype=torch.int64)
        self._drawn.share_memory_()  # type: ignore[no-untyped-call]
        self._preparing: int | None = None
        self._outdated: set[str] = set()

    def __deepcopy__(self, memo: dict[int, object]) -> LatentGenerations:
        """Files are copied with all their settings for every batch; this is what they share."""
        return self

    @property
    def current(self) -> int:
        """The generation that files are read from, or written to where one is being drawn."""
        return int(self._drawn) if self._preparing is None else self._preparing

    def refresh(self, dataset: Dataset) -> None:
        """Draw and encode the next generation, then let it be read, then clear the last but one."""
        before = {item.get_latent_path() for item in dataset.file_list}
        self._preparing = int(self._drawn) + 1
        try:
            for item in dataset.file_list:
                item.is_latent_cached = False  # else the cache would be read instead of the picture
                item._encoded_latent = None
            dataset.cache_latents_all_latents()
            self._drawn += 1
        finally:
            self._preparing = None
            for item in dataset.file_list:
                item.is_latent_cached = True
        for path in self._outdated:
            if os.path.exists(path):
                os.unlink(path)
        self._outdated = before


def of_settings(settings: Settings) -> LatentGenerations | None:
    """Ours, where a data set has it."""
    found = vars(settings).get(KEY)
    return found if isinstance(found, LatentGenerations) else None


def describe(item: Item, info: Mapping[str, object]) -> dict[str, object]:
    """What a cached latent depends on: ai-toolkit's own list, and what it leaves out of it."""
    ours = of_settings(item.dataset_config)
    if ours is None:
        return dict(info)
    file = os.stat(item.path)
    settings = item.dataset_config
    recipe = {"augments": settings.augments, "augmentations": settings.augmentations}
    return {
        **info,
        "gracetune_recipe": json.dumps(recipe, sort_keys=True, default=str),
        "gracetune_generation": ours.current,
        "gracetune_source": f"{file.st_size}:{file.st_mtime_ns}",
    }


def latent_path(item: Item, original: Callable[..., str], recalculate: bool) -> str:
    """Where the latent is now: a path that was remembered may be of a generation before."""
    return original(item, recalculate or of_settings(item.dataset_config) is not None)
