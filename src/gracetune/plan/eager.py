"""What operations do when they run one by one: counted on fake tensors, nothing is computed.

Fake tensors stand on the CPU, whatever the plan is for: a CPU build of torch has no other device
for them. Where CUDA's kernels save or allocate something else than the CPU's, `cuda_kernels` and
this file say so.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from gracetune.plan.kernels import (
    ATTENTION_BACKWARD,
    WeightStorages,
    attention_workspace,
    is_own,
    ops_of,
    storage_of,
    tensors_of,
)
from gracetune.plan.shapes import Calls

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gracetune.plan.shapes import Op


class KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every kernel, and every byte from its allocation to its end."""

    def __init__(self, weights: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        kinds: dict[bool, set[int]] = {False: set(), True: set()}
        for weight in weights:
            kinds[weight.requires_grad].add(storage_of(weight))
        self._weights = WeightStorages(frozenset(kinds[False]), frozenset(kinds[True]))
        self._known = kinds[False] | kinds[True] | {storage_of(tensor) for tensor in inputs}
        """Storages that were there before."""
        self._alive: dict[int, tuple[int, int]] = {}
        """Memory by its storage: a number that no other memory has, and bytes."""
        self._births = 0
        self._begun_nbytes = 0
        """What was alive when `take` was last called."""
        self._changes: list[tuple[int, int]] = []
        """Since then: whose bytes came or went."""
        self._ops: list[Op] = []
        self._dispatched = self._own = self._views = 0
        self.backward = False

    def take(self, apart: Iterable[Tensor] = ()) -> tuple[tuple[Op, ...], int]:
        """The kernels since the last time, and the most bytes alive meanwhile, some set apart."""
        left_out = {self._alive[s][0] for s in map(storage_of, apart) if s in self._alive}
        live = peak = self._begun_nbytes
        for number, change in self._changes:
            if number not in left_out:
                live += change
                peak = max(peak, live)
        taken = tuple(self._ops), peak
        self._ops, self._changes, self._begun_nbytes = [], [], self.live_nbytes
        return taken

    def take_calls(self, saved: int) -> Calls:
        """What the host had to do since the last time; `saved` tensors went through autograd."""
        taken = Calls(
            dispatched=self._dispatched,
            kernels=self.num_ops,
            views=self._views,
            own=self._own,
            saved=saved,
        )
        self._dispatched = self._own = self._views = 0
        return taken

    @property
    def live_nbytes(self) -> int:
        """Allocated under this watch and still alive."""
        return sum(nbytes for _, nbytes in self._alive.values())

    @property
    def num_ops(self) -> int:
        """Kernels since `take` was last called."""
        return len(self._ops)

    @property
    def num_dispatched(self) -> int:
        """Operators since `take_calls` was last called."""
        return self._dispatched

    def has(self, storage: int) -> bool:
        """Whether memory was allocated under this watch and is still alive."""
        return storage in self._alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let it run on fake tensors, then look at what came out."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        ops = ops_of(func, args, kwargs, out, self._weights, self.backward)
        self._ops += ops
        if func.namespace != "prim":  # what only fake tensors are asked for
            self._dispatched += 1
            self._own += is_own(func)
            self._views += not ops
        for tensor in tensors_of(out):
            self._admit(tensor)
        if func in ATTENTION_BACKWARD:
            besides = attention_workspace(tensors_of(args)[1])
            self._changes += [(-1, besides), (-1, -besides)]
        return out

    def _admit(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = int(storage._cdata)
        if address in self._known or address in self._alive:
            return
        self._births += 1
        self._alive[address] = self._births, int(storage.nbytes())
        self._changes.append(self._alive[address])
        weakref.finalize(storage, self._bury, address).atexit = False

    def _bury(self, address: int) -> None:
        number, nbytes = self._alive.pop(address)
        self._changes.append((number, -nbytes))
