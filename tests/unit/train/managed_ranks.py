"""Train on the ranks of this group with managed memory of simulated drivers, in one of these cases.

    plain       all ranks have enough memory
    full        rank 1 has no space for the first update: first with the moving average of the
                weights on the device, then with the state of the optimizer there
    one-without rank 1 has no managed memory
    one-full    the same, and rank 1 is out of memory in the first step

Called as `managed_ranks.py FOLDER CASE`, with the run file FOLDER/run.json. Each rank writes its
results to FOLDER/CASE-RANK.result. Started by test_managed_overflow.py.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
from fakes.managed import simulate_machine

from gracetune.config.load import load_run_file
from gracetune.errors import RunFailedError
from gracetune.events.types import ManagedOverflow, Notice, StepDone
from gracetune.train import build, step
from gracetune.train.run import run_training

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Recorder:
    """Keeps every event that is emitted on a rank; only the main rank has sinks."""

    def __init__(self, monkeypatch):
        self.events = []
        original = build.build_session

        def build_session(run, accelerator, emit, *given, **named):
            def record(event):
                self.events.append(event)
                emit(event)

            return original(run, accelerator, record, *given, **named)

        monkeypatch.setattr("gracetune.train.run.build_session", build_session)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def fail_first(monkeypatch, module, name, times, chosen=lambda named: True):
    """Let the first calls of a function run out of memory."""
    original, left = getattr(module, name), [None] * times

    def call(*given, **named):
        if left and chosen(named):
            left.pop()
            raise torch.OutOfMemoryError(FULL)
        return original(*given, **named)

    monkeypatch.setattr(module, name, call)


def train(folder, case, rank):
    run = load_run_file(folder / "run.json").run
    run = run.model_copy(update={"output_dir": str(folder / case)})
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder, error = Recorder(monkeypatch), ""
        if rank == 0 or not case.startswith("one-"):
            simulate_machine(monkeypatch)
        if rank == 1 and case == "full":  # memory for new state is tested with `empty_like`
            is_probe = lambda named: named == {"dtype": torch.float32}  # noqa: E731
            fail_first(monkeypatch, torch, "empty_like", 2, is_probe)
        if rank == 1 and case == "one-full":
            fail_first(monkeypatch, step, "batch_losses", 2)  # once is repeated without its check
        try:
            run_training(run)
        except RunFailedError as failure:
            error = str(failure)
    found = {
        "error": error,
        "losses": [event.loss for event in recorder.of(StepDone)],
        "moved": [(event.step, event.role, event.reason) for event in recorder.of(ManagedOverflow)],
        "warnings": [event.text for event in recorder.of(Notice) if event.level == "warning"],
    }
    (folder / f"{case}-{rank}.result").write_text(json.dumps(found))


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"]))
