"""Damage media files at random and decode them, in worker processes that may crash."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from media_files import (
    audio_bytes,
    grey_frames,
    heic_bytes,
    image_bytes,
    m4a_bytes,
    photo,
    tone,
    video_bytes,
)

from gracetune.data.audio import decode_audio, probe_audio
from gracetune.data.images import choose_decoders, decode, probe_image
from gracetune.data.sample import UnreadableSampleError
from gracetune.data.video import decode_video, probe_video

if TYPE_CHECKING:
    from collections.abc import Callable


class DamagedFile(NamedTuple):
    """One file of a fuzz run: the name of the intact file, and the seed of its damage."""

    name: str
    number: int


def _image(file_format: str, **options: object) -> bytes:
    return image_bytes(photo(48, 32), file_format, **options)


IMAGES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: _image("JPEG"),
    "progressive": lambda: _image("JPEG", progressive=True, subsampling=0),
    "png": lambda: _image("PNG"),
    "alpha png": lambda: image_bytes(np.dstack([photo(24, 16), photo(24, 16)[..., 0]])),
    "webp": lambda: _image("WEBP"),
    "lossless webp": lambda: _image("WEBP", lossless=True),
    "gif": lambda: _image("GIF"),
    "tiff": lambda: _image("TIFF"),
    "packed tiff": lambda: _image("TIFF", compression="tiff_lzw"),
    "bmp": lambda: _image("BMP"),
    "avif": lambda: _image("AVIF", speed=10),
    "heic": lambda: heic_bytes(photo(48, 32)),
}
VIDEOS: dict[str, Callable[[], bytes]] = {
    "mp4": lambda: video_bytes(grey_frames(9)),
    "matroska": lambda: video_bytes(grey_frames(9), container="matroska"),
    "webm": lambda: video_bytes(grey_frames(9), container="webm", codec="libvpx-vp9"),
    "avi": lambda: video_bytes(grey_frames(9), container="avi", codec="mpeg4"),
}
AUDIO: dict[str, Callable[[], bytes]] = {
    "wav": lambda: audio_bytes(tone(0.1, 8000, 440, 880), 8000),
    "float wav": lambda: audio_bytes(tone(0.1, 8000, 440), 8000, subtype="FLOAT"),
    "flac": lambda: audio_bytes(tone(0.1, 8000, 440), 8000, "FLAC"),
    "ogg": lambda: audio_bytes(tone(0.1, 8000, 440), 8000, "OGG"),
    "mp3": lambda: audio_bytes(tone(0.1, 8000, 440), 8000, "MP3"),
    "m4a": lambda: m4a_bytes(tone(0.1, 8000, 440), 8000),
}


@functools.cache
def intact_file(name: str) -> bytes:
    return (IMAGES | VIDEOS | AUDIO)[name]()


def damage(task: DamagedFile) -> bytes:
    """Return the file with random damage: bytes changed, zeroed, removed, repeated or truncated."""
    random = np.random.default_rng([task.number, *task.name.encode()])
    data = bytearray(intact_file(task.name))
    for _ in range(random.integers(1, 4)):
        # half of the damage hits the header, where it has more effect
        reach = min(len(data), 96) if random.random() < 0.5 else len(data)
        at = int(random.integers(0, max(1, reach)))
        length = int(random.integers(1, 40))
        match int(random.integers(0, 7)):
            case 0:
                data[at : at + 1] = random.bytes(1)
            case 1:
                data[at : at + length] = random.bytes(length)
            case 2:
                data[at : at + 4] = bytes(
                    [255, 0, 127, 128][int(random.integers(0, 4))] for _ in "1234"
                )
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length]
            case 5:
                data[at : at + length] = bytes(length)
            case 6:
                del data[int(random.integers(0, len(data) + 1)) :]
    return bytes(data)


def read(task: DamagedFile) -> str:
    """Return "read" or "unreadable"; raise if the sample or the reason is not as it must be."""
    data = damage(task)
    try:
        if task.name in IMAGES:
            return _read_image(data)
        if task.name in VIDEOS:
            return _read_video(data)
        return _read_audio(data)
    except UnreadableSampleError as error:
        if not error.reason or "\n" in error.reason:
            raise AssertionError(f"not a reason in one line: {error.reason!r}") from error
        return "unreadable"


def _read_image(data: bytes) -> str:
    size = probe_image(data)
    slow = decode(data)
    assert slow.size == size, (slow.size, size)
    fast = decode(data, choose_decoders())
    assert fast.tobytes() == slow.tobytes(), "the fast decoder differs"
    return "read"


def _read_video(data: bytes) -> str:
    facts = probe_video(data)
    assert facts.width > 0 < facts.height
    assert facts.fps > 0 <= facts.seconds
    clip = decode_video(data, (16, 16), 5, min(facts.fps, 1000.0))
    assert tuple(clip.shape) == (3, 5, 16, 16)
    return "read"


def _read_audio(data: bytes) -> str:
    facts = probe_audio(data)
    assert facts.seconds > 0
    clip = decode_audio(data, 1, max(1, int(facts.seconds * 4000)), 4000)
    assert clip.isfinite().all()
    return "read"
