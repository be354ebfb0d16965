"""One sample of a data set, and a batch of them as the trainer sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture and its caption, not yet decoded."""

    dataset: str
    """The id of its data set."""
    key: str
    """Its name in the source."""
    caption: str
    digest: str
    """Of the picture's bytes: what caches and a run's identity are made of."""
    width: int
    height: int
    """As shown: after the EXIF orientation."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one bucket, encoded."""

    latents: Tensor
    """Stacked along the first dimension."""
    text: Mapping[str, Tensor]
    """What the family's text encoder made, each tensor stacked likewise."""
    samples: tuple[Sample, ...]

    def __len__(self) -> int:
        return len(self.samples)
