"""What holds memory for as long as a run, each where it really is."""

from types import SimpleNamespace

import torch
from torch import nn

from gracetune.memory.stats import Tier
from gracetune.train.build import register_memory_roles

ELSEWHERE = torch.device("meta")
"""Stands for a device with a memory of its own."""


class Books:
    def __init__(self):
        self.watched = {}

    def watch(self, role, nbytes, tier=None):
        self.watched[role] = tier, nbytes

    def read(self):
        return {role: (tier, nbytes()) for role, (tier, nbytes) in self.watched.items()}


def made_trainee(model):
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return SimpleNamespace(
        family=SimpleNamespace(transformer=model),
        parameters=trained,
        ema=None,
        update=SimpleNamespace(device_nbytes=5, host_nbytes=7),
        accelerator=SimpleNamespace(device=ELSEWHERE),
    )


def test_streamed_weights_are_booked_where_they_live():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))).to(ELSEWHERE)
    for layer in model[:3]:
        layer.weight.requires_grad_(False)
    model[0].to_empty(device="cpu")  # where a ring keeps it
    books, slots = Books(), [0]
    register_memory_roles(made_trainee(model), books, lambda: slots[0])
    slots[0] = 100  # may be added at any time of a run
    assert books.read() == {
        "weights": (None, 2 * 64 + 100),
        "weights_in_host_memory": (Tier.HOST, 64),
        "trained": (None, 64),
        "averages": (None, 0),
        "optimizer": (None, 5),
        "optimizer_in_host_memory": (Tier.HOST, 7),
    }
