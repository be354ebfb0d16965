"""What queueing costs the host, measured with a device that does the work."""

import time
from functools import partial

import pytest
import torch

from gracetune.plan.launch_probe import build_probe_model, measure_launch_costs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["wan22", "flux", "qwen_image"])
def test_a_host_is_probed_while_a_device_works(family):
    device = torch.device("cuda", 0)
    small = partial(build_probe_model, family)
    host = measure_launch_costs(device, torch.cuda.synchronize, time.perf_counter, small)
    for name in ("forward_s", "backward_s", "own_s", "own_back_s", "policed_s", "again_s"):
        assert 1e-6 < getattr(host, name) < 5e-4, name
    assert 1e-7 < host.optimizer_s < 5e-4
