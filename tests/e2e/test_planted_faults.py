"""Plant a fault in a real run: a health event must name its cause in words.

Throttling is planted at the sensors; all other faults are real. Those that take long are `slow`.
"""

import json
import os
import shutil
import signal
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.two_streams import (
    CHANNELS,
    VIDEO_TARGETS,
    TwoStreamTransformer,
    install_two_streams,
)
from fork_process import run_python
from PIL import Image
from safetensors.torch import load_file, save_file

from gracetune.config.load import load_run_file
from gracetune.errors import DataError, InterruptedRunError, RunFailedError
from gracetune.events.types import (
    HealthChanged,
    HeldOutLoss,
    LossParts,
    StepDone,
    StepTimes,
    WeightsMoved,
)
from gracetune.memory.sensors import SensorReading
from gracetune.train.health import HealthMonitor
from gracetune.train.health_checks import LearningRateHigh
from gracetune.train.run import run_training

EVERY_STEP = {"interval_s": 0.0}
"""Telemetry that looks at every step, instead of once a second."""
LORA = {"rank": 4}
OF_THE_MACHINE = {"slow_down", "data_waits", "page_cache", "host_memory", "disk_space"}
"""Checks that another process, which uses the CPU or the disk, can trigger in a healthy run."""


@pytest.fixture
def train(tiny_run, recorder):
    """Return a function that trains and returns the health events, by check."""

    def call(telemetry=EVERY_STEP, **sections):
        run_training(tiny_run(**sections), sinks=[recorder], telemetry=telemetry)
        found = {}
        for event in recorder.of(HealthChanged):
            found.setdefault(event.check, []).append(event)
        return found

    return call


def images(folder, count, make, size=24):
    """Write images with captions, and return the settings of their dataset."""
    folder.mkdir()
    for number in range(count):
        pixels = np.asarray(make(number), np.uint8)
        Image.fromarray(pixels).resize((size, size), Image.Resampling.NEAREST).save(
            folder / f"{number:03d}.png", compress_level=1
        )
        (folder / f"{number:03d}.txt").write_text(f"picture number {number}")
    return {"id": folder.name, "type": "local", "instance_data_dir": str(folder), "resolution": 24}


def noise(seed, size=24):
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3))


def test_a_healthy_run_has_no_findings(train):
    section = {"every": 15, "holdout": 0.2, "sample_steps": 2, "prompts": ["a red circle"]}
    found = train(adapter=LORA, train={"max_train_steps": 30}, validation=section)
    assert not found.keys() - OF_THE_MACHINE


def test_another_timestep_shift_is_reported_at_the_start(train):
    steps = {"max_train_steps": 1, "timestep_shift": 12.0}
    (event,) = train(adapter=LORA, train=steps)["timestep_shift"]
    assert "timesteps are drawn differently than in this model's own training" in event.cause
    assert "If you chose train.timestep_shift: 12.0 on purpose" in event.advice
    assert "Otherwise set it to 1.0" in event.advice


def test_an_adapter_that_does_not_move(train):
    found = train(adapter=LORA, train={"max_train_steps": 30}, optimizer={"lr": 1e-12})
    (event,) = found["weights_still"]
    assert "the adapter does not move" in event.cause
    assert "optimizer.lr (it is 1e-12)" in event.advice


@pytest.mark.slow
def test_a_learning_rate_that_is_too_high(train):
    found = train(adapter=LORA, train={"max_train_steps": 60}, optimizer={"lr": 0.3})
    event = found["learning_rate_high"][0]
    assert "the learning rate is too high" in event.cause
    assert "optimizer.lr is 0.3" in event.advice


class StopAt:
    """An event sink that ends the run after a step, as Ctrl-C does."""

    def __init__(self, step):
        self.step = step

    def handle(self, event):
        if isinstance(event, StepDone) and event.step == self.step:
            signal.raise_signal(signal.SIGTERM)

    def close(self):
        pass


def test_a_resumed_run_judges_as_one_that_was_not_interrupted(tiny_run, recorder, monkeypatch):
    """Its adapter has moved far, and its loss had fallen before the interruption."""
    remembered, remember = [], HealthMonitor.remember
    monkeypatch.setattr(
        HealthMonitor,
        "remember",
        lambda monitor, earlier: remember(monitor, remembered.extend(earlier) or remembered),
    )
    attention = ["attn.*", "ff.*", "ff_context.*", "context_embedder", "proj_out"]
    targets = [*attention, "norm1.linear", "norm1_context.linear", "norm_out.linear"]
    lora, steps = {"rank": 32, "targets": targets}, {"max_train_steps": 120}
    run = tiny_run(adapter=lora, train=steps, optimizer={"lr": 0.008})
    with pytest.raises(InterruptedRunError):
        run_training(run, sinks=[recorder, StopAt(80)], telemetry=EVERY_STEP)
    (*_, at_stop) = recorder.of(WeightsMoved)
    assert at_stop.step == 80
    assert statistics.median(at_stop.blocks.values()) > LearningRateHigh.FAR

    run_training(run, sinks=[recorder], telemetry=EVERY_STEP)
    found = {event.check for event in recorder.of(HealthChanged)}
    assert not found - OF_THE_MACHINE
    assert [one.step for seen in remembered for one in seen.steps] == list(range(1, 81))
    assert [one.moved for one in remembered if one.moved is not None][-1] == at_stop


def test_a_learning_rate_that_makes_training_diverge(train, recorder):
    with pytest.raises(RunFailedError, match="diverged"):
        train(adapter=LORA, train={"max_train_steps": 60}, optimizer={"lr": 30.0})
    (event,) = [one for one in recorder.of(HealthChanged) if one.check == "not_finite"]
    assert "the learning rate is too high" in event.cause
    assert "Lower optimizer.lr" in event.advice


@pytest.mark.slow
def test_a_dead_dataset(train, tmp_path, tiny_run):
    shapes = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)
    black = images(tmp_path / "black", 16, lambda _: np.zeros((24, 24, 3)))
    found = train(adapter=LORA, datasets=[shapes, black], train={"max_train_steps": 20})
    event = found["dataset_dead"][0]
    assert "dataset 'black' is dead" in event.cause
    assert "black, blank or silent" in event.cause


@pytest.fixture
def two_streams(tmp_path, monkeypatch):
    """Install a family with a video and an audio stream."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    install_two_streams(tmp_path / "site")
    return {"family": "two_streams"}


def test_an_untrained_audio_stream(train, two_streams):
    found = train(
        model=two_streams,
        adapter=LORA | {"targets": VIDEO_TARGETS},
        train={"max_train_steps": 4},
    )
    (event,) = found["part_untrained"]
    assert "the audio part of the model is not trained: none of its 24 weights" in event.cause
    assert "adapter.targets include the audio blocks" in event.advice


def test_trained_streams_are_fine(train, two_streams, recorder):
    found = train(model=two_streams, adapter=LORA, train={"max_train_steps": 60})
    assert "part_untrained" not in found
    assert recorder.of(LossParts)[-1].by_part.keys() == {"video", "audio"}


def test_an_audio_stream_whose_gradient_gets_lost(train, two_streams, monkeypatch):
    """Let the gradient of the audio get lost, as in a forward pass that detaches it."""
    forward = TwoStreamTransformer.forward

    def detached(self, *args):
        video, audio = forward(self, *args).split(list(CHANNELS.values()), 1)
        return torch.cat([video, 0 * audio + audio.detach()], 1)

    monkeypatch.setattr(TwoStreamTransformer, "forward", detached)
    found = train(model=two_streams, adapter=LORA, train={"max_train_steps": 4})
    (event,) = found["part_untrained"]
    assert "the audio part of the model is not trained" in event.cause
    assert "have a zero gradient" in event.cause


class HotGpu:
    """Sensors of a GPU that is too hot."""

    def read(self):
        gpu = {"index": 0, "name": "H200", "sm_clock_mhz": 795, "max_sm_clock_mhz": 1980}
        heat = {"temperature_c": 93, "throttle": ["hardware thermal slowdown"]}
        return SensorReading((gpu | heat,), {})


def test_throttling(train):
    found = train(EVERY_STEP | {"sensors": HotGpu()}, adapter=LORA)
    (event,) = found["throttling"]
    assert "GPU 0 (H200) is throttling" in event.cause
    assert "795 of 1980 MHz because of hardware thermal slowdown at 93 °C" in event.cause


@pytest.mark.slow
def test_overfitting(train, tmp_path, recorder):
    few = images(tmp_path / "few", 12, noise)
    section = {"every": 40, "holdout": 0.34, "sample_steps": 1, "prompts": ["picture"]}
    steps = {"max_train_steps": 400, "batch_size": 8}
    found = train(datasets=[few], train=steps, optimizer={"lr": 3e-3}, validation=section)
    event = found["overfitting"][0]
    best = recorder.of(HeldOutLoss)[-1].best_step
    assert f"the model overfits since step {best}" in event.cause
    assert f"Use the adapter of step {best}" in event.advice


@pytest.fixture
def train_sd3(train, miniature, tmp_path):
    """Return a function that trains an SD3 miniature some of whose weights are changed."""

    def call(change, pattern, **sections):
        model = shutil.copytree(miniature("sd35-medium"), tmp_path / "model")
        for file in model.glob(pattern):
            weights = load_file(file)
            change(weights)
            save_file(weights, file, {"format": "pt"})
        data = images(tmp_path / "data", 4, noise, size=64) | {"resolution": 64}
        return train(
            model={"family": "sd3", "path": str(model)},
            datasets=[data],
            adapter=LORA,
            train={"max_train_steps": 2, "batch_size": 1, "ema_decay": 0},
            **sections,
        )

    return call


@pytest.mark.slow
def test_a_black_vae(train_sd3, tmp_path):
    def blacken(weights):
        weights["decoder.conv_out.weight"].zero_()
        weights["decoder.conv_out.bias"].fill_(-1)

    section = {"every": 2, "sample_steps": 1, "prompts": ["one", "two"]}
    event = train_sd3(blacken, "vae/*.safetensors", validation=section)["samples_empty"][0]
    assert "2 of 2 samples of step 0 are black" in event.cause
    assert "VAE" in event.cause
    record = json.loads((tmp_path / "run/validation/step-000000/samples.json").read_text())
    assert [one["problem"] for one in record["samples"]] == ["black", "black"]


@pytest.mark.slow
def test_a_vae_that_overflows(train_sd3):
    def overflow(weights):
        weights["encoder.conv_out.bias"].fill_(torch.inf)

    with pytest.raises(DataError, match="the VAE encodes it to values that are not finite"):
        train_sd3(overflow, "vae/*.safetensors")


@pytest.mark.slow
def test_weights_that_are_not_finite_are_no_high_learning_rate(train_sd3, recorder):
    def break_one(weights):
        weights["proj_out.bias"].fill_(torch.nan)

    with pytest.raises(RunFailedError, match=r"Check the weights in model\.path"):
        train_sd3(break_one, "transformer/*.safetensors", logging={"every": 1})
    (event,) = [one for one in recorder.of(HealthChanged) if one.check == "not_finite"]
    assert "no weight had been changed before, so the learning rate is not the cause" in event.cause


@pytest.mark.slow
def test_a_text_encoder_that_puts_out_zeros(train_sd3):
    def clear(weights):
        for weight in weights.values():
            weight.zero_()

    (event,) = train_sd3(clear, "text_encoder*/*.safetensors")["text_embeddings"]
    assert "the text encoder puts out zeros" in event.cause
    assert "prompts have no effect" in event.cause


@pytest.mark.slow
def test_the_demo_has_no_findings(train):
    demo = load_run_file(Path(__file__).parents[2] / "examples/demo.json").run
    section = demo.validation.model_dump(exclude_unset=True) | {"every": 60, "sample_steps": 2}
    found = train(
        train=demo.train.model_dump(exclude_unset=True) | {"max_train_steps": 180},
        optimizer=demo.optimizer.model_dump(exclude_unset=True) | {"warmup_steps": 20},
        validation=section,
    )
    assert not found.keys() - OF_THE_MACHINE


@pytest.mark.slow
def test_a_slow_loader(train, tmp_path, recorder):
    large = images(tmp_path / "large", 8, lambda seed: noise(seed, 1500), size=1500)
    large |= {"augmentations": [{"name": "flip"}], "augmentations_cache_mode": "disable_cache"}
    found = train(datasets=[large], adapter=LORA, train={"max_train_steps": 10})
    event = found["data_waits"][0]
    assert "the data loader is slow" in event.cause
    times = recorder.of(StepTimes)[-1]
    assert times.seconds["data"] > 0.2 * times.total


CGROUP = Path("/sys/fs/cgroup/memory/gracetune-test")


@pytest.fixture
def small_cgroup():
    """Return a function that limits the memory of a process, as a batch system does."""
    try:
        CGROUP.mkdir()
    except OSError:
        pytest.skip("memory cgroups cannot be created here")
    yield CGROUP
    CGROUP.rmdir()


THRASH = """
import os, sys, threading
from pathlib import Path
from gracetune.config.schema import RunFile
from gracetune.train.run import run_training

group, big, file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
run = RunFile.model_validate_json(file.read_text())
(group / "cgroup.procs").write_text(str(os.getpid()))

def read():  # as a loader does that reads files again in every epoch
    while True:
        with open(big, "rb") as file:
            while file.read(1 << 20):
                pass

class Start:
    def handle(self, event):
        if type(event).__name__ == "RunStarted":
            used = int((group / "memory.usage_in_bytes").read_text())
            (group / "memory.limit_in_bytes").write_text(str(used + (240 << 20)))
            for _ in range(2):
                threading.Thread(target=read, daemon=True).start()
    def close(self):
        pass

run_training(run, sinks=[Start()], telemetry={"interval_s": 1.0})
os._exit(0)
"""


@pytest.mark.slow
def test_a_thrashing_page_cache(small_cgroup, tiny_run, tmp_path):
    big = tmp_path / "big"
    big.write_bytes(os.urandom(400 << 20))
    descriptor = os.open(big, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    run = tiny_run(adapter=LORA, train={"max_train_steps": 100})
    (tmp_path / "run.json").write_text(run.model_dump_json())
    (tmp_path / "thrash.py").write_text(THRASH)
    done = run_python(tmp_path / "thrash.py", small_cgroup, big, tmp_path / "run.json")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in log]
    rates = [e["host"]["refaults_per_s"] for e in events if e["event"] == "device_sensors"]
    found = [e for e in events if e["event"] == "health" and e["check"] == "page_cache"]
    assert found, rates
    assert "the page cache is thrashing" in found[0]["cause"]


def test_step_times_add_up_to_the_time_of_a_step(train, recorder):
    train(adapter=LORA, train={"max_train_steps": 4})
    for times in recorder.of(StepTimes):
        done = next(e for e in recorder.of(StepDone) if e.step == times.step)
        assert sum(times.seconds.values()) == pytest.approx(times.total)
        assert times.total == pytest.approx(done.seconds, rel=0.2)
