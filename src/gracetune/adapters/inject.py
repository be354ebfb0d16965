"""Putting an adapter onto a model: the new weights, and how they are told from the frozen ones.

LoRA and DoRA are peft's. LoCon, LoHa and LoKr are LyCORIS's modules, each beside its layer as a
part of the model: the frozen weight is never rebuilt, so it may be quantised or streamed.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from gracetune.adapters.compute.lycoris import AdaptedLayer, add_lycoris_adapter
from gracetune.adapters.files.keys import LayerPath
from gracetune.adapters.files.layers import Adapter, make_layer
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable, Stage
    from gracetune.adapters.files.layers import Layer
    from gracetune.config.schema import AdapterSection


ADAPTER_NAME = "default"
"""peft's name for the one adapter that is trained."""
PEFT_KINDS = frozenset(("lora", "dora"))


def add_adapter(
    transformers: Mapping[str, nn.Module],
    section: AdapterSection,
    default_targets: Sequence[str],
    seed: int,
) -> dict[str, dict[str, ModuleSettings]]:
    """Freeze every transformer and put adapters beside its targets; says which modules, and how.

    New weights are fp32, whatever the frozen ones are. A new adapter changes no output.
    """
    chosen = select_modules(transformers, section, default_targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for expert, modules in chosen.items():
            model = transformers[expert].requires_grad_(False)
            if not modules:
                continue
            if section.kind in PEFT_KINDS:
                _by_peft(model, section, modules)
            else:
                for name, setting in modules.items():
                    add_lycoris_adapter(model, name, section, setting)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
    return chosen


def adapter_weights(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What was added to a transformer: by module, each tensor by the role that files name it by."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            found[name] = {role: t.detach() for role, t in module.adapter.state_dict().items()}
    for name, parameter in model.named_parameters():
        # peft's names: MODULE.lora_A.default.weight, MODULE.lora_magnitude_vector.default.weight
        at = re.fullmatch(rf"(.*)\.(lora_\w+)\.{ADAPTER_NAME}\.(\w+)", name)
        if at:
            found.setdefault(at[1], {})[f"{at[2]}.{at[3]}"] = parameter.detach()
    return found


def _by_peft(
    model: nn.Module, section: AdapterSection, modules: Mapping[str, ModuleSettings]
) -> None:
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
        inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
    for name, setting in modules.items():
        if setting.dropout != section.dropout:
            dropouts = model.get_submodule(f"{name}.lora_dropout")
            dropouts.add_module(ADAPTER_NAME, nn.Dropout(setting.dropout))


def alpha_of(section: AdapterSection) -> float:
    """Alpha, by default equal to the rank: the update is not scaled."""
    return section.rank if section.alpha is None else section.alpha


# ------------------------------------------------------------------------------------------
# Which modules an adapter sits on, and what each is told: by name, ending, pattern or expression.
#
# Nothing that a run file says may go unused: a target or an override that matches nothing, or less
# than it seems to, stops the run with the list of what there is.


LINEAR_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear,)
LINEAR_AND_CONV_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS_BY_KIND = {"lora": LINEAR_LAYERS, "dora": LINEAR_LAYERS}
"""What each kind can sit on; all others take convolutions too."""
REGEX_PREFIX = "re:"
WILDCARDS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """What one module's adapter is made with."""

    rank: int
    alpha: float
    dropout: float
    factor: int


def select_modules(
    transformers: Mapping[str, nn.Module], section: AdapterSection, defaults: Sequence[str]
) -> dict[str, dict[str, ModuleSettings]]:
    """By transformer (an expert's name, or the empty one), each module with its settings."""
    targets = section.targets or tuple(defaults)
    kinds = LAYERS_BY_KIND.get(section.kind, LINEAR_AND_CONV_LAYERS)
    names = {
        expert: {name: module for name, module in model.named_modules() if name}
        for expert, model in transformers.items()
    }
    fitting = {
        expert: [name for name, module in modules.items() if isinstance(module, kinds)]
        for expert, modules in names.items()
    }
    for target in targets:
        _check_matches(target, "adapter.targets", fitting, names)
    chosen = {
        expert: [name for name in found if any(matches(name, t, expert) for t in targets)]
        for expert, found in fitting.items()
    }
    for pattern in section.overrides:
        _check_matches(pattern, "adapter.overrides", chosen, names)
    return {
        expert: {name: settings_for(section, name, expert) for name in found}
        for expert, found in chosen.items()
    }


def settings_for(section: AdapterSection, name: str, expert: str = "") -> ModuleSettings:
    """The section's own settings, with what overrides say of this module."""
    rank, alpha = section.rank, section.alpha
    dropout, factor = section.dropout, section.factor
    for pattern, other in section.overrides.items():
        if matches(name, pattern, expert):
            if other.rank is not None:
                rank, alpha = other.rank, None
            alpha = alpha if other.alpha is None else other.alpha
            dropout = dropout if other.dropout is None else other.dropout
            factor = factor if other.factor is None else other.factor
    return ModuleSettings(rank, float(rank if alpha is None else alpha), dropout, factor)


def matches(name: str, target: str, expert: str = "") -> bool:
    """Whether a target means this module; `high.` or `low.` before a name means one expert's."""
    full = f"{expert}.{name}" if expert else name
    if target.startswith(REGEX_PREFIX):
        return re.fullmatch(target.removeprefix(REGEX_PREFIX), full) is not None
    if WILDCARDS & set(target):
        return fnmatchcase(full, target) or fnmatchcase(full, f"*.{target}")
    return full == target or full.endswith(f".{target}")


def _check_matches(
    target: str,
    setting: str,
    fitting: Mapping[str, Sequence[str]],
    names: Mapping[str, Mapping[str, nn.Module]],
) -> None:
    """In every transformer, unless the target names one of them."""
    _check_expression(target, setting)
    found = {e: [n for n in known if matches(n, target, e)] for e, known in fitting.items()}
    empty = [expert for expert, matched in found.items() if not matched]
    if not empty or (len(empty) < len(found) and _names_one(target, found)):
        return
    others = [
        f"{name} ({type(module).__name__})"
        for name, module in names[empty[0]].items()
        if matches(name, target, empty[0])
    ]
    here = f" of the {empty[0]}-noise expert" if empty[0] else ""
    what = f" It matches {others[0]}, which cannot be adapted so." if others else ""
    endings = sorted({target_suffix(name) for name in fitting[empty[0]]})
    raise ConfigError(
        f"{setting}: {target!r} matches no module{here} that takes part.{what} "
        f"There are: {', '.join(endings)}."
    )


def _names_one(target: str, experts: Iterable[str]) -> bool:
    return any(expert in re.split(r"[.\\(|)]", target) for expert in experts if expert)


def _check_expression(target: str, setting: str) -> None:
    if target.startswith(REGEX_PREFIX):
        try:
            re.compile(target.removeprefix(REGEX_PREFIX))
        except re.error as error:
            raise ConfigError(
                f"{setting}: {target!r} is no regular expression: {error}. Mend it, or write a "
                "name, an ending or a pattern with *."
            ) from error


def target_suffix(name: str) -> str:
    """A name without its block number, as a target would be written."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    first = numbers[0] + 1 if numbers and numbers[0] + 1 < len(parts) else 0
    return ".".join(parts[first:])


# ------------------------------------------------------------------------------------------
# The adapter that a model carries now, in the words of `layers`: what files are written from.


ROLE_OF_PARAMETER = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_magnitude_vector.weight": "dora",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "lora_mid.weight": "mid",
}
"""What peft and LyCORIS call a tensor; other names are roles as they stand."""


def adapter_from_model(
    transformers: Mapping[str, nn.Module],
    modules: Mapping[str, Mapping[str, ModuleSettings]],
    table: KeyTable,
) -> Adapter:
    """Of every expert that has one; each adapted module must be there with all its tensors."""
    layers: dict[LayerPath, Layer] = {}
    for expert, settings in modules.items():
        found = adapter_weights(transformers[expert])
        assert found.keys() == settings.keys(), found.keys() ^ settings.keys()
        for name, tensors in found.items():
            named = {ROLE_OF_PARAMETER.get(role, role): tensor for role, tensor in tensors.items()}
            named.setdefault("alpha", torch.tensor(settings[name].alpha))
            place = LayerPath(cast("Stage", expert) if expert else None, name)
            layers[place] = make_layer(named, {role: f"{name}.{role}" for role in named})
    return Adapter(table, layers)
