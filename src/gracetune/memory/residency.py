"""Who holds which bytes in a simulated machine: allocations, page copies, eviction.

Bookkeeping alone. What a move costs is for `simulated`, which is told of each page written back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.errors import RunFailedError
from gracetune.memory.driver import HOST, PointerKind
from gracetune.memory.pages import PageTable, Run
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_FIRST_ADDRESS = 1 << 44


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """One allocation; only a managed one has page states that mean something."""

    pointer: int
    nbytes: int
    kind: PointerKind
    place: int
    pages: PageTable


class SimulatedResidency:
    """The bytes of every place, and the managed pages that share them."""

    def __init__(
        self,
        capacity: Mapping[int, int],
        page_bytes: int,
        write_back: Callable[[int, int], None],
    ) -> None:
        """`write_back(device, nbytes)` hears of every eviction that has to move bytes."""
        self.capacity = capacity
        self.page_bytes = page_bytes
        self._write_back = write_back
        self._used: dict[int, int] = defaultdict(int)
        self._bases: list[int] = []
        self._ranges: dict[int, Range] = {}
        self._next = _FIRST_ADDRESS
        self._tick = 0

    def add(self, nbytes: int, kind: PointerKind, place: int) -> Range:
        """A new allocation; managed pages take no memory until someone touches them."""
        num_pages = -(-nbytes // self.page_bytes)
        made = Range(self._next, nbytes, kind, place, PageTable(num_pages))
        self._next += (num_pages + 1) * self.page_bytes
        if kind is not PointerKind.MANAGED:
            self._used[place] += nbytes
        self._ranges[made.pointer] = made
        self._bases.append(made.pointer)
        return made

    def remove(self, gone: Range) -> None:
        """Give an allocation's bytes back."""
        del self._ranges[gone.pointer]
        self._bases.remove(gone.pointer)
        if gone.kind is not PointerKind.MANAGED:
            self._used[gone.place] -= gone.nbytes
        for run in gone.pages.runs():
            self._account(run, frozenset())

    def find(self, pointer: int, nbytes: int) -> Range | None:
        """The allocation that all of these bytes are in."""
        index = bisect_right(self._bases, pointer) - 1
        if index < 0 or nbytes <= 0:
            return None
        found = self._ranges[self._bases[index]]
        return found if pointer + nbytes <= found.pointer + found.nbytes else None

    def runs(self, found: Range, pointer: int, nbytes: int) -> list[Run]:
        """The page runs that the bytes touch: the driver rounds outwards."""
        offset = pointer - found.pointer
        last = -(-(offset + nbytes) // self.page_bytes)
        return list(found.pages.runs(offset // self.page_bytes, last))

    def size(self, run: Run) -> int:
        """Bytes of a run."""
        return (run.last - run.first) * self.page_bytes

    def promised_bytes(self) -> int:
        """Bytes of all allocations, resident or not."""
        return sum(found.nbytes for found in self._ranges.values())

    def free_bytes(self, place: int) -> int:
        """What is left of a place."""
        return self.capacity[place] - self._used[place]

    def begin(self) -> None:
        """A new operation: what it uses is younger than everything before, so it stays."""
        self._tick += 1

    def claim(self, found: Range, pointer: int, nbytes: int) -> list[Run]:
        """Begin an operation on these bytes; making room for it evicts others, never them."""
        self.begin()
        tick = self._tick
        for run in self.runs(found, pointer, nbytes):
            found.pages.update(run.first, run.last, lambda state: replace(state, used=tick))
        return self.runs(found, pointer, nbytes)

    def bring(self, found: Range, run: Run, home: int) -> int:
        """Give pages a copy at `home`, as many as fit; the bytes that did."""
        fits = self.make_room(home, self.size(run)) // self.page_bytes
        placed = Run(run.first, min(run.last, run.first + fits), run.state)
        kept = run.state.places if run.state.read_mostly else frozenset()
        self._place(found, placed, kept | {home})
        return self.size(placed)

    def touch(self, found: Range, run: Run, home: int, *, write: bool) -> None:
        """Note a use; a writer's copy is the only valid one."""
        for part in list(found.pages.runs(run.first, run.last)):
            self._place(found, part, frozenset({home}) if write else part.state.places)

    def keep_one_copy(self, found: Range, run: Run) -> None:
        """Drop duplicates; a device's copy is the one that stays."""
        if len(run.state.places) > 1:
            self._place(found, run, frozenset({max(run.state.places)}))

    def drop(self, found: Range, pointer: int, nbytes: int) -> int:
        """Forget the contents of whole pages inside these bytes; how many bytes had any."""
        offset = pointer - found.pointer
        first = -(-offset // self.page_bytes)
        dropped = 0
        for run in list(found.pages.runs(first, (offset + nbytes) // self.page_bytes)):
            dropped += self.size(run) if run.state.places else 0
            self._place(found, run, frozenset())
        return dropped

    def make_room(self, home: int, nbytes: int) -> int:
        """Evict the longest unused pages until so much is free; how much is free then."""
        lacking = nbytes - self.free_bytes(home)
        if lacking > 0 and home == HOST:
            raise RunFailedError(
                f"simulated host memory is full: {format_bytes(nbytes)} more are needed, "
                f"{format_bytes(self.free_bytes(HOST))} of {format_bytes(self.capacity[HOST])} "
                "are free. A real machine would end the run here; lower the cap on managed bytes."
            )
        idle = self._idle(home) if lacking > 0 else iter(())
        for found, run in sorted(idle, key=lambda item: (item[1].state.used, item[0].pointer)):
            lacking = nbytes - self.free_bytes(home)
            if lacking <= 0:
                break
            last = min(run.last, run.first + -(-lacking // self.page_bytes))
            self._evict(found, Run(run.first, last, run.state), home)
        return self.free_bytes(home)

    def _idle(self, home: int) -> Iterator[tuple[Range, Run]]:
        """Pages at a place that the operation under way has not used itself."""
        for found in self._ranges.values():
            for run in found.pages.runs():
                if home in run.state.places and run.state.used < self._tick:
                    yield found, run

    def _evict(self, found: Range, run: Run, home: int) -> None:
        places = run.state.places - {home}
        if not places:
            self.make_room(HOST, self.size(run))
            self._write_back(home, self.size(run))
            places = frozenset({HOST})
        self._account(run, places)
        found.pages.update(run.first, run.last, lambda state: replace(state, places=places))

    def _place(self, found: Range, run: Run, places: frozenset[int]) -> None:
        self._account(run, places)
        tick = self._tick
        found.pages.update(
            run.first, run.last, lambda state: replace(state, places=places, used=tick)
        )

    def _account(self, run: Run, places: frozenset[int]) -> None:
        for place in run.state.places - places:
            self._used[place] -= self.size(run)
        for place in places - run.state.places:
            self._used[place] += self.size(run)
