"""SimpleTuner's own tests, without our hooks and with them: what passes without must pass with.

    python tests/hosts/run_upstream_suite.py FOLDER [MODULE...]

FOLDER has the `tests` of its source distribution; without modules, all of them are run. Results are
kept beside it as they come, and what is already there is not run again, unless the hooks have
changed since. Tests are compared one by one, in modules that fail on their own too.
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

STEADY = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Without the first, bf16 dies of SIGILL under some hypervisors: with hooks as without them."""
if __name__ == "__main__":  # before torch is loaded, which reads them once
    os.environ.update({**STEADY, **os.environ})

SRC = Path(__file__).resolve().parents[2] / "src"
sys.path.insert(0, str(SRC))

from upstream_modules import FORK, FRESH, TIMED_OUT, Ran, Runner, run_here, warm  # noqa: E402

from gracetune.hosts.simpletuner import hooks as needs  # noqa: E402
from gracetune.hosts.simpletuner.__main__ import make_plugin  # noqa: E402
from gracetune.hosts.simpletuner.hooks import install  # noqa: E402
from gracetune.hosts.simpletuner.webui import install_webui  # noqa: E402

WARM = ("torch", "diffusers", "transformers", "accelerate", "peft", "simpletuner")
STOCK = "stock"
"""The stamp of runs without hooks: they do not change when the hooks do."""
PATIENCE = 4
"""Times as long as a module takes at best: 53 s on an idle machine were 233 s on a busy one."""
TRIES = 3
"""Of a module that does not end, each with twice the time. `test_flux3_image` hangs now and then,
with hooks as without: torch 2.13 frees a DDP reducer under the GIL and waits there for a thread of
gloo's, which waits for the GIL (pytorch/pytorch#56297)."""


def hook() -> None:
    """As the entries of the trainer and of the WebUI do it."""
    install(make_plugin(), import_module)
    install_webui(dict(os.environ), import_module)


def stamp_of_hooks() -> str:
    """Changes with every line of what is hooked in."""
    hosts = SRC / "gracetune" / "hosts"
    digest = hashlib.sha256()
    for path in sorted([*hosts.glob("*.py"), *(hosts / "simpletuner").glob("*.py")]):
        if path.name != "versions.py":  # a record, nothing that runs
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass
class Book:
    """Every run so far, in a file that grows by a line a run."""

    path: Path
    stamp: str
    least_s: float = 300
    """That a module has for its first try."""
    runs: list[Ran] = field(default_factory=list)

    def read(self) -> None:
        """Without what timed out under a shorter limit: it may have had a busy machine."""
        longest_s = self.least_s * 2 ** (TRIES - 1)
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            entry = json.loads(line)
            cut_short = entry["ended"] == TIMED_OUT and entry["seconds"] < longest_s
            if entry.pop("stamp") in (STOCK, self.stamp) and not cut_short:
                self.runs.append(Ran(**{**entry, "passed": tuple(entry["passed"])}))

    def add(self, ran: Ran) -> None:
        self.runs.append(ran)
        with self.path.open("a") as file:
            file.write(ran.line(self.stamp if ran.hooks else STOCK) + "\n")

    def limit_s(self, module: str) -> float:
        """What a module may take at first, by what it took when it came to its end."""
        ended = (each for each in self.runs if each.module == module and each.ended == "done")
        return max(self.least_s, PATIENCE * min((each.seconds for each in ended), default=0))

    def of(self, module: str, hooks: bool, way: str) -> list[Ran]:
        wanted = (module, hooks, way)
        return [each for each in self.runs if (each.module, each.hooks, each.way) == wanted]


def lost(without: Iterable[Ran], with_hooks: Iterable[Ran]) -> set[str]:
    """Tests that pass whenever there are no hooks, and never with them."""
    stock = set.intersection(*({*each.passed} for each in without))
    return stock - {name for each in with_hooks for name in each.passed}


def run(module: str, hooks: bool, way: str, book: Book, runner: Runner) -> None:
    """To its end, if it has one."""
    limit_s = book.limit_s(module)
    for _ in range(TRIES):
        ran = runner.run(module, hooks, way, limit_s)
        if ran.ended != TIMED_OUT:
            break
        limit_s *= 2
    book.add(ran)


def settle(module: str, book: Book, runner: Runner) -> None:
    """Run what is missing of a module; what differs is run again, to tell luck from hooks."""
    _compare(module, FORK, book, runner)
    forked = book.of(module, False, FORK)[0]
    if forked.wholly_passed:
        return
    if not book.of(module, False, FRESH):
        run(module, False, FRESH, book, runner)
    if {*book.of(module, False, FRESH)[0].passed} - {*forked.passed}:
        _compare(module, FRESH, book, runner)


def _compare(module: str, way: str, book: Book, runner: Runner) -> None:
    for hooks in (False, True):
        if not book.of(module, hooks, way):
            run(module, hooks, way, book, runner)
    with_hooks = book.of(module, True, way)
    if len(with_hooks) == 1 and lost(book.of(module, False, way), with_hooks):
        run(module, False, way, book, runner)
        run(module, True, way, book, runner)


@dataclass(frozen=True)
class Verdict:
    module: str
    kind: str
    """`passed`, `same` (what fails, fails without hooks too), `unsteady`, `worse`."""
    num_passed: int
    detail: str


def judge(module: str, book: Book) -> Verdict:
    """By the way in which the module passes most on its own."""
    ways = [way for way in (FORK, FRESH) if book.of(module, True, way)]
    way = max(ways, key=lambda each: len(book.of(module, False, each)[0].passed))
    without, with_hooks = book.of(module, False, way), book.of(module, True, way)
    num_passed = len(without[0].passed)
    missing = lost(without, with_hooks)
    if missing:
        return Verdict(module, "worse", num_passed, ", ".join(sorted(missing)))
    if lost(without[:1], with_hooks[:1]):
        names = sorted(lost(without[:1], with_hooks[:1]))
        return Verdict(module, "unsteady", num_passed, ", ".join(names))
    if without[0].wholly_passed:
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
        "--limit", type=float, default=Book.least_s, help="least seconds for a module"
    )
    parser.add_argument("--fresh", nargs=2, metavar=("NOTES", "HOOKS"), help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    out = sys.stdout  # SimpleTuner puts colours into its own
    folder = args.folder.resolve()
    sys.path.insert(1, str(folder))
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{SRC}"
    if args.fresh:
        run_here(args.modules[0], Path(args.fresh[0]), hook if args.fresh[1] == "with" else None)
        return 0

    def fresh(module: str, notes: Path, hooks: bool) -> list[str]:
        words = [sys.executable, __file__, str(folder), module, "--fresh", str(notes)]
        return [*words, "with" if hooks else "without"]

    found = sorted(path.stem for path in (folder / "tests").glob("test_*.py"))
    modules = args.modules or found
    book = Book(folder / "results.jsonl", stamp_of_hooks(), args.limit)
    book.read()
    os.chdir(folder)  # SimpleTuner leaves its log where it is imported
    warm(
        [
            *WARM,
            *{
                need.module: None
                for need in (*needs.REQUIRED_SYMBOLS, *needs.WEBUI_REQUIRED_SYMBOLS)
            },
        ]
    )
    runner = Runner(folder, folder / "logs", hook, fresh)
    verdicts = []
    for module in modules:
        settle(module, book, runner)
        verdicts.append(judge(module, book))
        print(f"{module}: {verdicts[-1].kind} {verdicts[-1].detail}".rstrip(), file=out, flush=True)
    print(*report(verdicts), sep="\n", file=out)
    return 1 if any(each.kind == "worse" for each in verdicts) else 0


def report(verdicts: list[Verdict]) -> list[str]:
    """The counts."""
    names = {
        "passed": "pass without hooks and with them",
        "same": "fail on this machine without hooks, and pass the same tests with them",
        "unsteady": "differ from run to run without a pattern",
        "worse": "pass tests without hooks that fail with them",
    }
    counts = [f"{sum(each.kind == kind for each in verdicts):5} {names[kind]}" for kind in names]
    tests = sum(each.num_passed for each in verdicts)
    return ["", f"{len(verdicts)} modules; {tests} tests pass without hooks", *counts]


if __name__ == "__main__":
    sys.exit(main())
