"""A full training of Wan 2.2 14B on 512 ranks: plan, shards and checkpoint files agree.

The ranks are those of torch's fake process group, which exchanges nothing.
"""

import json
import os
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from fork_process import run_python

from gracetune.cli import plan
from gracetune.cli.main import read_run
from gracetune.distributed import shard_files
from gracetune.distributed.sharding import TensorShard, shard_rows

SCRIPT = Path(__file__).with_name("world_of_512.py")
FIRST = ("fsdp2-0", "fsdp2-511", "hsdp-261")
REST = ("fsdp2-261", "hsdp-0", "hsdp-511")
COPIES = {"fsdp2": 1, "hsdp": 64}
EXPERTS = 2
WAN_14B = 14_288_491_584
"""Number of weights of one expert."""


def divide(folder, cases):
    file = folder / "results.json"
    done = run_python(SCRIPT, file, *cases, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module", params=[FIRST, pytest.param(REST, marks=pytest.mark.slow)])
def divided(request, tmp_path_factory):
    return divide(tmp_path_factory.mktemp("world"), request.param)


def test_a_rank_stores_the_bytes_that_were_planned(divided):
    for case, found in divided.items():
        assert found["stored_nbytes"] == found["planned_nbytes"], case
        assert 0.9 * found["stored_nbytes"] < found["nbytes"] <= found["stored_nbytes"]
        assert found["copies"] * found["num_shards"] == 512
        assert found["copies"] == COPIES[case.split("-")[0]]
        assert found["units"] == 41, "40 blocks, and what is outside of them"
        # Padding: a table with one row takes a row on each of 512 ranks.
        assert 1.0 <= found["gathered_nbytes"] / (2 * found["block_numel"]) < 1.05


def test_every_weight_is_in_one_shard_of_a_copy(divided):
    for found in divided.values():
        shapes, count = found["shapes"], found["num_shards"]
        assert sum(map(prod, shapes.values())) == WAN_14B
        for name, shape in shapes.items():
            ends = [shard_rows(shape[0], shard, count) for shard in range(count)]
            assert sum(length for _, length in ends) == shape[0]
            assert all(
                offset + length == following for (offset, length), (following, _) in pairwise(ends)
            )
            # `fully_shard` has made the shard that this arithmetic, and the checkpoint, says.
            offset, length = ends[found["shard"]]
            assert found["rows"][name] == [offset, length, length], name


@pytest.mark.parametrize("count", [8, pytest.param(512, marks=pytest.mark.slow)])
def test_checkpoint_files_of_all_ranks_have_each_row_once(divided, count, tmp_path):
    found = next((one for one in divided.values() if one["num_shards"] == count), None)
    if found is None:
        pytest.skip("these ranks have another number of shards")
    paths = [tmp_path / name for name in shard_files.shard_file_names("weights", count)]
    total = 0
    for shard, path in enumerate(paths):
        parts = {
            name: TensorShard(tuple(shape), *shard_rows(shape[0], shard, count))
            for name, shape in found["shapes"].items()
        }
        total += write_sparse(path, {n: p for n, p in parts.items() if p.length}, shard_files)
    assert total == 2 * WAN_14B
    tensors = shard_files.ShardedTensors(paths)  # raises if a row is missing or appears twice
    assert {name: list(tensors.shape(name)) for name in tensors} == found["shapes"]


def write_sparse(path, parts, shard_files):
    """Write a rank's bf16 file with its header only; the data are a hole. Returns their size."""
    entries, offset = {"__metadata__": shard_files.shards_header(parts)}, 0
    for name, part in parts.items():
        shape = [part.length, *part.shape[1:]]
        end = offset + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return offset


@pytest.mark.slow
def test_the_plan_for_512_gpus_counts_the_shards_of_both_experts(tmp_path):
    cases = divide(tmp_path, ("fsdp2-0",))
    run_file = tmp_path / "run.json"
    settings = {
        "model": {"family": "wan22", "dtype": "bfloat16"},
        "datasets": [{"type": "folder", "instance_data_dir": "/none", "resolution": 1024}],
        "output_dir": str(tmp_path),
        "plan": {"compile": "never"},
    }
    run_file.write_text(json.dumps(settings))
    options = plan.argparse.ArgumentParser()
    plan.add_arguments(options)
    words = [str(run_file), "--machine", "gh200-96", "--gpus", "512", "--strategies"]
    args = options.parse_args(words)
    advice, _, _ = plan.compare_strategies(read_run(args.run_file, []), args, None, None)
    found = {one.name: one for one in advice.strategies}
    sharded = found["FSDP2"].plan
    assert sharded.device.adapters == EXPERTS * cases["fsdp2-0"]["planned_nbytes"]
    state = cases["fsdp2-0"]["planned_numel"] * EXPERTS * 3 * torch.float32.itemsize
    assert sharded.device.optimizer == pytest.approx(state, rel=0.01), "AdamW and master weights"
    assert found["HSDP"].choice.world_size == 512
    assert found["FSDP2"].limit == "network"
