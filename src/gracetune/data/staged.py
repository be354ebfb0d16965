"""A source held in host memory: every file is read once, and none is opened again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gracetune.data.codecs import CODECS, WORTHWHILE, choose
from gracetune.data.parallel import default_workers, ordered_map
from gracetune.data.progress import Progress
from gracetune.errors import DataError
from gracetune.events.types import Notice
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.config.schema import InMemorySection
    from gracetune.data.progress import Tell
    from gracetune.data.source import Source

SAMPLED_FILES = 16
"""How many files `auto` tries its codecs on."""


class _Stored(NamedTuple):
    data: bytes
    nbytes: int
    codec: str | None


class _Packing(NamedTuple):
    """How each file is stored: `keep` is the share it must save to stay compressed."""

    codec: str | None
    keep: float
    why: str
    sampled: Mapping[str, bytes]
    """Files that the choice has read already; none is read twice."""


class StagedSource:
    """The staged files. One that could not be read says why again whenever it is asked for."""

    def __init__(
        self, origin: str, stored: Mapping[str, _Stored], unreadable: Mapping[str, str]
    ) -> None:
        self._origin = origin
        self._stored = stored
        self._unreadable = unreadable
        self._keys = tuple(sorted([*stored, *unreadable]))

    @classmethod
    def stage(
        cls,
        source: Source,
        keys: Sequence[str],
        section: InMemorySection,
        tell: Tell,
        setting: str = "datasets",
    ) -> StagedSource:
        """Read `keys` by threads into host memory, never past `memory_limit_gb`."""
        raw_nbytes = sum(_estimate(source, key) for key in keys)
        budget = _Budget(section, raw_nbytes, setting)
        packing = _packing(source, keys, section)
        if packing.codec is None:
            budget.check(raw_nbytes)

        stored: dict[str, _Stored] = {}
        unreadable: dict[str, str] = {}
        progress = Progress("staging", len(keys), tell)
        results = ordered_map(
            lambda key: _read(source, key, packing), keys, section.num_workers or default_workers()
        )
        for key, result in zip(keys, results, strict=True):
            if isinstance(result, _Stored):
                budget.take(result)
                stored[key] = result
            else:
                unreadable[key] = result
            progress.advance()
        tell(Notice(_summary(source, stored, packing)))
        return cls(source.describe(), stored, unreadable)

    @property
    def stored_nbytes(self) -> int:
        """What the files take in memory, compressed as they are."""
        return sum(len(item.data) for item in self._stored.values())

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        item = self._item(key)
        return item.data if item.codec is None else CODECS[item.codec].decompress(item.data)

    def nbytes(self, key: str) -> int:
        return self._item(key).nbytes

    def describe(self) -> str:
        return f"{self._origin}, staged in memory"

    def _item(self, key: str) -> _Stored:
        if key in self._unreadable:
            raise OSError(self._unreadable[key])
        if key not in self._stored:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        return self._stored[key]


class _Budget:
    """Counts stored bytes against the limit; the error foretells what the whole would need."""

    def __init__(self, section: InMemorySection, raw_nbytes: int, setting: str) -> None:
        self._limit_gib = section.memory_limit_gb
        self._raw_total = raw_nbytes
        self._setting = setting
        self._raw = 0
        self._stored = 0

    def take(self, item: _Stored) -> None:
        self._raw += item.nbytes
        self._stored += len(item.data)
        if self._raw:
            self.check(self._stored, max(self._stored, self._stored * self._raw_total // self._raw))

    def check(self, stored: int, need: int | None = None) -> None:
        """`stored` bytes must fit; `need` is what to tell the user where that is only a part."""
        if self._limit_gib is None or stored <= self._limit_gib * GIB:
            return
        need_gib = (stored if need is None else need) / GIB
        raise DataError(
            f"{self._setting}.in_memory.memory_limit_gb is {self._limit_gib:g}; the data set needs "
            f"about {need_gib:.3g} GiB. Raise the limit, set in_memory.compression: zstd where the "
            "files are not compressed already, or read from disk with type: local."
        )


def _estimate(source: Source, key: str) -> int:
    try:
        return source.nbytes(key)
    except OSError:
        return 0  # reading it will say why


def _packing(source: Source, keys: Sequence[str], section: InMemorySection) -> _Packing:
    if section.compression in (None, "none"):
        return _Packing(None, 0.0, "compression is off", {})
    if section.compression != "auto":
        return _Packing(section.compression, 0.0, f"{section.compression} as asked", {})
    sampled: dict[str, bytes] = {}
    for key in keys[:: max(1, len(keys) // SAMPLED_FILES)][:SAMPLED_FILES]:
        try:
            sampled[key] = source.read(key)
        except OSError:
            continue  # recorded when its turn comes
    choice = choose(list(sampled.values()))
    found = ", ".join(f"{name} saves {share:.1%}" for name, share in choice.savings.items())
    chosen = choice.codec or "no compression"
    why = f"auto chose {chosen}: on {len(sampled)} sampled files {found}"
    return _Packing(choice.codec, WORTHWHILE, why, sampled)


def _read(source: Source, key: str, packing: _Packing) -> _Stored | str:
    """The stored file, or the reason why it cannot be read."""
    try:
        data = packing.sampled[key] if key in packing.sampled else source.read(key)
    except OSError as error:
        return error.strerror or str(error)
    if packing.codec is None or not data:
        return _Stored(data, len(data), None)
    packed = CODECS[packing.codec].compress(data)
    if len(packed) < len(data) and len(packed) <= (1 - packing.keep) * len(data):
        return _Stored(packed, len(data), packing.codec)
    return _Stored(data, len(data), None)


def _summary(source: Source, stored: Mapping[str, _Stored], packing: _Packing) -> str:
    raw = sum(item.nbytes for item in stored.values())
    held = sum(len(item.data) for item in stored.values())
    text = f"staged {len(stored)} files of {source.describe()} in {format_bytes(held)}"
    if packing.codec is not None:
        packed = sum(item.codec is not None for item in stored.values())
        text += f" ({packed} compressed, {format_bytes(raw - held)} saved)"
    return f"{text}; {packing.why}"
