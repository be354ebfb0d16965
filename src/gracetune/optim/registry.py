"""List the optimizers that a run file can name, with the capabilities of each.

This module does not import torch, so that `config` can check a run file without it. A new optimizer
needs one entry here and one builder function (see `optim/build.py`). Other packages add optimizers
with an entry point of the group `gracetune.optimizer`; their capabilities are not known.
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
    """The function that builds one optimizer, and what the optimizer can do."""

    builder: str
    """Function that builds the optimizer, as `module:function`. Its type is
    `optim.build.OptimizerBuilder`."""
    whole_state_reason: str = ""
    """The reason why the optimizer cannot update some parameters without the state of the others;
    empty if it can."""
    whole_tensor_reason: str = ""
    """The reason why the optimizer cannot update some rows of a tensor without the others; empty if
    it can, as FSDP2 requires."""
    package_state_nbytes: float = 0.0
    """Bytes of state per fp32 parameter element of an optimizer from an optional package, so that
    runs can be planned without the package; 0 if no package is needed."""
    default_lr: float = DEFAULT_LR
    """Peak learning rate if `optimizer.lr` is not set."""
    manages_lr: bool = False
    """True if the optimizer chooses its own learning rates, which the schedule only scales."""
    averages_weights: bool = False
    """True if the optimizer averages the weights itself, for validation and for the result."""
    settings: tuple[str, ...] = ()
    """Keys of the run file's optimizer section that only this optimizer uses."""
    setting_notes: Mapping[str, str] = field(default_factory=dict)
    """Messages for users who set a key that this optimizer ignores or uses only in part, by key."""

    @property
    def state_can_be_split(self) -> bool:
        """True if the update of a parameter does not depend on other parameters.

        Then the state can stay in host memory and be copied to the device piece by piece, and bf16
        weights can be trained with fp32 master weights.
        """
        return not self.whole_state_reason


SCHEDULE_DEPENDS_ON_LENGTH = {"constant": False, "linear": True, "cosine": True}
"""True for schedules whose learning rate at a given step depends on the total number of steps."""


def optimizer_info(name: str) -> OptimizerInfo:
    """Return what is known about an optimizer, by its name in a run file.

    An optimizer from another package is assumed to need the state of all parameters at once.
    """
    return OPTIMIZERS.get(name) or OptimizerInfo(
        builder="",
        whole_state_reason="comes from another package and may need all parameters at once",
        whole_tensor_reason="comes from another package and may need whole tensors",
        averages_weights=True,  # perhaps
    )


OPTIMIZERS: Mapping[str, OptimizerInfo] = {
    "adafactor": OptimizerInfo(
        "gracetune.optim.build:adafactor",
        whole_tensor_reason="stores the second moments of whole rows and columns",
        default_lr=1e-2,
        setting_notes=dict.fromkeys(("betas", "eps"), _UNUSED.format("adafactor")),
    ),
    "adamw": OptimizerInfo("gracetune.optim.build:adamw"),
    "adamw_8bit": OptimizerInfo(
        "gracetune.optim.build:adamw_8bit",
        whole_state_reason="stores its state in 8-bit blocks of its own format",
        whole_tensor_reason="stores its state in blocks, which other ranks could not resume from",
        package_state_nbytes=2 + 2 * 4 / 256,  # two moments, with an fp32 scale for 256 elements
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
        package_state_nbytes=4.0,
        default_lr=1e-5,  # a tenth of AdamW's, as its paper recommends
        setting_notes={"eps": _UNUSED.format("lion")},
    ),
    "muon": OptimizerInfo(
        "gracetune.optim.build:muon",
        whole_tensor_reason="orthogonalizes whole matrices",
        setting_notes=dict.fromkeys(
            ("betas", "eps"),
            "affects only parameters that are not matrices, which muon leaves to AdamW. "
            "Most adapters have none.",
        ),
    ),
    "prodigy": OptimizerInfo(
        "gracetune.optim.build:prodigy",
        whole_state_reason="estimates one step size for all parameters",
        whole_tensor_reason="estimates one step size for all parameters",
        package_state_nbytes=12.0,
        default_lr=1.0,
    ),
    "schedule_free": OptimizerInfo(
        "gracetune.optim.build:schedule_free",
        averages_weights=True,
        whole_state_reason="counts the steps of all parameters together",
        package_state_nbytes=8.0,
        default_lr=2.5e-3,
    ),
}
