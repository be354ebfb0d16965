"""What was sampled, as files that a player opens, and as one still picture for the sheet."""

from __future__ import annotations

import wave
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from gracetune.data.media import load_av

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.models.family import Kind
    from gracetune.models.samples import Sampled

SHOWN_FRAMES = 8
"""Frames on a contact sheet."""
SHEET_COLUMNS = 4
WINDOW = 1024
"""Samples in one column of a spectrogram."""
FLOOR_DB = -90.0
SPECTROGRAM_SIZE = (512, 256)
INKS = np.array([(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)], float)
"""From silent to loud."""


def demand_packages(kind: Kind) -> None:
    """Say now which extra is missing, not at the first validation."""
    if kind == "video":
        load_av("video")


def write(sampled: Sampled, folder: Path, name: str) -> Image.Image:
    """The file of one sample, with a still beside it where it moves or sounds; gives the still."""
    match sampled.kind:
        case "image":
            still = _picture(sampled.data)
        case "video":
            _write_mp4(sampled, folder / f"{name}.mp4")
            still = contact_sheet(sampled.data)
        case "audio":
            _write_wav(sampled, folder / f"{name}.wav")
            still = spectrogram(sampled.data)
    still.save(folder / f"{name}.png")
    return still


def contact_sheet(clip_CFHW: Tensor) -> Image.Image:  # noqa: N803
    """Frames at even distances, the first and the last among them, in reading order."""
    frames = clip_CFHW.shape[1]
    count = min(SHOWN_FRAMES, frames)
    chosen = np.linspace(0, frames - 1, count).round().astype(int)
    pictures = [_picture(clip_CFHW[:, at]) for at in chosen]
    width, height = pictures[0].size
    columns = min(SHEET_COLUMNS, count)
    sheet = Image.new("RGB", (columns * width, -(-count // columns) * height))
    for place, picture in enumerate(pictures):
        sheet.paste(picture, (place % columns * width, place // columns * height))
    return sheet


def spectrogram(waves_CN: Tensor) -> Image.Image:  # noqa: N803
    """Time to the right, frequency upwards, loudness in decibels as colour; all channels mixed."""
    mono = torch.nn.functional.pad(waves_CN.float().mean(0), (WINDOW // 2, WINDOW // 2))
    window = torch.hann_window(WINDOW)
    power = torch.stft(
        mono, WINDOW, WINDOW // 4, window=window, center=False, return_complex=True
    ).abs()
    decibels = 20 * (power / window.sum() * 2).clamp_min(1e-9).log10()
    share = (1 - decibels / FLOOR_DB).clamp(0, 1).flip(0).numpy()
    at = share * (len(INKS) - 1)
    low = np.minimum(at.astype(int), len(INKS) - 2)
    colours = INKS[low] + (at - low)[..., None] * (INKS[low + 1] - INKS[low])
    picture = Image.fromarray(colours.round().astype(np.uint8))
    return picture.resize(SPECTROGRAM_SIZE, Image.Resampling.BILINEAR)


def _pixels(data: Tensor) -> NDArray[np.uint8]:
    """Channels last."""
    scaled = data.float().clamp(-1, 1).add(1).mul(127.5).round().byte()
    pixels: NDArray[np.uint8] = scaled.movedim(0, -1).numpy()
    return pixels


def _picture(data_CHW: Tensor) -> Image.Image:  # noqa: N803
    return Image.fromarray(_pixels(data_CHW))


def _write_mp4(sampled: Sampled, path: Path) -> None:
    """H.264 in the colours that every player knows."""
    av = load_av("video")
    pixels = _pixels(sampled.data)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", Fraction(sampled.rate).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "16"}
        for frame in pixels:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _write_wav(sampled: Sampled, path: Path) -> None:
    samples = sampled.data.float().clamp(-1, 1).mul(32767).round().to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(round(sampled.rate))
        file.writeframes(samples.T.contiguous().numpy().astype("<i2").tobytes())
