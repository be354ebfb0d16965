"""Plan the time of a micro-batch of each sample size, so that ranks can share a step evenly.

The batches of a step are divided among ranks by these times (`RankShare` in data/batch_order.py).
Only their ratios matter. With a memory plan, the planner traces the model at a few sizes
(`sizes_to_trace`) and simulates the plan for them; times of other sizes are interpolated in the
number of tokens. Without a plan, `estimate_flops` counts floating-point operations instead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from torch import nn

from gracetune.plan.simulate import candidate_of, predict_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gracetune.data.sample import Shape
    from gracetune.models.family import Family
    from gracetune.plan.cost import CostModel
    from gracetune.plan.result import Plan

    Row = tuple[Sequence[int], float, float]
    """Sample size, seconds of any batch of the size, and further seconds for each sample."""

FLOPS_PER_S = 1e14
"""Speed that is assumed where no speed was measured. It does not change how ranks share a step."""
NO_UPDATE = 1 << 40
"""Number of micro-batches in a step, in a simulation that leaves out the optimizer's update. Every
rank does the update once, whatever micro-batches it has."""


class BucketSeconds:
    """Planned seconds of a micro-batch: a function of its sample size and number of samples."""

    def __init__(self, rows: Iterable[Row]) -> None:
        """Store a table of plain values, which rank 0 can send to the other ranks."""
        self.rows = [(tuple(size), base, each) for size, base, each in rows]
        self._by_size = {size: (base, each) for size, base, each in self.rows}

    def __call__(self, size: Shape, num_samples: int) -> float:
        base, each = self._by_size[size]
        return base + each * num_samples


def bucket_seconds(
    family: Family,
    sizes: Iterable[Shape],
    batch_size: int,
    traced: Mapping[Shape, tuple[float, float]],
) -> BucketSeconds:
    """Return the planned seconds of micro-batches of these sample sizes.

    `traced` has the seconds of a few sizes, for a batch of one sample and for one of `batch_size`
    samples (`PlanController.size_seconds`); it is empty if the run has no memory plan.
    """
    tokens = token_counts(family, sizes)
    if not traced:
        blocks = family.blocks()
        flops = {size: estimate_flops(blocks, count) for size, count in tokens.items()}
        return BucketSeconds((size, 0.0, flops[size] / FLOPS_PER_S) for size in tokens)
    ones = [(tokens[size], one) for size, (one, _) in traced.items()]
    fulls = [(tokens[size], full) for size, (_, full) in traced.items()]
    rows: list[Row] = []
    for size, count in tokens.items():
        one, full = interpolate(ones, count), interpolate(fulls, count)
        each = one if batch_size == 1 else (full - one) / (batch_size - 1)
        rows.append((size, one - each, each))
    return BucketSeconds(rows)


def token_counts(family: Family, sizes: Iterable[Shape]) -> dict[Shape, int]:
    """Return the number of transformer tokens in a sample of each size."""
    return {size: family.num_tokens(family.latent_shape(*size)) for size in sizes}


# With a memory plan


def sizes_to_trace(tokens: Mapping[Shape, int]) -> list[Shape]:
    """Return the sizes with the fewest, a medium and the most tokens, from the tokens of each size.

    The medium one has the mean number of tokens, or is the next to it.
    """
    by_count = {count: size for size, count in sorted(tokens.items(), reverse=True)}
    low, high = min(by_count), max(by_count)
    middle = min(by_count, key=lambda count: (abs(2 * count - low - high), count))
    return [by_count[count] for count in dict.fromkeys((low, middle, high))]


def planned_seconds(model: CostModel, plan: Plan) -> tuple[float, float]:
    """Return the seconds of a micro-batch of one sample and of `plan.batch` samples.

    `model` is the cost model of one sample size, which need not be the one of the plan.
    """

    def seconds(batch: int) -> float:
        candidate = replace(candidate_of(plan), batch=batch, accumulation=NO_UPDATE)
        return predict_seconds(model.at(batch), candidate, model.rates, optimizer_nbytes=0).step

    return seconds(1), seconds(plan.batch)


def interpolate(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the seconds for a number of tokens, from the seconds of one to three numbers.

    Matmuls take time in proportion to the tokens, attention to their square, so the time is the
    quadratic polynomial through three points. Between two points it is kept between their values:
    where copies of weights take longer than compute, the time hardly depends on the tokens.
    """
    points = sorted(points)
    if len(points) == 1:
        ((count, seconds),) = points
        return seconds * tokens / count
    value = sum(
        seconds * prod((tokens - other) / (count - other) for other, _ in points if other != count)
        for count, seconds in points
    )
    for (left, one), (right, other) in pairwise(points):
        if left <= tokens <= right:
            return min(max(value, min(one, other)), max(one, other))
    return value


# Without a memory plan


def estimate_flops(blocks: Sequence[nn.Module], tokens: int) -> float:
    """Return the floating-point operations of forward and backward for one sample.

    Forward takes 2 P T + sum over blocks of 4 D T^2, for T tokens, P weights of the blocks' linear
    and convolution layers, and a block's width D (Kaplan et al. 2020, section 2.1): 2 T^2 D for the
    attention scores and 2 T^2 D for their product with the values. Backward takes twice as long.
    Text tokens are left out: their number does not depend on the sample size.
    """
    weights = sum(_num_weights(module) for block in blocks for module in block.modules())
    widths = sum(_width(block) for block in blocks)
    return 3 * (2.0 * weights * tokens + 4.0 * widths * tokens**2)


def _num_weights(module: nn.Module) -> int:
    """Return the weights of one linear or convolution layer; 0 for another module.

    A quantized layer stores fewer values than it has weights, so its features are multiplied.
    """
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.weight.numel()
    if hasattr(module, "base_layer"):  # an adapter's wrapper: the layer inside is counted
        return 0
    rows: object = getattr(module, "out_features", None)
    columns: object = getattr(module, "in_features", None)
    return rows * columns if isinstance(rows, int) and isinstance(columns, int) else 0


def _width(block: nn.Module) -> int:
    """Return the width of a transformer block: the input width of most of its linear layers."""
    widths = (getattr(module, "in_features", None) for module in block.modules())
    found = Counter(width for width in widths if isinstance(width, int))
    return max(found, key=lambda width: (found[width], width), default=0)
