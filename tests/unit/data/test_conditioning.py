from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from media_files import image_bytes, photo
from PIL import Image

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.augment import render, render_control, render_mask, sample_transform
from gracetune.data.conditioning import JoinedSource, same_aspect
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.source import FileRange, FolderSource
from gracetune.data.source_contract import CHECKS, Check
from gracetune.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from gracetune.data.dataset import OpenDataset
    from gracetune.events.types import Event


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Two images with controls and masks of other formats and sizes, and an unused control."""
    for name in ("pictures/deep", "controls/deep", "masks/deep"):
        (tmp_path / name).mkdir(parents=True)
    for stem, seed in (("a", 1), ("deep/b", 2)):
        pixels = photo(60, 40, seed)
        (tmp_path / f"pictures/{stem}.png").write_bytes(image_bytes(pixels))
        large = np.asarray(Image.fromarray(pixels).resize((120, 80), Image.Resampling.BICUBIC))
        (tmp_path / f"controls/{stem}.webp").write_bytes(image_bytes(large, "WEBP", lossless=True))
        mask = (pixels[..., 0] > 120).astype(np.uint8) * 255
        (tmp_path / f"masks/{stem}.PNG").write_bytes(image_bytes(mask))
    (tmp_path / "controls/c.webp").write_bytes(b"of nothing")
    return tmp_path


def _open(folders: Path, **settings: object) -> tuple[OpenDataset, list[Event]]:
    events: list[Event] = []
    values = {
        "id": "cats",
        "caption_strategy": "filename",
        "instance_data_dir": str(folders / "pictures"),
        "conditioning_data_dir": str(folders / "controls"),
        "mask_data_dir": str(folders / "masks"),
        **settings,
    }
    section = DatasetSection.model_validate(values)
    return open_dataset(section, 0, events.append, CorruptionLog(events.append)), events


@pytest.mark.parametrize("kind", ["local", "in_memory"])
def test_companions_are_found_by_stem_and_read_from_one_source(folders: Path, kind: str) -> None:
    dataset, _ = _open(folders, type=kind)
    pairs = [[(c.role, c.key) for c in sample.companions] for sample in dataset.samples]
    assert pairs == [
        [("control", "(control) a.webp"), ("mask", "(mask) a.PNG")],
        [("control", "(control) deep/b.webp"), ("mask", "(mask) deep/b.PNG")],
    ]
    for sample in dataset.samples:
        for companion in sample.companions:
            folder = {"control": "controls", "mask": "masks"}[companion.role]
            on_disk = folders / folder / companion.key.partition(") ")[2]
            assert dataset.source.read(companion.key) == on_disk.read_bytes()
    assert len({c.digest for sample in dataset.samples for c in sample.companions}) == 4


def test_every_folder_gives_a_control_image_in_the_order_of_the_list(folders: Path) -> None:
    shutil.copytree(folders / "masks", folders / "materials")
    both = [str(folders / "controls"), str(folders / "materials")]
    dataset, _ = _open(folders, conditioning_data_dir=both)
    pairs = [[(c.role, c.key) for c in sample.companions] for sample in dataset.samples]
    assert pairs[0] == [
        ("control", "(control) a.webp"),
        ("control", "(control 2) a.PNG"),
        ("mask", "(mask) a.PNG"),
    ]
    sample = dataset.samples[0]
    names = ["controls/a.webp", "materials/a.PNG"]
    assert [dataset.source.read(c.key) for c in sample.controls] == [
        (folders / name).read_bytes() for name in names
    ]


def test_a_list_of_one_folder_is_that_folder(folders: Path) -> None:
    folder = str(folders / "controls")
    one, listed = (_open(folders, conditioning_data_dir=x)[0] for x in (folder, [folder]))
    assert one.samples == listed.samples


def test_a_missing_control_image_is_an_error_that_names_its_folder(folders: Path) -> None:
    (folders / "materials").mkdir()
    shutil.copy(folders / "masks/a.PNG", folders / "materials")
    both = [str(folders / "controls"), str(folders / "materials")]
    with pytest.raises(DataError, match=r"conditioning_data_dir is '.*materials': 1 of 2 samples"):
        _open(folders, conditioning_data_dir=both)


def test_image_control_and_mask_are_augmented_alike(folders: Path) -> None:
    dataset, _ = _open(
        folders,
        crop="random",
        augmentations=[
            {"name": "flip", "probability": 1},
            {"name": "rotate", "probability": 1, "amount": 20},
            {"name": "contrast", "probability": 1, "amount": 0.9},
        ],
    )
    for sample in dataset.samples:
        recipe = sample_transform(dataset.section, sample, seed=3)
        control, mask = (dataset.source.read(c.key) for c in sample.companions)
        image = render(dataset.source.read(sample.key), recipe, (32, 32))
        rendered_control = render_control(control, recipe, (32, 32), (32, 32))
        rendered_mask = render_mask(mask, recipe, (32, 32))
        assert tuple(rendered_mask.shape) == (1, 32, 32)
        assert 0 <= float(rendered_mask.min()) < float(rendered_mask.max()) <= 1
        aligned = np.corrcoef(image[0].flatten(), rendered_control[0].flatten())[0, 1]
        mirrored = np.corrcoef(image[0].flatten(), rendered_control[0].flip(1).flatten())[0, 1]
        assert aligned > 0.95 > mirrored
        assert np.corrcoef(image[0].flatten(), rendered_mask[0].flatten())[0, 1] > 0.7
        assert float((image - rendered_control).abs().mean()) > 0.01  # the image has other colours


def test_a_missing_companion_is_an_error_that_names_the_image(folders: Path) -> None:
    (folders / "masks/deep/b.PNG").unlink()
    with pytest.raises(DataError, match=r"datasets\[0\]\.mask_data_dir.*1 of 2.*deep/b\.png\. Add"):
        _open(folders)


def test_two_companions_with_the_same_stem_are_an_error(folders: Path) -> None:
    (folders / "controls/a.jpg").write_bytes(b"x")
    with pytest.raises(
        DataError, match=r"a\.jpg and a\.webp have the same name without suffix\. Keep one"
    ):
        _open(folders)


def test_a_missing_folder_is_an_error_that_names_the_setting(folders: Path) -> None:
    with pytest.raises(DataError, match=r"^datasets\[0\]\.conditioning_data_dir is '.*nowhere'"):
        _open(folders, conditioning_data_dir=str(folders / "nowhere"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no picture", r"its companion \(mask\) a\.PNG: not an image"),
        (
            image_bytes(photo(40, 40)),
            r"\(mask\) a\.PNG is 40x40, which has another aspect ratio than 60x40",
        ),
    ],
)
def test_a_sample_with_an_invalid_companion_is_skipped(
    folders: Path, content: bytes, reason: str
) -> None:
    (folders / "masks/a.PNG").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        _open(folders)
    dataset, _ = _open(folders, max_corruption_rate=0.5)
    assert [sample.key for sample in dataset.samples] == ["deep/b.png"]


def test_aspect_ratios_are_compared_with_a_tolerance() -> None:
    assert same_aspect((1024, 768), (341, 256))
    assert not same_aspect((1024, 768), (768, 1024))
    assert not same_aspect((1000, 1000), (1000, 960))


def test_a_joined_source_separates_its_parts_by_prefix(folders: Path) -> None:
    pictures, masks = FolderSource(folders / "pictures"), FolderSource(folders / "masks")
    joined = JoinedSource({"": pictures, "(mask) ": masks})
    assert joined.keys() == ("(mask) a.PNG", "(mask) deep/b.PNG", "a.png", "deep/b.png")
    assert joined.nbytes("(mask) a.PNG") == (folders / "masks/a.PNG").stat().st_size
    assert joined.describe() == f"{pictures.describe()} with {masks.describe()}"
    with pytest.raises(FileNotFoundError, match=r"has no 'b\.png'"):
        joined.read("b.png")
    (folders / "pictures/(mask) a.PNG").write_bytes(b"x")
    with pytest.raises(DataError, match=r"'\(mask\) a\.PNG' is also the name of a sample"):
        JoinedSource({"": FolderSource(folders / "pictures"), "(mask) ": masks})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_joined_source_fulfils_the_source_contract(folders: Path, check: Check) -> None:
    parts = {"": FolderSource(folders / "pictures"), "(mask) ": FolderSource(folders / "masks")}
    check(
        JoinedSource(parts),
        {prefix + key: part.read(key) for prefix, part in parts.items() for key in part.keys()},  # noqa: SIM118
    )


def test_a_joined_source_has_places_and_stamps_where_its_parts_do(folders: Path) -> None:
    class GeneratedSource:
        """A source without `place` and `stamp`."""

        def keys(self) -> list[str]:
            return ["m"]

        def read(self, key: str) -> bytes:
            return b"made"

        def nbytes(self, key: str) -> int:
            return 4

        def describe(self) -> str:
            return "made"

    joined = JoinedSource({"": FolderSource(folders / "pictures"), "(made) ": GeneratedSource()})
    assert joined.place("a.png") == FileRange(str(folders / "pictures/a.png"), 0, None)
    assert joined.place("(made) m") is None
    before = joined.stamp(["a.png", "(made) m"])
    assert joined.stamp(["a.png"]) == before
    assert joined.stamp(["deep/b.png"]) != before
    (folders / "pictures/a.png").unlink()
    assert joined.stamp(["a.png"]) != before
