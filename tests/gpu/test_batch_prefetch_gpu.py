"""Batches that are prefetched on a separate stream arrive intact and in time."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from gracetune.cache.batch_transfer import (
    CudaTransferStream,
    PinnedStaging,
    PrefetchDepth,
    PrefetchedBatches,
)
from gracetune.cache.memory_tier import HitCounts, HostMemoryBudget, MemoryTier, allocate_pinned
from gracetune.cache.shard_store import ShardStore
from gracetune.data.batch_order import LoaderState
from gracetune.data.sample import Batch
from gracetune.events.types import BatchesFed, StepDone
from gracetune.train.run import run_training

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def record_event():
    event = torch.cuda.Event()
    event.record()
    return event


def test_staging_slots_and_device_memory_are_not_reused_too_early(recorder):
    """Batches of 32 MiB are read late, on a stream that is kept busy meanwhile."""
    count, words = 24, 4 * 1024**2
    store = MemoryTier(
        "entries", HostMemoryBudget(2**31), None, recorder, allocate_pinned, HitCounts()
    )
    for number in range(count):
        store.put(f"{number}", {"latents": torch.full((words,), float(number))})
    assert store.get("0")["latents"].is_pinned()
    staging = PinnedStaging(allocate_pinned, record_event)

    def batches():
        for number in range(count):
            keys = [f"{n}" for n in (number, (number + 1) % count)]
            fill = partial(store.gather, keys, "latents")
            moved = staging.send({"x": fill}, lambda t: torch.empty_like(t, device=DEVICE))
            yield Batch(moved["x"], {"t": moved["x"][:, :1].clone()}, ()), LoaderState(number)

    busy = torch.randn(4096, 4096, device=DEVICE)
    prefetched = PrefetchedBatches(batches(), CudaTransferStream(DEVICE), PrefetchDepth(3, None))
    wrong = torch.zeros(count, device=DEVICE)
    for number, (batch, state) in enumerate(prefetched):
        assert state.consumed == number
        for _ in range(8):
            busy = torch.tanh(busy @ busy)
        expected = torch.tensor([[number], [(number + 1) % count]], device=DEVICE)
        wrong[number] = (batch.latents != expected).sum() + (batch.text["t"] != expected).sum()
        del batch
    prefetched.close()
    assert wrong.tolist() == [0] * count


def test_shards_are_read_directly_into_pinned_memory(tmp_path, recorder):
    """Entries are whole pages, and are not in the page cache."""
    words = 64 * 1024
    with ShardStore(tmp_path, recorder) as store:
        store.put_many({f"{n}": {"latents": torch.full((words,), float(n))} for n in range(16)})
    for path in store.shards.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with ShardStore(tmp_path, recorder) as store:
        batch = store.gather(["3", "0", "15"], "latents", allocate_pinned)
        assert batch.is_pinned()
        assert batch.cuda()[:, -1].tolist() == [3, 0, 15]
        arena = MemoryTier(
            "latents", HostMemoryBudget(2**28), store, recorder, allocate_pinned, HitCounts()
        )
        arena.warm([f"{n}" for n in range(16)])
        assert arena.get("7")["latents"].cuda().eq(7).all()
    assert not [text for text in recorder.texts() if "cannot write to this memory directly" in text]


@pytest.mark.parametrize("device_budget_gb", [0, 1])
def test_the_prefetch_depth_does_not_change_the_losses(
    tiny_run, recorder, tmp_path, device_budget_gb
):
    def train(name, depth):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / name),
            train={"max_train_steps": 40, "mixed_precision": "no"},
            cache_config={
                "vae_cache_type": "unified_memory",
                "text_cache_type": "unified_memory",
                "device_budget_gb": device_budget_gb,
                "prefetch_depth": depth,
            },
        )
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)], recorder.of(BatchesFed)[-1]

    losses, fed = train("one", 1)
    auto_losses, auto_fed = train("auto", "auto")
    torch.testing.assert_close(auto_losses, losses, rtol=1e-2, atol=0)
    assert (fed.batches, fed.depth) == (40, 1)
    assert auto_fed.depth >= 2
    assert (fed.hot > 0) == (device_budget_gb > 0)
    assert fed.nbytes > 0


def test_a_checkpoint_counts_used_batches_and_not_prefetched_ones(tiny_run, tmp_path):
    run_training(tiny_run(train={"max_train_steps": 5}, cache_config={"prefetch_depth": 8}))
    (saved,) = (Path(tmp_path) / "run" / "checkpoints").glob("step-*")
    assert json.loads((saved / "manifest.json").read_text())["progress"]["consumed"] == 5
