"""Decide the order in which a run sees its samples, and iterate over batches in that order.

The order is an endless sequence of micro-batches, which depends only on the seed, the samples and
the batch size. They are called global batches, because they are numbered over all ranks. An
optimizer step takes the next few of them and divides them among the ranks, by planned time: the
number of ranks changes which rank computes a batch, never which batches a step contains. If a step
has fewer batches than ranks, they are cut into parts. The position of a run is a single number, the
count of global batches in all finished steps, so a checkpoint can be resumed with another number of
ranks.

The random functions at the end of the file hash a text to a random number, so there is no random
generator whose state must be saved.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from gracetune.data.prefetch import Prefetch, prefetched
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gracetune.data.sample import Batch, Sample, Shape

    BatchSeconds = Callable[[Shape, int], float]
    """Planned seconds of a micro-batch: function of the sample size and the number of samples."""

INLINE = Prefetch()
"""Prefetch settings without workers: each batch is loaded when it is requested. Suitable if loading
a batch is a lookup in memory."""
LOOKAHEAD_BATCHES = 8
"""Number of batches that a loader announces to the caches before it loads them, so that the caches
can read ahead."""
SIMILARITY_WINDOW = 64
"""Number of groups of similar batches that are chosen together. In a larger window, the batches of
a group are more similar; in a smaller one, the order is more random."""
NO_EPOCH = -1
"""Epoch number of samples that are loaded outside of training epochs, such as held-out samples."""
MAX_NAMED_SAMPLES = 8
"""Number of samples of a batch that an error message lists."""


MAX_IMBALANCE = 0.1
"""Imbalance of ranks above which a run suggests more micro-batches in a step."""
MAX_BALANCED_BATCHES = 10_000
"""Number of batches of an epoch from which the balance of ranks is estimated."""


@dataclass(frozen=True, slots=True)
class BucketGroup:
    """The samples of one dataset in one bucket, and how often each is used."""

    samples: tuple[Sample, ...]
    repeats: int
    """Number of times that an epoch uses each sample, before `weight`."""
    caption_dropout: float
    """Probability that a sample is used with an empty caption."""
    size: Shape
    """Shape of the bucket, to which all samples are cropped and resized."""
    weight: float = 1.0
    """Factor of `repeats`. If the product is not an integer, it is the average over epochs."""

    @property
    def draws_per_epoch(self) -> int:
        """Number of samples in an epoch, counting repeats; at least 1 unless the group is empty."""
        if not self.samples:
            return 0
        return max(1, round(len(self.samples) * self.repeats * self.weight))


@dataclass(frozen=True, slots=True)
class Draw:
    """One use of a sample in a batch."""

    sample: Sample
    caption: str
    """Caption of the sample, perhaps shuffled, or an empty string if dropout removed it."""
    size: Shape
    """Shape of the sample's bucket, to which it is cropped and resized."""
    epoch: int = NO_EPOCH
    """Epoch that determines the random crop and augmentations; `NO_EPOCH` uses those of epoch 0."""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The position of a run in its sequence of batches, after one of this rank's batches.

    A checkpoint stores `consumed` only, which is the same on all ranks and changes with the last
    batch of a step.
    """

    consumed: int
    """Number of global batches (of all ranks) in the steps that are complete."""
    step_batches: int = 0
    """Number of batches that this rank has in the step of the last batch; 0 before the first."""
    batches_left: int = 0
    """Number of those that this rank has not yet taken; 0 if the last batch ended the step."""

    def epoch(self, order: BatchOrder) -> int:
        """Return the epoch that the first batch of the next step belongs to."""
        return order.epoch_at(self.consumed)


@dataclass(frozen=True, slots=True)
class _ShuffledEpoch:
    number: int
    draws: NDArray[np.int64]
    """Indices of all draws (uses of a sample) of the epoch, shuffled within each bucket."""
    batches: NDArray[np.int64]
    """Each batch as a range (start, stop) of positions in `draws`; the batches are shuffled."""
    extras: Mapping[int, NDArray[np.int64]]
    """For each `BucketGroup` by its index: the indices of the samples that this epoch uses once
    more than the others, because `weight` makes the number of repeats fractional."""


class BatchOrder:
    """The endless sequence of batches of a run. All samples of a batch have the same size.

    An epoch uses each sample `repeats * weight` times. If that is not an integer, some samples are
    used once more than the others; the next epoch chooses others, until each has had its turn.
    """

    def __init__(
        self,
        groups: Sequence[BucketGroup],
        batch_size: int,
        seed: int,
        similar: int = 1,
        first_sizes: Sequence[int] = (),
    ) -> None:
        """Order the batches of these groups.

        Each `similar` successive batches, counted from the start of the run, have similar sample
        sizes; 1 shuffles all batches. `first_sizes` are the sizes of the first batches of the run,
        if they are smaller than `batch_size`: the usual batches are cut into such pieces, in their
        usual order. The last piece of each may be smaller.
        """
        assert batch_size >= 1, f"a batch of {batch_size}"
        assert all(size >= 1 for size in first_sizes), first_sizes
        self._similar = similar
        self._groups = sorted(groups, key=lambda group: group.size)
        self._batch_size = batch_size
        self._seed = seed
        lengths = [group.draws_per_epoch for group in self._groups]
        self._starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        if self._starts[-1] == 0:
            raise DataError(
                "No dataset has a sample left to train on. Add samples to datasets[0], or lower "
                "validation.holdout."
            )
        self._spans = self._spans_by_size()
        self._bounds = np.concatenate([self._batch_bounds(*span) for span in self._spans])
        sizes = np.array([prod(group.size) for group in self._groups])
        starts, stops = self._bounds.T
        owners = np.searchsorted(self._starts, starts, side="right") - 1
        self._elements = sizes[owners] * (stops - starts)
        # Two epochs, because a step may begin in one epoch and end in the next.
        self._epoch = lru_cache(maxsize=2)(self._shuffle)
        self._first_sizes = first_sizes
        self._pieces = self._cut_first_batches(first_sizes)

    def with_similar(self, similar: int) -> BatchOrder:
        """Return the same batches in an order with another number of similar ones."""
        return BatchOrder(self._groups, self._batch_size, self._seed, similar, self._first_sizes)

    @property
    def epoch_length(self) -> int:
        """Number of batches of the usual size in an epoch, over all ranks."""
        return len(self._bounds)

    def epoch_at(self, index: int) -> int:
        """Return the epoch that the batch with this number belongs to."""
        return self._place(index)[0] // self.epoch_length

    def num_samples(self, index: int, count: int) -> int:
        """Return the samples in `count` batches together, from the one with this number on."""
        return sum(self.size_at(each)[1] for each in range(index, index + count))

    def batch_at(self, index: int) -> tuple[Draw, ...]:
        """Return the samples of the batch with this number, counted over all ranks and epochs.

        The order of two epochs is kept in memory, so consecutive batches are cheap.
        """
        batch, first, last = self._place(index)
        epoch = self._epoch(batch // self.epoch_length)
        start, stop = epoch.batches[batch % self.epoch_length]
        entries = epoch.draws[start:stop][first:last]
        return tuple(self._draw(int(entry), epoch) for entry in entries)

    def size_at(self, index: int) -> tuple[Shape, int]:
        """Return the sample size of the batch with this number, and its number of samples.

        It is much cheaper than `batch_at`, because it chooses no samples and no captions.
        """
        batch, first, last = self._place(index)
        start, stop = self._bounds_of(batch)
        size = self._groups[self._group_of(start)].size
        return size, stop - start if last is None else last - first

    def largest_draw(self) -> tuple[Draw, ...]:
        """Return a batch of one sample of the largest size, to find the peak memory use."""
        return (self.one_draw_per_size()[0],)

    def one_draw_per_size(self) -> list[Draw]:
        """Return one sample of each size, the largest size first.

        Their epoch is `NO_EPOCH`, so that loading them does not start to encode the augmented
        samples of the next epoch.
        """
        epoch = self._epoch(0)
        draws = [replace(self._draw(start, epoch), epoch=NO_EPOCH) for start, _ in self._spans]
        return sorted(draws, key=lambda draw: prod(draw.size), reverse=True)

    def batch_sizes(self) -> frozenset[int]:
        """Return the numbers of samples in batches; the last batch of a bucket may be smaller."""
        starts, stops = self._bounds.T
        cut = {last - first for _, first, last in self._pieces}
        return frozenset(map(int, stops - starts)) | cut

    def draws_by_size(self) -> dict[Shape, int]:
        """Return the number of samples of each size in an epoch, counting repeats."""
        counts: Counter[Shape] = Counter()
        for group in self._groups:
            counts[group.size] += group.draws_per_epoch
        return counts

    def _place(self, index: int) -> tuple[int, int, int | None]:
        """Return the usual batch that a batch is cut from, and its first and last place in it."""
        if index >= len(self._pieces):
            cut = self._pieces[-1][0] + 1 if self._pieces else 0
            return index - len(self._pieces) + cut, 0, None
        return self._pieces[index]

    def _bounds_of(self, batch: int) -> tuple[int, int]:
        number, place = divmod(batch, self.epoch_length)
        start, stop = self._epoch(number).batches[place]
        return int(start), int(stop)

    def _cut_first_batches(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Cut the first batches into pieces of these sizes, as (batch, first, last)."""
        pieces: list[tuple[int, int, int]] = []
        for batch in itertools.count():
            if len(pieces) >= len(sizes):
                return pieces
            start, stop = self._bounds_of(batch)
            first, length = 0, stop - start
            while first < length:
                size = sizes[len(pieces)] if len(pieces) < len(sizes) else length
                pieces.append((batch, first, min(first + size, length)))
                first += size
        raise AssertionError("unreachable")

    def _spans_by_size(self) -> list[tuple[int, int]]:
        """Return, for each sample size, the range (start, stop) of its draw numbers.

        A draw is one use of a sample; the draws of an epoch are numbered by size.
        """
        spans: dict[Shape, tuple[int, int]] = {}
        for group, start, stop in zip(
            self._groups, self._starts[:-1], self._starts[1:], strict=True
        ):
            spans[group.size] = (spans.get(group.size, (int(start), 0))[0], int(stop))
        return [(start, stop) for start, stop in spans.values() if stop > start]

    def _batch_bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        """Split a range of draws (uses of samples of one size) into batches, as rows (start, stop).

        The last batch may be smaller than the others.
        """
        starts = np.arange(start, stop, self._batch_size, dtype=np.int64)
        return np.stack([starts, np.minimum(starts + self._batch_size, stop)], axis=1)

    def _shuffle(self, number: int) -> _ShuffledEpoch:
        entries = np.arange(self._starts[-1], dtype=np.int64)
        for start, stop in self._spans:
            entries[start:stop] = start + seeded_permutation(
                stop - start, f"entries {self._seed} {number} {start}"
            )
        order = seeded_permutation(len(self._bounds), f"batches {self._seed} {number}")
        if self._similar > 1:
            order = self._group_similar(order, number)
        extras = {
            index: self._extra_samples(index, number)
            for index, group in enumerate(self._groups)
            if group.samples and group.draws_per_epoch % len(group.samples)
        }
        return _ShuffledEpoch(number, entries, self._bounds[order], extras)

    def _group_similar(self, order: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Sort batches by size within windows, cut each window into groups, and shuffle these.

        Groups begin at multiples of `similar` in the sequence of the whole run, so that the first
        batches of an epoch complete the last group of the epoch before.
        """
        count = self._similar
        first = min(-(number * len(order)) % count, len(order))
        pieces = [order[:first]]
        for start in range(first, len(order), SIMILARITY_WINDOW * count):
            window = order[start : start + SIMILARITY_WINDOW * count]
            window = window[np.argsort(self._elements[window], kind="stable")]
            whole = len(window) // count * count
            groups = window[:whole].reshape(-1, count)
            seed = f"groups {self._seed} {number} {start}"
            pieces += [groups[seeded_permutation(len(groups), seed)].ravel(), window[whole:]]
        return np.concatenate(pieces)

    def _group_of(self, entry: int) -> int:
        return int(np.searchsorted(self._starts, entry, side="right")) - 1

    def _extra_samples(self, index: int, number: int) -> NDArray[np.int64]:
        """Return the samples of a group that epoch `number` uses once more than the others.

        They are given by their indices in the group. Shuffled copies of the group form an endless
        sequence, of which each epoch takes the next piece. Every sample is therefore chosen equally
        often.
        """
        group = self._groups[index]
        count, share = len(group.samples), group.draws_per_epoch % len(group.samples)
        start = number * share
        rounds = range(start // count, (start + share - 1) // count + 1)
        seed = f"extras {self._seed} {group.samples[0].dataset!r} {group.size}"
        shuffles = [seeded_permutation(count, f"{seed} {turn}") for turn in rounds]
        return np.concatenate(shuffles)[start - rounds[0] * count :][:share]

    def _draw(self, entry: int, shuffled: _ShuffledEpoch) -> Draw:
        index = self._group_of(entry)
        group = self._groups[index]
        repeat, place = divmod(entry - int(self._starts[index]), len(group.samples))
        if repeat == group.draws_per_epoch // len(group.samples):
            place = int(shuffled.extras[index][place])
        sample, epoch = group.samples[place], shuffled.number
        seed = f"caption {self._seed} {epoch} {repeat} {sample.dataset!r} {sample.key!r}"
        if group.caption_dropout > 0 and seeded_uniform(seed) < group.caption_dropout:
            return Draw(sample, "", group.size, epoch)
        uses_per_epoch = -(-group.draws_per_epoch // len(group.samples))
        captions = sample.captions
        caption = captions[(epoch * uses_per_epoch + repeat) % len(captions)]
        return Draw(sample, caption, group.size, epoch)


# Dividing the batches of a step among ranks


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A global batch, or the part of one that a rank computes."""

    index: int
    """Number of the global batch."""
    start: int = 0
    """Place of the part's first sample in the batch."""
    stop: int | None = None
    """Place after the part's last sample; None for a whole batch."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """The rule that divides the global batches of each optimizer step among ranks.

    Every rank computes the assignment of all ranks by itself, from the same rule.
    """

    rank: int = 0
    world_size: int = 1
    step_size: Callable[[int], int] | None = None
    """`step_size(consumed)` is the number of global batches in the step that begins after
    `consumed` of them; None means one for each rank. It is called in advance, perhaps in another
    thread, so its result must depend on its argument only."""
    batch_seconds: BatchSeconds | None = None
    """Planned time of a batch, the same function on all ranks; None means that all batches take
    equally long."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} of {self.world_size}"

    def num_batches(self, consumed: int) -> int:
        """Return the number of global batches in the step after the first `consumed` batches."""
        return self.world_size if self.step_size is None else self.step_size(consumed)

    def with_steps_of(self, num_batches: int) -> RankShare:
        """Return the same rule for steps that all have this number of global batches."""
        return replace(self, step_size=lambda _: num_batches)

    def seconds_at(self, order: BatchOrder, part: BatchPart) -> float:
        """Return the planned time of a global batch or a part of it.

        If no times are planned, a batch takes 1, and a part its share of that.
        """
        size, whole = order.size_at(part.index)
        count = whole if part.stop is None else part.stop - part.start
        return count / whole if self.batch_seconds is None else self.batch_seconds(size, count)

    def assign(self, order: BatchOrder, consumed: int) -> list[list[BatchPart]]:
        """Return the global batches, or parts of them, that each rank computes in one step.

        The step is the one after the first `consumed` batches.
        """
        indices = range(consumed, consumed + self.num_batches(consumed))
        parts = [BatchPart(index) for index in indices]
        if self.world_size == 1:
            return [parts]
        if len(parts) < self.world_size:
            return [[part] for part in self._cut(order, indices)]
        seconds = [self.seconds_at(order, part) for part in parts]
        return [[parts[place] for place in own] for own in balance(seconds, self.world_size)]

    def _cut(self, order: BatchOrder, indices: Sequence[int]) -> list[BatchPart]:
        """Cut the batches of a step into one part for each rank.

        Each further part is taken from the batch whose parts are the longest so far.
        """
        sizes = {index: order.size_at(index) for index in indices}
        counts = {index: count for index, (_, count) in sizes.items()}
        assert sum(counts.values()) >= self.world_size, f"{counts} for {self.world_size} ranks"
        measure = self.batch_seconds or (lambda _, count: count)
        seconds = {index: measure(*size) for index, size in sizes.items()}
        num_parts = dict.fromkeys(indices, 1)
        for _ in range(self.world_size - len(indices)):
            divisible = (index for index in indices if num_parts[index] < counts[index])
            longest = max(divisible, key=lambda index: (seconds[index] / num_parts[index], -index))
            num_parts[longest] += 1
        return [
            BatchPart(index, counts[index] * part // parts, counts[index] * (part + 1) // parts)
            for index, parts in num_parts.items()
            for part in range(parts)
        ]


SINGLE_SHARE = RankShare()
"""The rule of a run with one rank, whose steps have one batch each."""


def balance(seconds: Sequence[float], world_size: int) -> list[list[int]]:
    """Divide tasks that take this long among ranks, so that the slowest rank is done early.

    Returns the indices of each rank's tasks, ascending. The longest task is assigned first, each to
    the rank with the least work so far (longest processing time first, Graham 1969: at most 4/3 of
    the best possible time of the slowest rank). Ties go to the rank with fewer tasks, then to the
    lower rank, so tasks of equal length are taken in turn. Each rank gets at least one task.
    """
    assert len(seconds) >= world_size, f"{len(seconds)} micro-batches for {world_size} ranks"
    assert all(one >= 0 for one in seconds), f"negative times: {seconds}"
    ranks = [(0.0, 0, rank) for rank in range(world_size)]  # seconds, number of tasks, rank
    assigned: list[list[int]] = [[] for _ in range(world_size)]
    for index in sorted(range(len(seconds)), key=lambda index: (-seconds[index], index)):
        busy, num_tasks, rank = heapq.heappop(ranks)
        assigned[rank].append(index)
        heapq.heappush(ranks, (busy + seconds[index], num_tasks + 1, rank))
    return [sorted(own) for own in assigned]


@dataclass(frozen=True, slots=True)
class RankBalance:
    """The planned time that ranks wait for each other, over the steps of an epoch."""

    imbalance: float
    """Mean over steps of (time of the slowest rank / mean time of all ranks - 1)."""
    waiting: float
    """Share of the planned time in which a rank waits for the slowest one, 0 to 1."""


def plan_balance(order: BatchOrder, share: RankShare) -> RankBalance:
    """Return how evenly the steps of the first epoch are divided among ranks.

    Of a long epoch, only the first `MAX_BALANCED_BATCHES` batches are looked at.
    """
    slowest: list[float] = []
    means: list[float] = []
    consumed = 0
    while not means or consumed < min(order.epoch_length, MAX_BALANCED_BATCHES):
        seconds = [
            sum(share.seconds_at(order, part) for part in own)
            for own in share.assign(order, consumed)
        ]
        slowest.append(max(seconds))
        means.append(sum(seconds) / len(seconds))
        consumed += share.num_batches(consumed)
    ratios = (worst / mean - 1 for worst, mean in zip(slowest, means, strict=True))
    return RankBalance(sum(ratios) / len(means), 1 - sum(means) / sum(slowest))


def describe_imbalance(order: BatchOrder, share: RankShare, samples: int | None = None) -> str:
    """Return a line for the log if ranks wait long for each other; an empty text if they do not.

    It names settings with which they would wait less: more micro-batches in a step, or batches of
    similar size. `samples` is the number of samples in a micro-batch, if the run file sets
    `train.effective_batch_size` instead of `train.gradient_accumulation_steps`.
    """
    now = plan_balance(order, share)
    if now.imbalance <= MAX_IMBALANCE:
        return ""
    text = f"ranks: {share.world_size} ranks wait {now.waiting:.0%} of the planned time for each"
    if share.batch_seconds is None:
        text += f" other, because they cannot share {share.num_batches(0)} micro-batches evenly"
    else:
        text += " other, because samples of different sizes take different times"
    current = share.num_batches(0) / share.world_size
    best: tuple[RankBalance, int] = (now, 0)
    for accumulation in (2, 4, 8, 16):
        if accumulation <= current or best[0].imbalance <= MAX_IMBALANCE:
            continue
        found = plan_balance(order, share.with_steps_of(accumulation * share.world_size))
        if found.waiting < best[0].waiting:
            best = found, accumulation
    balance_then, accumulation = best
    if accumulation:
        setting = f"train.gradient_accumulation_steps: {accumulation}"
        if samples is not None:
            setting = f"train.effective_batch_size: {accumulation * share.world_size * samples}"
        text += f"; {setting} would lower it to {balance_then.waiting:.0%}"
    similar = plan_balance(order.with_similar(share.num_batches(0)), share)
    if share.batch_seconds is not None and similar.waiting < now.waiting / 2:
        text += f"; train.similar_batches: {share.num_batches(0)} to {similar.waiting:.0%}"
    return text


# Loading batches


class Loader:
    """An endless iterator over the batches of one rank, as pairs `(batch, state)`.

    Pass `state.consumed` to a new loader to continue with the step after the last complete one.
    Prefetched batches that were not taken do not count, so the state does not depend on the number
    of workers.
    """

    def __init__(
        self,
        order: BatchOrder,
        load: Callable[[Sequence[Draw]], Batch],
        share: RankShare = SINGLE_SHARE,
        consumed: int = 0,
        prefetch: Prefetch = INLINE,
        will_need: Callable[[Sequence[Draw]], None] | None = None,
    ) -> None:
        """Start at the optimizer step that follows the first `consumed` global batches.

        `load` reads the batch of some draws (uses of samples) in the workers of `prefetch`, if
        there are any. `will_need` is called with the draws of each batch `LOOKAHEAD_BATCHES`
        batches earlier than `load`, so that caches can read ahead.
        """
        planned = _planned_batches(order, share, consumed)
        if will_need is not None:
            planned = _announce_ahead(planned, will_need)
        self._batches: Iterator[tuple[Batch, LoaderState]]
        if prefetch.num_workers:
            self._batches = prefetched(
                planned,
                partial(_load_planned, load),
                lambda one: describe_batch(one.draws),
                prefetch,
            )
        else:
            self._batches = map(partial(_load_planned, load), planned)

    def __iter__(self) -> Iterator[tuple[Batch, LoaderState]]:
        return self

    def __next__(self) -> tuple[Batch, LoaderState]:
        return next(self._batches)


@dataclass(frozen=True, slots=True)
class _PlannedBatch:
    """A batch of this rank that is not loaded yet, with the state after it."""

    part: BatchPart
    batch_size: int
    """Number of samples in the whole batch."""
    draws: tuple[Draw, ...]
    state: LoaderState


def _load_planned(
    load: Callable[[Sequence[Draw]], Batch], planned: _PlannedBatch
) -> tuple[Batch, LoaderState]:
    part = planned.part
    batch = replace(load(planned.draws), index=part.index)
    if part.stop is not None:
        batch = replace(batch, first=part.start, of=planned.batch_size)
    return batch, planned.state


def _planned_batches(order: BatchOrder, share: RankShare, consumed: int) -> Iterator[_PlannedBatch]:
    """Yield the batches of one rank, step by step and in the order of their numbers."""
    while True:
        own = share.assign(order, consumed)[share.rank]
        after = consumed + share.num_batches(consumed)
        for left, part in zip(reversed(range(len(own))), own, strict=True):
            state = LoaderState(consumed if left else after, len(own), left)
            draws = order.batch_at(part.index)
            yield _PlannedBatch(part, len(draws), draws[part.start : part.stop], state)
        consumed = after


def _announce_ahead(
    batches: Iterator[_PlannedBatch], will_need: Callable[[Sequence[Draw]], None]
) -> Iterator[_PlannedBatch]:
    """Yield the batches unchanged, each `LOOKAHEAD_BATCHES` batches after its call of `will_need`.

    That call lets caches read the samples of the batch ahead.
    """
    waiting: deque[_PlannedBatch] = deque()
    for planned in batches:
        will_need(planned.draws)
        waiting.append(planned)
        if len(waiting) > LOOKAHEAD_BATCHES:
            yield waiting.popleft()


def describe_batch(draws: Sequence[Draw]) -> str:
    """Return the dataset and the samples of a batch as text, for error messages."""
    keys = [draw.sample.key for draw in draws[:MAX_NAMED_SAMPLES]]
    keys += ["..."] * (len(draws) > MAX_NAMED_SAMPLES)
    return f"dataset {draws[0].sample.dataset!r}: {', '.join(keys)}"


# Random numbers that depend only on a text. They are the same in every process and release.


def seeded_permutation(length: int, seed: str) -> NDArray[np.int64]:
    """Return a random permutation of `range(length)` that depends only on the text `seed`.

    It uses raw PCG64 bits and a stable sort, because numpy guarantees that only those stay the same
    in all releases.
    """
    bits = np.random.PCG64(seeded_bits(seed, 16)).random_raw(length)
    return np.argsort(bits, kind="stable")


def seeded_uniform(seed: str) -> float:
    """Return a random number in [0, 1) that depends only on the text `seed`."""
    return (seeded_bits(seed, 8) >> 11) / 2**53


def seeded_bits(seed: str, nbytes: int) -> int:
    """Return a random unsigned integer of `nbytes` bytes that depends only on the text `seed`."""
    return int.from_bytes(blake3(seed.encode()).digest(length=nbytes), "big")
