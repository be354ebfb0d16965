from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from media_files import audio_bytes, grey_frames, image_bytes, photo, tone, video_bytes

from gracetune.data.sample import UnreadableSampleError
from gracetune.data.video import VideoFacts, decode_video, probe_video

if TYPE_CHECKING:
    from gracetune.data.images import Lanczos

CLIP = video_bytes(grey_frames(60))
MATROSKA = video_bytes(grey_frames(60), container="matroska")
CONTAINERS = [("mp4", "libx264"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("avi", "ffv1")]


def _levels(data: bytes, count: int, fps: float, clip: float = 0.0) -> list[int]:
    """Return the number of the frame that is shown at each time."""
    pixels = decode_video(data, (16, 16), count, fps, clip)
    assert tuple(pixels.shape) == (3, count, 16, 16)
    return [round(float(level + 1) * 127.5 / 4) for level in pixels[0, :, 8, 8]]


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_every_container_is_read_frame_by_frame(container: str, codec: str) -> None:
    data = video_bytes(grey_frames(60), container=container, codec=codec)
    facts = probe_video(data)
    assert (facts.width, facts.height) == (64, 48)
    assert facts.fps == pytest.approx(24)
    assert facts.seconds == pytest.approx(2.5, abs=0.002)
    assert _levels(data, 57, 24.0) == list(range(57))


@pytest.mark.parametrize(
    ("fps", "count", "shown"),
    [
        (12.0, 13, [2 * n for n in range(13)]),
        (48.0, 13, [n // 2 for n in range(13)]),
        (16.0, 9, [int(n * 1.5) for n in range(9)]),
        (30.0, 17, [int(n * 0.8 + 0.03) for n in range(17)]),
    ],
)
def test_another_fps_shows_the_frames_that_a_player_would(
    fps: float, count: int, shown: list[int]
) -> None:
    assert _levels(CLIP, count, fps) == shown


def test_the_clip_starts_at_the_requested_position() -> None:
    assert _levels(CLIP, 5, 24.0, 0.0) == [0, 1, 2, 3, 4]
    assert _levels(CLIP, 5, 24.0, 1.0) == [55, 56, 57, 58, 59]
    middle = _levels(CLIP, 5, 24.0, 0.5)
    assert middle[0] in (27, 28)
    assert middle == list(range(middle[0], middle[0] + 5))


def test_a_late_clip_of_a_long_video_is_found_by_seeking() -> None:
    frames = [np.full((48, 64, 3), n // 10 * 8, np.uint8) for n in range(240)]
    data = video_bytes(frames)
    pixels = decode_video(data, (16, 16), 21, 24.0, 1.0)
    assert [round(float(v + 1) * 127.5 / 8) for v in pixels[0, ::10, 8, 8]] == [21, 22, 23]


def test_a_clip_that_starts_in_an_open_gop_is_decoded_correctly() -> None:
    """After a seek, an HEVC decoder drops frames that refer to frames before the key frame."""
    frames = [np.full((96, 128, 3), n // 10 * 8, np.uint8) for n in range(240)]
    group = "open-gop=1:keyint=24:min-keyint=24:scenecut=0:bframes=4:b-adapt=0:log-level=none"
    data = video_bytes(frames, codec="libx265", options={"x265-params": group})
    for first in range(30, 200):
        clip = (first / 24 + 1e-4) / (10 - 1 / 24)
        pixels = decode_video(data, (16, 16), 1, 24.0, clip)
        assert round(float(pixels[0, 0, 8, 8] + 1) * 127.5 / 8) == first // 10, first


@pytest.mark.parametrize("first", [-120, 0, 48])
def test_a_clip_that_starts_between_key_frames_is_decoded_correctly(first: int) -> None:
    """A transport stream has no index, and its timestamps may start anywhere."""
    frames = [np.full((48, 64, 3), n // 10 * 8, np.uint8) for n in range(240)]
    data = video_bytes(frames, container="mpegts", codec="mpeg4", first=first)
    for clip, shown in ((0.15, 3), (0.3, 7), (0.5, 11), (0.9, 21)):
        pixels = decode_video(data, (16, 16), 1, 24.0, clip)
        assert round(float(pixels[0, 0, 8, 8] + 1) * 127.5 / 8) == shown


def test_non_square_pixels_are_stretched_as_in_players() -> None:
    frame = np.zeros((48, 48, 3), np.uint8)
    frame[:, 24:] = 255
    data = video_bytes([frame] * 5, pixel_aspect=Fraction(2))
    facts = probe_video(data)
    assert (facts.width, facts.height) == (96, 48)
    left = decode_video(data, (48, 48), 1, 24.0, crop=(0.0, 0.5))
    assert left[0, 0, :, :40].max() < -0.9


def test_an_extreme_pixel_aspect_ratio_is_unreadable() -> None:
    data = video_bytes([np.zeros((480, 640, 3), np.uint8)] * 2, pixel_aspect=Fraction(255))
    with pytest.raises(UnreadableSampleError, match="frame 0 has 163200x480 pixels"):
        probe_video(data)


def test_a_video_shorter_than_the_clip_is_unreadable() -> None:
    assert len(_levels(CLIP, 60, 24.0)) == 60
    with pytest.raises(UnreadableSampleError, match="ends after 60 of 61 frames at 24 fps"):
        decode_video(CLIP, (16, 16), 61, 24.0)


@pytest.mark.parametrize("lanczos", ["pillow", "torch"])
def test_clips_are_resized_and_cropped_like_images(lanczos: Lanczos) -> None:
    frame = np.zeros((48, 96, 3), np.uint8)
    frame[:, 48:] = 255
    data = video_bytes([frame] * 5)
    centre = decode_video(data, (48, 48), 5, 24.0, lanczos=lanczos)
    assert centre[0, 2, 24, 8] < -0.9
    assert centre[0, 2, 24, 40] > 0.9
    left = decode_video(data, (48, 48), 5, 24.0, crop=(0.0, 0.5), lanczos=lanczos)
    assert left[0, 2].max() < -0.9
    small = decode_video(data, (24, 24), 5, 24.0, lanczos=lanczos)
    assert (float(small[0, 2, 12, 4]), float(small[0, 2, 12, 20])) == pytest.approx(
        (-1, 1), abs=0.1
    )


@pytest.mark.parametrize("colorspace", [1, 5, 9])
@pytest.mark.parametrize("size", [(64, 48), (1280, 720)])
def test_colours_follow_the_colour_space_of_the_file(
    colorspace: int, size: tuple[int, int]
) -> None:
    frame = np.empty((size[1], size[0], 3), np.uint8)
    frame[:] = (200, 60, 30)
    data = video_bytes([frame] * 2, colorspace=colorspace)
    shown = (decode_video(data, (16, 16), 1, 24.0)[:, 0, 8, 8] + 1) * 127.5
    assert shown.tolist() == pytest.approx([200, 60, 30], abs=4)


def test_the_display_rotation_of_a_video_is_applied() -> None:
    """Phones store rotated pixels and a display matrix."""
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:, :32] = 255
    data = bytearray(video_bytes([frame] * 5))
    matrix = data.index(b"tkhd") + 4 + 40
    quarter = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    data[matrix : matrix + 36] = b"".join(v.to_bytes(4, "big", signed=True) for v in quarter)
    facts = probe_video(bytes(data))
    assert (facts.width, facts.height) == (48, 64)
    pixels = decode_video(bytes(data), (48, 64), 1, 24.0)
    top, bottom = pixels[0, 0, 8].mean(), pixels[0, 0, 56].mean()
    assert (float(top), float(bottom)) == pytest.approx((1, -1), abs=0.1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello, I am a text" * 9, "not a readable video file"),
        (CLIP[: len(CLIP) // 2], "not a readable video file"),
        (audio_bytes(tone(0.5, 8000, 440), 8000), "the file has no video stream"),
        (MATROSKA[: MATROSKA.index(b"\x1f\x43\xb6\x75")], "the video file has no frames"),
    ],
    ids=["empty", "text", "truncated", "sound", "no frames"],
)
def test_files_without_video_are_unreadable_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableSampleError, match=reason):
        probe_video(data)
    with pytest.raises(UnreadableSampleError):
        decode_video(data, (16, 16), 1, 24.0)


def test_the_duration_of_a_truncated_file_is_that_of_its_remaining_frames() -> None:
    data = video_bytes([photo(64, 48, n) for n in range(60)], container="matroska")
    half = probe_video(data[: len(data) // 2])
    assert 0.3 < half.seconds < 1.6
    with pytest.raises(UnreadableSampleError, match=r"ends after|damaged"):
        decode_video(data[: len(data) // 2], (16, 16), 57, 24.0)


def test_a_frame_with_too_many_pixels_is_unreadable() -> None:
    data = bytearray(video_bytes(grey_frames(2), codec="rawvideo", container="avi"))
    at = data.index(b"strf") + 8 + 4
    data[at : at + 8] = (10_000).to_bytes(4, "little") * 2
    with pytest.raises(UnreadableSampleError, match="10000x10000 pixels; the limit is 67108864"):
        probe_video(bytes(data))


def test_a_video_with_too_many_frames_is_unreadable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gracetune.data.video.MAX_FRAMES", 59)
    with pytest.raises(UnreadableSampleError, match="more than 59 frames; cut it into clips"):
        probe_video(CLIP)


def test_metadata_in_another_encoding_is_ignored() -> None:
    assert b"VideoHandler" in CLIP
    renamed = CLIP.replace(b"VideoHandler", b"Vid\xe9oHandler")
    assert probe_video(renamed) == probe_video(CLIP)


def test_an_image_is_unreadable_or_a_video_of_one_frame() -> None:
    try:
        facts = probe_video(image_bytes(photo(64, 48), "JPEG"))
    except UnreadableSampleError:
        return
    assert isinstance(facts, VideoFacts)
    assert facts.seconds * facts.fps < 1.5


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['av'] = None\n"
        "from gracetune.data.video import probe_video\n"
        "from gracetune.errors import ConfigError\n"
        "try: probe_video(b'x')\n"
        "except ConfigError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install gracetune[video]" in run.stdout
