import pytest
import torch
from adapter_examples import FLUX, TABLES, WAN, make_full, make_loha, make_lokr, make_lora, make_wan
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.adapters.files.keys import LayerPath
from gracetune.adapters.files.layers import Adapter, Layer, delta
from gracetune.adapters.files.lowrank import combine_adapters, convert_to_lora, factorize
from gracetune.errors import AdapterError

PLACE = LayerPath(None, "blocks.0.attn1.to_q")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def one(layer, place=PLACE):
    return Adapter(WAN, {place: layer})


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([None, 1.0, 3.0]), st.floats(-2, 2)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_loras_add_up_exactly(parts):
    given_ = [
        (one(make_lora(10, 8, generator(i), rank, alpha)), strength)
        for i, (rank, alpha, strength) in enumerate(parts)
    ]
    made, cut = combine_adapters(given_, None, generator())
    assert cut is None
    expected = sum(strength * delta(adapter.layers[PLACE]) for adapter, strength in given_)
    torch.testing.assert_close(delta(made.layers[PLACE]), expected, rtol=1e-4, atol=1e-4)
    assert made.layers[PLACE].tensors["down"].shape[0] == sum(rank for rank, _, _ in parts)


def test_a_truncated_sum_is_optimal_and_reports_its_loss():
    adapters = [(one(make_lora(20, 16, generator(i), 4)), 1.0) for i in range(3)]
    made, cut = combine_adapters(adapters, 5, generator())
    whole = sum(delta(adapter.layers[PLACE]) for adapter, _ in adapters)
    u, s, v = torch.linalg.svd(whole, full_matrices=False)
    best = (u[:, :5] * s[:5]) @ v[:5]
    torch.testing.assert_close(delta(made.layers[PLACE]), best, rtol=1e-3, atol=1e-3)
    assert cut.worst == pytest.approx(float((whole - best).norm() / whole.norm()), rel=1e-3)
    assert cut.worst_at == PLACE.module


def test_a_sufficient_rank_loses_nothing():
    adapters = [(one(make_lora(20, 16, generator(i), 4)), 1.0) for i in range(3)]
    _, cut = combine_adapters(adapters, 12, generator())
    assert cut.worst == 0.0
    _, cut = combine_adapters(adapters[:1], 3, generator())
    assert cut.worst > 0.1


def test_algorithms_other_than_lora_need_a_rank():
    pair = [(one(make_loha(12, 8, generator())), 1.0), (one(make_lora(12, 8, generator(1))), 0.5)]
    with pytest.raises(AdapterError, match=r"lora and loha.*--rank|loha and lora.*--rank"):
        combine_adapters(pair, None, generator())
    made, cut = combine_adapters(pair, 8, generator())
    whole = sum(strength * delta(adapter.layers[PLACE]) for adapter, strength in pair)
    torch.testing.assert_close(delta(made.layers[PLACE]), whole, rtol=1e-3, atol=1e-3)
    assert cut.worst < 1e-3


def test_full_matrices_and_biases_add_up():
    pair = [(one(make_full(6, 4, generator(i))), 0.5) for i in (1, 2)]
    made, _ = combine_adapters(pair, None, generator())
    layer = made.layers[PLACE]
    assert layer.algorithm == "full"
    for role in ("diff", "diff_b"):
        expected = sum(0.5 * adapter.layers[PLACE].tensors[role] for adapter, _ in pair)
        torch.testing.assert_close(layer.tensors[role], expected)
    cut_made, _ = combine_adapters(pair, 4, generator())
    assert cut_made.layers[PLACE].algorithm == "lora"
    assert "diff_b" in cut_made.layers[PLACE].tensors


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("order", [1, -1])
def test_a_change_of_the_bias_alone_is_added_to_a_lora(rank, order):
    lora, bias = make_lora(6, 4, generator()), torch.arange(6.0)
    pair = [(one(lora), 0.5), (one(Layer("full", {"diff_b": bias})), 2.0)][::order]
    layer = combine_adapters(pair, rank, generator())[0].layers[PLACE]
    torch.testing.assert_close(delta(layer), 0.5 * delta(lora))
    assert torch.equal(layer.tensors["diff_b"], 2 * bias)
    other = (one(Layer("full", {"diff_b": torch.zeros(5)})), 1.0)
    with pytest.raises(AdapterError, match=r"the bias of .* is 6 and 5 in the files"):
        combine_adapters([pair[max(0, order)], other], None, generator())


def test_modules_in_only_one_file_are_kept():
    other = LayerPath(None, "blocks.0.attn1.to_k")
    pair = [
        (one(make_lora(6, 4, generator())), 1.0),
        (one(make_lora(6, 4, generator(1)), other), 2.0),
    ]
    made, _ = combine_adapters(pair, None, generator())
    assert set(made.layers) == {PLACE, other}
    torch.testing.assert_close(delta(made.layers[other]), 2 * delta(pair[1][0].layers[other]))


def test_adapters_that_cannot_be_combined_are_refused():
    flux = Adapter(TABLES["flux"], {PLACE: make_lora(4, 4, generator())})
    with pytest.raises(AdapterError, match="flux adapter cannot be combined"):
        combine_adapters([(one(make_lora(4, 4, generator())), 1.0), (flux, 1.0)], None, generator())
    pair = [(one(make_lora(4, 4, generator())), 1.0), (one(make_lora(8, 4, generator())), 1.0)]
    with pytest.raises(AdapterError, match="4x4 and 8x4"):
        combine_adapters(pair, None, generator())
    dora = one(make_lora(4, 4, generator(), dora=True))
    with pytest.raises(AdapterError, match="--into MODEL"):
        combine_adapters([(dora, 1.0)], None, generator())


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("rank", [None, 12])
def test_a_fused_projection_and_its_parts_add_up(rank, order):
    """The files of two tools, of which one has q, k and v as one module."""
    names = [f"transformer_blocks.0.attn.to_{part}" for part in ("q", "k", "v")]
    whole = make_lora(36, 12, generator(), 4, 2.0)
    part = make_lora(12, 12, generator(1), 4)
    fused = Adapter(FLUX, {LayerPath(None, "transformer_blocks.0.attn.to_qkv"): whole})
    split = Adapter(FLUX, {LayerPath(None, names[1]): part})
    made, _ = combine_adapters([(fused, 1.0), (split, 0.5)][::order], rank, generator())
    assert {place.module for place in made.layers} == set(names)
    for name, rows in zip(names, delta(whole).split(12), strict=True):
        expected = rows + (0.5 * delta(part) if name == names[1] else 0)
        found = delta(made.layers[LayerPath(None, name)])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_lokr_that_cannot_be_split_is_added_to_parts_with_a_rank():
    whole = Layer("lokr", {"lokr_w1": torch.randn(2, 4), "lokr_w2": torch.randn(36, 6)})
    fused = Adapter(FLUX, {LayerPath(None, "transformer_blocks.0.attn.to_qkv"): whole})
    place = LayerPath(None, "transformer_blocks.0.attn.to_v")
    part = make_lora(24, 24, generator(), 4)
    pair = [(fused, 1.0), (Adapter(FLUX, {place: part}), 0.5)]
    made, _ = combine_adapters(pair, 24, generator())
    expected = delta(whole)[48:] + 0.5 * delta(part)
    torch.testing.assert_close(delta(made.layers[place]), expected, rtol=1e-3, atol=1e-3)
    assert len(made.layers) == 3
    with pytest.raises(AdapterError, match="--rank when merging"):
        combine_adapters(pair, None, generator())


def test_fused_projections_of_other_blocks_stay_whole():
    place = LayerPath(None, "transformer_blocks.1.attn.to_qkv")
    part = LayerPath(None, "transformer_blocks.0.attn.to_q")
    both = [
        (Adapter(FLUX, {place: make_lokr(36, 12, generator())}), 1.0),
        (Adapter(FLUX, {part: make_lora(12, 12, generator())}), 1.0),
    ]
    made, _ = combine_adapters(both, 8, generator())
    assert set(made.layers) == {place, part}


def test_fused_projections_alone_stay_whole():
    place = LayerPath(None, "transformer_blocks.0.attn.to_qkv")
    pair = [(Adapter(FLUX, {place: make_loha(36, 12, generator(i))}), 1.0) for i in (1, 2)]
    made, _ = combine_adapters(pair, 8, generator())
    assert set(made.layers) == {place}


def test_a_bare_parameter_is_never_made_a_lora():
    place = LayerPath(None, "blocks.0.scale_shift_table")
    pair = [(one(Layer("full", {"diff": torch.randn(6, 24)}), place), 1.0) for _ in range(2)]
    made, _ = combine_adapters(pair, 2, generator())
    total = sum(adapter.layers[place].tensors["diff"] for adapter, _ in pair)
    torch.testing.assert_close(made.layers[place].tensors["diff"], total)
    made, _ = convert_to_lora(pair[0][0], 2, generator())
    assert made.layers[place].algorithm == "full"


def test_a_dora_is_not_converted_to_a_smaller_lora():
    with pytest.raises(AdapterError, match=r"to_q has magnitudes \(DoRA\).*--into MODEL"):
        convert_to_lora(one(make_lora(6, 4, generator(), 3, dora=True)), 2, generator())


@pytest.mark.parametrize("kind", ["loha", "lokr", "lokr-whole", "full"])
def test_every_algorithm_converts_to_a_lora(kind):
    adapter = make_wan(kind, num_blocks=1)
    made, cut = convert_to_lora(adapter, 24, generator())
    assert {layer.algorithm for layer in made.layers.values()} == {"lora"}
    assert cut.worst < 1e-3
    for place, layer in adapter.layers.items():
        torch.testing.assert_close(delta(made.layers[place]), delta(layer), rtol=1e-2, atol=1e-2)
    _, coarse = convert_to_lora(adapter, 1, generator())
    assert coarse.worst > 0.1


def test_small_loras_and_changes_without_a_rank_are_kept():
    small = make_lora(6, 4, generator(), rank=2)
    norm = Layer("full", {"diff": torch.ones(6)})
    other = LayerPath(None, "blocks.0.norm2")
    made, cut = convert_to_lora(Adapter(WAN, {PLACE: small, other: norm}), 3, generator())
    assert made.layers[PLACE] is small
    assert made.layers[other] is norm
    assert cut.worst == 0.0


def test_a_convolution_keeps_its_kernel():
    change = torch.randn(6, 4, 3, 3)
    layer, lost = factorize(change, 6, generator())
    assert layer.tensors["down"].shape == (6, 4, 3, 3)
    assert layer.tensors["up"].shape == (6, 6, 1, 1)
    torch.testing.assert_close(delta(layer), change, rtol=1e-4, atol=1e-4)
    assert lost < 1e-3


def test_the_randomized_svd_is_as_good_as_the_full_one():
    noise = torch.randn(1100, 1200, generator=generator(1))
    matrix = torch.randn(1100, 6, generator=generator(2)) @ torch.randn(
        6, 1200, generator=generator(3)
    )
    layer, lost = factorize(matrix + 0.01 * noise, 6, generator())
    singular = torch.linalg.svdvals(matrix + 0.01 * noise)
    best = float(singular[6:].norm() / singular.norm())
    assert lost == pytest.approx(best, rel=0.01)
    again, _ = factorize(matrix + 0.01 * noise, 6, generator())
    assert torch.equal(layer.tensors["up"], again.tensors["up"])


def test_a_zero_change_loses_nothing():
    layer, lost = factorize(torch.zeros(4, 4), 2, generator())
    assert lost == 0.0
    assert not delta(layer).any()


def test_a_lokr_is_truncated_at_its_own_rank():
    lokr = make_lokr(16, 16, generator(), "w2", rank=1, factor=4)  # rank 4 x 1
    made, cut = convert_to_lora(one(lokr), 4, generator())
    assert cut.worst < 1e-3
    torch.testing.assert_close(delta(made.layers[PLACE]), delta(lokr), rtol=1e-3, atol=1e-3)
