"""`gracetune adapter merge` and `extract`: adapters into weights, and out of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from gracetune.cli.adapter_args import (
    about_of,
    cut_lines,
    demand_file,
    demand_new_folder,
    demand_one_stage,
    dtype_of,
    finite,
    generator,
    positive,
    read,
    show,
    table_of,
    write_new,
)
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from gracetune.adapters.layers import Adapter
    from gracetune.adapters.tables.types import Stage


def merge(args: argparse.Namespace) -> int:
    """Several adapters into one, or one and more into a model."""
    from gracetune.adapters.files import interchange_form
    from gracetune.adapters.lowrank import combine
    from gracetune.adapters.names import form_named

    strengths = finite("--strength", args.strength or [1.0] * len(args.files))
    if len(strengths) != len(args.files):
        raise AdapterError(
            f"--strength is given {len(strengths)} times for {len(args.files)} files. Give one for "
            "each, or none."
        )
    if args.into is not None:
        return _merge_into(args, strengths)
    demand_file(args.out)
    given = [read(path, args) for path in args.files]
    demand_one_stage([stage for _, stage in given])
    rank = None if args.rank is None else positive("--rank", args.rank)
    pairs = [(adapter, s) for (adapter, _), s in zip(given, strengths, strict=True)]
    adapter, cut = combine(pairs, rank, generator())
    form = form_named(args.to) if args.to else interchange_form(adapter)
    written = write_new(args, args.out, adapter, form, given[0][1])
    lines = [*cut_lines(cut), *(f"{form.name}: {path}" for path in written)]
    told = {
        "form": form.name,
        "files": [str(path) for path in written],
        "modules": len(adapter.layers),
        "lost": None if cut is None else asdict(cut),
    }
    show(args, told, lines)
    return 0


def _merge_into(args: argparse.Namespace, strengths: Sequence[float]) -> int:
    from gracetune.adapters.layers import at_stage
    from gracetune.adapters.merging import holds_transformers, merge_into, merge_into_pipeline

    if args.into.is_dir():
        demand_new_folder(args.out, args.into)
    else:
        demand_file(args.out)
    by_stage: dict[Stage | None, list[tuple[Adapter, float]]] = {}
    for path, strength in zip(args.files, strengths, strict=True):
        adapter, stage = read(path, args)
        for one in adapter.stages:
            part = (at_stage(adapter.only(one), None), strength)
            by_stage.setdefault(one or stage, []).append(part)
    table = next(iter(by_stage.values()))[0][0].table
    if holds_transformers(args.into):
        if None in by_stage and (args.into / "transformer_2").is_dir():
            raise AdapterError(
                f"{args.into} has two experts and {args.files[0]} does not say which it is for. "
                "Give --stage high or --stage low.",
                kind="no-stage",
            )
        done = merge_into_pipeline(args.into, args.out, by_stage, table)
    else:
        demand_one_stage(list(by_stage))
        (adapters,) = by_stage.values()
        done = {args.into.name: merge_into(args.into, args.out, adapters, table)}
    lines = [f"{name}: {one.changed} modules changed" for name, one in done.items()]
    told = {"out": str(args.out), "parts": {name: asdict(one) for name, one in done.items()}}
    show(args, told, [*lines, f"written: {args.out}"])
    return 0


def extract(args: argparse.Namespace) -> int:
    """The LoRA of a rank between two models."""
    from gracetune.adapters import extracting
    from gracetune.adapters.files import interchange_form, write_adapter
    from gracetune.adapters.names import TABLES, form_named

    if args.family is None:
        raise AdapterError(f"extract needs --family: one of {', '.join(TABLES)}.")
    table = table_of(args)
    assert table is not None
    rank = positive("--rank", args.rank)
    demand_file(args.out)
    found = extracting.extract(args.base, args.tuned, table, rank, generator(), args.keep_rest)
    form = form_named(args.to) if args.to else interchange_form(found.adapter)
    about = about_of(args, found.adapter)
    path = write_adapter(args.out, found.adapter, form, about, dtype_of(args))
    lines = [f"{form.name}: {path} ({len(found.adapter.layers)} modules)", *cut_lines(found.cut)]
    if found.rest:
        lines.append(
            f"{len(found.rest)} other weights differ and are left out, {found.rest[0]} first: "
            "--keep-rest keeps them."
        )
    told = {
        "form": form.name,
        "file": str(path),
        "modules": len(found.adapter.layers),
        "lost": asdict(found.cut),
        "left_out": list(found.rest),
    }
    show(args, told, lines)
    return 0
