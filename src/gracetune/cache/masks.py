"""Masks beside latents: which cells of a sample are learnt, and how much each counts.

A mask is cropped and warped as its sample is, and averaged over the cells of the sample's latents.
Those levels are kept, under a key of their own: latents are the same with a mask and without. What
a level weighs is for the run file to say, so changing that renders nothing anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from gracetune.cache.encode import ENCODE_BATCH_SIZE, EncodeItem
from gracetune.cache.keys import mask_key
from gracetune.data.augment import render_mask
from gracetune.data.prefetch import prefetched
from gracetune.data.sample import UnreadableSampleError, mask_of
from gracetune.events.dispatcher import ProgressReporter
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from gracetune.cache.encode import Ranks
    from gracetune.cache.keys import CacheKey
    from gracetune.cache.store import Store
    from gracetune.data.images import Decoders
    from gracetune.data.prefetch import Prefetch
    from gracetune.data.sample import Sample, Shape
    from gracetune.events.dispatcher import Emit

    Cells = tuple[int, int]
    """Rows and columns of a latent."""
    LatentGrid = Callable[[Shape], Cells]
    """Those that samples of a bucket's shape have."""

MASK_TENSOR = "mask"
"""Of the tensor in an entry."""
WHITE = 255


def fill_masks(
    store: Store,
    pictures: Sequence[EncodeItem],
    cells_of: LatentGrid,
    emit: Emit,
    decoders: Decoders,
    prefetch: Prefetch,
    ranks: Ranks,
) -> list[tuple[Sample, str]]:
    """Render what is missing; gives back the samples whose mask could not be read, and why."""
    masked = [picture for picture in pictures if mask_of(picture.sample) is not None]
    keyed = {_key(picture, cells_of): picture for picture in masked}
    keys = list(keyed)
    missing = [key for key, there in zip(keys, store.has(keys), strict=True) if not there]
    mine = ranks.own_share(missing)
    progress = ProgressReporter("rendering masks", len(mine), emit)
    bad: dict[str, str] = {}
    black: list[str] = []
    made = render_masks(prefetch, [keyed[key] for key in mine], cells_of, decoders)
    for start in range(0, len(mine), ENCODE_BATCH_SIZE):
        chunk = dict(zip(mine[start : start + ENCODE_BATCH_SIZE], made, strict=False))
        bad |= {key: levels for key, levels in chunk.items() if isinstance(levels, str)}
        good = {key: levels for key, levels in chunk.items() if not isinstance(levels, str)}
        store.put_many({key: {MASK_TENSOR: levels} for key, levels in good.items()})
        black += [keyed[key].sample.key for key, levels in good.items() if not levels.any()]
        progress.advance(len(chunk))
    _report_black(black, len(mine), emit)
    found = ranks.exchange("rendering masks", bad, lambda: sum(store.has(missing)))
    if not found:
        return []
    keys_of = ((picture.sample, _key(picture, cells_of)) for picture in masked)
    return list({sample: found[key] for sample, key in keys_of if key in found}.items())


def mask_keys(pictures: Sequence[EncodeItem], cells_of: LatentGrid) -> list[CacheKey]:
    """Of the pictures that have a mask."""
    return [_key(picture, cells_of) for picture in pictures if mask_of(picture.sample) is not None]


def render_masks(
    prefetch: Prefetch, pictures: Sequence[EncodeItem], cells_of: LatentGrid, decoders: Decoders
) -> Iterator[Tensor | str]:
    """The masks of these pictures, by workers: levels of their cells, or why there are none."""
    return prefetched(
        pictures,
        lambda picture: _levels(picture, cells_of(picture.size), decoders),
        lambda picture: f"data set {picture.sample.dataset!r}: {picture.sample.key}, its mask",
        prefetch,
    )


def mask_weights(levels_HW: Tensor, background: float, normalize: bool) -> Tensor:  # noqa: N803
    """How much each cell counts: white 1, black `background`, and 1 on average where asked for.

    A mask that is black all over, where black counts nothing, cannot be brought to an average.
    """
    weights_HW = background + (1 - background) * levels_HW.float().div_(WHITE)  # noqa: N806
    mean = weights_HW.mean()
    return weights_HW.div_(mean) if normalize and mean > 0 else weights_HW


def _levels(picture: EncodeItem, cells: Cells, decoders: Decoders) -> Tensor | str:
    mask = mask_of(picture.sample)
    assert mask is not None, f"{picture.sample.key} has no mask"
    size = (picture.size[0], picture.size[1])
    try:
        data = picture.source.read(mask.key)
        fitted = render_mask(data, picture.transform, size, decoders, mask.inverted)
    except UnreadableSampleError as error:
        return f"its mask {mask.key}: {error.reason}"
    except OSError as error:
        return f"its mask {mask.key}: {error}"
    averaged = functional.adaptive_avg_pool2d(fitted, cells)[0]
    return averaged.mul_(WHITE).round_().to(torch.uint8)


def _key(picture: EncodeItem, cells_of: LatentGrid) -> CacheKey:
    mask = mask_of(picture.sample)
    assert mask is not None, f"{picture.sample.key} has no mask"
    return mask_key(mask, picture.size, cells_of(picture.size), picture.transform)


def _report_black(black: Sequence[str], count: int, emit: Emit) -> None:
    if black:
        emit(
            Notice(
                f"{len(black)} of {count} masks are black in all that their samples show "
                f"({black[0]} the first): unless mask_background says otherwise, nothing of these "
                "is learnt",
                level="warning",
            )
        )
