"""Plot `results/lora_quality.json`: held-out losses by step, and gradient cosines by block.

python benchmarks/lora_quality_plots.py [--results FOLDER] [--out FOLDER] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import results
from curves import draw_curves

if TYPE_CHECKING:
    from collections.abc import Mapping

PAIRS = {
    "fp8": ("few.held_out", {"bf16": "bf16", "fp8": "fp8"}, "Wan-shaped model, few stars"),
    "fp8_many": ("many.held_out", {"bf16": "bf16", "fp8": "fp8"}, "Wan-shaped model, many stars"),
    "step": ("few.held_out", {"plain": "fp32 LoRA, autocast", "bf16": "ours"}, "few stars"),
    "demo": ("demo_held_out", {"bf16": "bf16", "fp8": "fp8"}, "the demo's LoRA"),
}
"""For each plot: prefix of its figures in the result file, labels of its curves, title."""
COSINES = {
    "few.cosine.fresh": "fresh LoRA",
    "few.cosine.trained": "trained LoRA",
    "random_14b.cosine": "random 14B blocks",
}


def main() -> None:
    """Draw every plot whose figures are in the result file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder of the file")
    arguments = results.parse_arguments(parser)
    folder, figures = arguments.out, results.read("lora_quality", arguments.results)
    for name, (prefix, labels, title) in PAIRS.items():
        curves = {}
        for precision, label in labels.items():
            curves |= by_seed(figures, f"{prefix}.{precision}.", label)
        if curves:
            path = folder / f"lora_quality_{name}.png"
            draw_curves(curves, path, f"{title}: held-out loss", "optimizer steps")
    cosines = by_block(figures)
    if cosines:
        path = folder / "lora_quality_cosines.png"
        draw_curves(cosines, path, "gradients in fp8 against bf16: cosine", "block", legend="low")


def by_seed(figures: Mapping[str, str], prefix: str, label: str) -> dict[str, dict[int, float]]:
    """Return the held-out losses by step, for each seed."""
    return {
        f"{label}, seed {name.removeprefix(prefix)}": {
            int(step): loss for step, loss in json.loads(text).items()
        }
        for name, text in figures.items()
        if name.startswith(prefix)
    }


def by_block(figures: Mapping[str, str]) -> dict[str, dict[int, float]]:
    """Return the cosines by block of adapter and input gradients, for each entry of COSINES."""
    return {
        f"{label}, {what}": dict(enumerate(json.loads(figures[f"{key}.{what}.fp8_bf16"])))
        for key, label in COSINES.items()
        for what in ("adapter", "input")
        if f"{key}.{what}.fp8_bf16" in figures
    }


if __name__ == "__main__":
    main()
