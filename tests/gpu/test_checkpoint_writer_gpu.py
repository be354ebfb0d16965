"""Checkpoints of state on the GPU, written while the GPU continues."""

import pytest
import torch

from gracetune.config.schema import TrainSection
from gracetune.distributed.layout import SINGLE_LAYOUT
from gracetune.events.types import CheckpointSaved
from gracetune.offload.copy_engine import CudaCopyEngine
from gracetune.optim.offloaded_state import OptimizerStepper
from gracetune.train import checkpoint
from gracetune.train.checkpoint import Snapshot
from gracetune.train.checkpoint_writer import CheckpointWriter
from gracetune.train.state import flatten_optimizer_state
from gracetune.train.step import TrainProgress

pytestmark = pytest.mark.gpu
WIDTH, LAYERS = 4096, 8


@pytest.mark.parametrize("host_share", [0.0, 0.5, 1.0])
def test_copies_are_complete_before_the_next_update(tmp_path, host_share):
    """Updates follow each other without a pause, so a copy that came too late would be torn."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    parameters = {
        f"layer {index}": torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
        for index in range(LAYERS)
    }
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, fused=True)
    engine = CudaCopyEngine(device, pin=True)
    stepper = OptimizerStepper(optimizer, engine, 8.0)
    stepper.set_host_share(host_share)
    events = []
    settings = TrainSection(keep_checkpoints=9)
    writer = CheckpointWriter(
        tmp_path, settings, SINGLE_LAYOUT, engine, stepper, events.append, in_background=True
    )
    expected = {}
    for step in range(1, 7):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        stepper.step()
        writer.poll()
        if step in (2, 4):
            stepper.synchronize()
            tensors = {
                "weights": {name: p.detach() for name, p in parameters.items()},
                "optimizer": flatten_optimizer_state(optimizer, parameters),
                "generators-0": {"torch": torch.zeros(4, dtype=torch.uint8)},
            }
            expected[step] = {
                kind: {name: t.detach().to("cpu", copy=True) for name, t in named.items()}
                for kind, named in tensors.items()
            }
            snapshot = Snapshot(TrainProgress(step, step, step), {}, tensors)
            writer.save(snapshot, None, "every N steps", in_background=True)
    writer.finish()
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [2, 4]
    for step, kinds in expected.items():
        found = checkpoint.load_snapshot(tmp_path / f"step-{step:06d}").tensors
        for kind, tensors in kinds.items():
            assert found[kind].keys() == tensors.keys()
            assert all(torch.equal(found[kind][name], t) for name, t in tensors.items())
    writer.close()
    stepper.close()
