"""Load adapter files with diffusers, LyCORIS, peft and ComfyUI, and measure the models' outputs.

Each tool gets a copy of a real, tiny transformer. `Effect.error` compares its output with that of
the weights that the adapter's formulas give, relative to the effect of the adapter.
"""

import copy
import importlib
import math
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import torch
from adapter_examples import MAKERS, TABLES, make_lora, map_tensors
from diffusers import (
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableAudioDiTModel,
    WanPipeline,
    WanTransformer3DModel,
)
from safetensors.torch import load_file

from gracetune.adapters.files.check_loading import LOADER_ERRORS
from gracetune.adapters.files.checkpoint_weights import checkpoint_header
from gracetune.adapters.files.fused_projections import split_fused
from gracetune.adapters.files.io import save_tensors
from gracetune.adapters.files.keys import LayerPath, any_name_table, template_of
from gracetune.adapters.files.layers import (
    Adapter,
    Layer,
    delta_bias,
    delta_shape,
    merge_weight,
)
from gracetune.adapters.inject import adapter_from_model, add_adapter
from gracetune.config.schema import AdapterSection

MAX_ERROR = 1e-5
"""Largest difference of outputs that counts as equal, relative to the effect of the adapter."""
TEXT, HEADS, HEAD_WIDTH = 16, 2, 12
WIDTH = HEADS * HEAD_WIDTH
CHANNELS = 8
ATTENTION = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_WIDTH}


def build_transformer(family):
    """Return a tiny transformer with random weights, biases and norms included."""
    torch.manual_seed(1)
    if family == "wan":
        model = WanTransformer3DModel(
            **ATTENTION,
            num_layers=2,
            ffn_dim=48,
            in_channels=4,
            out_channels=4,
            text_dim=TEXT,
            freq_dim=TEXT,
        )
    elif family == "flux":
        model = FluxTransformer2DModel(
            **ATTENTION,
            patch_size=1,
            in_channels=CHANNELS,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            axes_dims_rope=(4, 4, 4),
            guidance_embeds=True,
        )
    elif family in ("qwen_image", "qwen_image_edit"):
        model = QwenImageTransformer2DModel(
            **ATTENTION,
            patch_size=2,
            in_channels=CHANNELS,
            out_channels=CHANNELS // 4,
            num_layers=1,
            joint_attention_dim=TEXT,
            axes_dims_rope=(4, 4, 4),
        )
    else:
        model = StableAudioDiTModel(
            **ATTENTION,
            sample_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_key_value_attention_heads=1,
            cross_attention_dim=TEXT,
            cross_attention_input_dim=TEXT,
            global_states_input_dim=TEXT,
            time_proj_dim=8,
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


@torch.no_grad()
def predict(family, model):
    """Return the output of a transformer for fixed inputs, computed in float64."""
    model = model.double()
    generator = torch.Generator().manual_seed(2)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if family == "wan":
        inputs = {"hidden_states": randn(1, 4, 1, 4, 4), "timestep": torch.tensor([500.0])}
        inputs["encoder_hidden_states"] = randn(1, 3, TEXT)
    elif family == "flux":
        inputs = {
            "hidden_states": randn(1, 4, CHANNELS),
            "encoder_hidden_states": randn(1, 3, TEXT),
            "pooled_projections": randn(1, TEXT),
            "timestep": torch.tensor([0.5], dtype=torch.float64),
            "guidance": torch.tensor([1.0], dtype=torch.float64),
            "img_ids": torch.arange(12.0).reshape(4, 3),
            "txt_ids": torch.zeros(3, 3),
        }
    elif family in ("qwen_image", "qwen_image_edit"):
        inputs = {
            "hidden_states": randn(1, 4, CHANNELS),
            "encoder_hidden_states": randn(1, 3, TEXT),
            "encoder_hidden_states_mask": torch.ones(1, 3, dtype=torch.bool),
            "timestep": torch.tensor([0.5], dtype=torch.float64),
            "img_shapes": [[(1, 2, 2)]],
        }
    else:
        inputs = {
            "hidden_states": randn(1, 4, 16),
            "timestep": torch.tensor([0.5], dtype=torch.float64),
            "encoder_hidden_states": randn(1, 3, TEXT),
            "global_hidden_states": randn(1, 1, TEXT),
            "rotary_embedding": (torch.ones(17, 6).double(), torch.zeros(17, 6).double()),
        }
    return model(**inputs, return_dict=False)[0]


def table_of(family):
    if family == "stable_audio":
        return any_name_table(family)
    return TABLES["qwen_image" if family == "qwen_image_edit" else family]


OUTSIDE = {
    "wan": ("proj_out", "condition_embedder.time_proj"),
    "flux": ("norm_out.linear", "x_embedder"),
    "qwen_image": ("img_in",),
    "qwen_image_edit": ("img_in",),
}
"""Modules outside of the blocks that an adapter may change, too."""


def adapted_modules(family, model, outside=False):
    """Return the names of the modules that a default run would train."""
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    if family == "stable_audio":
        return [name for name in linear if "transformer_blocks" in name]
    known = table_of(family).block_linears
    found = [name for name in linear if template_of(name)[0] in known]
    return [*found, *OUTSIDE[family]] if outside else found


def make_adapter(family, kind, model, alpha=None, outside=False):
    """Return an adapter for a model, of a size that changes its output by about the output."""
    generator = torch.Generator().manual_seed(3)
    layers = {}
    for name in adapted_modules(family, model, outside):
        rows, columns = model.get_submodule(name).weight.shape
        if kind == "dora":
            layer = make_lora(rows, columns, generator, alpha=alpha, dora=True)
        else:
            layer = MAKERS[kind](rows, columns, generator, alpha=alpha)
        layers[LayerPath(None, name)] = map_tensors(layer, lambda t: t * 0.25)
    return Adapter(table_of(family), layers)


def train_adapter(family, kind, model, folder):
    """Add an adapter to a copy of a model and set its weights, and save them as a checkpoint does.

    Returns the model, its adapter and the checkpoint's file.
    """
    model = copy.deepcopy(model)
    names = adapted_modules(family, model)
    section = AdapterSection(kind=kind, rank=4, alpha=16, overrides={names[0]: {"alpha": 3}})
    modules = add_adapter({"": model}, section, names, seed=0)
    generator = torch.Generator().manual_seed(3)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        # Magnitudes stay near the norms of the weights, which they replace.
        start = parameter.data if "magnitude" in name else 0
        parameter.data = start + torch.randn(parameter.shape, generator=generator) * 0.25
    adapter = adapter_from_model({"": model}, modules, table_of(family))
    file = folder / "weights.safetensors"
    save_tensors({n: p.detach() for n, p in trained.items()}, file, checkpoint_header(adapter))
    return model.eval(), adapter, file


def with_bias(layer, generator):
    """Return a layer that also changes the bias."""
    shape = delta_shape(layer)[0]
    bias = torch.randn(shape, generator=generator)
    return Layer(layer.algorithm, {**layer.tensors, "diff_b": bias}, layer.alpha)


def with_column_magnitudes(layer, generator):
    """Return a DoRA with one magnitude for each column, as old versions of LyCORIS trained it."""
    magnitude = torch.rand(1, delta_shape(layer)[1], generator=generator) + 0.5
    return Layer(layer.algorithm, {**layer.tensors, "dora": magnitude}, layer.alpha)


def conv_layer(kind, shape, generator):
    """Return a layer for a convolution, with the kernel in the shape that LyCORIS gives it."""
    rows, columns, *kernel = shape
    size = columns * math.prod(kernel)

    def randn(*shape):
        return torch.randn(*shape, generator=generator) * 0.5

    if kind == "lora":
        ones = [1] * len(kernel)
        return Layer("lora", {"down": randn(4, columns, *kernel), "up": randn(rows, 4, *ones)})
    if kind == "lokr-whole":
        w2 = randn(rows // 2, columns // 2, *kernel)
        return Layer("lokr", {"lokr_w1": randn(2, 2), "lokr_w2": w2})
    if kind == "full":
        return Layer("full", {"diff": randn(*shape)})
    if kind == "full-flat":
        return Layer("full", {"diff": randn(rows, size)})
    return map_tensors(MAKERS[kind](rows, size, generator), lambda t: t * 0.5)


def unusual_adapters(family, model):
    """Return adapters, by name, that a default run does not train but other tools write."""
    generator = torch.Generator().manual_seed(4)
    table = table_of(family)
    plain = {kind: make_adapter(family, kind, model, 3.0) for kind in ("lora", "loha", "full")}

    def change(kind, function):
        layers = {path: function(x, generator) for path, x in plain[kind].layers.items()}
        return Adapter(table, layers)

    found = {
        "lora with biases": change("lora", with_bias),
        "loha with biases": change("loha", with_bias),
        "lora, dora by columns": change("lora", with_column_magnitudes),
        "loha, dora by columns": change("loha", with_column_magnitudes),
    }
    for kind in ("lora", "full"):
        part = {path: x for path, x in plain[kind].layers.items() if path.module.endswith("to_q")}
        found[f"{kind} of queries"] = Adapter(table, part)
    if family == "wan":
        shape = model.patch_embedding.weight.shape
        block = dict(list(plain["lora"].layers.items())[:10])
        for kind in ("lora", "loha", "lokr", "lokr-whole", "full", "full-flat"):
            layers = {LayerPath(None, "patch_embedding"): conv_layer(kind, shape, generator)}
            found[f"convolution, {kind}"] = Adapter(table, block | layers)
        table_change = torch.randn(model.scale_shift_table.shape, generator=generator)
        layers = {LayerPath(None, "scale_shift_table"): Layer("full", {"diff": table_change})}
        found["a bare parameter"] = Adapter(table, block | layers)
    return found


@torch.no_grad()
def merge(model, adapter):
    """Merge an adapter into a model by the formulas of `layers.py`."""
    weights = dict(model.named_parameters())
    for path, layer in split_fused(adapter).layers.items():
        weight = weights.get(f"{path.module}.weight", weights.get(path.module))
        weight.copy_(merge_weight(layer, weight))
        bias = delta_bias(layer)
        if bias is not None:
            weights[f"{path.module}.bias"].add_(bias)
    return model


TOOL_ERRORS = (*LOADER_ERRORS, FileNotFoundError)


class Effect:
    """The output that a model with an adapter must have, and without it."""

    def __init__(self, family, model, adapter):
        self.family = family
        self.plain = predict(family, copy.deepcopy(model))
        self.expected = predict(family, merge(copy.deepcopy(model), adapter))
        self.size = float((self.expected - self.plain).norm())
        assert self.size > 1e-2 * float(self.plain.norm())

    def error(self, load):
        """Return the error of the output of a loaded model, relative to the adapter's effect.

        It is infinite if the tool refuses the file.
        """
        try:
            output = predict(self.family, load())
        except TOOL_ERRORS:
            return math.inf
        return float((output - self.expected).norm()) / self.size


# The tools. Each function returns the model with the adapter, or raises the tool's error.


def load_in_diffusers(family, model, path):
    build = {
        "wan": (WanPipeline, ("tokenizer", "text_encoder", "vae", "scheduler")),
        "flux": (
            FluxPipeline,
            ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        ),
        "qwen_image": (QwenImagePipeline, ("scheduler", "vae", "text_encoder", "tokenizer")),
        "qwen_image_edit": (
            QwenImageEditPlusPipeline,
            ("scheduler", "vae", "text_encoder", "tokenizer", "processor"),
        ),
    }
    cls, empty = build[family]
    model = copy.deepcopy(model)
    pipeline = cls(transformer=model, **dict.fromkeys(empty))
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name, local_files_only=True)
    return model


def load_in_diffusers_transformer(family, model, path):
    model = copy.deepcopy(model)
    model.load_lora_adapter(load_file(path), prefix="transformer")
    return model


def load_in_peft(family, model, path):
    from peft import PeftModel

    return PeftModel.from_pretrained(copy.deepcopy(model), path.parent).base_model.model


def load_in_lycoris(family, model, path, merged):
    from lycoris.wrapper import create_lycoris_from_weights

    model = copy.deepcopy(model)
    with torch.no_grad():
        network, _ = create_lycoris_from_weights(1.0, str(path), model)
        if merged:
            network.merge_to(1.0)
        else:
            network.apply_to()
            network.double()
    model.lycoris_network = network if not merged else None
    return model


# ComfyUI


@contextmanager
def comfyui_modules(folder):
    """Import ComfyUI's loader of adapters from a copy of its sources.

    Its model classes and its device management need a GPU's packages and are replaced: the loader
    uses the former only for `isinstance` and the latter only to move tensors.
    """
    before = set(sys.modules)
    model_base = ModuleType("comfy.model_base")
    classes = {}
    model_base.__getattr__ = lambda name: classes.setdefault(name, type(name, (), {}))
    management = ModuleType("comfy.model_management")
    management.cast_to_device = lambda tensor, device, dtype, copy=False: tensor.to(
        device, dtype, copy=copy
    )
    sys.path.insert(0, str(folder))
    try:
        package = importlib.import_module("comfy")
        for stub in (model_base, management):
            sys.modules[stub.__name__] = stub
            setattr(package, stub.__name__.rpartition(".")[2], stub)
        yield SimpleNamespace(
            lora=importlib.import_module("comfy.lora"),
            convert=importlib.import_module("comfy.lora_convert"),
            model_base=model_base,
        )
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "comfy":
                del sys.modules[name]


def original_weights(family, model):
    """Return a model's weights with the names and shapes of the original checkpoint."""
    table = table_of(family)
    weights = dict(model.named_parameters())
    parts_of = {fused.whole: [part for part, _ in fused.parts] for fused in table.fused}
    found = {}
    for theirs, ours in table.rows:
        for number in (0, 1):
            for kind in (".weight", ".bias", ""):
                names = [f"{p.format(number)}{kind}" for p in parts_of.get(ours, [ours])]
                if all(name in weights for name in names):
                    whole = torch.cat([weights[name].detach() for name in names])
                    whole = _swap(whole) if ours in table.swapped_halves else whole
                    found[f"{theirs.format(number)}{kind}"] = (whole.clone(), names)
    return found


def _swap(tensor):
    return torch.cat(tensor.chunk(2)[::-1])


@torch.no_grad()
def load_in_comfyui(comfy, family, model, path):
    """Patch the weights as ComfyUI does, and return a diffusers model with the patched weights."""
    originals = original_weights(family, model)
    class_name = {"wan": "WAN21", "flux": "Flux"}.get(family, "QwenImage")
    comfy_model = getattr(comfy.model_base, class_name)()
    comfy_model.state_dict = lambda: {f"diffusion_model.{k}": w for k, (w, _) in originals.items()}
    config = {"depth": 1, "depth_single_blocks": 1, "hidden_size": WIDTH}
    comfy_model.model_config = SimpleNamespace(unet_config=config)
    key_map = comfy.lora.model_lora_keys_unet(comfy_model, {})
    patches = comfy.lora.load_lora(comfy.convert.convert_lora(load_file(path)), key_map)
    by_weight = {}
    for target, patch in patches.items():
        key, offset, function = (
            (target, None, None)
            if isinstance(target, str)
            else (*target, *[None] * (3 - len(target)))
        )
        by_weight.setdefault(key, []).append((1.0, patch, 1.0, offset, function))
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    swapped = table_of(family).swapped_halves
    for key, (weight, names) in originals.items():
        full = f"diffusion_model.{key}"
        changed = comfy.lora.calculate_weight(by_weight.get(full, []), weight.clone(), full)
        changed = _swap(changed) if names[0].rpartition(".")[0] in swapped else changed
        for name, part in zip(
            names, changed.split([len(parameters[n]) for n in names]), strict=True
        ):
            parameters[name].copy_(part)
    return model
