"""Train a tiny model in a real SimpleTuner on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Not `simpletuner.helpers`: the folder `simpletuner` of the repository has that, too.
pytest.importorskip(
    "simpletuner.helpers.data_backend", reason="make test-hosts runs it in that environment"
)

from tiny_pipeline import write_environment, write_pipeline

SCRIPT = Path(__file__).with_name("train_on_cpu.py")
SRC = Path(__file__).resolve().parents[2] / "src"
WITH_PLUGIN = ("-m", "gracetune.hosts.simpletuner")
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("model") / "pipeline")


def train(folder: Path, *python_options: str) -> str:
    """Train an environment and return the log without colour codes."""
    done = subprocess.run(
        [sys.executable, *python_options, str(SCRIPT)],
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
    """Bit for bit: stock, with the plug-in disabled, and with data and caches in memory."""
    stock = write_environment(tmp_path / "stock", pipeline)
    train(stock)
    off = write_environment(tmp_path / "off", pipeline, use_gh200_trainer=False)
    train(off, *WITH_PLUGIN)
    assert weights(off) == weights(stock)
    on = write_environment(tmp_path / "on", pipeline, in_memory=True, **OURS)
    log = train(on, *WITH_PLUGIN)
    assert weights(on) == weights(stock)
    assert "cache files are kept in host memory" in log
    assert "staged" in log


def test_a_ramp_finishes_and_resumes(tmp_path, pipeline):
    """From 1 to 3 micro-batches, interrupted after two steps."""
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
    log = train(folder, *WITH_PLUGIN)
    assert "ramp enabled: 1 -> 3 micro-batches over 4" in log
    assert "gradient_accumulation_steps -> 2" in log
    assert (folder / "out/checkpoint-2").is_dir()
    config = folder / "config.json"
    text = config.read_text().replace('"max_train_steps": 2', '"max_train_steps": 4')
    config.write_text(text.replace("{", '{"resume_from_checkpoint": "latest",', 1))
    log = train(folder, *WITH_PLUGIN)
    assert "gradient_accumulation_steps -> 3" in log
    assert (folder / "out/checkpoint-4").is_dir()
