"""Whole pipelines small enough for a test: the published classes, few layers, weights from a seed.

What is written is a folder that diffusers and `model.path` both read, tokenizer and all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORDS = ("a", "an", "the", "of", "on", "in", "red", "green", "blue", "ring", "box", "star", "sound")
VOCABULARY = 128
TEXT_WIDTH = 32


def write_miniature(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the miniature of this name (`wan22-t2v`, ...) and give its folder."""
    if name not in MINIATURES:
        raise ConfigError(f"there is no miniature {name!r}. There are: {', '.join(MINIATURES)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        MINIATURES[name](folder)
    return folder


def _tokenizer() -> object:
    """A word a token; what it does not know is one of a hundred others, by its bytes."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>"]
    pieces = [*special, *WORDS, *(chr(code) for code in range(33, 127))]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=""))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )


def _umt5() -> object:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=VOCABULARY,
            d_model=TEXT_WIDTH,
            d_kv=8,
            d_ff=37,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
        )
    ).eval()


def _wan(folder: Path, *, task: str, experts: int, five: bool) -> None:
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )

    channels = 16
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )

    def transformer() -> WanTransformer3DModel:
        return WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=2 * channels + 4 if task == "image" and not five else channels,
            out_channels=channels,
            text_dim=TEXT_WIDTH,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )

    boundary = {"text": 0.875, "image": 0.9}[task]
    cls = WanImageToVideoPipeline if task == "image" and not five else WanPipeline
    cls(
        tokenizer=_tokenizer(),
        text_encoder=_umt5(),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=transformer(),
        transformer_2=transformer() if experts == 2 else None,
        boundary_ratio=boundary if experts == 2 else None,
        expand_timesteps=five,
    ).save_pretrained(folder)


MINIATURES: dict[str, Callable[[Path], None]] = {
    "wan22-t2v": lambda folder: _wan(folder, task="text", experts=2, five=False),
    "wan22-i2v": lambda folder: _wan(folder, task="image", experts=2, five=False),
    "wan22-5b": lambda folder: _wan(folder, task="text", experts=1, five=True),
}
