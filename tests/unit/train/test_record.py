from math import inf, nan

import pytest
import torch

from gracetune.errors import RunFailedError
from gracetune.events.types import MemoryUsed, StepDone
from gracetune.train.loop import MetricsBuffer
from gracetune.train.step import StepResult


def result(loss=1.0, samples=4, norm=2.0):
    return StepResult(torch.tensor(loss), torch.tensor(norm), 0.1, torch.tensor(float(samples)), 1)


def record_of(told, every):
    return MetricsBuffer(told, every, lambda step: MemoryUsed(step, 1, 0, 0))


def test_nothing_is_read_before_the_window_is_full(told):
    record = record_of(told, every=3)
    for step in (1, 2):
        record.add(step, 0, result())
    assert told.events == []
    record.add(3, 0, result(loss=0.25))
    assert [e.step for e in told.of(StepDone)] == [1, 2, 3]
    assert told.of(StepDone)[-1].loss == 0.25
    assert told.of(MemoryUsed)[0].host > 0


def test_what_is_left_is_flushed_once(told):
    record = record_of(told, every=10)
    record.add(1, 0, result())
    record.flush()
    record.flush()
    assert len(told.of(StepDone)) == 1


@pytest.mark.parametrize(("loss", "norm"), [(nan, 1.0), (inf, 1.0), (1.0, nan), (1.0, inf)])
def test_what_is_no_number_is_told_and_ends_the_run(told, loss, norm):
    record = record_of(told, every=1)
    with pytest.raises(RunFailedError, match=r"at step 5.*optimizer\.lr"):
        record.add(5, 0, result(loss, norm=norm))
    assert told.of(StepDone)[0].step == 5
