"""Adapters are merged into models of either naming, and extracted from two models."""

import pytest
import torch
from adapter_examples import (
    FLUX,
    WAN,
    make_full,
    make_loha,
    make_lokr,
    make_lora,
    make_wan,
    shape_of,
    wan_modules,
)
from safetensors.torch import load_file, save_file

from gracetune.adapters.files.io import read_tensors
from gracetune.adapters.files.keys import KeyIndex, LayerPath
from gracetune.adapters.files.layers import Adapter, Layer, delta, merge_weight
from gracetune.adapters.files.lowrank import extract_lora
from gracetune.adapters.files.merge_into_model import merge_into, merge_into_pipeline, open_model
from gracetune.errors import AdapterError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def wan_weights(naming="diffusers", prefix="", dtype=torch.float32, seed=7):
    """Return the linear weights, with biases, and a norm of a tiny Wan."""
    index, g = KeyIndex(WAN), generator(seed)
    tensors = {}
    for name in wan_modules():
        spelled = prefix + index.from_diffusers(name, naming, ".")
        tensors[f"{spelled}.weight"] = torch.randn(shape_of(name), generator=g).to(dtype)
        tensors[f"{spelled}.bias"] = torch.randn(shape_of(name)[0], generator=g).to(dtype)
    norm = prefix + index.from_diffusers("blocks.0.norm2", naming, ".")
    return tensors | {f"{norm}.weight": torch.ones(24).to(dtype)}


def key_of(module, naming, prefix=""):
    return f"{prefix}{KeyIndex(WAN).from_diffusers(module, naming, '.')}.weight"


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "lokr-whole", "full"])
@pytest.mark.parametrize(
    ("naming", "prefix"),
    [("diffusers", ""), ("original", ""), ("original", "model.diffusion_model.")],
)
def test_merging_adds_the_delta_to_the_weight(kind, naming, prefix, tmp_path):
    base = wan_weights(naming, prefix)
    save_file(base, tmp_path / "m.safetensors", {"format": "pt"})
    adapter = make_wan(kind, alpha=2.0)
    done = merge_into(
        tmp_path / "m.safetensors", tmp_path / "out.safetensors", [(adapter, 0.5)], WAN
    )
    assert done.changed == 20
    out = load_file(tmp_path / "out.safetensors")
    assert set(out) == set(base)
    for place, layer in adapter.layers.items():
        key = key_of(place.module, naming, prefix)
        torch.testing.assert_close(out[key], base[key] + 0.5 * delta(layer))
        bias = key.replace(".weight", ".bias")
        added = 0.5 * layer.tensors["diff_b"] if "diff_b" in layer.tensors else 0.0
        torch.testing.assert_close(out[bias], base[bias] + added)
    norm = key_of("blocks.0.norm2", naming, prefix)
    assert torch.equal(out[norm], base[norm])


def test_two_adapters_are_merged_into_a_folder_of_shards(tmp_path):
    base = wan_weights(dtype=torch.bfloat16)
    keys = sorted(base)
    folder = tmp_path / "transformer"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({k: base[k] for k in keys[::2]}, folder / "a-1.safetensors")
    save_file({k: base[k] for k in keys[1::2]}, folder / "a-2.safetensors")
    first, second = make_wan(seed=1), make_wan("lokr", seed=2)
    done = merge_into(folder, tmp_path / "out", [(first, 1.0), (second, 1.0)], WAN)
    assert done.files == ("a-1.safetensors", "a-2.safetensors")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    out = load_file(tmp_path / "out" / "a-1.safetensors") | load_file(
        tmp_path / "out" / "a-2.safetensors"
    )
    place = LayerPath(None, "blocks.1.attn2.to_v")
    key = key_of(place.module, "diffusers")
    expected = merge_weight(
        second.layers[place], merge_weight(first.layers[place], base[key].float())
    )
    assert torch.equal(out[key], expected.bfloat16())
    assert out[key].dtype == torch.bfloat16


def test_experts_are_merged_into_their_transformers(tmp_path):
    pipeline = tmp_path / "pipe"
    for name, seed in (("transformer", 1), ("transformer_2", 2)):
        (pipeline / name).mkdir(parents=True)
        save_file(wan_weights(seed=seed), pipeline / name / "m.safetensors")
    (pipeline / "model_index.json").write_text("{}")
    (pipeline / "vae").mkdir()
    (pipeline / "vae" / "config.json").write_text("vae")
    high, low = make_wan(seed=1), make_wan(seed=2)
    (tmp_path / ".out.77.staging").mkdir()  # a killed merge has left it
    done = merge_into_pipeline(
        pipeline, tmp_path / "out", {"high": [(high, 1.0)], "low": [(low, 1.0)]}, WAN
    )
    assert set(done) == {"transformer", "transformer_2"}
    assert (tmp_path / "out" / "vae" / "config.json").read_text() == "vae"
    for name, adapter in (("transformer", high), ("transformer_2", low)):
        before = load_file(pipeline / name / "m.safetensors")
        after = load_file(tmp_path / "out" / name / "m.safetensors")
        for place, layer in adapter.layers.items():
            key = key_of(place.module, "diffusers")
            torch.testing.assert_close(after[key], before[key] + delta(layer))
    assert not (tmp_path / ".out.77.staging").exists()


def test_an_expert_that_the_pipeline_lacks_is_refused(tmp_path):
    (tmp_path / "pipe" / "transformer").mkdir(parents=True)
    with pytest.raises(AdapterError, match="has no transformer_2/"):
        merge_into_pipeline(tmp_path / "pipe", tmp_path / "out", {"low": [(make_wan(), 1.0)]}, WAN)
    assert not (tmp_path / "out").exists()


def flux_original():
    g = generator(3)
    return {
        "double_blocks.0.img_attn.qkv.weight": torch.randn(36, 12, generator=g),
        "single_blocks.0.linear1.weight": torch.randn(84, 12, generator=g),
        "final_layer.adaLN_modulation.1.weight": torch.randn(24, 12, generator=g),
    }


@pytest.mark.parametrize("make", [make_lora, make_loha, make_lokr, make_full])
def test_parts_are_merged_into_rows_of_a_fused_weight(make, tmp_path):
    base = flux_original()
    base["double_blocks.0.img_attn.qkv.bias"] = torch.zeros(36)
    save_file(base, tmp_path / "m.safetensors")
    layer = make(12, 12, generator())
    adapter = Adapter(FLUX, {LayerPath(None, "transformer_blocks.0.attn.to_k"): layer})
    merge_into(tmp_path / "m.safetensors", tmp_path / "o.safetensors", [(adapter, 1.0)], FLUX)
    out = load_file(tmp_path / "o.safetensors")["double_blocks.0.img_attn.qkv.weight"]
    qkv = base["double_blocks.0.img_attn.qkv.weight"]
    torch.testing.assert_close(out[12:24], qkv[12:24] + delta(layer))
    assert torch.equal(out[:12], qkv[:12])
    assert torch.equal(out[24:], qkv[24:])


def test_magnitudes_and_swapped_halves_are_merged_into_a_fused_model(tmp_path):
    base = flux_original()
    save_file(base, tmp_path / "m.safetensors")
    mlp, norm = make_lora(48, 12, generator(), dora=True), make_lora(24, 12, generator(1))
    layers = {
        LayerPath(None, "single_transformer_blocks.0.proj_mlp"): mlp,
        LayerPath(None, "norm_out.linear"): norm,
    }
    merge_into(
        tmp_path / "m.safetensors", tmp_path / "o.safetensors", [(Adapter(FLUX, layers), 1.0)], FLUX
    )
    out = load_file(tmp_path / "o.safetensors")
    linear1 = base["single_blocks.0.linear1.weight"]
    torch.testing.assert_close(
        out["single_blocks.0.linear1.weight"][36:], merge_weight(mlp, linear1[36:])
    )
    key = "final_layer.adaLN_modulation.1.weight"
    torch.testing.assert_close(out[key], base[key] + delta(norm).roll(12, 0))


def test_an_adapter_that_does_not_fit_is_refused(tmp_path):
    model, out = tmp_path / "m.safetensors", tmp_path / "o.safetensors"
    save_file(wan_weights(), model)
    missing = Adapter(WAN, {LayerPath(None, "blocks.9.attn1.to_q"): make_lora(24, 24, generator())})
    with pytest.raises(AdapterError, match=r"no weight for blocks\.9\.attn1\.to_q"):
        merge_into(model, out, [(missing, 1.0)], WAN)
    wide = Adapter(WAN, {LayerPath(None, "blocks.0.attn1.to_q"): make_lora(32, 24, generator())})
    with pytest.raises(
        AdapterError, match=r"24x24 in the model and 32x24 in the adapter, .* Merge it into"
    ):
        merge_into(model, out, [(wide, 1.0)], WAN)
    bias = Adapter(
        WAN, {LayerPath(None, "blocks.0.norm2"): Layer("full", {"diff_b": torch.ones(24)})}
    )
    with pytest.raises(AdapterError, match="no bias"):
        merge_into(model, out, [(bias, 1.0)], WAN)
    assert not out.exists()
    small = {k: t.to(torch.float8_e4m3fn) for k, t in wan_weights().items()}
    save_file(small, model)
    with pytest.raises(AdapterError, match="quantized"):
        merge_into(model, out, [(make_wan(), 1.0)], WAN)


def test_merging_twice_gives_the_same_bytes(tmp_path):
    header = {f"entry {n}": str(n) for n in range(8)}
    save_file(wan_weights(), tmp_path / "m.safetensors", header)
    adapters = [(make_wan("lora"), 1.0)]
    merged = [tmp_path / f"{n}.safetensors" for n in range(4)]
    for out in merged:
        merge_into(tmp_path / "m.safetensors", out, adapters, WAN)
    assert len({out.read_bytes() for out in merged}) == 1
    assert read_tensors(merged[0])[1] == header


def test_several_adapters_are_rounded_once(tmp_path):
    base = wan_weights(dtype=torch.bfloat16)
    save_file(base, tmp_path / "m.safetensors")
    adapters = [(make_wan(seed=seed), 0.01) for seed in range(4)]
    merge_into(tmp_path / "m.safetensors", tmp_path / "out.safetensors", adapters, WAN)
    out = load_file(tmp_path / "out.safetensors")
    for module in wan_modules():
        key = key_of(module, "diffusers")
        changes = [s * delta(one.layers[LayerPath(None, module)]) for one, s in adapters]
        exact = base[key].float() + torch.stack(changes).sum(0)
        assert (out[key].float() - exact).abs().max() <= exact.abs().max() / 256, key
        same = out[key] == exact.bfloat16()
        assert same.float().mean() > 0.99, key  # sums in another order round a few differently


def test_models_that_cannot_be_opened_are_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"has no \.safetensors"):
        open_model(tmp_path, WAN)
    save_file({"x.weight": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(AdapterError, match="another model"):
        open_model(tmp_path, WAN)
    (tmp_path / "m.safetensors").write_bytes(b"short")
    with pytest.raises(AdapterError, match="cannot be read"):
        open_model(tmp_path, WAN)


def test_a_folder_with_duplicate_weights_is_refused(tmp_path):
    save_file(wan_weights(), tmp_path / "model.safetensors")
    save_file(wan_weights(dtype=torch.float16), tmp_path / "model.fp16.safetensors")
    with pytest.raises(AdapterError, match=r"model\.fp16\.safetensors.* are the same weight"):
        open_model(tmp_path, WAN)


@pytest.mark.parametrize("naming", ["original", "diffusers"])
def test_a_merged_adapter_is_extracted_again(naming, tmp_path):
    base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    save_file(wan_weights(naming), base)
    adapter = make_wan(alpha=2.0)
    merge_into(base, tuned, [(adapter, 1.0)], WAN)
    found = extract_lora(base, tuned, WAN, 4, generator(), keep_rest=False)
    assert found.loss.worst < 1e-2
    assert found.left_out == ()
    assert set(found.adapter.layers) == set(adapter.layers)
    for place, layer in adapter.layers.items():
        torch.testing.assert_close(
            delta(found.adapter.layers[place]), delta(layer), rtol=1e-3, atol=1e-3
        )


def test_norms_and_biases_are_reported_or_kept(tmp_path):
    base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    weights = wan_weights()
    save_file(weights, base)
    merge_into(base, tuned, [(make_wan("full"), 1.0)], WAN)
    changed = load_file(tuned)
    changed["blocks.0.norm2.weight"] += 1
    save_file(changed, tuned)
    found = extract_lora(base, tuned, WAN, 4, generator(), keep_rest=False)
    assert len(found.left_out) == 21
    assert found.loss.worst > 0.1
    kept = extract_lora(base, tuned, WAN, 24, generator(), keep_rest=True)
    assert kept.left_out == ()
    out = tmp_path / "out.safetensors"
    merge_into(base, out, [(kept.adapter, 1.0)], WAN)
    for key, tensor in load_file(out).items():
        torch.testing.assert_close(tensor, changed[key], rtol=1e-3, atol=1e-3)


def test_a_bare_parameter_is_left_out_of_the_lora(tmp_path):
    base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    table = {"blocks.0.scale_shift_table": torch.zeros(1, 6, 24)}
    save_file(wan_weights() | table, base)
    merge_into(base, tuned, [(make_wan(), 1.0)], WAN)
    save_file(load_file(tuned) | {name: tensor + 1 for name, tensor in table.items()}, tuned)
    found = extract_lora(base, tuned, WAN, 4, generator(), keep_rest=False)
    assert found.left_out == tuple(table)
    kept = extract_lora(base, tuned, WAN, 4, generator(), keep_rest=True)
    layer = kept.adapter.layers[LayerPath(None, "blocks.0.scale_shift_table")]
    assert torch.equal(layer.tensors["diff"], torch.ones(1, 6, 24))


def test_extraction_needs_models_of_the_same_shape_and_naming(tmp_path):
    base, other = tmp_path / "base.safetensors", tmp_path / "other.safetensors"
    save_file(wan_weights(), base)
    with pytest.raises(AdapterError, match="nothing to extract"):
        extract_lora(base, base, WAN, 4, generator(), keep_rest=False)
    save_file(wan_weights("original"), other)
    with pytest.raises(AdapterError, match="the same naming"):
        extract_lora(base, other, WAN, 4, generator(), keep_rest=False)
    wide = {k: torch.zeros(2, *t.shape[1:]) if t.dim() > 1 else t for k, t in wan_weights().items()}
    save_file(wide, other)
    with pytest.raises(AdapterError, match="another shape"):
        extract_lora(base, other, WAN, 4, generator(), keep_rest=False)


@pytest.mark.parametrize("shorter", ["base", "tuned"])
def test_extraction_needs_the_same_weights_in_both_models(shorter, tmp_path):
    """With a single shard of a model, the changes in the other shards would be lost silently."""
    paths = {name: tmp_path / f"{name}.safetensors" for name in ("base", "tuned")}
    for seed, path in enumerate(paths.values()):
        save_file(wan_weights(seed=seed), path)
    whole = load_file(paths[shorter])
    save_file({k: t for k, t in whole.items() if "blocks.0.attn1" not in k}, paths[shorter])
    expected = r"8 weights are in only one of the models.*blocks\.0\.attn1"
    with pytest.raises(AdapterError, match=expected):
        extract_lora(paths["base"], paths["tuned"], WAN, 4, generator(), keep_rest=False)


def test_extraction_from_a_fused_model_gives_fused_layers(tmp_path):
    base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    save_file(flux_original(), base)
    norm = make_lora(24, 12, generator(1))
    adapter = Adapter(FLUX, {LayerPath(None, "norm_out.linear"): norm})
    merge_into(base, tuned, [(adapter, 1.0)], FLUX)
    found = extract_lora(base, tuned, FLUX, 4, generator(), keep_rest=False)
    torch.testing.assert_close(
        delta(found.adapter.layers[LayerPath(None, "norm_out.linear")]),
        delta(norm),
        rtol=1e-3,
        atol=1e-3,
    )
