"""What a host's files say of a data set that we hold; read before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gracetune.config.schema import InMemorySection


@dataclass(frozen=True, slots=True)
class StagedSet:
    """A data set that is to be held in memory."""

    id: str
    folder: str
    section: InMemorySection
    extensions: tuple[str, ...]
    """Without dots, in lower case; empty: media, captions and tables."""
