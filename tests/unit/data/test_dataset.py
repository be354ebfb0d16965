from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3
from PIL import Image

from gracetune.config.dataset_schema import DatasetSection, ShapesSection
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


class DatasetOpener:
    """Opens a dataset section and records the events."""

    def __init__(self, root: Path | None, **section: object) -> None:
        self.events: list[Event] = []
        self.log = CorruptionLog(self.events.append)
        values = {"id": "cats", **section}
        if root is not None:
            values["instance_data_dir"] = str(root)
        self.section = DatasetSection.model_validate(values)

    def open(self, index: int = 0, output_dir: Path | None = None) -> OpenDataset:
        return open_dataset(
            self.section, index, self.events.append, self.log, output_dir=output_dir
        )

    def warnings(self) -> list[str]:
        notices = [event for event in self.events if isinstance(event, Notice)]
        return [notice.text for notice in notices if notice.level == "warning"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    (root / "deep").mkdir(parents=True)
    (root / "a.png").write_bytes(_png(30, 20))
    (root / "deep/b.PNG").write_bytes(_png(10, 40))
    (root / "a.txt").write_text("a cat")
    (root / "deep/b.txt").write_text("a tall cat")
    return root


@pytest.mark.parametrize("kind", ["local", "in_memory"])
def test_samples_have_caption_digest_and_size(images: Path, kind: str) -> None:
    opener = DatasetOpener(images, type=kind)
    dataset = opener.open()
    digests = [blake3(_png(*size)).hexdigest() for size in ((30, 20), (10, 40))]
    assert dataset.samples == (
        Sample("cats", "a.png", "a cat", digests[0], 30, 20),
        Sample("cats", "deep/b.PNG", "a tall cat", digests[1], 10, 40),
    )
    assert dataset.section is opener.section
    assert dataset.source.read("a.png") == _png(30, 20)
    assert StageProgress("reading", 2, 2) in opener.events
    assert opener.warnings() == []


def test_a_staged_dataset_can_be_read_after_its_folder_is_deleted(images: Path) -> None:
    dataset = DatasetOpener(images, type="in_memory").open()
    shutil.rmtree(images)
    assert dataset.source.read("deep/b.PNG") == _png(10, 40)


def test_shapes_are_generated_and_staged(tmp_path: Path) -> None:
    opener = DatasetOpener(tmp_path / "made", type="shapes", shapes=ShapesSection(copies=1))
    dataset = opener.open()
    assert len(dataset.samples) == 64
    assert {(sample.width, sample.height) for sample in dataset.samples} == {(24, 24)}
    assert "a red square on a black background" in {sample.caption for sample in dataset.samples}
    shutil.rmtree(tmp_path / "made")
    assert dataset.source.read(dataset.samples[0].key)


@pytest.mark.parametrize("kind", ["local", "in_memory"])
def test_unreadable_images_are_skipped_and_named(images: Path, kind: str) -> None:
    (images / "broken.jpg").write_bytes(_png(9, 9)[:-30])
    (images / "gone.webp").symlink_to(images / "nowhere")
    for name in ("broken.txt", "gone.txt"):
        (images / name).write_text("x")
    opener = DatasetOpener(images, type=kind, max_corruption_rate=0.5)
    assert [sample.key for sample in opener.open().samples] == ["a.png", "deep/b.PNG"]
    assert [entry.key for entry in opener.log.entries] == ["broken.jpg", "gone.webp"]
    assert [text.split(": ")[1] for text in opener.warnings()] == [
        "skipped broken.jpg",
        "skipped gone.webp",
    ]
    assert opener.log.entries[1].reason == "No such file or directory"


def test_too_many_unreadable_images_stop_the_run(images: Path) -> None:
    (images / "broken.png").write_bytes(b"no")
    (images / "broken.txt").write_text("x")
    with pytest.raises(DataError, match=r"1 of 3 samples cannot be used.*broken\.png"):
        DatasetOpener(images, max_corruption_rate=0.33).open()


def test_a_dataset_without_readable_images_is_an_error_at_any_corruption_rate(
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no")
    (tmp_path / "broken.txt").write_text("x")
    with pytest.raises(DataError, match=r"datasets\[4\] \('cats'\): none of the 1 images"):
        DatasetOpener(tmp_path, max_corruption_rate=1.0).open(4)


def test_empty_captions_are_counted_in_a_warning(images: Path) -> None:
    (images / "a.txt").write_text("")
    opener = DatasetOpener(images)
    assert opener.open().samples[0].caption == ""
    (text,) = opener.warnings()
    assert "1 of 2 captions are empty (the first is a.png)" in text


@pytest.mark.parametrize("kind", ["local", "in_memory"])
def test_a_caption_that_is_not_utf8_counts_as_an_unreadable_sample(images: Path, kind: str) -> None:
    (images / "a.txt").write_bytes(b"caf\xe9")
    opener = DatasetOpener(images, type=kind, max_corruption_rate=0.5)
    assert [sample.key for sample in opener.open().samples] == ["deep/b.PNG"]
    (entry,) = opener.log.entries
    assert (entry.key, entry.reason[:29]) == ("a.png", "its caption a.txt is not UTF-")
    with pytest.raises(DataError, match=r"1 of 2 samples cannot be used.*a\.png \(its caption"):
        DatasetOpener(images, type=kind).open()
    for path in images.rglob("*.txt"):
        path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="none of the 2 images"):
        DatasetOpener(images, type=kind, max_corruption_rate=1.0).open()


def test_ignored_files_are_counted_by_suffix_once(images: Path) -> None:
    for name in ("x.psd", "y.PSD", "clip.mp4", "README.md", "notes.txt", ".DS_Store"):
        (images / name).write_bytes(b"x")
    opener = DatasetOpener(images)
    opener.open()
    (text,) = opener.warnings()
    assert text == (
        "dataset 'cats': ignored 3 files that are not images or captions: 2 .psd (such as "
        "x.psd), 1 .mp4 (such as clip.mp4)"
    )


def test_rows_for_absent_files_are_counted_once(images: Path) -> None:
    names = ("a.png", "deep/b.PNG", "gone.png", "gone too.png")
    rows = (json.dumps({"file_name": name, "text": "x"}) for name in names)
    (images / "metadata.jsonl").write_text("\n".join(rows))
    opener = DatasetOpener(images, caption_strategy="jsonl")
    opener.open()
    (text,) = opener.warnings()
    assert "2 rows of caption tables name files that are not in the dataset, such as" in text
    assert text.endswith("metadata.jsonl: gone.png")


def test_text_files_that_a_table_replaces_are_named(images: Path) -> None:
    rows = (json.dumps({"file_name": name, "text": "x"}) for name in ("a.png", "deep/b.PNG"))
    (images / "metadata.jsonl").write_text("\n".join(rows))
    opener = DatasetOpener(images)
    assert {sample.caption for sample in opener.open().samples} == {"x"}
    (text,) = opener.warnings()
    assert "not from 2 text files next to the samples, such as a.txt. Set caption_strategy" in text


@pytest.mark.parametrize("link", [True, False])
def test_files_in_the_output_folder_are_no_samples(
    images: Path, tmp_path: Path, link: bool
) -> None:
    output = tmp_path / "run" if link else images / "runs" / "run"
    (output / "validation").mkdir(parents=True)
    (output / "validation/000.png").write_bytes(_png(9, 9))
    (output / "adapter.safetensors").write_bytes(b"x")
    if link:
        (images / "latest").symlink_to(output)
    opener = DatasetOpener(images)
    assert [s.key for s in opener.open(output_dir=output).samples] == ["a.png", "deep/b.PNG"]
    (text,) = opener.warnings()
    assert text.startswith(f"datasets[0]: skipped 2 files in output_dir ({output})")
    with pytest.raises(DataError, match=r"which is also output_dir.*Set another output_dir"):
        DatasetOpener(images).open(output_dir=images)
    within = DatasetOpener(images / "deep").open(output_dir=images)  # the dataset is in the output
    assert [sample.key for sample in within.samples] == ["b.PNG"]


def test_a_folder_without_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"datasets\[1\].*1 files, but no images.*\.avif \.bmp"):
        DatasetOpener(tmp_path).open(1)
    (tmp_path / "clip.mp4").write_bytes(b"x")
    with pytest.raises(DataError, match=r"but no images\. It has videos: set dataset_type: video"):
        DatasetOpener(tmp_path).open(1)


def test_errors_name_the_setting_in_the_run_file(tmp_path: Path, images: Path) -> None:
    with pytest.raises(DataError, match=r"datasets\[2\]\.instance_data_dir"):
        DatasetOpener(tmp_path / "missing").open(2)
    with pytest.raises(DataError, match=r"datasets\[2\]\.instance_data_dir is not set"):
        DatasetOpener(None).open(2)
    (images / "a.txt").unlink()
    with pytest.raises(DataError, match=r"datasets\[2\]\.caption_strategy"):
        DatasetOpener(images).open(2)
    with pytest.raises(DataError, match=r"datasets\[2\]\.in_memory\.memory_limit_gb"):
        DatasetOpener(
            images,
            type="in_memory",
            caption_strategy="filename",
            in_memory={"memory_limit_gb": 1e-9},
        ).open(2)


def test_an_unknown_type_lists_the_known_ones(images: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"'tape' is not known.* hf, in_memory, local, parquet",
    ):
        DatasetOpener(images, type="tape").open()


def test_importing_the_data_modules_does_not_import_torch() -> None:
    program = (
        "import sys, gracetune.data.dataset, gracetune.data.demo_dataset, gracetune.data.buckets, "
        "gracetune.data.batch_order; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
