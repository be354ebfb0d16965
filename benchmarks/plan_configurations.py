"""List the configurations of a training step with which the planner's predictions are tested.

A configuration says which blocks are streamed, the activation mode of each block, the batch size,
and eager or compiled. Models are three image models and a video model (see model_cases.py). Every
set was chosen before its configurations were measured:

    FIRST   the first set
    LATER   chosen after eight results of FIRST were known: fp8, and mostly eager steps of one
            sample, which are bound by the CPU
    LAST    chosen after the eager results of both were known (plan_proof.json of 13805ea) and the
            launch probe had been rewritten
    HOSTS   the eager configurations of LAST, and earlier ones whose predicted time was more than
            10 % too short, measured in rounds
    FRESH   chosen when elementwise kernels began to be timed one by one; none had been run before

`PLANNED` holds requests instead of configurations: a memory budget, and whether weights and
activations may be streamed. The planner chooses the configuration. The requests were chosen after
all other results were known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gracetune.plan.result import BlockPlan
from gracetune.plan.search import Constraints
from gracetune.plan.simulate import PlanCandidate

if TYPE_CHECKING:
    from model_cases import Case

    from gracetune.plan.result import ActivationMode

Streamed = Literal["none", "half", "all"]
SLOTS = 3


@dataclass(frozen=True)
class StepConfig:
    """A configuration of a training step: streaming, activation modes, batch size, compilation."""

    compiled: bool
    batch: int
    streamed: Streamed
    first_modes: tuple[ActivationMode, ...]
    """Activation modes of the first half of the blocks, used in turn."""
    last_mode: ActivationMode
    """Activation mode of the second half of the blocks."""
    offload_inputs: bool = False
    """True if the inputs of recomputed blocks are offloaded to host memory."""

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        sent = " from host memory" if self.offload_inputs else ""
        modes = f"{' and '.join(self.first_modes)}{sent}, then {self.last_mode}"
        return f"{how}, batch {self.batch}, {self.streamed} streamed, {modes}"

    def candidate(self, case: Case) -> PlanCandidate:
        """Return the configuration of each block of a model, as the planner takes it."""
        total = sum(case.counts)
        inside = {"none": range(0), "half": range(0, total, 2), "all": range(total)}[self.streamed]
        blocks = []
        for index in range(total):
            way = (
                self.first_modes[index % len(self.first_modes)]
                if 2 * index < total
                else self.last_mode
            )
            sends = self.offload_inputs and way == "recompute"
            blocks.append(BlockPlan("streamed" if index in inside else "resident", way, sends))
        slots = SLOTS if len(inside) else 0
        return PlanCandidate(tuple(blocks), self.batch, 1, slots, self.compiled)


FIRST: dict[str, list[StepConfig]] = {
    "flux": [
        StepConfig(False, 1, "none", ("keep",), "keep"),
        StepConfig(False, 2, "all", ("recompute",), "recompute"),
        StepConfig(False, 2, "half", ("lean",), "keep"),
        StepConfig(False, 4, "all", ("offload",), "lean"),
        StepConfig(True, 2, "half", ("lean",), "lean"),
        StepConfig(True, 4, "all", ("recompute",), "lean", offload_inputs=True),
    ],
    "qwen": [
        StepConfig(False, 1, "half", ("recompute",), "keep"),
        StepConfig(False, 4, "none", ("recompute",), "lean"),
        StepConfig(False, 2, "all", ("keep",), "keep"),
        StepConfig(True, 1, "none", ("keep",), "keep"),
        StepConfig(True, 4, "half", ("offload", "recompute"), "lean"),
    ],
    "wan": [
        StepConfig(False, 2, "half", ("offload",), "keep"),
        StepConfig(False, 4, "all", ("lean",), "lean"),
        StepConfig(True, 2, "all", ("recompute",), "keep"),
        StepConfig(True, 4, "none", ("lean",), "keep"),
    ],
    "clip": [
        StepConfig(False, 1, "none", ("recompute",), "keep"),
        StepConfig(True, 1, "half", ("recompute",), "lean"),
    ],
    "fp8": [],
}

LATER: dict[str, list[StepConfig]] = {
    "flux": [
        StepConfig(False, 1, "half", ("recompute",), "lean"),
        StepConfig(False, 1, "none", ("lean",), "recompute"),
    ],
    "qwen": [
        StepConfig(False, 1, "none", ("keep",), "keep"),
        StepConfig(False, 1, "none", ("recompute",), "recompute"),
        StepConfig(False, 1, "all", ("lean",), "keep"),
    ],
    "wan": [
        StepConfig(False, 1, "none", ("recompute",), "recompute"),
        StepConfig(False, 1, "none", ("offload",), "lean"),
        StepConfig(False, 2, "half", ("recompute",), "recompute"),
    ],
    "clip": [
        StepConfig(False, 1, "all", ("recompute",), "lean"),
    ],
    "fp8": [
        StepConfig(True, 1, "none", ("keep",), "keep"),
        StepConfig(True, 2, "none", ("recompute",), "recompute"),
        StepConfig(True, 4, "all", ("recompute",), "lean"),
    ],
}
LAST: dict[str, list[StepConfig]] = {
    "flux": [
        StepConfig(False, 1, "all", ("keep",), "recompute"),
        StepConfig(False, 2, "none", ("lean",), "lean"),
        StepConfig(True, 1, "none", ("keep",), "keep"),
    ],
    "qwen": [
        StepConfig(False, 1, "half", ("keep",), "lean"),
        StepConfig(False, 2, "half", ("recompute",), "lean"),
        StepConfig(True, 2, "all", ("lean",), "keep"),
    ],
    "wan": [
        StepConfig(False, 1, "half", ("lean",), "recompute"),
        StepConfig(False, 4, "none", ("recompute",), "keep"),
        StepConfig(True, 1, "all", ("lean",), "lean"),
    ],
    "clip": [
        StepConfig(False, 1, "half", ("offload",), "lean"),
    ],
    "fp8": [
        StepConfig(True, 1, "half", ("lean",), "recompute"),
        StepConfig(True, 2, "all", ("keep",), "lean"),
    ],
}
HOSTS: dict[str, list[StepConfig]] = {
    "flux": [
        *(way for way in LAST["flux"] if not way.compiled),
        StepConfig(False, 2, "all", ("recompute",), "recompute"),
        StepConfig(False, 2, "half", ("lean",), "keep"),
        StepConfig(False, 1, "half", ("recompute",), "lean"),
    ],
    "qwen": [
        *(way for way in LAST["qwen"] if not way.compiled),
        StepConfig(False, 1, "none", ("keep",), "keep"),
        StepConfig(False, 1, "none", ("recompute",), "recompute"),
    ],
    "wan": [
        *(way for way in LAST["wan"] if not way.compiled),
        StepConfig(False, 1, "none", ("recompute",), "recompute"),
    ],
    "clip": LAST["clip"],
    "fp8": [],
}
FRESH: dict[str, list[StepConfig]] = {
    "flux": [
        StepConfig(False, 1, "none", ("recompute",), "keep"),
        StepConfig(False, 2, "all", ("keep",), "lean"),
        StepConfig(False, 4, "half", ("offload",), "recompute"),
        StepConfig(True, 2, "none", ("lean",), "recompute"),
    ],
    "qwen": [
        StepConfig(False, 1, "all", ("recompute",), "recompute"),
        StepConfig(False, 2, "none", ("lean",), "keep"),
        StepConfig(False, 4, "half", ("offload", "lean"), "recompute"),
        StepConfig(True, 1, "half", ("offload",), "keep"),
    ],
    "wan": [
        StepConfig(False, 1, "none", ("keep",), "lean"),
        StepConfig(False, 2, "all", ("offload",), "lean"),
        StepConfig(False, 4, "half", ("recompute",), "lean"),
        StepConfig(True, 2, "half", ("keep",), "offload"),
    ],
    "clip": [
        StepConfig(False, 1, "half", ("keep",), "recompute"),
        StepConfig(False, 2, "none", ("lean",), "recompute"),
    ],
    "fp8": [],
}
CONFIGURATIONS = {
    "first": FIRST,
    "later": LATER,
    "last": LAST,
    "hosts": HOSTS,
    "fresh": FRESH,
    "all": {name: [*FIRST[name], *LATER[name], *LAST[name]] for name in LAST},
}


@dataclass(frozen=True)
class PlanRequest:
    """A memory budget for which the planner chooses a configuration."""

    compiled: bool
    budget_gb: int
    streams: Literal["none", "weights", "both"]
    """Data that may be streamed over the link: none, weights, or weights and activations."""

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        streams = {"none": ", no streams", "weights": ", no offload", "both": ""}[self.streams]
        return f"{how}, planned for {self.budget_gb} GB{streams}"

    @property
    def constraints(self) -> Constraints:
        """The request in the form that the planner takes."""
        return Constraints(
            compile=(self.compiled,), stream=self.streams != "none", offload=self.streams == "both"
        )


_PLAN_REQUESTS = [
    PlanRequest(False, 40, "both"),
    PlanRequest(False, 16, "none"),
    PlanRequest(False, 16, "weights"),
    PlanRequest(False, 8, "both"),
    PlanRequest(True, 16, "weights"),
    PlanRequest(True, 8, "both"),
]
PLANNED = {
    "flux": _PLAN_REQUESTS,
    "qwen": _PLAN_REQUESTS,
    "wan": _PLAN_REQUESTS,
    "clip": [PlanRequest(False, 24, "both")],
    "fp8": [],
}


def make_record(title: str, case: Case, candidate: PlanCandidate) -> dict[str, Any]:
    """Return a configuration as a record of plan_proof.json, in the format of plan_check.py."""
    return {
        "name": title,
        "model": case.family,
        "config": dict(case.config),
        "width": case.sample.width,
        "height": case.sample.height,
        "frames": case.sample.frames,
        "batch": candidate.batch,
        "compiled": candidate.compiled,
        "slots": candidate.slots,
        "streamed": list(candidate.streamed),
        "activations": [block.activations for block in candidate.blocks],
        "sends_inputs": [block.offload_input for block in candidate.blocks],
        "lora": "fused",
        "state_nbytes": 8,
        "frozen_compute": case.frozen_compute,
    }
