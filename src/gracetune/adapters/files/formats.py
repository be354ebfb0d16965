"""Define the key formats of adapter files: how each training tool names the tensors in a file.

A key consists of a prefix, in some formats a name for one of the model's two transformers
(high-noise or low-noise), a module's name and a suffix. keys.py shows examples, and parses and
builds keys from the definitions here. The `tools` texts are repeated in docs/adapters.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gracetune.adapters.files.keys import Naming, Stage

SuffixStyle = Literal["peft", "peft-live", "kohya", "comfyui"]
"""Naming style for the ends of an adapter file's keys: LoRA's factor A ends in `.lora_A.weight` in
`peft` and in `.lora_down.weight` in `kohya`."""
AlphaRule = Literal["folded", "always"]
"""Rule for writing a LoRA's alpha to a file: `folded` multiplies alpha / rank into the weights,
`always` writes an alpha tensor. For LoHa and LoKr, alpha / rank is always multiplied in, and an
alpha tensor equals the rank, because LyCORIS applies any other alpha twice when it merges."""

LYCORIS_ROLES = (
    "hada_w1_a",
    "hada_w1_b",
    "hada_w2_a",
    "hada_w2_b",
    "hada_t1",
    "hada_t2",
    "lokr_w1",
    "lokr_w1_a",
    "lokr_w1_b",
    "lokr_w2",
    "lokr_w2_a",
    "lokr_w2_b",
    "lokr_t2",
)
ROLES = ("down", "up", "mid", *LYCORIS_ROLES, "diff", "diff_b", "dora", "alpha", "scalar")
"""Names of the tensors that a layer can have, independent of the tool that wrote the file. For
example, `down` is the LoRA factor that peft calls `lora_A` and kohya calls `lora_down`."""

PEFT_SUFFIXES = {role: f".{role}" for role in (*LYCORIS_ROLES, "alpha", "scalar")}
PLAIN_SUFFIXES = PEFT_SUFFIXES | {"diff": ".diff", "diff_b": ".diff_b"}
SUFFIXES: dict[SuffixStyle, dict[str, str]] = {
    "peft": PEFT_SUFFIXES
    | {
        "down": ".lora_A.weight",
        "up": ".lora_B.weight",
        "dora": ".lora_magnitude_vector",
        "diff_b": ".lora_B.bias",
    },
    "peft-live": {role: f".{role}.default" for role in LYCORIS_ROLES}
    | {role: f".{role}" for role in ("alpha", "scalar")}
    | {
        "down": ".lora_A.default.weight",
        "up": ".lora_B.default.weight",
        "dora": ".lora_magnitude_vector.default.weight",
        "diff_b": ".lora_B.default.bias",
    },
    "kohya": PLAIN_SUFFIXES
    | {
        "down": ".lora_down.weight",
        "up": ".lora_up.weight",
        "mid": ".lora_mid.weight",
        "dora": ".dora_scale",
    },
    "comfyui": PLAIN_SUFFIXES
    | {"down": ".lora_A.weight", "up": ".lora_B.weight", "dora": ".dora_scale"},
}
"""End of the key for each tensor of a layer (`down`, `up`, ...), by a tool's naming style. A style
without a suffix for a tensor cannot store it."""
READ_ONLY_SUFFIXES = {
    ".lora_A": "down",
    ".lora_B": "up",
    ".lora_down": "down",
    ".lora_up": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    "_lora.down.weight": "down",
    "_lora.up.weight": "up",
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    ".down.weight": "down",
    ".up.weight": "up",
    ".lora.down.weight.alpha": "alpha",
    "_lora.down.weight.alpha": "alpha",
    ".lora_magnitude_vector.weight": "dora",
    ".w_norm": "diff",
    ".b_norm": "diff_b",
}
"""Ends of keys that are accepted in adapter files but never written, with the tensor of the layer
(`down`, `up`, ...) that each stands for."""

UNSUPPORTED_KEYS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (
            r"(^|[._])vace_(blocks|patch_embedding)[._]",
            "it belongs to the control blocks of VACE (vace_blocks), which this model does not "
            "have. Use the adapter with a VACE model in another tool",
        ),
        (
            r"[._](face_adapter|face_encoder|motion_encoder|pose_patch_embedding)[._]",
            "it belongs to Wan-Animate, which this model is not",
        ),
        (
            r"[._]?(ip_adapter|image_proj|controlnet|control_adapter|ref_conv)",
            "it belongs to an IP-Adapter or a control network, which is an additional model and "
            "not a change of this one's weights",
        ),
        (
            r"^lora_controlnet$|^lllite_|(^|[._])(zero_convs|input_hint_block)[._]",
            "it belongs to a control network (ControlNet, Control-LoRA or LLLite), which is an "
            "additional model and not a change of this one's weights",
        ),
        (
            r"^(emb_params|clip_[lg]|string_to_param\S*|<\S+>)$",
            "it is an embedding of new words (textual inversion), which is no adapter",
        ),
        (
            r"custom_diffusion[._]",
            "Custom Diffusion replaces weights, and only changes that are added can be used",
        ),
        (
            r"(query_norm|key_norm)\.scale$",
            "it replaces a norm of the model, as FLUX.1 control LoRA (Canny, Depth) do, and they "
            "also need a model with more input channels",
        ),
        (
            r"\.(oft_|boft_)\w+",
            "OFT multiplies a weight by a rotation, and only changes that are added to it can be "
            "used. Merge the file into the model with the tool that trained it",
        ),
        (
            r"\.(on_input|ia3_l)\b",
            "IA3 scales outputs, and only changes that are added can be used",
        ),
        (r"\.([ab][12]|bm)\.weight$", "GLoRA's change depends on the model's weight"),
        (
            r"\.(q_layer|p_layer)\.weight$|\.lambda_layer$",
            "T-LoRA's change depends on the timestep, and only fixed changes can be used",
        ),
        (
            r"\.(vera_lambda_\w+|lora_E|lora_embedding_[AB]|hra_u|fourierft_\w+|c3a_kernel)\b",
            "it belongs to a method of peft other than LoRA, DoRA, LoHa and LoKr",
        ),
        (
            r"\.modules_to_save\.",
            "peft trained the module as a whole beside the adapter (modules_to_save), which is not "
            "a change that is added. Merge the file into the model with peft",
        ),
        (
            r"norm\w*(\.\d+)?(\.scale)?\.(diff|diff_b|w_norm|b_norm)$",
            "it changes a norm whose names are not known here. Remove the keys of norms, or merge "
            "the file into the model with the tool that trained it",
        ),
        (
            r"\.(set_weight|reshape_weight)$",
            "it replaces a weight or its shape, and only changes that are added can be used",
        ),
        (
            r"\.bias_(indices|values|size)$",
            "it is a sparse bias of an old version of LyCORIS, which no current tool computes",
        ),
        (r"\.magnitude$", "it is a magnitude of ai-toolkit's own DoRA, which no other tool reads"),
        (
            r"(scale_weight|weight_scale|scale_input|input_scale|scaled_fp8|comfy_quant|\.absmax"
            r"|quant_state\S*|quant_map)$",
            "it is the scale of a quantized weight. Dequantize the file with the tool that "
            "quantized it",
        ),
    )
)
"""Keys of other tools that cannot be used with any model here, by a pattern, and the reason."""


@dataclass(frozen=True)
class KeyFormat:
    """One way to name the tensors in an adapter file, and the tools that use it."""

    name: str
    tools: str
    """Tools that write or read files in this format, as text for the user."""
    prefix: str
    """Text that every key starts with."""
    naming: Naming
    style: SuffixStyle
    separator: Literal[".", "_", "$$"] = "."
    alpha: AlphaRule = "always"
    stages: tuple[tuple[Stage, str], ...] = ()
    """Name of the high-noise and of the low-noise transformer in the keys, for formats that hold
    the adapters of both in one file; otherwise empty."""
    caution: str = ""
    """Reason not to write files in this format, such as "no tool loads it"; empty if there is
    none."""


AI_TOOLKIT_STAGES: tuple[tuple[Stage, str], ...] = (
    ("high", "transformer_1"),
    ("low", "transformer_2"),
)
"""Names of the high-noise and the low-noise transformer in ai-toolkit's keys. They are numbered
from 1, so `transformer_2` is the low-noise one, as in diffusers."""
STAGE_PREFIXES: tuple[tuple[Stage, str], ...] = (
    ("high", "transformer."),
    ("low", "transformer_2."),
)

FORMATS: tuple[KeyFormat, ...] = (
    KeyFormat(
        "comfyui",
        "ComfyUI, ai-toolkit and diffusion-pipe; diffusers reads its LoRA",
        "diffusion_model.",
        "original",
        "comfyui",
        alpha="folded",
    ),
    KeyFormat(
        "lightning",
        "distilled LoRA such as Lightning; ComfyUI and diffusers read it",
        "diffusion_model.",
        "original",
        "kohya",
        alpha="folded",
    ),
    KeyFormat(
        "diffusers",
        "diffusers and SimpleTuner: peft's names after transformer.",
        "transformer.",
        "diffusers",
        "peft",
        alpha="folded",
    ),
    KeyFormat(
        "peft",
        "PeftModel.save_pretrained and from_pretrained; a folder",
        "base_model.model.",
        "diffusers",
        "peft",
        alpha="folded",
    ),
    KeyFormat(
        "peft-live",
        "the state dict of a PeftModel",
        "base_model.model.",
        "diffusers",
        "peft-live",
        alpha="folded",
    ),
    KeyFormat(
        "kohya",
        "musubi-tuner and sd-scripts; ComfyUI reads it, diffusers reads its LoRA",
        "lora_unet_",
        "original",
        "kohya",
        "_",
    ),
    KeyFormat(
        "kohya-diffusers",
        "musubi-tuner for Z-Image, sd-scripts for SD 1.5; ComfyUI and diffusers read it for these",
        "lora_unet_",
        "diffusers",
        "kohya",
        "_",
        caution="ComfyUI and diffusers do not load diffusers' names after lora_unet_ for Wan and "
        "Flux",
    ),
    KeyFormat(
        "wan-fun",
        "VideoX-Fun; ComfyUI reads it",
        "lora_unet__",
        "original",
        "kohya",
        "_",
    ),
    KeyFormat(
        "lycoris",
        "lycoris-lora on a diffusers model, SimpleTuner's LyCORIS",
        "lycoris_",
        "diffusers",
        "kohya",
        "_",
    ),
    KeyFormat(
        "lycoris-combined",
        "lycoris-lora on a wrapper of two experts",
        "lycoris_",
        "diffusers",
        "kohya",
        "_",
        stages=AI_TOOLKIT_STAGES,
        caution="no tool loads both experts from such a file",
    ),
    KeyFormat(
        "lycoris-original",
        "LoKr of ai-toolkit's GH200 fork, one file per expert",
        "lycoris_",
        "original",
        "kohya",
        "_",
        caution="neither ComfyUI nor diffusers loads it for Wan",
    ),
    KeyFormat(
        "ai-toolkit-combined",
        "ai-toolkit with split_multistage_loras: false",
        "diffusion_model.",
        "original",
        "comfyui",
        alpha="folded",
        stages=AI_TOOLKIT_STAGES,
        caution="only ai-toolkit loads both experts from one file",
    ),
    KeyFormat(
        "ai-toolkit-live",
        "ai-toolkit's LoRA in memory",
        "transformer$$",
        "diffusers",
        "kohya",
        "$$",
        stages=AI_TOOLKIT_STAGES,
        caution="no tool loads it from a file",
    ),
    KeyFormat(
        "ai-toolkit-old-lokr",
        "ai-toolkit's LoKr before 2026, one file per expert",
        "lycoris_",
        "mixed",
        "kohya",
        "_",
        caution="neither ComfyUI nor diffusers loads it for Wan",
    ),
    KeyFormat(
        "ai-toolkit-old-lokr-combined",
        "ai-toolkit's LoKr before 2026, both experts in one file",
        "lycoris_",
        "mixed",
        "kohya",
        "_",
        stages=AI_TOOLKIT_STAGES,
        caution="neither ComfyUI nor diffusers loads it",
    ),
    KeyFormat(
        "ai-toolkit-old-live",
        "ai-toolkit's old LoKr in memory",
        "lora_transformer_",
        "diffusers",
        "kohya",
        "_",
        stages=AI_TOOLKIT_STAGES,
        caution="no tool loads it from a file",
    ),
    KeyFormat(
        "onetrainer",
        "OneTrainer; ComfyUI reads it for Flux",
        "lora_transformer_",
        "diffusers",
        "kohya",
        "_",
    ),
    KeyFormat(
        "simpletuner-comfyui",
        "SimpleTuner's export for ComfyUI",
        "diffusion_model.",
        "diffusers",
        "comfyui",
        caution="ComfyUI and diffusers do not load diffusers' names after diffusion_model. for Wan",
    ),
    KeyFormat(
        "diffusers-both",
        "both experts of a pipeline in one file",
        "",
        "diffusers",
        "peft",
        alpha="folded",
        stages=STAGE_PREFIXES,
        caution="diffusers loads nothing from transformer_2. keys, without an error",
    ),
    KeyFormat(
        "bare",
        "the state dict of a transformer, without a prefix",
        "",
        "diffusers",
        "peft",
        alpha="folded",
        caution="diffusers loads nothing from keys without a prefix, without an error",
    ),
    KeyFormat(
        "bare-original",
        "training scripts that save the state dict of the original model",
        "",
        "original",
        "comfyui",
        caution="neither ComfyUI nor diffusers loads keys without a prefix for Wan",
    ),
    KeyFormat(
        "diffsynth",
        "DiffSynth-Studio",
        "",
        "original",
        "peft-live",
        alpha="folded",
        caution="neither ComfyUI nor diffusers loads keys without a prefix for Wan",
    ),
)
FORMAT_ALIASES = {
    "musubi": "kohya",
    "sd-scripts": "kohya",
    "ai-toolkit": "comfyui",
    "diffusion-pipe": "comfyui",
    "simpletuner": "diffusers",
    "simpletuner-lycoris": "lycoris",
}
"""Tool names that users may give instead of a key format's name, with that tool's key format."""
