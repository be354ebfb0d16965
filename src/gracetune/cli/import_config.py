"""`gracetune import FILE...`: turn a config of SimpleTuner or ai-toolkit into a run file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.atomic_files import write_text
from gracetune.config.importers.detect import check_importable, import_files
from gracetune.config.importers.report import count_verdicts, format_report
from gracetune.config.load import load_imported
from gracetune.config.parse_text import FORMATS_BY_SUFFIX
from gracetune.config.schema import RunFile
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from gracetune.config.importers.report import ImportedRun

HELP = "turn a config of SimpleTuner or ai-toolkit into a run file, and explain every key"
MARKS = {"yaml": "# ", "json": "// "}
"""What starts a comment in each format; gracetune reads `//` comments in JSON."""


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


# Writing the run file, with comments


def format_run(imported: ImportedRun, text_format: str, names: str) -> str:
    """Return the text of a run file, `yaml` or `json`; `names` are the imported files."""
    mark = MARKS[text_format]
    lines = [f"Imported from {imported.tool} ({names}): {count_verdicts(imported)}."]
    for each in imported.keys:
        if each.verdict == "not supported":
            lines.append(f"Not supported: {each.key}: {each.text}")
    header = "".join(f"{mark}{line}\n" for line in lines)
    run = {name: imported.run[name] for name in RunFile.model_fields if name in imported.run}
    if text_format == "json":
        return f"{header}{json.dumps(run, indent=2, ensure_ascii=False)}\n"
    origins = {each.setting: each.key for each in imported.keys if each.setting}
    origins |= {each.setting: f"{imported.tool}'s default" for each in imported.defaults}
    return header + "".join(f"{line}\n" for line in _yaml_lines(run, origins))


def _yaml_lines(
    node: Mapping[str, object], origins: Mapping[str, str], path: str = "", indent: str = ""
) -> Iterator[str]:
    """Yield a section in block style. Values are written as JSON, which YAML contains."""
    for key, value in node.items():
        name = f"{path}.{key}" if path else key
        shown = key if key.replace("_", "").isalnum() else json.dumps(key)
        if isinstance(value, dict) and value:
            if not indent:
                yield ""
            yield f"{indent}{shown}:"
            yield from _yaml_lines(value, origins, name, f"{indent}  ")
        elif isinstance(value, list) and value and all(isinstance(e, dict) for e in value):
            yield f"\n{indent}{shown}:" if not indent else f"{indent}{shown}:"
            for index, entry in enumerate(value):
                first, *rest = _yaml_lines(entry, origins, f"{name}.{index}", f"{indent}    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        else:
            origin = origins.get(name, key)
            comment = "" if origin.rpartition(".")[2] == key else f"  # {origin}"
            yield f"{indent}{shown}: {json.dumps(value, ensure_ascii=False)}{comment}"
