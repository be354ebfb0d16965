"""Find the model family that an adapter file is for.

Several families have modules of the same names, such as Flux and Chroma. If the keys of a file fit
more than one family, other tools' entries in the header decide, then the sizes of the layers.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gracetune.adapters.files.keys import (
    BLOCK,
    KeyIndex,
    LayerPath,
    parse_key,
    template_of,
    unknown_key_error,
    unsupported_reason,
)
from gracetune.adapters.files.layers import delta_shape, make_layer
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable

BASE_MODEL_KEYS = (
    "modelspec.architecture",
    "ss_base_model_version",
    "ss_network_module",
    "base_model",
    "gracetune.base_model",
)
"""Entries of a file's header in which tools name the model."""


def detect_table(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], tables: Mapping[str, KeyTable]
) -> tuple[KeyTable, list[str]]:
    """Return the table of the model family that a file is for, and a notice if it is assumed.

    If several families have all of the keys, the header decides, then the sizes of the layers.
    """
    texts = list(tensors)
    fitting = _most_parsed(texts, tables)
    if len(fitting) > 1:
        header = " ".join(metadata.get(entry, "") for entry in BASE_MODEL_KEYS).lower()
        fitting = _narrow(fitting, lambda table: any(x in header for x in table.header_words))
    if len(fitting) > 1:
        fitting = _narrow(fitting, lambda table: _has_ratios(table, tensors))
        fitting = _narrow(fitting, lambda table: _has_columns(table, tensors))
        fitting = _narrow(fitting, lambda table: _width(table, tensors) in table.widths)
    if len(fitting) == 1:
        return fitting[0], []
    names = [table.family for table in fitting]
    for table in fitting:
        others = [name for name in names if name != table.family]
        if set(others) <= set(table.preferred_over):
            return table, [
                f"the keys are those of {' and '.join(names)} adapters: {table.family} is assumed. "
                f"--family {others[0]} selects another."
            ]
    raise AdapterError(
        f"{texts[0]!r} is a key in {' and '.join(names)} adapters, so the keys do not show which "
        f"model the file is for. Give --family, for example --family {names[0]}.",
        kind="ambiguous",
        key=texts[0],
    )


def _narrow(tables: list[KeyTable], fits: Callable[[KeyTable], bool]) -> list[KeyTable]:
    """Return the tables that fit, or all if none does."""
    return [table for table in tables if fits(table)] or tables


def _sizes(table: KeyTable, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of the weight change of each module, by its name without block number.

    Modules with incomplete tensors are left out.
    """
    index = KeyIndex(table)
    grouped: dict[LayerPath, dict[str, str]] = {}
    for text in tensors:
        key = parse_key(text, index)
        if key is not None:
            grouped.setdefault(key.path, {})[key.role] = text
    sizes = {}
    for path, by_role in grouped.items():
        with contextlib.suppress(AdapterError):
            layer = make_layer({role: tensors[text] for role, text in by_role.items()}, by_role)
            sizes[template_of(path.module)[0]] = delta_shape(layer)
    return sizes


def _has_ratios(table: KeyTable, tensors: Mapping[str, Tensor]) -> bool:
    sizes = _sizes(table, tensors)
    return all(
        sizes[name][0] == ratio * sizes[name][1]
        for name, ratio in table.row_ratios
        if name in sizes and len(sizes[name]) > 1
    )


def _has_columns(table: KeyTable, tensors: Mapping[str, Tensor]) -> bool:
    """Return True if all modules with known columns have them, and there is such a module."""
    known = [
        shape[1:2] == (columns,)
        for name, shape in _sizes(table, tensors).items()
        for end, columns in table.columns
        if name.endswith(end)
    ]
    return bool(known) and all(known)


def _width(table: KeyTable, tensors: Mapping[str, Tensor]) -> int | None:
    """Return the hidden size of the model: the number of columns that most weights have."""
    columns = [shape[1] for shape in _sizes(table, tensors).values() if len(shape) > 1]
    return max(set(columns), key=columns.count) if columns else None


def _most_parsed(keys: Sequence[str], tables: Mapping[str, KeyTable]) -> list[KeyTable]:
    """Return the tables of module names that can parse the most keys of an adapter file.

    There are several if the keys do not show the model family.
    """
    counts = {name: _count_parsed(keys, table) for name, table in tables.items()}
    best = max(counts.values())
    if best == 0:
        first = next((key for key in keys if unsupported_reason(key)), keys[0])
        raise unknown_key_error(first, list(tables.values()))
    return [tables[name] for name, count in counts.items() if count == best]


def _count_parsed(keys: Sequence[str], table: KeyTable) -> int:
    """Return how many keys can be parsed with one model family's table of module names.

    The result is 0 if a block number is beyond the family's `max_blocks`.
    """
    index = KeyIndex(table)
    max_blocks = dict(table.max_blocks)
    count = 0
    for text in keys:
        key = parse_key(text, index)
        if key is None:
            continue
        in_block = BLOCK.match(key.path.module)
        if in_block and int(in_block[2]) >= max_blocks.get(in_block[1].rstrip("."), 10**9):
            return 0
        count += 1
    return count
