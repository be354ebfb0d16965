"""Find the files of a run's model: a folder, a model on the hub, or a single-file checkpoint.

`locate_model` turns the `model` section of a run file into one whose `path` is a local pipeline
folder. It downloads what is missing, picks the family's default model if there is no `path`, and
takes a single-file checkpoint in `path` apart: the file becomes `transformer_file`, and the other
components come from the published model that the file belongs to.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from gracetune.errors import ModelError, ModelUnavailableError
from gracetune.events.types import Notice
from gracetune.models.checkpoint_header import (
    check_family,
    describe_storage,
    is_checkpoint_file,
    matching_models,
    read_header,
)
from gracetune.models.registry import FAMILIES, family_info

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.config.schema import ModelSection
    from gracetune.events.dispatcher import Emit
    from gracetune.events.types import Event
    from gracetune.models.checkpoint_header import CheckpointHeader
    from gracetune.models.registry import PublishedModel

FILE_SETTINGS = {"transformer_file": "transformer", "transformer_2_file": "transformer_2"}
ASSEMBLED_FOLDER = "gracetune-single-files"
"""Folder in HF_HOME for the VAE and text encoders of single files, in diffusers' format."""


def ignore_event(event: Event) -> None:
    """Take an event and do nothing."""


def locate_model(
    section: ModelSection, emit: Emit = ignore_event, *, is_first: bool = True
) -> ModelSection:
    """Return the section with the local folder of the model as `path`, without a `revision`.

    `emit` gets the progress of downloads, and notices about what is loaded. `is_first` is False
    for all ranks of a machine but one, which downloads. A section with a local folder is returned
    as it is, and so is one without `path` of a family without a default model.
    """
    info, is_ours = family_info(section.family), section.family in FAMILIES
    if info.default_model is None:
        if is_ours and section.path is not None and Path(section.path).is_file():
            raise ModelError(_other_family(section))
        if is_ours or section.path is None or is_checkpoint_file(section.path):
            return section
    for name in FILE_SETTINGS:
        if getattr(section, name) is not None:
            _describe_file(section, name, emit)
    if section.path is not None and is_checkpoint_file(section.path):
        return _locate_single_file(section, emit, is_first=is_first)
    if section.path is not None and Path(section.path).is_dir():
        if section.revision is not None:
            text = f"model.revision has no effect: model.path {section.path!r} is a local folder"
            emit(Notice(text, level="warning"))
        return section
    replaced = {part for name, part in FILE_SETTINGS.items() if getattr(section, name) is not None}
    if "transformer" in replaced:
        replaced.add("unet")
    name = section.path or str(info.default_model)
    folder = _fetch(section, name, replaced, emit, is_first=is_first)
    return section.model_copy(update={"path": str(folder), "revision": None})


def locate_configs(section: ModelSection) -> Path | None:
    """Return a folder with the configuration of the run's transformer; downloads some kilobytes.

    Returns None for a family that creates its model, and raises `ModelUnavailableError` if the
    configuration is neither here nor on the hub.
    """
    from gracetune.models.hub import HubModel, fetch_configs, is_hub_name

    if section.path is not None and Path(section.path).is_dir():
        return Path(section.path)
    name = model_name(section)
    if name is None:
        return None
    if family_info(section.family).default_model is None or not is_hub_name(name):
        raise _no_such_path(section)
    return fetch_configs(HubModel(name, section.revision, section.family, "model.path"))


def model_name(section: ModelSection) -> str | None:
    """Return the name on the hub of the model that a run uses, if `path` is not a folder.

    It is `path`, the family's default, or the model that a single-file checkpoint belongs to.
    Returns None for a family that creates its model.
    """
    info = family_info(section.family)
    if section.path is None or info.default_model is None or not is_checkpoint_file(section.path):
        return section.path or info.default_model
    header = read_header(section.path, "model.path")
    return _choose_model(section, header, check_family(header, section.family, "model.path")).name


def _fetch(
    section: ModelSection, name: str, replaced: set[str], emit: Emit, *, is_first: bool
) -> Path:
    from gracetune.models.hub import HubModel, fetch_pipeline, is_hub_name

    if not is_hub_name(name):
        raise _no_such_path(section)
    setting = "model.path"
    model = HubModel(name, section.revision, section.family, setting, frozenset(replaced))
    folder = fetch_pipeline(model, emit, is_first=is_first)
    why = f", the default of {section.family}" if section.path is None else ""
    emit(Notice(f"model: {name}{why} (commit {folder.name[:12]})"))
    return folder


def _no_such_path(section: ModelSection) -> ModelError:
    names = [model.name for model in family_info(section.family).models]
    close = difflib.get_close_matches(str(section.path), names, n=1)
    hint = f"; did you mean {close[0]}?" if close else f", such as {names[0]}." if names else "."
    return ModelUnavailableError(
        f"model.path is {section.path!r}, but there is no such folder or file. Correct the path, "
        f"or give the name of a model on the Hugging Face hub{hint}"
    )


def _other_family(section: ModelSection) -> str:
    found = matching_models(read_header(str(section.path), "model.path"))
    fix = f"Set model.family: {next(iter(found))}" if found else "Set model.family to the model's"
    return (
        f"model.path is {section.path!r}, a single file, but the family {section.family} reads "
        f"folders that it has written. {fix}."
    )


# Single files


def _describe_file(section: ModelSection, name: str, emit: Emit) -> None:
    """Check the header of a file in `transformer_file`, and say how it is loaded."""
    setting = f"model.{name}"
    header = read_header(getattr(section, name), setting)
    if section.family in FAMILIES:
        check_family(header, section.family, setting)
    _say_storage(section, header, emit)
    parts = [*header.parts(section.family), *header.ignored_parts(section.family)]
    if parts:
        emit(Notice(f"model: only the transformer of {header.path.name} is used ({setting})"))


def _say_storage(section: ModelSection, header: CheckpointHeader, emit: Emit) -> None:
    dtype = "bfloat16" if section.dtype == "auto" else section.dtype
    if text := describe_storage(header, dtype):
        emit(Notice(f"model: {text}"))


def _locate_single_file(section: ModelSection, emit: Emit, *, is_first: bool) -> ModelSection:
    """Return the section with the file as `transformer_file`, and a folder with the other parts."""
    file = str(section.path)
    if section.transformer_file is not None:
        raise ModelError(
            f"model.path is {file!r} and model.transformer_file is {section.transformer_file!r}: "
            "both are files with a transformer. Remove one, or set model.path to a pipeline."
        )
    header = read_header(file, "model.path")
    models = check_family(header, section.family, "model.path")
    chosen = _choose_model(section, header, models)
    parts = header.parts(section.family)
    replaced = {"transformer", "unet", *parts}
    if section.transformer_2_file is not None:
        replaced.add("transformer_2")
    _say_storage(section, header, emit)
    _say_choice(section, header, models, emit)
    folder = _fetch(section, chosen.name, replaced, emit, is_first=is_first)
    if parts or header.prediction:
        folder = _assemble(section, header, folder, emit)
    return section.model_copy(
        update={"path": str(folder), "transformer_file": file, "revision": None}
    )


def _choose_model(
    section: ModelSection, header: CheckpointHeader, models: Sequence[PublishedModel]
) -> PublishedModel:
    """Return the published model that has the other components of a file."""
    named = f"model.path is {str(header.path)!r}"
    both = "Set model.path to the pipeline with its other components"
    if all(model.marks is None for model in FAMILIES[section.family].models):
        raise ModelError(
            f"{named}, but diffusers reads no single file of {section.family}. Set model.path to "
            f"{FAMILIES[section.family].default_model}, or to a folder that diffusers has saved."
        )
    if not models:
        names = ", ".join(model.name for model in FAMILIES[section.family].models)
        raise ModelError(
            f"{named}, which does not look like any of {names}. {both}, and model.transformer_file "
            "to the file."
        )
    pairs = [model for model in models if model.experts == 2]
    if not pairs:
        return models[0]
    if section.transformer_2_file is not None:
        return pairs[0]
    names = " or ".join(model.name for model in models)
    raise ModelError(
        f"{named}, which has the weights of one transformer; {pairs[0].name} has two. {both} "
        f"({names}), model.transformer_file to the transformer for high noise (or the only one), "
        "and model.transformer_2_file to the one for low noise."
    )


def _say_choice(
    section: ModelSection,
    header: CheckpointHeader,
    models: Sequence[PublishedModel],
    emit: Emit,
) -> None:
    used = [*header.parts(section.family)]
    own = f", {', '.join(used)}" if used else ""
    text = f"model: {header.path.name} gives the transformer{own}"
    ignored = header.ignored_parts(section.family)
    if ignored:
        text += f"; its tensors {', '.join(f'{part}*' for part in ignored)} are not used"
    others = [model.name for model in models[1:]]
    if others:
        text += (
            f". If it was made from {' or '.join(others)}, set model.path to that name and "
            "model.transformer_file to the file"
        )
    emit(Notice(text))


def _assemble(section: ModelSection, header: CheckpointHeader, base: Path, emit: Emit) -> Path:
    """Return a folder with the VAE and text encoders of a file, written once for its contents."""
    from huggingface_hub import constants

    from gracetune.models.single_file import digest_of_file, write_components

    root = Path(constants.HF_HOME).expanduser() / ASSEMBLED_FOLDER
    digest = digest_of_file(header.path, section.family, base.name)
    folder = root / f"{header.path.stem}-{digest}"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{digest}.lock"):
        if not folder.is_dir():
            write_components(header, section.family, base, folder)
            parts = ", ".join(header.parts(section.family)) or "scheduler"
            emit(Notice(f"model: {parts} of {header.path.name} are kept in {folder}"))
    return folder
