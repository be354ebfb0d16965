"""A cache that is damaged when a run starts: the run encodes again what is lost."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_pipeline_prefetch import FakeDeviceTransfer

from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.cache.encode import Ranks
from gracetune.cache.shard_format import DEFAULT_DATA_OFFSET
from gracetune.data.pipeline import DataPipeline
from gracetune.events.types import Notice, StageProgress, StepDone
from gracetune.models.tiny import load
from gracetune.train.run import run_training


def flip(path):
    data = bytearray(path.read_bytes())
    data[DEFAULT_DATA_OFFSET:] = bytes(byte ^ 0x5A for byte in data[DEFAULT_DATA_OFFSET:])
    path.write_bytes(data)


DAMAGES = {
    "flipped": flip,
    "short": lambda path: os.truncate(path, DEFAULT_DATA_OFFSET + 64),
    "gone": os.unlink,
}


def shards(cache, kind):
    return list((cache / kind / "shards").iterdir())


def fallbacks(recorder):
    return [event.text for event in recorder.of(Notice) if event.fallback]


def encoded(recorder, what):
    return sum(e.total for e in recorder.of(StageProgress) if e.stage == what and e.done == e.total)


@pytest.fixture
def losses(tiny_run, recorder, tmp_path):
    """Return a function that runs with this cache and returns its losses; clears events."""

    def run_with_cache(name, **cache):
        recorder.events.clear()
        section = {"persistent_cache": True, "cache_dir": str(tmp_path / "cache"), **cache}
        run = tiny_run(output_dir=str(tmp_path / name), cache_config=section)
        assert run_training(run, sinks=[recorder]).status == "done"
        return [event.loss for event in recorder.of(StepDone)]

    return run_with_cache


@pytest.mark.parametrize("kind", ["latents", "text"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_repaired_before_the_first_step(losses, recorder, tmp_path, kind, damage):
    intact = losses("first")
    (shard,) = shards(tmp_path / "cache", kind)
    damage(shard)
    assert losses("again") == intact
    (text,) = fallbacks(recorder)
    assert f"cache/{kind} is damaged" in text
    assert encoded(recorder, "encoding latents") == (64 if kind == "latents" else 0)
    assert (encoded(recorder, "encoding captions") > 0) == (kind == "text")
    assert losses("third") == intact
    assert fallbacks(recorder) == []
    assert encoded(recorder, "encoding latents") == encoded(recorder, "encoding captions") == 0


def test_a_missing_shard_of_a_cache_on_disk_is_found_before_the_first_step(
    losses, recorder, tmp_path
):
    intact = losses("first", vae_cache_type="disk", text_cache_type="disk")
    for kind in ("latents", "text"):
        for shard in shards(tmp_path / "cache", kind):
            shard.unlink()
    assert losses("again", vae_cache_type="disk", text_cache_type="disk") == intact
    assert len(fallbacks(recorder)) == 2


def test_a_damaged_mask_is_rendered_again(tiny_run, recorder, tmp_path):
    folder = tmp_path / "masked"
    _write_masked_images(folder)
    section = {"persistent_cache": True, "cache_dir": str(tmp_path / "cache")}
    dataset = {"type": "local", "instance_data_dir": str(folder / "images"), "resolution": 24}
    dataset |= {"mask_data_dir": str(folder / "masks")}

    def run(name):
        recorder.events.clear()
        made = tiny_run(output_dir=str(tmp_path / name), cache_config=section, datasets=[dataset])
        run_training(made, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    intact = run("first")
    for shard in shards(tmp_path / "cache", "latents"):
        flip(shard)
    assert run("again") == intact
    assert len(fallbacks(recorder)) == 1
    assert encoded(recorder, "rendering masks") == 8


def test_a_damaged_text_for_the_device_is_encoded_again(tiny_run, recorder, tmp_path):
    section = {"text_cache_type": "disk", "cache_dir": str(tmp_path / "cache")}
    run = tiny_run(cache_config=section)
    Path(run.output_dir).mkdir()
    family = load(run.model)
    whole = DataPipeline(run, family, FakeDeviceTransfer(), Path(run.output_dir), recorder)
    batch = whole.load(whole.order.batch_at(0))
    whole.close()
    for shard in shards(tmp_path / "cache", "text"):
        flip(shard)
    repaired = DataPipeline(run, family, FakeDeviceTransfer(), Path(run.output_dir), recorder)
    again = repaired.load(repaired.order.batch_at(0))
    repaired.close()
    assert all(torch.equal(again.text[name], batch.text[name]) for name in batch.text)
    assert len([text for text in fallbacks(recorder) if "is damaged" in text]) == 1


def test_each_rank_repairs_what_it_finds(tiny_run, recorder, tmp_path):
    run = tiny_run(cache_config={"persistent_cache": True, "cache_dir": str(tmp_path / "cache")})
    folder, family = Path(run.output_dir), load(run.model)
    folder.mkdir()
    transfer = build_batch_transfer(run.gh200_optimizations, torch.device("cpu"), recorder)
    whole = DataPipeline(run, family, transfer, folder, recorder)
    batch = whole.load(whole.order.batch_at(0))
    whole.close()
    (shard,) = shards(tmp_path / "cache", "latents")
    flip(shard)
    ranks = [Ranks(rank, 2, tmp_path / "reports", timeout_s=5) for rank in range(2)]
    # Rank 1 reports that it has nothing to encode, which is all that rank 0 waits for.
    for what in ("cache-0/encoding-latents-1", "encoding-captions-1"):
        path = tmp_path / "reports" / f"{what}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    first, second = (DataPipeline(run, family, transfer, folder, recorder, one) for one in ranks)
    for pipeline in (first, second):
        assert torch.equal(pipeline.load(pipeline.order.batch_at(0)).latents, batch.latents)
        pipeline.close()
    assert encoded(recorder, "encoding latents") == 2 * 64


def _write_masked_images(folder):
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(8):
        shade = 20 * number
        Image.new("RGB", (24, 24), (shade, 99, 255 - shade)).save(
            folder / "images" / f"{number}.png"
        )
        (folder / "images" / f"{number}.txt").write_text(f"shade {number}")
        mask = Image.new("L", (24, 24), 255)
        mask.paste(shade, (0, 0, 12, 24))
        mask.save(folder / "masks" / f"{number}.png")
