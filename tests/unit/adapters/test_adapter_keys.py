import pytest
import torch
from adapter_examples import TABLES, table_of_modules
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.adapters.files.detect_family import detect_table
from gracetune.adapters.files.formats import FORMATS, SUFFIXES
from gracetune.adapters.files.keys import (
    KeyIndex,
    LayerPath,
    any_name_table,
    build_key,
    count_formats,
    detect_format,
    get_format,
    get_table,
    nearest_key,
    parse_key,
    resolve_stages,
    template_of,
)
from gracetune.errors import AdapterError

WAN, FLUX, QWEN = (KeyIndex(TABLES[name]) for name in ("wan", "flux", "qwen_image"))


def paths_in_format(index, form):
    """Yield every module that a format has a name for, for every expert that it can name."""
    stages = (
        [stage for stage, _ in form.stages] if form.stages and index.table.has_stages else [None]
    )
    names = {ours for _, ours in index.table.rows} | set(index.table.unfused)
    for template in sorted(names):
        for stage in stages:
            if index.from_diffusers(template.format(0), form.naming, form.separator) is not None:
                yield LayerPath(stage, template)


INDEXES = (WAN, FLUX, QWEN)
NAMED_PATHS = [
    (index, form, place)
    for index in INDEXES
    for form in FORMATS
    for place in paths_in_format(index, form)
]


@given(st.sampled_from(NAMED_PATHS), st.integers(0, 10**4), st.data())
@settings(max_examples=2000, deadline=None)
def test_a_built_key_parses_to_the_same_path_and_role(named_path, number, data):
    index, form, place = named_path
    place = LayerPath(place.stage, place.module.format(number))
    role = data.draw(st.sampled_from(sorted(SUFFIXES[form.style])))
    key = parse_key(build_key(form, index, place, role), index)
    assert key is not None
    unsaid = form.name == "diffusers-both" and place.stage != "low"
    assert key.path == (LayerPath(None, place.module) if unsaid else place)
    assert key.role == role
    assert unsaid or form.name in key.formats


@pytest.mark.parametrize("family", TABLES)
def test_names_in_a_table_are_unique(family):
    table = TABLES[family]
    for side in (0, 1):
        names = [row[side] for row in table.rows]
        assert len(names) == len(set(names))
        underscored = [name.replace(".", "_") for name in names]
        assert len(underscored) == len(set(underscored))


@pytest.mark.parametrize(
    ("key", "module", "role"),
    [
        ("lora_unet_blocks_12_cross_attn_k_img.alpha", "blocks.12.attn2.add_k_proj", "alpha"),
        ("lora_unet_blocks_3_ffn_0.lora_mid.weight", "blocks.3.ffn.net.0.proj", "mid"),
        ("diffusion_model.time_projection.1.lora_A.weight", "condition_embedder.time_proj", "down"),
        ("diffusion_model.blocks.7.norm3.w_norm", "blocks.7.norm2", "diff"),
        ("transformer.proj_out.lora.up.weight", "proj_out", "up"),
        (
            "transformer.blocks.0.attn1.to_q.lora_magnitude_vector.weight",
            "blocks.0.attn1.to_q",
            "dora",
        ),
    ],
)
def test_underscored_and_unusual_keys_are_parsed(key, module, role):
    found = parse_key(key, WAN)
    assert (found.path, found.role) == (LayerPath(None, module), role)


@pytest.mark.parametrize(
    ("key", "module"),
    [
        (
            "lora_unet_double_blocks_3_img_attn_qkv.lora_down.weight",
            "transformer_blocks.3.attn.to_qkv",
        ),
        (
            "diffusion_model.single_blocks.9.linear1.lora_A.weight",
            "single_transformer_blocks.9.attn.to_qkv_mlp_proj",
        ),
        (
            "transformer.single_transformer_blocks.9.proj_mlp.lora_A.weight",
            "single_transformer_blocks.9.proj_mlp",
        ),
        (
            "lycoris_transformer_blocks_0_attn_add_q_proj.lokr_w1",
            "transformer_blocks.0.attn.add_q_proj",
        ),
        (
            "lora_transformer_single_transformer_blocks_1_attn_to_v.alpha",
            "single_transformer_blocks.1.attn.to_v",
        ),
        (
            "transformer$$single_transformer_blocks$$1$$proj_out.lora_up.weight",
            "single_transformer_blocks.1.proj_out",
        ),
    ],
)
def test_flux_keys_of_several_tools_are_parsed(key, module):
    assert parse_key(key, FLUX).path == LayerPath(None, module)


@pytest.mark.parametrize(
    "key",
    [
        "transformer.transformer_blocks.59.img_mlp.net.0.proj.lora_A.weight",
        "diffusion_model.transformer_blocks.59.img_mlp.net.0.proj.lora_A.weight",
        "lora_unet_transformer_blocks_59_img_mlp_net_0_proj.lora_down.weight",
        "lycoris_transformer_blocks_59_img_mlp_net_0_proj.hada_w1_a",
        "transformer_blocks.59.img_mlp.net.0.proj.lora_A.default.weight",
    ],
)
def test_qwen_image_keys_of_several_tools_are_parsed(key):
    assert parse_key(key, QWEN).path.module == "transformer_blocks.59.img_mlp.net.0.proj"


def test_the_family_is_detected_or_the_user_is_asked():
    shared = "transformer.transformer_blocks.{}.attn.to_q.lora_A.weight"

    def family_of(*keys, **header):
        return detect_table(dict.fromkeys(keys, torch.ones(4, 24)), header, TABLES)[0].family

    with pytest.raises(AdapterError, match="--family") as caught:
        family_of(shared.format(0))
    assert caught.value.kind == "ambiguous"
    assert family_of(shared.format(0), ss_base_model_version="flux1") == "flux"
    assert family_of(*(shared.format(n) for n in range(60))) == "qwen_image"
    single = "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight"
    assert family_of(shared.format(0), single) == "flux"


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        (
            "diffusion_model.blocks.4.self_attn.qq.lora_A.weight",
            "diffusion_model.blocks.4.self_attn.q.lora_A.weight",
        ),
        (
            "lora_unet_blocks_11_crossattn_k.lora_up.weight",
            "lora_unet_blocks_11_cross_attn_k.lora_up.weight",
        ),
        (
            "transformer.blocks.2.attn1.to_q.lora_AA.weight",
            "transformer.blocks.2.attn1.to_q.lora_A.weight",
        ),
        (
            "lycoris_blocks_2_attn1_to_queue.lokr_w1",
            "lycoris_blocks_2_attn1_to_q.lokr_w1",
        ),
    ],
)
def test_the_most_similar_known_key_is_found(wrong, near):
    assert parse_key(wrong, WAN) is None
    assert nearest_key(wrong, [TABLES["wan"]]) == near


def test_a_key_unlike_any_other_has_no_similar_key():
    assert nearest_key("zzz", [TABLES["wan"]]) is None


def test_formats_are_found_by_name_and_by_tool():
    assert get_format("musubi").name == "kohya"
    assert get_format("ai-toolkit").name == "comfyui"
    with pytest.raises(AdapterError, match="Did you mean 'diffusers'"):
        get_format("difusers")


def test_tables_are_found_by_alias():
    assert get_table("wan22", TABLES).family == "wan"
    assert get_table("tiny", TABLES).accepts_any_name


def test_a_family_without_a_table_keeps_dotted_names():
    index = KeyIndex(any_name_table("tiny"))
    key = parse_key("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", index)
    assert key.path.module == "transformer_blocks.0.attn.to_q"
    assert parse_key("lycoris_transformer_blocks_0_attn_to_q.lokr_w1", index) is None
    known = KeyIndex(table_of_modules("tiny", ("transformer_blocks.0.attn.to_q",)))
    key = parse_key("lycoris_transformer_blocks_0_attn_to_q.lokr_w1", known)
    assert key.path.module == "transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize(
    "text",
    [
        "lycoris_transformer{}_blocks_0_self_attn_q.lokr_w1",
        "lycoris_transformer{}_blocks_0_attn1_to_q.lokr_w1",
        "diffusion_model.transformer{}.blocks.0.self_attn.q.lora_A.weight",
    ],
)
@pytest.mark.parametrize(("number", "stage"), [("1", "high"), ("2", "low")])
def test_experts_are_parsed_with_and_without_an_underscore(text, number, stage):
    index = KeyIndex(get_table("wan", TABLES))
    usual, unparted = (parse_key(text.format(part), index) for part in (f"_{number}", number))
    assert usual.path == unparted.path == LayerPath(stage, "blocks.0.attn1.to_q")
    assert usual.formats == unparted.formats


def test_keys_of_mixed_formats_have_no_common_format():
    texts = [
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight",
        "lora_unet_blocks_0_self_attn_k.lora_down.weight",
    ]
    keys = [parse_key(text, WAN) for text in texts]
    assert detect_format(keys) is None
    assert set(count_formats(keys)) >= {"comfyui", "kohya"}
    assert resolve_stages(keys) == keys


def test_templates_replace_only_the_block_number():
    assert template_of("blocks.7.ffn.net.0.proj") == ("blocks.{}.ffn.net.0.proj", "7")
    assert template_of("proj_out") == ("proj_out", "")
