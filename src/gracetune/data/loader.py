"""The order in which a run sees its samples, and the iterator over it.

The order is a pure function of seed, groups and batch size: an endless row of global batches that
ranks take in turn. Where a run stands in it is one number, whatever the number of ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from gracetune.data.augment import seeded_permutation, seeded_uniform
from gracetune.data.prefetch import Prefetch, prefetched
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gracetune.data.sample import Batch, Sample, Shape

INLINE = Prefetch()
"""Each batch is loaded when it is asked for: right where loading is a look into memory."""
LOOKAHEAD_BATCHES = 8
"""Batches that a disk has time to read, when whoever reads them is told in advance."""
NO_EPOCH = -1
MAX_NAMED_SAMPLES = 8
"""How many samples of a batch a message names."""


@dataclass(frozen=True, slots=True)
class BucketGroup:
    """One bucket of one data set, and how that data set is shown."""

    samples: tuple[Sample, ...]
    repeats: int
    caption_dropout: float
    size: Shape
    weight: float = 1.0
    """Times `repeats`: how often an epoch shows each sample on average."""

    @property
    def draws_per_epoch(self) -> int:
        """Draws in an epoch; at least one, so that no sample is lost to rounding."""
        if not self.samples:
            return 0
        return max(1, round(len(self.samples) * self.repeats * self.weight))


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample as one batch shows it."""

    sample: Sample
    caption: str
    """Empty where it was dropped."""
    size: Shape
    epoch: int = NO_EPOCH
    """Whose random crops and augmentations are shown; -1: always the first."""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """How many global batches all ranks together have taken: all that a checkpoint keeps."""

    consumed: int

    def epoch(self, order: BatchOrder) -> int:
        """The epoch that the next batch belongs to."""
        return self.consumed // order.epoch_length


@dataclass(frozen=True, slots=True)
class _Epoch:
    number: int
    entries: NDArray[np.int64]
    """Every entry, shuffled within its size."""
    batches: NDArray[np.int64]
    """Bounds (first, past the last) of each batch in `entries`, shuffled."""
    extras: Mapping[int, NDArray[np.int64]]
    """By group with a fraction: the samples that this epoch shows once more than the others."""


class BatchOrder:
    """Epochs without end; batches never mix sizes.

    An epoch shows every sample `repeats` times. Where a weight makes that a fraction, epochs take
    turns: every sample is shown once more before any is again.
    """

    def __init__(self, groups: Sequence[BucketGroup], batch_size: int, seed: int) -> None:
        assert batch_size >= 1, f"a batch of {batch_size}"
        self._groups = sorted(groups, key=lambda group: group.size)
        self._batch_size = batch_size
        self._seed = seed
        lengths = [group.draws_per_epoch for group in self._groups]
        self._starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        if self._starts[-1] == 0:
            raise DataError(
                "no data set has a sample left to train on. Add pictures to datasets[0], or lower "
                "validation.holdout."
            )
        self._spans = self._spans_by_size()
        self._bounds = np.concatenate([self._cut(*span) for span in self._spans])
        self._epoch = self._shuffled(0)

    @property
    def epoch_length(self) -> int:
        """Global batches in an epoch."""
        return len(self._bounds)

    @property
    def samples_per_epoch(self) -> int:
        """Draws in an epoch, repeats counted."""
        return int(self._starts[-1])

    def batch_at(self, index: int) -> tuple[Draw, ...]:
        """The global batch of this number. One epoch is kept, so going forward is cheap."""
        number, place = divmod(index, self.epoch_length)
        if number != self._epoch.number:
            self._epoch = self._shuffled(number)
        first, last = self._epoch.batches[place]
        return tuple(self._draw(int(entry), number) for entry in self._epoch.entries[first:last])

    def largest_draw(self) -> tuple[Draw, ...]:
        """One sample of the largest size: what fits it fits all."""
        return (self.one_draw_per_size()[0],)

    def one_draw_per_size(self) -> list[Draw]:
        """One sample of each size, the largest first; of no epoch, since looking enters none."""
        draws = [replace(self._draw(first, 0), epoch=NO_EPOCH) for first, _ in self._spans]
        return sorted(draws, key=lambda draw: prod(draw.size), reverse=True)

    def draws_by_size(self) -> dict[Shape, int]:
        """How many samples of each size an epoch shows, repeats counted."""
        counts: Counter[Shape] = Counter()
        for group in self._groups:
            counts[group.size] += group.draws_per_epoch
        return counts

    def _spans_by_size(self) -> list[tuple[int, int]]:
        """Groups are sorted by size, so the entries of one size lie side by side."""
        spans: dict[Shape, tuple[int, int]] = {}
        for group, first, last in zip(
            self._groups, self._starts[:-1], self._starts[1:], strict=True
        ):
            spans[group.size] = (spans.get(group.size, (int(first), 0))[0], int(last))
        return [(first, last) for first, last in spans.values() if last > first]

    def _cut(self, first: int, last: int) -> NDArray[np.int64]:
        """Bounds of the batches of one size; the last may be smaller, none is left out."""
        starts = np.arange(first, last, self._batch_size, dtype=np.int64)
        return np.stack([starts, np.minimum(starts + self._batch_size, last)], axis=1)

    def _shuffled(self, number: int) -> _Epoch:
        entries = np.arange(self._starts[-1], dtype=np.int64)
        for first, last in self._spans:
            entries[first:last] = first + seeded_permutation(
                last - first, f"entries {self._seed} {number} {first}"
            )
        order = seeded_permutation(len(self._bounds), f"batches {self._seed} {number}")
        extras = {
            at: self._extras(at, number)
            for at, group in enumerate(self._groups)
            if group.samples and group.draws_per_epoch % len(group.samples)
        }
        return _Epoch(number, entries, self._bounds[order], extras)

    def _extras(self, at: int, number: int) -> NDArray[np.int64]:
        """The next few of an endless row of shuffles of the group's samples."""
        group = self._groups[at]
        count, share = len(group.samples), group.draws_per_epoch % len(group.samples)
        first = number * share
        rounds = range(first // count, (first + share - 1) // count + 1)
        about = f"extras {self._seed} {group.samples[0].dataset!r} {group.size}"
        row = np.concatenate([seeded_permutation(count, f"{about} {turn}") for turn in rounds])
        return row[first - rounds[0] * count :][:share]

    def _draw(self, entry: int, epoch: int) -> Draw:
        at = int(np.searchsorted(self._starts, entry, side="right")) - 1
        group = self._groups[at]
        repeat, place = divmod(entry - int(self._starts[at]), len(group.samples))
        if repeat == group.draws_per_epoch // len(group.samples):
            place = int(self._epoch.extras[at][place])
        sample = group.samples[place]
        what = f"caption {self._seed} {epoch} {repeat} {sample.dataset!r} {sample.key!r}"
        dropped = group.caption_dropout > 0 and seeded_uniform(what) < group.caption_dropout
        return Draw(sample, "" if dropped else sample.caption, group.size, epoch)


class Loader:
    """An endless iterator of (batch, state); handing the state's number back resumes it.

    With `prefetch` the next batches are loaded ahead. The state is that of the batches taken, never
    of those loaded, so that it resumes alike with any number of workers or ranks.
    """

    def __init__(
        self,
        order: BatchOrder,
        load: Callable[[Sequence[Draw]], Batch],
        rank: int = 0,
        world_size: int = 1,
        consumed: int = 0,
        prefetch: Prefetch = INLINE,
        will_need: Callable[[Sequence[Draw]], None] | None = None,
    ) -> None:
        """`will_need` is told of each batch a few batches before it is loaded."""
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self._world = world_size
        self._consumed = consumed
        mine = map(order.batch_at, count(consumed + rank, world_size))
        told = mine if will_need is None else _announced(mine, will_need)
        self._batches = (
            prefetched(told, load, describe_batch, prefetch) if prefetch.num_workers else map(load, told)
        )

    def __iter__(self) -> Iterator[tuple[Batch, LoaderState]]:
        return self

    def __next__(self) -> tuple[Batch, LoaderState]:
        batch = next(self._batches)
        self._consumed += self._world
        return batch, LoaderState(self._consumed)


def _announced(
    batches: Iterator[tuple[Draw, ...]], will_need: Callable[[Sequence[Draw]], None]
) -> Iterator[tuple[Draw, ...]]:
    """The same batches, each told of `ANNOUNCED` batches before it comes."""
    waiting: deque[tuple[Draw, ...]] = deque()
    for draws in batches:
        will_need(draws)
        waiting.append(draws)
        if len(waiting) > LOOKAHEAD_BATCHES:
            yield waiting.popleft()


def describe_batch(draws: Sequence[Draw]) -> str:
    """A batch by its samples, for the message of a worker that failed on it."""
    keys = [draw.sample.key for draw in draws[:MAX_NAMED_SAMPLES]] + ["..."] * (len(draws) > MAX_NAMED_SAMPLES)
    return f"data set {draws[0].sample.dataset!r}: {', '.join(keys)}"
