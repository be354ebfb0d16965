"""One optimizer step."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch.nn.utils import get_total_norm

from gracetune.models.family import routed
from gracetune.optim.schedule import rate_share, set_rates, used_rate
from gracetune.train import objective
from gracetune.train.experts import SINGLE_TRANSFORMER
from gracetune.train.timesteps import sample_timesteps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from gracetune.config.schema import RunFile
    from gracetune.data.sample import Batch
    from gracetune.models.family import Expert, Family
    from gracetune.optim.update import Update
    from gracetune.train.experts import ExpertTurn, ExpertSchedule
    from gracetune.train.state import TrainProgress


@dataclass(frozen=True, slots=True)
class TrainState:
    """All that a step touches."""

    run: RunFile
    family: Family
    transformer: nn.Module
    """The family's, as Accelerate wrapped it."""
    parameters: dict[str, Parameter]
    """What is trained, by name."""
    optimizer: Optimizer
    update: Update
    """The optimizer's step, wherever its state lives."""
    ema: Ema | None
    accelerator: Accelerator
    rng: PositionalRng
    expert_schedule: ExpertSchedule


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured; tensors stay on the device until someone logs them."""

    loss: Tensor
    """The mean over every sample of the step, on all ranks."""
    grad_norm: Tensor
    lr: float | Tensor
    samples: Tensor
    micro_batches: int
    expert: Expert | None = None
    """Who was trained; none: there is one transformer."""


def train_step(
    t: TrainState, window: Iterable[Batch], length: int, progress: TrainProgress
) -> StepResult:
    """Accumulate over a window of micro-batches, then update.

    Each backward adds the *sum* of its samples' losses; the division by the samples really seen, on
    all ranks, comes once at the end. So a short batch or a changed window can never weigh too much.
    """
    turn = t.expert_schedule.at(progress.step)
    totals = torch.zeros(2, device=t.accelerator.device)  # the sum of losses, and their number
    seen = 0
    for seen, batch in enumerate(window, start=1):
        with nullcontext() if seen == length else t.accelerator.no_sync(t.transformer):
            losses = batch_losses(t, batch, progress.micro_batches + seen - 1, turn)
            t.accelerator.backward(losses.sum())
        totals[0] += losses.detach().sum()
        totals[1] += len(batch)
    assert seen == length, f"{seen} micro-batches for a step of {length}"
    loss_sum, samples = t.accelerator.reduce(totals, "sum")
    # Accelerate averages gradients over ranks, hence the world size.
    grad_norm = scale_and_clip_gradients(
        list(t.parameters.values()),
        t.accelerator.num_processes / samples,
        t.run.train.max_grad_norm,
    )
    section, total = t.run.optimizer, t.run.train.max_train_steps
    set_rates(t.optimizer, rate_share(section, progress.step, total))
    t.update.step()
    lr = used_rate(t.optimizer)
    t.optimizer.zero_grad()
    if t.ema is not None:
        t.ema.update(progress.step)
    return StepResult(loss_sum / samples, grad_norm, lr, samples, length, turn.expert)


def batch_losses(t: TrainState, batch: Batch, micro_batch: int, turn: ExpertTurn = SINGLE_TRANSFORMER) -> Tensor:
    """The loss of each sample of one micro-batch, as much as it counts."""
    generator = t.rng.at("train", micro_batch, t.accelerator.process_index)
    x0, _ = t.family.parts(batch.latents)
    num_tokens = t.family.num_tokens(x0.shape[1:])
    levels = sample_timesteps(t.run.train, len(batch), generator, turn.window, num_tokens)
    noise = torch.randn(x0.shape, generator=generator, device=generator.device)
    losses = losses_given_noise(t, batch, levels, noise, turn.expert)
    weights = objective.loss_weights(levels, t.run.train, t.family.prediction)
    return losses if weights is None else losses * weights


def losses_given_noise(
    t: TrainState, batch: Batch, levels: Tensor, noise: Tensor, expert: Expert | None = None
) -> Tensor:
    """The same for given levels and noise, all samples alike; the levels are this expert's."""
    kind = t.family.prediction
    x0, given = t.family.parts(batch.latents)
    noisy = objective.add_noise(x0, noise, levels, kind)
    with t.accelerator.autocast():
        predicted = t.family.predict(
            routed(t.transformer, expert), noisy, levels, {**batch.text, **given}
        )
    target = objective.target(x0, noise, levels, kind)
    return objective.sample_losses(predicted, target, batch.weights)


def scale_and_clip_gradients(parameters: list[Parameter], scale: Tensor, max_norm: float) -> Tensor:
    """Multiply gradients by `scale`, then down to `max_norm` if they are longer; gives the norm."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = get_total_norm(gradients) * scale
    if max_norm > 0:
        scale = scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, scale)
    return norm


# ------------------------------------------------------------------------------------------
# Random numbers by position, not by history.
#
# Each micro-batch of each rank has a generator of its own, seeded from where it stands in the
# run. A
# resumed run therefore draws what the uninterrupted one would have, and there is no state to lose.


def derive_seed(*parts: int | str) -> int:
    """One 63-bit seed for a position."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(blake3(text.encode()).digest(length=8), "big") >> 1


class PositionalRng:
    """The generator of any position of a run, on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = torch.Generator(device)

    def at(self, purpose: str, *position: int | str) -> torch.Generator:
        """A generator that is valid until the next call."""
        return self._generator.manual_seed(derive_seed(self._seed, purpose, *position))


# ------------------------------------------------------------------------------------------
# The moving average of the trained weights, which usually samples better than the weights do.


class Ema:
    """Averages beside the parameters they follow, in the same order."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._live = [parameter.data for parameter in parameters.values()]
        self.averages = {name: p.detach().clone() for name, p in parameters.items()}

    def update(self, step: int) -> None:
        """Follow; early steps count more, so that the first weights are soon forgotten."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.averages.values()), self._live, 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model hold the averages for a while."""
        kept = [p.clone() for p in self._live]
        torch._foreach_copy_(self._live, list(self.averages.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(self._live, kept)
