"""List the model families that come with gracetune. Adding one takes a module and a line here.

This module does not import torch, so that `config` can check a run file without it. Other packages
add families with an entry point of the group `gracetune.family`; see docs/adding-a-family.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REVISION_SETTING = frozenset(("model.revision",))
"""Run-file setting of families whose transformer diffusers reads from a folder only."""
FOLDER_SETTINGS = REVISION_SETTING | {"model.transformer_file"}
"""Run-file settings that most families with a diffusers folder use."""


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """The facts about a family that are known before its module is imported."""

    module: str
    """Name of the module whose `load(section)` returns the loaded family."""
    settings: frozenset[str] = FOLDER_SETTINGS
    """Run-file settings that this family uses and some other families do not."""
    has_key_table: bool = False
    """True if the module has a `KEY_TABLE`: the names of the model's layers in other tools."""
    has_planner_shapes: bool = True
    """True if the module has `PLANNER_SHAPES`, so that the memory of a run can be planned without
    the weights."""
    unused_weights: tuple[str, ...] = ()
    """Patterns for the names of weights that do not affect the model's output and so never get a
    gradient. `{last}` is the number of the last block."""


FAMILIES: Mapping[str, FamilyInfo] = {
    "wan22": FamilyInfo(
        "gracetune.models.wan22",
        settings=FOLDER_SETTINGS
        | {
            "model.task",
            "model.transformer_2_file",
            "train.expert_turns",
            "train.switch_every",
        },
        has_key_table=True,
    ),
    "flux": FamilyInfo("gracetune.models.flux", has_key_table=True),
    "flux2": FamilyInfo("gracetune.models.flux2", has_key_table=True),
    "qwen_image": FamilyInfo(
        "gracetune.models.qwen_image",
        has_key_table=True,
        # The last block's output for the text is not used.
        unused_weights=(
            "transformer_blocks.{last}.attn.to_add_out.*",
            "transformer_blocks.{last}.txt_mlp.*",
        ),
    ),
    "sd15": FamilyInfo("gracetune.models.sd15", has_key_table=True),
    "sdxl": FamilyInfo("gracetune.models.sdxl", has_key_table=True),
    "sd3": FamilyInfo("gracetune.models.sd3", has_key_table=True),
    "chroma": FamilyInfo("gracetune.models.chroma", has_key_table=True),
    "z_image": FamilyInfo("gracetune.models.z_image", has_key_table=True),
    "krea2": FamilyInfo("gracetune.models.krea2", has_key_table=True),
    "ideogram4": FamilyInfo("gracetune.models.ideogram4", REVISION_SETTING, has_key_table=True),
    "stable_audio": FamilyInfo("gracetune.models.stable_audio", has_planner_shapes=False),
    "tiny": FamilyInfo("gracetune.models.tiny", settings=frozenset(("model.init_seed",))),
}
