"""Batches: samples read, decoded and transformed side by side, into one piece of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._nvtx import ranged
from fastpipe.engine.bad import BadSampleLog, Item, bad_sample_error, is_of_machine
from fastpipe.engine.pool import Job, ThreadPool
from fastpipe.errors import BadSampleError
from fastpipe.protocols import EncodedImage, ReducedImage, SamplePlan, Stopwatch
from fastpipe.types import Box, Size, UInt8Array

__all__ = [
    "BatchMaker",
    "PendingBatch",
    "PendingSamples",
    "UnreadableError",
    "WatchedImage",
    "judged",
    "say_where",
]


class UnreadableError(Exception):
    """Reading or decoding failed, as opposed to transforming; the cause says how.

    Args:
        item: what could not be read, where it is one of several parts of the sample.
    """

    def __init__(self, item: Item | None = None) -> None:
        super().__init__()
        self.item = item


class BatchMaker:
    """Makes batches of image samples.

    Args:
        read: a path to what there is of the image: its encoded file, or more.
        open_image: that and the path to an opened image.
        policy: ``"raise"``, ``"replace"`` or ``"skip"``.
        bad: where bad samples are recorded.
        clock: where times are collected.
    """

    def __init__(
        self,
        read: Callable[[str], Any],
        open_image: Callable[[Any, str], EncodedImage],
        policy: str,
        bad: BadSampleLog,
        clock: Stopwatch,
    ) -> None:
        self.read, self.open_image = read, open_image
        self.policy, self.bad, self.clock = policy, bad, clock

    def start(
        self,
        pool: ThreadPool | None,
        items: Sequence[Item],
        plan: SamplePlan,
        parameters: npt.NDArray[np.float64],
        memory: npt.NDArray[Any] | Sequence[npt.NDArray[Any]] | None = None,
        finish: Callable[[Any, int], Any] | None = None,
        substitute: Callable[[int, int], Item | None] | None = None,
    ) -> PendingBatch:
        """Begin a batch.

        Args:
            pool: threads to work in; None works in the calling thread before returning.
            items: the samples.
            plan: what is done to each.
            parameters: float64 (N, …), a row for each sample.
            memory: (N, …) the batch's memory, or a row of a larger one for each sample; None lets
                samples be separate values.
            finish: called with a sample's value and its number in the batch, in the thread
                that made it.
            substitute: for the policy ``"replace"``: the sample's number in the batch and
                the attempt, from 1, to another item; None when there is none left to try.
        """
        batch = PendingBatch(self, items, plan, parameters.tolist(), memory, finish, substitute)
        batch.begin(pool)
        return batch


class PendingSamples:
    """Samples that are being made side by side.  What makes one is a subclass's.

    Args:
        items: the samples, as asked for.
        policy: ``"raise"``, ``"replace"`` or ``"skip"``.
        bad: where bad samples are recorded.
        substitute: as of ``BatchMaker.start``.
    """

    job: Job

    def __init__(
        self,
        items: Sequence[Item],
        policy: str,
        bad: BadSampleLog,
        substitute: Callable[[int, int], Item | None] | None,
    ) -> None:
        self.items = items
        self._policy, self._bad, self._substitute = policy, bad, substitute
        self._errors: dict[int, BaseException] = {}
        self._left_out: dict[int, BadSampleError] = {}

    def begin(self, pool: ThreadPool | None) -> None:
        """Make them in these threads; None makes them in the calling one before returning."""
        if pool is None:
            self.job = Job(self.make, len(self.items))
            self.job.run_here()
        else:
            self.job = pool.submit(self.make, len(self.items))

    def wait(self) -> list[int]:
        """Wait until the batch is made.

        Returns:
            The numbers of the samples that are there: all, but for the policy ``"skip"``.

        Raises:
            BadSampleError: as the policy says, for the first bad sample of the batch.
            Exception: what a transform raised, for the first sample that it failed on.
        """
        self.job.wait()
        if self._errors:
            first = min(self._errors)
            self._errors = {first: self._errors[first]}
            # An error's traceback refers to this batch and its memory: keep none of them here, or
            # the memory would wait for the garbage collector.
            raise self._errors.pop(first)
        return [n for n in range(len(self.items)) if n not in self._left_out]

    @property
    def left_out(self) -> Mapping[int, BadSampleError]:
        """The errors of the samples that the policy left out, by their numbers, after ``wait``."""
        return self._left_out

    def cancel(self) -> None:
        """Give the batch up: samples that have not been begun never are."""
        self.job.cancel()

    def make(self, number: int) -> None:
        """Make one sample.  Errors are kept for ``wait``."""
        item: Item | None = self.items[number]
        try:
            for attempt in itertools.count(1):
                if item is None:
                    raise self._no_replacement(self.items[number], attempt - 2)
                try:
                    self._make_from(number, item)
                    return
                except UnreadableError as unreadable:
                    text = self._pass_over(item, unreadable)
                if self._policy == "skip":
                    self._left_out[number] = BadSampleError(text, path=item.path, index=item.index)
                    return
                assert self._substitute is not None
                item = self._substitute(number, attempt)
        except BaseException as error:  # ``wait`` raises it, where its sample is the first that failed
            say_where(error, item or self.items[number])
            self._errors[number] = error

    def _pass_over(self, item: Item, unreadable: UnreadableError) -> str:
        """Raise the error of a bad sample, or record it if the policy lets it pass; its text."""
        assert unreadable.__cause__ is not None
        item = unreadable.item or item
        error = bad_sample_error(item, unreadable.__cause__)
        try:
            if self._policy == "raise":
                raise error from unreadable.__cause__
            self._bad.record(item, error)
            return str(error)
        finally:
            del error  # its traceback refers to this frame

    def _make_from(self, number: int, item: Item) -> None:
        """Make a sample of this item.

        Raises:
            UnreadableError: its file is bad.
            Exception: anything else is raised whatever the policy.
        """
        raise NotImplementedError

    def _no_replacement(self, item: Item, tried: int) -> BadSampleError:
        return BadSampleError(
            f"sample {item.index} ({item.path!r}) could not be read, and there is no other of class "
            f"{item.target} to replace it: {tried} tried in its place could not be read either. The "
            "warnings logged for each say why; repair the files, or leave the class out.",
            path=item.path,
            index=item.index,
        )


class PendingBatch(PendingSamples):
    """A batch of images that is being made.  Made by ``BatchMaker.start``.

    Attributes:
        memory: the batch's memory, written where samples share it.
        values: the samples' values, where they do not.
    """

    def __init__(
        self,
        maker: BatchMaker,
        items: Sequence[Item],
        plan: SamplePlan,
        parameters: Sequence[Sequence[float]],
        memory: npt.NDArray[Any] | Sequence[npt.NDArray[Any]] | None,
        finish: Callable[[Any, int], Any] | None,
        substitute: Callable[[int, int], Item | None] | None,
    ) -> None:
        super().__init__(items, maker.policy, maker.bad, substitute)
        self.memory = memory
        self.values: list[Any] = [None] * len(items)
        self._maker, self._plan, self._parameters = maker, plan, parameters
        self._rows = memory.reshape(len(items), -1) if isinstance(memory, np.ndarray) else memory
        self._finish = finish

    @ranged("sample")
    def _make_from(self, number: int, item: Item) -> None:
        maker = self._maker
        start = perf_counter_ns()
        try:
            blob = maker.read(item.path)
            read = perf_counter_ns()
            maker.clock.add("read", read - start)
            image = WatchedImage(maker.open_image(blob, item.path))
        except Exception as error:
            raise judged(error) from error
        row = None if self._rows is None else self._rows[number]
        value = self._plan.apply(image, self._parameters[number], row)
        self.values[number] = self._finish(value, number) if self._finish else value
        maker.clock.add("decode", image.nanoseconds)
        maker.clock.add("transform", perf_counter_ns() - read - image.nanoseconds)


class WatchedImage:
    """An opened image whose decoding is timed and whose failures are told from a transform's."""

    def __init__(self, image: EncodedImage) -> None:
        self._image = image
        self.size: Size = image.size
        self.nanoseconds = 0

    @ranged("decode")
    def region(self, box: Box) -> UInt8Array:
        start = perf_counter_ns()
        try:
            return self._image.region(box)
        except Exception as error:
            raise judged(error) from error
        finally:
            self.nanoseconds += perf_counter_ns() - start

    def info(self) -> dict[Any, Any]:
        try:
            return self._image.info()
        except Exception as error:
            raise judged(error) from error

    @ranged("decode")
    def rows(self, top: int, count: int) -> UInt8Array | None:
        start = perf_counter_ns()
        try:
            return self._image.rows(top, count)
        except Exception as error:
            raise judged(error) from error
        finally:
            self.nanoseconds += perf_counter_ns() - start

    def reduced(self, factor: int) -> ReducedImage | None:
        image = self._image.reduced(factor)
        return None if image is None else _WatchedRows(self, image)

    @ranged("decode")
    def pil(self) -> Any:
        start = perf_counter_ns()
        try:
            return self._image.pil()
        except Exception as error:
            raise judged(error) from error
        finally:
            self.nanoseconds += perf_counter_ns() - start


class _WatchedRows:
    """A reduced image that is watched like the image that it is of."""

    def __init__(self, watched: WatchedImage, image: ReducedImage) -> None:
        self._watched, self._image = watched, image
        self.size = image.size

    @ranged("decode")
    def rows(self, count: int) -> UInt8Array | None:
        start = perf_counter_ns()
        try:
            return self._image.rows(count)
        except Exception as error:
            raise judged(error) from error
        finally:
            self._watched.nanoseconds += perf_counter_ns() - start


def judged(error: Exception) -> Exception:
    """What to raise for an error of reading or decoding: that the file is bad, or the error."""
    return error if is_of_machine(error) else UnreadableError()


def say_where(error: BaseException, item: Item) -> None:
    """Add the sample to a transform's error (Python 3.11 and later show it)."""
    if not isinstance(error, BadSampleError) and hasattr(error, "add_note"):
        error.add_note(f"while making sample {item.index} from {item.path!r}")
