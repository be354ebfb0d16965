from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gracetune.config.dataset_schema import DatasetSection, ShapesSection
from gracetune.data import demo_dataset
from gracetune.data.demo_dataset import (
    BACKGROUNDS,
    COLOURS,
    MARKER,
    SHAPES,
    ShapeSpec,
    ShapesSource,
    draw,
    held_out,
    open_shapes,
    stencil,
    training_combinations,
)
from gracetune.errors import ConfigError, DataError
from gracetune.events.types import Event, Notice

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ShapesSection(copies=1)


def _open(path: Path, section: ShapesSection = SMALL) -> ShapesSource:
    return ShapesSource(path, section, lambda event: None, "datasets[0]")


def test_the_held_out_third_and_the_rest_contain_every_word() -> None:
    assert len(held_out()) == 32
    assert len(training_combinations()) == 64
    assert not set(held_out()) & set(training_combinations())
    for part in (held_out(), training_combinations()):
        assert {figure.colour for figure in part} == set(COLOURS)
        assert {figure.shape for figure in part} == set(SHAPES)
        assert {figure.background for figure in part} == set(BACKGROUNDS)
    assert held_out()[0] == ShapeSpec("red", "circle", "black")


def test_the_star_concept_has_every_colour_and_background_and_a_held_out_third() -> None:
    assert (len(held_out("star")), len(training_combinations("star"))) == (8, 16)
    assert {figure.shape for figure in training_combinations("star")} == {"star"}
    assert {figure.colour for figure in training_combinations("star")} == set(COLOURS)
    assert {figure.background for figure in training_combinations("star")} == set(BACKGROUNDS)


def test_captions_are_english() -> None:
    assert ShapeSpec("red", "circle", "white").caption == "a red circle on a white background"
    assert ShapeSpec("orange", "star", "gray").caption == "an orange star on a gray background"


@pytest.mark.parametrize("shape", [*SHAPES, "star"])
def test_stencils_stay_within_their_radius(shape: str) -> None:
    mask = np.asarray(stencil(shape, 96, (48, 48), 30)) > 0
    rows, columns = np.nonzero(mask)
    assert mask[48, 48]
    assert set(np.unique(mask)) == {False, True}
    assert 17 <= rows.min() <= 23
    assert max(rows.max(), columns.max()) <= 79
    assert 0.05 < mask.mean() < 0.4


def test_stencils_of_different_shapes_differ() -> None:
    masks = {shape: np.asarray(stencil(shape, 96, (48, 48), 30)) > 0 for shape in (*SHAPES, "star")}
    for one, mask in masks.items():
        for other, another in masks.items():
            overlap = (mask & another).sum() / (mask | another).sum()
            assert (overlap == 1) if one == other else (overlap < 0.9)


def test_an_image_depends_only_on_its_spec_copy_and_seed() -> None:
    figure = ShapeSpec("red", "circle", "white")
    picture = np.asarray(draw(figure, 24, 0, 0))
    assert picture.shape == (24, 24, 3)
    assert np.array_equal(picture, np.asarray(draw(figure, 24, 0, 0)))
    assert not np.array_equal(picture, np.asarray(draw(figure, 24, 1, 0)))
    assert not np.array_equal(picture, np.asarray(draw(figure, 24, 0, 1)))
    assert draw(figure, 64, 0, 0).size == (64, 64)


def test_images_have_the_right_colours_positions_and_sizes() -> None:
    areas, centres = [], []
    for copy in range(40):
        pixels = np.asarray(draw(ShapeSpec("blue", "circle", "black"), 24, copy, 0)).astype(int)
        assert np.abs(pixels[0, 0] - BACKGROUNDS["black"]).max() <= 1
        mask = pixels[..., 2] > 115
        rows, columns = np.nonzero(mask)
        centres.append((rows.mean() + 0.5, columns.mean() + 0.5))
        areas.append(mask.sum())
        middle = pixels[int(rows.mean()), int(columns.mean())]
        assert np.abs(middle - COLOURS["blue"]).max() <= 1
    assert 10.7 <= np.min(centres) < 11.5
    assert 12.5 < np.max(centres) <= 13.3
    radii = np.sqrt(np.array(areas) / np.pi)
    assert 6.7 < radii.min() < 7.5
    assert 8.5 < radii.max() < 9.3


def test_the_folder_is_generated_once(tmp_path: Path) -> None:
    source = _open(tmp_path / "deep/shapes")
    counts = Counter(key.rpartition(".")[2] for key in source.keys())  # noqa: SIM118
    assert counts == {"png": 64, "txt": 64}
    assert source.read("orange-cross-gray-000.txt") == b"an orange cross on a gray background\n"
    assert "red-circle-black-000.png" not in source.keys()  # noqa: SIM118
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["shapes"]
    marker = tmp_path / "deep/shapes" / MARKER
    generated_at = marker.stat().st_mtime_ns
    again = _open(tmp_path / "deep/shapes")
    assert list(again.keys()) == list(source.keys())
    assert marker.stat().st_mtime_ns == generated_at
    assert "generated shapes" in again.describe()


def test_copies_and_concept_determine_the_files(tmp_path: Path) -> None:
    source = _open(tmp_path / "x", ShapesSection(copies=3, concept="star", size=32))
    assert len(source.keys()) == 16 * 3 * 2
    assert source.read("red-star-white-002.txt") == b"a red star on a white background\n"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert len(_open(tmp_path / "x").keys()) == 128


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _open(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / MARKER).exists()


def test_changed_settings_recreate_the_folder_with_a_notice(tmp_path: Path) -> None:
    first = _open(tmp_path / "x")
    events: list[Event] = []
    second = ShapesSource(tmp_path / "x", ShapesSection(copies=2, seed=1), events.append)
    assert len(second.keys()) == 2 * len(first.keys())
    assert [type(event) for event in events] == [Notice]
    assert "recreating the shapes" in str(events[0])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("change", ["add", "edit", "hide", "link"])
def test_files_added_or_edited_by_the_user_are_never_deleted(tmp_path: Path, change: str) -> None:
    _open(tmp_path / "x")
    name = {"add": "mine.png", "edit": "red-cross-white-000.txt", "hide": ".mine/notes"}.get(change)
    if name is None:
        (tmp_path / "x/mine").symlink_to(tmp_path)
    else:
        (tmp_path / "x" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "x" / name).write_text("mine")
    before = sorted(os.listdir(tmp_path / "x"))
    with pytest.raises(
        DataError, match=r"datasets\[0\]\.instance_data_dir.*1 files.*(mine|red-cross)"
    ):
        _open(tmp_path / "x", ShapesSection(copies=2))
    assert sorted(os.listdir(tmp_path / "x")) == before
    _open(tmp_path / "x")


@pytest.mark.parametrize("marker", [None, "not json", "[]", '{"settings": 1, "files": {}}'])
def test_a_folder_that_was_not_generated_is_left_alone(tmp_path: Path, marker: str | None) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    if marker is not None:
        (tmp_path / MARKER).write_text(marker)
    with pytest.raises(DataError, match=r"not generated as shapes.*empty or new"):
        _open(tmp_path)
    assert (tmp_path / "holiday.jpg").read_bytes() == b"precious"


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(DataError, match=r"datasets\[0\]\.instance_data_dir.*cannot be written"):
            _open(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_processes_may_generate_the_folder_at_once(tmp_path: Path) -> None:
    """The slower process finds the same folder already in place."""
    settings = {"drawing": 1, **SMALL.model_dump()}
    _open(tmp_path / "first")
    made = json.loads((tmp_path / "first" / MARKER).read_text())
    assert made["settings"] == settings
    _open(tmp_path / "second")
    demo_dataset._move_into_place(tmp_path / "second", tmp_path / "first", settings, "datasets[0]")
    assert (tmp_path / "second").exists()
    with pytest.raises(OSError, match="not empty"):
        demo_dataset._move_into_place(
            tmp_path / "second", tmp_path / "first", {"other": 1}, "datasets[0]"
        )


def test_an_unknown_concept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"datasets\[0\]\.shapes\.concept is 'moon'; known: star"):
        _open(tmp_path / "x", ShapesSection(concept="moon"))
    assert list(tmp_path.iterdir()) == []


def test_open_shapes_generates_the_folder_of_the_section(tmp_path: Path) -> None:
    section = DatasetSection(type="shapes", instance_data_dir=str(tmp_path / "x"), shapes=SMALL)
    assert len(open_shapes(section, "datasets[0]", lambda event: None).keys()) == 128
    with pytest.raises(DataError, match="'shapes' needs it"):
        open_shapes(DatasetSection(type="shapes"), "datasets[0]", lambda event: None)
