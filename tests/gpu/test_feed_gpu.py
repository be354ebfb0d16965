"""Batches that travel ahead on a stream of their own are the batches that were sent."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from gracetune.cache.memory_tier import MemoryTier, HostMemoryBudget, HitCounts, allocate_pinned
from gracetune.cache.batch_transfer import CudaTransferStream, PrefetchDepth, PrefetchedBatches, PinnedStaging
from gracetune.cache.shard_store import ShardStore
from gracetune.data.loader import LoaderState
from gracetune.data.sample import Batch
from gracetune.events.types import BatchesFed, StepDone
from gracetune.train.run import run_training

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def mark():
    event = torch.cuda.Event()
    event.record()
    return event


def test_slots_are_never_overwritten_and_memory_never_reused_too_early(told):
    """Batches of 32 MiB are used late, by a stream that is kept busy meanwhile."""
    count, words = 24, 4 * 1024**2
    store = MemoryTier("entries", HostMemoryBudget(2**31), None, told, allocate_pinned, HitCounts())
    for number in range(count):
        store.put(f"{number}", {"latents": torch.full((words,), float(number))})
    assert store.get("0")["latents"].is_pinned()
    staging = PinnedStaging(allocate_pinned, mark)

    def batches():
        for number in range(count):
            keys = [f"{n}" for n in (number, (number + 1) % count)]
            fill = partial(store.gather, keys, "latents")
            moved = staging.send({"x": fill}, lambda t: torch.empty_like(t, device=DEVICE))
            yield Batch(moved["x"], {"t": moved["x"][:, :1].clone()}, ()), LoaderState(number)

    busy = torch.randn(4096, 4096, device=DEVICE)
    ahead = PrefetchedBatches(batches(), CudaTransferStream(DEVICE), PrefetchDepth(3, None))
    wrong = torch.zeros(count, device=DEVICE)
    for number, (batch, state) in enumerate(ahead):
        assert state.consumed == number
        for _ in range(8):
            busy = torch.tanh(busy @ busy)
        expected = torch.tensor([[number], [(number + 1) % count]], device=DEVICE)
        wrong[number] = (batch.latents != expected).sum() + (batch.text["t"] != expected).sum()
        del batch
    ahead.close()
    assert wrong.tolist() == [0] * count


def test_a_disk_writes_to_pinned_memory_by_itself(tmp_path, told):
    """Entries of a whole number of pages, which the kernel was asked to forget."""
    words = 64 * 1024
    with ShardStore(tmp_path, told) as store:
        store.put_many({f"{n}": {"latents": torch.full((words,), float(n))} for n in range(16)})
    for path in store.shards.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with ShardStore(tmp_path, told) as store:
        batch = store.gather(["3", "0", "15"], "latents", allocate_pinned)
        assert batch.is_pinned()
        assert batch.cuda()[:, -1].tolist() == [3, 0, 15]
        arena = MemoryTier("latents", HostMemoryBudget(2**28), store, told, allocate_pinned, HitCounts())
        arena.warm([f"{n}" for n in range(16)])
        assert arena.get("7")["latents"].cuda().eq(7).all()
    assert not [text for text in told.texts() if "memory that is given" in text]


@pytest.mark.parametrize("device_budget_gb", [0, 1])
def test_feeding_ahead_trains_as_feeding_at_once_does(tiny_run, told, tmp_path, device_budget_gb):
    def trained(name, depth):
        told.events.clear()
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
        run_training(run, sinks=[told])
        return [event.loss for event in told.of(StepDone)], told.of(BatchesFed)[-1]

    losses, fed = trained("one", 1)
    deeper, more = trained("auto", "auto")
    torch.testing.assert_close(deeper, losses, rtol=1e-2, atol=0)
    assert (fed.batches, fed.depth) == (40, 1)
    assert more.depth >= 2
    assert (fed.hot > 0) == (device_budget_gb > 0)
    assert fed.nbytes > 0


def test_the_state_saved_is_that_of_the_batch_used(tiny_run, tmp_path):
    run_training(tiny_run(train={"max_train_steps": 5}, cache_config={"prefetch_depth": 8}))
    (saved,) = (Path(tmp_path) / "run" / "checkpoints").glob("step-*")
    assert json.loads((saved / "manifest.json").read_text())["progress"]["consumed"] == 5
