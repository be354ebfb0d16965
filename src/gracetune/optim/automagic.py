"""Automagic: learning rates that follow from whether gradients agree.

For a gradient G, of which V is the running mean of squares without bias,

    U = G / sqrt(V),  scaled down to a root mean square of `CLIP` over its tensor
    W = W - lr (L D + weight_decay L W)

`L` are the rates, in fp32; `lr` is the schedule's share.

With `lr_bump` each element has a rate, which the published rule moves, and D is U:

    L = clamp(L + lr_bump a, min_lr, max_lr)
    a = +1 where the sign is that of the step before, -1 where it is not, 0 where one is zero

Without it nobody has said how large a rate is, and a group finds its own. D is the running mean M
of U, and what the next U says of the last M tells how far the steps go:

    L = clamp(L exp(GAIN lr (q + lr DAMPING / 2)), min_lr, max_lr),   q = <U, M> / <M, M>

Around a minimum of curvature h, whatever noise there is, q is -h lr L / 2 on average: W no longer
grows, so that E[W (W - W')] is half of E[(W - W')^2]. While there is a way to go q is higher, and
rates rise. They settle where h L is `DAMPING`, a half of the Newton step. Sums are over the group:
one tensor's step disturbs another's gradient, and rates by tensor run away from each other. What
small steps at the end of a schedule say counts little, or L would rise as `lr` falls.

Rates are never rounded to a grid. State begins with no sign and no mean, so that a first gradient
moves no rate. All of it is element by element, so that shards keep their own; ranks exchange three
sums for each tensor. Nothing in a step waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
"""With a bump, the published bound; without one, only what hardly any training survives."""
CLIP = 1.0
EPSILON = 1e-30
GAIN = 0.3
DAMPING = 0.5

Group = dict[str, Any]


class Automagic(Optimizer):
    """See the module's text. `seed` fixes how bf16 weights are rounded, step by step."""

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
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Settle the bounds: each one that is given holds, whether or not the others are."""
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
                f"({group['max_lr']:g}). Lower the one or raise the other."
            )
        group["start_lr"] = min(max(group["start_lr"], group["min_lr"]), group["max_lr"])
        odd = {p.dtype for p in group["params"]} - {torch.float32, torch.bfloat16}
        if odd:
            raise ConfigError(
                f"optimizer.name is automagic, which trains weights in fp32 or bf16, not {odd}. "
                "Set train.mixed_precision: bf16, or another optimizer."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for group in self.param_groups:
            self._step_group(group, first)
            first += len(group["params"])
        return loss

    def _step_group(self, group: Group, first: int) -> None:
        places = [i for i, p in enumerate(group["params"]) if p.grad is not None]
        if not places:
            return
        params = [group["params"][i] for i in places]
        states = [self._state_of(p, group) for p in params]
        steps = [int(state["step"]) for state in states]  # counted on the CPU
        rates, squares, before = (
            [local_shard(state[key]) for state in states] for key in ("rate", "square", "before")
        )
        beta1, beta2 = group["betas"]
        updates = normalized_updates([local_shard(p.grad).float() for p in params], squares, steps, beta2)
        if group["lr_bump"] is not None:
            clip_to_rms(updates, inner_products(params, [updates, updates])[0], params)
            update_rates_by_sign(rates, updates, before, group["lr_bump"])
        else:
            said, length = update_means(updates, before, steps, params, beta1)
            update_group_rate(rates, said / length.clamp_min(EPSILON), length > 0, group["lr"])
        torch._foreach_clamp_min_(rates, group["min_lr"])
        torch._foreach_clamp_max_(rates, group["max_lr"])

        weights = [local_shard(p) for p in params]
        masters = [weight.float() for weight in weights]  # themselves, where they are fp32
        if group["weight_decay"]:
            torch._foreach_add_(updates, masters, alpha=group["weight_decay"])
        torch._foreach_mul_(updates, rates)
        torch._foreach_add_(masters, updates, alpha=-group["lr"])
        for place, step, weight, master in zip(places, steps, weights, masters, strict=True):
            if weight is not master:
                stochastic_round_(weight, master, (self._seed, first + place, step))

    def _state_of(self, p: Parameter, group: Group) -> dict[str, Tensor]:
        """The state, made at the first gradient, and one step further."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["square"] = torch.zeros_like(p, dtype=torch.float32)
            start = torch.full((), group["start_lr"], dtype=torch.float32, device=p.device)
            if group["lr_bump"] is None:
                state["rate"] = start
                state["before"] = torch.zeros_like(p, dtype=torch.float32)  # the running mean
            else:
                state["rate"] = torch.ones_like(p, dtype=torch.float32).mul_(start)
                state["before"] = torch.zeros_like(p, dtype=torch.int8)  # signs
        state["step"] += 1
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does, but each tensor in the type it was saved in: torch would make all of them
        the parameter's, and rates in bf16 stand still."""
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, ours, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                self.state[p][key] = value.to(device="cpu" if key == "step" else p.device)

    @torch.no_grad()
    def mean_lr(self) -> Tensor:
        """The mean over all elements that have one, as the schedule lets it be used.

        While there are gradients, of what has one: of two experts, that of the one in training.
        """
        stepped = self._stepped()
        trained = [(group, [p for p in params if p.grad is not None]) for group, params in stepped]
        trained = [(group, params) for group, params in trained if params]
        totals, num_elements = [], 0
        for group, params in trained or stepped:
            sums = [(rate.sum() * weight).unsqueeze(0) for rate, weight in self._rates(params)]
            totals.append(sum_over_shards(params, sums).sum() * group["lr"])
            num_elements += sum(p.numel() for p in params)
        return torch.stack(totals).sum() / max(1, num_elements) if totals else torch.zeros(())

    @torch.no_grad()
    def lr_histogram(self, low: float, high: float, num_bins: int) -> dict[str, Tensor]:
        """By stage: how many rates lie in each of the bins, equal in log10, from low to high."""
        found: dict[str, Tensor] = {}
        for group, params in self._stepped():
            counts = [
                torch.histc(rate.log10().clamp(low, high), num_bins, low, high) * weight
                for rate, weight in self._rates(params)
            ]
            found[group.get("stage", "")] = sum_over_shards(params, counts).sum(0)
        return found

    def _rates(self, params: Sequence[Parameter]) -> list[tuple[Tensor, int]]:
        """Each parameter's rates here, and for how many elements each of them stands."""
        rates = [local_shard(self.state[p]["rate"]) for p in params]
        return [(r, 1 if r.ndim else local_shard(p).numel()) for r, p in zip(rates, params, strict=True)]

    def _stepped(self) -> list[tuple[Group, list[Parameter]]]:
        """Each group that has been stepped, with those of its parameters that have a rate."""
        with_rates = [(g, [p for p in g["params"] if self.state.get(p)]) for g in self.param_groups]
        return [(group, params) for group, params in with_rates if params]


def normalized_updates(
    gradients: list[Tensor], squares: list[Tensor], steps: Sequence[int], beta2: float
) -> list[Tensor]:
    """U = G / sqrt(V), before it is scaled down."""
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    updates = torch._foreach_mul(squares, [1 / (1 - beta2**step) for step in steps])
    torch._foreach_add_(updates, EPSILON)
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, gradients)
    return list(updates)


def update_rates_by_sign(rates: list[Tensor], updates: list[Tensor], signs: list[Tensor], size: float) -> None:
    """The published rule: each rate by itself, up where the sign stays and down where it turns."""
    new = torch._foreach_sign(updates)
    agreement = torch._foreach_mul(new, signs)
    torch._foreach_add_(rates, agreement, alpha=size)
    torch._foreach_copy_(signs, new)


def update_means(
    updates: list[Tensor],
    means: list[Tensor],
    steps: Sequence[int],
    params: Sequence[Parameter],
    beta1: float,
) -> tuple[Tensor, Tensor]:
    """Turn updates into their running mean, without bias; gives <U, M> and <M, M> of the last."""
    last = torch._foreach_mul(means, [1 / max(1 - beta1 ** (t - 1), EPSILON) for t in steps])
    squares, said, length = inner_products(params, [updates, updates], [updates, last], [last, last])
    scales = clip_to_rms(updates, squares, params)
    torch._foreach_lerp_(means, updates, 1 - beta1)
    torch._foreach_copy_(updates, means)
    torch._foreach_mul_(updates, [1 / (1 - beta1**t) for t in steps])
    return (said * scales).sum(), length.sum()


def update_group_rate(rates: list[Tensor], q: Tensor, known: Tensor, share: float) -> None:
    """Our own rule: all rates of a group together, once there was an update to speak of."""
    surprise = (q.clamp(-1, 1) + share * DAMPING / 2) * known
    torch._foreach_mul_(rates, (GAIN * share * surprise).exp())


def clip_to_rms(updates: list[Tensor], squares: Tensor, params: Sequence[Parameter]) -> Tensor:
    """Scale each tensor's update down to a root mean square of `CLIP`; gives by how much."""
    means = torch._foreach_mul(squares.unbind(), [1 / (CLIP**2 * p.numel()) for p in params])
    scales = torch.stack(means).clamp_min(1.0).rsqrt()
    torch._foreach_mul_(updates, scales.unbind())
    return scales


def inner_products(params: Sequence[Parameter], *pairs: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """For each pair of lists, the inner product of each two tensors, over all shards."""
    rows = [
        torch.stack([torch.sum(one * other) for one, other in row])
        for row in zip(*(zip(*pair, strict=True) for pair in pairs), strict=True)
    ]
    return sum_over_shards(params, rows).unbind(1)


# ------------------------------------------------------------------------------------------
# Stochastic rounding: weights in bf16 take steps smaller than their last digit, on average.
#
# A value between two neighbours goes to the nearer one more often, so that the mean is the value.
# bf16 is the upper half of an fp32 number: noise in the lower half, then cutting it off, does that.


LOWER_BITS = 16


def stochastic_round_(target: Tensor, source: Tensor, position: tuple[int, int, int]) -> None:
    """Put fp32 values into a bf16 tensor; `position` (seed, place, step) fixes every draw.

    Draws by position and not by history: resuming needs no state, and ranks that hold copies of a
    weight round them alike. The same code runs on CPU and GPU.
    """
    assert (target.dtype, source.dtype) == (torch.bfloat16, torch.float32), target.dtype
    seed, place, step = position
    generator = torch.Generator(source.device)
    generator.manual_seed((seed * 1_000_003 + place) * 1_000_003 + step & (2**63 - 1))
    noise = torch.randint(
        0,
        1 << LOWER_BITS,
        source.shape,
        generator=generator,
        device=source.device,
        dtype=torch.int32,
    )
    bits = noise.add_(source.contiguous().view(torch.int32)).bitwise_and_(-1 << LOWER_BITS)
    # NaN and infinity are not rounded: noise could turn one into the other.
    target.copy_(torch.where(source.isfinite(), bits.view(torch.float32), source))


# ------------------------------------------------------------------------------------------
# What an optimizer needs to know of sharded parameters: its own part, and sums over all parts.


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory; all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_over_shards(owners: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """One row of sums for each owner, over all of its shards; one exchange for each mesh."""
    whole = list(rows)
    meshes: dict[object, list[int]] = {}
    for index, owner in enumerate(owners):
        if isinstance(owner, DTensor):
            meshes.setdefault((owner.device_mesh, owner.placements), []).append(index)
    for indices in meshes.values():
        owner = owners[indices[0]]
        assert isinstance(owner, DTensor)
        kinds = [Partial() if kind.is_shard() else Replicate() for kind in owner.placements]
        mine = torch.stack([rows[index] for index in indices])
        summed = DTensor.from_local(mine, owner.device_mesh, kinds, run_check=False).full_tensor()
        for index, row in zip(indices, summed.unbind(), strict=True):
            whole[index] = row
    return torch.stack(whole)
