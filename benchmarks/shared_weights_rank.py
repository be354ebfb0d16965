"""One rank of shared_weights.py: move weights to host memory, and measure memory and time."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from gracetune.distributed.ranks import SINGLE, connect_ranks
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.offload.host_weights import move_to_host, move_to_shared, select_streamed_weights

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

    from gracetune.distributed.ranks import RankGroup
    from gracetune.memory.platform import Link
    from gracetune.offload.copy_engine import CopyEngine

MB = 10**6


@dataclass(frozen=True, slots=True)
class RankTask:
    """What one rank measures."""

    rank: int
    world_size: int
    port: int
    is_shared: bool
    """True: the ranks share one copy. False: each rank has its own, as before."""
    num_blocks: int
    width: int
    device: str
    link: Link
    repetitions: int


def run_rank(task: RankTask, connection: Connection) -> None:
    """Measure, and send the figures to the parent process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{task.port}",
        rank=task.rank,
        world_size=task.world_size,
    )
    ranks = connect_ranks(60)
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the CUDA context takes host memory too
    before = memory_mb()
    rounds = []
    for _ in range(task.repetitions):
        model = nn.Sequential(*build_blocks(task.num_blocks, task.width))
        engine = open_copy_engine(device, task.link)
        dist.barrier()
        began = time.perf_counter()
        memory = move(model, engine, ranks if task.is_shared else SINGLE)
        dist.barrier()
        rounds.append(time.perf_counter() - began)
        if len(rounds) < task.repetitions:
            engine.close()
            del model, memory
    figures = {"seconds": min(rounds)}
    after = memory_mb()
    figures |= {f"{name}_mb": after[name] - before[name] for name in after}
    figures["weights_mb"] = sum(map(len, memory)) / MB
    dist.barrier()  # pages that one process maps count as private
    if device.type == "cuda":
        for turn in range(task.world_size):  # one after the other: they share a link
            if turn == task.rank:
                figures |= copy_rates(engine, memory, task.repetitions)
            dist.barrier()
    connection.send(figures)
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


def move(model: nn.Sequential, engine: CopyEngine, ranks: RankGroup) -> list[Tensor]:
    """Move the weights to host memory as a weight ring does."""
    selected = select_streamed_weights(model, list(model))
    if ranks.world_size == 1:
        return move_to_host(selected, engine.allocate_host)
    return move_to_shared(selected, engine, ranks, print)


def build_blocks(num_blocks: int, width: int) -> list[nn.Module]:
    """Return frozen bf16 layers with the same bits on every rank."""
    blocks: list[nn.Module] = []
    bits = torch.arange(width**2, dtype=torch.int32).to(torch.int16).view(width, width)
    for number in range(num_blocks):
        layer = nn.Linear(width, width, bias=False, device="meta")
        layer.weight = nn.Parameter((bits + number).view(torch.bfloat16), requires_grad=False)
        blocks.append(layer)
    return blocks


def memory_mb() -> dict[str, float]:
    """Return this process's private memory, and its share of all memory (Pss), in MB."""
    gc.collect()
    found = {"private": 0.0, "pss": 0.0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, kilobytes = line.split()[:2]
        if name.startswith("Private_"):
            found["private"] += int(kilobytes) * 1024 / MB
        elif name == "Pss:":
            found["pss"] = int(kilobytes) * 1024 / MB
    return found


def copy_rates(engine: CopyEngine, memory: list[Tensor], repetitions: int) -> dict[str, float]:
    """Return GB/s from the weights' memory and from torch's pinned memory, in alternating turns."""
    target = engine.allocate_device(len(memory[0]))
    pinned = [torch.empty(len(block), dtype=torch.uint8, pin_memory=True) for block in memory]
    for block, copy in zip(memory, pinned, strict=True):
        copy.copy_(block)
    nbytes = sum(map(len, memory))
    best = {"weights": 0.0, "torch_pinned": 0.0}
    for _ in range(repetitions):
        for name, sources in (("weights", memory), ("torch_pinned", pinned)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for source in sources:
                engine.copy(target, source, poison=False).wait(prefetched=True)
            torch.cuda.synchronize()
            best[name] = max(best[name], nbytes / (time.perf_counter() - began) / 1e9)
    return {
        "is_pinned": float(memory[0].is_pinned()),
        "copy_gb_s": best["weights"],
        "torch_pinned_gb_s": best["torch_pinned"],
        "copy_ratio": best["weights"] / best["torch_pinned"],
        "arrived": float(torch.equal(target.cpu(), memory[-1])),
    }
