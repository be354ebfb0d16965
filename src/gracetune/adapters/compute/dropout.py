"""Dropout whose masks depend on the position in the run, not on how the model is executed.

torch's dropout draws from a global generator: its masks depend on what was drawn before, and a
compiled block draws other masks than an eager one. A step that is repeated with another plan, or in
a resumed run with another plan, would then train on other masks. Here, each dropout layer has a
seed of its own for each micro-batch, and its mask is a function of that seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from gracetune.distributed.context_parallel import TokenSplit


class PositionalDropout(nn.Dropout):
    """Dropout with a mask that is a function of `seed` and the input's shape.

    `seed` is an int64 tensor on the CPU. As a number, each value would be compiled anew.
    """

    def __init__(self, p: float, seed: Tensor) -> None:
        super().__init__(p)
        self.seed = seed
        self.split: TokenSplit | None = None
        """Divides tokens among ranks. None: `x` has all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Set elements of `x` to zero and scale the others by 1 / (1 - p), in training only.

        A rank that has a part of the tokens takes their part of the mask of all tokens.
        """
        if not self.training:
            return x
        length = 0
        pieces: list[int] = []
        if self.split is not None and x.ndim == 3:
            length, pieces = self.split.places(x.shape[1])
        keep: Tensor = dropout_mask(x.detach(), self.seed, 1 - self.p, length, pieces)
        return x * keep * (1 / (1 - self.p))


class DropoutSeeds:
    """The seeds of all dropout layers of a model, which are set before each micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        """Replace every dropout layer of a model by one with a seed of its own."""
        found = [
            (parent, name, child.p)
            for parent in model.modules()
            for name, child in parent.named_children()
            if type(child) is nn.Dropout and child.p > 0
        ]
        self._seeds = torch.zeros(len(found), dtype=torch.int64)
        self._offsets = torch.arange(len(found))
        for seed, (parent, name, p) in zip(self._seeds, found, strict=True):
            layer = PositionalDropout(p, seed)
            setattr(parent, name, layer.train(parent.training))

    def __len__(self) -> int:
        return len(self._seeds)

    def set(self, seed: int) -> None:
        """Set the seeds for a micro-batch, from one seed for all layers."""
        torch.add(self._offsets, seed % 2**62, out=self._seeds)


# Not in the namespace `gracetune`, whose operators the planner counts as matmuls.
@torch.library.custom_op("gracetune_elementwise::dropout_mask", mutates_args=())
def dropout_mask(x: Tensor, seed: Tensor, keep: float, length: int, pieces: list[int]) -> Tensor:
    """Return a mask of the shape of `x` that is True with probability `keep`.

    It is a function of its arguments alone. As an operator of its own it is opaque to the compiler,
    which would use another generator.

    If `length` is not 0, `x` has some of that many tokens, in its dimension 1. `pieces` has the
    start and the size of each piece of these tokens.
    """
    generator = torch.Generator(x.device).manual_seed(int(seed))
    shape = (x.shape[0], length, *x.shape[2:]) if length else x.shape
    mask = torch.empty(shape, dtype=torch.bool, device=x.device)
    mask.bernoulli_(keep, generator=generator)
    if not length:
        return mask
    places = zip(pieces[::2], pieces[1::2], strict=True)
    return torch.cat([mask.narrow(1, start, size) for start, size in places], dim=1)


dropout_mask.register_fake(lambda x, *_: torch.empty(x.shape, dtype=torch.bool, device=x.device))
