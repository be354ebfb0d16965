"""The update rule: the published moves without their dead zone, and rates that nobody gave."""

import math

import numpy as np
import pytest
import torch

from gracetune.errors import ConfigError
from gracetune.optim.automagic import DAMPING, GAIN, Automagic
from gracetune.train.state import flatten_optimizer_state, restore_optimizer


def parameter(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))


def give(parameters, seed):
    """Gradients that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def rates(optimizer, p):
    return optimizer.state[p]["rate"]


@pytest.mark.parametrize(("bump", "most", "known"), [(1e-6, 1e-3, 2.05e-4), (5e-7, 5e-4, 1.03e-4)])
def test_few_hot_elements_do_not_hold_the_others_down(bump, most, known):
    """The dead zone: rates in 8 bits of the largest one end eleven times too low."""
    num_hot, num_cold, num_steps = 8, 4088, 2000
    stays = np.r_[np.full(num_hot, 0.95), np.full(num_cold, 0.55)]
    draws = np.random.default_rng(0)
    sign = np.ones(num_hot + num_cold)
    expected = np.full(num_hot + num_cold, 1e-6)
    p = torch.nn.Parameter(torch.zeros(num_hot + num_cold))
    optimizer = Automagic([p], lr_bump=bump, max_lr=most)
    for step in range(num_steps):
        agrees = draws.random(len(sign)) < stays
        sign = np.where(agrees, sign, -sign)
        if step:
            expected = np.clip(expected + np.where(agrees, bump, -bump), 1e-7, most)
        p.grad = torch.from_numpy(sign).float()
        optimizer.step()
    cold = rates(optimizer, p)[num_hot:]
    assert cold.mean().item() == pytest.approx(expected[num_hot:].mean(), rel=1e-3)
    assert cold.mean().item() == pytest.approx(known, rel=0.1)
    assert cold.min().item() >= 1e-7
    assert rates(optimizer, p)[:num_hot].mean().item() > 0.9 * most


def test_one_step_is_the_equation():
    """Against the same in float64, two steps, weight decay and a schedule's share included."""
    p = parameter(6, 4)
    start, beta2, decay, share, bump = 1e-3, 0.9, 0.1, 0.5, 1e-4
    optimizer = Automagic(
        [p], start_lr=start, lr_bump=bump, betas=(0.5, beta2), weight_decay=decay, max_lr=1.0
    )
    optimizer.param_groups[0]["lr"] = share
    w = p.detach().double().numpy()
    square, rate, before = np.zeros_like(w), np.full_like(w, start), np.zeros_like(w)
    for step in (1, 2, 3):
        give([p], seed=step)
        g = p.grad.double().numpy()
        square = beta2 * square + (1 - beta2) * g * g
        u = g / np.sqrt(square / (1 - beta2**step))
        u = u / max(1.0, math.sqrt((u * u).mean()))
        rate = rate + bump * np.sign(g) * before
        before = np.sign(g)
        w = w - share * rate * (u + decay * w)
        optimizer.step()
    torch.testing.assert_close(p.detach().double(), torch.from_numpy(w), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(rates(optimizer, p).double(), torch.from_numpy(rate))


def test_a_found_rate_moves_by_what_the_gradient_says_of_the_last_update():
    p, other = parameter(6, 4), parameter(5, seed=1)
    beta1 = 0.8
    optimizer = Automagic([p, other], betas=(beta1, 0.9))
    share = optimizer.param_groups[0]["lr"] = 0.8
    weights = [t.detach().double().numpy() for t in (p, other)]
    squares = [np.zeros_like(w) for w in weights]
    means = [np.zeros_like(w) for w in weights]
    log_rate = math.log(1e-6)
    for step in (1, 2, 3, 4):
        give([p, other], seed=step)
        updates = []
        for index, t in enumerate((p, other)):
            g = t.grad.double().numpy()
            squares[index] = 0.9 * squares[index] + 0.1 * g * g
            u = g / np.sqrt(squares[index] / (1 - 0.9**step))
            updates.append(u / max(1.0, math.sqrt((u * u).mean())))
        if step > 1:
            last = [m / (1 - beta1 ** (step - 1)) for m in means]
            said = sum((u * m).sum() for u, m in zip(updates, last, strict=True))
            q = said / sum((m * m).sum() for m in last)
            log_rate += GAIN * share * (min(1, max(-1, q)) + share * DAMPING / 2)
            log_rate = max(log_rate, math.log(1e-7))
        means = [beta1 * m + (1 - beta1) * u for m, u in zip(means, updates, strict=True)]
        weights = [
            w - share * math.exp(log_rate) * m / (1 - beta1**step)
            for w, m in zip(weights, means, strict=True)
        ]
        optimizer.step()
    assert rates(optimizer, p).item() == pytest.approx(math.exp(log_rate), rel=1e-5)
    for t, w in zip((p, other), weights, strict=True):
        torch.testing.assert_close(t.detach().double(), torch.from_numpy(w), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_rate_that_nobody_gave_settles_where_the_curvature_says(scale):
    """A noisy bowl, `scale` times as wide: from a millionth to half of the Newton step."""
    generator = torch.Generator().manual_seed(0)
    goal = torch.randn(40, 10, generator=generator) * scale
    p = torch.nn.Parameter(torch.zeros(40, 10))
    optimizer = Automagic([p], max_lr=100 * scale)
    first = (p.detach() - goal).square().mean().item()
    seen, found = [], []
    for step in range(600):
        noise = torch.randn(40, 10, generator=generator) * scale
        p.grad = p.detach() - goal + noise
        optimizer.step()
        if step >= 300:
            seen.append((p.detach() - goal).square().mean().item())
            # The bowl's curvature is 1; the update has it over the gradient's root mean square.
            root = optimizer.state[p]["square"].mean().sqrt().item() / math.sqrt(1 - 0.999**step)
            found.append(rates(optimizer, p).item() / root)
    assert np.mean(found) == pytest.approx(DAMPING, rel=0.2)
    assert np.mean(seen) < 0.35 * first  # what noise leaves at such a rate, until a schedule ends


def test_a_first_gradient_moves_no_rate():
    for settings in ({"lr_bump": 1e-4}, {}):
        p = parameter(8)
        optimizer = Automagic([p], **settings)
        give([p], seed=1)
        optimizer.step()
        assert rates(optimizer, p).unique().tolist() == [pytest.approx(1e-6)]


def test_an_element_without_gradient_keeps_its_rate_and_its_weight():
    p = parameter(4)
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
    p = parameter(4)
    optimizer = Automagic([p], **given)
    group = optimizer.param_groups[0]
    assert (group["lr_bump"], group["min_lr"], group["max_lr"]) == expected
    for seed in range(30):
        give([p], seed)
        optimizer.step()
        assert bool((rates(optimizer, p) >= expected[1] * 0.999).all())
        assert bool((rates(optimizer, p) <= expected[2] * 1.001).all())


def test_bounds_that_cannot_hold_and_other_types_are_refused():
    with pytest.raises(ConfigError, match=r"min_lr is 0.1; it must be at most max_lr \(0.01\)"):
        Automagic([parameter(2)], min_lr=0.1, max_lr=0.01)
    with pytest.raises(ConfigError, match=r"fp32 or bf16, not \{torch.float16\}"):
        Automagic([parameter(2, dtype=torch.float16)])


@pytest.mark.parametrize("settings", [{"lr_bump": 1e-5}, {}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_bit_for_bit(settings, dtype):
    def made():
        ps = {"a": parameter(6, 4, dtype=dtype), "b": parameter(5, seed=1, dtype=dtype)}
        return ps, Automagic(list(ps.items()), weight_decay=0.1, seed=7, **settings)

    ours, optimizer = made()
    for seed in range(5):
        give(ours.values(), seed)
        optimizer.step()
    kept = {n: t.clone() for n, t in flatten_optimizer_state(optimizer, ours).items()}
    theirs, fresh = made()
    for name, p in theirs.items():
        p.data.copy_(ours[name].data)
    restore_optimizer(fresh, theirs, kept)
    for key, value in optimizer.state[ours["a"]].items():
        assert fresh.state[theirs["a"]][key].dtype == value.dtype, key
    for seed in range(5, 10):
        for ps, each in ((ours, optimizer), (theirs, fresh)):
            give(ps.values(), seed)
            each.step()
    for name in ours:
        assert torch.equal(ours[name], theirs[name])
        assert torch.equal(rates(optimizer, ours[name]), rates(fresh, theirs[name]))


def test_rates_stay_with_their_names_where_one_expert_alone_was_stepped():
    """Saved by position, the low expert would get the high one's rates, and that one none."""

    def made(order):
        ps = {
            name: parameter(4, seed=len(name)) for name in ("low.a", "low.b", "high.c", "high.dd")
        }
        groups = [
            {"params": [(n, p) for n, p in ps.items() if n.startswith(stage)], "stage": stage}
            for stage in order
        ]
        return ps, Automagic(groups, lr_bump=1e-5)

    ours, optimizer = made(["low", "high"])
    for seed in range(20):
        give([p for name, p in ours.items() if name.startswith("high")], seed)
        optimizer.step()
    saved = flatten_optimizer_state(optimizer, ours)
    assert {name.split("|")[0] for name in saved if "rate" in name} == {"high.c", "high.dd"}
    theirs, fresh = made(["high", "low"])  # even where groups have another order
    restore_optimizer(fresh, theirs, saved)
    for name in ("high.c", "high.dd"):
        assert torch.equal(rates(fresh, theirs[name]), rates(optimizer, ours[name]))
        assert rates(fresh, theirs[name]).max() > 2e-5
    assert not any(fresh.state.get(theirs[name]) for name in ("low.a", "low.b"))


def test_torchs_own_state_dict_comes_back_exactly_too():
    p = parameter(3, 3, dtype=torch.bfloat16)
    optimizer = Automagic([p], lr_bump=1e-5)
    for seed in range(4):
        give([p], seed)
        optimizer.step()
    twin = parameter(3, 3, dtype=torch.bfloat16)
    other = Automagic([twin], lr_bump=1e-5)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(rates(other, twin), rates(optimizer, p))
    assert other.state[twin]["before"].dtype == torch.int8


def test_scaled_gradients_change_nothing():
    """Clipping and accumulation only scale them."""
    ended = []
    for scale in (1.0, 1e-4):
        p = parameter(6, 4)
        optimizer = Automagic([p])
        for seed in range(10):
            give([p], seed)
            p.grad *= scale
            optimizer.step()
        ended.append(p.detach().clone())
    torch.testing.assert_close(*ended, rtol=1e-5, atol=1e-8)


def test_weights_in_bf16_take_steps_below_their_last_digit():
    """At 1e-5 a step, plain rounding would leave a weight of 1 where it is for ever."""
    p = torch.nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    optimizer = Automagic([p], start_lr=1e-5, min_lr=1e-5, max_lr=1e-5)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(1 - 100 * 1e-5, abs=2e-4)


def test_the_mean_and_the_spread_of_rates():
    a, b = parameter(10), parameter(30, seed=1)
    groups = [{"params": [a], "stage": "high", "lr_bump": 1e-5}, {"params": [b], "stage": "low"}]
    optimizer = Automagic(groups)
    assert optimizer.mean_lr().item() == 0
    assert optimizer.lr_histogram(-9, 0, 9) == {}
    for seed in range(3):
        give([a, b], seed)
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
    p = parameter(3)
    optimizer = Automagic([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    expected = float(p.detach().square().sum())
    assert optimizer.step(closure) == pytest.approx(expected)
    assert p.grad is not None
