"""Show made-up measurements to each health check: what it finds, and what it must not find."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gracetune.events.types import (
    DeviceSensors,
    HeldOutLoss,
    LossParts,
    MemoryUsed,
    StepDone,
    StepTimes,
    WeightsMoved,
)
from gracetune.train.health_checks import (
    FINE,
    UNKNOWN,
    DatasetDead,
    Finding,
    GradientSpikes,
    LearningRateHigh,
    Measurements,
    Overfitting,
    PartUntrained,
    RunFacts,
    SampleProblem,
    SamplesSeen,
    TimestepShift,
    WeightsStill,
)
from gracetune.train.health_data import SamplesEmpty
from gracetune.train.health_machine import (
    DataWaits,
    DeviceMemory,
    DiskSpace,
    HostMemory,
    PageCache,
    SlowDown,
    Throttling,
    WeightWaits,
)

GIB = 2**30
FACTS = RunFacts(total_steps=1000, lr=1e-4, dataset_shares={"a": 0.5, "b": 0.5})


def done(step, loss=1.0, norm=0.1, seconds=0.5, samples=4):
    return StepDone(step, loss, 1e-4, norm, samples, 1, 0, seconds)


def steps(losses, first=1, **values):
    return [done(first + index, loss, **values) for index, loss in enumerate(losses)]


def times(step=50, total=1.0, **seconds):
    phases = {"compute": total - sum(seconds.values()), **seconds}
    return StepTimes(step, 10, phases, total)


def parts(step=50, **by):
    return LossParts(
        step, by.get("by_dataset", {}), by.get("by_timestep", {}), by.get("by_part", {})
    )


def mean(loss, samples=8):
    return {"loss": loss, "samples": samples}


def sensors(gpus=(), **host):
    return DeviceSensors(50, tuple(gpus), host)


def problem(check, *measured):
    """Return the finding of the last of several looks, which must be one."""
    for one in measured:
        found = check.look(one)
    assert isinstance(found, Finding), found
    assert found.cause
    assert found.advice
    return found


def look(check, *measured):
    """Show several measurements to a check, whatever it finds."""
    for one in measured:
        check.look(one)


def last(check, *measured):
    for one in measured:
        found = check.look(one)
    return found


def test_every_check_says_that_nothing_is_known_without_measurements():
    empty = Measurements(1)
    checks = [
        *(GradientSpikes(), LearningRateHigh(FACTS), WeightsStill(FACTS), DatasetDead(FACTS)),
        *(
            PartUntrained(FACTS),
            Overfitting(),
            TimestepShift(FACTS),
            SamplesEmpty(FACTS),
            SlowDown(RunFacts(100), 1.5),
        ),
        *(DataWaits(FACTS, 0.2), WeightWaits(0.2), Throttling(), DiskSpace(FACTS, 1)),
        *(PageCache(FACTS), HostMemory(FACTS), DeviceMemory()),
    ]
    assert [check.look(empty) for check in checks] == [UNKNOWN] * len(checks)


def test_repeated_gradient_spikes_are_found_and_a_single_one_is_not():
    calm = Measurements(30, [done(step, norm=0.1) for step in range(1, 31)])
    check = GradientSpikes()
    assert check.look(calm) is FINE
    assert check.look(Measurements(31, [done(31, norm=5.0)])) is FINE
    found = problem(check, Measurements(34, [done(s, norm=5.0) for s in (32, 33, 34)]))
    assert "up to 50 times its median of 0.1" in found.cause
    assert check.look(Measurements(100, [done(s) for s in range(35, 101)])) is FINE


def test_gradients_that_stay_larger_are_no_spikes_any_more():
    def look(check, norm, first, stop):
        norms = [done(step, norm=norm) for step in range(first, stop)]
        return check.look(Measurements(stop - 1, norms))

    check = GradientSpikes()
    assert look(check, 0.1, 1, 201) is FINE
    assert isinstance(look(check, 5.0, 201, 221), Finding)
    assert look(check, 5.0, 221, 400) is FINE


def test_the_gradients_of_two_experts_are_not_compared_with_each_other():
    def one(step):
        expert = "low" if step % 4 == 0 else "high"
        return replace(done(step, norm=5.0 if expert == "low" else 0.1), expert=expert)

    assert GradientSpikes().look(Measurements(200, [one(step) for step in range(1, 201)])) is FINE


NOISY = [1.0 + 0.3 * math.sin(step) for step in range(60)]


def test_a_growing_loss_is_a_high_learning_rate():
    check = LearningRateHigh(FACTS)
    assert check.look(Measurements(60, steps(NOISY))) is FINE
    found = problem(check, Measurements(120, steps([2.5] * 60, 61)))
    assert "the training loss has grown from" in found.cause
    assert "learning rate is too high" in found.cause
    assert "optimizer.lr is 0.0001" in found.advice


@pytest.mark.parametrize(("held_out", "is_found"), [(0.9, False), (1.3, True)])
def test_a_training_loss_that_grows_is_compared_with_the_held_out_loss(held_out, is_found):
    check = LearningRateHigh(FACTS)
    look(check, validation(0, 1.0), Measurements(60, steps(NOISY)), validation(70, held_out))
    found = check.look(Measurements(130, steps([1.8] * 70, 61)))
    assert isinstance(found, Finding) == is_found


@pytest.mark.parametrize("variation", [0.4, 0.55, 0.7])
def test_noise_is_not_a_high_learning_rate(variation):
    shape = variation**-2
    for seed in range(20):
        losses = np.random.default_rng(seed).gamma(shape, 1 / shape, 2000).tolist()
        check = LearningRateHigh(FACTS)
        for first in range(0, 2000, 25):
            some = steps(losses[first : first + 25], first + 1, samples=1)
            assert not isinstance(check.look(Measurements(first + 25, some)), Finding), seed


def test_the_losses_of_two_experts_are_not_compared_with_each_other():
    experts = [
        replace(one, expert="high" if one.loss < 1 else "low")
        for one in steps(([0.5] * 100 + [1.5] * 100) * 3)
    ]
    check = LearningRateHigh(FACTS)
    for first in range(0, 600, 20):
        assert check.look(Measurements(first, experts[first : first + 20])) in (FINE, UNKNOWN)


def test_an_adapter_that_moves_far_without_a_lower_loss_is_a_high_learning_rate():
    moved = WeightsMoved(60, "adapter", {"blocks.0": 2.0, "blocks.1": 3.0})
    flat = Measurements(60, steps([1.0] * 60), moved=moved)
    assert "by 250% (median)" in problem(LearningRateHigh(FACTS), flat).cause
    moved = WeightsMoved(60, "adapter", {"blocks.0": 1.0, "blocks.1": 1.2})
    falling = [1.0 - 0.01 * step for step in range(60)]
    assert LearningRateHigh(FACTS).look(Measurements(60, steps(falling), moved=moved)) is FINE


def test_one_window_of_losses_does_not_tell_whether_they_have_fallen():
    moved = WeightsMoved(25, "adapter", {"blocks.0": 1.0})
    check = LearningRateHigh(FACTS)
    assert check.look(Measurements(25, steps([1.0] * 25), moved=moved)) is FINE
    found = problem(check, Measurements(60, steps([1.0] * 35, 26)))
    assert "the loss has not fallen" in found.cause


def test_a_resumed_run_that_has_not_seen_the_first_losses_does_not_compare_with_them():
    moved = WeightsMoved(300, "adapter", {"blocks.0": 1.0})
    resumed = LearningRateHigh(replace(FACTS, start_step=200))
    assert resumed.look(Measurements(300, steps([0.4] * 100, 201), moved=moved)) is FINE
    parts = PartUntrained(replace(FACTS, start_step=200))
    assert all(parts.look(one) is UNKNOWN for one in part_windows(falls, lambda _: 1.0, samples=32))


@pytest.mark.parametrize(("measure", "distance"), [("adapter", 1e-9), ("full", 1e-10)])
def test_weights_that_do_not_move_are_found(measure, distance):
    moved = WeightsMoved(60, measure, {"blocks.0": distance, "blocks.1": 0.0})
    found = problem(WeightsStill(FACTS), Measurements(60, moved=moved))
    assert "does not move" in found.cause
    assert "optimizer.lr (it is 0.0001)" in found.advice


def test_zero_gradients_are_not_a_low_learning_rate():
    blocks = {"blocks.0": 0.0, "blocks.1": 0.0}
    found = problem(
        WeightsStill(FACTS), Measurements(60, moved=WeightsMoved(60, "adapter", blocks, blocks))
    )
    assert "all of its gradients are zero" in found.cause
    assert "Raise optimizer.lr" not in found.advice
    assert "mask_invert" in found.advice


def test_single_blocks_that_do_not_move_are_named():
    blocks = {f"blocks.{number}": 0.0 if number < 6 else 0.01 for number in range(10)}
    found = problem(
        WeightsStill(FACTS), Measurements(60, moved=WeightsMoved(60, "adapter", blocks))
    )
    assert "6 of 10 trained blocks" in found.cause
    assert "blocks.0, blocks.1, blocks.2, blocks.3 and 2 more" in found.cause


def test_weights_may_rest_in_the_first_steps_and_in_the_warm_up():
    still = {"blocks.0": 0.0}
    assert (
        WeightsStill(FACTS).look(Measurements(5, moved=WeightsMoved(5, "adapter", still)))
        is UNKNOWN
    )
    slow = RunFacts(total_steps=1000, warmup_steps=100)
    assert (
        WeightsStill(slow).look(Measurements(90, moved=WeightsMoved(90, "adapter", still)))
        is UNKNOWN
    )


def test_a_dataset_that_is_never_drawn_is_found_once_it_should_have_been():
    def look(count):
        drawn = {"a": mean(1.0, count), "b": {"samples": 0}}
        return DatasetDead(FACTS).look(Measurements(50, losses=parts(by_dataset=drawn)))

    assert look(30) is FINE
    assert "none of 50 samples came from it" in look(50).cause


def test_a_dataset_without_a_loss_is_found():
    drawn = {"a": mean(1.0, 20), "b": mean(0.0, 20)}
    found = problem(DatasetDead(FACTS), Measurements(50, losses=parts(by_dataset=drawn)))
    assert "dataset 'b' is dead: its loss is 0, against 1 of the others" in found.cause
    assert "mask_invert" in found.advice


def test_a_dataset_with_flat_latents_is_found():
    drawn = {"a": mean(1.0), "b": mean(0.9)}
    measured = Measurements(50, losses=parts(by_dataset=drawn), latent_spread={"a": 0.8, "b": 0.01})
    assert "black, blank or silent" in problem(DatasetDead(FACTS), measured).cause


def test_all_dead_datasets_are_named():
    drawn = {"a": mean(0.0, 20), "b": mean(0.0, 20)}
    found = problem(DatasetDead(FACTS), Measurements(50, losses=parts(by_dataset=drawn)))
    assert "dataset 'a' is dead" in found.cause
    assert "dataset 'b' is dead" in found.cause
    assert found.kind == "a, b"


def test_datasets_with_different_losses_are_fine():
    drawn = {"a": mean(1.0, 50), "b": mean(0.2, 50)}
    measured = Measurements(50, losses=parts(by_dataset=drawn), latent_spread={"a": 0.8, "b": 0.4})
    assert DatasetDead(FACTS).look(measured) is FINE


RANGES = {"t0.00-0.25": 0.4, "t0.25-0.50": 1.0, "t0.50-0.75": 1.2, "t0.75-1.00": 2.0}


def part_windows(video, audio, seed=0, count=60, samples=8):
    """Return windows of noisy losses of two parts, which fall as the functions say."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        found = {"video": {}, "audio": {}}
        for name, level in RANGES.items():
            for part, factor in (("video", video), ("audio", audio)):
                loss = level * factor(number / count) * rng.gamma(4 * samples, 1 / (4 * samples))
                found[part][name] = mean(loss, samples)
        yield Measurements(number, part_losses=found)


def falls(progress):
    return 1 - 0.4 * progress


def test_a_part_of_the_output_whose_loss_stays_is_found():
    found = problem(PartUntrained(FACTS), *part_windows(falls, lambda _: 1.0, samples=32))
    assert "the audio part of the model does not learn" in found.cause
    assert "adapter.targets" in found.advice


@pytest.mark.parametrize("audio", [falls, lambda progress: 1 - 0.25 * progress])
@pytest.mark.parametrize("samples", [1, 8])
def test_parts_that_learn_are_fine_however_noisy_their_losses(audio, samples):
    for seed in range(20):
        check = PartUntrained(FACTS)
        for one in part_windows(falls, audio, seed, samples=samples):
            assert check.look(one) in (FINE, UNKNOWN)


TWO_STREAMS = ["blocks.0.attn.to_q.weight", "blocks.0.audio_attn.to_q.weight"]
BOTH = {"video": {"t0.00-0.25": mean(1.0)}, "audio": {"t0.00-0.25": mean(1.0)}}


def test_a_part_without_trained_weights_is_found_at_once():
    facts = replace(FACTS, weights=TWO_STREAMS, trained=["blocks.0.attn.to_q.lora_A"])
    found = problem(PartUntrained(facts), Measurements(10, part_losses=BOTH))
    assert "the audio part of the model is not trained: none of its 1 weights" in found.cause
    assert "adapter.targets include the audio blocks" in found.advice
    whole = replace(facts, trained=[f"{name}.lora_A" for name in TWO_STREAMS])
    assert PartUntrained(whole).look(Measurements(10, part_losses=BOTH)) is UNKNOWN


def test_a_part_whose_weights_have_no_gradient_is_found_at_once():
    norms = dict(zip(TWO_STREAMS, (0.1, 0.0), strict=True))
    facts = replace(FACTS, weights=TWO_STREAMS, trained=TWO_STREAMS)
    measured = Measurements(10, part_losses=BOTH, grad_norms=norms)
    found = problem(PartUntrained(facts), measured)
    assert "the audio part of the model is not trained" in found.cause
    assert "have a zero gradient" in found.cause


def validation(step, held_out, best=(10**9, 0.0), single=()):
    event = HeldOutLoss(step, {"held_out": held_out}, {}, 8, *best)
    return Measurements(step, held_out=event, held_out_samples=single)


def test_a_held_out_loss_that_rises_while_training_falls_is_overfitting():
    check = Overfitting()
    for number, held_out in enumerate((1.0, 0.8, 0.85, 0.9)):
        first = 1 + 20 * number
        check.look(Measurements(first + 19, steps([1 - 0.2 * number] * 20, first)))
        found = check.look(validation(first + 19, held_out))
    assert isinstance(found, Finding)
    assert "overfits since step 40" in found.cause
    assert "from 0.8 to 0.9" in found.cause
    assert "adapter of step 40" in found.advice


def test_a_held_out_loss_that_falls_or_a_diverging_run_is_not_overfitting():
    falling, diverging = Overfitting(), Overfitting()
    for number in range(5):
        first = 1 + 20 * number
        falling.look(Measurements(first + 19, steps([1 - 0.1 * number] * 20, first)))
        assert falling.look(validation(first + 19, 1 - 0.1 * number)) in (FINE, UNKNOWN)
        diverging.look(Measurements(first + 19, steps([1.0 + number] * 20, first)))
        assert diverging.look(validation(first + 19, 1 + 0.1 * number)) in (FINE, UNKNOWN)


def test_two_validations_of_one_step_count_once():
    check, training = Overfitting(), Measurements(60, steps([1.0] * 60))
    assert last(check, training, validation(20, 0.8), *[validation(60, 0.9)] * 3) is UNKNOWN


def test_a_resumed_run_compares_with_the_best_step_of_earlier_processes():
    training = [Measurements(n, steps([0.5] * 20, n - 19)) for n in (120, 140)]
    best = (80, 0.7)
    found = problem(
        Overfitting(),
        training[0],
        validation(120, 0.8, best),
        training[1],
        validation(140, 0.82, best),
    )
    assert "overfits since step 80" in found.cause
    assert "from 0.7 to 0.82" in found.cause


def test_a_rise_must_be_clear_over_the_held_out_samples():
    def found(*rises):
        check, before = Overfitting(), [1.0, 0.5, 2.0, 0.7]
        after = [a + b for a, b in zip(before, rises, strict=True)]
        look(check, Measurements(20, steps([1.0] * 20)), validation(20, 1.05, single=before))
        values = sum(after) / 4
        return last(*[check, *(validation(n, values, single=after) for n in (40, 60))])

    assert found(0.5, -0.2, -0.1, 0.1) is FINE  # one sample has become worse
    assert isinstance(found(0.1, 0.08, 0.12, 0.05), Finding)


EXPECTED = {"t0.00-0.25": 0.14, "t0.25-0.50": 0.36, "t0.50-0.75": 0.36, "t0.75-1.00": 0.14}


def test_timesteps_from_other_ranges_are_reported_at_the_first_step():
    drawn = dict(zip(EXPECTED, (0.0, 0.025, 0.175, 0.8), strict=True))
    facts = RunFacts(
        1000,
        drawn_timesteps=drawn,
        expected_timesteps=EXPECTED,
        expected_shift="1.0",
        timestep_shift="12.0",
    )
    found = problem(TimestepShift(facts), Measurements(1, steps([1.0])))
    assert "2.5% of them are in 0.25-0.50, where its settings draw 36%" in found.cause
    assert "train.timestep_shift: 12.0 on purpose, there is nothing to do" in found.advice
    assert "Otherwise set it to 1.0" in found.advice


def test_expected_timesteps_are_fine():
    first = Measurements(1, steps([1.0]))
    facts = RunFacts(1000, drawn_timesteps=EXPECTED, expected_timesteps=EXPECTED)
    assert TimestepShift(facts).look(first) is FINE
    assert TimestepShift(facts).look(Measurements(0)) is UNKNOWN
    assert TimestepShift(RunFacts(1000)).look(first) is UNKNOWN


def test_samples_that_show_nothing_are_found():
    problems = tuple(SampleProblem(f"{number:03d}.png", "black") for number in range(3))
    found = problem(SamplesEmpty(FACTS), Measurements(40, samples=SamplesSeen(40, 4, problems)))
    assert "3 of 4 samples of step 40 are black" in found.cause
    found = problem(SamplesEmpty(FACTS), Measurements(0, samples=SamplesSeen(0, 4, problems)))
    assert "the VAE's output is broken" in found.cause
    assert SamplesEmpty(FACTS).look(Measurements(1, samples=SamplesSeen(1, 8, problems))) is FINE


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_slow_loader_is_found_at_the_second_look(in_memory):
    facts = RunFacts(1000, caches_in_memory=in_memory)
    check, slow = DataWaits(facts, 0.2), Measurements(50, times=times(data=0.5))
    assert check.look(slow) is FINE
    found = problem(check, slow)
    assert "the data loader is slow: steps wait 50% of their time" in found.cause
    assert ("num_workers" if in_memory else "vae_cache_type: memory") in found.advice
    assert check.look(Measurements(60, times=times(data=0.1))) is FINE


def test_waits_for_weights_are_found():
    slow = Measurements(50, times=times(weights=0.4))
    assert "plan.device_memory" in problem(WeightWaits(0.2), slow, slow).advice


def test_slower_steps_than_at_the_start_are_found_with_their_phase():
    early = Measurements(30, steps([1.0] * 30, seconds=0.5), times(30, 0.5, data=0.05))
    late = Measurements(60, steps([1.0] * 30, 31, seconds=1.5), times(60, 1.5, data=1.0))
    check = SlowDown(RunFacts(100), 1.5)
    assert check.look(early) is FINE
    found = problem(check, late)
    assert "3.0 times as long" in found.cause
    assert "mostly in data" in found.cause
    again = Measurements(90, steps([1.0] * 30, 61, seconds=0.5), times(90, 0.5))
    assert check.look(again) is FINE


def test_steps_of_earlier_processes_are_no_measure_of_speed():
    check = SlowDown(RunFacts(100, start_step=30), 1.5)
    look(check, Measurements(30, steps([1.0] * 30, seconds=0.1)))  # on another machine
    assert check.look(Measurements(60, steps([1.0] * 30, 31, seconds=0.5))) is FINE
    found = problem(check, Measurements(90, steps([1.0] * 30, 61, seconds=1.0)))
    assert "2.0 times as long as after the run was resumed" in found.cause


GPU = {"index": 1, "name": "H200", "sm_clock_mhz": 900, "max_sm_clock_mhz": 1980}


def test_heat_that_lowers_clocks_is_throttling():
    hot = sensors([GPU | {"temperature_c": 91, "throttle": ["hardware thermal slowdown"]}])
    measured = Measurements(50, sensors=hot)
    check = Throttling()
    assert check.look(measured) is FINE  # one reading may be a moment
    found = problem(check, measured)
    assert "GPU 1 (H200) is throttling" in found.cause
    assert "900 of 1980 MHz because of hardware thermal slowdown at 91 °C" in found.cause


@pytest.mark.parametrize("reasons", [[], ["software power cap"]])
def test_a_gpu_at_its_power_limit_is_fine(reasons):
    gpu = GPU | {"sm_clock_mhz": 1700, "throttle": reasons}
    measured = Measurements(50, sensors=sensors([gpu]))
    assert last(Throttling(), measured, measured, measured) is FINE


@pytest.mark.parametrize(
    ("free", "level"), [(100 * GIB, None), (3 * GIB, "notice"), (1.2 * GIB, "stopping")]
)
def test_disk_space_is_compared_with_the_size_of_a_checkpoint(free, level):
    facts = RunFacts(1000, checkpoint_nbytes=GIB)
    measured = Measurements(50, sensors=sensors(output_free=free, cache_free=100 * GIB))
    found = DiskSpace(facts, 1).look(measured)
    assert (found.level if isinstance(found, Finding) else None) == level


def test_files_that_are_read_again_and_waits_for_the_disk_are_thrashing():
    thrash = Measurements(50, sensors=sensors(refaults_per_s=20_000.0, pressure_io=40.0))
    assert "82 MB/s of files are read again" in problem(PageCache(FACTS), thrash, thrash).cause
    harmless = Measurements(50, sensors=sensors(refaults_per_s=20_000.0, pressure_io=0.0))
    assert last(PageCache(FACTS), harmless, harmless) is FINE


def memory_left(share, **host):
    values = {"memory_available": share * 100 * GIB, "memory_total": 100.0 * GIB} | host
    return Measurements(50, sensors=sensors(**values))


def test_host_memory_is_graded():
    check = HostMemory(FACTS)
    assert check.look(memory_left(0.5)) is FINE
    levels = [check.look(memory_left(share)).level for share in (0.08, 0.04, 0.03, 0.01)]
    assert levels == ["notice", "degraded", "degraded", "stopping"]
    assert check.look(memory_left(0.5)) is FINE
    assert check.look(memory_left(0.01)).level == "notice"  # one reading does not stop a run


def test_the_limit_of_a_cgroup_counts_like_host_memory():
    group = {"cgroup_used": 9.5 * GIB, "cgroup_limit": 10.0 * GIB}
    found = problem(HostMemory(FACTS), memory_left(0.9, **group))
    assert found.cause.startswith("the memory of the cgroup is almost full: 512.0 MiB of 10.0 GiB")
    assert "host_budget_gb" in found.advice


def test_retries_of_the_allocator_mean_that_the_device_is_full():
    def look(retries):
        return Measurements(50, memory=MemoryUsed(50, 1, 2, 20 * GIB), alloc_retries=retries)

    check = DeviceMemory()
    assert check.look(look(0)) is FINE
    assert check.look(look(2)).level == "notice"
    assert check.look(look(3)).level == "degraded"
    assert check.look(look(3)) is FINE
