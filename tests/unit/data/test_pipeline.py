"""The data pipeline of a run: batches, hold-out, buckets, modes, and what it refuses."""

import io
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from media_files import audio_bytes, grey_frames, image_bytes, photo, tone, video_bytes
from PIL import Image

from gracetune.cache.batch_reader import PromptNames, SampleTransforms
from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.cache.encode import EMPTY_PROMPT, EncodeItem, PromptEncoder, decode_item
from gracetune.cache.keys import text_key
from gracetune.cache.loss_masks import render_masks
from gracetune.config.dataset_schema import DatasetSection
from gracetune.config.schema import ModelSection, RunFile
from gracetune.data import pipeline as pipeline_module
from gracetune.data.augment import SampleTransform, render, sample_transform
from gracetune.data.batch_order import BucketGroup
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.images import choose_decoders
from gracetune.data.pipeline import DataPipeline, required_keys, split_holdout, text_length
from gracetune.data.prefetch import Prefetch
from gracetune.data.sample import Sample
from gracetune.errors import ConfigError, DataError, RunFailedError
from gracetune.events.types import StageProgress
from gracetune.models.tiny import load


def samples(count, prefix="s"):
    return tuple(
        Sample("d", f"{prefix}{i}", f"caption {i}", f"{prefix}{i}", 8, 8) for i in range(count)
    )


@pytest.fixture
def build(tiny_run, recorder):
    def make(**sections):
        run = tiny_run(**sections)
        folder = Path(run.output_dir)
        folder.mkdir(exist_ok=True)
        transfer = build_batch_transfer(run.gh200_optimizations, torch.device("cpu"), recorder)
        return DataPipeline(run, load(run.model), transfer, folder, recorder)

    return make


def test_a_batch_size_that_no_bucket_can_fill_is_reported(build, recorder):
    build(train={"batch_size": 100})
    (text,) = [text for text in recorder.texts() if text.startswith("train.batch_size is 100")]
    assert text.endswith("no bucket has more than 64 samples in an epoch, so batches are smaller")
    recorder.events.clear()
    build(train={"batch_size": 64})
    assert not [text for text in recorder.texts() if text.startswith("train.batch_size")]


def test_batches_hold_the_latents_and_texts_of_their_own_samples(build):
    pipeline = build()
    draws = pipeline.order.batch_at(0)
    batch = pipeline.load(draws)
    assert len(batch) == 4
    assert batch.latents.shape == (4, 48, 6, 6)
    for index, draw in enumerate(draws):
        alone = pipeline.load([draw])
        assert torch.equal(batch.latents[index], alone.latents[0])
        assert torch.equal(batch.text["tokens"][index], alone.text["tokens"][0])


def test_the_encoders_are_identified_once(tiny_run, recorder, monkeypatch, tmp_path):
    """Their files, which a large model has gigabytes of, are hashed for this."""
    dataset = {"type": "shapes", "shapes": {"copies": 1}, "resolution": 24}
    dataset["instance_data_dir"] = str(tmp_path / "shapes")
    run = tiny_run(datasets=[dataset | {"id": name} for name in "abc"])
    family, calls = load(run.model), []
    identity = family.identity()
    monkeypatch.setattr(type(family), "identity", lambda _: calls.append(1) or identity)
    transfer = build_batch_transfer(run.gh200_optimizations, torch.device("cpu"), recorder)
    folder = Path(run.output_dir)
    folder.mkdir()
    DataPipeline(run, family, transfer, folder, recorder).close()
    assert len(calls) == 1


def test_the_prompts_of_validation_are_cached_and_lost_ones_encoded(build, monkeypatch):
    prompts = ["a sun", {"prompt": "a moon", "negative_prompt": "fog"}, {"prompt": "a cloud"}]
    pipeline = build(validation={"prompts": prompts, "negative_prompt": "noise"})
    texts = ["a sun", "a moon", "a cloud", "fog", "noise", EMPTY_PROMPT, "a text that was lost"]
    family, encoded = load(ModelSection()), []
    expected = family.encode_text(texts)

    def encode_text(_, captions):
        encoded.extend(captions)
        return expected[-1:]

    monkeypatch.setattr(type(family), "encode_text", encode_text)
    found = [*pipeline.read_texts(texts[:-1]), *pipeline.read_texts(texts[-1:])]
    assert encoded == texts[-1:]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


def test_the_largest_batch_has_the_longest_text_of_the_run(build_dataset, folder):
    for number, words in enumerate((3, 21, 1, 12)):
        (folder / f"image {number}.png").rename(folder / f"{'word ' * words}{number}.png")
    _, _, pipeline = build_dataset()
    lengths = {
        draw.caption: text_length(pipeline.load([draw]).text)
        for index in range(pipeline.order.epoch_length)
        for draw in pipeline.order.batch_at(index)
    }
    assert len({*lengths.values()}) > 1
    assert text_length(pipeline.load_largest().text) == max(lengths.values())
    assert pipeline.text_lengths() == {*lengths.values()}


def test_the_longest_text_is_found_by_its_bytes(build_dataset, folder, monkeypatch):
    """A Chinese caption has more tokens than an English one with more characters."""
    monkeypatch.setattr(pipeline_module, "EXTREME_TEXTS", 1)
    (folder / "image 0.png").rename(folder / f"{'x' * 60}.png")
    (folder / "image 1.png").rename(folder / f"{' '.join('山' * 24)}.png")
    _, _, pipeline = build_dataset()
    draws = [
        draw
        for index in range(pipeline.order.epoch_length)
        for draw in pipeline.order.batch_at(index)
    ]
    (chinese,) = [draw for draw in draws if draw.caption.startswith("山")]
    longest = text_length(pipeline.load([chinese]).text)
    assert longest == max(text_length(pipeline.load([draw]).text) for draw in draws)
    assert text_length(pipeline.load_largest().text) == longest


def test_the_bucket_report_is_emitted_and_written(build, recorder, tmp_path):
    build()
    assert any("24x24" in text for text in recorder.texts())
    assert (tmp_path / "run" / "buckets-0.json").exists()


def test_held_out_samples_are_not_trained_on(build):
    pipeline = build(validation={"holdout": 0.25})
    held = {draw.sample for batch in pipeline.held_out_draws for draw in batch}
    assert len(held) == 16
    assert len(pipeline.train_samples) == 48
    assert not held & set(pipeline.train_samples)


def test_a_holdout_of_everything_is_refused(build):
    with pytest.raises(DataError, match=r"validation\.holdout"):
        build(validation={"holdout": 1.0})


def test_adding_samples_changes_few_of_the_held_out_ones():
    groups = [BucketGroup(samples(200), 1, 0.0, (8, 8))]
    more = [BucketGroup(samples(220), 1, 0.0, (8, 8))]
    before, after = (set(split_holdout(g, 0.1, 0)[1][0].samples) for g in (groups, more))
    assert len(before) == 20
    assert len(before & after) >= 16


def test_the_split_is_the_same_in_any_order():
    forward = [BucketGroup(samples(50), 1, 0.0, (8, 8))]
    backward = [BucketGroup(tuple(reversed(samples(50))), 1, 0.0, (8, 8))]
    first, second = (set(split_holdout(g, 0.2, 3)[1][0].samples) for g in (forward, backward))
    assert first == second


def test_a_file_in_several_datasets_is_held_out_in_all_of_them():
    """SimpleTuner's configs list a folder once for each resolution."""
    large = tuple(replace(sample, dataset="large") for sample in samples(40))
    small = tuple(replace(sample, dataset="small", caption="other") for sample in samples(40))
    copies = tuple(replace(sample, key=f"copy of {sample.key}") for sample in large[:20])
    groups = [
        BucketGroup((*large, *copies), 1, 0.0, (16, 16)),
        BucketGroup(small, 1, 0.0, (8, 8)),
    ]
    trained, held_out = (
        {one.digest for group in part for one in group.samples}
        for part in split_holdout(groups, 0.05, 0)
    )
    assert (len(trained), len(held_out)) == (38, 2)
    assert not trained & held_out


def test_a_cache_folder_is_found_by_the_next_run(build, recorder, tmp_path):
    cache = {"persistent_cache": True, "cache_dir": str(tmp_path / "cache")}
    build(cache_config=cache)
    stages = {event.stage for event in recorder.events if type(event).__name__ == "StageProgress"}
    assert "encoding latents" in stages
    recorder.events.clear()
    build(cache_config=cache)
    stages = {event.stage for event in recorder.events if type(event).__name__ == "StageProgress"}
    assert "encoding latents" not in stages
    assert "encoding captions" not in stages


def test_steps_and_sizes_that_do_not_suit_the_model_are_refused(build, tiny_run):
    dataset = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ConfigError, match="bucket_step is 6"):
        build(datasets=[dataset | {"bucket_step": 6}])
    with pytest.raises(ConfigError, match="takes at most 64"):
        build(datasets=[dataset | {"resolution": 128}])


def test_closing_seals_the_shards_and_a_closed_pipeline_still_loads(build, tmp_path):
    cache = {"cache_dir": str(tmp_path / "cache"), "vae_cache_type": "disk"}
    pipeline = build(cache_config={**cache, "text_cache_type": "disk"})
    files = [*(tmp_path / "cache").rglob("shards/*")]
    assert {path.suffix for path in files} == {".open"}
    draws = pipeline.order.batch_at(0)
    pipeline.will_need(draws)
    before = pipeline.load(draws)
    pipeline.close()
    files = [*(tmp_path / "cache").rglob("shards/*")]
    assert {path.suffix for path in files} == {".safetensors"}
    assert torch.equal(pipeline.load(draws).latents, before.latents)
    pipeline.close()


def test_a_pipeline_that_cannot_be_built_leaves_its_cache_sealed(build, tmp_path):
    cache = {"persistent_cache": True, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(DataError, match="holdout"):
        build(cache_config=cache, validation={"holdout": 1.0})
    (path,) = (tmp_path / "cache" / "latents" / "shards").iterdir()
    assert path.suffix == ".safetensors"


def test_batches_may_mix_cached_refreshed_and_live_datasets(build, tiny_run):
    """Each sample has the latents that it has in a batch of its own."""
    dataset = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)
    modes = ("static", "refresh_each_epoch", "disable_cache")
    random = {"crop": "random", "max_aspect": 1.0}
    pipeline = build(
        datasets=[
            dataset | random | {"id": mode, "augmentations_cache_mode": mode} for mode in modes
        ],
        train={"batch_size": 12},
    )
    try:
        draws = pipeline.order.batch_at(0)
        pipeline.will_need(draws)
        pipeline.will_need(pipeline.order.batch_at(pipeline.order.epoch_length))  # not made yet
        batch = pipeline.load(draws)
        assert len({draw.sample.dataset for draw in draws}) == 3
        for index, draw in enumerate(draws):
            assert torch.equal(batch.latents[index], pipeline.load([draw]).latents[0])
    finally:
        pipeline.close()


def write_images(folder, count=4):
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (30, 24), (number, 0, 0)).save(folder / f"{number}.png")
    return {
        "id": "d",
        "instance_data_dir": str(folder),
        "caption_strategy": "filename",
        "resolution": 24,
        "crop": "random",
    }


def test_a_file_that_breaks_while_training_is_named(build, tmp_path):
    dataset = write_images(tmp_path / "images")
    pipeline = build(datasets=[dataset | {"augmentations_cache_mode": "disable_cache"}])
    assert len(pipeline.load(pipeline.order.batch_at(0))) == 4
    (tmp_path / "images" / "2.png").write_bytes(b"torn")
    with pytest.raises(RunFailedError, match=r"'d': 2.png was readable when the run started"):
        pipeline.load(pipeline.order.batch_at(0))
    pipeline.close()


def test_a_file_that_breaks_before_its_next_augmentation_epoch_is_named(build, tmp_path):
    dataset = write_images(tmp_path / "images")
    pipeline = build(datasets=[dataset | {"augmentations_cache_mode": "refresh_each_epoch"}])
    (tmp_path / "images" / "1.png").write_bytes(b"torn")
    pipeline.load(pipeline.order.batch_at(0))
    with pytest.raises(RunFailedError, match=r"'d': 1.png was readable when the run started"):
        pipeline.load(pipeline.order.batch_at(pipeline.order.epoch_length))
    pipeline.close()


def test_unreadable_images_are_left_out_unless_all_are(build, tmp_path):
    dataset = write_images(tmp_path / "images") | {"max_corruption_rate": 1.0}
    whole = (tmp_path / "images" / "0.png").read_bytes()
    torn = whole[: len(whole) - 30]  # the header is complete, the pixels are not
    (tmp_path / "images" / "0.png").write_bytes(torn)
    assert len(build(datasets=[dataset]).train_samples) == 3
    for number in range(4):
        (tmp_path / "images" / f"{number}.png").write_bytes(torn)
    with pytest.raises(DataError, match=r"datasets\[0\] \('d'\): none of the 4 images"):
        build(datasets=[dataset])


# Files that change after the dataset was opened


def replace_content(path, data):
    """Write other bytes of the same length with the old modification time, as `rsync` may."""
    before = path.stat()
    path.write_bytes(data.ljust(before.st_size, b"\0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def white_image(path):
    """Return a file of the same size and format as the image at `path`, which is another image."""
    with Image.open(path) as image:
        buffer = io.BytesIO()
        Image.new("RGB", image.size, "white").save(buffer, image.format)
    return buffer.getvalue()


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_an_image_that_changes_before_it_is_encoded_is_not_cached(
    build, recorder, tmp_path, monkeypatch, rate
):
    dataset = write_images(tmp_path / "images") | {"max_corruption_rate": rate, "crop": "center"}
    cache = {"persistent_cache": True, "cache_dir": str(tmp_path / "cache")}
    path = tmp_path / "images" / "2.png"
    original, other = path.read_bytes(), white_image(path)
    record = type(recorder).__call__

    def change_after_listing(self, event):
        if isinstance(event, StageProgress) and event.stage == "reading":
            replace_content(path, other)
        record(self, event)

    monkeypatch.setattr(type(recorder), "__call__", change_after_listing)
    changed = r"2\.png has changed since the dataset was opened"
    if rate == 0.0:
        with pytest.raises(DataError, match=changed):
            build(datasets=[dataset], cache_config=cache)
    else:
        assert len(build(datasets=[dataset], cache_config=cache).train_samples) == 3
        assert any(re.search(changed, text) for text in recorder.texts())
    monkeypatch.undo()
    path.write_bytes(original)
    pipeline = build(datasets=[dataset], cache_config=cache)  # finds no entry of the other bytes
    (draw,) = [d for d in pipeline.order.batch_at(0) if d.sample.key == "2.png"]
    section = pipeline._run.datasets[0]
    transform = sample_transform(section, draw.sample, 0, lanczos=choose_decoders().lanczos)
    pixels = render(original, transform, draw.size, choose_decoders())
    assert torch.equal(
        pipeline.load([draw]).latents[0], load(RunFile().model).encode(pixels[None])[0]
    )
    pipeline.close()


def open_one(tmp_path, name, data, **settings):
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / name).write_bytes(data)
    values = {"id": "d", "instance_data_dir": str(folder), "caption_strategy": "filename"}
    section = DatasetSection.model_validate(values | settings)
    dataset = open_dataset(section, 0, lambda _: None, CorruptionLog(lambda _: None))
    return folder / name, dataset


MEDIA = {
    "image": ("a.jpg", lambda: image_bytes(photo(32, 32), "JPEG"), (32, 32)),
    "video": ("a.mp4", lambda: video_bytes(grey_frames(9)), (32, 32, 5)),
    "audio": ("a.wav", lambda: audio_bytes(tone(0.5, 8000, 440), 8000), (1, 4000)),
}


@pytest.mark.parametrize("kind", MEDIA)
@pytest.mark.parametrize("staged", [False, True])
def test_only_the_bytes_that_were_listed_are_decoded(tmp_path, kind, staged):
    name, make, size = MEDIA[kind]
    path, dataset = open_one(
        tmp_path, name, make(), dataset_type=kind, type="in_memory" if staged else "local"
    )
    item = EncodeItem(dataset.samples[0], size, dataset.source, SampleTransform(rate=24.0))
    if kind == "audio":
        item = replace(item, transform=SampleTransform(rate=8000.0))
    before = decode_item(item, choose_decoders())
    assert isinstance(before, torch.Tensor), before
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    replace_content(path, bytes(data))
    after = decode_item(item, choose_decoders())
    if staged:
        assert torch.equal(before, after)  # the copy in memory has not changed
    else:
        assert re.match(rf"{name} has changed since the dataset was opened", after)


@pytest.mark.parametrize("role", ["control", "mask"])
def test_only_the_listed_bytes_of_companions_are_decoded(tmp_path, role):
    beside = tmp_path / "beside"
    beside.mkdir()
    path = beside / "a.png"
    path.write_bytes(image_bytes(photo(32, 32, seed=1)))
    setting = "conditioning_data_dir" if role == "control" else "mask_data_dir"
    _, dataset = open_one(tmp_path, "a.png", image_bytes(photo(32, 32)), **{setting: str(beside)})
    item = EncodeItem(dataset.samples[0], (32, 32), dataset.source, control_size=(32, 32))
    replace_content(path, white_image(path))
    changed = rf"\({role}\) a\.png has changed since"
    if role == "mask":
        (reason,) = render_masks(Prefetch(), [item], lambda _: (4, 4), choose_decoders())
        assert re.search(changed, reason)
        return
    assert re.match(changed, decode_item(item, choose_decoders()))
    transforms = SampleTransforms({"d": dataset.section}, 0, choose_decoders())
    names = PromptNames(True, transforms)
    group = BucketGroup(dataset.samples, 1, 0.0, (32, 32))
    encoder = SimpleNamespace(
        takes_control=True, encode_text=lambda *_: [], text_control_size=lambda *size: size
    )
    prompts = PromptEncoder(encoder, [group], {"d": dataset.source}, names)
    with pytest.raises(RunFailedError, match=rf"'d': a\.png .* its control image .*{changed}"):
        prompts.encode(prompts.names[:1])


# Settings of a dataset


@pytest.fixture
def folder(tmp_path):
    """Six images that every crop, flip or change of colour alters."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(6):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 256, (40, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"image {number}.png")
    return images


@pytest.fixture
def build_dataset(folder, recorder, tmp_path):
    """Return a function from dataset settings to the run, the family and the pipeline."""

    def make(**settings):
        dataset = {
            "id": "d",
            "instance_data_dir": str(folder),
            "caption_strategy": "filename",
            "resolution": 24,
            "max_aspect": 2.0,
            **settings,
        }
        output = tmp_path / "run"
        output.mkdir(exist_ok=True)
        run = RunFile.model_validate({"output_dir": str(output), "datasets": [dataset], "seed": 3})
        family = load(run.model)
        transfer = build_batch_transfer(run.gh200_optimizations, torch.device("cpu"), recorder)
        return run, family, DataPipeline(run, family, transfer, Path(output), recorder)

    return make


STATIC = {"augmentations_cache_mode": "static"}
FLIP = {"augmentations": [{"name": "flip", "probability": 1}], **STATIC}
MIXED = {
    "augmentations": [{"name": "flip"}, {"name": "rotate"}, {"name": "brightness"}],
    **STATIC,
}


@pytest.mark.parametrize("settings", [{}, {"crop": "random"}, {"crop": "top"}, FLIP, MIXED])
def test_batches_hold_the_latents_of_the_augmented_pixels(build_dataset, folder, settings):
    run, family, pipeline = build_dataset(**settings)
    decoders = choose_decoders()
    for index in range(pipeline.order.epoch_length):
        draws = pipeline.order.batch_at(index)
        for draw, latents in zip(draws, pipeline.load(draws).latents, strict=True):
            recipe = sample_transform(
                run.datasets[0], draw.sample, run.seed, lanczos=decoders.lanczos
            )
            data = (folder / draw.sample.key).read_bytes()
            expected = family.encode(render(data, recipe, draw.size, decoders)[None])[0]
            assert torch.allclose(latents, expected, atol=1e-5)


def test_shuffled_captions_take_turns_and_repeat_exactly(build_dataset, folder, recorder):
    for file in folder.glob("*.*"):
        file.with_suffix(".txt").write_text("red, round, small, new")
    settings = {
        "caption_strategy": "textfile",
        "caption_shuffle": True,
        "caption_variants": 3,
        "caption_keep_tokens": 1,
        "trigger_word": "ohwx",
        "repeats": 2,
    }
    run, family, pipeline = build_dataset(**settings)
    indices = range(3 * pipeline.order.epoch_length)
    batches = [pipeline.order.batch_at(index) for index in indices]
    uses = {}
    for draws in batches:
        pipeline.load(draws)  # every caption is in the cache
        for draw in draws:
            uses.setdefault(draw.sample, []).append(draw.caption)
    for sample, captions in uses.items():
        assert Counter(captions) == dict.fromkeys(sample.captions, 2)
        assert sample.captions[0] == "ohwx, red, round, small, new"
        assert all(caption.startswith("ohwx, red, ") for caption in captions)
    assert len({sample.captions for sample in uses}) > 1  # each sample has its own orders
    _, _, other = build_dataset(**settings)
    assert [other.order.batch_at(index) for index in indices] == batches
    names = {text_key(caption, family.identity()["text"]) for s in uses for caption in s.captions}
    assert names <= required_keys(run, family, recorder)


def test_enlarged_and_duplicate_images_are_reported_once(build_dataset, folder, recorder):
    first = min(folder.iterdir())
    (folder / "a copy.png").write_bytes(first.read_bytes())
    build_dataset(resolution=48)
    warnings = [text for text in recorder.texts() if "`gracetune data check`" in text]
    assert len(warnings) == 2
    assert "are enlarged, up to " in warnings[0]
    assert " samples are exact copies of others" in warnings[1]


def test_augmented_latents_differ_from_plain_ones_and_repeat(build_dataset):
    def latents(**settings):
        _, _, pipeline = build_dataset(**settings)
        draws = sorted(
            (
                draw
                for at in range(pipeline.order.epoch_length)
                for draw in pipeline.order.batch_at(at)
            ),
            key=lambda draw: draw.sample.key,
        )
        return pipeline.load(draws).latents

    plain, flipped = latents(), latents(**FLIP)
    assert not torch.allclose(plain, flipped, atol=1e-3)
    assert torch.equal(flipped, latents(**FLIP))


def draws_by_key(pipeline, edge):
    """Return the uses of samples of one size in an epoch."""
    batches = map(pipeline.order.batch_at, range(pipeline.order.epoch_length))
    return {draw.sample.key: draw for batch in batches for draw in batch if draw.size[0] == edge}


def test_each_sample_is_used_at_every_resolution(build_dataset):
    _, _, pipeline = build_dataset(resolution=(16, 24), bucket_aspects=(1.0,))
    assert pipeline.order.draws_by_size() == {(16, 16): 6, (24, 24): 6}
    assert len(pipeline.train_samples) == 6, "each once, for the digest of the data and prompts"
    for edge in (16, 24):
        alone = build_dataset(resolution=edge, bucket_aspects=(1.0,))[2]
        here, there = draws_by_key(pipeline, edge), draws_by_key(alone, edge)
        assert here.keys() == there.keys()
        assert len(here) == 6
        for key, draw in here.items():
            latents = pipeline.load([draw]).latents
            assert torch.equal(latents, alone.load([there[key]]).latents)


def test_the_weight_of_a_dataset_scales_its_epoch(build_dataset):
    _, _, pipeline = build_dataset(weight=0.5)
    assert sum(pipeline.order.draws_by_size().values()) == 3
    _, _, pipeline = build_dataset(weight=1.5, repeats=2)
    assert sum(pipeline.order.draws_by_size().values()) == 18


def test_the_decoders_are_reported(build_dataset, recorder):
    build_dataset()
    assert choose_decoders().description in recorder.texts()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dataset_type": "video"},
            r"\[0\]\.dataset_type is 'video', but tiny encodes only images",
        ),
        (
            {"dataset_type": "audio"},
            r"\[0\]\.dataset_type is 'audio', but tiny encodes only images",
        ),
        (
            {"mask_background": 0.1},
            r"datasets\[0\]\.mask_background is 0\.1, but there are no masks",
        ),
        ({"conditioning_data_dir": "x"}, r"datasets\[0\]\.conditioning_data_dir is 'x'"),
    ],
)
def test_settings_without_effect_are_refused_by_name(build_dataset, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_dataset(**settings)
