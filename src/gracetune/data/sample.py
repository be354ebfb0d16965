"""Data classes for samples before decoding (`Sample`) and batches of encoded samples (`Batch`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

Size = tuple[int, int]
"""Width and height in pixels."""
Shape = tuple[int, ...]
"""Shape that samples are cropped and resized to: (width, height) for images, (width, height,
frames) for videos, (channels, length) for audio."""
Kind = Literal["image", "video", "audio"]


class UnreadableSampleError(DataError):
    """Raised for a file that cannot be decoded or used for training; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Companion:
    """A control image or the mask of a sample. It is cropped and flipped like the sample."""

    role: Literal["control", "mask"]
    key: str
    """Key of the file in the dataset's source."""
    digest: str
    """BLAKE3 digest of the file's bytes."""
    inverted: bool = False
    """True for a mask whose black parts are trained on instead of the white ones."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An image, video or audio file with its caption, not yet decoded."""

    dataset: str
    """Id of the dataset that contains the sample."""
    key: str
    """Key of the file in the dataset's source, such as its path below the dataset's folder."""
    caption: str
    digest: str
    """BLAKE3 digest of the file's bytes. Cache keys depend on it, and resuming a run compares it.
    """
    width: int
    height: int
    """Height in pixels as displayed, after the EXIF orientation or rotation; 0 for audio."""
    kind: Kind = "image"
    seconds: float = 0.0
    """Duration of a video or audio file in seconds; 0 for images."""
    fps: float = 0.0
    """Average frame rate of a video in frames per second; 0 for images and audio."""
    companions: tuple[Companion, ...] = ()
    """The control images and the mask of the sample, if its dataset has them."""
    shuffled: tuple[str, ...] = field(default=(), compare=False)
    """The caption with its tags in other orders, if the dataset shuffles them."""

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions that the sample is trained with, in turn; `caption` is the first."""
        return (self.caption, *self.shuffled)

    @property
    def mask(self) -> Companion | None:
        """The mask of the sample; None if its dataset has no masks."""
        return next((one for one in self.companions if one.role == "mask"), None)

    @property
    def controls(self) -> tuple[Companion, ...]:
        """The control images of the sample; empty if its dataset has none."""
        return tuple(one for one in self.companions if one.role == "control")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of encoded samples of the same size."""

    latents: Tensor
    """Latents of all samples, stacked along the first dimension."""
    text: Mapping[str, Tensor]
    """Text embeddings by name, each stacked along the first dimension. The model family decides the
    names."""
    samples: tuple[Sample, ...]
    """The samples that the batch was made from, in the same order."""
    weights: Tensor | None = None
    """Loss weight of each position in the latents, with the layout BHW; None if all weights are 1.
    """
    index: int = -1
    """Number of the batch in the run, counted over all ranks and epochs; it does not depend on the
    number of ranks. -1 for a batch that is not trained on, such as a held-out one."""
    first: int = 0
    """Place of the first sample in the batch with number `index`, if this is a part of it."""
    of: int | None = None
    """Number of samples in the batch with number `index`, if this is a part of it; None if this is
    all of it."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the batch."""
        yield self.latents
        yield from self.text.values()
        if self.weights is not None:
            yield self.weights

    def __len__(self) -> int:
        return len(self.samples)
