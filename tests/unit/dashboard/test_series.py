"""Tables keep the later row of a step, and selections keep what a plot shows."""

import json
import math
import random

import pytest

from gracetune.dashboard.run_state import RunState
from gracetune.dashboard.series import Table, dump_json, flatten_numbers


def table_of(losses):
    table = Table()
    for step, loss in enumerate(losses, start=1):
        table.put(step, float(step), {"loss": loss})
    return table


def test_a_repeated_step_is_replaced():
    table = table_of([3.0, 2.0, 1.0])
    assert not table.put(2, 9.0, {"loss": 5.0, "new": 7.0})
    assert not table.put(0, 9.0, {"loss": 8.0})
    assert table.put(4, 9.0, {"new": 1.0})
    rows = table.rows_json(range(len(table)))
    assert rows["steps"] == [0, 1, 2, 3, 4]
    assert rows["columns"] == {"loss": [8, 3, 5, 1, None], "new": [None, None, 7, None, 1]}


def test_a_selection_keeps_the_extremes_and_the_ends():
    rng = random.Random(0)
    losses = [rng.random() for _ in range(20_000)]
    losses[7_777], losses[12_345] = 50.0, -50.0
    table = table_of(losses)
    rows = table.select(600, ["loss"])
    assert len(rows) <= 602
    assert {0, 7_777, 12_345, 19_999} <= set(rows)
    assert rows == sorted(set(rows))


def test_selected_rows_count_all_rows_between_them():
    losses = [float(step % 10) for step in range(5_000)]
    table = table_of(losses)
    rows = table.rows_json(table.select(200, ["loss"]), ["loss"])
    weights, means = rows["weights"], rows["means"]["loss"]
    assert sum(weights) == 5_000
    total = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
    assert total == pytest.approx(sum(losses), rel=1e-4)


def test_a_window_of_steps_is_selected_in_full():
    table = table_of([1.0] * 10_000)
    rows = table.select(500, ["loss"], low=3_000, high=3_100)
    assert [table.steps[row] for row in rows] == list(range(2_999, 3_102))


def test_numbers_are_found_at_any_depth():
    record = {
        "seconds": {"data": 1, "compute": 2.5},
        "gpus": [{"name": "GPU", "power_w": 300, "throttle": ["heat", "power"]}],
        "loss": "nan",
        "by_timestep": {"t0.00-0.25": {"loss": 0.5}},
        "is_on": True,
        "text": "12",
    }
    found = flatten_numbers(record)
    assert math.isnan(found.pop("loss"))
    assert found == {
        "seconds/data": 1,
        "seconds/compute": 2.5,
        "gpus/0/power_w": 300,
        "gpus/0/throttle": 2,
        "by_timestep/t0.00-0.25/loss": 0.5,
        "is_on": 1,
    }


def test_json_for_browsers_has_no_infinity_and_no_half_characters():
    text = dump_json({"a": [math.inf, 1.5], "b": "\ud800é"})
    assert json.loads(text)["a"] == [None, 1.5]
    text.encode("ascii")


def step(number, **more):
    return {"event": "step_done", "time": float(number), "step": number, "loss": 1.0} | more


def test_changes_follow_each_other():
    state = RunState()
    state.apply(step(1))
    first = state.take_delta()
    assert first["tables"]["step_done"]["steps"] == [1]
    assert state.take_delta() is None
    state.apply(step(2))
    state.apply({"event": "notice", "time": 2.0, "text": "hello"})
    second = state.take_delta()
    assert second["version"] == first["version"] + 1
    assert second["tables"]["step_done"]["steps"] == [2]
    assert second["records"]["notice"][0]["text"] == "hello"
    state.apply(step(1, loss=9.0))
    assert state.take_delta()["reload"]
    assert state.snapshot(100)["tables"]["step_done"]["columns"]["loss"] == [9, 1]


def test_losses_of_two_experts_have_columns_of_their_own():
    state = RunState()
    state.apply(step(1, expert="high"))
    state.apply(step(2, expert="low", loss=0.5))
    columns = state.snapshot(10)["tables"]["step_done"]["columns"]
    assert columns["loss/high"] == [1, None]
    assert columns["loss/low"] == [None, 0.5]


def test_old_logs_have_their_held_out_loss_in_validations():
    state = RunState()
    record = {"event": "validated", "time": 1.0, "step": 5, "losses": {"held_out": 0.25}}
    state.apply(record)
    columns = state.snapshot(10)["tables"]["held_out_loss"]["columns"]
    assert columns == {"losses/held_out": [0.25]}


def test_steps_without_a_finite_loss_are_listed():
    state = RunState()
    for number, loss in ((1, 1.0), (2, "nan"), (3, "inf"), (4, 1.0)):
        state.apply(step(number, loss=loss))
    assert state.snapshot(10)["non_finite"] == [2, 3]


@pytest.mark.parametrize("wrong", [{"time": "now"}, {"step": "one"}, {"step": 2**60}])
def test_events_with_wrong_types_are_counted_as_damaged(wrong):
    state = RunState()
    state.apply(step(1) | wrong)
    assert state.damaged == 1
    assert "step_done" not in state.tables or not len(state.tables["step_done"])
