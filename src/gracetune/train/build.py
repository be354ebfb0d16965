"""From a run file to a session: every choice is made here, once, and told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list

from gracetune.cache.ranks import Ranks
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.models.attention import choose_attention
from gracetune.models.family import load_family
from gracetune.optim.build import build_optimizer
from gracetune.train.draws import Draws, seed_of
from gracetune.train.ema import Ema
from gracetune.train.export import export
from gracetune.train.feed import EMPTY, build_feed
from gracetune.train.identity import demand_same, identity_of
from gracetune.train.loop import Session
from gracetune.train.mover import build_mover
from gracetune.train.objective import notes_on_weights
from gracetune.train.ramp import build_ramp
from gracetune.train.state import (
    Progress,
    restore_generators,
    restore_optimizer,
    restore_weights,
    seed_generators,
)
from gracetune.train.step import Trainee
from gracetune.train.validate import Validation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from gracetune.config.schema import RunFile
    from gracetune.events.requests import Requests
    from gracetune.events.types import Event
    from gracetune.models.family import Family
    from gracetune.train.checkpoint import Snapshot
    from gracetune.train.feed import Feed
    from gracetune.train.interrupt import Interrupt
    from gracetune.train.mover import Mover

    Tell = Callable[[Event], None]

ENGINES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
VALIDATION_FOLDER = "validation"
CHECKPOINT_FOLDER = "checkpoints"


@dataclass(frozen=True, slots=True)
class Built:
    """A session, and how its result is written."""

    session: Session
    export: Callable[[], Path]


def start_accelerator(run: RunFile) -> Accelerator:
    """Join the other ranks, if any, and settle the precision."""
    # Accelerate keeps its settings for the whole process; a second run there must not inherit them.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=resolve_precision(run),
        cpu=not torch.cuda.is_available(),  # else it takes the ranks of a CPU machine for strangers
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=run.distributed.timeout_s)),
            DistributedDataParallelKwargs(find_unused_parameters=run.adapter is None),
        ],
    )
    if accelerator.distributed_type not in ENGINES:
        raise ConfigError(
            f"Accelerate was set up for {accelerator.distributed_type.value}; this version trains "
            "in one process or on data-parallel ranks. Change the file given to accelerate launch."
        )
    return accelerator


def resolve_precision(run: RunFile) -> str:
    """bf16 where a GPU computes it well; fp32 on a CPU."""
    asked = run.train.mixed_precision
    if asked == "auto":
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
    return "bf16" if asked == "fp16" else asked


def build(
    run: RunFile,
    accelerator: Accelerator,
    tell: Tell,
    requests: Requests,
    interrupt: Interrupt,
) -> Built:
    """Load the model, prepare the data, and put everything together."""
    folder, device = Path(run.output_dir), accelerator.device
    ramp, notes = build_ramp(run, accelerator.num_processes)
    for note in notes:
        tell(Notice(note))
    family = load_family(run.model)
    family.to(device)
    choose_attention(family.transformer, run.model.attention_mechanism)
    for note in notes_on_weights(run.train, family.prediction):
        tell(Notice(note))
    weights = family.weights_digest()
    modules = _make_trainable(run, family, tell)
    # After everything that draws from a seed of its own, and reseeds the generators by the way.
    seed_generators(seed_of(run.seed, "process", accelerator.process_index))
    parameters = {n: p for n, p in family.transformer.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(parameters.values(), run.optimizer)
    size = _picture_size(run, family)
    # All that a run file can have wrong is found above, before the data take their time.
    mover = build_mover(run.gh200_optimizations, device, tell)
    feed = build_feed(run, family, mover, folder, tell, _ranks(run, accelerator, folder))
    trainee = Trainee(
        run=run,
        family=family,
        transformer=accelerator.prepare(family.transformer),
        parameters=parameters,
        optimizer=optimizer,
        ema=Ema(parameters, run.train.ema_decay) if run.train.ema_decay else None,
        accelerator=accelerator,
        draws=Draws(run.seed, device),
    )
    trainee.transformer.train()
    _keep_books(trainee, mover)
    session = Session(
        trainee=trainee,
        feed=feed,
        ramp=ramp,
        validation=_build_validation(run, family, feed, mover, size, tell),
        checkpoints=folder / CHECKPOINT_FOLDER,
        identity=identity_of(run, feed.trained, weights, accelerator.mixed_precision),
        mover=mover,
        requests=requests,
        interrupt=interrupt,
        tell=tell,
    )
    return Built(session, lambda: export(trainee, modules, weights, folder))


def resume(session: Session, snapshot: Snapshot | None) -> Progress:
    """Take up where a snapshot was made; none: begin."""
    if snapshot is None:
        return Progress()
    demand_same(snapshot.identity, session.identity)
    t = session.trainee
    ranks = sum(kind.startswith("generators-") for kind in snapshot.tensors)
    if ranks != t.accelerator.num_processes:
        text = (
            f"{ranks} ranks until here, {t.accelerator.num_processes} from now on: an optimizer "
            "step averages over another number of samples, unless a ramp sets it"
        )
        session.tell(Notice(text, level="warning"))
    restore_weights(t.parameters, snapshot.tensors["weights"])
    restore_optimizer(t.optimizer, list(t.parameters), snapshot.tensors["optimizer"])
    if t.ema is not None:
        restore_weights(t.ema.averages, snapshot.tensors["ema"])
    generators = snapshot.tensors.get(f"generators-{t.accelerator.process_index}")
    if generators is not None:
        restore_generators(generators)
    else:
        text = "more ranks than the checkpoint was made with: theirs draw dropout from fresh seeds"
        session.tell(Notice(text, level="warning", fallback=True))
    return snapshot.progress


def _keep_books(t: Trainee, mover: Mover) -> None:
    """What holds memory for as long as the run: statistics name each by its role."""
    frozen = [p for p in t.family.transformer.parameters() if not p.requires_grad]
    averages = list(t.ema.averages.values()) if t.ema is not None else []
    mover.watch("weights", lambda: _nbytes(frozen))
    mover.watch("trained", lambda: _nbytes(t.parameters.values()))
    mover.watch("averages", lambda: _nbytes(averages))
    mover.watch("optimizer", lambda: sum(_nbytes(s.values()) for s in t.optimizer.state.values()))


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


def _make_trainable(run: RunFile, family: Family, tell: Tell) -> list[str]:
    """All weights, or an adapter's; gives the adapted modules."""
    modules: list[str] = []
    if run.adapter is not None:
        from gracetune.adapters.inject import add_lora  # peft takes seconds to import

        seed = seed_of(run.seed, "adapter") % 2**31
        modules = add_lora(family.transformer, run.adapter, family.adapter_targets, seed)
        tell(Notice(f"LoRA of rank {run.adapter.rank} on {len(modules)} modules"))
    else:
        family.transformer.requires_grad_(True)
    if run.train.gradient_checkpointing:
        family.enable_gradient_checkpointing()
    return modules


def _build_validation(
    run: RunFile, family: Family, feed: Feed, mover: Mover, size: tuple[int, int], tell: Tell
) -> Validation | None:
    section, device = run.validation, mover.device
    if not validates(run):
        return None
    prompts = section.prompts
    if not prompts:
        captions = dict.fromkeys(sample.caption for sample in feed.trained)
        prompts = tuple(captions)[: section.num_prompts]
        tell(Notice("validation.prompts: none given; picturing " + "; ".join(map(repr, prompts))))
    halves = (slice(None, len(prompts)), slice(len(prompts), None))
    both = family.stack_text(family.encode_text([*prompts, *[EMPTY] * len(prompts)]))
    text, empty = ({key: t[part].to(device) for key, t in both.items()} for part in halves)
    return Validation(
        section=section,
        folder=Path(run.output_dir) / VALIDATION_FOLDER,
        prompts=prompts,
        text=text,
        empty=empty,
        size=size,
        held_out=[feed.load(draws) for draws in feed.held_out],
    )


def validates(run: RunFile) -> bool:
    """Whether a run ever makes pictures: by schedule, or when asked."""
    return run.validation.every > 0 or run.validation.enable_manual_validation


def _picture_size(run: RunFile, family: Family) -> tuple[int, int]:
    edge = run.datasets[0].resolution
    size = (run.validation.width or edge, run.validation.height or edge)
    unfit = any(edge % family.pixel_step or edge > family.max_edge for edge in size)
    if validates(run) and unfit:
        raise ConfigError(
            f"validation pictures of {size[0]}x{size[1]} do not suit {family.name}: edges are "
            f"multiples of {family.pixel_step} up to {family.max_edge}. "
            "Set validation.width and height."
        )
    return size
