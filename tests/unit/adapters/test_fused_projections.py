"""Splitting and joining fused projections keeps dW, and where possible every bit."""

from dataclasses import replace

import pytest
import torch
from adapter_examples import (
    FLUX,
    TABLES,
    make_full,
    make_loha,
    make_lokr,
    make_lora,
    same,
    same_layer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.adapters.files.convert import export_tensors, import_tensors
from gracetune.adapters.files.fused_projections import (
    join_fused,
    select_rows,
    split_fused,
    swap_halves,
)
from gracetune.adapters.files.keys import LayerPath, get_format
from gracetune.adapters.files.layers import Adapter, Layer, delta, merge_weight, scale_of
from gracetune.errors import AdapterError

QKV = [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"]
SINGLE = [f"single_transformer_blocks.0.attn.to_{x}" for x in "qkv"] + [
    "single_transformer_blocks.0.proj_mlp"
]
WHOLE = LayerPath(None, "transformer_blocks.0.attn.to_qkv")
HIDDEN = 12


def adapter_of(layers):
    return Adapter(FLUX, {LayerPath(None, name): layer for name, layer in layers.items()})


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@st.composite
def loras(draw):
    """Draw LoRAs on some parts of a projection, with any ranks and alphas."""
    names, outs = draw(st.sampled_from([(QKV, [12] * 3), (SINGLE, [12] * 3 + [48])]))
    kept = draw(st.sets(st.sampled_from(names), min_size=1))
    same_alpha = draw(st.booleans())
    layers = {}
    for name, out in zip(names, outs, strict=True):
        if name in kept:
            rank = draw(st.integers(1, 5))
            scale = 1.0 if same_alpha else draw(st.sampled_from([0.5, 1.0, 2.0]))
            alpha = None if scale == 1.0 else scale * rank
            seed = draw(st.integers(0, 1000))
            layers[name] = make_lora(out, HIDDEN, generator(seed), rank, alpha)
    return adapter_of(layers)


@given(loras())
@settings(max_examples=60, deadline=None)
def test_loras_joined_and_split_again_compute_the_same(adapter):
    joined = join_fused(adapter)
    assert len(joined.layers) == 1
    back = split_fused(joined)
    assert set(back.layers) == set(adapter.layers)
    for place, layer in adapter.layers.items():
        torch.testing.assert_close(delta(back.layers[place]), delta(layer))
    if len({scale_of(layer) for layer in adapter.layers.values()}) == 1:
        assert same(adapter, back)  # with one scale, every bit is restored


@given(loras())
@settings(max_examples=30, deadline=None)
def test_a_fused_layer_has_the_rows_of_its_parts(adapter):
    ((place, layer),) = join_fused(adapter).layers.items()
    (fused,) = [one for one in FLUX.fused if one.whole.format(0) == place.module]
    rows = []
    for part, share in fused.parts:
        found = adapter.layers.get(LayerPath(None, part.format(0)))
        rows.append(torch.zeros(12 * share, HIDDEN) if found is None else delta(found))
    torch.testing.assert_close(delta(layer), torch.cat(rows))


@pytest.mark.parametrize("rank", [3, 4, 6])
def test_parts_of_a_fused_lora_share_its_down_factor(rank):
    whole = make_lora(3 * HIDDEN, HIDDEN, generator(), rank, alpha=2.0)
    adapter = Adapter(FLUX, {WHOLE: whole})
    parts = split_fused(adapter)
    for i, name in enumerate(QKV):
        expected = delta(whole)[i * HIDDEN : (i + 1) * HIDDEN]
        torch.testing.assert_close(delta(parts.layers[LayerPath(None, name)]), expected)
    assert same(join_fused(parts), adapter)  # shared `down`: the rank does not grow


def test_parts_with_the_same_down_join_without_a_larger_rank():
    parts = {name: make_lora(HIDDEN, HIDDEN, generator(i)) for i, name in enumerate(QKV)}
    down = parts[QKV[0]].tensors["down"]
    parts = {n: Layer("lora", {**x.tensors, "down": down}) for n, x in parts.items()}
    (layer,) = join_fused(adapter_of(parts)).layers.values()
    assert layer.tensors["down"].shape == down.shape


@pytest.mark.parametrize("make", [make_loha, make_full])
def test_loha_and_full_matrices_are_split_by_rows(make):
    whole = make(3 * HIDDEN, HIDDEN, generator())
    parts = split_fused(Adapter(FLUX, {WHOLE: whole}))
    for i, name in enumerate(QKV):
        expected = delta(whole)[i * HIDDEN : (i + 1) * HIDDEN]
        torch.testing.assert_close(delta(parts.layers[LayerPath(None, name)]), expected)
    assert same_layer(join_fused(parts).layers[WHOLE], whole)


@pytest.mark.parametrize("kind", ["whole", "w2", "both"])
def test_a_lokr_is_split_between_its_blocks(kind):
    whole = make_lokr(36, 24, generator(), kind, alpha=3.0, factor=6)  # 6 blocks of 6 rows
    parts = split_fused(Adapter(FLUX, {WHOLE: whole}))
    for i, name in enumerate(QKV):
        expected = delta(whole)[i * HIDDEN : (i + 1) * HIDDEN]
        torch.testing.assert_close(delta(parts.layers[LayerPath(None, name)]), expected)
    assert same_layer(join_fused(parts).layers[WHOLE], whole)


def test_a_lokr_of_one_block_is_split_inside_the_block():
    tensors = {"lokr_w1": torch.randn(1, 2), "lokr_w2": torch.randn(36, 6)}
    whole = Layer("lokr", tensors)
    parts = split_fused(Adapter(FLUX, {WHOLE: whole}))
    torch.testing.assert_close(delta(parts.layers[LayerPath(None, QKV[1])]), delta(whole)[12:24])


def test_a_lokr_whose_blocks_cross_the_parts_is_refused():
    whole = make_lokr(36, 24, generator(), "whole", factor=4)  # blocks of 9 rows
    with pytest.raises(AdapterError, match=r"blocks of 9 rows.*--lora-rank") as caught:
        split_fused(Adapter(FLUX, {WHOLE: whole}))
    assert caught.value.kind == "not-exact"
    parts = {name: make_lokr(12, 12, generator(i), "whole") for i, name in enumerate(QKV)}
    with pytest.raises(AdapterError, match="no factor in common"):
        join_fused(adapter_of(parts))


def test_magnitudes_are_split_with_their_rows():
    base = torch.randn(36, HIDDEN)
    whole = make_lora(36, HIDDEN, generator(), dora=True)
    parts = split_fused(Adapter(FLUX, {WHOLE: whole}))
    rows = [
        merge_weight(parts.layers[LayerPath(None, n)], base[i * 12 : i * 12 + 12])
        for i, n in enumerate(QKV)
    ]
    torch.testing.assert_close(torch.cat(rows), merge_weight(whole, base))
    assert same_layer(join_fused(parts).layers[WHOLE], whole)


def test_magnitudes_per_column_or_of_some_parts_are_refused():
    by_columns = Layer(
        "lora", {**make_lora(36, HIDDEN, generator()).tensors, "dora": torch.ones(1, HIDDEN)}
    )
    with pytest.raises(AdapterError, match="span all rows of a column"):
        split_fused(Adapter(FLUX, {WHOLE: by_columns}))
    dora = make_lora(12, HIDDEN, generator(), dora=True)
    with pytest.raises(AdapterError, match="one part is missing"):
        join_fused(adapter_of({QKV[0]: dora}))
    plain = make_lora(12, HIDDEN, generator())
    with pytest.raises(AdapterError, match="only some"):
        join_fused(adapter_of({QKV[0]: dora, QKV[1]: plain, QKV[2]: plain}))


@pytest.mark.parametrize("make", [make_lora, make_full])
@pytest.mark.parametrize("biased", [QKV, QKV[:1]])
def test_parts_with_biases_join_and_missing_parts_are_zeros(make, biased):
    parts = {}
    for i, name in enumerate(QKV[:2]):
        tensors = dict(make(HIDDEN, HIDDEN, generator(i)).tensors)
        tensors.pop("diff_b", None)
        if name in biased:
            tensors["diff_b"] = torch.randn(HIDDEN, generator=generator(i))
        parts[name] = Layer("lora" if make is make_lora else "full", tensors)
    whole = join_fused(adapter_of(parts)).layers[WHOLE]
    zeros = torch.zeros(HIDDEN, HIDDEN)
    expected = [delta(parts[name]) if name in parts else zeros for name in QKV]
    torch.testing.assert_close(delta(whole), torch.cat(expected))
    biases = [
        parts[name].tensors.get("diff_b", zeros[0]) if name in parts else zeros[0] for name in QKV
    ]
    torch.testing.assert_close(whole.tensors["diff_b"], torch.cat(biases))


def test_a_projection_of_another_shape_is_refused():
    odd = make_lora(35, HIDDEN, generator())
    with pytest.raises(AdapterError, match="another shape"):
        split_fused(Adapter(FLUX, {WHOLE: odd}))


@pytest.mark.parametrize("change", [split_fused, join_fused])
def test_an_adapter_with_a_projection_and_a_part_of_it_is_refused(change):
    both = adapter_of(
        {WHOLE.module: make_lora(36, 12, generator()), QKV[1]: make_lora(12, 12, generator())}
    )
    with pytest.raises(AdapterError, match=r"attn\.to_qkv and .*attn\.to_k, which is a part of it"):
        change(both)


def test_scale_and_shift_are_swapped_between_the_namings():
    name = LayerPath(None, "norm_out.linear")
    layer = make_lora(8, HIDDEN, generator())
    adapter = Adapter(FLUX, {name: layer})
    swapped = swap_halves(adapter).layers[name]
    torch.testing.assert_close(delta(swapped), delta(layer).roll(4, 0))
    assert same(swap_halves(swap_halves(adapter)), adapter)
    original = export_tensors(adapter, get_format("comfyui"))
    up = original["diffusion_model.final_layer.adaLN_modulation.1.lora_B.weight"]
    assert torch.equal(up, layer.tensors["up"].roll(4, 0))
    assert same(import_tensors(original, {}, TABLES, FLUX), adapter)


def test_a_bias_is_split_by_rows():
    layer = make_full(36, HIDDEN, generator())
    part = select_rows("x", layer, [(12, 24)])
    assert torch.equal(part.tensors["diff_b"], layer.tensors["diff_b"][12:24])


def test_a_bias_next_to_block_diagonal_loras_is_kept():
    parts = adapter_of({name: make_lora(HIDDEN, HIDDEN, generator(), 2) for name in QKV[:2]})
    ((place, whole),) = join_fused(parts).layers.items()
    bias = torch.arange(3.0 * HIDDEN)
    beside = replace(whole, tensors={**whole.tensors, "diff_b": bias})
    back = split_fused(Adapter(FLUX, {place: beside}))
    found = [back.layers[LayerPath(None, name)].tensors["diff_b"] for name in QKV]
    assert torch.equal(torch.cat(found), bias)
    changes = [delta(back.layers[LayerPath(None, name)]) for name in QKV]
    torch.testing.assert_close(torch.cat(changes), delta(whole))


@pytest.mark.parametrize(
    "form", ["comfyui", "kohya", "diffusers", "lycoris", "onetrainer", "ai-toolkit-live"]
)
def test_a_flux_lora_is_read_back_from_every_naming(form):
    names = [one.format(0) for one in FLUX.block_linears] + ["x_embedder", "proj_out"]
    layers = {}
    for i, name in enumerate(names):
        out = 48 if name.endswith(("proj_mlp", "net.0.proj")) else 12
        into = 60 if name.endswith("blocks.0.proj_out") else 48 if name.endswith("net.2") else 12
        layers[name] = make_lora(out, into, generator(i))
    adapter = adapter_of(layers)
    tensors = export_tensors(adapter, get_format(form))
    back = split_fused(import_tensors(tensors, {}, TABLES))
    assert same(adapter, back)
    assert back.format == form
