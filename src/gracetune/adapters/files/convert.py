"""Convert between the tensors of an adapter file, in any tool's format, and an `Adapter`.

`import_tensors` makes an adapter from a file's tensors; for a faulty file it raises an error that
names the first bad key. `export_tensors` makes the tensors for a file; if the format cannot hold
the adapter exactly, it raises an error that suggests another format. Nothing is dropped silently.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.adapters.files.detect_family import detect_table
from gracetune.adapters.files.formats import FORMATS, SUFFIXES
from gracetune.adapters.files.fused_projections import (
    has_swapped_halves,
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
    get_table,
    is_bare_parameter,
    is_text_encoder_key,
    kernel_of,
    parse_key,
    resolve_stages,
    template_of,
    unknown_key_error,
    unsupported_reason,
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
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.formats import KeyFormat, SuffixStyle
    from gracetune.adapters.files.keys import KeyTable


FAMILY_KEY = "gracetune.family"
PEFT_SETTINGS_KEY = "lora_adapter_metadata"
"""Entry of a file's header in which diffusers stores peft's settings as JSON."""
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALAR_ROLES = ("alpha", "scalar")
UNUSED_ALPHA = 1e9
"""Smallest alpha for which a notice says that alpha is ignored. ai-toolkit writes 9999999999 for
a LoKr without a rank, where alpha has no effect."""
MAX_REGEX_STEPS = 1e9
"""Largest estimated number of steps that matching a regular expression from a file may take."""
_OPTIONAL, _REPEATED = re.compile(r"(?<!\()\?"), re.compile(r"[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
PEFT_STYLES = ("peft", "peft-live")
PEFT_MAGNITUDE = ".lora_magnitude_vector"
LYCORIS_FORMATS = ("lycoris", "lycoris-combined")
"""Key formats that LyCORIS itself reads. Others have its prefix and other names of modules."""
WHAT_ROLE_HOLDS = {
    "diff": "a full matrix",
    "diff_b": "a change of the bias",
    "mid": "a core tensor (Tucker)",
}
MERGE_INSTEAD = "`gracetune adapter merge` with --into MODEL is exact for every tool."
FOLDED_ROLE = {"lora": "up", "loha": "hada_w1_a", "lokr": "lokr_w1"}
"""Tensor of a layer that alpha / rank is multiplied into, by algorithm, for files that do not store
alpha."""


# Import


def import_tensors(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    tables: Mapping[str, KeyTable],
    table: KeyTable | None = None,
    peft_config: Mapping[str, object] | None = None,
) -> Adapter:
    """Return the adapter that the tensors of a file describe.

    `table` has the module names of the model family; by default the header or the keys decide which
    of `tables` is used. `peft_config` is the content of an adapter_config.json next to the file.
    """
    if not tensors:
        raise AdapterError(
            "the file has no tensors, so it is no adapter. Name another one, or save it again.",
            kind="empty",
        )
    tensors, notices = _without_text_encoders(tensors)
    tensors, widened = _widen_fp8(tensors)
    texts = list(tensors)
    if table is None and FAMILY_KEY in metadata:
        table = get_table(metadata[FAMILY_KEY], tables)
    if table is None:
        table, assumed = detect_table(tensors, metadata, tables)
        notices += assumed
    keys = _parse_keys(texts, table, tables)
    _check_tensors(tensors, keys)
    grouped = _group_keys(keys)
    settings = _peft_settings(metadata, peft_config, table)
    layers = {
        path: _import_layer(table, path, by_role, tensors, settings)
        for path, by_role in grouped.items()
    }
    key_format = detect_format(keys)
    adapter = Adapter(
        table=table,
        layers=layers,
        format=None if key_format is None else key_format.name,
        metadata=dict(metadata),
        notices=(*notices, *widened, *_notices(grouped, layers, tensors, settings)),
    )
    other_wholes = {fused.whole for fused in table.other_fused}
    return split_fused(
        adapter, [path for path in layers if template_of(path.module)[0] in other_wholes]
    )


def _without_text_encoders(
    tensors: Mapping[str, Tensor],
) -> tuple[Mapping[str, Tensor], list[str]]:
    """Return the tensors of the model alone, and a notice if there were others."""
    dropped = [key for key in tensors if is_text_encoder_key(key)]
    if not dropped:
        return tensors, []
    if len(dropped) == len(tensors):
        raise AdapterError(
            f"all {len(dropped)} keys of the file belong to text encoders, first {dropped[0]!r}, "
            "and adapters of text encoders are not supported. Give a file that changes the "
            "transformer or U-Net.",
            kind="unsupported",
            key=dropped[0],
        )
    notice = (
        f"{len(dropped)} keys of text encoders are left out, first {dropped[0]!r}: adapters of "
        "text encoders are not supported, and their effect is lost."
    )
    return {key: t for key, t in tensors.items() if not is_text_encoder_key(key)}, [notice]


def _widen_fp8(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], list[str]]:
    """Return the tensors with bfloat16 in place of float8, which is exact, and a notice.

    torch computes little with float8, and no other tool reads factors in it.
    """
    dtypes = [t.dtype for t in tensors.values() if t.dtype in FP8_DTYPES]
    if not dtypes:
        return tensors, []
    name = str(dtypes[0]).removeprefix("torch.")
    notice = f"{len(dtypes)} tensors are {name} and are read as bfloat16, which is exact."
    return {k: t.bfloat16() if t.dtype in FP8_DTYPES else t for k, t in tensors.items()}, [notice]


def _group_keys(keys: list[ParsedKey]) -> dict[LayerPath, dict[str, ParsedKey]]:
    """Group the keys of a file by layer and role; raise an error if two are for one tensor.

    It is also an error if some keys name an expert of the model and others do not.
    """
    grouped: dict[LayerPath, dict[str, ParsedKey]] = {}
    for key in keys:
        first = grouped.setdefault(key.path, {}).setdefault(key.role, key)
        if first is not key:
            raise AdapterError(
                f"{key.text!r} and {first.text!r} are keys of the same tensor. Remove one.",
                kind="duplicate",
                key=key.text,
            )
    by_stage = {key.path.stage: key for key in reversed(keys)}
    if None in by_stage and len(by_stage) > 1:
        named = next(key for stage, key in by_stage.items() if stage is not None)
        raise AdapterError(
            f"{named.text!r} names an expert of the model and {by_stage[None].text!r} does not, so "
            "its expert is not known. Give a file in which all keys name the expert, or none.",
            kind="mixed-stages",
            key=by_stage[None].text,
        )
    return grouped


def _parse_keys(
    texts: list[str], table: KeyTable, tables: Mapping[str, KeyTable]
) -> list[ParsedKey]:
    index = KeyIndex(table)
    parsed = {text: parse_key(text, index) for text in texts}
    unknown = [text for text, key in parsed.items() if key is None]
    if unknown:
        # A key whose reason is known says more about the file than one that is just unknown.
        first = next((text for text in unknown if unsupported_reason(text)), unknown[0])
        other = _other_family_error(first, texts, table, tables)
        raise other or unknown_key_error(first, [table])
    return resolve_stages([key for key in parsed.values() if key is not None])


def _other_family_error(
    text: str, texts: list[str], table: KeyTable, tables: Mapping[str, KeyTable]
) -> AdapterError | None:
    """Return an error that says which other model family the keys belong to, or None."""
    for other in tables.values():
        index = KeyIndex(other)
        if other is not table and all(parse_key(one, index) for one in texts):
            return AdapterError(
                f"{text!r} is a key of a {other.family} adapter, but the family is "
                f"{table.family}. Give --family {other.family}, or another file.",
                kind="other-model",
                key=text,
            )
    return None


def _check_tensors(tensors: Mapping[str, Tensor], keys: list[ParsedKey]) -> None:
    """Raise an error for a tensor with an impossible shape or dtype, or with NaN or infinity."""
    for key in keys:
        tensor = tensors[key.text]
        if not tensor.numel() or (key.role in SCALAR_ROLES and tensor.numel() != 1):
            shape = "x".join(map(str, tensor.shape))
            raise AdapterError(
                f"{key.text!r} has the shape {shape}, which {key.role} cannot have. The file is "
                "damaged. Save it again.",
                kind="damaged",
                key=key.text,
            )
        if not tensor.is_floating_point():
            if key.role == "alpha":
                continue
            raise AdapterError(
                f"{key.text!r} has the dtype {str(tensor.dtype).removeprefix('torch.')}, but an "
                "adapter's weights are floats. Dequantize it with the tool that quantized it.",
                kind="dtype",
                key=key.text,
            )
        # An infinite alpha matters only where it scales something: see `make_layer`.
        if key.role != "alpha" and not _is_finite(tensor):
            value = "nan" if bool(tensor.float().isnan().any()) else "inf"
            hint = " (float16 ends at 65504)" if tensor.dtype == torch.float16 else ""
            raise AdapterError(
                f"{key.text!r} has values that are {value}: training diverged, or they overflowed "
                f"when they were saved{hint}. Use an earlier checkpoint, or save it in bfloat16.",
                kind="not-finite",
                key=key.text,
            )


def _is_finite(tensor: Tensor) -> bool:
    """Return True if all values are finite. Minimum and maximum suffice: a NaN makes both NaN."""
    low, high = torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _import_layer(
    table: KeyTable,
    path: LayerPath,
    keys: Mapping[str, ParsedKey],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, object],
) -> Layer:
    """Build the adapter layer of one module from its tensors in a file.

    A tool's conventions are converted: alpha in peft's settings, peft's scaling of the bias, and in
    files with the original model's module names an output (shift, scale), where diffusers has
    (scale, shift). `keys` has the key of each tensor, by role, such as `down` and `up`.
    """
    by_role = {role: tensors[key.text] for role, key in keys.items()}
    if "dora" in keys and PEFT_MAGNITUDE in keys["dora"].text:
        by_role["dora"] = by_role["dora"].flatten()  # always one per row, also in (1, rows, 1, 1)
    layer = make_layer(by_role, {role: key.text for role, key in keys.items()})
    if "alpha" not in keys:
        layer = _with_peft_alpha(layer, path.module, settings)
    bias = keys.get("diff_b")
    if bias is not None and bias.text.endswith(".bias") and scale_of(layer) != 1.0:
        # peft scales the bias of lora_B together with its output.
        scaled = layer.tensors["diff_b"].float() * scale_of(layer)
        layer = replace(layer, tensors={**layer.tensors, "diff_b": scaled})
    if layer.is_dora:
        _check_magnitude(layer, keys["dora"].text)
    is_original = next(iter(keys.values())).naming == "original"
    if is_original and has_swapped_halves(path.module, layer, table):
        half = delta_shape(layer)[0] // 2
        layer = select_rows(path.module, layer, [(half, 2 * half), (0, half)])
    return layer


def _check_magnitude(layer: Layer, key: str) -> None:
    """Raise an error unless a DoRA has one magnitude for each row, or one for each column.

    The columns of a flattened convolution kernel may be a multiple of the magnitudes.
    """
    shape, magnitude = delta_shape(layer), layer.tensors["dora"]
    number = magnitude.numel()
    fits = shape[1] % number == 0 if magnitude.dim() > 2 else shape[1] == number
    if not (shape[0] == number if is_dora_per_row(layer) else fits):
        raise AdapterError(
            f"{key!r} has {number} magnitudes for a weight of {shape[0]} rows and {shape[1]} "
            "columns: it belongs to another module or model.",
            kind="rank-mismatch",
            key=key,
        )


def _notices(
    grouped: Mapping[LayerPath, Mapping[str, ParsedKey]],
    layers: Mapping[LayerPath, Layer],
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, object],
) -> list[str]:
    notices = []
    without_effect = [
        keys["alpha"].text
        for path, keys in grouped.items()
        if "alpha" in keys and rank_of(layers[path]) is None
    ]
    huge = [key for key in without_effect if not abs(float(tensors[key].float())) < UNUSED_ALPHA]
    if huge:
        notices.append(
            f"{len(huge)} LoKr modules have no rank, but an alpha of "
            f"{float(tensors[huge[0]].float()):.3g}: without a rank, alpha has no effect and is "
            "ignored."
        )
    is_peft = any(
        key.text.startswith("base_model.") or ".default." in key.text
        for keys in grouped.values()
        for key in keys.values()
    )
    if is_peft and not settings and not any("alpha" in keys for keys in grouped.values()):
        notices.append(
            "peft stores alpha in adapter_config.json, which is missing beside this file: alpha is "
            "assumed to equal the rank."
        )
    return notices


# peft's settings


def _peft_settings(
    metadata: Mapping[str, str], peft_config: Mapping[str, object] | None, table: KeyTable
) -> Mapping[str, object]:
    """Return peft's settings from adapter_config.json or from the file's header.

    The result is empty if there are none.
    """
    if peft_config is not None:
        return peft_config
    text = metadata.get(PEFT_SETTINGS_KEY)
    if text is None:
        return {}
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise AdapterError(
            f"{PEFT_SETTINGS_KEY} in the header is not valid JSON ({error}), so the adapter's "
            "scale is lost. Save it again.",
            kind="damaged",
        ) from error
    prefix = f"{table.component}."
    return {
        name.removeprefix(prefix): value
        for name, value in settings.items()
        if name.startswith(prefix) or "." not in name
    }


def _with_peft_alpha(layer: Layer, module: str, settings: Mapping[str, object]) -> Layer:
    """Return the layer with the alpha of peft's settings.

    peft takes alpha from `alpha_pattern`, or else from `lora_alpha` or `alpha`, and divides it by
    the rank, or by the rank's square root if `use_rslora` is set.
    """
    alpha = _setting_for_module("alpha_pattern", module, settings)
    if alpha is None:
        alpha = settings.get("lora_alpha", settings.get("alpha"))
    rank = rank_of(layer)
    divisor: object = rank
    if rank is None:
        divisor = _setting_for_module("rank_pattern", module, settings) or settings.get("r")
    if not isinstance(alpha, int | float) or not isinstance(divisor, int | float):
        return layer
    scale = alpha / (math.sqrt(divisor) if settings.get("use_rslora") else divisor)
    if rank is not None:
        return replace(layer, alpha=None if scale == 1.0 else scale * rank)
    if layer.algorithm == "lokr" and scale != 1.0:
        # peft also scales a LoKr of whole matrices, which no other tool does.
        w1 = layer.tensors["lokr_w1"].float() * scale
        return replace(layer, tensors={**layer.tensors, "lokr_w1": w1})
    return layer


def _setting_for_module(name: str, module: str, settings: Mapping[str, object]) -> object | None:
    """Return the value of a setting such as `alpha_pattern` for a module, or None.

    The setting maps patterns to values; the first pattern that matches the module's name counts.
    """
    patterns = settings.get(name)
    if not isinstance(patterns, dict):
        return None
    matching = (key for key in patterns if _compile_pattern(name, str(key)).match(module))
    return next((patterns[key] for key in matching), None)


@lru_cache
def _compile_pattern(name: str, pattern: str) -> re.Pattern[str]:
    """Compile a pattern that matches the end of a module's name, like peft's `get_pattern_key`."""
    if _could_hang(pattern):
        raise _pattern_error(name, pattern, "matching it could take forever")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise _pattern_error(name, pattern, f"it is not a regular expression ({error})") from error


def _could_hang(pattern: str) -> bool:
    """Return True if matching a regular expression to 100 characters may take too many steps.

    The expression is in the header of a file that may come from anyone, and nested quantifiers
    backtrack exponentially. The number of steps is an estimate.
    """
    groups = pattern.count("(") + 1
    log_steps = groups * math.log(pattern.count("|") / groups + 1)
    log_steps += len(_OPTIONAL.findall(pattern)) * math.log(2)
    log_steps += len(_REPEATED.findall(pattern)) * math.log(100)
    return log_steps > math.log(MAX_REGEX_STEPS) or _REPEATED_GROUP.search(pattern) is not None


def _pattern_error(name: str, pattern: str, reason: str) -> AdapterError:
    return AdapterError(
        f"{name} in peft's settings has the pattern {pattern[:200]!r}, but {reason}. Without it "
        "the adapter's scale is not known. Replace the pattern by the names of the modules.",
        kind="damaged",
    )


# Export


class UnsupportedModule(NamedTuple):
    """A module whose adapter layer cannot be written in a key format, and the reason.

    A key format is a tool's way to name the tensors in an adapter file.
    """

    module: str
    reason: str
    fix: str = "`gracetune adapter convert` with --lora-rank approximates it by a LoRA."
    """Advice for the user; empty if only another format helps, for example because this one has no
    name for the module."""

    @property
    def is_nameless(self) -> bool:
        """True if no other adapter on this module could be written in the format either."""
        return not self.fix


def export_tensors(
    adapter: Adapter, key_format: KeyFormat, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the tensors of an adapter, ready to be saved, with the keys of one tool's format.

    Without `dtype`, each tensor keeps its dtype.
    """
    adapter = _match_stages(adapter, key_format)
    unsupported = find_unsupported(adapter, key_format)
    if unsupported is not None:
        raise _unsupported_error(adapter, key_format, unsupported)
    adapter = layers_to_write(adapter, key_format)
    index = KeyIndex(adapter.table)
    tensors: dict[str, Tensor] = {}
    for path, layer in adapter.layers.items():
        style = _suffix_style(key_format, layer)
        for role, tensor in _tensors_to_write(layer, key_format, style).items():
            key = build_key(key_format, index, path, role, style)
            tensors[key] = _cast_for_file(key, role, tensor, dtype)
    return tensors


def layers_to_write(adapter: Adapter, key_format: KeyFormat) -> Adapter:
    """Return the adapter with the modules and factors that a file in this key format has.

    The weight changes are the same. Projections are fused or separate as in the format, alpha /
    rank is in the weights where the format has no alpha, and a LoKr has the factors that its
    readers build.
    """
    adapter = _match_naming(_match_stages(adapter, key_format), key_format)
    layers = {}
    for path, layer in adapter.layers.items():
        is_folded = key_format.alpha == "folded" or layer.algorithm in ("loha", "lokr")
        layers[path] = fold_scale(layer) if is_folded else layer
        if _is_rebuilt(layer, key_format):
            kernel = kernel_of(path.module, adapter.table)
            layers[path] = _lokr_to_rebuild(layers[path], kernel)
    if adapter.table.component == "unet" and key_format.alpha == "always":
        layers = _with_common_alpha(layers)
    return replace(adapter, layers=layers)


def _with_common_alpha(layers: Mapping[LayerPath, Layer]) -> dict[LayerPath, Layer]:
    """Return LoRA layers with one alpha; what it changes of a layer's scale is in the weights.

    diffusers reads kohya's names of a U-Net, but if the alphas differ, it finds those of attention
    under no module and uses the most common one instead.
    """
    alphas = {path: scale_of(x) * (rank_of(x) or 0) for path, x in layers.items()}
    of_lora = [alphas[path] for path, x in layers.items() if x.algorithm == "lora"]
    if len(set(of_lora)) < 2:
        return dict(layers)
    common = max(sorted(set(of_lora)), key=of_lora.count)
    changed = {}
    for path, layer in layers.items():
        changed[path] = layer
        if layer.algorithm == "lora" and alphas[path] != common:
            rank = rank_of(layer)
            assert rank is not None, "a LoRA has a rank"
            folded = fold_scale(replace(layer, alpha=alphas[path] / common * rank))
            changed[path] = replace(folded, alpha=None if common == rank else common)
    return changed


def find_unsupported(adapter: Adapter, key_format: KeyFormat) -> UnsupportedModule | None:
    """Return the first module that cannot be written in a tool's key format, or None."""
    for path, layer in adapter.layers.items():
        # Before projections are fused: a DoRA would be refused there, too, with other advice.
        if layer.is_dora and not _holds_magnitudes(layer, key_format):
            return UnsupportedModule(path.module, *_dora_reason(key_format))
    plain = [path.module for path, layer in adapter.layers.items() if not layer.is_dora]
    if key_format.style in PEFT_STYLES and 0 < len(plain) < len(adapter.layers):
        reason = "peft needs magnitudes (DoRA) in all modules or in none, and only some have them"
        return UnsupportedModule(plain[0], reason, MERGE_INSTEAD)
    adapter = _match_naming(adapter, key_format)
    index = KeyIndex(adapter.table)
    for path, layer in adapter.layers.items():
        if index.from_diffusers(path.module, key_format.naming, key_format.separator) is None:
            reason = "the format has no name for this module"
            return UnsupportedModule(path.module, reason, fix="")
        style = _suffix_style(key_format, layer)
        lost = _lost_part(path.module, layer, key_format, adapter.table)
        if lost:
            return UnsupportedModule(path.module, f"the format cannot hold {lost}")
        role = next(iter(layer.tensors))
        if adapter.table.accepts_any_name and not parse_key(
            build_key(key_format, index, path, role, style), index
        ):
            reason = "the format's keys do not show where the name of a module begins"
            return UnsupportedModule(path.module, reason, fix="")
        is_for_lycoris = layer.algorithm == "lokr" and key_format.name in LYCORIS_FORMATS
        kernel = kernel_of(path.module, adapter.table)
        if is_for_lycoris and not _lycoris_rebuilds(layer, kernel):
            reason = "LyCORIS would not find the sizes of its factors"
            return UnsupportedModule(path.module, reason)
    return None


def _holds_magnitudes(layer: Layer, key_format: KeyFormat) -> bool:
    """Return True if the tools that read a key format compute a layer's DoRA as it was trained.

    peft and LyCORIS divide the rows of W + dW by their norms. ComfyUI divides the columns of W + dW
    by their norms, but the rows of W + dW by the norms of the rows of W.
    """
    if key_format.style in PEFT_STYLES:
        return layer.algorithm == "lora" and is_dora_per_row(layer)
    return is_dora_per_row(layer) == (key_format.name in LYCORIS_FORMATS)


def _dora_reason(key_format: KeyFormat) -> tuple[str, str]:
    """Return the reason why a key format cannot hold a DoRA, and advice for the user."""
    reason = "ComfyUI divides magnitudes (DoRA) by the norms of W, not of W + dW"
    if key_format.style in PEFT_STYLES:
        reason = "peft has magnitudes (DoRA) only for LoRA, one per row"
    elif key_format.name in LYCORIS_FORMATS:
        reason = "LyCORIS reads magnitudes (DoRA) as one per row, and this has one per column"
    return reason, MERGE_INSTEAD


def _lost_part(module: str, layer: Layer, key_format: KeyFormat, table: KeyTable) -> str:
    """Return the part of a layer that a key format cannot hold or its readers ignore, or ""."""
    style = _suffix_style(key_format, layer)
    is_lycoris = key_format.name in LYCORIS_FORMATS
    for role, tensor in layer.tensors.items():
        if role not in SUFFIXES[style]:
            return WHAT_ROLE_HOLDS.get(role, role)
        # peft's name for it is the bias of LoRA's second factor; LyCORIS has it for full matrices.
        has_bias = "diff" in layer.tensors if is_lycoris else True
        if style in PEFT_STYLES:
            has_bias = layer.algorithm == "lora" and not layer.is_dora
        if role == "diff_b" and not has_bias:
            return WHAT_ROLE_HOLDS[role]
        is_matrix = tensor.dim() > 1 and not is_bare_parameter(module, table)
        if role == "diff" and is_lycoris and not is_matrix:
            return "a change of a parameter that is no matrix"
    return ""


def fold_scale(layer: Layer) -> Layer:
    """Return a layer whose weights include alpha / rank, for files that do not store alpha."""
    scale = scale_of(layer)
    if scale == 1.0:
        return replace(layer, alpha=None)
    role = FOLDED_ROLE[layer.algorithm]
    role = role if role in layer.tensors else f"{role}_a"
    factor = layer.tensors[role]
    if not math.log2(abs(scale) or 1.0).is_integer():
        factor = factor.float()  # powers of two are exact in any float type; others would round
    return replace(layer, tensors={**layer.tensors, role: factor * scale}, alpha=None)


def _match_stages(adapter: Adapter, key_format: KeyFormat) -> Adapter:
    """Return the adapter with its layers assigned to transformers as the key format needs it.

    For a model with a high-noise and a low-noise transformer, a key format names one (`high` or
    `low`) in every key or in none.
    """
    if key_format.stages and adapter.table.has_stages:
        if None in adapter.stages:
            raise AdapterError(
                f"the format {key_format.name} names the expert in each key, and this adapter does "
                "not say which one it is for. Give --stage high or --stage low.",
                kind="no-stage",
            )
        return adapter
    if len(adapter.stages) > 1:
        first = next(p for p in adapter.layers if p.stage == adapter.stages[-1])
        raise AdapterError(
            f"the adapter has {first.module} for both experts, but a file in the format "
            f"{key_format.name} holds only one. Write one file for each expert, as `gracetune "
            "adapter convert` does, or select one with --stage.",
            kind="mixed-stages",
            key=first.module,
        )
    return with_stage(adapter, None)


def _match_naming(adapter: Adapter, key_format: KeyFormat) -> Adapter:
    """Return the adapter with the modules that a key format has names for.

    In diffusers' naming, projections such as qkv are separate. In the original model's naming they
    are fused, and some modules have their outputs in the order (shift, scale), not (scale, shift).
    """
    if key_format.naming == "diffusers":
        return split_fused(adapter)
    return swap_halves(join_fused(adapter))


def _suffix_style(key_format: KeyFormat, layer: Layer) -> SuffixStyle:
    """Return the naming style for the ends of a layer's keys, such as `.lora_A.weight`.

    It is that of the key format, but ComfyUI reads a core tensor (`lora_mid`) only in kohya's
    style.
    """
    is_tucker = key_format.style == "comfyui" and "mid" in layer.tensors
    return "kohya" if is_tucker else key_format.style


def _tensors_to_write(layer: Layer, key_format: KeyFormat, style: SuffixStyle) -> dict[str, Tensor]:
    """Return a layer's tensors as a file in this key format stores them, by role such as `down`.

    They include alpha if the format stores it.
    """
    tensors = dict(layer.tensors)
    if layer.is_dora and style in PEFT_STYLES:
        # peft has magnitudes of the shape (rows) for a matrix, (1, rows, 1, 1) for a convolution.
        axes = layer.tensors["down"].dim()
        shape = (-1,) if axes == 2 else (1, -1, *[1] * (axes - 2))
        tensors["dora"] = tensors["dora"].reshape(shape)
    if key_format.alpha == "always" and layer.algorithm != "full":
        alpha = layer.alpha if layer.alpha is not None else float(rank_of(layer) or 1)
        tensors["alpha"] = torch.tensor(alpha)
    return tensors


def _is_rebuilt(layer: Layer, key_format: KeyFormat) -> bool:
    """Return True for a LoKr whose readers, peft or LyCORIS, derive the sizes of its factors."""
    is_read_so = key_format.style in PEFT_STYLES or key_format.name in LYCORIS_FORMATS
    return layer.algorithm == "lokr" and is_read_so


def _lokr_to_rebuild(layer: Layer, kernel: Sequence[int]) -> Layer:
    """Return a LoKr in which the factors that peft and LyCORIS cannot load are multiplied out.

    `kernel` is that of a convolution. Both tools create w2 as a whole matrix if the rank is at
    least half of w2's larger dimension, and then have no place for factors of w2. peft decomposes
    w1 in all modules or in none, and LyCORIS only if the rank is small for it, so w1 is always
    written whole.
    """
    t = dict(layer.tensors)
    if "lokr_w1_a" in t:
        t["lokr_w1"] = t.pop("lokr_w1_a").float() @ t.pop("lokr_w1_b").float()
    (_, rows), (_, columns) = lokr_sizes(layer, kernel)
    is_matrix = "lokr_w2_a" in t and "lokr_t2" not in t and t["lokr_w2_b"].dim() == 2
    if is_matrix and 2 * t["lokr_w2_b"].shape[0] >= max(rows, columns):
        w2 = t.pop("lokr_w2_a").float() @ t.pop("lokr_w2_b").float()
        t["lokr_w2"] = w2.reshape(rows, columns, *kernel)
    return replace(layer, tensors=t)


def _lycoris_rebuilds(layer: Layer, kernel: Sequence[int]) -> bool:
    """Return True if LyCORIS, which reads only a LoKr's tensors, builds factors of the same sizes.

    It guesses the setting `factor` from the sizes and then splits the weight's dimensions by it.
    The guess includes a flattened `kernel` of a convolution, but the dimensions do not.
    """
    from peft.tuners.lokr.layer import factorization

    def split(size: int, factor: int) -> tuple[int, ...]:
        return tuple(sorted(factorization(size, factor)))  # peft's function, but always sorted

    rows, columns = lokr_sizes(layer)
    sizes = (rows[0] * rows[1], columns[0] * columns[1])
    largest = (max(rows[0], columns[0]), max(rows[1], columns[1]))
    common = [size for size in largest if size in rows and size in columns]
    factor = common[0] if common else min(largest)
    if (rows[0], columns[0]) == (split(sizes[0], -1)[0], split(sizes[1], -1)[0]):
        factor = -1
    rows, columns = lokr_sizes(layer, kernel)
    sizes = (rows[0] * rows[1], columns[0] * columns[1])
    return (split(sizes[0], factor), split(sizes[1], factor)) == (rows, columns)


def _cast_for_file(key: str, role: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a contiguous copy of a tensor on the CPU, in the given dtype unless it is alpha."""
    stored = tensor.detach().cpu()
    if dtype is not None and role != "alpha":
        stored = stored.to(dtype)
        if not bool(torch.isfinite(stored.float()).all()):
            largest = float(tensor.detach().float().abs().max())
            raise AdapterError(
                f"{key!r} reaches {largest:.3g}, which {str(dtype).removeprefix('torch.')} cannot "
                "hold. Give --dtype bfloat16 or float32.",
                kind="not-finite",
                key=key,
            )
    return stored.clone(memory_format=torch.contiguous_format)


def _unsupported_error(
    adapter: Adapter, key_format: KeyFormat, unsupported: UnsupportedModule
) -> AdapterError:
    fixes = [f"Write the format {other}." for other in _fitting_formats(adapter)[:1]]
    if unsupported.fix:
        fixes.append(unsupported.fix)
    elif not fixes:
        fixes.append("No format has a name for it: leave the module out.")
    return AdapterError(
        f"{unsupported.module} cannot be written in the format {key_format.name}: "
        f"{unsupported.reason}. {' '.join(fixes)}",
        kind="not-exact",
        key=unsupported.module,
    )


def _fitting_formats(adapter: Adapter) -> list[str]:
    """Return the names of the key formats in which the whole adapter can be written to one file.

    Formats that few tools or none can load come last.
    """
    names = []
    for key_format in sorted(FORMATS, key=lambda one: bool(one.caution)):
        try:
            fits = not key_format.stages and find_unsupported(adapter, key_format) is None
        except AdapterError:
            continue  # its projections cannot be split or joined exactly
        if fits:
            names.append(key_format.name)
    return names
