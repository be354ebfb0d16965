"""List the model families that come with gracetune. Adding one takes a module and a line here.

This module does not import torch, so that `config` can check a run file without it. Other packages
add families with an entry point of the group `gracetune.family`; see docs/adding-a-family.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_INDEX = "model_index.json"
"""File that names the components of a pipeline folder."""
REVISION_SETTING = frozenset(("model.revision",))
"""Run-file setting of families whose transformer diffusers reads from a folder only."""
FOLDER_SETTINGS = REVISION_SETTING | {"model.transformer_file"}
"""Run-file settings that most families with a diffusers folder use."""
IP_ADAPTER_COMPONENTS = ("image_encoder", "feature_extractor")
UNET_COMPONENTS = ("safety_checker", *IP_ADAPTER_COMPONENTS)


@dataclass(frozen=True, slots=True)
class FileMarks:
    """Tensors by which the weights of a model are recognised in a single-file checkpoint.

    Names are those of the original release, without a prefix.
    """

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    shape: tuple[str, tuple[int, ...]] | None = None
    """A tensor's name and the start of its shape, if models differ in size only."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model on the Hugging Face hub that a family trains."""

    name: str
    """Name on the hub, as a run file gives it in `model.path`."""
    description: str
    """What the model is, for the table in docs/families.md."""
    marks: FileMarks | None = None
    """None if the model has no single-file form."""
    experts: int = 1
    """Number of transformers, each with a single file of its own."""


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """The facts about a family that are known before its module is imported."""

    module: str
    """Name of the module whose `load(section)` returns the loaded family."""
    settings: frozenset[str] = FOLDER_SETTINGS
    """Run-file settings that this family uses and some other families do not."""
    models: tuple[PublishedModel, ...] = ()
    """Models on the hub, the one for a run file without `model.path` first; empty for a family that
    creates its model. Names are those of diffusers' documentation and of the examples."""
    pipelines: tuple[str, ...] = ()
    """Classes of the pipelines that the module reads, so that others are refused before they are
    downloaded."""
    unused_components: tuple[str, ...] = ()
    """Components of the pipelines that training and validation do not need. They are neither
    downloaded nor read."""
    has_key_table: bool = False
    """True if the module has a `KEY_TABLE`: the names of the model's layers in other tools."""
    has_planner_shapes: bool = True
    """True if the module has `PLANNER_SHAPES`, so that the memory of a run can be planned without
    the weights."""
    divides_tokens: bool = False
    """True if several ranks can divide the tokens of a sample (`distributed.context_parallel`)."""
    block_classes: tuple[str, ...] = ()
    """Classes of the repeated blocks in diffusers, by which FSDP2 shards the model; empty if they
    are not known without the module."""
    unused_weights: tuple[str, ...] = ()
    """Patterns for the names of weights that do not affect the model's output and so never get a
    gradient. `{last}` is the number of the last block."""

    @property
    def default_model(self) -> str | None:
        """Name on the hub of the model for a run file without `model.path`."""
        return self.models[0].name if self.models else None


def family_info(family: str) -> FamilyInfo:
    """Return the facts about a family; for one of another package, those that always hold."""
    return FAMILIES.get(family, FamilyInfo(""))


# Marks of single-file checkpoints that several entries use.
FLUX_NORM = "double_blocks.0.img_attn.norm.key_norm.scale"
CHROMA_GUIDANCE = "distilled_guidance_layer.in_proj.bias"
FLUX2_MODULATION = "single_stream_modulation.lin.weight"
NOT_FLUX = (CHROMA_GUIDANCE, FLUX2_MODULATION)
FLUX_DEV = FileMarks((FLUX_NORM, "guidance_in.in_layer.bias"), NOT_FLUX)
FLUX2_GUIDANCE = "guidance_in.in_layer.weight"
KLEIN_9B = FileMarks((FLUX2_MODULATION,), (FLUX2_GUIDANCE,), ("img_in.weight", (4096,)))
KLEIN_4B = FileMarks((FLUX2_MODULATION,), (FLUX2_GUIDANCE,), ("img_in.weight", (3072,)))
QWEN_NAMES = ("transformer_blocks.0.attn.add_q_proj.weight", "txt_norm.weight", "img_in.weight")
QWEN_2511 = "__index_timestep_zero__"  # ComfyUI's marker
QWEN_IMAGE = FileMarks(QWEN_NAMES, (QWEN_2511,))
Z_IMAGE = FileMarks(("layers.0.adaLN_modulation.0.weight", "cap_embedder.0.weight"))
KREA2 = FileMarks(("txtfusion.projector.weight",))
UNET_INPUT, SDXL_LABELS = "input_blocks.0.0.weight", "label_emb.0.0.weight"
SD35_LARGE_BLOCK = "joint_blocks.37.x_block.mlp.fc1.weight"
SD35_MEDIUM_BLOCK = "joint_blocks.0.x_block.attn2.qkv.weight"
WAN_NAMES, WAN_PATCHES = ("head.modulation", "patch_embedding.weight"), "patch_embedding.weight"
WAN_IMAGE = "img_emb.proj.1.weight"
WAN_T2V_14B = FileMarks(WAN_NAMES, (WAN_IMAGE,), (WAN_PATCHES, (5120, 16)))
WAN21_I2V = FileMarks((*WAN_NAMES, WAN_IMAGE), (), (WAN_PATCHES, (5120, 36)))

FAMILIES: Mapping[str, FamilyInfo] = {
    "wan22": FamilyInfo(
        "gracetune.models.wan22",
        divides_tokens=True,
        block_classes=("WanTransformerBlock",),
        settings=FOLDER_SETTINGS
        | {
            "model.task",
            "model.transformer_2_file",
            "train.expert_turns",
            "train.switch_every",
        },
        pipelines=(
            "WanPipeline",
            "WanImageToVideoPipeline",
        ),
        models=(
            PublishedModel(
                "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
                "Wan 2.2, video from text, two experts of 14 B",
                WAN_T2V_14B,
                experts=2,
            ),
            PublishedModel(
                "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
                "Wan 2.2, video from a first frame, two experts of 14 B",
                FileMarks(WAN_NAMES, (WAN_IMAGE,), (WAN_PATCHES, (5120, 36))),
                experts=2,
            ),
            PublishedModel(
                "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
                "Wan 2.2, video from text or a first frame, 5 B",
                FileMarks(WAN_NAMES, (WAN_IMAGE,), (WAN_PATCHES, (3072, 48))),
            ),
            PublishedModel(
                "Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan 2.1, video from text, 14 B", WAN_T2V_14B
            ),
            PublishedModel(
                "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
                "Wan 2.1, video from text, 1.3 B",
                FileMarks(WAN_NAMES, (WAN_IMAGE,), (WAN_PATCHES, (1536, 16))),
            ),
            PublishedModel(
                "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
                "Wan 2.1, video from a first frame, 480p, 14 B",
                WAN21_I2V,
            ),
            PublishedModel(
                "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
                "Wan 2.1, video from a first frame, 720p, 14 B",
                WAN21_I2V,
            ),
        ),
        has_key_table=True,
    ),
    "flux": FamilyInfo(
        "gracetune.models.flux",
        divides_tokens=True,
        block_classes=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        pipelines=(
            "FluxPipeline",
            "FluxKontextPipeline",
        ),
        models=(
            PublishedModel(
                "black-forest-labs/FLUX.1-dev", "FLUX.1 dev, distilled guidance, 12 B", FLUX_DEV
            ),
            PublishedModel(
                "black-forest-labs/FLUX.1-schnell",
                "FLUX.1 schnell, distilled to few steps, 12 B",
                FileMarks((FLUX_NORM,), (*NOT_FLUX, "guidance_in.in_layer.bias")),
            ),
            PublishedModel(
                "black-forest-labs/FLUX.1-Kontext-dev",
                "FLUX.1 Kontext, edits an image, 12 B",
                FLUX_DEV,
            ),
        ),
        unused_components=IP_ADAPTER_COMPONENTS,
        has_key_table=True,
    ),
    "flux2": FamilyInfo(
        "gracetune.models.flux2",
        divides_tokens=True,
        block_classes=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
        pipelines=(
            "Flux2Pipeline",
            "Flux2KleinPipeline",
        ),
        models=(
            PublishedModel(
                "black-forest-labs/FLUX.2-dev",
                "FLUX.2 dev, distilled guidance, 32 B",
                FileMarks((FLUX2_MODULATION, FLUX2_GUIDANCE)),
            ),
            PublishedModel("black-forest-labs/FLUX.2-klein-base-9B", "FLUX.2 Klein, 9 B", KLEIN_9B),
            PublishedModel("black-forest-labs/FLUX.2-klein-base-4B", "FLUX.2 Klein, 4 B", KLEIN_4B),
            PublishedModel(
                "black-forest-labs/FLUX.2-klein-9B",
                "FLUX.2 Klein, distilled to few steps, 9 B",
                KLEIN_9B,
            ),
            PublishedModel(
                "black-forest-labs/FLUX.2-klein-4B",
                "FLUX.2 Klein, distilled to few steps, 4 B",
                KLEIN_4B,
            ),
        ),
        has_key_table=True,
    ),
    "qwen_image": FamilyInfo(
        "gracetune.models.qwen_image",
        divides_tokens=True,
        block_classes=("QwenImageTransformerBlock",),
        pipelines=(
            "QwenImagePipeline",
            "QwenImageEditPipeline",
            "QwenImageEditPlusPipeline",
        ),
        models=(
            PublishedModel("Qwen/Qwen-Image", "Qwen-Image, 20 B", QWEN_IMAGE),
            PublishedModel("Qwen/Qwen-Image-Edit", "edits an image, 20 B", QWEN_IMAGE),
            PublishedModel(
                "Qwen/Qwen-Image-Edit-2509", "edits with several references, 20 B", QWEN_IMAGE
            ),
            PublishedModel(
                "Qwen/Qwen-Image-Edit-2511",
                "edits with several references, newer, 20 B",
                FileMarks((*QWEN_NAMES, QWEN_2511)),
            ),
        ),
        has_key_table=True,
        # The last block's output for the text is not used.
        unused_weights=(
            "transformer_blocks.{last}.attn.to_add_out.*",
            "transformer_blocks.{last}.txt_mlp.*",
        ),
    ),
    "sd15": FamilyInfo(
        "gracetune.models.sd15",
        block_classes=("ResnetBlock2D", "BasicTransformerBlock"),
        pipelines=("StableDiffusionPipeline",),
        models=(
            PublishedModel(
                "stable-diffusion-v1-5/stable-diffusion-v1-5",
                "Stable Diffusion 1.5, 0.9 B",
                FileMarks((UNET_INPUT,), (SDXL_LABELS,)),
            ),
        ),
        unused_components=UNET_COMPONENTS,
        has_key_table=True,
    ),
    "sdxl": FamilyInfo(
        "gracetune.models.sdxl",
        block_classes=("ResnetBlock2D", "BasicTransformerBlock"),
        pipelines=("StableDiffusionXLPipeline",),
        models=(
            PublishedModel(
                "stabilityai/stable-diffusion-xl-base-1.0",
                "SDXL base, 2.6 B",
                FileMarks((UNET_INPUT, SDXL_LABELS)),
            ),
        ),
        unused_components=UNET_COMPONENTS,
        has_key_table=True,
    ),
    "sd3": FamilyInfo(
        "gracetune.models.sd3",
        block_classes=("JointTransformerBlock",),
        pipelines=("StableDiffusion3Pipeline",),
        models=(
            PublishedModel(
                "stabilityai/stable-diffusion-3.5-large",
                "Stable Diffusion 3.5 large, 8 B",
                FileMarks((SD35_LARGE_BLOCK,)),
            ),
            PublishedModel(
                "stabilityai/stable-diffusion-3.5-medium",
                "Stable Diffusion 3.5 medium, 2.5 B",
                FileMarks((SD35_MEDIUM_BLOCK,), (SD35_LARGE_BLOCK,)),
            ),
            PublishedModel(
                "stabilityai/stable-diffusion-3-medium-diffusers",
                "Stable Diffusion 3 medium, 2 B",
                FileMarks(
                    ("joint_blocks.0.x_block.mlp.fc1.weight",),
                    (SD35_LARGE_BLOCK, SD35_MEDIUM_BLOCK),
                ),
            ),
        ),
        has_key_table=True,
    ),
    "chroma": FamilyInfo(
        "gracetune.models.chroma",
        block_classes=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
        pipelines=("ChromaPipeline",),
        models=(
            PublishedModel(
                "lodestones/Chroma1-HD",
                "Chroma1 HD, 8.9 B",
                FileMarks((FLUX_NORM, CHROMA_GUIDANCE)),
            ),
        ),
        unused_components=IP_ADAPTER_COMPONENTS,
        has_key_table=True,
    ),
    "z_image": FamilyInfo(
        "gracetune.models.z_image",
        block_classes=("ZImageTransformerBlock",),
        pipelines=("ZImagePipeline",),
        models=(
            PublishedModel("Tongyi-MAI/Z-Image", "Z-Image, 6 B", Z_IMAGE),
            PublishedModel(
                "Tongyi-MAI/Z-Image-Turbo", "Z-Image-Turbo, distilled to few steps, 6 B", Z_IMAGE
            ),
        ),
        has_key_table=True,
    ),
    "krea2": FamilyInfo(
        "gracetune.models.krea2",
        block_classes=("Krea2TransformerBlock",),
        pipelines=("Krea2Pipeline",),
        models=(
            PublishedModel("krea/Krea-2-Raw", "Krea 2, 12.8 B", KREA2),
            PublishedModel("krea/Krea-2-Turbo", "Krea 2, distilled to few steps, 12.8 B", KREA2),
        ),
        has_key_table=True,
    ),
    "ideogram4": FamilyInfo(
        "gracetune.models.ideogram4",
        block_classes=("Ideogram4TransformerBlock",),
        settings=REVISION_SETTING,
        pipelines=("Ideogram4Pipeline",),
        models=(PublishedModel("ideogram-ai/ideogram-4-fp8", "Ideogram 4, weights in fp8, 9.3 B"),),
        unused_components=("prompt_enhancer_head",),
        has_key_table=True,
    ),
    "stable_audio": FamilyInfo(
        "gracetune.models.stable_audio",
        block_classes=("StableAudioDiTBlock",),
        pipelines=("StableAudioPipeline",),
        models=(PublishedModel("stabilityai/stable-audio-open-1.0", "Stable Audio Open, 1 B"),),
        has_planner_shapes=False,
    ),
    "tiny": FamilyInfo(
        "gracetune.models.tiny",
        block_classes=("JointTransformerBlock",),
        settings=frozenset(("model.init_seed",)),
    ),
}
