"""Read the captions of a dataset: from text files, tables, file names, or one caption for all."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gracetune.data.prefetch import default_workers, ordered_map
from gracetune.data.source import printable
from gracetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.source import Source

    Rows = Iterator[tuple[str, str, str]]
    """Rows of a caption table: location in the table for error messages, file name, caption."""

METADATA = "metadata.jsonl"
PARQUET = "metadata.parquet"
MAX_LISTED = 5
"""Number of samples without a caption that an error message lists."""


def read_captions(
    source: Source, image_keys: Sequence[str], section: DatasetSection, setting: str = "datasets"
) -> dict[str, str]:
    """Read the captions as `caption_strategy` says; return {key: caption}.

    The key of a sample is its relative path in `source`. Raises an error if a sample has no
    caption. An empty caption is allowed.
    """
    strategy = section.caption_strategy
    if strategy == "auto":
        strategy = "jsonl" if _tables(source, METADATA) else "textfile"
    match strategy:
        case "textfile":
            num_workers = section.in_memory.num_workers or default_workers()
            captions = _from_text_files(source, image_keys, num_workers, setting)
        case "jsonl":
            captions = _from_tables(source, METADATA, _read_jsonl, setting)
        case "parquet":
            captions = _from_tables(source, PARQUET, _read_parquet, setting)
        case "filename":
            captions = _from_names(image_keys)
        case "instanceprompt":
            captions = dict.fromkeys(image_keys, _prompt(section, setting))
    missing = [key for key in image_keys if key not in captions]
    if missing:
        named = ", ".join(map(printable, missing[:MAX_LISTED])) + (
            ", ..." if len(missing) > MAX_LISTED else ""
        )
        raise DataError(
            f"{setting}.caption_strategy is {section.caption_strategy!r}: {len(missing)} of "
            f"{len(image_keys)} samples have no caption: {named}. {_REMEDY[strategy]}."
        )
    return {key: captions[key] for key in image_keys}


_OR = ", or set caption_strategy: instanceprompt and one instance_prompt for all"
_REMEDY = {
    "textfile": f"Add a .txt file of the same name next to each (it may be empty){_OR}",
    "jsonl": f"Add a line with file_name and text to {METADATA} for each{_OR}",
    "parquet": f"Add a row with file_name and text to {PARQUET} for each{_OR}",
    "filename": f"Give each file a name that contains words{_OR}",
}


def _from_text_files(
    source: Source, image_keys: Sequence[str], num_workers: int, setting: str
) -> dict[str, str]:
    names = source.keys()
    texts = {name[: -len(".txt")]: name for name in names if name.lower().endswith(".txt")}
    beside = {
        key: texts[stem]
        for key in image_keys
        if (stem := str(PurePosixPath(key).with_suffix(""))) in texts
    }
    read = ordered_map(lambda name: _text(source, name, setting), beside.values(), num_workers)
    return {key: text.strip() for key, text in zip(beside, read, strict=True)}


def _tables(source: Source, name: str) -> list[str]:
    """Return the relative paths of all caption tables called `name`, outer folders first."""
    found = [key for key in source.keys() if PurePosixPath(key).name == name]  # noqa: SIM118
    return sorted(found, key=lambda key: key.count("/"))


def _from_tables(
    source: Source, name: str, rows_of: Callable[[bytes, str], Rows], setting: str
) -> dict[str, str]:
    """Read the captions from all tables called `name`.

    If several tables caption the same sample, the one in the innermost folder wins.
    """
    captions: dict[str, str] = {}
    for table in _tables(source, name):
        where = f"{setting}: {printable(table)}"
        rows = rows_of(_bytes(source, table, setting), where)
        captions |= _by_key(rows, PurePosixPath(table).parent)
    return captions


def _from_names(image_keys: Sequence[str]) -> dict[str, str]:
    """Turn file names into captions; leave out names that contain no words."""
    words = {key: re.sub(r"[\s_-]+", " ", PurePosixPath(key).stem).strip() for key in image_keys}
    return {key: caption for key, caption in words.items() if caption}


def _prompt(section: DatasetSection, setting: str) -> str:
    if section.instance_prompt is None:
        raise ConfigError(
            f"{setting}.caption_strategy is 'instanceprompt', which needs {setting}."
            "instance_prompt. Set it to the caption that all samples share."
        )
    return section.instance_prompt


def _text(source: Source, key: str, setting: str) -> str:
    return _decode(_bytes(source, key, setting), f"{setting}: {printable(key)}")


def _bytes(source: Source, key: str, setting: str) -> bytes:
    try:
        return source.read(key)
    except OSError as error:
        raise DataError(
            f"{setting}: {printable(key)} cannot be read ({error}). Fix or remove it."
        ) from error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 (byte {error.start}: {error.reason}). Save it as UTF-8."
        ) from error


def _by_key(rows: Rows, folder: PurePosixPath) -> dict[str, str]:
    """Return the captions of a table's rows by sample key.

    File names in a table are relative to the table's `folder`.
    """
    captions: dict[str, str] = {}
    for where, name, caption in rows:
        key = str(folder / name)
        if key in captions:
            raise DataError(f"{where}: file_name {name!r} occurs twice. Keep one line per file.")
        captions[key] = caption.strip()
    return captions


def _read_jsonl(data: bytes, where: str) -> Rows:
    for number, line in enumerate(_decode(data, where).split("\n"), 1):
        if line.strip():
            place = f"{where}, line {number}"
            yield place, *_read_row(line, place)


def _read_parquet(data: bytes, where: str) -> Rows:
    # Imported late: only parquet tables need pyarrow.
    from gracetune.data.table_source import read_caption_table

    for number, (name, caption) in enumerate(read_caption_table(data, where)):
        yield f"{where}, row {number}", name, caption


def _read_row(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error}). Write one object per line.") from error
    values = [row.get(name) for name in ("file_name", "text")] if isinstance(row, dict) else []
    match values:
        case [str(name), str(caption)]:
            return name, caption
    raise DataError(f'{where} must be {{"file_name": "...", "text": "..."}}, but is {line.strip()}')
