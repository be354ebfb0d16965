"""Parquet files as a source, and tables of captions in parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.data.folder import data_dir
from gracetune.data.shards import find_shards, stems
from gracetune.errors import DataError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gracetune.data.table import TableFile, TableSource, flatten
except ModuleNotFoundError as missing:
    raise DataError(
        f"parquet files are read by a package that is not installed ({missing.name}). "
        "Install it with: pip install 'gracetune[parquet]'."
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.progress import Tell
    from gracetune.data.shards import Shard


_AHEAD_NBYTES = 64 * 1024
"""From an address: more than most footers have, and less than a column."""


class RowGroup:
    """One row group of a file, which is opened when it is read."""

    def __init__(self, shard: Shard, footer: pq.FileMetaData, number: int) -> None:
        self._shard = shard
        self._footer = footer
        self._number = number
        about = footer.row_group(number)
        self.num_rows: int = about.num_rows
        self.nbytes: int = about.total_byte_size

    def column(self, name: str) -> pa.ChunkedArray:
        """One column, or `column.field`; only its own bytes are read."""
        outer, _, inner = name.partition(".")
        with (
            self._shard.open(_AHEAD_NBYTES) as opened,
            pq.ParquetFile(opened, metadata=self._footer) as file,
        ):
            column = file.read_row_group(self._number, [name], use_threads=False).column(outer)
        return flatten(column, inner) if inner else column


def open_parquet(section: DatasetSection, setting: str, tell: Tell) -> TableSource:  # noqa: ARG001
    """The source of `parquet`: one file, a folder of them, or a pattern."""
    address = data_dir(section, setting)
    shards = find_shards(address, ".parquet", section.remote, setting)
    name = f"{setting}.instance_data_dir"
    parts = [_part(shard, stem, name) for shard, stem in zip(shards, stems(shards), strict=True)]
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


def _part(shard: Shard, name: str, setting: str) -> TableFile:
    try:
        with shard.open(_AHEAD_NBYTES) as opened, pq.ParquetFile(opened) as file:
            footer, schema = file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{setting}: {shard.name} cannot be read as parquet ({error}). Copy it anew or remove "
            "it."
        ) from error
    groups = [RowGroup(shard, footer, number) for number in range(footer.num_row_groups)]
    return TableFile(name, shard.folder, schema, groups, shard.stamp())
