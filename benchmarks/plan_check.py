"""Compare the planner's predictions with recorded measurements.

A result file has one record per measured step under `figures.configurations`:

    name, model (a family), batch, compiled, seconds, peak_gib
    streamed      indices of the streamed blocks, or "all", "every_second", "none"
    activations   the activation mode of each block, or one for all
    checkpointing "plain": recomputed blocks recompute attention too, like torch's checkpointing
    slots, rank, width, height, frames, config (changes to the model)   if not the defaults
    sends_inputs  for each block: true if its input is offloaded and it is recomputed
    lora          "fused": prepared as in a run; otherwise peft's own LoRA in bf16
    ahead         blocks whose activations were prefetched in backward
    frozen_compute  "fp8" if frozen matmuls were computed in fp8
    state_nbytes  bytes of optimizer state per trained parameter
    fitted        true if a constant of the planner was fitted to this record; it is not counted
    excused       reason why the record is not counted
    predicted_seconds, predicted_peak_gib   the prediction made before the measurement, if any
    host          launch costs of the host at that time
    commit        the measured commit, if the file has records of several commits
    plan          the plan, if the planner chose it
    rounds        single measurements; seconds and peak_gib are their means

Needs no GPU. Stored predictions are used as they are; other records are predicted now, for the
named machine. `--again` predicts all records now.

    PYTHONPATH=src:benchmarks python benchmarks/plan_check.py [FILE ...] [--machine h200-pcie]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results
import torch
from model_cases import TRAINED_NBYTES, Case

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.models.family import SampleShape
from gracetune.plan.cost import CostModel
from gracetune.plan.machines import FITTED_CONSTANTS, effective_rates, find_machine, machine_rates
from gracetune.plan.memory import FixedMemory
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.planner_input import build_cost_model
from gracetune.plan.result import ACTIVATION_PREFETCH, BlockPlan
from gracetune.plan.search import predict
from gracetune.plan.simulate import PlanCandidate
from gracetune.units import GIB

if TYPE_CHECKING:
    from gracetune.plan.result import FrozenCompute

PEAK_LIMIT, SECONDS_LIMIT = 0.05, 0.10
DEFAULTS = {"rank": 32, "width": 1024, "height": 1024, "frames": 1, "config": {}, "slots": 3}
DEFAULTS |= {"checkpointing": "selective", "lora": "peft", "frozen_compute": "bf16"}


@dataclass(frozen=True)
class Comparison:
    """A record with the predicted step time and peak memory."""

    record: dict[str, Any]
    seconds: float
    peak_gib: float

    @property
    def seconds_off(self) -> float:
        return self.seconds / self.record["seconds"] - 1

    @property
    def peak_off(self) -> float:
        return self.peak_gib / self.record["peak_gib"] - 1

    @property
    def is_within_limits(self) -> bool:
        return abs(self.seconds_off) <= SECONDS_LIMIT and abs(self.peak_off) <= PEAK_LIMIT

    @property
    def counts(self) -> bool:
        return not self.record.get("fitted") and not self.record.get("excused")


def main() -> int:
    """Predict every record, print the deviations, and return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", type=Path, nargs="*", default=[results.FOLDER / "plan_measured.json"]
    )
    parser.add_argument(
        "--machine", default="h200-pcie", help="machine on which the records were measured"
    )
    parser.add_argument(
        "--again", action="store_true", help="predict every record now, ignoring stored predictions"
    )
    arguments = results.parse_arguments(parser)
    comparisons = [
        compare(record, arguments.machine, arguments.again)
        for file in arguments.files
        for record in json.loads(file.read_text())["figures"]["configurations"][
            : 1 if arguments.rehearse else None
        ]
    ]
    print(f"{'':72}{'seconds':>18}{'off':>8}{'peak GiB':>16}{'off':>8}")
    for one in comparisons:
        show(one)
    return 0 if judge(comparisons) or arguments.rehearse else 1


def compare(record: dict[str, Any], machine_name: str, again: bool = False) -> Comparison:
    """Return a record with its stored prediction; predict now if it has none or `again` is set."""
    if "predicted_seconds" in record and not again:
        return Comparison(record, record["predicted_seconds"], record["predicted_peak_gib"])
    filled = DEFAULTS | record
    model, trained = cost_model_of(
        filled["model"],
        json.dumps(filled["config"], sort_keys=True),
        filled["rank"],
        (filled["width"], filled["height"], filled["frames"]),
        machine_name,
        filled["checkpointing"] == "plain",
        filled["lora"] == "fused",
        filled["frozen_compute"],
    )
    candidate = candidate_of_record(filled, model.num_blocks)
    fixed = FixedMemory(
        optimizer_nbytes=int(trained * filled.get("state_nbytes", 4)),
        library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
        batches_ahead=0,
    )
    plan = predict(model, candidate, fixed, simulated=False)
    return Comparison(record, plan.seconds.step, plan.device.total / GIB)


@cache
def cost_model_of(
    family: str,
    config: str,
    rank: int,
    size: tuple[int, int, int],
    machine_name: str,
    plain: bool,
    fused: bool,
    frozen_compute: FrozenCompute,
) -> tuple[CostModel, int]:
    """Return the cost model for a record, and the number of parameters that its LoRA trains."""
    rates = machine_rates(find_machine(machine_name))
    if fused:
        case = Case(family, SampleShape(*size), json.loads(config), (), frozen_compute)
        shapes = case.shapes()
        model = CostModel(shapes, effective_rates(rates), frozen_compute)
        return model, shapes.trained_nbytes // TRAINED_NBYTES
    meta_model = build_meta_model(
        ModelSection(family=family), SampleShape(*size), json.loads(config)
    )
    with torch.device("meta"):
        add_adapter(
            {"": meta_model.model}, AdapterSection(rank=rank), meta_model.shapes.targets, seed=0
        )
    for parameter in meta_model.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    trained = sum(p.numel() for p in meta_model.model.parameters() if p.requires_grad)
    return build_cost_model(meta_model.trace_target(), rates, plain_checkpointing=plain), trained


def candidate_of_record(record: dict[str, Any], num_blocks: int) -> PlanCandidate:
    """Return the record's configuration as a plan candidate."""
    streamed = record["streamed"]
    named = {"all": range(num_blocks), "every_second": range(0, num_blocks, 2), "none": range(0)}
    inside = set(named[streamed] if isinstance(streamed, str) else streamed)
    modes = record["activations"]
    modes = [modes] * num_blocks if isinstance(modes, str) else modes
    assert len(modes) == num_blocks, f"{record['name']}: {len(modes)} modes for {num_blocks} blocks"
    sent = record.get("sends_inputs", [False] * num_blocks)
    blocks = tuple(
        BlockPlan("streamed" if index in inside else "resident", way, sent[index])
        for index, way in enumerate(modes)
    )
    slots = record["slots"] if inside else 0
    ahead = record.get("ahead", ACTIVATION_PREFETCH)
    return PlanCandidate(
        blocks, record["batch"], 1, slots, record["compiled"], activation_prefetch=ahead
    )


def show(one: Comparison) -> None:
    """Print the predicted and measured values of one record in a line."""
    record = one.record
    remark = "fitted" if record.get("fitted") else record.get("excused", "")
    seconds = f"{one.seconds:>9.3f} /{record['seconds']:>7.3f}{one.seconds_off:>+8.1%}"
    peak = f"{one.peak_gib:>8.2f} /{record['peak_gib']:>6.2f}{one.peak_off:>+8.1%}"
    print(f"{record['name'][:70]:<72}{seconds}{peak}  {remark}")


def judge(comparisons: list[Comparison]) -> bool:
    """Print the largest deviations of the counted records; return True if all are within limits."""
    counted = [one for one in comparisons if one.counts]
    if not counted:
        print("nothing to judge: every record is fitted or excused")
        return False
    seconds = max(counted, key=lambda one: abs(one.seconds_off))
    peak = max(counted, key=lambda one: abs(one.peak_off))
    within = sum(one.is_within_limits for one in counted)
    met = within == len(counted)
    verdict = "met   " if met else "MISSED"
    print(
        f"{verdict} {within} of {len(counted)} configurations are within bounds; seconds are off "
        f"by at most {seconds.seconds_off:+.1%} ({seconds.record['name']}), limit "
        f"{SECONDS_LIMIT:.0%}; the peak by at most {peak.peak_off:+.1%} ({peak.record['name']}), "
        f"limit {PEAK_LIMIT:.0%}"
    )
    return met


if __name__ == "__main__":
    sys.exit(main())
