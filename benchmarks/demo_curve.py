"""Train the demo's adapter and print its loss on held-out images by step, as JSON.

    PYTHONPATH=src python benchmarks/demo_curve.py MODEL [--seed 0] [--compute bf16|fp8] [--steps N]
        [--rehearse]

The held-out images are the same for every seed: the stars of the training images, drawn with other
positions and sizes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import results
import torch

from gracetune.config.load import load_run_file
from gracetune.data.batch_order import Loader
from gracetune.data.demo_dataset import draw, training_combinations
from gracetune.data.sample import Batch, Sample
from gracetune.events.run_control import RunControl
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.loop import train_loop
from gracetune.train.run import SignalHandler
from gracetune.train.step import TrainProgress, mark_last, train_step
from gracetune.train.validate import held_out_loss

if TYPE_CHECKING:
    from gracetune.events.types import Event
    from gracetune.models.family import Family
    from gracetune.train.build import Session

EXAMPLES = Path(__file__).parent.parent / "examples"
REHEARSED_SETTINGS = ["optimizer.warmup_steps=0", "datasets.0.shapes.copies=1"]
"""Settings for rehearsals, whose few steps are shorter than the example's warm-up."""
EVERY = 25
PIXELS = 24
COPIES = range(100, 112)
"""Copy numbers of the held-out images; the example trains on lower numbers."""


def main() -> None:
    """Train, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="folder of the demo's model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compute", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--steps", type=int, default=500)
    arguments = results.parse_arguments(parser)
    settings: list[str] = []
    if arguments.rehearse:
        arguments.model, arguments.steps = write_demo_model(arguments.out / "demo"), 2
        settings = REHEARSED_SETTINGS
    if arguments.model is None:
        parser.error("MODEL: give the folder of the demo's model (`make demo`), or --rehearse")
    messages: list[str] = []

    def emit(event: Event) -> None:
        messages.append(str(event))

    with tempfile.TemporaryDirectory() as folder:
        run = load_run_file(
            EXAMPLES / "demo-lora.json",
            [
                f"output_dir={folder}",
                f"datasets.0.instance_data_dir={folder}/data",
                f"model.path={arguments.model}",
                f"model.frozen_compute={arguments.compute}",
                f"seed={arguments.seed}",
                f"train.max_train_steps={arguments.steps}",
                "train.ema_decay=0",
                *settings,
            ],
            environment={},
        ).run
        requests = RunControl(Path(folder))
        built = build_session(run, start_accelerator(run), emit, requests, SignalHandler())
        curve = train_and_evaluate(built, arguments.steps)
        built.close()
    about_fp8 = [line for line in messages if "fp8" in line]
    print(json.dumps({"curve": curve, "told": about_fp8}))


def write_demo_model(folder: Path) -> Path:
    """Train the demo's model for one step, for rehearsals; return the folder of the model."""
    run = load_run_file(
        EXAMPLES / "demo.json",
        [
            f"output_dir={folder}",
            f"datasets.0.instance_data_dir={folder}/data",
            "datasets.0.shapes.copies=1",
            "train.max_train_steps=1",
            "optimizer.warmup_steps=0",
            "validation.every=0",
        ],
        environment={},
    ).run
    folder.mkdir()
    with closing(
        build_session(
            run, start_accelerator(run), lambda _: None, RunControl(folder), SignalHandler()
        )
    ) as session:
        train_loop(session, TrainProgress())
        return session.export().path


def train_and_evaluate(session: Session, steps: int) -> dict[int, float]:
    """Train, and evaluate the held-out loss every `EVERY` steps."""
    held = held_out_batch(session.state.family, session.state.accelerator.device)
    batches = iter(Loader(session.pipeline.order, session.pipeline.load))

    @torch.no_grad()
    def evaluate() -> float:
        return held_out_loss(session.state, [held])[0]["held_out"]

    curve = {0: evaluate()}
    for step in range(steps):
        batch, _ = next(batches)
        train_step(session.state, mark_last([batch]), 1, TrainProgress(step))
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            curve[step + 1] = evaluate()
    return curve


def held_out_batch(family: Family, device: torch.device) -> Batch:
    """Draw the held-out images and encode them with the family."""
    figures = [(figure, copy) for copy in COPIES for figure in training_combinations("star")]
    images = np.stack([np.asarray(draw(figure, PIXELS, copy, 0)) for figure, copy in figures])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    captions = [figure.caption for figure, _ in figures]
    text = family.stack_text(family.encode_text(captions))
    samples = tuple(
        Sample("held out", f"{index}", caption, "", PIXELS, PIXELS)
        for index, caption in enumerate(captions)
    )
    moved = {name: tensor.to(device) for name, tensor in text.items()}
    return Batch(family.encode(pixels).to(device), moved, samples)


if __name__ == "__main__":
    main()
