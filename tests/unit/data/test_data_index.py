from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.data.staging_index import MAX_NAME_NBYTES, PLAIN, Columns, StagingIndex, write_index
from gracetune.memory.shared_memory import ArenaWriter

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def _index(keys: list[str]) -> StagingIndex:
    columns = Columns.empty(len(keys))
    columns.at[:] = np.arange(len(keys))
    columns.stored_nbytes[:] = 10
    columns.nbytes[:] = 1000 + np.arange(len(keys), dtype=np.uint64)
    columns.codec[:] = np.arange(len(keys)) % 4
    writer = ArenaWriter()
    write_index(writer, keys, columns, {"origin": "here"})
    return StagingIndex(writer.seal())


@given(names=st.sets(NAMES, max_size=200), others=st.sets(NAMES, max_size=50))
def test_the_index_finds_its_names_and_no_others(names: set[str], others: set[str]) -> None:
    keys = sorted(names)
    index = _index(keys)
    view = index.viewer(lambda key: memoryview(b"otherwise"))
    assert list(index) == keys
    for row, key in enumerate(keys):
        assert index.find(key) == (row, 10, 1000 + row, row % 4)
        if row % 4 != PLAIN:
            assert view(key) == b"otherwise"
        assert key in index
    for key in others - names:
        assert index.find(key) is None
        assert view(key) == b"otherwise"
        assert key not in index


def test_the_index_is_a_sequence_of_names() -> None:
    index = _index(["a", "b", "ü"])
    assert len(index) == 3
    assert (index[0], index[-1], index[1:]) == ("a", "ü", ["b", "ü"])
    assert 3 not in index
    assert "\ud800" not in index
    assert index.viewer(lambda key: memoryview(key.encode(errors="replace")))("\ud800") == b"?"
    with pytest.raises(IndexError):
        index[3]


def test_the_index_has_totals_and_facts() -> None:
    index = _index(["a", "b", "c"])
    assert (index.stored_nbytes, index.raw_nbytes) == (30, 3003)
    assert index.facts == {"origin": "here"}


def test_a_path_of_4096_bytes_fits() -> None:
    name = "x" * 4096
    assert MAX_NAME_NBYTES > 4096
    assert _index([name])[0] == name


def test_the_index_takes_less_than_100_bytes_per_file() -> None:
    keys = [f"pictures/of/cats/{number:012d}.jpeg" for number in range(20_000)]
    assert _index(keys).nbytes / len(keys) < 100
