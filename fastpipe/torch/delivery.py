"""The last steps of a batch: the copy to the device, normalisation there, and batch augmentation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastpipe.core.clock import ranged
from fastpipe.core.keys import sample_seed
from fastpipe.torch.randomness import KeyedGenerator, preserved_generators, seed_generators
from fastpipe.torch.samples import Unfinished

if TYPE_CHECKING:
    from fastpipe.augment.chains import ImageChain
    from fastpipe.core.transfer import Transfer

# Added to a batch's number to seed its augmentation.  Samples and collate functions use smaller numbers.
_AUGMENT = 1 << 41


@dataclass(eq=False)
class Delivery:
    """Takes batches from a loader's iterator, and delivers them on the device.

    The copy of a batch starts as soon as the batch is ready, and runs during the training step with the
    previous batch.  The user's augmentation runs when a batch is requested, because it may use the same
    random generators as the training step.

    Attributes:
        transfer: the copy to the device.  None if batches are not copied.
        finishes: whether batches arrive as ``Unfinished`` objects, whose remaining steps run on the device.
        augment: the user's function for batches, or None.
        seed: the loader's seed.  With a seed, the random numbers of ``augment`` depend only on seed, epoch,
            batch and rank.
        rank: this rank's number, and the number of ranks.
        rest: the second part of a split transform, if this part runs on the device, else None.
        on_epoch: a function that is called at the end of an epoch, or None.  Its arguments are the mean
            seconds per batch, and the mean seconds that the script waited for a batch.
        is_made_there: whether batches may be decoded on the device.  They are then collated on the device.
        dtype: the dtype to which the first part of a batch is converted if it is float32, or None.
    """

    transfer: Transfer | None
    finishes: bool
    augment: Callable[..., Any] | None
    seed: int | None
    rank: tuple[int, int]
    rest: ImageChain | None = None
    on_epoch: Callable[[float, float], None] | None = None
    is_made_there: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.reset()

    @property
    def pins(self) -> bool:
        return self.transfer is not None and self.transfer.is_asynchronous

    def reset(self) -> None:
        self._ahead: _Moving | None = None
        self._pulled, self._pace = 0, _Pace()

    def next(self, iterator: Any) -> Any:
        asked = perf_counter()
        moving, self._ahead = self._ahead, None
        if moving is not None and iterator.took_back():
            moving, self._pulled = None, self._pulled - 1
        moving = moving or self._pull(iterator)
        try:
            batch = moving.given()
        except StopIteration:
            self._pace.tell(self.on_epoch)
            raise
        self._pace.given(asked)
        iterator.how_far = moving.how_far
        if self.augment is not None:
            batch = self._augmented(batch, moving.epoch, moving.number)
        if self.transfer is not None and self.transfer.is_asynchronous and iterator.is_ready():
            with torch.inference_mode(False):  # the script may use the batch outside its current mode
                self._ahead = self._pull(iterator)
        return batch

    def _pull(self, iterator: Any) -> _Moving:
        try:
            batch = iterator._next_data()
        except Exception as error:  # including StopIteration; a KeyboardInterrupt is not deferred
            return _Moving(DeferredError(error), iterator.how_far)
        point = iterator._sampler_iter.progress.point
        number = point.batches + self._pulled
        self._pulled += 1
        if self.transfer is not None:
            given = self.transfer.start(batch, self._finished)
        else:
            moved = self._finished(batch)
            given = lambda: moved  # noqa: E731
        return _Moving(given, iterator.how_far, point.epoch, number)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context manager.  Within its block, batches on the device are collated on the stream that
        copies batches."""
        if self.transfer is None or not self.is_made_there:
            return nullcontext()
        return self.transfer.on_stream()

    @ranged("augment")
    def _augmented(self, batch: Any, epoch: int, number: int) -> Any:
        assert self.augment is not None
        augment, several = self.augment, batch if isinstance(batch, (list, tuple)) else (batch,)
        if self.seed is None:
            return augment(*several)
        rank, ranks = self.rank
        seed = sample_seed(self.seed, epoch, _AUGMENT + number * ranks + rank)
        with preserved_generators():
            seed_generators(seed)
            with KeyedGenerator(seed):  # also seeds the random numbers drawn on the device
                return augment(*several)

    def _finished(self, batch: Any) -> Any:
        batch = self._finish(batch) if isinstance(batch, Unfinished) else batch
        return batch if self.dtype is None else _in_dtype(batch, self.dtype)

    @ranged("finish")
    def _finish(self, unfinished: Unfinished) -> Any:
        batch, end, key = unfinished
        if end is None and key is None:
            return batch
        images, *others = batch
        if end is not None:
            return [end.of_tensor(images), *others]
        assert self.rest is not None
        return [self.rest(images, (), None, key), *others]


def _in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Convert a float32 batch to ``dtype``.  If the batch is a list or a tuple, convert only its first
    part."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.dtype == torch.float32 else batch
    if type(batch) in (list, tuple) and batch:
        return type(batch)([_in_dtype(batch[0], dtype), *batch[1:]])
    return batch


class _Pace:
    """Measures the time between the batches of an epoch, and how long the script waits for batches."""

    count, first, last, waited = 0, 0.0, 0.0, 0.0

    def given(self, asked: float) -> None:
        """Count a batch that was requested at time ``asked``.  The wait for the first batch is left out,
        because it is not representative."""
        self.last = perf_counter()
        if self.count:
            self.waited += self.last - asked
        else:
            self.first = self.last
        self.count += 1

    def tell(self, listener: Callable[[float, float], None] | None) -> None:
        steps = self.count - 1
        if listener is not None and steps > 0:
            listener((self.last - self.first) / steps, self.waited / steps)


class _Moving(NamedTuple):
    """A batch on its way to the device, or an error that is raised instead of this batch."""

    found: Callable[[], Any] | DeferredError
    how_far: Any
    epoch: int = 0
    number: int = 0

    def given(self) -> Any:
        if isinstance(self.found, DeferredError):
            raise self.found.take()
        return self.found()


class DeferredError:
    """Keeps an error that occurred in a batch, until the script requests this batch."""

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def take(self) -> BaseException:
        """Return the error, and keep no reference to it, because its traceback keeps many objects alive."""
        assert self._error is not None
        error, self._error = self._error, None
        return error
