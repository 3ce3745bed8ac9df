"""Types and protocols that the kinds of data share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

# Interfaces between the packages.  Kinds of data do not import each other (``tests/test_layering.py`` lists
# the exceptions): they share these types, and ``fastpipe.torch`` and ``fastpipe.tf`` combine them.

UInt8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]


class Size(NamedTuple):
    """Height and width in pixels, in that order."""

    height: int
    width: int


class Box(NamedTuple):
    """A rectangle in pixels.  It may reach outside the image it refers to."""

    top: int
    left: int
    height: int
    width: int


class Key(NamedTuple):
    """The key of a batch's random parameters: a seed, any integer, taken modulo 2**64; an epoch, from 0; and
    int64 draws (N,): each sample's position in the epoch's unsharded order, so that a sample drawn twice gets
    two augmentations."""

    seed: int
    epoch: int
    draws: npt.NDArray[np.int64]


class StoredObject(NamedTuple):
    """An object as its store lists it: its key, from the store's beginning; its size in bytes; a version that
    changes when it does (an ETag, quotes included), empty where the store has none."""

    key: str
    size: int
    version: str


class FetchedObject(NamedTuple):
    data: bytes
    version: str


class PartlyDecoded(Protocol):
    """An image that others may decode a part of."""

    def encoded(self) -> bytes | None:
        """Return its file if a batch decoder may decode it; None if this object must."""

    def give(self, box: Box, pixels: Any) -> None:
        """Receive the pixels of this box, which were decoded elsewhere."""


@runtime_checkable
class EncodedImage(PartlyDecoded, Protocol):
    """One encoded image, opened: its size is known, its pixels are decoded on demand.

    Implementations are used by one thread, for one sample, and then dropped.
    """

    @property
    def size(self) -> Size: ...

    def region(self, box: Box) -> UInt8Array:
        """Decode a rectangle inside the image to a C-contiguous (H, W, 3) RGB array."""

    def rows(self, top: int, count: int) -> UInt8Array | None:
        """Return whole rows if they are decoded already: C-contiguous (count, W, 3) RGB, read-only;
        None if they would have to be decoded."""

    def pil(self) -> Any:
        """Return the whole image as ``PIL.Image.open(f).convert("RGB")`` gives it."""

    def info(self) -> dict[Any, Any]:
        """Return the ``info`` of that image (EXIF data, colour profile …), without decoding it."""

    def reduced(self, factor: int) -> ReducedImage | None:
        """Return the image at 1 / ``factor`` (2, 4, 8) of its size, decoded with less work; None if that
        is impossible, or unwanted because its pixels differ from those of a later resize."""


class BatchDecoder(Protocol):
    """A decoder of parts of images, those of a batch in one call.  Thread-safe."""

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[UInt8Array | None]:
        """Decode rectangles inside trusted JPEGs to RGB pixels (H, W, 3), C-contiguous; None for declined
        ones."""

    def describe(self) -> str:
        """Return its name and purpose, in a few words."""


class BatchDevice(BatchDecoder, Protocol):
    """A decoder and resampler of images on a device, those of a batch in one call."""

    def takes(self, number: int) -> bool:
        """Return whether the sample of this number in its batch may be decoded there."""

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[Any | None]:
        """Decode parts of trusted JPEGs, which stay there."""

    def finish(
        self, plan: Any, images: Mapping[int, tuple[Any, Any]], rows: Mapping[int, Any], count: int
    ) -> Any:
        """Make a batch of ``count`` samples there: ``images`` maps some sample numbers to the result of
        ``decode`` and the plan's ``Resampling``, ``rows`` maps others to rows made elsewhere; the rest is
        missing."""


class ReducedImage(Protocol):
    """An image that is reduced while it is decoded: each size is divided, and rounded up."""

    @property
    def size(self) -> Size: ...

    def rows(self, count: int) -> UInt8Array | None:
        """Return at least this many rows from the top: C-contiguous (≥ count, W, 3) RGB; None if the decoder
        cannot; the image is then decoded at its full size."""


class ChunkObjects(Protocol):
    """The chunks of one array, each an object of a store.  May be called from any thread, and sent to other
    processes.

    ``how`` describes how they are fetched, ``state`` identifies the objects and their versions.
    """

    @property
    def how(self) -> str: ...

    @property
    def state(self) -> str: ...

    def path(self, chunk: int) -> str:
        """Return the whole URL, or path, of a chunk, even if it does not exist."""

    def read(self, chunk: int) -> bytes | None:
        """Return a chunk's object; None if it was never written."""

    def together(self, chunks: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which each of these is read: they are fetched in parallel."""


class Store(Protocol):
    """A place of objects, each under a key: a bucket, or a folder.  Thread-safe.

    Every method raises ``FileNotFoundError`` for missing objects, ``StoreAccessError`` if credentials
    are wrong or missing, ``StoreBusyError`` if a retry may succeed, and ``StoreError`` for
    the rest.  Messages name the store and the key, and never credentials.
    """

    @property
    def name(self) -> str:
        """A unique identifier of the store (endpoint and bucket, for example), without credentials."""

    def folders(self, prefix: str) -> list[str]:
        """Return the names of folders directly below a prefix, which is empty or ends in a slash."""

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """Yield all objects whose keys begin with a prefix, in pages, without those of folders (``x/``)."""

    @property
    def objects_after(self) -> Callable[[str, str], Iterator[Sequence[StoredObject]]] | None:
        """A function that yields, for a prefix and a key, those of ``objects`` after the key; None if the
        store cannot begin a list there."""

    def find(self, key: str) -> StoredObject: ...

    def get(self, key: str, version: str = "") -> FetchedObject:
        """Return an object's whole content; raise an ObjectChangedError if its version is not ``version``, if
        given."""

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        """Return the bytes of an object from ``start`` to before ``stop``, as ``get`` does."""

    def describe(self) -> str:
        """Return the name of its reader, in a word."""

    def close(self) -> None:
        """Release connections and threads."""


class NextUses(Protocol):
    """When objects are needed next."""

    @property
    def tag(self) -> bytes:
        """Return an identifier of the order, the same for all processes that share one."""

    def next_uses(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return when each row is needed next, counted in samples; 2**62 if unknown."""
