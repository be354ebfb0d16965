"""The grids of weights and of data, in which every rank has a place."""

import pytest

from gracetune.config.schema import DistributedSection
from gracetune.distributed.layout import SINGLE_LAYOUT, build_layout
from gracetune.distributed.ranks import RankGroup
from gracetune.errors import ConfigError


def layout_of(rank, world_size, local_size=None, **settings):
    machines = [str(r // (local_size or world_size)) for r in range(world_size)]
    ranks = RankGroup(rank, machines, ["host"] * world_size)
    return build_layout(DistributedSection(**settings), ranks)


def test_replicated_ranks_have_all_weights_and_their_own_batches():
    layout = layout_of(3, 4)
    assert (layout.is_sharded, layout.num_replicas) == (False, 4)
    assert (layout.data_rank, layout.data_size, layout.context_rank) == (3, 4, 0)
    assert layout.describe() == ""


def test_fsdp2_divides_the_weights_among_all_ranks():
    layout = layout_of(3, 4, strategy="fsdp2")
    assert (layout.shard, layout.shard_size, layout.num_replicas) == (3, 4, 1)
    assert (layout.data_rank, layout.data_size) == (3, 4)


def test_hsdp_divides_the_weights_among_the_ranks_of_a_machine_unless_told_otherwise():
    assert layout_of(5, 8, local_size=4, strategy="hsdp").shard_size == 4
    layout = layout_of(5, 8, strategy="hsdp", shard_size=2)
    assert (layout.shard, layout.num_replicas) == (1, 4)
    assert layout.describe() == "HSDP: weights in 2 shards, 4 copies"


def test_ranks_of_one_context_group_compute_the_same_batches():
    found = [layout_of(rank, 4, strategy="fsdp2", context_parallel=2) for rank in range(4)]
    assert [(layout.data_rank, layout.context_rank) for layout in found] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert found[0].data_size == 2


@pytest.mark.parametrize(
    "settings", [{"context_parallel": 3}, {"strategy": "hsdp", "shard_size": 3}]
)
def test_groups_must_divide_the_number_of_ranks(settings):
    with pytest.raises(ConfigError, match="does not divide the 4 ranks"):
        layout_of(0, 4, **settings)


def test_a_single_process_has_nothing_to_divide():
    assert (SINGLE_LAYOUT.data_size, SINGLE_LAYOUT.num_replicas) == (1, 1)
    assert not layout_of(0, 1, strategy="fsdp2").is_sharded
