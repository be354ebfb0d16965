"""Learning-rate schedules."""

import pytest

from gracetune.config.schema import OptimizerSection
from gracetune.optim.schedule import lr_scale


def lr_scales(total=100, **settings):
    section = OptimizerSection(**settings)
    return [lr_scale(section, step, total) for step in range(total)]


def test_warmup_rises_to_the_peak_learning_rate():
    scales = lr_scales(warmup_steps=10)
    assert scales[0] == pytest.approx(1 / 11)
    assert scales[:11] == sorted(scales[:11])
    assert set(scales[10:]) == {1.0}


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decaying_schedules_end_near_final_lr_share(schedule):
    scales = lr_scales(schedule=schedule, final_lr_share=0.1)
    assert scales[0] == 1.0
    assert scales == sorted(scales, reverse=True)
    assert 0.1 <= scales[-1] < 0.12


def test_cosine_is_at_one_half_in_the_middle():
    assert lr_scales(schedule="cosine")[50] == pytest.approx(0.5)
