"""What `instance_data_dir` names: a folder, shards, tables, a saved data set, or an address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gracetune import registry
from gracetune.data.folder import data_dir, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gracetune.config.schema import DatasetSection
    from gracetune.data.progress import Tell
    from gracetune.data.source import Source

OPENERS = {
    "folder": "gracetune.data.folder:open_folder",
    "tar": "gracetune.data.tar:open_tar",
    "parquet": "gracetune.data.parquet:open_parquet",
    "hf": "gracetune.data.hf_datasets:open_hf",
    "remote": "gracetune.data.remote:open_remote",
}
SAVED_DATASET = ("dataset_dict.json", "state.json")
"""What only a folder has that Hugging Face `datasets` saved."""
SHARDS = (".tar", ".parquet")
BESIDE = frozenset((".md", ".json", ".yaml", ".yml", ""))
"""Endings of files that lie beside shards and tables and are not samples."""


def open_address(section: DatasetSection, setting: str, tell: Tell) -> Source:
    """The source of `local` and `in_memory`: whatever the address turns out to be."""
    kind = kind_of_address(data_dir(section, setting))
    source = _open(kind, section, setting, tell)
    if kind == "remote":
        held = _kind_of_files(source.keys())
        return source if held == "folder" else _open(held, section, setting, tell)
    return source


def kind_of_address(address: str) -> str:
    """By its scheme, its ending, or what the folder holds; a name in OPENERS."""
    if "://" in address:
        return _ending(address)[1:] if is_shard(address) else "remote"
    root = os.path.expanduser(address)
    if not os.path.isdir(root):
        return _ending(root)[1:] if is_shard(root) else "folder"
    if any(os.path.isfile(os.path.join(root, name)) for name in SAVED_DATASET):
        return "hf"
    try:
        return _kind_of_files(walk(Path(root)))
    except OSError:
        return "folder"  # opening it says what is wrong


def is_shard(address: str) -> bool:
    """Whether it is the name of one file of many samples, or a pattern of such names."""
    return _ending(address) in SHARDS


def _open(kind: str, section: DatasetSection, setting: str, tell: Tell) -> Source:
    opener = cast("Callable[..., Source]", registry.load("source", kind, OPENERS))
    return opener(section, setting, tell)


def _kind_of_files(keys: Iterable[str]) -> str:
    """Nothing but shards, or nothing but tables; the first other file settles it."""
    found = ""
    for key in keys:
        ending = _ending(key)
        if ending in BESIDE:
            continue
        if ending not in SHARDS or found not in ("", ending):
            return "folder"
        found = ending
    return found[1:] or "folder"


def _ending(name: str) -> str:
    """In small letters; what an address asks of its server is no part of the name."""
    path = name.partition("?")[0] if name.startswith(("http://", "https://")) else name
    return os.path.splitext(path)[1].lower()
