"""Rows of images, made by threads into the memory of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._nvtx import ranged
from fastpipe.engine.bad import BadSampleLog, Item
from fastpipe.engine.batches import PendingSamples, UnreadableError, judged, say_where
from fastpipe.engine.clock import StageClock
from fastpipe.read.files import read_file
from fastpipe.tf.kept import KeptColumn
from fastpipe.tf.pixels import SampleMaker
from fastpipe.tf.preprocessing import Preprocessing
from fastpipe.tf.rows import Column
from fastpipe.transform.sample_kernels import scale_bytes
from fastpipe.types import UInt8Array

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


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.bytes: UInt8Array = np.empty(0, np.uint8)

    def of(self, size: int) -> UInt8Array:
        if self.bytes.size < size:
            self.bytes = np.empty(size, np.uint8)
        return self.bytes[:size]


_scratch = _Scratch()


class ColumnMaker:
    """Makes the samples of one column, in the form that batches have them.

    Args:
        column: of the table.
        pixels: makes its pixels.
        kept: keeps them, or None.
        word: NumPy type of what is made here: uint8 or float32.
        clock: to which times are added.
    """

    def __init__(
        self, column: Column, pixels: SampleMaker, kept: KeptColumn | None, word: Any, clock: StageClock
    ) -> None:
        self.column, self.kept, self.word = column, kept, word
        self._pixels, self._clock = pixels, clock
        scale, offset = column.rescale or (1.0, 0.0)
        self.scale, self.offset = np.float32(scale), np.float32(offset)
        self._preprocessing: Preprocessing | None = None
        if column.preprocess is not None:
            self._preprocessing = Preprocessing(column.preprocess, column.name, column.spec)
        # Whether the samples of a whole batch may be taken from where they are kept at once.
        self.gathers = column.preprocess is None and pixels.word == np.uint8 and word == np.float32

    def describe(self) -> str:
        """Who decodes, in one line."""
        return self._pixels.describe()

    @ranged("sample")
    def make(self, item: RowItem, out: Array) -> UInt8Array | None:
        """Make one sample, from what is kept or from its file.

        Args:
            item: its row.
            out: ``word`` (H * W * C,), which is written.

        Returns:
            None; or what the script's code is to be given by ``finish``, uint8 (h, w, C).

        Raises:
            UnreadableError: the file is bad.
            Exception: what the script's code raised.
        """
        start = perf_counter_ns()
        try:
            sample, read = self._sample(item, out)
        except Exception as error:
            where = Item(item.index, self.column.paths[item.position], item.target, self.column.name)
            raise (UnreadableError(where) if isinstance(judged(error), UnreadableError) else error) from error
        decoded = perf_counter_ns()
        self._clock.add("read", read - start)
        self._clock.add("decode", decoded - read)
        if self._preprocessing is None:
            self._convert(sample.reshape(-1), out)
        elif not self.column.thread_safe:
            return sample.copy() if sample.base is not None else sample
        else:
            self.finish(item, sample, out)
        self._clock.add("transform", perf_counter_ns() - decoded)
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
        self._convert(resized, out)

    @ranged("decode")
    def _sample(self, item: RowItem, out: Array) -> tuple[Array, int]:
        """The sample before it is scaled, or what the script's code is given; and when its file was read."""
        kept, row = self.kept, item.position
        identity = None if kept is None else kept.identify(row)
        entry = kept.find(identity) if kept is not None and identity is not None else None
        if kept is not None and entry is not None:
            found = kept.store.read(entry, 0, entry.shape[0])
            return found if self._preprocessing else found.reshape(-1).view(
                self._pixels.word
            ), perf_counter_ns()
        path = self.column.paths[row]
        blob = read_file(path)
        read = perf_counter_ns()
        image = self._pixels.open(blob, path)
        spec, boxes = self.column.spec, self.column.boxes
        box = None if boxes is None else boxes.of(row, image.size, spec.outside)
        if self._preprocessing is not None:
            made = self._pixels.cut(image, box)
            whole = np.ascontiguousarray(made)
        else:
            # Straight into the batch, where nothing is done afterwards.
            nbytes = spec.elements * np.dtype(self._pixels.word).itemsize
            same = self._pixels.word == self.word
            made = out if same else _scratch.of(nbytes).view(self._pixels.word)
            self._pixels.make(image, box, made)
            whole = made.view(np.uint8).reshape(*spec.size, -1)
        if kept is not None and identity is not None:
            kept.keep(identity, whole)
        return made, read

    @ranged("transform")
    def _convert(self, sample: Array, out: Array) -> None:
        """Numbers of a sample as a batch has them."""
        if out.dtype == np.uint8:
            out[:] = sample if sample.dtype == np.uint8 else np.clip(np.rint(sample), 0, 255)
        elif sample.dtype == np.uint8:
            scale_bytes(sample, self.scale, self.offset, out)
        elif self.column.rescale is None:
            out[:] = sample
        else:
            np.multiply(sample, self.scale, out=out)
            out += self.offset


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

    def _make_from(self, number: int, item: Item) -> None:
        assert isinstance(item, RowItem)
        for place, maker in enumerate(self._makers):
            left = maker.make(item, self._arrays[place][number])
            if left is not None:
                self._left[number, place] = left
        self.made[number] = item
