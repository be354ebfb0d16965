"""What NVML adds to the driver's attributes, where it is installed and willing to say.

NVML is optional: `pynvml` may be missing, and on some machines (DGX Spark) most questions are
answered Not Supported. Neither is an error; each becomes a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gracetune.memory.driver import Driver

ADDRESSING = {0: "none", 1: "hmm", 2: "ats"}
"""NVML's addressing modes by number."""


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """One device as NVML sees it."""

    c2c: bool | None
    """Whether the NVLink-C2C link is up; none: not said."""
    c2c_why: str
    addressing: str | None
    """`ats`, `hmm` or `none`; none: not said."""
    addressing_why: str


class C2cMode(Protocol):
    """NVML's answer about NVLink-C2C."""

    isC2cEnabled: int  # noqa: N815  NVML's spelling


class Nvml(Protocol):
    """The part of `pynvml` that is asked; a test hands in its own."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetHandleByPciBusId(self, bus: str, /) -> object: ...  # noqa: N802
    def nvmlDeviceGetC2cModeInfoV(self, handle: object, /) -> C2cMode: ...  # noqa: N802
    def nvmlDeviceGetAddressingMode(self, handle: object, /) -> int: ...  # noqa: N802


def import_nvml() -> Nvml | None:
    """The installed NVML bindings, or none: they only add certainty."""
    try:
        import pynvml
    except ImportError:
        return None
    module: Nvml = pynvml
    return module


def read_nvml(nvml: Nvml | None, driver: Driver, device: int) -> NvmlFacts:
    """Ask NVML about the device that the driver calls `device`, matched by its place on the bus."""
    if nvml is None:
        return _nothing("pynvml is not installed (pip install nvidia-ml-py)")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _nothing(f"NVML did not start: {error}")
    try:
        return _ask(nvml, bus_id(driver, device))
    except nvml.NVMLError as error:
        return _nothing(f"NVML does not know the device: {error}")
    finally:
        nvml.nvmlShutdown()


def bus_id(driver: Driver, device: int) -> str:
    """The device's PCI address; ordinals differ between CUDA and NVML, addresses do not."""
    domain, bus, slot = (
        driver.attribute(name, device) or 0
        for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def _ask(nvml: Nvml, address: str) -> NvmlFacts:
    handle = nvml.nvmlDeviceGetHandleByPciBusId(address)
    c2c: bool | None = None
    addressing: str | None = None
    try:
        c2c = bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled)
        c2c_why = f"NVML says NVLink-C2C is {'on' if c2c else 'off'}"
    except (nvml.NVMLError, AttributeError) as error:  # older bindings lack the newer questions
        c2c_why = f"NVML does not say whether there is a C2C link: {error}"
    try:
        mode = nvml.nvmlDeviceGetAddressingMode(handle)
        addressing = ADDRESSING.get(mode)
        addressing_why = f"NVML says addressing mode {addressing or mode}"
    except (nvml.NVMLError, AttributeError) as error:
        addressing_why = f"NVML does not say the addressing mode: {error}"
    return NvmlFacts(c2c, c2c_why, addressing, addressing_why)


def _nothing(reason: str) -> NvmlFacts:
    return NvmlFacts(None, reason, None, reason)
