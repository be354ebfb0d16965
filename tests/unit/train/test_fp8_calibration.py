"""The forward pass that calibrates frozen fp8 layers, on the CPU, where fp8 is emulated."""

import copy
from dataclasses import replace

import pytest
import torch

from gracetune.adapters.compute import fp8_linear
from gracetune.adapters.compute.fp8_linear import Fp8Linear
from gracetune.adapters.compute.outlier_subspace import num_dimensions
from gracetune.data.batch_order import BatchOrder
from gracetune.distributed.ranks import RankGroup
from gracetune.events.run_control import RunControl
from gracetune.events.types import Notice
from gracetune.train import fp8_calibration
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.fp8_calibration import (
    calibration_batch_size,
    convert_frozen_layers,
    first_draws,
)
from gracetune.train.run import SignalHandler

CPU = torch.device("cpu")


@pytest.fixture
def session(tiny_run, tmp_path, recorder):
    """The tiny model with an adapter and dropout, without a plan."""
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


def fp8_layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}


def convert(session, recorder):
    t = session.state
    convert_frozen_layers(t.run, t.family, session.pipeline, CPU, recorder)
    return fp8_layers(t.family.transformer)


def test_every_layer_of_the_blocks_is_calibrated(session, recorder):
    before = torch.get_rng_state()
    layers = convert(session, recorder)
    assert torch.equal(torch.get_rng_state(), before), "dropout is not affected"
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


def test_a_resumed_run_finds_the_same_outlier_subspaces(session, tiny_run, tmp_path, recorder):
    """The position of its loader does not matter."""
    first = {name: layer.outlier_basis for name, layer in convert(session, recorder).items()}
    run = session.state.run
    again = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    again.pipeline.order.batch_at(again.pipeline.order.epoch_length * 3)
    second = convert(again, recorder)
    again.close()
    assert first.keys() == second.keys()
    assert all(torch.equal(basis, second[name].outlier_basis) for name, basis in first.items())


class RecordedRanks(RankGroup):
    """One of two ranks; rank 1 receives the values that rank 0 has broadcast before."""

    def __init__(self, rank, values):
        super().__init__(rank, ["a", "a"], ["one", "one"])
        self.values = values

    def broadcast(self, value):
        if self.rank == 0:
            self.values.append(copy.deepcopy(value))
            return value
        return self.values.pop(0)


def test_all_ranks_get_the_layers_that_rank_0_has_calibrated(
    session, tmp_path, recorder, monkeypatch
):
    t, values = session.state, []
    other = build_session(
        t.run, start_accelerator(t.run), recorder, RunControl(tmp_path), SignalHandler()
    )
    convert_frozen_layers(
        t.run, t.family, session.pipeline, CPU, recorder, RecordedRanks(0, values)
    )
    assert len(values) == len(t.family.blocks())
    monkeypatch.delattr(fp8_calibration, "forward_once")  # rank 1 does not calibrate
    family = other.state.family
    convert_frozen_layers(t.run, family, other.pipeline, CPU, recorder, RecordedRanks(1, values))
    other.close()
    assert values == []
    first, second = fp8_layers(t.family.transformer), fp8_layers(family.transformer)
    assert len(first) == 53
    assert first.keys() == second.keys()
    for name, layer in first.items():
        for one, same in zip(layer.frozen_tensors, second[name].frozen_tensors, strict=True):
            assert torch.equal(one.view(torch.uint8), same.view(torch.uint8)), name
    assert len({id(layer.outlier_basis) for layer in first.values()}) == len(
        {id(layer.outlier_basis) for layer in second.values()}
    )


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # norms stay in fp32 under autocast
def test_each_expert_is_calibrated_with_its_own_sigmas(two_experts, recorder, monkeypatch):
    monkeypatch.setattr(
        fp8_linear, "FP8_ALIGNMENT", 8
    )  # a miniature's sides; no kernel is asked here
    t = two_experts.state
    sigmas_by_expert = {}
    predict = type(t.family).predict

    def record(family, transformer, noisy, sigmas, conditions):
        sigmas_by_expert[transformer.keywords["expert"]] = sigmas
        return predict(family, transformer, noisy, sigmas, conditions)

    monkeypatch.setattr(type(t.family), "predict", record)
    layers = convert(two_experts, recorder)
    assert sigmas_by_expert["high"].min() >= t.family.boundary > sigmas_by_expert["low"].max()
    assert {name.partition(".")[0] for name in layers} == {"high", "low"}
    assert all(layer.outlier_basis is not None for layer in layers.values())


def test_layers_that_did_not_run_are_reported_as_a_fallback(session, recorder, monkeypatch):
    monkeypatch.setattr(fp8_calibration, "forward_once", lambda *_: None)
    layers = convert(session, recorder)
    assert all(layer.outlier_basis is None for layer in layers.values())
    (notice,) = [event for event in recorder.of(Notice) if event.fallback]
    assert notice.text.startswith("fp8: 53 layers were not calibrated")


def test_the_calibration_batch_is_limited_by_tokens(session, monkeypatch):
    t = session.state
    assert calibration_batch_size(t.family, session.pipeline) == 64
    monkeypatch.setattr(fp8_calibration, "MAX_TOKENS", 100)  # 36 a sample
    assert calibration_batch_size(t.family, session.pipeline) == 2
    monkeypatch.setattr(fp8_calibration, "MAX_TOKENS", 1)
    assert calibration_batch_size(t.family, session.pipeline) == 1


@pytest.mark.parametrize(("max_samples", "calibrated"), [(1, 53), (0, 14)])
def test_running_out_of_memory_reduces_calibration_to_one_sample_or_none(
    session, recorder, monkeypatch, max_samples, calibrated
):
    """Memory runs out in the second block, whose layers already record their inputs."""
    block, original = session.state.family.blocks()[1], fp8_calibration.forward_once
    moves = []
    session.state.family.blocks()[0].to = moves.append

    def run_with_little_memory(run, family, batch, expert, device):
        def run_out_of_memory(*_):
            if len(batch) > max_samples:
                raise torch.OutOfMemoryError

        handle = block.attn.register_forward_pre_hook(run_out_of_memory)
        try:
            original(run, family, batch, expert, device)
        finally:
            handle.remove()

    monkeypatch.setattr(fp8_calibration, "forward_once", run_with_little_memory)
    layers = convert(session, recorder)
    assert sum(layer.outlier_basis is not None for layer in layers.values()) == calibrated
    assert not any(m._forward_pre_hooks for m in block.modules())
    fallbacks = [event.text for event in recorder.of(Notice) if event.fallback]
    assert fallbacks[0] == "fp8 calibration: 64 samples at once do not fit on the device"
    assert any("calibrated with 64 or 1 samples" in text for text in recorder.texts())
    assert moves == [CPU] * 5, "the first block moves there and back in both tries, and at the end"


def test_the_first_draws_are_those_of_the_first_epoch(session):
    order = session.pipeline.order
    assert isinstance(order, BatchOrder)
    draws = first_draws(order, 6)
    of_first_batches = (*order.batch_at(0), *order.batch_at(1))[:6]
    whole = [replace(draw, epoch=-1, caption=draw.sample.caption) for draw in of_first_batches]
    assert draws == tuple(whole), "they belong to no epoch, and drop no caption"
    assert len(first_draws(order, 10**6)) == order.num_samples(0, order.epoch_length)


def test_layers_that_stay_in_bf16_are_reported_as_a_fallback(session, recorder, monkeypatch):
    monkeypatch.setattr(
        fp8_calibration, "convert_to_fp8_calibrated", lambda *_: fp8_linear.Fp8Conversion(3, 2)
    )
    convert(session, recorder)
    (notice,) = [event for event in recorder.of(Notice) if event.fallback]
    assert notice.text == "fp8: 2 frozen layers stay in bf16: no fp8 kernel fits their sizes"
