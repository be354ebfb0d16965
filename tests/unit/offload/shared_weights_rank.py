"""One rank of test_shared_weights.py: run every scenario on real ranks, and print what it saw."""

import copy
import ctypes
import gc
import hashlib
import json
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from streamed_model import build_model, step
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.distributed.ranks import SINGLE, connect_ranks
from gracetune.errors import GracetuneError
from gracetune.offload.copy_engine import OffloadError, SynchronousCopyEngine
from gracetune.offload.ring import stream_weights
from gracetune.plan.apply import PlanLayout, apply_plan
from gracetune.plan.result import BlockPlan

sys.path.insert(0, str(Path(__file__).parents[2]))
from fakes.frozen_layers import FrozenLayers, private_nbytes

NAME = "gracetune-shared"
LARGE_BLOCKS, LARGE_WIDTH = 8, 2560
"""The measured model has 8 blocks of 25 MiB."""


def shared_files():
    """Return the inodes of the shared files that this process maps, and their open descriptors."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    inodes = [int(line.split()[4]) for line in lines if NAME in line]
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            opened.append(NAME in str(link.readlink()))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return inodes, sum(opened)


def digest(model):
    """Hash all weights as they are saved."""
    sha = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except GracetuneError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stream(model, ranks, notices, engine=None, slots=2):
    return stream_weights(
        model,
        list(model.blocks),
        engine or SynchronousCopyEngine(),
        notices.append,
        slots,
        True,
        ranks=ranks,
    )


def train(ranks):
    """Stream shared weights: same gradients, readable weights, and detected changes."""
    model = build_model()
    resident = copy.deepcopy(model)
    ring = stream(model, ranks, notices := [])
    inodes, opened = shared_files()
    expected, found = step(resident, seed=ranks.rank), step(model, seed=ranks.rank)
    same = all(map(torch.equal, expected[1].values(), found[1].values()))
    seen = {
        "gradients": same and expected[0] == found[0],
        "saved": digest(model) == digest(resident),
        "inodes": inodes,
        "opened": opened,
        "notices": len(notices),
    }
    dist.barrier()  # the other rank reads the weight that changes now
    weight = model.blocks[2].down.weight
    if ranks.rank == 1:
        with torch.no_grad():
            weight.copy_(weight.clone())
        seen["changed"] = error_of(step, model, seed=0)
    ring.close(to_device=True)
    del ring
    gc.collect()
    seen["after"] = shared_files()
    seen["to_device"] = all(map(torch.equal, model.parameters(), resident.parameters()))
    return seen


class WatchingEngine(SynchronousCopyEngine):
    """Records how many storages of the old weights are alive when each block's memory is pinned."""

    def __init__(self, parameters):
        super().__init__()
        self.old = [StorageWeakRef(p.untyped_storage()) for p in parameters]
        self.alive = []

    def adopt_host(self, memory):
        self.alive.append(sum(not storage.expired() for storage in self.old))


def change_plan(ranks):
    """Apply three layouts one after the other; the second replaces memory block by block."""
    seen = _change_plan(ranks)
    gc.collect()
    return seen | {"after": shared_files()}


def _change_plan(ranks):
    model = build_model(6)
    expected = step(copy.deepcopy(model), seed=5)
    plans = [BlockPlan("streamed", "keep")] * 6

    def apply(plans, engine):
        layout = PlanLayout(plans, compiled=False, slots=2)
        blocks = {model: list(model.blocks)}
        return apply_plan(model, blocks, layout, engine, print, ranks=ranks)

    applied = apply(plans, SynchronousCopyEngine())
    first = step(model, seed=5)
    applied.close()
    kept = set(shared_files()[0])
    frozen = [p for block in model.blocks for p in (block.down.weight, block.mix.weight)]
    engine = WatchingEngine(frozen)
    applied = apply(plans, engine)
    second = step(model, seed=5)
    renewed = set(shared_files()[0])
    applied.close()
    fewer = [BlockPlan("resident", "keep")] * 3 + plans[:3]
    applied = apply(fewer, SynchronousCopyEngine())
    third = step(model, seed=5)
    applied.close()
    return {
        "gradients": all(
            torch.equal(expected[1][name], found[1][name])
            for found in (first, second, third)
            for name in expected[1]
        ),
        "renewed": not kept & renewed,
        "files": [len(kept), len(renewed)],
        "alive": engine.alive,
    }


def disagree(ranks):
    """Give rank 1 a weight that differs in one bit."""
    model = build_model(3)
    if ranks.rank == 1:
        model.blocks[1].down.weight.data.view(torch.int32)[0, 0] ^= 1
    return {"error": error_of(stream, model, ranks, [])}


def fail_to_map(ranks):
    """Let rank 1 open no more files."""
    model = build_model(6)
    resident = copy.deepcopy(model)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ranks.rank == 1:
        in_use = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 3, limits[1]))
    try:
        ring = stream(model, ranks, notices := [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    expected, found = step(resident, seed=1), step(model, seed=1)
    seen = {
        "gradients": all(map(torch.equal, expected[1].values(), found[1].values())),
        "notices": [(notice.text, notice.level, notice.fallback) for notice in notices],
        "files": shared_files(),
    }
    ring.close()
    return seen


class UnpinnableEngine(SynchronousCopyEngine):
    """Pins the memory of two blocks only."""

    def __init__(self):
        super().__init__()
        self.left = 2

    def adopt_host(self, memory):
        self.left -= 1
        if self.left < 0:
            raise OffloadError("host memory cannot be pinned")


def fail_to_pin(ranks):
    """Let rank 1 pin only some of the memory; all ranks must raise the error."""
    model = build_model(4)
    before = digest(model)
    engine = UnpinnableEngine() if ranks.rank == 1 else SynchronousCopyEngine()
    error = error_of(stream, model, ranks, [], engine)
    return {"error": error, "saved": digest(model) == before}


def measure(ranks):
    """Return the private memory that streamed weights add to this rank, alone and together."""
    seen = {}
    for name, group in (("alone", SINGLE), ("together", ranks)):
        ctypes.CDLL(None).malloc_trim(0)  # of the model before
        before = private_nbytes()
        model = FrozenLayers(LARGE_BLOCKS, LARGE_WIDTH)
        x = torch.linspace(-1, 1, LARGE_WIDTH).repeat(2, 1)
        model(x).square().mean().backward()
        expected, model.scales.grad = model.scales.grad, None
        loaded = private_nbytes() - before
        ring = stream(model, group, [])
        model(x).square().mean().backward()
        counters = ring.counters()
        dist.barrier()
        added = private_nbytes() - before - counters.slots * counters.slot_nbytes
        dist.barrier()  # pages that one process maps count as its private pages
        seen[name] = {
            "loaded": loaded,
            "added": added,
            "nbytes": counters.host_nbytes,
            "gradients": torch.equal(model.scales.grad, expected),
        }
        ring.close(to_device=False)
        del ring, model
    return seen


def main():
    dist.init_process_group("gloo")
    ranks = connect_ranks(60)
    scenarios = (train, change_plan, disagree, fail_to_map, fail_to_pin, measure)
    seen = {scenario.__name__: scenario(ranks) for scenario in scenarios}
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
