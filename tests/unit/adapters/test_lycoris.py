"""LoKr matmuls agree with the full matrix and with LyCORIS."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gracetune.adapters.compute import lycoris
from gracetune.adapters.compute.lycoris import (
    AdaptedLayer,
    LokrLinear,
    kron_linear,
    low_rank_kron_linear,
)
from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection
from gracetune.offload.checkpointing import MATMUL_OPS


def random_tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rows", [(), (5,), (2, 3)])
@pytest.mark.parametrize(("up", "u", "down", "v"), [(4, 4, 6, 6), (2, 8, 3, 5), (8, 2, 5, 3)])
def test_kron_linear_multiplies_by_the_kronecker_product(rows, up, u, down, v):
    w1, w2, x = (
        random_tensor(up, u),
        random_tensor(down, v, seed=1),
        random_tensor(*rows, u * v, seed=2),
    )
    torch.testing.assert_close(kron_linear(x, w1, w2), x @ torch.kron(w1, w2).T)


@pytest.mark.parametrize("most", [0, 256])
@pytest.mark.parametrize("rows", [(), (2, 3)])
def test_low_rank_kron_linear_is_the_same_with_and_without_fusing(monkeypatch, rows, most):
    monkeypatch.setattr(lycoris, "MAX_FUSED_ROWS", most)
    w1, a, b = random_tensor(4, 3), random_tensor(7, 2, seed=1), random_tensor(2, 5, seed=2)
    x = random_tensor(*rows, 15, seed=3)
    torch.testing.assert_close(low_rank_kron_linear(x, w1, a, b), x @ torch.kron(w1, a @ b).T)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(24, 36)
        self.outer = nn.Linear(36, 24, bias=False)

    def forward(self, x):
        return self.outer(self.inner(x).tanh())


def adapted(**settings):
    torch.manual_seed(0)
    model = Net()
    section = AdapterSection(kind="lokr", **settings)
    add_adapter({"": model}, section, ["inner", "outer"], seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def outputs_and_gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 2, "factor": 4, "alpha": 3},
        {"rank": 2},
        {"rank": 2, "factor": 2, "full_matrix": True},
        {"rank": 2, "factor": 4, "overrides": {"inner": {"rank": 1}}},
    ],
)
def test_gradients_match_lycoris(settings):
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))
    ours, theirs = adapted(**settings), adapted(**settings)
    for name in ("inner", "outer"):
        layer = theirs.get_submodule(name)
        assert type(layer) is LokrLinear
        layer.forward = AdaptedLayer.forward.__get__(layer)
    for one, other in zip(
        outputs_and_gradients(ours, x), outputs_and_gradients(theirs, x), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # the compiler reads attributes that torch warns about
def test_a_lokr_block_compiles_to_one_graph():
    model = adapted(rank=2, factor=4)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    expected = outputs_and_gradients(model, x)
    model.zero_grad()
    found = outputs_and_gradients(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_bf16_layers_train_fp32_weights():
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    expected = outputs_and_gradients(adapted(rank=2, factor=4), x)
    model = adapted(rank=2, factor=4)
    for layer in (model.inner, model.outer):
        layer.base_layer.to(torch.bfloat16)
    found = outputs_and_gradients(model, x.bfloat16())
    assert found[0].dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in found[2:])
    for one, other in zip(found, expected, strict=True):
        assert functional.cosine_similarity(one.float().flatten(), other.flatten(), 0) > 0.999


def test_fp32_layers_under_autocast_are_not_fused():
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    model = adapted(rank=2, factor=4)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32


def test_checkpointing_saves_the_fused_matmul():
    assert torch.ops.gracetune.lokr_linear.default.name().split(".")[0] in MATMUL_OPS


def saved_nbytes(model, x):
    """Return the bytes that autograd saves besides weights, each storage counted once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(nbytes for nbytes, _ in kept.values())


def test_a_dropout_of_zero_does_not_copy():
    model = adapted(rank=2, factor=4)
    assert isinstance(model.inner.dropout, nn.Identity)
    assert adapted(rank=2, dropout=0.25).inner.dropout.p == 0.25


def test_saved_tensors_for_backward_are_narrow():
    layer = nn.Linear(512, 512)
    holder = nn.ModuleDict({"layer": layer})
    add_adapter({"": holder}, AdapterSection(kind="lokr", rank=4, factor=4), ["layer"], seed=0)
    x = torch.randn(4096, 512, requires_grad=True)
    ours = saved_nbytes(holder["layer"], x)
    holder["layer"].forward = AdaptedLayer.forward.__get__(holder["layer"])
    assert ours < 1.1 * x.nbytes
    assert saved_nbytes(holder["layer"], x) > 1.9 * x.nbytes
