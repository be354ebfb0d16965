"""Ranks exchange values over gloo."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from fork_process import PythonProcess, rank_environments, run_ranks

from gracetune.distributed.ranks import (
    SINGLE,
    RankGroup,
    agree_on_token,
    machine_id,
    rendezvous_method,
)
from gracetune.errors import RunFailedError

EXCHANGE = """
import json
import torch.distributed as dist
from gracetune.distributed.ranks import connect_ranks
dist.init_process_group("gloo")
group = connect_ranks(60)
found = {
    "gathered": group.gather({"rank": group.rank}),
    "local": group.gather_local(group.rank + 10),
    "broadcast": group.broadcast([group.rank, "from here"]),
    "any": group.any(False, group.rank == 1, True),
    "place": [group.rank, group.world_size, group.local_rank, group.local_world_size],
}
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_ranks_of_one_machine_exchange_values() -> None:
    outputs = [json.loads(done.stdout) for done in run_ranks("-c", EXCHANGE)]
    for rank, found in enumerate(outputs):
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert found["local"] == [10, 11]
        assert found["broadcast"] == [0, "from here"]
        assert found["any"] == [False, True, True]
        assert found["place"] == [rank, 2, rank, 2]


def test_a_single_process_exchanges_with_itself() -> None:
    assert SINGLE.gather("a") == ["a"]
    assert SINGLE.gather_local("a") == ["a"]
    assert SINGLE.broadcast("a") == "a"
    assert SINGLE.any(True, False) == (True, False)
    assert (SINGLE.local_rank, SINGLE.local_world_size, SINGLE.is_main) == (0, 1, True)


def test_ranks_are_grouped_by_machine() -> None:
    group = RankGroup(3, ["a", "a", "b", "b"], ["one", "one", "two", "two"])
    assert group.local_ranks == [2, 3]
    assert (group.local_rank, group.local_world_size, group.num_machines) == (1, 2, 2)
    assert group.name(2) == "rank 2 on two"


def test_a_machine_has_one_id() -> None:
    assert machine_id(Path("/proc")) == machine_id(Path("/proc"))


MEET = """
import torch.distributed as dist
from gracetune.distributed.ranks import rendezvous_method
import os
dist.init_process_group("gloo", init_method=rendezvous_method(os.environ))
total = [None] * 2
dist.all_gather_object(total, dist.get_rank())
print(total)
os._exit(0)
"""


def test_restarted_ranks_do_not_find_the_addresses_of_dead_ones() -> None:
    """The store of the launcher has those of the first start."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    for _ in range(2):
        envs = [env | agent for env in rank_environments(os.environ)]
        ranks = [PythonProcess("-c", MEET, env=env) for env in envs]
        for rank in ranks:
            assert rank.communicate(timeout=60)[0] == "[0, 1]\n"


def test_a_rank_of_an_earlier_start_is_not_taken_for_a_new_one() -> None:
    store = dist.HashStore()
    store.set("hello/1", "of a dead process")
    with ThreadPoolExecutor(3) as pool:
        join = [pool.submit(agree_on_token, store, r, 3, timedelta(seconds=20)) for r in range(3)]
        tokens = {future.result() for future in join}
    assert len(tokens) == 1
    with pytest.raises(RunFailedError, match="ranks 1, 2 of 3 did not start within"):
        agree_on_token(store, 0, 3, timedelta(seconds=0.1))


def test_ranks_without_a_shared_store_meet_as_usual() -> None:
    assert rendezvous_method({"RANK": "0"}) == "env://"
    assert rendezvous_method({"TORCHELASTIC_USE_AGENT_STORE": "True"}) == "gracetune://"
    assert rendezvous_method({"TORCHELASTIC_USE_AGENT_STORE": "True"}) == "gracetune://"
