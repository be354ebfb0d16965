"""The order in which a run sees its samples, and the iterator over it.

The order is a pure function of seed, groups and batch size: an endless row of global batches that
ranks take in turn. Where a run stands in it is one number, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from gracetune.data.sample import Batch, Sample, Size


@dataclass(frozen=True, slots=True)
class Group:
    """One bucket of one data set, and how that data set is shown."""

    samples: tuple[Sample, ...]
    repeats: int
    caption_dropout: float
    size: Size


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample as one batch shows it."""

    sample: Sample
    caption: str
    """Empty where it was dropped."""
    size: Size


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


class BatchOrder:
    """Epochs without end: each shows every sample `repeats` times, batches never mix sizes."""

    def __init__(self, groups: Sequence[Group], batch_size: int, seed: int) -> None:
        assert batch_size >= 1, f"a batch of {batch_size}"
        self._groups = sorted(groups, key=lambda group: group.size)
        self._batch_size = batch_size
        self._seed = seed
        lengths = [len(group.samples) * group.repeats for group in self._groups]
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

    def at(self, index: int) -> tuple[Draw, ...]:
        """The global batch of this number. One epoch is kept, so going forward is cheap."""
        number, place = divmod(index, self.epoch_length)
        if number != self._epoch.number:
            self._epoch = self._shuffled(number)
        first, last = self._epoch.batches[place]
        return tuple(self._draw(int(entry), number) for entry in self._epoch.entries[first:last])

    def _spans_by_size(self) -> list[tuple[int, int]]:
        """Groups are sorted by size, so the entries of one size lie side by side."""
        spans: dict[Size, tuple[int, int]] = {}
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
            entries[first:last] = first + _permutation(
                last - first, f"entries {self._seed} {number} {first}"
            )
        order = _permutation(len(self._bounds), f"batches {self._seed} {number}")
        return _Epoch(number, entries, self._bounds[order])

    def _draw(self, entry: int, epoch: int) -> Draw:
        at = int(np.searchsorted(self._starts, entry, side="right")) - 1
        group = self._groups[at]
        repeat, place = divmod(entry - int(self._starts[at]), len(group.samples))
        sample = group.samples[place]
        what = f"caption {self._seed} {epoch} {repeat} {sample.dataset!r} {sample.key!r}"
        dropped = group.caption_dropout > 0 and _uniform(what) < group.caption_dropout
        return Draw(sample, "" if dropped else sample.caption, group.size)


class Loader:
    """An endless iterator of (batch, state); handing the state's number back resumes it."""

    def __init__(
        self,
        order: BatchOrder,
        load: Callable[[Sequence[Draw]], Batch],
        rank: int = 0,
        world: int = 1,
        consumed: int = 0,
    ) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self._order = order
        self._load = load
        self._rank = rank
        self._world = world
        self._consumed = consumed

    def __iter__(self) -> Iterator[tuple[Batch, LoaderState]]:
        return self

    def __next__(self) -> tuple[Batch, LoaderState]:
        batch = self._load(self._order.at(self._consumed + self._rank))
        self._consumed += self._world
        return batch, LoaderState(self._consumed)


def _permutation(length: int, what: str) -> NDArray[np.int64]:
    """A shuffle that no numpy release changes: only raw bits and a stable sort are promised."""
    bits = np.random.PCG64(_bits(what, 16)).random_raw(length)
    return np.argsort(bits, kind="stable")


def _uniform(what: str) -> float:
    return (_bits(what, 8) >> 11) / 2**53


def _bits(what: str, nbytes: int) -> int:
    return int.from_bytes(blake3(what.encode()).digest(length=nbytes), "big")
