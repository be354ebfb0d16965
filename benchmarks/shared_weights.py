"""Measure the host memory of streamed weights with 1, 2 and 4 ranks on a machine.

Each rank is a process that loads the same frozen weights and moves them to host memory, from where
they would be streamed. `shared`: the ranks of the machine share one copy, as in a run. `own`: each
rank has its own copy. All ranks use one device.

Figures, of the rank with the largest value:

    private_mb   memory that the weights add to a rank and that it shares with no other process
    seconds      time to move the weights; with own copies, all ranks copy at the same time
    machine_mb   memory that the weights add to all ranks together

Weights are moved several times, and `seconds` is the shortest time. With a GPU, memory is pinned
where the link needs it, and `copy_gb_s` is the rate of copies to the device; torch's own pinned
memory (`torch_pinned_gb_s`) takes turns with it in the same process.

    PYTHONPATH=src:benchmarks python benchmarks/shared_weights.py [--out FOLDER] [--commit NAME]
        [--gib SIZE] [--ranks 1 2 4] [--rehearse]

On one GPU, `--gib 4 --ranks 1 2` takes less than a minute. It writes shared_weights_gpu.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
from typing import TYPE_CHECKING

import results
import torch
from shared_weights_rank import RankTask, run_rank

from gracetune.memory.platform import open_machine
from gracetune.units import GIB

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

WIDTH = 5120
REPETITIONS = 3
TIMEOUT_S = 120


def measure(
    num_ranks: int, is_shared: bool, num_blocks: int, width: int, device: str
) -> dict[str, float]:
    """Start the ranks, and return the largest of their figures."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link = open_machine().platform.link
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "gracetune.offload.host_weights"])
    processes, receivers = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        task = RankTask(
            rank, num_ranks, port, is_shared, num_blocks, width, device, link, REPETITIONS
        )
        processes.append(context.Process(target=run_rank, args=(task, sender), daemon=True))
        receivers.append(receiver)
    for process in processes:
        process.start()
    try:
        found = [_receive(receiver) for receiver in receivers]
    finally:
        for process in processes:
            process.join(TIMEOUT_S)
            process.kill()
    worst = {name: max(figures[name] for figures in found) for name in found[0]}
    slowest = {
        name: min(figures[name] for figures in found)
        for name in ("copy_gb_s", "torch_pinned_gb_s", "copy_ratio", "is_pinned", "arrived")
        if name in found[0]
    }
    worst["machine_mb"] = sum(figures["pss_mb"] for figures in found)
    del worst["pss_mb"]
    return {name: round(value, 3) for name, value in (worst | slowest).items()}


def _receive(receiver: Connection) -> dict[str, float]:
    if not receiver.poll(TIMEOUT_S):
        raise TimeoutError(f"a rank sent nothing for {TIMEOUT_S} s")
    figures: dict[str, float] = receiver.recv()
    return figures


def main() -> int:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights in GiB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments = results.parse_arguments(parser)
    width, ranks, gib = WIDTH, arguments.ranks, arguments.gib
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.rehearse:
        device, width, ranks, gib = "cpu", 512, [2], 4 * 2 * 512**2 / GIB
    num_blocks = max(1, round(gib * GIB / (2 * width**2)))
    figures: dict[str, object] = {}
    for num_ranks in ranks:
        for is_shared in (True, False):
            name = f"{num_ranks} ranks" if num_ranks > 1 else "1 rank"
            kind = "shared" if is_shared else "own"
            found = measure(num_ranks, is_shared, num_blocks, width, device)
            figures.setdefault(name, {})[kind] = found
            print(f"{name}, {kind}: {found}")
    name = "shared_weights_gpu" if device == "cuda" else "shared_weights"
    print(results.write(name, figures, arguments.out, arguments.commit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
