import json
import shutil

import pytest
import torch
from torch import nn

from gracetune.config.schema import ModelSection
from gracetune.errors import ModelError
from gracetune.models import diffusers_family
from gracetune.models.family import ReloadableText, load_family

CPU = torch.device("cpu")
CAPTION = "a red circle"


def load(family, folder):
    return load_family(ModelSection(family=family, path=str(folder)))


@pytest.fixture
def copied(miniature, tmp_path):
    return shutil.copytree(miniature("flux"), tmp_path / "model")


@pytest.mark.parametrize(("name", "family"), [("sd35-medium", "sd3"), ("wan22-t2v", "wan22")])
def test_released_text_encoders_can_be_loaded_again(miniature, name, family):
    found = load(family, miniature(name))
    assert isinstance(found, ReloadableText)
    (before,) = found.encode_text([CAPTION])
    assert found.text_encoder_nbytes() == 0
    found.release_text_encoder()
    assert found.text_encoders == []
    assert found.text_encoder_nbytes() > 0
    found.restore_text_encoder(CPU)
    (after,) = found.encode_text([CAPTION])
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert found.text_encoder_nbytes() == 0


def test_text_encoders_are_loaded_when_a_text_is_encoded(miniature):
    folder = miniature("flux")
    found = load("flux", folder)
    files = [folder / name / "model.safetensors" for name in ("text_encoder", "text_encoder_2")]
    assert found.text_encoders == []
    assert found.text_encoder_nbytes() == sum(file.stat().st_size for file in files)
    assert found.identity()
    assert found.truncated_captions([CAPTION, "red " * 600]) == ["red " * 600]
    found.release_text_encoder()  # there is nothing to free
    assert found.text_encoders == []
    assert found.encode_text([CAPTION])
    assert len(found.text_encoders) == 2


def test_text_encoders_are_loaded_to_the_device_of_the_family(miniature, monkeypatch):
    found = load("flux", miniature("flux"))
    monkeypatch.setattr(found, "encode_caption", lambda caption: {})  # meta tensors have no values
    found.to(torch.device("meta"))
    found.encode_text([CAPTION])
    assert {encoder.device.type for encoder in found.text_encoders} == {"meta"}


def test_loading_text_encoders_draws_no_random_numbers(copied, monkeypatch):
    def draw(parts, name):
        torch.rand(1)  # as for weights that the file lacks
        return nn.Identity()

    monkeypatch.setattr(diffusers_family, "load_text_encoder", draw)
    found = load("flux", copied)
    before = torch.get_rng_state()
    found.restore_text_encoder(CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_encoder_that_could_not_be_loaded_is_loaded_the_next_time(copied):
    found = load("flux", copied)
    weights = copied / "text_encoder_2" / "model.safetensors"
    moved = weights.rename(copied / "moved")
    for _ in range(2):
        with pytest.raises(ModelError, match="text_encoder_2 cannot be read"):
            found.encode_text([CAPTION])
    moved.rename(weights)
    assert found.encode_text([CAPTION])


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def name_another_class(folder):
    index = json.loads((folder / "model_index.json").read_text())
    index["text_encoder_2"][1] = "NoSuchEncoder"
    (folder / "model_index.json").write_text(json.dumps(index))


def split_in_shards(folder):
    weights = folder / "text_encoder_2" / "model.safetensors"
    weights.rename(weights.with_name("model-00001-of-00002.safetensors"))
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    weights.with_name("model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f / "text_encoder_2"), "has no folder 'text_encoder_2'"),
        (
            lambda f: (f / "text_encoder_2" / "config.json").unlink(),
            r"text_encoder_2 cannot be read .*config\.json",
        ),
        (
            lambda f: (f / "text_encoder_2" / "config.json").write_text("{"),
            "text_encoder_2 cannot be read",
        ),
        (
            lambda f: (f / "text_encoder_2" / "model.safetensors").unlink(),
            "text_encoder_2 cannot be read",
        ),
        (lambda f: cut(f / "text_encoder_2" / "model.safetensors"), "text_encoder_2 cannot be rea"),
        (split_in_shards, r"text_encoder_2 cannot be read .*00002-of-00002"),
        (name_another_class, r"the class transformers\.NoSuchEncoder for text_encoder_2"),
    ],
)
def test_an_incomplete_text_encoder_is_refused_before_it_is_needed(copied, damage, message):
    damage(copied)
    with pytest.raises(ModelError, match=message):
        load("flux", copied)
