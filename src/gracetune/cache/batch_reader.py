"""From the draws of a batch to encoded tensors in host memory, by the mode of each data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gracetune.cache.augmentation_epochs import NO_EPOCH, augmentation_epoch, augmentation_mode
from gracetune.cache.encode import NO_TILING, EncodeItem, decode_items
from gracetune.cache.keys import latent_key, mask_key, text_key
from gracetune.cache.masks import MASK_TENSOR, render_masks, mask_weights
from gracetune.cache.memory_tier import MemoryTier, allocate_pageable
from gracetune.data.augment import recipe_of
from gracetune.data.sample import mask_of
from gracetune.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.augmentation_epochs import AugmentationEpochs
    from gracetune.cache.augmentation_epochs import AugmentationMode as Way
    from gracetune.cache.encode import Tiling
    from gracetune.cache.keys import CacheKey
    from gracetune.cache.masks import LatentGrid
    from gracetune.cache.memory_tier import HitCounts
    from gracetune.cache.store import Entry, Allocate, Store
    from gracetune.config.schema import DatasetSection
    from gracetune.data.augment import SampleTransform
    from gracetune.data.images import Decoders
    from gracetune.data.loader import Draw
    from gracetune.data.prefetch import Prefetch
    from gracetune.data.sample import Sample
    from gracetune.data.source import Source


class MissingEntriesError(RunFailedError):
    """Entries that were there are not whole any more; they are forgotten."""


@dataclass(frozen=True, slots=True)
class SampleTransforms:
    """How each sample becomes pixels in an epoch, as its own data set says."""

    sections: Mapping[str, DatasetSection]
    seed: int
    decoders: Decoders

    def __call__(self, sample: Sample, epoch: int = NO_EPOCH) -> SampleTransform:
        """Of one epoch; without one, that of generation 0."""
        section = self.sections[sample.dataset]
        generation = augmentation_epoch(section, epoch)
        return recipe_of(section, sample, self.seed, generation, self.decoders.lanczos)


@dataclass(frozen=True, slots=True)
class LiveSource:
    """What decoding while training needs."""

    source: Source
    prefetch: Prefetch
    """Who decodes the pictures of a batch."""


@dataclass(frozen=True, slots=True)
class BatchReader:
    """Latents by the way that each data set has them, texts by caption."""

    transforms: SampleTransforms
    latents: Store
    text: Store
    augmentation_epochs: AugmentationEpochs
    live_sources: Mapping[str, LiveSource]
    """By data set, for those that are encoded when they are used."""
    encode: Callable[[Tensor], Tensor]
    identity: Mapping[str, str]
    hit_counts: HitCounts
    latent_grid: LatentGrid
    tiling: Tiling = NO_TILING

    def read_latents(self, draws: Sequence[Draw], room: Allocate) -> Tensor:
        """Those of a batch, side by side; they have one size. What is cached lies in the room that
        is asked for, what is encoded now lies where the encoder left it."""
        ways: dict[Way, list[int]] = {}
        for place, draw in enumerate(draws):
            ways.setdefault(self._way(draw), []).append(place)
        if len(ways) == 1:
            (way,) = ways
            return self._by(way, draws, room)
        made: dict[int, Tensor] = {}
        for way, places in ways.items():
            found = self._by(way, [draws[place] for place in places], allocate_pageable)
            made |= dict(zip(places, found, strict=True))
        # Data sets in one batch may be served in different ways: all go to where one was encoded.
        device = max((t.device for t in made.values()), key=lambda device: device.type != "cpu")
        return torch.stack([made[place].to(device) for place in range(len(draws))])

    def read_loss_weights(self, draws: Sequence[Draw]) -> Tensor | None:
        """How much each cell of a batch counts, as masks say; none where no sample has one."""
        masked: dict[Way, list[int]] = {}
        for place, draw in enumerate(draws):
            if mask_of(draw.sample) is not None:
                masked.setdefault(self._way(draw), []).append(place)
        if not masked:
            return None
        weights_BHW = torch.ones(len(draws), *self.latent_grid(draws[0].size))  # noqa: N806
        for way, places in masked.items():
            levels = self._levels(way, [draws[place] for place in places])
            for place, one in zip(places, levels, strict=True):
                section = self.transforms.sections[draws[place].sample.dataset]
                weights_BHW[place] = mask_weights(one, section.mask_background, section.mask_normalize)
        return weights_BHW

    def will_need(self, draws: Sequence[Draw]) -> None:
        """These are soon to be asked for: what has to come from a disk starts to."""
        asked: dict[Store, list[CacheKey]] = {}
        for draw in draws:
            store = self._store_of(self._way(draw), draw.epoch)
            if store is not None:
                asked.setdefault(store, []).extend(self._keys(draw))
        for store, keys in asked.items():
            store.will_need(keys)

    def read_texts(self, captions: Sequence[str]) -> list[Entry]:
        """The embeddings of each caption, without padding."""
        keys = [text_key(caption, self.identity["text"]) for caption in captions]
        found = [entry for entry in self.text.get_many(keys) if entry is not None]
        if len(found) < len(keys):
            raise _gone(len(keys) - len(found))
        self._count(self.text, len(keys))
        return found

    def _way(self, draw: Draw) -> Way:
        mode = augmentation_mode(self.transforms.sections[draw.sample.dataset])
        # Generation 0 is in the cache itself; entering epoch 0 begins the next one.
        if mode == "refresh_each_epoch" and draw.epoch == NO_EPOCH:
            return "static"
        return mode

    def _by(self, way: Way, draws: Sequence[Draw], room: Allocate) -> Tensor:
        if way == "disable_cache":
            return self._encoded_now(draws)
        store = self.latents if way == "static" else self.augmentation_epochs.store_for(draws[0].epoch)
        found = store.gather([self._key(draw) for draw in draws], "latents", room)
        if found is None:
            raise _gone("some")
        self._count(store, len(draws))
        return found

    def _store_of(self, way: Way, epoch: int) -> Store | None:
        """Where a draw will be read from; none where nothing is read, or it is not made yet."""
        if way == "disable_cache":
            return None
        return self.latents if way == "static" else self.augmentation_epochs.current_store(epoch)

    def _key(self, draw: Draw) -> CacheKey:
        recipe = self.transforms(draw.sample, draw.epoch)
        tiled = self.tiling.applies_to(draw.size, draw.sample.kind)
        return latent_key(draw.sample, draw.size, self.identity["latents"], recipe, tiled)

    def _keys(self, draw: Draw) -> list[CacheKey]:
        """Of the latents, and of the mask where there is one."""
        masked = mask_of(draw.sample) is not None
        return [self._key(draw), self._mask_key(draw)] if masked else [self._key(draw)]

    def _mask_key(self, draw: Draw) -> CacheKey:
        mask = mask_of(draw.sample)
        assert mask is not None, f"{draw.sample.key} has no mask"
        recipe = self.transforms(draw.sample, draw.epoch)
        return mask_key(mask, draw.size, self.latent_grid(draw.size), recipe)

    def _levels(self, way: Way, draws: Sequence[Draw]) -> Tensor:
        """Of the masks of these draws, all served in one way."""
        if way == "disable_cache":
            return self._rendered_now(draws)
        store = self.latents if way == "static" else self.augmentation_epochs.store_for(draws[0].epoch)
        found = store.gather([self._mask_key(draw) for draw in draws], MASK_TENSOR, allocate_pageable)
        if found is None:
            raise _gone("some")
        self._count(store, len(draws))
        return found

    def _rendered_now(self, draws: Sequence[Draw]) -> Tensor:
        def levels(live: LiveSource, pictures: Sequence[EncodeItem]) -> Iterator[Tensor | str]:
            return render_masks(live.prefetch, pictures, self.latent_grid, self.transforms.decoders)

        return torch.stack(self._made_now(draws, levels))

    def _encoded_now(self, draws: Sequence[Draw]) -> Tensor:
        def pixels(live: LiveSource, pictures: Sequence[EncodeItem]) -> Iterator[Tensor | str]:
            return decode_items(pictures, self.transforms.decoders, live.prefetch)

        stacked = torch.stack(self._made_now(draws, pixels))
        with torch.no_grad():
            return self.encode(stacked)

    def _made_now(
        self,
        draws: Sequence[Draw],
        make: Callable[[LiveSource, Sequence[EncodeItem]], Iterator[Tensor | str]],
    ) -> list[Tensor]:
        """Of each draw what its data set's workers make of it."""
        found: dict[int, Tensor] = {}
        by_dataset: dict[str, list[int]] = {}
        for place, draw in enumerate(draws):
            by_dataset.setdefault(draw.sample.dataset, []).append(place)
        for dataset, places in by_dataset.items():
            live = self.live_sources[dataset]
            pictures = [
                EncodeItem(d.sample, d.size, live.source, self.transforms(d.sample, d.epoch))
                for d in (draws[place] for place in places)
            ]
            for place, made in zip(places, make(live, pictures), strict=True):
                if isinstance(made, str):
                    raise RunFailedError(
                        f"data set {dataset!r}: {draws[place].sample.key} was readable when the "
                        f"run began and is not now: {made}. Mend it, and start again to resume."
                    )
                found[place] = made
        return [found[place] for place in range(len(draws))]

    def _count(self, store: Store, number: int) -> None:
        if not isinstance(store, MemoryTier):  # which counts for itself
            self.hit_counts.reads += number


def _gone(what: object) -> MissingEntriesError:
    """It cannot be missing unless someone took it away."""
    return MissingEntriesError(
        f"{what} entries of the cache were encoded and are gone or damaged now. Start again: they "
        "are encoded anew, and the run resumes. Where there may be more, let gracetune cache "
        "verify RUN --repair look at all of them first."
    )
