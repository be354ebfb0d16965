"""Weights that are divided among ranks: their parts, gradients and dtypes."""

from pathlib import Path

import pytest
import torch
from fork_process import run_ranks
from torch import nn

from gracetune.distributed.gradients import check_same_weights
from gracetune.distributed.layout import Layout
from gracetune.distributed.ranks import RankGroup
from gracetune.distributed.sharding import shard_rows


def test_three_ranks_train_a_divided_model_like_one_process():
    for rank in run_ranks(Path(__file__).with_name("sharding_rank.py"), count=3):
        assert rank.returncode == 0, rank.stderr[-3000:]


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_rows_are_divided_as_torch_chunks_them(num_rows, size):
    parts = [shard_rows(num_rows, shard, size) for shard in range(size)]
    chunks = [len(chunk) for chunk in torch.zeros(num_rows).chunk(size)]
    assert [length for _, length in parts] == chunks + [0] * (size - len(chunks))
    assert [first for first, _ in parts] == [
        min(num_rows, shard * chunks[0]) for shard in range(size)
    ]


class Copies(RankGroup):
    """Four ranks whose gathered values are given."""

    def __init__(self, values):
        super().__init__(0, [""] * len(values), [""] * len(values))
        self.values = values

    def gather(self, value):
        return [value if one is None else one for one in self.values]


def test_only_ranks_with_the_same_part_are_compared():
    parameters = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.zeros(2))}
    one = [2 * 0x3F800000, 0]
    other = [2 * 0x3F800000, 1]
    same = Layout(Copies([one, other, one, other]), shard_size=2)
    assert check_same_weights(same, parameters) == ""
    different = Layout(Copies([one, other, one, one]), shard_size=2)
    assert check_same_weights(different, parameters) == "b"
    assert check_same_weights(Layout(Copies([one, other]), shard_size=2), parameters) == ""
