"""Open the cache stores of a run, as `cache_config` says: in memory, on disk, or both.

`cache/store.py` defines what a store is; this module decides which ones a run gets, where their
folders are, and how the host memory budget is divided between latents and text. Several ranks of a
machine keep one copy in memory (cache/shared_tier.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

from gracetune.cache.encode import SINGLE_RANK
from gracetune.cache.memory_tier import (
    HitCounts,
    HostMemoryBudget,
    MemoryTier,
    allocate_page_aligned,
)
from gracetune.cache.shard_format import PAGE
from gracetune.cache.shard_store import ShardStore
from gracetune.cache.shared_tier import SharedTier
from gracetune.data.bulk_copy import MissingBulkCopier, find_bulk_copier
from gracetune.events.types import Notice
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gracetune.cache.encode import Emit, Ranks
    from gracetune.cache.store import Store
    from gracetune.config.schema import CacheSection, RunFile
    from gracetune.data.bulk_copy import BulkCopier

TEXT_SHARE = 4
"""Text gets 1/TEXT_SHARE of the host memory budget, if latents and text are both in memory."""


def cache_root(run: RunFile) -> Path:
    """Return the folder with a run's caches of latents and text."""
    cache_dir = run.cache_config.cache_dir
    return Path(cache_dir) if cache_dir else Path(run.output_dir) / "cache"


class CacheStores:
    """The cache stores of a run: one for latents and one for text embeddings.

    `open_latents` opens further stores of latents, such as one for each augmentation epoch.
    """

    def __init__(
        self,
        run: RunFile,
        folder: Path,
        emit: Emit,
        allocate_host: Callable[[int], Tensor] = allocate_page_aligned,
        ranks: Ranks = SINGLE_RANK,
        find: Callable[[], BulkCopier | MissingBulkCopier] = find_bulk_copier,
    ) -> None:
        """Open the cache stores of a run whose output folder is `folder`.

        `allocate_host` allocates host memory that the device can copy from. `find` looks for the
        compiled helper that gathers batches.
        """
        section = run.cache_config
        root = ranks.machine_folder(
            Path(section.cache_dir) if section.cache_dir else folder / "cache"
        )
        self._emit = emit
        self._allocate_host = allocate_host
        self._types = {"latents": section.vae_cache_type, "text": section.text_cache_type}
        kept = section.persistent_cache or any(d.cache_latents_to_disk for d in run.datasets)
        self._persistent = kept or ranks.shares_cache
        self._budgets = _budgets(section)
        self._ranks = ranks
        self._gather = find()
        self.hit_counts = HitCounts()
        if not kept and ranks.shares_cache:
            text = f"cache: {len(ranks.cache_ranks)} ranks share one cache of encoded samples"
            emit(Notice(f"{text}, in {root}"))
        self._report_choices(section.cache_dir)
        self.latents = self._open("latents", "latents", root / "latents")
        self.text = self._open("text", "texts", root / "text")

    @property
    def latents_on_disk(self) -> bool:
        """True if latents are written to files, even if they are also kept in memory."""
        return self._persistent or self._types["latents"] == "disk"

    def open_latents(self, name: str, folder: Path) -> Store:
        """Open another store of latents that shares the memory budget; `name` is for messages."""
        return self._open("latents", name, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Complete the cache files being written, and close all files; reading reopens them."""
        self.latents.close()
        self.text.close()

    def trim(self) -> int:
        """Drop entries in memory that files have too; return the bytes given back to the kernel."""
        return sum(store.trim() for store in self.trimmable().values())

    def restore(self) -> None:
        """Use the memory again that `trim` has given back."""
        for store in self.trimmable().values():
            store.restore()

    def trimmable(self) -> dict[str, MemoryTier | SharedTier]:
        """Return the stores that keep entries in host memory, by name."""
        stores = {"latents": self.latents, "texts": self.text}
        return {
            name: store
            for name, store in stores.items()
            if isinstance(store, MemoryTier | SharedTier)
        }

    def _open(self, kind: str, name: str, folder: Path) -> Store:
        on_disk = self._types[kind] == "disk"
        files = ShardStore(folder, self._emit) if self._persistent or on_disk else None
        if files is not None and on_disk:
            return files
        if files is not None and self._ranks.shares_cache:
            return SharedTier(
                name,
                self._budgets[kind],
                files,
                self._emit,
                self._ranks.reports / "memory",
                self.hit_counts,
                lambda: self._gather,
            )
        unified = self._types[kind] == "unified_memory"
        allocate = self._allocate_host if unified else allocate_page_aligned
        return MemoryTier(
            name,
            self._budgets[kind],
            files,
            self._emit,
            allocate,
            self.hit_counts,
            lambda: self._gather,
        )

    def _report_choices(self, cache_dir: str | None) -> None:
        """Emit notices about cache settings that are ignored or have a cost."""
        if cache_dir and not self._persistent and "disk" not in self._types.values():
            text = f"cache: cache_config.cache_dir {cache_dir} is not used: the cache is in memory"
            hint = "Set cache_config.persistent_cache: true to keep it."
            self._emit(Notice(f"{text} and ends with the run. {hint}"))
        unified = [kind for kind, type_ in self._types.items() if type_ == "unified_memory"]
        if unified:
            limits = (
                f"{kind} up to {format_bytes(self._budgets[kind].nbytes)}" for kind in unified
            )
            text = f"cache: type unified_memory: {' and '.join(limits)} are in host memory"
            if self._allocate_host(PAGE).is_pinned() and not self._ranks.shares_cache:
                text = text.replace("host memory", "pinned host memory")
            why = "copies ahead of each step are faster than page faults of managed memory"
            self._emit(Notice(f"{text}, not in managed memory: {why}"))
        if isinstance(self._gather, MissingBulkCopier) and self._types["latents"] != "disk":
            text = "batches of latents are gathered by torch, which is slower: "
            self._emit(Notice(text + self._gather.reason, fallback=True))


def _budgets(section: CacheSection) -> dict[str, HostMemoryBudget]:
    """Return the limits on this machine's memory for caching `latents` and `text`.

    The ranks of a machine share one copy of the cache. Entries on disk need no memory.
    """
    total = psutil.virtual_memory().available * 3 // 4
    if section.host_budget_gb is not None:
        total = int(section.host_budget_gb * GIB)
    if "disk" in (section.vae_cache_type, section.text_cache_type):
        return {"latents": HostMemoryBudget(total), "text": HostMemoryBudget(total)}
    text = total // TEXT_SHARE
    return {"latents": HostMemoryBudget(total - text), "text": HostMemoryBudget(text)}
