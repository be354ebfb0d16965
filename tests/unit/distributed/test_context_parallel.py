"""Ranks that divide the tokens of a sample compute what one rank computes with all of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from fork_process import run_ranks

from gracetune.adapters.compute.dropout import PositionalDropout
from gracetune.config.checks import find_violations
from gracetune.config.schema import ModelSection, RunFile
from gracetune.distributed.context_parallel import (
    IMAGE,
    SINGLE_CONTEXT,
    TEXT,
    ContextGroup,
    TokenSplit,
    split_sizes,
)
from gracetune.errors import ConfigError
from gracetune.models.context_parallel import check_context_parallel, split_transformer
from gracetune.models.family import SampleShape, planner_shapes
from gracetune.models.registry import FAMILIES
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.trace import trace_model

SCRIPT = Path(__file__).with_name("context_ranks.py")
TOLERANCES = {
    "flux": 1e-12,
    "flux2": 1e-12,
    "qwen_image": 1e-12,
    "one text token": 1e-12,
    "wan": 1e-6,
    "wan-ti2v": 1e-6,
}
"""Largest difference of a gradient in fp64, relative to its own norm. Wan computes its norms in
fp32, whatever the dtype of its weights, and a weight's gradient is a sum over tokens."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.distributed)])
def compared(request, tmp_path_factory):
    """Return the largest difference of each model, of ranks that divide odd numbers of tokens."""
    file = tmp_path_factory.mktemp("context") / "found.json"
    for done in run_ranks(SCRIPT, file, count=request.param, timeout=240):
        assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("model", TOLERANCES)
def test_the_summed_gradients_of_all_tensors_are_those_of_whole_sequences(compared, model):
    found = compared[model]
    assert found["tensors"] > 40
    assert found["output"] <= TOLERANCES[model]
    assert found["gradient"] <= TOLERANCES[model], found["name"]


def test_all_ranks_raise_if_one_is_out_of_memory(compared):
    *others, last = compared["failure"]
    assert last == "failed"
    assert set(others) == {"told"}


def test_a_single_rank_raises_its_own_error():
    with pytest.raises(torch.OutOfMemoryError), SINGLE_CONTEXT.fail_together():
        raise torch.OutOfMemoryError("out of memory")


# Parts


@pytest.mark.parametrize("length", range(4, 20))
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_sizes_differ_by_one_token_at_most(length, parts):
    sizes = split_sizes(length, parts)
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1


def splits_of(text, image, size):
    """Return the splits of all ranks, after they have split a text and an image."""
    splits = [TokenSplit(ContextGroup(rank, size)) for rank in range(size)]
    for split in splits:
        split.split(torch.zeros(1, text), 1, TEXT)
        split.split(torch.zeros(1, image), 1, IMAGE)
    return splits


def test_parts_are_the_whole_sequence():
    x = torch.arange(22).view(2, 11)
    parts = [split.split(x, 1) for split in splits_of(5, 11, 3)]
    assert torch.equal(torch.cat(parts, dim=1), x)
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


def test_a_mask_is_in_the_order_of_the_exchanged_tokens():
    text = torch.tensor([[True, True, True, False, False]])
    (split, *_) = splits_of(5, 7, 2)
    found = split.order_mask(text)[0].tolist()
    assert found == [True, True, True, *[True] * 4, False, False, *[True] * 3]


@pytest.mark.parametrize("sequence", ["text", "image", "both", "other"])
def test_a_rank_drops_what_one_process_drops_of_its_tokens(sequence):
    text, image, width = 5, 11, 64
    length = {"text": text, "image": image, "both": text + image, "other": 4}[sequence]
    x = torch.ones(2, length, width)
    dropout = PositionalDropout(0.5, torch.tensor(7))
    whole = dropout(x)
    for rank, split in enumerate(splits_of(text, image, 2)):
        dropout.split = split
        parts = {
            "text": [whole[:, :3], whole[:, 3:]],
            "image": [whole[:, :6], whole[:, 6:]],
            "both": [
                torch.cat([whole[:, :3], whole[:, 5:11]], dim=1),
                torch.cat([whole[:, 3:5], whole[:, 11:]], dim=1),
            ],
            "other": [whole, whole],  # not divided
        }
        expected = parts[sequence][rank]
        assert torch.equal(dropout(x[:, : expected.shape[1]]), expected)


def test_a_sample_with_fewer_tokens_than_ranks_is_refused():
    split = TokenSplit(ContextGroup(0, 4))
    with pytest.raises(ConfigError, match="context_parallel is 4, but a sample has only 3 tokens"):
        split.split(torch.zeros(1, 3), 1, IMAGE)


# Families and settings


def test_the_families_that_divide_tokens_are_those_with_a_plan_in_diffusers():
    with_shapes = {name for name, info in FAMILIES.items() if info.has_planner_shapes}
    planned = {
        name
        for name in with_shapes
        if vars(getattr(diffusers, planner_shapes(name).class_name)).get("_cp_plan")
    }
    assert {name for name, info in FAMILIES.items() if info.divides_tokens} == planned


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_other_families_are_refused_with_those_that_work(family):
    run = RunFile.model_validate(
        {
            "output_dir": "run",
            "model": {"family": family},
            "distributed": {"context_parallel": 2},
        }
    )
    found = [v for v in find_violations(run) if v.key == "distributed.context_parallel"]
    assert bool(found) != FAMILIES[family].divides_tokens
    for violation in found:
        assert f"the tokens of {family} cannot be divided" in violation.message
        assert "flux, flux2, qwen_image, wan22" in violation.message


def family_of(heads):
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(
            num_layers=1, num_single_layers=1, num_attention_heads=heads, attention_head_dim=8
        )
    return SimpleNamespace(name="flux", transformer=transformer)


def test_the_ranks_must_divide_the_heads():
    check_context_parallel(family_of(6), 3, "ulysses", "cpu")
    with pytest.raises(ConfigError, match="does not divide the 6 attention heads") as found:
        check_context_parallel(family_of(6), 4, "ulysses", "cpu")
    assert "one of 2, 3, 6" in str(found.value)


def test_a_transformer_without_a_plan_is_refused():
    with torch.device("meta"):
        transformer = diffusers.SD3Transformer2DModel(num_layers=1, num_attention_heads=2)
    family = SimpleNamespace(name="sd3", transformer=transformer)
    with pytest.raises(ConfigError, match="no plan for dividing the tokens of SD3Transformer2D"):
        check_context_parallel(family, 2, "ulysses", "cpu")


def test_ring_attention_needs_a_gpu_and_a_kernel_that_returns_sums():
    with pytest.raises(ConfigError, match="ring, which needs a GPU"):
        check_context_parallel(family_of(2), 2, "ring", "cpu")
    with pytest.raises(ConfigError, match=r"does not work with model\.attention_mechanism"):
        check_context_parallel(family_of(2), 2, "ring", "cuda")


# Plans


def test_a_transformer_is_traced_as_on_one_of_many_ranks():
    """Blocks have a part of the tokens and of the memory, and attention a part of the heads."""
    section, sample = ModelSection(family="flux"), SampleShape(1024, 1024)
    layers = {"num_layers": 1, "num_single_layers": 1}
    traces = {}
    for degree in (1, 4):
        meta = build_meta_model(section, sample, layers)
        if degree > 1:
            split_transformer(meta.model, ContextGroup(0, degree))
        traces[degree] = trace_model(meta.trace_target(), 2, may_compile=False)
    for alone, divided in zip(traces[1].kinds, traces[4].kinds, strict=True):
        assert divided.input_nbytes == alone.input_nbytes / 4
        assert divided.eager.keep.saved_nbytes == pytest.approx(
            alone.eager.keep.saved_nbytes / 4, rel=0.02
        )
        (whole,), (part,) = (
            [op.dims for op in kind.eager.keep.forward if op.kind == "attention"]
            for kind in (alone, divided)
        )
        assert whole == (2, 24, 4608, 4608, 128)
        assert part == (2, 6, 4608, 4608, 128)
