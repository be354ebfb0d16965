"""Encoding what the cache does not hold yet: pictures by bucket, captions once each.

The encoders arrive as callables; which model they belong to is not known here. Pictures are decoded
by workers while the encoder works. Ranks take a share each, and find the others' in the store.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from itertools import groupby, islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import torch

from gracetune.cache.keys import latent_key, text_key
from gracetune.data.augment import (
    PLAIN,
    SampleTransform,
    render,
    render_control,
    render_sound,
    render_video,
)
from gracetune.data.images import PILLOW
from gracetune.data.prefetch import Prefetch, default_workers, prefetched
from gracetune.data.sample import UnreadableSampleError
from gracetune.atomic_files import write_text
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.types import Notice, StageProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from gracetune.cache.keys import CacheKey
    from gracetune.cache.store import Entry, Store
    from gracetune.data.images import Decoders
    from gracetune.data.sample import Sample, Shape
    from gracetune.data.source import Source
    from gracetune.events.types import Event

    Emit = Callable[[Event], None]
    from gracetune.data.sample import Kind


Digest = TypeVar("Digest", bound=str)

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of them this process is."""

    rank: int = 0
    world_size: int = 1
    reports: Path = Path()
    """A folder that no earlier run has used; alone, nothing is written."""
    timeout_s: float = 1800.0
    """How long the others may go without getting anything done."""

    def own_share(self, keys: Sequence[Digest]) -> list[Digest]:
        """Which of these digests are this rank's: by themselves, whatever else is in the list.

        A rank that comes late finds less missing, and must not deal the rest out anew.
        """
        return [key for key in keys if int(key[:8], 16) % self.world_size == self.rank]

    def exchange(
        self,
        what: str,
        mine: dict[str, str],
        num_done: Callable[[], int],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> dict[str, str]:
        """Tell what this rank found, and wait for what the others did; `num_done` shows life."""
        if self.world_size == 1:
            return mine
        write_text(self._report(what, self.rank), json.dumps(mine))
        everyone: dict[str, str] = {}
        for rank in range(self.world_size):
            path, before, since = self._report(what, rank), -1, clock()
            while not path.exists():
                done = num_done()
                if done != before:
                    before, since = done, clock()
                if clock() - since > self.timeout_s:
                    raise RunFailedError(
                        f"rank {self.rank} waits for rank {rank} to finish {what}; nothing was "
                        f"done for distributed.timeout_s ({self.timeout_s:g} s). "
                        "See that rank's output, or raise timeout_s."
                    )
                sleep(POLL_S)
            everyone |= json.loads(path.read_text())
        return everyone

    def _report(self, what: str, rank: int) -> Path:
        return self.reports / f"{what.replace(' ', '-')}-{rank}.json"


SINGLE_RANK = Ranks()


# ------------------------------------------------------------------------------------------
# Encoding what the cache does not hold yet: pictures by bucket, captions once each.
#
# The encoders arrive as callables; which model they belong to is not known here. Pictures are
# decoded
# by workers while the encoder works. Ranks take a share each, and find the others' in the store.


Item = TypeVar("Item")
Result = TypeVar("Result")

ENCODE_BATCH_SIZE = 32
"""Pictures or captions encoded together, as long as memory allows it."""
MAX_BATCH_PIXELS = 8 * 1024 * 1024
"""Of what is encoded together: more keeps no device busier, and VAEs hold hundreds of bytes of
each. One large clip may have more."""


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """A sample of any kind with the shape it is fitted to and the source that has its bytes."""

    sample: Sample
    size: Shape
    source: Source
    transform: SampleTransform = PLAIN
    tiled: bool = False
    """Whether the encoder works by tiles."""


def fill_latents(
    store: Store,
    pictures: Sequence[EncodeItem],
    encode: Callable[[Tensor], Tensor],
    encoder: str,
    emit: Emit,
    decoders: Decoders = PILLOW,
    prefetch: Prefetch | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> list[tuple[Sample, str]]:
    """Encode what is missing; gives back the samples that could not be read, with the reason.

    Files with equal bytes are encoded once. `prefetch` says who decodes.
    """
    keyed = dict(_each(pictures, encoder))
    missing = sorted(_missing(store, keyed), key=lambda key: (keyed[key].size, key))
    mine = ranks.own_share(missing)
    pixels = decode_items([keyed[key] for key in mine], decoders, prefetch)
    pace = _Pace("encoding pictures", len(mine), "pictures", emit)
    fitting: _Fitting[tuple[CacheKey, Tensor], Tensor] = _Fitting(
        lambda part: encode(torch.stack([x for _, x in part])), "pictures", emit
    )
    bad: dict[str, str] = {}
    for size, alike in groupby(mine, key=lambda key: keyed[key].size):
        for chunk in _chunks(list(alike), max(1, min(ENCODE_BATCH_SIZE, MAX_BATCH_PIXELS // prod(size)))):
            decoded = list(zip(chunk, islice(pixels, len(chunk)), strict=True))
            bad |= {key: x for key, x in decoded if isinstance(x, str)}
            good = [(key, x) for key, x in decoded if not isinstance(x, str)]
            for part, latents in fitting(good):
                pairs = zip(part, latents.cpu(), strict=True)
                store.put_many({key: {"latents": latent.clone()} for (key, _), latent in pairs})
            pace.advance(len(chunk))
    found = ranks.exchange("encoding pictures", bad, lambda: sum(store.has(missing)))
    if not found:
        return []
    # Of several variants one that could be read does not make up for another.
    bad_samples = {p.sample: found[key] for key, p in _each(pictures, encoder) if key in found}
    return list(bad_samples.items())


def fill_text(
    store: Store,
    captions: Iterable[str],
    encode: Callable[[Sequence[str]], Sequence[Entry]],
    encoder: str,
    emit: Emit,
    ranks: Ranks = SINGLE_RANK,
) -> None:
    """Encode each distinct caption that is missing."""
    keyed = {text_key(caption, encoder): caption for caption in sorted(set(captions))}
    missing = _missing(store, keyed)
    mine = ranks.own_share(missing)
    pace = _Pace("encoding captions", len(mine), "captions", emit)
    fitting: _Fitting[CacheKey, Sequence[Entry]] = _Fitting(
        lambda part: encode([keyed[key] for key in part]), "captions", emit
    )
    for chunk in _chunks(mine):
        for part, entries in fitting(chunk):
            store.put_many(
                {
                    key: {name: t.cpu() for name, t in entry.items()}
                    for key, entry in zip(part, entries, strict=True)
                }
            )
        pace.advance(len(chunk))
    ranks.exchange("encoding captions", {}, lambda: sum(store.has(missing)))


def find_unreadable(
    pictures: Sequence[EncodeItem], emit: Emit, decoders: Decoders, prefetch: Prefetch
) -> list[tuple[Sample, str]]:
    """Decode every picture once and keep none: for runs that encode while they train."""
    pace = _Pace("reading pictures", len(pictures), "pictures", emit)
    bad = []
    for picture, pixels in zip(pictures, decode_items(pictures, decoders, prefetch), strict=True):
        if isinstance(pixels, str):
            bad.append((picture.sample, pixels))
        pace.advance(1)
    return bad


def decode_item(picture: EncodeItem, decoders: Decoders) -> Tensor | str:
    """The fitted picture, or why there is none."""
    try:
        return _decoded(picture, decoders)
    except UnreadableSampleError as error:
        return error.reason
    except OSError as error:
        return str(error)


def _decoded(picture: EncodeItem, decoders: Decoders) -> Tensor:
    """As the kind of sample asks; a control picture follows as three more channels."""
    sample, recipe, read = picture.sample, picture.transform, picture.source.read
    match sample.kind:
        case "video":
            return render_video(read(sample.key), recipe, picture.size)
        case "audio":
            return render_sound(read(sample.key), recipe, picture.size)
    size = (picture.size[0], picture.size[1])
    controls = [
        render_control(read(companion.key), recipe, size, decoders)
        for companion in sample.companions
        if companion.role == "control"
    ]
    pixels = render(read(sample.key), recipe, size, decoders)
    return torch.cat([pixels, *controls]) if controls else pixels


class _Fitting(Generic[Item, Result]):
    """An encoder whose batch is halved when memory runs out, and stays so."""

    def __init__(self, encode: Callable[[Sequence[Item]], Result], unit: str, emit: Emit) -> None:
        self._encode = encode
        self._unit = unit
        self._emit = emit
        self._most = ENCODE_BATCH_SIZE

    def __call__(self, items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], Result]]:
        """Parts that fit, each with what the encoder made of it."""
        start = 0
        while start < len(items):
            part = items[start : start + self._most]
            try:
                with torch.no_grad():
                    made = self._encode(part)
            except RuntimeError as error:
                if not _is_full(error):
                    raise
                self._halve(len(part), error)
                continue
            yield part, made
            start += len(part)

    def _halve(self, tried: int, error: RuntimeError) -> None:
        if tried == 1:
            raise RunFailedError(
                f"encoding runs out of memory with one of the {self._unit}: {error}. "
                "Set cache_config.vae_tiling: true, lower datasets[].resolution, or free the "
                "device."
            ) from error
        self._most = tried // 2
        text = f"encoding {tried} {self._unit} at once ran out of memory; going on by {self._most}"
        self._emit(Notice(text, level="warning", fallback=True))


def _is_full(error: RuntimeError) -> bool:
    """Whether memory ran out; libraries that lack work space have words of their own for it."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        mark in str(error) for mark in ("ALLOC_FAILED", "unable to find an engine")
    )


class _Pace:
    """Tells how far a stage is and since when; sinks make pictures a second and an ETA of it."""

    def __init__(self, stage: str, total: int, unit: str, emit: Emit) -> None:
        self._stage, self._total, self._unit, self._emit = stage, total, unit, emit
        self._done = 0
        self._began_at = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        passed = self._done // ENCODE_BATCH_SIZE > (self._done - count) // ENCODE_BATCH_SIZE
        if passed or self._done == self._total:
            seconds = time.monotonic() - self._began_at
            self._emit(
                StageProgress(self._stage, self._done, self._total, self._unit, seconds=seconds)
            )


def _each(pictures: Sequence[EncodeItem], encoder: str) -> Iterator[tuple[CacheKey, EncodeItem]]:
    return ((latent_key(p.sample, p.size, encoder, p.transform, p.tiled), p) for p in pictures)


def _missing(store: Store, keyed: dict[CacheKey, Item]) -> list[CacheKey]:
    keys = list(keyed)
    return [key for key, there in zip(keys, store.has(keys), strict=True) if not there]


def decode_items(
    pictures: Sequence[EncodeItem], decoders: Decoders, prefetch: Prefetch | None
) -> Iterator[Tensor | str]:
    """Fitted by workers, in order: pixels, or why there are none."""
    return prefetched(
        pictures,
        lambda picture: decode_item(picture, decoders),
        lambda picture: f"data set {picture.sample.dataset!r}: {picture.sample.key}",
        prefetch or Prefetch(default_workers(), ENCODE_BATCH_SIZE),
    )


def _chunks(items: Sequence[Item], most: int = ENCODE_BATCH_SIZE) -> Iterable[Sequence[Item]]:
    return (items[i : i + most] for i in range(0, len(items), most))


# ------------------------------------------------------------------------------------------
# Encoding by tiles: large pictures and clips need far less memory so, for slightly other latents.
#
# Which sizes are tiled is a rule, not a reaction to a full memory: keys tell tiled latents from
# whole
# ones, and a run must find again what another run encoded.


AUTO_TILE_PIXELS = 2048 * 2048
"""Of one picture or frame: above this, `auto` tiles."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """From which size on an encoder works by tiles."""

    above_pixels: int | None = None
    """Pixels of a frame; none: never."""

    def applies_to(self, size: Shape, kind: Kind) -> bool:
        """Whether samples of this size are encoded by tiles; sounds never are."""
        return kind != "audio" and self.above_pixels is not None and size[0] * size[1] > self.above_pixels


NO_TILING = Tiling()


def choose_tiling(asked: bool | Literal["auto"], family: str, can_tile: bool) -> Tiling:
    """What `cache_config.vae_tiling` means for this family."""
    if asked is True and not can_tile:
        raise ConfigError(
            f"cache_config.vae_tiling is true; the encoder of {family} has no tiles. Leave it out."
        )
    if asked is False or not can_tile:
        return NO_TILING
    return Tiling(0 if asked is True else AUTO_TILE_PIXELS)


def serialize_encoder(
    encode: Callable[[Tensor], Tensor], tile: Callable[[bool], bool], tiling: Tiling
) -> Callable[[Tensor], Tensor]:
    """The encoder for one thread at a time, by tiles where the size asks for it; `tile` switches.

    A generation is encoded beside training, which may encode too. A VAE of clips keeps frames
    between its calls: without turns, either would go on with the other's, and no error would tell.
    """
    turns = threading.Lock()

    def encoded(media: Tensor) -> Tensor:
        with turns:
            if tiling.above_pixels is not None:
                tile(tiling.applies_to((media.shape[-1], media.shape[-2]), "image"))
            return encode(media)

    return encoded
