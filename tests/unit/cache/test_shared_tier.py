"""Cache entries that are in host memory once for all ranks of a machine."""

import errno
import fcntl
import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from fork_process import is_true_in_fork, undumpable_process

from gracetune.cache import shared_tier
from gracetune.cache.memory_tier import HitCounts, HostMemoryBudget, allocate_pageable
from gracetune.cache.shard_store import ShardStore
from gracetune.cache.shared_tier import SharedTier
from gracetune.errors import ConfigError
from gracetune.memory.shared_memory import ArenaFullError, SegmentWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
KIB = 1024
KEYS = [f"k{number}" for number in range(150)]


def entry(number):
    return {
        "x": torch.full((256,), float(number)),  # 1 KiB
        "mask": torch.tensor([True, False, number % 2 == 0]),
        "none": torch.zeros(0, 4),
        "text": torch.full((3, 5), number, dtype=torch.bfloat16),
    }


def is_entry(found, number):
    return found is not None and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in entry(number).items()
    )


@pytest.fixture
def files(tmp_path):
    with ShardStore(tmp_path / "cache") as store:
        store.put_many({key: entry(number) for number, key in enumerate(KEYS)})
    return tmp_path / "cache"


def open_tier(files, emit, budget=1024 * KIB, counts=None):
    return SharedTier(
        "latents",
        HostMemoryBudget(budget),
        ShardStore(files),
        emit,
        files.parent / "ranks" / "memory",
        counts or HitCounts(),
    )


def arenas():
    """Return the inodes of the arenas that this process has mapped."""
    maps = Path("/proc/self/maps").read_text()
    return set(re.findall(r"(\d+) +/memfd:gracetune-arena", maps))


def inodes(tier):
    """Return the inodes of the arenas in which a tier has its entries."""
    return {str(inode) for arena in tier._arenas for _, _, inode in arena.handle.segments}


def test_ranks_map_one_copy(files, recorder):
    """The second rank is a forked process with stores of its own."""
    counts = HitCounts()
    tier = open_tier(files, recorder, counts=counts)
    assert tier.warm(KEYS) == []
    shared, used = inodes(tier), tier._budget.used
    assert shared <= arenas()
    assert used >= len(KEYS) * KIB

    def second_rank():
        other = open_tier(files, recorder)
        shared_tier._fill_arena = None  # the entries must not be read a second time
        assert other.warm(KEYS) == []
        found = other.get_many(KEYS)
        assert all(is_entry(one, number) for number, one in enumerate(found))
        stacked = other.gather(KEYS[:3], "x", allocate_pageable)
        assert stacked.tolist() == [[float(number)] * 256 for number in range(3)]
        assert other._budget.used == used
        return inodes(other) == shared and recorder.texts() == []

    assert is_true_in_fork(second_rank)
    assert all(is_entry(one, number) for number, one in enumerate(tier.get_many(KEYS)))
    assert tier.gather(KEYS[:3], "x", allocate_pageable).shape == (3, 256)
    assert (counts.hits, counts.reads) == (len(KEYS) + 3, 0)
    assert tier.nbytes >= used


def test_entries_beyond_the_budget_are_read_from_files(files, recorder):
    counts = HitCounts()
    tier = open_tier(files, recorder, 20 * KIB, counts)
    assert tier.warm([*KEYS, "missing"], num_workers=1) == ["missing"]
    assert all(is_entry(one, number) for number, one in enumerate(tier.get_many(KEYS)))
    assert 0 < counts.hits < 20
    assert counts.hits + counts.reads == len(KEYS)
    assert tier.get("missing") is None
    assert tier.has(["k0", "k149", "missing"]) == [True, True, False]
    (text,) = recorder.texts()
    assert "do not fit into 20.0 KiB of host memory on this machine" in text
    assert tier.gather(KEYS, "x", allocate_pageable)[149, 0] == 149
    assert tier.gather(["k0", "missing"], "x", allocate_pageable) is None


def test_new_entries_are_read_from_files_until_they_are_loaded(files, recorder):
    counts = HitCounts()
    tier = open_tier(files, recorder, counts=counts)
    tier.warm(KEYS)
    tier.put("new", entry(7))
    tier.will_need(["new"])
    assert is_entry(tier.get("new"), 7)
    assert counts.reads == 1
    assert tier.warm([*KEYS, "new"]) == []
    assert is_entry(tier.get("new"), 7)
    assert counts.reads == 1
    tier.close()
    assert is_entry(tier.get("k3"), 3), "entries stay in memory"


def test_the_memory_returns_to_the_budget_and_the_machine(files, recorder):
    gc.collect()
    tier = open_tier(files, recorder)
    budget, before = tier._budget, arenas()
    tier.warm(KEYS)
    assert budget.used > len(KEYS) * KIB
    del tier
    gc.collect()
    assert budget.used == 0
    assert arenas() == before


def test_a_trimmed_tier_gives_its_memory_back_and_reads_files(files, recorder):
    gc.collect()
    counts = HitCounts()
    tier, before = open_tier(files, recorder, counts=counts), arenas()
    tier.warm(KEYS)
    assert tier.trim() >= len(KEYS) * KIB
    gc.collect()
    assert (tier.nbytes, tier._budget.used, arenas()) == (0, 0, before)
    assert all(is_entry(one, number) for number, one in enumerate(tier.get_many(KEYS)))
    assert tier.gather(KEYS[:3], "x", allocate_pageable).shape == (3, 256)
    assert (counts.hits, counts.reads) == (0, len(KEYS) + 3)
    tier.restore()
    assert tier.trim() == 0


def test_a_killed_rank_leaves_a_lock_that_others_can_take(files, recorder):
    """The child is killed while it holds the lock and fills the arena."""

    def fill_forever():
        shared_tier._fill_arena = lambda *_: (files.parent / "filling").touch() or time.sleep(600)
        open_tier(files, recorder).warm(KEYS)

    child = os.fork()
    if child == 0:
        fill_forever()
        os._exit(0)
    while not (files.parent / "filling").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    tier = open_tier(files, recorder)
    assert tier.warm(KEYS) == []
    assert is_entry(tier.get("k5"), 5)


def test_memory_that_cannot_be_shared_is_reported(files, recorder):
    tier = open_tier(files, recorder)
    tier.warm(KEYS)

    def second_rank():
        if os.geteuid() == 0:  # root may open everything: let the call fail instead
            fcntl.flock = lambda *_: (_ for _ in ()).throw(OSError("no locks here"))
        other = open_tier(files, recorder)
        assert other.warm(KEYS) == []
        (text,) = recorder.texts()
        return "in the memory of each rank, because they cannot be shared" in text and is_entry(
            other.get("k1"), 1
        )

    with undumpable_process():
        assert is_true_in_fork(second_rank)


def test_a_read_error_is_not_taken_for_a_file_system_without_locks(files, recorder, monkeypatch):
    calls = []

    def fail(*_):
        calls.append(1)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shared_tier, "_fill_arena", fail)
    with pytest.raises(OSError, match="Input/output error"):
        open_tier(files, recorder).warm(KEYS)
    assert (len(calls), recorder.texts()) == (1, [])


def test_a_machine_without_memory_gets_a_hint(files, recorder, monkeypatch):
    write = SegmentWriter.write

    def write_little(segment, data):
        if len(data) > 4 * KIB:
            raise ArenaFullError("No space left on device")
        return write(segment, data)

    monkeypatch.setattr(SegmentWriter, "write", write_little)
    with pytest.raises(ConfigError, match=r"host_budget_gb allows 0\.0\. Lower it"):
        open_tier(files, recorder).warm(KEYS)
