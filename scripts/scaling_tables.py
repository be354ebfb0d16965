"""Compute the tables of docs/scaling.md with the planner, and write them between its markers.

Run it after changes to the planner or to machine figures; `--check` only compares:

    .venv/bin/python scripts/scaling_tables.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gracetune.cli.plan import add_arguments, strategy_inputs
from gracetune.config.schema import RunFile
from gracetune.plan.strategies import NOTICEABLE_WAIT, advise
from gracetune.plan.strategy_report import shown_name
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.plan.strategies import Strategy, StrategyAdvice, StrategyInputs

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
START, END = "<!-- tables: scripts/scaling_tables.py -->", "<!-- end of tables -->"
GPUS = (1, 8, 64, 512)
MACHINES = {"gh200-96": "GH200 96 GB", "h200-pcie": "H200 (HGX)"}
RUNS: dict[str, dict[str, Any]] = {
    "full training": {"model": {"family": "wan22", "dtype": "bfloat16"}},
    "LoRA of rank 32": {"model": {"family": "wan22"}, "adapter": {"rank": 32}},
}
COMMON: dict[str, Any] = {
    "datasets": [{"type": "folder", "instance_data_dir": "/data", "resolution": 1024}],
    "train": {"max_train_steps": 1000},
    "output_dir": "runs/scaling",
}
SAMPLES = 10_000
SHOWN_WHOLE = 100
"""Speed, in samples per second, from which it is shown without decimals."""
NAMES = (
    "one GPU",
    "planned ranks",
    "FSDP2",
    "HSDP",
    "hybrid",
    "FSDP2 + offload",
)


def tables() -> Iterator[str]:
    """Yield the lines of all tables."""
    for run_name, settings in RUNS.items():
        run = RunFile.model_validate(COMMON | settings)
        for machine, title in MACHINES.items():
            yield f"### Wan 2.2 A14B, {run_name}, on {title}"
            yield ""
            yield from machine_table(run, machine)
            yield ""


def machine_table(run: RunFile, machine: str) -> Iterator[str]:
    """Yield the table of one run on one kind of machine: a column for each number of GPUs."""
    found: dict[int, tuple[StrategyAdvice, StrategyInputs]] = {}
    cost_model = None
    for count in GPUS:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        words = ["run.json", "--machine", machine, "--gpus", str(count), "--samples", str(SAMPLES)]
        args = parser.parse_args(words)
        inputs, _ = strategy_inputs(run, args, _never, _never, cost_model)
        cost_model = inputs.model
        found[count] = advise(inputs), inputs
    yield "| strategy | " + " | ".join(f"{n} GPU{'s' if n > 1 else ''}" for n in GPUS) + " |"
    yield "|---" * (1 + len(GPUS)) + "|"
    for name in NAMES:
        columns = [_find(advice, name) for advice, _ in found.values()]
        if any(columns):
            shown = next(shown_name(one) for one in columns if one is not None)
            yield f"| {shown} | " + " | ".join(map(_cell, columns)) + " |"
    chosen = [advice.recommended for advice, _ in found.values()]
    names = ["nothing fits" if one is None else one.name for one in chosen]
    yield "| **recommended** | " + " | ".join(names) + " |"
    staging = [
        f"{format_seconds(advice.staging_s)} for {format_bytes(inputs.staged_nbytes)}"
        for advice, inputs in found.values()
    ]
    yield "| staging of each machine | " + " | ".join(staging) + " |"


def _find(advice: StrategyAdvice, name: str) -> Strategy | None:
    return next((one for one in advice.strategies if one.name == name), None)


def _cell(strategy: Strategy | None) -> str:
    if strategy is None:
        return "-"
    if strategy.plan is None:
        return "does not fit"
    speed = strategy.samples_per_second
    text = f"{speed:,.0f}" if speed >= SHOWN_WHOLE else f"{speed:.3g}"
    if strategy.name == "HSDP":
        text += f" in {strategy.choice.num_shards} shards"
    wait = strategy.plan.seconds.wait_network / strategy.plan.seconds.step
    if wait < NOTICEABLE_WAIT:
        return f"{text}; {strategy.limit}"
    limit = "" if strategy.limit == "network" else f"{strategy.limit}, "
    return f"{text}; {limit}network {wait:.0%}"


def _never(*_: object) -> NoReturn:
    raise AssertionError("the machine is known by name")


def main() -> int:
    """Write the tables, or compare them with the page; return 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    new = "\n".join([f"{before}{START}", "", *tables()]) + f"{END}{after}"
    if not check:
        PAGE.write_text(new)
    elif new != text:
        print(f"{PAGE} is out of date: run scripts/scaling_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
