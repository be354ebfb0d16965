from pathlib import Path

import pytest
import torch
from PIL import Image

from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.cache.encode import Ranks
from gracetune.cache.memory_tier import MemoryTier, allocate_pageable
from gracetune.cache.shard_store import ShardStore
from gracetune.cache.stores import CacheStores
from gracetune.config.schema import RunFile
from gracetune.data.gather import MissingGather
from gracetune.data.loader import BucketGroup
from gracetune.data.pipeline import DataPipeline, split_holdout
from gracetune.data.sample import Sample
from gracetune.errors import ConfigError, DataError, RunFailedError
from gracetune.models.tiny import load


def samples(count, prefix="s"):
    return tuple(
        Sample("d", f"{prefix}{i}", f"caption {i}", f"{prefix}{i}", 8, 8) for i in range(count)
    )


@pytest.fixture
def feed(tiny_run, told, tmp_path):
    def make(**sections):
        run = tiny_run(**sections)
        folder = Path(run.output_dir)
        folder.mkdir(exist_ok=True)
        mover = build_batch_transfer(run.gh200_optimizations, torch.device("cpu"), told)
        return DataPipeline(run, load(run.model), mover, folder, told)

    return make


def test_a_batch_that_no_size_can_fill_is_told(feed, told):
    feed(train={"batch_size": 100})
    (text,) = [text for text in told.texts() if text.startswith("train.batch_size is 100")]
    assert text.endswith("no bucket has more than 64 samples in an epoch, so batches are smaller")
    told.events.clear()
    feed(train={"batch_size": 64})
    assert not [text for text in told.texts() if text.startswith("train.batch_size")]


def test_batches_hold_the_latents_and_texts_of_their_own_samples(feed):
    made = feed()
    draws = made.order.batch_at(0)
    batch = made.load(draws)
    assert len(batch) == 4
    assert batch.latents.shape == (4, 48, 6, 6)
    for index, draw in enumerate(draws):
        alone = made.load([draw])
        assert torch.equal(batch.latents[index], alone.latents[0])
        assert torch.equal(batch.text["tokens"][index], alone.text["tokens"][0])


def test_the_bucket_report_is_told_and_written(feed, told, tmp_path):
    feed()
    assert any("24x24" in text for text in told.texts())
    assert (tmp_path / "run" / "buckets-0.json").exists()


def test_a_holdout_is_kept_out_and_complete(feed):
    made = feed(validation={"holdout": 0.25})
    held = {draw.sample for batch in made.held_out_draws for draw in batch}
    assert len(held) == 16
    assert len(made.train_samples) == 48
    assert not held & set(made.train_samples)


def test_a_holdout_of_everything_is_refused(feed):
    with pytest.raises(DataError, match=r"validation\.holdout"):
        feed(validation={"holdout": 1.0})


def test_adding_samples_moves_few_of_the_held_out():
    groups = [BucketGroup(samples(200), 1, 0.0, (8, 8))]
    more = [BucketGroup(samples(220), 1, 0.0, (8, 8))]
    before, after = (set(split_holdout(g, 0.1, 0)[1][0].samples) for g in (groups, more))
    assert len(before) == 20
    assert len(before & after) >= 16


def test_the_split_is_the_same_in_any_order():
    forward = [BucketGroup(samples(50), 1, 0.0, (8, 8))]
    backward = [BucketGroup(tuple(reversed(samples(50))), 1, 0.0, (8, 8))]
    first, second = (set(split_holdout(g, 0.2, 3)[1][0].samples) for g in (forward, backward))
    assert first == second


@pytest.mark.parametrize(
    ("cache", "dataset", "latents", "text"),
    [
        ({}, {}, MemoryTier, MemoryTier),
        ({"persistent_cache": True}, {}, MemoryTier, MemoryTier),
        ({"vae_cache_type": "disk"}, {}, ShardStore, MemoryTier),
        ({"text_cache_type": "disk"}, {}, MemoryTier, ShardStore),
        ({}, {"cache_latents_to_disk": True}, MemoryTier, MemoryTier),
    ],
)
def test_stores_are_what_the_run_file_says(cache, dataset, latents, text, told, tmp_path):
    run = RunFile.model_validate({"cache_config": cache, "datasets": [dataset]})
    stores = CacheStores(run, tmp_path, told)
    assert type(stores.latents) is latents
    assert type(stores.text) is text


def test_unified_memory_says_where_entries_live(told, tmp_path):
    run = RunFile.model_validate({"cache_config": {"vae_cache_type": "unified_memory"}})
    CacheStores(run, tmp_path, told)
    assert "unified_memory" in told.texts()[0]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_folder_that_nothing_is_kept_in_is_named(keeps, told, tmp_path):
    section = {"cache_dir": str(tmp_path / "kept"), "persistent_cache": keeps}
    CacheStores(RunFile.model_validate({"cache_config": section}), tmp_path, told)
    found = [text for text in told.texts() if "kept is not used: the cache is in memory" in text]
    assert len(found) == (not keeps)


@pytest.mark.parametrize(("kind", "said"), [("memory", 1), ("disk", 0)])
def test_a_missing_helper_is_said_once_where_it_would_help(kind, said, told, tmp_path):
    run = RunFile.model_validate({"cache_config": {"vae_cache_type": kind}})
    stores = CacheStores(run, tmp_path, told, find=lambda: MissingGather("nobody built it"))
    stores.open_latents("generation", tmp_path / "generation")
    found = [event for event in told.events if "nobody built it" in event.text]
    assert [event.fallback for event in found] == [True] * said
    stores.latents.put("a", {"x": torch.tensor([1.0])})
    assert stores.latents.gather(["a"], "x", allocate_pageable).tolist() == [[1.0]]
    stores.close()


def test_a_cache_folder_is_found_by_the_next_run(feed, told, tmp_path):
    cache = {"persistent_cache": True, "cache_dir": str(tmp_path / "cache")}
    feed(cache_config=cache)
    stages = {event.stage for event in told.events if type(event).__name__ == "StageProgress"}
    assert "encoding latents" in stages
    told.events.clear()
    feed(cache_config=cache)
    stages = {event.stage for event in told.events if type(event).__name__ == "StageProgress"}
    assert "encoding latents" not in stages
    assert "encoding captions" not in stages


def test_steps_and_sizes_that_do_not_suit_the_model_are_refused(feed, tiny_run):
    dataset = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ConfigError, match="bucket_step is 6"):
        feed(datasets=[dataset | {"bucket_step": 6}])
    with pytest.raises(ConfigError, match="takes at most 64"):
        feed(datasets=[dataset | {"resolution": 128}])


def test_several_ranks_share_files_and_host_memory(told, tmp_path):
    run = RunFile.model_validate({"datasets": [{}]})
    alone, shared = (
        CacheStores(run, tmp_path / f"{world}", told, ranks=Ranks(0, world)) for world in (1, 4)
    )
    assert not alone.latents_on_disk
    assert shared.latents_on_disk
    assert any("4 ranks share one cache of encoded samples" in text for text in told.texts())


def test_the_host_budget_is_split_between_kinds(told, tmp_path):
    cache = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}
    run = RunFile.model_validate({"cache_config": {**cache, "host_budget_gb": 4}})
    CacheStores(run, tmp_path, told)
    assert "latents live in host memory, up to 3.0 GiB" in told.texts()[0]
    assert "text live in host memory, up to 1.0 GiB" in told.texts()[1]


def test_closing_seals_the_shards_and_a_closed_feed_still_loads(feed, tmp_path):
    cache = {"cache_dir": str(tmp_path / "cache"), "vae_cache_type": "disk"}
    made = feed(cache_config={**cache, "text_cache_type": "disk"})
    files = [*(tmp_path / "cache").rglob("shards/*")]
    assert {path.suffix for path in files} == {".open"}
    draws = made.order.batch_at(0)
    made.will_need(draws)
    before = made.load(draws)
    made.close()
    files = [*(tmp_path / "cache").rglob("shards/*")]
    assert {path.suffix for path in files} == {".safetensors"}
    assert torch.equal(made.load(draws).latents, before.latents)
    made.close()


def test_a_feed_that_cannot_be_built_leaves_its_cache_sealed(feed, tmp_path):
    cache = {"persistent_cache": True, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(DataError, match="holdout"):
        feed(cache_config=cache, validation={"holdout": 1.0})
    (path,) = (tmp_path / "cache" / "latents" / "shards").iterdir()
    assert path.suffix == ".safetensors"


def test_batches_may_mix_data_sets_that_are_cached_refreshed_and_encoded_live(feed, tiny_run):
    """One size, three ways: each sample has the latents that it has alone."""
    dataset = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)
    modes = ("static", "refresh_each_epoch", "disable_cache")
    random = {"crop": "random", "max_aspect": 1.0}
    made = feed(
        datasets=[
            dataset | random | {"id": mode, "augmentations_cache_mode": mode} for mode in modes
        ],
        train={"batch_size": 12},
    )
    try:
        draws = made.order.batch_at(0)
        made.will_need(draws)
        made.will_need(made.order.batch_at(made.order.epoch_length))  # not made yet
        batch = made.load(draws)
        assert len({draw.sample.dataset for draw in draws}) == 3
        for index, draw in enumerate(draws):
            assert torch.equal(batch.latents[index], made.load([draw]).latents[0])
    finally:
        made.close()


def pictures_in(folder, count=4):
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (30, 24), (number, 0, 0)).save(folder / f"{number}.png")
    return {
        "id": "d",
        "instance_data_dir": str(folder),
        "caption_strategy": "filename",
        "resolution": 24,
        "crop": "random",
    }


def test_a_picture_that_breaks_while_training_ends_the_run_by_name(feed, tmp_path):
    dataset = pictures_in(tmp_path / "pictures")
    made = feed(datasets=[dataset | {"augmentations_cache_mode": "disable_cache"}])
    assert len(made.load(made.order.batch_at(0))) == 4
    (tmp_path / "pictures" / "2.png").write_bytes(b"torn")
    with pytest.raises(RunFailedError, match=r"'d': 2.png was readable when the run started"):
        made.load(made.order.batch_at(0))
    made.close()


def test_a_picture_that_breaks_before_its_next_generation_ends_the_run_by_name(feed, tmp_path):
    dataset = pictures_in(tmp_path / "pictures")
    made = feed(datasets=[dataset | {"augmentations_cache_mode": "refresh_each_epoch"}])
    (tmp_path / "pictures" / "1.png").write_bytes(b"torn")
    made.load(made.order.batch_at(0))
    with pytest.raises(RunFailedError, match=r"'d': 1.png was readable when the run started"):
        made.load(made.order.batch_at(made.order.epoch_length))
    made.close()


def test_pictures_that_cannot_be_read_are_dropped_and_all_of_them_are_too_many(feed, tmp_path):
    dataset = pictures_in(tmp_path / "pictures") | {"max_corruption_rate": 1.0}
    whole = (tmp_path / "pictures" / "0.png").read_bytes()
    torn = whole[: len(whole) - 30]  # its head says a size, its pixels cannot be read
    (tmp_path / "pictures" / "0.png").write_bytes(torn)
    assert len(feed(datasets=[dataset]).train_samples) == 3
    for number in range(4):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(torn)
    with pytest.raises(DataError, match=r"datasets\[0\] \('d'\): none of the 4 pictures"):
        feed(datasets=[dataset])
