"""`gracetune adapter`: inspect, convert, merge, extract and check adapter files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cli.adapter_args import (
    cut_lines,
    demand_file,
    fault_of,
    generator,
    positive,
    read,
    show,
    table_of,
    write_new,
)
from gracetune.cli.adapter_models import extract, merge
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from gracetune.adapters.layers import Adapter

    Action = Callable[[argparse.Namespace], int]

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
    from gracetune.adapters.report import inspect
    from gracetune.cli.adapter_show import draw, lines_of

    found = inspect(args.file, table_of(args))
    if args.plot is not None:
        draw(found, args.plot)
    show(args, asdict(found), lines_of(found))
    return 0


def _convert(args: argparse.Namespace) -> int:
    from gracetune.adapters.lowrank import as_lora
    from gracetune.adapters.names import form_named

    form = form_named(args.to)
    out = args.out or args.files[0].with_name(f"{args.files[0].stem}-{form.name}.safetensors")
    demand_file(out)
    adapter = _one_or_two(args)
    cut = None
    if args.lora_rank is not None:
        adapter, cut = as_lora(adapter, positive("--lora-rank", args.lora_rank), generator())
    written = write_new(args, out, adapter, form)
    lines = [*adapter.notices, *cut_lines(cut)]
    counts = [len(adapter.layers)]
    if len(written) > 1:
        counts = [len(adapter.only(stage).layers) for stage in adapter.stages]
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
    from gracetune.cli.adapter_show import check_files

    told, lines, code = check_files(args, table_of(args))
    show(args, told, lines)
    return code


def _one_or_two(args: argparse.Namespace) -> Adapter:
    """One file's adapter, or that of a high and a low stage's file, in any order."""
    from gracetune.adapters.layers import at_stage, join_stages

    given = [read(path, args) for path in args.files]
    if len(given) == 1:
        adapter, stage = given[0]
        single = len(adapter.stages) == 1 and adapter.table.staged
        return at_stage(adapter, stage) if single else adapter
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
