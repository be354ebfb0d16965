"""From the data sets of a run file to encoded batches, in the order that a run sees them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gracetune.cache.ahead import FIRST_DEPTH, Depth, InlineBatches, PrefetchedBatches
from gracetune.cache.fill import BATCH, fill_text
from gracetune.cache.generations import AugmentationEpochs, mode_of
from gracetune.cache.keys import text_key
from gracetune.cache.ranks import ALONE
from gracetune.cache.serve import BatchReader, EntriesGoneError, Live, Recipes
from gracetune.cache.staging import HotTexts, keep_hot
from gracetune.cache.tiling import choose_tiling, taking_turns
from gracetune.data.corruption import CorruptionLog
from gracetune.data.decoders import choose_decoders
from gracetune.data.loader import BatchOrder, BucketGroup, Draw
from gracetune.data.prefetch import by_threads
from gracetune.data.sample import Batch
from gracetune.errors import DataError
from gracetune.events.types import BatchesFed, Notice
from gracetune.train.draws import seed_of
from gracetune.train.prepare import (
    Preparation,
    cells_of,
    generations_of,
    lacks_after_warming,
    only,
    prepare,
)
from gracetune.train.stores import open_stores
from gracetune.train.texts import EMPTY, Names, Texts
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from gracetune.cache.ahead import Batches
    from gracetune.cache.ranks import Ranks
    from gracetune.cache.store import Entry
    from gracetune.cache.tiling import Tiling
    from gracetune.config.schema import DatasetSection, RunFile
    from gracetune.data.loader import LoaderState
    from gracetune.data.sample import Sample
    from gracetune.data.source import Source
    from gracetune.events.types import Event
    from gracetune.models.family import Family
    from gracetune.train.mover import BatchTransfer
    from gracetune.train.stores import Stores

    Tell = Callable[[Event], None]

WEIGHTS = "weights of the loss"
"""They travel with the texts; none of those is called so."""
HOT_SHARE = 64
"""One part in so many of the device's memory is for text that stays there."""


@dataclass(frozen=True, slots=True)
class DataPipeline:
    """What the loop trains on and what it measures itself against."""

    order: BatchOrder
    trained: tuple[Sample, ...]
    held_out: tuple[tuple[Draw, ...], ...]
    tiling: Tiling
    load: Callable[[Sequence[Draw]], Batch]
    will_need: Callable[[Sequence[Draw]], None]
    """Told of batches before they are loaded: what has to come from a disk starts to."""
    ahead: Callable[[Iterator[tuple[Batch, LoaderState]]], Batches]
    """Brings batches before they are asked for, where that is of use."""
    fed: Callable[[int, Batches], BatchesFed]
    """What that has cost, up to a step."""
    close: Callable[[], None]
    """Stop what is encoded in the background and let go of files; who goes on training begins it
    again."""


def build_pipeline(
    run: RunFile,
    family: Family,
    mover: BatchTransfer,
    folder: Path,
    tell: Tell,
    ranks: Ranks = ALONE,
) -> DataPipeline:
    """Prepare every data set; all that can be wrong with one is found here, before training."""
    with ExitStack() as stack:
        stores = stack.enter_context(open_stores(run, folder, tell, mover.host_memory, ranks))
        feed = _build_feed(run, family, mover, folder, tell, ranks, stores)
        stack.pop_all()
    return feed


def _build_feed(
    run: RunFile,
    family: Family,
    mover: BatchTransfer,
    folder: Path,
    tell: Tell,
    ranks: Ranks,
    stores: Stores,
) -> DataPipeline:
    ledger = CorruptionLog(tell, folder / "corruption.json")
    recipes = Recipes({d.id: d for d in run.datasets}, run.seed, choose_decoders())
    tell(Notice(recipes.decoders.why))
    tiling = choose_tiling(run.cache_config.vae_tiling, family.name, family.tile(on=False))
    encode = taking_turns(family.encode, family.tile, tiling)
    preparation = Preparation(
        run, family, stores, recipes, tiling, encode, ledger, folder, ranks, tell
    )
    prepared = [prepare(preparation, index) for index in range(len(run.datasets))]
    groups = [group for one in prepared for group in one.groups]
    if ledger.entries:
        ledger.write(folder / "corruption.json")
    trained, held_out = split(groups, run.validation.holdout, run.seed)
    if not trained:
        raise DataError(
            f"validation.holdout is {run.validation.holdout}, which leaves no sample to train on. "
            "Lower it."
        )
    identity = family.identity()
    sources = {d.id: one.source for d, one in zip(run.datasets, prepared, strict=True)}
    texts = Texts(family, groups, sources, recipes)
    if family.takes_control and any(mode_of(d) != "static" for d in run.datasets):
        text = "texts of edits show each control as the first epoch draws it, in every epoch"
        tell(Notice(f"{text}; augmentations_cache_mode: static draws both alike", level="warning"))
    fill = partial(fill_text, stores.text, texts.names, texts.encode, identity["text"], tell)
    fill(ranks)
    text_keys = [text_key(name, identity["text"]) for name in sorted(texts.names)]
    if lacks_after_warming(stores.text, text_keys, tell):
        fill(ALONE)
    generations = generations_of(preparation, trained, sources)
    server = BatchReader(
        recipes,
        stores.latents,
        stores.text,
        generations,
        {d.id: _live(d, sources[d.id]) for d in run.datasets if mode_of(d) == "disable_cache"},
        encode,
        identity,
        stores.tally,
        cells_of(family),
        tiling,
    )

    def found(names: Sequence[str]) -> list[Entry]:
        try:
            return server.texts_of(names)
        except EntriesGoneError:  # whoever encodes texts is still here
            fill(ALONE)
            return server.texts_of(names)

    name_of = Names(family, recipes)
    hot = _hot(run, name_of, trained, found, mover, tell)
    batch = run.train.batch_size
    order = BatchOrder(trained, batch, run.seed)
    largest = max(order.draws_by_size().values())
    if largest < batch:
        text = f"train.batch_size is {batch}; no size has more than {largest} samples in an epoch, "
        tell(Notice(f"{text}so no batch has more", level="warning"))
    return DataPipeline(
        order=order,
        trained=tuple(sample for group in trained for sample in group.samples),
        held_out=tuple(_held_out_draws(held_out, batch)),
        tiling=tiling,
        load=_loader_of(family, name_of, server, mover, hot),
        will_need=server.will_need,
        ahead=_ahead_of(run, mover),
        fed=_counter_of(stores, mover, hot),
        close=lambda: _close(generations, stores),
    )


def _close(generations: AugmentationEpochs, stores: Stores) -> None:
    generations.close()
    stores.close()


def _live(section: DatasetSection, source: Source) -> Live:
    workers = section.in_memory.num_workers
    return Live(source, by_threads(workers, BATCH, section.timeout_s))


def split(
    groups: Sequence[BucketGroup], share: float, seed: int
) -> tuple[list[BucketGroup], list[BucketGroup]]:
    """Hold out a share of the samples, chosen by content: adding files moves few of the others."""
    every = sorted(
        (sample for group in groups for sample in group.samples),
        key=lambda sample: seed_of(seed, "hold out", sample.digest, sample.caption, sample.key),
    )
    held = set(every[: round(share * len(every))])
    return (
        only(groups, lambda sample: sample not in held),
        only(groups, lambda sample: sample in held),
    )


def _hot(
    run: RunFile,
    name_of: Names,
    trained: Sequence[BucketGroup],
    texts_of: Callable[[Sequence[str]], Sequence[Entry]],
    mover: BatchTransfer,
    tell: Tell,
) -> HotTexts:
    """The captions that are used most, as far as the device's budget goes."""
    if not mover.moves:
        return HotTexts({})
    counts: defaultdict[str, float] = defaultdict(float)
    for group in trained:
        for sample in group.samples:
            for epoch in name_of.epochs(sample):
                empty = name_of(EMPTY, sample, group.size, epoch)
                counts[empty] += group.repeats * group.caption_dropout
                counts[name_of(sample.caption, sample, group.size, epoch)] += group.repeats
    row = sorted(counts, key=lambda caption: (-counts[caption], caption))
    asked = run.cache_config.device_budget_gb
    budget = mover.device_nbytes // HOT_SHARE if asked is None else int(asked * GIB)
    hot = keep_hot(row if budget else (), texts_of, mover.device, budget)
    limit = format_bytes(budget)
    tell(Notice(f"{len(hot)} of {len(row)} texts stay on the device, within {limit}"))
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
    family: Family, name_of: Names, server: BatchReader, mover: BatchTransfer, hot: HotTexts
) -> Callable[[Sequence[Draw]], Batch]:
    """A function from draws to a batch on the device."""

    def load(draws: Sequence[Draw]) -> Batch:
        names = [name_of(draw.caption, draw.sample, draw.size, draw.epoch) for draw in draws]
        texts = hot.all_of(names) or server.texts_of(names)
        beside = family.stack_text(texts)
        weights = server.weights_of(draws)
        if weights is not None:
            beside[WEIGHTS] = weights
        latents, moved = mover.bring(partial(server.latents_of, draws), beside)
        samples = tuple(draw.sample for draw in draws)
        return Batch(latents, moved, samples, moved.pop(WEIGHTS, None))

    return load


def _ahead_of(
    run: RunFile, mover: BatchTransfer
) -> Callable[[Iterator[tuple[Batch, LoaderState]]], Batches]:
    """Where the device has no memory of its own, nothing is brought ahead."""
    section = run.cache_config
    if not mover.moves:
        return InlineBatches

    def ahead(batches: Iterator[tuple[Batch, LoaderState]]) -> Batches:
        if section.prefetch_depth == "auto":
            depth = Depth(FIRST_DEPTH, int(section.prefetch_budget_gb * GIB))
        else:
            depth = Depth(section.prefetch_depth, None)
        return PrefetchedBatches(batches, mover.lane(), depth)

    return ahead


def _counter_of(
    stores: Stores, mover: BatchTransfer, hot: HotTexts
) -> Callable[[int, Batches], BatchesFed]:
    return lambda step, batches: BatchesFed(
        step=step,
        batches=batches.counts.batches,
        hits=stores.tally.hits,
        reads=stores.tally.reads,
        hot=hot.found,
        waits=batches.counts.waits,
        nbytes=mover.nbytes_moved,
        waited_s=batches.counts.waited_s,
        hidden_s=batches.counts.hidden_s,
        depth=batches.depth.batches,
    )
