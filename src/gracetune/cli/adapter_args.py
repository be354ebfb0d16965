"""What the actions of `gracetune adapter` have in common: reading, headers, printing."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from gracetune.errors import AdapterError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from gracetune.adapters.files import AdapterMetadata
    from gracetune.adapters.layers import Adapter
    from gracetune.adapters.lowrank import Cut
    from gracetune.adapters.tables.forms import KeyFormat
    from gracetune.adapters.tables.types import NameTable, Stage

SEED = 0
"""Of the random range finder in large SVDs: the same file gives the same result."""


def read(path: Path, args: argparse.Namespace) -> tuple[Adapter, Stage | None]:
    """An adapter and the stage it is for; the user's word counts most."""
    from gracetune.adapters.files import read_adapter, resolve, stage_of

    path = resolve(path)
    adapter = read_adapter(path, table_of(args))
    if args.stage is not None and len(adapter.stages) > 1:
        adapter = adapter.only(args.stage)
    stage, _ = stage_of(adapter, path)
    return adapter, args.stage or stage


def demand_one_stage(stages: Sequence[Stage | None]) -> None:
    """One transformer takes adapters of one stage."""
    if len(set(stages) - {None}) > 1:
        raise AdapterError(
            "the files are of both stages, and one transformer is of one. Merge each stage alone, "
            "or merge --into a pipeline's folder.",
            kind="mixed-stages",
        )


def about_of(
    args: argparse.Namespace, adapter: Adapter, stage: Stage | None = None
) -> AdapterMetadata:
    """What the header is to say."""
    from gracetune.adapters.files import AdapterMetadata

    known = adapter.stages[0] if len(adapter.stages) == 1 else None
    return AdapterMetadata(args.base_model, args.stage or stage or known, None, args.trigger)


def table_of(args: argparse.Namespace) -> NameTable | None:
    """The family that the user names, if one."""
    from gracetune.adapters.files import family_table

    return family_table(args.family)


def dtype_of(args: argparse.Namespace) -> torch.dtype | None:
    """The dtype to write; none: as it is."""
    import torch

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return None if args.dtype is None else kinds[args.dtype]


def generator() -> torch.Generator:
    """A new one for each command."""
    import torch

    return torch.Generator().manual_seed(SEED)


def positive(name: str, value: int) -> int:
    """A rank that can be one."""
    if value < 1:
        raise AdapterError(f"{name} is {value}; a rank is at least 1.")
    return value


def finite(name: str, values: Sequence[float]) -> Sequence[float]:
    """Strengths that weights can be multiplied by."""
    for value in values:
        if not math.isfinite(value):
            raise AdapterError(f"{name} is {value}; it must be a finite number, such as 1 or 0.5.")
    return values


def demand_file(out: Path | None) -> None:
    """A file can be written there, and replaces none."""
    if out is not None and out.is_dir():
        raise AdapterError(f"--out {out} is a folder. Name a file in it, ending in .safetensors.")
    if out is not None and out.exists():
        raise AdapterError(
            f"--out {out} is there already and would be lost. Name a new file, or remove it."
        )


def write_new(
    args: argparse.Namespace,
    out: Path,
    adapter: Adapter,
    form: KeyFormat,
    stage: Stage | None = None,
) -> list[Path]:
    """To one file or one a stage, none of which is there."""
    from gracetune.adapters.files import stage_files, write_stages

    for file in stage_files(out, adapter, form).values():
        demand_file(file)
    return write_stages(out, adapter, form, about_of(args, adapter, stage), dtype_of(args))


def demand_new_folder(out: Path, model: Path) -> None:
    """What is in a folder is never replaced by a model, least of all the model itself."""
    if out.resolve().is_relative_to(model.resolve()):
        raise AdapterError(
            f"--out {out} is {model} or inside it, which is read while the result is written. Name "
            "a folder beside it."
        )
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise AdapterError(
            f"--out {out} is there already and would be lost. Name a new folder, or remove it."
        )


def cut_lines(cut: Cut | None) -> list[str]:
    """What an approximation lost, if there was one."""
    if cut is None:
        return []
    return [
        f"lost by the cut: {cut.mean:.2%} of the norm on average, {cut.worst:.2%} at {cut.worst_at}"
    ]


def fault_of(error: AdapterError) -> dict[str, object]:
    """What is wrong, for machines."""
    return {"ok": False, "kind": error.kind, "key": error.key, "message": str(error)}


def show(args: argparse.Namespace, told: object, lines: Sequence[str]) -> None:
    """The answer, for machines or for people."""
    print(json.dumps(told, indent=2) if args.json else "\n".join(lines))
