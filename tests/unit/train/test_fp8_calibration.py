"""The pass that shows frozen layers their inputs, on the CPU: fp8 is computed by hand there."""

from dataclasses import replace

import pytest
import torch

from gracetune.adapters.compute import fp8_linear
from gracetune.adapters.compute.fp8_linear import Fp8Linear
from gracetune.adapters.compute.outlier_subspace import num_dimensions
from gracetune.data.loader import BatchOrder
from gracetune.events.run_control import RunControl
from gracetune.events.types import Notice
from gracetune.train import fp8_calibration
from gracetune.train.build import build_session, start_accelerator
from gracetune.train.fp8_calibration import (
    calibration_batch_size,
    convert_frozen_layers,
    first_draws,
)
from gracetune.train.run import SignalHandler

CPU = torch.device("cpu")


@pytest.fixture
def session(tiny_run, tmp_path, recorder):
    """The demo's model with an adapter and dropout, not yet planned for."""
    run = tiny_run(adapter={"rank": 2, "dropout": 0.5}, plan="off")
    built = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    yield built
    built.close()


@pytest.fixture
def two_experts(tiny_run, miniature, tmp_path, recorder):
    model = {"family": "wan22", "path": str(miniature("wan22-t2v"))}
    run = tiny_run(model=model, adapter={"rank": 2}, train={"batch_size": 2}, plan="off")
    data = run.datasets[0].model_copy(update={"resolution": 32})
    run = run.model_copy(update={"datasets": (data,)})
    built = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    yield built
    built.close()


def in_fp8(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}


def frozen_of(session, recorder):
    t = session.state
    convert_frozen_layers(t.run, t.family, session.pipeline, CPU, recorder)
    return in_fp8(t.family.transformer)


def test_every_layer_of_the_blocks_is_shown_its_input(session, recorder):
    before = torch.get_rng_state()
    layers = frozen_of(session, recorder)
    assert torch.equal(torch.get_rng_state(), before), "dropout draws as if nothing had happened"
    assert len(layers) == 53
    for name, layer in layers.items():
        assert layer.outlier_basis.shape == (
            num_dimensions(layer.in_features),
            layer.in_features,
        ), name
    attention = layers["transformer_blocks.0.attn.to_q.base_layer"]
    assert (
        attention.outlier_basis is layers["transformer_blocks.0.attn.to_k.base_layer"].outlier_basis
    )
    assert recorder.texts()[-1] == (
        "fp8: 53 frozen layers converted, 53 of them calibrated with 64 samples"
    )
    assert not [event for event in recorder.of(Notice) if event.fallback]


def test_a_resumed_run_finds_the_same_directions(session, tiny_run, tmp_path, recorder):
    """Wherever its loader stands by then."""
    first = {name: layer.outlier_basis for name, layer in frozen_of(session, recorder).items()}
    run = session.state.run
    again = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    again.pipeline.order.batch_at(again.pipeline.order.epoch_length * 3)
    second = frozen_of(again, recorder)
    again.close()
    assert first.keys() == second.keys()
    assert all(torch.equal(along, second[name].outlier_basis) for name, along in first.items())


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # norms stay in fp32 under autocast
def test_both_experts_are_shown_levels_of_their_own(two_experts, recorder, monkeypatch):
    monkeypatch.setattr(
        fp8_linear, "FP8_ALIGNMENT", 8
    )  # a miniature's sides; no kernel is asked here
    t = two_experts.state
    asked = {}
    predict = type(t.family).predict

    def watch(family, transformer, noisy, levels, conditions):
        asked[transformer.keywords["expert"]] = levels
        return predict(family, transformer, noisy, levels, conditions)

    monkeypatch.setattr(type(t.family), "predict", watch)
    layers = frozen_of(two_experts, recorder)
    assert asked["high"].min() >= t.family.boundary > asked["low"].max()
    assert {name.partition(".")[0] for name in layers} == {"high", "low"}
    assert all(layer.outlier_basis is not None for layer in layers.values())


def test_layers_that_are_shown_nothing_are_told_as_a_fallback(session, recorder, monkeypatch):
    monkeypatch.setattr(fp8_calibration, "forward_once", lambda *_: None)
    layers = frozen_of(session, recorder)
    assert all(layer.outlier_basis is None for layer in layers.values())
    (notice,) = [event for event in recorder.of(Notice) if event.fallback]
    assert notice.text.startswith("fp8: 53 layers were not calibrated")


def test_samples_that_are_shown_are_few(session, monkeypatch):
    t = session.state
    assert calibration_batch_size(t.family, session.pipeline) == 64
    monkeypatch.setattr(fp8_calibration, "MAX_TOKENS", 100)  # 36 a sample
    assert calibration_batch_size(t.family, session.pipeline) == 2
    monkeypatch.setattr(fp8_calibration, "MAX_TOKENS", 1)
    assert calibration_batch_size(t.family, session.pipeline) == 1


@pytest.mark.parametrize(("most", "known"), [(1, 53), (0, 14)])
def test_a_device_without_room_is_shown_one_sample_or_goes_without(
    session, recorder, monkeypatch, most, known
):
    """The pass ends before the second block, whose layers had begun to look."""
    block, original = session.state.family.blocks()[1], fp8_calibration.forward_once
    moves = []
    session.state.family.blocks()[0].to = moves.append

    def show(run, family, batch, expert, device):
        def fill_up(*_):
            if len(batch) > most:
                raise torch.OutOfMemoryError

        handle = block.attn.register_forward_pre_hook(fill_up)
        try:
            original(run, family, batch, expert, device)
        finally:
            handle.remove()

    monkeypatch.setattr(fp8_calibration, "forward_once", show)
    layers = frozen_of(session, recorder)
    assert sum(layer.outlier_basis is not None for layer in layers.values()) == known
    assert not any(m._forward_pre_hooks for m in block.modules())
    told_first = [event.text for event in recorder.of(Notice) if event.fallback]
    assert told_first[0] == "fp8 calibration: 64 samples at once do not fit on the device"
    assert any("calibrated with 64 or 1 samples" in text for text in recorder.texts())
    assert moves == [CPU] * 5, "the first block: there and back in both tries, and home"


def test_the_first_draws_are_those_of_the_first_epoch(session):
    order = session.pipeline.order
    assert isinstance(order, BatchOrder)
    wanted = first_draws(order, 6)
    entered = (*order.batch_at(0), *order.batch_at(1))[:6]
    whole = [replace(draw, epoch=-1, caption=draw.sample.caption) for draw in entered]
    assert wanted == tuple(whole), "but enter none, and drop no caption"
    assert len(first_draws(order, 10**6)) == order.samples_per_epoch


def test_products_that_stay_as_they_were_are_told_as_a_fallback(session, recorder, monkeypatch):
    monkeypatch.setattr(
        fp8_calibration, "convert_to_fp8_calibrated", lambda *_: fp8_linear.Fp8Conversion(3, 2)
    )
    frozen_of(session, recorder)
    (notice,) = [event for event in recorder.of(Notice) if event.fallback]
    assert notice.text == "fp8: 2 frozen layers stay in bf16: no fp8 kernel fits their sizes"
