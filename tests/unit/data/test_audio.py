from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from media_files import audio_bytes, grey_frames, m4a_bytes, tone, video_bytes

from gracetune.data.audio import decode_audio, probe_audio, to_channels
from gracetune.data.sample import UnreadableSampleError

RATE = 16000
WAVES = tone(1.0, RATE, 440, 880)
WRITTEN = {
    "wav": audio_bytes(WAVES, RATE),
    "float": audio_bytes(WAVES, RATE, subtype="FLOAT"),
    "flac": audio_bytes(WAVES, RATE, "FLAC"),
    "ogg": audio_bytes(WAVES, RATE, "OGG"),
    "opus": audio_bytes(WAVES, RATE, "OGG", subtype="OPUS"),
    "mp3": audio_bytes(WAVES, RATE, "MP3"),
    "aiff": audio_bytes(WAVES, RATE, "AIFF"),
    "m4a": m4a_bytes(WAVES, RATE),
}


def _pitch(channel: object, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(np.asarray(channel)))
    return float(np.argmax(spectrum)) * rate / len(np.asarray(channel))


@pytest.mark.parametrize("name", WRITTEN)
def test_every_format_is_read_and_resampled(name: str) -> None:
    facts = probe_audio(WRITTEN[name])
    assert facts[1:] == (RATE, 2) or name == "opus"
    assert facts.seconds == pytest.approx(1.0, abs=0.15)
    clip = decode_audio(WRITTEN[name], 2, 18000, 24000)
    assert tuple(clip.shape) == (2, 18000)
    assert str(clip.dtype) == "torch.float32"
    assert _pitch(clip[0], 24000) == pytest.approx(440, abs=2)
    assert _pitch(clip[1], 24000) == pytest.approx(880, abs=2)
    assert float(clip.abs().max()) == pytest.approx(0.5, abs=0.1)


def test_decoding_at_the_rate_of_the_file_changes_no_sample() -> None:
    clip = decode_audio(WRITTEN["float"], 2, RATE, RATE)
    assert np.array_equal(clip.numpy().T, WAVES)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_resampling_keeps_the_duration(rate: int) -> None:
    clip = decode_audio(WRITTEN["float"], 1, rate, rate)
    assert clip.shape[1] == rate
    assert float(clip[0, rate // 4 : rate // 2].std()) > 0.2


def test_resampling_does_not_alias_high_tones() -> None:
    data = audio_bytes(tone(1.0, 48000, 15000), 48000, subtype="FLOAT")
    assert float(decode_audio(data, 1, 16000, 16000)[0, 1000:15000].abs().max()) < 1e-3


def test_the_clip_starts_at_the_requested_position() -> None:
    ramp = np.linspace(-1, 1, 1001, dtype=np.float32)[:, None]
    data = audio_bytes(ramp, RATE, subtype="FLOAT")
    first = [decode_audio(data, 1, 1, RATE, clip).item() for clip in (0.0, 0.5, 1.0)]
    assert first == pytest.approx([-1, 0, 1], abs=1e-6)


def test_channels_are_averaged_duplicated_or_dropped() -> None:
    six = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert to_channels(six, 1).tolist() == [[2.5], [8.5]]
    assert to_channels(six, 2).tolist() == [[0, 1], [6, 7]]
    assert to_channels(six[:, :1], 2).tolist() == [[0, 0], [6, 6]]
    assert to_channels(six[:, :2], 2) is not None
    assert probe_audio(m4a_bytes(tone(0.3, 48000, *[200] * 6), 48000)).channels == 6


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "m4a"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_truncated_files_are_unreadable(name: str, share: float) -> None:
    data = WRITTEN[name]
    with pytest.raises(
        UnreadableSampleError, match=r"truncated|lost sync|not a readable audio file"
    ):
        probe_audio(data[: int(len(data) * share)])


def test_a_streamed_wav_without_a_length_is_read() -> None:
    data = bytearray(WRITTEN["wav"])
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff\xff\xff\xff"
    assert probe_audio(bytes(data)).seconds == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -3e38])
def test_nan_and_huge_values_are_reported_with_their_time(bad: float) -> None:
    waves = WAVES.copy()
    waves[8000, 1] = bad
    data = audio_bytes(waves, RATE, subtype="FLOAT")
    with pytest.raises(
        UnreadableSampleError, match=r"contains NaNs or values above 1e\+06, first at 0\.500 s"
    ):
        probe_audio(data)
    with pytest.raises(UnreadableSampleError, match=r"first at 0\.500 s"):
        decode_audio(data, 2, RATE, RATE)
    assert decode_audio(data, 2, RATE // 4, RATE).isfinite().all()


def test_a_file_shorter_than_the_clip_is_unreadable() -> None:
    with pytest.raises(UnreadableSampleError, match=r"ends after 1\.000 of 2 s"):
        decode_audio(WRITTEN["wav"], 2, 2 * RATE, RATE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello, I am a text" * 9, "not a readable audio file"),
        (video_bytes(grey_frames(3)), "the file has no audio stream"),
        (audio_bytes(WAVES[:0], RATE), "the file has no audio stream"),
    ],
    ids=["empty", "text", "silent video", "no samples"],
)
def test_files_without_audio_are_unreadable_with_a_reason(data: bytes, reason: str) -> None:
    for read in (probe_audio, lambda data: decode_audio(data, 1, 9, RATE)):
        with pytest.raises(UnreadableSampleError, match=reason):
            read(data)


def test_audio_longer_than_six_hours_is_refused() -> None:
    """The header of a small file claims a rate of one sample per second."""
    data = bytearray(audio_bytes(np.zeros((30_000, 1), np.float32), 1000, subtype="PCM_U8"))
    at = data.index(b"fmt ") + 12
    data[at : at + 4] = (1).to_bytes(4, "little")
    with pytest.raises(UnreadableSampleError, match="longer than 21600 seconds"):
        probe_audio(bytes(data))


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['soundfile'] = None\n"
        "from gracetune.data.audio import probe_audio\n"
        "from gracetune.errors import ConfigError\n"
        "try: probe_audio(b'x')\n"
        "except ConfigError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install gracetune[audio]" in run.stdout
