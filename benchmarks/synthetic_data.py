"""Make JPEG images and a video with the statistics of photographs, for the data benchmarks."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import TYPE_CHECKING

import av
import numpy as np
import simplejpeg

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

WIDTH, HEIGHT = 512, 384


def photographs(count: int, width: int, height: int) -> Iterable[np.ndarray]:
    """Yield different images: crops of large fields of 1/f noise, each with a random tint."""
    random = np.random.default_rng(0)
    edge = 1536
    distance = np.hypot(np.fft.fftfreq(edge)[:, None], np.fft.rfftfreq(edge)[None])
    distance[0, 0] = np.inf
    fields = []
    for _ in range(6):
        noise = np.fft.rfft2(random.standard_normal((edge, edge)))
        field = np.fft.irfft2(noise / distance, s=(edge, edge))
        fields.append((field / field.std()).astype(np.float32))
    for _ in range(count):
        light, tint = random.choice(6, 2, replace=False)
        parts = []
        for field in (fields[light], fields[tint]):
            x, y = random.integers(0, edge - width), random.integers(0, edge - height)
            parts.append(field[y : y + height, x : x + width])
        mix = 40 * parts[0][..., None] + 15 * parts[1][..., None] * random.uniform(-1, 1, 3)
        yield (mix + 120).clip(0, 255).astype(np.uint8)


def make_images(folder: Path, count: int) -> None:
    """Write JPEG files of 512x384 pixels (quality 90, 4:2:0), as most images from the web are."""
    folder.mkdir()
    for number, pixels in enumerate(photographs(count, WIDTH, HEIGHT)):
        data = simplejpeg.encode_jpeg(pixels, quality=90, colorsubsampling="420")
        (folder / f"{number:05}.jpg").write_bytes(data)


def make_video(frames: int) -> bytes:
    """Return an MP4 file (H.264, 640x480) that pans slowly over one synthetic photograph."""
    (wide,) = photographs(1, 960, 540)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=Fraction(24))
        stream.width, stream.height, stream.pix_fmt = 640, 480, "yuv420p"
        for n in range(frames):
            part = np.ascontiguousarray(wide[n : n + 480, 2 * n : 2 * n + 640])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(part, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()
