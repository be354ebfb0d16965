"""`gracetune init` writes a run file that trains as it is, from flags or from answers."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gracetune.cli import init as command
from gracetune.cli.main import main
from gracetune.config.load import load_run_file, load_run_text
from gracetune.config.presets import (
    MEMORY_SIZES,
    RunRequest,
    choose_settings,
    run_file_text,
    size_preset,
)
from gracetune.errors import ConfigError, DataError
from gracetune.memory.platform import NO_GPU, Link, Machine
from gracetune.models.registry import FAMILIES

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from media_files import (
    audio_bytes,
    grey_frames,
    image_bytes,
    photo,
    tone,
    video_bytes,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Small images with captions; tests must not change them."""
    return write_images(tmp_path_factory.mktemp("data") / "photos")


def write_images(folder: Path, count: int = 8, caption: str | None = "a cat", suffix="txt") -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(image_bytes(photo(40, 36, number)))
        if caption is not None:
            (folder / f"{number}.{suffix}").write_text(f"{caption} {number}")
    return folder


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*words: object, answers: tuple[str, ...] | None = None, platform=NO_GPU) -> list[str]:
    """Run the command; return the questions that it asked."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    asked: list[str] = []
    replies = iter(answers or ())

    def read(question: str) -> str:
        asked.append(question)
        try:
            return next(replies)
        except StopIteration:
            raise EOFError from None

    args = parser.parse_args([*map(str, words), *([] if answers is not None else ["--yes"])])
    assert command.init(args, lambda: Machine(None, platform), read) == 0
    return asked


def loaded(name: str = "mine.yaml"):
    found = load_run_file(name, environment={})
    assert found.notices == ()
    return found.run


def test_the_file_for_tiny_trains_as_it_is(shared, capsys) -> None:
    assert main(["init", str(shared), "--family", "tiny", "--yes", "--out", "mine.yaml"]) == 0
    said = capsys.readouterr().out
    assert "data       8 images, 40x36" in said
    assert said.endswith("next\n  gracetune train mine.yaml\n")
    run = loaded()
    assert (run.output_dir, run.datasets[0].resolution) == ("runs/mine", 32)
    short = ["--set", "train.max_train_steps=3", "--set", "optimizer.warmup_steps=0"]
    assert main(["train", "mine.yaml", *short]) == 0
    shown = capsys.readouterr()
    assert list(Path("runs/mine/adapter").iterdir())
    assert Path("runs/mine/validation/step-000003.png").is_file()
    assert "data check" not in shown.out + shown.err  # nothing is enlarged


def test_questions_have_defaults_and_are_asked_again(shared, capsys) -> None:
    answers = (str(shared), "portrait", "character", "", "sks", "mine.yaml")
    asked = call(answers=answers)
    assert asked == [
        "Folder with your images, videos or audio: ",
        "What should it learn [style]: ",
        "What should it learn [style]: ",
        "Model family [tiny]: ",
        "Trigger word, a rare word that stands for it [ohwx]: ",
        "Run file to write [photos.yaml]: ",
    ]
    said = capsys.readouterr().out
    assert "Please choose one of: style, character" in said
    assert "  sdxl        SDXL\n" in said
    run = loaded()
    assert (run.model.family, run.datasets[0].trigger_word) == ("tiny", "sks")
    assert run.validation.prompts[0] == "sks, a cat 0"


def test_validation_prompts_are_captions_that_differ(tmp_path) -> None:
    folder = write_images(tmp_path / "photos", count=3)
    for number, text in enumerate(("a red coat, on a beach", "a blue coat, on a beach", "a cat")):
        (folder / f"{number}.txt").write_text(text)
    call(folder, "--family", "tiny", "--out", "mine.yaml", "--no-plan")
    assert loaded().validation.prompts == ("a red coat, on a beach", "a cat")


def test_an_answer_that_never_comes_is_an_error(shared) -> None:
    with pytest.raises(ConfigError, match=r"Model family: the input ended.*--yes"):
        call(shared, answers=("style",))
    with pytest.raises(ConfigError, match=r"Folder with your images.*Pass it as an argument"):
        call()


def test_the_memory_of_the_gpu_is_the_default(shared, monkeypatch) -> None:
    monkeypatch.setattr(command, "_has_fp8", lambda device: True)
    gpu = replace(NO_GPU, device=0, device_bytes=int(17.1e9), link=Link.MANAGED)
    asked = call(shared, "--no-plan", "--out", "mine.yaml", answers=("", "flux", ""), platform=gpu)
    assert asked[1].endswith("[flux]: ")
    assert asked[2] == "Memory of your GPU [17.1GB]: "
    assert loaded().model.frozen_compute == "fp8"


def test_an_existing_file_is_kept_unless_forced(shared) -> None:
    Path("mine.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine\.yaml exists.*--force"):
        call(shared, "--family", "tiny", "--out", "mine.yaml")
    assert Path("mine.yaml").read_text() == "mine"
    call(shared, "--family", "tiny", "--out", "mine.yaml", "--force")
    assert loaded().model.family == "tiny"
    with pytest.raises(ConfigError, match=r"a name that ends in \.yaml"):
        call(shared, "--family", "tiny", "--out", "mine.json")


def test_the_output_folder_of_another_run_is_not_used(shared) -> None:
    Path("runs/mine").mkdir(parents=True)
    call(shared, "--family", "tiny", "--out", "mine.yaml")
    assert loaded().output_dir == "runs/mine-2"


@pytest.mark.parametrize("word", [" ", "the [trigger]"])
def test_a_trigger_word_that_no_run_may_have_is_refused(shared, word) -> None:
    with pytest.raises(ConfigError, match=r"--trigger is '.*'; it must be a word"):
        call(shared, "--family", "tiny", "--trigger", word, "--out", "mine.yaml")
    assert not Path("mine.yaml").exists()


@pytest.mark.parametrize(("one", "other"), [("before", "after"), ("my_source", "edited")])
def test_two_folders_of_the_same_names_are_an_edit(one, other) -> None:
    write_images(Path("pairs") / one, caption=None)
    write_images(Path("pairs") / other, caption="make it blue")
    call("pairs", "--memory", "48GB", "--out", "mine.yaml", "--no-plan")
    run = loaded()
    assert run.model.path == "black-forest-labs/FLUX.1-Kontext-dev"
    (data,) = run.datasets
    assert (data.instance_data_dir, data.conditioning_data_dir) == (
        f"pairs/{other}",
        f"pairs/{one}",
    )
    assert run.validation.prompts == ("make it blue 0", "make it blue 1")
    assert run.validation.images == (f"pairs/{one}/0.png", f"pairs/{one}/1.png")


def test_a_folder_of_originals_next_to_the_results_is_found_and_may_be_ignored(capsys) -> None:
    write_images(Path("results"))
    write_images(Path("originals"), caption=None)
    write_images(Path("results_control"), caption=None)
    call("results", "--family", "qwen_image", "--out", "mine.yaml", "--no-plan")
    assert loaded().datasets[0].conditioning_data_dir == "results_control"
    call("results", "--family", "tiny", "--goal", "style", "--out", "other.yaml")
    assert "results_control is not used, because the goal is style" in capsys.readouterr().out
    assert loaded("other.yaml").datasets[0].conditioning_data_dir is None


def test_two_folders_of_other_names_are_one_dataset() -> None:
    write_images(Path("animals/cats"))
    write_images(Path("animals/dogs"), caption="a dog")
    call("animals", "--family", "tiny", "--out", "mine.yaml")
    assert loaded().datasets[0].instance_data_dir == "animals"
    with pytest.raises(DataError, match=r"goal edit needs two folders.*--control"):
        call("animals", "--goal", "edit", "--out", "other.yaml", "--no-plan")


def test_videos_are_recognised() -> None:
    Path("clips").mkdir()
    for number in range(4):
        clip = video_bytes(grey_frames(40, step=number + 1), fps=16)
        Path(f"clips/{number}.mp4").write_bytes(clip)
        Path(f"clips/{number}.txt").write_text(f"a grey clip {number}")
    call("clips", "--memory", "24", "--out", "mine.yaml", "--no-plan")
    run = loaded()
    assert (run.model.family, run.datasets[0].dataset_type) == ("wan22", "video")
    assert (run.datasets[0].frames, run.datasets[0].fps) == ((33,), 16)
    with pytest.raises(ConfigError, match=r"flux, which is not trained on videos.*wan22"):
        call("clips", "--family", "flux", "--out", "other.yaml", "--no-plan")


def test_audio_is_recognised() -> None:
    Path("sounds").mkdir()
    for number in range(4):
        Path(f"sounds/{number}.wav").write_bytes(audio_bytes(tone(2.2, 8000, 440 + number), 8000))
        Path(f"sounds/{number}.txt").write_text(f"a tone {number}")
    call("sounds", "--out", "mine.yaml")
    run = loaded()
    assert (run.model.family, run.datasets[0].seconds) == ("stable_audio", (2.0,))


def test_files_without_captions_get_one_for_all() -> None:
    write_images(Path("plain"), caption=None)
    call(
        "plain", "--family", "tiny", "--goal", "concept", "--trigger", "ohwx", "--out", "mine.yaml"
    )
    (data,) = loaded().datasets
    assert (data.caption_strategy, data.instance_prompt) == ("instanceprompt", "ohwx")
    call("plain", "--family", "tiny", "--caption", "a red toy", "--out", "other.yaml")
    assert loaded("other.yaml").datasets[0].instance_prompt == "a red toy"


def test_captions_with_another_suffix_are_found_and_other_files_named(capsys) -> None:
    write_images(Path("tagged"), suffix="tags")
    Path("tagged/clip.mp4").write_bytes(b"x")
    call("tagged", "--family", "tiny", "--out", "mine.yaml")
    assert "note       ignored 1 files that are not images or captions: 1 .mp4" in (
        capsys.readouterr().out
    )
    run = loaded()
    assert run.datasets[0].caption_extension == "tags"
    assert run.validation.prompts[0] == "a cat 0"


def test_data_with_which_a_run_would_stop_is_refused() -> None:
    folder = write_images(Path("photos"))
    (folder / "3.txt").unlink()
    with pytest.raises(DataError, match=r"1 of 8 samples have no caption: 3\.png"):
        call("photos", "--family", "tiny", "--out", "mine.yaml")
    (folder / "3.txt").write_text("x")
    (folder / "2.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"(?s)1 of 8 samples cannot be used.*gracetune data check"):
        call("photos", "--family", "tiny", "--out", "mine.yaml")
    with pytest.raises(DataError, match="does not exist"):
        call("nowhere", "--out", "mine.yaml")
    assert not Path("mine.yaml").exists()


def test_a_run_that_does_not_fit_is_lowered_or_reported(shared, monkeypatch, capsys) -> None:
    from gracetune.plan.search import PlanError

    tried = []

    def plan(run, request, platform):
        tried.append((run.datasets[0].resolution, run.train.batch_size))
        raise PlanError("it needs 13 GB.")

    monkeypatch.setattr(command, "_plan", plan)
    call(shared, "--family", "sd15", "--memory", "12GB", "--out", "mine.yaml")
    assert tried == [(256, 2), (256, 2), (256, 1)]
    assert "warning: it does not fit: it needs 13 GB." in capsys.readouterr().out
    assert loaded().train.batch_size == 1


@pytest.mark.slow
def test_the_plan_of_a_small_model_is_printed(shared, capsys) -> None:
    call(shared, "--family", "sd15", "--memory", "12GB", "--out", "mine.yaml")
    said = capsys.readouterr().out
    assert "plan       needs " in said
    assert "gracetune plan mine.yaml --machine h200-pcie --hbm 12GB --host-memory 128GB  #" in said


PLANNED = [name for name, info in FAMILIES.items() if info.has_planner_shapes and name != "tiny"]
CASES = [(family, "style") for family in PLANNED]
CASES += [("wan22", "video"), ("flux", "edit"), ("qwen_image", "edit")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "goal"), CASES)
def test_every_preset_fits_into_its_memory(family, goal) -> None:
    for gb in MEMORY_SIZES:
        request = RunRequest(
            folder="photos",
            family=family,
            goal=goal,
            memory_gb=float(gb),
            output_dir="runs/mine",
            num_samples=100,
            kind="video" if goal == "video" else "image",
            frames=(90, 90),
            captions=("a cat", "a dog"),
        )
        if goal == "edit":
            images = ("before/1.png", "before/2.png")
            request = replace(request, control_folder="before", control_images=images)
        text = run_file_text(choose_settings(request, size_preset(request)), [])
        run = load_run_text(text, "yaml", "mine.yaml", environment={}).run
        plan = command._plan(run, request, NO_GPU)  # raises an error if nothing fits
        assert plan.device.total <= gb * 1e9
        assert plan.batch == size_preset(request).batch_size
