"""Open video and audio files with PyAV, and convert its errors to `UnreadableSampleError`."""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from gracetune.data.sample import UnreadableSampleError
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from av.container import InputContainer

DECODE_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    RuntimeError,
    ZeroDivisionError,
)
"""Exceptions that PyAV may raise for a corrupted file, besides `av.FFmpegError`."""


@contextmanager
def opened(data: bytes, what: Literal["video", "audio"]) -> Iterator[InputContainer]:
    """Open a video or audio file; errors in the `with` block become `UnreadableSampleError`."""
    av = load_av(what)
    if not data:
        raise UnreadableSampleError("the file is empty")
    try:
        # Before 19, metadata in another text encoding makes a file unreadable without this setting.
        settings = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
        with av.open(io.BytesIO(data), "r", **settings) as container:
            yield container
    except UnreadableSampleError:
        raise
    except MemoryError as error:
        raise UnreadableSampleError("there is not enough memory to decode it") from error
    except (*DECODE_ERRORS, av.FFmpegError) as error:
        raise UnreadableSampleError(reason_of(error, what)) from error


def reason_of(error: BaseException, what: str) -> str:
    """Return why a file cannot be decoded: FFmpeg's message without error number and file name."""
    if isinstance(error, EOFError):
        return f"the {what} file has no frames: it ends before the first"
    text = re.sub(r"^\[Errno -?\d+\] |^Error : |: '.*$|\.$", "", str(error))
    return f"not a readable {what} file ({text or type(error).__name__})"


def load_av(what: Literal["video", "audio"]) -> ModuleType:
    """Import PyAV; if it is missing, raise an error that says what to install."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"dataset_type is {what!r}, and this file needs the package av. Run `pip install "
            f"gracetune[{what}]`."
        ) from error
    return av
