"""Automagic without a rate beside AdamW at three, on the demo's adapter.

Every run is `examples/demo-lora.json` with another optimizer, from the same weights, with the same
batches and noise. What is compared is the loss on samples that nobody trains on, at fixed levels
and with fixed noise. The claim: Automagic needs at most 25 % more steps to be as good as the best
AdamW is at its end.

    python benchmarks/automagic.py [--steps 500] [--write]

Needs the demo's model (`make demo`).
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

from gracetune.config.load import load_run_file
from gracetune.data.loader import Loader
from gracetune.events.run_control import RunControl
from gracetune.train.build import build_session, start_accelerator
from gracetune.train.run import SignalHandler
from gracetune.train.step import TrainProgress
from gracetune.train.step import losses_given_noise, train_step

if TYPE_CHECKING:
    from gracetune.train.build import Session

ROOT = Path(__file__).parent.parent
RATES = (1e-3, 3e-3, 1e-2)
"""The demo's own, and about three times less and more."""
ALLOWED = 1.25
EVERY = 25
DRAWS = 4
"""How often each held-out sample is measured, each time at another level."""


def train(steps: int, settings: list[str]) -> tuple[dict[int, float], list[float]]:
    """One run: the held-out loss by step, and the learning rate of every step."""
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
        with open(Path(folder) / "told", "w") as told:
            session = build_session(
                run,
                accelerator,
                lambda event: print(event, file=told),
                RunControl(Path(folder)),
                SignalHandler(),
            )
        return follow(session, steps)


def follow(session: Session, steps: int) -> tuple[dict[int, float], list[float]]:
    """Train, and look every now and then."""
    batches = iter(Loader(session.pipeline.order, session.pipeline.load, 0, 1, 0))
    losses, rates = {0: held_out(session)}, []
    for step in range(steps):
        batch, _ = next(batches)
        result = train_step(session.state, [batch], 1, TrainProgress(step, step))
        rates.append(float(result.lr))
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            losses[step + 1] = held_out(session)
    return losses, rates


@torch.no_grad()
def held_out(session: Session) -> float:
    """The mean loss over evenly spread levels, with noise that never changes."""
    total, count = 0.0, 0
    for draw in range(DRAWS):
        for index, batch in enumerate(session.validation.held_out):
            generator = torch.Generator().manual_seed(1000 * draw + index)
            noise = torch.randn(batch.latents.shape, generator=generator)
            levels = torch.arange(len(batch)) + torch.rand(len(batch), generator=generator)
            losses = losses_given_noise(session.state, batch, levels / len(batch), noise)
            total, count = total + float(losses.sum()), count + len(batch)
    return total / count


def first_below(losses: dict[int, float], goal: float) -> float | None:
    """The step at which a curve first is at the goal, between two that were measured."""
    earlier = None
    for step, loss in losses.items():
        if loss <= goal:
            if earlier is None:
                return float(step)
            before, at = earlier
            return before + (step - before) * (at - goal) / (at - loss)
        earlier = (step, loss)
    return None


def main() -> None:
    """Train all, compare, and write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--write", action="store_true", help="write results/automagic.{json,png}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = ROOT / "runs" / "demo" / "model"
    if not base.is_dir():
        parser.error(f"{base} is not there; make it with `make demo`.")
    model = f"model.path={base}"
    curves, ends = {}, {}
    for rate in RATES:
        name = f"AdamW, {rate:g}"
        curves[name], _ = train(args.steps, [model, "optimizer.name=adamw", f"optimizer.lr={rate}"])
        ends[name] = curves[name][args.steps]
        print(f"{name:<20} {ends[name]:.5f} after {args.steps} steps", flush=True)
    best = min(ends, key=ends.__getitem__)
    allowed = round(ALLOWED * args.steps)
    found = {}
    for steps in (args.steps, allowed):
        name = f"Automagic, {steps} steps"
        curves[name], rates = train(steps, [model, "optimizer.name=automagic", "optimizer.lr=null"])
        ends[name] = curves[name][steps]
        found[name] = rates[steps // 2]
        print(f"{name:<20} {ends[name]:.5f}; half-way its rate was {found[name]:.2e}", flush=True)
    reached = first_below(curves[f"Automagic, {allowed} steps"], ends[best])
    figures = {
        "steps": args.steps,
        "best_adamw": best,
        "held_out_loss_at_the_end": ends,
        "automagic_rate_half_way": found,
        "automagic_reaches_best_adamw_at_step": reached,
        "automagic_steps_over_best_adamw": None if reached is None else reached / args.steps,
        "held_out_loss": {name: json.dumps(curve) for name, curve in curves.items()},
    }
    print(f"best: {best}; Automagic is there at step {reached} of {allowed} allowed")
    if args.write:
        path = results.write("automagic", figures)
        draw_curves(curves, path.with_suffix(".png"), "loss on samples held out", "optimizer steps")


if __name__ == "__main__":
    main()
