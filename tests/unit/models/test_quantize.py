"""Blocks with quantized linear layers are smaller, nearly equal, and train adapters."""

from contextlib import ExitStack

import pytest
import torch
from fakes.quantization import KINDS, skip_without_package
from torch import nn

from gracetune.adapters.compute import quantized_linear
from gracetune.adapters.compute.quantized_linear import QuantizedLinear
from gracetune.adapters.files.keys import LayerPath, get_table
from gracetune.adapters.files.layers import Adapter, make_layer
from gracetune.adapters.inject import add_adapter, install_adapters
from gracetune.config.schema import AdapterSection
from gracetune.errors import AdapterError, ConfigError
from gracetune.models.quantize import check_quantizable, quantize_blocks

MAX_ERRORS = {"fp8": 0.1, "int8": 0.05, "nf4": 0.5}
WIDTH = 128


@pytest.fixture
def model():
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    )
    return nn.ModuleDict({"blocks": nn.ModuleList([block]), "head": nn.Linear(WIDTH, 8)})


def nbytes(module):
    return sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_blocks_are_smaller_and_nearly_equal(model, kind):
    skip_without_package(kind)
    x = torch.randn(4, WIDTH)
    before, size = model["blocks"][0](x), nbytes(model["blocks"][0])
    head = model["head"].weight
    assert quantize_blocks(list(model["blocks"]), kind) == 2
    after = model["blocks"][0](x)
    assert 0 < (after - before).abs().max() < MAX_ERRORS[kind]
    assert nbytes(model["blocks"][0]) < size * (0.27 if kind != "nf4" else 0.16)
    assert model["head"].weight is head
    assert not any(p.requires_grad for p in model["blocks"].parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_on_the_meta_device_have_the_same_sizes(model, kind):
    """`gracetune plan` counts their bytes, without the package of nf4."""
    meta = nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta"))
    quantize_blocks([meta], kind)
    skip_without_package(kind)
    quantize_blocks(list(model["blocks"]), kind)
    real = model["blocks"][0][0]
    layouts = [[(p.shape, p.dtype) for p in layer.parts] for layer in (real, meta[0])]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", ["lora", "lokr", "loha", "full"])
def test_adapters_train_on_quantized_weights(model, kind, adapter):
    skip_without_package(kind)
    quantize_blocks(list(model["blocks"]), kind)
    block, x = model["blocks"][0], torch.randn(4, WIDTH)
    stored = {name: p.clone() for name, p in block.named_parameters()}
    before = block(x)
    section = AdapterSection(kind=adapter, rank=2, targets=("0", "2.0"))
    add_adapter({"": block}, section, (), seed=1)
    torch.testing.assert_close(block(x), before)
    trained = [p for p in block.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    optimizer = torch.optim.SGD(trained, lr=1.0)
    target = torch.randn(4, WIDTH)
    losses = []
    for _ in range(4):
        loss = (block(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = {n.replace("base_layer.", ""): p for n, p in block.named_parameters()}
    assert all(torch.equal(after[name], values) for name, values in stored.items())


def layer_of(**tensors):
    return make_layer(tensors, {role: f"0.{role}" for role in tensors})


@pytest.mark.parametrize("kind", KINDS)
def test_loras_from_files_are_added_and_other_adapters_refused(model, kind):
    skip_without_package(kind)
    quantize_blocks(list(model["blocks"]), kind)
    block, x = model["blocks"][0], torch.randn(4, WIDTH)
    before, table = block(x), get_table("any", {})
    up, down = torch.randn(WIDTH, 2), torch.randn(2, WIDTH)
    layer = layer_of(up=up, down=down, alpha=torch.tensor(2.0))
    path = LayerPath(None, "0")
    with ExitStack() as undo:
        install_adapters({"": block}, [(Adapter(table, {path: layer}), 1.0)], undo)
        torch.testing.assert_close(block[0](x), block[0].base_layer(x) + x @ down.t() @ up.t())
    assert torch.equal(block(x), before)
    full = layer_of(diff=torch.randn(WIDTH, WIDTH))
    with pytest.raises(AdapterError, match="0 is quantized, and this kind of adapter"):
        install_adapters({"": block}, [(Adapter(table, {path: full}), 1.0)], ExitStack())
    narrow = layer_of(up=up[1:], down=down, alpha=torch.tensor(2.0))
    with pytest.raises(
        AdapterError,
        match=r"is 128x128 in the model and 127x128 in the adapter, .* Set model\.path",
    ):
        install_adapters({"": block}, [(Adapter(table, {path: narrow}), 1.0)], ExitStack())


def test_layers_whose_weight_other_code_reads_are_not_quantized():
    attention = nn.MultiheadAttention(WIDTH, 2)  # it passes its output layer's weight to a function
    assert quantize_blocks([attention], "int8") == 0
    assert not any(isinstance(module, QuantizedLinear) for module in attention.modules())


def test_quantizing_trained_weights_is_refused():
    with pytest.raises(ConfigError, match="without an adapter every weight is trained"):
        check_quantizable("int8", None)
    with pytest.raises(ConfigError, match=r"adapter\.kind is 'dora'"):
        check_quantizable("int8", AdapterSection(kind="dora"))
    check_quantizable("nf4", AdapterSection(kind="lokr"))


def test_a_missing_package_is_named(model, monkeypatch):
    def refuse(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(quantized_linear, "import_module", refuse)
    with pytest.raises(ConfigError, match=r"'nf4', which needs the package bitsandbytes \(No mod"):
        quantize_blocks(list(model["blocks"]), "nf4")
