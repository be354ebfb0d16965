"""Write the same few files as each kind of data source: folder, tar, parquet, arrow."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FILES = {
    "b.png": b"second",
    "a.png": b"first " * 100,
    "deep/er/ünï cødé.txt": b"",
    "deep/z.bin": bytes(range(256)) * 400,
    "two\nlines.txt": b"a newline is a letter like others",
    "x" * 200 + ".JPG": b"long",
}
JPEG = b"\xff\xd8\xff\xe0"
PNG = b"\x89PNG\r\n\x1a\n"


def write_folder(root: Path, files: Mapping[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_tar(path: Path, files: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def image_table(
    images: Sequence[bytes | None], texts: Sequence[str | None], paths: Sequence[str | None] = ()
) -> pa.Table:
    """Return a table in the form of Hugging Face image datasets: bytes and original path."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    paths = paths or [None] * len(images)
    rows = [{"bytes": data, "path": path} for data, path in zip(images, paths, strict=True)]
    return pa.table({"image": pa.array(rows, kind), "text": pa.array(texts, pa.string())})


def write_parquet(path: Path, table: pa.Table, rows_in_a_group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows_in_a_group)
    return path


def save_to_disk(folder: Path, table: pa.Table, *, stream: bool = True) -> Path:
    """Write the files of `datasets.Dataset.save_to_disk` that the source reads."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "data-00000-of-00001.arrow"
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(folder / name), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    return folder
