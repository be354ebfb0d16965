import gc
import os
import threading

import pytest
import torch
from fakes.stores import DictStore
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.cache import memory_tier
from gracetune.cache.memory_tier import (
    HitCounts,
    HostMemoryBudget,
    MemoryTier,
    SlabAllocator,
    allocate_page_aligned,
    allocate_pageable,
)
from gracetune.errors import ConfigError

KIB = 1024


def entry(number, count=256):
    return {"x": torch.full((count,), float(number))}  # 1 KiB


def build_tier(recorder, budget=64 * KIB, backing=None):
    return MemoryTier(
        "latents", HostMemoryBudget(budget), backing, recorder, allocate_pageable, HitCounts()
    )


def test_entries_of_any_dtype_and_shape_are_returned(recorder):
    tier = build_tier(recorder)
    tensors = {
        "tokens": torch.randn(3, 5).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 64),
        "turned": torch.arange(6).view(2, 3).T,
    }
    tier.put("a", tensors)
    found = tier.get("a")
    assert all(
        torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in tensors.items()
    )
    assert (
        found["turned"].untyped_storage().data_ptr()
        != tensors["turned"].untyped_storage().data_ptr()
    )
    assert tier.get("b") is None
    assert tier.has(["a", "b"]) == [True, False]


def test_an_entry_is_a_view_and_not_a_copy(recorder):
    tier = build_tier(recorder)
    tier.put("a", entry(1))
    assert tier.get("a")["x"].data_ptr() == tier.get("a")["x"].data_ptr()


def test_the_least_recently_used_entry_is_evicted_and_read_again(recorder):
    hit_counts, backing = HitCounts(), DictStore()
    tier = MemoryTier(
        "latents", HostMemoryBudget(4 * KIB), backing, recorder, allocate_pageable, hit_counts
    )
    for number in range(4):
        tier.put(f"{number}", entry(number))
    assert recorder.events == []
    tier.get("0")
    tier.put("4", entry(4))
    assert len(recorder.texts()) == 1
    assert "host_budget_gb" in recorder.texts()[0]
    assert recorder.events[0].fallback
    hit_counts.hits = hit_counts.reads = 0
    assert [tier.get(key)["x"][0].item() for key in "0234"] == [0, 2, 3, 4]
    assert (hit_counts.hits, hit_counts.reads) == (4, 0)
    assert tier.get("1")["x"][0].item() == 1
    assert (hit_counts.hits, hit_counts.reads) == (4, 1)
    assert len(recorder.texts()) == 1
    assert tier.nbytes <= 4 * KIB


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), max_size=40))
@settings(deadline=None, max_examples=40)
def test_eviction_is_in_order_of_last_use(batches):
    hit_counts, backing = HitCounts(), DictStore()
    backing.put_many({f"{number}": entry(number) for number in range(8)})
    tier = MemoryTier(
        "latents",
        HostMemoryBudget(4 * KIB),
        backing,
        lambda event: None,
        allocate_pageable,
        hit_counts,
    )
    used = {}
    for turn, batch in enumerate(batches):
        here, hit_counts.hits = {*tier._entries}, 0
        tier.get_many([f"{number}" for number in batch])
        assert hit_counts.hits == sum(f"{number}" in here for number in batch)
        used |= {f"{number}": turn for number in batch}
        assert len(tier._entries) == min(4, len(used))
        left = [used[key] for key in used if key not in tier._entries]
        assert max(left, default=-1) <= min(used[key] for key in tier._entries)


def test_recorded_uses_are_bounded(recorder, monkeypatch):
    monkeypatch.setattr(memory_tier, "MAX_PENDING_USES", 2)
    tier = build_tier(recorder, 4 * KIB, DictStore())
    tier.put_many({f"{number}": entry(number) for number in range(4)})
    for key in "3210":
        tier.get(key)
    tier.put("4", entry(4))  # only the uses of 1 and 0 are still recorded
    assert [*tier._entries] == ["3", "1", "0", "4"]
    assert len(tier._uses) == 0


def test_without_files_entries_beyond_the_budget_are_an_error(recorder):
    tier = build_tier(recorder, budget=4 * KIB)
    tier.put_many({f"{number}": entry(number) for number in range(4)})
    with pytest.raises(ConfigError, match=r"host_budget_gb leaves 4\.0 KiB .*persistent_cache"):
        tier.put("4", entry(4))
    assert [tier.get(f"{n}")["x"][0].item() for n in range(4)] == [0, 1, 2, 3]


def test_an_entry_larger_than_the_budget_is_read_from_files(recorder):
    tier = build_tier(recorder, budget=4 * KIB, backing=DictStore())
    tier.put("large", entry(1, 4096))
    assert tier.get("large")["x"].sum().item() == 4096
    assert len(recorder.texts()) == 1


def test_memory_is_not_reused_while_a_view_is_alive(recorder):
    tier = build_tier(recorder, budget=4 * KIB, backing=DictStore())
    for number in range(4):
        tier.put(f"{number}", entry(number))
    derived = tier.get("0")["x"][3:7].view(2, 2).T  # a view of a view
    for number in range(4, 40):
        tier.put(f"{number}", entry(number))
    assert derived.tolist() == [[0, 0], [0, 0]]
    assert tier.nbytes <= 4 * KIB


def test_warming_stops_at_the_budget_and_evicts_nothing(recorder):
    backing = DictStore()
    backing.put_many({f"{number}": entry(number) for number in range(500)})
    hit_counts = HitCounts()
    tier = MemoryTier(
        "latents", HostMemoryBudget(256 * KIB), backing, recorder, allocate_pageable, hit_counts
    )
    tier.warm([f"{number}" for number in range(500)], num_workers=1)
    assert tier.nbytes == 256 * KIB
    tier.get_many([f"{number}" for number in range(256)])
    assert (hit_counts.hits, hit_counts.reads) == (256, 0)
    build_tier(recorder).warm(["no backing store"])


def test_a_deleted_tier_releases_its_budget(recorder):
    budget = HostMemoryBudget(8 * KIB)
    first = MemoryTier("one", budget, None, recorder, allocate_pageable, HitCounts())
    first.put("a", entry(1))
    held = first.get("a")
    assert budget.used == 8 * KIB
    del first
    gc.collect()
    assert budget.used == 8 * KIB  # a view is still alive
    del held
    gc.collect()
    assert budget.used == 0


def test_slabs_double_in_size(monkeypatch):
    monkeypatch.setattr(memory_tier, "SLAB_NBYTES", 4 * KIB)
    sizes = []
    slabs = SlabAllocator(
        HostMemoryBudget(1024 * KIB),
        lambda nbytes: sizes.append(nbytes) or allocate_pageable(nbytes),
    )
    buffers = [slabs.allocate(KIB) for _ in range(1024)]
    assert None not in buffers
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
    tier = build_tier(lambda event: None, budget_kib * KIB, DictStore())
    sizes, held = {}, []
    for number, count in steps:
        sizes.setdefault(number, count)
        if tier.get(f"{number}") is None:
            tier.put(f"{number}", entry(number, sizes[number]))
        held = [*held[-3:], (number, tier.get(f"{number}"))]
        assert tier.nbytes <= budget_kib * KIB
        for key, found in held:
            assert found["x"].eq(key).all()
            assert len(found["x"]) == sizes[key]


def test_threads_share_a_tier(recorder):
    tier = build_tier(recorder, 16 * KIB, DictStore())
    tier.put_many({f"{number}": entry(number) for number in range(64)})
    wrong = []

    def read(offset):
        for turn in range(300):
            number = (turn * 7 + offset) % 64
            if not tier.get(f"{number}")["x"].eq(number).all():
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.nbytes <= 16 * KIB


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


def test_trimming_gives_half_of_the_memory_back_until_it_is_restored(recorder):
    entries = {f"k{n}": {"x": torch.full((64 * 1024,), float(n))} for n in range(8)}
    files = DictStore()
    for key, entry in entries.items():
        files.put(key, entry)
    tier = MemoryTier(
        "latents", HostMemoryBudget(1 << 26), files, recorder, allocate_page_aligned, HitCounts()
    )
    tier.warm(list(entries))
    assert tier.trim() >= 4 * 256 * 1024
    for key, entry in entries.items():  # what was dropped is read from the files
        assert torch.equal(tier.get(key)["x"], entry["x"])
    tier.restore()
    for key, entry in entries.items():
        assert torch.equal(tier.get(key)["x"], entry["x"])
    tier.close()


def test_pinned_memory_is_not_trimmed(recorder):
    """The driver keeps pinned pages, so that dropping entries would only cost reads."""
    files, counts = DictStore(), HitCounts()
    files.put("k", {"x": torch.ones(4096)})
    tier = MemoryTier("latents", HostMemoryBudget(1 << 20), files, recorder, torch_bytes, counts)
    tier.warm(["k"])
    assert tier.trim() == 0
    assert tier.get("k")["x"].eq(1).all()
    assert (counts.hits, counts.reads) == (1, 0)
    tier.close()


def torch_bytes(nbytes):
    """Stand for an allocator of pinned memory."""
    return torch.empty(nbytes, dtype=torch.uint8)
