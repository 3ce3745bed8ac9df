"""A batch's tensors to a device: from pinned memory, on a stream of its own.

The copy runs beside the kernels of the step before.  Whoever uses the batch first lets its
stream wait for the copy, and the memory is not given to another tensor before that stream is
done with it (``record_stream``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from fastpipe._extras import require
from fastpipe._nvtx import ranged
from fastpipe.errors import OptionError

__all__ = ["Transfer", "checked_device", "map_tensors"]


def checked_device(device: Any) -> Any:
    """A ``torch.device`` that is there, or an error that says what to do.

    Args:
        device: as torch takes it: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, a number, a ``torch.device``.

    Raises:
        OptionError: it is no device, or this machine has none such.
    """
    torch = require("torch", extra="torch")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device= must be a device of torch's, got {device!r} ({error})") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device={str(device)!r} was asked for, and torch finds no CUDA device: leave device= "
            "out, or use device='cuda' if torch.cuda.is_available() else 'cpu'"
        )
    return found


class Transfer:
    """Moves batches to a device.

    Args:
        device: a ``torch.device``.
    """

    def __init__(self, device: Any) -> None:
        self._torch = require("torch", extra="torch")
        self.device = device
        self._stream: Any = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies run beside the work of the device."""
        return bool(self.device.type == "cuda")

    @ranged("transfer")
    def start(self, batch: Any, finish: Callable[[Any], Any]) -> Callable[[], Any]:
        """Begin to move a batch.

        Args:
            batch: tensors in any structure of mappings and sequences; the rest stays as it is.
            finish: what else is done to the moved batch, on the same stream.

        Returns:
            A function that gives the moved batch, to be called where it is used.
        """
        if not self.is_asynchronous:
            moved = finish(map_tensors(batch, lambda tensor: tensor.to(self.device), self._moved))
            return lambda: moved
        cuda = self._torch.cuda
        if self._stream is None:
            self._stream = cuda.Stream(self.device)
        with cuda.stream(self._stream):
            moved = finish(map_tensors(batch, self._copy, self._moved))
            done = self._stream.record_event()
        return lambda: self._given(moved, done)

    def _moved(self, value: Any) -> Any:
        """What is no tensor: a batch class of the user's may know how to move itself."""
        return value.to(self.device) if hasattr(value, "to") else value

    def _copy(self, tensor: Any) -> Any:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            # torch's pinned memory is used again only when the copy out of it is done.
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _given(self, moved: Any, done: Any) -> Any:
        current = self._torch.cuda.current_stream(self.device)
        current.wait_event(done)

        def use(tensor: Any) -> Any:
            if tensor.device.type == "cuda":
                tensor.record_stream(current)
            return tensor

        return map_tensors(moved, use)


def _same(value: Any) -> Any:
    return value


def map_tensors(batch: Any, function: Callable[[Any], Any], otherwise: Callable[[Any], Any] = _same) -> Any:
    """A batch with ``function`` applied to its tensors.

    Args:
        batch: a tensor, or mappings and sequences (also named tuples) of batches.
        function: from tensor to tensor.
        otherwise: applied to what is neither; by default these are the same objects.
    """
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
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, otherwise) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([map_tensors(value, function, otherwise) for value in batch])
    return otherwise(batch)
