"""The copy of a batch's tensors to a device: from pinned memory, on a separate stream.

The copy runs during the kernels of the previous step.  The first user of the batch makes its
stream wait for the copy, and the memory is not given to another tensor before that stream has
finished with it (``record_stream``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from fastpipe.core.clock import ranged
from fastpipe.core.extras import require
from fastpipe.errors import OptionError


def checked_device(device: Any) -> Any:
    """Return an existing ``torch.device`` for anything that torch accepts as one, or raise an
    OptionError."""
    torch = require("torch", extra="torch")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device must be a torch device, got {device!r} ({error})") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device={str(device)!r} was requested, but torch finds no CUDA device: leave device= "
            "out, or use device='cuda' if torch.cuda.is_available() else 'cpu'"
        )
    return found


def uploaded(tensor: Any, device: Any) -> Any:
    """Copy a CPU tensor to a device, for work on the current stream, and return the copy without waiting
    for it."""
    if device.type == "cuda" and not tensor.is_pinned():
        # torch reuses pinned memory only when the copy from it is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Transfer:
    def __init__(self, device: Any) -> None:
        self._torch = require("torch", extra="torch")
        self.device = device
        self._stream: Any = None
        self._has_unknown = False  # a batch had memory there without ``record_stream``

    @property
    def is_elsewhere(self) -> bool:
        return bool(self.device.type != "cpu")

    @property
    def is_asynchronous(self) -> bool:
        return bool(self.device.type == "cuda")

    @ranged("transfer")
    def start(self, batch: Any, finish: Callable[[Any], Any]) -> Callable[[], Any]:
        """Begin to move a batch: tensors in any structure of mappings and sequences; the rest stays as it is.

        ``finish`` is applied to the moved batch, on the same stream.  Return a function that returns the
        moved batch; call it where the batch is used.
        """
        if not self.is_asynchronous:
            moved = finish(map_tensors(batch, lambda tensor: tensor.to(self.device), self._moved))
            return lambda: moved
        used = self._torch.cuda.current_stream(self.device)
        with self.on_stream():
            if self._has_unknown:  # it may be taken for this batch as soon as the script drops the one before
                self._stream.wait_stream(used)
            moved = finish(map_tensors(batch, self._copy, self._moved))
            done = self._stream.record_event()
        return lambda: self._given(moved, done)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context whose work runs on the copy stream, if there is one."""
        if not self.is_asynchronous:
            return nullcontext()
        if self._stream is None:
            index = self.device.index
            self._stream = _copy_stream(self._torch.cuda.current_device() if index is None else index)
        return on_stream(self._stream)

    def _moved(self, value: Any) -> Any:
        """Return an object that is not a tensor, moved if it can: the user's batch class may move itself."""
        if not hasattr(value, "to"):
            return value
        self._has_unknown = True
        return value.to(self.device)

    def _copy(self, tensor: Any) -> Any:
        if tensor.device.type == "cpu":
            return uploaded(tensor, self.device)
        return tensor.to(self.device, non_blocking=True)

    def _given(self, moved: Any, done: Any) -> Any:
        current = self._torch.cuda.current_stream(self.device)
        current.wait_event(done)

        def use(tensor: Any) -> Any:
            if tensor.device.type == "cuda":
                tensor.record_stream(current)
            return tensor

        return map_tensors(moved, use)


@functools.cache
def _copy_stream(index: int) -> Any:
    """Return the copy stream of a GPU: one for all, because torch keeps freed memory for each stream."""
    return require("torch", extra="torch").cuda.Stream(index)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context whose work runs on a stream.

    The stream's device is current inside.  Before and after it, the first device is not touched, on which
    torch would otherwise make a context in threads without a set device.
    """
    cuda, stack = require("torch", extra="torch").cuda, ExitStack()
    stack.enter_context(cuda.device(stream.device))
    stack.enter_context(cuda.stream(stream))
    return stack


def map_tensors(
    batch: Any, function: Callable[[Any], Any], otherwise: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return a batch (mappings and sequences, also named tuples) with ``function`` applied to its tensors,
    and ``otherwise`` to what is neither."""
    if isinstance(batch, require("torch", extra="torch").Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        made = {key: map_tensors(value, function, otherwise) for key, value in batch.items()}
        if type(batch) is dict:
            return made
        if isinstance(batch, MutableMapping) and hasattr(batch, "copy"):
            clone = batch.copy()
            clone.update(made)
            return clone
        return type(batch)(made)  # type: ignore[call-arg]
    if isinstance(batch, require("torch.nn.utils.rnn", extra="torch").PackedSequence):
        return otherwise(batch)  # it moves itself: some of its tensors have to stay
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, otherwise) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([map_tensors(value, function, otherwise) for value in batch])
    return otherwise(batch)
