"""Check the files in dist/ before they are published: `make release` runs this after the build.

- One version: that of the package, of all file names, of the metadata and of the newest heading in
  CHANGELOG.md.
- `twine check --strict`: the metadata is valid, and the README renders.
- The source distribution and the wheels have the licence files, and nothing that is private, such
  as runs and environments. Nothing but Apache-2.0 and MIT (uPlot) is inside.
- The wheel of this machine works in a fresh environment: it prints its version, lists examples and
  trains two steps. Its dependencies are those of the current environment, unless `--full` installs
  them (gigabytes; `make test-install` does so in a new Debian).
"""

from __future__ import annotations

import argparse
import email
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LICENCES = ("LICENSE", "LICENSE.uPlot.txt")
SDIST_FILES = ("LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "docs/licenses.md")
FORBIDDEN = re.compile(
    r"(^|/)(\.venv|\.hosts|\.git|runs|tests|__pycache__|\.gpu|\.mypy_cache)(/|$)"
)
MACHINES = ("x86_64", "aarch64")


def main() -> int:
    """Run all checks; print each problem and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="install all dependencies as well")
    args = parser.parse_args()
    version = package_version()
    problems = [*check_names(version), *check_changelog(version)]
    if not problems:
        problems += check_sdist(version)
        for wheel in DIST.glob("*.whl"):
            problems += check_wheel(wheel, version)
        problems += check_with_twine()
    if not problems:
        problems += check_install(version, full=args.full)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"gracetune {version}: {', '.join(sorted(file.name for file in DIST.iterdir()))}")
    return 1 if problems else 0


def package_version() -> str:
    """Return `gracetune.__version__`, the only place where the version is written."""
    text = (ROOT / "src" / "gracetune" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
    assert found is not None, "no __version__"
    return found[1]


def check_names(version: str) -> list[str]:
    """Check that there is one source distribution and one wheel for each architecture."""
    expected = {f"gracetune-{version}.tar.gz"}
    expected |= {f"gracetune-{version}-py3-none-manylinux_2_28_{one}.whl" for one in MACHINES}
    found = {file.name for file in DIST.iterdir()} if DIST.is_dir() else set()
    return [f"dist/ lacks {name}." for name in sorted(expected - found)] + [
        f"dist/ has {name}, which is not part of {version}." for name in sorted(found - expected)
    ]


def check_changelog(version: str) -> list[str]:
    """Check that the newest heading of the changelog is this version, with a date."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [text for text in headings if text != "Unreleased"]
    if not released or not re.fullmatch(
        rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", released[0]
    ):
        return [f"CHANGELOG.md has no heading '## {version} (DATE)' before all others."]
    return []


def check_sdist(version: str) -> list[str]:
    """Check the contents of the source distribution."""
    with tarfile.open(DIST / f"gracetune-{version}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return _check_contents("the source distribution", names, SDIST_FILES)


def check_wheel(wheel: Path, version: str) -> list[str]:
    """Check the metadata and the contents of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"gracetune-{version}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    problems = _check_contents(wheel.name, names, ())
    shipped = {Path(name).name for name in names if name.startswith(f"{info}/licenses/")}
    problems += [
        f"{wheel.name} lacks the licence {name}." for name in LICENCES if name not in shipped
    ]
    expected = {"Version": version, "License-Expression": "Apache-2.0"}
    return problems + [
        f"{wheel.name}: {key} is {metadata[key]}, not {value}."
        for key, value in expected.items()
        if metadata[key] != value
    ]


def check_with_twine() -> list[str]:
    """Let twine check the metadata and the README."""
    files = sorted(map(str, DIST.iterdir()))
    done = _run([sys.executable, "-m", "twine", "check", "--strict", *files])
    return [] if done.returncode == 0 else [f"twine: {done.stdout}{done.stderr}"]


def check_install(version: str, *, full: bool) -> list[str]:
    """Install the wheel of this machine into a fresh environment and use it."""
    wheel = next(DIST.glob(f"*_{platform.machine()}.whl"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([sys.executable, "-m", "venv", str(folder / "env")])
        python = str(folder / "env" / "bin" / "python")
        options = [] if full else ["--no-deps"]
        pinned = ["--constraint", str(ROOT / "constraints.txt")]
        done = _run([python, "-m", "pip", "install", "--quiet", *options, *pinned, str(wheel)])
        if done.returncode:
            return [f"{wheel.name} cannot be installed: {done.stderr}"]
        if not full:  # after the environment's own packages, so that gracetune is the wheel's
            place = _run([python, "-c", "import site; print(site.getsitepackages()[0])"]).stdout
            others = [path for path in sys.path if path.endswith("site-packages")]
            (Path(place.strip()) / "dependencies.pth").write_text("\n".join(others) + "\n")
        return _use(folder, version)


def _use(folder: Path, version: str) -> list[str]:
    command = str(folder / "env" / "bin" / "gracetune")
    python = str(folder / "env" / "bin" / "python")
    where = _run([python, "-c", "import gracetune; print(gracetune.__file__)"], folder).stdout
    if not where.startswith(str(folder)):
        return [f"the fresh environment imports gracetune from {where.strip()}."]
    short = ["train.max_train_steps=2", "validation.every=0", "train.ema_decay=0"]
    words = [word for one in short for word in ("--set", one)]
    (folder / "demo.json").write_text(_run([command, "examples", "demo"], folder).stdout)
    for arguments in (
        ["--version"],
        ["examples"],
        ["schema"],
        ["diagnose", "--allow-cpu"],
        ["train", "demo.json", *words, "--set", "optimizer.schedule=constant"],
    ):
        done = _run([command, *arguments], folder)
        if done.returncode:
            return [f"gracetune {' '.join(arguments)} fails: {done.stdout}{done.stderr}"]
        if arguments == ["--version"] and done.stdout.split() != ["gracetune", version]:
            return [f"the wheel's version is {done.stdout.strip()}, not {version}."]
    return []


def _check_contents(what: str, names: set[str], required: tuple[str, ...]) -> list[str]:
    problems = [f"{what} lacks {name}." for name in required if name not in names]
    return (
        problems + [f"{what} has {name}." for name in sorted(names) if FORBIDDEN.search(name)][:5]
    )


def _run(command: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main())
