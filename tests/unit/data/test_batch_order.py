from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gracetune.data.batch_order import (
    LOOKAHEAD_BATCHES,
    BatchOrder,
    BucketGroup,
    Draw,
    Loader,
    LoaderState,
    RankShare,
    balance,
    describe_batch,
    describe_imbalance,
    plan_balance,
)
from gracetune.data.prefetch import Prefetch
from gracetune.data.sample import Sample
from gracetune.errors import DataError, RunFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.data.sample import Batch, Shape


def _group(
    dataset: str, count: int, repeats: int = 1, dropout: float = 0.0, size: tuple[int, int] = (8, 8)
) -> BucketGroup:
    samples = tuple(
        Sample(dataset, f"{size}/{number}.png", f"{dataset} {number}", "0", *size)
        for number in range(count)
    )
    return BucketGroup(samples, repeats, dropout, size)


@dataclass(frozen=True)
class Loaded:
    """Stands for a batch: the draws themselves instead of what they are encoded to."""

    draws: tuple[object, ...]
    index: int = -1
    first: int = 0
    of: int | None = None


def _load(draws: Sequence[Draw]) -> Batch:
    return cast("Batch", Loaded(tuple(draws)))


def _draws(batch: Batch) -> tuple[Draw, ...]:
    return cast("tuple[Draw, ...]", cast("Loaded", batch).draws)


def _epoch(order: BatchOrder, number: int) -> list[tuple[Draw, ...]]:
    first = number * order.epoch_length
    return [order.batch_at(first + place) for place in range(order.epoch_length)]


groups_strategy = st.lists(
    st.builds(
        _group,
        dataset=st.sampled_from(["cats", "dogs"]),
        count=st.integers(0, 7),
        repeats=st.integers(1, 3),
        dropout=st.sampled_from([0.0, 0.5, 1.0]),
        size=st.sampled_from([(8, 8), (8, 16), (16, 8)]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda group: (group.samples[:1], group.size),
).filter(lambda groups: any(group.samples for group in groups))
batch_sizes = st.integers(1, 5)
seeds = st.integers(-(2**63), 2**63)


@given(groups_strategy, batch_sizes, seeds, st.integers(0, 3))
def test_an_epoch_has_each_sample_as_often_as_its_repeats(
    groups: list[BucketGroup], batch_size: int, seed: int, number: int
) -> None:
    order = BatchOrder(groups, batch_size, seed)
    batches = _epoch(order, number)
    shown = Counter((draw.sample, draw.size) for batch in batches for draw in batch)
    expected: Counter[object] = Counter()
    for group in groups:
        for sample in group.samples:
            expected[sample, group.size] += group.repeats
    assert shown == expected
    assert order.num_samples(0, order.epoch_length) == sum(expected.values())


@given(groups_strategy, batch_sizes, seeds)
def test_batches_have_one_size_and_their_number_is_minimal(
    groups: list[BucketGroup], batch_size: int, seed: int
) -> None:
    batches = _epoch(BatchOrder(groups, batch_size, seed), 0)
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert all(len({draw.size for draw in batch}) == 1 for batch in batches)
    for size in {batch[0].size for batch in batches}:
        lengths = [len(batch) for batch in batches if batch[0].size == size]
        assert len(lengths) == -(-sum(lengths) // batch_size)


@given(groups_strategy, batch_sizes, seeds, st.integers(1, 4), st.integers(0, 30))
def test_ranks_partition_the_batches(
    groups: list[BucketGroup], batch_size: int, seed: int, world: int, consumed: int
) -> None:
    order = BatchOrder(groups, batch_size, seed)
    loaders = [
        Loader(BatchOrder(groups, batch_size, seed), _load, RankShare(rank, world), consumed)
        for rank in range(world)
    ]
    taken = []
    for _ in range(3):
        step = [next(loader) for loader in loaders]
        taken += [_draws(batch) for batch, _ in step]
        assert len({state for _, state in step}) == 1
    assert taken == [order.batch_at(consumed + place) for place in range(3 * world)]


@given(
    groups_strategy, batch_sizes, seeds, st.integers(0, 12), st.integers(1, 3), st.integers(1, 3)
)
def test_resuming_with_another_number_of_ranks_continues_the_same_order(
    groups: list[BucketGroup], batch_size: int, seed: int, steps: int, before: int, after: int
) -> None:
    order = BatchOrder(groups, batch_size, seed)
    state = LoaderState(0)
    loader = Loader(order, _load, RankShare(0, before))
    for _ in range(steps):
        _, state = next(loader)
    assert state.consumed == steps * before
    assert state.epoch(order) == steps * before // order.epoch_length
    loaders = [
        Loader(BatchOrder(groups, batch_size, seed), _load, RankShare(rank, after), state.consumed)
        for rank in range(after)
    ]
    resumed = [_draws(next(loader)[0]) for loader in loaders]
    assert resumed == [order.batch_at(state.consumed + rank) for rank in range(after)]


def test_the_order_differs_by_epoch_and_seed_and_is_reproducible() -> None:
    groups = [_group("cats", 50)]
    order = BatchOrder(groups, 4, 0)
    first, second = _epoch(order, 0), _epoch(order, 1)
    assert first != second
    assert _epoch(order, 0) == first
    assert _epoch(BatchOrder(groups, 4, 1), 0) != first


def test_batches_of_several_sizes_are_mixed() -> None:
    order = BatchOrder([_group("a", 64, size=(8, 8)), _group("a", 64, size=(16, 8))], 4, 0)
    sizes = [batch[0].size for batch in _epoch(order, 0)]
    changes = sum(one != other for one, other in itertools.pairwise(sizes))
    assert changes > 8


def test_groups_of_one_size_share_batches() -> None:
    order = BatchOrder([_group("cats", 32), _group("dogs", 32)], 8, 0)
    mixed = [len({draw.sample.dataset for draw in batch}) == 2 for batch in _epoch(order, 0)]
    assert sum(mixed) >= 6


def test_captions_are_dropped_at_their_rate_and_differently_each_epoch() -> None:
    order = BatchOrder([_group("cats", 2000, repeats=2, dropout=0.25)], 100, 3)
    dropped = []
    for number in range(2):
        draws = [draw for batch in _epoch(order, number) for draw in batch]
        dropped.append({(draw.sample.key) for draw in draws if draw.caption == ""})
        assert 0.22 < sum(draw.caption == "" for draw in draws) / len(draws) < 0.28
        assert all(draw.caption in ("", draw.sample.caption) for draw in draws)
    assert dropped[0] != dropped[1]


def test_caption_dropout_of_a_sample_does_not_depend_on_other_samples() -> None:
    def dropped(groups: list[BucketGroup]) -> set[str]:
        batches = _epoch(BatchOrder(groups, 4, 0), 0)
        draws = [draw for batch in batches for draw in batch if draw.sample.dataset == "cats"]
        return {draw.sample.key for draw in draws if not draw.caption}

    alone = dropped([_group("cats", 40, dropout=0.5)])
    assert alone == dropped([_group("dogs", 9, dropout=0.5), _group("cats", 40, dropout=0.5)])
    assert 5 < len(alone) < 35


@pytest.mark.parametrize(("dropout", "captions"), [(0.0, 9), (1.0, 0)])
def test_caption_dropout_of_0_keeps_and_of_1_drops_every_caption(
    dropout: float, captions: int
) -> None:
    batches = _epoch(BatchOrder([_group("cats", 9, dropout=dropout)], 2, 0), 0)
    assert sum(draw.caption != "" for batch in batches for draw in batch) == captions


PINNED = ["3", "0", "5", "4", "1", "2", "2", "5", "4", "0", "1", "3"]


def _numbers(seed: int) -> list[str]:
    order = BatchOrder([_group("cats", 6)], 2, seed)
    return [
        draw.sample.caption.split()[1]
        for number in range(2)
        for batch in _epoch(order, number)
        for draw in batch
    ]


def test_the_order_never_changes_between_releases() -> None:
    """A checkpoint of an older release continues in the order it started with."""
    assert _numbers(7) == PINNED


def test_the_order_is_the_same_in_another_process() -> None:
    program = (
        "from gracetune.data.batch_order import *; from gracetune.data.sample import Sample\n"
        "samples = tuple(Sample('cats', str(i), str(i), '0', 8, 8) for i in range(20))\n"
        "order = BatchOrder([BucketGroup(samples, 1, 0.5, (8, 8))], 3, 1)\n"
        "print([[d.caption for d in order.batch_at(i)] for i in range(20)])\n"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert len(runs.pop()) > 60


def test_a_hundred_thousand_samples_take_little_cpu_time() -> None:
    groups = [_group("cats", 50_000), _group("cats", 50_000, size=(16, 8))]
    start = time.process_time()
    order = BatchOrder(groups, 8, 0)
    for index in range(0, 3 * order.epoch_length, order.epoch_length // 100):
        order.batch_at(index)
    assert time.process_time() - start < 2


def test_an_order_without_samples_is_an_error() -> None:
    for groups in ([], [_group("cats", 0)]):
        with pytest.raises(DataError, match="No dataset has a sample left"):
            BatchOrder(groups, 4, 0)


def test_each_batch_is_announced_before_it_is_loaded() -> None:
    order = BatchOrder([_group("d", 7)], 2, 0)
    calls: list[tuple[str, Sequence[Draw]]] = []

    def load(draws: Sequence[Draw]) -> Batch:
        calls.append(("load", draws))
        return _load(draws)

    announcing = Loader(
        order, load, RankShare(1, 3), 4, will_need=lambda draws: calls.append(("announce", draws))
    )
    plain = Loader(order, _load, RankShare(1, 3), 4)
    taken = [next(announcing) for _ in range(20)]
    assert taken == [next(plain) for _ in range(20)]
    announced = [draws for what, draws in calls if what == "announce"]
    assert announced[:20] == [_draws(batch) for batch, _ in taken]
    first = calls.index(("load", _draws(taken[0][0])))
    assert first == LOOKAHEAD_BATCHES + 1
    assert len(announced) == 20 + LOOKAHEAD_BATCHES


def test_loader_is_its_own_iterator() -> None:
    loader = Loader(BatchOrder([_group("cats", 3)], 2, 0), _load)
    states = [state for _, state in itertools.islice(loader, 5)]
    assert [state.consumed for state in states] == [1, 2, 3, 4, 5]


def _shown(order: BatchOrder, number: int, dataset: str = "cats") -> Counter[str]:
    return Counter(
        draw.sample.key
        for batch in _epoch(order, number)
        for draw in batch
        if draw.sample.dataset == dataset
    )


@given(
    count=st.integers(1, 30),
    repeats=st.integers(1, 3),
    weight=st.floats(0.05, 4),
    seed=seeds,
)
def test_a_weight_scales_every_epoch_and_samples_are_used_evenly(
    count: int, repeats: int, weight: float, seed: int
) -> None:
    group = replace(_group("cats", count, repeats), weight=weight)
    order = BatchOrder([group, _group("dogs", 5)], 4, seed)
    total: Counter[str] = Counter()
    for number in range(6):
        shown = _shown(order, number)
        assert sum(shown.values()) == max(1, round(count * repeats * weight))
        assert sum(_shown(order, number, "dogs").values()) == 5
        total += shown
    every = [total[sample.key] for sample in group.samples]
    assert max(every) - min(every) <= 1  # no sample is shown twice before every sample was shown


def test_a_weight_of_one_does_not_change_the_order() -> None:
    groups = [_group("cats", 9), _group("dogs", 7, 2, 0.5, (16, 8))]
    heavy = [replace(group, weight=1.0) for group in groups]
    plain, weighted = BatchOrder(groups, 4, 3), BatchOrder(heavy, 4, 3)
    assert [_epoch(plain, n) for n in range(3)] == [_epoch(weighted, n) for n in range(3)]


def test_weighted_epochs_differ_and_are_reproducible() -> None:
    groups = [replace(_group("cats", 10), weight=0.5)]
    epochs = [set(_shown(BatchOrder(groups, 2, 0), n)) for n in range(4)]
    everyone = {sample.key for sample in groups[0].samples}
    assert epochs[0] | epochs[1] == epochs[2] | epochs[3] == everyone
    assert epochs[0] != epochs[2]
    forward = BatchOrder(groups, 2, 0)
    backward = [set(_shown(forward, n)) for n in (3, 2, 1, 0)]
    assert backward == epochs[::-1]


@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 3))
def test_a_weighted_order_resumes_with_another_number_of_ranks(
    consumed: int, before: int, after: int
) -> None:
    groups = [replace(_group("cats", 7), weight=1.3), replace(_group("dogs", 5), weight=0.4)]
    order = BatchOrder(groups, 2, 11)
    straight = [order.batch_at(index) for index in range(consumed * before + after)]
    resumed = [
        _draws(
            next(
                Loader(BatchOrder(groups, 2, 11), _load, RankShare(rank, after), consumed * before)
            )[0]
        )
        for rank in range(after)
    ]
    assert resumed == straight[consumed * before :]


THREADS = Prefetch(num_workers=3, depth=6, timeout_s=20)


def load_keys(draws: Sequence[Draw]) -> Batch:
    """Return the keys; a function of a module, which another process can import."""
    return cast("Batch", Loaded(tuple(draw.sample.key for draw in draws)))


def refuse_three(draws: Sequence[Draw]) -> Batch:
    if any(draw.sample.key.endswith("/3.png") for draw in draws):
        raise OSError("the disk is gone")
    return _load(draws)


@pytest.mark.parametrize("prefetch", [THREADS, THREADS._replace(processes=True)])
def test_prefetching_changes_neither_batches_nor_states(prefetch: Prefetch) -> None:
    groups = [_group("cats", 11, 2, 0.3), replace(_group("dogs", 7, size=(16, 8)), weight=0.6)]
    plain = Loader(BatchOrder(groups, 3, 5), load_keys, RankShare(1, 2), 4)
    ahead = Loader(BatchOrder(groups, 3, 5), load_keys, RankShare(1, 2), 4, prefetch)
    for _ in range(25):
        assert next(ahead) == next(plain)


def test_a_state_taken_while_prefetching_resumes_exactly() -> None:
    groups = [_group("cats", 11, 2, 0.3)]
    ahead = Loader(BatchOrder(groups, 3, 5), _load, prefetch=THREADS)
    for _ in range(9):
        _, state = next(ahead)
    assert state.consumed == 9
    rest = [next(ahead)[0] for _ in range(9)]
    for prefetch in (Prefetch(), THREADS, THREADS._replace(num_workers=1, depth=1)):
        again = Loader(BatchOrder(groups, 3, 5), _load, RankShare(), state.consumed, prefetch)
        assert [next(again)[0] for _ in range(9)] == rest


def test_a_batch_that_cannot_be_loaded_is_named_by_its_samples() -> None:
    loader = Loader(BatchOrder([_group("cats", 4)], 4, 0), refuse_three, prefetch=THREADS)
    with pytest.raises(RunFailedError, match=r"dataset 'cats': .*/3\.png.*OSError: the disk is"):
        next(loader)
    many = BatchOrder([_group("cats", 20)], 20, 0).batch_at(0)
    assert describe_batch(many).count(".png") == 8
    assert describe_batch(many).endswith(", ...")


def test_a_batch_that_hangs_ends_the_run_after_its_timeout() -> None:
    def hang(_: Sequence[Draw]) -> Batch:
        time.sleep(3600)
        raise AssertionError

    loader = Loader(BatchOrder([_group("cats", 4)], 2, 0), hang, prefetch=Prefetch(2, 4, 0.5))
    with pytest.raises(RunFailedError, match=r"'cats': .*\.png, .*\.png: loading it took"):
        next(loader)


def test_one_draw_per_size_starts_with_the_largest() -> None:
    sizes = [(8, 8), (8, 24), (16, 16)]
    groups = [_group("cats", 3, size=size) for size in sizes] + [_group("dogs", 2, size=(8, 8))]
    order = BatchOrder(groups, 2, 0)
    assert [draw.size for draw in order.one_draw_per_size()] == [(16, 16), (8, 24), (8, 8)]
    assert order.largest_draw() == (order.one_draw_per_size()[0],)
    assert {draw.epoch for draw in order.one_draw_per_size()} == {-1}, "they belong to no epoch"


def test_batch_sizes_include_last_batches_and_those_of_a_ramp() -> None:
    groups = [_group("cats", 7, size=(8, 8)), _group("dogs", 8, size=(8, 16))]
    order = BatchOrder(groups, 4, 0)
    met = {len(order.batch_at(index)) for index in range(order.epoch_length)}
    assert order.batch_sizes() == met == {3, 4}
    assert BatchOrder(groups, 4, 0, first_sizes=[1, 1]).batch_sizes() >= {1, 3, 4}


# The batches of a step, at any number of ranks

sizes_in_seconds = {(8, 8): 1.0, (8, 16): 2.5, (16, 8): 7.0}


def _seconds(size: Shape, num_samples: int) -> float:
    return sizes_in_seconds[size[0], size[1]] * (0.5 + num_samples)


def _ramp(consumed: int) -> int:
    """Return steps of 4 global batches at first and of 9 later."""
    return 4 if consumed < 20 else 9


def _take_step(loader: Loader) -> list[tuple[Batch, LoaderState]]:
    """Take the batches of one step, as the training loop does."""
    taken = [next(loader)]
    while taken[-1][1].batches_left:
        taken.append(next(loader))
    return taken


@given(groups_strategy, batch_sizes, seeds, st.integers(1, 4), st.booleans())
def test_a_step_has_the_same_batches_at_any_number_of_ranks(
    groups: list[BucketGroup], batch_size: int, seed: int, world: int, timed: bool
) -> None:
    order = BatchOrder(groups, batch_size, seed)
    loaders = [
        Loader(
            BatchOrder(groups, batch_size, seed),
            _load,
            RankShare(rank, world, _ramp, _seconds if timed else None),
        )
        for rank in range(world)
    ]
    consumed = 0
    for _ in range(8):
        steps = [_take_step(loader) for loader in loaders]
        for step in steps:
            *middle, (_, last) = step
            assert all(state.consumed == consumed for _, state in middle)
            assert last.consumed == consumed + _ramp(consumed)
            assert {state.step_batches for _, state in step} == {len(step)}
            indices = [batch.index for batch, _ in step]
            assert indices == sorted(indices)
        together = sorted((b for step in steps for b, _ in step), key=lambda batch: batch.index)
        assert [batch.index for batch in together] == list(
            range(consumed, consumed + _ramp(consumed))
        )
        assert [_draws(b) for b in together] == [order.batch_at(b.index) for b in together]
        consumed += _ramp(consumed)


first_sizes_strategy = st.lists(st.integers(1, 4), max_size=12).map(sorted)


@given(groups_strategy, batch_sizes, seeds, first_sizes_strategy)
def test_small_first_batches_are_pieces_of_the_usual_ones_in_their_order(
    groups: list[BucketGroup], batch_size: int, seed: int, first_sizes: list[int]
) -> None:
    usual = BatchOrder(groups, batch_size, seed)
    order = BatchOrder(groups, batch_size, seed, first_sizes=first_sizes)
    batches, taken = iter(map(usual.batch_at, itertools.count())), 0
    index = epoch = 0
    while index < len(first_sizes) + 5:
        whole = next(batches)
        pieces: list[Draw] = []
        while len(pieces) < len(whole):
            piece = order.batch_at(index)
            limit = first_sizes[index] if index < len(first_sizes) else batch_size
            assert len(piece) == min(limit, len(whole) - len(pieces))
            assert order.size_at(index) == (piece[0].size, len(piece))
            epoch = taken // usual.epoch_length
            assert order.epoch_at(index) == epoch
            pieces += piece
            index += 1
        assert tuple(pieces) == whole
        taken += 1


@given(groups_strategy, batch_sizes, seeds, first_sizes_strategy, st.integers(1, 5), st.booleans())
def test_a_step_with_fewer_batches_than_ranks_is_cut_into_a_part_for_each(
    groups: list[BucketGroup],
    batch_size: int,
    seed: int,
    first_sizes: list[int],
    world: int,
    timed: bool,
) -> None:
    order = BatchOrder(groups, batch_size, seed, first_sizes=first_sizes)

    def step_size(consumed: int) -> int:
        count = 1
        while order.num_samples(consumed, count) < world:
            count += 1
        return count

    shares = [
        RankShare(rank, world, step_size, _seconds if timed else None) for rank in range(world)
    ]
    loaders = [Loader(order, _load, share) for share in shares]
    consumed = 0
    for _ in range(6):
        parts = [batch for loader in loaders for batch, _ in _take_step(loader)]
        whole = [order.batch_at(consumed + place) for place in range(step_size(consumed))]
        assert len(parts) == max(world, len(whole))
        parts.sort(key=lambda part: (part.index, part.first))
        assert [draw for part in parts for draw in _draws(part)] == [
            draw for batch in whole for draw in batch
        ]
        for part in parts:
            assert part.of in (None, len(whole[part.index - consumed]))
            assert _draws(part) == whole[part.index - consumed][part.first :][: len(_draws(part))]
        if len(whole) == 1:
            counts = [len(_draws(part)) for part in parts]
            assert max(counts) - min(counts) <= 1
        consumed += step_size(consumed)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(0, 3))
def test_a_run_that_is_cut_in_a_step_resumes_at_its_start_with_other_ranks(
    before: int, after: int, steps: int, extra: int
) -> None:
    groups = [_group("cats", 9), _group("dogs", 5, size=(16, 8))]

    def loader(rank: int, world: int, consumed: int = 0, workers: int = 0) -> Loader:
        return Loader(
            BatchOrder(groups, 2, 3),
            _load,
            RankShare(rank, world, _ramp, _seconds),
            consumed,
            Prefetch(workers),
        )

    first = loader(0, before, workers=2)  # which loads batches in advance
    state = LoaderState(0)
    for _ in range(steps):
        state = _take_step(first)[-1][1]
    for _ in range(extra):
        state = next(first)[1]
    ends = list(itertools.accumulate(range(12), lambda done, _: done + _ramp(done), initial=0))
    assert state.consumed in ends
    resumed = [
        batch.index
        for rank in range(after)
        for batch, _ in _take_step(loader(rank, after, state.consumed))
    ]
    assert sorted(resumed) == list(range(state.consumed, state.consumed + _ramp(state.consumed)))


@given(groups_strategy, batch_sizes, st.integers(0, 40))
def test_size_at_agrees_with_the_batch(
    groups: list[BucketGroup], batch_size: int, index: int
) -> None:
    order = BatchOrder(groups, batch_size, 0)
    draws = order.batch_at(index)
    assert order.size_at(index) == (draws[0].size, len(draws))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=24), st.integers(1, 8))
def test_balance_divides_all_tasks_and_keeps_grahams_bound(
    seconds: list[float], world: int
) -> None:
    assume(len(seconds) >= world)
    ranks = balance(seconds, world)
    assert sorted(itertools.chain(*ranks)) == list(range(len(seconds)))
    assert all(ranks)
    # The best time is at least the mean, the longest task, and two of the world + 1 longest.
    ordered = sorted(seconds, reverse=True)
    best = max(sum(seconds) / world, ordered[0])
    if len(seconds) > world:
        best = max(best, ordered[world - 1] + ordered[world])
    slowest = max(sum(seconds[place] for place in own) for own in ranks)
    assert slowest <= best * (2 - 1 / world) + 1e-9


def test_balance_takes_equal_tasks_in_turn_and_long_ones_alone() -> None:
    assert balance([1.0] * 7, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert balance([1, 1, 6, 1, 1, 1, 1], 2) == [[2], [0, 1, 3, 4, 5, 6]]
    assert balance([0.0] * 4, 4) == [[0], [1], [2], [3]], "each rank takes part in every step"
    with pytest.raises(AssertionError, match="2 micro-batches for 3 ranks"):
        balance([1.0, 1.0], 3)


def _mixed_order(batch_size: int = 1) -> BatchOrder:
    groups = [_group("a", 40), _group("a", 25, size=(8, 16)), _group("a", 15, size=(16, 8))]
    return BatchOrder(groups, batch_size, 0)


def test_the_planned_balance_is_that_of_the_assignments() -> None:
    order = _mixed_order()
    share = RankShare(0, 2, None, _seconds).with_steps_of(4)
    slowest, means = [], []
    for consumed in range(0, order.epoch_length, 4):
        ranks = [
            sum(_seconds(order.batch_at(part.index)[0].size, 1) for part in own)
            for own in share.assign(order, consumed)
        ]
        slowest.append(max(ranks))
        means.append(sum(ranks) / 2)
    found = plan_balance(order, share)
    ratios = [worst / mean - 1 for worst, mean in zip(slowest, means, strict=True)]
    assert found.imbalance == pytest.approx(sum(ratios) / len(ratios))
    assert found.waiting == pytest.approx(1 - sum(means) / sum(slowest))
    same = plan_balance(order, replace(share, batch_seconds=lambda *_: 1.0))
    assert same.imbalance == same.waiting == 0


def test_ranks_that_wait_long_get_a_suggestion_that_is_true() -> None:
    order, share = _mixed_order(), RankShare(1, 4, None, _seconds)
    text = describe_imbalance(order, share)
    found = re.fullmatch(
        r"ranks: 4 ranks wait (\d+)% of the planned time for each other, because samples of "
        r"different sizes take different times; train\.gradient_accumulation_steps: (\d+) would "
        r"lower it to (\d+)%",
        text,
    )
    assert found, text
    now, steps, then = map(int, found.groups())
    better = plan_balance(order, share.with_steps_of(4 * steps))
    assert round(100 * better.waiting) == then < now
    assert describe_imbalance(order, share.with_steps_of(4 * steps)) == ""
    assert (
        describe_imbalance(order, RankShare()) == describe_imbalance(order, RankShare(0, 2)) == ""
    )
    assert describe_imbalance(order, RankShare(0, 2).with_steps_of(3)) == (
        "ranks: 2 ranks wait 25% of the planned time for each other, because they cannot share 3 "
        "micro-batches evenly; train.gradient_accumulation_steps: 2 would lower it to 0%"
    )
    samples = describe_imbalance(order, share, samples=3)
    assert f"train.effective_batch_size: {4 * steps * 3} would" in samples


def mixed_order(similar, seed=3):
    """Batches of one sample in four sizes, of which small ones are frequent."""
    groups = [
        BucketGroup(
            tuple(Sample("d", f"{frames}/{n}", "", "0", 8, 8) for n in range(count)),
            1,
            0.0,
            (8, 8, frames),
        )
        for frames, count in ((1, 90), (5, 60), (9, 35), (17, 20))
    ]
    return BatchOrder(groups, 1, seed, similar)


@pytest.mark.parametrize("similar", [1, 2, 5, 8])
def test_similar_batches_are_the_same_set_in_another_order(similar):
    order = mixed_order(similar)
    for epoch in range(3):
        first = epoch * order.epoch_length
        keys = [order.batch_at(first + n)[0].sample.key for n in range(order.epoch_length)]
        assert len(set(keys)) == len(keys) == order.epoch_length


def test_the_batches_of_a_step_have_similar_sizes():
    def sizes_in_steps(order):
        steps = 3 * order.epoch_length // 8
        return [len({order.size_at(8 * step + n)[0] for n in range(8)}) for step in range(steps)]

    similar, shuffled = (sizes_in_steps(mixed_order(count)) for count in (8, 1))
    assert sum(shuffled) / len(shuffled) > 2.5
    assert sum(similar) / len(similar) < 1.3, similar
    assert similar.count(1) > 0.75 * len(similar)


def test_steps_of_similar_batches_come_in_random_order():
    order = mixed_order(8)
    sizes = [order.size_at(8 * step)[0][2] for step in range(order.epoch_length // 8)]
    assert sizes != sorted(sizes)
    assert sizes != sorted(sizes, reverse=True)


def test_similar_batches_are_suggested_if_they_shorten_the_waiting():
    order, share = mixed_order(1), RankShare(0, 4, None, lambda size, count: size[2] * count)
    text = describe_imbalance(order, share)
    found = re.search(r"wait (\d+)% .*; train\.similar_batches: 4 to (\d+)%$", text)
    assert found, text
    now, then = map(int, found.groups())
    assert round(100 * plan_balance(order.with_similar(4), share).waiting) == then < now / 2
    assert "similar_batches" not in describe_imbalance(order.with_similar(4), share)
