"""A step that runs out of memory is repeated without a trace in the results."""

import itertools
import weakref

import pytest
import torch

from gracetune.data.pipeline import DataPipeline
from gracetune.errors import RunFailedError
from gracetune.events.types import BatchesFed, Notice, StepDone
from gracetune.optim.schedule import effective_lr
from gracetune.plan import planner
from gracetune.plan.controller import PlanController
from gracetune.train import build as building
from gracetune.train import step as stepping
from gracetune.train.loop import TIMED_STEPS, WARMUP_STEPS
from gracetune.train.run import run_training

PLENTY = {"device_memory": "1GB", "compile": "never"}
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture
def losses(tiny_run, tmp_path, recorder):
    """Return a function that trains and returns the losses."""

    def train(plan, dropout=0.0, **settings):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / ("plain" if plan == "off" else "planned")),
            adapter={"rank": 4, "dropout": dropout},
            train={"batch_size": 2} | settings,
            plan=plan,
        )
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    return train


@pytest.fixture
def run_out_of_memory_at(monkeypatch):
    """Return a function that makes one forward pass of a block run out of memory."""

    def register(number):
        calls = itertools.count()
        plan_run = planner.plan_run

        def plan_and_register(run, family, *rest):
            controller = plan_run(run, family, *rest)

            def full(*_):
                if next(calls) == number:
                    raise torch.OutOfMemoryError(FULL)

            family.blocks()[-1].register_forward_hook(full)
            return controller

        monkeypatch.setattr(planner, "plan_run", plan_and_register)

    return register


def test_a_step_that_runs_out_of_memory_is_repeated_with_a_smaller_plan(
    losses, recorder, run_out_of_memory_at
):
    """Memory runs out inside an accumulation window; dropout is the same as without a retry."""
    settings = {"max_train_steps": 4, "gradient_accumulation_steps": 2, "dropout": 0.5}
    expected = losses("off", **settings)
    run_out_of_memory_at(5)
    assert losses(PLENTY, **settings) == pytest.approx(expected, rel=1e-4)
    (notice,) = [event for event in recorder.of(Notice) if event.fallback]
    assert notice.text.startswith(f"{FULL} Continuing with a smaller plan")


def test_a_smaller_plan_is_compared_with_its_own_steps(
    losses, recorder, run_out_of_memory_at, monkeypatch
):
    """Moving weights, the failed step and the first steps after it are not timed."""
    steps_at_start, steps = [], []
    original_start, check = PlanController.start_measuring, PlanController.check
    count_batch = PlanController.count_batch

    def seen(self, batch):
        steps.append(batch)
        return count_batch(self, batch)

    def start_measuring(self):
        steps_at_start.append(len(steps))
        original_start(self)

    def check_steps(self, seconds, left):
        assert len(steps) == steps_at_start[-1] + TIMED_STEPS
        return check(self, seconds, left)

    monkeypatch.setattr(PlanController, "count_batch", seen)
    monkeypatch.setattr(PlanController, "start_measuring", start_measuring)
    monkeypatch.setattr(PlanController, "check", check_steps)
    full_in = WARMUP_STEPS + 2  # the second step that is timed
    run_out_of_memory_at(full_in - 1)
    losses(PLENTY, max_train_steps=9)
    assert steps_at_start == [0, WARMUP_STEPS, full_in + WARMUP_STEPS]
    assert len(steps) == 9 + 1, "the batch of the failed step is loaded twice"
    assert sum(text.startswith("measured:") for text in recorder.texts()) == 1


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_that_did_not_fit_is_loaded_again(losses, recorder, monkeypatch, accumulation):
    settings = {"max_train_steps": 4, "gradient_accumulation_steps": accumulation}
    expected = losses("off", **settings)
    calls = itertools.count()

    class FullOnce(DataPipeline):
        def load(self, draws):
            if next(calls) == 4:  # the planner loads the first batch
                raise torch.OutOfMemoryError(FULL)
            return super().load(draws)

    monkeypatch.setattr(building, "DataPipeline", FullOnce)
    assert losses(PLENTY, **settings) == pytest.approx(expected, rel=1e-4)
    (notice,) = [event for event in recorder.of(Notice) if event.fallback]
    assert notice.text.startswith(f"{FULL} Continuing with a smaller plan")
    assert recorder.of(BatchesFed)[-1].batches == 5 * accumulation, (
        "all batches of the failed step are loaded twice"
    )


def test_a_step_does_not_hold_its_batches(losses, monkeypatch):
    """A retry loads the batches again, so a step need not keep all of its batches."""
    seen, alive = [], []
    count_batch = PlanController.count_batch

    def record_batch(self, batch):
        seen.append(weakref.ref(batch.latents))
        alive.append(sum(ref() is not None for ref in seen))
        return count_batch(self, batch)

    monkeypatch.setattr(PlanController, "count_batch", record_batch)
    losses(PLENTY, max_train_steps=2, gradient_accumulation_steps=8)
    assert len(alive) == 16
    assert max(alive) <= 2, "the current batch and the next"


def test_steps_that_include_compilation_are_not_timed(losses, recorder, monkeypatch):
    compiling = itertools.chain([True, True], itertools.repeat(False))
    monkeypatch.setattr(PlanController, "has_compiled", lambda _: next(compiling))
    window = TIMED_STEPS + 1  # the clock starts after a step
    losses(PLENTY, max_train_steps=WARMUP_STEPS + 3 * window - 1)
    assert next(compiling) is False
    assert sum(text.startswith("measured:") for text in recorder.texts()) == 1


def test_an_update_is_never_repeated(losses, recorder, monkeypatch):
    """If memory runs out after the update, a retry would train on the same batches twice."""
    calls = itertools.count()

    def full(optimizer):
        if next(calls) == 2:
            raise torch.OutOfMemoryError(FULL)
        return effective_lr(optimizer)

    monkeypatch.setattr(stepping, "effective_lr", full)
    with pytest.raises(
        RunFailedError,
        match=r"the device ran out of memory after the optimizer.s update \(CUDA out of"
        r".*optimizer\.state: host",
    ):
        losses(PLENTY, max_train_steps=4)
    assert len(recorder.of(StepDone)) == 2
    assert not [event for event in recorder.of(Notice) if event.fallback]
