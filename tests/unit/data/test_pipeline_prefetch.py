"""Prefetching to a device with its own memory; the device is simulated, all else is real."""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gracetune.cache.batch_transfer import PinnedStaging, build_batch_transfer
from gracetune.cache.memory_tier import allocate_pageable
from gracetune.data.pipeline import DataPipeline
from gracetune.errors import RunFailedError
from gracetune.models.tiny import load

CPU = torch.device("cpu")


class DoneEvent:
    def synchronize(self):
        pass


class FakeDeviceTransfer:
    """A batch transfer to a device whose memory happens to be the host's."""

    needs_copy = True
    device = CPU
    device_nbytes = 64 * 2**20

    def __init__(self):
        self._staging = PinnedStaging(allocate_pageable, DoneEvent)
        self.threads = set()

    @property
    def nbytes_copied(self):
        return self._staging.nbytes_sent

    def allocate_host(self, nbytes):
        return allocate_pageable(nbytes)

    def to_device(self, latents, text):
        self.threads.add(threading.current_thread().name)
        moved = self._staging.send({"latents": latents}, torch.empty_like)
        return moved["latents"], dict(text)

    def new_stream(self):
        class Stream:
            @contextmanager
            def active(self):
                yield

            def record_arrival(self):
                return None

            def wait_for(self, batch, arrival):
                assert arrival is None

        return Stream()


class Stream:
    """The batches of a pipeline, as the training loop takes them."""

    def __init__(self, pipeline):
        self.state = None
        self._pipeline, self._batches = pipeline, pipeline.batches()

    def take(self, count):
        for _ in range(count):
            batch, self.state = next(self._batches)
            yield batch

    def statistics(self, step):
        return self._pipeline.batches_fed(step, self._batches)

    def close(self):
        self._batches.close()
        self._pipeline.close()


@pytest.fixture
def stream(tiny_run, recorder, tmp_path):
    def build(transfer, **sections):
        run = tiny_run(output_dir=str(tmp_path / f"{len(recorder.events)}"), **sections)
        Path(run.output_dir).mkdir()
        pipeline = DataPipeline(run, load(run.model), transfer, Path(run.output_dir), recorder)
        return Stream(pipeline)

    return build


@pytest.mark.parametrize("depth", ["auto", 1, 5])
def test_prefetched_batches_equal_those_that_are_loaded_inline(stream, tiny_run, recorder, depth):
    transfer = FakeDeviceTransfer()
    prefetched = stream(transfer, cache_config={"prefetch_depth": depth})
    inline = stream(build_batch_transfer(tiny_run().gh200_optimizations, CPU, recorder))
    for one, other in zip(prefetched.take(20), inline.take(20), strict=True):
        assert torch.equal(one.latents, other.latents)
        assert all(torch.equal(one.text[name], other.text[name]) for name in other.text)
        assert one.samples == other.samples
        assert prefetched.state == inline.state
        assert one.index == other.index == prefetched.state.consumed - 1
    fed = prefetched.statistics(20)
    prefetched.close()
    inline.close()
    assert fed.batches == 20
    assert fed.depth >= (2 if depth == "auto" else depth)
    assert fed.nbytes >= 20 * 4 * 48 * 6 * 6 * 4
    assert transfer.threads == {"gracetune-prefetch"}
    assert "gracetune-prefetch" not in {thread.name for thread in threading.enumerate()}


def test_texts_within_the_device_budget_stay_there(stream, recorder):
    prefetched = stream(FakeDeviceTransfer())
    list(prefetched.take(3))
    assert prefetched.statistics(3).hot >= 3 * 4
    prefetched.close()
    (text,) = [one for one in recorder.texts() if "stay on the device" in one]
    assert "within 1.0 MiB" in text
    kept, _, total = text.split()[:3]
    assert kept == total != "0"

    prefetched = stream(FakeDeviceTransfer(), cache_config={"device_budget_gb": 0})
    list(prefetched.take(3))
    assert prefetched.statistics(3).hot == 0
    prefetched.close()
    assert any(text.startswith(f"0 of {total} texts stay") for text in recorder.texts()), (
        "not even the empty caption, which takes no memory"
    )


def test_an_entry_that_disappears_ends_the_run_with_a_hint(stream, tmp_path, recorder):
    cache = {"vae_cache_type": "disk", "cache_dir": str(tmp_path / "cache")}
    one = stream(FakeDeviceTransfer(), cache_config=cache)
    one.close()
    again = stream(FakeDeviceTransfer(), cache_config={**cache, "prefetch_depth": 1})
    for shard in (tmp_path / "cache" / "latents" / "shards").iterdir():
        shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(RunFailedError, match=r"missing or damaged.*Run the same command again"):
        list(again.take(30))
    again.close()
