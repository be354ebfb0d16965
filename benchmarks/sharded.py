"""Measure how much slower a trainer step with FSDP2 is than a step of a minimal FSDP2 loop.

Two ranks on the CPU, over gloo, divide the demo's model. The trainer and the loop use the same
model and batches, and alternate in the same processes, so that a noisy machine disturbs both alike.
The loop is what torch's tutorial shows: `fully_shard` for each block and the whole model, AdamW and
clipping on DTensors. The result is the median ratio of neighbouring turns, in seconds and in
seconds of CPU time, which other processes on the machine disturb less.

    python benchmarks/sharded.py [--turns 24] [--steps 10] [--out FOLDER] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import results
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.fsdp import fully_shard

from gracetune.config.load import load_run_file
from gracetune.distributed.layout import build_layout
from gracetune.distributed.ranks import connect_ranks
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.log import JsonlLog
from gracetune.events.run_control import RunControl
from gracetune.events.types import StepDone
from gracetune.models.family import load_family
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.loop import train_loop
from gracetune.train.run import SignalHandler
from gracetune.train.step import TrainProgress

ROOT = Path(__file__).parent.parent
RANKS = 2
LOG_EVERY = 5
"""Steps between two log entries; the steps of a turn are a multiple of it."""
LIMIT = 1.05
"""Largest accepted ratio of the trainer's step to that of the loop."""


class BareLoop:
    """A minimal FSDP2 loop."""

    def __init__(self, run, batches) -> None:
        family = load_family(run.model)
        for block in family.blocks():
            fully_shard(block)
        self._model = fully_shard(family.transformer)
        self._model.requires_grad_(True)
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=2e-3, betas=(0.9, 0.99), fused=True
        )
        self._batches = batches
        self._generator = torch.Generator().manual_seed(0)

    def train(self, steps: int) -> tuple[float, float]:
        """Train; return the seconds per step, and those of CPU time."""
        started = time.perf_counter(), time.process_time()
        for step in range(steps):
            x0, text = self._batches[step % len(self._batches)]
            timesteps = torch.randn(len(x0), generator=self._generator).sigmoid()
            noise = torch.randn(x0.shape, generator=self._generator)
            sigma = timesteps.view(-1, 1, 1, 1)
            predicted = self._model(
                (1 - sigma) * x0 + sigma * noise,
                encoder_hidden_states=text["tokens"],
                pooled_projections=text["pooled"],
                timestep=timesteps * 1000,
                return_dict=False,
            )[0]
            loss = torch.nn.functional.mse_loss(predicted, noise - x0)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                loss.item()
        ended = time.perf_counter(), time.process_time()
        return (ended[0] - started[0]) / steps, (ended[1] - started[1]) / steps


class StepTimes:
    """An event sink that measures the time between the first and the last log entry of a turn."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, float]] = []

    def handle(self, event: object) -> None:
        if isinstance(event, StepDone) and event.step % LOG_EVERY == 0:
            self.entries.append((time.perf_counter(), time.process_time()))

    def close(self) -> None:
        pass

    def per_step(self) -> tuple[float, float]:
        """Return the seconds per step, and those of CPU time."""
        first, last = self.entries[0], self.entries[-1]
        steps = LOG_EVERY * (len(self.entries) - 1)
        return (last[0] - first[0]) / steps, (last[1] - first[1]) / steps


def measure(folder: Path, num_turns: int, steps: int) -> list[dict[str, tuple[float, float]]]:
    """Train as one rank; return the times of the trainer and of the loop for each turn."""
    run = load_run_file(
        ROOT / "examples" / "demo.json",
        [
            f"output_dir={folder / 'run'}",
            f"datasets.0.instance_data_dir={folder / 'data'}",
            "distributed.strategy=fsdp2",
            "validation.every=0",
            "optimizer.schedule=constant",
            "train.checkpoint_every=0",
            "train.ema_decay=0",
            "train.keep_checkpoints=1",
            f"logging.every={LOG_EVERY}",
        ],
        environment={},
    ).run
    (folder / "run").mkdir(exist_ok=True)
    accelerator = start_accelerator(run)
    layout = build_layout(run.distributed, connect_ranks(run.distributed.timeout_s))
    times, turns = StepTimes(), []
    sinks = [times, JsonlLog(folder / f"events-{layout.ranks.rank}.jsonl")]
    with EventDispatcher(sinks) as events:
        control = RunControl(folder)
        session = build_session(
            run, accelerator, events.emit, control, SignalHandler(), layout=layout
        )
        own = range(layout.data_rank, steps * layout.data_size, layout.data_size)
        batches = [session.pipeline.load(session.pipeline.order.batch_at(i)) for i in own]
        bare = BareLoop(run, [(batch.latents, batch.text) for batch in batches])
        progress = TrainProgress()
        for turn in range(num_turns + 1):
            # More steps than the loop has: those before the first log entry are not counted.
            total = (turn + 1) * (steps + LOG_EVERY)
            train = run.train.model_copy(update={"max_train_steps": total})
            state = replace(session.state, run=run.model_copy(update={"train": train}))
            times.entries.clear()
            progress = train_loop(replace(session, state=state), progress)
            dist.barrier()
            turns.append({"trainer": times.per_step(), "bare": bare.train(steps)})
            dist.barrier()
        session.close()
    accelerator.end_training()
    return turns[1:]  # the first turn is warm-up


def start_ranks(folder: Path, arguments: argparse.Namespace) -> list[list[dict[str, list[float]]]]:
    """Run a process for each rank, and return the times of each."""
    words = [__file__, "--worker", str(folder)]
    words += ["--turns", str(arguments.turns), "--steps", str(arguments.steps)]
    os.environ["OMP_NUM_THREADS"] = "1"
    run_ranks(words, RANKS, timeout_s=3000)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def main() -> int:
    """Measure on two ranks, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = results.parse_arguments(parser)
    if arguments.worker:
        torch.set_num_threads(1)
        turns = measure(arguments.worker, arguments.turns, arguments.steps)
        file = arguments.worker / f"rank-{os.environ['RANK']}.json"
        file.write_text(json.dumps(turns))
        return 0
    if arguments.rehearse:
        arguments.turns, arguments.steps = 1, LOG_EVERY
    with tempfile.TemporaryDirectory() as folder:
        turns = [turn for rank in start_ranks(Path(folder), arguments) for turn in rank]
    ratios = [
        statistics.median(turn["trainer"][kind] / turn["bare"][kind] for turn in turns)
        for kind in (0, 1)
    ]
    figures = {
        "trainer_over_bare_loop": ratios[0],
        "trainer_over_bare_loop_cpu_time": ratios[1],
        "trainer_ms_a_step": 1000 * statistics.median(turn["trainer"][0] for turn in turns),
        "bare_ms_a_step": 1000 * statistics.median(turn["bare"][0] for turn in turns),
        "ranks": RANKS,
        "turns": arguments.turns,
        "steps_a_turn": arguments.steps,
    }
    for name, value in figures.items():
        print(f"{name:<32} {value:.4g}")
    results.write("sharded", figures, arguments.out, arguments.commit)
    return 0 if ratios[0] <= LIMIT or arguments.rehearse else 1


if __name__ == "__main__":
    raise SystemExit(main())
