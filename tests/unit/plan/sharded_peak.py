"""Measure the peak of memory of a divided training step on the CPU, and predict it.

Called as `sharded_peak.py FILE`; FILE gets the measured and the predicted bytes of each case. The
process group is torch's fake one: nothing is exchanged, but `fully_shard` allocates its buffers.
"""

import gc
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gracetune.config.schema import DistributedSection, ModelSection
from gracetune.distributed.layout import build_layout
from gracetune.distributed.ranks import RankGroup
from gracetune.distributed.sharding import shard_model
from gracetune.models.family import SampleShape
from gracetune.plan.apply import PlanLayout, apply_checkpointing
from gracetune.plan.machines import find_machine, machine_rates
from gracetune.plan.memory import FixedMemory, device_bytes
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.planner_input import build_cost_model
from gracetune.plan.result import BlockPlan
from gracetune.plan.sharding import ModelDivision, Network, ShardingChoice, measure_shards
from gracetune.plan.simulate import PlanCandidate

SMALL = {"num_layers": 4, "num_attention_heads": 4, "ffn_dim": 2048}
MODEL, SAMPLE, BATCH = ModelSection(family="wan22", dtype="float32"), SampleShape(128, 128), 2
CASES = {
    "kept": ("keep", 8, {}),
    "lean": ("lean", 8, {}),
    "recomputed": ("recompute", 64, {"prefetch_blocks": 2}),
    "gathered once": ("keep", 4, {"reshard_after_forward": False}),
}


class MemoryPeak(TorchDispatchMode):
    """Adds up the bytes of all live tensors after every operator. Storages may be resized."""

    def __init__(self):
        super().__init__()
        self._storages = {}
        self.peak = 0

    def add(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage._weak_ref()

    def total(self):
        found = 0
        for key, reference in list(self._storages.items()):
            if torch.UntypedStorage._expired(reference):
                torch.UntypedStorage._free_weak_ref(reference)
                del self._storages[key]
            else:
                found += torch.UntypedStorage._new_with_weak_ptr(reference).nbytes()
        return found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if type(leaf) in (torch.Tensor, torch.nn.Parameter):
                self.add(leaf)
        self.peak = max(self.peak, self.total())
        return output


def measure(cost_model, mode, world_size, settings):
    section = DistributedSection(strategy="fsdp2", **settings)
    machines = ["one"] * world_size
    layout = build_layout(section, RankGroup(0, machines, machines))
    loaded = build_meta_model(MODEL, SAMPLE, SMALL, device="cpu")
    model, blocks = loaded.model, loaded.shapes.find_blocks(loaded.model)
    model.requires_grad_(True)
    plans = (BlockPlan("resident", mode),) * len(blocks)
    sizes = measure_shards(
        model,
        blocks,
        ShardingChoice(
            world_size,
            compute_nbytes=None,
            reshard=section.reshard_after_forward,
            prefetch_blocks=section.prefetch_blocks,
        ),
    )
    divided = cost_model.divided(ModelDivision(sizes, Network(1e11, 1e11, 8)))
    candidate = PlanCandidate(plans, BATCH, 1, 0, compiled=False)
    fixed = FixedMemory(0, batches_ahead=0)
    planned = device_bytes(divided.at(BATCH), candidate, fixed).total
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    sharded = shard_model({"": model}, blocks, layout, section, torch.device("cpu"), print)
    applied = apply_checkpointing(blocks, PlanLayout(plans, compiled=False), emit=print)
    batch = {
        name: torch.ones_like(value) if value.dtype == torch.int64 else torch.randn(value.shape)
        for name, value in loaded._inputs(BATCH).items()
    }

    def step():
        loaded._predict(model, batch).float().square().mean().backward()

    step()  # allocates what stays
    sharded.collect_gradients()
    for parameter in sharded.local.values():
        parameter.grad = None
    sharded.free_gathered()
    gc.collect()
    peak = MemoryPeak()
    for tensor in (*(p.to_local().detach() for p in model.parameters()), *batch.values()):
        peak.add(tensor)
    with peak:
        step()
    applied.close()
    dist.destroy_process_group()
    return {"measured": peak.peak, "planned": planned}


def trace():
    meta = build_meta_model(MODEL, SAMPLE, SMALL)
    meta.model.requires_grad_(True)
    rates = machine_rates(find_machine("h200-pcie"))
    return build_cost_model(meta.trace_target(), rates, may_compile=False)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # FSDP2 warns of outputs that are views
    traced = trace()
    results = {name: measure(traced, *case) for name, case in CASES.items()}
    Path(sys.argv[1]).write_text(json.dumps(results))
