"""Every item of the forks' guides has a row in `table.yaml`, whose tests exist.

Items are commands, code blocks, variables, imports and names (see `seed_items.py`). Promises in
prose have rows as well, but a program cannot tell whether one is missing.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fork_process import run_python

sys.path.insert(0, str(Path(__file__).parent))

from seed_items import SEEDS, seed_items

ROOT = Path(__file__).parents[2]
ROWS = yaml.safe_load((Path(__file__).with_name("table.yaml")).read_text("utf-8"))
KEYS = {"promise", "items", "lines", "where", "tests", "reason", "todo"}
TESTS = sorted({test for row in ROWS for test in row.get("tests", ())})


ORIGINALS = ROOT.parent / "shared" / "seeds"
"""The guides themselves, if they lie beside the checkout; the tests read a copy of them."""
if ORIGINALS.is_dir():  # else there is nothing to compare, and no test that would be skipped

    def test_the_copy_of_the_guides_is_up_to_date():
        copied, original = (
            {file.name: file.read_text("utf-8") for file in folder.glob("*.txt")}
            for folder in (SEEDS, ORIGINALS)
        )
        assert copied == original, f"copy {ORIGINALS} to {SEEDS}, and list what is new"


def test_every_item_of_the_guides_has_one_row():
    found = set(seed_items())
    listed = [item for row in ROWS for item in row.get("items", ())]
    assert sorted(found - set(listed)) == [], "add a row, or add these to one"
    assert sorted(set(listed) - found) == [], "no guide has these"
    assert len(listed) == len(set(listed)), "an item is in two rows"


def test_a_new_line_in_a_guide_is_noticed(tmp_path):
    (tmp_path / "005.txt").write_text(
        "Set `new_key` and NEW_VARIABLE, and run it:\n"
        "```bash\nexport A=1  # why\npython new.py \\\n  --flag\n```\n"
        '```json\n{"a_key": 1}\n```\n'
        "```python\nimport new_module\nnew_function()\n```\n"
        "_End of NEW_GUIDE.md_\n"
    )
    assert list(seed_items(tmp_path)) == [
        *("new_key", "NEW_VARIABLE", "export A=1", "python new.py --flag"),
        *("block 005:8", "a_key", "block 005:11", "import new_module", "NEW_GUIDE.md"),
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["promise"])
def test_a_row_is_complete(row):
    assert row.keys() <= KEYS
    assert row.get("items") or row.get("lines")
    assert row.get("tests") or row.get("reason"), "name a test, or the reason for having none"
    assert [path for path in row["where"] if not (ROOT / path).exists()] == []
    documents = {
        file.name[:3]: len(file.read_text("utf-8").splitlines()) for file in SEEDS.iterdir()
    }
    for place in row.get("lines", ()):
        document, first, last = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?", place).groups()
        assert 1 <= int(first) <= int(last or first) <= documents[document]


def test_every_named_test_exists():
    missing = [test for test in TESTS if not _defines(*test.split("::"))]
    assert missing == []


def _defines(path, *names):
    body = ast.parse((ROOT / path).read_text("utf-8")).body
    for name in names:
        found = [node for node in body if getattr(node, "name", "") == name]
        if not found:
            return False
        body = found[0].body
    return names[-1].startswith("test_")


@pytest.mark.slow
def test_every_named_test_is_collected():
    """pytest finds the tests, also those for other machines."""
    words = ("-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider")
    files = sorted({test.partition("::")[0] for test in TESTS})
    done = subprocess.run(
        [sys.executable, *words, *files], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.partition("[")[0] for line in done.stdout.splitlines()}
    assert sorted(set(TESTS) - collected) == []


def test_the_page_is_up_to_date():
    done = run_python(ROOT / "scripts/seed_table.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_full_guide_has_the_chapters_of_the_first_one():
    """The command of the first guide prints this file."""
    name = "GH200_OPTIMIZATION_GUIDE_FINAL_V2.md"
    listed = subprocess.run(["git", "ls-files", name], cwd=ROOT, capture_output=True, text=True)
    assert listed.stdout.strip() == name
    text = (ROOT / name).read_text("utf-8")
    chapters = (
        "machine",
        "Unified memory",
        "Modules",
        "Configuration files",
        "Launching",
        "Tuning",
    )
    chapters += ("Monitoring", "production", "Troubleshooting", "Benchmarks", "Other models")
    assert [word for word in chapters if not re.search(rf"^## .*{word}", text, re.MULTILINE)] == []
