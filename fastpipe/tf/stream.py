"""The engine ``"threads"``: batches of rows of images, made ahead by threads of this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.bad_samples import BadSampleLog, why_nothing_is_left
from fastpipe.core.batches import said_of
from fastpipe.core.clock import StageClock
from fastpipe.core.keys import another_of_its_class, sample_seed
from fastpipe.core.machine import default_threads
from fastpipe.core.native import native
from fastpipe.core.order import epoch_order
from fastpipe.core.pool import ThreadPool
from fastpipe.core.slots import SlotPool
from fastpipe.images.dali import make_batch_decoder
from fastpipe.options import Cache, Decode
from fastpipe.tf.form import Form
from fastpipe.tf.kept import open_kept
from fastpipe.tf.making import ColumnMaker, PendingRows, RowItem
from fastpipe.tf.pixels import maker_of
from fastpipe.tf.rows import Rows
from fastpipe.tf.streaming import IN_FLIGHT, Batching, Begun, Made, Stream

__all__ = ["Making", "RowStream"]

Array = npt.NDArray[Any]


class Making(NamedTuple):
    """How images are made.

    Attributes:
        output: their type, ``"float32"``, ``"uint8"`` or ``"float16"``.
        cache, decode, threads: of ``image_dataset``.
    """

    output: Literal["float32", "uint8", "float16"]
    cache: Cache
    decode: Decode
    threads: int | Literal["auto"]


class RowStream(Stream):
    """Makes the batches of rows of images.

    Args:
        rows: all samples.
        batching: how they become batches.
        making: how their images are made.
        form: of the elements.
    """

    def __init__(self, rows: Rows, batching: Batching, making: Making, form: Form) -> None:
        super().__init__(batching)
        self.rows, self._making, self._form = rows, making, form
        self._clock = StageClock()
        self._runtime: _Runtime | None = None

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.rows)

    @property
    def clock(self) -> StageClock:
        """Time spent in this process, by stage, summed over the threads."""
        return self._clock

    @property
    def runtime(self) -> _Runtime:
        """What makes rows in this process."""
        with self._lock:
            if self._runtime is None or self._runtime.pid != os.getpid():
                self._runtime = _Runtime(self.rows, self.batching, self._making, self._clock)
            return self._runtime

    @property
    def has_code(self) -> bool:
        """Return whether a function of the script's may be called in one thread only."""
        return any(one.preprocess is not None and not one.thread_safe for one in self.rows.columns)

    def element(self, made: Made) -> Any:
        """A batch in the form that the dataset's elements have."""
        rows, form = self.rows, self._form
        images = [form.laid_out(image) for image in made.arrays]
        tabular = {name: values[made.samples] for name, values in rows.tabular.items()}
        return form.element(images, tabular, None if rows.labels is None else rows.labels[made.samples])

    def signature(self, batch: int | None) -> Any:
        """The type of such elements of ``batch`` samples; None for any number."""
        return self._form.signature(self.rows, batch)

    def describe(self) -> list[str]:
        """Who decodes, and what is kept, in lines."""
        return self.runtime.describe()

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self.batching.shuffle:
            return epoch_order(self.count, seed=self.batching.seed, epoch=epoch)
        return np.arange(self.count)

    def _begin(self, samples: npt.NDArray[np.int64], draws: npt.NDArray[np.int64], epoch: int) -> Begun:
        return self.runtime.begin(samples, draws, epoch)


class _Runtime:
    """Threads, decoders, memory and the cache of one stream in one process."""

    def __init__(self, rows: Rows, batching: Batching, making: Making, clock: StageClock) -> None:
        self.pid = os.getpid()
        self._rows, self._seed, self._output = rows, batching.seed, making.output
        self._policy = batching.bad_samples.policy
        self.threads = default_threads() if making.threads == "auto" else making.threads
        self.pool = ThreadPool(self.threads, "fastpipe-decode")
        self._bad = BadSampleLog(batching.bad_samples)
        pixels = [maker_of(column.spec, making.decode) for column in rows.columns]
        # Columns are all Pillow's or all TensorFlow's: one decoder is enough.
        dct = next((one.dct for one in pixels if one.dct is not None), None)
        self.decoder = None if dct is None else make_batch_decoder(making.decode.backend, self.threads, dct)
        kept = open_kept(making.cache, rows.columns, pixels)
        self.makers = [
            ColumnMaker(column, one, kept[n] if kept else None, making.output, clock)
            for n, (column, one) in enumerate(zip(rows.columns, pixels, strict=True))
        ]
        self._slots = [SlotPool(IN_FLIGHT) for _ in rows.columns]
        self._channel = native.Channel(self.threads)

    def begin(self, chosen: npt.NDArray[np.int64], draws: npt.NDArray[np.int64], epoch: int) -> Begun:
        """Begin a batch of these rows."""
        rows = chosen.tolist()
        arrays = [
            slots.take((len(rows), maker.column.spec.elements), maker.word)
            for slots, maker in zip(self._slots, self.makers, strict=True)
        ]
        seeds = [sample_seed(self._seed, epoch, draw) for draw in draws.tolist()]
        items = [self._item(row, seed) for row, seed in zip(rows, seeds, strict=True)]

        def substitute(number: int, attempt: int) -> RowItem | None:
            item, classes = items[number], self._rows.classes
            if classes is None:
                classes = np.zeros(len(self._rows), np.int64)
            other = another_of_its_class(classes, item.target or 0, item.position, item.seed, attempt)
            return None if other is None else self._item(other, item.seed)

        pending = PendingRows(
            items, self.makers, arrays, self._policy, self._bad,
            substitute if self._policy == "replace" else None,
        )  # fmt: skip
        if self.decoder is None:
            pending.begin_natively(self.pool, self._channel)
        else:
            pending.begin(self.pool, self.decoder)
        return _Making(self, pending, arrays, draws, epoch)

    def describe(self) -> list[str]:
        """Who decodes, and what is kept, in lines."""
        lines = [f"threads  →  {self.threads}"]
        if self.decoder is not None:
            lines.append(said_of(self.decoder))
        lines += sorted({maker.describe() for maker in self.makers})
        kept = next((maker.kept for maker in self.makers if maker.kept is not None), None)
        if kept is not None:
            where = "memory" if kept.store.is_in_memory else "files"
            lines.append(f"samples  →  kept in {where}, up to {kept.store.max_bytes / 1e9:.1f} GB")
        return lines

    def _item(self, row: int, seed: int) -> RowItem:
        rows = self._rows
        column = rows.columns[0]
        target = None if rows.classes is None else int(rows.classes[row])
        return RowItem(int(rows.numbers[row]), column.paths[row], target, column.name, row, seed)

    def shaped(self, arrays: Sequence[Array]) -> list[Array]:
        """Images in the shape and type that the stream has."""
        made = []
        for array, maker in zip(arrays, self.makers, strict=True):
            spec = maker.column.spec
            array = array.reshape(len(array), *spec.size, spec.channels)
            made.append(array.astype(np.float16) if self._output == "float16" else array)
        return made


class _Making:
    """A batch whose rows are made one by one."""

    def __init__(
        self, runtime: _Runtime, pending: PendingRows, arrays: list[Array], draws: npt.NDArray[np.int64],
        epoch: int,
    ) -> None:  # fmt: skip
        self._runtime, self._pending, self._arrays = runtime, pending, arrays
        self._draws, self._epoch = draws, epoch

    def finish(self) -> Made:
        """Wait for it."""
        pending = self._pending
        there = pending.finish()
        if not there and (error := why_nothing_is_left(pending.left_out, len(pending.items))):
            raise error
        rows = np.array([pending.made[number].position for number in there], np.int64)
        arrays = self._arrays if len(there) == len(pending.items) else [one[there] for one in self._arrays]
        return Made(self._runtime.shaped(arrays), rows, self._draws[there], self._epoch)

    def cancel(self) -> None:
        """Give it up."""
        self._pending.cancel()
