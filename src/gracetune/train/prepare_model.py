"""Prepare a loaded model for training.

Freeze it, add the adapter, choose dtypes, placement and the attention backend.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import AutocastKwargs
from torch import Tensor

from gracetune.adapters.compute.fused_lora import runs_in_dtype
from gracetune.config.checks import trains_in_bf16
from gracetune.config.environment import compiled_graphs_folder
from gracetune.config.parse_text import format_value
from gracetune.distributed.context_parallel import SINGLE_CONTEXT, connect_context_group
from gracetune.distributed.sharding import shard_model
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.models.attention_backends import set_attention_backend
from gracetune.models.context_parallel import check_context_parallel, enable_context_parallel
from gracetune.models.family import transformers_of
from gracetune.models.quantize import check_quantizable, quantize_blocks
from gracetune.plan.attention_autotune import autotune_attention
from gracetune.train.export import check_exportable
from gracetune.train.step import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelerate import Accelerator
    from torch import nn
    from torch.nn import Parameter

    from gracetune.config.schema import RunFile
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch
    from gracetune.distributed.context_parallel import ContextGroup
    from gracetune.distributed.layout import Layout
    from gracetune.distributed.sharding import ShardedParameters
    from gracetune.events.dispatcher import Emit
    from gracetune.models.family import Family
    from gracetune.train.experts import ExpertSchedule
    from gracetune.train.export import AdaptedModules
    from gracetune.train.step import TrainState
    from gracetune.train.validate import ValidationSetup


FP32_NBYTES = 4
ADAPTER_NAMES = {
    "lora": "LoRA",
    "dora": "DoRA",
    "locon": "LoCon",
    "loha": "LoHa",
    "lokr": "LoKr",
    "full": "full-matrix adapter",
}


def make_trainable(
    run: RunFile,
    family: Family,
    schedule: ExpertSchedule | None,
    emit: Emit,
    *,
    is_sharded: bool = False,
) -> AdaptedModules:
    """Freeze the model, then add the adapter or, without one, unfreeze the trained transformers.

    A run may train one or both transformers of Wan 2.2. With `is_sharded`, weights keep their dtype
    until `shard_model` converts them, block by block. Returns the modules that have an adapter.
    """
    transformers = transformers_of(family.transformer)
    trained = {
        expert: transformer
        for expert, transformer in transformers.items()
        if schedule is None or expert in schedule.windows
    }
    set_attention_backend(transformers.values(), run.model.attention_mechanism, emit)
    for transformer in transformers.values():
        transformer.requires_grad_(False)
    if run.adapter is None:
        for transformer in trained.values():
            transformer.requires_grad_(True)
        _keep_weights_in_fp32(run, trained.values(), emit, is_sharded=is_sharded)
        return {}
    from gracetune.adapters.inject import add_adapter  # peft takes seconds to import

    seed = derive_seed(run.seed, "adapter") % 2**31
    modules = add_adapter(trained, run.adapter, family.adapter_targets, seed)
    check_exportable(trained, modules, family.name)
    count = sum(map(len, modules.values()))
    rank = "" if run.adapter.kind == "full" else f" rank {run.adapter.rank}"
    emit(Notice(f"adapter: {ADAPTER_NAMES[run.adapter.kind]}{rank} on {count} modules"))
    return modules


def _keep_weights_in_fp32(
    run: RunFile, transformers: Iterable[nn.Module], emit: Emit, *, is_sharded: bool
) -> None:
    """Convert trained bf16 weights to fp32, unless the optimizer keeps fp32 master weights.

    An update is usually smaller than the spacing of bf16 numbers, so most would be rounded away.
    """
    narrow = [p for t in transformers for p in t.parameters() if p.itemsize < FP32_NBYTES]
    if not narrow:
        return
    if trains_in_bf16(run):
        text = f"{len(narrow)} trained tensors and their gradients stay in bf16; the optimizer "
        emit(Notice(f"{text}keeps fp32 master weights"))
        return
    for parameter in narrow if not is_sharded else ():
        parameter.data = parameter.data.float()
    text = f"{len(narrow)} trained tensors are converted to fp32, because bf16 would round updates "
    emit(Notice(f"{text}away; model.dtype: bfloat16 with adamw and no ema_decay halves their size"))


def divide_tokens(
    run: RunFile, family: Family, layout: Layout, device: torch.device, emit: Emit
) -> ContextGroup:
    """Let each rank compute a part of the tokens of its samples, if the run file says so.

    All ranks must call this. Returns the ranks that share this rank's samples.
    """
    degree, kind = layout.context_size, run.distributed.context_parallel_kind
    if degree == 1:
        return SINGLE_CONTEXT
    check_context_parallel(family, degree, kind, device.type)
    context = connect_context_group(layout, device.type)
    mesh = layout.ring_mesh(device.type) if kind == "ring" else None
    enable_context_parallel(family, context, mesh)
    if mesh is not None:
        text = "distributed.context_parallel_kind is ring, which has not been tested"
        emit(Notice(f"{text}; compare its losses with those of ulysses", level="warning"))
    return context


def quantize_frozen(run: RunFile, family: Family, emit: Emit) -> None:
    """Quantize the linear layers of the blocks, if `model.quantize` says so."""
    kind = run.model.quantize
    if kind == "none":
        return
    check_quantizable(kind, run.adapter)
    count = quantize_blocks(family.blocks(), kind)
    emit(Notice(f"model: {count} linear layers of the frozen model are quantized to {kind}"))


def divide_weights(
    run: RunFile,
    family: Family,
    layout: Layout,
    device: torch.device,
    precision: str,
    unplanned: str,
    emit: Emit,
) -> ShardedParameters | None:
    """Divide the transformers among ranks, if the run file says so, and return the divided weights.

    Otherwise, a plan or `place_model` moves them to the device later. `precision` is Accelerate's:
    with `bf16`, divided blocks gather their weights in bf16. `unplanned` is the reason for having
    no memory plan, which is logged.
    """
    idle = idle_plan_notice(run, unplanned, is_sharded=layout.is_sharded)
    if idle is not None:
        emit(idle)
    if layout.is_sharded:
        if unplanned:
            effect = f"{layout.describe()}. No block is recomputed or compiled by a plan."
            emit(unplanned_notice(run, unplanned, effect))
        return shard_model(
            transformers_of(family.transformer),
            family.blocks(),
            layout,
            run.distributed,
            device,
            emit,
            trained_dtype=None if trains_in_bf16(run) else torch.float32,
            compute_dtype=gathered_dtype(precision),
        )
    if unplanned:
        if run.model.frozen_compute == "fp8":
            raise ConfigError(
                f"model.frozen_compute is fp8, which needs a memory plan, but {unplanned}. "
                "Set it to bf16, or set plan: auto."
            )
        if run.plan != "off":
            emit(unplanned_notice(run, unplanned))
    return None


def gathered_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of the gathered weights of divided blocks; None: as they are stored."""
    return torch.bfloat16 if precision == "bf16" else None


def trained_parameters_of(
    family: Family, sharded: ShardedParameters | None
) -> dict[str, Parameter]:
    """Return the trained parameters by name; of divided weights, this rank's parts."""
    if sharded is not None:
        return sharded.local
    return {n: p for n, p in family.transformer.named_parameters() if p.requires_grad}


def enable_gradient_checkpointing(family: Family, unplanned: str, emit: Emit) -> None:
    """Recompute activations in backward, unless a memory plan decides that for each block."""
    if unplanned:
        family.enable_gradient_checkpointing()
    else:
        text = "plan: train.gradient_checkpointing has no effect: the plan decides for each block"
        emit(Notice(text))


def reason_unplanned(run: RunFile, device: torch.device) -> str:
    """Return the reason why no memory plan is made; an empty string if one is made.

    A memory plan decides what is streamed from host memory and what is recomputed. Without one, the
    whole model is on the device, or this rank's part of it.
    """
    if run.plan == "off":
        return "plan is off"
    if device.type != "cuda" and (run.plan == "auto" or run.plan.device_memory is None):
        return "there is no GPU, and plan.device_memory is not set"
    return ""


def compares_blocks(
    run: RunFile, unplanned: str, layout: Layout, emit: Emit, *, is_asked: bool = False
) -> bool:
    """Return True if blocks are compared with plain copies of them.

    A single process without a plan computes what the plain copy would, so its first step compares
    none; `gracetune check gradients` does (`is_asked`).
    """
    if not run.train.check_gradients:
        return False
    if layout.is_sharded:
        text = "the first step checks that all tensors have gradients, but compares no block with "
        emit(Notice(f"{text}a plain copy, because no rank has a whole block"))
        return False
    return is_asked or not unplanned or layout.ranks.world_size > 1


def idle_plan_notice(run: RunFile, unplanned: str, *, is_sharded: bool) -> Notice | None:
    """Return the warning about settings that ask a plan for what it cannot do; None: all are met.

    Without a plan, `unplanned_notice` names all settings.
    """
    if unplanned or isinstance(run.plan, str):
        return None
    asked = [name for name in ("stream", "offload") if name in run.plan.model_fields_set]
    asked = [name for name in asked if getattr(run.plan, name)]
    if is_sharded:
        reason = "the ranks divide the weights (distributed.strategy), and gather them themselves"
    elif run.adapter is None and "stream" in asked:
        asked, reason = ["stream"], "all weights are trained, and only frozen weights are streamed"
    else:
        return None
    if not asked:
        return None
    names = ", ".join(f"plan.{name} (true)" for name in asked)
    return Notice(f"no effect: {names}, because {reason}", level="warning", fallback=True)


WHOLE_MODEL = "The whole model is on the device; nothing is streamed, offloaded or compiled."


def unplanned_notice(run: RunFile, reason: str, effect: str = WHOLE_MODEL) -> Notice:
    """Return the notice that no memory plan is made: a warning if the run file limits the plan."""
    # `plan.batch` is for the command `gracetune plan` only.
    asked = [] if isinstance(run.plan, str) else sorted(run.plan.model_fields_set - {"batch"})
    if not asked:
        return Notice(f"plan: none, because {reason}. {effect}")
    settings = run.plan.model_dump() if not isinstance(run.plan, str) else {}
    names = ", ".join(f"plan.{name} ({format_value(settings[name])})" for name in asked)
    text = f"no effect: {names}. There is no memory plan, because {reason}. {effect}"
    return Notice(text, level="warning", fallback=True)


# Autocast is made for fp32 weights. For a transformer that is already in bf16 it only computes
# norms and what follows them in fp32, which costs time and memory that the plan does not contain.
# A planned or divided bf16 transformer runs without autocast, as in diffusers' own pipelines.

BF16_ARGUMENTS = (
    "hidden_states",
    "encoder_hidden_states",
    "pooled_projections",
    "global_hidden_states",
)
"""Arguments of a transformer's forward that a hook casts to bf16, because matmuls use them.
Timesteps and positions are not cast: each transformer rounds those itself."""


def prepare_transformer(
    accelerator: Accelerator, transformer: nn.Module, *, is_placed: bool
) -> nn.Module:
    """Wrap the transformer with Accelerate, for mixed precision.

    `is_placed` is True if a plan, or the division among ranks, has placed the weights.
    """
    autocast = accelerator.autocast_handler
    in_bf16 = accelerator.mixed_precision == "bf16" and runs_in_dtype(transformer, torch.bfloat16)
    if is_placed and in_bf16:
        accelerator.autocast_handler = AutocastKwargs(enabled=False)
        transformer.register_forward_pre_hook(_cast_arguments, with_kwargs=True)
    wrapped: nn.Module = accelerator.prepare_model(
        transformer,
        device_placement=not is_placed,
        evaluation_mode=True,  # no DistributedDataParallel: `train_step` reduces gradients itself
    )
    accelerator.autocast_handler = autocast
    return wrapped


def _cast_arguments(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Forward pre-hook that casts inputs to bf16; the caller's own tensors are not changed."""
    return tuple(map(_to_bf16, args[:1])) + args[1:], {
        name: _to_bf16(value) if name in BF16_ARGUMENTS else value for name, value in kwargs.items()
    }


def _to_bf16(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_float else value


# Attention autotuning


def one_batch_per_bucket(
    run: RunFile, pipeline: DataPipeline, held_out: Iterable[Batch] = ()
) -> list[Callable[[], Batch]]:
    """Return, for each bucket, a function that loads one full batch; the largest bucket first.

    Some buckets have only held-out samples, so a held-out batch of each shape is appended.
    """
    count = run.train.batch_size
    by_size = [partial(pipeline.load, (d,) * count) for d in pipeline.order.one_draw_per_size()]
    by_shape = {batch.latents.shape: batch for batch in held_out}
    return [*by_size, *(partial(_identity, batch) for batch in by_shape.values())]


def attention_shapes_key(
    run: RunFile, family: Family, pipeline: DataPipeline, precision: str
) -> str:
    """Return a text with model, precision, batch size and buckets: all that sets attention shapes.

    It is stored with the attention backend that was fastest. If it changes, the backends are timed
    again.
    """
    sizes = [draw.size for draw in pipeline.order.one_draw_per_size()]
    return f"{family.name} in {precision}, {run.train.batch_size} of each of {sizes}"


def choose_attention(
    state: TrainState,
    pipeline: DataPipeline,
    validation: ValidationSetup | None,
    saved: str,
    emit: Emit,
) -> None:
    """Switch to the fastest attention backend, if the run file leaves the choice to the machine.

    `saved` is the backend of the checkpoint that the run resumes from.
    """
    run, family, accelerator = state.run, state.family, state.accelerator
    if run.model.attention_mechanism != "auto" or accelerator.device.type != "cuda":
        return
    if state.layout.is_sharded:
        text = "attention backends are not timed, because no rank has the whole model"
        emit(Notice(f"{text}; model.attention_mechanism chooses one"))
        return
    autotune_attention(
        family,
        accelerator,
        one_batch_per_bucket(run, pipeline, () if validation is None else validation.held_out),
        attention_shapes_key(run, family, pipeline, accelerator.mixed_precision),
        Path(run.output_dir),
        emit,
        saved,
        compiled_graphs_folder(),
    )


def _identity(batch: Batch) -> Batch:
    return batch
