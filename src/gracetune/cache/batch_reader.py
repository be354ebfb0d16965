"""Read the latents, loss weights and text embeddings of a batch.

A batch may mix datasets with different `augmentations_cache_mode`s. Latents of `static` datasets
are read from the cache, those of `refresh_each_epoch` from the store of the current epoch, and
those of `disable_cache` are decoded and encoded now. Cached entries were encoded beforehand, so a
missing one is an error.

`SampleTransforms` determines how a sample is cropped, and `PromptNames` under which name its prompt
is cached. Encoding and reading share them, so that reading finds the entries that were encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gracetune.cache.augmentation_epochs import augmentation_epoch, augmentation_mode
from gracetune.cache.encode import NO_TILING, EncodeItem, decode_items, unreadable_now
from gracetune.cache.keys import latent_key, mask_key, text_key
from gracetune.cache.loss_masks import MASK_TENSOR, mask_weights, render_masks
from gracetune.cache.memory_tier import MemoryTier, allocate_pageable
from gracetune.cache.shared_tier import SharedTier
from gracetune.data.augment import sample_transform
from gracetune.data.batch_order import NO_EPOCH
from gracetune.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.augmentation_epochs import AugmentationMode, EpochCaches
    from gracetune.cache.encode import Tiling
    from gracetune.cache.loss_masks import LatentGrid
    from gracetune.cache.open_stores import CacheStores
    from gracetune.cache.store import Allocate, Entry, Store
    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.data.augment import SampleTransform
    from gracetune.data.batch_order import Draw
    from gracetune.data.images import Decoders
    from gracetune.data.prefetch import Prefetch
    from gracetune.data.sample import Sample, Shape, Size
    from gracetune.data.source import Source

MAX_REMEMBERED_KEYS = 2**18
"""Maximum number of cache keys kept in memory to avoid hashing them every step; about 60 MB."""


class MissingEntriesError(RunFailedError):
    """Raised if cache entries that were encoded before training are missing or damaged."""


@dataclass(frozen=True, slots=True)
class SampleTransforms:
    """Callable that returns a sample's crop and augmentations, from its dataset's settings."""

    sections: Mapping[str, DatasetSection]
    """Dataset settings, by dataset id."""
    seed: int
    decoders: Decoders
    control_size: Callable[[int, int], Size] | None = None
    """Function (width, height) -> size of each control image of such a sample, for the VAE. None:
    the model takes no control images."""

    def __call__(self, sample: Sample, epoch: int = NO_EPOCH) -> SampleTransform:
        """Return the crop and augmentations of a sample in a training epoch."""
        section = self.sections[sample.dataset]
        number = augmentation_epoch(section, epoch)
        return sample_transform(section, sample, self.seed, number, self.decoders.lanczos)

    def item(
        self, sample: Sample, size: Shape, source: Source, epoch: int, tiled: bool = False
    ) -> EncodeItem:
        """Return everything that is needed to decode a sample for a bucket and an epoch."""
        control_size = None
        if self.control_size is not None and sample.controls:
            control_size = self.control_size(size[0], size[1])
        return EncodeItem(sample, size, source, self(sample, epoch), tiled, control_size)


@dataclass(frozen=True, slots=True)
class PromptNames:
    """Callable that returns the name under which a prompt's embeddings are cached.

    Two prompts share a name only if the text encoder sees the same input for both.
    """

    takes_control: bool
    """True if the text encoder also sees the sample's control images."""
    transforms: SampleTransforms

    def __call__(self, caption: str, sample: Sample, size: Shape, epoch: int = NO_EPOCH) -> str:
        """Return the cache name of a prompt: its caption.

        If the text encoder also sees control images, their digests, crop and size follow.
        """
        if not self.takes_control:
            return caption
        assert sample.controls, f"{sample.key} has no control image"
        # Texts cannot be encoded ahead for an endless sequence of random crops, so only `static`
        # datasets have texts that follow the crop of each augmentation epoch.
        section = self.transforms.sections[sample.dataset]
        epoch = epoch if augmentation_mode(section) == "static" else NO_EPOCH
        geometry = f"{self.transforms(sample, epoch).name} {'x'.join(map(str, size))}"
        digests = " ".join(control.digest for control in sample.controls)
        return f"{caption} [control {digests} {geometry}]"

    def epochs(self, sample: Sample) -> range:
        """Return the training epochs for which the prompts of a sample have to be encoded.

        Prompt names differ between epochs only if the text encoder sees a control image, whose
        random crop repeats after `variants` epochs. Otherwise one epoch is enough.
        """
        section = self.transforms.sections[sample.dataset]
        return range(section.variants if self.takes_control else 1)


@dataclass(frozen=True, slots=True)
class LiveSource:
    """A dataset that is not cached (`disable_cache`): samples are encoded during training."""

    source: Source
    prefetch: Prefetch
    """Worker threads that decode the samples of a batch."""


class BatchReader:
    """Reads the latents, loss weights and text embeddings of a batch from the cache stores."""

    def __init__(
        self,
        transforms: SampleTransforms,
        stores: CacheStores,
        augmentation_epochs: EpochCaches,
        live_sources: Mapping[str, LiveSource],
        encode: Callable[[Tensor], Tensor],
        identity: Mapping[str, str],
        latent_grid: LatentGrid,
        tiling: Tiling = NO_TILING,
    ) -> None:
        """Create a reader of the caches `stores` and `augmentation_epochs`.

        `live_sources` are the datasets that are not cached (`disable_cache`), by id; `encode`
        encodes their samples. `identity` has the ids of the encoders of `latents` and of `text`,
        which are part of their cache keys.
        """
        self._transforms = transforms
        self._stores = stores
        self._augmentation_epochs = augmentation_epochs
        self._live_sources = live_sources
        self._encode = encode
        self._identity = identity
        self._latent_grid = latent_grid
        self._tiling = tiling
        sections = transforms.sections.items()
        self._modes = {dataset: augmentation_mode(section) for dataset, section in sections}
        # Keys of static datasets and of prompts, so that a steady step does not hash them again.
        # Plain text instead of `CacheKey`, which would keep all components of the key alive.
        self._latent_keys: dict[tuple[Sample, Shape, int], str] = {}
        self._text_keys: dict[str, str] = {}

    def read_latents(self, draws: Sequence[Draw], allocate: Allocate) -> Tensor:
        """Return the stacked latents of a batch's samples (`draws`), which all have the same size.

        Cached latents are copied into memory from `allocate`. Latents of datasets that are not
        cached are encoded now and stay on the encoder's device.
        """
        by_mode: dict[AugmentationMode, list[int]] = {}
        for place, draw in enumerate(draws):
            by_mode.setdefault(self._mode(draw), []).append(place)
        if len(by_mode) == 1:
            (mode,) = by_mode
            return self._latents_of_mode(mode, draws, allocate)
        found: dict[int, Tensor] = {}
        for mode, places in by_mode.items():
            some = self._latents_of_mode(mode, [draws[p] for p in places], allocate_pageable)
            found |= dict(zip(places, some, strict=True))
        # Cached latents join those that were encoded on a device.
        device = max((t.device for t in found.values()), key=lambda device: device.type != "cpu")
        return torch.stack([found[place].to(device) for place in range(len(draws))])

    def read_loss_weights(self, draws: Sequence[Draw]) -> Tensor | None:
        """Return the loss weight of each latent cell (BHW); None if no sample has a mask."""
        masked: dict[AugmentationMode, list[int]] = {}
        for place, draw in enumerate(draws):
            if draw.sample.mask is not None:
                masked.setdefault(self._mode(draw), []).append(place)
        if not masked:
            return None
        weights_BHW = torch.ones(len(draws), *self._latent_grid(draws[0].size))  # noqa: N806
        for mode, places in masked.items():
            levels = self._masks_of_mode(mode, [draws[place] for place in places])
            for place, levels_HW in zip(places, levels, strict=True):  # noqa: N806
                section = self._transforms.sections[draws[place].sample.dataset]
                weights_BHW[place] = mask_weights(
                    levels_HW, section.mask_background, section.mask_normalize
                )
        return weights_BHW

    def read_texts(self, names: Sequence[str]) -> list[Entry]:
        """Return the cached embeddings of prompts, without padding, given the prompts' names."""
        store = self._stores.text
        keys = [self._text_key(name) for name in names]
        found = [entry for entry in store.get_many(keys) if entry is not None]
        if len(found) < len(keys):
            raise _missing_entries(len(keys) - len(found))
        self._count_reads(store, len(keys))
        return found

    def will_need(self, draws: Sequence[Draw]) -> None:
        """Announce which samples the next batches read, so that slow disks can start reading."""
        announced: dict[Store, list[str]] = {}
        for draw in draws:
            mode = self._mode(draw)
            if mode == "disable_cache":
                continue
            epochs = self._augmentation_epochs
            store = self._stores.latents if mode == "static" else epochs.current_store(draw.epoch)
            if store is not None:  # None: the epoch has not begun
                announced.setdefault(store, []).append(self._latent_key(draw))
                if draw.sample.mask is not None:
                    announced[store].append(self._mask_key(draw))
        for store, keys in announced.items():
            store.will_need(keys)

    def _mode(self, draw: Draw) -> AugmentationMode:
        mode = self._modes[draw.sample.dataset]
        # A draw without an epoch shows augmentation epoch 0, which is in the cache itself.
        if mode == "refresh_each_epoch" and draw.epoch == NO_EPOCH:
            return "static"
        return mode

    def _latents_of_mode(
        self, mode: AugmentationMode, draws: Sequence[Draw], allocate: Allocate
    ) -> Tensor:
        if mode == "disable_cache":
            pixels = self._decode_live(draws, self._decode_pixels)
            with torch.no_grad():
                return self._encode(pixels)
        keys = [self._latent_key(draw) for draw in draws]
        return self._gather(mode, draws[0].epoch, keys, "latents", allocate)

    def _masks_of_mode(self, mode: AugmentationMode, draws: Sequence[Draw]) -> Tensor:
        if mode == "disable_cache":
            return self._decode_live(draws, self._decode_masks)
        keys = [self._mask_key(draw) for draw in draws]
        return self._gather(mode, draws[0].epoch, keys, MASK_TENSOR, allocate_pageable)

    def _gather(
        self,
        mode: AugmentationMode,
        epoch: int,
        keys: Sequence[str],
        tensor: str,
        allocate: Allocate,
    ) -> Tensor:
        """Read one tensor of each cache entry and stack them; raise an error if one is missing."""
        epochs = self._augmentation_epochs
        store = self._stores.latents if mode == "static" else epochs.store_for(epoch)
        found = store.gather(keys, tensor, allocate)
        if found is None:
            raise _missing_entries("some")
        self._count_reads(store, len(keys))
        return found

    def _latent_key(self, draw: Draw) -> str:
        """Return the cache key of a sample's latents.

        Keys of `static` datasets are remembered: they are the same in later epochs. Keys of other
        datasets are computed on every call.
        """
        sample = draw.sample
        if self._modes[sample.dataset] != "static":
            return self._hash_latent_key(draw)
        variants = self._transforms.sections[sample.dataset].variants
        # The number of the augmentation epoch; a draw without an epoch shows number 0.
        index = (sample, draw.size, max(0, draw.epoch) % variants)
        key = self._latent_keys.get(index)
        if key is None:
            if len(self._latent_keys) >= MAX_REMEMBERED_KEYS:
                self._latent_keys.clear()
            key = self._latent_keys[index] = str(self._hash_latent_key(draw))
        return key

    def _hash_latent_key(self, draw: Draw) -> str:
        transform = self._transforms(draw.sample, draw.epoch)
        tiled = self._tiling.applies_to(draw.size, draw.sample.kind)
        return latent_key(draw.sample, draw.size, self._identity["latents"], transform, tiled)

    def _mask_key(self, draw: Draw) -> str:
        mask = draw.sample.mask
        assert mask is not None, f"{draw.sample.key} has no mask"
        transform = self._transforms(draw.sample, draw.epoch)
        return mask_key(mask, draw.size, self._latent_grid(draw.size), transform)

    def _text_key(self, name: str) -> str:
        key = self._text_keys.get(name)
        if key is None:
            if len(self._text_keys) >= MAX_REMEMBERED_KEYS:
                self._text_keys.clear()
            key = self._text_keys[name] = str(text_key(name, self._identity["text"]))
        return key

    def _decode_pixels(
        self, live: LiveSource, items: Sequence[EncodeItem]
    ) -> Iterator[Tensor | str]:
        return decode_items(items, self._transforms.decoders, live.prefetch)

    def _decode_masks(
        self, live: LiveSource, items: Sequence[EncodeItem]
    ) -> Iterator[Tensor | str]:
        return render_masks(live.prefetch, items, self._latent_grid, self._transforms.decoders)

    def _decode_live(
        self,
        draws: Sequence[Draw],
        decode: Callable[[LiveSource, Sequence[EncodeItem]], Iterator[Tensor | str]],
    ) -> Tensor:
        """Decode and stack samples of datasets that are not cached, in worker threads."""
        found: dict[int, Tensor] = {}
        by_dataset: dict[str, list[int]] = {}
        for place, draw in enumerate(draws):
            by_dataset.setdefault(draw.sample.dataset, []).append(place)
        for dataset, places in by_dataset.items():
            live = self._live_sources[dataset]
            items = [
                self._transforms.item(d.sample, d.size, live.source, d.epoch)
                for d in (draws[place] for place in places)
            ]
            for place, decoded in zip(places, decode(live, items), strict=True):
                if isinstance(decoded, str):
                    raise unreadable_now(draws[place].sample, decoded)
                found[place] = decoded
        return torch.stack([found[place] for place in range(len(draws))])

    def _count_reads(self, store: Store, count: int) -> None:
        if not isinstance(store, MemoryTier | SharedTier):  # which counts its own reads
            self._stores.hit_counts.reads += count


def _missing_entries(count: object) -> MissingEntriesError:
    return MissingEntriesError(
        f"{count} entries of the cache are missing or damaged, although they were encoded before "
        "training. Run the same command again: it encodes them and resumes. To check the whole "
        "cache first, run `gracetune cache verify RUN --repair`."
    )
