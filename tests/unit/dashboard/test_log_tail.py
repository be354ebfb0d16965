"""A log is read piece by piece, whatever happens to the file."""

import json
import os

import pytest

from gracetune.dashboard import log_tail
from gracetune.dashboard.log_tail import LogTail


def line(step, **more):
    return json.dumps({"event": "step_done", "time": 1.0, "step": step} | more) + "\n"


def steps(chunk):
    return [record.get("step") for record in chunk.records]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(line(1) + line(2))
    return path


def test_only_new_lines_are_read(log):
    tail = LogTail(log)
    assert steps(tail.read()) == [1, 2]
    assert steps(tail.read()) == []
    with log.open("a") as file:
        file.write(line(3))
    assert steps(tail.read()) == [3]


def test_a_line_is_read_when_it_is_complete(log):
    tail = LogTail(log)
    tail.read()
    with log.open("a") as file:
        file.write(line(3)[:20])
        file.flush()
        chunk = tail.read()
        assert (steps(chunk), chunk.damaged, chunk.at_end, chunk.share) == ([], 0, True, 1.0)
        file.write(line(3)[20:])
    assert steps(tail.read()) == [3]


def test_a_torn_line_is_no_damage_but_other_garbage_is(log):
    tail = LogTail(log)
    with log.open("a") as file:
        file.write('{"event": "step_do\n{"event": "torn_line", "time": 2.0}\n' + line(3))
    chunk = tail.read()
    assert chunk.damaged == 0
    assert steps(chunk) == [1, 2, None, 3]
    with log.open("a") as file:
        file.write("garbage\n[1]\n" + line(4))
    chunk = tail.read()
    assert (steps(chunk), chunk.damaged) == ([4], 2)


def test_a_replaced_or_shortened_log_is_read_from_its_start(log):
    tail = LogTail(log)
    tail.read()
    log.write_text(line(7))
    chunk = tail.read()
    assert (chunk.restarted, steps(chunk)) == (True, [7])
    other = log.with_name("other")
    other.write_text(line(7) + line(8))
    os.replace(other, log)
    chunk = tail.read()
    assert (chunk.restarted, steps(chunk)) == (True, [7, 8])
    log.unlink()
    assert tail.read().restarted
    assert not tail.read().restarted
    log.write_text(line(9))
    assert steps(tail.read()) == [9]


def test_a_log_that_grew_past_the_old_end_after_a_rewrite_is_noticed(log):
    tail = LogTail(log)
    tail.read()
    with log.open("r+") as file:
        file.write(line(5, loss=1) + line(6) + line(7) + line(8))
    chunk = tail.read()
    assert (chunk.restarted, steps(chunk)) == (True, [5, 6, 7, 8])


def test_a_long_log_is_read_in_parts(log, monkeypatch):
    monkeypatch.setattr(log_tail, "CHUNK_NBYTES", 256)
    log.write_text("".join(line(step) for step in range(100)))
    tail, found, parts = LogTail(log), [], 0
    while True:
        chunk = tail.read()
        found += steps(chunk)
        parts += 1
        if chunk.at_end:
            break
        assert 0 < chunk.share < 1
    assert found == list(range(100))
    assert parts > 10


def test_a_long_line_that_is_being_written_is_the_end(log, monkeypatch):
    monkeypatch.setattr(log_tail, "CHUNK_NBYTES", 64)
    long = line(3, text="x" * 100)
    log.write_text(long[:-9])
    tail = LogTail(log)
    chunk = tail.read()
    assert (steps(chunk), chunk.at_end, chunk.share) == ([], True, 1.0)
    with log.open("a") as file:
        file.write(long[-9:])
    assert steps(tail.read()) == [3]


def test_an_endless_line_is_skipped(log, monkeypatch):
    monkeypatch.setattr(log_tail, "CHUNK_NBYTES", 64)
    monkeypatch.setattr(log_tail, "MAX_LINE_NBYTES", 256)
    log.write_text(line(1) + "x" * 5000 + "\n" + line(2))
    tail, found, damaged = LogTail(log), [], 0
    for _ in range(100):
        chunk = tail.read()
        found += steps(chunk)
        damaged += chunk.damaged
    assert found == [1, 2]
    assert damaged >= 1


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_log_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    assert LogTail(tmp_path / "events.jsonl").read().records == []


def test_a_link_in_place_of_the_log_is_not_followed(log, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(log)
    assert LogTail(tmp_path / "link.jsonl").read().records == []


def test_numbers_that_are_not_json_are_damage(log):
    log.write_text('{"event": "step_done", "time": NaN}\n' + line(1))
    chunk = LogTail(log).read()
    assert (steps(chunk), chunk.damaged) == ([1], 1)


def test_half_surrogates_and_huge_numbers_are_read(log):
    """File names that are not UTF-8 have half surrogates, and orjson refuses both."""
    first = '{"event": "notice", "time": 1, "text": "\\udc80.png"}\n'
    second = '{"event": "step_done", "time": 2, "step": 1, "loss": ' + "1" * 400 + "}\n"
    log.write_text(first + second)
    named, numbered = LogTail(log).read().records
    assert named["text"] == "\udc80.png"
    assert numbered["loss"] == float("inf")
