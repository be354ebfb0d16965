import threading

import pytest

from gracetune.cache.augmentation_epochs import (
    NO_EPOCH,
    AugmentationEpochs,
    EncodingStopped,
    AugmentationEpochFolder,
    check_variants,
    augmentation_epoch,
    unread_epochs,
    read_marks,
    augmentation_mode,
)
from gracetune.cache.encode import Ranks
from gracetune.cache.store import DictStore
from gracetune.config.schema import DatasetSection
from gracetune.errors import ConfigError, DataError, RunFailedError

FLIP = {"augmentations": [{"name": "flip"}]}


def section(**settings):
    return DatasetSection.model_validate(settings)


@pytest.mark.parametrize("mode", [None, "static", "refresh_each_epoch", "disable_cache"])
def test_where_nothing_is_random_every_mode_is_static(mode):
    plain = section(augmentations_cache_mode=mode)
    assert augmentation_mode(plain) == "static"
    assert {augmentation_epoch(plain, epoch) for epoch in range(5)} == {0}


@pytest.mark.parametrize(
    "settings", [FLIP, {"crop": "random"}, {"dataset_type": "audio", "clip": "random"}]
)
def test_each_mode_has_its_own_row_of_generations(settings):
    def row(**more):
        one = section(**settings, **more)
        return [augmentation_epoch(one, epoch) for epoch in (NO_EPOCH, 0, 1, 2, 3)]

    assert row() == row(augmentations_cache_mode="static") == [0, 0, 0, 0, 0]
    assert row(variants=3) == [0, 0, 1, 2, 0]
    assert row(augmentations_cache_mode="refresh_each_epoch") == [0, 0, 1, 2, 3]
    assert row(augmentations_cache_mode="disable_cache") == [0, 0, 1, 2, 3]


def test_variants_that_vary_nothing_are_refused_by_name():
    check_variants(section(**FLIP, variants=2), 0)
    check_variants(section(), 0)
    with pytest.raises(ConfigError, match=r"datasets\[1\]\.variants is 2, but nothing"):
        check_variants(section(variants=2), 1)
    mode = "refresh_each_epoch"
    with pytest.raises(ConfigError, match=f"datasets.0..variants is 4; with .*{mode}"):
        check_variants(section(**FLIP, variants=4, augmentations_cache_mode=mode), 0)


def unheard(notice):
    """Nothing goes wrong here."""
    raise AssertionError(notice)


class Workshop:
    """Fills generations when it is told to."""

    def __init__(self, *, waits=False):
        self.begun = []
        self.done = []
        self.entered = []
        self.may_go_on = threading.Event()
        if not waits:
            self.may_go_on.set()

    def fill(self, store, number, stopping):
        self.begun.append(number)
        while not self.may_go_on.wait(0.002):
            if stopping.is_set():
                raise EncodingStopped
        store.put("number", number)
        self.done.append(number)

    def generations(self, first):
        return AugmentationEpochs(
            first, lambda _: DictStore(), self.fill, self.entered.append, unheard
        )


def test_the_next_generation_is_made_while_this_one_is_read():
    first, shop = DictStore(), Workshop(waits=True)
    made = shop.generations(first)
    assert made.store_for(0) is first
    assert made.store_for(0) is first
    while not shop.begun:
        pass
    assert (shop.begun, shop.done) == ([1], [])
    shop.may_go_on.set()
    store = made.store_for(1)
    assert store.get("number") == 1
    assert made.store_for(1) is store
    assert made.store_for(2).get("number") == 2
    made.close()
    assert shop.entered == [0, 1, 2]
    assert first.get("number") is None  # the cache itself is not touched


def test_a_restart_makes_the_generation_it_needs_first():
    shop = Workshop()
    made = shop.generations(DictStore())
    assert made.store_for(5).get("number") == 5
    made.close()
    assert shop.begun[0] == 5
    assert set(shop.begun) <= {5, 6}


def test_going_back_to_an_epoch_stops_what_is_being_made_for_another():
    class SlowFromTwo(Workshop):
        def fill(self, store, number, stopping):
            if number >= 2:
                stopping.wait()
                raise EncodingStopped
            super().fill(store, number, stopping)

    def being_made():
        return {thread.name for thread in threading.enumerate() if "generation" in thread.name}

    made = SlowFromTwo().generations(DictStore())
    for number in (0, 1, 0):
        made.store_for(number)
    assert "gracetune-generation-2" not in being_made()
    assert made.store_for(1).get("number") == 1
    made.close()
    assert not being_made()


def test_closing_stops_what_is_being_made_and_it_can_be_begun_again():
    shop = Workshop(waits=True)
    made = shop.generations(DictStore())
    made.store_for(0)
    made.close()
    made.close()
    assert shop.done == []
    shop.may_go_on.set()
    assert made.store_for(1).get("number") == 1
    made.close()


@pytest.mark.parametrize(
    ("error", "raised"), [(DataError("no"), DataError), (ValueError("odd"), RunFailedError)]
)
def test_what_goes_wrong_in_the_background_is_raised_where_it_is_needed(error, raised, told):
    def fill(store, number, stopping):
        raise error

    made = AugmentationEpochs(DictStore(), lambda _: DictStore(), fill, lambda _: None, told)
    made.store_for(0)
    with pytest.raises(raised, match=str(error)):
        made.store_for(1)
    made.close()
    assert told.texts() == [], "it was raised"


def test_what_goes_wrong_in_the_background_is_told_where_nobody_comes_to_need_it(told):
    def fill(store, number, stopping):
        raise ValueError("odd")

    made = AugmentationEpochs(DictStore(), lambda _: DictStore(), fill, lambda _: None, told)
    made.store_for(0)
    made.close()
    (text,) = told.texts()
    assert "generation 1" in text
    assert "ValueError: odd" in text


def test_a_generation_is_deleted_when_no_rank_reads_it(tmp_path):
    folders = [AugmentationEpochFolder(tmp_path, Ranks(rank, 2)) for rank in range(2)]
    for number in range(1, 5):
        folders[0].path(number).mkdir()
    (tmp_path / "notes").mkdir()

    def left():
        return sorted(int(path.name[-1]) for path in tmp_path.glob("generation-*"))

    folders[0].entered(2)
    assert left() == [1, 2, 3, 4]  # where rank 1 is, nobody knows yet
    folders[1].entered(1)
    folders[0].entered(2)
    assert left() == [1, 2, 3]
    folders[1].entered(3)
    assert left() == [1, 2, 3]  # only rank 0 deletes
    folders[0].entered(3)
    assert left() == [3]
    assert (tmp_path / "notes").is_dir()


class Closing(DictStore):
    closed = False

    def close(self):
        self.closed = True


def test_stores_that_are_left_are_closed_and_the_first_is_not_ours_to_close():
    first, made = Closing(), {}

    def open_store(number):
        made[number] = Closing()
        return made[number]

    def fill(store, number, stopping):
        store.put("k", {})

    generations = AugmentationEpochs(first, open_store, fill, lambda number: None, unheard)
    assert generations.current_store(0) is None
    generations.store_for(0)
    assert generations.current_store(0) is first
    assert generations.store_for(1) is made[1]
    generations.store_for(2)
    assert (made[1].closed, made[2].closed) == (True, False)
    generations.close()
    assert made[2].closed
    assert made[3].closed
    assert not first.closed


def test_what_no_mark_speaks_of_is_left_over(tmp_path):
    for number in (0, 3, 4, 5, 12):
        (tmp_path / f"generation-{number}").mkdir()
    for rank, number in ((0, 3), (1, 4)):
        (tmp_path / f"rank-{rank}-reads").write_text(str(number))
    names = [path.name for path in unread_epochs(tmp_path, read_marks(tmp_path))]
    assert names == ["generation-0", "generation-12"]
    assert len(unread_epochs(tmp_path, [])) == 5
    assert unread_epochs(tmp_path / "absent", read_marks(tmp_path / "absent")) == []
