"""Compare Flux, Qwen-Image and Wan video steps with a plain loop, and test the planner.

The plain loop is what a user would write: diffusers' transformer, peft's LoRA in fp32 under bf16
autocast, gradient checkpointing, fused AdamW, SDPA, eager, at the fastest batch of 1, 2 and 4 on
the whole GPU. Ours runs as planned within 96 GB, enforced by torch's memory fraction; if a plan
does not fit, the next smaller one is used, as in a run.

Parts named `proof_*` measure the configurations of plan_configurations.py, on models with fewer
blocks; parts named `planned_*` measure what the planner chooses for the requests there. Every
configuration is predicted before it is measured, with rates from this machine, and written to
`plan_proof.json`, which `plan_check.py` judges. No constant was fitted to any of them.

Small eager batches are bound by the CPU, which on a shared host may be half as fast a minute later.
So each configuration is measured in rounds of a launch probe, a prediction and some steps. The
record has the means over the rounds. Configurations that do not wait for the CPU get fewer rounds.

    PYTHONPATH=src:benchmarks python benchmarks/families_step.py [--out FOLDER] [--commit NAME]
        [--only flux,qwen,clip,proof_eager,proof_compiled,planned_eager,planned_compiled]
        [--models flux,qwen,wan,clip,fp8] [--ways first|later|last|hosts|fresh|all] [--rehearse]

Two files are written: `families_step.json` and `plan_proof.json`. Results of parts that do not run
are kept, each with its commit.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import model_cases
import plan_configurations
import results
import torch
from plan_configurations import PlanRequest
from wan14b import free_memory, make_training_step, time_each_step

from gracetune.adapters.compute.fp8_linear import convert_to_fp8_calibrated
from gracetune.memory.platform import open_machine
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.plan.apply import PlanLayout, apply_plan, fuse_operations
from gracetune.plan.device_benchmark import measure_device
from gracetune.plan.launch_overhead import LaunchProbe, build_probe_model
from gracetune.plan.machines import FITTED_CONSTANTS, machine_rates
from gracetune.plan.report import describe
from gracetune.plan.search import Constraints, PlanBudget, PlanError, find_best_plan, predict
from gracetune.plan.simulate import candidate_of
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from model_cases import Case
    from plan_configurations import StepConfig
    from torch import nn

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Link
    from gracetune.plan.cost import CostModel
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.memory import FixedMemory
    from gracetune.plan.result import Plan
    from gracetune.plan.simulate import PlanCandidate
    from gracetune.plan.trace_records import ModelTraces

REQUIRED_RATIO = 1.5
"""Speed that is required, relative to the plain loop."""
BUDGET_NBYTES = int(96e9)
HOST_NBYTES = 90 * GIB
BUDGET_SHARES = (1.0, 0.96, 0.92, 0.86)
"""Shares of the budget, tried in turn until a plan fits."""
BATCHES = (1, 2, 4)
NO_CONSTRAINTS = Constraints()
PLAIN_STEPS = {"flux": (2, 3), "qwen": (2, 3), "clip": (1, 2)}
OUR_STEPS = (3, 5)
PROOF_STEPS = (2, 3)
"""Warm-up steps and timed steps of a round, for the parts `proof_*` and `planned_*`."""
ROUNDS, FEW_ROUNDS = 6, 3
PROBE_REPEATS = 3
"""Repetitions of the launch probe before a round."""


@dataclass
class Bench:
    """The measured device, its rates, and the results so far."""

    device: torch.device
    link: Link
    rates: MachineRates
    rehearse: bool
    out: Path
    commit: str
    figures: dict[str, Any]
    records: list[dict[str, Any]]
    traces: dict[str, ModelTraces] = field(default_factory=dict)
    probes: dict[str, LaunchProbe] = field(default_factory=dict)
    probes_nbytes: int = 0
    """Device memory of the probe models, which a run frees before its first step."""

    def case(self, case: Case) -> Case:
        """Return the case itself, or its miniature in a rehearsal."""
        return model_cases.miniature_of(case) if self.rehearse else case

    def plan_model(self, name: str, case: Case) -> tuple[CostModel, FixedMemory]:
        """Return a case's cost model with launch costs measured now; each family is traced once."""
        if name not in self.traces:
            start = time.perf_counter()
            self.traces[name] = self.case(model_cases.TRACED[name]).shapes()
            self.figures[f"{name}_trace_s"] = time.perf_counter() - start
        if self.device.type == "cuda":
            self.rates = replace(self.rates, host=self._probe(case.family).measure(PROBE_REPEATS))
        return case.plan_model(self.traces[name], self.rates)

    def _probe(self, family: str) -> LaunchProbe:
        if family not in self.probes:
            before = torch.cuda.memory_allocated(self.device)
            make_model = partial(build_probe_model, family)
            self.probes[family] = LaunchProbe(
                self.device, self.synchronize, time.perf_counter, make_model
            )
            self.probes[family].measure(1)
            self.probes_nbytes += torch.cuda.memory_allocated(self.device) - before
        return self.probes[family]

    def save(self) -> None:
        """Write the results so far."""
        results.write("families_step", self.figures, self.out, self.commit)
        results.write("plan_proof", {"configurations": self.records}, self.out, self.commit)

    def synchronize(self) -> None:
        results.synchronize(self.device)

    def limit(self, nbytes: int | None) -> None:
        """Limit the device memory of torch to `nbytes`; None removes the limit."""
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info(self.device)[1]
            share = 1.0 if nbytes is None else nbytes / total
            torch.cuda.set_per_process_memory_fraction(share, self.device)

    def time(self, step: Callable[[], torch.Tensor], steps: tuple[int, int]) -> tuple[float, float]:
        """Return the median step time in seconds and the peak memory in GiB.

        The last warm-up step and the timed ones are queued without a pause, as in a run.
        """
        warm_up, count = steps
        for _ in range(warm_up - 1):
            step()
        self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        step()
        seconds, loss = time_each_step(step, count, self.device)
        assert torch.isfinite(loss), f"the loss is {float(loss)}"
        if self.device.type != "cuda":
            return median(seconds), 1.0
        peak_nbytes = torch.cuda.max_memory_allocated(self.device) - self.probes_nbytes
        return median(seconds), peak_nbytes / GIB


def main() -> int:
    """Measure all parts; each result is written at once, even if a later part fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="flux,qwen,proof_eager,clip,proof_compiled")
    parser.add_argument(
        "--models",
        default=",".join(model_cases.SHORT),
        help="models to measure in the parts proof_* and planned_*",
    )
    parser.add_argument(
        "--ways",
        default="all",
        choices=plan_configurations.CONFIGURATIONS,
        help="configurations of the parts proof_*",
    )
    arguments = results.parse_arguments(parser)
    if arguments.rehearse:
        arguments.only, arguments.ways = "clip,proof_compiled,planned_eager", "first"
        arguments.models = "clip"
    bench = open_bench(arguments.rehearse, arguments.out, arguments.commit)
    print(bench.rates, flush=True)
    for part in arguments.only.split(","):
        start = time.perf_counter()
        try:
            if part.startswith(("proof_", "planned_")):
                kind, how = part.split("_")
                available = (
                    plan_configurations.CONFIGURATIONS[arguments.ways]
                    if kind == "proof"
                    else plan_configurations.PLANNED
                )
                chosen = {name: available[name] for name in arguments.models.split(",")}
                measure_configurations(bench, how == "compiled", chosen)
            else:
                compare_with_plain_loop(bench, part)
        finally:
            bench.figures[f"{part}_took_s"] = time.perf_counter() - start
            bench.figures[f"{part}_commit"] = bench.commit
            bench.save()
    return 0 if report(bench.figures) or arguments.rehearse else 1


def open_bench(rehearse: bool, out: Path, commit: str) -> Bench:
    """Measure the device's rates as a run does, while its memory is empty, and load old results."""
    machine = open_machine()
    found = results.read("families_step", out)
    records = results.read("plan_proof", out).get("configurations", [])
    if rehearse:
        from gracetune.plan.machines import MACHINES

        rates = machine_rates(MACHINES["h200-pcie"])
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", 0)
        rates = measure_device(device, torch.cuda.synchronize)
    commit = commit or results.this_commit()
    return Bench(device, machine.platform.link, rates, rehearse, out, commit, found, records)


def compare_with_plain_loop(bench: Bench, name: str) -> None:
    """Measure one family: the plain loop on the whole GPU, then ours within the budget."""
    for key in [key for key in bench.figures if key.startswith(f"{name}_")]:
        del bench.figures[key]  # results of an earlier run
    case = bench.case(model_cases.FULL[name])
    model = case.model(bench.device)
    measure_plain(bench, name, case, model)
    fuse_operations(model)
    free_memory()
    measure_ours(bench, name, case, model)
    ours, plain = (float(bench.figures[f"{name}_{who}_samples_s"]) for who in ("96", "plain"))
    bench.figures[f"{name}_ratio"] = ours / plain
    print(f"{name}: {ours / plain:.3f} times the plain loop", flush=True)
    del model
    free_memory()


def measure_plain(bench: Bench, name: str, case: Case, model: nn.Module) -> None:
    """Measure the plain loop until a larger batch is slower or does not fit."""
    model.enable_gradient_checkpointing()
    best = 0.0
    for batch in BATCHES:
        try:
            step = make_training_step(
                model, *case.make_forward(model, batch, bench.device), autocast=True
            )
            found = bench.time(step, PLAIN_STEPS[name])
        except torch.OutOfMemoryError as full:
            print(f"{name}: plain, batch {batch} does not fit: {str(full)[:200]}", flush=True)
            break
        record_speed(bench, f"{name}_plain_batch_{batch}", batch, found)
        if batch / found[0] < best:
            break
        best = batch / found[0]
    bench.figures[f"{name}_plain_samples_s"] = best
    model.disable_gradient_checkpointing()


def measure_ours(bench: Bench, name: str, case: Case, model: nn.Module) -> None:
    """Measure the planned step within 96 GB; if it does not fit, plan again for less memory."""
    planner, fixed = bench.plan_model(name, case)
    for share in BUDGET_SHARES:
        plan = best_plan(planner, fixed, int(BUDGET_NBYTES * share))
        title = f"{name}, all blocks, planned for 96 GB"
        try:
            record = run_plan(bench, name, title, case, model, plan, OUR_STEPS)
        except torch.OutOfMemoryError as full:
            print(f"{title} does not fit: {str(full)[:200]}", flush=True)
            continue
        record_speed(bench, f"{name}_96", plan.batch, (record["seconds"], record["peak_gib"]))
        bench.figures[f"{name}_96_plan"] = describe(plan)
        bench.figures[f"{name}_96_tries"] = BUDGET_SHARES.index(share) + 1
        return
    raise RuntimeError(f"{name}: no plan fits")


def best_plan(
    planner: CostModel, fixed: FixedMemory, nbytes: int, constraints: Constraints = NO_CONSTRAINTS
) -> Plan:
    """Return the plan with the most samples per second among all batch sizes."""
    budget = PlanBudget(nbytes, HOST_NBYTES, FITTED_CONSTANTS["fragmentation"].value)
    plans = []
    for batch in BATCHES:
        constraints = replace(constraints, samples=batch, batches=(batch,))
        try:
            plans.append(find_best_plan(planner, fixed, budget, constraints, simulated=False).best)
        except PlanError as small:
            print(f"batch {batch}: {small}", flush=True)
    if not plans:
        raise PlanError(f"nothing fits into {format_bytes(nbytes)}")
    return max(plans, key=lambda plan: plan.samples_per_second)


def measure_configurations(
    bench: Bench, compiled: bool, chosen: Mapping[str, Sequence[StepConfig] | Sequence[PlanRequest]]
) -> None:
    """Measure configurations, or plans for memory budgets, on models with fewer blocks."""
    for name, every in chosen.items():
        selected = [way for way in every if way.compiled == compiled]
        if not selected:
            continue
        case = bench.case(model_cases.SHORT[name])
        model = case.model(bench.device)
        if case.frozen_compute == "fp8":
            shown, _ = case.make_forward(model, 1, bench.device)
            convert_to_fp8_calibrated(shown, case.blocks(model), bench.device)
        fuse_operations(model)
        for configuration in selected:
            title = f"{name}, {configuration}"
            try:
                if isinstance(configuration, PlanRequest):
                    planner, fixed = bench.plan_model(name, case)
                    plan = best_plan(
                        planner, fixed, configuration.budget_gb * 10**9, configuration.constraints
                    )
                    run_plan(bench, name, title, case, model, plan)
                else:
                    run_candidate(bench, name, title, case, model, configuration.candidate(case))
            except (PlanError, torch.OutOfMemoryError) as full:
                print(f"{title} does not fit: {str(full)[:200]}", flush=True)
        del model
        free_memory()


def run_plan(
    bench: Bench,
    name: str,
    title: str,
    case: Case,
    model: nn.Module,
    plan: Plan,
    steps: tuple[int, int] = PROOF_STEPS,
) -> dict[str, Any]:
    """Measure a plan; its record includes a description of the plan."""
    print(f"{title}: {describe(plan)}", flush=True)
    record = run_candidate(bench, name, title, case, model, candidate_of(plan), steps)
    record["plan"] = describe(plan)
    bench.save()
    return record


def run_candidate(
    bench: Bench,
    name: str,
    title: str,
    case: Case,
    model: nn.Module,
    candidate: PlanCandidate,
    steps: tuple[int, int] = PROOF_STEPS,
) -> dict[str, Any]:
    """Predict and measure a configuration in rounds; write its record, replacing an earlier one."""
    blocks = case.blocks(model)
    layout = PlanLayout(candidate.blocks, candidate.compiled, candidate.slots)
    copy_engine = open_copy_engine(bench.device, bench.link)
    applied = apply_plan(model, {model: blocks}, layout, copy_engine, print_notice)
    free_memory()
    bench.limit(BUDGET_NBYTES)
    try:
        rounds = measure_rounds(bench, name, case, model, candidate, steps)
        counters = applied.ring and applied.ring.counters()
    finally:
        applied.close()
        bench.limit(None)
        free_memory()
    found = {
        key: fmean(one[key] for one in rounds)
        for key in ("seconds", "peak_gib", "predicted_seconds", "predicted_peak_gib")
    }
    print(
        f"{title}: {found['predicted_seconds']:.3f} s and {found['predicted_peak_gib']:.2f} GiB "
        f"predicted, {found['seconds']:.3f} s and {found['peak_gib']:.2f} GiB measured; {counters}",
        flush=True,
    )
    record = plan_configurations.make_record(title, case, candidate) | found
    record |= {"rounds": rounds, "commit": bench.commit}
    bench.records = [one for one in bench.records if one["name"] != title] + [record]
    bench.save()
    return record


def measure_rounds(
    bench: Bench,
    name: str,
    case: Case,
    model: nn.Module,
    candidate: PlanCandidate,
    steps: tuple[int, int],
) -> list[dict[str, Any]]:
    """Return the rounds: each has a launch probe, a prediction and some timed steps."""
    step = make_training_step(
        model, *case.make_forward(model, candidate.batch, bench.device), autocast=False
    )
    warm_up, count = steps
    for _ in range(warm_up):
        step()
    rounds: list[dict[str, Any]] = []
    enough = 1 if bench.rehearse else FEW_ROUNDS
    while len(rounds) < enough:
        planner, fixed = bench.plan_model(name, case)
        plan = predict(planner, candidate, fixed, simulated=False)
        if plan.seconds.wait_host and not bench.rehearse:
            enough = ROUNDS
        seconds, peak_gib = bench.time(step, (1, count))
        rounds.append(
            {
                "seconds": seconds,
                "peak_gib": peak_gib,
                "predicted_seconds": plan.seconds.step,
                "predicted_peak_gib": plan.device.total / GIB,
                "host": asdict(planner.rates.host),
            }
        )
    return rounds


def record_speed(bench: Bench, name: str, batch: int, found: tuple[float, float]) -> None:
    """Record and print a step time, its samples per second and its peak memory."""
    seconds, peak_gib = found
    bench.figures[f"{name}_step_s"] = seconds
    bench.figures[f"{name}_samples_s"] = batch / seconds
    bench.figures[f"{name}_peak_gib"] = peak_gib
    print(f"{name}: batch {batch}, {batch / seconds:.3f} samples/s, {peak_gib:.2f} GiB", flush=True)


def report(figures: dict[str, Any]) -> bool:
    """Print the speed of each model relative to the plain loop; return True if all suffice."""
    met = True
    for name in ("flux", "qwen", "clip"):
        found = figures.get(f"{name}_ratio")
        if isinstance(found, float):
            met &= found >= REQUIRED_RATIO
            print(f"{'met   ' if found >= REQUIRED_RATIO else 'MISSED'} {name}_ratio: {found:.3f}")
    return met


def print_notice(notice: Notice) -> None:
    """Print a notice of the applied plan."""
    print("   ", notice.text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
