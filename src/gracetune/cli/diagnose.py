"""`gracetune diagnose`: check this machine, and print a finding and a fix for each check."""

from __future__ import annotations

import json
import math
import os
import platform as python_platform
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gracetune import __version__
from gracetune.cli.env import describe_effects, variables_in_use
from gracetune.config.environment import environment_settings, process_environment
from gracetune.data.bulk_copy import SOURCE as COPIER_SOURCE
from gracetune.data.bulk_copy import MissingBulkCopier, find_bulk_copier
from gracetune.errors import ConfigError
from gracetune.memory.machine_checks import (
    MachineFinding,
    build_report,
    check_copies,
    check_environment,
    check_faults,
    check_hints,
    check_memory,
    check_numa,
    check_oversubscription,
    check_pages,
    check_platform,
    check_pool,
    check_torch_build,
    check_versions,
    exit_code,
    fail,
    format_findings,
    ok,
    read_kernel,
    skip,
    warn,
)
from gracetune.memory.platform import Machine, open_machine
from gracetune.memory.shim import SOURCE as SHIM_SOURCE
from gracetune.memory.shim import MissingShim, ShimError, find_shim
from gracetune.units import MIB

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from gracetune.events.types import Notice
    from gracetune.memory.driver import Driver
    from gracetune.memory.machine_checks import DeviceBench, PoolTrial
    from gracetune.memory.managed_pool import PoolUnavailable
    from gracetune.memory.platform import Platform

HELP = "check this machine (versions, link, memory, bandwidths, hints) and suggest fixes"
DEVICE_CHECKS = (
    "pinned copies",
    "faults against prefetch",
    "hint round trip",
    "pool round trip",
    "oversubscription",
)
ALLOCATION_CHECKS = ("platform", "memory", "hint round trip", "pool round trip", "oversubscription")
"""Names of the checks that `--allocation-only` and `validate_uvm.py` run."""
NO_GPU = "There is no usable GPU, so the exit code is 1. Pass --allow-cpu if that is expected."
NO_GPU_ALLOWED = "There is no usable GPU, which --allow-cpu allows."
_PACKAGES = ("torch", "cuda-bindings", "nvidia-ml-py", "cupti-python", "accelerate", "diffusers")
_TRIAL_BYTES = 256 * MIB
_FREE_MEMORY_DIVISOR = 16
"""Checks allocate at most 1/16 of the free memory, so that a nearly full GPU can be checked."""


class TorchInfo(NamedTuple):
    """Version and CUDA support of the installed torch, found by importing it."""

    version: str | None
    """None if torch cannot be imported."""
    cuda: str | None
    """CUDA version of the build; None for a CPU build."""
    problem: str
    """The reason why torch cannot be imported or finds no GPU; empty if there is no problem."""
    device: str = ""
    """Name of the first GPU."""

    @property
    def sees_gpu(self) -> bool:
        """True if torch can use a GPU."""
        return self.cuda is not None and not self.problem


class Tools(NamedTuple):
    """Functions that access the machine; tests pass functions of a simulated machine."""

    find_torch: Callable[[], TorchInfo]
    open_machine: Callable[[int], Machine]
    open_bench: Callable[[Driver, Platform, int], DeviceBench]
    """Opens a device benchmark; called with a driver, a platform and the bytes to copy."""
    try_pool: Callable[[DeviceBench], PoolTrial | PoolUnavailable]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gracetune diagnose`.

    They include those of gh200_diagnostic.py, the script that this command replaces.
    """
    parser.add_argument(
        "--oversubscription-scale",
        type=float,
        default=1.5,
        metavar="X",
        help="allocate X times the device's memory as managed memory (default 1.5)",
    )
    parser.add_argument(
        "--skip-allocation", action="store_true", help="skip the oversubscription check"
    )
    parser.add_argument(
        "--force-oversubscription",
        action="store_true",
        help="oversubscribe even a GPU that is not coherent with the host; it may hang",
    )
    parser.add_argument("--allow-cpu", action="store_true", help="exit with 0 if there is no GPU")
    parser.add_argument(
        "--allocation-only", action="store_true", help="run only the checks that allocate memory"
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="GPU index (default 0)")
    parser.add_argument(
        "--output",
        default="gh200_diagnostic_report.json",
        metavar="FILE",
        help="file for the JSON report (default gh200_diagnostic_report.json)",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON report instead of text")


def run(args: argparse.Namespace) -> int:
    """Run all checks on this machine and return the exit code."""
    return diagnose(args, Tools(find_torch, open_machine, _open_bench, _try_pool))


def diagnose(args: argparse.Namespace, tools: Tools) -> int:
    """Run the checks, print the findings and write the report; return the exit code."""
    if not 0 < args.oversubscription_scale < math.inf:
        raise ConfigError(
            f"--oversubscription-scale is {args.oversubscription_scale}, but it must be a number "
            "above 0, such as 1.5."
        )
    torch = tools.find_torch()
    machine = tools.open_machine(args.device)
    findings = [
        *_host_findings(torch, machine, allow_cpu=args.allow_cpu),
        *_device_findings(torch, machine, args, tools),
        check_libraries(),  # last: checklists for the forks know the numbers of the others
    ]
    if args.allocation_only:
        findings = [finding for finding in findings if finding.name in ALLOCATION_CHECKS]
    has_gpu = machine.driver is not None or torch.sees_gpu
    code = exit_code(findings, has_gpu=has_gpu, allow_cpu=args.allow_cpu)
    document = build_report(findings, code, datetime.now(UTC).date().isoformat(), __version__)
    text = json.dumps(document, indent=2, ensure_ascii=False)
    if args.json:
        print(text)
    else:
        print(*format_findings(findings), sep="\n")
    _write(Path(args.output), text)
    if not args.json:
        print(f"Report: {args.output}")
    if not (args.json or has_gpu):
        print(NO_GPU_ALLOWED if args.allow_cpu else NO_GPU)
    return code


def find_torch() -> TorchInfo:
    """Import torch and return its version, and the reason if it finds no GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return TorchInfo(None, None, str(error))
    cuda = torch.version.cuda
    if cuda is None:
        return TorchInfo(torch.__version__, None, "")
    if torch.cuda.is_available():
        return TorchInfo(torch.__version__, cuda, "", torch.cuda.get_device_name(0))
    try:
        torch.empty(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return TorchInfo(torch.__version__, cuda, str(error).splitlines()[0])
    return TorchInfo(torch.__version__, cuda, "torch counts no devices")


def _host_findings(
    torch: TorchInfo, machine: Machine, *, allow_cpu: bool
) -> Iterator[MachineFinding]:
    release = re.match(r"[\d.]*", python_platform.release())
    kernel = read_kernel(
        Path("/proc"), Path("/sys"), release[0] if release else "", python_platform.machine()
    )
    versions = {"Python": python_platform.python_version()}
    yield check_versions({**versions, **{name: _version(name) for name in _PACKAGES}}, kernel)
    yield _environment()
    yield check_torch_build(*torch, allow_cpu=allow_cpu and machine.driver is None)
    platform = machine.platform
    yield check_platform(platform)
    free = 0 if machine.driver is None else machine.driver.memory_info(platform.device)[0]
    yield check_memory(platform, free)
    yield check_pages(platform, kernel)
    yield check_numa(platform, kernel, frozenset(os.sched_getaffinity(0)))


def check_libraries(
    shim_folder: Path = SHIM_SOURCE.parent, copier_folder: Path = COPIER_SOURCE.parent
) -> MachineFinding:
    """Check that the two compiled libraries of this package can be loaded."""
    problems = []
    try:
        shim = find_shim(shim_folder)
        if isinstance(shim, MissingShim):
            problems.append(shim.reason)
    except ShimError as error:
        problems.append(str(error).replace(f"{shim_folder}/", ""))  # no paths in the report
    copier = find_bulk_copier(copier_folder)
    if isinstance(copier, MissingBulkCopier):
        problems.append(f"the bulk copier: {copier.reason}".replace(f"{copier_folder}/", ""))
    if problems:
        return warn(
            "libraries",
            "; ".join(problems),
            "Install a wheel of gracetune, which contains both libraries. Without them managed "
            "pools do not work, and staging a dataset is slower.",
        )
    return ok("libraries", "the memory shim and the bulk copier can be loaded")


def _environment() -> MachineFinding:
    variables = variables_in_use(process_environment())
    try:
        settings = environment_settings(process_environment())
    except ConfigError as error:
        return check_environment(variables, (), str(error))
    return check_environment(variables, describe_effects(settings), "")


def _device_findings(
    torch: TorchInfo, machine: Machine, args: argparse.Namespace, tools: Tools
) -> Iterator[MachineFinding]:
    reason = _no_device_reason(torch, machine)
    if reason:
        for name in DEVICE_CHECKS:
            yield skip(name, reason)
        return
    assert machine.driver is not None
    free, _ = machine.driver.memory_info(machine.platform.device)
    nbytes = min(_TRIAL_BYTES, free // _FREE_MEMORY_DIVISOR // MIB * MIB)
    if nbytes < MIB:
        for name in DEVICE_CHECKS:
            yield fail(name, f"only {free} bytes are free", "See `nvidia-smi` for what uses them.")
        return
    bench = tools.open_bench(machine.driver, machine.platform, nbytes)
    checks: dict[str, Callable[[], MachineFinding]] = {
        "pinned copies": lambda: check_copies(bench, nbytes),
        "faults against prefetch": lambda: check_faults(bench, nbytes),
        "hint round trip": lambda: check_hints(bench, MIB),
        "pool round trip": lambda: check_pool(tools.try_pool(bench)),
        "oversubscription": lambda: _oversubscription(bench, args),
    }
    for name, check in checks.items():
        if args.allocation_only and name not in ALLOCATION_CHECKS:
            continue
        try:
            yield check()
        except RuntimeError as error:  # torch raises it for every CUDA error
            yield fail(name, str(error).splitlines()[0], "See `nvidia-smi` and the kernel's log.")


def _no_device_reason(torch: TorchInfo, machine: Machine) -> str:
    if machine.driver is None:
        return "there is no GPU: see the platform check"
    if not torch.sees_gpu:
        return "torch sees no GPU, so nothing can be timed"
    return ""


def _open_bench(driver: Driver, platform: Platform, nbytes: int) -> DeviceBench:
    from gracetune.memory.machine_checks import open_torch_bench

    return open_torch_bench(driver, platform, nbytes)


def _try_pool(bench: DeviceBench) -> PoolTrial | PoolUnavailable:
    from gracetune.memory.machine_checks import try_pool
    from gracetune.memory.managed_pool import (
        PoolSettings,
        PoolUnavailable,
        TorchMemPools,
        open_pool,
    )

    settings = PoolSettings(cap_bytes=64 * MIB)
    pool = open_pool(bench.platform, find_shim(), settings, TorchMemPools(), _print_notice)
    return pool if isinstance(pool, PoolUnavailable) else try_pool(pool, bench.driver, 16 * MIB)


def _oversubscription(bench: DeviceBench, args: argparse.Namespace) -> MachineFinding:
    if args.skip_allocation:
        return skip("oversubscription", "--skip-allocation was given")
    scale: float = args.oversubscription_scale
    return check_oversubscription(bench, scale, force=args.force_oversubscription)


def _print_notice(notice: Notice) -> None:
    print(notice.text, file=sys.stderr)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output is {path}, which cannot be written ({error.strerror}). Choose another file."
        ) from error
