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
"""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Literal, Protocol

from gracetune.atomic_files import write_text
from gracetune.data.loader import NO_EPOCH
from gracetune.errors import ConfigError, GracetuneError, RunFailedError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gracetune.cache.encode import Ranks
    from gracetune.cache.store import Store
    from gracetune.config.schema import DatasetSection

AugmentationMode = Literal["static", "refresh_each_epoch", "disable_cache"]

FOLDER = "generations"
"""Subfolder of the run's folder that has the latents of `refresh_each_epoch`."""


def augmentation_mode(section: DatasetSection) -> AugmentationMode:
    """Return a dataset's `augmentations_cache_mode`; `static` if nothing in it is random."""
    if not is_randomized(section):
        return "static"
    return section.augmentations_cache_mode or "static"


def is_randomized(section: DatasetSection) -> bool:
    """Return True if a dataset has augmentations, random crops or random clips."""
    random_clip = section.dataset_type != "image" and section.clip == "random"
    return bool(section.augmentations) or section.crop == "random" or random_clip


def augmentation_epoch(section: DatasetSection, epoch: int) -> int:
    """Return the number of the augmentation epoch that a training epoch uses."""
    if epoch == NO_EPOCH:
        return 0
    return epoch % section.variants if augmentation_mode(section) == "static" else epoch


def check_variants(section: DatasetSection, index: int) -> None:
    """Raise an error if `variants` is set but has no effect: not `static`, or nothing is random."""
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
    """Raised by `EpochEncoder.encode` when it was told to stop; not an error."""


class EpochEncoder(Protocol):
    """Encodes augmentation epochs into caches; implemented by the data pipeline."""

    def open_store(self, epoch: int) -> Store:
        """Open the cache store of one augmentation epoch."""
        ...

    def encode(self, store: Store, epoch: int, stopping: threading.Event) -> None:
        """Encode all samples of `epoch` into the store; called in a background thread.

        Raises `EncodingStopped` once the event `stopping` is set.
        """
        ...

    def entered(self, epoch: int) -> None:
        """Record that this rank reads `epoch` from now on, so that older epochs can be deleted."""
        ...


class AugmentationEpochs:
    """Returns the cache store of each training epoch and encodes the next one in the background.

    For datasets with `refresh_each_epoch`. Used by one thread.
    """

    def __init__(self, first: Store, encoder: EpochEncoder, emit: Callable[[Notice], None]) -> None:
        """Start with `first`, the store of augmentation epoch 0. The caller closes it."""
        self._first = first
        self._encoder = encoder
        self._emit = emit
        self._epoch = NO_EPOCH
        self._current = first
        self._next: _BackgroundEncoding | None = None

    def store_for(self, epoch: int) -> Store:
        """Return the store of an epoch, completely encoded.

        The first call for an epoch waits for its encoding, then starts encoding the next epoch.
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
        """Return the store of `epoch`; None unless the last `store_for` call was for `epoch`."""
        return self._current if epoch == self._epoch else None

    def close(self) -> None:
        """Stop encoding in the background and close the current store.

        `store_for` still works afterwards; it encodes the samples that are missing.
        """
        self._stop_next()
        if self._current is not self._first:
            self._current.close()

    def _wait_for(self, epoch: int) -> Store:
        """Return the encoded store of an epoch; start encoding now unless a thread is doing it."""
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
    """A background thread that encodes one augmentation epoch."""

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
        """Wait for the thread and return the encoded store; raise the error if encoding failed."""
        self._thread.join()
        self._reported = True
        if isinstance(self._error, GracetuneError):
            raise self._error
        if self._error is not None:
            raise RunFailedError(self._message()) from self._error
        return self._store

    def stop(self) -> str:
        """Stop the thread; return its error message if `result` has not raised it, else empty."""
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
    """The folder with a run's caches of augmentation epochs; deletes those no rank needs."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder = folder
        self._ranks = ranks

    def path(self, epoch: int) -> Path:
        """Return the cache folder of one augmentation epoch."""
        return self._folder / f"generation-{epoch}"

    def entered(self, epoch: int) -> None:
        """Record that this rank reads `epoch`; on rank 0, delete the epochs that no rank needs."""
        write_text(self._mark(self._ranks.rank), str(epoch))
        marks = [self._mark(rank) for rank in range(self._ranks.world_size)]
        if self._ranks.rank == 0 and all(mark.exists() for mark in marks):
            for path in unread_epochs(self._folder, marks):
                shutil.rmtree(path)

    def _mark(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}-reads"


def unread_epochs(folder: Path, marks: Sequence[Path]) -> list[Path]:
    """Return the cache folders of augmentation epochs that no rank needs any more.

    `marks` are the ranks' files with the number of the epoch that each rank reads. A rank that
    reads epoch N encodes N + 1, so the epochs from the lowest number to the highest plus one are
    in use. Without marks, no epoch is.
    """
    reading = [int(mark.read_text()) for mark in marks]
    first, last = min(reading, default=0), max(reading, default=-2) + 1
    return [
        path
        for path in sorted(folder.glob("generation-*"))
        if not first <= int(path.name.partition("-")[2]) <= last
    ]


def read_marks(folder: Path) -> list[Path]:
    """Return the files in which each rank of a run has written which epoch it reads."""
    return sorted(folder.glob("rank-*-reads"))
