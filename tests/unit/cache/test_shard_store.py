import copy
import os
import shutil
import threading

import pytest
import torch
from fakes.stores import DictStore
from safetensors import safe_open

from gracetune.cache import shard_format
from gracetune.cache.index import FORMAT
from gracetune.cache.keys import text_key
from gracetune.cache.shard_reader import Bitset
from gracetune.cache.shard_store import INDEX, MARKER, ShardStore, is_cache
from gracetune.errors import CacheError

DTYPES = [*shard_format.DTYPES]


def entry(number, size=3):
    return {"latents": torch.full((2, size), float(number))}


def fill(store, numbers, size=3):
    store.put_many({f"k{n}": entry(n, size) for n in numbers})


def files(store):
    return sorted(path.name for path in store.shards.iterdir())


@pytest.fixture
def store(tmp_path):
    with ShardStore(tmp_path / "cache") as opened:
        yield opened


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_is_restored_bit_for_bit(store, dtype):
    bits = torch.arange(96, dtype=torch.uint8) % 2
    flat = bits.to(torch.bool) if dtype == torch.bool else bits.view(dtype)
    put = {"a": flat, "nested/é.x": flat[:4].view(2, 2).T, "none": flat[:0].view(0, 7)}
    put["one"] = flat[1].clone()
    store.put("k", put)
    got = store.get("k")
    assert list(got) == list(put)
    for name, tensor in put.items():
        assert (got[name].dtype, got[name].shape) == (dtype, tensor.shape)
        assert (
            shard_format.tensor_bytes(got[name]).tobytes()
            == shard_format.tensor_bytes(tensor).tobytes()
        )
        assert got[name].data_ptr() % tensor.element_size() == 0


def test_unsupported_dtypes_are_refused_by_name(store):
    with pytest.raises(
        CacheError, match=r"Entry k: q has the dtype torch.complex128.*Supported: BF16"
    ):
        store.put("k", {"q": torch.zeros(2, dtype=torch.complex128)})
    assert store.has(["k"]) == [False]
    store.put("k", entry(1))
    assert store.get("k")["latents"][0, 0] == 1


def test_an_entry_may_have_no_tensors(store):
    store.put("nothing", {})
    assert store.get("nothing") == {}


@pytest.mark.parametrize("make", [lambda path: DictStore(), ShardStore], ids=["memory", "shards"])
def test_get_many_keeps_the_order_and_marks_missing_entries(tmp_path, make):
    store = make(tmp_path)
    fill(store, range(3))
    got = store.get_many(["k2", "absent", "k0", "k2"])
    assert [g and g["latents"][0, 0].item() for g in got] == [2, None, 0, 2]
    assert store.has(["k2", "absent"]) == [True, False]
    assert store.get_many([]) == []


def test_a_sealed_shard_is_a_valid_safetensors_file(tmp_path):
    with ShardStore(tmp_path) as store:
        fill(store, range(40))
        store.put("odd", {"x": torch.arange(3, dtype=torch.uint8), "empty": torch.zeros(0)})
        assert files(store)[0].endswith(".open")
    (path,) = store.shards.iterdir()
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("k7/latents"), entry(7)["latents"])
        assert file.get_tensor("odd/x").tolist() == [0, 1, 2]
        assert file.get_tensor("odd/empty").shape == (0,)
    assert path.stat().st_blocks * 512 < shard_format.DEFAULT_DATA_OFFSET, (
        "the header space is a hole"
    )


def test_entries_are_private_views_of_the_file(tmp_path):
    with ShardStore(tmp_path) as store:
        fill(store, [1])
        first, again = (store.get("k1")["latents"] for _ in range(2))
        assert first.data_ptr() == again.data_ptr()
        first.zero_()
    with ShardStore(tmp_path) as store:
        assert store.get("k1")["latents"][0, 0] == 1


def test_the_next_writer_continues_a_small_shard(tmp_path):
    for number in range(3):
        with ShardStore(tmp_path) as store:
            fill(store, [number])
    assert len(files(store)) == 1
    with ShardStore(tmp_path) as store:
        assert [g["latents"][0, 0].item() for g in store.get_many(["k0", "k1", "k2"])] == [0, 1, 2]


def test_a_cache_that_was_deleted_meanwhile_is_closed_without_an_error(tmp_path):
    """The caller may have a trained model to save."""
    store = ShardStore(tmp_path / "cache")
    fill(store, range(3))
    shutil.rmtree(tmp_path / "cache")
    store.close()
    assert not (tmp_path / "cache").exists()


def test_full_shards_are_sealed_and_new_ones_created(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_format, "MAX_SHARD_NBYTES", shard_format.DEFAULT_DATA_OFFSET + 4096)
    with ShardStore(tmp_path) as store:
        fill(store, range(20), size=256)
        assert len(files(store)) == 10
        assert sum(name.endswith(".open") for name in files(store)) == 1
        fill(store, range(20, 22), size=256)
    assert all(name.endswith(".safetensors") for name in files(store))
    with ShardStore(tmp_path, max_maps=2) as store:
        found = store.get_many([f"k{n}" for n in range(22)])
        assert [g["latents"][0, 0].item() for g in found] == [*range(22)]


def test_a_shard_is_full_when_its_header_space_is(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_format, "DEFAULT_DATA_OFFSET", 4096)
    with ShardStore(tmp_path) as store:
        fill(store, range(30))
        many = {f"part {n}": torch.ones(1) for n in range(200)}
        store.put("many", many)
    for path in store.shards.iterdir():
        with safe_open(path, "pt") as file:
            assert [*file.keys()]
    with ShardStore(tmp_path) as store:
        assert list(store.get("many")) == [*many]


def test_two_writers_write_two_shards_and_read_each_others_entries(tmp_path):
    with ShardStore(tmp_path) as one, ShardStore(tmp_path) as two:
        fill(one, [1])
        fill(two, [2, 1])
        assert len(files(one)) == 2
        assert one.get("k2")["latents"][0, 0] == 2
        fill(one, [3])
        assert two.get("k3")["latents"][0, 0] == 3
        assert sorted(two.keys()) == ["k1", "k2", "k3"]


@pytest.mark.parametrize("moment", ["append", "sync"])
def test_no_rank_reads_an_entry_that_another_is_writing(tmp_path, monkeypatch, recorder, moment):
    """Two readers look while the bytes are in the shard, but not committed: one was open before."""
    seen = []
    with ShardStore(tmp_path) as writer, ShardStore(tmp_path, recorder) as reader:
        writer.put("old", entry(0))
        original = getattr(shard_format.ShardFile, moment)

        def look(file, *args):
            result = original(file, *args)
            with ShardStore(tmp_path, recorder) as late:  # which would add lost entries
                for store in (reader, late):
                    seen.append((store.has(["new", "old"]), store.get("new")))
                    seen.append(store.get("old")["latents"][0, 0].item())
            return result

        monkeypatch.setattr(shard_format.ShardFile, moment, look)
        writer.put("new", entry(5))
        assert seen == 2 * [([False, True], None), 0.0]
        assert reader.get("new")["latents"][0, 0] == 5
    assert recorder.texts() == []


def test_threads_share_a_store(store):
    wrong = []

    def work(base):
        for n in range(base, base + 20):
            fill(store, [n, n + 1])
            if store.get(f"k{n}")["latents"][0, 0] != n:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(base,)) for base in (0, 10, 15, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len([*store.keys()]) == 36 + 21


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_gets_its_own_writer_and_index(store):
    fill(store, [1])
    child = os.fork()
    if child == 0:
        try:
            fill(store, [2])
            assert store.get("k1")["latents"][0, 0] == 1
            store.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("k2")["latents"][0, 0] == 2
    fill(store, [3])
    assert store.has(["k1", "k2", "k3"]) == [True] * 3


def test_a_damaged_entry_is_reported_and_can_be_put_again(tmp_path, recorder):
    with ShardStore(tmp_path) as store:
        fill(store, range(3))
        row = find_row(store, "k1")
    (path,) = store.shards.iterdir()
    flip_bit(path, row.offset)
    with ShardStore(tmp_path, recorder) as store:
        assert store.get("k1") is None
        assert "k1" in recorder.texts()[0]
        assert "differ from their checksum" in recorder.texts()[0]
        assert store.get_many(["k0", "k2"])[1]["latents"][0, 0] == 2
        assert store.has(["k1"]) == [False]
        fill(store, [1])
        assert store.get("k1")["latents"][0, 0] == 1


def test_checksums_can_be_left_to_verify(tmp_path):
    with ShardStore(tmp_path) as store:
        fill(store, [1])
        row = find_row(store, "k1")
    flip_bit(next(store.shards.iterdir()), row.offset)
    with ShardStore(tmp_path, check=False) as store:
        assert store.get("k1") is not None


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_entries_of_a_missing_or_short_shard_are_reported(tmp_path, recorder, damage):
    with ShardStore(tmp_path) as store:
        fill(store, [1])
    (path,) = store.shards.iterdir()
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 8)
    with ShardStore(tmp_path, recorder) as store:
        store.will_need(["k1"])
        assert store.get("k1") is None
        assert "gone or too short" in recorder.texts()[0]
        assert [*store.keys()] == []


def test_the_next_writer_truncates_uncommitted_bytes(tmp_path):
    left = ShardStore(tmp_path)
    fill(left, [1])
    (path,) = left.shards.iterdir()
    with path.open("ab") as file:
        file.write(b"torn" * 100)
    left._writer.release()  # what the kernel does when a process dies
    with ShardStore(tmp_path) as store:
        fill(store, [2])
        assert store.get("k1")["latents"][0, 0] == 1
        assert b"torn" not in path.read_bytes()


def test_the_next_writer_removes_shards_unknown_to_the_index(tmp_path):
    with ShardStore(tmp_path) as store:
        (store.shards / f"{'0' * 16}.open").write_bytes(b"begun")
        fill(store, [1])
    assert len(files(store)) == 1
    assert not files(store)[0].startswith("0000")


def test_a_failed_write_changes_nothing_and_names_the_folder(tmp_path, monkeypatch):
    with ShardStore(tmp_path) as store:
        fill(store, [1])
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        with pytest.raises(CacheError, match=r"cannot be written: No space.* are free.*cache_dir"):
            fill(store, [2])
        monkeypatch.setattr(os, "pwrite", real)
        assert store.has(["k1", "k2"]) == [True, False]
        fill(store, [2])
        assert store.get("k2")["latents"][0, 0] == 2


def test_a_shard_without_entries_is_removed(tmp_path):
    with ShardStore(tmp_path) as store:
        fill(store, [1])
        store.delete(["k1"])
        assert len(files(store)) == 1
    assert files(store) == []


def test_threads_may_reopen_a_closed_store_at_once(tmp_path):
    with ShardStore(tmp_path) as store:
        fill(store, range(8))
    found = []
    threads = [
        threading.Thread(
            target=lambda n=n: found.append(store.get(f"k{n}")["latents"][0, 0].item())
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [*range(8)]
    store.close()


def test_views_of_deleted_entries_stay_valid(store):
    fill(store, range(4))
    view = store.get("k1")["latents"]
    assert store.delete(["k1", "absent"]) == 1
    assert store.get("k1") is None
    fill(store, range(10, 20))
    assert view[0, 0] == 1


def test_cached_views_are_limited(tmp_path):
    with ShardStore(tmp_path, max_cached_entries=3) as store:
        fill(store, range(10))
        for n in range(10):
            assert store.get(f"k{n}")["latents"][0, 0] == n
        assert len(store._views) == 3


def test_the_components_of_a_key_are_stored(store):
    key = text_key("a cat", "encoder 1")
    store.put(key, entry(1))
    (row,) = query_index(store, lambda index: index.rows_with_component("caption", "a cat"))
    assert row.about == {"kind": "text", "caption": "a cat", "encoder": "encoder 1", "schema": "1"}
    assert row.key == key


def test_a_cache_has_a_marker_and_other_formats_are_refused(tmp_path):
    assert not is_cache(tmp_path)
    ShardStore(tmp_path).close()
    (tmp_path / MARKER).write_text(f'{{"gracetune cache": {FORMAT + 1}}}')
    with pytest.raises(
        CacheError, match=f"has format {FORMAT + 1}, but this version.* reads format {FORMAT}"
    ):
        ShardStore(tmp_path)


def test_an_invalid_index_file_is_refused_or_rebuilt(tmp_path):
    ShardStore(tmp_path).close()
    (tmp_path / INDEX).write_bytes(b"no database" * 100)
    with pytest.raises(CacheError, match=r"cannot be used.*verify .* --repair` rebuilds it"):
        ShardStore(tmp_path, recover=False)
    with ShardStore(tmp_path) as store:
        assert [*store.keys()] == []


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_entries_lost_from_a_file_are_reported_once(tmp_path, recorder, damage):
    with ShardStore(tmp_path) as store:
        fill(store, range(5))
        row = find_row(store, "k2")
    (path,) = store.shards.iterdir()
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, row.end)
    with ShardStore(tmp_path, recorder) as store:
        there = store.has([f"k{n}" for n in range(6)])
        assert there == ([False] * 6 if damage == "gone" else [True] * 3 + [False] * 3)
        assert len(recorder.texts()) == 1
        fill(store, range(5))
        assert store.has([f"k{n}" for n in range(5)]) == [True] * 5
        assert [store.get(f"k{n}")["latents"][0, 0] for n in range(5)] == [*range(5)]


def test_a_bitset_contains_its_numbers():
    bits = Bitset()
    for number in (0, 9, 100_000):
        assert number not in bits
        bits.add(number)
    assert [n for n in range(100_002) if n in bits] == [0, 9, 100_000]


def test_a_copied_key_keeps_its_components():
    key = text_key("a cat", "e")
    assert copy.deepcopy(key) == key
    assert copy.deepcopy(key).components == key.components


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_ranks_may_create_a_cache_at_the_same_time(tmp_path):
    children = []
    for rank in range(5):
        child = os.fork()
        if child == 0:
            try:
                with ShardStore(tmp_path / "cache") as store:
                    fill(store, range(rank * 10, rank * 10 + 12))
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
    with ShardStore(tmp_path / "cache") as store:
        found = store.get_many([f"k{n}" for n in range(52)])
    assert [one["latents"][0, 0].item() for one in found] == [*range(52)]


def test_rows_are_committed_all_or_none(store):
    fill(store, [1])
    row = find_row(store, "k1")
    wrong = row._replace(key="k3", about={"odd": "\ud800"})
    with pytest.raises(UnicodeEncodeError), store.index() as index:
        index.add([row._replace(key="k2"), wrong], row.shard, 1 << 40)
    with store.index() as index:
        assert index.shard(row.shard).length < 1 << 40
    assert store.has(["k1", "k2", "k3"]) == [True, False, False]


def query_index(store, ask):
    with store.index() as index:
        return ask(index)


def find_row(store, key):
    return query_index(store, lambda index: index.find_rows([key]))[key]


def flip_bit(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
