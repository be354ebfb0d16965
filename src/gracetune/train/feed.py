"""From the data sets of a run file to encoded batches, in the order that a run sees them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gracetune.cache.ahead import FIRST_DEPTH, Ahead, Depth, Inline
from gracetune.cache.arena import ArenaStore, Budget, Tally, pageable
from gracetune.cache.fill import BATCH, Picture, fill_latents, fill_text, find_unreadable
from gracetune.cache.generations import (
    FillingStopped,
    GenerationFolder,
    Generations,
    demand_mode,
    mode_of,
)
from gracetune.cache.keys import latent_key, text_key
from gracetune.cache.ranks import ALONE
from gracetune.cache.serve import Recipes, Server
from gracetune.cache.staging import HotTexts, keep_hot
from gracetune.cache.store import ShardStore
from gracetune.data import buckets
from gracetune.data.corruption import CorruptionLedger
from gracetune.data.dataset import open_dataset
from gracetune.data.decoders import choose_decoders
from gracetune.data.loader import BatchOrder, Draw, Group
from gracetune.data.prefetch import by_threads
from gracetune.data.sample import Batch
from gracetune.durable import write_text
from gracetune.errors import ConfigError, DataError, RunFailedError
from gracetune.events.types import BatchesFed, Notice, StageProgress
from gracetune.train.draws import seed_of
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.ahead import Batches
    from gracetune.cache.ranks import Ranks
    from gracetune.cache.store import Store
    from gracetune.config.schema import CacheSection, DatasetSection, RunFile
    from gracetune.data.loader import LoaderState
    from gracetune.data.sample import Sample
    from gracetune.data.source import Source
    from gracetune.events.types import Event
    from gracetune.models.family import Family
    from gracetune.train.mover import Mover

    Tell = Callable[[Event], None]

EMPTY = ""
"""The caption of dropped captions and of guidance."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What the loop trains on and what it measures itself against."""

    order: BatchOrder
    trained: tuple[Sample, ...]
    held_out: tuple[tuple[Draw, ...], ...]
    load: Callable[[Sequence[Draw]], Batch]


@dataclass(frozen=True, slots=True)
class Stores:
    """Where encoded pictures and captions are."""

    latents: Store
    text: Store


def build_feed(run: RunFile, family: Family, mover: Mover, folder: Path, tell: Tell) -> Feed:
    """Prepare every data set; all that can be wrong with one is found here, before training."""
    stores = open_stores(run, folder, tell)
    ledger = CorruptionLedger(tell, folder / "corruption.json")
    decoders = choose_decoders()
    tell(Notice(decoders.why))
    groups: list[Group] = []
    for index in range(len(run.datasets)):
        groups += _prepare(run, index, family, stores, ledger, tell, folder, decoders)
    if ledger.entries:
        ledger.write(folder / "corruption.json")
    trained, held_out = split(groups, run.validation.holdout, run.seed)
    if not trained:
        raise DataError(
            f"validation.holdout is {run.validation.holdout}, which leaves no sample to train on. "
            "Lower it."
        )
    captions = {sample.caption for group in groups for sample in group.samples}
    fill_text(stores.text, captions | {EMPTY}, family.encode_text, family.identity()["text"], tell)
    batch = run.train.batch_size
    return Feed(
        order=BatchOrder(trained, batch, run.seed),
        trained=tuple(sample for group in trained for sample in group.samples),
        held_out=tuple(_held_out_draws(held_out, batch)),
        load=_loader_of(family, stores, mover, recipes(run, decoders)),
    )


def open_stores(run: RunFile, folder: Path, tell: Tell) -> Stores:
    """A store a kind, as `cache_config` says."""
    section = run.cache_config
    root = Path(section.cache_dir) if section.cache_dir else folder / "cache"
    persistent = section.persistent_cache or any(d.cache_latents_to_disk for d in run.datasets)
    if "unified_memory" in (section.vae_cache_type, section.text_cache_type):
        tell(Notice("cache type unified_memory: entries live in host memory, moved before use"))

    def store(kind: str, cache_type: str) -> Store:
        if persistent or cache_type == "disk":
            return ShardStore(root / kind, tell)
        return MemoryStore()

    return Stores(store("latents", section.vae_cache_type), store("text", section.text_cache_type))


def split(groups: Sequence[Group], share: float, seed: int) -> tuple[list[Group], list[Group]]:
    """Hold out a share of the samples, chosen by content: adding files moves few of the others."""
    every = sorted(
        (sample for group in groups for sample in group.samples),
        key=lambda sample: seed_of(seed, "hold out", sample.digest, sample.caption, sample.key),
    )
    held = set(every[: round(share * len(every))])
    return (
        _only(groups, lambda sample: sample not in held),
        _only(groups, lambda sample: sample in held),
    )


def recipes(run: RunFile, decoders: Decoders) -> Callable[[Sample], Recipe]:
    """How each sample becomes pixels, as its own data set says."""
    sections = {section.id: section for section in run.datasets}
    return lambda sample: recipe_of(
        sections[sample.dataset], sample, run.seed, lanczos=decoders.lanczos
    )


def _only(groups: Sequence[Group], keep: Callable[[Sample], bool]) -> list[Group]:
    chosen = [
        replace(group, samples=tuple(s for s in group.samples if keep(s))) for group in groups
    ]
    return [group for group in chosen if group.samples]


def _prepare(
    run: RunFile,
    index: int,
    family: Family,
    stores: Stores,
    ledger: CorruptionLedger,
    tell: Tell,
    folder: Path,
    decoders: Decoders,
) -> list[Group]:
    """One data set: open, bucket, encode, and leave out what turned out to be unreadable."""
    section, recipe = run.datasets[index], recipes(run, decoders)
    _demand_kind(section, index, family)
    demand_known_mode(section, index)
    step = section.bucket_step or family.pixel_step
    _demand_fit(section, index, step, family)
    opened = open_dataset(section, index, tell, ledger, folder / "staged")
    found = len(opened.samples) + sum(entry.dataset == section.id for entry in ledger.entries)
    plan = buckets.assign(opened.samples, section, step)
    pictures = [
        Picture(sample, (size[0], size[1]), opened.source, recipe(sample))
        for size, samples in plan.buckets.items()
        for sample in samples
    ]
    encoder = family.identity()["latents"]
    unreadable = fill_latents(
        stores.latents,
        pictures,
        family.encode_images,
        encoder,
        tell,
        decoders,
        by_threads(section.in_memory.num_workers, BATCH, section.timeout_s),
    )
    for sample, reason in unreadable:
        ledger.record(section.id, sample.key, reason)
    ledger.check(section.id, found, section.max_corruption_rate)
    lost = {sample for sample, _ in unreadable}
    tell(Notice(f"data set {section.id!r}:\n{buckets.report(plan)}"))
    write_text(folder / f"buckets-{index}.json", json.dumps(buckets.as_json(plan), indent=2))
    groups = [
        Group(samples, section.repeats, section.caption_dropout, size, section.weight)
        for size, samples in plan.buckets.items()
    ]
    kept = _only(groups, lambda sample: sample not in lost)
    if not kept:
        raise DataError(
            f"datasets[{index}] ({section.id!r}): every picture was dropped; see above."
        )
    return kept


def _demand_kind(section: DatasetSection, index: int, family: Family) -> None:
    """No family encodes anything but pictures yet; what would not be used is not read either."""
    if section.dataset_type != "image":
        raise ConfigError(
            f"datasets[{index}].dataset_type is {section.dataset_type!r}; {family.name} encodes "
            "images alone. Set dataset_type: image, or choose another model.family."
        )
    for key in ("conditioning_data_dir", "mask_data_dir"):
        folder = section.model_dump(include={key})[key]
        if folder is not None:
            raise ConfigError(
                f"datasets[{index}].{key} is {folder!r}; {family.name} trains on pictures and "
                "captions alone, so these files would have no effect. Leave it out."
            )


def _demand_fit(section: DatasetSection, index: int, step: int, family: Family) -> None:
    if step % family.pixel_step:
        raise ConfigError(
            f"datasets[{index}].bucket_step is {step}; {family.name} needs a multiple of "
            f"{family.pixel_step}."
        )
    sizes = buckets.bucket_sizes(
        section.resolution, step, section.max_aspect, section.resolution_type
    )
    longest = max(max(size) for size in sizes)
    if longest > family.max_edge:
        raise ConfigError(
            f"datasets[{index}].resolution {section.resolution} with max_aspect "
            f"{section.max_aspect:g} gives edges of {longest} pixels; {family.name} takes at most "
            f"{family.max_edge}. Lower one of them."
        )


def _held_out_draws(groups: Sequence[Group], batch_size: int) -> list[tuple[Draw, ...]]:
    """Fixed batches, each of one size."""
    draws = [Draw(s, s.caption, group.size) for group in groups for s in group.samples]
    batches: list[tuple[Draw, ...]] = []
    for size in sorted({draw.size for draw in draws}):
        alike = [draw for draw in draws if draw.size == size]
        batches += [tuple(alike[i : i + batch_size]) for i in range(0, len(alike), batch_size)]
    return batches


def _loader_of(
    family: Family, stores: Stores, mover: Mover, recipe: Callable[[Sample], Recipe]
) -> Callable[[Sequence[Draw]], Batch]:
    """A function from draws to a batch on the device."""
    identity = family.identity()

    def fetch(store: Store, key: str) -> dict[str, torch.Tensor]:
        entry = store.get(key)
        assert entry is not None, f"{key} was encoded before training and is gone now"
        return dict(entry)

    def load(draws: Sequence[Draw]) -> Batch:
        latents = [
            fetch(
                stores.latents,
                latent_key(d.sample, d.size, identity["latents"], recipe(d.sample)),
            )["latents"]
            for d in draws
        ]
        texts = [fetch(stores.text, text_key(d.caption, identity["text"])) for d in draws]
        batch = Batch(
            latents=mover.move(torch.stack(latents)),
            text={key: mover.move(t) for key, t in family.stack_text(texts).items()},
            samples=tuple(draw.sample for draw in draws),
        )
        return mover.place(batch)

    return load
