"""Prompts with settings of their own: what they inherit, how they are grouped, what is refused."""

from dataclasses import replace

import pytest
import torch

from gracetune.cache.encode import NO_TILING
from gracetune.config.schema import ModelSection, ValidationSection
from gracetune.errors import ConfigError
from gracetune.models.family import AudioFormat, load_family
from gracetune.train.prompts import (
    SampleDefaults,
    build_requests,
    ignored_negatives,
    plan_prompts,
    require_sample_packages,
)

IMAGES = SampleDefaults("image", 24)


@pytest.fixture(scope="module")
def family():
    return load_family(ModelSection())


def plan(family, *prompts, defaults=IMAGES, **section):
    parsed = ValidationSection.model_validate({"prompts": prompts, **section})
    return plan_prompts(parsed, parsed.prompts, defaults, family)


def test_a_prompt_has_the_settings_of_the_section_unless_it_has_its_own(family):
    own = {
        "prompt": "b",
        "negative_prompt": "blurred",
        "seed": 0,
        "width": 32,
        "steps": 2,
        "guidance": 0,
    }
    first, second, third = plan(
        family, "a", own, {"prompt": "c"}, seed=7, negative_prompt="dark", height=16, guidance=3.0
    )
    assert (first.shape, first.seed, first.steps, first.guidance) == ((24, 16), 7, 24, 3.0)
    assert (second.shape, second.seed, second.steps, second.guidance) == ((32, 16), 0, 2, 0.0)
    assert (third.shape, third.seed, third.prompt) == ((24, 16), 9, "c")
    assert [one.negative_prompt for one in (first, second, third)] == ["dark", "blurred", "dark"]


def test_frames_and_seconds_decide_the_kind_of_sample(family):
    video = replace(family, kinds=("image", "video"))
    clip, image = plan(video, "a", {"prompt": "b", "frames": 1}, frames=5)
    assert (clip.kind, clip.shape) == ("video", (24, 24, 5))
    assert (image.kind, image.shape) == ("image", (24, 24))
    audio = SampleDefaults("audio", channels=2, sample_rate=100, length=300)
    musical = replace(family, audio=AudioFormat(2, 100, 300))
    long, short = plan(musical, "a", {"prompt": "b", "seconds": 0.5}, defaults=audio)
    assert [long.shape, short.shape] == [(2, 300), (2, 50)]


def test_successive_prompts_with_equal_settings_share_a_request(family):
    own_seed, larger = {"prompt": "c", "seed": 9}, {"prompt": "e", "width": 32}
    planned = plan(family, "a", "b", own_seed, {"prompt": "d", "seed": 10}, larger)
    requests = build_requests(planned, family, NO_TILING)
    assert [(r.seed, len(r.texts), r.shape) for r in requests] == [
        (0, 2, (24, 24)),
        (9, 2, (24, 24)),
        (4, 1, (32, 24)),
    ]


def test_every_prompt_is_sampled_as_if_it_were_alone(family):
    entries = [
        "a red circle",
        {"prompt": "a blue box", "negative_prompt": "a star", "seed": 5},
        {"prompt": "a blue box", "seed": 5, "steps": 3},
    ]

    def sample(*prompts, **section):
        planned = plan(family, *prompts, sample_steps=2, **section)
        with torch.no_grad():
            return [
                each.data
                for request in build_requests(planned, family, NO_TILING)
                for each in family.sample(request)
            ]

    first, second, third = sample(*entries)
    assert torch.equal(first, sample("a red circle")[0])
    assert torch.equal(second, sample("a blue box", seed=5, negative_prompt="a star")[0])
    assert not torch.allclose(second, sample("a blue box", seed=5)[0])
    assert not torch.allclose(third, sample("a blue box", seed=5)[0])


def test_a_negative_prompt_without_effect_is_reported(family):
    planned = plan(family, "a", {"prompt": "b", "guidance": 1}, negative_prompt="dark")
    assert "1 of 2 prompts: their guidance is 1" in ignored_negatives(planned, family)
    distilled = replace(family, uses_negative_prompt=False)
    assert "has guidance built in" in ignored_negatives(planned, distilled)
    assert not ignored_negatives(plan(family, "a", negative_prompt="dark"), family)
    assert not ignored_negatives(plan(family, "a", guidance=1), distilled)


@pytest.mark.parametrize(
    ("entry", "section", "message"),
    [
        ({"width": 26}, {}, r"validation\.prompts\.0\.width and height are 26x24"),
        ({}, {"width": 26}, r"validation\.width and height are 26x24.*multiples of 4 up to"),
        ({"frames": 5}, {}, r"validation\.prompts\.0\.frames is 5, but tiny generates no videos"),
        ({"seconds": 2}, {}, r"prompts\.0\.seconds is set, but tiny generates no sounds"),
        ({"images": "a.png"}, {}, r"validation\.images has 1 files, but this tiny uses prompts"),
        ({}, {"images": ["a.png"]}, r"validation\.images has 1 files, but this tiny uses prompts"),
    ],
)
def test_settings_that_the_model_cannot_generate_are_named(family, entry, section, message):
    with pytest.raises(ConfigError, match=message):
        plan(family, {"prompt": "a", **entry}, **section)


@pytest.mark.parametrize(
    ("entry", "section", "message"),
    [
        ({}, {}, "has 0 files for 1 prompts"),
        ({"images": ["a.png", "b.png"]}, {}, r"prompts\.0\.images has 2 files.*takes one"),
        ({}, {"images": ["a.png", "b.png"]}, r"validation\.images has 2 files for 1 prompts"),
        ({"images": "missing.png"}, {}, r"'missing\.png' cannot be read"),
    ],
)
def test_images_of_models_that_need_them_are_checked(family, entry, section, message):
    animating = replace(family, starts_from="image")
    with pytest.raises(ConfigError, match=message):
        build_requests(plan(animating, {"prompt": "a", **entry}, **section), animating, NO_TILING)


def test_required_packages_are_installed():
    for kind in ("image", "video", "audio"):
        require_sample_packages(kind)
