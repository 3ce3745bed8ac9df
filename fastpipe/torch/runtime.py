"""The threads, the decoders and the cache of an image folder in one process.  They must not be copied to
another process."""

from __future__ import annotations

import errno
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from fastpipe.core.bad_samples import BadSampleLog, Item
from fastpipe.core.batches import BatchMaker, PendingBatch, said_of
from fastpipe.core.clock import StageClock
from fastpipe.core.file_identity import FileIdentity, is_stale
from fastpipe.core.files import read_file
from fastpipe.core.native import native
from fastpipe.core.pool import ProcessRuntime
from fastpipe.core.types import Box, EncodedImage, Size, UInt8Array
from fastpipe.images.batch import Described, ImageBatch
from fastpipe.images.cache import ShortSide, WholeImage
from fastpipe.images.plan import Plan
from fastpipe.images.reader import ImageReader, JpegHeader, PillowImage, read_many, read_to_end
from fastpipe.options import BadSamples, Cache, Decode
from fastpipe.torch.batches import BatchMemory, Items, Place, SpecGuess
from fastpipe.torch.samples import BatchSamples
from fastpipe.torch.threads import native_lines, note, process_of

if TYPE_CHECKING:
    from fastpipe.core.cache_store import Entry
    from fastpipe.images.cache import ImageCache, KeptBatch
    from fastpipe.images.gpu_batches import DeviceMaker, Turn
    from fastpipe.torch.staging import RemoteImages


# ---- cache or files ----------------------------------------------------------------------------------

_log = logging.getLogger("fastpipe.torch")
_cache_log = logging.getLogger("fastpipe.cache")

# Flags of a cached image.  Bit 0 is set if the image's Pillow ``info`` is empty.  Otherwise, reading the info
# needs the header of a JPEG file, or decoding the whole file of another format.  The higher bits are an upper
# bound of the number of pixels in the file.
_NO_INFO = 1
_MOST_PIXELS = (1 << 31) - 1


class Found(NamedTuple):
    """The content of a file, or a cached image of it.

    ``blob`` is the content, ``entry`` the image in the cache, and ``file`` the identity of the file.
    ``header`` is the header of a JPEG file; it is None for other files, and False if the header was not read.
    ``rules`` is a text.  It says how the script had changed Pillow's settings when the cache was searched.
    """

    blob: bytes | None
    file: FileIdentity | None = None
    entry: Entry | None = None
    header: JpegHeader | Literal[False] | None = False
    rules: str = ""


class ImageSource:
    """Reads image files.  If there is a cache, it stores decoded images there, and looks for them first."""

    def __init__(
        self, read: Callable[[str], bytes], reader: ImageReader, short_side: ShortSide | None,
        cache: ImageCache | None,
    ) -> None:  # fmt: skip
        self._read, self._reader = read, reader
        self._short_side, self._cache = short_side, cache

    def read(self, path: str, file: bytes | None = None) -> Found:
        """Return the cached image of a file, if the cache contains the file's current version.  Otherwise
        return the file's content.  If the caller has already read the content, it passes the content as
        ``file``."""
        note(path)
        if self._cache is None:
            return Found(self._read(path) if file is None else file)
        rules, cache = self._reader.rules(), self._cache
        which = cache.identify(path, rules)
        entry = cache.find(which)
        if entry is not None and self._reader.objects_to(entry.flags >> 1):
            entry = None  # with Pillow's current settings, decoding the file may warn or raise an error
        if entry is None and file is None:
            file = self._read(path)
            if is_stale(which.note()):  # another file has taken its place
                return Found(file)
        return Found(None if entry else file, which, entry, False, rules)

    def begin_batch(self) -> KeptBatch | None:
        """Return the object with which the native engine finds decoded images in the cache; None if there is
        no cache."""
        if self._cache is None:
            return None
        return self._cache.begin_batch(self._reader.rules(), self._keep_pixels)

    def info_in(self, blob: bytes, path: str) -> dict[Any, Any]:
        image = self._reader.open_pillow(blob, path)
        if image.format == "PNG":
            read_to_end(image)
        return dict(image.info)

    def read_past(self, path: str) -> Found:
        """Return the content of a file without using the cache."""
        return Found(self._read(path))

    @staticmethod
    def read_many_past(paths: Sequence[str]) -> list[Found | None]:
        """Read many local files at once, without using the cache.  The result is None for a file that must be
        read alone."""
        return [one and Found(one[0], None, None, one[1]) for one in read_many(paths)]

    def open(self, found: Found, path: str) -> EncodedImage:
        if found.entry is not None:
            return self._kept(found.entry, path)
        assert found.blob is not None
        image = self._reader.open(found.blob, path, found.header)
        to = image.size if self._short_side is None else self._short_side.size(image.size)
        cache, file = self._cache, found.file
        keeps = (
            cache is not None and file is not None and image.may_be_kept
            and cache.wants(file, to.height * to.width * 3)
        )  # fmt: skip
        if to == image.size and not keeps:
            return image
        keep = partial(self._keep, file, found.rules) if keeps and file is not None else None
        short_side = None if to == image.size else self._short_side
        return WholeImage(to, _decoded_once(image, short_side, keep), image.info)

    def _keep(self, file: FileIdentity, rules: str, image: EncodedImage, pixels: UInt8Array) -> None:
        has_none = isinstance(image, PillowImage) and not image.info()
        height, width = image.size
        self._keep_pixels(file, pixels, height * width, rules, has_info=not has_none)

    def _keep_pixels(
        self, file: FileIdentity, pixels: UInt8Array, count: int, rules: str, has_info: bool = True
    ) -> None:
        """Store an image in the cache, except if Pillow's settings no longer agree with ``rules``.  ``count``
        is the number of pixels in the image's file."""
        if self._cache is not None and self._reader.rules() == rules:
            flags = min(count, _MOST_PIXELS) << 1 | (0 if has_info else _NO_INFO)
            self._cache.keep(file, pixels, flags)

    def _kept(self, entry: Entry, path: str) -> WholeImage:
        height, width, _ = entry.shape
        info: Callable[[], dict[Any, Any]] = dict if entry.flags & _NO_INFO else partial(self._info, path)
        return WholeImage(Size(height, width), partial(self._rows, entry, path), info)

    def _rows(self, entry: Entry, path: str, first: int, count: int) -> UInt8Array:
        assert self._cache is not None
        try:
            return self._cache.rows(entry, first, count)
        except OSError as error:
            _cache_log.warning(
                "a kept image cannot be read any more, the file is decoded instead: %s", str(error)
            )
            image = self._reader.open(self._read(path), path)
            to = image.size if self._short_side is None else self._short_side.size(image.size)
            if to != entry.shape[:2]:
                raise OSError(errno.ESTALE, "the file was replaced while it was read", path) from error
            return _decoded_once(image, None if to == image.size else self._short_side)(first, count)

    def _info(self, path: str) -> dict[Any, Any]:
        return self._reader.open(self._read(path), path).info()


def _decoded_once(
    image: EncodedImage, short_side: ShortSide | None,
    keep: Callable[[EncodedImage, UInt8Array], None] | None = None,
) -> Callable[[int, int], UInt8Array]:  # fmt: skip
    """Return a function that returns rows of an image.  The function decodes the whole image at its first
    call, and keeps the pixels for later calls."""

    @cache
    def pixels() -> UInt8Array:
        made = image.region(Box(0, 0, *image.size)) if short_side is None else short_side.pixels(image)
        if keep is not None:
            keep(image, made)
        return made

    return lambda first, count: pixels()[first : first + count]


# ---- runtime -----------------------------------------------------------------------------------------


def _opens_lazily() -> bool:
    pillow = sys.modules.get("fastpipe.pillow")
    return pillow is not None and pillow.is_registered()


class Options(NamedTuple):
    decode: Decode
    bad_samples: BadSamples
    threads: int | str
    cache: Cache


class Runtime(ProcessRuntime[Options]):
    def __init__(
        self, options: Options, count: int, path: Callable[[int], str], remote: RemoteImages | None = None
    ) -> None:
        super().__init__(options, process_of(options.threads, "fastpipe-decode").pool)
        self.memory, self.pinned_memory = BatchMemory(), BatchMemory(is_pinned=True)
        self.slots = [self.memory.slots]
        self.clock = StageClock()
        self.spec = SpecGuess()
        decode = options.decode
        reader = ImageReader(decode)
        short_side = None if decode.short_side is None else ShortSide(decode.short_side)
        self.cache: ImageCache | None = None
        if options.cache.where != "off":
            from fastpipe.images.cache import open_cache

            self.cache = open_cache(
                options.cache, decode, reader.settings(), count, path,
                (lambda size: size) if short_side is None else short_side.size,
                None if remote is None else remote.state,
            )  # fmt: skip
        self._threads = self.pool.threads if self.pool else 1
        self._channel = native.Channel(self._threads)
        self._archives = native.OpenArchives()
        if (noted_in := native_lines()) is not None:
            native.note_in(noted_in)
        self._makers_on: dict[Any, DeviceMaker | None] = {}
        self._lock = threading.Lock()
        self._handed_out: Callable[[], BatchSamples | None] = lambda: None
        decoder = None
        if decode.backend == "dali":
            from fastpipe.images.dali import make_batch_decoder

            decoder = make_batch_decoder(decode.backend, self._threads)
        lines = [*([] if decoder is None else [said_of(decoder)]), reader.describe()]
        if remote is not None:
            lines.append(remote.describe())
        if short_side is not None:
            side = f"{short_side.side} pixels on the short side"
            lines.append(f"larger images  →  made smaller first, to {side}")
        self.decoders = "\n  ".join(lines)  # the first lines of a plan's description
        read = read_file if remote is None else remote.read
        source = ImageSource(read, reader, short_side, self.cache)
        self._source, self._reader = source, reader
        self._remote, self._is_native = remote, decoder is None
        self.maker = BatchMaker(
            source.read, source.open,
            options.bad_samples.policy, BadSampleLog(options.bad_samples), self.clock, decoder,
            read_past=source.read_past, read_many_past=source.read_many_past if remote is None else None,
        )  # fmt: skip

    @property
    def is_native(self) -> bool:
        """True if the native engine makes the batches, except for images that it cannot decode."""
        return self._is_native and self._reader.is_native

    def begin(
        self, items: Items, plan: Plan, parameters: npt.NDArray[np.float64], place: Place,
        substitute: Callable[[int, int], Item | None] | None, turn: Turn | None, threaded: bool,
        rows: npt.NDArray[np.int64],
    ) -> PendingBatch:  # fmt: skip
        """Begin to make a batch.  If the images are in a store, ``rows`` contains the numbers of their
        objects in the store's listing.  For local files, ``rows`` is empty."""
        pool, maker, decode = self.pool if threaded else None, self.maker, self.options.decode
        described = kept = None
        if turn is None and self.is_native:
            kept = self._source.begin_batch()
            # The script's own transform gets images of Pillow.  If ``fastpipe.pillow`` opens them, only the
            # needed part is decoded later.  Images of the cache need no decoding.
            if kept is not None or not (plan.leaves_images and _opens_lazily()):
                most = self._reader.most_pixels
                described = plan.native(most, decode.exif, decode.scaled, decode.short_side)
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
        if self._remote is None:
            paths, arriving = items.packed_paths(), None
        else:
            paths, arriving = self._remote.arriving(rows, items.paths(), kept is not None)
        told = Described(described, paths, self._source.info_in, kept, arriving, place.then)
        batch.begin_natively(told, pool, self._channel, self._threads)
        return batch

    def describe_cache(self) -> str:
        """Return a line for a plan's description. It is empty if there is no cache."""
        return "" if self.cache is None else self.cache.describe(self._reader.rules())

    def count_cached(self, paths: Sequence[str]) -> int:
        """Return how many of these images the cache contains."""
        return 0 if self.cache is None else self.cache.count_stored(paths, self._reader.rules())

    def hand_out(self, samples: Sequence[Any]) -> list[Any]:
        """Return samples as a list for torch's own loader, which collates them later.

        If the script has kept samples of the previous list without reading them, these samples get their own
        memory.
        """
        before = self._handed_out()
        if before is not None:
            before.release()
        given = list(samples)
        if type(samples) is BatchSamples:
            self._handed_out = weakref.ref(samples)
            samples.targets = []  # otherwise a sample that the script keeps would keep all targets
        else:
            self._handed_out = lambda: None
        return given

    def maker_on(self, device: Any) -> DeviceMaker | None:
        with self._lock:
            if device not in self._makers_on:
                self._makers_on[device] = self._new_maker(device)
            return self._makers_on[device]

    def _new_maker(self, device: Any) -> DeviceMaker | None:
        from fastpipe.images.gpu_batches import DeviceMaker, device_decoder, share_of
        from fastpipe.images.gpu_share import Share

        try:
            decoder = device_decoder(self.options.decode, device, self._threads)
            share = Share(share_of(self.options.decode))
            maker = None if decoder is None else DeviceMaker(device, decoder, share)
        except Exception as error:  # for example an old driver, or a library without GPU support
            name = type(error).__name__
            _log.warning("images are decoded on the CPU, not on %s: %s: %s", device, name, error)
            return None
        if maker is not None:
            _log.info("images are decoded on %s: %s", device, maker.describe())
        return maker
