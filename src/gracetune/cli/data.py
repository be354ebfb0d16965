"""`gracetune data check FOLDER|RUN`: print what training would see of a dataset.

It reads all files with the code of a training run, but needs no model and does not load torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cli.main import read_run
from gracetune.config.dataset_schema import MIN_RESOLUTION, DatasetSection
from gracetune.config.parse_text import FORMATS_BY_SUFFIX
from gracetune.config.presets import FAMILY_PRESETS, WAN_5B
from gracetune.data.dataset_report import (
    check_dataset,
    folder_kinds,
    is_local_folder,
    report_json,
    report_lines,
)
from gracetune.errors import ConfigError
from gracetune.events.console import console_sink

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from gracetune.config.schema import ModelSection
    from gracetune.data.dataset_report import DatasetReport
    from gracetune.events.dispatcher import Emit

    IsTooLong = Callable[[Sequence[str]], list[bool]]

HELP = "Look at datasets as training would see them."
DEFAULT_FAMILY = "flux"
"""Family whose bucket sizes are used for a folder if the user names none; most families share
them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand `check` and its arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = (
        "list sizes, buckets, captions, duplicates and broken files; exit code 1: a run would stop"
    )
    check = actions.add_parser("check", help=text, description=text)
    check.add_argument(
        "where", metavar="FOLDER|RUN", help="a folder or other dataset, or a run file"
    )
    check.add_argument(
        "--family", choices=sorted(FAMILY_PRESETS), help="model family, for the sizes of buckets"
    )
    check.add_argument("--resolution", type=int, metavar="N", help="resolution of the buckets")
    check.add_argument("--type", choices=("image", "video", "audio"), help="medium of the samples")
    check.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Check all datasets and print a report; return 1 if a training run would stop."""
    emit = console_sink(sys.stderr, is_terminal=False).handle
    is_run_file = Path(args.where).suffix.lower() in FORMATS_BY_SUFFIX
    reports = _check_run(args, emit) if is_run_file else [_check_folder(args, emit)]
    problems = [problem for report in reports for problem in report.problems]
    if args.json:
        answer = {"datasets": list(map(report_json, reports)), "would_stop": bool(problems)}
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        for report in reports:
            print(*report_lines(report), "", sep="\n")
        if not is_run_file and reports[0].kind == "image":
            family = args.family or DEFAULT_FAMILY
            print(f"Buckets are those of {family}; --family and --resolution choose others.")
        found = "problem" if len(problems) == 1 else "problems"
        print(f"A run would stop: {len(problems)} {found}." if problems else "The data is fine.")
    return 1 if problems else 0


def _check_run(args: argparse.Namespace, emit: Emit) -> list[DatasetReport]:
    for option in ("family", "resolution", "type"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option} is for folders, but {args.where} is a run file, which sets it. Remove "
                f"--{option}."
            )
    run_file = read_run(args.where)
    if not run_file.datasets:
        raise ConfigError(f"{args.where} has no datasets. Add one with its instance_data_dir.")
    step = pixel_step(run_file.model)
    output = Path(run_file.output_dir)
    too_long = find_tokenizer(run_file.model)
    return [
        check_dataset(section, index, step, emit, output, run_file.seed, too_long)
        for index, section in enumerate(run_file.datasets)
    ]


def _check_folder(args: argparse.Namespace, emit: Emit) -> DatasetReport:
    family = args.family or DEFAULT_FAMILY
    kind = args.type or find_kind(args.where)
    preset = FAMILY_PRESETS[family]
    resolution = args.resolution
    if resolution is None:
        resolution = max(size.resolution for size in preset.sizes.values())
    elif resolution < MIN_RESOLUTION:
        raise ConfigError(f"--resolution is {resolution}; it must be at least {MIN_RESOLUTION}.")
    settings: dict[str, object] = {
        "id": Path(args.where).name or "data",
        "dataset_type": kind,
        "instance_data_dir": args.where,
        "resolution": resolution,
    }
    section = DatasetSection.model_validate(settings)
    return check_dataset(section, 0, preset.pixel_step, emit)


def find_kind(where: str) -> str:
    """Return the medium of most files of a folder; "image" for other datasets."""
    if not is_local_folder(where) or not Path(where).expanduser().is_dir():
        return "image"
    return next(iter(folder_kinds(Path(where).expanduser())), "image")


def pixel_step(model: ModelSection) -> int:
    """Return the number of pixels that edges are multiples of, without loading the model."""
    name, step = WAN_5B
    if model.path is not None and name in model.path:
        return step
    preset = FAMILY_PRESETS.get(model.family)
    if preset is None:
        raise ConfigError(
            f"model.family is {model.family!r}, which another package provides; its bucket sizes "
            "are known to training only. Check the folder of the dataset instead."
        )
    return preset.pixel_step


def find_tokenizer(model: ModelSection) -> IsTooLong | None:
    """Return a function that tells which captions have more tokens than the model reads.

    Returns None if the tokenizer is neither in a local folder nor in the cache of the hub.
    """
    preset = FAMILY_PRESETS[model.family]
    if model.path is None or preset.tokenizer is None:
        return None
    folder, length = preset.tokenizer
    file: Path | None = Path(model.path).expanduser() / folder / "tokenizer.json"
    if file is not None and not file.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(model.path, f"{folder}/tokenizer.json")
        except HFValidationError:  # a path, not a name on the hub
            found = None
        file = Path(found) if isinstance(found, str) else None
    if file is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def is_too_long(captions: Sequence[str]) -> list[bool]:
        return [len(found.ids) > length for found in tokenizer.encode_batch(list(captions))]

    return is_too_long
