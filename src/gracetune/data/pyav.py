"""Opening videos and sounds through PyAV: an optional package, and hostile bytes."""

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

BROKEN = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    RuntimeError,
    ZeroDivisionError,
)
"""What PyAV's readers raise on hostile bytes, beside FFmpeg's own errors."""


@contextmanager
def opened(data: bytes, what: Literal["video", "sound"]) -> Iterator[InputContainer]:
    """The container in these bytes; whatever goes wrong inside the block is the file's fault."""
    av = load_av(what)
    if not data:
        raise UnreadableSampleError("the file is empty")
    try:
        # a title in another encoding is no reason to refuse a sample
        with av.open(io.BytesIO(data), "r", metadata_errors="replace") as container:
            yield container
    except UnreadableSampleError:
        raise
    except MemoryError as error:
        raise UnreadableSampleError("it needs more memory than there is") from error
    except (*BROKEN, av.FFmpegError) as error:
        raise UnreadableSampleError(reason_of(error, what)) from error


def reason_of(error: BaseException, what: str) -> str:
    """The library's words, without its numbers and the name that bytes do not have."""
    if isinstance(error, EOFError):
        return f"the {what} has no frames: the file ends before the first"
    text = re.sub(r"^\[Errno -?\d+\] |^Error : |: '.*$|\.$", "", str(error))
    return f"not a {what} that can be read ({text or type(error).__name__})"


def load_av(what: Literal["video", "sound"]) -> ModuleType:
    """PyAV; the error names the extra to install."""
    try:
        import av
    except ImportError as error:
        kind = "video" if what == "video" else "audio"
        raise ConfigError(
            f"dataset_type is {kind!r}, and this {what} needs the package av. Run `pip install "
            f"gracetune[{kind}]`."
        ) from error
    return av
