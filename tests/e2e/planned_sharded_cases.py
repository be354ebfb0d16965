"""Train run files like `sharded_cases.py`, and count the blocks that are checkpointed.

Rank 0 also writes CASE-NAME.counts with the number of calls of checkpointed blocks, and with the
activation mode of each block in the plan. Blocks are compiled without code generation. The plan is
made for fixed rates, because the rates of a busy CPU decide differently every time.
"""

import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist
from sharded_cases import train

from gracetune.offload import checkpointing
from gracetune.plan import sharded_run
from gracetune.plan.apply import apply_checkpointing
from gracetune.plan.controller import PlanController
from gracetune.plan.machines import MachineRates

RATES = MachineRates(flops=2e10, memory=1e10, link_in=1e10, link_out=1e10)
"""Rates of a CPU whose matmuls are slow, so that keeping their outputs is worth the memory."""


def count_checkpoints(path, name):
    counts = {"calls": 0, "modes": []}
    checkpoint_block, start = checkpointing.checkpoint_block, PlanController.__init__

    def counted(*args, **kwargs):
        counts["calls"] += 1
        return checkpoint_block(*args, **kwargs)

    def started(controller, problem, plan, *args, **kwargs):
        counts["modes"] = [block.activations for block in plan.blocks]
        start(controller, problem, plan, *args, **kwargs)

    apply = partial(apply_checkpointing, backend="aot_eager")
    with (
        patch.object(sharded_run, "apply_checkpointing", apply),
        patch.object(sharded_run, "measure_rates", lambda *_: RATES),
        patch.object(checkpointing, "checkpoint_block", counted),
        patch.object(PlanController, "__init__", started),
    ):
        train(path, name)
    if not dist.is_initialized() or dist.get_rank() == 0:
        path.with_name(f"{path.stem}-{name}.counts").write_text(json.dumps(counts))


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        count_checkpoints(file, sys.argv[2])
