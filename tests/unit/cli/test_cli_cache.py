import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gracetune.cache.encode import EncodeItem
from gracetune.cache.import_foreign import _check_centre_crop
from gracetune.cache.keys import text_key
from gracetune.cache.shard_store import ShardStore
from gracetune.cli.main import main
from gracetune.config.schema import RunFile
from gracetune.data.augment import SampleTransform, render
from gracetune.data.sample import Sample
from gracetune.data.source import FolderSource
from gracetune.errors import CacheError
from gracetune.models.family import load_family

NUM_PICTURES = 64


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A run whose cache was built once, to be copied by tests that change it."""
    root = tmp_path_factory.mktemp("built")
    path = write_run(root, root)
    assert main(["cache", "build", str(path)]) == 0
    return root


def write_run(root, data_root, name="run", **dataset):
    section = {
        "id": "shapes",
        "type": "shapes",
        "instance_data_dir": str(data_root / "data"),
        "shapes": {"copies": 1},
        "resolution": 24,
        "max_aspect": 1.0,
    }
    settings = {
        "output_dir": str(root / name),
        "datasets": [section | dataset],
        "cache_config": {"persistent_cache": True, "cache_dir": str(root / "cache")},
        "validation": {"every": 0},
    }
    path = root / f"{name}.json"
    path.write_text(RunFile.model_validate(settings).model_dump_json(exclude_unset=True))
    return path


@pytest.fixture
def root(built, tmp_path):
    """A cache of the test's own, over the same pictures."""
    shutil.copytree(built / "cache", tmp_path / "cache")
    write_run(tmp_path, built)
    return tmp_path


def answer(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["cache", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def lines(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["cache", *map(str, words)]) == code
    return capsys.readouterr().out


def damage_one(folder):
    with ShardStore(folder) as store:
        key = next(store.keys())
        with store.index() as index:
            row = index.find_rows([key])[key]
    (path,) = store.shards.iterdir()
    data = bytearray(path.read_bytes())
    data[row.offset] ^= 1
    path.write_bytes(data)
    return key


def test_a_built_cache_is_whole_and_building_again_encodes_nothing(root, capsys):
    before = answer(capsys, "stats", root / "cache")
    assert before[0]["entries"] == NUM_PICTURES
    assert main(["cache", "build", str(root / "run.json")]) == 0
    assert "encoding" not in capsys.readouterr().err
    after = answer(capsys, "stats", root / "run.json")
    assert [one["nbytes"] for one in after] == [one["nbytes"] for one in before]
    assert all(not one["damage"] for one in answer(capsys, "verify", root / "run.json"))
    assert "64 entries" in lines(capsys, "stats", root / "cache")


def test_building_a_cache_that_would_end_with_the_process_is_refused(root, capsys):
    path = root / "run.json"
    settings = json.loads(path.read_text())
    settings["cache_config"]["persistent_cache"] = False
    path.write_text(json.dumps(settings))
    assert main(["cache", "build", str(path)]) == 2
    assert "persistent_cache is false" in capsys.readouterr().err


def test_an_index_that_does_not_even_open_is_made_again(root, capsys):
    main(["cache", "build", str(root / "run.json")])
    index = root / "cache" / "latents" / "index.sqlite"
    index.write_bytes(b"no database" * 500)
    capsys.readouterr()
    assert main(["cache", "verify", str(root / "cache")]) == 2
    assert f"`gracetune cache verify {index.parent} --repair`" in capsys.readouterr().err
    assert main(["cache", "verify", str(root / "cache"), "--repair"]) == 0
    out, err = capsys.readouterr()
    assert f"was made again from its shards, {NUM_PICTURES} entries" in out + err
    assert "all whole" in lines(capsys, "verify", root / "cache")


def test_damage_is_named_repaired_and_encoded_again(root, capsys):
    key = damage_one(root / "cache" / "latents")
    latents, text = answer(capsys, "verify", root / "cache", code=1)
    assert latents["damage"] == {f"entry {key}": "its bytes differ from their checksum"}
    assert text["damage"] == {}
    assert "--repair" in lines(capsys, "verify", root / "cache", code=1)
    assert "repaired" in lines(capsys, "verify", root / "cache", "--repair")
    assert answer(capsys, "verify", root / "cache")[0]["entries"] == NUM_PICTURES - 1
    damage_one(root / "cache" / "latents")
    lines(capsys, "verify", root / "run.json", "--repair")
    (again, _) = answer(capsys, "verify", root / "cache")
    assert (again["entries"], again["damage"]) == (NUM_PICTURES, {})


def test_collecting_shows_first_and_keeps_what_any_named_run_needs(root, built, capsys):
    small = write_run(root, built, "small", resolution=16)
    assert main(["cache", "build", str(small)]) == 0
    both = answer(capsys, "gc", root / "run.json", small)
    assert [one["entries"] for one in both] == [0, 0]
    shown = answer(capsys, "gc", small)
    assert (shown[0]["entries"], shown[0]["deleted"]) == (NUM_PICTURES, False)
    assert "would delete 64 entries" in lines(capsys, "gc", small)
    assert answer(capsys, "stats", root / "cache")[0]["entries"] == 2 * NUM_PICTURES
    deleted = answer(capsys, "gc", small, "--yes")
    assert (deleted[0]["entries"], deleted[0]["freed_nbytes"] >= 0) == (NUM_PICTURES, True)
    assert all(not one["damage"] for one in answer(capsys, "verify", root / "cache"))
    assert answer(capsys, "gc", small)[0]["entries"] == 0
    assert answer(capsys, "gc", root / "run.json")[0]["entries"] == NUM_PICTURES


def test_a_folder_without_our_marker_is_never_touched(root, capsys):
    for kind in ("latents", "text"):
        (root / "cache" / kind / "gracetune-cache.json").unlink()
    before = sorted(root.rglob("*"))
    assert main(["cache", "gc", str(root / "run.json"), "--yes"]) == 2
    assert "no cache of gracetune's" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before


def test_nothing_is_collected_while_a_sample_cannot_be_read(root, tmp_path, built, capsys):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "torn.png").write_bytes(b"no picture")
    shutil.copy(next((built / "data").rglob("*.png")), pictures / "good.png")
    for name in ("torn", "good"):
        (pictures / f"{name}.txt").write_text("a shape")
    section = {"instance_data_dir": str(pictures), "max_corruption_rate": 1.0}
    path = write_run(root, built, "torn", type="local", **section)
    settings = json.loads(path.read_text())
    del settings["datasets"][0]["shapes"]
    path.write_text(json.dumps(settings))
    assert main(["cache", "gc", str(path), "--yes"]) == 2
    told = capsys.readouterr().err
    assert "'torn.png'" in told
    assert "cannot be told from leftovers" in told
    assert answer(capsys, "stats", root / "cache")[0]["entries"] == NUM_PICTURES


def test_a_key_and_a_picture_are_explained(root, built, capsys):
    picture = next((built / "data").rglob("*.png"))
    (entry,) = answer(capsys, "inspect", root / "cache", picture)
    assert entry["made_of"]["kind"] == "latents"
    assert "24x24" in entry["made_of"]["geometry"]
    told = lines(capsys, "inspect", root / "run.json", entry["key"][:12])
    assert "geometry" in told
    assert "digest of the file's bytes" in told
    assert "tensor latents: F32" in told
    assert main(["cache", "inspect", str(root / "cache"), "nonsense"]) == 2
    assert "has no entry" in capsys.readouterr().err


@pytest.fixture
def foreign(root, built):
    """What ai-toolkit would have left beside the pictures, for two of them."""
    run = RunFile.model_validate_json((root / "run.json").read_text())
    family = load_family(run.model)
    folder = root / "theirs" / "_latent_cache"
    folder.mkdir(parents=True)
    shutil.rmtree(root / "cache" / "latents")
    crop = {"scale_to_width": "24", "scale_to_height": "24", "crop_x": "0", "crop_y": "0"}
    crop |= {"crop_width": "24", "crop_height": "24", "flip_x": "false"}
    pictures = sorted((built / "data").rglob("*.png"))[:2]
    for picture in pictures:
        latent = family.encode(render(picture.read_bytes(), plain(), (24, 24))[None])[0]
        name = folder / f"{picture.stem}_{'h' * 22}.safetensors"
        save_file({"latent": latent.contiguous()}, name, crop)
    return folder


def plain():
    from gracetune.data.augment import DEFAULT_TRANSFORM

    return DEFAULT_TRANSFORM


def test_entries_of_ai_toolkit_are_taken_over_where_they_fit(root, foreign, capsys):
    shown = answer(capsys, "import", root / "run.json", foreign)
    assert (len(shown["imported"]), shown["left_out"]) == (2, {})
    assert "would import 2" in lines(capsys, "import", root / "run.json", foreign)
    answer(capsys, "import", root / "run.json", foreign, "--yes")
    assert answer(capsys, "stats", root / "cache")[0]["entries"] == 2
    (entry,) = answer(capsys, "inspect", root / "cache", shown["imported"][0])
    assert entry["made_of"]["imported from"].endswith(".safetensors")
    assert main(["cache", "build", str(root / "run.json")]) == 0
    assert answer(capsys, "stats", root / "cache")[0]["entries"] == NUM_PICTURES


def test_entries_that_do_not_fit_are_left_out_by_name_and_reason(root, foreign, capsys):
    first, second = sorted(foreign.iterdir())
    noise = torch.randn(*shape_of(first))
    save_file({"latent": noise}, first)
    os.utime(second, (1, 1))
    save_file({"latent": noise}, foreign / f"stranger_{'h' * 22}.safetensors")
    save_file({"other": noise}, foreign / f"{first.stem[:-23]}_{'i' * 22}.safetensors")
    texts = foreign.parent / "_t_e_cache"
    texts.mkdir()
    save_file({"text_embed": noise}, texts / first.name)
    turned = {"crop_width": "24", "crop_x": "9", "crop_height": "24", "crop_y": "0"}
    save_file({"latent": noise}, foreign / f"{first.stem[:-23]}_{'j' * 22}.safetensors", turned)
    save_file(
        {"latent": noise},
        foreign / f"{first.stem[:-23]}_{'k' * 22}.safetensors",
        {"flip_x": "true"},
    )
    save_file({"latent": noise[:1]}, foreign / f"{first.stem[:-23]}_{'l' * 22}.safetensors")
    told = answer(capsys, "import", root / "run.json", foreign.parent)
    assert told["imported"] == []
    reasons = {Path(path).stem[-1]: why for path, why in told["left_out"].items()}
    assert "no latents" in reasons["i"]
    assert "not the centre" in reasons["j"]
    assert "flipped" in reasons["k"]
    assert "its latents are" in reasons["l"]
    every = " ".join(told["left_out"].values())
    for reason in ("another encoder", "newer than the entry", "'stranger'", "like our 'tokens'"):
        assert reason in every


@pytest.mark.parametrize("crop", ["top", "random"])
def test_centre_crops_are_left_out_where_the_run_crops_elsewhere(
    root, foreign, built, capsys, crop
):
    path = write_run(root, built, "elsewhere", crop=crop)
    told = answer(capsys, "import", path, foreign)
    assert told["imported"] == []
    for why in told["left_out"].values():
        assert "crop of the dataset 'shapes' is not center" in why


def test_an_entry_of_a_video_does_not_say_which_frames_it_is_of(built):
    sample = Sample("clips", "a.mp4", "", "abc", 64, 48, "video")
    picture = EncodeItem(sample, (64, 48, 5), FolderSource(built), SampleTransform(rate=24.0))
    with pytest.raises(CacheError, match=r"'clips'.*which frames"):
        _check_centre_crop(picture)


def test_an_entry_that_two_pictures_could_be_meant_by_is_left_out(root, foreign, built, capsys):
    """Their names have no folder: 'cats/001' and 'dogs/001' are one to them."""
    first, second = sorted((built / "data").rglob("*.png"))[:2]
    data = root / "twins" / "data"
    for folder, picture in (("cats", first), ("dogs", second)):
        (data / folder).mkdir(parents=True)
        shutil.copy2(picture, data / folder / f"{first.stem}.png")
        (data / folder / f"{first.stem}.txt").write_text(f"one of the {folder}")
    path = write_run(root, root / "twins", "twins", type="in_memory")
    settings = json.loads(path.read_text())
    del settings["datasets"][0]["shapes"]
    path.write_text(json.dumps(settings))
    told = answer(capsys, "import", path, foreign)
    assert told["imported"] == []
    reasons = {Path(name).name: why for name, why in told["left_out"].items()}
    assert (
        f"2 samples of the run are called {first.stem!r}"
        in reasons[f"{first.stem}_{'h' * 22}.safetensors"]
    )


@pytest.fixture
def texts(root, built, capsys):
    """What the tools would have kept of three captions: padded, in their names and precision."""
    run = RunFile.model_validate_json((root / "run.json").read_text())
    family = load_family(run.model)
    pictures = sorted((built / "data").rglob("*.png"))[:3]
    captions = [picture.with_suffix(".txt").read_text().strip() for picture in pictures]
    tokens = [entry["tokens"] for entry in family.encode_text(captions)]
    padded = [torch.cat([t, torch.zeros(40 - len(t), t.shape[1])])[None] for t in tokens]
    folder = root / "theirs"
    (folder / "_t_e_cache").mkdir(parents=True)
    shutil.rmtree(root / "cache" / "text")
    named = folder / "_t_e_cache" / f"{pictures[0].stem}_{'h' * 22}.safetensors"
    mask = torch.arange(40) < len(tokens[0])
    save_file({"text_embed": padded[0].half(), "attention_mask": mask.long()}, named)
    told = folder / "_t_e_cache" / f"other_{'h' * 22}.safetensors"
    save_file({"text_embed": padded[1].half()}, told, {"caption": json.dumps(captions[1])})
    digest = hashlib.md5(captions[2].encode()).hexdigest()
    torch.save({"prompt_embeds": padded[2]}, folder / f"{digest}-tiny.pt")
    return folder, captions, tokens


def test_texts_of_both_tools_are_taken_over_without_their_padding(root, texts, capsys):
    folder, captions, tokens = texts
    told = answer(capsys, "import", root / "run.json", folder, "--yes")
    assert (len(told["imported"]), told["left_out"]) == (3, {})
    identity = load_family(
        RunFile.model_validate_json((root / "run.json").read_text()).model
    ).identity()["text"]
    with ShardStore(root / "cache" / "text") as store:
        kept = [store.get(text_key(caption, identity)) for caption in captions]
    for entry, ours in zip(kept, tokens, strict=True):
        torch.testing.assert_close(entry["tokens"], ours, rtol=2e-3, atol=2e-3)


def test_texts_that_do_not_tell_their_caption_are_left_out(root, texts, built, capsys):
    folder, *_ = texts
    (pt,) = folder.glob("*.pt")
    pt.rename(folder / f"{'0' * 32}-tiny.pt")
    first, second = sorted((folder / "_t_e_cache").iterdir(), key=lambda p: "other" in p.name)
    os.utime(first, (1, 1))
    embed = torch.zeros(1, 40, 64)
    save_file({"text_embed": embed}, second, {"caption": "never heard of"})
    save_file({"text_embed": embed}, second.with_name(f"stranger_{'i' * 22}.safetensors"))
    told = answer(capsys, "import", root / "run.json", folder)
    assert told["imported"] == []
    every = " ".join(told["left_out"].values())
    for reason in (
        "a caption that the run does not have",
        "the text file is newer",
        "no caption 'never heard of'",
        "no sample of the run is called 'stranger'",
    ):
        assert reason in every


def test_old_generations_are_collected_and_what_is_read_next_is_kept(root, built, capsys):
    modes = {"augmentations_cache_mode": "refresh_each_epoch", "crop": "random"}
    path = write_run(root, built, "fresh", **modes)
    run = RunFile.model_validate_json(path.read_text())
    assert main(["cache", "build", str(path)]) == 0
    folder = Path(run.output_dir) / "generations"
    for number in (1, 2, 3, 7):
        ShardStore(folder / f"generation-{number}").close()
    (folder / "rank-0-reads").write_text("2")
    (folder / "generation-9").mkdir()
    shown = [one for one in answer(capsys, "gc", path) if "generation-" in one["folder"]]
    assert [Path(one["folder"]).name for one in shown] == ["generation-1", "generation-7"]
    assert "this augmentation epoch" in lines(capsys, "gc", path, "--yes")
    left = sorted(one.name for one in folder.glob("generation-*"))
    assert left == ["generation-2", "generation-3", "generation-9"]
    done = Path(run.output_dir) / "checkpoints" / f"step-{run.train.max_train_steps:08d}"
    done.mkdir(parents=True)
    (done / "manifest.json").write_text("{}")
    answer(capsys, "gc", path, "--yes")
    assert [one.name for one in folder.glob("generation-*")] == ["generation-9"]


def test_a_folder_with_nothing_to_import_is_an_error(root, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["cache", "import", str(root / "run.json"), str(tmp_path / "empty")]) == 2
    assert "nothing to import" in capsys.readouterr().err


def shape_of(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.get_slice("latent").get_shape()
