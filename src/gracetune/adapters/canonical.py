"""From the tensors of a file, whatever tool wrote it, to an adapter in our own words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from gracetune.adapters.delta import delta_shape, dora_by_rows
from gracetune.adapters.layers import Adapter, Layer, make_layer, rank_of, scale_of
from gracetune.adapters.names import (
    TABLES,
    KeyIndex,
    LayerPath,
    ParsedKey,
    choose_table,
    detect_form,
    read_key,
    settle_stages,
    unknown_key,
)
from gracetune.adapters.rows import take_rows
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gracetune.adapters.tables.types import NameTable

FAMILY_KEY = "gracetune.family"
PEFT_SETTINGS = "lora_adapter_metadata"
"""Where diffusers keeps peft's settings in a file's header."""
SCALARS = ("alpha", "scalar")
MAX_TRIES = 1e9
_OPTIONAL, _REPEATED = re.compile(r"(?<!\()\?"), re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
HUGE_ALPHA = 1e9
"""ai-toolkit writes 9999999999 for LoKr of whole matrices, where alpha has no part."""


def canonical(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    table: NameTable | None = None,
    peft_config: Mapping[str, object] | None = None,
) -> Adapter:
    """The adapter that these tensors are; the first key that shows a fault ends it.

    `table` is for who knows the family; `peft_config` is what lay beside the file.
    """
    if not tensors:
        raise AdapterError("the file holds no tensors.", kind="empty")
    texts = list(tensors)
    table = table or choose_table(texts, metadata.get(FAMILY_KEY))
    keys = _read(texts, table)
    _check_finite(tensors, keys)
    grouped: dict[LayerPath, dict[str, ParsedKey]] = {}
    for key in keys:
        twin = grouped.setdefault(key.place, {}).setdefault(key.role, key)
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
    form = detect_form(keys)
    return Adapter(
        table=table,
        layers=layers,
        form=None if form is None else form.name,
        metadata=dict(metadata),
        notices=tuple(_notices(grouped, layers, tensors, settings)),
    )


def _read(texts: list[str], table: NameTable) -> list[ParsedKey]:
    index = KeyIndex(table)
    keys = []
    for text in texts:
        key = read_key(text, index)
        if key is None:
            raise _other_model(text, texts, table) or unknown_key(text, [table])
        keys.append(key)
    return settle_stages(keys)


def _other_model(text: str, texts: list[str], table: NameTable) -> AdapterError | None:
    """The verdict on a file whose keys are another family's, if they are."""
    for other in TABLES.values():
        index = KeyIndex(other)
        if other is not table and all(read_key(one, index) for one in texts):
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
    table: NameTable,
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
    if layer.dora:
        _check_magnitudes(layer, found["dora"].text)
    if place.module in table.swapped and next(iter(found.values())).naming == "original":
        half = delta_shape(layer)[0] // 2
        layer = take_rows(place.module, layer, [(half, 2 * half), (0, half)])
    return layer


def _check_magnitudes(layer: Layer, key: str) -> None:
    """One a row, or one a column; a flattened kernel's columns are several of the weight's."""
    shape, magnitude = delta_shape(layer), layer.tensors["dora"]
    number = magnitude.numel()
    fits = shape[1] % number == 0 if magnitude.dim() > 2 else shape[1] == number
    if not (shape[0] == number if dora_by_rows(layer) else fits):
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
    text = metadata.get(PEFT_SETTINGS)
    if text is None:
        return {}
    try:
        known = json.loads(text)
    except json.JSONDecodeError as error:
        raise AdapterError(
            f"the header's {PEFT_SETTINGS} is not JSON ({error}); the scale is lost with it.",
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
    huge = [key for key in idle if not abs(float(tensors[key].float())) < HUGE_ALPHA]
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
