"""Load adapter files with diffusers, LyCORIS, peft and ComfyUI, and measure the models' outputs.

Each tool gets a copy of a real, tiny transformer or U-Net. `Effect.error` compares its output with
that of the weights that the adapter's formulas give, relative to the effect of the adapter.
"""

import ast
import copy
import importlib
import inspect
import json
import math
import os
import random
import re
import signal
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace

import diffusers
import pytest
import torch
from adapter_examples import MAKERS, TABLES, make_lora, map_tensors
from fakes.miniatures import MINIATURES, write_miniature
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
from gracetune.adapters.inject import PEFT_KINDS, adapter_from_model, add_adapter
from gracetune.config.schema import AdapterSection
from gracetune.errors import InterruptedRunError
from gracetune.events.types import StepDone
from gracetune.models.family import SampleShape, planner_shapes
from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.models.registry import FAMILIES
from gracetune.train.build import Session
from gracetune.train.run import run_training

MAX_ERROR = 1e-5
"""Largest difference of outputs that counts as equal, relative to the effect of the adapter."""
WIDTH = 24
"""Hidden size of the transformers of `wan`, `flux` and `qwen_image`."""
SIZES = {
    "flux": {"attention_head_dim": 12, "axes_dims_rope": (4, 4, 4)},
    "qwen_image": {"num_layers": 1, "attention_head_dim": 12, "axes_dims_rope": (4, 4, 4)},
    "z_image": {"dim": WIDTH, "axes_dims": (4, 4, 4)},  # MLPs with a multiple of four rows
    "krea2": {"num_layerwise_text_blocks": 2, "num_refiner_text_blocks": 2},
    "sd15": {"block_out_channels": (8, 16, 32, 32)},  # in the ratios of the published model
    "sdxl": {"block_out_channels": (8, 16, 32)},
}
"""Settings in which the transformers differ from the miniatures, by family."""
TABLE_NAMES = {
    family: import_module(info.module).KEY_TABLE.family
    for family, info in FAMILIES.items()
    if info.has_key_table
}
"""Family -> name of its key table."""
TRANSFORMER_TABLES = tuple(name for name, table in TABLES.items() if table.component != "unet")
"""Key tables of transformers."""
UNETS = tuple(name for name, table in TABLES.items() if table.component == "unet")
"""Key tables of U-Nets, whose adapters also change convolutions."""
VARIANTS = [name for name, small in MINIATURES.items() if small.family in TABLE_NAMES]
"""Miniatures with a key table."""


def miniature_of(name):
    """Return a miniature by its name, or the first one of a family or of a key table."""
    if name in MINIATURES:
        return name
    families = {family for family, table in TABLE_NAMES.items() if table == name} | {name}
    return next(small for small, found in MINIATURES.items() if found.family in families)


def family_of(name):
    """Return the family of a miniature, or of the name of a key table."""
    return MINIATURES[miniature_of(name)].family


@cache
def transformer_config(small):
    """Return the class of a miniature's pipeline, and its transformer's or U-Net's settings."""
    with TemporaryDirectory() as folder:
        path = write_miniature(small, Path(folder) / "model")
        index = json.loads((path / "model_index.json").read_text())
        config = json.loads((path / component_of(small) / "config.json").read_text())
    return getattr(diffusers, index["_class_name"]), config


def component_of(name):
    """Return the name of a miniature's model in its diffusers pipeline."""
    return table_of(name).component


def build_transformer(name):
    """Return the transformer or U-Net of a miniature, with random weights, biases and norms.

    `name` is a miniature, or a key table with a miniature. The attribute `pipeline_class` of the
    result is the class of its diffusers pipeline.
    """
    pipeline_class, config = transformer_config(miniature_of(name))
    torch.manual_seed(1)
    with without_progress_bars():
        model = getattr(diffusers, config["_class_name"]).from_config(
            config, **SIZES.get(family_of(name), {})
        )
    model.pipeline_class = pipeline_class
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

    if family == "stable_audio":
        config = model.config
        rotary = torch.ones(17, config.attention_head_dim // 2, dtype=torch.float64)
        return model(
            hidden_states=randn(1, config.in_channels, 16),
            timestep=torch.tensor([0.5], dtype=torch.float64),
            encoder_hidden_states=randn(1, 3, config.cross_attention_input_dim),
            global_hidden_states=randn(1, 1, config.global_states_input_dim),
            rotary_embedding=(rotary, torch.zeros_like(rotary)),
            return_dict=False,
        )[0]
    shapes = planner_shapes(family_of(family))
    size = 64 if component_of(family) == "unet" else 32  # a U-Net halves the latents thrice
    encoded = shapes.encoded_shape(model.config, SampleShape(size, size))
    encoded = replace(encoded, text_shape=(5, encoded.text_shape[1]))
    with uninitialised_is_nan():
        inputs = shapes.inputs(model.config, encoded, 1, torch.float64)
    for name, tensor in inputs.items():
        values = randn(*tensor.shape) if tensor.dim() > 1 else torch.full(tensor.shape, 0.5)
        inputs[name] = torch.where(tensor.isnan(), values, tensor).to(tensor.dtype)
    with warnings.catch_warnings():
        # Some models compute norms in float32.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
        return shapes.call(model, encoded, inputs)


@contextmanager
def uninitialised_is_nan():
    """Let `torch.empty` return NaN and True, so that values can be set where there are none."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def table_of(name):
    family = family_of(name)
    return TABLES[TABLE_NAMES[family]] if family in TABLE_NAMES else any_name_table(family)


UNET_OUTSIDE = (
    "conv_in",
    "time_embedding.linear_1",
    "down_blocks.0.downsamplers.0.conv",
    "down_blocks.1.resnets.0.conv1",
    "down_blocks.1.resnets.0.time_emb_proj",
    "down_blocks.1.attentions.0.proj_in",
    "mid_block.attentions.0.proj_out",
    "up_blocks.0.resnets.0.conv_shortcut",
    "up_blocks.0.upsamplers.0.conv",
    "conv_out",
)
OUTSIDE = {
    "wan": ("proj_out", "condition_embedder.time_proj"),
    "flux": ("norm_out.linear", "x_embedder"),
    "flux2": ("norm_out.linear", "x_embedder", "single_stream_modulation.linear"),
    "chroma": ("x_embedder", "distilled_guidance_layer.in_proj"),
    "qwen_image": ("img_in",),
    "sd3": (
        "norm_out.linear",
        "context_embedder",
        "transformer_blocks.0.norm1_context.linear",
        "transformer_blocks.1.norm1_context.linear",
    ),
    "z_image": ("all_x_embedder.2-1", "layers.0.adaLN_modulation.0"),
    "krea2": ("img_in", "time_mod_proj", "text_fusion.refiner_blocks.0.attn.to_q"),
    "sd15": (*UNET_OUTSIDE, "down_blocks.2.resnets.0.conv_shortcut"),
    "sdxl": (*UNET_OUTSIDE, "add_embedding.linear_1"),
}
"""Modules outside of the blocks, or that a default run does not train, by key table. For other
tables it is the layer that reads the latents."""


def adapted_modules(family, model, outside=False):
    """Return the names of the modules that a default run would train."""
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    if family == "stable_audio":
        return [name for name in linear if "transformer_blocks" in name]
    table = table_of(family)
    found = [name for name in linear if {name, template_of(name)[0]} & {*table.block_linears}]
    more = OUTSIDE.get(table.family, (planner_shapes(family_of(family)).input_layer,))
    return [*found, *more] if outside else found


def make_adapter(family, kind, model, alpha=None, outside=False):
    """Return an adapter for a model, of a size that changes its output by about the output."""
    generator = torch.Generator().manual_seed(3)
    scale = 0.5 if kind == "lokr-both" else 0.25  # it multiplies four tensors
    layers = {}
    for name in adapted_modules(family, model, outside):
        rows, columns, *kernel = model.get_submodule(name).weight.shape
        if kernel:
            layer = conv_layer(kind, (rows, columns, *kernel), generator, alpha)
        elif kind == "dora":
            layer = make_lora(rows, columns, generator, alpha=alpha, dora=True)
        else:
            layer = MAKERS[kind](rows, columns, generator, alpha=alpha)
        if model.get_submodule(name).bias is None:
            layer.tensors.pop("diff_b", None)
        layers[LayerPath(None, name)] = map_tensors(layer, lambda t: t * scale)
    return Adapter(table_of(family), layers)


def train_adapter(family, kind, model, folder):
    """Add an adapter to a copy of a model and set its weights, and save them as a checkpoint does.

    Returns the model, its adapter and the checkpoint's file.
    """
    model = copy.deepcopy(model)
    names = adapted_modules(family, model, component_of(family) == "unet")
    if kind in PEFT_KINDS:
        names = [n for n in names if isinstance(model.get_submodule(n), torch.nn.Linear)]
    section = AdapterSection(kind=kind, rank=4, alpha=16, overrides={names[0]: {"alpha": 3}})
    modules = add_adapter({"": model}, section, names, seed=0)
    generator = torch.Generator().manual_seed(3)
    # A large change of a U-Net makes its output depend on the rounding of weights.
    size = 0.08 if component_of(family) == "unet" and kind != "loha" else 0.25
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        # Magnitudes stay near the norms of the weights, which they replace.
        start = parameter.data if "magnitude" in name else 0
        parameter.data = start + torch.randn(parameter.shape, generator=generator) * size
    adapter = adapter_from_model({"": model}, modules, table_of(family))
    file = folder / "weights.safetensors"
    save_tensors({n: p.detach() for n, p in trained.items()}, file, checkpoint_header(adapter))
    return model.eval(), adapter, file


def interruptible_run(family, path, folder):
    """Return the sections of a run of a LoRA with averaged weights on a miniature."""
    data = {"type": "shapes", "instance_data_dir": str(folder / "data"), "resolution": 32}
    return {
        "model": {"family": family, "path": str(path)},
        "adapter": {"rank": 4, "alpha": 3},
        "datasets": [data | {"shapes": {"copies": 1}, "max_aspect": 1.0}],
        "train": {"max_train_steps": 6, "checkpoint_every": 2, "keep_checkpoints": 1},
        "optimizer": {"lr": 0.05},
    }


def train_until_interrupted(run):
    """Train until a signal comes at a random step; return the step and the trained transformer.

    The transformer is a copy that is made when the checkpoint is written, with the weights that the
    run exports.
    """
    steps, models = [], []
    last = random.SystemRandom().randint(1, run.train.max_train_steps - 1)

    class Interrupter:
        def handle(self, event):
            if isinstance(event, StepDone):
                steps.append(event.step)
                if event.step == last:
                    os.kill(os.getpid(), signal.SIGTERM)

        def close(self):
            pass

    collect = Session.collect_adapter

    def copying(session):
        with session.state.averaged_weights():
            models.append(copy.deepcopy(session.state.family.transformer).eval())
        return collect(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "collect_adapter", copying)
        with pytest.raises(InterruptedRunError):
            run_training(run, sinks=[Interrupter()])
    assert steps == list(range(1, last + 1)), (steps, last)
    return last, models[-1]


def with_bias(layer, generator):
    """Return a layer that also changes the bias."""
    shape = delta_shape(layer)[0]
    bias = torch.randn(shape, generator=generator)
    return Layer(layer.algorithm, {**layer.tensors, "diff_b": bias}, layer.alpha)


def with_column_magnitudes(layer, generator):
    """Return a DoRA with one magnitude for each column, as old versions of LyCORIS trained it."""
    magnitude = torch.rand(1, delta_shape(layer)[1], generator=generator) + 0.5
    return Layer(layer.algorithm, {**layer.tensors, "dora": magnitude}, layer.alpha)


def conv_layer(kind, shape, generator, alpha=None):
    """Return a layer for a convolution, with the kernel in the shape that LyCORIS gives it."""
    rows, columns, *kernel = shape
    size = columns * math.prod(kernel)
    ones = [1] * len(kernel)

    def randn(*shape):
        return torch.randn(*shape, generator=generator) * 0.5

    if kind in ("lora", "dora"):
        tensors = {"down": randn(4, columns, *kernel), "up": randn(rows, 4, *ones)}
        if kind == "dora":
            tensors["dora"] = torch.rand(rows, 1, *ones, generator=generator) + 0.5
        return Layer("lora", tensors, alpha)
    if kind == "lora-tucker":
        tensors = {"down": randn(4, columns, *ones), "up": randn(rows, 4, *ones)}
        return Layer("lora", {**tensors, "mid": randn(4, 4, *kernel)}, alpha)
    if kind == "loha-tucker":
        tensors = {f"hada_t{n}": randn(4, 4, *kernel) for n in (1, 2)}
        tensors |= {f"hada_w{n}_a": randn(4, rows) for n in (1, 2)}
        return Layer("loha", tensors | {f"hada_w{n}_b": randn(4, columns) for n in (1, 2)}, alpha)
    if kind == "lokr-tucker":
        tensors = {"lokr_w1": randn(2, 2), "lokr_t2": randn(3, 3, *kernel)}
        tensors |= {"lokr_w2_a": randn(3, rows // 2), "lokr_w2_b": randn(3, columns // 2)}
        return Layer("lokr", tensors, alpha)
    if kind == "lokr-whole":
        factor = 4 if columns % 4 == 0 else 2
        w2 = randn(rows // factor, columns // factor, *kernel)
        return Layer("lokr", {"lokr_w1": randn(factor, factor), "lokr_w2": w2})
    if kind == "full":
        return Layer("full", {"diff": randn(*shape)})
    if kind == "full-flat":
        return Layer("full", {"diff": randn(rows, size)})
    return map_tensors(MAKERS[kind](rows, size, generator, alpha=alpha), lambda t: t * 0.5)


def unusual_adapters(family, model):
    """Return adapters, by name, that a default run does not train but other tools write."""
    generator = torch.Generator().manual_seed(4)
    table = table_of(family)
    plain = {kind: make_adapter(family, kind, model, 3.0) for kind in ("lora", "loha", "full")}

    def change(kind, function):
        layers = {path: function(x, generator) for path, x in plain[kind].layers.items()}
        return Adapter(table, layers)

    first = next(iter(plain["lora"].layers)).module
    biased = ("lora", "loha") if model.get_submodule(first).bias is not None else ()
    found = {
        **{f"{kind} with biases": change(kind, with_bias) for kind in biased},
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
    if component_of(family) == "unet":
        block = dict(list(plain["lora"].layers.items())[:10])
        conv = "down_blocks.1.resnets.0.conv1"
        shape = model.get_submodule(conv).weight.shape
        for kind in ("lora-tucker", "loha-tucker", "lokr-tucker", "lokr-whole", "full-flat"):
            layers = {LayerPath(None, conv): conv_layer(kind, shape, generator)}
            found[f"convolution, {kind}"] = Adapter(table, block | layers)
        norms = {
            LayerPath(None, name): Layer(
                "full", {"diff": torch.ones(width), "diff_b": torch.ones(width)}
            )
            for name in ("conv_norm_out", "down_blocks.1.attentions.0.transformer_blocks.0.norm2")
            for width in model.get_submodule(name).weight.shape
        }
        found["norms"] = Adapter(table, block | norms)
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
    model = copy.deepcopy(model)
    parameters = inspect.signature(model.pipeline_class).parameters.values()
    components = {p.name: None for p in parameters if p.default is p.empty}
    pipeline = model.pipeline_class(**components | {component_of(family): model})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # some keys do not match a module
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name, local_files_only=True)
    return model


def load_in_diffusers_transformer(family, model, path):
    model = copy.deepcopy(model)
    model.load_lora_adapter(load_file(path), prefix=component_of(family))
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
    uses the former only for `isinstance`, with the base classes of the sources, and the latter only
    to move tensors.
    """
    before = set(sys.modules)
    model_base = ModuleType("comfy.model_base")
    source = ast.parse((folder / "comfy" / "model_base.py").read_text())
    for node in source.body:
        if isinstance(node, ast.ClassDef):
            names = [base.id for base in node.bases if isinstance(base, ast.Name)]
            bases = tuple(vars(model_base)[name] for name in names if hasattr(model_base, name))
            setattr(model_base, node.name, type(node.name, bases, {}))
    management = ModuleType("comfy.model_management")
    management.cast_to_device = lambda tensor, device, dtype, copy=False: tensor.to(
        device, dtype, copy=copy
    )
    buffers = ModuleType("comfy.memory_management")  # not used by the loader
    sys.path.insert(0, str(folder))
    try:
        package = importlib.import_module("comfy")
        for stub in (model_base, management, buffers):
            sys.modules[stub.__name__] = stub
            setattr(package, stub.__name__.rpartition(".")[2], stub)
        yield SimpleNamespace(
            version=re.search(r"\d[\d.]*", (folder / "comfyui_version.py").read_text())[0],
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
    """Return the weights of a model in their original form, by original names.

    Each comes with the names of its parts in diffusers, and with True if its halves are swapped.
    """
    table = table_of(family)
    weights = dict(model.named_parameters())
    parts_of = {fused.whole: [part for part, _ in fused.parts] for fused in table.fused}
    found = {}
    for theirs, ours in table.rows:
        for number in (0, 1):
            modules = [part.format(number) for part in parts_of.get(ours, [ours])]
            for kind in (".weight", ".bias", ""):
                names = [f"{module}{kind}" for module in modules]
                if all(name in weights for name in names):
                    whole = torch.cat([weights[name].detach() for name in names]).clone()
                    is_swapped = ours in table.swapped_halves and _has_two_outputs(
                        weights[f"{modules[0]}.weight"]
                    )
                    whole = _swap(whole) if is_swapped else whole
                    found[f"{theirs.format(number)}{kind}"] = (whole, names, is_swapped)
    return found


def _has_two_outputs(weight):
    return weight.shape[0] == 2 * weight.shape[1]


def _swap(tensor):
    return torch.cat(tensor.chunk(2)[::-1])


COMFYUI_CLASSES = {"wan": "WAN21", "z_image": "Lumina2", "sd15": "BaseModel", "sdxl": "SDXL"}
"""Key table -> ComfyUI's class of the model, if it is not the name of diffusers' class."""


def comfyui_class(comfy, name):
    """Return ComfyUI's class of a model, or None if this version of ComfyUI does not know it."""
    class_name = planner_shapes(family_of(name)).class_name.partition("Transformer")[0]
    return getattr(comfy.model_base, COMFYUI_CLASSES.get(table_of(name).family, class_name), None)


def comfyui_config(config):
    """Return the settings that ComfyUI's loader reads, from those of a diffusers transformer."""
    if "block_out_channels" in config:
        return comfyui_unet_config(config)
    if "dim" in config:  # Z-Image
        return {name: config[name] for name in ("dim", "n_layers", "n_refiner_layers")}
    return {
        "hidden_size": config.num_attention_heads * config.attention_head_dim,
        "depth": config.num_layers,
        "depth_single_blocks": config.get("num_single_layers", 0),
        "layers": config.num_layers,  # Krea 2
    }


def comfyui_unet_config(config):
    """Return the settings of a U-Net: the transformer blocks of each layer, in both directions."""
    levels = len(config.block_out_channels)
    depths = config.transformer_layers_per_block
    depths = [depths] * levels if isinstance(depths, int) else list(depths)
    down = [
        depth if "CrossAttn" in kind else 0
        for depth, kind in zip(depths, config.down_block_types, strict=True)
    ]
    return {
        "num_res_blocks": [2] * levels,
        "channel_mult": [
            width // config.block_out_channels[0] for width in config.block_out_channels
        ],
        "transformer_depth": [depth for depth in down for _ in range(2)],
        "transformer_depth_output": [depth for depth in down for _ in range(3)],
        "transformer_depth_middle": depths[-1],
    }


@torch.no_grad()
def load_in_comfyui(comfy, family, model, path):
    """Patch the weights as ComfyUI does, and return a diffusers model with the patched weights."""
    originals = original_weights(family, model)
    comfy_model = comfyui_class(comfy, family)()
    state = {f"diffusion_model.{key}": weight for key, (weight, *_) in originals.items()}
    comfy_model.state_dict = lambda: state
    comfy_model.model_config = SimpleNamespace(unet_config=comfyui_config(model.config))
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
    for key, (weight, names, is_swapped) in originals.items():
        full = f"diffusion_model.{key}"
        changed = comfy.lora.calculate_weight(by_weight.get(full, []), weight.clone(), full)
        changed = _swap(changed) if is_swapped else changed
        for name, part in zip(
            names, changed.split([len(parameters[n]) for n in names]), strict=True
        ):
            parameters[name].copy_(part)
    return model
