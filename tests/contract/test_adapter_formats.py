"""Adapter files of every tool are read, and written in every other format.

The keys are literal: they are what the tools write, independent of our tables.
"""

from dataclasses import replace

import pytest
import torch
from adapter_examples import RANK, TABLES, WAN, same, shape_of
from safetensors.torch import save_file

from gracetune.adapters.files.formats import FORMATS
from gracetune.adapters.files.io import read_adapter, write_adapter, write_stages
from gracetune.adapters.files.keys import LayerPath, get_format
from gracetune.adapters.files.layers import delta, with_stage
from gracetune.errors import AdapterError

MODULES = (
    "blocks.0.attn1.to_q",
    "blocks.0.attn1.to_out.0",
    "blocks.0.attn2.to_k",
    "blocks.0.ffn.net.0.proj",
    "blocks.0.ffn.net.2",
)
DIFFUSERS = tuple(f"{name}." for name in MODULES)
ORIGINAL = (
    "blocks.0.self_attn.q.",
    "blocks.0.self_attn.o.",
    "blocks.0.cross_attn.k.",
    "blocks.0.ffn.0.",
    "blocks.0.ffn.2.",
)
KOHYA = (
    "lora_unet_blocks_0_self_attn_q.",
    "lora_unet_blocks_0_self_attn_o.",
    "lora_unet_blocks_0_cross_attn_k.",
    "lora_unet_blocks_0_ffn_0.",
    "lora_unet_blocks_0_ffn_2.",
)
LYCORIS = (
    "lycoris_blocks_0_attn1_to_q.",
    "lycoris_blocks_0_attn1_to_out_0.",
    "lycoris_blocks_0_attn2_to_k.",
    "lycoris_blocks_0_ffn_net_0_proj.",
    "lycoris_blocks_0_ffn_net_2.",
)
OLD_LOKR = (
    "lycoris_blocks_0_self_attn_q.",
    "lycoris_blocks_0_self_attn_to_out_0.",
    "lycoris_blocks_0_cross_attn_k.",
    "lycoris_blocks_0_ffn_net_0_proj.",
    "lycoris_blocks_0_ffn_net_2.",
)
AB, AB_DEFAULT = (
    ("lora_A.weight", "lora_B.weight"),
    ("lora_A.default.weight", "lora_B.default.weight"),
)
DOWN_UP = ("lora_down.weight", "lora_up.weight")
HADA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
LOKR, LOKR_THIN = ("lokr_w1", "lokr_w2"), ("lokr_w1", "lokr_w2_a", "lokr_w2_b")
LOKR_BOTH = ("lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b")


def keys_with_prefix(prefix, names):
    return tuple(f"{prefix}{name}" for name in names)


ROWS = {
    "diffusers, save_lora_weights": (
        "diffusers",
        keys_with_prefix("transformer.", DIFFUSERS),
        AB,
        None,
    ),
    "raw peft": ("peft-live", keys_with_prefix("base_model.model.", DIFFUSERS), AB_DEFAULT, None),
    "peft, save_pretrained": ("peft", keys_with_prefix("base_model.model.", DIFFUSERS), AB, None),
    "ai-toolkit LoRA in memory, high": (
        "ai-toolkit-live",
        tuple(f"transformer$$transformer_1$${name[:-1].replace('.', '$$')}." for name in DIFFUSERS),
        DOWN_UP,
        "high",
    ),
    "ai-toolkit LoRA in memory, low": (
        "ai-toolkit-live",
        tuple(f"transformer$$transformer_2$${name[:-1].replace('.', '$$')}." for name in DIFFUSERS),
        DOWN_UP,
        "low",
    ),
    "ai-toolkit LoRA, a stage's file": (
        "comfyui",
        keys_with_prefix("diffusion_model.", ORIGINAL),
        AB,
        None,
    ),
    "ai-toolkit LoRA, combined, high": (
        "ai-toolkit-combined",
        keys_with_prefix("diffusion_model.transformer_1.", ORIGINAL),
        AB,
        "high",
    ),
    "ai-toolkit LoRA, combined, low": (
        "ai-toolkit-combined",
        keys_with_prefix("diffusion_model.transformer_2.", ORIGINAL),
        AB,
        "low",
    ),
    "ai-toolkit LoKr, new": ("comfyui", keys_with_prefix("diffusion_model.", ORIGINAL), LOKR, None),
    "ai-toolkit LoKr, old, in memory": (
        "ai-toolkit-old-live",
        tuple(
            f"lora_transformer_transformer_1_{name[:-1].replace('.', '_')}." for name in DIFFUSERS
        ),
        LOKR,
        "high",
    ),
    "ai-toolkit LoKr, old, saved": (
        "ai-toolkit-old-lokr-combined",
        tuple(name.replace("lycoris_", "lycoris_transformer_1_") for name in OLD_LOKR),
        LOKR,
        "high",
    ),
    "ai-toolkit fork's LoKr": (
        "lycoris-original",
        tuple(name.replace("lora_unet_", "lycoris_") for name in KOHYA),
        LOKR,
        None,
    ),
    "ai-toolkit fork's LoKr, names half replaced": ("ai-toolkit-old-lokr", OLD_LOKR, LOKR, None),
    "musubi LoRA": ("kohya", KOHYA, DOWN_UP, None),
    "musubi LoHa": ("kohya", KOHYA, HADA, None),
    "musubi LoKr": ("kohya", KOHYA, LOKR, None),
    "musubi LoKr, decomposed": ("kohya", KOHYA, LOKR_THIN, None),
    "diffusion-pipe LoRA": ("comfyui", keys_with_prefix("diffusion_model.", ORIGINAL), AB, None),
    "diffusion-pipe LoKr": (
        "comfyui",
        keys_with_prefix("diffusion_model.", ORIGINAL),
        LOKR_THIN,
        None,
    ),
    "SimpleTuner LoRA": ("diffusers", keys_with_prefix("transformer.", DIFFUSERS), AB, None),
    "SimpleTuner LoRA for ComfyUI": (
        "simpletuner-comfyui",
        keys_with_prefix("diffusion_model.", DIFFUSERS),
        AB,
        None,
    ),
    "SimpleTuner LyCORIS LoCon": ("lycoris", LYCORIS, DOWN_UP, None),
    "SimpleTuner LyCORIS LoHa": ("lycoris", LYCORIS, HADA, None),
    "SimpleTuner LyCORIS LoKr": ("lycoris", LYCORIS, LOKR_THIN, None),
    "musubi LoKr, both decomposed": ("kohya", KOHYA, LOKR_BOTH, None),
    "LyCORIS on a dual wrapper": (
        "lycoris-combined",
        tuple(name.replace("lycoris_", "lycoris_transformer_2_") for name in LYCORIS),
        LOKR,
        "low",
    ),
    "Wan-Fun": (
        "wan-fun",
        tuple(name.replace("lora_unet_", "lora_unet__") for name in KOHYA),
        DOWN_UP,
        None,
    ),
    "Lightning": ("lightning", keys_with_prefix("diffusion_model.", ORIGINAL), DOWN_UP, None),
    "no prefix": ("bare", DIFFUSERS, AB, None),
    "transformer_2.": ("diffusers-both", keys_with_prefix("transformer_2.", DIFFUSERS), AB, "low"),
    "DiffSynth": ("diffsynth", ORIGINAL, AB_DEFAULT, None),
}
"""By name: the expected format, the module part of each key, the suffixes, the expert."""
WITH_ALPHA = {"kohya", "wan-fun", "lycoris", "lycoris-combined", "simpletuner-comfyui"}


def sizes(ending, out, into, rank=RANK):
    return {
        "lora_A": (rank, into),
        "lora_down": (rank, into),
        "lora_B": (out, rank),
        "lora_up": (out, rank),
        "hada_w1_a": (out, rank),
        "hada_w2_a": (out, rank),
        "hada_w1_b": (rank, into),
        "hada_w2_b": (rank, into),
        "lokr_w1": (4, 4),
        "lokr_w2": (out // 4, into // 4),
        "lokr_w1_a": (4, 2),
        "lokr_w1_b": (2, 4),
        "lokr_w2_a": (out // 4, 2),
        "lokr_w2_b": (2, into // 4),
    }[ending.split(".")[0]]


def tensors_of(row, alpha=2.0):
    form, prefixes, endings, _ = ROWS[row]
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for module, prefix in zip(MODULES, prefixes, strict=True):
        for ending in endings:
            shape = sizes(ending, *shape_of(module))
            tensors[prefix + ending] = torch.randn(shape, generator=generator)
        if form in WITH_ALPHA:
            tensors[f"{prefix}alpha"] = torch.tensor(alpha)
    return tensors


def file_name(form):
    return "out" if form == "peft" else "out.safetensors"  # peft's is a folder


@pytest.fixture
def file_of(tmp_path):
    def write(row):
        path = tmp_path / "adapter.safetensors"
        save_file(tensors_of(row), path)
        return path

    return write


@pytest.mark.parametrize("row", ROWS)
def test_files_of_every_tool_are_read(row, file_of):
    form, _, _, stage = ROWS[row]
    adapter = read_adapter(file_of(row), TABLES)
    assert adapter.format == form
    assert adapter.table.family == "wan"
    assert set(adapter.layers) == {LayerPath(stage, module) for module in MODULES}


@pytest.mark.parametrize("form", [form.name for form in FORMATS])
@pytest.mark.parametrize("row", ROWS)
def test_an_adapter_written_in_any_format_reads_back_the_same(row, form, file_of, tmp_path):
    adapter = read_adapter(file_of(row), TABLES)
    wanted = get_format(form)
    # `transformer.` alone names no expert, so that format is written for the low one.
    stage = "low" if form == "diffusers-both" else adapter.stages[0] or "high"
    given = with_stage(adapter, stage if wanted.stages else None)
    path = write_adapter(tmp_path / file_name(form), given, wanted)
    back = read_adapter(path, TABLES)
    assert set(back.layers) == set(given.layers)
    # Where alpha is folded in, the factors are others but dW is the same; else every bit is kept.
    if wanted.alpha == "folded" or ROWS[row][2] in (HADA, LOKR_THIN, LOKR_BOTH):
        for place, layer in given.layers.items():
            torch.testing.assert_close(delta(back.layers[place]), delta(layer))
    else:
        assert same(replace(given, format=None), back)


@pytest.mark.parametrize("row", ROWS)
def test_keys_written_in_a_tools_format_are_the_tools_keys(row, file_of, tmp_path):
    form, _, _, _ = ROWS[row]
    original = tensors_of(row)
    path = write_adapter(tmp_path / file_name(form), read_adapter(file_of(row), TABLES), form)
    from gracetune.adapters.files.io import read_tensors

    written = set(read_tensors(path)[0])
    alphas = {key for key in written if key.endswith(".alpha")}
    assert written - alphas == {key for key in original if not key.endswith(".alpha")}
    if form in WITH_ALPHA:
        assert alphas == {key for key in original if key.endswith(".alpha")}


@pytest.mark.parametrize("kind", ["LoRA", "LoKr"])
def test_a_combined_file_is_split_and_joined_again(kind, tmp_path):
    endings = AB if kind == "LoRA" else LOKR
    tensors = {}
    for number in (1, 2):
        generator = torch.Generator().manual_seed(number)
        for module, name in zip(MODULES, ORIGINAL, strict=True):
            for ending in endings:
                shape = sizes(ending, *shape_of(module))
                key = f"diffusion_model.transformer_{number}.{name}{ending}"
                tensors[key] = torch.randn(shape, generator=generator)
    path = tmp_path / "both.safetensors"
    save_file(tensors, path)
    both = read_adapter(path, TABLES)
    assert both.stages == ("high", "low")

    files = write_stages(tmp_path / "run.safetensors", both, "comfyui")
    assert [file.name for file in files] == [
        "run_high_noise.safetensors",
        "run_low_noise.safetensors",
    ]
    from gracetune.adapters.files.layers import join_stages

    high, low = (read_adapter(file, TABLES) for file in files)
    assert high.stages == low.stages == (None,)
    assert not any("transformer_" in str(key) for key in high.layers)
    assert high.metadata["gracetune.stage"] == "high"
    again = join_stages(high, low)
    assert same(both, again)
    back = write_adapter(tmp_path / "again.safetensors", again, "ai-toolkit-combined")
    assert same(both, read_adapter(back, TABLES))


def test_a_file_with_both_diffusers_prefixes_holds_both_experts(tmp_path):
    tensors = tensors_of("SimpleTuner LoRA") | tensors_of("transformer_2.")
    path = tmp_path / "both.safetensors"
    save_file(tensors, path)
    adapter = read_adapter(path, TABLES)
    assert adapter.stages == ("high", "low")
    assert adapter.format == "diffusers-both"


def test_two_experts_do_not_fit_a_format_for_one(tmp_path):
    tensors = tensors_of("ai-toolkit LoRA, combined, high")
    tensors |= tensors_of("ai-toolkit LoRA, combined, low")
    path = tmp_path / "both.safetensors"
    save_file(tensors, path)
    with pytest.raises(AdapterError, match="for both experts") as caught:
        write_adapter(tmp_path / "out.safetensors", read_adapter(path, TABLES), "comfyui")
    assert caught.value.kind == "mixed-stages"


def test_lightning_files_with_full_matrices_are_read(tmp_path):
    tensors = tensors_of("Lightning")
    tensors["diffusion_model.blocks.0.norm3.diff"] = torch.randn(24)
    tensors["diffusion_model.blocks.0.norm3.diff_b"] = torch.randn(24)
    tensors["diffusion_model.blocks.0.self_attn.q.diff_b"] = torch.randn(24)
    tensors["diffusion_model.blocks.0.modulation.diff"] = torch.randn(1, 6, 24)
    path = tmp_path / "lightning.safetensors"
    save_file(tensors, path)
    adapter = read_adapter(path, TABLES)
    assert adapter.format == "lightning"
    norm = adapter.layers[
        LayerPath(None, "blocks.0.norm2")
    ]  # the two namings count norms differently
    assert set(norm.tensors) == {"diff", "diff_b"}
    assert "diff_b" in adapter.layers[LayerPath(None, "blocks.0.attn1.to_q")].tensors
    assert LayerPath(None, "blocks.0.scale_shift_table") in adapter.layers
    for form in ("comfyui", "kohya", "lightning"):
        back = read_adapter(write_adapter(tmp_path / "out.safetensors", adapter, form), TABLES)
        assert same(adapter, back)
    with pytest.raises(AdapterError, match="cannot hold"):  # LyCORIS would ignore the biases
        write_adapter(tmp_path / "out.safetensors", adapter, "lycoris")


MODEL_ROWS = [
    ("blocks.0.attn1.to_q.weight", "blocks.0.self_attn.q.weight"),
    ("blocks.0.attn1.to_out.0.weight", "blocks.0.self_attn.o.weight"),
    ("blocks.0.attn2.to_k.weight", "blocks.0.cross_attn.k.weight"),
    ("blocks.0.attn2.add_k_proj.bias", "blocks.0.cross_attn.k_img.bias"),
    ("blocks.0.ffn.net.0.proj.weight", "blocks.0.ffn.0.weight"),
    ("blocks.0.ffn.net.2.bias", "blocks.0.ffn.2.bias"),
    ("blocks.0.norm2.weight", "blocks.0.norm3.weight"),
    ("blocks.0.scale_shift_table", "blocks.0.modulation"),
    ("condition_embedder.text_embedder.linear_1.weight", "text_embedding.0.weight"),
    ("condition_embedder.time_embedder.linear_2.weight", "time_embedding.2.weight"),
    ("condition_embedder.time_proj.weight", "time_projection.1.weight"),
    ("proj_out.weight", "head.head.weight"),
    ("scale_shift_table", "head.modulation"),
]


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "model.diffusion_model."])
@pytest.mark.parametrize(("ours", "theirs"), MODEL_ROWS)
def test_model_weights_are_found_in_both_namings(ours, theirs, prefix, tmp_path):
    from gracetune.adapters.files.merge_into_model import open_model

    found = []
    for key in (ours, prefix + theirs):
        path = tmp_path / "model.safetensors"
        save_file(
            {
                key: torch.zeros(4),
                "blocks.1.ffn.net.2.bias" if key == ours else "head.head.bias": torch.zeros(1),
            },
            path,
        )
        (weight,) = [w for w, (_, at) in open_model(path, WAN).keys.items() if at == key]
        found.append(weight)
    assert found[0] == found[1]
