"""Automagic: an optimizer that adapts its own learning rates.

Symbols: G is the gradient of a weight W, and V the bias-corrected running mean of G**2. L is the
learning rate in fp32, and `lr` is the factor of the learning-rate schedule, 1 at its peak. D is the
direction of the step.

    U = G / sqrt(V),   scaled so that its root mean square over the tensor is at most `CLIP`
    W = W - lr (L D + weight_decay L W)

There are two rules for D and L.

**With `lr_bump`** (the published rule) every element has its own L, and D is U. L rises while the
sign of U stays the same and falls when it changes:

    L = clamp(L + lr_bump a, min_lr, max_lr)
    a = +1 if U has the sign of the last step, -1 if not, 0 if either is zero

**Without `lr_bump`** a parameter group has one L, and D is the bias-corrected running mean M of U.
The next U shows whether the last step M went too far:

    L = clamp(L exp(GAIN lr (q + lr DAMPING / 2)), min_lr, max_lr),   q = <U, M> / <M, M>

Why this works: near a minimum with curvature h, q is -h lr L / 2 on average, whatever the noise,
because W no longer grows and so E[W (W - W')] is half of E[(W - W')**2]. Far from the minimum q is
higher, and L rises. It settles where h L equals `DAMPING`, half of the Newton step. The sums run
over the whole group, because the step of one tensor changes the gradient of another, and separate
rates would drift apart. `lr` in the exponent gives little weight to the small steps at the end of a
schedule; otherwise L would rise as `lr` falls.

Rates are fp32 and never quantized. Signs and running means start at zero, so the first gradient
changes no rate. Apart from sums over tensors, all operations are element-wise, so each rank keeps
the state of its own shards (DTensor), and ranks exchange three sums per tensor. A step never waits
for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.nn import Parameter


START_LR = 1e-6
MIN_LR = 1e-7
MAX_LR = {True: 1e-3, False: 1e-1}
"""Default of `max_lr`. If `lr_bump` is set (key True), it is the published value; otherwise a rate
above which hardly any training is stable."""
CLIP = 1.0
EPSILON = 1e-30
GAIN = 0.3
"""Speed at which a parameter group's learning rate rises or falls, as the latest update agrees with
the running mean of updates or not."""
DAMPING = 0.5
"""Target value of the loss's curvature times the learning rate; 1 would be the Newton step."""

Group = dict[str, Any]


class Shards(Protocol):
    """Parameters that are a rank's parts of tensors, as plain tensors (not DTensors)."""

    def numel(self, parameter: Parameter) -> int:
        """Return the number of elements of the whole tensor to which a part belongs."""
        ...

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks that have the parts."""
        ...


class Automagic(Optimizer):
    """An optimizer that adapts its own learning rates; the module's docstring has the formulas.

    `seed` determines the stochastic rounding of bf16 weights in every step.
    """

    def __init__(
        self,
        groups: Iterable[Group] | Iterable[Parameter],
        *,
        start_lr: float | None = None,
        lr_bump: float | None = None,
        min_lr: float | None = None,
        max_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": 1.0,
            "start_lr": start_lr,
            "lr_bump": lr_bump,
            "min_lr": min_lr,
            "max_lr": max_lr,
            "betas": betas,
            "weight_decay": weight_decay,
        }
        self._seed = seed
        self.shards: Shards | None = None
        """Set it if parameters are parts of tensors of several ranks, but plain tensors."""
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, and set its `min_lr`, `max_lr` and `start_lr` if they are missing.

        A default never contradicts a bound that is given.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["min_lr"] is None:
            group["min_lr"] = min(MIN_LR, group["max_lr"] or MIN_LR)
        if group["max_lr"] is None:
            group["max_lr"] = max(MAX_LR[group["lr_bump"] is not None], group["min_lr"])
        if group["start_lr"] is None:
            group["start_lr"] = START_LR
        if group["min_lr"] > group["max_lr"]:
            raise ConfigError(
                f"optimizer.min_lr is {group['min_lr']:g}; it must be at most max_lr "
                f"({group['max_lr']:g}). Lower min_lr or raise max_lr."
            )
        group["start_lr"] = min(max(group["start_lr"], group["min_lr"]), group["max_lr"])
        unsupported = {p.dtype for p in group["params"]} - {torch.float32, torch.bfloat16}
        if unsupported:
            raise ConfigError(
                f"optimizer.name is automagic, which trains weights in fp32 or bf16, not "
                f"{unsupported}. Set train.mixed_precision: bf16, or another optimizer."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = 0
        for group in self.param_groups:
            self._step_group(group, start)
            start += len(group["params"])
        return loss

    def _step_group(self, group: Group, start: int) -> None:
        """Update the parameters of one group.

        `start` is the index of the group's first parameter among those of all groups.
        """
        indices = [i for i, p in enumerate(group["params"]) if p.grad is not None]
        if not indices:
            return
        params = [group["params"][i] for i in indices]
        states = [self._advance_state(p, group) for p in params]
        steps = [int(state["step"]) for state in states]  # on the CPU: does not wait for the device
        rates, squares, before = (
            [local_shard(state[key]) for state in states] for key in ("rate", "square", "before")
        )
        beta1, beta2 = group["betas"]
        gradients = [local_shard(p.grad).float() for p in params]
        updates = normalized_updates(gradients, squares, steps, beta2)
        if group["lr_bump"] is not None:
            (squares_of,) = self._inner_products(params, [updates, updates])
            clip_to_rms(updates, squares_of, self._numels(params))
            update_rates_by_sign(rates, updates, before, group["lr_bump"])
        else:
            agreement, length = self._update_means(updates, before, steps, params, beta1)
            q = agreement / length.clamp_min(EPSILON)
            update_group_rate(rates, q, length > 0, group["lr"])
        torch._foreach_clamp_min_(rates, group["min_lr"])
        torch._foreach_clamp_max_(rates, group["max_lr"])

        weights = [local_shard(p) for p in params]
        fp32_weights = [weight.float() for weight in weights]  # the same tensors if they are fp32
        if group["weight_decay"]:
            torch._foreach_add_(updates, fp32_weights, alpha=group["weight_decay"])
        torch._foreach_mul_(updates, rates)
        torch._foreach_add_(fp32_weights, updates, alpha=-group["lr"])
        for index, step, weight, fp32_weight in zip(
            indices, steps, weights, fp32_weights, strict=True
        ):
            if weight is not fp32_weight:
                stochastic_round_(weight, fp32_weight, (self._seed, start + index, step))

    def _update_means(
        self,
        updates: list[Tensor],
        means: list[Tensor],
        steps: Sequence[int],
        params: Sequence[Parameter],
        beta1: float,
    ) -> tuple[Tensor, Tensor]:
        """Clip the updates, and replace each by its bias-corrected running mean.

        Returns the inner products <U, M> and <M, M> over all tensors, where U is the clipped
        update and M the running mean before this step.
        """
        last = torch._foreach_mul(means, [1 / max(1 - beta1 ** (t - 1), EPSILON) for t in steps])
        squares, agreement, length = self._inner_products(
            params, [updates, updates], [updates, last], [last, last]
        )
        scales = clip_to_rms(updates, squares, self._numels(params))
        torch._foreach_lerp_(means, updates, 1 - beta1)
        torch._foreach_copy_(updates, means)
        torch._foreach_mul_(updates, [1 / (1 - beta1**t) for t in steps])
        return (agreement * scales).sum(), length.sum()

    def _inner_products(
        self, params: Sequence[Parameter], *pairs: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        """Return the inner products of the tensors in each pair of lists, over all shards."""
        rows = [
            torch.stack([torch.sum(one * other) for one, other in row])
            for row in zip(*(zip(*pair, strict=True) for pair in pairs), strict=True)
        ]
        return self._sum_over_shards(params, rows).unbind(1)

    def _sum_over_shards(self, params: Sequence[Parameter], rows: Sequence[Tensor]) -> Tensor:
        if self.shards is None:
            return sum_over_shards(params, rows)
        return self.shards.sum_over_shards(torch.stack(list(rows)))

    def _numels(self, params: Sequence[Parameter]) -> list[int]:
        """Return the number of elements of each parameter, over all ranks."""
        return [p.numel() if self.shards is None else self.shards.numel(p) for p in params]

    def _advance_state(self, p: Parameter, group: Group) -> dict[str, Tensor]:
        """Return a parameter's optimizer state with its step count increased; create it if needed.

        Its keys are part of the checkpoint format: `step`, `square` (mean of squared gradients),
        `rate` (learning rate) and `before`, the running mean of updates. If `lr_bump` is set,
        `before` is the sign of the last update instead.
        """
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["square"] = torch.zeros_like(p, dtype=torch.float32)
            start = torch.full((), group["start_lr"], dtype=torch.float32, device=p.device)
            if group["lr_bump"] is None:
                state["rate"] = start
                state["before"] = torch.zeros_like(p, dtype=torch.float32)
            else:
                state["rate"] = torch.ones_like(p, dtype=torch.float32).mul_(start)
                state["before"] = torch.zeros_like(p, dtype=torch.int8)
        state["step"] += 1
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict and keep the dtype of each tensor.

        Torch would convert all state to the parameter's dtype. Learning rates in bf16 would round
        small changes away.
        """
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                self.state[p][key] = value.to(device="cpu" if key == "step" else p.device)

    @torch.no_grad()
    def mean_lr(self) -> Tensor:
        """Return the mean learning rate over all weight elements, times the schedule's factor.

        If any parameters have gradients, only those count: in a model with a high-noise and a
        low-noise transformer, these are the parameters of the one that is being trained.
        """
        stepped = self._stepped()
        trained = [(group, [p for p in params if p.grad is not None]) for group, params in stepped]
        trained = [(group, params) for group, params in trained if params]
        totals, num_elements = [], 0
        for group, params in trained or stepped:
            sums = [(rate.sum() * weight).unsqueeze(0) for rate, weight in self._rates(params)]
            totals.append(self._sum_over_shards(params, sums).sum() * group["lr"])
            num_elements += sum(self._numels(params))
        return torch.stack(totals).sum() / max(1, num_elements) if totals else torch.zeros(())

    @torch.no_grad()
    def lr_histogram(self, low: float, high: float, num_bins: int) -> dict[str, Tensor]:
        """Return a histogram of log10 of the learning rates for each of the model's transformers.

        The keys are "high" and "low" (noise), or "" for a single transformer. The bins are from
        `low` to `high`. Rates outside are counted in the first or last bin.
        """
        histograms: dict[str, Tensor] = {}
        for group, params in self._stepped():
            counts = [
                torch.histc(rate.log10().clamp(low, high), num_bins, low, high) * weight
                for rate, weight in self._rates(params)
            ]
            histograms[group.get("stage", "")] = self._sum_over_shards(params, counts).sum(0)
        return histograms

    def _rates(self, params: Sequence[Parameter]) -> list[tuple[Tensor, int]]:
        """Return each parameter's learning rates on this rank, and the weight elements per rate.

        The number of elements is 1 if each element has its own rate.
        """
        rates = [local_shard(self.state[p]["rate"]) for p in params]
        return [
            (r, 1 if r.ndim else local_shard(p).numel()) for r, p in zip(rates, params, strict=True)
        ]

    def _stepped(self) -> list[tuple[Group, list[Parameter]]]:
        """Return the groups that have been updated at least once, with their updated parameters."""
        with_rates = [(g, [p for p in g["params"] if self.state.get(p)]) for g in self.param_groups]
        return [(group, params) for group, params in with_rates if params]


def normalized_updates(
    gradients: list[Tensor], squares: list[Tensor], steps: Sequence[int], beta2: float
) -> list[Tensor]:
    """Return U = G / sqrt(V), not yet clipped, and update the running means V in `squares`.

    G is a gradient and V the running mean of its square.
    """
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    updates = torch._foreach_mul(squares, [1 / (1 - beta2**step) for step in steps])
    torch._foreach_add_(updates, EPSILON)
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, gradients)
    return list(updates)


def update_rates_by_sign(
    rates: list[Tensor], updates: list[Tensor], signs: list[Tensor], size: float
) -> None:
    """Raise each element's learning rate by `size` if its update kept its sign, else lower it.

    This is the published rule of Automagic, which is used if `lr_bump` is set.
    """
    new_signs = torch._foreach_sign(updates)
    agreement = torch._foreach_mul(new_signs, signs)
    torch._foreach_add_(rates, agreement, alpha=size)
    torch._foreach_copy_(signs, new_signs)


def update_group_rate(rates: list[Tensor], q: Tensor, known: Tensor, lr: float) -> None:
    """Raise or lower a parameter group's learning rate, the same for all of its elements.

    q is <U, M> / <M, M>, for the latest update U and the running mean M of earlier updates: the
    rate rises if they agree. `known` is False in the first update, which has no q yet. This rule is
    used if `lr_bump` is not set.
    """
    change = (q.clamp(-1, 1) + lr * DAMPING / 2) * known
    torch._foreach_mul_(rates, (GAIN * lr * change).exp())


def clip_to_rms(updates: list[Tensor], squares: Tensor, numels: Sequence[int]) -> Tensor:
    """Scale each update so that its root mean square is at most `CLIP`; return the factors.

    `squares` has the sum of squares of each update, and `numels` its number of elements, both over
    all shards of its parameter.
    """
    means = torch._foreach_mul(squares.unbind(), [1 / (CLIP**2 * numel) for numel in numels])
    scales = torch.stack(means).clamp_min(1.0).rsqrt()
    torch._foreach_mul_(updates, scales.unbind())
    return scales


# Stochastic rounding
#
# A value between two bf16 numbers is rounded to either at random, to the nearer one more often, so
# that its mean is the value. Steps smaller than the bf16 spacing then work on average. bf16 is the
# upper half of an fp32 number: add random bits to the lower half, then cut it off.


LOWER_BITS = 16


def stochastic_round_(target: Tensor, source: Tensor, position: tuple[int, int, int]) -> None:
    """Round the fp32 values of `source` at random to bf16, into `target`.

    `position` is (seed, parameter index, step). The random bits depend on nothing else, so a
    resumed run needs no generator state, and ranks with copies of a weight round them the same way.
    """
    assert (target.dtype, source.dtype) == (torch.bfloat16, torch.float32), target.dtype
    seed, index, step = position
    generator = torch.Generator(source.device)
    generator.manual_seed((seed * 1_000_003 + index) * 1_000_003 + step & (2**63 - 1))
    noise = torch.randint(
        0,
        1 << LOWER_BITS,
        source.shape,
        generator=generator,
        device=source.device,
        dtype=torch.int32,
    )
    bits = noise.add_(source.contiguous().view(torch.int32)).bitwise_and_(-1 << LOWER_BITS)
    # Do not round NaN and infinity: the noise could turn one into the other.
    target.copy_(torch.where(source.isfinite(), bits.view(torch.float32), source))


# Sharded parameters


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard without a copy, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_over_shards(params: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Add up each parameter's partial sums over all ranks, with one exchange per device mesh.

    `rows` has this rank's partial sums, one row for each parameter.
    """
    totals = list(rows)
    meshes: dict[object, list[int]] = {}
    for index, param in enumerate(params):
        if isinstance(param, DTensor):
            meshes.setdefault((param.device_mesh, param.placements), []).append(index)
    for indices in meshes.values():
        param = params[indices[0]]
        assert isinstance(param, DTensor)
        placements = [Partial() if p.is_shard() else Replicate() for p in param.placements]
        partial_sums = torch.stack([rows[index] for index in indices])
        summed = DTensor.from_local(
            partial_sums, param.device_mesh, placements, run_check=False
        ).full_tensor()
        for index, row in zip(indices, summed.unbind(), strict=True):
            totals[index] = row
    return torch.stack(totals)
