"""The memory that a plan may use, and the memory that it must leave."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from problem_factory import build_model
from torch import nn

from gracetune.cache.batch_transfer import INITIAL_DEPTH
from gracetune.config.schema import RunFile
from gracetune.distributed.ranks import SINGLE, RankGroup
from gracetune.plan import planner
from gracetune.plan.machines import FITTED_CONSTANTS
from gracetune.plan.search import PlanError
from gracetune.train.build import batches_ahead


def family_of(*layers):
    return SimpleNamespace(transformer=nn.Sequential(*layers))


def test_loaded_frozen_weights_count_as_free_host_memory():
    frozen, trained = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)
    nbytes = sum(p.nbytes for p in frozen.parameters())
    assert planner._frozen_host_nbytes(family_of(frozen, trained)) == nbytes
    assert planner._frozen_host_nbytes(family_of(trained)) == 0


def test_weights_on_the_device_do_not_count_as_free_host_memory():
    elsewhere = nn.Linear(64, 64, device="meta").requires_grad_(False)
    assert planner._frozen_host_nbytes(family_of(elsewhere)) == 0


def test_the_run_file_limits_host_memory():
    frozen = family_of(nn.Linear(1024, 1024).requires_grad_(False))
    run = RunFile.model_validate({"plan": {"host_memory": "1MB"}})
    assert planner._host_nbytes(run, frozen) == 1_000_000


class ScriptedRanks(RankGroup):
    """Rank 0 of two on one machine and one on another; the other ranks' values are given."""

    def __init__(self, local, others):
        super().__init__(0, ["a", "a", "b"], ["one", "one", "two"])
        self.local, self.others = local, others

    def gather_local(self, value):
        return [value, self.local]

    def gather(self, value):
        return [value, *self.others.pop(0)]


def test_ranks_agree_on_the_least_host_memory(monkeypatch):
    monkeypatch.setattr(
        planner, "read_this_host", lambda: SimpleNamespace(usable_bytes=lambda: 1000)
    )
    family = family_of(nn.Linear(8, 8, bias=False).requires_grad_(False))
    here = 760 + 256 + 300  # 95 % of the smaller value, and the weights that both ranks free
    for other_machine, expected in ((9999, here), (500, 500)):
        ranks = ScriptedRanks((800, 300), [[here, other_machine]])
        assert planner._host_nbytes(RunFile(), family, ranks) == expected


def test_the_budget_is_for_the_machine_with_most_ranks():
    ranks = ScriptedRanks((1, 1), [[0, 0], [2, 1]])
    family = family_of(nn.Linear(4, 4))
    problem = planner.build_problem(
        RunFile(), family, build_model(), 10**9, 1, ranks=ranks, shares_weights=False
    )
    assert (problem.budget.ranks, problem.budget.shares_weights) == (2, False)


@pytest.mark.parametrize(("failure", "shared"), [("", True), ("Permission denied", False)])
def test_weights_are_shared_if_all_ranks_can_map_a_page(failure, shared, recorder):
    run = RunFile.model_validate({"adapter": {"rank": 4}})
    ranks = ScriptedRanks(None, [[failure, ""]])
    found = planner._ranks_sharing_weights(run, ranks, recorder)
    assert found is (ranks if shared else SINGLE)
    assert ["rank 1 on one cannot share host memory" in text for text in recorder.texts()] == (
        [] if shared else [True]
    )


def test_nothing_is_shared_if_no_weights_can_be_streamed(recorder):
    ranks = ScriptedRanks(None, [])
    assert planner._ranks_sharing_weights(RunFile(), ranks, recorder) is ranks
    assert planner._ranks_sharing_weights(RunFile(), SINGLE, recorder) is SINGLE


@pytest.mark.parametrize(("depth", "expected"), [("auto", INITIAL_DEPTH), (7, 7)])
def test_prefetched_batches_are_counted(depth, expected):
    run = RunFile.model_validate({"cache_config": {"prefetch_depth": depth}})
    family = family_of(nn.Linear(4, 4))
    problem = planner.build_problem(run, family, build_model(), 10**9, batches_ahead(run))
    assert problem.fixed.batches_ahead == expected


def test_with_one_memory_nothing_is_moved():
    run = RunFile.model_validate({"adapter": {"rank": 4}, "optimizer": {"state": "host"}})
    library = int(FITTED_CONSTANTS["library_nbytes"].value)

    def solve(nbytes, one_memory):
        model, family = build_model(), family_of(nn.Linear(4, 4))
        problem = planner.build_problem(
            run, family, model, library + nbytes, INITIAL_DEPTH, one_memory=one_memory
        )
        return problem.solve(replace(problem.budget, fragmentation=0.0))

    little = solve(1300, one_memory=False)
    assert little.streamed
    assert little.host_state == 1.0
    with pytest.raises(PlanError, match="shared by host and device"):
        solve(1000, one_memory=True)
    whole = solve(1800, one_memory=True)
    assert (whole.streamed, whole.host_state, whole.host.total) == ((), 0.0, 0)
