"""Trace one training step of a model on fake tensors and return its `ModelTraces`.

1. A forward pass of the whole model records the inputs of each block (`record_block_calls`).
2. Blocks with equal weights and inputs are one kind. One block of each kind is traced: eagerly by
   running it under a `KernelRecorder`, compiled by partitioning its joint graph.
3. The rest of the model is traced with stubs in place of the blocks.

The model may be loaded or on the meta device. Its weights are not read and nothing is computed.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import _lru_cache_wrapper, partial
from inspect import isfunction, unwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gracetune.adapters.compute.fp8_linear import BASE_LAYER, Fp8Linear, convert_to_fp8
from gracetune.adapters.compute.outlier_subspace import num_dimensions
from gracetune.adapters.compute.quantized_linear import QuantizedLinear
from gracetune.errors import ModelError
from gracetune.offload.checkpointing import MASK, TOKEN_DIMS, dynamic_dims
from gracetune.plan.compiled_block_trace import joint_graph, partition
from gracetune.plan.kernel_recorder import (
    CudaKernels,
    Fp8Kernels,
    KernelRecorder,
    storage_id,
    tensors_of,
    touched_nbytes,
)
from gracetune.plan.trace_records import (
    BlockTraces,
    ModelTraces,
    Trace,
    TracesByMode,
    recomputed_trace,
    transposed_nbytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gracetune.plan.compiled_block_trace import SavedSet
    from gracetune.plan.trace_records import HostCalls

STEP_OPS = (33.0, 2.0)
"""Kernel launches of a micro-batch in forward and in backward that are not traced: for timesteps,
noise, the target, the loss and the recorder's sums, less those of the traced loss. A test counts
them in `train.step.batch_losses`."""


@dataclass(frozen=True)
class TraceTarget:
    """A model to trace, with its adapter, and functions that make its inputs and call it."""

    name: str
    model: nn.Module
    blocks: Sequence[nn.Module]
    """The transformer blocks, in forward order."""
    inputs: Callable[[int], dict[str, Tensor]]
    """Function that returns a batch of the given size, as the data loader would. It is called under
    `FakeTensorMode`."""
    predict: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    """Function that calls the model with a batch from `inputs` and returns the model's
    prediction."""
    compute_dtype: torch.dtype | None = None
    """Dtype to which trained weights are cast once per pass; None: they are not cast."""


@dataclass(frozen=True)
class TracedCall:
    """Recorded arguments and outputs of one call of a block, flattened by `torch.utils._pytree`."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    hidden: tuple[int, ...]
    """Positions of the hidden states in `leaves`. They come from earlier blocks, or are shaped like
    the outputs: those of the first block, and those made of several outputs of earlier blocks. If
    there are none, the first tensor is taken, which a block of a U-Net turns into another shape."""
    outputs: tuple[Any, ...]
    """The flattened outputs of the block; the last block may return None for unused ones."""
    out_spec: TreeSpec

    @property
    def hidden_states(self) -> list[Tensor]:
        """The arguments that are hidden states."""
        return [self.leaves[place] for place in self.hidden]


class CalledModel(nn.Module):
    """Module whose forward calls `TraceTarget.predict`, for `torch.func.functional_call`."""

    def __init__(self, target: TraceTarget) -> None:
        super().__init__()
        self.model = target.model
        self._predict = target.predict

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self._predict(self.model, batch)


def trace_model(target: TraceTarget, batch: int, may_compile: bool = True) -> ModelTraces:
    """Trace a training step of a model at this batch size; return its kernels, sizes and memory.

    Without `may_compile`, compiled blocks are not traced, which takes most of the time.
    """
    check_blocks(target)
    with _without_collections():
        return _trace_model(target, batch, may_compile)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage while a model is traced.

    Tracing makes millions of objects, and each full collection would visit all of the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _trace_model(target: TraceTarget, batch: int, may_compile: bool) -> ModelTraces:
    # Tables such as rotary frequencies may be plain attributes, which stay real tensors.
    with _helpers_restored(target.model), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = fake_weights(target.model, target.compute_dtype)
        calls = record_block_calls(target, fakes, batch)
        groups: dict[object, int] = {}
        kinds: list[BlockTraces] = []
        order = []
        for block, call in zip(target.blocks, calls, strict=True):
            key = block_signature(block, call.leaves), call.hidden
            if key not in groups:
                groups[key] = len(kinds)
                with _without_pre_hooks(block):
                    kinds.append(_trace_block(block, fakes, call, may_compile))
            order.append(groups[key])
        graphs, dynamic_graphs = _graphs(target, calls)
        outside, batch_nbytes = _trace_outside(target, fakes, calls, batch)
    _forget_fakes(target.model)
    inside = {id(p) for block in target.blocks for p in block.parameters()}
    rest = [p for p in target.model.parameters() if id(p) not in inside]
    buffers = list(target.model.buffers())
    return ModelTraces(
        name=target.name,
        batch=batch,
        kinds=tuple(kinds),
        order=tuple(order),
        outside=outside,
        outside_frozen_nbytes=_nbytes(buffers) + _nbytes(t for t in rest if not t.requires_grad),
        outside_trained_nbytes=_nbytes(t for t in rest if t.requires_grad),
        batch_nbytes=batch_nbytes,
        graphs=graphs,
        dynamic_graphs=dynamic_graphs,
    )


def _graphs(
    target: TraceTarget, calls: Sequence[TracedCall]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a number for each block: of those that share a compiled graph.

    The second numbers are those of graphs that accept inputs of any length.
    """
    inside = {id(p) for block in target.blocks for p in block.parameters()}
    has_gradient = any(p.requires_grad for p in target.model.parameters() if id(p) not in inside)
    fixed: dict[object, int] = {}
    dynamic: dict[object, int] = {}
    found = []
    for block, call in zip(target.blocks, calls, strict=True):
        is_trained = any(p.requires_grad for p in block.parameters())
        modules = block_signature(block, []), _constants(block), repr(call.spec)
        inputs = _input_signature(call, is_trained=is_trained, has_gradient=has_gradient)
        keys = [(modules, tuple(one)) for one in inputs]
        found.append(
            [
                numbers.setdefault(key, len(numbers))
                for key, numbers in zip(keys, (fixed, dynamic), strict=True)
            ]
        )
        has_gradient |= is_trained
    first, second = zip(*found, strict=True)
    return first, second


def _input_signature(
    call: TracedCall, *, is_trained: bool, has_gradient: bool
) -> tuple[list[object], list[object]]:
    """Return what a compiled graph depends on in a block's inputs; the second: without lengths.

    `has_gradient` says that something before the block is trained, so that its hidden states need a
    gradient. Those of a block with trained weights always get one (`BlockCompiler`), but not the
    images of a U-Net.
    """
    args, kwargs = tree_unflatten(call.leaves, call.spec)
    free = {
        id(tensor): dynamic_dims(tensor, is_mask=MASK in name)
        for name, value in [("", args), *kwargs.items()]
        for tensor in tensors_of(value)
    }
    fixed: list[object] = []
    dynamic: list[object] = []
    for place, leaf in enumerate(call.leaves):
        if not isinstance(leaf, Tensor):
            fixed.append(repr(leaf))
            dynamic.append(repr(leaf))
            continue
        gets_gradient = has_gradient or (is_trained and leaf.dim() == TOKEN_DIMS)
        rest = leaf.dtype, place in call.hidden and gets_gradient
        fixed.append((tuple(leaf.shape), rest))
        shape = [None if dim in free[id(leaf)] else n for dim, n in enumerate(leaf.shape)]
        dynamic.append((tuple(shape), rest))
    return fixed, dynamic


def _constants(block: nn.Module) -> tuple[object, ...]:
    """Return the numbers and words that forward reads from modules: the compiler fixes them."""
    found: list[object] = []
    for name, module in block.named_modules():
        read = unwrap(type(module).forward).__code__.co_names
        for attribute, value in vars(module).items():
            if attribute in read and isinstance(value, bool | int | float | str):
                found.append((name, attribute, type(value), value))
    return tuple(found)


@contextmanager
def _helpers_restored(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of objects that modules hold, such as a table made in the first pass.

    A pass under `FakeTensorMode` would leave fake tensors in them.
    """
    helpers = {
        id(value): (vars(value), dict(vars(value)))
        for module in model.modules()
        for value in vars(module).values()
        if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type)
    }
    try:
        yield
    finally:
        for attributes, before in helpers.values():
            attributes.clear()
            attributes.update(before)


def _forget_fakes(model: nn.Module) -> None:
    """Clear the `lru_cache`s of the model's methods, which tracing has filled with fake tensors."""
    for kind in {type(module) for module in model.modules()}:
        for method in vars(kind).values():
            inside = method.__closure__ or () if isfunction(method) else ()
            for found in (method, *(cell.cell_contents for cell in inside)):
                if isinstance(found, _lru_cache_wrapper):
                    found.cache_clear()


@contextmanager
def _without_pre_hooks(block: nn.Module) -> Iterator[None]:
    """Call a block with arguments that its hooks have changed already, such as split tokens."""
    hooks = block._forward_pre_hooks
    block._forward_pre_hooks = type(hooks)()
    try:
        yield
    finally:
        block._forward_pre_hooks = hooks


def _fresh(call: TracedCall) -> list[Any]:
    """Return empty tensors like a call's arguments; hidden states require gradients."""
    leaves = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in call.leaves]
    for place in call.hidden:
        leaves[place].requires_grad_(True)
    return leaves


def _trace_block(
    block: nn.Module, fakes: dict[int, Tensor], call: TracedCall, may_compile: bool
) -> BlockTraces:
    parameters = list(block.parameters())
    trained = [p for p in parameters if p.requires_grad]
    copies_nbytes = sum(fakes[id(p)].nbytes for p in trained if fakes[id(p)].dtype != p.dtype)
    input_nbytes = sum(touched_nbytes(leaf) for leaf in call.hidden_states)
    compiled = None
    if may_compile:
        partition_for = _compiled(block, fakes, call)
        compiled = TracesByMode(
            partition_for("all"), partition_for("matmuls"), partition_for("attention")
        )
    return BlockTraces(
        frozen_nbytes=_nbytes(p for p in parameters if not p.requires_grad),
        trained_nbytes=_nbytes(trained),
        input_nbytes=input_nbytes,
        eager=_eager_modes(_trace_eager(block, fakes, call), input_nbytes),
        compiled=compiled,
        cast_copies_nbytes=copies_nbytes,
        num_trained=len(trained),
        dequantized_nbytes=_dequantized_nbytes(block),
    )


def _dequantized_nbytes(block: nn.Module) -> int:
    """Return the bytes of the largest weight of a block that is dequantized for its matmul."""
    layers = [layer for layer in block.modules() if isinstance(layer, QuantizedLinear)]
    sizes = [n.in_features * n.out_features * n.dtype.itemsize for n in layers]
    return max(sizes, default=0)


def _eager_modes(keep: Trace, input_nbytes: int) -> TracesByMode:
    """Derive an eager block's traces in all activation modes from that of mode `keep`.

    Mode `lean` saves the outputs of attention and of matmuls with frozen weights. A LoRA's own
    matmuls, and dequantization, are part of the same operator and are not saved separately.
    """
    attention = [op for op in keep.forward if op.kind == "attention"]
    has_frozen = any(op.frozen for op in keep.forward)
    matmuls = [op for op in keep.forward if (op.frozen if has_frozen else op.kind == "gemm")]
    lean = recomputed_trace(keep, [*matmuls, *attention], input_nbytes)
    return TracesByMode(keep, lean, recomputed_trace(keep, attention, input_nbytes))


def _trace_eager(block: nn.Module, fakes: dict[int, Tensor], call: TracedCall) -> Trace:
    weights = named_fakes(block, fakes)
    leaves = _fresh(call)
    inputs = [leaves[place] for place in call.hidden]
    trained = [w for w in weights.values() if w.requires_grad]
    recorder = KernelRecorder(weights.values(), tensors_of(leaves))
    saved: dict[int, int] = {}
    num_read = num_saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal num_read, num_saved
        num_saved += 1
        saved[storage_id(tensor)] = int(tensor.untyped_storage().nbytes())
        num_read = recorder.num_ops
        return tensor

    args, kwargs = tree_unflatten(leaves, call.spec)
    with recorder, CudaKernels(), Fp8Kernels():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = functional_call(block, weights, args, kwargs)
        outputs = [t for t in tensors_of(output) if t.requires_grad]
        results = {storage_id(t) for t in outputs}
        forward_calls = recorder.take_calls(num_saved)
        forward, forward_peak = recorder.take()
        before = recorder.live_nbytes
        kept = sum(n for s, n in saved.items() if recorder.is_alive(s) and s not in results)
        recorder.backward = True
        gradients = [torch.empty_like(t) for t in outputs]
        leaves_with_grad = [*trained, *inputs]
        found = torch.autograd.grad(outputs, leaves_with_grad, gradients, allow_unused=True)
        backward_calls = recorder.take_calls(num_saved)
        backward, backward_peak = recorder.take(excluded=tensors_of(found[: len(trained)]))
    return Trace(
        forward=forward,
        backward=backward,
        saved_nbytes=kept,
        saves_input=any(storage_id(t) in saved for t in inputs),
        forward_peak_nbytes=forward_peak,
        # The output belongs to the next block, which has finished its backward by now.
        backward_peak_nbytes=backward_peak - (before - kept),
        transposed_nbytes=transposed_nbytes(backward),
        num_needed=num_read,
        forward_calls=forward_calls,
        backward_calls=backward_calls,
    )


def _compiled(
    block: nn.Module, fakes: dict[int, Tensor], call: TracedCall
) -> Callable[[SavedSet], Trace]:
    """Trace a block's forward and backward as one graph, as the compiler would.

    Returns a function that takes the set of tensors to save, splits the graph accordingly, and
    returns the kernels and memory of the parts.
    """
    weights = named_fakes(block, fakes)
    names = list(weights)
    leaves = _fresh(call)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, arguments[len(names) :], strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, call.spec)
        output = functional_call(block, dict(zip(names, arguments, strict=False)), args, kwargs)
        # Two outputs may be slices of one tensor; a compiled block then returns that tensor.
        bases = {id(base): base for base in map(_base, tensors_of(output))}
        return tuple(bases.values())

    arguments = [*weights.values(), *tensors_of(leaves)]
    with Fp8Kernels():
        joint = joint_graph(run, arguments)
    return lambda saved_set: partition(
        joint,
        num_outputs=len({storage_id(tensor) for tensor in tensors_of(call.outputs)}),
        saved_set=saved_set,
        trained=[weight.requires_grad for weight in weights.values()],
        hidden=[len(names) + places.index(place) for place in call.hidden],
    )


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _trace_outside(
    target: TraceTarget, fakes: dict[int, Tensor], calls: Sequence[TracedCall], batch: int
) -> tuple[Trace, int]:
    """Return kernels and memory of embeddings, head and loss, and the bytes of the batch."""
    weights = named_fakes(target.model, fakes, "model.")
    inputs = target.inputs(batch)
    recorder = KernelRecorder(weights.values(), inputs.values())
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_id(tensor)] = int(tensor.untyped_storage().nbytes())
        return tensor

    with stub_blocks(target.blocks, calls), recorder, CudaKernels():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            prediction = functional_call(CalledModel(target), weights, (inputs,))
            loss = prediction.float().square().mean()
        forward_calls = _with_kernels(recorder.take_calls(len(saved)), STEP_OPS[0])
        forward, forward_peak = recorder.take()
        kept = sum(n for s, n in saved.items() if recorder.is_alive(s))
        del prediction
        recorder.backward = True
        loss.backward()
        backward_calls = _with_kernels(recorder.take_calls(len(saved)), STEP_OPS[1])
        backward, backward_peak = recorder.take(
            excluded=tensors_of([w.grad for w in weights.values()])
        )
    shared = {storage_id(t): int(t.untyped_storage().nbytes()) for t in _context(calls)}
    trace = Trace(
        forward=forward,
        backward=backward,
        saved_nbytes=kept + sum(shared.values()),
        saves_input=False,
        forward_peak_nbytes=forward_peak,
        backward_peak_nbytes=backward_peak,
        forward_calls=forward_calls,
        backward_calls=backward_calls,
    )
    return trace, sum(tensor.nbytes for tensor in inputs.values())


def _with_kernels(calls: HostCalls, count: float) -> HostCalls:
    return replace(calls, kernels=calls.kernels + count)


def _context(calls: Sequence[TracedCall]) -> list[Tensor]:
    """Return the tensor arguments of all blocks that are not hidden states.

    These are text, timestep embedding and positions, which blocks usually share.
    """
    return [
        leaf
        for call in calls
        for place, leaf in enumerate(call.leaves)
        if isinstance(leaf, Tensor) and place not in call.hidden
    ]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# The model seen from outside. Everything below runs under the fake-tensor mode of the caller.


def check_blocks(target: TraceTarget) -> None:
    """Raise an error if the target has no blocks."""
    if not target.blocks:
        children = ", ".join(name for name, _ in target.model.named_children())
        raise ModelError(
            f"model {target.name!r} names no blocks, so nothing can be streamed or recomputed. Let "
            "the family's blocks() return the repeated modules in forward order; "
            f"{type(target.model).__name__} consists of: {children}."
        )


def fake_weights(model: nn.Module, compute_dtype: torch.dtype | None) -> dict[int, Tensor]:
    """Return a fake CPU tensor for each parameter and buffer, keyed by the `id` of the real tensor.

    Trained parameters get the compute dtype, if there is one.
    """
    fakes = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        is_cast = compute_dtype is not None and tensor.requires_grad
        dtype = compute_dtype if is_cast else tensor.dtype
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
    return fakes


def named_fakes(module: nn.Module, fakes: dict[int, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the fake tensors of a module's parameters and buffers by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {prefix + name: fakes[id(tensor)] for name, tensor in named}


def convert_for_tracing(target: TraceTarget) -> None:
    """Convert the frozen layers of a model on the meta device to fp8, as a run does before fusing.

    Layers with the same input, such as query, key and value, share an outlier basis, so that their
    input is rounded once.
    """
    groups = _layers_by_input(target)
    with torch.device("meta"):
        convert_to_fp8(target.blocks)
    for block in target.blocks:
        for names in groups[_linear_names(block)]:
            layers = [block.get_submodule(name) for name in names]
            _share_outlier_basis([layer for layer in layers if isinstance(layer, Fp8Linear)])


def _share_outlier_basis(layers: Sequence[Fp8Linear]) -> None:
    """Give layers with the same input an outlier basis without values."""
    for layer in layers[:1]:
        width = layer.in_features
        basis = torch.empty(num_dimensions(width), width, dtype=torch.bfloat16, device="meta")
        shared = nn.Parameter(basis, requires_grad=False)
        for one in layers:
            projected = basis.new_empty(one.out_features, len(basis))
            one.outlier_basis = shared
            one.outlier_weight = nn.Parameter(projected, requires_grad=False)


def _layers_by_input(target: TraceTarget) -> dict[tuple[str, ...], list[list[str]]]:
    """Return the names of linear layers in a block, those with the same input together.

    The keys are the names of all linear layers of a block, which equal blocks have in common.
    """
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    last: list[object] = [None]

    def observe(
        found: list[list[str]], name: str, _: nn.Module, inputs: tuple[Tensor, ...]
    ) -> None:
        if inputs[0] is not last[0]:
            found.append([])
        last[0] = inputs[0]
        found[-1].append(name)

    with ExitStack() as undo:
        for block in target.blocks:
            names = _linear_names(block)
            if names in groups:
                continue
            groups[names] = []
            for name in names:
                # An adapter may call its layer with a cast copy of the input.
                parent, _, leaf = name.rpartition(".")
                called = block.get_submodule(parent if leaf == BASE_LAYER else name)
                hook = called.register_forward_pre_hook(partial(observe, groups[names], name))
                undo.callback(hook.remove)
        undo.enter_context(_helpers_restored(target.model))
        undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fakes = fake_weights(target.model, target.compute_dtype)
        record_block_calls(target, fakes, batch=1)
    _forget_fakes(target.model)
    return groups


def _linear_names(block: nn.Module) -> tuple[str, ...]:
    """Return the names of a block's frozen linear layers, before or after conversion to fp8."""
    return tuple(
        name
        for name, module in block.named_modules()
        if type(module) in (nn.Linear, Fp8Linear)
        and not any(p.requires_grad for p in module.parameters())
    )


def record_block_calls(
    target: TraceTarget, fakes: dict[int, Tensor], batch: int
) -> list[TracedCall]:
    """Run the whole model once and return the recorded arguments and outputs of each block."""
    seen: dict[nn.Module, TracedCall] = {}
    hidden_storages: set[int] = set()
    known: dict[object, tuple[list[Any], TreeSpec]] = {}
    """Flattened outputs by block signature: of several equal blocks, only the first is run."""

    def recording(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            kind = block_signature(block, leaves)
            if kind not in known:
                known[kind] = tree_flatten(forward(*args, **kwargs))
            outputs, out_spec = _fresh_outputs(known[kind][0]), known[kind][1]
            tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            places = [i for i, leaf in tensors if storage_id(leaf) in hidden_storages]
            if not places:  # the first block, or one after outputs were concatenated
                places = [i for i, leaf in tensors if _like_any(leaf, outputs)]
            if not places:  # a block that changes the size of its input
                places = [i for i, _ in tensors[:1]]
            hidden_storages.update(storage_id(tensor) for tensor in tensors_of(outputs))
            seen[block] = TracedCall(tuple(leaves), spec, tuple(places), tuple(outputs), out_spec)
            return tree_unflatten(outputs, out_spec)

        return run

    with ExitStack() as stack, torch.no_grad():
        for block in target.blocks:
            stack.enter_context(_replaced(block, recording(block, block.forward)))
        weights = named_fakes(target.model, fakes, "model.")
        functional_call(CalledModel(target), weights, (target.inputs(batch),))
    missing = [i for i, block in enumerate(target.blocks) if block not in seen]
    if missing:
        raise ModelError(
            f"block {missing[0]} of {target.name!r} is never called by a forward pass, so it "
            "cannot be planned. Let the family's blocks() return the modules that forward calls."
        )
    return [seen[block] for block in target.blocks]


def block_signature(block: nn.Module, leaves: Sequence[Any]) -> object:
    """Return a key that is equal for blocks that do the same work on inputs of the same shapes."""
    weights = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()
    )
    given = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return type(block), repr(block), weights, given


def _fresh_outputs(outputs: Sequence[Any]) -> list[Any]:
    """Return empty tensors like the outputs. Outputs that share a storage share one again."""
    bases: dict[int, Tensor] = {}
    fresh: list[Any] = []
    for leaf in outputs:
        if not isinstance(leaf, Tensor):
            fresh.append(leaf)
            continue
        count = int(leaf.untyped_storage().nbytes()) // leaf.element_size()
        base = bases.setdefault(storage_id(leaf), torch.empty(count, dtype=leaf.dtype))
        fresh.append(base.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset()))
    return fresh


def _like_any(leaf: Tensor, outputs: Sequence[Any]) -> bool:
    return any(leaf.shape == out.shape and leaf.dtype == out.dtype for out in tensors_of(outputs))


class _BlockStub(torch.autograd.Function):
    """Stub of a block: returns outputs and gradients of the right shapes, and saves nothing."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, like: Sequence[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.inputs = [(t.shape, t.dtype) for t in (anchor, *inputs)]
        return tuple(torch.empty_like(tensor) for tensor in like)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        anchor, *rest = (torch.empty(shape, dtype=dtype) for shape, dtype in ctx.inputs)
        return anchor, None, *rest


@contextmanager
def stub_blocks(blocks: Sequence[nn.Module], calls: Sequence[TracedCall]) -> Iterator[None]:
    """Replace the forward of blocks by stubs while the rest of the model is traced.

    A stub returns outputs of the recorded shapes and computes nothing.
    """
    anchor = torch.empty(1, requires_grad=True)  # without it, frozen embeddings would need no graph

    def stub(call: TracedCall) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_flatten((args, kwargs))[0]
            inputs = [leaves[place] for place in call.hidden]
            apply: Callable[..., tuple[Tensor, ...]] = _BlockStub.apply
            made = iter(apply(anchor, tensors_of(call.outputs), *inputs))
            outputs = [next(made) if isinstance(x, Tensor) else x for x in call.outputs]
            return tree_unflatten(outputs, call.out_spec)

        return forward

    with ExitStack() as stack:
        for block, call in zip(blocks, calls, strict=True):
            stack.enter_context(_replaced(block, stub(call)))
        yield


@contextmanager
def _replaced(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = block.__dict__.get("forward")
    block.__dict__["forward"] = forward
    try:
        yield
    finally:
        del block.__dict__["forward"]
        if own is not None:
            block.__dict__["forward"] = own
