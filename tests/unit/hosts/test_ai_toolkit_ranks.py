"""Ranks of one machine under ai-toolkit: one copy of cache files and of staged pictures for all."""

import mmap
import os

import pytest
import torch
from forked import holds_in_a_fork
from safetensors.torch import load_file, save_file

from gracetune.hosts.ai_toolkit.config_blocks import split_config
from gracetune.hosts.ai_toolkit.enter import make_plugin
from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin
from gracetune.hosts.shared_tensor_memory import SharedTensorMemory
from gracetune.hosts.tensor_memory import LocalTensorMemory
from gracetune.memory.platform import open_machine

PAGE = mmap.ALLOCATIONGRANULARITY


def process(**cache):
    said = {"cache_config": {"vae_cache_type": "memory", "host_budget_gb": 1, **cache}}
    return {"type": "sd_trainer", "gracetune": said}


def ranks(meet_in, told, number=2, **cache):
    """As accelerate starts them."""
    made = []
    for rank in range(number):
        environment = {"LOCAL_WORLD_SIZE": str(number), "LOCAL_RANK": str(rank)}
        plugin = AIToolkitPlugin(environment, open_machine, told.append, meet_in)
        plugin.split_config(process(**cache))
        made.append(plugin)
    return made


@pytest.fixture
def files(tmp_path):
    """Five cache files, and what they say when they are read from disk."""
    folder = tmp_path / "_latent_cache"
    folder.mkdir()
    paths = [str(folder / f"{number}.safetensors") for number in range(5)]
    for number, path in enumerate(paths):
        save_file({"latent": torch.full((4,), float(number))}, path)
    return paths


def unreadable(path):
    raise AssertionError(f"{path} was read again")


def test_each_rank_holds_its_share_and_maps_that_of_the_others(tmp_path, files):
    told = []
    first, second = ranks(tmp_path / "meet", told)
    for each in (first, second):
        each.preload(files, load_file)
    assert [first.memory.nbytes, second.memory.nbytes] == [3 * PAGE, 2 * PAGE]
    assert any("each of 2 ranks holds a share of them" in text for text in told)
    for each in (first, second):
        for number, path in enumerate(files):
            assert each.load(path, unreadable)["latent"].tolist() == [number] * 4


def test_a_worker_maps_what_another_rank_has_loaded_since_and_holds_nothing(tmp_path, files):
    first, second = ranks(tmp_path / "meet", [])
    first.load(files[0], load_file)

    def works() -> bool:
        mapped = second.load(files[0], unreadable)["latent"].tolist() == [0] * 4
        read = second.load(files[1], load_file)["latent"].tolist() == [1] * 4
        return mapped and read and second.memory.nbytes == 0

    assert holds_in_a_fork(works)


def test_a_share_that_finds_no_room_is_told(tmp_path, files):
    told = []
    for each in ranks(tmp_path / "meet", told, host_budget_gb=1e-7):
        each.preload(files, load_file)
    assert [text.split(" cache")[0] for text in told if "stay on disk" in text] == [
        "3 of 3",
        "2 of 2",
    ]


def test_a_later_process_may_ask_for_more_room(tmp_path, files):
    [alone] = ranks(tmp_path, [], number=1, host_budget_gb=1e-7)
    alone.preload(files, load_file)
    assert alone.memory.misses == 0
    alone.split_config(process(host_budget_gb=2))
    alone.preload(files, load_file)
    assert alone.memory.misses == 5


def test_what_ranks_share_outlives_a_job(tmp_path, files):
    first, second = ranks(tmp_path / "meet", [])
    first.load(files[0], load_file)
    first.begin_job()
    assert second.load(files[0], unreadable)["latent"].tolist() == [0] * 4
    assert first.load(files[0], lambda path: "from disk") == "from disk", "nothing asked for it"


def test_a_rank_alone_meets_nobody(tmp_path, files):
    [alone] = ranks(tmp_path / "meet", [], number=1)
    alone.preload(files, load_file)
    assert isinstance(alone.memory, LocalTensorMemory)
    assert not (tmp_path / "meet").exists()
    [unmet, _] = ranks(None, [])
    unmet.preload(files, load_file)
    assert isinstance(unmet.memory, LocalTensorMemory)
    assert unmet.memory.misses == 5


def test_staged_pictures_are_one_copy_too(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"picture")
    entry = {"type": "sd_trainer", "datasets": [{"folder_path": str(folder), "in_memory": {}}]}
    told = []
    for each in ranks(tmp_path / "meet", told):
        each.stage_datasets(split_config(entry, {})[1].datasets)
        assert each.staged_bytes(str(folder / "a.png")) == b"picture"
    assert [path.suffix for path in (tmp_path / "meet").glob("*.json")] == [".json"]


def test_a_process_of_ai_toolkits_knows_its_rank(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plugin = make_plugin()
    plugin.split_config(process())
    assert isinstance(plugin.memory, SharedTensorMemory)
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["gracetune"]
    assert os.listdir(tmp_path / os.listdir(tmp_path)[0])[0].startswith("tensors-")
