"""Putting the plug-in into SimpleTuner's modules: each hook wraps what is there, and calls it."""

from __future__ import annotations

import functools
import os
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from gracetune.hosts.shelf import Served
from gracetune.hosts.simpletuner.needs import (
    AUDIO,
    FACTORY,
    JSON,
    LOCAL,
    TOML,
    TRACKER,
    TRAINER,
)
from gracetune.hosts.simpletuner.plugin import log

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
