"""Represent an adapter independently of its file format, and compute the weight change dW.

An `Adapter` has one `Layer` for each module that it changes. `make_layer` builds a layer from the
tensors of a file and checks them: if a tensor is missing or superfluous, or if ranks do not match,
it raises an error that names the key. The algorithms are:

    LoRA   dW = up down                               (with a core tensor `mid` in between: Tucker)
    LoHa   dW = (w1_a w1_b) * (w2_a w2_b)             elementwise product
    LoKr   dW = kron(w1, w2)                          w1 and w2 are stored whole or as products a b
    full   dW = diff                                  the whole matrix, without a rank

Each dW is multiplied by alpha / rank if it has a rank. A DoRA is any of these with a magnitude m:
W' = m (W + dW) / |W + dW|.

The formulas are checked against the forward passes of peft and lycoris-lora. Their own merge
functions are not used, because LyCORIS multiplies LoHa and decomposed LoKr by alpha / rank twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch

from gracetune.adapters.files.keys import LayerPath
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable, Stage


Algorithm = Literal["lora", "loha", "lokr", "full"]
"""Formula of a layer's weight change dW. There is no entry for LoCon, which is `lora` on a
convolution, nor for DoRA, which is any of these with a magnitude."""

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
"""Names of the tensors in a complete adapter layer, by algorithm. A layer must match one of the
sets."""
OPTIONAL_ROLES = frozenset({"diff_b", "dora"})
"""Names of tensors that any adapter layer may have in addition: the bias's change and DoRA's
magnitude."""
ALGORITHM_BY_ROLE: dict[str, Algorithm] = {
    role: algorithm for algorithm, sets in TENSOR_SETS.items() for roles in sets for role in roles
}
RANK_AXES: dict[Algorithm, tuple[tuple[str, int], ...]] = {
    "lora": (("down", 0),),
    "loha": (("hada_w1_b", 0),),
    "lokr": (("lokr_w2_b", 0), ("lokr_w1_b", 0)),
    "full": (),
}
"""Tensor, and axis of the tensor, whose size is the rank of an adapter layer, by algorithm. The
first of the tensors that a layer has is used."""
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
"""Pairs of axes that must have the same size in an adapter layer: (core tensor, needs_core, first
tensor, its axis, second tensor, its axis). The core tensor is that of a Tucker decomposition. If
`needs_core` is True, the rule applies only to layers that have it, otherwise only to layers without
it."""
CONV_ROLES = ("down", "mid", "hada_t1", "hada_t2", "lokr_w2", "lokr_w2_b", "lokr_t2")
"""Names of the tensors in an adapter layer that may have the axes of a convolution kernel. All
other factors are matrices, except that `up` may be a 1x1 convolution."""


@dataclass(frozen=True)
class Layer:
    """The change that an adapter makes to one module: tensors by role (`down`, `up`) and alpha."""

    algorithm: Algorithm
    tensors: Mapping[str, Tensor]
    alpha: float | None = None
    """Numerator of the scale alpha / rank. None if alpha equals the rank, or if the layer has no
    rank."""

    @property
    def is_dora(self) -> bool:
        """True if the layer is a DoRA, which means that it has a magnitude tensor."""
        return "dora" in self.tensors


@dataclass(frozen=True)
class Adapter:
    """The layers of an adapter, with the names of the tensors and the header in its file."""

    table: KeyTable
    layers: Mapping[LayerPath, Layer]
    format: str | None = None
    """Name of the key format, a tool's naming of tensors, of the file; None if the file mixes
    several, or if there is no file."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Entries of the file's safetensors header."""
    notices: tuple[str, ...] = ()
    """Messages for the user about assumptions made and values ignored on reading the file."""

    @property
    def stages(self) -> tuple[Stage | None, ...]:
        """The transformers that the adapter changes, `high` noise before `low` noise.

        The value is (None,) if no layer names a transformer.
        """
        found = {path.stage for path in self.layers}
        order: tuple[Stage | None, ...] = (None, "high", "low")
        return tuple(stage for stage in order if stage in found)

    def select_stage(self, stage: Stage | None) -> Adapter:
        """Return a copy of the adapter with only the `high` or `low` noise transformer's layers."""
        kept = {path: layer for path, layer in self.layers.items() if path.stage == stage}
        return replace(self, layers=kept)


def join_stages(high: Adapter, low: Adapter) -> Adapter:
    """Join the adapters for the high-noise and the low-noise transformer of a model into one."""
    if high.table.family != low.table.family:
        raise AdapterError(
            f"the high expert's file is a {high.table.family} adapter and the low expert's a "
            f"{low.table.family} adapter. Give two files for the same model.",
            kind="other-model",
        )
    for name, adapter in (("high", high), ("low", low)):
        if len(adapter.stages) > 1:
            raise AdapterError(
                f"the file given for the {name} expert already holds both experts. "
                "Convert it alone, or split it first.",
                kind="mixed-stages",
            )
    layers = {**with_stage(high, "high").layers, **with_stage(low, "low").layers}
    return replace(high, layers=layers, format=None, notices=(*high.notices, *low.notices))


def with_stage(adapter: Adapter, stage: Stage | None) -> Adapter:
    """Return a copy of the adapter with all layers assigned to one transformer, or to none.

    The transformer is `high` or `low` (noise).
    """
    layers = {LayerPath(stage, path.module): layer for path, layer in adapter.layers.items()}
    assert len(layers) == len(adapter.layers), "an adapter with both experts would lose layers"
    return replace(adapter, layers=layers)


def rank_of(layer: Layer) -> int | None:
    """Return a layer's rank; None for a full matrix, or for a LoKr whose w1 and w2 are whole."""
    for role, axis in RANK_AXES[layer.algorithm]:
        if role in layer.tensors:
            return layer.tensors[role].shape[axis]
    return None


def scale_of(layer: Layer) -> float:
    """Return a layer's scale alpha / rank, which is 1 if it has no alpha or no rank."""
    rank = rank_of(layer)
    return 1.0 if layer.alpha is None or rank is None else layer.alpha / rank


def is_dora_per_row(layer: Layer) -> bool:
    """Return True if a DoRA has one magnitude for each row of the weight, as in peft.

    The result is False if it has one for each column.
    """
    magnitude = layer.tensors["dora"]
    return magnitude.dim() == 1 or magnitude.shape[0] == magnitude.numel()


def lokr_sizes(layer: Layer, kernel: Sequence[int] = ()) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return ((rows of w1, rows of w2), (columns of w1, columns of w2)) of a LoKr layer.

    The columns of a convolution are its input channels if its `kernel` is given. Otherwise they
    include the kernel where the file has it flattened.
    """
    t = layer.tensors
    rows1, columns1 = (
        t["lokr_w1"].shape if "lokr_w1" in t else (t["lokr_w1_a"].shape[0], t["lokr_w1_b"].shape[1])
    )
    core = "lokr_t2" in t
    if "lokr_w2" in t:
        rows2, columns2 = t["lokr_w2"].shape[:2]
    else:
        rows2, columns2 = t["lokr_w2_a"].shape[1 if core else 0], t["lokr_w2_b"].shape[1]
        if not core and t["lokr_w2_b"].dim() == 2:
            columns2 //= math.prod(kernel)
    return (rows1, rows2), (columns1, columns2)


# Building and checking layers


def make_layer(tensors: Mapping[str, Tensor], keys: Mapping[str, str]) -> Layer:
    """Build an adapter layer from its tensors by role (`down`, `up`, ...), and check them.

    `keys` has the key of each tensor in the file, for error messages.
    """
    roles = frozenset(tensors) - {"alpha", "scalar"}
    first = keys[min(tensors)]
    algorithms = {ALGORITHM_BY_ROLE[role] for role in roles - OPTIONAL_ROLES} or {"full"}
    if len(algorithms) > 1:
        raise AdapterError(
            f"the module of {first!r} has tensors of {' and '.join(sorted(algorithms))}, but a "
            "module can only have one algorithm. Remove the keys of the other.",
            kind="two-algorithms",
            key=first,
        )
    (algorithm,) = algorithms
    core = roles - OPTIONAL_ROLES if algorithm != "full" else roles
    if core not in TENSOR_SETS[algorithm]:
        nearest = min(TENSOR_SETS[algorithm], key=lambda roles: len(roles ^ core))
        missing, extra = sorted(nearest - core), sorted(core - nearest)
        fault = f"lacks {', '.join(missing)}" if missing else f"has unused {', '.join(extra)}"
        raise AdapterError(
            f"the module of {first!r} {fault} for {algorithm}, so the file is incomplete. "
            "Save it again, or use another checkpoint.",
            kind="incomplete",
            key=first,
        )
    layer = Layer(algorithm, {role: tensors[role] for role in sorted(roles)})
    _check_shapes(layer, keys)
    layer = _with_alpha(layer, tensors, keys)
    return _with_magnitude(_with_scalar(layer, tensors))


def _check_shapes(layer: Layer, keys: Mapping[str, str]) -> None:
    tensors = layer.tensors
    for role, tensor in tensors.items():
        if not _has_valid_axes(role, tensor.shape, frozenset(tensors)):
            raise AdapterError(
                f"{keys[role]!r} has the shape {_shape_text(tensor.shape)}, which {role} of a "
                f"{layer.algorithm} cannot have. The file is damaged. Save it again.",
                kind="damaged",
                key=keys[role],
            )
    for core, needs_core, left, left_axis, right, right_axis in EQUAL_AXES:
        if (core in tensors) != needs_core or left not in tensors or right not in tensors:
            continue
        if tensors[left].shape[left_axis] != tensors[right].shape[right_axis]:
            raise _mismatch(tensors, keys, left, right)
    if "hada_t1" in tensors and tensors["hada_t1"].shape[2:] != tensors["hada_t2"].shape[2:]:
        raise _mismatch(tensors, keys, "hada_t1", "hada_t2")


def _mismatch(
    tensors: Mapping[str, Tensor], keys: Mapping[str, str], left: str, right: str
) -> AdapterError:
    shapes = [_shape_text(tensors[role].shape) for role in (left, right)]
    return AdapterError(
        f"{keys[left]!r} is {shapes[0]} and {keys[right]!r} is {shapes[1]}: their ranks or sizes "
        "do not match. They belong to different adapters, or the file is damaged.",
        kind="rank-mismatch",
        key=keys[left],
    )


def _has_valid_axes(role: str, shape: tuple[int, ...], roles: frozenset[str]) -> bool:
    """Return True if an adapter tensor of this role, such as `down`, can have this number of axes.

    `roles` are the roles of all tensors in its layer.
    """
    if role in ("diff", "dora"):
        return len(shape) >= 1
    if role == "diff_b":
        return len(shape) == 1
    if role == "up" or (role == "down" and "mid" in roles):
        return len(shape) >= 2 and math.prod(shape[2:]) == 1  # a 1x1 convolution
    if role == "lokr_w2_b" and "lokr_t2" in roles:
        return len(shape) == 2  # the core tensor has the kernel
    return len(shape) >= 2 if role in CONV_ROLES else len(shape) == 2


def _with_alpha(layer: Layer, tensors: Mapping[str, Tensor], keys: Mapping[str, str]) -> Layer:
    """Return the layer with the alpha of its file. Without a rank, alpha is ignored."""
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
    """Multiply LyCORIS's trained `scalar` into one of the layer's factors.

    It is the factor that LyCORIS itself multiplies when it saves an adapter.
    """
    if "scalar" not in tensors:
        return layer
    order = ("up", "hada_w1_a", "lokr_w1", "lokr_w1_a")
    role = next((role for role in order if role in layer.tensors), None)
    if role is None:
        return layer
    scaled = layer.tensors[role] * tensors["scalar"].to(layer.tensors[role].dtype)
    return replace(layer, tensors={**layer.tensors, role: scaled})


def _with_magnitude(layer: Layer) -> Layer:
    """Return the layer with its DoRA magnitude reshaped to as many axes as the weight has.

    peft stores the magnitude as a vector.
    """
    if not layer.is_dora or layer.tensors["dora"].dim() > 1:
        return layer
    order = ("mid", "hada_t1", "lokr_t2", "down", "hada_w1_a", "lokr_w2", "lokr_w2_b", "diff")
    axes = next(layer.tensors[role].dim() for role in order if role in layer.tensors)
    magnitude = layer.tensors["dora"].reshape(-1, *[1] * (axes - 1))
    return replace(layer, tensors={**layer.tensors, "dora": magnitude})


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


# The weight change


def delta(layer: Layer, shape: Sequence[int] | None = None) -> Tensor:
    """Return a layer's weight change dW in float32. A DoRA's magnitude is ignored.

    `shape` is the shape of the model's weight. It is needed for convolutions, because some files
    hold their kernels flattened.
    """
    t = {role: tensor.detach().float() for role, tensor in layer.tensors.items()}
    if layer.algorithm == "lora":
        change = _lora_delta(t)
    elif layer.algorithm == "loha":
        change = _loha_factor(t, "1") * _loha_factor(t, "2")
    elif layer.algorithm == "lokr":
        change = _kron(_lokr_w1(t), _lokr_w2(t))
    else:
        change = t["diff"]
    change = change * scale_of(layer)
    return change if shape is None else change.reshape(tuple(shape))


def delta_bias(layer: Layer) -> Tensor | None:
    """Return a layer's change of the bias in float32, or None if it does not change the bias."""
    bias = layer.tensors.get("diff_b")
    return None if bias is None else bias.detach().float()


def delta_shape(layer: Layer) -> tuple[int, ...]:
    """Return the shape of a layer's weight change dW without computing dW.

    A convolution kernel that is flattened in the file has two axes. A change of the bias alone has
    the shape (length, 0).
    """
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
        assert core is not None, "a complete LoKr layer has w2"
        kernel = core.shape[2:]
        return (rows[0] * rows[1], columns[0] * columns[1], *kernel)
    return tuple(t["diff"].shape) if "diff" in t else (t["diff_b"].shape[0], 0)


def out_features(layer: Layer) -> int:
    """Return the number of output features: the rows of a layer's weight change dW."""
    return delta_shape(layer)[0]


def delta_norm(layer: Layer) -> float:
    """Return the Frobenius norm of a layer's weight change dW.

    For LoRA and LoKr it is computed from the factors, because dW may be large.
    """
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


def merge_weight(layer: Layer, weight: Tensor, strength: float = 1.0) -> Tensor:
    """Return a weight with a layer merged into it, in the weight's dtype.

    The computation is in float32. With W' the merged weight, a strength s gives W + s (W' - W). A
    DoRA normalizes W + dW by rows or by columns, whichever its magnitudes belong to.
    """
    base = weight.detach().float()
    if layer.algorithm == "full" and "diff" not in layer.tensors:
        return weight.detach().clone()
    changed = base + delta(layer, base.shape)
    if layer.is_dora:
        magnitude = layer.tensors["dora"].detach().float()
        changed = _with_norms(changed, magnitude, is_dora_per_row(layer))
    if strength != 1.0:
        changed = base + strength * (changed - base)
    return changed.to(weight.dtype)


def _lora_delta(t: dict[str, Tensor]) -> Tensor:
    up, down = t["up"].flatten(1), t["down"]
    if "mid" in t:
        return torch.einsum("ij...,pi,jr->pr...", t["mid"], up, down.flatten(1))
    return (up @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


def _loha_factor(t: dict[str, Tensor], number: str) -> Tensor:
    a, b = t[f"hada_w{number}_a"], t[f"hada_w{number}_b"]
    if f"hada_t{number}" in t:
        return torch.einsum("ij...,ip,jr->pr...", t[f"hada_t{number}"], a, b)
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
    """Return the Kronecker product over the first two axes. Only w2 may have kernel axes."""
    return torch.kron(w1.reshape(*w1.shape, *[1] * (w2.dim() - 2)), w2.contiguous())


def _with_norms(weight: Tensor, magnitude: Tensor, per_row: bool) -> Tensor:
    """Scale each row, or each column, of a weight so that its norm is the given magnitude."""
    ones = [1] * (weight.dim() - 1)
    if per_row:
        norms = weight.flatten(1).norm(dim=1).reshape(-1, *ones)
        magnitude = magnitude.reshape(-1, *ones)
    else:
        norms = weight.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *ones[1:])
        magnitude = magnitude.reshape(1, -1, *ones[1:])
    factors: Tensor = magnitude / (norms + torch.finfo(torch.float32).eps)
    return weight * factors
