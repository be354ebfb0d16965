"""Opening a data set: from a section of the run file to samples that are known to be readable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol, cast

from blake3 import blake3

from gracetune import registry
from gracetune.config.data_schema import STAGED
from gracetune.data import audio, images, video
from gracetune.data.captions import read_captions
from gracetune.data.conditioning import find_companions, same_aspect
from gracetune.data.prefetch import by_threads, prefetched
from gracetune.data.progress import ProgressReporter
from gracetune.data.sample import Companion, Sample, UnreadableSampleError
from gracetune.data.staged import StagedSource
from gracetune.errors import DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gracetune.config.schema import DatasetSection
    from gracetune.data.conditioning import Role
    from gracetune.data.corruption import CorruptionLog
    from gracetune.data.progress import Tell
    from gracetune.data.source import Source

SOURCES = {
    "local": "gracetune.data.address:open_address",
    "in_memory": "gracetune.data.address:open_address",
    "tar": "gracetune.data.tar:open_tar",
    "parquet": "gracetune.data.parquet:open_parquet",
    "hf": "gracetune.data.hf_datasets:open_hf",
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
    "video": video.demand_packages,
    "audio": audio.demand_packages,
}
"""What a kind cannot do without is asked for before any file is."""
AHEAD = 256
"""How many samples are looked into before the first of them is taken."""
NOUNS = {"image": "picture", "video": "video", "audio": "sound"}


class Opener(Protocol):
    """What a name in SOURCES, or an entry point of `gracetune.source`, stands for."""

    def __call__(self, section: DatasetSection, setting: str, tell: Tell) -> Source:
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
    tell: Tell,
    ledger: CorruptionLog,
    meet_in: Path | None = None,
) -> OpenDataset:
    """Find samples and captions, stage where asked, and look into every sample once.

    Processes of one machine that give the same folder in `meet_in` share what is staged.
    """
    setting = f"datasets[{index}]"
    PACKAGES[section.dataset_type]()
    opener = cast("Opener", registry.load("source", section.type, SOURCES))
    source = opener(section, setting, tell)
    keys = _sample_keys(source, section, setting)
    captions = read_captions(source, keys, section, setting)
    _tell_empty(section, captions, tell)
    beside = find_companions(
        section, setting, source, keys, lambda folder, of: _open_beside(section, folder, of, tell)
    )
    source = beside.source
    if section.type in STAGED:
        needed = [*keys, *(key for pairs in beside.keys.values() for _, key in pairs)]
        source = StagedSource.stage(source, needed, section.in_memory, tell, setting, meet_in)

    samples = []
    progress = ProgressReporter("reading", len(keys), tell)
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


def _open_beside(section: DatasetSection, folder: str, setting: str, tell: Tell) -> Source:
    """A folder of companions is read as the samples are; made samples have theirs in a folder."""
    kind = "local" if section.type == "shapes" else section.type
    opener = cast("Opener", registry.load("source", kind, SOURCES))
    return opener(section.model_copy(update={"instance_data_dir": folder}), setting, tell)


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


def _tell_empty(section: DatasetSection, captions: dict[str, str], tell: Tell) -> None:
    empty = [key for key, caption in captions.items() if not caption]
    if empty:
        tell(
            Notice(
                f"data set {section.id!r}: {len(empty)} of {len(captions)} captions are empty "
                f"({empty[0]} the first); these pictures train without a caption",
                level="warning",
            )
        )
