import pytest
import torch

from gracetune.config.schema import ModelSection
from gracetune.models.family import ReloadableText, load_family


@pytest.mark.parametrize(("name", "family"), [("sd35-medium", "sd3"), ("wan22-t2v", "wan22")])
def test_released_text_encoders_can_be_loaded_again(miniature, name, family):
    found = load_family(ModelSection(family=family, path=str(miniature(name))))
    assert isinstance(found, ReloadableText)
    (before,) = found.encode_text(["a red circle"])
    found.release_text_encoder()
    assert found.text_encoders == []
    assert found.text_encoder_nbytes() > 0
    found.restore_text_encoder(torch.device("cpu"))
    (after,) = found.encode_text(["a red circle"])
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert found.text_encoder_nbytes() == 0
