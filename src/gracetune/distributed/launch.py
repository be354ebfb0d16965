"""Start one process per GPU, restart all of them if one fails, and stop them together.

`gracetune launch` uses the elastic agent of `torchrun` as a library. Each machine has one agent.
The agents find each other at the address of machine 0 (c10d rendezvous), start their ranks, and
restart all ranks of all machines if one ends with an error; a restarted run resumes from its last
checkpoint. `RankAgent` changes the agent in these points:

- A signal such as Ctrl-C is passed on to the ranks, which save a checkpoint and end. torchrun would
  kill them after 30 seconds, and writing a large checkpoint takes longer.
- Ranks that end because of a mistake in the user's input, or because they were asked to, are not
  restarted.
- A failure is reported in one line.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psutil
import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from gracetune.config.environment import set_for_children, slurm_step
from gracetune.distributed.heartbeat import address_towards
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.run_control import STOP_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType
    from typing import TextIO

USER_ERROR, INTERRUPTED = 2, 130
"""Exit codes of ranks that a restart would not help."""
DEFAULT_PORT = 29500
JOIN_TIMEOUT_S = 900
"""Seconds that the machines wait for each other, at the start and after a failure."""
STUCK_S = 10.0
"""Seconds after the end of all ranks of this machine in which the agent must react."""
IDLE_S = 2.0
"""The same after a signal, if there are no ranks to watch."""
KILL_AFTER_S = 5.0
"""Seconds from a second Ctrl-C until ranks that have not ended are killed."""


# Which processes to start


@dataclass(frozen=True, slots=True)
class Options:
    """The command-line options of `gracetune launch`; None for one that is not given."""

    gpus: int | None = None
    processes: int | None = None
    nodes: int | None = None
    node_rank: int | None = None
    master: str | None = None
    max_restarts: int = 3


@dataclass(frozen=True, slots=True)
class LaunchLayout:
    """The processes to start on this machine, and the machines that take part."""

    processes: int
    uses_gpus: bool
    nodes: int = 1
    node_rank: int = 0
    host: str = ""
    """Name or address of machine 0; empty for a single machine."""
    port: int = 0
    max_restarts: int = 3

    def describe(self) -> str:
        """Return the line that is printed before the processes start."""
        kind = "on GPUs" if self.uses_gpus else "on the CPU"
        count = f"{self.processes} {'process' if self.processes == 1 else 'processes'} {kind}"
        if self.nodes == 1:
            return f"launch     {count}"
        return (
            f"launch     {count}, machine {self.node_rank} of 0 to {self.nodes - 1}; the machines "
            f"meet at {self.host}:{self.port}"
        )


def count_gpus() -> int:
    """Return the number of GPUs that processes of this machine may use."""
    return torch.cuda.device_count()


def resolve_layout(options: Options, env: Mapping[str, str], num_gpus: int) -> LaunchLayout:
    """Decide which processes to start; raise for options that contradict each other."""
    if "RANK" in env:
        raise ConfigError(
            f"RANK is {env['RANK']}: this process was started as a rank by torchrun, accelerate or "
            "another launcher. `gracetune launch` starts the ranks itself; under a launcher, run "
            "`gracetune train`. If there is no launcher, unset RANK."
        )
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts is {options.max_restarts}; it must be 0 or more.")
    nodes, node_rank, host, port = _machines(options, env)
    return LaunchLayout(
        processes=_processes(options, num_gpus),
        uses_gpus=num_gpus > 0,
        nodes=nodes,
        node_rank=node_rank,
        host=host,
        port=port,
        max_restarts=options.max_restarts,
    )


def _processes(options: Options, num_gpus: int) -> int:
    for name, value in (("--gpus", options.gpus), ("--processes", options.processes)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more.")
    if options.gpus is not None and options.gpus > num_gpus:
        has = f"{num_gpus} GPUs" if num_gpus else "no GPU"
        raise ConfigError(
            f"--gpus is {options.gpus}, but this machine has {has}. Lower it; on a machine without "
            "GPU, use --processes N."
        )
    found = options.gpus or options.processes or num_gpus
    if not found:
        raise ConfigError(
            "this machine has no GPU, so the number of processes is unknown. Add --processes N to "
            "train on the CPU."
        )
    return found


def _machines(options: Options, env: Mapping[str, str]) -> tuple[int, int, str, int]:
    """Return the number of machines, that of this one, and host and port of machine 0."""
    step = slurm_step(env)
    if options.nodes is None and step is not None and step.num_tasks > 1:
        if step.num_tasks != step.num_nodes:
            raise ConfigError(
                f"srun started {step.num_tasks} tasks on {step.num_nodes} nodes, but each "
                "`gracetune launch` starts the processes of a whole node. Use srun "
                "--ntasks-per-node=1, or start one task per GPU with `srun python -m gracetune "
                "train RUN`."
            )
        if options.node_rank is not None or options.master is not None:
            raise ConfigError(
                "--node-rank and --master come from Slurm here. Remove them, or add --nodes."
            )
        return step.num_nodes, step.node, step.first_host, step.port
    nodes = 1 if options.nodes is None else options.nodes
    if nodes < 1:
        raise ConfigError(f"--nodes is {nodes}; it must be 1 or more.")
    if nodes == 1:
        if options.node_rank or options.master is not None:
            raise ConfigError(
                "--node-rank and --master are for several machines, but --nodes is 1. Set --nodes "
                "to the number of machines, or remove them."
            )
        return 1, 0, "", 0
    if options.node_rank is None or options.master is None:
        raise ConfigError(
            f"--nodes is {nodes}, but --node-rank or --master is missing. On machine 0, whose "
            f"address is HOST: gracetune launch RUN --nodes {nodes} --node-rank 0 --master "
            f"HOST:{DEFAULT_PORT}; on the others the same with their own --node-rank."
        )
    if not 0 <= options.node_rank < nodes:
        raise ConfigError(
            f"--node-rank is {options.node_rank}; with --nodes {nodes} it must be 0 to {nodes - 1}."
        )
    return nodes, options.node_rank, *_parse_master(options.master)


def _parse_master(text: str) -> tuple[str, int]:
    """Split `HOST:PORT` or `HOST`; an IPv6 address is in square brackets."""
    host, port = text, str(DEFAULT_PORT)
    if text.count(":") == 1 or "]:" in text:
        host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--master is {text!r}; write HOST:PORT, such as 10.0.0.1:{DEFAULT_PORT}."
        )
    return host, int(port)


# Starting and watching them


@dataclass(frozen=True, slots=True)
class Command:
    """The command of each rank, and where its run writes."""

    first: Sequence[str]
    restarted: Sequence[str]
    """The command once the run has begun to write to its folder: it continues from there, even if
    the first command names another checkpoint."""
    output_dir: Path


def launch_ranks(layout: LaunchLayout, command: Command, stream: TextIO) -> int:
    """Run a command on all ranks of this machine, and return the exit code of the run.

    Messages about failures go to `stream`.
    """
    _set_environment(layout)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # RankAgent reports failures itself
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="gracetune-launch-") as logs:
        try:
            spec = WorkerSpec(
                role="rank",
                local_world_size=layout.processes,
                rdzv_handler=get_rendezvous_handler(_rendezvous(layout)),
                entrypoint=command.first[0],
                args=_escape(command.first[1:]),
                max_restarts=layout.max_restarts,
                monitor_interval=0.2,
                local_addr=_local_address(layout),
            )
            agent = RankAgent(spec, DefaultLogsSpecs(log_dir=logs), command, stream)
            return _run_agent(agent, layout, stream)
        except RendezvousError as error:
            raise _rendezvous_failure(layout, error) from error


def _run_agent(agent: RankAgent, layout: LaunchLayout, stream: TextIO) -> int:
    """Run the agent in a thread, and return the exit code of the run.

    The main thread handles signals. The agent cannot: it waits without a timeout for an answer of
    machine 0, even if that machine is lost.
    """
    thread = AgentThread(agent)
    with agent.handling_signals():
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            agent.kill_late_ranks()
            code = agent.exit_code_if_stuck()
            if code is not None:
                if code != INTERRUPTED:
                    text = f"machine 0 ({layout.host}:{layout.port}) cannot be reached. When it can"
                    text += ", start the same command again on all machines to resume."
                    print(
                        f"gracetune: the ranks of this machine have ended, and {text}", file=stream
                    )
                return code
    if isinstance(thread.outcome, SignalException) or (
        # The agent of machine 0 may end first, and the others then find no store.
        isinstance(thread.outcome, Exception) and agent.is_interrupted()
    ):
        return INTERRUPTED
    if isinstance(thread.outcome, Exception):
        raise thread.outcome
    is_done = thread.outcome is not None and not thread.outcome.is_failed()
    return 0 if is_done else agent.exit_code or 1


class AgentThread(threading.Thread):
    """A thread that runs an agent; `outcome` is its result or its error.

    The result is None if another machine has ended the run.
    """

    def __init__(self, agent: RankAgent) -> None:
        super().__init__(name="gracetune-agent", daemon=True)
        self.outcome: RunResult | Exception | None = None
        self._agent = agent

    def run(self) -> None:
        """Run the agent to its end."""
        try:
            self.outcome = self._agent.run()
        except Exception as error:  # noqa: BLE001  the main thread raises it
            self.outcome = error
        finally:  # so that other machines do not wait for this one
            self._agent.rendezvous.shutdown()


def _escape(words: Sequence[str]) -> tuple[str, ...]:
    """Escape words for torch's agent, which replaces `${local_rank}` and `$$` in arguments."""
    return tuple(word.replace("$", "$$") for word in words)


def _set_environment(layout: LaunchLayout) -> None:
    """Set variables for the ranks that the user has not set."""
    values: dict[str, str] = {}
    if layout.processes > 1:
        cores = len(os.sched_getaffinity(0))
        values["OMP_NUM_THREADS"] = str(max(1, cores // layout.processes))
    if layout.nodes > 1:
        # gloo would look up this machine's own name, which often has only a loopback address.
        interface = _interface(address_towards(layout.host))
        if interface:
            values["GLOO_SOCKET_IFNAME"] = interface
    set_for_children(values)


def _interface(address: str) -> str:
    """Return the name of the network interface with an address, or an empty string."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in {each.address.partition("%")[0] for each in addresses}:
            return name
    return ""


def _local_address(layout: LaunchLayout) -> str:
    """Return the address under which ranks on other machines reach this one."""
    if layout.nodes == 1:
        return "127.0.0.1"
    return layout.host if layout.node_rank == 0 else address_towards(layout.host)


def _rendezvous(layout: LaunchLayout) -> RendezvousParameters:
    is_single = layout.nodes == 1
    host = f"[{layout.host}]" if ":" in layout.host else layout.host
    return RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0" if is_single else f"{host}:{layout.port}",
        run_id=uuid4().hex if is_single else "gracetune",
        min_nodes=layout.nodes,
        max_nodes=layout.nodes,
        local_addr=_local_address(layout),
        is_host=layout.node_rank == 0,
        join_timeout=JOIN_TIMEOUT_S,
    )


def _rendezvous_failure(layout: LaunchLayout, error: RendezvousError) -> RunFailedError:
    """Return the error for machines that did not find each other."""
    where = f"{layout.host}:{layout.port}"
    if isinstance(error, RendezvousClosedError):
        return RunFailedError("the run was ended on another machine; see the output there.")
    if isinstance(error, RendezvousTimeoutError):
        return RunFailedError(
            f"not all of the {layout.nodes} machines came to {where} within {JOIN_TIMEOUT_S} s. "
            "Start the same command on each of them, with its own --node-rank."
        )
    if isinstance(error, RendezvousConnectionError) and layout.nodes > 1:
        return RunFailedError(
            f"machine {layout.node_rank} cannot connect to {where}. Check that the command runs on "
            "machine 0 (--node-rank 0), that --master is its address, and that no firewall blocks "
            "the port. If the run had started, machine 0 has ended it or is lost: start the same "
            "command again on all machines to resume."
        )
    return RunFailedError(f"the processes cannot find each other: {error}")


class RankAgent(LocalElasticAgent):
    """torch's agent, with the changes that the docstring of this module lists."""

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, command: Command, stream: TextIO
    ) -> None:
        super().__init__(spec, logs)
        self.rendezvous = spec.rdzv_handler
        self.exit_code = 0
        """The exit code of the rank that failed first; 128 + N if signal N killed it."""
        self._stream = stream
        self._is_stopping = False
        self._num_interrupts = 0
        self._kill_at = float("inf")
        self._is_watching = False
        """True from the start of the ranks until one of them has failed or all have ended."""
        self._seen_at = time.monotonic()
        """Time of the last look at the ranks or, when they are stopped, of the last living one."""
        self._command = command
        self._records = [command.output_dir / name for name in ("run.json", "run.resolved.json")]
        self._records_before = _identify(self._records)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Pass signals on to the ranks. Signals that are ignored stay so (`nohup`)."""
        previous = {}
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, self._handle_signal)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        self._is_stopping = True
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:  # the ranks end at once, unless they hang
            self._kill_at = min(self._kill_at, time.monotonic() + KILL_AFTER_S)
        for pid in self._living_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_late_ranks(self) -> None:
        """Kill ranks that have not ended some time after a second Ctrl-C."""
        if time.monotonic() > self._kill_at:
            for pid in self._living_pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def exit_code_if_stuck(self) -> int | None:
        """Return the exit code of the run if the ranks have ended and the agent does not react."""
        living, now = self._living_pids(), time.monotonic()
        if living or not (self._is_watching or self._is_stopping):
            self._seen_at = now
        is_idle = self._is_stopping and not self._is_watching  # waiting for other machines
        if now - self._seen_at < (IDLE_S if is_idle else STUCK_S):
            return None
        if self.is_interrupted():
            return INTERRUPTED
        return _shell_code(min((code for code in self._exit_codes().values() if code), default=0))

    def is_interrupted(self) -> bool:
        """Return True if the ranks were asked to stop."""
        codes = {code for code in self._exit_codes().values() if code}
        return self._is_stopping or codes == {INTERRUPTED}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._is_stopping:
            raise SignalException("interrupted", signal.SIGINT)
        if _identify(self._records) != self._records_before:
            worker_group.spec.args = _escape(self._command.restarted[1:])
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._seen_at, self._is_watching = time.monotonic(), True
        if self._is_stopping:  # the signal came while the ranks were being started
            self._handle_signal(signal.SIGTERM, None)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._exit_codes()
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if self._is_stopping or INTERRUPTED in ended.values():
            # The ranks stop together. One that still saves a checkpoint must not be disturbed.
            self._is_stopping = True
            self._remaining_restarts = 0
            if len(ended) < len(codes):
                return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        self._seen_at = time.monotonic()
        self._is_watching = result.state == WorkerState.HEALTHY
        if result.is_failed():
            self._report(result, worker_group, ended)
        return result

    def _report(
        self, result: RunResult, worker_group: WorkerGroup, ended: Mapping[int, int]
    ) -> None:
        """Remember the exit code of the rank that failed first, and print what happens next."""
        failures = result.failures
        first = min(failures, key=lambda rank: failures[rank].timestamp)
        for worker in worker_group.workers:  # those that had failed before the others were ended
            if ended.get(worker.local_rank):
                first = worker.global_rank
                break
        codes = {failure.exitcode for failure in failures.values()}
        code = failures[first].exitcode
        self.exit_code = _shell_code(code)
        # The agent interrupts the other ranks when one has failed, so all must be interrupted.
        is_interrupted = self._is_stopping or codes == {INTERRUPTED}
        if is_interrupted or USER_ERROR in codes:
            self._remaining_restarts = 0
            self.exit_code = INTERRUPTED if is_interrupted else USER_ERROR
            return
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        spec = worker_group.spec
        number = spec.max_restarts - self._remaining_restarts + 1
        then = "All ranks start again from the last checkpoint "
        then += f"(restart {number} of {spec.max_restarts})."
        if not self._remaining_restarts:
            then = f"--max-restarts is {spec.max_restarts}, so the run ends. "
            then += "Start the same command again to resume."
        print(
            f"gracetune: rank {first} (process {failures[first].pid}) {how}. {then}",
            file=self._stream,
            flush=True,
        )

    def _exit_codes(self) -> dict[int, int | None]:
        """Return the exit code of each local rank without reaping it; None while it runs."""
        pids = {} if self._pcontext is None else self._pcontext.pids()
        return {rank: _exit_code(pid) for rank, pid in pids.items()}

    def _living_pids(self) -> list[int]:
        pids = {} if self._pcontext is None else self._pcontext.pids()
        return [pid for pid in pids.values() if _exit_code(pid) is None]


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child, or the negative number of the signal that killed it.

    Returns None while it runs, and 0 for one that was reaped: torch reaps a rank that failed only
    when it ends all others.
    """
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _shell_code(code: int) -> int:
    """Return an exit code as a shell does: 128 + N for a process that signal N killed."""
    return code if code >= 0 else 128 - code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _identify(files: Sequence[Path]) -> list[tuple[int, int] | None]:
    """Return a value for each file that changes when it is replaced; None if it does not exist."""
    found: list[tuple[int, int] | None] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_mtime_ns))
    return found
