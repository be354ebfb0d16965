"""Compute the memory tables of the pages docs/first-lora-*.md, and write them between the markers.

A row is the run file that `gracetune init` writes on a machine with a GPU of that size which
computes in fp8, planned with `gracetune plan` for the batch size of the run file, which `train`
uses. Run it after changes to the planner, to machine figures or to the presets of `init`; it takes
seven minutes.
`--check` only compares:

    .venv/bin/python scripts/first_lora_tables.py [--check]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gracetune.cli.main import main as gracetune
from gracetune.config.presets import RunRequest, choose_settings, run_file_text, size_preset
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[1] / "docs"
START, END = "<!-- table: scripts/first_lora_tables.py -->", "<!-- end of table -->"
HOST_MEMORY = "128GB"


@dataclass(frozen=True, slots=True)
class Row:
    """A machine: its name in the table, the memory that `init` is told, and the words of `plan`."""

    name: str
    memory_gb: float
    words: tuple[str, ...]


ROWS = (
    *(
        Row(
            f"{gb} GB, PCIe",
            gb,
            ("--machine", "h200-pcie", "--hbm", f"{gb}GB", "--host-memory", HOST_MEMORY),
        )
        for gb in (12, 16, 24, 48, 96)
    ),
    Row("GH200, 96 GB", 96, ("--machine", "gh200-96")),
    Row("DGX Spark, 128 GB shared", 96, ("--machine", "gb10")),
)
PAGES = {
    "first-lora-flux.md": RunRequest(
        folder="data", family="flux", goal="character", memory_gb=24, output_dir="run",
        num_samples=20, captions=("a man", "a man in a park"), trigger_word="ohwx", has_fp8=True,
    ),
    "first-lora-wan.md": RunRequest(
        folder="data", family="wan22", goal="video", memory_gb=24, output_dir="run",
        num_samples=20, kind="video", frames=(81, 81), captions=("a dance", "a jump"),
        has_fp8=True,
    ),
    "first-lora-edit.md": RunRequest(
        folder="data", family="qwen_image", goal="edit", memory_gb=24, output_dir="run",
        num_samples=40, captions=("make it winter", "make it night"), control_folder="before",
        control_images=("1.png", "2.png"), has_fp8=True,
    ),
}  # fmt: skip


def table(request: RunRequest) -> Iterator[str]:
    """Yield the lines of the table of one page."""
    yield (
        "| GPU | size | batch | frozen weights | GPU memory | host memory | blocks streamed | "
        "samples/s | time of the run |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in ROWS:
        yield _line(row, replace(request, memory_gb=row.memory_gb))


def _line(row: Row, request: RunRequest) -> str:
    size = size_preset(request)
    settings = choose_settings(request, size)
    values = {one.key: one.value for one in settings}
    found = _plan(run_file_text(settings, ["for a table"]), row.words, request.num_samples)
    shown = str(size.resolution) + (f", {size.frames} frames" if request.kind == "video" else "")
    batch = int(str(values["train.batch_size"]))
    accumulation = int(str(values.get("train.gradient_accumulation_steps", 1)))
    computed = str(values.get("model.frozen_compute", "bf16"))
    if found is None:
        return f"| {row.name} | {shown} | {batch} | {computed} | does not fit | | | | |"
    plan = found["plan"]
    streamed = sum(block["weights"] == "streamed" for block in plan["blocks"])
    steps = int(str(values["train.max_train_steps"]))
    seconds = steps * batch * accumulation / plan["samples_per_second"]
    batches = f"{batch} x {accumulation}" if accumulation > 1 else str(batch)
    return (
        f"| {row.name} | {shown} | {batches} | {computed} | "
        f"{format_bytes(plan['device_total'])} | {format_bytes(plan['host_total'])} | "
        f"{streamed} of {len(plan['blocks'])} | "
        f"{plan['samples_per_second']:.3g} | {format_seconds(seconds)} for {steps} steps |"
    )


def _plan(text: str, words: tuple[str, ...], samples: int) -> dict[str, Any] | None:
    """Return the plan of a run file as JSON; None if it does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(text, encoding="utf-8")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            fixed = ("--samples", str(samples), "--set", "plan.batch=fixed", "--json")
            code = gracetune(["plan", str(file), *words, *fixed])
    return json.loads(output.getvalue()) if code == 0 else None


def main() -> int:
    """Write the tables, or compare them with the pages; return 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--only", metavar="PAGE", choices=PAGES, help="one page")
    args = parser.parse_args()
    old = []
    for name in [args.only] if args.only else PAGES:
        page, lines = DOCS / name, list(table(PAGES[name]))
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(START)
        new = "\n".join([f"{before}{START}", "", *lines, ""])
        new += f"{END}{rest.partition(END)[2]}"
        if not args.check:
            page.write_text(new, encoding="utf-8")
        elif new != text:
            old.append(name)
    if old:
        print(f"{', '.join(old)}: out of date, run scripts/first_lora_tables.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
