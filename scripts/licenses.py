"""List the licences of gracetune's dependencies: `python scripts/licenses.py [--check] [-o FILE]`.

Reads the requirements in pyproject.toml and follows them through the metadata of the packages that
are installed. `--check` exits with 1 if a package has a licence that is neither permissive nor in
`REVIEWED`, or if it is not installed and not in `KNOWN`, so that a new dependency is noticed. Run
it where all extras are installed; `make release` uses the environment of the trackers.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass, replace
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
    "orjson": "MPL covers its own files, which are not changed",
    "soxr": "LGPL-2.1; linked dynamically as a package of its own, optional (audio)",
    "tqdm": "MPL covers its own files, which are not changed",
    "nvidia-ml-py": "BSD; the driver library that it calls is NVIDIA's",
    "cupti-python": "NVIDIA's licence; optional (cupti)",
    "av": "BSD; its wheels contain FFmpeg with x264 and x265, which are GPL: gracetune does not "
    "ship them, and whoever redistributes an environment with them must follow the GPL",
    "pillow-heif": "BSD; its wheels contain libheif with x265, which is GPL: as for av",
}
"""Packages whose licence is not purely permissive, or whose wheels contain others, and why that is
acceptable for a package that only depends on them."""
KNOWN = {
    "bitsandbytes": "MIT",
    "cupti-python": "NVIDIA's licence",
}
"""Licences, as their projects publish them, of packages that are of no use without a GPU, and so
are not installed where the list is written."""
CUDA_LIBRARIES = r"cuda-toolkit$|nvidia-(?!ml-py$)"
"""Packages that only CUDA builds of torch need. The page names them together."""
NOT_HERE = "not installed here"


@dataclass(frozen=True)
class Package:
    """An installed package, or one that is not."""

    name: str
    version: str
    licence: str
    needed_by: frozenset[str]
    """Extras that need it; an empty name is gracetune itself."""

    @property
    def users(self) -> str:
        """`gracetune`, which all extras include, or the extras that need the package."""
        return "gracetune" if "" in self.needed_by else ", ".join(sorted(self.needed_by))

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
    unknown = to_review(packages)
    for one in unknown:
        print(f"look at {one.name} {one.version}: {one.licence}", file=sys.stderr)
    return 1 if args.check and unknown else 0


def to_review(packages: list[Package]) -> list[Package]:
    """Return the packages whose licence is not known to be acceptable."""
    return [one for one in packages if not one.is_permissive and one.name not in REVIEWED]


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
        "packages; it covers the dependencies and all extras but `bench`, `dev` and `docs`. "
        "Packages without a version were not installed, because they are of no use without a GPU; "
        "their licences are those that they publish.",
        "",
        "## To look at",
        "",
        "| package | licence | remark |",
        "|---|---|---|",
    ]
    lines += [
        f"| {one.name} | {one.licence} | {REVIEWED.get(one.name, 'check it before you ship it')} |"
        for one in looked_at
    ]
    lines += [
        "",
        "## All",
        "",
        "The last column has all extras that need a package, or gracetune if it always does.",
        "",
        "| package | version | licence | needed by |",
        "|---|---|---|---|",
    ]
    lines += [f"| {one.name} | {one.version} | {one.licence} | {one.users} |" for one in packages]
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
    if name == "gracetune" or re.match(CUDA_LIBRARIES, name) or (name, wanted) in seen:
        return
    seen.add((name, wanted))
    if name in found:
        users = found[name].needed_by | {extra}
        found[name] = replace(found[name], needed_by=users)
    try:
        metadata = distribution(name)
    except PackageNotFoundError:
        licence = KNOWN.get(name, NOT_HERE)
        found.setdefault(name, Package(name, "", licence, frozenset({extra})))
        return
    licence = _licence(metadata.metadata)
    found.setdefault(name, Package(name, metadata.version, licence, frozenset({extra})))
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
