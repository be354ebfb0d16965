"""Encoding what the cache does not hold yet: pictures by bucket, captions once each.

The encoders arrive as callables; which model they belong to is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import torch

from gracetune.cache.keys import latent_key, text_key
from gracetune.data.decoders import PILLOW
from gracetune.data.parallel import default_workers
from gracetune.data.prefetch import Prefetch, prefetched
from gracetune.data.recipe import PLAIN, Recipe, render
from gracetune.data.sample import UnreadableSampleError
from gracetune.events.types import StageProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from gracetune.cache.store import Entry, Store
    from gracetune.data.decoders import Decoders
    from gracetune.data.sample import Sample
    from gracetune.data.source import Source
    from gracetune.events.types import Event

T = TypeVar("T")

BATCH = 32
"""Pictures or captions encoded together."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A sample with the size it is fitted to and the source that has its bytes."""

    sample: Sample
    size: tuple[int, int]
    source: Source
    recipe: Recipe = PLAIN


def fill_latents(
    store: Store,
    pictures: Sequence[Picture],
    encode: Callable[[Tensor], Tensor],
    encoder: str,
    tell: Callable[[Event], None],
    decoders: Decoders = PILLOW,
    prefetch: Prefetch | None = None,
) -> list[tuple[Sample, str]]:
    """Encode what is missing; gives back the samples that could not be read, with the reason.

    The next pictures are decoded while the encoder works; `prefetch` says by whom.
    """
    missing = [p for p in pictures if store.get(_key_of(p, encoder)) is None]
    missing.sort(key=lambda picture: picture.size)
    rendered = prefetched(
        missing,
        lambda picture: _pixels(picture, decoders),
        lambda picture: f"data set {picture.sample.dataset!r}: {picture.sample.key}",
        prefetch or Prefetch(default_workers(), BATCH),
    )
    unreadable: list[tuple[Sample, str]] = []
    done = 0
    for size in dict.fromkeys(picture.size for picture in missing):
        for chunk in _chunks([p for p in missing if p.size == size]):
            pixels = list(zip(chunk, islice(rendered, len(chunk)), strict=True))
            good = [(p, x) for p, x in pixels if not isinstance(x, str)]
            unreadable += [(p.sample, x) for p, x in pixels if isinstance(x, str)]
            if good:
                latents = encode(torch.stack([x for _, x in good]))
                for (picture, _), latent in zip(good, latents.cpu(), strict=True):
                    store.put(_key_of(picture, encoder), {"latents": latent.clone()})
            done += len(chunk)
            tell(StageProgress("encoding pictures", done, len(missing), "pictures"))
    return unreadable


def fill_text(
    store: Store,
    captions: Iterable[str],
    encode: Callable[[Sequence[str]], Sequence[Entry]],
    encoder: str,
    tell: Callable[[Event], None],
) -> None:
    """Encode each distinct caption that is missing."""
    distinct = sorted(set(captions))
    missing = [text for text in distinct if store.get(text_key(text, encoder)) is None]
    done = 0
    for chunk in _chunks(missing):
        for caption, entry in zip(chunk, encode(chunk), strict=True):
            store.put(text_key(caption, encoder), {k: t.cpu() for k, t in entry.items()})
        done += len(chunk)
        tell(StageProgress("encoding captions", done, len(missing), "captions"))


def _key_of(picture: Picture, encoder: str) -> str:
    return latent_key(picture.sample, picture.size, encoder, picture.recipe)


def _pixels(picture: Picture, decoders: Decoders) -> Tensor | str:
    """The fitted picture, or why there is none."""
    try:
        data = picture.source.read(picture.sample.key)
        return render(data, picture.recipe, picture.size, decoders)
    except UnreadableSampleError as error:
        return error.reason
    except OSError as error:
        return str(error)


def _chunks(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[i : i + BATCH] for i in range(0, len(items), BATCH))
