"""Exported adapters: every kind has a file format; what has none is rejected before training."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from adapter_examples import TABLES, same, table_of_modules
from blake3 import blake3
from torch import nn

from gracetune.adapters.files.io import default_format, read_adapter, write_adapter
from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection
from gracetune.errors import ConfigError, InterruptedRunError
from gracetune.events.types import Notice, RunStarted, StepDone
from gracetune.train.checkpoint import manifest_checksum
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


def trained_adapter(checkpoint, tmp_path, name="ema.safetensors"):
    """Convert a file of a checkpoint to diffusers' format, or keep it; return the adapter."""
    adapter = read_adapter(checkpoint / name, TABLES)
    return read_adapter(
        write_adapter(tmp_path / name, adapter, default_format(adapter)), TABLES, adapter.table
    )


def test_what_a_killed_export_has_left_is_removed(tiny_run, tmp_path):
    left = tmp_path / "run" / ".adapter.77.staging"
    left.mkdir(parents=True)
    run_training(tiny_run(adapter={"rank": 2}, train={"max_train_steps": 1}))
    assert not left.exists()


def test_the_file_has_the_trigger_word_of_the_run(tiny_run):
    dataset = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)
    words = [{"id": "a", "trigger_word": "ohwx"}, {"id": "b", "trigger_word": "sks"}, {"id": "c"}]
    datasets, train = [dataset | one for one in words], {"max_train_steps": 1}
    run = tiny_run(adapter={"rank": 2}, datasets=datasets, train=train)
    header = exported(run_training(run)).metadata
    assert header["gracetune.trigger"] == header["modelspec.trigger_phrase"] == "ohwx, sks"


@pytest.mark.parametrize("kind", FORMATS)
def test_every_adapter_kind_can_be_exported(kind, tiny_run, recorder, tmp_path):
    overrides = {"context_embedder": {"alpha": 3}}
    run = tiny_run(
        adapter={"kind": kind, "rank": 2, "alpha": 8, "overrides": overrides},
        train={"max_train_steps": 1},
    )
    ended = run_training(run, sinks=[recorder])
    assert same(trained_adapter(Path(ended.outputs["checkpoint"]), tmp_path), exported(ended))
    adapter = exported(ended)
    assert adapter.format == FORMATS[kind]
    assert "context_embedder" in {place.module for place in adapter.layers}
    (text,) = [text for text in recorder.texts() if "is written as" in text]
    assert FORMATS[kind] in text
    assert f"{len(adapter.layers)} modules" in text


AVERAGED = {
    "ema": {"train": {"ema_decay": 0.9}},
    "schedule_free": {"train": {"ema_decay": 0.0}, "optimizer": {"name": "schedule_free"}},
    "none": {"train": {"ema_decay": 0.0}},
}


@pytest.mark.parametrize("average", AVERAGED)
def test_every_checkpoint_has_the_adapter_as_the_run_exports_it(average, tiny_run, tmp_path):
    sections = AVERAGED[average] | {"adapter": {"rank": 2, "alpha": 8}}
    outputs = {}
    for name, steps, every in (("first", 1, 0), ("plain", 3, 0), ("often", 3, 1)):
        train = {"max_train_steps": steps, "checkpoint_every": every, "keep_checkpoints": 2}
        run = tiny_run(
            output_dir=str(tmp_path / name), **sections | {"train": sections["train"] | train}
        )
        outputs[name] = run_training(run).outputs
    results = {name: files_in(Path(paths["result"])) for name, paths in outputs.items()}
    saved = tmp_path / "often" / "checkpoints"
    assert results["often"] == results["plain"], "saving must not change the run"
    assert files_in(saved / "step-000003" / "adapter") == results["often"]
    assert sorted(path.name for path in saved.iterdir()) == ["step-000002", "step-000003"]
    adapters = {path.name: files_in(path) for path in (tmp_path / "often/adapters").iterdir()}
    assert adapters.keys() == {"step-000001", "step-000002", "step-000003"}
    assert adapters["step-000001"] == results["first"], "of a deleted checkpoint"
    assert adapters["step-000003"] == results["often"]
    earlier = tmp_path / "first" / "checkpoints" / "step-000001"
    assert files_in(earlier / "adapter") == results["first"] != results["plain"]

    manifest = json.loads((saved / "step-000003" / "manifest.json").read_text())
    file = saved / "step-000003" / "adapter" / "pytorch_lora_weights.safetensors"
    digest = blake3(file.read_bytes()).hexdigest()
    assert manifest["exported"] == {"adapter/pytorch_lora_weights.safetensors": digest}
    weights = read_adapter(saved / "step-000003" / "weights.safetensors", TABLES)
    assert {layer.alpha for layer in weights.layers.values()} == {8.0}
    assert len(weights.notices) == (average != "none"), weights.notices


def files_in(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_an_interrupted_run_leaves_an_adapter(tiny_run, tmp_path):
    class Stop:
        def handle(self, event):
            if isinstance(event, StepDone):
                (tmp_path / "run/now/stop").touch()

        def close(self):
            pass

    with pytest.raises(InterruptedRunError):
        run_training(tiny_run(adapter={"rank": 2}), sinks=[Stop()])
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    adapter = read_adapter(checkpoint, TABLES)
    assert adapter.format == "diffusers"
    assert same(trained_adapter(checkpoint, tmp_path), adapter)


def test_a_finished_run_says_that_nothing_is_left_and_can_be_made_longer(
    tiny_run, recorder, tmp_path
):
    run = partial(tiny_run, adapter={"rank": 2})
    first = run_training(run(train={"max_train_steps": 1})).outputs
    assert first["result"] == str(tmp_path / "run/adapter")
    result = files_in(tmp_path / "run/adapter")

    again = run_training(run(train={"max_train_steps": 1}), sinks=[recorder])
    (text,) = [text for text in recorder.texts() if text.startswith("finished")]
    assert "all 1 steps are done" in text
    assert "--set train.max_train_steps=2" in text
    assert "changed" not in text
    assert recorder.of(RunStarted) == [], "the model was loaded"
    assert again.outputs["result"] == first["result"]
    assert files_in(tmp_path / "run/adapter") == result

    run_training(run(train={"max_train_steps": 2}))
    assert files_in(tmp_path / "run/adapter") != result
    (tmp_path / "run/adapter").rename(tmp_path / "newest")
    shutil.copytree(tmp_path / "run/adapters/step-000001", tmp_path / "run/adapter")
    run_training(run(train={"max_train_steps": 2}), sinks=[recorder])  # killed before its export
    assert files_in(tmp_path / "run/adapter") == files_in(tmp_path / "newest")


@pytest.mark.parametrize("adapter", [{"rank": 2}, None])
def test_files_that_a_user_has_put_next_to_the_result_are_kept(
    adapter, tiny_run, recorder, tmp_path
):
    run = partial(tiny_run, adapter=adapter)
    result = Path(run_training(run(train={"max_train_steps": 1})).outputs["result"])
    first = files_in(result)
    (result / "converted").mkdir()
    (result / "converted/lora.safetensors").write_bytes(b"mine")
    for steps in (2, 3):  # the result of step 2 has no other files: it is replaced
        run_training(run(train={"max_train_steps": steps}), sinks=[recorder])
    assert files_in(result).keys() == first.keys()
    kept = result.with_name(f"{result.name}-old")
    assert (kept / "converted/lora.safetensors").read_bytes() == b"mine"
    assert {name: (kept / name).read_bytes() for name in first} == first
    (text,) = [text for text in recorder.texts() if "the earlier result is kept" in text]
    assert "converted is not part of the result" in text
    assert not result.with_name(f"{result.name}-old2").exists()


def test_a_finished_run_names_the_settings_that_have_changed(tiny_run, recorder, tmp_path):
    run = partial(tiny_run, adapter={"rank": 2}, train={"max_train_steps": 1})
    run_training(run(validation={"prompts": ["a ring"], "sample_steps": 1}))
    changed = run(validation={"prompts": ["a star"], "sample_steps": 2})
    for number in range(2):
        run_training(changed, sinks=[recorder])
        text = [text for text in recorder.texts() if text.startswith("finished")][number]
        assert (
            "Settings that have changed since have no effect: validation.prompts, "
            f"validation.sample_steps. To train with them, delete {tmp_path / 'run'}, or set "
            "another output_dir."
        ) in text


def test_a_finished_run_with_a_schedule_that_ends_names_another_way(tiny_run, recorder):
    run = tiny_run(
        adapter={"rank": 2}, train={"max_train_steps": 1}, optimizer={"schedule": "cosine"}
    )
    run_training(run)
    run_training(run, sinks=[recorder])
    (text,) = [text for text in recorder.texts() if text.startswith("finished")]
    assert "set another output_dir" in text


def test_adapters_of_later_steps_are_set_aside_on_resume(tiny_run, tmp_path):
    train = {"max_train_steps": 2, "checkpoint_every": 1}
    run_training(tiny_run(adapter={"rank": 2}, train=train))
    before = files_in(tmp_path / "run/adapters/step-000002")
    run_training(tiny_run(adapter={"rank": 2}, train=train), resume_from="step-000001")
    (aside,) = (tmp_path / "run/adapters/set-aside").iterdir()
    assert aside.name.startswith("step-000002-")
    assert files_in(aside) == before == files_in(tmp_path / "run/adapters/step-000002")


def test_a_checkpoint_without_an_exported_adapter_is_resumed(tiny_run, tmp_path):
    run_training(tiny_run(adapter={"rank": 2}, train={"max_train_steps": 1}))
    old = tmp_path / "run" / "checkpoints" / "step-000001"
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["exported"]
    manifest["checksum"] = manifest_checksum(manifest)
    (old / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(old / "adapter")
    run_training(tiny_run(adapter={"rank": 2}, train={"max_train_steps": 2}))
    assert (old.with_name("step-000002") / "adapter").is_dir()


def test_a_checkpoint_of_a_whole_model_is_not_doubled(tiny_run, tmp_path):
    ended = run_training(tiny_run(train={"max_train_steps": 1}))
    checkpoint = Path(ended.outputs["checkpoint"])
    assert not (checkpoint / "adapter").exists()
    assert json.loads((checkpoint / "manifest.json").read_text())["exported"] == {}


@pytest.mark.parametrize("kind", ["loha", "lokr", "full"])
@pytest.mark.parametrize("small", MODELS)
def test_every_layer_of_a_family_can_be_adapted(
    small, kind, tiny_run, recorder, miniature, tmp_path
):
    run = tiny_run(
        model={"family": MODELS[small], "path": str(miniature(small))},
        adapter={"kind": kind, "rank": 2, "alpha": 8, "targets": EVERYTHING},
        train={"max_train_steps": 2},
    )
    (data,) = run.datasets
    run = run.model_copy(update={"datasets": (data.model_copy(update={"resolution": 32}),)})
    ended = run_training(run, sinks=[recorder])
    adapter = exported(ended)
    assert same(trained_adapter(Path(ended.outputs["checkpoint"]), tmp_path), adapter)
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
