"""Types and protocols that the kinds of data share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

# Interfaces between the packages.  The packages for kinds of data (images, volumes, tables …) share these
# types and do not import each other; ``tests/test_layering.py`` lists the exceptions.  ``fastpipe.torch`` and
# ``fastpipe.tf`` combine the packages.

UInt8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]


class Size(NamedTuple):
    """Height and width in pixels, in that order."""

    height: int
    width: int


class Box(NamedTuple):
    """A rectangle in pixels.  The rectangle may extend outside its image."""

    top: int
    left: int
    height: int
    width: int


class Key(NamedTuple):
    """The key from which a batch's random parameters are computed.

    ``seed`` is any integer, taken modulo 2**64, and ``epoch`` counts from 0.  ``draws``, int64 (N,), are the
    samples' positions in the epoch's order of all ranks.  So a sample that comes twice in an epoch gets two
    different augmentations.
    """

    seed: int
    epoch: int
    draws: npt.NDArray[np.int64]


class StoredObject(NamedTuple):
    """An object's entry in a store's listing.

    ``key`` is the object's full key in the store, and ``size`` is the number of bytes.  ``version`` (an ETag,
    quotes included) changes when the object changes.  ``version`` is empty if the store has no versions.
    """

    key: str
    size: int
    version: str


class FetchedObject(NamedTuple):
    data: bytes
    version: str


class PartlyDecoded(Protocol):
    """An image of which a batch decoder may decode a part."""

    def encoded(self) -> bytes | None:
        """Return the encoded file if a batch decoder may decode the image.  Return None if the image must
        be decoded by this object."""

    def give(self, box: Box, pixels: Any) -> None:
        """Receive the pixels of ``box``, which a batch decoder decoded."""


@runtime_checkable
class EncodedImage(PartlyDecoded, Protocol):
    """An opened image, whose size is known and whose pixels are decoded on demand.  One thread uses an object
    for one sample and then drops the object."""

    @property
    def size(self) -> Size: ...

    def region(self, box: Box) -> UInt8Array:
        """Decode a rectangle inside the image to a C-contiguous (H, W, 3) RGB array."""

    def rows(self, top: int, count: int) -> UInt8Array | None:
        """Return ``count`` whole rows of pixels from row ``top`` on; None if they are not decoded yet.  The
        rows are C-contiguous, (count, W, 3), RGB and read-only."""

    def pil(self) -> Any:
        """Return the whole image as ``PIL.Image.open(f).convert("RGB")`` returns it."""

    def info(self) -> dict[Any, Any]:
        """Return the ``info`` of the PIL image (EXIF data, colour profile …), without decoding the image."""

    def reduced(self, factor: int) -> ReducedImage | None:
        """Return the image at 1 / ``factor`` of its size.  ``factor`` is 2, 4 or 8.

        A reduced image is faster to decode, but a later resize gives other pixels.  Return None if reduced
        decoding is impossible, or if the options do not allow it.
        """


class BatchDecoder(Protocol):
    """A decoder that decodes parts of all images of a batch in one call.  Thread-safe."""

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[UInt8Array | None]:
        """Decode a rectangle of each trusted JPEG to RGB pixels (H, W, 3), C-contiguous.  If the decoder does
        not support an image, the result for this image is None."""

    def describe(self) -> str:
        """Return the decoder's name and purpose, in a few words."""


class BatchDevice(BatchDecoder, Protocol):
    """A decoder and resampler that processes all images of a batch on a device (a GPU) in one call."""

    def takes(self, number: int) -> bool:
        """Return whether the device may decode the batch's sample ``number``."""

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[Any | None]:
        """Decode a rectangle of each trusted JPEG.  The pixels stay on the device."""

    def finish(
        self, plan: Any, images: Mapping[int, tuple[Any, Any]], rows: Mapping[int, Any], count: int
    ) -> Any:
        """Make a batch of ``count`` samples on the device.

        ``images`` has the samples that the device makes: by sample number, the pixels that ``decode``
        returned and the plan's ``Resampling``.  ``rows`` has the finished samples of the CPU, by sample
        number.  The batch does not contain any other samples.
        """


class ReducedImage(Protocol):
    """An image that is reduced during decoding: height and width are divided by a factor, and rounded up."""

    @property
    def size(self) -> Size: ...

    def rows(self, count: int) -> UInt8Array | None:
        """Return at least the first ``count`` rows, C-contiguous (≥ count, W, 3) RGB.  Return None if the
        decoder cannot reduce the image.  The caller then decodes the image at full size."""


class ChunkObjects(Protocol):
    """The chunks of one array.  Each chunk is an object of a store.  Thread-safe, and can be pickled.
    ``how`` describes how the chunks are fetched.  ``state`` identifies the objects and their versions."""

    @property
    def how(self) -> str: ...

    @property
    def state(self) -> str: ...

    def path(self, chunk: int) -> str:
        """Return the full URL or path of a chunk, even if the chunk does not exist."""

    def read(self, chunk: int) -> bytes | None:
        """Return the content of a chunk's object; None if the chunk was never written."""

    def together(self, chunks: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which the caller reads ``chunks`` one by one.  They are fetched in parallel."""


class Store(Protocol):
    """A collection of objects with keys, such as a bucket or a folder.  Thread-safe.

    Every method raises ``FileNotFoundError`` for missing objects, ``StoreAccessError`` if credentials
    are wrong or missing, ``StoreBusyError`` if a retry may succeed, and ``StoreError`` for
    all other errors.  Messages name the store and the key, and never credentials.
    """

    @property
    def name(self) -> str:
        """A unique identifier of the store (endpoint and bucket, for example), without credentials."""

    def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders directly below ``prefix``, which is empty or ends in a slash."""

    def objects(self, prefix: str) -> Iterator[Sequence[StoredObject]]:
        """Yield all objects whose keys begin with ``prefix``, page by page.  Objects that only mark a folder
        (``x/``) are left out."""

    @property
    def objects_after(self) -> Callable[[str, str], Iterator[Sequence[StoredObject]]] | None:
        """A function that gets a prefix and a key, and yields those ``objects`` of the prefix whose own keys
        follow the given key.  None if the store cannot begin a listing after a key."""

    def find(self, key: str) -> StoredObject: ...

    def get(self, key: str, version: str = "") -> FetchedObject:
        """Return an object's whole content.  Raise an ObjectChangedError if the object has another version
        than ``version``, unless ``version`` is empty."""

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        """Return the bytes ``start`` to ``stop - 1`` of an object.  Check ``version`` as ``get`` does."""

    def describe(self) -> str:
        """Return the name of the client that reads the store, in one word."""

    def close(self) -> None:
        """Release connections and threads."""


class NextUses(Protocol):
    """Knows when each sample of a dataset will be needed next."""

    @property
    def tag(self) -> bytes:
        """Return an identifier of the epochs' order.  It is equal for all processes that share the order."""

    def next_uses(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return when each sample in ``rows`` is needed next, counted in samples.  2**62 means unknown."""
