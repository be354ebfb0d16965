"""What families of a diffusers folder have in common: a transformer, a VAE, text encoders."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from gracetune.models.digest import digest_of_weights
from gracetune.models.parts import copy_rest

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from gracetune.models.samples import SampleRequest


class FolderFamily:
    """The members of `Family` that do not depend on the model."""

    folder: Path
    transformer: Any
    vae: Any
    text: list[nn.Module]

    def weights_digest(self) -> str:
        """Of the transformer."""
        return digest_of_weights(self.transformer)

    def enable_gradient_checkpointing(self) -> None:
        """As diffusers does it, block by block."""
        self.transformer.enable_gradient_checkpointing()

    def to(self, device: torch.device) -> None:
        """The VAE, and the text encoders as long as they are there."""
        for part in (self.vae, *self.text):
            part.to(device)

    def release_text_encoder(self) -> None:
        """Gigabytes that training does not need."""
        self.text.clear()

    def tile(self, on: bool) -> bool:
        """The VAE's own tiles."""
        _tile(self.vae, on)
        return True

    def vae_for(self, order: SampleRequest) -> Any:
        """To sample with: the same weights, but tiles and kept frames of its own.

        A generation may be encoded meanwhile. A VAE of clips keeps frames between its calls, and
        either would go on with the other's.
        """
        vae = copy.copy(self.vae)
        _tile(vae, order.tiled)
        return vae

    def export(self, folder: Path) -> None:
        """A whole pipeline's folder; what was not trained is linked or copied."""
        self.transformer.save_pretrained(folder / "transformer")
        copy_rest(self.folder, folder, leave_out=("transformer",))


def _tile(vae: Any, on: bool) -> None:
    (vae.enable_tiling if on else vae.disable_tiling)()
