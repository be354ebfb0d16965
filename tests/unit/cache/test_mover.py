from functools import partial

import pytest
import torch

from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.cache.store import stack_into
from gracetune.config.schema import Gh200Section
from gracetune.errors import ConfigError
from gracetune.memory.stats import Tier

CPU = torch.device("cpu")


LATENTS = partial(stack_into, [torch.zeros(4), torch.ones(4)])
TEXT = {"tokens": torch.zeros(2, 3)}


def test_the_machine_and_the_decision_are_told(told):
    build_batch_transfer(Gh200Section(), CPU, told)
    (text,) = told.texts()
    assert text.startswith("memory link: none")
    assert text.endswith("hints off")


def test_without_hints_a_batch_is_only_stacked(told):
    latents, text = build_batch_transfer(Gh200Section(), CPU, told).to_device(LATENTS, TEXT)
    assert latents.tolist() == [[0.0] * 4, [1.0] * 4]
    assert text["tokens"] is TEXT["tokens"]
    assert len(told.events) == 1


def test_hints_that_cannot_be_applied_are_told_once(told):
    mover = build_batch_transfer(Gh200Section(enable_uvm_hints=True), CPU, told)
    for _ in range(3):
        mover.to_device(LATENTS, TEXT)
    fallbacks = [e.text for e in told.events if e.fallback]
    assert len(fallbacks) > 1
    assert len(fallbacks) == len(set(fallbacks))
    assert fallbacks[0].startswith("batches are not in managed memory")
    assert all("no GPU" in text for text in fallbacks[1:])


def test_memory_in_use_is_a_number_of_bytes(told):
    used = build_batch_transfer(Gh200Section(), CPU, told).memory_used(7)
    assert used.step == 7
    assert used.host > 10**6
    assert (used.device, used.managed, used.stage) == (0, 0, 1)


def test_an_unknown_role_is_refused_by_name(told):
    with pytest.raises(ConfigError, match=r"placement\.latent "):
        build_batch_transfer(Gh200Section(placement={"latent": "host"}), CPU, told)


def test_roles_are_kept_in_the_books(told):
    mover = build_batch_transfer(Gh200Section(), CPU, told)
    sizes = iter([100, 300])
    mover.track_memory("optimizer", lambda: next(sizes))
    for expected in (100, 300):
        mover.memory_used(1)
        assert mover._session.stats()["uvm.bytes.host.role.optimizer"] == expected


def test_a_role_may_be_booked_elsewhere_than_on_the_device(told):
    mover = build_batch_transfer(Gh200Section(), CPU, told)
    mover.track_memory("optimizer", lambda: 5, Tier.DEVICE)
    mover.track_memory("too much", lambda: 5, Tier.MANAGED)  # this machine has none
    for step in (1, 2):
        mover.memory_used(step)
    stats = mover._session.stats()
    assert stats["uvm.bytes.device.role.optimizer"] == 5
    assert mover._session.accounting.current(Tier.MANAGED) == 0
    assert mover._session.accounting.denied(Tier.MANAGED) == 2


@pytest.mark.parametrize(("conf", "wanted"), [("use_uvm:True", True), ("use_uvm:False", False)])
def test_use_uvm_decides_about_the_pool(told, monkeypatch, conf, wanted):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    build_batch_transfer(Gh200Section(enable_uvm_hints=not wanted), CPU, told)
    assert any("batches are not in managed memory" in text for text in told.texts()) is wanted
