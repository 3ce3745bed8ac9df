"""Types and protocols that the kinds of data share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

# What the slices hand to each other.  Kinds of data do not import each other (``tests/test_layering.py`` has
# the exceptions): they meet here, and ``fastpipe.torch`` and ``fastpipe.tf`` put them together.

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
    """What fixes the random parameters of one batch: a seed, any integer, taken modulo 2**64; an epoch, from
    0; and int64 draws (N,): each sample's position in the epoch's unsharded order, so that one drawn twice is
    augmented twice."""

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
        """Its file, where a decoder of batches may decode it; None where this object has to."""

    def give(self, box: Box, pixels: Any) -> None:
        """Take the pixels of this box, that were decoded elsewhere."""


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
        """Whole rows, where they are there already: C-contiguous (count, W, 3) RGB, not to be written
        to; None where they would have to be decoded."""

    def pil(self) -> Any:
        """The whole image as ``PIL.Image.open(f).convert("RGB")`` gives it."""

    def info(self) -> dict[Any, Any]:
        """The ``info`` of that image (EXIF data, colour profile …), without decoding it."""

    def reduced(self, factor: int) -> ReducedImage | None:
        """The image at 1 / ``factor`` (2, 4, 8) of its size, decoded with less work; None where that
        is not possible, or not wanted as its pixels differ from those of an image made smaller later."""


class BatchDecoder(Protocol):
    """Decodes parts of images, those of a batch by one call.  May be called from any thread."""

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[UInt8Array | None]:
        """Decode rectangles inside trusted JPEGs to RGB pixels (H, W, 3), C-contiguous; None for those that
        are declined."""

    def describe(self) -> str:
        """Its name and what it does, in a few words."""


class BatchDevice(BatchDecoder, Protocol):
    """Decodes and resamples images on a device, those of a batch by one call."""

    def takes(self, number: int) -> bool:
        """Whether the sample of this number in its batch may be decoded there."""

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[Any | None]:
        """Decode parts of trusted JPEGs, which stay there."""

    def finish(
        self, plan: Any, images: Mapping[int, tuple[Any, Any]], rows: Mapping[int, Any], count: int
    ) -> Any:
        """Make a batch of ``count`` samples there: of some, by their numbers, there is what ``decode``
        returned and the plan's ``Resampling``, of others the rows that were made elsewhere, of the rest
        nothing."""


class ReducedImage(Protocol):
    """An image that is made smaller while it is decoded: each size is divided, and rounded up."""

    @property
    def size(self) -> Size: ...

    def rows(self, count: int) -> UInt8Array | None:
        """At least so many rows from the top: C-contiguous (≥ count, W, 3) RGB; None where the decoder
        cannot, upon which the image is decoded at its full size."""


class ChunkObjects(Protocol):
    """The chunks of one array, each an object of a store.  May be called from any thread, and sent to other
    processes.

    ``how`` says how they come here, ``state`` which objects they are, and of which versions.
    """

    @property
    def how(self) -> str: ...

    @property
    def state(self) -> str: ...

    def path(self, chunk: int) -> str:
        """The whole URL, or path, of a chunk, whether it is there or not."""

    def read(self, chunk: int) -> bytes | None:
        """A chunk's object; None where it was never written."""

    def together(self, chunks: Sequence[int]) -> AbstractContextManager[None]:
        """Within the block each of these is read: they are fetched side by side."""


class Store(Protocol):
    """Where objects are, each under a key: a bucket, or a folder.  May be used from any thread.

    Every method raises ``FileNotFoundError`` for what is not there, ``StoreAccessError`` where credentials
    are wrong or missing, ``StoreBusyError`` for what may work when it is tried again, and ``StoreError`` for
    the rest.  Messages name the store and the key, and never credentials.
    """

    @property
    def name(self) -> str:
        """What tells it from all others (endpoint and bucket, say), without credentials."""

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below a prefix, which is empty or ends in a slash."""

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """All objects whose keys begin with a prefix, in pages; those of folders (``x/``) are left out."""

    @property
    def objects_after(self) -> Callable[[str, str], Iterator[Sequence[StoredObject]]] | None:
        """Gives, for a prefix and a key, those of ``objects`` that come after the key; None where the store
        cannot begin a list there."""

    def find(self, key: str) -> StoredObject: ...

    def get(self, key: str, version: str = "") -> FetchedObject:
        """An object's whole content; an ObjectChangedError if it is not of the version that was listed, if
        given."""

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        """The bytes from ``start`` to before ``stop`` of an object, as ``get``."""

    def describe(self) -> str:
        """What reads it, in a word."""

    def close(self) -> None:
        """Let go of connections, and of threads."""


class NextUses(Protocol):
    """When objects are needed next."""

    @property
    def tag(self) -> bytes:
        """Which order it is: the same for all processes that share one."""

    def next_uses(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """When each row is needed next, counted in samples; 2**62 where nobody knows."""
