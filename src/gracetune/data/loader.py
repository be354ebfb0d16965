"""Decide in which order a run sees its samples, and iterate over batches in that order.

The order is a pure function of the seed, the groups of samples and the batch size: an endless
sequence of global batches that the ranks take in turn (rank r of n takes batches r, r + n, ...).
A run's position in it is one number, the count of global batches consumed by all ranks together,
so a checkpoint resumes with any number of ranks.

The random functions at the end of the file hash a text into random numbers. There is no generator
whose state could be lost: the same text always gives the same number.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import count
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

INLINE = Prefetch()
"""Load each batch when it is requested; the right choice when loading is a lookup in memory."""
LOOKAHEAD_BATCHES = 8
"""Number of batches between announcing a batch to the stores and loading it."""
NO_EPOCH = -1
"""Epoch of a draw that belongs to no epoch, such as a held-out sample."""
MAX_NAMED_SAMPLES = 8
"""Number of samples of a batch that an error message lists."""


@dataclass(frozen=True, slots=True)
class BucketGroup:
    """The samples of one dataset that share a bucket, and how often they are shown."""

    samples: tuple[Sample, ...]
    repeats: int
    """Times that an epoch shows each sample."""
    caption_dropout: float
    """Probability that a draw has an empty caption."""
    size: Shape
    """Shape of the bucket."""
    weight: float = 1.0
    """Factor on `repeats`; fractions are averages over epochs."""

    @property
    def draws_per_epoch(self) -> int:
        """Number of draws in an epoch, at least one for a group that is not empty."""
        if not self.samples:
            return 0
        return max(1, round(len(self.samples) * self.repeats * self.weight))


@dataclass(frozen=True, slots=True)
class Draw:
    """A sample as one batch shows it."""

    sample: Sample
    caption: str
    """The sample's caption, or an empty string if it was dropped."""
    size: Shape
    """Shape of the sample's bucket."""
    epoch: int = NO_EPOCH
    """Epoch whose random crop and augmentations are used; `NO_EPOCH` uses those of epoch 0."""


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The position of a run in its data; all that a checkpoint stores about it."""

    consumed: int
    """Number of global batches that all ranks together have taken."""

    def epoch(self, order: BatchOrder) -> int:
        """Return the epoch that the next batch belongs to."""
        return self.consumed // order.epoch_length


@dataclass(frozen=True, slots=True)
class _ShuffledEpoch:
    number: int
    entries: NDArray[np.int64]
    """Indices of all draws, shuffled within each size."""
    batches: NDArray[np.int64]
    """Bounds (start, stop) of each batch in `entries`, shuffled."""
    extras: Mapping[int, NDArray[np.int64]]
    """By group index: samples that this epoch shows once more than the others of the group."""


class BatchOrder:
    """An endless sequence of epochs; all samples of a batch have the same size.

    An epoch shows each sample `repeats` times. If `weight` makes that a fraction, consecutive
    epochs show different samples once more, until every sample has had its turn.
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
                "No dataset has a sample left to train on. Add samples to datasets[0], or lower "
                "validation.holdout."
            )
        self._spans = self._spans_by_size()
        self._bounds = np.concatenate([self._batch_bounds(*span) for span in self._spans])
        self._epoch = self._shuffle(0)

    @property
    def epoch_length(self) -> int:
        """Number of global batches in an epoch."""
        return len(self._bounds)

    @property
    def samples_per_epoch(self) -> int:
        """Number of draws in an epoch, repeats included."""
        return int(self._starts[-1])

    def batch_at(self, index: int) -> tuple[Draw, ...]:
        """Return global batch `index`. The last epoch is cached, so reading forward is cheap."""
        number, place = divmod(index, self.epoch_length)
        if number != self._epoch.number:
            self._epoch = self._shuffle(number)
        start, stop = self._epoch.batches[place]
        return tuple(self._draw(int(entry), number) for entry in self._epoch.entries[start:stop])

    def largest_draw(self) -> tuple[Draw, ...]:
        """Return one sample of the largest size as a batch, to measure the peak of memory with."""
        return (self.one_draw_per_size()[0],)

    def one_draw_per_size(self) -> list[Draw]:
        """Return one draw of each size, the largest first.

        The draws have no epoch, so that loading one does not start an augmentation epoch.
        """
        draws = [replace(self._draw(start, 0), epoch=NO_EPOCH) for start, _ in self._spans]
        return sorted(draws, key=lambda draw: prod(draw.size), reverse=True)

    def draws_by_size(self) -> dict[Shape, int]:
        """Return how many draws of each size an epoch has."""
        counts: Counter[Shape] = Counter()
        for group in self._groups:
            counts[group.size] += group.draws_per_epoch
        return counts

    def _spans_by_size(self) -> list[tuple[int, int]]:
        """Return (start, stop) of the draws of each size; groups are sorted by size."""
        spans: dict[Shape, tuple[int, int]] = {}
        for group, start, stop in zip(
            self._groups, self._starts[:-1], self._starts[1:], strict=True
        ):
            spans[group.size] = (spans.get(group.size, (int(start), 0))[0], int(stop))
        return [(start, stop) for start, stop in spans.values() if stop > start]

    def _batch_bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        """Cut the draws of one size into batches; the last one may be smaller."""
        starts = np.arange(start, stop, self._batch_size, dtype=np.int64)
        return np.stack([starts, np.minimum(starts + self._batch_size, stop)], axis=1)

    def _shuffle(self, number: int) -> _ShuffledEpoch:
        entries = np.arange(self._starts[-1], dtype=np.int64)
        for start, stop in self._spans:
            entries[start:stop] = start + seeded_permutation(
                stop - start, f"entries {self._seed} {number} {start}"
            )
        order = seeded_permutation(len(self._bounds), f"batches {self._seed} {number}")
        extras = {
            index: self._extra_samples(index, number)
            for index, group in enumerate(self._groups)
            if group.samples and group.draws_per_epoch % len(group.samples)
        }
        return _ShuffledEpoch(number, entries, self._bounds[order], extras)

    def _extra_samples(self, index: int, number: int) -> NDArray[np.int64]:
        """Return the samples that epoch `number` shows once more, for one group.

        Epochs read consecutive pieces of one endless sequence of shuffles of the group.
        """
        group = self._groups[index]
        count, share = len(group.samples), group.draws_per_epoch % len(group.samples)
        start = number * share
        rounds = range(start // count, (start + share - 1) // count + 1)
        seed = f"extras {self._seed} {group.samples[0].dataset!r} {group.size}"
        shuffles = [seeded_permutation(count, f"{seed} {turn}") for turn in rounds]
        return np.concatenate(shuffles)[start - rounds[0] * count :][:share]

    def _draw(self, entry: int, epoch: int) -> Draw:
        index = int(np.searchsorted(self._starts, entry, side="right")) - 1
        group = self._groups[index]
        repeat, place = divmod(entry - int(self._starts[index]), len(group.samples))
        if repeat == group.draws_per_epoch // len(group.samples):
            place = int(self._epoch.extras[index][place])
        sample = group.samples[place]
        seed = f"caption {self._seed} {epoch} {repeat} {sample.dataset!r} {sample.key!r}"
        dropped = group.caption_dropout > 0 and seeded_uniform(seed) < group.caption_dropout
        return Draw(sample, "" if dropped else sample.caption, group.size, epoch)


class Loader:
    """An endless iterator of `(batch, state)` for one rank.

    Pass `state.consumed` to a new loader to continue after that batch. The state counts batches
    that were taken, not batches that were prefetched, so it does not depend on the number of
    workers or ranks.
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
        """Start after `consumed` global batches.

        `load` turns draws into a batch, in the workers of `prefetch` if it has any. `will_need` is
        called with each batch's draws `LOOKAHEAD_BATCHES` batches before they are loaded.
        """
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self._world_size = world_size
        self._consumed = consumed
        draws: Iterator[tuple[Draw, ...]]
        draws = map(order.batch_at, count(consumed + rank, world_size))
        if will_need is not None:
            draws = _announce_ahead(draws, will_need)
        self._batches: Iterator[Batch]
        if prefetch.num_workers:
            self._batches = prefetched(draws, load, describe_batch, prefetch)
        else:
            self._batches = map(load, draws)

    def __iter__(self) -> Iterator[tuple[Batch, LoaderState]]:
        return self

    def __next__(self) -> tuple[Batch, LoaderState]:
        batch = next(self._batches)
        self._consumed += self._world_size
        return batch, LoaderState(self._consumed)


def _announce_ahead(
    batches: Iterator[tuple[Draw, ...]], will_need: Callable[[Sequence[Draw]], None]
) -> Iterator[tuple[Draw, ...]]:
    """Yield the same batches, calling `will_need` on each `LOOKAHEAD_BATCHES` batches earlier."""
    waiting: deque[tuple[Draw, ...]] = deque()
    for draws in batches:
        will_need(draws)
        waiting.append(draws)
        if len(waiting) > LOOKAHEAD_BATCHES:
            yield waiting.popleft()


def describe_batch(draws: Sequence[Draw]) -> str:
    """Name a batch by its samples, for the message of a worker that failed on it."""
    keys = [draw.sample.key for draw in draws[:MAX_NAMED_SAMPLES]]
    keys += ["..."] * (len(draws) > MAX_NAMED_SAMPLES)
    return f"dataset {draws[0].sample.dataset!r}: {', '.join(keys)}"


# Random numbers that are pure functions of a text: equal in every process, thread and release.


def seeded_permutation(length: int, seed: str) -> NDArray[np.int64]:
    """Return a random permutation of `range(length)`.

    Uses raw PCG64 bits and a stable sort, because only those are guaranteed to be the same in
    every numpy release.
    """
    bits = np.random.PCG64(seeded_bits(seed, 16)).random_raw(length)
    return np.argsort(bits, kind="stable")


def seeded_uniform(seed: str) -> float:
    """Return a random number in [0, 1)."""
    return (seeded_bits(seed, 8) >> 11) / 2**53


def seeded_bits(seed: str, nbytes: int) -> int:
    """Return `nbytes` random bytes as an unsigned integer."""
    return int.from_bytes(blake3(seed.encode()).digest(length=nbytes), "big")
