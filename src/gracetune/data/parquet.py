"""Parquet files as a source, and tables of captions in parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.data.folder import data_dir
from gracetune.data.tar import find_files
from gracetune.errors import DataError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gracetune.data.table import Part, TableSource, flatten
except ModuleNotFoundError as missing:
    raise DataError(
        f"parquet files are read by a package that is not installed ({missing.name}). "
        "Install it with: pip install 'gracetune[parquet]'."
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gracetune.config.schema import DatasetSection
    from gracetune.data.progress import Tell


class RowGroup:
    """One row group of a file, which is opened when it is read."""

    def __init__(self, path: Path, number: int, num_rows: int, nbytes: int) -> None:
        self._path = path
        self._number = number
        self.num_rows = num_rows
        self.nbytes = nbytes

    def column(self, name: str) -> pa.ChunkedArray:
        """One column, or `column.field`; only its own bytes are read."""
        outer, _, inner = name.partition(".")
        with pq.ParquetFile(self._path) as file:
            column = file.read_row_group(self._number, [name], use_threads=False).column(outer)
        return flatten(column, inner) if inner else column


def open_parquet(section: DatasetSection, setting: str, tell: Tell) -> TableSource:  # noqa: ARG001
    """The source of `parquet`: one file, a folder of them, or a pattern."""
    address = data_dir(section, setting)
    paths = find_files(address, ".parquet", setting)
    parts = [_part(path, f"{setting}.instance_data_dir") for path in paths]
    origin = f"the parquet files of {address}"
    return TableSource(parts, origin, setting, section.columns.image, section.columns.caption)


def read_caption_table(data: bytes, where: str) -> Sequence[tuple[str, str]]:
    """File names and captions of a parquet table beside the samples."""
    try:
        table = pq.read_table(pa.BufferReader(data))
    except pa.ArrowException as error:
        raise DataError(f"{where} is no parquet file ({error}). Make it anew.") from error
    names = [name for name in ("file_name", "filename", "key") if name in table.column_names]
    texts = [name for name in ("text", "caption", "prompt") if name in table.column_names]
    if not names or not texts:
        raise DataError(
            f"{where} must have the columns file_name and text (or caption); it has "
            f"{', '.join(table.column_names)}."
        )
    columns = (table.column(name).to_pylist() for name in (names[0], texts[0]))
    return [(str(name), text or "") for name, text in zip(*columns, strict=True)]


def _part(path: Path, setting: str) -> Part:
    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{setting}: {path} cannot be read as parquet ({error}). Copy it anew or remove it."
        ) from error
    rows = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    groups = [
        RowGroup(path, number, row.num_rows, row.total_byte_size) for number, row in enumerate(rows)
    ]
    return Part(path.stem, path.parent, schema, groups)
