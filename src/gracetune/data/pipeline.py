"""From the data sets of a run file to encoded batches, in the order that a run sees them."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from gracetune.cache.augmentation_epochs import (
    AugmentationEpochs,
    EncodingStopped,
    AugmentationEpochFolder,
    check_variants,
    augmentation_mode,
)
from gracetune.cache.batch_reader import BatchReader, MissingEntriesError, LiveSource, SampleTransforms
from gracetune.cache.encode import (
    SINGLE_RANK,
    ENCODE_BATCH_SIZE,
    EncodeItem,
    choose_tiling,
    fill_latents,
    fill_text,
    find_unreadable,
    serialize_encoder,
)
from gracetune.cache.keys import latent_key, text_key
from gracetune.cache.masks import fill_masks, mask_keys
from gracetune.cache.memory_tier import MemoryTier
from gracetune.cache.prefetch import (
    INITIAL_DEPTH,
    PrefetchDepth,
    DeviceTextCache,
    InlineBatches,
    PrefetchedBatches,
    cache_texts_on_device,
)
from gracetune.cache.prompt_keys import EMPTY_PROMPT, PromptNames, PromptEncoder
from gracetune.cache.stores import open_stores
from gracetune.data import buckets
from gracetune.data.augment import check_augmentable
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.images import choose_decoders
from gracetune.data.loader import BatchOrder, BucketGroup, Draw
from gracetune.data.prefetch import by_threads
from gracetune.data.requirements import check_fit, check_kind
from gracetune.data.sample import Batch
from gracetune.atomic_files import write_text
from gracetune.errors import DataError, RunFailedError
from gracetune.events.types import BatchesFed, Notice, StageProgress
from gracetune.train.step import derive_seed
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from gracetune.cache.batch_transfer import BatchTransfer
    from gracetune.cache.encode import Ranks, Tiling
    from gracetune.cache.prefetch import BatchIterator
    from gracetune.cache.store import Entry
    from gracetune.cache.stores import CacheStores
    from gracetune.config.schema import DatasetSection, RunFile
    from gracetune.data.loader import LoaderState
    from gracetune.data.sample import Sample
    from gracetune.data.source import Source
    from gracetune.events.types import Event
    from gracetune.models.family import Family

    Emit = Callable[[Event], None]
    import threading
    from collections.abc import Mapping

    from torch import Tensor

    from gracetune.cache.keys import CacheKey
    from gracetune.cache.masks import LatentGrid
    from gracetune.cache.store import Store
    from gracetune.data.sample import Shape


WEIGHTS = "weights of the loss"
"""They travel with the texts; none of those is called so."""
HOT_SHARE = 64
"""One part in so many of the device's memory is for text that stays there."""


@dataclass(frozen=True, slots=True)
class DataPipeline:
    """What the loop trains on and what it measures itself against."""

    order: BatchOrder
    train_samples: tuple[Sample, ...]
    held_out_draws: tuple[tuple[Draw, ...], ...]
    tiling: Tiling
    load: Callable[[Sequence[Draw]], Batch]
    will_need: Callable[[Sequence[Draw]], None]
    """Told of batches before they are loaded: what has to come from a disk starts to."""
    ahead: Callable[[Iterator[tuple[Batch, LoaderState]]], BatchIterator]
    """Brings batches before they are asked for, where that is of use."""
    fed: Callable[[int, BatchIterator], BatchesFed]
    """What that has cost, up to a step."""
    close: Callable[[], None]
    """Stop what is encoded in the background and let go of files; who goes on training begins it
    again."""


def build_pipeline(
    run: RunFile,
    family: Family,
    mover: BatchTransfer,
    folder: Path,
    emit: Emit,
    ranks: Ranks = SINGLE_RANK,
) -> DataPipeline:
    """Prepare every data set; all that can be wrong with one is found here, before training."""
    with ExitStack() as stack:
        stores = stack.enter_context(open_stores(run, folder, emit, mover.allocate_host, ranks))
        feed = _build_feed(run, family, mover, folder, emit, ranks, stores)
        stack.pop_all()
    return feed


def _build_feed(
    run: RunFile,
    family: Family,
    mover: BatchTransfer,
    folder: Path,
    emit: Emit,
    ranks: Ranks,
    stores: CacheStores,
) -> DataPipeline:
    ledger = CorruptionLog(emit, folder / "corruption.json")
    recipes = SampleTransforms({d.id: d for d in run.datasets}, run.seed, choose_decoders())
    emit(Notice(recipes.decoders.why))
    tiling = choose_tiling(run.cache_config.vae_tiling, family.name, family.tile(on=False))
    encode = serialize_encoder(family.encode, family.tile, tiling)
    preparation = Preparation(
        run, family, stores, recipes, tiling, encode, ledger, folder, ranks, emit
    )
    prepared = [prepare(preparation, index) for index in range(len(run.datasets))]
    groups = [group for one in prepared for group in one.groups]
    if ledger.entries:
        ledger.write(folder / "corruption.json")
    trained, held_out = split_holdout(groups, run.validation.holdout, run.seed)
    if not trained:
        raise DataError(
            f"validation.holdout is {run.validation.holdout}, which leaves no sample to train on. "
            "Lower it."
        )
    identity = family.identity()
    sources = {d.id: one.source for d, one in zip(run.datasets, prepared, strict=True)}
    texts = PromptEncoder(family, groups, sources, recipes)
    if family.takes_control and any(augmentation_mode(d) != "static" for d in run.datasets):
        text = "texts of edits show each control as the first epoch draws it, in every epoch"
        emit(Notice(f"{text}; augmentations_cache_mode: static draws both alike", level="warning"))
    fill = partial(fill_text, stores.text, texts.names, texts.encode, identity["text"], emit)
    fill(ranks)
    text_keys = [text_key(name, identity["text"]) for name in sorted(texts.names)]
    if lacks_after_warming(stores.text, text_keys, emit):
        fill(SINGLE_RANK)
    generations = generations_of(preparation, trained, sources)
    server = BatchReader(
        recipes,
        stores.latents,
        stores.text,
        generations,
        {d.id: _live(d, sources[d.id]) for d in run.datasets if augmentation_mode(d) == "disable_cache"},
        encode,
        identity,
        stores.hit_counts,
        latent_grid_of(family),
        tiling,
    )

    def found(names: Sequence[str]) -> list[Entry]:
        try:
            return server.read_texts(names)
        except MissingEntriesError:  # whoever encodes texts is still here
            fill(SINGLE_RANK)
            return server.read_texts(names)

    name_of = PromptNames(family, recipes)
    hot = _hot(run, name_of, trained, found, mover, emit)
    batch = run.train.batch_size
    order = BatchOrder(trained, batch, run.seed)
    largest = max(order.draws_by_size().values())
    if largest < batch:
        text = f"train.batch_size is {batch}; no size has more than {largest} samples in an epoch, "
        emit(Notice(f"{text}so no batch has more", level="warning"))
    return DataPipeline(
        order=order,
        train_samples=tuple(sample for group in trained for sample in group.samples),
        held_out_draws=tuple(_held_out_draws(held_out, batch)),
        tiling=tiling,
        load=_loader_of(family, name_of, server, mover, hot),
        will_need=server.will_need,
        ahead=_ahead_of(run, mover),
        fed=_counter_of(stores, mover, hot),
        close=lambda: _close(generations, stores),
    )


def _close(generations: AugmentationEpochs, stores: CacheStores) -> None:
    generations.close()
    stores.close()


def _live(section: DatasetSection, source: Source) -> LiveSource:
    workers = section.in_memory.num_workers
    return LiveSource(source, by_threads(workers, ENCODE_BATCH_SIZE, section.timeout_s))


def split_holdout(
    groups: Sequence[BucketGroup], share: float, seed: int
) -> tuple[list[BucketGroup], list[BucketGroup]]:
    """Hold out a share of the samples, chosen by content: adding files moves few of the others."""
    every = sorted(
        (sample for group in groups for sample in group.samples),
        key=lambda sample: derive_seed(seed, "hold out", sample.digest, sample.caption, sample.key),
    )
    held = set(every[: round(share * len(every))])
    return (
        keep_samples(groups, lambda sample: sample not in held),
        keep_samples(groups, lambda sample: sample in held),
    )


def _hot(
    run: RunFile,
    name_of: PromptNames,
    trained: Sequence[BucketGroup],
    texts_of: Callable[[Sequence[str]], Sequence[Entry]],
    mover: BatchTransfer,
    emit: Emit,
) -> DeviceTextCache:
    """The captions that are used most, as far as the device's budget goes."""
    if not mover.needs_copy:
        return DeviceTextCache({})
    counts: defaultdict[str, float] = defaultdict(float)
    for group in trained:
        for sample in group.samples:
            for epoch in name_of.epochs(sample):
                empty = name_of(EMPTY_PROMPT, sample, group.size, epoch)
                counts[empty] += group.repeats * group.caption_dropout
                counts[name_of(sample.caption, sample, group.size, epoch)] += group.repeats
    row = sorted(counts, key=lambda caption: (-counts[caption], caption))
    asked = run.cache_config.device_budget_gb
    budget = mover.device_nbytes // HOT_SHARE if asked is None else int(asked * GIB)
    hot = cache_texts_on_device(row if budget else (), texts_of, mover.device, budget)
    limit = format_bytes(budget)
    emit(Notice(f"{len(hot)} of {len(row)} texts stay on the device, within {limit}"))
    return hot


def _held_out_draws(groups: Sequence[BucketGroup], batch_size: int) -> list[tuple[Draw, ...]]:
    """Fixed batches, each of one size."""
    draws = [Draw(s, s.caption, group.size) for group in groups for s in group.samples]
    batches: list[tuple[Draw, ...]] = []
    for size in sorted({draw.size for draw in draws}):
        alike = [draw for draw in draws if draw.size == size]
        batches += [tuple(alike[i : i + batch_size]) for i in range(0, len(alike), batch_size)]
    return batches


def _loader_of(
    family: Family, name_of: PromptNames, server: BatchReader, mover: BatchTransfer, hot: DeviceTextCache
) -> Callable[[Sequence[Draw]], Batch]:
    """A function from draws to a batch on the device."""

    def load(draws: Sequence[Draw]) -> Batch:
        names = [name_of(draw.caption, draw.sample, draw.size, draw.epoch) for draw in draws]
        texts = hot.get_all(names) or server.read_texts(names)
        beside = family.stack_text(texts)
        weights = server.read_loss_weights(draws)
        if weights is not None:
            beside[WEIGHTS] = weights
        latents, moved = mover.to_device(partial(server.read_latents, draws), beside)
        samples = tuple(draw.sample for draw in draws)
        return Batch(latents, moved, samples, moved.pop(WEIGHTS, None))

    return load


def _ahead_of(
    run: RunFile, mover: BatchTransfer
) -> Callable[[Iterator[tuple[Batch, LoaderState]]], BatchIterator]:
    """Where the device has no memory of its own, nothing is brought ahead."""
    section = run.cache_config
    if not mover.needs_copy:
        return InlineBatches

    def ahead(batches: Iterator[tuple[Batch, LoaderState]]) -> BatchIterator:
        if section.prefetch_depth == "auto":
            depth = PrefetchDepth(INITIAL_DEPTH, int(section.prefetch_budget_gb * GIB))
        else:
            depth = PrefetchDepth(section.prefetch_depth, None)
        return PrefetchedBatches(batches, mover.new_stream(), depth)

    return ahead


def _counter_of(
    stores: CacheStores, mover: BatchTransfer, hot: DeviceTextCache
) -> Callable[[int, BatchIterator], BatchesFed]:
    return lambda step, batches: BatchesFed(
        step=step,
        batches=batches.counts.batches,
        hits=stores.hit_counts.hits,
        reads=stores.hit_counts.reads,
        hot=hot.found,
        waits=batches.counts.waits,
        nbytes=mover.nbytes_copied,
        waited_s=batches.counts.waited_s,
        hidden_s=batches.counts.hidden_s,
        depth=batches.depth.batches,
    )


# ------------------------------------------------------------------------------------------
# One data set after the other: opened, bucketed, and encoded or found readable.


GENERATIONS = "generations"
"""In the run's folder: what `refresh_each_epoch` encodes anew."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What preparing a data set needs, whichever it is."""

    run: RunFile
    family: Family
    stores: CacheStores
    recipes: SampleTransforms
    tiling: Tiling
    encode: Callable[[Tensor], Tensor]
    ledger: CorruptionLog
    folder: Path
    ranks: Ranks
    emit: Emit


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set whose pictures are encoded, or known to be readable."""

    groups: list[BucketGroup]
    source: Source


def prepare(prep: Preparation, index: int) -> Prepared:
    """One data set: open, bucket, encode, and leave out what turned out to be unreadable."""
    section = prep.run.datasets[index]
    check_kind(section, index, prep.family)
    check_augmentable(section, index)
    check_variants(section, index)
    step = section.bucket_step or prep.family.pixel_step
    check_fit(section, index, step, prep.family)
    opened = open_dataset(section, index, prep.emit, prep.ledger, prep.folder / "staged")
    found = len(opened.samples) + sum(entry.dataset == section.id for entry in prep.ledger.entries)
    plan = buckets.assign(opened.samples, section, step)
    groups = [
        BucketGroup(samples, section.repeats, section.caption_dropout, size, section.weight)
        for size, samples in plan.buckets.items()
    ]
    if augmentation_mode(section) == "disable_cache":
        prefetch = by_threads(section.in_memory.num_workers, ENCODE_BATCH_SIZE, section.timeout_s)
        pictures = _pictures(groups, opened.source, prep, 0)
        unreadable = find_unreadable(pictures, prep.emit, prep.recipes.decoders, prefetch)
    else:
        pictures = [
            picture
            for epoch in range(section.variants)
            for picture in _pictures(groups, opened.source, prep, epoch)
        ]
        unreadable = _encode(prep, index, prep.stores.latents, pictures, prep.encode, prep.emit)
    for sample, reason in unreadable:
        prep.ledger.record(section.id, sample.key, reason)
    prep.ledger.check(section.id, found, section.max_corruption_rate)
    lost = {sample for sample, _ in unreadable}
    prep.emit(Notice(f"data set {section.id!r}:\n{buckets.report(plan)}"))
    write_text(prep.folder / f"buckets-{index}.json", json.dumps(buckets.as_json(plan), indent=2))
    kept = keep_samples(groups, lambda sample: sample not in lost)
    if not kept:
        raise DataError(
            f"datasets[{index}] ({section.id!r}): every picture was dropped; see above."
        )
    return Prepared(kept, opened.source)


def _pictures(
    groups: Sequence[BucketGroup], source: Source, prep: Preparation, epoch: int
) -> list[EncodeItem]:
    tiled, recipe = prep.tiling.applies_to, prep.recipes
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
    emit: Emit,
    what: str = "cache",
) -> list[tuple[Sample, str]]:
    """Fill a store, then have its entries in memory; the samples that cannot be read."""
    section, encoder = prep.run.datasets[index], prep.family.identity()["latents"]
    prefetch = by_threads(section.in_memory.num_workers, ENCODE_BATCH_SIZE, section.timeout_s)
    ranks = replace(prep.ranks, reports=prep.ranks.reports / f"{what}-{index}")
    decoders, cells = prep.recipes.decoders, latent_grid_of(prep.family)

    def latents(some: Sequence[EncodeItem], ranks: Ranks) -> list[tuple[Sample, str]]:
        return fill_latents(store, some, encode, encoder, emit, decoders, prefetch, ranks)

    def masks(some: Sequence[EncodeItem], ranks: Ranks) -> list[tuple[Sample, str]]:
        return fill_masks(store, some, cells, emit, decoders, prefetch, ranks)

    def latent_keys(some: Sequence[EncodeItem]) -> list[CacheKey]:
        return [latent_key(p.sample, p.size, encoder, p.transform, p.tiled) for p in some]

    bad = _filled(store, pictures, latents, latent_keys, ranks, emit)
    if section.mask_data_dir is not None:
        left = _without(pictures, bad)
        bad += _filled(store, left, masks, lambda some: mask_keys(some, cells), ranks, emit)
    return bad


def _filled(
    store: Store,
    pictures: Sequence[EncodeItem],
    fill: Callable[[Sequence[EncodeItem], Ranks], list[tuple[Sample, str]]],
    keys_of: Callable[[Sequence[EncodeItem]], list[CacheKey]],
    ranks: Ranks,
    emit: Emit,
) -> list[tuple[Sample, str]]:
    """Make what is missing, and again what turns out to be damaged; the samples left out.

    Each rank mends what it finds itself: they need not find the same. So none of them alone may
    leave a sample out: its entry stays missing, and the next start finds that for all.
    """
    bad = fill(pictures, ranks)
    left = _without(pictures, bad)
    if lacks_after_warming(store, keys_of(left), emit):
        again = fill(left, SINGLE_RANK)
        bad += again if ranks.world_size == 1 else []
    return bad


def _without(pictures: Sequence[EncodeItem], bad: Sequence[tuple[Sample, str]]) -> list[EncodeItem]:
    lost = {sample for sample, _ in bad}
    return [picture for picture in pictures if picture.sample not in lost]


def latent_grid_of(family: Family) -> LatentGrid:
    """Rows and columns of a family's latents, which are their last two dimensions."""

    def cells(size: Shape) -> tuple[int, int]:
        *_, rows, columns = family.latent_shape(*size)
        return rows, columns

    return cells


def lacks_after_warming(store: Store, keys: Sequence[str], emit: Emit) -> bool:
    """Have entries in memory, where the store keeps them there; whether some were damaged."""
    lost = store.warm(keys) if isinstance(store, MemoryTier) else []
    if lost:
        emit(Notice(f"{len(lost)} entries of the cache were damaged or gone: encoding them again"))
    return bool(lost)


def generations_of(
    prep: Preparation, trained: Sequence[BucketGroup], sources: Mapping[str, Source]
) -> AugmentationEpochs:
    """The refreshed data sets: where their generations are, and how one is made."""
    own = AugmentationEpochFolder(prep.folder / GENERATIONS, prep.ranks)

    def fill(store: Store, number: int, stopping: threading.Event) -> None:
        def encode(pixels: Tensor) -> Tensor:
            if stopping.is_set():
                raise EncodingStopped
            return prep.encode(pixels)

        def emit(event: Event) -> None:
            if isinstance(event, StageProgress):
                event = replace(event, stage=f"encoding generation {number}")
            prep.emit(event)

        for index, section in enumerate(prep.run.datasets):
            if augmentation_mode(section) == "refresh_each_epoch":
                groups = [group for group in trained if group.samples[0].dataset == section.id]
                pictures = _pictures(groups, sources[section.id], prep, number)
                bad = _encode(prep, index, store, pictures, encode, emit, f"generation-{number}")
                if bad:
                    raise RunFailedError(
                        f"data set {section.id!r}: {bad[0][0].key} was readable when the run "
                        f"began and is not now: {bad[0][1]}. Mend it, and start again to resume."
                    )

    return AugmentationEpochs(
        first=prep.stores.latents,
        open_store=lambda number: prep.stores.open_latents(
            f"latents of generation {number}", own.path(number)
        ),
        fill=fill,
        entered=own.entered if prep.stores.latents_on_disk else lambda _: None,
        emit=prep.emit,
    )


def keep_samples(groups: Sequence[BucketGroup], keep: Callable[[Sample], bool]) -> list[BucketGroup]:
    """Groups with these samples alone; none that is empty."""
    chosen = [
        replace(group, samples=tuple(s for s in group.samples if keep(s))) for group in groups
    ]
    return [group for group in chosen if group.samples]
