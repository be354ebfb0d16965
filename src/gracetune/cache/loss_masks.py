"""Cache masks next to latents, and turn them into loss weights.

A mask image is cropped and augmented like its sample, then averaged over each cell of the sample's
latents. The cache stores the average as `level`, 0 to 255 per cell. Masks have their own keys,
since latents do not depend on them. `mask_background` and `mask_normalize` are applied when a batch
is read, so changing them does not change the cache.

    weight = background + (1 - background) * level / 255
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from gracetune.cache.encode import ENCODE_BATCH_SIZE, EncodeItem, EncodingProgress, missing_keys
from gracetune.cache.keys import mask_key
from gracetune.data.augment import render_mask
from gracetune.data.prefetch import prefetched
from gracetune.data.sample import UnreadableSampleError
from gracetune.data.source import read_unchanged
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from gracetune.cache.encode import Emit, Ranks
    from gracetune.cache.keys import CacheKey
    from gracetune.cache.store import Store
    from gracetune.data.images import Decoders
    from gracetune.data.prefetch import Prefetch
    from gracetune.data.sample import Sample, Shape

    LatentGrid = Callable[[Shape], tuple[int, int]]
    """Maps a bucket's shape to the rows and columns of its latents."""

MASK_TENSOR = "mask"
"""Name of the tensor in the cache entry of a mask."""
WHITE = 255


def fill_masks(
    store: Store,
    items: Sequence[EncodeItem],
    latent_grid: LatentGrid,
    emit: Emit,
    decoders: Decoders,
    prefetch: Prefetch,
    ranks: Ranks,
) -> list[tuple[Sample, str]]:
    """Compute and store the masks that the cache lacks, one value per latent cell.

    Returns the samples whose mask is unreadable, with the reason.
    """
    masked = [item for item in items if item.sample.mask is not None]
    keyed = {_key(item, latent_grid): item for item in masked}
    missing = missing_keys(store, keyed)
    own = ranks.own_share(missing)
    progress = EncodingProgress("rendering masks", len(own), "masks", emit)
    bad: dict[str, str] = {}
    black: list[str] = []
    rendered = render_masks(prefetch, [keyed[key] for key in own], latent_grid, decoders)
    for start in range(0, len(own), ENCODE_BATCH_SIZE):
        chunk = dict(zip(own[start : start + ENCODE_BATCH_SIZE], rendered, strict=False))
        bad |= {key: levels for key, levels in chunk.items() if isinstance(levels, str)}
        good = {key: levels for key, levels in chunk.items() if not isinstance(levels, str)}
        store.put_many({key: {MASK_TENSOR: levels} for key, levels in good.items()})
        black += [keyed[key].sample.key for key, levels in good.items() if not levels.any()]
        ranks.report_progress("rendering masks", progress.advance(len(chunk)))
    if black:
        text = f"{len(black)} of {len(own)} masks are completely black, such as that of {black[0]}"
        hint = "nothing is learned from these samples unless mask_background is above 0"
        emit(Notice(f"{text}: {hint}", level="warning"))
    bad = ranks.exchange("rendering masks", bad, lambda: sum(store.has(missing)))
    keys = ((item.sample, _key(item, latent_grid)) for item in masked) if bad else ()
    return list({sample: bad[key] for sample, key in keys if key in bad}.items())


def mask_keys(items: Sequence[EncodeItem], latent_grid: LatentGrid) -> list[CacheKey]:
    """Return the cache keys of the masks of all samples that have one."""
    return [_key(item, latent_grid) for item in items if item.sample.mask is not None]


def render_masks(
    prefetch: Prefetch, items: Sequence[EncodeItem], latent_grid: LatentGrid, decoders: Decoders
) -> Iterator[Tensor | str]:
    """Crop masks and average them over each latent cell, in worker threads.

    Yields, in the order of `items`, a tensor of values from 0 to 255, or why a mask is unreadable.
    """
    return prefetched(
        items,
        lambda item: _render(item, latent_grid(item.size), decoders),
        lambda item: f"dataset {item.sample.dataset!r}: mask of {item.sample.key}",
        prefetch,
    )


def mask_weights(levels_HW: Tensor, background: float, normalize: bool) -> Tensor:  # noqa: N803
    """Return the loss weight per latent cell: 1 where the mask is white, `background` where black.

    With `normalize`, weights are scaled to a mean of 1, except if all of them are 0.
    """
    weights_HW = background + (1 - background) * levels_HW.float().div_(WHITE)  # noqa: N806
    mean = weights_HW.mean()
    return weights_HW.div_(mean) if normalize and mean > 0 else weights_HW


def _render(item: EncodeItem, grid: tuple[int, int], decoders: Decoders) -> Tensor | str:
    mask = item.sample.mask
    assert mask is not None, f"{item.sample.key} has no mask"
    size = (item.size[0], item.size[1])
    try:
        data = read_unchanged(item.source, mask.key, mask.digest)
        fitted = render_mask(data, item.transform, size, decoders, mask.inverted)
    except UnreadableSampleError as error:
        return f"its mask {mask.key}: {error.reason}"
    except OSError as error:
        return f"its mask {mask.key}: {error}"
    averaged = functional.adaptive_avg_pool2d(fitted, grid)[0]
    return averaged.mul_(WHITE).round_().to(torch.uint8)


def _key(item: EncodeItem, latent_grid: LatentGrid) -> CacheKey:
    mask = item.sample.mask
    assert mask is not None, f"{item.sample.key} has no mask"
    return mask_key(mask, item.size, latent_grid(item.size), item.transform)
