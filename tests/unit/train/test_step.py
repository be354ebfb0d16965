"""One optimizer step: every sample has the same weight, whatever the batches look like."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from fakes.managed import managed_memory
from fakes.platforms import simulated_machine

from gracetune.errors import RunFailedError
from gracetune.events.run_control import RunControl
from gracetune.memory.platform import Link
from gracetune.memory.stats import MemoryAccounting, Tier
from gracetune.optim.offloaded_state import ManagedState
from gracetune.plan.kernel_recorder import KernelRecorder
from gracetune.plan.launch_overhead import equivalent_ops
from gracetune.plan.trace import STEP_OPS
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.run import SignalHandler
from gracetune.train.run_identity import CHANGEABLE_SETTINGS
from gracetune.train.step import (
    Ema,
    TrainProgress,
    _update_weights,
    batch_losses,
    losses_given_noise,
    mark_last,
    scale_and_clip_gradients,
    train_step,
)


@pytest.fixture
def session(tiny_run, recorder, tmp_path):
    def make(**sections):
        run = tiny_run(**sections)
        (tmp_path / "run").mkdir(exist_ok=True)
        accelerator = start_accelerator(run)
        return build_session(run, accelerator, recorder, RunControl(tmp_path), SignalHandler())

    return make


def batches(session, sizes):
    """Batches of the given sizes, cut from the order's own draws."""
    draws = [draw for index in range(8) for draw in session.pipeline.order.batch_at(index)]
    cuts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return [
        replace(session.pipeline.load(draws[a:b]), index=index)
        for index, (a, b) in enumerate(pairwise(cuts))
    ]


def weights(session):
    return {n: p.detach().clone() for n, p in session.state.parameters.items()}


def test_the_planner_knows_the_operators_around_the_model(session, monkeypatch):
    """It counts those of a micro-batch that a trace of the model does not have."""
    s = session()
    (batch,) = batches(s, [2])

    def predict(_self, _transformer, noisy, *_):
        return noisy.detach().requires_grad_()

    monkeypatch.setattr(type(s.state.family), "predict", predict)
    batch_losses(s.state, batch)  # the recorder does more for the first micro-batch
    found = []
    for compute_loss in (
        lambda: batch_losses(s.state, batch).sum(),
        lambda: batch.latents.detach().requires_grad_().float().square().mean(),  # the traced one
    ):
        recorder = KernelRecorder([], [])
        with recorder:
            loss = compute_loss()
            forward = equivalent_ops(recorder.take_calls(0))
            recorder.take()
            loss.backward()
            found.append((forward, equivalent_ops(recorder.take_calls(0))))
    step, traced = found
    assert STEP_OPS[0] == pytest.approx(step[0] - traced[0], abs=3)
    assert STEP_OPS[1] == pytest.approx(step[1] - traced[1], abs=2)


@pytest.mark.parametrize("sizes", [[4, 4], [4, 1], [1, 2, 3], [5]])
def test_the_loss_is_the_mean_over_all_accumulated_samples(session, sizes):
    s = session(train={"max_grad_norm": 0})
    micro_batches = batches(s, sizes)
    generators = [s.state.rng.at("train", i, 0).initial_seed() for i in range(len(sizes))]
    expected_losses = []
    for batch, seed in zip(micro_batches, generators, strict=True):
        generator = torch.Generator().manual_seed(seed)
        timesteps = torch.randn(len(batch), generator=generator).sigmoid()
        noise = torch.randn(batch.latents.shape, generator=generator)
        expected_losses.append(losses_given_noise(s.state, batch, timesteps, noise))
    mean = torch.cat(expected_losses).mean()
    expected = torch.autograd.grad(mean, list(s.state.parameters.values()), allow_unused=True)

    seen = {}
    s.state.optimizer.step = lambda: seen.update(
        {n: None if p.grad is None else p.grad.clone() for n, p in s.state.parameters.items()}
    )
    result = train_step(s.state, mark_last(micro_batches), len(micro_batches), TrainProgress())
    torch.testing.assert_close(result.loss, mean.detach())
    assert result.samples.item() == sum(sizes)
    for gradient, expected_gradient in zip(seen.values(), expected, strict=True):
        if expected_gradient is not None:
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


def test_every_step_of_a_ramp_uses_whole_micro_batches(session):
    """The ramp of the fork's guide, from 4 to 32."""
    s = session(
        gh200_optimizations={
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 4,
            "target_effective_batch_size": 32,
            "batch_rampup_steps": 20,
        }
    )
    done = 0
    for step in range(5):
        length = s.micro_batches(done)
        micro_batches = batches(s, [4] * length)
        result = train_step(s.state, mark_last(micro_batches), length, TrainProgress(step, done))
        assert result.samples.item() == 4 * length
        done += length


def test_noise_and_timesteps_depend_on_the_position_only(session):
    s = session()
    (batch,) = batches(s, [4])
    before, losses = weights(s), []
    for step, index in ((3, 7), (9, 7), (9, 8)):
        for name, parameter in s.state.parameters.items():
            parameter.data.copy_(before[name])
        numbered = mark_last([replace(batch, index=index)])
        losses.append(train_step(s.state, numbered, 1, TrainProgress(step)).loss)
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[1], losses[2])


def test_gradients_are_scaled_and_then_clipped():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([30.0, 40.0])
    norm = scale_and_clip_gradients([weight], torch.tensor(0.1), max_norm=1.0)
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    weight.grad = torch.tensor([30.0, 40.0])
    scale_and_clip_gradients([weight], torch.tensor(0.1), max_norm=0)
    torch.testing.assert_close(weight.grad, torch.tensor([3.0, 4.0]))


def test_the_optimizer_uses_the_scheduled_learning_rate(session):
    s = session(optimizer={"lr": 0.5, "warmup_steps": 4})
    result = train_step(s.state, mark_last(batches(s, [2])), 1, TrainProgress(step=1))
    assert result.lr == pytest.approx(0.5 * 2 / 5)
    assert s.state.optimizer.param_groups[0]["lr"] == result.lr


def test_gradient_checkpointing_does_not_change_gradients(session):
    gradients = []
    for recompute in (False, True):
        s = session(train={"gradient_checkpointing": recompute})
        s.state.transformer.train()
        micro_batches = batches(s, [4])
        kept = {}
        s.state.optimizer.step = lambda s=s, kept=kept: kept.update(
            {n: p.grad.clone() for n, p in s.state.parameters.items() if p.grad is not None}
        )
        train_step(s.state, mark_last(micro_batches), 1, TrainProgress())
        gradients.append(kept)
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        assert torch.equal(gradients[0][name], gradients[1][name]), name


def test_batches_are_read_lazily(session):
    s = session()
    taken = []

    def micro_batches():
        for batch, is_last in mark_last(batches(s, [2, 2])):
            taken.append(len(batch))
            yield batch, is_last

    train_step(s.state, micro_batches(), 2, replace(TrainProgress(), step=0))
    assert taken == [2, 2]


def test_a_step_with_too_few_micro_batches_updates_nothing(session):
    s = session()
    before = {name: p.detach().clone() for name, p in s.state.parameters.items()}
    with pytest.raises(AssertionError, match="the step has no last micro-batch"):
        train_step(s.state, [(batch, False) for batch in batches(s, [4])], 2, TrainProgress())
    assert all(torch.equal(p, before[name]) for name, p in s.state.parameters.items())


def test_loss_weights_belong_to_the_timesteps_of_their_samples(session):
    s = session(train={"min_snr_gamma": 5.0, "min_snr_in_flow": "exact"})
    (batch,) = batches(s, [4])
    generator = s.state.rng.at("train", 0, 0)
    timesteps = torch.randn(4, generator=generator).sigmoid()
    noise = torch.randn(batch.latents.shape, generator=generator)
    plain = losses_given_noise(s.state, batch, timesteps, noise)
    weights = torch.minimum((1 - timesteps) ** 2, 5 * timesteps**2)
    torch.testing.assert_close(batch_losses(s.state, batch), plain * weights)


def test_a_step_draws_from_the_timestep_window_of_the_run_file(session, monkeypatch):
    s = session(train={"timestep_window": [0.5, 0.6]})
    seen = []
    predict = type(s.state.family).predict

    def recorded(self, transformer, noisy, timesteps, text):
        seen.extend(timesteps.tolist())
        return predict(self, transformer, noisy, timesteps, text)

    monkeypatch.setattr(type(s.state.family), "predict", recorded)
    train_step(s.state, mark_last(batches(s, [4, 4])), 2, TrainProgress())
    assert len(seen) == 8
    assert all(0.5 <= timestep < 0.6 for timestep in seen)


def test_min_snr_in_flow_matching_is_reported_once(session, recorder):
    session(train={"min_snr_gamma": 5.0})
    assert sum("min_snr_gamma is 5 but has no effect" in text for text in recorder.texts()) == 1


def test_progress_counts_the_steps_of_each_expert():
    progress = TrainProgress()
    for expert in ("high", "low", "low", None):
        progress = progress.after(2, 9, expert)
    assert progress == TrainProgress(4, 8, 9, high_steps=1, low_steps=2)


def test_the_ema_follows_the_weights_and_soon_forgets_its_start():
    live = {"w": torch.zeros(3)}
    ema = Ema(live, decay=0.9)
    live["w"].fill_(1.0)
    ema.update(step=0)
    torch.testing.assert_close(ema.averages["w"], torch.full((3,), 0.9))
    for step in range(1, 200):
        ema.update(step)
    torch.testing.assert_close(ema.averages["w"], torch.ones(3))


def test_late_steps_use_the_full_ema_decay():
    live = {"w": torch.zeros(1)}
    ema = Ema(live, decay=0.9)
    live["w"].fill_(1.0)
    ema.update(step=100_000)
    torch.testing.assert_close(ema.averages["w"], torch.tensor([0.1]))


def test_the_ema_averages_only_the_expert_that_was_trained():
    live = {"high.w": torch.zeros(2), "low.w": torch.zeros(2)}
    alone = {name: Ema({name: weight}, decay=0.8) for name, weight in live.items()}
    ema = Ema(live, decay=0.8)
    progress = TrainProgress()
    for expert in ["high"] * 5 + ["low"] * 20 + ["high"] * 2:
        live[f"{expert}.w"] += 1.0
        ema.update(progress.steps_of(expert), expert)
        alone[f"{expert}.w"].update(int(live[f"{expert}.w"][0]) - 1)
        progress = progress.after(1, 1, expert)
        for name, average in ema.averages.items():
            assert torch.equal(average, alone[name].averages[name]), (progress, name)


def test_the_model_holds_the_ema_only_inside_the_block():
    live = {"w": torch.nn.Parameter(torch.zeros(2))}
    ema = Ema(live, decay=0.5)
    live["w"].data.fill_(4.0)
    with ema.swapped_in():
        assert live["w"].tolist() == [0.0, 0.0]
    assert live["w"].tolist() == [4.0, 4.0]


def test_weights_are_restored_after_an_error_in_the_ema_block():
    live = {"w": torch.nn.Parameter(torch.ones(1))}
    ema = Ema({"w": live["w"]}, decay=0.5)
    live["w"].data.fill_(2.0)
    with pytest.raises(RuntimeError), ema.swapped_in():
        raise RuntimeError
    assert live["w"].item() == 2.0


ODD = 100
"""Elements of a weight whose bytes are no multiple of the alignment in managed memory."""
AVERAGES, COPIES = 512, 512


@pytest.mark.parametrize(
    ("cap", "failing", "full", "peak"),
    [
        (AVERAGES + COPIES, (), False, AVERAGES + COPIES),
        (AVERAGES + 4 * ODD, (), False, AVERAGES),  # its bytes fit, but not aligned
        (AVERAGES + 4 * ODD, (), True, AVERAGES),
        (AVERAGES + COPIES, ("allocate_managed",), False, AVERAGES),
        (AVERAGES + COPIES, ("allocate_managed",), True, AVERAGES),
    ],
    ids=["managed", "device", "host", "device, refused", "host, refused"],
)
def test_the_weights_are_kept_where_there_is_room_while_the_ema_is_in_use(
    monkeypatch, cap, failing, full, peak
):
    """A validation must not fail because a copy of the weights does not fit somewhere."""
    accounting = MemoryAccounting({Tier.MANAGED: cap})
    driver = simulated_machine(Link.MANAGED).gpu
    live = {"w": torch.nn.Parameter(torch.zeros(ODD))}
    ema = Ema(live, 0.5, ManagedState(managed_memory(driver, accounting)))
    live["w"].data.fill_(4.0)
    driver._failing = dict.fromkeys(failing, 2)
    empty_like = torch.empty_like

    def allocate(tensor, **options):
        if "device" not in options:
            raise torch.OutOfMemoryError
        return empty_like(tensor, **options)

    if full:
        monkeypatch.setattr(torch, "empty_like", allocate)
    with ema.swapped_in():
        assert live["w"].tolist() == [0.0] * ODD
        assert accounting.current(Tier.MANAGED) == peak
    assert live["w"].tolist() == [4.0] * ODD
    assert accounting.current(Tier.MANAGED) == AVERAGES


def test_divided_weights_without_space_for_the_update_end_the_run_with_what_helps():
    """The other ranks have updated theirs, and no role of such ranks can be in managed memory."""

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    ranks = SimpleNamespace(world_size=2, rank=1, name="rank {}".format)
    stepper = SimpleNamespace(step=full)
    with pytest.raises(RunFailedError) as caught:
        _update_weights(SimpleNamespace(ranks=ranks, sharded=object(), stepper=stepper))
    text = str(caught.value)
    assert text.startswith("rank 1 ran out of device memory in the optimizer's update (CUDA out of")
    assert "optimizer.state: host" in text
    assert "optimizer.state" in CHANGEABLE_SETTINGS, "a resumed run may have another value"
    assert "plan.device_memory" in text


RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 4,
    "batch_rampup_steps": 8,
}


@pytest.mark.parametrize(
    ("sections", "saved", "text"),
    [
        ({}, {}, "averages over 4 samples instead of 8. Set train.effective_batch_size: 8"),
        ({"train": {"gradient_accumulation_steps": 2}}, {}, "the same samples as before"),
        ({"train": {"effective_batch_size": 8}}, {}, "the same samples as before"),
        ({"gh200_optimizations": RAMP}, {}, "averages over 4 samples instead of 8"),
        (
            {"gh200_optimizations": RAMP | {"target_effective_batch_size": 16}},
            {"consumed": 8},
            "the same samples as before",
        ),
    ],
)
def test_a_run_on_fewer_ranks_says_whether_its_steps_have_the_same_samples(
    session, recorder, sections, saved, text
):
    """The checkpoint is that of two ranks with one micro-batch of four samples each."""
    s = session(**sections)
    identity = {"train.gradient_accumulation_steps": 1}
    progress = TrainProgress(consumed=saved.get("consumed", 0))
    s._report_other_ranks(SimpleNamespace(num_ranks=2, identity=identity, progress=progress))
    assert text in recorder.texts()[-1]
