"""Latents as rows of 2x2 patches, the way Flux and Qwen-Image read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EDGE = 2


def packed(latents_BCHW: Tensor) -> Tensor:  # noqa: N803
    """One row a patch, in reading order; its values channel by channel."""
    count, channels, height, width = latents_BCHW.shape
    cells = latents_BCHW.view(count, channels, height // EDGE, EDGE, width // EDGE, EDGE)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * EDGE * EDGE)


def unpacked(rows_BLC: Tensor, height: int, width: int) -> Tensor:  # noqa: N803
    """The same patches at their places in latents of this height and width."""
    count, _, values = rows_BLC.shape
    channels = values // (EDGE * EDGE)
    cells = rows_BLC.view(count, height // EDGE, width // EDGE, channels, EDGE, EDGE)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(count, channels, height, width)
