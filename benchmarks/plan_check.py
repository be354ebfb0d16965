"""How near the planner comes: predicted against measured, for every configuration of a file.

A file has, under `figures.configurations`, one record a measured step:

    name, model (a family), batch, compiled, seconds, peak_gib
    streamed      numbers of the streamed blocks, or "all", "every_second", "none"
    activations   of each block, or one word for all
    checkpointing "plain" where recomputed blocks did attention again too, as torch's own does
    slots, rank, width, height, frames, config (changes to the model's shape)   where not the usual
    sends_inputs  of each block: whether what it recomputes from waits in host memory
    lora          "fused" where it was prepared as a run does it; else peft's own, in bf16
    ahead         blocks whose activations were brought back ahead of backward
    frozen_compute  "fp8" where frozen products were
    state_nbytes  what the optimizer keeps of each trained number
    fitted        whether a rate in `plan/rates` was fitted to it; such records prove nothing
    excused       why a record is not counted, if it is not
    predicted_seconds, predicted_peak_gib   what the planner said before the measurement, if it did
    host          how fast the host was then, for a reader
    commit        of which it is, where a file has several
    plan          what was chosen, where it was the planner's choice
    rounds        of which the figures are means, each with its own look at the host

Needs no GPU. What was predicted before is taken as it was; all else is predicted now, for the
machine that was measured, by its name. `--again` predicts everything now.

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
from families import TRAINED_NBYTES, Case

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.models.family import SampleShape
from gracetune.plan.cost import CostModel
from gracetune.plan.machines import FITTED_CONSTANTS, effective_rates, find_machine, machine_rates
from gracetune.plan.memory import FixedMemory
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.problem import build_cost_model
from gracetune.plan.result import ACTIVATION_PREFETCH, BlockPlan
from gracetune.plan.search import predict
from gracetune.plan.simulate import PlanCandidate
from gracetune.units import GIB

if TYPE_CHECKING:
    from gracetune.plan.result import FrozenCompute

PEAK_LIMIT, SECONDS_LIMIT = 0.05, 0.10
USUAL = {"rank": 32, "width": 1024, "height": 1024, "frames": 1, "config": {}, "slots": 3}
USUAL |= {"checkpointing": "selective", "lora": "peft", "frozen_compute": "bf16"}


@dataclass(frozen=True)
class Compared:
    """One configuration."""

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
    def counts(self) -> bool:
        return not self.record.get("fitted") and not self.record.get("excused")


def main() -> int:
    """Predict, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", type=Path, nargs="*", default=[results.FOLDER / "plan_measured.json"]
    )
    parser.add_argument("--machine", default="h200-pcie", help="what was measured")
    parser.add_argument("--again", action="store_true", help="forget what was predicted before")
    arguments = parser.parse_args()
    compared = [
        compare(record, arguments.machine, arguments.again)
        for file in arguments.files
        for record in json.loads(file.read_text())["figures"]["configurations"]
    ]
    print(f"{'':72}{'seconds':>18}{'off':>8}{'peak GiB':>16}{'off':>8}")
    for one in compared:
        show(one)
    return 0 if judge(compared) else 1


def compare(record: dict[str, Any], machine_name: str, again: bool = False) -> Compared:
    """The planner's answer to one record."""
    if "predicted_seconds" in record and not again:
        return Compared(record, record["predicted_seconds"], record["predicted_peak_gib"])
    told = USUAL | record
    model, trained = model_of(
        told["model"],
        json.dumps(told["config"], sort_keys=True),
        told["rank"],
        (told["width"], told["height"], told["frames"]),
        machine_name,
        told["checkpointing"] == "plain",
        told["lora"] == "fused",
        told["frozen_compute"],
    )
    choice = choice_of(told, model.num_blocks)
    fixed = FixedMemory(
        optimizer_nbytes=int(trained * told.get("state_nbytes", 4)),
        library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
        batches_ahead=0,
    )
    plan = predict(model, choice, fixed, simulated=False)
    return Compared(record, plan.seconds.step, plan.device.total / GIB)


@cache
def model_of(
    family: str,
    config: str,
    rank: int,
    size: tuple[int, int, int],
    machine_name: str,
    plain: bool,
    fused: bool,
    frozen_compute: FrozenCompute,
) -> tuple[CostModel, int]:
    """A traced model, and how many numbers its LoRA trains."""
    basics = machine_rates(find_machine(machine_name))
    if fused:
        case = Case(family, SampleShape(*size), json.loads(config), ())
        shapes = case.shapes()
        model = CostModel(shapes, effective_rates(basics), frozen_compute)
        return model, shapes.trained_nbytes // TRAINED_NBYTES
    shape = build_meta_model(ModelSection(family=family), SampleShape(*size), json.loads(config))
    with torch.device("meta"):
        add_adapter({"": shape.model}, AdapterSection(rank=rank), shape.shapes.targets, seed=0)
    for parameter in shape.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    trained = sum(p.numel() for p in shape.model.parameters() if p.requires_grad)
    return build_cost_model(shape.trace_target(), basics, plain_checkpointing=plain), trained


def choice_of(told: dict[str, Any], num_blocks: int) -> PlanCandidate:
    """The record's own way to run, in the planner's words."""
    streamed = told["streamed"]
    named = {"all": range(num_blocks), "every_second": range(0, num_blocks, 2), "none": range(0)}
    inside = set(named[streamed] if isinstance(streamed, str) else streamed)
    ways = told["activations"]
    ways = [ways] * num_blocks if isinstance(ways, str) else ways
    assert len(ways) == num_blocks, f"{told['name']}: {len(ways)} ways for {num_blocks} blocks"
    sent = told.get("sends_inputs", [False] * num_blocks)
    blocks = tuple(
        BlockPlan("streamed" if index in inside else "resident", way, sent[index])
        for index, way in enumerate(ways)
    )
    slots = told["slots"] if inside else 0
    ahead = told.get("ahead", ACTIVATION_PREFETCH)
    return PlanCandidate(
        blocks, told["batch"], 1, slots, told["compiled"], activation_prefetch=ahead
    )


def show(one: Compared) -> None:
    """One line."""
    record = one.record
    remark = "fitted" if record.get("fitted") else record.get("excused", "")
    seconds = f"{one.seconds:>9.3f} /{record['seconds']:>7.3f}{one.seconds_off:>+8.1%}"
    peak = f"{one.peak_gib:>8.2f} /{record['peak_gib']:>6.2f}{one.peak_off:>+8.1%}"
    print(f"{record['name'][:70]:<72}{seconds}{peak}  {remark}")


def judge(compared: list[Compared]) -> bool:
    """The largest deviations among what was not fitted, and whether they are within the limits."""
    counted = [one for one in compared if one.counts]
    if not counted:
        print("nothing here was left out of the fit: there is nothing to judge")
        return False
    seconds = max(counted, key=lambda one: abs(one.seconds_off))
    peak = max(counted, key=lambda one: abs(one.peak_off))
    met = abs(seconds.seconds_off) <= SECONDS_LIMIT and abs(peak.peak_off) <= PEAK_LIMIT
    print(
        f"{'met   ' if met else 'MISSED'} {len(counted)} configurations are counted; "
        f"seconds are off by at most {seconds.seconds_off:+.1%} ({seconds.record['name']}), limit "
        f"{SECONDS_LIMIT:.0%}; the peak by at most {peak.peak_off:+.1%} ({peak.record['name']}), "
        f"limit {PEAK_LIMIT:.0%}"
    )
    return met


if __name__ == "__main__":
    sys.exit(main())
