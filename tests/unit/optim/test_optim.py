import pytest
import torch

from gracetune.config.schema import OptimizerSection
from gracetune.errors import ConfigError
from gracetune.optim.build import build_optimizer
from gracetune.optim.schedule import lr_scale


def shares(total=100, **settings):
    section = OptimizerSection(**settings)
    return [lr_scale(section, step, total) for step in range(total)]


def test_warm_up_rises_to_the_full_rate():
    rates = shares(warmup_steps=10)
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[:11] == sorted(rates[:11])
    assert set(rates[10:]) == {1.0}


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decaying_schedules_end_near_their_floor(schedule):
    rates = shares(schedule=schedule, final_lr_share=0.1)
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert 0.1 <= rates[-1] < 0.12


def test_cosine_is_half_way_in_the_middle():
    assert shares(schedule="cosine")[50] == pytest.approx(0.5)


def test_adamw_has_the_settings_of_its_section():
    weight = torch.nn.Parameter(torch.zeros(2))
    section = OptimizerSection(lr=0.3, betas=(0.5, 0.6), eps=1e-5, weight_decay=0.2)
    optimizer = build_optimizer({"weight": weight}, section)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        0.3,
        (0.5, 0.6),
        1e-5,
        0.2,
    )


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="adamw"):
        build_optimizer({}, OptimizerSection(name="adamm"))
