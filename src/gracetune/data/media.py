"""Opening videos and sounds through PyAV: an optional package, and hostile bytes."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
"""What FFmpeg's readers raise on hostile bytes, among them all of PyAV's own errors."""


@contextmanager
def opened(data: bytes, what: str) -> Iterator[InputContainer]:
    """The container in these bytes; whatever goes wrong inside the block is the file's fault."""
    av = load_av(what)
    if not data:
        raise UnreadableSampleError("the file is empty")
    try:
        with av.open(io.BytesIO(data), "r") as container:
            yield container
    except UnreadableSampleError:
        raise
    except MemoryError as error:
        raise UnreadableSampleError("it needs more memory than there is") from error
    except BROKEN as error:
        raise UnreadableSampleError(reason_of(error, what)) from error


def reason_of(error: BaseException, what: str) -> str:
    """FFmpeg's words without its numbers and our file's lack of a name."""
    text = str(error).rpartition("] ")[2].partition(":")[0]
    return f"not a {what} that can be read ({text or type(error).__name__})"


def load_av(what: str) -> ModuleType:
    """PyAV; the error names the extra to install."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"dataset_type is {what!r}, which needs the package av. Run `pip install "
            f"gracetune[{what}]`."
        ) from error
    return av
