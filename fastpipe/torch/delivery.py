"""The last part of a batch's way: to the device, normalised there, augmented as a batch."""

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

_AUGMENT = 1 << 41  # where the draws of batch augmentation are, behind those of samples and collate


@dataclass(eq=False)
class Delivery:
    """Takes batches from an iterator and hands them out on the device.

    The next batch begins its way as soon as it is there, so that its copy runs beside the step that uses the
    one before.  The user's augmentation runs when a batch is asked for, as it may draw from generators that
    the step uses as well.

    Attributes:
        transfer: to the device; None leaves batches where they are.
        finishes: batches come as ``Unfinished``, to be finished there; by ``rest`` of a split transform.
        augment: the user's, of batches; under a ``seed`` its draws are a function of epoch and batch.
        rank: this rank and the number of ranks.
        on_epoch: called at an epoch's end with the seconds from batch to batch, and those that were waited.
        is_made_there: batches may be made on the device, and are to be collated there.
        dtype: of the first part of each batch where that is float32; None leaves it.
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
            with torch.inference_mode(False):  # the script may use the batch elsewhere than it is now
                self._ahead = self._pull(iterator)
        return batch

    def _pull(self, iterator: Any) -> _Moving:
        try:
            batch = iterator._next_data()
        except Exception as error:  # also StopIteration; an interrupt is due at once
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
        """Return a block in which batches on the device are collated, on the stream that finishes them."""
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
            with KeyedGenerator(seed):  # which knows the device's generators as well
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
    """Return a batch with its first part, or itself, in another dtype if it is a float32 tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.dtype == torch.float32 else batch
    if type(batch) in (list, tuple) and batch:
        return type(batch)([_in_dtype(batch[0], dtype), *batch[1:]])
    return batch


class _Pace:
    """How fast an epoch goes."""

    count, first, last, waited = 0, 0.0, 0.0, 0.0

    def given(self, asked: float) -> None:
        """Count a batch that was asked for at that time; the first one says nothing about the others."""
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
    """A batch on its way, or the error that came instead."""

    found: Callable[[], Any] | DeferredError
    how_far: Any
    epoch: int = 0
    number: int = 0

    def given(self) -> Any:
        if isinstance(self.found, DeferredError):
            raise self.found.take()
        return self.found()


class DeferredError:
    """Keeps an error until the batch is asked for in whose place it comes."""

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def take(self) -> BaseException:
        """Return the error to raise.  It is not kept: its traceback refers to much."""
        assert self._error is not None
        error, self._error = self._error, None
        return error
