from __future__ import annotations

import io
import struct
import sys
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from media_files import animated_image_bytes, assemble_png, heic_bytes
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from gracetune.data.images import (
    UnreadableImageError,
    choose_decoders,
    crop_box,
    decode,
    decode_pixels,
    fit,
    fit_pixels,
    probe_image,
)
from gracetune.errors import DataError


def _encode(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def _corners(width: int = 24, height: int = 16) -> Image.Image:
    """Red top left, green top right, blue bottom left, white bottom right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 255, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    pixels[height // 2 :, width // 2 :] = 255
    return Image.fromarray(pixels)


def _noise(width: int = 40, height: int = 30) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


FORMATS = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF"]


@pytest.mark.parametrize("file_format", FORMATS)
def test_every_image_format_is_read(file_format: str) -> None:
    data = _encode(_corners(), file_format)
    assert probe_image(data) == (24, 16)
    image = decode(data)
    assert (image.mode, image.size) == ("RGB", (24, 16))
    found = np.asarray(image)[[3, 3, 12, 12], [3, 20, 3, 20]].astype(int)
    wanted = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    assert np.abs(found - np.array(wanted)).max() < 30


def test_heic_is_recognised_by_its_content() -> None:
    data = heic_bytes(np.asarray(_corners(96, 64)), quality=95)
    assert probe_image(data) == (96, 64)
    image = decode(data)
    assert (image.mode, image.size) == ("RGB", (96, 64))
    found = np.asarray(image)[[9, 9, 50, 50], [9, 80, 9, 80]].astype(int)
    wanted = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    assert np.abs(found - np.array(wanted)).max() < 12
    assert np.array_equal(decode_pixels(data, choose_decoders()), np.asarray(image))


def test_heic_is_shown_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise to show it
    data = heic_bytes(np.asarray(_corners(96, 64)), exif=exif.tobytes())
    assert probe_image(data) == (64, 96)
    red, blue = np.asarray(decode(data))[[9, 9], [50, 9]].astype(int)
    assert red[0] > 200 > 60 > red[2]
    assert blue[2] > 200 > 60 > blue[0]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_heic_is_refused(share: float) -> None:
    data = heic_bytes(np.asarray(_noise(96, 64)))
    with pytest.raises(UnreadableImageError):
        probe_image(data[: int(len(data) * share)])


def test_heic_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    data = heic_bytes(np.asarray(_noise(96, 64)))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DataError, match=r"pip install 'gracetune\[images\]'") as caught:
        probe_image(data)
    assert not isinstance(caught.value, UnreadableImageError)


def test_avif_that_pillow_cannot_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _encode(_noise(), "AVIF")
    monkeypatch.setattr("PIL.features.check", lambda name: False)
    with pytest.raises(DataError, match="AVIF image, and this Pillow was built without"):
        probe_image(data)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_rotated_by_their_exif_orientation(file_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    # Store the pixels such that the upright image is `_corners()`.
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    stored = _corners() if undo is None else _corners().transpose(undo)
    data = _encode(stored, file_format, exif=exif)
    assert probe_image(data) == (24, 16)
    image = decode(data)
    assert image.size == (24, 16)
    difference = np.asarray(image).astype(int) - np.asarray(_corners())
    assert np.abs(difference[[3, 3, 12, 12], [3, 20, 3, 20]]).max() < 30


def test_broken_exif_data_is_ignored() -> None:
    data = _encode(_corners(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f")
    assert probe_image(data) == (24, 16)
    assert decode(data).size == (24, 16)


def test_images_of_16_bits_are_scaled_not_clipped() -> None:
    levels = np.linspace(0, 65535, 256).reshape(16, 16)
    data = _encode(Image.fromarray(levels.astype(np.uint16)))
    assert np.abs(np.asarray(decode(data))[..., 0].astype(int) - levels / 257).max() <= 1


def test_images_of_32_bit_integers_and_floats_are_scaled() -> None:
    levels = np.linspace(0, 65535, 256).reshape(16, 16)
    wide = decode(_encode(Image.fromarray(levels.astype(np.int32)), "TIFF"))
    assert np.abs(np.asarray(wide)[..., 0] - levels / 257).max() <= 1
    floats = levels.astype(np.float32) / 65535
    floats[0, 0] = np.nan
    real = decode(_encode(Image.fromarray(floats), "TIFF"))
    assert np.abs(np.asarray(real)[..., 0] - levels / 257).max() <= 1


def test_integers_up_to_255_are_not_scaled() -> None:
    levels = np.arange(256, dtype=np.int32).reshape(16, 16)
    wide = decode(_encode(Image.fromarray(levels), "TIFF"))
    assert np.array_equal(np.asarray(wide)[..., 0], levels)


@pytest.mark.parametrize(("low", "high"), [(0, 65536), (-1, 200), (0, 2**31 - 1)])
def test_integers_of_unknown_scale_are_unreadable(low: int, high: int) -> None:
    levels = np.array([[low, high]], np.int32)
    with pytest.raises(UnreadableImageError, match="integer values range from"):
        decode(_encode(Image.fromarray(levels), "TIFF"))


@pytest.mark.parametrize("high", [2.5, 90.0, 254.7, 255.0, 255.2])
def test_floats_up_to_255_are_not_scaled(high: float) -> None:
    levels = np.linspace(0, high, 256, dtype=np.float32).reshape(16, 16)
    real = decode(_encode(Image.fromarray(levels), "TIFF"))
    assert np.abs(np.asarray(real)[..., 0] - levels).max() <= 0.5001


@pytest.mark.parametrize("low", [-1e-4, 0.0])
@pytest.mark.parametrize("high", [0.3, 1.0, 1.0001])
def test_floats_from_0_to_1_may_have_rounding_errors(low: float, high: float) -> None:
    levels = np.linspace(low, high, 256, dtype=np.float32).reshape(16, 16)
    real = decode(_encode(Image.fromarray(levels), "TIFF"))
    assert np.abs(np.asarray(real)[..., 0] - levels * 255).max() <= 0.6


@pytest.mark.parametrize(
    ("low", "high"), [(0, 256), (0, 65535), (-1, 1), (-3, 200), (0, 1.4), (0, np.inf), (-np.inf, 1)]
)
def test_floats_of_unknown_scale_are_unreadable(low: float, high: float) -> None:
    levels = np.full((4, 4), 0.5, np.float32)
    levels[0, 0], levels[0, 1] = low, high
    with pytest.raises(UnreadableImageError, match=f"from {low:g} to {high:g}, which is neither"):
        decode(_encode(Image.fromarray(levels), "TIFF"))


def test_transparent_pixels_are_blended_over_white() -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[0] = (255, 0, 0, 255)
    pixels[1] = (255, 0, 0, 0)
    pixels[2] = (0, 0, 0, 128)
    image = np.asarray(decode(_encode(Image.fromarray(pixels))))
    assert image[:3, 0].tolist() == [[255, 0, 0], [255, 255, 255], [127, 127, 127]]


def test_transparent_grey_pixels_are_blended_over_white() -> None:
    pixels = np.array([[[0, 0], [0, 255]]], np.uint8)
    image = np.asarray(decode(_encode(Image.fromarray(pixels, "LA"))))
    assert image[0].tolist() == [[255, 255, 255], [0, 0, 0]]


@pytest.mark.parametrize("transparency", [0, b"\x00\xff"])
def test_palette_images_are_read_with_and_without_transparency(transparency: int | bytes) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    assert np.asarray(decode(_encode(image)))[0].tolist() == [[10, 20, 30], [200, 100, 50]]
    see_through = decode(_encode(image, transparency=transparency))
    assert np.asarray(see_through)[0].tolist() == [[255, 255, 255], [200, 100, 50]]


def test_the_transparent_colour_of_an_rgb_png_becomes_white() -> None:
    data = _encode(_corners(), transparency=(255, 0, 0))
    assert np.asarray(decode(data))[0, 0].tolist() == [255, 255, 255]


def test_one_bit_images_are_read() -> None:
    assert np.asarray(decode(_encode(Image.new("1", (3, 3), 1)))).min() == 255


def test_cmyk_is_converted_to_rgb() -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red, green, blue = np.asarray(decode(_encode(image, "JPEG", quality=95)))[4, 4].astype(int)
    assert red > 230
    assert max(green, blue) < 25


def _gamma_profile() -> bytes:
    """sRGB's primaries with a linear curve, so that 128 means much more light than in sRGB."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = struct.unpack_from(">I", profile, 128)[0]
    for at in range(132, 132 + 12 * count, 12):
        name, offset, size = struct.unpack_from(">4sII", profile, at)
        if name in (b"rTRC", b"gTRC", b"bTRC"):
            profile[offset : offset + size] = (b"curv" + bytes(8)).ljust(size, b"\0")
    return bytes(profile)


def test_an_icc_profile_is_converted_to_srgb() -> None:
    grey = Image.new("RGB", (8, 8), (128, 128, 128))
    assert np.asarray(decode(_encode(grey)))[0, 0].tolist() == [128, 128, 128]
    converted = np.asarray(decode(_encode(grey, icc_profile=_gamma_profile())))
    assert np.abs(converted[0, 0].astype(int) - 188).max() <= 1


def test_an_icc_profile_does_not_change_alpha() -> None:
    image = Image.new("RGBA", (8, 8), (128, 128, 128, 0))
    image.putpixel((0, 0), (128, 128, 128, 255))
    converted = np.asarray(decode(_encode(image, icc_profile=_gamma_profile())))
    assert abs(int(converted[0, 0, 0]) - 188) <= 1
    assert converted[4, 4].tolist() == [255, 255, 255]


def test_mismatched_or_broken_icc_profiles_are_ignored() -> None:
    grey = Image.new("L", (8, 8), 128)
    rgb = Image.new("RGB", (8, 8), (128, 128, 128))
    for data in (_encode(grey, icc_profile=_gamma_profile()), _encode(rgb, icc_profile=b"x" * 200)):
        assert np.asarray(decode(data))[0, 0].tolist() == [128, 128, 128]


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("read", [probe_image, decode])
def test_truncated_files_are_unreadable(file_format: str, share: float, read: object) -> None:
    data = _encode(_noise(), file_format)
    assert callable(read)
    with pytest.raises(UnreadableImageError) as caught:
        read(data[: int(len(data) * share)])
    assert caught.value.reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello, I am a text", "not an image in a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image in a known format"),
    ],
)
@pytest.mark.parametrize("read", [probe_image, decode])
def test_files_that_are_not_images_are_unreadable(data: bytes, reason: str, read: object) -> None:
    assert callable(read)
    with pytest.raises(UnreadableImageError, match=reason):
        read(data)


def _png_of(width: int, height: int) -> bytes:
    """Return a small PNG whose header claims this size."""
    return assemble_png((width, height), 1, 0, bytes(100))


@pytest.mark.parametrize("read", [probe_image, decode])
def test_decompression_bombs_are_unreadable_and_cause_no_warning(read: object) -> None:
    assert callable(read)
    with pytest.raises(UnreadableImageError, match="pixels"):
        read(_png_of(50_000, 50_000))
    with pytest.raises(UnreadableImageError, match="truncated"):
        read(_png_of(10_000, 10_000))  # Pillow would warn of this size


def test_damaged_files_that_probe_accepts_can_be_decoded() -> None:
    random = np.random.default_rng(0)
    for file_format in FORMATS[:-2]:
        clean = np.frombuffer(_encode(_noise(12, 10), file_format), np.uint8)
        for _ in range(60):
            data = clean.copy()
            hits = random.integers(0, len(data), 3)
            data[hits] = random.integers(0, 256, 3)
            size = _size_or_none(probe_image, data)
            assert size is None or size == _size_or_none(decode, data)


def _size_or_none(read: object, data: np.ndarray) -> object:
    assert callable(read)
    try:
        found = read(data.tobytes())
    except UnreadableImageError:
        return None
    return found.size if isinstance(found, Image.Image) else found


# Damage that Pillow does not report


def _accepted_as(data: bytes) -> bytes | None:
    """Return the pixels of a file that would be trained on; None if it is refused."""
    try:
        probe_image(data)
        return decode(data).tobytes()
    except UnreadableImageError:
        return None


def _png_with_text() -> bytes:
    text = PngInfo()
    text.add_text("Title", "noise")
    return _encode(_noise(8, 6), pnginfo=text, dpi=(72, 72))


PNGS = {
    "rgb": lambda: _encode(_noise(8, 6)),
    "text": _png_with_text,
    "palette": lambda: _encode(_noise(8, 6).convert("P")),
    "one bit": lambda: _encode(_noise(9, 6).convert("1")),
    "16 bits": lambda: _encode(Image.fromarray(np.arange(48, dtype=np.uint16).reshape(6, 8) * 99)),
    "interlaced": lambda: assemble_png((1, 3), 8, 2, b"\0abc\0def\0ghi", interlaced=True),
    "animated": lambda: animated_image_bytes("PNG"),
}


@pytest.mark.parametrize("kind", sorted(set(PNGS) - {"animated"}))
def test_every_flipped_bit_of_a_png_is_found(kind: str) -> None:
    data = PNGS[kind]()
    intact = _accepted_as(data)
    assert intact is not None
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            assert _accepted_as(bytes(damaged)) in (None, intact), f"bit {bit} of byte {at}"


@pytest.mark.parametrize("kind", PNGS)
def test_a_truncated_or_zeroed_png_is_refused_and_trailing_bytes_are_not(kind: str) -> None:
    data = PNGS[kind]()
    intact = _accepted_as(data)
    assert intact is not None
    assert _accepted_as(data + b"trailing bytes") == intact
    for length in range(0, len(data), 1 if len(data) < 500 else 7):
        assert _accepted_as(data[:length]) is None, f"{length} bytes"
        assert _accepted_as(data[:length] + bytes(len(data) - length)) is None, f"{length} bytes"


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_png_whose_pixels_end_early_is_refused_although_its_checksums_are_right(
    share: float, interlaced: bool
) -> None:
    rows = bytes(_png_rows_nbytes(20, 20, interlaced))
    assert _accepted_as(assemble_png((20, 20), 8, 2, rows, interlaced=interlaced))
    fewer = rows[: int(len(rows) * share)]
    assert _accepted_as(assemble_png((20, 20), 8, 2, fewer, interlaced=interlaced)) is None
    # The deflate stream itself ends early, or its Adler-32 is wrong.
    whole = assemble_png((20, 20), 8, 2, rows, interlaced=interlaced)
    packed = zlib.compress(rows)
    start = whole.index(packed)
    for stream in (packed[: int(len(packed) * share)], packed[:-4], packed[:-1] + b"!"):
        chunk = b"IDAT" + stream
        crc = struct.pack(">I", zlib.crc32(chunk))
        end = start + len(packed) + 4
        cut = whole[: start - 8] + struct.pack(">I", len(stream)) + chunk + crc + whole[end:]
        assert _accepted_as(cut) is None


def _png_rows_nbytes(width: int, height: int, interlaced: bool) -> int:
    if not interlaced:
        return height * (1 + 3 * width)
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2))
    sizes = [(len(range(x, width, dx)), len(range(y, height, dy))) for x, y, dx, dy in passes]
    sizes.append((width, height // 2))
    return sum(rows * (1 + 3 * columns) for columns, rows in sizes)


JPEGS = {
    "baseline": lambda: _encode(_noise(24, 16), "JPEG"),
    "4:4:4": lambda: _encode(_noise(24, 16), "JPEG", subsampling=0),
    "progressive": lambda: _encode(_noise(24, 16), "JPEG", progressive=True),
    "restart": lambda: _encode(_noise(24, 32), "JPEG", restart_marker_blocks=1),
    "progressive restart": lambda: _encode(
        _noise(24, 32), "JPEG", restart_marker_rows=1, progressive=True
    ),
    "grey": lambda: _encode(_noise(24, 16).convert("L"), "JPEG"),
    "CMYK": lambda: _encode(_noise(24, 16).convert("CMYK"), "JPEG"),
    "RGB": lambda: _encode(_noise(24, 16), "JPEG", keep_rgb=True),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_a_jpeg_cut_at_any_byte_is_refused(kind: str) -> None:
    data = JPEGS[kind]()
    intact = _accepted_as(data)
    assert intact is not None
    for length in range(2, len(data) - 2):
        closed = _accepted_as(data[:length] + b"\xff\xd9")
        assert closed in (None, intact), f"{length} bytes, closed"
        assert _accepted_as(data[:length]) in (None, intact), f"{length} bytes"


def test_most_zeroed_tails_of_a_jpeg_are_refused() -> None:
    data = JPEGS["baseline"]()
    for length in range(2, len(data) - 2, 5):
        zeroed = data[:length] + bytes(len(data) - length - 2)
        assert _accepted_as(zeroed + b"\0\0") is None
    half = len(data) * 3 // 4
    assert _accepted_as(data[:half] + bytes(len(data) - half - 2) + b"\xff\xd9") is None


@pytest.mark.parametrize(
    ("file_format", "options"),
    [
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("BMP", {}),
        ("AVIF", {"speed": 10}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_deflate"}),
    ],
)
def test_other_formats_are_refused_if_they_are_truncated(
    file_format: str, options: dict[str, object]
) -> None:
    data = _encode(_noise(16, 12), file_format, **options)
    intact = _accepted_as(data)
    assert intact is not None
    for length in range(0, len(data), 3):
        assert _accepted_as(data[:length]) in (None, intact), f"{length} bytes"


def _jpeg_with_thumbnail() -> bytes:
    thumbnail = _encode(_noise(8, 8), "JPEG")
    return _insert_segment(_encode(_noise(), "JPEG"), 0xE1, b"Exif\0\0" + thumbnail)


def _insert_segment(jpeg: bytes, marker: int, content: bytes) -> bytes:
    return jpeg[:2] + struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content + jpeg[2:]


def _mpo() -> bytes:
    buffer = io.BytesIO()
    _noise().save(buffer, "MPO", save_all=True, append_images=[_noise(20, 20)])
    return buffer.getvalue()


ODD = {
    "trailing bytes": lambda: _encode(_noise(), "JPEG") + b"\xff\xd8 trailing bytes",
    "zeros before the end": lambda: _encode(_noise(), "JPEG")[:-2] + bytes(3) + b"\xff\xd9",
    "fill bytes": lambda: _encode(_noise(), "JPEG").replace(b"\xff\xda", b"\xff\xff\xff\xda"),
    "thumbnail": _jpeg_with_thumbnail,
    "comment": lambda: _insert_segment(_encode(_noise(), "JPEG"), 0xFE, b"\xff\xd9\xff\xda"),
    "MPO": _mpo,
    "long PNG": lambda: assemble_png((2, 2), 8, 0, b"\0ab\0cd" + b"more rows"),
    **JPEGS,
    **PNGS,
}


@pytest.mark.parametrize("kind", ODD)
def test_unusual_but_intact_files_are_accepted(kind: str) -> None:
    data = ODD[kind]()
    assert probe_image(data) == decode(data).size


def test_threads_leave_the_warning_filters_alone() -> None:
    before = list(warnings.filters)
    data = _encode(_corners(), "JPEG")
    together = threading.Barrier(4)

    def work(_: int) -> None:
        together.wait(10)
        for _ in range(50):
            probe_image(data)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert list(warnings.filters) == before


def test_fit_scales_to_cover_and_crops_the_centre() -> None:
    tensor = fit(_corners(48, 16), 16, 16)
    assert tuple(tensor.shape) == (3, 16, 16)
    assert str(tensor.dtype) == "torch.float32"
    assert tensor.is_contiguous()
    assert tensor[:, 2, 2].tolist() == [1.0, -1.0, -1.0]
    assert tensor[:, 2, 13].tolist() == [-1.0, 1.0, -1.0]
    assert tensor[:, 13, 13].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "target"),
    [((7, 9), (64, 32)), ((1000, 3), (8, 8)), ((3, 1000), (8, 24)), ((1, 1), (8, 8))],
)
def test_fit_supports_any_size(source: tuple[int, int], target: tuple[int, int]) -> None:
    tensor = fit(Image.new("RGB", source, (255, 0, 127)), *target)
    assert tuple(tensor.shape) == (3, target[1], target[0])
    assert tensor[0].min() == 1
    assert tensor[1].max() == -1


def test_fit_at_the_same_size_changes_nothing() -> None:
    image = _noise(24, 16)
    restored = (fit(image, 24, 16) + 1) * 127.5
    assert np.array_equal(restored.permute(1, 2, 0).round().numpy(), np.asarray(image))


@pytest.mark.parametrize(
    ("image", "file_format"),
    [(_noise(), "JPEG"), (_noise(), "PNG"), (_noise().convert("L"), "PNG"), (_noise(), "BMP")],
)
@pytest.mark.parametrize("orientation", [1, 6])
def test_decode_pixels_equals_decode(
    image: Image.Image, file_format: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = _encode(image, file_format, exif=exif) if file_format != "BMP" else _encode(image, "BMP")
    pixels = decode_pixels(data, choose_decoders())
    assert np.array_equal(pixels, np.asarray(decode(data)))


def test_decode_pixels_applies_the_icc_profile() -> None:
    data = _encode(_noise(), "JPEG", icc_profile=_gamma_profile())
    assert np.array_equal(decode_pixels(data, choose_decoders()), np.asarray(decode(data)))


@pytest.mark.parametrize(
    ("source", "target"),
    [((64, 48), (48, 32)), ((200, 60), (32, 32)), ((33, 77), (80, 80)), ((24, 16), (24, 16))],
)
@pytest.mark.parametrize("crop", [(0.5, 0.5), (0.0, 1.0)])
def test_fit_pixels_crops_and_resizes_like_pillow(
    source: tuple[int, int], target: tuple[int, int], crop: tuple[float, float]
) -> None:
    image = _noise(*source).resize(source, Image.Resampling.BOX)
    box = crop_box(source, target, crop)
    assert 0 <= box[0] < box[2] <= source[0]
    assert 0 <= box[1] < box[3] <= source[1]
    by_torch = fit_pixels(np.array(image), *target, crop)
    assert by_torch.is_contiguous()
    part = image.crop(box).resize(target, Image.Resampling.LANCZOS)
    levels = (by_torch + 1) * 127.5
    off = np.abs(levels.permute(1, 2, 0).numpy() - np.asarray(part, np.float32)).round()
    assert off.max() <= 2
    assert (off > 0).mean() < 0.03


@pytest.mark.parametrize(
    ("source", "target"),
    [((1000, 3), (8, 8)), ((3, 1000), (8, 24)), ((1, 1), (8, 8)), ((7, 9), (64, 32))],
)
def test_fit_pixels_supports_any_size(source: tuple[int, int], target: tuple[int, int]) -> None:
    tensor = fit_pixels(np.array(Image.new("RGB", source, (255, 0, 127))), *target)
    assert tuple(tensor.shape) == (3, target[1], target[0])
    assert tensor[0].min() == 1
    assert tensor[1].max() == -1


def test_exif_data_after_the_pixels_of_a_png_is_used() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = _encode(_corners(), exif=exif)
    start = data.index(b"eXIf") - 4
    length = 12 + struct.unpack_from(">I", data, start)[0]
    chunk, end = data[start : start + length], data.index(b"IEND") - 4
    moved = data[:start] + data[start + length : end] + chunk + data[end:]
    assert probe_image(moved) == (16, 24)
    assert decode(moved).size == (16, 24)
