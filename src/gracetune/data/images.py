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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from gracetune.data.sample import UnreadableSampleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from gracetune.data.sample import Size

    Pixels = NDArray[np.uint8]
    Decode = Callable[[bytes, str, Size], Pixels | None]
    """From a file, the Pillow mode of its header and the smallest size that will do."""
    DecodePlain = Callable[[bytes], Pixels | None]
    """From a file that `headers` has found to be plain: nothing is asked again."""
    from collections.abc import Iterator

    from torch import Tensor


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


# ------------------------------------------------------------------------------------------
# From the bytes of a picture file to pixels: upright, sRGB, opaque, eight bits.
#
# Sizes, orders and caches are others'. Whatever Pillow cannot read, or should not, is one error
# here:
# `UnreadableImageError`, with a reason for people.


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


# ------------------------------------------------------------------------------------------
# What the first bytes of a picture say, where it is as plain as most are.
#
# Plain is eight bits of red, green and blue, upright, opaque, still, and of no colour profile.
# Such a
# file needs no more than its decoder. Of all others, and of what looks odd, nothing is said here:
# Pillow opens them.


_PNG_MARK = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_HEAD = struct.Struct(">IIBB").unpack_from
_PNG_CHUNK = struct.Struct(">I4s").unpack_from
_PNG_RGB = [8, 2]
PNG_EXIF = frozenset((b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp"))
"""Where the orientation of a PNG picture can be."""
_PNG_SPECIAL = PNG_EXIF | {b"tRNS", b"iCCP", b"acTL"}

_JPEG_START = 0xD8
_JPEG_SEGMENT = struct.Struct(">HH").unpack_from
_JPEG_FRAME = struct.Struct(">BHHBBxxBxxB").unpack_from
"""Depth, height, width, the number of components, and the name of each."""
_JPEG_FRAMES = (0xFFC0, 0xFFC1, 0xFFC2)
"""Huffman-coded frames: baseline, extended and progressive."""
_JPEG_SCAN = 0xFFDA
_JPEG_PLAIN = frozenset((0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, 0xFFFE))
"""Tables, restart interval, JFIF and comment: others can hold a turn, a profile, or colour."""
_JPEG_COMPONENTS = (3, 1, 2, 3)
"""How JFIF numbers them; other numbers can mean other colours."""

_WEBP_SIZE = 0x3FFF
_WEBP_LOSSY_MARK = b"\x9d\x01\x2a"
_WEBP_LOSSLESS_MARK = 0x2F
_WEBP_ALPHA = 1 << 28


def plain_header(data: bytes) -> tuple[str, Size] | None:
    """Format and size of a plain picture; none where Pillow has to look.

    In few steps: a decoder fills the processor's caches with pixels, so whatever Python does
    between two of them is fetched from memory again, and takes ten times as long.
    """
    try:
        file_format, read = _READERS[data[0]]
        size = read(data)
    except (KeyError, IndexError, struct.error):
        return None  # of another format, or it ends within its header
    return None if size is None else (file_format, size)


def png_chunks(data: bytes) -> set[bytes]:
    """The names of a PNG file's chunks, and the keywords of its texts, without reading pixels."""
    names, at, end = set(), 8, len(data) - 8
    while at <= end:
        length, name = _PNG_CHUNK(data, at)
        if name != b"IDAT":  # most of them, and none of the others is looked for so often
            names.add(name)
            if name in _PNG_TEXTS:
                names.add(data[at + 8 : at + 88].partition(b"\0")[0])
        at += 12 + length
    return names


def _png(data: bytes) -> Size | None:
    if not data.startswith(_PNG_MARK):
        return None
    width, height, *kind = _PNG_HEAD(data, 16)
    if kind != _PNG_RGB or not _PNG_SPECIAL.isdisjoint(png_chunks(data)):
        return None
    return width, height


def _jpeg(data: bytes) -> Size | None:
    size, at = None, 2
    if data[1] != _JPEG_START:
        return None
    while True:
        marker, length = _JPEG_SEGMENT(data, at)
        if marker in _JPEG_PLAIN:
            at += 2 + length
        elif marker == _JPEG_SCAN:
            return size
        elif marker in _JPEG_FRAMES and size is None:
            frame = _JPEG_FRAME(data, at + 4)
            if frame[0] != 8 or frame[3:] != _JPEG_COMPONENTS:
                return None
            size = frame[2], frame[1]
            at += 2 + length
        else:
            return None


def _webp(data: bytes) -> Size | None:
    match data[:4] + data[8:16]:
        case b"RIFFWEBPVP8 ":
            if data[23:26] != _WEBP_LOSSY_MARK:
                return None
            width, height = struct.unpack_from("<HH", data, 26)
            return width & _WEBP_SIZE, height & _WEBP_SIZE
        case b"RIFFWEBPVP8L":
            mark, bits = struct.unpack_from("<BI", data, 20)
            if mark != _WEBP_LOSSLESS_MARK or bits & _WEBP_ALPHA:
                return None
            return (bits & _WEBP_SIZE) + 1, (bits >> 14 & _WEBP_SIZE) + 1
    return None


_READERS: dict[int, tuple[str, Callable[[bytes], Size | None]]] = {
    0xFF: ("JPEG", _jpeg),
    0x89: ("PNG", _png),
    ord("R"): ("WEBP", _webp),
}
"""By the first byte of a file; each reader looks at the next ones itself."""
