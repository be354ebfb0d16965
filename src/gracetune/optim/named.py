"""Every optimizer that a run file can name, each from torch or from its authors' own package.

What is not installed is refused with the command that installs it.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch

from gracetune.errors import ConfigError
from gracetune.optim.automagic import Automagic
from gracetune.optim.together import MultiOptimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from gracetune.config.schema import OptimizerSection
    from gracetune.optim.build import Groups


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
    _demand_one_group(groups, "prodigy", "finds one scale for all parameters")
    with redirect_stdout(StringIO()):  # it prints that weight decay is decoupled
        return _made(package.Prodigy(groups, **_adam(section), safeguard_warmup=True))


def schedule_free(groups: Groups, section: OptimizerSection, _: int) -> Optimizer:
    """AdamW whose average needs no schedule (Defazio et al. 2024)."""
    package = _package("schedulefree", "schedule_free", "schedulefree")
    _demand_one_group(groups, "schedule_free", "counts the steps of all parameters together")
    if section.schedule != "constant":
        raise ConfigError(
            f"optimizer.schedule is {section.schedule!r}, but schedule_free averages instead of "
            "lowering the rate. Remove optimizer.schedule."
        )
    optimizer = package.AdamWScheduleFree(groups, **_adam(section))
    optimizer.train()
    return _made(optimizer)


def _demand_one_group(groups: Groups, name: str, why: str) -> None:
    if len(groups) > 1:
        raise ConfigError(
            f"optimizer.name is {name}, which {why}, but two experts are trained in turns. Train "
            "them one after the other (train.experts: high, then low), or set another optimizer."
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
