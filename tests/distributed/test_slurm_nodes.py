"""The shipped Slurm script on a real cluster: two network namespaces, each with a slurmd.

It needs root and Debian's packages slurmctld, slurmd, slurm-client, munge and iproute2.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from gracetune.events.log import loss_by_step

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/slurm/train.sbatch"
COMMANDS = ("ip", "nsenter", "unshare", "munged", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("gtnode0", "gtnode1")
ADDRESSES = ("10.213.9.1", "10.213.9.2")
ENDLESS = 1_000_000
"""Number of steps of a run that does not reach its end."""
CONFIG = f"""\
ClusterName=gracetune
SlurmctldHost={NODES[0]}({ADDRESSES[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={{folder}}/munge.socket
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/spool-%n
SlurmctldPidFile={{folder}}/slurmctld.pid
SlurmdPidFile={{folder}}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# The nodes have the resources that the script asks for, whatever this machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={NODES[0]} NodeAddr={ADDRESSES[0]} CPUs=64 RealMemory=1000 Gres=gpu:4
NodeName={NODES[1]} NodeAddr={ADDRESSES[1]} CPUs=64 RealMemory=1000 Gres=gpu:4
PartitionName=normal Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """Slurm's daemons on two nodes; `call` runs a command on the first."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        hosts = [f"{address} {node}" for address, node in zip(ADDRESSES, NODES, strict=True)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
        for number in range(4):
            (folder / f"gpu{number}").touch()
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(1024))

    def enter(self, node, *words):
        """Return a command line that runs on a node, with its network and its host name."""
        setup = f'mount --bind {self.folder}/hosts /etc/hosts; hostname {node}; exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/{node}", "unshare", "--uts", "--mount"),
            *("sh", "-ec", setup, "sh", *map(str, words)),
        ]

    def call(self, *words, cwd=None, **environment):
        done = subprocess.run(
            self.enter(NODES[0], *words),
            capture_output=True,
            text=True,
            timeout=120,
            cwd=cwd,
            env=self.environment | environment,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr, self.logs())
        return done.stdout

    @contextmanager
    def daemon(self, name, words):
        """Start a daemon in the foreground; end it on exit."""
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=self.environment)
        try:
            yield
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()

    def logs(self):
        return {log.name: log.read_text()[-2000:] for log in self.folder.glob("*.log")}

    def job(self, number):
        """Return the fields of a job."""
        text = self.call("scontrol", "show", "job", number, "-o")
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def submit(self, run_folder, *words, options=()):
        """Submit the shipped script; its ranks record the node and the network they run in."""
        recorder = run_folder / "record-node.sh"
        recorder.write_text(
            "#!/bin/sh\n"
            f'echo "$(hostname) $(readlink /proc/self/ns/net)" >> {run_folder}/nodes\n'
            f'exec {sys.executable} -m gracetune "$@"\n'
        )
        recorder.chmod(0o755)
        out = self.call(
            *("sbatch", "--parsable", *options, SCRIPT, "run.json", "--processes", 1, *words),
            cwd=run_folder,
            GRACETUNE=str(recorder),
        )
        return out.strip()

    def wait_for(self, number, states):
        return wait_until(lambda: self.job(number)["JobState"] in states, self.logs)


def wait_until(check, describe):
    deadline = time.monotonic() + 600
    while not check():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.3)


@contextmanager
def network(stack_name="gtn"):
    """Make a network namespace for each node, with a link between them; remove them at the end."""

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)

    made = ip("netns", "add", NODES[0])
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", NODES[1])
        links = [f"{stack_name}{number}" for number in range(2)]
        ends = ("netns", NODES[0], "type", "veth", "peer", links[1], "netns", NODES[1])
        ip("link", "add", links[0], *ends)
        for node, link, address in zip(NODES, links, ADDRESSES, strict=True):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", link)
            for device in ("lo", link):
                up = ip("-n", node, "link", "set", device, "up")
                assert up.returncode == 0, up.stderr
        yield
    finally:
        for node in NODES:
            ip("netns", "del", node)


@pytest.fixture(scope="module")
def cluster():
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        needs = f" and {', '.join(missing)}" if missing else ""
        pytest.skip(f"a Slurm cluster of network namespaces needs root{needs}")
    with ExitStack() as stack:
        # A short path: the address of munge's socket has at most 107 characters.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gtslurm-")))
        folder.chmod(0o755)
        stack.enter_context(network())
        cluster = Cluster(folder)
        munge = {
            "--key-file": "munge.key",
            "--socket": "munge.socket",
            "--pid-file": "munge.pid",
            "--seed-file": "munge.seed",
        }
        words = [word for option, name in munge.items() for word in (option, str(folder / name))]
        stack.callback(kill_job_processes, cluster)
        stack.enter_context(
            cluster.daemon("munged", ["munged", "--foreground", "--force", "--syslog", *words])
        )
        wait_until((folder / "munge.socket").exists, cluster.logs)
        for name, node in (("slurmctld", NODES[0]), *(("slurmd", node) for node in NODES)):
            stack.enter_context(cluster.daemon(f"{name}-{node}", cluster.enter(node, name, "-D")))
        wait_until(lambda: is_idle(cluster), cluster.logs)
        yield cluster
        cluster.call("scancel", "--user=root")
        wait_until(lambda: not cluster.call("squeue", "--noheader").strip(), cluster.logs)


def is_idle(cluster):
    words = ("sinfo", "--noheader", "--partition=normal", "--format=%D %T")
    done = subprocess.run(
        cluster.enter(NODES[0], *words), capture_output=True, text=True, env=cluster.environment
    )
    return done.stdout.strip() == "2 idle"


def kill_job_processes(cluster):
    """Kill what a failed test has left of its jobs: processes with this cluster's settings."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == cluster.environment["SLURM_CONF"]:
                process.send_signal(signal.SIGKILL)


@pytest.fixture
def run_folder(tmp_path, tiny_run_in):
    """Return a folder with a small run file; `change_steps` sets its number of steps."""
    run = tiny_run_in(
        tmp_path, train={"batch_size": 2, "max_train_steps": ENDLESS}, logging={"every": 5}
    )
    (tmp_path / "run.json").write_text(json.dumps(run.model_dump(mode="json", exclude_unset=True)))
    return tmp_path


def change_steps(run_folder, steps):
    file = run_folder / "run.json"
    run = json.loads(file.read_text())
    run["train"]["max_train_steps"] = steps
    file.write_text(json.dumps(run))


def output(run_folder, number):
    file = run_folder / f"gracetune-{number}.log"
    return file.read_text() if file.exists() else ""


def events(run_folder, kind):
    lines = (run_folder / "run/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def last_step(run_folder):
    log = run_folder / "run/events.jsonl"
    return max(loss_by_step(log), default=0) if log.exists() else 0


@pytest.mark.parametrize("strategy", ["replicate", "fsdp2"])
def test_the_script_trains_on_two_nodes(cluster, run_folder, strategy):
    change_steps(run_folder, 6)
    number = cluster.submit(run_folder, "--set", f"distributed.strategy={strategy}")
    cluster.wait_for(number, ("COMPLETED", "FAILED"))
    text = output(run_folder, number)
    job = cluster.job(number)
    assert (job["JobState"], job["ExitCode"], job["NumNodes"]) == ("COMPLETED", "0:0", "2"), text
    for machine in range(2):
        assert f"machine {machine} of 0 to 1; the machines meet at {NODES[0]}:" in text
    names, networks = zip(
        *(line.split() for line in (run_folder / "nodes").read_text().splitlines()), strict=True
    )
    assert sorted(names) == list(NODES)
    assert len(set(networks)) == 2
    assert {step["samples"] for step in events(run_folder, "step_done")} == {4}  # 2 of each rank
    assert "done       6 steps" in text
    assert ("FSDP2: weights in 2 shards" in text) == (strategy == "fsdp2")


def test_a_run_near_its_time_limit_saves_and_its_second_start_resumes(cluster, run_folder):
    # The signal comes after about two minutes: Slurm looks at the limits every half minute.
    options = ["--time=3", "--signal=B:USR1@60"]
    number = cluster.submit(run_folder, "--set", "distributed.strategy=fsdp2", options=options)
    finish_after_requeue(cluster, run_folder, number, "the time limit is near")


def test_a_preempted_run_saves_and_its_second_start_resumes(cluster, run_folder):
    number = cluster.submit(run_folder)
    wait_until(
        lambda: last_step(run_folder) > 10, lambda: (output(run_folder, number), cluster.logs())
    )
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--parsable")
    other = cluster.call("sbatch", *urgent, "--wrap", "true", cwd=run_folder).strip()
    cluster.wait_for(other, ("COMPLETED",))
    finish_after_requeue(cluster, run_folder, number, "SIGTERM: finishing the step")


def finish_after_requeue(cluster, run_folder, number, reason):
    """Wait until a job is submitted again, let it end soon after, and check that it has resumed."""
    cluster.wait_for(number, ("PENDING",))
    wait_until(lambda: cluster.job(number)["Restarts"] == "1", cluster.logs)
    text = output(run_folder, number)
    assert reason in text
    assert "submitted again, to resume" in text
    saved = events(run_folder, "checkpoint_saved")[-1]["step"]
    assert saved > 0
    # Both launchers report the same end, and neither complains about the other.
    for node in NODES:
        assert re.search(rf"{node}: task \d: Exited with exit code 130", text), text
    assert "gracetune: machine" not in text
    assert "frame #" not in text

    change_steps(run_folder, saved + 5)
    cluster.call("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    # Slurm starts a requeued job after two minutes.
    cluster.wait_for(number, ("COMPLETED", "FAILED"))
    assert cluster.job(number)["JobState"] == "COMPLETED", output(run_folder, number)
    assert "start 2, on" in output(run_folder, number)  # the log is continued
    starts = [event["start_step"] for event in events(run_folder, "run_started")]
    assert starts == [0, saved]
    log = run_folder / "run/events.jsonl"
    assert set(loss_by_step(log)) == set(range(1, saved + 6))
