import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gracetune.cache import shard_format
from gracetune.cache.keys import text_key
from gracetune.cache.maintenance import verify
from gracetune.cache.shard_format import find_record, pack, read_record
from gracetune.cache.shard_store import INDEX, ShardStore


def entry(number, words=3):
    return {"latents": torch.full((words,), float(number)), "mask": torch.ones(2).bool()}


def fill(store, numbers, words=3):
    store.put_many({f"k{n}": entry(n, words) for n in numbers})


def delete_index(store):
    for path in store.folder.glob(f"{INDEX}*"):
        path.unlink()


def all_values(store):
    keys = [*store.keys()]
    return dict(zip(keys, (e["latents"][0].item() for e in store.get_many(keys)), strict=True))


@pytest.mark.parametrize("words", [3, 40_000])
def test_a_lost_index_is_rebuilt_from_sealed_and_open_shards(
    tmp_path, recorder, monkeypatch, words
):
    monkeypatch.setattr(
        shard_format, "MAX_SHARD_NBYTES", shard_format.DEFAULT_DATA_OFFSET + 400_000
    )
    key = text_key("a cat", "encoder")
    with ShardStore(tmp_path) as store:
        fill(store, range(20), words)
        store.put(key, entry(50))
    killed = ShardStore(tmp_path)
    fill(killed, range(20, 30), words)
    killed._writer.release()  # what the kernel does when a process dies
    before = all_values(killed)
    killed._use_lock.close()
    delete_index(killed)
    with ShardStore(tmp_path, recorder) as store:
        assert all_values(store) == before
        assert len(before) == 31
        (text,) = recorder.texts()
        assert "31 entries" in text
        with store.index() as index:
            (row,) = index.rows_with_component("caption", "a cat")
        assert row.about == key.components
        fill(store, [99], words)
        assert verify(store, recorder).is_clean
        assert store.get("k99")["latents"][0] == 99


def test_a_rebuilt_index_has_all_but_torn_and_damaged_entries(tmp_path, recorder):
    with ShardStore(tmp_path) as store:
        fill(store, range(6))
        with store.index() as index:
            rows = index.find_rows([f"k{n}" for n in range(6)])
    (path,) = store.shards.iterdir()
    with path.open("r+b") as file:
        file.seek(rows["k1"].offset)
        file.write(b"\x55")  # its bytes
        file.seek(rows["k3"].offset - 100)
        file.write(b"\x00" * 40)  # its record
        file.truncate(rows["k5"].end - 1)
    delete_index(store)
    with ShardStore(tmp_path, recorder) as store:
        assert all_values(store) == {"k0": 0, "k2": 2, "k4": 4}
        fill(store, [1, 3, 5])
        assert sorted(all_values(store).values()) == [*range(6)]


def test_a_second_process_waits_for_the_rebuild(tmp_path, recorder):
    with ShardStore(tmp_path) as store:
        fill(store, range(50))
    delete_index(store)
    found = []

    def work():
        with ShardStore(tmp_path, recorder) as opened:
            found.append(len(all_values(opened)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [50] * 4
    assert len(recorder.texts()) == 1


def test_an_empty_folder_needs_no_rebuild(tmp_path, recorder):
    ShardStore(tmp_path, recorder).close()
    (tmp_path / INDEX).unlink()
    (tmp_path / "shards" / "note.txt").write_text("no shard")
    ShardStore(tmp_path, recorder).close()
    assert recorder.texts() == []


@pytest.mark.parametrize("is_sealed", [True, False])
def test_the_first_record_tells_where_the_header_space_ends(tmp_path, monkeypatch, is_sealed):
    monkeypatch.setattr(shard_format, "DEFAULT_DATA_OFFSET", 4096)
    many = {f"part {n}": torch.ones(1) for n in range(60)}
    store = ShardStore(tmp_path)
    store.put("many", many)
    with store.index() as index:
        (shard,) = index.shards()
    assert shard.data_offset > 4096
    if not is_sealed:
        store._writer.release()
    store.close()
    delete_index(store)
    with ShardStore(tmp_path) as store, store.index() as index:
        assert index.shards() == [shard]
        assert list(store.get("many")) == list(many)


@given(
    st.binary(max_size=300),
    st.dictionaries(st.text(max_size=20), st.text(max_size=40), max_size=4),
    st.integers(0, 3000),
)
@example(before=shard_format.RECORD_MAGIC, about={}, words=0)
@settings(deadline=None, max_examples=60)
def test_records_are_found_at_any_offset(before, about, words):
    """Bytes that only start like a record are skipped."""
    packed = pack("key \N{SNOWMAN}", {"x": torch.zeros(words)}, about)
    at = shard_format.align_up(len(before))
    data = torch.frombuffer(
        bytearray(before.ljust(at, b"g") + packed.record), dtype=torch.uint8
    ).numpy()
    found = find_record(data, 0)
    while found < at:
        assert before[found:].startswith(shard_format.RECORD_MAGIC)
        assert read_record(data, found) is None
        found = find_record(data, found + shard_format.TENSOR_ALIGNMENT)
    assert found == at
    record = read_record(data, at)
    assert (record.key, record.about, record.checksum) == (
        "key \N{SNOWMAN}",
        about,
        packed.checksum,
    )
    assert record.offset % shard_format.entry_alignment(words * 4) == 0
    assert read_record(data[:-1], at) is None
    assert read_record(data, at + 1) is None
    assert find_record(data, at + shard_format.TENSOR_ALIGNMENT) is None


def test_a_record_with_an_invalid_length_is_ignored():
    data = bytearray(shard_format.RECORD_MAGIC + (2**60).to_bytes(8, "little") + bytes(48))
    assert read_record(torch.frombuffer(data, dtype=torch.uint8).numpy(), 0) is None
