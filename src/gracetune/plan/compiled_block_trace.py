"""Predict what a compiled block saves for backward, which kernels it runs, and its memory peaks.

AOTAutograd traces forward and backward as one joint graph, and torch's own partitioner decides what
is saved between them; that needs no GPU. Inductor is not run. Its result is predicted with three
rules:

- Matmuls and attention are kernels of their own and read their operands from memory.
- Every other operation is fused into the kernel that needs its result.
- Of two kernel orders (as traced, or freeing memory early), the one with the lower peak is used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy

from gracetune.plan.kernel_recorder import (
    ATTENTION,
    ATTENTION_BACKWARD,
    WeightStorages,
    attention_workspace,
    is_custom_op,
    is_kept_when_lean,
    is_matmul_or_attention,
    matmul_ops,
    storage_id,
    tensors_of,
)
from gracetune.plan.trace_records import HostCalls, Op, Trace, transposed_nbytes

COMPILED_ENTRY_COST = 20.0
"""CPU time to enter a compiled block (guards and wrappers), in units of one operator call."""
RECOMPUTED_FP8_MATMULS = {torch.ops.gracetune.lora_linear_fp8.default}
"""Operators of forward whose second argument is an input that was rounded to fp8."""
Function = Callable[..., tuple[Tensor, ...]]
SavedSet = Literal["all", "matmuls", "attention"]
"""Set of tensors that forward saves. `all`: those that torch's partitioner chooses; `matmuls`: the
outputs of matmuls and attention; `attention`: the outputs of attention alone."""


def joint_graph(function: Function, arguments: Sequence[Tensor]) -> fx.GraphModule:
    """Return forward and backward of a function as one graph (AOTAutograd's joint graph).

    The arguments are fake tensors; call this under their `FakeTensorMode`.
    """
    graph = cast(
        "fx.GraphModule",
        aot_export_joint_simple(
            function, tuple(arguments), trace_joint=True, decompositions=select_decomp_table()
        ),
    )
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and "val" not in node.meta and not node.users:
            graph.graph.erase_node(node)  # the partitioner of torch 2.11 rejects leftover checks
        elif node.target in ATTENTION:
            # The partitioner never recomputes CUDA's attention, but does not know the CPU's.
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return graph


def partition(
    joint: fx.GraphModule,
    num_outputs: int,
    saved_set: SavedSet,
    trained: Sequence[bool],
    hidden: Sequence[int],
) -> Trace:
    """Split a block's joint graph into forward and backward, and predict their kernels and memory.

    `saved_set` selects the tensors that forward saves. The first arguments of the graph are the
    weights; `trained` tells for each whether it is trained. `hidden` has the positions of the
    arguments that are hidden states.
    """
    graph = _copy(joint)  # partitioning modifies the graph
    if saved_set == "matmuls":
        _mark(graph.graph, is_kept_when_lean)
    elif saved_set == "attention":
        _mark(graph.graph, ATTENTION.__contains__)
    with functorch_config.patch(activation_memory_budget=1.0):
        forward, backward = min_cut_rematerialization_partition(
            graph,
            None,
            num_fwd_outputs=num_outputs,
            # Weights exist anyway. Without this, a transposed one might be saved in their place.
            static_lifetime_input_indices=list(range(len(trained))),
        )
    arguments = [node for node in forward.graph.nodes if node.op == "placeholder"]
    owned = {storage for node in arguments for storage in _storages(node)}
    kinds: dict[bool, set[int]] = {False: set(), True: set()}
    for node, is_trained in zip(arguments, trained, strict=False):
        kinds[is_trained].update(_storages(node))
    weights = WeightStorages(frozenset(kinds[False]), frozenset(kinds[True]))
    inputs = {storage for place in hidden for storage in _storages(arguments[place])}
    outputs = _outputs(forward.graph)
    results = {storage for node in outputs[:num_outputs] for storage in _storages(node)}
    # The policy marks more than backward reads; only what backward reads is kept.
    read = {node.name for node in backward.graph.nodes if node.op == "placeholder" and node.users}
    kept_nodes = [node for node in outputs[num_outputs:] if node.name in read]
    saved = {storage: n for node in kept_nodes for storage, n in _sizes(node).items()}
    fused_forward = _FusedGraph(
        forward.graph, owned, weights, [*outputs[:num_outputs], *kept_nodes]
    )
    gradients = _output_slots(backward.graph)[: len(trained)]
    gradient_storages = {
        storage for node in gradients if node is not None for storage in _storages(node)
    }
    fused_backward = _FusedGraph(
        backward.graph, owned | gradient_storages, weights, _outputs(backward.graph)
    )
    return Trace(
        forward=fused_forward.ops,
        backward=fused_backward.ops,
        saved_nbytes=sum(n for storage, n in saved.items() if storage not in owned | results),
        saves_input=bool(inputs & saved.keys()),
        forward_peak_nbytes=fused_forward.peak_nbytes,
        backward_peak_nbytes=fused_backward.peak_nbytes + _rounded_nbytes(backward.graph),
        transposed_nbytes=transposed_nbytes(fused_backward.ops),
        forward_calls=fused_forward.calls(len(kept_nodes)),
        backward_calls=fused_backward.calls(len(kept_nodes)),
    )


def _mark(graph: fx.Graph, is_saved: Callable[[Any], bool]) -> None:
    """Mark each node of forward to be saved or recomputed, as selective checkpointing would."""
    after_loss: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and str(node.target).startswith("tangents"):
            after_loss.add(node)
        if node.op != "call_function" or after_loss & set(node.all_input_nodes):
            after_loss |= {node} if node.op == "call_function" else set()
            continue
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        node.meta["ac_graph_id"] = 0
        node.meta["recompute"] = (
            CheckpointPolicy.MUST_SAVE
            if is_saved(source.target)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )


def _rounded_nbytes(backward: fx.Graph) -> int:
    """Return the bytes of the inputs of fp8 matmuls that backward recomputes.

    Inductor rounds all of them to fp8 first, and keeps them until their matmuls run.
    """
    rounded = [node.args[1] for node in backward.nodes if node.target in RECOMPUTED_FP8_MATMULS]
    sizes = {s: n for node in rounded for s, n in _sizes(cast("fx.Node", node)).items()}
    return sum(sizes.values())


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel of the compiled graph, with the storages that it reads and writes."""

    node: fx.Node
    reads: frozenset[int]
    writes: dict[int, int]
    is_matmul: bool
    """True for matmuls and attention, which cannot write their output over an input."""


class _FusedGraph:
    """The kernels that Inductor would generate for a graph, and their peak of memory."""

    def __init__(
        self,
        graph: fx.Graph,
        owned: set[int],
        weights: WeightStorages,
        outputs: Sequence[fx.Node],
    ) -> None:
        self._weights = weights
        self._outputs = outputs
        self._sizes: dict[int, int] = {}
        self._roots: dict[fx.Node, frozenset[int]] = {}
        """For each node, the storages that a fused kernel reads to compute it."""
        kernels = self._kernels(graph)
        self.ops = tuple(op for kernel in kernels for op in self._ops(kernel))
        self.peak_nbytes = self._peak(graph, kernels, owned)
        self._num_custom_ops = sum(is_custom_op(kernel.node.target) for kernel in kernels)

    def calls(self, saved: int) -> HostCalls:
        """Return the CPU's work to launch the graph, whose pass saves or reads `saved` tensors."""
        return HostCalls(
            kernels=len(self.ops),
            custom_ops=self._num_custom_ops,
            saved_tensors=saved,
            entry_cost=COMPILED_ENTRY_COST,
        )

    def _kernels(self, graph: fx.Graph) -> list[_Kernel]:
        kernels = []
        for node in graph.nodes:
            writes = _sizes(node)
            self._sizes |= writes
            if node.op == "placeholder":
                self._roots[node] = frozenset(writes)
                continue
            if node.op != "call_function":
                continue
            known = frozenset(
                root for source in node.all_input_nodes for root in self._roots.get(source, ())
            )
            before = {s for source in node.all_input_nodes for s in _storages(source)}
            if (
                not writes or writes.keys() <= before
            ):  # a view, or one of several outputs of an operator
                shared = known & writes.keys()
                self._roots[node] = shared or known
            elif is_matmul_or_attention(node.target) or _is_needed_in_memory(node):
                self._roots[node] = frozenset(writes)
                kernels.append(_Kernel(node, known, writes, is_matmul_or_attention(node.target)))
            else:
                self._roots[node] = known  # fused into the kernels that read it
        return kernels

    def _ops(self, kernel: _Kernel) -> list[Op]:
        node = kernel.node
        read = sum(self._sizes[storage] for storage in kernel.reads)
        nbytes = float(read + sum(kernel.writes.values()))
        if not kernel.is_matmul:
            op = Op("elementwise", 0.0, nbytes)
            if kernel.reads and kernel.reads <= self._weights.frozen:
                written = float(sum(kernel.writes.values()))
                op = replace(op, weights_nbytes=nbytes, out_nbytes=written)
            return [op]
        func = cast("torch._ops.OpOverload", node.target)
        values = tree_map(_value, node.args)
        return matmul_ops(func, values, node.meta["val"], nbytes, self._weights, backward=False)

    def _peak(self, graph: fx.Graph, kernels: list[_Kernel], owned: set[int]) -> int:
        """Return the lower memory peak, in bytes, of the two kernel orders that Inductor tries."""
        orders = (kernels, self._freeing_first(kernels, owned))
        return min(self._highest(graph, order, owned) for order in orders)

    def _freeing_first(self, kernels: list[_Kernel], owned: set[int]) -> list[_Kernel]:
        """Return a kernel order in which kernels that free as much as they write run early.

        Of parallel branches, the one with the larger tensors is finished before the other starts.
        """
        written_inside = {storage for kernel in kernels for storage in kernel.writes}
        kept = {root for node in self._outputs for root in self._roots.get(node, ())} | owned
        waiting, order = list(kernels), list[_Kernel]()
        available: set[int] = set()

        def growth(kernel: _Kernel) -> int:
            needed = kept.union(*(other.reads for other in waiting if other is not kernel))
            written = sum(n for storage, n in kernel.writes.items() if storage not in owned)
            return written - sum(self._sizes[storage] for storage in kernel.reads - needed)

        while waiting:
            ready = [k for k in waiting if k.reads & written_inside <= available | k.writes.keys()]
            best = min(ready, key=growth)
            order.append(best if growth(best) <= 0 else waiting[0])
            waiting.remove(order[-1])
            available |= order[-1].writes.keys()
        return order

    def _highest(self, graph: fx.Graph, kernels: list[_Kernel], owned: set[int]) -> int:
        """Return the peak of memory, in bytes, if kernels run in this order.

        A tensor is freed after its last use. Storages in `owned` belong to the caller and do not
        count.
        """
        last = {s: place for place, kernel in enumerate(kernels) for s in kernel.reads}
        for node in self._outputs:
            last |= dict.fromkeys(self._roots.get(node, ()), len(kernels))
        alive = {
            storage: nbytes
            for node in graph.nodes
            if node.op == "placeholder" and node.users
            for storage, nbytes in _sizes(node).items()
            if storage not in owned
        }
        peak = sum(alive.values())
        for place, kernel in enumerate(kernels):
            dying = [s for s in kernel.reads if s in alive and last[s] == place]
            if not kernel.is_matmul:  # an elementwise kernel may reuse memory that it reads last
                for storage in dying:
                    del alive[storage]
            alive |= {s: n for s, n in kernel.writes.items() if s not in owned}
            workspace = _workspace(kernel.node)
            peak = max(peak, sum(alive.values()) + workspace)
            for storage in [*dying, *kernel.writes]:
                if last.get(storage, place) <= place:
                    alive.pop(storage, None)
        return peak


def _is_needed_in_memory(node: fx.Node) -> bool:
    """Return True if a node's result must be written to memory, so that it cannot be fused.

    That is so if a matmul, attention or the caller reads it, possibly through views.
    """
    waiting, mine = list(node.users), set(_storages(node))
    while waiting:
        user = waiting.pop()
        if user.op == "output" or is_matmul_or_attention(user.target):
            return True
        if mine & set(_storages(user)):
            waiting += user.users
    return False


def _workspace(node: fx.Node) -> int:
    if node.target not in ATTENTION_BACKWARD:
        return 0
    return attention_workspace(_value(node.args[1]))


def _value(argument: object) -> Any:
    """Return the fake tensor of an fx node, or None; return other arguments unchanged."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _storages(node: fx.Node) -> list[int]:
    return [storage_id(tensor) for tensor in tensors_of(node.meta.get("val"))]


def _sizes(node: fx.Node) -> dict[int, int]:
    return {
        storage_id(tensor): int(tensor.untyped_storage().nbytes())
        for tensor in tensors_of(node.meta.get("val"))
    }


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in _output_slots(graph) if node is not None]


def _output_slots(graph: fx.Graph) -> list[fx.Node | None]:
    """Return the output nodes of a graph by position; None where an output is not a node."""
    (node,) = [node for node in graph.nodes if node.op == "output"]
    given = cast("Sequence[object]", node.args[0])
    return [leaf if isinstance(leaf, fx.Node) else None for leaf in given]
