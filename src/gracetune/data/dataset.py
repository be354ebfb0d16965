"""Opening a data set: from a section of the run file to samples that are known to be readable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol, cast

from blake3 import blake3

from gracetune import registry
from gracetune.data.captions import read_captions
from gracetune.data.images import EXTENSIONS, UnreadableImageError, probe
from gracetune.data.parallel import default_workers, ordered_map
from gracetune.data.progress import Progress
from gracetune.data.sample import Sample
from gracetune.data.staged import StagedSource
from gracetune.errors import DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.corruption import CorruptionLedger
    from gracetune.data.progress import Tell
    from gracetune.data.source import Source

SOURCES = {
    "local": "gracetune.data.folder:open_folder",
    "in_memory": "gracetune.data.folder:open_folder",
    "shapes": "gracetune.data.shapes:open_shapes",
}
STAGED = frozenset(("in_memory", "shapes"))


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
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    digest: str
    width: int
    height: int


def open_dataset(
    section: DatasetSection, index: int, tell: Tell, ledger: CorruptionLedger
) -> OpenDataset:
    """Find pictures and captions, stage where asked, and look into every picture once."""
    setting = f"datasets[{index}]"
    opener = cast("Opener", registry.load("source", section.type, SOURCES))
    source = opener(section, setting, tell)
    keys = _image_keys(source, setting)
    captions = read_captions(source, keys, section, setting)
    _tell_empty(section, captions, tell)
    if section.type in STAGED:
        source = StagedSource.stage(source, keys, section.in_memory, tell, setting)

    samples = []
    progress = Progress("reading", len(keys), tell)
    num_workers = section.in_memory.num_workers or default_workers()
    for key, seen in zip(
        keys, ordered_map(lambda key: _look(source, key), keys, num_workers), strict=True
    ):
        if isinstance(seen, _Seen):
            samples.append(
                Sample(section.id, key, captions[key], seen.digest, seen.width, seen.height)
            )
        else:
            ledger.record(section.id, key, seen)
        progress.advance()

    ledger.check(section.id, len(keys), section.max_corruption_rate)
    if not samples:
        raise DataError(
            f"{setting} ({section.id!r}): none of the {len(keys)} pictures in {source.describe()} "
            "can be read. Mend the files, or name another folder."
        )
    return OpenDataset(section, source, tuple(samples))


def _image_keys(source: Source, setting: str) -> Sequence[str]:
    names = source.keys()
    keys = [name for name in names if PurePosixPath(name).suffix.lower() in EXTENSIONS]
    if not keys:
        raise DataError(
            f"{setting}: {source.describe()} has {len(names)} files and no picture among "
            f"them. Known endings: {' '.join(sorted(EXTENSIONS))}."
        )
    return keys


def _look(source: Source, key: str) -> _Seen | str:
    """What a sample needs to know of its picture, or the reason why it cannot be one."""
    try:
        data = source.read(key)
        width, height = probe(data)
    except UnreadableImageError as error:
        return error.reason
    except OSError as error:
        return error.strerror or str(error)
    return _Seen(blake3(data).hexdigest(), width, height)


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
