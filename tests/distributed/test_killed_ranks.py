"""Ranks that are killed at random moments are restarted, and the run continues bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(5400)]

KILLS = int(os.environ.get("GRACETUNE_TEST_KILLS", "100"))
BACK_S = 60.0
"""Seconds in which a run must be back at the step that it had reached."""
PHASES = ("start-up", "encoding", "step", "checkpoint", "validation")


def write_run_file(tiny_run_in, folder):
    """Write a run file with everything that a kill can interrupt, in quick succession."""
    run = tiny_run_in(
        folder,
        adapter={"rank": 4, "dropout": 0.1},
        train={
            "max_train_steps": 100_000,
            "batch_size": 2,
            "checkpoint_every": 5,
            "keep_checkpoints": 2,
            "keep_adapters": 2,
        },
        validation={"every": 10, "sample_steps": 2, "prompts": ["a red star"]},
    )
    file = folder / "run.json"
    file.write_text(json.dumps(run.model_dump(mode="json", exclude_unset=True)))
    return file


class Launched:
    """A run under `gracetune launch`, and its log."""

    def __init__(self, file, processes, *words):
        self.folder = file.parent / "run"
        self.errors = file.parent / "stderr"
        command = [sys.executable, "-m", "gracetune", "launch", file, "--processes", processes]
        with self.errors.open("w") as stream:
            self.process = subprocess.Popen(
                [str(word) for word in (*command, "--max-restarts", 10_000, *words)],
                stdout=subprocess.DEVNULL,
                stderr=stream,
            )
        self._position = 0
        self._rest = b""
        self.steps = []
        """Step and loss of every step in the log, in order; a step may come several times."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def ranks(self):
        """Return the living ranks."""
        living = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                if child.status() != psutil.STATUS_ZOMBIE:
                    living.append(child)
        return living

    def new_events(self):
        """Return the events since the last call."""
        assert self.process.poll() is None, self.text()
        try:
            with (self.folder / "events.jsonl").open("rb") as log:
                log.seek(self._position)
                data = log.read()
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            try:
                events.append(json.loads(line))
            except ValueError:  # torn by a kill
                continue
        self.steps += [(e["step"], e["loss"]) for e in events if e["event"] == "step_done"]
        return events

    def wait(self, is_met, seconds=BACK_S, poll_s=0.001):
        """Wait until `is_met(new events)`; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while not is_met(self.new_events()):
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.text()}"
            time.sleep(poll_s)

    def wait_for_step(self, step, seconds=BACK_S):
        """Wait until a step of at least this number is done from now on."""
        before = len(self.steps)
        self.wait(lambda _: any(done >= step for done, _ in self.steps[before:]), seconds)

    def stop(self):
        """Ask the run to save and stop, and wait for it."""
        self.new_events()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=120) == 130, self.text()

    def text(self):
        """Return the end of what the launcher and the ranks have written to stderr."""
        return self.errors.read_text()[-4000:]


def wait_for_phase(run, phase, rng):
    """Wait until the ranks are in a phase, and then for a random time."""
    if phase == "start-up":
        run.wait(lambda _: len(run.ranks()) > 0)
        time.sleep(rng.uniform(0, 8))
    elif phase == "encoding":
        stages = ("encoding", "reading")
        run.wait(
            lambda events: any(
                e["event"] == "stage_progress" and e["stage"].startswith(stages) for e in events
            )
        )
        time.sleep(rng.uniform(0, 0.3))
    elif phase == "step":
        run.wait(lambda events: any(e["event"] == "step_done" for e in events))
        time.sleep(rng.uniform(0, 0.3))
    elif phase == "checkpoint":
        names = {path.name for path in (run.folder / "checkpoints").glob("*")}
        run.wait(
            lambda _: {path.name for path in (run.folder / "checkpoints").glob("*")} - names,
            poll_s=0,
        )
        time.sleep(rng.uniform(0, 0.1))
    else:
        run.wait(
            lambda events: any(
                e["event"] == "checkpoint_saved" and e["step"] % 10 == 0 for e in events
            )
        )
        time.sleep(rng.uniform(0, 0.2))


def kill(run, rng):
    """Kill one rank, or sometimes all of them."""
    run.wait(lambda _: run.ranks())  # between two starts there is none
    ranks = run.ranks()
    for victim in ranks if rng.random() < 0.2 else rng.sample(ranks, 1):
        with suppress(psutil.NoSuchProcess):
            victim.kill()


def leftovers(file):
    """Return processes that still have the run file on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(file) in (process.info["cmdline"] or []):
            found.append(process.info["cmdline"])
    return found


def shared_memory_segments():
    """Return the names of all segments.

    Semaphores of Python's multiprocessing are left out: a run creates none, but other processes on
    this machine may.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.mark.parametrize(("processes", "kills"), [(2, KILLS), (4, max(1, KILLS // 10))])
def test_a_run_whose_ranks_are_killed_equals_an_unbroken_one(
    tmp_path, tiny_run_in, processes, kills, summary_lines
):
    rng = random.Random(26)
    segments = shared_memory_segments()
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    file = write_run_file(tiny_run_in, tmp_path / "killed")
    longest, hit = 0.0, dict.fromkeys(PHASES, 0)
    with Launched(file, processes) as run:
        for number in range(kills):
            phase = PHASES[number % len(PHASES)]
            if phase == "encoding" and number > len(PHASES):  # else the cache is complete
                shutil.rmtree(run.folder / "cache", ignore_errors=True)
                kill(run, rng)
            wait_for_phase(run, phase, rng)
            reached = max((step for step, _ in run.steps), default=1)
            killed_at = time.monotonic()
            kill(run, rng)
            hit[phase] += 1
            if PHASES[(number + 1) % len(PHASES)] not in ("start-up", "encoding"):
                run.wait_for_step(reached)
                longest = max(longest, time.monotonic() - killed_at)
        reached = max(step for step, _ in run.steps)
        run.wait_for_step(reached + 10)
        run.stop()
    assert leftovers(file) == []
    assert shared_memory_segments() <= segments
    steps = max(step for step, _ in run.steps)

    with Launched(write_run_file(tiny_run_in, tmp_path / "whole"), processes) as whole:
        whole.wait_for_step(steps, seconds=1200)
        whole.stop()
    expected = dict(whole.steps)
    assert len(expected) == len(whole.steps)
    different = [(step, loss, expected[step]) for step, loss in run.steps if loss != expected[step]]
    assert different == []
    assert set(dict(run.steps)) == set(range(1, steps + 1))
    summary_lines.append(
        f"{processes} ranks, {kills} kills {hit}, {steps} steps, back after {longest:.0f} s at most"
    )


def test_a_run_ends_with_a_checkpoint_if_its_launcher_is_killed(tmp_path, tiny_run_in):
    file = write_run_file(tiny_run_in, tmp_path)
    with Launched(file, 2) as run:
        run.wait_for_step(3)
        ranks = run.ranks()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    last = Path(file.parent / "run/events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["status"] == "interrupted"
    assert leftovers(file) == []
