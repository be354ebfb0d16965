"""The ai-toolkit plug-in on several ranks of one machine, which share one copy of all data."""

import mmap

import pytest
import torch
from fork_process import is_true_in_fork
from safetensors.torch import load_file, save_file

from gracetune.hosts.ai_toolkit.config_blocks import split_config
from gracetune.hosts.ai_toolkit.enter import make_plugin
from gracetune.hosts.ai_toolkit.plugin import AIToolkitPlugin
from gracetune.hosts.shared_tensor_cache import SharedTensorCache
from gracetune.hosts.tensor_cache import LocalTensorMemory
from gracetune.memory.platform import open_machine

PAGE = mmap.ALLOCATIONGRANULARITY


def process(**cache):
    block = {"cache_config": {"vae_cache_type": "memory", "host_budget_gb": 1, **cache}}
    return {"type": "sd_trainer", "gracetune": block}


def start_ranks(shared_folder, messages, number=2, **cache):
    """Create the plug-ins of several ranks, with accelerate's environment variables."""
    plugins = []
    for rank in range(number):
        environment = {"LOCAL_WORLD_SIZE": str(number), "LOCAL_RANK": str(rank)}
        plugin = AIToolkitPlugin(environment, open_machine, messages.append, shared_folder)
        plugin.split_config(process(**cache))
        plugins.append(plugin)
    return plugins


@pytest.fixture
def files(tmp_path):
    """Five cache files; the latents of file n are n."""
    folder = tmp_path / "_latent_cache"
    folder.mkdir()
    paths = [str(folder / f"{number}.safetensors") for number in range(5)]
    for number, path in enumerate(paths):
        save_file({"latent": torch.full((4,), float(number))}, path)
    return paths


def unreadable(path):
    raise AssertionError(f"{path} was read again")


def test_each_rank_loads_its_share_and_maps_the_rest(tmp_path, files):
    messages = []
    first, second = start_ranks(tmp_path / "meet", messages)
    for each in (first, second):
        each.preload(files, load_file)
    assert [first.memory.nbytes, second.memory.nbytes] == [3 * PAGE, 2 * PAGE]
    assert any("the 2 ranks of this machine share the cache files" in text for text in messages)
    for each in (first, second):
        for number, path in enumerate(files):
            assert each.load(path, unreadable)["latent"].tolist() == [number] * 4


def test_a_worker_maps_what_another_rank_loaded_and_stores_nothing(tmp_path, files):
    first, second = start_ranks(tmp_path / "meet", [])
    first.load(files[0], load_file)

    def works() -> bool:
        mapped = second.load(files[0], unreadable)["latent"].tolist() == [0] * 4
        read = second.load(files[1], load_file)["latent"].tolist() == [1] * 4
        return mapped and read and second.memory.nbytes == 0

    assert is_true_in_fork(works)


def test_files_beyond_the_budget_are_reported(tmp_path, files):
    messages = []
    for each in start_ranks(tmp_path / "meet", messages, host_budget_gb=1e-7):
        each.preload(files, load_file)
    assert [text.split(" cache")[0] for text in messages if "stay on disk" in text] == [
        "3 of 3",
        "2 of 2",
    ]


def test_a_later_process_may_raise_the_budget(tmp_path, files):
    [alone] = start_ranks(tmp_path, [], number=1, host_budget_gb=1e-7)
    alone.preload(files, load_file)
    assert alone.memory.misses == 0
    alone.split_config(process(host_budget_gb=2))
    alone.preload(files, load_file)
    assert alone.memory.misses == 5


def test_shared_memory_outlives_a_job(tmp_path, files):
    first, second = start_ranks(tmp_path / "meet", [])
    first.load(files[0], load_file)
    first.begin_job()
    assert second.load(files[0], unreadable)["latent"].tolist() == [0] * 4
    assert first.load(files[0], lambda path: "from disk") == "from disk", (
        "the new job does not keep caches in memory"
    )


def test_a_single_rank_keeps_its_own_memory(tmp_path, files):
    [alone] = start_ranks(tmp_path / "meet", [], number=1)
    alone.preload(files, load_file)
    assert isinstance(alone.memory, LocalTensorMemory)
    assert not (tmp_path / "meet").exists()
    [alone_of_two, _] = start_ranks(None, [])
    alone_of_two.preload(files, load_file)
    assert isinstance(alone_of_two.memory, LocalTensorMemory)
    assert alone_of_two.memory.misses == 5


def test_staged_images_are_shared_too(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"image")
    entry = {"type": "sd_trainer", "datasets": [{"folder_path": str(folder), "in_memory": {}}]}
    messages = []
    for each in start_ranks(tmp_path / "meet", messages):
        each.stage_datasets(split_config(entry, {})[1].datasets)
        assert each.staged_bytes(str(folder / "a.png")) == b"image"
    assert [path.suffix for path in (tmp_path / "meet").glob("*.json")] == [".json"]


def test_make_plugin_reads_the_rank_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("gracetune.hosts.ai_toolkit.enter.user_shared_folder", lambda: tmp_path)
    plugin = make_plugin()
    plugin.split_config(process())
    assert isinstance(plugin.memory, SharedTensorCache)
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["tensors"]


def test_settings_without_effect_are_shown():
    messages = []
    environment = {"GRACETUNE_ALLOC_CONF": "use_uvm:True"}
    AIToolkitPlugin(environment, open_machine, messages.append).split_config(process())
    assert any(text.startswith("warning: use_uvm:True has no effect") for text in messages)
