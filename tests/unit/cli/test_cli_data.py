"""`gracetune data check` reports what training would see, and whether it would stop a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from gracetune.cli.main import main
from gracetune.config.presets import FAMILY_PRESETS
from gracetune.data.pipeline import DataPipeline
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight photos with tags, one of them twice, one small, and a file that is no sample."""
    root = tmp_path / "photos"
    root.mkdir()
    for number in range(6):
        size = (96, 64) if number % 2 else (64, 64)
        (root / f"{number}.png").write_bytes(image_bytes(photo(*size, number)))
        (root / f"{number}.txt").write_text(
            "1girl, hat, park" if number % 2 else "1girl, solo, sea"
        )
    (root / "copy.png").write_bytes((root / "1.png").read_bytes())
    (root / "copy.txt").write_text("")
    (root / "again.jpg").write_bytes(image_bytes(photo(64, 64, 0), "JPEG", quality=80))
    (root / "again.txt").write_text("a, b, c")
    (root / "small.png").write_bytes(image_bytes(photo(24, 24, 9)))
    (root / "small.txt").write_text("a, b, c")
    (root / "notes.psd").write_text("x")
    return root


def check(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict]:
    code = main(["data", "check", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_folder_is_reported_as_training_would_see_it(folder, capsys) -> None:
    code, answer = check(capsys, folder, "--family", "tiny", "--resolution", "48")
    (found,) = answer["datasets"]
    assert (code, answer["would_stop"], found["problems"]) == (0, False, [])
    assert (found["files"], found["samples"], found["kind"]) == (19, 9, "image")
    assert [(b["width"], b["height"], b["samples"]) for b in found["buckets"]] == [
        (48, 48, 5),
        (56, 40, 4),
    ]
    (small,) = found["enlarged"]
    assert (small["key"], small["size"], small["bucket"]) == ("small.png", [24, 24], [48, 48])
    assert found["exact_duplicates"] == [["1.png", "copy.png"]]
    assert found["near_duplicates"] == [["0.png", "again.jpg"]]
    captions = found["captions"]
    assert captions["are_tags"]
    assert captions["tags"][0] == ["1girl", 6]
    assert (captions["empty"], captions["missing"]) == (["copy.png"], [])
    assert any("1 .psd" in text for text in found["warnings"])
    assert main(["data", "check", str(folder), "--family", "tiny", "--resolution", "48"]) == 0
    assert capsys.readouterr().out.endswith("\nThe data is fine.\n")


def test_the_text_names_every_finding(folder, capsys) -> None:
    (folder / "4.txt").unlink()
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "broken.txt").write_text("x")
    assert main(["data", "check", str(folder), "--family", "tiny", "--resolution", "48"]) == 1
    text = capsys.readouterr().out
    for line in (
        f"dataset    {folder.name}\ndata       the folder {folder}, ",
        "images     9 readable (",
        "           smallest 24x24, median 64x64, largest 96x64 (by area)\n",
        "56x40              4",
        "without a caption: 1\n             4.png",
        "most frequent: 1girl (5), ",
        "small.png: 24x24, enlarged 2.00 times to fill 48x48",
        "1.png = copy.png",
        "0.png ~ again.jpg",
        "left out   cannot be used: 1\n             broken.png: not an image in a known format",
        "problem    datasets[0].caption_strategy is 'auto': 1 of 10 samples have no caption: 4.png",
        "1 of 10 samples cannot be used, but max_corruption_rate is 0.01",
        "A run would stop: 2 problems.",
    ):
        assert line in text


def test_skipped_entries_of_a_folder_are_warnings_but_a_broken_sample_is_named_once(
    folder, capsys
) -> None:
    (folder / "out").mkdir()
    (folder / "linked").symlink_to(folder / "out")
    (folder / "out" / "sample.png").write_bytes(b"no image")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "broken.txt").write_text("x")
    file = folder.with_name("run.json")
    dataset = {"instance_data_dir": str(folder), "resolution": 48}
    run = {"model": {"family": "tiny"}, "output_dir": str(folder / "out"), "datasets": [dataset]}
    file.write_text(json.dumps(run))
    (found,) = check(capsys, file)[1]["datasets"]
    assert [one["key"] for one in found["broken"]] == ["broken.png"]
    skipped = [text for text in found["warnings"] if "skipped" in text]
    assert "such as linked" in skipped[0]
    assert "skipped 1 files in output_dir" in skipped[1]
    assert len(skipped) == 2


def test_pairs_are_counted_and_a_pair_that_differs_is_left_out(tmp_path, capsys) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        for index in range(5):
            noise = Image.effect_noise((64, 48), 60 + index)
            noise.convert("RGB").save(tmp_path / name / f"{index}.png")
            (tmp_path / name / f"{index}.txt").write_text("make it winter")
    dataset = {
        "instance_data_dir": str(tmp_path / "after"),
        "conditioning_data_dir": str(tmp_path / "before"),
        "resolution": 48,
    }
    run = {"model": {"family": "qwen_image"}, "datasets": [dataset]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert main(["data", "check", str(tmp_path / "run.json")]) == 0
    line = f"pairs      5 of 5 have a control image in {tmp_path / 'before'}\n"
    assert line in capsys.readouterr().out
    Image.new("RGB", (64, 64)).save(tmp_path / "before" / "3.png")
    assert main(["data", "check", str(tmp_path / "run.json")]) == 1
    text = capsys.readouterr().out
    assert "pairs      4 of 5 have a usable control image in" in text
    assert "left out   cannot be used: 1\n             3.png: " in text
    assert "unreadable" not in text


def test_a_run_is_checked_with_its_own_settings_and_buckets(
    folder, tiny_run, capsys, tmp_path, recorder
) -> None:
    dataset = {
        "id": "d",
        "instance_data_dir": str(folder),
        "resolution": 32,
        "trigger_word": "ohwx",
        "caption_shuffle": True,
        "caption_variants": 3,
    }
    run = tiny_run(datasets=[dataset])
    file = tmp_path / "run.json"
    file.write_text(run.model_dump_json())
    code, answer = check(capsys, file)
    (found,) = answer["datasets"]
    assert (code, found["captions"]["orders"], found["captions"]["empty"]) == (0, 3, [])

    import torch

    from gracetune.cache.batch_transfer import build_batch_transfer
    from gracetune.models.tiny import load

    output = Path(run.output_dir)
    output.mkdir(exist_ok=True)
    transfer = build_batch_transfer(run.gh200_optimizations, torch.device("cpu"), recorder)
    pipeline = DataPipeline(run, load(run.model), transfer, output, recorder)
    trained = json.loads((output / "buckets-0.json").read_text())
    assert found["buckets"] == trained["buckets"]
    assert len(pipeline.train_samples) == found["samples"]
    assert main(["data", "check", str(file), "--family", "tiny"]) == 2
    assert "--family is for folders" in capsys.readouterr().err


def test_captions_are_counted_with_the_tokenizer_of_a_local_model(folder, capsys, tmp_path) -> None:
    words = {word: number for number, word in enumerate(["[UNK]", "w"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    (tmp_path / "model" / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "model" / "tokenizer" / "tokenizer.json"))
    (folder / "3.txt").write_text("w " * 78)
    (folder / "2.txt").write_text("w " * 77)
    file = tmp_path / "run.json"
    sections = {
        "model": {"family": "sd15", "path": str(tmp_path / "model")},
        "datasets": [{"instance_data_dir": str(folder), "resolution": 64}],
    }
    file.write_text(json.dumps(sections))
    _, answer = check(capsys, file)
    assert answer["datasets"][0]["captions"]["too_long"] == ["3.png"]


def test_videos_and_audio_are_recognised(tmp_path, capsys) -> None:
    clips, sounds = tmp_path / "clips", tmp_path / "sounds"
    clips.mkdir()
    sounds.mkdir()
    (clips / "a.mp4").write_bytes(video_bytes(grey_frames(24), fps=12))
    (clips / "a.txt").write_text("grey")
    (sounds / "a.wav").write_bytes(audio_bytes(tone(12.0, 8000, 440), 8000))
    (sounds / "a.txt").write_text("a tone")
    assert main(["data", "check", str(clips)]) == 1  # a clip has 81 frames by default
    text = capsys.readouterr().out
    assert "2 to 2 s long" in text
    assert "12 fps (1); 24 to 24 frames" in text
    assert "all 1 samples are dropped" in text
    code, answer = check(capsys, sounds)
    assert (code, answer["datasets"][0]["kind"]) == (0, "audio")


def test_a_missing_folder_is_a_problem(tmp_path, capsys) -> None:
    code, answer = check(capsys, tmp_path / "nowhere")
    assert code == 1
    assert "nowhere" in answer["datasets"][0]["problems"][0]


@pytest.mark.parametrize("resolution", ["0", "7"])
def test_a_resolution_that_no_run_may_have_is_refused(folder, capsys, resolution) -> None:
    assert main(["data", "check", str(folder), "--resolution", resolution]) == 2
    assert f"--resolution is {resolution}; it must be at least 8." in capsys.readouterr().err


def test_checking_does_not_load_torch(folder) -> None:
    script = (
        "import sys; from gracetune.cli.main import main\n"
        f"main(['data', 'check', {str(folder)!r}])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_family_has_a_preset() -> None:
    assert set(FAMILY_PRESETS) == set(FAMILIES)
