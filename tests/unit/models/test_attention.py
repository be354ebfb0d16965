import pytest
from diffusers import WanTransformer3DModel

from gracetune.config.schema import ModelSection
from gracetune.errors import ConfigError
from gracetune.models.attention_backends import set_attention_backend
from gracetune.models.tiny import load


@pytest.fixture
def wan():
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        ffn_dim=16,
        text_dim=8,
        freq_dim=8,
        in_channels=4,
        out_channels=4,
    )


def backends(model):
    return {str(p._attention_backend) for p in model.attn_processors.values()}


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_torchs_own_choice_needs_no_switch(wan, name):
    before = backends(wan)
    set_attention_backend(wan, name)
    assert backends(wan) == before


def test_an_available_backend_is_switched_on(wan):
    set_attention_backend(wan, "math")
    assert backends(wan) == {"AttentionBackendName._NATIVE_MATH"}


@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_2", "sage", "xformers"])
def test_what_is_not_installed_is_refused_by_name(wan, name):
    with pytest.raises(ConfigError, match=f"{name}.*cannot be used here"):
        set_attention_backend(wan, name)


def test_an_unknown_name_lists_the_known(wan):
    with pytest.raises(ConfigError, match="flash_attn_3"):
        set_attention_backend(wan, "flash-attention")


def test_a_model_that_would_ignore_the_choice_is_named():
    with pytest.raises(ConfigError, match="SD3Transformer2DModel does not use"):
        set_attention_backend(load(ModelSection()).transformer, "cudnn")
