"""Allocate what a training run keeps (optimizer state, EMA, ...) in CUDA managed memory, by role.

A role is what memory is for. Each role has one placement, which says where its pages are at home
and how kernels reach them:

    in_place   home in host memory; kernels read and write it over the link
    prefetch   home in host memory; moved to the device before kernels use it, and back afterwards
    device     home on the device; the driver moves pages to the host only if the device is full
    balanced   no home; pages stay where they were used last

If the caller does not name a placement, the access pattern (`uvm_access_pattern`) chooses it:
`gpu_first` is `device` while the device has headroom and else `in_place`, `cpu_first` is
`in_place`, `balanced` is `balanced`. Without a pattern it is `in_place`.

Every allocation (slab) is counted by role before it is made, and refused beyond the cap with
torch's OutOfMemoryError. Slabs come from the driver, not from torch's allocator: their bytes are
exact, they return to the system at once, and torch's own limits do not count them. `ManagedPool`
is for tensors that torch itself allocates, such as batches. A slab that was given up, by `free` or
at the end of the run (`close`), is freed with the last tensor that uses it.

`cuMemPrefetchAsync` blocks its caller for most of the transfer, so `PrefetchThread` calls it, in
chunks, on streams of its own (P, one for each direction). C is the stream of the kernels:

    C   kernels so far | record ready | other kernels | wait done | kernels that use the pages
    P                    wait ready | chunk | chunk | ... | record done
"""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch

from gracetune.events.types import Notice
from gracetune.memory.driver import HOST, Advice, CudaCode
from gracetune.memory.oversubscription import cuda_is_in_use
from gracetune.memory.shim import AccessPattern
from gracetune.memory.stats import Tier
from gracetune.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from gracetune.memory.driver import Driver
    from gracetune.memory.stats import MemoryAccounting

ManagedRole = Literal[
    "weights", "trained", "gradients", "optimizer", "ema", "caches", "activations"
]
MANAGED_ROLES: tuple[ManagedRole, ...] = get_args(ManagedRole)
"""Roles that can be in managed memory: frozen weights, trained weights, gradients, optimizer state,
the moving average of the weights, text embeddings kept on the device, and activations that are kept
at the boundaries of blocks."""
ManagedPlacement = Literal["in_place", "prefetch", "device", "balanced"]
HOMES: Mapping[ManagedPlacement, Literal["device", "host"] | None] = {
    "in_place": "host",
    "prefetch": "host",
    "device": "device",
    "balanced": None,
}
"""Preferred location of pages by placement. Without one, the driver keeps pages where they were
used last."""
CHUNK_NBYTES = 32 * MIB
"""Bytes of one prefetch call. Larger chunks are no faster, and block other calls for longer."""
GROUP_NBYTES = 256 * MIB
"""Size of the slabs of `ManagedMemory.allocate_groups`: two of them are on the device at a time."""
ALIGNMENT = 512
"""Alignment of tensors in a slab, in bytes: that of torch's own device memory."""


class ManagedMemoryFullError(torch.OutOfMemoryError):
    """Raised if an allocation of managed memory would exceed the cap, or the driver refuses it."""


@dataclass(slots=True, eq=False)
class ManagedSlab:
    """One allocation of managed memory."""

    role: ManagedRole
    placement: ManagedPlacement
    pointer: int
    memory: Tensor
    """The allocation as a tensor of bytes on the device."""

    @property
    def nbytes(self) -> int:
        """Size of the allocation in bytes."""
        return len(self.memory)

    def address_of(self, part: Tensor) -> int:
        """Return the driver's address of a tensor that is a view of this slab."""
        return self.pointer + part.data_ptr() - self.memory.data_ptr()


class PendingPrefetch(Protocol):
    """A prefetch that was requested and may not have finished."""

    def wait(self) -> None:
        """Make kernels that are queued from now on run after the prefetch."""
        ...


class Prefetcher(Protocol):
    """Moves ranges of managed memory between host and device, in the order of requests."""

    def start(
        self,
        ranges: Sequence[tuple[int, int]],
        location: int,
        after: PendingPrefetch | None = None,
    ) -> PendingPrefetch:
        """Start to move (address, bytes) ranges after all work that is queued so far.

        `after` is an earlier prefetch that must come first, such as the way back.
        """
        ...

    def drain(self) -> None:
        """Block until the driver has received all requests."""
        ...

    def close(self) -> None:
        """Wait for all requests and stop."""
        ...


class ManagedMemory:
    """Allocates managed memory for the roles of a run, within a cap, and counts it by role."""

    def __init__(
        self,
        driver: Driver,
        device: int,
        accounting: MemoryAccounting,
        prefetcher: Prefetcher,
        emit: Callable[[Notice], None],
        tensor_of: Callable[[ManagedArray], Tensor] | None = None,
        pattern: AccessPattern | None = None,
        enough: Callable[[int], int] = lambda total: total // 10,
    ) -> None:
        """`tensor_of` makes a tensor of bytes, whose storage must keep the array alive.

        `pattern` is the setting `uvm_access_pattern`. `enough` returns how many bytes of a device
        should stay free, from its total bytes; `gpu_first` uses the device only above that.
        """
        self.pattern = pattern
        self._driver = driver
        self._device = device
        self._accounting = accounting
        self._prefetcher = prefetcher
        self._emit = emit
        self._tensor_of = tensor_of or (lambda array: cuda_tensor_of(array, device))
        self._enough = enough
        self._slabs: list[ManagedSlab] = []
        self._refused: set[str] = set()
        self.prefetched_bytes = {"device": 0, "host": 0}
        """Bytes that were prefetched so far, by target."""

    def allocate(
        self, role: ManagedRole, nbytes: int, placement: ManagedPlacement | None = None
    ) -> ManagedSlab:
        """Allocate bytes for a role and advise the driver where they belong.

        Without a placement, the access pattern chooses it.

        Raises:
            ManagedMemoryFullError: The cap or the driver refuses the allocation. Nothing changed.
        """
        assert role in MANAGED_ROLES, role
        assert nbytes > 0, f"{role}: {nbytes} bytes"
        placement = placement or self.default_placement(nbytes)
        if not self._accounting.reserve(Tier.MANAGED, role, nbytes):
            raise ManagedMemoryFullError(self._explain_cap(role, nbytes))
        code, pointer = self._driver.allocate_managed(nbytes)
        if code != CudaCode.SUCCESS:
            self._accounting.release(Tier.MANAGED, role, nbytes)
            raise ManagedMemoryFullError(
                f"The driver refused {format_bytes(nbytes)} of managed memory for {role} "
                f"(code {code})."
            )
        array = ManagedArray(pointer, nbytes)
        freeing = weakref.finalize(
            array,
            _free_pages,
            *(self._driver, self._device, self._accounting, self._prefetcher, role),
            *(pointer, nbytes),
        )
        freeing.atexit = False  # at exit kernels may still use it; it ends with the process
        slab = ManagedSlab(role, placement, pointer, self._tensor_of(array))
        self._slabs.append(slab)
        self._advise(slab)
        return slab

    def check_room(self, role: ManagedRole, nbytes: int) -> None:
        """Raise `ManagedMemoryFullError` if the cap does not allow so many bytes more."""
        if nbytes > self.room_for(role):
            self._accounting.deny(Tier.MANAGED)
            raise ManagedMemoryFullError(self._explain_cap(role, nbytes))

    def hold(self, role: ManagedRole, nbytes: int) -> None:
        """Keep bytes of the cap for later allocations of a role, in place of those held before.

        Neither other roles nor batches get them.

        Raises:
            ManagedMemoryFullError: The cap does not allow them. Nothing changed.
        """
        if not self._accounting.hold(Tier.MANAGED, role, nbytes):
            raise ManagedMemoryFullError(self._explain_cap(role, nbytes))

    def allocate_like(
        self,
        role: ManagedRole,
        tensors: Iterable[Tensor],
        placement: ManagedPlacement | None = None,
    ) -> tuple[ManagedSlab, list[Tensor]]:
        """Allocate one slab with room for a copy of each tensor; return it and the empty copies.

        The copies have the strides of the originals, which must be dense.
        """
        tensors = list(tensors)
        offsets = list(accumulate((slab_nbytes([tensor]) for tensor in tensors), initial=0))
        slab = self.allocate(role, slab_nbytes(tensors), placement)
        copies = [
            slab.memory[offset : offset + tensor.nbytes]
            .view(tensor.dtype)
            .as_strided(tensor.size(), tensor.stride())
            for offset, tensor in zip(offsets, tensors, strict=False)  # the last offset is the end
        ]
        return slab, copies

    def allocate_all(
        self,
        role: ManagedRole,
        groups: Iterable[Sequence[Tensor]],
        placement: ManagedPlacement | None = None,
    ) -> list[tuple[ManagedSlab, list[Tensor]]]:
        """Allocate one slab for each group, as `allocate_like`; if one is refused, free all."""
        groups = list(groups)
        total = sum(slab_nbytes(group) for group in groups)
        self.check_room(role, total)
        placement = placement or self.default_placement(total)
        made: list[tuple[ManagedSlab, list[Tensor]]] = []
        with ExitStack() as undo:
            undo.callback(self._free_groups, made)
            for group in groups:
                made.append(self.allocate_like(role, group, placement))
            undo.pop_all()
        return made

    def _free_groups(self, made: list[tuple[ManagedSlab, list[Tensor]]]) -> None:
        while made:
            self.free(made.pop()[0])

    def allocate_groups(
        self,
        role: ManagedRole,
        tensors: Sequence[Tensor],
        placement: ManagedPlacement | None = None,
    ) -> list[tuple[ManagedSlab, list[Tensor]]]:
        """Allocate as `allocate_all`, in groups of about `GROUP_NBYTES`, in the same order.

        A step can then prefetch one group while it uses another.
        """
        groups: list[list[Tensor]] = [[]]
        nbytes = 0
        for tensor in tensors:
            if groups[-1] and nbytes + tensor.nbytes > GROUP_NBYTES:
                groups.append([])
                nbytes = 0
            groups[-1].append(tensor)
            nbytes += tensor.nbytes
        return self.allocate_all(role, groups, placement)

    def free(self, slab: ManagedSlab) -> None:
        """Free a slab, once the kernels that are queued so far are done.

        If a tensor still uses it, it is freed together with that.
        """
        self._slabs.remove(slab)
        del slab.memory

    def prefetch(
        self, slab: ManagedSlab, to: Literal["device", "host"], after: PendingPrefetch | None = None
    ) -> PendingPrefetch:
        """Start to move a slab to the device or the host, after all work queued so far."""
        return self.prefetch_parts([(slab, slab.memory)], to, after)

    def prefetch_parts(
        self,
        parts: Sequence[tuple[ManagedSlab, Tensor]],
        to: Literal["device", "host"],
        after: PendingPrefetch | None = None,
    ) -> PendingPrefetch:
        """Start to move some tensors, each with its slab, to the device or the host.

        `after` is an earlier prefetch of the same memory in the other direction.
        """
        ranges = [(slab.address_of(part), part.nbytes) for slab, part in parts]
        self.prefetched_bytes[to] += sum(nbytes for _, nbytes in ranges)
        return self._prefetcher.start(ranges, HOST if to == "host" else self._device, after)

    def by_role(self) -> dict[str, int]:
        """Return the bytes of each role that has any."""
        found: dict[str, int] = {}
        for slab in self._slabs:
            found[slab.role] = found.get(slab.role, 0) + slab.nbytes
        return found

    @property
    def slabs(self) -> tuple[ManagedSlab, ...]:
        """All slabs that are allocated now."""
        return tuple(self._slabs)

    def placements_of(self, role: ManagedRole) -> str:
        """Return the placements of a role's slabs in words, such as `in_place`."""
        return ", ".join(sorted({slab.placement for slab in self._slabs if slab.role == role}))

    @property
    def cap_bytes(self) -> int:
        """Largest number of bytes of managed memory now, with the pool of batches."""
        return self._accounting.caps[Tier.MANAGED]

    @property
    def used_bytes(self) -> int:
        """Bytes of managed memory of all roles and of the pool of batches."""
        return self._accounting.current(Tier.MANAGED)

    @property
    def held_bytes(self) -> int:
        """Bytes of the cap that are kept for later allocations of all roles."""
        return self._accounting.held(Tier.MANAGED)

    @property
    def free_bytes(self) -> int:
        """Bytes that the cap still allows, without those that are held for a role."""
        return max(0, self.cap_bytes - self.used_bytes - self.held_bytes)

    def room_for(self, role: ManagedRole) -> int:
        """Return the bytes that a role may still allocate: what is free, and what it holds."""
        return self._accounting.room(Tier.MANAGED, role)

    def change_placement(self, slab: ManagedSlab, placement: ManagedPlacement) -> None:
        """Give a slab another placement, and move its pages to their new home, if they have one."""
        slab.placement = placement
        self._advise(slab, is_new=False)
        home = HOMES[placement]
        if home is not None:
            self.prefetch(slab, home).wait()

    def default_placement(self, nbytes: int) -> ManagedPlacement:
        """Return the placement that the access pattern gives to a new slab."""
        if self.pattern is AccessPattern.BALANCED:
            return "balanced"
        if self.pattern is AccessPattern.GPU_FIRST:
            free, total = self.device_memory()
            if free - nbytes >= self._enough(total):
                return "device"
        return "in_place"

    def device_memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device, once queued work has finished."""
        if self._slabs and self._slabs[0].memory.is_cuda:
            torch.cuda.synchronize(self._device)
        return self._driver.memory_info(self._device)

    def close(self) -> None:
        """Stop prefetching, and give up all slabs: each is freed when no tensor uses it."""
        self._prefetcher.close()
        self._slabs.clear()

    def _advise(self, slab: ManagedSlab, *, is_new: bool = True) -> None:
        home = HOMES[slab.placement]
        location = self._device if home == "device" else HOST
        given = [(Advice.SET_ACCESSED_BY, self._device)] if is_new else []
        if home is not None:
            given.insert(0, (Advice.SET_PREFERRED_LOCATION, location))
        elif not is_new:
            given.insert(0, (Advice.UNSET_PREFERRED_LOCATION, self._device))
        for advice, location in given:
            code = self._driver.advise(slab.pointer, slab.nbytes, advice, location)
            text = f"{advice.name.lower()} for managed memory of {slab.role} failed (code {code})"
            if code != CudaCode.SUCCESS and text not in self._refused:
                self._refused.add(text)
                self._emit(Notice(text, level="warning", fallback=True))

    def _explain_cap(self, role: ManagedRole, nbytes: int) -> str:
        return (
            f"{format_bytes(nbytes)} of managed memory for {role} would exceed the cap: "
            f"{format_bytes(self.cap_bytes - self.room_for(role))} of "
            f"{format_bytes(self.cap_bytes)} are in use. Raise gh200_optimizations.managed_memory."
        )


def slab_nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of a slab with room for a copy of each tensor."""
    aligned = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    return max(aligned, ALIGNMENT)


COLDEST_FIRST: tuple[ManagedRole, ...] = (
    *("ema", "caches", "optimizer", "gradients", "activations", "trained", "weights"),
)
"""Roles in the order in which a reclamation moves their pages to the host: those that a step uses
once come before those that every block needs."""


class ManagedPages:
    """Managed memory on the device, which a reclamation moves to the host.

    It is used in place there until `restore`: otherwise its pages would come back when they are
    used next, and nothing would be free. Memory with the placement `prefetch` stays as it is, since
    each use of it ends with its way back to the host.
    """

    def __init__(
        self, memory: Callable[[], ManagedMemory | None], enough: Callable[[int], int]
    ) -> None:
        """`memory` returns the managed memory of the run; None if it has none.

        `enough` returns how many bytes of a device should be free, from its total bytes.
        """
        self._memory = memory
        self._enough = enough
        self._moved: dict[ManagedSlab, ManagedPlacement] = {}
        """Memory that was moved to the host, with its placement before."""

    def trim(self) -> int:
        """Move memory to the host, coldest first, until enough is free; return the bytes moved.

        The driver may keep device memory that pages have left, for the next ones, so the bytes that
        it reports as free need not change.
        """
        memory = self._memory()
        if memory is None:
            return 0
        free, total = memory.device_memory()
        moved = 0
        for slab in sorted(memory.slabs, key=lambda slab: COLDEST_FIRST.index(slab.role)):
            if free + moved >= self._enough(total):
                break
            if slab.placement in ("device", "balanced"):
                self._moved[slab] = slab.placement
                memory.change_placement(slab, "in_place")
                moved += slab.nbytes
        return moved

    def restore(self) -> None:
        """Let memory be where it was before `trim`; what was at home on the device moves there."""
        memory = self._memory()
        moved, self._moved = self._moved, {}
        if memory is not None:
            for slab, placement in moved.items():
                if slab in memory.slabs:
                    memory.change_placement(slab, placement)


class ManagedArray:
    """Managed memory, as numpy and torch describe arrays on CUDA devices.

    Tensors that torch makes of it keep it alive, so the memory is freed when this object is gone.
    """

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        (nbytes,) = self.__cuda_array_interface__["shape"]
        return int(nbytes)


def cuda_tensor_of(array: ManagedArray, device: int) -> Tensor:
    """Return a tensor of bytes that shares the memory of an array, and keeps it alive."""
    return torch.as_tensor(array, device=torch.device("cuda", device))


def _free_pages(
    driver: Driver,
    device: int,
    accounting: MemoryAccounting,
    prefetcher: Prefetcher,
    role: ManagedRole,
    pointer: int,
    nbytes: int,
) -> None:
    """Free an allocation that no tensor uses any more."""
    prefetcher.drain()  # the driver must not get a prefetch of memory that is freed
    if cuda_is_in_use():
        torch.cuda.synchronize(device)  # kernels that are queued may use it
    code = driver.free(pointer)
    assert code == CudaCode.SUCCESS, f"freeing {role} returned {code}"
    accounting.release(Tier.MANAGED, role, nbytes)


# Prefetching


class ManagedGroups:
    """Groups of managed tensors that a step uses one after the other, such as optimizer buckets.

    With the placement `prefetch`, a group moves to the device while the one before it is in use,
    and back to the host afterwards:

        to the device   group 0 | group 1 | group 2 | ...
        kernels                   group 0 | group 1 | ...
        to the host                         group 0 | ...
    """

    def __init__(self, memory: ManagedMemory) -> None:
        self._memory = memory
        self._leaving: dict[ManagedSlab, PendingPrefetch] = {}
        """Prefetches to the host that may still run, by the first slab of the group. Steps of two
        experts use different groups, so their numbers change."""

    def for_each(
        self,
        groups: Sequence[Sequence[tuple[ManagedSlab, Tensor]]],
        use: Callable[[int], None],
    ) -> None:
        """Call `use` with the number of each group, while its tensors are on the device.

        Groups with another placement than `prefetch` are used where they are.
        """
        arriving = self._fetch(groups, 0)
        for number, group in enumerate(groups):
            following = self._fetch(groups, number + 1)
            if arriving is not None:
                arriving.wait()
            use(number)
            if arriving is not None:
                self._leaving[group[0][0]] = self._memory.prefetch_parts(group, "host")
            arriving = following

    def _fetch(
        self, groups: Sequence[Sequence[tuple[ManagedSlab, Tensor]]], number: int
    ) -> PendingPrefetch | None:
        if number >= len(groups) or not groups[number]:
            return None
        first = groups[number][0][0]
        if first.placement != "prefetch":
            return None
        leaving = self._leaving.pop(first, None)
        return self._memory.prefetch_parts(groups[number], "device", leaving)


@dataclass(slots=True)
class _Request:
    ranges: Sequence[tuple[int, int]]
    location: int
    ready: torch.cuda.Event
    done: torch.cuda.Event
    after: _Request | None
    issued: threading.Event = field(default_factory=threading.Event)
    """Set when the prefetch is queued, and `done` recorded after it."""

    def wait(self) -> None:
        """Block until the prefetch is queued, then let the current stream wait for it."""
        self.issued.wait()
        torch.cuda.current_stream().wait_event(self.done)


class PrefetchThread:
    """Prefetches from two threads, one for each direction, each with a CUDA stream."""

    def __init__(self, driver: Driver, device: int, emit: Callable[[Notice], None]) -> None:
        self._driver = driver
        self._device = torch.device("cuda", device)
        self._emit = emit
        self._queues: dict[bool, SimpleQueue[_Request | None]] = {}
        """Requests by direction: True for those to the host."""
        self._newest: dict[bool, _Request] = {}
        self._threads: list[threading.Thread] = []
        self._has_failed = False

    def start(
        self,
        ranges: Sequence[tuple[int, int]],
        location: int,
        after: PendingPrefetch | None = None,
    ) -> PendingPrefetch:
        """Queue a prefetch behind all work of the current stream."""
        assert after is None or isinstance(after, _Request), after
        to_host = location == HOST
        if to_host not in self._queues:
            self._queues[to_host] = SimpleQueue()
            name = f"managed-prefetch-{'out' if to_host else 'in'}"
            work = threading.Thread(
                target=self._work, args=(self._queues[to_host],), name=name, daemon=True
            )
            work.start()
            self._threads.append(work)
        request = _Request(ranges, location, _event(), _event(), after)
        request.ready.record(torch.cuda.current_stream(self._device))
        self._newest[to_host] = request
        self._queues[to_host].put(request)
        return request

    def drain(self) -> None:
        """Block until the threads have passed all requests to the driver.

        Garbage may be collected in one of the threads itself, which must not wait for its request.
        """
        if threading.current_thread() not in self._threads:
            for request in list(self._newest.values()):
                request.issued.wait()

    def close(self) -> None:
        """Stop the threads after their last requests."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._newest.clear()
        self._threads.clear()

    def _work(self, requests: SimpleQueue[_Request | None]) -> None:
        stream: torch.cuda.Stream | None = None
        while (request := requests.get()) is not None:
            try:
                if stream is None:
                    torch.cuda.set_device(self._device)
                    stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                self._issue(request, stream)
            except Exception as error:  # noqa: BLE001  a step waits for this thread, so it goes on
                self._report(str(error).splitlines()[0])
            finally:
                request.after = None  # or each request would keep all earlier ones alive
                request.issued.set()

    def _issue(self, request: _Request, stream: torch.cuda.Stream) -> None:
        stream.wait_event(request.ready)
        if request.after is not None:
            request.after.issued.wait()
            stream.wait_event(request.after.done)
        for pointer, nbytes in request.ranges:
            self._prefetch(pointer, nbytes, request.location, stream.cuda_stream)
        request.done.record(stream)

    def _prefetch(self, pointer: int, nbytes: int, location: int, stream: int) -> None:
        for start in range(0, nbytes, CHUNK_NBYTES):
            size = min(CHUNK_NBYTES, nbytes - start)
            code = self._driver.prefetch(pointer + start, size, location, stream)
            if code != CudaCode.SUCCESS:
                self._report(f"code {code}")

    def _report(self, why: str) -> None:
        """Report the first failure; kernels then read the pages in place."""
        if not self._has_failed:
            self._has_failed = True
            text = f"prefetching managed memory failed ({why}); steps will be slower"
            self._emit(Notice(text, level="warning", fallback=True))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
