"""Rates are measured within the free memory, and compromises emit a notice."""

import itertools
from contextlib import nullcontext

import pytest
import torch

from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.plan import device_benchmark
from gracetune.plan.device_benchmark import (
    BUFFER_PART,
    MIN_BUFFER_NBYTES,
    REPEATS,
    ROTATED_NBYTES,
    WARM_UP,
    KernelTimer,
    measure_device,
    measure_gpu,
    probe_model_factory,
)
from gracetune.plan.launch_overhead import PROXY_FAMILY, REALISTIC_NBYTES, build_probe_model
from gracetune.plan.search import PlanError
from gracetune.plan.trace_records import Op, record_call
from gracetune.units import GIB, MIB


@pytest.mark.parametrize("free", [REALISTIC_NBYTES, REALISTIC_NBYTES - 1])
def test_probe_models_are_realistic_if_memory_allows(free, recorder):
    make = probe_model_factory("wan22", free, recorder)
    small, large = (make(False, is_realistic).encoded for is_realistic in (False, True))
    if free == REALISTIC_NBYTES:
        assert large == build_probe_model("wan22", False, True).encoded != small
        assert recorder.texts() == []
    else:
        assert large == small == build_probe_model("wan22", False).encoded
        assert recorder.texts() == [
            "launch overhead is measured with small tensors, because only 2.0 GiB of device memory "
            "is free; it may be underestimated"
        ]


def test_an_unknown_family_is_probed_with_a_proxy_and_a_notice(recorder):
    make = probe_model_factory("unheard", REALISTIC_NBYTES, recorder)
    assert make(True, False).encoded == build_probe_model(PROXY_FAMILY, True).encoded
    assert recorder.texts() == [
        f"launch overhead is measured with {PROXY_FAMILY} in place of unheard"
    ]


@pytest.mark.parametrize(
    ("nbytes", "copies"), [(8, REPEATS), (40 * MIB, 4), (ROTATED_NBYTES, 1), (2 * GIB, 1)]
)
def test_a_kernel_is_timed_with_tensors_that_the_cache_cannot_hold(nbytes, copies, monkeypatch):
    built, used = itertools.count(), []

    def replay_on(*_):
        number = next(built)
        return lambda: used.append(number)

    monkeypatch.setattr(device_benchmark, "replay_on", replay_on)
    timer = KernelTimer(torch.device("cpu"), lambda: None, itertools.count().__next__)
    call = record_call(torch.ops.aten.neg.default, (torch.empty(1),), {})
    assert timer.seconds(Op("elementwise", 0.0, float(nbytes), replay=call), 1.0) is not None
    in_turn = itertools.islice(itertools.cycle(range(copies)), len(used))
    assert used[: copies + WARM_UP + REPEATS] == list(in_turn)[: copies + WARM_UP + REPEATS]


@pytest.mark.parametrize(
    ("free", "edge", "copied"),
    [
        (BUFFER_PART * MIN_BUFFER_NBYTES, 512, MIB),
        (560 * 10**6, 4096, 70 * 10**6),
        (2**40, 8192, 2**29),
    ],
)
def test_measured_buffers_fit_the_free_memory(free, edge, copied, recorder, monkeypatch):
    found = []
    monkeypatch.setattr(device_benchmark, "free_nbytes", lambda _: free)
    monkeypatch.setattr(
        device_benchmark, "measure_device", lambda *args, **_: found.append(args[2:])
    )
    measure_gpu(torch.device("cuda", 0), "wan22", recorder)
    assert found == [(edge, copied)]
    assert 2 * edge**2 <= free // BUFFER_PART


@pytest.mark.parametrize("fails", [False, True])
def test_pinned_buffers_are_small_and_freed(fails, monkeypatch):
    """torch's own allocator would keep pinned memory to the end of the run."""
    held, sizes = [], []

    class Engine(SynchronousCopyEngine):
        def allocate_pinned(self, nbytes):
            held.append(nbytes)
            sizes.append(nbytes)
            return super().allocate_pinned(nbytes)

        def close(self):
            held.clear()

    def clock():
        assert not fails, "the device is lost"
        return next(ticks)

    ticks = itertools.count()
    monkeypatch.setattr(device_benchmark, "open_copy_engine", lambda *_: Engine())
    monkeypatch.setattr(device_benchmark, "LINK_NBYTES", 100)
    with pytest.raises(AssertionError) if fails else nullcontext():
        measure_device(torch.device("cpu"), lambda: None, 16, 1000, clock)
    assert sizes == [100, 100]
    assert held == []


@pytest.mark.parametrize("free", [-5, 0, BUFFER_PART * MIN_BUFFER_NBYTES - 1])
def test_a_full_device_is_an_error_that_names_the_free_memory(free, recorder, monkeypatch):
    monkeypatch.setattr(device_benchmark, "free_nbytes", lambda _: free)
    with pytest.raises(
        PlanError, match=r"^only (0 B|8\.0 MiB) of device memory is free, too little"
    ):
        measure_gpu(torch.device("cuda", 0), "wan22", recorder)
