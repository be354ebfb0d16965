"""Every optimizer of a run file learns, follows its settings, and resumes exactly."""

import sys

import pytest
import torch

from gracetune.config.schema import OptimizerSection
from gracetune.errors import ConfigError
from gracetune.optim.automagic import Automagic
from gracetune.optim.build import MultiOptimizer, build_optimizer, parameter_groups, peak_lr
from gracetune.optim.registry import OPTIMIZERS
from gracetune.optim.schedule import averaged_weights, effective_lr, set_lr
from gracetune.train.state import flatten_optimizer_state, restore_optimizer

NAMES = sorted(OPTIMIZERS)


def build(name, **settings):
    """Return a small model with matrices and vectors, its parameters, and an optimizer."""
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    parameters = dict(model.named_parameters())
    section = OptimizerSection(name=name, **settings)
    return model, parameters, build_optimizer(parameters, section, seed=3)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :3].cos()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        set_lr(optimizer, 1 / (1 + 0.01 * step))
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_without_a_given_learning_rate(name):
    model, _, optimizer = build(name)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(-1))

    def loss():
        with torch.no_grad(), averaged_weights(optimizer):
            return (model(x) - x[:, :3].cos()).square().mean().item()

    before = loss()
    train(model, optimizer, range(100))
    assert loss() < before - 3e-4


@pytest.mark.parametrize("name", NAMES)
def test_it_resumes_bit_for_bit(name):
    model, parameters, optimizer = build(name)
    train(model, optimizer, range(6))
    saved = {key: t.clone() for key, t in flatten_optimizer_state(optimizer, parameters).items()}
    weights = {key: p.detach().clone() for key, p in parameters.items()}
    uninterrupted = train(model, optimizer, range(6, 12))

    resumed_model, resumed_parameters, resumed_optimizer = build(name)
    for key, p in resumed_parameters.items():
        p.data.copy_(weights[key])
    restore_optimizer(resumed_optimizer, resumed_parameters, saved)
    assert train(resumed_model, resumed_optimizer, range(6, 12)) == uninterrupted
    for key, p in resumed_parameters.items():
        assert torch.equal(p, parameters[key])


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_scales_every_group(name):
    _, _, optimizer = build(name, lr=0.5)
    set_lr(optimizer, 0.5)
    peak = 1.0 if name == "automagic" else 0.5
    assert {group["lr"] for group in optimizer.param_groups} == {peak / 2}


def test_settings_reach_the_optimizer():
    section = {"betas": (0.5, 0.6), "eps": 1e-5, "weight_decay": 0.2, "lr": 0.3}
    for name in ("adamw", "schedule_free", "prodigy"):
        group = build(name, **section)[2].param_groups[0]
        assert {key: group[key] for key in section} == section
    assert build("adamw")[2].param_groups[0]["fused"]
    assert build("lion", **section)[2].param_groups[0]["betas"] == (0.5, 0.6)
    assert build("adafactor", **section)[2].param_groups[0]["weight_decay"] == 0.2


def test_each_optimizer_has_its_own_default_learning_rate():
    assert peak_lr(OptimizerSection()) == 1e-4
    assert peak_lr(OptimizerSection(name="prodigy")) == 1.0
    assert peak_lr(OptimizerSection(name="lion", lr=0.2)) == 0.2
    assert peak_lr(OptimizerSection(name="automagic", lr=0.2)) == 1.0


def test_muon_trains_matrices_and_adamw_the_rest():
    _, parameters, optimizer = build("muon", lr=0.1)
    assert isinstance(optimizer, MultiOptimizer)
    matrices, vectors = optimizer.param_groups
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert matrices["adjust_lr_fn"] == "match_rms_adamw"
    only_matrices = {name: p for name, p in parameters.items() if p.ndim == 2}
    alone = build_optimizer(only_matrices, OptimizerSection(name="muon"))
    assert isinstance(alone, torch.optim.Muon)


def test_the_parts_of_a_multi_optimizer_share_the_loaded_state():
    model, _, optimizer = build("muon")
    train(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    train(model, optimizer, [2])
    assert all(not torch.equal(p, before[key]) for key, p in model.named_parameters())
    p = optimizer.param_groups[1]["params"][0]
    assert optimizer.state[p]["step"].item() == 3
    assert optimizer.step(lambda: 0.25) == 0.25


def test_averaged_weights_restores_the_training_weights_exactly():
    model, parameters, optimizer = build("schedule_free", lr=0.05)
    train(model, optimizer, range(10))
    trained = {key: p.detach().clone() for key, p in parameters.items()}
    with averaged_weights(optimizer):
        assert not optimizer.param_groups[0]["train_mode"]
        assert any(not torch.equal(p, trained[key]) for key, p in parameters.items())
    assert optimizer.param_groups[0]["train_mode"]
    assert all(torch.equal(p, trained[key]) for key, p in parameters.items())
    train(model, optimizer, [10])  # it refuses to step in eval mode


def test_averaged_weights_does_nothing_for_other_optimizers():
    model, parameters, optimizer = build("adamw")
    train(model, optimizer, range(2))
    before = {key: p.detach().clone() for key, p in parameters.items()}
    with averaged_weights(optimizer):
        assert all(torch.equal(p, before[key]) for key, p in parameters.items())


def test_schedule_free_refuses_a_schedule():
    with pytest.raises(ConfigError, match=r"optimizer.schedule is 'cosine'.*Remove"):
        build("schedule_free", schedule="cosine")


def test_effective_lr_is_the_learning_rate_of_the_last_step():
    model, _, optimizer = build("prodigy")
    train(model, optimizer, range(20))
    group = optimizer.param_groups[0]
    assert effective_lr(optimizer) == group["d"] * group["lr"]
    assert group["d"] > 1e-6
    _, _, adam = build("adamw", lr=0.25)
    assert effective_lr(adam) == 0.25
    model, parameters, magic = build("automagic")
    train(model, magic, range(3))
    rate = magic.state[parameters["0.weight"]]["rate"]
    torch.testing.assert_close(effective_lr(magic), rate * magic.param_groups[0]["lr"])


def test_prodigy_prints_nothing(capsys):
    build("prodigy", weight_decay=0.1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("lion", "lion_pytorch", "lion-pytorch"),
        ("prodigy", "prodigyopt", "prodigyopt"),
        ("schedule_free", "schedulefree", "schedulefree"),
        ("adamw_8bit", "bitsandbytes.optim", "bitsandbytes"),
    ],
)
def test_a_missing_package_is_an_error_with_the_install_command(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    named = {"a": torch.nn.Parameter(torch.zeros(1))}
    with pytest.raises(ConfigError, match=rf"{name}, which needs {package}.*pip install"):
        build_optimizer(named, OptimizerSection(name=name))


def expert_parameters():
    names = ("high.a", "high.b", "low.a", "low.b")
    return {name: torch.nn.Parameter(torch.zeros(3)) for name in names}


def test_each_expert_has_its_own_group():
    groups = parameter_groups(expert_parameters(), OptimizerSection(name="automagic"))
    assert [group["stage"] for group in groups] == ["high", "low"]
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["high.a", "high.b"],
        ["low.a", "low.b"],
    ]


def test_expert_settings_reach_the_expert_they_name():
    section = OptimizerSection(
        name="automagic",
        high_noise_lr_bump=1e-6,
        low_noise_lr_bump=5e-7,
        high_noise_max_lr=1e-3,
        low_noise_max_lr=5e-4,
    )
    optimizer = build_optimizer(expert_parameters(), section)
    assert isinstance(optimizer, Automagic)
    found = {g["stage"]: (g["lr_bump"], g["min_lr"], g["max_lr"]) for g in optimizer.param_groups}
    assert found == {"high": (1e-6, 1e-7, 1e-3), "low": (5e-7, 1e-7, 5e-4)}


@pytest.mark.parametrize("stage", ["high", "low"])
@pytest.mark.parametrize("key", ["lr_bump", "min_lr", "max_lr"])
def test_each_expert_setting_works_alone(stage, key):
    section = OptimizerSection(name="automagic", **{f"{stage}_noise_{key}": 3e-5})
    groups = {g["stage"]: g for g in build_optimizer(expert_parameters(), section).param_groups}
    other = "low" if stage == "high" else "high"
    assert groups[stage][key] == 3e-5
    assert groups[other][key] != 3e-5


def test_a_common_setting_applies_to_experts_without_their_own():
    section = OptimizerSection(name="automagic", max_lr=2e-3, low_noise_max_lr=1e-4, lr=5e-6)
    groups = {g["stage"]: g for g in build_optimizer(expert_parameters(), section).param_groups}
    assert groups["high"]["max_lr"] == 2e-3
    assert groups["low"]["max_lr"] == 1e-4
    assert groups["high"]["start_lr"] == 5e-6


def test_expert_settings_without_experts_are_refused():
    section = OptimizerSection(name="automagic", high_noise_max_lr=1e-3)
    with pytest.raises(ConfigError, match=r"high_noise_max_lr is 0.001.*Set optimizer.max_lr inst"):
        build_optimizer({"a": torch.nn.Parameter(torch.zeros(1))}, section)


def test_prodigy_is_refused_for_two_expert_parameters():
    with pytest.raises(ConfigError, match="estimates one step size for all parameters"):
        build_optimizer(expert_parameters(), OptimizerSection(name="prodigy"))


def test_an_unknown_optimizer_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="adamw"):
        build_optimizer({}, OptimizerSection(name="adamm"))
