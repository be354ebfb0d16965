"""Options of `gracetune launch`, and an agent that starts, restarts and stops real processes."""

import io
import os
import signal
import socket
import threading
import time

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from gracetune.distributed import launch
from gracetune.distributed.launch import (
    Command,
    LaunchLayout,
    Options,
    launch_ranks,
    resolve_layout,
)
from gracetune.errors import ConfigError

SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "gh[003-006]",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


def test_by_default_every_gpu_of_the_machine_is_used():
    assert resolve_layout(Options(), {}, 4) == LaunchLayout(4, uses_gpus=True)
    assert resolve_layout(Options(gpus=2), {}, 4).processes == 2
    assert resolve_layout(Options(processes=3), {}, 0) == LaunchLayout(3, uses_gpus=False)


def test_several_machines_meet_at_machine_0():
    options = Options(nodes=2, node_rank=1, master="[fd00::1]:4711", max_restarts=0)
    layout = resolve_layout(options, {}, 8)
    assert layout == LaunchLayout(8, True, 2, 1, "fd00::1", 4711, 0)
    assert layout.describe() == (
        "launch     8 processes on GPUs, machine 1 of 0 to 1; the machines meet at fd00::1:4711"
    )
    assert resolve_layout(Options(nodes=2, node_rank=0, master="gh1"), {}, 8).port == 29500


def test_srun_with_a_task_per_node_gives_the_machines():
    layout = resolve_layout(Options(), SRUN, 4)
    assert (layout.nodes, layout.node_rank, layout.host) == (4, 2, "gh003")
    assert 20_000 <= layout.port < 30_000


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (Options(), {}, "no GPU, so the number of processes is unknown"),
        (Options(gpus=2), {}, "--gpus is 2, but this machine has no GPU"),
        (Options(processes=0), {}, "--processes is 0; it must be 1 or more"),
        (Options(processes=2, nodes=0), {}, "--nodes is 0"),
        (Options(processes=2, max_restarts=-1), {}, "--max-restarts is -1"),
        (Options(processes=2, master="a:1"), {}, "but --nodes is 1"),
        (Options(processes=2, nodes=2, node_rank=0), {}, "--node-rank or --master is missing"),
        (Options(processes=2, nodes=2, node_rank=2, master="a:1"), {}, "it must be 0 to 1"),
        (Options(processes=2, nodes=2, node_rank=0, master="a:b"), {}, "write HOST:PORT"),
        (Options(processes=2), {"RANK": "1"}, "RANK is 1: this process was started as a rank"),
        (Options(processes=2), SRUN | {"SLURM_STEP_NUM_TASKS": "8"}, "8 tasks on 4 nodes"),
        (Options(processes=2, node_rank=1), SRUN, "come from Slurm"),
    ],
)
def test_options_that_cannot_work_are_refused(options, env, words):
    with pytest.raises(ConfigError, match=words):
        resolve_layout(options, env, 0)


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Return a function that runs a shell script on two ranks: exit code and messages."""
    for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):  # so that they do not stay set
        monkeypatch.setenv(name, os.environ.get(name, "1"))

    def call(script, restarted=None, max_restarts=0, **machines):
        words = [["/bin/sh", "-c", text] for text in (script, restarted or script)]
        stream = io.StringIO()
        layout = LaunchLayout(2, uses_gpus=False, max_restarts=max_restarts, **machines)
        code = launch_ranks(layout, Command(*words, tmp_path), stream)
        return code, stream.getvalue()

    return call


def test_the_exit_code_is_that_of_the_rank_that_failed(run_script):
    assert run_script("exit 0") == (0, "")
    code, text = run_script("[ $RANK = 0 ] && exec sleep 60; exit 3")
    assert code == 3
    assert "rank 1 (process" in text
    assert "ended with exit code 3. --max-restarts is 0, so the run ends." in text


def test_a_killed_rank_restarts_all(run_script, tmp_path):
    script = f"""
        echo $RANK >> {tmp_path}/starts
        [ -e {tmp_path}/run.json ] && exit 1
        [ $RANK = 0 ] && exec sleep 60
        touch {tmp_path}/run.json
        kill -9 $$
    """
    code, text = run_script(script, f"echo again >> {tmp_path}/starts", max_restarts=1)
    assert code == 0
    assert "was killed by SIGKILL. All ranks start again" in text
    assert "(restart 1 of 1)" in text
    # The run had begun to write, so the second start is with the other command.
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1", "again", "again"]


def test_ranks_that_the_agent_interrupts_do_not_prevent_a_restart(run_script, tmp_path):
    script = f"""
        trap 'exit 130' TERM
        touch {tmp_path}/ready-$RANK
        while [ $RANK = 0 ]; do sleep 0.1; done
        while [ ! -e {tmp_path}/ready-0 ]; do sleep 0.1; done
        touch {tmp_path}/run.json
        exit 1
    """
    assert run_script(script, "exit 0", max_restarts=1)[0] == 0


def test_the_exit_code_of_a_killed_rank_is_that_of_a_shell(run_script):
    code, text = run_script("[ $RANK = 1 ] && kill -9 $$; exec sleep 60")
    assert code == 128 + signal.SIGKILL
    assert "so the run ends" in text


def test_a_mistake_of_the_user_is_not_repeated(run_script, tmp_path):
    script = f"echo $RANK >> {tmp_path}/starts; sleep 0.2; exit 2"
    assert run_script(script, max_restarts=3) == (2, "")
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]


def after_start(tmp_path, call):
    """Call a function when both ranks have created their files."""

    def wait():
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        call()

    threading.Thread(target=wait).start()


def test_ranks_that_stop_are_not_disturbed(run_script, tmp_path, monkeypatch):
    """One rank takes long to save its checkpoint when the other has already ended."""
    script = f"""
        trap 'sleep $RANK; touch {tmp_path}/saved-'$RANK'; exit 130' TERM
        touch {tmp_path}/ready-$RANK
        while true; do sleep 0.1; done
    """
    after_start(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_script(script, max_restarts=3) == (130, "")
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_a_second_ctrl_c_kills_ranks_that_hang(run_script, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "KILL_AFTER_S", 0.1)
    script = f"trap '' INT; touch {tmp_path}/ready-$RANK; while true; do sleep 0.1; done"

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    after_start(tmp_path, interrupt)
    assert run_script(script, max_restarts=3) == (130, "")


def test_a_launcher_ends_although_machine_0_does_not_answer(run_script, monkeypatch):
    released = threading.Event()

    def wait_for_answer(_):
        released.wait(20)
        raise RendezvousClosedError

    monkeypatch.setattr(launch, "STUCK_S", 0.3)
    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", wait_for_answer)
    code, text = run_script("sleep 0.5; kill -9 $$", max_restarts=3)
    released.set()
    assert code == 128 + signal.SIGKILL
    assert "the ranks of this machine have ended, and machine 0" in text


def test_a_launcher_that_waits_for_other_machines_can_be_stopped(run_script, monkeypatch):
    monkeypatch.setattr(launch, "IDLE_S", 0.2)
    monkeypatch.setattr(launch, "JOIN_TIMEOUT_S", 3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    assert run_script("exit 0", nodes=2, node_rank=0, host="127.0.0.1", port=port) == (130, "")
    timer.join()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RendezvousClosedError(), "ended on another machine"),
        (RendezvousTimeoutError(), "not all of the 2 machines came to a:1"),
        (RendezvousConnectionError(), "machine 1 cannot connect to a:1"),
        (RendezvousError("odd"), "cannot find each other: odd"),
    ],
)
def test_machines_that_do_not_meet_are_reported(error, words):
    layout = LaunchLayout(1, True, nodes=2, node_rank=1, host="a", port=1)
    assert words in str(launch._rendezvous_failure(layout, error))


def test_a_machine_is_reached_under_the_address_that_leads_to_machine_0(monkeypatch):
    monkeypatch.setattr(launch, "address_towards", {"gh0": "10.0.0.5"}.__getitem__)
    layout = LaunchLayout(1, True, nodes=2, node_rank=1, host="gh0", port=1)
    assert launch._local_address(layout) == "10.0.0.5"
    first = LaunchLayout(1, True, nodes=2, node_rank=0, host="gh0", port=1)
    assert launch._local_address(first) == "gh0"
    assert launch._interface("127.0.0.1") == "lo"
    assert launch._interface("203.0.113.7") == ""
