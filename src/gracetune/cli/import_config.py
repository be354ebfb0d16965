"""`gracetune import FILE...`: turn a config of SimpleTuner or ai-toolkit into a run file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.atomic_files import write_text
from gracetune.config.importers.detect import check_importable, import_files
from gracetune.config.importers.report import format_report
from gracetune.config.importers.write_run import format_run
from gracetune.config.load import load_imported
from gracetune.config.parse_text import FORMATS_BY_SUFFIX
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    import argparse

HELP = "turn a config of SimpleTuner or ai-toolkit into a run file, and explain every key"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gracetune import`."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="SimpleTuner's config.json, config.toml or config.env (and the files that it names, "
        "if they are not where it says), or a job of ai-toolkit",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="RUN",
        type=Path,
        help="run file to write, .yaml or .json; without it, the run file is printed to stdout and "
        "the report to stderr",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report of every key, and write the run file."""
    output: Path | None = args.output
    text_format = "yaml" if output is None else FORMATS_BY_SUFFIX.get(output.suffix.lower())
    if text_format not in ("yaml", "json"):
        raise ConfigError(f"--output is {str(output)!r}; it must end in .yaml or .json.")
    if output is not None and output.exists():
        raise ConfigError(f"{output} already exists. Choose another name, or remove it.")
    imported = import_files(args.files)
    report = format_report(imported)
    print(report, file=sys.stderr if output is None else sys.stdout)
    check_importable(imported)
    text = format_run(imported, text_format, ", ".join(map(str, args.files)))
    load_imported(imported, str(args.files[0]))
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)
        results = f"Results go to {imported.run['output_dir']}."
        print(f"\nWrote {output}. {results} Train it with: gracetune train {output}")
    return 0
