"""Open a dataset: list its samples, read their captions, and check that every file can be decoded.

`instance_data_dir` may be a folder, tar shards, parquet tables, a saved Hugging Face dataset or a
remote address; `open_address` decides which. A control image or mask of a sample is called its
companion. Unreadable samples are skipped and collected in a `CorruptionLog`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol, cast

from blake3 import blake3

from gracetune import entry_points
from gracetune.atomic_files import write_text
from gracetune.config.dataset_schema import STAGED_TYPES, TRIGGER
from gracetune.data import audio, images, video
from gracetune.data.captions import METADATA, caption_orders, find_captions, require_captions
from gracetune.data.conditioning import find_companions, same_aspect
from gracetune.data.data_quality import thumbnail
from gracetune.data.prefetch import prefetched, worker_threads
from gracetune.data.sample import Companion, Sample, UnreadableSampleError
from gracetune.data.source import FolderSource, data_dir, printable, walk_folder
from gracetune.data.staging import StagedSource
from gracetune.errors import DataError
from gracetune.events.dispatcher import ProgressReporter
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.data.captions import Captions
    from gracetune.data.conditioning import Role
    from gracetune.data.source import Source
    from gracetune.events.dispatcher import Emit


SOURCES = {
    "local": "gracetune.data.dataset:open_address",
    "in_memory": "gracetune.data.dataset:open_address",
    "tar": "gracetune.data.shard_files:open_tar",
    "parquet": "gracetune.data.table_source:open_parquet",
    "hf": "gracetune.data.table_source:open_hf",
    "remote": "gracetune.data.remote:open_remote",
    "shapes": "gracetune.data.demo_dataset:open_shapes",
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
"""For each `dataset_type`: a function that raises an error if a package that decodes such files is
not installed."""
PROBED_AHEAD = 256
"""Largest number of samples that worker threads check ahead of the main thread."""
NOUNS = {"image": "images", "video": "videos", "audio": "audio files"}


class SourceOpener(Protocol):
    """A function that opens the files of a dataset as a `Source`; each value of `type` has one.

    `SOURCES` lists gracetune's own functions; other packages register theirs as entry points of
    the group `gracetune.source`.
    """

    def __call__(self, section: DatasetSection, setting: str, emit: Emit) -> Source:
        """Open the files of a dataset; `setting` is its name in messages, such as `datasets[0]`."""
        ...


@dataclass(frozen=True, slots=True)
class ListedDataset:
    """The files of a dataset and its captions, before any sample is read."""

    section: DatasetSection
    setting: str
    """Name of the dataset in messages, such as `datasets[0]`."""
    source: Source
    names: Sequence[str]
    """Names of all files."""
    keys: Sequence[str]
    """Names of the samples."""
    captions: Captions
    """Captions as they are written, without prefix, suffix and trigger word."""


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """A dataset whose files have been listed and checked."""

    section: DatasetSection
    source: Source
    """Source that reads the samples, their control images and their masks."""
    samples: tuple[Sample, ...]
    """All samples that are readable."""
    thumbnails: Mapping[str, bytes] = field(default_factory=dict)
    """Thumbnail of each image by its key, for finding near duplicates; empty unless requested."""


@dataclass(frozen=True, slots=True)
class _Probe:
    digest: str
    width: int
    height: int
    seconds: float = 0.0
    fps: float = 0.0
    companions: tuple[Companion, ...] = ()
    thumbnail: bytes = b""


def open_dataset(
    section: DatasetSection,
    index: int,
    emit: Emit,
    corruption: CorruptionLog,
    shared_folder: Path | None = None,
    output_dir: Path | None = None,
    seed: int = 0,
    max_thumbnails: int = 0,
) -> OpenDataset:
    """List the samples and captions of a dataset, and check that every sample can be decoded.

    Files are first read into host memory if the dataset's type says so. Processes on one machine
    that pass the same folder as `shared_folder` share one copy in memory. Files in the run's folder
    `output_dir` are no samples, such as images of its validation. `seed` is the run's seed, which
    decides the order of shuffled tags. If the dataset has at most `max_thumbnails` images, their
    thumbnails are returned as well.
    """
    listed = list_dataset(section, index, emit, output_dir)
    require_captions(listed.captions, listed.source, section, listed.setting)
    return read_samples(
        listed, emit, corruption, shared_folder, seed, len(listed.keys) <= max_thumbnails
    )


def list_dataset(
    section: DatasetSection, index: int, emit: Emit, output_dir: Path | None = None
) -> ListedDataset:
    """List the files of a dataset and read its captions; samples without one are no error here."""
    setting = f"datasets[{index}]"
    PACKAGES[section.dataset_type]()
    opener = cast("SourceOpener", entry_points.load("source", section.type, SOURCES))
    source = opener(section, setting, emit)
    names = _names_outside(source, output_dir, setting, emit)
    keys = _sample_keys(source, names, section, setting)
    captions = find_captions(source, keys, section, setting)
    _report_captions(section, captions, emit)
    _report_ignored(section, names, keys, captions, emit)
    return ListedDataset(section, setting, source, names, keys, captions)


def read_samples(
    listed: ListedDataset,
    emit: Emit,
    corruption: CorruptionLog,
    shared_folder: Path | None = None,
    seed: int = 0,
    with_thumbnails: bool = False,
) -> OpenDataset:
    """Read every sample that has a caption, and check that it can be decoded.

    See `open_dataset` for the parameters.
    """
    section, setting, source, captions = (
        listed.section,
        listed.setting,
        listed.source,
        listed.captions,
    )
    for key, reason in captions.unreadable.items():
        corruption.record(section.id, key, reason)
    num_samples, keys = len(listed.keys), list(captions.texts)
    corruption.check(section.id, num_samples, section.max_corruption_rate)
    beside = find_companions(
        section,
        setting,
        source,
        keys,
        lambda folder, of: _open_companions(section, folder, of, emit),
    )
    source = beside.source
    if section.type in STAGED_TYPES:
        needed = [*keys, *(key for pairs in beside.keys.values() for _, key in pairs)]
        source = StagedSource.stage(source, needed, section.in_memory, emit, setting, shared_folder)

    samples, thumbnails = [], {}
    progress = ProgressReporter("reading", len(keys), emit)
    probes = prefetched(
        keys,
        lambda key: _probe(source, key, section, beside.keys.get(key, ()), with_thumbnails),
        lambda key: f"dataset {section.id!r}: {key}",
        worker_threads(section.in_memory.num_workers, PROBED_AHEAD, section.timeout_s),
    )
    for key, probe in zip(keys, probes, strict=True):
        if isinstance(probe, _Probe):
            samples.append(_sample(section, key, captions.texts[key], probe, seed))
            if probe.thumbnail:
                thumbnails[key] = probe.thumbnail
        else:
            corruption.record(section.id, key, probe)
        progress.advance()

    corruption.check(section.id, num_samples, section.max_corruption_rate)
    if not samples:
        raise DataError(
            f"{setting} ({section.id!r}): none of the {num_samples} "
            f"{NOUNS[section.dataset_type]} in {source.describe()} can be read. "
            "Fix the files, or set another folder."
        )
    return OpenDataset(section, source, tuple(samples), thumbnails)


def _sample(section: DatasetSection, key: str, text: str, probe: _Probe, seed: int) -> Sample:
    # The order of tags depends on contents, not on paths, so that a dataset can be moved.
    caption, *shuffled = caption_orders(text, section, f"{seed} {probe.digest} {text!r}")
    return Sample(
        section.id,
        key,
        caption,
        probe.digest,
        probe.width,
        probe.height,
        section.dataset_type,
        probe.seconds,
        probe.fps,
        probe.companions,
        tuple(shuffled),
    )


def _open_companions(section: DatasetSection, folder: str, setting: str, emit: Emit) -> Source:
    """Open a folder of control images or masks as the same type of dataset as the samples.

    For generated shapes, it is opened as a plain folder.
    """
    kind = "local" if section.type == "shapes" else section.type
    opener = cast("SourceOpener", entry_points.load("source", kind, SOURCES))
    return opener(section.model_copy(update={"instance_data_dir": folder}), setting, emit)


def _names_outside(
    source: Source, output_dir: Path | None, setting: str, emit: Emit
) -> Sequence[str]:
    """Return the names of all files of a source, except those in the output folder of the run.

    The output folder may lie in the dataset's folder, or be linked from there. A dataset that
    itself lies in the output folder is used completely.
    """
    names = source.keys()
    if output_dir is None or not isinstance(source, FolderSource):
        return names
    root, output = os.path.realpath(source.root), os.path.realpath(output_dir)
    if root == output:
        raise DataError(
            f"{setting}.instance_data_dir is {str(source.root)!r}, which is also output_dir: files "
            "that the run writes would become samples. Set another output_dir."
        )
    if root.startswith(f"{output}/"):
        return names
    is_inside = {
        folder: f"{os.path.realpath(source.root / folder)}/".startswith(f"{output}/")
        for folder in {os.path.dirname(name) for name in names}
    }
    outside = [name for name in names if not is_inside[os.path.dirname(name)]]
    if len(outside) < len(names):
        text = f"{setting}: skipped {len(names) - len(outside)} files in output_dir ({output_dir})"
        emit(Notice(f"{text}; they are not part of the dataset", level="warning"))
    return outside


def _sample_keys(
    source: Source, names: Sequence[str], section: DatasetSection, setting: str
) -> Sequence[str]:
    known = EXTENSIONS[section.dataset_type]
    keys = [name for name in names if PurePosixPath(name).suffix.lower() in known]
    if not keys:
        suffixes = {PurePosixPath(name).suffix.lower() for name in names}
        others = [kind for kind in NOUNS if suffixes & EXTENSIONS[kind]]
        fix = f"Known suffixes: {' '.join(sorted(known))}."
        if others:
            fix = (
                f"It has {NOUNS[others[0]]}: set dataset_type: {others[0]}, and a model.family "
                "that trains them, or name another folder."
            )
        raise DataError(
            f"{setting}: {source.describe()} has {len(names)} files, but no "
            f"{NOUNS[section.dataset_type]}. {fix}"
        )
    return keys


def _probe(
    source: Source,
    key: str,
    section: DatasetSection,
    companions: Sequence[tuple[Role, str]],
    with_thumbnail: bool,
) -> _Probe | str:
    """Read a sample and its control images and mask; return their sizes, duration and digests.

    Returns the reason as text if one of them is unreadable.
    """
    try:
        data = source.read(key)
        probe = _probe_file(data, section.dataset_type)
        if with_thumbnail and section.dataset_type == "image":
            probe = replace(probe, thumbnail=thumbnail(data))
        if not companions:
            return probe
        size = (probe.width, probe.height)
        inverts = section.mask_invert
        found = tuple(_companion(source, *pair, size, inverts) for pair in companions)
        return replace(probe, companions=found)
    except UnreadableSampleError as error:
        return error.reason
    except OSError as error:
        return error.strerror or str(error)


def _probe_file(data: bytes, kind: str) -> _Probe:
    digest = blake3(data).hexdigest()
    match kind:
        case "video":
            clip = video.probe_video(data)
            return _Probe(digest, clip.width, clip.height, clip.seconds, clip.fps)
        case "audio":
            return _Probe(digest, 0, 0, audio.probe_audio(data).seconds)
    return _Probe(digest, *images.probe_image(data))


def _companion(
    source: Source, role: Role, key: str, size: tuple[int, int], inverts: bool
) -> Companion:
    data = source.read(key)
    try:
        shown = images.probe_image(data)
    except UnreadableSampleError as error:
        raise UnreadableSampleError(f"its companion {key}: {error.reason}") from error
    if not same_aspect(shown, size):
        raise UnreadableSampleError(
            f"its companion {key} is {shown[0]}x{shown[1]}, which has another aspect ratio than "
            f"{size[0]}x{size[1]}"
        )
    return Companion(role, key, blake3(data).hexdigest(), inverts and role == "mask")


def _report_captions(section: DatasetSection, captions: Captions, emit: Emit) -> None:
    """Warn of empty captions, of placeholders, and of rows in caption tables without a sample."""
    waiting = [key for key, caption in captions.texts.items() if TRIGGER in caption]
    if waiting and section.trigger_word is None:
        text = f"dataset {section.id!r}: {len(waiting)} captions contain {TRIGGER} (the first is "
        hint = "nothing replaces it. Set trigger_word to the word that it stands for"
        emit(Notice(f"{text}{waiting[0]}), but {hint}", level="warning"))
    empty = [key for key, caption in captions.texts.items() if not caption]
    if empty and not (section.trigger_word or section.caption_prefix or section.caption_suffix):
        emit(
            Notice(
                f"dataset {section.id!r}: {len(empty)} of {len(captions.texts)} captions are empty "
                f"(the first is {empty[0]}); these samples are trained without a caption",
                level="warning",
            )
        )
    if captions.absent:
        emit(
            Notice(
                f"dataset {section.id!r}: {len(captions.absent)} rows of caption tables name files "
                f"that are not in the dataset, such as {captions.absent[0]}",
                level="warning",
            )
        )
    if captions.unread:
        emit(
            Notice(
                f"dataset {section.id!r}: captions are read from {METADATA}, not from "
                f"{len(captions.unread)} text files next to the samples, such as "
                f"{printable(captions.unread[0])}. Set caption_strategy to jsonl or to textfile",
                level="warning",
            )
        )


def _report_ignored(
    section: DatasetSection,
    names: Sequence[str],
    samples: Sequence[str],
    captions: Captions,
    emit: Emit,
) -> None:
    """Warn of files that are neither samples nor captions, with their number by suffix."""
    used = {*samples, *captions.files}
    ignored: dict[str, list[str]] = {}
    for key in names:
        ending = _suffix(key)
        suffixes = {".txt", f".{section.caption_extension}"}
        is_caption = ending in suffixes and section.caption_strategy != "textfile"
        if key not in used and not is_caption and ending not in NON_SAMPLE_SUFFIXES:
            ignored.setdefault(ending, []).append(key)
    if ignored:
        by_number = sorted(ignored.items(), key=lambda item: (-len(item[1]), item[0]))
        counts = ", ".join(
            f"{len(names)} {ending} (such as {printable(names[0])})" for ending, names in by_number
        )
        total, noun = sum(map(len, ignored.values())), NOUNS[section.dataset_type]
        text = f"dataset {section.id!r}: ignored {total} files that are not {noun} or captions"
        emit(Notice(f"{text}: {counts}", level="warning"))


# Finding out what `instance_data_dir` refers to

OPENERS = {
    "folder": "gracetune.data.source:open_folder",
    "tar": "gracetune.data.shard_files:open_tar",
    "parquet": "gracetune.data.table_source:open_parquet",
    "hf": "gracetune.data.table_source:open_hf",
    "remote": "gracetune.data.remote:open_remote",
}
SAVED_DATASET = ("dataset_dict.json", "state.json")
"""Names of files that only a folder written by Hugging Face's `save_to_disk` contains."""
SHARDS = (".tar", ".parquet")
NON_SAMPLE_SUFFIXES = frozenset((".md", ".json", ".yaml", ".yml", ""))
"""Suffixes of files that may lie next to shards, such as a README, and are ignored."""


def open_address(section: DatasetSection, setting: str, emit: Emit) -> Source:
    """Open the source of a dataset of type `local` or `in_memory`.

    Detects whether `instance_data_dir` is a folder, shards, a table or a remote address.
    """
    kind = address_kind(data_dir(section, setting))
    source = _open(kind, section, setting, emit)
    if kind == "remote":
        held = _kind_of_files(source.keys())
        return source if held == "folder" else _open(held, section, setting, emit)
    return source


def address_kind(address: str) -> str:
    """Return what an address refers to: "folder", "tar", "parquet", "hf" or "remote".

    Judged by its URL scheme, its suffix, or the files in the folder.
    """
    if "://" in address:
        return _suffix(address)[1:] if is_shard(address) else "remote"
    root = os.path.expanduser(address)
    if not os.path.isdir(root):
        return _suffix(root)[1:] if is_shard(root) else "folder"
    if any(os.path.isfile(os.path.join(root, name)) for name in SAVED_DATASET):
        return "hf"
    try:
        return _kind_of_files(walk_folder(Path(root)))
    except OSError:
        return "folder"  # opening it raises the error


def is_shard(address: str) -> bool:
    """Return whether an address is a tar or parquet file, or a pattern such as `data/*.tar`."""
    return _suffix(address) in SHARDS


def _open(kind: str, section: DatasetSection, setting: str, emit: Emit) -> Source:
    opener = cast("Callable[..., Source]", entry_points.load("source", kind, OPENERS))
    return opener(section, setting, emit)


def _kind_of_files(keys: Iterable[str]) -> str:
    """Return "tar" or "parquet" if all files have this suffix, else "folder".

    Files that are no samples, such as a README, do not count.
    """
    found = ""
    for key in keys:
        ending = _suffix(key)
        if ending in NON_SAMPLE_SUFFIXES:
            continue
        if ending not in SHARDS or found not in ("", ending):
            return "folder"
        found = ending
    return found[1:] or "folder"


def _suffix(name: str) -> str:
    """Return the suffix of a path or URL in lower case; the query string of a URL is ignored."""
    path = name.partition("?")[0] if name.startswith(("http://", "https://")) else name
    return os.path.splitext(path)[1].lower()


# Unreadable samples

MAX_LISTED = 5
"""Number of unreadable files that an error message lists; `corruption.json` lists all."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """A sample that is skipped because it cannot be read."""

    dataset: str
    """Id of the dataset."""
    key: str
    """Key of the sample in its dataset."""
    reason: str
    """Why the sample cannot be read."""


class CorruptionLog:
    """The unreadable samples of a run. Each is reported to the user once."""

    def __init__(self, emit: Emit, report: Path | None = None) -> None:
        """Start with no entries.

        If too many samples are unreadable, `check` lists all of them in the file `report` before it
        raises its error.
        """
        self._emit = emit
        self._report = report
        self._entries: dict[tuple[str, str], Corruption] = {}

    @property
    def entries(self) -> tuple[Corruption, ...]:
        """All unreadable samples so far, in the order in which they were found."""
        return tuple(self._entries.values())

    def record(self, dataset: str, key: str, reason: str) -> None:
        """Add an unreadable sample and warn the user; a repeated call has no effect."""
        if (dataset, key) in self._entries:
            return
        self._entries[dataset, key] = Corruption(dataset, key, reason)
        text = f"dataset {dataset!r}: skipped {printable(key)}: {printable(reason)}"
        self._emit(Notice(text, level="warning"))

    def check(self, dataset: str, total: int, rate: float) -> None:
        """Raise an error if more than the fraction `rate` of a dataset's samples is unreadable.

        `total` is the dataset's number of samples.
        """
        broken = [entry for entry in self.entries if entry.dataset == dataset]
        if len(broken) / total <= rate:
            return
        named = "; ".join(
            f"{printable(e.key)} ({printable(e.reason)})" for e in broken[:MAX_LISTED]
        )
        more = f"; and {len(broken) - MAX_LISTED} more" if len(broken) > MAX_LISTED else ""
        if self._report is not None:
            self.write(self._report)
            more += f" (all of them in {self._report})"
        raise DataError(
            f"dataset {dataset!r}: {len(broken)} of {total} samples cannot be used, but "
            f"max_corruption_rate is {rate:g}: {named}{more}. Fix or remove these files, or raise "
            "max_corruption_rate."
        )

    def write(self, path: Path) -> None:
        """Write all unreadable samples to a JSON file; if there are none, remove an earlier one."""
        if not self._entries:
            path.unlink(missing_ok=True)
            return
        report = {
            "unreadable": len(self._entries),
            "samples": [asdict(entry) for entry in self.entries],
        }
        write_text(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
