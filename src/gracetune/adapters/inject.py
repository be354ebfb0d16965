"""Putting an adapter onto a model: the new weights, and how they are told from the frozen ones.

LoRA and DoRA are peft's. LoCon, LoHa and LoKr are LyCORIS's modules, each beside its layer as a
part of the model: the frozen weight is never rebuilt, so it may be quantised or streamed.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from gracetune.adapters.targets import choose
from gracetune.adapters.wrapped import Adapted, adapt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.targets import Setting
    from gracetune.config.schema import AdapterSection

NAME = "default"
"""peft's name for the one adapter that is trained."""
BY_PEFT = frozenset(("lora", "dora"))


def add_adapter(
    transformers: Mapping[str, nn.Module],
    section: AdapterSection,
    default_targets: Sequence[str],
    seed: int,
) -> dict[str, dict[str, Setting]]:
    """Freeze every transformer and put adapters beside its targets; says which modules, and how.

    New weights are fp32, whatever the frozen ones are. A new adapter changes no output.
    """
    chosen = choose(transformers, section, default_targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for expert, modules in chosen.items():
            model = transformers[expert].requires_grad_(False)
            if not modules:
                continue
            if section.kind in BY_PEFT:
                _by_peft(model, section, modules)
            else:
                for name, setting in modules.items():
                    adapt(model, name, section, setting)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
    return chosen


def adapter_weights(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What was added to a transformer: by module, each tensor by the role that files name it by."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            found[name] = {role: t.detach() for role, t in module.adapter.state_dict().items()}
    for name, parameter in model.named_parameters():
        # peft's names: MODULE.lora_A.default.weight, MODULE.lora_magnitude_vector.default.weight
        at = re.fullmatch(rf"(.*)\.(lora_\w+)\.{NAME}\.(\w+)", name)
        if at:
            found.setdefault(at[1], {})[f"{at[2]}.{at[3]}"] = parameter.detach()
    return found


def _by_peft(model: nn.Module, section: AdapterSection, modules: Mapping[str, Setting]) -> None:
    config = LoraConfig(
        r=section.rank,
        lora_alpha=alpha_of(section),
        lora_dropout=section.dropout,
        target_modules="|".join(map(re.escape, modules)),  # as a list, endings would match too
        rank_pattern={f"^{re.escape(name)}": setting.rank for name, setting in modules.items()},
        alpha_pattern={f"^{re.escape(name)}": setting.alpha for name, setting in modules.items()},
        use_dora=section.kind == "dora",
    )
    with warnings.catch_warnings():
        # It could not merge into a quantised layer; nobody asks it to.
        warnings.filterwarnings("ignore", r".*get_apply_tensor_subclass", UserWarning)
        inject_adapter_in_model(config, model, adapter_name=NAME)
    for name, setting in modules.items():
        if setting.dropout != section.dropout:
            dropouts = model.get_submodule(f"{name}.lora_dropout")
            dropouts.add_module(NAME, nn.Dropout(setting.dropout))


def alpha_of(section: AdapterSection) -> float:
    """Alpha, by default equal to the rank: the update is not scaled."""
    return section.rank if section.alpha is None else section.alpha
