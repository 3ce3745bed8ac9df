"""Tensors of a worker process in memory that its parent reads without a copy."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

from fastpipe.core.lanes import Lane, LaneWriter, lanes_are_possible

__all__ = [
    "NAMED_MEMORY", "expect_from", "is_in_lane", "remove_names_of", "room", "send_through", "shared_flat",
]  # fmt: skip

NAMED_MEMORY = "/dev/shm"  # where torch makes what it shares

# In the parent: the lanes of its workers.  In a worker: the one that leads to its parent.
_lanes: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()
_writer: LaneWriter | None = None

_INLINE = 1 << 14  # bytes of a tensor that travels in the message itself


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
    return torch.empty(0, dtype=torch.uint8).set_(_unnamed(size))


def is_in_lane(tensor: torch.Tensor) -> bool:
    """In a worker: whether a tensor is in memory that the parent gives back once it has no more of it."""
    return _writer is not None and _writer.has(tensor.untyped_storage().data_ptr())


def remove_names_of(pids: Sequence[int]) -> None:
    """Remove what processes of this user that were killed have left in ``/dev/shm``.

    torch makes shared memory under a name there, which it removes at once; who is killed in between leaves
    the name, and with it the memory, until the machine starts again.

    Args:
        pids: of the processes, all of which have ended.
    """
    strategy = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if not pids or strategy != "file_descriptor":  # else names stay in use
        return
    beginnings = tuple(f"torch_{pid}_" for pid in pids)
    with contextlib.suppress(OSError):
        for name in os.listdir(NAMED_MEMORY):
            if name.startswith(beginnings):
                path = os.path.join(NAMED_MEMORY, name)
                with contextlib.suppress(OSError):
                    if os.lstat(path).st_uid == os.geteuid():  # root may remove others', of the same number
                        os.unlink(path)


def room() -> tuple[int, int] | None:
    """Free and total bytes of the memory in which torch makes what it shares; None where it has no limit
    of its own."""
    try:
        found = os.statvfs(NAMED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _unnamed(size: int) -> Any:
    descriptor = os.memfd_create("fastpipe", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)  # type: ignore[attr-defined]
    finally:
        os.close(descriptor)


def _reduce(tensor: torch.Tensor) -> Any:
    """How a tensor is pickled on its way to the parent."""
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested
    if _writer is None or not is_plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    storage = tensor.untyped_storage()
    segment = _writer.send(storage.data_ptr())
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    if segment is not None:
        return _receive, (_writer.number, segment, storage.nbytes(), tensor.dtype, *layout)
    if 0 < storage.nbytes() <= _INLINE and storage.nbytes() == tensor.nbytes:
        # A descriptor and a connection for each would cost more, and some day there are too many.
        content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
        return _copied, (content, tensor.dtype, *layout)
    if not _is_shared(storage):
        # An error here, in a queue's thread, would lose the batch, and its receiver would wait for ever.
        unnamed = _unnamed(storage.nbytes())
        unnamed.copy_(storage)
        tensor = torch.empty(0, dtype=tensor.dtype).set_(unnamed, *layout)
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def _copied(
    content: bytes, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    flat = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), offset, shape, stride)


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """Let torch share a storage in its way, if there is room where it does."""
    space = room()
    if storage.nbytes() == 0 or storage.is_shared() or space is None:
        return True
    if space[0] < storage.nbytes():
        return False
    try:
        storage.share_memory_()
    except RuntimeError:  # another process was faster
        return False
    return True


def _receive(
    lane: int, segment: int, size: int, dtype: torch.dtype, offset: int, shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:  # fmt: skip
    storage = torch.from_numpy(_lanes[lane].receive(segment, size)).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    # A part of a batch, such as a sample that was not collated: whoever keeps it must not keep the batch.
    return tensor if tensor.nbytes == size else tensor.clone()
