"""A cache hit through the plug-in against SimpleTuner's own `LocalDataBackend.torch_load`.

Warm, in one process, with the real classes. Run it in SimpleTuner's environment:

    PYTHONPATH=src .hosts/simpletuner/bin/python benchmarks/simpletuner_cache.py --write
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

from gracetune.hosts.simpletuner.hooks import backend_class
from gracetune.hosts.simpletuner.needs import LOCAL
from gracetune.hosts.simpletuner.plugin import Plugin
from gracetune.memory.machine import open_machine

SHAPES = {
    "text_4_mib": {"prompt_embeds": (1, 512, 4096)},
    "latent_512_kib": {"latents": (16, 128, 128)},
}
"""bf16: a T5 embedding, and the latents of a large picture."""
ROUNDS = 50


def main() -> None:
    """Time both, compare what they give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")
    args = parser.parse_args()
    local = import_module(LOCAL).LocalDataBackend
    plugin = Plugin({}, open_machine, torch.Tensor.contiguous)
    plugin.take_config({"cache_config": {"vae_cache_type": "memory", "host_budget_gb": 1}})
    stock = local(accelerator=None, id="stock")
    ours = backend_class(plugin, local)(accelerator=None, id="ours")
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, shapes in SHAPES.items():
            path = str(Path(folder) / f"{name}.pt")
            tensors = {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}
            stock.write(path, tensors)
            before, after = timed(stock.torch_load, path), timed(ours.torch_load, path)
            for key, tensor in tensors.items():
                assert torch.equal(ours.torch_load(path)[key], tensor), key
            figures[name] = {
                "stock_us": round(before * 1e6, 1),
                "ours_us": round(after * 1e6, 1),
                "times_faster": round(before / after, 1),
            }
    for name, found in results.flatten(figures):
        print(f"{name}: {found}")
    if args.write:
        results.write("simpletuner_cache", figures)


def timed(load: object, path: str) -> float:
    """The median hit; the first load is not counted."""
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
