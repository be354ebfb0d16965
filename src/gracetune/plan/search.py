"""Find the fastest plan that fits the memory budget.

A candidate combines a micro-batch size, eager or compiled blocks, the streamed blocks and the
number of ring slots, the share of optimizer state in host memory, and an activation mode for each
block. `candidates` yields those that fit. `find_best_plan` then

1. computes a lower bound of each candidate's time per sample (cheap),
2. simulates candidates in the order of these bounds (expensive),
3. stops when no remaining bound can beat the plans that will be reported, or, if only the best one
   is wanted, those that are about as fast as the fastest.

The last blocks get the faster activation modes, which keep more, and the first blocks the leaner
ones. Backward reaches the last blocks first, so their activations are held only briefly, and are
freed before the first blocks are recomputed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

from gracetune.errors import GracetuneError
from gracetune.plan.managed import managed_nbytes, managed_seconds
from gracetune.plan.memory import FixedMemory, device_bytes, host_bytes
from gracetune.plan.result import BlockPlan, Plan
from gracetune.plan.simulate import (
    PlanCandidate,
    candidate_of,
    lower_bound_seconds,
    predict_seconds,
)
from gracetune.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gracetune.memory.managed_roles import ManagedRole
    from gracetune.plan.cost import CostModel
    from gracetune.plan.result import ActivationMode, Bytes, WeightPlacement

    Treatment = tuple[ActivationMode, bool]
    """A block's activation mode, and whether the input of a recomputed block is offloaded."""
    Mix = tuple[tuple[Treatment, ...], Treatment]
    """The treatments of the first blocks, which alternate, and the treatment of the last blocks."""


TIE_MARGIN = 0.005
"""Plans whose speed differs by less than this share count as equally fast; the simpler one wins."""
MAX_ALTERNATIVES = 4
"""Maximum number of alternative plans that are reported besides the best one."""
STREAMED_FRACTIONS = 8
"""The number of streamed blocks is tried in steps of 1/STREAMED_FRACTIONS of all blocks."""

KEEP: Treatment = ("keep", False)
LEAN: Treatment = ("lean", False)
RECOMPUTE: Treatment = ("recompute", False)
RECOMPUTE_FROM_HOST: Treatment = ("recompute", True)
OFFLOAD: Treatment = ("offload", False)
COMPILED_MIXES: tuple[Mix, ...] = (
    ((LEAN,), KEEP),
    ((RECOMPUTE,), LEAN),
    ((RECOMPUTE,), KEEP),
    ((OFFLOAD,), LEAN),
    ((OFFLOAD,), KEEP),
    ((OFFLOAD, RECOMPUTE), LEAN),
    ((OFFLOAD, RECOMPUTE, RECOMPUTE, RECOMPUTE), LEAN),
    ((RECOMPUTE_FROM_HOST,), LEAN),
)
"""Combinations of activation modes to try for compiled blocks: (modes of the first blocks, mode of
the last blocks). As many last blocks as fit in memory get the second one."""
EAGER_MIXES: tuple[Mix, ...] = (
    ((RECOMPUTE,), KEEP),
    ((OFFLOAD,), KEEP),
    ((RECOMPUTE_FROM_HOST,), KEEP),
)
"""The same for eager blocks. Mode `lean` is left out: torch's selective checkpointing takes longer
at each operator than most kernels."""


class PlanError(GracetuneError):
    """Raised if no plan fits the available memory."""


@dataclass(frozen=True, slots=True)
class PlanBudget:
    """The memory that a plan may use. Field names appear in `gracetune plan --json`."""

    device_nbytes: int
    host_nbytes: int
    """Host memory of the machine in bytes, for all its ranks together."""
    fragmentation: float = 0.0
    """Memory that torch's allocator reserves beyond the peak, as a share of the peak."""
    one_memory: bool = False
    """True if host and device share one memory; `device_nbytes` is then for both together."""
    ranks: int = 1
    """Number of ranks (GPUs in use) on the machine."""
    shares_weights: bool = True
    """True if the ranks of a machine stream from one copy of the weights in host memory."""
    managed_nbytes: int = 0
    """Largest number of bytes in managed memory; 0: the run may not use it."""

    def machine_host_nbytes(self, host: Bytes) -> int:
        """Return the host memory that all ranks of a machine need, if one of them needs `host`.

        Streamed weights count once if they are shared; everything else is in memory of each rank.
        """
        shared = host.weights if self.shares_weights else 0
        return shared + self.ranks * (host.total - shared)


@dataclass(frozen=True, slots=True)
class Constraints:
    """The choices that the planner may make, such as batch sizes to try."""

    samples: int = 1
    """Number of samples per optimizer step on this device: micro-batch size times accumulation."""
    batches: tuple[int, ...] | None = None
    """Micro-batch sizes to try; None: every divisor of `samples`."""
    compile: tuple[bool, ...] = (True, False)
    stream: bool = True
    """True if weights may be streamed."""
    offload: bool = True
    """True if activations may be offloaded."""
    slots: tuple[int, ...] = (3, 2, 4)
    """Numbers of ring slots to try."""
    host_state: tuple[float, ...] = (0.0,)
    """Shares of the optimizer's state to try in host memory."""
    managed: tuple[tuple[ManagedRole, ...], ...] = ((),)
    """Sets of roles to try in managed memory, the preferred one first."""
    run_file_batch: int | None = None
    """The run file's micro-batch size. If the best plan has another one, a plan for this size is
    made too (`keep_run_file_batch`); None: no second plan."""

    def batch_sizes(self) -> list[int]:
        """Return the micro-batch sizes to try, largest first."""
        divisors = [n for n in range(self.samples, 0, -1) if self.samples % n == 0]
        return [n for n in divisors if self.batches is None or n in self.batches]

    def for_budget(self, budget: PlanBudget) -> Constraints:
        """Return a copy for this budget: if host and device share one memory, nothing is offloaded.

        Weights are not streamed either, and optimizer state is not kept in host memory.
        """
        if budget.one_memory:
            return replace(self, stream=False, offload=False, host_state=(0.0,), managed=((),))
        return self if budget.managed_nbytes else replace(self, managed=((),))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan and its alternatives."""

    best: Plan
    """The plan that `gracetune train` uses: the fastest with the run file's micro-batch size, if
    one was requested (`Constraints.run_file_batch`) and fits."""
    others: tuple[Plan, ...]
    """Alternatives: the fastest plan of each other combination of batch size, compilation,
    streaming and activation modes, fastest first."""
    num_tried: int
    """Number of candidate plans that were simulated."""
    faster: Plan | None = None
    """A faster plan with another micro-batch size than that of the run file."""
    unfit_batch: int | None = None
    """The micro-batch size of the run file, if no plan with it fits; `best` has another one."""
    why_unfit: str = ""
    """Error message that says why no plan with the run file's micro-batch size fits."""


def find_best_plan(
    model: CostModel,
    fixed: FixedMemory,
    budget: PlanBudget,
    constraints: Constraints,
    simulated: bool,
    *,
    only_best: bool = False,
) -> SearchResult:
    """Return the fastest plan within the budget, and alternatives.

    A plan with more roles in managed memory is taken if it is faster, or if nothing else fits.
    `only_best` finds the same plan with fewer simulations, but not all alternatives.

    Raises:
        PlanError: No plan fits; the message names the smallest budget that would do.
    """
    constraints = constraints.for_budget(budget)
    found: list[SearchResult] = []
    failures: list[PlanError] = []
    for managed in constraints.managed:
        try:
            one = replace(constraints, managed=(managed,))
            found.append(_find_best_plan(model, fixed, budget, one, simulated, only_best))
        except PlanError as error:
            failures.append(error)
    if not found:
        raise failures[-1]  # that of the plan that needs least device memory
    best = found[0]
    for other in found[1:]:
        speed = other.best.samples_per_second
        if speed > (1 + TIE_MARGIN) * best.best.samples_per_second:
            best = other
    plans = [other for one in found for other in (one.best, *one.others) if other is not best.best]
    num_tried = sum(one.num_tried for one in found)
    return SearchResult(best.best, _alternatives(plans, best.best), num_tried)


def _find_best_plan(
    model: CostModel,
    fixed: FixedMemory,
    budget: PlanBudget,
    constraints: Constraints,
    simulated: bool,
    only_best: bool,
) -> SearchResult:
    if not constraints.batch_sizes():
        raise PlanError(
            f"a step of {constraints.samples} samples cannot be split into micro-batches of "
            f"{' or '.join(map(str, constraints.batches or ()))}. Choose a train.batch_size that "
            "divides it."
        )
    by_bound = sorted(
        (lower_bound_seconds(model.at(one.batch), one, model.rates) / one.batch, number, one)
        for number, one in enumerate(candidates(model, fixed, budget, constraints))
    )
    if not by_bound:
        raise PlanError(_explain_no_fit(model, fixed, budget, constraints))
    plans: list[Plan] = []
    seen: set[PlanCandidate] = set()
    never_wait: set[PlanCandidate] = set()
    """Simulated candidates whose compute waits for nothing."""
    best_of_kind: dict[object, float] = {}
    """Seconds per sample of the fastest plan so far, for each kind of plan as `_kind` returns
    it."""
    for bound, _, candidate in by_bound:
        fastest = sorted(best_of_kind.values())
        if len(fastest) > MAX_ALTERNATIVES and bound > fastest[MAX_ALTERNATIVES]:
            break  # neither this candidate nor a later one would be reported
        if only_best and fastest and bound > fastest[0] / (1 - TIE_MARGIN):
            break  # the same for the best plan, which `_simplest` chooses
        if bound > best_of_kind.get(_kind(candidate), float("inf")) or candidate in seen:
            continue
        seen.add(candidate)  # several mixes of activation modes may lead to the same candidate
        if only_best and candidate.streamed and _with_streamed(candidate, 0) in never_wait:
            continue  # it computes the same, so it is not faster, and it is less simple
        plan = predict(model, candidate, fixed, simulated)
        plans.append(plan)
        if not _waits(plan):
            never_wait.add(candidate)
        seconds = 1 / plan.samples_per_second
        best_of_kind[_kind(plan)] = min(seconds, best_of_kind.get(_kind(plan), float("inf")))
    best = _stream_less(model, _simplest(plans), fixed, budget, simulated)
    return SearchResult(best, _alternatives(plans, best), len(plans))


def keep_run_file_batch(
    result: SearchResult,
    model: CostModel,
    fixed: FixedMemory,
    budget: PlanBudget,
    constraints: Constraints,
) -> SearchResult:
    """Return the plans for the run file's micro-batch size, which `gracetune train` keeps.

    The best plan of `result` becomes a suggestion if it is faster. It stays if no plan with the run
    file's size fits.
    """
    best, batch = result.best, constraints.run_file_batch
    if batch is None or best.batch == batch:
        return result
    constraints = replace(constraints, batches=(batch,))
    try:
        written = find_best_plan(model, fixed, budget, constraints, best.simulated)
    except PlanError as error:
        return replace(result, unfit_batch=batch, why_unfit=str(error))
    is_faster = best.samples_per_second > (1 + TIE_MARGIN) * written.best.samples_per_second
    return replace(written, faster=best if is_faster else None)


def predict(
    model: CostModel, candidate: PlanCandidate, fixed: FixedMemory, simulated: bool
) -> Plan:
    """Return the candidate's decisions as a plan with predicted memory and time."""
    costs = model.at(candidate.batch)
    state_nbytes = fixed.optimizer_nbytes // fixed.num_transformers
    seconds = predict_seconds(costs, candidate, model.rates, state_nbytes)
    managed_s = managed_seconds(costs, candidate, fixed, model.rates)
    waits = sum(managed_s.get(role, 0.0) for role in candidate.managed)
    return Plan(
        blocks=candidate.blocks,
        batch=candidate.batch,
        accumulation=candidate.accumulation,
        slots=candidate.slots,
        compiled=candidate.compiled,
        frozen_compute=model.frozen_compute,
        device=device_bytes(costs, candidate, fixed),
        host=host_bytes(costs, candidate, fixed),
        seconds=replace(seconds, step=seconds.step + waits, wait_managed=waits),
        simulated=simulated,
        host_state=candidate.host_state,
        managed=candidate.managed,
        managed_nbytes=managed_nbytes(costs, candidate, fixed),
        managed_seconds=managed_s,
    )


def _kind(plan: Plan | PlanCandidate) -> object:
    """Return a key of the plan's main choices: batch size, compilation, streaming, offloading.

    Of plans with equal keys, only the fastest is reported.
    """
    treatments = frozenset((b.activations, b.offload_input) for b in plan.blocks)
    key = plan.batch, plan.compiled, bool(plan.streamed), treatments, bool(plan.host_state)
    return (*key, plan.managed)


def _waits(plan: Plan) -> bool:
    """Return True if compute waits for a copy, the host or other ranks."""
    seconds = plan.seconds
    waits = seconds.wait_weights, seconds.wait_activations, seconds.wait_host
    return any((*waits, seconds.wait_network, seconds.wait_managed))


def _simplest(plans: list[Plan]) -> Plan:
    """Return the plan that moves least data, among the plans about as fast as the fastest."""
    top = max(plan.samples_per_second for plan in plans)
    close = [plan for plan in plans if plan.samples_per_second >= top * (1 - TIE_MARGIN)]
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


def _stream_less(
    model: CostModel, plan: Plan, fixed: FixedMemory, budget: PlanBudget, simulated: bool
) -> Plan:
    """Return the plan with as few streamed blocks as fit in memory, if it is about as fast.

    The search itself has tried only a few numbers of streamed blocks.
    """
    low, high = 0, len(plan.streamed)
    while low < high:
        count = (low + high) // 2
        if fits(model, _with_streamed(candidate_of(plan), count), fixed, budget):
            high = count
        else:
            low = count + 1
    if high == len(plan.streamed):
        return plan
    fewer = predict(model, _with_streamed(candidate_of(plan), high), fixed, simulated)
    return fewer if fewer.seconds.step <= plan.seconds.step * (1 + TIE_MARGIN) else plan


def _with_streamed(candidate: PlanCandidate, count: int) -> PlanCandidate:
    streamed = set(evenly_spaced(count, len(candidate.blocks))) if count else set()
    blocks = tuple(
        replace(block, weights="streamed" if index in streamed else "resident")
        for index, block in enumerate(candidate.blocks)
    )
    return replace(candidate, blocks=blocks, slots=candidate.slots if streamed else 0)


def _alternatives(plans: list[Plan], best: Plan) -> tuple[Plan, ...]:
    """Return the fastest plan of each kind (see `_kind`), except the kind of the best plan."""
    shown = {_kind(best)}
    others = []
    for plan in sorted(plans, key=lambda plan: -plan.samples_per_second):
        if _kind(plan) not in shown:
            shown.add(_kind(plan))
            others.append(plan)
    return tuple(others[:MAX_ALTERNATIVES])


# Candidates and whether they fit


@dataclass(frozen=True, slots=True)
class PartialCandidate:
    """A candidate plan for which each block's activation mode is not chosen yet."""

    num_blocks: int
    streamed: tuple[int, ...]
    slots: int
    batch: int
    samples: int
    compiled: bool
    host_state: float
    managed: tuple[ManagedRole, ...] = ()

    def candidate(
        self, first: Sequence[Treatment], last: Treatment, num_last: int
    ) -> PlanCandidate:
        """Return a complete candidate, with an activation mode for each block.

        The last `num_last` blocks use the mode `last`. The blocks before them use the modes in
        `first` in turn.
        """
        streamed = set(self.streamed)
        blocks = []
        for index in range(self.num_blocks):
            is_last = index >= self.num_blocks - num_last
            activations, offload_input = last if is_last else first[index % len(first)]
            weights: WeightPlacement = "streamed" if index in streamed else "resident"
            blocks.append(BlockPlan(weights, activations, offload_input))
        accumulation = self.samples // self.batch
        return PlanCandidate(
            tuple(blocks),
            self.batch,
            accumulation,
            self.slots,
            self.compiled,
            self.host_state,
            managed=self.managed,
        )


def candidates(
    model: CostModel, fixed: FixedMemory, budget: PlanBudget, constraints: Constraints
) -> Iterator[PlanCandidate]:
    """Yield the candidate plans that fit the memory budget.

    In each, as many of the last blocks as fit use the faster of two activation modes.
    """

    def fits_on_device(candidate: PlanCandidate) -> bool:
        return fits_device(model, candidate, fixed, budget)

    for partial in _partial_candidates(model, constraints):
        for first, last in _mixes(partial.compiled, constraints):
            found = _with_most_last_blocks(partial, first, last, fits_on_device)
            # Host memory is checked last: the more the device keeps, the less is offloaded.
            if found is not None and fits(model, found, fixed, budget):
                yield found


def _partial_candidates(model: CostModel, constraints: Constraints) -> Iterator[PartialCandidate]:
    for managed, batch, compiled, share in product(
        constraints.managed, constraints.batch_sizes(), constraints.compile, constraints.host_state
    ):
        if "optimizer" in managed and share != min(constraints.host_state):
            continue
        # State in managed memory is not in pinned host memory as well.
        host_state = 0.0 if "optimizer" in managed else share
        for streamed, slots in _streaming_choices(model.num_blocks, constraints):
            yield PartialCandidate(
                *(model.num_blocks, streamed, slots, batch, constraints.samples, compiled),
                host_state,
                managed,
            )


def fits(
    model: CostModel, candidate: PlanCandidate, fixed: FixedMemory, budget: PlanBudget
) -> bool:
    """Return True if device and host have room for the candidate plan."""
    costs = model.at(candidate.batch)
    host = host_bytes(costs, candidate, fixed)
    managed = managed_nbytes(costs, candidate, fixed)
    managed_total = sum(managed.get(role, 0) for role in candidate.managed)
    return (
        managed_total <= budget.managed_nbytes
        and budget.machine_host_nbytes(host) <= budget.host_nbytes
        and fits_device(model, candidate, fixed, budget)
    )


def fits_device(
    model: CostModel, candidate: PlanCandidate, fixed: FixedMemory, budget: PlanBudget
) -> bool:
    """Return True if the device has room for the candidate plan."""
    return required_device_nbytes(model, candidate, fixed, budget) <= budget.device_nbytes


def required_device_nbytes(
    model: CostModel, candidate: PlanCandidate, fixed: FixedMemory, budget: PlanBudget
) -> int:
    """Return the bytes of device memory that a candidate needs: its peak plus fragmentation.

    If host and device share one memory, the candidate's host memory is included.
    """
    costs = model.at(candidate.batch)
    required = ceil(device_bytes(costs, candidate, fixed).total * (1 + budget.fragmentation))
    return required + host_bytes(costs, candidate, fixed).total if budget.one_memory else required


def smallest_candidate(
    model: CostModel, fixed: FixedMemory, budget: PlanBudget, constraints: Constraints
) -> PlanCandidate:
    """Return the candidate plan that needs least device memory.

    This is not always the smallest batch with everything streamed: accumulated gradients and ring
    slots need memory too.
    """
    options = (
        partial.candidate(first, last, 0)
        for partial in _partial_candidates(model, constraints)
        for first, last in _mixes(partial.compiled, constraints)
    )
    return min(options, key=lambda one: required_device_nbytes(model, one, fixed, budget))


def evenly_spaced(count: int, num_blocks: int) -> tuple[int, ...]:
    """Return the indices of `count` evenly spread blocks, so that fetches are evenly spread too."""
    return tuple(index * num_blocks // count for index in range(count))


def _streaming_choices(
    num_blocks: int, constraints: Constraints
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the streaming choices to try: (indices of streamed blocks, number of ring slots)."""
    yield (), 0
    if not constraints.stream:
        return
    counts = {
        max(2, round(num_blocks * part / STREAMED_FRACTIONS))
        for part in range(1, STREAMED_FRACTIONS + 1)
    }
    for count in sorted(n for n in counts if n <= num_blocks):
        for slots in constraints.slots:
            if slots < count or slots == min(constraints.slots):
                yield evenly_spaced(count, num_blocks), slots


def _mixes(compiled: bool, constraints: Constraints) -> Iterator[Mix]:
    for first, last in COMPILED_MIXES if compiled else EAGER_MIXES:
        if constraints.offload or not any(one == OFFLOAD or one[1] for one in first):
            yield first, last


def _with_most_last_blocks(
    partial: PartialCandidate,
    first: tuple[Treatment, ...],
    last: Treatment,
    fits_on_device: Callable[[PlanCandidate], bool],
) -> PlanCandidate | None:
    """Return the candidate in which as many of the last blocks as fit use the mode `last`.

    The other blocks use the modes in `first`. Returns None if even that does not fit.
    """
    low, high = 0, partial.num_blocks
    best = partial.candidate(first, last, low)
    if not fits_on_device(best):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        candidate = partial.candidate(first, last, middle)
        if fits_on_device(candidate):
            low, best = middle, candidate
        else:
            high = middle - 1
    return best


# The error for a budget that is too small


def _explain_no_fit(
    model: CostModel, fixed: FixedMemory, budget: PlanBudget, constraints: Constraints
) -> str:
    """Return the error message: which memory is too small, how much is needed, what would help."""
    smallest = smallest_candidate(model, fixed, budget, constraints)

    def required(device_nbytes: int) -> int:
        return required_device_nbytes(model, smallest, fixed.for_budget(device_nbytes), budget)

    if required(budget.device_nbytes) > budget.device_nbytes:
        kind = "memory (shared by host and device)" if budget.one_memory else "device memory"
        modes = " and ".join(sorted({block.activations for block in smallest.blocks}))
        return (
            f"{format_bytes(budget.device_nbytes)} of {kind} is too little for {model.name}: "
            f"it needs at least {_smallest_sufficient(required)} (batch {smallest.batch}, "
            f"{_describe_streamed(smallest)}, activations: {modes}{_describe_managed(smallest)}). "
            "Raise the budget, lower the resolution or the number of frames, or train fewer "
            f"weights{_managed_advice(budget)}."
        )
    in_managed = managed_nbytes(model.at(smallest.batch), smallest, fixed)
    total = sum(in_managed.get(role, 0) for role in smallest.managed)
    if total > budget.managed_nbytes:
        return (
            f"{model.name} needs {format_bytes(total)} of managed memory for "
            f"{', '.join(smallest.managed)}, but {format_bytes(budget.managed_nbytes)} are "
            "allowed. Raise gh200_optimizations.managed_memory."
        )
    unlimited = replace(budget, host_nbytes=sys.maxsize)
    host = min(
        budget.machine_host_nbytes(host_bytes(model.at(one.batch), one, fixed))
        for one in candidates(model, fixed, unlimited, constraints)
    )
    ranks = f" on each of {budget.ranks} ranks" if budget.ranks > 1 else ""
    fewer = "run fewer ranks on a machine, " if budget.ranks > 1 else ""
    return (
        f"{format_bytes(budget.host_nbytes)} of host memory is too little for {model.name} with "
        f"{format_bytes(budget.device_nbytes)} of device memory{ranks}: what does not fit on the "
        f"device needs at least {_smallest_sufficient(lambda _: host)}. Allow more device memory, "
        f"{fewer}set model.quantize, or use a machine with more memory."
    )


def _describe_managed(candidate: PlanCandidate) -> str:
    return f", in managed memory: {' and '.join(candidate.managed)}" if candidate.managed else ""


def _managed_advice(budget: PlanBudget) -> str:
    if budget.managed_nbytes or budget.one_memory:
        return ""
    return ", or allow managed memory, which is slower, with gh200_optimizations.use_uvm: true"


def _smallest_sufficient(required: Callable[[int], int]) -> str:
    """Return the smallest sufficient memory budget, as a text that is not rounded down.

    `required` maps a budget in bytes to the bytes that are needed with it. They may grow with the
    budget, because caches fill a share of it. That share is small, so the loop ends soon.
    """
    nbytes = required(0)
    while True:
        text = _rounded_up(nbytes)
        given = parse_bytes(text)
        if required(given) <= given:
            return text
        nbytes = max(required(given), nbytes + 1)


def _rounded_up(nbytes: int) -> str:
    """Format a size like `format_bytes`, but round it up."""
    text = format_bytes(nbytes)
    if parse_bytes(text) >= nbytes:
        return text
    return format_bytes(nbytes + parse_bytes(f"0.1 {text.split()[1]}"))


def _describe_streamed(candidate: PlanCandidate) -> str:
    if not candidate.streamed:
        return "no weights streamed"
    if len(candidate.streamed) == len(candidate.blocks):
        return "all weights streamed"
    return f"{len(candidate.streamed)} of {len(candidate.blocks)} blocks streamed"
