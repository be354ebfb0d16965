import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("rule", ["bump", "found"])
def test_shards_on_two_ranks_train_as_the_whole_does(rule):
    script = Path(__file__).with_name("sharded_step.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*launch, str(script), rule], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
