"""Kernels recorded in a trace can be replayed and timed on the GPU."""

import time

import pytest
import torch

from gracetune.plan.device_benchmark import KernelTimer
from gracetune.plan.launch_overhead import build_probe_model
from gracetune.plan.trace import trace_model
from gracetune.plan.trace_records import Op, record_call

pytestmark = pytest.mark.gpu
aten = torch.ops.aten


def build_timer():
    return KernelTimer(torch.device("cuda", 0), torch.cuda.synchronize, time.perf_counter)


@pytest.mark.parametrize("family", ["wan22", "flux", "qwen_image"])
def test_every_elementwise_kernel_of_a_family_can_be_timed(family):
    shapes = trace_model(build_probe_model(family, True).trace_target(), 2)
    timer = build_timer()
    traces = [*(kind.eager.keep for kind in shapes.kinds), shapes.outside]
    found = {
        op.replay: timer.seconds(op, 1.0)
        for trace in traces
        for op in (*trace.forward, *trace.backward)
        if op.replay is not None
    }
    assert len(found) > 50
    assert [recipe for recipe, seconds in found.items() if not seconds] == []
    # The tensors are tiny, and the host's launch time is not included.
    assert sorted(found.values())[len(found) // 2] < 10e-6


def test_kernels_with_mixed_dtypes_have_a_lower_bandwidth():
    timer, wide = build_timer(), (4096, 5120)
    half = torch.empty(wide, dtype=torch.bfloat16)

    def rate(other):
        recipe = record_call(aten.mul.Tensor, (half, other), {})
        nbytes = half.nbytes + other.nbytes + (half * other).nbytes
        return nbytes / timer.seconds(Op("elementwise", 0.0, nbytes, replay=recipe), 1.0)

    assert rate(torch.empty(wide)) < 0.8 * rate(half)
