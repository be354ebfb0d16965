"""The explorer finds the same as executing every interleaving byte by byte."""

import random
from collections import Counter

import pytest
import torch
from fakes.interleavings import explore
from fakes.recorded_cuda import Clock, RecordedCopyEngine, RecordedCuda, Span, record_cuda


class BruteForce:
    """Executes all interleavings of a recording without segments and without sharing states."""

    def __init__(self, recording):
        self.regions = recording.regions
        self.copied = {
            byte
            for operation in recording.operations
            if operation.is_copy
            for byte in bytes_of(operation.reads + operation.writes)
        }
        self.queues = [[] for _ in recording.streams]
        self.expected = {}
        self.found = set()
        contents = {}
        for number, operation in enumerate(recording.operations):
            for phase in ("begin", "end") if operation.is_copy else ("run",):
                self.queues[operation.stream].append((number, operation, phase))
                self.expected[number, phase] = self.read(operation, contents)
                contents.update(dict.fromkeys(bytes_of(operation.writes), (number, phase)))

    def interleavings(self):
        """Return all interleavings, or None if one of them goes wrong.

        Operations that touch no bytes of copies are left out of them.
        """
        return self.found if self.run((0,) * len(self.queues), {}, ()) else None

    def run(self, done, contents, path):
        """Return False if an interleaving that starts with `path` goes wrong."""
        ended = True
        for stream, queue in enumerate(self.queues):
            if done[stream] == len(queue):
                continue
            ended = False
            number, operation, phase = queue[done[stream]]
            if not self.are_over(done, operation.clock):
                continue
            touched = bytes_of(operation.reads + operation.writes) & self.copied
            if self.read(operation, contents) != self.expected[number, phase]:
                return False
            if any(self.is_freed(done, region) for region, _ in touched):
                return False
            after = dict(contents)
            for byte in bytes_of(operation.writes):
                torn = phase == "end" and contents.get(byte) != (number, "begin")
                after[byte] = (number, "begin") if torn else (number, phase)
            following = (*done[:stream], done[stream] + 1, *done[stream + 1 :])
            if not self.run(following, after, path + (((number, phase),) if touched else ())):
                return False
        if ended:
            self.found.add(path)
        return True

    def read(self, operation, contents):
        return {byte: contents.get(byte) for byte in bytes_of(operation.reads) & self.copied}

    def are_over(self, done, clock):
        ends = [
            sum(phase != "begin" for _, _, phase in queue[:count])
            for queue, count in zip(self.queues, done, strict=True)
        ]
        return all(ends[stream] >= count for stream, count in clock.items())

    def is_freed(self, done, region):
        clock = self.regions[region].free_clock
        return clock is not None and self.are_over(done, clock)


def bytes_of(spans):
    return {(span.region, byte) for span in spans for byte in range(span.start, span.end)}


def random_commands(rng):
    """Return mostly disjoint copies and kernels of all streams, with waits and a free."""
    commands = []
    for _ in range(rng.randint(3, 5)):
        starts = [(region, rng.randrange(3)) for region in rng.sample(range(4), 2)]
        spans = [Span(region, start, start + rng.randint(1, 2)) for region, start in starts]
        commands.append(("run", rng.choice([0, 1, 1, 2, 2, 2, 3, 3]), *spans))
        if rng.random() < 0.6:
            commands.append(("wait", rng.randrange(4), rng.randrange(4)))
    if rng.random() < 0.4:
        commands.insert(
            rng.randint(1, len(commands)), ("free", rng.randrange(4), rng.randint(1, 3))
        )
    return commands


def record_commands(commands):
    """Record copies of streams 2 and 3, kernels of stream 1 and the host, waits, and frees."""
    cuda = RecordedCuda(lambda: False, lambda: 0.0)
    streams = [cuda.host, cuda.current, cuda.new_stream("a"), cuda.new_stream("b")]
    for stream in streams[2:]:
        stream.copies = True
    memory = [torch.empty(4, dtype=torch.uint8) for _ in range(4)]
    regions = [cuda.region_of(tensor) for tensor in memory]
    for kind, number, *arguments in commands:
        if kind == "wait":
            streams[number].clock |= streams[arguments[0]].clock
        elif kind == "free" and regions[number].free_clock is None:
            regions[number].free_clock = Clock(streams[arguments[0]].clock | cuda.host.clock)
        elif kind == "run":
            source, target = arguments
            freed = any(regions[span.region].free_clock is not None for span in arguments)
            if not freed and source.region != target.region:
                with cuda.stream(streams[number]):
                    cuda.add("copy_", [source], [target])
    return cuda.recording


def test_the_explorer_agrees_with_brute_force():
    outcomes = Counter()
    for seed in range(600):
        recording = record_commands(random_commands(random.Random(seed)))
        found = BruteForce(recording).interleavings()
        result = explore(recording)
        assert (found is None) == (result.violation is not None), seed
        assert found is None or result.interleavings == len(found), seed
        outcomes[None if found is None else len(found) > 1] += 1
    assert min(outcomes[None], outcomes[True]) > 100, outcomes


def test_independent_copies_are_counted_exactly():
    for copies, interleavings in (([2, 3], 6), ([2, 2, 3], 15), ([2, 2, 3, 3], 70)):
        commands = [
            ("run", stream, Span(0, index, index + 1), Span(1, index, index + 1))
            for index, stream in enumerate(copies)
        ]
        assert explore(record_commands(commands)).interleavings == interleavings


def test_no_state_is_lost_if_two_orders_leave_different_contents():
    """Two unordered writes go wrong only in the order that leaves the first one's content."""
    target = Span(1, 0, 1)
    commands = [
        ("run", 2, Span(0, 0, 1), target),
        ("run", 3, Span(0, 1, 2), target),
        ("wait", 1, 2),
        ("wait", 1, 3),
        ("run", 1, target, Span(2, 0, 1)),
    ]
    violation = explore(record_commands(commands)).violation
    assert violation.stream == "compute"
    assert explore(record_commands(commands[:2])).violation is None


@pytest.mark.parametrize(
    ("freed", "wrong"), [("before the wait", True), ("after the wait", False), ("never", False)]
)
def test_memory_may_be_freed_once_the_compute_stream_has_waited(freed, wrong):
    with record_cuda() as cuda:
        engine = RecordedCopyEngine(cuda)
        host = engine.allocate_host(16)
        memory = torch.zeros(16, dtype=torch.uint8)
        pending = engine.copy(host, memory, poison=False)
        if freed == "before the wait":
            del memory
        pending.wait(prefetched=True)
        if freed == "after the wait":
            del memory
        torch.ones(16)
    violation = explore(cuda.recording).violation
    assert (violation is not None) == wrong
    assert not wrong or "which was freed" in violation.problem


@pytest.mark.parametrize("waits", [False, True])
def test_host_memory_may_be_freed_once_the_host_has_waited(waits):
    with record_cuda() as cuda:
        engine = RecordedCopyEngine(cuda)
        memory, host = torch.zeros(16, dtype=torch.uint8), torch.empty(16, dtype=torch.uint8)
        cuda.region_of(host).is_host = True
        engine.copy(host, memory, poison=False).wait(prefetched=True)
        if waits:
            engine.stalls()
        del host
        torch.ones(16)
    assert (explore(cuda.recording).violation is None) == waits
