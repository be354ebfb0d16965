"""Run folders and caches written by earlier versions are still read."""

import json

import pytest
from golden_runs import events, gracetune, machine
from old_formats import EXPECTED, FIXTURES, STOPPED_AT, TOTAL_STEPS, outcome, unpack

from gracetune.events.log import loss_by_step, read_events
from gracetune.events.types import KINDS

ENTRIES = {"latents": 32, "text": 5}
"""Two variants of eight images and their masks; four captions and the empty one."""


@pytest.fixture(scope="module", params=FIXTURES)
def fixture(request):
    return request.param


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, fixture):
    """Resume the old run from its last checkpoint, with its old cache, and train to the end."""
    folder = unpack(tmp_path_factory.mktemp("formats") / "old", fixture)
    gracetune("train", "run.json", cwd=folder)
    return folder


def shards(folder):
    files = folder.glob("cache/*/shards/*")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_the_fixture_holds_two_checkpoints_and_a_filled_cache(tmp_path, fixture):
    folder = unpack(tmp_path / "old", fixture)
    saved = sorted(path.name for path in folder.glob("run/checkpoints/*"))
    assert saved == ["step-000002", "step-000004"]
    assert len(shards(folder)) == len(ENTRIES)


def test_an_old_checkpoint_resumes_as_if_the_run_had_never_stopped(resumed):
    expected = json.loads((resumed / EXPECTED).read_text())
    starts = [line["start_step"] for line in events(resumed / "run") if "start_step" in line]
    assert starts == [0, STOPPED_AT]
    found = outcome(resumed / "run")
    assert len(found["losses"]) == TOTAL_STEPS
    assert found["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-6)
    assert found["digests"].keys() == expected["digests"].keys()
    if machine() == expected["machine"]:
        assert found["digests"] == expected["digests"]


def test_an_old_cache_spares_a_run_all_encoding(resumed, tmp_path, fixture):
    """A cache whose keys were not found again would have got new entries."""
    assert shards(resumed) == shards(unpack(tmp_path / "old", fixture))


def test_an_old_cache_is_verified(tmp_path, fixture):
    folder = unpack(tmp_path / "old", fixture)
    verified = json.loads(gracetune("cache", "verify", "cache", "--json", cwd=folder))
    found = {store["folder"]: (store["entries"], store["damage"]) for store in verified}
    assert found == {f"cache/{name}": (count, {}) for name, count in ENTRIES.items()}


def test_old_events_are_read(resumed):
    """The log of the old process and of the resumed one are one run for all tools."""
    log = resumed / "run" / "events.jsonl"
    assert sorted(loss_by_step(log)) == list(range(1, TOTAL_STEPS + 1))
    names = set(KINDS.values()) | {"torn_line"}
    assert {line["event"] for line in read_events(log)} <= names


def test_old_adapters_are_read_from_their_checkpoint(tmp_path, fixture):
    folder = unpack(tmp_path / "old", fixture)
    step = f"run/checkpoints/step-{STOPPED_AT:06d}"
    found = json.loads(gracetune("adapter", "inspect", step, "--json", cwd=folder))
    assert "tiny" in json.dumps(found)
