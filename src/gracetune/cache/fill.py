"""Encoding what the cache does not hold yet: pictures by bucket, captions once each.

The encoders arrive as callables; which model they belong to is not known here.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from gracetune.cache.keys import latent_key, text_key
from gracetune.data.images import UnreadableImageError, decode, fit
from gracetune.events.types import StageProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from gracetune.cache.store import Entry, Store
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


def fill_latents(
    store: Store,
    pictures: Sequence[Picture],
    encode: Callable[[Tensor], Tensor],
    encoder: str,
    tell: Callable[[Event], None],
) -> list[tuple[Sample, str]]:
    """Encode what is missing; gives back the samples that could not be read, with the reason."""
    missing = [p for p in pictures if store.get(latent_key(p.sample, p.size, encoder)) is None]
    unreadable: list[tuple[Sample, str]] = []
    done = 0
    with ThreadPoolExecutor() as pool:
        for size in sorted({picture.size for picture in missing}):
            for chunk in _chunks([p for p in missing if p.size == size]):
                pixels = list(pool.map(_pixels, chunk))
                good = [
                    (p, x) for p, x in zip(chunk, pixels, strict=True) if not isinstance(x, str)
                ]
                unreadable += [
                    (p.sample, x) for p, x in zip(chunk, pixels, strict=True) if isinstance(x, str)
                ]
                if good:
                    latents = encode(torch.stack([x for _, x in good]))
                    for (picture, _), latent in zip(good, latents.cpu(), strict=True):
                        key = latent_key(picture.sample, size, encoder)
                        store.put(key, {"latents": latent.clone()})
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


def _pixels(picture: Picture) -> Tensor | str:
    """The fitted picture, or why there is none."""
    try:
        image = decode(picture.source.read(picture.sample.key))
    except (UnreadableImageError, OSError) as error:
        return str(error)
    return fit(image, *picture.size)


def _chunks(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[i : i + BATCH] for i in range(0, len(items), BATCH))
