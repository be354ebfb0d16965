"""Checks that try a device out: copies, faults against prefetch, hints, oversubscription.

All ranges are small beside the device, but for the last check, which is meant to be larger than it
and therefore runs only where that is safe.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from gracetune.memory.diagnose import Figure, Finding, fail, gb_per_s, ok, skip, warn
from gracetune.memory.driver import HOST, Advice, PointerKind
from gracetune.memory.platform import Link
from gracetune.memory.pool import Unsupported
from gracetune.units import GIB, MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.memory.bench import Bench, PoolTrial
    from gracetune.memory.driver import Driver

SLOW_COPY = {Link.COHERENT: 200e9, Link.MANAGED: 12e9, Link.COPY: 6e9}
"""Pinned copies under this are far below any healthy link of the kind."""
FAULT_GAIN = 5.0
"""A first touch after a prefetch should be at least so many times faster than a faulting one."""
PIECE = 256 * MIB
HOST_RESERVE = 8 * GIB
"""Left to the rest of the machine when a device is oversubscribed on purpose."""


class DriverRefusedError(Exception):
    """A driver call within a check came back with a code."""


@contextmanager
def _managed(driver: Driver, nbytes: int) -> Iterator[int]:
    code, pointer = driver.allocate_managed(nbytes)
    _demand(code, f"allocating {format_bytes(nbytes)} of managed memory")
    try:
        yield pointer
    finally:
        driver.free(pointer)


def _demand(code: int, doing: str) -> None:
    if code != 0:
        raise DriverRefusedError(f"{doing} failed with code {code}")


def check_copies(bench: Bench, nbytes: int) -> Finding:
    """Pinned copies in both directions."""
    name, device = "pinned copies", bench.platform.device
    bench.copy(nbytes, HOST, device)
    rate_in = nbytes / bench.seconds(lambda: bench.copy(nbytes, HOST, device))
    rate_out = nbytes / bench.seconds(lambda: bench.copy(nbytes, device, HOST))
    figures = {"in_gb_per_s": gb_per_s(rate_in), "out_gb_per_s": gb_per_s(rate_out)}
    text = f"{gb_per_s(rate_in)} GB/s in, {gb_per_s(rate_out)} GB/s out"
    if bench.platform.link in SLOW_COPY and rate_in < SLOW_COPY[bench.platform.link]:
        return warn(
            name,
            text,
            f"Far below a {bench.platform.link.value} link: look at `nvidia-smi -q` (PCIe width "
            "and generation, C2C links) and at other programs on the link.",
            **figures,
        )
    return ok(name, text, **figures)


def check_faults(bench: Bench, nbytes: int) -> Finding:
    """A first touch that faults, against one after a prefetch."""
    name = "faults against prefetch"
    refusal = _no_managed(bench)
    if refusal:
        return skip(name, refusal)
    driver, device = bench.driver, bench.platform.device
    try:
        with _managed(driver, nbytes) as pointer:
            bench.touch(pointer, nbytes, HOST)
            bench.touch(pointer, nbytes, device)  # warm: compiles the kernel, maps the range
            bench.synchronize()
            bench.touch(pointer, nbytes, HOST)
            faulting_s = bench.seconds(lambda: bench.touch(pointer, nbytes, device))
            bench.touch(pointer, nbytes, HOST)
            prefetch_s = bench.seconds(
                lambda: _demand(
                    driver.prefetch(pointer, nbytes, device, bench.stream), "a prefetch"
                )
            )
            touched_s = bench.seconds(lambda: bench.touch(pointer, nbytes, device))
            back_s = bench.seconds(
                lambda: _demand(driver.prefetch(pointer, nbytes, HOST, bench.stream), "a prefetch")
            )
    except DriverRefusedError as error:
        return fail(name, str(error), "Managed memory does not work: check the driver's log.")
    figures = {
        "fault_gb_per_s": gb_per_s(nbytes / faulting_s),
        "prefetch_in_gb_per_s": gb_per_s(nbytes / prefetch_s),
        "prefetch_out_gb_per_s": gb_per_s(nbytes / back_s),
        "first_touch_gain": round(faulting_s / touched_s, 1),
    }
    text = (
        f"faulting {figures['fault_gb_per_s']} GB/s, prefetch "
        f"{figures['prefetch_in_gb_per_s']} in and {figures['prefetch_out_gb_per_s']} out, "
        f"a first touch {figures['first_touch_gain']} times faster after it"
    )
    if bench.platform.link is Link.MANAGED and faulting_s < FAULT_GAIN * touched_s:
        return warn(
            name, text, "Prefetching gains little here; measure before using it.", **figures
        )
    return ok(name, text, **figures)


def check_hints(bench: Bench, nbytes: int) -> Finding:
    """Hints are asked for, then read back from the driver."""
    name = "hint round trip"
    refusal = _no_managed(bench)
    if refusal:
        return skip(name, refusal)
    driver, device = bench.driver, bench.platform.device
    try:
        with _managed(driver, nbytes) as pointer:
            kind = driver.pointer_kind(pointer)
            _demand(driver.advise(pointer, nbytes, Advice.SET_PREFERRED_LOCATION, HOST), "advice")
            _demand(driver.advise(pointer, nbytes, Advice.SET_ACCESSED_BY, device), "advice")
            _demand(driver.prefetch(pointer, nbytes, device, bench.stream), "a prefetch")
            bench.synchronize()
            state = driver.range_state(pointer, nbytes)
    except DriverRefusedError as error:
        return fail(name, str(error), "Hints do not work here; training goes on without them.")
    taken = (kind, state.preferred, state.last_prefetch, state.accessed_by)
    if taken != (PointerKind.MANAGED, HOST, device, (device,)):
        return fail(
            name,
            f"the driver took the hints but answers {state} for {kind.value} memory",
            "Report this with your driver's version: hints cannot be trusted here.",
        )
    return ok(name, "preferred location, accessed-by and prefetch read back as asked")


def check_pool(trial: PoolTrial | Unsupported) -> Finding:
    """A tensor of ordinary torch in managed memory, made, used and given back."""
    name = "pool round trip"
    if isinstance(trial, Unsupported):
        return skip(name, trial.reason)
    figures: dict[str, Figure] = {
        "kind": trial.kind.value,
        "correct": trial.correct,
        "live_bytes": trial.live_bytes,
        "held_bytes": trial.held_bytes,
    }
    if trial.kind is not PointerKind.MANAGED:
        text = f"the pool's tensor is {trial.kind.value} memory, not managed"
        return fail(name, text, "Report this with your versions of torch and driver.", **figures)
    if not trial.correct:
        text = "the device did not read back what it wrote"
        return fail(name, text, "Do not use managed memory on this machine.", **figures)
    if trial.held_bytes:
        text = f"{format_bytes(trial.held_bytes)} stayed out after the pool was closed"
        return warn(name, text, "Report this with your version of torch.", **figures)
    text = f"a managed tensor of ordinary torch, {format_bytes(trial.live_bytes)} out and back"
    return ok(name, text, **figures)


def check_oversubscription(bench: Bench, scale: float, *, force: bool) -> Finding:
    """Managed memory larger than the device, every page of it touched by the device."""
    name = "oversubscription"
    refusal = _no_managed(bench)
    if refusal:
        return skip(name, refusal)
    platform = bench.platform
    if platform.link is not Link.COHERENT and not force:
        return skip(
            name,
            f"on a {platform.link.value} card an allocation beyond free memory can hang it",
            "Give --force-oversubscription if the machine is yours to restart.",
        )
    free, total = bench.driver.memory_info(platform.device)
    nbytes = int(scale * total) // PIECE * PIECE
    on_host = max(0, nbytes - free) + HOST_RESERVE
    if on_host > platform.host_bytes:
        return skip(
            name,
            f"{scale} times the device is {format_bytes(nbytes)}; the host would have to take "
            f"{format_bytes(on_host)} and has {format_bytes(platform.host_bytes)}",
            "Lower --oversubscription-scale.",
        )
    if nbytes == 0:
        return skip(
            name, f"{scale} times the device is less than one piece of {format_bytes(PIECE)}"
        )
    try:
        with _managed(bench.driver, nbytes) as pointer:
            seconds = bench.seconds(lambda: _sweep(bench, pointer, nbytes))
    except DriverRefusedError as error:
        return fail(name, str(error), "Lower --oversubscription-scale, or the ratio of your runs.")
    rate = nbytes / seconds
    return ok(
        name,
        f"{format_bytes(nbytes)} ({scale} times the device) touched in {format_seconds(seconds)}",
        nbytes=nbytes,
        scale=scale,
        gb_per_s=gb_per_s(rate),
    )


def _sweep(bench: Bench, pointer: int, nbytes: int) -> None:
    """Bring each piece before it is touched: what is out of room goes to the host meanwhile."""
    device = bench.platform.device
    for offset in range(0, nbytes, PIECE):
        code = bench.driver.prefetch(pointer + offset, PIECE, device, bench.stream)
        _demand(code, f"the prefetch at {format_bytes(offset)}")
        bench.touch(pointer + offset, PIECE, device)


def _no_managed(bench: Bench) -> str:
    """Why managed memory is not to be tried here, or nothing."""
    link = bench.platform.link
    if link is Link.COPY:
        return "managed memory is unsafe without concurrent access"
    if link is Link.INTEGRATED:
        return "host and device are one memory: there is nothing to move"
    return ""
