"""From the bytes of a picture file to pixels: upright, sRGB, opaque, eight bits.

Sizes, orders and caches are others'. Whatever Pillow cannot read, or should not, is one error here:
`UnreadableImageError`, with a reason for people.
"""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from gracetune.data.decoders import MODES, PILLOW
from gracetune.data.headers import PNG_EXIF, plain_header, png_chunks
from gracetune.data.sample import UnreadableSampleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.data.decoders import Decoders, Pixels
    from gracetune.data.sample import Size

EXTENSIONS = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"))
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = (5, 6, 7, 8)

_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow's parsers raise on hostile bytes: here it is the file's fault, never a crash."""

_SURELY_255 = 2.0
"""The highest of floats from 0 to 255 is above this, or all is black; that of floats from 0 to 1
may overshoot a little, and such a picture is not taken for a black one."""

_FILTERS = threading.Lock()
"""Warning filters belong to the whole process; two threads must not swap them at once."""


CENTRE = (0.5, 0.5)
"""Where a crop lies: the share of what is cut off that goes at the left, and at the top."""
WHOLE: Size = (0, 0)
"""The least size that stands for no reduction at all."""


class UnreadableImageError(UnreadableSampleError):
    """These bytes are not a picture that can be trained on."""


def probe(data: bytes) -> tuple[int, int]:
    """Width and height as shown. The whole file is read, so that a truncated one is found here."""
    with _readable():
        image, orientation = _open(data)
        width, height = image.size
        image.draft(None, (max(1, width // 8), max(1, height // 8)))
        image.load()
    return (height, width) if orientation in _ON_ITS_SIDE else (width, height)


def decode(
    data: bytes, decoders: Decoders = PILLOW, least: Size = WHOLE, paper: str = "white"
) -> Image.Image:
    """The picture as an RGB image: orientation applied, profile to sRGB, alpha over the paper.

    With `least`, a JPEG may come out smaller than it is, but in both edges no smaller than that.
    """
    with _readable():
        image, orientation = _open(data)
        profile = image.info.get("icc_profile")
        image = _load(image, data, decoders, least[::-1] if orientation in _ON_ITS_SIDE else least)
        image = _over(paper, _to_srgb(_eight_bits(image), profile))
        return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def decode_pixels(data: bytes, decoders: Decoders = PILLOW, least: Size = WHOLE) -> Pixels:
    """What `decode` shows as HWC; a fast decoder's plain RGB takes no detour over an image."""
    plain = _plain(data, decoders) if least == WHOLE else None
    if plain is not None:
        return plain
    with _readable():
        image, orientation = _open(data)
        if image.mode == "RGB" and orientation == 1 and not image.info.get("icc_profile"):
            pixels = _fast(image, data, decoders, least)
            if pixels is not None:
                return pixels
    return np.array(decode(data, decoders, least))


def _plain(data: bytes, decoders: Decoders) -> Pixels | None:
    """The pixels of a plain picture by its decoder alone: Pillow's opening of it takes time."""
    header = plain_header(data)
    if header is None or header[0] not in decoders.plain:
        return None
    file_format, (width, height) = header
    most = Image.MAX_IMAGE_PIXELS
    if most is None or not 0 < width * height <= most:
        return None  # Pillow says what it thinks of such sizes
    pixels = decoders.plain[file_format](data)
    return pixels if pixels is not None and pixels.shape == (height, width, 3) else None


def fit_pixels(
    pixels: Pixels, width: int, height: int, crop: tuple[float, float] = CENTRE
) -> Tensor:
    """As `fit`, by torch: the part that stays is cut out in whole pixels."""
    import torch

    left, top, right, bottom = whole_box((pixels.shape[1], pixels.shape[0]), (width, height), crop)
    part = torch.from_numpy(pixels[top:bottom, left:right]).permute(2, 0, 1)
    if tuple(part.shape[1:]) != (height, width):
        part = torch.nn.functional.interpolate(
            part.unsqueeze(0), size=(height, width), mode="lanczos", antialias=True
        )[0]
    return part.contiguous().float().div_(127.5).sub_(1.0)


def whole_box(shown: Size, wanted: Size, crop: tuple[float, float]) -> tuple[int, int, int, int]:
    """The part that stays, in whole pixels: left, top, right, bottom."""
    scale = max(wanted[0] / shown[0], wanted[1] / shown[1])
    width, height = (
        min(edge, max(1, round(to / scale))) for edge, to in zip(shown, wanted, strict=True)
    )
    left, top = round((shown[0] - width) * crop[0]), round((shown[1] - height) * crop[1])
    return left, top, left + width, top + height


def fit(image: Image.Image, width: int, height: int, crop: tuple[float, float] = CENTRE) -> Tensor:
    """Resize to cover by Lanczos and crop: CHW, float32, in [-1, 1]."""
    import torch  # here alone, so that opening a data set does not wait for torch

    pixels = np.array(cover(image, width, height, crop))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div_(127.5).sub_(1.0)


def cover(
    image: Image.Image, width: int, height: int, crop: tuple[float, float] = CENTRE
) -> Image.Image:
    """One resampling from the part that stays to the size of the bucket."""
    scale = max(width / image.width, height / image.height)
    beside, above = image.width - width / scale, image.height - height / scale
    box = (
        max(0.0, beside * crop[0]),
        max(0.0, above * crop[1]),
        min(image.width - beside * (1 - crop[0]), image.width),
        min(image.height - above * (1 - crop[1]), image.height),
    )
    return image.resize((width, height), Image.Resampling.LANCZOS, box)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise UnreadableImageError("it needs more memory than there is") from error
    except _BROKEN as error:
        raise UnreadableImageError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"not a picture in a known format ({', '.join(_FORMATS)})"
    return str(error) or type(error).__name__


def _open(data: bytes) -> tuple[Image.Image, int]:
    """Read the header and the orientation; all that Pillow warns about, it warns about here."""
    if not data:
        raise UnreadableImageError("the file is empty")
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.format == "TIFF":
            # Its tags are read with its pixels, and Pillow turns it upright itself.
            image.load()
            return image, 1
        if image.format == "PNG" and PNG_EXIF.isdisjoint(png_chunks(data)):
            return image, 1  # asked for EXIF, Pillow would decode all pixels to look behind them
        return image, _orientation(image)


def _load(image: Image.Image, data: bytes, decoders: Decoders, least: Size) -> Image.Image:
    """The pixels as the file has them, by the fastest that can; Pillow has the last word."""
    pixels = _fast(image, data, decoders, least)
    if pixels is not None:
        return Image.fromarray(pixels)
    image.load()
    return image


def _fast(image: Image.Image, data: bytes, decoders: Decoders, least: Size) -> Pixels | None:
    if least != WHOLE:
        image.draft(None, least)
    decoder = decoders.by_format.get(image.format or "")
    if decoder is None or image.mode not in MODES or "transparency" in image.info:
        return None
    pixels = decoder(data, image.mode, least)
    expected = (image.height, image.width) + ((len(image.mode),) if image.mode != "L" else ())
    return pixels if pixels is not None and pixels.shape == expected else None


def _orientation(image: Image.Image) -> int:
    """1 (upright) where the EXIF block is broken: the pixels are fine all the same."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except _BROKEN:
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey pictures of 16 or 32 bits or floats, scaled; Pillow would clip them at 255."""
    if image.mode == "F":
        levels = _float_levels(np.asarray(image, np.float64))
    elif image.mode == "I":
        levels = _whole_levels(np.asarray(image, np.float64))
    elif image.mode.startswith("I;16"):
        levels = np.asarray(image) / 257
    else:
        return image
    return Image.fromarray(np.rint(levels).astype(np.uint8))


def _float_levels(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Floats on a scale of 255, by what they reach; a file says nowhere what its white is."""
    values = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
    low, high = float(values.min()), float(values.max())
    for white in (1.0, 255.0):
        slack = white / 255 / 2  # what rounds to black or to white
        is_sure = white == 1.0 or high > _SURELY_255
        if is_sure and low >= -slack and high <= white + slack:
            return values.clip(0.0, white) * (255 / white)
    raise UnreadableImageError(
        f"its floats reach from {low:g} to {high:g}, which is neither 0 to 1 nor 0 to 255"
    )


def _whole_levels(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Whole numbers of 32 bits on a scale of 255, by what they reach: black as levels of 16 bits,
    those up to 255 are levels already.
    """
    low, high = float(values.min()), float(values.max())
    for white in (255, 65535):
        if low >= 0 and high <= white:
            return values * (255 / white)
    raise UnreadableImageError(
        f"its whole numbers reach from {low:g} to {high:g}, which is neither 0 to 255 nor 0 to "
        "65535"
    )


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Colours as the embedded profile means them; a profile that does not apply is not used."""
    image = _plain_mode(image)
    if not profile or image.mode not in ("L", "RGB", "CMYK", "RGBA"):
        return image
    alpha = image.getchannel("A") if image.mode == "RGBA" else None
    colours = image.convert("RGB") if alpha else image
    try:
        converted = ImageCms.profileToProfile(
            colours,
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            outputMode="RGB",
        )
    except (ImageCms.PyCMSError, OSError):
        return image
    assert converted is not None, "profileToProfile returns an image unless it works in place"
    if alpha:
        converted.putalpha(alpha)
    return converted


def _plain_mode(image: Image.Image) -> Image.Image:
    """L, RGB, RGBA or CMYK: what the steps after this know."""
    if image.mode in ("LA", "La", "PA", "RGBa") or "transparency" in image.info:
        return image.convert("RGBA")
    if image.mode in ("L", "RGB", "RGBA", "CMYK"):
        return image
    return image.convert("RGB")


def _over(colour: str, image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode != "RGBA":
        return image.convert("RGB")
    paper = Image.new("RGB", image.size, colour)
    paper.paste(image, mask=image.getchannel("A"))
    return paper
