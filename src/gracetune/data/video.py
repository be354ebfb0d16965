"""From the bytes of a video file to a clip: frames at even times, upright, of one size.

Shapes: C colours, F frames, H and W in pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from gracetune.data.images import CENTRE, fit, fit_pixels
from gracetune.data.pyav import load_av, opened
from gracetune.data.sample import UnreadableSampleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream
    from torch import Tensor

    from gracetune.data.images import Lanczos
    from gracetune.data.sample import Size

EXTENSIONS = frozenset((".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"))
MAX_PIXELS = 2**26
"""Of one frame: 8K has half of it."""
MAX_FRAMES = 2**20
"""Twelve hours at 24 a second; a file that claims more is not a clip."""

_HAIR_S = 1.5e-3
"""Matroska rounds times to milliseconds; two that are this close are the same."""
_SEEK_S = 1.0
_HD_HEIGHT = 720
"""From here on colours that are not said are BT.709, below BT.601: what every player assumes."""
_BT709, _UNSAID, _BT2020, _BT2020_CONSTANT = 1, 2, 9, 10
"""As frames number them; of the two of BT.2020 swscale has the first, and nobody uses the other."""
_SEEK_FURTHER_S = (0.0, 1.0, 5.0, 30.0, math.inf)
"""A file may be entered between key frames, and pictures after one may need what is before it."""
_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """What buckets need to know."""

    width: int
    height: int
    """As shown: turned upright."""
    seconds: float
    fps: float


class _Timed(NamedTuple):
    time: float
    frame: VideoFrame


def require_packages() -> None:
    """Say now which extra is missing, not at the first file."""
    load_av("video")


def probe_video(data: bytes) -> VideoFacts:
    """Every packet is read, the first frame is decoded; the rest only when its clip is."""
    with opened(data, "video") as container:
        stream = _stream(container)
        first = next(_frames(container, stream), None)
        if first is None:
            raise UnreadableSampleError("the video has no frames")
        width, height = _shown_width(first.frame, stream), first.frame.height
        if first.frame.rotation % 180:
            width, height = height, width
    with opened(data, "video") as container:
        stream = _stream(container)
        count, end = 0, 0.0
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_corrupt:
                continue
            count += 1
            if packet.pts is not None:
                last = (packet.pts + (packet.duration or 0)) * float(stream.time_base or 0)
                end = max(end, last - first.time)
            if count > MAX_FRAMES:
                raise UnreadableSampleError(f"more than {MAX_FRAMES} frames; cut it into clips")
        fps = float(stream.average_rate or stream.guessed_rate or 0) or (count / end if end else 0)
        if count == 0 or fps <= 0:
            raise UnreadableSampleError("the video has no frames that follow each other")
        return VideoFacts(width, height, max(end, 0.0) or count / fps, fps)


def decode_video(
    data: bytes,
    size: Size,
    num_frames: int,
    fps: float,
    clip: float = 0.0,
    crop: tuple[float, float] = CENTRE,
    lanczos: Lanczos = "pillow",
) -> Tensor:
    """A clip as CFHW in [-1, 1]. `clip` is the share of what is left over that comes before it.

    Of a file with another rate, each moment shows the frame that a player would show then.
    """
    import torch

    facts = probe_video(data) if clip else None
    start = clip * max(0.0, facts.seconds - num_frames / fps) if facts else 0.0
    pictures: list[Tensor] = []
    with opened(data, "video") as container:
        stream = _stream(container)
        shown: VideoFrame | None = None
        for frame in _shown(container, stream, start, num_frames, fps):
            if frame is not shown:
                image = _upright(frame, stream)
                by_torch = lanczos == "torch"
                fitted = (
                    fit_pixels(np.array(image), *size, crop)
                    if by_torch
                    else fit(image, *size, crop)
                )
            pictures.append(fitted)
            shown = frame
    if len(pictures) < num_frames:
        raise UnreadableSampleError(
            f"the video ends after {len(pictures)} of {num_frames} frames at {fps:g} a second"
        )
    return torch.stack(pictures, dim=1)


def _stream(container: InputContainer) -> VideoStream:
    if not container.streams.video:
        raise UnreadableSampleError("the file has no video in it")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise UnreadableSampleError("its codec is not known")
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > MAX_PIXELS:
        raise UnreadableSampleError(f"{width}x{height} pixels; at most {MAX_PIXELS} are read")
    return stream


def _frames(
    container: InputContainer, stream: VideoStream, *, sought: bool = False
) -> Iterator[_Timed]:
    """In the order of their times; those without one follow each other evenly.

    Where a file was sought in, from a key frame on: others are decoded without what they refer to.
    """
    rate = float(stream.average_rate or stream.guessed_rate or 24)
    for number, frame in enumerate(container.decode(stream)):
        if sought and not frame.key_frame:
            continue
        sought = False
        width = max(frame.width, _shown_width(frame, stream))
        if width * frame.height > MAX_PIXELS:
            raise UnreadableSampleError(f"frame {number} has {width}x{frame.height} pixels")
        if frame.is_corrupt:
            raise UnreadableSampleError(f"frame {number} is damaged")
        yield _Timed(number / rate if frame.time is None else frame.time, frame)


def _shown(
    container: InputContainer, stream: VideoStream, start: float, num_frames: int, fps: float
) -> Iterator[VideoFrame]:
    """What is on the screen at start, start + 1/fps, ...; fewer where the video ends before."""
    frames = _frames(container, stream)
    current = next(frames, None)
    if current is None:
        return
    first, begin = current.time, current.time + start
    if start > _SEEK_S and stream.time_base:
        for further in _SEEK_FURTHER_S:
            moment = max(begin - further, first)
            container.seek(int(moment / stream.time_base), stream=stream, backward=True)
            frames = _frames(container, stream, sought=True)
            entered = next(frames, None)
            if entered is not None and entered.time <= begin + _HAIR_S:
                current = entered
                break
        else:
            raise UnreadableSampleError("its index is wrong: seeking leads past the moment sought")
    ahead = next(frames, None)
    length = 1 / fps
    for number in range(num_frames):
        moment = begin + number / fps
        while ahead is not None and ahead.time <= moment + _HAIR_S:
            length = max(ahead.time - current.time, _HAIR_S)
            current, ahead = ahead, next(frames, None)
        if ahead is None and moment >= current.time + max(length, 1 / fps) - _HAIR_S:
            return
        yield current.frame


def _upright(frame: VideoFrame, stream: VideoStream) -> Image.Image:
    pixels = frame.to_ndarray(
        format="rgb24", width=_shown_width(frame, stream), src_colorspace=_matrix(frame)
    )
    image = Image.fromarray(pixels)
    turn = _TURNS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)


def _shown_width(frame: VideoFrame, stream: VideoStream) -> int:
    """Of a file whose pixels are not square, players widen or narrow the lines."""
    return max(1, round(frame.width * (stream.sample_aspect_ratio or 1)))


def _matrix(frame: VideoFrame) -> int | str:
    """What made the colours luma and chroma, as swscale names it."""
    if frame.colorspace in (_BT2020, _BT2020_CONSTANT):
        return _BT2020
    large_unsaid = frame.colorspace == _UNSAID and frame.height >= _HD_HEIGHT
    return "ITU709" if frame.colorspace == _BT709 or large_unsaid else "ITU601"
