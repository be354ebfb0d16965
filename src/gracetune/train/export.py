"""The result of a run, in the form that others load."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from gracetune.durable import new_folder
from gracetune.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gracetune.train.step import Trainee


def export(t: Trainee, modules: Sequence[str], base_weights: str, folder: Path) -> Path:
    """Write the model or the adapter, with the averaged weights where there are any."""
    adapter = t.run.adapter
    path = folder / ("model" if adapter is None else "adapter")
    try:
        with t.ema.in_place() if t.ema is not None else nullcontext(), new_folder(path) as staging:
            if adapter is None:
                t.family.export(staging)
            else:
                from gracetune.adapters.files import save_lora  # peft takes seconds to import

                about = {"gracetune.family": t.family.name, "gracetune.base_weights": base_weights}
                save_lora(staging, t.family.transformer, adapter, modules, about)
    except OSError as error:
        raise CheckpointError(
            f"the result {path} cannot be written: {error}. The last checkpoint holds the same "
            "weights; make room and start again to export them."
        ) from error
    return path
