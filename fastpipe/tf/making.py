"""Rows of images, made by threads into the memory of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._nvtx import ranged
from fastpipe.cache.entries import Entry
from fastpipe.cache.identity import FileIdentity
from fastpipe.core.files import read_file
from fastpipe.engine.bad import BadSampleLog, Item
from fastpipe.engine.batches import PendingSamples, say_where
from fastpipe.engine.clock import StageClock
from fastpipe.engine.watched import UnreadableError, judged
from fastpipe.protocols import PartlyDecoded
from fastpipe.tf.kept import KeptColumn
from fastpipe.tf.pixels import SampleMaker
from fastpipe.tf.preprocessing import Preprocessing
from fastpipe.tf.rows import Column
from fastpipe.tf.sample_kernels import scale_bytes
from fastpipe.types import Box, UInt8Array

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
        scale, offset = column.rescale or (1.0, 0.0)
        self.scale, self.offset = np.float32(scale), np.float32(offset)
        self._preprocessing: Preprocessing | None = None
        if column.preprocess is not None:
            self._preprocessing = Preprocessing(column.preprocess, column.name, column.spec, np.dtype(output))
        # Whether the samples of a whole batch may be taken from where they are kept at once.
        self.gathers = column.preprocess is None and pixels.word == np.uint8 and word == np.float32

    def describe(self) -> str:
        """Who decodes, in one line."""
        return self._pixels.describe()

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
            sample = self._sample(opened or self.open(item), out)
        except Exception as error:
            where = Item(item.index, self.column.paths[item.position], item.target, self.column.name)
            raise (UnreadableError(where) if isinstance(judged(error), UnreadableError) else error) from error
        decoded = perf_counter_ns()
        if self._preprocessing is None:
            self._convert(sample.reshape(-1), out)
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
        self._convert(resized, out)

    @ranged("decode")
    def _sample(self, opened: _Opened, out: Array) -> Array:
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
            # Straight into the batch, where nothing is done afterwards.
            nbytes = spec.elements * np.dtype(self._pixels.word).itemsize
            same = self._pixels.word == self.word
            made = out if same else _scratch.of(nbytes).view(self._pixels.word)
            self._pixels.make(image, box, made)
            whole = made.view(np.uint8).reshape(*spec.size, -1)
        if kept is not None and identity is not None:
            kept.keep(identity, whole, image.size)
        self.clock.add("decode", perf_counter_ns() - start)
        return made

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
        for place, maker in enumerate(self._makers):
            left = maker.make(item, self._arrays[place][number], opened[place])
            if left is not None:
                self._left[number, place] = left
        self.made[number] = item
