"""Masked losses on a GPU: the weights arrive with the batch, without host syncs."""

import numpy as np
import pytest
import torch
from PIL import Image
from sync_checks import assert_steps_never_sync

from gracetune.events.run_control import RunControl
from gracetune.events.types import StepDone
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.run import SignalHandler, run_training

pytestmark = pytest.mark.gpu


@pytest.fixture
def masked_run(tiny_run, tmp_path):
    """Build runs on sixteen images of noise, of which only the left half is trained."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    half = np.zeros((24, 24), np.uint8)
    half[:, :12] = 255
    for number in range(16):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(half).save(tmp_path / "masks" / f"{number}.png")
    dataset = {
        "id": "masked",
        "instance_data_dir": str(tmp_path / "images"),
        "mask_data_dir": str(tmp_path / "masks"),
        "caption_strategy": "filename",
        "resolution": 24,
        "max_aspect": 1.0,
    }
    return lambda **sections: tiny_run(datasets=[dataset], **sections)


def test_mask_weights_are_on_the_device_of_the_latents(masked_run, recorder, tmp_path):
    run = masked_run()
    (tmp_path / "run").mkdir()
    session = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    batch = session.pipeline.load(session.pipeline.order.batch_at(0))
    assert batch.weights.device == batch.latents.device
    expected = torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0, 0.0]).expand(4, 6, 6)
    assert torch.equal(batch.weights.cpu(), expected)
    assert not any("weights" in name for name in batch.text)


def test_a_step_with_masks_has_no_host_syncs(masked_run, recorder, tmp_path):
    run = masked_run(train={"mixed_precision": "bf16"})
    (tmp_path / "run").mkdir()
    session = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    assert_steps_never_sync(session)


@pytest.mark.parametrize("hints", [False, True])
def test_masked_batches_are_prefetched(masked_run, recorder, hints):
    run = masked_run(
        train={"max_train_steps": 8},
        gh200_optimizations={"enable_uvm_hints": hints},
        cache_config={"vae_cache_type": "unified_memory"},
    )
    run_training(run, sinks=[recorder])
    losses = [event.loss for event in recorder.of(StepDone)]
    assert len(losses) == 8
    assert all(np.isfinite(losses))
