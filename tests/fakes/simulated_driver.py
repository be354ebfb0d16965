"""A driver without a GPU: pages, residency, faults, copy engines, and a clock of its own.

It answers every verb of the protocol as CUDA does, codes included, and keeps the books that a real
driver hides. Beside the protocol it has what a program does to memory: `touch`, `copy`, `compute`,
`synchronize`. Nothing real is allocated. One thread may use it.

Work takes bytes over the rate of `Rates`. A transfer that starts while the other direction is busy
is slowed; the one already under way is not. A range larger than the device is prefetched as far as
it fits, and touched in pieces that evict each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from gracetune.errors import RunFailedError
from gracetune.memory.driver import HOST, Advice, CudaCode, PointerKind, RangeState
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gracetune.memory.platform import DeviceSpec, Rates


_TOUCH_CHUNKS = 64
"""A touch goes in pieces of this share of a place, so that a large one can evict its own head."""


@dataclass(slots=True)
class DirectionBytes:
    """Bytes by direction, seen from the device."""

    to_device: int = 0
    to_host: int = 0

    def add(self, target: int, nbytes: int) -> None:
        """Count bytes that went to a place."""
        if target == HOST:
            self.to_host += nbytes
        else:
            self.to_device += nbytes


@dataclass(slots=True)
class Traffic:
    """Bytes that moved, by cause, since the driver was made."""

    prefetched: DirectionBytes = field(default_factory=DirectionBytes)
    faulted: DirectionBytes = field(default_factory=DirectionBytes)
    copied: DirectionBytes = field(default_factory=DirectionBytes)
    evicted: int = 0
    read_in_place: int = 0
    discarded: int = 0
    faulted_pages: int = 0


class SimulatedDriver:
    """The verbs of `Driver` over devices that exist as data."""

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        host_bytes: int,
        page_bytes: int = 4096,
        failing: Mapping[str, int] | None = None,
    ) -> None:
        """`failing` maps a verb of the protocol to the code it returns instead of working."""
        self.devices = tuple(devices)
        self.page_bytes = page_bytes
        self.time = Timeline()
        self.traffic = Traffic()
        self._failing = {} if failing is None else failing
        own = {i: spec.nbytes for i, spec in enumerate(self.devices) if not self._shared(i)}
        self._memory = SimulatedResidency({HOST: host_bytes} | own, page_bytes, self._write_back)

    def attribute(self, name: str, device: int) -> int | None:
        """What the device's data says."""
        return self.devices[device].attributes.get(name)

    def memory_info(self, device: int) -> tuple[int, int]:
        """What allocations and resident managed pages leave, and the whole."""
        home = self._home(device)
        return self._memory.free_bytes(home), self._memory.capacity[home]

    def allocate_managed(self, nbytes: int) -> tuple[int, int]:
        """Addresses alone: pages come to life where they are first touched."""
        if not any(spec.attributes.get("managed_memory") for spec in self.devices):
            return CudaCode.NOT_SUPPORTED, 0
        room = sum(self._memory.capacity.values()) - self._memory.promised_bytes()
        return self._allocate("allocate_managed", nbytes, PointerKind.MANAGED, HOST, room)

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """Host memory, taken at once."""
        room = self._memory.free_bytes(HOST)
        return self._allocate("allocate_pinned", nbytes, PointerKind.HOST, HOST, room)

    def free(self, pointer: int) -> int:
        """Forget an allocation and give its bytes back."""
        found = self._memory.find(pointer, 1)
        if "free" in self._failing:
            return self._failing["free"]
        if found is None or found.pointer != pointer:
            return CudaCode.INVALID_VALUE
        self._memory.remove(found)
        return CudaCode.SUCCESS

    def pointer_kind(self, pointer: int) -> PointerKind:
        """The kind of the allocation around the address."""
        found = self._memory.find(pointer, 1)
        return PointerKind.UNKNOWN if found is None else found.kind

    def advise(self, pointer: int, nbytes: int, advice: Advice, location: int) -> int:
        """Write the advice on the pages; nothing moves."""
        found, code = self._managed("advise", pointer, nbytes, location)
        if found is None:
            return code
        for run in self._memory.runs(found, pointer, nbytes):
            found.pages.update(run.first, run.last, lambda state: _advised(state, advice, location))
            if advice is Advice.UNSET_READ_MOSTLY:
                self._memory.keep_one_copy(found, run)
        return CudaCode.SUCCESS

    def prefetch(self, pointer: int, nbytes: int, location: int, stream: int) -> int:
        """Bring pages to a place, in stream order; the caller is held for part of the way."""
        found, code = self._managed("prefetch", pointer, nbytes, location)
        if found is None:
            return code
        rates, home = self._rates(location), self._home(location)
        self.time.now_s += rates.prefetch_call_s
        busy_s = 0.0
        for run in self._memory.claim(found, pointer, nbytes):
            found.pages.update(
                run.first, run.last, lambda state: replace(state, last_prefetch=location)
            )
            if home in run.state.locations:
                continue
            moved = self._memory.bring(found, run, home)
            if run.state.locations:
                rate = rates.prefetch_out if home == HOST else rates.prefetch_in
                busy_s += self._transfer(moved, rate, max(run.state.locations), home, stream)
                self.traffic.prefetched.add(home, moved)
        self.time.now_s += rates.prefetch_blocking_share * busy_s
        return CudaCode.SUCCESS

    def discard(self, pointer: int, nbytes: int, stream: int) -> int:
        """Forget contents: no write-back now, none when the pages would be evicted."""
        found, code = self._managed("discard", pointer, nbytes, HOST)
        if found is None:
            return code
        self.traffic.discarded += self._memory.drop(found, pointer, nbytes)
        self.time.run((Queue("stream", stream),), 0.0)
        return CudaCode.SUCCESS

    def range_state(self, pointer: int, nbytes: int) -> RangeState:
        """What holds for every page of the range, as CUDA answers it."""
        found = self._memory.find(pointer, nbytes)
        if found is None or found.kind is not PointerKind.MANAGED:
            return RangeState(None, None, False, ())
        states = [run.state for run in self._memory.runs(found, pointer, nbytes)]
        preferred = {state.preferred for state in states}
        fetched = {state.last_prefetch for state in states}
        accessed = frozenset.intersection(*(state.accessed_by for state in states))
        return RangeState(
            preferred=preferred.pop() if len(preferred) == 1 else None,
            last_prefetch=fetched.pop() if len(fetched) == 1 else None,
            read_mostly=all(state.read_mostly for state in states),
            accessed_by=tuple(sorted(accessed)),
        )

    # Beside the protocol: what a program does.

    def allocate_device(self, nbytes: int, device: int) -> tuple[int, int]:
        """Device memory, taken at once; managed pages make way for it."""
        home = self._home(device)
        self._memory.begin()
        room = self._memory.free_bytes(home)
        if home != HOST:
            room = self._memory.make_room(home, nbytes)
        return self._allocate("allocate_device", nbytes, PointerKind.DEVICE, home, room)

    def touch(
        self, pointer: int, nbytes: int, location: int, stream: int = 0, *, write: bool = False
    ) -> None:
        """A kernel (or the CPU) reads or writes a managed range, faulting where it must."""
        found = self._memory.find(pointer, nbytes)
        assert found is not None, f"{pointer:#x} is not allocated for {nbytes} bytes"
        assert found.kind is PointerKind.MANAGED, f"{pointer:#x} is {found.kind.value}"
        capacity = self._memory.capacity[self._home(location)]
        piece = max(1, capacity // _TOUCH_CHUNKS // self.page_bytes) * self.page_bytes
        for start in range(pointer, pointer + nbytes, piece):
            size = min(piece, pointer + nbytes - start)
            for run in self._memory.claim(found, start, size):
                self._touch(found, run, location, stream, write=write)

    def copy(self, nbytes: int, source: int, target: int, stream: int) -> None:
        """A copy engine moves pinned or device memory; the call returns at once."""
        rates = self._rates(max(source, target))
        self.time.now_s += rates.copy_call_s
        rate = rates.copy_out if target == HOST else rates.copy_in
        self._transfer(nbytes, rate, source, target, stream)
        self.traffic.copied.add(target, nbytes)

    def compute(self, seconds: float, device: int, stream: int) -> None:
        """A kernel that touches nothing we watch."""
        self.time.run((Queue("stream", stream), Queue("kernels", device)), seconds)

    def wait(self, stream: int, other: int) -> None:
        """`stream` goes on only when `other` has done what it was given so far."""
        self.time.wait(Queue("stream", stream), Queue("stream", other))

    def synchronize(self, stream: int | None = None) -> float:
        """The host waits for a stream, or for everything; the time it is then."""
        return self.time.synchronize(None if stream is None else Queue("stream", stream))

    def residency(self, pointer: int, nbytes: int) -> dict[int, int]:
        """Bytes of a managed range by the place that holds them; pages without one are absent."""
        found = self._memory.find(pointer, nbytes)
        assert found is not None, f"{pointer:#x} is not allocated for {nbytes} bytes"
        resident: dict[int, int] = defaultdict(int)
        for run in self._memory.runs(found, pointer, nbytes):
            for location in run.state.locations:
                resident[location] += self._memory.size(run)
        return dict(resident)

    # Helpers.

    def _allocate(
        self, verb: str, nbytes: int, kind: PointerKind, location: int, room: int
    ) -> tuple[int, int]:
        if verb in self._failing:
            return self._failing[verb], 0
        if nbytes <= 0:
            return CudaCode.INVALID_VALUE, 0
        if nbytes > room:
            return CudaCode.OUT_OF_MEMORY, 0
        return CudaCode.SUCCESS, self._memory.add(nbytes, kind, location).pointer

    def _managed(
        self, verb: str, pointer: int, nbytes: int, location: int
    ) -> tuple[Range | None, int]:
        """The managed range a verb is about, or the code CUDA gives instead."""
        if verb in self._failing:
            return None, self._failing[verb]
        found = self._memory.find(pointer, nbytes)
        if found is None or found.kind is not PointerKind.MANAGED:
            return None, CudaCode.INVALID_VALUE
        if location != HOST and not 0 <= location < len(self.devices):
            return None, CudaCode.INVALID_DEVICE
        asked = range(len(self.devices)) if location == HOST else (location,)
        if not any(self.attribute("concurrent_managed_access", device) for device in asked):
            return None, CudaCode.INVALID_DEVICE
        return found, CudaCode.SUCCESS

    def _touch(self, found: Range, run: Run, location: int, stream: int, *, write: bool) -> None:
        rates, home = self._rates(location), self._home(location)
        if home in run.state.locations:
            here = run
        elif self._reads_in_place(run.state, location):
            here = run._replace(last=run.first)
        else:
            here = self._pull(found, run, home, stream)
        self._memory.touch(found, here, home, write=write)
        local_s = self._memory.size(here) / (rates.host if location == HOST else rates.device)
        over = self._memory.size(run) - self._memory.size(here)
        self.traffic.read_in_place += over
        self._work(local_s + over / rates.read_in_place, location, stream)

    def _pull(self, found: Range, run: Run, home: int, stream: int) -> Run:
        """Fault pages in, as many as find room; the rest stays with the host, or is made there."""
        moved = self._memory.bring(found, run, home)
        here = run._replace(last=run.first + moved // self.page_bytes)
        if run.state.locations:
            self.traffic.faulted_pages += here.last - here.first
            self.traffic.faulted.add(home, moved)
            self._transfer(moved, self._rates(home).fault, max(run.state.locations), home, stream)
        elif here.last < run.last:
            self._memory.bring(found, run._replace(first=here.last), HOST)
        return here

    def _reads_in_place(self, state: PageState, location: int) -> bool:
        """Whether the toucher goes over the link instead of pulling the page."""
        if not state.locations:
            return False
        if location == HOST:
            holder = max(state.locations)
            return self.attribute("direct_managed_mem_access_from_host", holder) == 1
        return location in state.accessed_by and state.preferred in state.locations

    def _transfer(self, nbytes: int, rate: float, source: int, target: int, stream: int) -> float:
        """Bytes over the link, on the copy engine of their direction; the seconds it takes."""
        device = source if target == HOST else target
        own, opposite = ("out", "in") if target == HOST else ("in", "out")
        if self.attribute("async_engine_count", device) == 1:
            own = opposite = "both"
        return self.time.transfer(
            (Queue("stream", stream), Queue(own, device)),
            Queue(opposite, device),
            nbytes / rate,
            self._rates(device).both_ways_share,
        )

    def _write_back(self, device: int, nbytes: int) -> None:
        self.traffic.evicted += nbytes
        self.time.run((Queue("out", device),), nbytes / self._rates(device).prefetch_out)

    def _work(self, seconds: float, location: int, stream: int) -> None:
        """A kernel on its device; or the CPU itself, which waits for its data first."""
        if location == HOST:
            self.synchronize(stream)
            self.time.now_s += seconds
        else:
            self.compute(seconds, location, stream)

    def _rates(self, location: int) -> Rates:
        return self.devices[max(location, 0)].rates

    def _shared(self, device: int) -> bool:
        return self.attribute("integrated", device) == 1

    def _home(self, location: int) -> int:
        """Where pages sent to a place really are: an integrated device has no memory of its own."""
        return HOST if location == HOST or self._shared(location) else location


def _advised(state: PageState, advice: Advice, location: int) -> PageState:
    match advice:
        case Advice.SET_READ_MOSTLY:
            return replace(state, read_mostly=True)
        case Advice.UNSET_READ_MOSTLY:
            return replace(state, read_mostly=False)
        case Advice.SET_PREFERRED_LOCATION:
            return replace(state, preferred=location)
        case Advice.UNSET_PREFERRED_LOCATION:
            return replace(state, preferred=None)
        case Advice.SET_ACCESSED_BY:
            return replace(state, accessed_by=state.accessed_by | {location})
        case Advice.UNSET_ACCESSED_BY:
            return replace(state, accessed_by=state.accessed_by - {location})


# ------------------------------------------------------------------------------------------
# Who holds which bytes in a simulated machine: allocations, page copies, eviction.
#
# Bookkeeping alone. What a move costs is for `simulated`, which is told of each page written back.


_FIRST_ADDRESS = 1 << 44


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """One allocation; only a managed one has page states that mean something."""

    pointer: int
    nbytes: int
    kind: PointerKind
    location: int
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

    def add(self, nbytes: int, kind: PointerKind, location: int) -> Range:
        """A new allocation; managed pages take no memory until someone touches them."""
        num_pages = -(-nbytes // self.page_bytes)
        made = Range(self._next, nbytes, kind, location, PageTable(num_pages))
        self._next += (num_pages + 1) * self.page_bytes
        if kind is not PointerKind.MANAGED:
            self._used[location] += nbytes
        self._ranges[made.pointer] = made
        self._bases.append(made.pointer)
        return made

    def remove(self, gone: Range) -> None:
        """Give an allocation's bytes back."""
        del self._ranges[gone.pointer]
        self._bases.remove(gone.pointer)
        if gone.kind is not PointerKind.MANAGED:
            self._used[gone.location] -= gone.nbytes
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

    def free_bytes(self, location: int) -> int:
        """What is left of a place."""
        return self.capacity[location] - self._used[location]

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
        kept = run.state.locations if run.state.read_mostly else frozenset()
        self._set_locations(found, placed, kept | {home})
        return self.size(placed)

    def touch(self, found: Range, run: Run, home: int, *, write: bool) -> None:
        """Note a use; a writer's copy is the only valid one."""
        for part in list(found.pages.runs(run.first, run.last)):
            self._set_locations(found, part, frozenset({home}) if write else part.state.locations)

    def keep_one_copy(self, found: Range, run: Run) -> None:
        """Drop duplicates; a device's copy is the one that stays."""
        if len(run.state.locations) > 1:
            self._set_locations(found, run, frozenset({max(run.state.locations)}))

    def drop(self, found: Range, pointer: int, nbytes: int) -> int:
        """Forget the contents of whole pages inside these bytes; how many bytes had any."""
        offset = pointer - found.pointer
        first = -(-offset // self.page_bytes)
        dropped = 0
        for run in list(found.pages.runs(first, (offset + nbytes) // self.page_bytes)):
            dropped += self.size(run) if run.state.locations else 0
            self._set_locations(found, run, frozenset())
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
                if home in run.state.locations and run.state.used < self._tick:
                    yield found, run

    def _evict(self, found: Range, run: Run, home: int) -> None:
        locations = run.state.locations - {home}
        if not locations:
            self.make_room(HOST, self.size(run))
            self._write_back(home, self.size(run))
            locations = frozenset({HOST})
        self._account(run, locations)
        found.pages.update(run.first, run.last, lambda state: replace(state, locations=locations))

    def _set_locations(self, found: Range, run: Run, locations: frozenset[int]) -> None:
        self._account(run, locations)
        tick = self._tick
        found.pages.update(
            run.first, run.last, lambda state: replace(state, locations=locations, used=tick)
        )

    def _account(self, run: Run, locations: frozenset[int]) -> None:
        for location in run.state.locations - locations:
            self._used[location] -= self.size(run)
        for location in locations - run.state.locations:
            self._used[location] += self.size(run)


# ------------------------------------------------------------------------------------------
# The pages of one managed range, kept as runs of equal state.
#
# A terabyte of pages in one state is one run, so a simulation of any size costs bookkeeping only
# for
# the places where neighbours differ.


@dataclass(frozen=True, slots=True)
class PageState:
    """What is known of a page."""

    locations: frozenset[int] = frozenset()
    """Where it has a valid copy; empty: never written, or discarded."""
    preferred: int | None = None
    last_prefetch: int | None = None
    read_mostly: bool = False
    accessed_by: frozenset[int] = frozenset()
    used: int = 0
    """When it was last brought or touched; the smallest is evicted first."""


class Run(NamedTuple):
    """Pages `first` up to, not including, `last`, all in one state."""

    first: int
    last: int
    state: PageState


class PageTable:
    """All pages of a range, in order."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._starts = [0]
        self._states = [PageState()]

    def runs(self, first: int = 0, last: int | None = None) -> Iterator[Run]:
        """The runs that cover these pages, cut at both ends."""
        last = self.num_pages if last is None else last
        index = bisect_right(self._starts, first) - 1
        while first < last:
            end = self._end(index)
            yield Run(first, min(end, last), self._states[index])
            first, index = end, index + 1

    def update(self, first: int, last: int, change: Callable[[PageState], PageState]) -> None:
        """Change the state of these pages, and join what has become equal."""
        if first >= last:
            return
        low, high = self._cut(first), self._cut(last)
        self._states[low:high] = [change(state) for state in self._states[low:high]]
        for index in range(min(high, len(self._states) - 1), max(low - 1, 0), -1):
            if self._states[index] == self._states[index - 1]:
                del self._starts[index], self._states[index]

    def _cut(self, page: int) -> int:
        """Make `page` the first of a run, and say which run that is."""
        if page == self.num_pages:
            return len(self._starts)
        index = bisect_right(self._starts, page) - 1
        if self._starts[index] == page:
            return index
        self._starts.insert(index + 1, page)
        self._states.insert(index + 1, self._states[index])
        return index + 1

    def _end(self, index: int) -> int:
        return self._starts[index + 1] if index + 1 < len(self._starts) else self.num_pages


# ------------------------------------------------------------------------------------------
# Simulated time: a clock of the host, and queues that work waits in.
#
# Each stream, each direction of a link and the kernels of a device are queues. Work starts when the
# host has issued it and everything it needs is free.


class Queue(NamedTuple):
    """Something that does one thing at a time: a stream, a copy direction, a device's kernels."""

    kind: str
    number: int


class Timeline:
    """When everything is free again; `now_s` is the host's own time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._free_at: dict[Queue, float] = defaultdict(float)

    def run(self, queues: tuple[Queue, ...], seconds: float) -> None:
        """Work that holds all of these queues for a time."""
        start = max(self.now_s, *(self._free_at[queue] for queue in queues))
        for queue in queues:
            self._free_at[queue] = start + seconds

    def transfer(
        self, queues: tuple[Queue, ...], opposite: Queue, seconds: float, share: float
    ) -> float:
        """A copy of so many seconds, `share` as fast while the opposite direction is busy too."""
        start = max(self.now_s, *(self._free_at[queue] for queue in queues))
        crowded = max(0.0, self._free_at[opposite] - start)
        if opposite not in queues and crowded > 0:
            seconds += min(crowded, seconds / share) * (1 - share)
        for queue in queues:
            self._free_at[queue] = start + seconds
        return seconds

    def wait(self, waiting: Queue, other: Queue) -> None:
        """One queue does nothing until the other has done what it has now (an event)."""
        self._free_at[waiting] = max(self._free_at[waiting], self._free_at[other])

    def synchronize(self, queue: Queue | None) -> float:
        """The host waits for one queue, or for all; its time afterwards."""
        ends = self._free_at.values() if queue is None else (self._free_at[queue],)
        self.now_s = max(self.now_s, *ends, 0.0)
        return self.now_s
