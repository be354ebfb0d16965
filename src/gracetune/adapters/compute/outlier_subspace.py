"""The main directions of what comes into frozen layers: a few that hold most of it.

Rounding to fp8 is off by a share of each number, whatever the scale; so large numbers are off by
most. In trained models they lie along a few directions that all tokens have in common, and there
rounding does not average out: not that of weights, which is the same for every token, and not that
of activations that are nearly the same. A layer that knows its main directions computes along them
in bf16, as a LoRA of its own, and rounds what is left, which is small.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gracetune.adapters.compute.lora_matmul import FP8_OUTPUT_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_DIMENSIONS = 32
"""Directions of a layer; more found little that is left."""
COLUMNS_PER_DIMENSION = 4
"""Of the columns of a narrow layer, one direction for so many."""
ALIGNMENT = 8
"""Kernels for bf16 want them in multiples of this."""
MAX_ROWS = 8192
"""Of an input, evenly spread, that are looked at."""
ITERATIONS = 8
"""Over those rows; each brings directions nearer to where they should be."""


class InputObserver:
    """Finds the main directions of what comes into linear layers, while it is open.

    Each layer comes with the module that is called with its input: itself, or an adapter around it,
    which may compute by the layer's weight and never call it.
    """

    def __init__(self, layers: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        self._found: dict[nn.Module, nn.Parameter] = {}
        self._last: tuple[Tensor, nn.Parameter] | None = None
        self._handles = [
            called.register_forward_pre_hook(partial(self._look, layer)) for called, layer in layers
        ]

    def basis(self, layer: nn.Module) -> nn.Parameter | None:
        """Of this layer's input; none where nothing came, or something that is not finite.

        Layers with one input in common, as those of queries, keys and values, have one parameter.
        """
        found = self._found.get(layer)
        return found if found is not None and bool(found.isfinite().all()) else None

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._last = None

    def _look(self, layer: nn.Module, _: nn.Module, inputs: Sequence[Tensor]) -> None:
        x = inputs[0]
        if self._last is None or self._last[0] is not x:
            rows = x.detach().flatten(0, -2)
            found = find_outlier_subspace(rows[:: -(-len(rows) // MAX_ROWS)])
            self._last = x, nn.Parameter(found.to(FP8_OUTPUT_DTYPE), requires_grad=False)
        self._found[layer] = self._last[1]


def num_dimensions(columns: int) -> int:
    """How many a layer with so many inputs is given."""
    return min(
        MAX_DIMENSIONS, max(ALIGNMENT, columns // COLUMNS_PER_DIMENSION // ALIGNMENT * ALIGNMENT)
    )


@torch.no_grad()
def find_outlier_subspace(rows: Tensor) -> Tensor:
    """Those that most of the squares of these rows lie along, by subspace iteration; (directions,
    columns), orthonormal, always the same for the same rows.
    """
    columns = rows.shape[1]
    start = torch.Generator().manual_seed(0)
    basis = torch.randn(columns, num_dimensions(columns), generator=start).to(rows.device)
    with torch.autocast(rows.device.type, enabled=False):
        exact = rows.float()
        for _ in range(ITERATIONS):
            basis, _ = torch.linalg.qr(exact.t() @ (exact @ basis))
    return basis.t().contiguous()
