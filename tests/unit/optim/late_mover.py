"""A link whose copies are done as late as waits allow, or at once, by the dice."""

import torch

from gracetune.offload.copies import CopyStream, SynchronousCopyEngine
from gracetune.offload.stall_timer import StallTotals


class LateMover(SynchronousCopyEngine):
    """Each lane is a queue; a copy is done when it is waited for, after all before it.

    What is read before it was waited for is poison, and what is overwritten before it was copied
    out is lost: both show in the numbers. Host memory is counted until it is given up.
    """

    def __init__(self, dice, late=0.8):
        super().__init__()
        self.dice = dice
        self.late = late
        self.queues = {lane: [] for lane in CopyStream}
        self.moved = dict.fromkeys(CopyStream, 0)
        self.lent = {}

    def host_memory(self, nbytes):
        memory = super().allocate_host(nbytes).fill_(0xFF)
        self.lent[memory.data_ptr()] = memory
        return memory

    def let_go(self, memory):
        del self.lent[memory.data_ptr()]

    def copy(self, target, source, poison, lane=CopyStream.WEIGHTS):
        assert len(target) == len(source)
        if poison:
            target.fill_(0xFF)
        self.queues[lane].append((target, source, source.clone()))
        self.moved[lane] += len(source)
        ticket = Ticket(self, lane, len(self.queues[lane]))
        if self.dice.random() > self.late:
            ticket.wait(ahead=True)
        return ticket

    def waits(self, lane=CopyStream.WEIGHTS):
        return StallTotals(0, 0.0)


class Ticket:
    def __init__(self, mover, lane, place):
        self.mover, self.lane, self.place = mover, lane, place

    def wait(self, ahead):
        queue = self.mover.queues[self.lane]
        for index in range(self.place):
            if queue[index] is not None:
                target, source, asked = queue[index]
                assert torch.equal(source, asked), "changed while it was copied"
                target.copy_(source)
                queue[index] = None
