"""Export the result of a run: the trained model, or adapter files that other tools load."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blake3 import blake3
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gracetune.atomic_files import atomic_folder, remove_stale_staging
from gracetune.errors import CheckpointError, ConfigError, redact_urls
from gracetune.events.types import Notice
from gracetune.models.family import key_tables, transformers_of
from gracetune.models.registry import FAMILIES
from gracetune.train.run_identity import identity_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor

    from gracetune.adapters.files.formats import KeyFormat
    from gracetune.adapters.files.io import AdapterMetadata
    from gracetune.adapters.files.keys import Stage
    from gracetune.adapters.files.layers import Adapter
    from gracetune.adapters.inject import ModuleSettings
    from gracetune.config.schema import RunFile
    from gracetune.events.dispatcher import Emit
    from gracetune.train.step import TrainState

    AdaptedModules = Mapping[str, Mapping[str, ModuleSettings]]
    """Expert (empty without experts) -> module name -> settings of the adapter on that module."""

TOOL_NAMES = {"diffusers": "diffusers", "comfyui": "ComfyUI"}
"""Name of a tool in a check of an adapter file -> its name for the user."""
STAGE_FILES = {"high": "high_noise.safetensors", "low": "low_noise.safetensors"}


def result_folder(run: RunFile) -> Path:
    """Return the folder that the result is written to: `model` or `adapter` in `output_dir`."""
    return Path(run.output_dir) / ("model" if run.adapter is None else "adapter")


def check_exportable(
    transformers: Mapping[str, nn.Module], modules: AdaptedModules, family: str
) -> None:
    """Raise before training if the adapter cannot be saved in the format of exported files."""
    # imported here, because peft takes seconds to import
    from gracetune.adapters.files.convert import find_unsupported
    from gracetune.adapters.files.io import default_format
    from gracetune.adapters.files.keys import get_table
    from gracetune.adapters.inject import adapter_from_model

    adapter = adapter_from_model(transformers, modules, get_table(family, key_tables()))
    form = default_format(adapter)
    unsupported = find_unsupported(adapter, form)
    if unsupported is not None:
        kind = "" if unsupported.is_nameless else ", or choose another adapter.kind"
        raise ConfigError(
            f"adapter.targets includes {unsupported.module} of {family}, but its adapter cannot be "
            f"saved as {form.name}: {unsupported.reason}. Remove it from adapter.targets{kind}."
        )


class ExportedResult(NamedTuple):
    """The folder of a run's result, and the tools that load it if it is an adapter."""

    path: Path
    loads_in: tuple[str, ...]


def export_result(
    state: TrainState, modules: AdaptedModules, base_weights: str, emit: Emit
) -> ExportedResult:
    """Write the model or the adapter, with averaged weights if there are any.

    The main rank writes; if ranks have parts of the weights, all must call this. Checks that
    diffusers and ComfyUI can load each adapter file, and logs the result.
    """
    path = result_folder(state.run)
    tools: tuple[str, ...] = ()
    is_main = state.ranks.is_main
    try:
        if is_main:
            remove_stale_staging(path.parent, path.name)
        if state.run.adapter is not None:
            collected = collect_adapter(state, modules, base_weights)
            if is_main:
                with atomic_folder(path) as staging:
                    tools = _check_files(state, modules, collected.write(staging), emit)
                    _keep_other_files(path, staging, emit)
        else:
            with state.averaged_weights(), whole_weights(state):
                if is_main:
                    with atomic_folder(path) as staging:
                        state.family.export(staging)
                        _keep_other_files(path, staging, emit)
    except OSError as error:
        raise CheckpointError(
            f"the result {path} cannot be written: {error}. The last checkpoint has the same "
            "weights: free some disk space and run the same command again to export them."
        ) from error
    return ExportedResult(path, tools)


def _keep_other_files(path: Path, staging: Path, emit: Emit) -> None:
    """Rename an earlier result that has files which the new one lacks, such as converted adapters.

    The new result would replace the folder with all that is in it.
    """
    written = {file.relative_to(staging) for file in staging.rglob("*")}
    others = [file for file in sorted(path.rglob("*")) if file.relative_to(path) not in written]
    if not others:
        return
    names = (f"{path.name}-old{number}" for number in ("", *range(2, 1000)))
    kept = next(each for name in names if not (each := path.with_name(name)).exists())
    path.rename(kept)
    text = f"{others[0]} is not part of the result; the earlier result is kept with it as {kept}"
    emit(Notice(text, level="warning"))


@contextmanager
def whole_weights(state: TrainState) -> Iterator[None]:
    """Let the model on the main rank have whole weights in host memory, to export them.

    If ranks have parts of the weights, they are gathered tensor by tensor, so no device has more
    than one whole tensor. Modules have their own class again, whose name is in the exported
    configuration. All ranks must call this.
    """
    transformer, replaced = state.family.transformer, []
    divided = [module for module in transformer.modules() if isinstance(module, FSDPModule)]
    classes = [type(module) for module in divided]
    try:
        for unit, cls in zip(divided, classes, strict=True):
            unit.__class__ = cls.__bases__[-1]  # `fully_shard` has made a class of both bases
        for name, parameter in list(transformer.named_parameters()):
            if isinstance(parameter, DTensor):
                whole = _gather(parameter, state.accelerator.device)
                if state.ranks.is_main:
                    owner, _, key = name.rpartition(".")
                    module = transformer.get_submodule(owner)
                    replaced.append((module, key, parameter))
                    module._parameters[key] = nn.Parameter(whole, requires_grad=False)
        yield
    finally:
        for module, key, parameter in replaced:
            module._parameters[key] = parameter
        for unit, cls in zip(divided, classes, strict=True):
            unit.__class__ = cls


def _gather(tensor: DTensor, device: torch.device) -> Tensor:
    """Return a whole tensor in host memory, of which each rank has a part."""
    part = tensor.to_local().detach().to(device)  # it may be in host memory
    return (
        DTensor.from_local(
            part, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
        .full_tensor()
        .cpu()
    )


def find_result(run: RunFile) -> ExportedResult:
    """Return the adapter that a finished run has exported, and the tools that load it."""
    from gracetune.adapters.files.io import loading_tools, read_adapter
    from gracetune.adapters.files.keys import get_table

    path, tables = result_folder(run), key_tables()
    table = get_table(run.model.family, tables)
    adapters = [read_adapter(file, tables, table) for file in path.glob("*.safetensors")]
    common = set.intersection(*(set(loading_tools(adapter)) for adapter in adapters))
    return ExportedResult(path, tuple(tool for tool in TOOL_NAMES.values() if tool in common))


@dataclass(frozen=True, slots=True)
class CollectedAdapter:
    """A copy of the adapter in host memory, which later steps do not change."""

    adapter: Adapter
    key_format: KeyFormat
    metadata: AdapterMetadata

    def write(self, folder: Path) -> dict[Stage | None, Path]:
        """Write a file for each trained transformer (Wan 2.2 has two); return their paths."""
        from gracetune.adapters.files.io import FILE_NAME, write_adapter
        from gracetune.adapters.files.layers import with_stage

        files = {}
        for stage in self.adapter.stages:
            part = with_stage(self.adapter.select_stage(stage), None)
            path = folder / (FILE_NAME if stage is None else STAGE_FILES[stage])
            metadata = replace(self.metadata, stage=stage)
            files[stage] = write_adapter(path, part, self.key_format, metadata)
        return files


def collect_adapter(
    state: TrainState, modules: AdaptedModules, base_weights: str
) -> CollectedAdapter:
    """Copy the adapter to host memory, with averaged weights if there are any.

    It will be written in the format that most tools load.
    """
    # imported here, because peft takes seconds to import
    from gracetune.adapters.files.io import default_format

    with state.averaged_weights():
        adapter = _trained_adapter(state, modules)
        layers = {
            path: replace(layer, tensors={role: _on_host(t) for role, t in layer.tensors.items()})
            for path, layer in adapter.layers.items()
        }
    return CollectedAdapter(
        replace(adapter, layers=layers), default_format(adapter), _metadata(state, base_weights)
    )


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def tools_for_adapter(state: TrainState, modules: AdaptedModules) -> tuple[str, ...]:
    """Return the names of the tools that load the adapter as it is exported; none without one.

    `export_result` tries to load the files, which takes seconds; this is known before.
    """
    if state.run.adapter is None:
        return ()
    from gracetune.adapters.files.io import loading_tools

    return loading_tools(_trained_adapter(state, modules))


def checkpoint_headers(
    state: TrainState, modules: AdaptedModules, base_weights: str
) -> dict[str, dict[str, str]]:
    """Return the headers of a checkpoint's `weights` and `ema`, by which they can be converted.

    They are empty for a run without an adapter.
    """
    if state.run.adapter is None:
        return {}
    from gracetune.adapters.files.checkpoint_weights import NOT_AVERAGED_KEY, checkpoint_header

    header = _metadata(state, base_weights).header()
    header |= checkpoint_header(_trained_adapter(state, modules))
    weights = header | {NOT_AVERAGED_KEY: "true"} if state.has_averages else header
    return {"weights": weights, "ema": header}


def _check_files(
    state: TrainState, modules: AdaptedModules, files: Mapping[Stage | None, Path], emit: Emit
) -> tuple[str, ...]:
    """Log which tools load the adapter files; return those that load all of them, and right."""
    from gracetune.adapters.files.check_loading import check_file
    from gracetune.adapters.files.io import default_format

    adapter, tables = _trained_adapter(state, modules), key_tables()
    form, table = default_format(adapter).name, adapter.table
    config = None
    if table.component == "unet":  # the widths of its stages cannot be derived from a file
        config = dict(cast("Any", state.family.transformer).config)
    tools = tuple(TOOL_NAMES)
    for stage, path in files.items():
        expected = modules[stage or ""]
        check = check_file(path, tables, table=table, stage=stage, modules=expected, config=config)
        text = f"{path.name} is written as {form}. " + " ".join(check.lines())
        emit(Notice(text, level="info" if check.ok else "warning"))
        loading = {result.name for result in check.results if result.loads and not result.is_wrong}
        tools = tuple(tool for tool in tools if tool in loading)
    return tuple(TOOL_NAMES[tool] for tool in tools)


def _trained_adapter(state: TrainState, modules: AdaptedModules) -> Adapter:
    from gracetune.adapters.files.keys import get_table
    from gracetune.adapters.inject import adapter_from_model

    table = get_table(state.family.name, key_tables())
    return adapter_from_model(transformers_of(state.family.transformer), modules, table)


def _metadata(state: TrainState, base_weights: str) -> AdapterMetadata:
    from gracetune.adapters.files.io import AdapterMetadata

    sections = state.run.datasets
    words = dict.fromkeys(one.trigger_word for one in sections if one.trigger_word)
    return AdapterMetadata(
        base_model=f"{_model_name(state)} {base_weights}",
        boundary=state.family.boundary,
        trigger=", ".join(words) or sections[0].instance_prompt or "",
        run_digest=run_digest(state),
    )


def _model_name(state: TrainState) -> str:
    """Return the last part of `model.path`, of the default model, or the name of the family."""
    info = FAMILIES.get(state.family.name)
    path = state.run.model.path or (info and info.default_model) or state.family.name
    return PurePath(redact_urls(path)).name


def run_digest(state: TrainState) -> str:
    """Hash the settings that affect the trained weights; paths are not among them."""
    settings = identity_settings(state.run, state.accelerator.mixed_precision)
    text = json.dumps(settings, sort_keys=True, default=str)
    return blake3(text.encode()).hexdigest(length=16)
