"""Ranks that divide the weights compute what one process computes with the same samples."""

import json
import math
import os
from pathlib import Path

import pytest
from fakes.family_sessions import family_run
from fork_process import run_python, run_ranks
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("sharded_cases.py")
TOLERANCE = 1e-6
"""Largest difference of gradients, relative to the norm of the gradient of the step."""
ROUNDED = {"mixed": 0.01, "masters": 0.01}
"""The same of cases that compute in bf16, whose sums are rounded in another order."""
RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 8,
    "target_effective_batch_size": 16,
    "batch_rampup_steps": 8,
}
HSDP = {"distributed": {"strategy": "hsdp", "shard_size": 2}}
VALIDATION = {"every": 2, "sample_steps": 2, "prompts": ["a", "b", "c"], "holdout": 0.3}
CASES = {
    "whole": {
        "train": {"ema_decay": 0.9, "gradient_checkpointing": True, "max_grad_norm": 0.5},
        "validation": VALIDATION,
    },
    "experts": {
        "family": "wan22-t2v",
        "train": {"batch_size": 1, "effective_batch_size": 4, "switch_every": 1},
    },
    "ramp": {"gh200_optimizations": RAMP, "train": {"effective_batch_size": None}},
    "mixed": {"train": {"mixed_precision": "bf16", "gradient_checkpointing": True}},
    "masters": {"family": "flux", "model": {"dtype": "bfloat16"}},
}
"""Name of a case -> sections of its run file."""
HYBRID_CASES = {
    "copies": {"train": {"ema_decay": 0.9, "effective_batch_size": 16}, **HSDP},
    "copies-uneven": {"train": {"effective_batch_size": 10}, "validation": VALIDATION, **HSDP},
    "copies-experts": {**CASES["experts"], "validation": VALIDATION, **HSDP},
    "copies-automagic": {"optimizer": {"name": "automagic", "lr_bump": 1e-3}, **HSDP},
    "copies-offload": {"distributed": {**HSDP["distributed"], "cpu_offload": True}},
    "four": {"train": {"ema_decay": 0.9}},
}
OPTIMIZER_CASES = {
    "lion": {"optimizer": {"name": "lion"}},
    "schedule-free": {"optimizer": {"name": "schedule_free"}, "validation": VALIDATION},
    "automagic": {"optimizer": {"name": "automagic"}},
    "automagic-elements": {"optimizer": {"name": "automagic", "lr_bump": 1e-3}},
    "state-in-host-memory": {"optimizer": {"state": "host"}},
    "offload": {"distributed": {"cpu_offload": True}, "train": {"ema_decay": 0.9}},
    "kept-gathered": {
        "distributed": {"reshard_after_forward": False, "prefetch_blocks": 2},
        "train": {"ema_decay": 0.9},
        "validation": VALIDATION,
    },
    "one-expert": {
        "family": "wan22-t2v",
        "train": {"batch_size": 1, "effective_batch_size": 4, "experts": "high"},
    },
}


def write_case(folder, name, sections):
    sections = dict(sections)
    family = sections.pop("family", "tiny")
    train = {"batch_size": 2, "effective_batch_size": 8, "max_train_steps": 3}
    train |= {"checkpoint_every": 0} | sections.pop("train", {})
    # A large epsilon: where a gradient is almost zero, Adam would turn its rounding into an update.
    optimizer = {"lr": 0.01, "eps": 0.01} | sections.pop("optimizer", {})
    ranks = {"strategy": "fsdp2"} | sections.pop("distributed", {})
    (folder / family).mkdir(exist_ok=True)
    run = family_run(
        folder / family,
        family,
        **{"adapter": None, "plan": "off", "optimizer": optimizer, "distributed": ranks},
        train=train,
        **sections,
    )
    settings = json.loads(run.model_dump_json(exclude_unset=True))
    settings["output_dir"] = str(folder / "runs" / name)
    (folder / f"{name}.json").write_text(json.dumps(settings))


def train_all(folder, cases, count):
    """Train all cases in one process and on several ranks; return the results of a case."""
    for name, sections in cases.items():
        write_case(folder, name, sections)
    alone = run_python(SCRIPT, folder, "alone", env=os.environ)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    for done in run_ranks(SCRIPT, folder, "ranks", count=count, timeout=600):
        assert done.returncode == 0, done.stdout + done.stderr

    def read(case, name):
        file = folder / f"{case}-{name}"
        return json.loads(file.with_suffix(".result").read_text()), load_file(
            file.with_suffix(".safetensors")
        )

    return read


def check_same(results, case):
    """Compare steps, gradients, validation and, within what the optimizer does to them, weights."""
    (alone, expected), (ranks, tensors) = results(case, "alone"), results(case, "ranks")
    tolerance = ROUNDED.get(case, TOLERANCE)
    assert ranks["samples"] == alone["samples"]
    assert ranks["micro_batches"] == alone["micro_batches"]
    assert ranks["losses"] == pytest.approx(alone["losses"], rel=tolerance)
    assert ranks["norms"] == pytest.approx(alone["norms"], rel=10 * tolerance)
    assert ranks["rates"] == pytest.approx(alone["rates"], rel=10 * tolerance)
    for found, wanted in zip(ranks["held_out"], alone["held_out"], strict=True):
        assert found == pytest.approx(wanted, rel=10 * tolerance)
    assert tensors.keys() == expected.keys()
    for step in range(3):
        names = [name for name in expected if name.startswith(f"{step} ")]
        assert names
        norm = math.sqrt(sum(float(expected[name].square().sum()) for name in names))
        for name in names:
            difference = float((tensors[name].float() - expected[name].float()).norm())
            assert difference <= tolerance * norm, (name, difference / norm)
    if case not in ROUNDED:
        for name in expected:
            assert float((tensors[name] - expected[name]).abs().max()) < 1e-4, name
    return ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return train_all(tmp_path_factory.mktemp("sharded"), CASES, 2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_gradients_of_one_process(results, case):
    check_same(results, case)


def test_a_rank_stores_a_part_of_each_tensor(results):
    (alone, _), (ranks, _) = results("whole", "alone"), results("whole", "ranks")
    assert ranks["part"] < alone["part"]
    assert any("FSDP2: weights in 2 shards" in text for text in ranks["texts"])


def test_a_ramp_has_steps_that_ranks_cannot_divide_evenly(results):
    found, _ = results("ramp", "ranks")
    assert found["micro_batches"] == [4, 5, 8]


def test_validation_has_held_out_losses_and_samples_of_all_prompts(results):
    found, _ = results("whole", "ranks")
    assert [list(losses) for losses in found["held_out"]] == [["held_out"]] * 3
    for step in (0, 2, 3):
        samples = Path(found["output_dir"]) / "validation" / f"step-{step:06d}"
        assert [file.name for file in sorted(samples.glob("*.png"))] == [
            "000.png",
            "001.png",
            "002.png",
        ]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return train_all(tmp_path_factory.mktemp("hybrid"), HYBRID_CASES, 4)


@pytest.mark.distributed
@pytest.mark.parametrize("case", HYBRID_CASES)
def test_four_ranks_with_two_copies_have_the_gradients_of_one_process(hybrid, case):
    check_same(hybrid, case)


@pytest.fixture(scope="module")
def optimizers(tmp_path_factory):
    return train_all(tmp_path_factory.mktemp("optimizers"), OPTIMIZER_CASES, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("case", OPTIMIZER_CASES)
def test_optimizers_train_parts_like_whole_tensors(optimizers, case):
    check_same(optimizers, case)


@pytest.mark.distributed
def test_all_ranks_end_and_name_the_one_that_is_out_of_memory(tmp_path):
    """The others wait for its weights in the middle of a pass, so no rank can repeat the step."""
    write_case(tmp_path, "small", {})
    first, second = run_ranks(SCRIPT, tmp_path, "failing")
    assert first.returncode == second.returncode == 1
    assert "rank 1 on" in second.stderr
    assert "ran out of device memory in a step" in second.stderr
    assert "ran out of device memory in a step" in first.stderr, "rank 0 knows the reason"
