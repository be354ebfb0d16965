"""Adapter files are read and written with their headers, and faults are reported."""

import json

import pytest
import torch
from adapter_examples import (
    HIDDEN,
    TABLES,
    WAN,
    make_full,
    make_loha,
    make_lokr,
    make_lora,
    make_wan,
    same,
)
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gracetune.adapters.files.convert import find_unsupported, import_tensors
from gracetune.adapters.files.formats import SUFFIXES
from gracetune.adapters.files.fused_projections import join_fused
from gracetune.adapters.files.io import (
    AdapterMetadata,
    default_format,
    describe_adapter,
    find_stage,
    read_adapter,
    read_tensors,
    write_adapter,
)
from gracetune.adapters.files.keys import LayerPath, get_table
from gracetune.adapters.files.layers import (
    TENSOR_SETS,
    Adapter,
    Layer,
    delta,
    delta_norm,
    delta_shape,
    join_stages,
    with_stage,
)
from gracetune.errors import AdapterError

PREFIX = "diffusion_model.blocks.0.self_attn.q"
A, B = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"


def lora_tensors(rank=4, dtype=torch.float32):
    return {A: torch.ones(rank, HIDDEN, dtype=dtype), B: torch.ones(HIDDEN, rank, dtype=dtype)}


def read_error(path, tensors, metadata=None, table=None):
    save_file(tensors, path, metadata)
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, TABLES, table)
    return caught.value


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.safetensors"


def test_a_truncated_file_is_refused(path):
    save_file(lora_tensors(), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(AdapterError, match=r"truncated.*again") as caught:
        read_adapter(path, TABLES)
    assert caught.value.kind == "truncated"


def test_another_file_type_is_refused(path):
    path.write_bytes(b"not a header at all")
    with pytest.raises(AdapterError, match="cannot be read as safetensors"):
        read_adapter(path, TABLES)


def test_a_pickle_is_never_opened(tmp_path):
    with pytest.raises(AdapterError, match="can run code") as caught:
        read_adapter(tmp_path / "adapter.pt", TABLES)
    assert caught.value.kind == "not-safetensors"


def test_a_missing_file_is_refused(path):
    with pytest.raises(AdapterError, match=r"does not exist\. Name a \.safetensors file"):
        read_adapter(path, TABLES)


def test_a_file_without_tensors_is_refused(path):
    error = read_error(path, {})
    assert error.kind == "empty"
    assert "Name another one, or save it again." in str(error)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_refused(path, value):
    tensors = lora_tensors(dtype=torch.float16)
    tensors[B][3, 1] = value
    error = read_error(path, tensors)
    assert error.kind == "not-finite"
    assert error.key == B
    assert "65504" in str(error)


def test_an_infinite_alpha_is_refused_if_it_scales_a_layer(path):
    tensors = lora_tensors() | {f"{PREFIX}.alpha": torch.tensor(float("inf"), dtype=torch.float16)}
    error = read_error(path, tensors)
    assert (error.kind, error.key) == ("not-finite", f"{PREFIX}.alpha")


def test_mismatched_ranks_are_refused(path):
    error = read_error(path, {A: torch.ones(4, HIDDEN), B: torch.ones(HIDDEN, 8)})
    assert error.kind == "rank-mismatch"
    assert error.key == B
    assert "24x8" in str(error)
    assert "4x24" in str(error)


def test_the_error_for_an_unknown_key_names_the_most_similar_key(path):
    wrong = "diffusion_model.blocks.0.self_attn.query.lora_A.weight"
    error = read_error(path, lora_tensors() | {wrong: torch.ones(4, 4)})
    assert (error.kind, error.key) == ("unknown-key", wrong)
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in str(error)


def test_a_file_with_keys_of_text_encoders_alone_is_refused(path):
    key = "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"
    error = read_error(path, {key: torch.ones(4, 4)})
    assert (error.kind, error.key) == ("unsupported", key)
    assert "text encoder" in str(error)


def test_a_file_without_known_keys_is_refused(path):
    error = read_error(path, {"model.layers.0.weight": torch.ones(2)})
    assert error.kind == "unknown-key"
    assert " or ".join(TABLES) in str(error)


def test_a_file_of_another_family_is_refused(path):
    flux = {"diffusion_model.double_blocks.0.img_attn.proj.lora_A.weight": torch.ones(2, 4)}
    flux["diffusion_model.double_blocks.0.img_attn.proj.lora_B.weight"] = torch.ones(4, 2)
    error = read_error(path, flux, table=WAN)
    assert error.kind == "other-model"
    assert "flux" in str(error)
    assert error.key == next(iter(sorted(flux)))


def test_an_incomplete_layer_is_refused(path):
    error = read_error(path, {A: torch.ones(4, HIDDEN)})
    assert error.kind == "incomplete"
    assert "lacks up" in str(error)
    lokr = {f"{PREFIX}.lokr_w1": torch.ones(2, 2), f"{PREFIX}.lokr_w2_a": torch.ones(2, 2)}
    assert "lacks lokr_w2_b" in str(read_error(path, lokr))


def test_two_algorithms_on_one_module_are_refused(path):
    error = read_error(path, lora_tensors() | {f"{PREFIX}.lokr_w1": torch.ones(2, 2)})
    assert error.kind == "two-algorithms"


def test_two_keys_of_one_tensor_are_refused(path):
    twin = f"{PREFIX}.lora_down.weight"
    error = read_error(path, lora_tensors() | {twin: torch.ones(4, HIDDEN)})
    assert error.kind == "duplicate"


def test_integer_weights_are_refused(path):
    error = read_error(path, {A: torch.ones(4, HIDDEN, dtype=torch.int8), B: torch.ones(HIDDEN, 4)})
    assert (error.kind, error.key) == ("dtype", A)


def test_settings_that_are_not_json_are_refused(path):
    error = read_error(path, lora_tensors(), {"lora_adapter_metadata": "{"})
    assert error.kind == "damaged"


def test_an_integer_alpha_is_read(path):
    save_file(lora_tensors() | {f"{PREFIX}.alpha": torch.tensor(2)}, path)
    (layer,) = read_adapter(path, TABLES).layers.values()
    assert layer.alpha == 2.0


def test_the_header_describes_the_adapter(path):
    about = AdapterMetadata("Wan-AI/Wan2.2-T2V-A14B", "high", 0.875, "ohwx", "abc123")
    write_adapter(path, make_wan(alpha=2.0), "comfyui", about)
    _, header = read_tensors(path)
    assert header == {
        "format": "pt",
        "gracetune.family": "wan",
        "gracetune.form": "comfyui",
        "gracetune.algorithm": "lora",
        "gracetune.rank": "4",
        "gracetune.alpha": "2",
        "gracetune.base_model": "Wan-AI/Wan2.2-T2V-A14B",
        "gracetune.stage": "high",
        "gracetune.boundary": "0.875",
        "gracetune.trigger": "ohwx",
        "modelspec.trigger_phrase": "ohwx",
        "gracetune.run_digest": "abc123",
    }


def test_the_same_adapter_gives_the_same_bytes(tmp_path):
    """The safetensors library writes the entries of a header in a random order."""
    metadata = AdapterMetadata("a b", "high", 0.875, 'say "ü", \x1f\x7f\n\\', "0123")
    files = [
        write_adapter(tmp_path / f"{n}.safetensors", make_wan("lora", alpha=2.0), "kohya", metadata)
        for n in range(4)
    ]
    rewritten = [
        write_adapter(file.with_stem(f"{file.stem}-again"), read_adapter(file, TABLES), "kohya")
        for file in files
    ]
    assert len({file.read_bytes() for file in files}) == 1
    assert len({file.read_bytes() for file in rewritten}) == 1
    assert read_tensors(rewritten[0])[1] == read_tensors(files[0])[1]


def test_a_header_is_kept_when_a_file_is_rewritten(path, tmp_path):
    write_adapter(path, make_wan(), "comfyui", AdapterMetadata(trigger="ohwx"))
    other = write_adapter(tmp_path / "b.safetensors", read_adapter(path, TABLES), "kohya")
    _, header = read_tensors(other)
    assert header["gracetune.trigger"] == "ohwx"
    assert header["gracetune.form"] == "kohya"


def test_the_header_of_whole_matrices_has_no_rank():
    said = describe_adapter(make_wan("lokr-whole"))
    assert said["gracetune.rank"] == "full"
    assert said["gracetune.alpha"] == "none"


def test_alpha_is_read_from_the_config_next_to_a_peft_file(tmp_path):
    prefix = "base_model.model.blocks.0.attn1.to_q"
    tensors = {
        f"{prefix}.lora_A.weight": torch.ones(4, HIDDEN),
        f"{prefix}.lora_B.weight": torch.ones(HIDDEN, 4),
    }
    path = tmp_path / "adapter_model.safetensors"
    save_file(tensors, path)
    alone = read_adapter(path, TABLES)
    assert "adapter_config.json" in alone.notices[0]
    config = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"^blocks.0.attn1.to_q": 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (layer,) = read_adapter(tmp_path, TABLES).layers.values()
    assert layer.alpha == 2.0
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_adapter(path, TABLES)


def test_a_peft_folder_loads_in_peft(tmp_path):
    from peft import PeftModel
    from torch import nn

    layer = make_lora(6, 5, torch.Generator().manual_seed(0), alpha=3.0)
    table = get_table("any", TABLES)
    adapter = Adapter(table, {LayerPath(None, "x"): layer})
    write_adapter(tmp_path / "adapter_model.safetensors", adapter, "peft")
    model = nn.Sequential()
    model.add_module("x", nn.Linear(5, 6))
    model.config = {"model_type": "custom"}
    before = model.x.weight.detach().clone()
    loaded = PeftModel.from_pretrained(model, tmp_path)
    x = torch.eye(5)
    with torch.no_grad():
        change = (loaded(x) - nn.functional.linear(x, before, model.x.bias)).T
    torch.testing.assert_close(change, delta(layer))


def test_the_peft_config_lists_the_modules_that_were_written(tmp_path):
    """The fused layer has the sum of its parts' ranks, and so another alpha."""
    table = get_table("flux", TABLES)
    parts = {
        LayerPath(None, f"transformer_blocks.0.attn.to_{name}"): make_lora(
            12, 12, torch.Generator().manual_seed(seed), 4, alpha=2.0
        )
        for seed, name in enumerate("qkv")
    }
    whole = join_fused(Adapter(table, parts))
    write_adapter(tmp_path / "adapter_model.safetensors", whole, "peft")
    back = read_adapter(tmp_path, TABLES)
    assert set(back.layers) == set(parts)
    for place, layer in parts.items():
        torch.testing.assert_close(delta(back.layers[place]), delta(layer))


def test_alpha_is_read_from_peft_settings_in_the_header(path):
    prefix = "transformer.blocks.0.attn1.to_q"
    tensors = {
        f"{prefix}.lora_A.weight": torch.ones(4, HIDDEN),
        f"{prefix}.lora_B.weight": torch.ones(HIDDEN, 4),
        f"{prefix}.lora_B.bias": torch.ones(HIDDEN),
    }
    said = {"transformer.r": 4, "transformer.lora_alpha": 2, "text_encoder.r": 8}
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(said)})
    (layer,) = read_adapter(path, TABLES).layers.values()
    assert layer.alpha == 2.0
    assert torch.equal(layer.tensors["diff_b"], torch.full((HIDDEN,), 0.5))  # peft scales it too


def test_a_folder_is_resolved_to_the_adapter_file_in_it(tmp_path):
    with pytest.raises(AdapterError, match="it has none"):
        read_adapter(tmp_path, TABLES)
    write_adapter(tmp_path / "one.safetensors", make_wan(), "comfyui")
    assert len(read_adapter(tmp_path, TABLES).layers) == 20
    write_adapter(tmp_path / "two.safetensors", make_wan(), "comfyui")
    with pytest.raises(AdapterError, match=r"one\.safetensors, two\.safetensors"):
        read_adapter(tmp_path, TABLES)
    write_adapter(tmp_path / "pytorch_lora_weights.safetensors", make_wan("loha"), "comfyui")
    assert (
        read_adapter(tmp_path, TABLES).layers[LayerPath(None, "blocks.0.attn1.to_q")].algorithm
        == "loha"
    )


def test_values_too_large_for_float16_are_refused(path):
    layer = Layer("lora", {"down": torch.full((2, 4), 1e5), "up": torch.ones(4, 2)})
    adapter = Adapter(WAN, {LayerPath(None, "blocks.0.attn1.to_q"): layer})
    with pytest.raises(AdapterError, match=r"1e\+05.*float16.*bfloat16") as caught:
        write_adapter(path, adapter, "comfyui", dtype=torch.float16)
    assert caught.value.key == A
    assert not path.exists()
    write_adapter(path, adapter, "comfyui", dtype=torch.bfloat16)
    assert read_tensors(path)[0][A].dtype == torch.bfloat16


def test_folding_alpha_into_bf16_weights_does_not_round(path):
    generator = torch.Generator().manual_seed(0)
    layer = make_lora(HIDDEN, HIDDEN, generator, alpha=3.0, dtype=torch.bfloat16)
    adapter = Adapter(WAN, {LayerPath(None, "blocks.0.attn1.to_q"): layer})
    (back,) = read_adapter(write_adapter(path, adapter, "diffusers"), TABLES).layers.values()
    torch.testing.assert_close(delta(back), delta(layer), rtol=1e-6, atol=1e-6)
    half = Layer("lora", layer.tensors, 2.0)
    adapter = Adapter(WAN, {LayerPath(None, "blocks.0.attn1.to_q"): half})
    (back,) = read_adapter(write_adapter(path, adapter, "diffusers"), TABLES).layers.values()
    assert back.tensors["up"].dtype == torch.bfloat16
    assert torch.equal(delta(back), delta(half))


def test_the_expert_is_found_in_keys_header_or_file_name(tmp_path):
    named = write_adapter(tmp_path / "run_low_noise.safetensors", make_wan(), "comfyui")
    assert find_stage(read_adapter(named, TABLES), named) == ("low", "its name")
    said = write_adapter(
        tmp_path / "x.safetensors", make_wan(), "comfyui", AdapterMetadata(stage="high")
    )
    assert find_stage(read_adapter(said, TABLES), said) == ("high", "its header")
    keyed = make_wan(stages=("low",))
    path = write_adapter(tmp_path / "y.safetensors", keyed, "ai-toolkit-combined")
    assert find_stage(read_adapter(path, TABLES), path) == ("low", "its keys")
    plain = write_adapter(tmp_path / "z.safetensors", make_wan(), "comfyui")
    assert find_stage(read_adapter(plain, TABLES), plain) == (None, "")
    wrong = AdapterMetadata(stage="high")
    path = write_adapter(tmp_path / "w.safetensors", keyed, "ai-toolkit-combined", wrong)
    with pytest.raises(AdapterError, match=r"header .* says stage high, but its keys say low"):
        find_stage(read_adapter(path, TABLES), path)


def test_a_format_that_names_experts_needs_one(path):
    with pytest.raises(AdapterError, match="--stage high") as caught:
        write_adapter(path, make_wan(), "ai-toolkit-combined")
    assert caught.value.kind == "no-stage"


@pytest.mark.parametrize("form", ["diffusers", "peft"])
def test_what_a_format_cannot_hold_is_refused_with_an_alternative(form, path):
    path = path.with_name("adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"cannot hold a full matrix.*--lora-rank"):
        write_adapter(path, make_wan("full"), form)
    tucker = Layer(
        "lora",
        {
            "down": torch.ones(2, 4, 1, 1),
            "up": torch.ones(4, 2, 1, 1),
            "mid": torch.ones(2, 2, 3, 3),
        },
    )
    adapter = Adapter(WAN, {LayerPath(None, "patch_embedding"): tucker})
    with pytest.raises(AdapterError, match="core tensor"):
        write_adapter(path, adapter, form)
    keys = read_tensors(write_adapter(path, adapter, "comfyui"))[0]
    assert "diffusion_model.patch_embedding.lora_down.weight" in keys
    assert same(read_adapter(path, TABLES), adapter)


def test_a_module_without_a_name_in_a_format_is_refused(path):
    layer = make_lora(4, 4, torch.Generator().manual_seed(0))
    adapter = Adapter(WAN, {LayerPath(None, "blocks.0.norm2"): layer})
    with pytest.raises(AdapterError, match="no name for this module"):
        write_adapter(path, adapter, "ai-toolkit-old-lokr")


def test_magnitudes_per_column_cannot_be_written_for_peft(path):
    layer = make_lora(6, 4, torch.Generator().manual_seed(0))
    tensors = {**layer.tensors, "dora": torch.ones(1, 4)}
    adapter = Adapter(WAN, {LayerPath(None, "blocks.0.attn1.to_q"): Layer("lora", tensors)})
    with pytest.raises(AdapterError, match="one per row"):
        write_adapter(path, adapter, "diffusers")
    assert same(read_adapter(write_adapter(path, adapter, "kohya"), TABLES), adapter)


def test_the_default_format_is_the_one_that_most_tools_load():
    assert default_format(make_wan()).name == "comfyui"
    assert default_format(make_wan("lokr")).name == "comfyui"
    generator = torch.Generator().manual_seed(0)
    place = LayerPath(None, "transformer_blocks.0.attn.to_q")
    for table in (TABLES["flux"], TABLES["qwen_image"], get_table("tiny", TABLES)):
        for make, form in ((make_lora, "diffusers"), (make_lokr, "diffusers")):
            adapter = Adapter(table, {place: make(8, 8, generator)})
            assert default_format(adapter).name == form
        adapter = Adapter(table, {place: make_loha(8, 8, generator)})
        assert default_format(adapter).name == (
            "diffusers" if table.accepts_any_name else "lycoris"
        )
    dora = Adapter(
        WAN, {LayerPath(None, "blocks.0.attn1.to_q"): make_lora(4, 4, generator, dora=True)}
    )
    assert default_format(dora).name == "diffusers"


@pytest.mark.parametrize("make", [make_lora, make_loha, make_lokr, make_full])
def test_a_family_without_a_table_has_a_format_for_every_algorithm(make, path):
    layer = make(8, 6, torch.Generator().manual_seed(0))
    places = (
        LayerPath(None, "context_embedder"),
        LayerPath(None, "transformer_blocks.0.attn.to_q"),
    )
    adapter = Adapter(get_table("tiny", TABLES), dict.fromkeys(places, layer))
    form = default_format(adapter)
    assert find_unsupported(adapter, form) is None
    back = read_adapter(write_adapter(path, adapter, form), TABLES)
    assert back.layers.keys() == adapter.layers.keys()
    for place in places:
        torch.testing.assert_close(delta(back.layers[place]), delta(layer))


def test_the_suggested_format_can_hold_the_adapter(path):
    generator = torch.Generator().manual_seed(0)
    place = LayerPath(None, "context_embedder")
    adapter = Adapter(get_table("tiny", TABLES), {place: make_loha(8, 6, generator)})
    with pytest.raises(AdapterError, match=r"format comfyui: .* Write the format diffusers\.$"):
        write_adapter(path, adapter, "comfyui")
    adapter = Adapter(get_table("tiny", TABLES), {place: make_full(8, 6, generator)})
    with pytest.raises(AdapterError, match=r"Write the format simpletuner-comfyui\..*--lora-rank"):
        write_adapter(path, adapter, "diffusers")
    write_adapter(path, adapter, "simpletuner-comfyui")


@pytest.mark.parametrize("name", ["to-q", "0.attn", "attn.to q"])
def test_a_name_that_could_not_be_read_back_is_not_written(name, path):
    layer = make_lora(4, 4, torch.Generator().manual_seed(0))
    adapter = Adapter(get_table("tiny", TABLES), {LayerPath(None, name): layer})
    with pytest.raises(AdapterError, match=r"No format has a name for it: leave the module out\.$"):
        write_adapter(path, adapter, "diffusers")


def test_adapters_of_two_experts_are_joined():
    both = make_wan(stages=("high", "low"))
    high, low = (with_stage(both.select_stage(stage), None) for stage in ("high", "low"))
    assert same(join_stages(high, low), both)
    with pytest.raises(AdapterError, match="already holds both experts"):
        join_stages(both, low)
    other = Adapter(TABLES["flux"], {})
    with pytest.raises(AdapterError, match="two files for the same model"):
        join_stages(high, other)
    assert with_stage(low, "low").stages == ("low",)


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        (f"{PREFIX}.alpha", torch.ones(2)),
        (B, torch.ones(HIDDEN, 0)),
        (B, torch.ones(HIDDEN)),
        (f"{PREFIX}.dora_scale", torch.ones(HIDDEN + 1, 1)),
        (f"{PREFIX}.dora_scale", torch.ones(1, HIDDEN // 2)),
    ],
)
def test_impossible_shapes_are_refused(path, key, tensor):
    error = read_error(path, lora_tensors() | {key: tensor})
    assert error.kind in ("damaged", "rank-mismatch")
    assert error.key == key


def test_core_tensors_with_different_kernels_are_refused(path):
    sizes = {"w1_a": (2, 6), "w1_b": (2, 4), "w2_a": (2, 6), "w2_b": (2, 4)}
    tensors = {f"{PREFIX}.hada_{name}": torch.ones(size) for name, size in sizes.items()}
    tensors |= {
        f"{PREFIX}.hada_t1": torch.ones(2, 2, 3, 3),
        f"{PREFIX}.hada_t2": torch.ones(2, 2, 1, 3),
    }
    assert read_error(path, tensors).key == f"{PREFIX}.hada_t1"


SETS = [roles for sets in TENSOR_SETS.values() for roles in sets]
"""Tensors of complete layers; the test below varies their shapes."""


@st.composite
def layers_of_any_shape(draw):
    extra = draw(st.sampled_from([set(), {"diff_b"}, {"dora"}]))
    roles = sorted(draw(st.sampled_from(SETS)) | extra)
    axes = draw(st.sampled_from([2, 2, 3, 4]))
    shapes = {}
    for role in roles:
        odd = draw(st.integers(0, 7)) == 0
        count = draw(st.integers(0, 4)) if odd else axes
        shapes[role] = [draw(st.sampled_from([2, 2, 2, 3])) for _ in range(count)]
    return shapes


@given(layers_of_any_shape(), st.sampled_from([None, 0.0, 2.0]))
@settings(max_examples=500, deadline=None)
def test_any_shapes_give_a_valid_layer_or_an_adapter_error(shapes, alpha):
    """Reading never fails with anything but an AdapterError."""
    tensors = {f"{PREFIX}{SUFFIXES['kohya'][role]}": torch.ones(s) for role, s in shapes.items()}
    if alpha is not None:
        tensors[f"{PREFIX}.alpha"] = torch.tensor(alpha)
    try:
        (layer,) = import_tensors(tensors, {}, TABLES).layers.values()
    except AdapterError as error:
        event(error.kind)
        return
    event("read")
    assert delta_norm(layer) >= 0.0
    if layer.algorithm != "full":
        assert delta(layer).numel() == torch.Size(delta_shape(layer)).numel()


def test_escaped_patterns_in_peft_settings_match(tmp_path):
    prefix = "base_model.model.blocks.0.attn1.to_q"
    tensors = {
        f"{prefix}.lora_A.weight": torch.ones(4, HIDDEN),
        f"{prefix}.lora_B.weight": torch.ones(HIDDEN, 4),
    }
    config = {"r": 4, "lora_alpha": 4, "alpha_pattern": {r"^blocks\.0\.attn1\.to_q": 2, "x": 9}}
    (layer,) = import_tensors(tensors, {}, TABLES, None, config).layers.values()
    assert layer.alpha == 2.0
    config = {"r": 4, "lora_alpha": 4, "alpha_pattern": {"x": 9}}
    (layer,) = import_tensors(tensors, {}, TABLES, None, config).layers.values()
    assert layer.alpha is None


def alpha_by_pattern(pattern, module="blocks.0.attn1.to_q"):
    prefix = f"base_model.model.{module}"
    tensors = {
        f"{prefix}.lora_A.weight": torch.ones(4, HIDDEN),
        f"{prefix}.lora_B.weight": torch.ones(HIDDEN, 4),
    }
    config = {"r": 4, "lora_alpha": 4, "alpha_pattern": {pattern: 2}}
    (layer,) = import_tensors(tensors, {}, TABLES, None, config).layers.values()
    return layer.alpha


@pytest.mark.parametrize(
    "pattern",
    [
        "to_q",
        "attn1.to_q",
        r"blocks\.\d+\.attn1\.to_(q|k)",
        r".*attn1\.to_q",
        "^blocks.*to_q",
        "o_q",
    ],
)
def test_patterns_in_peft_settings_match_as_in_peft(pattern):
    from peft.utils.other import get_pattern_key

    module = "blocks.0.attn1.to_q"
    theirs = get_pattern_key([pattern], module) == pattern
    assert alpha_by_pattern(pattern, module) == (2.0 if theirs else None)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(a+)+b", "forever"),
        (".*.*.*.*.*x", "forever"),
        ("(a|a)" * 40, "forever"),
        ("a?" * 40, "forever"),
        ("to_(q", "is not a regular expr"),
    ],
)
def test_a_pattern_that_could_hang_or_is_invalid_is_refused(pattern, said):
    with pytest.raises(AdapterError, match=said):
        alpha_by_pattern(pattern)


def test_patterns_that_do_not_affect_the_scale_are_ignored():
    prefix = "base_model.model.blocks.0.attn1.to_q"
    tensors = {
        f"{prefix}.lora_A.weight": torch.ones(4, HIDDEN),
        f"{prefix}.lora_B.weight": torch.ones(HIDDEN, 4),
    }
    config = {"r": 4, "lora_alpha": 2, "rank_pattern": {"(a+)+b": 8}}
    (layer,) = import_tensors(tensors, {}, TABLES, None, config).layers.values()
    assert layer.alpha == 2.0
    tensors[f"{prefix}.alpha"] = torch.tensor(3.0)
    (layer,) = import_tensors(
        tensors, {}, TABLES, None, {"alpha_pattern": {"(a+)+b": 8}}
    ).layers.values()
    assert layer.alpha == 3.0
