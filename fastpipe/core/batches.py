"""Make batches: read, decode and transform samples in parallel, into one block of memory."""

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

# Classes for the opened images of a batch, which measure the time of decoding, and the decoding of several
# images in one call.

_T = TypeVar("_T")
_Asked = Sequence[tuple[PartlyDecoded, Box]]


class UnreadableError(Exception):
    """An image could not be read or decoded.  ``__cause__`` is the original error.  If the sample has several
    images, ``item`` describes the image that could not be read."""

    def __init__(self, item: Item | None = None) -> None:
        super().__init__()
        self.item = item


class WatchedImage:
    """An opened image that measures the time of decoding.  A damaged image raises UnreadableError."""

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
    """Return an ``UnreadableError`` if the error means a bad file.  Otherwise return ``error`` unchanged."""
    return UnreadableError() if means_damage(error) else error


def said_of(decoder: BatchDecoder) -> str:
    """Return the line about a batch decoder for ``print(dataset.plan)``.  The line about the decoders of
    single images follows this line."""
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
    """Start to make samples whose images are decoded in one call, and return two jobs.

    The first job opens the images, and ends with the call that decodes all of them.  The second job makes the
    samples.  If ``pool`` is None, the calling thread runs the two jobs before this function returns.

    Args:
        count: number of samples.
        asked: gets the numbers of samples.  For each sample, it returns the images that ``decoder`` may
            decode, and the rectangles that are needed.  For a bad sample, it returns no image, and ``make``
            then finds and handles the sample's error.
        make: makes one sample.
        took: receives the nanoseconds that decoding took.
        last: is called when all samples are made.
        width: the number of samples that a thread opens (or makes) at a time.
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
    if found:  # the first job has failed, and waiting for it raises the error
        second.cancel()
    second.run_here()
    return [first, second]


# Number of samples that a thread opens, or makes, at a time if a device decodes.  The remaining work for a
# sample is so small that threads would mostly wait for the GIL if they processed samples one by one.
_AT_A_TIME = 8


class BatchMaker:
    """Makes batches of image samples.

    Args:
        read: returns the data of the image at a path (the encoded file, or a cached image).
        open_image: returns the opened image for the data and the path.
        policy: what to do with bad samples: ``"raise"``, ``"skip"`` or ``"replace"``.
        bad: the log of bad samples.
        clock: the clock that collects the times of the stages.
        decoder: decodes all images of a batch in one call.  If None, each thread decodes its own images.
        read_past: reads a path as ``read`` does, but without the cache.
        read_many_past: reads several paths without the cache.  If its result for a path is None, the path is
            then read with ``read_past``.
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
        """Start to make a batch.  Without a pool, the batch is finished when this method returns.

        Args:
            parameters: the random parameters of the samples, float64 (N, …).
            memory: the memory of the batch, (N, …), or a list with the memory of each sample.  If None, the
                samples are separate values.
            finish: is called with a sample's value and number, in the thread that made the sample.  The
                result of ``finish`` replaces the value.
            substitute: returns another item for the policy ``"replace"``, or None if no item is left.  Its
                arguments are a sample's number in the batch and the number of the attempt, from 1.
            is_batch: whether this object's ``decoder`` may be used.
            device: the device that makes as many samples as possible.  The CPU makes all other samples, and
                writes them to ``memory`` as bytes.
        """
        batch = PendingBatch(self, items, plan, parameters.tolist(), memory, finish, substitute, device)
        batch.begin(pool, device or (self.decoder if is_batch else None))
        return batch


class PendingSamples(ABC):
    """Samples that are being made in parallel.  Subclasses define how a sample is made."""

    def __init__(
        self, items: Sequence[Item], policy: str, bad: BadSampleLog,
        substitute: Callable[[int, int], Item | None] | None,
    ) -> None:  # fmt: skip
        self.items = items
        self.jobs: list[Job] = []  # the jobs that make the samples, in order
        self._policy, self._bad, self._substitute = policy, bad, substitute
        self._errors: dict[int, BaseException] = {}
        self._left_out: dict[int, BadSampleError] = {}
        # Errors that the policy accepts, by the samples' numbers.  ``wait`` records the errors.
        self._passed: dict[int, list[tuple[Item, BadSampleError]]] = {}
        self._open: dict[int, Any] = {}  # images that ``_asked`` opened, by the samples' numbers

    def begin(self, pool: ThreadPool | None, decoder: BatchDecoder | None = None) -> None:
        """Start to make the samples in the pool's threads.  If ``pool`` is None, make the samples now.
        ``decoder`` decodes all images in one call.  If it is None, images are decoded one by one."""
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
        """Wait until all samples are made, and return the samples' numbers in the batch.

        With the policy ``"skip"``, the numbers of bad samples are missing in the result.

        Raises:
            BadSampleError: a bad sample is neither replaced nor left out, or there are too many bad samples.
            Exception: a transform failed.  If several samples have errors, the error of the first is raised.
        """
        for job in self.jobs:
            job.wait()
        first = min(self._errors, default=len(self.items))
        passed, self._passed = self._passed, {}
        for number in sorted(passed):  # in order, so that ``max_errors`` always ends at the same sample
            for item, error in passed[number] if number <= first else ():
                self._bad.record(item, error)
        if self._errors:
            self._errors = {first: self._errors[first]}
            # An error's traceback refers to this batch.  Keeping the error here would be a reference cycle,
            # and only the garbage collector would free the batch's memory.
            raise self._errors.pop(first)
        return [n for n in range(len(self.items)) if n not in self._left_out]

    @property
    def left_out(self) -> Mapping[int, BadSampleError]:
        """The errors of the samples that the policy ``"skip"`` left out, by sample number.  Valid after
        ``wait``."""
        return self._left_out

    def cancel(self) -> None:
        """Cancel the batch.  No further sample is started."""
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
        """Raise the error of a bad sample if the policy is ``"raise"``.  Otherwise keep the error for
        ``wait``, and return the error's text."""
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
            except Exception:  # ``make`` raises the error again and handles it
                found.append([])
        return found

    @abstractmethod
    def _asked(self, number: int) -> list[tuple[PartlyDecoded, Box]]:
        """Return those images of a sample that a batch decoder may decode, and the rectangles that are
        needed.  The caller ignores errors, because ``make`` finds and handles them."""

    def _opened_before(self, number: int, item: Item) -> Any:
        """Remove and return the image that ``_asked`` opened.  Return None if ``item`` is a substitute, or if
        ``_asked`` opened no image."""
        return self._open.pop(number, None) if item is self.items[number] else None

    @abstractmethod
    def _decoding(self, nanoseconds: int) -> None: ...

    def _made_all(self) -> None:  # noqa: B027
        """Finish the batch.  Each sample is made or has an error.  This method is called only if the batch
        has a batch decoder."""

    @abstractmethod
    def _make_from(self, number: int, item: Item) -> None:
        """Make a sample.  Raise ``UnreadableError`` if the sample's file is bad.  All other errors are raised
        with every policy."""


class PendingBatch(PendingSamples):
    """A batch of images that is being made, as returned by ``BatchMaker.start``.  The samples are in
    ``memory``, or in the list ``values``, or are the batch ``there`` on a device."""

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
        self._images: dict[int, _ImageThere] = {}  # images made on the device, by sample number
        self._read: dict[int, Any] = {}  # data that were read in advance, by sample number
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
        # Read without the cache for the device: cached images have the pixels of the CPU decoder, and epochs
        # must not mix them with the device's pixels.
        read = self._read.pop(number, None)
        image = self._opened(item, self._maker.read_past if is_there else None, read)
        if is_there and image.encoded() is None:  # the device cannot decode this image
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
        """Read and open an image.  ``read``, if given, is used in place of the ``BatchMaker``'s ``read``.
        ``found`` is the image's data if the data were read already."""
        maker, start = self._maker, perf_counter_ns()
        try:
            if found is None:
                found = (read or maker.read)(item.path)
                maker.clock.add("read", perf_counter_ns() - start)
            return WatchedImage(maker.open_image(found, item.path))
        except Exception as error:
            raise judged(error) from error


class _ImageThere:
    """An image that a device decodes and then resamples as ``how`` describes.  ``pixels`` are the decoded
    pixels on the device, or None before decoding."""

    def __init__(self, image: WatchedImage, how: Any) -> None:
        self._image, self.how = image, how
        self.pixels: Any = None

    def encoded(self) -> bytes | None:
        return self._image.encoded()

    def give(self, box: Box, pixels: Any) -> None:
        self.pixels = pixels


def say_where(error: BaseException, item: Item) -> None:
    """Add a note with the sample's index and path to a transform's error, in Python 3.11 and later."""
    if not isinstance(error, BadSampleError) and hasattr(error, "add_note"):
        error.add_note(f"while making sample {item.index} from {item.path!r}")
