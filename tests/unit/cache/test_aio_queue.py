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
    """A file in which each page is filled with its own number, opened for direct reads."""
    path = tmp_path_factory.mktemp("direct") / "pages"
    path.write_bytes(np.repeat(np.arange(PAGES, dtype=np.uint32), PAGE // 4).tobytes() + b"tail")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("the file system of the tests has no direct reads")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def queue():
    created = AioQueue()
    yield created
    created.close()


def read_requests(descriptor, numbers):
    buffers = allocate_page_aligned(len(numbers) * PAGE).numpy().reshape(len(numbers), PAGE)
    return [
        ReadRequest(descriptor, n * PAGE, buffer)
        for n, buffer in zip(numbers, buffers, strict=True)
    ]


def page_numbers(request):
    return set(request.buffer.view(np.uint32).tolist())


def test_more_reads_than_the_queue_depth_complete_in_any_order(queue, pages):
    numbers = [*np.random.default_rng(0).permutation(PAGES)]
    requests = read_requests(pages, numbers)
    tickets = queue.submit(requests)
    for i in reversed(range(PAGES)):
        assert queue.wait(tickets[i]) == PAGE
        assert page_numbers(requests[i]) == {numbers[i]}
    assert queue.submit([]) == []


def test_a_read_at_the_end_of_a_file_is_short(queue, pages):
    inside, tail, past_end = queue.submit(read_requests(pages, [PAGES - 1, PAGES, PAGES + 1]))
    assert [queue.wait(ticket) for ticket in (past_end, tail, inside)] == [0, 4, PAGE]


def test_threads_share_a_queue(queue, pages):
    wrong = []

    def read(seed):
        draw = np.random.default_rng(seed)
        for _ in range(20):
            numbers = draw.integers(0, PAGES, 16)
            requests = read_requests(pages, numbers)
            for number, request, ticket in zip(
                numbers, requests, queue.submit(requests), strict=True
            ):
                if queue.wait(ticket) != PAGE or page_numbers(request) != {number}:
                    wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_a_closed_queue_is_created_again(queue, pages):
    tickets = queue.submit(read_requests(pages, range(8)))
    queue.close()
    assert [queue.wait(ticket) for ticket in tickets] == [PAGE] * 8  # close waits for all reads
    queue.close()
    (ticket,) = queue.submit(read_requests(pages, [5]))
    assert queue.wait(ticket) == PAGE


def test_drain_waits_for_unwanted_reads(queue, pages):
    requests = read_requests(pages, range(32))
    tickets = queue.submit(requests)
    queue.wait(tickets[3])
    queue.drain(tickets)
    assert [page_numbers(request) for request in requests] == [{n} for n in range(32)]
    with pytest.raises(AssertionError, match="no read"):
        queue.wait(tickets[0])


def test_an_invalid_request_leaves_no_read_in_flight(queue, pages):
    good, bad = read_requests(pages, range(4)), read_requests(10**6, [4])
    with pytest.raises(OSError, match="Bad file descriptor"):
        queue.submit([*good, *bad])
    assert [page_numbers(request) for request in good] == [{n} for n in range(4)]
    assert queue._in_flight == queue._results == {}


def test_a_disk_error_is_raised_for_its_read_only(queue, pages, monkeypatch):
    bad, good = queue.submit(read_requests(pages, [0, 1]))
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
    (ticket,) = queue.submit(read_requests(pages, [7]))
    assert queue.wait(ticket) == PAGE


def test_a_failing_wait_raises(queue, pages, monkeypatch):
    (ticket,) = queue.submit(read_requests(pages, [7]))
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
    assert queue.submit(read_requests(pages, [1])) is None
    assert queue.refusal == "Operation not permitted"
    monkeypatch.undo()
    assert queue.submit(read_requests(pages, [1])) is None


def test_an_unknown_architecture_has_no_queue(pages):
    queue = AioQueue("vax")
    assert queue.submit(read_requests(pages, [1])) is None
    assert "vax" in queue.refusal


def test_only_the_creating_process_destroys_a_queue(pages):
    queue, calls = AioQueue(), []
    (ticket,) = queue.submit(read_requests(pages, [1]))
    queue.wait(ticket)
    context = queue._context.value
    shard_reader._destroy_queue(lambda *words: calls.append(words), 1, context, os.getpid() + 1)
    assert calls == []
    release = queue._release
    del queue
    gc.collect()
    assert not release.alive
