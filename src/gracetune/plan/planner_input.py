"""Turn a run into a planning problem: the model, the memory budget, and the decisions to make.

`gracetune plan` builds the inputs from the run file alone, with a model on the meta device, and
calls `make_plan`. `gracetune train` builds a `PlanProblem` from the loaded model (plan/planner.py).
It can be solved again during training, if less memory is available than expected.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gracetune.adapters.compute.quantized_linear import QuantizedLinear
from gracetune.config.schema import PlanSection
from gracetune.errors import ConfigError
from gracetune.models.family import SampleShape, transformers_of
from gracetune.optim.registry import optimizer_info
from gracetune.plan.compile_cache import CompileCache
from gracetune.plan.cost import CostModel
from gracetune.plan.machines import FITTED_CONSTANTS, effective_rates
from gracetune.plan.managed import managed_choices
from gracetune.plan.memory import FixedMemory
from gracetune.plan.search import (
    Constraints,
    PlanError,
    candidates,
    find_best_plan,
    keep_run_file_batch,
    required_device_nbytes,
)
from gracetune.plan.simulate import candidate_of
from gracetune.plan.trace import TraceTarget, trace_model
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.config.schema import CacheSection, RunFile
    from gracetune.models.family import Family
    from gracetune.plan.machines import MachineRates
    from gracetune.plan.meta_models import MetaModel
    from gracetune.plan.result import FrozenCompute, Plan
    from gracetune.plan.search import PlanBudget, SearchResult


COMPILER_START_SECONDS, GRAPH_SECONDS, CACHED_GRAPH_SECONDS = 5.0, 12.0, 2.5
"""Rough time in seconds to start the compiler, to compile a graph for the first time, and to load
it from the compile cache."""
TRACED_BATCH = 2
"""Batch size at which a model's kernels and memory are traced. With a batch of one, some copies
would be views and not be counted."""
HOT_TEXT_PART = 64
"""Text embeddings may fill 1/64 of the device memory budget, unless `cache_config` sets a limit."""
MASTER_NBYTES = 4
"""Bytes per trained parameter of an fp32 master copy."""
STATE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the optimizer's state that `optimizer.state: auto` may place in host memory."""


@dataclass(frozen=True, slots=True)
class BatchShapes:
    """The shapes of the batches that a run meets: image sizes, text lengths and batch sizes."""

    sizes: int = 1
    """Number of sample sizes (buckets)."""
    longest_text: int = 0
    """Tokens of the longest text, which the plan is made for; 0 if the model reads none."""
    texts_vary: bool = False
    """True if texts differ in length."""
    batches: frozenset[int] = frozenset({1})
    """Sizes of micro-batches. The last one of a bucket may be smaller than the others."""

    @property
    def several_batches(self) -> bool:
        """True if batches of two or more samples differ in size."""
        return len(self.batches - {1}) > 1

    @property
    def dynamic(self) -> bool:
        """True if compiled blocks must accept several shapes."""
        return self.sizes > 1 or self.texts_vary or self.several_batches

    @property
    def graphs_per_block(self) -> int:
        """Number of graphs of each kind of block: for one sample, and for more."""
        return (1 in self.batches) + bool(self.batches - {1})

    def describe(self) -> str:
        """Describe the shapes in a line."""
        noun = "size" if self.sizes == 1 else "sizes"
        text = f"{self.sizes} {noun}"
        if self.longest_text:
            text += f", texts of {'up to ' if self.texts_vary else ''}{self.longest_text} tokens"
        *others, largest = sorted(self.batches)
        batches = f"{', '.join(map(str, others))} and {largest}" if others else str(largest)
        return f"{text}, batches of {batches}"


COMPILE_FAILURE = "compile_failure"
"""Key of a `CompileFailure` in a checkpoint's plan."""


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """A failed compilation, or a compiled block that has failed while it ran.

    A checkpoint has it, so that a resumed run does not try again. The names are keys there.
    """

    reason: str
    compile: tuple[bool, ...]
    """The choices that `plan.compile` left to the planner."""
    torch: str
    """The version of torch."""


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """All inputs of the search for a run's plan. It can be solved again with another budget."""

    model: CostModel
    fixed: FixedMemory
    budget: PlanBudget
    constraints: Constraints
    micro_batches: int
    """Number of micro-batches in the whole run. Blocks are compiled only if this saves more time in
    them than compiling takes."""
    shapes: BatchShapes = field(default_factory=BatchShapes)
    """The shapes of the run's batches, which decide how many graphs are compiled."""
    compile_cache: CompileCache = field(default_factory=CompileCache)
    """Knows which graphs were compiled before."""
    compile_failure: CompileFailure | None = None
    """Why the run has given up compiling; None: it has not."""

    def without_compilation(self, reason: str) -> PlanProblem:
        """Return the problem without compiled plans, because a block has failed."""
        choices = self.constraints.compile
        failure = self.compile_failure or CompileFailure(reason, choices, torch.__version__)
        constraints = replace(self.constraints, compile=(False,))
        return replace(self, constraints=constraints, compile_failure=failure)

    def solve(self, budget: PlanBudget) -> Plan:
        """Return the plan that makes the whole run shortest, including compilation."""
        plans = []
        for compiled in self.constraints.compile:
            constraints = replace(self.constraints, compile=(compiled,))
            with suppress(PlanError):
                plans.append(self._best(budget, constraints))
        if not plans:
            return self._best(budget, self.constraints)  # raises the error that explains why
        plans += self._cached_alternatives(budget, plans)
        return min(plans, key=self._run_seconds)

    def _cached_alternatives(self, budget: PlanBudget, plans: Sequence[Plan]) -> list[Plan]:
        """Return plans whose graphs are all in the compile cache, if those of `plans` are not.

        They have the batch size and the roles in managed memory of one of `plans`.

        Rates are measured anew in each run. Of two plans that are about as fast, a second run would
        otherwise choose the other one now and then, and compile all its graphs.
        """
        if self.compile_cache.is_empty() or not any(self._lacks_graphs(plan) for plan in plans):
            return []
        constraints = replace(self.constraints, compile=(True,))
        found = find_best_plan(self.model, self.fixed, budget, constraints, simulated=False)
        similar = {(plan.batch, plan.managed) for plan in plans}
        return [
            plan
            for plan in found.others
            if (plan.batch, plan.managed) in similar and not self._lacks_graphs(plan)
        ]

    def _lacks_graphs(self, plan: Plan) -> bool:
        graphs = self._graphs(plan)
        return not all(self.compile_cache.has(self._description(graph, plan)) for graph in graphs)

    def with_device_nbytes(self, device_nbytes: int) -> PlanProblem:
        """Return the problem with less device memory if a plan fits into that, else this one."""
        budget = replace(self.budget, device_nbytes=device_nbytes)
        constraints = self.constraints.for_budget(budget)
        fitting = candidates(self.model, self.fixed, budget, constraints)
        return self if next(fitting, None) is None else replace(self, budget=budget)

    def fits(self, plan: Plan) -> bool:
        """Return True if the plan fits the device memory budget."""
        return self.spare_nbytes(plan) >= 0

    def spare_nbytes(self, plan: Plan, peak_nbytes: int | None = None) -> int:
        """Return how many bytes of the device memory budget a plan leaves free.

        A negative number means that the plan does not fit. `peak_nbytes` is the plan's measured
        peak; if it is None, the predicted peak is used.
        """
        required = required_device_nbytes(self.model, candidate_of(plan), self.fixed, self.budget)
        unpredicted = 0 if peak_nbytes is None else peak_nbytes - plan.device.total
        return self.budget.device_nbytes - required - unpredicted

    def compile_seconds(self, plan: Plan, current: Plan | None = None) -> float:
        """Return the seconds to compile the graphs of a plan that `current` does not have."""
        new = self._graphs(plan) - (set() if current is None else self._graphs(current))
        if not new:
            return 0.0
        has_started = current is not None and current.compiled
        seconds = 0.0 if has_started else COMPILER_START_SECONDS
        for graph in new:
            is_cached = self.compile_cache.has(self._description(graph, plan))
            each = CACHED_GRAPH_SECONDS if is_cached else GRAPH_SECONDS
            seconds += each * self.shapes.graphs_per_block
        return seconds

    def remember_graphs(self, plan: Plan) -> None:
        """Note that the graphs of a plan are in the compile cache."""
        self.compile_cache.add(self._description(graph, plan) for graph in self._graphs(plan))

    def _description(self, graph: tuple[int, str, str], plan: Plan) -> tuple[object, ...]:
        """Return what a compiled graph depends on, besides torch, GPU and code."""
        kind, mode, weights = graph
        shapes = self.shapes
        sizes: tuple[object, ...] = (shapes.dynamic, shapes.several_batches, shapes.batches == {1})
        if not shapes.dynamic:
            sizes += plan.batch, self.model.at(plan.batch).blocks[0].input_nbytes
        place = self.model.graphs(dynamic=shapes.dynamic).index(kind)
        block = self.model.at(plan.batch).blocks[place]
        nbytes = block.frozen_nbytes, block.trained_nbytes
        return self.model.name, self.model.frozen_compute, nbytes, mode, weights, sizes

    def num_graphs(self, plan: Plan) -> int:
        """Return the number of graphs to compile for a plan."""
        return len(self._graphs(plan)) * self.shapes.graphs_per_block

    def _graphs(self, plan: Plan) -> set[tuple[int, str, str]]:
        """Return the kinds of blocks in a compiled plan, each with its mode and placement."""
        if not plan.compiled:
            return set()
        kinds = zip(self.model.graphs(dynamic=self.shapes.dynamic), plan.blocks, strict=True)
        # An offloaded block is compiled like a lean one.
        return {
            (kind, block.activations.replace("offload", "lean"), block.weights)
            for kind, block in kinds
        }

    def _best(self, budget: PlanBudget, constraints: Constraints) -> Plan:
        return find_best_plan(
            self.model, self.fixed, budget, constraints, simulated=False, only_best=True
        ).best

    def _run_seconds(self, plan: Plan) -> float:
        return self.micro_batches * plan.seconds.step + self.compile_seconds(plan)


def make_plan(
    target: TraceTarget,
    rates: MachineRates,
    fixed: FixedMemory,
    budget: PlanBudget,
    constraints: Constraints,
    *,
    frozen_compute: FrozenCompute = "bf16",
    simulated: bool = False,
) -> SearchResult:
    """Trace a model and return its best plan for the run file's own micro-batch size."""
    may_compile = True in constraints.compile
    model = build_cost_model(target, rates, frozen_compute, may_compile=may_compile)
    result = find_best_plan(model, fixed, budget, constraints, simulated)
    return keep_run_file_batch(result, model, fixed, budget, constraints)


def build_cost_model(
    target: TraceTarget,
    rates: MachineRates,
    frozen_compute: FrozenCompute = "bf16",
    plain_checkpointing: bool = False,
    may_compile: bool = True,
) -> CostModel:
    """Trace a model and return its cost model; `CostModel` explains the other arguments.

    Without `may_compile`, the model predicts eager blocks only, and is made faster.
    """
    shapes = trace_model(target, TRACED_BATCH, may_compile)
    return CostModel(shapes, effective_rates(rates), frozen_compute, plain_checkpointing)


def family_trace_target(
    family: Family, latent_shape: Sequence[int], text: Mapping[str, Tensor]
) -> TraceTarget:
    """Return the model, blocks and inputs for the tracer, for a loaded model with its adapter.

    Of the two transformers of Wan 2.2, the first that is trained is traced. `latent_shape` is the
    shape of one encoded sample; `text` is a batch of text embeddings of any batch size, as
    `stack_text` returns it.
    """
    transformers = transformers_of(family.transformer)
    number = next(
        (
            number
            for number, transformer in enumerate(transformers.values())
            if any(p.requires_grad for p in transformer.parameters())
        ),
        0,
    )
    model = list(transformers.values())[number]
    num_blocks = len(family.blocks()) // len(transformers)
    blocks = family.blocks()[number * num_blocks : (number + 1) * num_blocks]

    def inputs(batch: int) -> dict[str, Tensor]:
        texts = {
            name: torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype)
            for name, tensor in text.items()
        }
        encoded = torch.empty(batch, *latent_shape)
        return {"encoded": encoded, "timesteps": torch.empty(batch), **texts}

    def predict(transformer: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        noisy, given = family.split_encoded(batch["encoded"])
        conditions = {name: batch[name] for name in text} | given
        return family.predict(transformer, noisy, batch["timesteps"], conditions)

    return TraceTarget(family.name, model, blocks, inputs, predict, _compute_dtype(model))


@dataclass(frozen=True)
class TracedCopy:
    """A transformer without weights, to trace instead of one that is divided among ranks."""

    transformer: nn.Module
    blocks: Sequence[nn.Module]
    compute_dtype: torch.dtype | None
    """Dtype of gathered weights; None: as they are stored."""


def copy_for_tracing(family: Family, compute_dtype: torch.dtype | None) -> TracedCopy:
    """Copy the first trained transformer to the meta device; call this before it is divided."""
    transformers = transformers_of(family.transformer)
    number = next(
        number
        for number, transformer in enumerate(transformers.values())
        if any(p.requires_grad for p in transformer.parameters())
    )
    original = list(transformers.values())[number]
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in original.parameters()
    }
    copied = deepcopy(original, memo)
    names = {module: name for name, module in original.named_modules()}
    blocks = [copied.get_submodule(names[block]) for block in family.blocks() if block in names]
    return TracedCopy(copied, blocks, compute_dtype)


def _compute_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of most frozen weights; None if nothing is frozen.

    The first weight's dtype may be another one: a bf16 model may keep a few tables in fp32.
    """
    numels: Counter[torch.dtype] = Counter()
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            numels[module.dtype] += module.in_features * module.out_features
            continue
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad:
                numels[parameter.dtype] += parameter.numel()
    return max(numels, key=lambda dtype: numels[dtype]) if numels else None


# From a run file to the pieces of a problem


def plan_settings(run: RunFile) -> PlanSection:
    """Return the run file's `plan` section, or the defaults if it only says `auto` or `off`."""
    return run.plan if isinstance(run.plan, PlanSection) else PlanSection()


def largest_sample(run: RunFile) -> SampleShape:
    """Return the size of the run's largest sample. A plan that fits it fits all samples."""
    if not run.datasets:
        raise ConfigError(
            "datasets is empty, so the planner does not know the size of a sample. Add a dataset "
            "with a resolution."
        )
    samples = [_largest_sample_of(section) for section in run.datasets]
    largest = max(samples, key=lambda sample: sample.width * sample.height * sample.frames)
    # A smaller sample may have more control images, which have a size of their own.
    return replace(largest, controls=max(sample.controls for sample in samples))


def _largest_sample_of(section: DatasetSection) -> SampleShape:
    frames = 1
    if section.dataset_type == "video":
        frames = section.frames if isinstance(section.frames, int) else max(section.frames)
    edge = section.shapes.size if section.type == "shapes" else max(section.resolutions)
    width = edge
    if section.resolution_type == "edge":  # the longer edge of the widest bucket
        width = int(edge * section.max_aspect)
    return SampleShape(width, edge, frames, len(section.control_folders))


def constraints_of(run: RunFile, num_ranks: int = 1) -> Constraints:
    """Return the choices that the run file leaves to the planner."""
    settings = plan_settings(run)
    batch = run.train.batch_size
    ramp = run.gh200_optimizations
    samples = batch * run.train.gradient_accumulation_steps
    if ramp.enable_batch_size_rampup and ramp.target_effective_batch_size is not None:
        samples = max(batch, ramp.target_effective_batch_size // batch * batch)
    choices = {"auto": (True, False), "always": (True,), "never": (False,)}
    return Constraints(
        samples=samples,
        batches=None if settings.batch == "auto" else (batch,),
        compile=choices[settings.compile],
        stream=settings.stream and run.adapter is not None,  # trained weights cannot be streamed
        offload=settings.offload,
        host_state=_host_state(run),
        managed=managed_choices(run, num_ranks),
        run_file_batch=batch,
    )


def _host_state(run: RunFile) -> tuple[float, ...]:
    """Return the shares of the optimizer's state that the planner may keep in host memory.

    With `auto`, the state of an adapter stays on the device: it is too small to be worth moving.
    """
    if run.optimizer.state == "host":
        return (1.0,)
    whole = run.adapter is None or run.adapter.kind == "full"
    can_split = optimizer_info(run.optimizer.name).state_can_be_split
    if run.optimizer.state == "auto" and whole and can_split:
        return STATE_SHARES
    return (0.0,)


@dataclass(frozen=True, slots=True)
class TrainedSize:
    """Bytes of the trained weights of one transformer, and of their optimizer state.

    Wan 2.2 has two transformers of this size.
    """

    nbytes: int
    """Bytes of the trained weights."""
    state_nbytes: int
    """Bytes of the optimizer's state."""
    state_slots_nbytes: int = 0
    """Bytes of the device buffers through which the state is copied, if it is in host memory."""


def fixed_memory_of(
    run: RunFile, model: MetaModel, trained: TrainedSize, samples: int | None, device_nbytes: int
) -> FixedMemory:
    """Return the memory that the run needs whatever plan is chosen.

    `samples` is the size of the dataset. If it is None (unknown), the caches in host memory are not
    counted.
    """
    latents, text = cached_sample_nbytes(model)
    cache = run.cache_config
    budget_gb = cache.device_budget_gb
    texts = sys.maxsize if samples is None else samples * text
    fixed = FixedMemory(
        optimizer_nbytes=model.num_transformers * trained.state_nbytes,
        num_transformers=model.num_transformers,
        device_caches_nbytes=0 if budget_gb is None else min(texts, int(budget_gb * GIB)),
        text_nbytes=texts,
        text_part=HOT_TEXT_PART if budget_gb is None else 0,
        host_caches_nbytes=_host_caches_nbytes(cache, latents, text, samples),
        library_nbytes=int(FITTED_CONSTANTS["library_nbytes"].value),
        state_slots_nbytes=trained.state_slots_nbytes,
        averages_nbytes=model.num_transformers * trained.nbytes if run.train.ema_decay else 0,
    )
    return fixed.for_budget(device_nbytes)


def cached_sample_nbytes(model: MetaModel) -> tuple[int, int]:
    """Return the bytes of one sample's latents, and of its text embeddings with padding."""
    itemsize, encoded = model.dtype.itemsize, model.encoded
    control = prod(encoded.control_shape) if encoded.control_shape else 0
    latents = prod(encoded.latent_shape) + control
    return itemsize * latents, itemsize * prod(encoded.text_shape)


def _host_caches_nbytes(cache: CacheSection, latents: int, text: int, samples: int | None) -> int:
    if samples is None:
        return 0
    latents = latents if cache.vae_cache_type != "disk" else 0
    text = text if cache.text_cache_type != "disk" else 0
    nbytes = samples * (latents + text)
    return nbytes if cache.host_budget_gb is None else min(nbytes, int(cache.host_budget_gb * GIB))


# The memory table of docs/planning.md
