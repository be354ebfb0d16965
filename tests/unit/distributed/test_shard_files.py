import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gracetune.distributed.shard_files import (
    DTYPE_NAMES,
    ShardedTensors,
    saved_rows,
    saved_shape,
    shard_file_names,
    shards_header,
    write_tensors,
)
from gracetune.distributed.sharding import TensorShard, shard_rows

WHOLE = {
    "matrix": torch.randn(7, 3),
    "bias": torch.arange(5, dtype=torch.bfloat16),
    "short": torch.tensor([[1.0, 2.0]]),
    "step": torch.tensor(9),
}
"""Tensors that four ranks divide: of `short`, all but the first rank have nothing."""


def shard_of(name, shard, count):
    shape = tuple(WHOLE[name].shape)
    return TensorShard(shape, *shard_rows(shape[0], shard, count))


def write_shards(folder, count):
    """Write the files of all ranks; only the first one writes `step`."""
    paths = [folder / name for name in shard_file_names("weights", count)]
    for shard, path in enumerate(paths):
        parts = {n: shard_of(n, shard, count) for n in WHOLE if WHOLE[n].ndim}
        parts = {n: part for n, part in parts.items() if part.length}
        tensors = {n: saved_rows(WHOLE, n, part) for n, part in parts.items()}
        if shard == 0:
            tensors["step"] = WHOLE["step"]
        write_tensors(path, tensors, shards_header(parts))
    return paths


@pytest.mark.parametrize("header", [None, {"b": "1", "a": "\u00fc\n"}])
def test_files_have_the_bytes_that_safetensors_writes(tmp_path, header):
    tensors = {
        f"{name} {index}": (torch.rand(3, 2) * 50).to(dtype)
        for index, dtype in enumerate(DTYPE_NAMES)
        for name in ("z", 'a "quoted" \u00fc|')
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4, dtype=torch.bfloat16)}
    write_tensors(tmp_path / "ours", tensors, header)
    save_file(tensors, tmp_path / "theirs", header)
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours", "theirs"))
    assert len(ours) == len(theirs)
    length = int.from_bytes(ours[:8], "little")
    assert json.loads(ours[8 : 8 + length]) == json.loads(theirs[8 : 8 + length])
    assert ours[8 + length :] == theirs[8 + length :]
    if header is None:  # safetensors writes its entries in a random order
        assert ours == theirs


def test_the_parts_of_all_ranks_are_put_together(tmp_path):
    saved = ShardedTensors(write_shards(tmp_path, 4))
    assert saved.keys() == WHOLE.keys()
    for name, tensor in WHOLE.items():
        assert saved_shape(saved, name) == tuple(tensor.shape)
        assert torch.equal(saved[name], tensor)
        assert saved[name].dtype == tensor.dtype


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_another_number_of_ranks_reads_its_own_rows(tmp_path, count):
    sharded = ShardedTensors(write_shards(tmp_path, 4))
    save_file(WHOLE, tmp_path / "whole.safetensors")
    for saved in (sharded, load_file(tmp_path / "whole.safetensors")):
        for name in ("matrix", "bias", "short"):
            parts = [shard_of(name, shard, count) for shard in range(count)]
            found = [saved_rows(saved, name, part) for part in parts]
            assert [len(rows) for rows in found] == [part.length for part in parts]
            assert torch.equal(torch.cat(found), WHOLE[name])


def test_a_rank_reads_only_the_files_that_have_its_rows(tmp_path):
    paths = write_shards(tmp_path, 4)
    saved = ShardedTensors(paths)
    paths[3].unlink()
    first = saved_rows(saved, "matrix", shard_of("matrix", 0, 2))
    assert torch.equal(first, WHOLE["matrix"][:4])
    with pytest.raises(OSError, match="No such file"):
        saved_rows(saved, "matrix", shard_of("matrix", 1, 2))


@pytest.mark.parametrize(("left_out", "message"), [(1, "rows 2 to 4 of"), (3, "6 of its 7 rows")])
def test_missing_rows_are_found(tmp_path, left_out, message):
    paths = write_shards(tmp_path, 4)
    del paths[left_out]
    with pytest.raises(ValueError, match=message):
        ShardedTensors(paths)


def test_rows_that_two_files_have_are_found(tmp_path):
    paths = write_shards(tmp_path, 4)
    with pytest.raises(ValueError, match="appear twice"):
        ShardedTensors([*paths, paths[1]])


@pytest.mark.parametrize("text", ["[]", "{", '{"matrix": 3}'])
def test_a_header_that_cannot_be_right_is_named(tmp_path, text):
    write_tensors(
        tmp_path / "a.safetensors", {"matrix": WHOLE["matrix"]}, {"gracetune.shards": text}
    )
    with pytest.raises(ValueError, match=r"the header of a\.safetensors"):
        ShardedTensors([tmp_path / "a.safetensors"])
