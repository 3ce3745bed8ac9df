"""The engine ``"threads"``: batches of rows, made ahead by threads of this process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._cpus import default_threads
from fastpipe._replacing import another_of_its_class
from fastpipe.engine.bad import BadSampleLog, why_nothing_is_left
from fastpipe.engine.clock import StageClock
from fastpipe.engine.pool import Job, ThreadPool
from fastpipe.engine.slots import SlotPool
from fastpipe.index.order import epoch_order
from fastpipe.index.shards import ShardedBatches
from fastpipe.options import BadSamples, Cache, Decode, Shard
from fastpipe.tf.kept import open_kept
from fastpipe.tf.making import ColumnMaker, PendingRows, RowItem
from fastpipe.tf.pixels import maker_of
from fastpipe.tf.rows import Rows
from fastpipe.transform.keys import sample_seed
from fastpipe.transform.sample_kernels import gather_scaled

__all__ = ["Made", "RowStream", "StreamOptions"]

Array = npt.NDArray[Any]

_AHEAD = 2  # batches begun before the one that is due is waited for
_IN_FLIGHT = 6  # batches in the hands of tf.data and the training step, whose memory is kept for the next


class StreamOptions(NamedTuple):
    """How rows become batches.

    Attributes:
        batch_size: rows in one.
        drop_remainder: leave out the last batch, if it is smaller.
        shuffle: whether each epoch has an order of its own.
        seed: of those orders.
        shard: the part of each epoch that is made here; None for all.
        output: of images, ``"float32"``, ``"uint8"`` or ``"float16"``.
        cache, bad_samples, decode, threads: of ``image_dataset``.
    """

    batch_size: int
    drop_remainder: bool
    shuffle: bool
    seed: int
    shard: Shard | None
    output: Literal["float32", "uint8", "float16"]
    cache: Cache
    bad_samples: BadSamples
    decode: Decode
    threads: int | Literal["auto"]


class Made(NamedTuple):
    """A batch.

    Attributes:
        images: (n, H, W, C) of each column.
        rows: int64 (n,): which rows they are.
        draws: int64 (n,): their positions in the epoch's order.
        epoch: its number.
    """

    images: list[Array]
    rows: npt.NDArray[np.int64]
    draws: npt.NDArray[np.int64]
    epoch: int


class RowStream:
    """Makes the batches of epochs.

    Args:
        rows: all samples.
        options: how they become batches.
    """

    def __init__(self, rows: Rows, options: StreamOptions) -> None:
        self.rows, self.options = rows, options
        self.clock = StageClock()
        self._next_epoch = 0
        self._runtime: _Runtime | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._steps())

    @property
    def samples(self) -> int:
        """Rows of an epoch."""
        return sum(step.size for step in self._steps())

    @property
    def runtime(self) -> _Runtime:
        """What makes rows in this process."""
        with self._lock:
            if self._runtime is None or self._runtime.pid != os.getpid():
                self._runtime = _Runtime(self.rows, self.options, self.clock)
            return self._runtime

    def set_epoch(self, epoch: int) -> None:
        """The number of the next epoch that is begun."""
        self._next_epoch = epoch

    def next_epoch(self) -> Iterator[Made]:
        """The batches of the next epoch."""
        with self._lock:
            epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        made = self._batches(epoch)
        return _refilled(made, self.options) if self.options.bad_samples.policy == "skip" else made

    def _steps(self) -> ShardedBatches:
        options = self.options
        shard = options.shard or Shard(0, 1)
        return ShardedBatches(len(self.rows), options.batch_size, shard, drop_last=options.drop_remainder)

    def _batches(self, epoch: int) -> Iterator[Made]:
        count, runtime = len(self.rows), self.runtime
        order = np.arange(count)
        if self.options.shuffle:
            order = epoch_order(count, seed=self.options.seed, epoch=epoch)
        begun: deque[_Begun] = deque()
        try:
            for step in self._steps():
                positions = np.array(step.positions, np.int64)
                begun.append(runtime.begin(order[positions % count], positions, epoch))
                if len(begun) > _AHEAD:
                    yield begun.popleft().finish()
            while begun:
                yield begun.popleft().finish()
        finally:
            for batch in begun:
                batch.job.cancel()


class _Runtime:
    """Threads, decoders, memory and the cache of one stream in one process."""

    def __init__(self, rows: Rows, options: StreamOptions, clock: StageClock) -> None:
        self.pid = os.getpid()
        self._rows, self._options = rows, options
        self.threads = default_threads() if options.threads == "auto" else options.threads
        self.pool = ThreadPool(self.threads, "fastpipe-decode")
        self._bad = BadSampleLog(options.bad_samples)
        pixels = [maker_of(column.spec, options.decode) for column in rows.columns]
        kept = open_kept(options.cache, rows.columns, pixels)
        word = np.uint8 if options.output == "uint8" else np.float32
        self.makers = [
            ColumnMaker(column, one, kept[n] if kept else None, word, clock)
            for n, (column, one) in enumerate(zip(rows.columns, pixels, strict=True))
        ]
        self._slots = [SlotPool(_IN_FLIGHT) for _ in rows.columns]
        self.gathers = all(maker.gathers and maker.kept is not None for maker in self.makers)

    def begin(self, chosen: npt.NDArray[np.int64], draws: npt.NDArray[np.int64], epoch: int) -> _Begun:
        """Begin a batch of these rows."""
        rows = chosen.tolist()
        arrays = [
            slots.take((len(rows), maker.column.spec.elements), maker.word)
            for slots, maker in zip(self._slots, self.makers, strict=True)
        ]
        if self.gathers:
            places = [maker.kept.places(rows) for maker in self.makers if maker.kept is not None]
            if all(one is not None for one in places):
                return _Gathered(self, chosen, draws, epoch, arrays, places)  # type: ignore[arg-type]
        seeds = [sample_seed(self._options.seed, epoch, draw) for draw in draws.tolist()]
        items = [self._item(row, seed) for row, seed in zip(rows, seeds, strict=True)]

        def substitute(number: int, attempt: int) -> RowItem | None:
            item, classes = items[number], self._rows.classes
            if classes is None:
                classes = np.zeros(len(self._rows), np.int64)
            other = another_of_its_class(classes, item.target or 0, item.position, item.seed, attempt)
            return None if other is None else self._item(other, item.seed)

        policy = self._options.bad_samples.policy
        pending = PendingRows(
            items, self.makers, arrays, policy, self._bad, substitute if policy == "replace" else None
        )
        pending.begin(self.pool)
        return _Making(self, pending, arrays, draws, epoch)

    def describe(self) -> list[str]:
        """Who decodes, and what is kept, in lines."""
        lines = [f"threads  →  {self.threads}"]
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
            made.append(array.astype(np.float16) if self._options.output == "float16" else array)
        return made


class _Making:
    """A batch whose rows are made one by one."""

    def __init__(
        self, runtime: _Runtime, pending: PendingRows, arrays: list[Array], draws: npt.NDArray[np.int64],
        epoch: int,
    ) -> None:  # fmt: skip
        self._runtime, self._pending, self._arrays = runtime, pending, arrays
        self._draws, self._epoch = draws, epoch
        self.job = pending.job

    def finish(self) -> Made:
        """Wait for it."""
        pending = self._pending
        there = pending.finish()
        if not there and (error := why_nothing_is_left(pending.left_out, len(pending.items))):
            raise error
        rows = np.array([pending.made[number].position for number in there], np.int64)
        arrays = self._arrays if len(there) == len(pending.items) else [one[there] for one in self._arrays]
        return Made(self._runtime.shaped(arrays), rows, self._draws[there], self._epoch)


class _Gathered:
    """A batch whose samples are all kept: they are scaled from where they are."""

    def __init__(
        self, runtime: _Runtime, rows: npt.NDArray[np.int64], draws: npt.NDArray[np.int64], epoch: int,
        arrays: list[Array], places: list[npt.NDArray[np.int64]],
    ) -> None:  # fmt: skip
        self._runtime, self._rows, self._arrays, self._places = runtime, rows, arrays, places
        self._draws, self._epoch = draws, epoch
        self._parts = -(-runtime.threads // len(arrays))
        self.job: Job = runtime.pool.submit(self._gather, self._parts * len(arrays))

    def _gather(self, number: int) -> None:
        column, part = divmod(number, self._parts)
        maker = self._runtime.makers[column]
        assert maker.kept is not None
        count = len(self._rows)
        some = slice(part * count // self._parts, (part + 1) * count // self._parts)
        gather_scaled(
            maker.kept.store.mapped, self._places[column][some], maker.scale, maker.offset,
            self._arrays[column][some],
        )  # fmt: skip

    def finish(self) -> Made:
        """Wait for it."""
        self.job.wait()
        return Made(self._runtime.shaped(self._arrays), self._rows, self._draws, self._epoch)


_Begun = _Making | _Gathered


def _refilled(batches: Iterator[Made], options: StreamOptions) -> Iterator[Made]:
    """Batches that are full although rows are missing: with those that follow."""
    size = options.batch_size
    rest: Made | None = None
    for made in batches:
        if rest is None and len(made.rows) == size:
            yield made
            continue
        if rest is not None:
            made = Made(
                [np.concatenate(pair) for pair in zip(rest.images, made.images, strict=True)],
                np.concatenate([rest.rows, made.rows]),
                np.concatenate([rest.draws, made.draws]),
                made.epoch,
            )
        while len(made.rows) >= size:
            yield _cut(made, slice(size))
            made = _cut(made, slice(size, None))
        rest = made if len(made.rows) else None
    if rest is not None and not options.drop_remainder:
        yield rest


def _cut(made: Made, part: slice) -> Made:
    """Some rows of a batch."""
    return Made([images[part] for images in made.images], made.rows[part], made.draws[part], made.epoch)
