"""Presets give every family, memory size and goal a run file that loads without remarks."""

import pytest

from gracetune.config.checks import check_run
from gracetune.config.load import load_run_text
from gracetune.config.presets import (
    FAMILY_PRESETS,
    GOALS,
    MEMORY_SIZES,
    RunRequest,
    choose_settings,
    run_file_text,
    size_preset,
)
from gracetune.models.registry import FAMILIES


def request(family="flux", **changes):
    kind = FAMILY_PRESETS[family].kinds[-1]
    settings = {
        "folder": "my/images",
        "family": family,
        "goal": "video" if kind == "video" else "style",
        "memory_gb": 24.0,
        "output_dir": "runs/mine",
        "num_samples": 20,
        "kind": kind,
        "frames": (40, 60),
        "seconds": (12.3, 30.0),
        "captions": ('a "quoted" cat: yes', "no"),
        "sample_size": (64, 64),
    }
    return RunRequest(**{**settings, **changes})


def load(asked):
    text = run_file_text(choose_settings(asked, size_preset(asked)), ["A heading."])
    loaded = load_run_text(text, "yaml", "mine.yaml", environment={})
    assert loaded.notices == ()
    check_run(loaded.run)
    return loaded.run, text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_memory_size_and_goal_gives_a_valid_file(family):
    kinds = FAMILY_PRESETS[family].kinds
    asked = [
        request(family, memory_gb=float(gb), goal=goal, kind=kind, trigger_word=word)
        for gb in MEMORY_SIZES
        for goal in GOALS
        for kind in kinds
        for word in (None, "ohwx")
        if (goal == "video") == (kind == "video") and goal != "edit"
    ]
    assert asked
    for one in asked:
        run, _ = load(one)
        assert run.model.family == family
        assert run.model.path == FAMILIES[family].default_model
        assert run.validation.prompts[:1]
        assert "[trigger]" not in str(run.validation.prompts)


def test_every_family_has_a_preset():
    assert set(FAMILY_PRESETS) == set(FAMILIES), "add it to FAMILY_PRESETS in config/presets.py"


def test_the_shift_of_ideogram_4_follows_the_resolution():
    """512x512 pixels have a shift of 1 in the pipeline, and 1024x1024 pixels one of 2."""
    for gb, edge in ((12, 1024), (24, 1024), (24, 768)):
        run, _ = load(request("ideogram4", memory_gb=float(gb), typical_edge=edge))
        assert run.train.timestep_shift == run.datasets[0].resolution / 512
        assert run.train.timestep_std == 1.5


@pytest.mark.parametrize("family", FAMILIES)
def test_more_memory_never_gives_less(family):
    preset = FAMILY_PRESETS[family]
    for sizes in (preset.sizes, preset.video_sizes or preset.sizes):
        work = [
            sizes[gb].resolution ** 2 * sizes[gb].batch_size * sizes[gb].frames
            for gb in MEMORY_SIZES
        ]
        assert work == sorted(work)


@pytest.mark.parametrize(
    ("memory_gb", "like"), [(8, 12), (11.8, 12), (25.3, 24), (23.5, 24), (80, 48), (141, 96)]
)
def test_a_card_uses_the_largest_preset_that_it_has_memory_for(memory_gb, like):
    assert size_preset(request(memory_gb=memory_gb)) == FAMILY_PRESETS["flux"].sizes[like]


def test_small_images_are_not_enlarged():
    run, text = load(request("sdxl", typical_edge=700))
    assert run.datasets[0].resolution == 640
    assert "more would only enlarge them" in text
    assert load(request("sdxl", typical_edge=4000))[0].datasets[0].resolution == 1024
    assert load(request("tiny", typical_edge=27))[0].datasets[0].resolution == 24


def test_the_length_follows_from_the_samples_and_the_batch():
    few, many = (load(request("flux", num_samples=n))[0] for n in (10, 200))
    assert few.train.max_train_steps == 1500
    assert many.train.max_train_steps == 6000
    large = load(request("sdxl", num_samples=200))[0].train
    assert (large.batch_size, large.max_train_steps) == (4, 1500)
    assert few.validation.holdout == 0
    assert many.validation.holdout == 0.05


def test_a_batch_is_at_most_a_quarter_of_the_samples():
    assert load(request("sdxl", num_samples=9))[0].train.batch_size == 2


def test_characters_get_their_trigger_word_in_captions_and_prompts():
    run, text = load(request(goal="character", trigger_word="ohwx", captions=("ohwx, a man",)))
    assert run.datasets[0].trigger_word == "ohwx"
    assert run.validation.prompts == ("ohwx, a man", "ohwx walking through a city at night")
    assert '- "[trigger] walking through a city at night"' in text


def test_edit_pairs_use_the_edit_model_and_an_image_for_each_prompt():
    asked = request(
        "qwen_image",
        goal="edit",
        control_folder="before",
        captions=("make it snow", "make it night"),
        control_images=("before/a.png", "before/b.png"),
    )
    run, _ = load(asked)
    assert run.model.path == "Qwen/Qwen-Image-Edit-2511"
    assert run.datasets[0].conditioning_data_dir == "before"
    assert run.validation.prompts == ("make it snow", "make it night")
    assert run.validation.images == ("before/a.png", "before/b.png")


def test_tags_are_shuffled_for_models_of_clip_only():
    assert load(request("sdxl", are_tags=True))[0].datasets[0].caption_shuffle
    assert not load(request("flux", are_tags=True))[0].datasets[0].caption_shuffle


@pytest.mark.parametrize(
    ("frames", "expected"), [((40, 60), (33,)), ((20, 200), (17, 33)), ((9, 18), (9, 17))]
)
def test_clips_are_not_longer_than_the_videos(frames, expected):
    run, _ = load(request("wan22", frames=frames))
    assert run.datasets[0].frames == expected


def test_audio_lengths_cover_the_shortest_and_most_files():
    assert load(request("stable_audio"))[0].datasets[0].seconds == (12.0, 30.0)
    assert load(request("stable_audio", seconds=(0.2, 99)))[0].datasets[0].seconds == (0.5, 47.0)


def test_fp8_is_chosen_only_for_weights_that_stream():
    assert load(request(has_fp8=True))[0].model.frozen_compute == "fp8"
    assert load(request(has_fp8=True, memory_gb=96))[0].model.frozen_compute == "bf16"
    assert load(request())[0].model.frozen_compute == "bf16"


def test_every_value_that_needs_one_has_a_reason():
    settings = choose_settings(request("wan22"), size_preset(request("wan22")))
    without = {setting.key.rpartition(".")[2] for setting in settings if not setting.reason}
    assert without <= {"family", "id", "dataset_type", "instance_data_dir", "cache_dir",
                       "sample_steps", "height"}  # fmt: skip


@pytest.mark.parametrize("text", ["no", "Yes", "null", "a: b", "# x", "- y", '"', "\\", "12", "é"])
def test_texts_survive_yaml(text):
    run, _ = load(request(captions=(text,), trigger_word="x: #"))
    assert run.validation.prompts[0] == text
    assert run.datasets[0].trigger_word == "x: #"
