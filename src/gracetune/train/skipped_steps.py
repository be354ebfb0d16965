"""Skip steps whose loss or gradient is not finite, if `train.skip_bad_batches` allows it.

A skipped step changes no weights, but counts as a step: the learning rate, the order of the data
and all random numbers continue as if it had been trained. Its number is written to `skipped.json`
in the run's folder and to every later checkpoint. A resumed run skips the same steps again, also
those since its checkpoint, so that it computes the same as an uninterrupted one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gracetune.atomic_files import write_text
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from gracetune.config.schema import RunFile
    from gracetune.distributed.ranks import RankGroup

SKIPPED_FILE = "skipped.json"
SKIPPED_KEY = "skipped_steps"
"""Key of the skipped steps in a checkpoint's record of the execution."""


def build_skips(
    run: RunFile, ranks: RankGroup, resumed: Mapping[str, Any] | None
) -> StepSkips | None:
    """Return what decides about skipping in a run; None if it never skips a step.

    `resumed` is the execution record of the checkpoint to resume from; None for a new run.
    """
    if not run.train.skip_bad_batches:
        return None
    saved = None if resumed is None else resumed.get(SKIPPED_KEY, [])
    return StepSkips(Path(run.output_dir), ranks, saved)


class StepSkips:
    """Decides which steps are skipped, and remembers them."""

    def __init__(self, folder: Path, ranks: RankGroup, saved: Iterable[int] | None) -> None:
        """`saved` are the skipped steps of the checkpoint to resume from; None for a new run."""
        self._path = folder / SKIPPED_FILE
        self._is_main = ranks.is_main
        if saved is None and self._is_main:  # a run without a checkpoint may have ended here
            self._path.unlink(missing_ok=True)
        recorded = [] if saved is None else [*saved, *self._read()]
        self.steps: list[int] = sorted(set(ranks.broadcast(recorded)))
        """Numbers of the steps that are skipped, counted from 1."""

    def decide(self, done: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """Return True if the step after `done` steps is skipped. Waits for the device."""
        step = done + 1
        if step in self.steps:
            return True
        if bool(torch.isfinite(loss + grad_norm)):
            return False
        self.steps.append(step)
        if self._is_main:
            write_text(self._path, json.dumps(self.steps))
        return True

    def up_to(self, step: int) -> list[int]:
        """Return the skipped steps up to a step, for its checkpoint."""
        return [one for one in self.steps if one <= step]

    def _read(self) -> list[int]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(type(one) is int for one in found):
            raise DataError(
                f"{self._path} is damaged: it must be a list of step numbers. Restore it, or "
                "remove it to decide again which steps since the last checkpoint are skipped."
            )
        return found
