"""Divide Wan 2.2 14B among 512 ranks of a fake process group, and write what each rank stores.

Called as `world_of_512.py FILE STRATEGY-RANK...`. No rank exchanges anything, and no tensor has
memory: the model is on the meta device. FILE has one entry for each strategy and rank, with the
planned bytes, those of the shards that `fully_shard` has made, and the rows of each tensor on the
rank.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# Importing it registers the backend "fake".
from torch.testing._internal.distributed.fake_pg import FakeStore

from gracetune.config.schema import DistributedSection, ModelSection
from gracetune.distributed.layout import build_layout
from gracetune.distributed.ranks import RankGroup
from gracetune.distributed.sharding import shard_model
from gracetune.models.family import SampleShape
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.sharding import ShardingChoice, measure_shards

WORLD_SIZE, GPUS_PER_MACHINE = 512, 8
LAYOUTS = {
    "fsdp2": {"strategy": "fsdp2"},
    "hsdp": {"strategy": "hsdp", "shard_size": 8},
}


def divide(settings, rank):
    """Divide the model as one of the ranks does, and return what it stores."""
    section = DistributedSection(**settings)
    machines = [str(number // GPUS_PER_MACHINE) for number in range(WORLD_SIZE)]
    layout = build_layout(section, RankGroup(rank, machines, machines))
    found = build_meta_model(ModelSection(family="wan22"), SampleShape(1024, 1024))
    model, blocks = found.model.requires_grad_(True), found.shapes.find_blocks(found.model)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    choice = ShardingChoice(layout.shard_size, layout.num_replicas, compute_nbytes=2)
    planned = measure_shards(model, blocks, choice)
    dist.init_process_group("fake", rank=rank, world_size=WORLD_SIZE, store=FakeStore())
    try:
        sharded = shard_model(
            {"": model},
            blocks,
            layout,
            section,
            torch.device("cpu"),
            print,
            compute_dtype=torch.bfloat16,
        )
        locals_ = {name: p.to_local() for name, p in model.named_parameters()}
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return {
            "shapes": shapes,
            "shard": layout.shard,
            "num_shards": layout.shard_size,
            "copies": layout.num_replicas,
            "planned_nbytes": planned.trained_nbytes,
            "planned_numel": planned.trained_numel,
            "stored_nbytes": sum(t.untyped_storage().nbytes() for t in locals_.values()),
            "nbytes": sum(t.nbytes for t in locals_.values()),
            "rows": {
                name: [shard.offset, shard.length, locals_[name].shape[0]]
                for name in locals_
                if (shard := sharded.shard_of(name))
            },
            "gathered_nbytes": planned.blocks[0].gathered_nbytes,
            "block_numel": sum(p.numel() for p in blocks[0].parameters()),
            "units": len(sharded.units),
        }
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    results = {}
    for case in sys.argv[2:]:
        strategy, rank = case.split("-")
        results[case] = divide(LAYOUTS[strategy], int(rank))
    Path(sys.argv[1]).write_text(json.dumps(results))
