"""Checks that every implementation of `Source` must pass, for authors of new sources.

A package that registers a source under the entry point `gracetune.source` can test it like this:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(my_source(), {"a.png": b"..."})

Each check takes a source and the complete contents that it should have, as {key: bytes}, and raises
AssertionError if the source behaves differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from gracetune.data.source import (
    EstimatingSource,
    FileSource,
    Source,
    StampedSource,
    read_range,
)

Check = Callable[[Source, Mapping[str, bytes]], None]

UNKNOWN = ("absent", "", "../outside", "/etc/hostname", "A.PNG", "a.png/", "a\0b", "\ud800")
THREADS = 8


def keys_are_sorted_and_complete(source: Source, files: Mapping[str, bytes]) -> None:
    """Check that `keys` returns the names of all files, sorted, and the same on every call."""
    keys = list(source.keys())
    assert keys == sorted(files), f"{source.describe()} has {keys}, not {sorted(files)}"
    assert keys == list(source.keys()), "keys() returns different names on a second call"
    assert len(source.keys()) == len(keys)
    assert [source.keys()[place] for place in range(len(keys))] == keys


def keys_are_relative_names(source: Source, files: Mapping[str, bytes]) -> None:  # noqa: ARG001
    """Check that keys are relative paths without `..`, not hidden, and valid UTF-8."""
    for key in source.keys():  # noqa: SIM118
        assert not key.startswith(("/", ".")), f"{key!r} is not relative"
        assert ".." not in key.split("/"), f"{key!r} points outside the source"
        key.encode()


def read_returns_exact_bytes(source: Source, files: Mapping[str, bytes]) -> None:
    """Check that `read` returns the exact bytes of every file, also when it is called again."""
    for _ in range(2):
        for key, data in files.items():
            found = source.read(key)
            assert type(found) is bytes, f"{key} is read as {type(found).__name__}"
            assert found == data, f"{key} has other bytes than expected"


def nbytes_is_exact(source: Source, files: Mapping[str, bytes]) -> None:
    """Check that `nbytes` returns the exact length of every file."""
    for key, data in files.items():
        assert source.nbytes(key) == len(data), f"{key}: {source.nbytes(key)}, not {len(data)}"


def unknown_keys_are_not_found(source: Source, files: Mapping[str, bytes]) -> None:
    """Check that keys that do not exist, or that point outside the source, raise an error.

    It must be FileNotFoundError, and its message must contain "has no".
    """
    for key in UNKNOWN:
        if key in files:
            continue
        for ask in (source.read, source.nbytes):
            message = _refusal(ask, key)
            assert message is not None, (
                f"{key!r} does not exist, but {ask.__name__} returns a value"
            )
            assert "has no" in message, f"{key!r}: the error does not say so: {message}"


def threads_may_read_at_once(source: Source, files: Mapping[str, bytes]) -> None:
    """Check that several threads can call `read` at the same time."""
    wanted = [key for _ in range(THREADS) for key in files]
    with ThreadPoolExecutor(THREADS) as pool:
        for key, data in zip(wanted, pool.map(source.read, wanted), strict=True):
            assert data == files[key], f"{key} has wrong bytes when several threads read"


def describe_is_one_phrase(source: Source, files: Mapping[str, bytes]) -> None:  # noqa: ARG001
    """Check that `describe` returns a text of one line, for use inside a message."""
    text = source.describe()
    assert text, "describe is empty"
    assert "\n" not in text, f"describe has more than one line: {text!r}"


def optional_methods_agree(source: Source, files: Mapping[str, bytes]) -> None:
    """Check the optional methods of a source, if it has them.

    `place` must name a file range with the file's bytes, `stamp` must return the same text for
    unchanged files, and `estimate` at least half of the total size.
    """
    if isinstance(source, FileSource):
        for key, data in files.items():
            place = source.place(key)
            if place is not None:
                assert read_range(place) == data, f"{key}: the file range has other bytes"
    if isinstance(source, StampedSource):
        keys = list(files)
        assert source.stamp(keys) == source.stamp(keys), (
            "stamp() returns different values for the same files"
        )
    if isinstance(source, EstimatingSource):
        total = sum(map(len, files.values()))
        assert 0.5 * total <= source.estimate() + 4096, f"{source.estimate()} bytes for {total}"


CHECKS: tuple[Check, ...] = (
    keys_are_sorted_and_complete,
    keys_are_relative_names,
    read_returns_exact_bytes,
    nbytes_is_exact,
    unknown_keys_are_not_found,
    threads_may_read_at_once,
    describe_is_one_phrase,
    optional_methods_agree,
)


def _refusal(ask: Callable[[str], object], key: str) -> str | None:
    try:
        ask(key)
    except FileNotFoundError as error:
        return str(error)
    return None
