from __future__ import annotations

import io
import random
import struct
import zlib
from zlib import crc32

import numpy as np
import pytest
from made_media import photo, picture_bytes
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from gracetune.data.images import (
    UnreadableImageError,
    choose_decoders,
    decode,
    decode_pixels,
    parse_simple_header,
    png_chunks,
)

FAST = choose_decoders()
COLOURED = photo(61, 47)
GREY = COLOURED[..., 0].copy()
SEE_THROUGH = np.dstack([COLOURED, GREY])


def _text() -> PngInfo:
    info = PngInfo()
    info.add_text("Software", "made by hand")
    return info


def _interlaced(pixels: np.ndarray) -> bytes:
    """Adam7, which Pillow reads and does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc32(name + data))

    steps = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2), (0, 2, 1, 2))
    passes = [pixels[y::down, x::across] for y, down, x, across in (*steps, (1, 2, 0, 1))]
    rows = b"".join(b"\0" + row.tobytes() for part in passes for row in part if row.size)
    height, width = pixels.shape[:2]
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PLAIN = {
    "JPEG": ("JPEG", {"quality": 90}),
    "JPEG 4:4:4": ("JPEG", {"subsampling": 0, "comment": b"made by hand"}),
    "progressive JPEG": ("JPEG", {"progressive": True}),
    "JPEG with restarts": ("JPEG", {"restart_marker_rows": 1}),
    "PNG": ("PNG", {}),
    "PNG with a text": ("PNG", {"pnginfo": _text()}),
    "WebP": ("WEBP", {"quality": 80}),
    "lossless WebP": ("WEBP", {"lossless": True}),
}


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _animated(file_format: str) -> bytes:
    frames = [Image.fromarray(photo(24, 16, seed)) for seed in range(3)]
    buffer = io.BytesIO()
    frames[0].save(buffer, file_format, save_all=True, append_images=frames[1:], duration=100)
    return buffer.getvalue()


def _profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def _deep_jpeg() -> bytes:
    """A header that claims twelve bits; what follows it does not matter."""
    data = bytearray(picture_bytes(COLOURED, "JPEG"))
    data[data.index(b"\xff\xc0\x00\x11") + 4] = 12
    return bytes(data)


def _special() -> dict[str, bytes]:
    made = {"BMP": picture_bytes(COLOURED, "BMP"), "nothing": b"", "no WebP": b"RIFF" + b"x" * 60}
    made |= {"no JPEG": b"\xff\x00" + b"x" * 60, "no PNG": b"\x89" + b"x" * 60}
    for file_format in ("JPEG", "PNG", "WEBP"):
        made |= {
            f"turned {file_format}": picture_bytes(COLOURED, file_format, exif=_turned()),
            f"{file_format} of a profile": picture_bytes(
                COLOURED, file_format, icc_profile=_profile()
            ),
        }
    for file_format in ("PNG", "WEBP"):
        made |= {
            f"see-through {file_format}": picture_bytes(SEE_THROUGH, file_format, lossless=True),
            f"animated {file_format}": _animated(file_format),
        }
    return made | {
        "grey JPEG": picture_bytes(GREY, "JPEG"),
        "grey PNG": picture_bytes(GREY),
        "JPEG of another depth": _deep_jpeg(),
        "16 bits": picture_bytes(np.zeros((4, 4), np.uint16)),
        "RGB in a JPEG": picture_bytes(COLOURED, "JPEG", keep_rgb=True),
        "PNG of one clear colour": picture_bytes(COLOURED, "PNG", transparency=(1, 2, 3)),
    }


@pytest.mark.parametrize(("file_format", "options"), PLAIN.values(), ids=PLAIN)
def test_plain_pictures_are_known_by_their_header(
    file_format: str, options: dict[str, object]
) -> None:
    data = picture_bytes(COLOURED, file_format, **options)
    assert parse_simple_header(data) == (file_format, (61, 47))
    assert np.array_equal(decode_pixels(data, FAST), np.asarray(decode(data)))


def test_an_interlaced_png_is_plain_too() -> None:
    data = _interlaced(COLOURED)
    assert parse_simple_header(data) == ("PNG", (61, 47))
    assert np.array_equal(np.asarray(decode(data)), COLOURED)
    assert np.array_equal(FAST.simple["PNG"](data), COLOURED)


def test_a_damaged_png_is_read_as_pillow_reads_it_or_not_at_all() -> None:
    """Damage anywhere in the file: the decoder of plain files has checksums of its own."""
    whole = picture_bytes(COLOURED, "PNG")
    choose = random.Random(1)
    outcomes = []
    for _ in range(500):
        data = bytearray(whole)
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        plain = FAST.simple["PNG"](bytes(data)) if parse_simple_header(bytes(data)) else None
        outcomes.append(plain is not None)
        if plain is not None:
            assert np.array_equal(plain, np.asarray(decode(bytes(data))))
    assert set(outcomes) == {True, False}


SPECIAL = _special()
NO_PICTURES = {"nothing", "no WebP", "no JPEG", "no PNG", "JPEG of another depth"}


@pytest.mark.parametrize("data", SPECIAL.values(), ids=SPECIAL)
def test_of_all_others_nothing_is_said(data: bytes) -> None:
    assert parse_simple_header(data) is None


@pytest.mark.parametrize("name", sorted(SPECIAL.keys() - NO_PICTURES))
def test_others_look_as_pillow_shows_them(name: str) -> None:
    data = SPECIAL[name]
    assert np.array_equal(decode_pixels(data, FAST), np.asarray(decode(data)))


@pytest.mark.parametrize("name", PLAIN)
def test_a_header_that_ends_early_is_none(name: str) -> None:
    file_format, options = PLAIN[name]
    data = picture_bytes(COLOURED, file_format, **options)
    for end in range(min(len(data), 700)):
        found = parse_simple_header(data[:end])
        assert found is None or found[1] == (61, 47), end


@pytest.mark.parametrize("name", PLAIN)
def test_damaged_bytes_are_read_as_pillow_reads_them_or_not_at_all(name: str) -> None:
    file_format, options = PLAIN[name]
    whole = picture_bytes(COLOURED, file_format, **options)
    choose = random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        data[choose.randrange(min(len(data), 400))] ^= 1 << choose.randrange(8)
        try:
            expected = np.asarray(decode(bytes(data)))
        except UnreadableImageError:
            continue  # a decoder may still see a picture; opening the data set has left it out
        assert np.array_equal(decode_pixels(bytes(data), FAST), expected)


def test_more_pixels_than_pillow_likes_are_for_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture_bytes(COLOURED, "JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 61 * 47 // 2 - 1)
    with pytest.raises(UnreadableImageError, match="decompression bomb"):
        decode_pixels(data, FAST)


def test_texts_of_a_png_are_named_by_their_keywords() -> None:
    data = picture_bytes(COLOURED, "PNG", exif=_turned())
    assert {b"IHDR", b"eXIf", b"IEND"} == png_chunks(data)
