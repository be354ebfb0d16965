"""What the hooks share while ai-toolkit runs: data and cache files held in memory, and where the
tensors of a batch are placed."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from gracetune.config.environment import environment_settings
from gracetune.data.staging import host_room
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.hosts.ai_toolkit.config_blocks import AIToolkitBlocks, uses_gracetune, split_config
from gracetune.hosts.shared_tensor_memory import SharedTensorMemory
from gracetune.hosts.staged_files import (
    BackendFiles,
    StagedFiles,
    StagedDatasetConfig,
    stage_dataset,
)
from gracetune.hosts.tensor_memory import LocalTensorMemory
from gracetune.memory.placement import place_batch, placement_table
from gracetune.memory.session import MemorySession
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from io import BytesIO, TextIOWrapper

    from gracetune.config.schema import CacheSection
    from gracetune.events.types import Event
    from gracetune.hosts.ai_toolkit.config_blocks import DatasetBlock
    from gracetune.memory.platform import Machine

    Load = Callable[[str], object]


CACHE_FOLDERS = {"_latent_cache": "vae", "_t_e_cache": "text"}
"""Where ai-toolkit keeps cache files, beside the pictures, and which cache it is."""
IN_MEMORY_TYPES = ("memory", "unified_memory")
_MEMORY_SHARE = 0.5
"""Of what the host can spare, for cache files, where nothing is said."""


class AIToolkitPlugin:
    """One for each run of ai-toolkit; its loaders' workers are forks of it."""

    def __init__(
        self,
        environment: Mapping[str, str],
        open_machine: Callable[[], Machine],
        say: Callable[[str], None],
        meet_in: Path | None = None,
        room: Callable[[], int] = host_room,
    ) -> None:
        self.environment = environment
        self.notify = say
        self.memory: LocalTensorMemory | SharedTensorMemory | None = None
        self._ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        self._rank = int(environment.get("LOCAL_RANK", "0"))
        self._meet_in = meet_in if self._ranks > 1 else None
        """Where ranks of one machine find each other; none: there is no other."""
        self._free_host_memory = room
        self._process = os.getpid()
        self._memory_kinds: frozenset[str] = frozenset()
        self._loaded_paths: set[str] = set()
        self._staged_files: dict[str, StagedFiles] = {}
        self._session = MemorySession(
            open_machine, lambda: environment_settings(environment), self._emit
        )

    def begin_job(self) -> None:
        """Let go of what a job before this one held: `run.py` runs one after the other."""
        self._staged_files.clear()
        self._loaded_paths.clear()
        self._memory_kinds = frozenset()
        if isinstance(self.memory, LocalTensorMemory):
            self.memory = None  # what ranks share stays: others may be reading it

    def split_config(
        self, config: Mapping[str, object]
    ) -> tuple[dict[str, object], AIToolkitBlocks]:
        """What ai-toolkit may see of a process; what it says to us is told and prepared."""
        if not uses_gracetune(config):
            return dict(config), AIToolkitBlocks(stage_timesteps=False, check_saves=False)
        rest, blocks = split_config(config, self.environment)
        for text in blocks.notices:
            self.notify(text)
        self._session.hints_override = blocks.gh200.enable_uvm_hints
        if blocks.cache is not None:
            self._configure_memory(blocks.cache)
        return rest, blocks

    def _emit(self, event: Event) -> None:
        """Progress is ai-toolkit's to show."""
        if isinstance(event, Notice):
            self.notify(f"warning: {event.text}" if event.level == "warning" else event.text)

    def _configure_memory(self, cache: CacheSection) -> None:
        types = {"vae": cache.vae_cache_type, "text": cache.text_cache_type}
        self._memory_kinds = frozenset(
            kind for kind, place in types.items() if place in IN_MEMORY_TYPES
        )
        if not self._memory_kinds:
            return
        limit = cache.host_budget_gb
        if self.memory is None:
            share = max(0, int(self._free_host_memory() * _MEMORY_SHARE / self._ranks))
            self.memory = self._open_memory(share if limit is None else int(limit * GIB))
        elif limit is not None:
            self.memory.budget_nbytes = int(limit * GIB)

    def _open_memory(self, budget_nbytes: int) -> LocalTensorMemory | SharedTensorMemory:
        self.notify(f"cache files are kept in host memory, up to {format_bytes(budget_nbytes)}")
        if self._meet_in is None:
            # Not pinned: memory that the driver pins is not there in forks, which workers are.
            return LocalTensorMemory(budget_nbytes, torch.Tensor.contiguous)
        self.notify(f"each of {self._ranks} ranks holds a share of them, for all of this machine")
        return SharedTensorMemory(budget_nbytes, self._meet_in, self._emit)

    def attach_datasets(self, blocks: AIToolkitBlocks, configs: Sequence[DatasetSettings]) -> None:
        """Give ai-toolkit's data sets, one a resolution, what was kept from them at first."""
        if not blocks.datasets:
            return
        of_each = [block for block in blocks.datasets for _ in range(block.num_resolutions)]
        assert len(of_each) == len(configs), f"{len(of_each)} blocks, {len(configs)} data sets"
        for block, config in zip(of_each, configs, strict=True):
            if block.cache_mode:
                config.augments = list(block.augments)
                config.augmentations = list(block.augmentations) or None
                vars(config)[KEY] = AugmentedLatents(block.cache_mode)
        if (
            any(block.in_memory or block.cache_mode for block in blocks.datasets)
            or self._memory_kinds
        ):
            workers = [vars(config)["num_workers"] for config in configs]
            check_workers_fork(max(workers, default=0), worker_start_method())

    def stage_datasets(self, blocks: Sequence[DatasetBlock]) -> None:
        """Read the data sets that are to be held in memory, each folder once."""
        for block in blocks:
            folder = os.path.abspath(block.folder)
            if block.in_memory is not None and folder not in self._staged_files:
                chosen = StagedDatasetConfig(folder, folder, block.in_memory, ())
                self._staged_files[folder] = stage_dataset(chosen, self._emit, self._meet_in)

    def staged_bytes(self, path: object) -> bytes | None:
        """The bytes of a staged file; none: ask the disk."""
        if not isinstance(path, str):
            return None
        found = os.path.abspath(path)
        for shelf in self._staged_files.values():
            if shelf.holds(found):
                return shelf.read(found)
        return None

    def open_staged(self, path: object, mode: str) -> BytesIO | TextIOWrapper | None:
        """A staged file to read from; none: ask the disk."""
        if not isinstance(path, str):
            return None
        found = os.path.abspath(path)
        for shelf in self._staged_files.values():
            if shelf.holds(found):
                return BackendFiles(shelf, None).open_file(found, mode)
        return None

    def load(self, path: str, load: Load) -> object:
        """The tensors of a cache file, from memory where they are held.

        Workers read what this process has read before they began, or what any rank holds; what
        they read themselves they do not keep, or each of them would hold the cache once more.
        """
        memory = self.memory
        if memory is None or not self._is_kept_in_memory(path):
            return load(path)
        if os.getpid() == self._process:
            self._loaded_paths.add(path)
        elif path not in self._loaded_paths and self._meet_in is None:
            return load(path)
        return memory.get(path, load)

    def preload(self, paths: Iterable[str], load: Load) -> None:
        """Read cache files ahead, as far as the budget goes; of several ranks, each its share."""
        if self.memory is None:
            return
        wanted, left = sorted(path for path in set(paths) if self._is_kept_in_memory(path)), 0
        mine = wanted if self._meet_in is None else wanted[self._rank :: self._ranks]
        for path in mine:
            # In whole pages, as ranks share them: past its budget a memory lets its oldest go.
            nbytes = -(-os.path.getsize(path) // mmap.PAGESIZE) * mmap.PAGESIZE
            if self.memory.nbytes + nbytes > self.memory.budget_nbytes:
                left += 1
            else:
                self.load(path, load)
        if left:
            budget = format_bytes(self.memory.budget_nbytes)
            self.notify(
                f"{left} of {len(mine)} cache files stay on disk: "
                f"gracetune.cache_config.host_budget_gb allows {budget}"
            )

    def _is_kept_in_memory(self, path: str) -> bool:
        """Whether files of this kind are to be in memory."""
        return CACHE_FOLDERS.get(Path(path).parent.name) in self._memory_kinds

    def place_batch(self, blocks: AIToolkitBlocks, batch: Mapping[str, object]) -> None:
        """Hint where the tensors of a batch live."""
        if self._session.hints_enabled:
            place_batch(batch, self._session.hints, placement_table(blocks.gh200.placement))


def worker_start_method() -> str:
    """How Python starts workers, without settling it: ai-toolkit may."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def check_workers_fork(num_workers: int, method: str) -> None:
    """Workers that are started anew would know nothing of what is held here."""
    if num_workers > 0 and method != "fork":
        raise ConfigError(
            f"datasets have num_workers: {num_workers}, and Python starts workers by {method}: "
            "they would not see data and caches in memory. Set num_workers: 0."
        )


# ------------------------------------------------------------------------------------------
# Cached latents of augmented pictures: named by what was done to them, and drawn anew by epoch.
#
# A draw is a generation. Workers hear of a new one by a number in shared memory, once all of it is
# encoded; the one before stays until then, because workers read ahead.


KEY = "gracetune"
"""Under which a data set's settings carry ours; copies of the settings carry it along."""


class DatasetSettings(Protocol):
    """ai-toolkit's settings of a data set."""

    augments: list[object]
    augmentations: list[object] | None


class FileItem(Protocol):
    """ai-toolkit's file of a data set."""

    path: str
    dataset_config: DatasetSettings
    is_latent_cached: bool
    _encoded_latent: torch.Tensor | None

    def get_latent_path(self, recalculate: bool = False) -> str: ...


class AIToolkitDataset(Protocol):
    """ai-toolkit's data set."""

    dataset_config: DatasetSettings
    file_list: list[FileItem]

    def cache_latents_all_latents(self) -> None: ...


class AugmentedLatents:
    """How a data set's augmentations and cache go together; one for all copies of its settings."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._next_epoch: int | None = None
        self._outdated: set[str] = set()

    def __deepcopy__(self, memo: dict[int, object]) -> AugmentedLatents:
        """Files are copied with all their settings for every batch; this is what they share."""
        return self

    @property
    def current_epoch(self) -> int:
        """The generation that files are read from, or written to where one is being drawn."""
        return int(self._epoch) if self._next_epoch is None else self._next_epoch

    def refresh(self, dataset: AIToolkitDataset) -> None:
        """Draw and encode the next generation, then let it be read, then clear the last but one."""
        before = {item.get_latent_path() for item in dataset.file_list}
        self._next_epoch = int(self._epoch) + 1
        try:
            for item in dataset.file_list:
                item.is_latent_cached = False  # else the cache would be read instead of the picture
                item._encoded_latent = None
            dataset.cache_latents_all_latents()
            self._epoch += 1
        finally:
            self._next_epoch = None
            for item in dataset.file_list:
                item.is_latent_cached = True
        for path in self._outdated:
            if os.path.exists(path):
                os.unlink(path)
        self._outdated = before


def augmented_latents_of(settings: DatasetSettings) -> AugmentedLatents | None:
    """Ours, where a data set has it."""
    found = vars(settings).get(KEY)
    return found if isinstance(found, AugmentedLatents) else None


def latent_key(item: FileItem, info: Mapping[str, object]) -> dict[str, object]:
    """What a cached latent depends on: ai-toolkit's own list, and what it leaves out of it."""
    ours = augmented_latents_of(item.dataset_config)
    if ours is None:
        return dict(info)
    file = os.stat(item.path)
    settings = item.dataset_config
    recipe = {"augments": settings.augments, "augmentations": settings.augmentations}
    return {
        **info,
        "gracetune_recipe": json.dumps(recipe, sort_keys=True, default=str),
        "gracetune_generation": ours.current_epoch,
        "gracetune_source": f"{file.st_size}:{file.st_mtime_ns}",
    }


def latent_path(item: FileItem, original: Callable[..., str], recalculate: bool) -> str:
    """Where the latent is now: a path that was remembered may be of a generation before."""
    return original(item, recalculate or augmented_latents_of(item.dataset_config) is not None)
