"""Whether a file loads where people load it: in diffusers' pipeline, for real, and in ComfyUI.

diffusers loads nothing from some spellings and says so in a log line at most, so modules are
counted after the load, and what each of them computes is compared with the file's own dW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gracetune.adapters.comfy import PREFIXES, blocks_of, key_map, simulate
from gracetune.adapters.delta import delta
from gracetune.adapters.files import read_with_tensors, resolve, stage_of
from gracetune.adapters.layers import Adapter, Layer, at_stage, rank_of
from gracetune.adapters.names import KeyIndex, read_key
from gracetune.adapters.pipelines import (
    hollow,
    hollow_pipeline,
    quiet_diffusers,
    transformer_for,
)
from gracetune.adapters.rows import split_fused
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from gracetune.adapters.tables.types import NameTable, Stage

NAME = "checked"
TOLERANCE = 2e-2
"""How far a probe may be off: diffusers multiplies alpha in where the file's dtype rounds."""
LOADER_FAULTS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError)
"""What diffusers' loaders raise on files they do not understand."""
UNTRIED = "no pipeline is known for its family: it was read back and counted, not loaded"
ONLY_LORA = {
    "loha": "diffusers has no loader for LoHa. Merge it into the model, or convert it with "
    "--lora-rank.",
    "lokr": "diffusers' pipelines have no loader for LoKr here. Convert it --to diffusers for "
    "transformer.load_lora_adapter, merge it, or convert it with --lora-rank.",
    "full": "diffusers has no loader for full matrices. Merge it into the model, or convert it "
    "with --lora-rank.",
}


@dataclass(frozen=True)
class Target:
    """What one tool makes of the file."""

    name: str
    matched: int
    expected: int
    reason: str = ""
    """Why not all of it loads; or how it loads, where that is not the usual way."""
    first: str | None = None
    """The first key or module that is lost."""
    wrong: bool = False
    """Whether it loads and computes something else, which is worse than not at all."""

    @property
    def loads(self) -> bool:
        return self.matched == self.expected > 0


@dataclass(frozen=True)
class Check:
    """The verdict on a file."""

    path: Path
    family: str
    form: str | None
    stage: Stage | None
    algorithms: tuple[str, ...]
    ranks: tuple[int, ...]
    expected: int
    targets: tuple[Target, ...]
    demanded: tuple[str, ...]
    """Tools that must load it; none: any one will do, and none may load a part."""
    notices: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        if not self.targets:
            return not self.demanded
        if any(t.wrong for t in self.targets):
            return False
        if self.demanded:
            return all(t.loads for t in self.targets if t.name in self.demanded)
        whole_or_nothing = all(t.loads or t.matched == 0 for t in self.targets)
        return whole_or_nothing and any(t.loads for t in self.targets)

    def lines(self) -> list[str]:
        """The verdict, a line a tool."""
        if not self.targets:
            return [f"{self.expected} modules: {UNTRIED}"]
        return [
            f"{t.name}: {t.matched} of {t.expected} modules" + (f": {t.reason}" if t.reason else "")
            for t in self.targets
        ]

    def demand(self) -> Check:
        """Itself, if the file loads; otherwise the reason as an error."""
        if not self.ok:
            first = next((t.first for t in self.targets if not t.loads), None)
            raise AdapterError(
                f"{self.path} does not load as it should. " + " ".join(self.lines()),
                kind="partial",
                key=first,
            )
        return self


def check_file(
    path: Path,
    *,
    table: NameTable | None = None,
    stage: Stage | None = None,
    config: Mapping[str, object] | None = None,
    cls: type[nn.Module] | None = None,
    modules: Iterable[str] | None = None,
    demanded: tuple[str, ...] = (),
) -> Check:
    """Load the file where others would, and count.

    `modules` are those it must hold, by diffusers' names; `config` is the transformer's, and
    without it a model is made that fits the file. A family that we know no pipeline of is loaded
    into a transformer of the class `cls`. A file that cannot be read, or that holds both stages,
    is an error by itself.
    """
    path = resolve(path)
    adapter, tensors = read_with_tensors(path, table)
    _refuse_two_stages(adapter, list(tensors))
    told, _ = stage_of(adapter, path)
    adapter = at_stage(adapter, None)
    layers = {place.module: layer for place, layer in split_fused(adapter).layers.items()}
    wanted = list(layers) if modules is None else sorted(modules)
    missing = [module for module in wanted if module not in layers]
    if missing:
        raise AdapterError(
            f"{path} lacks {len(missing)} of {len(wanted)} modules, {missing[0]} first: it was cut "
            "short or written from part of the model.",
            kind="partial",
            key=missing[0],
        )
    if adapter.table.family in PREFIXES:
        targets: tuple[Target, ...] = (
            _in_diffusers(path, tensors, adapter, layers, stage or told, config),
            _in_comfyui(tensors, adapter, layers),
        )
    elif cls is not None and config is not None:
        targets = (_in_transformer(path, layers, cls, config),)
    else:
        targets = ()
    return Check(
        path=path,
        family=adapter.table.family,
        form=adapter.form,
        stage=stage or told,
        algorithms=tuple(sorted({layer.algorithm for layer in layers.values()})),
        ranks=tuple(sorted({rank for layer in layers.values() if (rank := rank_of(layer))})),
        expected=len(wanted),
        targets=targets,
        demanded=demanded,
        notices=adapter.notices,
    )


def _refuse_two_stages(adapter: Adapter, keys: list[str]) -> None:
    if len(adapter.stages) < 2:
        return
    index = KeyIndex(adapter.table)
    stages = [(key, found.place.stage) for key in keys if (found := read_key(key, index))]
    first = next(key for key, stage in stages if stage != stages[0][1])
    raise AdapterError(
        f"{first!r} is of another stage than {stages[0][0]!r}: the file mixes both, and no tool "
        "loads both from one file. Run `gracetune adapter convert FILE --to comfyui`, which writes "
        "one file a stage.",
        kind="mixed-stages",
        key=first,
    )


def _in_comfyui(
    tensors: Mapping[str, Tensor], adapter: Adapter, layers: Mapping[str, Layer]
) -> Target:
    """By its key map; a fused projection counts as the parts that it is of."""
    known = key_map(adapter.table, blocks_of(layers))
    result = simulate(list(tensors), known)
    expected = len(layers)
    if result.broken is not None:
        why = f"it stops at a key that is not there, {result.broken!r}"
        return Target("comfyui", 0, expected, why, result.broken)
    if result.left:
        kept = {place.module for place in adapter.layers} & result.modules
        lost = f"it ignores {len(result.left)} keys, {result.left[0]!r} first"
        hint = "" if kept else "; convert it --to comfyui"
        return Target("comfyui", len(kept), expected, lost + hint, result.left[0])
    reason = ""
    if any(layer.dora for layer in layers.values()):
        reason = "it divides magnitudes (DoRA) by the norms of the unchanged weight, peft does not"
    return Target("comfyui", expected, expected, reason)


def _in_diffusers(
    path: Path,
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    layers: Mapping[str, Layer],
    stage: Stage | None,
    config: Mapping[str, object] | None,
) -> Target:
    expected = len(layers)
    algorithms = {layer.algorithm for layer in layers.values()}
    by_model = algorithms == {"lokr"} and adapter.form == "diffusers"
    if "lora" not in algorithms and not by_model:
        return Target("diffusers", 0, expected, ONLY_LORA[min(algorithms)], next(iter(layers)))
    pipeline = hollow_pipeline(adapter.table.family, layers, config, _dtype(layers))
    model = transformer_for(pipeline, stage)
    try:
        with quiet_diffusers():
            if by_model:
                model.load_lora_adapter(  # type: ignore[operator]
                    dict(tensors), prefix="transformer", adapter_name=NAME
                )
            else:
                _load(pipeline, path, stage)
    except LOADER_FAULTS as error:
        text = str(error).replace("\n", " ")[:200]
        return Target(
            "diffusers", 0, expected, f"it refuses the file: {type(error).__name__} {text}"
        )
    return _counted(model, layers, by_model)


def _in_transformer(
    path: Path, layers: Mapping[str, Layer], cls: type[nn.Module], config: Mapping[str, object]
) -> Target:
    """By the loader that every diffusers transformer has."""
    model = hollow(cls, config, _dtype(layers))
    algorithms = {layer.algorithm for layer in layers.values()}
    if algorithms != {"lora"} and algorithms != {"lokr"}:
        return Target("diffusers", 0, len(layers), ONLY_LORA[max(algorithms - {"lora"})])
    try:
        with quiet_diffusers():
            model.load_lora_adapter(
                str(path.parent), weight_name=path.name, prefix="transformer", adapter_name=NAME
            )
    except LOADER_FAULTS as error:
        text = str(error).replace("\n", " ")[:200]
        why = f"it refuses the file: {type(error).__name__} {text}"
        return Target("diffusers", 0, len(layers), why)
    return _counted(model, layers, by_model=algorithms == {"lokr"})


def _load(pipeline: Any, path: Path, stage: Stage | None) -> None:
    extra = {"load_into_transformer_2": True} if stage == "low" else {}
    pipeline.load_lora_weights(
        str(path.parent), weight_name=path.name, adapter_name=NAME, local_files_only=True, **extra
    )


@torch.no_grad()
def _counted(model: nn.Module, layers: Mapping[str, Layer], by_model: bool) -> Target:
    """Modules that carry the adapter, and compute what the file says."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    expected = len(layers)
    carriers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and NAME in module.active_adapters
    }
    lost = [module for module in layers if module not in carriers]
    if lost:
        matched = expected - len(lost)
        why = "it loads nothing and does not say so" if not matched else f"{lost[0]} is lost"
        return Target("diffusers", matched, expected, why, lost[0])
    generator = torch.Generator().manual_seed(0)
    for name, layer in layers.items():
        if layer.dora:
            if NAME not in carriers[name].lora_magnitude_vector:
                why = "it drops the magnitudes (DoRA); convert the file --to diffusers"
                return Target("diffusers", 0, expected, why, name, wrong=True)
        elif not _agrees(carriers[name], layer, generator):
            why = f"{name} would compute another dW"
            return Target("diffusers", 0, expected, why, name, wrong=True)
    how = "by transformer.load_lora_adapter; pipelines refuse LoKr" if by_model else ""
    return Target("diffusers", expected, expected, how)


def _agrees(carrier: Any, layer: Layer, generator: torch.Generator) -> bool:
    """Whether a loaded module answers a random input as the file's dW does."""
    if layer.algorithm == "lokr":
        theirs = carrier.get_delta_weight(NAME).float()
        return _near(theirs, delta(layer, theirs.shape))
    down, up = carrier.lora_A[NAME].weight.float(), carrier.lora_B[NAME].weight.float()
    if down.shape != layer.tensors["down"].shape:
        return False
    probe = torch.randn(down[0].numel(), generator=generator)
    theirs = carrier.scaling[NAME] * (up.flatten(1) @ (down.flatten(1) @ probe))
    ours = layer.tensors["up"].float().flatten(1) @ (
        layer.tensors["down"].float().flatten(1) @ probe
    )
    scale = 1.0 if layer.alpha is None else layer.alpha / down.shape[0]
    return _near(theirs, ours * scale)


def _dtype(layers: Mapping[str, Layer]) -> torch.dtype:
    """The adapter's own, so that nobody converts it; float32 where it has several."""
    dtypes = {tensor.dtype for layer in layers.values() for tensor in layer.tensors.values()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _near(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm()) <= TOLERANCE * float(b.norm()) + 1e-12
