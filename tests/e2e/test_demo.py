"""The demo as `make demo` runs it: combinations it was never trained on come out right."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gracetune.config.load import load_run_file
from gracetune.data.shapes import held_out

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from judge_shapes import judge_run  # noqa: E402


def train(example: str, folder: Path) -> None:
    """Through the command line, in a folder of its own, at the speed a user sees."""
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


def test_its_prompts_are_the_combinations_that_are_never_drawn():
    for example, concept in (("demo.json", None), ("demo-lora.json", "star")):
        prompts = load_run_file(ROOT / "examples" / example).run.validation.prompts
        assert prompts == tuple(figure.caption for figure in held_out(concept))
    assert len(held_out()) == 32


@pytest.mark.timeout(1200)
def test_colours_and_shapes_are_right_and_a_lora_adds_a_shape(tmp_path):
    started = time.time()
    train("demo.json", tmp_path)
    demo, lora = tmp_path / "runs/demo", tmp_path / "runs/demo-lora"
    first = demo / "validation/step-000000.png"
    assert first.stat().st_mtime - started < 60
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
