"""What every source promises, as checks that anyone can run over a source of their own.

A package that publishes a source by an entry point of `gracetune.source` tests it like this:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(my_source(), {"a.png": b"..."})

The second argument is everything that the source must hold. A broken promise is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from gracetune.data.source import (
    EstimatingSource,
    FileSource,
    Source,
    StampedSource,
    read_place,
)

Check = Callable[[Source, Mapping[str, bytes]], None]

UNKNOWN = ("absent", "", "../outside", "/etc/hostname", "A.PNG", "a.png/", "a\0b", "\ud800")
THREADS = 8


def keys_are_sorted_and_complete(source: Source, files: Mapping[str, bytes]) -> None:
    """The same names in the same order, however often they are asked for."""
    keys = list(source.keys())
    assert keys == sorted(files), f"{source.describe()} has {keys}, not {sorted(files)}"
    assert keys == list(source.keys()), "the names differ from one call to the next"
    assert len(source.keys()) == len(keys)
    assert [source.keys()[place] for place in range(len(keys))] == keys


def keys_are_relative_names(source: Source, files: Mapping[str, bytes]) -> None:  # noqa: ARG001
    """Forward slashes, nothing above the root, nothing hidden, writable into a report."""
    for key in source.keys():  # noqa: SIM118
        assert not key.startswith(("/", ".")), f"{key!r} is not relative"
        assert ".." not in key.split("/"), f"{key!r} leads out"
        key.encode()


def bytes_come_back_as_they_were(source: Source, files: Mapping[str, bytes]) -> None:
    """Twice, because a source must not be used up."""
    for _ in range(2):
        for key, data in files.items():
            found = source.read(key)
            assert type(found) is bytes, f"{key} is read as {type(found).__name__}"
            assert found == data, f"{key} came back as other bytes"


def nbytes_is_the_length_of_what_is_read(source: Source, files: Mapping[str, bytes]) -> None:
    """Exactly: buffers are made of it."""
    for key, data in files.items():
        assert source.nbytes(key) == len(data), f"{key}: {source.nbytes(key)}, not {len(data)}"


def unknown_keys_are_not_found(source: Source, files: Mapping[str, bytes]) -> None:
    """FileNotFoundError, whatever the name looks like; no name leads outside."""
    for key in UNKNOWN:
        if key in files:
            continue
        for ask in (source.read, source.nbytes):
            said = _refusal(ask, key)
            assert said is not None, f"{key!r} is not there, and yet {ask.__name__} answers"
            assert "has no" in said, f"{key!r}: the error does not say so: {said}"


def threads_may_read_at_once(source: Source, files: Mapping[str, bytes]) -> None:
    """Staging and decoding read from many threads, in any order."""
    wanted = [key for _ in range(THREADS) for key in files]
    with ThreadPoolExecutor(THREADS) as pool:
        for key, data in zip(wanted, pool.map(source.read, wanted), strict=True):
            assert data == files[key], f"{key} is mixed up when threads read at once"


def describe_is_one_phrase(source: Source, files: Mapping[str, bytes]) -> None:  # noqa: ARG001
    """It stands in the middle of messages."""
    text = source.describe()
    assert text, "describe is empty"
    assert "\n" not in text, f"describe has more than one line: {text!r}"


def extras_agree_with_the_rest(source: Source, files: Mapping[str, bytes]) -> None:
    """What a source offers beside the four verbs tells the same as they do."""
    if isinstance(source, FileSource):
        for key, data in files.items():
            place = source.place(key)
            if place is not None:
                assert read_place(place) == data, f"{key} is elsewhere than its place says"
    if isinstance(source, StampedSource):
        keys = list(files)
        assert source.stamp(keys) == source.stamp(keys), "the stamp of the same files differs"
    if isinstance(source, EstimatingSource):
        total = sum(map(len, files.values()))
        assert 0.5 * total <= source.estimate() + 4096, f"{source.estimate()} bytes for {total}"


CHECKS: tuple[Check, ...] = (
    keys_are_sorted_and_complete,
    keys_are_relative_names,
    bytes_come_back_as_they_were,
    nbytes_is_the_length_of_what_is_read,
    unknown_keys_are_not_found,
    threads_may_read_at_once,
    describe_is_one_phrase,
    extras_agree_with_the_rest,
)


def _refusal(ask: Callable[[str], object], key: str) -> str | None:
    try:
        ask(key)
    except FileNotFoundError as error:
        return str(error)
    return None
