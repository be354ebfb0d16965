"""What every place that samples come from can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


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
