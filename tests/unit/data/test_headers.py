from __future__ import annotations

import random

import numpy as np
import pytest
from media_files import animated_image_bytes, assemble_png, image_bytes, photo
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
RGBA = np.dstack([COLOURED, GREY])


def _text() -> PngInfo:
    info = PngInfo()
    info.add_text("Software", "made by hand")
    return info


def _interlaced(pixels: np.ndarray) -> bytes:
    """Return an Adam7-interlaced PNG, which Pillow can read but not write."""
    steps = ((0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2), (0, 2, 1, 2))
    passes = [pixels[y::down, x::across] for y, down, x, across in (*steps, (1, 2, 0, 1))]
    rows = b"".join(b"\0" + row.tobytes() for part in passes for row in part if row.size)
    height, width = pixels.shape[:2]
    return assemble_png((width, height), 8, 2, rows, interlaced=True)


SIMPLE = {
    "JPEG": ("JPEG", {"quality": 90}),
    "JPEG 4:4:4": ("JPEG", {"subsampling": 0, "comment": b"made by hand"}),
    "progressive JPEG": ("JPEG", {"progressive": True}),
    "JPEG with restarts": ("JPEG", {"restart_marker_rows": 1}),
    "PNG": ("PNG", {}),
    "PNG with a text": ("PNG", {"pnginfo": _text()}),
    "WebP": ("WEBP", {"quality": 80}),
    "lossless WebP": ("WEBP", {"lossless": True}),
}


def _rotated_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def _deep_jpeg() -> bytes:
    """Return a JPEG whose header claims 12 bits per sample."""
    data = bytearray(image_bytes(COLOURED, "JPEG"))
    data[data.index(b"\xff\xc0\x00\x11") + 4] = 12
    return bytes(data)


def _special() -> dict[str, bytes]:
    files = {"BMP": image_bytes(COLOURED, "BMP"), "nothing": b"", "no WebP": b"RIFF" + b"x" * 60}
    files |= {"no JPEG": b"\xff\x00" + b"x" * 60, "no PNG": b"\x89" + b"x" * 60}
    for file_format in ("JPEG", "PNG", "WEBP"):
        files |= {
            f"turned {file_format}": image_bytes(COLOURED, file_format, exif=_rotated_exif()),
            f"{file_format} of a profile": image_bytes(
                COLOURED, file_format, icc_profile=_profile()
            ),
        }
    for file_format in ("PNG", "WEBP"):
        files |= {
            f"see-through {file_format}": image_bytes(RGBA, file_format, lossless=True),
            f"animated {file_format}": animated_image_bytes(file_format),
        }
    return files | {
        "grey JPEG": image_bytes(GREY, "JPEG"),
        "grey PNG": image_bytes(GREY),
        "JPEG of another depth": _deep_jpeg(),
        "16 bits": image_bytes(np.zeros((4, 4), np.uint16)),
        "RGB in a JPEG": image_bytes(COLOURED, "JPEG", keep_rgb=True),
        "PNG of one clear colour": image_bytes(COLOURED, "PNG", transparency=(1, 2, 3)),
    }


@pytest.mark.parametrize(("file_format", "options"), SIMPLE.values(), ids=SIMPLE)
def test_simple_images_are_recognized_by_their_header(
    file_format: str, options: dict[str, object]
) -> None:
    data = image_bytes(COLOURED, file_format, **options)
    assert parse_simple_header(data) == (file_format, (61, 47))
    assert np.array_equal(decode_pixels(data, FAST), np.asarray(decode(data)))


def test_an_interlaced_png_is_a_simple_image() -> None:
    data = _interlaced(COLOURED)
    assert parse_simple_header(data) == ("PNG", (61, 47))
    assert np.array_equal(np.asarray(decode(data)), COLOURED)
    assert np.array_equal(FAST.simple["PNG"](data), COLOURED)


def test_a_damaged_png_is_decoded_like_pillow_or_not_at_all() -> None:
    """The damage is anywhere in the file; the decoder of simple files has its own checksums."""
    whole = image_bytes(COLOURED, "PNG")
    choose = random.Random(1)
    outcomes = []
    for _ in range(500):
        data = bytearray(whole)
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        decoded = FAST.simple["PNG"](bytes(data)) if parse_simple_header(bytes(data)) else None
        outcomes.append(decoded is not None)
        if decoded is not None:
            assert np.array_equal(decoded, np.asarray(decode(bytes(data))))
    assert set(outcomes) == {True, False}


SPECIAL = _special()
NOT_IMAGES = {"nothing", "no WebP", "no JPEG", "no PNG", "JPEG of another depth"}


@pytest.mark.parametrize("data", SPECIAL.values(), ids=SPECIAL)
def test_other_files_have_no_simple_header(data: bytes) -> None:
    assert parse_simple_header(data) is None


@pytest.mark.parametrize("name", sorted(SPECIAL.keys() - NOT_IMAGES))
def test_other_images_have_the_pixels_of_pillow(name: str) -> None:
    data = SPECIAL[name]
    assert np.array_equal(decode_pixels(data, FAST), np.asarray(decode(data)))


@pytest.mark.parametrize("name", SIMPLE)
def test_a_truncated_header_is_ignored_or_has_the_right_size(name: str) -> None:
    file_format, options = SIMPLE[name]
    data = image_bytes(COLOURED, file_format, **options)
    for end in range(min(len(data), 700)):
        found = parse_simple_header(data[:end])
        assert found is None or found[1] == (61, 47), end


@pytest.mark.parametrize("name", SIMPLE)
def test_images_with_a_damaged_header_have_the_pixels_of_pillow(name: str) -> None:
    file_format, options = SIMPLE[name]
    whole = image_bytes(COLOURED, file_format, **options)
    choose = random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        data[choose.randrange(min(len(data), 400))] ^= 1 << choose.randrange(8)
        try:
            expected = np.asarray(decode(bytes(data)))
        except UnreadableImageError:
            continue  # such files are skipped when the dataset is opened
        assert np.array_equal(decode_pixels(bytes(data), FAST), expected)


def test_images_above_pillows_pixel_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = image_bytes(COLOURED, "JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 61 * 47 // 2 - 1)
    with pytest.raises(UnreadableImageError, match="decompression bomb"):
        decode_pixels(data, FAST)


def test_png_chunks_lists_every_chunk_except_pixels() -> None:
    data = image_bytes(COLOURED, "PNG", exif=_rotated_exif())
    assert {b"IHDR", b"eXIf", b"IEND"} == png_chunks(data)
