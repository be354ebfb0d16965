"""Damage the files of a small cache in many ways; no intact entry may be lost.

After each damage, `cache verify` names it, `--repair` restores every entry whose bytes are intact,
and a build that starts without a repair encodes only what is lost, or refuses and names `--repair`.
"""

import json
import os
import random
import shutil
import sqlite3
import threading
from contextlib import closing

import pytest
import torch

from gracetune.cache import shard_format
from gracetune.cache.keys import text_key
from gracetune.cache.maintenance import compact, repair, verify
from gracetune.cache.shard_store import INDEX, MARKER, ShardStore
from gracetune.cli.main import main
from gracetune.errors import CacheError

KEYS = [text_key(f"caption {n}", "encoder") for n in range(7)]
IN_FIRST_SHARD = 4


def entry(number):
    # The last tensor is empty: the entry ends after the last byte that is written.
    return {"latents": torch.full((10, 20), float(number)), "none": torch.zeros(0)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A closed cache with seven entries in two sealed shards."""
    monkeypatch.setattr(shard_format, "DEFAULT_DATA_OFFSET", 4096)
    folder = tmp_path / "cache"
    with ShardStore(folder) as one, ShardStore(folder) as two:  # each writes a shard of its own
        one.put_many({KEYS[n]: entry(n) for n in range(IN_FIRST_SHARD)})
        two.put_many({KEYS[n]: entry(n) for n in range(IN_FIRST_SHARD, len(KEYS))})
    assert len(shard_files(folder)) == 2
    return folder


def shard_files(folder):
    return sorted((folder / "shards").iterdir())


def rows(folder):
    with ShardStore(folder) as store, store.index() as index:
        return [index.find_rows(KEYS)[key] for key in KEYS]


def flip(path, offset, mask=1):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def values(store):
    """Return the number of each entry that is intact, after checking its names and dtypes."""
    found = {}
    for number, got in enumerate(store.get_many(KEYS)):
        if got is not None:
            assert list(got) == ["latents", "none"]
            assert torch.equal(got["latents"], torch.full((10, 20), float(number)))
            assert got["none"].shape == (0,)
            found[number] = got
    return {*found}


def verify_command(folder, capsys, *options):
    capsys.readouterr()
    code = main(["cache", "verify", str(folder), "--json", *options])
    (report,) = json.loads(capsys.readouterr().out)
    return code, report


def check_repair(folder, capsys, *, lost=(), is_named=True):
    """Verify, repair and verify again; then exactly the entries `lost` are missing."""
    code, report = verify_command(folder, capsys)
    assert (code, bool(report["damage"])) == ((1, True) if is_named else (0, False)), report
    if is_named:
        code, _ = verify_command(folder, capsys, "--repair")
        assert code == 0
        assert verify_command(folder, capsys)[0] == 0
    with ShardStore(folder) as store:
        assert values(store) == {*range(len(KEYS))} - {*lost}
    return report["damage"]


def check_build(folder, *, lost=(), may_refuse=False):
    """Encode the missing entries, as a build does; only the entries `lost` may be encoded.

    With `may_refuse`, it may also refuse, or encode others: SQLite overlooks some flipped bits.
    """
    try:
        with ShardStore(folder) as store:
            there = store.has(KEYS)
            there = [
                t and got is not None for t, got in zip(there, store.get_many(KEYS), strict=True)
            ]
            encoded = {n for n, is_there in enumerate(there) if not is_there}
            store.put_many({KEYS[n]: entry(n) for n in encoded})
            compact(store)
            assert values(store) == {*range(len(KEYS))}
    except CacheError as error:
        if may_refuse and "--repair" in str(error):
            return
        raise
    assert may_refuse or encoded == {*lost}
    with ShardStore(folder) as store:
        assert repair(store, verify(store, lambda _: None), lambda _: None).is_clean
        assert values(store) == {*range(len(KEYS))}


# The index


def empty_database(path):
    """Replace the index by an empty one with the right tables."""
    path.unlink()
    with ShardStore(path.parent / "other") as store:
        assert [*store.keys()] == []
    shutil.move(path.parent / "other" / INDEX, path)
    shutil.rmtree(path.parent / "other")


def database_without_tables(path):
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version=2")


def foreign_database(path):
    path.unlink()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, title TEXT)")
        db.execute("PRAGMA user_version=2")


def index_of_another_cache(path):
    """The other cache has the same entries in other shards, so its keys are all known."""
    with ShardStore(path.parent.parent / "other") as store:
        store.put_many({key: entry(n) for n, key in enumerate(KEYS)})
    shutil.copy(store.folder / INDEX, path)


def index_of_an_unrelated_cache(path):
    with ShardStore(path.parent.parent / "other") as store:
        store.put("k", entry(1))
    shutil.copy(store.folder / INDEX, path)


def leftover_log_of_another_index(path):
    """SQLite would apply the log of another database to the index."""
    other = ShardStore(path.parent.parent / "other")
    other.put_many({f"k{n}": entry(n) for n in range(30)})
    log = (other.folder / f"{INDEX}-wal").read_bytes()
    other.close()
    path.with_name(f"{INDEX}-wal").write_bytes(log)


def zero_bytes_with_log(path):
    path.write_bytes(b"")
    path.with_name(f"{INDEX}-wal").write_bytes(b"torn" * 100)
    path.with_name(f"{INDEX}-journal").write_bytes(b"torn" * 100)


INDEX_DAMAGE = {
    "missing": lambda path: path.unlink(),
    "zero bytes": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"no database" * 100),
    "zeros": lambda path: path.write_bytes(bytes(8192)),
    "cut in the header": lambda path: os.truncate(path, 50),
    "one page": lambda path: os.truncate(path, 4096),
    "two pages": lambda path: os.truncate(path, 8192),
    "without the last page": lambda path: os.truncate(path, path.stat().st_size - 4096),
    "cut in the last page": lambda path: os.truncate(path, path.stat().st_size - 100),
    "empty": empty_database,
    "no tables": database_without_tables,
    "foreign": foreign_database,
    "other cache": index_of_another_cache,
    "unrelated cache": index_of_an_unrelated_cache,
    "other log": leftover_log_of_another_index,
    "zero bytes and logs": zero_bytes_with_log,
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE.values(), ids=INDEX_DAMAGE)
def test_a_damaged_index_is_named_and_rebuilt_from_the_shards(cache, capsys, damage):
    damage(cache / INDEX)
    shutil.copytree(cache, cache.parent / "built")
    check_repair(cache, capsys)
    check_build(cache.parent / "built", may_refuse=True)


@pytest.mark.parametrize(
    "change",
    [
        "shards SET length = 5000",
        "shards SET length = 1 << 40",
        "shards SET room = 64",
        "shards SET room = 4160",
        "shards SET name = 'other' WHERE id = 1",
        "entries SET shard = 9 WHERE id = 2",
        "entries SET key = 'other' WHERE id = 2",
        "entries SET tensors = replace(tensors, 'F32', 'I32')",
        "entries SET tensors = replace(tensors, 'latents', 'latentz')",
    ],
)
def test_changed_values_in_the_index_are_found(cache, capsys, change):
    """SQLite does not notice a flipped bit in a value."""
    with closing(sqlite3.connect(cache / INDEX)) as db, db:
        db.execute(f"UPDATE {change}")
    shutil.copytree(cache, cache.parent / "built")
    check_repair(cache, capsys)
    check_build(cache.parent / "built", may_refuse=True)


def test_a_build_rebuilds_an_index_of_zero_bytes_and_reports_it(cache, recorder):
    (cache / INDEX).write_bytes(b"")
    with ShardStore(cache, recorder) as store:
        assert values(store) == {*range(len(KEYS))}
        store.put("new", entry(1))
        compact(store)
        assert values(store) == {*range(len(KEYS))}
    (text,) = recorder.texts()
    assert f"rebuilt from its shards: {len(KEYS)} entries" in text


@pytest.mark.parametrize("is_compacted", [False, True])
def test_entries_that_an_older_index_lacks_are_added(cache, capsys, recorder, is_compacted):
    """The index is restored from a backup, and the shards are newer."""
    backup = (cache / INDEX).read_bytes()
    with ShardStore(cache) as store:
        store.put_many({f"new {n}": entry(n) for n in range(9)})
        if is_compacted:
            store.delete(KEYS[: IN_FIRST_SHARD - 1])
            compact(store)
            store.put_many({KEYS[n]: entry(n) for n in range(IN_FIRST_SHARD - 1)})
    (cache / INDEX).write_bytes(backup)
    shutil.copytree(cache, cache.parent / "built")
    check_repair(cache, capsys)
    with ShardStore(cache.parent / "built", recorder) as store:
        assert all(store.has([f"new {n}" for n in range(9)]))
        assert values(store) == {*range(len(KEYS))}
        assert "entries that its index lacked" in recorder.texts()[0]
    check_build(cache.parent / "built")


def test_a_second_process_waits_until_a_damaged_index_is_rebuilt(cache, recorder):
    (cache / INDEX).write_bytes(b"")
    found = []

    def work():
        with ShardStore(cache, recorder) as store:
            found.append(values(store))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{*range(len(KEYS))}] * 4
    assert len(recorder.texts()) == 1


def test_an_index_of_another_format_is_refused_and_kept(cache):
    with closing(sqlite3.connect(cache / INDEX)) as db:
        db.execute("PRAGMA user_version=9")
    shutil.copytree(cache, cache.parent / "flipped")
    (cache / MARKER).write_text('{"gracetune cache": 9}\n')
    with pytest.raises(CacheError, match="has format 9, but this version"):
        ShardStore(cache)
    with ShardStore(cache.parent / "flipped") as store:
        assert values(store) == {*range(len(KEYS))}


# Shards


def header_nbytes(path):
    return int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("place", ["length", "brace", "format", "room", "name", "offset", "gap"])
@pytest.mark.parametrize("with_index", [True, False])
def test_repair_rewrites_a_flipped_header(cache, capsys, place, with_index):
    path = cache / "shards" / f"{rows(cache)[0].shard}.safetensors"
    intact = path.read_bytes()
    header = intact[: 8 + header_nbytes(path)]
    marks = {"format": b"cache, 2", "room": b"4096", "name": b"/latents", "offset": b'offsets":['}
    marks |= {"gap": b"gap/", "brace": b"{"}
    offset = 0 if place == "length" else header.index(marks[place]) + len(marks[place]) - 1
    flip(path, offset + (place in ("offset", "gap")))
    if not with_index:
        (cache / INDEX).unlink()
    shutil.copytree(cache, cache.parent / "built")
    check_repair(cache, capsys)
    assert path.read_bytes() == intact
    with ShardStore(cache.parent / "built") as store:
        assert store.has(KEYS) == [True] * len(KEYS)
        assert values(store) == {*range(len(KEYS))}


@pytest.mark.parametrize("place", range(0, 24, 5))
@pytest.mark.parametrize("with_index", [True, False])
def test_a_damaged_record_is_named_and_written_again(cache, capsys, place, with_index):
    """The index still finds the entry, but a rebuilt index would not."""
    row = rows(cache)[1]
    path = cache / "shards" / f"{row.shard}.safetensors"
    flip(path, path.read_bytes().rindex(shard_format.RECORD_MAGIC, 0, row.offset) + place)
    if not with_index:
        (cache / INDEX).write_bytes(b"")
        check_build(cache, lost=[1])
        return
    damage = check_repair(cache, capsys)
    assert list(damage) == [f"entry {KEYS[1]}"]
    (cache / INDEX).unlink()
    with ShardStore(cache) as store:
        assert values(store) == {*range(len(KEYS))}


def test_an_entry_with_a_damaged_record_survives_a_damaged_index(cache, capsys):
    row, other = rows(cache)[1:3]
    path = cache / "shards" / f"{row.shard}.safetensors"
    flip(path, path.read_bytes().rindex(shard_format.RECORD_MAGIC, 0, row.offset))
    flip(cache / INDEX, (cache / INDEX).read_bytes().index(other.checksum))
    check_repair(cache, capsys)


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize(
    ("length", "lost"),
    [(0, range(IN_FIRST_SHARD)), (100, range(IN_FIRST_SHARD)), ("record 2", [2, 3]), ("last", [3])],
)
def test_a_truncated_shard_loses_only_what_was_cut(cache, capsys, with_index, length, lost):
    all_rows = rows(cache)
    path = cache / "shards" / f"{all_rows[0].shard}.safetensors"
    if length == "record 2":
        length = all_rows[2].offset - 8
    os.truncate(path, all_rows[3].offset + 5 if length == "last" else length)
    if not with_index:
        (cache / INDEX).unlink()
    shutil.copytree(cache, cache.parent / "built")
    check_repair(cache, capsys, lost=lost)
    check_build(cache.parent / "built", lost=lost)


@pytest.mark.parametrize("keeps_index", [True, False])
def test_intact_entries_of_a_killed_writer_are_kept(cache, capsys, recorder, keeps_index):
    """Killed before the commit: the shard has an entry, complete or not, that the index lacks."""
    backup = (cache / INDEX).read_bytes()
    killed = ShardStore(cache)
    killed.put("new", entry(1))
    killed.put("torn", entry(2))
    killed._writer.release()  # what the kernel does when a process dies
    with killed.index() as index:
        row = index.find_rows(["torn"])["torn"]
    os.truncate(cache / "shards" / f"{row.shard}.open", row.offset + 5)
    killed.close()
    if keeps_index:
        (cache / INDEX).write_bytes(backup)
    else:
        (cache / INDEX).write_bytes(b"")
    check_repair(cache, capsys)
    with ShardStore(cache, recorder) as store:
        assert store.has(["new", "torn"]) == [True, False]
        store.put("torn", entry(2))
        assert verify(store, recorder).is_clean


def test_a_writer_that_is_still_running_is_not_damage(cache, recorder):
    with ShardStore(cache) as writer, ShardStore(cache, recorder) as store:
        writer.put("new", entry(1))
        writer._writer._file.append(shard_format.pack("uncommitted", entry(2), {}), 0)
        assert verify(store, recorder).is_clean
        store.put("other", entry(3))
        writer.put("last", entry(4))
        assert verify(store, recorder).is_clean
    assert recorder.texts() == []


def test_a_sealed_file_without_entries_is_kept_until_the_cache_is_cleaned(cache, capsys):
    """Another program's file, or a shard that is wholly destroyed."""
    path = cache / "shards" / "model.safetensors"
    path.write_bytes(bytes(1000))
    with ShardStore(cache) as store:
        store.put("new", entry(1))
    assert path.read_bytes() == bytes(1000)
    assert list(check_repair(cache, capsys)) == ["shard model"]
    assert not path.exists()


def test_a_growing_copy_does_not_replace_a_complete_shard(cache, capsys):
    """A backup was copied over the cache, and the shard was sealed since."""
    row = rows(cache)[0]
    path = cache / "shards" / f"{row.shard}.safetensors"
    older = path.with_suffix(".open")
    older.write_bytes(path.read_bytes()[: row.end])
    check_build(cache)
    with ShardStore(cache) as store:
        store.put_many({f"new {n}": entry(n) for n in range(9)})
        compact(store)
        assert values(store) == {*range(len(KEYS))}
    assert not older.exists()
    check_repair(cache, capsys, is_named=False)


# Every byte


def sample_offsets(size, count, seed):
    return sorted(random.Random(seed).sample(range(size), min(size, count)))


def check_flips(cache, name, offsets, capsys, may_lose=lambda offset: ()):
    work = cache.parent / "work"
    for number, offset in enumerate(offsets):
        for build_first in (False, True):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(cache, work)
            flip(work / name, offset, 1 << number % 8)
            lost = may_lose(offset)
            try:
                if build_first:
                    check_build(work, lost=lost, may_refuse=name == INDEX)
                else:
                    is_named = verify_command(work, capsys)[0] == 1
                    check_repair(work, capsys, lost=lost, is_named=is_named)
            except BaseException as error:
                error.add_note(f"byte {offset} of {name}, bit {number % 8}, {build_first=}")
                raise


def check_index_flips(cache, count, capsys):
    check_flips(cache, INDEX, sample_offsets((cache / INDEX).stat().st_size, count, 1), capsys)


def check_shard_flips(cache, count, capsys):
    path = shard_files(cache)[0]
    found = [(n, row) for n, row in enumerate(rows(cache)) if row.shard == path.stem]

    def lost(offset):
        return [
            n
            for n, row in found
            for t in row.tensors
            if 0 <= offset - row.offset - t.offset < t.nbytes
        ]

    header = range(8 + header_nbytes(path))
    offsets = [*header, *range(4096, path.stat().st_size)]
    chosen = [offsets[i] for i in sample_offsets(len(offsets), count, 2)]
    check_flips(cache, f"shards/{path.name}", chosen, capsys, lost)


def test_a_flipped_byte_of_the_index_loses_no_entry(cache, capsys):
    check_index_flips(cache, 15, capsys)


def test_a_flipped_byte_of_a_shard_loses_at_most_its_own_entry(cache, capsys):
    check_shard_flips(cache, 15, capsys)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("check", [check_index_flips, check_shard_flips])
def test_no_flipped_byte_loses_an_intact_entry(cache, capsys, check):
    check(cache, 1 << 30, capsys)
