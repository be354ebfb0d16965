"""`gracetune adapter`: inspect, convert, merge, extract and check adapter files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from gracetune.adapters.files.keys import BLOCK
from gracetune.atomic_files import atomic_file
from gracetune.errors import AdapterError
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from gracetune.adapters.files.layers import Adapter

    Action = Callable[[argparse.Namespace], int]
    from collections.abc import Mapping, Sequence

    import torch

    from gracetune.adapters.files.check import CheckReport
    from gracetune.adapters.files.formats import KeyFormat
    from gracetune.adapters.files.inspect import Inspection
    from gracetune.adapters.files.io import AdapterMetadata
    from gracetune.adapters.files.keys import KeyTable, Stage
    from gracetune.adapters.files.lowrank import TruncationLoss


HELP = (
    "Look into adapter files of any tool, rewrite them for another, merge them, and check that "
    "they load."
)
DTYPES = ("float32", "bfloat16", "float16")


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

    look = action("inspect", _inspect, "what a file is, and how much it changes where")
    look.add_argument("file", metavar="FILE", type=Path)
    look.add_argument("--plot", metavar="PNG", type=Path, help="draw the norms as a picture too")

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

    merging = action("merge", merge, "put adapters into a model, or several into one")
    merging.add_argument("files", metavar="FILE", nargs="+", type=Path)
    merging.add_argument("--into", metavar="MODEL", type=Path, help="a transformer or a pipeline")
    merging.add_argument(
        "--strength", type=float, action="append", metavar="X", help="of each file, in their order"
    )
    merging.add_argument("--rank", type=int, metavar="R", help="cut the sum to this rank by SVD")
    merging.add_argument("--to", metavar="FORM", help="the form of the sum (default: most tools')")
    _writing(merging, needed=True)

    extracting = action("extract", extract, "the LoRA that turns one model into another")
    extracting.add_argument("base", metavar="BASE", type=Path)
    extracting.add_argument("tuned", metavar="TUNED", type=Path)
    extracting.add_argument("--rank", type=int, required=True, metavar="R")
    extracting.add_argument("--to", metavar="FORM", help="the form to write (default: most tools')")
    extracting.add_argument(
        "--keep-rest", action="store_true", help="keep norms and biases as diffs"
    )
    _writing(extracting, needed=True)

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
    try:
        return _act(act, args)
    except AdapterError as error:
        if not args.json:
            raise
        show(args, fault_of(error), ())
        return error.exit_code


def _act(act: Action, args: argparse.Namespace) -> int:
    try:
        return act(args)
    except BrokenPipeError:
        raise  # of the reader of our output, not of a file
    except OSError as error:
        raise AdapterError(
            f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}. "
            "Mend that, or name another."
        ) from error


def _inspect(args: argparse.Namespace) -> int:
    from gracetune.adapters.files.inspect import inspect
    from gracetune.models.family import key_tables

    found = inspect(args.file, key_tables(), table_of(args))
    if args.plot is not None:
        draw(found, args.plot)
    show(args, asdict(found), lines_of(found))
    return 0


def _convert(args: argparse.Namespace) -> int:
    from gracetune.adapters.files.keys import get_format
    from gracetune.adapters.files.lowrank import convert_to_lora

    form = get_format(args.to)
    out = args.out or args.files[0].with_name(f"{args.files[0].stem}-{form.name}.safetensors")
    require_file(out)
    adapter = _one_or_two(args)
    cut = None
    if args.lora_rank is not None:
        adapter, cut = convert_to_lora(
            adapter, positive("--lora-rank", args.lora_rank), generator()
        )
    written = write_new(args, out, adapter, form)
    lines = [*adapter.notices, *cut_lines(cut)]
    counts = [len(adapter.layers)]
    if len(written) > 1:
        counts = [len(adapter.select_stage(stage).layers) for stage in adapter.stages]
    pairs = zip(written, counts, strict=True)
    lines += [f"{form.name}: {path} ({count} modules)" for path, count in pairs]
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
    show(args, told, lines)
    return 0


def _check(args: argparse.Namespace) -> int:

    told, lines, code = check_files(args, table_of(args))
    show(args, told, lines)
    return code


def _one_or_two(args: argparse.Namespace) -> Adapter:
    """One file's adapter, or that of a high and a low stage's file, in any order."""
    from gracetune.adapters.files.layers import with_stage, join_stages

    given = [read(path, args) for path in args.files]
    if len(given) == 1:
        adapter, stage = given[0]
        single = len(adapter.stages) == 1 and adapter.table.has_stages
        return with_stage(adapter, stage) if single else adapter
    if len(given) > 2:
        raise AdapterError(f"convert takes one file or two stages; {len(given)} are given.")
    by_stage = {stage: adapter for adapter, stage in given}
    if set(by_stage) == {"high", "low"}:
        return join_stages(by_stage["high"], by_stage["low"])
    if set(by_stage) == {None}:
        return join_stages(given[0][0], given[1][0])  # given as high, low
    names = " and ".join(str(stage) for _, stage in given)
    raise AdapterError(
        f"the two files are of the stages {names}. Give the high one and the low one.",
        kind="mixed-stages",
    )


# ------------------------------------------------------------------------------------------
# How `gracetune adapter` shows what it found: lines, bars, a picture, a verdict.


BAR = 40
"""The longest bar, in characters."""
EIGHTHS = " ▏▎▍▌▋▊▉"
CELL, MARGIN, LINE = 14, 10, 16
"""Pixels of the picture: a cell's edge, the margin, and the height of a line of text."""
FAINT, STRONG = (235, 240, 247), (20, 60, 140)


def lines_of(found: Inspection) -> list[str]:
    """A file as a person reads it."""
    stage = " and ".join(found.stages) or "not said"
    by = f" (by {found.stage_by})" if found.stage_by else ""
    lines = [
        f"{found.path}: {format_bytes(found.nbytes)}",
        f"family     {found.family}",
        f"form       {found.form}" + (f": {found.tools}" if found.tools else ""),
        f"stage      {stage}{by}",
        f"algorithm  {_counted(found.algorithms)}",
        f"rank       {_counted(found.ranks)}",
        f"alpha      {_counted(found.alphas) or 'none'}",
        f"dtype      {_counted(found.dtypes)}",
        f"modules    {found.num_modules}, {found.num_parameters:,} parameters",
        f"targets    {_counted(found.targets)}",
    ]
    if found.caution:
        lines.append(f"note       {found.caution}")
    lines += [f"note       {notice}" for notice in found.notices]
    lines += [f"header     {name} = {_short(value)}" for name, value in found.metadata.items()]
    return [*lines, "", "|dW| by block", *bars(found.by_block)]


def bars(values: Mapping[str, float]) -> list[str]:
    """Values as bars of text, the largest across the whole width."""
    width = max(map(len, values))
    most = max(values.values())
    return [
        f"{name:<{width}}  {_bar(value / most if most else 0.0):<{BAR}} {value:.4g}"
        for name, value in values.items()
    ]


def draw(found: Inspection, path: Path) -> None:
    """Norms as a map: a row a kind of module, a column a block, the strongest darkest."""
    rows: dict[str, dict[int, float]] = {}
    for module, value in found.norms.items():
        inside = BLOCK.match(module)
        name = f"{inside[1]}*{inside[3]}" if inside else module
        rows.setdefault(name, {})[int(inside[2]) if inside else 0] = value
    columns = 1 + max(number for cells in rows.values() for number in cells)
    most = max(found.norms.values()) or 1.0
    left = MARGIN + 7 * max(map(len, rows))
    size = (left + columns * CELL + MARGIN, 2 * MARGIN + LINE * (len(rows) + 2))
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, MARGIN), f"|dW| by module and block; darkest: {most:.4g}", fill="black")
    for i, (name, cells) in enumerate(rows.items()):
        top = MARGIN + LINE * (i + 2)
        pen.text((MARGIN, top), name, fill="black")
        for number, value in cells.items():
            corner = left + number * CELL
            box = (corner, top, corner + CELL - 2, top + LINE - 3)
            pen.rectangle(box, fill=_shade(value / most))
    with atomic_file(path) as staging:
        image.save(staging, format="PNG")


def check_files(
    args: argparse.Namespace, table: KeyTable | None
) -> tuple[list[dict[str, object]], list[str], int]:
    """Check each file; what to tell machines, what to tell people, and the exit code."""
    from gracetune.adapters.files.check import check_file
    from gracetune.models.family import key_tables

    config = _config(args.model)
    told: list[dict[str, object]] = []
    lines: list[str] = []
    code = 0
    for path in args.files:
        try:
            found = check_file(
                path,
                key_tables(),
                table=table,
                stage=args.stage,
                config=config,
                required_tools=tuple(args.demanded or ()),
            )
        except AdapterError as error:
            told.append({"path": str(path), **fault_of(error)})
            lines.append(f"{path}: {error.kind}: {error}")
            code = error.exit_code
            continue
        other = args.expect is not None and found.expected != args.expect
        ok = found.ok and not other
        told.append(_told(found, ok))
        lines += _lines(found, ok)
        if other:
            lines.append(f"  it has {found.expected} modules of {args.expect} expected")
        code = code or (0 if ok else 1)
    return told, lines, code


def _told(found: CheckReport, ok: bool) -> dict[str, object]:
    return {
        "path": str(found.path),
        "ok": ok,
        "family": found.family,
        "form": found.format,
        "stage": found.stage,
        "algorithms": list(found.algorithms),
        "ranks": list(found.ranks),
        "modules": found.expected,
        "targets": [
            {
                "tool": t.name,
                "loads": t.loads,
                "matched": t.matched,
                "expected": t.expected,
                "reason": t.reason,
                "first": t.first_missing,
            }
            for t in found.results
        ],
        "notices": list(found.notices),
    }


def _lines(found: CheckReport, ok: bool) -> list[str]:
    what = f"{found.family}, {found.format or 'mixed formats'}, stage {found.stage or 'not said'}"
    verdict = "loads" if ok else "does NOT load as it should"
    return [
        f"{found.path}: {verdict} ({what})",
        *(f"  {line}" for line in found.lines()),
        *(f"  note: {notice}" for notice in found.notices),
    ]


def _config(path: Path | None) -> Mapping[str, object] | None:
    if path is None:
        return None
    file = path / "config.json" if path.is_dir() else path
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"--model {path}: {file.name} cannot be read: {error}. Name a transformer's folder."
        ) from error
    assert isinstance(known, dict)
    return known


def _counted(counts: Mapping[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _bar(share: float) -> str:
    whole, part = divmod(round(max(0.0, min(1.0, share)) * BAR * 8), 8)
    return "█" * whole + (EIGHTHS[part] if part else "")


def _shade(share: float) -> tuple[int, int, int]:
    if not math.isfinite(share):
        return (200, 0, 0)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(FAINT, STRONG, strict=True))
    return red, green, blue


# ------------------------------------------------------------------------------------------
# `gracetune adapter merge` and `extract`: adapters into weights, and out of them.


def merge(args: argparse.Namespace) -> int:
    """Several adapters into one, or one and more into a model."""
    from gracetune.adapters.files.io import default_format
    from gracetune.adapters.files.keys import get_format
    from gracetune.adapters.files.lowrank import combine_adapters

    strengths = finite("--strength", args.strength or [1.0] * len(args.files))
    if len(strengths) != len(args.files):
        raise AdapterError(
            f"--strength is given {len(strengths)} times for {len(args.files)} files. Give one for "
            "each, or none."
        )
    if args.into is not None:
        return _merge_into(args, strengths)
    require_file(args.out)
    given = [read(path, args) for path in args.files]
    require_one_stage([stage for _, stage in given])
    rank = None if args.rank is None else positive("--rank", args.rank)
    pairs = [(adapter, s) for (adapter, _), s in zip(given, strengths, strict=True)]
    adapter, cut = combine_adapters(pairs, rank, generator())
    form = get_format(args.to) if args.to else default_format(adapter)
    written = write_new(args, args.out, adapter, form, given[0][1])
    lines = [*cut_lines(cut), *(f"{form.name}: {path}" for path in written)]
    told = {
        "form": form.name,
        "files": [str(path) for path in written],
        "modules": len(adapter.layers),
        "lost": None if cut is None else asdict(cut),
    }
    show(args, told, lines)
    return 0


def _merge_into(args: argparse.Namespace, strengths: Sequence[float]) -> int:
    from gracetune.adapters.files.layers import with_stage
    from gracetune.adapters.files.merge import holds_transformers, merge_into, merge_into_pipeline

    if args.into.is_dir():
        require_new_folder(args.out, args.into)
    else:
        require_file(args.out)
    by_stage: dict[Stage | None, list[tuple[Adapter, float]]] = {}
    for path, strength in zip(args.files, strengths, strict=True):
        adapter, stage = read(path, args)
        for one in adapter.stages:
            part = (with_stage(adapter.select_stage(one), None), strength)
            by_stage.setdefault(one or stage, []).append(part)
    table = next(iter(by_stage.values()))[0][0].table
    if holds_transformers(args.into):
        if None in by_stage and (args.into / "transformer_2").is_dir():
            raise AdapterError(
                f"{args.into} has two experts and {args.files[0]} does not say which it is for. "
                "Give --stage high or --stage low.",
                kind="no-stage",
            )
        done = merge_into_pipeline(args.into, args.out, by_stage, table)
    else:
        require_one_stage(list(by_stage))
        (adapters,) = by_stage.values()
        done = {args.into.name: merge_into(args.into, args.out, adapters, table)}
    lines = [f"{name}: {one.changed} modules changed" for name, one in done.items()]
    told = {"out": str(args.out), "parts": {name: asdict(one) for name, one in done.items()}}
    show(args, told, [*lines, f"written: {args.out}"])
    return 0


def extract(args: argparse.Namespace) -> int:
    """The LoRA of a rank between two models."""
    from gracetune.adapters.files import lowrank
    from gracetune.adapters.files.io import default_format, write_adapter
    from gracetune.adapters.files.keys import get_format
    from gracetune.models.family import key_tables

    if args.family is None:
        raise AdapterError(f"extract needs --family: one of {', '.join(key_tables())}.")
    table = table_of(args)
    assert table is not None
    rank = positive("--rank", args.rank)
    require_file(args.out)
    found = lowrank.extract(args.base, args.tuned, table, rank, generator(), args.keep_rest)
    form = get_format(args.to) if args.to else default_format(found.adapter)
    about = about_of(args, found.adapter)
    path = write_adapter(args.out, found.adapter, form, about, dtype_of(args))
    lines = [f"{form.name}: {path} ({len(found.adapter.layers)} modules)", *cut_lines(found.loss)]
    if found.left_out:
        lines.append(
            f"{len(found.left_out)} other weights differ and are left out, {found.left_out[0]} first: "
            "--keep-rest keeps them."
        )
    told = {
        "form": form.name,
        "file": str(path),
        "modules": len(found.adapter.layers),
        "lost": asdict(found.loss),
        "left_out": list(found.left_out),
    }
    show(args, told, lines)
    return 0


# ------------------------------------------------------------------------------------------
# What the actions of `gracetune adapter` have in common: reading, headers, printing.


SEED = 0
"""Of the random range finder in large SVDs: the same file gives the same result."""


def read(path: Path, args: argparse.Namespace) -> tuple[Adapter, Stage | None]:
    """An adapter and the stage it is for; the user's word counts most."""
    from gracetune.adapters.files.io import read_adapter, resolve_path, find_stage
    from gracetune.models.family import key_tables

    path = resolve_path(path)
    adapter = read_adapter(path, key_tables(), table_of(args))
    if args.stage is not None and len(adapter.stages) > 1:
        adapter = adapter.select_stage(args.stage)
    stage, _ = find_stage(adapter, path)
    return adapter, args.stage or stage


def require_one_stage(stages: Sequence[Stage | None]) -> None:
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
    from gracetune.adapters.files.io import AdapterMetadata

    known = adapter.stages[0] if len(adapter.stages) == 1 else None
    return AdapterMetadata(args.base_model, args.stage or stage or known, None, args.trigger)


def table_of(args: argparse.Namespace) -> KeyTable | None:
    """The family that the user names, if one."""
    from gracetune.adapters.files.keys import get_table
    from gracetune.models.family import key_tables

    return None if args.family is None else get_table(args.family, key_tables())


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


def require_file(out: Path | None) -> None:
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
    from gracetune.adapters.files.io import stage_files, write_stages

    for file in stage_files(out, adapter, form).values():
        require_file(file)
    return write_stages(out, adapter, form, about_of(args, adapter, stage), dtype_of(args))


def require_new_folder(out: Path, model: Path) -> None:
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


def cut_lines(cut: TruncationLoss | None) -> list[str]:
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
