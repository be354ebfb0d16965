"""From the tensors of a file, whatever tool wrote it, to an adapter in our own words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.adapters.files.formats import FORMATS, SUFFIXES
from gracetune.adapters.files.fused_projections import (
    join_fused,
    select_rows,
    split_fused,
    swap_halves,
)
from gracetune.adapters.files.keys import (
    KeyIndex,
    LayerPath,
    ParsedKey,
    build_key,
    detect_format,
    detect_table,
    parse_key,
    resolve_stages,
    unknown_key_error,
)
from gracetune.adapters.files.layers import (
    Adapter,
    Layer,
    delta_shape,
    is_dora_per_row,
    lokr_sizes,
    make_layer,
    rank_of,
    scale_of,
    with_stage,
)
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gracetune.adapters.files.formats import KeyFormat, SuffixStyle
    from gracetune.adapters.files.keys import KeyTable


FAMILY_KEY = "gracetune.family"
PEFT_SETTINGS_KEY = "lora_adapter_metadata"
"""Where diffusers keeps peft's settings in a file's header."""
SCALARS = ("alpha", "scalar")
MAX_TRIES = 1e9
_OPTIONAL, _REPEATED = re.compile(r"(?<!\()\?"), re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
UNUSED_ALPHA = 1e9
"""ai-toolkit writes 9999999999 for LoKr of whole matrices, where alpha has no part."""


def import_tensors(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    tables: Mapping[str, KeyTable],
    table: KeyTable | None = None,
    peft_config: Mapping[str, object] | None = None,
) -> Adapter:
    """The adapter that these tensors are; the first key that shows a fault ends it.

    `table` is for who knows the family; `peft_config` is what lay beside the file.
    """
    if not tensors:
        raise AdapterError("the file holds no tensors.", kind="empty")
    texts = list(tensors)
    table = table or detect_table(texts, tables, metadata.get(FAMILY_KEY))
    keys = _read(texts, table, tables)
    _check_finite(tensors, keys)
    grouped: dict[LayerPath, dict[str, ParsedKey]] = {}
    for key in keys:
        twin = grouped.setdefault(key.path, {}).setdefault(key.role, key)
        if twin is not key:
            raise AdapterError(
                f"{key.text!r} and {twin.text!r} are two spellings of one tensor. Remove one.",
                kind="duplicate",
                key=key.text,
            )
    settings = _peft_settings(metadata, peft_config)
    layers = {
        place: _layer(table, place, found, tensors, settings) for place, found in grouped.items()
    }
    form = detect_format(keys)
    return Adapter(
        table=table,
        layers=layers,
        format=None if form is None else form.name,
        metadata=dict(metadata),
        notices=tuple(_notices(grouped, layers, tensors, settings)),
    )


def _read(texts: list[str], table: KeyTable, tables: Mapping[str, KeyTable]) -> list[ParsedKey]:
    index = KeyIndex(table)
    keys = []
    for text in texts:
        key = parse_key(text, index)
        if key is None:
            raise _other_model(text, texts, table, tables) or unknown_key_error(text, [table])
        keys.append(key)
    return resolve_stages(keys)


def _other_model(
    text: str, texts: list[str], table: KeyTable, tables: Mapping[str, KeyTable]
) -> AdapterError | None:
    """The verdict on a file whose keys are another family's, if they are."""
    for other in tables.values():
        index = KeyIndex(other)
        if other is not table and all(parse_key(one, index) for one in texts):
            return AdapterError(
                f"{text!r} is a key of a {other.family} adapter, and {table.family} was asked for: "
                f"the file is for another model. Give --family {other.family}, or another file.",
                kind="other-model",
                key=text,
            )
    return None


def _check_finite(tensors: Mapping[str, Tensor], keys: list[ParsedKey]) -> None:
    for key in keys:
        tensor = tensors[key.text]
        if not tensor.numel() or (key.role in SCALARS and tensor.numel() != 1):
            size = "x".join(map(str, tensor.shape))
            raise AdapterError(
                f"{key.text!r} has the shape {size}, which is none of a {key.role}. The file was "
                "badly put together; save it again.",
                kind="damaged",
                key=key.text,
            )
        if not tensor.is_floating_point():
            if key.role == "alpha":
                continue
            raise AdapterError(
                f"{key.text!r} has the dtype {str(tensor.dtype).removeprefix('torch.')}; an "
                "adapter's weights are floats. Convert it with the tool that quantised it.",
                kind="dtype",
                key=key.text,
            )
        # Alpha is judged where its part in the scale is known.
        if key.role != "alpha" and not _is_finite(tensor):
            what = "nan" if bool(tensor.float().isnan().any()) else "inf"
            why = " (float16 ends at 65504)" if tensor.dtype == torch.float16 else ""
            raise AdapterError(
                f"{key.text!r} has values that are {what}: training went wrong or the values "
                f"overflowed when they were saved{why}. Take an earlier checkpoint, or save it in "
                "bfloat16.",
                kind="not-finite",
                key=key.text,
            )


def _is_finite(tensor: Tensor) -> bool:
    """By its extremes: one pass, and nan is both of them."""
    low, high = torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _layer(
    table: KeyTable,
    place: LayerPath,
    found: Mapping[str, ParsedKey],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, object],
) -> Layer:
    layer = make_layer(
        {role: tensors[key.text] for role, key in found.items()},
        {role: key.text for role, key in found.items()},
    )
    if "alpha" not in found:
        layer = _with_settings(layer, place.module, settings)
    bias = found.get("diff_b")
    if bias is not None and bias.text.endswith(".bias") and scale_of(layer) != 1.0:
        # peft scales the bias of lora_B together with its product.
        scaled = layer.tensors["diff_b"].float() * scale_of(layer)
        layer = replace(layer, tensors={**layer.tensors, "diff_b": scaled})
    if layer.is_dora:
        _check_magnitudes(layer, found["dora"].text)
    if place.module in table.swapped_halves and next(iter(found.values())).naming == "original":
        half = delta_shape(layer)[0] // 2
        layer = select_rows(place.module, layer, [(half, 2 * half), (0, half)])
    return layer


def _check_magnitudes(layer: Layer, key: str) -> None:
    """One a row, or one a column; a flattened kernel's columns are several of the weight's."""
    shape, magnitude = delta_shape(layer), layer.tensors["dora"]
    number = magnitude.numel()
    fits = shape[1] % number == 0 if magnitude.dim() > 2 else shape[1] == number
    if not (shape[0] == number if is_dora_per_row(layer) else fits):
        raise AdapterError(
            f"{key!r} has {number} magnitudes for a weight of {shape[0]} rows and {shape[1]} "
            "columns: it is of another module or model.",
            kind="rank-mismatch",
            key=key,
        )


def _peft_settings(
    metadata: Mapping[str, str], peft_config: Mapping[str, object] | None
) -> Mapping[str, object]:
    """peft's settings from the file's header or from beside it; empty where nobody kept them."""
    if peft_config is not None:
        return peft_config
    text = metadata.get(PEFT_SETTINGS_KEY)
    if text is None:
        return {}
    try:
        known = json.loads(text)
    except json.JSONDecodeError as error:
        raise AdapterError(
            f"the header's {PEFT_SETTINGS_KEY} is not JSON ({error}); the scale is lost with it.",
            kind="damaged",
        ) from error
    return {
        name.removeprefix("transformer."): value
        for name, value in known.items()
        if name.startswith("transformer.") or "." not in name
    }


@lru_cache
def _expression(name: str, pattern: str) -> re.Pattern[str]:
    """A pattern as peft's `get_pattern_key` matches it: the end of a module's name."""
    if _could_hang(pattern):
        raise _bad_pattern(name, pattern, "matching it could take forever")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise _bad_pattern(name, pattern, f"it is no expression ({error})") from error


def _could_hang(pattern: str) -> bool:
    """A header may come from anyone: how much matching may try, on a name of a hundred letters."""
    groups = pattern.count("(") + 1
    tries = groups * math.log(pattern.count("|") / groups + 1)
    tries += len(_OPTIONAL.findall(pattern)) * math.log(2)
    tries += len(_REPEATED.findall(pattern)) * math.log(100)
    return tries > math.log(MAX_TRIES) or _REPEATED_GROUP.search(pattern) is not None


def _bad_pattern(name: str, pattern: str, why: str) -> AdapterError:
    return AdapterError(
        f"peft's settings have {pattern[:200]!r} in {name}, and {why}: the scale is not known "
        "without it. Write the names of the modules there.",
        kind="damaged",
    )


def _with_settings(layer: Layer, module: str, settings: Mapping[str, object]) -> Layer:
    """Alpha as peft applies it: by pattern or for all, by the rank or by its root."""
    stated = _for_module("alpha_pattern", module, settings)
    if stated is None:
        stated = settings.get("lora_alpha", settings.get("alpha"))
    rank = rank_of(layer)
    divisor: object = rank
    if rank is None:
        divisor = _for_module("rank_pattern", module, settings) or settings.get("r")
    if not isinstance(stated, int | float) or not isinstance(divisor, int | float):
        return layer
    scale = stated / (math.sqrt(divisor) if settings.get("use_rslora") else divisor)
    if rank is not None:
        return replace(layer, alpha=None if scale == 1.0 else scale * rank)
    if layer.algorithm == "lokr" and scale != 1.0:
        # peft scales whole matrices too, where everyone else does not.
        w1 = layer.tensors["lokr_w1"].float() * scale
        return replace(layer, tensors={**layer.tensors, "lokr_w1": w1})
    return layer


def _for_module(name: str, module: str, settings: Mapping[str, object]) -> object | None:
    patterns = settings.get(name)
    if not isinstance(patterns, dict):
        return None
    matching = (key for key in patterns if _expression(name, str(key)).match(module))
    return next((patterns[key] for key in matching), None)


def _notices(
    grouped: Mapping[LayerPath, Mapping[str, ParsedKey]],
    layers: Mapping[LayerPath, Layer],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, object],
) -> list[str]:
    notices = []
    idle = [
        found["alpha"].text
        for place, found in grouped.items()
        if "alpha" in found and rank_of(layers[place]) is None
    ]
    huge = [key for key in idle if not abs(float(tensors[key].float())) < UNUSED_ALPHA]
    if huge:
        notices.append(
            f"{len(huge)} LoKr modules of whole matrices have an alpha of "
            f"{float(tensors[huge[0]].float()):.3g}: it has no part in the result and is left out."
        )
    live = any(
        key.text.startswith("base_model.") for found in grouped.values() for key in found.values()
    )
    if live and not settings and not any("alpha" in found for found in grouped.values()):
        notices.append(
            "peft keeps alpha in adapter_config.json, which is not beside the file: alpha is taken "
            "to equal the rank."
        )
    return notices


# ------------------------------------------------------------------------------------------
# From an adapter in our own words to the tensors of a file, in any tool's form.
#
# What a form cannot hold exactly is refused with a way out, never dropped.


PEFT_STYLES = ("peft", "peft-live")
FOLDED_ROLE = {"lora": "up", "loha": "hada_w1_a", "lokr": "lokr_w1"}
"""The factor that takes the scale where a form has no alpha."""


class UnsupportedModule(NamedTuple):
    """A module that a form cannot hold, and why."""

    module: str
    reason: str
    is_nameless: bool = False
    """Whether no other algorithm would help it."""


def export_tensors(
    adapter: Adapter, form: KeyFormat, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
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
            key = build_key(form, index, place, role, style)
            tensors[key] = _stored(key, role, tensor, dtype)
    return tensors


def find_unsupported(adapter: Adapter, form: KeyFormat) -> UnsupportedModule | None:
    """The first module that a form cannot hold, found without spelling the rest."""
    return _lost(_rewritten(adapter, form), form)


def _lost(adapter: Adapter, form: KeyFormat) -> UnsupportedModule | None:
    """By names and shapes; no weight is read."""
    index = KeyIndex(adapter.table)
    for place, layer in adapter.layers.items():
        if index.from_diffusers(place.module, form.naming, form.separator) is None:
            return UnsupportedModule(
                place.module, "it has no name for this module", is_nameless=True
            )
        style = _style(form, layer)
        for role in layer.tensors:
            if role not in SUFFIXES[style]:
                what = {"diff": "a full matrix", "mid": "a core tensor (Tucker)"}.get(role, role)
                return UnsupportedModule(place.module, f"it cannot hold {what}")
        role = next(iter(layer.tensors))
        if adapter.table.accepts_any_name and not parse_key(
            build_key(form, index, place, role, style), index
        ):
            why = "nothing in its keys tells where the name of a module begins"
            return UnsupportedModule(place.module, why, is_nameless=True)
        if layer.is_dora and style in PEFT_STYLES and not is_dora_per_row(layer):
            return UnsupportedModule(place.module, "its magnitudes go by rows alone")
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
    if form.stages and adapter.table.has_stages:
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
    return with_stage(adapter, None)


def _rewritten(adapter: Adapter, form: KeyFormat) -> Adapter:
    """Projections cut, and their rows ordered, as the form's naming has them."""
    if form.naming == "diffusers":
        return split_fused(adapter)
    return swap_halves(join_fused(adapter))


def _style(form: KeyFormat, layer: Layer) -> SuffixStyle:
    """ComfyUI knows a core tensor (`lora_mid`) only beside lora_down and lora_up."""
    return "kohya" if form.style == "comfyui" and "mid" in layer.tensors else form.style


def _roles(layer: Layer, form: KeyFormat, style: SuffixStyle) -> dict[str, Tensor]:
    if form.alpha == "folded":
        layer = fold_scale(layer)
    if layer.algorithm == "lokr" and style in PEFT_STYLES:
        layer = _as_peft_makes_it(layer)
    tensors = dict(layer.tensors)
    if layer.is_dora and style in PEFT_STYLES:
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


def _cannot(adapter: Adapter, form: KeyFormat, lost: UnsupportedModule) -> AdapterError:
    """Whoever wrote an adapter can write another form; only `convert` can approximate it."""
    ways = [f"Write the form {other}." for other in _holding(adapter)[:1]]
    if not lost.is_nameless:
        ways.append("`gracetune adapter convert` with --lora-rank approximates it by a LoRA.")
    elif not ways:
        ways.append("No form has one: leave the module out.")
    return AdapterError(
        f"{lost.module} cannot be written in the form {form.name}: {lost.reason}. {' '.join(ways)}",
        kind="not-exact",
        key=lost.module,
    )


def _holding(adapter: Adapter) -> list[str]:
    """The forms that hold all of an adapter of one stage, those that tools load first."""
    names = []
    for form in sorted(FORMATS, key=lambda form: bool(form.caution)):
        try:
            fits = not form.stages and find_unsupported(adapter, form) is None
        except AdapterError:
            continue  # its rows cannot be cut so
        if fits:
            names.append(form.name)
    return names
