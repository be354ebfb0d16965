"""Open video and audio containers with PyAV, and turn its errors into `UnreadableSampleError`."""

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
"""Exceptions that PyAV raises on corrupted files, besides FFmpeg's own errors."""


@contextmanager
def opened(data: bytes, what: Literal["video", "audio"]) -> Iterator[InputContainer]:
    """Open a container; errors inside the block become `UnreadableSampleError`."""
    av = load_av(what)
    if not data:
        raise UnreadableSampleError("the file is empty")
    try:
        # metadata in another text encoding must not make a sample unreadable
        with av.open(io.BytesIO(data), "r", metadata_errors="replace") as container:
            yield container
    except UnreadableSampleError:
        raise
    except MemoryError as error:
        raise UnreadableSampleError("there is not enough memory to decode it") from error
    except (*DECODE_ERRORS, av.FFmpegError) as error:
        raise UnreadableSampleError(reason_of(error, what)) from error


def reason_of(error: BaseException, what: str) -> str:
    """Return FFmpeg's message without its error numbers and file name."""
    if isinstance(error, EOFError):
        return f"the {what} file has no frames: it ends before the first"
    text = re.sub(r"^\[Errno -?\d+\] |^Error : |: '.*$|\.$", "", str(error))
    return f"not a readable {what} file ({text or type(error).__name__})"


def load_av(what: Literal["video", "audio"]) -> ModuleType:
    """Import PyAV, or raise an error that names the extra to install."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"dataset_type is {what!r}, and this file needs the package av. Run `pip install "
            f"gracetune[{what}]`."
        ) from error
    return av
