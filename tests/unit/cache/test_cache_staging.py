from functools import partial

import torch

from gracetune.cache.memory_tier import allocate_pageable
from gracetune.cache.batch_transfer import STAGING_SLOTS, DeviceTextCache, PinnedStaging, copy_into, cache_texts_on_device
from gracetune.cache.shard_format import PAGE


class Device:
    """Copies that are only done when the device is waited for, as a GPU's may be."""

    def __init__(self):
        self.pending = []
        self.waits = 0

    def mark(self):
        device, point = self, list(self.pending)
        self.pending = []

        class Mark:
            def synchronize(self):
                device.waits += 1
                for target, source in point:
                    target.real.copy_(source)
                point.clear()

        self.marks = [*getattr(self, "marks", []), Mark()]
        return self.marks[-1]

    def new(self, like):
        device = self

        class Late:
            real = torch.empty_like(like)

            def copy_(self, source, non_blocking):
                assert non_blocking
                device.pending.append((self, source))
                return self

        return Late()

    def finish(self):
        for mark in self.marks:
            mark.synchronize()


def filling(tensor):
    return partial(copy_into, tensor)


def test_a_slot_is_written_again_only_after_its_copy_is_done():
    device = Device()
    staging = PinnedStaging(allocate_pageable, device.mark)
    sent = [
        staging.send({"latents": filling(torch.tensor([[n] * 3, [n + 0.5] * 3]))}, device.new)
        for n in range(7)
    ]
    assert device.waits == 7 - STAGING_SLOTS
    device.finish()
    for n, moved in enumerate(sent):
        assert moved["latents"].real.tolist() == [[n] * 3, [n + 0.5] * 3]
    assert staging.nbytes_sent == 7 * 2 * 3 * 4


def test_parts_of_other_dtypes_lie_side_by_side_and_a_slot_grows():
    device, sizes = Device(), []
    staging = PinnedStaging(lambda nbytes: sizes.append(nbytes) or allocate_pageable(nbytes), device.mark)
    for length in (3, 3, 700, 5):
        parts = {
            "mask": torch.ones(length, dtype=torch.bool),
            "text": torch.arange(2 * length).bfloat16().view(2, length),
            "latents": torch.arange(length).double(),
        }
        moved = staging.send({name: filling(t) for name, t in parts.items()}, device.new)
        device.finish()
        for name, tensor in parts.items():
            assert torch.equal(moved[name].real, tensor)
    assert sizes[:2] == [PAGE, 2 * PAGE + PAGE]
    allocated = []
    for _ in range(3 * STAGING_SLOTS):
        staging.send({"latents": filling(torch.zeros(700))}, device.new)
        allocated.append(len(sizes))
    assert len(set(allocated[STAGING_SLOTS:])) == 1, "a slot that was large enough is used again"


def test_parts_that_a_slot_grew_past_are_sent_as_they_were():
    device = Device()
    staging = PinnedStaging(allocate_pageable, device.mark)
    parts = {f"{n}": filling(torch.full((n * 300 + 1,), float(n))) for n in range(6)}
    moved = staging.send(parts, device.new)
    staging.send({"other": filling(torch.full((5000,), -1.0))}, device.new)
    device.finish()
    for n in range(6):
        assert moved[f"{n}"].real.eq(n).all()


def texts(captions):
    return [{"tokens": torch.full((128,), float(len(c)))} for c in captions]  # 512 bytes


def test_hot_texts_are_the_first_of_the_row_within_the_budget():
    hot = cache_texts_on_device(["a", "bb", "ccc"], texts, torch.device("cpu"), 1100)
    assert len(hot) == 2
    assert [e["tokens"][0].item() for e in hot.get_all(["bb", "a", "bb"])] == [2, 1, 2]
    assert hot.hits == 3
    assert hot.get_all(["a", "ccc"]) is None
    assert hot.hits == 3


def test_no_budget_keeps_nothing_hot():
    assert len(cache_texts_on_device(["a"], texts, torch.device("cpu"), 0)) == 0
    assert DeviceTextCache({}).get_all([]) is None
