"""Train run files on the ranks of this group, and write the gradients of every step to a file.

Called as `rank_cases.py FOLDER NAME`: every CASE.json in FOLDER is trained, and rank 0 writes
CASE-NAME.safetensors. The name before the first dash of CASE is the plan for the blocks. A run with
`-fp64` in its name computes in fp64, except where a model itself casts to fp32. On rank 1, a run
with `-full` in its name runs out of memory once: in its second step, or in its first one if its
name ends in `-first`. With `-broken`, a compiled block fails there in the backward of the second
step, and with `-refused`, no block can be compiled there.
"""

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fakes.family_sessions import change_mode, family_session, small_plans
from functorch.compile import make_boxed_func
from safetensors.torch import save_file
from torch._dynamo.backends.common import aot_autograd

from gracetune.config.load import load_run_file
from gracetune.events.types import StepDone, Validated
from gracetune.train import build as build_module
from gracetune.train import step as step_module
from gracetune.train.loop import train_loop
from gracetune.train.step import TrainProgress


class Recorder:
    """Steps an optimizer, and keeps a copy of the gradients of every step."""

    def __init__(self, state):
        self._stepper, self._parameters = state.stepper, state.parameters
        self.gradients = {}

    def __getattr__(self, name):
        return getattr(self._stepper, name)

    def step(self):
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.gradients[f"{self._stepper.num_steps} {name}"] = parameter.grad.clone()
        self._stepper.step()


def train(path, mode, name):
    run = load_run_file(path).run
    run = run.model_copy(update={"output_dir": f"{run.output_dir}-{name}"})
    events = []
    made = in_fp64(build_module) if "-fp64" in path.stem else build_module.make_trainable
    with (
        small_plans(compiler_of(path.stem)),
        patch.object(build_module, "make_trainable", made),
        family_session(run, events.append, lambda count: [0]) as built,
    ):
        session = change_mode(built, mode)
        recorder = Recorder(session.state)
        session = replace(session, state=replace(session.state, stepper=recorder))
        ranks = session.state.ranks
        # The last micro-batch of the first or second step.
        steps = 1 if path.stem.endswith("-first") else 2
        failing = steps * (session.micro_batches(0) // session.state.layout.data_size)
        if "-full" not in path.stem or ranks.rank != 1:
            failing = 0
        with patch.object(step_module, "batch_losses", failing_once(step_module, failing)):
            train_loop(session, TrainProgress())
        parameters = {n: p.detach().clone() for n, p in session.state.parameters.items()}
        averages = {} if session.state.ema is None else session.state.ema.averages
        tensors = recorder.gradients | parameters | {f"ema {n}": t for n, t in averages.items()}
        if session.state.ranks.is_main:
            save_file(tensors, path.with_name(f"{path.stem}-{name}.safetensors"))
            steps = [event for event in events if isinstance(event, StepDone)]
            texts = [str(getattr(event, "text", "")) for event in events]
            found = {
                "samples": [event.samples for event in steps],
                "micro_batches": [event.accumulation for event in steps],
                "losses": [event.loss for event in steps],
                "norms": [event.grad_norm for event in steps],
                "held_out": [event.losses for event in events if isinstance(event, Validated)],
                "grids": [event.grid for event in events if isinstance(event, Validated)],
                "texts": texts,
            }
            path.with_name(f"{path.stem}-{name}.result").write_text(json.dumps(found))


def compiler_of(case):
    """Return the backend that compiles blocks; on rank 1, it may fail as the case says."""
    if os.environ.get("RANK") != "1" or case.split("-")[-1] not in ("broken", "refused"):
        return "aot_eager"
    # Four blocks run backward in each of the micro-batches of a step, which are four in all.
    calls, failing = itertools.count(), 4 * 4 // int(os.environ["WORLD_SIZE"]) + 1

    def compile_backward(graph, _inputs):
        if case.endswith("refused"):
            raise RuntimeError("no compiler here")

        @make_boxed_func
        def run(*values):
            if next(calls) == failing:
                raise RuntimeError("out of resource: shared memory")
            return graph(*values)

        return run

    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=compile_backward
    )


def in_fp64(module):
    """Return `make_trainable`, after which the transformers and adapters have fp64 weights."""
    real = module.make_trainable

    def make_trainable(run, family, *given, **named):
        modules = real(run, family, *given, **named)
        family.transformer.double()
        return modules

    return make_trainable


def failing_once(module, number):
    """Return `batch_losses`, of which the call with this number runs out of memory."""
    real, calls = module.batch_losses, []

    def batch_losses(*given):
        calls.append(given)
        if len(calls) == number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return real(*given)

    return batch_losses


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        train(file, file.stem.partition("-")[0], sys.argv[2])
