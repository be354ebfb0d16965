"""Combine random crops and augmentations with the latent cache.

An augmentation epoch is one random crop and one set of augmentations for every sample. The random
numbers depend only on the seed, the sample and the number of the augmentation epoch, so a restarted
run produces the same ones. `datasets[].augmentations_cache_mode` chooses when the augmented samples
are encoded:

static              `variants` augmentation epochs are encoded before training; training epochs
                    use them in turn.
refresh_each_epoch  every training epoch has an augmentation epoch of its own. It is encoded in the
                    background during the previous training epoch, and deleted once no rank reads
                    it any more.
disable_cache       samples are encoded when a batch needs them; nothing is cached.

The latents of `refresh_each_epoch` are kept in the run's folder, under these names, which are part
of the format:

    generations/generation-N   the cache of augmentation epoch N
    generations/rank-R-reads   the number of the augmentation epoch that rank R reads

Machines after the first have their own, in generations/machine-M.
"""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Literal, Protocol

from gracetune.atomic_files import write_text
from gracetune.data.batch_order import NO_EPOCH
from gracetune.errors import ConfigError, GracetuneError, RunFailedError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gracetune.cache.encode import Ranks
    from gracetune.cache.store import Store
    from gracetune.config.dataset_schema import DatasetSection

AugmentationMode = Literal["static", "refresh_each_epoch", "disable_cache"]

FOLDER = "generations"
"""Subfolder of a run's folder with the cached latents of datasets with `refresh_each_epoch`."""


def augmentation_mode(section: DatasetSection) -> AugmentationMode:
    """Return when a dataset's samples are augmented and encoded (`augmentations_cache_mode`).

    The mode is `static` (once, before training) if nothing in the dataset is random.
    """
    if not is_randomized(section):
        return "static"
    return section.augmentations_cache_mode or "static"


def is_randomized(section: DatasetSection) -> bool:
    """Return True if a dataset has augmentations, random crops or random clips."""
    random_clip = section.dataset_type != "image" and section.clip == "random"
    return bool(section.augmentations) or section.crop == "random" or random_clip


def augmentation_epoch(section: DatasetSection, epoch: int) -> int:
    """Return which random version of its samples (augmentation epoch) a training epoch uses.

    `static` datasets repeat their `variants` versions; the others have a new one in every epoch.
    `augmentation_cache_epoch` is that of the first epoch.
    """
    number = section.augmentation_cache_epoch + max(0, epoch)  # NO_EPOCH is like the first epoch
    return number % section.variants if augmentation_mode(section) == "static" else number


def check_variants(section: DatasetSection, index: int) -> None:
    """Raise an error if a dataset sets `variants`, its number of random versions, without effect.

    It has an effect only if something is random and `augmentations_cache_mode` is `static`.
    """
    if section.variants == 1:
        return
    setting = f"datasets[{index}].variants is {section.variants}"
    if section.augmentations_cache_mode not in (None, "static"):
        raise ConfigError(
            f"{setting}, but with augmentations_cache_mode: {section.augmentations_cache_mode} "
            "every epoch has random augmentations of its own. Set augmentations_cache_mode: "
            "static, or remove variants."
        )
    if not is_randomized(section):
        raise ConfigError(
            f"{setting}, but the dataset has nothing random to vary. Add augmentations, "
            "crop: random or clip: random, or remove variants."
        )


class EncodingStopped(Exception):  # noqa: N818  not an error
    """Raised by `EpochEncoder.encode` when its caller asked it to stop; not an error."""


class EpochEncoder(Protocol):
    """Encodes randomly augmented samples into a cache per epoch; see data/pipeline.py."""

    def open_store(self, epoch: int) -> Store:
        """Open the cache store for the augmented samples of one epoch."""
        ...

    def encode(self, store: Store, epoch: int, stopping: threading.Event) -> None:
        """Encode all samples, augmented for `epoch`, into the store; called in a background thread.

        Raises `EncodingStopped` once the event `stopping` is set.
        """
        ...

    def entered(self, epoch: int) -> None:
        """Record that this rank now reads the cache of `epoch`; older caches may be deleted."""
        ...


class EpochCaches:
    """Gives each training epoch a cache of newly augmented samples.

    While one epoch trains, the samples of the next epoch are augmented and encoded in the
    background. For datasets with `augmentations_cache_mode: refresh_each_epoch`. Used by one
    thread.
    """

    def __init__(self, first: Store, encoder: EpochEncoder, emit: Callable[[Notice], None]) -> None:
        """Start with `first`, the filled cache store of epoch 0, which the caller closes."""
        self._first = first
        self._encoder = encoder
        self._emit = emit
        self._epoch = NO_EPOCH
        self._current = first
        self._next: _BackgroundEncoding | None = None

    def store_for(self, epoch: int) -> Store:
        """Return the cache store with all augmented samples of a training epoch.

        The first call for an epoch waits until its samples are encoded, then starts encoding those
        of the next epoch in the background.
        """
        if epoch != self._epoch:
            previous, self._current = self._current, self._wait_for(epoch)
            if previous is not self._first:
                previous.close()
            self._epoch = epoch
            self._encoder.entered(epoch)
            self._next = self._start(epoch + 1)
        return self._current

    def current_store(self, epoch: int) -> Store | None:
        """Return the cache store of `epoch` if `store_for` was last called for it, else None."""
        return self._current if epoch == self._epoch else None

    def close(self) -> None:
        """Stop encoding the next epoch in the background, and close the current store.

        `store_for` still works afterwards; it encodes the samples that are missing.
        """
        self._stop_next()
        if self._current is not self._first:
            self._current.close()

    def _wait_for(self, epoch: int) -> Store:
        """Wait until an epoch's samples are encoded, and return their cache store.

        Starts encoding them if no background thread does so already.
        """
        if self._next is not None and self._next.epoch != epoch:
            self._stop_next()
        if epoch == 0:
            return self._first
        self._next = self._next or self._start(epoch)
        return self._next.result()

    def _stop_next(self) -> None:
        if self._next is None:
            return
        unreported = self._next.stop()
        self._next = None
        if unreported:
            self._emit(Notice(f"{unreported} It was not needed yet.", level="warning"))

    def _start(self, epoch: int) -> _BackgroundEncoding:
        return _BackgroundEncoding(epoch, self._encoder)


class _BackgroundEncoding:
    """A background thread that encodes the augmented samples of one epoch."""

    def __init__(self, epoch: int, encoder: EpochEncoder) -> None:
        self.epoch = epoch
        self._store = encoder.open_store(epoch)
        self._encoder = encoder
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._reported = False
        self._thread = threading.Thread(
            target=self._work, name=f"gracetune-augment-{epoch}", daemon=True
        )
        self._thread.start()

    def result(self) -> Store:
        """Wait for the thread and return the filled cache store; raise its error if it failed."""
        self._thread.join()
        self._reported = True
        if isinstance(self._error, GracetuneError):
            raise self._error
        if self._error is not None:
            raise RunFailedError(self._message()) from self._error
        return self._store

    def stop(self) -> str:
        """Stop the thread; return its error message; empty if none, or if `result` raised it."""
        self._stopping.set()
        self._thread.join()
        self._store.close()
        return "" if self._reported or self._error is None else self._message()

    def _message(self) -> str:
        return (
            f"Encoding augmentation epoch {self.epoch} failed: "
            f"{type(self._error).__name__}: {self._error}."
        )

    def _work(self) -> None:
        try:
            self._encoder.encode(self._store, self.epoch, self._stopping)
        except EncodingStopped:
            return
        except Exception as error:  # noqa: BLE001  raised again by `result`, or reported by `stop`
            self._error = error


class AugmentationEpochFolder:
    """The folder with the caches of augmented samples, one per epoch; deletes unneeded ones."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder = ranks.machine_folder(folder)
        self._ranks = ranks

    def path(self, epoch: int) -> Path:
        """Return the folder with the cached, augmented samples of one epoch."""
        return self._folder / f"generation-{epoch}"

    def entered(self, epoch: int) -> None:
        """Write to a file that this rank reads the cache of `epoch`.

        The first rank of a machine also deletes the caches of epochs that none needs any more.
        """
        write_text(self._mark(self._ranks.rank), str(epoch))
        marks = [self._mark(rank) for rank in self._ranks.cache_ranks]
        if self._ranks.is_first and all(mark.exists() for mark in marks):
            for path in unread_epochs(self._folder, marks):
                shutil.rmtree(path)

    def _mark(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}-reads"


def unread_epochs(folder: Path, marks: Sequence[Path]) -> list[Path]:
    """Return the cache folders of those epochs whose augmented samples no rank needs any more.

    `marks` are files, one per rank, with the number of the epoch that the rank reads. A rank that
    reads epoch N encodes N + 1, so the epochs from the lowest number to the highest plus one are in
    use. Without marks, no epoch is in use.
    """
    reading = [int(mark.read_text()) for mark in marks]
    first, last = min(reading, default=0), max(reading, default=-2) + 1
    return [
        path
        for path in sorted(folder.glob("generation-*"))
        if not first <= int(path.name.partition("-")[2]) <= last
    ]


def rank_mark_files(folder: Path) -> list[Path]:
    """Return the files in which each rank has written the number of the epoch that it reads."""
    return sorted(folder.glob("rank-*-reads"))
