"""`gracetune plan RUN`: predict a run's memory and speed, and find the fastest way to run it.

With `--strategies`, ways to use several GPUs are compared, and one is recommended.
Neither a GPU nor weights are needed if `--machine` names a known machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from gracetune.cli.main import add_run_file_arguments, read_run
from gracetune.config.checks import trains_in_bf16
from gracetune.errors import ConfigError, MissingPackageError, ModelUnavailableError
from gracetune.models.registry import family_info
from gracetune.units import GIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.config.schema import AdapterSection, ModelSection, PlanSection, RunFile
    from gracetune.events.types import Notice
    from gracetune.memory.platform import Link, Machine
    from gracetune.plan.cost import CostModel
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.memory import FixedMemory
    from gracetune.plan.meta_models import MetaModel
    from gracetune.plan.planner_input import TrainedSize
    from gracetune.plan.report import ReportHeading
    from gracetune.plan.result import FrozenCompute
    from gracetune.plan.search import PlanBudget, SearchResult
    from gracetune.plan.strategies import Cluster, StrategyAdvice, StrategyInputs

HELP = "predict memory and speed of a run, for this machine or a known one"


@dataclass(frozen=True, slots=True)
class PlanMachine:
    """The machine that a memory plan is for: its compute and copy speeds and its memory sizes."""

    title: str
    rates: MachineRates
    device_nbytes: int
    """Memory of one GPU in bytes."""
    host_nbytes: int
    """Host memory of the whole machine in bytes."""
    simulated: bool
    """True if the compute and copy speeds are published figures, not measured on this machine."""
    one_memory: bool = False
    """True if CPU and GPU share one physical memory."""
    host_is_known: bool = True
    """False if the size of host memory is assumed; then the user may set a larger limit."""
    link: Link | None = None
    """Kind of link between CPU and GPU; None if it does not matter."""
    ranks: int = 1
    """Number of GPUs in use on each machine."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The origin of the configuration from which a run's transformer is planned."""

    section: ModelSection
    """The run's model; for a single-file checkpoint, `path` names the model that it belongs to."""
    folder: Path | None = None
    """Folder with the configuration; None if there is none here."""
    substitution: tuple[str, ...] = ()
    """Notes which say that the plan is for another model than the run's, and why."""
    note: str = ""
    """Reason why the published configuration of the run's model is used, not that of its files."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run file turned into the inputs of a plan."""

    machine: PlanMachine
    model: MetaModel
    budget: PlanBudget
    fixed: FixedMemory
    heading: ReportHeading
    samples: int | None
    """Size of the dataset; None if it is unknown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run file, machine, GPUs, memory limits, dataset size, output format."""
    add_run_file_arguments(parser)
    parser.add_argument(
        "--machine", metavar="NAME", help="plan for a known machine, such as gh200-96"
    )
    parser.add_argument(
        "--gpus",
        type=partial(_count, noun="GPUs"),
        default=1,
        metavar="N",
        help="number of GPUs of the run; those of one machine share its host memory",
    )
    parser.add_argument(
        "--gpus-per-machine",
        type=partial(_count, noun="GPUs"),
        metavar="N",
        help="number of GPUs of each machine (default: that of the known machine, or all)",
    )
    parser.add_argument(
        "--strategies",
        action="store_true",
        help="compare ways to use several GPUs (replicas, FSDP2, HSDP, offload) and recommend one",
    )
    parser.add_argument(
        "--network",
        metavar="SIZE",
        help="rate between machines for each GPU, in bytes per second, such as 50GB; for "
        "--strategies",
    )
    parser.add_argument("--hbm", metavar="SIZE", help="limit of device memory, such as 96GB")
    parser.add_argument("--host-memory", metavar="SIZE", help="limit of host memory, such as 400GB")
    parser.add_argument(
        "--samples",
        type=partial(_count, noun="samples"),
        metavar="N",
        help="size of the dataset, if it is not on this machine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def _count(text: str, noun: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {noun}; pass 1 or more")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the memory plan of a run, for this machine or the one that --machine names."""
    from gracetune.memory.platform import open_machine

    return plan(args, open_machine, measured_rates)


def plan(
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
) -> int:
    """Predict the memory and speed of a run and print the report.

    `open_machine` returns this machine, and `measured` its compute and copy speeds; tests pass
    functions of their own.
    """
    from gracetune.train.preflight import check_family_exists

    run_file = read_run(args.run_file, args.overrides)
    check_family_exists(run_file.model)  # before torch is imported

    config = find_config(run_file)
    print_substitution(config, sys.stderr if args.json else sys.stdout)
    if args.strategies:
        return _print_strategies(run_file, args, open_machine, measured, config)

    from gracetune.plan.report import report_json, report_lines

    result, heading = predict(run_file, args, open_machine, measured, config)
    if args.json:
        print(json.dumps(report_json(result, heading), indent=2))
    else:
        print(*report_lines(result, _without_substitution(heading, config)), sep="\n")
    return 0


def print_substitution(config: ModelConfig, file: TextIO) -> None:
    """Print that a plan is for another model than the run's, before it can fail.

    Otherwise an error about the memory would seem to be about the run's own model.
    """
    for note in config.substitution:
        print(f"note: {note}", file=file, flush=True)


def _without_substitution(heading: ReportHeading, config: ModelConfig) -> ReportHeading:
    notes = tuple(note for note in heading.notes if note not in config.substitution)
    return replace(heading, notes=notes)


def predict(
    run_file: RunFile,
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
    config: ModelConfig | None = None,
) -> tuple[SearchResult, ReportHeading]:
    """Return the fastest plan of a run, and what a report says about the run and the machine.

    Reads `machine`, `gpus`, `gpus_per_machine`, `hbm`, `host_memory` and `samples` of the command's
    arguments. `config` is that of `find_config`, if the caller has it.
    """
    config = config or find_config(run_file)
    prepared = prepare(run_file, args, open_machine, measured, config)

    from gracetune.plan.planner_input import constraints_of, make_plan
    from gracetune.plan.search import PlanError

    def plan_for(prepared: PreparedRun) -> SearchResult:
        return make_plan(
            prepared.model.trace_target(),
            prepared.machine.rates,
            prepared.fixed,
            prepared.budget,
            constraints_of(run_file, args.gpus),
            frozen_compute=run_file.model.frozen_compute,
            simulated=prepared.machine.simulated,
        )

    try:
        return plan_for(prepared), prepared.heading
    except PlanError:
        whole = prepare(run_file, args, open_machine, measured, config, leaves_reserve=False)
        if whole.budget == prepared.budget:
            raise
        return plan_for(whole), whole.heading


def prepare(
    run_file: RunFile,
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
    config: ModelConfig,
    *,
    leaves_reserve: bool = True,
) -> PreparedRun:
    """Build the model on the meta device, and find the memory of the machine.

    With `leaves_reserve`, a part of the device is left to managed pages, if the run uses them.
    """
    machine = _machine(args, open_machine, measured, run_file.model.family)

    from gracetune.models.quantize import check_quantizable, quantize_blocks
    from gracetune.plan.managed import describe_places
    from gracetune.plan.meta_models import build_meta_model
    from gracetune.plan.planner_input import fixed_memory_of, largest_sample, plan_settings
    from gracetune.plan.report import ReportHeading

    sample = largest_sample(run_file)
    model = build_meta_model(config.section, sample, folder=config.folder)
    kind = run_file.model.quantize
    if kind != "none":
        check_quantizable(kind, run_file.adapter)
        quantize_blocks(model.shapes.find_blocks(model.model), kind)
    trained, missing_package = _trained_size(run_file, model)
    budget, limit_notes = _budget(args, plan_settings(run_file), machine)
    whole = budget.device_nbytes
    budget = _with_managed(run_file, machine, budget)
    if not leaves_reserve:
        budget = replace(budget, device_nbytes=whole)
    if budget.device_nbytes < whole:
        left = f"{format_bytes(whole - budget.device_nbytes)} of device memory are left to managed "
        limit_notes += (f"{left}pages, because of use_uvm (uvm_stage1_threshold changes it)",)
    samples = count_samples(run_file) if args.samples is None else args.samples
    fixed = fixed_memory_of(run_file, model, trained, samples, budget.device_nbytes)
    if budget.one_memory:
        fixed = _with_staged_files(fixed, run_file)
    ramp = run_file.gh200_optimizations
    frames = f", {sample.frames} frames" if sample.frames > 1 else ""
    heading = ReportHeading(
        model=f"{model.name} ({model.source})",
        sample=f"{sample.width}x{sample.height}{frames}",
        machine=machine.title,
        budget=budget,
        notes=(
            *config.substitution,
            *limit_notes,
            *_notes(run_file, samples, config.note, budget),
            *missing_package,
        ),
        has_ramp=ramp.enable_batch_size_rampup and ramp.target_effective_batch_size is not None,
        managed_places=describe_places(
            run_file, trained_are_fp32=str(model.dtype) == "torch.float32"
        ),
    )
    return PreparedRun(machine, model, budget, fixed, heading, samples)


def _print_strategies(
    run_file: RunFile,
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
    config: ModelConfig,
) -> int:
    from gracetune.plan.strategy_report import strategy_json, strategy_lines

    advice, inputs, heading = compare_strategies(run_file, args, open_machine, measured, config)
    if args.json:
        print(json.dumps(strategy_json(advice, heading, inputs), indent=2))
    else:
        heading = _without_substitution(heading, config)
        print(*strategy_lines(advice, heading, inputs), sep="\n")
    return 0


def compare_strategies(
    run_file: RunFile,
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
    config: ModelConfig | None = None,
) -> tuple[StrategyAdvice, StrategyInputs, ReportHeading]:
    """Plan a run with each strategy for several GPUs; return the advice and what it is for."""
    from gracetune.plan.strategies import advise

    inputs, heading = strategy_inputs(run_file, args, open_machine, measured, config=config)
    return advise(inputs), inputs, heading


def strategy_inputs(
    run_file: RunFile,
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
    cost_model: CostModel | None = None,
    config: ModelConfig | None = None,
) -> tuple[StrategyInputs, ReportHeading]:
    """Return a run as the comparison of strategies takes it, and what a report says about it.

    `cost_model` is that of the same run on the same kind of machine; None: the model is traced.
    `config` is that of `find_config`, if the caller has it.
    """
    from gracetune.plan.planner_input import (
        build_cost_model,
        cached_sample_nbytes,
        constraints_of,
    )
    from gracetune.plan.strategies import StrategyInputs

    prepared = prepare(run_file, args, open_machine, measured, config or find_config(run_file))
    constraints = constraints_of(run_file, args.gpus)
    target, model = prepared.model.trace_target(), prepared.model
    if cost_model is None:
        cost_model = build_cost_model(
            target,
            prepared.machine.rates,
            run_file.model.frozen_compute,
            may_compile=True in constraints.compile,
        )
    weights = (
        model.num_transformers
        * model.dtype.itemsize
        * sum(p.numel() for p in model.model.parameters())
    )
    inputs = StrategyInputs(
        run=run_file,
        model=cost_model,
        transformer=model.model,
        blocks=target.blocks,
        fixed=prepared.fixed,
        budget=prepared.budget,
        constraints=constraints,
        cluster=_cluster(args, prepared.machine),
        compute_nbytes=model.dtype.itemsize,
        weights_nbytes=weights,
        data_nbytes=(prepared.samples or 0) * sum(cached_sample_nbytes(model)),
        simulated=prepared.machine.simulated,
    )
    heading = prepared.heading
    own = "speed and memory are those of one GPU"
    notes = tuple(note for note in heading.notes if not note.startswith(own))
    return inputs, replace(heading, notes=notes)


def _cluster(args: argparse.Namespace, machine: PlanMachine) -> Cluster:
    from gracetune.memory.platform import Link
    from gracetune.plan.machines import CLUSTERS, MACHINES, THIS_CLUSTER
    from gracetune.plan.strategies import build_cluster

    is_known = args.machine is not None
    return build_cluster(
        CLUSTERS[args.machine] if is_known else THIS_CLUSTER,
        args.gpus,
        machine.link or Link.MANAGED,
        MACHINES[args.machine].rates().fault if is_known else 0.0,
        gpus_per_machine=_gpus_per_machine(args),
        network=None if args.network is None else float(parse_bytes(args.network)),
    )


def _gpus_per_machine(args: argparse.Namespace) -> int:
    """Return the number of GPUs of each machine of the run, in use or not."""
    from gracetune.plan.machines import CLUSTERS

    if args.gpus_per_machine is not None:
        return int(args.gpus_per_machine)
    if args.machine is None:
        return int(args.gpus)
    return int(CLUSTERS[args.machine].gpus_per_machine.value)


def _budget(
    args: argparse.Namespace, settings: PlanSection, machine: PlanMachine
) -> tuple[PlanBudget, tuple[str, ...]]:
    """Return the memory budget, and a note for each limit above the machine's memory."""
    from gracetune.plan.machines import FITTED_CONSTANTS
    from gracetune.plan.search import PlanBudget

    notes: list[str] = []

    def limited(
        option: str | None, flag: str, setting: str | None, key: str, available: int
    ) -> int:
        limit, name = (setting, key) if option is None else (option, flag)
        if limit is None:
            return available
        if parse_bytes(limit) > available:
            notes.append(
                f"{name} is {limit}, more than the machine has; planning with "
                f"{format_bytes(available)}"
            )
        return min(parse_bytes(limit), available)

    usable = machine.device_nbytes - int(FITTED_CONSTANTS["context_nbytes"].value)
    device = limited(args.hbm, "--hbm", settings.device_memory, "plan.device_memory", usable)
    if machine.simulated and args.hbm is not None and device < usable:
        notes.append(
            f"only the memory is limited to {format_bytes(device)}: the speed is that of the whole "
            f"{machine.title}, and a GPU with less memory is slower"
        )
    host_limit = args.host_memory or settings.host_memory
    host = machine.host_nbytes
    if host_limit is not None and not machine.host_is_known:
        host = max(host, parse_bytes(host_limit))
    host = limited(
        args.host_memory, "--host-memory", settings.host_memory, "plan.host_memory", host
    )
    if machine.one_memory:
        host = min(host, device)
    fragmentation = FITTED_CONSTANTS["fragmentation"].value
    budget = PlanBudget(device, host, fragmentation, machine.one_memory, machine.ranks)
    return budget, tuple(notes)


def _with_managed(run_file: RunFile, machine: PlanMachine, budget: PlanBudget) -> PlanBudget:
    """Return the budget with the managed memory that one GPU of a run may use.

    As in the run, device memory above the threshold of stage 2 is then left to managed pages.
    """
    from gracetune.config.environment import environment_settings, process_environment
    from gracetune.memory.oversubscription import managed_cap
    from gracetune.memory.platform import Link
    from gracetune.memory.session import stage_policy

    section, environment = run_file.gh200_optimizations, environment_settings(process_environment())
    use_uvm = environment.use_uvm if section.use_uvm is None else section.use_uvm
    if not use_uvm or section.managed == "off" or machine.link not in (Link.MANAGED, Link.COHERENT):
        return budget
    policy, chosen = stage_policy(environment), section.managed_memory
    cap = managed_cap(
        *(policy, budget.device_nbytes, budget.host_nbytes // machine.ranks),
        chosen=None if chosen is None else parse_bytes(chosen),
        free_over_pcie=budget.device_nbytes if machine.link is Link.MANAGED else None,
    )
    if cap <= 0:
        return budget
    room = max(0, machine.device_nbytes - policy.stage2_below(machine.device_nbytes))
    return replace(budget, managed_nbytes=cap, device_nbytes=min(budget.device_nbytes, room))


def _machine(
    args: argparse.Namespace,
    open_machine: Callable[[], Machine],
    measured: Callable[[int, str], MachineRates],
    family: str,
) -> PlanMachine:
    from gracetune.memory.platform import Link
    from gracetune.plan.machines import MACHINES, find_machine, machine_rates

    if args.machine is not None:
        known = find_machine(args.machine)
        _check_gpus(args.gpus, known.link)
        device = int(known.device_memory.value)
        ranks = min(args.gpus, _gpus_per_machine(args))
        return PlanMachine(
            title=f"{args.gpus} x {known.title}" if args.gpus > 1 else known.title,
            rates=machine_rates(known),
            device_nbytes=device,
            # Every GPU of a GH200 or GB200 node has its own share of the CPUs' memory.
            host_nbytes=known.host_bytes * (ranks if known.link is Link.COHERENT else 1),
            simulated=True,
            one_memory=known.link is Link.INTEGRATED,
            host_is_known=known.host_memory.kind != "assumed",
            link=known.link,
            ranks=ranks,
        )
    platform = open_machine().platform
    _check_gpus(args.gpus, platform.link)
    if platform.device < 0:
        why = platform.reasons["link"].split(". ")[0].rstrip(".")  # without the driver's advice
        raise ConfigError(
            f"there is no GPU to plan for: {why}. Choose a machine with --machine: "
            f"{', '.join(sorted(MACHINES))}."
        )
    gpus = f"{args.gpus} x " if args.gpus > 1 else ""
    return PlanMachine(
        title=f"this machine ({gpus}{format_bytes(platform.device_bytes)} GPU)",
        rates=measured(platform.device, family),
        device_nbytes=platform.device_bytes,
        host_nbytes=platform.host_bytes,
        simulated=False,
        one_memory=platform.link is Link.INTEGRATED,
        link=platform.link,
        ranks=min(args.gpus, _gpus_per_machine(args)),
    )


def _check_gpus(gpus: int, link: Link) -> None:
    from gracetune.memory.platform import Link

    if gpus > 1 and link is Link.INTEGRATED:
        raise ConfigError(
            f"--gpus is {gpus}, but a machine whose CPU and GPU share one memory has one GPU. "
            "Leave --gpus out: the plan is the same for several such machines."
        )


def measured_rates(device: int, family: str) -> MachineRates:
    """Measure the compute and copy speeds of a GPU of this machine."""
    import torch

    from gracetune.plan.device_benchmark import measure_gpu

    return measure_gpu(torch.device("cuda", device), family, _emit)


def _emit(notice: Notice) -> None:
    """Print a notice to stderr, because stdout may be JSON."""
    print(notice.text, file=sys.stderr)


def _trained_size(run_file: RunFile, model: MetaModel) -> tuple[TrainedSize, list[str]]:
    """Add the adapter to a model on the meta device, or make all its weights trainable.

    Returns the bytes of the trained weights and of their optimizer state, and a note if the package
    of the optimizer is not installed.
    """
    from gracetune.optim.build import state_nbytes_per_element
    from gracetune.optim.offloaded_state import StateOffloadSettings
    from gracetune.optim.registry import optimizer_info
    from gracetune.plan.planner_input import MASTER_NBYTES, TrainedSize

    count = prepare_meta_model(model, run_file.adapter, run_file.model.frozen_compute)
    trained = [p for p in model.model.parameters() if p.requires_grad]
    if run_file.adapter is None and not trains_in_bf16(run_file):
        for parameter in trained:
            parameter.data = parameter.data.float()
    notes = []
    try:
        each = state_nbytes_per_element(run_file.optimizer)
    except MissingPackageError:
        name = run_file.optimizer.name
        each = optimizer_info(name).package_state_nbytes
        notes.append(
            f"the package of optimizer.name {name} is not installed; training needs it (pip "
            "install 'gracetune[optimizers]')"
        )
    if trained[0].dtype.itemsize < MASTER_NBYTES:
        each += MASTER_NBYTES
    slots = StateOffloadSettings().slots_nbytes([p.numel() for p in trained], each)
    return TrainedSize(sum(p.nbytes for p in trained), int(count * each), slots), notes


def prepare_meta_model(
    model: MetaModel, section: AdapterSection | None, frozen_compute: FrozenCompute = "bf16"
) -> int:
    """Add an adapter, or make all weights trainable; return the number of trained weights."""
    if section is None:
        model.model.requires_grad_(True)
    else:
        from gracetune.plan.launch_overhead import prepare_for_training

        prepare_for_training(model, section, frozen_compute)
    return sum(p.numel() for p in model.model.parameters() if p.requires_grad)


def count_samples(run_file: RunFile) -> int | None:
    """Count the samples of all datasets; return None if one is not in a local folder."""
    from gracetune.data.dataset import EXTENSIONS

    total = 0
    for section in run_file.datasets:
        folder = None if section.instance_data_dir is None else Path(section.instance_data_dir)
        if folder is None or not folder.is_dir():
            return None
        files = [path for path in folder.rglob("*") if path.is_file()]
        known = EXTENSIONS[section.dataset_type]
        files = [path for path in files if path.suffix.lower() in known]
        total += len(files) * section.variants
    return total


def _with_staged_files(fixed: FixedMemory, run_file: RunFile) -> FixedMemory:
    """Add the bytes of the dataset files that a run loads into host memory at its start.

    Called for a machine whose CPU and GPU share one memory.
    """
    nbytes = fixed.host_caches_nbytes + staged_nbytes(run_file)
    return replace(fixed, host_caches_nbytes=nbytes)


def staged_nbytes(run_file: RunFile) -> int:
    """Return the bytes of dataset files that a run loads into host memory at its start."""
    from gracetune.config.dataset_schema import STAGED_TYPES

    total = 0
    for section in run_file.datasets:
        folder = None if section.instance_data_dir is None else Path(section.instance_data_dir)
        if folder is not None and section.type in STAGED_TYPES:
            files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            limit = section.in_memory.memory_limit_gb
            total += files if limit is None else min(files, int(limit * GIB))
    return total


def find_config(run_file: RunFile) -> ModelConfig:
    """Find the configuration of the run's model: its own, or the published one.

    A configuration is a few kilobytes on the hub. Planning does without it, so that a run can be
    planned before its model is downloaded, or without access to it.
    """
    from gracetune.models.checkpoint_header import is_checkpoint_file
    from gracetune.models.locate import locate_configs, model_name

    section = run_file.model
    path = section.path
    if path is not None and is_checkpoint_file(path) and not Path(path).exists():
        reason = f"model.path is {path!r}, but there is no such file; training needs it"
        return ModelConfig(section, substitution=_substitution(section, reason))
    try:
        folder = locate_configs(section)
    except ModelUnavailableError as error:
        reason = str(error).splitlines()[0].rstrip(".")
    else:
        return ModelConfig(section, folder, _substitution_for_folder(section, folder))
    name = model_name(section)
    if name not in [model.name for model in family_info(section.family).models]:
        return ModelConfig(section, substitution=_substitution(section, reason))
    note = f"{name} is planned as it was published: {reason}"
    return ModelConfig(section.model_copy(update={"path": name}), note=note)


def _substitution(section: ModelSection, reason: str) -> tuple[str, ...]:
    """Return the notes for a model whose configuration is neither here nor known."""
    from gracetune.models.family import PLANNABLE, planner_shapes

    if section.family not in PLANNABLE:
        return ()  # there is no plan
    published = planner_shapes(section.family).published_name
    because = f"because the files of {section.path} are not here"
    return f"this plan is for {published}, {because}", reason


def _substitution_for_folder(section: ModelSection, folder: Path | None) -> tuple[str, ...]:
    """Return the notes for a folder without the configuration of a transformer; else nothing."""
    from gracetune.models.family import PLANNABLE, planner_shapes

    if folder is None or section.family not in PLANNABLE:
        return ()
    file = folder / planner_shapes(section.family).component / "config.json"
    if file.is_file():
        return ()
    return _substitution(section, f"there is no {file}; training needs it")


def _notes(
    run_file: RunFile, samples: int | None, config_note: str, budget: PlanBudget
) -> tuple[str, ...]:
    """Return the notes of the report. `config_note` is about the model's configuration, if any."""
    from gracetune.plan.managed import describe_other_access, managed_choices

    roles = {role for choice in managed_choices(run_file) for role in choice}
    notes = []
    if budget.ranks > 1:
        notes.append("speed and memory are those of one GPU, unless the line says otherwise")
    if budget.one_memory and run_file.optimizer.state == "host":
        notes.append(
            "optimizer.state: host has no effect, because host and device share one memory"
        )
    if samples is None:
        notes.append(
            "a dataset cannot be listed here, so its cache is not counted in host memory; pass "
            "--samples"
        )
    if budget.managed_nbytes and (note := describe_other_access(run_file, roles)):
        notes.append(note)
    if config_note:
        notes.append(config_note)
    return tuple(notes)
