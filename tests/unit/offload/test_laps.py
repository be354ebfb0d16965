"""Windows of passes: each with its own waits, one after the other."""

from streamed_model import SaidLap

from gracetune.offload.autosize import PassWindow


def begun():
    laps = []

    def begin():
        laps.append(SaidLap(over=False))
        return laps[-1]

    return laps, begin


def test_a_window_ends_after_its_passes_and_the_next_begins_when_it_is_judged():
    laps, begin = begun()
    windows = PassWindow(begin, 2)
    assert [windows.last() for _ in range(2)] == [None, None]
    assert len(laps) == 1, "one pass of two"
    assert windows.last() is None
    assert len(laps) == 2, "it has ended, but the device is behind"
    assert [windows.last() for _ in range(5)] == [None] * 5
    assert len(laps) == 2, "what is queued meanwhile belongs to no window"
    laps[0].over = True
    assert windows.last() is laps[0]
    assert len(laps) == 3
    laps[2].over = True
    assert [windows.last() for _ in range(2)] == [None, laps[2]]
