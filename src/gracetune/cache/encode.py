"""Encode the samples and prompts that a cache lacks: samples to latents, prompts to embeddings.

Worker threads decode files while the encoder runs on the device. The ranks of a machine share a
store: each encodes the share that the keys assign to it, and finds the others' entries there. Each
machine has a store of its own, because the store's index cannot be shared over a network. This
module uses models only through the `SampleEncoder` protocol.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch

from gracetune.atomic_files import write_text
from gracetune.cache.keys import latent_key, text_key
from gracetune.data.augment import (
    DEFAULT_TRANSFORM,
    SampleTransform,
    render,
    render_audio,
    render_control,
    render_video,
)
from gracetune.data.images import PILLOW
from gracetune.data.prefetch import Prefetch, default_workers, prefetched
from gracetune.data.sample import UnreadableSampleError
from gracetune.data.source import read_unchanged
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.types import Notice, StageProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.batch_reader import PromptNames
    from gracetune.cache.keys import CacheKey
    from gracetune.cache.store import Entry, Store
    from gracetune.config.schema import ValidationSection
    from gracetune.data.batch_order import BucketGroup
    from gracetune.data.images import Decoders
    from gracetune.data.sample import Kind, Sample, Shape, Size
    from gracetune.data.source import Source
    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.types import Event

    Emit = Callable[[Event], None]

Digest = TypeVar("Digest", bound=str)
Item = TypeVar("Item")
Result = TypeVar("Result")

EMPTY_PROMPT = ""
"""The empty prompt, for dropped captions and for classifier-free guidance."""
ENCODE_BATCH_SIZE = 32
"""Maximum number of samples or prompts that are encoded together."""
MAX_BATCH_PIXELS = 8 * 1024 * 1024
"""Maximum number of pixels that are encoded together, unless a single sample has more.

A larger batch is not faster, and a VAE needs hundreds of bytes per pixel.
"""
AUTO_TILE_PIXELS = 2048 * 2048
"""Pixels of an image or a video frame above which `vae_tiling: auto` encodes in tiles."""
NOT_FINITE = "the VAE encodes it to values that are not finite"
POLL_S = 0.05
"""Seconds between two checks whether another rank has written its list of unreadable samples."""


class SampleEncoder(Protocol):
    """The methods of a model family that encode samples and prompts for the cache."""

    @property
    def name(self) -> str:
        """Name of the model family, such as `flux`."""
        ...

    @property
    def takes_control(self) -> bool:
        """True if prompts are encoded together with control images."""
        ...

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of each control image of a sample of this size."""
        ...

    def text_control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of each control image for the text encoder."""
        ...

    @property
    def pixel_step(self) -> int:
        """Width and height of an image must be multiples of this number of pixels."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Return the encoder ids for cache keys, by kind of entry: `latents` and `text`.

        An id changes if the encoder would produce other results.
        """
        ...

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of one sample's latents, given the shape of its bucket."""
        ...

    def set_tiling(self, enabled: bool) -> bool:
        """Turn tiled encoding on or off; return False if the encoder cannot tile."""
        ...

    def encode(self, media: Tensor) -> Tensor:
        """Encode a batch of images, clips or audio to latents."""
        ...

    def encode_text(
        self, captions: Sequence[str], images: Sequence[Sequence[Tensor]] = ()
    ) -> list[dict[str, Tensor]]:
        """Encode prompts; `images` has the control images of each prompt, if there are any."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process, and the ranks that encode data with it."""

    rank: int = 0
    world_size: int = 1
    reports: Path = Path()
    """Folder in which each rank lists its unreadable samples, new for every run."""
    timeout_s: float = 1800.0
    """Seconds without any progress after which waiting for another rank fails."""
    local_ranks: tuple[int, ...] = ()
    """The ranks on this machine, which share a cache; empty if all ranks are on it."""
    machine: int = 0
    """Number of this machine among those of the run."""

    @property
    def shares_cache(self) -> bool:
        """True if other ranks of this machine use the same cache."""
        return len(self.cache_ranks) > 1

    @property
    def is_first(self) -> bool:
        """True on one rank of each machine."""
        return self.rank == self.cache_ranks[0]

    @property
    def cache_ranks(self) -> Sequence[int]:
        """The ranks that share a cache with this one, including itself."""
        return self.local_ranks or range(self.world_size)

    def machine_folder(self, folder: Path) -> Path:
        """Return the folder of this machine's cache: `folder`, or a subfolder of it.

        The first machine uses the folder itself, like a run on one machine.
        """
        return folder / f"machine-{self.machine}" if self.machine else folder

    def own_share(self, keys: Sequence[Digest]) -> list[Digest]:
        """Return those of the keys whose entries this rank encodes.

        Each key by itself determines its rank, among the ranks that share a cache. A rank that
        starts later finds fewer keys missing, and all ranks must still divide them in the same way.
        """
        count, place = len(self.cache_ranks), self.cache_ranks.index(self.rank)
        return [key for key in keys if int(key[:8], 16) % count == place]

    def report_progress(self, stage: str, count: int) -> None:
        """Tell the ranks of other machines how many entries this rank has done.

        They cannot see this machine's cache, and may have nothing to do themselves.
        """
        if len(self.cache_ranks) < self.world_size:
            write_text(self._report(stage, self.rank).with_suffix(".progress"), str(count))

    def exchange(
        self,
        stage: str,
        unreadable: dict[str, str],
        num_done: Callable[[], int],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> dict[str, str]:
        """Exchange unreadable samples with the other ranks: write this rank's, wait for theirs.

        Returns those of all ranks, as a mapping from cache key to the reason. `stage` is the name
        of the work that the ranks do, such as "rendering masks". `num_done` counts the finished
        entries of this machine's cache; the timeout restarts when the count changes, or when a rank
        of another machine has reported progress.
        """
        if self.world_size == 1:
            return unreadable
        write_text(self._report(stage, self.rank), json.dumps(unreadable))
        merged: dict[str, str] = {}
        for rank in range(self.world_size):
            path, before, since = self._report(stage, rank), (-1, ""), clock()
            while not path.exists():
                done = num_done(), self._progress_of(stage, rank)
                if done != before:
                    before, since = done, clock()
                if clock() - since > self.timeout_s:
                    raise RunFailedError(
                        f"Rank {self.rank} waits for rank {rank} to finish {stage}, but there was "
                        f"no progress for distributed.timeout_s ({self.timeout_s:g} s). Check the "
                        "output of that rank, or raise distributed.timeout_s."
                    )
                sleep(POLL_S)
            merged |= json.loads(path.read_text())
        return merged

    def _report(self, stage: str, rank: int) -> Path:
        return self.reports / f"{stage.replace(' ', '-')}-{rank}.json"

    def _progress_of(self, stage: str, rank: int) -> str:
        with suppress(FileNotFoundError):
            return self._report(stage, rank).with_suffix(".progress").read_text()
        return ""


SINGLE_RANK = Ranks()


def encoding_ranks(group: RankGroup, reports: Path, timeout_s: float) -> Ranks:
    """Return the ranks that encode a run's data; `Ranks` explains the arguments.

    Every rank must call this at the same time. Raises an error on all ranks if one of them does not
    see the folder `reports`, because it would wait for the others in vain.
    """
    mark = reports / "seen"
    if group.is_main and group.world_size > 1:
        write_text(mark, "")
    group.wait()  # until the file is written
    blind = [rank for rank, sees in enumerate(group.gather(mark.exists())) if not sees]
    if blind and group.world_size > 1:
        raise ConfigError(
            f"output_dir must be one folder that all ranks can read, but {group.name(blind[0])} "
            f"does not see {mark}, which {group.name(0)} has written. Set output_dir to a folder "
            "on a disk that all machines share."
        )
    first = group.local_ranks[0]
    machines = sorted(set(group.gather(first)))
    return Ranks(
        group.rank,
        group.world_size,
        reports,
        timeout_s,
        tuple(group.local_ranks),
        machines.index(first),
    )


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """A sample to encode: its file, its bucket and its transform."""

    sample: Sample
    size: Shape
    """Shape of the sample's bucket, such as width and height."""
    source: Source
    """The dataset's source, from which the sample's file is read."""
    transform: SampleTransform = DEFAULT_TRANSFORM
    """Crop and augmentations of the sample."""
    tiled: bool = False
    """True if the sample is encoded in tiles."""
    control_size: Size | None = None
    """Width and height of each of the sample's control images; None if the model takes none."""


def fill_latents(
    store: Store,
    items: Sequence[EncodeItem],
    encode: Callable[[Tensor], Tensor],
    encoder: str,
    emit: Emit,
    decoders: Decoders = PILLOW,
    prefetch: Prefetch | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> list[tuple[Sample, str]]:
    """Encode the samples that the store lacks; return unreadable samples with the reason.

    `encoder` is the encoder's id, a part of the cache keys. Files with equal bytes are encoded
    once. `prefetch` sets the number of decoding threads.
    """
    keyed = dict(_with_keys(items, encoder))
    missing = sorted(missing_keys(store, keyed), key=lambda key: (keyed[key].size, key))
    own = ranks.own_share(missing)
    pixels = decode_items([keyed[key] for key in own], decoders, prefetch)
    progress = EncodingProgress("encoding latents", len(own), "samples", emit)
    in_parts: _HalvingEncoder[tuple[CacheKey, Tensor], Tensor] = _HalvingEncoder(
        lambda part: encode(torch.stack([x for _, x in part])), "samples", emit
    )
    bad: dict[str, str] = {}
    for size, same_size in groupby(own, key=lambda key: keyed[key].size):
        batch_size = max(1, min(ENCODE_BATCH_SIZE, MAX_BATCH_PIXELS // prod(size)))
        for chunk in _chunks(list(same_size), batch_size):
            decoded = list(zip(chunk, islice(pixels, len(chunk)), strict=True))
            bad |= {key: x for key, x in decoded if isinstance(x, str)}
            good = [(key, x) for key, x in decoded if not isinstance(x, str)]
            for part, latents in in_parts(good):
                on_host = latents.cpu()
                is_finite = on_host.flatten(1).isfinite().all(1).tolist()
                encoded = list(zip(part, on_host, is_finite, strict=True))
                bad |= {key: NOT_FINITE for (key, _), _, finite in encoded if not finite}
                store.put_many(
                    {key: {"latents": one.clone()} for (key, _), one, finite in encoded if finite}
                )
            ranks.report_progress("encoding latents", progress.advance(len(chunk)))
    bad = ranks.exchange("encoding latents", bad, lambda: sum(store.has(missing)))
    if not bad:
        return []
    # A sample is unreadable if any of its variants is.
    return list({i.sample: bad[key] for key, i in _with_keys(items, encoder) if key in bad}.items())


def fill_text(
    store: Store,
    prompts: Iterable[str],
    encode: Callable[[Sequence[str]], Sequence[Entry]],
    encoder: str,
    emit: Emit,
    ranks: Ranks = SINGLE_RANK,
) -> None:
    """Encode the prompts that the store lacks, each distinct prompt once."""
    keyed = {text_key(prompt, encoder): prompt for prompt in sorted(set(prompts))}
    missing = missing_keys(store, keyed)
    own = ranks.own_share(missing)
    progress = EncodingProgress("encoding captions", len(own), "captions", emit)
    in_parts: _HalvingEncoder[CacheKey, Sequence[Entry]] = _HalvingEncoder(
        lambda part: encode([keyed[key] for key in part]), "captions", emit
    )
    for chunk in _chunks(own):
        for part, entries in in_parts(chunk):
            store.put_many(
                {
                    key: {name: t.cpu() for name, t in entry.items()}
                    for key, entry in zip(part, entries, strict=True)
                }
            )
        ranks.report_progress("encoding captions", progress.advance(len(chunk)))
    ranks.exchange("encoding captions", {}, lambda: sum(store.has(missing)))


def find_unreadable(
    items: Sequence[EncodeItem], emit: Emit, decoders: Decoders, prefetch: Prefetch
) -> list[tuple[Sample, str]]:
    """Decode every sample once and return the unreadable ones with the reason.

    For datasets that are encoded during training, to find unreadable samples before it starts.
    """
    progress = EncodingProgress("checking samples", len(items), "samples", emit)
    bad = []
    for item, pixels in zip(items, decode_items(items, decoders, prefetch), strict=True):
        if isinstance(pixels, str):
            bad.append((item.sample, pixels))
        progress.advance(1)
    return bad


def missing_keys(store: Store, keys: Iterable[CacheKey]) -> list[CacheKey]:
    """Return the keys for which the store has no entry."""
    keys = list(keys)
    return [key for key, found in zip(keys, store.has(keys), strict=True) if not found]


def decode_items(
    items: Sequence[EncodeItem], decoders: Decoders, prefetch: Prefetch | None
) -> Iterator[Tensor | str]:
    """Decode samples in worker threads; yield, in order, pixels or why a sample is unreadable."""
    return prefetched(
        items,
        lambda item: decode_item(item, decoders),
        lambda item: f"dataset {item.sample.dataset!r}: {item.sample.key}",
        prefetch or Prefetch(default_workers(), ENCODE_BATCH_SIZE),
    )


def decode_item(item: EncodeItem, decoders: Decoders) -> Tensor | str:
    """Return the decoded, cropped and augmented sample, or the reason why it is unreadable.

    The values of control images, which may have another size, follow those of the sample's image as
    more channels; those of each control image are padded with zeros to whole channels.
    """
    sample, transform = item.sample, item.transform
    try:
        data = read_unchanged(item.source, sample.key, sample.digest)
        if sample.kind == "video":
            return render_video(data, transform, item.size)
        if sample.kind == "audio":
            return render_audio(data, transform, item.size)
        size = (item.size[0], item.size[1])
        pixels = render(data, transform, size, decoders)
        if item.control_size is None:
            return pixels
        values = [pixels.flatten()]
        for companion in sample.controls:
            data = read_unchanged(item.source, companion.key, companion.digest)
            control = render_control(data, transform, size, item.control_size, decoders)
            padding = -control.numel() % prod(size)
            values += [control.flatten(), control.new_zeros(padding)]
        return torch.cat(values).view(-1, *pixels.shape[1:])
    except UnreadableSampleError as error:
        return error.reason
    except OSError as error:
        return str(error)


def unreadable_now(sample: Sample, reason: str) -> RunFailedError:
    """Return the error for a sample that was readable at the start of the run and now is not."""
    return RunFailedError(
        f"dataset {sample.dataset!r}: {sample.key} was readable when the run started and is not "
        f"now: {reason}. Restore the file, then run the same command again to resume."
    )


class _HalvingEncoder(Generic[Item, Result]):
    """Encodes samples or prompts in batches; halves the batch size for good if memory runs out."""

    def __init__(self, encode: Callable[[Sequence[Item]], Result], unit: str, emit: Emit) -> None:
        self._encode = encode
        self._unit = unit
        self._emit = emit
        self._batch_size = ENCODE_BATCH_SIZE

    def __call__(self, items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], Result]]:
        """Split the items into batches that fit into memory; yield each batch with its encoding."""
        start = 0
        while start < len(items):
            part = items[start : start + self._batch_size]
            try:
                with torch.no_grad():
                    encoded = self._encode(part)
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                self._halve(len(part), error)
                continue
            yield part, encoded
            start += len(part)

    def _halve(self, tried: int, error: RuntimeError) -> None:
        if tried == 1:
            raise RunFailedError(
                f"Encoding runs out of memory even with one of the {self._unit} at a time: "
                f"{error}. Set cache_config.vae_tiling: true, lower datasets[].resolution, or end "
                "other programs on the GPU."
            ) from error
        self._batch_size = tried // 2
        text = f"encoding {tried} {self._unit} at a time ran out of memory; continuing with"
        self._emit(Notice(f"{text} {self._batch_size}", level="warning", fallback=True))


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if torch ran out of memory, or cuBLAS or cuDNN had none for a workspace."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        mark in str(error) for mark in ("ALLOC_FAILED", "unable to find an engine")
    )


class EncodingProgress:
    """Emits events with the progress of encoding or mask rendering, about every 32 samples."""

    def __init__(self, stage: str, total: int, unit: str, emit: Emit) -> None:
        self._stage, self._total, self._unit, self._emit = stage, total, unit, emit
        self._done = 0
        self._started = time.monotonic()

    def advance(self, count: int) -> int:
        """Add `count` finished samples and return how many are finished.

        Emits an event if they complete a batch or all work.
        """
        self._done += count
        passed = self._done // ENCODE_BATCH_SIZE > (self._done - count) // ENCODE_BATCH_SIZE
        if passed or self._done == self._total:
            seconds = time.monotonic() - self._started
            self._emit(
                StageProgress(self._stage, self._done, self._total, self._unit, seconds=seconds)
            )
        return self._done


def _with_keys(items: Sequence[EncodeItem], encoder: str) -> Iterator[tuple[CacheKey, EncodeItem]]:
    return ((latent_key(i.sample, i.size, encoder, i.transform, i.tiled), i) for i in items)


def _chunks(items: Sequence[Item], length: int = ENCODE_BATCH_SIZE) -> Iterable[Sequence[Item]]:
    return (items[i : i + length] for i in range(0, len(items), length))


# Prompts


class _Prompt(NamedTuple):
    """A caption, and the sample whose control images it is encoded with."""

    caption: str
    sample: Sample
    size: Shape
    epoch: int


class PromptEncoder:
    """Collects all prompts of a run, and encodes those with given cache names.

    A prompt's cache name is its caption, plus its control images if the text encoder sees them.
    """

    def __init__(
        self,
        encoder: SampleEncoder,
        groups: Iterable[BucketGroup],
        sources: Mapping[str, Source],
        prompt_names: PromptNames,
        others: Iterable[str] = (),
    ) -> None:
        """Collect the prompts of all samples in the bucket groups.

        `sources` are the files of each dataset, from which control images are read. `others` are
        texts without a sample, for a family whose text encoder sees no control images.
        """
        self._encoder, self._sources = encoder, sources
        self._transforms = prompt_names.transforms
        self._others = tuple(others)
        self._prompts: dict[str, _Prompt] = {}
        for group in groups:
            for sample in group.samples:
                epochs = prompt_names.epochs(sample)
                for caption, epoch in product((*sample.captions, EMPTY_PROMPT), epochs):
                    name = prompt_names(caption, sample, group.size, epoch)
                    self._prompts.setdefault(name, _Prompt(caption, sample, group.size, epoch))

    @property
    def names(self) -> list[str]:
        """Cache names of all prompts, including the empty one, in no particular order."""
        return [*{**self._prompts, **dict.fromkeys(self._others)}]

    def encode(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        """Return the text embeddings of the prompts with these cache names."""
        if not self._encoder.takes_control:
            return self._encoder.encode_text(names)
        prompts = [self._prompts[name] for name in names]
        captions = [prompt.caption for prompt in prompts]
        return self._encoder.encode_text(captions, [self._controls(prompt) for prompt in prompts])

    def _controls(self, prompt: _Prompt) -> list[Tensor]:
        """Decode a prompt's control images, cropped and augmented like its sample."""
        sample, size = prompt.sample, (prompt.size[0], prompt.size[1])
        transform, decoders = self._transforms(sample, prompt.epoch), self._transforms.decoders
        source, control_size = self._sources[sample.dataset], self._encoder.text_control_size(*size)
        rendered = []
        for control in sample.controls:
            try:
                data = read_unchanged(source, control.key, control.digest)
                rendered.append(render_control(data, transform, size, control_size, decoders))
            except (UnreadableSampleError, OSError) as error:
                reason = f"its control image {control.key}: {error}"
                raise unreadable_now(sample, reason) from error
        return rendered


def validation_texts(section: ValidationSection, encoder: SampleEncoder) -> set[str]:
    """Return the prompts of validation in a run file, negative ones included, that are cached.

    Those of an encoder that sees control images are not: their images are not in a dataset.
    """
    if encoder.takes_control:
        return set()
    prompts = section.prompts or ()
    own = [prompt for prompt in prompts if not isinstance(prompt, str)]
    return {
        section.negative_prompt,
        *(prompt for prompt in prompts if isinstance(prompt, str)),
        *(prompt.prompt for prompt in own),
        *(prompt.negative_prompt or EMPTY_PROMPT for prompt in own),
    }


# Tiling. Encoding large images and clips in tiles needs far less memory; the latents differ
# slightly. A fixed rule decides which sizes are tiled, not an out-of-memory error: tiled latents
# have other keys, and a run must find the latents that another run has encoded.


@dataclass(frozen=True, slots=True)
class Tiling:
    """The rule that decides which samples are encoded in tiles."""

    above_pixels: int | None = None
    """Tile images and frames with more pixels than this; None tiles nothing."""

    def applies_to(self, size: Shape, kind: Kind) -> bool:
        """Return True if samples of this size and kind are encoded in tiles; audio never is."""
        if kind == "audio" or self.above_pixels is None:
            return False
        return size[0] * size[1] > self.above_pixels


NO_TILING = Tiling()


def choose_tiling(setting: bool | Literal["auto"], family: str, can_tile: bool) -> Tiling:
    """Return the tiling rule for a value of `cache_config.vae_tiling`.

    Raises an error for `true` if the family's VAE cannot tile.
    """
    if setting is True and not can_tile:
        raise ConfigError(
            f"cache_config.vae_tiling is true, but the encoder of {family} cannot work in tiles. "
            "Remove the setting."
        )
    if setting is False or not can_tile:
        return NO_TILING
    return Tiling(0 if setting is True else AUTO_TILE_PIXELS)


class ExclusiveEncoder:
    """A thread-safe encoder: calls run one at a time, tiled if the `tiling` rule says so.

    A background thread encodes the next augmentation epoch while training may encode as well. A
    video VAE keeps frames between the calls for one clip, so two clips at once would mix silently.
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], set_tiling: Callable[[bool], bool], tiling: Tiling
    ) -> None:
        self._encode = encode
        self._set_tiling = set_tiling
        self._tiling = tiling
        self._lock = threading.Lock()

    def __call__(self, media: Tensor) -> Tensor:
        with self._lock:
            if self._tiling.above_pixels is not None:
                self._set_tiling(
                    self._tiling.applies_to((media.shape[-1], media.shape[-2]), "image")
                )
            return self._encode(media)
