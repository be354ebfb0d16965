"""Factories of small adapters for several test files."""

from dataclasses import replace

import torch

from gracetune.adapters.files.keys import ANY_NAME_FORMATS, KeyTable, LayerPath
from gracetune.adapters.files.layers import Adapter, Layer
from gracetune.models.family import key_tables

HIDDEN, FFN, RANK = 24, 48, 4
TABLES = key_tables()
WAN, FLUX = TABLES["wan"], TABLES["flux"]


def table_of_modules(family, modules):
    """Return a table for a family whose modules have the same names in every tool."""
    rows = tuple((name, name) for name in modules)
    return KeyTable(family, rows=rows, default_formats=ANY_NAME_FORMATS)


def map_tensors(layer, change):
    return replace(layer, tensors={role: change(t) for role, t in layer.tensors.items()})


def shape_of(module, hidden=HIDDEN, ffn=FFN):
    """Return (rows, columns) of a module of a tiny Wan."""
    if module.endswith("net.0.proj"):
        return ffn, hidden
    if module.endswith("net.2"):
        return hidden, ffn
    return hidden, hidden


def wan_modules(num_blocks=2):
    return [one.format(n) for n in range(num_blocks) for one in WAN.block_linears]


def make_lora(out, into, generator, rank=RANK, alpha=None, dora=False, dtype=torch.float32):
    tensors = {
        "down": torch.randn(rank, into, generator=generator).to(dtype),
        "up": torch.randn(out, rank, generator=generator).to(dtype),
    }
    if dora:
        tensors["dora"] = torch.rand(out, 1, generator=generator).to(dtype) + 0.5
    return Layer("lora", tensors, alpha)


def make_loha(out, into, generator, rank=RANK, alpha=None):
    sizes = {"w1_a": (out, rank), "w1_b": (rank, into), "w2_a": (out, rank), "w2_b": (rank, into)}
    tensors = {f"hada_{k}": torch.randn(*s, generator=generator) for k, s in sizes.items()}
    return Layer("loha", tensors, alpha)


def make_lokr(out, into, generator, kind="w2", rank=2, alpha=None, factor=4):
    """`kind` says what is decomposed: nothing (`whole`), `w2` or `both`."""
    rows, columns = out // factor, into // factor
    tensors = {}
    if kind == "both":
        tensors["lokr_w1_a"] = torch.randn(factor, rank, generator=generator)
        tensors["lokr_w1_b"] = torch.randn(rank, factor, generator=generator)
    else:
        tensors["lokr_w1"] = torch.randn(factor, factor, generator=generator)
    if kind == "whole":
        tensors["lokr_w2"] = torch.randn(rows, columns, generator=generator)
    else:
        tensors["lokr_w2_a"] = torch.randn(rows, rank, generator=generator)
        tensors["lokr_w2_b"] = torch.randn(rank, columns, generator=generator)
    return Layer("lokr", tensors, None if kind == "whole" else alpha)


def make_full(out, into, generator):
    tensors = {
        "diff": torch.randn(out, into, generator=generator),
        "diff_b": torch.randn(out, generator=generator),
    }
    return Layer("full", tensors)


MAKERS = {
    "lora": make_lora,
    "loha": make_loha,
    "lokr": make_lokr,
    "lokr-whole": lambda out, into, g, alpha=None: make_lokr(out, into, g, "whole"),
    "lokr-both": lambda out, into, g, alpha=None: make_lokr(out, into, g, "both", alpha=alpha),
    "full": lambda out, into, g, alpha=None: make_full(out, into, g),
}


def make_wan(kind="lora", stages=(None,), num_blocks=2, alpha=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layers = {
        LayerPath(stage, module): MAKERS[kind](*shape_of(module), generator, alpha=alpha)
        for stage in stages
        for module in wan_modules(num_blocks)
    }
    return Adapter(WAN, layers)


def same(one, other):
    """Return True if two adapters have the same layers, bit for bit."""
    return sorted(one.layers) == sorted(other.layers) and all(
        same_layer(layer, other.layers[place]) for place, layer in one.layers.items()
    )


def same_layer(a, b):
    return (
        a.algorithm == b.algorithm
        and a.alpha == b.alpha
        and set(a.tensors) == set(b.tensors)
        and all(torch.equal(t, b.tensors[role]) for role, t in a.tensors.items())
    )
