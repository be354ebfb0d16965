"""Write miniature pipelines: the published classes with few, narrow layers and random weights.

The folders have all components, tokenizers included, and are read by diffusers and `model.path`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from gracetune.errors import ConfigError
from gracetune.models.pipeline_folder import without_progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORDS = ("a", "an", "the", "of", "on", "in", "red", "green", "blue", "ring", "box", "star", "sound")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that mark an image in a text. Their ids start at 3, after the special tokens."""
VOCABULARY = 128
CHAT_TEMPLATE = (
    "{% for message in messages if message.role == 'user' %}the {% if message.content is string %}"
    "{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %} of {% endfor %}a"
)
TEXT_WIDTH = 32


class Miniature(NamedTuple):
    """A model of the tests: the function that writes its folder, and the family that reads it."""

    write: Callable[[Path], None]
    family: str | None
    """None for a model that every family refuses."""
    kind: Literal["image", "edit", "first frame", "video", "audio"] = "image"
    """The data that it is trained on: images, edits of images, videos, or audio."""


def write_miniature(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the miniature of this name, such as `wan22-t2v`, and return its folder."""
    if name not in MINIATURES:
        raise ConfigError(f"There is no miniature {name!r}; known: {', '.join(MINIATURES)}.")
    with torch.random.fork_rng(devices=[]), without_progress_bars():
        torch.manual_seed(seed)
        MINIATURES[name].write(folder)
    return folder


def _tokenizer(length: int = 512, *, chat: bool = False) -> object:
    """Return a tokenizer with one token per known word; other words are split into characters.

    With `chat`, it has a chat template, as those of language models have.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>", *VISION_TOKENS]
    pieces = [*special, *WORDS, *(chr(code) for code in range(33, 127))]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
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
        additional_special_tokens=list(VISION_TOKENS),
        model_max_length=length,
        **({"chat_template": CHAT_TEMPLATE} if chat else {}),
    )


def _t5(width: int = TEXT_WIDTH) -> object:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=VOCABULARY, d_model=width, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    ).eval()


def _clip(*, projected: bool = False) -> object:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    cls = CLIPTextModelWithProjection if projected else CLIPTextModel
    return cls(
        CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=TEXT_WIDTH,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=4,
            projection_dim=TEXT_WIDTH,
            eos_token_id=1,
            bos_token_id=0,
            pad_token_id=0,
        )
    ).eval()


def _kl_vae(
    channels: int, blocks: int = 2, *, shift: float | None = 0.1159, tile: int = 32
) -> object:
    """Return the VAE of FLUX.1, whose latents are shifted and scaled.

    The published one has four blocks, and cells of eight pixels. Older models have no shift.
    Larger images than `tile` are encoded in tiles.
    """
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(4,) * blocks,
        layers_per_block=1,
        norm_num_groups=1,
        latent_channels=channels,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=shift,
        scaling_factor=0.3611,
        sample_size=tile if blocks == 2 else 1024,
    )


def _shifting_scheduler() -> object:
    """Return a scheduler whose sigmas depend on the number of tokens, as of FLUX.1."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def _unet(folder: Path, *, is_sdxl: bool, prediction: str = "epsilon") -> None:
    """Write SD 1.5 or SDXL, with all stages of the published U-Net.

    A model that predicts v has a schedule that ends in pure noise. The scheduler is SDXL's: with
    the one of SD 1.5 a sampler ends before the clean latents.
    """
    from diffusers import (
        EulerDiscreteScheduler,
        StableDiffusionPipeline,
        StableDiffusionXLPipeline,
        UNet2DConditionModel,
    )

    channels, time_width, with_attention = 4, 4, 2 if is_sdxl else 3
    stages = ["CrossAttn{}Block2D"] * with_attention
    down = ["{}Block2D", *stages] if is_sdxl else [*stages, "{}Block2D"]
    sdxl: dict[str, Any] = {
        "transformer_layers_per_block": (1, 1, 2),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": time_width,
        "projection_class_embeddings_input_dim": TEXT_WIDTH + 6 * time_width,
    }
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=channels,
        out_channels=channels,
        down_block_types=tuple(name.format("Down") for name in down),
        up_block_types=tuple(name.format("Up") for name in reversed(down)),
        block_out_channels=(8,) * len(down),
        norm_num_groups=2,
        attention_head_dim=2,
        cross_attention_dim=(2 if is_sdxl else 1) * TEXT_WIDTH,
        **sdxl if is_sdxl else {},
    )
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        rescale_betas_zero_snr=prediction == "v_prediction",
        timestep_spacing="leading",
        steps_offset=1,
    )
    common = {
        "scheduler": scheduler,
        "vae": _kl_vae(channels, shift=None, tile=64),
        "text_encoder": _clip(),
        "tokenizer": _tokenizer(length=77),
        "unet": unet,
    }
    pipeline: Any
    if is_sdxl:
        second = {"text_encoder_2": _clip(projected=True), "tokenizer_2": _tokenizer(length=77)}
        pipeline = StableDiffusionXLPipeline(**common, **second)
    else:
        pipeline = StableDiffusionPipeline(
            **common, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    pipeline.save_pretrained(folder)


def _sd3(folder: Path, *, is_medium: bool) -> None:
    """Write SD3.5: large, or medium, which has blocks with two kinds of attention.

    ComfyUI takes the hidden size for 64 times the number of blocks.
    """
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    channels = 4
    StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_kl_vae(channels),
        text_encoder=_clip(projected=True),
        tokenizer=_tokenizer(length=77),
        text_encoder_2=_clip(projected=True),
        tokenizer_2=_tokenizer(length=77),
        text_encoder_3=_t5(2 * TEXT_WIDTH),
        tokenizer_3=_tokenizer(),
        transformer=SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=channels,
            out_channels=channels,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=16,
            joint_attention_dim=2 * TEXT_WIDTH,
            caption_projection_dim=128,
            pooled_projection_dim=2 * TEXT_WIDTH,
            pos_embed_max_size=32,
            dual_attention_layers=(0,) if is_medium else (),
            qk_norm="rms_norm",
        ),
    ).save_pretrained(folder)


def _chroma(folder: Path) -> None:
    from diffusers import ChromaPipeline, ChromaTransformer2DModel

    channels = 4
    ChromaPipeline(
        scheduler=_shifting_scheduler(),
        vae=_kl_vae(channels),
        text_encoder=_t5(),
        tokenizer=_tokenizer(),
        transformer=ChromaTransformer2DModel(
            in_channels=4 * channels,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 4, 8),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
    ).save_pretrained(folder)


def _qwen3(layers: int = 3, *, causal_lm: bool = False) -> object:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

    return (Qwen3ForCausalLM if causal_lm else Qwen3Model)(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=TEXT_WIDTH,
            intermediate_size=37,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
        )
    ).eval()


def _z_image(folder: Path) -> None:
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    channels = 4
    transformer = ZImageTransformer2DModel(
        in_channels=channels,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    ZImagePipeline(
        scheduler=_shifting_scheduler(),
        vae=_kl_vae(channels),
        text_encoder=_qwen3(),
        tokenizer=_tokenizer(chat=True),
        transformer=transformer,
    ).save_pretrained(folder)


def _mistral3(layers: int) -> object:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={
                "model_type": "mistral",
                "vocab_size": VOCABULARY,
                "hidden_size": TEXT_WIDTH,
                "intermediate_size": 37,
                "num_hidden_layers": layers,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            vision_config={
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            image_token_index=5,
        )
    ).eval()


def _flux2_vae(channels: int) -> object:
    """Return the VAE of FLUX.2, whose batch norm, which normalises latents, is random."""
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        norm_num_groups=1,
        latent_channels=channels,
    )
    torch.nn.init.normal_(vae.bn.running_mean)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return vae


def _flux2(folder: Path, *, is_klein: bool) -> None:
    """Write FLUX.2 dev or Klein. They read 30 or 27 layers of a language model."""
    from diffusers import Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel

    channels = 4
    (Flux2KleinPipeline if is_klein else Flux2Pipeline)(
        scheduler=_shifting_scheduler(),
        vae=_flux2_vae(channels),
        text_encoder=_qwen3(27, causal_lm=True) if is_klein else _mistral3(30),
        tokenizer=_tokenizer(chat=True),
        transformer=Flux2Transformer2DModel(
            in_channels=4 * channels,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * TEXT_WIDTH,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=not is_klein,
        ),
    ).save_pretrained(folder)


def _flux(folder: Path, *, is_kontext: bool = False) -> None:
    from diffusers import FluxKontextPipeline, FluxPipeline, FluxTransformer2DModel

    channels = 4
    (FluxKontextPipeline if is_kontext else FluxPipeline)(
        scheduler=_shifting_scheduler(),
        vae=_kl_vae(channels, blocks=4 if is_kontext else 2),
        text_encoder=_clip(),
        tokenizer=_tokenizer(length=77),
        text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(),
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * channels,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
    ).save_pretrained(folder)


def _qwen_image_edit(folder: Path, pipeline: str = "QwenImageEditPipeline") -> None:
    """Write the text-to-image miniature, add an image processor and change the pipeline class.

    `pipeline` is that of the first Qwen-Image-Edit, or of 2511, whose references have timestep 0.
    """
    import json

    from transformers import Qwen2VLImageProcessorPil

    _qwen_image(folder, zero_cond_t=pipeline == "QwenImageEditPlusPipeline")
    edge = 28
    Qwen2VLImageProcessorPil(min_pixels=edge**2, max_pixels=4 * edge**2).save_pretrained(
        folder / "processor"
    )
    index = folder / "model_index.json"
    content = json.loads(index.read_text()) | {"_class_name": pipeline}
    content["processor"] = ["transformers", "Qwen2VLProcessor"]
    index.write_text(json.dumps(content, indent=2))


class QwenProcessor:
    """Stands in for Qwen2VLProcessor, which needs torchvision for videos: images and texts only."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self._image_processor, self._tokenizer = image_processor, tokenizer

    def __call__(self, text: list[str], images: Any, **options: Any) -> Any:
        from transformers import BatchFeature

        seen = self._image_processor(images=images, return_tensors="pt")
        counts = (seen["image_grid_thw"].prod(1) // self._image_processor.merge_size**2).tolist()
        (start, *others) = text[0].split("<|image_pad|>")
        pairs = zip(counts, others, strict=True)
        whole = start + "".join("<|image_pad|>" * count + other for count, other in pairs)
        return BatchFeature({**self._tokenizer([whole], **options), **seen})


def _qwen_vae(channels: int) -> object:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1] * channels,
        latents_std=[1.5] * channels,
    )


def _qwen3_vl(layers: int = 3) -> object:
    from transformers import Qwen3VLConfig, Qwen3VLModel

    rope = {"mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_theta": 1000000.0}
    text_config = {
        "vocab_size": VOCABULARY,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 37,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", **rope},
    }
    vision_config = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLModel(Qwen3VLConfig(text_config=text_config, vision_config=vision_config)).eval()


def _krea2(folder: Path) -> None:
    """Write Krea 2, which reads two layers of its language model."""
    from diffusers import Krea2Pipeline, Krea2Transformer2DModel

    channels = 4
    Krea2Pipeline(
        scheduler=_shifting_scheduler(),
        vae=_qwen_vae(channels),
        text_encoder=_qwen3_vl(),
        tokenizer=_tokenizer(length=2048),
        transformer=Krea2Transformer2DModel(
            in_channels=4 * channels,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=TEXT_WIDTH,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        ),
        text_encoder_select_layers=(1, 3),
    ).save_pretrained(folder)


def _ideogram4(folder: Path) -> None:
    """Write Ideogram 4, which reads 13 of the 36 layers of its language model."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        Ideogram4Pipeline,
        Ideogram4Transformer2DModel,
    )

    channels = 4
    transformer, guide = (
        Ideogram4Transformer2DModel(
            in_channels=4 * channels,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=64,
            adaln_dim=16,
            llm_features_dim=13 * TEXT_WIDTH,
            mrope_section=(4, 2, 2),
        )
        for _ in range(2)
    )
    Ideogram4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_flux2_vae(channels),
        text_encoder=_qwen3_vl(36),
        tokenizer=_tokenizer(length=2048, chat=True),
        transformer=transformer,
        unconditional_transformer=guide,
    ).save_pretrained(folder)


def _qwen_image(folder: Path, zero_cond_t: bool = False) -> None:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    channels = 4
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192
        ),
        vae=_qwen_vae(channels),
        text_encoder=_qwen_vl(),
        tokenizer=_tokenizer(length=2048),
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * channels,
            out_channels=channels,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(4, 4, 8),
            zero_cond_t=zero_cond_t,
        ),
    ).save_pretrained(folder)


def _qwen_vl() -> object:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": VOCABULARY,
                "hidden_size": TEXT_WIDTH,
                "intermediate_size": 37,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [2, 3, 3],
                    "rope_theta": 1000000.0,
                },
            },
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": TEXT_WIDTH,
            },
            vision_start_token_id=3,
            vision_end_token_id=4,
            image_token_id=5,
            video_token_id=6,
        )
    ).eval()


def _stable_audio(folder: Path) -> None:
    from diffusers import (
        AutoencoderOobleck,
        CosineDPMSolverMultistepScheduler,
        StableAudioDiTModel,
        StableAudioPipeline,
        StableAudioProjectionModel,
    )

    channels = 4
    StableAudioPipeline(
        vae=AutoencoderOobleck(
            encoder_hidden_size=2 * channels,
            downsampling_ratios=[4, 8],
            decoder_channels=3,
            decoder_input_channels=channels,
            audio_channels=2,
            channel_multiples=[1, 2],
            sampling_rate=16000,
        ),
        text_encoder=_t5(),
        projection_model=StableAudioProjectionModel(
            text_encoder_dim=TEXT_WIDTH,
            conditioning_dim=TEXT_WIDTH,
            min_value=0,
            max_value=32,
        ),
        tokenizer=_tokenizer(length=16),
        transformer=StableAudioDiTModel(
            sample_size=160,
            in_channels=channels,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_attention_heads=2,
            out_channels=channels,
            cross_attention_dim=TEXT_WIDTH,
            cross_attention_input_dim=TEXT_WIDTH,
            global_states_input_dim=2 * TEXT_WIDTH,
            time_proj_dim=8,
        ),
        scheduler=CosineDPMSolverMultistepScheduler(
            sigma_min=0.3, sigma_max=500, prediction_type="v_prediction", sigma_data=1.0
        ),
    ).save_pretrained(folder)


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


def _wan(
    folder: Path,
    *,
    task: str,
    experts: int,
    is_5b: bool = False,
    clip_images: int = 0,
) -> None:
    """Write a Wan pipeline. `clip_images`: number of embedded images; 1 for I2V of Wan 2.1."""
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
            in_channels=2 * channels + 4 if task == "image" and not is_5b else channels,
            out_channels=channels,
            text_dim=TEXT_WIDTH,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
            image_dim=TEXT_WIDTH if clip_images else None,
            added_kv_proj_dim=24 if clip_images else None,
            pos_embed_seq_len=2 * 5 if clip_images == 2 else None,
        )

    boundary = {"text": 0.875, "image": 0.9}[task]
    cls = WanImageToVideoPipeline if task == "image" and not is_5b else WanPipeline
    cls(
        tokenizer=_tokenizer(),
        text_encoder=_umt5(),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=transformer(),
        transformer_2=transformer() if experts == 2 else None,
        boundary_ratio=boundary if experts == 2 else None,
        expand_timesteps=is_5b,
        **_clip_vision() if clip_images else {},
    ).save_pretrained(folder)


def _clip_vision() -> dict[str, object]:
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
    )
    size = {"height": 8, "width": 8}
    processor = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=size)
    return {"image_encoder": CLIPVisionModel(config).eval(), "image_processor": processor}


WAN21_IMAGE = partial(_wan, task="image", experts=1)
MINIATURES = {
    "flux": Miniature(_flux, "flux"),
    "flux-kontext": Miniature(partial(_flux, is_kontext=True), "flux", "edit"),
    "flux2-dev": Miniature(partial(_flux2, is_klein=False), "flux2"),
    "flux2-klein": Miniature(partial(_flux2, is_klein=True), "flux2"),
    "qwen-image": Miniature(_qwen_image, "qwen_image"),
    "qwen-image-edit": Miniature(_qwen_image_edit, "qwen_image", "edit"),
    "qwen-image-edit-2511": Miniature(
        partial(_qwen_image_edit, pipeline="QwenImageEditPlusPipeline"), "qwen_image", "edit"
    ),
    "sd15": Miniature(partial(_unet, is_sdxl=False), "sd15"),
    "sdxl": Miniature(partial(_unet, is_sdxl=True), "sdxl"),
    "sdxl-v": Miniature(partial(_unet, is_sdxl=True, prediction="v_prediction"), "sdxl"),
    "sd35-medium": Miniature(partial(_sd3, is_medium=True), "sd3"),
    "sd35-large": Miniature(partial(_sd3, is_medium=False), "sd3"),
    "chroma": Miniature(_chroma, "chroma"),
    "z-image": Miniature(_z_image, "z_image"),
    "krea2": Miniature(_krea2, "krea2"),
    "ideogram4": Miniature(_ideogram4, "ideogram4"),
    "stable-audio": Miniature(_stable_audio, "stable_audio", "audio"),
    "wan21-t2v": Miniature(partial(_wan, task="text", experts=1), "wan22", "video"),
    "wan21-i2v": Miniature(partial(WAN21_IMAGE, clip_images=1), "wan22", "first frame"),
    "wan21-flf2v": Miniature(partial(WAN21_IMAGE, clip_images=2), None, "video"),
    "wan22-t2v": Miniature(partial(_wan, task="text", experts=2), "wan22", "video"),
    "wan22-i2v": Miniature(partial(_wan, task="image", experts=2), "wan22", "first frame"),
    "wan22-5b": Miniature(partial(_wan, task="text", experts=1, is_5b=True), "wan22", "video"),
}
"""Every model of the tests. The contract of families runs on all that a family reads. Tests
that need one model of a family use the first."""


SMALLER = 8
"""How much smaller the edges of references are than those of published models."""


def shrink_references(patch):
    """Let models that edit images read references of 128 instead of 1024 pixels.

    Both the families and the pipelines of diffusers read their sizes from their modules.
    """
    from diffusers.pipelines.flux import pipeline_flux_kontext as kontext
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    from gracetune.models import qwen_image

    for name in ("REFERENCE_AREA", "TEXT_REFERENCE_AREA"):
        patch.setattr(qwen_image, name, getattr(qwen_image, name) // SMALLER**2)
    for module in (edit, plus):
        patch.setattr(module, "calculate_dimensions", _smaller(module.calculate_dimensions))
    sizes = kontext.PREFERRED_KONTEXT_RESOLUTIONS
    small = [tuple(edge // SMALLER // 16 * 16 for edge in size) for size in sizes]
    patch.setattr(kontext, "PREFERRED_KONTEXT_RESOLUTIONS", small)


def _smaller(dimensions):
    return lambda area, ratio: dimensions(area // SMALLER**2, ratio)
