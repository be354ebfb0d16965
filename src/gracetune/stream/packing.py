"""What of a block is sent: which tensors are worth it, and what is said when the host is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from gracetune.stream.movers import StreamError
from gracetune.stream.parcels import OffloadedTensor
from gracetune.stream.storages import is_plain
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import torch

    from gracetune.stream.parcels import OffloadedCall, SavedTensor
    from gracetune.stream.transport import HostPool, OffloadCopies
    from gracetune.stream.weights import Reference, Ring


class OffloadPolicy:
    """Takes what autograd saves of the call that is open, and keeps count of what stays."""

    def __init__(
        self,
        device: torch.device,
        ring: Ring | None,
        transport: OffloadCopies,
        pool: HostPool,
        min_nbytes: int,
        num_blocks: int,
    ) -> None:
        self.too_small = self.shared = self.unfit = 0
        self.block_nbytes = 0
        """The most that a call sent."""
        self._device = device
        self._ring = ring
        self._transport = transport
        self._pool = pool
        self._min_nbytes = min_nbytes
        self._num_blocks = num_blocks
        self._call: OffloadedCall | None = None

    def open(self, call: OffloadedCall | None) -> None:
        """From here on a block saves; none: what one was saving when it was interrupted is over."""
        self._call = call

    def close(self) -> OffloadedCall | None:
        """The block is over; its call, where it had one."""
        call, self._call = self._call, None
        if call is not None:
            self.unfit += sum(parcel.host is None for parcel in call.gathered.values())
            call.gathered.clear()
            self.block_nbytes = max(self.block_nbytes, call.nbytes)
            self._transport.depart(call)
        return call

    def pack(self, tensor: Tensor) -> Tensor | Reference | SavedTensor:
        """For saved-tensor hooks: a streamed weight, part of a parcel, or the tensor as it is."""
        packed = tensor if self._ring is None else self._ring.pack(tensor)
        if not isinstance(packed, Tensor):
            return packed
        call = self._call
        assert call is not None, "a block saves that has not begun"
        storage = tensor.untyped_storage() if is_plain(tensor, self._device) else None
        if storage is None:
            self.unfit += 1
        elif storage.nbytes() < self._min_nbytes:
            self.too_small += 1
        elif storage._cdata in call.stays or (tensor.is_leaf and tensor.requires_grad):
            self.shared += 1
        elif call.only is not None and storage._cdata not in call.only:
            self.unfit += 1
        else:
            return self._gather(call, tensor, (storage._cdata, tensor._version))
        return tensor

    def _gather(self, call: OffloadedCall, tensor: Tensor, state: tuple[int, int]) -> SavedTensor:
        parcel = call.gathered.get(state)
        if parcel is None:
            parcel = call.gathered[state] = OffloadedTensor(call, tensor, self._transport.left)
        saved = parcel.save(tensor)
        if parcel.worth_sending() and not self._transport.send(parcel):
            raise self._no_room(max(self.block_nbytes, call.nbytes + parcel.nbytes))
        return saved

    def _no_room(self, block_nbytes: int) -> StreamError:
        return StreamError(
            f"offloaded activations need about {format_bytes(block_nbytes * self._num_blocks)} of "
            f"host memory ({format_bytes(block_nbytes)} a block, {self._num_blocks} blocks); "
            f"{format_bytes(self._pool.nbytes)} are taken and there is room for "
            f"{format_bytes(max(0, self._pool.room()))} more. Offload fewer blocks, recompute "
            "them, or use a smaller batch."
        )
