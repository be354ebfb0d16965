"""SimpleTuner's own tests, without our hooks and with them: what passes without must pass with.

    python tests/hosts/run_upstream_suite.py FOLDER [MODULE...]

FOLDER has the `tests` of its source distribution. Without modules, all of them are run.
"""

# ruff: noqa: T201  what it prints is its report

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
HOOKED = """
import sys, unittest
from importlib import import_module
from gracetune.hosts.simpletuner.__main__ import make_plugin
from gracetune.hosts.simpletuner.hooks import install
install(make_plugin(), import_module)
unittest.main(module=sys.argv.pop(1))
"""
PLAIN = "import sys, unittest\nunittest.main(module=sys.argv.pop(1))\n"


def run(folder: Path, module: str, code: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, f"tests.{module}"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{SRC}"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    except subprocess.TimeoutExpired:
        return 124, "timed out"
    return done.returncode, done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    found = sorted(path.stem for path in (args.folder / "tests").glob("test_*.py"))
    modules = args.modules or found
    worse = []

    def both(module: str) -> tuple[str, int, int, str]:
        without, _ = run(args.folder, module, PLAIN)
        if without:
            return module, without, without, ""
        with_hooks, said = run(args.folder, module, HOOKED)
        return module, without, with_hooks, said

    with ThreadPoolExecutor(args.jobs) as pool:
        for module, without, with_hooks, said in pool.map(both, modules):
            verdict = "same" if not with_hooks else "WORSE"
            print(f"{module}: {'fails without, too' if without else verdict}", flush=True)
            if with_hooks and not without:
                worse.append(module)
                print(said[-2000:], flush=True)
    print(f"{len(modules)} modules, {len(worse)} worse with the hooks")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
