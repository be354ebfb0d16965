"""A plan as people read it, with its reasons, and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gracetune.plan.result import ROLES
from gracetune.plan.search import TIE_MARGIN
from gracetune.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.plan.result import Plan
    from gracetune.plan.search import PlanBudget, RunFileBatchPlan, SearchResult

WAYS = {
    ("keep", False): "kept",
    ("lean", False): "kept lean",
    ("offload", False): "offloaded",
    ("recompute", False): "recomputed",
    ("recompute", True): "recomputed from host memory",
}
NOTICEABLE = 0.01
"""Share of a step from which on a wait is worth a word."""


@dataclass(frozen=True, slots=True)
class ReportHeading:
    """What a plan is for."""

    model: str
    """The family, and where its shape is from."""
    sample: str
    machine: str
    budget: PlanBudget
    notes: tuple[str, ...] = ()
    """What was assumed, or not known."""
    has_ramp: bool = False
    """Whether a ramp decides how often a micro-batch is accumulated."""


def report_lines(planned: SearchResult, heading: ReportHeading) -> Iterator[str]:
    """The whole report, a line at a time."""
    best = planned.best
    simulated = ", simulated from published figures" if best.simulated else ", measured now"
    yield f"{heading.model}, {heading.sample} a sample, on {heading.machine}{simulated}"
    yield _within(heading.budget)
    yield from (f"note: {note}" for note in heading.notes)
    yield ""
    yield f"plan: {describe(best)}"
    yield f"      {describe_speed(best)}"
    if planned.as_written is not None:
        yield from _as_written(planned.as_written, best, heading.has_ramp)
    yield ""
    yield from _table(best)
    if heading.budget.one_memory:
        yield f"{'both together':<16}{(best.device.total + best.host.total) / GIB:>9.2f}"
    yield ""
    yield from _seconds(best)
    yield ""
    yield "why:"
    yield from (f"  - {reason}" for reason in reasons(planned, heading.budget))
    if planned.others:
        yield ""
        yield f"next best, of {planned.num_tried} that were predicted{_close(planned)}:"
        yield from (f"  {describe_speed(other)}: {describe(other)}" for other in planned.others)


def report_json(planned: SearchResult, heading: ReportHeading) -> dict[str, object]:
    """The same for machines; bytes are plain numbers."""
    return {
        "model": heading.model,
        "sample": heading.sample,
        "machine": heading.machine,
        "budget": asdict(heading.budget),
        "notes": list(heading.notes),
        "plan": _plan_json(planned.best),
        "as_written": _as_written_json(planned, heading),
        "reasons": reasons(planned, heading.budget),
        "others": [_plan_json(other) for other in planned.others],
    }


def describe(plan: Plan) -> str:
    """What is done, in one line."""
    times = f", accumulated {plan.accumulation} times" if plan.accumulation > 1 else ""
    how = "compiled" if plan.compiled else "eager"
    fp8 = ", fp8 products" if plan.frozen_compute == "fp8" else ""
    state = f"; {_state(plan)}" if plan.host_state else ""
    where = f"{_weights(plan)}; activations: {_ways(plan)}{state}"
    return f"batch {plan.batch}{times}, {how}{fp8}; {where}"


def describe_speed(plan: Plan) -> str:
    """How fast, and in how much memory."""
    return (
        f"{plan.samples_per_second:.3f} samples/s, {plan.seconds.step:.3f} s a micro-batch, "
        f"{format_bytes(plan.device.total)} of device memory"
    )


def settings_to_change(plan: Plan, has_ramp: bool) -> dict[str, int]:
    """What a run file must say for this plan's batch; a ramp finds the accumulation itself."""
    settings = {"train.batch_size": plan.batch}
    if not has_ramp:
        settings["train.gradient_accumulation_steps"] = plan.accumulation
    return settings


def reasons(planned: SearchResult, budget: PlanBudget) -> list[str]:
    """Why this plan: what each decision buys, in its own numbers."""
    best, found = planned.best, []
    seconds = best.seconds
    if budget.one_memory:
        found.append(
            "host and device are one memory, so there is nothing to move: no weights are streamed, "
            "nothing is offloaded, and what the run holds on the host counts beside the rest"
        )
    elif best.streamed:
        wait = seconds.wait_weights / seconds.step
        cost = f"computing waits {wait:.1%} of the step for them"
        if wait < NOTICEABLE:
            cost = "computing does not wait for them"
        found.append(
            f"streaming leaves {format_bytes(best.host.weights)} of weights in host memory; the "
            f"link to the device is busy {seconds.link_in / seconds.step:.0%} of the step, and "
            f"{cost}"
        )
    else:
        found.append("all weights fit beside the activations, so none are streamed")
    found.append(_activation_reason(best))
    if best.host_state:
        found.append(
            f"{_state(best)}: {format_bytes(best.host.optimizer)} go to the device and back in "
            f"every update, which takes {seconds.wait_state / seconds.step:.1%} of the step"
        )
    if seconds.wait_host > NOTICEABLE * seconds.step:
        found.append(
            f"the host queues operators more slowly than the device runs them, which takes "
            f"{seconds.wait_host / seconds.step:.1%} of the step: a larger batch"
            f"{'' if best.compiled else ' or compiled blocks'} would hide it"
        )
    batches: dict[int, Plan] = {}
    for other in planned.others:  # fastest first
        if other.batch != best.batch:
            batches.setdefault(other.batch, other)
    for batch, other in sorted(batches.items()):
        gain = other.samples_per_second / best.samples_per_second - 1
        pace = f"{gain:.1%} faster" if gain > 0 else f"{-gain:.1%} slower"
        found.append(f"batch {batch} at its best would be {pace}")
    left = budget.device_nbytes - int(best.device.total * (1 + budget.fragmentation))
    if budget.one_memory:
        left -= best.host.total
    whose = "memory's" if budget.one_memory else "device's"
    found.append(f"{format_bytes(left)} of the {whose} budget stay free")
    return found


def _within(budget: PlanBudget) -> str:
    allocator = f"({budget.fragmentation:.0%} of the peak left to the allocator)"
    device = format_bytes(budget.device_nbytes)
    if budget.one_memory:
        return f"within {device} of one memory for host and device {allocator}"
    host = format_bytes(budget.host_nbytes)
    return f"within {device} of device memory {allocator} and {host} of host memory"


def _as_written(written: RunFileBatchPlan, best: Plan, has_ramp: bool) -> Iterator[str]:
    yield f"as written: `gracetune train` keeps the run file's batch of {written.batch}:"
    if written.plan is None:
        yield f"      nothing fits. {written.why}"
    else:
        yield f"      {describe(written.plan)}"
        yield f"      {describe_speed(written.plan)}"
        if written.plan.samples_per_second >= best.samples_per_second:
            yield "      which is as fast: there is nothing to set"
            return
    settings = settings_to_change(best, has_ramp)
    words = " and ".join(f"{key} to {value}" for key, value in settings.items())
    yield f"      for the plan's, set {words}: a step has as many samples"


def _as_written_json(planned: SearchResult, heading: ReportHeading) -> dict[str, object] | None:
    written = planned.as_written
    if written is None:
        return None
    return {
        "batch": written.batch,
        "plan": None if written.plan is None else _plan_json(written.plan),
        "why": written.why,
        "set": settings_to_change(planned.best, heading.has_ramp),
    }


def _close(planned: SearchResult) -> str:
    """Why a faster one may be among the others."""
    if planned.others[0].samples_per_second <= planned.best.samples_per_second:
        return ""
    return (
        f" (a plan with less machinery is taken before one that is up to {TIE_MARGIN:.1%} faster)"
    )


def _activation_reason(plan: Plan) -> str:
    seconds = plan.seconds
    parts = []
    if seconds.recompute:
        parts.append(f"recomputing takes {seconds.recompute / seconds.step:.0%} of the step")
    if plan.host.activations:
        wait = seconds.wait_activations / seconds.step
        parts.append(
            f"offloading moves {format_bytes(plan.host.activations)} out and back, and computing "
            f"waits {wait:.1%} of the step for it"
        )
    if not parts:
        return "all activations fit, so no product is done twice"
    return "; ".join(parts) + ": the rest of the device's memory is spent on activations that stay"


def _state(plan: Plan) -> str:
    return f"{plan.host_state:.0%} of the optimizer's state in host memory"


def _weights(plan: Plan) -> str:
    if not plan.streamed:
        return "all weights resident"
    return f"{len(plan.streamed)} of {len(plan.blocks)} blocks streamed through {plan.slots} slots"


def _ways(plan: Plan) -> str:
    counts = Counter((block.activations, block.offload_input) for block in plan.blocks)
    return ", ".join(f"{count} {WAYS[way]}" for way, count in counts.items())


def _table(plan: Plan) -> Iterator[str]:
    device, host = plan.device.by_role(), plan.host.by_role()
    yield f"{'GiB at the peak':<16}{'device':>9}{'host':>9}"
    is_full = not device["weights"] + host["weights"]  # nothing is frozen
    for role in ROLES:
        name = "trained weights" if is_full and role == "adapters" else role
        yield f"{name:<16}{device[role] / GIB:>9.2f}{host[role] / GIB:>9.2f}"
    yield f"{'total':<16}{plan.device.total / GIB:>9.2f}{plan.host.total / GIB:>9.2f}"


def _seconds(plan: Plan) -> Iterator[str]:
    s = plan.seconds
    yield f"{'a micro-batch':<24}{format_seconds(s.step):>9}"
    for name, part in (
        ("matrix products", s.gemm),
        ("attention", s.attention),
        ("elementwise", s.elementwise),
        ("done again", s.recompute),
        ("outside, gaps", s.overhead),
        ("waiting for weights", s.wait_weights),
        ("waiting for activations", s.wait_activations),
        ("waiting for the state", s.wait_state),
        ("waiting for the host", s.wait_host),
    ):
        yield f"  {name:<22}{format_seconds(part):>9}{part / s.step:>7.1%}"


def _plan_json(plan: Plan) -> dict[str, object]:
    return asdict(plan) | {
        "device_total": plan.device.total,
        "host_total": plan.host.total,
        "samples_per_second": plan.samples_per_second,
    }
