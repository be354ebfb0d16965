"""The contract of model families. Add a new family to MODELS; the tests need no change."""

import math
from dataclasses import replace

import pytest
import torch

from gracetune.adapters.inject import matches
from gracetune.config.schema import ModelSection
from gracetune.models.family import (
    EXPERTS,
    Experts,
    SampleRequest,
    bind_expert,
    load_family,
    transformers_of,
)
from gracetune.models.registry import FAMILIES

MODELS = {
    "flux": "flux",
    "qwen-image": "qwen_image",
    "qwen-image-edit": "qwen_image",
    "stable-audio": "stable_audio",
    "tiny": None,
    "wan22-t2v": "wan22",
    "wan22-i2v": "wan22",
    "wan22-5b": "wan22",
}
"""Tested model -> family that reads its miniature. None: the family needs no files."""
NOT_TILED = {"stable_audio", "tiny"}
"""Families that cannot encode in tiles."""


def test_every_family_is_tested():
    assert set(FAMILIES) == {family or name for name, family in MODELS.items()}


@pytest.fixture(scope="module", params=sorted(MODELS))
def family(request, miniature):
    return load_model(request.param, miniature)


def load_model(name, miniature):
    if MODELS[name] is None:
        return load_family(ModelSection(family=name))
    return load_family(ModelSection(family=MODELS[name], path=str(miniature(name))))


@pytest.fixture(scope="module")
def shape(family):
    """Return the shape of a small bucket whose axes all differ."""
    if "audio" in family.kinds:
        return (2, 4096)
    size = (2 * family.pixel_step, 3 * family.pixel_step)
    return (*size, 5) if "video" in family.kinds else size


@pytest.fixture(scope="module")
def media(family, shape):
    generator = torch.Generator().manual_seed(0)
    if "audio" in family.kinds:
        return torch.rand(2, *shape, generator=generator) * 2 - 1
    return with_controls(
        family, torch.rand(2, 3, *shape[:1:-1], *shape[1::-1], generator=generator)
    )


def with_controls(family, images):
    """Scale images or clips to [-1, 1] and append control images, as `decode_item` does."""
    if not family.takes_control:
        return images * 2 - 1
    height, width = images.shape[-2:]
    count = 3 * math.prod(family.control_size(width, height))
    padded = torch.zeros(len(images), -(-count // (width * height)), height, width)
    controls = torch.rand(len(images), count, generator=torch.Generator().manual_seed(1))
    padded.flatten(1)[:, :count] = controls
    return torch.cat([images, padded], dim=1) * 2 - 1


@pytest.fixture(scope="module")
def encoded(family, media):
    return family.encode(media)


def forward_of(family):
    return bind_expert(family.transformer, None if family.boundary is None else "high")


def encode_captions(family, captions):
    """Encode captions; a control image, if needed, is the same for all."""
    if not family.takes_control:
        return family.encode_text(captions)
    width, height = family.control_size(32, 32)
    return family.encode_text(captions, [torch.zeros(3, height, width)] * len(captions))


def conditions_for(family, captions, conditions):
    """Return all conditions of a batch: its captions and those from `split_encoded`."""
    return {**family.stack_text(encode_captions(family, captions)), **conditions}


def test_encoded_samples_have_the_latent_shape(family, shape, encoded):
    assert encoded.shape == (2, *family.latent_shape(*shape))
    assert not encoded.requires_grad


def test_encoding_does_not_depend_on_other_samples_of_the_batch(family, media, encoded):
    torch.testing.assert_close(family.encode(media[1:]), encoded[1:], rtol=1e-4, atol=1e-5)


def test_images_have_the_latent_shape_too(family):
    if "image" in family.kinds:
        size = (2 * family.pixel_step, family.pixel_step)
        pixels = with_controls(family, torch.rand(1, 3, *reversed(size)))
        assert family.encode(pixels).shape == (1, *family.latent_shape(*size))


def test_the_prediction_has_the_latents_shape_and_gradients(family, encoded):
    x0, conditions = family.split_encoded(encoded)
    text = conditions_for(family, ["one two", ""], conditions)
    out = family.predict(forward_of(family), x0, torch.tensor([0.92, 0.97]), text)
    assert out.shape == x0.shape
    assert family.num_tokens(x0.shape[1:]) > 0
    out.square().mean().backward()
    assert any(p.grad is not None for p in family.transformer.parameters())
    family.transformer.zero_grad()


def test_the_prediction_does_not_depend_on_other_samples_of_the_batch(family, encoded):
    x0, conditions = family.split_encoded(encoded)
    text = conditions_for(family, ["one two", "three"], conditions)
    sigmas = torch.tensor([0.91, 0.98])
    with torch.no_grad():
        both = family.predict(forward_of(family), x0, sigmas, text)
        alone = family.predict(
            forward_of(family), x0[1:], sigmas[1:], {k: t[1:] for k, t in text.items()}
        )
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)


def test_the_prediction_depends_on_the_caption_and_sigma(family, encoded):
    x0, conditions = family.split_encoded(encoded)
    sigmas = torch.tensor([0.91, 0.98])
    with torch.no_grad():
        one = family.predict(
            forward_of(family), x0, sigmas, conditions_for(family, ["a", "b"], conditions)
        )
        other = family.predict(
            forward_of(family), x0, sigmas, conditions_for(family, ["c", "d"], conditions)
        )
        later = family.predict(
            forward_of(family), x0, sigmas - 0.005, conditions_for(family, ["a", "b"], conditions)
        )
    assert not torch.equal(one, other)
    assert not torch.equal(one, later)


def test_text_does_not_depend_on_other_captions(family):
    alone = encode_captions(family, ["red box"])[0]
    together = encode_captions(family, ["", "red box"])[1]
    assert alone.keys() == together.keys()
    for key in alone:
        assert torch.equal(alone[key], together[key])


def test_captions_that_are_too_long_are_reported(family):
    words = "a red ring on a blue box " * 400
    assert family.truncated_captions(["a red box"]) == []
    assert family.truncated_captions(["a red box", words]) in ([], [words])


def test_blocks_belong_to_the_transformer(family):
    modules = set(map(id, family.transformer.modules()))
    assert family.blocks()
    assert all(id(block) in modules for block in family.blocks())


def test_only_models_with_experts_have_a_boundary(family):
    assert (family.boundary is not None) == isinstance(family.transformer, Experts)
    if family.boundary is not None:
        assert 0 < family.boundary < 1
        assert tuple(transformers_of(family.transformer)) == EXPERTS
        high = list(family.transformer.high.get_submodule("blocks").children())
        assert family.blocks()[: len(high)] == high


def test_adapter_targets_match_modules_of_every_transformer(family):
    for transformer in transformers_of(family.transformer).values():
        names = [name for name, _ in transformer.named_modules()]
        for target in family.adapter_targets:
            assert any(matches(name, target) for name in names), target


def test_the_prediction_type_is_known(family):
    assert family.prediction in ("flow", "epsilon", "v")


def test_sampling_gives_the_requested_shape_and_is_repeatable(family, shape):
    *texts, empty = encode_captions(family, ["one", "two", ""])
    image_sizes = [shape[:2]] * 2 if family.starts_from == "image" else []
    if family.takes_control:
        image_sizes = [family.control_size(*shape)] * 2
    request = SampleRequest(
        texts=texts,
        empty_text=empty,
        shape=shape,
        seed=3,
        steps=1 if family.takes_control else 2,  # edits are always sampled at a megapixel
        guidance=1.0 if family.takes_control else 2.0,
        images=[torch.zeros(3, height, width) for width, height in image_sizes],
    )
    with torch.no_grad():
        samples = family.sample(request)
        (again,) = family.sample(replace(request, texts=texts[:1], images=request.images[:1]))
    assert len(samples) == 2
    torch.testing.assert_close(samples[0].data, again.data)  # batch sizes round differently
    for sample in samples:
        if sample.kind == "audio":
            assert sample.data.shape == shape
        else:
            width, height, *frames = shape
            assert sample.data.shape == (3, *frames, height, width)
        assert sample.kind == (
            "image" if len(shape) == 2 and sample.kind != "audio" else sample.kind
        )
        assert torch.isfinite(sample.data).all()
    assert not torch.equal(samples[0].data, samples[1].data)


def test_an_exported_model_loads_again(family, tmp_path):
    family.export(tmp_path)
    back = load_family(ModelSection(family=family.name, path=str(tmp_path)))
    assert back.weights_digest() == family.weights_digest()
    assert back.identity() == family.identity()


def test_gradient_checkpointing_does_not_change_gradients(family, encoded):
    x0, conditions = family.split_encoded(encoded)
    text = conditions_for(family, ["one", "two"], conditions)
    family.transformer.train()
    gradients = []
    for recompute in (False, True):
        if recompute:
            family.enable_gradient_checkpointing()
        out = family.predict(forward_of(family), x0, torch.tensor([0.92, 0.95]), text)
        out.square().mean().backward()
        gradients.append([p.grad for p in family.transformer.parameters() if p.grad is not None])
        family.transformer.zero_grad()
    assert gradients[0]
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, recomputed)


def test_training_works_without_the_text_encoder(family, encoded):
    text = conditions_for(family, ["one", "two"], family.split_encoded(encoded)[1])
    family.release_text_encoder()
    x0, _ = family.split_encoded(encoded)
    with torch.no_grad():
        assert torch.isfinite(
            family.predict(forward_of(family), x0, torch.tensor([0.92, 0.95]), text)
        ).all()


def test_tiling_does_not_change_samples_smaller_than_a_tile(family, media, encoded):
    can_tile = family.set_tiling(enabled=True)
    tiled = family.encode(media)
    assert family.set_tiling(enabled=False) == can_tile
    if family.name in FAMILIES:  # other packages' families may or may not tile
        assert can_tile == (family.name not in NOT_TILED)
    assert torch.equal(tiled, encoded)
    assert torch.equal(family.encode(media), encoded)
