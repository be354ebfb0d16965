"""One optimizer step: forward and backward of each micro-batch, clipping, update, EMA.

The training loop calls `train_step` until the run is complete. The loss is computed in
`objective.py`, timesteps are drawn in `timesteps.py`, and the model runs in `Family.predict` of
`models/<family>.py`.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch.nn.utils import get_total_norm

from gracetune.distributed.context_parallel import SINGLE_CONTEXT
from gracetune.distributed.layout import SINGLE_LAYOUT
from gracetune.errors import CompiledBlockError, RunFailedError
from gracetune.memory.managed_roles import ManagedGroups
from gracetune.models.family import bind_expert
from gracetune.optim.offloaded_state import FREE_DEVICE_MEMORY
from gracetune.optim.schedule import (
    AveragingOptimizer,
    averaged_weights,
    effective_lr,
    lr_scale,
    set_lr,
)
from gracetune.train import objective
from gracetune.train.experts import SINGLE_TRANSFORMER
from gracetune.train.step_recorder import NoRecorder
from gracetune.train.timesteps import sample_timesteps, scheduled_timesteps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from gracetune.adapters.compute.dropout import DropoutSeeds
    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Batch
    from gracetune.distributed.context_parallel import ContextGroup
    from gracetune.distributed.gradients import GradientReducer
    from gracetune.distributed.layout import Layout
    from gracetune.distributed.ranks import RankGroup
    from gracetune.distributed.sharding import ShardedParameters, ShardedReducer
    from gracetune.memory.managed_roles import ManagedSlab
    from gracetune.models.family import Expert, Family
    from gracetune.optim.offloaded_state import ManagedState, OptimizerStepper
    from gracetune.train.experts import ExpertSchedule, ExpertTurn
    from gracetune.train.skipped_steps import StepSkips
    from gracetune.train.step_recorder import StepRecorder


NO_RECORDER = NoRecorder()
SEED_RANK = 0
"""Part of the seeds of noise and dropout. Seeds used to depend on the rank; this keeps those of a
single rank as they were."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything that an optimizer step reads or changes."""

    run: RunFile
    family: Family
    transformer: nn.Module
    """The transformer of the model, wrapped by Accelerate."""
    parameters: dict[str, Parameter]
    """The trained parameters by name. If the model is divided among ranks (`sharded`), these are
    this rank's parts of them."""
    optimizer: Optimizer
    stepper: OptimizerStepper
    """Runs the optimizer's step, also when the optimizer state lives in host memory."""
    ema: Ema | None
    accelerator: Accelerator
    rng: PositionalRng
    expert_schedule: ExpertSchedule | None
    """Decides which of the two transformers of Wan 2.2 each step trains. None for other models."""
    reducer: GradientReducer | ShardedReducer
    """Sums gradients over ranks."""
    layout: Layout = SINGLE_LAYOUT
    """The part of the model and of the data that this rank has."""
    context: ContextGroup = SINGLE_CONTEXT
    """The ranks that divide the tokens of this rank's samples among them."""
    sharded: ShardedParameters | None = None
    """The model's trained tensors, if they are divided among ranks; None if each has all."""
    dropout: DropoutSeeds | None = None
    """Seeds of the dropout layers. None: they draw from torch's global generator, as in a run that
    an earlier version started."""
    recorder: StepRecorder | NoRecorder = NO_RECORDER
    """Records times and losses for the telemetry of the run."""
    skips: StepSkips | None = None
    """Decides which steps are skipped (`train.skip_bad_batches`). None: none."""

    @property
    def ranks(self) -> RankGroup:
        """All ranks of the run."""
        return self.layout.ranks

    @property
    def has_averages(self) -> bool:
        """True if the result of the run has averaged weights, of the EMA or the optimizer."""
        return self.ema is not None or isinstance(self.optimizer, AveragingOptimizer)

    @property
    def num_trained(self) -> int:
        """Number of elements of all trained tensors."""
        if self.sharded is not None:
            return self.sharded.num_trained
        return sum(p.numel() for p in self.parameters.values())

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Swap in averaged weights, of the EMA or the optimizer, while the `with` block runs.

        Without averages, the weights stay as they are.
        """
        self.stepper.wait_for_reader()  # a checkpoint may still be copied
        swapped = (
            self.ema.swapped_in() if self.ema is not None else averaged_weights(self.optimizer)
        )
        try:
            with swapped:
                self._free_gathered()
                yield
        finally:
            self._free_gathered()

    def _free_gathered(self) -> None:
        if self.sharded is not None:
            self.sharded.free_gathered()


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """The counters of a run. Field names are keys in checkpoints: do not rename them."""

    step: int = 0
    """Number of optimizer steps done."""
    micro_batches: int = 0
    """Micro-batches that all ranks together have trained on."""
    consumed: int = 0
    """Batches that all ranks together have taken from the data pipeline; the ramp of the effective
    batch size depends on it."""
    high_steps: int = 0
    """Optimizer steps that trained the high-noise transformer of Wan 2.2; 0 for other models."""
    low_steps: int = 0
    """Optimizer steps that trained the low-noise transformer of Wan 2.2; 0 for other models."""

    def after(self, micro_batches: int, consumed: int, expert: str | None) -> TrainProgress:
        """Return the counters one optimizer step later."""
        return TrainProgress(
            self.step + 1,
            self.micro_batches + micro_batches,
            consumed,
            self.high_steps + (expert == "high"),
            self.low_steps + (expert == "low"),
        )

    def steps_of(self, expert: Expert | None) -> int:
        """Return the number of steps that trained this transformer; None is a single one."""
        return {"high": self.high_steps, "low": self.low_steps, None: self.step}[expert]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The measurements of one optimizer step. Tensors stay on the device until they are logged."""

    loss: Tensor
    """Mean loss over all samples of the step, on all ranks."""
    grad_norm: Tensor
    """Norm of the mean gradient, before clipping."""
    lr: float | Tensor
    samples: Tensor
    """Number of samples in the step, on all ranks."""
    micro_batches: int
    """Number of micro-batches in the step, over all ranks."""
    expert: Expert | None = None
    """The trained transformer of Wan 2.2, `high` or `low` noise; None for other models."""
    is_skipped: bool = False
    """True if the weights were not updated, because the loss or the gradient was not finite."""


def turn_at(state: TrainState, progress: TrainProgress) -> ExpertTurn:
    """Return the transformer that the next step trains, and its range of timesteps."""
    if state.expert_schedule is None:
        return SINGLE_TRANSFORMER
    return state.expert_schedule.expert_at(progress.step)


def trained_parameters(state: TrainState, expert: Expert | None) -> list[Parameter]:
    """Return the trained parameters of a transformer of Wan 2.2, or of a model's only one."""
    prefix = "" if expert is None else f"{expert}."
    return [p for name, p in state.parameters.items() if name.startswith(prefix)]


class RankOutOfMemoryError(torch.OutOfMemoryError):
    """Raised on all ranks if the device of one is out of memory, before weights are changed."""


def train_step(
    state: TrainState,
    batches: Iterable[tuple[Batch, bool]],
    micro_batches: int,
    progress: TrainProgress,
    check_gradients: Callable[[Expert | None, bool], None] | None = None,
    recognizing_compiled_blocks: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepResult:
    """Accumulate gradients over the micro-batches of a step, then update the weights.

    `batches` has the micro-batches of this rank, each with True if it is the rank's last one; the
    ranks of a context group have the same ones.
    `micro_batches` is the number over all ranks. `check_gradients` is called before the update,
    with the trained transformer, and with True if every rank had one micro-batch. Forward and
    backward run in `recognizing_compiled_blocks` (`PlanController`).

    Each backward adds the *sum* of its samples' losses. Gradients are then summed over ranks and
    divided once by the number of samples seen on all ranks. Every sample therefore has the same
    weight, also in a short batch, when the accumulation changes between steps, and when some ranks
    have more micro-batches than others.
    """
    ranks, train, parameters = state.ranks, state.run.train, state.parameters
    turn, recorder = turn_at(state, progress), state.recorder
    recorder.mark("begin")
    state.reducer.begin(trained_parameters(state, turn.expert))
    failure, has_compiled_block_failed = "", False
    totals = torch.zeros(2, device=state.accelerator.device)  # sum of losses, number of samples
    try:
        num_passes = state.reducer.num_passes(micro_batches)
        with state.context.fail_together(), recognizing_compiled_blocks():
            _accumulate_gradients(state, recorder.timed(batches), turn, totals, num_passes)
    except (torch.OutOfMemoryError, CompiledBlockError) as error:
        if ranks.world_size == 1:
            raise
        failure = str(error).splitlines()[0]
        has_compiled_block_failed = isinstance(error, CompiledBlockError)
    recorder.mark("gradients")
    if failure:  # out of the `except` clause, so that the tensors of the failed step are freed
        state.optimizer.zero_grad()
        state.reducer.abandon(failure)
    else:
        state.reducer.finish()
    loss_sum, samples = _sum_over_ranks(state.layout, totals)
    if state.sharded is None:  # such ranks end the run if one has failed
        _raise_if_any_failed(ranks, failure, in_compiled_block=has_compiled_block_failed)
    if check_gradients is not None:
        check_gradients(turn.expert, micro_batches <= state.layout.data_size)

    recorder.mark("reduced")
    recorder.add_gradients(1 / samples)
    grad_norm = scale_and_clip_gradients(
        list(parameters.values()), 1 / samples, train.max_grad_norm, state.reducer.total_norm
    )
    set_lr(state.optimizer, lr_scale(state.run.optimizer, progress.step, train.max_train_steps))
    loss = loss_sum / samples
    is_skipped = state.skips is not None and state.skips.decide(progress.step, loss, grad_norm)
    if not is_skipped:
        _update_weights(state)
        if state.ema is not None:
            state.ema.update(progress.steps_of(turn.expert), turn.expert)
    lr = effective_lr(state.optimizer)
    state.optimizer.zero_grad()
    recorder.mark("updated")
    grad_norm = grad_norm.to(samples.device)
    return StepResult(loss, grad_norm, lr, samples, micro_batches, turn.expert, is_skipped)


def _accumulate_gradients(
    state: TrainState,
    batches: Iterable[tuple[Batch, bool]],
    turn: ExpertTurn,
    totals: Tensor,
    num_passes: int,
) -> None:
    """Run forward and backward of this rank's micro-batches; add losses and samples to `totals`.

    If the rank has fewer micro-batches than `num_passes`, it repeats the last one, without effect
    on the gradients: ranks that divide the weights must run the same number of passes.
    """
    is_last, done = False, 0
    for done, (batch, is_last) in enumerate(batches, start=1):
        losses = batch_losses(state, batch, turn)
        _backward(state, losses.sum(), is_last=is_last and done >= num_passes)
        totals[0] += losses.detach().sum()
        totals[1] += len(batch)
    assert is_last, "the step has no last micro-batch"
    for number in range(done + 1, num_passes + 1):
        losses = batch_losses(state, batch, turn)
        _backward(state, 0 * losses.sum(), is_last=number == num_passes)


def _backward(state: TrainState, loss: Tensor, *, is_last: bool) -> None:
    # Replicated ranks exchange gradients during the last backward only.
    with state.reducer.overlapped() if is_last else nullcontext():
        state.accelerator.backward(loss)


def mark_last(batches: Sequence[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield micro-batches as `train_step` takes them, each with True if it is the last one."""
    for number, batch in enumerate(batches, start=1):
        yield batch, number == len(batches)


def _sum_over_ranks(layout: Layout, values: Tensor) -> Tensor:
    """Sum over ranks. Those that divide a sample's tokens have the same values, counted once."""
    if layout.ranks.world_size > 1:
        torch.distributed.all_reduce(values)
    return values / layout.context_size


def _raise_if_any_failed(
    ranks: RankGroup, failure: str, *, in_compiled_block: bool = False
) -> None:
    """Raise the same error on all ranks if the step of one has failed.

    It is `CompiledBlockError` if a compiled block failed on any of them, else
    `RankOutOfMemoryError`. All ranks then change their plan in the same way, and repeat the step
    together.
    """
    has_failed, has_compiled_block_failed = ranks.any(bool(failure), in_compiled_block)
    if has_failed:
        reasons = "; ".join(
            f"{ranks.name(rank)}: {text}" for rank, text in enumerate(ranks.gather(failure)) if text
        )
        raise (CompiledBlockError if has_compiled_block_failed else RankOutOfMemoryError)(reasons)


def _update_weights(state: TrainState) -> None:
    if state.ranks.world_size > 1 and state.sharded is None:
        _reserve_update(state)
    try:
        state.stepper.step()
    except torch.OutOfMemoryError as error:
        if state.ranks.world_size == 1:
            raise
        raise RunFailedError(  # the other ranks have changed their weights
            f"{state.ranks.name(state.ranks.rank)} ran out of device memory in the optimizer's "
            f"update ({str(error).splitlines()[0]}). Checkpoints are kept. {FREE_DEVICE_MEMORY} "
            "and run the same command again."
        ) from error


def _reserve_update(state: TrainState) -> None:
    """Reserve the memory of the optimizer's update, or raise on all ranks if one has too little.

    The optimizer creates its state in its first update, so that is where memory ends most often.
    """
    failure = ""
    try:
        state.stepper.reserve_memory()
    except torch.OutOfMemoryError as error:
        failure = str(error).splitlines()[0]
    _raise_if_any_failed(state.ranks, failure)


def batch_losses(state: TrainState, batch: Batch, turn: ExpertTurn = SINGLE_TRANSFORMER) -> Tensor:
    """Draw a timestep and noise for each sample; return its loss, times its min-SNR weight if set.

    They depend on the number of the micro-batch in the run, not on the rank that computes it: if a
    rank computes a part of a micro-batch, they are drawn for all of it. `turn` is the transformer
    to train and its range of timesteps, for Wan 2.2.
    """
    family, train = state.family, state.run.train
    generator = state.rng.at("train", batch.index, SEED_RANK)
    if state.dropout is not None:
        place = (batch.first,) if batch.first else ()
        state.dropout.set(derive_seed(state.run.seed, "dropout", batch.index, SEED_RANK, *place))
    x0, _ = family.split_encoded(batch.latents)
    num_tokens = family.num_tokens(x0.shape[1:])
    count, part = batch.of or len(batch), slice(batch.first, batch.first + len(batch))
    positions = sample_timesteps(train, count, generator, turn.window, num_tokens)[part]
    timesteps = scheduled_timesteps(positions, family.noise_schedule)
    noise = torch.randn((count, *x0.shape[1:]), generator=generator, device=generator.device)[part]
    losses = losses_given_noise(state, batch, timesteps, noise, turn.expert)
    weights = objective.loss_weights(timesteps, train, family.prediction)
    losses = losses if weights is None else losses * weights
    state.recorder.add_losses(batch, timesteps, losses, turn.expert)
    return losses


def losses_given_noise(
    state: TrainState,
    batch: Batch,
    timesteps: Tensor,
    noise: Tensor,
    expert: Expert | None = None,
) -> Tensor:
    """Add noise to the latents, run the model and return the loss of each sample.

    The losses are not multiplied by min-SNR weights. `expert` is the transformer of Wan 2.2 to run,
    `high` or `low` noise; all timesteps must lie in its range.
    """
    family, prediction = state.family, state.family.prediction
    x0, conditioning = family.split_encoded(batch.latents)
    noisy = objective.add_noise(x0, noise, timesteps, prediction)
    with state.accelerator.autocast():
        predicted = family.predict(
            bind_expert(state.transformer, expert), noisy, timesteps, {**batch.text, **conditioning}
        )
    target = objective.target(x0, noise, timesteps, prediction)
    state.recorder.add_parts(predicted, target)
    return objective.sample_losses(predicted, target, batch.weights)


def scale_and_clip_gradients(
    parameters: list[Parameter],
    scale: Tensor,
    max_norm: float,
    total_norm: Callable[[list[Tensor]], Tensor] = get_total_norm,
) -> Tensor:
    """Multiply all gradients by `scale`, then clip their total norm to `max_norm`.

    Returns the norm after scaling and before clipping. One pass over the gradients does both.
    `max_norm` 0 turns clipping off. `total_norm` computes the norm of the gradients, which may be
    parts of those of the model.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients)
    scale = scale.to(norm.device)  # gradients may be in host memory
    norm = norm * scale
    if max_norm > 0:
        scale = scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, scale)
    return norm


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is a hash of all arguments."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(blake3(text.encode()).digest(length=8), "big") >> 1


def rounding_seed(run: RunFile, layout: Layout) -> int:
    """Return the seed of the optimizer's rounding; ranks with other weights have another one."""
    return derive_seed(run.seed, "rounding", *([layout.shard] if layout.is_sharded else []))


class PositionalRng:
    """Random numbers that depend on the position in the run, not on earlier random numbers.

    Each micro-batch of each rank has its own seed. A resumed run therefore draws the same numbers
    as an uninterrupted run, and no generator state has to be saved.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = torch.Generator(device)

    def at(self, purpose: str, *position: int | str) -> torch.Generator:
        """Return the generator, seeded for a purpose and a position in the run.

        There is only one generator: the next call changes its seed.
        """
        return self._generator.manual_seed(derive_seed(self._seed, purpose, *position))


class Ema:
    """Exponential moving average of the trained weights, which often generates better samples."""

    def __init__(
        self, parameters: Mapping[str, Tensor], decay: float, managed: ManagedState | None = None
    ) -> None:
        """Start with the weights as they are now; with `managed`, in managed memory."""
        self._decay = decay
        self._parameters = dict(parameters)
        self._managed: ManagedState | None = None
        self._groups: list[tuple[ManagedSlab, list[str]]] = []
        """Allocations of managed memory, with the names of their averages."""
        self.averages: dict[str, Tensor] = {name: p.detach() for name, p in parameters.items()}
        if managed is None:
            self.averages = {name: p.clone() for name, p in self.averages.items()}
        else:
            self.move_to_managed(managed)

    @property
    def managed_nbytes(self) -> int:
        """Bytes of averages in managed memory."""
        return sum(slab.nbytes for slab, _ in self._groups)

    @torch.no_grad()
    def move_to_managed(self, managed: ManagedState) -> None:
        """Move the averages to managed memory.

        Raises:
            torch.OutOfMemoryError: They exceed the cap, and stay where they are.
        """
        names, tensors = list(self.averages), list(self.averages.values())
        made = managed.memory.allocate_groups("ema", tensors, managed.placement)
        copies = [copy for _, group in made for copy in group]
        torch._foreach_copy_(copies, tensors)
        self.averages = dict(zip(names, copies, strict=True))
        left = iter(names)
        self._groups = [(slab, [next(left) for _ in group]) for slab, group in made]
        self._managed = managed
        self._movement = ManagedGroups(managed.memory)

    def update(self, step: int, expert: Expert | None = None) -> None:
        """Update the averages with the weights after optimizer step `step`, counted from 0.

        Of two transformers, only the one that the step trained (`expert`) is averaged, and `step`
        counts its own steps: the other one rests, and its average must not approach its weights.
        The decay is lower in the first steps, so that the initial weights are soon forgotten.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        prefix = "" if expert is None else f"{expert}."
        if self._managed is None:
            self._lerp([name for name in self.averages if name.startswith(prefix)], decay)
            return
        due = [
            (slab, trained)
            for slab, names in self._groups
            if (trained := [name for name in names if name.startswith(prefix)])
        ]
        self._movement.for_each(
            [[(slab, slab.memory)] for slab, _ in due],
            lambda number: self._lerp(due[number][1], decay),
        )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Replace the model's weights by the averages while the `with` block runs."""
        weights = [p.data for p in self._parameters.values()]
        with self._copied(weights) as trained:
            torch._foreach_copy_(weights, list(self.averages.values()))
            try:
                yield
            finally:
                torch._foreach_copy_(weights, trained)

    def _lerp(self, names: Sequence[str], decay: float) -> None:
        averages = [self.averages[name] for name in names]
        torch._foreach_lerp_(averages, [self._parameters[name].data for name in names], 1 - decay)

    @contextmanager
    def _copied(self, weights: list[Tensor]) -> Iterator[list[Tensor]]:
        """Copy the weights, to managed memory if the averages are there and it has room."""
        made = self._managed_copies(weights)
        copies = [copy for _, group in made for copy in group] or _copies_elsewhere(weights)
        torch._foreach_copy_(copies, weights)
        try:
            yield copies
        finally:
            for slab, _ in made:
                assert self._managed is not None, "slabs without managed memory"
                self._managed.memory.free(slab)

    def _managed_copies(self, weights: list[Tensor]) -> list[tuple[ManagedSlab, list[Tensor]]]:
        """Allocate managed memory for copies of the weights; return nothing if there is no room."""
        if self._managed is None:
            return []
        try:
            return self._managed.memory.allocate_groups("ema", weights)
        except torch.OutOfMemoryError:  # of the cap or the driver
            return []


def _copies_elsewhere(weights: list[Tensor]) -> list[Tensor]:
    """Allocate memory for copies of the weights on their device, or on the host if that is full."""
    try:
        return [torch.empty_like(weight) for weight in weights]
    except torch.OutOfMemoryError:
        return [torch.empty_like(weight, device="cpu") for weight in weights]
