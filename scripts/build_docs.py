"""Build the documentation site with zensical, from docs/ and a few pages outside of it.

    .venv/bin/python scripts/build_docs.py [--stage-only]

Pages may link to files of the repository outside of docs/, such as figures of benchmarks. They are
copied into the site, and the links are rewritten, so that the same page works in both places. The
build ends with an error for broken links and anchors, for missing files, for pages that are not in
the navigation of mkdocs.yml, and for generated pages that are out of date.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
SITE = ROOT / "mkdocs.yml"
OUTSIDE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "GH200_OPTIMIZATION_GUIDE_FINAL_V2.md": "gh200-guide.md",
    "documentation/GH200_WORKFLOW.md": "gh200-workflow.md",
}
"""Pages outside of docs/ by their place in the site."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^ *(```|~~~)")


def site_pages() -> dict[Path, str]:
    """Return the place in the site of every page of the repository that belongs to it."""
    docs = ROOT / "docs"
    found = {page: page.relative_to(docs).as_posix() for page in sorted(docs.rglob("*.md"))}
    return found | {ROOT / name: place for name, place in OUTSIDE.items()}


def navigation(entries: list[Any]) -> Iterator[str]:
    """Yield the pages in the navigation of mkdocs.yml."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from navigation(value)
        else:
            yield value


def problems(settings: Mapping[str, Any]) -> list[str]:
    """Return differences between the navigation and the pages."""
    listed = list(navigation(settings["nav"]))
    places = set(site_pages().values())
    twice = {page for page in listed if listed.count(page) > 1}
    return [
        *(f"{page} is twice in the navigation" for page in sorted(twice)),
        *(f"{page} is in the navigation and does not exist" for page in set(listed) - places),
        *(
            f"{page} is not in the navigation of mkdocs.yml"
            for page in sorted(places - set(listed))
        ),
    ]


def stage(folder: Path) -> list[str]:
    """Write the pages of the site and all files that they link to; return missing files."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = site_pages()
    missing: list[str] = []
    for page, place in pages.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_staged(page, pages, folder, missing), encoding="utf-8")
    for style in (ROOT / "docs" / "stylesheets").iterdir():
        (folder / "stylesheets").mkdir(exist_ok=True)
        shutil.copyfile(style, folder / "stylesheets" / style.name)
    return missing


def _staged(page: Path, pages: Mapping[Path, str], folder: Path, missing: list[str]) -> str:
    """Return the text of a page as it is in the site. Links in code blocks stay."""
    lines, in_code = [], False

    def relink(found: re.Match[str]) -> str:
        return _relink(found, page, pages, folder, missing)

    for line in page.read_text(encoding="utf-8").splitlines():
        fence = bool(FENCE.match(line))
        in_code = in_code != fence
        lines.append(line if in_code or fence else LINK.sub(relink, line))
    return "\n".join(lines) + "\n"


def _relink(
    found: re.Match[str], page: Path, pages: Mapping[Path, str], folder: Path, missing: list[str]
) -> str:
    """Return a link as it is in the site; copy the file that it leads to."""
    start, link, end = found.groups()
    if re.match(r"[a-z]+:", link):
        return found[0]
    target = (page.parent / link).resolve()
    up = "../" * (pages[page].count("/"))
    if target in pages:
        return f"{start}{up}{pages[target]}{end}"
    if not target.is_file():
        missing.append(f"{page.relative_to(ROOT)}: {link} is not a file")
        return found[0]
    place = target.relative_to(ROOT / "docs" if (ROOT / "docs") in target.parents else ROOT)
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(target, folder / place)
    return f"{start}{up}{place.as_posix()}{end}"


def main() -> int:
    """Check, stage and build; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage-only", action="store_true", help="write the pages, build nothing")
    stage_only = parser.parse_args().stage_only
    settings = yaml.safe_load(SITE.read_text(encoding="utf-8"))
    wrong = problems(settings) + stage(ROOT / settings["docs_dir"])
    for line in wrong:
        print(line, file=sys.stderr)
    reference = [sys.executable, str(ROOT / "scripts" / "reference_pages.py"), "--check"]
    here = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    if wrong or subprocess.run(reference, check=False, env=here).returncode:
        return 1
    if stage_only:
        return 0
    zensical = Path(sys.executable).parent / "zensical"
    if not zensical.exists():
        print("zensical is missing: pip install 'gracetune[docs]'", file=sys.stderr)
        return 1
    command = [str(zensical), "build", "--clean", "--strict", "--config-file", str(SITE)]
    done = subprocess.run(command, check=False, cwd=ROOT)
    if done.returncode == 0:
        print(f"The site is in {ROOT / settings['site_dir']}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
