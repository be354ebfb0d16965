"""Which cache entries a run needs, without encoding any; where a run keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cache.augmentation_epochs import unread_epochs, read_marks, augmentation_mode
from gracetune.cache.batch_reader import SampleTransforms
from gracetune.cache.encode import choose_tiling
from gracetune.cache.keys import latent_key, mask_key, text_key
from gracetune.cache.prompt_keys import EMPTY_PROMPT, PromptNames
from gracetune.cache.shard_store import is_cache
from gracetune.data import buckets
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.images import choose_decoders
from gracetune.data.pipeline import GENERATIONS, latent_grid_of
from gracetune.data.sample import mask_of
from gracetune.errors import CacheError
from gracetune.train.build import CHECKPOINT_FOLDER
from gracetune.train.checkpoint import complete_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.cache.keys import CacheKey
    from gracetune.config.schema import RunFile
    from gracetune.events.types import Event
    from gracetune.models.family import Family


def cache_root(run: RunFile) -> Path:
    """The folder of a run's caches."""
    named = run.cache_config.cache_dir
    return Path(named) if named else Path(run.output_dir) / "cache"


def old_generations(run: RunFile) -> list[Path]:
    """Refreshed latents in the run's folder that it will not read: all of them, once it is done."""
    folder = Path(run.output_dir)
    steps = [int(path.name.removeprefix("step-")) for path in complete_checkpoints(folder / CHECKPOINT_FOLDER)]
    done = bool(steps) and steps[-1] >= run.train.max_train_steps
    refreshed = any(augmentation_mode(section) == "refresh_each_epoch" for section in run.datasets)
    kept = folder / GENERATIONS
    found = unread_epochs(kept, read_marks(kept) if refreshed and not done else [])
    return [path for path in found if is_cache(path)]


def required_keys(run: RunFile, family: Family, emit: Callable[[Event], None]) -> set[CacheKey]:
    """Every key that training would look up; a sample that cannot be read is an error here."""
    folder, identity = Path(run.output_dir), family.identity()
    ledger = CorruptionLog(emit, folder / "corruption.json")
    recipes = SampleTransforms({d.id: d for d in run.datasets}, run.seed, choose_decoders())
    tiling = choose_tiling(run.cache_config.vae_tiling, family.name, family.tile(on=False))
    cells, name_of = latent_grid_of(family), PromptNames(family, recipes)
    wanted: set[CacheKey] = set()
    for index, section in enumerate(run.datasets):
        opened = open_dataset(section, index, emit, ledger)
        plan = buckets.assign(opened.samples, section, section.bucket_step or family.pixel_step)
        wanted |= {
            text_key(name_of(caption, sample, size, epoch), identity["text"])
            for size, samples in plan.buckets.items()
            for sample in samples
            for caption in (sample.caption, EMPTY_PROMPT)
            for epoch in name_of.epochs(sample)
        }
        if augmentation_mode(section) == "disable_cache":
            continue
        wanted |= {
            latent_key(
                sample,
                size,
                identity["latents"],
                recipes(sample, epoch),
                tiling.applies_to(size, sample.kind),
            )
            for size, samples in plan.buckets.items()
            for sample in samples
            for epoch in range(section.variants)
        }
        wanted |= {
            mask_key(mask, size, cells(size), recipes(sample, epoch))
            for size, samples in plan.buckets.items()
            for sample in samples
            if (mask := mask_of(sample)) is not None
            for epoch in range(section.variants)
        }
    if ledger.entries:
        one = ledger.entries[0]
        raise CacheError(
            f"{len(ledger.entries)} samples of the run in {folder} cannot be read, such as "
            f"{one.key!r} of data set {one.dataset!r}; their entries cannot be told from "
            "leftovers. Mend or remove these samples first."
        )
    return wanted
