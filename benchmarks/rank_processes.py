"""Start one process for each rank of a benchmark on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import results

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_ranks(words: Sequence[str], count: int, timeout_s: float) -> None:
    """Run a Python command line in `count` processes, which find each other by torch's variables.

    Raises SystemExit if one fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    processes = [
        subprocess.Popen(
            results.dying_with_parent([sys.executable, *words]),
            env=os.environ | group | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in map(str, range(count))
    ]
    try:
        codes = [process.wait(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
