import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from gracetune.errors import DataError, RunFailedError
from gracetune.events.log import JsonlLog, loss_by_step, read_events
from gracetune.events.types import (
    KINDS,
    CheckpointSaved,
    Event,
    Notice,
    RunEnded,
    StageProgress,
    StepDone,
    Validated,
)


def step_done(step: int, loss: float = 0.5) -> StepDone:
    return StepDone(step, loss, 1e-4, 1.0, 8, 2, 0, 0.25)


def write_log(path: Path, *events: Event) -> None:
    log = JsonlLog(path, clock=lambda: 12.5)
    for event in events:
        log.handle(event)
    log.close()


def test_every_event_has_a_kind_and_no_field_named_event_or_time() -> None:
    assert set(KINDS) == set(get_args(Event))
    assert len(set(KINDS.values())) == len(KINDS)
    for kind in KINDS:
        assert not {"event", "time"} & {field.name for field in fields(kind)}


def test_a_line_has_the_kind_the_time_and_the_fields(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    write_log(path, Validated(3, "grid.png", ("a “star”", "b"), {"holdout": 0.25}, 1.5))
    assert json.loads(path.read_text()) == {
        "event": "validated",
        "time": 12.5,
        "step": 3,
        "grid": "grid.png",
        "prompts": ["a “star”", "b"],
        "losses": {"holdout": 0.25},
        "seconds": 1.5,
        "request": "",
    }


def test_floats_read_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    losses = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1 / 3, -0.0, 2.0]
    write_log(path, *(step_done(step, loss) for step, loss in enumerate(losses)))
    back = loss_by_step(path)
    assert [loss.hex() for loss in back.values()] == [loss.hex() for loss in losses]


def test_nan_and_infinity_are_written_as_strings(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, step_done(1, math.nan), step_done(2, math.inf), step_done(3, -math.inf))
    assert [record["loss"] for record in read_events(path)] == ["nan", "inf", "-inf"]
    losses = loss_by_step(path)
    assert math.isnan(losses[1])
    assert (losses[2], losses[3]) == (math.inf, -math.inf)


def test_the_last_loss_of_a_repeated_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, step_done(1, 0.9), step_done(2, 0.8), Notice("hello"))
    write_log(path, step_done(2, 0.7))
    assert loss_by_step(path) == {1: 0.9, 2: 0.7}


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, step_done(1), step_done(2))
    path.write_bytes(path.read_bytes()[:-10])
    assert loss_by_step(path) == {1: 0.5}


def test_a_torn_line_is_ended_and_marked(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, step_done(1), step_done(2))
    path.write_bytes(path.read_bytes()[:-10])
    write_log(path, step_done(3))
    assert [record["event"] for record in read_events(path)] == [
        "step_done",
        "torn_line",
        "step_done",
    ]
    assert loss_by_step(path) == {1: 0.5, 3: 0.5}


def test_a_kill_while_marking_a_torn_line_is_handled(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "step_d\n{"event": "torn_li')
    write_log(path, step_done(3))
    assert loss_by_step(path) == {3: 0.5}


def test_a_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, step_done(1))
    path.write_bytes(path.read_bytes()[:-1])
    write_log(path, step_done(2))
    assert loss_by_step(path) == {1: 0.5, 2: 0.5}


@pytest.mark.parametrize("damage", [b"hello\n", b"[1, 2]\n", b"\xff\xfe\n", b"{}\n"])
def test_other_damage_is_an_error(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, step_done(1))
    path.write_bytes(path.read_bytes() + damage)
    write_log(path, step_done(2))
    with pytest.raises(DataError, match=r"line 2 of .* is not an event"):
        loss_by_step(path)


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        loss_by_step(tmp_path / "none.jsonl")


def test_half_a_surrogate_pair_does_not_stop_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, Notice("caption \ud800"))
    assert [record["text"] for record in read_events(path)] == ["caption \ud800"]


def test_a_killed_process_loses_no_handled_event(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from gracetune.events.log import JsonlLog\n"
        "from gracetune.events.types import StepDone\n"
        "log = JsonlLog(Path(sys.argv[1]))\n"
        "for step in range(5): log.handle(StepDone(step, 0.5, 1e-4, 1.0, 8, 2, 0, 0.1))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code = subprocess.run([sys.executable, "-c", script, path], check=False).returncode
    assert code == -signal.SIGKILL
    assert list(loss_by_step(path)) == [0, 1, 2, 3, 4]


def test_a_stage_is_logged_once_a_second_and_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    now = 0.0
    log = JsonlLog(path, clock=lambda: now, stage_every_s=1.0)
    for done in range(1, 101):
        now = done / 32
        log.handle(StageProgress("staging", done, 100))
    log.handle(StageProgress("encoding", 1, 5))
    log.close()
    shown = [(record["stage"], record["done"]) for record in read_events(path)]
    assert shown == [
        ("staging", 1),
        ("staging", 33),
        ("staging", 65),
        ("staging", 97),
        ("staging", 100),
        ("encoding", 1),
    ]


def test_checkpoints_and_the_end_are_synced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def counting(descriptor: int) -> None:
        synced.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", counting)
    write_log(tmp_path / "log.jsonl", step_done(1), Notice("x"))
    assert not synced
    write_log(
        tmp_path / "log.jsonl",
        CheckpointSaved(1, "c", 10, 0.1, "every"),
        RunEnded(1, "done", 1.0),
    )
    assert len(synced) == 2


def test_a_deleted_log_is_written_again_with_the_next_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    log = JsonlLog(path)
    log.handle(Notice("one"))
    shutil.rmtree(path.parent)
    log.handle(CheckpointSaved(1, "c", 10, 0.1, "every"))  # there is no folder for the file
    path.parent.mkdir()
    log.handle(CheckpointSaved(2, "c", 10, 0.1, "every"))
    log.handle(Notice("two"))
    log.close()
    kinds = [line["event"] for line in read_events(path)]
    assert kinds == ["notice", "checkpoint_saved", "checkpoint_saved", "notice"]


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailedError, match="output_dir"):
        JsonlLog(tmp_path / "file" / "log.jsonl")


def test_a_full_disk_ends_the_run() -> None:
    log = JsonlLog(Path("/dev/full"))
    with pytest.raises(RunFailedError, match="No space left"):
        log.handle(step_done(1))
    log.handle(step_done(2))  # ignored after the failed write
    log.close()
