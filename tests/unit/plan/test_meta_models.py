"""Models built from their configuration: published ones, folders, and errors."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes.miniatures import MINIATURES

from gracetune.cli.plan import prepare_meta_model
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.errors import ConfigError, ModelError
from gracetune.models.family import PLANNABLE, SampleShape, load_family, planner_shapes
from gracetune.models.registry import FAMILIES
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.planner_input import cached_sample_nbytes, family_trace_target
from gracetune.plan.trace import trace_model

if TYPE_CHECKING:
    from pathlib import Path

SQUARE = SampleShape(1024, 1024)
SMALL = {
    "wan22": {"num_layers": 1, "num_attention_heads": 2, "ffn_dim": 64},
    "flux": {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2},
    "qwen_image": {"num_layers": 2, "num_attention_heads": 2},
    "sdxl": {"block_out_channels": (32, 32, 32), "transformer_layers_per_block": 1},
}
"""Narrow models of the published classes."""


@pytest.mark.parametrize("family", [name for name in PLANNABLE if name != "tiny"])
def test_published_configurations_have_their_published_size(family: str) -> None:
    """The size is the number before "B" in the published name, to the digits that it has."""
    shape = build_meta_model(ModelSection(family=family), SQUARE)
    count = sum(p.numel() for p in shape.model.parameters())
    billions = re.search(r"([\d.]+) B", shape.shapes.published_name)
    assert billions is not None
    decimals = len(billions[1].partition(".")[2])
    assert f"{count / 1e9:.{decimals}f}" == billions[1]
    assert shape.num_transformers == (2 if family == "wan22" else 1)
    channels, *frames, rows, columns = shape.encoded.latent_shape
    assert rows == columns in (64, 128)
    assert frames in ([], [1])
    assert channels * rows * columns in (4 * 128**2, 16 * 128**2, 32 * 128**2)
    assert all(p.is_meta for p in shape.model.parameters())
    in_fp32 = {
        n.split(".")[-2] for n, p in shape.model.named_parameters() if p.dtype is torch.float32
    }
    assert in_fp32 <= set(shape.shapes.fp32_layers)


BILLIONS = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (2, 14.3),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (2, 14.3),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (1, 5.0),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (1, 14.3),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (1, 1.4),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (1, 16.4),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": (1, 16.4),
    "black-forest-labs/FLUX.1-schnell": (1, 11.9),
    "black-forest-labs/FLUX.2-klein-base-9B": (1, 9.1),
    "black-forest-labs/FLUX.2-klein-4B": (1, 3.9),
    "stabilityai/stable-diffusion-3.5-medium": (1, 2.2),  # 2.5 with its table of positions
    "stabilityai/stable-diffusion-3-medium-diffusers": (1, 2.0),
}
"""Published models, with the number of their transformers and the weights of each."""


@pytest.mark.parametrize(("name", "size"), BILLIONS.items())
def test_a_published_model_that_is_not_here_has_its_own_size(
    name: str, size: tuple[int, float]
) -> None:
    (family,) = (f for f in PLANNABLE if name in [model.name for model in FAMILIES[f].models])
    shape = build_meta_model(ModelSection(family=family, path=name), SQUARE)
    count = sum(p.numel() for p in shape.model.parameters())
    assert (shape.num_transformers, round(count / 1e9, 1)) == size


@pytest.mark.parametrize("family", PLANNABLE)
def test_families_know_the_configuration_of_every_model_that_they_name(family: str) -> None:
    others = [model.name for model in FAMILIES[family].models[1:]]
    assert list(planner_shapes(family).other_published) == others


UNET_KINDS = (0, 0, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4, 3, 5, 4, 5, 4, 5, 4, 6, 2, 6, 2, 6, 2, 7, 7, 7)
"""Kinds of the blocks of a narrow SDXL: ResNets and transformer blocks at three resolutions. Those
of the decoder have twice as many input channels."""


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("wan22", (0,)),
        ("flux", (0, 1, 1)),
        ("qwen_image", (0, 0)),
        pytest.param("sdxl", UNET_KINDS, marks=pytest.mark.slow),
    ],
)
def test_every_known_model_can_be_traced(family: str, kinds: tuple[int, ...]) -> None:
    shape = build_meta_model(ModelSection(family=family), SampleShape(64, 64), SMALL[family])
    trained = prepare_meta_model(shape, AdapterSection(rank=4))
    traced = trace_model(shape.trace_target(), 2)
    assert traced.order == kinds
    assert traced.trained_nbytes == 4 * trained
    assert traced.cast_copies_nbytes == 2 * trained
    for block in traced.kinds:
        assert block.input_nbytes > 0
        assert 0 < block.compiled.lean.saved_nbytes <= block.compiled.keep.saved_nbytes
        assert block.eager.keep.flops == pytest.approx(block.compiled.keep.flops, rel=1e-3)


def test_an_edit_has_tokens_of_the_image_to_edit() -> None:
    edit = SampleShape(512, 512, controls=1)
    shape = build_meta_model(ModelSection(family="qwen_image"), edit, SMALL["qwen_image"])
    assert shape.encoded.latent_shape == (16, 64, 64)
    assert shape.encoded.control_shape == (1, 16, 128, 128)  # a megapixel, whatever is generated
    assert shape.encoded.text_shape[0] == 512 + 37 * 37
    assert shape.trace_target().inputs(2)["hidden_states"].shape[1] == 32 * 32 + 64 * 64
    assert shape.shapes.extra_arguments(shape.encoded, 1) == {
        "img_shapes": [[(1, 32, 32), (1, 64, 64)]]
    }
    assert cached_sample_nbytes(shape)[0] == 2 * 16 * (64**2 + 128**2)
    assert trace_model(shape.trace_target(), 1, may_compile=False).order == (0, 0)


def test_every_reference_of_an_edit_has_tokens() -> None:
    edit, changes = SampleShape(512, 512, controls=2), {**SMALL["qwen_image"], "zero_cond_t": True}
    shape = build_meta_model(ModelSection(family="qwen_image"), edit, changes)
    assert shape.encoded.control_shape == (2, 16, 128, 128)
    assert shape.encoded.text_shape[0] == 512 + 2 * 14 * 14  # a copy of 384x384 pixels of each
    assert shape.trace_target().inputs(2)["hidden_states"].shape[1] == 32 * 32 + 2 * 64 * 64
    assert cached_sample_nbytes(shape)[0] == 2 * 16 * (64**2 + 2 * 128**2)
    assert trace_model(shape.trace_target(), 1, may_compile=False).order == (0, 0)


def test_videos_and_wan_5b_have_their_own_latent_shapes() -> None:
    clip = SampleShape(832, 480, 33)
    big = build_meta_model(ModelSection(family="wan22"), clip, {"num_layers": 1})
    assert big.encoded.latent_shape == (16, 9, 60, 104)
    changes = {"num_layers": 1, "in_channels": 48, "num_attention_heads": 2, "ffn_dim": 64}
    small = build_meta_model(ModelSection(family="wan22"), clip, changes)
    assert small.encoded.latent_shape == (48, 9, 30, 52)
    assert small.trace_target().inputs(2)["timestep"].shape == (2, 9 * 15 * 26)


def test_a_local_folder_overrides_the_published_configuration(tmp_path: Path) -> None:
    config = {"_class_name": "WanTransformer3DModel", "num_layers": 2, "num_attention_heads": 2}
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    section = ModelSection(family="wan22", path=str(tmp_path), dtype="float32")
    shape = build_meta_model(section, SQUARE)
    assert len(shape.trace_target().blocks) == 2
    assert (shape.num_transformers, shape.dtype) == (1, torch.float32)
    assert str(tmp_path) in shape.source
    (tmp_path / "transformer_2").mkdir()
    assert build_meta_model(section, SQUARE).num_transformers == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"_class_name": "UNet2DConditionModel"}', "the transformer of wan22 is a WanTrans"),
        ('{"num_layers": 2}', "is not a model configuration"),
        ("{", "is not a model configuration"),
    ],
)
def test_a_folder_with_another_model_is_an_error(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(text)
    with pytest.raises(ModelError, match=complaint):
        build_meta_model(ModelSection(family="wan22", path=str(tmp_path)), SQUARE)


def test_the_error_for_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'hunyuan'.*flux, .*qwen_image, .*wan22.*trace_model"):
        build_meta_model(ModelSection(family="hunyuan"), SQUARE)


def test_a_loaded_family_is_traced_like_its_configuration() -> None:
    family = load_family(ModelSection(family="tiny"))
    family.transformer.requires_grad_(False)
    text = family.stack_text(family.encode_text(["a red ring"]))
    loaded = trace_model(family_trace_target(family, family.latent_shape(24, 24), text), 2)
    published = trace_model(
        build_meta_model(ModelSection(family="tiny"), SampleShape(24, 24)).trace_target(), 2
    )
    assert loaded.order == published.order
    assert loaded.frozen_nbytes == published.frozen_nbytes
    assert [k.eager for k in loaded.kinds] == [k.eager for k in published.kinds]
    assert [k.compiled for k in loaded.kinds] == [k.compiled for k in published.kinds]


@pytest.mark.parametrize(
    "name",
    [n for n, small in MINIATURES.items() if small.family in PLANNABLE],
)
def test_every_model_is_planned_like_it_is_trained(name: str, miniature: Any) -> None:
    """The planner gives the transformer the inputs of training, and finds the same blocks."""
    small, path = MINIATURES[name], str(miniature(name))
    section = ModelSection(family=small.family, path=path, dtype="float32")
    family = load_family(section)
    family.transformer.requires_grad_(False)
    is_video, is_edit = "video" in family.kinds, family.takes_control
    width, height = 32, 64
    shape = (width, height, 5) if is_video else (width, height)
    images = []
    if is_edit:
        images = [[torch.zeros(3, *reversed(family.text_control_size(width, height)))]]
    text = family.stack_text(family.encode_text(["a red ring"], images))
    target = family_trace_target(family, family.latent_shape(*shape), text)
    traced = trace_model(target, 2, may_compile=False)
    sample = SampleShape(width, height, 5 if is_video else 1, int(is_edit))
    planned = trace_model(build_meta_model(section, sample).trace_target(), 2, may_compile=False)
    assert planned.order == traced.order
    assert planned.frozen_nbytes == traced.frozen_nbytes
