import threading

import pytest
import torch
from fakes.stores import DictStore

from gracetune.cache.memory_tier import HitCounts, HostMemoryBudget, MemoryTier, allocate_pageable
from gracetune.data.bulk_copy import BulkCopier, MissingBulkCopier, find_bulk_copier

KIB = 1024


@pytest.fixture(params=["helper", "no helper"])
def find(request):
    if request.param == "helper":
        assert isinstance(find_bulk_copier(), BulkCopier)
        return find_bulk_copier
    return lambda: MissingBulkCopier("it is not here")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_tier(find, recorder, budget=64 * KIB, backing=None, hit_counts=None):
    return MemoryTier(
        "latents",
        HostMemoryBudget(budget),
        backing,
        recorder,
        allocate_pageable,
        hit_counts or HitCounts(),
        find=find,
    )


def random_bits(shape, dtype, seed):
    """Return a tensor of random bits, which includes NaN patterns."""
    entries = torch.empty(shape, dtype=dtype)
    raw = entries.view(-1).view(torch.uint8)
    draw = torch.Generator().manual_seed(seed)
    raw.copy_(torch.randint(0, 2 if dtype == torch.bool else 256, raw.shape, generator=draw))
    return entries


def same_bits(one, other):
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((16, 64, 64), torch.bfloat16),
        ((16, 33, 67), torch.float16),
        ((70_001,), torch.uint8),
        ((4, 8, 8), torch.float32),
        ((3,), torch.bool),
        ((), torch.int64),
        ((0, 64), torch.bfloat16),
    ],
)
def test_a_gathered_batch_is_bit_identical(recorder, find, shape, dtype):
    tier = build_tier(find, recorder, 4096 * KIB)
    entries = {
        f"{n}": {"x": random_bits(shape, dtype, n), "y": torch.tensor([n])} for n in range(5)
    }
    tier.put_many(entries)
    keys = ["4", "0", "0", "2"]  # not in order, one of them twice
    sizes = []

    def allocate(nbytes):
        sizes.append(nbytes)
        return allocate_pageable(nbytes)

    batch = tier.gather(keys, "x", allocate)
    expected = torch.stack([entries[key]["x"] for key in keys])
    assert batch.dtype == dtype
    assert same_bits(batch, expected)
    assert sizes == [expected.nbytes]
    assert tier.gather(keys, "y", allocate_pageable).tolist() == [[4], [0], [0], [2]]


@pytest.mark.parametrize("threads", [1, 2])
def test_one_and_several_threads_give_the_same_result(recorder, find, threads):
    before = torch.get_num_threads()
    tier = build_tier(find, recorder, 4096 * KIB)
    entries = {f"{n}": {"x": random_bits((16, 64, 64), torch.bfloat16, n)} for n in range(4)}
    tier.put_many(entries)
    torch.set_num_threads(threads)
    try:
        batch = tier.gather([*entries], "x", allocate_pageable)
    finally:
        torch.set_num_threads(before)
    assert same_bits(batch, torch.stack([entry["x"] for entry in entries.values()]))


@pytest.mark.usefixtures("one_thread")
def test_tensors_of_different_shapes_are_refused(recorder, find):
    tier = build_tier(find, recorder)
    tier.put_many({"wide": {"x": torch.zeros(4, 8)}, "high": {"x": torch.zeros(8, 4)}})
    with pytest.raises(RuntimeError, match="equal size"):
        tier.gather(["wide", "high"], "x", allocate_pageable)


@pytest.mark.usefixtures("one_thread")
def test_missing_entries_come_from_the_backing_store_or_are_none(recorder, find):
    hit_counts, backing = HitCounts(), DictStore()
    tier = build_tier(find, recorder, backing=backing, hit_counts=hit_counts)
    tier.put("a", {"x": torch.tensor([1.0])})
    backing.put("b", {"x": torch.tensor([2.0])})
    assert tier.gather(["a", "b"], "x", allocate_pageable).tolist() == [[1], [2]]
    assert (hit_counts.hits, hit_counts.reads) == (1, 1)
    assert tier.gather(["b", "a"], "x", allocate_pageable).tolist() == [[2], [1]]
    assert (hit_counts.hits, hit_counts.reads) == (3, 1)
    assert tier.gather(["a", "absent"], "x", allocate_pageable) is None
    with pytest.raises(KeyError, match="z"):
        tier.gather(["a"], "z", allocate_pageable)


@pytest.mark.usefixtures("one_thread")
def test_memory_of_evicted_entries_is_reused(recorder, find):
    """A row that outlives its entry would keep its memory."""
    tier = build_tier(find, recorder, 8 * KIB, DictStore())
    for number in range(40):
        tier.put(f"{number}", {"x": torch.full((256,), float(number))})
        tier.gather([f"{max(0, number - 3)}", f"{number}"], "x", allocate_pageable)
    assert {*tier._entries} == {*tier._table._rows["x"]}
    assert len(tier._entries) == 8
    batch = tier.gather([f"{number}" for number in (39, 0, 35)], "x", allocate_pageable)
    assert batch[:, 0].tolist() == [39, 0, 35]
    assert tier.nbytes == 8 * KIB


@pytest.mark.usefixtures("one_thread")
def test_putting_an_entry_twice_takes_no_more_memory(recorder, find):
    tier = build_tier(
        find, recorder, 4 * KIB
    )  # no backing store: entries that do not fit are an error
    for _ in range(10):
        tier.put("a", {"x": torch.full((256,), 1.0)})
    assert tier.gather(["a"], "x", allocate_pageable)[0, 0] == 1


@pytest.mark.usefixtures("one_thread")
def test_an_entry_evicted_during_a_copy_is_copied_completely(recorder, find):
    tier = build_tier(find, recorder, 4 * KIB, DictStore())
    tier.put_many({f"{n}": {"x": torch.full((256,), float(n))} for n in range(3)})

    def allocate(nbytes):
        """Let another thread evict everything between the look-up and the copy."""
        others = {f"{n}": {"x": torch.full((256,), float(n))} for n in range(10, 30)}
        thread = threading.Thread(target=tier.put_many, args=(others,))
        thread.start()
        thread.join()
        assert not {"0", "1", "2"} & {*tier._entries}
        return allocate_pageable(nbytes)

    batch = tier.gather(["0", "1", "2"], "x", allocate)
    assert torch.equal(batch, torch.arange(3.0)[:, None].expand(3, 256))
    assert tier.nbytes == 4 * KIB
