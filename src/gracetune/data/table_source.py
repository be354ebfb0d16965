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
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from gracetune.data import audio, images, video
from gracetune.data.captions import MAX_CAPTION_NBYTES
from gracetune.data.shard_files import find_shards, stems
from gracetune.data.source import FileRange, data_dir, file_stamp, read_range
from gracetune.errors import DataError
from gracetune.units import GIB, format_bytes

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
    from collections.abc import Iterator, Sequence

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.data.shard_files import Shard
    from gracetune.events.dispatcher import Emit


Column = TypeVar("Column", pa.ChunkedArray, pa.Array)

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
    (4, b"ftyphei", ".heic"),
    (4, b"ftypmif1", ".heic"),
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


MAX_GROUP_NBYTES = 8 * GIB
MIN_GROUP_NBYTES = GIB // 4
"""Largest and smallest limit of a row group's size after decompression. Between them,
`in_memory.memory_limit_gb` is the limit. A small file can decompress to a large row group."""
READ_ERRORS = (
    pa.ArrowException,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    OverflowError,
    MemoryError,
    NotImplementedError,
)
"""Exceptions that pyarrow raises for damaged files."""


class TableRowGroup(Protocol):
    """A group of rows of a table that can only be read together."""

    @property
    def num_rows(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Approximate size of the rows in bytes."""
        ...

    @property
    def decoded_nbytes(self) -> int:
        """Memory in bytes that reading all columns needs; 0 if they are memory-mapped."""
        ...

    def column(self, name: str) -> pa.ChunkedArray:
        """Read one column of the rows; `a.b` is the field `b` of the struct column `a`.

        The column may be dictionary-encoded. Text may be invalid UTF-8.
        """
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
    """Number of the row in its group."""
    number: int
    """Number of the row in its file."""
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
        max_group_nbytes: int = MAX_GROUP_NBYTES,
    ) -> None:
        """List the rows of all files of a table.

        `image` and `caption` are the names of the columns with samples and captions; None finds
        them by their type and by common names. `origin` describes the table in messages. No row
        group may have more than `max_group_nbytes` bytes after decompression.
        """
        self._parts = parts
        self._origin = origin
        schema = parts[0].schema
        self._image = sample_column(schema, image, f"{setting}.columns.image", origin)
        self._caption = caption_column(schema, caption, f"{setting}.columns.caption", origin)
        kind = schema.field(self._image).type
        is_struct = pa.types.is_struct(kind)
        self._data = f"{self._image}.bytes" if is_struct else self._image
        self._path = (
            f"{self._image}.path" if is_struct and kind.get_field_index("path") >= 0 else None
        )
        name = f"{setting}.instance_data_dir"
        _check_distinct(parts, origin, name)
        self._places: dict[str, _RowLocation] = {}
        for number, part in enumerate(parts):
            self._check_part(part, schema, name, max_group_nbytes)
            try:
                self._list(number, part)
            except READ_ERRORS as error:
                raise DataError(
                    f"{name}: {origin}: {part.name} is damaged ({_reason(error)}). Copy it again "
                    "or remove it."
                ) from error
        if not self._places:
            raise DataError(
                f"{setting}.instance_data_dir: {origin} has no rows. Set another table."
            )
        self._keys = tuple(sorted(self._places))
        self._last = _LastColumns()

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        place = self._place(key)
        if place.is_text:
            assert self._caption is not None, "a caption without a caption column"
            return (self._value(place, self._caption) or b"")[: MAX_CAPTION_NBYTES + 1]
        data = self._value(place, self._data)
        if data is not None:
            return data
        return read_range(FileRange(str(self._resolve_path(place)), 0, None))

    def nbytes(self, key: str) -> int:
        place = self._place(key)
        if not place.is_text and self._value(place, self._data) is None:
            return self._resolve_path(place).stat().st_size
        return len(self.read(key))

    def stamp(self, keys: Sequence[str]) -> str:  # noqa: ARG002  one text for all of the table
        return " ".join(part.stamp for part in self._parts)

    def estimate(self) -> int:
        return sum(group.nbytes for part in self._parts for group in part.groups)

    def describe(self) -> str:
        return self._origin

    def _resolve_path(self, place: _RowLocation) -> Path:
        """Return the file that a row without bytes names; it must lie in the table's folder."""
        path = None if self._path is None else self._value(place, self._path)
        if path is None:
            raise OSError("the row has neither bytes nor a path")
        name, folder = os.fsdecode(path), self._parts[place.part].folder
        if folder is None:
            raise OSError(
                f"the row has only the path {name!r}, which cannot be resolved for a remote table"
            )
        where = f"{self._origin}: row {place.number} of {self._parts[place.part].name}"
        return inner_path(folder, name, f"{where} names the file")

    def _check_part(self, part: TableFile, schema: pa.Schema, name: str, most: int) -> None:
        """Raise an error if a file lacks a column, or if reading a column needs too much memory."""
        for column in filter(None, (self._image, self._caption)):
            index = part.schema.get_field_index(column)
            if index < 0 or part.schema.field(index).type != schema.field(column).type:
                raise DataError(
                    f"{name}: {part.name} has no column {column!r} of the type "
                    f"{schema.field(column).type}, unlike {self._parts[0].name}. Write all files "
                    "with the same columns."
                )
        for number, group in enumerate(part.groups):
            if group.decoded_nbytes > most:
                raise DataError(
                    f"{name}: row group {number} of {part.name} has "
                    f"{format_bytes(group.decoded_nbytes)} after decompression, but at most "
                    f"{format_bytes(most)} are allowed. Write it with smaller row groups, or raise "
                    "in_memory.memory_limit_gb."
                )

    def _list(self, number: int, part: TableFile) -> None:
        prefix = f"{part.name}/" if len(self._parts) > 1 else ""
        width = max(6, len(str(sum(group.num_rows for group in part.groups) - 1)))
        row = 0
        usual: str | None = None
        for place, group in enumerate(part.groups):
            paths = None if self._path is None else _same_length(group, self._path)
            for within in range(group.num_rows):
                ending = "" if paths is None else _suffix_of_path(raw_value(paths[within]))
                if not ending:
                    usual = usual or _suffix_by_content(group.column(self._data))
                    ending = usual
                stem = f"{prefix}row-{row:0{width}d}"
                self._places[stem + ending] = _RowLocation(number, place, within, row, False)
                if self._caption is not None:
                    self._places[stem + ".txt"] = _RowLocation(number, place, within, row, True)
                row += 1

    def _place(self, key: str) -> _RowLocation:
        if key not in self._places:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        return self._places[key]

    def _value(self, place: _RowLocation, name: str) -> bytes | None:
        """Return the value of one column of a row as bytes; None if it is null.

        Each thread keeps the columns of the row group that it read last, and uses them again for
        other rows.
        """
        if self._last.group != place[:2]:
            self._last.group, self._last.columns = place[:2], {}
        try:
            if name not in self._last.columns:
                group = self._parts[place.part].groups[place.group]
                self._last.columns[name] = _same_length(group, name)
            return raw_value(self._last.columns[name][place.row])
        except READ_ERRORS as error:
            raise OSError(f"its row group cannot be read: {_reason(error)}") from error


class _LastColumns(threading.local):
    """The columns that a thread read last. Reading rows in order then reads each column once."""

    def __init__(self) -> None:
        self.group: tuple[int, ...] | None = None
        """Number of the file and number of the row group."""
        self.columns: dict[str, pa.ChunkedArray] = {}
        """The columns of this row group that the thread has read, by name."""


def _same_length(group: TableRowGroup, name: str) -> pa.ChunkedArray:
    column = group.column(name)
    if len(column) != group.num_rows:
        raise OSError(f"{name} has {len(column)} of {group.num_rows} rows")
    return column


def raw_value(scalar: pa.Scalar, most: int | None = None) -> bytes | None:
    """Return a binary or text value as bytes, which may be invalid UTF-8; None if it is null.

    Bytes after the first `most` are left out.
    """
    if isinstance(scalar, pa.DictionaryScalar):
        scalar = scalar.value
    buffer = scalar.as_buffer() if scalar.is_valid else None
    return None if buffer is None else buffer[:most].to_pybytes()


def inner_path(folder: Path, name: str, what: str) -> Path:
    """Return the path of a file in a folder; raise an error if it leads out of the folder.

    `what` says in the error message who names the file.
    """
    if "\0" in name:
        raise OSError(f"{name!a} is not a path")
    path = Path(os.path.realpath(folder / name))
    if os.path.isabs(name) or not path.is_relative_to(os.path.realpath(folder)):
        raise DataError(
            f"{what} {name!a}, which leads out of the folder {folder}. Use a relative path to a "
            "file in that folder, or store the bytes in the table."
        )
    return path


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__  # arrow writes several lines


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
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _suffix_of_path(path: bytes | None) -> str:
    """Return the suffix of a file name, such as `.jpg`; "" if it is not supported."""
    suffix = PurePosixPath(os.fsdecode(path or b"")).suffix.lower()
    return suffix if suffix in _KNOWN_SUFFIXES else ""


def _suffix_by_content(column: pa.ChunkedArray) -> str:
    """Return the suffix of the first sample in a column, judged by its magic bytes, or `.bin`."""
    for value in column:
        data = raw_value(value)
        if data:
            for offset, mark, ending in _MAGIC_BYTES:
                if data[offset : offset + len(mark)] == mark:
                    return ending
            break
    return ".bin"


# Parquet

_AHEAD_NBYTES = 64 * 1024
"""Buffer size in bytes for reading a remote parquet file: larger than most footers, smaller than a
column."""
_MAX_DICTIONARY_NBYTES = 2 * GIB
"""Row groups of this size in bytes are read without a dictionary, which could not hold them."""


class RowGroup:
    """One row group of a parquet file. The file is opened for each read."""

    def __init__(self, shard: Shard, footer: pq.FileMetaData, number: int) -> None:
        self._shard = shard
        self._footer = footer
        self._number = number
        about = footer.row_group(number)
        self.num_rows: int = about.num_rows
        self.nbytes: int = about.total_byte_size
        self.decoded_nbytes = self.nbytes

    def column(self, name: str) -> pa.ChunkedArray:
        """Read one column from the file; `a.b` is the field `b` of the struct column `a`.

        It is read with a dictionary: a value that repeats in many rows would otherwise need far
        more memory than the file says.
        """
        outer, _, inner = name.partition(".")
        repeats = [name] if self.nbytes < _MAX_DICTIONARY_NBYTES else []
        with (
            self._shard.open(_AHEAD_NBYTES) as opened,
            pq.ParquetFile(opened, metadata=self._footer, read_dictionary=repeats) as file,
        ):
            column = file.read_row_group(self._number, [name], use_threads=False).column(outer)
        return pc.struct_field(column, inner) if inner else column


def open_parquet(section: DatasetSection, setting: str, emit: Emit) -> TableSource:  # noqa: ARG001
    """Open the source of a dataset of type `parquet`.

    `instance_data_dir` is a file, a folder of files, or a pattern such as `data/*.parquet`.
    """
    address = data_dir(section, setting)
    shards = find_shards(address, ".parquet", section.remote, setting)
    name = f"{setting}.instance_data_dir"
    parts = [_part(shard, stem, name) for shard, stem in zip(shards, stems(shards), strict=True)]
    origin = f"the parquet files of {address}"
    return TableSource(
        parts,
        origin,
        setting,
        section.columns.image,
        section.columns.caption,
        _max_group_nbytes(section),
    )


def _max_group_nbytes(section: DatasetSection) -> int:
    limit = section.in_memory.memory_limit_gb
    if limit is None:
        return MAX_GROUP_NBYTES
    return max(MIN_GROUP_NBYTES, min(MAX_GROUP_NBYTES, int(limit * GIB)))


def read_caption_table(data: bytes, where: str) -> Iterator[tuple[str, bytes]]:
    """Yield the pairs (file name, caption) of a parquet table, given the bytes of its file.

    Captions may be invalid UTF-8, and are cut off after `MAX_CAPTION_NBYTES` + 1 bytes. `where` is
    the file's name in error messages.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            schema, footer = file.schema_arrow, file.metadata
        names = [
            next((name for name in known if name in schema.names), None)
            for known in (("file_name", "filename", "key"), ("text", "caption", "prompt"))
        ]
        if None in names or not all(_holds_text(schema.field(name).type) for name in names):
            raise DataError(
                f"{where} must have the text columns file_name and text (or caption); it has "
                f"{', '.join(f'{field.name} ({field.type})' for field in schema)}."
            )
        groups = map(footer.row_group, range(footer.num_row_groups))
        nbytes = sum(group.total_byte_size for group in groups)
        if nbytes > MIN_GROUP_NBYTES:
            raise DataError(
                f"{where} has {format_bytes(nbytes)} after decompression; the limit is "
                f"{format_bytes(MIN_GROUP_NBYTES)}. Split it, or remove other columns."
            )
        with pq.ParquetFile(pa.BufferReader(data), read_dictionary=names) as file:
            table = file.read(names, use_threads=False)
        for number, row in enumerate(zip(*table.columns, strict=True)):
            name, caption = (raw_value(value, MAX_CAPTION_NBYTES + 1) for value in row)
            if name is None:
                raise DataError(f"{where}, row {number}: file_name is null. Remove the row.")
            yield name.decode(errors="backslashreplace"), caption or b""
    except READ_ERRORS as error:
        raise DataError(
            f"{where} is not a parquet file, or is damaged ({_reason(error)}). Write it again."
        ) from error


def _part(shard: Shard, name: str, setting: str) -> TableFile:
    try:
        with shard.open(_AHEAD_NBYTES) as opened, pq.ParquetFile(opened) as file:
            footer, schema = file.metadata, file.schema_arrow
            str(schema)  # raises an error if the name of a column is not UTF-8
    except READ_ERRORS as error:
        raise DataError(
            f"{setting}: {shard.name} cannot be read as parquet ({_reason(error)}). Copy it again "
            "or remove it."
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
        self.decoded_nbytes = 0

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one column; `a.b` is the field `b` of the struct column `a`.

        Its offsets are checked, because pyarrow would read any memory that damaged ones refer to.
        """
        outer, _, inner = name.partition(".")
        array = self._batch.column(outer)
        array.validate()
        if inner:
            array = pc.struct_field(array, inner)
        if not pa.types.is_dictionary(array.type):
            # As binary: a caption that is not UTF-8 must not make the others unreadable.
            is_large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
            array = array.view(pa.large_binary() if is_large else pa.binary())
        array.validate(full=True)
        return pa.chunked_array([array])


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
        splits = map(str, _read_list(root / SPLITS, "splits", name))
        what = f"{name}: {root / SPLITS} names the folder"
        folders = {f"{split}/": inner_path(root, split, what) for split in splits}
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
    what = f"{setting}: {folder / STATE} names the file"
    names = _read_list(folder / STATE, "_data_files", setting, "filename")
    return [inner_path(folder, name, what) for name in names]


def _read_list(path: Path, name: str, setting: str, inner: str | None = None) -> list[str]:
    """Return the list of texts under the key `name` of a JSON file.

    If `inner` is given, the list has objects, and their texts under this key are returned.
    """
    try:
        entries = list(json.loads(path.read_text(encoding="utf-8"))[name])
        found = entries if inner is None else [entry[inner] for entry in entries]
        if not all(isinstance(entry, str) for entry in found):
            raise TypeError(f"{name} is not a list of names")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{setting}: {path} cannot be read ({error}). Save it again.") from error
    return found


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
    except READ_ERRORS as error:
        raise DataError(
            f"{setting}: {path} cannot be read as an arrow file ({_reason(error)}). Save it again."
        ) from error
