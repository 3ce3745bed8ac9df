"""Takes batches of a loader for a while, so that how long one takes can be told."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from fastpipe.profiling._torch_view import limit_waiting

__all__ = ["Epoch", "epochs"]

# Of all workers, of whose first batches are not counted: it matters little then how many come at once.
_TURNS = 4
_PATIENCE_S = 30.0  # for a batch of workers


@dataclass(frozen=True)
class Epoch:
    """Batches that were taken of one iterator.

    Attributes:
        batches: that are counted.
        seconds: of these, from when the first was asked for until the last was done with.
        waited: of that, seconds until they were there.
        taken: all batches, with those that are not counted.
        is_over: whether there were no more, and so its workers have ended.
        began: whatever ``look`` returned when the first of those counted was asked for.
    """

    batches: int
    seconds: float
    waited: float
    taken: int
    is_over: bool
    began: Any


def epochs(
    begin: Callable[[], Iterator[Any]],
    skipped: int,
    seconds: float,
    *,
    step: Callable[[Any], object] | None = None,
    look: Callable[[], Any] = lambda: None,
    limit: float = 4.0,
    counts_start: bool = False,
) -> Iterator[Epoch]:
    """Take batches in as many epochs as it takes; the loader's iterator lives until the next is asked for.

    It is never ahead when it begins, as its batches are taken as they are made.  Batches of workers come
    some at a time, so it is looked at for some turns of all of them.

    Args:
        begin: makes an iterator.
        skipped: batches before its pace is that of others: the first of each worker, which open files.
        seconds: that are looked at.
        step: called with each batch; None for nothing.
        look: called before the iterator begins, and before the first batch that is counted is asked for.
        limit: so many times the seconds end it in any case, once a first batch is there.
        counts_start: whether an epoch that is over before enough was seen is counted as a whole, with the
            start of its workers, as these have nothing ahead at its end; else only one that is hardly longer
            than what is skipped.

    >>> epoch = next(epochs(lambda: iter(range(9)), 2, 0.5))
    >>> epoch.batches, epoch.taken, epoch.is_over
    (7, 9, True)
    """
    took, taken, deadline = 0.0, 0, perf_counter() + limit * seconds
    while took < seconds and perf_counter() < deadline:
        first = last = look()
        opened, is_over = perf_counter(), True
        moments = array("d")  # of each batch: when it was asked for, and when it was there
        iterator = begin()
        limit_waiting(iterator, _PATIENCE_S)
        while True:
            asked = perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            moments.extend((asked, perf_counter()))
            if step is not None:
                step(batch)
            del batch
            now, count = perf_counter(), len(moments) // 2
            if not taken and count == 1:  # workers that were slow to start are not slow
                deadline = now + limit * seconds
            if count == skipped:
                last = look()
            since = moments[2 * skipped] if count > skipped else now
            if (count >= _TURNS * skipped and took + now - since > seconds) or now > deadline:
                is_over = False
                break
        count, end = len(moments) // 2, perf_counter()
        is_whole = is_over and (counts_start or count < _TURNS * skipped)
        left_out = 0 if is_whole or count <= skipped else skipped
        start = moments[2 * left_out] if left_out else opened
        stepped = sum([*moments[2 * left_out + 2 :: 2], end]) - sum(moments[2 * left_out + 1 :: 2])
        taken += count
        took += end - start
        yield Epoch(
            count - left_out, end - start, end - start - (stepped if count else 0.0), count,
            is_over, last if left_out else first,
        )  # fmt: skip
        del iterator
        if not count:
            return
