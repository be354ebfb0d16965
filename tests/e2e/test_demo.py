"""The demo as `make demo` runs it: it generates combinations it was never trained on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gracetune.config.load import load_run_file
from gracetune.data.demo_dataset import held_out

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from judge_shapes import judge_run  # noqa: E402


def train(example: str, folder: Path) -> None:
    """Train an example through the command line, in `folder`, without coverage tracing."""
    command = [sys.executable, "-m", "gracetune", "train", str(ROOT / "examples" / example)]
    untraced = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=untraced, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


def shares(folder: Path) -> tuple[float, float]:
    verdicts = list(judge_run(folder))
    assert verdicts
    return tuple(
        sum(getattr(v, f"{word}_right") for v in verdicts) / len(verdicts)
        for word in ("colour", "shape")
    )


def test_the_prompts_are_the_combinations_that_are_not_in_the_data():
    for example, concept in (("demo.json", None), ("demo-lora.json", "star")):
        prompts = load_run_file(ROOT / "examples" / example).run.validation.prompts
        assert prompts == tuple(figure.caption for figure in held_out(concept))
    assert len(held_out()) == 32


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_generates_new_combinations_and_a_lora_adds_a_shape(tmp_path):
    train("demo.json", tmp_path)
    demo, lora = tmp_path / "runs/demo", tmp_path / "runs/demo-lora"
    lines = (demo / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["event"] for line in lines]
    assert kinds.index("validated") < kinds.index("step_done"), "there are images before training"
    captions = {file.read_text().strip() for file in (tmp_path / "runs/demo-data").glob("*.txt")}
    prompts = json.loads((demo / "validation/step-000000/prompts.json").read_text())
    assert not captions & set(prompts)
    colour, shape = shares(demo)
    assert colour >= 0.95
    assert shape >= 0.90

    train("demo-lora.json", tmp_path)
    colour, shape = shares(lora)
    assert colour >= 0.85  # 8 prompts: one may be wrong
    assert shape >= 0.85
