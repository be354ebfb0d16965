"""Encoding what a cache lacks: latents, captions, ranks, prompts with controls, tiling."""

import io
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from blake3 import blake3
from failing_source import fail_first_read
from fakes.stores import DictStore
from PIL import Image

from gracetune.cache import encode as encode_module
from gracetune.cache.batch_reader import PromptNames, SampleTransforms
from gracetune.cache.encode import (
    AUTO_TILE_PIXELS,
    EMPTY_PROMPT,
    ENCODE_BATCH_SIZE,
    NO_TILING,
    EncodeItem,
    ExclusiveEncoder,
    PromptEncoder,
    Ranks,
    Tiling,
    choose_tiling,
    encoding_ranks,
    fill_latents,
    fill_text,
    find_unreadable,
)
from gracetune.cache.keys import latent_key, text_key
from gracetune.cache.shard_store import ShardStore
from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.augment import SampleTransform
from gracetune.data.batch_order import BucketGroup
from gracetune.data.images import PILLOW
from gracetune.data.prefetch import Prefetch
from gracetune.data.sample import Companion, Sample
from gracetune.distributed.ranks import SINGLE, RankGroup
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.types import Notice, StageProgress


class ColourSource:
    """Images of one colour each; a key that begins with `bad` is no image."""

    def __init__(self):
        self.reads = []

    def read(self, key):
        self.reads.append(key)
        if key == "gone":
            raise FileNotFoundError("no such file")
        return colour_file(key)


def colour_file(key):
    if key in ("bad", "bad too", "gone"):
        return b"no image"
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (int(key) % 256, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def colour_sample(key):
    return Sample("d", key, "", blake3(colour_file(key)).hexdigest(), 8, 8)


def items(keys, source, size=(8, 8)):
    return [EncodeItem(colour_sample(key), size, source) for key in keys]


class FakeVae:
    """Averages the pixels; above `most` images memory runs out."""

    def __init__(self, most=10**6):
        self.most = most
        self.sizes = []
        self.lock = threading.Lock()

    def __call__(self, pixels):
        with self.lock:
            self.sizes.append(len(pixels))
        if len(pixels) > self.most:
            raise torch.OutOfMemoryError(f"no room for {len(pixels)}")
        assert not torch.is_grad_enabled()
        return pixels.mean((2, 3), keepdim=True)


def red(store, item):
    value = store.get(latent_key(item.sample, item.size, "e"))["latents"][0].item()
    return round((value + 1) * 127.5)


@pytest.mark.parametrize("most", [1, 5, 8, 31])
def test_out_of_memory_halves_the_batch_size_and_encoding_continues(recorder, most):
    store, encode = DictStore(), FakeVae(most)
    some = items([f"{n}" for n in range(70)], ColourSource())
    assert fill_latents(store, some, encode, "e", recorder) == []
    assert [red(store, item) for item in some] == list(range(70))
    good = [size for size in encode.sizes if size <= most]
    assert sum(good) == 70
    refused = [size for size in encode.sizes if size > most]
    assert refused == [size for size in (32, 16, 8, 4, 2) if size > most]  # never tried again
    warnings = [e for e in recorder.of(Notice) if e.fallback]
    assert len(warnings) == len(refused)
    assert "continuing with" in warnings[0].text


@pytest.mark.parametrize(
    ("words", "halves"),
    [
        ("GET was unable to find an engine to execute this computation", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_library_without_workspace_counts_as_out_of_memory(recorder, words, halves):
    encode = FakeVae()

    def cramped(pixels):
        if len(pixels) > 8:
            raise RuntimeError(words)
        return encode(pixels)

    some = items([f"{n}" for n in range(32)], ColourSource())
    if not halves:
        with pytest.raises(RuntimeError, match="shapes"):
            fill_latents(DictStore(), some, cramped, "e", recorder)
        return
    assert fill_latents(DictStore(), some, cramped, "e", recorder) == []
    assert encode.sizes == [8] * 4


@pytest.mark.parametrize(("edge", "together"), [(8, 32), (16, 32), (32, 8), (64, 2), (512, 1)])
def test_large_images_are_encoded_in_smaller_batches(recorder, monkeypatch, edge, together):
    monkeypatch.setattr(encode_module, "MAX_BATCH_PIXELS", 8 * 32 * 32)
    encode = FakeVae()
    some = items([f"{n}" for n in range(40)], ColourSource(), size=(edge, edge))
    assert fill_latents(DictStore(), some, encode, "e", recorder) == []
    assert max(encode.sizes) == together
    assert sum(encode.sizes) == 40
    done = [e.done for e in recorder.of(StageProgress) if e.stage == "encoding latents"]
    assert done == [32, 40]


def test_out_of_memory_with_one_sample_says_what_to_change(recorder):
    with pytest.raises(RunFailedError, match=r"one of the samples at a time: no room.*resolution"):
        fill_latents(DictStore(), items(["1"], ColourSource()), FakeVae(0), "e", recorder)


def test_out_of_memory_halves_batches_of_captions_too(recorder):
    sizes = []

    def encode(captions):
        sizes.append(len(captions))
        if len(captions) > 10:
            raise torch.OutOfMemoryError("full")
        return [{"tokens": torch.tensor([float(len(c))])} for c in captions]

    store, captions = DictStore(), ["x" * n for n in range(40)]
    fill_text(store, captions, encode, "e", recorder)
    assert sizes[:3] == [32, 16, 8]
    found = [store.get(text_key(c, "e"))["tokens"].item() for c in captions]
    assert found == list(range(40))


def test_batches_never_mix_sizes(recorder):
    encode, source = FakeVae(), ColourSource()
    keys = [f"{n}" for n in range(40)]
    both = items(keys[:20], source) + items(keys[20:], source, (4, 8))
    fill_latents(DictStore(), both, encode, "e", recorder)
    assert sorted(encode.sizes) == [20, 20]


def test_files_with_equal_bytes_are_encoded_once_and_unreadable_together(recorder):
    source, encode = ColourSource(), FakeVae()
    fill_latents(DictStore(), items(["1", "257"], source), encode, "e", recorder)
    assert encode.sizes == [1]
    lost = fill_latents(DictStore(), items(["bad", "bad too"], source), encode, "e", recorder)
    assert [sample.key for sample, _ in lost] == ["bad", "bad too"]


def test_a_sample_with_one_unreadable_variant_is_unreadable(recorder):
    source, sample = fail_first_read(ColourSource()), colour_sample("1")
    crops = [SampleTransform(crop=(share, 0.5)) for share in (0.0, 1.0)]
    variants = [EncodeItem(sample, (8, 8), source, crop) for crop in crops]
    lost = fill_latents(DictStore(), variants, FakeVae(), "e", recorder)
    assert lost == [(sample, "read error")]


def test_a_sample_whose_latents_are_not_finite_is_left_out(recorder):
    store, encode = DictStore(), FakeVae()

    def overflow(pixels):
        latents = encode(pixels)
        latents[pixels[:, 0, 0, 0] > 0.9] = torch.nan  # the brightest image
        return latents

    some = items(["1", "2", "255"], ColourSource())
    lost = fill_latents(store, some, overflow, "e", recorder)
    assert lost == [(some[2].sample, "the VAE encodes it to values that are not finite")]
    assert store.has([latent_key(one.sample, one.size, "e") for one in some]) == [True, True, False]


def test_progress_reports_seconds_and_ends_at_the_total(recorder):
    fill_latents(
        DictStore(), items([f"{n}" for n in range(70)], ColourSource()), FakeVae(), "e", recorder
    )
    steps = recorder.of(StageProgress)
    assert [event.done for event in steps] == [ENCODE_BATCH_SIZE, 2 * ENCODE_BATCH_SIZE, 70]
    assert {(event.total, event.unit) for event in steps} == {(70, "samples")}
    assert 0 < steps[0].seconds <= steps[-1].seconds


def test_unreadable_files_are_found_without_encoding(recorder):
    some = items(["1", "bad", "2", "gone"], ColourSource())
    lost = find_unreadable(some, recorder, PILLOW, Prefetch(2, 4))
    assert [sample.key for sample, _ in lost] == ["bad", "gone"]
    assert lost[1][1] == "no such file"
    assert recorder.of(StageProgress)[-1].done == 4


def fill_by_ranks(tmp_path, all_ranks, sources, keys):
    """Let ranks encode in threads, each with a store of its own over its machine's folder.

    Returns, for each rank, the number of samples that it encoded, the keys that it left out, and
    what it finds in the store.
    """
    results, failures = {}, []

    def work(ranks):
        try:
            vae, some = FakeVae(), items(keys, sources[ranks.machine])
            with ShardStore(ranks.machine_folder(tmp_path / "store")) as store:
                lost = fill_latents(store, some, vae, "e", lambda _: None, ranks=ranks)
                left_out = [sample.key for sample, _ in lost]
                reds = [red(store, item) for item in some if item.sample.key not in left_out]
                results[ranks.rank] = sum(vae.sizes), left_out, reds
        except Exception as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(ranks,)) for ranks in all_ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return [results[ranks.rank] for ranks in all_ranks]


def test_each_rank_encodes_a_share_and_finds_all_entries(tmp_path):
    ranks = [Ranks(number, 3, tmp_path / "reports", timeout_s=60) for number in range(3)]
    keys = [f"{n}" for n in range(50)] + ["bad"]
    results = fill_by_ranks(tmp_path, ranks, [ColourSource()], keys)
    shares = [encoded for encoded, _, _ in results]
    assert sum(shares) == 50  # nothing was encoded twice
    assert min(shares) > 5
    assert [found for _, *found in results] == 3 * [[["bad"], list(range(50))]]


def test_each_machine_has_a_cache_and_all_leave_out_the_same_samples(tmp_path):
    """Ranks 0 and 2 are on one machine, rank 1 on another, where one more file is unreadable."""

    class OtherSource(ColourSource):
        def read(self, key):
            return super().read("gone" if key == "7" else key)

    places = {0: ((0, 2), 0), 1: ((1,), 1), 2: ((0, 2), 0)}
    ranks = [Ranks(number, 3, tmp_path / "reports", 60, *place) for number, place in places.items()]
    keys = [f"{n}" for n in range(20)] + ["bad"]
    results = fill_by_ranks(tmp_path, ranks, [ColourSource(), OtherSource()], keys)
    (zero, one, two) = [encoded for encoded, _, _ in results]
    assert zero + two == 20
    assert min(zero, two) > 2
    assert one == 19
    good = [n for n in range(20) if n != 7]
    for _, left_out, reds in results:
        assert sorted(left_out) == ["7", "bad"]
        assert reds == good
    assert (tmp_path / "store/machine-1/shards").is_dir()


class FakeGroup(RankGroup):
    """A rank that hears from the others what `values` says, in the order of the calls."""

    def __init__(self, rank, machines, *values):
        super().__init__(rank, machines, [f"host-{machine}" for machine in machines])
        self._values = iter(values)

    def gather(self, value):
        return next(self._values)

    def broadcast(self, value):
        return value


def test_machines_are_numbered_by_their_first_rank(tmp_path):
    machines, heard = ("b", "a", "b", "a"), ([True] * 4, [0, 1, 0, 1])
    groups = [FakeGroup(rank, machines, *heard) for rank in range(4)]
    found = [encoding_ranks(group, tmp_path, 9) for group in groups]
    assert [one.machine for one in found] == [0, 1, 0, 1]
    assert [one.local_ranks for one in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [one.is_first for one in found] == [True, True, False, False]
    assert all(one.shares_cache for one in found)
    alone = encoding_ranks(SINGLE, tmp_path / "alone", 9)
    assert alone == Ranks(0, 1, tmp_path / "alone", 9, (0,))
    assert not alone.shares_cache
    assert not (tmp_path / "alone").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_machines_that_do_not_share_the_output_folder_are_told_at_once(tmp_path, rank):
    group = FakeGroup(rank, ("a", "b"), [True, False])
    with pytest.raises(
        ConfigError, match=r"rank 1 on host-b does not see .*which rank 0 on host-a"
    ):
        encoding_ranks(group, tmp_path, 9)
    assert (tmp_path / "seen").exists() == (rank == 0)


def test_a_share_does_not_depend_on_which_other_keys_are_missing():
    """A rank that looks later, when others have started, must still encode its whole share."""
    keys = [text_key(f"{n}", "e") for n in range(300)]
    shares = [Ranks(rank, 3).own_share(keys) for rank in range(3)]
    assert sorted(key for share in shares for key in share) == sorted(keys)
    assert all(len(share) > 60 for share in shares)
    for rank, share in enumerate(shares):
        assert Ranks(rank, 3).own_share(keys[100:]) == [key for key in share if key in keys[100:]]
    assert Ranks().own_share(keys) == keys


def test_waiting_for_a_rank_without_progress_times_out(tmp_path):
    clock = iter(range(100))
    ranks = Ranks(0, 2, tmp_path, timeout_s=5)
    with pytest.raises(RunFailedError, match=r"Rank 0 waits for rank 1 .*distributed\.timeout_s"):
        ranks.exchange("encoding", {}, lambda: 3, lambda _: None, lambda: next(clock))


def test_progress_of_another_rank_extends_the_timeout(tmp_path):
    clock, done = iter(range(100)), iter(range(100))
    ranks = Ranks(0, 2, tmp_path, timeout_s=5)
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 20:
            (tmp_path / "encoding-1.json").write_text('{"k": "broken"}')

    found = ranks.exchange("encoding", {"a": "odd"}, lambda: next(done), sleep, lambda: next(clock))
    assert found == {"a": "odd", "k": "broken"}
    assert len(naps) == 20


@pytest.fixture(params=["memory", "shards"])
def store(request, tmp_path):
    return DictStore() if request.param == "memory" else ShardStore(tmp_path)


def test_only_what_is_missing_is_encoded(store, recorder):
    source, encode = ColourSource(), FakeVae()
    assert fill_latents(store, items(["1", "2"], source), encode, "e", recorder) == []
    assert fill_latents(store, items(["1", "2", "3"], source), encode, "e", recorder) == []
    assert encode.sizes == [2, 1]
    fill_latents(store, items(["1"], source, size=(4, 4)), encode, "e", recorder)
    fill_latents(store, items(["1"], source), encode, "another encoder", recorder)
    assert encode.sizes == [2, 1, 1, 1]


def test_each_distinct_caption_is_encoded_once(store, recorder):
    asked = []

    def encode_text(captions):
        asked.extend(captions)
        return [{"tokens": torch.full((len(c), 2), 1.0)} for c in captions]

    fill_text(store, ["b", "a", "b"], encode_text, "e", recorder)
    fill_text(store, ["a", "", "c"], encode_text, "e", recorder)
    assert asked == ["a", "b", "", "c"]
    assert store.get(text_key("", "e"))["tokens"].shape == (0, 2)


# Prompts


CONTROL = Companion("control", "c.png", "digest of the control")
EDITED = Sample("d", "a.png", "make it red", "digest", 64, 64, companions=(CONTROL,))


def prompt_encoder(takes_control, groups, **settings):
    section = DatasetSection.model_validate({"id": "d", "instance_data_dir": "x", **settings})
    names = PromptNames(takes_control, SampleTransforms({"d": section}, 0, PILLOW))
    encoder = SimpleNamespace(takes_control=takes_control)
    return names, PromptEncoder(encoder, groups, {}, names)


def test_a_control_image_is_encoded_for_each_bucket():
    groups = [BucketGroup((EDITED,), 1, 0.0, size) for size in ((64, 64), (32, 64))]
    _, prompts = prompt_encoder(True, groups)
    assert len(prompts.names) == 4  # in both buckets, with the caption and without
    _, prompts = prompt_encoder(False, groups)
    assert len(prompts.names) == 2
    assert EMPTY_PROMPT in prompts.names


def test_the_name_of_a_prompt_has_every_control_image_in_order():
    names, _ = prompt_encoder(True, [])
    other = replace(CONTROL, key="e.png", digest="another digest")
    one, two, swapped = (
        names("make it red", replace(EDITED, companions=controls), (64, 64))
        for controls in ((CONTROL,), (CONTROL, other), (other, CONTROL))
    )
    assert one.startswith("make it red [control digest of the control ")
    assert two.startswith("make it red [control digest of the control another digest ")
    assert len({one, two, swapped}) == 3


def test_prompts_follow_the_variants_of_a_control_but_not_an_endless_sequence():
    flips = {"augmentations": [{"name": "flip"}]}
    group = BucketGroup((EDITED,), 1, 0.0, (64, 64))
    names, prompts = prompt_encoder(True, [group], variants=8, **flips)
    used = {names("make it red", EDITED, (64, 64), epoch) for epoch in range(20)}
    assert len(used) == 2  # flipped, and not
    assert used < set(prompts.names)

    mode = {"augmentations_cache_mode": "refresh_each_epoch"}
    names, prompts = prompt_encoder(True, [group], **mode, **flips)
    used = {names("make it red", EDITED, (64, 64), epoch) for epoch in range(20)}
    assert used == {names("make it red", EDITED, (64, 64))}
    assert used < set(prompts.names)


# Tiling


@pytest.mark.parametrize(
    ("setting", "can_tile", "expected"),
    [
        ("auto", True, Tiling(AUTO_TILE_PIXELS)),
        ("auto", False, NO_TILING),
        (False, True, NO_TILING),
        (True, True, Tiling(0)),
    ],
)
def test_the_setting_and_the_family_choose_the_tiling(setting, can_tile, expected):
    assert choose_tiling(setting, "flux", can_tile) == expected


def test_tiling_is_refused_if_the_family_cannot_tile():
    with pytest.raises(
        ConfigError, match=r"vae_tiling is true, but the encoder of tiny cannot work in tiles"
    ):
        choose_tiling(True, "tiny", False)


def test_size_and_kind_decide_whether_a_sample_is_tiled():
    auto = Tiling(AUTO_TILE_PIXELS)
    assert not auto.applies_to((2048, 2048), "image")
    assert auto.applies_to((2064, 2048), "image")
    assert auto.applies_to((4096, 2048, 81), "video")
    assert not auto.applies_to((2, 10**8), "audio")
    assert not NO_TILING.applies_to((10**5, 10**5), "image")


def test_tiling_is_switched_for_each_batch_by_its_size():
    switched = []

    def set_tiling(enabled):
        switched.append(enabled)
        return True

    encode = ExclusiveEncoder(lambda media: media * 2, set_tiling, Tiling(64))
    assert encode(torch.ones(1, 3, 8, 8)).sum() == 384
    encode(torch.ones(1, 3, 8, 9))
    encode(torch.ones(1, 3, 5, 8, 8))
    assert switched == [False, True, False]


def test_a_family_that_never_tiles_is_not_switched():
    def encode(media):
        return media

    ExclusiveEncoder(encode, lambda on: 1 / 0, NO_TILING)(torch.ones(1, 3, 8, 8))


def test_progress_on_another_machine_extends_the_timeout(tmp_path):
    """Its cache cannot be seen from here, so it reports its progress in a file."""
    clock = iter(range(100))
    here, there = (Ranks(rank, 2, tmp_path, 5, (rank,), rank) for rank in range(2))
    naps = []

    def sleep(_):
        naps.append(None)
        there.report_progress("encoding", len(naps))
        if len(naps) == 30:
            there.exchange("encoding", {"k": "torn"}, lambda: 0)

    assert here.exchange("encoding", {}, lambda: 3, sleep, lambda: next(clock)) == {"k": "torn"}
    assert len(naps) == 30
    Ranks(0, 2, tmp_path).report_progress("on one machine", 3)
    assert not list(tmp_path.glob("on-one-machine*"))
