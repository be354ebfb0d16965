"""Compare loading a cached tensor through our SimpleTuner plug-in with SimpleTuner's own loader.

Measures repeated loads of a file with `LocalDataBackend.torch_load`: as the only rank of a machine,
and as a second rank that maps the memory of the first. Run it in SimpleTuner's environment:

    PYTHONPATH=src .hosts/simpletuner/bin/python benchmarks/simpletuner_cache.py --write

A rehearsal needs no SimpleTuner: a stand-in has the methods of its loader.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from importlib import import_module
from pathlib import Path

import results
import torch

from gracetune.hosts.simpletuner.hooks import LOCAL, backend_class
from gracetune.hosts.simpletuner.plugin import SimpleTunerPlugin
from gracetune.memory.platform import open_machine

SHAPES = {
    "text_4_mib": {"prompt_embeds": (1, 512, 4096)},
    "latent_512_kib": {"latents": (16, 128, 128)},
}
"""Shapes in bf16: a T5 embedding, and the latents of a large image."""
REHEARSED_SHAPES = {"latent_4_kib": {"latents": (16, 8, 16)}}
ROUNDS = 50


def main() -> None:
    """Time SimpleTuner's loader and ours, and check that they return the same tensors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the results to results/")
    args = results.parse_arguments(parser)
    local = FileBackend if args.rehearse else import_module(LOCAL).LocalDataBackend
    sizes = REHEARSED_SHAPES if args.rehearse else SHAPES
    stock = local(accelerator=None, id="stock")
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        alone = plugged({}, Path(folder))
        loading, mapping = (plugged({"LOCAL_WORLD_SIZE": "2"}, Path(folder)) for _ in range(2))
        backends = [backend_class(each, local)(None, "ours") for each in (alone, loading, mapping)]
        for name, shapes in sizes.items():
            path = str(Path(folder) / f"{name}.pt")
            tensors = {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}
            stock.write(path, tensors)
            before = timed(stock.torch_load, path)
            after, _, mapped = (timed(each.torch_load, path) for each in backends)
            for key, tensor in tensors.items():
                assert all(torch.equal(each.torch_load(path)[key], tensor) for each in backends)
            figures[name] = {
                "stock_us": round(before * 1e6, 1),
                "ours_us": round(after * 1e6, 1),
                "times_faster": round(before / after, 1),
                "mapped_us": round(mapped * 1e6, 1),
                "times_faster_mapped": round(before / mapped, 1),
            }
        assert mapping.memory is not None
        assert mapping.memory.misses == 0, "the second rank has loaded something itself"
    for name, found in results.flatten(figures):
        print(f"{name}: {found}")
    if args.write or args.rehearse:
        results.write("simpletuner_cache", figures, args.out, args.commit)


class FileBackend:
    """A stand-in for SimpleTuner's LocalDataBackend that loads and writes tensor files."""

    def __init__(self, accelerator: object, id: str, compress_cache: bool = False) -> None:
        """Take the arguments of SimpleTuner's class."""

    def write(self, filepath: str, data: object) -> None:
        """Write tensors to a file."""
        torch.save(data, filepath)

    def exists(self, filepath: str) -> bool:
        """Return True if the file exists."""
        return Path(filepath).exists()

    def torch_load(self, filename: str) -> object:
        """Load the tensors of a file."""
        return torch.load(filename, weights_only=True)


def plugged(environment: dict[str, str], folder: Path) -> SimpleTunerPlugin:
    """Return the plug-in of one rank, configured to keep cache files in memory."""
    plugin = SimpleTunerPlugin(environment, open_machine, torch.Tensor.contiguous, folder / "meet")
    plugin.split_config({"cache_config": {"vae_cache_type": "memory", "host_budget_gb": 1}})
    return plugin


def timed(load: object, path: str) -> float:
    """Return the median seconds of loading a file again; the first load is not counted."""
    assert callable(load)
    load(path)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        load(path)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
