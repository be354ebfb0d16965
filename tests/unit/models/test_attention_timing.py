"""The fastest backend that gives the right numbers, by calls that a model really makes."""

import time
from dataclasses import replace
from math import inf, isfinite

import pytest
import torch
from diffusers import WanTransformer3DModel

from gracetune.models import attention_backends
from gracetune.models.attention_backends import (
    BASELINE,
    CANDIDATES,
    AttentionCall,
    BackendTiming,
    BackendTrial,
    AttentionRecorder,
    fastest,
    stopwatch_for,
    time_attention,
    drop_incapable_backends,
)

CPU = torch.device("cpu")
SMALL = (1, 12, 2, 8)


def asked(query=SMALL, key=SMALL, **different):
    settings = {"dtype": torch.float32, "mask": None, "scale": None, "causal": False}
    return AttentionCall(query, key, **(settings | different))


def test_a_pass_tells_what_attention_it_asks_for():
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
    watching = AttentionRecorder()
    with torch.no_grad(), watching:
        model(torch.zeros(2, 4, 1, 8, 8), torch.tensor([1, 1]), torch.zeros(2, 5, 8))
    own, cross = watching.heaviest_calls()
    assert (own[0].query, own[0].key, own[1]) == ((2, 16, 2, 12), (2, 16, 2, 12), 3)
    assert (cross[0].query, cross[0].key, cross[1]) == ((2, 16, 2, 12), (2, 5, 2, 12), 3)
    assert str(cross[0]) == "16 queries on 5 keys in 2 heads of 12"
    assert {one.dtype for one, _ in watching.heaviest_calls()} == {torch.float32}


def test_under_autocast_attention_is_asked_for_in_its_type():
    q, mask = torch.zeros(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    watching = AttentionRecorder()
    with torch.autocast("cpu", torch.bfloat16), watching:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, mask, scale=0.5)
    ((one, count),) = watching.heaviest_calls()
    assert (one.dtype, one.scale, count) == (torch.bfloat16, 0.5, 1)
    assert one.mask is mask
    assert str(one).endswith("masked")


def test_what_is_installed_and_right_is_timed_and_the_rest_has_a_reason():
    began = time.monotonic()
    timings = time_attention([(asked(), 3)], CPU, stopwatch_for(CPU))
    assert time.monotonic() - began < 10
    by_name = {timing.name: timing for timing in timings}
    assert set(by_name) == set(CANDIDATES)
    assert 0 < by_name[BASELINE].seconds < 1
    assert by_name["flash_attn_2"] == BackendTiming("flash_attn_2", inf, "not installed")
    assert not isfinite(by_name["cudnn"].seconds), "a CPU has none"
    assert by_name["cudnn"].reason
    assert [timing.seconds for timing in timings] == sorted(timing.seconds for timing in timings)


def test_calls_are_weighed_by_how_often_they_are_made():
    """A stopwatch that gives each call a second."""
    long = asked(key=(1, 24, 2, 8))
    timings = time_attention([(asked(), 3), (long, 4)], CPU, lambda work, repeats: 1.0)
    assert next(timing for timing in timings if timing.name == BASELINE).seconds == 7.0


def test_another_is_taken_only_where_it_is_clearly_faster():
    def chosen(**seconds):
        return fastest([BackendTiming(name, value) for name, value in seconds.items()])

    assert chosen(cudnn=0.98, sdpa=1.0, flash=2.0) == "sdpa"
    assert chosen(cudnn=0.9, sdpa=1.0, flash=0.95) == "cudnn"
    assert chosen(sdpa=1.0, flash=inf) == "sdpa"
    assert chosen(sdpa=inf, flash=1.0) == "sdpa", "with nothing to compare it with"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda q, k, v, **_: q + k + v, "results differ from sdpa"),
        (lambda q, k, v, **_: q.detach() + 0, "does not require grad"),
        (lambda q, k, v, **_: (q + k + v) * float("nan"), "results differ from sdpa"),
        (lambda q, k, v, **_: q.no_such(), None),
    ],
)
def test_other_numbers_and_a_missing_backward_are_seen(monkeypatch, broken, reason):
    trial = BackendTrial(asked(), CPU, stopwatch_for(CPU), 1.0)
    assert trial.time_backend(attention_backends.find_backend(BASELINE))[1] == ""
    monkeypatch.setattr(attention_backends, "dispatch_attention_fn", broken)
    if reason is None:
        with pytest.raises(AttributeError):  # a fault of ours is not a reason
            trial.time_backend(attention_backends.find_backend(BASELINE))
    else:
        assert reason in trial.time_backend(attention_backends.find_backend(BASELINE))[1]


def test_a_slow_backend_is_repeated_less():
    counts = []

    def stopwatch(work, repeats):
        counts.append(repeats)
        return 0.4

    BackendTrial(asked(), CPU, stopwatch, 1.0).time_backend(attention_backends.find_backend(BASELINE))
    assert counts == [1, 2]
    counts.clear()
    BackendTrial(asked(), CPU, stopwatch, 0.1).time_backend(attention_backends.find_backend(BASELINE))
    assert counts == [1]


def test_long_sequences_are_timed_with_fewer_heads_and_count_in_full(monkeypatch):
    monkeypatch.setattr(attention_backends, "MAX_QUERY_NUMEL", 1 * 12 * 8)
    trial = BackendTrial(asked(query=(1, 12, 4, 8), key=(1, 12, 4, 8)), CPU, lambda *_: 1.0, 1.0)
    assert trial._qkv[0].shape == (1, 12, 1, 8)
    assert trial.time_backend(attention_backends.find_backend(BASELINE)) == (4.0, "")
    mask = torch.ones(1, 4, 12, 12, dtype=torch.bool)
    whole = BackendTrial(asked(query=(1, 12, 4, 8), key=(1, 12, 4, 8), mask=mask), CPU, lambda *_: 1.0, 1)
    assert whole._qkv[0].shape == (1, 12, 4, 8)
    assert whole.time_backend(attention_backends.find_backend(BASELINE)) == (1.0, "")


def test_heads_may_share_keys():
    trial = BackendTrial(asked(query=(1, 12, 4, 8), key=(1, 12, 2, 8)), CPU, stopwatch_for(CPU), 1.0)
    assert trial._qkv[1].shape == (1, 12, 2, 8)
    assert trial.time_backend(attention_backends.find_backend(BASELINE))[1] == ""


LONG = (1, 24, 2, 8)
TIMED = [BackendTiming("efficient", 0.5), BackendTiming("math", 0.6), BackendTiming(BASELINE, 1.0)]


def only_short(monkeypatch, weak):
    """Backends that fail for more tokens than there were when they were timed."""
    real = attention_backends.dispatch_attention_fn
    named = {attention_backends.find_backend(name) for name in weak}

    def call(query, *rest, backend, **given):
        if backend in named and query.shape[1] > SMALL[1]:
            raise RuntimeError("No available kernel.\nAborting.")
        return real(query, *rest, backend=attention_backends.find_backend(BASELINE), **given)

    monkeypatch.setattr(attention_backends, "dispatch_attention_fn", call)


def refused(others):
    return drop_incapable_backends(TIMED, others, CPU, stopwatch_for(CPU))


def test_who_is_fastest_must_do_all_that_was_not_timed(monkeypatch):
    only_short(monkeypatch, ["efficient"])
    assert refused(lambda: [asked()]) == TIMED
    left = refused(lambda: [asked(), asked(query=LONG)])
    reason = "No available kernel., for 24 queries on 12 keys in 2 heads of 8"
    assert left == [replace(TIMED[0], seconds=inf, reason=reason), *TIMED[1:]]
    assert fastest(left) == "math", "who was timed next does it"


def test_where_all_others_refuse_torch_chooses(monkeypatch):
    only_short(monkeypatch, ["efficient", "math"])
    assert fastest(refused(lambda: [asked(query=LONG)])) == BASELINE


def test_nobody_looks_for_other_calls_where_torch_chooses_anyway():
    def others():
        raise AssertionError("asked in vain")

    slow = [BackendTiming(BASELINE, 1.0), BackendTiming("math", 2.0)]
    assert drop_incapable_backends(slow, others, CPU, stopwatch_for(CPU)) == slow


def test_calls_that_were_not_timed_are_all_the_others():
    q, watching = torch.zeros(1, 2, 5, 8), AttentionRecorder()
    with watching:
        for length in range(1, 6):
            torch.nn.functional.scaled_dot_product_attention(q[:, :, :length], q, q)
    calls = watching.heaviest_calls()
    assert [one.query[1] for one, _ in calls] == [5, 4, 3]
    assert [one.query[1] for one in watching.other_calls(calls)] == [1, 2]


def test_no_room_for_a_call_is_no_reason_to_leave_it_out(monkeypatch):
    """Whoever is chosen would do that call untried."""

    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "randn", full)
    with pytest.raises(torch.OutOfMemoryError):
        time_attention([(asked(), 3)], CPU, stopwatch_for(CPU))
