"""Planted faults: while each run trains, the page names the cause; so does its report."""

import os
import signal
import time
from pathlib import Path

import pytest
from browser.conftest import dashboard
from browser.planted_run import FAULTS, GROUP, MORE_FAULTS
from fork_process import PythonProcess

from gracetune.cli.main import main

WORDS = {
    "learning_rate_high": ("the learning rate is too high", "Lower optimizer.lr"),
    "dataset_dead": ("dataset 'night' is dead", "instance_data_dir"),
    "part_untrained": ("the audio part of the model is not trained", "adapter.targets"),
    "page_cache": ("the page cache is thrashing", "Free host memory"),
    "throttling": ("is throttling: it lowers its clock to 900 of 1980 MHz", "cooling"),
    "weights_still": ("the adapter does not move", "Raise optimizer.lr"),
    "overfitting": ("the model overfits since step", "Use the adapter of step"),
    "timestep_shift": ("drawn differently than in this model's own", "train.timestep_shift"),
    "samples_empty": ("the VAE's output is broken", "Check the VAE"),
    "data_waits": ("the data loader is slow", "Decoding or augmenting is slow"),
    "loss_explodes": ("the learning rate is too high", "Lower optimizer.lr"),
    "learning_rate_low": ("the learning rate is too low", "Raise optimizer.lr"),
    "captions_missing": ("24 of 24 captions of dataset 'uncaptioned' are empty", "caption files"),
    "captions_same": ("all 24 captions of dataset 'alike' are the same", "instance_prompt"),
    "captions_dropped": ("are trained without a caption", "Lower caption_dropout"),
    "file_corrupt": ("1 file of dataset 'cut' cannot be read and is left out: 017.png", "Replace"),
    "files_copied": ("6 of 30 files of dataset 'copied' are copies of others", "Remove the copies"),
    "few_samples": ("the model will learn them by heart", "Lower train.max_train_steps"),
    "batches_small": ("batches have 6.0 samples on average", "lower train.batch_size"),
    "latents_unscaled": ("their scale is wrong", "scaling_factor"),
    "warmup_long": ("the learning rate warms up for 1000 steps", "optimizer.warmup_steps"),
    "gradients_clipped": ("every step clips its gradients", "Raise train.max_grad_norm"),
    "average_frozen": ("training has no effect on them", "train.ema_decay"),
    "samples_noise": ("samples of step 0 are noise", "scaling_factor"),
    "text_encoder_dead": ("the text encoder puts out zeros", "Check the text encoders"),
    "prompts_unrelated": ("no validation prompt has the trigger word 'ohwx'", "[trigger]"),
    "ramp_long": ("the ramp of the batch size is longer than the run", "batch_rampup_steps"),
    "step_skipped": ("steps were skipped", "batch_skipped"),
    "device_shared": ("another process computes on GPU 0", "CUDA_VISIBLE_DEVICES"),
}
"""Fault -> parts of its cause and of the advice."""


def can_limit_memory():
    return os.geteuid() == 0 and os.access("/sys/fs/cgroup/memory", os.W_OK)


def remove_group():
    """Remove the control group when the processes in it have ended."""
    for _ in range(200):
        try:
            GROUP.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)


def test_every_fault_has_its_words():
    assert WORDS.keys() == {*FAULTS, *MORE_FAULTS}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", [*FAULTS, *MORE_FAULTS])
def test_page_and_report_name_the_cause(fault, tmp_path, open_page):
    if fault == "page_cache" and not can_limit_memory():
        pytest.skip("a control group with little memory needs root and cgroup v1")
    script = Path(__file__).parent / "planted_run.py"
    process = PythonProcess(script, fault, tmp_path)
    try:
        with dashboard(tmp_path / "run") as address:
            page = open_page(address)
            finding = page.locator(".finding", has_text=WORDS[fault][0]).first
            finding.wait_for(state="attached", timeout=600_000)
            assert WORDS[fault][1] in finding.text_content()
            page.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        remove_group()
    report = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(report)]) == 0
    copy = open_page(report.as_uri())
    finding = copy.locator(".finding", has_text=WORDS[fault][0]).first
    finding.wait_for(state="attached")
    assert WORDS[fault][1] in finding.text_content()
