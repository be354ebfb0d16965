"""`gracetune check gradients RUN`: compare a run's gradients and updates with plain blocks."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gracetune.atomic_files import check_writable
from gracetune.cli.main import add_run_file_arguments, read_run
from gracetune.config.checks import check_run
from gracetune.config.environment import keep_compiled_graphs, prefer_expandable_segments
from gracetune.errors import ConfigError
from gracetune.train.preflight import check_before_torch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from gracetune.config.schema import RunFile
    from gracetune.events.types import Event
    from gracetune.train.gradient_check import BlockReport, GradientReport

HELP = "Check that a run computes the right numbers on this machine."
COLUMNS = ("block", "plan", "output", "input gradient", "weight gradient", "update")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand `gradients` and its arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    gradients = actions.add_parser(
        "gradients",
        help="compare gradients and updates with blocks that are not streamed, offloaded, "
        "recomputed, compiled or fused; exit code 1 if they differ by more than rounding",
    )
    add_run_file_arguments(gradients)
    gradients.add_argument(
        "--blocks",
        type=int,
        metavar="N",
        help="compare only N blocks, spread evenly over the model (default: all)",
    )
    gradients.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Check the gradients of a run file, and print a table by block and kind of tensor."""
    if args.blocks is not None and args.blocks < 1:
        raise ConfigError(f"--blocks is {args.blocks}, but must be 1 or more. Raise it.")
    run_file = read_run(args.run_file, args.overrides)
    check_run(run_file)
    check_before_torch(run_file, "none")
    prefer_expandable_segments()  # before the imports below load torch
    keep_compiled_graphs()
    report = _check(run_file, args.blocks)
    if report is None:  # the main rank prints
        return 0
    if args.json:
        print(json.dumps(to_json(report), indent=2))
    else:
        print(*table_lines(report), sep="\n")
    return 0 if report.passed else 1


def _check(run_file: RunFile, num_blocks: int | None) -> GradientReport | None:
    """Build the session of a run as `train` does, and check it; None on ranks but the main one."""
    from gracetune.distributed.layout import build_layout
    from gracetune.distributed.ranks import connect_ranks
    from gracetune.events.console import console_sink
    from gracetune.events.run_control import RunControl, reserve_folder
    from gracetune.train.accelerator import start_accelerator
    from gracetune.train.build import build_session
    from gracetune.train.gradient_check import check_gradients
    from gracetune.train.run import SignalHandler

    folder = Path(run_file.output_dir)
    train = run_file.train.model_copy(update={"check_gradients": True})
    run_file = run_file.model_copy(update={"train": train})
    with ExitStack() as stack:
        accelerator = start_accelerator(run_file)
        # Progress goes to stderr, so that stdout has nothing but the answer.
        console = console_sink(sys.stderr, is_terminal=False)

        def emit(event: Event) -> None:
            if accelerator.is_main_process:
                console.handle(event)

        check_writable(folder)
        if accelerator.is_main_process:
            stack.enter_context(reserve_folder(folder, lambda text: print(text, file=sys.stderr)))
        ranks = connect_ranks(run_file.distributed.timeout_s)
        session = stack.enter_context(
            closing(
                build_session(
                    run_file,
                    accelerator,
                    emit,
                    RunControl(folder),
                    SignalHandler(),
                    checked_blocks=lambda count: spread(count, num_blocks),
                    layout=build_layout(run_file.distributed, ranks),
                )
            )
        )
        stack.callback(session.pipeline.close)
        report = check_gradients(session)
    accelerator.end_training()
    return report if accelerator.is_main_process else None


def spread(count: int, limit: int | None) -> Sequence[int]:
    """Return positions among `count` blocks: all, or at most `limit` that are evenly spaced."""
    if limit is None or limit >= count:
        return range(count)
    if limit == 1:
        return [count // 2]
    return [round(index * (count - 1) / (limit - 1)) for index in range(limit)]


def to_json(report: GradientReport) -> dict[str, Any]:
    """Return a report as plain data."""
    return {
        "passed": report.passed,
        "notes": report.notes,
        "blocks": [
            {
                "block": block.name,
                "plan": block.placement,
                "passed": block.passed,
                "update_error": block.update_error,
                "reduction_error": block.reduction_error,
                **{
                    result.kind: {
                        "error": result.error,
                        "plain_error": result.eager_error,
                        "limit": result.limit,
                        "worst_tensor": result.worst_tensor,
                        "worst_ratio": result.worst_ratio,
                        "fp8_cosine": result.fp8_cosine,
                        "passed": result.passed,
                    }
                    for result in block.results
                },
            }
            for block in report.blocks
        ],
    }


def table_lines(report: GradientReport) -> Iterator[str]:
    """Yield the lines of a table with a row for each block, and a summary."""
    from gracetune.train.block_check import MAX_ERROR_RATIO, MIN_FP8_COSINE, MIN_LIMIT

    rows = [COLUMNS, *(_row(block) for block in report.blocks)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(COLUMNS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
    yield ""
    yield "Each pair: error of the run / error of a plain block in the same types."
    yield f"Limit: {MAX_ERROR_RATIO:g} times the plain block's error, at least {MIN_LIMIT:g}."
    yield "Update: difference from an optimizer whose state is all on the device."
    if any(result.fp8_cosine is not None for block in report.blocks for result in block.results):
        yield "fp8: the plain block computes in fp8, too."
        yield f"The cosine of gradients in fp8 and bf16 must be at least {MIN_FP8_COSINE}."
    yield from report.notes
    failed = [block for block in report.blocks if not block.passed]
    for block in failed:
        yield from (f"FAILED {block.name}: {reason}" for reason in block.failures())
    if not report.blocks:
        yield "failed: no block was compared"
        return
    share = max(block.ratio for block in report.blocks) / MAX_ERROR_RATIO
    verdict = f"{len(failed)} of {len(report.blocks)} blocks failed" if failed else "passed"
    yield f"{verdict}: {len(report.blocks)} blocks; the largest error is {share:.0%} of its limit"


def _row(block: BlockReport) -> tuple[str, ...]:
    cells = [f"{result.error:.1e} / {result.eager_error:.1e}" for result in block.results]
    cosines = [r.fp8_cosine for r in block.results if r.fp8_cosine is not None]
    if cosines:
        cells[-1] += f" (cosine {min(cosines):.4f})"
    update = "-" if block.update_error is None else f"{block.update_error:.1e}"
    name = block.name if block.passed else f"{block.name} FAILED"
    return (name, block.placement, *cells, update)
