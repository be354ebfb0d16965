"""Read the captions of a dataset, and add what its settings ask for.

Captions come from text files, tables, file names, or are one caption for all. `find_captions`
reads them as they are written; `caption_orders` adds prefix, suffix and trigger word to one, and
shuffles its tags.
"""

from __future__ import annotations

import codecs
import json
import posixpath
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gracetune.config.dataset_schema import TRIGGER
from gracetune.data.batch_order import seeded_permutation
from gracetune.data.prefetch import default_workers, ordered_map
from gracetune.data.sample import UnreadableSampleError
from gracetune.data.source import printable
from gracetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.data.source import Source

    Caption = str | UnreadableSampleError
    """A caption, or the reason why it cannot be read."""
    Rows = Iterator[tuple[str, str, Caption]]
    """Rows of a caption table: location in the table for error messages, file name, caption."""

METADATA = "metadata.jsonl"
PARQUET = "metadata.parquet"
MAX_LISTED = 5
"""Number of samples without a caption that an error message lists."""
MAX_CAPTION_NBYTES = 64 * 1024
"""Size of a caption in bytes above which its sample is unreadable; text encoders use a few kB."""
MAX_SHOWN = 200
"""Number of characters of an invalid row that an error message shows."""
MAX_DRAWS_PER_ORDER = 4
"""A caption of few tags has few orders: after this many draws for each, no more are looked for."""
PUNCTUATION = tuple(",.;:!?)")
"""Characters that follow a caption without a space if a suffix starts with one of them."""


@dataclass(frozen=True, slots=True)
class Captions:
    """The captions of a dataset."""

    texts: dict[str, str]
    """Caption of each sample by its key, without those that cannot be read."""
    unreadable: dict[str, str]
    """Reason why the caption of a sample cannot be read, by the sample's key."""
    files: frozenset[str]
    """Keys of the files that the captions were read from."""
    absent: tuple[str, ...]
    """Rows of caption tables whose file is not a sample of the dataset, each with its location."""
    missing: tuple[str, ...]
    """Keys of the samples that have no caption."""
    unread: tuple[str, ...] = ()
    """Text files next to samples that `caption_strategy: auto` passed over for a table."""


def find_captions(
    source: Source, image_keys: Sequence[str], section: DatasetSection, setting: str = "datasets"
) -> Captions:
    """Read the captions as `caption_strategy` says, without prefix, suffix and trigger word.

    The key of a sample is its relative path in `source`. An empty caption is allowed; samples
    without a caption are in `missing`.
    """
    strategy = _strategy(source, section)
    found: dict[str, Caption] = {}
    files: Sequence[str] = ()
    absent: list[str] = []
    unread: dict[str, str] = {}
    match strategy:
        case "textfile":
            num_workers = section.in_memory.num_workers or default_workers()
            beside = _text_files(source, image_keys, section.caption_extension)
            read = ordered_map(lambda name: _text(source, name), beside.values(), num_workers)
            found, files = dict(zip(beside, read, strict=True)), list(beside.values())
        case "jsonl" | "parquet":
            name, rows_of = _TABLES[strategy]
            files = _tables(source, name)
            found, absent = _from_tables(source, files, rows_of, set(image_keys), setting)
            if section.caption_strategy == "auto":
                unread = _text_files(source, image_keys, section.caption_extension)
        case "filename":
            found.update(_from_names(image_keys))
        case "instanceprompt":
            found.update(dict.fromkeys(image_keys, _prompt(section, setting)))
    captions = {key: found[key] for key in image_keys if key in found}
    return Captions(
        {key: text for key, text in captions.items() if isinstance(text, str)},
        {key: text.reason for key, text in captions.items() if not isinstance(text, str)},
        frozenset(files),
        tuple(absent),
        tuple(key for key in image_keys if key not in found),
        tuple(unread.values()),
    )


def require_captions(
    captions: Captions, source: Source, section: DatasetSection, setting: str = "datasets"
) -> None:
    """Raise an error if a sample has no caption."""
    missing = captions.missing
    if not missing:
        return
    strategy = _strategy(source, section)
    named = ", ".join(map(printable, missing[:MAX_LISTED])) + (
        ", ..." if len(missing) > MAX_LISTED else ""
    )
    total = len(missing) + len(captions.texts) + len(captions.unreadable)
    remedy = _REMEDY[strategy].format(suffix=section.caption_extension)
    other = _other_extension(source, missing, section) if strategy == "textfile" else None
    if other is not None:
        remedy = f"Set caption_extension: {other}, if the .{other} files are the captions"
    raise DataError(
        f"{setting}.caption_strategy is {section.caption_strategy!r}: {len(missing)} of {total} "
        f"samples have no caption: {named}. {remedy}."
    )


def _strategy(source: Source, section: DatasetSection) -> str:
    if section.caption_strategy != "auto":
        return section.caption_strategy
    return "jsonl" if _tables(source, METADATA) else "textfile"


def _other_extension(source: Source, missing: Sequence[str], section: DatasetSection) -> str | None:
    """Return the suffix of files that look like captions of the samples that have none."""
    for suffix in ("txt", "caption", "tags", "json"):
        if suffix != section.caption_extension and _text_files(source, missing, suffix):
            return suffix
    return None


def caption_orders(text: str, section: DatasetSection, seed: str) -> tuple[str, ...]:
    """Return a caption with prefix, suffix and trigger word: first as written, then shuffled.

    There is one text unless the dataset shuffles tags (`caption_shuffle`). The orders depend only
    on the caption and on the text `seed`; equal ones are left out.
    """
    orders = [_complete(text, section)]
    tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    kept, free = tags[: section.caption_keep_tokens], tags[section.caption_keep_tokens :]
    if not section.caption_shuffle or len(free) < 2:
        return tuple(orders)
    for draw in range(MAX_DRAWS_PER_ORDER * section.caption_variants):
        if len(orders) == section.caption_variants:
            break
        order = seeded_permutation(len(free), f"tags {seed} {draw}")
        shuffled = _complete(", ".join([*kept, *(free[place] for place in order)]), section)
        if shuffled not in orders:
            orders.append(shuffled)
    return tuple(orders)


def _complete(text: str, section: DatasetSection) -> str:
    """Add the prefix, the suffix and the trigger word to a caption."""
    prefix, suffix = section.caption_prefix.strip(), section.caption_suffix.strip()
    glue = "" if suffix.startswith(PUNCTUATION) else " "
    caption = " ".join(part for part in (prefix, text) if part)
    if suffix:
        caption = f"{caption}{glue}{suffix}" if caption else suffix.lstrip(", ")
    word = section.trigger_word
    if word is None:
        return caption
    caption = caption.replace(TRIGGER, word)
    if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", caption, re.IGNORECASE):
        return caption
    return f"{word}, {caption}" if caption else word


_OR = ", or set caption_strategy: instanceprompt and one instance_prompt for all"
_REMEDY = {
    "textfile": f"Add a .{{suffix}} file of the same name next to each (it may be empty){_OR}",
    "jsonl": f"Add a line with file_name and text to {METADATA} for each{_OR}",
    "parquet": f"Add a row with file_name and text to {PARQUET} for each{_OR}",
    "filename": f"Give each file a name that contains words{_OR}",
}


def _text_files(source: Source, image_keys: Sequence[str], extension: str) -> dict[str, str]:
    """Return the caption file next to each sample, if it has one, by the sample's key."""
    names, ending = source.keys(), f".{extension}"
    texts = {name[: -len(ending)]: name for name in names if name.lower().endswith(ending)}
    return {
        key: texts[stem]
        for key in image_keys
        if (stem := str(PurePosixPath(key).with_suffix(""))) in texts
    }


def _tables(source: Source, name: str) -> list[str]:
    """Return the relative paths of all caption tables called `name`, outer folders first."""
    found = [key for key in source.keys() if PurePosixPath(key).name == name]  # noqa: SIM118
    return sorted(found, key=lambda key: key.count("/"))


def _from_tables(
    source: Source,
    tables: Sequence[str],
    rows_of: Callable[[bytes, str], Rows],
    samples: Set[str],
    setting: str,
) -> tuple[dict[str, Caption], list[str]]:
    """Read the captions from caption tables; also return the rows whose file is not a sample.

    If several tables caption the same sample, the one in the innermost folder wins.
    """
    captions: dict[str, Caption] = {}
    absent: list[str] = []
    for table in tables:
        where = f"{setting}: {printable(table)}"
        try:
            data = source.read(table)
        except OSError as error:
            raise DataError(f"{where} cannot be read ({error}). Fix or remove it.") from error
        found = _by_key(rows_of(data, where), PurePosixPath(table).parent)
        absent += [f"{printable(table)}: {printable(key)}" for key in found if key not in samples]
        captions |= found
    return captions, absent


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


def _text(source: Source, key: str) -> Caption:
    try:
        data = source.read(key)
        return _json_caption(data, key) if key.lower().endswith(".json") else _decoded(data, key)
    except OSError as error:
        return UnreadableSampleError(
            f"its caption {key} cannot be read ({error.strerror or error})"
        )


def _json_caption(data: bytes, key: str) -> Caption:
    """Return the text `caption` or `text` of a JSON file, or the reason why there is none."""
    text = _decoded(data, key)
    if not isinstance(text, str):
        return text
    try:
        row = json.loads(text, parse_int=float)
    except (ValueError, RecursionError) as error:
        return UnreadableSampleError(f"its caption {key} is not JSON ({error})")
    for name in ("caption", "text") if isinstance(row, dict) else ():
        if isinstance(row.get(name), str):
            return _encodable(row[name].strip(), key)
    return UnreadableSampleError(f"its caption {key} is no object with a text `caption` or `text`")


def _decoded(data: bytes, where: str) -> Caption:
    if len(data) > MAX_CAPTION_NBYTES:
        return UnreadableSampleError(
            f"its caption {where} is longer than {MAX_CAPTION_NBYTES} bytes"
        )
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        return UnreadableSampleError(f"its caption {where} is {_not_utf8(error)}")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte {error.start}: {error.reason}). Save it as UTF-8"


def _by_key(rows: Rows, folder: PurePosixPath) -> dict[str, Caption]:
    """Return the captions of a table's rows by sample key.

    File names in a table are relative to the table's `folder`, and must lie in the dataset.
    """
    captions: dict[str, Caption] = {}
    for where, name, caption in rows:
        key = posixpath.normpath(folder / name)
        if key.startswith(("/", "../")) or key == "..":
            raise DataError(
                f"{where}: file_name {name!r} leads out of the dataset. Use a path relative to the "
                "folder of the table."
            )
        if key in captions:
            raise DataError(f"{where}: file_name {name!r} occurs twice. Keep one line per file.")
        captions[key] = caption.strip() if isinstance(caption, str) else caption
    return captions


def _read_jsonl(data: bytes, where: str) -> Rows:
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        place = f"{where}, line {number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{place} is {_not_utf8(error)}.") from error
        if text:
            yield place, *_read_row(text, place)


def _read_parquet(data: bytes, where: str) -> Rows:
    # Imported late: only parquet tables need pyarrow.
    from gracetune.data.table_source import read_caption_table

    for number, (name, caption) in enumerate(read_caption_table(data, where)):
        yield f"{where}, row {number}", name, _decoded(caption, f"in row {number}")


_TABLES: dict[str, tuple[str, Callable[[bytes, str], Rows]]] = {
    "jsonl": (METADATA, _read_jsonl),
    "parquet": (PARQUET, _read_parquet),
}


def _read_row(line: str, where: str) -> tuple[str, Caption]:
    try:
        # Integers of other fields may be too long for Python.
        row = json.loads(line, parse_int=float)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}). Write one object per line.") from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply. Write one flat object per line.") from error
    values = [row.get(name) for name in ("file_name", "text")] if isinstance(row, dict) else []
    match values:
        case [str(name), str(caption)]:
            return name, _encodable(caption, where.rpartition(", ")[2])
    shown = printable(line[:MAX_SHOWN]) + ("..." if len(line) > MAX_SHOWN else "")
    raise DataError(f'{where} must be {{"file_name": "...", "text": "..."}}, but is {shown}')


def _encodable(caption: str, where: str) -> Caption:
    """Return a caption, or the reason why it is not valid Unicode text."""
    try:
        return _decoded(caption.encode(), f"in {where}")
    except UnicodeEncodeError as error:
        character = printable(caption[error.start])
        return UnreadableSampleError(f"its caption in {where} has the lone surrogate {character}")
