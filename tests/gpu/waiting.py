"""How the GPU tests look for waits: an error where there may be none, a count where there may."""

import gc
import warnings
from contextlib import contextmanager

import torch

from gracetune.train.step import TrainProgress
from gracetune.train.step import train_step


@contextmanager
def never_waiting():
    """Whatever makes the host wait for the device is an error."""
    _settle()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def count_waits(step, steps):
    """How often the host waits for the device in so many steps."""
    _settle()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in caught)


def assert_steps_never_wait(session):
    """Three steps to make optimizer state, choose kernels and compile; three that are watched."""
    batches = [session.pipeline.load(session.pipeline.order.batch_at(index)) for index in range(6)]

    def train(first, last):
        for index in range(first, last):
            train_step(session.state, [batches[index]], 1, TrainProgress(index, index))

    train(0, 3)
    with never_waiting():
        train(3, 6)


def _settle():
    """Rings that nobody has closed wait for the device when they are collected: now, not later."""
    gc.collect()
    torch.cuda.synchronize()
