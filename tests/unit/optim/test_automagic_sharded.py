"""Automagic on sharded parameters equals Automagic on whole ones."""

from pathlib import Path

import pytest
from fork_process import run_ranks


@pytest.mark.parametrize("rule", ["per_element", "per_group"])
def test_sharded_training_on_two_ranks_equals_training_on_one(rule):
    for rank in run_ranks(Path(__file__).with_name("sharded_step.py"), rule):
        assert rank.returncode == 0, rank.stderr[-3000:]
