"""What every model family can do; the trainer knows families by this and nothing else.

Shapes: B samples, C channels, H and W in pixels for pictures and in cells for latents, s noise
levels in [0, 1] with 1 being pure noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, cast

from gracetune import registry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from gracetune.config.schema import ModelSection

FAMILIES = {"tiny": "gracetune.models.tiny:load"}

Prediction = Literal["flow", "epsilon", "v"]
"""What a model says of a noisy latent: the velocity e - x0 of flow matching, the noise, or the v of
Salimans and Ho. Loss weights depend on it."""


class Family(Protocol):
    """A model with its encoders, loaded."""

    @property
    def name(self) -> str:
        """As a run file spells it."""
        ...

    @property
    def transformer(self) -> nn.Module:
        """What is trained."""
        ...

    @property
    def pixel_step(self) -> int:
        """Picture edges must be multiples of this."""
        ...

    @property
    def max_edge(self) -> int:
        """The longest edge, in pixels, that the model can place."""
        ...

    @property
    def prediction(self) -> Prediction:
        """What `predict` gives."""
        ...

    @property
    def adapter_targets(self) -> Sequence[str]:
        """Endings of the modules an adapter should sit on."""
        ...

    def identity(self) -> Mapping[str, str]:
        """What `latents` and `text` depend on: caches are keyed by it."""
        ...

    def weights_digest(self) -> str:
        """A name for the transformer's weights as they are now; reads all of them."""
        ...

    def blocks(self) -> Sequence[nn.Module]:
        """The repeated blocks, in the order a forward pass uses them."""
        ...

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in backward instead of keeping them."""
        ...

    def to(self, device: torch.device) -> None:
        """Move every part."""
        ...

    def encode(self, pixels_BCHW: Tensor) -> Tensor:  # noqa: N803  shapes are part of the name
        """Pixels in [-1, 1] to latents."""
        ...

    def decode(self, latents_BCHW: Tensor) -> Tensor:  # noqa: N803
        """Latents to pixels in [-1, 1]."""
        ...

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """The latent of one picture of this size."""
        ...

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """How many tokens the transformer makes of one latent: some shift noise levels by it."""
        ...

    def encode_text(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """Each caption's embeddings, without padding."""
        ...

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Embeddings of several captions as one batch, padded as the model expects."""
        ...

    def predict(
        self,
        transformer: nn.Module,
        noisy_BCHW: Tensor,  # noqa: N803
        s_B: Tensor,  # noqa: N803
        text: Mapping[str, Tensor],
    ) -> Tensor:
        """The velocity e - x0. `transformer` is ours or a wrapper around it."""
        ...

    def export(self, folder: Path) -> None:
        """Write the transformer so that `model.path` can name the folder."""
        ...


class LoadFamily(Protocol):
    """How a family is made from its section of the run file."""

    def __call__(self, section: ModelSection) -> Family: ...


def load_family(section: ModelSection) -> Family:
    """Load the model that the run file names."""
    load = cast("LoadFamily", registry.load("family", section.family, FAMILIES))
    return load(section)
