"""Write docs/seeds.md from tests/seeds/table.yaml: what the forks' guides promise, and its tests.

`--check` writes nothing, and exits with 1 if the page is not up to date.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "seeds"))

from seed_items import SEEDS, seed_items  # noqa: E402

TABLE = ROOT / "tests" / "seeds" / "table.yaml"
PAGE = ROOT / "docs" / "seeds.md"
INTRODUCTION = """# The forks' guides, line by line

This page is for people who know the guides of the GH200 forks of SimpleTuner and ai-toolkit. It \
lists every command, setting, variable, file and function that the five guides name, where \
gracetune has it, and which tests check its effect. `000:43` is line 43 of guide 000:

GUIDES

`scripts/seed_table.py` writes the page from `tests/seeds/table.yaml`. `tests/seeds/test_table.py` \
fails if a command, code block, variable, import or name of the guides has no row. Promises in \
prose have rows that were chosen by hand, so one may be missing.
"""


def page(text: str) -> str:
    """Return the page for the contents of the table; comments in it become headings."""
    rows = yaml.safe_load(text)
    places = seed_items()
    tested = sum("tests" in row and "todo" not in row for row in rows)
    partly = sum("todo" in row for row in rows)
    lines = [
        INTRODUCTION.replace("GUIDES", "\n".join(_guides())),
        f"{len(rows)} promises with {len(places)} items: {tested} are kept and tested, {partly} "
        f"are kept in part (see *missing*), {len(rows) - tested - partly} without a test.",
    ]
    headings = dict(_headings(text))
    for row in rows:
        if row["promise"] in headings:
            lines += ["", f"## {headings[row['promise']]}", "", "| promise | where | tests |"]
            lines += ["|---|---|---|"]
        lines.append(_row(row, places))
    return "\n".join(lines) + "\n"


def _guides() -> Iterator[str]:
    """Yield a table of the guides: number, title and the copy that the line numbers belong to."""
    yield "| number | guide | copy with these lines |"
    yield "|---|---|---|"
    for file in sorted(SEEDS.glob("*.txt")):
        title = file.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        path = file.relative_to(ROOT).as_posix()
        yield f"| {file.name[:3]} | {title} | [`{file.name}`](../{path}) |"


def _headings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the promise that follows each comment that is a heading, and the comment."""
    heading = ""
    for line in text.partition("\n\n")[2].splitlines():
        if line.startswith("# "):
            heading = line[2:]
        elif line.startswith("- promise: ") and heading:
            yield line.removeprefix("- promise: "), heading
            heading = ""


def _row(row: dict[str, list[str] | str], places: dict[str, list[str]]) -> str:
    named = [f"{_code(item)} ({', '.join(places[item])})" for item in row.get("items", ())]
    named += [f"(line {place})" for place in row.get("lines", ())]
    notes = "".join(
        f"<br>*{name}:* {row[key]}"
        for key, name in (("reason", "note"), ("todo", "missing"))
        if key in row
    )
    promise = f"**{row['promise']}**{notes}<br>{'; '.join(named)}"
    where = ", ".join(f"`{path}`" for path in row["where"])
    return f"| {promise} | {where} | {'<br>'.join(map(_test, row.get('tests', ())))} |"


def _test(name: str) -> str:
    path, _, function = name.partition("::")
    return f"`{path}` {function.replace('::', ' ').removeprefix('test_').replace('_', ' ')}"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def main() -> int:
    """Write the page, or compare it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare the page")
    args = parser.parse_args()
    written = page(TABLE.read_text("utf-8"))
    if not args.check:
        PAGE.write_text(written, "utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != written:
        print("docs/seeds.md is not up to date: run python scripts/seed_table.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
