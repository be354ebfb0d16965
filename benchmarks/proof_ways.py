"""The ways in which the planner is put to the proof, and how each is written down.

Chosen before anything was measured: three models and a clip, resident, half and all streamed, every
way to keep activations and mixes of them, eager and compiled, batches of 1, 2 and 4.

`LATER` was chosen after eight of these had been seen, and before any of it was: mostly eager steps
of one sample, which the host bounds, and products in fp8. `LAST` was chosen when the eager ones of
both had been seen (`plan_proof.json` as of 13805ea) and the host's part had been made anew, and
before any of it was measured. `HOSTS` are its eager ways, and those of the others whose time had
been said more than a tenth too short, to be looked at in rounds. `FRESH` was chosen when kernels
between products had begun to be timed one by one, which those had led to, and before any of it was
measured: no way is in it that had been run before.

`ASKED` are not ways but what a user asks for: a budget, and which streams there may be. What is run
is what the planner then chooses. They were written down when all of the above had been seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gracetune.plan.result import BlockPlan
from gracetune.plan.search import Constraints
from gracetune.plan.simulate import PlanCandidate

if TYPE_CHECKING:
    from families import Case

    from gracetune.plan.result import ActivationMode

Streamed = Literal["none", "half", "all"]
SLOTS = 3


@dataclass(frozen=True)
class Way:
    """One way to run a step."""

    compiled: bool
    batch: int
    streamed: Streamed
    first: tuple[ActivationMode, ...]
    """Of the first half of the blocks, in turns."""
    last: ActivationMode
    sends_inputs: bool = False
    """Whether what recomputed blocks start from waits in host memory."""

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        sent = " from host memory" if self.sends_inputs else ""
        ways = f"{' and '.join(self.first)}{sent}, then {self.last}"
        return f"{how}, batch {self.batch}, {self.streamed} streamed, {ways}"

    def choice(self, case: Case) -> PlanCandidate:
        """For a model of so many blocks."""
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
class Asked:
    """What a plan is made for."""

    compiled: bool
    budget_gb: int
    streams: Literal["none", "weights", "both"]
    """What may stream: nothing, weights, or activations too."""

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        streams = {"none": ", no streams", "weights": ", no offload", "both": ""}[self.streams]
        return f"{how}, planned for {self.budget_gb} GB{streams}"

    @property
    def wishes(self) -> Constraints:
        """As a run states them."""
        return Constraints(
            compile=(self.compiled,), stream=self.streams != "none", offload=self.streams == "both"
        )


_BUDGETS = [
    Asked(False, 40, "both"),
    Asked(False, 16, "none"),
    Asked(False, 16, "weights"),
    Asked(False, 8, "both"),
    Asked(True, 16, "weights"),
    Asked(True, 8, "both"),
]
ASKED = {
    "flux": _BUDGETS,
    "qwen": _BUDGETS,
    "wan": _BUDGETS,
    "clip": [Asked(False, 24, "both")],
    "fp8": [],
}


def record(title: str, case: Case, choice: PlanCandidate) -> dict[str, Any]:
    """In the form that `plan_check` reads."""
    return {
        "name": title,
        "model": case.family,
        "config": dict(case.config),
        "width": case.picture.width,
        "height": case.picture.height,
        "frames": case.picture.frames,
        "batch": choice.batch,
        "compiled": choice.compiled,
        "slots": choice.slots,
        "streamed": list(choice.streamed),
        "activations": [block.activations for block in choice.blocks],
        "sends_inputs": [block.offload_input for block in choice.blocks],
        "lora": "fused",
        "state_nbytes": 8,
        "frozen_compute": case.frozen_compute,
    }
