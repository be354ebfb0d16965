"""Checkpoints of which each rank writes a part."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from gracetune.distributed.sharding import TensorShard, shard_rows
from gracetune.errors import CheckpointError
from gracetune.train import checkpoint
from gracetune.train.checkpoint import Snapshot
from gracetune.train.state import (
    flatten_optimizer_state,
    optimizer_shards,
    restore_optimizer,
    restore_weights,
)
from gracetune.train.step import TrainProgress

SHAPES = {"matrix": (7, 3), "bias": (5,), "short": (1, 2)}


def shards_of(shard, count):
    return {n: TensorShard(s, *shard_rows(s[0], shard, count)) for n, s in SHAPES.items()}


class Rank:
    """The parameters and the AdamW of one rank, after two steps with the same gradients."""

    def __init__(self, shard, count, *, steps=2):
        self.shard, self.count = shard, count
        self.shards = shards_of(shard, count)
        generator = torch.Generator().manual_seed(1)
        whole = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
        self.parameters = {n: torch.nn.Parameter(self.part(n, t)) for n, t in whole.items()}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.1)
        for _ in range(steps):
            for name, parameter in self.parameters.items():
                gradient = torch.randn(SHAPES[name], generator=generator)
                parameter.grad = self.part(name, gradient)
            self.optimizer.step()

    def part(self, name, whole):
        return whole.narrow(0, self.shards[name].offset, self.shards[name].length).clone()

    def snapshot(self, step=2):
        flat = flatten_optimizer_state(self.optimizer, self.parameters)
        weights = {name: p.detach() for name, p in self.parameters.items()}
        return Snapshot(
            TrainProgress(step, step, step),
            {"train.batch_size": 4},
            {
                "weights": weights,
                "optimizer": flat,
                "generators-0": {"torch": torch.zeros(4, dtype=torch.uint8)},
                "generators-1": {"torch": torch.ones(4, dtype=torch.uint8)},
            },
            shards={
                "weights": self.shards,
                "optimizer": optimizer_shards(flat, self.parameters, self.shards),
            },
        )

    def restore(self, snapshot):
        shards = None if self.count == 1 else self.shards
        restore_weights(self.parameters, snapshot.tensors["weights"], shards)
        saved = snapshot.tensors["optimizer"]
        restore_optimizer(self.optimizer, self.parameters, saved, shards=shards)

    def state(self):
        weights = {name: p.detach() for name, p in self.parameters.items()}
        return weights | flatten_optimizer_state(self.optimizer, self.parameters)


def save(folder, count, step=2, keep=3):
    """Save a checkpoint as so many ranks do: whole, or in parts."""
    ranks = [Rank(shard, count) for shard in range(count)]
    snapshots = [rank.snapshot(step) for rank in ranks]
    if count == 1:
        return checkpoint.save_snapshot(folder, snapshots[0], keep).path
    path = checkpoint.checkpoint_path(folder, snapshots[0])
    staging = checkpoint.begin_shards(folder, path, nbytes=1000)
    written = [
        checkpoint.write_shard(staging, each, shard, count) for shard, each in enumerate(snapshots)
    ]
    return checkpoint.complete_shards(folder, staging, snapshots[0], written, keep)


@pytest.mark.parametrize("saved_by", [1, 2, 3, 8])
@pytest.mark.parametrize("resumed_by", [1, 2, 5])
def test_any_number_of_ranks_resumes_from_any_other(tmp_path, saved_by, resumed_by):
    found = checkpoint.load_snapshot(save(tmp_path, saved_by))
    assert found.num_ranks == 2, "by the RNG states, not by the shards"
    for shard in range(resumed_by):
        expected = Rank(shard, resumed_by).state()
        rank = Rank(shard, resumed_by, steps=0)
        rank.restore(found)
        state = rank.state()
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
            assert state[name].dtype == tensor.dtype


def test_only_checkpoints_in_parts_have_the_new_format(tmp_path):
    formats = [
        json.loads((save(tmp_path / str(count), count) / "manifest.json").read_text())["format"]
        for count in (1, 2)
    ]
    assert formats == [2, 3]


def test_each_rank_writes_its_part_and_the_first_one_what_is_common(tmp_path):
    path = save(tmp_path, 2)
    assert sorted(file.name for file in path.iterdir()) == [
        "generators-0.safetensors",
        "generators-1.safetensors",
        "manifest.json",
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
        "weights-00001-of-00002.safetensors",
        "weights-00002-of-00002.safetensors",
    ]
    first, second = (load_file(path / f"optimizer-0000{n}-of-00002.safetensors") for n in (1, 2))
    assert first["matrix|exp_avg"].shape == (4, 3)
    assert second["matrix|exp_avg"].shape == (3, 3)
    assert "matrix|step" in first
    assert "matrix|step" not in second
    assert "short|exp_avg" not in second


DAMAGE = {
    "a weight": lambda path: flip_last_bit(path / "weights-00002-of-00002.safetensors"),
    "a header": lambda path: os.truncate(path / "optimizer-00001-of-00002.safetensors", 40),
    "a missing shard": lambda path: (path / "weights-00001-of-00002.safetensors").unlink(),
    "a missing entry": lambda path: edit(
        path, lambda m: m["files"].pop("weights-00002-of-00002.safetensors")
    ),
    "no shards": lambda path: edit(path, lambda m: m.pop("shards")),
    "more shards": lambda path: edit(path, lambda m: m["shards"].update(weights=3)),
    "a negative number": lambda path: edit(path, lambda m: m["shards"].update(weights=-1)),
    "the format": lambda path: edit(path, lambda m: m.update(format=2)),
}


def flip_last_bit(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def edit(path, change):
    """Change the manifest, and make its checksum right again."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    manifest["checksum"] = checkpoint.manifest_checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_part_is_found_and_the_checkpoint_before_it_used(tmp_path, damage):
    save(tmp_path, 2, step=1)
    path = save(tmp_path, 2, step=2)
    DAMAGE[damage](path)
    warnings = []
    found = checkpoint.find_snapshot(tmp_path, "auto", warnings.append)
    assert found is not None
    assert found.progress.step == 1
    assert "step-000002 is damaged" in warnings[0]
    with pytest.raises(CheckpointError, match="step-000002"):
        checkpoint.load_tensors(path, "weights")
        checkpoint.load_tensors(path, "optimizer")


def test_a_checkpoint_without_all_parts_is_never_completed(tmp_path):
    snapshots = [Rank(shard, 2).snapshot() for shard in range(2)]
    path = checkpoint.checkpoint_path(tmp_path, snapshots[0])
    staging = checkpoint.begin_shards(tmp_path, path, nbytes=1000)
    written = [
        checkpoint.write_shard(staging, snapshots[0], shard, 2) for shard in range(2)
    ]  # the second rank has written the rows of the first
    with pytest.raises(ValueError, match="appear twice"):
        checkpoint.complete_shards(tmp_path, staging, snapshots[0], written, keep=1)
    assert checkpoint.complete_checkpoints(tmp_path) == []


def test_old_checkpoints_are_deleted_when_a_new_one_is_complete(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, 2, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_run_is_sampled_from_the_parts_of_its_weights(tmp_path):
    path = save(tmp_path, 3)
    whole = checkpoint.load_tensors(path, "weights")
    expected = Rank(0, 1).parameters
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], expected[name]) for name in whole)
    assert not checkpoint.load_tensors(path, "ema")
