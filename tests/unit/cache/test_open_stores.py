"""The stores that a run uses, and the notices about them."""

import pytest
import torch

from gracetune.cache.encode import Ranks
from gracetune.cache.memory_tier import MemoryTier, allocate_pageable
from gracetune.cache.open_stores import CacheStores
from gracetune.cache.shard_store import ShardStore
from gracetune.cache.shared_tier import SharedTier
from gracetune.config.schema import RunFile
from gracetune.data.bulk_copy import MissingBulkCopier
from gracetune.events.console import notice_lines


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
def test_the_run_file_chooses_the_stores(cache, dataset, latents, text, recorder, tmp_path):
    run = RunFile.model_validate({"cache_config": cache, "datasets": [dataset]})
    stores = CacheStores(run, tmp_path, recorder)
    assert type(stores.latents) is latents
    assert type(stores.text) is text


def test_unified_memory_reports_where_entries_live(recorder, tmp_path):
    run = RunFile.model_validate({"cache_config": {"vae_cache_type": "unified_memory"}})
    CacheStores(run, tmp_path, recorder)
    (notice,) = (event for event in recorder.events if "unified_memory" in event.text)
    (line,) = notice_lines(notice)
    assert line.startswith("cache      type unified_memory: latents up to ")
    assert "are in host memory, not in managed memory: copies ahead of each step are" in line


@pytest.mark.parametrize("persistent", [False, True])
def test_a_cache_folder_that_is_not_used_is_reported(persistent, recorder, tmp_path):
    section = {"cache_dir": str(tmp_path / "kept"), "persistent_cache": persistent}
    CacheStores(RunFile.model_validate({"cache_config": section}), tmp_path, recorder)
    found = [
        text for text in recorder.texts() if "kept is not used: the cache is in memory" in text
    ]
    assert len(found) == (not persistent)


@pytest.mark.parametrize(("kind", "count"), [("memory", 1), ("disk", 0)])
def test_a_missing_gather_helper_is_reported_once_if_it_would_help(kind, count, recorder, tmp_path):
    run = RunFile.model_validate({"cache_config": {"vae_cache_type": kind}})
    stores = CacheStores(run, tmp_path, recorder, find=lambda: MissingBulkCopier("not built"))
    stores.open_latents("epoch", tmp_path / "epoch")
    found = [event for event in recorder.events if "not built" in event.text]
    assert [event.fallback for event in found] == [True] * count
    stores.latents.put("a", {"x": torch.tensor([1.0])})
    assert stores.latents.gather(["a"], "x", allocate_pageable).tolist() == [[1.0]]
    stores.close()


def test_ranks_of_a_machine_share_files_and_host_memory(recorder, tmp_path):
    run = RunFile.model_validate({"datasets": [{}], "cache_config": {"text_cache_type": "disk"}})

    def open_stores(ranks):
        return CacheStores(run, tmp_path / f"{ranks.rank}", recorder, ranks=ranks)

    alone, shared = open_stores(Ranks(0, 1)), open_stores(Ranks(1, 4))
    other = open_stores(Ranks(2, 3, local_ranks=(2,), machine=1))
    assert not alone.latents_on_disk
    assert shared.latents_on_disk
    assert not other.latents_on_disk, "a rank that is alone on its machine"
    assert (tmp_path / "2/cache/machine-1/text/shards").is_dir()
    kinds = [type(stores.latents) for stores in (alone, shared, other)]
    assert kinds == [MemoryTier, SharedTier, MemoryTier]
    assert {type(stores.text) for stores in (alone, shared, other)} == {ShardStore}
    (text,) = [text for text in recorder.texts() if "share one cache" in text]
    assert text == f"cache: 4 ranks share one cache of encoded samples, in {tmp_path / '1/cache'}"
    budgets = [stores._budgets["latents"].nbytes for stores in (alone, shared, other)]
    assert min(budgets) > 0.8 * max(budgets), "the memory of the machine, not of a rank"


def test_the_host_budget_is_split_between_kinds(recorder, tmp_path):
    cache = {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}
    run = RunFile.model_validate({"cache_config": {**cache, "host_budget_gb": 4}})
    CacheStores(run, tmp_path, recorder)
    assert "latents up to 3.0 GiB and text up to 1.0 GiB are in" in recorder.texts()[0]
