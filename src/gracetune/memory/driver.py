"""What the memory layer asks of a GPU driver, whichever stands behind it.

`cuda_driver` calls the real one, `simulated` keeps pages, residency and a clock of its own.
Pointers are plain integers; a place is a device ordinal or `HOST`. Calls return the driver's code,
0 being success: who called decides what a code means.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum, IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from gracetune.errors import GracetuneError

if TYPE_CHECKING:
    from types import ModuleType


HOST = -1
"""The place that is not a device."""


class CudaCode(IntEnum):
    """The driver's codes that this package makes or tells apart, by their CUDA numbers."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_DEVICE = 101
    NOT_SUPPORTED = 801


class PointerKind(Enum):
    """What the driver knows about an address."""

    UNKNOWN = "unknown"
    """Plain host memory, or nothing at all."""
    HOST = "host"
    """Page-locked host memory."""
    DEVICE = "device"
    MANAGED = "managed"


class Advice(Enum):
    """The driver's advice verbs, by their CUDA numbers."""

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


@dataclass(frozen=True, slots=True)
class RangeState:
    """What was asked of a managed range: the proof that a hint took."""

    preferred: int | None
    """A place, or none."""
    last_prefetch: int | None
    read_mostly: bool
    accessed_by: tuple[int, ...]


class Driver(Protocol):
    """The verbs. A test builds a simulated one by hand; nothing below asks which it is."""

    def attribute(self, name: str, device: int) -> int | None:
        """A device attribute by its CUDA name in snake case; none where the driver has no such."""
        ...

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of the device."""
        ...

    def allocate_managed(self, nbytes: int) -> tuple[int, int]:
        """A managed range: (code, pointer)."""
        ...

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """A page-locked host range: (code, pointer)."""
        ...

    def free(self, pointer: int) -> int:
        """Give back what one of the two above handed out."""
        ...

    def pointer_kind(self, pointer: int) -> PointerKind:
        """What sort of memory this address is in."""
        ...

    def advise(self, pointer: int, nbytes: int, advice: Advice, place: int) -> int:
        """Tell where a managed range likes to live."""
        ...

    def prefetch(self, pointer: int, nbytes: int, place: int, stream: int) -> int:
        """Move a managed range, in stream order."""
        ...

    def discard(self, pointer: int, nbytes: int, stream: int) -> int:
        """Drop the contents of a managed range without writing them back."""
        ...

    def range_state(self, pointer: int, nbytes: int) -> RangeState:
        """What was last asked of a managed range."""
        ...


# ------------------------------------------------------------------------------------------
# The verbs of `Driver` over the CUDA driver, through cuda-bindings.
#
# The only file that knows cuda-bindings. torch's CUDA builds bring it; a CPU build does not, and
# then
# `open_cuda_driver` says so. CUDA 12 and 13 differ in three names: decided once, when it is opened.


_CUDA_13 = 13000
_AT_DEVICE = 1
_AT_HOST = 2
_ATTACH_GLOBAL = 1
_PORTABLE = 1
_NO_PLACE = -2
_MEMORY_TYPE_DEVICE = 2
_LEGACY_STREAM = 0
_PER_THREAD_STREAM = 2
"""Ordered with the legacy stream, which a discard refuses to run on."""


class NoDriverError(GracetuneError):
    """There is no CUDA driver to talk to."""


def open_cuda_driver() -> CudaDriver:
    """The driver of this machine; `NoDriverError` where there is no device to drive."""
    try:
        bindings = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NoDriverError(
            "cuda-bindings is not installed, so no GPU can be used for managed memory. torch's "
            "CUDA builds bring it: install one of those, or pip install cuda-bindings with the "
            "major version of your CUDA."
        ) from error
    return CudaDriver(bindings)


class CudaDriver:
    """CUDA's own answers; made only where a device exists."""

    def __init__(self, bindings: ModuleType) -> None:
        self._cuda = bindings
        try:
            code = int(bindings.cuInit(0)[0])
        except RuntimeError as error:
            raise NoDriverError(
                f"there is no NVIDIA driver: {error}. Install it, or run without a GPU."
            ) from error
        if code:
            raise NoDriverError(
                f"the NVIDIA driver does not start: cuInit returned {code} "
                f"({self.error_name(code)}). `nvidia-smi` shows whether a GPU is usable."
            )
        self.device_count = int(bindings.cuDeviceGetCount()[1])
        if self.device_count == 0:
            raise NoDriverError(
                "the NVIDIA driver shows no GPU. CUDA_VISIBLE_DEVICES may hide them all."
            )
        newest = int(bindings.CUDA_VERSION) >= _CUDA_13
        self._advise = bindings.cuMemAdvise if newest else bindings.cuMemAdvise_v2
        self._prefetch = bindings.cuMemPrefetchAsync if newest else bindings.cuMemPrefetchAsync_v2
        self._discard = bindings.cuMemDiscardBatchAsync if newest else None
        self._contexts: dict[int, object] = {}
        self._thread = threading.local()
        kinds = bindings.CUpointer_attribute
        self._is_managed = kinds.CU_POINTER_ATTRIBUTE_IS_MANAGED
        self._memory_type = kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        self._places = {place: self._location(place) for place in range(HOST, self.device_count)}
        self._advices = {advice: bindings.CUmem_advise(advice.value) for advice in Advice}

    def error_name(self, code: int) -> str:
        """CUDA's name for a code."""
        try:
            failed, name = self._cuda.cuGetErrorName(self._cuda.CUresult(code))
        except ValueError:  # newer than the bindings
            return f"CUDA error {code}"
        return f"CUDA error {code}" if int(failed) else str(name.decode())

    def attribute(self, name: str, device: int) -> int | None:
        """An attribute by its name; none where these bindings or this driver have no such."""
        known = self._cuda.CUdevice_attribute.__members__
        key = f"CU_DEVICE_ATTRIBUTE_{name.upper()}"
        if key not in known:
            return None
        code, value = self._cuda.cuDeviceGetAttribute(known[key], self._device(device))
        return None if int(code) else int(value)

    def memory_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes of the device."""
        code = int(self._cuda.cuCtxPushCurrent(self._context(device))[0])
        assert code == CudaCode.SUCCESS, f"device {device}: {self.error_name(code)}"
        try:
            failed, free, total = self._cuda.cuMemGetInfo()
        finally:
            self._cuda.cuCtxPopCurrent()
        assert int(failed) == CudaCode.SUCCESS, f"device {device}: {self.error_name(int(failed))}"
        return int(free), int(total)

    def allocate_managed(self, nbytes: int) -> tuple[int, int]:
        """A managed range that any device may use."""
        self._need_context()
        code, pointer = self._cuda.cuMemAllocManaged(nbytes, _ATTACH_GLOBAL)
        return int(code), 0 if int(code) else int(pointer)

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """A page-locked host range that any device may use."""
        self._need_context()
        code, pointer = self._cuda.cuMemHostAlloc(nbytes, _PORTABLE)
        return int(code), 0 if int(code) else int(pointer)

    def free(self, pointer: int) -> int:
        """Give back either kind; the driver itself knows which it is."""
        self._need_context()
        if self.pointer_kind(pointer) is PointerKind.HOST:
            return int(self._cuda.cuMemFreeHost(pointer)[0])
        return int(self._cuda.cuMemFree(pointer)[0])

    def pointer_kind(self, pointer: int) -> PointerKind:
        """What the driver knows about an address; a plain host address it does not know."""
        self._need_context()
        code, managed = self._cuda.cuPointerGetAttribute(self._is_managed, pointer)
        if not int(code) and managed:
            return PointerKind.MANAGED
        code, kind = self._cuda.cuPointerGetAttribute(self._memory_type, pointer)
        if int(code):
            return PointerKind.UNKNOWN
        return PointerKind.DEVICE if int(kind) == _MEMORY_TYPE_DEVICE else PointerKind.HOST

    def advise(self, pointer: int, nbytes: int, advice: Advice, place: int) -> int:
        """Pass the advice on."""
        if place not in self._places:
            return CudaCode.INVALID_DEVICE
        self._need_context()
        return int(self._advise(pointer, nbytes, self._advices[advice], self._places[place])[0])

    def prefetch(self, pointer: int, nbytes: int, place: int, stream: int) -> int:
        """Pass the prefetch on."""
        if place not in self._places:
            return CudaCode.INVALID_DEVICE
        self._need_context()
        return int(self._prefetch(pointer, nbytes, self._places[place], 0, stream)[0])

    def discard(self, pointer: int, nbytes: int, stream: int) -> int:
        """Pass the discard on; it came with CUDA 13, in the bindings and in the driver."""
        if self._discard is None:
            return CudaCode.NOT_SUPPORTED
        self._need_context()
        pointers = [self._cuda.CUdeviceptr(pointer)]
        ordered = _PER_THREAD_STREAM if stream == _LEGACY_STREAM else stream
        try:
            return int(self._discard(pointers, [nbytes], 1, 0, ordered)[0])
        except RuntimeError:  # the bindings know the call, the driver is older
            return CudaCode.NOT_SUPPORTED

    def range_state(self, pointer: int, nbytes: int) -> RangeState:
        """What holds for every page of the range; nothing does for memory that is not managed."""
        self._need_context()
        attributes = self._cuda.CUmem_range_attribute
        preferred = self._ask(attributes.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, pointer, nbytes)
        fetched = self._ask(
            attributes.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, pointer, nbytes
        )
        mostly = self._ask(attributes.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, pointer, nbytes)
        size = 4 * (self.device_count + 1)  # every device and the CPU, as 32-bit integers
        code, accessed = self._cuda.cuMemRangeGetAttribute(
            size, attributes.CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, pointer, nbytes
        )
        known = [] if int(code) else [int(place) for place in accessed]
        return RangeState(
            preferred=None if preferred == _NO_PLACE else preferred,
            last_prefetch=None if fetched == _NO_PLACE else fetched,
            read_mostly=mostly == 1,
            accessed_by=tuple(sorted({place for place in known if place != _NO_PLACE})),
        )

    def _ask(self, attribute: object, pointer: int, nbytes: int) -> int:
        code, value = self._cuda.cuMemRangeGetAttribute(4, attribute, pointer, nbytes)
        return _NO_PLACE if int(code) else int(value)

    def _location(self, place: int) -> object:
        location = self._cuda.CUmemLocation()
        location.type = self._cuda.CUmemLocationType(_AT_HOST if place == HOST else _AT_DEVICE)
        location.id = max(place, 0)
        return location

    def _device(self, ordinal: int) -> object:
        code, device = self._cuda.cuDeviceGet(ordinal)
        assert int(code) == CudaCode.SUCCESS, f"device {ordinal}: {self.error_name(int(code))}"
        return device

    def _context(self, ordinal: int) -> object:
        """The device's primary context: the one torch uses too. Kept for the process's life."""
        if ordinal not in self._contexts:
            code, context = self._cuda.cuDevicePrimaryCtxRetain(self._device(ordinal))
            if int(code):
                raise NoDriverError(
                    f"device {ordinal} cannot be used: {self.error_name(int(code))}. Another "
                    "process may hold it exclusively, or its memory may be full."
                )
            self._contexts[ordinal] = context
        return self._contexts[ordinal]

    def _need_context(self) -> None:
        """A thread that never used CUDA has no context; like the runtime, take device 0's.

        Looked at once a thread: contexts change hands there, but none goes back to having none.
        """
        if "ready" in self._thread.__dict__:
            return
        if int(self._cuda.cuCtxGetCurrent()[1]) == 0:
            self._cuda.cuCtxSetCurrent(self._context(0))
        self._thread.ready = True
