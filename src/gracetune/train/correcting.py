"""What the first steps teach the planner: bytes and rates as they were, for asking it once more.

Bytes that the plan did not foresee are there whatever is chosen. Time that was computed scales the
rates of computing; what is left is the link's, as far as the step showed how fast that is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.plan.choose import predict
from gracetune.plan.step import PlanCandidate

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.plan.cost import CostModel
    from gracetune.plan.peak import Fixed
    from gracetune.plan.result import Plan

CLEAR_BYTES, CLEAR_SECONDS = 0.03, 0.10
"""Shares of the plan beyond which it was wrong, and not the measurement."""
LEAST_LINK, MOST_LINK, HALVINGS = 0.25, 4.0, 12
"""Between these shares of its rate the link is looked for, so finely."""


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """A micro-batch of the first steps; none: not measured by samples that the plan is for."""

    seconds: float | None
    waited_s: float
    """Of them, how long computing stood still for copies."""
    peak_nbytes: int | None


def was_wrong(plan: Plan, measured: StepMeasurement) -> bool:
    """Whether the plan was clearly missed, either way, in memory or in time."""
    return _bytes_wrong(plan, measured) or _seconds_wrong(plan, measured)


def learnt(
    model: CostModel, fixed: Fixed, plan: Plan, measured: StepMeasurement
) -> tuple[CostModel, Fixed]:
    """The model and what is fixed, such that this plan is predicted as it was measured."""
    if _bytes_wrong(plan, measured):
        assert measured.peak_nbytes is not None
        more = measured.peak_nbytes - plan.device.total
        fixed = replace(fixed, library_nbytes=fixed.library_nbytes + more)
    if _seconds_wrong(plan, measured):
        assert measured.seconds is not None
        model = _at_pace(model, fixed, plan, measured.seconds, measured.waited_s)
    return model, fixed


def choice_of(plan: Plan) -> PlanCandidate:
    """What was decided, without what it was predicted to take."""
    return PlanCandidate(
        plan.blocks, plan.batch, plan.accumulation, plan.slots, plan.compiled, plan.host_state
    )


def _bytes_wrong(plan: Plan, measured: StepMeasurement) -> bool:
    peak, planned = measured.peak_nbytes, plan.device.total
    return peak is not None and abs(peak - planned) > CLEAR_BYTES * planned


def _seconds_wrong(plan: Plan, measured: StepMeasurement) -> bool:
    seconds, planned = measured.seconds, plan.seconds.step
    return seconds is not None and abs(seconds - planned) > CLEAR_SECONDS * planned


def _at_pace(
    model: CostModel, fixed: Fixed, plan: Plan, seconds: float, waited_s: float
) -> CostModel:
    """Computing first, by the time that nothing was waited for; the link by what is left."""
    predicted = plan.seconds
    waits = predicted.wait_weights + predicted.wait_activations
    slower = (seconds - waited_s) / (predicted.step - waits)
    if slower <= 0:  # all was waiting: that says nothing of computing
        slower = 1.0

    def step_with(link: float) -> float:
        paced = model.paced(slower, link)
        return predict(paced, choice_of(plan), fixed, simulated=False).seconds.step

    moves = predicted.link_in > 0 or predicted.link_out > 0
    return model.paced(slower, _link_for(seconds, step_with) if moves else 1.0)


def _link_for(seconds: float, step_with: Callable[[float], float]) -> float:
    """The share of the link's rate nearest to 1 with which a step takes so long."""
    if abs(step_with(1.0) - seconds) <= 0.01 * seconds:
        return 1.0
    low, high = LEAST_LINK, MOST_LINK
    for _ in range(HALVINGS):  # a faster link never makes a longer step
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_with(middle) > seconds else (low, middle)
    # Where computing alone takes as long, any link would do: then nothing was learnt of it.
    return low if abs(step_with(low) - seconds) <= abs(step_with(1.0) - seconds) * 0.5 else 1.0
