import json

import pytest
import torch

from gracetune.config.schema import ModelSection
from gracetune.errors import ConfigError, ModelError
from gracetune.models.family import load_family
from gracetune.models.tiny import load


def test_weights_are_a_function_of_the_seed():
    first, again, other = (
        load(ModelSection(init_seed=seed)).weights_digest() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_loading_leaves_the_process_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load(ModelSection())
    assert torch.equal(torch.rand(2), expected)


def test_words_have_the_same_vectors_in_any_caption_and_place_is_told():
    family = load(ModelSection())
    red, also_red, order = (
        t["tokens"] for t in family.encode_text(["a red ring", "A RED box", "red a ring"])
    )
    assert torch.equal(red[1], also_red[1])
    assert not torch.equal(red[1], order[0])


def test_long_captions_are_not_cut():
    family = load(ModelSection())
    text = family.stack_text(family.encode_text(["word " * 40, "short"]))
    assert text["tokens"].shape == (2, 48, 64)
    assert text["tokens"][0, 39].abs().sum() > 0
    assert text["tokens"][1, 1:].abs().sum() == 0


def test_what_is_exported_is_what_is_loaded(tmp_path):
    family = load(ModelSection(init_seed=5))
    family.export(tmp_path)
    back = load_family(ModelSection(path=str(tmp_path)))
    assert back.weights_digest() == family.weights_digest()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"transformer/config\.json"):
        load(ModelSection(path=str(tmp_path)))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"_class_name": "Other"}))
    with pytest.raises(ModelError, match="holds a Other"):
        load(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize("harm", ["config", "weights"])
def test_damaged_files_are_refused_by_the_name_of_the_folder(tmp_path, harm):
    load(ModelSection()).export(tmp_path)
    name = "config.json" if harm == "config" else "diffusion_pytorch_model.safetensors"
    file = tmp_path / "transformer" / name
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ModelError, match="cannot be read"):
        load(ModelSection(path=str(tmp_path)))


def test_an_unknown_family_lists_the_known():
    message = r"family 'tinny' is not known; did you mean 'tiny'\? Known: .*tiny, wan22"
    with pytest.raises(ConfigError, match=message):
        load_family(ModelSection(family="tinny"))
