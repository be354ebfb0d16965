"""Automagic on sharded parameters equals Automagic on whole ones."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("rule", ["per_element", "per_group"])
def test_sharded_training_on_two_ranks_equals_training_on_one(rule):
    script = Path(__file__).with_name("sharded_step.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launch, str(script), rule], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-3000:]
