"""From the optimizer section to an optimizer, with its parameters in named groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from gracetune import registry
from gracetune.config.rules import PARTED_OPTIMIZERS
from gracetune.errors import ConfigError
from gracetune.optim.masters import MasterWeights, stand_ins

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from gracetune.config.schema import OptimizerSection

    Groups = list[dict[str, Any]]

OPTIMIZERS = {
    "adafactor": "gracetune.optim.named:adafactor",
    "adamw": "gracetune.optim.named:adamw",
    "adamw_8bit": "gracetune.optim.named:adamw_8bit",
    "automagic": "gracetune.optim.named:automagic",
    "lion": "gracetune.optim.named:lion",
    "muon": "gracetune.optim.named:muon",
    "prodigy": "gracetune.optim.named:prodigy",
    "schedule_free": "gracetune.optim.named:schedule_free",
}
DEFAULT_LR = {
    "adafactor": 1e-2,
    "automagic": 1.0,
    "lion": 1e-5,
    "prodigy": 1.0,
    "schedule_free": 2.5e-3,
}
"""Where `optimizer.lr` is not given and 1e-4 is not it: the packages' own, and for Lion a tenth of
AdamW's, as its paper says. Automagic has rates of its own, which the schedule only scales."""
FP32_NBYTES = 4
STAGES = ("high", "low")
"""Parameters whose names begin so belong to one of two experts, and get a group of their own."""


class BuildOptimizer(Protocol):
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
    build = cast("BuildOptimizer", registry.load("optimizer", section.name, OPTIMIZERS))
    narrow = any(p.itemsize < FP32_NBYTES for p in parameters.values())
    if narrow and section.name in PARTED_OPTIMIZERS:
        stood_for = stand_ins(parameters.values())
        named = dict(zip(parameters, stood_for, strict=True))
        optimizer: Optimizer = MasterWeights(
            build(groups_of(named, section), section, seed), stood_for
        )
    else:
        optimizer = build(groups_of(parameters, section), section, seed)
    for group in optimizer.param_groups:
        group["initial_lr"] = highest_lr(section)
    return optimizer


def highest_lr(section: OptimizerSection) -> float:
    """What the schedule's share is of."""
    if section.lr is None or section.name == "automagic":
        return DEFAULT_LR.get(section.name, 1e-4)
    return section.lr


def groups_of(parameters: Mapping[str, Parameter], section: OptimizerSection) -> Groups:
    """One group, or one for each expert that is trained."""
    by_stage: dict[str, list[tuple[str, Parameter]]] = {}
    for name, parameter in parameters.items():
        head = name.partition(".")[0]
        by_stage.setdefault(head if head in STAGES else "", []).append((name, parameter))
    if not by_stage.keys() & set(STAGES):
        _refuse_stage_settings(section)
    lr = highest_lr(section)
    return [{"params": pairs, "stage": stage, "lr": lr} for stage, pairs in by_stage.items()]


def _refuse_stage_settings(section: OptimizerSection) -> None:
    for stage in STAGES:
        for key in ("lr_bump", "min_lr", "max_lr"):
            value = section.model_dump()[f"{stage}_noise_{key}"]
            if value is not None:
                raise ConfigError(
                    f"optimizer.{stage}_noise_{key} is {value:g}, but the model has one "
                    f"transformer for all noise levels. Call it optimizer.{key}."
                )
