"""Build the optimizer that a run file names, with the parameters divided into groups.

The registry (`optim/registry.py`) maps each name to a builder function in this module. Most
optimizers come from torch or from their authors' packages; if a package is missing, the error shows
the command that installs it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gracetune import entry_points
from gracetune.errors import ConfigError, MissingPackageError
from gracetune.optim.automagic import Automagic
from gracetune.optim.master_weights import MasterWeights, fp32_placeholders
from gracetune.optim.registry import OPTIMIZERS, optimizer_info

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Parameter

    from gracetune.config.schema import OptimizerSection
    from gracetune.optim.automagic import Shards

    Groups = list[dict[str, Any]]


FP32_NBYTES = 4
STAGES = ("high", "low")
"""First parts of parameter names in a model with a high-noise and a low-noise transformer. Each
transformer has its own parameter group."""
PROBE_EDGE = 256
"""Rows and columns of the matrix on which the size of the optimizer's state is measured. Optimizers
that factorize their state need less per element for larger matrices."""


class OptimizerBuilder(Protocol):
    """Type of a function that builds an optimizer.

    Other packages register such functions as entry points of the group `gracetune.optimizer`. Each
    parameter group has `params`, a list of (name, parameter); `stage`, which is `high` or `low` for
    the high-noise or low-noise transformer, or empty; and `lr`, the peak learning rate.
    """

    def __call__(self, groups: Groups, section: OptimizerSection, seed: int) -> Optimizer: ...


def build_optimizer(
    parameters: Mapping[str, Parameter],
    section: OptimizerSection,
    seed: int = 0,
    shards: Shards | None = None,
) -> Optimizer:
    """Build the optimizer of a run file; `seed` is for optimizers that draw random numbers.

    `shards` describes parameters that are parts of tensors of several ranks.

    If parameters have less precision than fp32, the optimizer gets fp32 master weights, provided
    that its state can be split by parameter. Automagic uses stochastic rounding instead.
    """
    builders = {name: info.builder for name, info in OPTIMIZERS.items()}
    build = cast("OptimizerBuilder", entry_points.load("optimizer", section.name, builders))
    narrow = any(p.itemsize < FP32_NBYTES for p in parameters.values())
    if narrow and optimizer_info(section.name).state_can_be_split:
        parameter_of = fp32_placeholders(parameters.values())
        placeholders = dict(zip(parameters, parameter_of, strict=True))
        optimizer: Optimizer = MasterWeights(
            build(parameter_groups(placeholders, section), section, seed), parameter_of
        )
    else:
        optimizer = build(parameter_groups(parameters, section), section, seed)
    if isinstance(optimizer, Automagic):
        optimizer.shards = shards
    for group in optimizer.param_groups:
        group["initial_lr"] = peak_lr(section)
    return optimizer


def peak_lr(section: OptimizerSection) -> float:
    """Return the peak learning rate, which the schedule multiplies by a factor in each step.

    It is `optimizer.lr` or the optimizer's default. For an optimizer that chooses its own learning
    rates it is always the default.
    """
    info = optimizer_info(section.name)
    return info.default_lr if section.lr is None or info.manages_lr else section.lr


def parameter_groups(parameters: Mapping[str, Parameter], section: OptimizerSection) -> Groups:
    """Return the parameter groups: one for each transformer that is trained.

    A model such as Wan 2.2 has two transformers, one for high and one for low noise.
    """
    by_stage: dict[str, list[tuple[str, Parameter]]] = {}
    for name, parameter in parameters.items():
        head = name.partition(".")[0]
        by_stage.setdefault(head if head in STAGES else "", []).append((name, parameter))
    if not by_stage.keys() & set(STAGES):
        _check_no_expert_settings(section)
    lr = peak_lr(section)
    return [{"params": pairs, "stage": stage, "lr": lr} for stage, pairs in by_stage.items()]


def state_nbytes_per_element_of(section: OptimizerSection, parameters: Sequence[Tensor]) -> float:
    """Return the bytes of optimizer state per element, for the parameters' most common dtype."""
    numel_by_dtype: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        numel_by_dtype[parameter.dtype] += parameter.numel()
    return state_nbytes_per_element(section, numel_by_dtype.most_common(1)[0][0])


def state_nbytes_per_element(
    section: OptimizerSection, dtype: torch.dtype = torch.float32
) -> float:
    """Measure the bytes of optimizer state per parameter element, by a step on a small matrix."""
    probe = nn.Parameter(torch.zeros(PROBE_EDGE, PROBE_EDGE, dtype=dtype))
    optimizer = build_optimizer({f"{_configured_stage(section)}.probe": probe}, section)
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    state_nbytes = [
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(state_nbytes) / probe.numel()


def _check_no_expert_settings(section: OptimizerSection) -> None:
    for stage in STAGES:
        for key in ("lr_bump", "min_lr", "max_lr"):
            value = section.model_dump()[f"{stage}_noise_{key}"]
            if value is not None:
                raise ConfigError(
                    f"optimizer.{stage}_noise_{key} is {value:g}, but the model has one "
                    f"transformer for all noise levels. Set optimizer.{key} instead."
                )


def _configured_stage(section: OptimizerSection) -> str:
    """Return the transformer (`high` or `low` noise) that has its own optimizer settings.

    If there is none, the result is another name. The parameter on which the size of the state is
    measured gets this name, because such settings are an error for a model with one transformer.
    """
    given = section.model_dump(exclude_none=True)
    stages = [stage for stage in STAGES if any(key.startswith(f"{stage}_noise") for key in given)]
    return stages[0] if stages else "one"


# Builders, in alphabetical order


def adafactor(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Build Adafactor (Shazeer and Stern 2018).

    Second moments are stored by row and column. A step is scaled by the size of the weights and by
    at most 1 / sqrt(step).
    """
    return torch.optim.Adafactor(groups, weight_decay=section.weight_decay)


def adamw(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Build AdamW (Loshchilov and Hutter 2017), with one fused kernel for all parameters."""
    return torch.optim.AdamW(groups, **_adam_settings(section), fused=True)


def adamw_8bit(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Build AdamW with block-wise 8-bit moments (Dettmers et al. 2022)."""
    package = _import_package("bitsandbytes.optim", "adamw_8bit", "bitsandbytes")
    return _as_optimizer(package.AdamW8bit(groups, **_adam_settings(section)))


def automagic(groups: Groups, section: OptimizerSection, seed: int) -> Optimizer:
    """Build Automagic, with separate settings for the high-noise and low-noise transformers.

    `lr_bump`, `min_lr` and `max_lr` can be set for one transformer or for both.
    """
    settings = section.model_dump()
    for group in groups:
        group["start_lr"] = section.lr
        for key in ("lr_bump", "min_lr", "max_lr"):
            of_expert = settings[f"{group['stage']}_noise_{key}"] if group["stage"] else None
            group[key] = settings[key] if of_expert is None else of_expert
    return Automagic(groups, betas=section.betas, weight_decay=section.weight_decay, seed=seed)


def lion(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Build Lion (Chen et al. 2023), whose updates are the sign of a momentum."""
    package = _import_package("lion_pytorch", "lion", "lion-pytorch")
    optimizer = package.Lion(groups, betas=section.betas, weight_decay=section.weight_decay)
    return _as_optimizer(optimizer)


def muon(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Build Muon (Jordan et al. 2024), with updates as large as AdamW's at the same learning rate.

    Muon orthogonalizes the updates of matrices. AdamW trains all other parameters, with the same
    learning rate.
    """
    matrices = _filter_groups(groups, lambda p: p.ndim == 2)
    others = _filter_groups(groups, lambda p: p.ndim != 2)
    parts: list[Optimizer] = []
    if matrices:
        parts.append(
            torch.optim.Muon(
                matrices, weight_decay=section.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    if others:
        parts.append(torch.optim.AdamW(others, **_adam_settings(section), fused=True))
    return parts[0] if len(parts) == 1 else MultiOptimizer(parts)


def prodigy(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Build Prodigy (Mishchenko and Defazio 2023): Adam with an estimated step size.

    The learning rate is a factor of the estimate.
    """
    package = _import_package("prodigyopt", "prodigy", "prodigyopt")
    _check_one_group(groups, "prodigy")
    with redirect_stdout(StringIO()):  # it prints that weight decay is decoupled
        return _as_optimizer(
            package.Prodigy(groups, **_adam_settings(section), safeguard_warmup=True)
        )


def schedule_free(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """Build schedule-free AdamW (Defazio et al. 2024).

    It averages weights instead of lowering the learning rate.
    """
    package = _import_package("schedulefree", "schedule_free", "schedulefree")
    _check_one_group(groups, "schedule_free")
    if section.schedule != "constant":
        raise ConfigError(
            f"optimizer.schedule is {section.schedule!r}, but schedule_free averages weights "
            "instead of lowering the learning rate. Remove optimizer.schedule."
        )
    optimizer = package.AdamWScheduleFree(groups, **_adam_settings(section))
    optimizer.train()
    return _as_optimizer(optimizer)


def _check_one_group(groups: Groups, name: str) -> None:
    if len(groups) > 1:
        raise ConfigError(
            f"optimizer.name is {name}, which {OPTIMIZERS[name].whole_state_reason}, but two "
            "experts are trained in turns. Train them one after the other (train.experts: high, "
            "then low), or set another optimizer."
        )


def _adam_settings(section: OptimizerSection) -> dict[str, Any]:
    return {"betas": section.betas, "eps": section.eps, "weight_decay": section.weight_decay}


def _filter_groups(groups: Groups, is_included: Callable[[Parameter], bool]) -> Groups:
    """Return the groups with only the parameters for which `is_included` is true.

    Groups without such parameters are left out.
    """
    filtered = [
        {**group, "params": [pair for pair in group["params"] if is_included(pair[1])]}
        for group in groups
    ]
    return [group for group in filtered if group["params"]]


def _import_package(module: str, name: str, distribution: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"optimizer.name is {name}, which needs {distribution}: {error}. "
            "Run: pip install 'gracetune[optimizers]', or set optimizer.name: adamw."
        ) from error


def _as_optimizer(optimizer: Any) -> Optimizer:
    """Assert that an object from a package without type annotations is an `Optimizer`."""
    assert isinstance(optimizer, torch.optim.Optimizer), type(optimizer)
    return optimizer


class MultiOptimizer(Optimizer):
    """Combines several optimizers, each for other parameters, into one.

    The combined optimizers use the parameter groups and the state of this object.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_groups_and_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every one of the combined optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and let the combined optimizers use the new groups and state."""
        super().load_state_dict(state_dict)
        self._share_groups_and_state()

    def _share_groups_and_state(self) -> None:
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end
