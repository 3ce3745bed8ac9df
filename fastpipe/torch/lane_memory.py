"""Tensors of a worker process in memory that its parent reads without a copy."""

from __future__ import annotations

import os
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from fastpipe.engine.lanes import Lane, LaneWriter, lanes_are_possible

__all__ = ["expect_from", "send_through", "shared_flat"]

# In the parent: the lanes of its workers.  In a worker: the one that leads to its parent.
_lanes: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()
_writer: LaneWriter | None = None


def expect_from(lane: Lane) -> None:
    """In the parent: tensors may come through this lane, as long as it lives."""
    _lanes[lane.number] = lane


def send_through(writer: LaneWriter) -> None:
    """In a worker: from now on batches are made in the lane's memory, and sent through it."""
    global _writer
    _writer = writer
    ForkingPickler.register(torch.Tensor, _reduce)


def shared_flat(size: int) -> torch.Tensor:
    """In a worker: a flat uint8 tensor in memory that the parent can read.

    Raises:
        MemoryError: the machine has no more memory for it.
    """
    memory = None if _writer is None else _writer.take(size)
    if memory is not None:
        return torch.from_numpy(memory)
    if not lanes_are_possible():
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    # All segments are in the user's hands: memory that is torch's to send, and not limited by /dev/shm.
    descriptor = os.memfd_create("fastpipe", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)  # type: ignore[attr-defined]
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _reduce(tensor: torch.Tensor) -> Any:
    """How a tensor is pickled on its way to the parent."""
    if _writer is not None and tensor.device.type == "cpu" and not tensor.requires_grad:
        storage = tensor.untyped_storage()
        segment = _writer.send(storage.data_ptr())
        if segment is not None and not (tensor.is_conj() or tensor.is_neg()):
            layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            return _receive, (_writer.number, segment, storage.nbytes(), *layout)
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def _receive(
    lane: int, segment: int, size: int, dtype: torch.dtype, offset: int, shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:  # fmt: skip
    storage = torch.from_numpy(_lanes[lane].receive(segment, size)).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
