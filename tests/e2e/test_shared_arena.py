"""Two ranks of a run share one copy of a staged dataset and of the cache while they train."""

import json
import os
import re
import time
from pathlib import Path

import numpy as np
from fork_process import rank_environments
from PIL import Image

DEADLINE_S = 200.0


def arenas_of(pid):
    """Return the inodes of the arenas that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {int(found) for found in re.findall(r"(\d+) +/memfd:gracetune-arena", maps)}


def test_two_ranks_map_the_same_arena(tmp_path, run_file, start):
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
    started = [start("train", file, env=env) for env in rank_environments(os.environ)]
    ranks = [process.pid for process in started]
    log = tmp_path / "run/events.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    while not (log.exists() and '"step_done"' in log.read_text()):
        assert time.monotonic() < deadline, "the run is too slow"
        ended = [process.communicate() for process in started if process.poll() is not None]
        assert not ended, ended
        time.sleep(0.05)
    held = [arenas_of(pid) for pid in ranks]
    assert all(held)
    assert held[0] == held[1], "each rank holds a copy of its own"
    staged, *cached = [
        json.loads(offer.read_text())
        for pattern in ("staged/*.json", "ranks/*/memory/*.json")
        for offer in (tmp_path / "run").glob(pattern)
    ]
    assert len(cached) == 2, "latents and texts"
    offers = [staged, *cached]
    assert {offer["pid"] for offer in offers} <= set(ranks)
    assert {inode for offer in offers for _, _, inode in offer["segments"]} == held[0]
