import threading

import pytest
import torch

from gracetune.cache.memory_tier import MemoryTier, HostMemoryBudget, HitCounts, allocate_pageable
from gracetune.cache.store import DictStore
from gracetune.data.gather import Gather, MissingGather, find_gather

KIB = 1024


@pytest.fixture(params=["helper", "no helper"])
def find(request):
    if request.param == "helper":
        assert isinstance(find_gather(), Gather)
        return find_gather
    return lambda: MissingGather("it is not here")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def store(find, told, budget=64 * KIB, backing=None, hit_counts=None):
    return MemoryTier(
        "latents", HostMemoryBudget(budget), backing, told, allocate_pageable, hit_counts or HitCounts(), find=find
    )


def bits(shape, dtype, seed):
    """Every pattern of bits, numbers or not."""
    made = torch.empty(shape, dtype=dtype)
    raw = made.view(-1).view(torch.uint8)
    draw = torch.Generator().manual_seed(seed)
    raw.copy_(torch.randint(0, 2 if dtype == torch.bool else 256, raw.shape, generator=draw))
    return made


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
def test_a_gathered_batch_is_bit_identical(told, find, shape, dtype):
    kept = store(find, told, 4096 * KIB)
    made = {f"{n}": {"x": bits(shape, dtype, n), "y": torch.tensor([n])} for n in range(5)}
    kept.put_many(made)
    keys = ["4", "0", "0", "2"]  # in any order, the same one twice
    asked = []

    def room(nbytes):
        asked.append(nbytes)
        return allocate_pageable(nbytes)

    batch = kept.gather(keys, "x", room)
    expected = torch.stack([made[key]["x"] for key in keys])
    assert batch.dtype == dtype
    assert same_bits(batch, expected)
    assert asked == [expected.nbytes]
    assert kept.gather(keys, "y", allocate_pageable).tolist() == [[4], [0], [0], [2]]


@pytest.mark.parametrize("threads", [1, 2])
def test_one_and_several_threads_give_the_same_result(told, find, threads):
    before = torch.get_num_threads()
    kept = store(find, told, 4096 * KIB)
    made = {f"{n}": {"x": bits((16, 64, 64), torch.bfloat16, n)} for n in range(4)}
    kept.put_many(made)
    torch.set_num_threads(threads)
    try:
        batch = kept.gather([*made], "x", allocate_pageable)
    finally:
        torch.set_num_threads(before)
    assert same_bits(batch, torch.stack([entry["x"] for entry in made.values()]))


@pytest.mark.usefixtures("one_thread")
def test_tensors_of_different_shapes_are_refused(told, find):
    kept = store(find, told)
    kept.put_many({"wide": {"x": torch.zeros(4, 8)}, "high": {"x": torch.zeros(8, 4)}})
    with pytest.raises(RuntimeError, match="equal size"):
        kept.gather(["wide", "high"], "x", allocate_pageable)


@pytest.mark.usefixtures("one_thread")
def test_missing_entries_come_from_the_backing_store_or_are_none(told, find):
    hit_counts, backing = HitCounts(), DictStore()
    kept = store(find, told, backing=backing, hit_counts=hit_counts)
    kept.put("a", {"x": torch.tensor([1.0])})
    backing.put("b", {"x": torch.tensor([2.0])})
    assert kept.gather(["a", "b"], "x", allocate_pageable).tolist() == [[1], [2]]
    assert (hit_counts.hits, hit_counts.reads) == (1, 1)
    assert kept.gather(["b", "a"], "x", allocate_pageable).tolist() == [[2], [1]]
    assert (hit_counts.hits, hit_counts.reads) == (3, 1)
    assert kept.gather(["a", "absent"], "x", allocate_pageable) is None
    with pytest.raises(KeyError, match="z"):
        kept.gather(["a"], "z", allocate_pageable)


@pytest.mark.usefixtures("one_thread")
def test_memory_of_evicted_entries_is_reused(told, find):
    """A row that outlived its entry would keep its room."""
    kept = store(find, told, 8 * KIB, DictStore())
    for number in range(40):
        kept.put(f"{number}", {"x": torch.full((256,), float(number))})
        kept.gather([f"{max(0, number - 3)}", f"{number}"], "x", allocate_pageable)
    assert {*kept._entries} == {*kept._table._rows["x"]}
    assert len(kept._entries) == 8
    batch = kept.gather([f"{number}" for number in (39, 0, 35)], "x", allocate_pageable)
    assert batch[:, 0].tolist() == [39, 0, 35]
    assert kept.nbytes == 8 * KIB


@pytest.mark.usefixtures("one_thread")
def test_putting_an_entry_twice_takes_no_more_memory(told, find):
    kept = store(find, told, 4 * KIB)  # nothing behind: what does not fit is an error
    for _ in range(10):
        kept.put("a", {"x": torch.full((256,), 1.0)})
    assert kept.gather(["a"], "x", allocate_pageable)[0, 0] == 1


@pytest.mark.usefixtures("one_thread")
def test_an_entry_evicted_during_a_copy_is_copied_completely(told, find):
    kept = store(find, told, 4 * KIB, DictStore())
    kept.put_many({f"{n}": {"x": torch.full((256,), float(n))} for n in range(3)})

    def room(nbytes):
        """Another thread needs all the room between the look-up and the copy."""
        others = {f"{n}": {"x": torch.full((256,), float(n))} for n in range(10, 30)}
        thread = threading.Thread(target=kept.put_many, args=(others,))
        thread.start()
        thread.join()
        assert not {"0", "1", "2"} & {*kept._entries}
        return allocate_pageable(nbytes)

    batch = kept.gather(["0", "1", "2"], "x", room)
    assert torch.equal(batch, torch.arange(3.0)[:, None].expand(3, 256))
    assert kept.nbytes == 4 * KIB
