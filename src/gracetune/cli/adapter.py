"""`gracetune adapter`: inspect, convert, merge, extract and check adapter files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.errors import AdapterError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    import torch

    from gracetune.adapters.files import About
    from gracetune.adapters.layers import Adapter
    from gracetune.adapters.lowrank import Cut
    from gracetune.adapters.tables.types import NameTable, Stage

    Action = Callable[[argparse.Namespace], int]

HELP = (
    "Look into adapter files of any tool, rewrite them for another, merge them, and check that "
    "they load."
)
DTYPES = ("float32", "bfloat16", "float16")
SEED = 0
"""Of the random range finder in large SVDs: the same file gives the same result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One verb, several actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Action, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.set_defaults(run_action=run)
        made.add_argument("--json", action="store_true", help="print JSON instead of lines")
        made.add_argument(
            "--family", help="the model family, where keys do not tell: wan, flux, ..."
        )
        return made

    show = action("inspect", _inspect, "what a file is, and how much it changes where")
    show.add_argument("file", metavar="FILE", type=Path)
    show.add_argument("--plot", metavar="PNG", type=Path, help="draw the norms as a picture too")

    convert = action("convert", _convert, "rewrite a file in another tool's form")
    convert.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="one file, or a high and a low stage's"
    )
    convert.add_argument(
        "--to", required=True, metavar="FORM", help="comfyui, diffusers, kohya, ..."
    )
    convert.add_argument(
        "--lora-rank", type=int, metavar="R", help="approximate all by LoRA of this rank"
    )
    _writing(convert)

    merge = action("merge", _merge, "put adapters into a model, or several into one")
    merge.add_argument("files", metavar="FILE", nargs="+", type=Path)
    merge.add_argument("--into", metavar="MODEL", type=Path, help="a transformer or a pipeline")
    merge.add_argument(
        "--strength", type=float, action="append", metavar="X", help="of each file, in their order"
    )
    merge.add_argument("--rank", type=int, metavar="R", help="cut the sum to this rank by SVD")
    merge.add_argument("--to", metavar="FORM", help="the form of the sum (default: most tools')")
    _writing(merge, needed=True)

    extract = action("extract", _extract, "the LoRA that turns one model into another")
    extract.add_argument("base", metavar="BASE", type=Path)
    extract.add_argument("tuned", metavar="TUNED", type=Path)
    extract.add_argument("--rank", type=int, required=True, metavar="R")
    extract.add_argument("--to", metavar="FORM", help="the form to write (default: most tools')")
    extract.add_argument("--keep-rest", action="store_true", help="keep norms and biases as diffs")
    _writing(extract, needed=True)

    check = action("check", _check, "load a file as diffusers and ComfyUI would, and count")
    check.add_argument("files", metavar="FILE", nargs="+", type=Path)
    check.add_argument("--stage", choices=("high", "low"), help="the expert it is for")
    check.add_argument(
        "--for",
        dest="demanded",
        action="append",
        choices=("diffusers", "comfyui"),
        help="a tool that must load all of it (default: any, and none may load a part)",
    )
    check.add_argument(
        "--model", metavar="FOLDER", type=Path, help="the transformer it is for, or its config.json"
    )
    check.add_argument("--expect", type=int, metavar="N", help="modules that it must have")


def _writing(parser: argparse.ArgumentParser, needed: bool = False) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=needed)
    parser.add_argument("--stage", choices=("high", "low"), help="the expert it is for")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    parser.add_argument("--base-model", default="", help="kept in the header")
    parser.add_argument("--trigger", default="", help="kept in the header")


def run(args: argparse.Namespace) -> int:
    """Do what the action says."""
    act: Action = args.run_action
    return act(args)


def _inspect(args: argparse.Namespace) -> int:
    from gracetune.adapters.report import inspect
    from gracetune.cli.adapter_show import draw, lines_of

    found = inspect(args.file, _table(args))
    if args.plot is not None:
        draw(found, args.plot)
    _print(args, asdict(found), lines_of(found))
    return 0


def _convert(args: argparse.Namespace) -> int:
    from gracetune.adapters.files import write_stages
    from gracetune.adapters.lowrank import as_lora
    from gracetune.adapters.names import form_named

    form = form_named(args.to)
    adapter = _one_or_two(args)
    cut = None
    if args.lora_rank is not None:
        adapter, cut = as_lora(adapter, _positive("--lora-rank", args.lora_rank), _generator())
    out = args.out or args.files[0].with_name(f"{args.files[0].stem}-{form.name}.safetensors")
    written = write_stages(out, adapter, form, _about(args, adapter), _dtype(args))
    lines = [*adapter.notices, *_cut_lines(cut)]
    lines += [f"{form.name}: {path} ({len(adapter.layers)} modules)" for path in written]
    if form.caution:
        lines.append(f"Note: {form.caution}.")
    told = {
        "form": form.name,
        "files": [str(path) for path in written],
        "modules": len(adapter.layers),
        "caution": form.caution,
        "notices": list(adapter.notices),
        "lost": None if cut is None else asdict(cut),
    }
    _print(args, told, lines)
    return 0


def _merge(args: argparse.Namespace) -> int:
    from gracetune.adapters.files import interchange_form, write_stages
    from gracetune.adapters.lowrank import combine
    from gracetune.adapters.names import form_named

    strengths = args.strength or [1.0] * len(args.files)
    if len(strengths) != len(args.files):
        raise AdapterError(
            f"--strength is given {len(strengths)} times for {len(args.files)} files. Give one for "
            "each, or none."
        )
    if args.into is not None:
        return _merge_into(args, strengths)
    read = [_read(path, args) for path in args.files]
    _one_stage_of([stage for _, stage in read])
    rank = None if args.rank is None else _positive("--rank", args.rank)
    pairs = [(adapter, s) for (adapter, _), s in zip(read, strengths, strict=True)]
    adapter, cut = combine(pairs, rank, _generator())
    form = form_named(args.to) if args.to else interchange_form(adapter)
    about = _about(args, adapter, read[0][1])
    written = write_stages(args.out, adapter, form, about, _dtype(args))
    lines = [*_cut_lines(cut), *(f"{form.name}: {path}" for path in written)]
    told = {
        "form": form.name,
        "files": [str(path) for path in written],
        "modules": len(adapter.layers),
        "lost": None if cut is None else asdict(cut),
    }
    _print(args, told, lines)
    return 0


def _merge_into(args: argparse.Namespace, strengths: Sequence[float]) -> int:
    from gracetune.adapters.layers import at_stage
    from gracetune.adapters.merging import merge_into, merge_into_pipeline

    by_stage: dict[Stage | None, list[tuple[Adapter, float]]] = {}
    for path, strength in zip(args.files, strengths, strict=True):
        adapter, stage = _read(path, args)
        for one in adapter.stages:
            part = (at_stage(adapter.only(one), None), strength)
            by_stage.setdefault(one or stage, []).append(part)
    table = next(iter(by_stage.values()))[0][0].table
    if (args.into / "model_index.json").is_file():
        if None in by_stage and (args.into / "transformer_2").is_dir():
            raise AdapterError(
                f"{args.into} has two experts and {args.files[0]} does not say which it is for. "
                "Give --stage high or --stage low.",
                kind="no-stage",
            )
        done = merge_into_pipeline(args.into, args.out, by_stage, table)
    else:
        _one_stage_of(list(by_stage))
        (adapters,) = by_stage.values()
        done = {args.into.name: merge_into(args.into, args.out, adapters, table)}
    lines = [f"{name}: {one.changed} modules changed" for name, one in done.items()]
    told = {"out": str(args.out), "parts": {name: asdict(one) for name, one in done.items()}}
    _print(args, told, [*lines, f"written: {args.out}"])
    return 0


def _extract(args: argparse.Namespace) -> int:
    from gracetune.adapters.extracting import extract
    from gracetune.adapters.files import interchange_form, write_adapter
    from gracetune.adapters.names import TABLES, form_named

    if args.family is None:
        raise AdapterError(f"extract needs --family: one of {', '.join(TABLES)}.")
    table = _table(args)
    assert table is not None
    rank = _positive("--rank", args.rank)
    found = extract(args.base, args.tuned, table, rank, _generator(), args.keep_rest)
    form = form_named(args.to) if args.to else interchange_form(found.adapter)
    about = _about(args, found.adapter)
    path = write_adapter(args.out, found.adapter, form, about, _dtype(args))
    lines = [f"{form.name}: {path} ({len(found.adapter.layers)} modules)", *_cut_lines(found.cut)]
    if found.rest:
        lines.append(
            f"{len(found.rest)} other weights differ and are left out, {found.rest[0]} first: "
            "--keep-rest keeps them."
        )
    told = {
        "form": form.name,
        "file": str(path),
        "modules": len(found.adapter.layers),
        "lost": asdict(found.cut),
        "left_out": list(found.rest),
    }
    _print(args, told, lines)
    return 0


def _check(args: argparse.Namespace) -> int:
    from gracetune.cli.adapter_show import check_files

    told, lines, code = check_files(args, _table(args))
    _print(args, told, lines)
    return code


def _one_or_two(args: argparse.Namespace) -> Adapter:
    """One file's adapter, or that of a high and a low stage's file, in any order."""
    from gracetune.adapters.layers import at_stage, join_stages

    read = [_read(path, args) for path in args.files]
    if len(read) == 1:
        adapter, stage = read[0]
        single = len(adapter.stages) == 1 and adapter.table.staged
        return at_stage(adapter, stage) if single else adapter
    if len(read) > 2:
        raise AdapterError(f"convert takes one file or two stages; {len(read)} are given.")
    by_stage = {stage: adapter for adapter, stage in read}
    if set(by_stage) == {"high", "low"}:
        return join_stages(by_stage["high"], by_stage["low"])
    if set(by_stage) == {None}:
        return join_stages(read[0][0], read[1][0])  # given as high, low
    names = " and ".join(str(stage) for _, stage in read)
    raise AdapterError(
        f"the two files are of the stages {names}. Give the high one and the low one.",
        kind="mixed-stages",
    )


def _read(path: Path, args: argparse.Namespace) -> tuple[Adapter, Stage | None]:
    """An adapter and the stage it is for; the user's word counts most."""
    from gracetune.adapters.files import read_adapter, resolve, stage_of

    path = resolve(path)
    adapter = read_adapter(path, _table(args))
    stage, _ = stage_of(adapter, path)
    return adapter, args.stage or stage


def _one_stage_of(stages: Sequence[Stage | None]) -> None:
    if len(set(stages) - {None}) > 1:
        raise AdapterError(
            "the files are of both stages, and one transformer is of one. Merge each stage alone, "
            "or merge --into a pipeline's folder.",
            kind="mixed-stages",
        )


def _about(args: argparse.Namespace, adapter: Adapter, stage: Stage | None = None) -> About:
    from gracetune.adapters.files import About

    known = adapter.stages[0] if len(adapter.stages) == 1 else None
    return About(args.base_model, args.stage or stage or known, None, args.trigger)


def _table(args: argparse.Namespace) -> NameTable | None:
    from gracetune.adapters.files import family_table

    return family_table(args.family)


def _dtype(args: argparse.Namespace) -> torch.dtype | None:
    import torch

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return None if args.dtype is None else kinds[args.dtype]


def _generator() -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(SEED)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise AdapterError(f"{name} is {value}; a rank is at least 1.")
    return value


def _cut_lines(cut: Cut | None) -> list[str]:
    if cut is None:
        return []
    return [
        f"lost by the cut: {cut.mean:.2%} of the norm on average, {cut.worst:.2%} at {cut.worst_at}"
    ]


def _print(args: argparse.Namespace, told: object, lines: Sequence[str]) -> None:
    print(json.dumps(told, indent=2) if args.json else "\n".join(lines))
