"""Trained weights are copied to the dtype of most frozen weights."""

import pytest
import torch
from torch import nn

from gracetune.plan.planner_input import _compute_dtype


def model(*frozen, trained=torch.float32):
    made = nn.Module()
    made.trained = nn.Parameter(torch.zeros(999, dtype=trained))
    for number, (count, dtype) in enumerate(frozen):
        weight = nn.Parameter(torch.zeros(count, dtype=dtype), requires_grad=False)
        made.register_parameter(f"frozen_{number}", weight)
    return made


@pytest.mark.parametrize(
    ("frozen", "products"),
    [
        ([(4, torch.float32), (100, torch.bfloat16)], torch.bfloat16),
        ([(100, torch.bfloat16), (4, torch.float32)], torch.bfloat16),
        ([(8, torch.float32)], torch.float32),
        ([], None),
    ],
)
def test_the_compute_dtype_is_that_of_most_frozen_weights(frozen, products):
    assert _compute_dtype(model(*frozen)) == products
