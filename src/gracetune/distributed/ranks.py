"""The ranks of a run, and a way for them to exchange small Python values.

Each process of a run is a rank. `RankGroup` gathers and broadcasts values over gloo on the CPU,
beside the group that reduces gradients (NCCL on GPUs). It never waits for the GPU, so ranks can
agree on something in every step while their GPUs still compute.

All methods that exchange values are collective: every rank of the group must call them in the same
order, or the ranks wait for each other until `distributed.timeout_s`.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

from gracetune.config.environment import process_environment
from gracetune.errors import RunFailedError
from gracetune.memory.shared_memory import pid_namespace_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

T = TypeVar("T")


class RankGroup:
    """The ranks of a run, on one machine or several."""

    def __init__(
        self,
        rank: int = 0,
        machines: Sequence[str] = ("",),
        hosts: Sequence[str] = ("localhost",),
        control: dist.ProcessGroup | None = None,
        local: dist.ProcessGroup | None = None,
    ) -> None:
        """Describe the ranks; use `connect_ranks` or `SINGLE` instead of calling this.

        `machines` and `hosts` have the machine id and the host name of each rank. `control` is the
        gloo group of all ranks, `local` that of the ranks of this machine; both are None for a
        single process.
        """
        self.rank = rank
        self.world_size = len(machines)
        self.hosts = list(hosts)
        """Host name of each rank."""
        self.local_ranks = [r for r, machine in enumerate(machines) if machine == machines[rank]]
        """The ranks on this machine, in order."""
        self.num_machines = len(set(machines))
        self._control = control
        self._local = local

    @property
    def local_rank(self) -> int:
        """Position of this rank among those of its machine."""
        return self.local_ranks.index(self.rank)

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this machine."""
        return len(self.local_ranks)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes logs and checkpoints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of the ranks."""
        return _gather(value, self._control)

    def gather_local(self, value: T) -> list[T]:
        """Return the values of the ranks of this machine, in the order of the ranks."""
        return _gather(value, self._local)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        if self._control is None:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self._control)
        found: T = values[0]
        return found

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, whether it is true on any rank.

        This is cheaper than `gather` and suitable for every step, also with many ranks.
        """
        if self._control is None:
            return flags
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        return tuple(map(bool, found.tolist()))

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        self.any(False)

    def name(self, rank: int) -> str:
        """Return a rank's number and host name, for messages."""
        return f"rank {rank} on {self.hosts[rank]}"


SINGLE = RankGroup()
"""The group of a run with one process, which exchanges nothing."""


def connect_ranks(timeout_s: float, proc: Path = Path("/proc")) -> RankGroup:
    """Return the group of all ranks; call this once on every rank after `init_process_group`.

    Ranks are on one machine if they can map each other's memory: if they have the same boot id,
    process ids and network.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SINGLE
    timeout = timedelta(seconds=timeout_s)
    control = dist.new_group(backend="gloo", timeout=timeout)
    rank = dist.get_rank()
    found = _gather((machine_id(proc), socket.gethostname()), control)
    machines, hosts = zip(*found, strict=True)
    local = None
    for machine in dict.fromkeys(machines):  # every rank must take part in creating every group
        ranks = [r for r, other in enumerate(machines) if other == machine]
        group = dist.new_group(ranks, backend="gloo", timeout=timeout)
        if rank in ranks and len(ranks) > 1:
            local = group
    return RankGroup(rank, machines, hosts, control, local)


def machine_id(proc: Path) -> str:
    """Return an id that processes have in common if they can map each other's memory.

    Containers on one computer count as machines of their own.
    """
    return f"{pid_namespace_id(proc)}-{(proc / 'self/ns/net').stat().st_ino}"


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


# Finding each other after a restart

_SCHEME = "gracetune"


def rendezvous_method(env: Mapping[str, str]) -> str:
    """Return the `init_method` for `init_process_group`: normally `env://`.

    torchrun with a c10d rendezvous, and `gracetune launch`, host one store for all starts of the
    ranks. Ranks that were restarted would find the addresses of dead processes in it, and fail to
    connect. `gracetune://` gives every start an area of its own in that store.
    """
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "env://"
    with suppress(RuntimeError):  # an earlier run in this process has registered it
        register_rendezvous_handler(_SCHEME, _rendezvous)  # type: ignore[no-untyped-call]
    return f"{_SCHEME}://"


def _rendezvous(
    _url: str, timeout: timedelta = timedelta(minutes=30), **_: object
) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, the rank and the number of ranks, as `init_process_group` expects."""
    env = process_environment()
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    shared = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timeout)
    token = agree_on_token(shared, rank, world_size, timeout)
    yield PrefixStore(token, shared), rank, world_size
    raise RuntimeError("ranks cannot meet a second time without a restart")


def agree_on_token(
    store: Store, rank: int, world_size: int, timeout: timedelta, poll_s: float = 0.05
) -> str:
    """Return a new token that the ranks of this start have in common, but no earlier start.

    Every rank announces itself with a new number, so that rank 0 does not answer a process of an
    earlier start. Rank 0 answers each announcement with its token until all ranks have joined.
    """
    own = uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", own)
        token = store.get(f"answer/{own}").decode()
        store.set(f"joined/{token}/{rank}", "")
        return token
    deadline = time.monotonic() + timeout.total_seconds()
    answered = set()
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"joined/{own}/{other}"]):
                missing.discard(other)
            elif store.check([f"hello/{other}"]):
                number = store.get(f"hello/{other}").decode()
                if number not in answered:
                    store.set(f"answer/{number}", own)
                    answered.add(number)
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise RunFailedError(
                f"ranks {names} of {world_size} did not start within distributed.timeout_s "
                f"({timeout.total_seconds():g} s). See the output of their machines."
            )
        if missing:
            time.sleep(poll_s)
    return own
