"""Print a plan: the report of `gracetune plan`, its JSON, and the one-line texts of a run.

The keys of the JSON are the field names in plan/result.py and plan/search.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from gracetune.plan.result import ROLES
from gracetune.plan.search import TIE_MARGIN
from gracetune.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gracetune.memory.managed_roles import ManagedRole
    from gracetune.plan.result import Plan
    from gracetune.plan.search import PlanBudget, SearchResult

MODE_NAMES = {
    ("keep", False): "kept",
    ("lean", False): "kept lean",
    ("offload", False): "offloaded",
    ("recompute", False): "recomputed",
    ("recompute", True): "recomputed from an input in host memory",
}
NOTICEABLE = 0.01
"""A wait is mentioned in the report if it takes more than this share of a step."""


@dataclass(frozen=True, slots=True)
class ReportHeading:
    """The first lines of the report: model, sample, machine and memory budget."""

    model: str
    """The model family, and the origin of its configuration."""
    sample: str
    machine: str
    budget: PlanBudget
    notes: tuple[str, ...] = ()
    """Assumptions of the plan that the user should know."""
    has_ramp: bool = False
    """True if a batch-size ramp (a batch that grows during the run) sets the gradient
    accumulation."""
    managed_places: Mapping[ManagedRole, str] = field(default_factory=dict)
    """Where each role would be in managed memory, in words."""


def report_lines(result: SearchResult, heading: ReportHeading) -> Iterator[str]:
    """Yield the lines that `gracetune plan` prints."""
    best = result.best
    simulated = ", simulated from published figures" if best.simulated else ", measured now"
    yield f"{heading.model}, {heading.sample} a sample, on {heading.machine}{simulated}"
    yield _within(heading.budget)
    yield from (f"note: {note}" for note in heading.notes)
    yield ""
    if result.unfit_batch is not None:
        yield f"train.batch_size {result.unfit_batch} does not fit: {result.why_unfit}"
        yield f"      to train with this plan, {_change(best, heading.has_ramp)}"
    yield f"plan: {describe(best)}"
    yield f"      {describe_speed(best)}"
    if result.faster is not None:
        yield f"faster: {describe(result.faster)}"
        yield f"      {describe_speed(result.faster)}"
        yield f"      to train with it, {_change(result.faster, heading.has_ramp)}"
    yield ""
    yield from _table(best)
    if heading.budget.ranks > 1:
        together = heading.budget.machine_host_nbytes(best.host)
        yield f"{f'{heading.budget.ranks} GPUs together':<25}{together / GIB:>9.2f}"
    if heading.budget.one_memory:
        yield f"{'both together':<16}{(best.device.total + best.host.total) / GIB:>9.2f}"
    if heading.budget.managed_nbytes:
        yield ""
        yield from _places(best, heading)
    yield ""
    yield from _seconds(best)
    yield ""
    yield "why:"
    yield from (f"  - {reason}" for reason in reasons(result, heading.budget))
    if result.others:
        yield ""
        yield f"next best of {result.num_tried} candidates{_tie_note(result)}:"
        yield from (f"  {describe_speed(other)}: {describe(other)}" for other in result.others)


def report_json(result: SearchResult, heading: ReportHeading) -> dict[str, object]:
    """Return the report as a dictionary for JSON; sizes are in bytes."""
    return {
        "model": heading.model,
        "sample": heading.sample,
        "machine": heading.machine,
        "budget": asdict(heading.budget),
        "notes": list(heading.notes),
        "plan": _plan_json(result.best, heading.budget),
        "faster": _faster_json(result, heading),
        "does_not_fit": _unfit_json(result, heading),
        "reasons": reasons(result, heading.budget),
        "others": [_plan_json(other, heading.budget) for other in result.others],
    }


def describe(plan: Plan) -> str:
    """Return the plan's decisions in one line."""
    times = f" x {plan.accumulation} accumulation steps" if plan.accumulation > 1 else ""
    how = "compiled" if plan.compiled else "eager"
    fp8 = ", fp8 matmuls" if plan.frozen_compute == "fp8" else ""
    state = f"; {_state(plan)}" if plan.host_state else ""
    state += f"; {_managed(plan)}" if plan.managed else ""
    where = f"{_weights(plan)}; activations: {_activations(plan)}{state}"
    return f"batch {plan.batch}{times}, {how}{fp8}; {where}"


def describe_speed(plan: Plan) -> str:
    """Return the predicted speed and memory in one line."""
    return (
        f"{plan.samples_per_second:.3f} samples/s, {plan.seconds.step:.3f} s per micro-batch, "
        f"{format_bytes(plan.device.total)} of device memory"
    )


def settings_to_change(plan: Plan, has_ramp: bool) -> dict[str, int]:
    """Return the run-file settings, with their values, that make a run use this plan's micro-batch.

    With a batch-size ramp (`has_ramp`), the ramp sets the gradient accumulation.
    """
    settings = {"train.batch_size": plan.batch}
    if not has_ramp:
        settings["train.gradient_accumulation_steps"] = plan.accumulation
    return settings


def reasons(result: SearchResult, budget: PlanBudget) -> list[str]:
    """Return the reasons for this plan, one sentence each: what each decision costs or saves."""
    best, found = result.best, []
    seconds = best.seconds
    if budget.one_memory:
        found.append(
            "host and device share one memory: nothing is streamed or offloaded, and host memory "
            "of the run counts too"
        )
    elif best.streamed:
        wait = seconds.wait_weights / seconds.step
        cost = f"compute waits {wait:.1%} of the step for them"
        if wait < NOTICEABLE:
            cost = "compute does not wait for them"
        is_shared = budget.ranks > 1 and budget.shares_weights
        once = ", once for all GPUs of the machine" if is_shared else ""
        found.append(
            f"streaming keeps {format_bytes(best.host.weights)} of weights in host memory{once}; "
            f"the link to the device is busy {seconds.link_in / seconds.step:.0%} of the step, and "
            f"{cost}"
        )
    else:
        found.append("all weights fit on the device beside the activations, so none are streamed")
    found.append(_activation_reason(best))
    found += _state_reasons(best)
    if seconds.wait_host > NOTICEABLE * seconds.step:
        found.append(
            f"the CPU launches kernels more slowly than the device runs them, which costs "
            f"{seconds.wait_host / seconds.step:.1%} of the step; a larger batch"
            f"{'' if best.compiled else ' or compiled blocks'} would hide it"
        )
    batches: dict[int, Plan] = {}
    for other in result.others:  # fastest first
        if other.batch != best.batch:
            batches.setdefault(other.batch, other)
    for batch, other in sorted(batches.items()):
        gain = other.samples_per_second / best.samples_per_second - 1
        pace = f"{gain:.1%} faster" if gain > 0 else f"{-gain:.1%} slower"
        found.append(f"the best plan with batch {batch} would be {pace}")
    left = budget.device_nbytes - int(best.device.total * (1 + budget.fragmentation))
    if budget.one_memory:
        left -= best.host.total
    kind = "memory" if budget.one_memory else "device memory"
    found.append(f"{format_bytes(left)} of the {kind} budget remains free")
    return found


def _within(budget: PlanBudget) -> str:
    reserve = f"({budget.fragmentation:.0%} of the peak reserved for fragmentation)"
    device = format_bytes(budget.device_nbytes)
    if budget.one_memory:
        return f"within {device} of memory shared by host and device {reserve}"
    host = f"{format_bytes(budget.host_nbytes)} of host memory"
    if budget.ranks > 1:
        host += f" for {budget.ranks} GPUs"
    return f"within {device} of device memory {reserve} and {host}"


def _change(plan: Plan, has_ramp: bool) -> str:
    """Return the request to set what makes `gracetune train` use this plan's micro-batch."""
    settings = settings_to_change(plan, has_ramp)
    words = " and ".join(f"{key} to {value}" for key, value in settings.items())
    return f"set {words}; a step has the same number of samples"


def _faster_json(result: SearchResult, heading: ReportHeading) -> dict[str, object] | None:
    if result.faster is None:
        return None
    return {
        "plan": _plan_json(result.faster, heading.budget),
        "set": settings_to_change(result.faster, heading.has_ramp),
    }


def _unfit_json(result: SearchResult, heading: ReportHeading) -> dict[str, object] | None:
    """Return why the run file's micro-batch does not fit, and the settings of a plan that does."""
    if result.unfit_batch is None:
        return None
    return {
        "batch": result.unfit_batch,
        "why": result.why_unfit,
        "set": settings_to_change(result.best, heading.has_ramp),
    }


def _tie_note(result: SearchResult) -> str:
    """Return why the chosen plan is not the fastest, if another is slightly faster, else ''."""
    if result.others[0].samples_per_second <= result.best.samples_per_second:
        return ""
    return f" (a simpler plan is preferred to one that is up to {TIE_MARGIN:.1%} faster)"


def _activation_reason(plan: Plan) -> str:
    seconds = plan.seconds
    parts = []
    if seconds.recompute:
        share = max(seconds.recompute, 0.0) / seconds.step
        parts.append(f"recomputing takes {share:.0%} of the step")
    if plan.host.activations:
        wait = seconds.wait_activations / seconds.step
        parts.append(
            f"offloading moves {format_bytes(plan.host.activations)} to the host and back, and "
            f"compute waits {wait:.1%} of the step for it"
        )
    if not parts:
        return "all activations fit, so nothing is recomputed"
    return "; ".join(parts) + "; the rest of device memory holds activations that stay"


def _state_reasons(best: Plan) -> Iterator[str]:
    """Yield what state in host memory and roles in managed memory cost."""
    seconds = best.seconds
    if best.host_state:
        yield (
            f"{_state(best)}: every update moves {format_bytes(best.host.optimizer)} to the device "
            f"and back, which adds {seconds.wait_state / seconds.step:.1%} to the step"
        )
    if best.managed:
        yield (
            f"{_managed(best)}: using or moving it over the link adds "
            f"{seconds.wait_managed / seconds.step:.1%} to the step"
        )


def _state(plan: Plan) -> str:
    return f"{plan.host_state:.0%} of the optimizer state in host memory"


def _managed(plan: Plan) -> str:
    return f"{format_bytes(plan.managed_total)} in managed memory ({', '.join(plan.managed)})"


def _places(plan: Plan, heading: ReportHeading) -> Iterator[str]:
    """Yield the place of each role, with its cost there and the cost in managed memory."""
    yield (
        f"{'role':<16}{'GiB':>9}  {'place':<34}{'costs':>9}{'managed costs':>15}"
        f"   (managed memory: at most {format_bytes(heading.budget.managed_nbytes)})"
    )
    s = plan.seconds
    elsewhere: dict[str, tuple[str, float]] = {}
    if plan.streamed:
        elsewhere["weights"] = f"{len(plan.streamed)} blocks streamed", s.wait_weights
    if plan.host_state:
        elsewhere["optimizer"] = f"{plan.host_state:.0%} streamed", s.wait_state
    names = {"ema": "moving average", "trained": "trained weights"}
    for role, nbytes in plan.managed_nbytes.items():
        if role == "activations":
            continue  # those on the device are in the same row
        seconds = plan.managed_seconds[role]
        place, cost = elsewhere.get(role, ("device", 0.0))
        if role in plan.managed and role in elsewhere:
            place, cost = f"{place}, rest managed", cost + seconds
        elif role in plan.managed:
            place, cost = heading.managed_places.get(role, "managed"), seconds
        if nbytes or role in elsewhere:
            yield _place_row(names.get(role, role), nbytes, place, cost, seconds)
    place = "device" if not plan.host.activations else "some offloaded"
    if plan.host.activations and "activations" in plan.managed:
        place = "some offloaded to managed"
    nbytes = plan.device.activations + plan.host.activations
    # Offloading copies them, to pinned and to managed memory alike.
    yield _place_row("activations", nbytes, place, s.wait_activations, s.wait_activations)


def _place_row(name: str, nbytes: int, place: str, cost: float, managed: float) -> str:
    return (
        f"{name:<16}{nbytes / GIB:>9.2f}  {place:<34}"
        f"{format_seconds(cost):>9}{format_seconds(managed):>15}"
    )


def _weights(plan: Plan) -> str:
    if not plan.streamed:
        return "all weights resident"
    return f"{len(plan.streamed)} of {len(plan.blocks)} blocks streamed through {plan.slots} slots"


def _activations(plan: Plan) -> str:
    counts = Counter((block.activations, block.offload_input) for block in plan.blocks)
    return ", ".join(f"{count} {MODE_NAMES[mode]}" for mode, count in counts.items())


def _table(plan: Plan) -> Iterator[str]:
    device, host = plan.device.by_role(), plan.host.by_role()
    yield f"{'GiB at the peak':<16}{'device':>9}{'host':>9}"
    is_full = not device["weights"] + host["weights"]  # full training: nothing is frozen
    for role in ROLES:
        if role == "gathered" and not device[role]:
            continue  # nothing is sharded
        name = "trained weights" if is_full and role == "adapters" else role
        yield f"{name:<16}{device[role] / GIB:>9.2f}{host[role] / GIB:>9.2f}"
    yield f"{'total':<16}{plan.device.total / GIB:>9.2f}{plan.host.total / GIB:>9.2f}"


def _seconds(plan: Plan) -> Iterator[str]:
    s = plan.seconds
    yield f"{'one micro-batch':<25}{format_seconds(s.step):>9}"
    for name, part in (
        ("matmuls", s.gemm),
        ("attention", s.attention),
        ("elementwise", s.elementwise),
        ("recomputed", s.recompute),
        ("overhead", s.overhead),
        ("waiting for weights", s.wait_weights),
        ("waiting for activations", s.wait_activations),
        ("waiting for state", s.wait_state),
        ("managed memory", s.wait_managed),
        ("waiting for the CPU", s.wait_host),
        ("waiting for the network", s.wait_network),
    ):
        if name == "waiting for the network" and not s.network:
            continue
        if name == "managed memory" and not part:
            continue
        shown = max(part, 0.0)  # a difference of two times, such as recomputing, may be below zero
        yield f"  {name:<23}{format_seconds(shown):>9}{shown / s.step:>7.1%}"


def _plan_json(plan: Plan, budget: PlanBudget) -> dict[str, object]:
    return asdict(plan) | {
        "device_total": plan.device.total,
        "host_total": plan.host.total,
        "machine_host_total": budget.machine_host_nbytes(plan.host),
        "samples_per_second": plan.samples_per_second,
    }
