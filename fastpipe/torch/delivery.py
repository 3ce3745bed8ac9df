"""The last part of a batch's way: to the device, normalised there, augmented as a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fastpipe.core.clock import ranged
from fastpipe.core.keys import sample_seed
from fastpipe.torch.randomness import KeyedGenerator, preserved_generators, seed_generators
from fastpipe.torch.samples import Unfinished

if TYPE_CHECKING:
    from fastpipe.augment.chains import ImageChain
    from fastpipe.core.transfer import Transfer

_AUGMENT = 1 << 41  # where the draws of batch augmentation are, behind those of samples and collate


class Delivery:
    """Takes batches from an iterator and hands them out on the device.

    The next batch begins its way as soon as it is there, also before it is asked for, so that its
    copy runs beside the step that uses the one before.  The user's augmentation runs when a batch is asked
    for, as it may draw from generators that the step uses as well.

    Args:
        transfer: to the device; None leaves batches where they are.
        finishes: batches come as ``Unfinished``, to be finished on the device, by ``rest`` where a transform
            was split.
        augment: the user's, of batches; under a ``seed`` its draws are a function of epoch and batch.
        rank: this rank and the number of ranks.
        on_epoch: called at the end of an epoch with the seconds from batch to batch, and those of them that
            were waited.
        is_made_there: batches may be made on the device, and are to be collated there.
        dtype: of the first part of each batch where that is float32; None leaves it.
    """

    def __init__(
        self,
        transfer: Transfer | None,
        finishes: bool,
        augment: Callable[..., Any] | None,
        seed: int | None,
        rank: tuple[int, int],
        rest: ImageChain | None = None,
        on_epoch: Callable[[float, float], None] | None = None,
        is_made_there: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.finishes, self._rest, self._on_epoch = finishes, rest, on_epoch
        self._pace, self.is_made_there = _Pace(), is_made_there
        self._transfer, self._augment, self._dtype = transfer, augment, dtype
        self._seed, self._rank = seed, rank
        self._ahead: _Moving | None = None
        self._pulled = 0

    @property
    def pins(self) -> bool:
        """Whether batches are copied from pinned memory to a device."""
        return self._transfer is not None and self._transfer.is_asynchronous

    def reset(self) -> None:
        self._ahead, self._pulled, self._pace = None, 0, _Pace()

    def next(self, iterator: Any) -> Any:
        """The iterator's next batch."""
        asked = perf_counter()
        moving, self._ahead = self._ahead, None
        if moving is not None and iterator.took_back():
            moving, self._pulled = None, self._pulled - 1
        moving = moving or self._pull(iterator)
        try:
            batch = moving.given()
        except StopIteration:
            self._pace.tell(self._on_epoch)
            raise
        self._pace.given(asked)
        iterator.how_far = moving.how_far
        if self._augment is not None:
            batch = self._augmented(batch, moving.epoch, moving.number)
        if self._transfer is not None and self._transfer.is_asynchronous and iterator.is_ready():
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
        if self._transfer is not None:
            given = self._transfer.start(batch, self._finished)
        else:
            moved = self._finished(batch)
            given = lambda: moved  # noqa: E731
        return _Moving(given, iterator.how_far, point.epoch, number)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a block in which batches on the device are collated, on the stream that finishes them."""
        if self._transfer is None or not self.is_made_there:
            return nullcontext()
        return self._transfer.on_stream()

    @ranged("augment")
    def _augmented(self, batch: Any, epoch: int, number: int) -> Any:
        assert self._augment is not None
        if self._seed is None:
            return self._called(batch)
        rank, ranks = self._rank
        seed = sample_seed(self._seed, epoch, _AUGMENT + number * ranks + rank)
        with preserved_generators():
            seed_generators(seed)
            with KeyedGenerator(seed):  # which knows the device's generators as well
                return self._called(batch)

    def _called(self, batch: Any) -> Any:
        assert self._augment is not None
        return self._augment(*batch) if isinstance(batch, (list, tuple)) else self._augment(batch)

    def _finished(self, batch: Any) -> Any:
        batch = self._finish(batch) if isinstance(batch, Unfinished) else batch
        return batch if self._dtype is None else _in_dtype(batch, self._dtype)

    @ranged("finish")
    def _finish(self, unfinished: Unfinished) -> Any:
        batch, end, key = unfinished
        if end is None and key is None:
            return batch
        images, *others = batch
        if end is not None:
            return [end.of_tensor(images), *others]
        assert self._rest is not None
        return [self._rest(images, (), None, key), *others]


def _in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its first part, or itself, in another dtype if it is a float32 tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.dtype == torch.float32 else batch
    if type(batch) in (list, tuple) and batch:
        return type(batch)([_in_dtype(batch[0], dtype), *batch[1:]])
    return batch


class _Pace:
    """How fast an epoch goes."""

    def __init__(self) -> None:
        self._count, self._first, self._last, self._waited = 0, 0.0, 0.0, 0.0

    def given(self, asked: float) -> None:
        """Count a batch that was asked for at that time; the first one says nothing about the others."""
        self._last = perf_counter()
        if self._count == 0:
            self._first = self._last
        else:
            self._waited += self._last - asked
        self._count += 1

    def tell(self, listener: Callable[[float, float], None] | None) -> None:
        steps = self._count - 1
        if listener is not None and steps > 0:
            listener((self._last - self._first) / steps, self._waited / steps)


class _Moving:
    """A batch on its way, or the error that came instead."""

    def __init__(
        self, found: Callable[[], Any] | DeferredError, how_far: Any, epoch: int = 0, number: int = 0
    ) -> None:
        self._found, self.how_far, self.epoch, self.number = found, how_far, epoch, number

    def given(self) -> Any:
        if isinstance(self._found, DeferredError):
            raise self._found.take()
        return self._found()


class DeferredError:
    """Keeps an error until the batch is asked for in whose place it comes."""

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def take(self) -> BaseException:
        """Return the error to raise.  It is not kept: its traceback refers to much."""
        assert self._error is not None
        error, self._error = self._error, None
        return error
