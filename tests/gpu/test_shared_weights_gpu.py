"""Two ranks share one GPU and one pinned copy of the streamed weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fork_process import rank_environments

pytestmark = pytest.mark.gpu
RANK = Path(__file__).parent / "shared_weights_gpu_rank.py"


@pytest.fixture(scope="module")
def ranks():
    """Start two processes, which a fork server with a CUDA context could not."""
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for env in rank_environments(os.environ)
    ]
    outputs = [process.communicate(timeout=120) for process in started]
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors.decode()
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("link", ["MANAGED", "COHERENT"])
def test_shared_weights_give_the_gradients_of_resident_ones(ranks, link):
    for rank in ranks:
        assert rank[link]["gradients"] == [True, True]
        assert rank[link]["notices"] == []


def test_each_rank_pins_the_shared_memory_while_it_streams(ranks):
    for rank in ranks:
        assert rank["MANAGED"]["pinned"] == [True, True]
        assert rank["MANAGED"]["unpinned"] == [True, True]


@pytest.mark.parametrize("link", ["MANAGED", "COHERENT"])
def test_shared_weights_take_no_private_memory(ranks, link):
    for rank in ranks:
        assert rank[link]["added"] < 0.05 * rank[link]["nbytes"], rank[link]
