"""The opened images of a batch: measure their decoding, and decode several of them in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, TypeVar

from fastpipe._nvtx import ranged
from fastpipe.engine.bad import Item, means_damage
from fastpipe.engine.pool import Job, ThreadPool
from fastpipe.protocols import BatchDecoder, EncodedImage, PartlyDecoded, ReducedImage
from fastpipe.types import Box, Size, UInt8Array

__all__ = ["UnreadableError", "WatchedImage", "decoded_together", "judged", "said_of"]

_T = TypeVar("_T")
_Asked = Sequence[tuple[PartlyDecoded, Box]]


class UnreadableError(Exception):
    """Reading or decoding failed, as opposed to transforming; the cause says how.

    Args:
        item: what could not be read, where it is one of several parts of the sample.
    """

    def __init__(self, item: Item | None = None) -> None:
        super().__init__()
        self.item = item


class WatchedImage:
    """An opened image.  It measures its decoding, and raises ``UnreadableError`` where that fails."""

    def __init__(self, image: EncodedImage) -> None:
        self._image = image
        self.size: Size = image.size
        self.nanoseconds = 0

    @ranged("decode")
    def timed(self, decode: Callable[..., _T], *arguments: Any) -> _T:
        """Call what decodes the image."""
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
    """A reduced image that is watched like the image that it is of."""

    def __init__(self, watched: WatchedImage, image: ReducedImage) -> None:
        self._watched, self._image = watched, image
        self.size = image.size

    def rows(self, count: int) -> UInt8Array | None:
        return self._watched.timed(self._image.rows, count)


def judged(error: Exception) -> Exception:
    """Return the error to raise when reading or decoding failed: ``UnreadableError`` for a bad file, or the
    error itself, which says nothing of the file."""
    return UnreadableError() if means_damage(error) else error


def said_of(decoder: BatchDecoder) -> str:
    """The line of a plan about a decoder, before that of what decodes images one by one."""
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
    """Begin to make samples: ask each for its images, decode these, make each.

    Args:
        pool: threads to work in; None works in the calling one before returning.
        decoder: decodes what is asked for.
        count: samples.
        asked: of samples with these numbers the images that may be decoded, with what is needed of them;
            none of a sample of which something is wrong, for ``make`` to find.
        make: makes a sample of this number; keeps errors to itself.
        took: called with the nanoseconds of decoding.
        last: called by the thread that has made the last sample.
        width: samples that a thread opens, or makes, at a time.

    Returns:
        Both jobs, the second of which begins where the first has ended.
    """
    parts = [range(first, min(first + width, count)) for first in range(0, count, width)]
    opening = _Opening(decoder, parts, asked, took)

    def make_part(number: int) -> None:
        for sample in parts[number]:
            make(sample)

    second = Job(make_part, len(parts), last)
    if pool is not None:
        return [pool.submit(opening.open, len(parts), lambda: _go_on(opening, pool, second)), second]
    first = Job(opening.open, len(parts), opening.decode)
    first.run_here()
    if opening.is_over:
        second.run_here()
    else:  # whoever waits hears of the first
        second.cancel()
    return [first, second]


def _go_on(opening: _Opening, pool: ThreadPool, second: Job) -> None:
    """Decode, and let samples be made."""
    try:
        opening.decode()
        pool.go_on_with(second)
    except BaseException as error:
        second.cancel(error)
        raise


class _Opening:
    """What is done before samples are made."""

    def __init__(
        self,
        decoder: BatchDecoder,
        parts: Sequence[Sequence[int]],
        asked: Callable[[Sequence[int]], Sequence[_Asked]],
        took: Callable[[int], None],
    ) -> None:
        self._decoder, self._parts, self._asked, self._took = decoder, parts, asked, took
        self._found: list[Sequence[_Asked]] = [()] * len(parts)
        self.is_over = not parts

    def open(self, number: int) -> None:
        """Open the images of a part of the samples."""
        self._found[number] = self._asked(self._parts[number])

    @ranged("decode")
    def decode(self) -> None:
        """Decode what was asked for."""
        parts = [part for samples in self._found for found in samples for part in found]
        self._found = []
        if parts:
            start = perf_counter_ns()
            files = [(image.encoded() or b"", box) for image, box in parts]
            for (image, box), pixels in zip(parts, self._decoder.decode(files), strict=True):
                if pixels is not None:
                    image.give(box, pixels)
            self._took(perf_counter_ns() - start)
        self.is_over = True
