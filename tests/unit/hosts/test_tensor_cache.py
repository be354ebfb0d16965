"""Keep cache files in the memory of one process."""

import os
from pathlib import Path

import pytest
import torch

from gracetune.hosts.tensor_cache import LocalTensorMemory


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"1")
    return str(path)


def loader(calls):
    def load(path):
        calls.append(path)
        return {"latents": torch.ones(4), "list": [torch.zeros(2)], "meta": (1, "two")}

    return load


def test_a_hit_returns_new_containers_with_the_same_tensors(file):
    calls, memory = [], LocalTensorMemory(1000, torch.Tensor.contiguous)
    first = memory.get(file, loader(calls))
    first["latents"] = None
    first["list"].append(3)
    second = memory.get(file, loader(calls))
    assert len(calls) == 1
    assert torch.equal(second["latents"], torch.ones(4))
    assert len(second["list"]) == 1
    assert second["meta"] == (1, "two")
    assert (memory.hits, memory.misses, memory.nbytes) == (1, 1, 24)


def test_a_changed_file_is_loaded_again(file):
    calls, memory = [], LocalTensorMemory(1000, torch.Tensor.contiguous)
    memory.get(file, loader(calls))
    os.utime(file, ns=(1, 1))
    memory.get(file, loader(calls))
    memory.forget(Path(file))
    memory.get(Path(file), loader(calls))
    memory.get(file, loader(calls))
    assert len(calls) == 3


def test_a_modified_tensor_is_loaded_again(file):
    calls, memory = [], LocalTensorMemory(1000, torch.Tensor.contiguous)
    memory.get(file, loader(calls))["latents"].mul_(2)
    assert torch.equal(memory.get(file, loader(calls))["latents"], torch.ones(4))
    assert len(calls) == 2


def test_writes_are_noticed_in_inference_mode_too(file):
    calls, memory = [], LocalTensorMemory(1000, torch.Tensor.contiguous)
    with torch.inference_mode():
        memory.get(file, loader(calls))
        memory.get(file, loader(calls))["latents"].mul_(2)
        assert len(calls) == 1
        assert torch.equal(memory.get(file, loader(calls))["latents"], torch.ones(4))
    assert len(calls) == 2


def test_the_oldest_file_is_dropped_to_stay_in_the_budget(tmp_path):
    calls, memory = [], LocalTensorMemory(50, torch.Tensor.contiguous)
    files = [str(tmp_path / name) for name in "abc"]
    for path in files:
        with open(path, "w") as out:
            out.write("x")
        memory.get(path, loader(calls))
    assert memory.nbytes == 48
    memory.get(files[2], loader(calls))
    assert len(calls) == 3
    memory.get(files[0], loader(calls))
    assert len(calls) == 4
    small = LocalTensorMemory(10, torch.Tensor.contiguous)
    small.get(files[0], loader(calls))
    assert small.nbytes == 0


def test_a_missing_file_raises_the_loaders_error(tmp_path):
    memory = LocalTensorMemory(100, torch.Tensor.contiguous)

    def missing(path):
        raise FileNotFoundError(path)

    with pytest.raises(FileNotFoundError):
        memory.get(str(tmp_path / "no.pt"), missing)
