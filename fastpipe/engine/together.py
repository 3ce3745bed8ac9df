"""Batches whose images are decoded by one call: all are opened before it, and their samples made after it."""

from __future__ import annotations

import contextlib
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
    asked: Callable[[int], _Asked],
    make: Callable[[int], None],
    took: Callable[[int], None],
    last: Callable[[], None] | None = None,
) -> list[Job]:
    """Begin to make samples: ask each for its images, decode these, make each.

    Args:
        pool: threads to work in; None works in the calling one before returning.
        decoder: decodes what is asked for.
        count: samples.
        asked: a sample's number to its images that may be decoded, with what is needed of them.  What it
            raises is left for ``make`` to find.
        make: makes a sample of this number; keeps errors to itself.
        took: called with the nanoseconds of decoding.
        last: called by the thread that has made the last sample.

    Returns:
        Both jobs, the second of which begins where the first has ended.
    """
    opening = _Opening(decoder, count, asked, took)
    second = Job(make, count, last)
    if pool is not None:
        return [pool.submit(opening.open, count, lambda: _go_on(opening, pool, second)), second]
    first = Job(opening.open, count, opening.decode)
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
        count: int,
        asked: Callable[[int], _Asked],
        took: Callable[[int], None],
    ) -> None:
        self._decoder, self._asked, self._took = decoder, asked, took
        self._found: list[_Asked] = [()] * count
        self.is_over = not count

    def open(self, number: int) -> None:
        """Open the images of a sample."""
        with contextlib.suppress(Exception):  # whoever makes the sample meets it again, and knows what to do
            self._found[number] = self._asked(number)

    @ranged("decode")
    def decode(self) -> None:
        """Decode what was asked for."""
        parts = [part for found in self._found for part in found]
        self._found = []
        if parts:
            start = perf_counter_ns()
            files = [(image.encoded() or b"", box) for image, box in parts]
            for (image, box), pixels in zip(parts, self._decoder.decode(files), strict=True):
                if pixels is not None:
                    image.give(box, pixels)
            self._took(perf_counter_ns() - start)
        self.is_over = True
