"""Find the outlier subspace of a layer's input: the few directions that hold most of its energy.

Rounding to fp8 is off by a share of each number, so large numbers have the largest errors. In
trained models the large part of an activation lies in a few directions that all tokens share, and
there the errors do not average out over tokens: the rounded weight is the same for every token, and
so, nearly, is the activation. A layer that knows the basis V of this subspace multiplies the
component along V in bf16 and rounds only the small rest. lora_matmul.py has the formula.

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
"""Dimensions of a layer's subspace at most; more improved little."""
COLUMNS_PER_DIMENSION = 4
"""Narrow layers get one dimension for this many input columns."""
ALIGNMENT = 8
"""bf16 kernels need the number of dimensions to be a multiple of this."""
MAX_ROWS = 8192
"""Rows of an input that are used, evenly spread over it."""
ITERATIONS = 8
"""Steps of the subspace iteration."""


class InputObserver:
    """Computes the outlier subspace of linear layers from the inputs of a forward pass.

    It observes from construction until `close`. Each layer comes as a pair with the module whose
    input to watch: the layer itself, or the adapter around it, which may use the layer's weight
    without calling the layer.
    """

    def __init__(self, layers: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        self._found: dict[nn.Module, nn.Parameter] = {}
        self._last: tuple[Tensor, nn.Parameter] | None = None
        self._handles = [
            called.register_forward_pre_hook(partial(self._observe, layer))
            for called, layer in layers
        ]

    def basis(self, layer: nn.Module) -> nn.Parameter | None:
        """Return V for a layer, or None if it was not called or its input was not finite.

        Layers that are given the same tensor, such as query, key and value, share one parameter.
        """
        found = self._found.get(layer)
        return found if found is not None and bool(found.isfinite().all()) else None

    def close(self) -> None:
        """Stop observing."""
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
    """Return the dimension of the subspace for a layer with this many input columns."""
    return min(
        MAX_DIMENSIONS, max(ALIGNMENT, columns // COLUMNS_PER_DIMENSION // ALIGNMENT * ALIGNMENT)
    )


@torch.no_grad()
def find_outlier_subspace(rows: Tensor) -> Tensor:
    """Return an orthonormal basis, (dimensions, columns), of the directions with most energy.

    The result depends only on the rows.
    """
    columns = rows.shape[1]
    start = torch.Generator().manual_seed(0)
    basis = torch.randn(columns, num_dimensions(columns), generator=start).to(rows.device)
    with torch.autocast(rows.device.type, enabled=False):
        exact = rows.float()
        for _ in range(ITERATIONS):
            basis, _ = torch.linalg.qr(exact.t() @ (exact @ basis))
    return basis.t().contiguous()
