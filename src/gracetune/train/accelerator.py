"""Create the Accelerator of a run: connect its ranks and set the precision."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)

from gracetune.config.environment import (
    check_engine,
    hide_sharding_from_accelerate,
    process_environment,
)
from gracetune.distributed.ranks import rendezvous_method
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.schema import RunFile

SUPPORTED_ENGINES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def start_accelerator(run: RunFile) -> Accelerator:
    """Create the Accelerator: connect to the other ranks, if any, and set the precision."""
    check_engine(process_environment())  # Accelerate's own error does not say what to change
    hide_sharding_from_accelerate()
    # Accelerate keeps its settings in process-wide state; a second run must not inherit them.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=resolve_precision(run),
        # `train_step` divides by the number of samples itself. An accumulation setting in the
        # environment must not scale the loss a second time.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        cpu=not torch.cuda.is_available(),  # without it, CPU ranks would not find each other
        kwargs_handlers=[
            InitProcessGroupKwargs(
                choose_gradient_backend(run, process_environment()),
                init_method=rendezvous_method(process_environment()),
                timeout=timedelta(seconds=run.distributed.timeout_s),
            ),
        ],
    )
    if accelerator.distributed_type not in SUPPORTED_ENGINES:
        raise ConfigError(
            f"Accelerate is configured for {accelerator.distributed_type.value}, which gracetune "
            "does not have. Set distributed_type in the configuration file given to accelerate "
            "launch to FSDP, MULTI_GPU or 'NO'."
        )
    return accelerator


def resolve_precision(run: RunFile) -> str:
    """Return the precision for Accelerate: `bf16`, or `no` for fp32.

    `auto` is bf16 on a GPU that supports it, else fp32. `fp16` is replaced by bf16.
    """
    precision = run.train.mixed_precision
    if precision == "auto":
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    return "bf16" if precision == "fp16" else precision


def choose_gradient_backend(run: RunFile, environment: Mapping[str, str]) -> str | None:
    """Return the backend of the ranks' gradients; None for the default of their devices.

    NCCL refuses two ranks on one GPU.
    """
    backend = run.distributed.backend
    if backend != "auto":
        return backend
    num_gpus = torch.cuda.device_count()
    num_local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return "gloo" if 0 < num_gpus < num_local else None
