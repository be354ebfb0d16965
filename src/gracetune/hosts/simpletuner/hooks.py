"""Hook gracetune into SimpleTuner's modules, and list the symbols that the hooks rely on.

Each hook wraps an existing function and calls it. probe.py checks REQUIRED_SYMBOLS against the
installed version before any hook is set. They have existed since SimpleTuner 3.0, although their
bodies change often.
"""

from __future__ import annotations

import functools
import os
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gracetune.hosts import patch_imported_module
from gracetune.hosts.fork_modules import add_fork_module
from gracetune.hosts.in_memory_files import BackendFiles, path_in_memory
from gracetune.hosts.probe import RequiredSymbol, UsageSite
from gracetune.hosts.simpletuner.plugin import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType, SimpleNamespace

    from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin
    from gracetune.hosts.tensor_cache import FilePath

    Loader = Callable[[object], object]


TRAINER = "simpletuner.helpers.training.trainer"
FACTORY = "simpletuner.helpers.data_backend.factory"
LOCAL = "simpletuner.helpers.data_backend.local"
BUILDER = "simpletuner.helpers.data_backend.builders.local"
JSON = "simpletuner.helpers.configuration.json_file"
TOML = "simpletuner.helpers.configuration.toml_file"
AUDIO = "simpletuner.helpers.audio.load"
DISCOVERY = "simpletuner.helpers.metadata.backends.discovery"
GROUNDING = "simpletuner.helpers.caching.grounding_image_embed"
TRACKER = "simpletuner.helpers.training.state_tracker"
PROCESS_KEEPER = "simpletuner.simpletuner_sdk.process_keeper"
FIELD_REGISTRY = "simpletuner.simpletuner_sdk.server.services.field_registry.registry"
FIELD_TYPES = "simpletuner.simpletuner_sdk.server.services.field_registry.types"
CONFIG_STORE = "simpletuner.simpletuner_sdk.server.services.config_store"
TRAINING = "simpletuner.simpletuner_sdk.server.services.training_service"
FORK_MODULE = "simpletuner.gh200"
"""The module with the GH200 fork's functions, which gracetune adds."""

_CACHE_READS = (
    UsageSite(LOCAL, "LocalDataBackend.torch_load", "self.exists(filename)"),
    UsageSite("simpletuner.helpers.caching.vae", "", "self.cache_data_backend.torch_load"),
    UsageSite("simpletuner.helpers.caching.text_embeds", "", "self.data_backend.torch_load"),
)

REQUIRED_SYMBOLS = (
    RequiredSymbol(
        JSON,
        "mapping_to_cli_args",
        "removes our blocks from config.json, which SimpleTuner would drop",
        usage_sites=(UsageSite(JSON, "load_json_config", "mapping_to_cli_args"),),
    ),
    RequiredSymbol(
        TOML,
        "mapping_to_cli_args",
        "removes our blocks from config.toml",
        usage_sites=(UsageSite(TOML, "load_toml_config", "mapping_to_cli_args"),),
    ),
    RequiredSymbol(
        FACTORY,
        "FactoryRegistry.load_configuration",
        "turns `type: in_memory` into a local dataset with settings for staging",
        usage_sites=(UsageSite(FACTORY, "", "self.load_configuration()"),),
    ),
    RequiredSymbol(
        FACTORY,
        "LocalDataBackend",
        "is replaced by our backend",
        usage_sites=(
            UsageSite(
                BUILDER,
                "LocalBackendBuilder._create_backend",
                "getattr(factory_module, 'LocalDataBackend', None)",
            ),
        ),
    ),
    RequiredSymbol(
        LOCAL,
        "LocalDataBackend",
        "is the base class of our backend",
        accepted_parameters=("accelerator", "id", "compress_cache=False"),
    ),
    RequiredSymbol(
        LOCAL,
        "LocalDataBackend.read",
        "reads staged files from memory",
        ("filepath", "as_byteIO=False"),
    ),
    RequiredSymbol(
        LOCAL,
        "LocalDataBackend.write",
        "writes to disk and drops the file from memory",
        ("filepath", "data"),
    ),
    RequiredSymbol(
        LOCAL,
        "LocalDataBackend.delete",
        "deletes on disk and drops the file from memory",
        ("filepath",),
    ),
    RequiredSymbol(LOCAL, "LocalDataBackend.exists", "knows staged files", ("filepath",)),
    RequiredSymbol(
        LOCAL, "LocalDataBackend.open_file", "opens staged files from memory", ("filepath", "mode")
    ),
    RequiredSymbol(
        LOCAL,
        "LocalDataBackend.torch_load",
        "reads both caches, from memory",
        ("filename",),
        usage_sites=_CACHE_READS,
    ),
    RequiredSymbol(
        LOCAL,
        "load_image",
        "decodes images, also from memory",
        usage_sites=(UsageSite(LOCAL, "LocalDataBackend.read_image", "load_image"),),
    ),
    RequiredSymbol(
        LOCAL,
        "load_video",
        "decodes videos, also from memory",
        usage_sites=(UsageSite(LOCAL, "LocalDataBackend.read_image", "load_video"),),
    ),
    RequiredSymbol(
        AUDIO,
        "load_audio",
        "decodes audio, also from memory",
        leading_parameters=("source",),
        usage_sites=(UsageSite("simpletuner.helpers.audio", "__getattr__", "getattr(load, name)"),),
    ),
    RequiredSymbol(
        AUDIO,
        "load_audio_from_video",
        "decodes the audio of videos, also from memory",
        leading_parameters=("source",),
    ),
    RequiredSymbol(
        DISCOVERY,
        "DiscoveryMetadataBackend._probe_video_metadata",
        "reads the sizes of videos, also from memory",
        leading_parameters=("video_path", "payload"),
        usage_sites=(UsageSite(DISCOVERY, "", "self._probe_video_metadata(image_path_str, None)"),),
    ),
    RequiredSymbol(
        GROUNDING,
        "Image",
        "opens images to crop their entities, staged ones from memory",
        usage_sites=(UsageSite(GROUNDING, "", "Image.open(image_path)"),),
    ),
    RequiredSymbol(
        TRAINER,
        "Trainer.__init__",
        "creates the accelerator that the batch ramp needs",
        accepted_parameters=("config", "disable_accelerator"),
    ),
    RequiredSymbol(
        TRAINER,
        "Trainer.prepare_batch",
        "prepares a batch, which is then placed",
        leading_parameters=("batch",),
        usage_sites=(UsageSite(TRAINER, "Trainer.train", "self.prepare_batch(raw_batch)"),),
    ),
    RequiredSymbol(
        TRAINER,
        "Trainer.train",
        "accumulates gradients with the accelerator, which the ramp controls",
        usage_sites=(
            UsageSite(TRAINER, "Trainer.train", "self.accelerator.accumulate"),
            UsageSite(TRAINER, "Trainer.train", "self.accelerator.sync_gradients"),
        ),
    ),
    RequiredSymbol(TRACKER, "StateTracker", "receives methods that return our settings"),
)

WEBUI_REQUIRED_SYMBOLS = (
    RequiredSymbol(
        FIELD_TYPES,
        "ConfigField",
        "is the type of our fields",
        accepted_parameters=(
            *("name", "arg_name", "ui_label", "field_type", "tab", "section", "default_value"),
            *("choices", "help_text", "tooltip", "importance", "order"),
        ),
    ),
    RequiredSymbol(
        FIELD_REGISTRY,
        "FieldRegistry._add_field",
        "registers our fields",
        leading_parameters=("field",),
        usage_sites=(UsageSite(FIELD_REGISTRY, "", "FieldRegistry()"),),
    ),
    RequiredSymbol(FIELD_REGISTRY, "field_registry", "is the registry that the WebUI uses"),
    RequiredSymbol(
        CONFIG_STORE, "ConfigStore.load_config", "turns our blocks into fields", ("name",)
    ),
    RequiredSymbol(
        CONFIG_STORE,
        "ConfigStore.save_config",
        "turns our fields into blocks",
        ("name", "config"),
    ),
    RequiredSymbol(
        CONFIG_STORE,
        "ConfigStore.save_trainer_config",
        "turns our fields into blocks, keeping keys without a field",
        ("name", "config"),
        usage_sites=(UsageSite(TRAINING, "persist_config_bundle", "store.save_trainer_config"),),
    ),
    RequiredSymbol(
        CONFIG_STORE,
        "ConfigStore.validate_config",
        "reports errors in our fields",
        ("config",),
        usage_sites=(UsageSite(TRAINING, "validate_training_config", "store.validate_config"),),
    ),
    RequiredSymbol(
        PROCESS_KEEPER,
        "submit_job",
        "starts training jobs through our entry point",
        ("job_id", "func", "config"),
        usage_sites=(UsageSite(TRAINING, "start_training_job", "process_keeper.submit_job"),),
    ),
    RequiredSymbol(
        TRAINER,
        "run_trainer_job",
        "passes our entry point to accelerate, before the script",
        ("config",),
        usage_sites=(
            UsageSite(TRAINER, "run_trainer_job", "shlex.split(str(accelerate_extra_args))"),
            UsageSite(TRAINER, "run_trainer_job", "cmd.extend(extra_args)"),
        ),
    ),
)

_HOOKS_WORK = "tested: every hook can be set and works"
TESTED_VERSIONS = {
    **dict.fromkeys(("4.6.0", "4.6.1", "4.7.0", "4.7.1", "4.8.0"), _HOOKS_WORK),
    **dict.fromkeys(("4.9.0", "4.9.1", "4.9.2", "4.9.3", "4.10.0"), _HOOKS_WORK),
    "4.10.1": "tested: it trains the same weights with the plug-in as without",
}
"""The tested versions of SimpleTuner and what was tested."""


# The hooks


def install_hooks(plugin: SimpleTunerPlugin, find: Callable[[str], ModuleType]) -> None:
    """Wrap the functions of SimpleTuner's trainer; `find` imports a module of SimpleTuner."""
    for name in (JSON, TOML):
        wrap(find(name), "mapping_to_cli_args", partial(_hook_config, plugin))
    local, factory = find(LOCAL), find(FACTORY)
    wrap(factory.FactoryRegistry, "load_configuration", partial(_hook_datasets, plugin))
    wrap(factory, "LocalDataBackend", partial(backend_class, plugin))
    wrap(local, "load_image", partial(_hook_loader, plugin))
    wrap(local, "load_video", partial(_hook_video_loader, plugin))
    audio, discovery, grounding = find(AUDIO), find(DISCOVERY), find(GROUNDING)
    wrap(audio, "load_audio", partial(_hook_loader, plugin))
    wrap(audio, "load_audio_from_video", partial(_hook_video_loader, plugin))
    probe_video = partial(_hook_video_probe, plugin)
    wrap(discovery.DiscoveryMetadataBackend, "_probe_video_metadata", probe_video)
    for module in (discovery, grounding):
        if hasattr(module, "Image"):  # before 4.9.1, discovery asks the backend for every image
            open_image = partial(_open_image, plugin, module.Image.open)
            patch_imported_module(module, "Image", open=open_image)
    trainer = find(TRAINER).Trainer
    wrap(trainer, "__init__", partial(_hook_trainer_init, plugin))
    wrap(trainer, "prepare_batch", partial(_hook_prepare_batch, plugin))
    tracker = find(TRACKER).StateTracker
    tracker.get_raw_config = staticmethod(lambda: dict(plugin.blocks.raw))
    tracker.get_gh200_runtime_config = staticmethod(lambda: dict(plugin.runtime))
    tracker.set_raw_config = staticmethod(plugin.split_config)
    tracker.set_gh200_runtime_config = staticmethod(plugin.set_runtime)
    add_fork_module(FORK_MODULE, plugin.session)


def wrap(owner: object, name: str, hook: Callable[[Any], object]) -> None:
    """Replace an attribute by what `hook` returns for its current value."""
    setattr(owner, name, hook(getattr(owner, name)))


def _hook_config(
    plugin: SimpleTunerPlugin, original: Callable[..., list[str]]
) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def mapping_to_cli_args(mapping: dict[str, object], **options: object) -> list[str]:
        return original(plugin.split_config(mapping), **options)

    return mapping_to_cli_args


def _hook_datasets(
    plugin: SimpleTunerPlugin, original: Callable[[object], list[dict[str, object]]]
) -> Callable[[object], list[dict[str, object]]]:
    @functools.wraps(original)
    def load_configuration(self: object) -> list[dict[str, object]]:
        return plugin.split_datasets(original(self))

    return load_configuration


def _hook_trainer_init(
    plugin: SimpleTunerPlugin, original: Callable[..., None]
) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: SimpleNamespace, *args: object, **options: object) -> None:  # noqa: N807
        original(self, *args, **options)
        plugin.attach_trainer(self)

    return __init__


def _hook_prepare_batch(
    plugin: SimpleTunerPlugin, original: Callable[[object, object], object]
) -> Callable[[object, object], object]:
    @functools.wraps(original)
    def prepare_batch(self: object, batch: object) -> object:
        prepared = original(self, batch)
        plugin.place_batch(prepared)
        return prepared

    return prepare_batch


def _hook_loader(plugin: SimpleTunerPlugin, original: Loader) -> Loader:
    """Wrap an image or audio decoder to read a file from memory, if gracetune holds it there."""

    @functools.wraps(original)
    def load(source: object) -> object:
        staged = _staged_bytes(plugin, source)
        if staged is None:
            return original(source)
        try:
            return original(BytesIO(staged))
        except (RuntimeError, OSError, ImportError, ValueError) as error:
            # Some decoders need the file name, for example to recognise the format.
            log.warning("%s cannot be decoded from memory (%s): read from disk", source, error)
            return original(source)

    return load


def _hook_video_loader(
    plugin: SimpleTunerPlugin, original: Callable[..., object]
) -> Callable[..., object]:
    """Wrap a video decoder, which needs a path, to read a staged video from memory."""

    @functools.wraps(original)
    def load(source: object, *args: object, **options: object) -> object:
        staged = _staged_bytes(plugin, source)
        if staged is None:
            return original(source, *args, **options)
        with path_in_memory(staged) as path:
            return original(path, *args, **options)

    return load


def _hook_video_probe(
    plugin: SimpleTunerPlugin, original: Callable[..., object]
) -> Callable[..., object]:
    """Wrap the method in which discovery reads the size of a video."""

    @functools.wraps(original)
    def probe(self: object, video_path: str, payload: bytes | None) -> object:
        load = _hook_video_loader(plugin, partial(original, self))
        return load(video_path, payload)

    return probe


def _staged_bytes(plugin: SimpleTunerPlugin, source: object) -> bytes | None:
    """Return the bytes of a path from memory; None if `source` must be read as it is."""
    return plugin.staged_bytes(os.fspath(source)) if isinstance(source, str | Path) else None


def _open_image(
    plugin: SimpleTunerPlugin, original: Callable[..., object], fp: object, **options: object
) -> object:
    staged = _staged_bytes(plugin, fp)
    return original(fp if staged is None else BytesIO(staged), **options)


def backend_class(plugin: SimpleTunerPlugin, original: type) -> type:
    """Return a subclass of SimpleTuner's LocalDataBackend that reads from memory before disk."""

    class GracetuneDataBackend(original):  # type: ignore[misc]
        """SimpleTuner's LocalDataBackend, with files and cached tensors that may be in memory."""

        def __init__(self, accelerator: object, id: str, compress_cache: bool = False) -> None:
            super().__init__(accelerator=accelerator, id=id, compress_cache=compress_cache)
            self._files = BackendFiles(plugin.staged_files(id), plugin.tensor_cache_for(id))

        def read(self, filepath: FilePath, as_byteIO: bool = False) -> object:  # noqa: N803
            data = self._files.read(filepath)
            if data is None:
                return super().read(filepath, as_byteIO)
            return BytesIO(data) if as_byteIO else data

        def exists(self, filepath: FilePath) -> bool:
            return self._files.holds(filepath) or bool(super().exists(filepath))

        def open_file(self, filepath: FilePath, mode: str) -> object:
            opened = self._files.open_file(filepath, mode)
            return super().open_file(filepath, mode) if opened is None else opened

        def write(self, filepath: FilePath, data: object) -> None:
            self._files.forget(filepath)
            super().write(filepath, data)

        def delete(self, filepath: FilePath) -> None:
            self._files.forget(filepath)
            super().delete(filepath)

        def torch_load(self, filename: FilePath) -> object:
            return self._files.load(filename, super().torch_load)

    return GracetuneDataBackend
