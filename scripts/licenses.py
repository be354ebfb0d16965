"""List the licences of gracetune's dependencies: `python scripts/licenses.py [--check] [-o FILE]`.

Reads the requirements in pyproject.toml and follows them through the metadata of the packages that
are installed. `--check` exits with 1 if a package has a licence that is neither permissive nor in
`REVIEWED`, so that a new dependency with another licence is noticed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LEFT_OUT = {"bench", "dev", "docs"}
"""Extras for working on gracetune itself, which no user installs."""
PERMISSIVE = (
    r"\bMIT\b|\bBSD\b|BSD-\d|Apache|\bISC\b|\bPSF\b|Python Software Foundation|Python-2\.0|Zlib|"
    r"Unlicense|\bHPND\b|\bCC0\b|\b0BSD\b|BSL-1|Boost"
)
RESTRICTED = r"\bA?GPL|LGPL|MPL|Mozilla|EPL|EUPL|CDDL|Proprietary|NVIDIA|Commercial|SSPL|BUSL"
REVIEWED = {
    "certifi": "MPL-2.0 covers its own files, which are not changed",
    "hypothesis": "MPL-2.0, used by tests only",
    "orjson": "MPL covers its own files, which are not changed",
    "soxr": "LGPL-2.1; linked dynamically as a package of its own, optional (audio)",
    "tqdm": "MPL covers its own files, which are not changed",
    "nvidia-ml-py": "BSD; the driver library that it calls is NVIDIA's",
    "cuda-bindings": "NVIDIA's licence, which allows use and redistribution; tests only",
    "cupti-python": "NVIDIA's licence; optional (cupti)",
    "av": "BSD; its wheels contain FFmpeg with x264 and x265, which are GPL: gracetune does not "
    "ship them, and whoever redistributes an environment with them must follow the GPL",
}
"""Packages whose licence is not purely permissive, or whose wheels contain others, and why that is
acceptable for a package that only depends on them."""
NOT_HERE = "not installed here"


@dataclass(frozen=True)
class Package:
    """An installed package, or one that is not."""

    name: str
    version: str
    licence: str
    needed_by: str

    @property
    def is_permissive(self) -> bool:
        """True if the licence is known, permissive and nothing else."""
        return bool(re.search(PERMISSIVE, self.licence)) and not re.search(RESTRICTED, self.licence)


def main() -> int:
    """Write the list; return 1 if `--check` finds a licence to look at."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    packages = collect()
    text = "\n".join(document(packages)) + "\n"
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    elif not args.check:
        print(text, end="")
    flagged = [one for one in packages if not one.is_permissive and one.name not in REVIEWED]
    unknown = [one for one in flagged if one.licence != NOT_HERE]
    for one in unknown:
        print(f"look at {one.name} {one.version}: {one.licence}", file=sys.stderr)
    return 1 if args.check and unknown else 0


def collect() -> list[Package]:
    """Return all packages that gracetune and its extras need, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, Package] = {}
    for extra, requirements in groups.items():
        if extra not in LEFT_OUT:
            for text in requirements:
                _follow(Requirement(text), extra, found, set())
    return sorted(found.values(), key=lambda one: one.name)


def document(packages: list[Package]) -> list[str]:
    """Return the lines of the Markdown page."""
    looked_at = [one for one in packages if not one.is_permissive or one.name in REVIEWED]
    lines = [
        "# Licences of dependencies",
        "",
        "This page is for whoever redistributes gracetune. gracetune itself is under the Apache "
        "License 2.0; its wheel contains uPlot (MIT) and no other package. `python "
        "scripts/licenses.py -o docs/licenses.md` wrote this list from the metadata of installed "
        "packages; it covers the dependencies and all extras but `bench`, `dev` and `docs`.",
        "",
        "## To look at",
        "",
        "| package | licence | remark |",
        "|---|---|---|",
    ]
    lines += [
        f"| {one.name} | {one.licence} | {REVIEWED.get(one.name, 'check it before you ship it')} |"
        for one in looked_at
        if one.licence != NOT_HERE
    ]
    lines += ["", "## All", "", "| package | version | licence | needed by |", "|---|---|---|---|"]
    lines += [
        f"| {one.name} | {one.version} | {one.licence} | {one.needed_by or 'gracetune'} |"
        for one in packages
    ]
    lines += [
        "",
        "With a CUDA build of torch, pip also installs NVIDIA's libraries (`nvidia-*`), under "
        "NVIDIA's licences, and triton (MIT).",
    ]
    return lines


def _follow(
    requirement: Requirement, extra: str, found: dict[str, Package], seen: set[tuple[str, str]]
) -> None:
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    wanted = ",".join(sorted(requirement.extras))
    if name == "gracetune" or (name, wanted) in seen:
        return
    seen.add((name, wanted))
    try:
        metadata = distribution(name)
    except PackageNotFoundError:
        found.setdefault(name, Package(name, "", NOT_HERE, extra))
        return
    found.setdefault(name, Package(name, metadata.version, _licence(metadata.metadata), extra))
    for text in metadata.requires or []:
        needed = Requirement(text)
        extras = requirement.extras or {""}
        if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
            _follow(needed, extra, found, seen)


def _licence(metadata: object) -> str:
    """Return the licence of a package in one short text."""
    get = metadata.get  # type: ignore[attr-defined]
    if expression := get("License-Expression"):
        return str(expression)
    marks = [
        text.rsplit(" :: ", 1)[-1]
        for text in metadata.get_all("Classifier") or ()  # type: ignore[attr-defined]
        if text.startswith("License ::") and not text.endswith("OSI Approved")
    ]
    if marks:
        return ", ".join(sorted(set(marks)))
    lines = str(get("License") or "unknown").strip().splitlines()
    return lines[0].strip()[:60].replace("|", "/") if lines else "unknown"


if __name__ == "__main__":
    sys.exit(main())
