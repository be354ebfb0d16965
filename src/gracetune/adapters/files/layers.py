"""An adapter in our own words: layers by place, and what makes a layer whole.

Which tensors a layer needs is data; a layer that lacks one, has one too many, or whose ranks do
not meet is refused here, by the key that shows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from gracetune.adapters.files.keys import LayerPath
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable, Stage


Algorithm = Literal["lora", "loha", "lokr", "full"]
"""LoCon is LoRA on convolutions; DoRA is any of them with a magnitude (`dora`)."""

TENSOR_SETS: dict[Algorithm, tuple[frozenset[str], ...]] = {
    "lora": (frozenset({"down", "up"}), frozenset({"down", "up", "mid"})),
    "loha": (
        frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),
        frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"}),
    ),
    "lokr": tuple(
        frozenset(w1 + w2)
        for w1 in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
        for w2 in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"), ("lokr_w2_a", "lokr_w2_b", "lokr_t2"))
    ),
    "full": (frozenset({"diff"}), frozenset({"diff_b"}), frozenset({"diff", "diff_b"})),
}
"""The sets of tensors that make a layer; `diff_b` and `dora` may stand beside any."""
OPTIONAL_ROLES = frozenset({"diff_b", "dora"})
ALGORITHM_BY_ROLE: dict[str, Algorithm] = {
    role: algorithm for algorithm, sets in TENSOR_SETS.items() for roles in sets for role in roles
}


@dataclass(frozen=True)
class Layer:
    """The change of one module: tensors by role, and alpha where it is not the rank."""

    algorithm: Algorithm
    tensors: Mapping[str, Tensor]
    alpha: float | None = None

    @property
    def is_dora(self) -> bool:
        return "dora" in self.tensors

    def map(self, change: Callable[[Tensor], Tensor]) -> Layer:
        """The same layer with every tensor changed."""
        return replace(self, tensors={role: change(t) for role, t in self.tensors.items()})


@dataclass(frozen=True)
class Adapter:
    """A whole adapter, whatever file it came from."""

    table: KeyTable
    layers: Mapping[LayerPath, Layer]
    format: str | None = None
    """The form it was read from; None where the file mixed several."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    """What a reader should know: things decided, dropped or missing."""

    @property
    def stages(self) -> tuple[Stage | None, ...]:
        """The experts it has layers for, high first; (None,) where the keys do not say."""
        found = {place.stage for place in self.layers}
        order: tuple[Stage | None, ...] = (None, "high", "low")
        return tuple(stage for stage in order if stage in found)

    def select_stage(self, stage: Stage | None) -> Adapter:
        """The layers of one expert."""
        kept = {place: layer for place, layer in self.layers.items() if place.stage == stage}
        return replace(self, layers=kept)


def split_stages(adapter: Adapter) -> dict[Stage | None, Adapter]:
    """One adapter a stage, none of them with a stage in its places: what a stage file holds."""
    return {stage: with_stage(adapter.select_stage(stage), None) for stage in adapter.stages}


def join_stages(high: Adapter, low: Adapter) -> Adapter:
    """Two stage files as one adapter."""
    if high.table.family != low.table.family:
        raise AdapterError(
            f"the high stage is a {high.table.family} adapter and the low stage a "
            f"{low.table.family} one: give two files of one model.",
            kind="other-model",
        )
    for name, one in (("high", high), ("low", low)):
        if len(one.stages) > 1:
            raise AdapterError(
                f"the file given as the {name} stage already holds both stages. "
                "Convert it alone, or split it first.",
                kind="mixed-stages",
            )
    layers = {**with_stage(high, "high").layers, **with_stage(low, "low").layers}
    return replace(high, layers=layers, format=None, notices=(*high.notices, *low.notices))


def with_stage(adapter: Adapter, stage: Stage | None) -> Adapter:
    """The same layers, said to be of one stage."""
    layers = {LayerPath(stage, place.module): layer for place, layer in adapter.layers.items()}
    assert len(layers) == len(adapter.layers), "two stages cannot be laid over each other"
    return replace(adapter, layers=layers)


def make_layer(tensors: Mapping[str, Tensor], keys: Mapping[str, str]) -> Layer:
    """A layer from its tensors by role; `keys` has the file's name of each, for verdicts."""
    roles = frozenset(tensors) - {"alpha", "scalar"}
    first = keys[min(tensors)]
    algorithms = {ALGORITHM_BY_ROLE[role] for role in roles - OPTIONAL_ROLES} or {
        ALGORITHM_BY_ROLE["diff_b"]
    }
    if len(algorithms) > 1:
        raise AdapterError(
            f"{first!r}: its module has tensors of {' and '.join(sorted(algorithms))} at once. "
            "A module can carry one algorithm; remove the other's keys.",
            kind="two-algorithms",
            key=first,
        )
    algorithm = algorithms.pop()
    core = roles - OPTIONAL_ROLES if algorithm != "full" else roles
    if core not in TENSOR_SETS[algorithm]:
        wanted = min(TENSOR_SETS[algorithm], key=lambda one: len(one ^ core))
        lacks, extra = sorted(wanted - core), sorted(core - wanted)
        what = f"lacks {', '.join(lacks)}" if lacks else f"has {', '.join(extra)} without use"
        raise AdapterError(
            f"{first!r}: its module {what} for {algorithm}, so the file is incomplete. "
            "Save it again, or take a checkpoint that is whole.",
            kind="incomplete",
            key=first,
        )
    layer = Layer(algorithm, {role: tensors[role] for role in sorted(roles)})
    _check_ranks(layer, keys)
    layer = _with_alpha(layer, tensors, keys)
    return _with_magnitude(_with_scalar(layer, tensors))


def rank_of(layer: Layer) -> int | None:
    """The inner width; None where nothing is decomposed (full matrices, LoKr with both whole)."""
    for role, axis in RANK_AXES[layer.algorithm]:
        if role in layer.tensors:
            return layer.tensors[role].shape[axis]
    return None


def scale_of(layer: Layer) -> float:
    """alpha / rank; 1 without alpha, or without a rank to divide by."""
    rank = rank_of(layer)
    return 1.0 if layer.alpha is None or rank is None else layer.alpha / rank


RANK_AXES: dict[Algorithm, tuple[tuple[str, int], ...]] = {
    "lora": (("down", 0),),
    "loha": (("hada_w1_b", 0),),
    "lokr": (("lokr_w2_b", 0), ("lokr_w1_b", 0)),
    "full": (),
}
"""Where the rank can be read, in order; LoKr's two halves have the same."""
EQUAL_AXES: tuple[tuple[str, bool, str, int, str, int], ...] = (
    ("mid", False, "up", 1, "down", 0),
    ("mid", True, "up", 1, "mid", 0),
    ("mid", True, "mid", 1, "down", 0),
    ("hada_t1", False, "hada_w1_a", 1, "hada_w1_b", 0),
    ("hada_t1", True, "hada_w1_a", 0, "hada_t1", 0),
    ("hada_t1", True, "hada_t1", 1, "hada_w1_b", 0),
    ("hada_t2", False, "hada_w2_a", 1, "hada_w2_b", 0),
    ("hada_t2", True, "hada_w2_a", 0, "hada_t2", 0),
    ("hada_t2", True, "hada_t2", 1, "hada_w2_b", 0),
    ("", False, "lokr_w1_a", 1, "lokr_w1_b", 0),
    ("lokr_t2", False, "lokr_w2_a", 1, "lokr_w2_b", 0),
    ("lokr_t2", True, "lokr_w2_a", 0, "lokr_t2", 0),
    ("lokr_t2", True, "lokr_t2", 1, "lokr_w2_b", 0),
    ("hada_t1", False, "hada_w1_a", 0, "hada_w2_a", 0),
    ("hada_t1", True, "hada_w1_a", 1, "hada_w2_a", 1),
    ("", False, "hada_w1_b", 1, "hada_w2_b", 1),
)
"""Axes of one size: with a core tensor between the factors, or without."""
CONV_ROLES = ("down", "mid", "hada_t1", "hada_t2", "lokr_w2", "lokr_w2_b", "lokr_t2")
"""What may have a convolution's axes; other factors are matrices."""


def _check_ranks(layer: Layer, keys: Mapping[str, str]) -> None:
    tensors = layer.tensors
    for role, tensor in tensors.items():
        if not _has_axes(role, tensor.shape, frozenset(tensors)):
            raise AdapterError(
                f"{keys[role]!r} is {_size(tensor.shape)}, which no {role} of a {layer.algorithm} "
                "is. The file was badly put together; save it again.",
                kind="damaged",
                key=keys[role],
            )
    for core, between, left, i, right, j in EQUAL_AXES:
        if (core in tensors) != between or left not in tensors or right not in tensors:
            continue
        if tensors[left].shape[i] != tensors[right].shape[j]:
            raise _mismatch(tensors, keys, left, right)
    if "hada_t1" in tensors and tensors["hada_t1"].shape[2:] != tensors["hada_t2"].shape[2:]:
        raise _mismatch(tensors, keys, "hada_t1", "hada_t2")


def _mismatch(
    tensors: Mapping[str, Tensor], keys: Mapping[str, str], left: str, right: str
) -> AdapterError:
    sizes = [_size(tensors[role].shape) for role in (left, right)]
    return AdapterError(
        f"{keys[left]!r} is {sizes[0]} and {keys[right]!r} is {sizes[1]}: their ranks or sizes do "
        "not meet. They are of different adapters, or the file was badly put together.",
        kind="rank-mismatch",
        key=keys[left],
    )


def _has_axes(role: str, shape: tuple[int, ...], beside: frozenset[str]) -> bool:
    """Whether a tensor can be what its key says."""
    if role in ("diff", "dora"):
        return len(shape) >= 1
    if role == "diff_b":
        return len(shape) == 1
    if role == "up" or (role == "down" and "mid" in beside):
        return len(shape) >= 2 and math.prod(shape[2:]) == 1  # a convolution of one point
    if role == "lokr_w2_b" and "lokr_t2" in beside:
        return len(shape) == 2  # the kernel is the core's
    return len(shape) >= 2 if role in CONV_ROLES else len(shape) == 2


def _with_alpha(layer: Layer, tensors: Mapping[str, Tensor], keys: Mapping[str, str]) -> Layer:
    """Alpha, where it has a part: a LoKr of two whole matrices is never scaled."""
    if "alpha" not in tensors or rank_of(layer) is None:
        return layer
    alpha = float(tensors["alpha"].float().item())
    if not math.isfinite(alpha):
        raise AdapterError(
            f"{keys['alpha']!r} is {alpha}: it overflowed when the file was saved (float16 ends at "
            "65504), so the scale alpha / rank is lost. Save the adapter in bfloat16 or float32.",
            kind="not-finite",
            key=keys["alpha"],
        )
    return replace(layer, alpha=None if alpha == rank_of(layer) else alpha)


def _with_scalar(layer: Layer, tensors: Mapping[str, Tensor]) -> Layer:
    """LyCORIS' trained scalar, multiplied into the factor that its own writer would take."""
    if "scalar" not in tensors:
        return layer
    order = ("up", "hada_w1_a", "lokr_w1", "lokr_w1_a")
    role = next((role for role in order if role in layer.tensors), None)
    if role is None:
        return layer
    scaled = layer.tensors[role] * tensors["scalar"].to(layer.tensors[role].dtype)
    return replace(layer, tensors={**layer.tensors, role: scaled})


def _with_magnitude(layer: Layer) -> Layer:
    """peft's magnitudes are a plain vector, everyone else's have the weight's number of axes."""
    if not layer.is_dora or layer.tensors["dora"].dim() > 1:
        return layer
    order = ("mid", "hada_t1", "lokr_t2", "down", "hada_w1_a", "lokr_w2", "lokr_w2_b", "diff")
    axes = next(layer.tensors[role].dim() for role in order if role in layer.tensors)
    magnitude = layer.tensors["dora"].reshape(-1, *[1] * (axes - 1))
    return replace(layer, tensors={**layer.tensors, "dora": magnitude})


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


# ------------------------------------------------------------------------------------------
# The maths of adapters: what each of them adds to a weight.
#
# Written from the published equations and checked against the live forward of lycoris-lora and
# peft.
# Neither library's merge is used: LyCORIS multiplies LoHa and decomposed LoKr by alpha / rank twice
# there.


def delta(layer: Layer, shape: Sequence[int] | None = None) -> Tensor:
    """dW in float32, magnitudes (DoRA) aside; `shape` is the weight's, for flattened kernels."""
    t = {role: tensor.detach().float() for role, tensor in layer.tensors.items()}
    if layer.algorithm == "lora":
        change = _lora(t)
    elif layer.algorithm == "loha":
        change = _hada(t, "1") * _hada(t, "2")
    elif layer.algorithm == "lokr":
        change = _kron(_lokr_w1(t), _lokr_w2(t))
    else:
        change = t["diff"]
    change = change * scale_of(layer)
    return change if shape is None else change.reshape(tuple(shape))


def delta_bias(layer: Layer) -> Tensor | None:
    """The change of the bias, where there is one."""
    bias = layer.tensors.get("diff_b")
    return None if bias is None else bias.detach().float()


def delta_shape(layer: Layer) -> tuple[int, ...]:
    """The shape of dW without computing it; kernels that were flattened stay flattened."""
    t = layer.tensors
    if layer.algorithm == "lora":
        kernel = t["mid"].shape[2:] if "mid" in t else t["down"].shape[2:]
        return (t["up"].shape[0], t["down"].shape[1], *kernel)
    if layer.algorithm == "loha":
        if "hada_t1" in t:
            return (t["hada_w1_a"].shape[1], t["hada_w1_b"].shape[1], *t["hada_t1"].shape[2:])
        return (t["hada_w1_a"].shape[0], t["hada_w1_b"].shape[1])
    if layer.algorithm == "lokr":
        rows, columns = lokr_sizes(layer)
        core = t.get("lokr_t2", t.get("lokr_w2", t.get("lokr_w2_b")))
        assert core is not None, "a whole LoKr layer has a second half"
        kernel = core.shape[2:]
        return (rows[0] * rows[1], columns[0] * columns[1], *kernel)
    return tuple(t["diff"].shape) if "diff" in t else (t["diff_b"].shape[0], 0)


def merge_weight(layer: Layer, weight: Tensor, strength: float = 1.0) -> Tensor:
    """The weight with the adapter in it, in the weight's dtype; computed in float32.

    DoRA: W' = m (W + dW) / |W + dW|, the norm over the axis that `m` does not have. A strength
    other than one goes part of the way from W to W'.
    """
    base = weight.detach().float()
    if layer.algorithm == "full" and "diff" not in layer.tensors:
        return weight.detach().clone()
    changed = base + delta(layer, base.shape)
    if layer.is_dora:
        magnitude = layer.tensors["dora"].detach().float()
        changed = _decomposed(changed, magnitude, is_dora_per_row(layer))
    if strength != 1.0:
        changed = base + strength * (changed - base)
    return changed.to(weight.dtype)


def delta_norm(layer: Layer) -> float:
    """|dW|, by the factors where they allow it: a whole dW of a large model is large."""
    t = {role: tensor.detach().float() for role, tensor in layer.tensors.items()}
    scale = abs(scale_of(layer))
    if layer.algorithm == "lora" and "mid" not in t:
        up, down = t["up"].flatten(1), t["down"].flatten(1)
        # |BA|^2 = trace(A^T B^T B A) = sum of (B^T B) * (A A^T)
        inner = ((up.T @ up).double() * (down @ down.T).double()).sum()
        return scale * math.sqrt(max(float(inner), 0.0))
    if layer.algorithm == "lokr":
        return scale * float(_lokr_w1(t).norm()) * float(_lokr_w2(t).norm())
    if layer.algorithm == "full" and "diff" not in t:
        return 0.0
    return float(delta(layer).norm())


def out_features(layer: Layer) -> int:
    """Rows of dW."""
    return delta_shape(layer)[0]


def _lora(t: dict[str, Tensor]) -> Tensor:
    up, down = t["up"].flatten(1), t["down"]
    if "mid" in t:
        return torch.einsum("ij...,pi,jr->pr...", t["mid"], up, down.flatten(1))
    return (up @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


def _hada(t: dict[str, Tensor], half: str) -> Tensor:
    a, b = t[f"hada_w{half}_a"], t[f"hada_w{half}_b"]
    if f"hada_t{half}" in t:
        return torch.einsum("ij...,ip,jr->pr...", t[f"hada_t{half}"], a, b)
    return a @ b


def _lokr_w1(t: dict[str, Tensor]) -> Tensor:
    return t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]


def _lokr_w2(t: dict[str, Tensor]) -> Tensor:
    if "lokr_w2" in t:
        return t["lokr_w2"]
    a, b = t["lokr_w2_a"], t["lokr_w2_b"]
    if "lokr_t2" in t:
        return torch.einsum("ij...,ip,jr->pr...", t["lokr_t2"], a, b)
    return (a @ b.flatten(1)).reshape(a.shape[0], *b.shape[1:])


def _kron(w1: Tensor, w2: Tensor) -> Tensor:
    """kron over the first two axes; a kernel's axes are w2's own."""
    return torch.kron(w1.reshape(*w1.shape, *[1] * (w2.dim() - 2)), w2.contiguous())


def lokr_sizes(layer: Layer) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows (of w1, of w2) and columns (of w1, of w2)."""
    t = layer.tensors
    rows1, columns1 = (
        t["lokr_w1"].shape if "lokr_w1" in t else (t["lokr_w1_a"].shape[0], t["lokr_w1_b"].shape[1])
    )
    core = "lokr_t2" in t
    if "lokr_w2" in t:
        rows2, columns2 = t["lokr_w2"].shape[:2]
    else:
        rows2, columns2 = t["lokr_w2_a"].shape[1 if core else 0], t["lokr_w2_b"].shape[1]
    return (rows1, rows2), (columns1, columns2)


def is_dora_per_row(layer: Layer) -> bool:
    """Whether the magnitude has a value a row (peft's way, LyCORIS' default) or one a column."""
    magnitude = layer.tensors["dora"]
    return magnitude.dim() == 1 or magnitude.shape[0] == magnitude.numel()


def _decomposed(weight: Tensor, magnitude: Tensor, by_rows: bool) -> Tensor:
    ones = [1] * (weight.dim() - 1)
    if by_rows:
        lengths = weight.flatten(1).norm(dim=1).reshape(-1, *ones)
        magnitude = magnitude.reshape(-1, *ones)
    else:
        lengths = weight.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *ones[1:])
        magnitude = magnitude.reshape(1, -1, *ones[1:])
    factors: Tensor = magnitude / (lengths + torch.finfo(torch.float32).eps)
    return weight * factors
