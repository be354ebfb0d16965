"""Encoding by tiles: large pictures and clips need far less memory so, for slightly other latents.

Which sizes are tiled is a rule, not a reaction to a full memory: keys tell tiled latents from whole
ones, and a run must find again what another run encoded.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gracetune.data.sample import Kind, Shape

LARGE_PIXELS = 2048 * 2048
"""Of one picture or frame: above this, `auto` tiles."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """From which size on an encoder works by tiles."""

    above: int | None = None
    """Pixels of a frame; none: never."""

    def of(self, size: Shape, kind: Kind) -> bool:
        """Whether samples of this size are encoded by tiles; sounds never are."""
        return kind != "audio" and self.above is not None and size[0] * size[1] > self.above


WHOLE = Tiling()


def choose_tiling(asked: bool | Literal["auto"], family: str, can_tile: bool) -> Tiling:
    """What `cache_config.vae_tiling` means for this family."""
    if asked is True and not can_tile:
        raise ConfigError(
            f"cache_config.vae_tiling is true; the encoder of {family} has no tiles. Leave it out."
        )
    if asked is False or not can_tile:
        return WHOLE
    return Tiling(0 if asked is True else LARGE_PIXELS)


def taking_turns(
    encode: Callable[[Tensor], Tensor], tile: Callable[[bool], bool], tiling: Tiling
) -> Callable[[Tensor], Tensor]:
    """The encoder for one thread at a time, by tiles where the size asks for it; `tile` switches.

    A generation is encoded beside training, which may encode too. A VAE of clips keeps frames
    between its calls: without turns, either would go on with the other's, and no error would tell.
    """
    turns = threading.Lock()

    def encoded(media: Tensor) -> Tensor:
        with turns:
            if tiling.above is not None:
                tile(tiling.of((media.shape[-1], media.shape[-2]), "image"))
            return encode(media)

    return encoded
