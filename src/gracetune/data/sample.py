"""Samples before decoding (`Sample`) and encoded batches (`Batch`)."""

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
"""Bucket shape: (width, height) of images, plus frames of videos; (channels, length) of audio."""
Kind = Literal["image", "video", "audio"]


class UnreadableSampleError(DataError):
    """The bytes are not a sample that can be used for training."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Companion:
    """A control image or mask of a sample; it is cropped and augmented like the sample."""

    role: Literal["control", "mask"]
    key: str
    """Key in the dataset's source."""
    digest: str
    inverted: bool = False
    """Whether the mask is inverted: black is trained on instead of white."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An image, video or audio file with its caption, not yet decoded."""

    dataset: str
    """Id of the dataset."""
    key: str
    """Key in the dataset's source."""
    caption: str
    digest: str
    """BLAKE3 digest of the file's bytes; part of cache keys and of the run's identity."""
    width: int
    height: int
    """Size as displayed, after the EXIF orientation; 0 for audio."""
    kind: Kind = "image"
    seconds: float = 0.0
    """Duration of a video or audio file."""
    fps: float = 0.0
    """Average frames per second of a video."""
    companions: tuple[Companion, ...] = ()

    @property
    def mask(self) -> Companion | None:
        """The sample's mask, if its dataset has masks."""
        return next((one for one in self.companions if one.role == "mask"), None)

    @property
    def control(self) -> Companion | None:
        """The sample's control image, if its dataset has control images."""
        return next((one for one in self.companions if one.role == "control"), None)


@dataclass(frozen=True, slots=True)
class Batch:
    """Encoded samples of one bucket."""

    latents: Tensor
    """Latents, stacked along the first dimension."""
    text: Mapping[str, Tensor]
    """Outputs of the family's text encoder by name, each stacked along the first dimension."""
    samples: tuple[Sample, ...]
    weights: Tensor | None = None
    """Loss weight of each latent cell, BHW; None weights all cells equally."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the batch."""
        yield self.latents
        yield from self.text.values()
        if self.weights is not None:
            yield self.weights

    def __len__(self) -> int:
        return len(self.samples)
