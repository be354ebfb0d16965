"""Show made-up facts and samples to the checks of data, settings and samples."""

import math
from dataclasses import replace

import pytest
import torch

from gracetune.data.sample import Sample
from gracetune.events.types import DeviceSensors, StepDone, WeightsMoved
from gracetune.train.batch_size_ramp import AccumulationRamp
from gracetune.train.health_checks import (
    FINE,
    UNKNOWN,
    DatasetFacts,
    Finding,
    LearningRateHigh,
    Measurements,
    RunFacts,
    SampleProblem,
    SamplesSeen,
    WeightsStill,
)
from gracetune.train.health_data import (
    CaptionsUseless,
    CopiesInData,
    FewSamples,
    GradientsClipped,
    LatentsScale,
    RampLong,
    SamplesEmpty,
    SamplesSame,
    SkippedSteps,
    SmallBatches,
    TextEmbeddings,
    UnreadableFiles,
    ValidationPrompts,
    WarmupLong,
    dataset_facts,
    prompt_problem,
    ramp_end,
    text_problem,
)
from gracetune.train.health_machine import DeviceShared, HostMemory

GOOD = DatasetFacts("a", 40)
FACTS = RunFacts(total_steps=1000, lr=1e-4, datasets=[GOOD], batch_size=8, max_grad_norm=1.0)


def steps(losses, first=1, norm=0.5, samples=8):
    return [
        StepDone(first + index, loss, 1e-4, norm, samples, 1, 0, 0.1)
        for index, loss in enumerate(losses)
    ]


ONE = Measurements(1, steps([1.0]))


def sample(number, caption="a ring", digest=None):
    return Sample("a", f"{number}.png", caption, digest or str(number), 24, 24)


def cause(check, *measured):
    """Return the cause that the last of several looks finds."""
    for one in measured:
        found = check.look(one)
    assert isinstance(found, Finding), found
    assert found.advice
    return found.cause


@pytest.mark.parametrize(
    "check",
    [
        *(CaptionsUseless, FewSamples, CopiesInData, UnreadableFiles, SmallBatches, WarmupLong),
        *(RampLong, TextEmbeddings, ValidationPrompts),
    ],
)
def test_ordinary_data_and_settings_are_fine(check):
    assert check(FACTS).look(Measurements(1)) is UNKNOWN
    assert check(FACTS).look(ONE) is FINE


@pytest.mark.parametrize(
    ("check", "facts", "words"),
    [
        (CaptionsUseless, {"empty_captions": 21}, "21 of 40 captions of dataset 'a' are empty"),
        (CaptionsUseless, {"caption_dropout": 1.0}, "100% of its samples are trained without"),
        (CaptionsUseless, {"same_caption": "x"}, "all 40 captions of dataset 'a' are the same"),
        (FewSamples, {"samples": 4}, "trains 2,000 times on each of the 4 samples"),
        (CopiesInData, {"copies": 3, "copied": ("1", "2")}, "3 of 40 files of dataset 'a'"),
        (UnreadableFiles, {"unreadable": (("1.png", "truncated"),)}, "1.png (truncated)"),
    ],
)
def test_a_fault_of_the_data_is_named(check, facts, words):
    assert words in cause(check(replace(FACTS, datasets=[GOOD, replace(GOOD, **facts)])), ONE)


def test_facts_of_a_dataset_are_counted():
    samples = [sample(0), sample(1), sample(2, digest="0"), sample(3, digest="0")]
    found = dataset_facts("a", samples)
    assert (found.samples, found.copies, found.copied) == (4, 2, ("0.png", "2.png"))
    assert found.same_caption == "a ring"
    assert dataset_facts("a", samples, is_one_prompt=True).same_caption == ""
    assert dataset_facts("a", [sample(0), sample(1, " ")]).empty_captions == 1


def test_settings_that_do_not_fit_the_run_are_named():
    small = cause(SmallBatches(replace(FACTS, batch_fill=0.25)), ONE)
    assert "train.batch_size is 8, but batches have 2.0 samples" in small
    assert "warms up for 1000 steps" in cause(WarmupLong(replace(FACTS, warmup_steps=1000)), ONE)


def test_only_gradients_that_are_always_clipped_far_are_named():
    clipped = Measurements(60, steps([1.0] * 60, norm=30.0))
    assert "every step clips its gradients" in cause(GradientsClipped(FACTS), clipped)
    usual = Measurements(60, steps([1.0] * 60, norm=3.0))
    assert GradientsClipped(FACTS).look(usual) is FINE


def test_latents_of_a_wrong_scale_are_named():
    assert "vary by 5.5" in cause(LatentsScale(), Measurements(1, latent_spread={"a": 5.5}))
    assert LatentsScale().look(Measurements(1, latent_spread={"a": 1.3})) is FINE


@pytest.mark.parametrize("spread", [2.7, 0.1])
def test_latents_without_their_scale_or_scaled_twice_are_named(spread):
    looks = [Measurements(1, latent_spread={"a": spread})] * LatentsScale.LOOKS
    assert f"vary by {spread}" in cause(LatentsScale(), *looks)


def test_latents_of_a_flat_image_have_no_wrong_scale():
    check = LatentsScale()
    for spread in (0.1, 0.1, 0.1, 0.6) * 4:
        assert check.look(Measurements(1, latent_spread={"a": spread})) is FINE


def test_latents_that_are_not_finite_are_named():
    broken = Measurements(1, latent_spread={"b": 1.0, "a": math.nan})
    assert "latents of dataset 'a' are not finite" in cause(LatentsScale(), broken)


def test_a_ramp_that_is_longer_than_the_run_is_named():
    ramp = AccumulationRamp(8, 64, 1000, "linear", 8)
    end = ramp_end(ramp, 100)
    assert "ends with 24 samples per step instead of 64" in cause(
        RampLong(replace(FACTS, ramp=end)), ONE
    )
    assert RampLong(replace(FACTS, ramp=ramp_end(ramp, 5000))).look(ONE) is FINE


def test_many_skipped_steps_are_named():
    losses = [math.nan if number % 10 == 0 else 1.0 for number in range(100)]
    found = cause(SkippedSteps(), Measurements(100, steps(losses)))
    assert "10 of the last 100 steps were skipped" in found
    assert SkippedSteps().look(Measurements(100, steps([math.nan] * 3 + [1.0] * 97))) is FINE


def texts(*tensors):
    return {f"caption {n}": {"tokens": t, "mask": torch.ones(2)} for n, t in enumerate(tensors)}


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(3, 4), "zeros (tokens) for all captions"),
        (torch.full((3, 4), 0.5), "the same for 3 different captions"),
        (torch.full((3, 4), math.nan), "not finite (tokens)"),
    ],
)
def test_text_embeddings_that_do_not_depend_on_the_text_are_named(tensor, words):
    found = text_problem(texts(tensor, tensor, tensor))
    assert words in found
    assert "prompts have no effect" in cause(
        TextEmbeddings(replace(FACTS, text_problem=found)), ONE
    )


def test_text_embeddings_that_differ_are_fine():
    assert text_problem(texts(torch.zeros(3, 4), torch.ones(3, 4), torch.ones(3, 4))) == ""
    ones = {"tokens": torch.ones(2)}
    assert text_problem({"A cat": ones, "a cat": ones, "a  cat": ones}) == ""
    assert text_problem({}) == ""


@pytest.mark.parametrize(
    ("prompts", "captions", "words", "problem"),
    [
        (["a dog"], ["ohwx man"], ["ohwx"], "no validation prompt has the trigger word 'ohwx'"),
        (["a dog", "Ohwx on a hill"], ["ohwx man"], ["ohwx"], ""),
        (["a portrait of a knight"], ["screenshot of a chart"], [], "a word of any caption"),
        (["two circles"], ["the circle"], [], ""),
        (["the dog"], ["many dogs"], [], ""),
        (["the dog with the hat"], ["the cat with this bow"], [], "a word of any caption"),
        (["\u4e00\u53ea\u732b"], ["\u732b"], [], ""),  # words are not separated
        (["a knight"], ["", " "], [], ""),
        ([], ["a chart"], ["ohwx"], ""),
    ],
)
def test_prompts_that_have_nothing_to_do_with_the_captions_are_named(
    prompts, captions, words, problem
):
    found = prompt_problem(prompts, captions, words)
    assert problem in found
    assert bool(problem) == bool(found)
    check = ValidationPrompts(replace(FACTS, prompt_problem=found))
    assert isinstance(check.look(ONE), Finding) == bool(problem)


@pytest.mark.parametrize("losses", [[0.9, 40.0, 1e4, 1e5], [1.0, 4.5, 5.0, 5.5, 5.2]])
def test_a_loss_that_explodes_in_the_first_steps_is_a_high_learning_rate(losses):
    found = cause(LearningRateHigh(FACTS), Measurements(len(losses), steps(losses)))
    assert "the learning rate is too high" in found


@pytest.mark.parametrize("losses", [[0.01, 0.6, 1.4, 0.5, 0.9], [2.0, 1.9, 7.0, 1.8], [26.0] * 5])
def test_a_noisy_first_loss_is_not_an_explosion(losses):
    assert LearningRateHigh(FACTS).look(Measurements(len(losses), steps(losses))) is UNKNOWN


def test_an_adapter_that_hardly_moves_has_a_low_learning_rate():
    slow = Measurements(100, moved=WeightsMoved(100, "adapter", {"blocks.0": 5e-5}))
    assert "the learning rate is too low" in cause(WeightsStill(FACTS), slow)
    usual = Measurements(100, moved=WeightsMoved(100, "adapter", {"blocks.0": 5e-4}))
    assert WeightsStill(FACTS).look(usual) is FINE


def seen(step, *digests, prompts=("a", "b"), **values):
    return Measurements(step, samples=SamplesSeen(step, 2, (), prompts, digests, **values))


def test_samples_that_never_change_are_named():
    check = SamplesSame()
    assert check.look(seen(0, "x", "y")) is UNKNOWN
    assert "exactly those of step 0" in cause(check, seen(100, "x", "y"))
    assert check.look(seen(200, "z", "y")) is FINE


def test_samples_that_do_not_depend_on_prompts_are_named():
    assert "prompts have no effect" in cause(SamplesSame(), seen(0, "x", "x"))
    assert SamplesSame().look(seen(0, "x", "x", prompts=("a", "a"))) is UNKNOWN


def noise(step, count=2):
    problems = tuple(SampleProblem(f"{n}.png", "noise") for n in range(count))
    return Measurements(step, samples=SamplesSeen(step, 2, problems))


def test_noise_is_a_fault_of_a_base_model_and_after_better_samples():
    assert "are noise: the model, its VAE" in cause(SamplesEmpty(FACTS), noise(0))
    random = replace(FACTS, is_pretrained=False)
    assert SamplesEmpty(random).look(noise(0)) is UNKNOWN  # training has only begun
    resumed = SamplesEmpty(replace(FACTS, start_step=50))  # earlier samples are not known
    assert "training has destroyed the model, or its VAE" in cause(resumed, noise(100))
    found = cause(SamplesEmpty(random), noise(0, count=0), noise(100))
    assert "those of step 0 were not: training has destroyed the model" in found


def test_samples_that_could_not_be_generated_are_named():
    failed = Measurements(5, samples=SamplesSeen(5, 0, failed="CUDA out of memory."))
    assert "no samples of step 5 could be generated" in cause(SamplesEmpty(FACTS), failed)


def sensors(gpus=(), **host):
    return Measurements(50, sensors=DeviceSensors(50, tuple(gpus), host))


def test_another_process_on_the_gpu_is_named():
    gpu = {"index": 0, "rank": 0, "other_processes": 1, "other_memory": 30 * 2**30}
    busy = sensors([gpu])
    assert "another process computes on GPU 0, with 30.0 GiB" in cause(DeviceShared(), busy, busy)
    for fine in ([gpu | {"other_memory": 2**20}], [gpu, gpu | {"rank": 1}]):
        check = DeviceShared()
        check.look(sensors(fine))
        assert check.look(sensors(fine)) is FINE  # a monitor; two ranks of the run itself


def test_a_machine_that_swaps_is_named():
    host = {"memory_available": 50, "memory_total": 100}
    busy = sensors(**host, swapped_in_per_s=80e6)
    assert "the machine swaps: 80 MB/s" in cause(HostMemory(FACTS), busy, busy)
