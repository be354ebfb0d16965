"""From an adapter in our own words to the tensors of a file, in any tool's form.

What a form cannot hold exactly is refused with a way out, never dropped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.adapters.delta import dora_by_rows, lokr_sizes
from gracetune.adapters.layers import Adapter, Layer, at_stage, rank_of, scale_of
from gracetune.adapters.names import KeyIndex, read_key, write_key
from gracetune.adapters.rows import join_fused, split_fused, swap_halves
from gracetune.adapters.tables.forms import ENDINGS, FORMS
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.adapters.tables.forms import KeyFormat, Style

PEFT_STYLES = ("peft", "peft-live")
FOLDED_ROLE = {"lora": "up", "loha": "hada_w1_a", "lokr": "lokr_w1"}
"""The factor that takes the scale where a form has no alpha."""


class Lost(NamedTuple):
    """A module that a form cannot hold, and why."""

    module: str
    why: str
    is_nameless: bool = False
    """Whether no other algorithm would help it."""


def spell(adapter: Adapter, form: KeyFormat, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of the file, by key; `dtype` None keeps each as it is."""
    adapter = _rewritten(_staged(adapter, form), form)
    lost = _lost(adapter, form)
    if lost is not None:
        raise _cannot(adapter, form, lost)
    index = KeyIndex(adapter.table)
    tensors: dict[str, Tensor] = {}
    for place, layer in adapter.layers.items():
        style = _style(form, layer)
        for role, tensor in _roles(layer, form, style).items():
            key = write_key(form, index, place, role, style)
            tensors[key] = _stored(key, role, tensor, dtype)
    return tensors


def lost_in(adapter: Adapter, form: KeyFormat) -> Lost | None:
    """The first module that a form cannot hold, found without spelling the rest."""
    return _lost(_rewritten(adapter, form), form)


def _lost(adapter: Adapter, form: KeyFormat) -> Lost | None:
    """By names and shapes; no weight is read."""
    index = KeyIndex(adapter.table)
    for place, layer in adapter.layers.items():
        if index.spell(place.module, form.naming, form.joint) is None:
            return Lost(place.module, "it has no name for this module", is_nameless=True)
        style = _style(form, layer)
        for role in layer.tensors:
            if role not in ENDINGS[style]:
                what = {"diff": "a full matrix", "mid": "a core tensor (Tucker)"}.get(role, role)
                return Lost(place.module, f"it cannot hold {what}")
        role = next(iter(layer.tensors))
        if adapter.table.open and not read_key(write_key(form, index, place, role, style), index):
            why = "nothing in its keys tells where the name of a module begins"
            return Lost(place.module, why, is_nameless=True)
        if layer.dora and style in PEFT_STYLES and not dora_by_rows(layer):
            return Lost(place.module, "its magnitudes go by rows alone")
    return None


def fold_scale(layer: Layer) -> Layer:
    """alpha / rank multiplied into a factor, for readers that know of no alpha."""
    scale = scale_of(layer)
    if scale == 1.0:
        return replace(layer, alpha=None)
    role = FOLDED_ROLE[layer.algorithm]
    role = role if role in layer.tensors else f"{role}_a"
    factor = layer.tensors[role]
    if not math.log2(abs(scale) or 1.0).is_integer():
        factor = factor.float()  # a power of two is exact in any float; others would round
    return replace(layer, tensors={**layer.tensors, role: factor * scale}, alpha=None)


def _staged(adapter: Adapter, form: KeyFormat) -> Adapter:
    """Stages as the form wants them: all named, or none."""
    if form.stages and adapter.table.staged:
        if None in adapter.stages:
            raise AdapterError(
                f"the form {form.name} names the stage in each key, and this adapter does not say "
                "which it is. Give --stage high or --stage low.",
                kind="no-stage",
            )
        return adapter
    if len(adapter.stages) > 1:
        first = next(p for p in adapter.layers if p.stage == adapter.stages[-1])
        raise AdapterError(
            f"{first.module} is there for both stages, and a file of the form {form.name} holds "
            "one. Write one file a stage (convert does so by itself), or pick one with --stage.",
            kind="mixed-stages",
            key=first.module,
        )
    return at_stage(adapter, None)


def _rewritten(adapter: Adapter, form: KeyFormat) -> Adapter:
    """Projections cut, and their rows ordered, as the form's naming has them."""
    if form.naming == "diffusers":
        return split_fused(adapter)
    return swap_halves(join_fused(adapter))


def _style(form: KeyFormat, layer: Layer) -> Style:
    """ComfyUI knows a core tensor (`lora_mid`) only beside lora_down and lora_up."""
    return "kohya" if form.style == "comfyui" and "mid" in layer.tensors else form.style


def _roles(layer: Layer, form: KeyFormat, style: Style) -> dict[str, Tensor]:
    if form.alpha == "folded":
        layer = fold_scale(layer)
    if layer.algorithm == "lokr" and style in PEFT_STYLES:
        layer = _as_peft_makes_it(layer)
    tensors = dict(layer.tensors)
    if layer.dora and style in PEFT_STYLES:
        tensors["dora"] = tensors["dora"].flatten()
    rank = rank_of(layer)
    if form.alpha == "always" and layer.algorithm != "full":
        alpha = layer.alpha if layer.alpha is not None else float(rank or 1)
        tensors["alpha"] = torch.tensor(alpha)
    elif form.alpha == "if-needed" and rank is not None and scale_of(layer) != 1.0:
        tensors["alpha"] = torch.tensor(layer.alpha)
    return tensors


def _as_peft_makes_it(layer: Layer) -> Layer:
    """peft makes whole matrices where the rank is half their width or more, and then loads no
    factors; the smaller matrix it decomposes for all modules or for none."""
    t = dict(layer.tensors)
    if "lokr_w1_a" in t:
        t["lokr_w1"] = t.pop("lokr_w1_a").float() @ t.pop("lokr_w1_b").float()
    (_, rows), (_, columns) = lokr_sizes(layer)
    plain = "lokr_w2_a" in t and "lokr_t2" not in t and t["lokr_w2_b"].dim() == 2
    if plain and 2 * t["lokr_w2_b"].shape[0] >= max(rows, columns):
        t["lokr_w2"] = t.pop("lokr_w2_a").float() @ t.pop("lokr_w2_b").float()
    return replace(layer, tensors=t)


def _stored(key: str, role: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Memory of its own for each tensor, in the dtype asked for; alpha stays float32."""
    stored = tensor.detach().cpu()
    if dtype is not None and role != "alpha":
        stored = stored.to(dtype)
        if not bool(torch.isfinite(stored.float()).all()):
            most = float(tensor.detach().float().abs().max())
            raise AdapterError(
                f"{key!r} reaches {most:.3g}, which {str(dtype).removeprefix('torch.')} cannot "
                "hold. Give --dtype bfloat16 or float32.",
                kind="not-finite",
                key=key,
            )
    return stored.clone(memory_format=torch.contiguous_format)


def _cannot(adapter: Adapter, form: KeyFormat, lost: Lost) -> AdapterError:
    """Whoever wrote an adapter can write another form; only `convert` can approximate it."""
    ways = [f"Write the form {other}." for other in _holding(adapter)[:1]]
    if not lost.is_nameless:
        ways.append("`gracetune adapter convert` with --lora-rank approximates it by a LoRA.")
    elif not ways:
        ways.append("No form has one: leave the module out.")
    return AdapterError(
        f"{lost.module} cannot be written in the form {form.name}: {lost.why}. {' '.join(ways)}",
        kind="not-exact",
        key=lost.module,
    )


def _holding(adapter: Adapter) -> list[str]:
    """The forms that hold all of an adapter of one stage, those that tools load first."""
    names = []
    for form in sorted(FORMS, key=lambda form: bool(form.caution)):
        try:
            fits = not form.stages and lost_in(adapter, form) is None
        except AdapterError:
            continue  # its rows cannot be cut so
        if fits:
            names.append(form.name)
    return names
