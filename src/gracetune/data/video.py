"""Decode video files to clips: upright frames at a constant rate, cropped and resized to a bucket.

Clips are tensors with the layout CFHW: colour channels, frames, height, width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from gracetune.data.images import CENTRE_CROP, fit, fit_pixels
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
"""Largest number of pixels per frame that is accepted: twice that of an 8K frame."""
MAX_FRAMES = 2**20
"""Largest number of frames per video that is accepted: 12 hours at 24 frames per second."""

_TIME_TOLERANCE_S = 1.5e-3
"""Tolerance in seconds for comparing timestamps, because Matroska rounds them to milliseconds."""
_SEEK_S = 1.0
"""A clip that starts later than this many seconds into the video is reached by seeking."""
_HD_HEIGHT = 720
"""Height in pixels from which players assume the colour matrix BT.709 if the file names none; below
it they assume BT.601."""
_BT709, _UNSPECIFIED, _BT2020, _BT2020_CONSTANT = 1, 2, 9, 10
"""FFmpeg's numbers of colour spaces. swscale converts BT.2020 with constant luminance like the
other BT.2020."""
_SEEK_MARGINS_S = (0.0, 1.0, 5.0, 30.0, math.inf)
"""Seconds before the start of a clip at which to seek. The next one is tried if seeking ends up
after the start."""
_ROTATIONS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """Size, duration and frame rate of a video."""

    width: int
    height: int
    """Height in pixels as displayed, after rotation."""
    seconds: float
    fps: float
    """Average frame rate in frames per second."""


class _TimedFrame(NamedTuple):
    time: float
    frame: VideoFrame


def require_packages() -> None:
    """Raise an error that says what to install if PyAV is missing."""
    load_av("video")


def probe_video(data: bytes) -> VideoFacts:
    """Return the size, duration and frame rate of a video.

    The first frame is decoded, and all packets are read without decoding.
    """
    with opened(data, "video") as container:
        stream = _stream(container)
        first = next(_frames(container, stream), None)
        if first is None:
            raise UnreadableSampleError("the video has no frames")
        width, height = _display_width(first.frame, stream), first.frame.height
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
            raise UnreadableSampleError("the video has no sequence of frames")
        return VideoFacts(width, height, max(end, 0.0) or count / fps, fps)


def decode_video(
    data: bytes,
    size: Size,
    num_frames: int,
    fps: float,
    clip: float = 0.0,
    crop: tuple[float, float] = CENTRE_CROP,
    lanczos: Lanczos = "pillow",
) -> Tensor:
    """Decode one clip to a float32 tensor with the layout CFHW and values in [-1, 1].

    `clip` is the position of the clip in the video: 0 for the first seconds, 1 for the last ones.
    If the file's frame rate is not `fps`, each frame of the clip is the one that a player would
    show at that time.
    """
    import torch

    facts = probe_video(data) if clip else None
    start = clip * max(0.0, facts.seconds - num_frames / fps) if facts else 0.0
    clip_frames: list[Tensor] = []
    with opened(data, "video") as container:
        stream = _stream(container)
        shown: VideoFrame | None = None
        for frame in _displayed_frames(container, stream, start, num_frames, fps):
            if frame is not shown:
                image = _to_upright_image(frame, stream)
                by_torch = lanczos == "torch"
                fitted = (
                    fit_pixels(np.array(image), *size, crop)
                    if by_torch
                    else fit(image, *size, crop)
                )
            clip_frames.append(fitted)
            shown = frame
    if len(clip_frames) < num_frames:
        raise UnreadableSampleError(
            f"the video ends after {len(clip_frames)} of {num_frames} frames at {fps:g} fps"
        )
    return torch.stack(clip_frames, dim=1)


def _stream(container: InputContainer) -> VideoStream:
    if not container.streams.video:
        raise UnreadableSampleError("the file has no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise UnreadableSampleError("its codec is unknown")
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > MAX_PIXELS:
        raise UnreadableSampleError(f"{width}x{height} pixels; the limit is {MAX_PIXELS}")
    return stream


def _frames(
    container: InputContainer, stream: VideoStream, *, after_seek: bool = False
) -> Iterator[_TimedFrame]:
    """Decode and yield frames with their times in seconds.

    Frames without a timestamp are assumed to be evenly spaced. After a seek, frames before the
    first key frame are skipped, because the frames that they refer to are missing.
    """
    rate = float(stream.average_rate or stream.guessed_rate or 24)
    for number, frame in enumerate(container.decode(stream)):
        if after_seek and not frame.key_frame:
            continue
        after_seek = False
        width = max(frame.width, _display_width(frame, stream))
        if width * frame.height > MAX_PIXELS:
            raise UnreadableSampleError(f"frame {number} has {width}x{frame.height} pixels")
        if frame.is_corrupt:
            raise UnreadableSampleError(f"frame {number} is damaged")
        yield _TimedFrame(number / rate if frame.time is None else frame.time, frame)


def _displayed_frames(
    container: InputContainer, stream: VideoStream, start: float, num_frames: int, fps: float
) -> Iterator[VideoFrame]:
    """Yield the frames that a player shows at the times start, start + 1/fps, start + 2/fps, ...

    Yields fewer than `num_frames` if the video ends early.
    """
    frames = _frames(container, stream)
    current = next(frames, None)
    if current is None:
        return
    first, begin = current.time, current.time + start
    if start > _SEEK_S and stream.time_base:
        for margin in _SEEK_MARGINS_S:
            moment = max(begin - margin, first)
            container.seek(int(moment / stream.time_base), stream=stream, backward=True)
            frames = _frames(container, stream, after_seek=True)
            entered = next(frames, None)
            if entered is not None and entered.time <= begin + _TIME_TOLERANCE_S:
                current = entered
                break
        else:
            raise UnreadableSampleError("its index is wrong: seeking goes past the requested time")
    ahead = next(frames, None)
    length = 1 / fps
    for number in range(num_frames):
        moment = begin + number / fps
        while ahead is not None and ahead.time <= moment + _TIME_TOLERANCE_S:
            length = max(ahead.time - current.time, _TIME_TOLERANCE_S)
            current, ahead = ahead, next(frames, None)
        if ahead is None and moment >= current.time + max(length, 1 / fps) - _TIME_TOLERANCE_S:
            return
        yield current.frame


def _to_upright_image(frame: VideoFrame, stream: VideoStream) -> Image.Image:
    pixels = frame.to_ndarray(
        format="rgb24", width=_display_width(frame, stream), src_colorspace=_yuv_matrix(frame)
    )
    image = Image.fromarray(pixels)
    turn = _ROTATIONS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)


def _display_width(frame: VideoFrame, stream: VideoStream) -> int:
    """Return the width at which players show a frame, which differs if pixels are not square."""
    return max(1, round(frame.width * (stream.sample_aspect_ratio or 1)))


def _yuv_matrix(frame: VideoFrame) -> int | str:
    """Return the YUV-to-RGB matrix of a frame, as a number or name of FFmpeg's swscale."""
    if frame.colorspace in (_BT2020, _BT2020_CONSTANT):
        return _BT2020
    is_unspecified_hd = frame.colorspace == _UNSPECIFIED and frame.height >= _HD_HEIGHT
    return "ITU709" if frame.colorspace == _BT709 or is_unspecified_hd else "ITU601"
