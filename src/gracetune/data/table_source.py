"""Read datasets from tables: parquet files, and datasets saved by Hugging Face `datasets`.

`TableSource` presents row 0 of a table as the files `row-000000.jpg` and `row-000000.txt`, so that
captions are found as in a folder. The two formats differ only in how a group of rows is read
(`RowGroup`, `RecordBatchGroup`).
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gracetune.data import audio, images, video
from gracetune.data.shard_files import find_shards, stems
from gracetune.data.source import data_dir, file_stamp
from gracetune.errors import DataError

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ModuleNotFoundError as missing:
    raise DataError(
        f"tables and saved datasets need a package that is not installed ({missing.name}). "
        "Run `pip install 'gracetune[parquet]'`."
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.shard_files import Shard
    from gracetune.events.dispatcher import Emit


IMAGE_NAMES = ("image", "jpg", "jpeg", "png", "webp", "img", "picture", "video", "mp4", "audio")
CAPTION_NAMES = ("text", "caption", "captions", "prompt", "txt", "description")
_MAGIC_BYTES = (
    (0, b"\xff\xd8\xff", ".jpg"),
    (0, b"\x89PNG", ".png"),
    (8, b"WEBP", ".webp"),
    (8, b"WAVE", ".wav"),
    (0, b"GIF8", ".gif"),
    (0, b"BM", ".bmp"),
    (0, b"II*\x00", ".tiff"),
    (0, b"MM\x00*", ".tiff"),
    (4, b"ftypavif", ".avif"),
    (4, b"ftyp", ".mp4"),
    (0, b"\x1aE\xdf\xa3", ".mkv"),
    (0, b"fLaC", ".flac"),
    (0, b"OggS", ".ogg"),
    (0, b"ID3", ".mp3"),
)
"""File formats that are recognised by their content: offset of the magic bytes, the magic bytes,
and the suffix of the format."""
_KNOWN_SUFFIXES = images.EXTENSIONS | video.EXTENSIONS | audio.EXTENSIONS
"""Suffixes of all supported formats. Other suffixes of paths in a table are ignored, such as the
`.jpg?width=512` of a URL or the `.2` of `scan v1.2`."""


class TableRowGroup(Protocol):
    """A group of rows of a table that can only be read together."""

    @property
    def num_rows(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Approximate size of the rows in bytes."""
        ...

    def column(self, name: str) -> pa.ChunkedArray:
        """Read one column of the rows; `a.b` is the field `b` of the struct column `a`."""
        ...


class TableFile(NamedTuple):
    """One of the files that form a table."""

    name: str
    """Name of the file in keys and messages, without its suffix."""
    folder: Path | None
    """Folder that relative paths in the table refer to; None for remote tables."""
    schema: pa.Schema
    """Names and types of the columns."""
    groups: Sequence[TableRowGroup]
    """The rows of the file, in groups."""
    stamp: str
    """Text that changes whenever the file changes, such as a digest of its change time."""


class _RowLocation(NamedTuple):
    part: int
    group: int
    row: int
    is_text: bool


class TableSource:
    """A source with the samples and captions of a table's rows.

    The key of a row's sample is `row-000000.jpg`, and that of its caption `row-000000.txt`.
    """

    def __init__(
        self,
        parts: Sequence[TableFile],
        origin: str,
        setting: str,
        image: str | None = None,
        caption: str | None = None,
    ) -> None:
        """List the rows of all files of a table.

        `image` and `caption` are the names of the columns with samples and captions; None finds
        them by their type and by common names. `origin` describes the table in messages.
        """
        self._parts = parts
        self._origin = origin
        schema = parts[0].schema
        self._image = sample_column(schema, image, f"{setting}.columns.image", origin)
        self._caption = caption_column(schema, caption, f"{setting}.columns.caption", origin)
        _check_distinct(parts, origin, f"{setting}.instance_data_dir")
        self._places: dict[str, _RowLocation] = {}
        for number, part in enumerate(parts):
            self._list(number, part)
        if not self._places:
            raise DataError(
                f"{setting}.instance_data_dir: {origin} has no rows. Set another table."
            )
        self._keys = tuple(sorted(self._places))
        self._last = _LastColumn()

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        place = self._place(key)
        value = self._value(place)
        if place.is_text:
            return str(value or "").encode()
        data, path = _data_and_path(value)
        if data is not None:
            return bytes(data)
        if path is not None:
            return self._resolve_path(place, path).read_bytes()
        raise OSError("the row has neither bytes nor a path")

    def nbytes(self, key: str) -> int:
        place = self._place(key)
        value = self._value(place)
        data, path = (None, None) if place.is_text else _data_and_path(value)
        if path is not None and data is None:
            return self._resolve_path(place, path).stat().st_size
        return len(self.read(key))

    def stamp(self, keys: Sequence[str]) -> str:  # noqa: ARG002  one text for all of the table
        return " ".join(part.stamp for part in self._parts)

    def estimate(self) -> int:
        return sum(group.nbytes for part in self._parts for group in part.groups)

    def describe(self) -> str:
        return self._origin

    def _resolve_path(self, place: _RowLocation, path: str) -> Path:
        folder = self._parts[place.part].folder
        if folder is None:
            raise OSError(
                f"the row has only the path {path!r}, which cannot be resolved for a remote table"
            )
        return folder / path

    def _list(self, number: int, part: TableFile) -> None:
        prefix = f"{part.name}/" if len(self._parts) > 1 else ""
        width = max(6, len(str(sum(group.num_rows for group in part.groups) - 1)))
        row = 0
        usual: str | None = None
        for place, group in enumerate(part.groups):
            endings = _suffixes_by_path(group, part.schema, self._image)
            for within in range(group.num_rows):
                ending = endings[within] if endings is not None else ""
                if not ending:
                    usual = usual or _suffix_by_content(group.column(self._image))
                    ending = usual
                stem = f"{prefix}row-{row:0{width}d}"
                self._places[stem + ending] = _RowLocation(number, place, within, is_text=False)
                if self._caption is not None:
                    self._places[stem + ".txt"] = _RowLocation(number, place, within, is_text=True)
                row += 1

    def _place(self, key: str) -> _RowLocation:
        if key not in self._places:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        return self._places[key]

    def _value(self, place: _RowLocation) -> object:
        """Return the sample or the caption of a row.

        Each thread keeps the column that it read last, and uses it again for other rows.
        """
        name = self._caption if place.is_text else self._image
        assert name is not None, "a caption without a caption column"
        wanted = (place.part, place.group, name)
        if self._last.what != wanted:
            group = self._parts[place.part].groups[place.group]
            try:
                self._last.column = group.column(name)
            except (pa.ArrowException, OSError) as error:
                why = " ".join(str(error).split())  # arrow writes several lines
                raise OSError(f"its row group cannot be read: {why}") from error
            self._last.what = wanted
        return self._last.column[place.row].as_py()


class _LastColumn(threading.local):
    """The column that a thread read last. Reading rows in order then reads each column once."""

    what: tuple[int, int, str] | None = None
    """Number of the file, number of the row group, and name of the column."""
    column: pa.ChunkedArray = None


def _check_distinct(parts: Sequence[TableFile], origin: str, setting: str) -> None:
    """Raise an error if two files of a table have the same name, which would give equal keys."""
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            raise DataError(
                f"{setting}: {origin} contain two files named {part.name!r} (without suffix). "
                "Rename one of them."
            )
        seen.add(part.name)


def sample_column(schema: pa.Schema, requested: str | None, setting: str, origin: str) -> str:
    """Return the name of the column with the bytes of the samples.

    It is the requested column, or else found by its type and common names. Raises an error if there
    is no such column.
    """
    fitting = [field.name for field in schema if _holds_bytes(field.type)]
    if requested is not None and requested in fitting:
        return requested
    if requested is None:
        by_name = [name for name in IMAGE_NAMES if name in fitting]
        if by_name or len(fitting) == 1:
            return (by_name or fitting)[0]
    have = ", ".join(f"{field.name} ({field.type})" for field in schema)
    lacks = "no such" if requested else "no obvious"
    raise DataError(
        f"{setting} is {requested!r}: {origin} has {lacks} column of bytes. Its columns: {have}. "
        "Set the column that contains the files' bytes."
    )


def caption_column(
    schema: pa.Schema, requested: str | None, setting: str, origin: str
) -> str | None:
    """Return the name of the caption column: the requested one, or else the first common name.

    Returns None if no column has a common name; raises an error if the requested one is missing.
    """
    fitting = [field.name for field in schema if _holds_text(field.type)]
    if requested is not None and requested not in fitting:
        raise DataError(
            f"{setting} is {requested!r}: {origin} has no such text column. Text columns: "
            f"{', '.join(fitting) or 'none'}. Set one of them, or remove the setting."
        )
    return requested or next((name for name in CAPTION_NAMES if name in fitting), None)


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _data_and_path(value: object) -> tuple[bytes | None, str | None]:
    if isinstance(value, dict):
        return value["bytes"], value.get("path")
    return (value, None) if isinstance(value, bytes) else (None, None)


def _suffixes_by_path(group: TableRowGroup, schema: pa.Schema, name: str) -> list[str] | None:
    """Return the suffix of each sample's file name, such as `.jpg`; "" for an unsupported suffix.

    The file names are in the field `path` of the struct column `name`. Returns None if the column
    has no such field.
    """
    kind = schema.field(name).type
    if not pa.types.is_struct(kind) or kind.get_field_index("path") < 0:
        return None
    paths = group.column(f"{name}.path").to_pylist()
    endings = (PurePosixPath(path or "").suffix.lower() for path in paths)
    return [ending if ending in _KNOWN_SUFFIXES else "" for ending in endings]


def _suffix_by_content(column: pa.ChunkedArray) -> str:
    """Return the suffix of the first sample in a column, judged by its magic bytes, or `.bin`."""
    for value in column:
        data, _ = _data_and_path(value.as_py())
        if data:
            for offset, mark, ending in _MAGIC_BYTES:
                if data[offset : offset + len(mark)] == mark:
                    return ending
            break
    return ".bin"


def flatten(column: pa.ChunkedArray, inner: str) -> pa.ChunkedArray:
    """Return the field `inner` of a struct column."""
    return pc.struct_field(column, inner)


# Parquet

_AHEAD_NBYTES = 64 * 1024
"""Buffer size in bytes for reading a remote parquet file: larger than most footers, smaller than a
column."""


class RowGroup:
    """One row group of a parquet file. The file is opened for each read."""

    def __init__(self, shard: Shard, footer: pq.FileMetaData, number: int) -> None:
        self._shard = shard
        self._footer = footer
        self._number = number
        about = footer.row_group(number)
        self.num_rows: int = about.num_rows
        self.nbytes: int = about.total_byte_size

    def column(self, name: str) -> pa.ChunkedArray:
        """Read one column from the file; `a.b` is the field `b` of the struct column `a`."""
        outer, _, inner = name.partition(".")
        with (
            self._shard.open(_AHEAD_NBYTES) as opened,
            pq.ParquetFile(opened, metadata=self._footer) as file,
        ):
            column = file.read_row_group(self._number, [name], use_threads=False).column(outer)
        return flatten(column, inner) if inner else column


def open_parquet(section: DatasetSection, setting: str, emit: Emit) -> TableSource:  # noqa: ARG001
    """Open the source of a dataset of type `parquet`.

    `instance_data_dir` is a file, a folder of files, or a pattern such as `data/*.parquet`.
    """
    address = data_dir(section, setting)
    shards = find_shards(address, ".parquet", section.remote, setting)
    name = f"{setting}.instance_data_dir"
    parts = [_part(shard, stem, name) for shard, stem in zip(shards, stems(shards), strict=True)]
    origin = f"the parquet files of {address}"
    return TableSource(parts, origin, setting, section.columns.image, section.columns.caption)


def read_caption_table(data: bytes, where: str) -> Sequence[tuple[str, str]]:
    """Return the pairs (file name, caption) of a parquet table, given the bytes of its file.

    `where` is the file's name in error messages.
    """
    try:
        table = pq.read_table(pa.BufferReader(data))
    except pa.ArrowException as error:
        raise DataError(f"{where} is not a parquet file ({error}). Write it again.") from error
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
            f"{setting}: {shard.name} cannot be read as parquet ({error}). Copy it again or remove "
            "it."
        ) from error
    groups = [RowGroup(shard, footer, number) for number in range(footer.num_row_groups)]
    return TableFile(name, shard.folder, schema, groups, shard.stamp())


# Datasets saved by Hugging Face `datasets`

STATE = "state.json"
SPLITS = "dataset_dict.json"


class RecordBatchGroup:
    """One record batch of a memory-mapped arrow file."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self.num_rows = batch.num_rows
        self.nbytes = batch.nbytes

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column; `a.b` is the field `b` of the struct column `a`."""
        outer, _, inner = name.partition(".")
        column = pa.chunked_array([self._batch.column(outer)])
        return flatten(column, inner) if inner else column


def open_hf(section: DatasetSection, setting: str, emit: Emit) -> TableSource:  # noqa: ARG001
    """Open the source of a dataset of type `hf`.

    `instance_data_dir` is a folder written by Hugging Face's `save_to_disk`, with or without
    splits.
    """
    address = data_dir(section, setting)
    root = Path(os.path.expanduser(address))
    name = f"{setting}.instance_data_dir"
    folders = {"": root}
    if (root / SPLITS).is_file():
        folders = {f"{split}/": root / split for split in _read_list(root / SPLITS, "splits", name)}
    parts = [
        TableFile(f"{prefix}{path.stem}", folder, *_read(path, name), file_stamp([str(path)]))
        for prefix, folder in folders.items()
        for path in _arrow_files(folder, name)
    ]
    origin = f"the dataset on disk {address}"
    return TableSource(parts, origin, setting, section.columns.image, section.columns.caption)


def _arrow_files(folder: Path, setting: str) -> list[Path]:
    """Return the arrow files that the dataset's state file lists.

    Other arrow files in the folder are left over from earlier saves, and are ignored.
    """
    if not (folder / STATE).is_file():
        raise DataError(
            f"{setting}: {folder} has no {STATE}, so it was not written by `save_to_disk`, or not "
            "completely. Set the folder that was passed to save_to_disk."
        )
    entries = _read_list(folder / STATE, "_data_files", setting)
    return [folder / entry["filename"] for entry in entries]


def _read_list(path: Path, name: str, setting: str) -> list[Any]:
    """Return the list under the key `name` of a JSON file."""
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))[name])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{setting}: {path} cannot be read ({error}). Save it again.") from error


def _read(path: Path, setting: str) -> tuple[pa.Schema, list[RecordBatchGroup]]:
    """Return the schema and the record batches of an arrow file, in stream or in file format."""
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
            f"{setting}: {path} cannot be read as an arrow file ({error}). Save it again."
        ) from error
