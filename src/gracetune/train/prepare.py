"""One data set after the other: opened, bucketed, and encoded or found readable."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.cache.arena import ArenaStore
from gracetune.cache.fill import BATCH, EncodeItem, fill_latents, find_unreadable
from gracetune.cache.generations import (
    AugmentationEpochs,
    FillingStopped,
    GenerationFolder,
    demand_mode,
    mode_of,
)
from gracetune.cache.keys import latent_key
from gracetune.cache.masks import fill_masks, mask_keys
from gracetune.cache.ranks import ALONE
from gracetune.data import buckets
from gracetune.data.dataset import open_dataset
from gracetune.data.loader import BucketGroup
from gracetune.data.prefetch import by_threads
from gracetune.data.recipe import demand_augmentable
from gracetune.durable import write_text
from gracetune.errors import DataError, RunFailedError
from gracetune.events.types import Notice, StageProgress
from gracetune.train.demands import demand_fit, demand_kind

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.keys import CacheKey
    from gracetune.cache.masks import CellsOf
    from gracetune.cache.ranks import Ranks
    from gracetune.cache.serve import Recipes
    from gracetune.cache.store import Store
    from gracetune.cache.tiling import Tiling
    from gracetune.config.schema import RunFile
    from gracetune.data.corruption import CorruptionLog
    from gracetune.data.sample import Sample, Shape
    from gracetune.data.source import Source
    from gracetune.events.types import Event
    from gracetune.models.family import Family
    from gracetune.train.stores import Stores

    Tell = Callable[[Event], None]


GENERATIONS = "generations"
"""In the run's folder: what `refresh_each_epoch` encodes anew."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What preparing a data set needs, whichever it is."""

    run: RunFile
    family: Family
    stores: Stores
    recipes: Recipes
    tiling: Tiling
    encode: Callable[[Tensor], Tensor]
    ledger: CorruptionLog
    folder: Path
    ranks: Ranks
    tell: Tell


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set whose pictures are encoded, or known to be readable."""

    groups: list[BucketGroup]
    source: Source


def prepare(prep: Preparation, index: int) -> Prepared:
    """One data set: open, bucket, encode, and leave out what turned out to be unreadable."""
    section = prep.run.datasets[index]
    demand_kind(section, index, prep.family)
    demand_augmentable(section, index)
    demand_mode(section, index)
    step = section.bucket_step or prep.family.pixel_step
    demand_fit(section, index, step, prep.family)
    opened = open_dataset(section, index, prep.tell, prep.ledger, prep.folder / "staged")
    found = len(opened.samples) + sum(entry.dataset == section.id for entry in prep.ledger.entries)
    plan = buckets.assign(opened.samples, section, step)
    groups = [
        BucketGroup(samples, section.repeats, section.caption_dropout, size, section.weight)
        for size, samples in plan.buckets.items()
    ]
    if mode_of(section) == "disable_cache":
        prefetch = by_threads(section.in_memory.num_workers, BATCH, section.timeout_s)
        pictures = _pictures(groups, opened.source, prep, 0)
        unreadable = find_unreadable(pictures, prep.tell, prep.recipes.decoders, prefetch)
    else:
        pictures = [
            picture
            for epoch in range(section.variants)
            for picture in _pictures(groups, opened.source, prep, epoch)
        ]
        unreadable = _encode(prep, index, prep.stores.latents, pictures, prep.encode, prep.tell)
    for sample, reason in unreadable:
        prep.ledger.record(section.id, sample.key, reason)
    prep.ledger.check(section.id, found, section.max_corruption_rate)
    lost = {sample for sample, _ in unreadable}
    prep.tell(Notice(f"data set {section.id!r}:\n{buckets.report(plan)}"))
    write_text(prep.folder / f"buckets-{index}.json", json.dumps(buckets.as_json(plan), indent=2))
    kept = only(groups, lambda sample: sample not in lost)
    if not kept:
        raise DataError(
            f"datasets[{index}] ({section.id!r}): every picture was dropped; see above."
        )
    return Prepared(kept, opened.source)


def _pictures(
    groups: Sequence[BucketGroup], source: Source, prep: Preparation, epoch: int
) -> list[EncodeItem]:
    tiled, recipe = prep.tiling.of, prep.recipes
    return [
        EncodeItem(s, group.size, source, recipe(s, epoch), tiled(group.size, s.kind))
        for group in groups
        for s in group.samples
    ]


def _encode(
    prep: Preparation,
    index: int,
    store: Store,
    pictures: Sequence[EncodeItem],
    encode: Callable[[Tensor], Tensor],
    tell: Tell,
    what: str = "cache",
) -> list[tuple[Sample, str]]:
    """Fill a store, then have its entries in memory; the samples that cannot be read."""
    section, encoder = prep.run.datasets[index], prep.family.identity()["latents"]
    prefetch = by_threads(section.in_memory.num_workers, BATCH, section.timeout_s)
    ranks = replace(prep.ranks, reports=prep.ranks.reports / f"{what}-{index}")
    decoders, cells = prep.recipes.decoders, cells_of(prep.family)

    def latents(some: Sequence[EncodeItem], ranks: Ranks) -> list[tuple[Sample, str]]:
        return fill_latents(store, some, encode, encoder, tell, decoders, prefetch, ranks)

    def masks(some: Sequence[EncodeItem], ranks: Ranks) -> list[tuple[Sample, str]]:
        return fill_masks(store, some, cells, tell, decoders, prefetch, ranks)

    def latent_keys(some: Sequence[EncodeItem]) -> list[CacheKey]:
        return [latent_key(p.sample, p.size, encoder, p.recipe, p.tiled) for p in some]

    bad = _filled(store, pictures, latents, latent_keys, ranks, tell)
    if section.mask_data_dir is not None:
        left = _without(pictures, bad)
        bad += _filled(store, left, masks, lambda some: mask_keys(some, cells), ranks, tell)
    return bad


def _filled(
    store: Store,
    pictures: Sequence[EncodeItem],
    fill: Callable[[Sequence[EncodeItem], Ranks], list[tuple[Sample, str]]],
    keys_of: Callable[[Sequence[EncodeItem]], list[CacheKey]],
    ranks: Ranks,
    tell: Tell,
) -> list[tuple[Sample, str]]:
    """Make what is missing, and again what turns out to be damaged; the samples left out.

    Each rank mends what it finds itself: they need not find the same. So none of them alone may
    leave a sample out: its entry stays missing, and the next start finds that for all.
    """
    bad = fill(pictures, ranks)
    left = _without(pictures, bad)
    if lacks_after_warming(store, keys_of(left), tell):
        again = fill(left, ALONE)
        bad += again if ranks.world == 1 else []
    return bad


def _without(pictures: Sequence[EncodeItem], bad: Sequence[tuple[Sample, str]]) -> list[EncodeItem]:
    lost = {sample for sample, _ in bad}
    return [picture for picture in pictures if picture.sample not in lost]


def cells_of(family: Family) -> CellsOf:
    """Rows and columns of a family's latents, which are their last two dimensions."""

    def cells(size: Shape) -> tuple[int, int]:
        *_, rows, columns = family.latent_shape(*size)
        return rows, columns

    return cells


def lacks_after_warming(store: Store, keys: Sequence[str], tell: Tell) -> bool:
    """Have entries in memory, where the store keeps them there; whether some were damaged."""
    lost = store.warm(keys) if isinstance(store, ArenaStore) else []
    if lost:
        tell(Notice(f"{len(lost)} entries of the cache were damaged or gone: encoding them again"))
    return bool(lost)


def generations_of(
    prep: Preparation, trained: Sequence[BucketGroup], sources: Mapping[str, Source]
) -> AugmentationEpochs:
    """The refreshed data sets: where their generations are, and how one is made."""
    own = GenerationFolder(prep.folder / GENERATIONS, prep.ranks)

    def fill(store: Store, number: int, stopping: threading.Event) -> None:
        def encode(pixels: Tensor) -> Tensor:
            if stopping.is_set():
                raise FillingStopped
            return prep.encode(pixels)

        def tell(event: Event) -> None:
            if isinstance(event, StageProgress):
                event = replace(event, stage=f"encoding generation {number}")
            prep.tell(event)

        for index, section in enumerate(prep.run.datasets):
            if mode_of(section) == "refresh_each_epoch":
                groups = [group for group in trained if group.samples[0].dataset == section.id]
                pictures = _pictures(groups, sources[section.id], prep, number)
                bad = _encode(prep, index, store, pictures, encode, tell, f"generation-{number}")
                if bad:
                    raise RunFailedError(
                        f"data set {section.id!r}: {bad[0][0].key} was readable when the run "
                        f"began and is not now: {bad[0][1]}. Mend it, and start again to resume."
                    )

    return AugmentationEpochs(
        first=prep.stores.latents,
        open_store=lambda number: prep.stores.latents_in(
            f"latents of generation {number}", own.path(number)
        ),
        fill=fill,
        entered=own.entered if prep.stores.in_files else lambda _: None,
        tell=prep.tell,
    )


def only(groups: Sequence[BucketGroup], keep: Callable[[Sample], bool]) -> list[BucketGroup]:
    """Groups with these samples alone; none that is empty."""
    chosen = [
        replace(group, samples=tuple(s for s in group.samples if keep(s))) for group in groups
    ]
    return [group for group in chosen if group.samples]
