"""The tables of docs/scaling.md are those that the planner computes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT, PAGE = ROOT / "scripts" / "scaling_tables.py", ROOT / "docs" / "scaling.md"


def test_the_page_has_a_table_for_each_run_and_machine():
    text = PAGE.read_text()
    assert text.count("| strategy | 1 GPU | 8 GPUs | 64 GPUs | 512 GPUs |") == 4
    assert text.count("| **recommended** |") == 4
    assert "scripts/scaling_tables.py -->" in text


@pytest.mark.slow
def test_the_tables_are_up_to_date():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
