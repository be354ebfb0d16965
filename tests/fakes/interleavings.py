"""Run a recording of CUDA streams in every possible order, and find reads of wrong data.

`explore` enumerates all interleavings of the operations in a `recorded_cuda.Recording` that respect
the order of each stream, the events and the host. It looks for operations that

- read other data than in issue order, or memory that a copy is still writing,
- use memory that may already belong to someone else, or
- are copies whose source changes between their begin and their end.

If there is none, then by induction every operation of every interleaving reads and so computes
exactly what it does in issue order.

A kernel is one transition and a copy is two, its begin and its end. In between, the copy's target
is poison. A state is the number of transitions that each stream has executed, plus the contents of
memory. Contents are compared by their origin: two equal contents were written by the same
transition. States that are reached by several interleavings are explored once; nothing else is left
out. In particular, transitions of different streams that commute are still executed in both orders.

Simplifications that do not change the result:

- Memory that no copy uses is left out, and so are operations that use no other. Only copy streams
  and the host run beside the compute stream, and they touch no memory but that of copies. If a
  model uses several compute streams, their order among themselves is the model's business.
- Bytes that are used by exactly the same operations always have the same origin and are one
  segment.
- If someone else writes to the target during a copy, the result counts as the copy's. A write that
  is not ordered with the copy can also come before its begin or after its end, and one of these
  orders is an error if anyone reads the memory.
- The reuse of freed memory is no transition, but takes place as early as the clocks allow. In issue
  order nothing uses the memory later, so every use after the reuse is an error, and a later reuse
  has fewer uses after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fakes.recorded_cuda import Operation, Recording

UNWRITTEN = -1
SHOWN_TRANSITIONS = 12


class State(NamedTuple):
    """A point in an interleaving."""

    done: tuple[int, ...]
    """Number of executed transitions of each stream."""
    unusual: frozenset[tuple[int, int]]
    """Segments whose content is not that of the executed write with the highest number, and the
    number of the transition that wrote their content. Writes that are executed in issue order leave
    this empty. Together with `done` this determines the content of every segment."""


@dataclass(eq=False)
class Transition:
    """A kernel, or the begin or end of a copy. Numbers follow the issue order."""

    number: int
    stream: int
    position: int
    """Number of transitions of the stream that are done after this one."""
    operation: Operation
    phase: str
    """"run", "begin" or "end"."""
    needs: list[tuple[int, int]]
    """Pairs of a stream and the number of its transitions that must be done before."""
    reads: list[tuple[int, int]]
    """Pairs of a segment and the number of the transition that wrote it, in issue order."""
    writes: list[int]
    regions: set[int]


class Violation(NamedTuple):
    """An operation that goes wrong in some interleaving, and that interleaving."""

    stream: str
    operation: str
    problem: str
    interleaving: list[str]

    def __str__(self) -> str:
        return "\n  ".join(
            [f"{self.stream}: {self.operation} {self.problem}", "after:", *self.interleaving]
        )


@dataclass
class Exploration:
    """The result of `explore`."""

    states: int
    transitions: int
    """Number of transitions in each interleaving."""
    interleavings: int
    """Number of different interleavings; up to the first violation if there is one."""
    violation: Violation | None


def explore(recording: Recording) -> Exploration:
    """Execute a recording in every possible order, up to the first violation."""
    return _Explorer(recording).explore()


class _Explorer:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.segments = _segments(recording)
        self.region_of_segment: dict[int, int] = {}
        self.queues: list[list[Transition]] = [[] for _ in recording.streams]
        self.writers: dict[int, dict[int, tuple[list[int], list[int]]]] = defaultdict(dict)
        """Segment -> stream -> positions and numbers of the transitions that write the segment."""
        self.transitions: list[Transition] = []
        self._build_transitions()

    def explore(self) -> Exploration:
        level = {State((0,) * len(self.queues), frozenset()): 1}
        states = 0
        for depth in range(len(self.transitions) + 1):
            states += len(level)
            following: dict[State, int] = defaultdict(int)
            for state, paths in level.items():
                for transition in self._enabled(state):
                    problem = self._problem(state, transition)
                    if problem:
                        return self._stop(states, depth, sum(level.values()), state, problem)
                    following[self._execute(state, transition)] += paths
            if not following:
                assert depth == len(self.transitions), f"deadlock after {depth} transitions"
                return Exploration(states, depth, sum(level.values()), None)
            level = following
        raise AssertionError("more steps than transitions")

    def _stop(self, states, depth, paths, state, problem) -> Exploration:
        transition, text = problem
        interleaving = [self._describe(t) for t in self._path_to(state)]
        if len(interleaving) > SHOWN_TRANSITIONS:
            left_out = len(interleaving) - SHOWN_TRANSITIONS
            interleaving[:left_out] = [f"... {left_out} more"]
        pending = [
            self._describe(t)
            for t in self.transitions[: transition.number]
            if t.position > state.done[t.stream]
        ]
        interleaving += [
            f"(issued before, but not executed) {name}" for name in pending[:SHOWN_TRANSITIONS]
        ]
        stream = self.recording.streams[transition.stream]
        name = f"{transition.phase} of {transition.operation.name}"
        name = name.removeprefix("run of ")
        return Exploration(states, depth, paths, Violation(stream, name, text, interleaving))

    # Preparation

    def _build_transitions(self) -> None:
        """Split the operations that touch memory of copies into transitions, in issue order."""
        finished = [[0] for _ in self.recording.streams]
        """For each stream: the number of transitions after its first n operations."""
        contents: dict[int, int] = {}
        for operation in self.recording.operations:
            reads = self._segments_in(operation.reads)
            writes = self._segments_in(operation.writes)
            queue, counts = self.queues[operation.stream], finished[operation.stream]
            if reads or writes:
                needs = [(stream, finished[stream][n]) for stream, n in operation.clock.items()]
                for phase in ("begin", "end") if operation.is_copy else ("run",):
                    transition = Transition(
                        number=len(self.transitions),
                        stream=operation.stream,
                        position=len(queue) + 1,
                        operation=operation,
                        phase=phase,
                        needs=[(s, n) for s, n in needs if n and s != operation.stream],
                        reads=[(segment, contents.get(segment, UNWRITTEN)) for segment in reads],
                        writes=writes,
                        regions={self.region_of_segment[s] for s in (*reads, *writes)},
                    )
                    queue.append(transition)
                    self.transitions.append(transition)
                    for segment in writes:
                        contents[segment] = transition.number
                        positions, numbers = self.writers[segment].setdefault(
                            operation.stream, ([], [])
                        )
                        positions.append(transition.position)
                        numbers.append(transition.number)
            counts.append(len(queue))
        self.free_needs = {
            region.number: [(s, finished[s][n]) for s, n in region.free_clock.items()]
            for region in self.recording.regions
            if region.free_clock is not None
        }
        """For freed memory: the transitions after which it may be reused."""

    def _segments_in(self, spans) -> list[int]:
        found = {}
        for region, start, end in spans:
            bounds, numbers = self.segments.get(region, ([], []))
            for index in range(bisect_right(bounds, start) - 1, len(numbers)):
                if index < 0 or bounds[index] >= end:
                    continue
                if numbers[index] is not None:
                    found[numbers[index]] = None
                    self.region_of_segment[numbers[index]] = region
        return list(found)

    # Execution

    def _enabled(self, state: State) -> Iterator[Transition]:
        done = state.done
        for queue, position in zip(self.queues, done, strict=True):
            if position < len(queue):
                transition = queue[position]
                if all(done[stream] >= number for stream, number in transition.needs):
                    yield transition

    def _content(self, state: State, segment: int) -> int:
        for unusual, writer in state.unusual:
            if unusual == segment:
                return writer
        return self._latest_writer(state.done, segment)

    def _latest_writer(self, done: tuple[int, ...], segment: int) -> int:
        latest = UNWRITTEN
        for stream, (positions, numbers) in self.writers[segment].items():
            executed = bisect_right(positions, done[stream])
            if executed and numbers[executed - 1] > latest:
                latest = numbers[executed - 1]
        return latest

    def _problem(self, state: State, transition: Transition) -> tuple[Transition, str] | None:
        for region in transition.regions:
            needs = self.free_needs.get(region)
            if needs is not None and all(state.done[s] >= n for s, n in needs):
                memory = self.recording.regions[region]
                return transition, f"uses {memory}, which was freed and may be used for others"
        for segment, expected in transition.reads:
            writer = self._content(state, segment)
            if writer != expected:
                memory = self.recording.regions[self.region_of_segment[segment]]
                return transition, f"reads {memory}: {self._compare(writer, expected)}"
        return None

    def _compare(self, writer: int, expected: int) -> str:
        def origin(number):
            return "nothing" if number == UNWRITTEN else self._describe(self.transitions[number])

        if writer != UNWRITTEN and self.transitions[writer].phase == "begin":
            copy = self.transitions[writer]
            return f"{self.recording.streams[copy.stream]}: {copy.operation.name} is still writing"
        return f"the last writer is [{origin(writer)}], but should be [{origin(expected)}]"

    def _execute(self, state: State, transition: Transition) -> State:
        done = list(state.done)
        done[transition.stream] += 1
        after = tuple(done)
        unusual = state.unusual
        for segment in transition.writes:
            if unusual:
                unusual = frozenset(pair for pair in unusual if pair[0] != segment)
            if self._latest_writer(after, segment) != transition.number:
                unusual |= {(segment, transition.number)}
        return State(after, unusual)

    # Reports

    def _path_to(self, target: State) -> list[Transition]:
        """Return an interleaving that leads to a state, near to the issue order."""
        path: list[Transition] = []
        start = State((0,) * len(self.queues), frozenset())
        seen, stack = {start}, [(start, iter(self._toward(start, target)))]
        while stack[-1][0] != target:
            state, options = stack[-1]
            transition = next(options, None)
            if transition is None:
                stack.pop()
                path.pop()
                continue
            following = self._execute(state, transition)
            if following not in seen:
                seen.add(following)
                stack.append((following, iter(self._toward(following, target))))
                path.append(transition)
        return path

    def _toward(self, state: State, target: State) -> list[Transition]:
        options = [t for t in self._enabled(state) if t.position <= target.done[t.stream]]
        return sorted(options, key=lambda transition: transition.number)

    def _describe(self, transition: Transition) -> str:
        operation = transition.operation
        stream = self.recording.streams[transition.stream]
        if transition.phase == "run":
            return f"{stream}: {operation.name}"
        regions = self.recording.regions
        source, target = (regions[spans[0].region] for spans in (operation.reads, operation.writes))
        return f"{stream}: {transition.phase} of {operation.name} from {source} to {target}"


def _segments(recording: Recording) -> dict[int, tuple[list[int], list[int | None]]]:
    """Cut the regions that copies use into segments that each operation uses whole or not at all.

    Returns, for each region, the start of each segment and its number. Segments that the same
    operations read and write have one number; the number of bytes that no copy uses is None.
    """
    copied = {
        span.region
        for operation in recording.operations
        if operation.is_copy
        for span in operation.reads + operation.writes
    }
    uses = defaultdict(list)
    for number, operation in enumerate(recording.operations):
        for writes, spans in ((False, operation.reads), (True, operation.writes)):
            for region, start, end in spans:
                if region in copied:
                    uses[region].append((start, end, number, writes, operation.is_copy))
    segments, next_number = {}, count()
    for region, spans in uses.items():
        bounds = sorted({bound for start, end, *_ in spans for bound in (start, end)})
        index_of = {bound: index for index, bound in enumerate(bounds)}
        users: list[list[tuple[int, bool, bool]]] = [[] for _ in bounds]
        for start, end, *use in spans:
            for index in range(index_of[start], index_of[end]):
                users[index].append(tuple(use))
        numbers: dict[tuple, int | None] = {}
        for key in map(tuple, users):
            if key not in numbers:
                by_copy = any(is_copy for *_, is_copy in key)
                numbers[key] = next(next_number) if by_copy else None
        segments[region] = (bounds, [numbers[tuple(use)] for use in users])
    return segments
