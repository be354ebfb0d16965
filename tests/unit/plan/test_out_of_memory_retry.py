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
    """Trains, and gives the losses."""

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
def fill(monkeypatch):
    """The device of a CPU never fills, so a block says so once, at this forward."""

    def at(number):
        calls = itertools.count()
        plan_run = planner.plan_run

        def filling(run, family, *rest):
            controller = plan_run(run, family, *rest)

            def full(*_):
                if next(calls) == number:
                    raise torch.OutOfMemoryError(FULL)

            family.blocks()[-1].register_forward_hook(full)
            return controller

        monkeypatch.setattr(planner, "plan_run", filling)

    return at


def test_a_step_that_runs_out_of_memory_is_repeated_with_a_smaller_plan(losses, recorder, fill):
    """In the middle of a window, and with dropout, which falls as if there had been one try."""
    settings = {"max_train_steps": 4, "gradient_accumulation_steps": 2, "dropout": 0.5}
    expected = losses("off", **settings)
    fill(5)
    assert losses(PLENTY, **settings) == pytest.approx(expected, rel=1e-4)
    (notice,) = [event for event in recorder.of(Notice) if event.fallback]
    assert notice.text.startswith(f"{FULL} Continuing with a smaller plan")


def test_a_smaller_plan_is_compared_with_its_own_steps(losses, recorder, fill, monkeypatch):
    """Moving weights, the try that failed, and the first steps after it are no measure."""
    watched, steps = [], []
    watch, check = PlanController.start_measuring, PlanController.check
    saw = PlanController.count_batch

    def seen(self, batch):
        steps.append(batch)
        return saw(self, batch)

    def begun(self):
        watched.append(len(steps))
        watch(self)

    def checked(self, seconds, left):
        assert len(steps) == watched[-1] + TIMED_STEPS
        return check(self, seconds, left)

    monkeypatch.setattr(PlanController, "count_batch", seen)
    monkeypatch.setattr(PlanController, "start_measuring", begun)
    monkeypatch.setattr(PlanController, "check", checked)
    full_in = WARMUP_STEPS + 2  # the second step that is timed
    fill(full_in - 1)
    losses(PLENTY, max_train_steps=9)
    assert watched == [0, WARMUP_STEPS, full_in + WARMUP_STEPS]
    assert len(steps) == 9 + 1, "one was brought twice"
    assert sum(text.startswith("measured:") for text in recorder.texts()) == 1


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_that_did_not_fit_is_loaded_again(losses, recorder, monkeypatch, accumulation):
    settings = {"max_train_steps": 4, "gradient_accumulation_steps": accumulation}
    expected = losses("off", **settings)
    calls = itertools.count()

    class FullOnce(DataPipeline):
        def load(self, draws):
            if next(calls) == 4:  # the planner loads the first one
                raise torch.OutOfMemoryError(FULL)
            return super().load(draws)

    monkeypatch.setattr(building, "DataPipeline", FullOnce)
    assert losses(PLENTY, **settings) == pytest.approx(expected, rel=1e-4)
    (notice,) = [event for event in recorder.of(Notice) if event.fallback]
    assert notice.text.startswith(f"{FULL} Continuing with a smaller plan")
    assert recorder.of(BatchesFed)[-1].batches == 5 * accumulation, "all of that step twice"


def test_a_step_does_not_hold_its_batches(losses, monkeypatch):
    """A second try brings them again: a large step holds no more of them than a small one."""
    seen, alive = [], []
    saw = PlanController.count_batch

    def counted(self, batch):
        seen.append(weakref.ref(batch.latents))
        alive.append(sum(ref() is not None for ref in seen))
        return saw(self, batch)

    monkeypatch.setattr(PlanController, "count_batch", counted)
    losses(PLENTY, max_train_steps=2, gradient_accumulation_steps=8)
    assert len(alive) == 16
    assert max(alive) <= 2, "one in use, and the next"


def test_steps_that_include_compilation_are_not_timed(losses, recorder, monkeypatch):
    compiling = itertools.chain([True, True], itertools.repeat(False))
    monkeypatch.setattr(PlanController, "has_compiled", lambda _: next(compiling))
    window = TIMED_STEPS + 1  # the clock is started after a step
    losses(PLENTY, max_train_steps=WARMUP_STEPS + 3 * window - 1)
    assert next(compiling) is False
    assert sum(text.startswith("measured:") for text in recorder.texts()) == 1


def test_an_update_is_never_repeated(losses, recorder, monkeypatch):
    """Where the device fills after it, a second try would train on the same batches again."""
    calls = itertools.count()

    def full(optimizer):
        if next(calls) == 2:
            raise torch.OutOfMemoryError(FULL)
        return effective_lr(optimizer)

    monkeypatch.setattr(stepping, "effective_lr", full)
    with pytest.raises(
        RunFailedError,
        match=r"the device ran out of memory after the optimizer.s update \(CUDA out of",
    ):
        losses(PLENTY, max_train_steps=4)
    assert len(recorder.of(StepDone)) == 2
    assert not [event for event in recorder.of(Notice) if event.fallback]
