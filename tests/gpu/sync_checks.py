"""Find operations that make the host wait for the GPU: forbid them, or count them."""

import gc
import warnings
from contextlib import contextmanager

import torch

from gracetune.train.step import TrainProgress, mark_last, train_step


@contextmanager
def forbid_host_syncs():
    """Raise an error at any operation that makes the host wait for the device."""
    _collect_garbage()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def count_host_syncs(step, steps):
    """Return how often the host waits for the device in a number of steps."""
    _collect_garbage()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def assert_steps_never_sync(session):
    """Check three steps, after three that create optimizer state, choose kernels and compile."""
    batches = [session.pipeline.load(session.pipeline.order.batch_at(index)) for index in range(6)]

    def train(first, last):
        for index in range(first, last):
            train_step(session.state, mark_last([batches[index]]), 1, TrainProgress(index))

    train(0, 3)
    with forbid_host_syncs():
        train(3, 6)


def _collect_garbage():
    """Collect rings that were not closed now: they wait for the device when they are collected."""
    gc.collect()
    torch.cuda.synchronize()
