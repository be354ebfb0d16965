"""Add adapters to a model, and read the trained adapter back from it.

LoRA and DoRA use peft's layers. LoCon, LoHa and LoKr use LyCORIS's modules, and `full` a module of
this package; each is a submodule next to the frozen layer (compute/lycoris.py). The frozen weight
is never changed or copied, so it may be quantized or streamed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from gracetune.adapters.compute.lycoris import AdaptedLayer, add_lycoris_adapter
from gracetune.adapters.files.fused_projections import split_fused
from gracetune.adapters.files.keys import LayerPath, is_bare_parameter
from gracetune.adapters.files.layers import (
    Adapter,
    delta_bias,
    delta_shape,
    make_layer,
    merge_weight,
    scale_of,
)
from gracetune.adapters.files.lowrank import concatenate_ranks
from gracetune.config.schema import AdapterSection
from gracetune.errors import AdapterError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import ExitStack

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable, Stage
    from gracetune.adapters.files.layers import Layer


ADAPTER_NAME = "default"
"""Name under which peft's layers hold the trained adapter."""
PEFT_KINDS = frozenset(("lora", "dora"))
"""Values of `adapter.kind` that peft implements."""
LINEAR_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear,)
LINEAR_AND_CONV_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
)
LAYERS_BY_KIND = {"lora": LINEAR_LAYERS, "dora": LINEAR_LAYERS}
"""Layer types that an adapter kind supports; kinds not listed also support convolutions."""
REGEX_PREFIX = "re:"
"""Prefix of an entry in `adapter.targets` that is a regular expression for module names."""
WILDCARDS = frozenset("*?[")
ROLE_OF_PARAMETER = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_magnitude_vector.weight": "dora",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "lora_mid.weight": "mid",
}
"""Tensor of an adapter layer (`down`, `up`, ...), by the parameter's name in peft or LyCORIS. Names
that are not listed stay the same."""


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """Settings of one module's adapter, with the run file's `adapter.overrides` applied."""

    rank: int
    alpha: float
    dropout: float
    factor: int
    """LoKr's `factor`, which determines the sizes of its two Kronecker factors."""


def add_adapter(
    transformers: Mapping[str, nn.Module],
    section: AdapterSection,
    default_targets: Sequence[str],
    seed: int,
) -> dict[str, dict[str, ModuleSettings]]:
    """Freeze the transformers and add adapters to their target modules.

    Returns the settings of each adapted module. `transformers` and the result are keyed by "high"
    and "low" (noise), or by "" for a single transformer. The new weights are fp32, whatever the
    dtype of the frozen weights, and do not change the model's output yet.
    """
    selected = select_modules(transformers, section, default_targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for expert, modules in selected.items():
            model = transformers[expert].requires_grad_(False)
            if not modules:
                continue
            if section.kind in PEFT_KINDS:
                _inject_peft(model, section, modules)
            else:
                for name, settings in modules.items():
                    add_lycoris_adapter(model, name, section, settings)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
    return selected


def adapter_from_model(
    transformers: Mapping[str, nn.Module],
    modules: Mapping[str, Mapping[str, ModuleSettings]],
    table: KeyTable,
) -> Adapter:
    """Return the adapter of a model, with the current weights of the adapter's layers.

    `modules` is the result of `add_adapter`.
    """
    layers: dict[LayerPath, Layer] = {}
    for expert, settings in modules.items():
        found = adapter_weights(transformers[expert])
        assert found.keys() == settings.keys(), found.keys() ^ settings.keys()
        for name, tensors in found.items():
            by_role = {ROLE_OF_PARAMETER.get(role, role): t for role, t in tensors.items()}
            by_role.setdefault("alpha", torch.tensor(settings[name].alpha))
            path = LayerPath(cast("Stage", expert) if expert else None, name)
            layers[path] = make_layer(by_role, {role: f"{name}.{role}" for role in by_role})
    return Adapter(table, layers)


def adapter_weights(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the adapter tensors of a transformer, by module and then by parameter name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            found[name] = {key: t.detach() for key, t in module.adapter.state_dict().items()}
    for name, parameter in model.named_parameters():
        # peft's names: MODULE.lora_A.default.weight, MODULE.lora_magnitude_vector.default.weight
        match = re.fullmatch(rf"(.*)\.(lora_\w+)\.{ADAPTER_NAME}\.(\w+)", name)
        if match:
            found.setdefault(match[1], {})[f"{match[2]}.{match[3]}"] = parameter.detach()
    return found


# Adapters from files, for sampling


def install_adapters(
    transformers: Mapping[str, nn.Module],
    adapters: Sequence[tuple[Adapter, float]],
    undo: ExitStack,
) -> None:
    """Add adapters from files to a model, each times its strength; `undo` removes them again.

    LoRAs on linear layers are computed next to the frozen layer, as in training, so that small
    changes are not rounded away and the weights may stream. All other changes are merged into the
    weights. `transformers` are keyed by "high" and "low" (noise), or by "" for a single one.
    """
    loras: dict[LayerPath, list[tuple[Layer, float]]] = {}
    for adapter, strength in adapters:
        for path, layer in split_fused(adapter).layers.items():
            model = transformers.get(path.stage or "")
            module = None if model is None else _find_module(model, path, adapter.table)
            if module is None:
                raise AdapterError(
                    f"the adapter changes {path.module}"
                    f"{f' of the {path.stage}-noise transformer' if path.stage else ''}, which "
                    "this model does not have. The adapter is for another model.",
                    kind="other-model",
                    key=path.module,
                )
            _check_shape(path, layer, module)
            if isinstance(module, nn.Linear) and layer.tensors.keys() == {"up", "down"}:
                loras.setdefault(path, []).append((layer, strength))
            else:
                _merge_layer(path, layer, module, strength, undo)
    for expert, model in transformers.items():
        sums = {
            path.module: concatenate_ranks(terms)
            for path, terms in loras.items()
            if (path.stage or "") == expert
        }
        if sums:
            _inject_loras(model, sums)
            undo.callback(remove_adapters, model)


def remove_adapters(model: nn.Module) -> None:
    """Put the frozen layers back in place of the layers that `add_adapter` has put around them."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AdaptedLayer | BaseTunerLayer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)
    if "peft_config" in model.__dict__:
        del model.peft_config


def _inject_loras(model: nn.Module, layers: Mapping[str, Layer]) -> None:
    settings = {}
    for name, layer in layers.items():
        rank = layer.tensors["down"].shape[0]
        settings[name] = ModuleSettings(rank, scale_of(layer) * rank, 0.0, -1)
    _inject_peft(model, AdapterSection(), settings)
    for name, layer in layers.items():
        device = next(model.get_submodule(f"{name}.base_layer").parameters()).device
        for part, role in (("lora_A", "down"), ("lora_B", "up")):
            linear = model.get_submodule(f"{name}.{part}.{ADAPTER_NAME}")
            linear.weight = nn.Parameter(layer.tensors[role].flatten(1).float().to(device))


def _find_module(model: nn.Module, path: LayerPath, table: KeyTable) -> nn.Module | None:
    """Return the module that an adapter's layer changes, or None.

    If the layer changes a bare parameter, it is a module that holds the parameter as `weight`.
    """
    if is_bare_parameter(path.module, table):
        parent, _, name = path.module.rpartition(".")
        parameter = _own_parameters(model, parent).get(name)
        if parameter is None:
            return None
        holder = nn.Module()
        holder.weight = parameter
        return holder
    has_weight = "weight" in _own_parameters(model, path.module)
    return model.get_submodule(path.module) if has_weight else None


def _own_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return the parameters of a module, without those of its submodules; empty if it is absent."""
    try:
        return dict(model.get_submodule(name).named_parameters(recurse=False))
    except AttributeError:
        return {}


def _check_shape(path: LayerPath, layer: Layer, module: nn.Module) -> None:
    own: Sequence[int] = cast("Tensor", module.weight).shape
    if isinstance(module, nn.Linear):  # a quantized weight may be stored in another shape
        own = module.out_features, module.in_features
    shape = delta_shape(layer)
    if set(layer.tensors) != {"diff_b"} and math.prod(own) != math.prod(shape):
        shapes = ["x".join(map(str, one)) for one in (own, shape)]
        raise AdapterError(
            f"{path.module} is {shapes[0]} in the model and {shapes[1]} in the adapter, which is "
            "for a model of another size. Set model.path to that model, or name another adapter.",
            kind="other-model",
            key=path.module,
        )


def _merge_layer(
    path: LayerPath, layer: Layer, module: nn.Module, strength: float, undo: ExitStack
) -> None:
    weight, bias = cast("Tensor", module.weight), delta_bias(layer)
    if type(weight) is not nn.Parameter or weight.itemsize < 2:
        raise AdapterError(
            f"{path.module} is quantized, and this kind of adapter would have to be merged into "
            "it. Set model.quantize: none to sample with it.",
            kind="dtype",
            key=path.module,
        )
    _replace_values(weight, merge_weight(layer, weight, strength), undo)
    if bias is not None:
        old = cast("Tensor | None", module.bias)
        if old is None:
            raise AdapterError(
                f"the adapter changes the bias of {path.module}, which has none in this model. "
                "The adapter is for another model.",
                kind="other-model",
                key=path.module,
            )
        _replace_values(old, (old.float() + strength * bias.to(old.device)).to(old.dtype), undo)


def _replace_values(parameter: Tensor, values: Tensor, undo: ExitStack) -> None:
    """Set a parameter's values. A copy of the old ones is kept, which `undo` writes back."""
    before = parameter.detach().clone()
    parameter.data.copy_(values)

    def restore() -> None:
        parameter.data.copy_(before)

    undo.callback(restore)


def _inject_peft(
    model: nn.Module, section: AdapterSection, modules: Mapping[str, ModuleSettings]
) -> None:
    config = LoraConfig(
        r=section.rank,
        lora_alpha=alpha_of(section),
        lora_dropout=section.dropout,
        target_modules="|".join(map(re.escape, modules)),  # a list would also match suffixes
        rank_pattern={f"^{re.escape(name)}": settings.rank for name, settings in modules.items()},
        alpha_pattern={f"^{re.escape(name)}": settings.alpha for name, settings in modules.items()},
        use_dora=section.kind == "dora",
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER_NAME)
    for name, settings in modules.items():
        if settings.dropout != section.dropout:
            dropouts = model.get_submodule(f"{name}.lora_dropout")
            dropouts.add_module(ADAPTER_NAME, nn.Dropout(settings.dropout))


# Selecting modules. A target or override that matches nothing, or not in every expert, is an error.


def select_modules(
    transformers: Mapping[str, nn.Module], section: AdapterSection, defaults: Sequence[str]
) -> dict[str, dict[str, ModuleSettings]]:
    """Return the adapter settings of each module that `adapter.targets` selects.

    They are keyed by transformer ("high" and "low" noise, or "" for a single one) and module name.
    `defaults` are the targets if the setting is empty.
    """
    targets = section.targets or tuple(defaults)
    layer_types = LAYERS_BY_KIND.get(section.kind, LINEAR_AND_CONV_LAYERS)
    all_modules = {
        expert: {name: module for name, module in model.named_modules() if name}
        for expert, model in transformers.items()
    }
    adaptable = {
        expert: [name for name, module in modules.items() if isinstance(module, layer_types)]
        for expert, modules in all_modules.items()
    }
    if not targets:
        names = dict.fromkeys(target_suffix(name) for some in adaptable.values() for name in some)
        raise ConfigError(
            "adapter.targets is empty, and this model family has no default targets. Name the "
            f"modules to adapt. Candidates: {', '.join(list(names)[:8]) or 'none'}."
        )
    for target in targets:
        _check_matches(target, "adapter.targets", adaptable, all_modules)
    selected = {
        expert: [name for name in names if any(matches(name, t, expert) for t in targets)]
        for expert, names in adaptable.items()
    }
    for pattern in section.overrides:
        _check_matches(pattern, "adapter.overrides", selected, all_modules)
    return {
        expert: {name: settings_for(section, name, expert) for name in names}
        for expert, names in selected.items()
    }


def settings_for(section: AdapterSection, name: str, expert: str = "") -> ModuleSettings:
    """Return a module's adapter settings: those of the run file, changed by matching overrides.

    A later override wins over an earlier one. An override of the rank resets alpha to that rank,
    unless it sets alpha too.
    """
    rank, alpha = section.rank, section.alpha
    dropout, factor = section.dropout, section.factor
    for pattern, override in section.overrides.items():
        if matches(name, pattern, expert):
            if override.rank is not None:
                rank, alpha = override.rank, None
            alpha = alpha if override.alpha is None else override.alpha
            dropout = dropout if override.dropout is None else override.dropout
            factor = factor if override.factor is None else override.factor
    return ModuleSettings(rank, float(rank if alpha is None else alpha), dropout, factor)


def alpha_of(section: AdapterSection) -> float:
    """Return `adapter.alpha`, or the rank if it is not set, so that the scale alpha / rank is 1."""
    return section.rank if section.alpha is None else section.alpha


def matches(name: str, target: str, expert: str = "") -> bool:
    """Return True if an entry of `adapter.targets` selects the module `name`.

    Such a target is a module's name, the end of a name after a dot, a pattern with wildcards, or
    `re:` and a regular expression. In a model with a high-noise and a low-noise transformer, names
    start with `high.` or `low.`, which is the `expert`.
    """
    full = f"{expert}.{name}" if expert else name
    if target.startswith(REGEX_PREFIX):
        return re.fullmatch(target.removeprefix(REGEX_PREFIX), full) is not None
    if WILDCARDS & set(target):
        return fnmatchcase(full, target) or fnmatchcase(full, f"*.{target}")
    return full == target or full.endswith(f".{target}")


def target_suffix(name: str) -> str:
    """Return a module's name after the block number, as `adapter.targets` usually gives names."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    first = numbers[0] + 1 if numbers and numbers[0] + 1 < len(parts) else 0
    return ".".join(parts[first:])


def _check_matches(
    target: str,
    setting: str,
    candidates: Mapping[str, Sequence[str]],
    all_modules: Mapping[str, Mapping[str, nn.Module]],
) -> None:
    """Raise an error unless a target of the adapter matches a module in every transformer.

    A target that names the high-noise or the low-noise transformer need match only in that one.
    """
    _check_regex(target, setting)
    matched = {e: [n for n in names if matches(n, target, e)] for e, names in candidates.items()}
    empty = [expert for expert, names in matched.items() if not names]
    if not empty or (len(empty) < len(matched) and _names_one_expert(target, matched)):
        return
    unsupported = [
        f"{name} ({type(module).__name__})"
        for name, module in all_modules[empty[0]].items()
        if matches(name, target, empty[0])
    ]
    where = f" of the {empty[0]}-noise expert" if empty[0] else ""
    hint = f" It matches {unsupported[0]}, which is not a candidate here." if unsupported else ""
    suffixes = sorted({target_suffix(name) for name in candidates[empty[0]]})
    raise ConfigError(
        f"{setting}: {target!r} matches no module{where} that can be adapted.{hint} "
        f"Candidates: {', '.join(suffixes)}."
    )


def _names_one_expert(target: str, experts: Iterable[str]) -> bool:
    return any(expert in re.split(r"[.\\(|)]", target) for expert in experts if expert)


def _check_regex(target: str, setting: str) -> None:
    if target.startswith(REGEX_PREFIX):
        try:
            re.compile(target.removeprefix(REGEX_PREFIX))
        except re.error as error:
            raise ConfigError(
                f"{setting}: {target!r} is not a valid regular expression: {error}. Fix it, or "
                "write a name, a suffix or a pattern with *."
            ) from error
