"""Find the companions of each sample: its control images and its mask.

A companion lies in a folder of its own and has the file name of its sample, except for the suffix.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from gracetune.data.images import EXTENSIONS
from gracetune.data.source import FileSource, StampedSource
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.data.source import FileRange, Source

    Role = Literal["control", "mask"]

MAX_LISTED = 5
"""Number of samples without a control image or mask that an error message lists."""
ASPECT_TOLERANCE = 0.02
"""Largest relative difference between the aspect ratios of a sample and of its mask or control
image. They must match, because both are cropped in the same way."""


@dataclass(frozen=True, slots=True)
class Companions:
    """The control images and masks of a dataset's samples."""

    source: Source
    """Source that reads the samples as well as their control images and masks."""
    keys: Mapping[str, tuple[tuple[Role, str], ...]] = field(default_factory=dict)
    """For each sample's key: pairs of a role ("control" or "mask") and the key in `source` of the
    control image or mask."""


class JoinedSource:
    """A source that combines several others, such as the samples of a dataset and their masks.

    It lets them be read into host memory under one memory limit.
    """

    def __init__(self, parts: Mapping[str, Source]) -> None:
        """Combine several sources, given as {prefix: source}.

        The key of a file is the prefix followed by the file's key in its own source. The prefix of
        the samples' source is empty.
        """
        self._parts = parts
        self._where: dict[str, tuple[Source, str]] = {}
        for prefix, source in parts.items():
            for key in source.keys():  # noqa: SIM118  a source is no mapping
                if prefix + key in self._where:
                    raise DataError(
                        f"{source.describe()}: {prefix + key!r} is also the name of a sample. "
                        "Rename the sample."
                    )
                self._where[prefix + key] = (source, key)
        self._keys = tuple(sorted(self._where))

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        source, name = self._find(key)
        return source.read(name)

    def nbytes(self, key: str) -> int:
        source, name = self._find(key)
        return source.nbytes(name)

    def place(self, key: str) -> FileRange | None:
        source, name = self._find(key)
        return source.place(name) if isinstance(source, FileSource) else None

    def stamp(self, keys: Sequence[str]) -> str:
        found = [self._find(key) for key in keys]
        return " ".join(
            part.stamp([name for source, name in found if source is part])
            for part in self._parts.values()
            if isinstance(part, StampedSource)
        )

    def describe(self) -> str:
        return " with ".join(source.describe() for source in self._parts.values())

    def _find(self, key: str) -> tuple[Source, str]:
        if key not in self._where:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        return self._where[key]


def find_companions(
    section: DatasetSection,
    setting: str,
    source: Source,
    keys: Sequence[str],
    open_folder: Callable[[str, str], Source],
) -> Companions:
    """Find the control images and mask of every sample, if the dataset has folders for them.

    Raises an error if a file is missing. `source` and `keys` are those of the samples.
    `open_folder(folder, setting)` opens the folder of the control images or masks.
    """
    folders: list[tuple[Role, str, str]] = [
        ("control", "conditioning_data_dir", folder) for folder in section.control_folders
    ]
    if section.mask_data_dir is not None:
        folders.append(("mask", "mask_data_dir", section.mask_data_dir))
    parts: dict[str, Source] = {"": source}
    found: dict[str, list[tuple[Role, str]]] = {key: [] for key in keys}
    for index, (role, name, folder) in enumerate(folders):
        number = f" {index + 1}" if role == "control" and index > 0 else ""
        prefix = f"({role}{number}) "
        parts[prefix] = beside = _opened(open_folder, folder, setting, name)
        for key, match in _by_stem(keys, beside, f"{setting}.{name}", folder).items():
            found[key].append((role, prefix + match))
    if len(parts) == 1:
        return Companions(source)
    return Companions(JoinedSource(parts), {key: tuple(pairs) for key, pairs in found.items()})


def _opened(
    open_folder: Callable[[str, str], Source], folder: str, setting: str, name: str
) -> Source:
    """Open a folder of control images or masks; its setting `name` appears in error messages."""
    try:
        return open_folder(folder, setting)
    except DataError as error:
        text = str(error).replace(f"{setting}.instance_data_dir", f"{setting}.{name}")
        raise DataError(text) from error


def same_aspect(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two (width, height) have the same aspect ratio within ASPECT_TOLERANCE."""
    ratio = one[0] * other[1] / (one[1] * other[0])
    return abs(ratio - 1) <= ASPECT_TOLERANCE


def _by_stem(keys: Sequence[str], beside: Source, name: str, folder: str) -> dict[str, str]:
    stems: dict[str, list[str]] = defaultdict(list)
    for key in beside.keys():  # noqa: SIM118  a source is no mapping
        if PurePosixPath(key).suffix.lower() in EXTENSIONS:
            stems[_stem(key)].append(key)
    missing = [key for key in keys if not stems.get(_stem(key))]
    if missing:
        named = ", ".join(missing[:MAX_LISTED]) + (", ..." if len(missing) > MAX_LISTED else "")
        raise DataError(
            f"{name} is {folder!r}: {len(missing)} of {len(keys)} samples have no file of the same "
            f"name (without suffix) there: {named}. Add these files, or remove the samples."
        )
    twice = [stems[_stem(key)] for key in keys if len(stems[_stem(key)]) > 1]
    if twice:
        raise DataError(
            f"{name} is {folder!r}: {' and '.join(twice[0])} have the same name without suffix. "
            "Keep one of them."
        )
    return {key: stems[_stem(key)][0] for key in keys}


def _stem(key: str) -> str:
    return str(PurePosixPath(key).with_suffix(""))
