"""What every place that samples come from can do, and what some can do beside it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


class Source(Protocol):
    """Named byte strings: the files of a folder, the members of a shard, a staged arena."""

    def keys(self) -> Sequence[str]:
        """Every name, sorted; relative, with forward slashes."""
        ...

    def read(self, key: str) -> bytes:
        """The bytes behind one name; OSError where they cannot be read."""
        ...

    def nbytes(self, key: str) -> int:
        """How long they are, without reading them where that is possible."""
        ...

    def describe(self) -> str:
        """One phrase for messages: what and where this is."""
        ...


class Span(NamedTuple):
    """Bytes that lie in one piece in an open file."""

    fd: int
    offset: int
    nbytes: int


@runtime_checkable
class SpanSource(Source, Protocol):
    """A source of plain files or parts of them: staging copies these inside the kernel."""

    def span(self, key: str) -> AbstractContextManager[Span]:
        """Where the bytes are, open until the block ends; OSError where they cannot be read."""
        ...


@runtime_checkable
class EstimatingSource(Source, Protocol):
    """A source that must decode to know one length, but can tell them all roughly for nothing."""

    def estimate(self) -> int:
        """About how many bytes its samples have together."""
        ...


def read_span(span: Span) -> bytes:
    """All of it, or as much as the file still has; the kernel gives at most 2 GiB a call."""
    data = os.pread(span.fd, span.nbytes, span.offset)
    parts = [data]
    done = len(data)
    while data and done < span.nbytes:
        data = os.pread(span.fd, span.nbytes - done, span.offset + done)
        parts.append(data)
        done += len(data)
    return b"".join(parts) if len(parts) > 1 else parts[0]


def check_name(setting: str, key: str) -> None:
    """Logs and reports are UTF-8; a name that is not could not stand in one."""
    try:
        key.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(key).decode(errors="backslashreplace")
        raise DataError(
            f"{setting} holds a file whose name is not UTF-8: {shown}. Logs and reports could not "
            "name it; rename it."
        ) from None


def printable(key: str) -> str:
    """The name on one line of a message, whatever characters it has."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in key)


def is_hidden(key: str) -> bool:
    """Whether a part of the name begins with a dot: `.git/x`, `a/._b.jpg`, and also `../x`."""
    return key.startswith(".") or "/." in key
