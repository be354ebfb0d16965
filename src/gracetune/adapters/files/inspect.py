"""What an adapter is: everything that `inspect` shows, as plain values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.adapters.files.io import find_stage, read_adapter_and_tensors, resolve_path
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
    """One file, described."""

    path: str
    nbytes: int
    family: str
    form: str
    """The form's name; for a file that mixes several, each with its number of keys."""
    tools: str
    caution: str
    stages: tuple[str, ...]
    """The stages it holds; empty where nobody says."""
    stage_by: str
    """Who says: its keys, its header or its name."""
    algorithms: Mapping[str, int]
    ranks: Mapping[str, int]
    alphas: Mapping[str, int]
    dtypes: Mapping[str, int]
    num_modules: int
    num_parameters: int
    targets: Mapping[str, int]
    """Modules by their name inside a block."""
    norms: Mapping[str, float]
    """|dW| of each module, with its stage before it where there are two."""
    by_block: Mapping[str, float]
    """|dW| of all modules of a block together."""
    metadata: Mapping[str, str]
    notices: tuple[str, ...]


def inspect(
    path: Path, tables: Mapping[str, KeyTable], table: KeyTable | None = None
) -> Inspection:
    """Read a file and describe it."""
    path = resolve_path(path)
    adapter, tensors = read_adapter_and_tensors(path, tables, table)
    form, tools, caution = _form(adapter, list(tensors))
    stage, by = find_stage(adapter, path)
    keyed = tuple(one for one in adapter.stages if one is not None)
    layers = adapter.layers
    norms = {
        _label(place.stage, place.module): delta_norm(layer) for place, layer in layers.items()
    }
    return Inspection(
        path=str(path),
        nbytes=path.stat().st_size,
        family=adapter.table.family,
        form=form,
        tools=tools,
        caution=caution,
        stages=keyed or ((stage,) if stage else ()),
        stage_by="its keys" if keyed else by,
        algorithms=_counts(
            layer.algorithm + (" + magnitudes (DoRA)" if layer.is_dora else "")
            for layer in layers.values()
        ),
        ranks=_counts(str(rank_of(layer) or "whole") for layer in layers.values()),
        alphas=_counts(
            f"{rank if layer.alpha is None else layer.alpha:g}"
            for layer in layers.values()
            if (rank := rank_of(layer)) is not None
        ),
        dtypes=_counts(str(t.dtype).removeprefix("torch.") for t in tensors.values()),
        num_modules=len(layers),
        num_parameters=sum(t.numel() for layer in layers.values() for t in layer.tensors.values()),
        targets=_counts(_target(place.module) for place in layers),
        norms=norms,
        by_block=_by_block(norms),
        metadata=dict(adapter.metadata),
        notices=adapter.notices,
    )


def _form(adapter: Adapter, keys: list[str]) -> tuple[str, str, str]:
    if adapter.format is not None:
        form = get_format(adapter.format)
        return form.name, form.tools, form.caution
    index = KeyIndex(adapter.table)
    counts = count_formats([key for text in keys if (key := parse_key(text, index)) is not None])
    mixed = ", ".join(f"{name} ({count} keys)" for name, count in counts.items())
    return f"mixed: {mixed}" if mixed else "no known tool's", "", "no tool reads all of it"


def _label(stage: str | None, module: str) -> str:
    return module if stage is None else f"{stage}: {module}"


def _target(module: str) -> str:
    template, number = template_of(module)
    return template.partition(".{}.")[2] if number else module


def _by_block(norms: Mapping[str, float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for module, value in norms.items():
        inside = BLOCK.match(module)
        block = f"{inside[1]}{inside[2]}" if inside else "outside blocks"
        squares[block] = squares.get(block, 0.0) + value**2
    return {block: total**0.5 for block, total in sorted(squares.items(), key=_place_in_model)}


def _place_in_model(item: tuple[str, float]) -> tuple[str, int]:
    head, _, number = item[0].rpartition(".")
    return (head, int(number)) if number.isdigit() else ("~", 0)


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())
