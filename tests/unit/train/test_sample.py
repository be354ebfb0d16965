"""`gracetune sample`: equal to validation, for every source of weights; clear errors."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_examples import TABLES
from PIL import Image

from gracetune.adapters.files.io import FILE_NAME, PEFT_FILE, read_adapter, write_adapter
from gracetune.cli.main import main
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.types import Notice
from gracetune.models.tiny import Tiny
from gracetune.train import validate
from gracetune.train.accelerator import start_accelerator
from gracetune.train.checkpoint import ADAPTERS_FOLDER, CHECKPOINT_FOLDER
from gracetune.train.prompts import dataset_defaults, plan_prompts
from gracetune.train.run import run_training
from gracetune.train.sample import Sampler, num_streamed
from gracetune.train.sample_targets import FIXED_NAMES, STEP_FOLDERS, find_targets
from gracetune.train.validate import comparison_sheet

PROMPTS = ["a red circle", {"prompt": "a blue box", "seed": 9, "width": 16}]
VALIDATION = {"every": 1, "sample_steps": 2, "prompts": PROMPTS, "negative_prompt": "a star"}
TRAIN = {"max_train_steps": 3, "checkpoint_every": 1, "keep_checkpoints": 1}


def train_recorded(run):
    """Train; return the samples of each validation, by step."""
    found, generate = [], validate.generate_samples

    def recorded(*given):
        found.append([sample.data for sample in generate(*given).values()])
        return generate(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate, "generate_samples", recorded)
        run_training(run)
    return dict(enumerate(found))


@pytest.fixture(scope="module")
def trained(tiny_run_in, tmp_path_factory):
    """Return a run of a LoRA with averaged weights, and the samples of its validations."""
    run = tiny_run_in(
        tmp_path_factory.mktemp("lora"),
        adapter={"rank": 4, "alpha": 3},
        optimizer={"lr": 0.05},
        train=TRAIN,
        validation=VALIDATION,
    )
    return Path(run.output_dir), train_recorded(run)


def planned_for(folder, nbytes):
    """Return the section `plan` of a run with limited device memory."""
    run = find_targets([str(folder)], None, None, compare=False).run
    return type(run).model_validate({"plan": {"device_memory": nbytes, "compile": "never"}}).plan


def sample(*targets, model=None, at=None, compare=False, emit=lambda _: None, **settings):
    """Return the samples of each variant: tensors by the variant's name."""
    found = find_targets([str(target) for target in targets], model, at, compare=compare)
    run = found.run.model_copy(update=settings)
    with Sampler(run, start_accelerator(run), emit) as sampler:
        section = run.validation
        planned = plan_prompts(
            section, section.prompts, dataset_defaults(run.datasets[0]), sampler.family
        )
        requests = sampler.encode(planned)
        return {
            variant.name: [each.data for each in sampler.generate(variant, requests)]
            for variant in found.variants
        }


def assert_equal(actual, expected):
    assert len(actual) == len(expected) == 2
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def assert_close(actual, expected, tolerance=1e-4):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


def test_samples_equal_those_of_validation_bit_for_bit(trained):
    folder, validated = trained
    assert not torch.equal(validated[0][0], validated[3][0]), "training had no effect"
    (newest,) = sample(folder).values()
    assert_equal(newest, validated[3])
    found = sample(folder, at="3,0")
    assert list(found) == ["step-000000", "step-000003"]
    assert_equal(found["step-000000"], validated[0])
    assert_equal(found["step-000003"], validated[3])


def test_steps_whose_checkpoints_are_deleted_are_sampled_from_their_adapters(trained):
    folder, validated = trained
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000003"]
    found = sample(folder, compare=True)
    assert list(found) == ["step-000001", "step-000002", "step-000003"]
    for step in (1, 2, 3):
        assert_close(found[f"step-{step:06d}"], validated[step])
    assert_close(*sample(folder / "adapters" / "step-000002").values(), [*validated[2]])


def test_a_comparison_has_the_steps_that_are_named(trained):
    chosen = find_targets([str(trained[0])], None, "0,2", compare=True).variants
    assert [variant.name for variant in chosen] == ["step-000000", "step-000002"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--at", "3"], "step 3 with. --at 0,3 compares it with the model before training."),
        (["--at", "0"], "Name several adapters, or several steps of a run with --at."),
    ],
)
def test_a_comparison_of_one_step_says_why_there_is_no_sheet(trained, tmp_path, capsys, words, fix):
    shown = ["sample", str(trained[0]), "--compare", "--out", str(tmp_path), *words]
    assert main(shown) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("comparison no sheet is written")
    assert last.endswith(fix)
    assert not (tmp_path / "comparison.png").exists()


def test_the_trigger_word_of_the_run_fills_prompts(trained, tmp_path, capsys):
    folder, _ = trained
    settings = json.loads((folder / "run.json").read_text())
    settings["datasets"][0]["trigger_word"] = "ohwx"
    (tmp_path / "run.json").write_text(json.dumps(settings))
    prompts = [{"prompt": "[trigger] box", "negative_prompt": "no [trigger]", "seed": 5}]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    words = ["--prompt", "a [trigger] cat", "--prompts", str(tmp_path / "prompts.json")]
    out = tmp_path / "out"
    assert main(["sample", str(tmp_path / "run.json"), *words, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "step-000003_00_a-ohwx-cat_seed0.png",
        "step-000003_01_ohwx-box_seed5.png",
    ]
    capsys.readouterr()
    assert main(["sample", str(folder), *words, "--out", str(out)]) == 2
    assert "--prompt is 'a [trigger] cat', which contains [trigger]" in capsys.readouterr().err


def test_samples_of_an_adapter_in_a_run_go_to_the_run(trained, monkeypatch):
    folder, _ = trained
    monkeypatch.chdir(folder.parent)
    step = f"{folder.name}/adapters/step-000002"
    (file,) = (folder / "adapters/step-000002").iterdir()
    for texts in ([f"{step}/{file.name}"], [f"{step}:0.5"], [str(file), f"{step}/{file.name}"]):
        for model in (None, "tiny"):
            found = find_targets(texts, model, None, compare=False).folder
            assert found.resolve() == folder / "samples"
    assert find_targets([f"{step}/{file.name}"], None, None, compare=False).folder == Path(
        folder.name, "samples"
    ), "a relative path stays one"


def test_the_warning_of_a_norm_in_another_precision_is_not_shown(trained, monkeypatch):
    folder, validated = trained
    original = Tiny.sample

    def warning(family, request):
        warnings.warn("Mismatch dtype between input and weight: input dtype = ...", stacklevel=1)
        return original(family, request)

    monkeypatch.setattr(Tiny, "sample", warning)
    (found,) = sample(folder).values()
    assert_equal(found, validated[3])


def test_a_sampled_file_has_the_pixels_of_validation_and_its_settings(trained, tmp_path, capsys):
    folder, _ = trained
    words = ["sample", str(folder), "--out", str(tmp_path), "--at", "2,3"]
    assert main(words) == 0
    assert main([*words[:-1], "3"]) == 0, "a second time, next to the first"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "comparison.png",
        "step-000002_00_a-red-circle_seed0.png",
        "step-000002_01_a-blue-box_seed9.png",
        "step-000003_00_a-red-circle_seed0-2.png",
        "step-000003_00_a-red-circle_seed0.png",
        "step-000003_01_a-blue-box_seed9-2.png",
        "step-000003_01_a-blue-box_seed9.png",
    ]
    out = capsys.readouterr().out
    assert all(str(tmp_path / name) in out for name in names)
    for number, name in ((0, "a-red-circle_seed0"), (1, "a-blue-box_seed9")):
        ours = Image.open(tmp_path / f"step-000003_0{number}_{name}.png")
        theirs = Image.open(folder / "validation/step-000003" / f"00{number}.png")
        assert ours.tobytes() == theirs.tobytes()
        settings = json.loads(ours.text["gracetune"])
        assert settings["seed"] == (0, 9)[number]
        assert (settings["width"], settings["height"]) == ours.size
        assert settings["negative_prompt"] == "a star"
        assert settings["checkpoint"] == str(folder / "checkpoints/step-000003")


def test_the_command_line_replaces_the_settings_of_validation(trained, tmp_path, capsys):
    folder, _ = trained
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# two of them\na star\n\na ring\n")
    words = ["--prompt", "a box", "--prompts", str(prompts), "--size", "32x16", "--seed", "4"]
    words += ["--steps", "1", "--guidance", "1", "--negative", "dark", "--out", str(tmp_path / "o")]
    assert main(["sample", str(folder), *words]) == 0
    settings = [
        json.loads(Image.open(path).text["gracetune"])
        for path in sorted((tmp_path / "o").iterdir())
    ]
    assert [(s["prompt"], s["seed"]) for s in settings] == [
        ("a box", 4),
        ("a star", 5),
        ("a ring", 6),
    ]
    for each in settings:
        assert (each["width"], each["height"], each["steps"], each["guidance"]) == (32, 16, 1, 1)
    assert "--negative has no effect on 3 of 3 prompts" in capsys.readouterr().err

    words = ["--size", "32x24", "--seed", "3", "--steps", "1", "--out", str(tmp_path / "own")]
    assert main(["sample", str(folder), *words]) == 0  # the second prompt has its own seed and size
    settings = [
        json.loads(Image.open(path).text["gracetune"])
        for path in sorted((tmp_path / "own").iterdir())
    ]
    assert [(s["prompt"], s["seed"], s["width"]) for s in settings] == [
        ("a red circle", 3, 32),
        ("a blue box", 4, 32),
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "lokr",
        pytest.param("dora", marks=pytest.mark.slow),
        pytest.param("loha", marks=pytest.mark.slow),
        pytest.param("full", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_adapter_is_sampled_from_its_checkpoint_and_its_file(
    kind, tiny_run, tmp_path
):
    run = tiny_run(
        adapter={"kind": kind, "rank": 4, "alpha": 3},
        optimizer={"lr": 0.02},
        train={"max_train_steps": 2},
        validation=VALIDATION | {"every": 2},
    )
    validated = train_recorded(run)
    assert_equal(*sample(tmp_path / "run").values(), [*validated[1]])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (from_file,) = sample(tmp_path / "run" / "run.json").values()
    assert_close(from_file, validated[1])
    assert not torch.allclose(validated[0][0], validated[1][0], atol=1e-3)


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"ema_decay": 0.0}, "optimizer": {"name": "schedule_free"}},
        pytest.param({"train": {"ema_decay": 0.9}}, marks=pytest.mark.slow),
    ],
    ids=["schedule_free", "ema"],
)
def test_full_training_is_sampled_from_its_checkpoint_and_its_model(sections, tiny_run, tmp_path):
    train = {"max_train_steps": 2, "checkpoint_every": 1, **sections.pop("train")}
    run = tiny_run(train=train, validation=VALIDATION, **sections)
    validated = train_recorded(run)
    found = sample(tmp_path / "run", at="0,1,2")
    for step in (0, 1, 2):
        assert_equal(found[f"step-{step:06d}"], validated[step])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert_equal(sample(tmp_path / "run")["result"], validated[2])


def test_weights_stream_if_device_memory_is_small(trained):
    folder, validated = trained
    events = []
    found = sample(folder, at="2,3", plan=planned_for(folder, "3MB"), emit=events.append)
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert any("blocks stream from host memory" in text for text in texts), texts
    assert_close(found["step-000002"], validated[2])
    assert_close(found["step-000003"], validated[3])


def test_all_weights_stream_after_the_device_ran_out_of_memory(trained, monkeypatch):
    folder, validated = trained
    events, original = [], Tiny.sample
    failures = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")]

    def failing(family, request):
        if failures:
            raise failures.pop()
        return original(family, request)

    monkeypatch.setattr(Tiny, "sample", failing)
    (found,) = sample(folder, plan=planned_for(folder, "1GB"), emit=events.append).values()
    assert_close(found, validated[3])
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert [text.partition(" (")[0] for text in texts][:2] == [
        "out of memory: all weights stream now",
        "plan: 4 of 4 blocks stream from host memory, 953.7 MiB of device memory are free",
    ]
    failures.append(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RunFailedError, match="Give a smaller --size"):
        sample(folder)


def test_the_fewest_blocks_stream_that_make_the_model_fit(trained):
    run = find_targets([str(trained[0])], None, None, compare=False).run
    with Sampler(run, start_accelerator(run), lambda _: None) as sampler:
        family = sampler.family
    total = sum(p.nbytes for p in family.transformer.parameters())
    blocks = len(family.blocks())
    counts = [num_streamed(family, int(total * share)) for share in (4, 2, 1.5, 1.2, 0.5)]
    assert counts[0] == 0
    assert counts[-1] == blocks
    assert counts == sorted(counts)


# Adapter files


def test_adapter_files_are_added_with_their_strengths(trained, tmp_path):
    folder, validated = trained
    file = folder / "adapter" / "pytorch_lora_weights.safetensors"
    (alone,) = sample(file).values()
    assert_close(alone, validated[3])
    (halves,) = sample(f"{file}:0.25", f"{file}:0.75").values()
    assert_close(halves, validated[3])
    (nothing,) = sample(f"{folder}:0").values()
    assert_equal(nothing, validated[0])

    write_adapter(tmp_path / "mine", read_adapter(file, TABLES), "peft")  # of another tool
    found = sample(folder, tmp_path / "mine", compare=True)
    assert list(found) == ["run", "mine"]
    assert_close(found["mine"], validated[3])


def test_adapters_of_one_name_are_told_apart(trained, tmp_path):
    folder, _ = trained
    texts = [f"{folder}/adapters/step-000001", f"{folder}/adapters/step-000002"]
    for number, text in enumerate(texts):
        shutil.copytree(text, tmp_path / str(number) / "lora")

    def labels(*texts):
        return [one.label for one in find_targets(texts, "tiny", None, compare=True).variants]

    assert labels(*texts) == ["step-000001", "step-000002"]
    copies = [str(tmp_path / str(number) / "lora") for number in range(2)]
    assert labels(*copies) == ["0/lora", "1/lora"]
    assert labels(f"{copies[0]}:0.5", f"{copies[0]}:1") == ["lora:0.5", "lora:1"]


def test_an_adapter_file_elsewhere_is_sampled_with_a_named_model(trained, tmp_path):
    folder, _ = trained
    copied = tmp_path / "mine.safetensors"
    shutil.copy(folder / "adapter" / "pytorch_lora_weights.safetensors", copied)
    words = ["sample", f"{copied}:0.5", "--model", "tiny", "--prompt", "a box", "--steps", "1"]
    out = tmp_path / "out"
    assert main([*words, "--size", "24x24", "--out", str(out)]) == 0
    (image,) = out.iterdir()
    assert image.name == "mine-0.5_00_a-box_seed0.png"
    settings = json.loads(Image.open(image).text["gracetune"])
    assert settings["adapters"] == [{"file": str(copied), "strength": 0.5}]


def test_other_base_weights_than_in_training_are_reported(trained, tmp_path, capsys):
    words = ["--prompt", "a box", "--steps", "1", "--out", str(tmp_path)]
    changed = tmp_path / "changed"
    shutil.copytree(trained[0], changed)
    record = json.loads((changed / "run.json").read_text())
    record["model"]["init_seed"] = 5
    (changed / "run.json").write_text(json.dumps(record))
    for folder, is_reported in ((trained[0], False), (changed, True)):
        assert main(["sample", str(folder), *words]) == 0
        shown = capsys.readouterr()
        assert ("other weights than the run was" in shown.out + shown.err) == is_reported
    assert main(["sample", str(changed), "--model", "tiny", *words]) == 0
    shown = capsys.readouterr()
    assert "other weights" not in shown.out + shown.err, "the model was asked for"


def test_an_adapter_of_another_model_is_refused(trained, tmp_path):
    folder, _ = trained
    adapter = read_adapter(folder / "adapter", TABLES)
    layers = {
        path._replace(module=f"{path.module}_x"): layer for path, layer in adapter.layers.items()
    }
    write_adapter(tmp_path / "x.safetensors", replace(adapter, layers=layers), "diffusers")
    with pytest.raises(Exception, match="_x, which this model does not have"):
        sample(folder, tmp_path / "x.safetensors")


# Errors


def test_the_names_of_files_and_folders_are_those_that_a_run_writes():
    assert FIXED_NAMES == (FILE_NAME, PEFT_FILE)
    assert STEP_FOLDERS == (CHECKPOINT_FOLDER, ADAPTERS_FOLDER)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "--at", "2,7"], "has no step 7. It has: 1, 2, 3; 0 is the model before"),
        (["{run}", "--at", "x"], "--at is 'x'; it must be `all`, or numbers"),
        (["{run}/missing"], "missing does not exist. Give the folder of a run"),
        (["{run}/adapter:much"], "the strength after the colon is 'much'"),
        (["{run}/adapter:nan"], "the strength after the colon is 'nan'"),
        (["{run}/validation"], "has neither the settings of a run (run.json) nor an adapter"),
        (["{empty}/lora.safetensors"], "--model is missing: "),
        ([], "--model is missing: nothing is given"),
        (["--model", "fluxx=a"], "'fluxx' is not a family. Did you mean 'flux'?"),
        (["--model", "tiny"], "--prompt is missing"),
        (["{run}", "--size", "big"], "--size is 'big'; write width and height as in 1024x768"),
        (["{run}", "--size", "26x24"], "--size are 26x24, but tiny needs multiples of 4"),
        (["{run}", "--steps", "0"], "--steps is 0: input should be greater than or equal to 1"),
        (["{run}", "--frames", "5"], "--frames is 5, but tiny generates no videos"),
        (["{run}", "--seconds", "5"], "--seconds is set, but tiny generates no sounds"),
        (["{run}", "--image", "a.png"], "--image has 2 files, but this tiny uses prompts only"),
        (["{run}", "--prompts", "{empty}/none"], "which cannot be read: "),
        (["{run}", "--prompts", "{empty}/one.json"], "it is an object. Give a text file"),
        (["{run}", "--prompt", "caf\udce9"], "--prompts.0 is text with a lone surrogate"),
        (["{run}", "--guidance", "inf"], "--guidance is inf; it must be a finite number"),
        (
            ["{run}", "--seed", str(2**64 - 1)],
            f"--seed is {2**64 - 1}: value error, a whole number",
        ),
        (["{run}", "--out", "{empty}/one.json"], "one.json', which cannot be written"),
        (["{run}", "--device-memory", "lots"], "--device-memory: "),
        (["{run}", "{run}", "--at", "2"], "steps can be chosen for a single run only"),
        (["{empty}"], "has neither the settings of a run"),
        (["{new}"], "has no checkpoint yet. The run saves one every 1 steps and at the end"),
    ],
)
def test_errors_name_the_fix(words, message, trained, tmp_path, capsys):
    folder, _ = trained
    (tmp_path / "new").mkdir()
    shutil.copy(folder / "run.json", tmp_path / "new")
    (tmp_path / "lora.safetensors").touch()
    (tmp_path / "one.json").write_text('{"prompt": "not in a list"}')
    places = {"run": folder, "empty": tmp_path, "new": tmp_path / "new"}
    if words == ["{empty}"]:
        (tmp_path / "lora.safetensors").unlink()
    assert main(["sample", *(word.format(**places) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "samples").exists(), "a failed command leaves no folder"


def test_a_folder_with_unrelated_adapters_and_one_of_a_model_are_explained(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"has 2 adapter files \(a.safetensors, b.safetensors\)"):
        find_targets([str(tmp_path)], "tiny", None, compare=False)
    (tmp_path / "transformer").mkdir()
    with pytest.raises(ConfigError, match=rf"Name it as --model FAMILY={tmp_path}"):
        find_targets([str(tmp_path)], None, None, compare=False)


# The sheet


def test_a_comparison_sheet_shows_every_image_in_its_row_and_column():
    sizes = [(24, 24), (48, 24), (1024, 512)]
    rows = [
        (
            f"step {step}",
            [Image.new("RGB", size, (step, 40 * i, 99)) for i, size in enumerate(sizes)],
        )
        for step in (100, 200)
    ]
    sheet = comparison_sheet(rows, ["a long prompt " * 9 + "\nseed 0"] * 3, "tiny")
    pixels = sheet.load()
    places = {}
    for y in range(sheet.height):
        for x in range(sheet.width):
            if pixels[x, y][2] == 99 != pixels[x, y][0]:  # text is grey
                places.setdefault(pixels[x, y][:2], []).append((x, y))
    assert places.keys() == {(step, 40 * i) for step in (100, 200) for i in range(3)}
    spans = {
        key: (min(x for x, _ in spots), min(y for _, y in spots)) for key, spots in places.items()
    }
    assert len({x for x, _ in spans.values()}) == 3
    assert len({y for _, y in spans.values()}) == 2
    widths = [len({x for x, _ in places[100, 40 * i]}) for i in range(3)]
    assert widths == [192, 384, 384], "small images are enlarged, large ones reduced"
