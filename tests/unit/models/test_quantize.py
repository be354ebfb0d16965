import pytest
import torch
from torch import nn

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection
from gracetune.errors import ConfigError
from gracetune.models import quantize
from gracetune.models.quantize import check_quantizable, quantize_blocks

KINDS = ("fp8", "int8", "nf4")


def skip_without_package(kind):
    """The packages are not installed by default, because they slow down importing diffusers."""
    pytest.importorskip(quantize.PACKAGES[kind])


MAX_ERRORS = {"fp8": 0.1, "int8": 0.05, "nf4": 0.5}


@pytest.fixture
def model():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False))
    return nn.ModuleDict({"blocks": nn.ModuleList([block]), "head": nn.Linear(64, 8)})


def nbytes(module):
    """Return the stored bytes; quantized tensors keep their data in several tensors."""
    total = 0
    for p in module.parameters():
        names = p.__tensor_flatten__()[0] if type(p.data) is not torch.Tensor else None
        parts = [p] if names is None else [getattr(p, name) for name in names]
        total += sum(part.nbytes for part in parts)
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_blocks_are_smaller_and_nearly_equal(model, kind):
    skip_without_package(kind)
    x = torch.randn(4, 64)
    before, size = model["blocks"][0](x), nbytes(model["blocks"][0])
    head = model["head"].weight
    assert quantize_blocks(list(model["blocks"]), kind) == 2
    after = model["blocks"][0](x)
    assert 0 < (after - before).abs().max() < MAX_ERRORS[kind]
    assert nbytes(model["blocks"][0]) < size * (0.4 if kind != "nf4" else 0.25)
    assert model["head"].weight is head
    assert not any(p.requires_grad for p in model["blocks"].parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter", ["lora", "lokr", "loha", "full"])
def test_adapters_train_on_quantized_weights(model, kind, adapter):
    skip_without_package(kind)
    quantize_blocks(list(model["blocks"]), kind)
    block, x = model["blocks"][0], torch.randn(4, 64)
    before = block(x)
    section = AdapterSection(kind=adapter, rank=2, targets=("0", "2"))
    add_adapter({"": block}, section, (), seed=1)
    torch.testing.assert_close(block(x), before)
    optimizer = torch.optim.SGD([p for p in block.parameters() if p.requires_grad], lr=1.0)
    target = torch.randn(4, 64)
    losses = []
    for _ in range(4):
        loss = (block(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_quantizing_trained_weights_is_refused():
    with pytest.raises(ConfigError, match="without an adapter every weight is trained"):
        check_quantizable("int8", None)
    with pytest.raises(ConfigError, match=r"adapter\.kind is 'dora'"):
        check_quantizable("int8", AdapterSection(kind="dora"))
    check_quantizable("nf4", AdapterSection(kind="lokr"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_named(model, monkeypatch, kind):
    monkeypatch.setitem(quantize.PACKAGES, kind, "no_such_package")
    with pytest.raises(ConfigError, match=rf"'{kind}', which needs the package no_such_package"):
        quantize_blocks(list(model["blocks"]), kind)
