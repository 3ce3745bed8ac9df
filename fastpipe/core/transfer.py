"""Copy the tensors of batches to a device, from pinned memory and on a separate CUDA stream.

The copy runs during the kernels of the previous training step.  The stream that uses the batch waits for the
copy.  torch does not reuse the batch's memory before that stream has finished with the batch
(``record_stream``).
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
    """Return the ``torch.device`` for a value that torch accepts as a device.  Raise an OptionError if torch
    does not accept the value, or if the device does not exist."""
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
    """Start to copy a CPU tensor to a device on the current stream, and return the new tensor."""
    if device.type == "cuda" and not tensor.is_pinned():
        # torch reuses pinned memory only after the copy from this memory is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Transfer:
    def __init__(self, device: Any) -> None:
        self._torch = require("torch", extra="torch")
        self.device = device
        self._stream: Any = None
        # True if a batch contained an object with memory on the device for which ``record_stream`` was not
        # called.
        self._has_unknown = False

    @property
    def is_elsewhere(self) -> bool:
        return bool(self.device.type != "cpu")

    @property
    def is_asynchronous(self) -> bool:
        return bool(self.device.type == "cuda")

    @ranged("transfer")
    def start(self, batch: Any, finish: Callable[[Any], Any]) -> Callable[[], Any]:
        """Start to move a batch to the device.

        The batch is any structure of mappings and sequences.  Its tensors and other objects with a method
        ``to`` are moved, and all other values stay unchanged.  ``finish`` is applied to the moved batch, on
        the copy stream.  Return a function that returns the moved batch.  Call this function in the thread
        that uses the batch.
        """
        if not self.is_asynchronous:
            moved = finish(map_tensors(batch, lambda tensor: tensor.to(self.device), self._moved))
            return lambda: moved
        used = self._torch.cuda.current_stream(self.device)
        with self.on_stream():
            # Without ``record_stream``, torch may reuse the memory of the previous batch for this batch as
            # soon as the script drops the previous batch.
            if self._has_unknown:
                self._stream.wait_stream(used)
            moved = finish(map_tensors(batch, self._copy, self._moved))
            done = self._stream.record_event()
        return lambda: self._given(moved, done)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which work runs on the copy stream.  It does nothing for other devices."""
        if not self.is_asynchronous:
            return nullcontext()
        if self._stream is None:
            index = self.device.index
            self._stream = _copy_stream(self._torch.cuda.current_device() if index is None else index)
        return on_stream(self._stream)

    def _moved(self, value: Any) -> Any:
        """Move an object that is not a tensor, for example a user's batch, if it has a method ``to``."""
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
    """Return the copy stream of a GPU.  All transfers share this stream, because torch caches freed memory
    separately for each stream."""
    return require("torch", extra="torch").cuda.Stream(index)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which work runs on a stream, and the stream's device is the current device.

    In a thread without a current device, torch would create a CUDA context on the first device.  The returned
    context prevents this.
    """
    cuda, stack = require("torch", extra="torch").cuda, ExitStack()
    stack.enter_context(cuda.device(stream.device))
    stack.enter_context(cuda.stream(stream))
    return stack


def map_tensors(
    batch: Any, function: Callable[[Any], Any], otherwise: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Return a batch in which ``function`` was applied to each tensor, and ``otherwise`` to each other value.
    The batch may consist of nested mappings, sequences and named tuples."""
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
        return otherwise(batch)  # a PackedSequence moves itself, because some of its tensors must not move
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, otherwise) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([map_tensors(value, function, otherwise) for value in batch])
    return otherwise(batch)
