"""`gracetune adapter`: inspect, convert, merge, extract and check adapter files.

torch and the model families are imported when an action runs, so that `--help` stays quick.
"""

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
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from gracetune.adapters.files.check_loading import CheckReport
    from gracetune.adapters.files.formats import KeyFormat
    from gracetune.adapters.files.inspect import Inspection
    from gracetune.adapters.files.io import AdapterMetadata
    from gracetune.adapters.files.keys import KeyTable, Stage
    from gracetune.adapters.files.layers import Adapter
    from gracetune.adapters.files.lowrank import TruncationError

    Action = Callable[[argparse.Namespace], int]


HELP = (
    "Inspect adapter files of any tool, convert them for another one, merge them, and check that "
    "they load."
)
DTYPES = ("float32", "bfloat16", "float16")
SUFFIXES = (".safetensors", ".sft")
"""Suffixes by which other tools recognise a safetensors file."""
SEED = 0
"""Seed of the randomized SVD, fixed so that the same file always gives the same result."""
BAR_WIDTH = 40
"""Length of the longest bar in a text chart, in characters."""
EIGHTHS = " ▏▎▍▌▋▊▉"
CELL, MARGIN, LINE = 14, 10, 16
"""Width of a cell, margin and line height of the heat map, in pixels."""
WEAKEST, STRONGEST = (235, 240, 247), (20, 60, 140)
"""Colours of the smallest and the largest norm in the heat map."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `gracetune adapter` (inspect, convert, ...) and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add_action(name: str, run: Action, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run_action=run)
        action.add_argument("--json", action="store_true", help="print JSON instead of text")
        action.add_argument(
            "--family", help="model family, if the keys do not show it: wan, flux, ..."
        )
        return action

    inspecting = add_action("inspect", _inspect, "show family, format, ranks and norms of a file")
    inspecting.add_argument("file", metavar="FILE", type=Path, help="adapter file")
    inspecting.add_argument(
        "--plot", metavar="PNG", type=Path, help="draw the norms of dW into an image"
    )

    converting = add_action("convert", _convert, "rewrite a file in another tool's format")
    converting.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="one file, or the files of the high and the low expert",
    )
    converting.add_argument(
        "--to", required=True, metavar="FORMAT", help="comfyui, diffusers, kohya, ..."
    )
    converting.add_argument(
        "--lora-rank", type=int, metavar="R", help="approximate every layer by a LoRA of this rank"
    )
    _add_output_arguments(converting)

    merging = add_action("merge", _merge, "merge adapters into a model, or several into one")
    merging.add_argument("files", metavar="FILE", nargs="+", type=Path, help="adapter files")
    merging.add_argument("--into", metavar="MODEL", type=Path, help="a transformer or a pipeline")
    merging.add_argument(
        "--strength",
        type=float,
        action="append",
        metavar="X",
        help="once for each file, in the same order (default: 1)",
    )
    merging.add_argument("--rank", type=int, metavar="R", help="truncate the sum to this rank")
    merging.add_argument(
        "--to", metavar="FORMAT", help="format of the sum (default: what most tools load)"
    )
    _add_output_arguments(merging, required=True)

    extracting = add_action("extract", _extract, "extract a LoRA from the difference of two models")
    extracting.add_argument("base", metavar="BASE", type=Path, help="the model before training")
    extracting.add_argument("tuned", metavar="TUNED", type=Path, help="the model after training")
    extracting.add_argument("--rank", type=int, required=True, metavar="R", help="rank of the LoRA")
    extracting.add_argument(
        "--to", metavar="FORMAT", help="format to write (default: what most tools load)"
    )
    extracting.add_argument(
        "--keep-rest", action="store_true", help="also keep changes of norms and biases"
    )
    _add_output_arguments(extracting, required=True)

    checking = add_action("check", _check, "load a file as diffusers and ComfyUI would")
    checking.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="adapter file, or those of both experts"
    )
    checking.add_argument("--stage", choices=("high", "low"), help="expert that the file is for")
    checking.add_argument(
        "--for",
        dest="required_tools",
        action="append",
        choices=("diffusers", "comfyui"),
        help="tool that must load all of it (default: any tool, and none may load only a part)",
    )
    checking.add_argument(
        "--model",
        metavar="FOLDER",
        type=Path,
        help="transformer that the file is for, or its config.json",
    )
    checking.add_argument("--expect", type=int, metavar="N", help="number of modules it must have")


def _add_output_arguments(parser: argparse.ArgumentParser, required: bool = False) -> None:
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, required=required, help="file to write"
    )
    parser.add_argument("--stage", choices=("high", "low"), help="expert that the file is for")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)")
    parser.add_argument("--base-model", default="", help="name to write into the header")
    parser.add_argument("--trigger", default="", help="trigger word to write into the header")


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand; with --json, print errors as JSON, too."""
    action: Action = args.run_action
    try:
        return _run_action(action, args)
    except AdapterError as error:
        if not args.json:
            raise
        _print_result(args, _error_as_json(error), ())
        return error.exit_code


def _run_action(action: Action, args: argparse.Namespace) -> int:
    try:
        return action(args)
    except BrokenPipeError:
        raise  # the reader of our output has gone, which is no error of a file
    except OSError as error:
        raise AdapterError(
            f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}. "
            "Fix that, or give another path."
        ) from error


# inspect


def _inspect(args: argparse.Namespace) -> int:
    from gracetune.adapters.files.inspect import inspect

    tables = _key_tables()
    if args.plot is not None and args.plot.suffix.lower() != ".png":
        raise AdapterError(f"--plot is {args.plot}; the heat map is a PNG. Give a name in .png.")
    inspection = inspect(args.file, tables, _table_of(args, tables))
    if args.plot is not None:
        draw_norms(inspection, args.plot)
    _print_result(args, asdict(inspection), inspection_lines(inspection))
    return 0


def inspection_lines(inspection: Inspection) -> list[str]:
    """Return the lines that `inspect` prints about an adapter file."""
    stage = " and ".join(inspection.stages) or "unknown"
    source = f" (by {inspection.stage_by})" if inspection.stage_by else ""
    tools = f": {inspection.tools}" if inspection.tools else ""
    lines = [
        f"{inspection.path}: {format_bytes(inspection.nbytes)}",
        f"family     {inspection.family}",
        f"format     {inspection.form}{tools}",
        *([f"stage      {stage}{source}"] if inspection.stages or inspection.has_experts else []),
        f"algorithm  {_format_counts(inspection.algorithms)}",
        f"rank       {_format_counts(inspection.ranks)}",
        f"alpha      {_format_counts(inspection.alphas) or 'none'}",
        f"dtype      {_format_counts(inspection.dtypes)}",
        f"modules    {inspection.num_modules}, {inspection.num_parameters:,} parameters",
        f"targets    {_format_counts(inspection.targets)}",
    ]
    if inspection.caution:
        lines.append(f"note       {inspection.caution}")
    lines += [f"note       {notice}" for notice in inspection.notices]
    lines += [f"header     {name} = {_shorten(text)}" for name, text in inspection.metadata.items()]
    return [*lines, "", "|dW| by block", *bar_chart(inspection.by_block)]


def bar_chart(values: Mapping[str, float]) -> list[str]:
    """Return a bar chart of the values as lines of text; the largest has the full width."""
    width = max(map(len, values))
    largest = max(values.values())
    return [
        f"{name:<{width}}  {_bar(value / largest if largest else 0.0):<{BAR_WIDTH}} {value:.4g}"
        for name, value in values.items()
    ]


def draw_norms(inspection: Inspection, path: Path) -> None:
    """Draw how much an adapter changes each module, as a heat map of the norms of its dW.

    There is a row for each kind of module and a column for each transformer block.
    """
    rows: dict[str, dict[int, float]] = {}
    for module, norm in inspection.norms.items():
        in_block = BLOCK.match(module)
        name = f"{in_block[1]}*{in_block[3]}" if in_block else module
        rows.setdefault(name, {})[int(in_block[2]) if in_block else 0] = norm
    columns = 1 + max(number for cells in rows.values() for number in cells)
    largest = max(inspection.norms.values()) or 1.0
    left = MARGIN + 7 * max(map(len, rows))
    size = (left + columns * CELL + MARGIN, 2 * MARGIN + LINE * (len(rows) + 2))
    image = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(image)
    canvas.text((MARGIN, MARGIN), f"|dW| by module and block; darkest: {largest:.4g}", fill="black")
    for i, (name, cells) in enumerate(rows.items()):
        top = MARGIN + LINE * (i + 2)
        canvas.text((MARGIN, top), name, fill="black")
        for number, norm in cells.items():
            corner = left + number * CELL
            box = (corner, top, corner + CELL - 2, top + LINE - 3)
            canvas.rectangle(box, fill=_shade(norm / largest))
    with atomic_file(path) as staging:
        image.save(staging, format="PNG")


def _format_counts(counts: Mapping[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _shorten(text: str, max_length: int = 100) -> str:
    if len(text) <= max_length:
        return text
    return f"{text[:max_length]}… ({len(text)} characters)"


def _bar(share: float) -> str:
    whole, part = divmod(round(max(0.0, min(1.0, share)) * BAR_WIDTH * 8), 8)
    return "█" * whole + (EIGHTHS[part] if part else "")


def _shade(share: float) -> tuple[int, int, int]:
    if not math.isfinite(share):
        return (200, 0, 0)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(WEAKEST, STRONGEST, strict=True))
    return red, green, blue


# convert


def _convert(args: argparse.Namespace) -> int:
    from gracetune.adapters.files.keys import get_format
    from gracetune.adapters.files.lowrank import convert_to_lora

    key_format = get_format(args.to)
    out = None if args.out is None else _new_output(args, args.out)
    adapter = _read_one_or_two(args)
    if out is None and adapter.format == key_format.name and not _is_changed(args):
        return _report_unchanged(args, adapter, key_format)
    out = out or _new_output(args, _default_output(args.files[0], key_format))
    loss = None
    if args.lora_rank is not None:
        _check_rank("--lora-rank", args.lora_rank)
        adapter, loss = convert_to_lora(adapter, args.lora_rank, _generator())
    written = _write_new_files(args, out, adapter, key_format)
    counts = [len(adapter.layers)]
    if len(written) > 1:
        counts = [len(adapter.select_stage(stage).layers) for stage in adapter.stages]
    lines = [*adapter.notices, *_loss_lines(loss)]
    lines += [
        f"{key_format.name}: {path} ({count} modules)"
        for path, count in zip(written, counts, strict=True)
    ]
    if key_format.caution:
        lines.append(f"Note: {key_format.caution}.")
    result = {
        "form": key_format.name,
        "files": [str(path) for path in written],
        "modules": len(adapter.layers),
        "caution": key_format.caution,
        "notices": list(adapter.notices),
        "lost": None if loss is None else asdict(loss),
    }
    _print_result(args, result, lines)
    return 0


def _is_changed(args: argparse.Namespace) -> bool:
    """Return True if an option of `convert` changes more than the names of tensors."""
    options = (args.lora_rank, args.dtype, args.stage, args.base_model, args.trigger)
    return len(args.files) > 1 or any(options)


def _report_unchanged(args: argparse.Namespace, adapter: Adapter, key_format: KeyFormat) -> int:
    line = (
        f"{args.files[0]} already is in the format {key_format.name} ({len(adapter.layers)} "
        "modules), so nothing is written. -o FILE writes a copy."
    )
    result = {
        "form": key_format.name,
        "files": [],
        "modules": len(adapter.layers),
        "caution": key_format.caution,
        "notices": [*adapter.notices, line],
        "lost": None,
    }
    _print_result(args, result, [*adapter.notices, line])
    return 0


def _default_output(path: Path, key_format: KeyFormat) -> Path:
    """Return the file to write without --out: next to the file or folder that is converted.

    For a file in a checkpoint it is next to the checkpoint, which the run deletes later.
    """
    from gracetune.adapters.files.checkpoint_weights import is_checkpoint

    stem = path.name if path.is_dir() else path.stem
    folders = [folder for folder in path.resolve().parents[:2] if is_checkpoint(folder)]
    if folders:
        path, stem = folders[0], f"{folders[0].name}-{stem}"
    ending = "" if key_format.name == "peft" else ".safetensors"  # peft's format is a folder
    return path.with_name(f"{stem}-{key_format.name}{ending}")


def _read_one_or_two(args: argparse.Namespace) -> Adapter:
    """Read one adapter file, or join the two files of a Wan 2.2 adapter.

    These are for the high-noise and the low-noise transformer, given in any order.
    """
    from gracetune.adapters.files.layers import join_stages, with_stage

    given = [_read(path, args) for path in args.files]
    if len(given) == 1:
        adapter, stage = given[0]
        is_one_expert = len(adapter.stages) == 1 and adapter.table.has_stages
        return with_stage(adapter, stage) if is_one_expert else adapter
    if len(given) > 2:
        raise AdapterError(
            f"convert takes one file, or two for the two experts, but {len(given)} are given."
        )
    for path, (adapter, _) in zip(args.files, given, strict=True):
        if not adapter.table.has_stages:
            raise AdapterError(
                f"{path} is a {adapter.table.family} adapter, but convert joins two files only for "
                "the two experts of a model. Convert each file by itself, or add the two up with "
                "`gracetune adapter merge`.",
                kind="mixed-stages",
            )
    by_stage = {stage: adapter for adapter, stage in given}
    if set(by_stage) == {"high", "low"}:
        return join_stages(by_stage["high"], by_stage["low"])
    if set(by_stage) == {None}:
        return join_stages(given[0][0], given[1][0])  # assumed order: high, low
    names = " and ".join(
        f"{path} is for {f'the expert {stage}' if stage else 'an expert that it does not name'}"
        for path, (_, stage) in zip(args.files, given, strict=True)
    )
    raise AdapterError(
        f"{names}. Give one file for high and one for low, and no --stage. To write an expert's "
        "name into a file, convert it by itself with --stage.",
        kind="mixed-stages",
    )


# merge


def _merge(args: argparse.Namespace) -> int:
    """Combine several adapters into one; with --into, merge them into a model."""
    from gracetune.adapters.files.io import default_format
    from gracetune.adapters.files.keys import get_format
    from gracetune.adapters.files.lowrank import combine_adapters

    strengths = args.strength or [1.0] * len(args.files)
    for strength in strengths:
        if not math.isfinite(strength):
            raise AdapterError(
                f"--strength is {strength}; it must be a finite number, such as 1 or 0.5."
            )
    if len(strengths) != len(args.files):
        raise AdapterError(
            f"--strength is given {len(strengths)} times for {len(args.files)} files. Give it once "
            "for each file, or not at all."
        )
    if args.into is not None:
        return _merge_into(args, strengths)
    out = _new_output(args, args.out)
    given = [_read(path, args) for path in args.files]
    _require_one_stage([stage for _, stage in given])
    given = _with_stages_in_keys(given, args.files)
    if args.rank is not None:
        _check_rank("--rank", args.rank)
    weighted = [(adapter, s) for (adapter, _), s in zip(given, strengths, strict=True)]
    adapter, loss = combine_adapters(weighted, args.rank, _generator())
    key_format = get_format(args.to) if args.to else default_format(adapter)
    written = _write_new_files(args, out, adapter, key_format, given[0][1])
    notices = [notice for one, _ in given for notice in one.notices]
    lines = [*notices, *_loss_lines(loss), *(f"{key_format.name}: {path}" for path in written)]
    result = {
        "form": key_format.name,
        "files": [str(path) for path in written],
        "modules": len(adapter.layers),
        "notices": notices,
        "lost": None if loss is None else asdict(loss),
    }
    _print_result(args, result, lines)
    return 0


def _with_stages_in_keys(
    given: Sequence[tuple[Adapter, Stage | None]], files: Sequence[Path]
) -> list[tuple[Adapter, Stage | None]]:
    """Assign every adapter to its expert, because only layers of the same expert are added.

    Files for a single expert are all for the same one, also those that do not say so.
    """
    from gracetune.adapters.files.layers import with_stage

    if all(len(adapter.stages) == 1 for adapter, _ in given):
        common = next((stage for _, stage in given if stage is not None), None)
        common = common if given[0][0].table.has_stages else None
        return [(with_stage(adapter, common), common) for adapter, _ in given]
    assigned = []
    for (adapter, stage), path in zip(given, files, strict=True):
        if adapter.stages == (None,) and stage is None:
            raise AdapterError(
                f"{path} does not say which expert it is for, and another file is for both. Give "
                "--stage high or --stage low to merge one of them.",
                kind="no-stage",
            )
        is_one = len(adapter.stages) == 1
        assigned.append((with_stage(adapter, stage) if is_one else adapter, stage))
    return assigned


def _merge_into(args: argparse.Namespace, strengths: Sequence[float]) -> int:
    from gracetune.adapters.files.layers import with_stage
    from gracetune.adapters.files.merge_into_model import (
        holds_transformers,
        merge_into,
        merge_into_pipeline,
    )

    if not args.into.exists():
        raise AdapterError(
            f"--into {args.into}: there is no such file or folder. Name the folder of a model, as "
            "`hf download` writes it, or its .safetensors file.",
            kind="missing",
        )
    if args.into.is_dir():
        _require_new_folder(args.out, args.into)
    else:
        _require_new_file(args.out)
    by_stage: dict[Stage | None, list[tuple[Adapter, float]]] = {}
    notices: list[str] = []
    for path, strength in zip(args.files, strengths, strict=True):
        adapter, stage = _read(path, args)
        notices += adapter.notices
        for one in adapter.stages:
            part = (with_stage(adapter.select_stage(one), None), strength)
            by_stage.setdefault(one or stage, []).append(part)
    table = next(iter(by_stage.values()))[0][0].table
    if holds_transformers(args.into):
        if None in by_stage and (args.into / "transformer_2").is_dir():
            raise AdapterError(
                f"{args.into} has two experts, and {args.files[0]} does not say which one it is "
                "for. Give --stage high or --stage low.",
                kind="no-stage",
            )
        reports = merge_into_pipeline(args.into, args.out, by_stage, table)
    else:
        _require_one_stage(list(by_stage))
        (adapters,) = by_stage.values()
        reports = {args.into.name: merge_into(args.into, args.out, adapters, table)}
    lines = [f"{name}: {report.changed} modules changed" for name, report in reports.items()]
    parts = {name: asdict(report) for name, report in reports.items()}
    result = {"out": str(args.out), "parts": parts, "notices": notices}
    _print_result(args, result, [*notices, *lines, f"written: {args.out}"])
    return 0


# extract


def _extract(args: argparse.Namespace) -> int:
    from gracetune.adapters.files.io import default_format, write_adapter
    from gracetune.adapters.files.keys import get_format
    from gracetune.adapters.files.lowrank import extract_lora

    tables = _key_tables()
    table = _table_of(args, tables)
    if table is None:
        raise AdapterError(f"extract needs --family: one of {', '.join(tables)}.")
    _check_rank("--rank", args.rank)
    out = _new_output(args, args.out)
    extraction = extract_lora(args.base, args.tuned, table, args.rank, _generator(), args.keep_rest)
    adapter, left_out = extraction.adapter, extraction.left_out
    key_format = get_format(args.to) if args.to else default_format(adapter)
    path = write_adapter(out, adapter, key_format, _metadata(args, adapter), _dtype(args))
    lines = [
        f"{key_format.name}: {path} ({len(adapter.layers)} modules)",
        *_loss_lines(extraction.loss),
    ]
    if left_out:
        lines.append(
            f"{len(left_out)} other weights differ and are left out, first {left_out[0]}. "
            "--keep-rest keeps them."
        )
    result = {
        "form": key_format.name,
        "file": str(path),
        "modules": len(adapter.layers),
        "lost": asdict(extraction.loss),
        "left_out": list(left_out),
    }
    _print_result(args, result, lines)
    return 0


# check


def _check(args: argparse.Namespace) -> int:
    """Check every given adapter file, even if an earlier one fails; return the exit code."""
    from gracetune.adapters.files.check_loading import check_file

    tables = _key_tables()
    table = _table_of(args, tables)
    config = _read_config(args.model)
    results: list[dict[str, object]] = []
    lines: list[str] = []
    exit_code = 0
    for path in args.files:
        try:
            report = check_file(
                path,
                tables,
                table=table,
                stage=args.stage,
                config=config,
                required_tools=tuple(args.required_tools or ()),
            )
        except AdapterError as error:
            results.append({"path": str(path), **_error_as_json(error)})
            lines.append(f"{path}: {error.kind}: {error}")
            exit_code = error.exit_code
            continue
        has_other_size = args.expect is not None and report.expected != args.expect
        ok = report.ok and not has_other_size
        results.append(_report_as_json(report, ok))
        lines += _report_lines(report, ok)
        if has_other_size:
            lines.append(f"  it has {report.expected} modules, but {args.expect} are expected")
        exit_code = exit_code or (0 if ok else 1)
    _print_result(args, results, lines)
    return exit_code


def _report_as_json(report: CheckReport, ok: bool) -> dict[str, object]:
    return {
        "path": str(report.path),
        "ok": ok,
        "family": report.family,
        "form": report.format,
        "stage": report.stage,
        "algorithms": list(report.algorithms),
        "ranks": list(report.ranks),
        "modules": report.expected,
        "targets": [
            {
                "tool": result.name,
                "loads": result.loads,
                "matched": result.matched,
                "expected": result.expected,
                "reason": result.reason,
                "first": result.first_missing,
            }
            for result in report.results
        ],
        "notices": list(report.notices),
    }


def _report_lines(report: CheckReport, ok: bool) -> list[str]:
    facts = [report.family, report.format or "mixed formats"]
    if report.stage or report.has_experts:
        facts.append(f"stage {report.stage or 'unknown'}")
    verdict = "does NOT load right" if report.is_wrong else "does NOT load completely"
    if not report.results:
        verdict = "no pipeline to load it with"
    verdict = "loads" if ok else verdict
    return [
        f"{report.path}: {verdict} ({', '.join(facts)})",
        *(f"  {line}" for line in report.lines()),
        *(f"  note: {notice}" for notice in report.notices),
    ]


def _read_config(path: Path | None) -> Mapping[str, object] | None:
    """Read the config.json of a transformer from a file or folder; None if none is given."""
    if path is None:
        return None
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"--model {path}: {file.name} cannot be read: {error}. Give a transformer's folder."
        ) from error
    if not isinstance(config, dict):
        raise AdapterError(
            f"--model {path}: {file.name} is no model's configuration. Give a transformer's folder."
        )
    return config


# Common parts of the actions


def _key_tables() -> Mapping[str, KeyTable]:
    from gracetune.models.family import key_tables

    return key_tables()


def _table_of(args: argparse.Namespace, tables: Mapping[str, KeyTable]) -> KeyTable | None:
    """Return the table of module names of the model family in --family; None without --family."""
    from gracetune.adapters.files.keys import get_table

    return None if args.family is None else get_table(args.family, tables)


def _read(path: Path, args: argparse.Namespace) -> tuple[Adapter, Stage | None]:
    """Read an adapter file; return the adapter and the transformer of Wan 2.2 that it is for.

    That is `high` or `low` (noise), from --stage or else from the file; None if neither says it.
    """
    from gracetune.adapters.files.io import find_stage, read_adapter, resolve_path

    path = resolve_path(path)
    tables = _key_tables()
    adapter = read_adapter(path, tables, _table_of(args, tables))
    if args.stage is not None and len(adapter.stages) > 1:
        adapter = adapter.select_stage(args.stage)
    stage, _ = find_stage(adapter, path)
    return adapter, args.stage or stage


def _metadata(
    args: argparse.Namespace, adapter: Adapter, stage: Stage | None = None
) -> AdapterMetadata:
    """Return the metadata for the header of an adapter file.

    `stage` is the transformer of Wan 2.2 that the file is for, `high` or `low` (noise).
    """
    from gracetune.adapters.files.io import AdapterMetadata

    known = adapter.stages[0] if len(adapter.stages) == 1 else None
    return AdapterMetadata(args.base_model, args.stage or stage or known, None, args.trigger)


def _write_new_files(
    args: argparse.Namespace,
    out: Path,
    adapter: Adapter,
    key_format: KeyFormat,
    stage: Stage | None = None,
) -> list[Path]:
    """Write an adapter to a new file, or to two; raise if a file exists.

    Two files are for the high-noise and the low-noise transformer of Wan 2.2.
    """
    from gracetune.adapters.files.io import stage_files, write_stages

    for file in stage_files(out, adapter, key_format).values():
        _require_new_file(file)
    metadata = _metadata(args, adapter, stage)
    return write_stages(out, adapter, key_format, metadata, _dtype(args))


def _dtype(args: argparse.Namespace) -> torch.dtype | None:
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return None if args.dtype is None else dtypes[args.dtype]


def _generator() -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(SEED)


def _check_rank(option: str, rank: int) -> None:
    if rank < 1:
        raise AdapterError(f"{option} is {rank}; a rank must be at least 1.")


def _require_one_stage(stages: Sequence[Stage | None]) -> None:
    if len(set(stages) - {None}) > 1:
        raise AdapterError(
            "the files are for both experts, which are two transformers. Merge the files of each "
            "expert separately, or merge --into the folder of a pipeline.",
            kind="mixed-stages",
        )


def _new_output(args: argparse.Namespace, out: Path) -> Path:
    """Return the file that `out` stands for in the format of --to; raise if it exists."""
    from gracetune.adapters.files.io import PEFT_CONFIG, PEFT_FILE, output_file
    from gracetune.adapters.files.keys import get_format

    if args.to:
        out = output_file(out, get_format(args.to))
    _require_new_file(out)
    if out.name == PEFT_FILE:
        _require_absent(out.with_name(PEFT_CONFIG))
    return out


def _require_new_file(out: Path) -> None:
    """Raise if the path for the output is no safetensors file, or an existing one."""
    if out.is_dir():
        raise AdapterError(f"--out {out} is a folder. Give a file in it, ending in .safetensors.")
    if out.suffix not in SUFFIXES:
        raise AdapterError(
            f"--out {out} does not end in .safetensors, so other tools would not read it as "
            f"safetensors, which it is. Give {out.with_suffix('.safetensors')}."
        )
    _require_absent(out)


def _require_absent(out: Path) -> None:
    if out.exists():
        raise AdapterError(
            f"--out {out} already exists and would be overwritten. Give a new file, or remove it."
        )


def _require_new_folder(out: Path, model: Path) -> None:
    """Raise if the output folder is not empty, or is inside the model that is read."""
    if out.resolve().is_relative_to(model.resolve()):
        raise AdapterError(
            f"--out {out} is {model} or inside it, which is read while the result is written. Give "
            "a folder outside of it."
        )
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise AdapterError(
            f"--out {out} already exists and would be overwritten. Give a new folder, or remove it."
        )


def _loss_lines(loss: TruncationError | None) -> list[str]:
    if loss is None:
        return []
    return [
        f"lost by truncation: {loss.mean:.2%} of the norm on average, at most {loss.worst:.2%} in "
        f"{loss.worst_at}"
    ]


def _error_as_json(error: AdapterError) -> dict[str, object]:
    return {"ok": False, "kind": error.kind, "key": error.key, "message": str(error)}


def _print_result(args: argparse.Namespace, result: object, lines: Sequence[str]) -> None:
    """Print a result as JSON with --json, otherwise as lines of text."""
    print(json.dumps(result, indent=2) if args.json else "\n".join(lines))
