"""Divided ranks that recompute as planned have the gradients of one process."""

import json
import math
import os
from pathlib import Path

import pytest
from fakes.family_sessions import family_run
from fork_process import run_python, run_ranks
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("planned_sharded_cases.py")
TOLERANCE = 1e-6
"""Largest difference of gradients, relative to the norm of the gradient of the step."""
STEPS, PASSES = 2, 2
"""Steps of a run, and micro-batches of each rank in a step."""
CASES = {
    # The device memory that each of these plans needs differs by 1 % for a model of this size.
    "small": {"plan": {"device_memory": "73.2MB"}},
    "medium": {"plan": {"device_memory": "74.2MB"}},
    "gathered": {"distributed": {"reshard_after_forward": False}},
    "offloaded": {"distributed": {"cpu_offload": True}},
    "compiled": {"plan": {"compile": "always"}},
    "hybrid": {"optimizer": {"state": "host"}},
}
IN_CI = {"small": {"recompute", "keep"}, "medium": {"recompute", "keep"}}
"""Cases that CI runs -> the activation modes of their blocks; other cases keep everything."""


def write_case(folder, name):
    sections = CASES[name]
    run = family_run(
        folder / "tiny",
        "tiny",
        train={"batch_size": 2, "effective_batch_size": 8, "max_train_steps": STEPS},
        distributed={"strategy": "fsdp2"} | sections.get("distributed", {}),
        plan=sections.get("plan", {}),
        optimizer=sections.get("optimizer", {}),
    )
    settings = json.loads(run.model_dump_json(exclude_unset=True))
    settings["output_dir"] = str(folder / "runs" / name)
    del settings["adapter"]  # all weights are trained
    (folder / "ranks" / f"{name}.json").write_text(json.dumps(settings))
    settings["plan"] = "off"  # all cases compute the same
    (folder / "alone" / "whole.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module", params=["ci", pytest.param("rest", marks=pytest.mark.distributed)])
def results(request, tmp_path_factory):
    """Train cases in one process and on two ranks; return their names and a function to read."""
    folder = tmp_path_factory.mktemp("planned")
    for part in ("tiny", "ranks", "alone"):
        (folder / part).mkdir()
    names = [name for name in CASES if (name in IN_CI) == (request.param == "ci")]
    for name in names:
        write_case(folder, name)
    alone = run_python(SCRIPT, folder / "alone", "alone", env=os.environ)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    for done in run_ranks(SCRIPT, folder / "ranks", "ranks", count=2, timeout=300):
        assert done.returncode == 0, done.stdout + done.stderr
    return names, lambda case, name, kind: folder / name / f"{case}-{name}.{kind}"


def test_planned_shards_have_the_gradients_of_one_process(results):
    names, file = results
    for case in names:
        expected = load_file(file("whole", "alone", "safetensors"))
        found = load_file(file(case, "ranks", "safetensors"))
        for step in range(STEPS):
            gradients = [name for name in expected if name.startswith(f"{step} ")]
            assert gradients
            norm = math.sqrt(sum(float(expected[name].square().sum()) for name in gradients))
            for name in gradients:
                difference = float((found[name] - expected[name]).norm())
                assert difference <= TOLERANCE * norm, (case, name, difference / norm)


def test_blocks_keep_what_the_plan_says(results):
    names, file = results
    for case in names:
        counts = json.loads(file(case, "ranks", "counts").read_text())
        texts = json.loads(file(case, "ranks", "result").read_text())["texts"]
        assert set(counts["modes"]) == IN_CI.get(case, {"keep"})
        checkpointed = [mode for mode in counts["modes"] if mode != "keep"]
        assert counts["calls"] == STEPS * PASSES * len(checkpointed)
        (text,) = [text for text in texts if text.startswith("plan: FSDP2: weights in 2 shards; ")]
        assert ("compiled;" in text) == (case == "compiled")
        assert ("100% of the optimizer state in host memory" in text) == (case == "hybrid")
        assert any("activations are not offloaded" in text for text in texts)
        (shapes,) = [text for text in texts if text.startswith("shapes: ")]
        assert "batches of 1 and 2" in shapes, "two ranks may have a part of a batch each"
        assert ("graphs to compile" in shapes) == (case == "compiled")
