"""Hints: verdicts, effects on the simulated driver, and the pages they affect."""

from __future__ import annotations

import threading

import pytest
import torch
from fakes.platforms import simulated_machine, tensor_at

from gracetune.memory.driver import HOST, PointerKind
from gracetune.memory.hints import Hint, HintOutcome, Hints, dense_nbytes, page_span
from gracetune.memory.platform import NO_GPU, Link
from gracetune.units import KIB, MIB

PAGE = 4096
VERBS = ("prefer_cpu_residency", "prefer_gpu_residency", "prefetch_to_device", "discard")


@pytest.mark.parametrize("link", list(Link))
@pytest.mark.parametrize("verb", [*VERBS, "residency"])
def test_every_hint_has_a_verdict_on_every_platform(link: Link, verb: str) -> None:
    machine = simulated_machine(link)
    tensors = [torch.zeros(MIB, dtype=torch.uint8), torch.zeros(0), torch.zeros(4, device="meta")]
    tensors.append(torch.zeros(4, 4).to_sparse())
    if machine.driver is not None:
        tensors += [machine.tensor(MIB, kind) for kind in ("managed", "pinned", "device")]
    hints = machine.hints()
    for tensor in tensors:
        hint = getattr(hints, verb)(tensor)
        assert hint.verb == verb
        assert hint.verdict in HintOutcome
        assert bool(hint) == (hint.verdict is HintOutcome.APPLIED)
        assert hint or hint.reason, f"{verb} on {link} is {hint.verdict} without a reason"
    assert sum(hints.counts().verdicts.values()) == len(tensors)


@pytest.mark.parametrize("link", [Link.MANAGED, Link.COHERENT])
def test_hints_reach_managed_memory(link: Link) -> None:
    machine = simulated_machine(link)
    hints = machine.hints()
    tensor = machine.tensor(MIB)
    assert hints.residency(tensor).location is None

    assert hints.prefer_cpu_residency(tensor) == Hint(
        "prefer_cpu_residency", HintOutcome.APPLIED, nbytes=MIB
    )
    state = machine.gpu.range_state(tensor.data_ptr(), MIB)
    assert (state.preferred, state.accessed_by) == (HOST, (0,))
    assert hints.residency(tensor).location == HOST

    assert hints.prefetch_to_device(tensor)
    assert machine.gpu.residency(tensor.data_ptr(), MIB) == {0: MIB}
    assert hints.residency(tensor).location == 0

    assert hints.prefer_gpu_residency(tensor)
    assert machine.gpu.range_state(tensor.data_ptr(), MIB).preferred == 0

    assert hints.discard(tensor)
    assert machine.gpu.residency(tensor.data_ptr(), MIB) == {}
    counts = hints.counts()
    assert counts.nbytes["prefetched_to_device"] == MIB
    assert counts.nbytes["discarded"] == MIB


@pytest.mark.parametrize(
    ("device", "location"),
    [(None, 0), (0, 0), ("cuda", 0), ("cuda:0", 0), (torch.device("cuda", 0), 0), ("cpu", HOST)],
)
def test_prefetch_moves_to_the_given_location(device: object, location: int) -> None:
    machine = simulated_machine(Link.MANAGED)
    hints = machine.hints()
    tensor = machine.tensor(MIB)
    assert hints.prefetch_to_device(tensor, device)
    assert machine.gpu.range_state(tensor.data_ptr(), MIB).last_prefetch == location
    way = "prefetched_to_host" if location == HOST else "prefetched_to_device"
    assert hints.counts().nbytes == {way: MIB}


@pytest.mark.parametrize("place", ["mps", "the moon"])
def test_an_invalid_location_is_refused(place: str) -> None:
    machine = simulated_machine(Link.MANAGED)
    hint = machine.hints().prefetch_to_device(machine.tensor(MIB), place)
    assert hint.verdict is HintOutcome.UNSUPPORTED
    assert place in hint.reason


def test_a_missing_device_fails_with_the_drivers_code() -> None:
    machine = simulated_machine(Link.MANAGED)
    hint = machine.hints().prefetch_to_device(machine.tensor(MIB), 7)
    assert (hint.verdict, hint.code) == (HintOutcome.FAILED, 101)


@pytest.mark.parametrize(("verb", "broken"), [("prefetch_to_device", "prefetch"), *[
    (verb, "advise") for verb in ("prefer_cpu_residency", "prefer_gpu_residency")
], ("discard", "discard")])  # fmt: skip
def test_a_driver_error_is_a_failed_hint_with_its_code(verb: str, broken: str) -> None:
    machine = simulated_machine(Link.MANAGED, failing={broken: 719})
    hint = getattr(machine.hints(), verb)(machine.tensor(MIB))
    assert (hint.verdict, hint.code, hint.nbytes) == (HintOutcome.FAILED, 719, MIB)
    assert not hint


def test_a_call_that_the_driver_lacks_is_unsupported() -> None:
    machine = simulated_machine(Link.MANAGED, failing={"discard": 801})
    hint = machine.hints().discard(machine.tensor(MIB))
    assert (hint.verdict, hint.code) == (HintOutcome.UNSUPPORTED, 801)
    assert "too old" in hint.reason


@pytest.mark.parametrize(
    ("kind", "location", "word"), [("pinned", HOST, "pinned"), ("device", 0, "ordinary device")]
)
def test_memory_that_is_not_managed_never_reaches_the_driver(
    kind: str, location: int, word: str
) -> None:
    machine = simulated_machine(Link.COHERENT, failing={"advise": 1, "prefetch": 1, "discard": 1})
    hints = machine.hints()
    tensor = machine.tensor(MIB, kind)
    for verb in VERBS:
        hint = getattr(hints, verb)(tensor)
        assert hint.verdict is HintOutcome.UNSUPPORTED
        assert word in hint.reason
    assert hints.residency(tensor).location == location


def test_residency_of_pageable_host_memory_is_the_host() -> None:
    machine = simulated_machine(Link.MANAGED)
    found = machine.hints().residency(torch.zeros(MIB, dtype=torch.uint8))
    assert (found.location, found.kind) == (HOST, PointerKind.UNKNOWN)


def test_prefetch_uses_the_given_or_the_current_stream() -> None:
    machine = simulated_machine(Link.MANAGED)
    asked = []

    class Watching:
        def __getattr__(self, name: str) -> object:
            return getattr(machine.gpu, name)

        def prefetch(self, pointer: int, nbytes: int, place: int, stream: int) -> int:
            asked.append(stream)
            return machine.gpu.prefetch(pointer, nbytes, place, stream)

    class Stream:
        cuda_stream = 33

    hints = Hints(Watching(), machine.platform, current_stream=lambda device: 100 + device)
    tensor = machine.tensor(MIB)
    hints.prefetch_to_device(tensor)
    hints.prefetch_to_device(tensor, stream=7)
    hints.prefetch_to_device(tensor, stream=Stream())
    assert asked == [100, 7, 33]


def test_disabled_hints_do_not_reach_the_driver() -> None:
    machine = simulated_machine(Link.COHERENT, failing={"advise": 1, "prefetch": 1, "discard": 1})
    notices = []
    hints = machine.hints(enabled=False, emit=notices.append)
    tensor = machine.tensor(MIB)
    for verb in VERBS:
        hint = getattr(hints, verb)(tensor)
        assert hint.verdict is HintOutcome.UNSUPPORTED
        assert "SIMPLETUNER_GH200_ENABLE_UVM_HINTS" in hint.reason
    assert hints.residency(tensor)
    assert notices == [], "hints that the user switched off are no fallback"


def test_each_refusal_is_reported_once_and_always_counted() -> None:
    notices = []
    hints = Hints(None, NO_GPU, emit=notices.append)
    for _ in range(5):
        hints.prefetch_to_device(torch.zeros(MIB))
        hints.discard(torch.zeros(MIB))
    assert [notice.text.split()[0] for notice in notices] == ["prefetch_to_device", "discard"]
    assert all(notice.fallback and "no GPU" in notice.text for notice in notices)
    assert hints.counts().verdicts["discard", HintOutcome.UNSUPPORTED] == 5


def test_a_driver_without_a_gpu_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Hints(simulated_machine(Link.MANAGED).gpu, NO_GPU)


def test_counts_are_thread_safe() -> None:
    hints = Hints(None, NO_GPU)
    tensor = torch.zeros(1)

    def work() -> None:
        for _ in range(500):
            hints.discard(tensor)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hints.counts().verdicts["discard", HintOutcome.UNSUPPORTED] == 2000


class TestSpans:
    """Whole pages inside a tensor's own bytes."""

    @pytest.mark.parametrize("page", [4 * KIB, 64 * KIB])
    def test_spans_are_rounded_inwards_to_pages(self, page: int) -> None:
        base = 1 << 44
        span = page_span(tensor_at(base + 100, 4 * page), page)
        assert (span.pointer, span.nbytes) == (base + page, 3 * page)
        exact = page_span(tensor_at(base, 4 * page), page)
        assert (exact.pointer, exact.nbytes) == (base, 4 * page)

    def test_a_view_affects_only_its_own_pages(self) -> None:
        machine = simulated_machine(Link.MANAGED)
        whole = machine.tensor(16 * PAGE)
        part = whole[4 * PAGE : 8 * PAGE]
        hint = machine.hints().prefetch_to_device(part)
        assert hint.nbytes == 4 * PAGE
        assert machine.gpu.residency(whole.data_ptr(), 16 * PAGE) == {0: 4 * PAGE}

    def test_pages_shared_with_neighbours_are_excluded(self) -> None:
        machine = simulated_machine(Link.MANAGED)
        whole = machine.tensor(3 * PAGE)
        assert machine.hints().prefer_cpu_residency(whole[10 : 3 * PAGE - 10]).nbytes == PAGE
        assert machine.gpu.range_state(whole.data_ptr(), PAGE).preferred is None
        assert machine.gpu.range_state(whole.data_ptr() + 2 * PAGE, PAGE).preferred is None

    def test_less_than_a_page_is_unsupported(self) -> None:
        machine = simulated_machine(Link.MANAGED)
        hint = machine.hints().prefetch_to_device(machine.tensor(PAGE)[1:])
        assert hint.verdict is HintOutcome.UNSUPPORTED
        assert "no whole page" in hint.reason

    def test_strided_views_with_gaps_are_refused(self) -> None:
        machine = simulated_machine(Link.MANAGED)
        grid = machine.tensor(64 * PAGE).view(64, PAGE)
        hint = machine.hints().prefetch_to_device(grid[:, : PAGE // 2])
        assert hint.verdict is HintOutcome.UNSUPPORTED
        assert "contiguous" in hint.reason
        assert machine.hints().prefetch_to_device(grid.t()).nbytes == 64 * PAGE

    @pytest.mark.parametrize(
        ("tensor", "nbytes"),
        [
            (torch.zeros(3, 4), 48),
            (torch.zeros(3, 4).t(), 48),
            (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), 480),
            (torch.zeros(5, dtype=torch.bfloat16), 10),
            (torch.zeros(4).expand(7, 4), 16),
            (torch.zeros(1, 9)[:, :1], 4),
            (torch.zeros(()), 4),
            (torch.zeros(0, 5), 0),
            (torch.zeros(6)[::2], None),
            (torch.zeros(6, 6)[:, 2:4], None),
            (torch.zeros(8).unfold(0, 4, 1), None),
        ],
    )
    def test_dense_nbytes_is_none_for_views_with_gaps(
        self, tensor: torch.Tensor, nbytes: int | None
    ) -> None:
        assert dense_nbytes(tensor) == nbytes

    def test_a_tensor_without_memory_of_its_own_has_no_page_span(self) -> None:
        sharded = torch.zeros(4096)
        sharded.untyped_storage().resize_(0)
        assert "no memory of its own" in page_span(sharded, PAGE)

        seen = []

        def inside(row: torch.Tensor) -> torch.Tensor:
            seen.append(page_span(row, PAGE))
            return row

        torch.vmap(inside)(torch.zeros(2, 8192))
        assert "no memory of its own" in seen[0]
