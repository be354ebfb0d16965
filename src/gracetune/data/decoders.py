"""Decoders that are faster than Pillow's, format by format, where their packages are installed.

Each gives the pixels that Pillow would, bit for bit, or none at all: then Pillow reads the file, or
says what is wrong with it. Measured here on one core (1024x768, photographic): JPEG by simplejpeg
1.6 times Pillow's speed, PNG by imagecodecs 1.7, lossless WebP 1.2, lossy WebP 1.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from gracetune.data.sample import Size

    Pixels = NDArray[np.uint8]
    Decode = Callable[[bytes, str, Size], Pixels | None]
    """From a file, the Pillow mode of its header and the smallest size that will do."""

MODES = ("L", "RGB", "RGBA")
"""Eight bits a channel: in all others Pillow's reading is the definition."""

_PNG_DEPTH, _PNG_ANIMATION, _PNG_PIXELS = 24, b"acTL", b"IDAT"
_WEBP_CHUNK, _WEBP_FLAGS, _WEBP_ANIMATION = slice(12, 16), 20, 2


@dataclass(frozen=True, slots=True)
class Decoders:
    """What reads which format; where there is none, Pillow does."""

    by_format: Mapping[str, Decode] = field(default_factory=dict)
    why: str = "pictures are decoded by Pillow"


PILLOW = Decoders()


def choose_decoders() -> Decoders:
    """Look once what is installed; nothing below asks again."""
    found: dict[str, Decode] = {}
    names = []
    for add in (_add_simplejpeg, _add_imagecodecs):
        try:
            names.append(add(found))
        except ImportError:
            continue  # an extra that is not installed
    if len(names) == 2:
        return Decoders(found, f"pictures are decoded by {' and '.join(names)}, else by Pillow")
    have = " and ".join([*names, "Pillow"])
    return Decoders(
        found, f"pictures are decoded by {have}; `pip install gracetune[images]` is faster"
    )


def _add_simplejpeg(found: dict[str, Decode]) -> str:
    import simplejpeg

    def jpeg(data: bytes, mode: str, least: Size) -> Pixels | None:
        colours = {"L": "GRAY", "RGB": "RGB"}.get(mode)
        if colours is None:
            return None
        try:
            # strict: what libjpeg only warns about is for Pillow to judge
            pixels: Pixels = simplejpeg.decode_jpeg(
                data, colours, min_width=least[0], min_height=least[1], strict=True
            )
        except ValueError:
            return None
        return pixels[:, :, 0] if mode == "L" else pixels

    found["JPEG"] = jpeg
    return "simplejpeg (JPEG)"


def _add_imagecodecs(found: dict[str, Decode]) -> str:
    import imagecodecs

    def png(data: bytes, mode: str, least: Size) -> Pixels | None:  # noqa: ARG001
        animated = data.find(_PNG_ANIMATION, 0, data.find(_PNG_PIXELS)) >= 0
        if data[_PNG_DEPTH] != 8 or animated:
            return None
        try:
            pixels: Pixels = imagecodecs.png_decode(data)
        except (imagecodecs.PngError, ValueError):
            return None
        return pixels

    def webp(data: bytes, mode: str, least: Size) -> Pixels | None:  # noqa: ARG001
        if data[_WEBP_CHUNK] == b"VP8X" and data[_WEBP_FLAGS] & _WEBP_ANIMATION:
            return None
        try:
            pixels: Pixels = imagecodecs.webp_decode(data, hasalpha=mode == "RGBA")
        except (imagecodecs.WebpError, ValueError):
            return None
        return pixels

    found |= {"PNG": png, "WEBP": webp}
    return "imagecodecs (PNG, WebP)"
