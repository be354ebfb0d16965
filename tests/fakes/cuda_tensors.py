"""CPU tensors that say that they are on a GPU, and a random state for it.

For code that looks where tensors are, to save and restore the random state of their device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pytest

DEVICE = torch.device("cuda", 0)


class CudaTensor(Tensor):
    """A tensor in memory of the CPU that names a GPU as its device."""

    is_cuda = True
    device = DEVICE

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Return ordinary tensors of the CPU."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class CudaGenerator:
    """The random state of the GPU: how many numbers were drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn = 0
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.get_state)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set_state)

    def get_state(self, device: torch.device) -> Tensor:
        assert device == DEVICE
        return torch.tensor([self.drawn])

    def set_state(self, state: Tensor, device: torch.device) -> None:
        assert device == DEVICE
        self.drawn = int(state)
