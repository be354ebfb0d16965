"""On a GPU, gradients of every family are those of plain blocks, and races are found."""

import pytest
import torch
from fakes.family_sessions import (
    FAMILIES,
    MODES,
    change_mode,
    family_run,
    family_session,
    small_plans,
    with_new_optimizer,
)
from fakes.planted_races import slot_race

from gracetune.cli.check import table_lines
from gracetune.errors import RunFailedError
from gracetune.train.gradient_check import check_gradients
from gracetune.train.loop import train_loop
from gracetune.train.step import TrainProgress

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=FAMILIES.values())
def session(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    run = family_run(folder, request.param, train={"mixed_precision": "bf16"})
    with small_plans("inductor"), family_session(run, lambda _: None) as built:
        yield built


@pytest.mark.parametrize("mode", MODES)
def test_every_family_passes_in_every_mode(session, mode):
    torch._dynamo.reset()
    changed = change_mode(session, mode)
    report = check_gradients(changed)
    assert report.passed, "\n".join(table_lines(report))
    assert all(block.update_error == 0.0 for block in report.blocks)


def test_the_slot_race_is_found_by_the_command_and_in_the_first_step(tmp_path):
    run = family_run(tmp_path, "tiny", train={"mixed_precision": "bf16", "checkpoint_every": 0})
    with small_plans(), family_session(run, lambda _: None) as session, slot_race():
        changed = change_mode(session, "streamed")
        assert not check_gradients(changed).passed
        with pytest.raises(RunFailedError, match="computes wrong numbers"):
            train_loop(with_new_optimizer(changed), TrainProgress())
