"""Outlier subspaces are found during a forward pass and reduce the error of fp8 layers."""

import copy
import weakref

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from gracetune.adapters.compute import lora_matmul
from gracetune.adapters.compute.fp8_linear import (
    Fp8Conversion,
    Fp8Linear,
    calibration_of,
    convert_to_fp8,
    convert_to_fp8_calibrated,
    convert_to_fp8_like,
)
from gracetune.adapters.compute.fused_lora import fuse_lora
from gracetune.adapters.compute.outlier_subspace import (
    MAX_DIMENSIONS,
    MAX_ROWS,
    InputObserver,
    find_outlier_subspace,
    num_dimensions,
)
from gracetune.errors import GracetuneError

pytestmark = pytest.mark.filterwarnings("ignore")
"""The compiler reads attributes that torch warns about."""

CPU = torch.device("cpu")


def random_tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs_with_outliers(rows, columns, directions=4, seed=1):
    """Return inputs that lie mostly in a few directions, like those of trained models."""
    spread = random_tensor(rows, directions, seed=seed) @ random_tensor(directions, columns, seed=7)
    return spread + 0.1 * random_tensor(rows, columns, seed=seed + 50)


def relative_error(one, other):
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


@pytest.mark.parametrize("columns", [64, 256])
def test_the_subspace_holds_nearly_as_much_energy_as_the_best_one(columns):
    rows = inputs_with_outliers(500, columns, directions=num_dimensions(columns) // 2)
    found = find_outlier_subspace(rows)
    torch.testing.assert_close(found @ found.t(), torch.eye(len(found)), atol=1e-5, rtol=0)
    left = (rows - rows @ found.t() @ found).square().sum()
    best = torch.linalg.svdvals(rows)[len(found) :].square().sum()
    assert left < 1.1 * best
    assert left < 0.01 * rows.square().sum()
    assert torch.equal(found, find_outlier_subspace(rows))


@pytest.mark.parametrize(
    ("columns", "count"), [(16, 8), (96, 24), (128, 32), (5120, MAX_DIMENSIONS)]
)
def test_wider_layers_get_more_dimensions(columns, count):
    assert num_dimensions(columns) == count


@pytest.mark.parametrize("rows", [torch.zeros(4, 32), torch.ones(1, 32)])
def test_rows_of_rank_zero_or_one_give_a_finite_basis(rows):
    found = find_outlier_subspace(rows)
    assert found.shape == (8, 32)
    assert found.isfinite().all()


def layers(bias=True):
    """Return a layer in bf16, in fp8, and in fp8 with the outlier subspace of its input."""
    torch.manual_seed(0)
    exact = nn.Linear(128, 96, bias=bias).requires_grad_(False).bfloat16()
    along = nn.Parameter(
        find_outlier_subspace(inputs_with_outliers(500, 128)).bfloat16(), requires_grad=False
    )
    return exact, Fp8Linear(exact), Fp8Linear(exact, along)


@pytest.mark.parametrize("bias", [True, False])
def test_calibration_reduces_the_error_of_fp8(bias):
    x = inputs_with_outliers(64, 128, seed=2).bfloat16()
    exact, plain_fp8, calibrated = layers(bias)
    lost = [relative_error(layer(x), exact(x)) for layer in (plain_fp8, calibrated)]
    assert lost[0] > 0.02, "rounding to fp8 has a cost"
    assert lost[1] < lost[0] / 4


def test_calibration_does_not_hurt_other_inputs():
    x = random_tensor(64, 128, seed=3).bfloat16()
    exact, plain_fp8, calibrated = layers()
    lost = [relative_error(layer(x), exact(x)) for layer in (plain_fp8, calibrated)]
    assert lost[1] < 1.05 * lost[0]


def test_input_gradients_do_not_depend_on_calibration():
    x, grad = (
        inputs_with_outliers(64, 128, seed=2).bfloat16(),
        random_tensor(64, 96, seed=4).bfloat16(),
    )
    _, plain_fp8, calibrated = layers()
    found = []
    for layer in (plain_fp8, calibrated):
        given = x.clone().requires_grad_()
        layer(given).backward(grad)
        found.append(given.grad)
    assert torch.equal(*found)


class Block(nn.Module):
    """Two layers that share an input, and a third layer after them."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 128), nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(functional.gelu(self.left(x)) * self.right(x))


def model(rank=0, dtype=torch.float32):
    torch.manual_seed(0)
    made = nn.Sequential(Block(), Block()).requires_grad_(False).to(dtype)
    if rank:
        names = ["left", "right", "down"]
        config = LoraConfig(r=rank, target_modules=names, init_lora_weights=False, lora_alpha=4)
        inject_adapter_in_model(config, made)
        for name, parameter in made.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.float()
    return made


def convert_with_samples(blocks, seen):
    return convert_to_fp8_calibrated(lambda: nn.Sequential(*blocks)(seen), list(blocks), CPU)


def test_a_forward_pass_calibrates_all_blocks():
    exact, plain_fp8, calibrated = model(), model(), model()
    assert convert_to_fp8(plain_fp8) == Fp8Conversion(6, 0, uncalibrated=6)
    assert convert_with_samples(calibrated, inputs_with_outliers(512, 64)) == Fp8Conversion(6, 0)
    x = inputs_with_outliers(128, 64, seed=2)
    expected = exact(x)
    lost = [relative_error(made(x), expected) for made in (plain_fp8, calibrated)]
    assert lost[1] < lost[0] / 2
    block = calibrated[0]
    assert block.left.outlier_basis is block.right.outlier_basis, (
        "layers with one input share a parameter"
    )
    assert block.left.outlier_basis is not block.down.outlier_basis
    assert not any(p.requires_grad for p in calibrated.parameters())
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_calibration_runs_with_the_original_layers():
    x, met = random_tensor(4, 64), []
    for made, goes in ((model(), False), (model(), True)):
        made[1].register_forward_pre_hook(lambda _, args: met.append(args[0]))
        if goes:
            convert_with_samples(made, x)
        else:
            made(x)
    assert torch.equal(*met)


@pytest.mark.parametrize("compiled", [False, True])
def test_lora_gradients_of_calibrated_layers_are_closer_to_exact(compiled):
    """Also when compiled, which must still give one graph."""
    x = inputs_with_outliers(64, 64, seed=2).bfloat16()
    results = []
    for way in ("exact", "plain_fp8", "calibrated"):
        made = model(rank=4, dtype=torch.bfloat16)
        if way == "plain_fp8":
            convert_to_fp8(made)
        if way == "calibrated":
            with torch.autocast("cpu", torch.bfloat16):
                convert_with_samples(made, inputs_with_outliers(512, 64).bfloat16())
        assert fuse_lora(made) == 6
        if compiled:
            torch._dynamo.reset()
            for block in made:
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        y = made(x)
        y.float().square().sum().backward()
        trained = [p.grad.flatten() for p in made.parameters() if p.requires_grad]
        results.append((y.detach(), torch.cat(trained)))
    exact, plain_fp8, calibrated = results
    for which in range(2):
        lost = [relative_error(one[which], exact[which]) for one in (plain_fp8, calibrated)]
        assert lost[1] < 0.7 * lost[0]


def test_a_shared_input_is_split_and_quantized_once_when_compiled():
    graphs = []

    def keep(graph, _):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    made = model(rank=4, dtype=torch.bfloat16)
    convert_with_samples(made, inputs_with_outliers(512, 64).bfloat16())
    fuse_lora(made)
    torch._dynamo.reset()
    partition = {"partition_fn": min_cut_rematerialization_partition}
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, **partition)
    made[0].forward = torch.compile(made[0].forward, backend=backend, fullgraph=True)
    made(inputs_with_outliers(16, 64).bfloat16().requires_grad_()).float().sum().backward()
    torch._dynamo.reset()
    forward, backward = graphs
    assert sum("lora_linear_fp8" in name for name in forward) == 3
    assert sum("split_outliers" in name for name in forward) == 2
    assert sum("amax" in name for name in forward) == 2
    assert not any("split_outliers" in name for name in backward), (
        "it is not recomputed in backward"
    )


class AdapterAround(nn.Module):
    """Like a fused LoKr, it reads the layer's weight and does not call the layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return functional.linear(x, self.base_layer.weight)


def test_a_layer_that_its_adapter_does_not_call_is_calibrated():
    made = nn.Sequential(AdapterAround(nn.Linear(64, 64).requires_grad_(False)))
    seen = inputs_with_outliers(512, 64)
    assert convert_with_samples([made], seen) == Fp8Conversion(1, 0)
    expected = find_outlier_subspace(seen).bfloat16()
    assert torch.equal(made[0].base_layer.outlier_basis, expected)


@pytest.mark.parametrize("turned", [False, True])
def test_split_outliers_is_a_valid_operator(turned):
    x, along = inputs_with_outliers(32, 64), find_outlier_subspace(inputs_with_outliers(100, 64))
    given = (x.t().contiguous().t() if turned else x, along)
    torch.library.opcheck(lora_matmul.split_outliers.overload, given)
    main, rest = lora_matmul.split_outliers(*given)
    torch.testing.assert_close(main @ along + rest, x)


def test_blocks_that_did_not_run_are_converted_without_calibration():
    made, plain_fp8 = model(), model()
    convert_to_fp8(plain_fp8)
    frozen = convert_to_fp8_calibrated(lambda: made[0](random_tensor(8, 64)), list(made), CPU)
    assert frozen == Fp8Conversion(6, 0, uncalibrated=3)
    assert made[1].left.outlier_basis is None
    assert torch.equal(made[1](random_tensor(2, 64)), plain_fp8[1](random_tensor(2, 64)))
    assert not made[1]._forward_hooks


def test_replaced_layers_are_freed_during_the_pass():
    """Otherwise the whole model would be on the device at the end."""
    made = model()
    replaced = [weakref.ref(layer) for layer in made[0].children() if type(layer) is nn.Linear]
    alive = []
    made[1].register_forward_pre_hook(lambda *_: alive.append([ref() for ref in replaced]))
    convert_with_samples(made, inputs_with_outliers(512, 64))
    assert alive == [[None] * 3]


def test_a_replaced_layer_is_moved_back_to_its_device():
    made = model()
    layer, went = made[0].left, []
    layer.to = went.append
    convert_with_samples(made, inputs_with_outliers(512, 64))
    assert made[0].left is not layer
    assert went == [CPU]


def test_a_block_moves_back_to_the_device_of_its_largest_weight():
    """Small weights, which are not streamed, may be on the device before the pass."""
    block, device, went = model()[0], torch.device("meta"), []
    block.table = nn.Parameter(torch.empty(2, device=device), requires_grad=False)
    assert next(block.parameters()) is block.table
    block.to = went.append
    convert_to_fp8_calibrated(lambda: block(random_tensor(8, 64)), [block], device)
    assert went == [device, CPU, CPU]
    assert block.left.weight.device == CPU


def test_a_failed_pass_leaves_no_hooks():
    made = model()

    def fail():
        made[0](random_tensor(8, 64))
        raise MemoryError

    with pytest.raises(MemoryError):
        convert_to_fp8_calibrated(fail, list(made), CPU)
    assert not made[1]._forward_hooks
    assert not made[1]._forward_pre_hooks


def test_blocks_without_a_convertible_layer_are_refused_after_calibration():
    block = nn.Linear(8, 24).requires_grad_(False)
    with pytest.raises(GracetuneError, match=r"none of 1 frozen linear.*multiples of 16.*bf16"):
        convert_to_fp8_calibrated(lambda: None, [nn.Sequential(block)], CPU)


def test_inputs_that_are_not_finite_give_no_basis():
    seen, unseen = nn.Linear(16, 16), nn.Linear(16, 16)
    watch = InputObserver([(seen, seen), (unseen, unseen)])
    with torch.no_grad():
        seen(torch.full((2, 16), torch.inf))
    assert watch.basis(seen) is None
    assert watch.basis(unseen) is None


def test_rows_are_sampled_evenly_until_the_observer_is_closed():
    layer = nn.Linear(16, 16)
    watch = InputObserver([(layer, layer)])
    x = torch.zeros(2 * MAX_ROWS, 16)
    x[0, 3], x[-2, 5] = 1.0, 2.0
    layer(x)
    found = watch.basis(layer)
    held = found.float().square().sum(0)  # of each column
    torch.testing.assert_close(held[[3, 5]], torch.ones(2), atol=0.02, rtol=0)
    watch.close()
    layer(random_tensor(3, 16))
    assert watch.basis(layer) is found


def test_a_block_is_converted_like_an_equal_one():
    """Layers that no input reached stay uncalibrated, and those without a kernel unconverted."""
    torch.manual_seed(0)
    block = nn.ModuleDict({"used": nn.Linear(32, 16), "odd": nn.Linear(16, 7)})
    block["spare"] = nn.Linear(32, 32)
    block.requires_grad_(False)
    block.forward = lambda x: block["odd"](block["used"](x))
    other = nn.ModuleDict({name: copy.deepcopy(layer) for name, layer in block.items()})
    expected = convert_to_fp8_calibrated(lambda: block(random_tensor(40, 32)), [block], CPU)
    assert convert_to_fp8_like([calibration_of(block)], [other], CPU) == expected
    assert expected == Fp8Conversion(converted=2, skipped=1, uncalibrated=1)
    assert other["spare"].outlier_basis is None
    for name in ("weight", "weight_scales", "outlier_basis", "outlier_weight"):
        found, same = getattr(other["used"], name), getattr(block["used"], name)
        assert torch.equal(found.view(torch.uint8), same.view(torch.uint8)), name
    assert type(other["odd"]) is nn.Linear
