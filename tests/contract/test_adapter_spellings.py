"""Adapter files with the spellings of public hubs have their known effect, or are refused by name.

A file is written in a usual format and its keys are then changed to literal spellings. The output
of a tiny transformer with the file must be that of the adapter's formulas.
"""

import copy
import json
import re

import pytest
import torch
from adapter_examples import TABLES, make_lora, map_tensors
from adapter_tools import (
    MAX_ERROR,
    WIDTH,
    Effect,
    build_transformer,
    load_in_diffusers,
    make_adapter,
    merge,
    table_of,
)
from safetensors.torch import load_file, save_file

from gracetune.adapters.files.io import find_stage, read_adapter, write_adapter
from gracetune.adapters.files.keys import LayerPath
from gracetune.adapters.files.layers import Adapter, Layer
from gracetune.cli.main import main
from gracetune.errors import AdapterError

FAMILIES = ("wan", "flux", "qwen_image")


def replace_start(old, new):
    return lambda key: re.sub(f"^{re.escape(old)}", new, key)


def replace_all(*pairs):
    def change(key):
        for old, new in pairs:
            key = re.sub(old, new, key)
        return key

    return change


SPELLINGS = {
    "fal": ("comfyui", replace_start("diffusion_model.", "base_model.model."), None),
    "full checkpoint": (
        "comfyui",
        replace_start("diffusion_model.", "model.diffusion_model."),
        None,
    ),
    "full checkpoint, down and up": (
        "lightning",
        replace_start("diffusion_model.", "model.diffusion_model."),
        None,
    ),
    "DDP": ("bare", replace_start("", "module."), None),
    "compiled": ("diffusers", replace_start("transformer.", "transformer._orig_mod."), None),
    "compiled blocks": (
        "diffusers",
        replace_all((r"blocks\.(\d+)\.", r"blocks.\1._orig_mod.")),
        None,
    ),
    "compiled, underscored": ("kohya", replace_start("lora_unet_", "lora_unet__orig_mod_"), None),
    "FSDP": (
        "bare",
        replace_all((r"blocks\.(\d+)\.", r"blocks.\1._fsdp_wrapped_module.")),
        None,
    ),
    "DiffSynth pipe.dit": ("bare-original", replace_start("", "pipe.dit."), None),
    "original names after transformer.": (
        "comfyui",
        replace_start("diffusion_model.", "transformer."),
        None,
    ),
    "peft around a wrapper": (
        "diffusers",
        replace_start("transformer.", "base_model.model.transformer."),
        None,
    ),
    "unet. before peft's prefix": (
        "diffusers",
        replace_start("transformer.", "unet.base_model.model."),
        None,
    ),
    "another adapter name": (
        "peft-live",
        replace_all((r"\.default\.", ".my-style_0.")),
        None,
    ),
    "suffixes of old diffusers": (
        "diffusers",
        replace_all((r"\.lora_A\.", ".lora.down."), (r"\.lora_B\.", ".lora.up.")),
        None,
    ),
    "suffixes without .weight": (
        "kohya",
        replace_all((r"\.(lora_\w+)\.weight$", r".\1")),
        None,
    ),
    "lora_unet_ before diffusers' names": ("kohya-diffusers", lambda key: key, None),
    "lora_transformer_ before original names": (
        "kohya",
        replace_start("lora_unet_", "lora_transformer_"),
        None,
    ),
    "lora_unet with dots": ("comfyui", replace_start("diffusion_model.", "lora_unet."), None),
    "transformer_1.": ("bare", replace_start("", "transformer_1."), "high"),
    "transformer_1. before original names": (
        "comfyui",
        replace_start("diffusion_model.", "transformer_1."),
        "high",
    ),
    "transformer_2. before original names": (
        "comfyui",
        replace_start("diffusion_model.", "transformer_2."),
        "low",
    ),
    "lora_transformer1_": ("lycoris", replace_start("lycoris_", "lora_transformer1_"), "high"),
    "lora_transformer2_": ("lycoris", replace_start("lycoris_", "lora_transformer2_"), "low"),
    "transformer1_": ("lycoris", replace_start("lycoris_", "transformer1_"), "high"),
    "transformer2_": ("lycoris", replace_start("lycoris_", "transformer2_"), "low"),
    "transformer1_ before original names": (
        "kohya",
        replace_start("lora_unet_", "transformer1_"),
        "high",
    ),
    "lycoris_transformer1_": (
        "lycoris",
        replace_start("lycoris_", "lycoris_transformer1_"),
        "high",
    ),
    "lora_transformer1_ before original names": (
        "kohya",
        replace_start("lora_unet_", "lora_transformer1_"),
        "high",
    ),
    "high_noise_model.": ("bare-original", replace_start("", "high_noise_model."), "high"),
}
"""By name: the format to start from, the change of each key, and the expert that the keys name."""
CASES = [
    (name, family)
    for name, (_, _, stage) in SPELLINGS.items()
    for family in (FAMILIES if stage is None else ("wan",))
]


@pytest.fixture(scope="module")
def transformers():
    return {family: build_transformer(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def effects(transformers):
    """Return the adapter of a family, with an alpha that is not its rank, and its known effect."""
    found = {}
    for family, model in transformers.items():
        adapter = make_adapter(family, "lora", model, alpha=3.0)
        found[family] = (adapter, Effect(family, model, adapter))
    return found


def write_spelling(path, adapter, form, change, extra=None):
    source = write_adapter(
        path.with_name("usual" if form.startswith("peft") else "usual.safetensors"), adapter, form
    )
    tensors = {change(key): tensor for key, tensor in load_file(source).items()}
    save_file(tensors | (extra or {}), path)
    return path


def run_cli(capsys, *args):
    code = main(["adapter", *map(str, args), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("spelling", "family"), CASES)
def test_a_spelling_has_the_effect_of_the_adapter(
    spelling, family, effects, transformers, tmp_path, capsys
):
    form, change, stage = SPELLINGS[spelling]
    adapter, effect = effects[family]
    model = transformers[family]
    path = write_spelling(tmp_path / "wild.safetensors", adapter, form, change)
    found = read_adapter(path, TABLES)
    assert found.table.family == family
    assert found.stages == (stage,)
    assert effect.error(lambda: merge(copy.deepcopy(model), found)) <= MAX_ERROR

    code, described = run_cli(capsys, "inspect", path)
    assert (code, described["num_modules"]) == (0, len(found.layers))
    out = tmp_path / "out.safetensors"
    code, result = run_cli(capsys, "convert", path, "--to", "diffusers", "-o", out)
    assert (code, result["files"]) == (0, [str(out)])
    assert effect.error(lambda: load_in_diffusers(family, model, out)) <= MAX_ERROR
    _, (report,) = run_cli(capsys, "check", path)
    assert "message" not in report
    code, (report,) = run_cli(capsys, "check", out, "--for", "diffusers")
    assert code == 0, report

    weights = tmp_path / "model.safetensors"
    merged = tmp_path / "merged.safetensors"
    save_file({name: t.float() for name, t in model.state_dict().items()}, weights)
    code, _ = run_cli(capsys, "merge", path, "--into", weights, "-o", merged)
    assert code == 0

    def load_merged():
        copied = copy.deepcopy(model)
        copied.load_state_dict(load_file(merged))
        return copied

    assert effect.error(load_merged) <= MAX_ERROR


OTHER_KINDS = {
    "compiled": ("lycoris", replace_start("lycoris_", "lycoris__orig_mod_")),
    "OneTrainer": ("lycoris", replace_start("lycoris_", "lora_transformer_")),
    "kohya": ("lycoris", replace_start("lycoris_", "lora_unet_")),
    "full checkpoint": (
        "simpletuner-comfyui",
        replace_start("diffusion_model.", "model.diffusion_model."),
    ),
    "OneTrainer, dotted": (
        "simpletuner-comfyui",
        replace_start("diffusion_model.", "transformer."),
    ),
}
ONLY_IN = {"dora": "lycoris", "full": "simpletuner-comfyui"}
"""Format that can hold an algorithm; the others are held by both."""


@pytest.mark.parametrize(
    ("kind", "spelling"),
    [
        (kind, spelling)
        for kind in ("dora", "loha", "lokr", "lokr-whole", "lokr-both", "full")
        for spelling, (form, _) in OTHER_KINDS.items()
        if ONLY_IN.get(kind, form) == form
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_algorithms_have_their_effect(family, kind, spelling, transformers, tmp_path):
    form, change = OTHER_KINDS[spelling]
    model = transformers[family]
    adapter = make_adapter(family, kind, model, alpha=3.0)
    effect = Effect(family, model, adapter)
    path = write_spelling(tmp_path / "wild.safetensors", adapter, form, change)
    found = read_adapter(path, TABLES)
    assert found.table.family == family
    assert effect.error(lambda: merge(copy.deepcopy(model), found)) <= MAX_ERROR


TEXT_ENCODER_KEYS = {
    "kohya": "lora_te1_text_model_encoder_layers_0_mlp_fc1",
    "kohya, second encoder": "lora_te2_text_model_encoder_layers_0_self_attn_q_proj",
    "kohya, one encoder": "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
    "OneTrainer, T5": "lora_te3_encoder_block_0_layer_0_SelfAttention_q",
    "diffusers": "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
    "diffusers, second encoder": "text_encoder_2.text_model.encoder.layers.0.self_attn.q_proj",
    "ComfyUI": "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1",
}


@pytest.mark.parametrize("module", TEXT_ENCODER_KEYS.values(), ids=TEXT_ENCODER_KEYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_text_encoders_are_left_out_with_one_line(
    family, module, effects, transformers, tmp_path, capsys
):
    adapter, effect = effects[family]
    extra = {
        f"{module}.lora_down.weight": torch.ones(4, 8),
        f"{module}.lora_up.weight": torch.ones(8, 4),
        f"{module}.alpha": torch.tensor(4.0),
    }
    path = write_spelling(tmp_path / "a.safetensors", adapter, "kohya", lambda key: key, extra)
    out = tmp_path / "out.safetensors"
    known = ("--family", family)
    code, result = run_cli(capsys, "convert", path, "--to", "diffusers", "-o", out, *known)
    assert code == 0
    (notice,) = result["notices"]
    assert notice.startswith("3 keys of text encoders are left out")
    assert effect.error(lambda: load_in_diffusers(family, transformers[family], out)) <= MAX_ERROR
    _, described = run_cli(capsys, "inspect", path, *known)
    assert described["notices"] == [notice]
    _, (report,) = run_cli(capsys, "check", path, *known)
    first, *others = report["notices"]
    assert first == notice
    assert ["fused projections are counted" in other for other in others] == (
        [True] if family == "flux" else []  # kohya's Flux files have fused projections
    )
    comfyui = next(target for target in report["targets"] if target["tool"] == "comfyui")
    assert comfyui["loads"]
    code, result = run_cli(capsys, "merge", path, path, "-o", tmp_path / "sum.safetensors", *known)
    assert result["notices"] == [notice, notice]


def lora_pair(rows, columns, generator):
    layer = map_tensors(make_lora(rows, columns, generator), lambda t: t * 0.25)
    return layer.tensors["down"], layer.tensors["up"]


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_xlabs_files_have_their_effect(prefix, transformers, tmp_path):
    """XLabs trains the attention processors: in single blocks, only q, k and v of linear1."""
    generator = torch.Generator().manual_seed(6)
    double, single = "transformer_blocks.0", "single_transformer_blocks.0"
    parts = {
        "double_blocks.0.processor.qkv_lora1": [f"{double}.attn.to_{x}" for x in "qkv"],
        "double_blocks.0.processor.qkv_lora2": [f"{double}.attn.add_{x}_proj" for x in "qkv"],
        "double_blocks.0.processor.proj_lora1": [f"{double}.attn.to_out.0"],
        "double_blocks.0.processor.proj_lora2": [f"{double}.attn.to_add_out"],
        "single_blocks.0.processor.qkv_lora": [f"{single}.attn.to_{x}" for x in "qkv"],
        "single_blocks.0.processor.proj_lora": [f"{single}.proj_out"],
    }
    tensors, layers = {}, {}
    for name, modules in parts.items():
        columns = 5 * WIDTH if modules[0].endswith("proj_out") else WIDTH
        down, up = lora_pair(len(modules) * WIDTH, columns, generator)
        tensors |= {f"{prefix}{name}.down.weight": down, f"{prefix}{name}.up.weight": up}
        for module, rows in zip(modules, up.split(WIDTH), strict=True):
            layers[LayerPath(None, module)] = Layer("lora", {"down": down, "up": rows})
    path = tmp_path / "xlabs.safetensors"
    save_file(tensors, path)
    model = transformers["flux"]
    effect = Effect("flux", model, Adapter(table_of("flux"), layers))
    found = read_adapter(path, TABLES)
    assert effect.error(lambda: merge(copy.deepcopy(model), found)) <= MAX_ERROR
    for form in ("diffusers", "comfyui", "kohya"):
        out = write_adapter(tmp_path / f"{form}.safetensors", found, form)
        back = read_adapter(out, TABLES)
        assert effect.error(lambda back=back: merge(copy.deepcopy(model), back)) <= MAX_ERROR
    out = tmp_path / "diffusers.safetensors"
    assert effect.error(lambda: load_in_diffusers("flux", model, out)) <= MAX_ERROR


def test_lightx2v_changes_of_modulations_are_read(effects, transformers, tmp_path):
    adapter, _ = effects["wan"]
    model = transformers["wan"]
    generator = torch.Generator().manual_seed(7)
    block = torch.randn(1, 6, WIDTH, generator=generator)
    head = torch.randn(1, 2, WIDTH, generator=generator)
    extra = {"diffusion_model.blocks.1.diff_m": block, "diffusion_model.head.diff_m": head}
    path = write_spelling(tmp_path / "a.safetensors", adapter, "comfyui", lambda key: key, extra)
    known = {
        LayerPath(None, "blocks.1.scale_shift_table"): Layer("full", {"diff": block}),
        LayerPath(None, "scale_shift_table"): Layer("full", {"diff": head}),
    }
    effect = Effect("wan", model, Adapter(adapter.table, {**adapter.layers, **known}))
    found = read_adapter(path, TABLES)
    assert effect.error(lambda: merge(copy.deepcopy(model), found)) <= MAX_ERROR


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("form", ["kohya", "comfyui"])
@pytest.mark.parametrize("kind", ["lora", "lokr", "loha"])
def test_rounded_weights_have_their_own_effect(kind, form, dtype, transformers, tmp_path):
    """The effect is that of the rounded weights; fp8 is widened to bfloat16, which is exact."""
    model = transformers["flux"]
    adapter = make_adapter("flux", kind, model)
    rounded = {p: map_tensors(x, lambda t: t.to(dtype).float()) for p, x in adapter.layers.items()}
    rounded = Adapter(
        adapter.table,
        {p: x for p, x in rounded.items() if "to_out" in p.module or "ff" in p.module},
    )
    effect = Effect("flux", model, rounded)
    source = write_adapter(tmp_path / "usual.safetensors", rounded, form)
    tensors = {k: t if k.endswith("alpha") else t.to(dtype) for k, t in load_file(source).items()}
    path = tmp_path / "small.safetensors"
    save_file(tensors, path)
    found = read_adapter(path, TABLES, adapter.table)
    assert effect.error(lambda: merge(copy.deepcopy(model), found)) <= MAX_ERROR
    assert len(found.notices) == (dtype.itemsize == 1)


def test_a_fused_fp8_projection_is_split(transformers, tmp_path):
    generator = torch.Generator().manual_seed(8)
    down, up = (t.to(torch.float8_e4m3fn) for t in lora_pair(3 * WIDTH, WIDTH, generator))
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    path = tmp_path / "small.safetensors"
    save_file({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}, path)
    layers = {
        LayerPath(None, f"transformer_blocks.0.attn.to_{x}"): Layer(
            "lora", {"down": down.float(), "up": rows}
        )
        for x, rows in zip("qkv", up.float().split(WIDTH), strict=True)
    }
    model = transformers["flux"]
    effect = Effect("flux", model, Adapter(table_of("flux"), layers))
    out = tmp_path / "out.safetensors"
    assert main(["adapter", "convert", str(path), "--to", "diffusers", "-o", str(out)]) == 0
    found = read_adapter(out, TABLES, table_of("flux"))
    assert effect.error(lambda: merge(copy.deepcopy(model), found)) <= MAX_ERROR


REFUSED = {
    "VACE": ("wan", "diffusion_model.vace_blocks.0.self_attn.q.lora_A.weight", "vace_blocks"),
    "VACE, kohya": ("wan", "lora_unet_vace_blocks_0_self_attn_q.lora_down.weight", "vace_blocks"),
    "Wan-Animate": (
        "wan",
        "diffusion_model.face_adapter.fuser_blocks.0.linear1_kv.lora_A.weight",
        "Wan-Animate",
    ),
    "OFT": ("flux", "lora_unet_double_blocks_0_img_attn_proj.oft_blocks", "OFT"),
    "OFT of peft": ("flux", "transformer.transformer_blocks.0.attn.to_q.oft_R.weight", "OFT"),
    "IA3": ("flux", "lora_unet_double_blocks_0_img_attn_proj.on_input", "IA3"),
    "GLoRA": ("flux", "lora_unet_double_blocks_0_img_attn_proj.a1.weight", "GLoRA"),
    "control LoRA": ("flux", "double_blocks.0.img_attn.norm.query_norm.scale", "control LoRA"),
    "IP-Adapter": (
        "flux",
        "double_blocks.0.processor.ip_adapter_double_stream_k_proj.weight",
        "IP-Adapter",
    ),
    "replaced weight": ("qwen_image", "diffusion_model.img_in.set_weight", "replaces a weight"),
    "scaled fp8": (
        "flux",
        "diffusion_model.double_blocks.0.img_attn.proj.lora_A.scale_weight",
        "Dequantize",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_by_name_with_the_reason(case, effects, tmp_path, capsys):
    family, key, reason = REFUSED[case]
    path = write_spelling(
        tmp_path / "a.safetensors",
        effects[family][0],
        "comfyui",
        lambda key: key,
        {key: torch.ones(4, 4)},
    )
    with pytest.raises(AdapterError, match=reason) as caught:
        read_adapter(path, TABLES)
    assert (caught.value.kind, caught.value.key) == ("unsupported", key)
    out = tmp_path / "out.safetensors"
    code, result = run_cli(capsys, "convert", path, "--to", "diffusers", "-o", out)
    assert code != 0
    assert reason in result["message"]


def test_an_expert_in_some_keys_alone_is_refused(effects, tmp_path):
    adapter, _ = effects["wan"]
    extra = {"transformer_1.proj_out.lora_A.weight": torch.ones(4, WIDTH)}
    extra["transformer_1.proj_out.lora_B.weight"] = torch.ones(16, 4)
    path = write_spelling(tmp_path / "a.safetensors", adapter, "diffusers", lambda key: key, extra)
    with pytest.raises(AdapterError, match="expert is not known") as caught:
        read_adapter(path, TABLES)
    assert caught.value.kind == "mixed-stages"


@pytest.mark.parametrize("prefix", ["transformer_1.", "transformer_2.", "high_noise_model."])
def test_a_model_with_one_transformer_has_no_experts(prefix, effects, tmp_path):
    adapter, _ = effects["flux"]
    change = replace_start("transformer.", prefix)
    path = write_spelling(tmp_path / "a.safetensors", adapter, "diffusers", change)
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, TABLES)
    assert caught.value.kind == "unknown-key"


@pytest.mark.parametrize(
    ("name", "stage"),
    [("mine-HighNoise", "high"), ("wan_low-noise_v2", "low"), ("high noise or low noise", None)],
)
def test_the_expert_is_found_in_names_of_other_tools(name, stage, effects, tmp_path):
    path = write_adapter(tmp_path / f"{name}.safetensors", effects["wan"][0], "comfyui")
    assert find_stage(read_adapter(path, TABLES), path)[0] == stage


def test_both_experts_with_original_names_are_told_apart(effects, transformers, tmp_path):
    model = transformers["wan"]
    high = effects["wan"][0]
    low = make_adapter("wan", "lora", model, alpha=5.0)
    low = Adapter(low.table, {p: map_tensors(x, lambda t: t * 0.5) for p, x in low.layers.items()})
    tensors = {}
    for start, adapter in (("transformer.", high), ("transformer_2.", low)):
        source = write_adapter(tmp_path / f"{start}safetensors", adapter, "comfyui")
        change = replace_start("diffusion_model.", start)
        tensors |= {change(key): tensor for key, tensor in load_file(source).items()}
    save_file(tensors, tmp_path / "both.safetensors")
    found = read_adapter(tmp_path / "both.safetensors", TABLES)
    assert found.stages == ("high", "low")
    for stage, adapter in (("high", high), ("low", low)):
        effect = Effect("wan", model, adapter)
        part = found.select_stage(stage)
        assert effect.error(lambda part=part: merge(copy.deepcopy(model), part)) <= MAX_ERROR
