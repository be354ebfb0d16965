"""Kill processes at random moments while they build, refresh and compact a cache.

Children are forked, because importing torch takes longer than their work. A child reports each
completed operation through a pipe; exactly the reported entries must exist afterwards.
"""

import os
import random
import signal
import struct
import time

import pytest
import torch

from gracetune.cache import shard_format
from gracetune.cache.maintenance import compact, verify
from gracetune.cache.shard_store import INDEX, ShardStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
MESSAGE = struct.Struct("<ci")
"""Operation and batch number."""
BATCH = 4


def batch(number):
    """Return entries that are determined by their batch number."""
    return {
        f"b{number}-{i}": {
            "latents": torch.full((8, 5 + i), float(number * BATCH + i)),
            "empty": torch.zeros(0, dtype=torch.bfloat16),
        }
        for i in range(BATCH)
    }


def build(folder, begin, report):
    with ShardStore(folder) as store:
        for number in range(begin, begin + 30):
            store.put_many(batch(number))
            report(b"+", number)


def refresh(folder, begin, report):
    """Replace each batch by the next one."""
    with ShardStore(folder) as store:
        for number in range(begin, begin + 30):
            store.put_many(batch(number))
            report(b"+", number)
            report(b"?", number - 1)
            store.delete([*batch(number - 1)])
            report(b"-", number - 1)
            compact(store)


def collect(folder, begin, report):
    """Delete all existing batches one by one, and add a few new ones."""
    with ShardStore(folder) as store:
        committed = sorted({int(key[1:].partition("-")[0]) for key in store.keys()})  # noqa: SIM118
        for number in committed:
            report(b"?", number)
            store.delete([*batch(number)])
            report(b"-", number)
            compact(store)
            store.put_many(batch(begin + number))
            report(b"+", begin + number)


def run_and_kill(work, folder, begin, num_messages, delay_s):
    """Fork a child, kill it, and return the operations that it reported, in order.

    The child is killed a moment after a number of messages; a moment alone could pass on a busy
    machine before it has done anything.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            work(
                folder, begin, lambda what, number: os.write(write_end, MESSAGE.pack(what, number))
            )
        finally:
            os._exit(0)
    os.close(write_end)
    received = bytearray()
    while len(received) < num_messages * MESSAGE.size and (data := os.read(read_end, 65536)):
        received += data
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while data := os.read(read_end, 65536):
        received += data
    os.close(read_end)
    return [*MESSAGE.iter_unpack(bytes(received))]


def kill_and_check(folder, rounds, seed, emit):
    """Kill one child after the other, and verify the cache after each."""
    rng = random.Random(seed)
    committed, uncertain = set(), set()
    for number in range(rounds):
        work = rng.choice([build, build, refresh, collect])
        moment = rng.randint(0, 12), rng.uniform(0.0, 0.03)
        for what, batch_number in run_and_kill(work, folder, 1 + number * 1000, *moment):
            if what == b"+":
                committed.add(batch_number)
            elif what == b"?":  # unknown until the next message
                committed.discard(batch_number)
                uncertain.add(batch_number)
            else:
                uncertain.discard(batch_number)
        with ShardStore(folder, emit) as store:
            report = verify(store, emit)
            assert report.is_clean, (number, work.__name__, report)
            for batch_number in committed:
                for key, entry in batch(batch_number).items():
                    got = store.get(key)
                    assert got is not None, (number, work.__name__, key)
                    assert all(torch.equal(got[name], t) for name, t in entry.items())
            compact(store)
            assert verify(store, emit).is_clean
    return committed


def check(tmp_path, recorder, monkeypatch, rounds, seed):
    monkeypatch.setattr(
        shard_format, "MAX_SHARD_NBYTES", shard_format.DEFAULT_DATA_OFFSET + 8192
    )  # so that shards are sealed often
    folder = tmp_path / "cache"
    committed = kill_and_check(folder, rounds, seed, recorder)
    assert len(committed) >= rounds // 2, "the children were killed too early to prove anything"
    assert recorder.texts() == [], "no entry is damaged"
    for path in folder.glob(f"{INDEX}*"):
        path.unlink()
    with ShardStore(folder, recorder) as store:
        assert verify(store, recorder).is_clean, "the rebuilt index is correct"
        every = [key for batch_number in committed for key in batch(batch_number)]
        assert all(store.has(every)), "and has all committed entries"
        store.delete([*store.keys()])
        compact(store)
        assert [*store.shards.iterdir()] == [], "killed writers leave nothing behind"


def test_no_committed_entry_is_lost_in_twenty_kills(tmp_path, recorder, monkeypatch):
    check(tmp_path, recorder, monkeypatch, 20, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_committed_entry_is_lost_in_two_hundred_kills(tmp_path, recorder, monkeypatch):
    check(tmp_path, recorder, monkeypatch, 200, 2)
