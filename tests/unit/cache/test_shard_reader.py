import errno
import os

import pytest
import torch

from gracetune.cache import shard_reader
from gracetune.cache.maintenance import compact
from gracetune.cache.memory_tier import (
    HitCounts,
    HostMemoryBudget,
    MemoryTier,
    allocate_page_aligned,
    allocate_pageable,
)
from gracetune.cache.shard_format import LARGE_ENTRY_NBYTES, PAGE
from gracetune.cache.shard_reader import PageCacheResidency
from gracetune.cache.shard_store import ShardStore

WORDS = LARGE_ENTRY_NBYTES // 4 + PAGE // 4  # a float entry of whole pages


def entry(number, words=WORDS):
    return {"latents": torch.full((words,), float(number))}


def fill(store, numbers, words=WORDS):
    store.put_many({f"k{n}": entry(n, words) for n in numbers})


def drop_page_cache(store):
    """Drop the files from the page cache; they were flushed when they were written."""
    for path in store.shards.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@pytest.fixture
def real_page_cache(tmp_path):
    """Skip unless the page cache of this folder can be queried, dropped and bypassed."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(4 * PAGE))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        residency = PageCacheResidency()
        held = residency.holds(descriptor, 0, 4 * PAGE)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        dropped = not residency.holds(descriptor, 0, PAGE)
    except OSError:
        held = dropped = False
    finally:
        os.close(descriptor)
        path.unlink()
    if not (held and dropped):
        pytest.skip("the file system of the tests has no page cache of its own")


def damage_notices(recorder):
    return [text for text in recorder.texts() if "is damaged" in text]


class RecordingAllocator:
    """Allocates memory and records the buffers."""

    def __init__(self, allocate=allocate_page_aligned):
        self.allocate = allocate
        self.buffers = []

    def __call__(self, nbytes):
        self.buffers.append(self.allocate(nbytes))
        return self.buffers[-1]


@pytest.fixture
def store(tmp_path, recorder):
    with ShardStore(tmp_path / "cache", recorder) as opened:
        yield opened


@pytest.mark.parametrize("cold", [False, True], ids=["cached", "cold"])
@pytest.mark.parametrize("words", [WORDS, WORDS + 3, 5], ids=["pages", "odd", "small"])
@pytest.mark.parametrize("allocate", [allocate_page_aligned, allocate_pageable])
def test_a_batch_is_gathered_into_the_given_memory(store, cold, words, allocate):
    fill(store, range(6), words)
    if cold:
        drop_page_cache(store)
    allocator = RecordingAllocator(allocate)
    batch = store.gather(["k3", "k0", "k3", "k5"], "latents", allocator)
    assert batch[:, 0].tolist() == batch[:, -1].tolist() == [3, 0, 3, 5]
    assert batch.shape == (4, words)
    (slab,) = allocator.buffers
    assert batch.data_ptr() == slab.data_ptr()


@pytest.mark.usefixtures("real_page_cache")
def test_only_entries_outside_the_page_cache_are_read(store, monkeypatch):
    fill(store, range(4))
    read, real = [], store._reader.read

    def recording_read(rows, *rest):
        read.append([row.key for row in rows])
        return real(rows, *rest)

    monkeypatch.setattr(store._reader, "read", recording_read)
    assert store.gather(["k3", "k1"], "latents", RecordingAllocator())[:, 0].tolist() == [3, 1]
    assert read == []
    drop_page_cache(store)
    assert store.gather(["k2", "k0"], "latents", RecordingAllocator())[:, 0].tolist() == [2, 0]
    assert read == [["k2", "k0"]]


def test_gathering_a_missing_entry_returns_none(store):
    fill(store, range(2))
    assert store.gather(["k0", "absent"], "latents", RecordingAllocator()) is None


def test_entries_of_several_tensors_or_shapes_are_stacked(store):
    both = {"x": torch.ones(2), "latents": torch.arange(3.0)}
    store.put_many({"a": both, "b": {"latents": torch.zeros(3)}})
    assert store.gather(["a", "b"], "latents", allocate_pageable).tolist() == [[0, 1, 2], [0, 0, 0]]
    assert store.gather(["a", "a"], "x", allocate_pageable).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("words", [WORDS, 5], ids=["pages", "small"])
def test_damage_is_found_when_a_batch_is_gathered(tmp_path, recorder, words):
    with ShardStore(tmp_path) as store:
        fill(store, range(3), words)
        with store.index() as index:
            row = index.find_rows(["k1"])["k1"]
    (path,) = store.shards.iterdir()
    with path.open("r+b") as file:
        file.seek(row.offset + 9)
        file.write(b"\x07")
    drop_page_cache(store)
    with ShardStore(tmp_path, recorder) as store:
        assert store.gather(["k0", "k1"], "latents", RecordingAllocator()) is None
        assert "differ from their checksum" in damage_notices(recorder)[0]
        assert store.load(["k1", "k2"], RecordingAllocator())[0] is None
        assert store.gather(["k0", "k2"], "latents", RecordingAllocator())[1, 0] == 2


def test_a_moved_entry_is_found_and_a_lost_one_is_reported(tmp_path, recorder):
    with ShardStore(tmp_path, recorder) as store, ShardStore(tmp_path) as other:
        fill(other, range(6))
        other.seal()
        store.will_need(["k0", "k5"])
        other.delete(["k1", "k2", "k3", "k4"])
        assert compact(other) > 0
        assert store.gather(["k5", "k0"], "latents", RecordingAllocator())[:, 0].tolist() == [5, 0]
        for left in store.shards.iterdir():
            left.unlink()
        store.close()
        assert store.gather(["k5", "k0"], "latents", RecordingAllocator()) is None
        assert len(damage_notices(recorder)) == 1, "one entry per shard is reported"


def test_damage_is_reported_once_when_an_entry_is_loaded(tmp_path, recorder):
    with ShardStore(tmp_path) as store:
        fill(store, range(2))
        with store.index() as index:
            row = index.find_rows(["k1"])["k1"]
    (path,) = store.shards.iterdir()
    with path.open("r+b") as file:
        file.seek(row.offset)
        file.write(b"\x07")
    with ShardStore(tmp_path, recorder) as store:
        assert store.load(["k1", "k0"], RecordingAllocator())[0] is None
        assert len(damage_notices(recorder)) == 1


def test_tensors_are_gathered_by_name_and_may_be_empty(store):
    store.put_many({f"k{n}": {"empty": torch.zeros(0, 4)} for n in range(2)})
    assert store.gather(["k0", "k1"], "empty", allocate_pageable).shape == (2, 0, 4)
    with pytest.raises(KeyError, match="latents"):
        store.gather(["k0", "k1"], "latents", allocate_pageable)


def test_loaded_entries_are_in_the_given_memory(store):
    fill(store, range(3))
    store.put("pair", {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)})
    drop_page_cache(store)
    allocator = RecordingAllocator()
    first, second, pair, absent = store.load(["k0", "k2", "pair", "absent"], allocator)
    assert (first["latents"][0], second["latents"][-1], absent) == (0, 2, None)
    assert pair["b"].tolist() == [0, 0]
    begins = {slab.data_ptr() for slab in allocator.buffers}
    assert {t["latents"].data_ptr() for t in (first, second)} <= begins
    assert store.load(["k1"], lambda nbytes: None)[0]["latents"][0] == 1


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("gracetune.cache.shard_format.MAX_SHARD_NBYTES", 1)
    with ShardStore(tmp_path, max_open=3) as store:
        fill(store, range(12), 5)
        before = len(os.listdir("/proc/self/fd"))
        batch = store.gather([f"k{n}" for n in range(12)], "latents", allocate_pageable)
        assert batch[:, 0].tolist() == [*range(12)]
        assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_closed_store_reopens_on_use(store):
    fill(store, [1])
    store.close()
    store.close()
    assert store.get("k1")["latents"][0] == 1
    fill(store, [2])
    assert store.gather(["k2", "k1"], "latents", RecordingAllocator())[:, 0].tolist() == [2, 1]


@pytest.mark.usefixtures("real_page_cache")
def test_a_file_system_without_direct_reads_is_reported_once(store, recorder, monkeypatch):
    fill(store, range(4))
    drop_page_cache(store)
    real = os.open

    def refusing(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing)
    assert store.gather(["k1", "k2"], "latents", RecordingAllocator())[:, 0].tolist() == [1, 2]
    drop_page_cache(store)
    assert store.gather(["k0", "k3"], "latents", RecordingAllocator())[:, 0].tolist() == [0, 3]
    (text,) = recorder.texts()
    assert "without direct reads" in text
    drop_page_cache(store)
    store.will_need(["k0"])


@pytest.mark.usefixtures("real_page_cache")
def test_a_kernel_without_aio_is_reported_once(store, recorder, monkeypatch):
    fill(store, range(4))
    drop_page_cache(store)
    monkeypatch.setattr(store._reader._queue, "_syscall_numbers", None)
    monkeypatch.setattr(store._reader._queue, "refusal", "Operation not permitted")
    for _ in range(2):
        assert store.gather(["k1", "k2"], "latents", RecordingAllocator())[:, 0].tolist() == [1, 2]
        drop_page_cache(store)
    (text,) = recorder.texts()
    assert "no queue for direct reads (Operation not permitted)" in text
    assert store.load(["k3"], RecordingAllocator())[0]["latents"][0] == 3


@pytest.mark.usefixtures("real_page_cache")
@pytest.mark.parametrize("code", [errno.EFAULT, errno.EIO])
def test_memory_that_a_disk_cannot_write_to_is_reported_and_other_errors_raised(
    store, recorder, monkeypatch, code
):
    fill(store, range(4))
    drop_page_cache(store)
    real = store._reader._queue.wait

    def failing(ticket):
        real(ticket)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store._reader._queue, "wait", failing)
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            store.gather(["k1", "k2"], "latents", RecordingAllocator())
        return
    assert store.gather(["k1", "k2"], "latents", RecordingAllocator())[:, 0].tolist() == [1, 2]
    (text,) = recorder.texts()
    assert "cannot write to this memory" in text


@pytest.mark.usefixtures("real_page_cache")
def test_no_read_is_in_flight_when_a_batch_fails(store, monkeypatch):
    fill(store, range(8))
    drop_page_cache(store)

    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(store, "_is_intact", fail)
    with pytest.raises(RuntimeError, match="no"):
        store.gather([f"k{n}" for n in range(8)], "latents", RecordingAllocator())
    queue = store._reader._queue
    assert queue._in_flight == queue._results == {}


def test_other_errors_of_opening_are_raised(store, monkeypatch):
    fill(store, [1])
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(PermissionError):
        store.gather(["k1"], "latents", RecordingAllocator())


@pytest.mark.usefixtures("real_page_cache")
@pytest.mark.parametrize(("seconds", "expected"), [(1.0, ["k7", "k0", "k1"]), (0.001, ["k7"])])
def test_slow_disks_and_small_entries_are_read_ahead(tmp_path, seconds, expected):
    keys = []

    class RecordingReader(shard_reader.ShardReader):
        def read_ahead(self, rows):
            keys.extend(row.key for row in rows)
            super().read_ahead(rows)

    with ShardStore(tmp_path) as store:
        fill(store, range(2))
        fill(store, [7], 5)
        store._reader = RecordingReader(store.shards, 8, iter([0.0, seconds]).__next__)
        store.will_need(["k0", "k7"])
        drop_page_cache(store)
        store.gather(["k0"], "latents", RecordingAllocator())
        store.will_need(["k0", "k1"])
        assert keys == expected


@pytest.mark.usefixtures("real_page_cache")
def test_querying_the_page_cache_reads_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * PAGE))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    residency = PageCacheResidency()
    assert residency.holds(descriptor, 0, 64 * PAGE)
    assert residency.holds(descriptor, 5, 0)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(2):
        assert not residency.holds(descriptor, 0, 1)
        assert not residency.holds(descriptor, 3 * PAGE - 1, 2)
    os.close(descriptor)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_without_cachestat_is_queried_once(monkeypatch, code):
    calls = []

    def refuse(*words):
        calls.append(words)
        return -1

    residency = PageCacheResidency()
    monkeypatch.setattr(residency, "_syscall", refuse)
    monkeypatch.setattr(shard_reader.ctypes, "get_errno", lambda: code)
    assert not residency.holds(0, 0, 1)
    assert not residency.holds(0, 0, 1)
    assert (len(calls), residency.is_supported) == (1, False)


@pytest.mark.usefixtures("real_page_cache")
def test_other_errors_of_cachestat_are_raised():
    with pytest.raises(shard_reader.CacheError, match="Bad file descriptor"):
        PageCacheResidency().holds(10**6, 0, 1)


def test_a_memory_tier_reads_directly_into_its_slabs(store, recorder):
    fill(store, range(5))
    store.put("small", {"x": torch.arange(3.0)})
    drop_page_cache(store)
    hit_counts = HitCounts()
    tier = MemoryTier(
        "latents", HostMemoryBudget(2**26), store, recorder, allocate_page_aligned, hit_counts
    )
    tier.will_need(["k0", "small"])
    tier.warm([f"k{n}" for n in range(3)], num_workers=2)
    batch = tier.gather(["k2", "k0", "k4"], "latents", allocate_pageable)
    assert batch[:, -1].tolist() == [2, 0, 4]
    assert (hit_counts.hits, hit_counts.reads) == (2, 1)
    assert tier.get("small")["x"].tolist() == [0, 1, 2]
    tier.will_need(["k2", "small"])
    tier.close()
    assert tier.load(["k2"], allocate_pageable)[0]["latents"][0] == 2
    assert tier.gather(["k2", "absent"], "latents", allocate_pageable) is None
