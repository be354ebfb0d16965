"""The simulator fetches as often as the weight ring."""

import pytest
import torch
from torch import nn

from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.ring import stream_weights
from gracetune.plan.simulate import fetches


class Chain(nn.Module):
    """Frozen layers after a trained one, so that each of them has a backward."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.trained = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4).requires_grad_(False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trained(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize(("count", "slots"), [(10, 3), (10, 2), (10, 4), (4, 3), (3, 3), (7, 5)])
def test_simulated_fetches_equal_those_of_the_ring(count: int, slots: int) -> None:
    model = Chain(count)
    ring = stream_weights(
        model, list(model.blocks), SynchronousCopyEngine(), lambda notice: None, slots
    )
    after_each = []
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        after_each.append(ring.counters().fetches)
    there = list(range(count))
    turn = there[-2::-1]
    order = there + turn
    asked = fetches(order + (order[1:] * 3), slots)
    per_step = 2 * count - 2
    total = sum(len(blocks) for blocks in asked[: 1 + 2 * per_step])
    before = sum(len(blocks) for blocks in asked[: 1 + per_step])
    assert after_each[2] - after_each[1] == total - before


def test_ten_blocks_in_three_slots_are_fetched_fourteen_times_a_step() -> None:
    order = [*range(10), *range(8, -1, -1)]
    asked = fetches(order + order[1:] * 2, 3)
    assert sum(len(blocks) for blocks in asked[19:37]) == 14  # as benchmarks/results/ring.json
