"""A source held in host memory: every file is read once, and none is opened again.

All bytes lie in one arena that the processes of a machine share; how they get there is `staging`'s.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

from blake3 import blake3

from gracetune.data.budget import host_room
from gracetune.data.codecs import CODECS
from gracetune.data.index import Index
from gracetune.data.parallel import default_workers
from gracetune.data.staging import CODEC_NAMES, UNREADABLE, fill_arena, sizes_of
from gracetune.events.types import Notice
from gracetune.memory.arena import Arena
from gracetune.memory.rendezvous import share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gracetune.config.schema import InMemorySection
    from gracetune.data.progress import Tell
    from gracetune.data.source import Source
    from gracetune.memory.arena import Ticket


class StagedSource:
    """The staged files. One that could not be read says why again whenever it is asked for."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._index = Index(arena)
        self._origin = str(self._index.facts["origin"])
        self._unreadable = cast("Mapping[str, str]", self._index.facts["unreadable"])

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
    ) -> StagedSource:
        """Read `keys` by threads into host memory, never past `memory_limit_gb` or the host's room.

        Processes of one machine that name the same folder in `meet_in` end up with one copy: the
        first stages, the others wait and map what it made.
        """
        keys = sorted(set(keys))
        sizes = sizes_of(source, keys, section.num_workers or default_workers())

        def make() -> Arena:
            return fill_arena(source, keys, sizes, section, tell, setting, room)

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
        return self._index.totals()[0]

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

    def view(self, key: str) -> memoryview:
        """The bytes in place, without a copy, where they are stored as they are."""
        in_place = self._index.view(key)
        return memoryview(self._data(key)) if in_place is None else in_place

    def nbytes(self, key: str) -> int:
        return self._find(key)[2]

    def describe(self) -> str:
        return f"{self._origin}, staged in memory"

    def _data(self, key: str) -> bytes | memoryview:
        at, stored_nbytes, _, codec = self._find(key)
        stored = self._arena.view(at, stored_nbytes)
        name = CODEC_NAMES[codec]
        return stored if name is None else CODECS[name].decompress(stored)

    def _find(self, key: str) -> tuple[int, int, int, int]:
        row = self._index.find(key)
        if row is None:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        if row[3] == UNREADABLE:
            raise OSError(self._unreadable[key])
        return row


def _identity(
    source: Source, keys: Sequence[str], sizes: Sequence[int], section: InMemorySection
) -> str:
    """What must be the same for two processes to share: where from, which files, how stored."""
    digest = blake3()
    for part in (source.describe(), section.compression, list(keys), list(sizes)):
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest(length=16)
