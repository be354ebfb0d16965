"""Train run files on ranks that divide the weights, and write the gradients of every step.

Called as `sharded_cases.py FOLDER NAME`: every CASE.json in FOLDER is trained, and rank 0 writes
CASE-NAME.safetensors with the whole gradients, weights and averages, and CASE-NAME.json with the
losses. With the name `alone`, the settings of the section `distributed` are ignored. With the name
`failing`, the runs are whole runs, in which rank 1 runs out of memory in its second pass.
"""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fakes.family_sessions import family_session
from safetensors.torch import save_file

from gracetune.config.load import load_run_file
from gracetune.config.schema import DistributedSection
from gracetune.events.types import StepDone, Validated
from gracetune.train import step as step_module
from gracetune.train.loop import train_loop
from gracetune.train.run import run_training
from gracetune.train.step import TrainProgress


class Recorder:
    """Steps an optimizer, and keeps the whole gradients of every step."""

    def __init__(self, state):
        self._state, self._stepper = state, state.stepper
        self.gradients = {}

    def __getattr__(self, name):
        return getattr(self._stepper, name)

    def step(self):
        for name, parameter in self._state.parameters.items():
            if parameter.grad is not None:
                whole = whole_tensor(self._state, name, parameter.grad)
                self.gradients[f"{self._stepper.num_steps} {name}"] = whole
        self._stepper.step()


def whole_tensor(state, name, part):
    """Return a tensor of which each rank has a part, as a copy."""
    return part.detach().clone() if state.sharded is None else state.sharded.full_tensor(name, part)


def train(path, name):
    run = load_run_file(path).run
    update = {"output_dir": f"{run.output_dir}-{name}"}
    if name == "alone":
        update["distributed"] = DistributedSection()
    run = run.model_copy(update=update)
    events = []
    with family_session(run, events.append, lambda count: [0]) as built:
        recorder = Recorder(built.state)
        state = replace(built.state, stepper=recorder)
        train_loop(replace(built, state=state), TrainProgress())
        tensors = dict(recorder.gradients)
        for parameter in state.parameters:
            tensors[parameter] = whole_tensor(state, parameter, state.parameters[parameter])
            if state.ema is not None:
                average = whole_tensor(state, parameter, state.ema.averages[parameter])
                tensors[f"ema {parameter}"] = average
        if state.ranks.is_main:
            save_file(tensors, path.with_name(f"{path.stem}-{name}.safetensors"))
            steps = [event for event in events if isinstance(event, StepDone)]
            validated = [event for event in events if isinstance(event, Validated)]
            found = {
                "samples": [event.samples for event in steps],
                "micro_batches": [event.accumulation for event in steps],
                "losses": [event.loss for event in steps],
                "norms": [event.grad_norm for event in steps],
                "rates": [event.lr for event in steps],
                "held_out": [event.losses for event in validated],
                "texts": [str(getattr(event, "text", "")) for event in events],
                "part": sum(p.numel() for p in state.parameters.values()),
                "output_dir": run.output_dir,
            }
            path.with_name(f"{path.stem}-{name}.result").write_text(json.dumps(found))


def fail(path):
    """Train a whole run; on rank 1, the second pass runs out of memory."""
    real, calls = step_module.batch_losses, []

    def batch_losses(state, *given):
        calls.append(given)
        if state.ranks.rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return real(state, *given)

    with patch.object(step_module, "batch_losses", batch_losses):
        run_training(load_run_file(path).run)


if __name__ == "__main__":
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        fail(file) if sys.argv[2] == "failing" else train(file, sys.argv[2])
