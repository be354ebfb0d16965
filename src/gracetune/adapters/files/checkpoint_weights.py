"""Read the adapter from a checkpoint's files `weights.safetensors` and `ema.safetensors`.

These files have the parameters of the model in training, by the model's own names:

    high.blocks.0.attn1.to_q.lora_A.default.weight      peft's layers (LoRA, DoRA)
    blocks.0.attn1.to_q.adapter.lokr_w1                 LyCORIS's modules and full matrices

Alpha is not a parameter. `checkpoint_header` puts it into the header of such a file. Checkpoints of
earlier versions have no such header; for them, alpha follows from the settings in manifest.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from blake3 import blake3

from gracetune.adapters.files.convert import FAMILY_KEY, import_tensors
from gracetune.adapters.files.formats import FORMATS
from gracetune.adapters.files.keys import KeyIndex, get_table, parse_key, split_suffix
from gracetune.adapters.files.layers import join_stages, with_stage
from gracetune.config.schema import AdapterSection
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable, Stage
    from gracetune.adapters.files.layers import Adapter

    Alphas = dict[str, dict[str, float]]
    """Expert (empty without experts) -> module -> alpha. Other modules have the rank as alpha."""

CHECKPOINT_FORMAT = "checkpoint"
"""Value of `Adapter.format` for the parameters of a model in training."""
CHECKPOINT_FILES = ("ema.safetensors", "weights.safetensors")
"""Files of a checkpoint that hold an adapter; the run exports the first that exists."""
CHECKPOINT_ADAPTER = "adapter"
"""Folder in a checkpoint with the adapter as the run exports it."""
MANIFEST = "manifest.json"
ALPHAS_KEY = "gracetune.checkpoint_alphas"
"""Header entry with the alpha of each module, as JSON."""
NOT_AVERAGED_KEY = "gracetune.not_averaged"
"""Header entry of weights that are not those the run exports, which are averaged."""
PREFIXES = (
    *(key_format.prefix for key_format in FORMATS if key_format.prefix),
    *("module.", "model.", "unet.", "pipe.", "transformer_1.", "transformer_2."),
)
"""Starts of keys that other tools write."""


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder is a checkpoint of a run."""
    return (folder / MANIFEST).is_file() and (
        (folder / CHECKPOINT_FILES[1]).is_file() or is_sharded_checkpoint(folder)
    )


def is_sharded_checkpoint(folder: Path) -> bool:
    """Return True if each rank of a run has written a part of a checkpoint's weights.

    Such a run trains a whole model: it has no adapter.
    """
    return any(folder.glob("weights-00001-of-*.safetensors"))


def checkpoint_header(adapter: Adapter) -> dict[str, str]:
    """Return the header of a checkpoint's file with the adapter's parameters."""
    alphas: Alphas = {stage or "": {} for stage in adapter.stages}
    for path, layer in adapter.layers.items():
        if layer.alpha is not None:
            alphas[path.stage or ""][path.module] = layer.alpha
    return {FAMILY_KEY: adapter.table.family, ALPHAS_KEY: json.dumps(alphas)}


def import_parameters(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    tables: Mapping[str, KeyTable],
    table: KeyTable | None,
) -> Adapter | None:
    """Return the adapter in a checkpoint's file, or None if `path` is another kind of file.

    `table` has the module names of the model family, if the user gave the family.
    """
    parts = {name: split_parameter(name) for name in tensors}
    names = {name: part for name, part in parts.items() if part is not None}
    if not names or len(names) < len(parts):
        return None
    modules = {module for module, _ in names.values()}
    manifest = _read_manifest(path)
    if ALPHAS_KEY in metadata:
        alphas = _parse_alphas(path, metadata[ALPHAS_KEY])
        found = get_table(metadata[FAMILY_KEY], tables) if FAMILY_KEY in metadata else None
    elif manifest is not None:
        identity = manifest["identity"]
        try:
            found = get_table(str(identity["model.family"]), tables)
            alphas = _alphas_from_settings(identity, modules, found)
        except (KeyError, ValueError) as error:
            text = str(error).replace("\n", " ")
            reason = f"its settings of the adapter are not valid ({text})"
            raise _damaged(path.with_name(MANIFEST), reason) from error
    elif _is_of_other_tool(names, tables):
        return None
    else:
        raise AdapterError(
            f"{path} holds parameters of a model in training, such as {next(iter(names))!r}, "
            "without their alpha, which scales the adapter. Give the file in its checkpoint, next "
            f"to {MANIFEST}, or the adapter that the run exported.",
            kind="no-alpha",
            key=next(iter(names)),
        )
    digest = None if manifest is None else manifest["files"][path.name]
    if digest not in (None, blake3().update_mmap(path).hexdigest()):
        raise AdapterError(
            f"{path} is damaged: its content does not match the checkpoint's {MANIFEST}. Use "
            "another checkpoint.",
            kind="damaged",
        )
    if table is not None and found is not None and table.family != found.family:
        raise AdapterError(
            f"{path} is a checkpoint of a {found.family} model, but the family is {table.family}. "
            f"Give --family {found.family}, or another file.",
            kind="other-model",
        )
    header = {key: text for key, text in metadata.items() if key != ALPHAS_KEY}
    adapters = [
        _import_expert(expert, alphas[expert], names, tensors, header, tables, table or found)
        for expert in sorted(alphas)
    ]
    if sum(len(adapter.layers) for adapter in adapters) != len(modules):
        raise _damaged(path, "the experts in its header are not those of its keys")
    adapter = join_stages(*adapters) if len(adapters) == 2 else adapters[0]
    notices = adapter.notices
    if NOT_AVERAGED_KEY in metadata or (
        path.name == CHECKPOINT_FILES[1] and path.with_name(CHECKPOINT_FILES[0]).exists()
    ):
        notices = (
            *notices,
            f"{path.name} has the weights of the last step, but the run exports averaged ones: "
            f"see {CHECKPOINT_ADAPTER}/ or {CHECKPOINT_FILES[0]} beside it.",
        )
    return replace(adapter, format=CHECKPOINT_FORMAT, notices=notices)


def split_parameter(name: str) -> tuple[str, str] | None:
    """Split an adapter parameter's name into the module, with its expert, and the suffix.

    Returns None if the name is not one that `adapters.inject` gives to a parameter.
    """
    parts = split_suffix(name)
    if parts is None or name.startswith("base_model."):
        return None
    body, suffix = parts[0], name[len(parts[0]) :]
    if body.endswith(".adapter"):
        return body.removesuffix(".adapter"), suffix
    return (body, suffix) if suffix.startswith(".lora_") and ".default." in suffix else None


def _import_expert(
    expert: str,
    alphas: Mapping[str, float],
    names: Mapping[str, tuple[str, str]],
    tensors: Mapping[str, Tensor],
    header: Mapping[str, str],
    tables: Mapping[str, KeyTable],
    table: KeyTable | None,
) -> Adapter:
    """Return the adapter of one expert, or of the only transformer if `expert` is empty."""
    prefix = f"{expert}." if expert else ""
    renamed = {
        f"transformer.{module.removeprefix(prefix)}{suffix.replace('.default.', '.')}": tensors[
            name
        ]
        for name, (module, suffix) in names.items()
        if module.startswith(prefix)
    }
    for module, alpha in alphas.items():
        renamed[f"transformer.{module}.alpha"] = torch.tensor(float(alpha))
    adapter = import_tensors(renamed, header, tables, table)
    return with_stage(adapter, cast("Stage", expert) if expert else None)


def _parse_alphas(path: Path, text: str) -> Alphas:
    try:
        alphas = json.loads(text)
        return {
            expert: {module: float(alpha) for module, alpha in modules.items()}
            for expert, modules in alphas.items()
            if expert in ("", "high", "low")
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{ALPHAS_KEY} in its header is not valid ({error})") from error


def _alphas_from_settings(
    identity: Mapping[str, Any], modules: Iterable[str], table: KeyTable
) -> Alphas:
    """Return alpha by the adapter settings in an older checkpoint's manifest.

    Raises KeyError or ValueError if the settings are damaged.
    """
    from gracetune.adapters.inject import settings_for  # peft takes seconds to import

    overrides: dict[str, dict[str, object]] = {}
    for name, value in identity.items():
        if name.startswith("adapter.overrides."):
            pattern, _, setting = name.removeprefix("adapter.overrides.").rpartition(".")
            overrides.setdefault(pattern, {})[setting] = value
    section = AdapterSection.model_validate(
        {"rank": identity["adapter.rank"], "alpha": identity["adapter.alpha"]}
        | {"overrides": overrides}
    )
    alphas: Alphas = {}
    for module in sorted(modules):
        expert, _, name = module.partition(".") if table.has_stages else ("", "", module)
        if expert not in ("", "high", "low"):  # a model of the family with one transformer
            expert, name = "", module
        alphas.setdefault(expert, {})[name] = settings_for(section, name, expert).alpha
    return alphas


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint that a file belongs to, or None."""
    try:
        manifest = json.loads(path.with_name(MANIFEST).read_text(encoding="utf-8"))
        is_ours = path.name in manifest["files"] and "adapter.kind" in manifest["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return cast("dict[str, Any]", manifest) if is_ours else None


def _is_of_other_tool(names: Iterable[str], tables: Mapping[str, KeyTable]) -> bool:
    """Return True if another tool writes such keys: with a prefix, or DiffSynth-Studio's."""
    names = list(names)
    if any(name.startswith(PREFIXES) for name in names):
        return True
    for table in tables.values():
        index = KeyIndex(table)
        keys = [parse_key(name, index) for name in names]
        if all(key is not None and key.formats for key in keys):
            return True
    return False


def _damaged(path: Path, reason: str) -> AdapterError:
    return AdapterError(f"{path} is damaged: {reason}. Use another checkpoint.", kind="damaged")
