"""A driver without a GPU: pages, residency, faults, copy engines, and a clock of its own.

It answers every verb of the protocol as CUDA does, codes included, and keeps the books that a real
driver hides. Beside the protocol it has what a program does to memory: `touch`, `copy`, `compute`,
`synchronize`. Nothing real is allocated. One thread may use it.

Work takes bytes over the rate of `Rates`. A transfer that starts while the other direction is busy
is slowed; the one already under way is not. A range larger than the device is prefetched as far as
it fits, and touched in pieces that evict each other.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gracetune.memory.driver import HOST, Advice, Code, PointerKind, RangeState
from gracetune.memory.residency import SimulatedResidency
from gracetune.memory.timeline import Queue, Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.memory.pages import PageState, Run
    from gracetune.memory.platform import DeviceSpec, Rates
    from gracetune.memory.residency import Range

_PIECES = 64
"""A touch goes in pieces of this share of a place, so that a large one can evict its own head."""


@dataclass(slots=True)
class BothWays:
    """Bytes by direction, seen from the device."""

    into: int = 0
    out: int = 0

    def add(self, target: int, nbytes: int) -> None:
        """Count bytes that went to a place."""
        if target == HOST:
            self.out += nbytes
        else:
            self.into += nbytes


@dataclass(slots=True)
class Traffic:
    """Bytes that moved, by cause, since the driver was made."""

    prefetched: BothWays = field(default_factory=BothWays)
    faulted: BothWays = field(default_factory=BothWays)
    copied: BothWays = field(default_factory=BothWays)
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
            return Code.NOT_SUPPORTED, 0
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
            return Code.INVALID_VALUE
        self._memory.remove(found)
        return Code.SUCCESS

    def pointer_kind(self, pointer: int) -> PointerKind:
        """The kind of the allocation around the address."""
        found = self._memory.find(pointer, 1)
        return PointerKind.UNKNOWN if found is None else found.kind

    def advise(self, pointer: int, nbytes: int, advice: Advice, place: int) -> int:
        """Write the advice on the pages; nothing moves."""
        found, code = self._managed("advise", pointer, nbytes, place)
        if found is None:
            return code
        for run in self._memory.runs(found, pointer, nbytes):
            found.pages.update(run.first, run.last, lambda state: _advised(state, advice, place))
            if advice is Advice.UNSET_READ_MOSTLY:
                self._memory.keep_one_copy(found, run)
        return Code.SUCCESS

    def prefetch(self, pointer: int, nbytes: int, place: int, stream: int) -> int:
        """Bring pages to a place, in stream order; the caller is held for part of the way."""
        found, code = self._managed("prefetch", pointer, nbytes, place)
        if found is None:
            return code
        rates, home = self._rates(place), self._home(place)
        self.time.now_s += rates.prefetch_call_s
        busy_s = 0.0
        for run in self._memory.claim(found, pointer, nbytes):
            found.pages.update(
                run.first, run.last, lambda state: replace(state, last_prefetch=place)
            )
            if home in run.state.places:
                continue
            moved = self._memory.bring(found, run, home)
            if run.state.places:
                rate = rates.prefetch_out if home == HOST else rates.prefetch_in
                busy_s += self._transfer(moved, rate, max(run.state.places), home, stream)
                self.traffic.prefetched.add(home, moved)
        self.time.now_s += rates.prefetch_held_share * busy_s
        return Code.SUCCESS

    def discard(self, pointer: int, nbytes: int, stream: int) -> int:
        """Forget contents: no write-back now, none when the pages would be evicted."""
        found, code = self._managed("discard", pointer, nbytes, HOST)
        if found is None:
            return code
        self.traffic.discarded += self._memory.drop(found, pointer, nbytes)
        self.time.run((Queue("stream", stream),), 0.0)
        return Code.SUCCESS

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
        self, pointer: int, nbytes: int, place: int, stream: int = 0, *, write: bool = False
    ) -> None:
        """A kernel (or the CPU) reads or writes a managed range, faulting where it must."""
        found = self._memory.find(pointer, nbytes)
        assert found is not None, f"{pointer:#x} is not allocated for {nbytes} bytes"
        assert found.kind is PointerKind.MANAGED, f"{pointer:#x} is {found.kind.value}"
        capacity = self._memory.capacity[self._home(place)]
        piece = max(1, capacity // _PIECES // self.page_bytes) * self.page_bytes
        for start in range(pointer, pointer + nbytes, piece):
            size = min(piece, pointer + nbytes - start)
            for run in self._memory.claim(found, start, size):
                self._touch(found, run, place, stream, write=write)

    def copy(self, nbytes: int, source: int, target: int, stream: int) -> None:
        """A copy engine moves pinned or device memory; the call returns at once."""
        rates = self._rates(max(source, target))
        self.time.now_s += rates.call_s
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
            for place in run.state.places:
                resident[place] += self._memory.size(run)
        return dict(resident)

    # Helpers.

    def _allocate(
        self, verb: str, nbytes: int, kind: PointerKind, place: int, room: int
    ) -> tuple[int, int]:
        if verb in self._failing:
            return self._failing[verb], 0
        if nbytes <= 0:
            return Code.INVALID_VALUE, 0
        if nbytes > room:
            return Code.OUT_OF_MEMORY, 0
        return Code.SUCCESS, self._memory.add(nbytes, kind, place).pointer

    def _managed(
        self, verb: str, pointer: int, nbytes: int, place: int
    ) -> tuple[Range | None, int]:
        """The managed range a verb is about, or the code CUDA gives instead."""
        if verb in self._failing:
            return None, self._failing[verb]
        found = self._memory.find(pointer, nbytes)
        if found is None or found.kind is not PointerKind.MANAGED:
            return None, Code.INVALID_VALUE
        if place != HOST and not 0 <= place < len(self.devices):
            return None, Code.INVALID_DEVICE
        asked = range(len(self.devices)) if place == HOST else (place,)
        if not any(self.attribute("concurrent_managed_access", device) for device in asked):
            return None, Code.INVALID_DEVICE
        return found, Code.SUCCESS

    def _touch(self, found: Range, run: Run, place: int, stream: int, *, write: bool) -> None:
        rates, home = self._rates(place), self._home(place)
        if home in run.state.places:
            here = run
        elif self._reads_in_place(run.state, place):
            here = run._replace(last=run.first)
        else:
            here = self._pull(found, run, home, stream)
        self._memory.touch(found, here, home, write=write)
        local_s = self._memory.size(here) / (rates.host if place == HOST else rates.device)
        over = self._memory.size(run) - self._memory.size(here)
        self.traffic.read_in_place += over
        self._work(local_s + over / rates.read_in_place, place, stream)

    def _pull(self, found: Range, run: Run, home: int, stream: int) -> Run:
        """Fault pages in, as many as find room; the rest stays with the host, or is made there."""
        moved = self._memory.bring(found, run, home)
        here = run._replace(last=run.first + moved // self.page_bytes)
        if run.state.places:
            self.traffic.faulted_pages += here.last - here.first
            self.traffic.faulted.add(home, moved)
            self._transfer(moved, self._rates(home).fault, max(run.state.places), home, stream)
        elif here.last < run.last:
            self._memory.bring(found, run._replace(first=here.last), HOST)
        return here

    def _reads_in_place(self, state: PageState, place: int) -> bool:
        """Whether the toucher goes over the link instead of pulling the page."""
        if not state.places:
            return False
        if place == HOST:
            holder = max(state.places)
            return self.attribute("direct_managed_mem_access_from_host", holder) == 1
        return place in state.accessed_by and state.preferred in state.places

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

    def _work(self, seconds: float, place: int, stream: int) -> None:
        """A kernel on its device; or the CPU itself, which waits for its data first."""
        if place == HOST:
            self.synchronize(stream)
            self.time.now_s += seconds
        else:
            self.compute(seconds, place, stream)

    def _rates(self, place: int) -> Rates:
        return self.devices[max(place, 0)].rates

    def _shared(self, device: int) -> bool:
        return self.attribute("integrated", device) == 1

    def _home(self, place: int) -> int:
        """Where pages sent to a place really are: an integrated device has no memory of its own."""
        return HOST if place == HOST or self._shared(place) else place


def _advised(state: PageState, advice: Advice, place: int) -> PageState:
    match advice:
        case Advice.SET_READ_MOSTLY:
            return replace(state, read_mostly=True)
        case Advice.UNSET_READ_MOSTLY:
            return replace(state, read_mostly=False)
        case Advice.SET_PREFERRED_LOCATION:
            return replace(state, preferred=place)
        case Advice.UNSET_PREFERRED_LOCATION:
            return replace(state, preferred=None)
        case Advice.SET_ACCESSED_BY:
            return replace(state, accessed_by=state.accessed_by | {place})
        case Advice.UNSET_ACCESSED_BY:
            return replace(state, accessed_by=state.accessed_by - {place})
