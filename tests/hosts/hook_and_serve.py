"""Set every hook in the SimpleTuner on the path, and use each of them once."""

import json
import os
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image

from gracetune.hosts.simpletuner.hooks import (
    CONFIG_STORE,
    FACTORY,
    FIELD_REGISTRY,
    JSON,
    PROCESS_KEEPER,
    TRACKER,
    TRAINER,
    install_hooks,
)
from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin
from gracetune.hosts.simpletuner.webui import WEBUI_OPTIONS, install_webui
from gracetune.memory.platform import open_machine

CONFIG = {"seed": 1, "cache_config": {"vae_cache_type": "memory", "host_budget_gb": 1}}


def check_files(plugin: SimpleTunerPlugin, folder: Path) -> None:
    """Read an image whose file is gone, and a cache file three times."""
    Image.new("RGB", (8, 6), (10, 20, 30)).save(folder / "a.png")
    entry = {"id": "pics", "type": "in_memory", "instance_data_dir": str(folder)}
    registry = import_module(FACTORY).FactoryRegistry
    (folder / "sets.json").write_text(json.dumps([entry]))
    args = SimpleNamespace(
        data_backend_config=str(folder / "sets.json"), model_family="sdxl", output_dir=str(folder)
    )
    factory = registry(args, SimpleNamespace(is_local_main_process=True), [], [], None)
    assert [each["type"] for each in factory.load_configuration()] == ["local"]
    builder = import_module("simpletuner.helpers.data_backend.builders").create_backend_builder(
        "local", SimpleNamespace(is_local_main_process=True)
    )
    config = import_module("simpletuner.helpers.data_backend.config.image").ImageBackendConfig
    images = {**entry, "type": "local"}
    sizes = {"resolution": 64, "resolution_type": "pixel"}
    backend = builder._create_backend(config.from_dict(images, sizes))
    assert type(backend).__name__ == "GracetuneDataBackend"
    image = str(folder / "a.png")
    os.remove(image)
    assert backend.exists(image)
    assert backend.read_image(image).size == (8, 6)
    cached = str(folder / "x.pt")
    backend.write(cached, {"latents": torch.arange(3.0)})
    assert plugin.memory is not None
    for _ in range(3):
        assert torch.equal(backend.torch_load(cached)["latents"], torch.arange(3.0))
    assert (plugin.memory.hits, plugin.memory.misses) == (2, 1)


def check_forms(folder: Path) -> None:
    """Check the fields in the registry, the blocks in the file and the entry point of a job."""
    registry = import_module(FIELD_REGISTRY).field_registry
    assert {option.name for option in WEBUI_OPTIONS} <= {
        *registry.export_field_metadata()["fields"]
    }
    store = import_module(CONFIG_STORE).ConfigStore(folder / "configs", "model")
    store.save_trainer_config("a", {"gracetune_vae_cache_type": "disk"}, overwrite=True)
    assert store.load_config("a")[0]["gracetune_vae_cache_type"] == "disk"
    assert not store.validate_config({"gracetune_host_budget_gb": "-1"}).is_valid
    jobs = []
    keeper = import_module(PROCESS_KEEPER)
    keeper.TrainerProcess.start = lambda self, func, config: jobs.append(config)
    keeper.submit_job("1", import_module(TRAINER).run_trainer_job, {"--seed": 1})
    assert jobs == [{"--seed": 1, "accelerate_extra_args": "-m gracetune.hosts.simpletuner"}]


def main(folder: Path) -> None:
    plugin = SimpleTunerPlugin({}, open_machine, torch.Tensor.contiguous)
    install_hooks(plugin, import_module)
    install_webui({}, import_module)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = import_module(JSON).load_json_config()
    assert not any("cache" in word for word in words), words
    assert import_module(TRACKER).StateTracker.get_raw_config() == CONFIG
    check_files(plugin, folder)
    trainer = import_module(TRAINER).Trainer
    assert trainer.prepare_batch(trainer.__new__(trainer), False) is False
    check_forms(folder)
    sys.__stdout__.write(f"all hooks work in {version('simpletuner')}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
