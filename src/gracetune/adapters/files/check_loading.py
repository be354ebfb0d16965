"""Load an adapter file with diffusers and with ComfyUI's rules, and report what each accepts.

diffusers ignores keys that it does not know, with a log line at most. So `check_file` builds the
model family's pipeline, lets diffusers load the file, counts the modules that have the adapter
afterwards, and compares the output of each with the weight change dW in the file. The pipeline's
weights take no memory: every parameter is a single zero, expanded to its shape.

ComfyUI is not a dependency, so its loader is simulated, as of ComfyUI 0.33 of August 2026. The
loader maps key prefixes to weights of the model and tries known suffixes after each prefix. The
tensors that it takes are read as an adapter of their own, which must be the same as the whole file,
and must not need a formula that ComfyUI computes differently. tests/hosts/test_comfyui.py compares
the result with ComfyUI's own functions.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gracetune.adapters.files.checkpoint_weights import CHECKPOINT_ADAPTER, CHECKPOINT_FORMAT
from gracetune.adapters.files.convert import find_unsupported, import_tensors
from gracetune.adapters.files.fused_projections import parts_of, split_fused
from gracetune.adapters.files.io import (
    find_stage,
    read_adapter_and_tensors,
    resolve_path,
    save_tensors,
)
from gracetune.adapters.files.keys import (
    KeyIndex,
    get_format,
    is_text_encoder_key,
    kernel_of,
    parse_key,
    template_of,
)
from gracetune.adapters.files.layers import (
    Adapter,
    Layer,
    delta,
    delta_bias,
    delta_shape,
    is_dora_per_row,
    rank_of,
    scale_of,
    with_stage,
)
from gracetune.adapters.files.placeholder_models import (
    count_blocks,
    placeholder_pipeline,
    quiet_diffusers,
)
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable, LayerPath, Stage


ADAPTER_NAME = "checked"
TOLERANCE, ROUNDED_TOLERANCE = 1e-5, 2e-2
"""Largest relative difference at which the output of a module in diffusers counts as equal to the
output computed from the file: for float32, and for smaller dtypes. diffusers multiplies alpha into
weights of the file's dtype, which rounds."""
LOADER_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RuntimeError,
    AssertionError,
)
"""Exceptions that diffusers' loaders raise for files they do not understand."""
NOT_TRIED = (
    "no diffusers pipeline loads adapters of this family, and ComfyUI does not know it. In "
    "diffusers, load it with transformer.load_lora_adapter. For peft, convert it: gracetune "
    "adapter convert FILE --to peft"
)
NO_LOADER = {
    "loha": "diffusers has no loader for LoHa. Merge it into the model, or convert it with "
    "--lora-rank.",
    "lokr": "diffusers' pipelines have no loader for LoKr here. Convert it --to diffusers for "
    "{component}.load_lora_adapter, merge it, or convert it with --lora-rank.",
    "unusual lokr": "diffusers has no loader for a LoKr of convolutions or with magnitudes (DoRA). "
    "Merge it into the model, or convert it with --lora-rank.",
    "full": "diffusers has no loader for full matrices. Merge it into the model, or convert it "
    "with --lora-rank.",
}


@dataclass(frozen=True)
class ToolResult:
    """The result of loading an adapter file with one tool."""

    name: str
    """Name of the tool: `diffusers` or `comfyui`."""
    matched: int
    """Number of modules that the tool loads."""
    expected: int
    """Number of modules in the file."""
    reason: str = ""
    """Explanation for the user if the tool does not load all modules, or loads the file in an
    unusual way."""
    first_missing: str | None = None
    """First key or module that the tool does not load."""
    is_wrong: bool = False
    """True if the file loads but the model would compute something else, which is worse than not
    loading."""

    @property
    def loads(self) -> bool:
        """True if the tool loads the whole file."""
        return self.matched == self.expected > 0


@dataclass(frozen=True)
class CheckReport:
    """The result of checking an adapter file with all tools."""

    path: Path
    family: str
    format: str | None
    """Name of the key format, which is a tool's way to name the tensors in a file; None if the file
    mixes several."""
    stage: Stage | None
    has_experts: bool
    algorithms: tuple[str, ...]
    ranks: tuple[int, ...]
    expected: int
    """Number of modules that an adapter file must change to be complete."""
    results: tuple[ToolResult, ...]
    """Result of loading the file with each tool; empty if no diffusers pipeline is known for the
    model family."""
    required_tools: tuple[str, ...]
    """Names of the tools that must load the whole file. If empty, any one tool must load all of it,
    and no tool may load only a part."""
    notices: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if tools load the file as `required_tools` demands, with the right output."""
        if self.required_tools:
            names = {result.name for result in self.results if result.loads}
            return names.issuperset(self.required_tools)
        if self.is_wrong:
            return False
        all_or_nothing = all(r.loads or r.matched == 0 for r in self.results)
        return all_or_nothing and any(r.loads for r in self.results)

    @property
    def is_wrong(self) -> bool:
        """True if a tool loads the file, but the model would compute something else."""
        return any(result.is_wrong for result in self.results)

    def lines(self) -> list[str]:
        """Return the result of each tool as a line of text."""
        if not self.results:
            return [f"{self.expected} modules: {NOT_TRIED}"]
        return [
            f"{r.name}: {r.matched} of {r.expected} modules" + (f": {r.reason}" if r.reason else "")
            for r in self.results
        ]

    def raise_if_failed(self) -> CheckReport:
        """Return this report if the file loads; otherwise raise an error with the reasons."""
        if not self.ok:
            first = next((r.first_missing for r in self.results if not r.loads), None)
            raise AdapterError(
                f"{self.path} does not load completely. " + ". ".join(self.lines()),
                kind="partial",
                key=first,
            )
        return self


def check_file(
    path: Path,
    tables: Mapping[str, KeyTable],
    *,
    table: KeyTable | None = None,
    stage: Stage | None = None,
    config: Mapping[str, object] | None = None,
    modules: Iterable[str] | None = None,
    required_tools: tuple[str, ...] = (),
) -> CheckReport:
    """Load an adapter file with each tool and count the modules that the tool loads.

    `table` has the module names of the model family, if the family is known. `config` is the
    transformer's configuration; by default it is derived from the file. `modules` are the modules
    that the file must have, in diffusers' names. A file that cannot be read raises an error, and so
    does one for both the high-noise and the low-noise transformer of a model.
    """
    path = resolve_path(path)
    adapter, tensors = read_adapter_and_tensors(path, tables, table)
    if adapter.format == CHECKPOINT_FORMAT:
        raise AdapterError(
            f"{path} has the weights of a checkpoint, which no other tool loads. Check the files "
            f"in {path.parent / CHECKPOINT_ADAPTER}, or convert it first.",
            kind="checkpoint",
        )
    _refuse_two_stages(adapter, list(tensors))
    stage = stage or find_stage(adapter, path)[0]
    adapter = with_stage(adapter, None)
    layers = {place.module: layer for place, layer in split_fused(adapter).layers.items()}
    expected = list(layers) if modules is None else sorted(modules)
    missing = [module for module in expected if module not in layers]
    if missing:
        raise AdapterError(
            f"{path} lacks {len(missing)} of {len(expected)} modules, first {missing[0]}: it is "
            "incomplete, or was written from a part of the model.",
            kind="partial",
            key=missing[0],
        )
    results: tuple[ToolResult, ...] = ()
    if adapter.table.pipeline is not None:
        pipeline = placeholder_pipeline(adapter.table.pipeline, layers, config)
        name = "transformer_2" if stage == "low" else adapter.table.component
        model: nn.Module = getattr(pipeline, name)
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        with _without_text_encoders(path, tensors, adapter) as (file, used):
            results = (
                _load_in_diffusers(file, used, adapter, layers, stage, pipeline, model),
                _load_in_comfyui(used, adapter, layers, shapes),
            )
    notices = adapter.notices
    if len(adapter.layers) != len(layers):
        notices += (
            f"the file has {len(adapter.layers)} modules; fused projections are counted here as "
            f"diffusers' modules, which gives {len(layers)}",
        )
    return CheckReport(
        path=path,
        family=adapter.table.family,
        format=adapter.format,
        stage=stage,
        has_experts=adapter.table.has_stages,
        algorithms=tuple(sorted({layer.algorithm for layer in layers.values()})),
        ranks=tuple(sorted({rank for layer in layers.values() if (rank := rank_of(layer))})),
        expected=len(expected),
        results=results,
        required_tools=required_tools,
        notices=notices,
    )


def _refuse_two_stages(adapter: Adapter, keys: list[str]) -> None:
    if len(adapter.stages) < 2:
        return
    index = KeyIndex(adapter.table)
    stages = [(key, parsed.path.stage) for key in keys if (parsed := parse_key(key, index))]
    first = next(key for key, stage in stages if stage != stages[0][1])
    raise AdapterError(
        f"{first!r} belongs to another expert than {stages[0][0]!r}: the file holds both, and no "
        "tool loads both from one file. Run `gracetune adapter convert FILE --to comfyui`, which "
        "writes one file for each.",
        kind="mixed-stages",
        key=first,
    )


@contextlib.contextmanager
def _without_text_encoders(
    path: Path, tensors: Mapping[str, Tensor], adapter: Adapter
) -> Iterator[tuple[Path, Mapping[str, Tensor]]]:
    """Yield a file and its tensors without the keys of text encoders, which are not checked.

    It is the file itself if there are none, otherwise a temporary one.
    """
    used = {key: t for key, t in tensors.items() if not is_text_encoder_key(key)}
    if len(used) == len(tensors):
        yield path, tensors
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        save_tensors(used, file, adapter.metadata)
        yield file, used


# Loading in diffusers


def _load_in_diffusers(
    path: Path,
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    layers: Mapping[str, Layer],
    stage: Stage | None,
    pipeline: Any,
    model: Any,
) -> ToolResult:
    expected = len(layers)
    algorithms = {layer.algorithm for layer in layers.values()}
    only_lokr = algorithms == {"lokr"}
    component = adapter.table.component
    why = NO_LOADER.get(min(algorithms), "").format(component=component)
    if only_lokr and any(x.is_dora or kernel_of(n, adapter.table) for n, x in layers.items()):
        why = NO_LOADER["unusual lokr"]
    unknown = ToolResult("diffusers", 0, expected, why, min(layers))
    if "lora" not in algorithms and not only_lokr:
        return unknown
    refusal = _refusal(lambda: _load(pipeline, path, stage))
    # Most pipelines refuse LoKr, but their transformers load it from diffusers' own key format.
    by_transformer = bool(refusal) and only_lokr and adapter.format == "diffusers"
    if by_transformer:
        refusal = _refusal(
            lambda: model.load_lora_adapter(
                dict(tensors), prefix=component, adapter_name=ADAPTER_NAME
            )
        )
    if refusal:
        return unknown if only_lokr else ToolResult("diffusers", 0, expected, refusal)
    result = _compare_loaded(model, layers, component if by_transformer else "")
    return unknown if only_lokr and result.matched == 0 and not result.is_wrong else result


def _refusal(load: Callable[[], None]) -> str:
    """Run a loader of diffusers, and return its error as a text; empty if it has none."""
    try:
        with quiet_diffusers():
            load()
    except LOADER_ERRORS as error:
        text = str(error).replace("\n", " ")[:200]
        return f"it refuses the file: {type(error).__name__} {text}"
    return ""


def _load(pipeline: Any, path: Path, stage: Stage | None) -> None:
    extra = {"load_into_transformer_2": True} if stage == "low" else {}
    pipeline.load_lora_weights(
        str(path.parent),
        weight_name=path.name,
        adapter_name=ADAPTER_NAME,
        local_files_only=True,
        **extra,
    )


@torch.no_grad()
def _compare_loaded(model: nn.Module, layers: Mapping[str, Layer], component: str) -> ToolResult:
    """Count the modules that got the adapter, and check that each computes what the file says.

    `component` is the name of the transformer or U-Net if the file was loaded with its method, and
    empty if with the pipeline's.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    expected = len(layers)
    loaded: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and ADAPTER_NAME in module.active_adapters
    }
    lost = [module for module in layers if module not in loaded]
    if lost:
        matched = expected - len(lost)
        reason = f"{lost[0]} is lost" if matched else "it loads nothing, without an error"
        return ToolResult("diffusers", matched, expected, reason, lost[0])
    for name, module in loaded.items():  # diffusers adds modules to some files
        has_magnitudes = ADAPTER_NAME in getattr(module, "lora_magnitude_vector", ())
        if has_magnitudes and not (name in layers and layers[name].is_dora):
            reason = f"{name} has no magnitudes (DoRA), but others have, and it needs all or none"
            return ToolResult("diffusers", 0, expected, reason, name, is_wrong=True)
        empty = [key for key, parameter in module.named_parameters() if parameter.is_meta]
        if empty:
            reason = f"it adapts {name} without a value for {empty[0].partition('.')[0]}"
            return ToolResult("diffusers", 0, expected, reason, name, is_wrong=True)
        if name in layers and layers[name].is_dora and not has_magnitudes:
            reason = "it drops the magnitudes (DoRA); convert the file --to diffusers"
            return ToolResult("diffusers", 0, expected, reason, name, is_wrong=True)
    generator = torch.Generator().manual_seed(0)
    for name, layer in layers.items():
        if not _computes_same(loaded[name], layer, generator):
            reason = f"{name} would compute another dW"
            return ToolResult("diffusers", 0, expected, reason, name, is_wrong=True)
    reason = f"with {component}.load_lora_adapter; the pipeline refuses LoKr" if component else ""
    return ToolResult("diffusers", expected, expected, reason)


def _computes_same(module: Any, layer: Layer, generator: torch.Generator) -> bool:
    """Return True if a loaded module and the file's layer give the same output for random input."""
    is_exact = all(tensor.dtype == torch.float32 for tensor in layer.tensors.values())
    tolerance = TOLERANCE if is_exact else ROUNDED_TOLERANCE
    if layer.algorithm == "lokr":
        loaded = module.get_delta_weight(ADAPTER_NAME).float()
        return _is_close(loaded, delta(layer, loaded.shape), tolerance)
    if any(parameter.is_meta for parameter in module.parameters()):
        return False  # diffusers created a weight that is not in the file
    down = module.lora_A[ADAPTER_NAME].weight.float()
    up = module.lora_B[ADAPTER_NAME]
    scaling = module.scaling[ADAPTER_NAME]
    probe = torch.randn(down[0].numel(), generator=generator)
    loaded = scaling * (up.weight.float().flatten(1) @ (down.flatten(1) @ probe))
    pairs = [(loaded, _change_of_output(layer, probe))]
    bias = delta_bias(layer)
    if bias is not None or up.bias is not None:
        zeros = torch.zeros(len(loaded))
        loaded_bias = zeros if up.bias is None else up.bias.float() * scaling
        pairs.append((loaded_bias, zeros if bias is None else bias))
    if layer.is_dora:
        magnitude = module.lora_magnitude_vector[ADAPTER_NAME].weight.float()
        pairs.append((magnitude.flatten(), layer.tensors["dora"].float().flatten()))
    return all(_is_close(a, b, tolerance) for a, b in pairs)


def _change_of_output(layer: Layer, probe: Tensor) -> Tensor:
    """Return dW times an input; empty if the input has another size than the layer."""
    shape = delta_shape(layer)
    if layer.algorithm == "full" and "diff" not in layer.tensors:
        return torch.zeros(shape[0])
    if math.prod(shape[1:]) != len(probe):
        return torch.empty(0)
    if layer.algorithm != "lora" or "mid" in layer.tensors:
        return delta(layer).flatten(1) @ probe
    up, down = (layer.tensors[role].float().flatten(1) for role in ("up", "down"))
    return scale_of(layer) * (up @ (down @ probe))


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and float((a - b).norm()) <= tolerance * float(b.norm()) + 1e-12


# Loading in ComfyUI, simulated


LORA_SUFFIXES = (
    (".lora_up.weight", ".lora_down.weight", ".lora_mid.weight"),
    ("_lora.up.weight", "_lora.down.weight", None),
    (".lora_B.weight", ".lora_A.weight", None),
    (".lora.up.weight", ".lora.down.weight", None),
    (".lora_B", ".lora_A", None),
    (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight", None),
    (".lora_B.default.weight", ".lora_A.default.weight", None),
)
"""Key suffixes that ComfyUI tries for the LoRA tensors (up, down, mid). It uses the first row whose
`up` is in the file."""
LOHA_SUFFIXES = (".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b")
LOKR_SUFFIXES = (
    ".lokr_w1",
    ".lokr_w2",
    ".lokr_w1_a",
    ".lokr_w1_b",
    ".lokr_w2_a",
    ".lokr_w2_b",
    ".lokr_t2",
)
SINGLE_SUFFIXES = (".diff", ".diff_b", ".w_norm", ".b_norm", ".set_weight")
CORE_ROLES = ("mid", "hada_t1", "lokr_t2", "lokr_w2")
"""Tensors for which ComfyUI has a formula only if they are matrices or 2-D convolutions."""
WAN_FUN_KEY = "lora_unet__blocks_0_cross_attn_k.lora_down.weight"
"""Key by which ComfyUI recognises adapter files of VideoX-Fun, which have the prefix `lora_unet__`
with two underscores."""


@dataclass(frozen=True)
class ComfyUILoad:
    """The simulated result of loading an adapter file with ComfyUI."""

    modules: frozenset[str]
    """Modules that ComfyUI changes, in diffusers' names."""
    ignored: tuple[str, ...]
    """Keys of the file that ComfyUI ignores and logs as "lora key not loaded"."""
    missing_key: str | None = None
    """Key that ComfyUI expects beside another key of the file, and without which it fails. None if
    there is no such key."""


def _load_in_comfyui(
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    layers: Mapping[str, Layer],
    shapes: Mapping[str, torch.Size],
) -> ToolResult:
    """Simulate loading a file with ComfyUI. A fused qkv projection counts as three modules.

    `shapes` has the shape of each weight and bias of the model, by diffusers' names.
    """
    known = comfyui_key_map(adapter.table, count_blocks(layers))
    load = simulate_comfyui(list(tensors), known)
    expected = len(layers)
    if not adapter.table.comfyui_prefixes:
        reason = f"it does not know the model {adapter.table.family}"
        return ToolResult("comfyui", 0, expected, reason, next(iter(layers)))
    if load.missing_key is not None:
        reason = f"it fails because the key {load.missing_key!r} is missing"
        return ToolResult("comfyui", 0, expected, reason, load.missing_key)
    ignored = (*load.ignored, *_dropped_biases(tensors, known, adapter.table))
    ignores = f"it ignores {len(ignored)} keys, first {ignored[0]!r}" if ignored else ""
    if not load.modules:
        reason = f"{ignores}; {_advice_for_comfyui(adapter)}"
        return ToolResult("comfyui", 0, expected, reason, ignored[0])
    seen = _layers_of_keys(
        {k: tensor for k, tensor in tensors.items() if k not in ignored}, adapter
    )
    wrong = {
        path.module: reason
        for path, layer in adapter.layers.items()
        if (reason := _difference_in_comfyui(layer, seen.get(path)))
    }
    parts = {
        path: {part.module for part in parts_of(path, adapter.table)} & layers.keys()
        or {path.module}
        for path in adapter.layers
    }
    for path, names in parts.items():
        if any(not _fits(layers[name], name, shapes) for name in names):
            wrong.setdefault(path.module, "its size is not that of the model")
    if not wrong:
        return ToolResult("comfyui", expected, expected, _required_version(adapter))
    matched = expected - sum(len(parts[p]) for p in adapter.layers if p.module in wrong)
    first = next(iter(wrong))
    reason = ignores or f"{first} is computed wrongly: {wrong[first]}"
    return ToolResult("comfyui", matched, expected, reason, first, is_wrong=True)


def _advice_for_comfyui(adapter: Adapter) -> str:
    """Say how an adapter whose keys ComfyUI does not know can be used there."""
    try:
        unsupported = find_unsupported(adapter, get_format("comfyui"))
    except AdapterError as error:
        if error.kind != "not-exact":
            raise
        return "it has no exact form in ComfyUI's names; merge it into the model"
    return "convert it --to comfyui" if unsupported is None else "merge it into the model"


def _required_version(adapter: Adapter) -> str:
    """Return a remark on the versions of ComfyUI that load a file; empty if 0.7 does."""
    table = adapter.table
    if table.comfyui_version:
        return f"older versions than {table.comfyui_version} do not know the model"
    key_format = get_format(adapter.format) if adapter.format is not None else None
    is_original = key_format is not None and key_format.naming == "original"
    if table.comfyui_names_version and not is_original:
        return f"older versions than {table.comfyui_names_version} load a part of it"
    if table.comfyui_bare_version and key_format is not None and key_format.name == "bare":
        return f"older versions than {table.comfyui_bare_version} load nothing of it"
    return ""


def _dropped_biases(
    keys: Iterable[str], known: Mapping[str, str], table: KeyTable
) -> tuple[str, ...]:
    """Return the keys of bias changes that ComfyUI takes from a file without using them.

    It finds the bias of a module by the name of the module's weight, but has no such name for a
    part of a fused projection, nor for a module whose rows it reorders.
    """
    sliced = {part for fused in table.fused for part, _ in fused.parts} | table.swapped_halves
    dropped = []
    for key in keys:
        prefix, _, suffix = key.rpartition(".")
        module = known.get(prefix, "")
        if suffix in ("diff_b", "b_norm") and template_of(module)[0] in sliced:
            has_diffusers_name = prefix.endswith((module, module.replace(".", "_")))
            dropped += [key] if has_diffusers_name else []
    return tuple(dropped)


def _layers_of_keys(tensors: Mapping[str, Tensor], adapter: Adapter) -> Mapping[LayerPath, Layer]:
    """Return the layers of the keys that a tool takes from a file, or {} if they are incomplete.

    Neither the file's header nor an adapter_config.json counts, because ComfyUI reads neither.
    """
    try:
        seen = import_tensors(tensors, {}, {}, adapter.table, {})
    except AdapterError:
        return {}
    return with_stage(seen, None).layers


def _difference_in_comfyui(layer: Layer, seen: Layer | None) -> str:
    """Return what ComfyUI computes differently from the file's layer; empty if nothing.

    `seen` is the layer that the keys give which ComfyUI reads.
    """
    if seen is None:
        return "it is lost"
    if scale_of(seen) != scale_of(layer):
        return f"its scale is {scale_of(layer):g}, but not by a key that ComfyUI reads"
    if seen.tensors.keys() != layer.tensors.keys() or not all(
        torch.equal(seen.tensors[role], tensor) for role, tensor in layer.tensors.items()
    ):
        return "ComfyUI does not read all of its tensors"
    if layer.is_dora and is_dora_per_row(layer):
        return (
            "magnitudes (DoRA) are divided by the norms of W, not of W + dW. Merge the file into "
            "the model with `gracetune adapter merge --into`"
        )
    if "lokr_t2" in layer.tensors:
        return (
            "ComfyUI fails on a LoKr with a core tensor (Tucker) and goes on without it. Merge the "
            "file into the model with `gracetune adapter merge --into`"
        )
    if any(
        role in layer.tensors and layer.tensors[role].dim() not in (2, 4) for role in CORE_ROLES
    ):
        return "convolutions in a decomposed form are only supported in two dimensions"
    return ""


def _fits(layer: Layer, module: str, shapes: Mapping[str, torch.Size]) -> bool:
    """Return True if a layer changes a weight of the model, and its bias, in their sizes.

    A full matrix must also have the weight's shape; products are reshaped to it.
    """
    weight = shapes.get(f"{module}.weight", shapes.get(module))
    diff, bias = layer.tensors.get("diff"), layer.tensors.get("diff_b")
    if weight is None or (bias is not None and shapes.get(f"{module}.bias") != bias.shape):
        return False
    if layer.algorithm == "full":
        return diff is None or diff.shape == weight
    return weight.numel() == math.prod(delta_shape(layer))


def comfyui_key_map(table: KeyTable, num_blocks: Mapping[str, int]) -> dict[str, str]:
    """Return a dict from each key prefix that ComfyUI looks for to diffusers' module name."""
    index = KeyIndex(table)
    found = {}
    for prefix, separator, naming in table.comfyui_prefixes:
        for module, name in index.templates(naming).items():
            if separator == "_" and module in table.bare_parameters:
                continue  # only the dotted name of a parameter that is not a `.weight` is known
            if naming == "diffusers" and module in table.not_in_comfyui:
                continue
            numbers = range(num_blocks.get(module.partition(".{}")[0], 0)) if "{}" in name else [0]
            # Dotted names of a U-Net's attention are those of diffusers' old processors alone.
            is_old = table.component == "unet" and (naming, separator) == ("diffusers", ".")
            known = _processor_name(name) if is_old else name
            for number in numbers:
                key = f"{prefix}{known.format(number).replace('.', separator)}"
                found[key] = module.format(number)
    return found


def _processor_name(module: str) -> str:
    """Return the name under which attention processors of old diffusers held a module's LoRA."""
    return module.replace(".to_", ".processor.to_").replace(".to_out.0", ".to_out")


def simulate_comfyui(keys: Sequence[str], known: Mapping[str, str]) -> ComfyUILoad:
    """Return the result that ComfyUI's loader would have for a file with these keys.

    `known` is a dict from each key prefix that ComfyUI looks for to diffusers' name of the module.
    """
    original = {key: key for key in keys}
    if WAN_FUN_KEY in original:
        original = {key.replace("lora_unet__", "lora_unet_", 1): key for key in keys}
    loaded: set[str] = set()
    modules: set[str] = set()
    for prefix, module in known.items():
        taken, missing = _match_suffixes(prefix, original)
        if missing is not None:
            return ComfyUILoad(frozenset(modules), (), missing)
        extra = {prefix + suffix for suffix in (".alpha", ".dora_scale")} & original.keys()
        loaded |= taken | extra
        if taken:
            modules.add(module)
    ignored = tuple(text for key, text in original.items() if key not in loaded)
    return ComfyUILoad(frozenset(modules), ignored)


def _match_suffixes(prefix: str, keys: Mapping[str, str]) -> tuple[set[str], str | None]:
    """Return the file's keys that ComfyUI loads for a prefix, and a missing one.

    If the missing key is not None, ComfyUI fails, because it needs the key beside another one.
    """
    taken = {prefix + suffix for suffix in (*SINGLE_SUFFIXES, *LOKR_SUFFIXES)} & keys.keys()
    if prefix + ".w_norm" not in keys:
        taken.discard(prefix + ".b_norm")
    for up, down, mid in LORA_SUFFIXES:
        if prefix + up in keys:
            if prefix + down not in keys:
                return taken, prefix + down
            taken |= {prefix + up, prefix + down}
            if mid is not None and prefix + mid in keys:
                taken.add(prefix + mid)
            break
    if prefix + LOHA_SUFFIXES[0] in keys:
        for suffix in LOHA_SUFFIXES:
            if prefix + suffix not in keys:
                return taken, prefix + suffix
            taken.add(prefix + suffix)
        taken |= {prefix + suffix for suffix in (".hada_t1", ".hada_t2")} & keys.keys()
    return taken, None
