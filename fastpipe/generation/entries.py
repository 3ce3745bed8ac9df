"""Kept results in a folder: one file each, of which not a byte is trusted before all have been checked.

::

    16 bytes   "fastpipe memo 1\\n": the format
     8         b"plain..." or b"sealed.": what is at the end, and whether there is pickle inside
    24         sizes of the three parts
    32         SHA-256 of the header
               header: JSON; of which call it is, when it was made, and how long that took
               tree:   JSON; the value, as of ``values.encode``, and the sizes of the blobs
               blobs:  each from a multiple of 64 bytes on
    32         SHA-256 of everything before; sealed: HMAC-SHA256 under the user's key

The sizes must add up to the file's, so that a damaged one cannot ask for memory.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pickle
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np

from fastpipe.core.private_folder import PrivateFolder
from fastpipe.generation.sealing import SEAL_BYTES, new_seal, sealing_key
from fastpipe.generation.values import Blob, NotStorableError, decode, encode

__all__ = ["FORMAT", "Entries", "EntryError", "Header", "NeedsPickleError"]

FORMAT = 1
_SUFFIX = ".memo"
_MAGIC, _ANY_MAGIC = b"fastpipe memo %d\n" % FORMAT, b"fastpipe memo "
_PLAIN, _SEALED = b"plain...", b"sealed.."
_PREFIX = struct.Struct("<16s8s3Q32s")
_ALIGNMENT = 64
_PIECE = 1 << 20
_MOST_ASIDE = 9  # of one entry
_MOST_HEADERS = 200
_LARGEST_HEADER = 1 << 26


class EntryError(Exception):
    """An entry cannot be read: it is damaged, forged, or of another format."""


class NeedsPickleError(Exception):
    """An entry is sealed, and pickle was not asked for."""


@dataclass(frozen=True)
class Header:
    """Of which call an entry is.

    Attributes:
        name: the function's.
        key: of the call; also in the file's name.
        parts: the pieces of the function's code.
        arguments: digests by name.
        data: digests of the files that arguments name, by the arguments' names.
        created: Unix time, in seconds.
        seconds: how long it took to compute.
    """

    name: str
    key: str
    parts: dict[str, str]
    arguments: dict[str, str]
    data: dict[str, str]
    created: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Sizes:
    """An entry's parts, in bytes."""

    kind: bytes
    header: int
    tree: int
    blobs: int
    digest: bytes


class Entries:
    """The entries of one function in a folder.

    Args:
        folder: where they are.
        name: the function's: ``"module:name"``.
    """

    def __init__(self, folder: PrivateFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        words = re.sub(r"[^A-Za-z0-9_]+", "-", name.partition(":")[2]).strip("-")[:40] or "function"
        self._prefix = f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-"

    def file_name(self, key: str) -> str:
        """The name of the file with the entry of a key."""
        return f"{self._prefix}{key}{_SUFFIX}"

    def load(self, key: str, *, pickled: bool) -> tuple[Header, Any]:
        """An entry's header and value.

        Args:
            key: of the call.
            pickled: may unpickle what the user has sealed.

        Raises:
            FileNotFoundError: there is none.
            NeedsPickleError: it is sealed, and ``pickled`` is false.
            EntryError: it is damaged or sealed by somebody else, or what is inside cannot be made again.
            OSError: it cannot be read, or the key cannot, and may be another time.
            MemoryError: likewise.
        """
        with self._opened(self.file_name(key)) as file:
            sizes = _sizes(file)
            if sizes.kind == _SEALED and not pickled:
                raise NeedsPickleError
            header, value = (_read_sealed if sizes.kind == _SEALED else _read_plain)(file, sizes)
        if header.key != key or header.name != self._name:
            raise EntryError("it is the entry of another call, under this one's name")
        return header, value

    def store(self, header: Header, value: object, *, pickled: bool) -> None:
        """Keep a value.

        Args:
            header: of which call it is.
            value: anything that ``values.encode`` takes.
            pickled: may pickle and seal what that does not take.

        Raises:
            NotStorableError: it is something else.
            OSError: it cannot be written.
        """
        try:
            kind, (tree, blobs) = _PLAIN, encode(value)
            key = b""
        except NotStorableError:
            if not pickled:
                raise
            kind, (tree, blobs) = _SEALED, _pickled(value)
            key = sealing_key()
        tree = {**tree, "blobs": [len(blob) for blob in blobs]}
        made = [json.dumps(part, allow_nan=False).encode() for part in (asdict(header), tree)]
        padded = sum(map(_padded, tree["blobs"]))
        digest = hashlib.sha256(made[0]).digest()
        prefix = _PREFIX.pack(_MAGIC, kind, len(made[0]), len(made[1]), padded, digest)
        check = new_seal(key) if kind == _SEALED else hashlib.sha256()

        def fill(file: BinaryIO) -> None:
            for piece in (prefix, *made, *_with_padding(blobs)):
                check.update(piece)
                file.write(piece)
            file.write(check.digest())

        self._folder.write(self.file_name(header.key), fill)

    def set_aside(self, key: str) -> str | None:
        """Give an entry's file another name, under which nobody looks for it; None if it is gone.

        The last of those names is used again.
        """
        name, taken = self.file_name(key), set(self._folder.names())
        names = [f"{name}.corrupt-{number}" for number in range(1, _MOST_ASIDE + 1)]
        aside = next((one for one in names if one not in taken), names[-1])
        try:
            self._folder.rename(name, aside)
        except FileNotFoundError:
            return None
        return aside

    def headers(self) -> list[Header]:
        """The headers of the newest entries; those that cannot be read are left out."""
        found = []
        for name in self._newest():
            with suppress(OSError, EntryError, ValueError, TypeError), self._opened(name) as file:
                found.append(_header(file, _sizes(file)))
        return found

    def clear(self) -> int:
        """Remove all entries, but not what was set aside; how many there were."""
        names = self._all()
        for name in names:
            self._folder.remove(name)
        return len(names)

    def _all(self) -> list[str]:
        return [
            name for name in self._folder.names() if name.startswith(self._prefix) and name.endswith(_SUFFIX)
        ]

    def _newest(self) -> list[str]:
        times = {}
        for name in self._all():
            with suppress(OSError, EntryError), self._opened(name) as file:
                times[name] = os.fstat(file.fileno()).st_mtime_ns
        return sorted(times, key=lambda name: -times[name])[:_MOST_HEADERS]

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        with os.fdopen(self._folder.open(name, os.O_RDONLY), "rb", buffering=0) as file:
            yield file


class _FileBlobs:
    """Blobs in an entry's file, read into the memory of the value itself."""

    def __init__(self, file: BinaryIO, begin: int, sizes: list[int]) -> None:
        self._file = file
        self._sizes = sizes
        self._begins = list(accumulate(map(_padded, sizes), initial=begin))

    def nbytes(self, number: int) -> int:
        return self._sizes[number]

    def into(self, number: int, memory: memoryview) -> None:
        self._file.seek(self._begins[number])
        _fill(self._file, memory)


def _sizes(file: BinaryIO) -> _Sizes:
    """An entry's sizes, which are those of its file."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise EntryError("it is cut off")
    magic, kind, header, tree, blobs, digest = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        is_other = magic.startswith(_ANY_MAGIC)
        raise EntryError("another version of fastpipe wrote it" if is_other else "it is no entry, or damaged")
    whole = _PREFIX.size + header + tree + blobs + SEAL_BYTES
    if kind not in (_PLAIN, _SEALED) or whole != os.fstat(file.fileno()).st_size:
        raise EntryError("it is cut off, or damaged")
    return _Sizes(kind, header, tree, blobs, digest)


def _header(file: BinaryIO, sizes: _Sizes) -> Header:
    if sizes.header > _LARGEST_HEADER:
        raise EntryError("its header is too large")
    file.seek(_PREFIX.size)
    content = _exactly(file, sizes.header)
    if hashlib.sha256(content).digest() != sizes.digest:
        raise EntryError("its header is damaged")
    return Header(**json.loads(content))


def _read_plain(file: BinaryIO, sizes: _Sizes) -> tuple[Header, Any]:
    """Check all bytes, then read them again into where they belong: so only one copy is in memory."""
    begin = _PREFIX.size + sizes.header + sizes.tree
    left, check, piece = begin + sizes.blobs, hashlib.sha256(), memoryview(bytearray(_PIECE))
    file.seek(0)
    while left:
        part = piece[: min(left, _PIECE)]
        _fill(file, part)
        check.update(part)
        left -= len(part)
    if check.digest() != _exactly(file, SEAL_BYTES):
        raise EntryError("its checksum is wrong: it is damaged")
    with _what_is_inside():
        header, tree = _header(file, sizes), json.loads(_exactly(file, sizes.tree))
        if "value" not in tree:
            raise EntryError("it needs pickle, and its seal is missing")
        return header, decode(tree, _FileBlobs(file, begin, tree["blobs"]))


def _read_sealed(file: BinaryIO, sizes: _Sizes) -> tuple[Header, Any]:
    """Check all bytes, and use those very ones: whatever becomes of the file meanwhile."""
    seal = new_seal(sealing_key())
    file.seek(0)
    begin = _exactly(file, _PREFIX.size + sizes.header + sizes.tree)
    blobs = np.empty(sizes.blobs, np.uint8).data
    _fill(file, blobs)
    seal.update(begin)
    seal.update(blobs)
    if not hmac.compare_digest(seal.digest(), _exactly(file, SEAL_BYTES)):
        raise EntryError("its seal is wrong: it is damaged, or not of this user")
    with _what_is_inside():
        header = Header(**json.loads(begin[_PREFIX.size : _PREFIX.size + sizes.header]))
        lengths = json.loads(begin[_PREFIX.size + sizes.header :])["blobs"]
        places = accumulate(map(_padded, lengths), initial=0)
        first, *buffers = [blobs[at : at + length] for at, length in zip(places, lengths, strict=False)]
        return header, pickle.loads(first, buffers=buffers)


@contextmanager
def _what_is_inside() -> Iterator[None]:
    """Whatever making a value again raises is an error of the entry."""
    try:
        yield
    except (EntryError, MemoryError):
        raise
    except Exception as error:
        raise EntryError(f"what is inside cannot be made again: {type(error).__name__}: {error}") from error


def _pickled(value: object) -> tuple[dict[str, Any], list[Blob]]:
    """A value as pickle has it, arrays beside it in their own memory."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return {"pickle": 5}, [content, *(buffer.raw() for buffer in buffers)]
    except MemoryError:
        raise
    except Exception as error:  # any that code of the user's raises
        raise NotStorableError(f"it cannot be pickled: {type(error).__name__}: {error}") from error


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _with_padding(blobs: list[Blob]) -> Iterator[Blob]:
    for blob in blobs:
        yield blob
        yield bytes(_padded(len(blob)) - len(blob))


def _exactly(file: BinaryIO, nbytes: int) -> bytes:
    memory = bytearray(nbytes)
    _fill(file, memoryview(memory))
    return bytes(memory)


def _fill(file: BinaryIO, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise EntryError("it is cut off")
        done += count
