"""Masks on a CUDA device: their weights travel with the batch, and no step waits for them."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.events.requests import Requests
from gracetune.events.types import StepDone
from gracetune.train.build import build, start_accelerator
from gracetune.train.interrupt import Interrupt
from gracetune.train.run import run_training
from gracetune.train.state import Progress
from gracetune.train.step import train_step

pytestmark = pytest.mark.gpu


@pytest.fixture
def masked_run(tiny_run, tmp_path):
    """Sixteen pictures of noise, of which the left half is learnt."""
    for name in ("pictures", "masks"):
        (tmp_path / name).mkdir()
    half = np.zeros((24, 24), np.uint8)
    half[:, :12] = 255
    for number in range(16):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
        Image.fromarray(half).save(tmp_path / "masks" / f"{number}.png")
    dataset = {
        "id": "masked",
        "instance_data_dir": str(tmp_path / "pictures"),
        "mask_data_dir": str(tmp_path / "masks"),
        "caption_strategy": "filename",
        "resolution": 24,
        "max_aspect": 1.0,
    }
    return lambda **sections: tiny_run(datasets=[dataset], **sections)


def test_weights_lie_where_the_latents_do(masked_run, told, tmp_path):
    run = masked_run()
    (tmp_path / "run").mkdir()
    session = build(run, start_accelerator(run), told, Requests(tmp_path), Interrupt()).session
    batch = session.feed.load(session.feed.order.at(0))
    assert batch.weights.device == batch.latents.device
    expected = torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0, 0.0]).expand(4, 6, 6)
    assert torch.equal(batch.weights.cpu(), expected)
    assert not any("weights" in name for name in batch.text)


def test_a_step_with_masks_never_waits_for_the_device(masked_run, told, tmp_path):
    run = masked_run(train={"mixed_precision": "bf16"})
    (tmp_path / "run").mkdir()
    session = build(run, start_accelerator(run), told, Requests(tmp_path), Interrupt()).session
    batches = [session.feed.load(session.feed.order.at(i)) for i in range(6)]
    for index in range(3):  # the first steps make optimizer state and choose kernels
        train_step(session.trainee, [batches[index]], 1, Progress(index, index))
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(3, 6):
            train_step(session.trainee, [batches[index]], 1, Progress(index, index))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("hints", [False, True])
def test_masked_batches_are_brought_ahead(masked_run, told, hints):
    run = masked_run(
        train={"max_train_steps": 8},
        gh200_optimizations={"enable_uvm_hints": hints},
        cache_config={"vae_cache_type": "unified_memory"},
    )
    run_training(run, sinks=[told])
    losses = [event.loss for event in told.of(StepDone)]
    assert len(losses) == 8
    assert all(np.isfinite(losses))
