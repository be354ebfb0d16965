import threading

import pytest
from fakes.stores import DictStore

from gracetune.cache.augmentation_epochs import (
    AugmentationEpochFolder,
    EncodingStopped,
    EpochCaches,
    augmentation_epoch,
    augmentation_mode,
    check_variants,
    rank_mark_files,
    unread_epochs,
)
from gracetune.cache.encode import Ranks
from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.batch_order import NO_EPOCH
from gracetune.errors import ConfigError, DataError, RunFailedError

FLIP = {"augmentations": [{"name": "flip"}]}


def section(**settings):
    return DatasetSection.model_validate(settings)


@pytest.mark.parametrize("mode", [None, "static", "refresh_each_epoch", "disable_cache"])
def test_every_mode_is_static_if_nothing_is_random(mode):
    plain = section(augmentations_cache_mode=mode)
    assert augmentation_mode(plain) == "static"
    assert {augmentation_epoch(plain, epoch) for epoch in range(5)} == {0}


@pytest.mark.parametrize(
    "settings", [FLIP, {"crop": "random"}, {"dataset_type": "audio", "clip": "random"}]
)
def test_each_mode_has_its_own_sequence_of_augmentation_epochs(settings):
    def sequence(**more):
        one = section(**settings, **more)
        return [augmentation_epoch(one, epoch) for epoch in (NO_EPOCH, 0, 1, 2, 3)]

    assert sequence() == sequence(augmentations_cache_mode="static") == [0, 0, 0, 0, 0]
    assert sequence(variants=3) == [0, 0, 1, 2, 0]
    assert sequence(augmentations_cache_mode="refresh_each_epoch") == [0, 0, 1, 2, 3]
    assert sequence(augmentations_cache_mode="disable_cache") == [0, 0, 1, 2, 3]
    later = sequence(augmentations_cache_mode="refresh_each_epoch", augmentation_cache_epoch=5)
    assert later == [5, 5, 6, 7, 8]
    assert sequence(variants=3, augmentation_cache_epoch=1) == [1, 1, 2, 0, 1]


def test_variants_without_effect_are_refused_by_name():
    check_variants(section(**FLIP, variants=2), 0)
    check_variants(section(), 0)
    with pytest.raises(ConfigError, match=r"datasets\[1\]\.variants is 2, but .* nothing random"):
        check_variants(section(variants=2), 1)
    mode = "refresh_each_epoch"
    with pytest.raises(ConfigError, match=f"datasets.0..variants is 4, but with .*{mode}"):
        check_variants(section(**FLIP, variants=4, augmentations_cache_mode=mode), 0)


def fail_on_notice(notice):
    raise AssertionError(notice)


class ClosableStore(DictStore):
    closed = False

    def close(self):
        self.closed = True


class FakeEncoder:
    """An `EpochEncoder` that writes the epoch's number, once it is released."""

    def __init__(self, *, waits=False):
        self.stores = {}
        self.started = []
        self.finished = []
        self.entered_epochs = []
        self.released = threading.Event()
        if not waits:
            self.released.set()

    def open_store(self, epoch):
        self.stores[epoch] = ClosableStore()
        return self.stores[epoch]

    def encode(self, store, epoch, stopping):
        self.started.append(epoch)
        while not self.released.wait(0.002):
            if stopping.is_set():
                raise EncodingStopped
        store.put("number", epoch)
        self.finished.append(epoch)

    def entered(self, epoch):
        self.entered_epochs.append(epoch)


class FailingEncoder(FakeEncoder):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def encode(self, store, epoch, stopping):
        raise self.error


def test_the_next_epoch_is_encoded_while_the_current_one_is_read():
    first, encoder = DictStore(), FakeEncoder(waits=True)
    epochs = EpochCaches(first, encoder, fail_on_notice)
    assert epochs.store_for(0) is first
    assert epochs.store_for(0) is first
    while not encoder.started:
        pass
    assert (encoder.started, encoder.finished) == ([1], [])
    encoder.released.set()
    store = epochs.store_for(1)
    assert store.get("number") == 1
    assert epochs.store_for(1) is store
    assert epochs.store_for(2).get("number") == 2
    epochs.close()
    assert encoder.entered_epochs == [0, 1, 2]
    assert first.get("number") is None  # the cache itself is not written to


def test_a_restart_encodes_the_epoch_it_needs_first():
    encoder = FakeEncoder()
    epochs = EpochCaches(DictStore(), encoder, fail_on_notice)
    assert epochs.store_for(5).get("number") == 5
    epochs.close()
    assert encoder.started[0] == 5
    assert set(encoder.started) <= {5, 6}


def test_returning_to_an_epoch_stops_encoding_another():
    class SlowFromTwo(FakeEncoder):
        def encode(self, store, epoch, stopping):
            if epoch >= 2:
                stopping.wait()
                raise EncodingStopped
            super().encode(store, epoch, stopping)

    def threads():
        return {thread.name for thread in threading.enumerate() if "augment" in thread.name}

    epochs = EpochCaches(DictStore(), SlowFromTwo(), fail_on_notice)
    for epoch in (0, 1, 0):
        epochs.store_for(epoch)
    assert "gracetune-augment-2" not in threads()
    assert epochs.store_for(1).get("number") == 1
    epochs.close()
    assert not threads()


def test_closing_stops_encoding_and_it_can_be_started_again():
    encoder = FakeEncoder(waits=True)
    epochs = EpochCaches(DictStore(), encoder, fail_on_notice)
    epochs.store_for(0)
    epochs.close()
    epochs.close()
    assert encoder.finished == []
    encoder.released.set()
    assert epochs.store_for(1).get("number") == 1
    epochs.close()


@pytest.mark.parametrize(
    ("error", "raised"), [(DataError("no"), DataError), (ValueError("odd"), RunFailedError)]
)
def test_an_error_in_the_background_is_raised_when_its_epoch_is_needed(error, raised, recorder):
    epochs = EpochCaches(DictStore(), FailingEncoder(error), recorder)
    epochs.store_for(0)
    with pytest.raises(raised, match=str(error)):
        epochs.store_for(1)
    epochs.close()
    assert recorder.texts() == [], "it was raised"


def test_an_error_in_the_background_is_reported_if_its_epoch_is_never_needed(recorder):
    epochs = EpochCaches(DictStore(), FailingEncoder(ValueError("odd")), recorder)
    epochs.store_for(0)
    epochs.close()
    (text,) = recorder.texts()
    assert "augmentation epoch 1" in text
    assert "ValueError: odd" in text


def test_an_epoch_is_deleted_when_no_rank_reads_it(tmp_path):
    folders = [AugmentationEpochFolder(tmp_path, Ranks(rank, 2)) for rank in range(2)]
    for epoch in range(1, 5):
        folders[0].path(epoch).mkdir()
    (tmp_path / "notes").mkdir()

    def left():
        return sorted(int(path.name[-1]) for path in tmp_path.glob("generation-*"))

    folders[0].entered(2)
    assert left() == [1, 2, 3, 4]  # rank 1 has not said yet what it reads
    folders[1].entered(1)
    folders[0].entered(2)
    assert left() == [1, 2, 3]
    folders[1].entered(3)
    assert left() == [1, 2, 3]  # only rank 0 deletes
    folders[0].entered(3)
    assert left() == [3]
    assert (tmp_path / "notes").is_dir()


def test_stores_of_past_epochs_are_closed_but_not_the_first_one():
    first, encoder = ClosableStore(), FakeEncoder()
    epochs = EpochCaches(first, encoder, fail_on_notice)
    assert epochs.current_store(0) is None
    epochs.store_for(0)
    assert epochs.current_store(0) is first
    assert epochs.store_for(1) is encoder.stores[1]
    epochs.store_for(2)
    assert (encoder.stores[1].closed, encoder.stores[2].closed) == (True, False)
    epochs.close()
    assert encoder.stores[2].closed
    assert encoder.stores[3].closed
    assert not first.closed


def test_epochs_without_a_mark_are_unread(tmp_path):
    for epoch in (0, 3, 4, 5, 12):
        (tmp_path / f"generation-{epoch}").mkdir()
    for rank, epoch in ((0, 3), (1, 4)):
        (tmp_path / f"rank-{rank}-reads").write_text(str(epoch))
    names = [path.name for path in unread_epochs(tmp_path, rank_mark_files(tmp_path))]
    assert names == ["generation-0", "generation-12"]
    assert len(unread_epochs(tmp_path, [])) == 5
    assert unread_epochs(tmp_path / "absent", rank_mark_files(tmp_path / "absent")) == []
