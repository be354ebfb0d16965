"""The trainer on a CUDA device: the same losses with and without managed memory, and no waiting."""

import subprocess
import sys

import pytest
import torch
from waiting import assert_steps_never_wait

from gracetune.events.run_control import RunControl
from gracetune.events.types import MemoryUsed, StepDone
from gracetune.train.build import build_session, start_accelerator
from gracetune.train.run import SignalHandler, run_training

pytestmark = pytest.mark.gpu


def losses(told):
    return [event.loss for event in told.of(StepDone)]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_hints_put_batches_into_managed_memory_and_change_no_loss(
    tiny_run, told, precision, tmp_path
):
    train = {"max_train_steps": 12, "mixed_precision": precision}
    plain = tiny_run(train=train, output_dir=str(tmp_path / "plain"))
    run_training(plain, sinks=[told])
    expected = losses(told)
    assert {event.managed for event in told.of(MemoryUsed)} == {0}
    told.events.clear()

    hinted = tiny_run(
        train=train,
        output_dir=str(tmp_path / "hinted"),
        gh200_optimizations={"enable_uvm_hints": True},
    )
    run_training(hinted, sinks=[told])
    torch.testing.assert_close(losses(told), expected, rtol=2e-2, atol=0)
    assert told.of(MemoryUsed)[-1].managed > 0
    fallbacks = [e.text for e in told.events if type(e).__name__ == "Notice" and e.fallback]
    refused = [text for text in fallbacks if "staged" not in text]  # a machine without compiler
    assert all("no whole page" in text for text in refused), refused  # tiny's text is that small


def test_resuming_on_the_device_goes_on_where_it_was(tiny_run, told):
    run_training(tiny_run(train={"max_train_steps": 6}), sinks=[told])
    told.events.clear()
    run_training(tiny_run(train={"max_train_steps": 9}), sinks=[told])
    assert [event.step for event in told.of(StepDone)] == [7, 8, 9]


TRAINED = """
import sys
from gracetune.cli.main import main
assert main(["train", sys.argv[1]]) == 0
import torch
kept = torch.ones(1, device="cuda")
print({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


def test_a_run_from_the_command_line_has_growing_segments(tiny_run, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    file = tmp_path / "run.json"
    file.write_text(tiny_run(plan="off").model_dump_json(exclude_unset=True))
    words = [sys.executable, "-c", TRAINED, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["{True}"], done.stdout + done.stderr


@pytest.mark.parametrize("adapter", [None, {"rank": 4}])
def test_a_step_never_waits_for_the_device(tiny_run, told, tmp_path, adapter):
    run = tiny_run(adapter=adapter, train={"mixed_precision": "bf16"})
    (tmp_path / "run").mkdir()
    session = build_session(run, start_accelerator(run), told, RunControl(tmp_path), SignalHandler())
    assert_steps_never_wait(session)
