"""Four ranks of a machine stream from one copy of the frozen weights."""

import json
import os
from pathlib import Path

import pytest
from fork_process import PythonProcess, rank_environments

pytestmark = pytest.mark.distributed
RANK = Path(__file__).parents[1] / "unit/offload/shared_weights_rank.py"
NUM_RANKS = 4


@pytest.fixture(scope="module")
def ranks():
    size = str(NUM_RANKS)
    first = rank_environments(os.environ)[0] | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    processes = [
        PythonProcess(RANK, env=first | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(NUM_RANKS)
    ]
    try:
        outputs = [process.communicate(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_each_rank_has_the_gradients_of_resident_weights(ranks):
    for rank in ranks:
        assert rank["train"]["gradients"]
        assert rank["change_plan"]["gradients"]
        assert sorted(rank["train"]["inodes"]) == sorted(ranks[0]["train"]["inodes"])


def test_all_ranks_agree_on_failures(ranks):
    for rank in ranks:
        assert "of rank 1 on " in rank["disagree"]["error"]
        assert rank["fail_to_pin"]["error"].startswith("OffloadError: rank 1 on ")
        assert rank["fail_to_map"]["files"] == [[], 0]


def test_no_rank_has_a_private_copy(ranks):
    for rank in ranks:
        seen = rank["measure"]["together"]
        assert seen["gradients"]
        assert seen["added"] < 0.05 * seen["nbytes"]
        assert rank["measure"]["alone"]["added"] > 0.95 * seen["nbytes"]
