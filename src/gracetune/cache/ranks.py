"""How the ranks of a run share work that goes into one store, without talking over the network.

Encoding may take hours, longer than a collective may wait. So each rank leaves a report in a folder
that all of them see, and waits for the others' as long as any of them still gets something done.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gracetune.durable import write_text
from gracetune.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Digest = TypeVar("Digest", bound=str)

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of them this process is."""

    rank: int = 0
    world: int = 1
    reports: Path = Path()
    """A folder that no earlier run has used; alone, nothing is written."""
    timeout_s: float = 1800.0
    """How long the others may go without getting anything done."""

    def share(self, keys: Sequence[Digest]) -> list[Digest]:
        """Which of these digests are this rank's: by themselves, whatever else is in the list.

        A rank that comes late finds less missing, and must not deal the rest out anew.
        """
        return [key for key in keys if int(key[:8], 16) % self.world == self.rank]

    def exchange(
        self,
        what: str,
        mine: dict[str, str],
        num_done: Callable[[], int],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> dict[str, str]:
        """Tell what this rank found, and wait for what the others did; `num_done` shows life."""
        if self.world == 1:
            return mine
        write_text(self._report(what, self.rank), json.dumps(mine))
        everyone: dict[str, str] = {}
        for rank in range(self.world):
            path, before, since = self._report(what, rank), -1, clock()
            while not path.exists():
                done = num_done()
                if done != before:
                    before, since = done, clock()
                if clock() - since > self.timeout_s:
                    raise RunFailedError(
                        f"rank {self.rank} waits for rank {rank} to finish {what}; nothing was "
                        f"done for distributed.timeout_s ({self.timeout_s:g} s). "
                        "See that rank's output, or raise timeout_s."
                    )
                sleep(POLL_S)
            everyone |= json.loads(path.read_text())
        return everyone

    def _report(self, what: str, rank: int) -> Path:
        return self.reports / f"{what.replace(' ', '-')}-{rank}.json"


ALONE = Ranks()
