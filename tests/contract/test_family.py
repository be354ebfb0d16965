"""What every family promises. A new one is added to MADE and must pass as it stands."""

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

MADE = {
    "flux": "flux",
    "qwen-image": "qwen_image",
    "qwen-image-edit": "qwen_image",
    "stable-audio": "stable_audio",
    "tiny": None,
    "wan22-t2v": "wan22",
    "wan22-i2v": "wan22",
    "wan22-5b": "wan22",
}
"""Each model that is tried: its miniature's name, and the family that reads it."""
WHOLE = {"stable_audio", "tiny"}
"""Families that have no tiles."""


def test_every_family_is_tried():
    assert set(FAMILIES) == {family or name for name, family in MADE.items()}


@pytest.fixture(scope="module", params=sorted(MADE))
def family(request, miniature):
    return load_made(request.param, miniature)


def load_made(name, miniature):
    if MADE[name] is None:
        return load_family(ModelSection(family=name))
    return load_family(ModelSection(family=MADE[name], path=str(miniature(name))))


@pytest.fixture(scope="module")
def shape(family):
    """Of the smallest bucket that shows every axis."""
    if "audio" in family.kinds:
        return (2, 4096)
    size = (2 * family.pixel_step, 3 * family.pixel_step)
    return (*size, 5) if "video" in family.kinds else size


@pytest.fixture(scope="module")
def media(family, shape):
    generator = torch.Generator().manual_seed(0)
    if "audio" in family.kinds:
        return torch.rand(2, *shape, generator=generator) * 2 - 1
    width, height, *frames = shape
    channels = 6 if family.takes_control else 3
    return torch.rand(2, channels, *frames, height, width, generator=generator) * 2 - 1


@pytest.fixture(scope="module")
def encoded(family, media):
    return family.encode(media)


def forward(family):
    return bind_expert(family.transformer, None if family.boundary is None else "high")


def texts_of(family, captions):
    """A control, where there is one, is the same for all captions."""
    if not family.takes_control:
        return family.encode_text(captions)
    return family.encode_text(captions, [torch.zeros(3, 32, 32)] * len(captions))


def conditions(family, captions, given):
    return {**family.stack_text(texts_of(family, captions)), **given}


def test_encoded_samples_have_the_shape_it_names(family, shape, encoded):
    assert encoded.shape == (2, *family.latent_shape(*shape))
    assert not encoded.requires_grad


def test_what_is_encoded_does_not_depend_on_its_neighbours(family, media, encoded):
    torch.testing.assert_close(family.encode(media[1:]), encoded[1:], rtol=1e-4, atol=1e-5)


def test_every_kind_of_picture_has_a_shape(family):
    if "image" in family.kinds:
        channels = 6 if family.takes_control else 3
        size = (2 * family.pixel_step, family.pixel_step)
        pixels = torch.rand(1, channels, *reversed(size)) * 2 - 1
        assert family.encode(pixels).shape == (1, *family.latent_shape(*size))


def test_the_prediction_has_the_latents_shape_and_a_gradient(family, encoded):
    x0, given = family.split_encoded(encoded)
    text = conditions(family, ["one two", ""], given)
    out = family.predict(forward(family), x0, torch.tensor([0.92, 0.97]), text)
    assert out.shape == x0.shape
    assert family.num_tokens(x0.shape[1:]) > 0
    out.square().mean().backward()
    assert any(p.grad is not None for p in family.transformer.parameters())
    family.transformer.zero_grad()


def test_a_sample_does_not_depend_on_its_neighbours(family, encoded):
    x0, given = family.split_encoded(encoded)
    text = conditions(family, ["one two", "three"], given)
    levels = torch.tensor([0.91, 0.98])
    with torch.no_grad():
        both = family.predict(forward(family), x0, levels, text)
        alone = family.predict(
            forward(family), x0[1:], levels[1:], {k: t[1:] for k, t in text.items()}
        )
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)


def test_the_caption_and_the_level_matter(family, encoded):
    x0, given = family.split_encoded(encoded)
    levels = torch.tensor([0.91, 0.98])
    with torch.no_grad():
        one = family.predict(forward(family), x0, levels, conditions(family, ["a", "b"], given))
        other = family.predict(forward(family), x0, levels, conditions(family, ["c", "d"], given))
        later = family.predict(
            forward(family), x0, levels - 0.005, conditions(family, ["a", "b"], given)
        )
    assert not torch.equal(one, other)
    assert not torch.equal(one, later)


def test_captions_are_encoded_alike_alone_and_together(family):
    alone = texts_of(family, ["red box"])[0]
    together = texts_of(family, ["", "red box"])[1]
    assert alone.keys() == together.keys()
    for key in alone:
        assert torch.equal(alone[key], together[key])


def test_captions_that_are_cut_are_told(family):
    words = "a red ring on a blue box " * 400
    assert family.truncated_captions(["a red box"]) == []
    assert family.truncated_captions(["a red box", words]) in ([], [words])


def test_blocks_are_parts_of_the_transformer(family):
    modules = set(map(id, family.transformer.modules()))
    assert family.blocks()
    assert all(id(block) in modules for block in family.blocks())


def test_two_experts_come_with_a_boundary_and_one_comes_without(family):
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


def test_it_says_what_it_predicts(family):
    assert family.prediction in ("flow", "epsilon", "v")


def test_sampling_gives_what_was_ordered_and_again_the_same(family, shape):
    *texts, empty = texts_of(family, ["one", "two", ""])
    needs_image = family.starts_from == "image" or family.takes_control
    order = SampleRequest(
        texts=texts,
        empty_text=empty,
        shape=shape,
        seed=3,
        steps=1 if family.takes_control else 2,  # an edit always looks at a megapixel
        guidance=1.0 if family.takes_control else 2.0,
        images=[torch.zeros(3, shape[1], shape[0])] * 2 if needs_image else (),
    )
    with torch.no_grad():
        made = family.sample(order)
        (again,) = family.sample(replace(order, texts=texts[:1], images=order.images[:1]))
    assert len(made) == 2
    torch.testing.assert_close(made[0].data, again.data)  # one or many at once round differently
    for one in made:
        if one.kind == "audio":
            assert one.data.shape == shape
        else:
            width, height, *frames = shape
            assert one.data.shape == (3, *frames, height, width)
        assert one.kind == ("image" if len(shape) == 2 and one.kind != "audio" else one.kind)
        assert torch.isfinite(one.data).all()
    assert not torch.equal(made[0].data, made[1].data)


def test_exported_weights_load_again(family, tmp_path):
    family.export(tmp_path)
    back = load_family(ModelSection(family=family.name, path=str(tmp_path)))
    assert back.weights_digest() == family.weights_digest()
    assert back.identity() == family.identity()


def test_checkpointing_changes_no_gradient(family, encoded):
    x0, given = family.split_encoded(encoded)
    text = conditions(family, ["one", "two"], given)
    family.transformer.train()
    gradients = []
    for recompute in (False, True):
        if recompute:
            family.enable_gradient_checkpointing()
        out = family.predict(forward(family), x0, torch.tensor([0.92, 0.95]), text)
        out.square().mean().backward()
        gradients.append([p.grad for p in family.transformer.parameters() if p.grad is not None])
        family.transformer.zero_grad()
    assert gradients[0]
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(kept, recomputed)


def test_a_released_text_encoder_is_not_needed_to_train(family, encoded):
    text = conditions(family, ["one", "two"], family.split_encoded(encoded)[1])
    family.release_text_encoder()
    x0, _ = family.split_encoded(encoded)
    with torch.no_grad():
        assert torch.isfinite(
            family.predict(forward(family), x0, torch.tensor([0.92, 0.95]), text)
        ).all()


def test_tiles_can_be_switched_and_leave_what_is_smaller_than_one_as_it_is(family, media, encoded):
    can = family.set_tiling(enabled=True)
    tiled = family.encode(media)
    assert family.set_tiling(enabled=False) == can
    if family.name in FAMILIES:  # others say for themselves
        assert can == (family.name not in WHOLE)
    assert torch.equal(tiled, encoded)
    assert torch.equal(family.encode(media), encoded)
