"""Two ranks share one GPU and one pinned copy of the streamed weights."""

import json
from pathlib import Path

import pytest
from fork_process import run_ranks

pytestmark = pytest.mark.gpu
RANK = Path(__file__).parent / "shared_weights_gpu_rank.py"


@pytest.fixture(scope="module")
def ranks():
    done = run_ranks(RANK)
    for rank in done:
        assert rank.returncode == 0, rank.stderr
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in done]


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
