"""The launch probe measures the host's cost of queueing kernels while the GPU works."""

import time
from functools import partial

import pytest
import torch

from gracetune.plan.launch_overhead import build_probe_model, measure_launch_costs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["wan22", "flux", "qwen_image"])
def test_launch_costs_are_plausible(family):
    device = torch.device("cuda", 0)
    build_model = partial(build_probe_model, family)
    host = measure_launch_costs(device, torch.cuda.synchronize, time.perf_counter, build_model)
    for name in (
        "forward_s",
        "backward_s",
        "custom_op_s",
        "custom_op_backward_s",
        "checkpoint_s",
        "checkpoint_recompute_s",
    ):
        assert 1e-6 < getattr(host, name) < 5e-4, name
    assert 1e-7 < host.optimizer_s < 5e-4
