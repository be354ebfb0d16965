"""Strategies for several GPUs: what is compared, what is recommended, and which warnings follow."""

import json
from dataclasses import replace

import pytest
from cost_model_factory import build_model
from torch import nn

from gracetune.cli.main import main
from gracetune.config.schema import RunFile
from gracetune.memory.platform import Link
from gracetune.models import tiny
from gracetune.plan.memory import FixedMemory
from gracetune.plan.search import Constraints, PlanBudget
from gracetune.plan.sharding import Network
from gracetune.plan.strategies import Cluster, StrategyInputs, advise
from gracetune.units import GIB

NETWORK = Network(nvlink=1e9, network=1e8, nvlink_gpus=4)


def inputs(device_nbytes=10_000, run=None, host_nbytes=10**6, **cluster):
    """Eight GPUs in two machines; the model's own costs are those of `build_model`."""
    blocks = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))
    settings = {
        "num_gpus": 8,
        "gpus_per_machine": 4,
        "network": NETWORK,
        "link": Link.COHERENT,
        "cpu_rate": 500.0,
        "fault_rate": 10.0,
        "storage_rate": 100.0,
        "all_storage_rate": 100.0,
    }
    return StrategyInputs(
        run=run or RunFile.model_validate({"model": {"family": "tiny"}, "output_dir": "x"}),
        model=build_model(),
        transformer=blocks,
        blocks=list(blocks),
        fixed=FixedMemory(optimizer_nbytes=16_384, state_slots_nbytes=8, batches_ahead=0),
        budget=PlanBudget(device_nbytes, host_nbytes, ranks=4),
        constraints=Constraints(compile=(False,), host_state=(0.0, 0.5, 1.0)),
        cluster=Cluster(**(settings | cluster)),
        compute_nbytes=4,
        weights_nbytes=400,
        data_nbytes=600,
    )


def by_name(advice):
    return {one.name: one for one in advice.strategies}


def test_the_strategies_are_planned_with_the_memory_that_each_leaves():
    found = by_name(advise(inputs(device_nbytes=10**6)))
    assert list(found) == [
        "one GPU",
        "planned ranks",
        "FSDP2",
        "HSDP",
        "hybrid",
        "FSDP2 + offload",
    ]
    sharded, whole = found["FSDP2"], found["planned ranks"]
    assert sharded.plan.device.optimizer == 16_384 // 8
    assert whole.plan.device.optimizer == 16_384
    assert found["hybrid"].plan.host_state > 0
    offloaded = found["FSDP2 + offload"].plan
    assert offloaded.device.optimizer == 0
    assert offloaded.host.optimizer == 16_384 // 8
    assert whole.samples_per_second == pytest.approx(
        8 * found["one GPU"].samples_per_second, rel=0.1
    )
    assert sharded.network_nbytes > whole.network_nbytes > 0


def test_the_simplest_of_equally_fast_strategies_is_recommended():
    given = inputs(device_nbytes=10**6)  # with an update that is too short to be worth dividing
    advice = advise(replace(given, fixed=replace(given.fixed, optimizer_nbytes=16)))
    assert advice.recommended.name == "planned ranks"
    assert advice.recommended.settings == {"distributed.strategy": "replicate"}


def test_sharding_is_recommended_if_the_whole_model_does_not_fit():
    given = inputs(device_nbytes=10_000)
    given = replace(given, constraints=replace(given.constraints, host_state=(0.0,)))
    advice = advise(given)
    assert advice.recommended.name == "FSDP2"
    assert "planned ranks does not fit" in advice.reason
    missing = by_name(advice)["planned ranks"]
    assert missing.plan is None
    assert "page faults would take" in missing.why_not


def test_the_slowest_part_is_named():
    slow = replace(NETWORK, nvlink=10.0, network=10.0)
    found = by_name(advise(inputs(device_nbytes=10**6, network=slow)))
    assert found["FSDP2"].limit == "network"
    found = by_name(advise(inputs(device_nbytes=10**6, cpu_rate=10.0)))
    assert found["FSDP2 + offload"].limit == "host memory"
    assert found["FSDP2"].limit == "compute"
    found = by_name(advise(inputs(device_nbytes=10**6, storage_rate=1e-3)))
    assert found["FSDP2"].limit == "staging"


def test_staging_takes_longer_if_many_machines_share_the_storage():
    one = inputs(num_gpus=4, all_storage_rate=200.0).cluster
    many = replace(one, num_gpus=64)
    assert (one.staging_seconds(1000), many.staging_seconds(1000)) == (10.0, 16 * 1000 / 200)


def test_mechanisms_that_use_the_same_memory_are_warned_of():
    settings = {
        "model": {"family": "tiny"},
        "output_dir": "x",
        "distributed": {"strategy": "fsdp2", "cpu_offload": True},
        "optimizer": {"state": "host"},
        "plan": {"stream": True},
        "cache_config": {"vae_cache_type": "unified_memory"},
    }
    given = inputs(device_nbytes=20_000, run=RunFile.model_validate(settings))
    text = "\n".join(advise(given).warnings)
    assert "cpu_offload and optimizer.state: host both keep" in text
    assert "plan.stream and plan.offload have no effect with distributed.strategy: fsdp2" in text
    crowded = advise(inputs(device_nbytes=10**6, host_nbytes=18_000)).warnings
    assert any("FSDP2 + offload" in text and "compete for the rest" in text for text in crowded)
    assert not advise(inputs(device_nbytes=10**6)).warnings
    loading = advise(replace(inputs(), weights_nbytes=10**6)).warnings
    assert any("every rank loads the whole model at its start" in text for text in loading)


def test_samples_of_a_step_are_divided_among_the_ranks():
    run = RunFile.model_validate(
        {"model": {"family": "tiny"}, "output_dir": "x", "train": {"effective_batch_size": 16}}
    )
    found = by_name(advise(inputs(device_nbytes=10**6, run=run)))
    plans = {name: one.plan for name, one in found.items()}
    assert plans["one GPU"].batch * plans["one GPU"].accumulation == 16
    assert plans["FSDP2"].batch * plans["FSDP2"].accumulation == 2


def test_one_gpu_has_nothing_to_compare():
    assert list(by_name(advise(inputs(num_gpus=1)))) == ["one GPU"]


def test_the_command_prints_the_comparison(tmp_path, capsys):
    folder = tmp_path / "model" / "transformer"
    folder.mkdir(parents=True)
    config = {**tiny.CONFIG, "num_layers": 1, "_class_name": "SD3Transformer2DModel"}
    (folder / "config.json").write_text(json.dumps(config))
    run_file = tmp_path / "run.json"
    settings = {
        "model": {"family": "tiny", "path": str(folder.parent)},
        "adapter": {"rank": 4, "targets": ["attn.to_q"]},
        "output_dir": str(tmp_path),
        "datasets": [{"type": "shapes", "shapes": {"size": 24}}],
        "plan": {"compile": "never"},
    }
    run_file.write_text(json.dumps(settings))
    words = ["plan", str(run_file), "--machine", "gh200-96", "--gpus", "8", "--strategies"]
    assert main([*words, "--samples", "10"]) == 0
    text = capsys.readouterr().out
    assert "8 GPUs in 2 machines" in text
    assert "(FSDP2)" in text, "which is refused for an adapter"
    assert "for comparison only: distributed.strategy is fsdp2, which" in text
    assert "recommended: planned ranks, because" in text
    assert main([*words, "--json", "--gpus-per-machine", "8", "--network", "100GB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["machines"], report["gpus"]) == (1, 8)
    assert report["network"]["nvlink_gpus"] == 8
    assert {one["name"] for one in report["strategies"]} >= {"one GPU", "FSDP2", "HSDP"}
    assert report["budget"]["ranks"] == 8
    assert all(one["device_total"] < 95 * GIB for one in report["strategies"])
