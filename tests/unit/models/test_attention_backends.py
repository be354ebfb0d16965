"""Attention backends: setting one by name, and finding the fastest by measuring."""

from dataclasses import replace
from math import inf, isfinite

import pytest
import torch
from diffusers import WanTransformer3DModel

from gracetune.config.schema import ModelSection
from gracetune.errors import ConfigError
from gracetune.models import attention_backends
from gracetune.models.attention_backends import (
    BASELINE,
    CANDIDATES,
    AttentionCall,
    AttentionRecorder,
    BackendTiming,
    BackendTrial,
    choose_backend,
    drop_incapable_backends,
    find_backend,
    set_attention_backend,
    stopwatch_for,
    time_attention,
)
from gracetune.models.tiny import load

CPU = torch.device("cpu")
SMALL = (1, 12, 2, 8)


def call_of(query=SMALL, key=SMALL, **changes):
    """An attention call with small shapes, in fp32 and without a mask."""
    settings = {"dtype": torch.float32, "mask": None, "scale": None, "causal": False}
    return AttentionCall(query, key, **(settings | changes))


def test_the_recorder_finds_the_calls_of_a_pass():
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=3,
        ffn_dim=16,
        text_dim=8,
        freq_dim=8,
        in_channels=4,
        out_channels=4,
    )
    recorder = AttentionRecorder()
    with torch.no_grad(), recorder:
        model(torch.zeros(2, 4, 1, 8, 8), torch.tensor([1, 1]), torch.zeros(2, 5, 8))
    self_attention, cross = recorder.heaviest_calls()
    assert (self_attention[0].query, self_attention[0].key, self_attention[1]) == (
        (2, 16, 2, 12),
        (2, 16, 2, 12),
        3,
    )
    assert (cross[0].query, cross[0].key, cross[1]) == ((2, 16, 2, 12), (2, 5, 2, 12), 3)
    assert str(cross[0]) == "16 queries on 5 keys in 2 heads of 12"
    assert {call.dtype for call, _ in recorder.heaviest_calls()} == {torch.float32}


def test_the_recorder_uses_the_autocast_type():
    q, mask = torch.zeros(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    recorder = AttentionRecorder()
    with torch.autocast("cpu", torch.bfloat16), recorder:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, mask, scale=0.5)
    ((one, count),) = recorder.heaviest_calls()
    assert (one.dtype, one.scale, count) == (torch.bfloat16, 0.5, 1)
    assert one.mask is mask
    assert str(one).endswith("masked")


def test_every_candidate_has_a_time_or_a_reason():
    timings = time_attention([(call_of(), 3)], CPU, stopwatch_for(CPU))
    by_name = {timing.name: timing for timing in timings}
    assert set(by_name) == set(CANDIDATES)
    assert 0 < by_name[BASELINE].seconds < inf
    assert by_name["flash_attn_2"] == BackendTiming("flash_attn_2", inf, "not installed")
    assert not isfinite(by_name["cudnn"].seconds), "cuDNN needs a GPU"
    assert by_name["cudnn"].reason
    assert [timing.seconds for timing in timings] == sorted(timing.seconds for timing in timings)


def test_times_are_weighted_by_the_number_of_calls():
    long = call_of(key=(1, 24, 2, 8))
    one_second = lambda work, repeats: 1.0  # noqa: E731
    timings = time_attention([(call_of(), 3), (long, 4)], CPU, one_second)
    assert next(timing for timing in timings if timing.name == BASELINE).seconds == 7.0


def test_another_backend_is_chosen_only_if_it_is_clearly_faster():
    def chosen(**seconds):
        return choose_backend([BackendTiming(name, value) for name, value in seconds.items()])

    assert chosen(cudnn=0.98, sdpa=1.0, flash=2.0) == "sdpa"
    assert chosen(cudnn=0.9, sdpa=1.0, flash=0.95) == "cudnn"
    assert chosen(sdpa=1.0, flash=inf) == "sdpa"
    assert chosen(sdpa=inf, flash=1.0) == "sdpa", "there is nothing to compare with"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda q, k, v, **_: q + k + v, "results differ from sdpa"),
        (lambda q, k, v, **_: q.detach() + 0, "does not require grad"),
        (lambda q, k, v, **_: (q + k + v) * float("nan"), "results differ from sdpa"),
        (lambda q, k, v, **_: q.no_such(), None),
    ],
)
def test_wrong_results_and_a_missing_backward_are_detected(monkeypatch, broken, reason):
    trial = BackendTrial(call_of(), CPU, stopwatch_for(CPU), 1.0)
    assert trial.time_backend(find_backend(BASELINE))[1] == ""
    monkeypatch.setattr(attention_backends, "dispatch_attention_fn", broken)
    if reason is None:
        with pytest.raises(AttributeError):  # our own mistakes are not hidden
            trial.time_backend(find_backend(BASELINE))
    else:
        assert reason in trial.time_backend(find_backend(BASELINE))[1]


def test_a_slow_backend_is_repeated_less_often():
    counts = []

    def stopwatch(work, repeats):
        counts.append(repeats)
        return 0.4

    BackendTrial(call_of(), CPU, stopwatch, 1.0).time_backend(find_backend(BASELINE))
    assert counts == [1, 2]
    counts.clear()
    BackendTrial(call_of(), CPU, stopwatch, 0.1).time_backend(find_backend(BASELINE))
    assert counts == [1]


def test_long_sequences_are_timed_with_fewer_heads_and_scaled_up(monkeypatch):
    monkeypatch.setattr(attention_backends, "MAX_QUERY_NUMEL", 1 * 12 * 8)
    trial = BackendTrial(call_of(query=(1, 12, 4, 8), key=(1, 12, 4, 8)), CPU, lambda *_: 1.0, 1.0)
    assert trial._qkv[0].shape == (1, 12, 1, 8)
    assert trial.time_backend(find_backend(BASELINE)) == (4.0, "")
    mask = torch.ones(1, 4, 12, 12, dtype=torch.bool)
    whole = BackendTrial(
        call_of(query=(1, 12, 4, 8), key=(1, 12, 4, 8), mask=mask), CPU, lambda *_: 1.0, 1
    )
    assert whole._qkv[0].shape == (1, 12, 4, 8)
    assert whole.time_backend(find_backend(BASELINE)) == (1.0, "")


def test_grouped_query_attention_is_timed():
    trial = BackendTrial(
        call_of(query=(1, 12, 4, 8), key=(1, 12, 2, 8)), CPU, stopwatch_for(CPU), 1.0
    )
    assert trial._qkv[1].shape == (1, 12, 2, 8)
    assert trial.time_backend(find_backend(BASELINE))[1] == ""


LONG = (1, 24, 2, 8)
TIMED = [BackendTiming("efficient", 0.5), BackendTiming("math", 0.6), BackendTiming(BASELINE, 1.0)]


def fail_on_long_sequences(monkeypatch, names):
    """Make some backends fail for more tokens than were timed."""
    real = attention_backends.dispatch_attention_fn
    failing = {find_backend(name) for name in names}

    def dispatch(query, *rest, backend, **options):
        if backend in failing and query.shape[1] > SMALL[1]:
            raise RuntimeError("No available kernel.\nAborting.")
        return real(query, *rest, backend=find_backend(BASELINE), **options)

    monkeypatch.setattr(attention_backends, "dispatch_attention_fn", dispatch)


def drop_incapable(other_calls):
    return drop_incapable_backends(TIMED, other_calls, CPU, stopwatch_for(CPU))


def test_the_fastest_backend_must_support_all_other_calls(monkeypatch):
    fail_on_long_sequences(monkeypatch, ["efficient"])
    assert drop_incapable(lambda: [call_of()]) == TIMED
    left = drop_incapable(lambda: [call_of(), call_of(query=LONG)])
    reason = "No available kernel., for 24 queries on 12 keys in 2 heads of 8"
    assert left == [replace(TIMED[0], seconds=inf, reason=reason), *TIMED[1:]]
    assert choose_backend(left) == "math", "the next fastest supports them"


def test_the_baseline_is_used_if_all_others_fail(monkeypatch):
    fail_on_long_sequences(monkeypatch, ["efficient", "math"])
    assert choose_backend(drop_incapable(lambda: [call_of(query=LONG)])) == BASELINE


def test_other_calls_are_not_searched_if_the_baseline_is_fastest():
    def other_calls():
        raise AssertionError("not needed")

    slow = [BackendTiming(BASELINE, 1.0), BackendTiming("math", 2.0)]
    assert drop_incapable_backends(slow, other_calls, CPU, stopwatch_for(CPU)) == slow


def test_other_calls_are_those_that_were_not_timed():
    q, recorder = torch.zeros(1, 2, 5, 8), AttentionRecorder()
    with recorder:
        for length in range(1, 6):
            torch.nn.functional.scaled_dot_product_attention(q[:, :, :length], q, q)
    calls = recorder.heaviest_calls()
    assert [call.query[1] for call, _ in calls] == [5, 4, 3]
    assert [call.query[1] for call in recorder.other_calls(calls)] == [1, 2]


def test_out_of_memory_for_the_inputs_is_an_error(monkeypatch):
    """Otherwise a backend would be chosen that never ran this call."""

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "randn", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        time_attention([(call_of(), 3)], CPU, stopwatch_for(CPU))


@pytest.fixture
def wan():
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        ffn_dim=16,
        text_dim=8,
        freq_dim=8,
        in_channels=4,
        out_channels=4,
    )


def backends(model):
    return {str(p._attention_backend) for p in model.attn_processors.values()}


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_auto_and_sdpa_change_nothing(wan, recorder, name):
    before = backends(wan)
    set_attention_backend([wan], name, recorder)
    assert backends(wan) == before


def test_an_available_backend_is_set(wan, recorder):
    set_attention_backend([wan], "math", recorder)
    assert backends(wan) == {"AttentionBackendName._NATIVE_MATH"}
    assert not recorder.events


@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_2", "sage", "xformers"])
def test_a_backend_that_is_not_installed_falls_back_by_name(wan, recorder, name):
    before = backends(wan)
    set_attention_backend([wan, wan], name, recorder)
    assert backends(wan) == before
    (notice,) = recorder.events
    assert notice.fallback
    assert f"{name!r}, but it cannot be used here: " in notice.text
    assert notice.text.endswith(". sdpa is used instead")


def test_an_unknown_name_is_refused_with_the_known_ones(wan, recorder):
    with pytest.raises(ConfigError, match="flash_attn_3"):
        set_attention_backend([wan], "flash-attention", recorder)


def test_a_model_that_would_ignore_the_backend_falls_back_by_name(recorder):
    transformer = load(ModelSection()).transformer
    set_attention_backend([transformer], "cudnn", recorder)
    (text,) = recorder.texts()
    assert text == (
        "model.attention_mechanism is 'cudnn', but SD3Transformer2DModel does not use diffusers' "
        "attention dispatcher. sdpa is used instead"
    )
