"""Build the `Session` of a run: load the model, prepare the data, place both in memory.

`run.py` calls `build_session` and passes the session to the training loop in `loop.py`. Every
choice that depends on the machine, on installed packages or on the run file is made here, once, and
logged as a `Notice`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AutocastKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import Tensor

from gracetune.adapters.compute.dropout import DropoutSeeds
from gracetune.adapters.compute.fused_lora import runs_in_dtype
from gracetune.cache.batch_transfer import INITIAL_DEPTH, build_batch_transfer
from gracetune.cache.encode import encoding_ranks
from gracetune.config.checks import trains_in_bf16
from gracetune.config.environment import process_environment, sharding_engine
from gracetune.config.parse_text import format_value
from gracetune.data.dataset_checks import check_data
from gracetune.data.pipeline import DataPipeline
from gracetune.distributed.gradients import GradientReducer
from gracetune.distributed.ranks import SINGLE, rendezvous_method
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.memory.oversubscription import GcFreeze
from gracetune.memory.stats import Tier
from gracetune.models.attention_backends import set_attention_backend
from gracetune.models.family import load_family, transformers_of
from gracetune.models.quantize import check_quantizable, quantize_blocks
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.optim.build import build_optimizer, state_nbytes_per_element_of
from gracetune.optim.offloaded_state import OptimizerStepper
from gracetune.plan.attention_autotune import autotune_attention
from gracetune.plan.bucket_seconds import (
    BucketSeconds,
    bucket_seconds,
    sizes_to_trace,
    token_counts,
)
from gracetune.train.batch_size_ramp import (
    build_ramp,
    micro_batches_per_step,
    ramp_notes,
    samples_in_step,
)
from gracetune.train.checkpoint import CHECKPOINT_FOLDER
from gracetune.train.execution_record import (
    POSITIONAL,
    execution_changes,
    execution_record,
)
from gracetune.train.experts import (
    build_expert_schedule,
    drawn_token_counts,
    expected_token_counts,
)
from gracetune.train.export import (
    check_exportable,
    export_adapter,
    export_result,
    tools_for_adapter,
)
from gracetune.train.gradient_check import build_references, random_block
from gracetune.train.objective import min_snr_notes
from gracetune.train.run_identity import STEP_SIZE_SETTINGS, check_same_run, run_identity
from gracetune.train.skipped_steps import SKIPPED_KEY, build_skips
from gracetune.train.state import restore_optimizer, restore_rng, restore_weights, seed_rng
from gracetune.train.step import Ema, PositionalRng, TrainProgress, TrainState, derive_seed
from gracetune.train.step_recorder import build_recorder, frozen_norms
from gracetune.train.validate import build_validation, check_validation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from gracetune.cache.batch_transfer import BatchTransfer
    from gracetune.cache.encode import Ranks
    from gracetune.config.schema import RunFile
    from gracetune.data.batch_order import BatchSeconds
    from gracetune.data.sample import Batch, Sample, Shape
    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.dispatcher import Emit
    from gracetune.events.run_control import RunControl
    from gracetune.models.family import Family
    from gracetune.offload.copy_engine import CopyEngine
    from gracetune.plan.controller import PlanController
    from gracetune.train.batch_size_ramp import AccumulationRamp
    from gracetune.train.block_check import BlockReference
    from gracetune.train.checkpoint import Snapshot
    from gracetune.train.experts import ExpertSchedule
    from gracetune.train.export import AdaptedModules, ExportedResult
    from gracetune.train.gradient_check import ChooseBlocks
    from gracetune.train.run import SignalHandler
    from gracetune.train.validate import ValidationSetup


SUPPORTED_ENGINES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
FP32_NBYTES = 4
ADAPTER_NAMES = {
    "lora": "LoRA",
    "dora": "DoRA",
    "locon": "LoCon",
    "loha": "LoHa",
    "lokr": "LoKr",
    "full": "full-matrix adapter",
}


@dataclass(frozen=True, slots=True)
class Session:
    """Everything the training loop needs: the loaded model, the data and the run's services."""

    state: TrainState
    pipeline: DataPipeline
    ramp: AccumulationRamp | None
    """The ramp of the effective batch size. None: every step has the same number of
    micro-batches."""
    validation: ValidationSetup | None
    """Encoded prompts and held-out samples for validation. None: the run never validates."""
    checkpoints: Path
    """Folder that contains all checkpoints of the run."""
    identity: Mapping[str, object]
    """The settings and content digests that a checkpoint must match to be resumed."""
    batch_transfer: BatchTransfer
    control: RunControl
    signals: SignalHandler
    emit: Emit
    gc_freeze: GcFreeze
    """Excludes objects that live as long as the run from Python's garbage collection."""
    base_weights: str
    """The digest of the model's weights before training."""
    adapted_modules: AdaptedModules
    """Modules that have an adapter, by transformer (Wan 2.2 has two); empty without an adapter."""
    batch_seconds: BatchSeconds | None = None
    """Planned seconds of a micro-batch, by sample size and number of samples, with which steps are
    divided among ranks. None: all micro-batches take equally long."""
    references: list[BlockReference] = field(default_factory=list)
    """Plain copies of the blocks whose gradients are compared in the first step."""
    plan_controller: PlanController | None = None
    """Chooses which weights and activations are kept in host memory, not device memory. None: the
    whole transformer is on the device."""

    def micro_batches(self, consumed: int) -> int:
        """Return the micro-batches of the next step over all ranks, when `consumed` are done."""
        if self.ramp is not None:
            return self.ramp.accumulation(consumed)
        return micro_batches_per_step(self.state.run, self.state.ranks.world_size)

    def execution_record(self) -> dict[str, object]:
        """Return the device, the versions and the plan that steps are computed with now."""
        return execution_record(
            self.state.family,
            self.state.accelerator.device,
            self.plan_controller,
            positional=self.state.dropout is not None,
        ) | ({} if self.state.skips is None else {SKIPPED_KEY: self.state.skips.steps})

    def resume(self, snapshot: Snapshot | None) -> TrainProgress:
        """Load a checkpoint into the model, optimizer and RNGs, and return its counters.

        Without a checkpoint, the run starts at step 0.
        """
        if snapshot is None:
            return TrainProgress()
        snapshot.check_unchanged()
        state, tensors = self.state, snapshot.tensors
        ranks = state.ranks.world_size
        check_same_run(snapshot.identity, self.identity, snapshot.num_ranks, ranks)
        if snapshot.num_ranks != ranks:
            self._report_other_ranks(snapshot)
        changes = execution_changes(snapshot.execution, self.execution_record())
        if changes:
            text = "the result may differ in rounding from that of an uninterrupted run: "
            self.emit(Notice(f"{text}{'; '.join(changes)}", level="warning", fallback=True))
        restore_weights(state.parameters, tensors["weights"])
        restore_optimizer(
            state.optimizer, state.parameters, tensors["optimizer"], state.stepper.load_state_dict
        )
        if state.ema is not None:
            restore_weights(state.ema.averages, tensors["ema"])
        rng = tensors.get(f"generators-{state.ranks.rank}")
        if rng is not None:
            restore_rng(rng)
        elif state.dropout is None:
            text = "the checkpoint has no RNG state for the added ranks: their dropout is reseeded"
            self.emit(Notice(text, level="warning", fallback=True))
        return snapshot.progress

    def _report_other_ranks(self, snapshot: Snapshot) -> None:
        """Say whether steps have as many samples as with the ranks that saved the checkpoint.

        Of a ramp, the next step and the end are compared.
        """
        saved_ranks, ranks, run = snapshot.num_ranks, self.state.ranks.world_size, self.state.run
        settings = {
            name.removeprefix("train."): snapshot.identity.get(name) for name in STEP_SIZE_SETTINGS
        }
        saved_run = run.model_copy(update={"train": run.train.model_copy(update=settings)})
        text = f"the checkpoint was saved by {saved_ranks} ranks and is resumed by {ranks}"
        for consumed in (snapshot.progress.consumed, sys.maxsize):
            before = samples_in_step(saved_run, saved_ranks, consumed)
            now = samples_in_step(run, ranks, consumed)
            if before != now:
                text += f": an optimizer step now averages over {now} samples instead of {before}"
                if self.ramp is None:
                    text += f". Set train.effective_batch_size: {before} to keep the number"
                self.emit(Notice(text, level="warning"))
                return
        self.emit(Notice(f"{text}; each optimizer step has the same samples as before"))

    def export(self) -> ExportedResult:
        """Write the trained model or adapter."""
        return export_result(self.state, self.adapted_modules, self.base_weights, self.emit)

    def export_adapter(self, folder: Path) -> None:
        """Write the adapter as `export` does, to another folder."""
        export_adapter(self.state, self.adapted_modules, self.base_weights, folder)

    def tools_for_adapter(self) -> tuple[str, ...]:
        """Return the names of the tools that load the adapter; none without an adapter."""
        return tools_for_adapter(self.state, self.adapted_modules)

    def clear_device_memory(self) -> None:
        """Free memory that torch's allocator caches, if the run has a plan for this memory."""
        if self.plan_controller is not None:
            self.plan_controller.clear_cached_memory()

    def close(self) -> None:
        """Release the offloaded optimizer state and the streamed weights."""
        self.state.stepper.close()
        if self.plan_controller is not None:
            self.plan_controller.close()


def build_session(
    run: RunFile,
    accelerator: Accelerator,
    emit: Emit,
    control: RunControl,
    signals: SignalHandler,
    resumed: Mapping[str, Any] | None = None,
    checked_blocks: ChooseBlocks | None = None,
    ranks: RankGroup = SINGLE,
) -> Session:
    """Load the model, prepare the data and place both in memory.

    `resumed` is the execution record of the checkpoint to resume from, whose plan and attention
    backend are used again; it is empty for a checkpoint of an earlier version, and None for a new
    run. `checked_blocks` chooses the blocks whose gradients can be compared with plain copies; by
    default, one block is chosen at random.

    Checks that need only the run file and the model come first, so that a mistake in the run file
    is reported before the data are encoded, which can take an hour.
    """
    folder, device = Path(run.output_dir), with_index(accelerator.device)
    ramp = build_ramp(run, ranks.world_size)
    if ramp is not None:
        _emit_all(emit, ramp_notes(ramp))

    # The model
    family = load_family(run.model, emit, is_first=ranks.local_rank == 0)
    base_weights = family.weights_digest()
    _check_same_model(ranks, base_weights)
    _emit_all(emit, min_snr_notes(run.train, family.prediction))
    schedule = build_expert_schedule(run.train, family.boundary, expected_token_counts(run, family))
    check_data(run, family)
    check_validation(run, family)
    norms = frozen_norms(family)
    quantize_frozen(run, family, emit)
    adapted_modules = make_trainable(run, family, schedule, emit)
    is_positional = resumed is None or resumed.get("dropout") == POSITIONAL
    dropout = DropoutSeeds(family.transformer) if is_positional else None
    unplanned = reason_unplanned(run, device)
    compares = compares_blocks(run, unplanned, ranks.world_size)
    references = (
        build_references(family, checked_blocks or partial(random_block, ranks)) if compares else []
    )
    if run.train.gradient_checkpointing:
        _enable_gradient_checkpointing(family, unplanned, emit)
    if unplanned:
        _move_to_device(run, family, device, unplanned, emit)

    # The optimizer. Loading the model and injecting adapters reseed the global RNGs, so the run's
    # own seed comes after them.
    seed_rng(derive_seed(run.seed, "process", ranks.rank))
    parameters = {n: p for n, p in family.transformer.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(parameters, run.optimizer, derive_seed(run.seed, "rounding"))

    # The data. Everything that can be wrong in the run file has been found by now.
    family.to(device)
    gc_freeze = GcFreeze()
    transfer = build_batch_transfer(run.gh200_optimizations, device, emit, gc_freeze)
    pipeline = DataPipeline(run, family, transfer, folder, emit, _encoding_ranks(run, ranks))
    _warn_of_truncated_captions(family, pipeline.train_samples, emit)
    schedule = build_expert_schedule(
        run.train, family.boundary, drawn_token_counts(pipeline.order, family)
    )
    if schedule is not None and family.boundary is not None:
        emit(Notice(schedule.describe(family.boundary)))
    validation = build_validation(run, family, pipeline, emit)
    family.release_text_encoder()

    # Memory: either a plan decides where weights, activations and optimizer state live, or the
    # transformer simply stays on the device.
    copy_engine = open_copy_engine(device, transfer.link)
    stepper = _build_stepper(run, optimizer, copy_engine, unplanned, emit)
    controller = None
    if not unplanned:
        # Imported here, because the planner takes seconds to import.
        from gracetune.plan.planner import PlannerInputs, plan_run

        inputs = PlannerInputs(
            load_largest=lambda: pipeline.load(pipeline.order.largest_draw()),
            batches_ahead=batches_ahead(run),
            convert_to_fp8=partial(
                _convert_to_fp8, run, family, pipeline, device, references, emit, ranks
            ),
            saved_plan=(resumed or {}).get("plan"),
            load_sizes=partial(_load_traced_sizes, family, pipeline, ranks),
            ranks=ranks,
        )
        controller = plan_run(run, family, inputs, stepper, transfer.link, device, gc_freeze, emit)
    state = TrainState(
        run=run,
        family=family,
        transformer=prepare_transformer(
            accelerator, family.transformer, is_planned=controller is not None
        ),
        parameters=parameters,
        optimizer=optimizer,
        stepper=stepper,
        ema=Ema(parameters, run.train.ema_decay) if run.train.ema_decay else None,
        accelerator=accelerator,
        rng=PositionalRng(run.seed, device),
        expert_schedule=schedule,
        reducer=GradientReducer(ranks, device),
        ranks=ranks,
        dropout=dropout,
        recorder=build_recorder(device, family, parameters, adapted_modules, norms),
        skips=build_skips(run, ranks, resumed),
    )
    state.transformer.train()
    register_memory_roles(state, transfer, controller)
    if run.model.attention_mechanism == "auto" and device.type == "cuda":
        held_out = () if validation is None else validation.held_out
        autotune_attention(
            family,
            accelerator,
            one_batch_per_bucket(run, pipeline, held_out),
            attention_shapes_key(run, family, pipeline, accelerator.mixed_precision),
            folder,
            emit,
            (resumed or {}).get("attention", ""),
        )
    return Session(
        state=state,
        pipeline=pipeline,
        ramp=ramp,
        validation=validation,
        checkpoints=folder / CHECKPOINT_FOLDER,
        identity=run_identity(
            run, pipeline.train_samples, base_weights, accelerator.mixed_precision
        ),
        batch_transfer=transfer,
        batch_seconds=_agree_on_batch_seconds(run, family, pipeline, controller, ranks),
        control=control,
        signals=signals,
        emit=emit,
        gc_freeze=gc_freeze,
        base_weights=base_weights,
        adapted_modules=adapted_modules,
        references=references,
        plan_controller=controller,
    )


# Ranks and precision


def start_accelerator(run: RunFile) -> Accelerator:
    """Create the Accelerator: connect to the other ranks, if any, and set the precision."""
    engine = sharding_engine(process_environment())
    if engine:  # checked first: Accelerate's own error does not say what to change
        raise _unsupported_engine(engine)
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
                choose_backend(run, process_environment()),
                init_method=rendezvous_method(process_environment()),
                timeout=timedelta(seconds=run.distributed.timeout_s),
            ),
        ],
    )
    if accelerator.distributed_type not in SUPPORTED_ENGINES:
        raise _unsupported_engine(accelerator.distributed_type.value)
    return accelerator


def _unsupported_engine(name: str) -> ConfigError:
    return ConfigError(
        f"Accelerate is configured for {name}, but gracetune trains in one process or on "
        "data-parallel ranks, and streams weights that do not fit. Change the configuration file "
        "given to accelerate launch."
    )


def resolve_precision(run: RunFile) -> str:
    """Return the precision for Accelerate: `bf16`, or `no` for fp32.

    `auto` is bf16 on a GPU that supports it, else fp32. `fp16` is replaced by bf16.
    """
    precision = run.train.mixed_precision
    if precision == "auto":
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    return "bf16" if precision == "fp16" else precision


def choose_backend(run: RunFile, environment: Mapping[str, str]) -> str | None:
    """Return the backend of the ranks' gradients; None for the default of their devices.

    NCCL refuses two ranks on one GPU.
    """
    backend = run.distributed.backend
    if backend != "auto":
        return backend
    num_gpus = torch.cuda.device_count()
    num_local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return "gloo" if 0 < num_gpus < num_local else None


def _check_same_model(ranks: RankGroup, digest: str) -> None:
    """Raise if the ranks have loaded different weights; `digest` is that of this rank's."""
    digests = ranks.gather(digest)
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is not None:
        raise ConfigError(
            f"{ranks.name(other)} has loaded other weights than {ranks.name(0)}. Let model.path "
            "name the same files on every machine."
        )


def _encoding_ranks(run: RunFile, ranks: RankGroup) -> Ranks:
    """Return the ranks that encode the data, with a new folder for their unreadable samples."""
    reports = Path(run.output_dir) / "ranks" / ranks.broadcast(uuid4().hex)
    return encoding_ranks(ranks, reports, run.distributed.timeout_s)


def _load_traced_sizes(
    family: Family, pipeline: DataPipeline, ranks: RankGroup
) -> Mapping[Shape, Batch]:
    """Load one sample of each size whose time the planner must know to divide steps among ranks."""
    sizes = list(pipeline.order.draws_by_size())
    if ranks.world_size == 1 or len(sizes) == 1:
        return {}
    return pipeline.load_sizes(sizes_to_trace(token_counts(family, sizes)))


def _agree_on_batch_seconds(
    run: RunFile,
    family: Family,
    pipeline: DataPipeline,
    controller: PlanController | None,
    ranks: RankGroup,
) -> BatchSeconds | None:
    """Return the planned seconds of a micro-batch, the same on all ranks.

    None if there is nothing to balance: one rank, or one sample size.
    """
    sizes = list(pipeline.order.draws_by_size())
    if ranks.world_size == 1 or len(sizes) == 1:
        return None
    traced = {} if controller is None else controller.size_seconds
    table = bucket_seconds(family, sizes, run.train.batch_size, traced)
    return BucketSeconds(ranks.broadcast(table.rows))


def with_index(device: torch.device) -> torch.device:
    """Turn `cuda` into `cuda:0`: tensors report an index, and some torch calls require one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# Preparing the model


def make_trainable(
    run: RunFile, family: Family, schedule: ExpertSchedule | None, emit: Emit
) -> AdaptedModules:
    """Freeze the model, then add the adapter or, without one, unfreeze the trained transformers.

    A run may train one or both transformers of Wan 2.2. Returns the modules that have an adapter.
    """
    transformers = transformers_of(family.transformer)
    trained = {
        expert: transformer
        for expert, transformer in transformers.items()
        if schedule is None or expert in schedule.windows
    }
    for transformer in transformers.values():
        set_attention_backend(transformer, run.model.attention_mechanism)
        transformer.requires_grad_(False)
    if run.adapter is None:
        for transformer in trained.values():
            transformer.requires_grad_(True)
        _keep_weights_in_fp32(run, trained.values(), emit)
        return {}
    from gracetune.adapters.inject import add_adapter  # peft takes seconds to import

    seed = derive_seed(run.seed, "adapter") % 2**31
    modules = add_adapter(trained, run.adapter, family.adapter_targets, seed)
    check_exportable(trained, modules, family.name)
    count = sum(map(len, modules.values()))
    rank = "" if run.adapter.kind == "full" else f" rank {run.adapter.rank}"
    emit(Notice(f"adapter: {ADAPTER_NAMES[run.adapter.kind]}{rank} on {count} modules"))
    return modules


def _keep_weights_in_fp32(run: RunFile, transformers: Iterable[nn.Module], emit: Emit) -> None:
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
    for parameter in narrow:
        parameter.data = parameter.data.float()
    text = f"{len(narrow)} trained tensors are converted to fp32, because bf16 would round updates "
    emit(Notice(f"{text}away; model.dtype: bfloat16 with adamw and no ema_decay halves their size"))


def _convert_to_fp8(
    run: RunFile,
    family: Family,
    pipeline: DataPipeline,
    device: torch.device,
    references: Iterable[BlockReference],
    emit: Emit,
    ranks: RankGroup,
) -> None:
    from gracetune.train.fp8_calibration import convert_frozen_layers

    convert_frozen_layers(run, family, pipeline, device, emit, ranks)
    for reference in references:
        reference.add_fp8()


def quantize_frozen(run: RunFile, family: Family, emit: Emit) -> None:
    """Quantize the linear layers of the blocks, if `model.quantize` says so."""
    kind = run.model.quantize
    if kind == "none":
        return
    check_quantizable(kind, run.adapter)
    count = quantize_blocks(family.blocks(), kind)
    emit(Notice(f"{count} linear layers of the frozen model are quantized to {kind}"))


def _move_to_device(
    run: RunFile, family: Family, device: torch.device, unplanned: str, emit: Emit
) -> None:
    if run.model.frozen_compute == "fp8":
        raise ConfigError(
            f"model.frozen_compute is fp8, which needs a memory plan, but {unplanned}. "
            "Set it to bf16, or set plan: auto."
        )
    if run.plan != "off":
        emit(unplanned_notice(run, unplanned))
    family.transformer.to(device)


def _enable_gradient_checkpointing(family: Family, unplanned: str, emit: Emit) -> None:
    if unplanned:
        family.enable_gradient_checkpointing()
    else:
        emit(Notice("train.gradient_checkpointing has no effect: the plan decides for each block"))


def reason_unplanned(run: RunFile, device: torch.device) -> str:
    """Return the reason why no memory plan is made; an empty string if one is made.

    A memory plan decides what is streamed from host memory. Without one, the whole model is on the
    device.
    """
    if run.plan == "off":
        return "plan is off"
    if device.type != "cuda" and (run.plan == "auto" or run.plan.device_memory is None):
        return "there is no GPU, and plan.device_memory is not set"
    return ""


def compares_blocks(run: RunFile, unplanned: str, num_ranks: int) -> bool:
    """Return True if the first step compares a block with a plain copy of it.

    A single process without a plan computes what the plain copy would.
    """
    is_changed = not unplanned or num_ranks > 1
    return run.train.check_gradients and is_changed


def unplanned_notice(run: RunFile, reason: str) -> Notice:
    """Return the notice that no memory plan is made: a warning if the run file limits the plan."""
    effect = "The whole model is on the device; nothing is streamed, offloaded or compiled."
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
# A planned bf16 transformer therefore runs without autocast, as in diffusers' own pipelines.

BF16_ARGUMENTS = (
    "hidden_states",
    "encoder_hidden_states",
    "pooled_projections",
    "global_hidden_states",
)
"""Arguments of a transformer's forward that a hook casts to bf16, because matmuls use them.
Timesteps and positions are not cast: each transformer rounds those itself."""


def prepare_transformer(
    accelerator: Accelerator, transformer: nn.Module, *, is_planned: bool
) -> nn.Module:
    """Wrap the transformer with Accelerate, for mixed precision."""
    autocast = accelerator.autocast_handler
    in_bf16 = accelerator.mixed_precision == "bf16" and runs_in_dtype(transformer, torch.bfloat16)
    if is_planned and in_bf16:
        accelerator.autocast_handler = AutocastKwargs(enabled=False)
        transformer.register_forward_pre_hook(_cast_arguments, with_kwargs=True)
    wrapped: nn.Module = accelerator.prepare_model(
        transformer,
        device_placement=not is_planned,
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


def batches_ahead(run: RunFile) -> int:
    """Return the number of prefetched batches that need device memory at the same time."""
    depth = run.cache_config.prefetch_depth
    return INITIAL_DEPTH if depth == "auto" else depth


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


def _identity(batch: Batch) -> Batch:
    return batch


# Memory


def _build_stepper(
    run: RunFile, optimizer: Optimizer, copy_engine: CopyEngine, unplanned: str, emit: Emit
) -> OptimizerStepper:
    """Build the object that runs the optimizer's step, with its state in device or host memory.

    `unplanned` is the reason for having no memory plan, or empty. A plan decides where the state
    is kept; without one, the setting `optimizer.state` does.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nbytes = 0.0 if unplanned else state_nbytes_per_element_of(run.optimizer, parameters)
    stepper = OptimizerStepper(optimizer, copy_engine, nbytes)
    if unplanned and run.optimizer.state == "host":
        stepper.set_host_share(1.0)
        emit(Notice("the optimizer state is kept in host memory"))
    return stepper


def register_memory_roles(
    state: TrainState, transfer: BatchTransfer, controller: PlanController | None
) -> None:
    """Let `transfer` report the bytes of weights, EMA and optimizer state in its memory statistics.

    Streamed weights count twice: in host memory, and in the device slots they are copied to.
    """
    frozen = [p for p in state.family.transformer.parameters() if not p.requires_grad]
    averages = list(state.ema.averages.values()) if state.ema is not None else []
    device_type = state.accelerator.device.type

    def on_device() -> int:
        return _nbytes(p for p in frozen if p.device.type == device_type)

    def in_slots() -> int:
        return 0 if controller is None else controller.slots_nbytes

    transfer.track_memory("weights", lambda: on_device() + in_slots())
    transfer.track_memory(
        "weights_in_host_memory", lambda: _nbytes(frozen) - on_device(), Tier.HOST
    )
    transfer.track_memory("trained", lambda: _nbytes(state.parameters.values()))
    transfer.track_memory("averages", lambda: _nbytes(averages))
    transfer.track_memory("optimizer", lambda: state.stepper.device_nbytes)
    transfer.track_memory("optimizer_in_host_memory", lambda: state.stepper.host_nbytes, Tier.HOST)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# Reports


def _warn_of_truncated_captions(family: Family, samples: Sequence[Sample], emit: Emit) -> None:
    captions = list(dict.fromkeys(sample.caption for sample in samples))
    truncated = family.truncated_captions(captions)
    if truncated:
        text = f"{len(truncated)} of {len(captions)} captions are longer than {family.name} reads; "
        emit(Notice(f"{text}the rest is ignored. First: {truncated[0][:80]!r}", level="warning"))


def _emit_all(emit: Emit, texts: Iterable[str]) -> None:
    for text in texts:
        emit(Notice(text))
