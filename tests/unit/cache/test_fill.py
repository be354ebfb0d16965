import io
import threading

import pytest
import torch
from PIL import Image
from tired import tired_at_first

from gracetune.cache import encode as fill
from gracetune.cache.encode import (
    ENCODE_BATCH_SIZE,
    EncodeItem,
    Ranks,
    fill_latents,
    fill_text,
    find_unreadable,
)
from gracetune.cache.keys import latent_key, text_key
from gracetune.cache.shard_store import ShardStore
from gracetune.cache.store import DictStore
from gracetune.data.augment import SampleTransform
from gracetune.data.images import PILLOW
from gracetune.data.prefetch import Prefetch
from gracetune.data.sample import Sample
from gracetune.errors import RunFailedError
from gracetune.events.types import Notice, StageProgress


class Files:
    """Pictures of one colour each; a key that begins with `bad` is no picture."""

    def __init__(self):
        self.reads = []

    def read(self, key):
        self.reads.append(key)
        if key == "gone":
            raise FileNotFoundError("it is not there")
        if key.startswith("bad"):
            return b"no picture"
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), (int(key) % 256, 0, 0)).save(buffer, "PNG")
        return buffer.getvalue()


def pictures(keys, source, size=(8, 8)):
    return [EncodeItem(Sample("d", k, "", f"digest {k}", 8, 8), size, source) for k in keys]


class Encoder:
    """Means; above `most` pictures memory runs out."""

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


def red(store, picture):
    value = store.get(latent_key(picture.sample, picture.size, "e"))["latents"][0].item()
    return round((value + 1) * 127.5)


@pytest.mark.parametrize("most", [1, 5, 8, 31])
def test_out_of_memory_halves_the_batch_and_goes_on(told, most):
    store, encode = DictStore(), Encoder(most)
    wanted = pictures([f"{n}" for n in range(70)], Files())
    assert fill_latents(store, wanted, encode, "e", told) == []
    assert [red(store, p) for p in wanted] == list(range(70))
    good = [size for size in encode.sizes if size <= most]
    assert sum(good) == 70
    refused = [size for size in encode.sizes if size > most]
    assert refused == [size for size in (32, 16, 8, 4, 2) if size > most]  # never tried again
    warnings = [e for e in told.of(Notice) if e.fallback]
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
def test_a_library_without_work_space_is_out_of_memory_too(told, words, halves):
    encode = Encoder()

    def cramped(pixels):
        if len(pixels) > 8:
            raise RuntimeError(words)
        return encode(pixels)

    wanted = pictures([f"{n}" for n in range(32)], Files())
    if not halves:
        with pytest.raises(RuntimeError, match="shapes"):
            fill_latents(DictStore(), wanted, cramped, "e", told)
        return
    assert fill_latents(DictStore(), wanted, cramped, "e", told) == []
    assert encode.sizes == [8] * 4


@pytest.mark.parametrize(("edge", "together"), [(8, 32), (16, 32), (32, 8), (64, 2), (512, 1)])
def test_large_pictures_are_encoded_fewer_at_a_time(told, monkeypatch, edge, together):
    monkeypatch.setattr(fill, "MAX_BATCH_PIXELS", 8 * 32 * 32)
    encode = Encoder()
    wanted = pictures([f"{n}" for n in range(40)], Files(), size=(edge, edge))
    assert fill_latents(DictStore(), wanted, encode, "e", told) == []
    assert max(encode.sizes) == together
    assert sum(encode.sizes) == 40
    done = [e.done for e in told.of(StageProgress) if e.stage == "encoding latents"]
    assert done == [32, 40]


def test_out_of_memory_with_one_picture_ends_the_run_with_a_way_out(told):
    with pytest.raises(RunFailedError, match=r"one of the samples at a time: no room.*resolution"):
        fill_latents(DictStore(), pictures(["1"], Files()), Encoder(0), "e", told)


def test_captions_are_halved_too(told):
    sizes = []

    def encode(captions):
        sizes.append(len(captions))
        if len(captions) > 10:
            raise torch.OutOfMemoryError("full")
        return [{"tokens": torch.tensor([float(len(c))])} for c in captions]

    store, captions = DictStore(), ["x" * n for n in range(40)]
    fill_text(store, captions, encode, "e", told)
    assert sizes[:3] == [32, 16, 8]
    found = [store.get(text_key(c, "e"))["tokens"].item() for c in captions]
    assert found == list(range(40))


def test_batches_never_mix_sizes(told):
    encode, source = Encoder(), Files()
    keys = [f"{n}" for n in range(40)]
    both = pictures(keys[:20], source) + pictures(keys[20:], source, (4, 8))
    fill_latents(DictStore(), both, encode, "e", told)
    assert sorted(encode.sizes) == [20, 20]


def test_files_with_equal_bytes_are_encoded_once_and_lost_together(told):
    source, encode = Files(), Encoder()
    twice = [EncodeItem(Sample("d", k, "", "same", 8, 8), (8, 8), source) for k in ("1", "2")]
    fill_latents(DictStore(), twice, encode, "e", told)
    assert encode.sizes == [1]
    bad = [EncodeItem(Sample("d", k, "", "same", 8, 8), (8, 8), source) for k in ("bad", "bad too")]
    lost = fill_latents(DictStore(), bad, encode, "e", told)
    assert [sample.key for sample, _ in lost] == ["bad", "bad too"]


def test_a_variant_that_can_be_read_does_not_make_up_for_one_that_cannot(told):
    source, sample = tired_at_first(Files()), Sample("d", "1", "", "digest", 8, 8)
    crops = [SampleTransform(crop=(share, 0.5)) for share in (0.0, 1.0)]
    variants = [EncodeItem(sample, (8, 8), source, crop) for crop in crops]
    lost = fill_latents(DictStore(), variants, Encoder(), "e", told)
    assert lost == [(sample, "the disk is tired")]


def test_progress_tells_since_when_and_ends_at_the_total(told):
    fill_latents(
        DictStore(), pictures([f"{n}" for n in range(70)], Files()), Encoder(), "e", told
    )
    steps = told.of(StageProgress)
    assert [event.done for event in steps] == [ENCODE_BATCH_SIZE, 2 * ENCODE_BATCH_SIZE, 70]
    assert {(event.total, event.unit) for event in steps} == {(70, "samples")}
    assert 0 < steps[0].seconds <= steps[-1].seconds


def test_reading_without_keeping_finds_what_cannot_be_read(told):
    wanted = pictures(["1", "bad", "2", "gone"], Files())
    lost = find_unreadable(wanted, told, PILLOW, Prefetch(2, 4))
    assert [sample.key for sample, _ in lost] == ["bad", "gone"]
    assert lost[1][1] == "it is not there"
    assert told.of(StageProgress)[-1].done == 4


def test_ranks_encode_a_share_each_and_end_with_all_of_it(told, tmp_path):
    """Three ranks, each with a store of its own over one folder."""
    keys = [f"{n}" for n in range(50)] + ["bad"]
    encoders = [Encoder() for _ in range(3)]
    stores = [ShardStore(tmp_path / "store") for _ in range(3)]
    results, failures = {}, []

    def rank(number):
        try:
            ranks = Ranks(number, 3, tmp_path / "reports", timeout_s=60)
            with stores[number] as store:
                wanted = pictures(keys, Files())
                lost = fill_latents(
                    store, wanted, encoders[number], "e", lambda _: None, ranks=ranks
                )
                reds = [red(store, picture) for picture in wanted[:-1]]
                results[number] = ([sample.key for sample, _ in lost], reds)
        except Exception as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert results == {number: (["bad"], list(range(50))) for number in range(3)}
    shares = [sum(encoder.sizes) for encoder in encoders]
    assert sum(shares) == 50  # nothing was encoded twice
    assert min(shares) > 5


def test_a_share_does_not_depend_on_what_else_is_missing():
    """A rank that looks later, when others have begun, must still do all that is its own."""
    keys = [text_key(f"{n}", "e") for n in range(300)]
    shares = [Ranks(rank, 3).own_share(keys) for rank in range(3)]
    assert sorted(key for share in shares for key in share) == sorted(keys)
    assert all(len(share) > 60 for share in shares)
    for rank, share in enumerate(shares):
        assert Ranks(rank, 3).own_share(keys[100:]) == [key for key in share if key in keys[100:]]
    assert Ranks().own_share(keys) == keys


def test_a_rank_that_gets_nothing_done_is_not_waited_for_without_end(tmp_path):
    clock = iter(range(100))
    ranks = Ranks(0, 2, tmp_path, timeout_s=5)
    with pytest.raises(RunFailedError, match=r"Rank 0 waits for rank 1 .*distributed\.timeout_s"):
        ranks.exchange("encoding", {}, lambda: 3, lambda _: None, lambda: next(clock))


def test_a_rank_that_gets_something_done_is_waited_for(tmp_path):
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
