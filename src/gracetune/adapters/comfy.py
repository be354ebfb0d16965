"""Which keys of a file ComfyUI would load, computed without ComfyUI.

Its loader builds a map from key prefixes to weights of the model, then looks for known endings
after each prefix; what is left over is logged as "lora key not loaded" and ignored. This is that
map for the families in our tables, after its state of January 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.adapters.names import BLOCK, KeyIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gracetune.adapters.tables.types import NameTable, Naming

GENERIC: tuple[tuple[str, str, Naming], ...] = (
    ("diffusion_model.", ".", "original"),
    ("lora_unet_", "_", "original"),
)
PREFIXES: dict[str, tuple[tuple[str, str, Naming], ...]] = {
    "wan": GENERIC,
    "flux": (
        *GENERIC,
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
        ("lora_transformer_", "_", "diffusers"),
    ),
    "qwen_image": (
        *GENERIC,
        ("", ".", "diffusers"),
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
    ),
}
"""Prefix, joint and naming of each kind of key that its map holds, by family."""
LORA_ENDINGS = (
    (".lora_up.weight", ".lora_down.weight", ".lora_mid.weight"),
    ("_lora.up.weight", "_lora.down.weight", None),
    (".lora_B.weight", ".lora_A.weight", None),
    (".lora.up.weight", ".lora.down.weight", None),
    (".lora_B", ".lora_A", None),
    (".lora_B.default.weight", ".lora_A.default.weight", None),
)
"""Tried in this order; the first that is there is taken."""
LOHA_ENDINGS = (".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b")
LOKR_ENDINGS = (
    ".lokr_w1",
    ".lokr_w2",
    ".lokr_w1_a",
    ".lokr_w1_b",
    ".lokr_w2_a",
    ".lokr_w2_b",
    ".lokr_t2",
)
ALONE = (".diff", ".diff_b", ".w_norm", ".b_norm", ".set_weight")
WAN_FUN = "lora_unet__blocks_0_cross_attn_k.lora_down.weight"
"""The key by which it recognises VideoX-Fun's files."""


@dataclass(frozen=True)
class Loaded:
    """What its loader would make of a file."""

    modules: frozenset[str]
    """Modules that get a change, by our own names."""
    left: tuple[str, ...]
    """Keys that it would ignore."""
    broken: str | None = None
    """A key whose missing partner ends the load with an error."""


def key_map(table: NameTable, num_blocks: Mapping[str, int]) -> dict[str, str]:
    """Prefixes of keys that are looked for, with the module each one changes."""
    index = KeyIndex(table)
    found = {}
    for prefix, joint, naming in PREFIXES[table.family]:
        for template in index.templates(naming):
            for name in _numbered(template, num_blocks):
                module = index.find(name, naming, ".")
                assert module is not None, name
                found[f"{prefix}{name.replace('.', joint)}"] = module
    return found


def simulate(keys: Sequence[str], known: Mapping[str, str]) -> Loaded:
    """What would be loaded, what would be left, and what would end in an error."""
    text = {key: key for key in keys}
    if WAN_FUN in text:
        text = {key.replace("lora_unet__", "lora_unet_", 1): key for key in keys}
    loaded: set[str] = set()
    modules: set[str] = set()
    for prefix, module in known.items():
        taken, lacks = _at(prefix, text)
        if lacks is not None:
            return Loaded(frozenset(modules), (), lacks)
        beside = {prefix + end for end in (".alpha", ".dora_scale") if prefix + end in text}
        loaded |= taken | beside
        if taken:
            modules.add(module)
    left = tuple(original for key, original in text.items() if key not in loaded)
    return Loaded(frozenset(modules), left)


def blocks_of(modules: Iterable[str]) -> dict[str, int]:
    """How many blocks of each kind a model must have to hold these modules."""
    counts: dict[str, int] = {}
    for module in modules:
        inside = BLOCK.match(module)
        if inside:
            kind = inside[1].rstrip(".")
            counts[kind] = max(counts.get(kind, 0), int(inside[2]) + 1)
    return counts


def _at(prefix: str, text: Mapping[str, str]) -> tuple[set[str], str | None]:
    """Keys that are taken after a prefix, or the one that would be missed."""
    taken = {prefix + end for end in (*ALONE, *LOKR_ENDINGS) if prefix + end in text}
    for up, down, mid in LORA_ENDINGS:
        if prefix + up in text:
            if prefix + down not in text:
                return taken, prefix + down
            taken |= {prefix + up, prefix + down}
            if mid is not None and prefix + mid in text:
                taken.add(prefix + mid)
            break
    if prefix + LOHA_ENDINGS[0] in text:
        for end in LOHA_ENDINGS:
            if prefix + end not in text:
                return taken, prefix + end
            taken.add(prefix + end)
        taken |= {prefix + end for end in (".hada_t1", ".hada_t2") if prefix + end in text}
    return taken, None


def _numbered(template: str, num_blocks: Mapping[str, int]) -> Iterable[str]:
    """A template's names in a model of so many blocks."""
    if "{}" not in template:
        return [template]
    kind = template.partition(".{}")[0]
    ours = {"double_blocks": "transformer_blocks", "single_blocks": "single_transformer_blocks"}
    count = num_blocks.get(ours.get(kind, kind), 0)
    return [template.format(number) for number in range(count)]
