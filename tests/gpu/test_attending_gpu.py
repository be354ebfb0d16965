"""A backend that is fast for one call is not forced on another: by real kernels."""

from math import isfinite

import pytest
import torch

from gracetune.models.attention_backends import (
    AttentionCall,
    BackendTiming,
    fastest,
    why_unusable,
    stopwatch_for,
    time_attention,
    drop_incapable_backends,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def asked(tokens=1024, mask=None):
    shape = (2, tokens, 8, 128)
    return AttentionCall(shape, shape, torch.bfloat16, mask=mask, scale=None, causal=False)


def masked(tokens=1024):
    mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool, device=DEVICE)
    mask[1, ..., tokens // 2 :] = False
    return asked(tokens, mask)


def left(name, others):
    timings = [BackendTiming(name, 0.5), BackendTiming("sdpa", 1.0)]
    return drop_incapable_backends(timings, lambda: others, DEVICE, stopwatch_for(DEVICE))


def test_flash_is_left_out_where_a_mask_is_asked_for():
    (flash, _) = left("flash", [asked(640), masked()])
    assert not isfinite(flash.seconds)
    assert flash.reason.endswith("for 1024 queries on 1024 keys in 8 heads of 128, masked"), flash


@pytest.mark.parametrize(("name", "others"), [("flash", asked), ("efficient", masked)])
def test_who_can_do_all_lengths_stays(name, others):
    (one, _) = left(name, [others(tokens) for tokens in (64, 640, 1000, 1024)])
    assert one == BackendTiming(name, 0.5)


def test_what_is_chosen_in_the_end_does_every_call():
    stopwatch, others = stopwatch_for(DEVICE), [asked(1000), masked(), masked(333)]
    timings = time_attention([(asked(4096), 40)], DEVICE, stopwatch)
    name = fastest(drop_incapable_backends(timings, lambda: others, DEVICE, stopwatch))
    assert name != "flash", timings
    assert [why_unusable(name, call, DEVICE, stopwatch) for call in others] == [""] * 3, timings
