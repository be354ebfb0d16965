"""Hooks on a stand-in for SimpleTuner; tests/hosts sets them in the real one."""

import os
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gracetune.hosts.probe import probe
from gracetune.hosts.simpletuner import hooks
from gracetune.hosts.simpletuner.__main__ import make_plugin
from gracetune.hosts.simpletuner.hooks import install_hooks
from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin
from gracetune.memory.platform import open_machine


class LocalDataBackend:
    def __init__(self, accelerator, id, compress_cache=False):
        self.id = id

    def read(self, filepath, as_byteIO=False):  # noqa: N803
        with open(filepath, "rb") as file:
            data = file.read()
        return BytesIO(data) if as_byteIO else data

    def write(self, filepath, data):
        with open(filepath, "wb") as file:
            file.write(data)

    def delete(self, filepath):
        os.remove(filepath)

    def exists(self, filepath):
        return os.path.exists(filepath)

    def open_file(self, filepath, mode):
        return open(filepath, mode)

    def torch_load(self, filename):
        return {"loaded": torch.tensor(len(self.read(filename)))}


class Trainer:
    def __init__(self, config=None, disable_accelerator=False):
        self.config, self.accelerator = config, None

    def prepare_batch(self, batch):
        return batch and {"latents": batch}


def load_image(source):
    """Return the bytes of a path or file; one content needs a path, as with some decoders."""
    data = Path(source).read_bytes() if isinstance(source, str) else source.read()
    if data == b"needs a name" and not isinstance(source, str):
        raise ValueError("what is this?")
    return data


def load_video(path):
    with open(path, "rb") as file:
        return path, file.read()


def load_audio_from_video(source, target_sample_rate=16000, target_channels=1):
    """Return what another process reads, as ffmpeg does."""
    done = subprocess.run(["cat", str(source)], capture_output=True, check=True)
    return done.stdout, target_sample_rate, target_channels


class DiscoveryMetadataBackend:
    def _probe_video_metadata(self, video_path, payload):
        return payload or load_audio_from_video(video_path)[0]


def open_image(fp, mode="r", formats=None):
    """Return the bytes of an image, as PIL.Image.open reads them."""
    with open(fp, "rb") if isinstance(fp, str | Path) else fp as file:
        return file.read()


def images() -> ModuleType:
    module = ModuleType("PIL.Image")
    module.open = open_image
    return module


@pytest.fixture
def host(monkeypatch):
    """A stand-in for SimpleTuner's modules, with all hooks set."""
    local = SimpleNamespace(
        LocalDataBackend=LocalDataBackend, load_image=load_image, load_video=load_video
    )
    registry = type("FactoryRegistry", (), {"load_configuration": lambda self: list(self.sets)})
    modules = {
        hooks.JSON: SimpleNamespace(mapping_to_cli_args=lambda mapping, **_: sorted(mapping)),
        hooks.TOML: SimpleNamespace(mapping_to_cli_args=lambda mapping, **_: sorted(mapping)),
        hooks.LOCAL: local,
        hooks.FACTORY: SimpleNamespace(FactoryRegistry=registry, LocalDataBackend=LocalDataBackend),
        hooks.AUDIO: SimpleNamespace(
            load_audio=load_image, load_audio_from_video=load_audio_from_video
        ),
        hooks.DISCOVERY: SimpleNamespace(
            Image=images(),
            DiscoveryMetadataBackend=type("Discovery", (DiscoveryMetadataBackend,), {}),
        ),
        hooks.GROUNDING: SimpleNamespace(Image=images()),
        hooks.TRAINER: SimpleNamespace(Trainer=type("Trainer", (Trainer,), {})),
        hooks.TRACKER: SimpleNamespace(StateTracker=type("StateTracker", (), {})),
    }
    plugin = SimpleTunerPlugin({}, open_machine, torch.Tensor.contiguous)
    monkeypatch.delitem(sys.modules, hooks.FORK_MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "simpletuner", ModuleType("simpletuner"))
    install_hooks(plugin, modules.__getitem__)
    monkeypatch.setitem(sys.modules, hooks.FORK_MODULE, sys.modules.pop(hooks.FORK_MODULE))
    return SimpleNamespace(plugin=plugin, **{k.rpartition(".")[2]: v for k, v in modules.items()})


@pytest.fixture
def backend(host, tmp_path):
    folder = tmp_path / "pics"
    folder.mkdir()
    for name in ("a.png", "b.mp4", "a.txt"):
        (folder / name).write_bytes(name.encode())
    (folder / "c.png").write_bytes(b"needs a name")
    config = {"cache_config": {"vae_cache_type": "memory"}, "gh200_optimizations": {}, "seed": 1}
    assert host.json_file.mapping_to_cli_args(config, transform=None) == ["seed"]
    registry = host.factory.FactoryRegistry()
    registry.sets = [{"id": "pics", "type": "in_memory", "instance_data_dir": str(folder)}]
    assert registry.load_configuration()[0]["type"] == "local"
    return host.factory.LocalDataBackend(accelerator=None, id="pics"), folder


def test_a_backend_reads_from_memory_and_writes_to_disk(backend):
    local, folder = backend
    path = str(folder / "a.txt")
    os.rename(path, f"{path}.away")
    assert local.exists(path)
    assert local.read(path) == local.read(path, as_byteIO=True).read() == b"a.txt"
    assert local.open_file(path, "rb").read() == b"a.txt"
    local.write(path, b"new")
    assert local.read(path) == b"new"
    with local.open_file(path, "rb") as file:
        assert file.read() == b"new"
    local.delete(path)
    assert not local.exists(path)


def test_cache_files_are_kept_in_memory(backend, host, tmp_path):
    local, _ = backend
    path = str(tmp_path / "x.pt")
    local.write(path, b"four")
    assert local.torch_load(path)["loaded"] == local.torch_load(path)["loaded"] == 4
    assert host.plugin.memory.hits == 1


def test_decoders_read_staged_bytes_and_fall_back_to_the_path(backend, host, caplog):
    _, folder = backend
    assert host.local.load_image(str(folder / "a.png")) == b"a.png"
    assert host.local.load_image(BytesIO(b"x")) == b"x"
    assert host.load.load_audio(str(folder / "a.png")) == b"a.png"
    assert host.local.load_image(str(folder / "c.png")) == b"needs a name"
    assert "cannot be decoded from memory (what is this?): read from disk" in caplog.text
    path, data = host.local.load_video(str(folder / "b.mp4"))
    assert (path.startswith(f"/proc/{os.getpid()}/fd/"), data) == (True, b"b.mp4")
    other = folder.parent / "other.mp4"
    other.write_bytes(b"other")
    assert host.local.load_video(str(other)) == (str(other), b"other")


@pytest.mark.parametrize("kind", [str, Path])
def test_files_that_simpletuner_opens_itself_come_from_memory(backend, host, kind):
    """For a local backend, SimpleTuner reads sizes, crops and sound without the backend."""
    _, folder = backend
    image, video = kind(folder / "a.png"), kind(folder / "b.mp4")
    shutil.rmtree(folder)
    probe_video = host.discovery.DiscoveryMetadataBackend()._probe_video_metadata
    assert host.discovery.Image.open(image) == b"a.png"
    assert host.discovery.Image.open(fp=image, formats=["PNG"]) == b"a.png"
    assert host.grounding_image_embed.Image.open(image) == b"a.png"
    assert probe_video(video, None) == b"b.mp4"
    assert probe_video("gone.mp4", b"given") == b"given"
    assert host.load.load_audio_from_video(video, 8000, 2) == (b"b.mp4", 8000, 2)
    assert host.load.load_audio_from_video(video, target_channels=2) == (b"b.mp4", 16000, 2)
    with pytest.raises(FileNotFoundError):
        host.discovery.Image.open(str(folder / "never.png"))


def test_a_file_that_simpletuner_deletes_is_no_longer_in_memory(backend, host):
    local, folder = backend
    path = str(folder / "a.png")
    local.delete(path)
    with pytest.raises(FileNotFoundError):
        host.discovery.Image.open(path)


def test_trainers_are_attached_and_batches_placed(host):
    trainer = host.trainer.Trainer({})
    assert trainer.prepare_batch(False) is False
    assert trainer.prepare_batch(torch.ones(1))["latents"] == 1
    tracker = host.state_tracker.StateTracker
    assert tracker.get_gh200_runtime_config() == {"uvm_hints_enabled": False}
    assert tracker.get_raw_config() == {}


def test_the_forks_module_and_state_tracker_change_the_plugin(host):
    from simpletuner.gh200 import (
        GH200InMemoryBackend,
        gh200_uvm_enabled,
        optimize_batch_for_gh200,
        set_uvm_hint_override,
    )

    assert gh200_uvm_enabled() is False
    set_uvm_hint_override(True)
    assert gh200_uvm_enabled() is host.plugin.session.hints_enabled is True
    assert GH200InMemoryBackend.type == "in_memory"
    report = optimize_batch_for_gh200({"latents": torch.ones(1)})
    assert [placed.path for placed in report.placed] == ["latents"]
    tracker = host.state_tracker.StateTracker
    tracker.set_gh200_runtime_config({"uvm_hints_enabled": True})
    assert tracker.get_gh200_runtime_config() == {"uvm_hints_enabled": True}
    tracker.set_raw_config({"gh200_optimizations": {"enable_uvm_hints": False}})
    assert tracker.get_raw_config() == {"gh200_optimizations": {"enable_uvm_hints": False}}
    assert gh200_uvm_enabled() is False


def test_every_hooked_module_is_probed(tmp_path):
    asked = []

    def find(name):
        asked.append(name)
        raise KeyError(name)

    with pytest.raises(KeyError):
        install_hooks(SimpleTunerPlugin({}, open_machine, torch.Tensor.contiguous), find)
    assert {*asked} <= {need.module for need in hooks.REQUIRED_SYMBOLS}
    assert not any(found.ok for found in probe(tmp_path, hooks.REQUIRED_SYMBOLS))


def test_make_plugin_creates_a_new_plug_in():
    plugin = make_plugin()
    assert plugin.memory is None
    assert plugin.split_config({"seed": 1}) == {"seed": 1}
    assert make_plugin() is not plugin
