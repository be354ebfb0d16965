"""Check the gradients of a run: in its first step, and by `gracetune check gradients`.

`FirstStepCheck` is part of every planned run. Before the first update it compares one block with a
plain copy of it (`block_check.py`), and requires a gradient for every trained tensor.

`check_gradients` compares all blocks of a run file. It also compares the first updates with those
of an optimizer whose state is all on the device. It saves nothing.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from gracetune.data.batch_order import RankShare
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.types import Notice
from gracetune.models.family import transformers_of, unused_weights
from gracetune.optim.build import build_optimizer, state_nbytes_per_element_of
from gracetune.optim.registry import optimizer_info
from gracetune.train.block_check import MIN_LIMIT, BlockReference, CapturedCall
from gracetune.train.experts import SINGLE_TRANSFORMER, ExpertTurn
from gracetune.train.step import (
    TrainProgress,
    batch_losses,
    derive_seed,
    mark_last,
    train_step,
    trained_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.nn import Parameter

    from gracetune.cache.batch_transfer import BatchIterator
    from gracetune.data.sample import Batch
    from gracetune.distributed.ranks import RankGroup
    from gracetune.models.family import Expert, Family
    from gracetune.plan.controller import PlanController
    from gracetune.train.block_check import KindResult
    from gracetune.train.build import Session
    from gracetune.train.step import TrainState

    ChooseBlocks = Callable[[int], Sequence[int]]
    """Returns the positions of the blocks to compare, from the number of blocks."""

CHECKED_UPDATES = 3
"""Number of updates to compare. The first creates optimizer state, later ones stream it."""
FILL_STD = 1e-3
"""Standard deviation of the values that replace trained tensors of zeros, such as LoRA's B. With
zeros, the gradients of other tensors would be zero as well."""
MEMORY_SHARE = 0.25
"""Share of the free device memory for recorded blocks, and for the optimizer with which updates are
compared."""
MAX_GROUP = 1024
"""Largest number of blocks that one pass records."""


# The blocks to compare


def random_block(ranks: RankGroup, count: int) -> Sequence[int]:
    """Return the position of one block, chosen at random and the same on all ranks."""
    return [ranks.broadcast(secrets.randbelow(count))]


def build_references(family: Family, choose: ChooseBlocks) -> list[BlockReference]:
    """Copy the structure of the chosen blocks, in each of the family's transformers.

    Call this when the model has its adapter, before a plan is made.
    """
    names = {module: name for name, module in family.transformer.named_modules()}
    blocks, num_transformers = family.blocks(), len(transformers_of(family.transformer))
    num_blocks = len(blocks) // num_transformers
    positions = choose(num_blocks)
    chosen = [
        blocks[transformer * num_blocks + position]
        for transformer in range(num_transformers)
        for position in positions
    ]
    return [BlockReference(names[block], block) for block in chosen]


def missing_gradients(
    parameters: Mapping[str, Parameter], expert: Expert | None, unused: Iterable[str]
) -> list[str]:
    """Return the names of trained tensors that have no gradient after backward.

    `expert` is the transformer that the step trained. `unused` has patterns for the names of
    tensors that do not affect the model's output.
    """
    prefix = "" if expert is None else f"{expert}."
    return [
        name
        for name, parameter in parameters.items()
        if name.startswith(prefix)
        and parameter.grad is None
        and not any(fnmatchcase(name, pattern) for pattern in unused)
    ]


# The first step of a run


class FirstStepCheck:
    """Checks the first step that a process trains of each transformer; Wan 2.2 has two.

    The loop calls `begin` before a step, and `finish` after its backward passes.
    """

    def __init__(self, session: Session) -> None:
        self._state = session.state
        self._references = session.references
        self._emit = session.emit
        self._clear_memory = session.clear_device_memory
        self._unchecked: set[Expert | None] = set()
        if session.state.run.train.check_gradients:
            schedule = session.state.expert_schedule
            self._unchecked = {None} if schedule is None else set(schedule.windows)
        self._call: tuple[BlockReference, CapturedCall] | None = None

    def begin(self, expert: Expert | None) -> bool:
        """Record a block in the step that follows, if the step is to be checked."""
        if expert not in self._unchecked:
            return False
        prefix = "" if expert is None else f"{expert}."
        for reference in self._references:
            if not reference.name.startswith(prefix):
                continue
            if reference.draws_random_numbers:
                self.skip("its dropout draws from torch's global generator")
                break
            self._call = reference, CapturedCall(reference)
        return True

    def finish(self, expert: Expert | None, one_each: bool) -> None:
        """Check the gradients of the step; raise if they are wrong or missing, on all ranks.

        `one_each` is True if every rank had one micro-batch in the step. Only then the gradients of
        a recorded micro-batch can be compared with those of the step.
        """
        self._unchecked.discard(expert)
        state = self._state
        # It communicates with the other ranks, so it runs even if gradients are missing here.
        problem = "" if self._call is None else self._compare(*self._call, one_each)
        missing = missing_gradients(state.parameters, expert, unused_weights(state.family))
        if missing:
            problem = (
                f"{len(missing)} of {len(state.parameters)} trained tensors received no gradient "
                f"in the first step, so they would never be trained. First: {missing[0]}. Leave "
                "their modules out of adapter.targets"
            )
        self.cancel()
        if not self._unchecked:
            self._references.clear()  # in fp8, they keep the weights from before the conversion
        problems = state.ranks.gather(problem)
        first = next(filter(None, problems), "")
        if first:
            raise RunFailedError(
                f"{first}. No weight was changed in this step. train.check_gradients: false skips "
                "this check."
            )

    def cancel(self) -> bool:
        """Stop recording and drop what was recorded; return False if nothing was recorded."""
        if self._call is None:
            return False
        self._call[1].close()
        self._call = None
        return True

    def skip(self, reason: str) -> None:
        """Compare no block from now on, and log why."""
        self._references.clear()
        text = f"the gradients of the first step were not compared with a plain block: {reason}"
        self._emit(Notice(text, level="warning", fallback=True))

    def _compare(self, reference: BlockReference, call: CapturedCall, one_each: bool) -> str:
        """Compare the recorded block; return what is wrong, or an empty string."""
        call.close()
        began = time.monotonic()
        # All ranks must take part, so this comes before anything that can fail on one of them.
        reduced = _reduction_error(self._state.ranks, reference, call)
        if not call.is_complete:
            return f"backward did not reach block {reference.name} in the first step"
        try:
            with self._state.context.fail_together():
                results = reference.compare(call)
        except torch.OutOfMemoryError as error:
            self.skip(str(error).splitlines()[0])
            return ""
        finally:
            self._clear_memory()
        failed = [result for result in results if not result.passed]
        if failed:
            return (
                f"block {reference.name} computes wrong numbers in this run; "
                f"{failed[0].describe()}. `gracetune check gradients` shows a table of all blocks. "
                "To train without the part that fails, set plan.stream: false, plan.offload: false "
                "or plan.compile: never, and please report this"
            )
        if one_each and not reduced <= _reduction_limit(reference):
            return (
                f"the gradients of block {reference.name} were not summed over the ranks: they "
                f"differ from the sum by {reduced:.2g}, relative to its norm. Please report this"
            )
        largest = max(result.ratio for result in results)
        text = (
            f"gradients: block {reference.name} has {largest:.2f} times the rounding error of a "
            f"plain block (limit 2), checked in {time.monotonic() - began:.1f} s"
        )
        self._emit(Notice(text))
        return ""


def _reduction_error(ranks: RankGroup, reference: BlockReference, call: CapturedCall) -> float:
    """Return how far a block's gradients are from their sum over ranks; 0 for a single rank.

    Valid after a step in which every rank had one micro-batch.
    """
    if ranks.world_size == 1:
        return 0.0
    distance = norm = 0.0
    for parameter in reference.trained.values():
        local = call.weight_gradient(parameter)
        total = torch.zeros_like(parameter) if local is None else local.clone()
        torch.distributed.all_reduce(total)
        if parameter.grad is not None:
            distance += float((parameter.grad - total).double().square().sum())
        norm += float(total.double().square().sum())
    return math.sqrt(distance / norm if norm else distance)


def _reduction_limit(reference: BlockReference) -> float:
    rounding = [torch.finfo(parameter.dtype).eps for parameter in reference.trained.values()]
    return max([MIN_LIMIT, *rounding])


# The command


@dataclass(slots=True)
class BlockReport:
    """The comparison of one block with its plain copy."""

    name: str
    placement: str
    """The plan for the block: where its weights are, and what happens to its activations."""
    results: list[KindResult]
    reduction_error: float | None = None
    """Distance of the gradients from their sum over ranks, relative to it; None for one rank."""
    reduction_limit: float = MIN_LIMIT
    """Largest `reduction_error` that passes."""
    update_error: float | None = None
    """Difference of the first updates from those of an optimizer with all state on the device,
    relative to the updates; None if they were not compared. `MIN_LIMIT` passes."""

    @property
    def passed(self) -> bool:
        """True if everything that was compared is within its limit."""
        return not self.failures()

    def failures(self) -> list[str]:
        """Return a phrase for each comparison that is above its limit."""
        failed = [result.describe() for result in self.results if not result.passed]
        reduced, updated = self.reduction_error, self.update_error
        if reduced is not None and not reduced <= self.reduction_limit:
            failed.append(
                f"gradients differ from their sum over ranks by {reduced:.2g} "
                f"(limit {self.reduction_limit:.2g})"
            )
        if updated is not None and not updated <= MIN_LIMIT:
            failed.append(f"updates differ by {updated:.2g} (limit {MIN_LIMIT:g})")
        return failed

    @property
    def ratio(self) -> float:
        """Largest error of all kinds, relative to the plain block's own error."""
        return max(result.ratio for result in self.results)


@dataclass(slots=True)
class GradientReport:
    """The comparison of all blocks of a run."""

    blocks: list[BlockReport]
    notes: list[str]
    """Remarks on what could not be compared."""

    @property
    def passed(self) -> bool:
        """True if there are blocks, and all of them passed."""
        return bool(self.blocks) and all(block.passed for block in self.blocks)


def check_gradients(session: Session) -> GradientReport:
    """Compare gradients and first updates of a session with plain blocks and a plain optimizer.

    Every trained tensor must have a gradient. Trained tensors of zeros are filled with small
    numbers first, so that no gradient is zero.
    """
    state = session.state
    if state.layout.is_sharded:
        raise ConfigError(
            f"distributed.strategy is {state.run.distributed.strategy}, but the check compares "
            "whole blocks, and each rank has a part of them. Add --set "
            "distributed.strategy=replicate."
        )
    _fill_zeros(state.parameters, state.run.seed)
    placements = _placements(state.family, session.plan_controller)
    reports: dict[str, BlockReport] = {}
    notes: list[str] = []
    ranks = state.ranks
    share = RankShare(state.layout.data_rank, state.layout.data_size)
    batches = session.pipeline.batches(share)
    try:
        source = _without_state(batches)
        for turn in _turns(state):
            for reference, call in _captured_calls(session, source, turn):
                reports[reference.name] = BlockReport(
                    reference.name, placements[reference.name], _compare_block(reference, call)
                )
                if ranks.world_size > 1:
                    report = reports[reference.name]
                    report.reduction_error = _reduction_error(ranks, reference, call)
                    report.reduction_limit = _reduction_limit(reference)
                session.clear_device_memory()
            notes += _compare_updates(session, source, turn, reports)
    finally:
        batches.close()
    return GradientReport(_worst_of_ranks(ranks, list(reports.values())), notes)


def _compare_block(reference: BlockReference, call: CapturedCall) -> list[KindResult]:
    try:
        return reference.compare(call)
    except torch.OutOfMemoryError as error:
        raise RunFailedError(
            f"block {reference.name} cannot be compared: {str(error).splitlines()[0]} The exact "
            "computation of a block needs about twice its memory. Lower plan.device_memory, "
            "train.batch_size or the resolution for the check."
        ) from error


def _without_state(batches: BatchIterator) -> Iterator[Batch]:
    while True:
        batch, _ = next(batches)
        yield batch


def _turns(state: TrainState) -> list[ExpertTurn]:
    if state.expert_schedule is None:
        return [SINGLE_TRANSFORMER]
    return [ExpertTurn(expert, window) for expert, window in state.expert_schedule.windows.items()]


def _captured_calls(
    session: Session, batches: Iterator[Batch], turn: ExpertTurn
) -> Iterator[tuple[BlockReference, CapturedCall]]:
    """Run training passes, and yield the recorded call of each block of a transformer.

    One pass records as many blocks as fit on the device.
    """
    state, expert = session.state, turn.expert
    prefix = "" if expert is None else f"{expert}."
    waiting = [r for r in session.references if r.name.startswith(prefix)]
    group, number = 1, 0
    while waiting:
        chosen, number = waiting[:group], number + 1
        calls = [CapturedCall(reference) for reference in chosen]
        state.reducer.begin(trained_parameters(state, expert))
        try:
            losses = batch_losses(state, next(batches), turn)
            with state.reducer.overlapped():
                state.accelerator.backward(losses.sum())
            state.reducer.finish()
        except torch.OutOfMemoryError:
            if group == 1 or state.ranks.world_size > 1:  # other ranks wait for the gradients
                raise
            group //= 2
            state.optimizer.zero_grad()
            continue
        finally:
            for call in calls:
                call.close()
        if number == 1:
            _check_all_have_gradients(state, expert)
        del waiting[: len(chosen)]
        for reference in chosen:
            call = calls.pop(0)
            if not call.is_complete:
                raise RunFailedError(f"backward did not reach block {reference.name}")
            group = max(group, min(state.ranks.gather(_group_size(call))))
            yield reference, call
        state.optimizer.zero_grad()


def _check_all_have_gradients(state: TrainState, expert: Expert | None) -> None:
    missing = missing_gradients(state.parameters, expert, unused_weights(state.family))
    if missing:
        raise RunFailedError(
            f"{len(missing)} of {len(state.parameters)} trained tensors receive no gradient. "
            f"First: {missing[0]}. Leave their modules out of adapter.targets."
        )


def _group_size(call: CapturedCall) -> int:
    """Return the number of blocks that one pass can record in the free device memory."""
    if call.device.type != "cuda":
        return MAX_GROUP
    return min(MAX_GROUP, max(1, int(MEMORY_SHARE * _free_nbytes(call.device)) // call.nbytes))


def _free_nbytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _fill_zeros(parameters: Mapping[str, Parameter], seed: int) -> None:
    for name, parameter in parameters.items():
        if not parameter.any():
            generator = torch.Generator().manual_seed(derive_seed(seed, "fill", name))
            values = torch.randn(parameter.shape, generator=generator) * FILL_STD
            parameter.data.copy_(values)


def _placements(family: Family, controller: PlanController | None) -> dict[str, str]:
    """Return the plan for each block in words, by the block's name."""
    names = {module: name for name, module in family.transformer.named_modules()}
    blocks = family.blocks()
    if controller is None:
        return {names[block]: "resident, no plan" for block in blocks}
    plans, mode = controller.plan.blocks, "compiled" if controller.plan.compiled else "eager"
    fp8 = ", fp8" if controller.plan.frozen_compute == "fp8" else ""
    words = [
        f"{plan.weights}, {plan.activations}{' from host' if plan.offload_input else ''}, "
        f"{mode}{fp8}"
        for plan in plans
    ]
    return {names[block]: words[index % len(plans)] for index, block in enumerate(blocks)}


# Updates


class ComparedStepper:
    """Steps the run's optimizer, and a plain one with the same gradients, and compares them."""

    def __init__(self, state: TrainState, names: Sequence[str]) -> None:
        self.errors: dict[str, float] = {}
        """Sum of the squared differences between the two optimizers' weights, by tensor name."""
        self.norms: dict[str, float] = {}
        """Sum of the squared updates of the plain optimizer, by tensor name."""
        self._stepper = state.stepper
        self._optimizer = state.optimizer
        self._parameters = {name: state.parameters[name] for name in names}
        self._twins = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in self._parameters.items()
        }
        self._plain = build_optimizer(
            self._twins, state.run.optimizer, derive_seed(state.run.seed, "rounding")
        )

    def reserve_memory(self) -> None:
        """Reserve the memory of the run's own update."""
        self._stepper.reserve_memory()

    def step(self) -> None:
        """Update the run's parameters and their twins, and add up the differences."""
        before = {name: twin.detach().clone() for name, twin in self._twins.items()}
        for name, parameter in self._parameters.items():
            self._twins[name].grad = None if parameter.grad is None else parameter.grad.clone()
        rates = {group["stage"]: group["lr"] for group in self._optimizer.param_groups}
        for group in self._plain.param_groups:
            group["lr"] = rates[group["stage"]]
        self._stepper.step()
        self._plain.step()
        for name, parameter in self._parameters.items():
            update = self._twins[name].detach().double() - before[name].double()
            difference = parameter.detach().double() - self._twins[name].detach().double()
            self.errors[name] = self.errors.get(name, 0.0) + float(difference.square().sum())
            self.norms[name] = self.norms.get(name, 0.0) + float(update.square().sum())


def _compare_updates(
    session: Session,
    batches: Iterator[Batch],
    turn: ExpertTurn,
    reports: Mapping[str, BlockReport],
) -> list[str]:
    """Train a few steps with two optimizers, and store the differences in the reports.

    Returns a note if not all updates could be compared.
    """
    state = session.state
    prefix = "" if turn.expert is None else f"{turn.expert}."
    trained = [name for name in state.parameters if name.startswith(prefix)]
    names = _updates_that_fit(state, trained)
    if not names:
        return ["updates were not compared: a second optimizer does not fit on the device"]
    stepper = ComparedStepper(state, names)
    compared = replace(state, stepper=stepper, ema=None)  # type: ignore[arg-type]
    progress = _progress_of(state, turn.expert)
    for _ in range(CHECKED_UPDATES):
        train_step(compared, mark_last([next(batches)]), state.layout.data_size, progress)
    state.stepper.synchronize()
    for name, report in reports.items():
        inside = [n for n in names if n.startswith(f"{name}.")]
        if inside:
            error, norm = (sum(sums[n] for n in inside) for sums in (stepper.errors, stepper.norms))
            report.update_error = math.sqrt(error / norm if norm else error)
    missing = len(trained) - len(names)
    return [f"the updates of {missing} of {len(trained)} tensors were not compared"] * bool(missing)


def _progress_of(state: TrainState, expert: Expert | None) -> TrainProgress:
    """Return counters at which the expert schedule trains this transformer."""
    schedule = state.expert_schedule
    step = 0
    while schedule is not None and schedule.expert_at(step).expert != expert:
        step += 1
    return TrainProgress(step=step)


def _updates_that_fit(state: TrainState, names: Sequence[str]) -> list[str]:
    """Return the trained tensors for which a second optimizer fits on the device."""
    parameters = [state.parameters[name] for name in names]
    if parameters[0].device.type != "cuda":
        return list(names)
    # A weight, its gradient and its value before the step, besides the optimizer's state.
    each = 3 * parameters[0].itemsize + state_nbytes_per_element_of(state.run.optimizer, parameters)
    room = MEMORY_SHARE * _free_nbytes(parameters[0].device)
    fitting: list[str] = []
    for name, parameter in zip(names, parameters, strict=True):
        room -= each * parameter.numel()
        if room < 0:
            break
        fitting.append(name)
    can_be_split = optimizer_info(state.run.optimizer.name).state_can_be_split
    return fitting if can_be_split or len(fitting) == len(names) else []


def _worst_of_ranks(ranks: RankGroup, reports: list[BlockReport]) -> list[BlockReport]:
    """Return, for each block, the report of the rank with the largest error."""
    return [
        max(same, key=lambda report: (not report.passed, report.ratio))
        for same in zip(*ranks.gather(reports), strict=True)
    ]
