from __future__ import annotations

import io
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3
from PIL import Image

from gracetune.config.schema import DatasetSection, ShapesSection
from gracetune.data.dataset import CorruptionLog, OpenDataset, open_dataset
from gracetune.data.sample import Sample
from gracetune.errors import ConfigError, DataError
from gracetune.events.types import Event, Notice, StageProgress

if TYPE_CHECKING:
    from pathlib import Path


def _png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


class Opened:
    """A data set opened, with all that it told."""

    def __init__(self, root: Path | None, **section: object) -> None:
        self.events: list[Event] = []
        self.ledger = CorruptionLog(self.events.append)
        values = {"id": "cats", **section}
        if root is not None:
            values["instance_data_dir"] = str(root)
        self.section = DatasetSection.model_validate(values)

    def open(self, index: int = 0) -> OpenDataset:
        return open_dataset(self.section, index, self.events.append, self.ledger)

    def warnings(self) -> list[str]:
        notices = [event for event in self.events if isinstance(event, Notice)]
        return [notice.text for notice in notices if notice.level == "warning"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    (root / "deep").mkdir(parents=True)
    (root / "a.png").write_bytes(_png(30, 20))
    (root / "deep/b.PNG").write_bytes(_png(10, 40))
    (root / "a.txt").write_text("a cat")
    (root / "deep/b.txt").write_text("a tall cat")
    return root


@pytest.mark.parametrize("kind", ["local", "in_memory"])
def test_samples_have_caption_digest_and_size(pictures: Path, kind: str) -> None:
    opened = Opened(pictures, type=kind)
    dataset = opened.open()
    digests = [blake3(_png(*size)).hexdigest() for size in ((30, 20), (10, 40))]
    assert dataset.samples == (
        Sample("cats", "a.png", "a cat", digests[0], 30, 20),
        Sample("cats", "deep/b.PNG", "a tall cat", digests[1], 10, 40),
    )
    assert dataset.section is opened.section
    assert dataset.source.read("a.png") == _png(30, 20)
    assert StageProgress("reading", 2, 2) in opened.events
    assert opened.warnings() == []


def test_a_staged_data_set_outlives_its_folder(pictures: Path) -> None:
    dataset = Opened(pictures, type="in_memory").open()
    shutil.rmtree(pictures)
    assert dataset.source.read("deep/b.PNG") == _png(10, 40)


def test_shapes_are_made_and_staged(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "made", type="shapes", shapes=ShapesSection(copies=1))
    dataset = opened.open()
    assert len(dataset.samples) == 64
    assert {(sample.width, sample.height) for sample in dataset.samples} == {(24, 24)}
    assert "a red square on a black background" in {sample.caption for sample in dataset.samples}
    shutil.rmtree(tmp_path / "made")
    assert dataset.source.read(dataset.samples[0].key)


@pytest.mark.parametrize("kind", ["local", "in_memory"])
def test_unreadable_pictures_are_left_out_by_name(pictures: Path, kind: str) -> None:
    (pictures / "broken.jpg").write_bytes(_png(9, 9)[:-30])
    (pictures / "gone.webp").symlink_to(pictures / "nowhere")
    for name in ("broken.txt", "gone.txt"):
        (pictures / name).write_text("x")
    opened = Opened(pictures, type=kind, max_corruption_rate=0.5)
    assert [sample.key for sample in opened.open().samples] == ["a.png", "deep/b.PNG"]
    assert [entry.key for entry in opened.ledger.entries] == ["broken.jpg", "gone.webp"]
    assert [text.rpartition(": ")[0] for text in opened.warnings()] == [
        "dataset 'cats': skipped broken.jpg",
        "dataset 'cats': skipped gone.webp",
    ]
    assert opened.ledger.entries[1].reason == "No such file or directory"


def test_too_many_unreadable_pictures_stop_the_run(pictures: Path) -> None:
    (pictures / "broken.png").write_bytes(b"no")
    (pictures / "broken.txt").write_text("x")
    with pytest.raises(DataError, match=r"1 of 3 samples cannot be read.*broken\.png"):
        Opened(pictures, max_corruption_rate=0.33).open()


def test_no_readable_picture_is_an_error_at_any_rate(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no")
    (tmp_path / "broken.txt").write_text("x")
    with pytest.raises(DataError, match=r"datasets\[4\] \('cats'\): none of the 1 images"):
        Opened(tmp_path, max_corruption_rate=1.0).open(4)


def test_empty_captions_are_counted_aloud(pictures: Path) -> None:
    (pictures / "a.txt").write_text("")
    opened = Opened(pictures)
    assert opened.open().samples[0].caption == ""
    (text,) = opened.warnings()
    assert "1 of 2 captions are empty (the first is a.png)" in text


def test_a_folder_without_pictures_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"datasets\[1\].*1 files, but no images.*\.avif \.bmp"):
        Opened(tmp_path).open(1)


def test_errors_carry_the_place_in_the_run_file(tmp_path: Path, pictures: Path) -> None:
    with pytest.raises(DataError, match=r"datasets\[2\]\.instance_data_dir"):
        Opened(tmp_path / "missing").open(2)
    with pytest.raises(DataError, match=r"datasets\[2\]\.instance_data_dir is not set"):
        Opened(None).open(2)
    (pictures / "a.txt").unlink()
    with pytest.raises(DataError, match=r"datasets\[2\]\.caption_strategy"):
        Opened(pictures).open(2)
    with pytest.raises(DataError, match=r"datasets\[2\]\.in_memory\.memory_limit_gb"):
        Opened(
            pictures,
            type="in_memory",
            caption_strategy="filename",
            in_memory={"memory_limit_gb": 1e-9},
        ).open(2)


def test_an_unknown_type_lists_the_known_ones(pictures: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"'tape' is not known.* hf, in_memory, local, parquet",
    ):
        Opened(pictures, type="tape").open()


def test_opening_needs_no_torch() -> None:
    program = (
        "import sys, gracetune.data.dataset, gracetune.data.shapes, gracetune.data.buckets, "
        "gracetune.data.loader; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
