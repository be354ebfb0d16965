"""A copy engine that counts the bytes that it copies, and the host memory that is not freed."""

from gracetune.offload.copy_engine import POISON, CopyStream, SynchronousCopyEngine


class CountingCopyEngine(SynchronousCopyEngine):
    """`host_memory` has the host memory that was not freed. It holds NaN until it is written."""

    def __init__(self):
        super().__init__()
        self.copied_nbytes = dict.fromkeys(CopyStream, 0)
        self.host_memory = {}

    def allocate_host(self, nbytes):
        memory = super().allocate_host(nbytes).fill_(POISON)
        self.host_memory[memory.data_ptr()] = memory
        return memory

    def free_host(self, memory):
        del self.host_memory[memory.data_ptr()]

    def copy(self, target, source, poison, stream=CopyStream.WEIGHTS):
        assert len(target) == len(source)
        self.copied_nbytes[stream] += len(source)
        return super().copy(target, source, poison, stream)
