"""Turn the datasets of a run file into batches on the device: the `DataPipeline` of a run.

Creating a pipeline does everything that can fail because of bad data, before training starts. It
opens each dataset, sorts its samples into buckets, and encodes all samples and captions that are
not in the cache. A training step then only looks up cache entries:

    order.batch_at(i)           choose samples and captions                 data/batch_order.py
    load(draws)                 read latents, loss weights and texts        cache/batch_reader.py
    transfer.to_device(...)     copy them to the device in advance          cache/batch_transfer.py

This is the only module of `data` that imports `cache`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.atomic_files import write_text
from gracetune.cache.augmentation_epochs import (
    FOLDER,
    AugmentationEpochFolder,
    EncodingStopped,
    EpochCaches,
    augmentation_mode,
    check_variants,
)
from gracetune.cache.batch_reader import (
    BatchReader,
    LiveSource,
    MissingEntriesError,
    PromptNames,
    SampleTransforms,
)
from gracetune.cache.batch_transfer import (
    INITIAL_DEPTH,
    DeviceTextCache,
    InlineBatches,
    PrefetchDepth,
    PrefetchedBatches,
    cache_texts_on_device,
)
from gracetune.cache.encode import (
    EMPTY_PROMPT,
    ENCODE_BATCH_SIZE,
    SINGLE_RANK,
    EncodeItem,
    ExclusiveEncoder,
    PromptEncoder,
    choose_tiling,
    fill_latents,
    fill_text,
    find_unreadable,
    unreadable_now,
    validation_texts,
)
from gracetune.cache.keys import latent_key, mask_key, text_key
from gracetune.cache.loss_masks import fill_masks, mask_keys
from gracetune.cache.memory_tier import MemoryTier
from gracetune.cache.open_stores import CacheStores
from gracetune.cache.shared_tier import SharedTier
from gracetune.data import buckets
from gracetune.data.augment import check_augmentable
from gracetune.data.batch_order import (
    SINGLE_SHARE,
    BatchOrder,
    BucketGroup,
    Draw,
    Loader,
    RankShare,
    seeded_bits,
)
from gracetune.data.data_quality import MAX_COMPARED_AT_START, quality_warnings, weight_warning
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.dataset_checks import check_fit, check_kind
from gracetune.data.images import choose_decoders
from gracetune.data.prefetch import worker_threads
from gracetune.data.sample import Batch
from gracetune.errors import CacheError, DataError
from gracetune.events.types import BatchesFed, Notice, StageProgress
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.batch_transfer import BatchIterator, BatchTransfer
    from gracetune.cache.encode import Emit, Ranks, Tiling
    from gracetune.cache.keys import CacheKey
    from gracetune.cache.store import Entry, Store
    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.config.schema import RunFile
    from gracetune.data.dataset import Corruption
    from gracetune.data.prefetch import Prefetch
    from gracetune.data.sample import Sample, Shape
    from gracetune.data.source import Source
    from gracetune.events.types import Event
    from gracetune.memory.oversubscription import Trimmable
    from gracetune.models.family import Family

    Unreadable = list[tuple[Sample, str]]
    """Pairs of an unreadable sample and the reason why it cannot be read."""

LOSS_WEIGHTS = "weights of the loss"
"""Key under which the loss weights are copied to the device together with the text embeddings."""
MAX_LISTED_BUCKETS = 4
"""Number of buckets that the one-line summary of a dataset lists."""
DEVICE_TEXT_SHARE = 64
"""Text embeddings that stay on the device may use 1/64 of its memory, unless
`cache_config.device_budget_gb` is set."""
EXTREME_TEXTS = 64
"""Number of captions with most bytes, of which the one with most tokens is planned for."""
SOME_TEXTS = 4
"""Number of long and of short captions whose embeddings the health checks look at."""
TOKEN_DIMS = 3
"""Dimensions of a batch of embedded tokens: samples, tokens, features."""


def text_length(text: Mapping[str, Tensor]) -> int:
    """Return the number of tokens of a batch of texts; 0 if it has no tensor with tokens."""
    lengths = (tensor.shape[1] for tensor in text.values() if tensor.dim() >= TOKEN_DIMS)
    return max(lengths, default=0)


class DataPipeline:
    """The data of a run, ready for training: batches, their order, and held-out samples."""

    def __init__(
        self,
        run: RunFile,
        family: Family,
        transfer: BatchTransfer,
        folder: Path,
        emit: Emit,
        ranks: Ranks = SINGLE_RANK,
        first_sizes: Sequence[int] = (),
    ) -> None:
        """Open and encode all datasets; errors in the data are raised here, before training.

        `folder` is the run's output folder. The ranks of a machine each encode a part of the
        samples; all ranks leave out the samples that any of them cannot read. `first_sizes` are the
        sizes of the first batches, if they are smaller than `train.batch_size`.
        """
        self._run = run
        self._first_sizes = first_sizes
        self._family = family
        self._transfer = transfer
        self._emit = emit
        with ExitStack() as stack:
            self._stores = CacheStores(run, folder, emit, transfer.allocate_host, ranks)
            stack.enter_context(self._stores)
            preparer = DatasetPreparer(run, family, self._stores, folder, ranks, emit)
            self._prepare(preparer)
            stack.pop_all()  # the stores stay open: nothing went wrong

    def _prepare(self, preparer: DatasetPreparer) -> None:
        run, family, transforms = self._run, self._family, preparer.transforms
        prepared = preparer.prepare_all()
        self.corruptions = preparer.corruptions
        """Unreadable samples, which are left out, with the reasons."""
        groups = [group for dataset in prepared for group in dataset.groups]
        train_groups, held_out = split_holdout(groups, run.validation.holdout, run.seed)
        if not train_groups:
            raise DataError(
                f"validation.holdout is {run.validation.holdout}, which leaves no sample to train "
                "on. Lower it."
            )
        sources = {d.id: one.source for d, one in zip(run.datasets, prepared, strict=True)}
        self.tiling = preparer.tiling
        """Rule that decides which image sizes the VAE encodes in tiles."""
        self._prompt_names = PromptNames(family.takes_control, transforms)
        self._epochs = EpochCaches(
            self._stores.latents,
            RefreshedEpochEncoder(preparer, train_groups, sources),
            self._emit,
        )
        self._reader = BatchReader(
            transforms,
            self._stores,
            self._epochs,
            {
                section.id: LiveSource(sources[section.id], _decode_workers(section))
                for section in run.datasets
                if augmentation_mode(section) == "disable_cache"
            },
            preparer.encode,
            preparer.identity,
            preparer.latent_grid,
            self.tiling,
        )
        others = validation_texts(run.validation, family)
        prompts = PromptEncoder(family, groups, sources, self._prompt_names, others)
        self._text_encoder = preparer.identity["text"]
        self._encode_texts(prompts, preparer.ranks)
        self._device_texts = self._cache_device_texts(train_groups, prompts)
        self._extreme_texts = self._find_extreme_texts(train_groups)
        self.order = BatchOrder(
            train_groups,
            run.train.batch_size,
            run.seed,
            run.train.similar_batches,
            self._first_sizes,
        )
        """Sequence of all batches of the run."""
        used = (sample for group in train_groups for sample in group.samples)
        self.train_samples = tuple(dict.fromkeys(used))  # with several resolutions, in many groups
        """All samples that are trained on, each once."""
        self.held_out_draws = _fixed_batches(held_out, run.train.batch_size)
        """Held-out samples in batches, to be read with `load` when the run validates."""
        self._check_batch_size()

    def load(self, draws: Sequence[Draw]) -> Batch:
        """Read the latents, texts and loss weights of some samples as a batch on the device.

        The copy to the device may still be in progress when this returns.
        """
        names = [self._prompt_names(d.caption, d.sample, d.size, d.epoch) for d in draws]
        texts = self._device_texts.get_all(names)
        if texts is None:
            texts = self._device_texts.keep(names, self._reader.read_texts(names))
        tensors = self._family.stack_text(texts)
        weights = self._reader.read_loss_weights(draws)
        if weights is not None:
            tensors[LOSS_WEIGHTS] = weights
        read_latents = partial(self._reader.read_latents, draws)
        latents, tensors = self._transfer.to_device(read_latents, tensors)
        weights = tensors.pop(LOSS_WEIGHTS, None)
        return Batch(latents, tensors, tuple(draw.sample for draw in draws), weights)

    def read_texts(self, texts: Sequence[str]) -> Sequence[Entry]:
        """Return the cached embeddings of captions and of `validation_texts`."""
        try:
            return self._reader.read_texts(texts)
        except MissingEntriesError:  # damaged; texts can still be encoded
            return self._family.encode_text(texts)

    def load_largest(self) -> Batch:
        """Read one sample of the largest size with the longest text, to find the peak of memory."""
        batch = self.load(self.order.largest_draw())
        return replace(batch, text=max(self._read_extreme_texts(), key=text_length))

    def text_lengths(self) -> frozenset[int]:
        """Return lengths of texts in tokens, of at least the longest and the shortest ones."""
        return frozenset(map(text_length, self._read_extreme_texts()))

    def _read_extreme_texts(self) -> list[dict[str, Tensor]]:
        entries = self._reader.read_texts(self._extreme_texts)
        return [self._family.stack_text([entry]) for entry in entries]

    def some_texts(self) -> dict[str, Entry]:
        """Read the embeddings of a few captions, by name: some of the longest and the shortest."""
        names = [name for name in self._extreme_texts if name != EMPTY_PROMPT]
        names = list(dict.fromkeys([*names[:SOME_TEXTS], *names[-SOME_TEXTS:]]))
        return dict(zip(names, self._reader.read_texts(names), strict=True)) if names else {}

    def load_sizes(self, sizes: Collection[Shape]) -> dict[Shape, Batch]:
        """Read a batch of one sample of each of these sizes; see `load`."""
        draws = self.order.one_draw_per_size()
        return {draw.size: self.load((draw,)) for draw in draws if draw.size in sizes}

    def will_need(self, draws: Sequence[Draw]) -> None:
        """Tell the caches which samples will be loaded soon, so that they can read ahead."""
        self._reader.will_need(draws)

    def batches(
        self,
        share: RankShare = SINGLE_SHARE,
        consumed: int = 0,
        depth: PrefetchDepth | None = None,
    ) -> BatchIterator:
        """Return an endless iterator over the batches of one rank, as pairs `(batch, state)`.

        It starts at the optimizer step after the first `consumed` batches, counted over all ranks.
        `share` decides which batches of a step this rank gets. If the device has memory of its own,
        a thread copies batches there in advance, also those of the next steps; closing the iterator
        ends the thread. `depth` is that of an earlier iterator, to continue with it.
        """
        loader = Loader(self.order, self.load, share, consumed, will_need=self.will_need)
        if not self._transfer.needs_copy:
            return InlineBatches(loader)
        section = self._run.cache_config
        if depth is not None:
            pass
        elif section.prefetch_depth == "auto":
            depth = PrefetchDepth(INITIAL_DEPTH, int(section.prefetch_budget_gb * GIB))
        else:
            depth = PrefetchDepth(section.prefetch_depth, None)
        return PrefetchedBatches(loader, self._transfer.new_stream(), depth)

    def batches_fed(self, step: int, batches: BatchIterator) -> BatchesFed:
        """Return statistics of the batches so far: cache hits, bytes copied and waiting time.

        `step` is the number of the current optimizer step.
        """
        counts, hit_counts = batches.counts, self._stores.hit_counts
        return BatchesFed(
            step=step,
            batches=counts.batches,
            hits=hit_counts.hits,
            reads=hit_counts.reads,
            hot=self._device_texts.hits,
            waits=counts.waits,
            nbytes=self._transfer.nbytes_copied,
            waited_s=counts.waited_s,
            hidden_s=counts.hidden_s,
            depth=batches.depth.batches,
        )

    def trimmers(self) -> dict[str, tuple[Trimmable, bool]]:
        """Return what a reclamation of memory can trim, by name; with True if in host memory."""
        on_host = self._stores.trimmable()
        return {"texts on the device": (self._device_texts, False)} | {
            f"{name} in host memory": (store, True) for name, store in on_host.items()
        }

    def trim(self) -> int:
        """Free host memory of cached samples that are also in files; return the bytes."""
        return self._stores.trim()

    def restore(self) -> None:
        """Use the memory again that `trim` has given back."""
        self._stores.restore()

    def close(self) -> None:
        """Stop background encoding and close the cache files; `load` reopens them if needed."""
        self._epochs.close()
        self._stores.close()

    def _encode_texts(self, prompts: PromptEncoder, ranks: Ranks) -> None:
        """Encode the captions that are missing in the cache, or damaged."""
        run, encoder = self._run, self._text_encoder
        if self._family.takes_control and any(
            augmentation_mode(section) != "static" for section in run.datasets
        ):
            text = "prompts are encoded with the control images of the first epoch only"
            hint = "set augmentations_cache_mode: static to augment control images like samples"
            self._emit(Notice(f"{text}; {hint}", level="warning"))
        fill_text(self._stores.text, prompts.names, prompts.encode, encoder, self._emit, ranks)
        keys = [text_key(name, encoder) for name in sorted(prompts.names)]
        if _load_into_memory(self._stores.text, keys, self._emit):
            self._encode_missing_texts(prompts)

    def _encode_missing_texts(self, prompts: PromptEncoder) -> None:
        fill_text(self._stores.text, prompts.names, prompts.encode, self._text_encoder, self._emit)

    def _cache_device_texts(
        self, groups: Sequence[BucketGroup], prompts: PromptEncoder
    ) -> DeviceTextCache:
        """Copy the text embeddings that are used most often to the device, within a budget."""
        if not self._transfer.needs_copy:
            return DeviceTextCache({})
        uses: defaultdict[str, float] = defaultdict(float)
        for group in groups:
            for sample in group.samples:
                for epoch in self._prompt_names.epochs(sample):
                    empty = self._prompt_names(EMPTY_PROMPT, sample, group.size, epoch)
                    uses[empty] += group.repeats * group.caption_dropout
                    for caption in sample.captions:
                        name = self._prompt_names(caption, sample, group.size, epoch)
                        uses[name] += group.repeats / len(sample.captions)
        names = sorted(uses, key=lambda name: (-uses[name], name))
        budget_gb = self._run.cache_config.device_budget_gb
        budget = int(budget_gb * GIB) if budget_gb is not None else None
        if budget is None:
            budget = self._transfer.device_nbytes // DEVICE_TEXT_SHARE

        def read_texts(some: Sequence[str]) -> list[Entry]:
            try:
                return self._reader.read_texts(some)
            except MissingEntriesError:  # damaged; texts can still be encoded
                self._encode_missing_texts(prompts)
                return self._reader.read_texts(some)

        cached = cache_texts_on_device(
            names if budget else (), read_texts, self._transfer.device, budget
        )
        text = f"{len(cached)} of {len(names)} texts stay on the device"
        self._emit(Notice(f"{text}, within {format_bytes(budget)}"))
        return cached

    @property
    def device_texts(self) -> DeviceTextCache:
        """Text embeddings that stay on the device for the whole run."""
        return self._device_texts

    def _find_extreme_texts(self, groups: Sequence[BucketGroup]) -> list[str]:
        """Return the names of the texts with most and with fewest bytes.

        The number of tokens is not known without reading an entry, and there may be millions. Bytes
        are nearer to it than characters: a Chinese one is three bytes and often a token.
        """
        lengths: dict[str, int] = {}
        for group in groups:
            for sample in group.samples:
                captions = {*sample.captions, *([EMPTY_PROMPT] if group.caption_dropout else [])}
                for caption in captions:
                    name = self._prompt_names(caption, sample, group.size)
                    lengths[name] = len(caption.encode())
        names = sorted(lengths, key=lambda name: (lengths[name], name))
        return list(dict.fromkeys([*names[:EXTREME_TEXTS], *names[-EXTREME_TEXTS:]]))

    def _check_batch_size(self) -> None:
        batch_size = self._run.train.batch_size
        largest = max(self.order.draws_by_size().values())
        if largest < batch_size:
            text = f"train.batch_size is {batch_size}, but no bucket has more than {largest}"
            hint = "samples in an epoch, so batches are smaller"
            self._emit(Notice(f"{text} {hint}", level="warning"))


def split_holdout(
    groups: Sequence[BucketGroup], share: float, seed: int
) -> tuple[list[BucketGroup], list[BucketGroup]]:
    """Split the samples into training samples and held-out samples.

    `share` is the fraction of distinct files to hold out. Samples with equal bytes stay together,
    also those of different datasets, because a file that is trained on elsewhere is not held out.
    The choice depends on a hash of each sample, so adding files to a dataset hardly changes which
    of the others are held out.
    """

    def rank(sample: Sample) -> int:
        parts = (str(seed), "hold out", sample.digest, sample.caption, sample.key)
        return seeded_bits("\0".join(parts), 8) >> 1

    samples = sorted((sample for group in groups for sample in group.samples), key=rank)
    digests = list(dict.fromkeys(sample.digest for sample in samples))
    held_out = set(digests[: round(share * len(digests))])
    return (
        keep_samples(groups, lambda sample: sample.digest not in held_out),
        keep_samples(groups, lambda sample: sample.digest in held_out),
    )


def keep_samples(
    groups: Sequence[BucketGroup], keep: Callable[[Sample], bool]
) -> list[BucketGroup]:
    """Return the groups with only the samples that `keep` accepts; empty groups are removed."""
    chosen = [
        replace(group, samples=tuple(s for s in group.samples if keep(s))) for group in groups
    ]
    return [group for group in chosen if group.samples]


def _fixed_batches(groups: Sequence[BucketGroup], batch_size: int) -> tuple[tuple[Draw, ...], ...]:
    """Split all samples into batches in a fixed order; a batch contains samples of one size."""
    draws = [Draw(s, s.caption, group.size) for group in groups for s in group.samples]
    batches: list[tuple[Draw, ...]] = []
    for size in sorted({draw.size for draw in draws}):
        same = [draw for draw in draws if draw.size == size]
        batches += [tuple(same[i : i + batch_size]) for i in range(0, len(same), batch_size)]
    return tuple(batches)


# Preparing datasets


@dataclass(frozen=True, slots=True)
class PreparedDataset:
    """A dataset that is ready for training.

    Its samples are encoded in the cache; with `augmentations_cache_mode: disable_cache`, they were
    only decoded as a check.
    """

    groups: list[BucketGroup]
    """The readable samples, by bucket."""
    source: Source
    """Source that reads the files, for encoding them again in later epochs."""


class DatasetPreparer:
    """Opens datasets, sorts them into buckets, and encodes their samples."""

    def __init__(
        self,
        run: RunFile,
        family: Family,
        stores: CacheStores,
        folder: Path,
        ranks: Ranks,
        emit: Emit,
    ) -> None:
        self.run = run
        self.stores = stores
        self.folder = folder
        self.ranks = ranks
        self.emit = emit
        self._family = family
        self._corruption = CorruptionLog(emit, folder / "corruption.json")
        self.transforms = _sample_transforms(run, family)
        emit(Notice(self.transforms.decoders.description))
        self.tiling = tiling_rule(run, family)
        self.encode = ExclusiveEncoder(family.encode, family.set_tiling, self.tiling)
        self.latent_grid = partial(latent_grid, family)

    @property
    def corruptions(self) -> tuple[Corruption, ...]:
        """The unreadable samples that were found so far."""
        return self._corruption.entries

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """The identity of the encoders (`Family.identity`), whose files are hashed only once."""
        return self._family.identity()

    def prepare_all(self) -> list[PreparedDataset]:
        """Prepare all datasets; list unreadable samples in the file `corruption.json`."""
        prepared = [self.prepare(index) for index in range(len(self.run.datasets))]
        self._corruption.write(self.folder / "corruption.json")
        return prepared

    def prepare(self, index: int) -> PreparedDataset:
        """Open the dataset with this index, sort its samples into buckets, and encode them.

        Unreadable samples are reported and left out.
        """
        section = self.run.datasets[index]
        check_kind(section, index, self._family)
        check_augmentable(section, index)
        check_variants(section, index)
        step = section.bucket_step or self._family.pixel_step
        check_fit(section, index, step, self._family)
        dataset = open_dataset(
            section,
            index,
            self.emit,
            self._corruption,
            self.folder / "staged",
            self.folder,
            self.run.seed,
            MAX_COMPARED_AT_START if self.ranks.rank == 0 and section.type != "shapes" else 0,
        )
        left_out = sum(entry.dataset == section.id for entry in self._corruption.entries)
        num_samples = len(dataset.samples) + left_out
        plan = buckets.assign(dataset.samples, section, step)
        groups = [
            BucketGroup(samples, section.repeats, section.caption_dropout, size, section.weight)
            for size, samples in plan.buckets.items()
        ]
        if self.ranks.rank == 0 and section.type != "shapes":  # whose images are alike on purpose
            texts = quality_warnings(section.id, plan, dataset.samples, dataset.thumbnails)
            for text in filter(None, (*texts, weight_warning(groups))):
                self.emit(Notice(text, level="warning"))
        if augmentation_mode(section) == "disable_cache":
            items = self.items(groups, dataset.source, 0)
            workers = _decode_workers(section)
            unreadable = find_unreadable(items, self.emit, self.transforms.decoders, workers)
        else:
            items = [
                item
                for epoch in range(section.variants)
                for item in self.items(groups, dataset.source, epoch)
            ]
            unreadable = self.encode_missing(
                index, self.stores.latents, items, self.encode, self.emit, "cache"
            )
        for sample, reason in unreadable:
            self._corruption.record(section.id, sample.key, reason)
        self._corruption.check(section.id, num_samples, section.max_corruption_rate)
        self.emit(Notice(_summarize(section.id, groups)))
        self.emit(Notice(f"dataset {section.id!r}:\n{buckets.report(plan)}"))
        report = json.dumps(buckets.as_json(plan), indent=2)
        write_text(self.folder / f"buckets-{index}.json", report)
        lost = {sample for sample, _ in unreadable}
        kept = keep_samples(groups, lambda sample: sample not in lost)
        if not kept:
            raise DataError(
                f"datasets[{index}] ({section.id!r}): no sample is left; the messages above say "
                "why each was left out."
            )
        return PreparedDataset(kept, dataset.source)

    def items(self, groups: Sequence[BucketGroup], source: Source, epoch: int) -> list[EncodeItem]:
        """Return each sample with the random crop and augmentations of an epoch, for encoding."""
        return [
            self.transforms.item(sample, group.size, source, epoch, tiled)
            for group in groups
            for sample in group.samples
            for tiled in (self.tiling.applies_to(group.size, sample.kind),)
        ]

    def encode_missing(
        self,
        index: int,
        store: Store,
        items: Sequence[EncodeItem],
        encode: Callable[[Tensor], Tensor],
        emit: Emit,
        report: str,
    ) -> Unreadable:
        """Encode the samples and masks of a dataset that the cache `store` does not have yet.

        If the cache is in host memory, all entries are then loaded from disk.

        `index` is the position of the dataset in the run file. `report` is the prefix of the folder
        in which the ranks tell each other which samples they could not read. Returns the unreadable
        samples.
        """
        section, encoder = self.run.datasets[index], self.identity["latents"]
        workers, decoders = _decode_workers(section), self.transforms.decoders
        ranks = replace(self.ranks, reports=self.ranks.reports / f"{report}-{index}")
        grid = self.latent_grid

        def latents(some: Sequence[EncodeItem], ranks: Ranks) -> Unreadable:
            return fill_latents(store, some, encode, encoder, emit, decoders, workers, ranks)

        def masks(some: Sequence[EncodeItem], ranks: Ranks) -> Unreadable:
            return fill_masks(store, some, grid, emit, decoders, workers, ranks)

        def latent_keys(some: Sequence[EncodeItem]) -> list[CacheKey]:
            return [latent_key(i.sample, i.size, encoder, i.transform, i.tiled) for i in some]

        unreadable = _fill_and_load(store, items, latents, latent_keys, ranks, emit)
        if section.mask_data_dir is not None:
            readable = _without(items, unreadable)
            keys = partial(mask_keys, latent_grid=grid)
            unreadable += _fill_and_load(store, readable, masks, keys, ranks, emit)
        return unreadable


class RefreshedEpochEncoder:
    """Encodes samples with new random augmentations for each epoch.

    Applies to datasets with `augmentations_cache_mode: refresh_each_epoch`.
    """

    def __init__(
        self,
        preparer: DatasetPreparer,
        groups: Sequence[BucketGroup],
        sources: Mapping[str, Source],
    ) -> None:
        """Encode the samples of these groups; `sources` has the source of each dataset by id."""
        self._preparer = preparer
        self._groups = groups
        self._sources = sources
        self._folder = AugmentationEpochFolder(preparer.folder / FOLDER, preparer.ranks)

    def open_store(self, epoch: int) -> Store:
        """Open the cache for the latents of one epoch."""
        name = f"latents of augmentation epoch {epoch}"
        return self._preparer.stores.open_latents(name, self._folder.path(epoch))

    def encode(self, store: Store, epoch: int, stopping: threading.Event) -> None:
        """Encode all samples for an epoch into its cache.

        If the event `stopping` is set meanwhile, raises `EncodingStopped` before the next batch.
        """

        def encode(pixels: Tensor) -> Tensor:
            if stopping.is_set():
                raise EncodingStopped
            return self._preparer.encode(pixels)

        def emit(event: Event) -> None:
            if isinstance(event, StageProgress):
                event = replace(event, stage=f"encoding augmentation epoch {epoch}")
            self._preparer.emit(event)

        for index, section in enumerate(self._preparer.run.datasets):
            if augmentation_mode(section) == "refresh_each_epoch":
                groups = [g for g in self._groups if g.samples[0].dataset == section.id]
                items = self._preparer.items(groups, self._sources[section.id], epoch)
                unreadable = self._preparer.encode_missing(
                    index, store, items, encode, emit, f"epoch-{epoch}"
                )
                if unreadable:
                    raise unreadable_now(*unreadable[0])

    def entered(self, epoch: int) -> None:
        """Record that this rank now reads the latents of `epoch`.

        One rank of each machine deletes the latents of epochs that none reads any more.
        """
        if self._preparer.stores.latents_on_disk:
            self._folder.entered(epoch)


def _fill_and_load(
    store: Store,
    items: Sequence[EncodeItem],
    fill: Callable[[Sequence[EncodeItem], Ranks], Unreadable],
    keys_of: Callable[[Sequence[EncodeItem]], list[CacheKey]],
    ranks: Ranks,
    emit: Emit,
) -> Unreadable:
    """Encode the entries that a cache lacks, load all into memory, and encode damaged ones again.

    Each rank repairs the damaged entries that it finds, which may differ between ranks. With
    several ranks, a sample whose repair fails is not left out, because the other ranks would still
    use it. Its entry stays missing, and all ranks find that at the next start of the run.
    """
    unreadable = fill(items, ranks)
    readable = _without(items, unreadable)
    if _load_into_memory(store, keys_of(readable), emit):
        still_unreadable = fill(readable, SINGLE_RANK)
        unreadable += still_unreadable if ranks.world_size == 1 else []
    return unreadable


def _without(items: Sequence[EncodeItem], unreadable: Unreadable) -> list[EncodeItem]:
    lost = {sample for sample, _ in unreadable}
    return [item for item in items if item.sample not in lost]


def _load_into_memory(store: Store, keys: Sequence[str], emit: Emit) -> bool:
    """Load entries of an in-memory cache from disk; return whether some are damaged or missing."""
    lost = store.warm(keys) if isinstance(store, MemoryTier | SharedTier) else []
    if lost:
        text = f"{len(lost)} entries of the cache are damaged or missing; encoding them again"
        emit(Notice(text))
    return bool(lost)


def _decode_workers(section: DatasetSection) -> Prefetch:
    return worker_threads(section.in_memory.num_workers, ENCODE_BATCH_SIZE, section.timeout_s)


def _summarize(dataset: str, groups: Sequence[BucketGroup]) -> str:
    """Describe the buckets of a dataset in one line: their sizes and numbers of samples.

    The line starts with the label "data:", without which the console would not show it.
    """
    total = sum(len(group.samples) for group in groups)
    shown = groups[:MAX_LISTED_BUCKETS]
    sizes = [f"{'x'.join(map(str, group.size))} ({len(group.samples)})" for group in shown]
    sizes += ["..."] * (len(groups) > MAX_LISTED_BUCKETS)
    noun = "bucket" if len(groups) == 1 else "buckets"
    return f"data: {total:,} samples of {dataset} in {len(groups)} {noun}: {', '.join(sizes)}"


# Cache keys of a run


def latent_grid(family: Family, size: Shape) -> tuple[int, int]:
    """Return the height and width of the latents of a bucket, their last two dimensions."""
    *_, rows, columns = family.latent_shape(*size)
    return rows, columns


def _sample_transforms(run: RunFile, family: Family) -> SampleTransforms:
    sections = {d.id: d for d in run.datasets}
    control_size = family.control_size if family.takes_control else None
    return SampleTransforms(sections, run.seed, choose_decoders(), control_size)


def tiling_rule(run: RunFile, family: Family) -> Tiling:
    """Return the rule that decides which samples are encoded and decoded in tiles."""
    can_tile = family.set_tiling(enabled=False)
    return choose_tiling(run.cache_config.vae_tiling, family.name, can_tile)


def required_keys(run: RunFile, family: Family, emit: Emit) -> set[CacheKey]:
    """Return the keys of all cache entries that a run reads, without encoding anything.

    Latents of `refresh_each_epoch` are not included, because they have a folder of their own.
    Raises an error if a sample is unreadable, because its keys cannot be computed.
    """
    folder, identity = Path(run.output_dir), family.identity()
    corruption = CorruptionLog(emit, folder / "corruption.json")
    transforms, tiling = _sample_transforms(run, family), tiling_rule(run, family)
    prompt_names = PromptNames(family.takes_control, transforms)
    texts = validation_texts(run.validation, family)
    keys = {text_key(text, identity["text"]) for text in texts}
    for index, section in enumerate(run.datasets):
        dataset = open_dataset(section, index, emit, corruption, output_dir=folder, seed=run.seed)
        plan = buckets.assign(dataset.samples, section, section.bucket_step or family.pixel_step)
        for size, samples in plan.buckets.items():
            for sample in samples:
                keys |= {
                    text_key(prompt_names(caption, sample, size, epoch), identity["text"])
                    for caption in (*sample.captions, EMPTY_PROMPT)
                    for epoch in prompt_names.epochs(sample)
                }
                if augmentation_mode(section) == "disable_cache":
                    continue
                tiled = tiling.applies_to(size, sample.kind)
                for transform in [transforms(sample, e) for e in range(section.variants)]:
                    keys.add(latent_key(sample, size, identity["latents"], transform, tiled))
                    if sample.mask is not None:
                        grid = latent_grid(family, size)
                        keys.add(mask_key(sample.mask, size, grid, transform))
    if corruption.entries:
        first = corruption.entries[0]
        raise CacheError(
            f"{len(corruption.entries)} samples of the run in {folder} cannot be read, such as "
            f"{first.key!r} of dataset {first.dataset!r}, so it is unknown which entries they "
            "need. Fix or remove these samples first."
        )
    return keys
