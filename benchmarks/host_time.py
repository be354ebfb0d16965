"""Measure the CPU time of a training step, of `gracetune train` and of the tuned loop.

The CPU launches the kernels of a step. Small models and small batches wait for it. Flux with all 57
blocks, but with a width of 32, has the CPU work of FLUX.1 and hardly anything to compute, so it can
be measured without a GPU. The tuned loop is diffusers' transformer with peft's LoRA, compiled by
`compile_repeated_blocks()` or eager with gradient checkpointing, and fused AdamW; it has no data
pipeline, no log and no telemetry. `gracetune train` has all of them.

Each way runs in a process of its own. The processes take turns, a few steps each, so that other
work on the machine disturbs all alike. A figure is the median over the turns, a difference the
median of the differences within a turn.

    python benchmarks/host_time.py [--dtype float32|bfloat16] [--turns 30] [--steps 10]
        [--out FOLDER] [--commit NAME] [--rehearse]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import re
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import product_run
import random_weights
import results
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

from gracetune.config.schema import RunFile
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.log import JsonlLog
from gracetune.events.run_control import RunControl
from gracetune.events.types import StepDone
from gracetune.models import flux
from gracetune.train import objective
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.loop import GC_FREEZE_STEPS, train_loop
from gracetune.train.run import SignalHandler
from gracetune.train.step import TrainProgress
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    TakeTurn = Callable[[float], bool]
    """Reports the CPU seconds of a turn, waits for the next one, and returns False at the end."""

NAME = "host_time"
BLOCKS, FEW_BLOCKS = (19, 38), (1, 1)
"""Double-stream and single-stream blocks: those of FLUX.1, and those of a rehearsal."""
EDGE, TEXT_TOKENS, RANK = 32, 32, 4
WARM_UP = GC_FREEZE_STEPS
WAYS = ("compiled", "recomputed")
"""Compiled blocks that keep all activations, and eager ones that are recomputed in backward."""


def main() -> None:
    """Measure both ways of the product and of the loop, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    arguments = results.parse_arguments(parser)
    if arguments.rehearse:
        arguments.turns, arguments.steps = 1, 2
    figures = results.previous(NAME, arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model, FEW_BLOCKS if arguments.rehearse else BLOCKS)
        seconds = (measure_alone if arguments.rehearse else measure)(arguments, model)
    for way in WAYS:
        product, loop = seconds[f"product, {way}"], seconds[f"loop, {way}"]
        found = {
            "product_ms": 1e3 * median(product),
            "loop_ms": 1e3 * median(loop),
            "difference_ms": 1e3 * median(a - b for a, b in zip(product, loop, strict=True)),
            "product_over_loop": median(a / b for a, b in zip(product, loop, strict=True)),
            "turns": len(product),
            "commit": arguments.commit or results.this_commit(),
        }
        print(f"{arguments.dtype}, {way}: {found}")
        figures |= results.flatten({arguments.dtype: {way: found}})
    print(results.write(NAME, figures, arguments.out, arguments.commit))


def write_model(folder: Path, blocks: tuple[int, int]) -> None:
    """Write a narrow Flux with random weights and this number of blocks of both kinds."""
    random_weights.write_folder("flux", folder, small=True)
    path = folder / "transformer" / "config.json"
    counts = dict(zip(("num_layers", "num_single_layers"), blocks, strict=True))
    path.write_text(json.dumps(json.loads(path.read_text()) | counts))
    random_weights.write_weights(folder)


def measure(arguments: argparse.Namespace, model: Path) -> dict[str, list[float]]:
    """Let one process for each way take turns; return the CPU seconds of a step in each turn."""
    connections: dict[str, Connection] = {}
    processes = []
    for name in [f"{who}, {way}" for way in WAYS for who in ("product", "loop")]:
        connections[name], theirs = multiprocessing.Pipe()
        processes.append(results.start_forked(work, theirs, name, arguments, model))
        theirs.close()
        connections[name].recv()  # warmed up: one after the other, so that the first fills caches
        print(f"{name}: ready", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in connections}
    for _ in range(arguments.turns):
        for name, connection in connections.items():
            connection.send(True)
            seconds[name].append(connection.recv())
    for connection, process in zip(connections.values(), processes, strict=True):
        connection.send(False)
        process.join()
    return seconds


def measure_alone(arguments: argparse.Namespace, model: Path) -> dict[str, list[float]]:
    """Do the same in this process, one way after the other, to rehearse it."""
    seconds: dict[str, list[float]] = {}
    for name in [f"{who}, {way}" for way in WAYS for who in ("product", "loop")]:
        found: list[float] = []

        def take_turn(took: float, found: list[float] = found) -> bool:
            found.append(took)
            return len(found) <= arguments.turns

        run_way(name, arguments, model, take_turn)
        seconds[name] = found[1:]
    return seconds


def work(connection: Connection, name: str, arguments: argparse.Namespace, model: Path) -> None:
    """Run one way in a process of its own."""

    def take_turn(took: float) -> bool:
        connection.send(took)
        return bool(connection.recv())

    run_way(name, arguments, model, take_turn)


def run_way(name: str, arguments: argparse.Namespace, model: Path, take_turn: TakeTurn) -> None:
    """Train `--steps` steps in each turn; the first call of `take_turn` is after the warm-up."""
    torch.set_num_threads(1)
    who, way = name.split(", ")
    train = train_product if who == "product" else train_loop_of_user
    train(model, way, getattr(torch, arguments.dtype), arguments.steps, take_turn)


# The product


class TurnEndError(Exception):
    """Ends the product's run after the last turn."""


class Turns:
    """An event sink that takes a turn whenever enough steps are done."""

    def __init__(self, steps: int, take_turn: TakeTurn) -> None:
        self._steps, self._take_turn = steps, take_turn
        self._left = WARM_UP + steps
        self._began = time.process_time()

    def handle(self, event: object) -> None:
        """Count a finished step."""
        self._left -= isinstance(event, StepDone)
        if self._left:
            return
        if not self._take_turn((time.process_time() - self._began) / self._steps):
            raise TurnEndError
        self._left, self._began = self._steps, time.process_time()

    def close(self) -> None:
        """Do nothing."""


def train_product(
    model: Path, way: str, dtype: torch.dtype, steps: int, take_turn: TakeTurn
) -> None:
    """Train as `gracetune train` does, with the plan of this way."""
    with ExitStack() as stack:
        # Less to compute than with the 512 tokens of FLUX.1.
        stack.enter_context(patch.object(flux, "TEXT_LENGTH", TEXT_TOKENS))
        stack.enter_context(patch.object(flux.Flux, "text_length", TEXT_TOKENS))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        product_run.write_samples(folder / "samples", [(EDGE, EDGE)], product_run.PER_SIZE)
        run = RunFile.model_validate(run_file(model, folder, dtype, steps))
        config = json.loads((model / "transformer" / "config.json").read_text())
        activations = "keep" if way == "compiled" else "recompute"
        block = {"weights": "resident", "activations": activations, "offload_input": False}
        plan = {
            "blocks": [block] * (config["num_layers"] + config["num_single_layers"]),
            "compiled": way == "compiled",
            "was_checked": True,
            **{"batch": 1, "accumulation": 1, "slots": 3},
        }
        sinks = [JsonlLog(folder / "events.jsonl"), Turns(steps, take_turn)]
        events = stack.enter_context(EventDispatcher(sinks))
        control, signals = RunControl(folder), SignalHandler()
        session = build_session(
            run, start_accelerator(run), events.emit, control, signals, resumed={"plan": plan}
        )
        stack.callback(session.close)
        try:
            train_loop(session, TrainProgress())
        except TurnEndError:
            return


def run_file(model: Path, folder: Path, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """Return the settings of the product's run."""
    is_bf16 = dtype is torch.bfloat16
    return {
        "output_dir": str(folder / "run"),
        "model": {
            "family": "flux",
            "path": str(model),
            "dtype": "bfloat16" if is_bf16 else "float32",
        },
        "adapter": {"rank": RANK},
        "datasets": [{"instance_data_dir": str(folder / "samples"), "resolution": EDGE}],
        "train": {
            "max_train_steps": product_run.LONG_RUN,
            "batch_size": 1,
            "mixed_precision": "bf16" if is_bf16 else "no",
            "checkpoint_every": 0,
            "checkpoint_minutes": 0,
            "check_gradients": False,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "validation": {"every": 0},
        "logging": {"every": min(10, steps), "tensorboard": False},
        "plan": {"device_memory": f"{8 * GIB}B"},
    }


# The loop


def train_loop_of_user(
    model: Path, way: str, dtype: torch.dtype, steps: int, take_turn: TakeTurn
) -> None:
    """Train as a user's loop does."""
    step = make_step(model, way, dtype)
    for _ in range(WARM_UP):
        step()
    gc.collect()
    gc.freeze()  # as the product does
    took = 0.0
    while take_turn(took):
        began = time.process_time()
        for _ in range(steps):
            step()
        took = (time.process_time() - began) / steps
    gc.unfreeze()


def make_step(model: Path, way: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Build the transformer with a LoRA and its optimizer; return a function that trains a step."""
    transformer: Any = FluxTransformer2DModel.from_pretrained(
        model / "transformer", torch_dtype=dtype
    )
    transformer.requires_grad_(False)
    targets = "|".join(map(re.escape, flux.PLANNER_SHAPES.targets)).replace(r"\*", r"\d+")
    transformer.add_adapter(
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules=rf"(.*\.)?({targets})")
    )
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    transformer.train()
    if way == "compiled":
        transformer.compile_repeated_blocks()
    else:
        transformer.enable_gradient_checkpointing()
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    config, tokens = transformer.config, (EDGE // 4) ** 2
    x0 = torch.randn(1, tokens, config.in_channels)
    conditions = {
        "encoder_hidden_states": torch.randn(
            1, TEXT_TOKENS, config.joint_attention_dim, dtype=dtype
        ),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, dtype=dtype),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "guidance": torch.ones(1),
    }

    def step() -> torch.Tensor:
        timesteps, noise = torch.rand(1), torch.randn(x0.shape)
        noisy = objective.add_noise(x0, noise, timesteps).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            predicted = transformer(
                noisy, timestep=timesteps.to(dtype), return_dict=False, **conditions
            )[0]
        loss = objective.sample_losses(predicted, objective.velocity(x0, noise)).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
