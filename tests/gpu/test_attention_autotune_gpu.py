"""Attention backends that cannot do every call of a model are not chosen."""

from math import isfinite

import pytest
import torch

from gracetune.models.attention_backends import (
    AttentionCall,
    BackendTiming,
    choose_backend,
    drop_incapable_backends,
    stopwatch_for,
    time_attention,
    why_unusable,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def attention_call(tokens=1024, mask=None):
    shape = (2, tokens, 8, 128)
    return AttentionCall(shape, shape, torch.bfloat16, mask=mask, scale=None, causal=False)


def masked_call(tokens=1024):
    mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool, device=DEVICE)
    mask[1, ..., tokens // 2 :] = False
    return attention_call(tokens, mask)


def usable_backends(name, others):
    timings = [BackendTiming(name, 0.5), BackendTiming("sdpa", 1.0)]
    return drop_incapable_backends(timings, lambda: others, DEVICE, stopwatch_for(DEVICE))


def test_flash_is_dropped_if_a_call_has_a_mask():
    (flash, _) = usable_backends("flash", [attention_call(640), masked_call()])
    assert not isfinite(flash.seconds)
    assert flash.reason.endswith("for 1024 queries on 1024 keys in 8 heads of 128, masked"), flash


@pytest.mark.parametrize(
    ("name", "others"), [("flash", attention_call), ("efficient", masked_call)]
)
def test_a_backend_that_can_do_all_lengths_is_kept(name, others):
    (timing, _) = usable_backends(name, [others(tokens) for tokens in (64, 640, 1000, 1024)])
    assert timing == BackendTiming(name, 0.5)


def test_the_chosen_backend_can_do_every_call():
    stopwatch, others = (
        stopwatch_for(DEVICE),
        [attention_call(1000), masked_call(), masked_call(333)],
    )
    timings = time_attention([(attention_call(4096), 40)], DEVICE, stopwatch)
    name = choose_backend(drop_incapable_backends(timings, lambda: others, DEVICE, stopwatch))
    assert name != "flash", timings
    assert [why_unusable(name, call, DEVICE, stopwatch) for call in others] == [""] * 3, timings
