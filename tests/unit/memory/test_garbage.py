"""What is set aside is not looked through again, and is found when somebody needs its memory."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from gracetune.memory import garbage

if TYPE_CHECKING:
    from collections.abc import Iterator


class Knot:
    """Holds itself: only a collection finds it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No collection but those that are asked for."""
    gc.disable()
    yield
    garbage.take_back()
    gc.enable()


def test_a_collection_passes_over_what_was_set_aside() -> None:
    alive = weakref.ref(knot := Knot())
    garbage.set_aside()
    del knot
    gc.collect()
    assert alive() is not None
    garbage.take_back()
    gc.collect()
    assert alive() is None


def test_who_needs_memory_gets_what_was_set_aside_too() -> None:
    alive = weakref.ref(knot := Knot())
    garbage.set_aside()
    del knot
    garbage.collect()
    assert alive() is None
    assert gc.get_freeze_count() > 0, "and the rest stays aside"


def test_nothing_is_set_aside_by_a_collection() -> None:
    garbage.collect()
    assert gc.get_freeze_count() == 0


def test_garbage_from_before_is_not_set_aside() -> None:
    alive: weakref.ref[Any] = weakref.ref(Knot())
    garbage.set_aside()
    assert alive() is None
