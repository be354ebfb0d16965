"""Translate the keys of adapter files between tools.

A key names a tensor. It consists of a prefix, an expert ("stage") in models with two, a module and
a suffix:

    diffusion_model.   blocks.0.self_attn.q        .lora_A.weight      ComfyUI
    lora_unet_         blocks_0_self_attn_q        .lora_down.weight   kohya
    transformer.       blocks.0.attn1.to_q         .lora_A.weight      diffusers

`parse_key` reads a key in any of these formats as (stage, diffusers' name of the module, role), and
`build_key` writes it in any format. The role is what the tensor is in its layer, such as LoRA's
`down`. formats.py defines the formats. Each model family defines the names of its modules in a
`KeyTable` (`KEY_TABLE` in models/<family>.py), which callers pass in. No tensors are touched here.

Files from other tools also have prefixes that no format writes, such as `model.diffusion_model.`,
`module.` or `base_model.model.` before original names. `parse_key` removes such prefixes; the key
then fits no format.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from gracetune.adapters.files.formats import (
    FORMAT_ALIASES,
    FORMATS,
    READ_ONLY_SUFFIXES,
    SUFFIXES,
    UNSUPPORTED_KEYS,
    KeyFormat,
    SuffixStyle,
)
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from gracetune.adapters.files.placeholder_models import LayerShapes

Naming = Literal["original", "diffusers", "mixed"]
"""Origin of module names: the checkpoint of the model's authors, diffusers, or ai-toolkit's old
mixture of both."""
Stage = Literal["high", "low"]
"""One transformer of a model with two, such as Wan 2.2: `high` is used at high noise and is
diffusers' `transformer`, `low` is used at low noise and is `transformer_2`."""

BLOCK = re.compile(r"^(.*?(?:blocks|layers|refiner)(?:\.|_|\$\$))(\d+)((?:\.|_|\$\$).+)$")
"""Matches the name of a module inside a numbered block: (`...blocks.`, number, rest)."""
BOTH_STAGES_FORMAT = "diffusers-both"
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_EXPERT_WITHOUT_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])transformer([12])(?=[._$])")
"""Matches `transformer1` or `transformer2` in a key. A fork of ai-toolkit wrote them for
`transformer_1` (high noise) and `transformer_2` (low noise)."""
_TEXT_ENCODER = re.compile(
    r"((lora|lora_prior|lycoris)_(te\d?|text_encoder(_\d)?|text_model)_|text_encoders?(_\d)?\."
    r"|te\d?\.|cond_stage_model\.|conditioner\.|clip_[lgh]\.|t5xxl\.|bundle_emb\.|text_model\.)"
)
"""Matches the start of keys that belong to text encoders or to embeddings of new words."""
_EXPERT_PREFIXES: dict[str, Stage] = {
    "transformer_1": "high",
    "transformer_2": "low",
    "high_noise_model": "high",
    "low_noise_model": "low",
}
_PREFIX_WORDS = (
    *_EXPERT_PREFIXES,
    "diffusion_model",
    "conditional_transformer",
    "transformer",
    "base_model",
    "lycoris",
    "module",
    "model",
    "unet",
    "lora",
    "pipe",
    "dit",
    "lora_unet",
    "lora_transformer",
)
"""Words that may precede the name of a module in any order, as in `base_model.model.`. The first
that fits is removed, so the words for experts come first."""
_MODULE_WRAPPER = re.compile(
    r"_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)(?:\.|_|\$\$)"
)
"""Matches the names that torch.compile, FSDP and activation checkpointing insert."""
_ADAPTER_NAME = re.compile(
    r"\.(lora_(?:A|B|magnitude_vector))\.(?!default\.)[\w-]+\.(weight|bias)$"
)
"""Matches the suffix of a tensor of a peft adapter with another name than `default`."""
_MODULATION = re.compile(r"\.diff_m$")
"""Matches LightX2V's suffix for the change of a block's parameter `modulation`."""
_CUT_BLOCKS = re.compile(r"(^|\.)sformer_blocks\.")
"""Matches a cut name of `transformer_blocks` in some exports of FLUX.2."""


@dataclass(frozen=True)
class FusedProjection:
    """A projection that is one module in the original model and several modules in diffusers.

    The rows of its weight are the rows of the parts, such as q, k and v, one part after the other.
    """

    whole: str
    """Name of the projection as one module."""
    parts: tuple[tuple[str, int], ...]
    """Name of each part in diffusers and its share of the rows: 1, 1 and 1 for equal parts."""


@dataclass(frozen=True)
class PipelineSpec:
    """Functions that build a diffusers pipeline without weights, to test that an adapter loads."""

    build: Callable[[Callable[[Any], Any]], Any]
    """Returns the pipeline. Its argument is a function that makes a model without weights from a
    transformer class."""
    config: Callable[[LayerShapes], dict[str, object]]
    """Returns the configuration of a transformer that fits the layers of an adapter file."""


@dataclass(frozen=True)
class KeyTable:
    """The names of a model family's modules in diffusers and in the original model.

    `{}` in a name stands for the number of a block.
    """

    family: str
    """Name of the family, which adapter files have in the header entry `gracetune.family`."""
    rows: tuple[tuple[str, str], ...]
    """The original name and diffusers' name of each module."""
    unfused: tuple[str, ...] = ()
    """Diffusers' names of modules that the original model has only as parts of fused projections,
    such as q, k and v of a qkv."""
    mixed_rows: tuple[tuple[str, str], ...] = ()
    """Like `rows`, but the first name is the one in ai-toolkit's old LoKr files, which mix original
    and diffusers' names."""
    fused: tuple[FusedProjection, ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()
    """Like `rows`, with names that some tools write beside the original ones. They are read and
    never written."""
    other_fused: tuple[FusedProjection, ...] = ()
    """Projections that are one module in files with `other_names` alone. They are split on
    reading."""
    swapped_halves: frozenset[str] = frozenset()
    """Modules with the output (scale, shift) in diffusers and (shift, scale) in the original model.
    A module of a block is only swapped in those blocks in which it has two outputs, which means
    twice as many rows as columns."""
    bare_parameters: frozenset[str] = frozenset()
    """Diffusers' names in `rows` that are not modules but parameters, without a `.weight`."""
    block_linears: tuple[str, ...] = ()
    """Linear modules of a block that adapters are usually trained on, in diffusers' names."""
    max_blocks: tuple[tuple[str, int], ...] = ()
    """Largest number of blocks of each kind in a published model of the family. A file with more
    blocks is for another family."""
    has_stages: bool = False
    """True if the family has models with two transformers, one for high and one for low noise."""
    default_formats: tuple[tuple[str, str], ...] = (
        ("lora", "diffusers"),
        ("lokr", "diffusers"),
        ("loha", "lycoris"),
        ("other", "comfyui"),
    )
    """Key format, a tool's naming of the tensors in a file, that most tools load, by the adapter's
    algorithm."""
    aliases: tuple[str, ...] = ()
    """Other names that users may give for the model family."""
    component: Literal["transformer", "unet"] = "transformer"
    """Name of the model in diffusers' pipeline, with which the keys of diffusers' files start."""
    kernels: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Kernel of each convolution, by diffusers' name of the module or the end of it after a dot.
    Some files hold kernels flattened."""
    header_words: tuple[str, ...] = ()
    """Words by which other tools' headers name the family, in lower case."""
    row_ratios: tuple[tuple[str, int], ...] = ()
    """Rows of a module's weight per column, for modules that other families have in other sizes.
    They tell families apart whose keys are the same."""
    widths: tuple[int, ...] = ()
    """Hidden sizes of the published models, for the same purpose."""
    columns: tuple[tuple[str, int], ...] = ()
    """Columns of modules in the published models, by the end of their names, for the same purpose.
    """
    preferred_over: tuple[str, ...] = ()
    """Families whose files may be the same in keys and sizes; this one is then assumed."""
    comfyui_prefixes: tuple[tuple[str, str, Naming], ...] = ()
    """Start of the keys that ComfyUI looks for, separator of name parts, and origin of the module
    names; empty if ComfyUI does not support the family."""
    not_in_comfyui: frozenset[str] = frozenset()
    """Modules that ComfyUI knows by their original names alone, in diffusers' names."""
    comfyui_version: str = ""
    """First version of ComfyUI that knows the model; empty if 0.7, of January 2026, does."""
    comfyui_names_version: str = ""
    """First version of ComfyUI that knows diffusers' names of all modules in blocks, if 0.7 knows
    some of them. Older versions load a part of a file with these names."""
    comfyui_bare_version: str = ""
    """First version of ComfyUI that knows diffusers' names without a prefix, if 0.7 does not."""
    pipeline: PipelineSpec | None = None
    """Functions that build the family's diffusers pipeline; None if adapters cannot be tested."""
    accepts_any_name: bool = False
    """True for a family whose module names are not known. Every dotted name is then accepted as a
    module in diffusers' names."""


ANY_NAME_FORMATS = (
    ("lora", "diffusers"),
    ("lokr", "diffusers"),
    ("loha", "diffusers"),
    ("other", "simpletuner-comfyui"),
)
"""Key format to write by default, by the adapter's algorithm, for model families whose module names
are not known. These formats keep diffusers' dotted names."""


def any_name_table(family: str) -> KeyTable:
    """Return a table of module names for an unknown model family; it keeps names unchanged."""
    return KeyTable(family, rows=(), accepts_any_name=True, default_formats=ANY_NAME_FORMATS)


def get_table(family: str, tables: Mapping[str, KeyTable]) -> KeyTable:
    """Return the table of module names of a model family, by the family's name or an alias.

    For an unknown family, the table accepts any module name.
    """
    for table in tables.values():
        if family == table.family or family in table.aliases:
            return table
    return any_name_table(family)


def get_format(name: str) -> KeyFormat:
    """Return a key format, a tool's naming of tensors in a file, by its name or a tool's name."""
    resolved = FORMAT_ALIASES.get(name, name)
    for key_format in FORMATS:
        if key_format.name == resolved:
            return key_format
    known = [key_format.name for key_format in FORMATS] + list(FORMAT_ALIASES)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise AdapterError(
        f"--to is {name!r}, which is not a known format. {hint}Known: {', '.join(known)}."
    )


class LayerPath(NamedTuple):
    """Location of an adapter layer: the transformer and diffusers' name of the module.

    The transformer is `high` or `low` (noise), or None if the key does not name one.
    """

    stage: Stage | None
    module: str


@dataclass(frozen=True)
class ParsedKey:
    """A key of an adapter file, parsed into transformer, module and role of the tensor.

    The role is what the tensor is in the module's adapter, such as LoRA's `down`.
    """

    text: str
    path: LayerPath
    role: str
    """Role of the tensor in its layer, such as `down`; see `formats.ROLES`."""
    naming: Naming
    formats: frozenset[str]
    """Names of the key formats, one for each tool's naming, that this key fits; empty if no tool
    combines its prefix with its suffix."""


class KeyIndex:
    """Translates module names between diffusers, the original model and ai-toolkit's mixture."""

    def __init__(self, table: KeyTable) -> None:
        self.table = table
        wholes = [fused.whole for fused in table.fused]
        identity = [(name, name) for _, name in table.rows if name not in wholes]
        rows: dict[Naming, list[tuple[str, str]]] = {
            "original": list(table.rows),
            "diffusers": identity + [(name, name) for name in table.unfused],
            "mixed": list(table.mixed_rows),
        }
        # diffusers' `fuse_qkv_projections` makes fused projections of the same names.
        only_read: dict[Naming, list[tuple[str, str]]] = {
            "original": list(table.other_names),
            "diffusers": [(name, name) for name in wholes],
            "mixed": [],
        }
        self._to_diffusers = {
            (naming, separator): {
                name.replace(".", separator): ours for name, ours in only_read[naming] + pairs
            }
            for naming, pairs in rows.items()
            for separator in (".", "_", "$$")
        }
        self.prefixes = [
            (key_format, stage, prefix)
            for key_format in FORMATS
            for stage, prefix in _prefixes(key_format, table)
        ]
        """Every start that keys of a format can have, with the transformer that it names."""
        self._from_diffusers = {
            naming: {ours: name for name, ours in pairs} for naming, pairs in rows.items()
        }

    def to_diffusers(self, name: str, naming: Naming, separator: str) -> str | None:
        """Return diffusers' name of a module, or None if the model family has no such name."""
        if self.table.accepts_any_name:
            plain = separator == "." and naming == "diffusers" and DOTTED_NAME.fullmatch(name)
            return name if plain else None
        known = self._to_diffusers[naming, separator]
        if name in known:
            return known[name]
        in_block = BLOCK.match(name)
        if in_block is None:
            return None
        template = known.get(f"{in_block[1]}{{}}{in_block[3]}")
        return None if template is None else template.format(in_block[2])

    def from_diffusers(self, module: str, naming: Naming, separator: str) -> str | None:
        """Translate diffusers' name of a module to another naming; None if it has no such name."""
        if self.table.accepts_any_name:
            return self.to_diffusers(module, naming, separator)
        template, number = template_of(module)
        names = self._from_diffusers[naming]
        name = names.get(template) or names.get(module)
        return None if name is None else name.format(number).replace(".", separator)

    def templates(self, naming: Naming) -> Mapping[str, str]:
        """Return a dict from diffusers' names of all modules to their names in a naming.

        `{}` stands for the number of a block.
        """
        return self._from_diffusers[naming]


def template_of(module: str) -> tuple[str, str]:
    """Return a module's name with `{}` in place of the block number, and the number as text."""
    in_block = BLOCK.match(module)
    return (f"{in_block[1]}{{}}{in_block[3]}", in_block[2]) if in_block else (module, "")


def is_bare_parameter(module: str, table: KeyTable) -> bool:
    """Return True if the name is not a module's but a parameter's, which a LoRA cannot change."""
    return template_of(module)[0] in table.bare_parameters


def kernel_of(module: str, table: KeyTable) -> tuple[int, ...]:
    """Return the kernel of a convolution, or () for any other module."""
    found = (kernel for end, kernel in table.kernels if f".{module}".endswith(f".{end}"))
    return next(found, ())


def parse_key(text: str, index: KeyIndex) -> ParsedKey | None:
    """Parse a key of an adapter file; return None if no tool writes such a key for the family."""
    plain = _without_wrappers(text)
    parts = split_suffix(plain)
    if parts is None:
        return None
    body, role, styles = parts
    body = _EXPERT_WITHOUT_UNDERSCORE.sub(r"transformer_\1", body)
    first: tuple[LayerPath, Naming] | None = None
    formats = set()
    for key_format, stage, prefix in index.prefixes:
        if not body.startswith(prefix):
            continue
        path = _parse_name(body[len(prefix) :], prefix, stage, key_format, index)
        if path is None or (first is not None and path != first[0]):
            continue
        first = first or (path, key_format.naming)
        if key_format.style in styles and plain == text:
            formats.add(key_format.name)
    first = first or _parse_any_prefix(body, index)
    return None if first is None else ParsedKey(text, first[0], role, first[1], frozenset(formats))


def _without_wrappers(text: str) -> str:
    """Return a key without the names of wrapped modules and of peft's adapter.

    Old spellings of suffixes are replaced, too.
    """
    text = _MODULE_WRAPPER.sub("", text)
    text = _ADAPTER_NAME.sub(r".\1.default.\2", text)
    text = _MODULATION.sub(".modulation.diff", text)
    text = _CUT_BLOCKS.sub(r"\1transformer_blocks.", text)
    # Attention processors of old versions of diffusers held the LoRA of their module.
    text = text.replace(".processor.to_", ".to_").replace(".processor.add_", ".add_")
    return text.replace(".to_out_lora.", ".to_out.0_lora.")


def build_key(
    key_format: KeyFormat,
    index: KeyIndex,
    path: LayerPath,
    role: str,
    style: SuffixStyle | None = None,
) -> str:
    """Return the key of a tensor in the naming of one tool, `key_format`.

    The format must have a name for the module and a suffix for the tensor's role, such as `down`.
    `style` replaces the format's own style of suffixes.
    """
    name = index.from_diffusers(path.module, key_format.naming, key_format.separator)
    suffix = SUFFIXES[style or key_format.style].get(role)
    assert name is not None, f"{key_format.name} has no name for {path.module}"
    assert suffix is not None, f"{key_format.name} has no suffix for {role}"
    return f"{_prefix(key_format, path.stage, index.table)}{name}{suffix}"


def split_suffix(text: str) -> tuple[str, str, frozenset[SuffixStyle]] | None:
    """Split a key's suffix off; return the rest, the tensor's role, and the suffix's styles.

    The role is what the tensor is in its layer, such as `down`. Styles are the tools' ways to write
    suffixes, such as `peft` and `kohya`. The result is None if the key has no known suffix.
    """
    for suffix, (role, styles) in _ROLE_OF_SUFFIX.items():
        if text.endswith(suffix):
            return text[: -len(suffix)], role, styles
    return None


def resolve_stages(keys: Sequence[ParsedKey]) -> list[ParsedKey]:
    """Assign `transformer.` keys to the high-noise transformer if there are `transformer_2.` keys.

    In a file without `transformer_2.` keys, they may belong to either transformer.
    """
    if not any(key.path.stage and key.text.startswith("transformer_2.") for key in keys):
        return list(keys)
    return [
        replace(
            key,
            path=LayerPath("high", key.path.module),
            formats=frozenset({BOTH_STAGES_FORMAT} if key.formats else ()),
        )
        if key.text.startswith("transformer.")
        else key
        for key in keys
    ]


def detect_format(keys: Sequence[ParsedKey]) -> KeyFormat | None:
    """Return the key format (a tool's naming) that all keys fit, or None if there is none."""
    common = frozenset.intersection(*(key.formats for key in keys)) if keys else frozenset()
    has_stages = {key.path.stage for key in keys} != {None}
    fitting = [key_format for key_format in FORMATS if key_format.name in common]
    # If the keys name no expert, a format without experts is preferred.
    fitting.sort(key=lambda key_format: bool(key_format.stages) != has_stages)
    return fitting[0] if fitting else None


def count_formats(keys: Sequence[ParsedKey]) -> Mapping[str, int]:
    """Return, for each tool's key format, how many of the keys fit it, the most common first."""
    counts = Counter(name for key in keys for name in key.formats)
    return dict(counts.most_common())


def is_text_encoder_key(text: str) -> bool:
    """Return True if a key belongs to a text encoder or to its embeddings."""
    return _TEXT_ENCODER.match(text) is not None


def unknown_key_error(text: str, tables: Sequence[KeyTable]) -> AdapterError:
    """Return the error for a key that no model family has.

    It has the reason, if the key is of a known kind, or else a similar known key.
    """
    families = " or ".join(table.family for table in tables)
    reason = unsupported_reason(text) or _whole_weight_reason(text, tables)
    if reason:
        return AdapterError(
            f"{text!r} cannot be used with {families}: {reason}.", kind="unsupported", key=text
        )
    near = nearest_key(text, tables)
    hint = f" The most similar known key is {near!r}." if near else ""
    return AdapterError(
        f"{text!r} cannot be read: no known format writes such a key for {families}.{hint}",
        kind="unknown-key",
        key=text,
    )


def unsupported_reason(text: str) -> str:
    """Return why a key of a known kind cannot be used with any model; empty if it is of none."""
    return next((why for pattern, why in UNSUPPORTED_KEYS if pattern.search(text)), "")


def _whole_weight_reason(text: str, tables: Sequence[KeyTable]) -> str:
    """Return why a key that is the name of a model's weight cannot be used; empty for others."""
    body, _, kind = text.rpartition(".")
    indices = (KeyIndex(table) for table in tables if not table.accepts_any_name)
    if kind in ("weight", "bias") and any(_parse_any_prefix(body, index) for index in indices):
        return (
            "it is a weight of the model itself, not of an adapter. A whole model is given with "
            "`gracetune adapter merge --into` or `extract`"
        )
    return ""


def nearest_key(text: str, tables: Sequence[KeyTable]) -> str | None:
    """Return the known key that is most similar to a given one, or None if none is similar."""
    parts = split_suffix(text)
    if parts is not None:
        body, suffix = parts[0], text[len(parts[0]) :]
    else:
        body, dot, tail = text.removesuffix(".weight").rpartition(".")
        close = difflib.get_close_matches(f"{dot}{tail}.weight", _ROLE_OF_SUFFIX, n=1, cutoff=0.4)
        body, suffix = (body, close[0]) if dot and close else (text, ".lora_A.weight")
    number = BLOCK.match(body)
    bodies = {
        f"{prefix}{name.format(number[2] if number else 0).replace('.', key_format.separator)}"
        for table in tables
        if not table.accepts_any_name
        for key_format in FORMATS
        for _, prefix in _prefixes(key_format, table)
        for name in KeyIndex(table).templates(key_format.naming).values()
    }
    close = difflib.get_close_matches(body, sorted(bodies), n=1, cutoff=0.5)
    return f"{close[0]}{suffix}" if close else None


def _parse_name(
    name: str, prefix: str, stage: Stage | None, key_format: KeyFormat, index: KeyIndex
) -> LayerPath | None:
    """Return the transformer and module that a key stands for in one tool's key format, or None.

    `name` is the key without its prefix and suffix.
    """
    module = index.to_diffusers(name, key_format.naming, key_format.separator)
    # Without a table and without a prefix, an underscored key would look like a module.
    if module is not None and (prefix or "." in module or not index.table.accepts_any_name):
        return LayerPath(stage, module)
    return None


def _parse_any_prefix(body: str, index: KeyIndex) -> tuple[LayerPath, Naming] | None:
    """Parse a key that starts with a combination of prefixes that no format has.

    `body` is the key without its suffix. The result has the module and the origin of its name, or
    is None if the rest of the key is not the name of a module.
    """
    if index.table.accepts_any_name:
        return None
    separator = next((text for text in (".", "$$") if text in body), "_")
    namings: tuple[Naming, ...] = ("diffusers", "original", "mixed")
    stage: Stage | None = None
    rest = body
    while True:
        for naming in namings:
            module = index.to_diffusers(rest, naming, separator)
            if module is not None:
                return LayerPath(stage, module), naming
        word = next((word for word in _PREFIX_WORDS if rest.startswith(word + separator)), None)
        if word is None:
            return None
        if word in _EXPERT_PREFIXES:
            if stage is not None or not index.table.has_stages:
                return None
            stage = _EXPERT_PREFIXES[word]
        rest = rest.removeprefix(word).lstrip(separator)


def _prefixes(key_format: KeyFormat, table: KeyTable) -> list[tuple[Stage | None, str]]:
    staged: list[tuple[Stage | None, str]] = [
        (stage, _prefix(key_format, stage, table)) for stage, _ in key_format.stages
    ]
    # Tools that name the expert leave it out for models with a single transformer.
    is_plain = not key_format.stages or (key_format.prefix and not table.has_stages)
    plain = [(None, _prefix(key_format, None, table))] if is_plain else []
    return [*(staged if table.has_stages or table.accepts_any_name else []), *plain]


def _prefix(key_format: KeyFormat, stage: Stage | None, table: KeyTable) -> str:
    prefix = key_format.prefix.replace("transformer", table.component)
    token = dict(key_format.stages).get(stage) if stage is not None else None
    if token is None:
        return prefix
    separator = "" if token.endswith(".") else key_format.separator
    return f"{prefix}{token}{separator}"


def is_known_to_comfyui(key_format: KeyFormat, table: KeyTable) -> bool:
    """Return True if ComfyUI looks for keys with the prefix and module names of this format."""
    prefix = _prefix(key_format, None, table)
    return (prefix, key_format.separator, key_format.naming) in table.comfyui_prefixes


def _roles_by_suffix() -> dict[str, tuple[str, frozenset[SuffixStyle]]]:
    """Return, for every key suffix, the tensor's role and the styles that have the suffix.

    The role is what the tensor is in its layer, such as `down`; a style is a tool's way to write
    suffixes. The longest suffix is first, because `.lora_B.default.weight` must be tried before
    shorter suffixes that it also ends with.
    """
    found: dict[str, tuple[str, set[SuffixStyle]]] = {}
    for style, suffixes in SUFFIXES.items():
        for role, suffix in suffixes.items():
            found.setdefault(suffix, (role, set()))[1].add(style)
    for suffix, role in READ_ONLY_SUFFIXES.items():
        found.setdefault(suffix, (role, set()))
    ordered = sorted(found.items(), key=lambda item: -len(item[0]))
    return {suffix: (role, frozenset(styles)) for suffix, (role, styles) in ordered}


_ROLE_OF_SUFFIX = _roles_by_suffix()
