"""Types and protocols that the kinds of data share."""

from __future__ import annotations

import os
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
    """What fixes the random parameters of one batch.

    Attributes:
        seed: any integer; taken modulo 2**64.
        epoch: number of the epoch, from 0.
        draws: int64 array (N,): for each sample its position in the epoch's unsharded
            order, so that a sample drawn twice is augmented twice.
    """

    seed: int
    epoch: int
    draws: npt.NDArray[np.int64]


class StoredObject(NamedTuple):
    """One object of a store, as it is listed.

    Attributes:
        key: its name, from the store's beginning.
        size: in bytes.
        version: changes when it does (an ETag, quotes included); empty where the store has none.
    """

    key: str
    size: int
    version: str


class FetchedObject(NamedTuple):
    """An object's content, and its version."""

    data: bytes
    version: str


# ---- The Protocols by which the layers of fastpipe meet ---------------------------------------------


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
    def size(self) -> Size:
        """Size of the decoded image."""

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
        """Decode parts of trusted JPEGs.

        Args:
            parts: of each the file, and a rectangle inside the image.

        Returns:
            Of each RGB pixels (H, W, 3), C-contiguous; None for those that are declined.
        """

    def describe(self) -> str:
        """Its name and what it does, in a few words."""


class BatchDevice(BatchDecoder, Protocol):
    """Decodes and resamples images on a device, those of a batch by one call."""

    def takes(self, number: int) -> bool:
        """Whether the sample of this number in its batch may be decoded there."""

    def decode(self, parts: Sequence[tuple[bytes, Box]]) -> Sequence[Any | None]:
        """Decode parts of trusted JPEGs, which stay there: as ``BatchDecoder`` has it."""

    def finish(
        self, plan: Any, images: Mapping[int, tuple[Any, Any]], rows: Mapping[int, Any], count: int
    ) -> Any:
        """Make a batch there.

        Args:
            plan: by which its samples are made.
            images: of samples by their numbers, what ``decode`` returned, and the plan's ``Resampling``.
            rows: of samples by their numbers, what was made of them elsewhere.
            count: samples, of which some may be in neither.

        Returns:
            The batch.
        """


class ReducedImage(Protocol):
    """An image that is made smaller while it is decoded: each size is divided, and rounded up."""

    @property
    def size(self) -> Size:
        """Its size."""

    def rows(self, count: int) -> UInt8Array | None:
        """At least so many rows from the top: C-contiguous (≥ count, W, 3) RGB; None where the decoder
        cannot, upon which the image is decoded at its full size."""


class SamplePlan(Protocol):
    """What is done to one sample.  Used by any number of threads at once."""

    def apply(self, image: EncodedImage, parameters: Any, out: Any = None) -> Any:
        """Transform ``image``, into ``out`` where it is given, else into a returned value."""

    def resampling(self, image: EncodedImage, parameters: Any) -> Any:
        """All that is done to an image, for a device: with its ``part``; None where that is more than
        resampling a part of it."""

    def part(self, image: EncodedImage, parameters: Any) -> Box | None:
        """What of an image ``apply`` will ask for by ``region``; None where it will ask for none."""


class ChunkTables(Protocol):
    """Keeps where chunks are, from one time that a file is opened to the next."""

    def load(self, status: os.stat_result, about: str) -> Sequence[npt.NDArray[Any]] | None:
        """The arrays that were kept of a file in this state; None where there are none."""

    def save(self, status: os.stat_result, about: str, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Keep arrays."""


class ChunkObjects(Protocol):
    """The chunks of one array, each an object of a store.  May be called from any thread, and sent to other
    processes.

    Attributes:
        how: how they come here, in words.
        state: which objects they are, and of which versions, in words.
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


class KeptChunks(Protocol):
    """Decoded chunks of one dataset that are kept.  May be called from any thread."""

    @property
    def memory(self) -> UInt8Array | None:
        """Where they lie; None where they are read from ``descriptor``."""

    @property
    def descriptor(self) -> int:
        """The file in which they lie."""

    def places(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where chunks of these numbers begin in the memory, or in the file; -1 for those not kept."""

    def keep(self, numbers: npt.NDArray[np.int64], chunks: Sequence[UInt8Array]) -> None:
        """Keep decoded chunks of these numbers, as far as there is room."""


class ClaimedChunk(Protocol):
    """Memory that a chunk is to be decoded into; empty again when it is left without ``publish``."""

    @property
    def memory(self) -> UInt8Array:
        """The chunk's bytes."""

    def publish(self, left: int) -> bool:
        """Let other processes see it, who will take so many of its samples; False if others wrote there."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...


class SharedChunks(Protocol):
    """Decoded chunks in memory that processes share.  May be called from any thread.

    Attributes:
        memory: where they lie.
        turn: where this process begins among the chunks of a batch, from 0 to 1.
    """

    memory: UInt8Array
    turn: float

    def find(self, chunk: int, *, waits: bool) -> tuple[int, int]:
        """Where a chunk begins in the memory, and its version; (-1, 0) where it is not there."""

    def took(self, place: int, version: int, samples: int) -> bool:
        """Say that samples were copied from there; whether it was of that version all the time."""

    def claim(self, chunk: int, nbytes: int) -> ClaimedChunk | None:
        """Memory to decode a chunk into, if there is some."""


class Stopwatch(Protocol):
    """Collects how long each stage took.  May be called from any thread."""

    def add(self, stage: str, nanoseconds: int) -> None:
        """Add a duration to a stage."""


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

    def find(self, key: str) -> StoredObject:
        """One object, as it is listed."""

    def get(self, key: str, version: str = "") -> FetchedObject:
        """An object's whole content.

        Args:
            key: its key.
            version: as it was listed; empty takes any.

        Raises:
            ObjectChangedError: it is not of this version any more.
        """

    def get_range(self, key: str, start: int, stop: int, version: str = "") -> bytes:
        """The bytes from ``start`` to before ``stop`` of an object, as ``get``."""

    def describe(self) -> str:
        """What reads it, in a word."""

    def close(self) -> None:
        """Let go of connections, and of threads."""


class ListedObjects(Protocol):
    """The objects of a store that are a dataset's samples, as rows from 0."""

    def __len__(self) -> int: ...

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each, (N,)."""

    def key(self, row: int) -> str:
        """An object's key in its store."""

    def path(self, row: int) -> str:
        """Its whole path, as a dataset shows it."""

    def version(self, row: int) -> str:
        """Of which version it was listed; empty where the store has none."""


class NextUses(Protocol):
    """When objects are needed next."""

    @property
    def tag(self) -> bytes:
        """Which order it is: the same for all processes that share one."""

    def next_uses(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """When each row is needed next, counted in samples; 2**62 where nobody knows."""


class StagedObjects(Protocol):
    """Objects of one listing on a local disk.  May be called from any thread."""

    def has(self, row: int) -> bool:
        """Whether an object is there, as far as is known without looking."""

    def have(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether objects are there, as far as is known without looking."""

    def file(self, row: int) -> str:
        """The file of an object that is there, as far as is known without looking."""

    def read(self, row: int) -> bytes | None:
        """An object's content; None where it is not there, or not whole."""

    def keep(self, row: int, data: bytes) -> bool:
        """Put an object there; whether there was room for it, or is now."""

    def forget(self, row: int) -> None:
        """Remove an object."""

    def claim(self, row: int, wait_s: float) -> AbstractContextManager[bool]:
        """Be alone with an object among processes; False when it is there once nobody else is at it."""

    def follow(self, uses: NextUses | None) -> None:
        """Hear when objects are needed, by which room is made; None where nobody knows."""

    def used(self, rows: npt.NDArray[np.int64]) -> None:
        """Hear that objects are being used: they are needed at another time then."""

    def close(self) -> None:
        """Let go of it."""
