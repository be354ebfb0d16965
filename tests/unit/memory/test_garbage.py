"""What is set aside is not looked through again, and is found when somebody needs its memory."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from gracetune.memory.stages import GcFreeze

if TYPE_CHECKING:
    from collections.abc import Iterator


class Knot:
    """Holds itself: only a collection finds it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def aside() -> Iterator[GcFreeze]:
    """Where there is no collection but those that are asked for."""
    gc.disable()
    yield GcFreeze()
    gc.unfreeze()
    gc.enable()


def test_a_collection_passes_over_what_was_set_aside(aside: GcFreeze) -> None:
    alive = weakref.ref(knot := Knot())
    aside.freeze()
    del knot
    gc.collect()
    assert alive() is not None
    aside.unfreeze()
    gc.collect()
    assert alive() is None


def test_who_needs_memory_gets_what_was_set_aside_too(aside: GcFreeze) -> None:
    alive = weakref.ref(knot := Knot())
    aside.freeze()
    del knot
    aside.collect()
    assert alive() is None
    assert gc.get_freeze_count() > 0, "and the rest stays aside"


def test_nothing_is_set_aside_by_a_collection(aside: GcFreeze) -> None:
    aside.collect()
    assert gc.get_freeze_count() == 0


def test_garbage_from_before_is_not_set_aside(aside: GcFreeze) -> None:
    alive: weakref.ref[Any] = weakref.ref(Knot())
    aside.freeze()
    assert alive() is None


def test_what_somebody_else_has_set_aside_stays_as_it_is(aside: GcFreeze) -> None:
    alive = weakref.ref(knot := Knot())
    gc.freeze()
    del knot
    young = weakref.ref(Knot())
    for touch in (aside.freeze, aside.collect, aside.unfreeze):
        touch()
        assert alive() is not None
        assert young() is None or touch == aside.freeze
    gc.unfreeze()
    gc.collect()
    assert alive() is None
