"""Give a host the module of the GH200 forks: `simpletuner.gh200` or `toolkit.gh200_helpers`.

Scripts and extensions that were written for a fork import their functions from these modules. In a
hooked host, the functions use the plug-in's memory session, so `set_uvm_hint_override` changes the
hints that the plug-in gives for each batch.

`GH200InMemoryBackend` has the fork's signature. It reads the folder into memory once, through the
same code as `type: in_memory` in a configuration.
"""

from __future__ import annotations

import logging
import os
import sys
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import PIL.Image

from gracetune.config.dataset_schema import InMemorySection
from gracetune.events.types import Notice
from gracetune.hosts.in_memory_files import BackendFiles, StagedDatasetConfig, stage_dataset
from gracetune.memory.placement import DEFAULT_TABLE, place_batch
from gracetune.memory.stats import attach_to_torch_memory_stats, extend_torch_memory_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from io import TextIOWrapper
    from typing import BinaryIO

    from PIL.Image import Image
    from torch import Tensor

    from gracetune.events.types import Event
    from gracetune.hosts.tensor_cache import FilePath
    from gracetune.memory.hints import Hint, Location
    from gracetune.memory.placement import BatchReport
    from gracetune.memory.session import MemorySession

log = logging.getLogger("gracetune")


def add_fork_module(name: str, session: MemorySession) -> ModuleType:
    """Add the forks' module to the imported modules, under this name; `session` serves it.

    The package that contains it must be importable. A module of this name that exists is kept: the
    host is a fork itself. As in the forks, `torch.cuda.memory_stats()` then has `uvm.*` keys.
    """
    package, _, own = name.rpartition(".")
    if name not in sys.modules:
        module = ModuleType(name, f"Functions of the GH200 forks, provided by gracetune as {name}.")
        names = fork_functions(session)
        vars(module).update(names, __all__=sorted(names))
        sys.modules[name] = module
        extend_torch_memory_stats(session)
        attach_to_torch_memory_stats(session)
        if package in sys.modules:
            setattr(sys.modules[package], own, module)
    return sys.modules[name]


def fork_functions(session: MemorySession) -> dict[str, object]:
    """Return the functions and the class of the forks by name; the functions use `session`."""

    def gh200_uvm_enabled() -> bool:
        """Return True if the CUDA driver is given hints about where to keep managed memory."""
        return session.hints_enabled

    def set_uvm_hint_override(value: bool | None) -> None:
        """Turn hints on or off; None lets environment variables decide again."""
        session.hints_override = value

    def prefer_cpu_residency(tensor: Tensor) -> Hint:
        """Ask the driver to keep a tensor of managed memory in host memory."""
        return session.hints.prefer_cpu_residency(tensor)

    def prefer_gpu_residency(tensor: Tensor) -> Hint:
        """Ask the driver to keep a tensor of managed memory in device memory."""
        return session.hints.prefer_gpu_residency(tensor)

    def prefetch_to_device(tensor: Tensor, device: Location = None) -> Hint:
        """Move the pages of a tensor to a device before they are needed, in stream order."""
        return session.hints.prefetch_to_device(tensor, device)

    def optimize_batch_for_gh200(batch: object) -> BatchReport:
        """Tell the driver where to keep each tensor of a batch; report which hints it accepted."""
        return place_batch(batch, session.hints, DEFAULT_TABLE)

    functions: tuple[Callable[..., object], ...] = (
        gh200_uvm_enabled,
        set_uvm_hint_override,
        prefer_cpu_residency,
        prefer_gpu_residency,
        prefetch_to_device,
        optimize_batch_for_gh200,
    )
    return {each.__name__: each for each in (*functions, GH200InMemoryBackend)}


def log_notice(event: Event) -> None:
    """Write a notice to Python's logging; other events are for runs."""
    if isinstance(event, Notice):
        log.log(logging.WARNING if event.level == "warning" else logging.INFO, "%s", event.text)


class GH200InMemoryBackend:
    """A folder of files that are read into host memory once, with the methods of the fork's class.

    Files that are written or deleted through it are changed on disk, and read from there. Paths may
    be absolute, or relative to the folder.
    """

    type = "in_memory"

    def __init__(
        self,
        accelerator: object,
        id: str,
        instance_data_dir: FilePath,
        *,
        file_extensions: Iterable[str] | None = None,
        compression: str | None = None,
        memory_limit_gb: float | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Read the folder into memory.

        `compression` is lz4, zlib, snappy, zstd, auto or None. A folder that needs more memory than
        `memory_limit_gb` is refused.
        """
        self.accelerator = accelerator
        self.id = id
        self.instance_data_dir = Path(os.path.abspath(instance_data_dir))
        self._extensions = tuple(each.lower().lstrip(".") for each in file_extensions or ())
        self._section = InMemorySection.model_validate(
            {
                "compression": compression or "none",
                "memory_limit_gb": memory_limit_gb,
                "num_workers": num_workers,
            }
        )
        config = StagedDatasetConfig(
            id, str(self.instance_data_dir), self._section, self._extensions
        )
        self._staged = stage_dataset(config, log_notice, None)
        self._files = BackendFiles(self._staged, None)

    def get_instance_representation(self) -> dict[str, object]:
        """Return the arguments of this object, from which another process can make an equal one."""
        return {
            "backend_type": self.type,
            "id": self.id,
            "instance_data_dir": str(self.instance_data_dir),
            "file_extensions": list(self._extensions),
            "compression": self._section.compression,
            "memory_limit_gb": self._section.memory_limit_gb,
            "num_workers": self._section.num_workers,
        }

    @classmethod
    def from_instance_representation(
        cls, representation: Mapping[str, object]
    ) -> GH200InMemoryBackend:
        """Make the object that `get_instance_representation` describes."""
        if representation.get("backend_type") != cls.type:
            raise ValueError(
                f"backend_type is {representation.get('backend_type')!r}; it must be {cls.type!r}"
            )
        arguments = {key: value for key, value in representation.items() if key != "backend_type"}
        return cls(None, **arguments)  # type: ignore[arg-type]

    def get_abs_path(self, sample_path: FilePath | None = None) -> str:
        """Return the absolute path of a file, or of the folder."""
        return str(self.instance_data_dir / (sample_path or ""))

    def list_files(
        self, file_extensions: Iterable[str] | None = None, instance_data_dir: FilePath = ""
    ) -> list[tuple[str, list[str], list[str]]]:
        """Return the files in memory, as `os.walk` would: (folder, subfolders, file paths)."""
        wanted = {f".{each.lower().lstrip('.')}" for each in file_extensions or ()}
        root = self.get_abs_path(instance_data_dir)
        folders: dict[str, list[str]] = {}
        for path in self._staged.paths():
            is_inside = path == root or path.startswith(root.rstrip(os.sep) + os.sep)
            if is_inside and (not wanted or Path(path).suffix.lower() in wanted):
                folders.setdefault(os.path.dirname(path), []).append(path)
        return [(folder, [], sorted(paths)) for folder, paths in sorted(folders.items())]

    def exists(self, identifier: FilePath) -> bool:
        """Return True if a file is in memory or on disk."""
        path = self.get_abs_path(identifier)
        return self._files.holds(path) or os.path.exists(path)

    def read(
        self,
        identifier: FilePath,
        as_byteIO: bool = False,  # noqa: N803  SimpleTuner's name
        as_byte_io: bool = False,
    ) -> bytes | BytesIO:
        """Return the bytes of a file, from memory if it is there, else from disk."""
        path = self.get_abs_path(identifier)
        data = self._files.read(path)
        data = Path(path).read_bytes() if data is None else data
        return BytesIO(data) if as_byteIO or as_byte_io else data

    def open_file(self, identifier: FilePath, mode: str) -> BytesIO | TextIOWrapper | BinaryIO:
        """Open a file, in memory if it is there and only read."""
        path = self.get_abs_path(identifier)
        opened = self._files.open_file(path, mode)
        return opened or open(path, mode)  # type: ignore[return-value]

    def write(self, identifier: FilePath, data: bytes | str) -> None:
        """Write a file to disk, from where it is read from now on."""
        path = Path(self.get_abs_path(identifier))
        self._files.forget(path)
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    def delete(self, identifier: FilePath) -> None:
        """Delete a file on disk and in memory."""
        path = self.get_abs_path(identifier)
        self._files.forget(path)
        os.remove(path)

    def create_directory(self, directory_path: FilePath) -> None:
        """Create a folder on disk."""
        os.makedirs(self.get_abs_path(directory_path), exist_ok=True)

    def read_image(self, filepath: FilePath, delete_problematic_images: bool = False) -> Image:
        """Decode an image; one that cannot be decoded is an error, and is deleted if asked for."""
        try:
            image = PIL.Image.open(BytesIO(self.read(filepath)))  # type: ignore[arg-type]
            image.load()
        except (OSError, ValueError):
            if delete_problematic_images:
                self.delete(filepath)
            raise
        return image

    def read_image_batch(
        self, filepaths: Iterable[FilePath], delete_problematic_images: bool = False
    ) -> tuple[list[FilePath], list[Image]]:
        """Decode several images; return their paths and the images."""
        paths = list(filepaths)
        return paths, [self.read_image(path, delete_problematic_images) for path in paths]
