"""A source held in host memory: every file is read once, and none is opened again.

All bytes lie in one arena that the processes of a machine share; how they get there is `staging`'s.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, cast

from blake3 import blake3

from gracetune.data.budget import host_room
from gracetune.data.codecs import CODECS
from gracetune.data.gather import MissingGather, find_gather
from gracetune.data.index import StagedFile, StagingIndex
from gracetune.data.parallel import default_workers
from gracetune.data.source import StampedSource
from gracetune.data.staging import CODEC_NAMES, UNREADABLE, fill_arena, sizes_of
from gracetune.events.types import Notice
from gracetune.memory.arena import Arena
from gracetune.memory.rendezvous import share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gracetune.config.schema import InMemorySection
    from gracetune.data.gather import Gather
    from gracetune.data.progress import Tell
    from gracetune.data.source import Source
    from gracetune.memory.arena import Ticket


class StagedSource:
    """The staged files. One that could not be read says why again whenever it is asked for."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._index = StagingIndex(arena)
        # Functions, not methods: a source in a ring with itself would hold its memory for longer.
        self._data = partial(_data, arena, self._index)
        self.view = self._index.viewer(partial(_view, self._data))
        """The bytes in place, without a copy, where they are stored as they are."""

    @classmethod
    def stage(
        cls,
        source: Source,
        keys: Sequence[str],
        section: InMemorySection,
        tell: Tell,
        setting: str = "datasets",
        meet_in: Path | None = None,
        room: Callable[[], int] = host_room,
        find: Callable[[], Gather | MissingGather] = find_gather,
    ) -> StagedSource:
        """Read `keys` by threads into host memory, never past `memory_limit_gb` or the host's room.

        Processes of one machine that name the same folder in `meet_in` end up with one copy: the
        first stages, the others wait and map what it made. `find` looks for the compiled helper.
        """
        keys = sorted(set(keys))
        gather = find()
        sizes = sizes_of(source, keys, section.num_workers or default_workers(), gather)

        def make() -> Arena:
            if isinstance(gather, MissingGather):
                tell(
                    Notice(
                        f"files are staged one by one, by Python: {gather.reason}", fallback=True
                    )
                )
            return fill_arena(source, keys, sizes, section, tell, setting, room, gather)

        if meet_in is None:
            return cls(make())
        what = source.describe()
        shared = share(
            meet_in,
            _identity(source, keys, sizes, section),
            make,
            lambda: tell(Notice(f"waiting for another process that is staging {what}")),
        )
        if shared.refused is not None:
            tell(
                Notice(
                    f"another process has {what} in memory, but it cannot be mapped "
                    f"({shared.refused}); this one holds a copy of its own. Run both as one user",
                    level="warning",
                    fallback=True,
                )
            )
        staged = cls(shared.arena)
        if not shared.is_ours:
            tell(Notice(f"sharing {what} with process {shared.made_by}, which staged it"))
        return staged

    @classmethod
    def attach(cls, ticket: Ticket) -> StagedSource:
        """Map what another process of this machine has staged; OSError where it is gone."""
        return cls(Arena.attach(ticket))

    @property
    def ticket(self) -> Ticket:
        """What `attach` needs: plain numbers, for a process that was not forked from this one."""
        return self._arena.ticket

    def __reduce__(self) -> tuple[Callable[[Ticket], StagedSource], tuple[Ticket]]:
        """What a worker process is handed is the ticket: it maps the arena, nothing is copied."""
        return StagedSource.attach, (self.ticket,)

    @property
    def stored_nbytes(self) -> int:
        """What the files take in memory, compressed as they are."""
        return self._index.stored_nbytes

    @property
    def index_nbytes(self) -> int:
        """What it takes to find them."""
        return self._index.nbytes

    @property
    def resident_nbytes(self) -> int:
        """What the machine spends on files and index, however many processes share them."""
        return self._arena.resident_nbytes

    def keys(self) -> Sequence[str]:
        return self._index

    def read(self, key: str) -> bytes:
        data = self._data(key)
        return data if isinstance(data, bytes) else bytes(data)

    def nbytes(self, key: str) -> int:
        return _find(self._index, key).nbytes

    def describe(self) -> str:
        return _describe(self._index)


def _data(arena: Arena, index: StagingIndex, key: str) -> bytes | memoryview:
    row = _find(index, key)
    stored = arena.view(row.at, row.stored_nbytes)
    name = CODEC_NAMES[row.codec]
    return stored if name is None else CODECS[name].decompress(stored)


def _view(data: Callable[[str], bytes | memoryview], key: str) -> memoryview:
    return memoryview(data(key))


def _find(index: StagingIndex, key: str) -> StagedFile:
    row = index.find(key)
    if row is None:
        raise FileNotFoundError(f"{_describe(index)} has no {key!r}")
    if row.codec == UNREADABLE:
        raise OSError(cast("Mapping[str, str]", index.facts["unreadable"])[key])
    return row


def _describe(index: StagingIndex) -> str:
    return f"{index.facts['origin']}, staged in memory"


def _identity(
    source: Source, keys: Sequence[str], sizes: Sequence[int], section: InMemorySection
) -> str:
    """What must be the same for two processes to share: where from, which files, how stored."""
    stamp = source.stamp(keys) if isinstance(source, StampedSource) else ""
    digest = blake3()
    for part in (source.describe(), section.compression, list(keys), list(sizes), stamp):
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest(length=16)
