"""How random crops and augmentations meet the cache: which draw an epoch shows, and who keeps it.

A generation is one draw for every sample. `static` cycles through a few that stay in the cache.
With `refresh_each_epoch` each epoch has one of its own: it is encoded while the epoch before is
trained on, taken into use between two epochs, and deleted when nobody reads it any more. Draws come
from the seed, the sample and the generation alone, so a restarted run makes the same ones again.
"""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Literal

from gracetune.atomic_files import write_text
from gracetune.errors import ConfigError, GracetuneError, RunFailedError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gracetune.cache.encode import Ranks
    from gracetune.cache.store import Store
    from gracetune.config.schema import DatasetSection

AugmentationMode = Literal["static", "refresh_each_epoch", "disable_cache"]

NO_EPOCH = -1
"""Of samples that are always shown alike, such as those held out."""


def augmentation_mode(section: DatasetSection) -> AugmentationMode:
    """What a run file asks for; where nothing is random every mode is `static`."""
    if not is_randomized(section):
        return "static"
    return section.augmentations_cache_mode or "static"


def is_randomized(section: DatasetSection) -> bool:
    """Whether two generations of a sample may differ at all."""
    clipped = section.dataset_type != "image" and section.clip == "random"
    return bool(section.augmentations) or section.crop == "random" or clipped


def augmentation_epoch(section: DatasetSection, epoch: int) -> int:
    """The generation that an epoch shows."""
    if epoch == NO_EPOCH:
        return 0
    return epoch % section.variants if augmentation_mode(section) == "static" else epoch


def check_variants(section: DatasetSection, index: int) -> None:
    """Variants are a way of `static`, and need something to vary."""
    if section.variants == 1:
        return
    here = f"datasets[{index}].variants is {section.variants}"
    if section.augmentations_cache_mode not in (None, "static"):
        raise ConfigError(
            f"{here}; with augmentations_cache_mode: {section.augmentations_cache_mode} every "
            "epoch has a draw of its own. Set it to static, or leave variants out."
        )
    if not is_randomized(section):
        raise ConfigError(
            f"{here}, but nothing is drawn at random. Add augmentations, crop: random or "
            "clip: random, or leave variants out."
        )


class EncodingStopped(Exception):  # noqa: N818  nothing went wrong
    """A generation is not needed any more."""


class AugmentationEpochs:
    """The stores of a refreshed cache; asked by one thread, in the order of epochs."""

    def __init__(
        self,
        first: Store,
        open_store: Callable[[int], Store],
        fill: Callable[[Store, int, threading.Event], None],
        entered: Callable[[int], None],
        emit: Callable[[Notice], None],
    ) -> None:
        """`first` has generation 0 and is not ours. `entered` may delete what lies behind.

        `fill` looks at its event now and then, and raises `FillingStopped` once it is set.
        """
        self._first = first
        self._open_store = open_store
        self._fill = fill
        self._entered = entered
        self._emit = emit
        self._number = NO_EPOCH
        self._current = first
        self._next: _Filling | None = None

    def store_for(self, number: int) -> Store:
        """The store of an epoch, complete; the next one is begun when an epoch is entered."""
        if number != self._number:
            left, self._current = self._current, self._ready(number)
            if left is not self._first:
                left.close()
            self._number = number
            self._entered(number)
            self._next = self._begun(number + 1)
        return self._current

    def current_store(self, number: int) -> Store | None:
        """The store of an epoch, if it is the one that is read now."""
        return self._current if number == self._number else None

    def close(self) -> None:
        """Let the generation that is being made be; whoever asks for it again begins it anew."""
        self._stop_next()
        if self._current is not self._first:
            self._current.close()

    def _ready(self, number: int) -> Store:
        """After a restart nothing was begun; where a step went back to an epoch, another one."""
        if self._next is not None and self._next.number != number:
            self._stop_next()
        if number == 0:
            return self._first
        self._next = self._next or self._begun(number)
        return self._next.result()

    def _stop_next(self) -> None:
        if self._next is None:
            return
        unheard = self._next.stop()
        self._next = None
        if unheard:
            self._emit(Notice(f"{unheard} It was not needed yet.", level="warning"))

    def _begun(self, number: int) -> _Filling:
        store = self._open_store(number)
        return _Filling(number, store, lambda stopping: self._fill(store, number, stopping))


class _Filling:
    """A generation on its way, by a thread."""

    def __init__(self, number: int, store: Store, fill: Callable[[threading.Event], None]) -> None:
        self.number = number
        self._stopping = threading.Event()
        self._store = store
        self._fill = fill
        self._error: Exception | None = None
        self._asked = False
        self._thread = threading.Thread(
            target=self._work, name=f"gracetune-generation-{number}", daemon=True
        )
        self._thread.start()

    def result(self) -> Store:
        self._thread.join()
        self._asked = True
        if isinstance(self._error, GracetuneError):
            raise self._error
        if self._error is not None:
            raise RunFailedError(self._why()) from self._error
        return self._store

    def stop(self) -> str:
        """What went wrong, where nobody has asked; empty: nothing."""
        self._stopping.set()
        self._thread.join()
        self._store.close()
        return "" if self._asked or self._error is None else self._why()

    def _why(self) -> str:
        return (
            f"generation {self.number} of the latent cache cannot be encoded: "
            f"{type(self._error).__name__}: {self._error}."
        )

    def _work(self) -> None:
        try:
            self._fill(self._stopping)
        except EncodingStopped:
            return
        except Exception as error:  # noqa: BLE001  whoever waits for the generation raises it
            self._error = error


class AugmentationEpochFolder:
    """Generations as folders of one run, which nobody else uses: only these are ever deleted."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder = folder
        self._ranks = ranks

    def path(self, number: int) -> Path:
        """Where the entries of one generation are."""
        return self._folder / f"generation-{number}"

    def entered(self, number: int) -> None:
        """This rank reads `number` from now on; what no rank reads or makes is deleted."""
        write_text(self._mark(self._ranks.rank), str(number))
        marks = [self._mark(rank) for rank in range(self._ranks.world_size)]
        if self._ranks.rank == 0 and all(mark.exists() for mark in marks):
            for path in unread_epochs(self._folder, marks):
                shutil.rmtree(path)

    def _mark(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}-reads"


def unread_epochs(folder: Path, marks: Sequence[Path]) -> list[Path]:
    """The generations that no rank reads or makes next, as its mark says; without a mark, all."""
    reading = [int(mark.read_text()) for mark in marks]
    first, last = min(reading, default=0), max(reading, default=-2) + 1
    return [
        path
        for path in sorted(folder.glob("generation-*"))
        if not first <= int(path.name.partition("-")[2]) <= last
    ]


def read_marks(folder: Path) -> list[Path]:
    """What the ranks of a run have last said that they read."""
    return sorted(folder.glob("rank-*-reads"))
