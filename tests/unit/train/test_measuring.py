"""Rates are measured in what memory is free, and it is said where that is little."""

import pytest

from gracetune.train.measuring import probed_by
from gracetune.train.narrow import ROOMY_NBYTES, STAND_IN


@pytest.mark.parametrize("free", [ROOMY_NBYTES, ROOMY_NBYTES - 1])
def test_a_host_is_measured_with_large_tensors_where_they_have_room(free, told):
    make = probed_by("wan22", free, told)
    small, large = (make(False, is_roomy).encoded.latent_shape for is_roomy in (False, True))
    has_room = free == ROOMY_NBYTES
    assert (large != small) == has_room
    assert [text for text in told.texts() if "are free" in text] == (
        []
        if has_room
        else [
            "only 2.0 GiB of device memory are free, so how fast this host queues a step is "
            "measured with small tensors: its part may be said a tenth too short"
        ]
    )


def test_a_family_that_nobody_published_has_a_stand_in_and_that_is_told(told):
    assert probed_by("unheard", ROOMY_NBYTES, told)(False, False)
    assert told.texts() == [
        f"how fast this host queues a step is measured by {STAND_IN} for unheard"
    ]
