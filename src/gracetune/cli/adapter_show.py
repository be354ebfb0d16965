"""How `gracetune adapter` shows what it found: lines, bars, a picture, a verdict."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from gracetune.adapters.names import BLOCK
from gracetune.cli.adapter_args import fault_of
from gracetune.durable import new_file
from gracetune.errors import AdapterError
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

    from gracetune.adapters.check import Check
    from gracetune.adapters.report import Inspection
    from gracetune.adapters.tables.types import NameTable

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
    with new_file(path) as staging:
        image.save(staging, format="PNG")


def check_files(
    args: argparse.Namespace, table: NameTable | None
) -> tuple[list[dict[str, object]], list[str], int]:
    """Check each file; what to tell machines, what to tell people, and the exit code."""
    from gracetune.adapters.check import check_file

    config = _config(args.model)
    told: list[dict[str, object]] = []
    lines: list[str] = []
    code = 0
    for path in args.files:
        try:
            found = check_file(
                path,
                table=table,
                stage=args.stage,
                config=config,
                demanded=tuple(args.demanded or ()),
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


def _told(found: Check, ok: bool) -> dict[str, object]:
    return {
        "path": str(found.path),
        "ok": ok,
        "family": found.family,
        "form": found.form,
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
                "first": t.first,
            }
            for t in found.targets
        ],
        "notices": list(found.notices),
    }


def _lines(found: Check, ok: bool) -> list[str]:
    what = f"{found.family}, {found.form or 'mixed forms'}, stage {found.stage or 'not said'}"
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
