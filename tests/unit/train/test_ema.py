import pytest
import torch

from gracetune.train.step import Ema


def test_the_average_follows_and_forgets_its_start_soon():
    live = {"w": torch.zeros(3)}
    ema = Ema(live, decay=0.9)
    live["w"].fill_(1.0)
    ema.update(step=0)
    torch.testing.assert_close(ema.averages["w"], torch.full((3,), 0.9))
    for step in range(1, 200):
        ema.update(step)
    torch.testing.assert_close(ema.averages["w"], torch.ones(3))


def test_late_steps_use_the_full_decay():
    live = {"w": torch.zeros(1)}
    ema = Ema(live, decay=0.9)
    live["w"].fill_(1.0)
    ema.update(step=100_000)
    torch.testing.assert_close(ema.averages["w"], torch.tensor([0.1]))


def test_the_model_holds_the_averages_only_inside_the_block():
    live = {"w": torch.nn.Parameter(torch.zeros(2))}
    ema = Ema(live, decay=0.5)
    live["w"].data.fill_(4.0)
    with ema.swapped_in():
        assert live["w"].tolist() == [0.0, 0.0]
    assert live["w"].tolist() == [4.0, 4.0]


def test_weights_come_back_also_after_an_error():
    live = {"w": torch.nn.Parameter(torch.ones(1))}
    ema = Ema({"w": live["w"]}, decay=0.5)
    live["w"].data.fill_(2.0)
    with pytest.raises(RuntimeError), ema.swapped_in():
        raise RuntimeError
    assert live["w"].item() == 2.0
