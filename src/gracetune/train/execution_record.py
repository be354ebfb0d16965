"""Record how a run computes its steps, and compare it when the run is resumed.

Settings and data decide what a run computes (`run_identity.py`). Device, versions, attention
backend and plan decide only how, but each of them may round differently. A checkpoint stores them.
A resumed run uses the same plan and attention backend again where it can, and one warning names the
rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import diffusers
import torch

from gracetune.models.attention_backends import current_backend
from gracetune.models.family import transformers_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gracetune.models.family import Family
    from gracetune.plan.controller import PlanController

POSITIONAL = "positional"
"""Value of `dropout` if masks depend only on the position in the run. Checkpoints of earlier
versions have no value: their masks came from torch's global generator."""
SPLIT = "split"
"""Value of `batches` if batches are cut into pieces where a ramp starts below one micro-batch for
each rank. Checkpoints of earlier versions have no value: they rounded such steps up."""
OVERFLOWED_KEY = "overflowed"
"""Key of the roles that a run has moved off the device because it was full. Checkpoints of earlier
versions do not have it: their runs are resumed with everything on the device."""
NAMES = {
    "device": "the device",
    "torch": "torch",
    "diffusers": "diffusers",
    "attention": "the attention backend",
}


def execution_record(
    family: Family,
    device: torch.device,
    controller: PlanController | None,
    layout: str = "",
    *,
    positional: bool,
    splits: bool = True,
    overflowed: Sequence[str] = (),
) -> dict[str, object]:
    """Return how steps are computed now, for a checkpoint. Keys are stored: do not rename them."""
    transformer = next(iter(transformers_of(family.transformer).values()))
    return {
        "device": _device_name(device),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "attention": current_backend(transformer),
        "dropout": POSITIONAL if positional else "",
        "batches": SPLIT if splits else "",
        "plan": None if controller is None else controller.record(),
        "layout": layout,
        OVERFLOWED_KEY: list(overflowed),
    }


def execution_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a text for each difference that may change the rounding of a resumed run.

    `saved` is the record in the checkpoint; it is empty if an earlier version wrote the checkpoint.
    """
    if not saved:
        return []
    return [
        *(
            f"{name} was {saved.get(key)} and is now {current[key]}"
            for key, name in NAMES.items()
            if saved.get(key) != current[key]
        ),
        *_plan_changes(saved.get("plan"), current["plan"]),
    ]


def layout_change(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return a text if ranks divide weights or samples in another way than before, else nothing."""
    before, now = (
        record.get("layout", "") or "whole weights and samples on each rank"
        for record in (saved, current)
    )
    if before == now:
        return ""
    return (
        f"the checkpoint was saved with another layout ({before}) than the run has now ({now}); "
        "results differ in rounding only"
    )


def _plan_changes(
    saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None
) -> Iterator[str]:
    before, after = _blocks_in_words(saved), _blocks_in_words(current)
    if before != after:
        yield f"blocks were {before} and are now {after}"
    elif _compiled_modes(saved) != _compiled_modes(current):
        yield "other activations are recomputed in compiled blocks"


def _blocks_in_words(plan: Mapping[str, Any] | None) -> str:
    if plan is None:
        return "computed without a plan"
    return "compiled" if plan["compiled"] else "eager with a plan"


def _compiled_modes(plan: Mapping[str, Any] | None) -> list[str] | None:
    """Return what each compiled block recomputes; None for eager blocks, where it changes nothing.

    A compiled block that is offloaded is compiled like a `lean` one.
    """
    if plan is None or not plan["compiled"]:
        return None
    return [block["activations"].replace("offload", "lean") for block in plan["blocks"]]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # The instruction set and the number of threads decide the order of sums on a CPU.
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} x {torch.get_num_threads()}"
