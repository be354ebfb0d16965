"""The ranks of a machine stream from one copy of the frozen weights, in memory that they share."""

import json
from pathlib import Path

import pytest
from fork_process import run_ranks

RANK = Path(__file__).parent / "shared_weights_rank.py"


@pytest.fixture(scope="module")
def ranks():
    """Run all scenarios of shared_weights_rank.py on two ranks, and return what each saw."""
    done = run_ranks(RANK)
    for rank in done:
        assert rank.returncode == 0, rank.stderr
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in done]


def test_streamed_gradients_equal_those_of_resident_weights(ranks):
    for rank in ranks:
        assert rank["train"]["gradients"]
        assert rank["train"]["notices"] == 0


def test_both_ranks_map_the_same_files_and_keep_none_open(ranks):
    first, second = (rank["train"] for rank in ranks)
    assert len(first["inodes"]) == 6
    assert sorted(first["inodes"]) == sorted(second["inodes"])
    assert (first["opened"], second["opened"]) == (0, 0)


def test_shared_weights_can_be_saved(ranks):
    for rank in ranks:
        assert rank["train"]["saved"]


def test_a_write_to_a_shared_weight_is_detected(ranks):
    assert "'blocks.2.down.weight' was moved, replaced or written" in ranks[1]["train"]["changed"]


def test_closing_a_ring_frees_the_shared_memory(ranks):
    for rank in ranks:
        assert rank["train"]["after"] == [[], 0]
        assert rank["train"]["to_device"]


def test_a_plan_change_replaces_shared_memory_block_by_block(ranks):
    for rank in ranks:
        seen = rank["change_plan"]
        assert seen["gradients"]
        assert seen["renewed"]
        assert seen["files"] == [6, 6]
        assert seen["alive"] == [12, 10, 8, 6, 4, 2]  # two weights per block
        assert seen["after"] == [[], 0]


def test_ranks_with_different_weights_are_refused(ranks):
    for rank in ranks:
        assert rank["disagree"]["error"].startswith("RunFailedError: weight 'blocks.1.down.weight'")
        assert "of rank 1 on " in rank["disagree"]["error"]


def test_all_ranks_use_private_memory_if_one_cannot_map_the_files(ranks):
    for rank in ranks:
        assert rank["fail_to_map"]["gradients"]
        assert rank["fail_to_map"]["files"] == [[], 0]
    ((text, level, fallback),) = ranks[0]["fail_to_map"]["notices"]
    assert text.startswith("rank 1 on ")
    assert "Too many open files" in text
    assert (level, fallback) == ("warning", True)
    assert ranks[1]["fail_to_map"]["notices"] == []


def test_all_ranks_fail_if_one_cannot_pin_its_memory(ranks):
    for rank in ranks:
        assert rank["fail_to_pin"]["error"].startswith("OffloadError: rank 1 on ")
        assert "cannot be pinned" in rank["fail_to_pin"]["error"]
        assert rank["fail_to_pin"]["saved"]


def test_a_second_rank_adds_at_most_5_percent_of_private_memory(ranks):
    for rank in ranks:
        alone, together = rank["measure"]["alone"], rank["measure"]["together"]
        nbytes = alone["nbytes"]
        assert together["nbytes"] == nbytes > 200e6
        for seen in (alone, together):
            assert seen["loaded"] > 0.95 * nbytes
            assert seen["gradients"]
        assert alone["added"] == pytest.approx(nbytes, rel=0.05)
        assert together["added"] < 0.05 * nbytes
