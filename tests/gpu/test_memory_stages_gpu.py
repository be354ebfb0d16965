"""Stages of managed memory on a GPU, with less than a gigabyte of it.

`uvm_stage1_min_bytes` is set to the whole device, so that its memory counts as short.
"""

import pytest
import torch

from gracetune import gh200
from gracetune.config.environment import environment_settings
from gracetune.events.types import MemoryReclaimed, StageChanged, StepDone, UnifiedMemory
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.oversubscription import Stage
from gracetune.memory.platform import open_machine
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import (
    attach_to_torch_memory_stats,
    detach_from_torch_memory_stats,
    extend_torch_memory_stats,
)
from gracetune.train.run import run_training

pytestmark = pytest.mark.gpu
MIB = 1024**2


def short_of_memory():
    total = torch.cuda.mem_get_info()[1]
    return f"use_uvm:True,uvm_stage1_min_bytes:{total}"


@pytest.mark.parametrize("pattern", ["gpu_first", "balanced", "cpu_first"])
def test_pages_move_to_the_host_and_come_back_unchanged(pattern):
    torch.zeros(1, device="cuda")
    events = []
    conf = f"{short_of_memory()},uvm_access_pattern:{pattern}"
    session = MemorySession(
        open_machine,
        lambda: environment_settings({"PYTORCH_CUDA_ALLOC_CONF": conf}),
        events.append,
    )
    session.managed_cap_override = 512 * MIB
    memory = session.managed
    assert not isinstance(memory, PoolUnavailable), memory
    slab = memory.allocate("ema", 256 * MIB, "device")
    memory.prefetch(slab, "device").wait()
    slab.memory.copy_(torch.arange(256 * MIB, device="cuda") % 251)
    extend_torch_memory_stats(gh200._process)
    attach_to_torch_memory_stats(session)
    assert session.observe(reclaim=True, step=1) is Stage.OVERSUBSCRIBED
    changed, light = events
    assert isinstance(changed, StageChanged)
    assert isinstance(light, MemoryReclaimed)
    assert light.freed["managed pages"] == 256 * MIB, light
    assert torch.cuda.memory_stats()["uvm.stage"] == 2
    assert torch.cuda.memory_stats()["uvm.bytes.managed.current"] == 256 * MIB
    assert "uvm" not in torch.cuda.memory_summary()
    assert torch.equal(slab.memory, (torch.arange(256 * MIB, device="cuda") % 251).byte())
    memory.free(slab)
    memory.close()
    detach_from_torch_memory_stats(session)
    assert torch.cuda.memory_stats()["uvm.stage"] == 1, "that of the process"


def test_a_run_that_is_short_of_memory_reclaims_it_and_has_the_same_losses(
    tiny_run, recorder, monkeypatch, tmp_path
):
    train = {"max_train_steps": 8, "mixed_precision": "no"}
    run_training(tiny_run(train=train, output_dir=str(tmp_path / "plain")), sinks=[recorder])
    expected = [event.loss for event in recorder.of(StepDone)]
    assert not recorder.of(MemoryReclaimed)
    recorder.events.clear()
    monkeypatch.setenv("GRACETUNE_ALLOC_CONF", short_of_memory())
    run = tiny_run(
        train=train,
        output_dir=str(tmp_path / "short"),
        gh200_optimizations={"managed": ["optimizer", "ema"], "managed_memory": "512MB"},
        cache_config={"prefetch_depth": 3},
    )
    run_training(run, sinks=[recorder], telemetry={"interval_s": 0.0})
    torch.testing.assert_close(
        [event.loss for event in recorder.of(StepDone)], expected, rtol=2e-2, atol=0
    )
    light = next(event for event in recorder.of(MemoryReclaimed) if event.kind == "light")
    assert light.freed["texts on the device"] > 0
    assert recorder.of(UnifiedMemory)[-1].stage == 2
    assert recorder.of(UnifiedMemory)[-1].light_reclamations == 1
