"""Run SimpleTuner's own tests with and without our hooks: what passes without must pass with them.

    python tests/hosts/run_upstream_suite.py FOLDER [MODULE...]

FOLDER has the `tests` of its source distribution; without MODULE, all modules are run. Results are
stored in FOLDER as they come, and are reused until the hooks change. Results are compared test by
test, also in modules that fail without hooks.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

FIXED_ENVIRONMENT = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Without the first, bf16 crashes with SIGILL under some hypervisors."""
if __name__ == "__main__":  # before torch is imported, which reads them once
    os.environ.update({**FIXED_ENVIRONMENT, **os.environ})

SRC = Path(__file__).resolve().parents[2] / "src"
sys.path.insert(0, str(SRC))

from upstream_modules import FORK, FRESH, TIMED_OUT, ModuleRun, Runner, import_all, run_here  # noqa: E402

from gracetune.hosts.simpletuner import hooks as simpletuner_hooks  # noqa: E402
from gracetune.hosts.simpletuner.__main__ import make_plugin  # noqa: E402
from gracetune.hosts.simpletuner.hooks import install_hooks  # noqa: E402
from gracetune.hosts.simpletuner.webui import install_webui  # noqa: E402

PRELOADED = ("torch", "diffusers", "transformers", "accelerate", "peft", "simpletuner")
STOCK = "stock"
"""The stamp of runs without hooks, which stay valid when the hooks change."""
TIME_LIMIT_FACTOR = 4
"""Time limit of a module, in multiples of its fastest run: 53 s can be 233 s on a busy machine."""
MAX_TRIES = 3
"""Tries of a module that times out, each with twice the time. `test_flux3_image` sometimes hangs,
with and without hooks: torch 2.13 frees a DDP reducer while it holds the GIL and waits for a thread
of gloo, which waits for the GIL (pytorch/pytorch#56297)."""


def hook() -> None:
    """Set all hooks, as the entry points of the trainer and of the WebUI do."""
    install_hooks(make_plugin(), import_module)
    install_webui(dict(os.environ), import_module)


def stamp_of_hooks() -> str:
    """Return a digest of the hooks' source code."""
    hosts = SRC / "gracetune" / "hosts"
    digest = hashlib.sha256()
    for path in sorted([*hosts.glob("*.py"), *(hosts / "simpletuner").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass
class ResultStore:
    """All runs so far, in a file with one line per run."""

    path: Path
    stamp: str
    least_s: float = 300
    """The least time limit of a module's first try, in seconds."""
    runs: list[ModuleRun] = field(default_factory=list)

    def read(self) -> None:
        """Read the stored runs, except time-outs with a shorter limit than today's."""
        longest_s = self.least_s * 2 ** (MAX_TRIES - 1)
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            entry = json.loads(line)
            cut_short = entry["ended"] == TIMED_OUT and entry["seconds"] < longest_s
            if entry.pop("stamp") in (STOCK, self.stamp) and not cut_short:
                self.runs.append(ModuleRun(**{**entry, "passed": tuple(entry["passed"])}))

    def add(self, ran: ModuleRun) -> None:
        self.runs.append(ran)
        with self.path.open("a") as file:
            file.write(ran.line(self.stamp if ran.hooks else STOCK) + "\n")

    def limit_s(self, module: str) -> float:
        """Return the time limit of a module's first try, from its fastest complete run."""
        ended = (each for each in self.runs if each.module == module and each.ended == "done")
        return max(
            self.least_s, TIME_LIMIT_FACTOR * min((each.seconds for each in ended), default=0)
        )

    def find(self, module: str, hooks: bool, way: str) -> list[ModuleRun]:
        key = (module, hooks, way)
        return [each for each in self.runs if (each.module, each.hooks, each.way) == key]


def lost(without: Iterable[ModuleRun], with_hooks: Iterable[ModuleRun]) -> set[str]:
    """Return the tests that always pass without hooks and never with them."""
    stock = set.intersection(*({*each.passed} for each in without))
    return stock - {name for each in with_hooks for name in each.passed}


def run(module: str, hooks: bool, way: str, store: ResultStore, runner: Runner) -> None:
    """Run a module, with more time after each time-out, and store the result."""
    limit_s = store.limit_s(module)
    for _ in range(MAX_TRIES):
        ran = runner.run(module, hooks, way, limit_s)
        if ran.ended != TIMED_OUT:
            break
        limit_s *= 2
    store.add(ran)


def run_missing(module: str, store: ResultStore, runner: Runner) -> None:
    """Run the missing runs of a module, and repeat runs that differ, to recognise flaky tests."""
    _run_both(module, FORK, store, runner)
    forked = store.find(module, False, FORK)[0]
    if forked.all_passed:
        return
    if not store.find(module, False, FRESH):
        run(module, False, FRESH, store, runner)
    if {*store.find(module, False, FRESH)[0].passed} - {*forked.passed}:
        _run_both(module, FRESH, store, runner)


def _run_both(module: str, way: str, store: ResultStore, runner: Runner) -> None:
    for hooks in (False, True):
        if not store.find(module, hooks, way):
            run(module, hooks, way, store, runner)
    with_hooks = store.find(module, True, way)
    if len(with_hooks) == 1 and lost(store.find(module, False, way), with_hooks):
        run(module, False, way, store, runner)
        run(module, True, way, store, runner)


@dataclass(frozen=True)
class Verdict:
    module: str
    kind: str
    """`passed`, `same` (all failures also occur without hooks), `unsteady` or `worse`."""
    num_passed: int
    detail: str


def compare(module: str, store: ResultStore) -> Verdict:
    """Compare the runs of a module, started in the way in which more tests pass without hooks."""
    ways = [way for way in (FORK, FRESH) if store.find(module, True, way)]
    way = max(ways, key=lambda each: len(store.find(module, False, each)[0].passed))
    without, with_hooks = store.find(module, False, way), store.find(module, True, way)
    num_passed = len(without[0].passed)
    missing = lost(without, with_hooks)
    if missing:
        return Verdict(module, "worse", num_passed, ", ".join(sorted(missing)))
    if lost(without[:1], with_hooks[:1]):
        names = sorted(lost(without[:1], with_hooks[:1]))
        return Verdict(module, "unsteady", num_passed, ", ".join(names))
    if without[0].all_passed:
        return Verdict(module, "passed", num_passed, "")
    others = without[0].others
    kinds = {kind: [*others.values()].count(kind) for kind in ("failed", "error")}
    parts = [f"{count} {kind}" for kind, count in kinds.items() if count]
    if without[0].ended != "done":
        parts.insert(0, without[0].ended)
    return Verdict(module, "same", num_passed, ", ".join(parts) or "has no tests")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("modules", nargs="*")
    parser.add_argument(
        "--limit",
        type=float,
        default=ResultStore.least_s,
        help="least time limit of a module in seconds",
    )
    parser.add_argument("--fresh", nargs=2, metavar=("RECORDS", "HOOKS"), help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    out = sys.stdout  # SimpleTuner replaces sys.stdout by one with colours
    folder = args.folder.resolve()
    sys.path.insert(1, str(folder))
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{SRC}"
    if args.fresh:
        run_here(args.modules[0], Path(args.fresh[0]), hook if args.fresh[1] == "with" else None)
        return 0

    def fresh(module: str, records: Path, hooks: bool) -> list[str]:
        words = [sys.executable, __file__, str(folder), module, "--fresh", str(records)]
        return [*words, "with" if hooks else "without"]

    found = sorted(path.stem for path in (folder / "tests").glob("test_*.py"))
    if unknown := sorted({*args.modules} - {*found}):
        parser.error(f"{folder / 'tests'} has no {', '.join(unknown)}")
    modules = args.modules or found
    store = ResultStore(folder / "results.jsonl", stamp_of_hooks(), args.limit)
    store.read()
    os.chdir(folder)  # SimpleTuner writes its log to the current folder
    import_all(
        [
            *PRELOADED,
            *{
                symbol.module: None
                for symbol in (
                    *simpletuner_hooks.REQUIRED_SYMBOLS,
                    *simpletuner_hooks.WEBUI_REQUIRED_SYMBOLS,
                )
            },
        ]
    )
    runner = Runner(folder, folder / "logs", hook, fresh)
    verdicts = []
    for module in modules:
        run_missing(module, store, runner)
        verdicts.append(compare(module, store))
        print(f"{module}: {verdicts[-1].kind} {verdicts[-1].detail}".rstrip(), file=out, flush=True)
    print(*report(verdicts), sep="\n", file=out)
    return 1 if any(each.kind == "worse" for each in verdicts) else 0


def report(verdicts: list[Verdict]) -> list[str]:
    """Count the modules by verdict."""
    names = {
        "passed": "pass with and without hooks",
        "same": "fail on this machine without hooks, and pass the same tests with them",
        "unsteady": "differ from run to run, with and without hooks",
        "worse": "pass tests without hooks that fail with them",
    }
    counts = [f"{sum(each.kind == kind for each in verdicts):5} {names[kind]}" for kind in names]
    tests = sum(each.num_passed for each in verdicts)
    return ["", f"{len(verdicts)} modules; {tests} tests pass without hooks", *counts]


if __name__ == "__main__":
    sys.exit(main())
