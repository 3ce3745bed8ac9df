"""Batches whose images are decoded by one call: all are opened before it, and their samples made after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from fastpipe._nvtx import ranged
from fastpipe.engine.pool import Job, ThreadPool
from fastpipe.protocols import BatchDecoder, PartlyDecoded
from fastpipe.types import Box

__all__ = ["decoded_together", "said_of"]

_Asked = Sequence[tuple[PartlyDecoded, Box]]


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
