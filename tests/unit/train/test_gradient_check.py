"""Gradients and updates of every family, in every mode, are those of plain blocks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.family_sessions import (
    CASES,
    FAMILIES,
    MODES,
    change_mode,
    family_run,
    family_session,
    small_plans,
    with_new_optimizer,
)
from fakes.planted_races import slot_race
from fakes.quantization import KINDS, skip_without_package
from fork_process import run_ranks

from gracetune.cli.check import spread, table_lines
from gracetune.cli.main import main
from gracetune.distributed.ranks import SINGLE
from gracetune.errors import RunFailedError
from gracetune.events.types import CheckpointSaved, StepDone
from gracetune.models import family as families
from gracetune.models.registry import FamilyInfo
from gracetune.optim.offloaded_state import OptimizerStepper
from gracetune.train.gradient_check import FirstStepCheck, check_gradients, random_block
from gracetune.train.loop import train_loop
from gracetune.train.run import run_training
from gracetune.train.step import TrainProgress, mark_last, train_step, turn_at

pytestmark = pytest.mark.filterwarnings("ignore")
LITTLE = {"device_memory": "63MB", "compile": "never"}
"""Less than the tiny model needs without streaming."""


ALL_MODES_IN_CI = ("flux", "wan22-t2v")
"""Families that are checked in every mode in CI."""
IN_CI = ("streamed", "recomputed")
"""Modes in which every family is checked in CI."""
SOME_FAMILIES = ("tiny", "wan22-t2v")


def is_slow(case, kind, mode):
    """Return True if a combination is left to the slow tests."""
    if case not in FAMILIES.values() or kind != "none":
        return True
    return mode not in IN_CI and case not in ALL_MODES_IN_CI


@pytest.fixture(scope="module")
def session(request, tmp_path_factory):
    case, kind = request.param
    skip_without_package(kind)
    run = family_run(tmp_path_factory.mktemp("family"), case, model={"quantize": kind})
    with small_plans(), family_session(run, lambda _: None) as built:
        yield built


@pytest.mark.parametrize(
    ("session", "mode"),
    [
        pytest.param(
            *(model, mode),
            marks=pytest.mark.slow if is_slow(*model, mode) else (),
            id=f"{'-'.join(model)}-{mode}".replace("-none-", "-"),
        )
        # One object for all modes of a model, so that pytest builds its session once.
        for model in [*((case, "none") for case in CASES), *(("flux", kind) for kind in KINDS)]
        for mode in MODES
    ],
    indirect=["session"],
    scope="module",
)
def test_every_family_passes_in_every_mode(session, mode):
    torch._dynamo.reset()
    changed = change_mode(session, mode)
    report = check_gradients(changed)
    assert report.notes == []
    assert report.passed, "\n".join(table_lines(report))
    assert len(report.blocks) == len(session.state.family.blocks())
    for block in report.blocks:
        is_trained = any(name.startswith(f"{block.name}.") for name in session.state.parameters)
        expected = 0.0 if is_trained else None
        assert block.update_error == expected, "the same kernels give the same bits"
        assert all(result.eager_error > 0 for result in block.results[:1]), "something was compared"
    applied = session.plan_controller._applied
    assert (applied.ring is not None) == (mode != "eager")
    assert (applied.offload is not None) == (mode in ("offloaded", "recomputed", "compiled"))
    if applied.offload is not None:
        assert applied.offload.counters().sent
    if applied.compiler is not None:
        assert applied.compiler.graphs
        assert not applied.compiler.failure
    check_first_step(changed)


def check_first_step(session):
    """Run one step as the loop does, with the check of a block for each transformer."""
    check = FirstStepCheck(replace(session, references=list(session.references)))
    texts = []
    check._emit = lambda notice: texts.append(notice.text)
    stream = session.pipeline.batches()
    schedule = session.state.expert_schedule
    for step in range(1 if schedule is None else 2):
        progress = TrainProgress(step=step)
        assert check.begin(turn_at(session.state, progress).expert)
        batch, _ = next(stream)
        train_step(session.state, mark_last([batch]), 1, progress, check.finish)
        assert not check.begin(turn_at(session.state, progress).expert), "checked once"
    stream.close()
    assert len(texts) == (1 if schedule is None else 2)
    assert all(text.startswith("gradients: block ") for text in texts)


@pytest.fixture
def tiny_session(tmp_path, recorder):
    run = family_run(tmp_path, "tiny", train={"checkpoint_every": 0})
    with small_plans(), family_session(run, recorder) as built:
        yield built


@pytest.mark.parametrize(
    "mode", ["streamed", "recomputed", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_the_slot_race_is_found_by_the_command_and_in_the_first_step(tiny_session, mode, recorder):
    torch._dynamo.reset()
    changed, references = change_mode(tiny_session, mode), list(tiny_session.references)
    with slot_race():
        report = check_gradients(changed)
        assert not report.passed
        assert max(block.ratio for block in report.blocks) > 1000
        assert any("FAILED" in line for line in table_lines(report))
        before = {name: p.detach().clone() for name, p in changed.state.parameters.items()}
        changed = with_new_optimizer(changed)
        with pytest.raises(RunFailedError, match=r"block transformer_blocks\.\d computes wrong"):
            train_loop(changed, TrainProgress())
    assert recorder.of(StepDone) == []
    assert recorder.of(CheckpointSaved) == []
    for name, parameter in changed.state.parameters.items():
        assert torch.equal(parameter, before[name]), "no weight was changed"
    changed = change_mode(tiny_session, mode)
    changed.references.extend(references)  # the first step drops them
    assert check_gradients(changed).passed


def test_wrong_updates_are_found(tiny_session, monkeypatch):
    """The state of the first step is not copied back to host memory."""
    changed = change_mode(tiny_session, "streamed")
    monkeypatch.setattr(OptimizerStepper, "_fetch", lambda _, slot, bucket: None)
    report = check_gradients(changed)
    assert not report.passed
    assert all(result.passed for block in report.blocks for result in block.results)
    assert not all(block.update_error <= 1e-3 for block in report.blocks), "NaN, the poison"
    assert any("updates differ by" in line for line in table_lines(report))


def test_a_tensor_without_a_gradient_stops_the_run_with_its_name(tmp_path, monkeypatch, recorder):
    """The last block of Qwen-Image has such weights, which the registry lists."""
    run = family_run(tmp_path, "qwen-image", plan="off")
    known = FamilyInfo("gracetune.models.qwen_image", has_key_table=True)
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES | {"qwen_image": known})
    expected = (
        r"6 of \d+ trained tensors received no gradient in the first step.*"
        r"transformer_blocks\.1\.attn\.to_add_out.*No weight was changed"
    )
    with pytest.raises(RunFailedError, match=expected):
        run_training(run, sinks=[recorder])
    assert recorder.of(StepDone) == []


@pytest.mark.parametrize("setting", [True, False, "off"])
def test_a_planned_run_checks_a_block_unless_it_is_turned_off(tiny_run, recorder, setting):
    train = {"max_train_steps": 2, "check_gradients": setting}
    run_training(tiny_run(adapter={"rank": 4}, plan=LITTLE, train=train), sinks=[recorder])
    checks = [text for text in recorder.texts() if text.startswith("gradients: block ")]
    assert len(checks) == (setting is True)
    assert len(recorder.of(StepDone)) == 2


def test_the_check_does_not_change_the_run(tiny_run, tmp_path, recorder):
    def losses(setting):
        recorder.events.clear()
        train = {"max_train_steps": 3, "check_gradients": setting}
        folder = str(tmp_path / str(setting))
        run = tiny_run(adapter={"rank": 4, "dropout": 0.1}, plan=LITTLE, train=train)
        run_training(run.model_copy(update={"output_dir": folder}), sinks=[recorder])
        return [(event.loss, event.grad_norm) for event in recorder.of(StepDone)]

    assert losses(True) == losses(False)


def test_a_check_that_does_not_fit_is_skipped_with_a_warning(tiny_run, recorder, monkeypatch):
    from gracetune.train import gradient_check

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr(gradient_check.BlockReference, "compare", out_of_memory)
    run_training(tiny_run(adapter={"rank": 4}, plan=LITTLE), sinks=[recorder])
    assert any("were not compared with a plain block" in text for text in recorder.texts())
    assert len(recorder.of(StepDone)) == 3


def test_memory_for_the_check_does_not_shrink_the_plan(tiny_run, recorder, monkeypatch):
    """A step that fails while a block is recorded is repeated with the same plan."""
    from gracetune.train import loop

    train_step, failures = loop.train_step, []

    def fail_once(state, batches, accumulation, progress, check, compiled):
        if not failures:
            failures.append(check)
            next(iter(batches))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return train_step(state, batches, accumulation, progress, check, compiled)

    monkeypatch.setattr(loop, "train_step", fail_once)
    run_training(tiny_run(adapter={"rank": 4}, plan=LITTLE), sinks=[recorder])
    assert failures[0] is not None
    assert any("were not compared with a plain block" in text for text in recorder.texts())
    assert not any("smaller plan" in text for text in recorder.texts())
    assert len(recorder.of(StepDone)) == 3


def test_a_random_block_is_one_of_the_blocks():
    assert {random_block(SINGLE, 3)[0] for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [(5, None, [0, 1, 2, 3, 4]), (5, 9, [0, 1, 2, 3, 4]), (57, 3, [0, 28, 56]), (5, 1, [2])],
)
def test_blocks_are_spread_over_the_model(count, limit, expected):
    assert list(spread(count, limit)) == expected


@pytest.fixture
def run_path(tiny_run, tmp_path):
    run = tiny_run(adapter={"rank": 4}, plan=LITTLE, train={"max_train_steps": 2})
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run.model_dump(mode="json", exclude_unset=True)))
    return path


def test_the_command_prints_a_table_and_leaves_no_result(run_path, capsys):
    assert main(["check", "gradients", str(run_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "block"
    assert lines[1].startswith("transformer_blocks.0  streamed, ")
    assert lines[-1].startswith("passed: 4 blocks; the largest error is ")
    assert max(map(len, lines)) < 120
    folder = Path(json.loads(run_path.read_text())["output_dir"])
    assert not (folder / "checkpoints").exists()
    assert not (folder / "adapter").exists()
    assert not (folder / "run.json").exists()


def test_the_command_compares_blocks_without_a_plan(run_path, capsys):
    assert main(["check", "gradients", str(run_path), "--set", "plan=off"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("transformer_blocks.0  resident, no plan  ")
    assert lines[-1].startswith("passed: 4 blocks; ")


def test_the_command_fails_on_a_race_and_prints_json(run_path, capsys):
    with slot_race():
        assert main(["check", "gradients", str(run_path), "--blocks", "2", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert [block["block"] for block in report["blocks"]] == [
        "transformer_blocks.0",
        "transformer_blocks.3",
    ]
    worst = report["blocks"][1]["weight gradient"]
    assert worst["error"] > worst["limit"]


def test_the_command_refuses_to_check_no_blocks(run_path, capsys):
    assert main(["check", "gradients", str(run_path), "--blocks", "0"]) == 2
    assert "--blocks is 0, but must be 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME_FAMILIES, id="few", marks=pytest.mark.slow),
        pytest.param(tuple(FAMILIES.values()), id="all", marks=pytest.mark.distributed),
    ],
)
def test_families_pass_on_two_ranks(cases, tmp_path):
    """One pair of processes checks all of them, and finds gradients that are not summed."""
    for case in cases:
        folder = tmp_path / case
        folder.mkdir()
        run = family_run(folder, case, train={"batch_size": 1, "max_train_steps": 1})
        settings = run.model_dump(mode="json", exclude_unset=True)
        (tmp_path / f"{case}.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("two_rank_gradients.py")
    first, second = run_ranks(script, tmp_path)
    assert first.returncode == second.returncode == 0, first.stderr[-4000:] + second.stderr[-4000:]
    assert first.stdout.count(" passed") == len(cases)
    assert first.stdout.count("not summed: found") == 1
