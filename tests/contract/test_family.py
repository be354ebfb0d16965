"""What every family promises. A new one is added to FAMILIES and must pass as it stands."""

import pytest
import torch

from gracetune.config.schema import ModelSection
from gracetune.models.family import FAMILIES, load_family
from gracetune.models.sampling import euler


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    return load_family(ModelSection(family=request.param))


@pytest.fixture(scope="module")
def size(family):
    return (4 * family.pixel_step, 6 * family.pixel_step)


@pytest.fixture(scope="module")
def latents(family, size):
    width, height = size
    return family.encode(torch.rand(2, 3, height, width) * 2 - 1)


def test_latents_have_the_shape_it_names(family, size, latents):
    assert latents.shape == (2, *family.latent_shape(*size))


def test_decoding_undoes_encoding(family, size):
    width, height = size
    pixels = torch.rand(2, 3, height, width) * 2 - 1
    decoded = family.decode(family.encode(pixels))
    assert decoded.shape == pixels.shape


def test_the_prediction_has_the_latents_shape_and_a_gradient(family, latents):
    text = family.stack_text(family.encode_text(["one two", ""]))
    out = family.predict(family.transformer, latents, torch.tensor([0.2, 0.9]), text)
    assert out.shape == latents.shape
    out.square().mean().backward()
    assert any(p.grad is not None for p in family.transformer.parameters())
    family.transformer.zero_grad()


def test_a_sample_does_not_depend_on_its_neighbours(family, latents):
    text = family.stack_text(family.encode_text(["one two", "three"]))
    levels = torch.tensor([0.2, 0.9])
    with torch.no_grad():
        both = family.predict(family.transformer, latents, levels, text)
        alone = family.predict(
            family.transformer, latents[1:], levels[1:], {k: t[1:] for k, t in text.items()}
        )
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)


def test_captions_are_encoded_alike_alone_and_together(family):
    alone = family.encode_text(["red box"])[0]
    together = family.encode_text(["", "red box"])[1]
    assert alone.keys() == together.keys()
    for key in alone:
        assert torch.equal(alone[key], together[key])


def test_blocks_are_parts_of_the_transformer(family):
    modules = set(map(id, family.transformer.modules()))
    assert family.blocks()
    assert all(id(block) in modules for block in family.blocks())


def test_adapter_targets_match_modules(family):
    names = [name for name, _ in family.transformer.named_modules()]
    for target in family.adapter_targets:
        assert any(name == target or name.endswith(f".{target}") for name in names), target


def test_sampling_gives_pictures(family, size):
    text = family.stack_text(family.encode_text(["one", ""]))
    halves = ({k: t[:1] for k, t in text.items()}, {k: t[1:] for k, t in text.items()})
    noise = torch.randn(1, *family.latent_shape(*size))
    with torch.no_grad():
        latents = euler(
            lambda x, s, t: family.predict(family.transformer, x, s, t),
            noise,
            *halves,
            steps=2,
            guidance=2.0,
        )
    assert family.decode(latents).shape == (1, 3, size[1], size[0])


def test_exported_weights_load_again(family, tmp_path):
    family.export(tmp_path)
    back = load_family(ModelSection(family=family.name, path=str(tmp_path)))
    assert back.weights_digest() == family.weights_digest()
    assert back.identity() == family.identity()


def test_checkpointing_can_be_switched_on(family, latents):
    family.enable_gradient_checkpointing()
    family.transformer.train()
    text = family.stack_text(family.encode_text(["one", "two"]))
    family.predict(family.transformer, latents, torch.tensor([0.2, 0.9]), text).sum().backward()
    assert any(p.grad is not None for p in family.transformer.parameters())
