"""Compare Automagic, which finds its learning rates itself, with AdamW at three rates.

Every run is `examples/demo-lora.json` with another optimizer, from the same weights, with the same
batches and noise. The measure is the loss on held-out samples, at fixed timesteps and with fixed
noise. The goal: Automagic needs at most 25 % more steps to reach the final loss of the best AdamW.

    python benchmarks/automagic.py [--steps 500] [--write] [--rehearse]

Needs the demo's model (`make demo`), except in a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import results
import torch
from curves import draw_curves
from demo_curve import REHEARSED_SETTINGS, write_demo_model

from gracetune.config.load import load_run_file
from gracetune.data.batch_order import Loader
from gracetune.events.run_control import RunControl
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.run import SignalHandler
from gracetune.train.step import TrainProgress, losses_given_noise, mark_last, train_step

if TYPE_CHECKING:
    from gracetune.train.build import Session

ROOT = Path(__file__).parent.parent
ADAMW_RATES = (1e-3, 3e-3, 1e-2)
"""The demo's learning rate (3e-3), and about a third and three times of it."""
MAX_STEP_RATIO = 1.25
EVALUATE_EVERY = 25
EVALUATIONS_PER_SAMPLE = 4
"""Losses measured for each held-out sample, each at another timestep."""


def train(steps: int, settings: list[str]) -> tuple[dict[int, float], list[float]]:
    """Train one run; return held-out losses by step, and the learning rate of every step."""
    with tempfile.TemporaryDirectory() as folder:
        run = load_run_file(
            ROOT / "examples" / "demo-lora.json",
            [
                f"output_dir={folder}",
                f"datasets.0.instance_data_dir={folder}/data",
                f"train.max_train_steps={steps}",
                "train.ema_decay=0",
                "validation.holdout=0.1",
                *settings,
            ],
            environment={},
        ).run
        accelerator = start_accelerator(run)
        with open(Path(folder) / "events.txt", "w") as events:
            session = build_session(
                run,
                accelerator,
                lambda event: print(event, file=events),
                RunControl(Path(folder)),
                SignalHandler(),
            )
        return train_and_evaluate(session, steps)


def train_and_evaluate(session: Session, steps: int) -> tuple[dict[int, float], list[float]]:
    """Train, and evaluate every `EVALUATE_EVERY` steps."""
    batches = iter(Loader(session.pipeline.order, session.pipeline.load))
    losses, rates = {0: held_out_loss(session)}, []
    for step in range(steps):
        batch, _ = next(batches)
        result = train_step(session.state, mark_last([batch]), 1, TrainProgress(step))
        rates.append(float(result.lr))
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
            losses[step + 1] = held_out_loss(session)
    return losses, rates


@torch.no_grad()
def held_out_loss(session: Session) -> float:
    """Return the mean loss on the held-out samples, at evenly spread timesteps with fixed noise."""
    total, count = 0.0, 0
    for repetition in range(EVALUATIONS_PER_SAMPLE):
        for index, batch in enumerate(session.validation.held_out):
            generator = torch.Generator().manual_seed(1000 * repetition + index)
            noise = torch.randn(batch.latents.shape, generator=generator)
            sigmas = torch.arange(len(batch)) + torch.rand(len(batch), generator=generator)
            losses = losses_given_noise(session.state, batch, sigmas / len(batch), noise)
            total, count = total + float(losses.sum()), count + len(batch)
    return total / count


def first_below(losses: dict[int, float], goal: float) -> float | None:
    """Return the step at which a curve first reaches the goal, interpolated between evaluations."""
    previous = None
    for step, loss in losses.items():
        if loss <= goal:
            if previous is None:
                return float(step)
            previous_step, previous_loss = previous
            share = (previous_loss - goal) / (previous_loss - loss)
            return previous_step + (step - previous_step) * share
        previous = (step, loss)
    return None


def main() -> None:
    """Train all runs, compare them, and write the results with --write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--write", action="store_true", help="write results/automagic.{json,png}")
    args = results.parse_arguments(parser)
    torch.set_num_threads(1)
    base = ROOT / "runs" / "demo" / "model"
    if args.rehearse:
        args.steps, base = 4, write_demo_model(args.out / "demo")
    if not base.is_dir():
        parser.error(f"{base} does not exist. Create it with `make demo`.")
    common = [f"model.path={base}", *(REHEARSED_SETTINGS if args.rehearse else ())]
    curves, final_losses = {}, {}
    for rate in ADAMW_RATES:
        name = f"AdamW, {rate:g}"
        adamw = ["optimizer.name=adamw", f"optimizer.lr={rate}"]
        curves[name], _ = train(args.steps, [*common, *adamw])
        final_losses[name] = curves[name][args.steps]
        print(f"{name:<20} {final_losses[name]:.5f} after {args.steps} steps", flush=True)
    best = min(final_losses, key=final_losses.__getitem__)
    max_steps = round(MAX_STEP_RATIO * args.steps)
    rates_half_way = {}
    for steps in (args.steps, max_steps):
        name = f"Automagic, {steps} steps"
        automagic = ["optimizer.name=automagic", "optimizer.lr=null"]
        curves[name], rates = train(steps, [*common, *automagic])
        final_losses[name] = curves[name][steps]
        rates_half_way[name] = rates[steps // 2]
        print(
            f"{name:<20} {final_losses[name]:.5f}; "
            f"learning rate half-way: {rates_half_way[name]:.2e}",
            flush=True,
        )
    reached = first_below(curves[f"Automagic, {max_steps} steps"], final_losses[best])
    figures = {
        "steps": args.steps,
        "best_adamw": best,
        "held_out_loss_at_the_end": final_losses,
        "automagic_rate_half_way": rates_half_way,
        "automagic_reaches_best_adamw_at_step": reached,
        "automagic_steps_over_best_adamw": None if reached is None else reached / args.steps,
        "held_out_loss": {name: json.dumps(curve) for name, curve in curves.items()},
    }
    print(f"best: {best}; Automagic reaches it at step {reached}, at most {max_steps} allowed")
    if args.write or args.rehearse:
        path = results.write("automagic", figures, args.out, args.commit)
        draw_curves(curves, path.with_suffix(".png"), "loss on held-out samples", "optimizer steps")


if __name__ == "__main__":
    main()
