"""Models that need inputs which gracetune does not give them are refused, by name."""

import json
import shutil

import pytest
from fakes.miniatures import write_miniature
from safetensors.torch import load_file, save_file

from gracetune.config.schema import ModelSection
from gracetune.errors import ModelError
from gracetune.models.family import SampleShape, load_family
from gracetune.plan.meta_models import build_meta_model

FAMILIES = {"flux": "flux", "qwen": "qwen_image", "stable": "stable_audio", "wan21": "wan22"}


def section(name, folder, **settings):
    family = FAMILIES.get(name.partition("-")[0], "wan22")
    return ModelSection(family=family, path=str(folder), **settings)


@pytest.fixture
def copied(miniature, tmp_path):
    def copy(name):
        return shutil.copytree(miniature(name), tmp_path / name)

    return copy


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_models_that_read_a_last_frame_are_refused(miniature):
    supported = r"wan22 trains Wan 2\.1 T2V and I2V and Wan 2\.2 T2V-A14B, I2V-A14B and TI2V-5B"
    message = rf"WanImageToVideoPipeline.*a last frame \(pos_embed_seq_len: 10\).*{supported}"
    with pytest.raises(ModelError, match=message):
        load_family(section("wan21", miniature("wan21-flf2v")))
    with pytest.raises(ModelError, match=r"a last frame \(pos_embed_seq_len: 10\)"):
        build_meta_model(section("wan21", miniature("wan21-flf2v")), SampleShape(64, 64))


def test_the_second_transformer_is_checked_too(copied, miniature):
    folder = copied("wan22-i2v")
    shutil.rmtree(folder / "transformer_2")
    shutil.copytree(miniature("wan21-i2v") / "transformer", folder / "transformer_2")
    with pytest.raises(ModelError, match=r"an image embedding \(image_dim: 32\)"):
        load_family(section("wan22", folder))


@pytest.mark.parametrize("encoder", [["transformers", "CLIPVisionModel"], [None, None], None])
def test_an_image_encoder_that_the_transformer_does_not_use_is_ignored(copied, encoder):
    """The transformer's configuration decides, as in the pipeline. Wan 2.2 states null."""
    folder = copied("wan22-i2v")
    edit_json(folder / "model_index.json", image_encoder=encoder)
    assert load_family(section("wan22", folder)).starts_from == "image"


@pytest.mark.parametrize("name", ["wan21-i2v", "vace"])
def test_a_single_file_of_such_a_model_is_refused(name, miniature, tmp_path):
    weights = load_file(
        miniature("wan22-i2v") / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    key = {"wan21-i2v": "img_emb.proj.1.weight", "vace": "vace_blocks.0.ffn.0.weight"}[name]
    save_file({**weights, key: weights["proj_out.bias"].clone()}, tmp_path / "model.safetensors")
    file = str(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"transformer_file is .*{key}.*wan22 trains Wan 2\.1"):
        load_family(section("wan22", miniature("wan22-i2v"), transformer_file=file))


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("wan22-t2v", "WanVACEPipeline"),
        ("wan22-i2v", "WanAnimatePipeline"),
        ("wan22-t2v", "WanVideoToVideoPipeline"),
        ("wan22-i2v", "WanSpeechToVideoPipeline"),
        ("flux", "FluxFillPipeline"),
        ("flux", "FluxControlPipeline"),
        ("flux", "Flux2Pipeline"),
        ("flux", "StableDiffusionXLInpaintPipeline"),
        ("qwen-image-edit", "QwenImageEditInpaintPipeline"),
        ("qwen-image", "QwenImageLayeredPipeline"),
        ("qwen-image", "QwenImage21Pipeline"),
        ("stable-audio", "StableAudio3Pipeline"),
        ("flux", None),
        ("flux", ["pipeline", "FluxPipeline"]),
    ],
)
def test_other_pipelines_are_refused_by_name(copied, name, pipeline):
    folder = copied(name)
    edit_json(folder / "model_index.json", _class_name=pipeline)
    with pytest.raises(ModelError, match=r"holds a .*Pipeline") as error:
        load_family(section(name, folder))
    assert str(pipeline) in str(error.value)
    assert "reads " in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wan22-t2v", {"_class_name": "WanVACETransformer3DModel"}, r"holds a WanVACETransformer"),
        ("flux", {"_class_name": "Flux2Transformer2DModel"}, r"holds a Flux2Transformer"),
        ("qwen-image", {"guidance_embeds": True}, r"guidance value \(guidance_embeds: True\)"),
        (
            "qwen-image",
            {"use_additional_t_cond": True},
            r"use_additional_t_cond: True.*trains Qwen",
        ),
        ("qwen-image", {"use_layer3d_rope": True}, r"use_layer3d_rope: True"),
    ],
)
def test_other_transformers_in_a_known_pipeline_are_refused(copied, name, changes, message):
    folder = copied(name)
    edit_json(folder / "transformer" / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        load_family(section(name, folder))
    with pytest.raises(ModelError, match=message):
        build_meta_model(section(name, folder), SampleShape(64, 64))


@pytest.mark.parametrize(
    ("name", "channels"),
    [("flux", 96), ("qwen-image", 32), ("wan22-t2v", 32), ("wan22-i2v", 52), ("stable-audio", 8)],
)
def test_input_channels_that_the_family_does_not_fill_are_refused(name, channels, tmp_path):
    """Fill and Control models of FLUX.1, and control models of Wan, have more input channels."""
    import diffusers

    folder = write_miniature(name, tmp_path / name)
    for part in sorted(folder.glob("transformer*")):
        config = json.loads((part / "config.json").read_text())
        cls = getattr(diffusers, config["_class_name"])
        out = config.get("out_channels") or config["in_channels"]
        config |= {"in_channels": channels, "out_channels": out}
        cls.from_config(config).save_pretrained(part)
    with pytest.raises(ModelError, match=rf"transformer takes {channels} channels, but .* passes"):
        load_family(section(name, folder))


def test_weights_that_the_model_would_ignore_are_refused(copied):
    folder = copied("flux")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file({**weights, "control.weight": weights["proj_out.bias"].clone()}, file)
    with pytest.raises(ModelError, match=r"has 1 weights that .* does not have, first control\."):
        load_family(section("flux", folder))
