"""Flux, Qwen-Image and Stable Audio encode and call the model as diffusers' pipelines do."""

import json
import shutil

import diffusers
import pytest
import torch
from fakes.miniatures import write_miniature
from safetensors.torch import load_file, save_file

from gracetune.config.schema import ModelSection
from gracetune.errors import ModelError
from gracetune.models import qwen_image
from gracetune.models.diffusers_family import append_channels, pack_latents, unpack_latents
from gracetune.models.family import load_family
from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.offload.checkpointing import MIN_DYNAMIC_SIZE

PROMPT = "a red ring on the box"


def load(family, folder, **section):
    return load_family(ModelSection(family=family, path=str(folder), **section))


def test_packed_latents_match_both_pipelines():
    latents = torch.randn(2, 4, 6, 8)
    rows = pack_latents(latents)
    for pipeline in (diffusers.FluxPipeline, diffusers.QwenImagePipeline):
        theirs = pipeline._pack_latents(latents.unsqueeze(2).squeeze(2), 2, 4, 6, 8)
        assert torch.equal(rows, theirs)
    assert torch.equal(unpack_latents(rows, 6, 8), latents)


def test_the_template_of_qwen_image_matches_its_pipeline(miniature):
    folder = miniature("qwen-image")
    pipeline = diffusers.QwenImagePipeline.from_pretrained(folder, local_files_only=True)
    assert pipeline.prompt_template_encode == qwen_image.TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == qwen_image.TEMPLATE_TOKENS


def test_captions_of_a_batch_are_masked_to_their_lengths(miniature):
    family = load("qwen_image", miniature("qwen-image"))
    stacked = family.stack_text(family.encode_text([PROMPT, "a"]))
    lengths = stacked["mask"].sum(1).tolist()
    assert lengths[0] == stacked["tokens"].shape[1] > lengths[1]
    assert (stacked["tokens"][1, lengths[1] :] == 0).all()


def test_short_captions_of_qwen_image_share_a_graph_with_long_ones(miniature):
    """The tokenizer of the miniature makes captions longer than they are for the real model."""
    family = load("qwen_image", miniature("qwen-image"))
    empty, word = ({"tokens": torch.ones(length, 32)} for length in (5, 6))
    stacked = family.stack_text([empty, word])
    assert stacked["tokens"].shape[1] == MIN_DYNAMIC_SIZE
    assert stacked["mask"].sum(1).tolist() == [5, 6]


@pytest.mark.parametrize(
    ("pipeline_class", "references"),
    [
        (diffusers.QwenImageEditPipeline, qwen_image.IMAGE_TEMPLATE),
        (diffusers.QwenImageEditPlusPipeline, ""),
    ],
)
def test_the_edit_template_matches_its_pipeline(pipeline_class, references):
    pipeline = pipeline_class(
        scheduler=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        processor=None,
        transformer=None,
    )
    assert pipeline.prompt_template_encode == qwen_image.EDIT_TEMPLATE.format(references, "{}")
    assert pipeline.prompt_template_encode_start_idx == qwen_image.EDIT_TEMPLATE_TOKENS


def test_the_text_of_an_edit_depends_on_the_image(miniature):
    family = load("qwen_image", miniature("qwen-image-edit"))
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    one, other, again = family.encode_text([PROMPT] * 3, [[image], [-image], [image]])
    assert torch.equal(one["tokens"], again["tokens"])
    assert not torch.equal(one["tokens"], other["tokens"])


def test_the_reference_image_of_an_edit_gets_no_noise(miniature, monkeypatch):
    family = load("qwen_image", miniature("qwen-image-edit"))
    monkeypatch.setattr(qwen_image, "REFERENCE_AREA", 64 * 64)
    pixels, reference = torch.rand(1, 3, 16, 32) * 2 - 1, torch.rand(1, 3, 32, 96) * 2 - 1
    media = append_channels(pixels, reference)
    x0, conditions = family.split_encoded(family.encode(media))
    plain = load("qwen_image", miniature("qwen-image"))
    torch.testing.assert_close(x0, plain.encode(pixels))
    torch.testing.assert_close(conditions["references"][:, 0], plain.encode(reference))


def test_every_reference_of_a_sample_keeps_its_place(miniature, monkeypatch):
    family = load("qwen_image", miniature("qwen-image-edit-2511"))
    monkeypatch.setattr(qwen_image, "REFERENCE_AREA", 64 * 64)
    media = pixels = torch.rand(2, 3, 32, 80) * 2 - 1  # references are padded to 4 channels
    first, second = (torch.rand(2, 3, 32, 96) * 2 - 1 for _ in range(2))
    for reference in (first, second):
        media = append_channels(media, reference)
    x0, conditions = family.split_encoded(family.encode(media))
    torch.testing.assert_close(x0, family.encode_image(family.vae, pixels))
    for reference, latents in zip((first, second), conditions["references"].unbind(1), strict=True):
        torch.testing.assert_close(latents, family.encode_image(family.vae, reference))


def test_the_text_of_an_edit_depends_on_the_order_of_its_references(miniature):
    family = load("qwen_image", miniature("qwen-image-edit-2511"))
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    one, other, again = family.encode_text(
        [PROMPT] * 3, [[image, -image], [-image, image], [image, -image]]
    )
    assert torch.equal(one["tokens"], again["tokens"])
    assert not torch.equal(one["tokens"], other["tokens"])


def test_the_empty_caption_of_stable_audio_matches_its_pipeline(miniature, monkeypatch):
    """With guidance, the empty caption comes first in the pipeline's batch."""
    folder = miniature("stable-audio")
    with without_progress_bars():
        pipeline = diffusers.StableAudioPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    family = load("stable_audio", folder)
    calls = []

    def recorded(noisy, timestep, **inputs):
        calls.append((noisy, timestep, inputs))
        return family.transformer(noisy, timestep, **inputs)

    monkeypatch.setattr(pipeline.transformer, "forward", recorded)
    length = 4000
    with pytest.warns(UserWarning, match="Should have t"):
        pipeline(
            prompt=PROMPT,
            audio_end_in_s=length / 16000,
            num_inference_steps=2,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(0),
        )
    (noisy, timestep, theirs), *_ = calls
    monkeypatch.setattr(pipeline.transformer, "forward", None)
    text = family.stack_text(family.encode_text([""]))
    _, conditions = family.split_encoded(family.encode(torch.zeros(1, 2, length)))
    with torch.no_grad():
        family.predict(recorded, noisy[:1], timestep, {**text, **conditions})
    ours = calls[-1][2]
    for name in ("encoder_hidden_states", "global_hidden_states"):
        torch.testing.assert_close(ours[name], theirs[name][:1])
    torch.testing.assert_close(ours["rotary_embedding"], theirs["rotary_embedding"])
    assert 0 < timestep.item() < 1


def test_the_latents_identity_depends_on_the_padded_length(miniature, tmp_path):
    folder = write_miniature("stable-audio", tmp_path / "longer")
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"sample_size": 2 * config["sample_size"]}))
    short, longer = (load("stable_audio", one) for one in (miniature("stable-audio"), folder))
    assert short.identity()["latents"] != longer.identity()["latents"]
    assert short.identity()["text"] == longer.identity()["text"]


def test_a_clip_is_padded_with_silence_and_its_length_is_a_condition(miniature):
    family = load("stable_audio", miniature("stable-audio"))
    short = torch.rand(1, 2, 1600) * 2 - 1
    encoded = family.encode(short)
    x0, conditions = family.split_encoded(encoded)
    assert conditions["seconds"].tolist() == pytest.approx([0.1])
    whole = torch.zeros(1, 2, family.audio.max_length)
    whole[..., :1600] = short
    torch.testing.assert_close(family.split_encoded(family.encode(whole))[0], x0)


def store_in_fp8(folder):
    """Store the matrices of a component in fp8, each with a scale for every row."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in list(tensors.items()):
        if name.endswith(".weight") and tensor.dim() == 2:
            scale = tensor.abs().amax(1).clamp(min=1e-6) / 448
            tensors[name] = (tensor / scale[:, None]).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, file, {"format": "pt"})


def test_weights_in_scaled_fp8_are_read_with_their_scales(miniature, tmp_path):
    plain = load("z_image", miniature("z-image"))
    folder = shutil.copytree(miniature("z-image"), tmp_path / "model")
    for component in ("transformer", "text_encoder"):
        store_in_fp8(folder / component)
    scaled = load("z_image", folder)
    assert scaled.dtype is torch.bfloat16
    for family in (plain, scaled):
        family.restore_text_encoder(torch.device("cpu"))
    pairs = ((plain.transformer, scaled.transformer), (*plain.text_encoders, *scaled.text_encoders))
    for one, other in pairs:
        weights = dict(other.named_parameters())
        assert weights.keys() == dict(one.named_parameters()).keys()
        for name, weight in one.named_parameters():
            torch.testing.assert_close(weights[name].float(), weight, rtol=0.08, atol=0.02)
    assert scaled.encode_text(["a red ring"])[0]["tokens"].dtype is torch.bfloat16
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if name.endswith("_scale")))
    save_file(tensors, file)
    with pytest.raises(ModelError, match="stored in fp8 without a scale"):
        load("z_image", folder)


def test_a_folder_that_another_tool_has_quantized_is_refused(miniature, tmp_path):
    folder = shutil.copytree(miniature("z-image"), tmp_path / "model")
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text())
    quantized = config | {"quantization_config": {"quant_method": "bitsandbytes"}}
    file.write_text(json.dumps(quantized))
    with pytest.raises(ModelError, match=r"quantized by bitsandbytes.* bf16 or fp8"):
        load("z_image", folder)


@pytest.mark.parametrize(("family", "name"), [("flux", "flux"), ("qwen_image", "qwen-image")])
def test_a_missing_component_is_named(family, name, tmp_path):
    folder = write_miniature(name, tmp_path / "model")
    for file in (folder / "vae").iterdir():
        file.unlink()
    with pytest.raises(ModelError, match="vae cannot be read"):
        load(family, folder)


def test_a_single_file_with_a_prefix_replaces_the_transformer(miniature, tmp_path):
    other = write_miniature("qwen-image", tmp_path / "other", seed=5)
    weights = load_file(other / "transformer" / "diffusion_pytorch_model.safetensors")
    file = tmp_path / "model.safetensors"
    save_file({f"model.diffusion_model.{name}": t for name, t in weights.items()}, file)
    family = load("qwen_image", miniature("qwen-image"), transformer_file=str(file))
    assert family.weights_hasher()() == load("qwen_image", other).weights_hasher()()
