"""Training on a GPU: same losses with and without managed memory, and no host syncs."""

import subprocess
import sys

import pytest
import torch
from sync_checks import assert_steps_never_sync

from gracetune.events.run_control import RunControl
from gracetune.events.types import MemoryUsed, StepDone
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.run import SignalHandler, run_training

pytestmark = pytest.mark.gpu


def losses(recorder):
    return [event.loss for event in recorder.of(StepDone)]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_hints_put_batches_into_managed_memory_without_changing_losses(
    tiny_run, recorder, precision, tmp_path
):
    train = {"max_train_steps": 12, "mixed_precision": precision}
    plain = tiny_run(train=train, output_dir=str(tmp_path / "plain"))
    run_training(plain, sinks=[recorder])
    expected = losses(recorder)
    assert {event.managed for event in recorder.of(MemoryUsed)} == {0}
    recorder.events.clear()

    hinted = tiny_run(
        train=train,
        output_dir=str(tmp_path / "hinted"),
        gh200_optimizations={"enable_uvm_hints": True},
    )
    run_training(hinted, sinks=[recorder])
    torch.testing.assert_close(losses(recorder), expected, rtol=2e-2, atol=0)
    assert recorder.of(MemoryUsed)[-1].managed > 0
    fallbacks = [e.text for e in recorder.events if type(e).__name__ == "Notice" and e.fallback]
    # Without a C compiler staging falls back, and the text of the tiny model is below a page.
    refused = [text for text in fallbacks if "staged" not in text]
    assert all("no whole page" in text for text in refused), refused


def test_a_run_on_the_gpu_resumes_at_the_next_step(tiny_run, recorder):
    run_training(tiny_run(train={"max_train_steps": 6}), sinks=[recorder])
    recorder.events.clear()
    run_training(tiny_run(train={"max_train_steps": 9}), sinks=[recorder])
    assert [event.step for event in recorder.of(StepDone)] == [7, 8, 9]


TRAIN_AND_INSPECT = """
import sys
from gracetune.cli.main import main
assert main(["train", sys.argv[1]]) == 0
import torch
tensor = torch.ones(1, device="cuda")
print({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


def test_a_run_from_the_command_line_uses_expandable_segments(tiny_run, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    file = tmp_path / "run.json"
    file.write_text(tiny_run(plan="off").model_dump_json(exclude_unset=True))
    command = [sys.executable, "-c", TRAIN_AND_INSPECT, str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1:] == ["{True}"], result.stdout + result.stderr


@pytest.mark.parametrize("adapter", [None, {"rank": 4}])
def test_a_step_has_no_host_syncs(tiny_run, recorder, tmp_path, adapter):
    run = tiny_run(adapter=adapter, train={"mixed_precision": "bf16"})
    (tmp_path / "run").mkdir()
    session = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    assert_steps_never_sync(session)
