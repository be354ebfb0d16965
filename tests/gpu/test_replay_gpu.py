"""What a trace saw on the CPU runs on the device, where the planner times it."""

import time

import pytest
import torch

from gracetune.plan.device_benchmark import KernelTimer
from gracetune.plan.launch_probe import build_probe_model
from gracetune.plan.shapes import Op, record_call
from gracetune.plan.trace import trace_model

pytestmark = pytest.mark.gpu
aten = torch.ops.aten


def stopwatch():
    return KernelTimer(torch.device("cuda", 0), torch.cuda.synchronize, time.perf_counter)


@pytest.mark.parametrize("family", ["wan22", "flux", "qwen_image"])
def test_every_elementwise_kernel_of_a_family_can_be_timed(family):
    shapes = trace_model(build_probe_model(family, True).subject(), 2)
    watch = stopwatch()
    traces = [*(kind.eager.keep for kind in shapes.kinds), shapes.outside]
    found = {
        op.replay: watch.seconds(op, 1.0)
        for trace in traces
        for op in (*trace.forward, *trace.backward)
        if op.replay is not None
    }
    assert len(found) > 50
    assert [recipe for recipe, seconds in found.items() if not seconds] == []
    # Nothing is there to compute, and the host's time for a call is not in it.
    assert sorted(found.values())[len(found) // 2] < 10e-6


def test_a_kernel_that_mixes_types_is_slower_than_its_bytes_say():
    watch, wide = stopwatch(), (4096, 5120)
    half = torch.empty(wide, dtype=torch.bfloat16)

    def rate(other):
        recipe = record_call(aten.mul.Tensor, (half, other), {})
        nbytes = half.nbytes + other.nbytes + (half * other).nbytes
        return nbytes / watch.seconds(Op("elementwise", 0.0, nbytes, replay=recipe), 1.0)

    assert rate(torch.empty(wide)) < 0.8 * rate(half)
