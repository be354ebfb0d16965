"""Build training sessions of every family's miniature, with any plan for its blocks."""

import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from fakes.datasets import DATA, WRITE
from fakes.miniatures import MINIATURES, Miniature, write_miniature
from gracetune.config.schema import RunFile
from gracetune.distributed.layout import build_layout
from gracetune.distributed.ranks import connect_ranks
from gracetune.events.run_control import RunControl
from gracetune.memory.platform import Link
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.optim.build import build_optimizer
from gracetune.optim.offloaded_state import OptimizerStepper, StateOffloadSettings
from gracetune.plan import planner
from gracetune.plan.apply import PlanLayout, apply_plan
from gracetune.plan.cost import CostModel
from gracetune.plan.planner_input import PlanProblem
from gracetune.plan.result import BlockPlan
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.run import SignalHandler

CASES = {name: small for name, small in MINIATURES.items() if small.family} | {
    "tiny": Miniature(None, "tiny")
}
"""Every miniature that a family trains, by name."""
FAMILIES = {small.family: name for name, small in reversed(CASES.items()) if small.kind != "edit"}
FAMILIES["wan22"] = "wan22-t2v"  # with two experts
"""One case for each family. Edits have thousands of tokens, which takes minutes."""
MEDIA = {"image": "image", "edit": "image", "first frame": "video", "video": "image"}
"""Kind of a miniature -> kind of files to train it on; audio is itself."""
MODES = {
    "eager": [("resident", "keep", False)],
    "streamed": [("streamed", "keep", False)],
    "offloaded": [("resident", "offload", False), ("streamed", "offload", False)],
    "recomputed": [("streamed", "recompute", True), ("streamed", "recompute", False)],
    "compiled": [("streamed", "lean", False), ("streamed", "recompute", True)],
}
"""Placement of weights, activations and inputs of blocks, which take the plans in turn."""


def family_run(folder, case, **sections):
    """Write a miniature and its data to a folder, and return a run file that trains a LoRA."""
    small = CASES[case]
    kind = MEDIA.get(small.kind, small.kind)
    data = folder / "data"
    dataset = {"dataset_type": kind, "instance_data_dir": str(data)} | DATA[kind]
    if not data.exists():
        WRITE[kind](data)
    if small.kind == "edit":
        shutil.copytree(data, folder / "references", dirs_exist_ok=True)
        dataset["conditioning_data_dir"] = str(folder / "references")
    model = {"family": small.family}
    if small.write is not None:
        model["path"] = str(write_miniature(case, folder / "model"))
    settings = {
        "output_dir": str(folder / "run"),
        "model": model,
        "adapter": {"rank": 2},
        "datasets": [dataset],
        "train": {"max_train_steps": 2, "batch_size": 3, "mixed_precision": "no"},
        "optimizer": {"lr": 0.01},
        "logging": {"tensorboard": False, "every": 1},
        "validation": {"every": 0},
        "plan": {"device_memory": "100GB", "compile": "never"},
    }
    for name, value in sections.items():
        before = settings.get(name)
        merges = isinstance(before, dict) and isinstance(value, dict)
        settings[name] = before | value if merges else value
    return RunFile.model_validate(settings)


@contextmanager
def family_session(run, emit, checked_blocks=range):
    """Build the session of a run as `gracetune train` does, and close it."""
    folder = Path(run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = start_accelerator(run)
    session = build_session(
        run,
        accelerator,
        emit,
        RunControl(folder),
        SignalHandler(),
        checked_blocks=checked_blocks,
        layout=build_layout(run.distributed, connect_ranks(run.distributed.timeout_s)),
    )
    try:
        yield session
    finally:
        session.pipeline.close()
        session.close()


@contextmanager
def small_plans(backend="aot_eager"):
    """Let plans offload activations of any size, compile with this backend, and spare no memory.

    A block that cannot be compiled keeps what its plan says: the models are only traced eagerly.
    """
    with (
        patch.object(planner, "PlanLayout", partial(PlanLayout, min_offload_nbytes=1)),
        patch.object(planner, "apply_plan", partial(apply_plan, backend=backend)),
        patch.object(PlanProblem, "spare_nbytes", lambda *_: 0),
        patch.object(CostModel, "eager_modes", lambda *_: ()),
    ):
        yield


def with_new_optimizer(session):
    """Return the session with a new optimizer, whose state is where the plan puts it."""
    state = session.state
    optimizer = build_optimizer(state.parameters, state.run.optimizer)
    engine = open_copy_engine(state.accelerator.device, Link.MANAGED)
    settings = StateOffloadSettings(bucket_numel=1 << 9, min_nbytes=1, poison=True)
    stepper = OptimizerStepper(optimizer, engine, 8.0, settings)
    stepper.set_host_share(session.plan_controller.plan.host_state)
    return replace(session, state=replace(state, optimizer=optimizer, stepper=stepper))


def change_mode(session, mode, slots=2):
    """Change the plan of a session to one of MODES, with the optimizer state in host memory."""
    controller = session.plan_controller
    ways = [BlockPlan(*way) for way in MODES[mode]]
    blocks = tuple(ways[index % len(ways)] for index in range(len(controller.plan.blocks)))
    controller.change_to(
        replace(
            controller.plan,
            blocks=blocks,
            slots=slots,
            compiled=mode == "compiled",
            host_state=0.0 if mode == "eager" else 1.0,
        )
    )
    return with_new_optimizer(session)
