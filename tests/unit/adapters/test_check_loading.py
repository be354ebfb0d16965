"""The simulation of ComfyUI's loader follows its source."""

import logging

import pytest
from adapter_examples import TABLES
from transformers.utils import import_utils

from gracetune.adapters.files.check_loading import comfyui_key_map, simulate_comfyui
from gracetune.adapters.files.placeholder_models import count_blocks, quiet_diffusers

WAN = comfyui_key_map(TABLES["wan"], {"blocks": 2})
FLUX = comfyui_key_map(TABLES["flux"], {"transformer_blocks": 1, "single_transformer_blocks": 1})
QWEN = comfyui_key_map(TABLES["qwen_image"], {"transformer_blocks": 1})


@pytest.mark.parametrize(
    ("known", "prefix", "module"),
    [
        (WAN, "diffusion_model.blocks.1.self_attn.q", "blocks.1.attn1.to_q"),
        (WAN, "lora_unet_blocks_0_cross_attn_k_img", "blocks.0.attn2.add_k_proj"),
        (WAN, "diffusion_model.blocks.0.modulation", "blocks.0.scale_shift_table"),
        (FLUX, "transformer.transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q"),
        (
            FLUX,
            "lycoris_single_transformer_blocks_0_proj_mlp",
            "single_transformer_blocks.0.proj_mlp",
        ),
        (FLUX, "lora_transformer_transformer_blocks_0_ff_net_2", "transformer_blocks.0.ff.net.2"),
        (FLUX, "lora_unet_double_blocks_0_img_attn_qkv", "transformer_blocks.0.attn.to_qkv"),
        (QWEN, "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q"),
        (QWEN, "lycoris_transformer_blocks_0_attn_to_q", "transformer_blocks.0.attn.to_q"),
        (QWEN, "transformer.transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q"),
    ],
)
def test_comfyui_knows_these_prefixes(known, prefix, module):
    assert known[prefix] == module


@pytest.mark.parametrize(
    "prefix",
    [
        "transformer.blocks.0.attn1.to_q",
        "lycoris_blocks_0_attn1_to_q",
        "diffusion_model.blocks.0.attn1.to_q",
        "diffusion_model.blocks.2.self_attn.q",
        "diffusion_model.transformer_1.blocks.0.self_attn.q",
    ],
)
def test_comfyui_ignores_other_prefixes_for_wan(prefix):
    assert prefix not in WAN
    result = simulate_comfyui([f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"], WAN)
    assert not result.modules
    assert len(result.ignored) == 2


Q = "diffusion_model.blocks.0.self_attn.q"


@pytest.mark.parametrize(
    "endings",
    [
        ["lora_up.weight", "lora_down.weight", "lora_mid.weight", "alpha"],
        ["lora_A.weight", "lora_B.weight", "alpha", "dora_scale"],
        ["lora_A.default.weight", "lora_B.default.weight"],
        ["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "alpha"],
        ["lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "alpha"],
        ["diff", "diff_b"],
        ["w_norm", "b_norm"],
        ["set_weight"],
    ],
)
def test_comfyui_loads_these_suffixes(endings):
    result = simulate_comfyui([f"{Q}.{ending}" for ending in endings], WAN)
    assert result.modules == {"blocks.0.attn1.to_q"}
    assert result.ignored == ()


def test_comfyui_ignores_other_suffixes():
    keys = [f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", f"{Q}.lora_magnitude_vector"]
    result = simulate_comfyui(keys, WAN)
    assert result.ignored == (f"{Q}.lora_magnitude_vector",)
    mid_beside_peft = [*keys[:2], f"{Q}.lora_mid.weight"]
    assert simulate_comfyui(mid_beside_peft, WAN).ignored == (f"{Q}.lora_mid.weight",)


def test_comfyui_fails_if_one_factor_is_missing():
    assert simulate_comfyui([f"{Q}.lora_up.weight"], WAN).missing_key == f"{Q}.lora_down.weight"
    assert (
        simulate_comfyui([f"{Q}.hada_w1_a", f"{Q}.hada_w1_b"], WAN).missing_key == f"{Q}.hada_w2_a"
    )


def test_comfyui_recognises_wan_fun_by_one_key():
    name = "lora_unet__blocks_0_cross_attn_k"
    keys = [f"{name}.lora_down.weight", f"{name}.lora_up.weight", f"{name}.alpha"]
    assert simulate_comfyui(keys, WAN).modules == {"blocks.0.attn2.to_k"}
    other = [key.replace("cross_attn_k", "self_attn_q") for key in keys]
    assert simulate_comfyui(other, WAN).ignored == tuple(other)


def test_blocks_are_counted_by_kind():
    modules = ["transformer_blocks.4.attn.to_q", "single_transformer_blocks.7.proj_mlp", "proj_out"]
    assert count_blocks(modules) == {"transformer_blocks": 5, "single_transformer_blocks": 8}


def test_only_the_missing_image_processor_is_not_mentioned() -> None:
    """diffusers' pipelines import image processors, which no check uses."""
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    note = "`CLIPImageProcessor` requires torchvision (not installed); falling back"
    import_utils.logger.addHandler(handler)
    try:
        with quiet_diffusers():
            import_utils.logger.error(note)
            import_utils.logger.error("something else")
        import_utils.logger.error(f"later: {note}")
    finally:
        import_utils.logger.removeHandler(handler)
    assert shown == ["something else", f"later: {note}"]
