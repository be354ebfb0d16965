"""From the optimizer section to an optimizer, with its parameters in named groups."""

from __future__ import annotations

from collections import Counter
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gracetune import registry
from gracetune.errors import ConfigError
from gracetune.optim.automagic import Automagic
from gracetune.optim.master_weights import MasterWeights, fp32_placeholders
from gracetune.optim.registry import OPTIMIZERS, optimizer_info

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Parameter

    from gracetune.config.schema import OptimizerSection

    Groups = list[dict[str, Any]]
    from collections.abc import Callable, Sequence


FP32_NBYTES = 4
STAGES = ("high", "low")
"""Parameters whose names begin so belong to one of two experts, and get a group of their own."""


class OptimizerBuilder(Protocol):
    """How an optimizer is made; outsiders register one as an entry point `gracetune.optimizer`.

    Each group has `params`, pairs of name and parameter; `stage`, which is `high`, `low` or empty;
    and `lr`, the highest rate.
    """

    def __call__(self, groups: Groups, section: OptimizerSection, seed: int) -> Optimizer: ...


def build_optimizer(
    parameters: Mapping[str, Parameter], section: OptimizerSection, seed: int = 0
) -> Optimizer:
    """The optimizer that the run file names; `seed` is for what it draws, if anything.

    Parameters narrower than fp32 get masters; Automagic rounds such weights in its own way.
    """
    builders = {name: info.builder for name, info in OPTIMIZERS.items()}
    build = cast("OptimizerBuilder", registry.load("optimizer", section.name, builders))
    narrow = any(p.itemsize < FP32_NBYTES for p in parameters.values())
    if narrow and optimizer_info(section.name).state_can_be_split:
        stood_for = fp32_placeholders(parameters.values())
        named = dict(zip(parameters, stood_for, strict=True))
        optimizer: Optimizer = MasterWeights(
            build(parameter_groups(named, section), section, seed), stood_for
        )
    else:
        optimizer = build(parameter_groups(parameters, section), section, seed)
    for group in optimizer.param_groups:
        group["initial_lr"] = peak_lr(section)
    return optimizer


def peak_lr(section: OptimizerSection) -> float:
    """What the schedule's share is of."""
    info = optimizer_info(section.name)
    return info.default_lr if section.lr is None or info.manages_lr else section.lr


def parameter_groups(parameters: Mapping[str, Parameter], section: OptimizerSection) -> Groups:
    """One group, or one for each expert that is trained."""
    by_stage: dict[str, list[tuple[str, Parameter]]] = {}
    for name, parameter in parameters.items():
        head = name.partition(".")[0]
        by_stage.setdefault(head if head in STAGES else "", []).append((name, parameter))
    if not by_stage.keys() & set(STAGES):
        _refuse_stage_settings(section)
    lr = peak_lr(section)
    return [{"params": pairs, "stage": stage, "lr": lr} for stage, pairs in by_stage.items()]


def _refuse_stage_settings(section: OptimizerSection) -> None:
    for stage in STAGES:
        for key in ("lr_bump", "min_lr", "max_lr"):
            value = section.model_dump()[f"{stage}_noise_{key}"]
            if value is not None:
                raise ConfigError(
                    f"optimizer.{stage}_noise_{key} is {value:g}, but the model has one "
                    f"transformer for all noise levels. Set optimizer.{key} instead."
                )


# ------------------------------------------------------------------------------------------
# Every optimizer that a run file can name, each from torch or from its authors' own package.
#
# What is not installed is refused with the command that installs it.


def adamw(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Loshchilov and Hutter's, one kernel for all parameters."""
    return torch.optim.AdamW(groups, **_adam(section), fused=True)


def adamw_8bit(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """AdamW with moments in 8 bits, by blocks (Dettmers et al. 2022)."""
    package = _package("bitsandbytes.optim", "adamw_8bit", "bitsandbytes")
    return _made(package.AdamW8bit(groups, **_adam(section)))


def adafactor(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Second moments by rows and columns; the rate is at most 1/sqrt(step) (Shazeer and Stern)."""
    return torch.optim.Adafactor(groups, weight_decay=section.weight_decay)


def lion(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """The sign of a momentum (Chen et al. 2023); rates a tenth of AdamW's."""
    package = _package("lion_pytorch", "lion", "lion-pytorch")
    optimizer = package.Lion(groups, betas=section.betas, weight_decay=section.weight_decay)
    return _made(optimizer)


def muon(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Orthogonal updates for matrices (Jordan et al. 2024), scaled so that AdamW's rates fit.

    Whatever is no matrix is AdamW's, with the same rate.
    """
    matrices = _only(groups, lambda p: p.ndim == 2)
    others = _only(groups, lambda p: p.ndim != 2)
    parts: list[Optimizer] = []
    if matrices:
        parts.append(
            torch.optim.Muon(
                matrices, weight_decay=section.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    if others:
        parts.append(torch.optim.AdamW(others, **_adam(section), fused=True))
    return parts[0] if len(parts) == 1 else MultiOptimizer(parts)


def prodigy(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Adam that estimates how far it has to go (Mishchenko and Defazio 2023); `lr` is a factor."""
    package = _package("prodigyopt", "prodigy", "prodigyopt")
    _check_one_group(groups, "prodigy")
    with redirect_stdout(StringIO()):  # it prints that weight decay is decoupled
        return _made(package.Prodigy(groups, **_adam(section), safeguard_warmup=True))


def schedule_free(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """AdamW whose average needs no schedule (Defazio et al. 2024)."""
    package = _package("schedulefree", "schedule_free", "schedulefree")
    _check_one_group(groups, "schedule_free")
    if section.schedule != "constant":
        raise ConfigError(
            f"optimizer.schedule is {section.schedule!r}, but schedule_free averages instead of "
            "lowering the rate. Remove optimizer.schedule."
        )
    optimizer = package.AdamWScheduleFree(groups, **_adam(section))
    optimizer.train()
    return _made(optimizer)


def _check_one_group(groups: Groups, name: str) -> None:
    if len(groups) > 1:
        raise ConfigError(
            f"optimizer.name is {name}, which {OPTIMIZERS[name].whole_state_reason}, but two "
            "experts are trained in turns. Train them one after the other (train.experts: high, "
            "then low), or set another optimizer."
        )


def automagic(groups: Groups, section: OptimizerSection, seed: int) -> Optimizer:
    """Ours; each expert has its own bounds, and what is not given for it is everyone's."""
    settings = section.model_dump()
    for group in groups:
        group["start_lr"] = section.lr
        for key in ("lr_bump", "min_lr", "max_lr"):
            own = settings[f"{group['stage']}_noise_{key}"] if group["stage"] else None
            group[key] = settings[key] if own is None else own
    return Automagic(groups, betas=section.betas, weight_decay=section.weight_decay, seed=seed)


def _adam(section: OptimizerSection) -> dict[str, Any]:
    return {"betas": section.betas, "eps": section.eps, "weight_decay": section.weight_decay}


def _only(groups: Groups, wanted: Any) -> Groups:
    """The groups with some of their parameters; none that would be empty."""
    kept = [{**g, "params": [pair for pair in g["params"] if wanted(pair[1])]} for g in groups]
    return [group for group in kept if group["params"]]


def _package(module: str, name: str, distribution: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"optimizer.name is {name}, which needs {distribution}: {error}. "
            "Run: pip install 'gracetune[optimizers]', or set optimizer.name: adamw."
        ) from error


def _made(optimizer: Any) -> Optimizer:
    """Packages without types give something; it must be what they promise."""
    assert isinstance(optimizer, torch.optim.Optimizer), type(optimizer)
    return optimizer


# ------------------------------------------------------------------------------------------
# Several optimizers, each with parameters of its own, as one.


class MultiOptimizer(Optimizer):
    """Steps its parts one after the other; groups and state are the parts' own."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Every part's step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch makes new groups and a new state; the parts are given them."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            first = last


# ------------------------------------------------------------------------------------------
# What an optimizer keeps of each number that it updates.


PROBE_EDGE = 256
"""Edge of the matrix that an optimizer is tried on: factored ones keep less of larger ones."""


def state_nbytes_per_element_of(section: OptimizerSection, parameters: Sequence[Tensor]) -> float:
    """Bytes of state for each number of parameters that are mostly of one type."""
    numels: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        numels[parameter.dtype] += parameter.numel()
    return state_nbytes_per_element(section, numels.most_common(1)[0][0])


def state_nbytes_per_element(section: OptimizerSection, dtype: torch.dtype = torch.float32) -> float:
    """Bytes of state for each number of this type, found by one step on a small matrix."""
    probe = nn.Parameter(torch.zeros(PROBE_EDGE, PROBE_EDGE, dtype=dtype))
    optimizer = build_optimizer({f"{_stage(section)}.probe": probe}, section)
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    kept = [
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(kept) / probe.numel()


def _stage(section: OptimizerSection) -> str:
    """Settings of one expert are refused where there are no experts."""
    named = section.model_dump(exclude_none=True)
    stages = [stage for stage in STAGES if any(key.startswith(f"{stage}_noise") for key in named)]
    return stages[0] if stages else "one"
