"""Write a run folder and a cache as fixtures.

    PYTHONPATH=src:tests python tests/golden/write_formats.py tests/data/formats-VERSION

`tests/data/formats` was written by the first version of each format, `tests/data/formats-0.1.0` by
that release. Both stay as they are: they show that later versions still read old files. For a new
release, or when a format gets a new version, write `tests/data/formats-VERSION` and add it to
`FIXTURES` in old_formats.py. Inputs that equal those of the first fixture are left out.

The fixture is a LoRA run of the tiny family, stopped after 4 of 8 steps, with two checkpoints. The
expected results are those of the same run without a stop.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from golden_runs import WRITE, gracetune, machine
from old_formats import (
    CACHE_ARCHIVE,
    DATA,
    EXPECTED,
    FIRST,
    INPUTS,
    STOPPED_AT,
    TOTAL_STEPS,
    outcome,
)

RUN_FILE = {
    "output_dir": "run",
    "seed": 7,
    "model": {"family": "tiny", "path": "model"},
    "adapter": {"rank": 2, "dropout": 0.1, "targets": ["attn.to_q", "attn.to_v", "ff.net.2"]},
    "datasets": [
        {
            "id": "blocks",
            "instance_data_dir": "data/image",
            "mask_data_dir": "data/mask",
            "resolution": 16,
            "max_aspect": 2.0,
            "caption_dropout": 0.2,
            "crop": "random",
            "augmentations": [{"name": "flip"}],
            "variants": 2,
        }
    ],
    "cache_config": {"persistent_cache": True, "cache_dir": "cache"},
    "gh200_optimizations": {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 2,
        "target_effective_batch_size": 6,
        "batch_rampup_steps": 12,
    },
    "train": {
        "max_train_steps": TOTAL_STEPS,
        "batch_size": 2,
        "mixed_precision": "no",
        "ema_decay": 0.9,
        "checkpoint_every": 2,
    },
    "optimizer": {"lr": 0.001, "warmup_steps": 6},
    "logging": {"tensorboard": False, "every": 1},
    "validation": {"every": 0},
}


def main(folder: Path) -> None:
    """Train to the end elsewhere for the expected results, then train the fixture's half."""
    _write_inputs(folder)
    with tempfile.TemporaryDirectory() as elsewhere:
        whole = Path(elsewhere) / "whole"
        shutil.copytree(folder, whole)
        gracetune("train", "run.json", cwd=whole)
        expected = {"machine": machine(), **outcome(whole / "run")}
    (folder / EXPECTED).write_text(json.dumps(expected, indent=2) + "\n")
    stop = f"train.max_train_steps={STOPPED_AT}"
    gracetune("train", "run.json", "--set", stop, cwd=folder)
    with tarfile.open(folder / CACHE_ARCHIVE, "w:gz") as archive:
        archive.add(folder / "cache", "cache", filter=_anonymous)
    shutil.rmtree(folder / "cache")
    _remove_derived(folder)


def _remove_derived(folder: Path) -> None:
    """Remove inputs that the first fixture has, and outputs that are copies of other files."""
    if folder.name == FIRST:
        return
    for name in INPUTS:
        first, ours = DATA / FIRST / name, folder / name
        pairs = [(f, ours / f.relative_to(first)) for f in sorted(first.rglob("*")) if f.is_file()]
        if not all(a.read_bytes() == b.read_bytes() for a, b in pairs or [(first, ours)]):
            sys.exit(f"{ours} differs from {first}. Add it to the fixture, and to `unpack`.")
        shutil.rmtree(ours) if ours.is_dir() else ours.unlink()
    log = folder / "run" / "events.jsonl"
    log.write_text(re.sub(r'"host": "[^"]*"', '"host": "host"', log.read_text()))
    for pattern in ("run/adapters", "run/adapter", "run/.lock", "run/now", "run/last_seen.json"):
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_inputs(folder: Path) -> None:
    """Write the run file, the images and the smallest model that the tiny family loads."""
    WRITE["image"](folder / "data")
    shutil.rmtree(folder / "data" / "control")
    torch.manual_seed(0)
    SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=48,
        out_channels=48,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=1,
        joint_attention_dim=64,
        caption_projection_dim=8,
        pooled_projection_dim=64,
        pos_embed_max_size=8,
    ).save_pretrained(folder / "model" / "transformer")
    (folder / "run.json").write_text(json.dumps(RUN_FILE, indent=2) + "\n")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(Path(sys.argv[1]))
