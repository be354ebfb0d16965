"""Processes that are killed at random moments of building, refreshing and collecting a cache.

Children are forked, because importing torch takes longer than all that they do before they die.
What a child has finished it tells through a pipe: exactly that must be there afterwards.
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
"""What was done, and to which batch."""
BATCH = 4


def batch(number):
    """Entries that can be made again from their number alone."""
    return {
        f"b{number}-{i}": {
            "latents": torch.full((8, 5 + i), float(number * BATCH + i)),
            "empty": torch.zeros(0, dtype=torch.bfloat16),
        }
        for i in range(BATCH)
    }


def build(folder, begin, say):
    with ShardStore(folder) as store:
        for number in range(begin, begin + 30):
            store.put_many(batch(number))
            say(b"+", number)


def refresh(folder, begin, say):
    """Each new generation replaces the one before."""
    with ShardStore(folder) as store:
        for number in range(begin, begin + 30):
            store.put_many(batch(number))
            say(b"+", number)
            say(b"?", number - 1)
            store.delete([*batch(number - 1)])
            say(b"-", number - 1)
            compact(store)


def collect(folder, begin, say):
    """Everything that was there goes, batch by batch, while a little comes."""
    with ShardStore(folder) as store:
        there = sorted({int(key[1:].partition("-")[0]) for key in store.keys()})  # noqa: SIM118
        for number in there:
            say(b"?", number)
            store.delete([*batch(number)])
            say(b"-", number)
            compact(store)
            store.put_many(batch(begin + number))
            say(b"+", begin + number)


def killed(work, folder, begin, words, delay_s):
    """What the child had done when it was killed, in order: a moment after so many words of it,
    because on a busy machine a moment alone may pass before it has done anything."""
    hears, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(hears)
            work(folder, begin, lambda what, number: os.write(says, MESSAGE.pack(what, number)))
        finally:
            os._exit(0)
    os.close(says)
    told = bytearray()
    while len(told) < words * MESSAGE.size and (data := os.read(hears, 65536)):
        told += data
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while data := os.read(hears, 65536):
        told += data
    os.close(hears)
    return [*MESSAGE.iter_unpack(bytes(told))]


def survive(folder, rounds, seed, emit):
    """Kill one child after the other; judge the cache after each."""
    draw = random.Random(seed)
    there, maybe = set(), set()
    for number in range(rounds):
        work = draw.choice([build, build, refresh, collect])
        moment = draw.randint(0, 12), draw.uniform(0.0, 0.03)
        for what, which in killed(work, folder, 1 + number * 1000, *moment):
            if what == b"+":
                there.add(which)
            elif what == b"?":  # whether it is still there nobody knows until the next word
                there.discard(which)
                maybe.add(which)
            else:
                maybe.discard(which)
        with ShardStore(folder, emit) as store:
            report = verify(store, emit)
            assert report.is_clean, (number, work.__name__, report)
            for which in there:
                for key, entry in batch(which).items():
                    got = store.get(key)
                    assert got is not None, (number, work.__name__, key)
                    assert all(torch.equal(got[name], t) for name, t in entry.items())
            compact(store)
            assert verify(store, emit).is_clean
    return there


def check(tmp_path, told, monkeypatch, rounds, seed):
    monkeypatch.setattr(
        shard_format, "MAX_SHARD_NBYTES", shard_format.DEFAULT_DATA_OFFSET + 8192
    )  # so that files are sealed all the time
    folder = tmp_path / "cache"
    there = survive(folder, rounds, seed, told)
    assert len(there) >= rounds // 2, "children lived too short to prove anything"
    assert told.texts() == [], "nothing was found damaged"
    for path in folder.glob(f"{INDEX}*"):
        path.unlink()
    with ShardStore(folder, told) as store:
        assert verify(store, told).is_clean, "the index that is made again is right"
        every = [key for which in there for key in batch(which)]
        assert all(store.has(every)), "and has all that the lost one had"
        store.delete([*store.keys()])
        compact(store)
        assert [*store.shards.iterdir()] == [], "killed writers left nothing behind"


def test_no_committed_entry_is_lost_in_twenty_kills(tmp_path, told, monkeypatch):
    check(tmp_path, told, monkeypatch, 20, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_committed_entry_is_lost_in_two_hundred_kills(tmp_path, told, monkeypatch):
    check(tmp_path, told, monkeypatch, 200, 2)
