"""Generate images, videos and audio, as arrays and as encoded files."""

from __future__ import annotations

import io
import struct
import zlib
from fractions import Fraction

import numpy as np
from PIL import Image


def photo(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return noise with a 1/f spectrum, as in photographs: uint8, HWC."""
    noise = np.fft.rfft2(np.random.default_rng(seed).standard_normal((3, height, width)))
    distance = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    distance[0, 0] = 1
    waves = np.fft.irfft2(noise / distance, s=(height, width))
    levels = (waves - waves.mean()) / waves.std() * 50 + 120
    return levels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0).copy()


def image_bytes(pixels: np.ndarray, file_format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, file_format, **options)
    return buffer.getvalue()


def heic_bytes(pixels: np.ndarray, **options: object) -> bytes:
    import pillow_heif

    buffer = io.BytesIO()
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(buffer, **options)
    return buffer.getvalue()


def animated_image_bytes(file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    frames = [Image.fromarray(photo(24, 16, seed)) for seed in range(3)]
    frames[0].save(
        buffer, file_format, save_all=True, append_images=frames[1:], duration=100, **options
    )
    return buffer.getvalue()


def assemble_png(
    size: tuple[int, int], bit_depth: int, color_type: int, rows: bytes, *, interlaced: bool = False
) -> bytes:
    """Return a PNG with this header and these uncompressed rows, which need not fit the header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", *size, bit_depth, color_type, 0, 0, interlaced)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def grey_frames(count: int, width: int = 64, height: int = 48, step: int = 4) -> list[np.ndarray]:
    """Return frames of plain grey; frame n has the value n * step."""
    return [np.full((height, width, 3), n * step % 256, np.uint8) for n in range(count)]


def video_bytes(
    frames: list[np.ndarray],
    fps: int = 24,
    container: str = "mp4",
    codec: str = "libx264",
    colorspace: int | None = None,
    options: dict[str, str] | None = None,
    pixel_aspect: Fraction | None = None,
    first: int = 0,
) -> bytes:
    import av

    buffer = io.BytesIO()
    timestamps = {"avoid_negative_ts": "disabled"} if first < 0 else {}
    with av.open(buffer, "w", format=container, options=timestamps) as output:
        stream = output.add_stream(codec, rate=Fraction(fps), options=options)
        stream.pix_fmt = "yuv420p"
        if pixel_aspect is not None:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        if frames:
            stream.height, stream.width = frames[0].shape[:2]
        if colorspace is not None:
            stream.codec_context.colorspace = colorspace
        for number, pixels in enumerate(frames, first):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            if colorspace is not None:
                frame = frame.reformat(format="yuv420p", dst_colorspace=colorspace)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


def tone(seconds: float, rate: int, *hertz: float) -> np.ndarray:
    """Return sine waves of shape (samples, channels), one channel per frequency."""
    times = np.arange(round(seconds * rate)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * f * times) for f in hertz], 1).astype(np.float32)


def audio_bytes(waves: np.ndarray, rate: int, file_format: str = "WAV", **options: object) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, waves, rate, format=file_format, **options)
    return buffer.getvalue()


def m4a_bytes(waves: np.ndarray, rate: int) -> bytes:
    import av

    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[waves.shape[1]]
    with av.open(buffer, "w", format="ipod") as output:
        stream = output.add_stream("aac", rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(waves.T), format="fltp", layout=layout
        )
        frame.sample_rate = rate
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()
