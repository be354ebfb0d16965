from math import inf, nan

import pytest
import torch

from gracetune.errors import RunFailedError
from gracetune.events.types import MemoryUsed, StepDone
from gracetune.optim.automagic import Automagic
from gracetune.train.loop import MetricsBuffer, learning_rate_histograms
from gracetune.train.step import StepResult


def result(loss=1.0, samples=4, norm=2.0):
    return StepResult(torch.tensor(loss), torch.tensor(norm), 0.1, torch.tensor(float(samples)), 1)


class Transfer:
    def memory_used(self, step):
        return MemoryUsed(step, 1, 0, 0)


def metrics_buffer(emit, every):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return MetricsBuffer(emit, every, Transfer(), optimizer)


def test_results_are_emitted_when_the_window_is_full(recorder):
    metrics = metrics_buffer(recorder, every=3)
    for step in (1, 2):
        metrics.add(step, 0, result())
    assert recorder.events == []
    metrics.add(3, 0, result(loss=0.25))
    assert [e.step for e in recorder.of(StepDone)] == [1, 2, 3]
    assert recorder.of(StepDone)[-1].loss == 0.25
    assert recorder.of(MemoryUsed)[0].host > 0


def test_pending_results_are_flushed_once(recorder):
    metrics = metrics_buffer(recorder, every=10)
    metrics.add(1, 0, result())
    metrics.flush()
    metrics.flush()
    assert len(recorder.of(StepDone)) == 1


@pytest.mark.parametrize(("loss", "norm"), [(nan, 1.0), (inf, 1.0), (1.0, nan), (1.0, inf)])
def test_a_result_that_is_not_finite_is_emitted_and_ends_the_run(recorder, loss, norm):
    metrics = metrics_buffer(recorder, every=1)
    with pytest.raises(RunFailedError, match=r"at step 5.*optimizer\.lr"):
        metrics.add(5, 0, result(loss, norm=norm))
    assert recorder.of(StepDone)[0].step == 5


def test_only_automagic_has_learning_rate_histograms():
    p = torch.nn.Parameter(torch.zeros(2))
    assert learning_rate_histograms(torch.optim.SGD([p], lr=0.1), 3) == []
    p.grad = torch.ones(2)
    optimizer = Automagic([{"params": [p], "stage": "low"}])
    optimizer.step()
    (histogram,) = learning_rate_histograms(optimizer, 3)
    assert (histogram.expert, sum(histogram.counts)) == ("low", 2)
