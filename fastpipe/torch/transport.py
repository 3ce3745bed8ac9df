"""Communication between worker processes and their parent: batch requests, and tensors in shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.queues
import os
import queue
import select
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakMethod

import numpy as np
import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor
from torch.utils.data import _utils, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn

from fastpipe.core.lanes import Lane, LaneWriter, lanes_are_possible
from fastpipe.core.processes import outliving_parent

# ---- requests ----------------------------------------------------------------------------------------

_FIRST_S, _LONGEST_S = 0.0001, 0.002
_LOOK_S = 0.5  # while the rest of a message is missing, the writer is checked at this interval


class UnfinishedMessageError(EOFError):
    """The rest of a message will never arrive, because its writer was killed or is stuck."""


class IndexQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # older versions are not generic
    """A queue whose reader can look at waiting messages without removing them.  If a writer ends in the
    middle of a message, the reader raises an error instead of waiting forever.  If a signal handler's error
    interrupts ``put``, the queue can still be used."""

    def __init__(self, context: Any) -> None:
        super().__init__(ctx=context)
        self._seen: deque[Any] = deque()
        self._before_error: Callable[[], Any] = lambda: None

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._seen, self._before_error = deque(), lambda: None

    def _reset(self, after_fork: bool = False) -> None:
        super()._reset(after_fork)  # type: ignore[misc]
        if not after_fork:
            self._notempty = threading.Condition(threading.RLock())  # a lock that knows its owner

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        try:
            super().put(obj, block, timeout)
        except BaseException:
            # Signal handlers raise errors in the main thread: on Ctrl-C, and when a worker has ended.
            # Between the lock's acquisition and the ``with`` block, the lock would stay locked forever.
            while self._notempty._is_owned():  # type: ignore[attr-defined]
                self._notempty.release()
            raise

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        global _current
        if get_worker_info() is not None:  # the parent reads another queue, with the results
            _current = self
        if self._seen:
            return self._seen.popleft()
        try:
            return super().get(block, timeout)
        except (OSError, EOFError):
            if (before := self._before_error()) is not None:
                before()
            raise

    def watch_writers(
        self, is_hopeless: weakref.WeakMethod[Any], before_error: weakref.WeakMethod[Any]
    ) -> None:
        """In the parent process, let `get` raise an error if the rest of a message does not come.  While
        `get` waits, it calls ``is_hopeless`` with the seconds waited so far.  If the result is true, `get`
        raises the error.  Before any error, `get` calls ``before_error``."""
        self._before_error = before_error
        reader: Any = self._reader  # type: ignore[attr-defined]
        if hasattr(select, "poll"):
            # A weak reference: a reader that refers to itself would stay open until garbage collection.
            reader._recv = partial(_receive, weakref.ref(reader), partial(_read_unless, is_hopeless))

    def release_of_killed(self) -> None:
        """In the parent, after all workers were killed, release the write lock that a worker may hold."""
        lock: Any = self._wlock  # type: ignore[attr-defined]
        if lock is not None:
            lock.acquire(block=False)
            lock.release()

    def peek_requests(self) -> list[Any]:
        """Return the messages in the queue without removing them."""
        try:
            while not self.empty():
                self._seen.append(super().get(False))
        except queue.Empty:
            pass
        return list(self._seen)


def _receive(reader: weakref.ref[Any], read: Callable[[int, int], bytes], size: int) -> Any:
    connection = reader()
    assert connection is not None
    return type(connection)._recv(connection, size, read=read)


def _read_unless(is_hopeless: WeakMethod[Any], descriptor: int, size: int) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    seconds = 0.0
    while not poll.poll(1000 * _LOOK_S):
        seconds += _LOOK_S
        check = is_hopeless()
        if check is None or check(seconds):
            raise UnfinishedMessageError("the rest of a worker's message did not come")
    return os.read(descriptor, size)


_current: IndexQueue | None = None  # the queue that this process reads


def peek_requests(until: Callable[[], bool]) -> list[Any]:
    """In a worker, wait for the next requests, and return them.  Return an empty list as soon as ``until()``
    is true.  Outside of workers, return an empty list."""
    if _current is None:
        return []
    seconds = _FIRST_S
    reader: Any = _current._reader  # type: ignore[attr-defined]
    while not (_current._seen or reader.poll(seconds)):
        if until():
            return []
        seconds = min(2 * seconds, _LONGEST_S)  # short enough that small batches are not delayed
    return _current.peek_requests()


class _Flag:
    """An event that can be set once, without a lock.  An event of ``multiprocessing`` has a lock, which a
    killed worker could hold forever."""

    def __init__(self, context: Any) -> None:
        self._semaphore = context.Semaphore(0)

    def set(self) -> None:
        self._semaphore.release()

    def is_set(self) -> bool:
        return not self._semaphore._semlock._is_zero()


class WorkerContext:
    """A multiprocessing context with the queues and events of this module."""

    def __init__(self, context: Any) -> None:
        self._context = torch.multiprocessing if context is None else context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> Any:  # noqa: N802 - the name that a context has
        return IndexQueue(self._context.get_context())

    def Event(self) -> Any:  # noqa: N802
        return _Flag(self._context)


# ---- tensors -----------------------------------------------------------------------------------------

NAMED_MEMORY = "/dev/shm"  # where torch creates shared memory

# A lane is memory that one worker writes and its parent reads (``fastpipe.core.lanes``).  The parent uses
# ``_lanes``, the lanes of its workers, by number.  A worker uses ``_writer``, its own lane.
_lanes: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()
_writer: LaneWriter | None = None

_INLINE = 1 << 14  # a tensor of at most this many bytes is sent in the message itself


def expect_from(lane: Lane) -> None:
    _lanes[lane.number] = lane


def send_through(writer: LaneWriter) -> None:
    """In a worker, make and send batches in shared memory (the lane of ``writer``) from now on."""
    global _writer
    _writer = writer
    ForkingPickler.register(torch.Tensor, _reduce)
    functions = _utils.collate.default_collate_fn_map
    if functions[torch.Tensor] is collate_tensor_fn:
        functions[torch.Tensor] = stacked


def shared_flat(size: int) -> torch.Tensor:
    """In a worker, return a flat uint8 tensor in memory that the parent can read."""
    memory = None if _writer is None else _writer.take(size)
    if memory is not None:
        return torch.from_numpy(memory)
    # All segments of the lane are in use: use memory that torch can send and that /dev/shm does not limit.
    storage: Any = torch.UntypedStorage
    storage = _unnamed(size) if lanes_are_possible() else storage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def stacked(batch: Any, *, collate_fn_map: dict[Any, Any] | None = None) -> Any:
    """In a worker, stack tensors as ``default_collate`` does, in memory that is used again.

    torch takes new shared memory for each batch, whose pages the system has to clear and map.
    """
    first = batch[0]
    kind = (first.dtype, first.shape)
    if not all(_is_plain(one) and (one.dtype, one.shape) == kind for one in batch):
        # torch's shared memory has a name for a moment.  A worker killed then would leave this name.
        with outliving_parent():
            return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    size = len(batch) * first.nbytes
    if size <= _INLINE:  # it is sent in the message
        return torch.stack(batch, 0)
    out = shared_flat(size).view(first.dtype).view(len(batch), *first.shape)
    return torch.stack(batch, 0, out=out.as_subclass(type(first.new())))


# The storages that `note_tensors` has seen, and that have not been sent yet.
# While a reference exists, its key is not the address of another storage.
_alone: dict[int, StorageWeakRef] = {}


def note_tensors(batch: Any) -> None:
    """In a worker, find the tensors of a batch that share memory with no other tensor of the batch.  Only
    these may be copied when they are sent: the others go on sharing their memory, as with torch."""
    if _writer is not None:
        storages = [one.untyped_storage() for one in _tensors_in(batch) if _is_plain(one)]
        counts = Counter(storage._cdata for storage in storages)
        for storage in storages:
            if counts[storage._cdata] == 1:
                _alone[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(inner)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_usual = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested
    return is_usual and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def is_in_lane(tensor: torch.Tensor) -> bool:
    """In a worker, return whether a tensor is in the memory that the worker shares with its parent (a
    lane)."""
    return _writer is not None and _writer.has(tensor.untyped_storage().data_ptr())


def remove_names_of(pids: Sequence[int]) -> None:
    """Remove the names of shared memory that killed processes with these ids left in ``/dev/shm``.  This
    releases the memory.  Names of other users' processes stay."""
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if not pids or strategy != "file_descriptor":  # with another strategy, the names are still in use
        return
    beginnings = tuple(f"torch_{pid}_" for pid in pids)
    with contextlib.suppress(OSError):
        for name in os.listdir(NAMED_MEMORY):
            if name.startswith(beginnings):
                path = os.path.join(NAMED_MEMORY, name)
                with contextlib.suppress(OSError):
                    if os.lstat(path).st_uid == os.geteuid():  # root could remove other users' files
                        os.unlink(path)


def room() -> tuple[int, int] | None:
    """Return free and total bytes of torch's shared memory.  Return None if ``/dev/shm`` does not exist."""
    with contextlib.suppress(OSError):
        found = os.statvfs(NAMED_MEMORY)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return None


def _unnamed(size: int) -> Any:
    descriptor = os.memfd_create("fastpipe", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)  # type: ignore[attr-defined]
    finally:
        os.close(descriptor)


def _reduce(tensor: torch.Tensor) -> Any:
    if _writer is None or not _is_plain(tensor):
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    storage = tensor.untyped_storage()
    is_alone = _alone.pop(storage._cdata, None) is not None
    segment = _writer.send(storage.data_ptr())
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    if segment is not None:
        return _receive_tensor, (_writer.number, segment, storage.nbytes(), tensor.dtype, *layout)
    if 0 < storage.nbytes() <= _INLINE and storage.nbytes() == tensor.nbytes:
        # A file descriptor and a connection for each small tensor would be slower, and may exceed limits.
        content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
        return _copied, (content, tensor.dtype, *layout)
    if is_alone and _INLINE < storage.nbytes() == tensor.nbytes and not storage.is_shared():
        # The script's own collate_fn made the tensor.
        # An error in this thread of a queue would lose the batch, and the receiver would wait forever.
        with contextlib.suppress(MemoryError):
            if (memory := _writer.take(storage.nbytes())) is not None:
                flat = torch.from_numpy(memory)
                flat.untyped_storage().copy_(storage)
                segment = _writer.send(flat.data_ptr())
                return _receive_tensor, (_writer.number, segment, storage.nbytes(), tensor.dtype, *layout)
    if not _is_shared(storage):
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
    """Move a storage to shared memory as torch does.  Return False if shared memory has no room for it."""
    space = room()
    if storage.nbytes() == 0 or storage.is_shared() or space is None:
        return True
    if space[0] < storage.nbytes():
        return False
    try:
        storage.share_memory_()
    except RuntimeError:  # another process took the room first
        return False
    return True


def _receive_tensor(
    lane: int, segment: int, size: int, dtype: torch.dtype, offset: int, shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:  # fmt: skip
    storage = torch.from_numpy(_lanes[lane].receive(segment, size)).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    # A part of a batch, such as a sample that was not collated, is copied, so that a script that keeps the
    # part does not keep the memory of the whole batch.
    return tensor if tensor.nbytes == size else tensor.clone()
