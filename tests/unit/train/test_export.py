"""Exported adapters: every kind has a file format; what has none is rejected before training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_examples import TABLES, table_of_modules
from torch import nn

from gracetune.adapters.files.io import read_adapter
from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection
from gracetune.errors import ConfigError
from gracetune.events.types import Notice, RunStarted, StepDone
from gracetune.train.export import check_exportable
from gracetune.train.run import run_training

EVERYTHING = ["re:.*"]
FORMATS = {
    "lora": "diffusers",
    "dora": "diffusers",
    "locon": "diffusers",
    "loha": "diffusers",
    "lokr": "diffusers",
    "full": "simpletuner-comfyui",
}
MODELS = {"flux": "flux", "qwen-image": "qwen_image", "wan22-5b": "wan22"}


def exported(ended):
    (file,) = Path(ended.outputs["result"]).glob("*.safetensors")
    return read_adapter(file, TABLES)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_adapter_kind_can_be_exported(kind, tiny_run, recorder):
    run = tiny_run(adapter={"kind": kind, "rank": 2}, train={"max_train_steps": 1})
    ended = run_training(run, sinks=[recorder])
    adapter = exported(ended)
    assert adapter.format == FORMATS[kind]
    assert "context_embedder" in {place.module for place in adapter.layers}
    (text,) = [text for text in recorder.texts() if "is written as" in text]
    assert FORMATS[kind] in text
    assert f"{len(adapter.layers)} modules" in text


@pytest.mark.parametrize("kind", ["loha", "lokr", "full"])
@pytest.mark.parametrize("small", MODELS)
def test_every_layer_of_a_family_can_be_adapted(small, kind, tiny_run, recorder, miniature):
    run = tiny_run(
        model={"family": MODELS[small], "path": str(miniature(small))},
        adapter={"kind": kind, "rank": 2, "targets": EVERYTHING},
        train={"max_train_steps": 2},
    )
    (data,) = run.datasets
    run = run.model_copy(update={"datasets": (data.model_copy(update={"resolution": 32}),)})
    adapter = exported(run_training(run, sinks=[recorder]))
    assert len(recorder.of(StepDone)) == 2
    assert all(
        bool(torch.isfinite(tensor).all())
        for layer in adapter.layers.values()
        for tensor in layer.tensors.values()
    )
    assert {place.module for place in adapter.layers} & {"x_embedder", "img_in", "patch_embedding"}


def test_an_export_is_checked_with_the_sizes_of_its_own_model(tiny_run, recorder, miniature):
    """The miniature is smaller than the published model, also in its last layer."""
    run = tiny_run(
        model={"family": "qwen_image", "path": str(miniature("qwen-image"))},
        adapter={"rank": 2, "targets": EVERYTHING},
        train={"max_train_steps": 1},
    )
    (data,) = run.datasets
    run_training(
        run.model_copy(update={"datasets": (data.model_copy(update={"resolution": 32}),)}),
        sinks=[recorder],
    )
    (notice,) = [event for event in recorder.of(Notice) if "is written as" in event.text]
    assert "proj_out" not in notice.text
    assert notice.level == "info", notice.text


def test_a_target_without_a_file_name_is_rejected_before_the_first_step(
    tiny_run, recorder, monkeypatch
):
    table = table_of_modules("tiny", ("context_embedder",))
    monkeypatch.setattr("gracetune.train.export.key_tables", lambda: {"tiny": table})
    with pytest.raises(ConfigError, match=r"targets includes transformer_blocks\.0\.") as caught:
        run_training(tiny_run(adapter={"rank": 2}), sinks=[recorder])
    assert "Remove it from adapter.targets." in str(caught.value)
    assert "--" not in str(caught.value)
    assert not recorder.of(RunStarted)


def test_a_kind_that_the_format_does_not_support_is_rejected(monkeypatch):
    table = replace(table_of_modules("tiny", ("x",)), default_formats=(("other", "diffusers"),))
    monkeypatch.setattr("gracetune.train.export.key_tables", lambda: {"tiny": table})
    model = nn.ModuleDict({"x": nn.Linear(4, 4)})
    modules = add_adapter({"": model}, AdapterSection(kind="full"), ("x",), seed=0)
    with pytest.raises(ConfigError, match=r"a full matrix.*or choose another adapter\.kind"):
        check_exportable({"": model}, modules, "tiny")
