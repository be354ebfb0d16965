"""CUDA driver calls for managed memory, behind a protocol.

`CudaDriver` calls the real driver through cuda-bindings; tests use a simulated driver that models
pages and time. Pointers are integers. A location is a device ordinal or `HOST`. Calls return the
driver's error code, 0 for success; the caller decides what an error means.
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
"""Location number of host memory; devices have their ordinal."""


class CudaCode(IntEnum):
    """The CUDA error codes that `gracetune.memory` handles."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_DEVICE = 101
    NOT_SUPPORTED = 801


class PointerKind(Enum):
    """Kind of memory at an address, according to the CUDA driver."""

    UNKNOWN = "unknown"
    """Pageable host memory, or no memory at all."""
    HOST = "host"
    """Page-locked (pinned) host memory."""
    DEVICE = "device"
    MANAGED = "managed"


class Advice(Enum):
    """Kinds of memory advice for `cuMemAdvise`, with the numbers of `CUmem_advise`."""

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


@dataclass(frozen=True, slots=True)
class RangeState:
    """The advice and the last prefetch of a managed memory range, as the driver reports them."""

    preferred: int | None
    """Preferred location of the range; None if it has none, or if its pages differ."""
    last_prefetch: int | None
    """Target of the last prefetch; None if there was none, or if the range's pages differ."""
    read_mostly: bool
    accessed_by: tuple[int, ...]
    """Locations into which the range stays mapped (accessed-by advice), in ascending order."""


class Driver(Protocol):
    """The CUDA driver calls that `gracetune.memory` needs; tests have a simulated driver."""

    def attribute(self, name: str, device: int) -> int | None:
        """Return a device attribute by its CUDA name in lower case; None if it is unknown."""
        ...

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return the free and the total bytes of a device."""
        ...

    def allocate_managed(self, nbytes: int) -> tuple[int, int]:
        """Allocate managed memory; return (error code, pointer)."""
        ...

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """Allocate pinned host memory; return (error code, pointer)."""
        ...

    def free(self, pointer: int) -> int:
        """Free memory from `allocate_managed` or `allocate_pinned`; return an error code."""
        ...

    def pointer_kind(self, pointer: int) -> PointerKind:
        """Return the kind of memory at an address."""
        ...

    def advise(self, pointer: int, nbytes: int, advice: Advice, location: int) -> int:
        """Give the driver advice about a managed memory range; return an error code."""
        ...

    def prefetch(self, pointer: int, nbytes: int, location: int, stream: int) -> int:
        """Move a managed memory range to a location, in stream order; return an error code."""
        ...

    def discard(self, pointer: int, nbytes: int, stream: int) -> int:
        """Discard the contents of a managed memory range; return an error code."""
        ...

    def range_state(self, pointer: int, nbytes: int) -> RangeState:
        """Return the advice and the last prefetch of a managed memory range."""
        ...


# The CUDA driver through cuda-bindings, which CUDA builds of torch install and CPU builds do not.
# CUDA 12 and 13 differ in three function names; `CudaDriver` selects them when it is created.

_CUDA_13 = 13000
_AT_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_AT_HOST = 2  # CU_MEM_LOCATION_TYPE_HOST
_ATTACH_GLOBAL = 1
_PORTABLE = 1
_NO_LOCATION = -2
_MEMORY_TYPE_DEVICE = 2
_LEGACY_STREAM = 0
_PER_THREAD_STREAM = 2
"""Handle of CUDA's per-thread default stream.

`CudaDriver.discard` uses it in place of the legacy default stream, for which CUDA rejects discards.
Each of the two streams waits for work queued on the other.
"""


class NoDriverError(GracetuneError):
    """Raised if there is no usable CUDA driver or device."""


def open_cuda_driver() -> CudaDriver:
    """Open the CUDA driver; raise `NoDriverError` if there is no usable device."""
    try:
        bindings = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NoDriverError(
            "cuda-bindings is not installed, so managed memory cannot be used. CUDA builds of "
            "torch install it: install one of those, or `pip install cuda-bindings` with the major "
            "version of your CUDA."
        ) from error
    return CudaDriver(bindings)


class CudaDriver:
    """The real CUDA driver, called through cuda-bindings; needs at least one device."""

    def __init__(self, bindings: ModuleType) -> None:
        self._cuda = bindings
        try:
            code = int(bindings.cuInit(0)[0])
        except RuntimeError as error:
            reason = str(error).rstrip(".")
            raise NoDriverError(
                f"no NVIDIA driver was found: {reason}. Install one, or run without a GPU."
            ) from error
        if code:
            raise NoDriverError(
                f"the NVIDIA driver failed to start: cuInit returned {code} "
                f"({self.error_name(code)}). Run `nvidia-smi` to see whether a GPU is usable."
            )
        self.device_count = int(bindings.cuDeviceGetCount()[1])
        if self.device_count == 0:
            raise NoDriverError(
                "the NVIDIA driver sees no GPU. CUDA_VISIBLE_DEVICES may hide them all."
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
        self._locations = {
            location: self._cuda_location(location) for location in range(HOST, self.device_count)
        }
        self._advices = {advice: bindings.CUmem_advise(advice.value) for advice in Advice}

    def error_name(self, code: int) -> str:
        """Return CUDA's name for an error code."""
        try:
            failed, name = self._cuda.cuGetErrorName(self._cuda.CUresult(code))
        except ValueError:  # newer than the bindings
            return f"CUDA error {code}"
        return f"CUDA error {code}" if int(failed) else str(name.decode())

    def attribute(self, name: str, device: int) -> int | None:
        """Return a device attribute; None if cuda-bindings or the driver do not know it."""
        known = self._cuda.CUdevice_attribute.__members__
        key = f"CU_DEVICE_ATTRIBUTE_{name.upper()}"
        if key not in known:
            return None
        code, value = self._cuda.cuDeviceGetAttribute(known[key], self._device(device))
        return None if int(code) else int(value)

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return the free and the total bytes of a device."""
        code = int(self._cuda.cuCtxPushCurrent(self._context(device))[0])
        assert code == CudaCode.SUCCESS, f"device {device}: {self.error_name(code)}"
        try:
            failed, free, total = self._cuda.cuMemGetInfo()
        finally:
            self._cuda.cuCtxPopCurrent()
        assert int(failed) == CudaCode.SUCCESS, f"device {device}: {self.error_name(int(failed))}"
        return int(free), int(total)

    def allocate_managed(self, nbytes: int) -> tuple[int, int]:
        """Allocate managed memory that every device may use."""
        self._ensure_context()
        code, pointer = self._cuda.cuMemAllocManaged(nbytes, _ATTACH_GLOBAL)
        return int(code), 0 if int(code) else int(pointer)

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """Allocate pinned host memory that every device may use."""
        self._ensure_context()
        code, pointer = self._cuda.cuMemHostAlloc(nbytes, _PORTABLE)
        return int(code), 0 if int(code) else int(pointer)

    def free(self, pointer: int) -> int:
        """Free managed or pinned memory."""
        self._ensure_context()
        if self.pointer_kind(pointer) is PointerKind.HOST:
            return int(self._cuda.cuMemFreeHost(pointer)[0])
        return int(self._cuda.cuMemFree(pointer)[0])

    def pointer_kind(self, pointer: int) -> PointerKind:
        """Return the kind of memory at an address; pageable host memory is UNKNOWN."""
        self._ensure_context()
        code, managed = self._cuda.cuPointerGetAttribute(self._is_managed, pointer)
        if not int(code) and managed:
            return PointerKind.MANAGED
        code, kind = self._cuda.cuPointerGetAttribute(self._memory_type, pointer)
        if int(code):
            return PointerKind.UNKNOWN
        return PointerKind.DEVICE if int(kind) == _MEMORY_TYPE_DEVICE else PointerKind.HOST

    def advise(self, pointer: int, nbytes: int, advice: Advice, location: int) -> int:
        """Call `cuMemAdvise`."""
        if location not in self._locations:
            return CudaCode.INVALID_DEVICE
        self._ensure_context()
        return int(
            self._advise(pointer, nbytes, self._advices[advice], self._locations[location])[0]
        )

    def prefetch(self, pointer: int, nbytes: int, location: int, stream: int) -> int:
        """Call `cuMemPrefetchAsync`."""
        if location not in self._locations:
            return CudaCode.INVALID_DEVICE
        self._ensure_context()
        return int(self._prefetch(pointer, nbytes, self._locations[location], 0, stream)[0])

    def discard(self, pointer: int, nbytes: int, stream: int) -> int:
        """Call `cuMemDiscardBatchAsync`, which needs CUDA 13 in the bindings and the driver."""
        if self._discard is None:
            return CudaCode.NOT_SUPPORTED
        self._ensure_context()
        pointers = [self._cuda.CUdeviceptr(pointer)]
        ordered = _PER_THREAD_STREAM if stream == _LEGACY_STREAM else stream
        try:
            return int(self._discard(pointers, [nbytes], 1, 0, ordered)[0])
        except RuntimeError:  # the bindings have the function, but the driver is older
            return CudaCode.NOT_SUPPORTED

    def range_state(self, pointer: int, nbytes: int) -> RangeState:
        """Return the advice and last prefetch that all pages of a managed memory range share."""
        self._ensure_context()
        attributes = self._cuda.CUmem_range_attribute
        preferred = self._range_attribute(
            attributes.CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, pointer, nbytes
        )
        fetched = self._range_attribute(
            attributes.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, pointer, nbytes
        )
        mostly = self._range_attribute(
            attributes.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, pointer, nbytes
        )
        size = 4 * (self.device_count + 1)  # all devices and the CPU, as 32-bit integers
        code, accessed = self._cuda.cuMemRangeGetAttribute(
            size, attributes.CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, pointer, nbytes
        )
        known = [] if int(code) else [int(location) for location in accessed]
        return RangeState(
            preferred=None if preferred == _NO_LOCATION else preferred,
            last_prefetch=None if fetched == _NO_LOCATION else fetched,
            read_mostly=mostly == 1,
            accessed_by=tuple(sorted({location for location in known if location != _NO_LOCATION})),
        )

    def _range_attribute(self, attribute: object, pointer: int, nbytes: int) -> int:
        code, value = self._cuda.cuMemRangeGetAttribute(4, attribute, pointer, nbytes)
        return _NO_LOCATION if int(code) else int(value)

    def _cuda_location(self, location: int) -> object:
        target = self._cuda.CUmemLocation()
        target.type = self._cuda.CUmemLocationType(_AT_HOST if location == HOST else _AT_DEVICE)
        target.id = max(location, 0)
        return target

    def _device(self, ordinal: int) -> object:
        code, device = self._cuda.cuDeviceGet(ordinal)
        assert int(code) == CudaCode.SUCCESS, f"device {ordinal}: {self.error_name(int(code))}"
        return device

    def _context(self, ordinal: int) -> object:
        """Return a device's primary context, which torch uses too; it is never released."""
        if ordinal not in self._contexts:
            code, context = self._cuda.cuDevicePrimaryCtxRetain(self._device(ordinal))
            if int(code):
                raise NoDriverError(
                    f"device {ordinal} cannot be used: {self.error_name(int(code))}. Another "
                    "process may hold it in exclusive mode, or its memory may be full."
                )
            self._contexts[ordinal] = context
        return self._contexts[ordinal]

    def _ensure_context(self) -> None:
        """Make device 0's context current if this thread has none, as the CUDA runtime does.

        Checked once per thread: the context may change later, but never back to none.
        """
        if "ready" in self._thread.__dict__:
            return
        if int(self._cuda.cuCtxGetCurrent()[1]) == 0:
            self._cuda.cuCtxSetCurrent(self._context(0))
        self._thread.ready = True
