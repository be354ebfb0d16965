"""examples/judge_shapes.py recognizes the shapes of the demo and rejects everything else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from gracetune.data.demo_dataset import (
    BACKGROUNDS,
    COLOURS,
    ShapeSpec,
    draw,
    held_out,
    training_combinations,
)

if TYPE_CHECKING:
    from types import ModuleType

PROGRAM = Path(__file__).parents[3] / "examples" / "judge_shapes.py"


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge_shapes", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FIGURES = [*held_out(), *training_combinations(), *held_out("star"), *training_combinations("star")]


def test_every_generated_shape_is_recognized(judge: ModuleType) -> None:
    for copy, figure in enumerate(FIGURES):
        verdict = judge.judge(draw(figure, 24, copy, 1))
        assert (verdict.colour, verdict.shape, verdict.background) == (
            figure.colour,
            figure.shape,
            figure.background,
        )


@pytest.mark.parametrize("size", [48, 96])
def test_shapes_in_larger_images_are_recognized(judge: ModuleType, size: int) -> None:
    for figure in FIGURES[::17]:
        verdict = judge.judge(draw(figure, size, 0, 1))
        assert (verdict.colour, verdict.shape) == (figure.colour, figure.shape)


def test_noisy_shapes_are_recognized(judge: ModuleType) -> None:
    random = np.random.default_rng(0)
    right = 0
    for figure in FIGURES[::3]:
        pixels = np.asarray(draw(figure, 24, 0, 1)).astype(float)
        # A tenth of the edge pixels swaps sides, and everything gets some noise.
        rolled = np.roll(pixels, random.integers(-1, 2, 2), axis=(0, 1))
        swap = random.random((24, 24, 1)) < 0.1
        noisy = np.where(swap, rolled, pixels) + random.normal(0, 12, pixels.shape)
        verdict = judge.judge(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
        right += (verdict.colour, verdict.shape) == (figure.colour, figure.shape)
    assert right >= 0.95 * len(FIGURES[::3])


def test_a_blank_image_has_no_shape(judge: ModuleType) -> None:
    for name, colour in [*COLOURS.items(), *BACKGROUNDS.items()]:
        verdict = judge.judge(Image.new("RGB", (24, 24), colour))
        assert (verdict.colour, verdict.shape) == (None, None), name


def test_noise_has_no_shape(judge: ModuleType) -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        pixels = random.integers(0, 256, (24, 24, 3), dtype=np.uint8)
        assert judge.judge(Image.fromarray(pixels)) == judge.Verdict(None, None, None)


def test_blobs_are_rarely_taken_for_shapes(judge: ModuleType) -> None:
    random = np.random.default_rng(2)
    rows, columns = np.mgrid[:24, :24] - 11.5
    figures = taken = 0
    for _ in range(40):
        field = random.integers(0, 256, (24, 24), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(field).filter(ImageFilter.GaussianBlur(2.2)), float)
        height = (smooth - smooth.mean()) / smooth.std() - 0.02 * (rows**2 + columns**2)
        mask = (height > -0.6)[..., None]
        pixels = np.where(mask, COLOURS["red"], BACKGROUNDS["white"]).astype(np.uint8)
        verdict = judge.judge(Image.fromarray(pixels))
        figures += verdict.colour == "red"
        taken += verdict.shape is not None
    assert figures >= 30
    assert taken <= 4


@pytest.mark.parametrize("box", [(4, 9, 20, 15), (10, 2, 13, 22), (2, 6, 22, 17)])
def test_bars_and_flat_ellipses_are_not_squares_or_circles(
    judge: ModuleType, box: tuple[int, int, int, int]
) -> None:
    for kind in ("rectangle", "ellipse"):
        image = Image.new("RGB", (24, 24), BACKGROUNDS["gray"])
        pen = ImageDraw.Draw(image)
        getattr(pen, kind)(box, fill=COLOURS["green"])
        assert judge.judge(image).shape is None


def test_shapes_that_are_too_small_or_too_large_are_not_recognized(judge: ModuleType) -> None:
    for half in (2, 11):
        image = Image.new("RGB", (24, 24), BACKGROUNDS["white"])
        box = (12 - half, 12 - half, 11 + half, 11 + half)
        ImageDraw.Draw(image).rectangle(box, fill=COLOURS["blue"])
        assert judge.judge(image).shape is None


def test_two_shapes_in_one_image_are_not_recognized(judge: ModuleType) -> None:
    image = Image.new("RGB", (24, 24), BACKGROUNDS["black"])
    pen = ImageDraw.Draw(image)
    pen.ellipse((2, 2, 10, 10), fill=COLOURS["red"])
    pen.ellipse((13, 13, 21, 21), fill=COLOURS["red"])
    assert judge.judge(image).shape is None


def test_an_unknown_colour_is_none(judge: ModuleType) -> None:
    image = Image.new("RGB", (24, 24), BACKGROUNDS["white"])
    ImageDraw.Draw(image).ellipse((4, 4, 19, 19), fill=(0, 255, 255))
    verdict = judge.judge(image)
    assert (verdict.colour, verdict.shape, verdict.background) == (None, None, "white")


def _run_folder(root: Path, shown: list[ShapeSpec], prompts: list[str]) -> Path:
    """Write a run whose newest samples are `shown`; the samples of an older step are blank."""
    for step, pictures in ((100, None), (2000, shown)):
        folder = root / "validation" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "prompts.json").write_text(json.dumps(prompts))
        for number in range(len(prompts)):
            blank = Image.new("RGB", (24, 24))
            image = blank if pictures is None else draw(pictures[number], 24, number, 3)
            image.save(folder / f"{number:03d}.png")
    return root


def test_a_run_with_correct_samples_passes(
    judge: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = [*held_out()[:4], held_out("star")[-1]]
    run = _run_folder(tmp_path, figures, [figure.caption for figure in figures])
    assert judge.main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("ok ") for line in lines[:5])
    assert lines[5] == "colour 100.0% (at least 95.0%)"
    assert lines[6] == "shape  100.0% (at least 90.0%)"


def test_a_run_fails_if_too_many_colours_or_shapes_are_wrong(
    judge: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = list(held_out()[:4])
    prompts = [figure.caption for figure in figures]
    prompts[0] = prompts[0].replace("red", "blue")
    prompts[1] = prompts[1].replace("circle", "star")
    run = _run_folder(tmp_path, figures, prompts)
    assert judge.main([str(run)]) == 1
    assert capsys.readouterr().out.count("WRONG") == 2
    assert judge.main([str(run), "--min-colour", "0.75"]) == 1
    assert judge.main([str(run), "--min-shape", "0.75"]) == 1
    assert judge.main([str(run), "--min-colour", "0.75", "--min-shape", "0.75"]) == 0


def test_json_output_has_the_verdict_of_every_sample(
    judge: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = ShapeSpec("orange", "cross", "brown")
    run = _run_folder(tmp_path, [figure], [figure.caption])
    assert judge.main([str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "colour": 1.0,
        "shape": 1.0,
        "passed": True,
        "pictures": [
            {
                "prompt": "an orange cross on a brown background",
                "verdict": {"colour": "orange", "shape": "cross", "background": "brown"},
                "colour_right": True,
                "shape_right": True,
            }
        ],
    }


def test_colour_and_shape_are_judged_separately(judge: ModuleType) -> None:
    judged = judge.judge_prompt(
        "a red circle", draw(ShapeSpec("blue", "circle", "black"), 24, 0, 0)
    )
    assert (judged.colour_right, judged.shape_right) == (False, True)


def test_a_run_without_samples_is_an_error(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "nothing to judge" in run.stderr
    assert "Traceback" not in run.stderr
