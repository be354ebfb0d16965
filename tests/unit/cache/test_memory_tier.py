import gc
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.cache import memory_tier
from gracetune.cache.memory_tier import (
    MemoryTier,
    HostMemoryBudget,
    SlabAllocator,
    HitCounts,
    allocate_pageable,
    allocate_page_aligned,
)
from gracetune.cache.store import DictStore
from gracetune.errors import ConfigError

KIB = 1024


def entry(number, count=256):
    return {"x": torch.full((count,), float(number))}  # 1 KiB


def store(told, budget=64 * KIB, backing=None):
    return MemoryTier("latents", HostMemoryBudget(budget), backing, told, allocate_pageable, HitCounts())


def test_entries_of_any_dtype_and_shape_are_returned(told):
    kept = store(told)
    made = {
        "tokens": torch.randn(3, 5).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 64),
        "turned": torch.arange(6).view(2, 3).T,
    }
    kept.put("a", made)
    found = kept.get("a")
    assert all(
        torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in made.items()
    )
    assert (
        found["turned"].untyped_storage().data_ptr() != made["turned"].untyped_storage().data_ptr()
    )
    assert kept.get("b") is None
    assert kept.has(["a", "b"]) == [True, False]


def test_an_entry_is_a_view_and_not_a_copy(told):
    kept = store(told)
    kept.put("a", entry(1))
    assert kept.get("a")["x"].data_ptr() == kept.get("a")["x"].data_ptr()


def test_the_least_recently_used_entry_is_evicted_and_read_again(told):
    hit_counts, backing = HitCounts(), DictStore()
    kept = MemoryTier("latents", HostMemoryBudget(4 * KIB), backing, told, allocate_pageable, hit_counts)
    for number in range(4):
        kept.put(f"{number}", entry(number))
    assert told.events == []
    kept.get("0")
    kept.put("4", entry(4))
    assert len(told.texts()) == 1
    assert "host_budget_gb" in told.texts()[0]
    assert told.events[0].fallback
    hit_counts.hits = hit_counts.reads = 0
    assert [kept.get(key)["x"][0].item() for key in "0234"] == [0, 2, 3, 4]
    assert (hit_counts.hits, hit_counts.reads) == (4, 0)
    assert kept.get("1")["x"][0].item() == 1
    assert (hit_counts.hits, hit_counts.reads) == (4, 1)
    assert len(told.texts()) == 1
    assert kept.nbytes <= 4 * KIB


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), max_size=40))
@settings(deadline=None, max_examples=40)
def test_eviction_is_in_order_of_last_use(batches):
    hit_counts, backing = HitCounts(), DictStore()
    backing.put_many({f"{number}": entry(number) for number in range(8)})
    kept = MemoryTier(
        "latents", HostMemoryBudget(4 * KIB), backing, lambda event: None, allocate_pageable, hit_counts
    )
    used = {}
    for turn, batch in enumerate(batches):
        here, hit_counts.hits = {*kept._entries}, 0
        kept.get_many([f"{number}" for number in batch])
        assert hit_counts.hits == sum(f"{number}" in here for number in batch)
        used |= {f"{number}": turn for number in batch}
        assert len(kept._entries) == min(4, len(used))
        left = [used[key] for key in used if key not in kept._entries]
        assert max(left, default=-1) <= min(used[key] for key in kept._entries)


def test_recorded_uses_are_bounded(told, monkeypatch):
    monkeypatch.setattr(memory_tier, "MAX_PENDING_USES", 2)
    kept = store(told, 4 * KIB, DictStore())
    kept.put_many({f"{number}": entry(number) for number in range(4)})
    for key in "3210":
        kept.get(key)
    kept.put("4", entry(4))  # of the uses, those of 1 and 0 are remembered
    assert [*kept._entries] == ["3", "1", "0", "4"]
    assert len(kept._uses) == 0


def test_without_files_entries_beyond_the_budget_are_an_error(told):
    kept = store(told, budget=4 * KIB)
    kept.put_many({f"{number}": entry(number) for number in range(4)})
    with pytest.raises(ConfigError, match=r"host_budget_gb leaves 4\.0 KiB .*persistent_cache"):
        kept.put("4", entry(4))
    assert [kept.get(f"{n}")["x"][0].item() for n in range(4)] == [0, 1, 2, 3]


def test_an_entry_larger_than_the_budget_is_read_from_files(told):
    kept = store(told, budget=4 * KIB, backing=DictStore())
    kept.put("large", entry(1, 4096))
    assert kept.get("large")["x"].sum().item() == 4096
    assert len(told.texts()) == 1


def test_memory_is_not_reused_while_a_view_is_alive(told):
    kept = store(told, budget=4 * KIB, backing=DictStore())
    for number in range(4):
        kept.put(f"{number}", entry(number))
    derived = kept.get("0")["x"][3:7].view(2, 2).T  # a view of a view of the room
    for number in range(4, 40):
        kept.put(f"{number}", entry(number))
    assert derived.tolist() == [[0, 0], [0, 0]]
    assert kept.nbytes <= 4 * KIB


def test_warming_stops_at_the_budget_and_evicts_nothing(told):
    backing = DictStore()
    backing.put_many({f"{number}": entry(number) for number in range(500)})
    hit_counts = HitCounts()
    kept = MemoryTier("latents", HostMemoryBudget(256 * KIB), backing, told, allocate_pageable, hit_counts)
    kept.warm([f"{number}" for number in range(500)], num_workers=1)
    assert kept.nbytes == 256 * KIB
    kept.get_many([f"{number}" for number in range(256)])
    assert (hit_counts.hits, hit_counts.reads) == (256, 0)
    store(told).warm(["nothing behind"])


def test_a_deleted_tier_releases_its_budget(told):
    budget = HostMemoryBudget(8 * KIB)
    first = MemoryTier("one", budget, None, told, allocate_pageable, HitCounts())
    first.put("a", entry(1))
    held = first.get("a")
    assert budget.used == 8 * KIB
    del first
    gc.collect()
    assert budget.used == 8 * KIB  # someone still reads
    del held
    gc.collect()
    assert budget.used == 0


def test_slabs_double_in_size(monkeypatch):
    monkeypatch.setattr(memory_tier, "SLAB_NBYTES", 4 * KIB)
    sizes = []
    slabs = SlabAllocator(
        HostMemoryBudget(1024 * KIB), lambda nbytes: sizes.append(nbytes) or allocate_pageable(nbytes)
    )
    rooms = [slabs.allocate(KIB) for _ in range(1024)]
    assert None not in rooms
    assert slabs.allocate(KIB) is None
    assert sum(sizes) == 1024 * KIB
    assert len(sizes) < 12
    assert all(size & (size - 1) == 0 for size in sizes)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3000)), min_size=1, max_size=60),
    st.integers(1, 40),
)
@settings(deadline=None, max_examples=40)
def test_random_operations_keep_the_budget_and_the_contents(steps, budget_kib):
    kept = store(lambda event: None, budget_kib * KIB, DictStore())
    sizes, held = {}, []
    for number, count in steps:
        sizes.setdefault(number, count)
        if kept.get(f"{number}") is None:
            kept.put(f"{number}", entry(number, sizes[number]))
        held = [*held[-3:], (number, kept.get(f"{number}"))]
        assert kept.nbytes <= budget_kib * KIB
        for key, found in held:
            assert found["x"].eq(key).all()
            assert len(found["x"]) == sizes[key]


def test_threads_share_a_tier(told):
    kept = store(told, 16 * KIB, DictStore())
    kept.put_many({f"{number}": entry(number) for number in range(64)})
    wrong = []

    def read(offset):
        for turn in range(300):
            number = (turn * 7 + offset) % 64
            if not kept.get(f"{number}")["x"].eq(number).all():
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert kept.nbytes <= 16 * KIB


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_pages_are_private_to_the_process():
    memory = allocate_page_aligned(8 * KIB)
    memory[:] = 1
    assert memory.data_ptr() % 4096 == 0
    child = os.fork()
    if child == 0:
        memory[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert memory.eq(1).all()
