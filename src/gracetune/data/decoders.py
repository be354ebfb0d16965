"""Decoders and a resizer that are faster than Pillow's, where they are installed.

Each decoder gives the pixels that Pillow would, bit for bit, or none at all: then Pillow reads the
file, or says what is wrong with it. torch's Lanczos differs from Pillow's by one level in one of a
hundred values and takes less time, so recipes and cache keys name which it was.
Figures: benchmarks/results/data_decode.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from gracetune.data.headers import png_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from gracetune.data.sample import Size

    Pixels = NDArray[np.uint8]
    Decode = Callable[[bytes, str, Size], Pixels | None]
    """From a file, the Pillow mode of its header and the smallest size that will do."""
    DecodePlain = Callable[[bytes], Pixels | None]
    """From a file that `headers` has found to be plain: nothing is asked again."""

Lanczos = Literal["pillow", "torch"]
MODES = ("L", "RGB", "RGBA")
"""Eight bits a channel: in all others Pillow's reading is the definition."""

_JPEG_COLOURS = {"L": "GRAY", "RGB": "RGB"}
_PNG_DEPTH = 24
_WEBP_CHUNK, _WEBP_FLAGS, _WEBP_ANIMATION = slice(12, 16), 20, 2


@dataclass(frozen=True, slots=True)
class Decoders:
    """What reads which format; where there is none, Pillow does."""

    by_format: Mapping[str, Decode] = field(default_factory=dict)
    lanczos: Lanczos = "pillow"
    plain: Mapping[str, DecodePlain] = field(default_factory=dict)
    """The same for plain files, by the fastest that there is."""
    why: str = "pictures are decoded and resized by Pillow"


PILLOW = Decoders()


def choose_decoders() -> Decoders:
    """Look once what is installed; nothing below asks again."""
    found: dict[str, Decode] = {}
    plain: dict[str, DecodePlain] = {}
    names = []
    for add in (_add_simplejpeg, _add_imagecodecs):
        try:
            names.append(add(found, plain))
        except ImportError:
            continue  # an extra that is not installed
    lanczos: Lanczos = "torch" if _torch_has_lanczos() else "pillow"
    who = f"pictures are decoded by {', '.join([*names, 'Pillow'])} and resized by {lanczos}"
    more = "" if len(names) == 2 else "; `pip install gracetune[images]` makes it faster"
    return Decoders(found, lanczos, plain, who + more)


def _torch_has_lanczos() -> bool:
    """Since torch 2.13, for eight bits on the CPU.

    Asked with pixels that lie as pictures do: with few of them in planes torch fails by itself.
    """
    import torch

    try:
        pixels = torch.zeros((1, 8, 8, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        torch.nn.functional.interpolate(pixels, size=(4, 4), mode="lanczos", antialias=True)
    except (ValueError, NotImplementedError, RuntimeError):
        return False
    return True


def _tried(decode: Callable[[bytes], Pixels], *refusals: type[Exception]) -> DecodePlain:
    """The decoder, with none for what it refuses."""

    def call(data: bytes) -> Pixels | None:
        try:
            return decode(data)
        except refusals:
            return None

    return call


def _add_simplejpeg(found: dict[str, Decode], plain: dict[str, DecodePlain]) -> str:
    import simplejpeg

    def jpeg(data: bytes, mode: str, least: Size) -> Pixels | None:
        if mode not in _JPEG_COLOURS:
            return None
        try:
            # strict: what libjpeg only warns about is for Pillow to judge
            pixels: Pixels = simplejpeg.decode_jpeg(
                data, _JPEG_COLOURS[mode], min_width=least[0], min_height=least[1], strict=True
            )
        except ValueError:
            return None
        return pixels[:, :, 0] if mode == "L" else pixels

    found["JPEG"] = jpeg
    plain["JPEG"] = _tried(simplejpeg.decode_jpeg, ValueError)  # strict, too, unless told otherwise
    return "simplejpeg (JPEG)"


def _add_imagecodecs(found: dict[str, Decode], plain: dict[str, DecodePlain]) -> str:
    import imagecodecs

    def png(data: bytes, mode: str, least: Size) -> Pixels | None:  # noqa: ARG001
        if data[_PNG_DEPTH] != 8 or b"acTL" in png_chunks(data):
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
    opaque = partial(imagecodecs.webp_decode, hasalpha=False)
    plain["PNG"] = _tried(imagecodecs.spng_decode, imagecodecs.SpngError, ValueError, MemoryError)
    plain["WEBP"] = _tried(opaque, imagecodecs.WebpError, ValueError)
    return "imagecodecs (PNG, WebP)"
