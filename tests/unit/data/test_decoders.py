from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from media_files import animated_image_bytes, image_bytes, photo
from PIL import Image

from gracetune.data.images import PILLOW, Decoders, UnreadableImageError, choose_decoders, decode

FAST = choose_decoders()


class RecordingDecoders:
    """Wraps the fast decoders and records whether each call succeeded."""

    def __init__(self) -> None:
        self.outcomes: list[bool] = []

    def decoders(self) -> Decoders:
        def recorded(fast: object) -> object:
            def call(data: bytes, mode: str, least: tuple[int, int]) -> object:
                assert callable(fast)
                pixels = fast(data, mode, least)
                self.outcomes.append(pixels is not None)
                return pixels

            return call

        return Decoders({name: recorded(fast) for name, fast in FAST.by_format.items()})


def test_the_optional_decoders_are_installed_and_described() -> None:
    assert set(FAST.by_format) == {"JPEG", "PNG", "WEBP"}
    assert FAST.description == (
        "images are decoded by simplejpeg (JPEG), imagecodecs (PNG, WebP), Pillow "
        f"and resized by {FAST.lanczos}"
    )


def test_torch_resizes_if_it_supports_lanczos() -> None:
    """Torch takes a quarter of the time; a probe that fails by mistake would go unnoticed."""
    pixels = torch.zeros((1, 30, 20, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    try:
        torch.nn.functional.interpolate(pixels, size=(9, 7), mode="lanczos", antialias=True)
    except (ValueError, NotImplementedError):
        assert FAST.lanczos == "pillow"
    else:
        assert FAST.lanczos == "torch"


def test_without_the_extra_pillow_decodes_and_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['imagecodecs'] = None\n"
        "from gracetune.data.images import choose_decoders\n"
        "chosen = choose_decoders(); print(len(chosen.by_format), chosen.description)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == (
        f"1 images are decoded by simplejpeg (JPEG), Pillow and resized by {FAST.lanczos}; "
        "`pip install gracetune[images]` makes it faster"
    )


COLOURED = photo(61, 47)
GREY = COLOURED[..., 0].copy()
RGBA = np.dstack([COLOURED, GREY])
CASES = [
    ("JPEG", COLOURED, {"subsampling": 0}),
    ("JPEG", COLOURED, {"subsampling": 1, "quality": 97}),
    ("JPEG", COLOURED, {"subsampling": 2, "progressive": True}),
    ("JPEG", COLOURED, {"keep_rgb": True}),
    ("JPEG", GREY, {}),
    ("PNG", COLOURED, {}),
    ("PNG", GREY, {}),
    ("PNG", RGBA, {"compress_level": 9}),
    ("WEBP", COLOURED, {"quality": 80}),
    ("WEBP", RGBA, {"quality": 60}),
    ("WEBP", COLOURED, {"lossless": True}),
]


@pytest.mark.parametrize(("file_format", "pixels", "options"), CASES)
def test_fast_decoders_give_the_same_pixels_as_pillow(
    file_format: str, pixels: np.ndarray, options: dict[str, object]
) -> None:
    data = image_bytes(pixels, file_format, **options)
    recording = RecordingDecoders()
    assert np.array_equal(np.asarray(decode(data, recording.decoders())), np.asarray(decode(data)))
    assert recording.outcomes == [True]


def _sixteen_bits() -> bytes:
    levels = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    return image_bytes(levels)


def _palette() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(COLOURED).quantize(16).save(buffer, "PNG")
    return buffer.getvalue()


def _cmyk() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(COLOURED).convert("CMYK").save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        animated_image_bytes("WEBP", lossless=True),
        animated_image_bytes("PNG", lossless=True),
        _sixteen_bits(),
        _palette(),
        _cmyk(),
    ],
    ids=["animated WebP", "animated PNG", "16 bits", "palette", "CMYK"],
)
def test_unusual_images_are_decoded_by_pillow(data: bytes) -> None:
    recording = RecordingDecoders()
    assert np.array_equal(np.asarray(decode(data, recording.decoders())), np.asarray(decode(data)))
    assert True not in recording.outcomes


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_damaged_images_raise_pillows_error(file_format: str) -> None:
    data = image_bytes(COLOURED, file_format)
    recording = RecordingDecoders()
    with pytest.raises(UnreadableImageError) as slow:
        decode(data[: len(data) // 2])
    with pytest.raises(UnreadableImageError) as fast:
        decode(data[: len(data) // 2], recording.decoders())
    assert fast.value.reason == slow.value.reason
    assert True not in recording.outcomes


@pytest.mark.parametrize("decoders", [PILLOW, FAST])
def test_reduced_decoding_is_never_smaller_than_required(decoders: Decoders) -> None:
    data = image_bytes(photo(640, 480), "JPEG", quality=95)
    reduced = decode(data, decoders, (150, 110))
    assert reduced.size == (160, 120)
    near = np.asarray(decode(data).resize((160, 120), Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(reduced) - near).mean() < 3
    assert decode(data, decoders, (150, 121)).size == (320, 240)
    assert decode(image_bytes(photo(64, 48)), decoders, (8, 6)).size == (64, 48)


@pytest.mark.parametrize("decoders", [PILLOW, FAST])
def test_reduced_decoding_follows_the_exif_orientation(decoders: Decoders) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = image_bytes(photo(640, 320), "JPEG", exif=exif)
    assert decode(data, decoders, (80, 150)).size == (80, 160)
    assert decode(data, decoders, (81, 150)).size == (160, 320)
