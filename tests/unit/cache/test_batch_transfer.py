"""Copying batches to the device: staging slots, prefetching, and texts that stay there."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from fakes.managed import managed_memory
from fakes.platforms import simulated_machine

from gracetune.cache import batch_transfer
from gracetune.cache.batch_transfer import (
    STAGING_SLOTS,
    DeviceTextCache,
    InlineBatches,
    PinnedStaging,
    PrefetchDepth,
    PrefetchedBatches,
    batch_nbytes,
    build_batch_transfer,
    cache_texts_on_device,
    copy_into,
    managed_memory_notice,
)
from gracetune.cache.memory_tier import allocate_pageable
from gracetune.cache.shard_format import PAGE
from gracetune.cache.store import stack_into
from gracetune.config.environment import environment_settings
from gracetune.config.schema import Gh200Section
from gracetune.data.batch_order import LoaderState
from gracetune.data.sample import Batch
from gracetune.errors import ConfigError, DataError
from gracetune.events.console import notice_lines
from gracetune.memory.managed_pool import ManagedPool, PoolUnavailable
from gracetune.memory.platform import Link, Machine
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import MemoryAccounting, Tier
from gracetune.units import GIB

CPU = torch.device("cpu")
LATENTS = partial(stack_into, [torch.zeros(4), torch.ones(4)])
TEXT = {"tokens": torch.zeros(2, 3)}


# BatchTransfer


def test_the_memory_link_is_reported(recorder):
    build_batch_transfer(Gh200Section(), CPU, recorder)
    (text,) = recorder.texts()
    assert text.startswith("memory link: none")
    assert text.endswith("hints off")


def test_without_hints_a_batch_is_only_stacked(recorder):
    latents, text = build_batch_transfer(Gh200Section(), CPU, recorder).to_device(LATENTS, TEXT)
    assert latents.tolist() == [[0.0] * 4, [1.0] * 4]
    assert text["tokens"] is TEXT["tokens"]
    assert len(recorder.events) == 1


def test_without_managed_memory_one_line_says_what_is_not_in_use(recorder):
    transfer = build_batch_transfer(Gh200Section(enable_uvm_hints=True), CPU, recorder)
    for _ in range(3):
        transfer.to_device(LATENTS, TEXT)
    (fallback,) = (e.text for e in recorder.events if e.fallback)
    assert fallback.startswith("managed memory is not in use, although it is asked for: no NVIDIA")


def test_memory_used_is_a_number_of_bytes(recorder):
    used = build_batch_transfer(Gh200Section(), CPU, recorder).memory_used(7)
    assert used.step == 7
    assert used.host > 10**6
    assert (used.device, used.managed, used.stage) == (0, 0, 1)


def test_an_unknown_role_is_refused_by_name(recorder):
    with pytest.raises(ConfigError, match=r"placement\.latent "):
        build_batch_transfer(Gh200Section(placement={"latent": "host"}), CPU, recorder)


def test_tracked_roles_are_accounted_for(recorder):
    transfer = build_batch_transfer(Gh200Section(), CPU, recorder)
    sizes = iter([100, 300])
    transfer.track_memory("optimizer", lambda: next(sizes))
    for expected in (100, 300):
        transfer.memory_used(1)
        assert transfer._session.stats()["uvm.bytes.host.role.optimizer"] == expected


def test_a_role_may_be_tracked_in_another_tier_than_the_device(recorder):
    transfer = build_batch_transfer(Gh200Section(), CPU, recorder)
    transfer.track_memory("optimizer", lambda: 5, Tier.DEVICE)
    transfer.track_memory("existing", lambda: 5, Tier.MANAGED)  # this machine has a cap of 0
    for step in (1, 2):
        transfer.memory_used(step)
    stats = transfer._session.stats()
    assert stats["uvm.bytes.device.role.optimizer"] == 5
    assert transfer._session.accounting.current(Tier.MANAGED) == 5
    assert transfer._session.accounting.denied(Tier.MANAGED) == 0, "nothing was asked for"


@pytest.mark.parametrize(("conf", "pooled"), [("use_uvm:True", True), ("use_uvm:False", False)])
def test_use_uvm_decides_about_the_pool(recorder, monkeypatch, conf, pooled):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    build_batch_transfer(Gh200Section(enable_uvm_hints=not pooled), CPU, recorder)
    assert any("is not in use" in text for text in recorder.texts()) is pooled


@pytest.mark.parametrize(
    ("conf", "hints", "start"),
    [
        ("", True, "managed memory is not in use"),
        ("use_uvm:False,", True, "managed memory is off (use_uvm), so hints have no effect"),
        ("use_uvm:False,", False, "managed memory is off (use_uvm); no"),
    ],
)
def test_a_run_says_which_settings_of_managed_memory_have_no_effect(
    recorder, monkeypatch, conf, hints, start
):
    monkeypatch.setenv(
        "PYTORCH_CUDA_ALLOC_CONF", f"{conf}uvm_oversubscription_ratio:5.0,uvm_stage1_threshold:0.2"
    )
    build_batch_transfer(Gh200Section(enable_uvm_hints=hints), CPU, recorder)
    (notice,) = (e for e in recorder.events if e.text.startswith("managed memory"))
    assert notice.text.startswith(start)
    assert notice.text.endswith("no effect: uvm_oversubscription_ratio, uvm_stage1_threshold")
    assert notice.level == "warning"


def test_roles_without_use_uvm_are_a_warning_on_the_console(recorder):
    build_batch_transfer(Gh200Section(managed=("optimizer",)), CPU, recorder)
    lines = [line for event in recorder.events for line in notice_lines(event)]
    text = "managed memory is off (use_uvm); no effect: gh200_optimizations.managed"
    assert lines == [f"warning    {text}"]


@pytest.mark.parametrize(("hints", "label"), [(None, "memory"), (True, "warning")])
def test_hints_without_managed_memory_are_a_warning_only_if_they_were_set(hints, label):
    session = simulated_session(Link.COHERENT, "use_uvm:False", None)
    session.hints_override = hints
    (line,) = notice_lines(managed_memory_notice(session))
    assert line.split(maxsplit=1) == [
        label,
        "managed memory is off (use_uvm), so hints have no effect",
    ]


def simulated_session(link, conf, pool, failing=None):
    machine = simulated_machine(link, failing=failing)
    session = MemorySession(
        lambda: Machine(machine.driver, machine.platform),
        lambda: environment_settings({"PYTORCH_CUDA_ALLOC_CONF": conf}),
        lambda event: None,
    )
    session._pool = pool
    return session


POOL = object.__new__(ManagedPool)
NO_SHIM = PoolUnavailable("the memory shim was not built")


@pytest.mark.parametrize(
    ("link", "conf", "pool", "text"),
    [
        (
            *(Link.COHERENT, "use_uvm:True,uvm_oversubscription_ratio:3", POOL),
            "memory: managed memory: batches, and what the device has no space for, at most 24.0 "
            "GiB (uvm_oversubscription_ratio 3)",
        ),
        (
            *(Link.COHERENT, "use_uvm:True,uvm_oversubscription_ratio:5", POOL),
            "managed memory: batches, and what the device has no space for, at most 28.0 GiB "
            "(host memory); no effect: uvm_oversubscription_ratio, because it allows more",
        ),
        (
            *(Link.MANAGED, "use_uvm:True,uvm_access_pattern:balanced", POOL),
            "memory: managed memory: batches, and what the device has no space for, at most 2.0 "
            "GiB (1/4 of the free device memory); uvm_access_pattern: batches stay where they were "
            "used last, and what overflows stays where it was used last",
        ),
        (
            *(Link.MANAGED, "use_uvm:True,uvm_access_pattern:gpu_first", NO_SHIM),
            "batches are not in managed memory: the memory shim was not built; in it is only what "
            "the device has no space for, at most 2.0 GiB (1/4 of the free device memory); "
            "uvm_access_pattern: what overflows is at home on the device while that has headroom, "
            "and returns to it after a reclamation; else kernels use it in host memory over PCIe, "
            "which is slow",
        ),
        (
            *(Link.COHERENT, "uvm_stage1_threshold:0.5", POOL),
            "memory: managed memory: batches, at most 28.0 GiB (host memory); memory is reclaimed "
            "if less than 4.0 GiB are free",
        ),
        (
            *(Link.COHERENT, "use_uvm:True", NO_SHIM),
            "batches are not in managed memory: the memory shim was not built; in it is only what "
            "the device has no space for, at most 28.0 GiB (host memory)",
        ),
    ],
)
def test_a_run_says_what_is_in_managed_memory_and_what_settings_govern(link, conf, pool, text):
    notice = managed_memory_notice(simulated_session(link, conf, pool))
    assert notice.text == text
    assert notice.fallback is (pool is NO_SHIM)
    assert (notice.level == "warning") is (pool is NO_SHIM or "no effect" in text)
    assert notice_lines(notice), "the console shows it"


OFF_LINE = (
    "no effect: gh200_optimizations.managed_access, because gh200_optimizations.managed is off"
)


@pytest.mark.parametrize(
    ("pool", "text"),
    [
        (POOL, f"managed memory: batches, at most 28.0 GiB (host memory); {OFF_LINE}"),
        (
            NO_SHIM,
            "managed memory is not in use, although it is asked for: the memory shim was not "
            "built. Ordinary memory is used; no effect: gh200_optimizations.managed_access",
        ),
    ],
)
def test_nothing_overflows_if_the_run_file_says_so(pool, text):
    """The setting itself has an effect, and so has the limit, which is that of batches as well."""
    session = simulated_session(Link.COHERENT, "use_uvm:True", pool)
    session.roles_off = "gh200_optimizations.managed is off"
    given = ["managed_access", *(["managed_memory"] if pool is POOL else [])]
    assert managed_memory_notice(session, given, "prefetch").text == text
    assert isinstance(session.managed, PoolUnavailable)


@pytest.mark.parametrize("host_bytes", [None, GIB], ids=["setting", "host"])
def test_a_limit_of_0_bytes_is_one_line_with_its_reason(host_bytes):
    session = simulated_session(Link.COHERENT, "use_uvm:True", None)
    if host_bytes is None:
        session.managed_cap_override = 0
    else:
        machine = session.machine
        session.machine = Machine(machine.driver, replace(machine.platform, host_bytes=GIB))
    why = "gh200_optimizations.managed_memory" if host_bytes is None else "host memory"
    given = ["managed_access", *(["managed_memory"] if host_bytes is None else [])]
    assert managed_memory_notice(session, given).text == (
        "managed memory is not in use, although it is asked for: the limit of managed memory is 0 "
        f"bytes ({why}). Ordinary memory is used; no effect: gh200_optimizations.managed_access"
    )
    assert isinstance(session.managed, PoolUnavailable)


def test_a_default_of_the_machine_is_not_asked_for():
    session = simulated_session(Link.COHERENT, "", PoolUnavailable("no compiler. Install one."))
    text = managed_memory_notice(session).text
    assert text == (
        "batches are not in managed memory: no compiler. Install one. Ordinary memory is used"
    )


# PinnedStaging


class DelayedDevice:
    """A device whose copies run only when it is synchronized, as those of a GPU may."""

    def __init__(self):
        self.pending = []
        self.events = []
        self.waits = 0

    def record_event(self):
        device, copies = self, list(self.pending)
        self.pending = []

        class Event:
            def synchronize(self):
                device.waits += 1
                for target, source in copies:
                    target.memory.copy_(source)
                copies.clear()

        self.events.append(Event())
        return self.events[-1]

    def empty_like(self, like):
        device = self

        class DelayedTensor:
            memory = torch.empty_like(like)

            def copy_(self, source, non_blocking):
                assert non_blocking
                device.pending.append((self, source))
                return self

        return DelayedTensor()

    def finish(self):
        for event in self.events:
            event.synchronize()


def write(tensor):
    return partial(copy_into, tensor)


def test_a_slot_is_written_again_only_after_it_was_copied():
    device = DelayedDevice()
    staging = PinnedStaging(allocate_pageable, device.record_event)
    sent = [
        staging.send({"latents": write(torch.tensor([[n] * 3, [n + 0.5] * 3]))}, device.empty_like)
        for n in range(7)
    ]
    assert device.waits == 7 - STAGING_SLOTS
    device.finish()
    for n, batch in enumerate(sent):
        assert batch["latents"].memory.tolist() == [[n] * 3, [n + 0.5] * 3]
    assert staging.nbytes_sent == 7 * 2 * 3 * 4


def test_a_slot_holds_parts_of_any_dtype_and_grows():
    device, sizes = DelayedDevice(), []

    def allocate(nbytes):
        sizes.append(nbytes)
        return allocate_pageable(nbytes)

    staging = PinnedStaging(allocate, device.record_event)
    for length in (3, 3, 700, 5):
        parts = {
            "mask": torch.ones(length, dtype=torch.bool),
            "text": torch.arange(2 * length).bfloat16().view(2, length),
            "latents": torch.arange(length).double(),
        }
        sent = staging.send({name: write(t) for name, t in parts.items()}, device.empty_like)
        device.finish()
        for name, tensor in parts.items():
            assert torch.equal(sent[name].memory, tensor)
    assert sizes[:2] == [PAGE, 2 * PAGE + PAGE]
    allocations = []
    for _ in range(3 * STAGING_SLOTS):
        staging.send({"latents": write(torch.zeros(700))}, device.empty_like)
        allocations.append(len(sizes))
    assert len(set(allocations[STAGING_SLOTS:])) == 1, "a slot that is large enough is reused"


def test_parts_written_before_a_slot_grew_are_sent_unchanged():
    device = DelayedDevice()
    staging = PinnedStaging(allocate_pageable, device.record_event)
    parts = {f"{n}": write(torch.full((n * 300 + 1,), float(n))) for n in range(6)}
    sent = staging.send(parts, device.empty_like)
    staging.send({"other": write(torch.full((5000,), -1.0))}, device.empty_like)
    device.finish()
    for n in range(6):
        assert sent[f"{n}"].memory.eq(n).all()


# Prefetching


class FakeStream:
    """A transfer stream on which nothing moves; checks which thread calls it."""

    def __init__(self):
        self.num_sent = 0
        self.received = []
        self.worker = None

    @contextmanager
    def active(self):
        self.worker = threading.current_thread()
        yield
        self.worker = None

    def record_arrival(self):
        assert threading.current_thread() is self.worker
        self.num_sent += 1
        return self.num_sent

    def wait_for(self, batch, arrival):
        assert threading.current_thread() is not self.worker
        self.received.append(arrival)


class LateLoader:
    """Loads a batch only after a step has asked for it; each takes a second of its own clock."""

    def __init__(self, count):
        self.count = count
        self.now = 0.0
        self._main = threading.current_thread()
        self._asked = threading.Semaphore(0)
        self._calls = 0

    def clock(self):
        if threading.current_thread() is self._main:
            self._calls += 1  # a step looks at the clock before and after it waits
            if self._calls % 2:
                self._asked.release()
        return self.now

    def __iter__(self):
        for item in numbered(self.count):
            self._asked.acquire()
            self.now += 1.0
            yield item


def batch(number):
    return Batch(torch.full((2, 4), float(number)), {"t": torch.zeros(2, 2)}, ())


def numbered(count, seen=None):
    for number in range(count):
        if seen is not None:
            seen.append(number)
        yield batch(number), LoaderState(number + 1)


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def late_batches(count, depth):
    loader = LateLoader(count)
    return PrefetchedBatches(iter(loader), FakeStream(), depth, loader.clock)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def test_batches_come_in_order_each_with_its_own_state():
    stream = FakeStream()
    batches = PrefetchedBatches(numbered(5), stream, PrefetchDepth(3, None))
    assert iter(batches) is batches
    taken = list(batches)
    assert [b.latents[0, 0].item() for b, _ in taken] == [0, 1, 2, 3, 4]
    assert [state.consumed for _, state in taken] == [1, 2, 3, 4, 5]
    assert stream.received == [1, 2, 3, 4, 5]
    batches.close()


def test_the_state_is_that_of_the_batch_taken_not_of_the_prefetched_ones():
    seen = []
    batches = PrefetchedBatches(numbered(100, seen), FakeStream(), PrefetchDepth(4, None))
    _, state = next(batches)
    wait_until(lambda: len(seen) == 5)
    time.sleep(0.02)
    assert len(seen) == 5  # one taken and four prefetched, no more
    assert state.consumed == 1
    batches.close()
    assert not [t for t in threading.enumerate() if t.name == "gracetune-prefetch"]


def test_a_fixed_depth_does_not_grow_when_steps_wait():
    batches = late_batches(6, PrefetchDepth(1, None))
    take(batches, 6)
    assert batches.depth.batches == 1
    assert batches.counts.waits == 6
    batches.close()


def test_the_automatic_depth_grows_within_its_budget_while_steps_wait():
    one = batch_nbytes(batch(0))
    assert one == 2 * 4 * 4 + 2 * 2 * 4
    batches = late_batches(12, PrefetchDepth(2, 5 * one))
    take(batches, 12)
    assert batches.depth.batches == 5
    batches.close()


def test_the_automatic_depth_does_not_grow_if_no_step_waits():
    batches = PrefetchedBatches(numbered(8), FakeStream(), PrefetchDepth(2, 2**30))
    for taken in range(8):
        wait_until(lambda taken=taken: len(batches._ready) == min(2, 8 - taken))
        next(batches)
    assert batches.depth.batches == 2
    assert batches.counts.waits == 0
    assert batches.counts.waited_s == 0
    assert batches.counts.hidden_s == batches.counts.busy_s > 0
    batches.close()


def test_time_that_steps_wait_is_counted_and_not_hidden():
    batches = late_batches(4, PrefetchDepth(1, None))
    take(batches, 4)
    counts = batches.counts
    assert (counts.batches, counts.waits) == (4, 4)
    assert (counts.waited_s, counts.busy_s, counts.hidden_s) == (4.0, 4.0, 0.0)
    batches.close()


def test_an_error_reaches_the_step_after_the_batches_before_it():
    def failing():
        yield from numbered(2)
        raise DataError("a file is gone")

    batches = PrefetchedBatches(failing(), FakeStream(), PrefetchDepth(4, None))
    assert [next(batches)[1].consumed, next(batches)[1].consumed] == [1, 2]
    with pytest.raises(DataError, match="a file is gone"):
        next(batches)
    batches.close()


def test_inline_batches_need_no_thread():
    before = threading.active_count()
    inline = InlineBatches(numbered(3))
    assert next(inline)[1].consumed == 1
    assert threading.active_count() == before
    assert (inline.counts.batches, inline.counts.waits, inline.depth.batches) == (1, 0, 0)
    inline.close()


# Texts on the device


def read_texts(names):
    return [{"tokens": torch.full((128,), float(len(n)))} for n in names]  # 512 bytes each


def test_the_first_texts_that_fit_the_budget_stay_on_the_device():
    cached = cache_texts_on_device(["a", "bb", "ccc"], read_texts, CPU, 1100)
    assert len(cached) == 2
    assert [e["tokens"][0].item() for e in cached.get_all(["bb", "a", "bb"])] == [2, 1, 2]
    assert cached.hits == 3
    assert cached.get_all(["a", "ccc"]) is None
    assert cached.hits == 3


def test_no_text_stays_on_the_device_without_a_budget():
    assert len(cache_texts_on_device(["a"], read_texts, CPU, 0)) == 0
    assert DeviceTextCache({}).get_all([]) is None


def test_trimmed_texts_are_read_from_the_host_and_return_when_they_are_read_again():
    cache = cache_texts_on_device(["a", "bb", "ccc"], read_texts, CPU, 2 * 512)
    assert (len(cache), cache.nbytes) == (2, 2 * 512)
    assert cache.trim() == 2 * 512
    assert cache.get_all(["a"]) is None
    entries = read_texts(["a", "ccc"])
    assert cache.keep(["a", "ccc"], entries) == entries
    assert cache.nbytes == 0, "not while memory is short"
    cache.restore()
    cache.keep(["a", "ccc"], entries)
    assert cache.get_all(["a"])[0]["tokens"].eq(1).all()
    assert cache.get_all(["ccc"]) is None, "it was not chosen at the start"
    assert cache.nbytes == 512


def test_texts_that_are_read_again_while_the_others_move_to_managed_memory_are_kept():
    texts = DeviceTextCache({name: {"tokens": torch.ones(4)} for name in ("a", "b")}, CPU)
    texts.trim()
    texts.restore()
    loader = threading.Thread(target=lambda: texts.keep(["b"], [{"tokens": torch.ones(4)}]))

    class Loaded(dict):
        """An entry that the loader follows with another one while it is read."""

        def __iter__(self):
            loader.start()
            wait_until(lambda: texts._lock.locked() or not loader.is_alive())
            return super().__iter__()

    texts._entries["a"] = Loaded(tokens=torch.ones(4))
    memory = managed_memory(
        simulated_machine(Link.MANAGED).gpu, MemoryAccounting({Tier.MANAGED: PAGE})
    )
    texts.move_to_managed(memory, None)
    loader.join()
    assert len(texts.get_all(["a", "b"])) == 2
    assert memory.by_role() == {"caches": 512}


def test_texts_in_managed_memory_are_complete_before_the_loader_sees_them(monkeypatch):
    texts = DeviceTextCache({"a": {"tokens": torch.ones(4)}}, CPU)
    seen = []

    class Stream:
        def synchronize(self):
            seen.append((texts._lock.locked(), texts._is_managed))

    monkeypatch.setattr(batch_transfer, "cuda_is_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    memory = managed_memory(
        simulated_machine(Link.MANAGED).gpu, MemoryAccounting({Tier.MANAGED: PAGE})
    )
    texts.move_to_managed(memory, None)
    assert seen == [(True, False)]
    assert texts.get_all(["a"])[0]["tokens"].eq(1).all()


def test_a_depth_is_shortened_as_long_as_there_is_any_reason():
    depth = PrefetchDepth(3, 100)
    assert (depth.shorten("memory"), depth.shorten("health"), depth.batches) == (2, 0, 1)
    depth.grow(1)
    assert (depth.lengthen("memory"), depth.batches) == (0, 1)
    assert (depth.lengthen("health"), depth.batches) == (2, 3)


def test_batches_beyond_the_next_one_count_as_surplus():
    batches = PrefetchedBatches(numbered(9), FakeStream(), PrefetchDepth(3, None))
    wait_until(lambda: len(batches._ready) == 3)
    assert batches.surplus_nbytes() == 2 * batch_nbytes(batch(0))
    batches.depth.shorten("memory")
    take(batches, 2)
    assert batches.surplus_nbytes() == 0
    batches.close()
