import json

import pytest
import torch

from gracetune.config.schema import ModelSection
from gracetune.errors import ConfigError, ModelError
from gracetune.models.family import load_family
from gracetune.models.tiny import euler, load


def test_weights_depend_only_on_the_seed():
    first, again, other = (
        load(ModelSection(init_seed=seed)).weights_hasher()() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_loading_does_not_change_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load(ModelSection())
    assert torch.equal(torch.rand(2), expected)


def test_a_words_vector_depends_on_the_word_and_its_position():
    family = load(ModelSection())
    first, second, swapped = (
        t["tokens"] for t in family.encode_text(["a red ring", "A RED box", "red a ring"])
    )
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], swapped[0])


def test_long_captions_are_not_truncated():
    family = load(ModelSection())
    text = family.stack_text(family.encode_text(["word " * 40, "short"]))
    assert text["tokens"].shape == (2, 48, 64)
    assert text["tokens"][0, 39].abs().sum() > 0
    assert text["tokens"][1, 1:].abs().sum() == 0


def test_an_exported_model_loads_again(tmp_path):
    family = load(ModelSection(init_seed=5))
    family.export(tmp_path)
    back = load_family(ModelSection(path=str(tmp_path)))
    assert back.weights_hasher()() == family.weights_hasher()()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"transformer/config\.json\. Remove model\.path"):
        load(ModelSection(path=str(tmp_path)))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"_class_name": "Other"}))
    with pytest.raises(ModelError, match=r"holds a Other, .* set model\.family to"):
        load(ModelSection(path=str(tmp_path)))


def test_a_missing_folder_is_named_as_missing(tmp_path):
    with pytest.raises(ModelError, match=r"missing', which does not exist\. Remove model\.path"):
        load(ModelSection(path=str(tmp_path / "missing")))


@pytest.mark.parametrize("damaged", ["config", "weights"])
def test_damaged_files_are_refused(tmp_path, damaged):
    load(ModelSection()).export(tmp_path)
    name = "config.json" if damaged == "config" else "diffusion_pytorch_model.safetensors"
    file = tmp_path / "transformer" / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ModelError, match="cannot be read"):
        load(ModelSection(path=str(tmp_path)))


def test_an_unknown_family_is_refused_with_the_known_ones():
    message = r"family 'tinny' is not known; did you mean 'tiny'\? Known: .*tiny, wan22"
    with pytest.raises(ConfigError, match=message):
        load_family(ModelSection(family="tinny"))


TEXT = {"tokens": torch.ones(2, 1)}
EMPTY = {"tokens": torch.zeros(2, 1)}


def test_euler_solves_a_straight_path_in_one_step():
    x0, noise = torch.randn(2, 3), torch.randn(2, 3)
    out = euler(lambda x, s, text: noise - x0, noise, TEXT, EMPTY, steps=1, guidance=1.0)
    torch.testing.assert_close(out, x0)


def test_euler_sigmas_fall_from_one_and_stop_before_zero():
    seen = []

    def predict(x, s, text):
        seen.append(s[0].item())
        return torch.zeros_like(x)

    euler(predict, torch.zeros(2, 3), TEXT, EMPTY, steps=4, guidance=1.0)
    assert seen == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("guidance", [0.0, 2.0, 5.0])
def test_guidance_extrapolates_from_the_empty_caption(guidance):
    def predict(x, s, text):
        return text["tokens"].expand_as(x)  # 1 with the caption, 0 without

    out = euler(predict, torch.zeros(2, 3), TEXT, EMPTY, steps=5, guidance=guidance)
    torch.testing.assert_close(out, torch.full((2, 3), -guidance))
