"""What a store's listing says of each sample (key, size, version), as a few flat arrays.

As ``FrozenSamples``, whose paths it shares, it costs forked and spawned workers next to nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe.index.storage import FrozenSamples, Packed, offsets_of, pack_paths

__all__ = ["Listing", "Rows", "joined_texts"]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_NAME_NBYTES = 16
# Rows that are hashed at a time: each byte of theirs takes up to 24 meanwhile.
_CHUNK = 4096
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some objects of a listing.

    Args:
        paths: of each what follows the root; no two are the same.
        sizes: int64 (N,): in bytes.
        versions: as the store tells them; may be empty.
    """

    paths: Packed
    sizes: Int64Array
    versions: Packed

    @classmethod
    def of(cls, folder: str, names: Sequence[str], sizes: Sequence[int], versions: Sequence[str]) -> Rows:
        """Objects whose paths are ``folder + name``."""
        return cls(pack_paths(folder, names), np.array(sizes, dtype=np.int64), pack_paths("", versions))

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        sizes = np.concatenate([np.zeros(0, dtype=np.int64), *(part.sizes for part in parts)])
        paths = joined_texts([part.paths for part in parts])
        return cls(paths, sizes, joined_texts([part.versions for part in parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    def each_path(self) -> Iterator[str]:
        """The paths as strings."""
        return _texts(self.paths)

    def taken(self, numbers: Sequence[int]) -> Rows:
        """Some of them, in this order."""
        paths, versions = list(_texts(self.paths)), list(_texts(self.versions))
        return Rows(
            pack_paths("", [paths[number] for number in numbers]),
            self.sizes[np.array(numbers, dtype=np.intp)],
            pack_paths("", [versions[number] for number in numbers]),
        )


class Listing:
    """The objects that are the samples of a dataset, in the order of its table.

    Rows are from 0 to N - 1.  Stored are the bytes of each version, and 16 more for each sample.

    Args:
        paths: of the samples; its prefix is the root.
        prefix: what keys have where paths have the root.
        sizes: int64 (N,): in bytes.
        versions: what the store calls the states they are in.

    >>> paths = FrozenSamples(b"a/1.jpga/2.jpg", np.array([0, 7, 14]), np.zeros(2, np.int64), "s3://photos/of/")
    >>> listing = Listing(paths, "of/", np.array([10, 20]), pack_paths("", ["x", "y"]))
    >>> listing.find("s3://photos/of/a/2.jpg"), listing.key(1), listing.size(1), listing.version(1)
    (1, 'of/a/2.jpg', 20, 'y')
    """

    def __init__(self, paths: FrozenSamples, prefix: str, sizes: Int64Array, versions: Packed) -> None:
        self.paths = paths
        self.prefix = prefix
        self.sizes = sizes.view()
        self.sizes.flags.writeable = False
        self._versions = bytes(versions.block)
        self._version_offsets = offsets_of(versions.lengths)
        self._digest: bytes | None = None
        self._places: _Places | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def path(self, row: int) -> str:
        """The path of a sample: the root, and what follows it."""
        return self.paths.path(row)

    def key(self, row: int) -> str:
        """The key of its object in the store."""
        return self.prefix + self._rest(row).decode("utf-8", "surrogatepass")

    def size(self, row: int) -> int:
        """The object's size in bytes."""
        return self.sizes.item(row)

    def version(self, row: int) -> str:
        """The object's version; empty where the store tells none."""
        return self._version(row).decode("utf-8", "surrogatepass")

    def name(self, row: int, store_name: str) -> bytes:
        """16 bytes that stand for the object in this state, wherever it is listed.

        Args:
            row: its row.
            store_name: what tells its store from all others.
        """
        digest = hashlib.blake2b(digest_size=_NAME_NBYTES)
        key = _encoded(self.prefix) + self._rest(row)
        for part in (_encoded(store_name), key, self._version(row), b"%d" % self.size(row)):
            _feed(digest, part)
        return digest.digest()

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for all of it: which objects in which order, their states, and the root."""
        if self._digest is None:
            digest = hashlib.blake2b(digest_size=_NAME_NBYTES)
            texts = (_encoded(self.paths.prefix), _encoded(self.prefix), self.paths.arena, self._versions)
            for text in texts:
                _feed(digest, text)
            for array in (self.paths.offsets, self._version_offsets, self.sizes):
                _feed(digest, np.ascontiguousarray(array, dtype="<i8").data)
            self._digest = digest.digest()
        return self._digest

    def find(self, path: str) -> int:
        """The row of a path; the first of several, and -1 if there is none.  The first call makes a table."""
        root = self.paths.prefix
        if not path.startswith(root):
            return -1
        rest = _encoded(path[len(root) :])
        if self._places is None:
            self._places = _Places.of(self.paths)
        for row in self._places.candidates(rest):
            if self._rest(row) == rest:
                return row
        return -1

    def _rest(self, row: int) -> bytes:
        offsets = self.paths.offsets
        return self.paths.arena[offsets.item(row) : offsets.item(row + 1)]

    def _version(self, row: int) -> bytes:
        offsets = self._version_offsets
        return self._versions[offsets.item(row) : offsets.item(row + 1)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Listing:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None}  # is made again faster than it is sent

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.sizes.flags.writeable = False


class _Places(NamedTuple):
    """Finds rows by their paths' hashes: polynomials in their bytes, modulo 2**64.

    These are made of all rows at a time; paths that share one are told apart by whoever asks.
    """

    hashes: UInt64Array  # (N,), rising
    rows: npt.NDArray[np.int64]  # (N,), of each hash
    powers: UInt64Array  # as many as the longest path has bytes

    @classmethod
    def of(cls, paths: FrozenSamples) -> _Places:
        offsets, arena = paths.offsets, np.frombuffer(paths.arena, dtype=np.uint8)
        starts = range(0, len(paths), _CHUNK)
        ends = [min(start + _CHUNK, len(paths)) for start in starts]
        most = max(
            (int(offsets[end] - offsets[start]) for start, end in zip(starts, ends, strict=True)), default=0
        )
        powers, inverses = _powers(_BASE, most + 1), _powers(pow(_BASE, -1, 1 << 64), most + 1)
        hashes = np.zeros(len(paths), dtype=np.uint64)
        for start, end in zip(starts, ends, strict=True):
            at = offsets[start : end + 1] - offsets[start]
            sums = np.zeros(int(at[-1]) + 1, dtype=np.uint64)
            np.cumsum(_terms(arena[offsets[start] : offsets[end]], powers), out=sums[1:])
            hashes[start:end] = (sums[at[1:]] - sums[at[:-1]]) * inverses[at[:-1]]
        rows = np.argsort(hashes, kind="stable")
        return cls(hashes[rows], rows, powers[: int(np.diff(offsets).max(initial=0))].copy())

    def candidates(self, path: bytes) -> Iterator[int]:
        """The rows that may have a path."""
        if len(path) > len(self.powers):
            return
        value = _terms(np.frombuffer(path, dtype=np.uint8), self.powers).sum(dtype=np.uint64)
        at = int(self.hashes.searchsorted(value))
        while at < len(self.hashes) and self.hashes[at] == value:
            yield self.rows.item(at)
            at += 1


def joined_texts(parts: Sequence[Packed]) -> Packed:
    """All texts of several blocks, one after the other."""
    lengths = [np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]
    return Packed(b"".join(part.block for part in parts), np.concatenate(lengths))


def _texts(packed: Packed) -> Iterator[str]:
    block, start = bytes(packed.block), 0
    for end in np.cumsum(packed.lengths).tolist():
        yield block[start:end].decode("utf-8", "surrogatepass")
        start = end


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _feed(digest: hashlib.blake2b, part: bytes | memoryview) -> None:
    """Add a part with its length, so that no other parts look the same."""
    digest.update((part.nbytes if isinstance(part, memoryview) else len(part)).to_bytes(8, "little"))
    digest.update(part)


def _powers(base: int, count: int) -> UInt64Array:
    """Of 0 to ``count - 1``, modulo 2**64."""
    factors = np.full(count, base, dtype=np.uint64)
    factors[:1] = 1
    powers: UInt64Array = np.cumprod(factors)
    return powers


def _terms(content: npt.NDArray[np.uint8], powers: UInt64Array) -> UInt64Array:
    """What each byte adds to the hash.  One more than it is, so that also zeros do."""
    terms: UInt64Array = (content.astype(np.uint64) + np.uint64(1)) * powers[: len(content)]
    return terms
