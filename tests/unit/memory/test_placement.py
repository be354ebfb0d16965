"""The role table, and the walk that applies it to a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from by_hand import Machine, machine

from gracetune.errors import ConfigError
from gracetune.memory.driver import HOST
from gracetune.memory.placement import (
    DEFAULT_TABLE,
    Placement,
    PlacementTable,
    place_batch,
    placement_table,
)
from gracetune.memory.platform import Link
from gracetune.units import MIB


@pytest.fixture
def here() -> Machine:
    return machine(Link.COHERENT)


def preferred(here: Machine, tensor: torch.Tensor) -> int | None:
    return here.gpu.range_state(tensor.data_ptr(), tensor.numel()).preferred


def test_the_forks_policy(here: Machine) -> None:
    batch = {name: here.tensor(MIB) for name in DEFAULT_TABLE.roles}
    report = place_batch(batch, here.hints())
    assert report
    assert {placed.path for placed in report.placed} == set(batch)
    to_host = {"latents", "audio"}
    for placed in report.placed:
        state = here.gpu.range_state(batch[placed.path].data_ptr(), MIB)
        if placed.role in to_host:
            assert (state.preferred, state.last_prefetch) == (HOST, None)
        else:
            assert (state.preferred, state.last_prefetch) == (0, 0)
    assert {DEFAULT_TABLE.roles[key] for key in ("audio_latents", "audio_samples", "waveform")} == {
        "audio"
    }


class Pair(NamedTuple):
    latents: torch.Tensor
    other: torch.Tensor


@dataclass(frozen=True)
class Prompt:
    text_embeds: torch.Tensor
    attention_mask: torch.Tensor
    note: str = "a cat"


def test_nested_things_are_walked_and_named(here: Machine) -> None:
    tensors = [here.tensor(MIB) for _ in range(8)]
    batch = {
        "audio_latents": {"left": [tensors[0]], "right": (tensors[1],)},
        "prompts": [Prompt(tensors[2], tensors[3])],
        "pixels": tensors[4],
        7: {"latents": tensors[5]},
        "pair": {"latents": Pair(tensors[6], tensors[7])},
        "step": 3,
        "caption": "latents",
        "kind": Prompt,
    }
    report = place_batch(batch, here.hints())
    assert [(placed.path, placed.role) for placed in report.placed] == [
        ("audio_latents.left[0]", "audio"),
        ("audio_latents.right[0]", "audio"),
        ("prompts[0].text_embeds", "text"),
        ("prompts[0].attention_mask", "masks"),
        ("7.latents", "latents"),
        ("pair.latents[0]", "latents"),
        ("pair.latents[1]", "latents"),
    ]
    assert report.unknown == ("pixels",)
    assert preferred(here, tensors[0]) == HOST
    assert preferred(here, tensors[2]) == 0
    assert preferred(here, tensors[4]) is None


def test_the_inner_name_wins(here: Machine) -> None:
    mask = here.tensor(MIB)
    report = place_batch({"latents": {"mask": mask}}, here.hints())
    assert report.placed[0].role == "masks"
    assert preferred(here, mask) == 0


def test_a_batch_that_holds_itself_or_a_tensor_twice(here: Machine) -> None:
    latents = here.tensor(MIB)
    batch: dict[str, object] = {"latents": [latents, latents]}
    batch["again"] = batch
    assert len(place_batch(batch, here.hints()).placed) == 1


def test_depth_is_no_limit(here: Machine) -> None:
    deep: object = here.tensor(MIB)
    for _ in range(5000):
        deep = [deep]
    assert len(place_batch({"latents": deep}, here.hints()).placed) == 1


def test_a_bare_tensor_has_no_name(here: Machine) -> None:
    report = place_batch(here.tensor(MIB), here.hints())
    assert (report.placed, report.unknown) == ((), ("batch",))
    assert not report


def test_what_is_not_applied_shows_in_the_report() -> None:
    report = place_batch({"latents": torch.zeros(MIB)}, machine(Link.NONE).hints())
    assert not report
    assert "no GPU" in report.hints[0].reason


@pytest.mark.parametrize(
    ("home", "state"),
    [("host", (HOST, None)), ("staged", (HOST, 0)), ("device", (0, 0)), ("leave", (None, None))],
)
def test_a_run_file_changes_a_role(here: Machine, home: str, state: tuple[object, object]) -> None:
    latents = here.tensor(MIB)
    place_batch({"latents": latents}, here.hints(), placement_table({"latents": home}))
    found = here.gpu.range_state(latents.data_ptr(), MIB)
    assert (found.preferred, found.last_prefetch) == state


def test_a_run_file_changes_one_name_and_leaves_its_role() -> None:
    table = placement_table({"waveform": "device"})
    assert table.placements[table.roles["waveform"]] is Placement.DEVICE
    assert table.placements[table.roles["audio_latents"]] is Placement.HOST
    assert DEFAULT_TABLE.placements["audio"] is Placement.HOST


def test_a_slip_in_the_table_is_an_error_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"latnets .*Did you mean latents\?"):
        placement_table({"latnets": "host"})
    with pytest.raises(ConfigError, match=r"no role and no name.* Roles: latents"):
        placement_table({"zzz": "host"})
    with pytest.raises(ConfigError, match=r"'cpu'; a home is one of host, staged, device, leave"):
        placement_table({"latents": "cpu"})


def test_a_table_of_ones_own(here: Machine) -> None:
    table = PlacementTable({"pixels": "pictures"}, {"pictures": Placement.DEVICE})
    pixels = here.tensor(MIB)
    assert place_batch({"pixels": pixels}, here.hints(), table)
    assert preferred(here, pixels) == 0
    with pytest.raises(ConfigError, match="no home to pictures"):
        PlacementTable({"pixels": "pictures"}, {})
