from dataclasses import replace
from math import inf, nan

import pytest
import torch

from gracetune.errors import RunFailedError
from gracetune.events.types import BatchSkipped, MemoryUsed, StepDone
from gracetune.optim.automagic import Automagic
from gracetune.train.loop import MAX_SKIPPED_IN_A_ROW, MetricsBuffer, learning_rate_histograms
from gracetune.train.step import StepResult


def result(loss=1.0, samples=4, norm=2.0):
    return StepResult(torch.tensor(loss), torch.tensor(norm), 0.1, torch.tensor(float(samples)), 1)


class Transfer:
    def __init__(self):
        self.observed = []

    def observe(self, step):
        self.observed.append(step)

    def memory_used(self, step):
        return MemoryUsed(step, 1, 0, 0)


class Observer:
    """Takes the place of the telemetry, and keeps what it is shown."""

    def __init__(self):
        self.collected, self.divergences, self.skips = [], [], []

    def collect(self, done, memory):
        self.collected.append([event.step for event in done])

    def diverged(self, step, loss, grad_norm, losses):
        self.divergences.append(step)
        return "Lower optimizer.lr."

    def skipped(self, step, loss, grad_norm, micro_batches):
        return BatchSkipped(step, loss, grad_norm, ("a.png",), 1)


def metrics_buffer(emit, every, observer=None):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return MetricsBuffer(emit, every, Transfer(), optimizer, observer or Observer())


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
    observer = Observer()
    metrics = metrics_buffer(recorder, 1, observer)
    with pytest.raises(RunFailedError, match=r"at step 5.*Lower optimizer\.lr\."):
        metrics.add(5, 0, result(loss, norm=norm))
    assert recorder.of(StepDone)[0].step == 5
    assert observer.divergences == [5]


def test_skipped_steps_are_reported_and_too_many_in_a_row_end_the_run(recorder):
    metrics = metrics_buffer(recorder, every=100)
    skipped = replace(result(nan), is_skipped=True)
    for step in range(1, MAX_SKIPPED_IN_A_ROW):
        metrics.add(step, 0, skipped)
    metrics.add(MAX_SKIPPED_IN_A_ROW, 0, result())
    metrics.flush()
    assert len(recorder.of(BatchSkipped)) == MAX_SKIPPED_IN_A_ROW - 1
    with pytest.raises(RunFailedError, match="diverged"):
        for step in range(11, 11 + MAX_SKIPPED_IN_A_ROW):
            metrics.add(step, 0, skipped)


def test_the_number_of_steps_between_logs_can_change(recorder):
    observer = Observer()
    metrics = metrics_buffer(recorder, 2, observer)
    for step in range(1, 5):
        metrics.add(step, 0, result())
    metrics.every = 3
    for step in range(5, 10):
        metrics.add(step, 0, result())
    assert observer.collected == [[1, 2], [3, 4], [5, 6], [7, 8, 9]]


def test_only_automagic_has_learning_rate_histograms():
    p = torch.nn.Parameter(torch.zeros(2))
    assert learning_rate_histograms(torch.optim.SGD([p], lr=0.1), 3) == []
    p.grad = torch.ones(2)
    optimizer = Automagic([{"params": [p], "stage": "low"}])
    optimizer.step()
    (histogram,) = learning_rate_histograms(optimizer, 3)
    assert (histogram.expert, sum(histogram.counts)) == ("low", 2)
