"""Folders that Hugging Face `datasets` saved to disk, read as the arrow files they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gracetune.data.folder import data_dir
from gracetune.data.source import stamp_of
from gracetune.errors import DataError

try:
    import pyarrow as pa

    from gracetune.data.table import TableFile, TableSource, flatten
except ModuleNotFoundError as missing:
    raise DataError(
        f"data sets on disk are read by a package that is not installed ({missing.name}). "
        "Install it with: pip install 'gracetune[parquet]'."
    ) from missing

if TYPE_CHECKING:
    from gracetune.config.schema import DatasetSection
    from gracetune.data.progress import Tell

STATE = "state.json"
SPLITS = "dataset_dict.json"


class RecordBatchGroup:
    """One record batch, which lies in a mapped file: nothing is read until a row is."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self.num_rows = batch.num_rows
        self.nbytes = batch.nbytes

    def column(self, name: str) -> pa.ChunkedArray:
        """One column, or `column.field`."""
        outer, _, inner = name.partition(".")
        column = pa.chunked_array([self._batch.column(outer)])
        return flatten(column, inner) if inner else column


def open_hf(section: DatasetSection, setting: str, tell: Tell) -> TableSource:  # noqa: ARG001
    """The source of `hf`: what `save_to_disk` wrote, with or without splits."""
    address = data_dir(section, setting)
    root = Path(os.path.expanduser(address))
    name = f"{setting}.instance_data_dir"
    folders = {"": root}
    if (root / SPLITS).is_file():
        folders = {f"{split}/": root / split for split in _listed(root / SPLITS, "splits", name)}
    parts = [
        TableFile(f"{prefix}{path.stem}", folder, *_read(path, name), stamp_of([str(path)]))
        for prefix, folder in folders.items()
        for path in _arrow_files(folder, name)
    ]
    origin = f"the data set on disk {address}"
    return TableSource(parts, origin, setting, section.columns.image, section.columns.caption)


def _arrow_files(folder: Path, setting: str) -> list[Path]:
    """As the state says, which leaves out what an earlier save left behind."""
    if not (folder / STATE).is_file():
        raise DataError(
            f"{setting}: {folder} has no {STATE}, so `save_to_disk` did not make it, or not to the "
            "end. Name the folder that was given to save_to_disk."
        )
    entries = _listed(folder / STATE, "_data_files", setting)
    return [folder / entry["filename"] for entry in entries]


def _listed(path: Path, name: str, setting: str) -> list[Any]:
    """One list out of the JSON that describes the data set."""
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))[name])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{setting}: {path} cannot be read ({error}). Save it anew.") from error


def _read(path: Path, setting: str) -> tuple[pa.Schema, list[RecordBatchGroup]]:
    """The batches of one file, in either of arrow's two file forms."""
    try:
        mapped = pa.memory_map(str(path))
        try:
            stream = pa.ipc.open_stream(mapped)
            return stream.schema, [RecordBatchGroup(batch) for batch in stream]
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(mapped)
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
            return file.schema, [RecordBatchGroup(batch) for batch in batches]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{setting}: {path} cannot be read as an arrow file ({error}). Save it anew."
        ) from error
