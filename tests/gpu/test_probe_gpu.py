"""What queueing costs the host, measured with a device that does the work."""

import time

import pytest
import torch

from gracetune.plan.probe import probe_host

pytestmark = pytest.mark.gpu


def test_a_host_says_the_same_twice():
    device = torch.device("cuda", 0)
    first, again = (probe_host(device, torch.cuda.synchronize, time.perf_counter) for _ in range(2))
    for name in ("forward_s", "backward_s", "policed_s", "again_s"):
        assert 1e-6 < getattr(first, name) < 2e-4
        assert getattr(again, name) == pytest.approx(getattr(first, name), rel=0.25)
