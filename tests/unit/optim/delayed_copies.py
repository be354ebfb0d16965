"""A copy engine that executes copies at random: immediately, or as late as the waits allow."""

import torch

from gracetune.offload.copy_engine import CopyStream, SynchronousCopyEngine
from gracetune.offload.stall_timer import StallTotals


class DelayedCopyEngine(SynchronousCopyEngine):
    """Each stream is a queue; a delayed copy is executed when it or a later one is waited for.

    Memory that is read before its copy was waited for holds NaN, and memory that is overwritten
    before it was copied out is lost: both show in the numbers. `host_memory` has the host memory
    that was not freed.
    """

    def __init__(self, rng, late=0.8):
        super().__init__()
        self.rng = rng
        self.late = late
        self.queues = {stream: [] for stream in CopyStream}
        self.copied_nbytes = dict.fromkeys(CopyStream, 0)
        self.host_memory = {}

    def allocate_host(self, nbytes):
        memory = super().allocate_host(nbytes).fill_(0xFF)
        self.host_memory[memory.data_ptr()] = memory
        return memory

    def free_host(self, memory):
        del self.host_memory[memory.data_ptr()]

    def copy(self, target, source, poison, stream=CopyStream.WEIGHTS):
        assert len(target) == len(source)
        if poison:
            target.fill_(0xFF)
        self.queues[stream].append((target, source, source.clone()))
        self.copied_nbytes[stream] += len(source)
        pending = DelayedCopy(self.queues[stream], len(self.queues[stream]))
        if self.rng.random() > self.late:
            pending.wait(prefetched=True)
        return pending

    def stalls(self, stream=CopyStream.WEIGHTS):
        return StallTotals(0, 0.0)


class DelayedCopy:
    def __init__(self, queue, position):
        self.queue, self.position = queue, position

    def wait(self, prefetched):
        for index in range(self.position):
            if self.queue[index] is not None:
                target, source, source_when_requested = self.queue[index]
                assert torch.equal(source, source_when_requested), "changed while it was copied"
                target.copy_(source)
                self.queue[index] = None
