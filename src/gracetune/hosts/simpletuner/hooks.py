"""Putting the plug-in into SimpleTuner's modules: each hook wraps what is there, and calls it."""

from __future__ import annotations

import functools
import os
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from gracetune.hosts.probe import Need, Site
from gracetune.hosts.simpletuner.plugin import log
from gracetune.hosts.staged_files import Served

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType, SimpleNamespace

    from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin
    from gracetune.hosts.tensor_memory import FilePath

    Loader = Callable[[object], object]


def install(plugin: SimpleTunerPlugin, find: Callable[[str], ModuleType]) -> None:
    """Set every hook; `find` imports a module of SimpleTuner's."""
    for name in (JSON, TOML):
        wrap(find(name), "mapping_to_cli_args", partial(_taking_blocks, plugin))
    local, factory = find(LOCAL), find(FACTORY)
    wrap(factory.FactoryRegistry, "load_configuration", partial(_taking_datasets, plugin))
    wrap(factory, "LocalDataBackend", partial(backend_class, plugin))
    wrap(local, "load_image", partial(_from_memory, plugin))
    wrap(local, "load_video", partial(_video_from_memory, plugin))
    wrap(find(AUDIO), "load_audio", partial(_from_memory, plugin))
    trainer = find(TRAINER).Trainer
    wrap(trainer, "__init__", partial(_attaching, plugin))
    wrap(trainer, "prepare_batch", partial(_placing, plugin))
    tracker = find(TRACKER).StateTracker
    tracker.get_raw_config = staticmethod(lambda: dict(plugin.blocks.raw))
    tracker.get_gh200_runtime_config = staticmethod(lambda: dict(plugin.runtime))


def wrap(owner: object, name: str, hook: Callable[[Any], object]) -> None:
    """Replace an attribute by what the hook makes of it."""
    setattr(owner, name, hook(getattr(owner, name)))


def _taking_blocks(
    plugin: SimpleTunerPlugin, original: Callable[..., list[str]]
) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def mapping_to_cli_args(mapping: dict[str, object], **options: object) -> list[str]:
        return original(plugin.take_config(mapping), **options)

    return mapping_to_cli_args


def _taking_datasets(
    plugin: SimpleTunerPlugin, original: Callable[[object], list[dict[str, object]]]
) -> Callable[[object], list[dict[str, object]]]:
    @functools.wraps(original)
    def load_configuration(self: object) -> list[dict[str, object]]:
        return plugin.take_datasets(original(self))

    return load_configuration


def _attaching(plugin: SimpleTunerPlugin, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: SimpleNamespace, *args: object, **options: object) -> None:  # noqa: N807
        original(self, *args, **options)
        plugin.attach(self)

    return __init__


def _placing(
    plugin: SimpleTunerPlugin, original: Callable[[object, object], object]
) -> Callable[[object, object], object]:
    @functools.wraps(original)
    def prepare_batch(self: object, batch: object) -> object:
        prepared = original(self, batch)
        plugin.place(prepared)
        return prepared

    return prepare_batch


def _from_memory(plugin: SimpleTunerPlugin, original: Loader) -> Loader:
    """A decoder that takes a path takes the staged bytes of it instead, where there are any."""

    @functools.wraps(original)
    def load(source: object) -> object:
        staged = plugin.staged_bytes(source) if isinstance(source, str) else None
        if staged is None:
            return original(source)
        try:
            return original(BytesIO(staged))
        except (RuntimeError, OSError, ImportError, ValueError) as error:
            # The name of a file tells decoders things that bytes do not.
            log.warning("%s cannot be decoded from memory (%s): read from disk", source, error)
            return original(source)

    return load


def _video_from_memory(plugin: SimpleTunerPlugin, original: Loader) -> Loader:
    """Video decoders want a path: one that leads to memory."""

    @functools.wraps(original)
    def load(source: object) -> object:
        staged = plugin.staged_bytes(source) if isinstance(source, str) else None
        if staged is None:
            return original(source)
        with os.fdopen(os.memfd_create("gracetune-video"), "wb") as file:
            file.write(staged)
            file.flush()
            return original(f"/proc/self/fd/{file.fileno()}")

    return load


def backend_class(plugin: SimpleTunerPlugin, original: type) -> type:
    """SimpleTuner's own local backend, which asks us first; it stays `local` to everyone."""

    class GracetuneDataBackend(original):  # type: ignore[misc]
        """A local backend whose files and tensors may be in memory."""

        def __init__(self, accelerator: object, id: str, compress_cache: bool = False) -> None:
            super().__init__(accelerator=accelerator, id=id, compress_cache=compress_cache)
            self._served = Served(plugin.shelf(id), plugin.memory_of(id))

        def read(self, filepath: FilePath, as_byteIO: bool = False) -> object:  # noqa: N803
            data = self._served.read(filepath)
            if data is None:
                return super().read(filepath, as_byteIO)
            return BytesIO(data) if as_byteIO else data

        def exists(self, filepath: FilePath) -> bool:
            return self._served.holds(filepath) or bool(super().exists(filepath))

        def open_file(self, filepath: FilePath, mode: str) -> object:
            opened = self._served.open_file(filepath, mode)
            return super().open_file(filepath, mode) if opened is None else opened

        def write(self, filepath: FilePath, data: object) -> None:
            self._served.forget(filepath)
            super().write(filepath, data)

        def delete(self, filepath: FilePath) -> None:
            self._served.forget(filepath)
            super().delete(filepath)

        def torch_load(self, filename: FilePath) -> object:
            return self._served.load(filename, super().torch_load)

    return GracetuneDataBackend


# ------------------------------------------------------------------------------------------
# The symbols of SimpleTuner that are hooked: they held from 3.0 on, while bodies changed daily.


TRAINER = "simpletuner.helpers.training.trainer"
FACTORY = "simpletuner.helpers.data_backend.factory"
LOCAL = "simpletuner.helpers.data_backend.local"
BUILDER = "simpletuner.helpers.data_backend.builders.local"
JSON = "simpletuner.helpers.configuration.json_file"
TOML = "simpletuner.helpers.configuration.toml_file"
AUDIO = "simpletuner.helpers.audio.load"
TRACKER = "simpletuner.helpers.training.state_tracker"
KEEPER = "simpletuner.simpletuner_sdk.process_keeper"
FIELD_REGISTRY = "simpletuner.simpletuner_sdk.server.services.field_registry.registry"
FIELD_TYPES = "simpletuner.simpletuner_sdk.server.services.field_registry.types"
CONFIG_STORE = "simpletuner.simpletuner_sdk.server.services.config_store"
TRAINING = "simpletuner.simpletuner_sdk.server.services.training_service"

_READS = (
    Site(LOCAL, "LocalDataBackend.torch_load", "self.exists(filename)"),
    Site("simpletuner.helpers.caching.vae", "", "self.cache_data_backend.torch_load"),
    Site("simpletuner.helpers.caching.text_embeds", "", "self.data_backend.torch_load"),
)

NEEDS = (
    Need(
        JSON,
        "mapping_to_cli_args",
        "takes our blocks out of config.json before they are dropped",
        sites=(Site(JSON, "load_json_config", "mapping_to_cli_args"),),
    ),
    Need(
        TOML,
        "mapping_to_cli_args",
        "the same for config.toml",
        sites=(Site(TOML, "load_toml_config", "mapping_to_cli_args"),),
    ),
    Need(
        FACTORY,
        "FactoryRegistry.load_configuration",
        "reads `type: in_memory` as a local data set, and remembers its block",
        sites=(Site(FACTORY, "", "self.load_configuration()"),),
    ),
    Need(
        FACTORY,
        "LocalDataBackend",
        "is asked for when a local backend is made: ours is put there",
        sites=(
            Site(
                BUILDER,
                "LocalBackendBuilder._create_backend",
                "getattr(factory_module, 'LocalDataBackend', None)",
            ),
        ),
    ),
    Need(
        LOCAL,
        "LocalDataBackend",
        "is what our backend extends",
        accepts=("accelerator", "id", "compress_cache"),
    ),
    Need(LOCAL, "LocalDataBackend.read", "is served from memory", ("filepath", "as_byteIO")),
    Need(LOCAL, "LocalDataBackend.write", "is written through", ("filepath", "data")),
    Need(LOCAL, "LocalDataBackend.delete", "is passed on, and forgotten here", ("filepath",)),
    Need(LOCAL, "LocalDataBackend.exists", "is answered from memory", ("filepath",)),
    Need(LOCAL, "LocalDataBackend.open_file", "is served from memory", ("filepath", "mode")),
    Need(
        LOCAL,
        "LocalDataBackend.torch_load",
        "is where both caches read: served from memory",
        ("filename",),
        sites=_READS,
    ),
    Need(
        LOCAL,
        "load_image",
        "decodes pictures, from memory too",
        sites=(Site(LOCAL, "LocalDataBackend.read_image", "load_image"),),
    ),
    Need(
        LOCAL,
        "load_video",
        "decodes videos, from memory too",
        sites=(Site(LOCAL, "LocalDataBackend.read_image", "load_video"),),
    ),
    Need(
        AUDIO,
        "load_audio",
        "decodes sound, from memory too",
        takes=("source",),
        sites=(Site("simpletuner.helpers.audio", "__getattr__", "getattr(load, name)"),),
    ),
    Need(
        TRAINER,
        "Trainer.__init__",
        "is when accelerator and configuration are there",
        accepts=("config", "disable_accelerator"),
    ),
    Need(
        TRAINER,
        "Trainer.prepare_batch",
        "is when a batch is ready to be placed",
        takes=("batch",),
        sites=(Site(TRAINER, "Trainer.train", "self.prepare_batch(raw_batch)"),),
    ),
    Need(
        TRAINER,
        "Trainer.train",
        "accumulates gradients by the accelerator, which the ramp sets",
        sites=(
            Site(TRAINER, "Trainer.train", "self.accelerator.accumulate"),
            Site(TRAINER, "Trainer.train", "self.accelerator.sync_gradients"),
        ),
    ),
    Need(TRACKER, "StateTracker", "shows our configuration to whoever asks"),
)

WEBUI_NEEDS = (
    Need(
        FIELD_TYPES,
        "ConfigField",
        "is what our options become",
        accepts=(
            *("name", "arg_name", "ui_label", "field_type", "tab", "section", "default_value"),
            *("choices", "help_text", "tooltip", "importance", "order"),
        ),
    ),
    Need(
        FIELD_REGISTRY,
        "FieldRegistry._add_field",
        "takes our fields",
        takes=("field",),
        sites=(Site(FIELD_REGISTRY, "", "FieldRegistry()"),),
    ),
    Need(FIELD_REGISTRY, "field_registry", "is the one that the WebUI asks"),
    Need(CONFIG_STORE, "ConfigStore.load_config", "unfolds our blocks into fields", ("name",)),
    Need(
        CONFIG_STORE,
        "ConfigStore.save_config",
        "folds our fields into blocks",
        ("name", "config"),
    ),
    Need(
        CONFIG_STORE,
        "ConfigStore.save_trainer_config",
        "folds our fields into blocks, and keeps what has no field",
        ("name", "config"),
        sites=(Site(TRAINING, "persist_config_bundle", "store.save_trainer_config"),),
    ),
    Need(
        CONFIG_STORE,
        "ConfigStore.validate_config",
        "refuses what a job would die of",
        ("config",),
        sites=(Site(TRAINING, "validate_training_config", "store.validate_config"),),
    ),
    Need(
        KEEPER,
        "submit_job",
        "starts jobs: through our entry",
        ("job_id", "func", "config"),
        sites=(Site(TRAINING, "start_training_job", "process_keeper.submit_job"),),
    ),
    Need(
        TRAINER,
        "run_trainer_job",
        "gives accelerate our entry, before the script",
        ("config",),
        sites=(
            Site(TRAINER, "run_trainer_job", "shlex.split(str(accelerate_extra_args))"),
            Site(TRAINER, "run_trainer_job", "cmd.extend(extra_args)"),
        ),
    ),
)


# ------------------------------------------------------------------------------------------
# Versions of SimpleTuner that were tried, and how.


_SERVES = "tried: every hook is set and serves"
KNOWN = {
    **dict.fromkeys(("4.6.0", "4.6.1", "4.7.0", "4.7.1", "4.8.0"), _SERVES),
    **dict.fromkeys(("4.9.0", "4.9.1", "4.9.2", "4.9.3", "4.10.0"), _SERVES),
    "4.10.1": "tried: it trains the same weights with the plug-in as without",
}
