"""What a block does when it is compiled: its joint graph, cut in two as torch would cut it.

AOTAutograd's own partitioner decides what is saved; that needs no GPU. What its compiler fuses is
modelled: matrix products and attention are kernels of their own and their operands are in memory,
all else is folded into whatever kernel needs it. So is the order in which it computes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy

from gracetune.plan.kernels import (
    ATTENTION,
    ATTENTION_BACKWARD,
    WeightStorages,
    attention_workspace,
    is_custom_op,
    is_matmul_or_attention,
    matmul_ops,
    storage_id,
    tensors_of,
)
from gracetune.plan.shapes import HostCalls, Op, Trace

CALL = 20.0
"""Operators that a host could call while it gets into a compiled block: guards and wrappers."""
Function = Callable[..., tuple[Tensor, ...]]
SavedSet = Literal["all", "products", "attention"]
"""All that the compiler would keep; or what products and attention gave; or what attention did."""


def joint_graph(function: Function, arguments: Sequence[Tensor]) -> fx.GraphModule:
    """Forward and backward as one graph; to be called under the arguments' fake mode."""
    graph = cast(
        "fx.GraphModule",
        aot_export_joint_simple(
            function, tuple(arguments), trace_joint=True, decompositions=select_decomp_table()
        ),
    )
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and "val" not in node.meta and not node.users:
            graph.graph.erase_node(node)  # torch 2.11 leaves checks in it, and cuts no such graph
        elif node.target in ATTENTION:
            # The partitioner knows CUDA's attention as too dear to do twice, but not the CPU's.
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return graph


def partition(
    joint: fx.GraphModule,
    num_outputs: int,
    kept: SavedSet,
    trained: Sequence[bool],
    flowing: Sequence[int],
) -> Trace:
    """The trace of a block that keeps so much of its forward pass.

    Of the arguments, weights come first; `trained` tells which of them are. `flowing` are the
    places of those that come from the block before.
    """
    graph = _copy(joint)  # cutting uses it up
    if kept != "all":
        _mark(graph.graph, is_matmul_or_attention if kept == "products" else ATTENTION.__contains__)
    with functorch_config.patch(activation_memory_budget=1.0):
        forward, backward = min_cut_rematerialization_partition(
            graph, None, num_fwd_outputs=num_outputs
        )
    arguments = [node for node in forward.graph.nodes if node.op == "placeholder"]
    owned = {storage for node in arguments for storage in _storages(node)}
    kinds: dict[bool, set[int]] = {False: set(), True: set()}
    for node, is_trained in zip(arguments, trained, strict=False):
        kinds[is_trained].update(_storages(node))
    weights = WeightStorages(frozenset(kinds[False]), frozenset(kinds[True]))
    inputs = {storage for place in flowing for storage in _storages(arguments[place])}
    outputs = _outputs(forward.graph)
    results = {storage for node in outputs[:num_outputs] for storage in _storages(node)}
    # A policy marks more than backward reads; what it does not read is not kept.
    read = {node.name for node in backward.graph.nodes if node.op == "placeholder" and node.users}
    kept_nodes = [node for node in outputs[num_outputs:] if node.name in read]
    saved = {storage: n for node in kept_nodes for storage, n in _sizes(node).items()}
    there = _Fused(forward.graph, owned, weights, [*outputs[:num_outputs], *kept_nodes])
    gradients = _places(backward.graph)[: len(trained)]
    apart = {storage for node in gradients if node is not None for storage in _storages(node)}
    back = _Fused(backward.graph, owned | apart, weights, _outputs(backward.graph))
    return Trace(
        forward=there.ops,
        backward=back.ops,
        saved_nbytes=sum(n for storage, n in saved.items() if storage not in owned | results),
        saves_input=bool(inputs & saved.keys()),
        forward_peak_nbytes=there.peak_nbytes,
        backward_peak_nbytes=back.peak_nbytes,
        forward_calls=there.calls(len(kept_nodes)),
        backward_calls=back.calls(len(kept_nodes)),
    )


def _mark(graph: fx.Graph, is_kept: Callable[[Any], bool]) -> None:
    """Mark forward as selective checkpointing does."""
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
            if is_kept(source.target)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


@dataclass(frozen=True, slots=True)
class _Kernel:
    node: fx.Node
    reads: frozenset[int]
    writes: dict[int, int]
    own: bool
    """A product or attention: it cannot write over what it reads."""


class _Fused:
    """A graph as the kernels that a compiler makes of it, with what is alive meanwhile."""

    def __init__(
        self,
        graph: fx.Graph,
        owned: set[int],
        weights: WeightStorages,
        gives: Sequence[fx.Node],
    ) -> None:
        self._weights = weights
        self._gives = gives
        self._sizes: dict[int, int] = {}
        self._roots: dict[fx.Node, frozenset[int]] = {}
        kernels = self._kernels(graph)
        self.ops = tuple(op for kernel in kernels for op in self._ops(kernel))
        self.peak_nbytes = self._peak(graph, kernels, owned)
        self._own = sum(is_custom_op(kernel.node.target) for kernel in kernels)

    def calls(self, saved: int) -> HostCalls:
        """What queueing it takes: one call, which launches kernels and calls operators of ours."""
        return HostCalls(
            kernels=len(self.ops), custom_ops=self._own, saved_tensors=saved, entry_cost=CALL
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
            if not writes or writes.keys() <= before:  # a view, or one of several outputs
                shared = known & writes.keys()
                self._roots[node] = shared or known
            elif is_matmul_or_attention(node.target) or _is_needed_in_memory(node):
                self._roots[node] = frozenset(writes)
                kernels.append(_Kernel(node, known, writes, is_matmul_or_attention(node.target)))
            else:
                self._roots[node] = known  # folded into whoever reads it
        return kernels

    def _ops(self, kernel: _Kernel) -> list[Op]:
        node = kernel.node
        read = sum(self._sizes[storage] for storage in kernel.reads)
        nbytes = float(read + sum(kernel.writes.values()))
        if not kernel.own:
            return [Op("elementwise", 0.0, nbytes)]
        func = cast("torch._ops.OpOverload", node.target)
        values = tree_map(_value, node.args)
        return matmul_ops(func, values, node.meta["val"], nbytes, self._weights, backward=False)

    def _peak(self, graph: fx.Graph, kernels: list[_Kernel], owned: set[int]) -> int:
        """Of the orders that a compiler tries, it takes the one with the lowest peak."""
        orders = (kernels, self._freeing_first(kernels, owned))
        return min(self._highest(graph, order, owned) for order in orders)

    def _freeing_first(self, kernels: list[_Kernel], owned: set[int]) -> list[_Kernel]:
        """Whatever frees as much as it writes goes as soon as it can, what frees most before the
        rest: of branches side by side, the wide one is done with before the other begins.
        """
        made = {storage for kernel in kernels for storage in kernel.writes}
        stays = {root for node in self._gives for root in self._roots.get(node, ())} | owned
        waiting, order = list(kernels), list[_Kernel]()
        there: set[int] = set()

        def growth(kernel: _Kernel) -> int:
            needed = stays.union(*(other.reads for other in waiting if other is not kernel))
            written = sum(n for storage, n in kernel.writes.items() if storage not in owned)
            return written - sum(self._sizes[storage] for storage in kernel.reads - needed)

        while waiting:
            ready = [k for k in waiting if k.reads & made <= there | k.writes.keys()]
            best = min(ready, key=growth)
            order.append(best if growth(best) <= 0 else waiting[0])
            waiting.remove(order[-1])
            there |= order[-1].writes.keys()
        return order

    def _highest(self, graph: fx.Graph, kernels: list[_Kernel], owned: set[int]) -> int:
        """Walk the kernels; what the caller owns is not counted, all else dies at its last use."""
        last = {s: place for place, kernel in enumerate(kernels) for s in kernel.reads}
        for node in self._gives:
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
            if not kernel.own:  # an elementwise kernel may write over what it is the last to read
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
    """Whether a product or the caller reads it, maybe through views."""
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
    """What stands for an argument; states of random generators have no value to look at."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _storages(node: fx.Node) -> list[int]:
    return [storage_id(tensor) for tensor in tensors_of(node.meta.get("val"))]


def _sizes(node: fx.Node) -> dict[int, int]:
    return {
        storage_id(tensor): int(tensor.untyped_storage().nbytes())
        for tensor in tensors_of(node.meta.get("val"))
    }


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in _places(graph) if node is not None]


def _places(graph: fx.Graph) -> list[fx.Node | None]:
    """What a graph gives, place by place."""
    (node,) = [node for node in graph.nodes if node.op == "output"]
    given = cast("Sequence[object]", node.args[0])
    return [leaf if isinstance(leaf, fx.Node) else None for leaf in given]
