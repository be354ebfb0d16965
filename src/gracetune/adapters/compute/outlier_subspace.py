"""Find the outlier subspace of a layer's input: the few directions that hold most of its energy.

Rounding to fp8 has a relative error, so large numbers have the largest absolute errors. In trained
models the large part of an activation lies in a few directions that all tokens share. Errors in
these directions do not average out over tokens, because the rounded weight is the same for every
token, and so, nearly, is the activation. A layer that knows the basis V of this subspace multiplies
the component of its input in the subspace in bf16, and rounds only the small rest to fp8.
lora_matmul.py has the formula.

V holds the leading right singular vectors of the input (rows x columns), found by subspace
iteration: V <- qr(X^T X V), a fixed number of times from a fixed start, so that a resumed run finds
the same V.
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
"""Largest number of dimensions of the outlier subspace: the directions in which a layer's input is
largest, and which are not rounded to fp8. More improved accuracy little."""
COLUMNS_PER_DIMENSION = 4
"""Number of a layer's input columns for each direction that is not rounded to fp8, in layers too
narrow for `MAX_DIMENSIONS` directions."""
ALIGNMENT = 8
"""Number of which the count of directions that are not rounded to fp8 is a multiple, as bf16 matmul
kernels need it."""
MAX_ROWS = 8192
"""Largest number of rows of a layer's input, evenly spread, from which the directions with the
largest values are computed."""
ITERATIONS = 8
"""Number of iterations V <- qr(X^T X V) that find the directions V in which an input X is largest.
"""


class InputObserver:
    """Finds the few directions in which each linear layer's input is largest (outlier subspace).

    Hooks observe the inputs from construction until `close`. `layers` has pairs (module to observe,
    layer). The module is the layer itself, or the adapter around it, which may use the layer's
    weight without calling the layer.
    """

    def __init__(self, layers: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        self._found: dict[nn.Module, nn.Parameter] = {}
        self._last: tuple[Tensor, nn.Parameter] | None = None
        self._handles = [
            called.register_forward_pre_hook(partial(self._observe, layer))
            for called, layer in layers
        ]

    def basis(self, layer: nn.Module) -> nn.Parameter | None:
        """Return an orthonormal basis of the directions in which a layer's input is largest.

        The result is None if the layer was not called, or if its input was not finite. Layers with
        the same input tensor, such as query, key and value, have the same `nn.Parameter` as their
        basis.
        """
        found = self._found.get(layer)
        return found if found is not None and bool(found.isfinite().all()) else None

    def close(self) -> None:
        """Stop observing: remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._last = None

    def _observe(self, layer: nn.Module, _: nn.Module, inputs: Sequence[Tensor]) -> None:
        x = inputs[0]
        if self._last is None or self._last[0] is not x:
            rows = x.detach().flatten(0, -2)
            basis = find_outlier_subspace(rows[:: -(-len(rows) // MAX_ROWS)])
            self._last = x, nn.Parameter(basis.to(FP8_OUTPUT_DTYPE), requires_grad=False)
        self._found[layer] = self._last[1]


def num_dimensions(columns: int) -> int:
    """Return how many directions to keep out of fp8, for a layer with this many input columns."""
    return min(
        MAX_DIMENSIONS, max(ALIGNMENT, columns // COLUMNS_PER_DIMENSION // ALIGNMENT * ALIGNMENT)
    )


@torch.no_grad()
def find_outlier_subspace(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the directions in which the rows have the most energy.

    The basis has the shape (dimensions, columns). The result depends only on the rows.
    """
    columns = rows.shape[1]
    start = torch.Generator().manual_seed(0)
    basis = torch.randn(columns, num_dimensions(columns), generator=start).to(rows.device)
    with torch.autocast(rows.device.type, enabled=False):
        exact = rows.float()
        for _ in range(ITERATIONS):
            basis, _ = torch.linalg.qr(exact.t() @ (exact @ basis))
    return basis.t().contiguous()
