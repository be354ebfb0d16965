"""The state that gracetune's hooks share while ai-toolkit runs.

The plug-in holds datasets and cache files in memory, the caches of augmented latents, and the
placement of a batch's tensors.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from gracetune.config.environment import environment_settings
from gracetune.data.staging import staging_room
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.hosts.ai_toolkit.config_blocks import AIToolkitBlocks, split_config, uses_gracetune
from gracetune.hosts.in_memory_files import (
    BackendFiles,
    StagedDatasetConfig,
    StagedFiles,
    stage_dataset,
)
from gracetune.hosts.shared_tensor_cache import open_tensor_cache
from gracetune.hosts.tensor_cache import IN_MEMORY_TYPES, LocalTensorMemory
from gracetune.memory.placement import place_batch, placement_table
from gracetune.memory.session import MemorySession
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from io import BytesIO, TextIOWrapper

    from gracetune.config.schema import CacheSection
    from gracetune.events.types import Event
    from gracetune.hosts.ai_toolkit.config_blocks import DatasetBlock
    from gracetune.hosts.tensor_cache import TensorCache
    from gracetune.memory.platform import Machine

    Load = Callable[[str], object]


CACHE_FOLDERS = {"_latent_cache": "vae", "_t_e_cache": "text"}
"""Folders next to the images where ai-toolkit keeps cache files, and the kind of cache."""


class AIToolkitPlugin:
    """The state that gracetune's hooks share in one ai-toolkit process and its forked workers."""

    def __init__(
        self,
        environment: Mapping[str, str],
        open_machine: Callable[[], Machine],
        notify: Callable[[str], None],
        shared_folder: Path | None = None,
        free_host_memory: Callable[[], int] = staging_room,
    ) -> None:
        """`notify` shows a message; ranks with the same `shared_folder` folder share memory."""
        self.environment = environment
        self.notify = notify
        self.memory: TensorCache | None = None
        self._num_ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        self._rank = int(environment.get("LOCAL_RANK", "0"))
        self.shared_folder = shared_folder if self._num_ranks > 1 else None
        self._free_host_memory = free_host_memory
        self._pid = os.getpid()
        self._memory_kinds: frozenset[str] = frozenset()
        self._loaded_paths: set[str] = set()
        self._staged_files: dict[str, StagedFiles] = {}
        self.session = MemorySession(
            open_machine, lambda: environment_settings(environment), self._emit
        )

    def begin_job(self) -> None:
        """Release the data of the previous job; `run.py` may run several jobs in one process."""
        self._staged_files.clear()
        self._loaded_paths.clear()
        self._memory_kinds = frozenset()
        if isinstance(self.memory, LocalTensorMemory):
            self.memory = None  # shared memory stays: other ranks may be reading it

    def split_config(
        self, config: Mapping[str, object]
    ) -> tuple[dict[str, object], AIToolkitBlocks]:
        """Apply the gracetune settings in the YAML of a process.

        Returns the part of the YAML for ai-toolkit, and gracetune's settings.
        """
        if not uses_gracetune(config):
            return dict(config), AIToolkitBlocks(stage_timesteps=False, check_saves=False)
        rest, blocks = split_config(config, self.environment)
        for text in blocks.notices:
            self.notify(text)
        for text in blocks.ignored:
            self.notify(f"warning: {text}")
        self.session.hints_override = blocks.gh200.enable_uvm_hints
        if blocks.cache is not None:
            self._configure_memory(blocks.cache)
        return rest, blocks

    def _emit(self, event: Event) -> None:
        """Show a notice. Other events are ignored, because ai-toolkit shows its own progress."""
        if isinstance(event, Notice):
            self.notify(f"warning: {event.text}" if event.level == "warning" else event.text)

    def _configure_memory(self, cache: CacheSection) -> None:
        types = {"vae": cache.vae_cache_type, "text": cache.text_cache_type}
        self._memory_kinds = frozenset(
            kind for kind, cache_type in types.items() if cache_type in IN_MEMORY_TYPES
        )
        if not self._memory_kinds:
            return
        limit = cache.host_budget_gb
        if self.memory is None:
            # Not pinned: forked workers cannot use memory that the CUDA driver has pinned.
            self.memory = open_tensor_cache(
                limit,
                self._num_ranks,
                self.shared_folder,
                torch.Tensor.contiguous,
                self._emit,
                self._free_host_memory,
            )
        elif limit is not None:
            self.memory.budget_nbytes = int(limit * GIB)

    def attach_datasets(self, blocks: AIToolkitBlocks, settings: Sequence[DatasetSettings]) -> None:
        """Set the augmentations of ai-toolkit's datasets, which its configuration no longer has.

        ai-toolkit has one dataset for each resolution of an entry. Raises if data loader workers
        could not see the data in memory.
        """
        if not blocks.datasets:
            return
        repeated = [block for block in blocks.datasets for _ in range(block.num_resolutions)]
        assert len(repeated) == len(settings), f"{len(repeated)} blocks, {len(settings)} datasets"
        for block, each in zip(repeated, settings, strict=True):
            if block.cache_mode:
                each.augments = list(block.augments)
                each.augmentations = list(block.augmentations) or None
                vars(each)[KEY] = AugmentedLatents(block.cache_mode, block.first_epoch)
        if any(block.in_memory or block.cache_mode for block in blocks.datasets) or (
            self._memory_kinds
        ):
            num_workers = [vars(each)["num_workers"] for each in settings]
            check_workers_fork(max(num_workers, default=0), worker_start_method())

    def stage_datasets(self, blocks: Sequence[DatasetBlock]) -> None:
        """Read the datasets that are to be held in memory, each folder once."""
        for block in blocks:
            folder = os.path.abspath(block.folder)
            if block.in_memory is not None and folder not in self._staged_files:
                config = StagedDatasetConfig(folder, folder, block.in_memory, ())
                self._staged_files[folder] = stage_dataset(config, self._emit, self.shared_folder)

    def staged_bytes(self, path: object) -> bytes | None:
        """Return the bytes of a file from memory, or None if it must be read from disk."""
        files = self._find_staged(path)
        return None if files is None else files.read(str(path))

    def open_staged(self, path: object, mode: str) -> BytesIO | TextIOWrapper | None:
        """Open a file in memory for reading, or return None if it must be opened on disk."""
        files = self._find_staged(path)
        return None if files is None else BackendFiles(files, None).open_file(str(path), mode)

    def _find_staged(self, path: object) -> StagedFiles | None:
        if not isinstance(path, str):
            return None
        return next((files for files in self._staged_files.values() if files.holds(path)), None)

    def load(self, path: str, load: Load) -> object:
        """Return the tensors of a cache file, from memory if this kind of cache is kept there.

        A data loader worker uses what this process loaded before the worker was forked, or what
        ranks share. It does not keep what it loads itself: every worker would hold a copy.
        """
        memory = self.memory
        if memory is None or not self._is_kept_in_memory(path):
            return load(path)
        if os.getpid() == self._pid:
            self._loaded_paths.add(path)
        elif path not in self._loaded_paths and self.shared_folder is None:
            return load(path)
        return memory.get(path, load)

    def preload(self, paths: Iterable[str], load: Load) -> None:
        """Load cache files into memory, up to the budget, before data loader workers are forked.

        If ranks share memory, each loads a part of the files.
        """
        if self.memory is None:
            return
        candidates = sorted(path for path in set(paths) if self._is_kept_in_memory(path))
        mine = (
            candidates if self.shared_folder is None else candidates[self._rank :: self._num_ranks]
        )
        num_left = 0
        for path in mine:
            # Shared memory stores whole pages, and drops its oldest files beyond the budget.
            nbytes = -(-os.path.getsize(path) // mmap.PAGESIZE) * mmap.PAGESIZE
            if self.memory.nbytes + nbytes > self.memory.budget_nbytes:
                num_left += 1
            else:
                self.load(path, load)
        if num_left:
            budget = format_bytes(self.memory.budget_nbytes)
            self.notify(
                f"{num_left} of {len(mine)} cache files stay on disk: "
                f"gracetune.cache_config.host_budget_gb allows {budget}"
            )

    def _is_kept_in_memory(self, path: str) -> bool:
        return CACHE_FOLDERS.get(Path(path).parent.name) in self._memory_kinds

    def place_batch(self, blocks: AIToolkitBlocks, batch: Mapping[str, object]) -> None:
        """Tell the driver where to keep the tensors of a batch: in host or in device memory."""
        if self.session.hints_enabled:
            place_batch(batch, self.session.hints, placement_table(blocks.gh200.placement))


def worker_start_method() -> str:
    """Return how Python starts workers, without fixing the method: ai-toolkit may still set it."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def check_workers_fork(num_workers: int, method: str) -> None:
    """Refuse workers that are not forks: they would not see the data in this process's memory."""
    if num_workers > 0 and method != "fork":
        raise ConfigError(
            f"datasets have num_workers: {num_workers}, and Python starts workers by {method}: "
            "they would not see data and caches in memory. Set num_workers: 0."
        )


# Cached latents of augmented images
#
# Cache files are named after the augmentations and an augmentation epoch. A refresh encodes the
# next epoch completely before workers, which read the epoch number from shared memory, switch to
# it. The files of the previous epoch are deleted one refresh later, because workers read ahead.


KEY = "gracetune"
"""Attribute of ai-toolkit's DatasetConfig that holds the `AugmentedLatents` of a dataset."""


class DatasetSettings(Protocol):
    """The attributes of ai-toolkit's DatasetConfig that gracetune uses."""

    augments: list[object]
    augmentations: list[object] | None


class FileItem(Protocol):
    """The attributes of ai-toolkit's FileItemDTO that gracetune uses."""

    path: str
    dataset_config: DatasetSettings
    is_latent_cached: bool
    _encoded_latent: torch.Tensor | None

    def get_latent_path(self, recalculate: bool = False) -> str: ...


class AIToolkitDataset(Protocol):
    """The attributes of ai-toolkit's AiToolkitDataset that gracetune uses."""

    dataset_config: DatasetSettings
    file_list: list[FileItem]

    def cache_latents_all_latents(self) -> None: ...


class AugmentedLatents:
    """Controls the cache of a dataset's augmented latents, which are encoded again for some epochs.

    All copies of the dataset's settings share one object.
    """

    def __init__(self, cache_mode: str, first_epoch: int = 0) -> None:
        self.cache_mode = cache_mode
        self._epoch = torch.tensor(first_epoch, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._next_epoch: int | None = None
        self._outdated: set[str] = set()

    def __deepcopy__(self, memo: dict[int, object]) -> AugmentedLatents:
        """Return self: ai-toolkit copies files with their settings for every batch."""
        return self

    @property
    def current_epoch(self) -> int:
        """Number of the set of augmented latents to read or, during a refresh, to write."""
        return int(self._epoch) if self._next_epoch is None else self._next_epoch

    def refresh(self, dataset: AIToolkitDataset) -> None:
        """Encode all latents again with new augmentations, and switch to them.

        The previous latents are deleted one refresh later, because workers read ahead.
        """
        before = {item.get_latent_path() for item in dataset.file_list}
        self._next_epoch = int(self._epoch) + 1
        try:
            for item in dataset.file_list:
                # Else ai-toolkit would load the cached latent instead of the image.
                item.is_latent_cached = False
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
    """Return the `AugmentedLatents` of a dataset; None if its augmentations are not cached."""
    found = vars(settings).get(KEY)
    return found if isinstance(found, AugmentedLatents) else None


def extended_latent_key(item: FileItem, info: Mapping[str, object]) -> dict[str, object]:
    """Add to ai-toolkit's cache key the augmentations, their epoch, and size and time of the file.

    Cache file names are digests of the result, so the keys and values must not change.
    """
    latents = augmented_latents_of(item.dataset_config)
    if latents is None:
        return dict(info)
    status = os.stat(item.path)
    settings = item.dataset_config
    recipe = {"augments": settings.augments, "augmentations": settings.augmentations}
    return {
        **info,
        "gracetune_recipe": json.dumps(recipe, sort_keys=True, default=str),
        "gracetune_generation": latents.current_epoch,
        "gracetune_source": f"{status.st_size}:{status.st_mtime_ns}",
    }


def latent_path(item: FileItem, original: Callable[..., str], recalculate: bool) -> str:
    """Return the path of a cached latent.

    ai-toolkit remembers the path; with augmentations it is computed again for each epoch.
    """
    return original(item, recalculate or augmented_latents_of(item.dataset_config) is not None)
