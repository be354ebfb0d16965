"""Real training in a real SimpleTuner, on a CPU, with a model made from its configuration."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Not `simpletuner` alone, which the folder of that name would be taken for.
pytest.importorskip("simpletuner.helpers", reason="make test-hosts runs it in that environment")

from tiny_pipeline import write_environment, write_pipeline

SCRIPT = Path(__file__).with_name("train_on_cpu.py")
SRC = Path(__file__).resolve().parents[2] / "src"
PLUGGED = ("-m", "gracetune.hosts.simpletuner")
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("model") / "pipeline")


def train(folder: Path, *how: str) -> str:
    """Train an environment; gives the log without its colours."""
    done = subprocess.run(
        [sys.executable, *how, str(SCRIPT)],
        cwd=folder,
        env=os.environ
        | {
            "CONFIG_BACKEND": "json",
            "CONFIG_PATH": str(folder),
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(SRC),
        },
        capture_output=True,
        text=True,
    )
    log = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert done.returncode == 0, log[-4000:]
    return log


def weights(folder: Path) -> bytes:
    return (folder / "out/pytorch_lora_weights.safetensors").read_bytes()


OURS = {"cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}}


def test_the_plug_in_trains_the_same_weights(tmp_path, pipeline):
    """Stock; plugged in with nothing switched on; data and caches in memory: bit for bit."""
    stock = write_environment(tmp_path / "stock", pipeline)
    train(stock)
    off = write_environment(tmp_path / "off", pipeline, use_gh200_trainer=False)
    train(off, *PLUGGED)
    assert weights(off) == weights(stock)
    on = write_environment(tmp_path / "on", pipeline, in_memory=True, **OURS)
    log = train(on, *PLUGGED)
    assert weights(on) == weights(stock)
    assert "cache files are kept in host memory" in log
    assert "staged" in log


def test_a_ramp_finishes_and_resumes(tmp_path, pipeline):
    """From 1 to 3 micro-batches; after two steps it goes on where it was."""
    ramp = {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 1,
        "target_effective_batch_size": 3,
        "batch_rampup_steps": 4,
    }
    changes = {**OURS, "in_memory": True, "gh200_optimizations": ramp}
    folder = write_environment(
        tmp_path / "ramp", pipeline, max_train_steps=2, checkpoint_step_interval=2, **changes
    )
    log = train(folder, *PLUGGED)
    assert "ramp enabled: 1 -> 3 micro-batches over 4" in log
    assert "gradient_accumulation_steps -> 2" in log
    assert (folder / "out/checkpoint-2").is_dir()
    config = folder / "config.json"
    text = config.read_text().replace('"max_train_steps": 2', '"max_train_steps": 4')
    config.write_text(text.replace("{", '{"resume_from_checkpoint": "latest",', 1))
    log = train(folder, *PLUGGED)
    assert "gradient_accumulation_steps -> 3" in log
    assert (folder / "out/checkpoint-4").is_dir()
