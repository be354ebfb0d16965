"""List the optimizers a run file can name, with what each of them can do.

This module does not import torch, so that `config` can check a run file without it. An optimizer is
added by one entry here and one builder function (see `optim/build.py`). Other packages add theirs
with an entry point of the group `gracetune.optimizer`; nothing is known about those in advance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_LR = 1e-4
_UNUSED = "has no effect: {} does not use it."


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """The builder of one optimizer and its capabilities."""

    builder: str
    """Function that builds it, as `module:function`. See `optim.build.BuildOptimizer`."""
    whole_state_reason: str = ""
    """The reason why its state cannot be split by parameter. Empty if it can be split."""
    default_lr: float = DEFAULT_LR
    """Peak learning rate where `optimizer.lr` is not set."""
    manages_lr: bool = False
    """True if it chooses its own learning rates. The schedule then only scales them."""
    settings: tuple[str, ...] = ()
    """Keys of the optimizer section that only this optimizer has."""
    setting_notes: Mapping[str, str] = field(default_factory=dict)
    """Common keys that it ignores or uses only in part -> what to tell a user who sets one."""

    @property
    def state_can_be_split(self) -> bool:
        """True if each parameter is updated on its own, without looking at the others.

        Then the state can live in host memory and visit the device piece by piece, and weights in
        bf16 can be trained with fp32 master weights.
        """
        return not self.whole_state_reason


def optimizer_info(name: str) -> OptimizerInfo:
    """Return the capabilities of an optimizer; of one from another package, the safe defaults."""
    return OPTIMIZERS.get(name) or OptimizerInfo(
        builder="",
        whole_state_reason="comes from another package and may need all parameters at once",
    )


OPTIMIZERS: Mapping[str, OptimizerInfo] = {
    "adafactor": OptimizerInfo(
        "gracetune.optim.build:adafactor",
        default_lr=1e-2,
        setting_notes=dict.fromkeys(("betas", "eps"), _UNUSED.format("adafactor")),
    ),
    "adamw": OptimizerInfo("gracetune.optim.build:adamw"),
    "adamw_8bit": OptimizerInfo(
        "gracetune.optim.build:adamw_8bit",
        whole_state_reason="stores its state in 8-bit blocks of its own format",
    ),
    "automagic": OptimizerInfo(
        "gracetune.optim.build:automagic",
        whole_state_reason="compares the learning rates and updates of all parameters",
        default_lr=1.0,
        manages_lr=True,
        settings=tuple(
            f"{expert}{key}"
            for expert in ("", "high_noise_", "low_noise_")
            for key in ("lr_bump", "min_lr", "max_lr")
        ),
        setting_notes={"eps": _UNUSED.format("automagic")},
    ),
    "lion": OptimizerInfo(
        "gracetune.optim.build:lion",
        default_lr=1e-5,  # a tenth of AdamW's, as its paper recommends
        setting_notes={"eps": _UNUSED.format("lion")},
    ),
    "muon": OptimizerInfo(
        "gracetune.optim.build:muon",
        setting_notes=dict.fromkeys(
            ("betas", "eps"),
            "affects only parameters that are not matrices, which muon leaves to AdamW. "
            "Most adapters have none.",
        ),
    ),
    "prodigy": OptimizerInfo(
        "gracetune.optim.build:prodigy",
        whole_state_reason="estimates one step size for all parameters",
        default_lr=1.0,
    ),
    "schedule_free": OptimizerInfo(
        "gracetune.optim.build:schedule_free",
        whole_state_reason="counts the steps of all parameters together",
        default_lr=2.5e-3,
    ),
}
