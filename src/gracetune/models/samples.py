"""What is asked of a family when it samples, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.models.family import Kind


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample a prompt; sample i starts from the noise of seed + i, whatever the others are."""

    texts: Sequence[Mapping[str, Tensor]]
    """Of each prompt, as `encode_text` gives them."""
    empty: Mapping[str, Tensor]
    """Of no caption, for guidance."""
    shape: tuple[int, ...]
    """As buckets have them: width and height, with frames for videos; channels and samples."""
    seed: int
    steps: int
    guidance: float
    """1: none."""
    images: Sequence[Tensor] = ()
    """For families that start from a picture, one a prompt: CHW in [-1, 1], of the order's size."""
    empties: Sequence[Mapping[str, Tensor]] = ()
    """Where the text depends on the picture: `empty` with each of them."""
    tiled: bool = False
    """Whether to decode by tiles, for a family that has them."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One picture (CHW), clip (CFHW) in [-1, 1] or sound (CN), on the CPU."""

    kind: Kind
    data: Tensor
    rate: float = 0.0
    """Frames or samples a second."""
