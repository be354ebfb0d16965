"""Automagic's two rules, its bounds, and exact resume."""

import math

import numpy as np
import pytest
import torch

from gracetune.errors import ConfigError
from gracetune.optim.automagic import DAMPING, GAIN, Automagic
from gracetune.train.state import flatten_optimizer_state, restore_optimizer


def build_parameter(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))


def set_gradients(parameters, seed):
    """Set gradients that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def rates(optimizer, p):
    return optimizer.state[p]["rate"]


@pytest.mark.parametrize(
    ("bump", "max_lr", "known"), [(1e-6, 1e-3, 2.05e-4), (5e-7, 5e-4, 1.03e-4)]
)
def test_a_few_high_rates_do_not_keep_the_others_low(bump, max_lr, known):
    """With rates quantized to 8 bits of the largest one they would end eleven times too low."""
    num_hot, num_cold, num_steps = 8, 4088, 2000
    agreement = np.r_[np.full(num_hot, 0.95), np.full(num_cold, 0.55)]
    rng = np.random.default_rng(0)
    sign = np.ones(num_hot + num_cold)
    expected = np.full(num_hot + num_cold, 1e-6)
    p = torch.nn.Parameter(torch.zeros(num_hot + num_cold))
    optimizer = Automagic([p], lr_bump=bump, max_lr=max_lr)
    for step in range(num_steps):
        agrees = rng.random(len(sign)) < agreement
        sign = np.where(agrees, sign, -sign)
        if step:
            expected = np.clip(expected + np.where(agrees, bump, -bump), 1e-7, max_lr)
        p.grad = torch.from_numpy(sign).float()
        optimizer.step()
    cold = rates(optimizer, p)[num_hot:]
    assert cold.mean().item() == pytest.approx(expected[num_hot:].mean(), rel=1e-3)
    assert cold.mean().item() == pytest.approx(known, rel=0.1)
    assert cold.min().item() >= 1e-7
    assert rates(optimizer, p)[:num_hot].mean().item() > 0.9 * max_lr


def test_steps_follow_the_published_equations():
    """Compared with float64, including weight decay and the schedule's factor."""
    p = build_parameter(6, 4)
    start, beta2, decay, lr, bump = 1e-3, 0.9, 0.1, 0.5, 1e-4
    optimizer = Automagic(
        [p], start_lr=start, lr_bump=bump, betas=(0.5, beta2), weight_decay=decay, max_lr=1.0
    )
    optimizer.param_groups[0]["lr"] = lr
    w = p.detach().double().numpy()
    square, rate, before = np.zeros_like(w), np.full_like(w, start), np.zeros_like(w)
    for step in (1, 2, 3):
        set_gradients([p], seed=step)
        g = p.grad.double().numpy()
        square = beta2 * square + (1 - beta2) * g * g
        u = g / np.sqrt(square / (1 - beta2**step))
        u = u / max(1.0, math.sqrt((u * u).mean()))
        rate = rate + bump * np.sign(g) * before
        before = np.sign(g)
        w = w - lr * rate * (u + decay * w)
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), torch.from_numpy(w), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(rates(optimizer, p).double(), torch.from_numpy(rate))


def test_the_group_rate_follows_the_agreement_with_the_last_update():
    p, other = build_parameter(6, 4), build_parameter(5, seed=1)
    beta1 = 0.8
    optimizer = Automagic([p, other], betas=(beta1, 0.9))
    lr = optimizer.param_groups[0]["lr"] = 0.8
    weights = [t.detach().double().numpy() for t in (p, other)]
    squares = [np.zeros_like(w) for w in weights]
    means = [np.zeros_like(w) for w in weights]
    log_rate = math.log(1e-6)
    for step in (1, 2, 3, 4):
        set_gradients([p, other], seed=step)
        updates = []
        for index, t in enumerate((p, other)):
            g = t.grad.double().numpy()
            squares[index] = 0.9 * squares[index] + 0.1 * g * g
            u = g / np.sqrt(squares[index] / (1 - 0.9**step))
            updates.append(u / max(1.0, math.sqrt((u * u).mean())))
        if step > 1:
            last = [m / (1 - beta1 ** (step - 1)) for m in means]
            agreement = sum((u * m).sum() for u, m in zip(updates, last, strict=True))
            q = agreement / sum((m * m).sum() for m in last)
            log_rate += GAIN * lr * (min(1, max(-1, q)) + lr * DAMPING / 2)
            log_rate = max(log_rate, math.log(1e-7))
        means = [beta1 * m + (1 - beta1) * u for m, u in zip(means, updates, strict=True)]
        weights = [
            w - lr * math.exp(log_rate) * m / (1 - beta1**step)
            for w, m in zip(weights, means, strict=True)
        ]
        optimizer.step()
    assert rates(optimizer, p).item() == pytest.approx(math.exp(log_rate), rel=1e-5)
    for t, w in zip((p, other), weights, strict=True):
        torch.testing.assert_close(t.detach().double(), torch.from_numpy(w), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_group_rate_settles_at_half_of_the_newton_step(scale):
    """A noisy quadratic loss, `scale` times as wide, started at a millionth of that rate."""
    generator = torch.Generator().manual_seed(0)
    minimum = torch.randn(40, 10, generator=generator) * scale
    p = torch.nn.Parameter(torch.zeros(40, 10))
    optimizer = Automagic([p], max_lr=100 * scale)
    first = (p.detach() - minimum).square().mean().item()
    errors, relative_rates = [], []
    for step in range(600):
        noise = torch.randn(40, 10, generator=generator) * scale
        p.grad = p.detach() - minimum + noise
        optimizer.step()
        if step >= 300:
            errors.append((p.detach() - minimum).square().mean().item())
            # The curvature is 1 for the gradient, and 1 / RMS(gradient) for the update.
            root = optimizer.state[p]["square"].mean().sqrt().item() / math.sqrt(1 - 0.999**step)
            relative_rates.append(rates(optimizer, p).item() / root)
    assert np.mean(relative_rates) == pytest.approx(DAMPING, rel=0.2)
    assert np.mean(errors) < 0.35 * first  # noise keeps it from zero until the schedule ends


def test_the_first_gradient_changes_no_rate():
    for settings in ({"lr_bump": 1e-4}, {}):
        p = build_parameter(8)
        optimizer = Automagic([p], **settings)
        set_gradients([p], seed=1)
        optimizer.step()
        assert rates(optimizer, p).unique().tolist() == [pytest.approx(1e-6)]


def test_an_element_without_gradient_keeps_its_rate_and_its_weight():
    p = build_parameter(4)
    before = p.detach().clone()
    optimizer = Automagic([p], lr_bump=1e-4)
    for _ in range(5):
        p.grad = torch.tensor([1.0, 0.0, 1.0, 0.0])
        optimizer.step()
    assert rates(optimizer, p)[[1, 3]].tolist() == [pytest.approx(1e-6)] * 2
    assert torch.equal(p.detach()[[1, 3]], before[[1, 3]])
    assert rates(optimizer, p)[0].item() == pytest.approx(1e-6 + 4e-4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, 1e-7, 1e-1)),
        ({"lr_bump": 2e-6}, (2e-6, 1e-7, 1e-3)),
        ({"max_lr": 3e-4}, (None, 1e-7, 3e-4)),
        ({"min_lr": 1e-5}, (None, 1e-5, 1e-1)),
        ({"min_lr": 0.5}, (None, 0.5, 0.5)),
        ({"max_lr": 1e-8}, (None, 1e-8, 1e-8)),
    ],
)
def test_each_bound_holds_alone(given, expected):
    p = build_parameter(4)
    optimizer = Automagic([p], **given)
    group = optimizer.param_groups[0]
    assert (group["lr_bump"], group["min_lr"], group["max_lr"]) == expected
    for seed in range(30):
        set_gradients([p], seed)
        optimizer.step()
        assert bool((rates(optimizer, p) >= expected[1] * 0.999).all())
        assert bool((rates(optimizer, p) <= expected[2] * 1.001).all())


def test_contradictory_bounds_and_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"min_lr is 0.1; it must be at most max_lr \(0.01\)"):
        Automagic([build_parameter(2)], min_lr=0.1, max_lr=0.01)
    with pytest.raises(ConfigError, match=r"fp32 or bf16, not \{torch.float16\}"):
        Automagic([build_parameter(2, dtype=torch.float16)])


@pytest.mark.parametrize("settings", [{"lr_bump": 1e-5}, {}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_bit_for_bit(settings, dtype):
    def build():
        ps = {"a": build_parameter(6, 4, dtype=dtype), "b": build_parameter(5, seed=1, dtype=dtype)}
        return ps, Automagic(list(ps.items()), weight_decay=0.1, seed=7, **settings)

    params, optimizer = build()
    for seed in range(5):
        set_gradients(params.values(), seed)
        optimizer.step()
    saved = {n: t.clone() for n, t in flatten_optimizer_state(optimizer, params).items()}
    restored_params, restored = build()
    for name, p in restored_params.items():
        p.data.copy_(params[name].data)
    restore_optimizer(restored, restored_params, saved)
    for key, value in optimizer.state[params["a"]].items():
        assert restored.state[restored_params["a"]][key].dtype == value.dtype, key
    for seed in range(5, 10):
        for ps, each in ((params, optimizer), (restored_params, restored)):
            set_gradients(ps.values(), seed)
            each.step()
    for name in params:
        assert torch.equal(params[name], restored_params[name])
        assert torch.equal(rates(optimizer, params[name]), rates(restored, restored_params[name]))


def test_rates_are_saved_by_name_if_only_one_expert_was_stepped():
    """Saved by position, the low expert would get the rates of the high one."""

    def build(order):
        ps = {
            name: build_parameter(4, seed=len(name))
            for name in ("low.a", "low.b", "high.c", "high.dd")
        }
        groups = [
            {"params": [(n, p) for n, p in ps.items() if n.startswith(stage)], "stage": stage}
            for stage in order
        ]
        return ps, Automagic(groups, lr_bump=1e-5)

    params, optimizer = build(["low", "high"])
    for seed in range(20):
        set_gradients([p for name, p in params.items() if name.startswith("high")], seed)
        optimizer.step()
    saved = flatten_optimizer_state(optimizer, params)
    assert {name.split("|")[0] for name in saved if "rate" in name} == {"high.c", "high.dd"}
    restored_params, restored = build(["high", "low"])  # also with the groups in another order
    restore_optimizer(restored, restored_params, saved)
    for name in ("high.c", "high.dd"):
        assert torch.equal(rates(restored, restored_params[name]), rates(optimizer, params[name]))
        assert rates(restored, restored_params[name]).max() > 2e-5
    assert not any(restored.state.get(restored_params[name]) for name in ("low.a", "low.b"))


def test_state_dict_keeps_the_dtype_of_every_tensor():
    p = build_parameter(3, 3, dtype=torch.bfloat16)
    optimizer = Automagic([p], lr_bump=1e-5)
    for seed in range(4):
        set_gradients([p], seed)
        optimizer.step()
    twin = build_parameter(3, 3, dtype=torch.bfloat16)
    other = Automagic([twin], lr_bump=1e-5)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(rates(other, twin), rates(optimizer, p))
    assert other.state[twin]["before"].dtype == torch.int8


def test_scaling_the_gradients_changes_nothing():
    """Clipping and accumulation scale gradients."""
    results = []
    for scale in (1.0, 1e-4):
        p = build_parameter(6, 4)
        optimizer = Automagic([p])
        for seed in range(10):
            set_gradients([p], seed)
            p.grad *= scale
            optimizer.step()
        results.append(p.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-8)


def test_bf16_weights_take_steps_below_their_precision():
    """With steps of 1e-5, rounding to nearest would never change a weight of 1."""
    p = torch.nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    optimizer = Automagic([p], start_lr=1e-5, min_lr=1e-5, max_lr=1e-5)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(1 - 100 * 1e-5, abs=2e-4)


def test_the_mean_and_the_histogram_of_rates():
    a, b = build_parameter(10), build_parameter(30, seed=1)
    groups = [{"params": [a], "stage": "high", "lr_bump": 1e-5}, {"params": [b], "stage": "low"}]
    optimizer = Automagic(groups)
    assert optimizer.mean_lr().item() == 0
    assert optimizer.lr_histogram(-9, 0, 9) == {}
    for seed in range(3):
        set_gradients([a, b], seed)
        optimizer.step()
    expected = (rates(optimizer, a).sum() + rates(optimizer, b) * 30) / 40
    torch.testing.assert_close(optimizer.mean_lr(), expected)
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    torch.testing.assert_close(optimizer.mean_lr(), expected * 0.25)
    b.grad = None
    torch.testing.assert_close(optimizer.mean_lr(), rates(optimizer, a).mean() * 0.25)
    a.grad = None
    torch.testing.assert_close(optimizer.mean_lr(), expected * 0.25)
    counts = optimizer.lr_histogram(-9, 0, 9)
    assert {stage: int(c.sum()) for stage, c in counts.items()} == {"high": 10, "low": 30}
    assert int(counts["low"][3]) == 30 or int(counts["low"][2]) == 30  # 1e-7 to 1e-5


def test_a_closure_is_evaluated_with_gradients():
    p = build_parameter(3)
    optimizer = Automagic([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    expected = float(p.detach().square().sum())
    assert optimizer.step(closure) == pytest.approx(expected)
    assert p.grad is not None
