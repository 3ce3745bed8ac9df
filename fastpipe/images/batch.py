"""A batch of images. The native engine (compiled code) makes most samples, and Python makes the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.bad_samples import Item
from fastpipe.core.batches import BatchMaker, PendingBatch, WatchedImage, say_where
from fastpipe.core.file_identity import FileIdentity
from fastpipe.core.native import native
from fastpipe.core.pool import Job, NativeJob, ThreadPool
from fastpipe.core.sample_tables import PackedPaths
from fastpipe.errors import ClosedError
from fastpipe.images.cache import Sizes
from fastpipe.images.plan import Plan

if TYPE_CHECKING:
    from fastpipe.images.cache import KeptBatch

PENDING, MADE = 0, 1  # outcomes of a sample, from fastpipe/native/status.h


class RowsOf(Sequence[Any]):
    """Some rows of ``memory``, (M, …), of a larger batch. ``numbers``, int64 (N,), says which rows."""

    def __init__(self, memory: npt.NDArray[Any], numbers: npt.NDArray[np.int64]) -> None:
        self.memory, self.numbers = memory, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: Any) -> Any:
        return self.memory[self.numbers[number]]


class Then(NamedTuple):
    """A further change of decoded uint8 images. The thread that decoded an image also makes this change."""

    batch: Any  # a ``native.AugmentBatch``, which changes each image and decides where to write it
    value: Any  # the value of a sample that ``batch`` has written


class Described(NamedTuple):
    """The native engine's inputs for a batch, in addition to the arguments of a ``PendingBatch``."""

    plan: Any  # a ``native.ImagePlan``
    paths: PackedPaths
    info: Callable[[bytes, str], dict[Any, Any]]  # returns Pillow's ``info`` for an encoded file and its path
    kept: KeptBatch | None = None  # the cache of decoded images
    arriving: Arriving | None = None  # how to fetch images that are not local files
    then: Then | None = None  # a further change; ``finish`` makes this change for samples that Python makes


class Arriving(NamedTuple):
    """How a batch's images are fetched from an object store, such as S3."""

    states: npt.NDArray[np.uint64] | None  # (N, 5): the objects and their versions; None without a cache
    away: Sequence[int]  # the samples whose objects are not on this machine yet; other paths are local files
    fetch: Callable[[int], bytes]  # returns the encoded file of a sample in ``away``, or raises an error


class ImageBatch(PendingBatch):
    """A batch of images.  The method ``begin_natively`` starts the batch.  The native engine makes all
    samples that it can make, and Python makes the rest.

    The arguments are those of ``PendingBatch``. ``memory`` is an array (N, …), a ``RowsOf``, or None.

    Attributes:
        when_seen: called with the sizes of the images that the engine has opened.
        note: called with a sample's path before Python fetches or makes the sample, in the same thread.
    """

    when_seen: Callable[[Sizes], None] | None = None
    note: Callable[[str], None] | None = None

    def __init__(
        self,
        maker: BatchMaker,
        items: Sequence[Item],
        plan: Plan,
        parameters: npt.NDArray[np.float64],
        memory: npt.NDArray[Any] | Sequence[Any] | None,
        finish: Callable[[Any, int], Any] | None,
        substitute: Callable[[int, int], Item | None] | None,
    ) -> None:
        super().__init__(maker, items, plan, parameters, memory, finish, substitute)
        self._image_plan = plan
        self._numbers: Sequence[int] = ()  # the samples that are left to Python
        self._batch: Any = None
        self._arriving: Arriving | None = None
        self._at_hand: dict[int, Any] = {}  # the files of samples that are left to Python, by sample index
        self._files: dict[int, Any] = {}  # encoded files, or errors of fetching them, by sample number
        self._kept: KeptBatch | None = None
        self._then: Then | None = None
        self._statuses = np.zeros((len(items), 8), np.uint8)

    def begin_natively(
        self, described: Described, pool: ThreadPool | None, channel: Any, threads: int
    ) -> None:
        """Start to make the batch in ``threads`` threads of ``channel``, a ``native.Channel``.

        Threads of ``pool`` make the samples that the engine leaves to Python.  If ``pool`` is None, the
        calling thread makes the whole batch before this method returns.
        """
        self._file_info, self._kept, self._arriving = described.info, described.kept, described.arriving
        self._then = described.then
        away = self._away()
        if pool is None:
            for number in away:
                self._fetch(number)
            self._batch = self._described(described)
            native.run_here(self._batch)
            self._look()
            self.jobs = [Job(self._make_left, len(self._numbers))]
            self.jobs[0].run_here()
            return
        rest = Job(self._make_left, 1)

        def go_on() -> None:
            try:
                self._look()
                rest.expect(len(self._numbers))
                if self._numbers:
                    pool.go_on_with(rest)
            except BaseException as error:
                rest.cancel(error)
                raise

        def begin() -> None:
            try:
                self._batch = self._described(described)
                self.jobs.append(NativeJob(self._batch, channel, threads, go_on))
            except BaseException as error:
                rest.cancel(error)
                raise

        # ``wait`` waits for the last job to begin. At that time no other thread has work left.
        self.jobs = [rest]
        if away:
            self.jobs.append(pool.submit(lambda place: self._fetch(away[place]), len(away), begin))
        else:
            begin()

    def _away(self) -> Sequence[int]:
        """Return the samples whose files must be fetched."""
        arriving, kept = self._arriving, self._kept
        if arriving is None:
            return ()
        if kept is None or arriving.states is None or not arriving.away:
            return arriving.away
        is_kept = kept.images.have(arriving.states)
        return [number for number in arriving.away if not is_kept[number]]

    def _fetch(self, number: int) -> None:
        """Fetch the file of a sample. An error is raised later, when Python makes the sample."""
        assert self._arriving is not None
        if self.note is not None:
            self.note(self.items[number].path)
        start = perf_counter_ns()
        try:
            self._files[number] = self._arriving.fetch(number)
        except Exception as error:  # the error's traceback refers to this batch
            self._files[number] = error.with_traceback(None)
        self._maker.clock.add("read", perf_counter_ns() - start)

    def _opened(
        self, item: Item, read: Callable[[str], Any] | None = None, found: Any = None
    ) -> WatchedImage:
        file = self._at_hand.pop(item.index, None)
        if isinstance(file, Exception):
            read = partial(_raise, file)
        elif isinstance(file, bytes):  # the file is not fetched again
            read = partial(self._maker.read, file=file)
        return super()._opened(item, read, found)

    def _described(self, described: Described) -> Any:
        count, paths, memory, plan = len(self.items), described.paths, self.memory, self._image_plan
        places, flat, size = np.zeros(count, np.int64), None, (0, 0)
        if memory is not None:
            assert plan.output is not None
            whole: Any = memory
            numbers = np.arange(count)
            if isinstance(whole, RowsOf):
                whole, numbers = whole.memory, whole.numbers
            flat = whole.reshape(-1).view(np.uint8)
            places = numbers * (flat.size // max(len(whole), 1))
            size = plan.output.shape[1:]
        kept, arriving, files = described.kept, described.arriving, self._files
        # The value is False if a file could not be fetched. Python then makes the sample.
        arrived = {n: not isinstance(file, Exception) and file for n, file in files.items()}
        inputs = [arrived.get(number) for number in range(count)] if files else None
        return native.image_batch(
            described.plan, paths.prefix, paths.arena, paths.starts, paths.ends, self._parameters, flat,
            places, size, plan.makes_images, self._statuses,
            inputs=inputs,
            kept=None if kept is None else kept.images, most_nbytes=0 if kept is None else kept.most_nbytes,
            states=None if arriving is None else arriving.states,
            then=None if described.then is None else described.then.batch,
        )  # fmt: skip

    def _look(self) -> None:
        """Find out which samples are left to Python after the engine has finished."""
        if self.when_seen is not None:
            images, pixels, coefficients = self._batch.seen
            self.when_seen(Sizes(images, 3 * pixels, coefficients))
        outcomes = self._statuses[:, 0]
        if (outcomes == PENDING).any():
            raise ClosedError("the interpreter ends before the batch is made")
        made = outcomes == MADE
        if self._then is not None:
            for number in np.flatnonzero(made).tolist():
                self.values[number] = self._then.value
        self._is_made, self._to_keep = made, set(self._batch.whole)
        left = ~made
        left[list(self._to_keep)] = True
        self._numbers = np.flatnonzero(left).tolist() if self._is_done_then else range(len(self.items))
        self._at_hand = {
            self.items[number].index: file for number, file in self._files.items() if not made[number]
        }
        self._files = {}
        clock = self._maker.clock
        for stage, nanoseconds in zip(("read", "decode", "transform"), self._batch.times, strict=True):
            clock.add(stage, nanoseconds)
        if self._is_done_then and not self._to_keep:
            self._batch = None

    @property
    def _is_done_then(self) -> bool:
        """True if the engine writes samples to their final memory, so that Python need not finish them."""
        return self._then is not None or (self.memory is not None and self._finish is None)

    def _make_left(self, place: int) -> None:
        """Make or finish one of the samples that are left to Python."""
        number = self._numbers[place]
        if self.note is not None:
            self.note(self.items[number].path)
        if number in self._to_keep:
            self._keep(number)
        if not self._is_made[number]:
            self.make(number)
            return
        if self._is_done_then:
            return
        try:
            memory, height, width = self._batch.take_image(number)
            value = self._image_plan.finished(
                memory, (height, width), self._parameters[number], lambda: self._info(number)
            )
            self.values[number] = self._finish(value, number) if self._finish else value
        except BaseException as error:  # ``wait`` raises the error if this sample is the first that failed
            say_where(error, self.items[number])
            self._errors[number] = error

    def _keep(self, number: int) -> None:
        """Store the whole image of a sample, or its coefficients, in the cache."""
        assert self._kept is not None
        digest, state, pixels, count = self._batch.take_whole(number)
        file = FileIdentity(digest, state, self.items[number].path, True)
        self._kept.keep(file, pixels, count, self._kept.rules)

    def _info(self, number: int) -> dict[Any, Any]:
        """Return Pillow's ``info`` for a sample's file."""
        return self._file_info(self._batch.take_file(number), self.items[number].path)


def _raise(error: Exception, path: str) -> None:
    """Raise the error of fetching a file at the point where the file would be read."""
    raise error
