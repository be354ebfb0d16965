"""What `instance_data_dir` names: a folder, shards, tables, a saved data set, or an address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gracetune import registry
from gracetune.data.folder import data_dir, walk

if TYPE_CHECKING:
    from collections.abc import Callable

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
    opener = cast("Callable[..., Source]", registry.load("source", kind, OPENERS))
    return opener(section, setting, tell)


def kind_of_address(address: str) -> str:
    """By its scheme, its ending, or what the folder holds; a name in OPENERS."""
    if "://" in address:
        return "remote"
    root = os.path.expanduser(address)
    if not os.path.isdir(root):
        ending = os.path.splitext(root)[1].lower()
        return ending[1:] if ending in SHARDS else "folder"
    if any(os.path.isfile(os.path.join(root, name)) for name in SAVED_DATASET):
        return "hf"
    return _kind_of_folder(Path(root))


def _kind_of_folder(folder: Path) -> str:
    """A folder of nothing but shards, or nothing but tables; the first other file settles it."""
    found = ""
    try:
        for key in walk(folder):
            ending = os.path.splitext(key)[1].lower()
            if ending in BESIDE:
                continue
            if ending not in SHARDS or found not in ("", ending):
                return "folder"
            found = ending
    except OSError:
        return "folder"  # opening it says what is wrong
    return found[1:] or "folder"
