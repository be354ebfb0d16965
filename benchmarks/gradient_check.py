"""Run `gracetune check gradients` on Flux-, Wan- and Qwen-Image-shaped models on a GPU.

The transformers have the published width and fewer blocks, random bf16 weights and a LoRA; a
sample has 4096 image tokens, as 1024x1024 has. The planner gets little device memory, so it streams
and recomputes. Each model is checked eagerly, compiled, and compiled in fp8, and the first two
steps of a training run show what its first-step check costs, within a limit of device memory that
torch enforces. Then races are put back into the copy code (tests/fakes/planted_races.py): the
command must fail, and a run must stop at its first step.

    PYTHONPATH=src:benchmarks python benchmarks/gradient_check.py [--only flux,wan,qwen]
        [--parts eager,compiled,fp8,first_step,races] [--races slot_race,...]
        [--out FOLDER] [--commit NAME] [--rehearse]

Results of models that are not checked are kept, each with its commit.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import numpy as np
import results
import torch
from PIL import Image

from gracetune.cli.main import main as gracetune
from gracetune.train.block_check import KINDS, MAX_ERROR_RATIO

# The miniatures and the races are test code, which is not installed with the package.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes import planted_races
from fakes.miniatures import write_miniature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NUM_IMAGES, RANK = 4, 16
MAX_CHECK_SECONDS = 3.0
"""Largest time that the check of the first step may take."""
HEADS = {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
RACES = ("slot_race", "copy_without_ready", "no_wait_for_copy")


@dataclass(frozen=True)
class Model:
    """A miniature pipeline, and the configuration that makes its transformers wide."""

    miniature: str
    family: str
    edge: int
    """Width and height of the images, in pixels, that give 4096 tokens."""
    config: Mapping[str, Any]
    memory: str
    """Device memory of the plan; too little to keep all blocks there."""
    folders: Sequence[str] = ("transformer",)


MODELS = {
    "flux": Model(
        "flux", "flux", 256, {**HEADS, "num_layers": 4, "num_single_layers": 8}, memory="6GB"
    ),
    "wan": Model(
        "wan22-t2v",
        "wan22",
        1024,
        {
            "num_attention_heads": 40,
            "attention_head_dim": 128,
            "ffn_dim": 13824,
            "freq_dim": 256,
            "rope_max_seq_len": 1024,
            "num_layers": 5,
        },
        memory="8GB",
        folders=("transformer", "transformer_2"),
    ),
    "qwen": Model("qwen-image", "qwen_image", 1024, {**HEADS, "num_layers": 10}, memory="7GB"),
}


def main() -> int:
    """Check every model, and write the results after each part."""
    arguments = parse_arguments()
    figures = results.read("gradient_check", arguments.out)
    passed = True
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            run_file = prepare(MODELS[name], folder, rehearse=arguments.rehearse)
            figures[f"{name}.commit"] = arguments.commit or results.this_commit()
            for part in arguments.parts:
                began = time.perf_counter()
                found, ok = run_part(part, run_file, MODELS[name], arguments)
                passed &= ok
                found["seconds"] = round(time.perf_counter() - began, 1)
                figures |= dict(results.flatten({f"{name}.{part}": found}))
                results.write("gradient_check", figures, arguments.out, arguments.commit)
                shown = {key: value for key, value in found.items() if key != "table"}
                print(f"{name} {part}: {'ok' if ok else 'FAILED'} {shown}", flush=True)
    return 0 if passed else 1


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(MODELS), help="models to check")
    parser.add_argument("--parts", default="eager,compiled,fp8,first_step,races")
    parser.add_argument("--races", default=",".join(RACES), help="races to put back")
    arguments = results.parse_arguments(parser)
    for name in ("only", "parts", "races"):
        setattr(arguments, name, getattr(arguments, name).split(","))
    if arguments.rehearse:
        arguments.parts = [part for part in arguments.parts if part != "fp8"]  # needs a GPU
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs miniatures without one")
    return arguments


def prepare(model: Model, folder: Path, *, rehearse: bool) -> Path:
    """Write the pipeline, the images and the run file; return the run file's path."""
    pipeline = write_miniature(model.miniature, folder / "model")
    edge = 64 if rehearse else model.edge
    if not rehearse:
        for name in model.folders:
            widen(pipeline / name, model.config)
    images = folder / "images"
    images.mkdir()
    random = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        pixels = random.integers(0, 256, (edge, edge, 3), np.uint8)
        Image.fromarray(pixels).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"a red ring on a box {number}")
    settings = {
        "output_dir": str(folder / "run"),
        "model": {"family": model.family, "path": str(pipeline), "dtype": "bfloat16"},
        "adapter": {"rank": RANK},
        "datasets": [{"instance_data_dir": str(images), "resolution": edge, "max_aspect": 1.0}],
        "train": {"max_train_steps": 2, "batch_size": 1, "mixed_precision": "bf16"},
        "logging": {"tensorboard": False, "every": 1},
        "validation": {"every": 0},
        "plan": {"device_memory": "1GB" if rehearse else model.memory, "compile": "never"},
    }
    path = folder / "run.json"
    path.write_text(json.dumps(settings))
    return path


def widen(folder: Path, config: Mapping[str, Any]) -> None:
    """Replace a transformer on disk by a wide one with random bf16 weights, made on the GPU."""
    import diffusers

    old = json.loads((folder / "config.json").read_text())
    cls = getattr(diffusers, old["_class_name"])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        transformer = cls.from_config({**old, **config})
    torch.set_default_dtype(torch.float32)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    transformer.save_pretrained(folder)
    del transformer
    torch.cuda.empty_cache()


def run_part(
    part: str, run_file: Path, model: Model, arguments: argparse.Namespace
) -> tuple[dict[str, Any], bool]:
    """Run one part; return its figures, and True if they are as required."""
    if part == "first_step":
        return first_step(run_file, model, rehearse=arguments.rehearse)
    if part == "races":
        return races(run_file, arguments.races, rehearse=arguments.rehearse)
    overrides = {
        "eager": [],
        "compiled": ["plan.compile=always"],
        "fp8": ["plan.compile=always", "model.frozen_compute=fp8"],
    }[part]
    code, report = check(run_file, overrides)
    blocks = report["blocks"]
    return {
        "blocks": len(blocks),
        "plans": sorted({block["plan"] for block in blocks}),
        "largest_ratio": largest_ratio(report),
        "largest_plain_error": max(b[k]["plain_error"] for b in blocks for k in KINDS),
        "largest_update_error": max(block["update_error"] for block in blocks),
        "smallest_fp8_cosine": min(
            (b[k]["fp8_cosine"] for b in blocks for k in KINDS[1:] if b[k]["fp8_cosine"]),
            default=None,
        ),
        "table": [
            {"block": block["block"], "plan": block["plan"], "update": block["update_error"]}
            | {k: [block[k]["error"], block[k]["plain_error"]] for k in KINDS}
            for block in blocks
        ],
        "notes": report["notes"],
    }, code == 0


def largest_ratio(report: Mapping[str, Any]) -> float:
    """Return the largest error of a run, relative to that of the plain block."""
    pairs = [block[kind] for block in report["blocks"] for kind in KINDS]
    return max(MAX_ERROR_RATIO * pair["error"] / pair["limit"] for pair in pairs)


def check(run_file: Path, overrides: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Run `gracetune check gradients`; return its exit code and its report."""
    words = [word for each in overrides for word in ("--set", each)]
    output = io.StringIO()
    with redirect_stdout(output):
        code = gracetune(["check", "gradients", str(run_file), "--json", *words])
    return code, json.loads(output.getvalue())


def first_step(run_file: Path, model: Model, *, rehearse: bool) -> tuple[dict[str, Any], bool]:
    """Train two steps in limited device memory; return what the first step's check took."""
    folder = Path(json.loads(run_file.read_text())["output_dir"])
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        if not rehearse:
            total = torch.cuda.mem_get_info(0)[1]
            share = float(model.memory.removesuffix("GB")) * 1e9 / total
            torch.cuda.set_per_process_memory_fraction(share, 0)
            stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0, 0)
        code = gracetune(["train", str(run_file), "--resume", "none"])
    events = (folder / "events.jsonl").read_text()
    seconds = [float(s) for s in re.findall(r"checked in ([\d.]+) s", events)]
    skipped = events.count("were not compared with a plain block")
    figures = {"exit_code": code, "check_seconds": seconds, "skipped": skipped}
    is_fast = rehearse or (bool(seconds) and max(seconds) < MAX_CHECK_SECONDS)
    return figures, code == 0 and not skipped and is_fast


def races(run_file: Path, names: Sequence[str], *, rehearse: bool) -> tuple[dict[str, Any], bool]:
    """Put races back and check again; return the exit codes and the largest errors."""
    folder = Path(json.loads(run_file.read_text())["output_dir"])
    found: dict[str, Any] = {}
    for name in RACES[:1] if rehearse else names:
        with getattr(planted_races, name)():
            code, report = check(run_file, [])
            shutil.rmtree(folder, ignore_errors=True)
            train = gracetune(["train", str(run_file), "--resume", "none"])
        found[name] = {
            "exit_code": code,
            "train_exit_code": train,
            "failed_blocks": sum(not block["passed"] for block in report["blocks"]),
            "largest_ratio": largest_ratio(report),
        }
    # A missing wait may go unnoticed if the copy happens to be in time; the slot race may not.
    slot = found["slot_race"]
    return found, rehearse or (slot["exit_code"] == 1 and slot["train_exit_code"] == 1)


if __name__ == "__main__":
    sys.exit(main())
