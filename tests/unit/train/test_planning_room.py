"""Host memory that a plan may count on: weights leave where they are for where it has them."""

from types import SimpleNamespace

from torch import nn

from gracetune.config.schema import RunFile
from gracetune.train import planning


def family_of(*layers):
    return SimpleNamespace(transformer=nn.Sequential(*layers))


def test_frozen_weights_are_counted_as_room_and_trained_ones_are_not():
    frozen, trained = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
    nbytes = sum(p.nbytes for p in frozen.parameters())
    assert planning._leaving_nbytes(family_of(frozen, trained)) == nbytes
    assert planning._leaving_nbytes(family_of(trained)) == 0


def test_weights_that_are_not_in_host_memory_make_no_room_there():
    elsewhere = nn.Linear(64, 64, device="meta").requires_grad_(False)
    assert planning._leaving_nbytes(family_of(elsewhere)) == 0


def test_what_the_run_file_allows_is_a_limit_still():
    frozen = family_of(nn.Linear(1024, 1024).requires_grad_(False))
    run = RunFile.model_validate({"plan": {"host_memory": "1MB"}})
    assert planning._host_nbytes(run, frozen) == 1_000_000
