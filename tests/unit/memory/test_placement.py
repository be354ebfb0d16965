"""The placement table, and placing the tensors of a batch with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from fakes.platforms import SimulatedMachine, simulated_machine

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
def machine() -> SimulatedMachine:
    return simulated_machine(Link.COHERENT)


def preferred(machine: SimulatedMachine, tensor: torch.Tensor) -> int | None:
    return machine.gpu.range_state(tensor.data_ptr(), tensor.numel()).preferred


def test_the_default_table_is_the_forks_policy(machine: SimulatedMachine) -> None:
    batch = {name: machine.tensor(MIB) for name in DEFAULT_TABLE.roles}
    report = place_batch(batch, machine.hints())
    assert report
    assert {placed.path for placed in report.placed} == set(batch)
    to_host = {"latents", "audio"}
    for placed in report.placed:
        state = machine.gpu.range_state(batch[placed.path].data_ptr(), MIB)
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


def test_nested_tensors_are_found_and_named(machine: SimulatedMachine) -> None:
    tensors = [machine.tensor(MIB) for _ in range(8)]
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
    report = place_batch(batch, machine.hints())
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
    assert preferred(machine, tensors[0]) == HOST
    assert preferred(machine, tensors[2]) == 0
    assert preferred(machine, tensors[4]) is None


def test_the_nearest_name_decides(machine: SimulatedMachine) -> None:
    mask = machine.tensor(MIB)
    report = place_batch({"latents": {"mask": mask}}, machine.hints())
    assert report.placed[0].role == "masks"
    assert preferred(machine, mask) == 0


def test_a_tensor_is_placed_once_even_in_a_recursive_batch(machine: SimulatedMachine) -> None:
    latents = machine.tensor(MIB)
    batch: dict[str, object] = {"latents": [latents, latents]}
    batch["again"] = batch
    assert len(place_batch(batch, machine.hints()).placed) == 1


def test_deeply_nested_batches_are_placed(machine: SimulatedMachine) -> None:
    deep: object = machine.tensor(MIB)
    for _ in range(5000):
        deep = [deep]
    assert len(place_batch({"latents": deep}, machine.hints()).placed) == 1


def test_a_tensor_without_a_name_is_reported_as_unknown(machine: SimulatedMachine) -> None:
    report = place_batch(machine.tensor(MIB), machine.hints())
    assert (report.placed, report.unknown) == ((), ("batch",))
    assert not report


def test_hints_that_were_not_applied_are_in_the_report() -> None:
    report = place_batch({"latents": torch.zeros(MIB)}, simulated_machine(Link.NONE).hints())
    assert not report
    assert "no GPU" in report.hints[0].reason


@pytest.mark.parametrize(
    ("placement", "state"),
    [("host", (HOST, None)), ("staged", (HOST, 0)), ("device", (0, 0)), ("leave", (None, None))],
)
def test_the_placement_of_a_role_can_be_changed(
    machine: SimulatedMachine, placement: str, state: tuple[object, object]
) -> None:
    latents = machine.tensor(MIB)
    place_batch({"latents": latents}, machine.hints(), placement_table({"latents": placement}))
    found = machine.gpu.range_state(latents.data_ptr(), MIB)
    assert (found.preferred, found.last_prefetch) == state


def test_the_placement_of_a_single_name_can_be_changed() -> None:
    table = placement_table({"waveform": "device"})
    assert table.placements[table.roles["waveform"]] is Placement.DEVICE
    assert table.placements[table.roles["audio_latents"]] is Placement.HOST
    assert DEFAULT_TABLE.placements["audio"] is Placement.HOST


def test_unknown_names_and_placements_are_errors_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"latnets .*Did you mean latents\?"):
        placement_table({"latnets": "host"})
    with pytest.raises(ConfigError, match=r"neither a role nor a tensor's name\. Roles: latents"):
        placement_table({"zzz": "host"})
    with pytest.raises(
        ConfigError, match=r"'cpu', but a placement is one of host, staged, device, leave"
    ):
        placement_table({"latents": "cpu"})


def test_a_custom_table_can_be_used(machine: SimulatedMachine) -> None:
    table = PlacementTable({"pixels": "images"}, {"images": Placement.DEVICE})
    pixels = machine.tensor(MIB)
    assert place_batch({"pixels": pixels}, machine.hints(), table)
    assert preferred(machine, pixels) == 0
    with pytest.raises(ConfigError, match="no placement for the roles images"):
        PlacementTable({"pixels": "images"}, {})
