"""Rows of images, made by threads into the memory of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.bad_samples import BadSampleLog, Item
from fastpipe.core.batches import PendingSamples, UnreadableError, judged, say_where
from fastpipe.core.cache_store import Entry
from fastpipe.core.clock import StageClock, ranged
from fastpipe.core.file_identity import FileIdentity
from fastpipe.core.files import read_file
from fastpipe.core.native import native
from fastpipe.core.pool import Job, NativeJob, ThreadPool
from fastpipe.core.sample_tables import packed_paths
from fastpipe.core.types import Box, PartlyDecoded, UInt8Array
from fastpipe.errors import ClosedError
from fastpipe.images.batch import MADE, PENDING
from fastpipe.tf.kept import KeptColumn
from fastpipe.tf.pixels import SampleMaker, Scaling
from fastpipe.tf.preprocessing import Preprocessing
from fastpipe.tf.rows import Column

__all__ = ["ColumnMaker", "PendingRows", "RowItem"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RowItem(Item):
    """A row.

    Attributes:
        position: among the dataset's rows; ``index`` is its number in the script's table.
        seed: of its random numbers in this epoch.
    """

    position: int = -1
    seed: int = 0


class _Opened(NamedTuple):
    """What there is of a sample before it is made.

    Attributes:
        identity: by which it is kept; None where nothing is.
        entry: where it is kept; None where it is not.
        image: else, from its file; None where it is kept.
        box: the part of the image that is used; None for all of it.
    """

    identity: FileIdentity | None
    entry: Entry | None
    image: Any = None
    box: Box | None = None


class ColumnMaker:
    """Makes the samples of one column, in the form that batches have them.

    Args:
        column: of the table.
        pixels: makes its pixels.
        kept: keeps them, or None.
        output: the type of the dataset's images.
        clock: to which times are added.

    Attributes:
        word: NumPy type of what is made here: uint8 or float32.
    """

    def __init__(
        self, column: Column, pixels: SampleMaker, kept: KeptColumn | None, output: str, clock: StageClock
    ) -> None:
        self.word = word = np.uint8 if output == "uint8" else np.float32
        self.column, self.kept, self.clock = column, kept, clock
        self._pixels = pixels
        factor, offset = column.rescale or (None, 0.0)
        self._scaling = Scaling(pixels.word, word, factor, offset)
        self._preprocessing: Preprocessing | None = None
        if column.preprocess is not None:
            self._preprocessing = Preprocessing(column.preprocess, column.name, column.spec, np.dtype(output))
        self._paths = packed_paths(column.paths)
        self._native: tuple[Any, Any] | None = None

    def describe(self) -> str:
        """Who decodes, in one line."""
        return self._pixels.describe()

    def native_plan(self) -> Any:
        """What the native core is told of this column, a ``native.ImagePlan``; None where Python makes it."""
        if self._preprocessing is not None:
            return None
        reader = self._pixels.reader
        state = reader.most_pixels, reader.is_native  # which a script may change at any time
        if self._native is None or self._native[0] != state:
            plan = self._pixels.native(self.column.boxes, self._scaling, self.kept is not None)
            self._native = state, plan
        return self._native[1]

    def begin_natively(self, plan: Any, rows: npt.NDArray[np.int64], out: Array, statuses: UInt8Array) -> Any:
        """What the native core makes of some rows: a ``native.ImageBatch``.

        Args:
            plan: what ``native_plan`` gave.
            rows: int64 (N,).
            out: ``word`` (N, H * W * C).
            statuses: uint8 (N, 8), written.
        """
        boxes, paths, count = self.column.boxes, self._paths, len(rows)
        edges = np.empty((count, 0)) if boxes is None else boxes.edges[rows]
        images, most = (None, 0) if self.kept is None else self.kept.begin_batch()
        return native.image_batch(
            plan, paths.prefix, paths.arena, paths.starts[rows], paths.ends[rows], edges,
            out.reshape(-1).view(np.uint8), np.arange(count) * out[0].nbytes, self.column.spec.size, False,
            statuses, inputs=None, kept=images, most_nbytes=most,
        )  # fmt: skip

    def keep(self, item: RowItem, whole: tuple[bytes, bytes, UInt8Array, int]) -> None:
        """Keep what the native core made of a row."""
        assert self.kept is not None
        digest, state, sample, pixels = whole
        identity = FileIdentity(digest, state, self.column.paths[item.position], True)
        self.kept.keep(identity, sample, pixels)

    @ranged("decode")
    def open(self, item: RowItem) -> _Opened:
        """Find the sample of a row where it is kept, or read and open its file."""
        start = perf_counter_ns()
        kept, row = self.kept, item.position
        identity = None if kept is None else kept.identify(row)
        entry = kept.find(identity) if kept is not None and identity is not None else None
        if entry is not None:
            self.clock.add("read", perf_counter_ns() - start)
            return _Opened(identity, entry)
        path, spec, boxes = self.column.paths[row], self.column.spec, self.column.boxes
        blob = read_file(path)
        read = perf_counter_ns()
        image = self._pixels.open(blob, path)
        box = None if boxes is None else boxes.of(row, image.size, spec.outside)
        self.clock.add("read", read - start)
        self.clock.add("decode", perf_counter_ns() - read)
        return _Opened(identity, None, image, box)

    def asked(self, opened: _Opened) -> list[tuple[PartlyDecoded, Box]]:
        """What ``open`` returned, for a decoder of batches; nothing where that has nothing to do."""
        image, box = opened.image, opened.box
        if image is None:
            return []
        part = self._pixels.part(image, box, is_cut=self._preprocessing is not None)
        return [] if part is None else [(image, part)]

    @ranged("sample")
    def make(self, item: RowItem, out: Array, opened: _Opened | None = None) -> UInt8Array | None:
        """Make one sample, from what is kept or from its file.

        Args:
            item: its row.
            out: ``word`` (H * W * C,), which is written.
            opened: what ``open`` returned, where that was called before.

        Returns:
            None; or what the script's code is to be given by ``finish``, uint8 (h, w, C).

        Raises:
            UnreadableError: the file is bad.
            Exception: what the script's code raised.
        """
        try:
            sample = self._sample(opened or self.open(item))
        except Exception as error:
            where = Item(item.index, self.column.paths[item.position], item.target, self.column.name)
            raise (UnreadableError(where) if isinstance(judged(error), UnreadableError) else error) from error
        decoded = perf_counter_ns()
        if self._preprocessing is None:
            self._scaling.apply(sample.reshape(-1), out)
        elif not self.column.thread_safe:
            return sample.copy() if sample.base is not None else sample
        else:
            self.finish(item, sample, out)
        self.clock.add("transform", perf_counter_ns() - decoded)
        return None

    @ranged("transform")
    def finish(self, item: RowItem, sample: UInt8Array, out: Array) -> None:
        """Run the script's code on what ``make`` returned, and write the sample.

        Args:
            item, out: as of ``make``.
            sample: what it returned.
        """
        assert self._preprocessing is not None
        value = self._preprocessing.run(sample, item)
        if value.dtype != np.uint8:
            out[:] = value.reshape(-1)
            return
        resized = np.empty(self.column.spec.elements, self._pixels.word)
        self._pixels.resize(value, resized)
        self._scaling.apply(resized, out)

    @ranged("decode")
    def _sample(self, opened: _Opened) -> Array:
        """The sample before it is scaled, or what the script's code is given."""
        start, kept, spec = perf_counter_ns(), self.kept, self.column.spec
        identity, entry, image, box = opened
        if kept is not None and entry is not None:
            found = kept.store.read(entry, 0, entry.shape[0])
            self.clock.add("read", perf_counter_ns() - start)
            return found if self._preprocessing else found.reshape(-1).view(self._pixels.word)
        if self._preprocessing is not None:
            made = self._pixels.cut(image, box)
            whole = np.ascontiguousarray(made)
        else:
            made = np.empty(spec.elements, self._pixels.word)
            self._pixels.make(image, box, made)
            whole = made.view(np.uint8).reshape(*spec.size, -1)
        if kept is not None and identity is not None:
            kept.keep(identity, whole, image.size.height * image.size.width)
        self.clock.add("decode", perf_counter_ns() - start)
        return made


class PendingRows(PendingSamples):
    """Rows that are being made.

    Args:
        items: the rows.
        makers: of their columns.
        arrays: memory for each column, (N, H * W * C).
        policy, bad, substitute: as of ``PendingSamples``.
    """

    def __init__(
        self,
        items: Sequence[RowItem],
        makers: Sequence[ColumnMaker],
        arrays: Sequence[Array],
        policy: str,
        bad: BadSampleLog,
        substitute: Callable[[int, int], Item | None] | None,
    ) -> None:
        super().__init__(items, policy, bad, substitute)
        self.made: list[RowItem] = list(items)  # which rows are there, after those that were replaced
        self._makers, self._arrays = makers, arrays
        self._left: dict[tuple[int, int], UInt8Array] = {}
        # By columns that the native core makes: its batches, the rows it has made, those that are to be kept.
        self._batches: dict[int, Any] = {}
        self._is_made: dict[int, npt.NDArray[np.bool_]] = {}
        self._whole: dict[int, set[int]] = {}
        self._rows_left: list[int] = []

    def finish(self) -> list[int]:
        """Wait, and run what the script's code has to do in this thread, in order.

        Returns:
            The numbers of the rows that are there.

        Raises:
            as of ``wait``, and what that code raised.
        """
        there = self.wait()
        for number in there:
            for place, maker in enumerate(self._makers):
                sample = self._left.pop((number, place), None)
                if sample is None:
                    continue
                try:
                    maker.finish(self.made[number], sample, self._arrays[place][number])
                except Exception as error:
                    say_where(error, self.made[number])
                    raise
        return there

    def begin_natively(self, pool: ThreadPool, channel: Any) -> None:
        """Make them: by the native core, and what that leaves by Python.

        Args:
            pool: threads for what is left.
            channel: a ``native.Channel`` for as many threads of the core's.
        """
        plans = {place: plan for place, maker in enumerate(self._makers) if (plan := maker.native_plan())}
        if not plans:
            self.begin(pool)
            return
        rows = np.array([item.position for item in self.items if isinstance(item, RowItem)], np.int64)
        statuses = {place: np.zeros((len(rows), 8), np.uint8) for place in plans}
        self._batches = {
            place: self._makers[place].begin_natively(plan, rows, self._arrays[place], statuses[place])
            for place, plan in plans.items()
        }
        rest = Job(self._make_left, 1)
        unfinished = len(plans)

        def look() -> None:
            nonlocal unfinished
            unfinished -= 1
            if unfinished:
                return
            try:
                rest.expect(self._look(statuses))
                if self._rows_left:
                    pool.go_on_with(rest)
            except BaseException as error:
                rest.cancel(error)
                raise

        # The last one's beginning is waited for: then threads have nothing to do.
        self.jobs = [rest]
        try:
            for batch in self._batches.values():
                self.jobs.append(NativeJob(batch, channel, pool.threads, look))
        except BaseException as error:
            for job in self.jobs:
                job.cancel(error)
            raise

    def _look(self, statuses: Mapping[int, UInt8Array]) -> int:
        """Find out how many rows are left to be done, when the native core has done its part."""
        left = np.zeros(len(self.items), np.bool_)
        for place, batch in self._batches.items():
            outcomes = statuses[place][:, 0]
            if (outcomes == PENDING).any():
                raise ClosedError("the interpreter ends before the batch is made")
            self._is_made[place] = outcomes == MADE
            self._whole[place] = set(batch.whole)
            left |= ~self._is_made[place]
            left[list(self._whole[place])] = True
            clock = self._makers[place].clock
            for stage, nanoseconds in zip(("read", "decode", "transform"), batch.times, strict=True):
                clock.add(stage, nanoseconds)
        if len(self._batches) < len(self._makers):
            left[:] = True
        self._rows_left = np.flatnonzero(left).tolist()
        if not self._rows_left:
            self._batches = {}
        return len(self._rows_left)

    def _make_left(self, place: int) -> None:
        """Make, or keep, what is left of a row."""
        number = self._rows_left[place]
        for column, numbers in self._whole.items():
            if number in numbers:
                item = self.items[number]
                assert isinstance(item, RowItem)
                self._makers[column].keep(item, self._batches[column].take_whole(number))
        self.make(number)

    def _asked(self, number: int) -> list[tuple[PartlyDecoded, Box]]:
        item = self.items[number]
        assert isinstance(item, RowItem)
        opened = [maker.open(item) for maker in self._makers]
        self._open[number] = opened
        return [part for maker, one in zip(self._makers, opened, strict=True) for part in maker.asked(one)]

    def _decoding(self, nanoseconds: int) -> None:
        self._makers[0].clock.add("decode", nanoseconds)

    def _make_from(self, number: int, item: Item) -> None:
        assert isinstance(item, RowItem)
        opened = self._opened_before(number, item) or [None] * len(self._makers)
        is_own = item is self.items[number]  # not another in its place
        for place, maker in enumerate(self._makers):
            if is_own and place in self._is_made and self._is_made[place][number]:
                continue
            left = maker.make(item, self._arrays[place][number], opened[place])
            if left is not None:
                self._left[number, place] = left
        self.made[number] = item
