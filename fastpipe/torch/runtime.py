"""What an image folder needs to work in one process and must not take to another."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from fastpipe.core.bad_samples import BadSampleLog, Item
from fastpipe.core.batches import BatchMaker, PendingBatch, said_of
from fastpipe.core.clock import StageClock
from fastpipe.core.files import read_file
from fastpipe.core.native import native
from fastpipe.core.pool import ProcessRuntime
from fastpipe.images.batch import Described, ImageBatch
from fastpipe.images.cache import ShortSide
from fastpipe.images.plan import Plan
from fastpipe.images.reader import ImageReader
from fastpipe.options import BadSamples, Cache, Decode
from fastpipe.torch.batches import BatchMemory, Place
from fastpipe.torch.kept import Found, ImageSource
from fastpipe.torch.likeness import Likeness
from fastpipe.torch.samples import BatchSamples, Whole
from fastpipe.torch.substitutes import Items
from fastpipe.torch.threads import native_lines, new_pool, note

if TYPE_CHECKING:
    from fastpipe.images.cache import ImageCache
    from fastpipe.images.gpu_batches import DeviceMaker, Turn
    from fastpipe.torch.staging import RemoteImages

__all__ = ["Options", "Runtime"]

_log = logging.getLogger("fastpipe.torch")


class Options(NamedTuple):
    """A dataset's options that a runtime is made by."""

    decode: Decode
    bad_samples: BadSamples
    threads: int | str
    cache: Cache


class Runtime(ProcessRuntime[Options]):
    """Threads, memory, decoders and the cache of one dataset in one process.

    Args:
        options: the dataset's.
        count: number of its samples.
        remote: where its images are, if not in local files.
    """

    def __init__(self, options: Options, count: int, remote: RemoteImages | None = None) -> None:
        super().__init__(options, new_pool(options.threads, "fastpipe-decode"))
        self.memory, self.pinned_memory = BatchMemory(), BatchMemory(is_pinned=True)
        self.clock = StageClock()
        self.likeness = Likeness()
        decode = options.decode
        reader = ImageReader(decode)
        short_side = None if decode.short_side is None else ShortSide(decode.short_side)
        self.cache: ImageCache | None = None
        if options.cache.where != "off":
            from fastpipe.images.cache import open_cache

            self.cache = open_cache(options.cache, reader.settings(), count)
        self._threads = self.pool.threads if self.pool else 1
        self._channel = native.Channel(self._threads)
        noted_in = native_lines()
        if noted_in is not None:
            native.note_in(noted_in)
        self._makers_on: dict[Any, DeviceMaker | None] = {}
        self._lock = threading.Lock()
        self._handed_out: Callable[[], Whole | None] = _no_batch
        decoder = None
        if decode.backend == "dali":
            from fastpipe.images.dali import make_batch_decoder

            decoder = make_batch_decoder(decode.backend, self._threads)
        lines = [reader.describe()]
        if decoder is not None:
            lines.insert(0, said_of(decoder))
        if remote is not None:
            lines.append(remote.describe())
        if short_side is not None:
            lines.append(
                f"larger images  →  made smaller first, to {short_side.side} pixels on the short side"
            )
        if self.cache is not None:
            lines.append(self.cache.describe())
        self.decoders = "\n  ".join(lines)  # what a plan begins with
        if remote is None:
            source = ImageSource(read_file, reader, short_side, self.cache)
        else:
            source = ImageSource(remote.read, reader, short_side, self.cache, remote.state)
        self._source, self._reader = source, reader
        self._remote, self._is_native = remote, decoder is None
        self.maker = BatchMaker(
            _Noted(source) if get_worker_info() else source.read,
            source.open,
            options.bad_samples.policy,
            BadSampleLog(options.bad_samples),
            self.clock,
            decoder,
            read_past=source.read_past,
            read_many_past=source.read_many_past if remote is None else None,
        )

    @property
    def is_native(self) -> bool:
        """Whether the native engine makes the batches, but for what it declines."""
        return self._is_native and self._reader.is_native

    def begin(
        self, items: Items, plan: Plan, parameters: npt.NDArray[np.float64], place: Place,
        substitute: Callable[[int, int], Item | None] | None, turn: Turn | None, threaded: bool,
        rows: npt.NDArray[np.int64],
    ) -> PendingBatch:  # fmt: skip
        """Begin a batch.

        Args:
            items: the samples.
            plan: what is done to each.
            parameters: float64 (N, …), a row for each sample.
            place: where they go.
            substitute: as of ``BatchMaker.start``.
            turn: of a device on which it is made, as far as it can be.
            threaded: whether threads may make it; else the calling one does, before returning.
            rows: which objects of their store they are; none of files.
        """
        pool, maker, decode = self.pool if threaded else None, self.maker, self.options.decode
        described = None
        if turn is None and self.is_native:
            described = plan.native(
                self._reader.most_pixels, decode.exif, decode.scaled, decode.short_side
            )  # fmt: skip
        if described is None:
            return maker.start(
                pool, items, plan, parameters, place.memory, place.finish, substitute, is_batch=threaded,
                device=turn,
            )  # fmt: skip
        batch = ImageBatch(maker, items, plan, parameters, place.memory, place.finish, substitute)
        if self.cache is not None:
            batch.when_seen = self.cache.saw
        if get_worker_info():
            batch.note = note
        kept = self._source.begin_batch()
        if self._remote is None:
            paths, arriving = items.packed_paths(), None
        else:
            paths, arriving = self._remote.arriving(rows, items.paths(), kept is not None)
        batch.begin_natively(
            Described(described, paths, self._source.info_in, kept, arriving, place.then),
            pool,
            self._channel,
            self._threads,
        )
        return batch

    def hand_out(self, samples: Sequence[Any]) -> list[Any]:
        """Return samples as a list for a loader of torch's, which collates them later.

        Those of the list before that somebody has kept without a look get memory of their own now.
        """
        before = self._handed_out()
        if before is not None:
            before.release()
        self._handed_out = weakref.ref(samples.whole) if type(samples) is BatchSamples else _no_batch
        return list(samples)

    def maker_on(self, device: Any) -> DeviceMaker | None:
        """What makes batches of bytes on a device; None where the options say that none does."""
        with self._lock:
            if device not in self._makers_on:
                self._makers_on[device] = self._new_maker(device)
            return self._makers_on[device]

    def turn_on(self, device: Any) -> Turn | None:
        """A batch of bytes that begins on a device; None where none is made there."""
        maker = self.maker_on(device)
        return None if maker is None else maker.turn()

    def _new_maker(self, device: Any) -> DeviceMaker | None:
        from fastpipe.images.gpu_batches import DeviceMaker, device_decoder, share_of
        from fastpipe.images.gpu_share import new_share

        try:
            decoder = device_decoder(self.options.decode, device, self._threads)
            share = new_share(share_of(self.options.decode))
            maker = None if decoder is None else DeviceMaker(device, decoder, share)
        except Exception as error:  # a driver too old, a library without its part for GPUs
            text = f"{type(error).__name__}: {error}"
            _log.warning("images are decoded on the CPU, not on %s: %s", device, text)
            return None
        if maker is not None:
            _log.info("images are decoded on %s: %s", device, maker.describe())
        return maker


def _no_batch() -> None:
    return None


class _Noted:
    """Notes, in a worker, what is about to be read."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source

    def __call__(self, path: str, file: bytes | None = None) -> Found:
        note(path)
        return self._source.read(path, file)
