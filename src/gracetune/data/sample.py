"""One sample of a data set, and a batch of them as the trainer sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

Size = tuple[int, int]
"""Width and height in pixels."""
Shape = tuple[int, ...]
"""Of a bucket: width and height; for videos also frames; for sounds channels and samples."""
Kind = Literal["image", "video", "audio"]


class UnreadableSampleError(DataError):
    """These bytes are not a sample that can be trained on."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Companion:
    """A picture that belongs to a sample: it gets the same crop and the same warp."""

    role: Literal["control", "mask"]
    key: str
    """Its name in its own source."""
    digest: str
    inverted: bool = False
    """Of a mask: black is learnt."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture, video or sound and its caption, not yet decoded."""

    dataset: str
    """The id of its data set."""
    key: str
    """Its name in the source."""
    caption: str
    digest: str
    """Of the file's bytes: what caches and a run's identity are made of."""
    width: int
    height: int
    """As shown: after the EXIF orientation. Sounds have neither: 0."""
    kind: Kind = "image"
    seconds: float = 0.0
    """How long a video or a sound lasts."""
    fps: float = 0.0
    """Frames a second of a video, on average."""
    companions: tuple[Companion, ...] = ()


def mask_of(sample: Sample) -> Companion | None:
    """The mask of a sample, where its data set has masks."""
    return next((one for one in sample.companions if one.role == "mask"), None)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one bucket, encoded."""

    latents: Tensor
    """Stacked along the first dimension."""
    text: Mapping[str, Tensor]
    """What the family's text encoder made, each tensor stacked likewise."""
    samples: tuple[Sample, ...]
    weights: Tensor | None = None
    """How much each cell of the latents counts, BHW; none: all alike."""

    def tensors(self) -> Iterator[Tensor]:
        """All that lies on the device."""
        yield self.latents
        yield from self.text.values()
        if self.weights is not None:
            yield self.weights

    def __len__(self) -> int:
        return len(self.samples)
