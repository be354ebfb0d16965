"""The adapter that a model carries now, in the words of `layers`: what files are written from."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from gracetune.adapters.inject import adapter_weights
from gracetune.adapters.layers import Adapter, make_layer
from gracetune.adapters.names import LayerPath, table_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from gracetune.adapters.layers import Layer
    from gracetune.adapters.tables.types import Stage
    from gracetune.adapters.targets import Setting

ROLES = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_magnitude_vector.weight": "dora",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "lora_mid.weight": "mid",
}
"""What peft and LyCORIS call a tensor; other names are roles as they stand."""


def live_adapter(
    transformers: Mapping[str, nn.Module], modules: Mapping[str, Mapping[str, Setting]], family: str
) -> Adapter:
    """Of every expert that has one; each adapted module must be there with all its tensors."""
    layers: dict[LayerPath, Layer] = {}
    for expert, settings in modules.items():
        found = adapter_weights(transformers[expert])
        assert found.keys() == settings.keys(), found.keys() ^ settings.keys()
        for name, tensors in found.items():
            named = {ROLES.get(role, role): tensor for role, tensor in tensors.items()}
            named.setdefault("alpha", torch.tensor(settings[name].alpha))
            place = LayerPath(cast("Stage", expert) if expert else None, name)
            layers[place] = make_layer(named, {role: f"{name}.{role}" for role in named})
    return Adapter(table_named(family), layers)
