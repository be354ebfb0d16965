import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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
from gracetune.events.run_control import reserve_folder
from gracetune.models.family import load_family

NUM_IMAGES = 64


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a run whose cache was built once; tests that change it use a copy."""
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
    """A copy of the cache that the test may change, over the same images."""
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


def test_a_built_cache_has_no_damage_and_building_again_encodes_nothing(root, capsys):
    before = answer(capsys, "stats", root / "cache")
    assert before[0]["entries"] == NUM_IMAGES
    assert main(["cache", "build", str(root / "run.json")]) == 0
    assert "encoding" not in capsys.readouterr().err
    after = answer(capsys, "stats", root / "run.json")
    assert [one["nbytes"] for one in after] == [one["nbytes"] for one in before]
    assert all(not one["damage"] for one in answer(capsys, "verify", root / "run.json"))
    assert "64 entries" in lines(capsys, "stats", root / "cache")


def test_building_a_cache_that_is_not_persistent_is_refused(root, capsys):
    path = root / "run.json"
    settings = json.loads(path.read_text())
    settings["cache_config"]["persistent_cache"] = False
    path.write_text(json.dumps(settings))
    assert main(["cache", "build", str(path)]) == 2
    assert "persistent_cache is false" in capsys.readouterr().err


def test_building_in_the_folder_of_a_running_run_is_refused(root, capsys):
    (root / "run").mkdir()
    with reserve_folder(root / "run", pytest.fail):
        assert main(["cache", "build", str(root / "run.json")]) == 2
    assert f"in use by process {os.getpid()} on " in capsys.readouterr().err


def test_building_where_no_folder_can_be_is_refused(root, capsys):
    words = ["--set", f"output_dir={root / 'run.json'}"]
    assert main(["cache", "build", str(root / "run.json"), *words]) == 2
    assert "run.json', which cannot be written" in capsys.readouterr().err


def test_an_index_that_cannot_be_opened_is_rebuilt(root, capsys):
    main(["cache", "build", str(root / "run.json")])
    index = root / "cache" / "latents" / "index.sqlite"
    index.write_bytes(b"no database" * 500)
    capsys.readouterr()
    out = lines(capsys, "verify", root / "cache", code=1)
    assert f"`gracetune cache verify {index.parent} --repair`" in out
    assert main(["cache", "verify", str(root / "cache"), "--repair"]) == 0
    out, err = capsys.readouterr()
    assert f"was rebuilt from its shards: {NUM_IMAGES} entries" in out + err
    assert "no damage" in lines(capsys, "verify", root / "cache")


def test_damage_is_named_and_repaired(root, capsys):
    key = damage_one(root / "cache" / "latents")
    latents, text = answer(capsys, "verify", root / "cache", code=1)
    assert latents["damage"] == {f"entry {key}": "its bytes differ from their checksum"}
    assert text["damage"] == {}
    assert "--repair" in lines(capsys, "verify", root / "cache", code=1)
    assert "Repaired." in lines(capsys, "verify", root / "cache", "--repair")
    assert answer(capsys, "verify", root / "cache")[0]["entries"] == NUM_IMAGES - 1
    damage_one(root / "cache" / "latents")
    lines(capsys, "verify", root / "run.json", "--repair")
    (again, _) = answer(capsys, "verify", root / "cache")
    assert (again["entries"], again["damage"]) == (NUM_IMAGES, {})


def test_gc_lists_first_and_keeps_what_any_named_run_needs(root, built, capsys):
    small = write_run(root, built, "small", resolution=16)
    assert main(["cache", "build", str(small)]) == 0
    both = answer(capsys, "gc", root / "run.json", small)
    assert [one["entries"] for one in both] == [0, 0]
    shown = answer(capsys, "gc", small)
    assert (shown[0]["entries"], shown[0]["deleted"]) == (NUM_IMAGES, False)
    assert "would delete 64 entries" in lines(capsys, "gc", small)
    assert answer(capsys, "stats", root / "cache")[0]["entries"] == 2 * NUM_IMAGES
    deleted = answer(capsys, "gc", small, "--yes")
    assert (deleted[0]["entries"], deleted[0]["freed_nbytes"] >= 0) == (NUM_IMAGES, True)
    assert all(not one["damage"] for one in answer(capsys, "verify", root / "cache"))
    assert answer(capsys, "gc", small)[0]["entries"] == 0
    assert answer(capsys, "gc", root / "run.json")[0]["entries"] == NUM_IMAGES


def test_gc_does_not_touch_a_folder_without_our_marker(root, capsys):
    for kind in ("latents", "text"):
        (root / "cache" / kind / "gracetune-cache.json").unlink()
    before = sorted(root.rglob("*"))
    assert main(["cache", "gc", str(root / "run.json"), "--yes"]) == 2
    assert "is not a gracetune cache" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before


def test_gc_stops_if_a_sample_cannot_be_read(root, tmp_path, built, capsys):
    images = tmp_path / "images"
    images.mkdir()
    (images / "torn.png").write_bytes(b"no image")
    shutil.copy(next((built / "data").rglob("*.png")), images / "good.png")
    for name in ("torn", "good"):
        (images / f"{name}.txt").write_text("a shape")
    section = {"instance_data_dir": str(images), "max_corruption_rate": 1.0}
    path = write_run(root, built, "torn", type="local", **section)
    settings = json.loads(path.read_text())
    del settings["datasets"][0]["shapes"]
    path.write_text(json.dumps(settings))
    assert main(["cache", "gc", str(path), "--yes"]) == 2
    found = capsys.readouterr().err
    assert "'torn.png'" in found
    assert "it is unknown which entries they need" in found
    assert answer(capsys, "stats", root / "cache")[0]["entries"] == NUM_IMAGES


def test_inspect_explains_a_key_and_a_file(root, built, capsys):
    image = next((built / "data").rglob("*.png"))
    (entry,) = answer(capsys, "inspect", root / "cache", image)
    assert entry["made_of"]["kind"] == "latents"
    assert "24x24" in entry["made_of"]["geometry"]
    found = lines(capsys, "inspect", root / "run.json", entry["key"][:12])
    assert "geometry" in found
    assert "digest of the file's bytes" in found
    assert "tensor latents: F32" in found
    assert main(["cache", "inspect", str(root / "cache"), "nonsense"]) == 2
    assert "has no entry" in capsys.readouterr().err


@pytest.fixture
def foreign(root, built):
    """What ai-toolkit would have left beside the images, for two of them."""
    run = RunFile.model_validate_json((root / "run.json").read_text())
    family = load_family(run.model)
    folder = root / "theirs" / "_latent_cache"
    folder.mkdir(parents=True)
    shutil.rmtree(root / "cache" / "latents")
    crop = {"scale_to_width": "24", "scale_to_height": "24", "crop_x": "0", "crop_y": "0"}
    crop |= {"crop_width": "24", "crop_height": "24", "flip_x": "false"}
    images = sorted((built / "data").rglob("*.png"))[:2]
    for image in images:
        latent = family.encode(render(image.read_bytes(), plain(), (24, 24))[None])[0]
        name = folder / f"{image.stem}_{'h' * 22}.safetensors"
        save_file({"latent": latent.contiguous()}, name, crop)
    return folder


def plain():
    from gracetune.data.augment import DEFAULT_TRANSFORM

    return DEFAULT_TRANSFORM


def test_fitting_entries_of_ai_toolkit_are_imported(root, foreign, capsys):
    shown = answer(capsys, "import", root / "run.json", foreign)
    assert (len(shown["imported"]), shown["left_out"]) == (2, {})
    assert "would import 2" in lines(capsys, "import", root / "run.json", foreign)
    answer(capsys, "import", root / "run.json", foreign, "--yes")
    assert answer(capsys, "stats", root / "cache")[0]["entries"] == 2
    (entry,) = answer(capsys, "inspect", root / "cache", shown["imported"][0])
    assert entry["made_of"]["imported from"].endswith(".safetensors")
    assert main(["cache", "build", str(root / "run.json")]) == 0
    assert answer(capsys, "stats", root / "cache")[0]["entries"] == NUM_IMAGES


@pytest.fixture
def simpletuner(root, foreign, built):
    """What SimpleTuner would have left for two images: one by digest, one by an old version."""
    folder = root / "vae"
    (folder / "kept").mkdir(parents=True)
    old, new = sorted((built / "data").rglob("*.png"))[:2]
    digest = hashlib.sha256(new.stem.encode()).hexdigest()
    for image, name in ((old, f"{old.stem}.pt"), (new, f"kept/{digest}.pt")):
        (made,) = foreign.glob(f"{image.stem}_*")
        torch.save(load_file(made)["latent"].bfloat16(), folder / name)
    return folder


def test_latents_of_simpletuner_are_found_by_stem_and_by_digest(root, simpletuner, capsys):
    found = answer(capsys, "import", root / "run.json", simpletuner, "--yes")
    assert (len(set(found["imported"])), found["left_out"]) == (2, {})
    assert main(["cache", "build", str(root / "run.json")]) == 0
    assert f"{NUM_IMAGES - 2} of {NUM_IMAGES - 2} samples" in capsys.readouterr().err
    (entry,) = answer(capsys, "inspect", root / "cache", found["imported"][0])
    assert entry["tensors"]["latents"]["dtype"] == "F32", "as the run's own, so that batches mix"


def test_a_file_that_is_named_by_a_digest_is_left_out_with_the_name_of_its_image(
    root, simpletuner, built, capsys
):
    (entry,) = (simpletuner / "kept").iterdir()
    latent = torch.load(entry, weights_only=True)
    torch.save(-latent, entry)
    found = answer(capsys, "import", root / "run.json", simpletuner / "kept")["left_out"]
    image = sorted((built / "data").rglob("*.png"))[1].relative_to(built / "data")
    assert found[str(entry)].startswith(f"{image}: it is from another encoder")
    assert entry.name not in found[str(entry)]


def test_digests_of_other_names_are_left_out(root, simpletuner, capsys):
    (known,) = (simpletuner / "kept").iterdir()
    other = known.rename(known.with_name(f"{hashlib.sha256(b'other').hexdigest()}.pt"))
    found = answer(capsys, "import", root / "run.json", simpletuner)
    assert len(found["imported"]) == 1
    why = "its name is the digest of a file name that no sample of the run has"
    assert found["left_out"] == {str(other): why}


def test_the_list_says_how_many_entries_can_be_imported(root, simpletuner, capsys):
    (known,) = (simpletuner / "kept").iterdir()
    known.unlink()
    shown = lines(capsys, "import", root / "run.json", simpletuner).splitlines()
    assert shown[0] == f"would import 1 entry from {simpletuner}"
    assert shown[-1] == "Nothing was imported. Use --yes to import."
    (only,) = simpletuner.glob("*.pt")
    os.utime(only, (1, 1))
    for yes in ([], ["--yes"]):
        shown = lines(capsys, "import", root / "run.json", simpletuner, *yes)
        assert shown.splitlines()[-1] == "Nothing can be imported."


def test_a_folder_in_two_datasets_is_matched_by_the_shape_of_the_latents(
    root, simpletuner, built, capsys
):
    path = write_run(root, built, "sizes", id="small", resolution=16)
    settings = json.loads(path.read_text())
    (small,) = settings["datasets"]
    settings["datasets"].append(small | {"id": "large", "resolution": 32})
    path.write_text(json.dumps(settings))
    left_out = answer(capsys, "import", path, simpletuner)["left_out"]
    why = (
        "its latents have shape (48, 6, 6), but tiny produces (48, 4, 4) for the dataset 'small' "
        "and (48, 8, 8) for the dataset 'large'"
    )
    image = sorted((built / "data").rglob("*.png"))[1].name
    assert list(left_out.values()) == [why, f"{image}: {why}"], "a digest does not name it"
    settings["datasets"][1]["resolution"] = 24
    path.write_text(json.dumps(settings))
    assert answer(capsys, "import", path, simpletuner)["left_out"] == {}


def test_entries_that_do_not_fit_are_left_out_with_a_reason(root, foreign, capsys):
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
    found = answer(capsys, "import", root / "run.json", foreign.parent)
    assert found["imported"] == []
    reasons = {Path(path).stem[-1]: why for path, why in found["left_out"].items()}
    assert "no latents" in reasons["i"]
    assert "not the centre" in reasons["j"]
    assert "flipped" in reasons["k"]
    assert "its latents have shape" in reasons["l"]
    every = " ".join(found["left_out"].values())
    for reason in ("another encoder", "newer than the entry", "'stranger'", "like our 'tokens'"):
        assert reason in every


@pytest.mark.parametrize("crop", ["top", "random"])
def test_centre_crops_are_left_out_if_the_run_crops_elsewhere(root, foreign, built, capsys, crop):
    path = write_run(root, built, "elsewhere", crop=crop)
    found = answer(capsys, "import", path, foreign)
    assert found["imported"] == []
    for why in found["left_out"].values():
        assert "crop of the dataset 'shapes' is not center" in why


def test_entries_of_videos_are_refused(built):
    sample = Sample("clips", "a.mp4", "", "abc", 64, 48, "video")
    image = EncodeItem(sample, (64, 48, 5), FolderSource(built), SampleTransform(rate=24.0))
    with pytest.raises(CacheError, match=r"'clips'.*which frames"):
        _check_centre_crop(image)


def test_an_entry_that_fits_two_samples_is_left_out(root, foreign, built, capsys):
    """Names of entries have no folder: 'cats/001' and 'dogs/001' look the same."""
    first, second = sorted((built / "data").rglob("*.png"))[:2]
    data = root / "twins" / "data"
    for folder, image in (("cats", first), ("dogs", second)):
        (data / folder).mkdir(parents=True)
        shutil.copy2(image, data / folder / f"{first.stem}.png")
        (data / folder / f"{first.stem}.txt").write_text(f"one of the {folder}")
    path = write_run(root, root / "twins", "twins", type="in_memory")
    settings = json.loads(path.read_text())
    del settings["datasets"][0]["shapes"]
    path.write_text(json.dumps(settings))
    found = answer(capsys, "import", path, foreign)
    assert found["imported"] == []
    reasons = {Path(name).name: why for name, why in found["left_out"].items()}
    assert (
        f"2 samples of the run are called {first.stem!r}"
        in reasons[f"{first.stem}_{'h' * 22}.safetensors"]
    )


@pytest.fixture
def texts(root, built, capsys):
    """Three captions as the tools cache them: padded, with their names and precision."""
    run = RunFile.model_validate_json((root / "run.json").read_text())
    family = load_family(run.model)
    images = sorted((built / "data").rglob("*.png"))[:3]
    captions = [image.with_suffix(".txt").read_text().strip() for image in images]
    tokens = [entry["tokens"] for entry in family.encode_text(captions)]
    padded = [torch.cat([t, torch.zeros(40 - len(t), t.shape[1])])[None] for t in tokens]
    folder = root / "theirs"
    (folder / "_t_e_cache").mkdir(parents=True)
    shutil.rmtree(root / "cache" / "text")
    named = folder / "_t_e_cache" / f"{images[0].stem}_{'h' * 22}.safetensors"
    mask = torch.arange(40) < len(tokens[0])
    save_file({"text_embed": padded[0].half(), "attention_mask": mask.long()}, named)
    captioned = folder / "_t_e_cache" / f"other_{'h' * 22}.safetensors"
    save_file({"text_embed": padded[1].half()}, captioned, {"caption": json.dumps(captions[1])})
    digest = hashlib.md5(captions[2].encode()).hexdigest()
    torch.save({"prompt_embeds": padded[2]}, folder / f"{digest}-tiny.pt")
    return folder, captions, tokens


def test_texts_of_both_tools_are_imported_without_padding(root, texts, capsys):
    folder, captions, tokens = texts
    found = answer(capsys, "import", root / "run.json", folder, "--yes")
    assert (len(found["imported"]), found["left_out"]) == (3, {})
    identity = load_family(
        RunFile.model_validate_json((root / "run.json").read_text()).model
    ).identity()["text"]
    with ShardStore(root / "cache" / "text") as store:
        kept = [store.get(text_key(caption, identity)) for caption in captions]
    for entry, ours in zip(kept, tokens, strict=True):
        torch.testing.assert_close(entry["tokens"], ours, rtol=2e-3, atol=2e-3)


def test_texts_without_a_known_caption_are_left_out(root, texts, built, capsys):
    folder, *_ = texts
    (pt,) = folder.glob("*.pt")
    pt.rename(folder / f"{'0' * 32}-tiny.pt")
    first, second = sorted((folder / "_t_e_cache").iterdir(), key=lambda p: "other" in p.name)
    os.utime(first, (1, 1))
    embed = torch.zeros(1, 40, 64)
    save_file({"text_embed": embed}, second, {"caption": "never heard of"})
    save_file({"text_embed": embed}, second.with_name(f"stranger_{'i' * 22}.safetensors"))
    found = answer(capsys, "import", root / "run.json", folder)
    assert found["imported"] == []
    every = " ".join(found["left_out"].values())
    for reason in (
        "a caption that the run does not have",
        "the text file is newer",
        "no caption 'never heard of'",
        "no sample of the run is called 'stranger'",
    ):
        assert reason in every


def test_gc_deletes_old_augmentation_epochs_and_keeps_those_in_use(root, built, capsys):
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


def test_importing_from_an_empty_folder_is_an_error(root, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["cache", "import", str(root / "run.json"), str(tmp_path / "empty")]) == 2
    assert "nothing to import" in capsys.readouterr().err


def shape_of(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.get_slice("latent").get_shape()


def test_settings_can_be_overridden(root, tmp_path, capsys):
    run = str(root / "run.json")
    other = f"cache_config.cache_dir={tmp_path / 'other'}"
    assert main(["cache", "build", run, "--set", other, "--set", "datasets[0].shapes.size=16"]) == 0
    capsys.readouterr()
    assert main(["cache", "stats", run, "--set", other]) == 0
    assert str(tmp_path / "other") in capsys.readouterr().out
    assert main(["cache", "stats", str(tmp_path / "other"), "--set", other]) == 2
    assert "--set is for run files" in capsys.readouterr().err
