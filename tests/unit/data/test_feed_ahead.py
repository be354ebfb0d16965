"""Feeding a device with a memory of its own: its way is stood in for, all else is a run's."""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.cache.memory_tier import allocate_pageable
from gracetune.cache.batch_transfer import PinnedStaging
from gracetune.data.pipeline import DataPipeline
from gracetune.errors import RunFailedError
from gracetune.models.tiny import load
from gracetune.train.loop import BatchStream

CPU = torch.device("cpu")


class Done:
    def synchronize(self):
        pass


class Elsewhere:
    """A mover to a device whose memory happens to be the host's."""

    needs_copy = True
    device = CPU
    device_nbytes = 64 * 2**20

    def __init__(self):
        self._staging = PinnedStaging(allocate_pageable, Done)
        self.brought_by = set()

    @property
    def nbytes_copied(self):
        return self._staging.nbytes_sent

    def allocate_host(self, nbytes):
        return allocate_pageable(nbytes)

    def to_device(self, latents, text):
        self.brought_by.add(threading.current_thread().name)
        moved = self._staging.send({"latents": latents}, torch.empty_like)
        return moved["latents"], dict(text)

    def place(self, batch):
        return batch

    def new_stream(self):
        class Lane:
            @contextmanager
            def active(self):
                yield

            def record_arrival(self):
                return None

            def wait_for(self, batch, arrival):
                assert arrival is None

        return Lane()


@pytest.fixture
def stream(tiny_run, told, tmp_path):
    def make(mover, **sections):
        run = tiny_run(output_dir=str(tmp_path / f"{len(told.events)}"), **sections)
        Path(run.output_dir).mkdir()
        feed = DataPipeline(run, load(run.model), mover, Path(run.output_dir), told)
        return BatchStream(feed, 0, 1, 0)

    return make


@pytest.mark.parametrize("depth", ["auto", 1, 5])
def test_batches_brought_ahead_are_those_that_are_loaded_at_once(stream, tiny_run, told, depth):
    mover = Elsewhere()
    ahead = stream(mover, cache_config={"prefetch_depth": depth})
    inline = stream(build_batch_transfer(tiny_run().gh200_optimizations, CPU, told))
    for one, other in zip(ahead.take(20), inline.take(20), strict=True):
        assert torch.equal(one.latents, other.latents)
        assert all(torch.equal(one.text[name], other.text[name]) for name in other.text)
        assert one.samples == other.samples
        assert ahead.state == inline.state
    fed = ahead.fed(20)
    ahead.close()
    inline.close()
    assert fed.batches == 20
    assert fed.depth >= (2 if depth == "auto" else depth)
    assert fed.nbytes >= 20 * 4 * 48 * 6 * 6 * 4
    assert mover.brought_by == {"gracetune-prefetch"}
    assert "gracetune-prefetch" not in {thread.name for thread in threading.enumerate()}


def test_texts_within_the_device_budget_stay_there(stream, told):
    ahead = stream(Elsewhere())
    list(ahead.take(3))
    assert ahead.fed(3).hot >= 3 * 4
    ahead.close()
    (said,) = [text for text in told.texts() if "stay on the device" in text]
    assert "within 1.0 MiB" in said
    kept, _, total = said.split()[:3]
    assert kept == total != "0"

    ahead = stream(Elsewhere(), cache_config={"device_budget_gb": 0})
    list(ahead.take(3))
    assert ahead.fed(3).hot == 0
    ahead.close()
    assert any(text.startswith(f"0 of {total} texts stay") for text in told.texts()), (
        "without a budget not even the empty caption, which takes no room"
    )


def test_an_entry_that_vanishes_ends_the_run_with_a_way_out(stream, tmp_path, told):
    cache = {"vae_cache_type": "disk", "cache_dir": str(tmp_path / "cache")}
    one = stream(Elsewhere(), cache_config=cache)
    one.close()
    again = stream(Elsewhere(), cache_config={**cache, "prefetch_depth": 1})
    for shard in (tmp_path / "cache" / "latents" / "shards").iterdir():
        shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(RunFailedError, match=r"missing or damaged.*Run the same command again"):
        list(again.take(30))
    again.close()
