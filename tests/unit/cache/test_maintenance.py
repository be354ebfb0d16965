import os
import sqlite3
from dataclasses import replace

import pytest
import torch
from blake3 import blake3

from gracetune.cache import shard_format
from gracetune.cache.keys import latent_key, text_key
from gracetune.cache.maintenance import (
    cache_stats,
    compact,
    explain_entry,
    find_caches,
    find_entries,
    find_unused,
    repair,
    verify,
)
from gracetune.cache.shard_store import ShardStore
from gracetune.data.sample import Sample
from gracetune.errors import CacheError

SIZE = 256


def fill(store, numbers):
    store.put_many({f"k{n}": {"x": torch.full((SIZE,), float(n))} for n in numbers})


def values(store, numbers):
    found = store.get_many([f"k{n}" for n in numbers])
    return [None if one is None else one["x"][0].item() for one in found]


def find_row(store, key):
    with store.index() as index:
        return index.find_rows([key])[key]


def flip_bit(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path):
    with ShardStore(tmp_path / "cache") as opened:
        yield opened


def test_an_intact_cache_is_clean_during_and_after_writing(store, recorder):
    fill(store, range(5))
    for _ in range(2):
        report = verify(store, recorder)
        assert report.is_clean
        assert (report.num_entries, report.nbytes) == (5, 5 * 4 * SIZE)
        store.seal()


def test_verify_names_damaged_entries_and_repair_deletes_them(store, recorder):
    fill(store, range(5))
    store.seal()
    (path,) = store.shards.iterdir()
    flip_bit(path, find_row(store, "k3").offset + 17)
    report = verify(store, recorder)
    assert [damage.row.key for damage in report.damaged] == ["k3"]
    assert store.has(["k3"]) == [True], "verifying changes nothing"
    repair(store, report, recorder)
    assert store.has(["k3"]) == [False]
    assert verify(store, recorder).is_clean
    fill(store, [3])
    assert values(store, range(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("how", ["gone", "short"])
def test_verify_finds_lost_shards(store, recorder, how):
    fill(store, range(3))
    store.seal()
    (path,) = store.shards.iterdir()
    if how == "gone":
        path.unlink()
    else:
        os.truncate(path, find_row(store, "k2").offset + 5)
    report = verify(store, recorder)
    assert len(report.damaged) == (3 if how == "gone" else 1)
    assert ("gone" if how == "gone" else "ends before") in report.damaged[-1].why
    repair(store, report, recorder)
    assert verify(store, recorder).is_clean
    assert values(store, range(2)) == ([None, None] if how == "gone" else [0, 1])


def test_repair_rewrites_a_damaged_header_and_loses_no_entry(store, recorder):
    fill(store, range(3))
    store.seal()
    (path,) = store.shards.iterdir()
    flip_bit(path, 8)
    report = verify(store, recorder)
    assert (report.damaged, len(report.bad_headers)) == ((), 1)
    repair(store, report, recorder)
    assert verify(store, recorder).is_clean
    assert values(store, range(3)) == [0, 1, 2]


def damage_index(folder):
    """Overwrite pages in the middle, so that the file still opens."""
    path = folder / "index.sqlite"
    data = bytearray(path.read_bytes())
    data[8192 : len(data) - 4096] = b"\x5a" * (len(data) - 12288)
    path.write_bytes(data)


def test_repair_rebuilds_a_damaged_index(tmp_path, recorder):
    with ShardStore(tmp_path) as store:
        fill(store, range(200))
    damage_index(tmp_path)
    with ShardStore(tmp_path) as store:
        with pytest.raises(CacheError, match=r"index\.sqlite cannot be used: .*--repair"):
            store.get_many([f"k{n}" for n in range(200)])
        report = verify(store, recorder)
        assert report.index_problems
        repair(store, report, recorder)
        assert verify(store, recorder).is_clean
        assert values(store, range(200)) == [*range(200)]


def test_an_index_in_use_is_not_rebuilt(tmp_path, recorder):
    """Entries that another process puts into the old index would be lost."""
    with ShardStore(tmp_path) as other, ShardStore(tmp_path) as store:
        fill(other, range(3))
        broken = replace(verify(store, recorder), index_problems=("malformed",))
        with pytest.raises(CacheError, match="another process has it open"):
            repair(store, broken, recorder)
        fill(other, range(3, 6))
        assert values(store, range(6)) == [*range(6)]
        other.close()
        repair(store, broken, recorder)
        assert values(other, range(6)) == [*range(6)], "a closed store opens the new index"


def test_an_unparsable_row_is_damage_of_the_index(store, recorder):
    fill(store, range(3))
    with sqlite3.connect(store.folder / "index.sqlite") as db:
        db.execute("UPDATE entries SET tensors = '[' WHERE key = 'k1'")
    report = verify(store, recorder)
    assert [
        text for text in report.index_problems if "the row of k1 differs from its digest" in text
    ]
    repair(store, report, recorder)
    assert verify(store, recorder).is_clean
    assert values(store, range(3)) == [0, 1, 2]


def test_compact_moves_entries_out_of_shards_that_are_mostly_gaps(store, recorder):
    with ShardStore(store.folder) as reader:
        fill(store, range(100))
        before = values(reader, [98, 99])
        store.delete([f"k{n}" for n in range(98)])
        freed = compact(store)
        assert freed > 90 * 4 * SIZE
        assert [*store.keys()] == ["k98", "k99"]
        assert values(store, [98, 99]) == values(reader, [98, 99]) == before == [98, 99]
    with ShardStore(store.folder, recorder) as later:
        assert values(later, [98, 99]) == [98, 99]
        assert verify(later, recorder).is_clean
    assert recorder.texts() == []
    assert find_row(store, "k98").about == {}


def test_compact_skips_full_shards_and_those_of_other_writers(store):
    fill(store, range(10))
    store.delete(["k1"])
    assert compact(store) == 0
    with ShardStore(store.folder) as writer:
        fill(writer, [20])
        store.delete([f"k{n}" for n in range(10)])
        assert compact(store) == 0, "the writer has locked the shard"
        fill(writer, [21])
    assert values(store, [20, 21]) == [20, 21]


def test_compact_removes_empty_and_unknown_shards_and_seals_open_ones(store):
    fill(store, range(3))
    store._writer.release()
    (store.shards / f"{'a' * 16}.safetensors").write_bytes(bytes(100))
    (store.shards / "notes.txt").write_text("not ours")
    compact(store)
    names = sorted(path.name for path in store.shards.iterdir())
    assert len(names) == 2
    assert names[1] == "notes.txt"
    assert names[0].endswith(".safetensors")
    store.delete(["k0", "k1", "k2"])
    assert compact(store) > 0
    assert [path.name for path in store.shards.iterdir()] == ["notes.txt"]


def test_a_reader_finds_an_entry_that_was_moved_meanwhile(store, monkeypatch):
    """The row was read before the shard was removed: the entry is looked up again."""
    fill(store, range(100))
    store.seal()
    with ShardStore(store.folder) as reader:
        with reader.index() as index:
            old = index.find_rows(["k99"])["k99"]
        store.delete([f"k{n}" for n in range(99)])
        compact(store)
        assert reader._entry(old)["x"][0] == 99
        store.delete(["k99"])
        compact(store)
        assert reader._entry(old) is None


def test_unused_entries_are_counted_by_kind(store):
    keep, drop = text_key("kept", "e1"), text_key("dropped", "e1")
    store.put_many({key: {"x": torch.ones(2)} for key in (keep, drop, "bare")})
    left = find_unused(store, {keep})
    assert set(left.keys) == {drop, "bare"}
    assert left.kinds == {"text by e1": 1, "unexplained by ?": 1}
    assert left.nbytes == 16
    assert find_unused(store, {keep, drop, "bare"}).keys == ()


def test_an_entry_is_found_by_key_file_and_caption(store, tmp_path):
    picture, caption = tmp_path / "cat.png", tmp_path / "cat.txt"
    picture.write_bytes(b"pixels")
    caption.write_text("a cat\n")
    sample = Sample("d", "cat.png", "a cat", blake3(b"pixels").hexdigest(), 8, 8)
    latents, text = latent_key(sample, (8, 8), "vae"), text_key("a cat", "clip")
    store.put_many({latents: {"latents": torch.ones(2, 3)}, text: {"tokens": torch.ones(4)}})
    assert [row.key for row in find_entries(store, str(picture), picture)] == [latents]
    assert [row.key for row in find_entries(store, str(caption), caption)] == [text]
    (row,) = find_entries(store, latents[:9], tmp_path / latents[:9])
    explained = explain_entry(row)
    assert explained["made_of"]["geometry"].endswith("8x8")
    assert explained["tensors"] == {"latents": {"dtype": "F32", "shape": [2, 3]}}
    assert find_entries(store, "zz", tmp_path / "zz") == []


def test_stats_count_entries_bytes_and_gaps(store):
    store.put_many({text_key(c, "e"): {"x": torch.ones(16)} for c in "abc"})
    stats = cache_stats(store)
    assert (stats["entries"], stats["nbytes"], stats["shards"]) == (3, 3 * 64, 1)
    assert stats["kinds"] == [{"kind": "text", "encoder": "e", "entries": 3, "nbytes": 192}]
    assert stats["written_nbytes"] >= 192
    assert stats["disk_nbytes"] < shard_format.DEFAULT_DATA_OFFSET


def test_caches_are_found_by_their_marker(tmp_path):
    with pytest.raises(CacheError, match="no marker file"):
        find_caches(tmp_path)
    for kind in ("text", "latents"):
        ShardStore(tmp_path / kind).close()
    (tmp_path / "others").mkdir()
    assert [path.name for path in find_caches(tmp_path)] == ["latents", "text"]
    assert find_caches(tmp_path / "text") == [tmp_path / "text"]
