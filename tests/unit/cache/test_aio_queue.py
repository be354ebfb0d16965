import ctypes
import errno
import gc
import os
import threading

import numpy as np
import pytest

from gracetune.cache import shard_reader
from gracetune.cache.memory_tier import allocate_page_aligned
from gracetune.cache.shard_reader import QUEUE_DEPTH, AioQueue, ReadRequest

PAGE = 4096
PAGES = 3 * QUEUE_DEPTH


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A descriptor of a file whose pages each hold their number."""
    path = tmp_path_factory.mktemp("direct") / "pages"
    path.write_bytes(np.repeat(np.arange(PAGES, dtype=np.uint32), PAGE // 4).tobytes() + b"tail")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("the file system of the tests takes no direct reads")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def queue():
    made = AioQueue()
    yield made
    made.close()


def wanted(descriptor, numbers):
    rooms = allocate_page_aligned(len(numbers) * PAGE).numpy().reshape(len(numbers), PAGE)
    return [ReadRequest(descriptor, n * PAGE, room) for n, room in zip(numbers, rooms, strict=True)]


def holds(one):
    return set(one.buffer.view(np.uint32).tolist())


def test_more_reads_than_the_queue_depth_complete_in_any_order(queue, pages):
    numbers = [*np.random.default_rng(0).permutation(PAGES)]
    asked = wanted(pages, numbers)
    tickets = queue.submit(asked)
    for place in reversed(range(PAGES)):
        assert queue.wait(tickets[place]) == PAGE
        assert holds(asked[place]) == {numbers[place]}
    assert queue.submit([]) == []


def test_a_read_at_the_end_of_a_file_is_short(queue, pages):
    inside, tail, past_end = queue.submit(wanted(pages, [PAGES - 1, PAGES, PAGES + 1]))
    assert [queue.wait(ticket) for ticket in (past_end, tail, inside)] == [0, 4, PAGE]


def test_threads_share_a_queue(queue, pages):
    wrong = []

    def read(seed):
        draw = np.random.default_rng(seed)
        for _ in range(20):
            numbers = draw.integers(0, PAGES, 16)
            asked = wanted(pages, numbers)
            for number, one, ticket in zip(numbers, asked, queue.submit(asked), strict=True):
                if queue.wait(ticket) != PAGE or holds(one) != {number}:
                    wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_a_closed_queue_is_created_again(queue, pages):
    begun = queue.submit(wanted(pages, range(8)))
    queue.close()
    assert [queue.wait(ticket) for ticket in begun] == [PAGE] * 8  # closing waited for all
    queue.close()
    (ticket,) = queue.submit(wanted(pages, [5]))
    assert queue.wait(ticket) == PAGE


def test_drain_waits_for_unwanted_reads(queue, pages):
    asked = wanted(pages, range(32))
    tickets = queue.submit(asked)
    queue.wait(tickets[3])
    queue.drain(tickets)
    assert [holds(one) for one in asked] == [{n} for n in range(32)]
    with pytest.raises(AssertionError, match="no read"):
        queue.wait(tickets[0])


def test_an_invalid_request_leaves_no_read_in_flight(queue, pages):
    good, bad = wanted(pages, range(4)), wanted(10**6, [4])
    with pytest.raises(OSError, match="Bad file descriptor"):
        queue.submit([*good, *bad])
    assert [holds(one) for one in good] == [{n} for n in range(4)]
    assert queue._in_flight == queue._results == {}


def test_a_disk_error_is_raised_for_its_read_only(queue, pages, monkeypatch):
    bad, good = queue.submit(wanted(pages, [0, 1]))
    queue.drain([])
    while queue._in_flight:
        queue._reap()
    queue._results[bad] = -errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        queue.wait(bad)
    assert queue.wait(good) == PAGE


def test_a_signal_does_not_end_a_wait(queue, pages):
    real, calls = queue._syscall, []

    def interrupted(number, *rest):
        calls.append(number)
        if number == queue._syscall_numbers[2] and calls.count(number) == 1:
            ctypes.set_errno(errno.EINTR)
            return -1
        return real(number, *rest)

    queue._syscall = interrupted
    (ticket,) = queue.submit(wanted(pages, [7]))
    assert queue.wait(ticket) == PAGE


def test_a_failing_wait_raises(queue, pages, monkeypatch):
    (ticket,) = queue.submit(wanted(pages, [7]))
    with monkeypatch.context() as patched:
        patched.setattr(queue, "_syscall", refuse(errno.EINVAL))
        with pytest.raises(OSError, match="Invalid argument"):
            queue.wait(ticket)
    assert queue.wait(ticket) == PAGE


def refuse(code):
    def call(*_):
        ctypes.set_errno(code)
        return -1

    return call


def test_a_refused_queue_has_a_reason_and_is_requested_once(pages, monkeypatch):
    queue = AioQueue()
    monkeypatch.setattr(queue, "_syscall", refuse(errno.EPERM))
    assert queue.submit(wanted(pages, [1])) is None
    assert queue.refusal == "Operation not permitted"
    monkeypatch.undo()
    assert queue.submit(wanted(pages, [1])) is None


def test_an_unknown_architecture_has_no_queue(pages):
    queue = AioQueue("vax")
    assert queue.submit(wanted(pages, [1])) is None
    assert "vax" in queue.refusal


def test_only_the_creating_process_destroys_a_queue(pages):
    queue, calls = AioQueue(), []
    (ticket,) = queue.submit(wanted(pages, [1]))
    queue.wait(ticket)
    context = queue._context.value
    shard_reader._destroy_queue(lambda *words: calls.append(words), 1, context, os.getpid() + 1)
    assert calls == []
    release = queue._release
    del queue
    gc.collect()
    assert not release.alive
