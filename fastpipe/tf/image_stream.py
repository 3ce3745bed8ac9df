"""The engine ``"threads"``: batches of rows of images, prefetched by threads of this process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.core.bad_samples import BadSampleLog, Item, why_nothing_is_left
from fastpipe.core.batches import PendingSamples, UnreadableError, judged, said_of, say_where
from fastpipe.core.cache_store import Entry, EntryStore
from fastpipe.core.caches import open_cache_store
from fastpipe.core.clock import StageClock, ranged
from fastpipe.core.file_identity import FileIdentity, identify, is_stale
from fastpipe.core.files import read_file
from fastpipe.core.keys import another_of_its_class, sample_seed
from fastpipe.core.machine import default_threads
from fastpipe.core.native import native
from fastpipe.core.order import epoch_order
from fastpipe.core.pool import Job, NativeJob, ThreadPool
from fastpipe.core.sample_tables import packed_paths
from fastpipe.core.slots import SlotPool
from fastpipe.core.types import Box, PartlyDecoded, UInt8Array
from fastpipe.errors import ClosedError
from fastpipe.images.batch import MADE, PENDING
from fastpipe.images.dali import make_batch_decoder
from fastpipe.options import Cache, Decode
from fastpipe.tf.pixels import PixelMaker, Preprocessing, Scaling, pixel_maker
from fastpipe.tf.rows import Column, Form, Rows
from fastpipe.tf.stream import IN_FLIGHT, Batch, Batching, PendingBatch, Stream

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]


class ImageOptions(NamedTuple):
    """The arguments of ``image_dataset`` that determine how images are made."""

    output: Literal["float32", "uint8", "float16"]
    cache: Cache
    decode: Decode
    threads: int | Literal["auto"]


class RowStream(Stream):
    """The batches of a dataset of images, which threads of this process make."""

    def __init__(self, rows: Rows, batching: Batching, options: ImageOptions, form: Form) -> None:
        super().__init__(batching)
        self._rows, self._options, self._form = rows, options, form
        self._clock = StageClock()
        self._current: _Runtime | None = None

    @property
    def count(self) -> int:
        return len(self._rows)

    @property
    def clock(self) -> StageClock:
        return self._clock

    @property
    def has_code(self) -> bool:
        return any(one.preprocess is not None and not one.thread_safe for one in self._rows.columns)

    def element(self, batch: Batch) -> Any:
        rows, form = self._rows, self._form
        images = [form.arrange(image) for image in batch.arrays]
        tabular = {name: values[batch.samples] for name, values in rows.tabular.items()}
        return form.element(images, tabular, None if rows.labels is None else rows.labels[batch.samples])

    def signature(self, batch_size: int | None) -> Any:
        return self._form.signature(self._rows, batch_size)

    def describe(self) -> list[str]:
        return self._runtime().describe()

    def _order(self, epoch: int) -> Int64Array:
        if self.batching.shuffle:
            return epoch_order(self.count, seed=self.batching.seed, epoch=epoch)
        return np.arange(self.count)

    def _begin(self, samples: Int64Array, draws: Int64Array, epoch: int) -> PendingBatch:
        return self._runtime().begin(samples, draws, epoch)

    def _runtime(self) -> _Runtime:
        with self._lock:
            if self._current is None or self._current.pid != os.getpid():
                self._current = _Runtime(self._rows, self.batching, self._options, self._clock)
            return self._current


class _Runtime:
    """The threads, decoders, memory and cache of one stream in one process."""

    def __init__(self, rows: Rows, batching: Batching, options: ImageOptions, clock: StageClock) -> None:
        self.pid = os.getpid()
        self._rows, self._seed, self._output = rows, batching.seed, options.output
        self._policy = batching.bad_samples.policy
        threads = default_threads() if options.threads == "auto" else options.threads
        self._pool = ThreadPool(threads, "fastpipe-decode")
        self._channel = native.Channel(threads)
        self._bad = BadSampleLog(batching.bad_samples)
        pixels = [pixel_maker(column.spec, options.decode) for column in rows.columns]
        # All columns use Pillow's pixels, or all columns use TensorFlow's pixels. So one decoder is enough.
        dct = next((one.dct for one in pixels if one.dct is not None), None)
        self._decoder = None if dct is None else make_batch_decoder(options.decode.backend, threads, dct)
        caches = _column_caches(options.cache, rows.columns, pixels)
        self._makers = [
            _ColumnMaker(column, one, caches[n] if caches else None, options.output, clock)
            for n, (column, one) in enumerate(zip(rows.columns, pixels, strict=True))
        ]
        self._slots = [SlotPool(IN_FLIGHT) for _ in rows.columns]

    def begin(self, samples: Int64Array, draws: Int64Array, epoch: int) -> PendingBatch:
        """Start to make a batch of these rows."""
        arrays = [
            slots.take((len(samples), maker.column.spec.elements), maker.word)
            for slots, maker in zip(self._slots, self._makers, strict=True)
        ]
        items = [
            self._item(row, sample_seed(self._seed, epoch, draw))
            for row, draw in zip(samples.tolist(), draws.tolist(), strict=True)
        ]

        def substitute(number: int, attempt: int) -> _RowItem | None:
            item, classes = items[number], self._rows.classes
            if classes is None:
                classes = np.zeros(len(self._rows), np.int64)
            other = another_of_its_class(classes, item.target or 0, item.position, item.seed, attempt)
            return None if other is None else self._item(other, item.seed)

        pending = _PendingRows(
            items, self._makers, arrays, self._policy, self._bad,
            substitute if self._policy == "replace" else None,
        )  # fmt: skip

        def finish() -> Batch:
            there = pending.finish()
            if not there and (error := why_nothing_is_left(pending.left_out, len(items))):
                raise error
            rows = np.array([pending.made[number].position for number in there], np.int64)
            made = arrays if len(there) == len(items) else [array[there] for array in arrays]
            return Batch(self._shaped(made), rows, draws[there], epoch)

        if self._decoder is None:
            pending.begin_natively(self._pool, self._channel)
        else:
            pending.begin(self._pool, self._decoder)
        return PendingBatch(finish, pending.cancel)

    def describe(self) -> list[str]:
        """Return lines that name the decoders and the cache."""
        lines = [f"threads  →  {self._pool.threads}"]
        if self._decoder is not None:
            lines.append(said_of(self._decoder))
        lines += sorted({maker.pixels.describe() for maker in self._makers})
        cache = self._makers[0].cache
        if cache is not None:
            where = "memory" if cache.store.is_in_memory else "files"
            lines.append(f"samples  →  kept in {where}, up to {cache.store.max_bytes / 1e9:.1f} GB")
        return lines

    def _item(self, row: int, seed: int) -> _RowItem:
        rows = self._rows
        column = rows.columns[0]
        target = None if rows.classes is None else int(rows.classes[row])
        return _RowItem(int(rows.numbers[row]), column.paths[row], target, column.name, row, seed)

    def _shaped(self, arrays: Sequence[Array]) -> list[Array]:
        """Return images in the dataset's shape and dtype."""
        made = []
        for array, maker in zip(arrays, self._makers, strict=True):
            spec = maker.column.spec
            array = array.reshape(len(array), *spec.size, spec.channels)
            made.append(array.astype(np.float16) if self._output == "float16" else array)
        return made


# ---- samples in the cache ------------------------------------------------------------------------


class _ColumnCache:
    """A cache of one column's samples.  Samples are stored before they are scaled, or, if the user gave
    ``preprocess``, before this function receives them.

    Other columns and datasets with the same images share the cache.
    """

    def __init__(self, store: EntryStore, column: Column, pixels: PixelMaker) -> None:
        self.store, self._column, self._reader = store, column, pixels.reader
        self._tag = f"{pixels.tag} {'cut' if column.preprocess else 'made'}"
        self._native: tuple[bytes, Any] | None = None
        self._tags: dict[
            tuple[str, int | None], bytes
        ] = {}  # one tag for each state of the reader's rules, which a script may change

    def identify(self, row: int) -> FileIdentity:
        """Return the identity of a row's sample: the state of its file, its box, and the reader's rules."""
        boxes, tag = self._column.boxes, self._current_tag()
        return identify(self._column.paths[row], tag if boxes is None else tag + boxes.edges[row].tobytes())

    def begin_batch(self) -> tuple[Any, int]:
        """Return a ``native.KeptImages`` that finds samples, and the size limit of a new sample in bytes (0
        if the cache is full)."""
        tag = self._current_tag()
        if self._native is None or self._native[0] != tag:
            self._native = tag, self.store.images(tag, marks=False)
        self.store.refreshed()
        return self._native[1], self.store.max_bytes if self.store.has_room(1) else 0

    def put(self, identity: FileIdentity, sample: UInt8Array, pixels: int) -> None:
        """Store a sample, uint8 (h, w, bytes per pixel), if there is room and if Pillow would not warn about
        the image's size."""
        if identity.is_settled and not self._reader.objects_to(pixels):
            note = b"" if self.store.is_in_memory else identity.note()
            self.store.put(identity.digest, sample, note=note)

    def _current_tag(self) -> bytes:
        rules = self._reader.rules(), self._reader.limit
        found = self._tags.get(rules)
        if found is None:
            found = self._tags[rules] = hashlib.sha256(f"{self._tag} {rules}".encode()).digest()
        return found


def _column_caches(
    option: Cache, columns: Sequence[Column], pixels: Sequence[PixelMaker]
) -> list[_ColumnCache] | None:
    """Return the caches that an option requests. ``"auto"`` means memory if all samples fit."""
    store = None if option.where == "off" else open_cache_store(option)
    if store is None:
        return None
    both = list(zip(columns, pixels, strict=True))
    if option.where == "auto":
        needed = sum(
            len(column.paths) * column.spec.elements * np.dtype(one.word).itemsize for column, one in both
        )
        if needed > store.max_bytes:
            return None
    return [_ColumnCache(store, column, one) for column, one in both]


# ---- samples of one column -----------------------------------------------------------------------


@dataclass(frozen=True)
class _RowItem(Item):
    """A row whose samples are made. ``index`` is the row's number in the user's table."""

    position: int = -1  # the row's position among the dataset's rows
    seed: int = 0  # the seed of the row's random numbers in this epoch


class _Opened(NamedTuple):
    """A sample before it is made: a cache entry, or an image and its box (None for the whole image)."""

    identity: FileIdentity | None
    entry: Entry | None
    image: Any = None
    box: Box | None = None


class _ColumnMaker:
    """Makes the samples of one column of images, in the NumPy dtype ``word``: uint8 or float32."""

    def __init__(
        self, column: Column, pixels: PixelMaker, cache: _ColumnCache | None, output: str, clock: StageClock
    ) -> None:
        self.column, self.pixels, self.cache, self.clock = column, pixels, cache, clock
        self.word = np.uint8 if output == "uint8" else np.float32
        factor, offset = column.rescale or (None, 0.0)
        self._scaling = Scaling(pixels.word, self.word, factor, offset)
        self._preprocessing: Preprocessing | None = None
        if column.preprocess is not None:
            self._preprocessing = Preprocessing(column.preprocess, column.name, column.spec, np.dtype(output))
        self._paths = packed_paths(column.paths)
        self._native: tuple[Any, Any] | None = None

    def native_plan(self) -> Any:
        """Return a ``native.ImagePlan`` of this column, or None if Python makes the column."""
        if self._preprocessing is not None:
            return None
        reader = self.pixels.reader
        state = reader.most_pixels, reader.is_native  # a script may change these at any time
        if self._native is None or self._native[0] != state:
            plan = self.pixels.native(self.column.boxes, self._scaling, self.cache is not None)
            self._native = state, plan
        return self._native[1]

    def begin_natively(self, plan: Any, rows: Int64Array, out: Array, statuses: UInt8Array) -> Any:
        """Return a ``native.ImageBatch`` that makes some rows.

        The batch writes samples to ``out``, (N, H * W * C), and outcomes to ``statuses``, uint8 (N, 8).
        """
        boxes, paths, count = self.column.boxes, self._paths, len(rows)
        edges = np.empty((count, 0)) if boxes is None else boxes.edges[rows]
        images, most = (None, 0) if self.cache is None else self.cache.begin_batch()
        return native.image_batch(
            plan, paths.prefix, paths.arena, paths.starts[rows], paths.ends[rows], edges,
            out.reshape(-1).view(np.uint8), np.arange(count) * out[0].nbytes, self.column.spec.size, False,
            statuses, inputs=None, kept=images, most_nbytes=most,
        )  # fmt: skip

    def store(self, item: _RowItem, whole: tuple[bytes, bytes, UInt8Array, int]) -> None:
        """Store in the cache a sample that the native core made."""
        assert self.cache is not None
        digest, state, sample, pixels = whole
        identity = FileIdentity(digest, state, self.column.paths[item.position], True)
        self.cache.put(identity, sample, pixels)

    @ranged("decode")
    def open(self, item: _RowItem) -> _Opened:
        """Find a row's sample in the cache, or read and open the row's file."""
        start = perf_counter_ns()
        cache, row = self.cache, item.position
        identity = entry = None
        if cache is not None:
            identity = cache.identify(row)
            entry = cache.store.find(identity.digest)
        if entry is not None:
            self.clock.add("read", perf_counter_ns() - start)
            return _Opened(identity, entry)
        path, spec, boxes = self.column.paths[row], self.column.spec, self.column.boxes
        blob = read_file(path)
        if identity is not None and is_stale(identity.note()):  # another file has taken its place
            identity = None
        read = perf_counter_ns()
        image = self.pixels.open(blob, path)
        box = None if boxes is None else boxes.box(row, image.size, spec.outside)
        self.clock.add("read", read - start)
        self.clock.add("decode", perf_counter_ns() - read)
        return _Opened(identity, None, image, box)

    def parts(self, opened: _Opened) -> list[tuple[PartlyDecoded, Box]]:
        """Return the part of an opened sample that a batch decoder may decode."""
        image, box = opened.image, opened.box
        if image is None:
            return []
        part = self.pixels.part(image, box, is_cut=self._preprocessing is not None)
        return [] if part is None else [(image, part)]

    @ranged("sample")
    def make(self, item: _RowItem, out: Array, opened: _Opened | None = None) -> UInt8Array | None:
        """Write one sample to ``out``, (H * W * C,), or return the pixels that ``finish`` passes to the
        user's ``preprocess``.

        Raise an UnreadableError if the file is bad. Errors of the user's code are raised unchanged.
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
    def finish(self, item: _RowItem, sample: UInt8Array, out: Array) -> None:
        """Run the user's ``preprocess`` on the result of ``make``, and write the sample to ``out``."""
        assert self._preprocessing is not None
        value = self._preprocessing.run(sample, item.index, item.seed)
        if value.dtype != np.uint8:
            out[:] = value.reshape(-1)
            return
        resized = np.empty(self.column.spec.elements, self.pixels.word)
        self.pixels.resize(value, resized)
        self._scaling.apply(resized, out)

    @ranged("decode")
    def _sample(self, opened: _Opened) -> Array:
        """Return the sample before it is scaled, or the pixels for the user's ``preprocess``."""
        start, cache, spec = perf_counter_ns(), self.cache, self.column.spec
        identity, entry, image, box = opened
        if cache is not None and entry is not None:
            found = cache.store.read(entry, 0, entry.shape[0])
            self.clock.add("read", perf_counter_ns() - start)
            return found if self._preprocessing else found.reshape(-1).view(self.pixels.word)
        if self._preprocessing is not None:
            made = self.pixels.cut(image, box)
            whole = np.ascontiguousarray(made)
        else:
            made = np.empty(spec.elements, self.pixels.word)
            self.pixels.make(image, box, made)
            whole = made.view(np.uint8).reshape(*spec.size, -1)
        if cache is not None and identity is not None:
            cache.put(identity, whole, image.size.height * image.size.width)
        self.clock.add("decode", perf_counter_ns() - start)
        return made


class _PendingRows(PendingSamples):
    """Rows of images that are being made. Each column is written to an array (N, H * W * C)."""

    def __init__(
        self, items: Sequence[_RowItem], makers: Sequence[_ColumnMaker], arrays: Sequence[Array],
        policy: str, bad: BadSampleLog, substitute: Callable[[int, int], Item | None] | None,
    ) -> None:  # fmt: skip
        super().__init__(items, policy, bad, substitute)
        self.made: list[_RowItem] = list(items)  # the rows in the batch; some of them may be replacements
        self._makers, self._arrays = makers, arrays
        self._left: dict[tuple[int, int], UInt8Array] = {}  # by row and column, for ``_ColumnMaker.finish``
        # For each column that the native core makes: its batch, the rows made, and the rows to store in the
        # cache.
        self._batches: dict[int, Any] = {}
        self._is_made: dict[int, npt.NDArray[np.bool_]] = {}
        self._whole: dict[int, set[int]] = {}
        self._rows_left: list[int] = []

    def finish(self) -> list[int]:
        """Wait for the rows, and run the user's code that is not thread-safe. Return the numbers of the rows
        that were made."""
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
        """Start to make the rows in the native core. Threads of ``pool`` make the remaining rows."""
        plans = {place: plan for place, maker in enumerate(self._makers) if (plan := maker.native_plan())}
        if not plans:
            self.begin(pool)
            return
        rows = np.array([item.position for item in self.made], np.int64)
        statuses = {place: np.zeros((len(rows), 8), np.uint8) for place in plans}
        self._batches = {
            place: self._makers[place].begin_natively(plan, rows, self._arrays[place], statuses[place])
            for place, plan in plans.items()
        }
        rest = Job(self._make_left, 1)
        unfinished = len(plans)

        def one_is_done() -> None:
            nonlocal unfinished
            unfinished -= 1
            if unfinished:
                return
            try:
                rest.expect(self._find_left(statuses))
                if self._rows_left:
                    pool.go_on_with(rest)
            except BaseException as error:
                rest.cancel(error)
                raise

        # ``wait`` first waits for ``rest``. After ``rest``, no other thread has work left.
        self.jobs = [rest]
        try:
            for batch in self._batches.values():
                self.jobs.append(NativeJob(batch, channel, pool.threads, one_is_done))
        except BaseException as error:
            for job in self.jobs:
                job.cancel(error)
            raise

    def _find_left(self, statuses: Mapping[int, UInt8Array]) -> int:
        """Count the rows that are left to Python."""
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
        """Make the missing parts of a row, and store samples of the row in the cache."""
        number = self._rows_left[place]
        for column, numbers in self._whole.items():
            if number in numbers:
                self._makers[column].store(self.made[number], self._batches[column].take_whole(number))
        self.make(number)

    def _asked(self, number: int) -> list[tuple[PartlyDecoded, Box]]:
        opened = [maker.open(self.made[number]) for maker in self._makers]
        self._open[number] = opened
        return [part for maker, one in zip(self._makers, opened, strict=True) for part in maker.parts(one)]

    def _decoding(self, nanoseconds: int) -> None:
        self._makers[0].clock.add("decode", nanoseconds)

    def _make_from(self, number: int, item: Item) -> None:
        assert isinstance(item, _RowItem)
        opened = self._opened_before(number, item) or [None] * len(self._makers)
        is_own = item is self.items[number]  # false for a replacement
        for place, maker in enumerate(self._makers):
            if is_own and place in self._is_made and self._is_made[place][number]:
                continue
            left = maker.make(item, self._arrays[place][number], opened[place])
            if left is not None:
                self._left[number, place] = left
        self.made[number] = item
