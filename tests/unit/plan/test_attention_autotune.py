"""The attention backend is measured on the batches of a run, once, and reused."""

import json
from math import inf

import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from gracetune.events.run_control import RunControl
from gracetune.events.types import Notice
from gracetune.models.attention_backends import BackendTiming
from gracetune.plan.attention_autotune import (
    CHOICE_FILE,
    describe_choice,
    pick_attention,
    read_choice,
    record_calls,
)
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.prepare_model import attention_shapes_key, one_batch_per_bucket
from gracetune.train.run import SignalHandler

HERE = {"device": "a card", "torch": "2", "diffusers": "0"}


@pytest.fixture
def session(tiny_run, miniature, tmp_path, recorder):
    """A session in fp32 that trains one of the two experts of a model."""
    model = {"family": "wan22", "path": str(miniature("wan22-t2v"))}
    train = {"batch_size": 2, "experts": "low", "timestep_shift": 5.0}
    run = tiny_run(model=model, adapter={"rank": 2, "dropout": 0.5}, train=train)
    data = run.datasets[0].model_copy(update={"resolution": 32})
    run = run.model_copy(update={"datasets": (data,)})
    (tmp_path / "run").mkdir()
    built = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    yield built
    built.close()


def backends(trainee):
    experts = (trainee.family.transformer.high, trainee.family.transformer.low)
    return {str(p._attention_backend) for e in experts for p in e.attn_processors.values()}


def test_a_run_measures_once_and_reuses_its_choice(session, tmp_path, recorder):
    t = session.state
    batches = one_batch_per_bucket(t.run, session.pipeline)
    assert not [text for text in recorder.texts() if text.startswith("attention:")], (
        "a CPU is not asked"
    )
    asked = []

    def choose(calls, others):
        assert not others(), "there is one bucket"
        asked.append(calls)
        return "math", "attention: math, by decree"

    before = torch.get_rng_state()
    shared = tmp_path / "compiled" / "attention.json"
    for folder in (tmp_path, tmp_path, tmp_path / "another run"):
        files = [folder / CHOICE_FILE, shared]
        pick_attention(t.family, t.accelerator, batches, files, HERE, choose, recorder)
    assert torch.equal(torch.get_rng_state(), before), "dropout draws as if nothing had happened"
    assert backends(t) == {"AttentionBackendName._NATIVE_MATH"}
    ((own, cross),) = asked
    assert (own[0].query, own[0].key, own[1]) == ((2, 4, 2, 12), (2, 512, 2, 12), 2)
    assert (cross[0].query, cross[0].key, cross[1]) == ((2, 4, 2, 12), (2, 4, 2, 12), 2)
    assert recorder.texts()[-3:] == [
        "attention: math, by decree",
        "attention: math (chosen earlier in this run)",
        "attention: math (chosen earlier on this machine)",
    ]
    elsewhere = HERE | {"device": "another card"}
    pick_attention(
        t.family, t.accelerator, batches, [tmp_path / CHOICE_FILE], elsewhere, choose, recorder
    )
    assert len(asked) == 2
    assert json.loads((tmp_path / CHOICE_FILE).read_text()) == elsewhere | {"backend": "math"}


def test_a_full_device_falls_back_to_sdpa(session, tmp_path, recorder):
    def choose(calls, others):
        raise torch.OutOfMemoryError("full")

    t = session.state
    batches = one_batch_per_bucket(t.run, session.pipeline)
    pick_attention(
        t.family, t.accelerator, batches, [tmp_path / CHOICE_FILE], HERE, choose, recorder
    )
    assert backends(t) == {"AttentionBackendName.NATIVE"}
    (notice,) = [event for event in recorder.of(Notice) if event.text.startswith("attention:")]
    assert notice.fallback
    assert "no free device memory to measure" in notice.text
    assert not (tmp_path / CHOICE_FILE).exists(), "with room, it is measured"


def test_models_without_switchable_attention_are_not_measured(tiny_run, tmp_path, recorder):
    run = tiny_run()
    (tmp_path / "run").mkdir()
    built = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )

    def choose(calls, others):
        raise AssertionError("asked for a model that cannot be switched")

    t = built.state
    pick_attention(t.family, t.accelerator, [], [tmp_path / CHOICE_FILE], HERE, choose, recorder)
    assert not (tmp_path / CHOICE_FILE).exists()
    built.close()


def test_calls_of_a_single_transformer_are_recorded(tiny_run, tmp_path, recorder):
    run = tiny_run()
    (tmp_path / "run").mkdir()
    session = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    t = session.state
    batches = one_batch_per_bucket(t.run, session.pipeline)
    calls, _ = record_calls(t.family, t.accelerator, batches)
    assert all(count > 0 and one.query[0] == 4 for one, count in calls)
    assert isinstance(session.state.accelerator, Accelerator)


def test_a_choice_of_another_environment_is_ignored(tmp_path):
    kept = tmp_path / CHOICE_FILE
    assert read_choice(kept, HERE) == ""
    kept.write_text(json.dumps(HERE | {"backend": "cudnn"}))
    assert read_choice(kept, HERE) == "cudnn"
    assert read_choice(kept, HERE | {"torch": "3"}) == ""


@pytest.mark.parametrize("name", ["flash_attn_2", "of tomorrow", None])
def test_a_choice_that_is_no_longer_available_is_ignored(tmp_path, name):
    kept = tmp_path / CHOICE_FILE
    kept.write_text(json.dumps(HERE | {"backend": name}))
    assert read_choice(kept, HERE) == ""
    kept.write_text("torn")
    assert read_choice(kept, HERE) == ""


def test_the_notice_names_the_fastest_backend_and_every_time():
    timings = [
        BackendTiming("cudnn", 0.0012),
        BackendTiming("sdpa", 0.0015),
        BackendTiming("flash_attn_2", inf, "not installed"),
    ]
    assert describe_choice(timings) == (
        "attention: cudnn (fastest of 2: cudnn 1.20 ms, sdpa 1.50 ms); left out: flash_attn_2 (not "
        "installed)"
    )
    assert describe_choice(timings[1:2]).endswith("sdpa 1.50 ms)")


@pytest.fixture
def two_buckets(tiny_run, miniature, tmp_path, recorder):
    """A session with a bucket of square images and one of larger, wide images."""
    for name, size in (("square", (32, 32)), ("wide", (64, 32))):
        (tmp_path / name).mkdir()
        Image.new("RGB", size).save(tmp_path / name / "one.png")
    datasets = [
        {
            "id": name,
            "instance_data_dir": str(tmp_path / name),
            "caption_strategy": "filename",
            "resolution": resolution,
            "max_aspect": 2.0,
        }
        for name, resolution in (("square", 32), ("wide", 45))
    ]
    model = {"family": "flux", "path": str(miniature("flux"))}
    run = tiny_run(model=model, adapter={"rank": 2}, train={"batch_size": 2}, datasets=datasets)
    (tmp_path / "run").mkdir()
    built = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    yield built
    built.close()


def test_every_bucket_is_recorded_before_a_backend_is_chosen(two_buckets, tmp_path, recorder):
    t, feed = two_buckets.state, two_buckets.pipeline
    sizes = [draw.size for draw in feed.order.one_draw_per_size()]
    assert sizes == [(64, 32), (32, 32)]
    seen = []

    def choose(calls, others):
        seen.extend([[asked.query for asked, _ in calls], [asked.query for asked in others()]])
        assert others() is others(), "passes are made once"
        return "sdpa", "attention: sdpa"

    batches = one_batch_per_bucket(t.run, feed)
    pick_attention(
        t.family, t.accelerator, batches, [tmp_path / CHOICE_FILE], HERE, choose, recorder
    )
    largest, others = seen
    assert {query[0] for query in largest + others} == {2}, "full batches"
    assert len(largest) == len(others) > 0
    assert max(query[1] for query in others) < max(query[1] for query in largest)
    precision = t.accelerator.mixed_precision
    assert (
        attention_shapes_key(t.run, t.family, feed, precision)
        == f"flux in no, 2 of each of {sizes}"
    )


def test_buckets_of_held_out_samples_are_recorded_too(two_buckets):
    t, feed = two_buckets.state, two_buckets.pipeline
    largest, other = (feed.load((draw,)) for draw in feed.order.one_draw_per_size())
    loads = one_batch_per_bucket(t.run, feed, [other, largest, other])
    assert len(loads) == 2 + 2
    assert [load() for load in loads[2:]] == [other, largest]
