"""Batches: samples read, decoded and transformed in parallel, into one block of memory."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fastpipe.core.bad_samples import BadSampleLog, Item, bad_sample_error, means_damage, no_replacement
from fastpipe.core.clock import StageClock, ranged
from fastpipe.core.pool import Job, ThreadPool
from fastpipe.core.types import (
    BatchDecoder,
    BatchDevice,
    Box,
    EncodedImage,
    PartlyDecoded,
    ReducedImage,
    Size,
    UInt8Array,
)
from fastpipe.errors import BadSampleError

# The opened images of a batch: measure their decoding, and decode several of them in one call.

_T = TypeVar("_T")
_Asked = Sequence[tuple[PartlyDecoded, Box]]


class UnreadableError(Exception):
    """Reading or decoding failed, as opposed to transforming; the cause is the original error.

    ``item`` is the part that could not be read, if the sample has several parts.
    """

    def __init__(self, item: Item | None = None) -> None:
        super().__init__()
        self.item = item


class WatchedImage:
    """An opened image.  It measures its decoding, and raises ``UnreadableError`` if that fails."""

    def __init__(self, image: EncodedImage) -> None:
        self._image = image
        self.size: Size = image.size
        self.nanoseconds = 0

    @ranged("decode")
    def timed(self, decode: Callable[..., _T], *arguments: Any) -> _T:
        start = perf_counter_ns()
        try:
            return decode(*arguments)
        except Exception as error:
            raise judged(error) from error
        finally:
            self.nanoseconds += perf_counter_ns() - start

    def region(self, box: Box) -> UInt8Array:
        return self.timed(self._image.region, box)

    def info(self) -> dict[Any, Any]:
        try:
            return self._image.info()
        except Exception as error:
            raise judged(error) from error

    def rows(self, top: int, count: int) -> UInt8Array | None:
        return self.timed(self._image.rows, top, count)

    def reduced(self, factor: int) -> ReducedImage | None:
        image = self._image.reduced(factor)
        return None if image is None else _WatchedRows(self, image)

    def encoded(self) -> bytes | None:
        return self._image.encoded()

    def give(self, box: Box, pixels: UInt8Array) -> None:
        self._image.give(box, pixels)

    def pil(self) -> Any:
        return self.timed(self._image.pil)


class _WatchedRows:
    def __init__(self, watched: WatchedImage, image: ReducedImage) -> None:
        self._watched, self._image = watched, image
        self.size = image.size

    def rows(self, count: int) -> UInt8Array | None:
        return self._watched.timed(self._image.rows, count)


def judged(error: Exception) -> Exception:
    """Return ``UnreadableError`` for the error of a bad file; return any other error
    unchanged."""
    return UnreadableError() if means_damage(error) else error


def said_of(decoder: BatchDecoder) -> str:
    """Return a plan's line about a batch decoder; it precedes the line about single-image decoders."""
    return f"the JPEGs of a batch  →  {decoder.describe()}; those that it declines as follows"


def decoded_together(
    pool: ThreadPool | None,
    decoder: BatchDecoder,
    count: int,
    asked: Callable[[Sequence[int]], Sequence[_Asked]],
    make: Callable[[int], None],
    took: Callable[[int], None],
    last: Callable[[], None] | None = None,
    width: int = 1,
) -> list[Job]:
    """Begin to make samples: collect their images, decode these, make each sample; return both jobs.

    ``asked`` returns a sample's images that may be decoded, with the needed parts; none for a faulty sample,
    whose error ``make`` then finds and handles.  ``took`` receives the nanoseconds of decoding, and ``last``
    is called when all are made.  A thread opens, or makes, ``width`` samples at a time; without a pool, the
    calling thread does everything before returning.
    """
    parts = [range(first, min(first + width, count)) for first in range(0, count, width)]
    found: list[Sequence[_Asked]] = [()] * len(parts)

    def open_part(number: int) -> None:
        found[number] = asked(parts[number])

    @ranged("decode")
    def decode() -> None:
        wanted = [part for samples in found for images in samples for part in images]
        found.clear()
        if wanted:
            start = perf_counter_ns()
            files = [(image.encoded() or b"", box) for image, box in wanted]
            for (image, box), pixels in zip(wanted, decoder.decode(files), strict=True):
                if pixels is not None:
                    image.give(box, pixels)
            took(perf_counter_ns() - start)

    def make_part(number: int) -> None:
        for sample in parts[number]:
            make(sample)

    def go_on() -> None:
        try:
            decode()
            if pool is not None:
                pool.go_on_with(second)
        except BaseException as error:
            second.cancel(error)
            raise

    second = Job(make_part, len(parts), last)
    if pool is not None:
        return [pool.submit(open_part, len(parts), go_on), second]
    first = Job(open_part, len(parts), go_on)
    first.run_here()
    if found:  # it has failed; waiting threads get the error
        second.cancel()
    second.run_here()
    return [first, second]


# Samples that a thread opens, or makes, in one go if a device decodes: the remaining work is so small that
# threads, and files read one by one, would mostly wait for the GIL.
_AT_A_TIME = 8


class BatchMaker:
    """A maker of batches of image samples.

    Args:
        read: maps a path to the image's data: its encoded file, or more.
        open_image: maps the data and the path to an opened image.
        policy, bad, clock: the policy for bad samples; the collectors of bad samples and of times.
        decoder: decodes the images of a batch at once; None lets each thread decode its own.
        read_past, read_many_past: as ``read``, for one or many paths, bypassing the cache; the latter
            returns None for paths that it leaves to the former.
    """

    def __init__(
        self,
        read: Callable[..., Any],
        open_image: Callable[[Any, str], EncodedImage],
        policy: str,
        bad: BadSampleLog,
        clock: StageClock,
        decoder: BatchDecoder | None = None,
        read_past: Callable[[str], Any] | None = None,
        read_many_past: Callable[[Sequence[str]], Sequence[Any]] | None = None,
    ) -> None:
        self.read, self.open_image = read, open_image
        self.read_past = read_past or read
        self.read_many_past = read_many_past
        self.policy, self.bad, self.clock = policy, bad, clock
        self.decoder = decoder

    def start(
        self,
        pool: ThreadPool | None,
        items: Sequence[Item],
        plan: Any,
        parameters: npt.NDArray[np.float64],
        memory: npt.NDArray[Any] | Sequence[npt.NDArray[Any]] | None = None,
        finish: Callable[[Any, int], Any] | None = None,
        substitute: Callable[[int, int], Item | None] | None = None,
        *,
        is_batch: bool = True,
        device: BatchDevice | None = None,
    ) -> PendingBatch:
        """Begin a batch; without a pool it is made before this returns.

        Args:
            parameters: float64 (N, …), a row for each sample.
            memory: (N, …) the batch's memory, or a row of a larger one for each sample; None lets samples be
                separate values.
            finish: called with a sample's value and its number in the batch, in the thread that made it.
            substitute: for the policy ``"replace"``: maps a sample's number and the attempt, from 1, to
                another item; None if there is none left.
            is_batch: whether the maker's batch decoder may be used.
            device: the device that makes as much of the batch as possible; its plan writes bytes, to
                ``memory`` for the rest.
        """
        batch = PendingBatch(self, items, plan, parameters.tolist(), memory, finish, substitute, device)
        batch.begin(pool, device or (self.decoder if is_batch else None))
        return batch


class PendingSamples(ABC):
    """Samples that are being made in parallel.  Subclasses define how one is made."""

    def __init__(
        self, items: Sequence[Item], policy: str, bad: BadSampleLog,
        substitute: Callable[[int, int], Item | None] | None,
    ) -> None:  # fmt: skip
        self.items = items
        self.jobs: list[Job] = []  # the threads' jobs for it, in order
        self._policy, self._bad, self._substitute = policy, bad, substitute
        self._errors: dict[int, BaseException] = {}
        self._left_out: dict[int, BadSampleError] = {}
        self._passed: dict[int, list[tuple[Item, BadSampleError]]] = {}  # until ``wait`` records them
        self._open: dict[int, Any] = {}  # images that ``_asked`` opened before samples are made

    def begin(self, pool: ThreadPool | None, decoder: BatchDecoder | None = None) -> None:
        """Make the samples, in the pool's threads or before returning; ``decoder`` decodes all images."""
        count = len(self.items)
        if decoder is not None:
            self.jobs = decoded_together(
                pool, decoder, count, self._asked_of, self.make, self._decoding, self._made_all,
                self._at_a_time(),
            )  # fmt: skip
        elif pool is not None:
            self.jobs = [pool.submit(self.make, count)]
        else:
            self.jobs = [Job(self.make, count)]
            self.jobs[0].run_here()

    def wait(self) -> list[int]:
        """Wait until all are made; return the numbers of the made samples: all, except with ``"skip"``.

        Raises:
            BadSampleError: according to the policy, for the first bad sample of the batch.
            Exception: a transform's error, for the first sample that it failed on.
        """
        for job in self.jobs:
            job.wait()
        first = min(self._errors, default=len(self.items))
        passed, self._passed = self._passed, {}
        for number in sorted(passed):  # in order, so that the budget always ends at the same sample
            for item, error in passed[number] if number <= first else ():
                self._bad.record(item, error)
        if self._errors:
            self._errors = {first: self._errors[first]}
            # A traceback refers to this batch, whose memory would wait for the garbage collector.
            raise self._errors.pop(first)
        return [n for n in range(len(self.items)) if n not in self._left_out]

    @property
    def left_out(self) -> Mapping[int, BadSampleError]:
        """The errors of the samples that the policy left out, by their numbers, after ``wait``."""
        return self._left_out

    def cancel(self) -> None:
        """Cancel the batch: samples that have not been begun are never made."""
        for job in self.jobs:
            job.cancel()

    def make(self, number: int) -> None:
        item: Item | None = self.items[number]
        try:
            for attempt in itertools.count(1):
                if item is None:
                    raise no_replacement(self.items[number], attempt - 2)
                try:
                    self._make_from(number, item)
                    return
                except UnreadableError as unreadable:
                    text = self._pass_over(number, item, unreadable)
                if self._policy == "skip":
                    self._left_out[number] = BadSampleError(text, path=item.path, index=item.index)
                    return
                assert self._substitute is not None
                item = self._substitute(number, attempt)
        except BaseException as error:  # ``wait`` raises it if its sample is the first that failed
            say_where(error, item or self.items[number])
            self._errors[number] = error

    def _pass_over(self, number: int, item: Item, unreadable: UnreadableError) -> str:
        """Raise a bad sample's error, or keep it for ``wait`` if the policy accepts it; return its text."""
        assert unreadable.__cause__ is not None
        item = unreadable.item or item
        error = bad_sample_error(item, unreadable.__cause__)
        try:
            if self._policy == "raise":
                raise error from unreadable.__cause__
            unreadable.__cause__.__traceback__ = unreadable.__cause__.__context__ = None  # as in ``wait``
            self._passed.setdefault(number, []).append((item, error))
            return str(error)
        finally:
            del error  # its traceback refers to this frame

    def _at_a_time(self) -> int:
        return 1

    def _asked_of(self, numbers: Sequence[int]) -> list[list[tuple[PartlyDecoded, Box]]]:
        found: list[list[tuple[PartlyDecoded, Box]]] = []
        for number in numbers:
            try:
                found.append(self._asked(number))
            except Exception:  # raised again, and handled, when the sample is made
                found.append([])
        return found

    @abstractmethod
    def _asked(self, number: int) -> list[tuple[PartlyDecoded, Box]]:
        """Return a sample's images that a batch decoder may decode, with the needed boxes; errors are left
        to be found when the sample is made."""

    def _opened_before(self, number: int, item: Item) -> Any:
        """Return, once, what ``_asked`` opened; None for a substitute, and if nothing was decoded."""
        return self._open.pop(number, None) if item is self.items[number] else None

    @abstractmethod
    def _decoding(self, nanoseconds: int) -> None: ...

    def _made_all(self) -> None:  # noqa: B027
        """Called when all samples are made, or have errors, if they were decoded at once."""

    @abstractmethod
    def _make_from(self, number: int, item: Item) -> None:
        """Make a sample; raise ``UnreadableError`` if its file is bad; other errors are raised under
        every policy."""


class PendingBatch(PendingSamples):
    """A batch of images that is being made: into ``memory``, which samples share, or to ``values``, or on a
    device (``there``).  Made by ``BatchMaker.start``."""

    def __init__(
        self,
        maker: BatchMaker,
        items: Sequence[Item],
        plan: Any,
        parameters: Any,
        memory: npt.NDArray[Any] | Sequence[npt.NDArray[Any]] | None,
        finish: Callable[[Any, int], Any] | None,
        substitute: Callable[[int, int], Item | None] | None,
        device: BatchDevice | None = None,
    ) -> None:
        super().__init__(items, maker.policy, maker.bad, substitute)
        self.there: Any = None
        self._device = device
        self._images: dict[int, _ImageThere] = {}  # images made on the device, by sample
        self._read: dict[int, Any] = {}  # data read before opening, by sample
        self.memory = memory
        self.values: list[Any] = [None] * len(items)
        self._maker, self._plan, self._parameters = maker, plan, parameters
        self._rows = memory.reshape(len(items), -1) if isinstance(memory, np.ndarray) else memory
        self._finish = finish

    @ranged("sample")
    def _make_from(self, number: int, item: Item) -> None:
        clock, there = self._maker.clock, self._images.get(number)
        image: WatchedImage | None = self._opened_before(number, item)
        if image is not None and there is not None and there.pixels is not None:
            return
        image = image or self._opened(item)
        start = perf_counter_ns()
        row = None if self._rows is None else self._rows[number]
        value = self._plan.apply(image, self._parameters[number], row)
        self.values[number] = self._finish(value, number) if self._finish else value
        clock.add("decode", image.nanoseconds)
        clock.add("transform", perf_counter_ns() - start - image.nanoseconds)

    def _at_a_time(self) -> int:
        return _AT_A_TIME if self._device is not None and self._maker.read_many_past is not None else 1

    def _asked_of(self, numbers: Sequence[int]) -> list[list[tuple[PartlyDecoded, Box]]]:
        device, read = self._device, self._maker.read_many_past
        if device is not None and read is not None:
            start = perf_counter_ns()
            theirs = [number for number in numbers if device.takes(number)]
            found = read([self.items[number].path for number in theirs])
            self._read.update(zip(theirs, found, strict=True))
            self._maker.clock.add("read", perf_counter_ns() - start)
        return super()._asked_of(numbers)

    def _asked(self, number: int) -> list[tuple[PartlyDecoded, Box]]:
        item, parameters = self.items[number], self._parameters[number]
        is_there = self._device is not None and self._device.takes(number)
        # Cached images have the CPU decoder's pixels: epochs would mix these with the device's.
        read = self._read.pop(number, None)
        image = self._opened(item, self._maker.read_past if is_there else None, read)
        if is_there and image.encoded() is None:  # no device can decode it
            image = self._opened(item)
        self._open[number] = image
        if image.encoded() is None or not (self._device is None or is_there):
            return []
        if self._device is None:
            part = self._plan.part(image, parameters)
            return [] if part is None else [(image, part)]
        how = self._plan.resampling(image, parameters)
        if how is None:
            return []
        there = self._images[number] = _ImageThere(image, how)
        return [(there, how.part)]

    def _made_all(self) -> None:
        if self._device is None or self._errors:
            return
        assert self._rows is not None
        images = {n: (one.pixels, one.how) for n, one in self._images.items() if one.pixels is not None}
        rows = {
            n: self._rows[n] for n in range(len(self.items)) if n not in images and n not in self._left_out
        }
        self._images = {}
        self.there = self._device.finish(self._plan, images, rows, len(self.items))

    def _decoding(self, nanoseconds: int) -> None:
        self._maker.clock.add("decode", nanoseconds)

    def _opened(
        self, item: Item, read: Callable[[str], Any] | None = None, found: Any = None
    ) -> WatchedImage:
        """Read (with ``read``, else the maker's) and open an image; ``found`` was read already."""
        maker, start = self._maker, perf_counter_ns()
        try:
            if found is None:
                found = (read or maker.read)(item.path)
                maker.clock.add("read", perf_counter_ns() - start)
            return WatchedImage(maker.open_image(found, item.path))
        except Exception as error:
            raise judged(error) from error


class _ImageThere:
    """An image decoded on a device, where ``how`` resamples it; its pixels, once they exist."""

    def __init__(self, image: WatchedImage, how: Any) -> None:
        self._image, self.how = image, how
        self.pixels: Any = None

    def encoded(self) -> bytes | None:
        return self._image.encoded()

    def give(self, box: Box, pixels: Any) -> None:
        self.pixels = pixels


def say_where(error: BaseException, item: Item) -> None:
    """Add the sample to a transform's error (Python 3.11 and later show it)."""
    if not isinstance(error, BadSampleError) and hasattr(error, "add_note"):
        error.add_note(f"while making sample {item.index} from {item.path!r}")
