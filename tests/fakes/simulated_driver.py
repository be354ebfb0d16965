"""A simulated CUDA driver: pages, residency, faults, copy engines and a clock, without a GPU.

`SimulatedDriver` implements the `Driver` protocol as CUDA does, including error codes, and exposes
what a real driver hides: residency and traffic. It also has the operations of a program: `touch`,
`copy`, `compute` and `synchronize`. It allocates no real memory and is not thread-safe.

Work takes its bytes divided by a rate of `Rates`. A transfer that starts while the other direction
is busy is slowed; the one already running is not. A range larger than the device is prefetched as
far as it fits, and touched in chunks that evict each other.

`SimulatedResidency` tracks memory, `PageTable` the pages of one range, `Timeline` the time.
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
"""A touch is split into chunks of 1/64 of the memory, so that a large one evicts its start."""


@dataclass(slots=True)
class DirectionBytes:
    """Bytes transferred, by direction."""

    to_device: int = 0
    to_host: int = 0

    def add(self, target: int, nbytes: int) -> None:
        """Count bytes that were moved to a location."""
        if target == HOST:
            self.to_host += nbytes
        else:
            self.to_device += nbytes


@dataclass(slots=True)
class Traffic:
    """Bytes moved since the driver was created, by cause."""

    prefetched: DirectionBytes = field(default_factory=DirectionBytes)
    faulted: DirectionBytes = field(default_factory=DirectionBytes)
    copied: DirectionBytes = field(default_factory=DirectionBytes)
    evicted: int = 0
    read_in_place: int = 0
    discarded: int = 0
    faulted_pages: int = 0


class SimulatedDriver:
    """Implements `Driver` for devices that are described by data."""

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        host_bytes: int,
        page_bytes: int = 4096,
        failing: Mapping[str, int] | None = None,
    ) -> None:
        """`failing` maps method names of the protocol to the error code they return."""
        self.devices = tuple(devices)
        self.page_bytes = page_bytes
        self.time = Timeline()
        self.traffic = Traffic()
        self._failing = {} if failing is None else failing
        own = {i: spec.nbytes for i, spec in enumerate(self.devices) if not self._shared(i)}
        self._memory = SimulatedResidency({HOST: host_bytes} | own, page_bytes, self._write_back)

    def attribute(self, name: str, device: int) -> int | None:
        """Return an attribute of the device's description."""
        return self.devices[device].attributes.get(name)

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return free and total bytes; managed pages on the device count as used."""
        home = self._home(device)
        return self._memory.free_bytes(home), self._memory.capacity[home]

    def allocate_managed(self, nbytes: int) -> tuple[int, int]:
        """Reserve addresses; pages appear where they are first touched."""
        if not any(spec.attributes.get("managed_memory") for spec in self.devices):
            return CudaCode.NOT_SUPPORTED, 0
        room = sum(self._memory.capacity.values()) - self._memory.promised_bytes()
        return self._allocate("allocate_managed", nbytes, PointerKind.MANAGED, HOST, room)

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """Allocate host memory at once."""
        room = self._memory.free_bytes(HOST)
        return self._allocate("allocate_pinned", nbytes, PointerKind.HOST, HOST, room)

    def free(self, pointer: int) -> int:
        """Free an allocation."""
        found = self._memory.find(pointer, 1)
        if "free" in self._failing:
            return self._failing["free"]
        if found is None or found.pointer != pointer:
            return CudaCode.INVALID_VALUE
        self._memory.remove(found)
        return CudaCode.SUCCESS

    def pointer_kind(self, pointer: int) -> PointerKind:
        """Return the kind of the allocation at an address."""
        found = self._memory.find(pointer, 1)
        return PointerKind.UNKNOWN if found is None else found.kind

    def advise(self, pointer: int, nbytes: int, advice: Advice, location: int) -> int:
        """Store advice for the pages; nothing moves."""
        found, code = self._managed("advise", pointer, nbytes, location)
        if found is None:
            return code
        for run in self._memory.runs(found, pointer, nbytes):
            found.pages.update(run.first, run.last, lambda state: _advised(state, advice, location))
            if advice is Advice.UNSET_READ_MOSTLY:
                self._memory.keep_one_copy(found, run)
        return CudaCode.SUCCESS

    def prefetch(self, pointer: int, nbytes: int, location: int, stream: int) -> int:
        """Move pages in stream order; the caller is blocked for part of the transfer."""
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
        """Drop contents, so that they are never written back."""
        found, code = self._managed("discard", pointer, nbytes, HOST)
        if found is None:
            return code
        self.traffic.discarded += self._memory.drop(found, pointer, nbytes)
        self.time.run((Queue("stream", stream),), 0.0)
        return CudaCode.SUCCESS

    def range_state(self, pointer: int, nbytes: int) -> RangeState:
        """Return what holds for every page of the range, as CUDA does."""
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

    # Operations of a program, which are not part of the protocol.

    def allocate_device(self, nbytes: int, device: int) -> tuple[int, int]:
        """Allocate device memory at once; managed pages are evicted for it."""
        home = self._home(device)
        self._memory.begin()
        room = self._memory.free_bytes(home)
        if home != HOST:
            room = self._memory.make_room(home, nbytes)
        return self._allocate("allocate_device", nbytes, PointerKind.DEVICE, home, room)

    def touch(
        self, pointer: int, nbytes: int, location: int, stream: int = 0, *, write: bool = False
    ) -> None:
        """Let a kernel or the CPU read or write a managed range, with page faults where needed."""
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
        """Copy between pinned and device memory on a copy engine; returns at once."""
        rates = self._rates(max(source, target))
        self.time.now_s += rates.copy_call_s
        rate = rates.copy_out if target == HOST else rates.copy_in
        self._transfer(nbytes, rate, source, target, stream)
        self.traffic.copied.add(target, nbytes)

    def compute(self, seconds: float, device: int, stream: int) -> None:
        """Run a kernel that touches no managed memory."""
        self.time.run((Queue("stream", stream), Queue("kernels", device)), seconds)

    def wait(self, stream: int, other: int) -> None:
        """Let `stream` wait for the work queued on `other` so far."""
        self.time.wait(Queue("stream", stream), Queue("stream", other))

    def synchronize(self, stream: int | None = None) -> float:
        """Let the host wait for a stream, or for all; return the time afterwards."""
        return self.time.synchronize(None if stream is None else Queue("stream", stream))

    def free_host_bytes(self) -> int:
        """Return the bytes of host memory that neither pages nor pinned memory take."""
        return self._memory.free_bytes(HOST)

    def residency(self, pointer: int, nbytes: int) -> dict[int, int]:
        """Return the bytes of a managed range by location; untouched pages are not counted."""
        found = self._memory.find(pointer, nbytes)
        assert found is not None, f"{pointer:#x} is not allocated for {nbytes} bytes"
        resident: dict[int, int] = defaultdict(int)
        for run in self._memory.runs(found, pointer, nbytes):
            for location in run.state.locations:
                resident[location] += self._memory.size(run)
        return dict(resident)

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
        """Return the managed range of a call, or the error code that CUDA returns instead."""
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
        """Fault in as many pages as fit; the rest stays on the host, or appears there."""
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
        """Return True if a page is read over the link instead of being migrated."""
        if not state.locations:
            return False
        if location == HOST:
            holder = max(state.locations)
            return self.attribute("direct_managed_mem_access_from_host", holder) == 1
        # CUDA documents that read-mostly advice overrides both: a reader gets a copy.
        is_mapped = location in state.accessed_by and not state.read_mostly
        return is_mapped and state.preferred in state.locations

    def _transfer(self, nbytes: int, rate: float, source: int, target: int, stream: int) -> float:
        """Transfer bytes on the copy engine of their direction; return the seconds."""
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
        """Run a kernel on its device; or the CPU, which first waits for its data."""
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
        """Return where pages are stored: an integrated device has no memory of its own."""
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


_FIRST_ADDRESS = 1 << 44


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """One allocation; `pages` is used for managed memory only."""

    pointer: int
    nbytes: int
    kind: PointerKind
    location: int
    pages: PageTable


class SimulatedResidency:
    """Keeps track of the memory of every location: allocations, managed pages, eviction."""

    def __init__(
        self,
        capacity: Mapping[int, int],
        page_bytes: int,
        write_back: Callable[[int, int], None],
    ) -> None:
        """`write_back(device, nbytes)` is called for every eviction that moves bytes."""
        self.capacity = capacity
        self.page_bytes = page_bytes
        self._write_back = write_back
        self._used: dict[int, int] = defaultdict(int)
        self._bases: list[int] = []
        self._ranges: dict[int, Range] = {}
        self._next = _FIRST_ADDRESS
        self._tick = 0

    def add(self, nbytes: int, kind: PointerKind, location: int) -> Range:
        """Add an allocation; managed pages take no memory until they are touched."""
        num_pages = -(-nbytes // self.page_bytes)
        made = Range(self._next, nbytes, kind, location, PageTable(num_pages))
        self._next += (num_pages + 1) * self.page_bytes
        if kind is not PointerKind.MANAGED:
            self._used[location] += nbytes
        self._ranges[made.pointer] = made
        self._bases.append(made.pointer)
        return made

    def remove(self, gone: Range) -> None:
        """Free an allocation."""
        del self._ranges[gone.pointer]
        self._bases.remove(gone.pointer)
        if gone.kind is not PointerKind.MANAGED:
            self._used[gone.location] -= gone.nbytes
        for run in gone.pages.runs():
            self._account(run, frozenset())

    def find(self, pointer: int, nbytes: int) -> Range | None:
        """Return the allocation that contains all of these bytes; None if there is none."""
        index = bisect_right(self._bases, pointer) - 1
        if index < 0 or nbytes <= 0:
            return None
        found = self._ranges[self._bases[index]]
        return found if pointer + nbytes <= found.pointer + found.nbytes else None

    def runs(self, found: Range, pointer: int, nbytes: int) -> list[Run]:
        """Return the page runs of these bytes, rounded outwards to pages as the driver does."""
        offset = pointer - found.pointer
        last = -(-(offset + nbytes) // self.page_bytes)
        return list(found.pages.runs(offset // self.page_bytes, last))

    def size(self, run: Run) -> int:
        """Return the bytes of a run."""
        return (run.last - run.first) * self.page_bytes

    def promised_bytes(self) -> int:
        """Return the bytes of all allocations, resident or not."""
        return sum(found.nbytes for found in self._ranges.values())

    def free_bytes(self, location: int) -> int:
        """Return the free bytes of a location."""
        return self.capacity[location] - self._used[location]

    def begin(self) -> None:
        """Start an operation. Pages that it uses are the youngest, so it does not evict them."""
        self._tick += 1

    def claim(self, found: Range, pointer: int, nbytes: int) -> list[Run]:
        """Start an operation on these bytes and return their runs; they are not evicted by it."""
        self.begin()
        tick = self._tick
        for run in self.runs(found, pointer, nbytes):
            found.pages.update(run.first, run.last, lambda state: replace(state, used=tick))
        return self.runs(found, pointer, nbytes)

    def bring(self, found: Range, run: Run, home: int) -> int:
        """Copy as many pages as fit to `home`; return their bytes."""
        fits = self.make_room(home, self.size(run)) // self.page_bytes
        placed = Run(run.first, min(run.last, run.first + fits), run.state)
        kept = run.state.locations if run.state.read_mostly else frozenset()
        self._set_locations(found, placed, kept | {home})
        return self.size(placed)

    def touch(self, found: Range, run: Run, home: int, *, write: bool) -> None:
        """Record a use; after a write, only the writer's copy is valid."""
        for part in list(found.pages.runs(run.first, run.last)):
            self._set_locations(found, part, frozenset({home}) if write else part.state.locations)

    def keep_one_copy(self, found: Range, run: Run) -> None:
        """Drop duplicates. As CUDA documents, the copy at the preferred location is kept.

        Without one, CUDA keeps any; here it is one on a device.
        """
        locations, preferred = run.state.locations, run.state.preferred
        if len(locations) > 1:
            kept = preferred if preferred in locations else max(locations)
            self._set_locations(found, run, frozenset({kept}))

    def drop(self, found: Range, pointer: int, nbytes: int) -> int:
        """Drop the contents of whole pages; return the bytes that had contents."""
        offset = pointer - found.pointer
        first = -(-offset // self.page_bytes)
        dropped = 0
        for run in list(found.pages.runs(first, (offset + nbytes) // self.page_bytes)):
            dropped += self.size(run) if run.state.locations else 0
            self._set_locations(found, run, frozenset())
        return dropped

    def make_room(self, home: int, nbytes: int) -> int:
        """Evict the least recently used pages until `nbytes` are free; return the free bytes."""
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
        """Yield the pages of a location that the current operation does not use."""
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


@dataclass(frozen=True, slots=True)
class PageState:
    """State of a page."""

    locations: frozenset[int] = frozenset()
    """Locations with a valid copy; empty if the page was never written, or was discarded."""
    preferred: int | None = None
    last_prefetch: int | None = None
    read_mostly: bool = False
    accessed_by: frozenset[int] = frozenset()
    used: int = 0
    """Operation that last used the page; the smallest is evicted first."""


class Run(NamedTuple):
    """Pages from `first` up to, but not including, `last`, with equal states."""

    first: int
    last: int
    state: PageState


class PageTable:
    """All pages of a range, stored as runs of equal state: a terabyte can be a single run."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._starts = [0]
        self._states = [PageState()]

    def runs(self, first: int = 0, last: int | None = None) -> Iterator[Run]:
        """Yield the runs that cover these pages, cut at both ends."""
        last = self.num_pages if last is None else last
        index = bisect_right(self._starts, first) - 1
        while first < last:
            end = self._end(index)
            yield Run(first, min(end, last), self._states[index])
            first, index = end, index + 1

    def update(self, first: int, last: int, change: Callable[[PageState], PageState]) -> None:
        """Change the state of these pages, and join runs that have become equal."""
        if first >= last:
            return
        low, high = self._cut(first), self._cut(last)
        self._states[low:high] = [change(state) for state in self._states[low:high]]
        for index in range(min(high, len(self._states) - 1), max(low - 1, 0), -1):
            if self._states[index] == self._states[index - 1]:
                del self._starts[index], self._states[index]

    def _cut(self, page: int) -> int:
        """Split runs so that one starts at `page`; return its index."""
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


class Queue(NamedTuple):
    """Something that does one thing at a time: a stream, a copy direction or a device's kernels."""

    kind: str
    number: int


class Timeline:
    """Simulated time: work starts when the host has queued it and all its queues are free.

    `now_s` is the time of the host.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._free_at: dict[Queue, float] = defaultdict(float)

    def run(self, queues: tuple[Queue, ...], seconds: float) -> None:
        """Occupy all of these queues for a time."""
        start = max(self.now_s, *(self._free_at[queue] for queue in queues))
        for queue in queues:
            self._free_at[queue] = start + seconds

    def transfer(
        self, queues: tuple[Queue, ...], opposite: Queue, seconds: float, share: float
    ) -> float:
        """Run a copy, slowed to `share` while the opposite direction is busy; return its time."""
        start = max(self.now_s, *(self._free_at[queue] for queue in queues))
        overlap_s = max(0.0, self._free_at[opposite] - start)
        if opposite not in queues and overlap_s > 0:
            seconds += min(overlap_s, seconds / share) * (1 - share)
        for queue in queues:
            self._free_at[queue] = start + seconds
        return seconds

    def wait(self, waiting: Queue, other: Queue) -> None:
        """Let one queue wait for the work that another one has now (an event)."""
        self._free_at[waiting] = max(self._free_at[waiting], self._free_at[other])

    def synchronize(self, queue: Queue | None) -> float:
        """Let the host wait for one queue, or for all; return the time afterwards."""
        ends = self._free_at.values() if queue is None else (self._free_at[queue],)
        self.now_s = max(self.now_s, *ends, 0.0)
        return self.now_s
