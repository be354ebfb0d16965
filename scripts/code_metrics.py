"""Measure the shape of the code: files, sizes, imports, repeated names, files of one step.

    python scripts/code_metrics.py [--src src] [--step] [--markdown]

Prints a table with a column for the whole tree and, where there are several, one for each top-level
package. Every `.py` file under `--src` counts; symlinked folders (`src/gracetune/examples`) do not.

Definitions:

lines
    All lines, blank ones and comments included.
short modules
    Modules under 60 lines, without `__init__.py` and `__main__.py`.
share of import lines
    Lines that an `import` or `from` statement spans, at any depth, over all lines.
comments
    COMMENT tokens of `tokenize`: a comment of three lines counts three times, docstrings do not.
AST statements
    Nodes of type `ast.stmt`, at any depth: a `def`, an `if` and each statement inside count one
    each, and so does a docstring. `except` and `case` clauses are no statements; `elif` is an `if`.
getattr and hasattr calls
    Calls of the built-in functions, with and without a default, so that access by a computed name
    counts. Probes are those that ask whether an attribute exists: `hasattr`, or `getattr` with a
    default.
broad excepts
    Clauses that catch everything, `Exception` or `BaseException`, alone or in a tuple.
modules with one importer
    Modules and packages that exactly one other module imports, at any depth, also only for type
    checking. `from package import module` imports both. Names in strings (registries) do not count.
file names, class names used more than once
    Files other than `__init__.py`, and classes at any depth, whose name another one has too. Public
    class names have no leading underscore.
files executed in one steady demo step
    With `--step`, files with a function that is called between the call of `train_step` of step 33
    and that of step 34 of `examples/demo.json`, on any Python thread. That is past the warm-up and
    the garbage collection of step 20, within an epoch, without logging, validation or checkpoint.
    Generators count when they are resumed. Methods that `dataclass` generates belong to no file.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import statistics
import sys
import threading
import tokenize
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    Row = tuple[str, list[str]]
    Calls = Mapping[str, set[str]]

SHORT = 60
BROAD = ("Exception", "BaseException")
STEP_FUNCTION = "train_step"
MEASURED_STEP = 33
TOTAL_STEPS = 36
OVERRIDES = (
    f"train.max_train_steps={TOTAL_STEPS}",
    "train.checkpoint_every=1000",
    "optimizer.warmup_steps=10",
    "validation.every=0",
    "logging.every=1000",
)
"""Demo settings that keep warm-up, logging, validation and checkpoints out of the measured step."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path
    """Path of the file, relative to the source folder."""
    text: str

    @property
    def package(self) -> str:
        """Return the top-level package, or the module's own name if it is in no package."""
        return self.path.parts[0].removesuffix(".py")

    @property
    def name(self) -> str:
        """Return the dotted name; a package has the name of its folder."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_special(self) -> bool:
        """Return True for `__init__.py` and `__main__.py`, whose names Python prescribes."""
        return self.path.name in ("__init__.py", "__main__.py")

    @cached_property
    def num_lines(self) -> int:
        """Count lines."""
        return len(self.text.splitlines())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return every node of the syntax tree."""
        return list(ast.walk(ast.parse(self.text, str(self.path))))

    @cached_property
    def num_comments(self) -> int:
        """Count comment tokens."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)

    @cached_property
    def import_lines(self) -> set[int]:
        """Return the numbers of lines that belong to import statements."""
        imports = (n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom))
        return {line for n in imports for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}

    @cached_property
    def classes(self) -> list[str]:
        """Return the names of the classes."""
        return [node.name for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def attribute_calls(self) -> list[bool]:
        """Return, per getattr or hasattr call, True if it asks whether an attribute exists."""
        return [
            node.func.id == "hasattr" or len(node.args) > 2
            for node in self.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        ]

    @cached_property
    def num_broad_excepts(self) -> int:
        """Count `except` clauses that catch every exception."""
        return sum(isinstance(node, ast.ExceptHandler) and _is_broad(node) for node in self.nodes)

    def imports(self) -> Iterator[str]:
        """Yield the imported names that may be modules: `from a import b` gives `a` and `a.b`."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        folders = self.path.parent.parts
        above = folders[: len(folders) - node.level + 1]
        return ".".join([*above, *([node.module] if node.module else [])])


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(k is None or (isinstance(k, ast.Name) and k.id in BROAD) for k in kinds)


def read_modules(src: Path) -> list[Module]:
    """Read every `.py` file, without following links."""
    paths = (Path(folder) / name for folder, _, names in os.walk(src) for name in names)
    found = sorted(path for path in paths if path.suffix == ".py")
    return [Module(path.relative_to(src), path.read_text(encoding="utf-8")) for path in found]


def single_importer(modules: Sequence[Module]) -> dict[str, str]:
    """Return the modules that exactly one other module imports, mapped to that importer."""
    names = {module.name for module in modules}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in names.intersection(module.imports()) - {module.name}:
            importers[name].add(module.name)
    return {name: next(iter(by)) for name, by in sorted(importers.items()) if len(by) == 1}


def repeated_files(modules: Sequence[Module]) -> list[str]:
    """Return file names that occur in several folders."""
    counts = Counter(module.path.name for module in modules if not module.is_special)
    return sorted(name for name, count in counts.items() if count > 1)


def repeated_classes(modules: Sequence[Module]) -> list[str]:
    """Return class names that are defined more than once."""
    counts = Counter(name for module in modules for name in module.classes)
    return sorted(name for name, count in counts.items() if count > 1)


def short_modules(modules: Sequence[Module]) -> list[Module]:
    """Return the modules under 60 lines, without `__init__.py` and `__main__.py`."""
    return [m for m in modules if m.num_lines < SHORT and not m.is_special]


def measure(modules: Sequence[Module], single: Mapping[str, str]) -> dict[str, str]:
    """Return the metrics of some modules by label.

    `single` maps the modules of the whole tree that have one importer to that importer.
    """
    lines = sum(m.num_lines for m in modules) or 1  # a package may be one empty file
    largest = max(modules, key=lambda m: m.num_lines)
    classes = repeated_classes(modules)
    calls = [probe for m in modules for probe in m.attribute_calls]
    broad = sum(m.num_broad_excepts for m in modules)

    def per_thousand(count: int) -> str:
        return f"{1000 * count / lines:.2f} ({count})"

    return {
        "files": f"{len(modules)}",
        "lines": f"{lines / 1000:.1f} k",
        "lines per file, median": f"{statistics.median(m.num_lines for m in modules):g}",
        "largest file, lines": f"{largest.num_lines} ({largest.path.as_posix()})",
        f"modules under {SHORT} lines": f"{len(short_modules(modules))}",
        "share of import lines": f"{sum(len(m.import_lines) for m in modules) / lines:.1%}",
        "comments per 1,000 lines": f"{1000 * sum(m.num_comments for m in modules) / lines:.1f}",
        "AST statements": f"{sum(isinstance(n, ast.stmt) for m in modules for n in m.nodes):,}",
        "getattr and hasattr calls per 1,000 lines": per_thousand(len(calls)),
        "of these probes, per 1,000 lines": per_thousand(sum(calls)),
        "broad excepts per 1,000 lines": per_thousand(broad),
        "modules with one importer": f"{sum(m.name in single for m in modules)}",
        "file names used more than once": f"{len(repeated_files(modules))}",
        "class names used more than once": f"{len(classes)}",
        "public class names used more than once": f"{sum(c[0] != '_' for c in classes)}",
    }


class StepTracer:
    """Profile function that records the calls of one training step by file."""

    def __init__(self, src: Path, measured: int) -> None:
        self.calls: defaultdict[str, set[str]] = defaultdict(set)
        self.steps = 0
        self._prefix = f"{src}{os.sep}"
        self._measured = measured

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Handle one event of `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._prefix):
            return
        if code.co_name == STEP_FUNCTION:
            self.steps += 1
        if self.steps == self._measured and code.co_name != "<module>":
            self.calls[code.co_filename.removeprefix(self._prefix)].add(code.co_qualname)


def trace_step(src: Path) -> Calls:
    """Train the demo for a few steps; return the functions that one step calls, by file."""
    sys.path.insert(0, str(src))  # before an installed gracetune
    import gracetune
    from gracetune.cli.main import main as gracetune_main

    if not Path(gracetune.__file__).is_relative_to(src):
        raise SystemExit(f"gracetune is imported from {gracetune.__file__}, not from {src}.")
    tracer, output = StepTracer(src, MEASURED_STEP), io.StringIO()
    with TemporaryDirectory() as folder:
        words = ["train", str(src.parent / "examples" / "demo.json")]
        folders = (f"output_dir={folder}/run", f"datasets.0.instance_data_dir={folder}/data")
        for override in (*OVERRIDES, *folders):
            words += ["--set", override]
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        try:
            with redirect_stdout(output):
                code = gracetune_main(words)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if code or tracer.steps != TOTAL_STEPS:
        raise SystemExit(
            f"{output.getvalue()}\nThe demo ended with {code} after {tracer.steps} calls of "
            f"{STEP_FUNCTION}(); 0 and {TOTAL_STEPS} were expected."
        )
    return tracer.calls


def table(src: Path, calls: Calls | None) -> list[Row]:
    """Return the header and the rows: a label, then a cell for each column."""
    modules = read_modules(src)
    if not modules:
        raise SystemExit(f"{src} has no .py files. Name the source folder with --src.")
    packages = sorted({module.package for module in modules})
    single = single_importer(modules)
    columns = {"whole tree": measure(modules, single)}
    if len(packages) > 1:
        for package in packages:
            columns[package] = measure([m for m in modules if m.package == package], single)
    if calls is not None:
        for package, column in columns.items():
            files = [f for f in calls if package in ("whole tree", Path(f).parts[0])]
            column["files executed in one steady demo step"] = f"{len(files)}"
    labels = next(iter(columns.values()))
    rows: list[Row] = [("", list(columns))]
    rows += [(label, [column[label] for column in columns.values()]) for label in labels]
    return rows


def plain_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Align the columns for a terminal."""
    cells = [[label, *values] for label, values in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join(aligned).rstrip()


def markdown_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Write the rows as a Markdown table."""
    for index, (label, values) in enumerate(rows):
        yield f"| {' | '.join([label, *values])} |"
        if index == 0:
            yield f"|---|{'---|' * len(values)}"


def step_lines(calls: Calls, markdown: bool) -> Iterator[str]:
    """Yield lines that list the files of a step and the functions that ran in each."""
    yield ""
    yield "Files executed in one steady demo step:"
    yield ""
    for file, names in sorted(calls.items()):
        # Lambdas and generator expressions count as the function that they are defined in.
        outer = sorted({name.split(".<locals>.<")[0] for name in names})
        shown = ", ".join(name.replace(".<locals>", "") for name in outer)
        yield f"- `{file}`: {shown}" if markdown else f"  {file}: {shown}"


def main() -> None:
    """Measure the code and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--src", type=Path, default=Path("src"), help="source folder (src)")
    parser.add_argument(
        "--step", action="store_true", help="also train the demo and trace one step"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    args = parser.parse_args()
    src = args.src.resolve()
    calls = trace_step(src) if args.step else None
    rows = table(src, calls)
    lines = list(markdown_lines(rows) if args.markdown else plain_lines(rows))
    if calls is not None:
        lines += step_lines(calls, args.markdown)
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
