"""A short name for a set of weights, so that a run knows whether it goes on with the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from blake3 import blake3

if TYPE_CHECKING:
    from torch import nn


def digest_of_weights(module: nn.Module) -> str:
    """Of every parameter's name, shape, type and bytes."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(module.state_dict().items()):
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        contiguous = tensor.detach().cpu().contiguous()
        hasher.update(contiguous.flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest(length=16)
