"""Stored results of memoized functions in a folder.

Each result is an *entry* with its own file.  The checksum of the whole file is verified before the
result is decoded.  The format of the file::

    16 bytes   "fastpipe memo 3\\n", the number of the format
     8         b"plain..." for plain values only, b"sealed.." for any value that can be pickled
    32         plain: SHA-256 of the rest of the file; sealed: HMAC-SHA256 with the user's key
    16         size of the header in bytes, and number of blobs
               header: JSON that describes the call and its duration
               sizes of the blobs, 8 bytes each
               blobs:  the value in the format of pickle, then the bytes of arrays and tensors
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import logging
import math
import os
import pickle
import re
import secrets
import stat
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fastpipe.core.extras import require
from fastpipe.core.private_folder import PrivateFolder
from fastpipe.errors import CacheError

try:
    import fcntl
except ImportError:  # on Windows, where no results are stored
    fcntl = None  # type: ignore[assignment]

FORMAT = 3
_SUFFIX, _LOCK_SUFFIX = ".memo", ".lock"
_MAGIC, _ANY_MAGIC = b"fastpipe memo %d\n" % FORMAT, b"fastpipe memo "
_PLAIN, _SEALED = b"plain...", b"sealed.."
_PREFIX, _SIZES = struct.Struct("<16s8s32s"), struct.Struct("<QQ")
_MOST_HEADERS = 200
_LARGEST_HEADER = 1 << 26
_log = logging.getLogger("fastpipe.memoize")

Bytes = bytes | memoryview
ByteArray = npt.NDArray[np.uint8]


class EntryError(Exception):
    """An entry (the file of a stored result) cannot be read: it is damaged, forged, or of another format."""


class NeedsPickleError(Exception):
    """An entry (a stored result) was pickled, but ``memoize`` was not called with ``pickle=True``."""


class NotStorableError(TypeError):
    """A value cannot be stored.  Without ``pickle=True``, the message names the part that needs pickle."""


@dataclass(frozen=True)
class Header:
    """Describes the call whose result is stored: its function, code, arguments and files."""

    name: str  # name of the function
    key: str  # digest of the call; also a part of the file name
    parts: dict[str, str]  # parts of the function's code, see ``CodeVersion``
    arguments: dict[str, str]  # digests of the arguments, by argument name
    data: dict[str, str]  # digests of the files that arguments name, by argument name
    seconds: float = 0.0  # duration of the computation

    @classmethod
    def from_json(cls, content: bytes) -> Header:
        """Read a header; raise a ValueError or TypeError if it is invalid."""
        found = cls(**json.loads(content))
        if not all(isinstance(one, dict) for one in (found.parts, found.arguments, found.data)):
            raise ValueError("it has no valid header")
        return found


class Entries:
    """The stored results (entries) in a folder of one function, which is named ``"module:name"``."""

    def __init__(self, folder: PrivateFolder, name: str) -> None:
        self._folder, self._name = folder, name
        words = re.sub(r"[^A-Za-z0-9_]+", "-", name.partition(":")[2]).strip("-")[:40] or "function"
        self._prefix = f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-"

    def file_name(self, key: str) -> str:
        """Return the name of the file with the result of the call whose digest is ``key``."""
        return f"{self._prefix}{key}{_SUFFIX}"

    def load(self, key: str, *, pickled: bool) -> tuple[Header, Any]:
        """Return the header and the value of an entry; load pickled data only if ``pickled`` is true.

        Raises:
            FileNotFoundError: there is no entry.
            NeedsPickleError: the entry is pickled (sealed), and ``pickled`` is false.
            EntryError: the entry is damaged, is sealed with another key, or cannot be decoded.
            OSError, MemoryError: the entry or the key cannot be read now, but perhaps later.
        """
        with self._opened(self.file_name(key)) as file:
            kind, check = _read_prefix(file)
            if kind == _SEALED and not pickled:
                raise NeedsPickleError
            content, blobs = _read_checked(file, kind, check)
        try:
            header, value = Header.from_json(content), decode(blobs) if kind == _PLAIN else _unpickled(blobs)
        except (EntryError, MemoryError):
            raise
        except Exception as error:
            raise EntryError(f"its value cannot be loaded: {type(error).__name__}: {error}") from error
        if header.key != key or header.name != self._name:
            raise EntryError("it is the entry of another call under this call's name")
        return header, value

    def store(self, header: Header, value: object, *, pickled: bool) -> None:
        """Store a value; if ``encode`` does not support it and ``pickled`` is true, pickle and seal it."""
        try:
            kind, blobs = _PLAIN, encode(value)
        except NotStorableError:
            if not pickled:
                raise
            kind, blobs = _SEALED, _pickled(value)
        first = json.dumps(asdict(header), allow_nan=False).encode()
        sizes = struct.pack(f"<{len(blobs)}Q", *map(len, blobs))
        pieces: list[Bytes] = [_SIZES.pack(len(first), len(blobs)), first, sizes, *blobs]
        check = _new_check(kind)
        for piece in pieces:
            check.update(piece)
        prefix = _PREFIX.pack(_MAGIC, kind, check.digest())
        self._folder.write(self.file_name(header.key), lambda file: file.writelines([prefix, *pieces]))

    def set_aside(self, key: str) -> str | None:
        """Rename the file of an entry to ``….corrupt``, and return this name; None if there is no file.

        If a file with the new name exists, it is replaced.
        """
        aside = f"{self.file_name(key)}.corrupt"
        try:
            self._folder.rename(self.file_name(key), aside)
        except FileNotFoundError:
            return None
        return aside

    def headers(self) -> list[Header]:
        """Return the headers (descriptions of calls) of the newest entries; leave out unreadable entries."""
        times: list[tuple[int, str]] = []
        for name in self._names():
            with contextlib.suppress(FileNotFoundError):
                times.append((self._folder.stat(name).st_mtime_ns, name))
        found = []
        for _, name in sorted(times, reverse=True)[:_MOST_HEADERS]:
            with contextlib.suppress(OSError, EntryError, ValueError, TypeError), self._opened(name) as file:
                _read_prefix(file)
                size, _ = _SIZES.unpack(file.read(_SIZES.size).ljust(_SIZES.size))
                found.append(Header.from_json(file.read(min(size, _LARGEST_HEADER))))
        return found

    def clear(self) -> int:
        """Remove all entries, and return their number; damaged entries that were renamed stay."""
        names = self._names()
        for name in names:
            self._folder.remove(name)
        return len(names)

    def _names(self) -> list[str]:
        return [
            name for name in self._folder.names() if name.startswith(self._prefix) and name.endswith(_SUFFIX)
        ]

    def _opened(self, name: str) -> BinaryIO:
        return os.fdopen(self._folder.open(name, os.O_RDONLY), "rb")


def _read_prefix(file: BinaryIO) -> tuple[bytes, bytes]:
    magic, kind, check = _PREFIX.unpack(file.read(_PREFIX.size).ljust(_PREFIX.size))
    if magic != _MAGIC:
        is_other = magic.startswith(_ANY_MAGIC)
        raise EntryError(
            "another version of fastpipe wrote it" if is_other else "it is not an entry, or it is damaged"
        )
    if kind not in (_PLAIN, _SEALED):
        raise EntryError("it is damaged")
    return kind, check


def _read_checked(file: BinaryIO, kind: bytes, expected: bytes) -> tuple[bytes, list[ByteArray]]:
    """Verify the checksum; return the header and the blobs (byte arrays), each blob in its own memory."""
    left, check = os.fstat(file.fileno()).st_size - _PREFIX.size, _new_check(kind)

    def take(nbytes: int) -> ByteArray:
        nonlocal left
        if nbytes > left:  # memory must not be allocated for a wrong size
            raise EntryError("it is cut off, or damaged")
        left -= nbytes
        found = np.empty(nbytes, np.uint8)
        if file.readinto(found.data) != nbytes:  # type: ignore[attr-defined]
            raise EntryError("it is cut off")
        check.update(found.data)
        return found

    header_nbytes, count = _SIZES.unpack(take(_SIZES.size).data)
    header = take(header_nbytes).tobytes()
    blobs = [take(int(size)) for size in take(8 * count).view("<u8")]
    if left or not hmac.compare_digest(check.digest(), expected):
        what = "checksum is wrong: it is damaged"
        raise EntryError(
            f"its {what if kind == _PLAIN else 'signature is wrong: it is damaged, or another user wrote it'}"
        )
    return header, blobs


def _unpickled(blobs: list[ByteArray]) -> Any:
    first, *buffers = (blob.data for blob in blobs)
    return pickle.loads(first, buffers=buffers)


def _pickled(value: object) -> list[Bytes]:
    """Return the pickle of any value, followed by the memory of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return [content, *(buffer.raw() for buffer in buffers)]
    except MemoryError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise NotStorableError(f"it cannot be pickled: {type(error).__name__}: {error}") from error


# ---- plain values, which load without running code -----------------------------------------------------
#
# The format is that of pickle, restricted to Python's own values.  The format names no class and no function,
# and the reader rejects a file that does.  `_Writer` replaces every other value by a description of plain
# values, which `_Reader` decodes.  For example, the description of an array has the number of its blob.

_OWN = {type(None), bool, int, float, str, bytes, bytearray, list, tuple, set, frozenset, dict}


def encode(value: object) -> list[Bytes]:
    """Return a value as blobs (buffers of bytes), which may share the value's memory.

    Supported are None, numbers, strings, bytes, arrays, tensors, and lists, tuples, sets and dicts of these
    types.  Raises a NotStorableError if the value contains another type.
    """
    file = io.BytesIO()
    writer = _Writer(file)
    try:
        writer.dump(value)
    except _UnknownError as error:
        place = "".join(f"[{key!r}]" for key in _keys_to(error.part, value, set()) or ())
        raise NotStorableError(f"it{place} is {error}") from None
    except RecursionError:
        raise NotStorableError("it is nested too deep") from None
    if writer.tensors:  # save all tensors in one call, because some may share memory
        tensors = io.BytesIO()
        sys.modules["torch"].save(writer.tensors, tensors)
        writer.blobs.append(tensors.getbuffer())
    return [file.getbuffer(), *writer.blobs]


def decode(blobs: Sequence[ByteArray]) -> Any:
    """Return the value that ``encode`` turned into ``blobs``; arrays in the value use the blobs' memory.

    Invalid blobs may raise any exception.
    """
    return _Reader(blobs).load()


class _UnknownError(Exception):
    def __init__(self, part: object, words: str) -> None:
        super().__init__(words)
        self.part = part


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.blobs: list[Bytes] = []
        self.tensors: list[Any] = []

    def persistent_id(self, value: Any) -> Any:
        """Return a description of an array, a tensor or the like; None for values of Python's own types."""
        kind = type(value)
        if kind in _OWN:
            return None
        if kind is complex:
            return "complex", value.real, value.imag
        if kind in (np.str_, np.bytes_):  # not as arrays, which strip zeros at the end
            return kind.__name__, (str if kind is np.str_ else bytes)(value)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value)
        if kind is OrderedDict and not set(vars(value)) - {"_metadata"}:
            return (
                "OrderedDict",
                list(value.items()),
                vars(value),
            )  # the attributes of a state_dict hold the versions of layers
        torch = sys.modules.get("torch")
        if torch is None or kind not in (torch.Tensor, torch.nn.Parameter):
            raise _UnknownError(value, f"a {_words(value)}")
        is_part = (
            kind is torch.Tensor
            and value.layout == torch.strided
            and not value.is_quantized
            and value.untyped_storage().nbytes() > value.numel() * value.element_size()
        )
        if is_part:  # copy a part of a larger storage, because torch would write the whole storage
            value = value.detach().clone().requires_grad_(value.requires_grad)
        self.tensors.append(value)
        return "tensor", len(self.tensors) - 1

    def _array(self, value: Any) -> Any:
        words = _dtype_words(value.dtype)
        if words is None:
            raise _UnknownError(value, f"an array of dtype {value.dtype}, which NumPy's files do not keep")
        array = np.asarray(value)
        is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        flat = np.ascontiguousarray(array.T if is_fortran else array).reshape(-1)
        self.blobs.append(flat.view(np.uint8).data if flat.nbytes else b"")
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return kind, words, array.shape, is_fortran, len(self.blobs)


def _bytearray(reader: Any) -> None:
    reader.append(bytearray(reader.read(int.from_bytes(reader.read(8), "little"))))


# All opcodes that `_Writer` writes.  The sizes in these opcodes cannot make the reader allocate more bytes
# than the file has.  PUT is not in the list: for PUT, C's reader allocates a table as long as the index.
_STEPS = {
    ord(code): _bytearray if code == pickle.BYTEARRAY8 else pickle._Unpickler.dispatch[ord(code)]
    for code in (
        pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
        pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPERSID,
        pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT,
        pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4,
        pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
        pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8, pickle.BYTEARRAY8,
        pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET,
        pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
        pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    )
}  # fmt: skip


class _Reader(pickle._Unpickler):
    dispatch = _STEPS

    def __init__(self, blobs: Sequence[ByteArray]) -> None:
        super().__init__(io.BytesIO(blobs[0].data))
        self._blobs = blobs
        self._tensors: Any = None

    def load(self) -> Any:
        try:
            return super().load()
        except KeyError as error:  # an opcode that plain values do not use, such as the name of a class
            raise EntryError("it needs pickle, but its signature is missing") from error

    def persistent_load(self, found: Any) -> Any:
        kind, *content = found
        if kind == "complex":
            return complex(*content)
        if kind in ("str_", "bytes_"):
            return (np.str_ if kind == "str_" else np.bytes_)(*content)
        if kind in ("array", "scalar"):
            array = self._array(*content)
            return array if kind == "array" else array[()]
        if kind == "OrderedDict":
            made = OrderedDict(content[0])
            vars(made).update(content[1])
            return made
        if kind == "tensor":
            if self._tensors is None:
                self._tensors = _loaded_tensors(self._blobs[-1].tobytes())
            return self._tensors[content[0]]
        raise ValueError(f"there is no kind {kind!r} of value")

    def _array(self, words: Any, shape: tuple[int, ...], is_fortran: bool, number: int) -> Any:
        dtype, blob, count = np.lib.format.descr_to_dtype(words), self._blobs[number], math.prod(shape)
        is_possible = not dtype.hasobject and min(shape, default=0) >= 0
        if not is_possible or count * dtype.itemsize != blob.nbytes:  # check before allocating
            raise ValueError(f"there is no array {shape} of {dtype} in {blob.nbytes} bytes")
        flat = blob.view(dtype) if blob.nbytes else np.empty(count, dtype)
        return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)


def _keys_to(part: object, value: Any, seen: set[int]) -> list[Any] | None:
    """Return the keys and indices that lead from ``value`` to its part ``part``; None if there is no path."""
    if value is part:
        return []
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
        return None
    seen.add(id(value))
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if (found := _keys_to(part, one, seen)) is not None:
            return [key, *found]
    return None


def _dtype_words(dtype: np.dtype[Any]) -> Any:
    """Return how an .npy file describes a dtype; None if this description would not give the dtype back."""
    if dtype.hasobject or dtype.subdtype is not None or _has_metadata(dtype) or dtype.isbuiltin == 2:
        return None
    words: Any = np.lib.format.dtype_to_descr(dtype)
    if isinstance(words, str) and np.dtype(words).char != dtype.char:  # C's long long is as large as a long
        words = words[0] + dtype.char
    return words if np.lib.format.descr_to_dtype(words) == dtype else None


def _has_metadata(dtype: np.dtype[Any]) -> bool:
    if dtype.metadata is not None:
        return True
    if dtype.subdtype is not None:
        return _has_metadata(dtype.subdtype[0])
    return any(_has_metadata(field[0]) for field in (dtype.fields or {}).values())


def _loaded_tensors(content: bytes) -> Any:
    torch = require("torch", extra="torch")
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except RuntimeError:  # the tensors were on a device that does not exist here
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def _words(value: object) -> str:
    """Return a text with the type of a value; for a model, also name the value to return instead."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if any(one.__name__ == "KerasSaveable" for one in kind.__mro__):
        return f"{name}: return model.get_weights(), a list of arrays"
    if name.startswith("torch.nn.") or any(
        one.__module__ == "torch.nn.modules.module" for one in kind.__mro__
    ):
        return f"{name}: return model.state_dict()"
    return f"{name}: return an array, as its numpy() gives" if name.startswith("tensorflow.") else name


# ---- the key that seals pickled entries ----------------------------------------------------------------
#
# The key is in the user's settings folder, never in the folder of the entries.  So another user who writes
# into the folder of the entries, or copies the folder, does not have the key to seal an entry.

_KEY_NAME, _KEY_BYTES = "memoize.key", 32


def key_path() -> Path:
    """Return the path of the key for pickled results; on Linux usually ``~/.config/fastpipe/memoize.key``."""
    import platformdirs  # imported here, because most programs do not need platformdirs

    return platformdirs.user_config_path("fastpipe", appauthor=False) / _KEY_NAME


def sealing_key() -> bytes:
    """Return the user's key; create it on first use.  Raises a CacheError if other users can access it."""
    path = key_path()
    what = f"the key of pickled entries, {str(path)!r}"
    if not path.is_absolute():
        raise CacheError("there is no folder for the key of pickled entries: this user has no home")
    with PrivateFolder(path.parent) as folder:
        try:
            opened = os.fdopen(folder.open(_KEY_NAME, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        except OSError as error:
            raise CacheError(f"{what}, cannot be used: {error.strerror or error}") from error
        with opened as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            if status.st_uid != os.geteuid() or mode & 0o077:
                raise CacheError(
                    f"{what}, must be a file of user {os.geteuid()} that nobody else may open: it is of user "
                    f"{status.st_uid} and has mode {mode:04o}. Remove it; entries under it are computed again"
                )
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            key = file.read(_KEY_BYTES)
            if len(key) < _KEY_BYTES:  # the file is new, or its process ended before it had written the key
                key = secrets.token_bytes(_KEY_BYTES)
                file.seek(0)
                file.write(key)
                os.fsync(file.fileno())
            return key


def _new_check(kind: bytes) -> Any:
    """Return a new hash object: SHA-256 for a plain entry, HMAC-SHA256 for a sealed entry."""
    if kind == _PLAIN:
        return hashlib.sha256(kind)
    return hmac.new(sealing_key(), kind, digestmod="sha256")


# ---- locks: one thread of one process at a time computes the result of a key ---------------------------
#
# Each key has its own lock file, which exists only while the lock is held.  With a fixed number of files, two
# keys could share a lock.  If a computation then needed the result of the other key, it would deadlock.

_held: set[int] = set()  # open descriptors of lock files


_mine: set[tuple[int, str, str]] = set()  # locks that are held: thread, folder and name


def _own(folder: PrivateFolder, name: str) -> tuple[int, str, str]:
    return threading.get_ident(), str(folder.path), name


def is_computing(folder: PrivateFolder, name: str) -> bool:
    """Return whether this thread already holds the lock of the file ``name``, and so must not wait for it."""
    return _own(folder, name) in _mine


@contextlib.contextmanager
def computing(folder: PrivateFolder, name: str) -> Iterator[None]:
    """Hold the lock of an entry's file name during the ``with`` block.

    Other threads and processes wait for the lock, at most until this process ends.  If the file system has no
    locks, no thread or process waits.
    """
    own, lock = _own(folder, name), name + _LOCK_SUFFIX
    descriptor = _locked(folder, lock)
    _mine.add(own)
    try:
        yield
    finally:
        _mine.discard(own)
        if descriptor in _held:  # not in a forked child
            with contextlib.suppress(OSError):
                folder.remove(lock)  # a waiting process detects the removal, and creates a new file
            _drop(descriptor)


def _locked(folder: PrivateFolder, name: str) -> int:
    """Wait for the lock; return its file's descriptor, or -1 if the file system has no locks."""
    while True:
        descriptor, is_alone = folder.open(name, os.O_RDWR | os.O_CREAT), False
        _held.add(descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                entry = name.removesuffix(_LOCK_SUFFIX)
                _log.info("%s: another process is computing it; waiting for it", entry)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # the file was removed during the wait
                is_alone = os.path.samestat(folder.stat(name), os.fstat(descriptor))
            if is_alone:
                return descriptor
        except OSError as error:
            _log.warning("two processes may compute the same: %s cannot be locked (%s)", name, error)
            return -1
        finally:
            if not is_alone:
                _drop(descriptor)


def _drop(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _leave_to_the_parent() -> None:
    """Close the descriptors of locks in a forked child, so that only the parent holds the locks."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
