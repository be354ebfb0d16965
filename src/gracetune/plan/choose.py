"""The trade: of all choices that fit, the fastest, with the next best beside it.

Choices are predicted in the order of what they could reach at best, and the search ends where no
other could win any more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.errors import GracetuneError
from gracetune.plan.candidates import Budget, Wishes, candidates, device_need, fits, leanest, spread
from gracetune.plan.peak import Fixed, device_bytes, host_bytes
from gracetune.plan.result import Plan
from gracetune.plan.step import Choice, least_seconds, predict_seconds
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from gracetune.plan.cost import Model

CLOSE = 0.005
"""Plans within this share of the fastest are as fast: the simpler one is taken."""
RUNNERS_UP = 4


class PlanError(GracetuneError):
    """No plan fits what there is."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan, and what else there was."""

    best: Plan
    others: tuple[Plan, ...]
    """The best of other kinds, fastest first."""
    num_tried: int


def choose(model: Model, fixed: Fixed, budget: Budget, wishes: Wishes, simulated: bool) -> Planned:
    """The fastest plan within the budget; an error names the least that would do."""
    open_choices = sorted(
        (least_seconds(model.at(choice.batch), choice, model.speeds) / choice.batch, number, choice)
        for number, choice in enumerate(candidates(model, fixed, budget, wishes))
    )
    if not open_choices:
        raise PlanError(_too_small(model, fixed, budget, wishes))
    plans: list[Plan] = []
    kinds: dict[object, float] = {}
    for least, _, choice in open_choices:
        fastest = sorted(kinds.values())
        if len(fastest) > RUNNERS_UP and least > fastest[RUNNERS_UP]:
            break
        if least > kinds.get(_kind(choice), float("inf")):
            continue
        plan = predict(model, choice, fixed, simulated)
        plans.append(plan)
        pace = 1 / plan.samples_per_second
        kinds[_kind(plan)] = min(pace, kinds.get(_kind(plan), float("inf")))
    best = _simplest(plans)
    best = _stream_less(model, best, fixed, budget, simulated)
    others = _others(plans, best)
    return Planned(best, others, len(plans))


def predict(model: Model, choice: Choice, fixed: Fixed, simulated: bool) -> Plan:
    """What one choice takes."""
    costs = model.at(choice.batch)
    return Plan(
        blocks=choice.blocks,
        batch=choice.batch,
        accumulation=choice.accumulation,
        slots=choice.slots,
        compiled=choice.compiled,
        frozen_compute=model.frozen_compute,
        device=device_bytes(costs, choice, fixed),
        host=host_bytes(costs, choice, fixed),
        seconds=predict_seconds(
            costs, choice, model.speeds, fixed.optimizer_nbytes // fixed.experts
        ),
        simulated=simulated,
        host_state=choice.host_state,
    )


def _kind(plan: Plan | Choice) -> object:
    """What makes two plans different enough to show both."""
    streams = bool(plan.streamed)
    treatments = frozenset((b.activations, b.offload_input) for b in plan.blocks)
    return plan.batch, plan.compiled, streams, treatments, bool(plan.host_state)


def _simplest(plans: list[Plan]) -> Plan:
    """Of the fastest, the one with the least machinery."""
    top = max(plan.samples_per_second for plan in plans)
    close = [plan for plan in plans if plan.samples_per_second >= top * (1 - CLOSE)]
    return min(
        close,
        key=lambda plan: (
            plan.host_state,
            any(b.activations == "offload" or b.offload_input for b in plan.blocks),
            len(plan.streamed),
            plan.slots,
            plan.device.total,
        ),
    )


def _stream_less(model: Model, plan: Plan, fixed: Fixed, budget: Budget, simulated: bool) -> Plan:
    """Let weights stay that have room: the coarse search leaves some."""
    few, many = 0, len(plan.streamed)
    while few < many:
        count = (few + many) // 2
        choice = _with_streamed(plan, count)
        if fits(model, choice, fixed, budget):
            many = count
        else:
            few = count + 1
    if many == len(plan.streamed):
        return plan
    fewer = predict(model, _with_streamed(plan, many), fixed, simulated)
    return fewer if fewer.seconds.step <= plan.seconds.step * (1 + CLOSE) else plan


def _with_streamed(plan: Plan, count: int) -> Choice:
    inside = set(spread(count, len(plan.blocks))) if count else set()
    blocks = tuple(
        replace(block, weights="streamed" if index in inside else "resident")
        for index, block in enumerate(plan.blocks)
    )
    slots = plan.slots if inside else 0
    return Choice(blocks, plan.batch, plan.accumulation, slots, plan.compiled, plan.host_state)


def _others(plans: list[Plan], best: Plan) -> tuple[Plan, ...]:
    shown = {_kind(best)}
    others = []
    for plan in sorted(plans, key=lambda plan: -plan.samples_per_second):
        if _kind(plan) not in shown:
            shown.add(_kind(plan))
            others.append(plan)
    return tuple(others[:RUNNERS_UP])


def _too_small(model: Model, fixed: Fixed, budget: Budget, wishes: Wishes) -> str:
    """Which tier lacks how much, and what would help."""
    least = leanest(model, fixed, wishes)
    device = device_need(model, least, fixed, budget)
    if device > budget.device_nbytes:
        streamed = "all weights streamed" if least.streamed else "no weights streamed"
        ways = " and ".join(sorted({block.activations for block in least.blocks}))
        return (
            f"{format_bytes(budget.device_nbytes)} of device memory are too few for {model.name}: "
            f"the least is {format_bytes(device)} (batch {least.batch}, {streamed}, "
            f"activations: {ways}). Raise the budget, or lower the resolution, the frames or the "
            "adapter's rank."
        )
    roomy = replace(budget, host_nbytes=sys.maxsize)
    host = min(
        host_bytes(model.at(choice.batch), choice, fixed).total
        for choice in candidates(model, fixed, roomy, wishes)
    )
    return (
        f"{format_bytes(budget.host_nbytes)} of host memory are too few for {model.name} in "
        f"{format_bytes(budget.device_nbytes)} of device memory: the least that was found for what "
        f"does not fit on the device is {format_bytes(host)}. Give the device more, quantise the "
        "frozen weights, or use a machine with more memory."
    )
