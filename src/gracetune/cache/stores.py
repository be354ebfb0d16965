"""The stores of a run, as `cache_config` says: which memory, how much of it, which folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

from gracetune.cache.encode import SINGLE_RANK
from gracetune.cache.memory_tier import MemoryTier, HostMemoryBudget, HitCounts, allocate_page_aligned
from gracetune.cache.shard_store import ShardStore
from gracetune.data.gather import MissingGather, find_gather
from gracetune.events.types import Notice
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gracetune.cache.encode import Ranks
    from gracetune.cache.store import Store
    from gracetune.config.schema import CacheSection, RunFile
    from gracetune.data.gather import Gather
    from gracetune.events.types import Event

    Emit = Callable[[Event], None]

TEXT_SHARE = 4
"""One part in so many of the host budget is for text, where both kinds are in memory."""


@dataclass(frozen=True, slots=True)
class CacheStores:
    """Where encoded pictures and captions are."""

    latents: Store
    text: Store
    open_latents: Callable[[str, Path], Store]
    """Another store of latents, within the same budget: its name, and the folder it may use."""
    latents_on_disk: bool
    """Whether latents are in files at all."""
    hit_counts: HitCounts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Seal what is being written and let go of files; who asks again opens them again."""
        self.latents.close()
        self.text.close()


def open_stores(
    run: RunFile,
    folder: Path,
    emit: Emit,
    device_reads: Callable[[int], Tensor] = allocate_page_aligned,
    ranks: Ranks = SINGLE_RANK,
    find: Callable[[], Gather | MissingGather] = find_gather,
) -> CacheStores:
    """A store a kind; `device_reads` allocates host memory that the device copies from, and `find`
    looks for the helper that copies batches."""
    section = run.cache_config
    root = Path(section.cache_dir) if section.cache_dir else folder / "cache"
    persistent = section.persistent_cache or any(d.cache_latents_to_disk for d in run.datasets)
    if ranks.world_size > 1 and not persistent:
        persistent = True
        emit(Notice(f"{ranks.world_size} ranks share what they encode: the cache is kept in {root}"))
    kinds = {"latents": section.vae_cache_type, "text": section.text_cache_type}
    if section.cache_dir and not persistent and "disk" not in kinds.values():
        text = f"cache_config.cache_dir {section.cache_dir} is not used: the cache is in memory"
        emit(Notice(f"{text}, and not kept. Set cache_config.persistent_cache: true to keep it."))
    budgets = _budgets(section, ranks.world_size)
    hit_counts = HitCounts()
    gather = find()

    def open_one(kind: str, name: str, at: Path) -> Store:
        files = ShardStore(at, emit) if persistent or kinds[kind] == "disk" else None
        if files is not None and kinds[kind] == "disk":
            return files
        memory = device_reads if kinds[kind] == "unified_memory" else allocate_page_aligned
        return MemoryTier(name, budgets[kind], files, emit, memory, hit_counts, lambda: gather)

    for kind, where in kinds.items():
        if where == "unified_memory":
            limit = format_bytes(budgets[kind].nbytes)
            text = f"cache type unified_memory: {kind} live in host memory, up to {limit}, and are"
            emit(Notice(f"{text} moved before use"))
    if isinstance(gather, MissingGather) and kinds["latents"] != "disk":
        text = f"batches of latents are put together by torch alone: {gather.reason}"
        emit(Notice(text, fallback=True))
    return CacheStores(
        latents=open_one("latents", "latents", root / "latents"),
        text=open_one("text", "texts", root / "text"),
        open_latents=lambda name, at: open_one("latents", name, at),
        latents_on_disk=persistent or section.vae_cache_type == "disk",
        hit_counts=hit_counts,
    )


def _budgets(section: CacheSection, num_ranks: int) -> dict[str, HostMemoryBudget]:
    """By kind; a kind on disk needs none. All ranks may be on this machine."""
    total = psutil.virtual_memory().available * 3 // 4 // num_ranks
    if section.host_budget_gb is not None:
        total = int(section.host_budget_gb * GIB)
    if "disk" in (section.vae_cache_type, section.text_cache_type):
        return {"latents": HostMemoryBudget(total), "text": HostMemoryBudget(total)}
    text = total // TEXT_SHARE
    return {"latents": HostMemoryBudget(total - text), "text": HostMemoryBudget(text)}
