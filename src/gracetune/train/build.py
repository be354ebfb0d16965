"""Build the `Session` of a run: load the model, prepare the data, place both in memory.

`run.py` calls `build_session` and passes the session to the training loop in `loop.py`. Every
choice that depends on the machine, on installed packages or on the run file is made here, once, and
logged as a `Notice`.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from gracetune.adapters.compute.dropout import DropoutSeeds
from gracetune.cache.batch_transfer import INITIAL_DEPTH, build_batch_transfer
from gracetune.cache.encode import encoding_ranks
from gracetune.config.schema import PlanSection
from gracetune.data.dataset_checks import check_data
from gracetune.data.pipeline import DataPipeline
from gracetune.distributed.gradients import GradientReducer
from gracetune.distributed.layout import SINGLE_LAYOUT
from gracetune.distributed.sharding import ShardedReducer, local_nbytes
from gracetune.errors import ConfigError
from gracetune.events.phase_timer import PhaseTimer
from gracetune.events.types import Notice
from gracetune.memory.oversubscription import GcFreeze, hard_reclamation
from gracetune.memory.stats import Tier
from gracetune.models.family import load_family
from gracetune.offload.checkpointing import start_compiler
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.optim.build import build_optimizer, state_nbytes_per_element_of
from gracetune.optim.offloaded_state import OptimizerStepper
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
from gracetune.train.checkpoint_writer import CheckpointWriter
from gracetune.train.execution_record import (
    POSITIONAL,
    SPLIT,
    execution_changes,
    execution_record,
    layout_change,
)
from gracetune.train.experts import (
    build_expert_schedule,
    drawn_token_counts,
    expected_token_counts,
)
from gracetune.train.export import (
    collect_adapter,
    export_result,
    tools_for_adapter,
)
from gracetune.train.gradient_check import build_references, random_block
from gracetune.train.managed_overflow import (
    STEP_ROLES,
    ManagedRun,
    NoManagedRun,
    build_managed_run,
    device_full,
    managed_memory_limit,
    place_model,
)
from gracetune.train.objective import min_snr_notes
from gracetune.train.prepare_model import (
    choose_attention,
    compares_blocks,
    divide_tokens,
    divide_weights,
    enable_gradient_checkpointing,
    gathered_dtype,
    make_trainable,
    prepare_transformer,
    quantize_frozen,
    reason_unplanned,
    trained_parameters_of,
)
from gracetune.train.run_identity import STEP_SIZE_SETTINGS, check_same_run, run_identity
from gracetune.train.skipped_steps import SKIPPED_KEY, build_skips
from gracetune.train.state import restore_optimizer, restore_rng, restore_weights, seed_rng
from gracetune.train.step import (
    PositionalRng,
    TrainProgress,
    TrainState,
    derive_seed,
    rounding_seed,
)
from gracetune.train.step_recorder import build_recorder, frozen_norms
from gracetune.train.validate import build_validation, check_validation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from accelerate import Accelerator
    from torch import Tensor
    from torch.optim import Optimizer

    from gracetune.cache.batch_transfer import BatchTransfer
    from gracetune.cache.encode import Ranks
    from gracetune.config.schema import RunFile
    from gracetune.data.batch_order import BatchSeconds
    from gracetune.data.sample import Batch, Sample, Shape
    from gracetune.distributed.layout import Layout
    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.dispatcher import Emit
    from gracetune.events.run_control import RunControl
    from gracetune.memory.managed_roles import ManagedRole
    from gracetune.models.family import Family
    from gracetune.offload.copy_engine import CopyEngine
    from gracetune.plan.controller import PlanController
    from gracetune.plan.planner_input import BatchShapes, TracedCopy
    from gracetune.train.batch_size_ramp import AccumulationRamp
    from gracetune.train.block_check import BlockReference
    from gracetune.train.checkpoint import Snapshot
    from gracetune.train.experts import ExpertSchedule
    from gracetune.train.export import AdaptedModules, CollectedAdapter, ExportedResult
    from gracetune.train.gradient_check import ChooseBlocks
    from gracetune.train.run import SignalHandler
    from gracetune.train.validate import ValidationSetup


NO_MANAGED_RUN = NoManagedRun()


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
    writer: CheckpointWriter
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
    managed: ManagedRun | NoManagedRun = NO_MANAGED_RUN
    """Moves more to managed memory if the device is full, if the run has managed memory."""

    def micro_batches(self, consumed: int) -> int:
        """Return the micro-batches of the next step over all ranks, when `consumed` are done."""
        if self.ramp is not None:
            return self._ramped_micro_batches(self.ramp, consumed)
        return micro_batches_per_step(self.state.run, self.state.layout.data_size)

    def _ramped_micro_batches(self, ramp: AccumulationRamp, consumed: int) -> int:
        """Return the micro-batches of a step of the ramp: at least one sample for each rank."""
        count, order = ramp.accumulation(consumed), self.pipeline.order
        while count < ramp.world_size and order.num_samples(consumed, count) < ramp.world_size:
            count += 1
        return count

    def execution_record(self) -> dict[str, object]:
        """Return the device, the versions and the plan that steps are computed with now."""
        return execution_record(
            self.state.family,
            self.state.accelerator.device,
            self.plan_controller,
            self.state.layout.describe(),
            positional=self.state.dropout is not None,
            splits=self.ramp is None or self.ramp.is_split,
            overflowed=self.managed.overflowed,
        ) | ({} if self.state.skips is None else {SKIPPED_KEY: self.state.skips.steps})

    def resume(self, snapshot: Snapshot | None) -> TrainProgress:
        """Load a checkpoint into the model, optimizer and RNGs, and return its counters.

        Without a checkpoint, the run starts at step 0.
        """
        if snapshot is None:
            return TrainProgress()
        snapshot.check_unchanged(self.state.ranks)
        state, tensors = self.state, snapshot.tensors
        check_same_run(snapshot.identity, self.identity, snapshot.num_ranks, state.layout.data_size)
        if snapshot.num_ranks != state.layout.data_size:
            self._report_other_ranks(snapshot)
        other_layout = layout_change(snapshot.execution, self.execution_record())
        if other_layout:
            self.emit(Notice(other_layout))
        changes = execution_changes(snapshot.execution, self.execution_record())
        if changes:
            text = "the result may differ in rounding from that of an uninterrupted run: "
            self.emit(Notice(f"{text}{'; '.join(changes)}", level="warning", fallback=True))
        while reason := self._restore(tensors):
            if not self.free_device_memory(reason, snapshot.progress.step):
                raise device_full(reason, self.managed)
        rng = tensors.get(f"generators-{state.layout.data_rank}")
        if rng is not None:
            restore_rng(rng)
        elif state.dropout is None:
            text = "the checkpoint has no RNG state for the added ranks: their dropout is reseeded"
            self.emit(Notice(text, level="warning", fallback=True))
        return snapshot.progress

    def _restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> str:
        """Load the tensors of a checkpoint to where a plan or an overflow has placed them.

        Returns torch's message if the device of a rank is out of memory, else an empty string. All
        ranks then free memory in the same way, and load the tensors again.
        """
        state, failure = self.state, ""
        shards = None if state.sharded is None else state.sharded.shards()
        try:
            restore_weights(state.parameters, tensors["weights"], shards)
            restore_optimizer(
                state.optimizer,
                state.parameters,
                tensors["optimizer"],
                state.stepper.load_state_dict,
                shards,
            )
            if state.ema is not None:
                restore_weights(state.ema.averages, tensors["ema"], shards)
        except torch.OutOfMemoryError as error:
            failure = str(error).splitlines()[0]
        return next(filter(None, state.ranks.gather(failure)), "")

    def _report_other_ranks(self, snapshot: Snapshot) -> None:
        """Say whether steps have as many samples as with the ranks that saved the checkpoint.

        Of a ramp, the next step and the end are compared.
        """
        saved_ranks, ranks, run = snapshot.num_ranks, self.state.layout.data_size, self.state.run
        settings = {
            name.removeprefix("train."): snapshot.identity.get(name) for name in STEP_SIZE_SETTINGS
        }
        saved_run = run.model_copy(update={"train": run.train.model_copy(update=settings)})
        text = f"the checkpoint was saved by {saved_ranks} ranks and is resumed by {ranks}"
        is_split = self.ramp is None or self.ramp.is_split
        for consumed in (snapshot.progress.consumed, sys.maxsize):
            before = samples_in_step(saved_run, saved_ranks, consumed, is_split=is_split)
            now = samples_in_step(run, ranks, consumed, is_split=is_split)
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

    def collect_adapter(self) -> CollectedAdapter:
        """Copy the adapter to host memory, to write it as `export` does to another folder."""
        return collect_adapter(self.state, self.adapted_modules, self.base_weights)

    def tools_for_adapter(self) -> tuple[str, ...]:
        """Return the names of the tools that load the adapter; none without an adapter."""
        return tools_for_adapter(self.state, self.adapted_modules)

    def clear_device_memory(self) -> None:
        """Free memory that torch's allocator caches, if the run has a plan for this memory."""
        if self.plan_controller is not None:
            self.plan_controller.clear_cached_memory()

    def free_device_memory(self, reason: str, step: int) -> bool:
        """Apply a smaller plan or move more to managed memory, after an out-of-memory error.

        `reason` is the error's text. Returns False if nothing is left to do. All ranks call this
        together.
        """
        if self.plan_controller is not None and self.plan_controller.reduce_memory(reason):
            return True
        return self.overflow(reason, step)

    def overflow(self, reason: str, step: int, roles: Sequence[ManagedRole] = STEP_ROLES) -> bool:
        """Move the next of these roles to managed memory, after an out-of-memory error.

        `reason` is the error's text. Returns False if none is left, or the run has no managed
        memory. All ranks call this together.
        """
        if isinstance(self.managed, NoManagedRun):
            return False  # on every rank, so there is nothing to agree on
        if self.plan_controller is not None:
            self.plan_controller.keep_plan()
        has_moved = self.managed.overflow(reason, step, roles)
        if self.state.accelerator.device.type == "cuda":
            hard_reclamation(self.state.accelerator.device.index or 0, self.gc_freeze)()
        return any(self.state.ranks.gather(has_moved))  # a rank with space left may have none

    def close(self) -> None:
        """Release the offloaded optimizer state, the streamed weights and managed memory."""
        self.writer.close()
        self.state.stepper.close()
        if self.plan_controller is not None:
            self.plan_controller.close()
        self.managed.close()
        self.batch_transfer.close()


def build_session(  # noqa: PLR0913  the parts of a run are objects of their own
    run: RunFile,
    accelerator: Accelerator,
    emit: Emit,
    control: RunControl,
    signals: SignalHandler,
    resumed: Mapping[str, Any] | None = None,
    checked_blocks: ChooseBlocks | None = None,
    layout: Layout = SINGLE_LAYOUT,
    timer: PhaseTimer | None = None,
) -> Session:
    """Load the model, prepare the data and place both in memory.

    `resumed` is the execution record of the checkpoint to resume from, whose plan and attention
    backend are used again; it is empty for a checkpoint of an earlier version, and None for a new
    run. `checked_blocks` chooses the blocks whose gradients can be compared with plain copies; by
    default, one block is chosen at random. `layout` divides the model and the data among ranks.
    `timer` measures the phases of the start.

    Checks that need only the run file and the model come first, so that a mistake in the run file
    is reported before the data are encoded, which can take an hour.
    """
    timer = timer or PhaseTimer()
    folder, device, ranks = Path(run.output_dir), with_index(accelerator.device), layout.ranks
    ramp = build_ramp(
        run, layout.data_size, is_split=resumed is None or resumed.get("batches") == SPLIT
    )
    _emit_all(emit, [] if ramp is None else ramp_notes(ramp))

    # The model
    unplanned = reason_unplanned(run, device)
    if not unplanned and _may_compile(run):
        start_compiler()
    family, digest = _load_model(run, ranks, unplanned, timer, emit)
    _emit_all(emit, min_snr_notes(run.train, family.prediction))
    schedule = build_expert_schedule(run.train, family.boundary, expected_token_counts(run, family))
    check_data(run, family)
    check_validation(run, family)
    norms = frozen_norms(family)
    quantize_frozen(run, family, emit)
    adapted_modules = make_trainable(run, family, schedule, emit, is_sharded=layout.is_sharded)
    dropout = _dropout_seeds(family, resumed)
    # The planner traces whole sequences, and divides their costs by the number of context ranks.
    traced = (
        _copy_for_tracing(family, accelerator.mixed_precision)
        if layout.is_sharded and not unplanned
        else None
    )
    context = divide_tokens(run, family, layout, device, emit)
    references = (
        build_references(family, checked_blocks or partial(random_block, ranks))
        if compares_blocks(run, unplanned, layout, emit, is_asked=checked_blocks is not None)
        else []
    )
    if run.train.gradient_checkpointing:
        enable_gradient_checkpointing(family, unplanned, emit)
    sharded = divide_weights(
        run, family, layout, device, accelerator.mixed_precision, unplanned, emit
    )

    # The optimizer. Loading the model and injecting adapters reseed the global RNGs, so the run's
    # own seed comes after them.
    seed_rng(derive_seed(run.seed, "process", layout.data_rank))
    parameters = trained_parameters_of(family, sharded)
    optimizer = build_optimizer(parameters, run.optimizer, rounding_seed(run, layout), sharded)
    timer.end("model")

    # The data. Everything that can be wrong in the run file has been found by now.
    family.to(device)
    gc_freeze = GcFreeze()
    transfer = build_batch_transfer(
        *(run.gh200_optimizations, device, emit, gc_freeze, managed_memory_limit(run)),
        num_sharing_host=ranks.local_world_size,
    )
    pipeline, schedule, validation = _prepare_data(run, family, transfer, ranks, ramp, emit)
    timer.end("encoding")
    base_weights = _agreed_digest(ranks, digest)
    timer.end("hashing")

    # Memory: either a plan decides where weights, activations and optimizer state live, or the
    # transformer simply stays on the device.
    copy_engine = open_copy_engine(device, transfer.link)
    stepper = _build_stepper(run, optimizer, copy_engine, unplanned, emit)
    managed = build_managed_run(
        *(run, transfer.session, layout, family, parameters, stepper, pipeline.device_texts),
        resumed,
    )
    if unplanned and not layout.is_sharded:
        place_model(family.transformer, device, managed)
    controller = None
    if not unplanned:
        # Imported here, because the planner takes seconds to import.
        from gracetune.plan.planner import PlannerInputs

        inputs = PlannerInputs(
            load_largest=pipeline.load_largest,
            batches_ahead=batches_ahead(run),
            convert_to_fp8=partial(
                _convert_to_fp8, run, family, pipeline, device, references, emit, ranks
            ),
            saved_plan=(resumed or {}).get("plan"),
            load_sizes=partial(_load_traced_sizes, family, pipeline, ranks),
            shapes=_batch_shapes(pipeline, layout),
            managed=managed,
            ranks=ranks,
            layout=layout,
            traced=traced,
            timer=timer,
        )
        controller = _planner(layout)(
            run, family, inputs, stepper, transfer.link, device, gc_freeze, emit
        )
    state = TrainState(
        run=run,
        family=family,
        transformer=prepare_transformer(
            accelerator, family.transformer, is_placed=controller is not None or layout.is_sharded
        ),
        parameters=parameters,
        optimizer=optimizer,
        stepper=stepper,
        ema=managed.build_ema(parameters, run.train.ema_decay),
        accelerator=accelerator,
        rng=PositionalRng(run.seed, device),
        expert_schedule=schedule,
        reducer=(
            GradientReducer(ranks, device) if sharded is None else ShardedReducer(sharded, device)
        ),
        layout=layout,
        context=context,
        sharded=sharded,
        dropout=dropout,
        recorder=build_recorder(device, family, parameters, adapted_modules, norms),
        skips=build_skips(run, ranks, resumed),
    )
    state.transformer.train()
    register_memory_roles(state, transfer, controller, managed)
    timer.end("other")
    choose_attention(state, pipeline, validation, (resumed or {}).get("attention", ""), emit)
    timer.end("attention")
    return Session(
        state=state,
        pipeline=pipeline,
        ramp=ramp,
        validation=validation,
        writer=CheckpointWriter(
            folder / CHECKPOINT_FOLDER,
            run.train,
            layout,
            copy_engine,
            stepper,
            emit,
            in_background=saves_in_background(run),
        ),
        identity=run_identity(
            run, pipeline.train_samples, base_weights, accelerator.mixed_precision
        ),
        batch_transfer=transfer,
        batch_seconds=_agree_on_batch_seconds(run, family, pipeline, controller, layout),
        control=control,
        signals=signals,
        emit=emit,
        gc_freeze=gc_freeze,
        base_weights=base_weights,
        adapted_modules=adapted_modules,
        references=references,
        plan_controller=controller,
        managed=managed,
    )


# The model and the data


def _load_model(
    run: RunFile, ranks: RankGroup, unplanned: str, timer: PhaseTimer, emit: Emit
) -> tuple[Family, Future[str]]:
    """Load the model, and start to hash its weights in a thread, while the data are prepared.

    If the weights change or move before the data are prepared, or if other ranks have to load the
    same ones, the digest is complete when this returns.
    """
    family = load_family(run.model, emit, is_first=ranks.local_rank == 0)
    timer.end("loading")
    digest = hash_weights(family)
    is_frozen = run.adapter is not None and run.model.quantize == "none"
    if unplanned or not is_frozen or ranks.world_size > 1:
        _agreed_digest(ranks, digest)
    timer.end("hashing")
    return family, digest


def hash_weights(family: Family) -> Future[str]:
    """Start to hash the present weights of a model in a thread."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="hash weights")
    digest = executor.submit(family.weights_hasher())
    executor.shutdown(wait=False)
    return digest


def _agreed_digest(ranks: RankGroup, digest: Future[str]) -> str:
    """Wait for the digest of the weights, and raise if the ranks have loaded different ones."""
    digests = ranks.gather(digest.result())
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is not None:
        raise ConfigError(
            f"{ranks.name(other)} has loaded other weights than {ranks.name(0)}. Let model.path "
            "name the same files on every machine."
        )
    return digests[0]


def _prepare_data(
    run: RunFile,
    family: Family,
    transfer: BatchTransfer,
    ranks: RankGroup,
    ramp: AccumulationRamp | None,
    emit: Emit,
) -> tuple[DataPipeline, ExpertSchedule | None, ValidationSetup | None]:
    """Encode the data and the prompts of validation, then free the text encoders."""
    pipeline = DataPipeline(
        *(run, family, transfer, Path(run.output_dir), emit, _encoding_ranks(run, ranks)),
        [] if ramp is None else ramp.first_sizes(),
    )
    _warn_of_truncated_captions(family, pipeline.train_samples, emit)
    schedule = build_expert_schedule(
        run.train, family.boundary, drawn_token_counts(pipeline.order, family)
    )
    if schedule is not None and family.boundary is not None:
        emit(Notice(schedule.describe(family.boundary)))
    validation = build_validation(run, family, pipeline, emit)
    family.release_text_encoder()
    return pipeline, schedule, validation


def _encoding_ranks(run: RunFile, ranks: RankGroup) -> Ranks:
    """Return the ranks that encode the data, with a new folder for their unreadable samples."""
    reports = Path(run.output_dir) / "ranks" / ranks.broadcast(uuid4().hex)
    return encoding_ranks(ranks, reports, run.distributed.timeout_s)


def _copy_for_tracing(family: Family, precision: str) -> TracedCopy:
    from gracetune.plan.planner_input import copy_for_tracing  # takes seconds to import

    return copy_for_tracing(family, gathered_dtype(precision))


def _planner(layout: Layout) -> Callable[..., PlanController]:
    """Return the function that plans a run; its import takes seconds."""
    if layout.is_sharded:
        from gracetune.plan.sharded_run import plan_sharded_run

        return plan_sharded_run
    from gracetune.plan.planner import plan_run

    return plan_run


def _load_traced_sizes(
    family: Family, pipeline: DataPipeline, ranks: RankGroup
) -> Mapping[Shape, Batch]:
    """Load one sample of each size whose time the planner must know to divide steps among ranks."""
    sizes = list(pipeline.order.draws_by_size())
    if ranks.world_size == 1 or len(sizes) == 1:
        return {}
    return pipeline.load_sizes(sizes_to_trace(token_counts(family, sizes)))


def _may_compile(run: RunFile) -> bool:
    return not isinstance(run.plan, PlanSection) or run.plan.compile != "never"


def _batch_shapes(pipeline: DataPipeline, layout: Layout) -> BatchShapes:
    """Return the shapes of the batches that the run meets."""
    from gracetune.plan.planner_input import BatchShapes  # takes seconds to import

    lengths, batches = pipeline.text_lengths(), pipeline.order.batch_sizes()
    if layout.data_size > 1:  # a step with fewer batches than ranks cuts them into parts
        batches = frozenset(range(1, max(batches) + 1))
    return BatchShapes(
        sizes=len(pipeline.order.draws_by_size()),
        longest_text=max(lengths, default=0),
        texts_vary=len(lengths) > 1,
        batches=batches,
    )


def _agree_on_batch_seconds(
    run: RunFile,
    family: Family,
    pipeline: DataPipeline,
    controller: PlanController | None,
    layout: Layout,
) -> BatchSeconds | None:
    """Return the planned seconds of a micro-batch, the same on all ranks.

    None if there is nothing to balance: one rank, one sample size, or ranks that divide the weights
    and therefore need the same number of micro-batches.
    """
    sizes = list(pipeline.order.draws_by_size())
    if layout.data_size == 1 or len(sizes) == 1 or layout.is_sharded:
        return None
    traced = {} if controller is None else controller.size_seconds
    table = bucket_seconds(family, sizes, run.train.batch_size, traced)
    return BucketSeconds(layout.ranks.broadcast(table.rows))


def with_index(device: torch.device) -> torch.device:
    """Turn `cuda` into `cuda:0`: tensors report an index, and some torch calls require one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


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


def _dropout_seeds(family: Family, resumed: Mapping[str, Any] | None) -> DropoutSeeds | None:
    """Return the seeds of dropout layers; None if an earlier version started the run."""
    is_positional = resumed is None or resumed.get("dropout") == POSITIONAL
    return DropoutSeeds(family.transformer) if is_positional else None


def batches_ahead(run: RunFile) -> int:
    """Return the number of prefetched batches that need device memory at the same time."""
    depth = run.cache_config.prefetch_depth
    return INITIAL_DEPTH if depth == "auto" else depth


# Memory


def _build_stepper(
    run: RunFile, optimizer: Optimizer, copy_engine: CopyEngine, unplanned: str, emit: Emit
) -> OptimizerStepper:
    """Build the object that runs the optimizer's step, with its state in device or host memory.

    `unplanned` is the reason for having no memory plan, or empty. A plan decides where the state
    is kept; without one, the setting `optimizer.state` does.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nbytes = state_nbytes_per_element_of(run.optimizer, parameters)
    stepper = OptimizerStepper(optimizer, copy_engine, nbytes)
    if unplanned and run.optimizer.state == "host" and not run.distributed.cpu_offload:
        stepper.set_host_share(1.0)
        emit(Notice("the optimizer state is kept in host memory"))
    return stepper


def saves_in_background(run: RunFile) -> bool:
    """Return True if checkpoints are written while training continues, by setting or default."""
    if run.train.async_checkpoints == "auto":
        return run.adapter is None  # an adapter is written in less time than a copy would take
    return run.train.async_checkpoints


def register_memory_roles(
    state: TrainState,
    transfer: BatchTransfer,
    controller: PlanController | None,
    managed: ManagedRun | NoManagedRun = NO_MANAGED_RUN,
) -> None:
    """Let `transfer` report the bytes of weights, EMA and optimizer state in its memory statistics.

    Streamed weights count twice: in host memory, and in the device slots they are copied to. What
    is in managed memory counts there.
    """
    frozen = [p for p in state.family.transformer.parameters() if not p.requires_grad]
    device_type = state.accelerator.device.type

    def on_device() -> int:
        return local_nbytes(p for p in frozen if p.device.type == device_type)

    def in_slots() -> int:
        return 0 if controller is None else controller.slots_nbytes

    def averages() -> int:
        if state.ema is None or "ema" in managed.roles:
            return 0
        return local_nbytes(state.ema.averages.values())

    def trained() -> int:
        whole = local_nbytes(state.parameters.values())
        return max(0, whole - managed.roles.get("trained", 0))  # a part of them may have moved

    transfer.track_memory(
        "weights", lambda: max(0, on_device() - managed.roles.get("weights", 0)) + in_slots()
    )
    transfer.track_memory(
        "weights_in_host_memory", lambda: local_nbytes(frozen) - on_device(), Tier.HOST
    )
    transfer.track_memory("trained", trained)
    transfer.track_memory("averages", averages)
    transfer.track_memory("optimizer", lambda: state.stepper.device_nbytes)
    transfer.track_memory("optimizer_in_host_memory", lambda: state.stepper.host_nbytes, Tier.HOST)


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
