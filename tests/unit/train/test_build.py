"""Building a session: memory is reported by role and by where it is."""

from types import SimpleNamespace

import torch
from torch import nn

from gracetune.memory.stats import Tier
from gracetune.train.build import register_memory_roles

DEVICE = torch.device("meta")
"""Stands for a GPU, which has memory of its own."""


class RoleRecorder:
    def __init__(self):
        self.tracked = {}

    def track_memory(self, role, nbytes, tier=None):
        self.tracked[role] = tier, nbytes

    def read(self):
        return {role: (tier, nbytes()) for role, (tier, nbytes) in self.tracked.items()}


def build_state(model):
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return SimpleNamespace(
        family=SimpleNamespace(transformer=model),
        parameters=trained,
        ema=None,
        stepper=SimpleNamespace(device_nbytes=5, host_nbytes=7),
        accelerator=SimpleNamespace(device=DEVICE),
    )


def test_streamed_weights_are_reported_in_host_memory_and_slots():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))).to(DEVICE)
    for layer in model[:3]:
        layer.weight.requires_grad_(False)
    model[0].to_empty(device="cpu")  # a streamed layer
    roles, controller = RoleRecorder(), SimpleNamespace(slots_nbytes=0)
    register_memory_roles(build_state(model), roles, controller)
    controller.slots_nbytes = 100  # the ring may grow at any time
    assert roles.read() == {
        "weights": (None, 2 * 64 + 100),
        "weights_in_host_memory": (Tier.HOST, 64),
        "trained": (None, 64),
        "averages": (None, 0),
        "optimizer": (None, 5),
        "optimizer_in_host_memory": (Tier.HOST, 7),
    }
