"""Wan 2.2 against diffusers' pipelines, and the errors for incomplete or wrong folders."""

import json
import shutil
from dataclasses import replace

import diffusers
import pytest
import torch
from fakes.miniatures import write_miniature
from safetensors.torch import load_file, save_file

from gracetune.config.schema import ModelSection
from gracetune.errors import ModelError
from gracetune.models.diffusers_family import clean_caption
from gracetune.models.family import SampleRequest, bind_expert, load_family, transformers_of

ORIGINAL_NAMES = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("proj_out", "head.head"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
)


def original_name(name):
    """Return the name of a tensor in the published files."""
    if name == "scale_shift_table":
        return "head.modulation"
    name = name.replace("scale_shift_table", "modulation")
    # The second and third norm of a block have swapped names.
    for ours, theirs in ((".norm2.", ".norm_x."), (".norm3.", ".norm2."), (".norm_x.", ".norm3.")):
        name = name.replace(ours, theirs)
    for ours, theirs in ORIGINAL_NAMES:
        name = name.replace(ours, theirs)
    return name


def load(folder, **section):
    return load_family(ModelSection(family="wan22", path=str(folder), **section))


@pytest.fixture
def copied(miniature, tmp_path):
    def copy(name="wan22-t2v"):
        return shutil.copytree(miniature(name), tmp_path / "model")

    return copy


def edit_index(folder, **changes):
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def clip(frames=5, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, 3, frames, size, size, generator=generator) * 2 - 1


def test_text_matches_the_pipeline(miniature):
    folder = miniature("wan22-t2v")
    pipeline = diffusers.WanPipeline.from_pretrained(folder, local_files_only=True)
    prompt = "A  red &amp; blue ring,\n on the box"
    theirs, _ = pipeline.encode_prompt(
        prompt, do_classifier_free_guidance=False, max_sequence_length=512
    )
    family = load(folder)
    (text,) = family.encode_text([prompt])
    assert text["tokens"].shape[0] < 40
    torch.testing.assert_close(family.stack_text([text])["tokens"], theirs, rtol=1e-4, atol=1e-5)


def test_captions_are_cleaned_like_in_the_pipeline():
    assert clean_caption("  two\n words &amp;amp; more ") == "two words & more"
    assert clean_caption("schÃ¶n") == "schön"


def test_the_first_frame_is_encoded_like_in_the_pipeline(miniature):
    folder = miniature("wan22-i2v")
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(folder, local_files_only=True)
    pixels = clip(frames=9)
    _, theirs = pipeline.prepare_latents(
        pixels[:, :, 0], 1, 16, 32, 32, 9, torch.float32, torch.device("cpu")
    )
    family = load(folder)
    x0, conditions = family.split_encoded(family.encode(pixels))
    assert x0.shape == (1, 16, 3, 4, 4)
    torch.testing.assert_close(conditions["concatenated"], theirs, rtol=1e-4, atol=1e-5)


def test_image_to_video_models_train_on_videos_only(miniature):
    assert load(miniature("wan22-i2v")).kinds == ("video",)
    assert load(miniature("wan22-5b"), task="image").kinds == ("video",)
    assert load(miniature("wan22-5b")).kinds == ("image", "video")


def test_the_given_frame_of_the_5b_model_gets_no_noise_and_no_loss(miniature):
    family = load(miniature("wan22-5b"), task="image")
    x0, conditions = family.split_encoded(family.encode(clip()))
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    s = torch.tensor([0.7])
    noisy = (1 - s) * x0 + s * noise
    inputs_seen = {}

    def recorded(**inputs):
        inputs_seen.update(inputs)
        return family.transformer(**inputs)

    text = family.stack_text(family.encode_text(["a"]))
    with torch.no_grad():
        out = family.predict(recorded, noisy, s, {**text, **conditions})
    assert torch.equal(inputs_seen["hidden_states"][:, :, 0], x0[:, :, 0])
    assert torch.equal(inputs_seen["hidden_states"][:, :, 1:], noisy[:, :, 1:])
    per_frame = family.num_tokens((16, 1, *x0.shape[3:]))
    assert (inputs_seen["timestep"][0, :per_frame] == 0).all()
    assert (inputs_seen["timestep"][0, per_frame:] == 700).all()
    torch.testing.assert_close(out[:, :, 0], (noise - x0)[:, :, 0], rtol=1e-3, atol=1e-4)


def test_the_boundary_comes_from_the_folder_or_the_published_model(copied, tmp_path):
    folder = copied()
    assert load(folder).boundary == 0.875
    edit_index(folder, boundary_ratio=0.8)
    assert load(folder).boundary == 0.8
    edit_index(folder, boundary_ratio=None)
    assert load(folder).boundary == 0.875
    other = write_miniature("wan22-i2v", tmp_path / "i2v")
    edit_index(other, boundary_ratio=None)
    assert load(other).boundary == 0.9


def test_the_experts_are_the_folders_two_transformers(miniature):
    folder = miniature("wan22-t2v")
    family = load(folder)
    for name, part in (("high", "transformer"), ("low", "transformer_2")):
        file = folder / part / "diffusion_pytorch_model.safetensors"
        saved = load_file(file)
        ours = transformers_of(family.transformer)[name].state_dict()
        assert all(torch.equal(ours[key], saved[key]) for key in saved)
    x = torch.randn(1, 16, 1, 4, 4)
    text = family.stack_text(family.encode_text(["a"]))
    with torch.no_grad():
        high, low = (
            family.predict(bind_expert(family.transformer, name), x, torch.tensor([0.9]), text)
            for name in ("high", "low")
        )
    assert not torch.allclose(high, low)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_single_files_with_original_names_replace_the_transformers(miniature, tmp_path, prefix):
    other = write_miniature("wan22-t2v", tmp_path / "other", seed=7)
    files = {}
    for part in ("transformer", "transformer_2"):
        weights = load_file(other / part / "diffusion_pytorch_model.safetensors")
        files[f"{part}_file"] = str(tmp_path / f"{part}.safetensors")
        save_file(
            {prefix + original_name(name): t for name, t in weights.items()}, files[f"{part}_file"]
        )
    assert any(".self_attn.q." in original_name(name) for name in weights)
    family = load(miniature("wan22-t2v"), **files)
    assert family.weights_hasher()() == load(other).weights_hasher()()


def test_weights_can_be_loaded_in_bf16(miniature):
    family = load(miniature("wan22-t2v"), dtype="bfloat16")
    kinds = {p.dtype for p in family.blocks()[0].parameters()}
    assert torch.bfloat16 in kinds
    x0, _ = family.split_encoded(family.encode(clip()))
    text = family.stack_text(family.encode_text(["a"]))
    with torch.no_grad():
        out = family.predict(bind_expert(family.transformer, "low"), x0, torch.tensor([0.5]), text)
    assert out.isfinite().all()


def test_a_bf16_file_stays_in_bf16(copied):
    folder = copied()
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file)
    family = load(folder)
    assert family.transformer.high.patch_embedding.weight.dtype == torch.bfloat16
    assert family.transformer.low.patch_embedding.weight.dtype == torch.float32


def remove(component):
    return lambda folder: shutil.rmtree(folder / component)


def truncate(folder):
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_one_tensor(folder):
    file = folder / "transformer_2" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights.pop("proj_out.weight")
    save_file(weights, file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("vae"), "has no folder 'vae'"),
        (remove("text_encoder"), "has no folder 'text_encoder'"),
        (remove("tokenizer"), "has no folder 'tokenizer'"),
        (truncate, r"transformer cannot be read"),
        (drop_one_tensor, r"lacks 1 of the model's weights, first proj_out\.weight"),
        (lambda f: (f / "model_index.json").unlink(), r"holds no model_index\.json"),
        (lambda f: (f / "model_index.json").write_text("{"), "cannot be read"),
        (
            lambda f: edit_index(f, _class_name="FluxPipeline"),
            "a FluxPipeline, but wan22 reads",
        ),
    ],
)
def test_an_incomplete_folder_is_refused(copied, damage, message):
    folder = copied()
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("wan22-t2v", {"task": "image"}, r"model\.task is 'image', but this model was made for"),
        ("wan22-i2v", {"task": "text"}, r"model\.task is 'text', but this model was made for"),
        (
            "wan22-t2v",
            {"transformer_file": "x"},
            r"model\.transformer_file is 'x', but there is no such file",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(miniature, name, section, message):
    with pytest.raises(ModelError, match=message):
        load(miniature(name), **section)


def test_a_second_file_for_a_model_with_one_transformer_is_refused(miniature, tmp_path):
    save_file({"head.modulation": torch.zeros(1)}, tmp_path / "low.safetensors")
    with pytest.raises(ModelError, match="has one transformer"):
        load(miniature("wan22-5b"), transformer_2_file=str(tmp_path / "low.safetensors"))


def test_a_single_file_of_another_model_is_refused(miniature, tmp_path):
    save_file({"blocks.0.self_attn.q.weight": torch.zeros(3, 3)}, tmp_path / "odd.safetensors")
    with pytest.raises(ModelError, match=r"odd\.safetensors"):
        load(miniature("wan22-t2v"), transformer_file=str(tmp_path / "odd.safetensors"))


def test_encoding_during_sampling_changes_neither_result(miniature):
    """The VAE keeps frames between calls, and clears those of both directions at a start."""
    family = load(miniature("wan22-t2v"))
    text, empty = family.encode_text(["one", ""])
    request = SampleRequest([text], empty, (32, 32, 9), seed=0, steps=1, guidance=1.0)
    clip = torch.rand(1, 3, 9, 32, 32) * 2 - 1
    encoded_meanwhile = []
    with torch.no_grad():
        (alone,), encoded = family.sample(request), family.encode(clip)
        hook = family.vae.decoder.register_forward_hook(
            lambda *_: encoded_meanwhile.append(family.encode(clip))
        )
        (sampled,) = family.sample(request)
        hook.remove()
    assert len(encoded_meanwhile) > 1
    assert torch.equal(sampled.data, alone.data)
    assert all(torch.equal(latents, encoded) for latents in encoded_meanwhile)


def test_sampling_has_its_own_tiling(miniature):
    family = load(miniature("wan22-t2v"))
    request = SampleRequest([], {}, (32, 32), seed=0, steps=1, guidance=1.0, tiled=True)
    family.set_tiling(False)
    assert (family.sampling_vae(request).use_tiling, family.vae.use_tiling) == (True, False)
    family.set_tiling(True)
    vae = family.sampling_vae(replace(request, tiled=False))
    assert (vae.use_tiling, family.vae.use_tiling) == (False, True)
    assert {p.data_ptr() for p in vae.parameters()} == {
        p.data_ptr() for p in family.vae.parameters()
    }
