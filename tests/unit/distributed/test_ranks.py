"""Ranks exchange values over gloo."""

import json
from pathlib import Path

from fork_process import run_ranks

from gracetune.distributed.ranks import SINGLE, RankGroup, machine_id

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
        assert found["place"] == [rank, 2, rank, 2]


def test_a_single_process_exchanges_with_itself() -> None:
    assert SINGLE.gather("a") == ["a"]
    assert SINGLE.gather_local("a") == ["a"]
    assert SINGLE.broadcast("a") == "a"
    assert (SINGLE.local_rank, SINGLE.local_world_size, SINGLE.is_main) == (0, 1, True)


def test_ranks_are_grouped_by_machine() -> None:
    group = RankGroup(3, ["a", "a", "b", "b"], ["one", "one", "two", "two"])
    assert group.local_ranks == [2, 3]
    assert (group.local_rank, group.local_world_size, group.num_machines) == (1, 2, 2)
    assert group.name(2) == "rank 2 on two"


def test_a_machine_has_one_id() -> None:
    assert machine_id(Path("/proc")) == machine_id(Path("/proc"))
