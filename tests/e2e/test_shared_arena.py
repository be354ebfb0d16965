"""Two ranks of a run share one copy of a staged dataset; checked from outside while they train."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

DEADLINE_S = 200.0


def arenas_of(pid):
    """Return the inodes of the arenas that a process has mapped; empty once it has ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {int(found) for found in re.findall(r"(\d+) +/memfd:gracetune-arena", maps)}


def descendants(pid):
    """Return all descendants of a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(words[1]), []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def test_two_ranks_map_the_same_arena(tmp_path, run_file):
    folder = tmp_path / "pictures"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(16):
        pixels = noise.integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text("noise")
    file = run_file(
        datasets=[
            {
                "id": "pictures",
                "type": "in_memory",
                "instance_data_dir": str(folder),
                "resolution": 24,
            }
        ],
        train={"max_train_steps": 100_000, "batch_size": 2},
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with (tmp_path / "output").open("w") as output:
        launched = subprocess.Popen(
            [*words, "-m", "gracetune", "train", str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ,
        )
    ranks = []
    log = tmp_path / "run/events.jsonl"
    try:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and launched.poll() is None:
            ranks = [pid for pid in descendants(launched.pid) if arenas_of(pid)]
            if len(ranks) == 2 and log.exists() and '"step_done"' in log.read_text():
                break
            time.sleep(0.2)
        held = [arenas_of(pid) for pid in ranks]
        offers = list((tmp_path / "run/staged").glob("*.json"))
    finally:
        os.killpg(launched.pid, signal.SIGKILL)
        launched.wait()
        for pid in ranks:  # a rank may be in a session of its own
            if arenas_of(pid):
                os.kill(pid, signal.SIGKILL)
    said = (tmp_path / "output").read_text()
    assert len(held) == 2, said
    assert held[0] == held[1], "each rank holds a copy of its own"
    (offer,) = offers
    ticket = json.loads(offer.read_text())
    assert ticket["pid"] in ranks
    assert {inode for _, _, inode in ticket["segments"]} == held[0]
    deadline = time.monotonic() + 20
    while any(map(arenas_of, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(arenas_of, ranks)), "killed ranks still hold the arena"
