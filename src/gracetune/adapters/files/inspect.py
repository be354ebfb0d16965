"""Describe an adapter file: its key format, ranks, targets, and the size of its weight changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.adapters.files.checkpoint_weights import CHECKPOINT_FORMAT
from gracetune.adapters.files.io import (
    ALPHA_KEY,
    find_stage,
    read_adapter_and_tensors,
    resolve_path,
)
from gracetune.adapters.files.keys import (
    BLOCK,
    KeyIndex,
    count_formats,
    get_format,
    parse_key,
    template_of,
)
from gracetune.adapters.files.layers import delta_norm, rank_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from gracetune.adapters.files.keys import KeyTable
    from gracetune.adapters.files.layers import Adapter


@dataclass(frozen=True)
class Inspection:
    """The description of one adapter file. The field names are those of `inspect --json`.

    `algorithms`, `ranks`, `alphas` and `targets` count the modules that have each value; `dtypes`
    counts tensors.
    """

    path: str
    nbytes: int
    family: str
    form: str
    """Name of the key format, which is a tool's way to name the tensors in a file. For a file that
    mixes several, each name with its number of keys."""
    tools: str
    """Names of the tools that write or read files with such keys."""
    caution: str
    """Reason not to use files with such keys, for example that no tool loads them; empty if there
    is none."""
    stages: tuple[str, ...]
    """Transformers that the adapter changes, `high` for high noise and `low` for low noise; empty
    if neither the keys, the header nor the file's name tell."""
    has_experts: bool
    """True if the model family has a high-noise and a low-noise transformer."""
    stage_by: str
    """Source from which `stages`, the high-noise or low-noise transformer, is known: "its keys",
    "its header" or "its name"."""
    algorithms: Mapping[str, int]
    ranks: Mapping[str, int]
    alphas: Mapping[str, int]
    dtypes: Mapping[str, int]
    num_modules: int
    num_parameters: int
    targets: Mapping[str, int]
    """Number of modules for each name inside a block, such as `attn1.to_q`."""
    norms: Mapping[str, float]
    """Norm of the weight change, by module. If the keys name the high-noise or low-noise
    transformer, module names start with it: "high: blocks.0.attn1.to_q"."""
    by_block: Mapping[str, float]
    """Norm of the weight changes of all modules in a block together, by block."""
    metadata: Mapping[str, str]
    notices: tuple[str, ...]


def inspect(
    path: Path, tables: Mapping[str, KeyTable], table: KeyTable | None = None
) -> Inspection:
    """Read an adapter file and describe it.

    `table` has the module names of the model family, if the family is known.
    """
    path = resolve_path(path)
    adapter, tensors = read_adapter_and_tensors(path, tables, table)
    form, tools, caution = _format_of(adapter, list(tensors))
    stage, stage_source = find_stage(adapter, path)
    stages_in_keys = tuple(one for one in adapter.stages if one is not None)
    layers = adapter.layers
    norms = {_label(at.stage, at.module): delta_norm(layer) for at, layer in layers.items()}
    alphas = _counts(
        f"{rank if layer.alpha is None else layer.alpha:g}"
        for layer in layers.values()
        if (rank := rank_of(layer)) is not None
    )
    return Inspection(
        path=str(path),
        nbytes=path.stat().st_size,
        family=adapter.table.family,
        form=form,
        tools=tools,
        caution=caution,
        stages=stages_in_keys or ((stage,) if stage else ()),
        has_experts=adapter.table.has_stages,
        stage_by="its keys" if stages_in_keys else stage_source,
        algorithms=_counts(
            layer.algorithm + (" + magnitudes (DoRA)" if layer.is_dora else "")
            for layer in layers.values()
        ),
        ranks=_counts(str(rank_of(layer) or "whole") for layer in layers.values()),
        alphas=alphas,
        dtypes=_counts(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
        num_modules=len(layers),
        num_parameters=sum(t.numel() for layer in layers.values() for t in layer.tensors.values()),
        targets=_counts(_name_in_block(at.module) for at in layers),
        norms=norms,
        by_block=_norms_by_block(norms),
        metadata=dict(adapter.metadata),
        notices=(*adapter.notices, *_alpha_notices(adapter, alphas)),
    )


def _format_of(adapter: Adapter, keys: list[str]) -> tuple[str, str, str]:
    """Return the name of the key format, the tools that write it, and a warning about it."""
    if adapter.format == CHECKPOINT_FORMAT:
        caution = "only gracetune reads it: convert it for another tool"
        return CHECKPOINT_FORMAT, "the weights in a checkpoint of gracetune", caution
    if adapter.format is not None:
        key_format = get_format(adapter.format)
        return key_format.name, key_format.tools, key_format.caution
    index = KeyIndex(adapter.table)
    counts = count_formats([key for text in keys if (key := parse_key(text, index)) is not None])
    mixed = ", ".join(f"{name} ({count} keys)" for name, count in counts.items())
    form = f"mixed: {mixed}" if mixed else f"other: keys such as {keys[0]}"
    return form, "", "no known tool writes or reads all of these keys: convert it for another tool"


def _alpha_notices(adapter: Adapter, alphas: Mapping[str, int]) -> list[str]:
    """Explain a difference between alpha in the header and the alpha that the file has."""
    trained = adapter.metadata.get(ALPHA_KEY, "none")
    if trained == "none" or set(trained.split(",")) == set(alphas):
        return []
    return [
        f"it was trained with alpha {trained}, which is multiplied into the weights of the file: "
        "tools that use the alpha above apply it at the trained strength"
    ]


def _label(stage: str | None, module: str) -> str:
    return module if stage is None else f"{stage}: {module}"


def _name_in_block(module: str) -> str:
    template, number = template_of(module)
    return template.partition(".{}.")[2] if number else module


def _norms_by_block(norms: Mapping[str, float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for module, value in norms.items():
        in_block = BLOCK.match(module)
        block = f"{in_block[1]}{in_block[2]}" if in_block else "outside blocks"
        squares[block] = squares.get(block, 0.0) + value**2
    return {block: total**0.5 for block, total in sorted(squares.items(), key=_block_order)}


def _block_order(item: tuple[str, float]) -> tuple[str, int]:
    kind, _, number = item[0].rpartition(".")
    return (kind, int(number)) if number.isdigit() else ("~", 0)


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
