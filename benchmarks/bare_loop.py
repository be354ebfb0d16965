"""Measure how much slower a trainer step is than a step of a minimal training loop.

The trainer and the loop use the same model, batches and arithmetic, and alternate in one process,
so that a noisy machine disturbs both alike. The result is the median ratio of neighbouring turns.

    python benchmarks/bare_loop.py [--turns 8] [--steps 40] [--write] [--rehearse]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import results
import torch

from gracetune.config.load import load_run_file
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.log import JsonlLog
from gracetune.events.run_control import RunControl
from gracetune.events.types import StepDone
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.loop import train_loop
from gracetune.train.run import SignalHandler, open_trackers
from gracetune.train.step import TrainProgress

ROOT = Path(__file__).parent.parent


def bare_loop(model, batches, steps: int) -> float:
    """Train with a minimal loop; return the seconds per step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    averages = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.99), fused=True)
    generator = torch.Generator().manual_seed(0)
    started = time.perf_counter()
    for step in range(steps):
        x0, text = batches[step % len(batches)]
        timesteps = torch.randn(len(x0), generator=generator).sigmoid()
        noise = torch.randn(x0.shape, generator=generator)
        sigma = timesteps.view(-1, 1, 1, 1)
        predicted = model(
            (1 - sigma) * x0 + sigma * noise,
            encoder_hidden_states=text["tokens"],
            pooled_projections=text["pooled"],
            timestep=timesteps * 1000,
            return_dict=False,
        )[0]
        loss = torch.nn.functional.mse_loss(predicted, noise - x0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 0.005)
    return (time.perf_counter() - started) / steps


class StepTimes:
    """An event sink that collects the seconds of each step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def handle(self, event: object) -> None:
        if isinstance(event, StepDone):
            self.steps.append(event.seconds)

    def close(self) -> None:
        pass


def measure(num_turns: int, steps: int, folder: Path) -> list[tuple[float, float]]:
    """Return the seconds per step of (trainer, minimal loop) for each turn."""
    run = load_run_file(
        ROOT / "examples" / "demo.json",
        [
            f"output_dir={folder}",
            f"datasets.0.instance_data_dir={folder / 'data'}",
            "validation.every=0",
            "optimizer.schedule=constant",
            "train.checkpoint_every=0",
        ],
        environment={},
    ).run
    times = StepTimes()
    sinks = [times, JsonlLog(folder / "events.jsonl"), *open_trackers(run, folder, 0)]
    with EventDispatcher(sinks) as events:
        session = build_session(
            run, start_accelerator(run), events.emit, RunControl(folder), SignalHandler()
        )
        batches = [session.pipeline.load(session.pipeline.order.batch_at(i)) for i in range(steps)]
        pairs = [(batch.latents, batch.text) for batch in batches]
        bare_model = type(session.state.family.transformer)(
            **{k: v for k, v in session.state.family.transformer.config.items() if k[0] != "_"}
        )
        progress, pairs_of_seconds = TrainProgress(), []
        for turn in range(num_turns + 1):
            train = run.train.model_copy(update={"max_train_steps": (turn + 1) * steps})
            state = replace(session.state, run=run.model_copy(update={"train": train}))
            times.steps.clear()
            progress = train_loop(replace(session, state=state), progress)
            ours = statistics.mean(times.steps)
            pairs_of_seconds.append((ours, bare_loop(bare_model, pairs, steps)))
    return pairs_of_seconds[1:]  # the first turn is warm-up


def main() -> None:
    """Measure and print; with `--write`, also write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="write results/bare_loop.json")
    args = results.parse_arguments(parser)
    if args.rehearse:
        args.turns, args.steps = 1, 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(args.turns, args.steps, Path(folder))
    figures = {
        "trainer_over_bare_loop": statistics.median(ours / bare for ours, bare in pairs),
        "trainer_ms_a_step": 1000 * statistics.median(ours for ours, _ in pairs),
        "bare_ms_a_step": 1000 * statistics.median(bare for _, bare in pairs),
        "turns": len(pairs),
    }
    for name, value in figures.items():
        print(f"{name:<24} {value:.4g}")
    if args.write or args.rehearse:
        results.write("bare_loop", figures, args.out, args.commit)


if __name__ == "__main__":
    main()
