"""Every hint says what it did, and does it to the tensor's own pages alone."""

from __future__ import annotations

import threading

import pytest
import torch
from by_hand import machine, tensor_at

from gracetune.memory.driver import HOST, PointerKind
from gracetune.memory.hints import Hint, Hints, Verdict, dense_nbytes, page_span
from gracetune.memory.platform import NO_GPU, Link
from gracetune.units import KIB, MIB

PAGE = 4096
VERBS = ("prefer_cpu_residency", "prefer_gpu_residency", "prefetch_to_device", "discard")


@pytest.mark.parametrize("link", list(Link))
@pytest.mark.parametrize("verb", [*VERBS, "residency"])
def test_every_verb_has_a_verdict_on_every_platform(link: Link, verb: str) -> None:
    here = machine(link)
    tensors = [torch.zeros(MIB, dtype=torch.uint8), torch.zeros(0), torch.zeros(4, device="meta")]
    tensors.append(torch.zeros(4, 4).to_sparse())
    if here.driver is not None:
        tensors += [here.tensor(MIB, kind) for kind in ("managed", "pinned", "device")]
    hints = here.hints()
    for tensor in tensors:
        hint = getattr(hints, verb)(tensor)
        assert hint.verb == verb
        assert hint.verdict in Verdict
        assert bool(hint) == (hint.verdict is Verdict.APPLIED)
        assert hint or hint.reason, f"{verb} on {link} is {hint.verdict} without a reason"
    assert sum(hints.counts().verdicts.values()) == len(tensors)


@pytest.mark.parametrize("link", [Link.MANAGED, Link.COHERENT])
def test_hints_reach_managed_memory(link: Link) -> None:
    here = machine(link)
    hints = here.hints()
    tensor = here.tensor(MIB)
    assert hints.residency(tensor).location is None

    assert hints.prefer_cpu_residency(tensor) == Hint(
        "prefer_cpu_residency", Verdict.APPLIED, nbytes=MIB
    )
    state = here.gpu.range_state(tensor.data_ptr(), MIB)
    assert (state.preferred, state.accessed_by) == (HOST, (0,))
    assert hints.residency(tensor).location == HOST

    assert hints.prefetch_to_device(tensor)
    assert here.gpu.residency(tensor.data_ptr(), MIB) == {0: MIB}
    assert hints.residency(tensor).location == 0

    assert hints.prefer_gpu_residency(tensor)
    assert here.gpu.range_state(tensor.data_ptr(), MIB).preferred == 0

    assert hints.discard(tensor)
    assert here.gpu.residency(tensor.data_ptr(), MIB) == {}
    counts = hints.counts()
    assert counts.nbytes["prefetched_to_device"] == MIB
    assert counts.nbytes["discarded"] == MIB


@pytest.mark.parametrize(
    ("asked", "place"),
    [(None, 0), (0, 0), ("cuda", 0), ("cuda:0", 0), (torch.device("cuda", 0), 0), ("cpu", HOST)],
)
def test_prefetch_goes_where_it_is_told(asked: object, place: int) -> None:
    here = machine(Link.MANAGED)
    hints = here.hints()
    tensor = here.tensor(MIB)
    assert hints.prefetch_to_device(tensor, asked)
    assert here.gpu.range_state(tensor.data_ptr(), MIB).last_prefetch == place
    way = "prefetched_to_host" if place == HOST else "prefetched_to_device"
    assert hints.counts().nbytes == {way: MIB}


@pytest.mark.parametrize("place", ["mps", "the moon"])
def test_a_place_that_is_no_place_is_refused(place: str) -> None:
    here = machine(Link.MANAGED)
    hint = here.hints().prefetch_to_device(here.tensor(MIB), place)
    assert hint.verdict is Verdict.UNSUPPORTED
    assert place in hint.reason


def test_a_device_that_is_not_there_fails_with_the_drivers_code() -> None:
    here = machine(Link.MANAGED)
    hint = here.hints().prefetch_to_device(here.tensor(MIB), 7)
    assert (hint.verdict, hint.code) == (Verdict.FAILED, 101)


@pytest.mark.parametrize(("verb", "broken"), [("prefetch_to_device", "prefetch"), *[
    (verb, "advise") for verb in ("prefer_cpu_residency", "prefer_gpu_residency")
], ("discard", "discard")])  # fmt: skip
def test_a_refusal_of_the_driver_is_a_failure_with_its_code(verb: str, broken: str) -> None:
    here = machine(Link.MANAGED, failing={broken: 719})
    hint = getattr(here.hints(), verb)(here.tensor(MIB))
    assert (hint.verdict, hint.code, hint.nbytes) == (Verdict.FAILED, 719, MIB)
    assert not hint


def test_a_call_the_driver_does_not_have_is_unsupported() -> None:
    here = machine(Link.MANAGED, failing={"discard": 801})
    hint = here.hints().discard(here.tensor(MIB))
    assert (hint.verdict, hint.code) == (Verdict.UNSUPPORTED, 801)
    assert "too old" in hint.reason


@pytest.mark.parametrize(
    ("kind", "place", "word"), [("pinned", HOST, "pinned"), ("device", 0, "ordinary device")]
)
def test_memory_that_is_not_managed_never_reaches_the_driver(
    kind: str, place: int, word: str
) -> None:
    here = machine(Link.COHERENT, failing={"advise": 1, "prefetch": 1, "discard": 1})
    hints = here.hints()
    tensor = here.tensor(MIB, kind)
    for verb in VERBS:
        hint = getattr(hints, verb)(tensor)
        assert hint.verdict is Verdict.UNSUPPORTED
        assert word in hint.reason
    assert hints.residency(tensor).location == place


def test_plain_host_memory_is_told_from_managed() -> None:
    here = machine(Link.MANAGED)
    found = here.hints().residency(torch.zeros(MIB, dtype=torch.uint8))
    assert (found.location, found.kind) == (HOST, PointerKind.UNKNOWN)


def test_the_stream_is_the_callers_or_the_current_one() -> None:
    here = machine(Link.MANAGED)
    asked = []

    class Watching:
        def __getattr__(self, name: str) -> object:
            return getattr(here.gpu, name)

        def prefetch(self, pointer: int, nbytes: int, place: int, stream: int) -> int:
            asked.append(stream)
            return here.gpu.prefetch(pointer, nbytes, place, stream)

    class Stream:
        cuda_stream = 33

    hints = Hints(Watching(), here.platform, current_stream=lambda device: 100 + device)
    tensor = here.tensor(MIB)
    hints.prefetch_to_device(tensor)
    hints.prefetch_to_device(tensor, stream=7)
    hints.prefetch_to_device(tensor, stream=Stream())
    assert asked == [100, 7, 33]


def test_hints_that_are_off_touch_nothing_but_answer() -> None:
    here = machine(Link.COHERENT, failing={"advise": 1, "prefetch": 1, "discard": 1})
    notices = []
    hints = here.hints(enabled=False, emit=notices.append)
    tensor = here.tensor(MIB)
    for verb in VERBS:
        hint = getattr(hints, verb)(tensor)
        assert hint.verdict is Verdict.UNSUPPORTED
        assert "SIMPLETUNER_GH200_ENABLE_UVM_HINTS" in hint.reason
    assert hints.residency(tensor)
    assert notices == [], "what the user switched off is no fallback"


def test_a_refusal_is_told_once_and_counted_always() -> None:
    notices = []
    hints = Hints(None, NO_GPU, emit=notices.append)
    for _ in range(5):
        hints.prefetch_to_device(torch.zeros(MIB))
        hints.discard(torch.zeros(MIB))
    assert [notice.text.split()[0] for notice in notices] == ["prefetch_to_device", "discard"]
    assert all(notice.fallback and "no GPU" in notice.text for notice in notices)
    assert hints.counts().verdicts["discard", Verdict.UNSUPPORTED] == 5


def test_no_gpu_and_a_driver_do_not_go_together() -> None:
    with pytest.raises(AssertionError):
        Hints(machine(Link.MANAGED).gpu, NO_GPU)


def test_counts_are_right_from_many_threads() -> None:
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
    assert hints.counts().verdicts["discard", Verdict.UNSUPPORTED] == 2000


class TestSpans:
    """Only whole pages of the tensor's own bytes."""

    @pytest.mark.parametrize("page", [4 * KIB, 64 * KIB])
    def test_inwards_to_pages(self, page: int) -> None:
        base = 1 << 44
        span = page_span(tensor_at(base + 100, 4 * page), page)
        assert (span.pointer, span.nbytes) == (base + page, 3 * page)
        exact = page_span(tensor_at(base, 4 * page), page)
        assert (exact.pointer, exact.nbytes) == (base, 4 * page)

    def test_a_view_is_not_its_storage(self) -> None:
        here = machine(Link.MANAGED)
        whole = here.tensor(16 * PAGE)
        part = whole[4 * PAGE : 8 * PAGE]
        hint = here.hints().prefetch_to_device(part)
        assert hint.nbytes == 4 * PAGE
        assert here.gpu.residency(whole.data_ptr(), 16 * PAGE) == {0: 4 * PAGE}

    def test_neighbours_on_shared_pages_are_left_alone(self) -> None:
        here = machine(Link.MANAGED)
        whole = here.tensor(3 * PAGE)
        assert here.hints().prefer_cpu_residency(whole[10 : 3 * PAGE - 10]).nbytes == PAGE
        assert here.gpu.range_state(whole.data_ptr(), PAGE).preferred is None
        assert here.gpu.range_state(whole.data_ptr() + 2 * PAGE, PAGE).preferred is None

    def test_less_than_a_page_is_said(self) -> None:
        here = machine(Link.MANAGED)
        hint = here.hints().prefetch_to_device(here.tensor(PAGE)[1:])
        assert hint.verdict is Verdict.UNSUPPORTED
        assert "no whole page" in hint.reason

    def test_strided_views_with_others_between_are_refused(self) -> None:
        here = machine(Link.MANAGED)
        grid = here.tensor(64 * PAGE).view(64, PAGE)
        hint = here.hints().prefetch_to_device(grid[:, : PAGE // 2])
        assert hint.verdict is Verdict.UNSUPPORTED
        assert "contiguous" in hint.reason
        assert here.hints().prefetch_to_device(grid.t()).nbytes == 64 * PAGE

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
    def test_dense_bytes(self, tensor: torch.Tensor, nbytes: int | None) -> None:
        assert dense_nbytes(tensor) == nbytes

    def test_a_tensor_without_memory_of_its_own(self) -> None:
        sharded = torch.zeros(4096)
        sharded.untyped_storage().resize_(0)
        assert "no memory of its own" in page_span(sharded, PAGE)

        seen = []

        def inside(row: torch.Tensor) -> torch.Tensor:
            seen.append(page_span(row, PAGE))
            return row

        torch.vmap(inside)(torch.zeros(2, 8192))
        assert "no memory of its own" in seen[0]
