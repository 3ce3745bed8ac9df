"""Kept results in a folder, one file each, of which no byte is trusted before all have been checked.

::

    16 bytes   "fastpipe memo 2\\n": the format
     8         b"plain..." or b"sealed..": whether there is pickle inside
    32         plain: SHA-256 of all that follows; sealed: HMAC-SHA256 under the user's key
    16         sizes of header and tree
               header: JSON; of which call it is, and how long that took
               tree:   JSON; the value, and the sizes of the blobs
               blobs:  arrays and the like, each from a multiple of 64 bytes on
"""

from __future__ import annotations

import ast
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
from collections.abc import Callable, Iterator
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
except ImportError:  # on Windows, where nothing is kept
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "FORMAT",
    "Entries",
    "EntryError",
    "Header",
    "NeedsPickleError",
    "NotStorableError",
    "computing",
    "decode",
    "encode",
    "is_computing",
    "key_path",
    "sealing_key",
]

FORMAT = 2
_SUFFIX, _LOCK_SUFFIX = ".memo", ".lock"
_MAGIC, _ANY_MAGIC = b"fastpipe memo %d\n" % FORMAT, b"fastpipe memo "
_PLAIN, _SEALED = b"plain...", b"sealed.."
_PREFIX, _SIZES = struct.Struct("<16s8s32s"), struct.Struct("<QQ")
_ALIGNMENT = 64
_PIECE = 1 << 20
_MOST_HEADERS = 200
_LARGEST_HEADER = 1 << 26
_log = logging.getLogger("fastpipe.memoize")

Bytes = bytes | memoryview
ByteArray = npt.NDArray[np.uint8]


class EntryError(Exception):
    """An entry cannot be read: it is damaged, forged, or of another format."""


class NeedsPickleError(Exception):
    """An entry is sealed, and pickle was not asked for."""


class NotStorableError(TypeError):
    """A value has a part that is not kept without pickle; the message says which."""


@dataclass(frozen=True)
class Header:
    """The call that an entry is of.

    Attributes:
        name: the function's.
        key: of the call; also in the file's name.
        parts: the parts of the function's code.
        arguments: digests by name.
        data: digests of the files that arguments name, by the arguments' names.
        seconds: how long it took to compute.
    """

    name: str
    key: str
    parts: dict[str, str]
    arguments: dict[str, str]
    data: dict[str, str]
    seconds: float = 0.0

    @classmethod
    def from_json(cls, content: bytes) -> Header:
        """Read a header.

        Raises:
            ValueError, TypeError: it is none.
        """
        found = cls(**json.loads(content))
        if not all(isinstance(one, dict) for one in (found.parts, found.arguments, found.data)):
            raise ValueError("it is no header")
        return found


class Entries:
    """The entries of one function in a folder.

    Args:
        folder: where they are.
        name: the function's: ``"module:name"``.
    """

    def __init__(self, folder: PrivateFolder, name: str) -> None:
        self._folder, self._name = folder, name
        words = re.sub(r"[^A-Za-z0-9_]+", "-", name.partition(":")[2]).strip("-")[:40] or "function"
        self._prefix = f"{words}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-"

    def file_name(self, key: str) -> str:
        """Return the name of the file with the entry of a key."""
        return f"{self._prefix}{key}{_SUFFIX}"

    def load(self, key: str, *, pickled: bool) -> tuple[Header, Any]:
        """Return an entry's header and value.

        Args:
            key: of the call.
            pickled: whether what the user has sealed may be unpickled.

        Raises:
            FileNotFoundError: there is none.
            NeedsPickleError: it is sealed, and ``pickled`` is false.
            EntryError: it is damaged, sealed by somebody else, or cannot be made again.
            OSError, MemoryError: it cannot be read now, or the key cannot.
        """
        with self._opened(self.file_name(key)) as file:
            kind, check = _read_prefix(file)
            if kind == _SEALED and not pickled:
                raise NeedsPickleError
            content = _Content(file, whole=kind == _SEALED)
            if not hmac.compare_digest(content.digest(_new_check(kind)), check):
                what = "seal is wrong: it is damaged, or not of this user"
                raise EntryError(f"its {'checksum is wrong: it is damaged' if kind == _PLAIN else what}")
            try:
                header, value = _read(content, kind)
            except (EntryError, MemoryError):
                raise
            except Exception as error:
                raise EntryError(
                    f"what is inside cannot be made again: {type(error).__name__}: {error}"
                ) from error
        if header.key != key or header.name != self._name:
            raise EntryError("it is the entry of another call, under this one's name")
        return header, value

    def store(self, header: Header, value: object, *, pickled: bool) -> None:
        """Keep a value.

        Args:
            header: of the call.
            value: anything that ``encode`` takes.
            pickled: whether anything else may be pickled and sealed.

        Raises:
            NotStorableError: it is something else.
            OSError: it cannot be written.
        """
        try:
            kind, (tree, blobs) = _PLAIN, encode(value)
        except NotStorableError:
            if not pickled:
                raise
            kind, (tree, blobs) = _SEALED, _pickled(value)
        first = json.dumps(asdict(header), allow_nan=False).encode()
        second = json.dumps({**tree, "blobs": [len(one) for one in blobs]}, allow_nan=False).encode()
        second += b" " * _padding(_SIZES.size + len(first) + len(second))
        pieces: list[Bytes] = [_SIZES.pack(len(first), len(second)), first, second]
        for blob in blobs:
            pieces += [blob, bytes(_padding(len(blob)))]
        check = _new_check(kind)
        for piece in pieces:
            check.update(piece)
        prefix = _PREFIX.pack(_MAGIC, kind, check.digest())
        self._folder.write(self.file_name(header.key), lambda file: file.writelines([prefix, *pieces]))

    def set_aside(self, key: str) -> str | None:
        """Give an entry's file another name, in the place of what has it; None if it is gone."""
        aside = f"{self.file_name(key)}.corrupt"
        try:
            self._folder.rename(self.file_name(key), aside)
        except FileNotFoundError:
            return None
        return aside

    def headers(self) -> list[Header]:
        """Return the headers of the newest entries that can be read."""
        times: dict[str, int] = {}
        for name in self._names():
            with contextlib.suppress(FileNotFoundError):
                times[name] = self._folder.stat(name).st_mtime_ns
        found = []
        for name in sorted(times, key=lambda name: -times[name])[:_MOST_HEADERS]:
            with contextlib.suppress(OSError, EntryError, ValueError, TypeError), self._opened(name) as file:
                _read_prefix(file)
                size, _ = _SIZES.unpack(file.read(_SIZES.size).ljust(_SIZES.size))
                found.append(Header.from_json(file.read(min(size, _LARGEST_HEADER))))
        return found

    def clear(self) -> int:
        """Remove all entries, but not what was set aside; return how many there were."""
        names = self._names()
        for name in names:
            self._folder.remove(name)
        return len(names)

    def _names(self) -> list[str]:
        return [
            name for name in self._folder.names() if name.startswith(self._prefix) and name.endswith(_SUFFIX)
        ]

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        with os.fdopen(self._folder.open(name, os.O_RDONLY), "rb", buffering=0) as file:
            yield file


def _read_prefix(file: BinaryIO) -> tuple[bytes, bytes]:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise EntryError("it is cut off")
    magic, kind, check = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        is_other = magic.startswith(_ANY_MAGIC)
        raise EntryError("another version of fastpipe wrote it" if is_other else "it is no entry, or damaged")
    if kind not in (_PLAIN, _SEALED):
        raise EntryError("it is damaged")
    return kind, check


class _Content:
    """What is behind an entry's prefix: first all of it is checked, then parts are taken one by one.

    Args:
        file: after its prefix.
        whole: keep what is checked, and take parts of that, whatever becomes of the file meanwhile.  Else
            parts are read once more, each into memory of its own: so only one copy is in memory.
    """

    def __init__(self, file: BinaryIO, *, whole: bool) -> None:
        self._file, self._left = file, os.fstat(file.fileno()).st_size - _PREFIX.size
        self._rest = np.empty(self._left if whole else min(self._left, _PIECE), np.uint8)
        self._whole = whole

    def digest(self, check: Any) -> bytes:
        """Return the digest of all."""
        for begin in range(0, self._left, _PIECE):
            piece = self._rest[begin:] if self._whole else self._rest
            piece = piece[: min(_PIECE, self._left - begin)]
            _fill(self._file, piece.data)
            check.update(piece.data)
        self._file.seek(_PREFIX.size)
        return bytes(check.digest())

    def take(self, nbytes: int) -> ByteArray:
        """Return the next bytes."""
        if not 0 <= nbytes <= self._left:
            raise EntryError("it is cut off")
        self._left -= nbytes
        if self._whole:
            found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        else:
            found = np.empty(nbytes, np.uint8)
            _fill(self._file, found.data)
        return found


def _read(content: _Content, kind: bytes) -> tuple[Header, Any]:
    """What is in an entry whose bytes were checked."""
    sizes = _SIZES.unpack(content.take(_SIZES.size).data)
    header = Header.from_json(content.take(sizes[0]).tobytes())
    tree = json.loads(content.take(sizes[1]).tobytes())
    blobs = []
    for size in tree["blobs"]:
        blobs.append(content.take(size))
        content.take(_padding(size))
    if kind == _SEALED:
        first, *buffers = (blob.data for blob in blobs)
        return header, pickle.loads(first, buffers=buffers)
    if "value" not in tree:
        raise EntryError("it needs pickle, and its seal is missing")
    return header, decode(tree, blobs)


def _pickled(value: object) -> tuple[dict[str, Any], list[Bytes]]:
    """A value as pickle has it, arrays beside it in their own memory."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return {"pickle": 5}, [content, *(buffer.raw() for buffer in buffers)]
    except MemoryError:
        raise
    except Exception as error:  # any that code of the user's raises
        raise NotStorableError(f"it cannot be pickled: {type(error).__name__}: {error}") from error


def _padding(nbytes: int) -> int:
    return -nbytes % _ALIGNMENT


def _fill(file: BinaryIO, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise EntryError("it is cut off")
        done += count


# ---- values as a tree of JSON and blobs, without pickle ------------------------------------------------
#
# What is restored equals what was kept in types and bits; but two parts of a value that are one object become
# two.  Reading runs no code but NumPy's own and, for tensors, ``torch.load(weights_only=True)``.

_DEEPEST = 100  # JSON's reader and writer go as deep as Python's stack
_JSON_INTS = 1 << 63
_one, _two = struct.Struct(">d"), struct.Struct(">dd")
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset,
}  # fmt: skip
_BLOBS: dict[str, Callable[[bytes], Any]] = {"bytes": bytes, "bytearray": bytearray, "bytes_": np.bytes_}
# What JSON has not, as text, and back: large ints, floats that are not finite, halves of characters.
_TEXTS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (hex, lambda text: int(text, 16)),
    "float": (lambda value: _one.pack(value).hex(), lambda text: _one.unpack(bytes.fromhex(text))[0]),
    "complex": (
        lambda value: _two.pack(value.real, value.imag).hex(),
        lambda text: complex(*_two.unpack(bytes.fromhex(text))),
    ),
    "str": (
        lambda value: value.encode("utf-8", "surrogatepass").hex(),
        lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
}
_TEXTS["str_"] = _TEXTS["str"][0], lambda text: np.str_(_TEXTS["str"][1](text))
_KINDS: dict[type, str] = {
    kind: kind.__name__
    for kind in (list, tuple, set, frozenset, bytes, bytearray, np.bytes_, int, float, complex, str, np.str_)
}

_Place = tuple[Any, Any]  # the place of what is around it, and the key or index there


def encode(value: object) -> tuple[dict[str, Any], list[Bytes]]:
    """Return a value as a tree for JSON, and blobs, which may be memory of the value's own.

    Raises:
        NotStorableError: it holds something else than None, numbers, strings, bytes, arrays, tensors, and
            lists, tuples, sets and dicts of those.

    >>> encode([1, 2.5, "x"])
    ({'value': ['list', [1, 2.5, 'x']], 'tensors': None}, [])
    """
    encoder = _Encoder()
    return {"value": encoder.node(value, ("it", None)), "tensors": encoder.all_tensors()}, encoder.blobs


def decode(tree: Any, blobs: list[ByteArray]) -> Any:
    """Return the value again.

    Args:
        tree: as ``encode`` made it.
        blobs: likewise; an array may have the memory of its blob.

    Raises:
        Exception: of any kind, if tree and blobs are not of ``encode``.
    """
    tensors: Any = None if tree["tensors"] is None else _loaded_tensors(blobs[tree["tensors"]].tobytes())

    def value(node: Any) -> Any:
        if isinstance(node, dict):
            raise ValueError("a dict of JSON is no node")
        if not isinstance(node, list):
            return node
        kind, *content = node
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([value(one) for one in content[0]])
        if kind in _TEXTS:
            return _TEXTS[kind][1](*content)
        if kind in _BLOBS:
            return _BLOBS[kind](blobs[content[0]].tobytes())
        if kind == "array":
            return _array(blobs, *content)
        if kind == "scalar":
            return _array(blobs, *content)[()]
        if kind == "tensor":
            return tensors[content[0]]
        if kind == "dict":
            return {value(key): value(one) for key, one in content[0]}
        if kind == "OrderedDict":
            made: Any = OrderedDict((value(key), value(one)) for key, one in content[0])
            for name, note in value(content[1]).items():
                if name != "_metadata":
                    raise ValueError(f"an OrderedDict has no attribute {name!r}")
                made._metadata = note
            return made
        raise ValueError(f"there is no kind {kind!r} of value")

    return value(tree["value"])


def _array(blobs: list[ByteArray], words: str, shape: Any, is_fortran: bool, number: int) -> Any:
    dtype, blob, count = _dtype_of(words), blobs[number], math.prod(shape)
    is_possible = not dtype.hasobject and min(shape, default=0) >= 0
    if not is_possible or count * dtype.itemsize != blob.nbytes:  # before any memory is asked for
        raise ValueError(f"there is no array {shape} of {dtype} in {blob.nbytes} bytes")
    flat = blob.view(dtype) if blob.nbytes else np.empty(count, dtype)
    return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)


class _Encoder:
    def __init__(self) -> None:
        self.blobs: list[Bytes] = []
        self._tensors: dict[str, Any] = {}
        self._depth = 0

    def node(self, value: Any, place: _Place) -> Any:
        """A part of the tree: what JSON has itself, or a list of its kind and content."""
        kind = type(value)
        if value is None or kind is bool or (kind is int and -_JSON_INTS < value < _JSON_INTS):
            return value
        if (kind is float and value - value == 0) or (kind is str and _is_text(value)):
            return value
        name = _KINDS.get(kind, "")
        if name in _TEXTS:
            return [name, _TEXTS[name][0](value)]
        if name in _BLOBS:
            return [name, self._blob(bytes(value))]
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, place)
        if name not in _SEQUENCES and kind not in (dict, OrderedDict):
            return self._tensor(value, place)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotStorableError(f"{_words_of(place)[:60]}… is nested too deep, or holds itself")
        if name in _SEQUENCES:
            node: Any = [name, [self.node(one, (place, at)) for at, one in enumerate(value)]]
        else:
            pairs = [[self.node(key, place), self.node(one, (place, key))] for key, one in value.items()]
            node = ["dict", pairs]
            if kind is OrderedDict:
                notes = vars(value)  # a state_dict has the versions of its layers there
                if set(notes) - {"_metadata"}:
                    raise NotStorableError(f"{_words_of(place)} is an OrderedDict with attributes")
                node = ["OrderedDict", pairs, self.node(dict(notes), place)]
        self._depth -= 1
        return node

    def all_tensors(self) -> int | None:
        """The blob with all tensors; None without any.  They are in one, as some share their memory."""
        if not self._tensors:
            return None
        file = io.BytesIO()
        sys.modules["torch"].save(self._tensors, file)
        return self._blob(file.getbuffer())

    def _blob(self, blob: Bytes) -> int:
        self.blobs.append(blob)
        return len(self.blobs) - 1

    def _array(self, value: Any, place: _Place) -> Any:
        words = _dtype_words(value.dtype)
        if words is None:
            raise NotStorableError(
                f"{_words_of(place)} is an array of dtype {value.dtype}, which NumPy's files do not keep"
            )
        array = np.asarray(value)
        is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        flat = np.ascontiguousarray(array.T if is_fortran else array).reshape(-1)
        blob = self._blob(flat.view(np.uint8).data if flat.nbytes else b"")
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return [kind, words, list(array.shape), is_fortran, blob]

    def _tensor(self, value: Any, place: _Place) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise NotStorableError(f"{_words_of(place)} is a {_words(value)}")
        is_part = (
            type(value) is torch.Tensor
            and value.layout == torch.strided
            and not value.is_quantized
            and value.untyped_storage().nbytes() > value.numel() * value.element_size()
        )
        if is_part:  # of a larger memory, all of which would be written
            value = value.detach().clone().requires_grad_(value.requires_grad)
        name = str(len(self._tensors))
        self._tensors[name] = value
        return ["tensor", name]


def _is_text(value: str) -> bool:
    """Whether a string has whole characters only."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _words_of(place: _Place) -> str:
    keys = []
    while place[1] is not None or isinstance(place[0], tuple):
        keys.append(f"[{place[1]!r}]")
        place = place[0]
    return "".join((str(place[0]), *reversed(keys)))


def _dtype_words(dtype: np.dtype[Any]) -> str | None:
    """A dtype as the header of an .npy has it; None if that is not the same dtype again."""
    if dtype.hasobject or dtype.subdtype is not None or _has_metadata(dtype) or dtype.isbuiltin == 2:
        return None
    descr: Any = np.lib.format.dtype_to_descr(dtype)
    if isinstance(descr, str) and np.dtype(descr).char != dtype.char:  # a C long long, of a long's size
        descr = descr[0] + dtype.char
    if dtype.isalignedstruct:
        descr = ("aligned", descr)
    words = repr(descr)
    return words if _dtype_of(words) == dtype else None


def _dtype_of(words: str) -> np.dtype[Any]:
    descr = ast.literal_eval(words)
    is_aligned = isinstance(descr, tuple) and descr[0] == "aligned"
    made: Any = np.lib.format.descr_to_dtype(descr[1] if is_aligned else descr)
    if not is_aligned:
        return made  # type: ignore[no-any-return]
    fields = [made.fields[name] for name in made.names]
    content: Any = {"names": made.names, "itemsize": made.itemsize, "aligned": True}
    content |= {"formats": [field[0] for field in fields], "offsets": [field[1] for field in fields]}
    return np.dtype(content)  # type: ignore[no-any-return]


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
    except RuntimeError:  # they were on a device that is not there
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def _words(value: object) -> str:
    """What something is, and what to return instead."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if any(one.__name__ == "KerasSaveable" for one in kind.__mro__):
        return f"{name}: return model.get_weights(), a list of arrays"
    is_module = any(one.__module__ == "torch.nn.modules.module" for one in kind.__mro__)
    if is_module or name.startswith("torch.nn."):
        return f"{name}: return model.state_dict()"
    if name.startswith("tensorflow."):
        return f"{name}: return an array, as its numpy() gives"
    return name


# ---- the key that seals what is pickled ----------------------------------------------------------------
#
# It lies in the user's folder of settings, never beside the entries: whoever else makes entries, or puts a
# folder of them there, has no key to seal them with.

_KEY_NAME, _KEY_BYTES = "memoize.key", 32


def key_path() -> Path:
    """Return where the key is, or will be: ``~/.config/fastpipe/memoize.key``, or by ``XDG_CONFIG_HOME``."""
    import platformdirs  # most programs never need it

    return platformdirs.user_config_path("fastpipe", appauthor=False) / _KEY_NAME


def sealing_key() -> bytes:
    """Return the user's key, which is made when it is first needed.

    Raises:
        CacheError: its folder or file cannot be used, or is not the user's alone.
    """
    path = key_path()
    if not path.is_absolute():
        raise CacheError("there is no folder for the key of pickled entries: this user has no home")
    with PrivateFolder(path.parent) as folder:
        try:
            descriptor = folder.open(_KEY_NAME, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise CacheError(
                f"the key of pickled entries, {str(path)!r}, cannot be used: {error.strerror or error}"
            ) from error
        try:
            status = os.fstat(descriptor)
            mode = stat.S_IMODE(status.st_mode)
            if status.st_uid != os.geteuid() or mode & 0o077:
                raise CacheError(
                    f"the key of pickled entries, {str(path)!r}, must be a file of user {os.geteuid()} "
                    f"that nobody else may open: it is of user {status.st_uid} and has mode {mode:04o}. "
                    "Remove it; entries under it are computed again then"
                )
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # ends as the descriptor is closed
            key = os.pread(descriptor, _KEY_BYTES, 0)
            if len(key) < _KEY_BYTES:  # new, or of somebody who ended just then and has sealed nothing
                key = secrets.token_bytes(_KEY_BYTES)
                os.pwrite(descriptor, key, 0)
                os.fsync(descriptor)
            return key
        finally:
            os.close(descriptor)


def _new_check(kind: bytes) -> Any:
    """What makes the checksum or the seal of an entry."""
    if kind == _PLAIN:
        return hashlib.sha256(kind)
    return hmac.new(sealing_key(), kind, digestmod="sha256")


# ---- one at a time for each key, among threads and processes -------------------------------------------
#
# Each key has a lock of its own, in a file that is there only while it is held.  With a fixed number of files
# two keys would share one, and a computation of one of them that needs the other would wait for ever.

_held: set[int] = set()  # descriptors


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()


_mine = _OfThread()


def is_computing(folder: PrivateFolder, name: str) -> bool:
    """Return whether this thread is inside ``computing`` of the same name: it must not wait for itself."""
    return (str(folder.path), name) in _mine.names


@contextlib.contextmanager
def computing(folder: PrivateFolder, name: str) -> Iterator[None]:
    """Be alone with a key, until this process ends, however it does; others wait.

    Without locks of the file system nobody waits.

    Args:
        folder: where the lock's file is.
        name: the key's.
    """
    own, lock = (str(folder.path), name), name + _LOCK_SUFFIX
    descriptor = _locked(folder, lock)
    _mine.names.add(own)
    try:
        yield
    finally:
        _mine.names.discard(own)
        if descriptor in _held:  # else this is a forked child
            with contextlib.suppress(OSError):
                folder.remove(lock)  # whoever waits for it notices, and makes another one
            _drop(descriptor)


def _locked(folder: PrivateFolder, name: str) -> int:
    """A descriptor of the lock's file, locked; -1 where there are no locks."""
    while True:
        descriptor = folder.open(name, os.O_RDWR | os.O_CREAT)
        _held.add(descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                entry = name.removesuffix(_LOCK_SUFFIX)
                _log.info("%s: somebody else computes it just now, and is waited for", entry)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # it was removed while it was waited for
                if os.path.samestat(folder.stat(name), os.fstat(descriptor)):
                    return descriptor
        except OSError as error:
            _log.warning("two processes may compute the same: %s cannot be locked (%s)", name, error)
            _drop(descriptor)
            return -1
        except BaseException:
            _drop(descriptor)
            raise
        _drop(descriptor)


def _drop(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _leave_to_the_parent() -> None:
    """In a forked child, which would hold the locks after its parent's end."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
