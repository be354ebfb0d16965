"""Host memory while weights move into it: never a second copy of the model."""

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.offload.copies import SynchronousCopyEngine
from gracetune.offload.host_weights import SMALL, fill, lay_out, load_resident_weights
from gracetune.offload.ring import stream_weights

BLOCKS = 4


def make_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks).requires_grad_(False)


class Room:
    """Allocates, and looks each time at how much of the model is still as it was."""

    def __init__(self, model):
        self.before = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
        self.left, self.asked = [], []

    def __call__(self, nbytes):
        self.left.append(sum(not storage.expired() for storage in self.before))
        self.asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


def test_what_was_moved_is_gone_before_the_next_block_is():
    model = make_model()
    expected = [p.detach().clone() for p in model.parameters()]
    room = Room(model)
    pieces = fill(lay_out(model, list(model)), room)
    each = len(expected) // BLOCKS
    assert room.left == [each * left for left in range(BLOCKS, 0, -1)]
    assert [len(piece) for piece in pieces] == room.asked
    assert all(map(torch.equal, model.parameters(), expected))


def test_a_second_plan_takes_the_place_of_the_first_block_by_block():
    model = make_model()
    first = fill(lay_out(model, list(model)), Room(model))
    first.clear()
    room = Room(model)
    fill(lay_out(model, list(model)), room)
    assert room.left == sorted(room.left, reverse=True)
    assert room.left[-1] == len(room.before) // BLOCKS


def test_a_block_with_nothing_to_stream_asks_for_no_memory():
    model = make_model()
    model[1].requires_grad_(True)
    room = Room(model)
    pieces = fill(lay_out(model, list(model)), room)
    assert len(room.asked) == BLOCKS - 1
    assert len(pieces[1]) == 0


def wide(tied=None):
    """A block whose bias is too small to stream."""
    linear = nn.Linear(2 * SMALL, 8)
    if tied is not None:
        linear.bias = tied
    return nn.Sequential(linear).requires_grad_(False)


def test_what_is_too_small_to_matter_stays_where_it_is():
    model = nn.Sequential(wide(), wide())
    x = torch.randn(3, 2 * SMALL)
    names = [[place.name for place in region.places] for region in lay_out(model, list(model))]
    assert names == [["0.0.weight"], ["1.0.weight"]]
    ways = [block(x) for block in model]
    biases = [block[0].bias.data_ptr() for block in model]
    ring = stream_weights(model, list(model), SynchronousCopyEngine(), print)
    assert [block[0].bias.data_ptr() for block in model] == biases
    assert ring.counters().slot_nbytes == model[0][0].weight.nbytes
    model.forward = lambda x: [block(x) for block in model]
    assert all(map(torch.equal, model(x), ways))
    assert ring.counters().fetches == len(model)


def test_what_is_small_in_one_block_and_not_in_another_streams_in_both():
    little = nn.Sequential(nn.Linear(4, 8)).requires_grad_(False)
    model = nn.Sequential(wide(tied=little[0].bias), little)
    names = [[place.name for place in region.places] for region in lay_out(model, list(model))]
    assert names == [["0.0.weight", "0.0.bias"], ["1.0.weight", "1.0.bias"]]


def test_a_buffer_of_two_names_is_brought_once_for_both():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    shared = torch.zeros(3)
    for module, name in ((model[0], "a"), (model[0], "b"), (model[1], "c")):
        module.register_buffer(name, shared)
    load_resident_weights(model, [], torch.device("meta"))
    assert model[0].a.device.type == "meta"
    assert model[0].a is model[0].b
    assert model[0].a is model[1].c
