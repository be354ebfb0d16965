"""Whether a file loads where people load it: in diffusers' pipeline, for real, and in ComfyUI.

diffusers loads nothing from some spellings and says so in a log line at most, so modules are
counted after the load, and what each of them computes is compared with the file's own dW.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gracetune.adapters.files.fused_projections import split_fused
from gracetune.adapters.files.io import find_stage, read_adapter_and_tensors, resolve_path
from gracetune.adapters.files.keys import BLOCK, KeyIndex, parse_key
from gracetune.adapters.files.layers import Adapter, Layer, delta, delta_shape, rank_of, with_stage
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable, Naming, Stage


ADAPTER_NAME = "checked"
TOLERANCE = 2e-2
"""How far a probe may be off: diffusers multiplies alpha in where the file's dtype rounds."""
LOADER_FAULTS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError)
"""What diffusers' loaders raise on files they do not understand."""
NOT_TRIED = "no pipeline is known for its family: it was read back and counted, not loaded"
ONLY_LORA = {
    "loha": "diffusers has no loader for LoHa. Merge it into the model, or convert it with "
    "--lora-rank.",
    "lokr": "diffusers' pipelines have no loader for LoKr here. Convert it --to diffusers for "
    "transformer.load_lora_adapter, merge it, or convert it with --lora-rank.",
    "full": "diffusers has no loader for full matrices. Merge it into the model, or convert it "
    "with --lora-rank.",
}


@dataclass(frozen=True)
class ToolResult:
    """What one tool makes of the file."""

    name: str
    matched: int
    expected: int
    reason: str = ""
    """Why not all of it loads; or how it loads, where that is not the usual way."""
    first_missing: str | None = None
    """The first key or module that is lost."""
    is_wrong: bool = False
    """Whether it loads and computes something else, which is worse than not at all."""

    @property
    def loads(self) -> bool:
        return self.matched == self.expected > 0


@dataclass(frozen=True)
class CheckReport:
    """The verdict on a file."""

    path: Path
    family: str
    form: str | None
    stage: Stage | None
    algorithms: tuple[str, ...]
    ranks: tuple[int, ...]
    expected: int
    results: tuple[ToolResult, ...]
    required_tools: tuple[str, ...]
    """Tools that must load it; none: any one will do, and none may load a part."""
    notices: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        if not self.results:
            return not self.required_tools
        if any(t.is_wrong for t in self.results):
            return False
        if self.required_tools:
            return all(t.loads for t in self.results if t.name in self.required_tools)
        whole_or_nothing = all(t.loads or t.matched == 0 for t in self.results)
        return whole_or_nothing and any(t.loads for t in self.results)

    def lines(self) -> list[str]:
        """The verdict, a line a tool."""
        if not self.results:
            return [f"{self.expected} modules: {NOT_TRIED}"]
        return [
            f"{t.name}: {t.matched} of {t.expected} modules" + (f": {t.reason}" if t.reason else "")
            for t in self.results
        ]

    def raise_if_failed(self) -> CheckReport:
        """Itself, if the file loads; otherwise the reason as an error."""
        if not self.ok:
            first = next((t.first_missing for t in self.results if not t.loads), None)
            raise AdapterError(
                f"{self.path} does not load as it should. " + " ".join(self.lines()),
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
    cls: type[nn.Module] | None = None,
    modules: Iterable[str] | None = None,
    demanded: tuple[str, ...] = (),
) -> CheckReport:
    """Load the file where others would, and count.

    `modules` are those it must hold, by diffusers' names; `config` is the transformer's, and
    without it a model is made that fits the file. A family that we know no pipeline of is loaded
    into a transformer of the class `cls`. A file that cannot be read, or that holds both stages,
    is an error by itself.
    """
    path = resolve_path(path)
    adapter, tensors = read_adapter_and_tensors(path, tables, table)
    _refuse_two_stages(adapter, list(tensors))
    told, _ = find_stage(adapter, path)
    adapter = with_stage(adapter, None)
    layers = {place.module: layer for place, layer in split_fused(adapter).layers.items()}
    wanted = list(layers) if modules is None else sorted(modules)
    missing = [module for module in wanted if module not in layers]
    if missing:
        raise AdapterError(
            f"{path} lacks {len(missing)} of {len(wanted)} modules, {missing[0]} first: it was cut "
            "short or written from part of the model.",
            kind="partial",
            key=missing[0],
        )
    if adapter.table.family in PREFIXES:
        targets: tuple[ToolResult, ...] = (
            _in_diffusers(path, tensors, adapter, layers, stage or told, config),
            _in_comfyui(tensors, adapter, layers),
        )
    elif cls is not None and config is not None:
        targets = (_in_transformer(path, layers, cls, config),)
    else:
        targets = ()
    return CheckReport(
        path=path,
        family=adapter.table.family,
        form=adapter.format,
        stage=stage or told,
        algorithms=tuple(sorted({layer.algorithm for layer in layers.values()})),
        ranks=tuple(sorted({rank for layer in layers.values() if (rank := rank_of(layer))})),
        expected=len(wanted),
        results=targets,
        required_tools=demanded,
        notices=adapter.notices,
    )


def _refuse_two_stages(adapter: Adapter, keys: list[str]) -> None:
    if len(adapter.stages) < 2:
        return
    index = KeyIndex(adapter.table)
    stages = [(key, found.path.stage) for key in keys if (found := parse_key(key, index))]
    first = next(key for key, stage in stages if stage != stages[0][1])
    raise AdapterError(
        f"{first!r} is of another stage than {stages[0][0]!r}: the file mixes both, and no tool "
        "loads both from one file. Run `gracetune adapter convert FILE --to comfyui`, which writes "
        "one file a stage.",
        kind="mixed-stages",
        key=first,
    )


def _in_comfyui(
    tensors: Mapping[str, Tensor], adapter: Adapter, layers: Mapping[str, Layer]
) -> ToolResult:
    """By its key map; a fused projection counts as the parts that it is of."""
    known = comfyui_key_map(adapter.table, count_blocks(layers))
    result = simulate_comfyui(list(tensors), known)
    expected = len(layers)
    if result.missing_key is not None:
        why = f"it stops at a key that is not there, {result.missing_key!r}"
        return ToolResult("comfyui", 0, expected, why, result.missing_key)
    if result.ignored:
        kept = {place.module for place in adapter.layers} & result.modules
        lost = f"it ignores {len(result.ignored)} keys, {result.ignored[0]!r} first"
        hint = "" if kept else "; convert it --to comfyui"
        return ToolResult("comfyui", len(kept), expected, lost + hint, result.ignored[0])
    reason = ""
    if any(layer.is_dora for layer in layers.values()):
        reason = "it divides magnitudes (DoRA) by the norms of the unchanged weight, peft does not"
    return ToolResult("comfyui", expected, expected, reason)


def _in_diffusers(
    path: Path,
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    layers: Mapping[str, Layer],
    stage: Stage | None,
    config: Mapping[str, object] | None,
) -> ToolResult:
    expected = len(layers)
    algorithms = {layer.algorithm for layer in layers.values()}
    by_model = algorithms == {"lokr"} and adapter.format == "diffusers"
    if "lora" not in algorithms and not by_model:
        return ToolResult("diffusers", 0, expected, ONLY_LORA[min(algorithms)], next(iter(layers)))
    pipeline = placeholder_pipeline(adapter.table.family, layers, config, _dtype(layers))
    model = transformer_for(pipeline, stage)
    try:
        with quiet_diffusers():
            if by_model:
                model.load_lora_adapter(  # type: ignore[operator]
                    dict(tensors), prefix="transformer", adapter_name=ADAPTER_NAME
                )
            else:
                _load(pipeline, path, stage)
    except LOADER_FAULTS as error:
        text = str(error).replace("\n", " ")[:200]
        return ToolResult(
            "diffusers", 0, expected, f"it refuses the file: {type(error).__name__} {text}"
        )
    return _counted(model, layers, by_model)


def _in_transformer(
    path: Path, layers: Mapping[str, Layer], cls: type[nn.Module], config: Mapping[str, object]
) -> ToolResult:
    """By the loader that every diffusers transformer has."""
    model = placeholder_model(cls, config, _dtype(layers))
    algorithms = {layer.algorithm for layer in layers.values()}
    if algorithms != {"lora"} and algorithms != {"lokr"}:
        return ToolResult("diffusers", 0, len(layers), ONLY_LORA[max(algorithms - {"lora"})])
    try:
        with quiet_diffusers():
            model.load_lora_adapter(
                str(path.parent),
                weight_name=path.name,
                prefix="transformer",
                adapter_name=ADAPTER_NAME,
            )
    except LOADER_FAULTS as error:
        text = str(error).replace("\n", " ")[:200]
        why = f"it refuses the file: {type(error).__name__} {text}"
        return ToolResult("diffusers", 0, len(layers), why)
    return _counted(model, layers, by_model=algorithms == {"lokr"})


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
def _counted(model: nn.Module, layers: Mapping[str, Layer], by_model: bool) -> ToolResult:
    """Modules that carry the adapter, and compute what the file says."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    expected = len(layers)
    carriers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and ADAPTER_NAME in module.active_adapters
    }
    lost = [module for module in layers if module not in carriers]
    if lost:
        matched = expected - len(lost)
        why = "it loads nothing and does not say so" if not matched else f"{lost[0]} is lost"
        return ToolResult("diffusers", matched, expected, why, lost[0])
    generator = torch.Generator().manual_seed(0)
    for name, layer in layers.items():
        if layer.is_dora:
            if ADAPTER_NAME not in carriers[name].lora_magnitude_vector:
                why = "it drops the magnitudes (DoRA); convert the file --to diffusers"
                return ToolResult("diffusers", 0, expected, why, name, is_wrong=True)
        elif not _agrees(carriers[name], layer, generator):
            why = f"{name} would compute another dW"
            return ToolResult("diffusers", 0, expected, why, name, is_wrong=True)
    how = "by transformer.load_lora_adapter; pipelines refuse LoKr" if by_model else ""
    return ToolResult("diffusers", expected, expected, how)


def _agrees(carrier: Any, layer: Layer, generator: torch.Generator) -> bool:
    """Whether a loaded module answers a random input as the file's dW does."""
    if layer.algorithm == "lokr":
        theirs = carrier.get_delta_weight(ADAPTER_NAME).float()
        return _near(theirs, delta(layer, theirs.shape))
    down, up = (
        carrier.lora_A[ADAPTER_NAME].weight.float(),
        carrier.lora_B[ADAPTER_NAME].weight.float(),
    )
    if down.shape != layer.tensors["down"].shape:
        return False
    probe = torch.randn(down[0].numel(), generator=generator)
    theirs = carrier.scaling[ADAPTER_NAME] * (up.flatten(1) @ (down.flatten(1) @ probe))
    ours = layer.tensors["up"].float().flatten(1) @ (
        layer.tensors["down"].float().flatten(1) @ probe
    )
    scale = 1.0 if layer.alpha is None else layer.alpha / down.shape[0]
    return _near(theirs, ours * scale)


def _dtype(layers: Mapping[str, Layer]) -> torch.dtype:
    """The adapter's own, so that nobody converts it; float32 where it has several."""
    dtypes = {tensor.dtype for layer in layers.values() for tensor in layer.tensors.values()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _near(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm()) <= TOLERANCE * float(b.norm()) + 1e-12


# ------------------------------------------------------------------------------------------
# Which keys of a file ComfyUI would load, computed without ComfyUI.
#
# Its loader builds a map from key prefixes to weights of the model, then looks for known endings
# after each prefix; what is left over is logged as "lora key not loaded" and ignored. This is that
# map for the families in our tables, after its state of January 2026.


GENERIC: tuple[tuple[str, str, Naming], ...] = (
    ("diffusion_model.", ".", "original"),
    ("lora_unet_", "_", "original"),
)
PREFIXES: dict[str, tuple[tuple[str, str, Naming], ...]] = {
    "wan": GENERIC,
    "flux": (
        *GENERIC,
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
        ("lora_transformer_", "_", "diffusers"),
    ),
    "qwen_image": (
        *GENERIC,
        ("", ".", "diffusers"),
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
    ),
}
"""Prefix, joint and naming of each kind of key that its map holds, by family."""
LORA_ENDINGS = (
    (".lora_up.weight", ".lora_down.weight", ".lora_mid.weight"),
    ("_lora.up.weight", "_lora.down.weight", None),
    (".lora_B.weight", ".lora_A.weight", None),
    (".lora.up.weight", ".lora.down.weight", None),
    (".lora_B", ".lora_A", None),
    (".lora_B.default.weight", ".lora_A.default.weight", None),
)
"""Tried in this order; the first that is there is taken."""
LOHA_ENDINGS = (".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b")
LOKR_ENDINGS = (
    ".lokr_w1",
    ".lokr_w2",
    ".lokr_w1_a",
    ".lokr_w1_b",
    ".lokr_w2_a",
    ".lokr_w2_b",
    ".lokr_t2",
)
ALONE = (".diff", ".diff_b", ".w_norm", ".b_norm", ".set_weight")
WAN_FUN = "lora_unet__blocks_0_cross_attn_k.lora_down.weight"
"""The key by which it recognises VideoX-Fun's files."""


@dataclass(frozen=True)
class ComfyUILoad:
    """What its loader would make of a file."""

    modules: frozenset[str]
    """Modules that get a change, by our own names."""
    ignored: tuple[str, ...]
    """Keys that it would ignore."""
    missing_key: str | None = None
    """A key whose missing partner ends the load with an error."""


def comfyui_key_map(table: KeyTable, num_blocks: Mapping[str, int]) -> dict[str, str]:
    """Prefixes of keys that are looked for, with the module each one changes."""
    index = KeyIndex(table)
    found = {}
    for prefix, joint, naming in PREFIXES[table.family]:
        for template in index.templates(naming):
            for name in _numbered(template, num_blocks):
                module = index.to_diffusers(name, naming, ".")
                assert module is not None, name
                found[f"{prefix}{name.replace('.', joint)}"] = module
    return found


def simulate_comfyui(keys: Sequence[str], known: Mapping[str, str]) -> ComfyUILoad:
    """What would be loaded, what would be left, and what would end in an error."""
    text = {key: key for key in keys}
    if WAN_FUN in text:
        text = {key.replace("lora_unet__", "lora_unet_", 1): key for key in keys}
    loaded: set[str] = set()
    modules: set[str] = set()
    for prefix, module in known.items():
        taken, lacks = _at(prefix, text)
        if lacks is not None:
            return ComfyUILoad(frozenset(modules), (), lacks)
        beside = {prefix + end for end in (".alpha", ".dora_scale") if prefix + end in text}
        loaded |= taken | beside
        if taken:
            modules.add(module)
    left = tuple(original for key, original in text.items() if key not in loaded)
    return ComfyUILoad(frozenset(modules), left)


def count_blocks(modules: Iterable[str]) -> dict[str, int]:
    """How many blocks of each kind a model must have to hold these modules."""
    counts: dict[str, int] = {}
    for module in modules:
        inside = BLOCK.match(module)
        if inside:
            kind = inside[1].rstrip(".")
            counts[kind] = max(counts.get(kind, 0), int(inside[2]) + 1)
    return counts


def _at(prefix: str, text: Mapping[str, str]) -> tuple[set[str], str | None]:
    """Keys that are taken after a prefix, or the one that would be missed."""
    taken = {prefix + end for end in (*ALONE, *LOKR_ENDINGS) if prefix + end in text}
    for up, down, mid in LORA_ENDINGS:
        if prefix + up in text:
            if prefix + down not in text:
                return taken, prefix + down
            taken |= {prefix + up, prefix + down}
            if mid is not None and prefix + mid in text:
                taken.add(prefix + mid)
            break
    if prefix + LOHA_ENDINGS[0] in text:
        for end in LOHA_ENDINGS:
            if prefix + end not in text:
                return taken, prefix + end
            taken.add(prefix + end)
        taken |= {prefix + end for end in (".hada_t1", ".hada_t2") if prefix + end in text}
    return taken, None


def _numbered(template: str, num_blocks: Mapping[str, int]) -> Iterable[str]:
    """A template's names in a model of so many blocks."""
    if "{}" not in template:
        return [template]
    kind = template.partition(".{}")[0]
    ours = {"double_blocks": "transformer_blocks", "single_blocks": "single_transformer_blocks"}
    count = num_blocks.get(ours.get(kind, kind), 0)
    return [template.format(number) for number in range(count)]


# ------------------------------------------------------------------------------------------
# diffusers pipelines with the shape of a model and the weight of none, to load adapters into.
#
# Every parameter is one zero, seen as a whole tensor: names, shapes and loaders are the real ones,
# and a pipeline of two 14 B experts takes no memory.


HEAD_WIDTH = 128
"""The width of a head in every published model of these families."""
Sizes = dict[str, tuple[int, ...]]


def placeholder_pipeline(
    family: str,
    layers: Mapping[str, Layer],
    config: Mapping[str, object] | None,
    dtype: torch.dtype,
) -> Any:
    """A pipeline whose transformers fit the layers (by module), or a given configuration."""
    settings = dict(config) if config is not None else CONFIGS[family](_sizes(layers))
    import diffusers  # slow to import, and only checks need it

    if family == "wan":
        return diffusers.WanPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=None,
            scheduler=None,
            transformer=placeholder_model(diffusers.WanTransformer3DModel, settings, dtype),
            transformer_2=placeholder_model(diffusers.WanTransformer3DModel, settings, dtype),
            boundary_ratio=0.875,
        )
    if family == "flux":
        return diffusers.FluxPipeline(
            scheduler=None,
            vae=None,
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=placeholder_model(diffusers.FluxTransformer2DModel, settings, dtype),
        )
    return diffusers.QwenImagePipeline(
        scheduler=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=placeholder_model(diffusers.QwenImageTransformer2DModel, settings, dtype),
    )


def transformer_for(pipeline: Any, stage: Stage | None) -> nn.Module:
    """The transformer that a stage's file goes into."""
    model: nn.Module = pipeline.transformer_2 if stage == "low" else pipeline.transformer
    return model


@contextlib.contextmanager
def quiet_diffusers() -> Iterator[None]:
    """What diffusers would print here is what the check itself reports, in its own words."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def placeholder_model(cls: Any, config: Mapping[str, object], dtype: torch.dtype) -> Any:
    """A model of a class and a configuration, every parameter one zero."""
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    try:
        with torch.device("meta"):
            model: nn.Module = cls(**settings)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise AdapterError(
            f"no {cls.__name__} can be made from this configuration: {error}. "
            "Give the config.json of the transformer that the adapter is for.",
            kind="other-model",
        ) from error
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return model


def _sizes(layers: Mapping[str, Layer]) -> Sizes:
    """The weight's shape of each module, by its name without the block's number."""
    sizes: Sizes = {}
    for module, layer in layers.items():
        shape = delta_shape(layer)
        if len(shape) > 1 and shape[1]:  # neither a norm's change nor a bias' alone
            name = ".".join(part for part in module.split(".") if not part.isdigit())
            sizes.setdefault(name, shape)
    counts = count_blocks(layers)
    return sizes | {f"#{kind}": (count,) for kind, count in counts.items()}


def _first(sizes: Sizes, axis: int, default: int, *names: str) -> int:
    """One axis of the first module that is there: every one of them has the same."""
    return next((sizes[name][axis] for name in names if name in sizes), default)


def _heads(width: int) -> tuple[int, int]:
    return (width // HEAD_WIDTH, HEAD_WIDTH) if width % HEAD_WIDTH == 0 else (1, width)


def _wan(sizes: Sizes) -> dict[str, object]:
    attention = [f"blocks.attn{n}.to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out")]
    width = _first(sizes, 0, 0, *attention, "blocks.ffn.net") or _first(
        sizes, 1, 5120, "blocks.ffn.net.proj", "proj_out"
    )
    heads, head = _heads(width)
    added = _first(sizes, 1, 0, "blocks.attn2.add_k_proj", "blocks.attn2.add_v_proj")
    image = _first(sizes, 1, 0, "condition_embedder.image_embedder.ff.net.proj")
    patch = math.prod((1, 2, 2))
    return {
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "num_layers": max(1, _first(sizes, 0, 1, "#blocks")),
        "ffn_dim": _first(sizes, 0, 0, "blocks.ffn.net.proj")
        or _first(sizes, 1, 13824, "blocks.ffn.net"),
        "text_dim": _first(sizes, 1, 4096, "condition_embedder.text_embedder.linear_1"),
        "freq_dim": _first(sizes, 1, 256, "condition_embedder.time_embedder.linear_1"),
        "in_channels": _first(sizes, 1, 16, "patch_embedding"),
        "out_channels": _first(sizes, 0, 16 * patch, "proj_out") // patch,
        "added_kv_proj_dim": added or None,
        "image_dim": image or added or None,
    }


def _flux(sizes: Sizes) -> dict[str, object]:
    double, single = "transformer_blocks", "single_transformer_blocks"
    names = [f"{double}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "to_add_out")]
    names += [f"{double}.attn.add_{x}_proj" for x in "qkv"]
    names += [f"{single}.attn.to_{x}" for x in "qkv"] + [f"{single}.proj_out", "x_embedder"]
    width = _first(sizes, 0, 3072, *names)
    heads, head = _heads(width)
    return {
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "num_layers": _first(sizes, 0, 1, f"#{double}"),
        "num_single_layers": _first(sizes, 0, 1, f"#{single}"),
        "joint_attention_dim": _first(sizes, 1, 4096, "context_embedder"),
        "pooled_projection_dim": _first(sizes, 1, 768, "time_text_embed.text_embedder.linear_1"),
        "in_channels": _first(sizes, 1, 64, "x_embedder"),
        "guidance_embeds": True,
    }


def _qwen_image(sizes: Sizes) -> dict[str, object]:
    block = "transformer_blocks"
    names = [f"{block}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "to_add_out")]
    names += [f"{block}.attn.add_{x}_proj" for x in "qkv"]
    heads, head = _heads(_first(sizes, 0, 3072, *names, "img_in"))
    patch = 2 * 2
    return {
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "num_layers": _first(sizes, 0, 1, f"#{block}"),
        "joint_attention_dim": _first(sizes, 1, 3584, "txt_in"),
        "in_channels": _first(sizes, 1, 64, "img_in"),
        "out_channels": _first(sizes, 0, 16 * patch, "proj_out") // patch,
    }


CONFIGS = {"wan": _wan, "flux": _flux, "qwen_image": _qwen_image}
"""What a transformer's configuration must have been, by the shapes of a file's layers."""
