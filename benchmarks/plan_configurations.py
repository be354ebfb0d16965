"""Configurations with which the planner's predictions are tested, and their records.

All were chosen before they were measured: three models and a video; resident, half and all
streamed; every activation mode and mixes of them; eager and compiled; batches of 1, 2 and 4.

    FIRST   the first set
    LATER   chosen after eight of FIRST had been seen: mostly eager steps of one sample, which are
            bound by the CPU, and fp8
    LAST    chosen after the eager ones of both had been seen (plan_proof.json of 13805ea) and the
            launch probe had been rewritten
    HOSTS   the eager ones of LAST, and earlier ones whose time was predicted more than 10 % too
            short, measured in rounds
    FRESH   chosen when elementwise kernels began to be timed one by one; none had been run before

`PLANNED` holds requests, not configurations: a memory budget and what may be streamed. The planner
chooses the configuration. They were written down after all of the above had been seen.
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
class Way:
    """One configuration of a step."""

    compiled: bool
    batch: int
    streamed: Streamed
    first: tuple[ActivationMode, ...]
    """Activation modes of the first half of the blocks, which alternate."""
    last: ActivationMode
    """Activation mode of the other half."""
    sends_inputs: bool = False
    """Whether the inputs of recomputed blocks are offloaded."""

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        sent = " from host memory" if self.sends_inputs else ""
        ways = f"{' and '.join(self.first)}{sent}, then {self.last}"
        return f"{how}, batch {self.batch}, {self.streamed} streamed, {ways}"

    def candidate(self, case: Case) -> PlanCandidate:
        """Return the configuration for a model."""
        total = sum(case.counts)
        inside = {"none": range(0), "half": range(0, total, 2), "all": range(total)}[self.streamed]
        blocks = []
        for index in range(total):
            way = self.first[index % len(self.first)] if 2 * index < total else self.last
            sends = self.sends_inputs and way == "recompute"
            blocks.append(BlockPlan("streamed" if index in inside else "resident", way, sends))
        slots = SLOTS if len(inside) else 0
        return PlanCandidate(tuple(blocks), self.batch, 1, slots, self.compiled)


FIRST: dict[str, list[Way]] = {
    "flux": [
        Way(False, 1, "none", ("keep",), "keep"),
        Way(False, 2, "all", ("recompute",), "recompute"),
        Way(False, 2, "half", ("lean",), "keep"),
        Way(False, 4, "all", ("offload",), "lean"),
        Way(True, 2, "half", ("lean",), "lean"),
        Way(True, 4, "all", ("recompute",), "lean", sends_inputs=True),
    ],
    "qwen": [
        Way(False, 1, "half", ("recompute",), "keep"),
        Way(False, 4, "none", ("recompute",), "lean"),
        Way(False, 2, "all", ("keep",), "keep"),
        Way(True, 1, "none", ("keep",), "keep"),
        Way(True, 4, "half", ("offload", "recompute"), "lean"),
    ],
    "wan": [
        Way(False, 2, "half", ("offload",), "keep"),
        Way(False, 4, "all", ("lean",), "lean"),
        Way(True, 2, "all", ("recompute",), "keep"),
        Way(True, 4, "none", ("lean",), "keep"),
    ],
    "clip": [
        Way(False, 1, "none", ("recompute",), "keep"),
        Way(True, 1, "half", ("recompute",), "lean"),
    ],
    "fp8": [],
}

LATER: dict[str, list[Way]] = {
    "flux": [
        Way(False, 1, "half", ("recompute",), "lean"),
        Way(False, 1, "none", ("lean",), "recompute"),
    ],
    "qwen": [
        Way(False, 1, "none", ("keep",), "keep"),
        Way(False, 1, "none", ("recompute",), "recompute"),
        Way(False, 1, "all", ("lean",), "keep"),
    ],
    "wan": [
        Way(False, 1, "none", ("recompute",), "recompute"),
        Way(False, 1, "none", ("offload",), "lean"),
        Way(False, 2, "half", ("recompute",), "recompute"),
    ],
    "clip": [
        Way(False, 1, "all", ("recompute",), "lean"),
    ],
    "fp8": [
        Way(True, 1, "none", ("keep",), "keep"),
        Way(True, 2, "none", ("recompute",), "recompute"),
        Way(True, 4, "all", ("recompute",), "lean"),
    ],
}
LAST: dict[str, list[Way]] = {
    "flux": [
        Way(False, 1, "all", ("keep",), "recompute"),
        Way(False, 2, "none", ("lean",), "lean"),
        Way(True, 1, "none", ("keep",), "keep"),
    ],
    "qwen": [
        Way(False, 1, "half", ("keep",), "lean"),
        Way(False, 2, "half", ("recompute",), "lean"),
        Way(True, 2, "all", ("lean",), "keep"),
    ],
    "wan": [
        Way(False, 1, "half", ("lean",), "recompute"),
        Way(False, 4, "none", ("recompute",), "keep"),
        Way(True, 1, "all", ("lean",), "lean"),
    ],
    "clip": [
        Way(False, 1, "half", ("offload",), "lean"),
    ],
    "fp8": [
        Way(True, 1, "half", ("lean",), "recompute"),
        Way(True, 2, "all", ("keep",), "lean"),
    ],
}
HOSTS: dict[str, list[Way]] = {
    "flux": [
        *(way for way in LAST["flux"] if not way.compiled),
        Way(False, 2, "all", ("recompute",), "recompute"),
        Way(False, 2, "half", ("lean",), "keep"),
        Way(False, 1, "half", ("recompute",), "lean"),
    ],
    "qwen": [
        *(way for way in LAST["qwen"] if not way.compiled),
        Way(False, 1, "none", ("keep",), "keep"),
        Way(False, 1, "none", ("recompute",), "recompute"),
    ],
    "wan": [
        *(way for way in LAST["wan"] if not way.compiled),
        Way(False, 1, "none", ("recompute",), "recompute"),
    ],
    "clip": LAST["clip"],
    "fp8": [],
}
FRESH: dict[str, list[Way]] = {
    "flux": [
        Way(False, 1, "none", ("recompute",), "keep"),
        Way(False, 2, "all", ("keep",), "lean"),
        Way(False, 4, "half", ("offload",), "recompute"),
        Way(True, 2, "none", ("lean",), "recompute"),
    ],
    "qwen": [
        Way(False, 1, "all", ("recompute",), "recompute"),
        Way(False, 2, "none", ("lean",), "keep"),
        Way(False, 4, "half", ("offload", "lean"), "recompute"),
        Way(True, 1, "half", ("offload",), "keep"),
    ],
    "wan": [
        Way(False, 1, "none", ("keep",), "lean"),
        Way(False, 2, "all", ("offload",), "lean"),
        Way(False, 4, "half", ("recompute",), "lean"),
        Way(True, 2, "half", ("keep",), "offload"),
    ],
    "clip": [
        Way(False, 1, "half", ("keep",), "recompute"),
        Way(False, 2, "none", ("lean",), "recompute"),
    ],
    "fp8": [],
}
WAYS = {
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
    """What may use the link: nothing, weights, or activations too."""

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        streams = {"none": ", no streams", "weights": ", no offload", "both": ""}[self.streams]
        return f"{how}, planned for {self.budget_gb} GB{streams}"

    @property
    def constraints(self) -> Constraints:
        """Return the request as the planner takes it."""
        return Constraints(
            compile=(self.compiled,), stream=self.streams != "none", offload=self.streams == "both"
        )


_BUDGETS = [
    PlanRequest(False, 40, "both"),
    PlanRequest(False, 16, "none"),
    PlanRequest(False, 16, "weights"),
    PlanRequest(False, 8, "both"),
    PlanRequest(True, 16, "weights"),
    PlanRequest(True, 8, "both"),
]
PLANNED = {
    "flux": _BUDGETS,
    "qwen": _BUDGETS,
    "wan": _BUDGETS,
    "clip": [PlanRequest(False, 24, "both")],
    "fp8": [],
}


def record(title: str, case: Case, candidate: PlanCandidate) -> dict[str, Any]:
    """Return a record as `plan_check` reads it."""
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
