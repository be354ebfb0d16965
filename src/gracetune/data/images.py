"""Decode image files to upright, opaque, 8-bit sRGB pixels, and resize them to a bucket.

Pillow is the reference, with pillow-heif for HEIC. Faster decoders (simplejpeg, and imagecodecs if
it is installed) decode the formats and modes in which they return the same pixels as Pillow, and
Pillow decodes all others. A file that is damaged raises `UnreadableImageError` with a reason for
the user, even if Pillow would decode it.

A file is called "simple" if it is 8-bit RGB, upright, opaque, not animated and without a colour
profile. Its header is read by `parse_simple_header`, which is faster than `Image.open`.
"""

from __future__ import annotations

import io
import re
import struct
import threading
import warnings
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import simplejpeg
from PIL import Image, ImageCms, UnidentifiedImageError, features

from gracetune.data.sample import UnreadableSampleError
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from gracetune.data.sample import Size

    Pixels = NDArray[np.uint8]
    Decode = Callable[[bytes, str, Size], Pixels | None]
    """Function (bytes of a file, Pillow mode, minimum size) -> pixels; None if it cannot decode."""
    DecodeSimple = Callable[[bytes], Pixels | None]
    """Function (bytes of a simple file) -> pixels; None if it cannot decode the file."""
    from collections.abc import Iterator

    from torch import Tensor

Lanczos = Literal["pillow", "torch"]
MODES = ("L", "RGB", "RGBA")
"""Pillow modes for which a faster decoder than Pillow may be used."""

_JPEG_COLOUR_SPACES = {"L": "GRAY", "RGB": "RGB"}
_PNG_DEPTH = 24
_WEBP_CHUNK, _WEBP_FLAGS, _WEBP_ANIMATION = slice(12, 16), 20, 2


@dataclass(frozen=True, slots=True)
class Decoders:
    """The functions that decode and resize images. Pillow decodes formats that are not listed."""

    by_format: Mapping[str, Decode] = field(default_factory=dict)
    """Decoders that are faster than Pillow, by Pillow's name of the file format."""
    lanczos: Lanczos = "pillow"
    """Library that resizes images."""
    simple: Mapping[str, DecodeSimple] = field(default_factory=dict)
    """Decoders of files that are 8-bit RGB, upright, opaque and without a colour profile (simple),
    by Pillow's name of the file format."""
    description: str = "images are decoded and resized by Pillow"
    """Sentence about the choice, for a notice to the user."""


PILLOW = Decoders()


def choose_decoders() -> Decoders:
    """Return the fastest image decoders that are installed."""
    found: dict[str, Decode] = {}
    simple: dict[str, DecodeSimple] = {}
    names = [_add_simplejpeg(found, simple)]
    with suppress(ImportError):  # an extra that may not be installed
        names.append(_add_imagecodecs(found, simple))
    lanczos: Lanczos = "torch" if _torch_has_lanczos() else "pillow"
    description = f"images are decoded by {', '.join([*names, 'Pillow'])} and resized by {lanczos}"
    tip = "" if len(names) == 2 else "; `pip install gracetune[images]` makes it faster"
    return Decoders(found, lanczos, simple, description + tip)


def _torch_has_lanczos() -> bool:
    """Return whether torch can resize uint8 images on the CPU with Lanczos (torch 2.13 and newer).

    The test image is channels-last, as images in training are, because torch fails on tiny images
    in the other layout.
    """
    import torch

    try:
        pixels = torch.zeros((1, 8, 8, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        torch.nn.functional.interpolate(pixels, size=(4, 4), mode="lanczos", antialias=True)
    except (ValueError, NotImplementedError, RuntimeError):
        return False
    return True


def _none_on_error(decode: Callable[[bytes], Pixels], *refusals: type[Exception]) -> DecodeSimple:
    """Wrap a decoder so that it returns None where it would raise one of these exceptions."""

    def call(data: bytes) -> Pixels | None:
        try:
            return decode(data)
        except refusals:
            return None

    return call


def _add_simplejpeg(found: dict[str, Decode], simple: dict[str, DecodeSimple]) -> str:
    def jpeg(data: bytes, mode: str, min_size: Size) -> Pixels | None:
        if mode not in _JPEG_COLOUR_SPACES:
            return None
        try:
            # strict: a file that libjpeg would only warn about goes to Pillow
            pixels: Pixels = simplejpeg.decode_jpeg(
                data,
                _JPEG_COLOUR_SPACES[mode],
                min_width=min_size[0],
                min_height=min_size[1],
                strict=True,
            )
        except ValueError:
            return None
        return pixels[:, :, 0] if mode == "L" else pixels

    found["JPEG"] = jpeg
    simple["JPEG"] = _none_on_error(simplejpeg.decode_jpeg, ValueError)  # strict by default
    return "simplejpeg (JPEG)"


def _add_imagecodecs(found: dict[str, Decode], simple: dict[str, DecodeSimple]) -> str:
    import imagecodecs

    def png(data: bytes, mode: str, min_size: Size) -> Pixels | None:  # noqa: ARG001
        if data[_PNG_DEPTH] != 8 or b"acTL" in png_chunks(data):
            return None
        try:
            pixels: Pixels = imagecodecs.png_decode(data)
        except (imagecodecs.PngError, ValueError):
            return None
        return pixels

    def webp(data: bytes, mode: str, min_size: Size) -> Pixels | None:  # noqa: ARG001
        if data[_WEBP_CHUNK] == b"VP8X" and data[_WEBP_FLAGS] & _WEBP_ANIMATION:
            return None
        try:
            pixels: Pixels = imagecodecs.webp_decode(data, hasalpha=mode == "RGBA")
        except (imagecodecs.WebpError, ValueError):
            return None
        return pixels

    found |= {"PNG": png, "WEBP": webp}
    opaque = partial(imagecodecs.webp_decode, hasalpha=False)
    simple["PNG"] = _none_on_error(
        imagecodecs.spng_decode, imagecodecs.SpngError, ValueError, MemoryError
    )
    simple["WEBP"] = _none_on_error(opaque, imagecodecs.WebpError, ValueError)
    return "imagecodecs (PNG, WebP)"


# Decoding and resizing

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif")
)
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
"""Formats that Pillow decodes, by its names. pillow-heif decodes HEIC, which Pillow cannot."""
_HEIC_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"))
_AVIF_BRANDS = frozenset((b"avif", b"avis"))
"""Brands in the first box of an ISO media file (`ftyp`) that name the codec of its images."""

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
_SWAPS_EDGES = (5, 6, 7, 8)

_DECODE_ERRORS = (
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
"""Exceptions that Pillow may raise for a corrupted or malicious file."""

_MIN_MAXIMUM_OF_0_TO_255 = 2.0
"""Smallest maximum of a float image that is taken to have the range 0 to 255 instead of 0 to 1.

An image with the range 0 to 1 may exceed 1 slightly, and must not be mistaken for a nearly black
image with the range 0 to 255.
"""

_WARNING_FILTERS = threading.Lock()
"""Lock that a thread holds while it ignores Pillow's warnings, because Python's warning filters are
shared by all threads."""


CENTRE_CROP = (0.5, 0.5)
"""Crop position that keeps the centre. The two numbers say which fraction of the cropped width is
removed at the left, and which fraction of the cropped height at the top."""
FULL_SIZE: Size = (0, 0)
"""Default of the parameter `min_size` of `decode`, which means: decode at full resolution."""


class UnreadableImageError(UnreadableSampleError):
    """Raised for a file that is not an image, is damaged, or has an unsupported format."""


def probe_image(data: bytes) -> tuple[int, int]:
    """Return the width and height of an image as displayed, after the EXIF orientation.

    The whole file is read with the checks of its format, because Pillow decodes many damaged files
    without an error. Files are checked here only: encoding compares the digest of their bytes.
    """
    with _decode_errors_as_unreadable():
        image, orientation = _open(data)
        width, height = image.size
        if image.format == "PNG":
            _check_png(data)
        elif image.format not in _JPEG_FORMATS or not _check_jpeg(data, image):
            image.draft(None, (max(1, width // 8), max(1, height // 8)))
            image.load()
    return (height, width) if orientation in _SWAPS_EDGES else (width, height)


def decode(
    data: bytes, decoders: Decoders = PILLOW, min_size: Size = FULL_SIZE, background: str = "white"
) -> Image.Image:
    """Decode a file to an upright 8-bit RGB image in sRGB.

    Transparent pixels are filled with the colour `background`. If `min_size` is given, a JPEG may
    be decoded at reduced resolution, but not smaller than that size.
    """
    with _decode_errors_as_unreadable():
        image, orientation = _open(data)
        profile = image.info.get("icc_profile")
        image = _load_pixels(
            image, data, decoders, min_size[::-1] if orientation in _SWAPS_EDGES else min_size
        )
        image = _composite_over(background, _to_srgb(_to_8_bits(image), profile))
        return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def decode_pixels(data: bytes, decoders: Decoders = PILLOW, min_size: Size = FULL_SIZE) -> Pixels:
    """Decode a file like `decode`, but to a uint8 array in HWC layout.

    Faster than `decode`, because it creates a Pillow image only if necessary.
    """
    simple = _decode_simple(data, decoders) if min_size == FULL_SIZE else None
    if simple is not None:
        return simple
    with _decode_errors_as_unreadable():
        image, orientation = _open(data)
        if image.mode == "RGB" and orientation == 1 and not image.info.get("icc_profile"):
            pixels = _decode_fast(image, data, decoders, min_size)
            if pixels is not None:
                return pixels
    return np.array(decode(data, decoders, min_size))


def _decode_simple(data: bytes, decoders: Decoders) -> Pixels | None:
    """Decode a simple file without Pillow; return None for other files.

    Simple means 8-bit RGB, upright, opaque, not animated and without a colour profile.
    """
    header = parse_simple_header(data)
    if header is None or header[0] not in decoders.simple:
        return None
    file_format, (width, height) = header
    most = Image.MAX_IMAGE_PIXELS
    if most is None or not 0 < width * height <= most:
        return None  # Pillow raises its decompression-bomb error
    pixels = decoders.simple[file_format](data)
    return pixels if pixels is not None and pixels.shape == (height, width, 3) else None


def fit_pixels(
    pixels: Pixels, width: int, height: int, crop: tuple[float, float] = CENTRE_CROP
) -> Tensor:
    """Crop and resize an HWC image with torch; return float32 in CHW layout and [-1, 1].

    The crop is rounded to whole pixels.
    """
    import torch

    left, top, right, bottom = crop_box((pixels.shape[1], pixels.shape[0]), (width, height), crop)
    part = torch.from_numpy(pixels[top:bottom, left:right]).permute(2, 0, 1)
    if tuple(part.shape[1:]) != (height, width):
        part = torch.nn.functional.interpolate(
            part.unsqueeze(0), size=(height, width), mode="lanczos", antialias=True
        )[0]
    return part.contiguous().float().div_(127.5).sub_(1.0)


def crop_box(shown: Size, wanted: Size, crop: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return the largest box with the aspect ratio of `wanted` in an image of the size `shown`.

    The box is (left, top, right, bottom) in whole pixels. `crop` is its horizontal and vertical
    position: 0 is left or top, 1 right or bottom.
    """
    scale = max(wanted[0] / shown[0], wanted[1] / shown[1])
    width, height = (
        min(edge, max(1, round(to / scale))) for edge, to in zip(shown, wanted, strict=True)
    )
    left, top = round((shown[0] - width) * crop[0]), round((shown[1] - height) * crop[1])
    return left, top, left + width, top + height


def fit(
    image: Image.Image, width: int, height: int, crop: tuple[float, float] = CENTRE_CROP
) -> Tensor:
    """Crop and resize an image with Pillow; return float32 in CHW layout and [-1, 1]."""
    return to_tensor(cover(image, width, height, crop))


def to_tensor(image: Image.Image) -> Tensor:
    """Convert an 8-bit RGB image to float32 in CHW layout and [-1, 1]."""
    import torch  # imported late, so that opening a dataset does not load torch

    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1).contiguous().float().div_(127.5).sub_(1.0)


def cover(
    image: Image.Image, width: int, height: int, crop: tuple[float, float] = CENTRE_CROP
) -> Image.Image:
    """Crop an image to the aspect ratio of a target size and resize it, in one resampling step."""
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
def _decode_errors_as_unreadable() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise UnreadableImageError("there is not enough memory to decode it") from error
    except _DECODE_ERRORS as error:
        raise UnreadableImageError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"not an image in a known format ({', '.join((*_FORMATS, 'HEIC'))})"
    return str(error).strip() or type(error).__name__


def _open(data: bytes) -> tuple[Image.Image, int]:
    """Open a file with Pillow, ignoring its warnings; return the image and its EXIF orientation."""
    if not data:
        raise UnreadableImageError("the file is empty")
    brands = _media_brands(data)
    if not brands.isdisjoint(_HEIC_BRANDS):
        return _open_heic(data), 1
    if not brands.isdisjoint(_AVIF_BRANDS) and not features.check("avif"):
        raise DataError(
            "it is an AVIF image, and this Pillow was built without support for it. Run "
            "`pip install --force-reinstall pillow`, or convert the AVIF images."
        )
    with _WARNING_FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.format == "TIFF":
            # Pillow applies a TIFF's orientation itself when it loads the pixels.
            image.load()
            return image, 1
        if image.format == "PNG" and PNG_EXIF.isdisjoint(png_chunks(data)):
            return image, 1  # getexif() would decode all pixels to look for EXIF after them
        return image, _orientation(image)


def _media_brands(data: bytes) -> set[bytes]:
    """Return the brands of an ISO media file, such as HEIC or AVIF; empty for other files."""
    if data[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(data[:4]), len(data), 256)
    return {data[8:12], *(data[at : at + 4] for at in range(16, end, 4))}


def _open_heic(data: bytes) -> Image.Image:
    """Decode a HEIC file with pillow-heif, which applies its rotation and converts it to 8 bits."""
    try:
        import pillow_heif
    except ImportError as error:
        raise DataError(
            "it is a HEIC image, whatever its suffix says, and that needs the package pillow-heif. "
            "Run `pip install 'gracetune[images]'`, or convert the HEIC images to JPEG."
        ) from error
    found = pillow_heif.open_heif(data)
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and found.size[0] * found.size[1] > most:
        raise UnreadableImageError(f"{found.size[0]}x{found.size[1]} pixels, more than {most}")
    image: Image.Image = found.to_pillow()
    image.format = "HEIF"
    return image


def _load_pixels(
    image: Image.Image, data: bytes, decoders: Decoders, min_size: Size
) -> Image.Image:
    """Decode the pixels of an opened image: with a fast decoder if possible, else with Pillow."""
    pixels = _decode_fast(image, data, decoders, min_size)
    if pixels is not None:
        return Image.fromarray(pixels)
    image.load()
    return image


def _decode_fast(
    image: Image.Image, data: bytes, decoders: Decoders, min_size: Size
) -> Pixels | None:
    if min_size != FULL_SIZE:
        image.draft(None, min_size)
    decoder = decoders.by_format.get(image.format or "")
    if decoder is None or image.mode not in MODES or "transparency" in image.info:
        return None
    pixels = decoder(data, image.mode, min_size)
    expected = (image.height, image.width) + ((len(image.mode),) if image.mode != "L" else ())
    return pixels if pixels is not None and pixels.shape == expected else None


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image; 1 (upright) if the EXIF data is invalid."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except _DECODE_ERRORS:
        return 1


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale the values of a 16-bit, 32-bit or float image to 8 bits; Pillow would clip them."""
    if image.mode == "F":
        levels = _scale_floats(np.asarray(image, np.float64))
    elif image.mode == "I":
        levels = _scale_integers(np.asarray(image, np.float64))
    elif image.mode.startswith("I;16"):
        levels = np.asarray(image) / 257
    else:
        return image
    return Image.fromarray(np.rint(levels).astype(np.uint8))


def _scale_floats(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale float values to 0..255; white is 1 or 255, judged by the largest value."""
    values = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
    low, high = float(values.min()), float(values.max())
    for white in (1.0, 255.0):
        slack = white / 255 / 2  # values this far outside still round to black or white
        is_sure = white == 1.0 or high > _MIN_MAXIMUM_OF_0_TO_255
        if is_sure and low >= -slack and high <= white + slack:
            return values.clip(0.0, white) * (255 / white)
    raise UnreadableImageError(
        f"its float values range from {low:g} to {high:g}, which is neither 0 to 1 nor 0 to 255"
    )


def _scale_integers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale integer values to 0..255; white is 255 or 65535, judged by the largest value."""
    low, high = float(values.min()), float(values.max())
    for white in (255, 65535):
        if low >= 0 and high <= white:
            return values * (255 / white)
    raise UnreadableImageError(
        f"its integer values range from {low:g} to {high:g}, which is neither 0 to 255 nor 0 to "
        "65535"
    )


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image from its embedded colour profile to sRGB; ignore an invalid profile."""
    image = _to_simple_mode(image)
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


def _to_simple_mode(image: Image.Image) -> Image.Image:
    """Convert an image to one of the modes L, RGB, RGBA and CMYK."""
    if image.mode in ("LA", "La", "PA", "RGBa") or "transparency" in image.info:
        return image.convert("RGBA")
    if image.mode in ("L", "RGB", "RGBA", "CMYK"):
        return image
    return image.convert("RGB")


def _composite_over(colour: str, image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode != "RGBA":
        return image.convert("RGB")
    background = Image.new("RGB", image.size, colour)
    background.paste(image, mask=image.getchannel("A"))
    return background


# Checks for damage

_PNG_END = b"IEND"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Number of channels by the colour type of a PNG file."""
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
          (0, 1, 1, 2))  # fmt: skip
"""The passes of an interlaced PNG: first column, first row, column step, row step."""
_INFLATE_NBYTES = 64 * 1024
"""Compressed bytes that are decompressed at a time; they become 64 MiB at most."""

_JPEG_FORMATS = ("JPEG", "MPO")
_JPEG_CHECK_SPACES = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}
_JPEG_DAMAGE = re.compile(r"Corrupt JPEG data: (.*)|(Premature end of JPEG file)")
_JPEG_PADDING = re.compile(r"([1-8]) extraneous bytes before marker 0xd9")
_JPEG_SCAN_END = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""Next marker after the entropy-coded data of a scan; FF00 is a data byte, FFD0 to FFD7 restart."""
_JPEG_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_JPEG_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_NUM_COEFFICIENTS = 64


def _check_png(data: bytes) -> None:
    """Raise an error unless a PNG file is complete and all of its checksums are right.

    Bytes after the last chunk (IEND) are ignored.
    """
    view, at, received, expected = memoryview(data), 8, 0, 0
    inflate = zlib.decompressobj()
    while True:
        if at + 12 > len(data):
            raise UnreadableImageError("truncated: the PNG file has no IEND chunk")
        length, name = _PNG_CHUNK(data, at)
        end = at + 12 + length
        shown = name.decode("ascii", "backslashreplace")
        if end > len(data):
            raise UnreadableImageError(f"truncated: its chunk {shown} ends after the file")
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end]):
            raise UnreadableImageError(f"damaged: the checksum of its chunk {shown} is wrong")
        if name == b"IHDR":
            expected = _png_nbytes(data)
        elif name == b"IDAT":
            for start in range(at + 8, end - 4, _INFLATE_NBYTES):
                piece = view[start : min(start + _INFLATE_NBYTES, end - 4)]
                received += len(inflate.decompress(piece))
        elif name == _PNG_END:
            break
        at = end
    if received < expected or not inflate.eof:
        raise UnreadableImageError(
            f"truncated: its pixels have {received} of {expected} bytes, or lack their checksum"
        )


def _png_nbytes(data: bytes) -> int:
    """Return the size of a PNG's decompressed rows in bytes, each with its filter byte."""
    width, height, depth, colour_type, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    bits = depth * _PNG_CHANNELS[colour_type]
    total = 0
    for left, top, across, down in _ADAM7 if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 < rows:
            total += rows * (1 + -(-columns * bits // 8))
    return total


def _check_jpeg(data: bytes, image: Image.Image) -> bool:
    """Raise an error if a JPEG file is damaged or lacks a part of the image.

    libjpeg only warns about missing data and fills it in; simplejpeg reports the warning, and
    Pillow does not. Returns False for the rare files that simplejpeg cannot decode.
    """
    try:
        simplejpeg.decode_jpeg(
            data,
            _JPEG_CHECK_SPACES.get(image.mode, "RGB"),
            min_width=max(1, image.width // 8),
            min_height=max(1, image.height // 8),
        )
    except ValueError as error:
        damage = _JPEG_DAMAGE.match(str(error))
        if damage is None:
            return False
        padding = _JPEG_PADDING.match(damage[1] or "")
        # Some cameras pad their data with a few zeros.
        if padding is None or bytes(int(padding[1])) + b"\xff\xd9" not in data:
            reason = f"damaged: {damage[1]}" if damage[1] else "truncated: it has no end marker"
            raise UnreadableImageError(reason) from error
    _check_jpeg_scans(data)
    return True


def _check_jpeg_scans(data: bytes) -> None:
    """Raise an error unless the scans of a JPEG file contain all bits of all coefficients.

    A progressive file that ends after one of its first scans is valid for libjpeg, but blurred.
    """
    missing: dict[int, list[int]] = {}
    """For each component: the number of low bits that each coefficient lacks; -1 before its scan.
    """
    at, is_progressive = 2, False
    while True:
        while data[at + 1] == 0xFF:  # fill bytes before a marker
            at += 1
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4])
        if marker == _JPEG_EOI:
            break
        if marker in _JPEG_SOF:
            is_progressive = marker in _JPEG_PROGRESSIVE
            components = data[at + 10 : at + 10 + 3 * data[at + 9] : 3]
            missing = {component: [-1] * _NUM_COEFFICIENTS for component in components}
        at += 2 + length
        if marker == _JPEG_SOS:
            header = data[at - length + 2 : at]
            first, last, bits = header[-3:]
            for component in header[1 : 1 + 2 * header[0] : 2]:
                if is_progressive:
                    missing[component][first : last + 1] = [bits & 15] * (last - first + 1)
                else:
                    missing[component] = [0] * _NUM_COEFFICIENTS
            found = _JPEG_SCAN_END.search(data, at)
            if found is None:
                raise UnreadableImageError("truncated: it has no end marker")
            at = found.start()
    if any(any(bits) for bits in missing.values()):
        raise UnreadableImageError("truncated: some scans of the JPEG file are missing")


# Headers of simple files

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_PNG_HEAD = struct.Struct(">IIBB").unpack_from
_PNG_CHUNK = struct.Struct(">I4s").unpack_from
_PNG_RGB = [8, 2]
PNG_EXIF = frozenset((b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp"))
"""Names of PNG chunks and of PNG text keywords that can contain an orientation."""
_PNG_SPECIAL = PNG_EXIF | {b"tRNS", b"iCCP", b"acTL"}

_JPEG_START = 0xD8
_JPEG_EOI = 0xD9
_JPEG_SOS = 0xDA
_JPEG_SEGMENT = struct.Struct(">HH").unpack_from
_JPEG_FRAME = struct.Struct(">BHHBBxxBxxB").unpack_from
"""Reads a JPEG frame header: bit depth, height, width, number of components, and the identifier of
each of three components."""
_JPEG_FRAMES = (0xFFC0, 0xFFC1, 0xFFC2)
"""Markers of JPEG frame headers: baseline, extended and progressive, all with Huffman coding."""
_JPEG_SCAN = 0xFFDA
_JPEG_IGNORED = frozenset((0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, 0xFFFE))
"""Markers of JPEG segments that do not change how the pixels are shown: tables, restart interval,
JFIF, comment. Others can contain an orientation, a colour profile or a colour transform."""
_JPEG_COMPONENTS = (3, 1, 2, 3)
"""Number and identifiers of the components of a JFIF image; others can mean another colour
space."""

_WEBP_SIZE = 0x3FFF
_WEBP_LOSSY_SIGNATURE = b"\x9d\x01\x2a"
_WEBP_LOSSLESS_SIGNATURE = 0x2F
_WEBP_ALPHA = 1 << 28


def parse_simple_header(data: bytes) -> tuple[str, Size] | None:
    """Return the format and (width, height) of a simple image file; None for other files.

    Simple means 8-bit RGB, upright, opaque, not animated and without a colour profile. The code is
    minimal, because Python runs about ten times slower between two images: decoding evicts its
    data from the CPU caches.
    """
    try:
        file_format, read = _HEADER_PARSERS[data[0]]
        size = read(data)
    except (KeyError, IndexError, struct.error):
        return None  # another format, or a truncated header
    return None if size is None else (file_format, size)


def png_chunks(data: bytes) -> set[bytes]:
    """Return the names of a PNG file's chunks and the keywords of its text chunks.

    Pixels are not decoded, and the name of their chunk (IDAT) is left out.
    """
    names, at, end = set(), 8, len(data) - 8
    while at <= end:
        length, name = _PNG_CHUNK(data, at)
        if name != b"IDAT":  # pixel data: most chunks, and never searched for
            names.add(name)
            if name in _PNG_TEXTS:
                names.add(data[at + 8 : at + 88].partition(b"\0")[0])
        at += 12 + length
    return names


def _parse_png(data: bytes) -> Size | None:
    if not data.startswith(_PNG_SIGNATURE):
        return None
    width, height, *kind = _PNG_HEAD(data, 16)
    if kind != _PNG_RGB or not _PNG_SPECIAL.isdisjoint(png_chunks(data)):
        return None
    return width, height


def _parse_jpeg(data: bytes) -> Size | None:
    size, at = None, 2
    if data[1] != _JPEG_START:
        return None
    while True:
        marker, length = _JPEG_SEGMENT(data, at)
        if marker in _JPEG_IGNORED:
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


def _parse_webp(data: bytes) -> Size | None:
    match data[:4] + data[8:16]:
        case b"RIFFWEBPVP8 ":
            if data[23:26] != _WEBP_LOSSY_SIGNATURE:
                return None
            width, height = struct.unpack_from("<HH", data, 26)
            return width & _WEBP_SIZE, height & _WEBP_SIZE
        case b"RIFFWEBPVP8L":
            mark, bits = struct.unpack_from("<BI", data, 20)
            if mark != _WEBP_LOSSLESS_SIGNATURE or bits & _WEBP_ALPHA:
                return None
            return (bits & _WEBP_SIZE) + 1, (bits >> 14 & _WEBP_SIZE) + 1
    return None


_HEADER_PARSERS: dict[int, tuple[str, Callable[[bytes], Size | None]]] = {
    0xFF: ("JPEG", _parse_jpeg),
    0x89: ("PNG", _parse_png),
    ord("R"): ("WEBP", _parse_webp),
}
"""Image format and header parser by the first byte of a file. A parser returns the (width, height)
of an image that is upright, opaque 8-bit RGB without a colour profile, and None for others."""
