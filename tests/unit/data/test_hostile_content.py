"""Folders with corrupt and extreme files: bad files are reported in one line, the rest is used."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from media_files import (
    assemble_png,
    audio_bytes,
    grey_frames,
    image_bytes,
    photo,
    tone,
    video_bytes,
)
from PIL import Image

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.augment import SampleTransform, render
from gracetune.data.buckets import assign
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.images import choose_decoders, decode
from gracetune.errors import DataError, RunFailedError

if TYPE_CHECKING:
    from pathlib import Path

    from gracetune.events.types import Event


def _bomb(width: int, height: int) -> bytes:
    """Return a PNG of a kilobyte that decodes to gigabytes."""
    return assemble_png((width, height), 8, 2, bytes(100_000))


def _hundred_megapixels() -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (10_000, 10_000), 1).save(buffer, "PNG")
    return buffer.getvalue()


def _cmyk() -> bytes:
    buffer = io.BytesIO()
    Image.new("CMYK", (64, 48), (0, 255, 255, 0)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


IMAGE = image_bytes(photo(64, 48))
MATROSKA = video_bytes(grey_frames(24), container="matroska")
NAN = tone(2.0, 8000, 440)
NAN[9000] = np.nan

FOLDERS: dict[str, tuple[dict[str, object], dict[str, bytes], dict[str, tuple[bytes, str]]]] = {
    "image": (
        {"resolution": 64},
        {
            "fine.png": IMAGE,
            "wrong extension.jpg": IMAGE,
            "cmyk.jpg": _cmyk(),
            "large.png": _hundred_megapixels(),
        },
        {
            "truncated.jpg": (
                image_bytes(photo(64, 48), "JPEG")[:-200],
                "truncated: it has no end marker",
            ),
            "zero bytes.webp": (b"", "the file is empty"),
            "text.png": (b"I am a text", "not an image in a known format (PNG,"),
            "bomb.png": (_bomb(60_000, 60_000), "Image size (3600000000 pixels) exceeds limit"),
            "sound.png": (audio_bytes(tone(0.1, 8000, 440), 8000), "not an image in a known"),
        },
    ),
    "video": (
        {"resolution": 64, "frames": 5},
        {"fine.mp4": video_bytes(grey_frames(24)), "wrong extension.mov": MATROSKA},
        {
            "no frames.mkv": (
                MATROSKA[: MATROSKA.index(b"\x1f\x43\xb6\x75")],
                "the video file has no frames: it ends before the first",
            ),
            "truncated.mp4": (
                video_bytes(grey_frames(24))[:900],
                "not a readable video file (Invalid data found",
            ),
            "zero bytes.webm": (b"", "the file is empty"),
            "picture.mp4": (b"I am a text" * 9, "not a readable video file (Invalid data"),
            "sound.mp4": (audio_bytes(tone(0.1, 8000, 440), 8000), "the file has no video stream"),
        },
    ),
    "audio": (
        {"sample_rate": 8000, "channels": 1, "seconds": 1},
        {
            "fine.wav": audio_bytes(tone(2.0, 8000, 440), 8000),
            "wrong extension.mp3": audio_bytes(tone(2.0, 8000, 440), 8000, "FLAC"),
        },
        {
            "nan.wav": (
                audio_bytes(NAN, 8000, subtype="FLOAT"),
                "it contains NaNs or values above 1e+06, first at 1.125 s",
            ),
            "truncated.wav": (
                audio_bytes(tone(2.0, 8000, 440), 8000)[:-999],
                "truncated: 999 bytes are missing",
            ),
            "zero bytes.ogg": (b"", "the file is empty"),
            "text.flac": (b"I am a text" * 9, "not a readable audio file (Invalid data"),
            "silent film.m4a": (video_bytes(grey_frames(5)), "the file has no audio stream"),
        },
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("source", ["local", "in_memory"])
def test_each_bad_file_is_reported_in_one_line_and_the_others_are_used(
    tmp_path: Path, kind: str, source: str
) -> None:
    settings, good, bad = FOLDERS[kind]
    for name, data in {**good, **{name: data for name, (data, _) in bad.items()}}.items():
        (tmp_path / name).write_bytes(data)
    section = DatasetSection.model_validate(
        {
            "id": "worst",
            "type": source,
            "dataset_type": kind,
            "instance_data_dir": str(tmp_path),
            "caption_strategy": "filename",
            "max_corruption_rate": 0.9,
            **settings,
        }
    )
    events: list[Event] = []
    log = CorruptionLog(events.append)
    dataset = open_dataset(section, 0, events.append, log)
    assert [sample.key for sample in dataset.samples] == sorted(good)
    assert all(sample.kind == kind for sample in dataset.samples)
    reasons = {entry.key: entry.reason for entry in log.entries}
    assert set(reasons) == set(bad)
    for name, (_, start) in bad.items():
        assert reasons[name].startswith(start)
        assert "\n" not in reasons[name]
    plan = assign(dataset.samples, section, 16)
    assert sum(map(len, plan.buckets.values())) == len(good)
    with pytest.raises(DataError, match=rf"{len(bad)} of {len(good) + len(bad)} samples cannot"):
        open_dataset(
            section.model_copy(update={"max_corruption_rate": 0.1}),
            0,
            events.append,
            CorruptionLog(events.append),
        )


def test_an_image_of_100_megapixels_is_read() -> None:
    decoders = choose_decoders()
    recipe = SampleTransform(lanczos=decoders.lanczos)
    pixels = render(_hundred_megapixels(), recipe, (64, 64), decoders)
    assert tuple(pixels.shape) == (3, 64, 64)
    assert float(pixels.min()) == 1


def test_cmyk_is_converted_to_rgb_by_the_chosen_decoders() -> None:
    red, green, blue = np.asarray(decode(_cmyk(), choose_decoders()))[20, 20].astype(int)
    assert red > 230
    assert max(green, blue) < 25


class HangingSource:
    """A source with one file whose read never returns."""

    def keys(self) -> list[str]:
        return ["a.png", "stuck.png"]

    def read(self, key: str) -> bytes:
        if key == "stuck.png":
            time.sleep(3600)
        return IMAGE

    def nbytes(self, key: str) -> int:
        return len(IMAGE)

    def describe(self) -> str:
        return "a stuck disk"


def test_a_read_that_hangs_ends_the_run_and_names_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gracetune.entry_points.load", lambda *_: lambda *_: HangingSource())
    section = DatasetSection(id="worst", caption_strategy="filename", timeout_s=0.5)
    with pytest.raises(RunFailedError, match=r"dataset 'worst': stuck\.png: loading it took"):
        open_dataset(section, 0, lambda _: None, CorruptionLog(lambda _: None))
