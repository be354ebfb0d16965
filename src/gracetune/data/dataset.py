"""Opening a data set: from a section of the run file to samples that are known to be readable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol, cast

from blake3 import blake3

from gracetune import registry
from gracetune.config.schema import STAGED
from gracetune.data import audio, images, video
from gracetune.data.captions import read_captions
from gracetune.data.conditioning import find_companions, same_aspect
from gracetune.data.prefetch import by_threads, prefetched
from gracetune.data.sample import Companion, Sample, UnreadableSampleError
from gracetune.data.source import data_dir, printable, walk
from gracetune.data.staging import StagedSource
from gracetune.durable import write_text
from gracetune.errors import DataError
from gracetune.events.dispatcher import ProgressReporter
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.conditioning import Role
    from gracetune.data.source import Source
    from gracetune.events.dispatcher import Emit


SOURCES = {
    "local": "gracetune.data.dataset:open_address",
    "in_memory": "gracetune.data.dataset:open_address",
    "tar": "gracetune.data.shards:open_tar",
    "parquet": "gracetune.data.tables:open_parquet",
    "hf": "gracetune.data.tables:open_hf",
    "remote": "gracetune.data.remote:open_remote",
    "shapes": "gracetune.data.shapes:open_shapes",
}
EXTENSIONS = {
    "image": images.EXTENSIONS,
    "video": video.EXTENSIONS,
    "audio": audio.EXTENSIONS,
}
PACKAGES: dict[str, Callable[[], None]] = {
    "image": lambda: None,
    "video": video.require_packages,
    "audio": audio.require_packages,
}
"""What a kind cannot do without is asked for before any file is."""
AHEAD = 256
"""How many samples are looked into before the first of them is taken."""
NOUNS = {"image": "picture", "video": "video", "audio": "sound"}


class Opener(Protocol):
    """What a name in SOURCES, or an entry point of `gracetune.source`, stands for."""

    def __call__(self, section: DatasetSection, setting: str, emit: Emit) -> Source:
        """Open the source; `setting` is the section's place in the run file, for messages."""
        ...


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """A data set that is ready to be bucketed and read."""

    section: DatasetSection
    source: Source
    """Has the bytes of samples and of their companions."""
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    digest: str
    width: int
    height: int
    seconds: float = 0.0
    fps: float = 0.0
    companions: tuple[Companion, ...] = ()


def open_dataset(
    section: DatasetSection,
    index: int,
    emit: Emit,
    ledger: CorruptionLog,
    meet_in: Path | None = None,
) -> OpenDataset:
    """Find samples and captions, stage where asked, and look into every sample once.

    Processes of one machine that give the same folder in `meet_in` share what is staged.
    """
    setting = f"datasets[{index}]"
    PACKAGES[section.dataset_type]()
    opener = cast("Opener", registry.load("source", section.type, SOURCES))
    source = opener(section, setting, emit)
    keys = _sample_keys(source, section, setting)
    captions = read_captions(source, keys, section, setting)
    _report_empty(section, captions, emit)
    beside = find_companions(
        section, setting, source, keys, lambda folder, of: _open_beside(section, folder, of, emit)
    )
    source = beside.source
    if section.type in STAGED:
        needed = [*keys, *(key for pairs in beside.keys.values() for _, key in pairs)]
        source = StagedSource.stage(source, needed, section.in_memory, emit, setting, meet_in)

    samples = []
    progress = ProgressReporter("reading", len(keys), emit)
    looks = prefetched(
        keys,
        lambda key: _look(source, key, section, beside.keys.get(key, ())),
        lambda key: f"data set {section.id!r}: {key}",
        by_threads(section.in_memory.num_workers, AHEAD, section.timeout_s),
    )
    for key, seen in zip(keys, looks, strict=True):
        if isinstance(seen, _Seen):
            samples.append(
                Sample(
                    section.id,
                    key,
                    captions[key],
                    seen.digest,
                    seen.width,
                    seen.height,
                    section.dataset_type,
                    seen.seconds,
                    seen.fps,
                    seen.companions,
                )
            )
        else:
            ledger.record(section.id, key, seen)
        progress.advance()

    ledger.check(section.id, len(keys), section.max_corruption_rate)
    if not samples:
        raise DataError(
            f"{setting} ({section.id!r}): none of the {len(keys)} "
            f"{NOUNS[section.dataset_type]}s in {source.describe()} can be read. "
            "Mend the files, or name another folder."
        )
    return OpenDataset(section, source, tuple(samples))


def _open_beside(section: DatasetSection, folder: str, setting: str, emit: Emit) -> Source:
    """A folder of companions is read as the samples are; made samples have theirs in a folder."""
    kind = "local" if section.type == "shapes" else section.type
    opener = cast("Opener", registry.load("source", kind, SOURCES))
    return opener(section.model_copy(update={"instance_data_dir": folder}), setting, emit)


def _sample_keys(source: Source, section: DatasetSection, setting: str) -> Sequence[str]:
    names, known = source.keys(), EXTENSIONS[section.dataset_type]
    keys = [name for name in names if PurePosixPath(name).suffix.lower() in known]
    if not keys:
        raise DataError(
            f"{setting}: {source.describe()} has {len(names)} files and no "
            f"{NOUNS[section.dataset_type]} among them. Known endings: {' '.join(sorted(known))}."
        )
    return keys


def _look(
    source: Source, key: str, section: DatasetSection, companions: Sequence[tuple[Role, str]]
) -> _Seen | str:
    """What a sample needs to know of its file, or the reason why it cannot be one."""
    try:
        data = source.read(key)
        seen = _facts(data, section.dataset_type)
        if not companions:
            return seen
        size = (seen.width, seen.height)
        inverts = section.mask_invert
        found = tuple(_companion(source, *pair, size, inverts) for pair in companions)
        return replace(seen, companions=found)
    except UnreadableSampleError as error:
        return error.reason
    except OSError as error:
        return error.strerror or str(error)


def _facts(data: bytes, kind: str) -> _Seen:
    digest = blake3(data).hexdigest()
    match kind:
        case "video":
            film = video.probe_video(data)
            return _Seen(digest, film.width, film.height, film.seconds, film.fps)
        case "audio":
            return _Seen(digest, 0, 0, audio.probe_audio(data).seconds)
    return _Seen(digest, *images.probe(data))


def _companion(
    source: Source, role: Role, key: str, size: tuple[int, int], inverts: bool
) -> Companion:
    data = source.read(key)
    try:
        shown = images.probe(data)
    except UnreadableSampleError as error:
        raise UnreadableSampleError(f"its companion {key}: {error.reason}") from error
    if not same_aspect(shown, size):
        raise UnreadableSampleError(
            f"its companion {key} is {shown[0]}x{shown[1]}, of another aspect than "
            f"{size[0]}x{size[1]}"
        )
    return Companion(role, key, blake3(data).hexdigest(), inverts and role == "mask")


def _report_empty(section: DatasetSection, captions: dict[str, str], emit: Emit) -> None:
    empty = [key for key, caption in captions.items() if not caption]
    if empty:
        emit(
            Notice(
                f"data set {section.id!r}: {len(empty)} of {len(captions)} captions are empty "
                f"({empty[0]} the first); these pictures train without a caption",
                level="warning",
            )
        )


# ------------------------------------------------------------------------------------------
# What `instance_data_dir` names: a folder, shards, tables, a saved data set, or an address.


OPENERS = {
    "folder": "gracetune.data.source:open_folder",
    "tar": "gracetune.data.shards:open_tar",
    "parquet": "gracetune.data.tables:open_parquet",
    "hf": "gracetune.data.tables:open_hf",
    "remote": "gracetune.data.remote:open_remote",
}
SAVED_DATASET = ("dataset_dict.json", "state.json")
"""What only a folder has that Hugging Face `datasets` saved."""
SHARDS = (".tar", ".parquet")
BESIDE = frozenset((".md", ".json", ".yaml", ".yml", ""))
"""Endings of files that lie beside shards and tables and are not samples."""


def open_address(section: DatasetSection, setting: str, emit: Emit) -> Source:
    """The source of `local` and `in_memory`: whatever the address turns out to be."""
    kind = kind_of_address(data_dir(section, setting))
    source = _open(kind, section, setting, emit)
    if kind == "remote":
        held = _kind_of_files(source.keys())
        return source if held == "folder" else _open(held, section, setting, emit)
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


def _open(kind: str, section: DatasetSection, setting: str, emit: Emit) -> Source:
    opener = cast("Callable[..., Source]", registry.load("source", kind, OPENERS))
    return opener(section, setting, emit)


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


# ------------------------------------------------------------------------------------------
# Which samples could not be read, and when that is too many to go on.


NAMED = 5
"""How many files an error names; the report has them all."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """One sample that is left out."""

    dataset: str
    key: str
    reason: str


class CorruptionLog:
    """Keeps every unreadable sample of a run, once each, and tells it by name."""

    def __init__(self, emit: Emit, report: Path | None = None) -> None:
        """`report` is written before a run stops for its broken files, which must be mended."""
        self._emit = emit
        self._report = report
        self._entries: dict[tuple[str, str], Corruption] = {}

    @property
    def entries(self) -> tuple[Corruption, ...]:
        """In the order in which they were found."""
        return tuple(self._entries.values())

    def record(self, dataset: str, key: str, reason: str) -> None:
        """Leave a sample out; the second time the same one is recorded says nothing new."""
        if (dataset, key) in self._entries:
            return
        self._entries[dataset, key] = Corruption(dataset, key, reason)
        text = f"data set {dataset!r}: {printable(key)} is left out: {printable(reason)}"
        self._emit(Notice(text, level="warning"))

    def check(self, dataset: str, total: int, rate: float) -> None:
        """Stop once more than `rate` of the `total` samples are unreadable."""
        broken = [entry for entry in self.entries if entry.dataset == dataset]
        if len(broken) / total <= rate:
            return
        named = "; ".join(f"{printable(e.key)} ({printable(e.reason)})" for e in broken[:NAMED])
        more = f"; and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
        if self._report is not None:
            self.write(self._report)
            more += f" (all of them in {self._report})"
        raise DataError(
            f"data set {dataset!r}: {len(broken)} of {total} samples cannot be read, more than "
            f"max_corruption_rate {rate:g} allows: {named}{more}. Mend or remove these files, or "
            "raise max_corruption_rate."
        )

    def write(self, path: Path) -> None:
        """Leave a report for whoever mends the files."""
        report = {
            "unreadable": len(self._entries),
            "samples": [asdict(entry) for entry in self.entries],
        }
        write_text(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
