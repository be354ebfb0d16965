"""Automagic: every element has a learning rate of its own, moved by whether gradients agree.

For a gradient G, of which V is the running mean of squares without bias,

    U = G / sqrt(V),  scaled down to a root mean square of `CLIP` over its tensor
    a = +1 where the sign is that of the step before, -1 where it is not, 0 where one is zero
    L = clamp(move(L, a), min_lr, max_lr)
    W = W - lr (L U + weight_decay L W)

`lr` is the schedule's share. With `lr_bump` the move is the published one, L + lr_bump a. Without,
nobody has said how large a rate is, and the group finds out:

    L = L exp(GAIN (mean(a) - expected)),   expected = 2/pi asin(-lr DAMPING / 2)

Near a minimum of curvature h, noise makes gradients of successive steps correlate by -h L / 2, and
signs agree by 2/pi asin of that (Pflug 1990 for the idea). While there is a way to go they agree
more, and the rate rises; where it is too high they agree less, and it falls. The rate settles where
h L is `DAMPING`. One tensor's rate disturbs another's signs, so the mean is over the whole group.

Rates are fp32 and never rounded to a grid. State starts with no sign, so that the first gradient
moves no rate. All of it is element by element, so shards keep their own; three sums for each tensor
are the only thing that ranks exchange. Nothing in a step waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from gracetune.errors import ConfigError
from gracetune.optim.rounding import round_into

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
GAIN = 0.5
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
        beta2: float = 0.999,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": 1.0,
            "start_lr": start_lr,
            "lr_bump": lr_bump,
            "min_lr": min_lr,
            "max_lr": max_lr,
            "beta2": beta2,
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
        rates, squares, signs = (
            [local(state[key]) for state in states] for key in ("rate", "square", "sign")
        )
        weights = [local(p) for p in params]
        steps = [int(state["step"]) for state in states]  # counted on the CPU

        gradients = [local(p.grad).float() for p in params]
        updates = normalised(gradients, squares, group["beta2"], steps)
        new_signs = torch._foreach_sign(gradients)
        agreement = list(torch._foreach_mul(new_signs, signs))
        torch._foreach_copy_(signs, new_signs)
        square_sums, agreed, counted = whole_sums(params, updates, agreement)

        move(rates, agreement, agreed.sum(), counted.sum(), group)
        scale_down(updates, square_sums, [p.numel() for p in params])

        masters = [weight.float() for weight in weights]  # themselves, where they are fp32
        if group["weight_decay"]:
            torch._foreach_add_(updates, masters, alpha=group["weight_decay"])
        torch._foreach_mul_(updates, rates)
        torch._foreach_add_(masters, updates, alpha=-group["lr"])
        for place, step, weight, master in zip(places, steps, weights, masters, strict=True):
            if weight is not master:
                round_into(weight, master, (self._seed, first + place, step))

    def _state_of(self, p: Parameter, group: Group) -> dict[str, Tensor]:
        """The state, made at the first gradient, and one step further."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["rate"] = torch.full_like(p, group["start_lr"], dtype=torch.float32)
            state["square"] = torch.zeros_like(p, dtype=torch.float32)
            state["sign"] = torch.zeros_like(p, dtype=torch.int8)
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
    def mean_rate(self) -> Tensor:
        """The mean of what the last step used; stays on the device."""
        totals, num_elements = [], 0
        for group, params in self._stepped():
            sums = [local(self.state[p]["rate"]).sum() for p in params]
            totals.append(over_shards(params, [s.unsqueeze(0) for s in sums]).sum() * group["lr"])
            num_elements += sum(p.numel() for p in params)
        return torch.stack(totals).sum() / max(1, num_elements) if totals else torch.zeros(())

    @torch.no_grad()
    def rate_counts(self, low: float, high: float, num_bins: int) -> dict[str, Tensor]:
        """By stage: how many rates lie in each of the bins, equal in log10, from low to high."""
        found: dict[str, Tensor] = {}
        for group, params in self._stepped():
            counts = [
                torch.histc(
                    local(self.state[p]["rate"]).log10().clamp(low, high), num_bins, low, high
                )
                for p in params
            ]
            found[group.get("stage", "")] = over_shards(params, counts).sum(0)
        return found

    def _stepped(self) -> list[tuple[Group, list[Parameter]]]:
        """Each group that has been stepped, with those of its parameters that have a rate."""
        with_rates = [(g, [p for p in g["params"] if self.state.get(p)]) for g in self.param_groups]
        return [(group, params) for group, params in with_rates if params]


def normalised(
    gradients: list[Tensor], squares: list[Tensor], beta2: float, steps: Sequence[int]
) -> list[Tensor]:
    """U = G / sqrt(V), with V as if it had always known the gradients it has seen."""
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    updates = torch._foreach_mul(squares, [1 / (1 - beta2**step) for step in steps])
    torch._foreach_add_(updates, EPSILON)
    torch._foreach_rsqrt_(updates)
    torch._foreach_mul_(updates, gradients)
    return list(updates)


def move(
    rates: list[Tensor], agreement: list[Tensor], agreed: Tensor, counted: Tensor, group: Group
) -> None:
    """L = clamp(...): by the bump, or by what the whole group says of its scale."""
    if group["lr_bump"] is not None:
        torch._foreach_add_(rates, agreement, alpha=group["lr_bump"])
    else:
        expected = 2 / math.pi * math.asin(-group["lr"] * DAMPING / 2)
        surprise = agreed / counted.clamp_min(1) - expected
        torch._foreach_mul_(rates, (GAIN * surprise * (counted > 0)).exp())
    torch._foreach_clamp_min_(rates, group["min_lr"])
    torch._foreach_clamp_max_(rates, group["max_lr"])


def scale_down(updates: list[Tensor], square_sums: Tensor, numels: Sequence[int]) -> None:
    """Updates with a root mean square over `CLIP` are scaled to it, each tensor by itself."""
    scales = torch._foreach_mul(list(square_sums.unbind()), [1 / (CLIP**2 * n) for n in numels])
    torch._foreach_clamp_min_(scales, 1.0)
    torch._foreach_rsqrt_(scales)
    torch._foreach_mul_(updates, list(scales))


def whole_sums(
    params: Sequence[Parameter], updates: list[Tensor], agreement: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """For each parameter: the sum of squares, of agreement, and how many could agree."""
    columns = zip(
        torch._foreach_pow(torch._foreach_norm(updates), 2),
        [a.sum() for a in agreement],
        torch._foreach_norm(agreement, 1),
        strict=True,
    )
    sums = over_shards(params, [torch.stack(column) for column in columns])
    square_sums, agreed, counted = sums.unbind(1)
    return square_sums, agreed, counted


def over_shards(params: Sequence[Parameter], values: Sequence[Tensor]) -> Tensor:
    """One row of sums for each parameter, over all of its shards; one exchange for each mesh."""
    rows = list(values)
    meshes: dict[object, list[int]] = {}
    for index, p in enumerate(params):
        if isinstance(p, DTensor):
            meshes.setdefault((p.device_mesh, p.placements), []).append(index)
    for indices in meshes.values():
        p = params[indices[0]]
        assert isinstance(p, DTensor)
        kinds = [Partial() if kind.is_shard() else Replicate() for kind in p.placements]
        mine = torch.stack([rows[index] for index in indices])
        summed = DTensor.from_local(mine, p.device_mesh, kinds, run_check=False).full_tensor()
        for index, row in zip(indices, summed.unbind(), strict=True):
            rows[index] = row
    return torch.stack(rows)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory; all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
