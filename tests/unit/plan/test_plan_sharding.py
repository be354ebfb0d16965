"""Sizes, memory and time of a model that ranks divide among them, in round numbers."""

from dataclasses import replace

import pytest
import torch
from cost_model_factory import SPEEDS, build_candidate, build_model
from torch import nn

from gracetune.plan.machines import CLUSTERS, MACHINES, NETWORK_CONSTANTS
from gracetune.plan.memory import FixedMemory, device_bytes, host_bytes
from gracetune.plan.sharding import (
    ModelDivision,
    Network,
    ShardedSizes,
    ShardingChoice,
    UnitSizes,
    measure_shards,
)
from gracetune.plan.simulate import predict_seconds

FAST = Network(nvlink=1e12, network=1e12, nvlink_gpus=1024)
FIXED = FixedMemory(optimizer_nbytes=0, batches_ahead=0)
UNIT = UnitSizes(
    trained_nbytes=25,
    trained_numel=25,
    gathered_nbytes=100,
    gradients_nbytes=100,
    reduced_nbytes=200,
)


def divided(network=FAST, **settings):
    """The model of eight blocks in four shards; 100 bytes of gathered weights in each block."""
    choice = ShardingChoice(num_shards=4, **settings)
    sizes = ShardedSizes(choice, (UNIT,) * 8, UnitSizes(gathered_nbytes=10))
    return build_model().divided(ModelDivision(sizes, network, cpu_rate=100.0))


def seconds_of(model, **settings):
    return predict_seconds(model.at(1), build_candidate(model, **settings), SPEEDS, 0)


def test_shards_are_padded_and_gathered_in_the_compute_dtype():
    model = nn.Sequential(nn.Linear(8, 10, bias=False), nn.Linear(8, 3, bias=False))
    model[1].requires_grad_(False)
    sizes = measure_shards(model, [model[0]], ShardingChoice(num_shards=4, compute_nbytes=2))
    # 10 rows are 3 per shard, 3 rows are 1 per shard, of 8 elements each.
    assert sizes.blocks[0] == UnitSizes(0, 3 * 8 * 4, 24, 4 * 24 * 2, 80 * 2, 4 * 24 * 4)
    assert sizes.root == UnitSizes(frozen_nbytes=8 * 4, gathered_nbytes=4 * 8 * 4)
    whole = measure_shards(model, [model[0]], ShardingChoice(num_replicas=4))
    assert whole.blocks[0].gathered_nbytes == 0
    assert whole.blocks[0].trained_nbytes == 320


def test_prefetched_and_reduced_blocks_need_memory():
    def at(**settings):
        model = divided(**settings)
        return device_bytes(model.at(1), build_candidate(model, "recompute"), FIXED)

    base = at()
    assert base.adapters == 8 * 25
    # In backward of the second block: the root, the block and the next one, its gradients, and the
    # buffer in which they are reduced; seven shards of gradients exist by then.
    assert (base.gathered, base.gradients) == (10 + 2 * 100 + 100 + 200, 7 * 25)
    two_ahead = at(prefetch_blocks=2)
    assert two_ahead.total >= base.total
    assert at(reshard=False).gathered > base.gathered


def test_offloaded_shards_are_in_host_memory():
    model = divided(cpu_offload=True)
    candidate = build_candidate(model, "keep")
    device = device_bytes(model.at(1), candidate, FIXED)
    assert device.adapters == device.gradients == device.optimizer == 0
    host = host_bytes(model.at(1), candidate, FIXED)
    assert (host.adapters, host.gradients) == (200, 200)


def test_a_fast_network_costs_nothing():
    alone = seconds_of(build_model()).step
    update = 3 * (200 - 16) / SPEEDS.memory  # of more trained weights
    assert seconds_of(divided()).step == pytest.approx(alone + update, rel=1e-3)


def test_a_slow_network_decides_the_time_of_a_step():
    # 75 of 100 bytes arrive in a gather, and 150 of 200 in a reduction.
    model = divided(Network(nvlink=10.0, network=10.0, nvlink_gpus=4))
    found = seconds_of(model)
    assert found.network == pytest.approx(2 * 8 * 7.5 + 8 * 15 + 0.75, rel=1e-3)
    assert found.step == pytest.approx(found.network, rel=0.1)
    assert found.wait_network > 0.5 * found.step
    kept = seconds_of(divided(Network(10.0, 10.0, 4), reshard=False))
    assert kept.network == pytest.approx(found.network - 8 * 7.5, rel=1e-3)


def test_prefetching_hides_the_gathering_of_weights():
    # Gathering takes 0.75 s and reducing 0.75 s; forward 1 s and backward 2 s. The first gathering
    # of each pass and the last reduction are not hidden.
    unit = replace(UNIT, reduced_nbytes=100)
    sizes = ShardedSizes(ShardingChoice(num_shards=4), (unit,) * 8, UnitSizes())
    model = build_model().divided(ModelDivision(sizes, Network(100.0, 100.0, 4)))
    found = seconds_of(model)
    assert found.wait_network == pytest.approx(3 * 0.75, rel=1e-3)
    assert found.network == pytest.approx(24 * 0.75, rel=1e-3)


def test_the_cpu_runs_the_optimizer_of_offloaded_shards():
    found = seconds_of(divided(cpu_offload=True))
    assert found.wait_state == pytest.approx(3 * 200 / 100.0)
    assert (found.link_in, found.link_out) == (pytest.approx(2 * 8 * 0.25), pytest.approx(8 * 0.25))


def test_replicas_exchange_gradients_once_per_step():
    network = Network(nvlink=10.0, network=10.0, nvlink_gpus=8)
    choice = ShardingChoice(num_shards=4, num_replicas=2)
    sizes = ShardedSizes(choice, (UNIT,) * 8, UnitSizes())
    model = build_model().divided(ModelDivision(sizes, network))
    often = seconds_of(model, accumulation=4)
    division = model.at(1).division
    # Half of 200 / 4 bytes per block, there and back, once in four micro-batches.
    assert division.all_reduce_nbytes == 8 * 2 * 25
    gathered = 4 * (2 * division.gather_nbytes + division.reduce_nbytes)
    assert division.network_nbytes(4) == gathered + 400
    assert often.network == pytest.approx(2 * 60 + 120 + 8 * 5 / 4, rel=1e-3)


def test_ranks_that_share_a_sample_compute_a_part_of_it():
    whole, half = divided(), divided(context_size=2)
    assert half.at(2).blocks[0].input_nbytes == whole.at(1).blocks[0].input_nbytes
    assert half.at(1).division.exchange_nbytes == 8 * 4 * 5 // 2
    slow = divided(Network(1.0, 1.0, 1024), context_size=2)
    assert seconds_of(slow).wait_network > seconds_of(half).wait_network


def test_a_ring_over_machines_uses_the_network_card_of_every_gpu():
    constant = {name: figure.value for name, figure in NETWORK_CONSTANTS.items()}
    network = Network(nvlink=450e9, network=50e9, nvlink_gpus=8)
    one = network.gather_seconds(10**9, 8)
    assert one == pytest.approx(constant["base_latency_s"] + 7 * 3.4e-6 + 7 / 8 / 450, rel=1e-6)
    two = network.gather_seconds(10**9, 16) - constant["base_latency_s"] - 14 * 3.4e-6 - 14e-6
    assert two == pytest.approx(0.9375 / 450)  # 1 GB / 2 over 400 GB/s takes less
    many = network.gather_seconds(10**9, 512)
    assert many > 63 / 64 / 400 + 448 * 3.4e-6
    assert network.gather_seconds(10**9, 1) == 0.0
    # Replicas of eight shards each are one rank per machine.
    assert network.spread(64, 8) == (1.0, 64)


@pytest.mark.parametrize("name", MACHINES)
def test_links_between_gpus_have_sources_and_are_not_called_measured(name):
    spec = CLUSTERS[name]
    for figure in (spec.gpus_per_machine, spec.nvlink, spec.network, spec.cpu_memory, spec.storage):
        assert figure.source
        assert figure.kind != "measured"
        assert figure.value > 0


def test_a_meta_model_is_divided_like_a_loaded_one():
    loaded = nn.Linear(7, 5)
    with torch.device("meta"):
        meta = nn.Linear(7, 5)
    choice = replace(ShardingChoice(), num_shards=3)
    assert measure_shards(meta, [], choice) == measure_shards(loaded, [], choice)
