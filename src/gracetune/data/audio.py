"""Decode audio files to clips with a given sample rate, channel count and length.

The package soundfile decodes the formats of libsndfile (WAV, FLAC, OGG, MP3, ...), and PyAV all
others (M4A, AAC, WMA, ...). Clips are tensors with the layout CN: channels, audio samples.
"""

from __future__ import annotations

import io
import struct
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gracetune.data.pyav import opened, reason_of
from gracetune.data.sample import UnreadableSampleError
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import BinaryIO

    from numpy.typing import NDArray
    from torch import Tensor

    Waves = NDArray[np.float32]
    """Array of audio samples with the shape (length, channels)."""

EXTENSIONS = frozenset(
    (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".aac", ".aif", ".aiff", ".wma")
)
MAX_SECONDS = 6 * 3600
MAX_CHANNELS = 64
MAX_LEVEL = 1e6
"""Largest absolute value of an audio sample that is accepted. Full scale is 1, or 32768 in files
that store unscaled floats; values far above both indicate a damaged file."""

_BLOCK = 1 << 18
_MARGIN = 256
"""Number of audio samples decoded beyond the end of a clip, so that the artefacts of resampling at
the end of its input are cut off."""
_SOUNDFILE_ERRORS = (RuntimeError, OSError, ValueError, TypeError, OverflowError)


class AudioFacts(NamedTuple):
    """Duration, sample rate and channel count of an audio file."""

    seconds: float
    sample_rate: int
    channels: int


def require_packages() -> None:
    """Raise an error that says what to install if soundfile or soxr is missing."""
    _load("soundfile")
    _load("soxr")


def probe_audio(data: bytes) -> AudioFacts:
    """Return the properties of an audio file; decode all of it to detect truncation and NaNs."""
    _check_not_truncated(data)
    count, facts = 0, None
    for block, facts in _blocks(data):
        _check_levels(block, count / facts.sample_rate, facts.sample_rate)
        count += len(block)
        if count > MAX_SECONDS * facts.sample_rate:
            raise UnreadableSampleError(f"longer than {MAX_SECONDS} seconds; cut it into clips")
    if facts is None or count == 0:
        raise UnreadableSampleError("the file has no audio stream")
    return facts._replace(seconds=count / facts.sample_rate)


def decode_audio(
    data: bytes, channels: int, length: int, sample_rate: int, clip: float = 0.0
) -> Tensor:
    """Decode one clip of `length` audio samples to a float32 tensor with the layout CN.

    `clip` is the position of the clip in the file: 0 for the first seconds, 1 for the last ones.
    """
    import torch

    whole, facts = _read(data)
    rate = facts.sample_rate
    needed = -(-length * rate // sample_rate)
    first = int(clip * max(0, len(whole) - needed))
    part = to_channels(whole[first : first + needed + _MARGIN], channels)
    _check_levels(part, first / rate, rate)
    if rate != sample_rate:
        part = _load("soxr").resample(part, rate, sample_rate, quality="HQ")
    missing = length - len(part)
    if missing > _MARGIN:
        raise UnreadableSampleError(
            f"the audio ends after {len(part) / sample_rate:.3f} of {length / sample_rate:g} s"
        )
    # resampling may lose the last few samples to rounding; pad them with silence
    padded = np.pad(part[:length], ((0, max(0, missing)), (0, 0)))
    return torch.from_numpy(np.ascontiguousarray(padded.T, dtype=np.float32))


def load_audio(source: str | PathLike[str] | bytes | BinaryIO) -> tuple[Tensor, int]:
    """Decode a whole audio file to a float32 tensor with the layout CN; also return its rate.

    `source` is a path, the bytes of a file, or an open file.
    """
    import torch

    if isinstance(source, str | PathLike):
        data = Path(source).read_bytes()
    else:
        data = source if isinstance(source, bytes) else source.read()
    waves, facts = _read(data)
    return torch.from_numpy(np.ascontiguousarray(waves.T)), facts.sample_rate


def to_channels(waves: Waves, channels: int) -> Waves:
    """Convert audio to one or two channels.

    One channel is the average of all channels. Two channels are the first two, or twice the same if
    the input has one.
    """
    if waves.shape[1] == channels:
        return waves
    if channels == 1:
        return np.asarray(waves.mean(axis=1, keepdims=True), np.float32)
    return np.repeat(waves, 2, axis=1) if waves.shape[1] == 1 else waves[:, :2]


def _read(data: bytes) -> tuple[Waves, AudioFacts]:
    blocks = list(_blocks(data))
    if not blocks:
        raise UnreadableSampleError("the file has no audio stream")
    return np.concatenate([block for block, _ in blocks]), blocks[0][1]


def _blocks(data: bytes) -> Iterator[tuple[Waves, AudioFacts]]:
    """Yield the file's audio in blocks, decoded by soundfile, or by FFmpeg if soundfile cannot."""
    soundfile = _load("soundfile")
    if not data:
        raise UnreadableSampleError("the file is empty")
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except _SOUNDFILE_ERRORS:
        yield from _ffmpeg_blocks(data)
        return
    facts = _check_facts(AudioFacts(0.0, file.samplerate, file.channels))
    count = 0
    try:
        with file:
            while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
                count += len(block)
                yield block, facts
            expected = file.frames if _length_is_known(file.format, data) else 0
    except _SOUNDFILE_ERRORS as error:
        raise UnreadableSampleError(reason_of(error, "audio")) from error
    if count < expected:
        raise UnreadableSampleError(f"truncated: {count} of {expected} samples are present")


def _ffmpeg_blocks(data: bytes) -> Iterator[tuple[Waves, AudioFacts]]:
    import av

    with opened(data, "audio") as container:
        if not container.streams.audio:
            raise UnreadableSampleError("the file has no audio stream")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise UnreadableSampleError("its codec is unknown")
        facts = _check_facts(AudioFacts(0.0, stream.rate or 0, stream.channels))
        # planar floats in the file's own layout and rate; mixing and resampling happen later
        resampler = av.AudioResampler(format="fltp")
        for frame in container.decode(stream):
            for part in resampler.resample(frame):
                waves = np.asarray(part.to_ndarray().T, np.float32)
                if waves.shape[1] != facts.channels or part.sample_rate != facts.sample_rate:
                    raise UnreadableSampleError(
                        "its sample rate or channel count changes within the file"
                    )
                yield waves, facts


def _check_levels(block: Waves, begin: float, rate: int) -> None:
    """Raise an error if a block contains NaNs, infinities or values above MAX_LEVEL.

    `begin` is the time of the block in the file in seconds, for the error message.
    """
    is_valid = (np.abs(block) <= MAX_LEVEL).all(axis=1)
    if not is_valid.all():
        at = begin + float(np.argmin(is_valid)) / rate
        raise UnreadableSampleError(
            f"it contains NaNs or values above {MAX_LEVEL:g}, first at {at:.3f} s"
        )


def _check_facts(facts: AudioFacts) -> AudioFacts:
    if not 1 <= facts.channels <= MAX_CHANNELS or facts.sample_rate < 1:
        raise UnreadableSampleError(
            f"{facts.channels} channels at {facts.sample_rate} samples per second are not supported"
        )
    return facts


def _check_not_truncated(data: bytes) -> None:
    """Raise an error if a WAV, AIFF or OGG file is truncated; libsndfile would not report it."""
    end = 0
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        end = _riff_data_end(data)
    elif data[:4] == b"FORM":
        end = 8 + int.from_bytes(data[4:8], "big")
    elif data[:4] == b"OggS" and (page := data.rfind(b"OggS")) + 27 <= len(data):
        table = data[page + 27 : page + 27 + data[page + 26]]
        end = page + 27 + data[page + 26] + sum(table)
    if end > len(data) + 1:  # some writers omit the padding byte of an odd chunk
        raise UnreadableSampleError(f"truncated: {end - len(data)} bytes are missing")


def _length_is_known(file_format: str, data: bytes) -> bool:
    """Return whether libsndfile knows the file's exact length.

    For an MP3 file without a Xing, Info or VBRI header, it only estimates the length.
    """
    return file_format != "MP3" or any(mark in data[:8192] for mark in (b"Xing", b"Info", b"VBRI"))


def _riff_data_end(data: bytes) -> int:
    """Return the offset at which the data chunk of a WAV file should end.

    Returns 0 if the header does not say, as in files that were written to a stream.
    """
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8 + size + size % 2
        if name == b"data":
            return 0 if size in (0, 0x7FFFFFFF, 0xFFFFFFFF) else at
    return 0


def _load(package: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"dataset_type is 'audio', which needs the package {package}. Run `pip install "
            "gracetune[audio]`."
        ) from error
