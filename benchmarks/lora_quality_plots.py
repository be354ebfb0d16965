"""Pictures of `results/lora_quality.json`: held-out losses by step, and cosines by block.

python benchmarks/lora_quality_plots.py [--results FOLDER]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from curves import draw_curves

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path(__file__).parent / "results"
PAIRS = {
    "fp8": ("few.held_out", {"bf16": "bf16", "fp8": "fp8"}, "Wan-shaped model, few stars"),
    "fp8_many": ("many.held_out", {"bf16": "bf16", "fp8": "fp8"}, "Wan-shaped model, many stars"),
    "step": ("few.held_out", {"plain": "fp32 LoRA, autocast", "bf16": "ours"}, "few stars"),
    "demo": ("demo_held_out", {"bf16": "bf16", "fp8": "fp8"}, "the demo's LoRA"),
}
"""Two ways a picture: where their curves are, and what each is called."""
COSINES = {
    "few.cosine.fresh": "fresh LoRA",
    "few.cosine.trained": "trained LoRA",
    "random_14b.cosine": "random 14B blocks",
}


def main() -> None:
    """Draw what the file has."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=FOLDER, help="where the file is")
    folder = parser.parse_args().results
    figures = json.loads((folder / "lora_quality.json").read_text())["figures"]
    for name, (prefix, ways, title) in PAIRS.items():
        curves = {}
        for way, called in ways.items():
            curves |= by_seed(figures, f"{prefix}.{way}.", called)
        if curves:
            path = folder / f"lora_quality_{name}.png"
            draw_curves(curves, path, f"{title}: held-out loss", "optimizer steps")
    cosines = by_block(figures)
    if cosines:
        path = folder / "lora_quality_cosines.png"
        draw_curves(cosines, path, "gradients in fp8 against bf16: cosine", "block", legend="low")


def by_seed(figures: Mapping[str, str], prefix: str, called: str) -> dict[str, dict[int, float]]:
    """A curve a seed."""
    return {
        f"{called}, seed {name.removeprefix(prefix)}": {
            int(step): loss for step, loss in json.loads(text).items()
        }
        for name, text in figures.items()
        if name.startswith(prefix)
    }


def by_block(figures: Mapping[str, str]) -> dict[str, dict[int, float]]:
    """Six curves: three states, and gradients of adapters and of blocks' inputs."""
    return {
        f"{called}, {what}": dict(enumerate(json.loads(figures[f"{key}.{what}.fp8_bf16"])))
        for key, called in COSINES.items()
        for what in ("adapter", "input")
        if f"{key}.{what}.fp8_bf16" in figures
    }


if __name__ == "__main__":
    main()
