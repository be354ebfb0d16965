"""judge_shapes.py agrees with labels by a person, on samples that small models generated."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples"))

from judge_shapes import judge  # noqa: E402

FOLDER = ROOT / "tests" / "data" / "judged"
LABELS = json.loads((FOLDER / "labels.json").read_text())


def tile(sheet, number):
    left, top = int(number) % 8 * 24, int(number) // 8 * 24
    return Image.open(FOLDER / f"{sheet}.png").crop((left, top, left + 24, top + 24))


@pytest.mark.parametrize(("number", "words"), LABELS["late"].items())
def test_good_samples_are_recognized(number, words):
    verdict = judge(tile("late", number))
    assert [verdict.colour, verdict.shape] == words


@pytest.mark.parametrize(("number", "shape"), LABELS["early_looks_like"].items())
def test_samples_are_judged_by_their_pixels_and_not_by_their_prompt(number, shape):
    assert judge(tile("early", number)).shape in (shape, None)


@pytest.mark.parametrize("sheet", ["early", "rough"])
def test_bad_samples_do_not_pass(sheet):
    passed = {
        n: s for n, s in LABELS[f"{sheet}_is_not"].items() if judge(tile(sheet, n)).shape == s
    }
    assert passed == {}
