"""Every family trains on its kind of data, generates samples and exports a readable file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_examples import TABLES
from diffusers import DiffusionPipeline
from fakes.datasets import DATA, WRITE, write_images, write_masks
from fakes.miniatures import MINIATURES, shrink_references
from peft.tuners.tuners_utils import BaseTunerLayer
from PIL import Image

from gracetune.adapters.files.io import read_adapter
from gracetune.adapters.files.keys import get_format, get_table
from gracetune.cli.main import main
from gracetune.config.load import load_run_file
from gracetune.config.schema import ModelSection, ValidationSection
from gracetune.errors import ConfigError
from gracetune.models import pipeline_folder
from gracetune.models.family import load_family
from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.train.run import run_training

OUTPUT_FILES = {
    "image": ["000.png"],
    "video": ["000.mp4", "000.png"],
    "audio": ["000.wav", "000.png"],
}


@pytest.fixture(autouse=True)
def _small_references(monkeypatch):
    shrink_references(monkeypatch)


@pytest.fixture
def build_run(tmp_path, miniature):
    def make(small, family, kind, **sections):
        data = tmp_path / "data"
        WRITE[kind](data)
        settings = {
            "output_dir": str(tmp_path / "run"),
            "model": {"family": family, "path": str(miniature(small))} | sections.pop("model", {}),
            "adapter": {"rank": 2},
            "datasets": [
                {"dataset_type": kind, "instance_data_dir": str(data), "caption_dropout": 0.3}
                | DATA[kind]
                | sections.pop("dataset", {})
            ],
            "train": {"max_train_steps": 2, "batch_size": 2} | sections.pop("train", {}),
            "optimizer": {"lr": 0.01},
            "logging": {"tensorboard": False, "every": 1},
            "validation": {"every": 2, "prompts": ["a red ring"], "sample_steps": 2, "holdout": 0.3}
            | sections.pop("validation", {}),
            **sections,
        }
        path = tmp_path / "run.json"
        path.write_text(json.dumps(settings))
        return load_run_file(path).run

    return make


CASES = {name: (name, small.kind, {}) for name, small in MINIATURES.items() if small.family} | {
    "wan22 on pictures": ("wan22-t2v", "image", {}),
    "wan22 5B from a first frame": ("wan22-5b", "first frame", {"model": {"task": "image"}}),
    "flux with masks": ("flux", "masks", {}),
    "wan22 5B on videos with masks": ("wan22-5b", "video masks", {}),
}
"""Name of a case -> miniature, kind of data and sections of the run file."""
SECOND_VARIANTS = {"qwen-image-edit-2511", "sd35-large", "sdxl-v"}
"""Cases that share the code of another one; `make test-slow` trains them."""


def run_of(case, build_run, folder, **sections):
    """Return the run of a case, with the files that its kind of data needs."""
    model, kind, changes = CASES[case]
    sections = changes | sections
    if kind == "first frame":
        Image.new("RGB", (40, 30), (90, 90, 90)).save(folder / "start.png")
        sections |= {"validation": {"images": [str(folder / "start.png")]}}
    if kind == "edit":
        write_images(folder / "before")
        Image.new("RGB", (32, 32), (90, 90, 90)).save(folder / "start.png")
        references, start = str(folder / "before"), str(folder / "start.png")
        takes_several = model == "qwen-image-edit-2511"
        sections |= {
            "dataset": {"conditioning_data_dir": [references] * 2 if takes_several else references},
            "validation": {
                "images": [[start] * 2 if takes_several else start],
                "guidance": 1.0,
                "sample_steps": 1,
            },
        }
    if "masks" in kind:
        write_masks(folder / "masks")
        sections |= {"dataset": {"mask_data_dir": str(folder / "masks")}}
    return build_run(model, MINIATURES[model].family, media_of(kind), **sections)


def media_of(kind):
    """Return the kind of file: image, video or audio."""
    return {"edit": "image", "masks": "image", "audio": "audio", "image": "image"}.get(
        kind, "video"
    )


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SECOND_VARIANTS)) for c in CASES]
)
def test_a_family_trains_samples_and_exports(case, build_run, recorder, tmp_path):
    ended = run_training(run_of(case, build_run, tmp_path), sinks=[recorder])
    assert ended.status == "done"
    losses = [event.loss for event in recorder.events if type(event).__name__ == "StepDone"]
    assert len(losses) == 2
    assert all(np.isfinite(losses))
    (*_, validated) = [e for e in recorder.events if type(e).__name__ == "Validated"]
    assert all(np.isfinite(list(validated.losses.values())))
    model, kind, _ = CASES[case]
    folder = tmp_path / "run" / "validation" / "step-000002"
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted([*OUTPUT_FILES[media_of(kind)], "prompts.json", "samples.json"])
    files = sorted((tmp_path / "run" / "adapter").glob("*.safetensors"))
    assert len(files) == (2 if model in ("wan22-t2v", "wan22-i2v") else 1)
    for file in files:
        assert read_adapter(file, TABLES).layers


def outputs_of(folder):
    """Return the bytes of the adapter and of the validation samples of a run."""
    files = [*folder.glob("adapter/*.safetensors"), *folder.glob("validation/*/0*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize(("case", "count"), [("flux", 2), ("wan22-t2v", 1)])
def test_a_run_whose_texts_are_cached_reads_no_text_encoder(
    case, count, build_run, tmp_path, monkeypatch
):
    loaded, read = [], pipeline_folder.read_text_encoder

    def count_calls(folder, name, cls):
        loaded.append(name)
        return read(folder, name, cls)

    monkeypatch.setattr(pipeline_folder, "read_text_encoder", count_calls)
    prompts = ["a red ring", {"prompt": "a blue ring", "negative_prompt": "a green ring"}]
    run = run_of(
        *(case, build_run, tmp_path),
        validation={"prompts": prompts},
        cache_config={"persistent_cache": True},
    )
    run_training(run)
    assert len(loaded) == count
    cold, warm, path = Path(run.output_dir), tmp_path / "warm", tmp_path / "run.json"
    path.write_text(run.model_copy(update={"output_dir": str(warm)}).model_dump_json())
    assert main(["cache", "build", str(path)]) == 0
    assert len(loaded) == 2 * count
    assert main(["cache", "gc", str(path), "--yes"]) == 0
    run_training(load_run_file(path).run)
    assert len(loaded) == 2 * count
    assert outputs_of(warm) == outputs_of(cold) != {}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_of_a_family_is_sampled_like_its_validation(case, build_run, tmp_path):
    run_training(run_of(case, build_run, tmp_path))
    out = tmp_path / "samples"
    assert main(["sample", str(tmp_path / "run"), "--out", str(out)]) == 0
    expected = sorted((tmp_path / "run/validation/step-000002").glob("0*"))
    found = sorted(path for path in out.iterdir() if path.suffix != ".json")
    assert [path.suffix for path in found] == [path.suffix for path in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if ours.suffix == ".png":
            assert Image.open(ours).tobytes() == Image.open(theirs).tobytes()
        else:
            assert ours.read_bytes() == theirs.read_bytes()
            assert ours.with_suffix(".json").is_file(), "its settings"


@pytest.mark.slow
def test_both_experts_are_sampled_from_their_kept_adapters(build_run, tmp_path):
    train = {"max_train_steps": 4, "checkpoint_every": 2, "keep_checkpoints": 1}
    run_training(run_of("wan22 on pictures", build_run, tmp_path, train=train))
    kept = tmp_path / "run/adapters/step-000002"
    names = sorted(path.name for path in kept.iterdir())
    assert names == ["high_noise.safetensors", "low_noise.safetensors"]
    out = tmp_path / "samples"
    assert main(["sample", str(tmp_path / "run"), "--compare", "--out", str(out)]) == 0
    assert {path.name[:11] for path in out.iterdir()} == {
        "comparison.",
        "step-000002",
        "step-000004",
    }


def writes_fused_projections(family):
    """Return True if the default file of a LoRA has projections as they are in the original."""
    table = get_table(family, TABLES)
    formats = dict(table.default_formats)
    name = formats.get("lora", formats["other"])
    return bool(table.fused) and get_format(name).naming == "original"


@pytest.mark.parametrize(
    "model",
    [
        name
        for name, small in MINIATURES.items()
        # If a file has fused projections, which diffusers splits: test_adapter_tools.py.
        if small.family and small.kind == "image" and not writes_fused_projections(small.family)
    ],
)
def test_diffusers_loads_every_layer_of_an_exported_lora(model, build_run, miniature, tmp_path):
    train = {"max_train_steps": 1}
    ended = run_training(run_of(model, build_run, tmp_path, train=train, validation={"every": 0}))
    (file,) = Path(ended.outputs["result"]).glob("*.safetensors")
    with without_progress_bars():
        pipeline = DiffusionPipeline.from_pretrained(miniature(model), local_files_only=True)
        # diffusers 0.39 needs the name where there is no network
        pipeline.load_lora_weights(file.parent, weight_name=file.name)
    layers = read_adapter(file, TABLES).layers
    component = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
    loaded = {
        name: module
        for name, module in component.named_modules()
        if isinstance(module, BaseTunerLayer)
    }
    assert loaded.keys() == {path.module for path in layers}
    for path, layer in layers.items():
        (up,) = loaded[path.module].lora_B.values()
        assert torch.equal(up.weight, layer.tensors["up"]), path.module


@pytest.mark.parametrize("adapter", ["lokr", None])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=pytest.mark.slow if small.kind == "edit" else ())
        for name, small in MINIATURES.items()
        if small.family
    ],
)
def test_a_family_trains_a_lokr_and_all_weights(model, adapter, build_run, tmp_path):
    run = run_of(
        model,
        build_run,
        tmp_path,
        adapter=adapter and {"kind": adapter, "rank": 2, "factor": 2},
        train={"max_train_steps": 1, "gradient_checkpointing": True},
    )
    ended = run_training(run.model_copy(update={"validation": ValidationSection(every=0)}))
    assert ended.status == "done"
    result = Path(ended.outputs["result"])
    assert list(result.rglob("*.safetensors"))
    if adapter is None:
        exported = load_family(ModelSection(family=run.model.family, path=str(result)))
        before = load_family(ModelSection(family=run.model.family, path=run.model.path))
        assert exported.weights_hasher()() != before.weights_hasher()()


@pytest.mark.parametrize(
    ("case", "sections", "message"),
    [
        ("stable-audio", {"dataset": {"sample_rate": 44100}}, r"sample_rate is 44100, .* 16000"),
        ("stable-audio", {"dataset": {"channels": 1}}, r"channels is 1, .* works with 2"),
        ("stable-audio", {"dataset": {"seconds": 9.0}}, r"seconds is 9, .* at most 0\.32"),
        ("stable-audio", {"dataset": {"mask_data_dir": "x"}}, r"mask_data_dir is 'x', but masks"),
        ("stable-audio", {"validation": {"seconds": 5}}, r"validation\.seconds is 5, but"),
        ("wan22-t2v", {"validation": {"frames": 6}}, r"validation\.frames is 6"),
        ("wan22-t2v", {"validation": {"width": 40}}, r"but wan22 needs multiples of"),
        ("wan22-t2v", {"validation": {"images": ["x.png"]}}, r"uses prompts only"),
        ("wan22-i2v", {}, r"validation\.images has 0 files for 1 prompts"),
        (
            "wan22-i2v",
            {"validation": {"images": ["missing.png"]}},
            r"'missing\.png' cannot be read",
        ),
        ("qwen-image-edit", {}, r"conditioning_data_dir is missing, but this qwen_image edits"),
        ("flux", {"dataset": {"conditioning_data_dir": "x"}}, r"conditioning_data_dir is 'x', but"),
        (
            "flux-kontext",
            {"dataset": {"conditioning_data_dir": ["x", "y"]}},
            r"conditioning_data_dir has 2 folders, but this flux takes at most 1 for a sample",
        ),
        (
            "qwen-image-edit",
            {"dataset": {"conditioning_data_dir": ["x", "y"]}},
            r"has 2 folders, but this qwen_image takes at most 1 for a sample",
        ),
        (
            "qwen-image-edit",
            {"dataset": {"conditioning_data_dir": "x"}, "validation": {"images": [["a", "b"]]}},
            r"validation\.images\[0\] has 2 files, but this qwen_image takes one for a prompt",
        ),
        (
            "qwen-image-edit-2511",
            {
                "datasets": [
                    {"id": "a", "instance_data_dir": "a", "conditioning_data_dir": "x"},
                    {"id": "b", "instance_data_dir": "b", "conditioning_data_dir": ["x", "y"]},
                ]
            },
            r"datasets\[1\]\.conditioning_data_dir has 2 folders, but that of datasets\[0\] has 1",
        ),
        (
            "qwen-image-edit-2511",
            {"dataset": {"conditioning_data_dir": "x"}, "validation": {"images": [[]]}},
            r"validation\.images\[0\] has 0 files, but this qwen_image takes 1 to 8 for a prompt",
        ),
        ("flux", {"train": {"experts": "high"}}, r"train\.experts is 'high'"),
        ("flux", {"model": {"quantize": "int8"}, "adapter": None}, r"without an adapter"),
    ],
)
def test_settings_that_a_family_does_not_support_are_rejected_by_name(
    case, sections, message, build_run, tmp_path, monkeypatch
):
    model, kind, _ = CASES[case]
    monkeypatch.chdir(tmp_path)
    for name in "abxy":
        Path(name).mkdir()
    with pytest.raises(ConfigError, match=message):
        run_training(build_run(model, MINIATURES[model].family, media_of(kind), **sections))
