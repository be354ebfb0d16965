"""`gracetune plan RUN`: memory and speed of a run before it is started, and how to run it best."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cli.main import add_run_file_arguments
from gracetune.config.checks import trains_in_bf16
from gracetune.config.load import load_run_file
from gracetune.errors import ConfigError
from gracetune.units import GIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.config.schema import AdapterSection, PlanSection, RunFile
    from gracetune.events.types import Notice
    from gracetune.memory.platform import Machine
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.memory import FixedMemory
    from gracetune.plan.meta_models import MetaModel
    from gracetune.plan.problem import TrainedSize
    from gracetune.plan.search import PlanBudget

HELP = "memory and speed of a run before it is started, for this machine or a known one"
CAPTION_SUFFIXES = {".txt", ".json", ".jsonl", ".csv", ".parquet", ".caption"}


@dataclass(frozen=True, slots=True)
class Where:
    """The machine a plan is for."""

    title: str
    basics: MachineRates
    device_nbytes: int
    host_nbytes: int
    simulated: bool
    one_memory: bool = False
    """Whether host and device have the same memory."""
    host_is_known: bool = True
    """False: a usual size stands in, and the user may know of more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run file, the machine, the budget."""
    add_run_file_arguments(parser)
    parser.add_argument(
        "--machine", metavar="NAME", help="plan for a known machine, such as gh200-96"
    )
    parser.add_argument("--hbm", metavar="SIZE", help="device memory to plan with, such as 96GB")
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="host memory to plan with, such as 400GB"
    )
    parser.add_argument(
        "--samples", type=_count, metavar="N", help="samples of the data set, where it is not here"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of samples; say 1 or more")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Plan for this machine, or for a known one."""
    from gracetune.memory.platform import open_machine

    return plan(args, open_machine, _measured)


def plan(
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
) -> int:
    """Trace, choose, print; a test hands in the machine."""
    run_file = load_run_file(args.run_file, args.overrides).run
    where = _where(args, open_machine, measured, run_file.model.family)

    from gracetune.plan.meta_models import build_meta_model
    from gracetune.plan.problem import (
        QUANTIZED_SHARES,
        constraints_of,
        fixed_memory_of,
        largest_sample,
        make_plan,
        plan_settings,
    )
    from gracetune.plan.report import ReportHeading, report_json, report_lines

    picture = largest_sample(run_file)
    shape = build_meta_model(run_file.model, picture)
    trained = _trained(run_file, shape)
    budget, caps = _budget(args, plan_settings(run_file), where)
    samples = count_samples(run_file) if args.samples is None else args.samples
    fixed = fixed_memory_of(run_file, shape, trained, samples, budget.device_nbytes)
    if budget.one_memory:
        fixed = _with_staged(fixed, run_file)
    planned = make_plan(
        shape.subject(),
        where.basics,
        fixed,
        budget,
        constraints_of(run_file),
        frozen_compute=run_file.model.frozen_compute,
        stored_share=QUANTIZED_SHARES[run_file.model.quantize],
        simulated=where.simulated,
    )
    ramp = run_file.gh200_optimizations
    frames = f", {picture.frames} frames" if picture.frames > 1 else ""
    heading = ReportHeading(
        model=f"{shape.name} ({shape.source})",
        sample=f"{picture.width}x{picture.height}{frames}",
        machine=where.title,
        budget=budget,
        notes=(*caps, *_notes(run_file, samples, budget.one_memory)),
        has_ramp=ramp.enable_batch_size_rampup and ramp.target_effective_batch_size is not None,
    )
    if args.json:
        print(json.dumps(report_json(planned, heading), indent=2))
    else:
        print(*report_lines(planned, heading), sep="\n")
    return 0


def _budget(
    args: argparse.Namespace, settings: PlanSection, where: Where
) -> tuple[PlanBudget, tuple[str, ...]]:
    """What a plan may take, never more than the machine has; with notes where that cuts it."""
    from gracetune.plan.machines import FITTED_CONSTANTS
    from gracetune.plan.search import PlanBudget

    notes: list[str] = []

    def most(option: str | None, name: str, setting: str | None, key: str, there_is: int) -> int:
        asked, told = (setting, key) if option is None else (option, name)
        if asked is None:
            return there_is
        if parse_bytes(asked) > there_is:
            notes.append(
                f"{told} is {asked}, more than the machine can give: planned with "
                f"{format_bytes(there_is)}"
            )
        return min(parse_bytes(asked), there_is)

    device = where.device_nbytes - int(FITTED_CONSTANTS["context_nbytes"].value)
    device = most(args.hbm, "--hbm", settings.device_memory, "plan.device_memory", device)
    said = args.host_memory or settings.host_memory
    host = where.host_nbytes
    if said is not None and not where.host_is_known:
        host = max(host, parse_bytes(said))
    host = most(args.host_memory, "--host-memory", settings.host_memory, "plan.host_memory", host)
    if where.one_memory:
        host = min(host, device)
    fragmentation = FITTED_CONSTANTS["fragmentation"].value
    return PlanBudget(device, host, fragmentation, where.one_memory), tuple(notes)


def _where(
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
    family: str,
) -> Where:
    from gracetune.memory.platform import Link
    from gracetune.plan.machines import MACHINES, find_machine, machine_rates

    if args.machine is not None:
        known = find_machine(args.machine)
        device = int(known.device_memory.value)
        return Where(
            title=known.title,
            basics=machine_rates(known),
            device_nbytes=device,
            host_nbytes=known.host_bytes,
            simulated=True,
            one_memory=known.link is Link.INTEGRATED,
            host_is_known=known.host_memory.kind != "assumed",
        )
    platform = open_machine().platform
    if platform.device < 0:
        why = platform.reasons["link"].rstrip(".")
        raise ConfigError(
            f"there is no GPU to plan for: {why}. Name a machine with --machine: "
            f"{', '.join(sorted(MACHINES))}."
        )
    return Where(
        title=f"this machine ({format_bytes(platform.device_bytes)} GPU)",
        basics=measured(platform.device, family),
        device_nbytes=platform.device_bytes,
        host_nbytes=platform.host_bytes,
        simulated=False,
        one_memory=platform.link is Link.INTEGRATED,
    )


def _measured(device: int, family: str) -> MachineRates:
    import torch

    from gracetune.plan.device_benchmark import measure_gpu

    return measure_gpu(torch.device("cuda", device), family, _emit)


def _emit(notice: Notice) -> None:
    """Beside the plan, which may be JSON."""
    print(notice.text, file=sys.stderr)


def _trained(run_file: RunFile, shape: MetaModel) -> TrainedSize:
    """What one expert trains, and what the optimizer keeps for it."""
    from gracetune.optim.build import state_nbytes_per_element
    from gracetune.optim.offloaded_state import StateOffloadSettings
    from gracetune.plan.problem import MASTER_NBYTES, TrainedSize

    count = make_trainable(shape, run_file.adapter)
    trained = [p for p in shape.model.parameters() if p.requires_grad]
    if run_file.adapter is None and not trains_in_bf16(run_file):
        for parameter in trained:
            parameter.data = parameter.data.float()
    each = state_nbytes_per_element(run_file.optimizer)
    if trained[0].dtype.itemsize < MASTER_NBYTES:
        each += MASTER_NBYTES
    slots = StateOffloadSettings().slots_nbytes([p.numel() for p in trained], each)
    return TrainedSize(sum(p.nbytes for p in trained), int(count * each), slots)


def make_trainable(shape: MetaModel, section: AdapterSection | None) -> int:
    """Put an adapter onto the meta model as a run does, or train all of it; how many numbers."""
    if section is None:
        shape.model.requires_grad_(True)
    else:
        from gracetune.plan.launch_probe import prepare_for_training

        prepare_for_training(shape, section)
    return sum(p.numel() for p in shape.model.parameters() if p.requires_grad)


def count_samples(run_file: RunFile) -> int | None:
    """Files of local data sets that are no captions; none where some cannot be listed."""
    total = 0
    for section in run_file.datasets:
        folder = None if section.instance_data_dir is None else Path(section.instance_data_dir)
        if folder is None or not folder.is_dir():
            return None
        files = [path for path in folder.rglob("*") if path.is_file()]
        files = [path for path in files if path.suffix.lower() not in CAPTION_SUFFIXES]
        total += len(files) * section.variants
    return total


def _with_staged(fixed: FixedMemory, run_file: RunFile) -> FixedMemory:
    """Files that are staged are in the one memory too, beside what is encoded from them."""
    return replace(fixed, host_caches_nbytes=fixed.host_caches_nbytes + staged_nbytes(run_file))


def staged_nbytes(run_file: RunFile) -> int:
    """Files of local data sets that are staged, as large as they are on disk."""
    from gracetune.config.schema import STAGED_TYPES

    total = 0
    for section in run_file.datasets:
        folder = None if section.instance_data_dir is None else Path(section.instance_data_dir)
        if folder is not None and section.type in STAGED_TYPES:
            files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            limit = section.in_memory.memory_limit_gb
            total += files if limit is None else min(files, int(limit * GIB))
    return total


def _notes(run_file: RunFile, samples: int | None, one_memory: bool = False) -> tuple[str, ...]:
    notes = []
    if one_memory and run_file.optimizer.state == "host":
        notes.append("optimizer.state is host, but there is one memory: state stays where it is")
    if samples is None:
        notes.append(
            "the data sets cannot be listed here, so their caches are not counted in host memory; "
            "--samples says how many samples there are"
        )
    if run_file.model.path is not None and not Path(run_file.model.path).is_dir():
        notes.append(
            f"model.path {run_file.model.path!r} is no folder here; the published shape is planned"
        )
    return tuple(notes)
