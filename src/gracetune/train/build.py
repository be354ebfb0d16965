"""From a run file to a session: every choice is made here, once, and told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AutocastKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch import Tensor

from gracetune.adapters.compute.fused_lora import computes_in
from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.cache.encode import Ranks
from gracetune.config.checks import trains_in_bf16
from gracetune.config.environment import engine_of, process_environment
from gracetune.data.pipeline import build_pipeline
from gracetune.data.requirements import check_data
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.memory.stats import Tier
from gracetune.models.attention_backends import choose_attention
from gracetune.models.family import load_family, transformers_of
from gracetune.models.quantize import check_quantizable, quantize_blocks
from gracetune.offload.copies import open_copy_engine
from gracetune.optim.build import build_optimizer, nbytes_each
from gracetune.optim.update import Update
from gracetune.plan.attention_autotune import settle_attention
from gracetune.train.experts import expected_token_counts, drawn_token_counts, build_expert_schedule, describe_schedule
from gracetune.train.export import check_exportable, export_result
from gracetune.train.identity import check_same_run, run_identity
from gracetune.train.loop import Session
from gracetune.train.objective import min_snr_notes
from gracetune.train.ramp import build_ramp
from gracetune.train.state import (
    TrainProgress,
    restore_rng,
    restore_optimizer,
    restore_weights,
    seed_rng,
)
from gracetune.train.step import PositionalRng, Ema, TrainState, derive_seed
from gracetune.train.validate import build_validation, plan_sample_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from gracetune.cache.batch_transfer import BatchTransfer
    from gracetune.config.schema import RunFile
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Sample
    from gracetune.events.run_control import RunControl
    from gracetune.events.types import Event
    from gracetune.models.family import Family
    from gracetune.offload.copies import CopyEngine as StreamMover
    from gracetune.train.checkpoint import Snapshot
    from gracetune.train.experts import ExpertSchedule
    from gracetune.train.export import AdaptedModules
    from gracetune.train.run import SignalHandler

    Emit = Callable[[Event], None]


SUPPORTED_ENGINES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
CHECKPOINT_FOLDER = "checkpoints"
FP32_NBYTES = 4
ADAPTER_NAMES = {
    "lora": "LoRA",
    "dora": "DoRA",
    "locon": "LoCon",
    "loha": "LoHa",
    "lokr": "LoKr",
    "full": "a full-matrix adapter",
}


@dataclass(frozen=True, slots=True)
class Built:
    """A session, how its result is written, and how it is taken down."""

    session: Session
    export: Callable[[], Path]
    close: Callable[[], None]


def start_accelerator(run: RunFile) -> Accelerator:
    """Join the other ranks, if any, and settle the precision."""
    engine = engine_of(process_environment())
    if engine:  # asked first, since Accelerate may fail over it
        raise _no_engine(engine)
    # Accelerate keeps its settings for the whole process; a second run there must not inherit them.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=resolve_precision(run),
        # A step weighs its samples itself: what the environment says must not weigh them again.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        cpu=not torch.cuda.is_available(),  # else it takes the ranks of a CPU machine for strangers
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=run.distributed.timeout_s)),
            DistributedDataParallelKwargs(find_unused_parameters=run.adapter is None),
        ],
    )
    if accelerator.distributed_type not in SUPPORTED_ENGINES:
        raise _no_engine(accelerator.distributed_type.value)
    return accelerator


def _no_engine(name: str) -> ConfigError:
    return ConfigError(
        f"Accelerate was set up for {name}; this version trains in one process or on data-parallel "
        "ranks, and streams what does not fit. Change the file given to accelerate launch."
    )


def resolve_precision(run: RunFile) -> str:
    """bf16 where a GPU computes it well; fp32 on a CPU."""
    asked = run.train.mixed_precision
    if asked == "auto":
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    return "bf16" if asked == "fp16" else asked


def build(
    run: RunFile,
    accelerator: Accelerator,
    emit: Emit,
    requests: RunControl,
    interrupt: SignalHandler,
) -> Built:
    """Load the model, prepare the data, and put everything together."""
    folder, device = Path(run.output_dir), _numbered(accelerator.device)
    ramp, notes = build_ramp(run, accelerator.num_processes)
    for note in notes:
        emit(Notice(note))
    family = load_family(run.model)
    weights = family.weights_digest()
    for note in min_snr_notes(run.train, family.prediction):
        emit(Notice(note))
    turns = build_expert_schedule(run.train, family.boundary, expected_token_counts(run, family))
    if len(turns.windows) > 1 and accelerator.ddp_handler is not None:
        accelerator.ddp_handler.find_unused_parameters = True  # one expert rests in every step
    check_data(run, family)
    shape = plan_sample_shape(run, family)
    _quantize(run, family, emit)
    modules = _make_trainable(run, family, turns, emit)
    unplanned = reason_unplanned(run, device, accelerator.num_processes)
    if run.train.gradient_checkpointing:
        _checkpoint(family, unplanned, emit)
    if unplanned:
        if run.model.frozen_compute == "fp8":
            raise ConfigError(
                f"model.frozen_compute is fp8, which a plan brings about, but {unplanned}. Set it "
                "to bf16, or let the run be planned on one GPU."
            )
        family.transformer.to(device)
    # After everything that draws from a seed of its own, and reseeds the generators by the way.
    seed_rng(derive_seed(run.seed, "process", accelerator.process_index))
    parameters = {n: p for n, p in family.transformer.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(parameters, run.optimizer, derive_seed(run.seed, "rounding"))
    # All that a run file can have wrong is found above, before the data take their time.
    family.to(device)
    mover = build_batch_transfer(run.gh200_optimizations, device, emit)
    feed = build_pipeline(run, family, mover, folder, emit, _ranks(run, accelerator, folder))
    _report_cut_captions(family, feed.train_samples, emit)
    turns = _weigh_turns(run, family, feed, emit)
    validation = build_validation(run, family, feed, shape, emit)
    family.release_text_encoder()
    update = _make_update(run, optimizer, open_copy_engine(device, mover.link), unplanned, emit)
    settled = None
    if not unplanned:
        from gracetune.plan.planner import settle  # tracers take seconds to import

        settled = settle(run, family, feed, update, mover.link, device, emit)
    trainee = TrainState(
        run=run,
        family=family,
        transformer=prepare_transformer(accelerator, family.transformer, is_planned=settled is not None),
        parameters=parameters,
        optimizer=optimizer,
        update=update,
        ema=Ema(parameters, run.train.ema_decay) if run.train.ema_decay else None,
        accelerator=accelerator,
        rng=PositionalRng(run.seed, device),
        expert_schedule=turns,
    )
    trainee.transformer.train()
    register_memory_roles(trainee, mover, lambda: 0 if settled is None else settled.slots_nbytes)
    held_out = () if validation is None else validation.held_out
    settle_attention(trainee, feed, held_out, folder, emit)
    session = Session(
        state=trainee,
        pipeline=feed,
        ramp=ramp,
        validation=validation,
        checkpoints=folder / CHECKPOINT_FOLDER,
        identity=run_identity(run, feed.train_samples, weights, accelerator.mixed_precision),
        batch_transfer=mover,
        control=requests,
        signals=interrupt,
        emit=emit,
        plan_controller=settled,
    )

    def close() -> None:
        update.close()
        if settled is not None:
            settled.close()

    return Built(session, export=lambda: export_result(trainee, modules, weights, emit), close=close)


def resume(session: Session, snapshot: Snapshot | None) -> TrainProgress:
    """Take up where a snapshot was made; none: begin."""
    if snapshot is None:
        return TrainProgress()
    check_same_run(snapshot.identity, session.identity)
    t = session.state
    ranks = sum(kind.startswith("generators-") for kind in snapshot.tensors)
    if ranks != t.accelerator.num_processes:
        text = (
            f"{ranks} ranks until here, {t.accelerator.num_processes} from now on: an optimizer "
            "step averages over another number of samples, unless a ramp sets it"
        )
        session.emit(Notice(text, level="warning"))
    restore_weights(t.parameters, snapshot.tensors["weights"])
    restore_optimizer(t.optimizer, t.parameters, snapshot.tensors["optimizer"], t.update.load)
    if t.ema is not None:
        restore_weights(t.ema.averages, snapshot.tensors["ema"])
    generators = snapshot.tensors.get(f"generators-{t.accelerator.process_index}")
    if generators is not None:
        restore_rng(generators)
    else:
        text = "more ranks than the checkpoint was made with: theirs draw dropout from fresh seeds"
        session.emit(Notice(text, level="warning", fallback=True))
    return snapshot.progress


def _make_update(
    run: RunFile, optimizer: Optimizer, mover: StreamMover, unplanned: str, emit: Emit
) -> Update:
    """A plan says where state lives, and may try again in less memory; without one, it is said."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    update = Update(optimizer, mover, 0.0 if unplanned else nbytes_each(run.optimizer, parameters))
    if unplanned and run.optimizer.state == "host":
        update.place(1.0)
        emit(Notice("the optimizer's state lives in host memory"))
    return update


def register_memory_roles(t: TrainState, mover: BatchTransfer, slots_nbytes: Callable[[], int]) -> None:
    """What holds memory for as long as the run: statistics name each by its role.

    Streamed weights live in host memory and pass through slots of the device.
    """
    frozen = [p for p in t.family.transformer.parameters() if not p.requires_grad]
    averages = list(t.ema.averages.values()) if t.ema is not None else []
    kind = t.accelerator.device.type

    def here() -> int:
        return _nbytes(p for p in frozen if p.device.type == kind)

    mover.track_memory("weights", lambda: here() + slots_nbytes())
    mover.track_memory("weights_in_host_memory", lambda: _nbytes(frozen) - here(), Tier.HOST)
    mover.track_memory("trained", lambda: _nbytes(t.parameters.values()))
    mover.track_memory("averages", lambda: _nbytes(averages))
    mover.track_memory("optimizer", lambda: t.update.device_nbytes)
    mover.track_memory("optimizer_in_host_memory", lambda: t.update.host_nbytes, Tier.HOST)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _ranks(run: RunFile, accelerator: Accelerator, folder: Path) -> Ranks:
    """Ranks agree on a folder that no earlier run has left reports in."""
    (token,) = broadcast_object_list([uuid4().hex])
    return Ranks(
        accelerator.process_index,
        accelerator.num_processes,
        folder / "ranks" / token,
        run.distributed.timeout_s,
    )


def _weigh_turns(run: RunFile, family: Family, feed: DataPipeline, emit: Emit) -> ExpertSchedule:
    """Who is trained when: the share of each expert may follow the sizes of what is drawn."""
    turns = build_expert_schedule(run.train, family.boundary, drawn_token_counts(feed.order, family))
    text = describe_schedule(turns, family.boundary)
    if text is not None:
        emit(Notice(text))
    return turns


def _report_cut_captions(family: Family, samples: Sequence[Sample], emit: Emit) -> None:
    captions = list(dict.fromkeys(sample.caption for sample in samples))
    cut = family.cut_captions(captions)
    if cut:
        text = f"{len(cut)} of {len(captions)} captions are longer than {family.name} reads, and "
        emit(Notice(f"{text}their ends have no effect; first: {cut[0][:80]!r}", level="warning"))


def _quantize(run: RunFile, family: Family, emit: Emit) -> None:
    kind = run.model.quantize
    if kind == "none":
        return
    check_quantizable(kind, run.adapter)
    count = quantize_blocks(family.blocks(), kind)
    emit(Notice(f"{count} linear layers of the frozen model are kept in {kind}"))


def _make_trainable(run: RunFile, family: Family, turns: ExpertSchedule, emit: Emit) -> AdaptedModules:
    """All weights of the experts that are trained, or an adapter's; gives the adapted modules."""
    every = transformers_of(family.transformer)
    trained = {name: model for name, model in every.items() if not name or name in turns.windows}
    for transformer in every.values():
        choose_attention(transformer, run.model.attention_mechanism)
        transformer.requires_grad_(False)
    modules: AdaptedModules = {}
    if run.adapter is not None:
        from gracetune.adapters.inject import add_adapter  # peft takes seconds to import

        seed = derive_seed(run.seed, "adapter") % 2**31
        modules = add_adapter(trained, run.adapter, family.adapter_targets, seed)
        check_exportable(trained, modules, family.name)
        count = sum(map(len, modules.values()))
        rank = "" if run.adapter.kind == "full" else f" of rank {run.adapter.rank}"
        emit(Notice(f"{ADAPTER_NAMES[run.adapter.kind]}{rank} on {count} modules"))
    else:
        for transformer in trained.values():
            transformer.requires_grad_(True)
        _widen(run, trained.values(), emit)
    return modules


def _widen(run: RunFile, transformers: Iterable[nn.Module], emit: Emit) -> None:
    """Updates are far smaller than the steps of bf16: in bf16 alone most would change nothing."""
    narrow = [p for t in transformers for p in t.parameters() if p.itemsize < FP32_NBYTES]
    if not narrow:
        return
    if trains_in_bf16(run):
        text = f"{len(narrow)} trained weights stay in bf16, and so do sums of their gradients"
        emit(Notice(f"{text}; the optimizer has fp32 of each weight"))
        return
    for parameter in narrow:
        parameter.data = parameter.data.float()
    text = f"{len(narrow)} trained weights are kept in fp32, which bf16 updates need"
    emit(Notice(f"{text}; model.dtype: bfloat16 with adamw and no ema_decay takes half of that"))


def _numbered(device: torch.device) -> torch.device:
    """By its number: torch answers some questions about no other, and tensors are on no other."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def reason_unplanned(run: RunFile, device: torch.device, num_ranks: int) -> str:
    """Why the transformer is simply brought to the device; empty: a plan says where it lives."""
    if run.plan == "off":
        return "plan is off"
    if run.model.quantize != "none":
        return f"model.quantize is {run.model.quantize}, and such weights cannot be moved about"
    if num_ranks > 1:
        return f"there are {num_ranks} ranks, and each keeps its model on its device"
    if device.type != "cuda" and (run.plan == "auto" or run.plan.device_memory is None):
        return "there is no GPU, and plan.device_memory does not say what to rehearse"
    return ""


def _checkpoint(family: Family, unplanned: str, emit: Emit) -> None:
    if unplanned:
        family.enable_gradient_checkpointing()
    else:
        emit(Notice("train.gradient_checkpointing: the plan says for each block what is kept"))


# ------------------------------------------------------------------------------------------
# In what a transformer computes: as its weights are, or as torch's autocast has it.
#
# Autocast is for weights in fp32. Where a transformer is in bf16 already, all it does is make
# norms,
# and what follows them, fp32, which takes time and memory that no plan has counted. Such a one runs
# as diffusers' own pipelines run it.


BF16_ARGUMENTS = ("hidden_states", "encoder_hidden_states", "pooled_projections", "global_hidden_states")
"""What a transformer multiplies of its arguments. Levels and places are for it to round."""


def prepare_transformer(accelerator: Accelerator, transformer: nn.Module, *, is_planned: bool) -> nn.Module:
    """The transformer for its ranks, in the run's precision."""
    usual = accelerator.autocast_handler
    in_bf16 = accelerator.mixed_precision == "bf16" and computes_in(transformer, torch.bfloat16)
    if is_planned and in_bf16:
        accelerator.autocast_handler = AutocastKwargs(enabled=False)
        transformer.register_forward_pre_hook(_rounded, with_kwargs=True)
    wrapped: nn.Module = accelerator.prepare_model(transformer, device_placement=not is_planned)
    accelerator.autocast_handler = usual
    return wrapped


def _rounded(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """A sampler goes on in fp32 from what it was given in it."""
    return tuple(map(_in_bf16, args[:1])) + args[1:], {
        name: _in_bf16(value) if name in BF16_ARGUMENTS else value for name, value in named.items()
    }


def _in_bf16(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_number else value
